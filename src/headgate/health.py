"""The health of a limiter, for load balancers, status pages and operators."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["Health", "Shard"]


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

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def as_dict(self) -> dict[str, Any]:
        """The health as a dict for JSON."""
        return {**self._asdict(), "shards": [shard._asdict() for shard in self.shards]}
