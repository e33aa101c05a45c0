"""The blocks page, and the confirmation of a block."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.control.admin.pages import filters
from headgate.control.admin.pages.forms import (
    FieldError,
    Submission,
    capitalize,
    change_context,
    reason,
    submit,
    uncapitalize,
    until,
    until_text,
    until_us,
)
from headgate.control.admin.pages.search import STATES, client_from, list_filter, redirect_without_key
from headgate.control.admin.problems import of_error
from headgate.control.service import ClientRef, NotAllowed, NotFound
from headgate.control.service.redaction import MIN_SECRET_LENGTH, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit

__all__ = ["add_block", "blocks", "new_block", "remove_block"]

NO_CLIENT: Final = "Enter an IP address, a network, an API key or the name of a client."


def blocks(visit: Visit, submission: Submission | None = None) -> Response:
    if (redirect := redirect_without_key(visit)) is not None:
        return redirect
    filter = list_filter(visit)
    found = visit.service.blocks.list(**filter)
    return visit.page("blocks.html", here="/blocks", found=found, submission=submission, states=STATES, **filter)


def new_block(visit: Visit) -> Response:
    """The confirmation for a client that another page links to, with fields for end and reason."""
    if not visit.actor.may("support"):
        raise NotAllowed("block clients", role=visit.actor.role, needed="support")
    who = client_from(visit.query)
    found = visit.service.clients.candidates(f"{who.kind}={who.value}")
    hidden = [("client", f"{who.kind}={who.value}"), ("based_on", "")]
    return _confirm(visit, found, hidden, asks=True, suggested=_suggested_reason(visit, who))


def add_block(visit: Visit) -> Response:
    """Block a client, after a preview of what the block matches."""
    typed = visit.form.get("client", "")
    _hide_key(visit, typed)
    if "again" in visit.form:
        return blocks(visit, Submission("block", visit.form, status=200))
    try:
        return _block_target(visit) if visit.form.get("target") else _preview(visit, typed)
    except FieldError as error:
        return blocks(visit, Submission("block", visit.form, {error.field: f"{error}"}))


def remove_block(visit: Visit) -> Response:
    return submit(
        visit,
        f"remove-{visit.id}",
        lambda: visit.service.blocks.remove(change_context(visit), visit.id),
        question="Remove this block?",
        done="Block removed.",
        redirect="/blocks",
        page=blocks,
    )


def _preview(visit: Visit, typed: str) -> Response:
    """The confirmation: the client, the requests that the block matches, and its end."""
    if not typed:
        raise FieldError("client", NO_CLIENT)
    try:
        found = visit.service.clients.candidates(typed)
        reason(visit)
        hidden = [(name, visit.form.get(name, "")) for name in ("client", "until", "reason", "based_on")]
        return _confirm(visit, found, hidden, until_us=until_us(visit))
    except (InvalidInput, NotFound) as error:
        raise FieldError("client", of_error(error).detail) from None


def _confirm(
    visit: Visit,
    found: Sequence[Any],
    hidden: list[tuple[str, str]],
    *,
    until_us: int | None = None,
    asks: bool = False,
    suggested: str = "",
) -> Response:
    return visit.page(
        "block_confirm.html",
        here="/blocks",
        found=found,
        name=found[0].label or uncapitalize(found[0].title),
        risks=visit.service.blocks.risks(found[0].who) if len(found) == 1 else [],
        until_us=until_us,
        asks=asks,
        suggested=suggested,
        hidden_fields=hidden,
    )


def _block_target(visit: Visit) -> Response:
    kind, _, value = visit.form["target"].partition("=")
    who = ClientRef(kind, value)
    name = visit.name_of(who)
    return submit(
        visit,
        "block",
        lambda: visit.service.blocks.add(change_context(visit), who, valid_until=until(visit)),
        question=f"Block {name}?",
        done=f"{capitalize(name)} is blocked{until_text(visit)}.",
        redirect="/blocks",
        page=blocks,
    )


def _suggested_reason(visit: Visit, who: ClientRef) -> str:
    """A reason from the overview's list of denied clients, so that it need not be typed in a hurry."""
    denied = next((each.denied for each in visit.service.fleet.overview().top_denied if each.key == who.value), None)
    return "" if denied is None else f"{filters.count(denied, 'request', 'requests')} denied in the last minute"


def _hide_key(visit: Visit, typed: str) -> None:
    """Replace a possible API key in the form by its hash, so that no page contains it."""
    if typed:
        with suppress(HeadgateError):
            first = visit.service.clients.candidates(typed)[0].who
            if first.kind == "api_key":
                visit.form.put("client", f"api_key={first.value}")
                return
    if looks_secret(typed) or may_be_key(typed, shortest=MIN_SECRET_LENGTH):
        visit.form.put("client", "")
