"""The clients page and the page of one client: its limits, usage, requests and actions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.responses import RedirectResponse

from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.forms import (
    bucket,
    capitalize,
    change_context,
    reason,
    submit,
    until,
    until_text,
)
from headgate.control.admin.pages.search import client_from, redirect_without_key
from headgate.control.admin.problems import of_error
from headgate.control.service import ChangeContext, OverrideSpec
from headgate.control.service.redaction import MIN_SECRET_LENGTH, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput
from headgate.telemetry.human_time import span
from headgate.telemetry.why.render import details, mail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.admin.pages.forms import Submission
    from headgate.control.service import Change, ClientRef

__all__ = ["block", "client", "clients", "find", "override", "reset", "tier", "unblock", "why"]

SECOND_US: Final = 1_000_000


class TimeRange(NamedTuple):
    """The time range of a timeline."""

    name: str
    title: str
    seconds: int
    slots: int
    """Each is a whole minute, half an hour or two hours."""
    axis: tuple[str, ...]
    """Labels of the time axis."""
    format: str


TIME_RANGES: Final = (
    TimeRange("hour", "Hour", 3_600, 60, ("1 h ago", "30 min", "now"), "%H:%M"),
    TimeRange("day", "24 hours", 86_400, 48, ("24 h ago", "12 h", "now"), "%a %H:%M"),
    TimeRange("week", "7 days", 7 * 86_400, 84, ("7 days ago", "3½ days", "now"), "%a %d %b %H:%M"),
)


class WhyResult(NamedTuple):
    """The answer to "Why were requests rejected?"."""

    at: str
    mail: Sequence[str] = ()
    details: Sequence[str] = ()
    error: str = ""


def find(visit: Visit) -> Response:
    """Redirect a search to the client's page. The form is posted because the text may be an API key."""
    typed = visit.form.get("client", "")
    found = visit.service.clients.matches(typed)
    if len(found) == 1:
        return RedirectResponse(filters.client_url(*found[0].who), 303)
    others = [] if found else visit.service.clients.candidates(typed)
    is_key = any(each.who.kind == "api_key" for each in others) and (
        looks_secret(typed) or may_be_key(typed, shortest=MIN_SECRET_LENGTH)
    )
    return visit.page(
        "client_search.html",
        status=200 if found else 404,
        here="/clients",
        found=found,
        others=others,
        searched="" if is_key else typed,
        typed=others[0].title if is_key else f"“{typed}”",
    )


def clients(visit: Visit) -> Response:
    if (redirect := redirect_without_key(visit)) is not None:
        return redirect
    search, after = visit.query.get("search", ""), visit.query.get("after") or None
    found = visit.service.clients.list(search=search, after=after)
    return visit.page("clients.html", here="/clients", found=found, search=search, after=after)


def client(visit: Visit) -> Response:
    return _page(visit, client_from(visit.query))


def why(visit: Visit) -> Response:
    """Redirect to the report for a time. Other text, which may be a secret, never gets into the URL."""
    who, at = client_from(visit.form), visit.form.get("at", "")
    try:
        span(at, now=_local(visit, visit.now_us), zone=visit.zone)
    except InvalidInput:
        return _page(visit, who)
    query = urlencode({"reach": _time_range(visit).name, "at": at})
    return RedirectResponse(f"{filters.client_url(*who)}&{query}", 303)


def override(visit: Visit) -> Response:
    who, name = _target(visit)
    limit, numbers = visit.form.get("limit") or None, visit.form.get("bucket", "")

    def change() -> Change:
        spec = OverrideSpec(bucket(visit), limit=limit, valid_until=until(visit))
        added = visit.service.overrides.add(change_context(visit), who, spec)
        return _reset_too(visit, who, limit, added) if "reset" in visit.form and limit is not None else added

    return _submit(
        visit,
        "override",
        who,
        change,
        question=f"Allow {name} {numbers} on {limit}{until_text(visit)}?",
        done=f"{capitalize(name)} is now allowed {numbers} on {limit}{until_text(visit) or ', with no end date'}.",
    )


def block(visit: Visit) -> Response:
    who, name = _target(visit)
    return _submit(
        visit,
        "block",
        who,
        lambda: visit.service.blocks.add(change_context(visit), who, valid_until=until(visit)),
        question=f"Block {name}{until_text(visit)}?",
        done=f"{capitalize(name)} is blocked{until_text(visit)}.",
    )


def unblock(visit: Visit) -> Response:
    who, name = _target(visit)
    return _submit(
        visit,
        "unblock",
        who,
        lambda: visit.service.blocks.remove(change_context(visit), who),
        question=f"Unblock {name}?",
        done="Block removed.",
    )


def reset(visit: Visit) -> Response:
    who, name = _target(visit)
    limit = visit.form.get("limit")
    return _submit(
        visit,
        "reset",
        who,
        lambda: _reset(visit, who, [limit] if limit else None),
        question=f"Reset the counters of {name}?",
        done=f"Counters of {limit or 'all limits'} reset.",
    )


def tier(visit: Visit) -> Response:
    who, name = _target(visit)
    new, label = visit.form.get("tier", ""), visit.form.get("label") or None

    def change() -> Change:
        if new:
            return visit.service.clients.assign_tier(change_context(visit), who, new, label=label)
        return visit.service.clients.unassign_tier(change_context(visit), who)

    return _submit(
        visit,
        "tier",
        who,
        change,
        question=f"Move {name} to tier {new}?" if new else f"Reset the tier of {name}?",
        done=f"{capitalize(name)} is now in tier {new}." if new else f"The policy now sets the tier of {name}.",
    )


# ---------------------------------------------------------------------- internals


def _target(visit: Visit) -> tuple[ClientRef, str]:
    who = client_from(visit.form)
    return who, visit.name_of(who)


def _submit(visit: Visit, form: str, who: ClientRef, change: Callable[[], Change], **texts: Any) -> Response:
    def page(visit: Visit, submission: Submission) -> Response:
        return _page(visit, who, submission)

    return submit(visit, form, change, **texts, redirect=filters.client_url(*who), page=page)


def _reset(visit: Visit, who: ClientRef, limits: list[str] | None) -> Change:
    return visit.service.clients.reset(ChangeContext(visit.actor, reason(visit)), who, limits=limits)


def _reset_too(visit: Visit, who: ClientRef, limit: str, added: Change) -> Change:
    """Reset the counter after an override was added, which applies even if the reset fails."""
    try:
        notes = (f"The counter of {limit} was reset.", *_reset(visit, who, [limit]).notes)
    except HeadgateError as error:
        notes = (f"The counter was not reset: {of_error(error).detail}",)
    return replace(added, notes=(*added.notes, *notes))


def _page(visit: Visit, who: ClientRef, submission: Submission | None = None) -> Response:
    view = visit.service.clients.get(who)
    time_range, report = _time_range(visit), _explain(visit, who)
    values: dict[str, Any] = {
        "view": view,
        "submission": submission,
        "time_range": time_range,
        "time_ranges": TIME_RANGES,
        "tiers": visit.service.policy.tiers(),
        "overridable": list({each.limit: each for each in reversed(view.limits) if each.can_override}.values())[::-1],
        "own_limits": list(dict.fromkeys(each.limit for each in view.limits if each.own)),
        "why": report,
        **_timeline(visit, who, time_range),
    }
    is_invalid = report is not None and report.error and visit.form.get("at")
    return visit.page("client.html", status=422 if is_invalid else None, here="/clients", **values)


def _time_range(visit: Visit) -> TimeRange:
    name = visit.query.get("reach") or visit.form.get("reach")
    return next((each for each in TIME_RANGES if each.name == name), TIME_RANGES[0])


def _timeline(visit: Visit, who: ClientRef, time_range: TimeRange) -> dict[str, Any]:
    until_us = visit.now_us
    try:
        found = visit.service.clients.timeline(
            who, since_us=until_us - time_range.seconds * SECOND_US, until_us=until_us, slots=time_range.slots
        )
    except HeadgateError as error:
        return {"timeline": None, "timeline_error": of_error(error).detail}
    labels = [f"{_local(visit, slot.at_us):{time_range.format}}" for slot in found.slots]
    bands = charts.decision_bands(lambda name: [getattr(slot, name) for slot in found.slots])
    columns = list(zip(*(band.values for band in bands), strict=True))
    return {
        "timeline": found,
        "timeline_error": "",
        "is_empty": not any(map(any, columns)),
        "bands": bands,
        "chart": charts.bars(bands, labels, id="timeline", title=f"Decisions, last {time_range.title.lower()}"),
        "rows": [
            [label, *map(filters.number, column)]
            for column, label in reversed(list(zip(columns, labels, strict=True)))
            if any(column)
        ],
        "names": [band.name for band in bands],
    }


def _explain(visit: Visit, who: ClientRef) -> WhyResult | None:
    at = visit.query.get("at") or visit.form.get("at", "")
    if not at:
        return None
    try:
        answer = visit.service.clients.why(who, at=at, until=visit.query.get("to") or None, zone=visit.zone)
    except HeadgateError as error:
        return WhyResult("" if may_be_key(at) else at, error=of_error(error).detail)
    return WhyResult(at, mail(answer, zone=visit.zone), details(answer, zone=visit.zone))


def _local(visit: Visit, at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // SECOND_US, UTC).astimezone(visit.zone)
