"""Export of metrics and spans to OpenTelemetry. See docs/metrics.md."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

from headgate.errors import name_missing_extra
from headgate.gate.event_stream import outcome_of
from headgate.telemetry.metrics import families
from headgate.telemetry.metrics.counters import MODES, Metrics
from headgate.telemetry.metrics.families import FAMILIES, LATENCY_US, REMAINING_SHARES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

    from headgate.gate.admission import Admission, RequestInfo
    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.telemetry.metrics.counters import Lag, MeterSource
    from headgate.telemetry.metrics.families import Family, Sample

__all__ = ["Instruments", "instrument", "instrument_meter", "trace"]

SCOPE: Final = "headgate"
EXTRA: Final = ("metrics and spans for OpenTelemetry need", "otel", "opentelemetry")

LATENCY: Final = FAMILIES["rate_limiter_check_latency_seconds"]
REMAINING: Final = FAMILIES["rate_limiter_remaining_ratio"]


def instrument(
    gate: GateBase, provider: MeterProvider | None = None, *, name: str = "default", lag: Lag | None = None
) -> Metrics:
    """Export the gate's metrics through a MeterProvider; by default, the global one.

    The attribute `gate` is the name; gates with the same name are exported as one. `lag` returns the seconds for which
    the policy has not been the newest, for policies that are not files.
    """
    return _instruments_of(provider).add(gate, name, lag)


def instrument_meter(meter: MeterSource, provider: MeterProvider | None = None, *, name: str = "default") -> Metrics:
    """Export the metrics of a `QuotaMeter`, with the attribute `gate` of the gate that it belongs to."""
    return _instruments_of(provider).add_meter(meter, name)


def _instruments_of(provider: MeterProvider | None) -> Instruments:
    with name_missing_extra(*EXTRA):
        from opentelemetry.metrics import get_meter_provider
    provider = get_meter_provider() if provider is None else provider
    if provider not in _instruments:
        _instruments[provider] = Instruments(provider)
    return _instruments[provider]


def trace(gate: GateBase, provider: TracerProvider | None = None) -> None:
    """Create a span `headgate.check` for each decision, as a child of the current span.

    Its attributes contain the route, the limits and the outcome, but never the client.
    """
    with name_missing_extra(*EXTRA):
        from opentelemetry.trace import get_tracer_provider
    provider = get_tracer_provider() if provider is None else provider
    traced = _traced.setdefault(gate, WeakSet())
    if provider in traced:
        return
    traced.add(provider)
    tracer = provider.get_tracer(SCOPE)
    there = ref(gate)

    def hook(_: RequestInfo, admission: Admission) -> None:
        if admission.resolution is not None and (gate := there()) is not None:
            start_ns = time.time_ns() - max(0, gate.now_us() - admission.received_us) * 1000
            span = tracer.start_span("headgate.check", start_time=start_ns)
            if span.is_recording():
                span.set_attributes(_attributes(admission))
            span.end()

    gate.add_observer(hook)


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
        self._latency, self._remaining = [
            meter.create_histogram(each.otel_name, each.unit, each.help, explicit_bucket_boundaries_advisory=bounds)
            for each, bounds in ((LATENCY, [us / 1_000_000 for us in LATENCY_US]), (REMAINING, REMAINING_SHARES))
        ]
        observed = [family for family in FAMILIES.values() if family.kind != "histogram"]
        for family in observed:
            make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
            # Callbacks run in this order: the first one reads for all.
            callback = self._observer(family, reads=family is observed[0])
            make(family.otel_name, [callback], family.unit, family.help)

    def add(self, gate: GateBase, name: str, lag: Lag | None) -> Metrics:
        """Export the metrics of another gate."""
        metrics = self._metrics.setdefault(name, Metrics())
        if metrics.watch(gate, lag=lag):
            gate.add_observer(_HistogramRecorder(name, self._latency, self._remaining))
        return metrics

    def add_meter(self, meter: MeterSource, name: str) -> Metrics:
        """Export the metrics of a quota meter."""
        metrics = self._metrics.setdefault(name, Metrics())
        metrics.watch_meter(meter)
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
    def __init__(self, gate: str, latency: Histogram, remaining: Histogram) -> None:
        self._gate = gate
        self._latency, self._remaining = latency, remaining

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        attributes = {"gate": self._gate}
        for _, duration_us, _, _, resolution, decision, *_ in events:
            self._latency.record(max(0, duration_us) / 1_000_000, attributes)
            if decision is None or decision.degraded is not None:
                continue
            for rule, key, verdict in zip(resolution.rules, resolution.keys, decision.verdicts, strict=True):
                share = verdict[0] / key.limit.capacity
                self._remaining.record(share, {"gate": self._gate, "policy": rule.rule.name})


def _attributes(admission: Admission) -> dict[str, Any]:
    resolution, decision = admission.resolution, admission.decision
    assert resolution is not None
    attributes: dict[str, Any] = {
        "http.route": resolution.route.endpoint,
        "headgate.outcome": outcome_of(admission),
        "headgate.limits": [rule.rule.name for rule in resolution.rules],
        "headgate.route_class": resolution.route.route_class,
        "headgate.tier": resolution.tier,
    }
    if decision is not None and decision.degraded is not None:
        attributes["headgate.degraded_mode"] = MODES[resolution.route.on_failure]
    elif decision is not None:
        would_deny = [shadow.applied.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
        attributes |= {
            "headgate.remaining": decision.remaining,
            "headgate.denied_by": None if decision.allowed else list(decision.denied_by),
            "headgate.retry_after_ms": decision.retry_after_us / 1000 if decision.retry_after_us else None,
            "headgate.shadow_denied_by": would_deny or None,
        }
    return {name: value for name, value in attributes.items() if value is not None}
