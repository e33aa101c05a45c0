"""What the desk refuses beside what cannot be: too low a role, what is not there, and what wants a second look.

HeadgateError
├── NotAllowed                            the role is too low; `needed` is the one that may
├── NotFound                              there is no such client, override, block or version
├── NeedsConfirmation                     it can be done, and is probably a mistake; `risks` says why
└── LogUnavailable                        the decision log cannot be read now
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

__all__ = ["LogUnavailable", "NeedsConfirmation", "NotAllowed", "NotFound", "Risk", "discreet", "without_place"]

logger = logging.getLogger("headgate")

TOLD_AGAIN: Final = 60.0
"""Seconds after which the log hears again of the same trouble, however often somebody looks."""

_PLACE: Final = re.compile(r"://|:\d{2,5}\b|\b\d+\.\d+\.\d+\.\d+\b|\b(?:host|port)\b|\.sock\b")
"""What there is in a text that says where a server is."""
_told: Final[dict[str, tuple[str, float]]] = {}


class Risk(NamedTuple):
    """Why a change is probably a mistake."""

    code: Literal["ten-times", "tenth", "wildcard-block", "policy"]
    """What is confirmed."""
    text: str


class NotAllowed(HeadgateError):
    """The role of whoever asked is too low; nothing was done."""

    def __init__(self, what: str, *, role: str, needed: Role) -> None:
        article = "an" if needed in ("admin", "operator") else "a"
        super().__init__(f"Your role ({role}) can't {what}. Ask {article} {needed}.")
        self.needed = needed


class NotFound(HeadgateError):
    """A client, override, block or version that doesn't exist."""


class NeedsConfirmation(HeadgateError):
    """A change that is probably a mistake, and was not confirmed; nothing was done."""

    def __init__(self, risks: Iterable[Risk]) -> None:
        self.risks = tuple(risks)
        super().__init__("; ".join(risk.text for risk in self.risks))


class LogUnavailable(HeadgateError):
    """The decision log cannot be read now."""


def discreet(what: str, error: Exception) -> str:
    """What everybody may read of a trouble. Only the server's log says why, as that says where stores are."""
    why, now = str(error).strip().partition("\n")[0][:300], time.monotonic()
    before, told_at = _told.get(what, ("", 0.0))
    if why != before or now - told_at >= TOLD_AGAIN:
        _told[what] = why, now
        logger.warning("%s: %s", what, why)
    return what


def without_place(text: str, instead: str) -> str:
    """What a node or a board has said, for those who need not know where stores are.

    >>> without_place("connecting to 10.0.0.7:6379: refused", "its store is away"), without_place("no policy", "?")
    ('its store is away', 'no policy')
    """
    return instead if _PLACE.search(text) else text
