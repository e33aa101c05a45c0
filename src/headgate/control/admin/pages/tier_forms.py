"""Forms of the policy page: limits of tiers and costs of routes that override the document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.control.admin.pages.forms import FieldError, bucket, change_context, submit
from headgate.control.admin.pages.policy import policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service import Change

__all__ = ["remove_route", "remove_tier", "set_route", "set_tier"]

REMOVED: Final = "Removed. The value in the policy document applies again."


def set_tier(visit: Visit) -> Response:
    tier, limit, numbers = (visit.form.get(name, "") for name in ("tier", "limit", "bucket"))

    def change() -> Change:
        if not tier:
            raise FieldError("tier", "Enter the name of an existing or a new tier.")
        return visit.service.policy.set_tier(change_context(visit), tier, limit, bucket(visit))

    question = f"Set tier {tier} to {numbers} on {limit}?"
    return _submit(visit, "tier", change, question=question, done=f"Tier {tier} is now allowed {numbers} on {limit}.")


def remove_tier(visit: Visit) -> Response:
    tier, limit = visit.form.get("tier", ""), visit.form.get("limit", "")
    return _submit(
        visit,
        f"remove-tier-{visit.form.number('row')}",
        lambda: visit.service.policy.remove_tier(change_context(visit), tier, limit),
        question=f"Remove the limit of tier {tier} on {limit}?",
        done=REMOVED,
    )


def set_route(visit: Visit) -> Response:
    path, cost = visit.form.get("path", ""), visit.form.number("cost")

    def change() -> Change:
        if not path:
            raise FieldError("path", 'Enter a route, for example "POST /posts" or "/users/{id}".')
        if cost is None:
            raise FieldError("cost", "Enter a whole number, for example 5.")
        route_class = visit.form.get("class") or None
        return visit.service.policy.set_route(change_context(visit), path, cost, route_class=route_class)

    question = f"Set the cost of {path} to {cost}?"
    return _submit(visit, "route", change, question=question, done=f"{path} now costs {cost}.")


def remove_route(visit: Visit) -> Response:
    path = visit.form.get("path", "")
    return _submit(
        visit,
        f"remove-route-{visit.form.number('row')}",
        lambda: visit.service.policy.remove_route(change_context(visit), path),
        question=f"Remove the cost of {path}?",
        done=REMOVED,
    )


def _submit(visit: Visit, form: str, change: Callable[[], Change], **texts: Any) -> Response:
    return submit(visit, form, change, redirect="/policy", page=policy, **texts)
