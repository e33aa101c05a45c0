"""The metric families: their names in Prometheus and OpenTelemetry, their labels and their units."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["FAMILIES", "LATENCY_US", "REMAINING_SHARES", "Aggregation", "Family", "Histogram", "Kind", "Sample"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Aggregation: TypeAlias = Literal["sum", "max"]

LATENCY_US: Final = (50, 100, 250, 500, 1_000, 2_000, 3_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
"""Bounds for the latency of a check: fine around the target of 2 ms and the alert at 5 ms."""
REMAINING_SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Bounds for the remaining share of a limit."""


class Family(NamedTuple):
    """A metric family."""

    name: str
    """In Prometheus, where counters get the suffix `_total`."""
    otel_name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    unit: str = "1"
    """In the notation of OpenTelemetry (UCUM)."""
    aggregation: Aggregation = "sum"
    """Combines the values of a gauge over several gates or processes."""


class Histogram(NamedTuple):
    """The number of values in each bucket, not cumulative; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """The sum of all values."""


class Sample(NamedTuple):
    """The value of one series."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


_LIMIT_LABELS: Final = ("policy", "route_class", "endpoint")

_ALL: Final = (
    Family(
        "rate_limiter_check_latency_seconds", "limiter.check.latency", "histogram", (),
        "Time from the identification of the client to the decision.", "s",
    ),
    Family(
        "rate_limiter_decisions", "limiter.decisions", "counter", ("outcome", "route_class", "endpoint", "tier"),
        "Requests by outcome: allowed, denied (429), blocked (403) or unavailable (503).",
    ),
    Family(
        "rate_limiter_allowed", "limiter.allowed", "counter", _LIMIT_LABELS,
        "Requests that passed, counted once for each limit that applied.",
    ),
    Family(
        "rate_limiter_blocked", "limiter.blocked", "counter", _LIMIT_LABELS,
        "Denied requests, counted once for each limit that denied them.",
    ),
    Family(
        "rate_limiter_shadow_blocked", "limiter.shadow_blocked", "counter", _LIMIT_LABELS,
        "Requests that a limit in shadow mode would have denied.",
    ),
    Family(
        "rate_limiter_rejections", "limiter.rejections", "counter", ("tier", "reason"),
        "Rejected requests: over a limit, blocked, or unavailable because the store was.",
    ),
    Family(
        "rate_limiter_local_cache_hits", "limiter.local_cache_hits", "counter", ("kind",),
        "Checks answered locally, from cached denials or prepaid tokens.",
    ),
    Family(
        "rate_limiter_redis_ops", "limiter.redis_ops", "counter", (),
        "Operations that the store has executed.",
    ),
    Family(
        "rate_limiter_redis_round_trips", "limiter.redis_round_trips", "counter", (),
        "Round trips to the store; concurrent operations share one.",
    ),
    Family(
        "rate_limiter_redis_errors", "limiter.redis_errors", "counter", (),
        "Operations that failed in the store.",
    ),
    Family(
        "rate_limiter_script_eval_errors", "limiter.script_eval_errors", "counter", (),
        "Script errors: a bug, or a foreign value under one of Headgate's keys.",
    ),
    Family(
        "rate_limiter_degraded_mode", "limiter.degraded_mode", "counter", ("mode",),
        "Requests decided without the store, by failure mode.",
    ),
    Family(
        "rate_limiter_degraded", "limiter.degraded", "gauge", (),
        "1 while requests are decided without the store, on at least one shard.", aggregation="max",
    ),
    Family(
        "rate_limiter_fallback_mode", "limiter.fallback_mode", "counter", (),
        "Outages of the store.",
    ),
    Family(
        "rate_limiter_fallback_seconds", "limiter.fallback_time", "counter", (),
        "Total time in which failure modes answered.", "s",
    ),
    Family(
        "rate_limiter_fallback_current_seconds", "limiter.fallback_current", "gauge", (),
        "Duration of the current outage; 0 while the store is available.", "s", "max",
    ),
    Family(
        "rate_limiter_store_events", "limiter.store_events", "counter", ("kind",),
        "Events of the store, by kind.",
    ),
    Family(
        "rate_limiter_config_refresh_lag_seconds", "config.refresh.lag_seconds", "gauge", (),
        "Time for which the newest policy has not been in force; 0 while it is.", "s", "max",
    ),
    Family(
        "rate_limiter_config_info", "config.info", "gauge", ("version",),
        "Always 1; the label is the version of the policy in force.", aggregation="max",
    ),
    Family(
        "rate_limiter_hot_keys", "limiter.hot_keys", "gauge", (),
        "Counters busy enough to have prepaid tokens.",
    ),
    Family(
        "rate_limiter_hot_keys_detected", "limiter.hot_keys_detected", "counter", (),
        "Counters that have become hot.",
    ),
    Family(
        "rate_limiter_keys", "limiter.keys", "gauge", ("policy", "by"),
        "Distinct counters in five minutes, estimated to within 5 %.",
    ),
    Family(
        "rate_limiter_keys_at_zero", "limiter.keys_at_zero", "gauge", ("policy",),
        "Counters at zero for more than five minutes.",
    ),
    Family(
        "rate_limiter_remaining_ratio", "limiter.remaining_ratio", "histogram", ("policy",),
        "Share of a limit that was left after each decision.",
    ),
    Family(
        "rate_limiter_nodes", "limiter.nodes", "gauge", (),
        "Live processes that share the store.", aggregation="max",
    ),
    Family(
        "rate_limiter_shards", "limiter.shards", "gauge", ("state",),
        "Store servers by state.", aggregation="max",
    ),
    Family(
        "rate_limiter_owed_tokens", "limiter.owed_tokens", "gauge", (),
        "Tokens allowed during an outage that are still to be charged.",
    ),
    Family(
        "rate_limiter_memory_keys", "limiter.memory_keys", "gauge", (),
        "Counters in a memory store.",
    ),
    Family(
        "rate_limiter_memory_forgiven", "limiter.memory_forgiven", "counter", (),
        "Counters evicted from a memory store before they had recovered: raise max_keys.",
    ),
    Family(
        "rate_limiter_events_dropped", "limiter.events_dropped", "counter", (),
        "Decisions missing in metrics, decision log and node status because an observer was too slow.",
    ),
)  # fmt: skip

FAMILIES: Final = {family.name: family for family in _ALL}
"""All families by their names in Prometheus."""
