"""Metrics over the decisions of gates, collected by the exporters for Prometheus and OpenTelemetry.

Labels never contain a client, a key or a path, and a family has at most `MAX_SERIES` series; what is beyond is counted
under "other". See docs/metrics.md.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import ref

from headgate._fork import reinit_after_fork
from headgate.policy.rule_bounds import largest_bound
from headgate.telemetry.metrics.families import FAMILIES, LATENCY_US, OTHER, Histogram, LabeledTotals, Sample
from headgate.telemetry.metrics.limit_stats import WINDOW_US, LimitStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headgate.events import Event
    from headgate.gate.event_stream import DecisionEvent, DecisionSource
    from headgate.policy.model import Policy
    from headgate.telemetry.metrics.families import Labels

__all__ = ["MAX_LIMITS", "MODES", "MeterCounts", "MeterSource", "Metrics"]

MAX_LIMITS: Final = 200
"""Limits with statistics of their own; the others share one."""
INTERVAL_US: Final = 60_000_000
"""The longest time for which tallies, and with them a policy that is no longer in force, are kept in memory."""

Lag: TypeAlias = "Callable[[], float]"
"""Returns the seconds for which a policy has not been the newest."""
Counters: TypeAlias = "dict[tuple[str, Labels], float]"
"""The last values of counters, which must not fall when their source is gone."""
NONE: Final = "none"
"""The label of a route without a class, a client without a tier, a policy without a version."""
EVENT_KINDS: Final = ("store-lost", "store-back", "state-lost", "moved", "settled")
MODES: Final = {"open": "fail_open", "closed": "fail_closed", "local": "fail_local"}
REASONS: Final = {"denied": "limit", "blocked": "blocked", "unavailable": "unavailable"}


class MeterCounts(Protocol):
    """The state of a quota meter, as its `MeterStats` have it."""

    @property
    def leased(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def unwritten(self) -> int: ...
    @property
    def unwritten_s(self) -> float: ...
    @property
    def outage(self) -> int: ...
    @property
    def charges(self) -> int: ...
    @property
    def ledger_writes(self) -> int: ...
    @property
    def is_ledger_available(self) -> bool: ...
    @property
    def rejections(self) -> Mapping[tuple[str, str], int]: ...


class MeterSource(Protocol):
    """A `QuotaMeter`."""

    def stats(self) -> MeterCounts: ...


class Metrics:
    """The metrics of one gate, or of several that are exported under one name.

    >>> from headgate.gate.gate import Gate
    >>> from headgate.policy import read
    >>> gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    >>> metrics = Metrics()
    >>> metrics.watch(gate)
    True
    >>> sorted({sample.family.name for sample in metrics.read()})[:2]
    ['rate_limiter_challenges', 'rate_limiter_check_latency_seconds']
    """

    def __init__(self) -> None:
        self._gates: list[GateState] = []
        self._meters: list[MeterState] = []
        names = "decisions", "allowed", "blocked", "shadow_blocked", "rejections"
        self._totals = {name: LabeledTotals() for name in names}
        self._totals["degraded_mode"] = LabeledTotals(*[(mode,) for mode in MODES.values()])
        self._begin()
        reinit_after_fork(self)

    def watch(self, gate: DecisionSource, *, lag: Lag | None = None) -> bool:
        """Count the decisions of a gate from now on; False if it is watched already.

        `lag` is by default the time for which the newest policy file has been invalid.
        """
        with self._lock:
            for state in self._gates:
                if state.gate() is gate:
                    state.lag = lag or state.lag
                    return False
            self._gates.append(GateState(gate, lag))
        gate.add_observer(self)
        return True

    def watch_meter(self, meter: MeterSource) -> None:
        """Report the state of a quota meter, too."""
        with self._lock:
            if all(state.meter() is not meter for state in self._meters):
                self._meters.append(MeterState(meter))

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        with self._lock:
            last = events[-1]
            if last.received_us + last.duration_us < self._interval_ends_us:
                self._count(events)
                return
            for event in events:  # once per interval: each event belongs to the interval of its own time
                now_us = event.received_us + event.duration_us
                if now_us >= self._interval_ends_us:
                    self._begin_interval(now_us)
                self._count([event])

    def read(self) -> list[Sample]:
        """All metrics at this moment."""
        states = list(self._gates)
        gates = [gate for state in states if (gate := state.gate()) is not None]
        for gate in gates:
            gate.flush_events()
            if (meter := getattr(gate, "quota_meter", None)) is not None:
                self.watch_meter(meter)
        with self._lock:
            self._fold()
            samples = list(self._decision_samples(max([self._now_us, *[gate.now_us() for gate in gates]])))
        sums: dict[tuple[str, Labels], float] = {}
        sources: list[GateState | MeterState] = [*states, *self._meters]
        for source in sources:
            for name, labels, value in source.read():
                total = sums.get((name, labels), 0)
                sums[name, labels] = max(total, value) if FAMILIES[name].aggregation == "max" else total + value
        return samples + [Sample(FAMILIES[name], labels, value) for (name, labels), value in sums.items()]

    def reset_after_fork(self) -> None:
        """Start at zero: the counts of the parent are exported by the parent."""
        for totals in self._totals.values():
            totals.clear()
        for gate in self._gates:
            gate.reset()
        for meter in self._meters:
            meter.reset()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[Any, _Tally] = {}
        self._limits: dict[str, LimitStats] = {}
        self._latency = [0] * (len(LATENCY_US) + 1)
        self._latency_us = 0
        self._now_us = self._interval_ends_us = self._window_ends_us = 0

    def _count(self, events: Sequence[DecisionEvent]) -> None:
        durations_us = [event[1] for event in events]  # not positive if the clock was set back
        for bucket, count in Counter(map(bisect_left, repeat(LATENCY_US), durations_us)).items():
            self._latency[bucket] += count
        self._latency_us += sum([duration_us for duration_us in durations_us if duration_us > 0])
        groups: defaultdict[Any, list[DecisionEvent]] = defaultdict(list)
        for event in events:
            _, _, _, outcome, (route, _, _, rules, _, tier, _, _), decision, shadows, *_ = event
            if outcome == "allowed" and decision is not None and decision[4] is None and rules is route.rules:
                groups[route, tier].append(event)
            else:
                groups[_group_key(event)].append(event)
            for limit, answer in shadows:
                if not answer.allowed:
                    self._totals["shadow_blocked"].add((limit.rule.name, route.route_class or NONE, route.endpoint))
        for key, group in groups.items():
            tally = self._tallies.get(key)
            if tally is None:
                stats = [self._stats_of(rule.rule.name, rule.rule.by) for rule in group[0].resolution.rules]
                tally = self._tallies[key] = _Tally(group[0], stats)
            tally.count += len(group)
            decision = group[0].decision
            if decision is not None and decision.degraded is None:
                _record(tally.stats, group)

    def _stats_of(self, name: str, by: tuple[str, ...]) -> LimitStats:
        if name not in self._limits and len(self._limits) >= MAX_LIMITS:
            name, by = OTHER, (OTHER,)
        if name not in self._limits:
            self._limits[name] = LimitStats(" ".join(by) or NONE)
        return self._limits[name]

    def _begin_interval(self, now_us: int) -> None:
        self._fold()
        self._now_us, self._interval_ends_us = now_us, now_us + INTERVAL_US
        for stats in self._limits.values():
            stats.forget_recovered(now_us)
            if now_us >= self._window_ends_us:
                stats.start_window()
        if now_us >= self._window_ends_us:
            self._window_ends_us = now_us + WINDOW_US

    def _fold(self) -> None:
        tallies, self._tallies = self._tallies, {}
        totals = self._totals
        for tally in tallies.values():
            (_, _, _, outcome, (route, _, _, rules, _, tier, _, _), decision, *_), count = tally.event, tally.count
            tier, place = tier or NONE, (route.route_class or NONE, route.endpoint)
            totals["decisions"].add((outcome, *place, tier), count)
            if outcome == "allowed":
                for rule in rules:
                    totals["allowed"].add((rule.rule.name, *place), count)
            else:
                is_shed = outcome == "unavailable" and decision is None
                totals["rejections"].add((tier, "overload" if is_shed else REASONS[outcome]), count)
            if decision is not None:
                for name in decision.denied_by if outcome == "denied" else ():
                    totals["blocked"].add((name, *place), count)
                if decision.degraded is not None:
                    totals["degraded_mode"].add((MODES[route.on_failure],), count)

    def _decision_samples(self, now_us: int) -> Iterator[Sample]:
        bounds = tuple([bound / 1_000_000 for bound in LATENCY_US])
        latency = Histogram(bounds, tuple(self._latency), self._latency_us / 1_000_000)
        yield Sample(FAMILIES["rate_limiter_check_latency_seconds"], (), latency)
        for name, totals in self._totals.items():
            for labels, value in totals.items():
                yield Sample(FAMILIES[f"rate_limiter_{name}"], labels, value)
        for limit, stats in self._limits.items():
            yield Sample(FAMILIES["rate_limiter_remaining_ratio"], (limit,), stats.remaining)
            yield Sample(FAMILIES["rate_limiter_keys"], (limit, stats.by), stats.size)
            yield Sample(FAMILIES["rate_limiter_keys_at_zero"], (limit,), stats.count_at_zero(now_us))


class GateState:
    """Reads the metrics of one gate's store and policy."""

    def __init__(self, gate: DecisionSource, lag: Lag | None) -> None:
        self.gate = ref(gate)
        self.lag = lag
        self._rejected_since: float | None = None
        self._bounds: tuple[Policy, int, list[tuple[str, int]]] | None = None
        self._events = LabeledTotals(*[(kind,) for kind in EVENT_KINDS])
        self.reset()
        gate.add_store_listener(self._on_store_event)

    def reset(self) -> None:
        """Start at zero, in a forked child: what the parent saw is exported by the parent."""
        self._events.clear()
        self._outages = 0
        self._outage_seconds = self._outage_requests = 0.0
        """Of outages that are over."""
        self._counters: Counters = {}

    def read(self) -> Iterator[tuple[str, Labels, float]]:
        """Names, label values and values of all metrics."""
        gate = self.gate()
        parts = (self._health, self._policy, self._lists, self._messages, self._overload, self._actions, self._stats)
        read = [] if gate is None else [sample for part in parts for sample in part(gate)]
        return _keep_counters(read, self._counters)

    def _health(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        health = gate.health()
        degraded_for = health.degraded_for or 0.0
        yield "degraded", (), float(not health.ready)
        yield "fallback_mode", (), self._outages
        yield "fallback_seconds", (), self._outage_seconds + degraded_for
        yield "fallback_current_seconds", (), degraded_for
        yield "redis_errors", (), self._outage_requests + health.decided_without
        yield "nodes", (), health.nodes
        yield "owed_tokens", (), health.owed_tokens
        if (outage := health.last_outage) is not None:
            yield "outage_overshoot", (outage.limit,), outage.admitted - outage.capacity
            if outage.bound is not None:
                yield "outage_bound", (outage.limit,), outage.bound - outage.capacity
        for name, over in self._bounds_of(gate.policy, health.nodes):
            yield "overshoot_bound", (name,), over
        for state, is_ready in (("ready", True), ("down", False)):
            yield "shards", (state,), sum([shard.ready is is_ready for shard in health.shards])
        for labels, value in self._events.items():
            yield "store_events", labels, value
        yield "events_dropped", (), gate.dropped_events

    def _bounds_of(self, policy: Policy, nodes: int) -> list[tuple[str, int]]:
        """The bounds of the limits that are enforced, computed once for each policy and number of nodes."""
        if self._bounds is None or self._bounds[0] is not policy or self._bounds[1] != nodes:
            rules = [rule for rule in policy.rules[:MAX_LIMITS] if not rule.shadow]
            self._bounds = policy, nodes, [(rule.name, largest_bound(policy, rule, nodes)) for rule in rules]
        return self._bounds[2]

    def _policy(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        yield "config_info", (gate.policy_version or NONE,), 1
        if self.lag is not None:
            yield "config_refresh_lag_seconds", (), self.lag()
            return
        if gate.policy_error is None:
            self._rejected_since = None
        elif self._rejected_since is None:
            self._rejected_since = time.monotonic()
        since = self._rejected_since
        yield "config_refresh_lag_seconds", (), 0.0 if since is None else time.monotonic() - since

    def _messages(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        for (name, outcome), count in gate.message_counts.items():
            yield "messages", (name, outcome), count

    def _lists(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        for status in gate.list_status:
            labels = (status.name,)
            yield "list_networks", labels, status.networks
            yield "list_failed", labels, float(status.error is not None)
            if status.is_loaded:
                yield "list_age_seconds", labels, max(0.0, time.time() - status.checked_us / 1_000_000)

    def _stats(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        stats = gate.store_stats
        if not isinstance(stats, dict):
            yield "memory_keys", (), stats.keys
            yield "memory_forgiven", (), stats.forgiven
            return
        yield "redis_ops", (), stats["calls"]
        yield "redis_round_trips", (), stats["round_trips"]
        yield "local_cache_hits", ("remembered",), stats["remembered"]
        yield "local_cache_hits", ("prepaid",), stats["prepaid"]
        yield "hot_keys", (), stats["hot_keys"]
        yield "script_eval_errors", (), stats["script_errors"]
        yield "hot_keys_detected", (), stats["hot_keys_detected"]

    def _overload(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        for scope, stats in gate.overload_stats().items():
            yield "overload_limit", (scope,), stats.limit
            yield "overload_in_flight", (scope,), stats.in_flight
            yield "overload_latency_seconds", (scope, "now"), stats.latency
            yield "overload_latency_seconds", (scope, "base"), stats.base_latency
            for priority, count in stats.shed.items():
                yield "overload_shed", (scope, priority), count

    def _actions(self, gate: DecisionSource) -> Iterator[tuple[str, Labels, float]]:
        taken, dropped, challenges, held, found = gate.action_counts
        for scenario, count in found.items():
            yield "findings", (scenario,), count
        for (scenario, action, is_shadow), count in taken.items():
            yield "actions", (scenario, action, "shadow" if is_shadow else "enforced"), count
        for outcome, count in challenges.items():
            yield "challenges", (outcome,), count
        yield "held_requests", (), held
        yield "findings_dropped", (), dropped

    def _on_store_event(self, event: Event) -> None:
        self._events.add((event.kind,))
        if event.kind == "store-lost":
            self._outages += 1
        elif event.kind == "store-back":
            self._outage_seconds += event.details["seconds"]
            self._outage_requests += event.details["requests"]


class MeterState:
    """Reads the metrics of a quota meter."""

    def __init__(self, meter: MeterSource) -> None:
        self.meter = ref(meter)
        self.reset()

    def reset(self) -> None:
        """Start at zero, in a forked child."""
        self._counters: Counters = {}

    def read(self) -> Iterator[tuple[str, Labels, float]]:
        """Names, label values and values of all metrics."""
        meter = self.meter()
        return _keep_counters(() if meter is None else self._stats(meter.stats()), self._counters)

    def _stats(self, stats: MeterCounts) -> Iterator[tuple[str, Labels, float]]:
        yield "quota_leased", (), stats.leased
        yield "quota_leases", (), stats.leases
        yield "quota_unwritten", (), stats.unwritten
        yield "quota_unwritten_seconds", (), stats.unwritten_s
        yield "quota_outage", (), stats.outage
        yield "quota_charges", (), stats.charges
        yield "quota_ledger_writes", (), stats.ledger_writes
        yield "quota_ledger_unavailable", (), float(not stats.is_ledger_available)
        for (quota, reason), count in stats.rejections.items():
            yield "quota_rejections", (quota, reason), count


def _keep_counters(
    read: Iterable[tuple[str, Labels, float]], counters: Counters
) -> Iterator[tuple[str, Labels, float]]:
    """Values with the full names of their families. Counters keep their last value when their source is gone."""
    for suffix, labels, value in read:
        name = f"rate_limiter_{suffix}"
        if FAMILIES[name].kind == "counter":
            counters[name, labels] = max(value, counters.get((name, labels), 0))
        else:
            yield name, labels, value
    for (name, labels), value in counters.items():
        yield name, labels, value


@dataclass(slots=True)
class _Tally:
    """The number of decisions with the same labels since the last fold."""

    event: DecisionEvent
    """The first of them."""
    stats: list[LimitStats]
    """Those of the limits that apply."""
    count: int = 0


def _record(stats_of_limits: list[LimitStats], events: Sequence[DecisionEvent]) -> None:
    keys = zip(*[event[4][1] for event in events], strict=True)
    verdicts = zip(*[event[5][2] for event in events if event[5] is not None], strict=True)
    has_one_limit = events[0].outcome == "allowed" and not events[0].resolution.route.has_overrides
    for stats, keys_of_limit, verdicts_of_limit in zip(stats_of_limits, keys, verdicts, strict=True):
        if has_one_limit:
            identities, left = [key[2] for key in keys_of_limit], [verdict[0] for verdict in verdicts_of_limit]
            if stats.record_passed(identities, left, keys_of_limit[0].limit.capacity):
                continue
        for event, (limit, _, identity), verdict in zip(events, keys_of_limit, verdicts_of_limit, strict=True):
            now_us = event.received_us + event.duration_us
            stats.record(identity, verdict[0] / limit.capacity, verdict[1], now_us)


def _group_key(event: DecisionEvent) -> tuple[Any, ...]:
    """Everything that the labels of a decision depend on."""
    resolution, decision = event.resolution, event.decision
    return (
        resolution.route,
        resolution.tier,
        event.outcome,
        None if resolution.rules is resolution.route.rules else tuple([id(rule) for rule in resolution.rules]),
        None if decision is None else tuple([verdict[1] == 0 for verdict in decision.verdicts]),
        decision is not None and decision.degraded is not None,
        max([each.factor for each in event.restrictions], default=1),
    )
