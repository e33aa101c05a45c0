"""The overview page: the current state of the fleet, with live charts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.responses import HTMLResponse, Response

from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.charts import Band

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import tzinfo

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service.models import MinuteTotals, NodeView, Overview, Series

__all__ = ["live", "overview"]

SECONDS: Final = 300
ROW_SECONDS: Final = 10
"""The interval of a row in the tables below the charts."""
AXIS: Final = ("5 min ago", "4 min", "3 min", "2 min", "1 min", "now")


class Notice(NamedTuple):
    title: str
    text: str


def overview(visit: Visit) -> Response:
    return visit.page("overview.html", here="/", **_values(visit))


def live(visit: Visit) -> Response:
    """The live part of the overview."""
    text = visit.renderer.render(
        "overview_live.html", actor=visit.actor, now_us=visit.now_us, zone=visit.zone, **_values(visit)
    )
    return HTMLResponse(text)


def _values(visit: Visit) -> dict[str, Any]:
    view = visit.service.fleet.overview(visit.actor)
    table = _SeriesTable(view.series, visit.zone)
    bands = charts.decision_bands(table.values)
    p50, p99 = table.values("p50_us"), table.values("p99_us")
    return {
        "view": view,
        "state": _state(view),
        "is_reporting": is_reporting(view),
        "notices": _notices(view),
        "now": _now(table, view.totals),
        "minute": _minute(view.totals),
        "bands": bands,
        "names": [band.name for band in bands],
        "decisions": charts.stacked(bands, id="decisions", title="Decisions per second, last five minutes", unit="/s"),
        "latencies": charts.lines(
            [Band("Median (p50)", "p50", p50), Band("p99", "p99", p99)],
            id="latency",
            title="Check latency, last five minutes, logarithmic scale",
            show=filters.latency,
        ),
        "axis": AXIS,
        "decision_rows": table.rows([band.css for band in bands], lambda part: filters.number(sum(part))),
        "latency_rows": table.rows(["p50_us", "p99_us"], _highest_latency),
        "node_summary": _node_summary(view.nodes),
    }


class _SeriesTable:
    """The columns and rows of a series; blank if there is none."""

    def __init__(self, series: Series | None, zone: tzinfo) -> None:
        self._series = series
        self._zone = zone

    def values(self, name: str) -> Sequence[Any]:
        if self._series is None:
            return [None if name.endswith("_us") else 0] * SECONDS
        found: Sequence[Any] = getattr(self._series, name)
        return found

    def rows(self, names: Sequence[str], summarize: Callable[[Sequence[Any]], str]) -> list[list[str]]:
        """One row per interval, newest first."""
        if self._series is None:
            return []
        columns = [self.values(name) for name in names]
        return [
            [
                f"{datetime.fromtimestamp(self._series.start_s + at, UTC).astimezone(self._zone):%H:%M:%S}",
                *(summarize(column[at : at + ROW_SECONDS]) for column in columns),
            ]
            for at in reversed(range(0, len(columns[0]), ROW_SECONDS))
        ]


def _highest_latency(part: Sequence[float | None]) -> str:
    return filters.latency(max((each for each in part if each is not None), default=None))


def _now(table: _SeriesTable, totals: MinuteTotals) -> dict[str, Any]:
    """The last second; latency over the last minute, as that of a single second varies too much."""
    last = {css: (table.values(css) or [0])[-1] for _, css in charts.DECISIONS}
    return {**last, "p50": filters.latency(totals.p50_us), "p99": filters.latency(totals.p99_us)}


def _minute(totals: MinuteTotals) -> dict[str, Any]:
    requests = totals.allowed + totals.denied + totals.blocked + totals.unavailable
    return {
        "allowed": totals.allowed,
        "denied": totals.denied,
        "blocked": totals.blocked,
        "share": totals.denied / requests if requests else 0.0,
    }


def _state(view: Overview) -> str:
    """A sentence for screen readers, announced when it changes."""
    states = {state: [node.name for node in view.nodes if node.state == state] for state in ("degraded", "silent")}
    parts = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}" for state, names in states.items() if names
    ]
    return ". ".join(parts) if parts else "All nodes are ready" if view.nodes else "No node is reporting"


def is_reporting(view: Overview) -> bool:
    """True if at least one node reports. Otherwise zeros mean "unknown" and must not look like an all-clear."""
    return any(node.state != "silent" for node in view.nodes)


def _notices(view: Overview) -> list[Notice]:
    notices = []
    if not is_reporting(view):
        notices.append(
            Notice(
                "No node is reporting, so this page shows no traffic.",
                "Your apps may still be enforcing limits. To connect an app, pass "
                'control="URL of the config store" and use the same store as the admin server.',
            )
        )
    degraded = [node for node in view.nodes if node.state == "degraded"]
    if degraded:
        longest = max(node.degraded_for_s or 0 for node in degraded)
        notices.append(
            Notice(
                f"{_names(degraded)} {'is' if len(degraded) == 1 else 'are'} running without the store"
                + (f" for {filters.duration(longest)}." if longest else "."),
                "Routes use their failure modes: open, closed or local. "
                "Counters are reconciled when the store is back.",
            )
        )
    silent = [node for node in view.nodes if node.state == "silent"]
    if silent:
        notices.append(
            Notice(
                f"No reports from {_names(silent)}.",
                "The process may have stopped or lost its connection. Silent nodes are removed after a minute.",
            )
        )
    if view.totals.unavailable:
        notices.append(
            Notice(
                f"{filters.count(view.totals.unavailable, 'request was', 'requests were')} rejected in the last minute "
                "because the store was unavailable.",
                "Their routes fail closed.",
            )
        )
    return notices


def _names(nodes: Sequence[NodeView]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes ({', '.join(node.name for node in nodes[:4])})"


def _node_summary(nodes: Sequence[NodeView]) -> str:
    ready = sum(node.state == "ready" for node in nodes)
    if not nodes:
        return ""
    if ready == len(nodes) > 1:
        return f"{'both' if len(nodes) == 2 else 'all'} ready"
    return f"{ready} of {len(nodes)} ready"
