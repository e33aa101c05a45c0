"""Metrics over the decisions of gates, collected by the exporters for Prometheus and OpenTelemetry.

Labels never contain a client, a key or a path, and a family has at most `MAX_SERIES` series; what is beyond is counted
under "other". See docs/metrics.md.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.telemetry.metrics.families import FAMILIES, LATENCY_US, Histogram, Sample
from headgate.telemetry.metrics.gate_state import NONE, GateState
from headgate.telemetry.metrics.labeled_totals import OTHER, LabeledTotals
from headgate.telemetry.metrics.limit_stats import WINDOW_US, LimitStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.telemetry.metrics.labeled_totals import Labels

__all__ = ["MAX_LIMITS", "MODES", "Metrics"]

MAX_LIMITS: Final = 200
"""Limits with statistics of their own; the others share one."""
INTERVAL_US: Final = 60_000_000
"""The longest time for which tallies, and with them a policy that is no longer in force, are kept in memory."""

MODES: Final = {"open": "fail_open", "closed": "fail_closed", "local": "fail_local"}
REASONS: Final = {"denied": "limit", "blocked": "blocked", "unavailable": "unavailable"}


class Metrics:
    """The metrics of one gate, or of several that are exported under one name.

    >>> from headgate.gate.gate import Gate
    >>> from headgate.policy import read
    >>> gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    >>> metrics = Metrics()
    >>> metrics.watch(gate)
    True
    >>> sorted({sample.family.name for sample in metrics.read()})[:2]
    ['rate_limiter_check_latency_seconds', 'rate_limiter_config_info']
    """

    def __init__(self) -> None:
        self._gates: list[GateState] = []
        self._totals = {name: LabeledTotals() for name in ("decisions", "allowed", "blocked", "shadow_blocked")}
        self._totals["rejections"] = LabeledTotals()
        self._totals["degraded_mode"] = LabeledTotals(*[(mode,) for mode in MODES.values()])
        self._begin()
        reinit_after_fork(self)

    def watch(self, gate: GateBase, *, lag: Callable[[], float] | None = None) -> bool:
        """Count the decisions of a gate from now on; False if it is watched already.

        `lag` returns the seconds for which its policy has not been the newest; by default, the time for which the
        newest policy file has been invalid.
        """
        with self._lock:
            for state in self._gates:
                if state.is_of(gate):
                    state.lag = lag or state.lag
                    return False
            self._gates.append(GateState(gate, lag))
        gate.add_observer(self)
        return True

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
        gates = list(self._gates)
        for state in gates:
            state.flush_events()
        with self._lock:
            self._fold()
            now_us = max([self._now_us, *[state.now_us() for state in gates]])
            samples = list(self._decision_samples(now_us))
        sums: dict[tuple[str, Labels], float] = {}
        for state in gates:
            for name, labels, value in state.read():
                total = sums.get((name, labels), 0)
                sums[name, labels] = max(total, value) if FAMILIES[name].aggregation == "max" else total + value
        return samples + [Sample(FAMILIES[name], labels, value) for (name, labels), value in sums.items()]

    def reset_after_fork(self) -> None:
        """Start at zero: the counts of the parent are exported by the parent."""
        for totals in self._totals.values():
            totals.clear()
        for state in self._gates:
            state.reset()
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
            _, _, _, outcome, (route, _, _, rules, _, tier, _, _), decision, shadows, _ = event
            if outcome == "allowed" and decision is not None and decision[4] is None and rules is route.rules:
                groups[route, tier].append(event)
            else:
                groups[_group_key(event)].append(event)
            if shadows:
                self._count_shadows(event)
        for key, group in groups.items():
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = self._new_tally(group[0])
            tally.count += len(group)
            if not tally.is_degraded and group[0].decision is not None:
                tally.record(group)

    def _count_shadows(self, event: DecisionEvent) -> None:
        route = event.resolution.route
        for limit, decision in event.shadows:
            if not decision.allowed:
                self._totals["shadow_blocked"].add((limit.rule.name, route.route_class or NONE, route.endpoint))

    def _new_tally(self, event: DecisionEvent) -> _Tally:
        return _Tally(event, [self._stats_of(rule.rule.name, rule.rule.by) for rule in event.resolution.rules])

    def _stats_of(self, name: str, by: tuple[str, ...]) -> LimitStats:
        if name not in self._limits and len(self._limits) >= MAX_LIMITS:
            name, by = OTHER, (OTHER,)
        stats = self._limits.get(name)
        if stats is None:
            stats = self._limits[name] = LimitStats(" ".join(by) or NONE)
        return stats

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
        """Add the tallies to the labelled totals."""
        tallies, self._tallies = self._tallies, {}
        totals = self._totals
        for tally in tallies.values():
            route_class, endpoint, count = tally.route.route_class or NONE, tally.route.endpoint, tally.count
            totals["decisions"].add((tally.outcome, route_class, endpoint, tally.tier), count)
            if tally.outcome == "allowed":
                for name in tally.limits:
                    totals["allowed"].add((name, route_class, endpoint), count)
            else:
                totals["rejections"].add((tally.tier, REASONS[tally.outcome]), count)
            for name in tally.denied_by:
                totals["blocked"].add((name, route_class, endpoint), count)
            if tally.is_degraded:
                totals["degraded_mode"].add((MODES[tally.route.on_failure],), count)

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


class _Tally:
    """The number of decisions with the same labels since the last fold."""

    __slots__ = ("count", "denied_by", "is_degraded", "limits", "outcome", "route", "stats", "tier")

    def __init__(self, event: DecisionEvent, stats: list[LimitStats]) -> None:
        resolution, decision = event.resolution, event.decision
        self.count = 0
        self.route = resolution.route
        self.tier = resolution.tier or NONE
        self.limits = tuple([rule.rule.name for rule in resolution.rules])
        self.outcome = event.outcome
        self.denied_by = decision.denied_by if decision is not None and event.outcome == "denied" else ()
        self.is_degraded = decision is not None and decision.degraded is not None
        self.stats = stats

    def record(self, events: Sequence[DecisionEvent]) -> None:
        """Record the answers of each limit in its statistics."""
        keys = zip(*[event[4][1] for event in events], strict=True)
        verdicts = zip(*[event[5][2] for event in events if event[5] is not None], strict=True)
        has_one_limit = self.outcome == "allowed" and not self.route.has_overrides
        for stats, keys_of_limit, verdicts_of_limit in zip(self.stats, keys, verdicts, strict=True):
            if has_one_limit and stats.record_passed(
                [key[2] for key in keys_of_limit],
                [verdict[0] for verdict in verdicts_of_limit],
                keys_of_limit[0].limit.capacity,
            ):
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
    )
