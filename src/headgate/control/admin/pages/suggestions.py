"""The page of suggested limits: the numbers for each tier, the reasons for them, and a policy to merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.control.admin.pages import charts
from headgate.control.service.suggestions import DEFAULT_GOAL
from headgate.errors import InvalidInput
from headgate.replay.markdown import share

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service.suggestions import SuggestedLimitView

__all__ = ["suggestions"]

SPANS: Final = ((1, "1 day"), (7, "7 days"), (30, "30 days"))


def suggestions(visit: Visit) -> Response:
    goal = visit.query.get("goal") or DEFAULT_GOAL
    chosen = visit.query.number("days")
    days = chosen if chosen in dict(SPANS) else 7
    values: dict[str, Any] = {"goal": goal, "days": days, "spans": SPANS, "error": "", "view": None}
    try:
        values["view"] = view = visit.service.suggestions.suggest(visit.actor, [goal], days=days)
    except InvalidInput as error:
        return visit.page("suggestions.html", "/policy", status=422, **values | {"error": f"{error}"})
    return visit.page(
        "suggestions.html",
        "/policy",
        charts=[_chart(each, f"curve-{at}") for at, each in enumerate(view.limits)],
        lines=visit.service.clients.insert_names(view.policy).splitlines(),
        share=lambda part: share(part, 1),
        **values,
    )


def _chart(limit: SuggestedLimitView, id: str) -> charts.Chart:
    """The rejected requests by quota, those of the suggested one in another colour."""
    numbers = [(point.share * limit.requests, point.quota == limit.quota) for point in limit.curve]
    bands = [
        charts.Band("Rejected", "denied", [0 if is_suggested else number for number, is_suggested in numbers]),
        charts.Band("Rejected, suggested", "allowed", [number * is_suggested for number, is_suggested in numbers]),
    ]
    labels = [f"{point.quota:,} per minute" for point in limit.curve]
    return charts.bars(bands, labels, id=id, title="Rejected requests by limit", empty="nothing rejected")
