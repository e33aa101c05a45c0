"""Statistics of a replay: totals by limit, route, tier and client, rejections over time, and peaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headgate.clock import MINUTE_US

if TYPE_CHECKING:
    from headgate.policy.model import Rule

__all__ = ["AppliedRules", "ClientTotals", "RejectionTotals", "ReplayTimeline", "RouteTotals", "RuleTotals"]

EPISODE_GAP_US: Final = MINUTE_US
"""Rejections of a client that are at most so far apart belong to one episode."""
MAX_SLOTS: Final = 2048


@dataclass(slots=True, eq=False)
class RejectionTotals:
    """The rejections of one client."""

    first_us: int
    last_us: int
    started_us: int
    """The beginning of the current episode."""
    count: int = 0
    blocked: int = 0
    episodes: int = 1
    longest_us: int = 0
    """The longest episode, from its first rejection to its last."""
    by_rule: dict[str, int] = field(default_factory=dict)

    def add(self, at_us: int) -> None:
        self.count += 1
        if at_us - self.last_us > EPISODE_GAP_US:
            self.episodes += 1
            self.started_us = at_us
        self.last_us = at_us
        self.longest_us = max(self.longest_us, at_us - self.started_us)


@dataclass(slots=True, eq=False)
class ClientTotals:
    """The requests of one client. Small, as there may be a million."""

    tier: str | None
    requests: int = 0
    rejections: RejectionTotals | None = None
    shadow_rejections: int = 0
    near: dict[str, tuple[int, int, int]] | None = None
    """By limit of which little was left: the least remaining, the capacity, and the time."""

    @property
    def rejected(self) -> int:
        return self.rejections.count if self.rejections is not None else 0


@dataclass(slots=True, eq=False)
class RuleTotals:
    """The requests of one limit."""

    rule: Rule
    requests: int = 0
    rejected: int = 0
    longest_wait_us: int = 0
    unsatisfiable: int = 0
    """Rejected requests whose cost exceeds the whole limit."""
    peak_admitted: int = 0
    """The largest cost admitted in a minute, without refunds."""
    peak_minute_us: int | None = None


@dataclass(slots=True, eq=False)
class AppliedRules:
    """Limits that apply to the same requests, each with the cost of a request."""

    costs: tuple[tuple[RuleTotals, int], ...]
    admitted: int = 0
    """Requests in the current minute."""
    peak_requests: int = 0
    """So many requests alone, or fewer, are no new peak of any of the limits."""


@dataclass(slots=True, eq=False)
class RouteTotals:
    """The requests of one route and tier to which the same limits apply."""

    endpoint: str
    route_class: str | None
    tier: str | None
    rules: AppliedRules
    requests: int = 0
    rejected: int = 0
    blocked: int = 0
    counted_rejected: int = 0
    """`rejected` at the end of the last minute."""
    counted_requests: int = 0


class ReplayTimeline:
    """Requests and rejections in slots of equal width, which doubles when there are too many.

    >>> timeline = ReplayTimeline(0, max_slots=2)
    >>> for minute, rejected in ((0, 0), (1, 2), (3, 1)):
    ...     timeline.add(minute * 60_000_000, 10, rejected)
    >>> timeline.width_us // 60_000_000, timeline.requests, timeline.rejected
    (2, [20, 10], [2, 1])
    """

    def __init__(self, start_us: int, *, width_us: int = MINUTE_US, max_slots: int = MAX_SLOTS) -> None:
        self.width_us = width_us
        self._max_slots = max_slots
        self.start_us = start_us // width_us * width_us
        self.requests: list[int] = []
        self.rejected: list[int] = []

    def add(self, at_us: int, requests: int, rejected: int) -> None:
        """Count requests at a time that is not before the start."""
        slot = (at_us - self.start_us) // self.width_us
        while slot >= self._max_slots:
            self._halve()
            slot = (at_us - self.start_us) // self.width_us
        missing = slot + 1 - len(self.requests)
        if missing > 0:
            self.requests += [0] * missing
            self.rejected += [0] * missing
        self.requests[slot] += requests
        self.rejected[slot] += rejected

    def _halve(self) -> None:
        self.width_us *= 2
        for numbers in (self.requests, self.rejected):
            numbers[:] = [sum(numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
