"""Metrics of the server: those of gates, for the policy and for Envoy's descriptors, as series for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.metrics.families import FAMILIES
from headgate.telemetry.prometheus import series_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.gate.event_stream import DecisionSource
    from headgate.telemetry.metrics.families import Family

__all__ = ["ServerMetrics", "is_maximum", "label_text", "metrics_text"]

_SUFFIXES: Final = ("_total", "_bucket", "_count", "_sum")


class ServerMetrics:
    """The metrics of several sources of decisions, each under the label `gate` of its name."""

    def __init__(self, sources: Mapping[str, DecisionSource]) -> None:
        self._metrics = {name: Metrics() for name in sources}
        for name, source in sources.items():
            self._metrics[name].watch(source)

    def series(self) -> dict[str, float]:
        """The values by series, such as `rate_limiter_nodes{gate="envoy"}`."""
        return {
            f"{sample.family.name}{suffix}{{{label_text(labels)}}}": value
            for name, metrics in self._metrics.items()
            for sample in metrics.read()
            for suffix, labels, value in series_of(sample, ("gate", name))
        }


def is_maximum(series: str) -> bool:
    """True if the series of several workers are combined by their maximum instead of their sum."""
    family = _family(series)
    return family.kind == "gauge" and family.aggregation == "max"


def metrics_text(series: Mapping[str, float]) -> str:
    """The series in the text format of Prometheus."""
    families: dict[str, list[str]] = {}
    for name, value in series.items():  # in their order: the buckets of a histogram are ascending
        families.setdefault(_family(name).name, []).append(
            f"{name} {value:g}\n" if value < 1e6 else f"{name} {value}\n"
        )
    return "".join(
        f"# HELP {name}{'_total' if FAMILIES[name].kind == 'counter' else ''} {FAMILIES[name].help}\n"
        f"# TYPE {name}{'_total' if FAMILIES[name].kind == 'counter' else ''} {FAMILIES[name].kind}\n" + "".join(lines)
        for name, lines in sorted(families.items())
    )


def label_text(labels: Mapping[str, object]) -> str:
    """Labels in the text format of Prometheus."""
    return ",".join(f'{name}="{_escape(f"{value}")}"' for name, value in labels.items())


def _family(series: str) -> Family:
    name = series.partition("{")[0]
    known = (name, *[name.removesuffix(suffix) for suffix in _SUFFIXES])
    return next(FAMILIES[each] for each in known if each in FAMILIES)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
