"""All that people do to a running fleet: look, change, and be told what that would break; each change is signed."""

from headgate.control.desk.desk import Desk
from headgate.control.desk.errors import Danger, LogUnavailable, NeedsConfirmation, NotAllowed, NotFound
from headgate.control.desk.views import ROLES, Actor, Change, Page, Who

__all__ = [
    "ROLES",
    "Actor",
    "Change",
    "Danger",
    "Desk",
    "LogUnavailable",
    "NeedsConfirmation",
    "NotAllowed",
    "NotFound",
    "Page",
    "Who",
]
