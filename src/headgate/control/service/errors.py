"""Errors of the admin service.

HeadgateError
├── NotAllowed                            the actor's role is too low; `needed` is the role required
├── NotFound                              no such client, override, block or version
├── NeedsConfirmation                     a change that is probably a mistake; `risks` says why
└── LogUnavailable                        the decision log cannot be read
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.control.service.models import Role

__all__ = [
    "LogUnavailable", "NeedsConfirmation", "NotAllowed", "NotFound", "Risk", "hide_address", "log_and_summarize",
]  # fmt: skip

logger = logging.getLogger("headgate")

LOG_INTERVAL_S: Final = 60.0
"""Interval at which the same error is logged again, however often it occurs."""

_ADDRESS: Final = re.compile(r"://|:\d{2,5}\b|\b\d+\.\d+\.\d+\.\d+\b|\b(?:host|port)\b|\.sock\b")
_last_logged: Final[dict[str, tuple[str, float]]] = {}


class Risk(NamedTuple):
    """A reason why a change is probably a mistake."""

    code: Literal["ten-times", "tenth", "wildcard-block", "policy", "canary"]
    """The code with which an actor confirms the risk."""
    text: str


class NotAllowed(HeadgateError):
    """The actor's role is too low; nothing was changed."""

    def __init__(self, what: str, *, role: str, needed: Role) -> None:
        article = "an" if needed in ("admin", "operator") else "a"
        super().__init__(f"Your role ({role}) can't {what}. Ask {article} {needed}.")
        self.needed = needed


class NotFound(HeadgateError):
    """A client, override, block or version that doesn't exist."""


class NeedsConfirmation(HeadgateError):
    """A change that is probably a mistake and was not confirmed; nothing was changed."""

    def __init__(self, risks: Iterable[Risk]) -> None:
        self.risks = tuple(risks)
        super().__init__("; ".join(risk.text for risk in self.risks))


class LogUnavailable(HeadgateError):
    """The decision log cannot be read."""


def log_and_summarize(summary: str, error: Exception) -> str:
    """Log an error, and return the summary for people who need not know the addresses of stores."""
    cause, now = str(error).strip().partition("\n")[0][:300], time.monotonic()
    last_cause, logged_at = _last_logged.get(summary, ("", 0.0))
    if cause != last_cause or now - logged_at >= LOG_INTERVAL_S:
        _last_logged[summary] = cause, now
        logger.warning("%s: %s", summary, cause)
    return summary


def hide_address(text: str, replacement: str) -> str:
    """The text, or the replacement if it contains the address of a server.

    >>> hide_address("connecting to 10.0.0.7:6379: refused", "its store is away"), hide_address("no policy", "?")
    ('its store is away', 'no policy')
    """
    return replacement if _ADDRESS.search(text) else text
