"""The page of a client: what holds for it, how much of that is used, what became of its requests, and what to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.responses import RedirectResponse

from headgate.control.admin.pages import charts, filters
from headgate.control.admin.pages.charts import Band
from headgate.control.admin.pages.forms import (
    Entered,
    attempt,
    bucket,
    change_context,
    reason,
    sentence,
    until,
    until_text,
)
from headgate.control.admin.pages.overrides import client_of, readdressed
from headgate.control.admin.problems import of_error
from headgate.control.service import ChangeContext, OverrideSpec
from headgate.control.service.redaction import SHORTEST_HIDDEN, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput
from headgate.telemetry.human_time import span
from headgate.telemetry.why.render import details, mail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service import Change, ClientRef
    from headgate.control.service.models import Slot, Timeline

__all__ = ["block", "client", "clients", "find", "override", "reset", "tier", "unblock", "why"]

SECOND_US: Final = 1_000_000


class Reach(NamedTuple):
    """How far back a timeline goes."""

    name: str
    words: str
    seconds: int
    slots: int
    """Whole minutes, quarters and hours: what people read."""
    times: tuple[str, ...]
    """Below the chart."""
    format: str


REACHES: Final = (
    Reach("hour", "Hour", 3_600, 60, ("1 h ago", "30 min", "now"), "%H:%M"),
    Reach("day", "24 hours", 86_400, 48, ("24 h ago", "12 h", "now"), "%a %H:%M"),
    Reach("week", "7 days", 7 * 86_400, 84, ("7 days ago", "3½ days", "now"), "%a %d %b %H:%M"),
)
BANDS: Final = (("Allowed", "allowed"), ("Denied", "denied"), ("Blocked", "blocked"), ("Unavailable", "unavailable"))


class WhyForm(NamedTuple):
    """The answer to "why were requests rejected?"."""

    at: str
    mail: Sequence[str] = ()
    details: Sequence[str] = ()
    error: str = ""


def find(visit: Visit) -> Response:
    """From whatever was typed to the page of that client. It came in a form's body, as it may be an API key."""
    typed = visit.form.get("client", "")
    found = visit.service.clients.matches(typed)
    if len(found) == 1:
        return RedirectResponse(filters.client_url(*found[0].who), 303)
    others = [] if found else visit.service.clients.candidates(typed)
    is_key = any(each.who.kind == "api_key" for each in others) and (
        looks_secret(typed) or may_be_key(typed, shortest=SHORTEST_HIDDEN)
    )
    return visit.page(
        "find.html",
        status=200 if found else 404,
        here="/clients",
        found=found,
        others=others,
        searched="" if is_key else typed,
        typed=others[0].title if is_key else f"“{typed}”",
    )


def clients(visit: Visit) -> Response:
    """Everybody of whom the configuration says something."""
    if (elsewhere := readdressed(visit)) is not None:
        return elsewhere
    search, after = visit.query.get("search", ""), visit.query.get("after") or None
    found = visit.service.clients.list(search=search, after=after)
    return visit.page("clients.html", here="/clients", found=found, search=search, after=after)


def client(visit: Visit) -> Response:
    return _page(visit, client_of(visit.query))


def why(visit: Visit) -> Response:
    """From what was typed to the answer. It came in a form's body: only a time gets into the address, whatever else
    was pasted there."""
    who, at = client_of(visit.form), visit.form.get("at", "")
    try:
        span(at, now=_local(visit, visit.now_us), zone=visit.zone)
    except InvalidInput:
        return _page(visit, who)
    return RedirectResponse(f"{filters.client_url(*who)}&{urlencode({'reach': _reach(visit).name, 'at': at})}", 303)


def override(visit: Visit) -> Response:
    who = client_of(visit.form)
    limit, numbers = visit.form.get("limit") or None, visit.form.get("bucket", "")
    return attempt(
        visit,
        "override",
        lambda: _with_reset(
            visit,
            who,
            limit,
            visit.service.overrides.add(
                change_context(visit), who, OverrideSpec(bucket(visit), limit=limit, valid_until=until(visit))
            ),
        ),
        question=f"Allow {_called(visit, who)} {numbers} on {limit}{until_text(visit)}?",
        said=f"{sentence(_called(visit, who))} is now allowed {numbers} on {limit}"
        f"{until_text(visit) or ', with no end date'}.",
        back=filters.client_url(*who),
        again=lambda entered: _page(visit, who, entered),
    )


def block(visit: Visit) -> Response:
    who = client_of(visit.form)
    return attempt(
        visit,
        "block",
        lambda: visit.service.blocks.add(change_context(visit), who, valid_until=until(visit)),
        question=f"Block {_called(visit, who)}{until_text(visit)}?",
        said=f"{sentence(_called(visit, who))} is blocked{until_text(visit)}.",
        back=filters.client_url(*who),
        again=lambda entered: _page(visit, who, entered),
    )


def unblock(visit: Visit) -> Response:
    who = client_of(visit.form)
    return attempt(
        visit,
        "unblock",
        lambda: visit.service.blocks.remove(change_context(visit), who),
        question=f"Unblock {_called(visit, who)}?",
        said="Block removed.",
        back=filters.client_url(*who),
        again=lambda entered: _page(visit, who, entered),
    )


def reset(visit: Visit) -> Response:
    who = client_of(visit.form)
    limit = visit.form.get("limit")
    return attempt(
        visit,
        "reset",
        lambda: visit.service.clients.reset(
            ChangeContext(visit.actor, reason(visit)), who, limits=[limit] if limit else None
        ),
        question=f"Reset the counters of {_called(visit, who)}?",
        said=f"Counters of {limit or 'all limits'} reset.",
        back=filters.client_url(*who),
        again=lambda entered: _page(visit, who, entered),
    )


def tier(visit: Visit) -> Response:
    who, name = client_of(visit.form), visit.form.get("tier", "")
    label = visit.form.get("label") or None
    return attempt(
        visit,
        "tier",
        lambda: (
            visit.service.clients.assign_tier(change_context(visit), who, name, label=label)
            if name
            else visit.service.clients.unassign_tier(change_context(visit), who)
        ),
        question=f"Move {_called(visit, who)} to tier {name}?" if name else f"Reset the tier of {_called(visit, who)}?",
        said=f"{sentence(_called(visit, who))} is now in tier {name}."
        if name
        else f"The policy now sets the tier of {_called(visit, who)}.",
        back=filters.client_url(*who),
        again=lambda entered: _page(visit, who, entered),
    )


# ---------------------------------------------------------------------- within


def _with_reset(visit: Visit, who: ClientRef, limit: str | None, given_one: Change) -> Change:
    """An override that was given, and what was used of the limit forgotten, if the form says so, too."""
    if "reset" not in visit.form or limit is None:
        return given_one
    try:
        done = visit.service.clients.reset(ChangeContext(visit.actor, reason(visit)), who, limits=[limit])
    except HeadgateError as error:  # the override holds all the same
        return replace(given_one, notes=(*given_one.notes, f"The counter was not reset: {of_error(error).detail}"))
    return replace(given_one, notes=(*given_one.notes, f"The counter of {limit} was reset.", *done.notes))


def _page(visit: Visit, who: ClientRef, entered: Entered | None = None) -> Response:
    view = visit.service.clients.get(who)
    reach, why = _reach(visit), _why(visit, who)
    values: dict[str, Any] = {
        "view": view,
        "entered": entered,
        "reach": reach,
        "reaches": REACHES,
        "tiers": visit.service.policy.tiers(),
        "overridable": list({each.limit: each for each in reversed(view.limits) if each.can_override}.values())[::-1],
        "own_limits": list(dict.fromkeys(each.limit for each in view.limits if each.own)),
        "why": why,
        **_timeline(visit, who, reach),
    }
    status = entered.status if entered else 422 if why is not None and why.error and visit.form.get("at") else 200
    return visit.page("client.html", status=status, here="/clients", **values)


def _reach(visit: Visit) -> Reach:
    asked = visit.query.get("reach") or visit.form.get("reach")
    return next((each for each in REACHES if each.name == asked), REACHES[0])


def _timeline(visit: Visit, who: ClientRef, reach: Reach) -> dict[str, Any]:
    until_us = visit.now_us
    try:
        found = visit.service.clients.timeline(
            who, since_us=until_us - reach.seconds * SECOND_US, until_us=until_us, slots=reach.slots
        )
    except HeadgateError as error:
        return {"timeline": None, "timeline_error": of_error(error).detail}
    labels = [f"{_local(visit, slot.at_us):{reach.format}}" for slot in found.slots]
    shown = [
        (name, css) for name, css in BANDS if css in ("allowed", "denied") or any(getattr(s, css) for s in found.slots)
    ]
    bands = [Band(name, css, [getattr(slot, css) for slot in found.slots]) for name, css in shown]
    return {
        "timeline": found,
        "timeline_error": "",
        "is_quiet": not any(any(band.values) for band in bands),
        "bands": bands,
        "chart": charts.bars(bands, labels, id="timeline", title=f"Decisions, last {reach.words.lower()}"),
        "rows": _rows(found, labels, [css for _, css in shown]),
        "names": [name for name, _ in shown],
    }


def _rows(found: Timeline, labels: Sequence[str], columns: Sequence[str]) -> list[list[str]]:
    """The slots in which something was, the newest first."""

    def numbers(slot: Slot) -> list[int]:
        return [getattr(slot, css) for css in columns]

    pairs = reversed(list(zip(found.slots, labels, strict=True)))
    return [[label, *map(filters.amount, numbers(slot))] for slot, label in pairs if any(numbers(slot))]


def _why(visit: Visit, who: ClientRef) -> WhyForm | None:
    at = visit.query.get("at") or visit.form.get("at", "")
    if not at:
        return None
    try:
        answer = visit.service.clients.why(who, at=at, until=visit.query.get("to") or None, zone=visit.zone)
    except HeadgateError as error:
        return WhyForm("" if may_be_key(at) else at, error=of_error(error).detail)
    return WhyForm(at, mail(answer, zone=visit.zone), details(answer, zone=visit.zone))


def _called(visit: Visit, who: ClientRef) -> str:
    """What to call a client in a question."""
    return visit.name_of(who)


def _local(visit: Visit, at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // SECOND_US, UTC).astimezone(visit.zone)
