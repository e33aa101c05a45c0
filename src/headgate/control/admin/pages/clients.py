"""The page of one client, with its limits, usage, requests and actions, and the page of one override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlencode

from starlette.responses import RedirectResponse

from headgate.clock import SECOND_US
from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.base import Handler, Visit
from headgate.control.admin.pages.forms import FieldError, bucket, change_context, reason, submit, until
from headgate.control.admin.pages.lists import client_from
from headgate.control.admin.problems import of_error
from headgate.control.service import Change, ChangeContext, ClientRef, OverrideSpec
from headgate.control.service.redaction import MIN_SECRET_LENGTH, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput
from headgate.telemetry.human_time import span
from headgate.telemetry.why.render import details, mail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.forms import Submission
    from headgate.control.service.models import OverrideView

__all__ = [
    "block",
    "change_override",
    "client",
    "find",
    "override",
    "override_page",
    "remove_override",
    "reset",
    "tier",
    "unblock",
    "why",
]


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


def client(visit: Visit, submission: Submission | None = None) -> Response:
    who = client_from(visit.form or visit.query)
    view = visit.service.clients.get(who)
    time_range, report = _time_range(visit), _explain(visit, who)
    overridable = list({each.limit: each for each in reversed(view.limits) if each.can_override}.values())[::-1]
    is_invalid = report is not None and report.error and visit.form.get("at")
    return visit.page(
        "client.html",
        "/clients",
        submission=submission,
        status=422 if is_invalid else None,
        view=view,
        time_range=time_range,
        time_ranges=TIME_RANGES,
        tiers=visit.service.policy.tiers(),
        overridable=overridable,
        limit_options=[(each.limit, f"{each.limit} (now {each.bucket})", each.bucket) for each in overridable],
        own_limits=list(dict.fromkeys(each.limit for each in view.limits if each.own)),
        why=report,
        **_timeline(visit, who, time_range),
    )


def why(visit: Visit) -> Response:
    """Redirect to the report for a time. Other text, which may be a secret, never gets into the URL."""
    who, at = client_from(visit.form), visit.form.get("at", "")
    try:
        span(at, now=_local(visit, visit.now_us), zone=visit.zone)
    except InvalidInput:
        return client(visit)
    query = urlencode({"reach": _time_range(visit).name, "at": at})
    return RedirectResponse(f"{filters.client_url(*who)}&{query}", 303)


_ClientChange: TypeAlias = Callable[[Visit, ClientRef], Change]


def _form(name: str, question: str, done: str) -> Callable[[_ClientChange], Handler]:
    """Turn a change of a client into the handler of a form on its page."""

    def decorate(change: _ClientChange) -> Handler:
        def handle(visit: Visit) -> Response:
            who = client_from(visit.form)
            return submit(visit, name, lambda: change(visit, who), question=question, done=done, who=who, page=client)

        return handle

    return decorate


@_form("override", "Allow {name} {bucket} on {limit}{until}?", "{Name} is now allowed {bucket} on {limit}{end}.")
def override(visit: Visit, who: ClientRef) -> Change:
    limit = visit.form.get("limit") or None
    spec = OverrideSpec(bucket(visit), limit=limit, valid_until=until(visit))
    added = visit.service.overrides.add(change_context(visit), who, spec)
    return _reset_too(visit, who, limit, added) if "reset" in visit.form and limit is not None else added


@_form("block", "Block {name}{until}?", "{Name} is blocked{until}.")
def block(visit: Visit, who: ClientRef) -> Change:
    return visit.service.blocks.add(change_context(visit), who, valid_until=until(visit))


@_form("unblock", "Unblock {name}?", "Block removed.")
def unblock(visit: Visit, who: ClientRef) -> Change:
    return visit.service.blocks.remove(change_context(visit), who)


@_form("reset", "Reset the counters of {name}?", "Counters of {limits} reset.")
def reset(visit: Visit, who: ClientRef) -> Change:
    limit = visit.form.get("limit")
    return _reset(visit, who, [limit] if limit else None)


def tier(visit: Visit) -> Response:
    return _assign_tier(visit) if visit.form.get("tier") else _unassign_tier(visit)


@_form("tier", "Move {name} to tier {tier}?", "{Name} is now in tier {tier}.")
def _assign_tier(visit: Visit, who: ClientRef) -> Change:
    label = visit.form.get("label") or None
    calendar = {name: visit.form.get(name, "") for name in ("timezone", "starts")}
    return visit.service.clients.assign_tier(change_context(visit), who, visit.form["tier"], label=label, **calendar)


@_form("tier", "Reset the tier of {name}?", "The policy now sets the tier of {name}.")
def _unassign_tier(visit: Visit, who: ClientRef) -> Change:
    view = visit.service.clients.get(who)
    for name, current in (("timezone", view.timezone), ("starts", view.starts)):
        if (text := visit.form.get(name, "")) and text != f"{current}":
            raise FieldError(name, "Choose the tier of this client, too.")
    return visit.service.clients.unassign_tier(change_context(visit), who)


def override_page(visit: Visit, submission: Submission | None = None) -> Response:
    view = visit.service.overrides.get(visit.id)
    current = [each.limit for each in visit.service.clients.get(view.who).limits if each.can_override]
    limits = list(dict.fromkeys([*filter(None, [view.limit]), *current]))
    end = _local_until(visit, view)
    return visit.page("override.html", "/overrides", submission=submission, view=view, limits=limits, until=end)


def change_override(visit: Visit) -> Response:
    before = visit.service.overrides.get(visit.id)

    def change() -> Change:
        spec = OverrideSpec(
            bucket(visit),
            limit=visit.form.get("limit") or None,
            route_class=before.route_class,
            valid_from=_datetime(before.valid_from_us),
            valid_until=_changed_until(visit, before),
        )
        return visit.service.overrides.change(change_context(visit), visit.id, spec)

    question, done = "Change the override of {name} to {bucket}{until}?", "{Name} is now allowed {bucket}{end}."
    return submit(visit, "override", change, question=question, done=done, who=before.who, page=override_page)


def remove_override(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.overrides.remove(change_context(visit), visit.id)

    question, done = "Remove the override of {name}?", "Override of {name} removed."
    who = visit.service.overrides.get(visit.id).who
    return submit(visit, "remove", change, question=question, done=done, who=who, page=override_page)


def _reset(visit: Visit, who: ClientRef, limits: list[str] | None) -> Change:
    return visit.service.clients.reset(ChangeContext(visit.actor, reason(visit)), who, limits=limits)


def _reset_too(visit: Visit, who: ClientRef, limit: str, added: Change) -> Change:
    """Reset the counter after an override was added, which applies even if the reset fails."""
    try:
        notes = (f"The counter of {limit} was reset.", *_reset(visit, who, [limit]).notes)
    except HeadgateError as error:
        notes = (f"The counter was not reset: {of_error(error).detail}",)
    return replace(added, notes=(*added.notes, *notes))


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
        charges = visit.service.ledger.charges(who, answer.span.since_us, answer.span.until_us)
    except HeadgateError as error:
        return WhyResult("" if may_be_key(at) else at, error=of_error(error).detail)
    paragraphs = [text for report in charges for text in report.paragraphs(visit.zone)]
    return WhyResult(at, mail(answer, zone=visit.zone), [*details(answer, zone=visit.zone), *paragraphs])


def _local(visit: Visit, at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // SECOND_US, UTC).astimezone(visit.zone)


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
