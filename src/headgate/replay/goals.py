"""Goals of a suggestion, in words: "reject at most 0.1 % of paying clients' requests, total below 800/s"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DEFAULT_SHARE", "Goals", "parse_goals"]

DEFAULT_SHARE: Final = 0.001
SECONDS: Final = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_REJECT: Final = re.compile(
    rf"reject (?:at most|less than|below|under) {_NUMBER} ?%(?: of (?:the )?(?:requests|([\w-]+)"
    r"(?: clients?)?(?:'s?)?(?: requests)?))?"
)
_CAP_SHARE: Final = re.compile(rf"keep (?:each|every) client (?:below|under|at most) {_NUMBER} ?% of (?:the )?peak")
_CAP_RATE: Final = re.compile(rf"keep (?:each|every) client (?:below|under|at most) {_NUMBER} ?(?:/|per) ?(\w+)")
_TOTAL: Final = re.compile(rf"(?:keep )?(?:the )?total (?:below|under|at most) {_NUMBER} ?(?:/|per) ?(\w+)")
_EXAMPLES: Final = (
    '"reject at most 0.1% of paying clients\' requests", "keep each client below 5% of the peak", '
    '"keep each client below 100/minute" or "total below 800/s"'
)


@dataclass(slots=True)
class Goals:
    """Parsed goals."""

    texts: list[str]
    share: float = DEFAULT_SHARE
    """The largest share of requests that may be rejected."""
    group: str | None = None
    """The tier whose requests count for it, or "paying"; None for all."""
    cap_share: float | None = None
    """The largest share of the busiest minute that one client may have."""
    cap_per_minute: float | None = None
    total: tuple[int, int] | None = None
    """The largest number of requests of all clients in so many seconds."""


def parse_goals(texts: Sequence[str]) -> Goals:
    """Parse goals, several of which may be in one text, separated by commas; InvalidInput for anything else.

    >>> goals = parse_goals(["reject at most 0.1 % of paying clients' requests, total below 800/s"])
    >>> goals.share, goals.group, goals.total
    (0.001, 'paying', (800, 1))
    """
    goals = Goals([])
    for text in [part.strip() for each in texts for part in each.split(",")]:
        words = re.sub(r"^and ", "", " ".join(text.lower().split()))
        if not words:
            continue
        goals.texts.append(words)
        if found := _REJECT.fullmatch(words):
            goals.share, goals.group = float(found[1]) / 100, found[2]
            if not 0 < goals.share < 1:
                raise InvalidInput(f"goal {text!r}: {found[1]} % is not a share above 0 and below 100 %")
        elif found := _CAP_SHARE.fullmatch(words):
            goals.cap_share = float(found[1]) / 100
        elif found := _CAP_RATE.fullmatch(words):
            goals.cap_per_minute = float(found[1]) * 60 / _seconds(found[2], text)
        elif found := _TOTAL.fullmatch(words):
            goals.total = max(1, int(float(found[1]))), _seconds(found[2], text)
        else:
            raise InvalidInput(f"goal {text!r} is not understood; write {_EXAMPLES}")
    return goals


def _seconds(unit: str, text: str) -> int:
    seconds = SECONDS.get(unit) or SECONDS.get(unit.removesuffix("s"))
    if seconds is None:
        raise InvalidInput(f"goal {text!r}: unknown unit {unit!r}; write /s, /minute or /hour")
    return seconds
