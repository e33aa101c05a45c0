"""All that people do to a running fleet: look, change, and be told what that would break; each change is signed."""

from headgate.control.service.errors import LogUnavailable, NeedsConfirmation, NotAllowed, NotFound, Risk
from headgate.control.service.models import ROLES, Actor, Change, ClientRef, Page
from headgate.control.service.service import AdminService

__all__ = [
    "ROLES",
    "Actor",
    "AdminService",
    "Change",
    "ClientRef",
    "LogUnavailable",
    "NeedsConfirmation",
    "NotAllowed",
    "NotFound",
    "Page",
    "Risk",
]
