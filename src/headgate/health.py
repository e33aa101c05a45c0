"""The health of a limiter, for load balancers, status pages and operators."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Health", "OutageReport", "Shard"]


class Shard(NamedTuple):
    """One server of the store."""

    name: str
    """Its address."""
    ready: bool
    """True if requests are sent there."""
    down_for: float | None = None
    """Seconds since requests are not sent there; None while it is ready."""
    reason: str | None = None
    """The failure that opened its circuit breaker."""


@dataclass(frozen=True, slots=True)
class OutageReport:
    """The counter that was furthest over its limit in an outage, as far as this process knows."""

    limit: str
    """Its name."""
    admitted: int
    """Tokens that it admitted, of which `capacity` were the limit's."""
    capacity: int
    bound: int | None
    """The most that all nodes together may have admitted; None with mode `open`, which has no bound."""

    def __str__(self) -> str:
        bounded = "not bounded" if self.bound is None else f"bound {self.bound:,}"
        return f"limit {self.limit!r} admitted {self.admitted:,} of {self.capacity:,}; {bounded}"


class Health(NamedTuple):
    """The health of a limiter and of the servers of its store.

    >>> from headgate import Limiter
    >>> Limiter().health().state
    'ready'
    """

    state: Literal["ready", "degraded"]
    """"degraded" while requests are decided without the store, on one shard at least."""
    reason: str | None = None
    degraded_for: float | None = None
    """Seconds since the first such request."""
    decided_without: int = 0
    """Requests decided without the store in that time."""
    shards: tuple[Shard, ...] = ()
    """Empty for the memory store."""
    nodes: int = 1
    """Live processes that share the limits, by their heartbeats; during an outage the last known number."""
    owed_keys: int = 0
    """Counters to charge with what was admitted without the store, and refunds to make."""
    owed_tokens: int = 0
    last_outage: OutageReport | None = None
    """The overshoot of the last outage that was settled; None if no limit was exceeded."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def as_dict(self) -> dict[str, Any]:
        """The health as a dict for JSON."""
        last_outage = None if self.last_outage is None else asdict(self.last_outage)
        return {**self._asdict(), "shards": [shard._asdict() for shard in self.shards], "last_outage": last_outage}
