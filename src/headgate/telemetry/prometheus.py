"""The metrics of gates for Prometheus, through prometheus-client. See docs/metrics.md."""

from __future__ import annotations

import logging
import os
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidConfiguration
from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.metrics.families import FAMILIES, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from headgate.gate.base import GateBase
    from headgate.telemetry.metrics.families import Family, Sample

__all__ = ["GateCollector", "MultiprocessExporter", "register"]

logger = logging.getLogger("headgate")

EVERY: Final = 1.0
"""Seconds between two times that a process of several writes down what it has counted."""

PROCESSES: Final = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
"""Where prometheus-client looks for the directory that all processes of a server share."""


def register(
    gate: GateBase,
    registry: CollectorRegistry | None = None,
    *,
    name: str = "default",
    lag: Callable[[], float] | None = None,
) -> Metrics:
    """Show the gate's metrics in a registry: prometheus-client's own one, if none is given.

    Several gates may be registered: under their own names they are told apart by the label `gate`, under the same name
    they are one. `lag` tells for how many seconds the policy has not been the newest, where it comes from no file.

    Where several processes serve together, and PROMETHEUS_MULTIPROC_DIR is set as prometheus-client wants it, each
    writes its numbers there every second, and the app's own MultiProcessCollector shows all of them.

    >>> from headgate.gate.gate import Gate
    >>> from headgate.policy import read
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> gate = Gate(read("limits: [{by: ip, bucket: 10/minute}]"))
    >>> metrics = register(gate, registry)
    >>> b'rate_limiter_degraded{gate="default"} 0.0' in generate_latest(registry)
    True
    """
    library = _library()
    registry = library.REGISTRY if registry is None else registry
    shown = _shown.get(registry)
    if shown is None:
        shown = MultiprocessExporter() if any(os.environ.get(variable) for variable in PROCESSES) else GateCollector()
        if isinstance(shown, GateCollector):
            registry.register(shown)
        _shown[registry] = shown
    metrics = shown.metrics.setdefault(name, Metrics())
    metrics.watch(gate, lag=lag)
    return metrics


_shown: WeakKeyDictionary[Any, GateCollector | MultiprocessExporter] = WeakKeyDictionary()
"""What shows the gates of each registry: two in one would tell every family twice."""


class GateCollector:
    """Reads the metrics of gates whenever a registry is asked for them."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metrics] = {}
        """By the name of the gate."""

    def describe(self) -> list[Metric]:
        """All families, without numbers: so that a registry finds names that are taken already."""
        return [_empty(family) for family in FAMILIES.values()]

    def collect(self) -> list[Metric]:
        """All numbers."""
        found = {name: _empty(family) for name, family in FAMILIES.items()}
        for gate, metrics in list(self.metrics.items()):
            for reading in metrics.read():
                metric = found[reading.family.name]
                for suffix, labels, value in _samples(reading, gate):
                    metric.add_sample(metric.name + suffix, labels, value)
        return [metric for metric in found.values() if metric.samples]


class MultiprocessExporter:
    """Writes the metrics of gates to the directory that prometheus-client shares between processes."""

    def __init__(self, *, every: float | None = EVERY) -> None:
        """From a thread of its own, `every` so many seconds; never by itself, if None."""
        self.metrics: dict[str, Metrics] = {}
        self._every = every
        self._values: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._gauges: set[Any] = set()
        self._start()
        reinit_after_fork(self)

    def write(self) -> None:
        """Write all numbers down now."""
        written = set()
        for gate, metrics in list(self.metrics.items()):
            for reading in metrics.read():
                for suffix, labels, number in _samples(reading, gate, cumulates=False):
                    value = self._value(reading.family, suffix, labels)
                    value.set(number)
                    written.add(value)
        for value in self._gauges - written:  # the version of a policy that is no more in force
            value.set(0)

    def reset_after_fork(self) -> None:
        """Threads stay with the parent; a child writes by itself."""
        self._start()

    def _value(self, family: Family, suffix: str, labels: dict[str, str]) -> Any:
        at = family.name + suffix, tuple(labels.values())
        value = self._values.get(at)
        if value is None:
            from prometheus_client.values import ValueClass

            about = family.kind, family.name, at[0], tuple(labels), at[1], family.help
            if family.kind == "gauge":
                value = ValueClass(*about, multiprocess_mode=f"live{family.aggregation}")
                self._gauges.add(value)
            else:
                value = ValueClass(*about)
            self._values[at] = value
        return value

    def _start(self) -> None:
        if self._every is not None:
            threading.Thread(
                target=_write_forever, args=(ref(self), self._every), name="headgate-metrics", daemon=True
            ).start()


def _write_forever(mirror: ref[MultiprocessExporter], every: float) -> None:
    pause = threading.Event()
    while not pause.wait(every):
        there = mirror()
        if there is None:
            return
        try:
            there.write()
        except Exception:  # whatever is wrong with the directory, it may be put right
            logger.exception("metrics could not be written for the other processes")
        del there


def _empty(family: Family) -> Metric:
    from prometheus_client.core import Metric

    return Metric(family.name, family.help, family.kind)


def _samples(reading: Sample, gate: str, *, cumulates: bool = True) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of a reading: what follows its name, its labels, its value."""
    family, values, value = reading
    labels = {"gate": gate, **dict(zip(family.labels, values, strict=True))}
    if not isinstance(value, Histogram):
        yield "_total" if family.kind == "counter" else "", labels, value
        return
    counts: Iterable[int] = accumulate(value.counts) if cumulates else value.counts
    for bound, count in zip((*map(str, map(float, value.bounds)), "+Inf"), counts, strict=True):
        yield "_bucket", {**labels, "le": bound}, count
    if cumulates:
        yield "_count", labels, sum(value.counts)
    yield "_sum", labels, value.total


def _library() -> Any:
    try:
        import prometheus_client
    except ModuleNotFoundError as missing:
        if missing.name != "prometheus_client":
            raise
        raise InvalidConfiguration(
            "metrics for Prometheus need the package 'prometheus_client': pip install 'headgate[prometheus]'"
        ) from None
    return prometheus_client
