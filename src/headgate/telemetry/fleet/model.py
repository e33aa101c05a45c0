"""What a fleet is doing, as values: what `Beats` finds on a board."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ClientCount", "FleetStatus", "HotKey", "MinuteTotals", "NearLimit", "NodeStatus", "Series"]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One process, as it said last."""

    name: str
    region: str
    at_us: int
    """When it was last heard of, by the reader's clock."""
    state: Literal["ready", "degraded", "silent"]
    reason: str | None
    """Why it is degraded."""
    degraded_for_s: float | None
    shards: tuple[tuple[str, bool], ...]
    """The servers that it counts in, and whether it asks them."""
    policy_version: str | None
    policy_error: str | None
    config_age_s: float | None
    """How long ago the config store was known to have nothing newer; None for a policy that is a file."""
    allowed: int
    """In the last minute, as all numbers of requests here."""
    denied: int
    blocked: int
    unavailable: int
    degraded: int
    p50_us: int | None
    p99_us: int | None
    waiting: int | None
    """Records that its decision log has still to write; None if it was not told of one."""
    lost: int | None
    log_error: str | None


@dataclass(frozen=True, slots=True)
class Series:
    """The last five minutes by second, over all nodes."""

    start_s: int
    """The second of the first number, since 1970."""
    allowed: tuple[int, ...]
    denied: tuple[int, ...]
    blocked: tuple[int, ...]
    unavailable: tuple[int, ...]
    degraded: tuple[int, ...]
    p50_us: tuple[int | None, ...]
    p99_us: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MinuteTotals:
    """The last minute, over all nodes."""

    allowed: int = 0
    denied: int = 0
    blocked: int = 0
    unavailable: int = 0
    degraded: int = 0
    p50_us: int | None = None
    p99_us: int | None = None


@dataclass(frozen=True, slots=True)
class ClientCount:
    """A client who was denied in the last minute."""

    kind: str
    key: str
    """Its keyed hash."""
    label: str
    denied: int
    allowed: int


@dataclass(frozen=True, slots=True)
class NearLimit:
    """A client who has a tenth of a limit left, or less, as it was told in the last minute."""

    kind: str
    key: str
    label: str
    limit: str
    left: int
    capacity: int
    share: float
    """What is left, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class HotKey:
    """A counter that is so busy that its tokens are prepaid."""

    limit: str
    kind: str
    key: str
    label: str
    rate: float
    """Requests a second."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What the fleet is doing."""

    at_us: int
    nodes: tuple[NodeStatus, ...]
    series: Series
    totals: MinuteTotals
    top_denied: tuple[ClientCount, ...]
    near: tuple[NearLimit, ...]
    hot: tuple[HotKey, ...]
    troubles: tuple[str, ...] = ()
    """What could not be read, and why."""
