"""What gates do, as numbers: counted as decisions are made, cheaply, and read by whoever exports them.

No client, key or path is ever among the labels, and there are at most `MOST_SERIES` series of each kind: beyond that,
all go under "other". See docs/metrics.md.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import ref

from headgate._fork import reinit_after_fork
from headgate.telemetry.metrics.families import FAMILIES, LATENCY_US, Histogram, Sample
from headgate.telemetry.metrics.limit_stats import WINDOW_US, LimitStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headgate.decisions import Decision
    from headgate.events import Event
    from headgate.gate.admission import Shadow
    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.policy.snapshot import Resolution, RoutePlan

__all__ = ["MODES", "MOST_CROWDS", "MOST_SERIES", "OTHER", "LabeledTotals", "Metrics"]

OTHER: Final = "other"
NONE: Final = "none"
"""The label of what has no name: a route without a class, a client without a tier."""
MOST_SERIES: Final = 500
MOST_CROWDS: Final = 200
TURN_US: Final = 60_000_000
"""What was counted is put under its labels so often at least: until then, an old policy is kept alive by it."""

MODES: Final = {"open": "fail_open", "closed": "fail_closed", "local": "fail_local"}
REASONS: Final = {"denied": "limit", "blocked": "blocked", "unavailable": "unavailable"}

Labels: TypeAlias = tuple[str, ...]


class LabeledTotals:
    """Sums under labels; those that would be too many go under "other"."""

    def __init__(self, *known: Labels) -> None:
        self._known = known
        self.clear()

    def clear(self) -> None:
        # From the beginning, with 0: what appears with 1 has not risen, for whoever looks at differences.
        self._sums: dict[Labels, float] = dict.fromkeys(self._known, 0)

    def add(self, labels: Labels, amount: float = 1) -> None:
        if labels not in self._sums and len(self._sums) >= MOST_SERIES:
            labels = (OTHER,) * len(labels)
        self._sums[labels] = self._sums.get(labels, 0) + amount

    def items(self) -> list[tuple[Labels, float]]:
        return list(self._sums.items())


class _Tally:
    """How many requests of one kind there were since the last turn."""

    __slots__ = ("crowds", "denied", "is_degraded", "met", "number", "outcome", "route", "tier")

    def __init__(
        self, resolution: Resolution, outcome: str, denied: Labels, *, crowds: list[LimitStats], is_degraded: bool
    ) -> None:
        self.number = 0
        self.route = resolution.route
        self.tier = resolution.tier or NONE
        self.met = tuple([rule.rule.name for rule in resolution.rules])
        self.outcome = outcome
        self.denied = denied
        self.crowds = crowds
        self.is_degraded = is_degraded


class Metrics:
    """The numbers of one gate, or of several that are one to whoever looks at them.

    >>> from headgate.gate.gate import Gate
    >>> from headgate.policy import read
    >>> gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    >>> metrics = Metrics()
    >>> metrics.watch(gate)
    True
    >>> sorted({reading.family.name for reading in metrics.read()})[:2]
    ['rate_limiter_check_latency_seconds', 'rate_limiter_config_info']
    """

    def __init__(self) -> None:
        self._decisions, self._rejections = LabeledTotals(), LabeledTotals()
        self._allowed, self._blocked, self._shadows = LabeledTotals(), LabeledTotals(), LabeledTotals()
        self._degraded = LabeledTotals(*[(mode,) for mode in MODES.values()])
        self._sources: list[_Source] = []
        self._begin()
        reinit_after_fork(self)

    def watch(self, gate: GateBase, *, lag: Callable[[], float] | None = None) -> bool:
        """Count what the gate decides from now on. Whether it was not watched already: nothing is counted twice.

        `lag` tells for how many seconds its policy has not been the newest one; if not given, for how long a policy
        file has been refused.
        """
        with self._lock:
            for source in self._sources:
                if source.is_of(gate):
                    source.lag = lag or source.lag
                    return False
            self._sources.append(_Source(gate, lag))
        gate.add_observer(self)
        return True

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        with self._lock:
            for event in events:
                self._count(event)

    def _count(self, event: DecisionEvent) -> None:
        received_us, took_us, _, outcome, resolution, decision, shadows, _ = event
        now_us = received_us + took_us
        if now_us >= self._turns_us:
            self._turn(now_us)
        # The clock may have been set meanwhile.
        if took_us > 0:
            self._latency[bisect_left(LATENCY_US, took_us)] += 1
            self._latency_us += took_us
        else:
            self._latency[0] += 1
        route, keys, _, rules, _, tier, _, _ = resolution
        kind: tuple[Any, ...]
        if decision is not None and decision[0] and decision[4] is None and rules is route.rules:
            kind = route, tier
        else:
            kind = self._unusual(outcome, resolution, decision)
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._opened(kind, event)
        tally.number += 1
        if decision is not None and not tally.is_degraded:
            for crowd, (limit, _, identity), verdict in zip(tally.crowds, keys, decision[2], strict=True):
                crowd.note(identity, verdict[0] / limit.capacity, verdict[1], now_us)
        if shadows:
            self._note_shadows(shadows, route)

    def read(self) -> list[Sample]:
        """All numbers as they are now."""
        for source in list(self._sources):
            source.flush()
        with self._lock:
            self._fold()
            sources = list(self._sources)
            now_us = max([self._now_us, *[source.now_us() for source in sources]])
            readings = list(self._counted(now_us))
        sums: dict[tuple[str, Labels], float] = {}
        for source in sources:
            for name, labels, value in source.read():
                at, before = (name, labels), sums.get((name, labels), 0)
                sums[at] = max(before, value) if FAMILIES[name].gathering == "max" else before + value
        return readings + [Sample(FAMILIES[name], labels, value) for (name, labels), value in sums.items()]

    def reset_after_fork(self) -> None:
        """What the parent has counted, it tells itself."""
        for totals in (
            self._decisions, self._rejections, self._allowed, self._blocked, self._shadows, self._degraded
        ):  # fmt: skip
            totals.clear()
        for source in self._sources:
            source.begin()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[Any, _Tally] = {}
        self._crowds: dict[str, LimitStats] = {}
        self._latency = [0] * (len(LATENCY_US) + 1)
        self._latency_us = 0
        self._now_us = self._turns_us = self._window_ends_us = 0

    @staticmethod
    def _unusual(outcome: str, resolution: Resolution, decision: Decision | None) -> tuple[Any, ...]:
        """What sets a request apart from those that meet all limits of their route and pass."""
        rules = resolution.rules
        return (
            resolution.route,
            resolution.tier,
            outcome,
            None if rules is resolution.route.rules else tuple([id(rule) for rule in rules]),
            None if decision is None else tuple([verdict[1] == 0 for verdict in decision[2]]),
            decision is not None and decision[4] is not None,
        )

    def _opened(self, kind: tuple[Any, ...], event: DecisionEvent) -> _Tally:
        decision, outcome, resolution = event.decision, event.outcome, event.resolution
        tally = self._tallies[kind] = _Tally(
            resolution,
            outcome,
            decision.denied_by if decision is not None and outcome == "denied" else (),
            crowds=[self._crowd(rule.rule.name, rule.rule.by) for rule in resolution.rules],
            is_degraded=decision is not None and decision.degraded is not None,
        )
        return tally

    def _crowd(self, name: str, by: tuple[str, ...]) -> LimitStats:
        if name not in self._crowds and len(self._crowds) >= MOST_CROWDS:
            name, by = OTHER, (OTHER,)
        crowd = self._crowds.get(name)
        if crowd is None:
            crowd = self._crowds[name] = LimitStats(" ".join(by) or NONE)
        return crowd

    def _note_shadows(self, shadows: Sequence[Shadow], route: RoutePlan) -> None:
        for met, decision in shadows:
            if not decision.allowed:
                self._shadows.add((met.rule.name, route.route_class or NONE, route.endpoint))

    def _turn(self, now_us: int) -> None:
        self._fold()
        self._now_us, self._turns_us = now_us, now_us + TURN_US
        for crowd in self._crowds.values():
            crowd.forget_recovered(now_us)
            if now_us >= self._window_ends_us:
                crowd.end_window()
        if now_us >= self._window_ends_us:
            self._window_ends_us = now_us + WINDOW_US

    def _fold(self) -> None:
        """Put what was counted under its labels."""
        tallies, self._tallies = self._tallies, {}
        for tally in tallies.values():
            route_class, endpoint, number = tally.route.route_class or NONE, tally.route.endpoint, tally.number
            self._decisions.add((tally.outcome, route_class, endpoint, tally.tier), number)
            if tally.outcome == "allowed":
                for name in tally.met:
                    self._allowed.add((name, route_class, endpoint), number)
            else:
                self._rejections.add((tally.tier, REASONS[tally.outcome]), number)
            for name in tally.denied:
                self._blocked.add((name, route_class, endpoint), number)
            if tally.is_degraded:
                self._degraded.add((MODES[tally.route.on_failure],), number)

    def _counted(self, now_us: int) -> Iterator[Sample]:
        bounds = tuple([bound / 1_000_000 for bound in LATENCY_US])
        latency = Histogram(bounds, tuple(self._latency), self._latency_us / 1_000_000)
        yield Sample(FAMILIES["rate_limiter_check_latency_seconds"], (), latency)
        for name, totals in (
            ("decisions", self._decisions),
            ("allowed", self._allowed),
            ("blocked", self._blocked),
            ("shadow_blocked", self._shadows),
            ("rejections", self._rejections),
            ("degraded_mode", self._degraded),
        ):
            for labels, value in totals.items():
                yield Sample(FAMILIES[f"rate_limiter_{name}"], labels, value)
        for policy, crowd in self._crowds.items():
            yield Sample(FAMILIES["rate_limiter_remaining_ratio"], (policy,), crowd.remaining)
            yield Sample(FAMILIES["rate_limiter_keys"], (policy, crowd.by), crowd.size)
            yield Sample(FAMILIES["rate_limiter_keys_at_zero"], (policy,), crowd.at_zero(now_us))


class _Source:
    """What one gate tells of its store and its policy, when asked."""

    def __init__(self, gate: GateBase, lag: Callable[[], float] | None) -> None:
        self._gate = ref(gate)
        self.lag = lag
        self._refused_since: float | None = None
        self._events = LabeledTotals(
            *[(kind,) for kind in ("store-lost", "store-back", "state-lost", "moved", "settled")]
        )
        self.begin()
        _listen(gate, self._hear)

    def begin(self) -> None:
        """Nothing has happened yet, as in a child: its parent tells what it saw."""
        self._events.clear()
        self._outages = 0
        self._seconds = self._errors = 0.0
        """Of outages that are over."""
        self._counters: dict[tuple[str, Labels], float] = {}
        """As last read: a counter never falls, also when its gate is gone."""

    def is_of(self, gate: GateBase) -> bool:
        return self._gate() is gate

    def flush(self) -> None:
        gate = self._gate()
        if gate is not None:
            gate.flush_events()

    def now_us(self) -> int:
        gate = self._gate()
        return 0 if gate is None else gate.now_us()

    def read(self) -> Iterator[tuple[str, Labels, float]]:
        gate = self._gate()
        gauges: list[tuple[str, Labels, float]] = []
        if gate is not None:
            gauges = [*self._health(gate), *self._policy(gate), *self._stats(gate)]
        for name, labels, value in [(f"rate_limiter_{name}", labels, value) for name, labels, value in gauges]:
            if FAMILIES[name].kind == "counter":
                self._counters[name, labels] = max(value, self._counters.get((name, labels), 0))
            else:
                yield name, labels, value
        for (name, labels), value in self._counters.items():
            yield name, labels, value

    def _health(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
        health = gate.health()
        lasts = health.degraded_for or 0.0
        yield "degraded", (), float(not health.ready)
        yield "fallback_mode", (), self._outages
        yield "fallback_seconds", (), self._seconds + lasts
        yield "fallback_current_seconds", (), lasts
        yield "redis_errors", (), self._errors + health.decided_without
        yield "nodes", (), health.nodes
        yield "owed_tokens", (), health.owed_tokens
        for state, is_ready in (("ready", True), ("down", False)):
            yield "shards", (state,), sum([shard.ready is is_ready for shard in health.shards])
        for labels, value in self._events.items():
            yield "store_events", labels, value

    def _policy(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
        yield "events_dropped", (), gate.dropped_events
        yield "config_info", (gate.policy_version or NONE,), 1
        if self.lag is not None:
            yield "config_refresh_lag_seconds", (), self.lag()
            return
        if gate.policy_error is None:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = time.monotonic()
        since = self._refused_since
        yield "config_refresh_lag_seconds", (), 0.0 if since is None else time.monotonic() - since

    def _stats(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
        stats = gate._limiter.stats  # noqa: SLF001 - a gate shows its limiter to nobody else
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

    def _hear(self, event: Event) -> None:
        self._events.add((event.kind,))
        if event.kind == "store-lost":
            self._outages += 1
        elif event.kind == "store-back":
            self._seconds += event.details["seconds"]
            self._errors += event.details["requests"]


def _listen(gate: GateBase, listener: Callable[[Event], Any]) -> None:
    """Tell the listener of what happens to the gate's store, after whoever is told already."""
    herald = gate._limiter._front.outage._herald  # noqa: SLF001
    before = herald._listener  # noqa: SLF001

    def both(event: Event) -> None:
        try:
            if before is not None:
                before(event)
        finally:
            listener(event)

    herald._listener = both  # noqa: SLF001
