"""Export of metrics to Prometheus through prometheus-client. See docs/metrics.md."""

from __future__ import annotations

import logging
import os
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary, ref

from headgate._fork import reinit_after_fork
from headgate.errors import name_missing_extra
from headgate.telemetry.metrics.client_metrics import ClientMetrics
from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.metrics.families import CLIENT_FAMILIES, FAMILIES, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from headgate.clients.client import PoliteClient
    from headgate.gate.event_stream import DecisionSource
    from headgate.telemetry.metrics.counters import Lag, MeterSource
    from headgate.telemetry.metrics.families import Family, Sample

__all__ = ["MetricsCollector", "MultiprocessExporter", "register", "register_client", "register_meter", "series_of"]

logger = logging.getLogger("headgate")

WRITE_INTERVAL_S: Final = 1.0
"""The interval at which each of several processes writes its metrics to the shared directory."""

_ALL_FAMILIES: Final = FAMILIES | CLIENT_FAMILIES

DIRECTORY_VARIABLES: Final = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
"""The environment variables of prometheus-client's multiprocess mode."""

Source: TypeAlias = "tuple[str, str]"
"""The label that all series of a source have: ("gate", "default")."""


def register(
    gate: DecisionSource, registry: CollectorRegistry | None = None, *, name: str = "default", lag: Lag | None = None
) -> Metrics:
    """Register the gate's metrics in a registry; by default, in the global one of prometheus-client.

    The label `gate` is the name; gates with the same name are exported as one. `lag` returns the seconds for which the
    policy has not been the newest, for policies that are not files.

    With several processes and PROMETHEUS_MULTIPROC_DIR, each writes its metrics there every second, for the
    MultiProcessCollector of the app.

    >>> from headgate.gate.gate import Gate
    >>> from headgate.policy import read
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    >>> metrics = register(gate, registry)
    >>> b'rate_limiter_degraded{gate="default"} 0.0' in generate_latest(registry)
    True
    """
    metrics: Metrics = _sources(registry).setdefault(("gate", name), Metrics())
    metrics.watch(gate, lag=lag)
    return metrics


def register_meter(meter: MeterSource, registry: CollectorRegistry | None = None, *, name: str = "default") -> Metrics:
    """Register the metrics of a `QuotaMeter` in a registry, under the label `gate` of the gate that it belongs to."""
    metrics: Metrics = _sources(registry).setdefault(("gate", name), Metrics())
    metrics.watch_meter(meter)
    return metrics


def register_client(
    client: PoliteClient, registry: CollectorRegistry | None = None, *, name: str = "default"
) -> ClientMetrics:
    """Register the metrics of a polite client in a registry; by default, in the global one of prometheus-client.

    The label `client` is the name; clients with the same name are exported as one.

    >>> from headgate.clients import PoliteClient
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> metrics = register_client(PoliteClient(), registry, name="stripe")
    >>> b'rate_limiter_client_requests_total{client="stripe"} 0.0' in generate_latest(registry)
    True
    """
    metrics: ClientMetrics = _sources(registry).setdefault(("client", name), ClientMetrics())
    metrics.watch(client)
    return metrics


def _sources(registry: CollectorRegistry | None) -> dict[Source, Any]:
    """The sources that are exported through a registry."""
    with name_missing_extra("metrics for Prometheus need", "prometheus", "prometheus_client"):
        from prometheus_client import REGISTRY
    registry = REGISTRY if registry is None else registry
    exporter = _exporters.get(registry)
    if exporter is None:
        is_multiprocess = any(os.environ.get(variable) for variable in DIRECTORY_VARIABLES)
        exporter = _exporters[registry] = MultiprocessExporter() if is_multiprocess else MetricsCollector()
        if isinstance(exporter, MetricsCollector):
            registry.register(exporter)
    return exporter.sources


_exporters: WeakKeyDictionary[Any, MetricsCollector | MultiprocessExporter] = WeakKeyDictionary()
"""One per registry, as families must not be registered twice."""


class MetricsCollector:
    """A collector that reads the metrics of gates and clients when a registry is scraped."""

    def __init__(self) -> None:
        self.sources: dict[Source, Metrics | ClientMetrics] = {}

    def describe(self) -> list[Metric]:
        """All families without samples, by which a registry detects duplicates."""
        return [_empty(family) for family in _ALL_FAMILIES.values()]

    def collect(self) -> list[Metric]:
        found = {name: _empty(family) for name, family in _ALL_FAMILIES.items()}
        for source, metrics in list(self.sources.items()):
            for sample in metrics.read():
                metric = found[sample.family.name]
                for suffix, labels, value in series_of(sample, source):
                    metric.add_sample(metric.name + suffix, labels, value)
        return [metric for metric in found.values() if metric.samples]


class MultiprocessExporter:
    """Writes the metrics of gates and clients to the directory of prometheus-client's multiprocess mode."""

    def __init__(self, *, every: float | None = WRITE_INTERVAL_S) -> None:
        """`every` is the interval in seconds of the background thread; None for no thread."""
        self.sources: dict[Source, Metrics | ClientMetrics] = {}
        self._every = every
        self._values: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._gauges: set[Any] = set()
        self.reset_after_fork()
        reinit_after_fork(self)

    def write(self) -> None:
        """Write all metrics now."""
        written = set()
        for source, metrics in list(self.sources.items()):
            for sample in metrics.read():
                for suffix, labels, number in series_of(sample, source, is_cumulative=False):
                    value = self._value(sample.family, suffix, labels)
                    value.set(number)
                    written.add(value)
        for value in self._gauges - written:  # such as the version of an earlier policy
            value.set(0)

    def _value(self, family: Family, suffix: str, labels: dict[str, str]) -> Any:
        at = family.name + suffix, tuple(labels.values())
        value = self._values.get(at)
        if value is None:
            from prometheus_client.values import ValueClass

            mode = {"multiprocess_mode": f"live{family.aggregation}"} if family.kind == "gauge" else {}
            about = family.kind, family.name, at[0], tuple(labels), at[1], family.help
            value = self._values[at] = ValueClass(*about, **mode)
            if mode:
                self._gauges.add(value)
        return value

    def reset_after_fork(self) -> None:
        """Start the thread, of which a child has none."""
        if self._every is not None:
            arguments = ref(self), self._every
            threading.Thread(target=_write_forever, args=arguments, name="headgate-metrics", daemon=True).start()


def _write_forever(there: ref[MultiprocessExporter], every: float) -> None:
    pause = threading.Event()
    while not pause.wait(every):
        exporter = there()
        if exporter is None:
            return
        try:
            exporter.write()
        except Exception:  # the directory may become writable again
            logger.exception("metrics could not be written to the shared directory")
        del exporter


def _empty(family: Family) -> Metric:
    from prometheus_client.core import Metric

    return Metric(family.name, family.help, family.kind)


def series_of(
    sample: Sample, source: Source, *, is_cumulative: bool = True
) -> Iterator[tuple[str, dict[str, str], float]]:
    """The Prometheus samples of a value: name suffix, labels and value."""
    family, values, value = sample
    labels = {source[0]: source[1], **dict(zip(family.labels, values, strict=True))}
    if not isinstance(value, Histogram):
        yield "_total" if family.kind == "counter" else "", labels, value
        return
    counts: Iterable[int] = accumulate(value.counts) if is_cumulative else value.counts
    for bound, count in zip((*map(str, map(float, value.bounds)), "+Inf"), counts, strict=True):
        yield "_bucket", {**labels, "le": bound}, count
    if is_cumulative:
        yield "_count", labels, sum(value.counts)
    yield "_sum", labels, value.total
