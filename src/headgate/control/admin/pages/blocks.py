"""Blocking clients, after a confirmation that shows what the block matches, and removing blocks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headgate.control.admin.pages import filters
from headgate.control.admin.pages.forms import FieldError, Submission, change_context, reason, submit, until, until_us
from headgate.control.admin.pages.lists import client_from, show_list
from headgate.control.admin.problems import of_error
from headgate.control.service import ClientRef, NotFound
from headgate.control.service.redaction import MIN_SECRET_LENGTH, looks_secret, may_be_key
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.service import Change

__all__ = ["add_block", "new_block", "remove_block"]


def new_block(visit: Visit) -> Response:
    """The confirmation for a client that another page links to, with fields for end and reason."""
    visit.actor.require("support", "block clients")
    who = client_from(visit.query)
    found = visit.service.clients.candidates(f"{who.kind}={who.value}")
    hidden = [("client", f"{who.kind}={who.value}"), ("based_on", "")]
    return _confirm(visit, found, hidden, asks=True, suggested=_suggested_reason(visit, who))


def add_block(visit: Visit) -> Response:
    """Block a client, after a preview of what the block matches."""
    typed = visit.form.get("client", "")
    _hide_key(visit, typed)
    if "again" in visit.form:
        return show_list(visit, Submission("block", visit.form, status=200))
    try:
        return _block_target(visit) if visit.form.get("target") else _preview(visit, typed)
    except FieldError as error:
        return show_list(visit, Submission("block", visit.form, {error.field: f"{error}"}))


def remove_block(visit: Visit) -> Response:
    def change() -> Change:
        return visit.service.blocks.remove(change_context(visit), visit.id)

    question, done = "Remove this block?", "Block removed."
    form = f"remove-{visit.id}"
    return submit(visit, form, change, question=question, done=done, redirect="/blocks", page=show_list)


def _preview(visit: Visit, typed: str) -> Response:
    """The confirmation: the client, the requests that the block matches, and its end."""
    if not typed:
        raise FieldError("client", "Enter an IP address, a network, an API key or the name of a client.")
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
        "/blocks",
        found=found,
        name=found[0].label or _uncapitalize(found[0].title),
        risks=visit.service.blocks.risks(found[0].who) if len(found) == 1 else [],
        until_us=until_us,
        asks=asks,
        suggested=suggested,
        hidden_fields=hidden,
    )


def _block_target(visit: Visit) -> Response:
    kind, _, value = visit.form["target"].partition("=")
    who = ClientRef(kind, value)

    def change() -> Change:
        return visit.service.blocks.add(change_context(visit), who, valid_until=until(visit))

    texts: Any = {"question": "Block {name}?", "done": "{Name} is blocked{until}."}
    return submit(visit, "block", change, **texts, who=who, redirect="/blocks", page=show_list)


def _uncapitalize(text: str) -> str:
    """The text for the middle of a sentence; abbreviations like "API" stay as they are."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _suggested_reason(visit: Visit, who: ClientRef) -> str:
    """A reason from the overview's list of denied clients, so that it need not be typed in a hurry."""
    denied = next((each.denied for each in visit.service.fleet.overview().top_denied if each.key == who.value), None)
    return "" if denied is None else f"{filters.count(denied, 'request')} denied in the last minute"


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
