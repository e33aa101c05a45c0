"""The numbers of tiers and the costs of routes, where they are set beside the document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.control.admin.pages.forms import Mistake, attempt, bucket, given
from headgate.control.admin.pages.policy import policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service import Change

__all__ = ["remove_route", "remove_tier", "set_route", "set_tier"]

TAKEN_BACK = "The policy document says it again."


def set_tier(visit: Visit) -> Response:
    tier, limit, numbers = (visit.form.get(name, "") for name in ("tier", "limit", "bucket"))

    def do() -> Change:
        if not tier:
            raise Mistake("tier", "Name the tier, one that there is or a new one.")
        return visit.desk.set_tier(visit.actor, tier, limit, bucket(visit), **given(visit))

    question = f"Give the tier {tier} {numbers} on {limit}?"
    return _attempt(visit, "tier", do, question=question, said="The tier has these numbers now.")


def remove_tier(visit: Visit) -> Response:
    tier, limit = visit.form.get("tier", ""), visit.form.get("limit", "")
    return _attempt(
        visit,
        f"untier-{visit.form.number('row')}",
        lambda: visit.desk.remove_tier(visit.actor, tier, limit, **given(visit)),
        question=f"Take the numbers of the tier {tier} on {limit} back?",
        said=TAKEN_BACK,
    )


def set_route(visit: Visit) -> Response:
    path, cost = visit.form.get("path", ""), visit.form.number("cost")

    def do() -> Change:
        if not path:
            raise Mistake("path", 'Write the route as policies do, like "POST /posts" or "/users/{id}".')
        if cost is None:
            raise Mistake("cost", "Write a whole number, like 5; what costs 0 is never counted.")
        route_class = visit.form.get("class") or None
        return visit.desk.set_route(visit.actor, path, cost, route_class=route_class, **given(visit))

    return _attempt(visit, "route", do, question=f"Let {path} cost {cost}?", said=f"{path} costs {cost} now.")


def remove_route(visit: Visit) -> Response:
    path = visit.form.get("path", "")
    return _attempt(
        visit,
        f"unroute-{visit.form.number('row')}",
        lambda: visit.desk.remove_route(visit.actor, path, **given(visit)),
        question=f"Take back what {path} costs?",
        said=TAKEN_BACK,
    )


def _attempt(visit: Visit, form: str, do: Callable[[], Change], **told: Any) -> Response:
    return attempt(visit, form, do, back="/policy", again=lambda entered: policy(visit, entered), **told)
