"""The numbers of tiers and the costs of routes, where they are set beside the document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.control.admin.pages.forms import Mistake, attempt, bucket, change_context
from headgate.control.admin.pages.policy import policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service import Change

__all__ = ["remove_route", "remove_tier", "set_route", "set_tier"]

TAKEN_BACK = "Removed. The value in the policy document applies again."


def set_tier(visit: Visit) -> Response:
    tier, limit, numbers = (visit.form.get(name, "") for name in ("tier", "limit", "bucket"))

    def do() -> Change:
        if not tier:
            raise Mistake("tier", "Enter the name of an existing or a new tier.")
        return visit.service.policy.set_tier(change_context(visit), tier, limit, bucket(visit))

    question = f"Set tier {tier} to {numbers} on {limit}?"
    return _attempt(visit, "tier", do, question=question, said=f"Tier {tier} is now allowed {numbers} on {limit}.")


def remove_tier(visit: Visit) -> Response:
    tier, limit = visit.form.get("tier", ""), visit.form.get("limit", "")
    return _attempt(
        visit,
        f"untier-{visit.form.number('row')}",
        lambda: visit.service.policy.remove_tier(change_context(visit), tier, limit),
        question=f"Remove the limit of tier {tier} on {limit}?",
        said=TAKEN_BACK,
    )


def set_route(visit: Visit) -> Response:
    path, cost = visit.form.get("path", ""), visit.form.number("cost")

    def do() -> Change:
        if not path:
            raise Mistake("path", 'Enter a route, for example "POST /posts" or "/users/{id}".')
        if cost is None:
            raise Mistake("cost", "Enter a whole number, for example 5.")
        route_class = visit.form.get("class") or None
        return visit.service.policy.set_route(change_context(visit), path, cost, route_class=route_class)

    return _attempt(visit, "route", do, question=f"Set the cost of {path} to {cost}?", said=f"{path} now costs {cost}.")


def remove_route(visit: Visit) -> Response:
    path = visit.form.get("path", "")
    return _attempt(
        visit,
        f"unroute-{visit.form.number('row')}",
        lambda: visit.service.policy.remove_route(change_context(visit), path),
        question=f"Remove the cost of {path}?",
        said=TAKEN_BACK,
    )


def _attempt(visit: Visit, form: str, do: Callable[[], Change], **told: Any) -> Response:
    return attempt(visit, form, do, back="/policy", again=lambda entered: policy(visit, entered), **told)
