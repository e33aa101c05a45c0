"""The overrides page, and the page of one override."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headgate.control.admin.pages import filters
from headgate.control.admin.pages.forms import bucket, capitalize, change_context, submit, until, until_text
from headgate.control.admin.pages.search import STATES, list_filter, redirect_without_key
from headgate.control.service import OverrideSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.admin.pages.forms import Submission
    from headgate.control.service import Change
    from headgate.control.service.models import OverrideView

__all__ = ["change_override", "override", "overrides", "remove_override"]


def overrides(visit: Visit) -> Response:
    if (redirect := redirect_without_key(visit)) is not None:
        return redirect
    filter = list_filter(visit)
    found = visit.service.overrides.list(**filter)
    return visit.page("overrides.html", here="/overrides", found=found, states=STATES, **filter)


def override(visit: Visit, submission: Submission | None = None) -> Response:
    view = visit.service.overrides.get(visit.id)
    current = [each.limit for each in visit.service.clients.get(view.who).limits if each.can_override]
    return visit.page(
        "override.html",
        here="/overrides",
        view=view,
        limits=list(dict.fromkeys([*filter(None, [view.limit]), *current])),
        until=_local_until(visit, view),
        submission=submission,
    )


def change_override(visit: Visit) -> Response:
    before, numbers = visit.service.overrides.get(visit.id), visit.form.get("bucket", "")
    name = visit.name_of(before.who)

    def change() -> Change:
        spec = OverrideSpec(
            bucket(visit),
            limit=visit.form.get("limit") or None,
            route_class=before.route_class,
            valid_from=_datetime(before.valid_from_us),
            valid_until=_changed_until(visit, before),
        )
        return visit.service.overrides.change(change_context(visit), visit.id, spec)

    return _submit(
        visit,
        "override",
        change,
        before,
        question=f"Change the override of {name} to {numbers}{until_text(visit)}?",
        done=f"{capitalize(name)} is now allowed {numbers}{until_text(visit) or ', with no end date'}.",
    )


def remove_override(visit: Visit) -> Response:
    before = visit.service.overrides.get(visit.id)
    return _submit(
        visit,
        "remove",
        lambda: visit.service.overrides.remove(change_context(visit), visit.id),
        before,
        question=f"Remove the override of {visit.name_of(before.who)}?",
        done=f"Override of {visit.name_of(before.who)} removed.",
    )


def _submit(visit: Visit, form: str, change: Callable[[], Change], before: OverrideView, **texts: Any) -> Response:
    return submit(visit, form, change, **texts, redirect=filters.client_url(*before.who), page=override)


def _datetime(at_us: int | None) -> datetime | None:
    return None if at_us is None else datetime.fromtimestamp(at_us / 1_000_000, UTC)


def _local_until(visit: Visit, view: OverrideView) -> str:
    """The end as the form shows it: to the minute, in the visitor's time zone."""
    end = _datetime(view.valid_until_us)
    return "" if end is None else f"{end.astimezone(visit.zone):%Y-%m-%d %H:%M}"


def _changed_until(visit: Visit, before: OverrideView) -> datetime | None:
    """The end that was entered; if the field is unchanged, the stored end to the microsecond."""
    if visit.form.get("until", "") == _local_until(visit, before):
        return _datetime(before.valid_until_us)
    return until(visit)
