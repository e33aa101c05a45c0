"""Metrics of a gate's store and policy, read from the gate when they are collected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final
from weakref import ref

from headgate.telemetry.metrics.families import FAMILIES
from headgate.telemetry.metrics.labeled_totals import LabeledTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.events import Event
    from headgate.gate.base import GateBase
    from headgate.telemetry.metrics.labeled_totals import Labels

__all__ = ["NONE", "GateState"]

NONE: Final = "none"
"""The label of a route without a class, a client without a tier, a policy without a version."""
EVENT_KINDS: Final = ("store-lost", "store-back", "state-lost", "moved", "settled")


class GateState:
    """Reads the metrics of one gate's store and policy."""

    def __init__(self, gate: GateBase, lag: Callable[[], float] | None) -> None:
        self._gate = ref(gate)
        self.lag = lag
        self._rejected_since: float | None = None
        self._events = LabeledTotals(*[(kind,) for kind in EVENT_KINDS])
        self.reset()
        gate.add_store_listener(self._on_store_event)

    def reset(self) -> None:
        """Start at zero, in a forked child: what the parent saw is exported by the parent."""
        self._events.clear()
        self._outages = 0
        self._outage_seconds = self._outage_requests = 0.0
        """Of outages that are over."""
        self._counters: dict[tuple[str, Labels], float] = {}
        """The last values, so that no counter falls when its gate is gone."""

    def is_of(self, gate: GateBase) -> bool:
        return self._gate() is gate

    def flush_events(self) -> None:
        if (gate := self._gate()) is not None:
            gate.flush_events()

    def now_us(self) -> int:
        gate = self._gate()
        return 0 if gate is None else gate.now_us()

    def read(self) -> Iterator[tuple[str, Labels, float]]:
        """Names, label values and values of all metrics."""
        gate = self._gate()
        read = [] if gate is None else [*self._health(gate), *self._policy(gate), *self._stats(gate)]
        for name, labels, value in [(f"rate_limiter_{name}", labels, value) for name, labels, value in read]:
            if FAMILIES[name].kind == "counter":
                self._counters[name, labels] = max(value, self._counters.get((name, labels), 0))
            else:
                yield name, labels, value
        for (name, labels), value in self._counters.items():
            yield name, labels, value

    def _health(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
        health = gate.health()
        degraded_for = health.degraded_for or 0.0
        yield "degraded", (), float(not health.ready)
        yield "fallback_mode", (), self._outages
        yield "fallback_seconds", (), self._outage_seconds + degraded_for
        yield "fallback_current_seconds", (), degraded_for
        yield "redis_errors", (), self._outage_requests + health.decided_without
        yield "nodes", (), health.nodes
        yield "owed_tokens", (), health.owed_tokens
        for state, is_ready in (("ready", True), ("down", False)):
            yield "shards", (state,), sum([shard.ready is is_ready for shard in health.shards])
        for labels, value in self._events.items():
            yield "store_events", labels, value
        yield "events_dropped", (), gate.dropped_events

    def _policy(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
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

    def _stats(self, gate: GateBase) -> Iterator[tuple[str, Labels, float]]:
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

    def _on_store_event(self, event: Event) -> None:
        self._events.add((event.kind,))
        if event.kind == "store-lost":
            self._outages += 1
        elif event.kind == "store-back":
            self._outage_seconds += event.details["seconds"]
            self._outage_requests += event.details["requests"]
