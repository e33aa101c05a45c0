"""Overrides and blocks: all of them, to look for one, change it, or take it back."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse

from headgate.control.admin.pages import filters
from headgate.control.admin.pages.forms import (
    Entered,
    Mistake,
    attempt,
    bucket,
    change_context,
    reason,
    sentence,
    until,
    until_text,
    until_us,
)
from headgate.control.admin.problems import of_error
from headgate.control.service import ClientRef, NotAllowed, NotFound, OverrideSpec
from headgate.control.service.redaction import SHORTEST_HIDDEN, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Form, Visit
    from headgate.control.service.models import OverrideView

__all__ = [
    "add_block",
    "blocks",
    "change_override",
    "client_of",
    "new_block",
    "override",
    "overrides",
    "readdressed",
    "remove_block",
    "remove_override",
    "search",
]

STATES: Final = (("all", "All"), ("active", "Active"), ("future", "Scheduled"), ("expired", "Expired"))


WHOM_TO_BLOCK: Final = "Enter an IP address, a network, an API key or the name of a client."
SEARCHED: Final = {
    "/clients": ("search",),
    "/overrides": ("search", "state"),
    "/blocks": ("search", "state"),
    "/audit": ("search", "author"),
}
"""The lists that are searched, and the fields of their forms."""
TYPED: Final = ("search", "author")
"""Those into which people type, and paste API keys."""


def search(visit: Visit) -> Response:
    """From what was typed to the page that shows what was found. It came in a form's body; of an API key, only the
    hash gets into the address, where histories and logs keep it."""
    path = visit.form.get("list", "")
    if path not in SEARCHED:
        raise InvalidInput("unknown list")
    return _to(path, {name: visit.form.get(name, "") for name in SEARCHED[path]}, _hidden(visit, visit.form))


def readdressed(visit: Visit) -> Response | None:
    """To the same page under an address without an API key; None if there is none in this one."""
    found = _hidden(visit, visit.query)
    return _to(visit.request.url.path, visit.query, found) if found else None


def overrides(visit: Visit) -> Response:
    return readdressed(visit) or _overrides(visit)


def override(visit: Visit) -> Response:
    return _override(visit)


def change_override(visit: Visit) -> Response:
    id = _id(visit)
    before = visit.service.overrides.get(id)
    return attempt(
        visit,
        "override",
        lambda: visit.service.overrides.change(
            change_context(visit),
            id,
            OverrideSpec(
                bucket(visit),
                limit=visit.form.get("limit") or None,
                route_class=before.route_class,
                valid_from=_moment(before.valid_from_us),
                valid_until=_kept_until(visit, before),
            ),
        ),
        question=f"Change the override of {visit.name_of(before.who)} to {visit.form.get('bucket', '')}"
        f"{until_text(visit)}?",
        said=f"{sentence(visit.name_of(before.who))} is now allowed {visit.form.get('bucket', '')}"
        f"{until_text(visit) or ', with no end date'}.",
        back=filters.client_url(*before.who),
        again=lambda entered: _override(visit, entered),
    )


def remove_override(visit: Visit) -> Response:
    id = _id(visit)
    before = visit.service.overrides.get(id)
    return attempt(
        visit,
        "remove",
        lambda: visit.service.overrides.remove(change_context(visit), id),
        question=f"Remove the override of {visit.name_of(before.who)}?",
        said=f"Override of {visit.name_of(before.who)} removed.",
        back=filters.client_url(*before.who),
        again=lambda entered: _override(visit, entered),
    )


def blocks(visit: Visit) -> Response:
    return readdressed(visit) or _blocks(visit)


def add_block(visit: Visit) -> Response:
    """Block any client that can be typed or pasted, after a preview that says what the block will match."""
    typed = visit.form.get("client", "")
    _hide_key(visit, typed)
    if "again" in visit.form:
        return _blocks(visit, Entered("block", visit.form, status=200))
    try:
        if visit.form.get("target"):
            return _block_target(visit)
        return _preview_block(visit, typed)
    except Mistake as mistake:
        return _blocks(visit, Entered("block", visit.form, {mistake.field: f"{mistake}"}))


def new_block(visit: Visit) -> Response:
    """The confirmation for a client that another page links to: the overview, or a client's own page."""
    if not visit.actor.may("support"):
        raise NotAllowed("block clients", role=visit.actor.role, needed="support")
    who = client_of(visit.query)
    (found,) = visit.service.clients.candidates(f"{who.kind}={who.value}")
    return visit.page(
        "block.html",
        here="/blocks",
        found=[found],
        dangers=visit.service.blocks.risks(found.who),
        until_us=None,
        asks=True,
        suggested=_suggested_reason(visit, who),
        kept=[("client", f"{who.kind}={who.value}"), ("based_on", "")],
    )


def _suggested_reason(visit: Visit, who: ClientRef) -> str:
    """What the overview shows of a client that is denied: a reason that somebody in a hurry need not type."""
    denied = next((each.denied for each in visit.service.fleet.overview().top_denied if each.key == who.value), None)
    return "" if denied is None else f"{filters.count(denied, 'request', 'requests')} denied in the last minute"


def _hide_key(visit: Visit, typed: str) -> None:
    """Replace what may be an API key by its hash, so that no page that shows the form again contains it."""
    if typed:
        with suppress(HeadgateError):
            first = visit.service.clients.candidates(typed)[0].who
            if first.kind == "api_key":
                visit.form.put("client", f"api_key={first.value}")
                return
    if looks_secret(typed) or may_be_key(typed, shortest=SHORTEST_HIDDEN):
        visit.form.put("client", "")


def _preview_block(visit: Visit, typed: str) -> Response:
    """The confirmation page: whom the block is about, which requests it matches, and until when."""
    if not typed:
        raise Mistake("client", WHOM_TO_BLOCK)
    try:
        found = visit.service.clients.candidates(typed)
        dangers = visit.service.blocks.risks(found[0].who) if len(found) == 1 else []
    except (InvalidInput, NotFound) as error:
        raise Mistake("client", of_error(error).detail) from None
    reason(visit)
    return visit.page(
        "block.html",
        here="/blocks",
        found=found,
        dangers=dangers,
        until_us=until_us(visit),
        asks=False,
        kept=[(name, visit.form.get(name, "")) for name in ("client", "until", "reason", "based_on")],
    )


def _block_target(visit: Visit) -> Response:
    kind, _, value = visit.form["target"].partition("=")
    who = ClientRef(kind, value)
    name = visit.name_of(who)
    return attempt(
        visit,
        "block",
        lambda: visit.service.blocks.add(change_context(visit), who, valid_until=until(visit)),
        question=f"Block {name}?",
        said=f"{sentence(name)} is blocked{until_text(visit)}.",
        back="/blocks",
        again=lambda entered: _blocks(visit, entered),
    )


def remove_block(visit: Visit) -> Response:
    return attempt(
        visit,
        f"remove-{_id(visit)}",
        lambda: visit.service.blocks.remove(change_context(visit), _id(visit)),
        question="Remove this block?",
        said="Block removed.",
        back="/blocks",
        again=lambda entered: _blocks(visit, entered),
    )


# ---------------------------------------------------------------------- within


def _overrides(visit: Visit) -> Response:
    asked = _asked(visit)
    return visit.page("overrides.html", here="/overrides", found=visit.service.overrides.list(**asked), **_shown(asked))


def _override(visit: Visit, entered: Entered | None = None) -> Response:
    view = visit.service.overrides.get(_id(visit))
    standing = visit.service.clients.get(view.who).limits
    limits = list(dict.fromkeys([*filter(None, [view.limit]), *(each.limit for each in standing if each.can_override)]))
    return visit.page(
        "override.html",
        status=entered.status if entered else 200,
        here="/overrides",
        view=view,
        limits=limits,
        until=_written_until(visit, view),
        entered=entered,
    )


def _blocks(visit: Visit, entered: Entered | None = None) -> Response:
    asked = _asked(visit)
    return visit.page(
        "blocks.html",
        status=entered.status if entered else 200,
        here="/blocks",
        found=visit.service.blocks.list(**asked),
        entered=entered,
        **_shown(asked),
    )


def _hidden(visit: Visit, typed: Form) -> dict[str, str]:
    """What stands in the place of texts that may be API keys, by the names of their fields."""
    texts = {name: typed[name] for name in TYPED if typed.get(name)}
    return {name: found for name, text in texts.items() if (found := visit.service.searchable(text)) != text}


def _to(path: str, query: Mapping[str, str], hidden: Mapping[str, str]) -> Response:
    said = {name: value for name, value in {**query, **hidden}.items() if value}
    return RedirectResponse(f"{path}?{urlencode(said)}" if said else path, 303)


def client_of(form: Form) -> ClientRef:
    """The client that a page or a form is about."""
    kind, value = form.get("kind", ""), form.get("value", "")
    if not kind or not value:
        raise InvalidInput("no client given: use the search above")
    if kind == "api_key" and not value.startswith("hmac:"):
        # Not shown again: addresses stay in histories and logs.
        raise InvalidInput("API keys must not appear in URLs: use the search above, which hashes them")
    return ClientRef(kind, value)


def _asked(visit: Visit) -> dict[str, Any]:
    state = visit.query.get("state", "all")
    return {
        "search": visit.query.get("search", ""),
        "state": state if state in dict(STATES) else "all",
        "after": visit.query.get("after") or None,
    }


def _shown(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "states": STATES}


def _id(visit: Visit) -> int:
    id: int = visit.request.path_params["id"]
    return id


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else datetime.fromtimestamp(at_us / 1_000_000, UTC)


def _written_until(visit: Visit, view: OverrideView) -> str:
    """As it can be sent back: to the minute, in the zone of who looks."""
    moment = _moment(view.valid_until_us)
    return "" if moment is None else f"{moment.astimezone(visit.zone):%Y-%m-%d %H:%M}"


def _kept_until(visit: Visit, before: OverrideView) -> datetime | None:
    """The end that was written; to the microsecond the one that was, if nobody has touched it."""
    if visit.form.get("until", "") == _written_until(visit, before):
        return _moment(before.valid_until_us)
    return until(visit)
