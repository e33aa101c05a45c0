"""The metrics of gates for OpenTelemetry, and spans for those who want them. See docs/metrics.md."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

from headgate.errors import InvalidConfiguration
from headgate.gate.event_stream import outcome_of
from headgate.telemetry.metrics import families
from headgate.telemetry.metrics.counters import MODES, Metrics
from headgate.telemetry.metrics.families import FAMILIES, LATENCY_US, REMAINING_SHARES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

    from headgate.gate.admission import Admission
    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.gate.request import RequestInfo
    from headgate.telemetry.metrics.families import Family, Sample

__all__ = ["Instruments", "instrument", "trace"]

SCOPE: Final = "headgate"

LATENCY: Final = FAMILIES["rate_limiter_check_latency_seconds"]
REMAINING: Final = FAMILIES["rate_limiter_remaining_ratio"]


def instrument(
    gate: GateBase,
    provider: MeterProvider | None = None,
    *,
    name: str = "default",
    lag: Callable[[], float] | None = None,
) -> Metrics:
    """Show the gate's metrics through a MeterProvider: the one that was set for the process, if none is given.

    Several gates may be instrumented: under their own names they are told apart by the attribute `gate`, under the
    same name they are one. `lag` tells for how many seconds the policy has not been the newest, where it comes from no
    file.
    """
    _demand_library()
    if provider is None:
        from opentelemetry.metrics import get_meter_provider

        provider = get_meter_provider()
    instruments = _instruments.get(provider)
    if instruments is None:
        instruments = _instruments[provider] = Instruments(provider)
    return instruments.add(gate, name, lag)


def trace(gate: GateBase, provider: TracerProvider | None = None) -> None:
    """Make a span of each decision of the gate, a child of the span that is current: `headgate.check`.

    Its attributes tell the route, the limits and the outcome, but never the client.
    """
    _demand_library()
    from opentelemetry import trace as tracing

    provider = tracing.get_tracer_provider() if provider is None else provider
    traced = _traced.setdefault(gate, WeakSet())
    if provider in traced:
        return
    traced.add(provider)
    tracer = provider.get_tracer(SCOPE)
    elapsed_us = _stopwatch(gate)

    def hook(_: RequestInfo, admission: Admission) -> None:
        if admission.resolution is not None:
            start_ns = time.time_ns() - elapsed_us(admission) * 1000
            span = tracer.start_span("headgate.check", start_time=start_ns)
            if span.is_recording():
                span.set_attributes(_attributes(admission))
            span.end()

    gate.add_decision_hook(hook)


_instruments: WeakKeyDictionary[Any, Instruments] = WeakKeyDictionary()
"""Of each provider: instruments that are made twice are told of twice."""
_traced: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""The providers that have a span of each decision of a gate already."""


class Instruments:
    """All instruments, for any number of gates.

    Counters and gauges are read when they are exported. OpenTelemetry has no such way for histograms: those are
    recorded with each decision.
    """

    def __init__(self, provider: MeterProvider) -> None:
        self._metrics: dict[str, Metrics] = {}
        self._readings: dict[str, list[tuple[str, Sample]]] = {}
        meter = provider.get_meter(SCOPE)
        bounds = [bound / 1_000_000 for bound in LATENCY_US]
        self._latency = meter.create_histogram(
            LATENCY.otel_name, LATENCY.unit, LATENCY.help, explicit_bucket_boundaries_advisory=bounds
        )
        self._remaining = meter.create_histogram(
            REMAINING.otel_name, REMAINING.unit, REMAINING.help, explicit_bucket_boundaries_advisory=REMAINING_SHARES
        )
        observed = [family for family in FAMILIES.values() if family.kind != "histogram"]
        for family in observed:
            make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
            # They are asked in their order: the first reads for all.
            callback = self._observer(family, reads=family is observed[0])
            make(family.otel_name, [callback], family.unit, family.help)

    def add(self, gate: GateBase, name: str, lag: Callable[[], float] | None) -> Metrics:
        """Count at one gate more."""
        metrics = self._metrics.setdefault(name, Metrics())
        if metrics.watch(gate, lag=lag):
            gate.add_observer(_HistogramRecorder(name, self._latency, self._remaining))
        return metrics

    def _observer(self, family: Family, *, reads: bool) -> Callable[[CallbackOptions], Iterator[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            if reads:
                self._read()
            for gate, (_family, labels, value) in self._readings.get(family.name, ()):
                if not isinstance(value, families.Histogram):
                    yield Observation(value, {"gate": gate, **dict(zip(family.labels, labels, strict=True))})

        return observe

    def _read(self) -> None:
        readings: dict[str, list[tuple[str, Sample]]] = {}
        for gate, metrics in list(self._metrics.items()):
            for reading in metrics.read():
                readings.setdefault(reading.family.name, []).append((gate, reading))
        self._readings = readings


class _HistogramRecorder:
    """An observer that records the histograms of one gate."""

    def __init__(self, gate: str, latency: Histogram, remaining: Histogram) -> None:
        self._gate = gate
        self._latency, self._remaining = latency, remaining

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        attributes = {"gate": self._gate}
        for _, duration_us, _, _, resolution, decision, _, _ in events:
            self._latency.record(max(0, duration_us) / 1_000_000, attributes)
            if decision is None or decision.degraded is not None:
                continue
            for rule, key, verdict in zip(resolution.rules, resolution.keys, decision.verdicts, strict=True):
                share = verdict[0] / key.limit.capacity
                self._remaining.record(share, {"gate": self._gate, "policy": rule.rule.name})


def _stopwatch(gate: GateBase) -> Callable[[Admission], int]:
    """Tells how many microseconds have passed since a request of the gate was resolved."""
    there = ref(gate)

    def elapsed_us(admission: Admission) -> int:
        gate = there()
        if gate is None or admission.resolution is None:
            return 0
        return max(0, gate.now_us() - admission.received_us)

    return elapsed_us


def _attributes(admission: Admission) -> dict[str, Any]:
    resolution, decision = admission.resolution, admission.decision
    assert resolution is not None
    told: dict[str, Any] = {
        "http.route": resolution.route.endpoint,
        "headgate.outcome": outcome_of(admission),
        "headgate.limits": [rule.rule.name for rule in resolution.rules],
    }
    if resolution.route.route_class is not None:
        told["headgate.route_class"] = resolution.route.route_class
    if resolution.tier is not None:
        told["headgate.tier"] = resolution.tier
    if decision is None:
        return told
    if decision.degraded is not None:
        return {**told, "headgate.degraded_mode": MODES[resolution.route.on_failure]}
    told["headgate.remaining"] = decision.remaining
    if not decision.allowed:
        told["headgate.denied_by"] = list(decision.denied_by)
    if decision.retry_after_us:
        told["headgate.retry_after_ms"] = decision.retry_after_us / 1000
    would_deny = [shadow.met.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
    return {**told, "headgate.shadow_denied_by": would_deny} if would_deny else told


def _demand_library() -> None:
    try:
        import opentelemetry.metrics  # noqa: F401 - whether it is there
    except ModuleNotFoundError as missing:
        if missing.name not in ("opentelemetry", "opentelemetry.metrics"):
            raise
        raise InvalidConfiguration(
            "metrics and spans for OpenTelemetry need the package 'opentelemetry': pip install 'headgate[otel]'"
        ) from None
