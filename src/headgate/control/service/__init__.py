"""The services behind the admin API, pages and CLI: views of a running fleet, and changes to its configuration."""

from headgate.control.service.errors import LogUnavailable, NeedsConfirmation, NotAllowed, NotFound, Risk
from headgate.control.service.models import ROLES, Actor, Change, ChangeContext, ClientRef, OverrideSpec, Page
from headgate.control.service.service import AdminService

__all__ = [
    "ROLES", "Actor", "AdminService", "Change", "ChangeContext", "ClientRef", "LogUnavailable", "NeedsConfirmation",
    "NotAllowed", "NotFound", "OverrideSpec", "Page", "Risk",
]  # fmt: skip
