"""The status of a fleet, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from headgate.health import OutageReport  # noqa: TC001 - the API reads the types of fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CanaryNode",
    "CanarySecond",
    "ClientCount",
    "FleetStatus",
    "HotKey",
    "MinuteTotals",
    "NearLimit",
    "NodeStatus",
    "QuotaHolding",
    "Series",
]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The last report of one process."""

    name: str
    region: str
    at_us: int
    """The time of the report, by the reader's clock."""
    state: Literal["ready", "degraded", "silent"]
    reason: str | None
    """The reason for being degraded."""
    degraded_for_s: float | None
    shards: tuple[tuple[str, bool], ...]
    """The store's servers, each with True if it is ready."""
    policy_version: str | None
    policy_error: str | None
    config_age_s: float | None
    """Seconds since the policy was last known to be the newest of the config store; None for a policy file."""
    allowed: int
    """In the last minute, like the following numbers."""
    denied: int
    blocked: int
    unavailable: int
    degraded: int
    p50_us: int | None
    p99_us: int | None
    waiting: int | None
    """Records that its decision log has not written yet; None without a log."""
    lost: int | None
    log_error: str | None
    canary: Literal["candidate", "stable"] | None = None
    """The policy document that the node applies while a canary is running; None otherwise."""
    last_outage: OutageReport | None = None
    """The counter furthest over its limit in the last outage of the store; None if no limit was exceeded."""


@dataclass(frozen=True, slots=True)
class Series:
    """The last five minutes by second, summed over all nodes."""

    start_s: int
    """The first second, since 1970."""
    allowed: tuple[int, ...]
    denied: tuple[int, ...]
    blocked: tuple[int, ...]
    unavailable: tuple[int, ...]
    degraded: tuple[int, ...]
    p50_us: tuple[int | None, ...]
    p99_us: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MinuteTotals:
    """The last minute, summed over all nodes."""

    allowed: int = 0
    denied: int = 0
    blocked: int = 0
    unavailable: int = 0
    degraded: int = 0
    p50_us: int | None = None
    p99_us: int | None = None


@dataclass(frozen=True, slots=True)
class ClientCount:
    """A client that was denied in the last minute."""

    kind: str
    key: str
    """Its keyed hash."""
    label: str
    denied: int
    allowed: int


@dataclass(frozen=True, slots=True)
class NearLimit:
    """A client that had a tenth of a limit left, or less, within the last minute."""

    kind: str
    key: str
    label: str
    limit: str
    left: int
    capacity: int
    share: float
    """The share that is left, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class HotKey:
    """A counter with prepaid tokens."""

    limit: str
    kind: str
    key: str
    label: str
    rate: float
    """Requests per second."""


@dataclass(frozen=True, slots=True)
class QuotaHolding:
    """The tokens of one limit that proxies hold by Envoy's quota protocol."""

    limit: str
    counters: int
    """The counters, each with `capacity`, of which tokens are held."""
    held: int
    """Charged in advance: requests that may still pass, or did pass and are not reported yet."""
    capacity: int
    excess: int
    """Requests beyond the limit that proxies have reported since the server started: those that passed before the
    first assignment."""
    bound: int = 0
    """The most that one counter admits beyond its limit while these assignments are valid, without `excess`."""


class CanarySecond(NamedTuple):
    """The decisions of one node in one second."""

    second: int
    """Since 1970, by the reader's clock."""
    counts: Sequence[int]
    """In the order of `rollups.OUTCOMES`."""
    latency: Mapping[int, int]
    """The number of requests by bucket of their latency."""


@dataclass(frozen=True, slots=True)
class CanaryNode:
    """The part of one process in a canary of the policy, and its decisions since it has that part."""

    name: str
    canary: str
    role: Literal["candidate", "stable"]
    error: str | None
    """The reason why it cannot apply the candidate."""
    seconds: tuple[CanarySecond, ...]
    """At most five minutes."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The status of the fleet."""

    at_us: int
    nodes: tuple[NodeStatus, ...]
    series: Series
    totals: MinuteTotals
    top_denied: tuple[ClientCount, ...]
    near: tuple[NearLimit, ...]
    hot: tuple[HotKey, ...]
    troubles: tuple[str, ...] = ()
    """Errors in reading the status."""
    quotas: tuple[QuotaHolding, ...] = ()
    canary_nodes: tuple[CanaryNode, ...] = ()
    """The nodes that have learned of a canary of the policy."""
