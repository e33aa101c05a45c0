"""Restrictions: the clients whose requests are limited further, held back or challenged, until an instant.

Each client has one record in the store, with one restriction for each scenario that has found it. A record stays after
its restrictions have ended, until their levels have decayed: a client that is found again climbs to the next step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from headgate.clock import DAY_US, SECOND_US
from headgate.limits import EXACT
from headgate.local.live_list import LiveList

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_DELAY_US", "MAX_DIFFICULTY", "MAX_FACTOR", "ActionKind", "ChallengeMode", "ClientRestrictions",
    "Restriction", "RestrictionList", "encode_restrictions", "read_restrictions",
]  # fmt: skip

ActionKind: TypeAlias = Literal["tighten", "delay", "challenge", "block"]
ChallengeMode: TypeAlias = Literal["page", "redirect", "app"]

MAX_DELAY_US: Final = 10_000_000
"""The longest time that a response is held back."""
MAX_FACTOR: Final = 1_000
MAX_DIFFICULTY: Final = 24
"""Leading zero bits of a proof of work: 16 million hashes on average, half a minute of a phone."""
MAX_SCENARIOS: Final = 100
MAX_TEXT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Restriction:
    """An action on a client because of one scenario."""

    scenario: str
    action: ActionKind
    level: int
    """The number of findings that have led here, less those that have decayed; the first is 1."""
    at_us: int
    """The time of the finding, at which the action has begun."""
    until_us: int
    """The end of the action."""
    forget_us: int
    """The time at which the level has decayed to 0, and the grace time after an undo is over."""
    evidence: str = ""
    """The observation behind it, as a clause: "45 accounts were tried from 198.51.100.0/24 in one minute"."""
    factor: int = 1
    """Of "tighten": limits are divided by it."""
    delay_us: int = 0
    """Of "delay": the time for which each request is held back."""
    mode: ChallengeMode = "page"
    """Of "challenge": the way in which it is presented."""
    url: str = ""
    """Of the mode "redirect": the page of the app that presents it."""
    difficulty: int = 0
    """Of the mode "page": the leading zero bits of the proof of work."""
    shadow: bool = False
    """True if it is recorded and not applied."""
    undone_us: int | None = None
    """The time at which a person has ended it. The same scenario does not act on the client again before
    `forget_us`."""
    undone_by: str = ""

    def applies_at(self, now_us: int) -> bool:
        return self.undone_us is None and not self.shadow and now_us < self.until_us

    def is_shown_at(self, now_us: int) -> bool:
        """True while it is in force, or would be if it were not in shadow mode."""
        return self.undone_us is None and now_us < self.until_us

    @property
    def effect(self) -> str:
        """The action in words: "Delayed by 2 s"."""
        would = "would be " if self.shadow else ""
        words = {
            "tighten": f"limits {would}divided by {self.factor}",
            "delay": f"{would}delayed by {self.delay_us / SECOND_US:g} s",
            "challenge": f"{would}challenged",
            "block": f"{would}blocked",
        }[self.action]
        return f"{words[0].upper()}{words[1:]}"

    @property
    def sentence(self) -> str:
        """The whole explanation, in one sentence.

        >>> Restriction(
        ...     "credential-stuffing", "delay", 2, 0, 54_600_000_000, 0, delay_us=2_000_000,
        ...     evidence="45 accounts were tried from 198.51.100.0/24 in one minute",
        ... ).sentence
        'Delayed by 2 s until 15:10: 45 accounts were tried from 198.51.100.0/24 in one minute (credential-stuffing).'
        """
        evidence = f": {self.evidence}" if self.evidence else ""
        return f"{self.effect} until {_clock(self.until_us, self.at_us)}{evidence} ({self.scenario})."


@dataclass(frozen=True, slots=True)
class ClientRestrictions:
    """The record of one client, as it is stored: its restrictions by scenario."""

    kind: str
    value: str
    by_scenario: Mapping[str, Restriction]

    def applies_at(self, now_us: int) -> bool:
        return any(each.applies_at(now_us) for each in self.by_scenario.values())

    @property
    def until_us(self) -> int:
        """The time at which the record can be forgotten."""
        return max([each.forget_us for each in self.by_scenario.values()], default=0)

    def with_restriction(self, restriction: Restriction, now_us: int) -> ClientRestrictions:
        """The record with another restriction of its scenario, without what can be forgotten."""
        kept = {name: each for name, each in self.by_scenario.items() if now_us < each.forget_us}
        return ClientRestrictions(self.kind, self.value, {**kept, restriction.scenario: restriction})


class RestrictionList(LiveList[ClientRestrictions]):
    """The records of all clients with restrictions.

    >>> restrictions = RestrictionList()
    >>> delay = Restriction("scraping", "delay", 1, 0, 2_000_000, 9_000_000, delay_us=500_000)
    >>> restrictions.set("ip", "203.0.113.0/24", {"scraping": delay})
    >>> restrictions.find({"address": "203.0.113.9"}, now_us=1_999_999).by_scenario["scraping"].effect
    'Delayed by 0.5 s'
    >>> restrictions.find({"address": "203.0.113.9"}, now_us=2_000_000)
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(ClientRestrictions)

    def _has_ended(self, entry: ClientRestrictions, now_us: int) -> bool:
        return now_us >= entry.until_us


def encode_restrictions(record: ClientRestrictions) -> str:
    """The record as it is stored: ASCII JSON, with the time at which it can be forgotten first, for the script."""
    restrictions = [_without_defaults(each) for each in record.by_scenario.values()]
    found = {"until_us": record.until_us, "kind": record.kind, "value": record.value, "restrictions": restrictions}
    return json.dumps(found, separators=(",", ":"))


def read_restrictions(text: bytes | str) -> ClientRestrictions | None:
    """Parse a record, as it is stored; None if it is malformed, as anything in the store may be."""
    try:
        found = json.loads(text)
        restrictions = [Restriction(**{name: each[name] for name in each if name in _TYPES})
                        for each in found["restrictions"]]  # fmt: skip
        record = ClientRestrictions(found["kind"], found["value"], {each.scenario: each for each in restrictions})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_named = type(record.kind) is type(record.value) is str
    return record if is_named and len(restrictions) <= MAX_SCENARIOS and all(map(_is_valid, restrictions)) else None


_NUMBERS: Final[Mapping[str, int]] = {
    "level": 1_000, "at_us": EXACT, "until_us": EXACT, "forget_us": EXACT, "undone_us": EXACT, "factor": MAX_FACTOR,
    "delay_us": MAX_DELAY_US, "difficulty": MAX_DIFFICULTY,
}  # fmt: skip
"""The largest value of each number."""
_CHOICES: Final = {"action": get_args(ActionKind), "mode": get_args(ChallengeMode)}
_TYPES: Final = {each.name for each in fields(Restriction)}
_DEFAULTS: Final = {each.name: each.default for each in fields(Restriction)}


def _without_defaults(restriction: Restriction) -> dict[str, Any]:
    return {name: value for name, value in asdict(restriction).items() if value != _DEFAULTS[name]}


def _is_valid(restriction: Restriction) -> bool:
    for name, value in asdict(restriction).items():
        if name in _CHOICES:
            is_valid = value in _CHOICES[name]
        elif name in _NUMBERS:
            is_valid = (type(value) is int and 0 <= value <= _NUMBERS[name]) or (name == "undone_us" and value is None)
        elif name == "shadow":
            is_valid = type(value) is bool
        else:
            is_valid = type(value) is str and len(value) <= MAX_TEXT and value.isprintable()
        if not is_valid:
            return False
    return restriction.factor >= 1 and bool(restriction.scenario)


def _clock(at_us: int, since_us: int) -> str:
    """The time of day in UTC; with the date if it is not within a day."""
    at = datetime.fromtimestamp(at_us / SECOND_US, UTC)
    return f"{at:%H:%M}" if at_us - since_us < DAY_US else f"{at:%Y-%m-%d %H:%M}"
