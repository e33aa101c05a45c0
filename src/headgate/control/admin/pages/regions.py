"""The page of regions: what each one has used, holds and owes, and the limits that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.control.admin.pages.base import Visit
    from headgate.regions.report import RegionReport
    from headgate.telemetry.region_overview import SharedLimit

__all__ = ["live", "regions"]


def regions(visit: Visit) -> Response:
    return visit.page("regions.html", "/regions", **_values(visit))


def live(visit: Visit) -> Response:
    """The live part of the page."""
    page = {"actor": visit.actor, "now_us": visit.now_us, "zone": visit.zone}
    return HTMLResponse(visit.renderer.render("regions_live.html", **page, **_values(visit)))


def _values(visit: Visit) -> dict[str, Any]:
    view = visit.service.regions.overview(visit.actor)
    away = [region.name for region in view.regions if region.error is not None]
    return {
        "view": view,
        "away": away,
        "exceeded": [limit.name for limit in view.limits if _is_exceeded(limit)],
        "state": _state(view.regions, away),
        "unread": {region.name: _unread(region) for region in view.regions},
    }


def _is_exceeded(limit: SharedLimit) -> bool:
    return limit.over is not None and limit.bound is not None and limit.over > limit.bound


def _state(regions: Sequence[RegionReport], away: Sequence[str]) -> str:
    """A sentence for screen readers, announced when it changes."""
    if away:
        return f"{', '.join(away)} cannot be reached"
    return "All regions are reachable" if regions else "No regions"


def _unread(region: RegionReport) -> int | None:
    """Usage of the other regions that this one has not read; None if one of them cannot be reached."""
    unread = [each.unread for each in region.imports]
    return None if None in unread else sum(each or 0 for each in unread)
