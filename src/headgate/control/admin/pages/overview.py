"""The overview page: the current state of the fleet, with live charts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import HTMLResponse, Response

from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.charts import Band

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import tzinfo

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service.models import NodeStatus, Overview, Series

__all__ = ["live", "overview"]

SECONDS: Final = 300
ROW_SECONDS: Final = 10
"""The interval of a row in the tables below the charts."""
AXIS: Final = ("5 min ago", "4 min", "3 min", "2 min", "1 min", "now")


def overview(visit: Visit) -> Response:
    return visit.page("overview.html", "/", **_values(visit))


def live(visit: Visit) -> Response:
    """The live part of the overview."""
    page = {"actor": visit.actor, "now_us": visit.now_us, "zone": visit.zone}
    return HTMLResponse(visit.renderer.render("overview_live.html", **page, **_values(visit)))


def _values(visit: Visit) -> dict[str, Any]:
    view = visit.service.fleet.overview(visit.actor)
    totals, table = view.totals, _SeriesTable(view.series, visit.zone)
    bands = charts.decision_bands(table.values)
    latencies = [Band("Median (p50)", "p50", table.values("p50_us")), Band("p99", "p99", table.values("p99_us"))]
    title = "Check latency, last five minutes, logarithmic scale"
    requests = totals.allowed + totals.denied + totals.blocked + totals.unavailable
    return {
        "view": view,
        "state": _state(view.nodes),
        "is_reporting": _is_reporting(view),
        "notices": [*_notices(view)],
        "now": {css: (table.values(css) or [0])[-1] for css in charts.DECISIONS},
        "denied_share": f"{totals.denied / requests if requests else 0.0:.0%}",
        "bands": bands,
        "names": [band.name for band in bands],
        "decisions": charts.stacked(bands, id="decisions", title="Decisions per second, last five minutes", unit="/s"),
        "latencies": charts.lines(latencies, id="latency", title=title, show=filters.latency),
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
        blank = [None if name.endswith("_us") else 0] * SECONDS
        found: Sequence[Any] = blank if self._series is None else getattr(self._series, name)
        return found

    def rows(self, names: Sequence[str], summarize: Callable[[Sequence[Any]], str]) -> list[list[str]]:
        """One row per interval, newest first."""
        if self._series is None:
            return []
        columns, start_s = [self.values(name) for name in names], self._series.start_s
        return [
            [
                f"{datetime.fromtimestamp(start_s + at, UTC).astimezone(self._zone):%H:%M:%S}",
                *(summarize(column[at : at + ROW_SECONDS]) for column in columns),
            ]
            for at in reversed(range(0, len(columns[0]), ROW_SECONDS))
        ]


def _highest_latency(part: Sequence[float | None]) -> str:
    return filters.latency(max((each for each in part if each is not None), default=None))


def _state(nodes: Sequence[NodeStatus]) -> str:
    """A sentence for screen readers, announced when it changes."""
    states = {state: [node.name for node in nodes if node.state == state] for state in ("degraded", "silent")}
    parts = [f"{', '.join(names)} {_is(names)} {state}" for state, names in states.items() if names]
    return ". ".join(parts) or ("All nodes are ready" if nodes else "No node is reporting")


def _is_reporting(view: Overview) -> bool:
    """True if at least one node reports. Otherwise zeros mean "unknown" and must not look like an all-clear."""
    return any(node.state != "silent" for node in view.nodes)


def _notices(view: Overview) -> Iterator[tuple[str, str]]:
    """Titles and texts."""
    if not _is_reporting(view):
        how = 'pass control="URL of the config store" and use the same store as the admin server'
        text = f"Your apps may still be enforcing limits. To connect an app, {how}."
        yield "No node is reporting, so this page shows no traffic.", text
    if degraded := [node for node in view.nodes if node.state == "degraded"]:
        longest = max(node.degraded_for_s or 0 for node in degraded)
        time = f" for {filters.duration(longest)}" if longest else ""
        yield (
            f"{_names(degraded)} {_is(degraded)} running without the store{time}.",
            "Routes use their failure modes: open, closed or local. Counters are reconciled when the store is back.",
        )
    if silent := [node for node in view.nodes if node.state == "silent"]:
        yield (
            f"No reports from {_names(silent)}.",
            "The process may have stopped or lost its connection. Silent nodes are removed after a minute.",
        )
    if view.totals.unavailable:
        requests = filters.count(view.totals.unavailable, "request was", "requests were")
        title = f"{requests} rejected with status 503 in the last minute."
        yield title, "The store was unavailable on routes that fail closed, or requests were shed during overload."


def _is(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _names(nodes: Sequence[NodeStatus]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes ({', '.join(node.name for node in nodes[:4])})"


def _node_summary(nodes: Sequence[NodeStatus]) -> str:
    ready = sum(node.state == "ready" for node in nodes)
    if ready == len(nodes) > 1:
        return f"{'both' if len(nodes) == 2 else 'all'} ready"
    return f"{ready} of {len(nodes)} ready" if nodes else ""
