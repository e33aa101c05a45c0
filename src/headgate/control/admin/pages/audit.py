"""Who did what, and who may: the audit, and the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.control.admin.pages.forms import Entered
from headgate.control.admin.pages.overrides import readdressed
from headgate.control.admin.tokens import DEFAULT_DAYS
from headgate.control.service import ROLES
from headgate.control.service.errors import NotAllowed
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.admin.tokens import Made

__all__ = ["audit", "make_token", "revoke_token", "tokens"]

ROLE_WORDS: Final = {
    "viewer": "View everything except tokens",
    "support": "Also add overrides, reset counters, assign tiers and block single clients",
    "operator": "Also block networks, change tiers, routes and the policy, and roll back",
    "admin": "Also manage tokens",
}


def audit(visit: Visit) -> Response:
    if (elsewhere := readdressed(visit)) is not None:
        return elsewhere
    search, author, before = (visit.query.get(name, "") for name in ("search", "author", "before"))
    found = visit.service.audit.list(before=before or None, author=author or None, search=search)
    return visit.page("audit.html", here="/audit", found=found, search=search, author=author, after=before)


def tokens(visit: Visit) -> Response:
    _only_admins(visit)
    return _tokens(visit)


def make_token(visit: Visit) -> Response:
    """The page that shows it: the token is kept nowhere, so that it cannot be shown after a redirect."""
    _only_admins(visit)
    name, role, days = (visit.form.get(field, "") for field in ("name", "role", "days"))
    entered = Entered("token", visit.form)
    if not name:
        return _tokens(visit, entered._replace(errors={"name": "Enter a name."}))
    if not (days.isascii() and days.isdigit()):
        return _tokens(visit, entered._replace(errors={"days": "Enter a number of days, for example 90."}))
    try:
        made = visit.frame.tokens.make(name, role, by=visit.actor.name, days=int(days[:6]))  # type: ignore[arg-type] # checked there
    except InvalidInput as error:
        return _tokens(visit, entered._replace(problems=(f"{error}",)))
    visit.service.audit.record(visit.actor, "made token", f"{made.token.name} ({made.token.role}, {made.token.id})")
    return _tokens(visit, made=made)


def revoke_token(visit: Visit) -> Response:
    """Ask first: a revoked token can't be brought back."""
    _only_admins(visit)
    if "again" in visit.form:
        return _tokens(visit)
    found = next((each for each in visit.frame.tokens.list() if each.id == visit.request.path_params["id"]), None)
    if found is not None and "sure" not in visit.form:
        return visit.page("revoke.html", here="/tokens", token=found, is_mine=found.id == visit.session.token.id)
    token = visit.frame.tokens.revoke(visit.request.path_params["id"], by=visit.actor.name)
    visit.service.audit.record(visit.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
    return visit.go("/tokens", f"Token of {token.name} revoked. All of its sessions have ended.")


def _tokens(visit: Visit, entered: Entered | None = None, *, made: Made | None = None) -> Response:
    return visit.page(
        "tokens.html",
        status=entered.status if entered else 200,
        here="/tokens",
        tokens=visit.frame.tokens.list(),
        mine=visit.session.token.id,
        roles=ROLES,
        role_words=ROLE_WORDS,
        days=DEFAULT_DAYS,
        made=made,
        entered=entered,
    )


def _only_admins(visit: Visit) -> None:
    if not visit.actor.may("admin"):
        raise NotAllowed("manage tokens", role=visit.actor.role, needed="admin")
