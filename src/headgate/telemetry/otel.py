"""Export of metrics and spans to OpenTelemetry. See docs/metrics.md."""

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
    """Export the gate's metrics through a MeterProvider; by default, the global one.

    The attribute `gate` is the name; gates with the same name are exported as one. `lag` returns the seconds for which
    the policy has not been the newest, for policies that are not files.
    """
    _require_library()
    if provider is None:
        from opentelemetry.metrics import get_meter_provider

        provider = get_meter_provider()
    instruments = _instruments.get(provider)
    if instruments is None:
        instruments = _instruments[provider] = Instruments(provider)
    return instruments.add(gate, name, lag)


def trace(gate: GateBase, provider: TracerProvider | None = None) -> None:
    """Create a span `headgate.check` for each decision, as a child of the current span.

    Its attributes contain the route, the limits and the outcome, but never the client.
    """
    _require_library()
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
"""One per provider, as instruments must not be created twice."""
_traced: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""The providers that trace a gate already."""


class Instruments:
    """The instruments of a provider, for any number of gates.

    Counters and gauges are read when they are exported. OpenTelemetry has no observable histograms; those are recorded
    by an observer of each gate.
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
            # Callbacks run in this order: the first one reads for all.
            callback = self._observer(family, reads=family is observed[0])
            make(family.otel_name, [callback], family.unit, family.help)

    def add(self, gate: GateBase, name: str, lag: Callable[[], float] | None) -> Metrics:
        """Export the metrics of another gate."""
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
    """A function that returns the microseconds since a request of the gate was received."""
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
    attributes: dict[str, Any] = {
        "http.route": resolution.route.endpoint,
        "headgate.outcome": outcome_of(admission),
        "headgate.limits": [rule.rule.name for rule in resolution.rules],
    }
    if resolution.route.route_class is not None:
        attributes["headgate.route_class"] = resolution.route.route_class
    if resolution.tier is not None:
        attributes["headgate.tier"] = resolution.tier
    if decision is None:
        return attributes
    if decision.degraded is not None:
        return {**attributes, "headgate.degraded_mode": MODES[resolution.route.on_failure]}
    attributes["headgate.remaining"] = decision.remaining
    if not decision.allowed:
        attributes["headgate.denied_by"] = list(decision.denied_by)
    if decision.retry_after_us:
        attributes["headgate.retry_after_ms"] = decision.retry_after_us / 1000
    would_deny = [shadow.met.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
    return {**attributes, "headgate.shadow_denied_by": would_deny} if would_deny else attributes


def _require_library() -> None:
    try:
        import opentelemetry.metrics  # noqa: F401 - only a check
    except ModuleNotFoundError as missing:
        if missing.name not in ("opentelemetry", "opentelemetry.metrics"):
            raise
        raise InvalidConfiguration(
            "metrics and spans for OpenTelemetry need the package 'opentelemetry': pip install 'headgate[otel]'"
        ) from None
