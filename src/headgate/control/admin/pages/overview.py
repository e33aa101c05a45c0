"""The overview: what the fleet is doing now, in charts that move."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.responses import HTMLResponse, Response

from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.charts import Band

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service.models import MinuteTotals, NodeView, Overview, Series

__all__ = ["live", "overview"]

SECONDS: Final = 300
ROW_SECONDS: Final = 10
"""What a row of the tables below the charts sums up."""
BANDS: Final = (("Allowed", "allowed"), ("Denied", "denied"), ("Blocked", "blocked"), ("Unavailable", "unavailable"))
TIMES: Final = ("5 min ago", "4 min", "3 min", "2 min", "1 min", "now")


class Notice(NamedTuple):
    title: str
    text: str


def overview(visit: Visit) -> Response:
    return visit.page("overview.html", here="/", **_values(visit))


def live(visit: Visit) -> Response:
    """The part of the overview that moves, alone."""
    text = visit.frame.render(
        "overview_live.html", actor=visit.actor, now_us=visit.now_us, zone=visit.zone, **_values(visit)
    )
    return HTMLResponse(text)


def _values(visit: Visit) -> dict[str, Any]:
    view = visit.service.fleet.overview(visit.actor)
    series = _Lines(view.series)
    shown = [(name, css) for name, css in BANDS if css in ("allowed", "denied") or any(series.of(css))]
    bands = [Band(name, css, series.of(css)) for name, css in shown]
    p50, p99 = series.of("p50_us"), series.of("p99_us")
    return {
        "view": view,
        "state": _state(view),
        "is_reporting": is_reporting(view),
        "degraded": [*_degraded(view)],
        "now": _now(series, view.totals),
        "minute": {**_minute(view.totals)},
        "bands": bands,
        "names": [band.name for band in bands],
        "decisions": charts.stacked(bands, id="decisions", title="Decisions per second, last five minutes", unit="/s"),
        "latencies": charts.lines(
            [Band("Median (p50)", "p50", p50), Band("p99", "p99", p99)],
            id="latency",
            title="Check latency, last five minutes, logarithmic scale",
            show=filters.latency,
        ),
        "times": TIMES,
        "decision_rows": series.sums([css for _, css in shown], visit.zone),
        "latency_rows": series.highest(["p50_us", "p99_us"], visit.zone),
        "node_words": _node_words(view.nodes),
    }


class _Lines:
    """The series, or as many blanks where there is none."""

    def __init__(self, series: Series | None) -> None:
        self._series = series
        self._start_s = 0 if series is None else series.start_s

    def of(self, name: str) -> Sequence[Any]:
        if self._series is None:
            return [None if name.endswith("_us") else 0] * SECONDS
        found: Sequence[Any] = getattr(self._series, name)
        return found

    def sums(self, names: Sequence[str], zone: tzinfo) -> list[list[str]]:
        return self._rows(names, zone, lambda part: filters.amount(sum(part)))

    def highest(self, names: Sequence[str], zone: tzinfo) -> list[list[str]]:
        return self._rows(
            names, zone, lambda part: filters.latency(max((each for each in part if each is not None), default=None))
        )

    def _rows(self, names: Sequence[str], zone: tzinfo, told: Any) -> list[list[str]]:
        """The newest first."""
        if self._series is None:
            return []
        columns = [self.of(name) for name in names]
        return [
            [
                f"{datetime.fromtimestamp(self._start_s + at, UTC).astimezone(zone):%H:%M:%S}",
                *(told(column[at : at + ROW_SECONDS]) for column in columns),
            ]
            for at in reversed(range(0, len(columns[0]), ROW_SECONDS))
        ]


def _now(series: _Lines, totals: MinuteTotals) -> dict[str, Any]:
    """The last whole second; latency over the last minute, as that of one second jumps."""
    last = {css: (series.of(css) or [0])[-1] for _, css in BANDS}
    return {**last, "p50": filters.latency(totals.p50_us), "p99": filters.latency(totals.p99_us)}


def _minute(totals: MinuteTotals) -> dict[str, Any]:
    asked = totals.allowed + totals.denied + totals.blocked + totals.unavailable
    return {
        "allowed": totals.allowed,
        "denied": totals.denied,
        "blocked": totals.blocked,
        "share": totals.denied / asked if asked else 0.0,
    }


def _state(view: Overview) -> str:
    """What is read out when it changes."""
    states = {state: [node.name for node in view.nodes if node.state == state] for state in ("degraded", "silent")}
    told = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}" for state, names in states.items() if names
    ]
    return ". ".join(told) if told else "All nodes are ready" if view.nodes else "No node is reporting"


def is_reporting(view: Overview) -> bool:
    """True if figures come from at least one node. Otherwise zeros mean "unknown", and must not read as all clear."""
    return any(node.state != "silent" for node in view.nodes)


def _degraded(view: Overview) -> list[Notice]:
    """The banners."""
    told = []
    if not is_reporting(view):
        told.append(
            Notice(
                "No node is reporting, so this page shows no traffic.",
                "Your apps may still be enforcing limits. To connect an app, pass "
                'control="URL of the config store" and use the same store as the admin server.',
            )
        )
    degraded = [node for node in view.nodes if node.state == "degraded"]
    if degraded:
        longest = max((node.degraded_for_s or 0 for node in degraded), default=0)
        told.append(
            Notice(
                f"{_named(degraded)} {'is' if len(degraded) == 1 else 'are'} running without the store"
                + (f" for {filters.wait(longest)}." if longest else "."),
                "Routes use their failure modes: open, closed or local. "
                "Counters are reconciled when the store is back.",
            )
        )
    silent = [node for node in view.nodes if node.state == "silent"]
    if silent:
        told.append(
            Notice(
                f"No reports from {_named(silent)}.",
                "The process may have stopped or lost its connection. Silent nodes are removed after a minute.",
            )
        )
    if view.totals.unavailable:
        told.append(
            Notice(
                f"{filters.count(view.totals.unavailable, 'request was', 'requests were')} rejected in the last minute "
                "because the store was unavailable.",
                "Their routes fail closed.",
            )
        )
    return told


def _named(nodes: Sequence[NodeView]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes ({', '.join(node.name for node in nodes[:4])})"


def _node_words(nodes: Sequence[NodeView]) -> str:
    ready = sum(node.state == "ready" for node in nodes)
    if not nodes:
        return ""
    return (
        f"{'both' if len(nodes) == 2 else 'all'} ready" if ready == len(nodes) > 1 else f"{ready} of {len(nodes)} ready"
    )
