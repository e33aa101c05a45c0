"""Which numbers there are, what each is called in Prometheus and in OpenTelemetry, and what tells its series apart."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["FAMILIES", "LATENCY_US", "SHARES", "Family", "Gathering", "Histogram", "Kind", "Sample"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Gathering: TypeAlias = Literal["sum", "max"]

LATENCY_US: Final = (50, 100, 250, 500, 1_000, 2_000, 3_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
"""Bounds for the latency of a check: fine around the 2 ms that it may cost and the 5 ms at which somebody is called."""
SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Bounds for what is left of a limit, as a share of all that it holds."""


class Family(NamedTuple):
    """One kind of number."""

    name: str
    """In Prometheus; the `_total` of counters is added there."""
    otel_name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    unit: str = "1"
    """As OpenTelemetry writes it."""
    gathering: Gathering = "sum"
    """What a gauge is over several processes."""


class Histogram(NamedTuple):
    """How many values were at or below each bound, but above the one before; the last are those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """The sum of all values."""


class Sample(NamedTuple):
    """One number as it is now."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


_OF_LIMITS: Final = ("policy", "route_class", "endpoint")

_ALL: Final = (
    Family(
        "rate_limiter_check_latency_seconds", "limiter.check.latency", "histogram", (),
        "How long it took to decide a request, from when its client was known.", "s",
    ),
    Family(
        "rate_limiter_decisions", "limiter.decisions", "counter", ("outcome", "route_class", "endpoint", "tier"),
        "Requests, once each: allowed, denied (429), blocked (403) or unavailable (503).",
    ),
    Family(
        "rate_limiter_allowed", "limiter.allowed", "counter", _OF_LIMITS,
        "Requests that passed, once for each limit that they met.",
    ),
    Family(
        "rate_limiter_blocked", "limiter.blocked", "counter", _OF_LIMITS,
        "Requests that were denied, once for each limit that denied them.",
    ),
    Family(
        "rate_limiter_shadow_blocked", "limiter.shadow_blocked", "counter", _OF_LIMITS,
        "Requests that a limit which is only watched would have denied.",
    ),
    Family(
        "rate_limiter_rejections", "limiter.rejections", "counter", ("tier", "reason"),
        "Requests that were refused: over a limit, blocked, or unavailable, as nobody could decide.",
    ),
    Family(
        "rate_limiter_local_cache_hits", "limiter.local_cache_hits", "counter", ("kind",),
        "Checks that were answered without the store: remembered denials, and prepaid tokens.",
    ),
    Family(
        "rate_limiter_redis_ops", "limiter.redis_ops", "counter", (),
        "Calls that the store has carried out.",
    ),
    Family(
        "rate_limiter_redis_round_trips", "limiter.redis_round_trips", "counter", (),
        "How often the store was waited for; calls that come together share one.",
    ),
    Family(
        "rate_limiter_redis_errors", "limiter.redis_errors", "counter", (),
        "Calls that the store failed to carry out.",
    ),
    Family(
        "rate_limiter_script_eval_errors", "limiter.script_eval_errors", "counter", (),
        "Scripts that ended in an error: a bug, or a foreign value under one of our keys.",
    ),
    Family(
        "rate_limiter_degraded_mode", "limiter.degraded_mode", "counter", ("mode",),
        "Requests that were decided without the store, by the failure mode that answered.",
    ),
    Family(
        "rate_limiter_degraded", "limiter.degraded", "gauge", (),
        "1 while requests are decided without the store, on one shard at least.", gathering="max",
    ),
    Family(
        "rate_limiter_fallback_mode", "limiter.fallback_mode", "counter", (),
        "How often the store was lost, and failure modes began to answer.",
    ),
    Family(
        "rate_limiter_fallback_seconds", "limiter.fallback_time", "counter", (),
        "For how long failure modes have answered, all in all.", "s",
    ),
    Family(
        "rate_limiter_fallback_current_seconds", "limiter.fallback_current", "gauge", (),
        "For how long they have answered by now; 0 while the store does.", "s", "max",
    ),
    Family(
        "rate_limiter_store_events", "limiter.store_events", "counter", ("kind",),
        "What happened to the store.",
    ),
    Family(
        "rate_limiter_config_refresh_lag_seconds", "config.refresh.lag_seconds", "gauge", (),
        "For how long the newest policy is not in force; 0 while it is.", "s", "max",
    ),
    Family(
        "rate_limiter_config_info", "config.info", "gauge", ("version",),
        "Always 1; its label is the policy in force.", gathering="max",
    ),
    Family(
        "rate_limiter_hot_keys", "limiter.hot_keys", "gauge", (),
        "Counters that are asked so often that their tokens are prepaid.",
    ),
    Family(
        "rate_limiter_hot_keys_detected", "limiter.hot_keys_detected", "counter", (),
        "How often a counter has become hot.",
    ),
    Family(
        "rate_limiter_keys", "limiter.keys", "gauge", ("policy", "by"),
        "Different counters that were asked for in five minutes, estimated to a twentieth.",
    ),
    Family(
        "rate_limiter_keys_at_zero", "limiter.keys_at_zero", "gauge", ("policy",),
        "Counters that had nothing left whenever they were asked, for more than five minutes.",
    ),
    Family(
        "rate_limiter_remaining_ratio", "limiter.remaining_ratio", "histogram", ("policy",),
        "What was left of a limit after each decision, as a share of all that it holds.",
    ),
    Family(
        "rate_limiter_nodes", "limiter.nodes", "gauge", (),
        "Live processes that count together.", gathering="max",
    ),
    Family(
        "rate_limiter_shards", "limiter.shards", "gauge", ("state",),
        "Servers that keep counts, by whether requests are sent there.", gathering="max",
    ),
    Family(
        "rate_limiter_owed_tokens", "limiter.owed_tokens", "gauge", (),
        "What was allowed without the store, and is to be charged there yet.",
    ),
    Family(
        "rate_limiter_memory_keys", "limiter.memory_keys", "gauge", (),
        "Counters in a store that is in the process.",
    ),
    Family(
        "rate_limiter_memory_forgiven", "limiter.memory_forgiven", "counter", (),
        "Counters in the process that were dropped for want of room although they owed something: raise max_keys.",
    ),
    Family(
        "rate_limiter_events_dropped", "limiter.events_dropped", "counter", (),
        "Decisions that are missing in other metrics, the decision log and the status: observers were too slow.",
    ),
)  # fmt: skip

FAMILIES: Final = {family.name: family for family in _ALL}
"""All of them, by their names in Prometheus."""
