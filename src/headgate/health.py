"""How a limiter is: for load balancers, for pages, and for whoever is on call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["Health", "Shard"]


class Shard(NamedTuple):
    """One server that keeps counts."""

    name: str
    """Its address."""
    ready: bool
    """Whether requests are sent there."""
    down_for: float | None = None
    """Seconds since nobody asks it; None while it is ready."""
    reason: str | None = None
    """The failure for which it is not asked."""


class Health(NamedTuple):
    """Whether requests are decided by the store, and what is known of it.

    >>> from headgate import Limiter
    >>> Limiter().health().state
    'ready'
    """

    state: Literal["ready", "degraded"]
    """"degraded" while requests are decided without the store, on one shard at least."""
    reason: str | None = None
    degraded_for: float | None = None
    """Seconds since the first of them."""
    decided_without: int = 0
    """How many requests were, in this time."""
    shards: tuple[Shard, ...] = ()
    """None for a store in this process."""
    nodes: int = 1
    """Live processes that count together, by their heartbeats; the last number known while the store is away."""
    owed_keys: int = 0
    """Counters to be charged with what was allowed without the store, and refunds to be made."""
    owed_tokens: int = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**self._asdict(), "shards": [shard._asdict() for shard in self.shards]}
