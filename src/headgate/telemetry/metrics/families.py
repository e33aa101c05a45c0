"""The metric families: their names in Prometheus and OpenTelemetry, their labels and units, and their values."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = [
    "CLIENT_FAMILIES",
    "FAMILIES",
    "LATENCY_US",
    "MAX_SERIES",
    "REMAINING_SHARES",
    "Family",
    "Histogram",
    "LabeledTotals",
    "Labels",
    "Sample",
]

Labels: TypeAlias = tuple[str, ...]
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Aggregation: TypeAlias = Literal["sum", "max"]

LATENCY_US: Final = (50, 100, 250, 500, 1_000, 2_000, 3_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
"""Bounds for the latency of a check: fine around the target of 2 ms and the alert at 5 ms."""
REMAINING_SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Bounds for the remaining share of a limit."""
OTHER: Final = "other"
MAX_SERIES: Final = 500


class Family(NamedTuple):
    """A metric family."""

    name: str
    """In Prometheus, where counters get the suffix `_total`."""
    otel_name: str
    kind: Kind
    labels: Labels
    help: str
    unit: str
    """In the notation of OpenTelemetry (UCUM)."""
    aggregation: Aggregation
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
    labels: Labels
    value: float | Histogram


class LabeledTotals:
    """Sums by label values; what is beyond `MAX_SERIES` is added under "other"."""

    def __init__(self, *known: Labels) -> None:
        """`known` series exist from the start: Prometheus sees no increase in a series that begins with 1."""
        self._known = known
        self.clear()

    def clear(self) -> None:
        self._sums: dict[Labels, float] = dict.fromkeys(self._known, 0)

    def add(self, labels: Labels, amount: float = 1) -> None:
        if labels not in self._sums and len(self._sums) >= MAX_SERIES:
            labels = (OTHER,) * len(labels)
        self._sums[labels] = self._sums.get(labels, 0) + amount

    def items(self) -> list[tuple[Labels, float]]:
        return list(self._sums.items())


def _family(
    name: str, kind: Kind, help: str, labels: Labels = (), *, otel_name: str = "", unit: str = "1",
    aggregation: Aggregation = "sum",
) -> Family:  # fmt: skip
    return Family(f"rate_limiter_{name}", otel_name or f"limiter.{name}", kind, labels, help, unit, aggregation)


_LIMIT_LABELS: Final = ("policy", "route_class", "endpoint")

_ALL: Final = (
    _family("check_latency_seconds", "histogram", "Time from the identification of the client to the decision.",
            unit="s", otel_name="limiter.check.latency"),
    _family("decisions", "counter", "Requests by outcome: allowed, denied (429), blocked (403) or unavailable (503).",
            ("outcome", "route_class", "endpoint", "tier")),
    _family("allowed", "counter", "Requests that passed, counted once for each limit that applied.", _LIMIT_LABELS),
    _family("blocked", "counter", "Denied requests, counted once for each limit that denied them.", _LIMIT_LABELS),
    _family("shadow_blocked", "counter", "Requests that a limit in shadow mode would have denied.", _LIMIT_LABELS),
    _family("rejections", "counter", "Rejected requests: over a limit, blocked, shed, or unavailable like the store.",
            ("tier", "reason")),
    _family("local_cache_hits", "counter", "Checks answered locally, from cached denials or prepaid tokens.",
            ("kind",)),
    _family("redis_ops", "counter", "Operations that the store has executed."),
    _family("redis_round_trips", "counter", "Round trips to the store; concurrent operations share one."),
    _family("redis_errors", "counter", "Operations that failed in the store."),
    _family("script_eval_errors", "counter", "Script errors: a bug, or a foreign value under one of Headgate's keys."),
    _family("degraded_mode", "counter", "Requests decided without the store, by failure mode.", ("mode",)),
    _family("degraded", "gauge", "1 while requests are decided without the store, on at least one shard.",
            aggregation="max"),
    _family("fallback_mode", "counter", "Outages of the store."),
    _family("fallback_seconds", "counter", "Total time in which failure modes answered.",
            unit="s", otel_name="limiter.fallback_time"),
    _family("fallback_current_seconds", "gauge", "Duration of the current outage; 0 while the store is available.",
            unit="s", aggregation="max", otel_name="limiter.fallback_current"),
    _family("store_events", "counter", "Events of the store, by kind.", ("kind",)),
    _family("config_refresh_lag_seconds", "gauge",
            "Time for which the newest policy has not been in force; 0 while it is.",
            unit="s", aggregation="max", otel_name="config.refresh.lag_seconds"),
    _family("config_info", "gauge", "Always 1; the label is the version of the policy in force.",
            ("version",), aggregation="max", otel_name="config.info"),
    _family("messages", "counter", "Messages over a limit on messages or bytes: delayed, dropped, or closed.",
            ("policy", "outcome")),
    _family("list_networks", "gauge", "Networks of each reputation list; 0 before its first version was read.",
            ("list",), aggregation="max"),
    _family("list_age_seconds", "gauge", "Time since the source of a list last had nothing newer.",
            ("list",), unit="s", aggregation="max", otel_name="limiter.list.age"),
    _family("list_failed", "gauge", "1 while the newest version of a list cannot be used.", ("list",),
            aggregation="max"),
    _family("hot_keys", "gauge", "Counters busy enough to have prepaid tokens."),
    _family("hot_keys_detected", "counter", "Counters that have become hot."),
    _family("keys", "gauge", "Distinct counters in five minutes, estimated to within 5 %.", ("policy", "by")),
    _family("keys_at_zero", "gauge", "Counters at zero for more than five minutes.", ("policy",)),
    _family("remaining_ratio", "histogram", "Share of a limit that was left after each decision.", ("policy",)),
    _family("nodes", "gauge", "Live processes that share the store.", aggregation="max"),
    _family("shards", "gauge", "Store servers by state.", ("state",), aggregation="max"),
    _family("outage_overshoot", "gauge", "Tokens that this node admitted beyond a limit in the last outage.",
            ("policy",), aggregation="max"),
    _family("outage_bound", "gauge", "The most that all nodes may have admitted beyond that limit.",
            ("policy",), aggregation="max"),
    _family("overshoot_bound", "gauge",
            "The most that all nodes may admit beyond a limit: prepaid tokens, and an outage of one period.",
            ("policy",), aggregation="max"),
    _family("owed_tokens", "gauge", "Tokens allowed during an outage that are still to be charged."),
    _family("overload_limit", "gauge", "Requests that may be in progress, by route class or guard; * for all routes.",
            ("scope",)),
    _family("overload_in_flight", "gauge", "Requests in progress.", ("scope",)),
    _family("overload_latency_seconds", "gauge", "Mean latency, now and without a queue (base).", ("scope", "kind"),
            unit="s", otel_name="limiter.overload.latency", aggregation="max"),
    _family("overload_shed", "counter", "Requests that were shed, by priority.", ("scope", "priority")),
    _family("actions", "counter", "Actions that this node has taken on clients, by scenario.",
            ("scenario", "action", "mode")),
    _family("challenges", "counter", "Requests of challenged clients: presented, failed (an invalid cookie), passed.",
            ("outcome",)),
    _family("held_requests", "counter", "Requests that were held back."),
    _family("findings", "counter", "Clients and groups that scenarios have found on this node.", ("scenario",)),
    _family("findings_dropped", "counter", "Findings that could not be applied, as the store was unavailable."),
    _family("memory_keys", "gauge", "Counters in a memory store."),
    _family("memory_forgiven", "counter",
            "Counters evicted from a memory store before they had recovered: raise max_keys."),
    _family("quota_leased", "gauge", "Units of quotas in leases of this process that are not spent."),
    _family("quota_leases", "gauge", "Leases of quotas that this process holds."),
    _family("quota_unwritten", "gauge",
            "Charged units that are not yet in the ledger: in doubt if the machine is lost."),
    _family("quota_unwritten_seconds", "gauge", "Age of the oldest charge that is not yet in the ledger; 0 for none.",
            unit="s", aggregation="max", otel_name="limiter.quota_unwritten_time"),
    _family("quota_outage", "gauge",
            "Units that were admitted without a lease while the ledger was unavailable, and are not settled."),
    _family("quota_charges", "counter", "Requests that were charged to a quota."),
    _family("quota_rejections", "counter",
            "Requests that a quota has refused: exhausted, unavailable (no ledger), or pending (no answer in time).",
            ("quota", "reason")),
    _family("quota_ledger_writes", "counter", "Transactions that have written to the ledger."),
    _family("quota_ledger_unavailable", "gauge", "1 while the ledger of quotas is unavailable.", aggregation="max"),
    _family("events_dropped", "counter",
            "Decisions missing in metrics, decision log and node status because an observer was too slow."),
)  # fmt: skip

FAMILIES: Final = {family.name: family for family in _ALL}
"""The families of gates by their names in Prometheus."""

_QUOTA_LABELS: Final = ("host", "quota")

_OF_CLIENTS: Final = (
    _family("client_requests", "counter", "Requests that polite clients have sent, retries included."),
    _family("client_rejected", "counter", "Responses 429."),
    _family("client_unavailable", "counter", "Responses 503."),
    _family("client_retries", "counter", "Requests that were sent again after a rejection."),
    _family("client_waits", "counter", "Waits before a request was sent."),
    _family("client_wait_seconds", "counter", "Total time of these waits.", unit="s"),
    _family("client_not_sent", "counter", "Requests that were not sent because they would have waited too long."),
    _family("client_retries_refused", "counter", "Retries that the retry budget did not allow."),
    _family("client_quota_limit", "gauge", "Size of a quota that a host reports.", _QUOTA_LABELS, aggregation="max"),
    _family("client_quota_remaining", "gauge", "Part of a quota that was left at the last response.", _QUOTA_LABELS,
            aggregation="max"),
)  # fmt: skip

CLIENT_FAMILIES: Final = {family.name: family for family in _OF_CLIENTS}
"""The families of polite clients."""
