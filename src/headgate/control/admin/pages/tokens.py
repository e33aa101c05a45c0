"""The page on which admins create and revoke access tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.control.admin.pages.forms import Submission
from headgate.control.admin.tokens import DEFAULT_DAYS
from headgate.control.service import ROLES
from headgate.control.service.errors import NotAllowed
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.admin.tokens import NewToken

__all__ = ["create_token", "revoke_token", "tokens"]

ROLE_DESCRIPTIONS: Final = {
    "viewer": "View everything except tokens",
    "support": "Also add overrides, reset counters, assign tiers and block single clients",
    "operator": "Also block networks, change tiers, routes and the policy, and roll back",
    "admin": "Also manage tokens",
}


def tokens(visit: Visit) -> Response:
    _require_admin(visit)
    return _page(visit)


def create_token(visit: Visit) -> Response:
    """Create a token and show it. There is no redirect: the token is not stored and could not be shown after it."""
    _require_admin(visit)
    name, role, days = (visit.form.get(field, "") for field in ("name", "role", "days"))
    submission = Submission("token", visit.form)
    if not name:
        return _page(visit, submission._replace(errors={"name": "Enter a name."}))
    if not (days.isascii() and days.isdigit()):
        return _page(visit, submission._replace(errors={"days": "Enter a number of days, for example 90."}))
    try:
        created = visit.renderer.tokens.make(name, role, by=visit.actor.name, days=int(days[:6]))  # type: ignore[arg-type] # checked there
    except InvalidInput as error:
        return _page(visit, submission._replace(problems=(f"{error}",)))
    visit.service.audit.record(
        visit.actor, "made token", f"{created.token.name} ({created.token.role}, {created.token.id})"
    )
    return _page(visit, created=created)


def revoke_token(visit: Visit) -> Response:
    """Revoke a token after a confirmation; this cannot be undone."""
    _require_admin(visit)
    if "again" in visit.form:
        return _page(visit)
    id = visit.request.path_params["id"]
    found = next((each for each in visit.renderer.tokens.list() if each.id == id), None)
    if found is not None and "sure" not in visit.form:
        return visit.page("token_revoke.html", here="/tokens", token=found, is_mine=found.id == visit.session.token.id)
    token = visit.renderer.tokens.revoke(id, by=visit.actor.name)
    visit.service.audit.record(visit.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
    return visit.redirect("/tokens", f"Token of {token.name} revoked. All of its sessions have ended.")


def _page(visit: Visit, submission: Submission | None = None, *, created: NewToken | None = None) -> Response:
    return visit.page(
        "tokens.html",
        here="/tokens",
        tokens=visit.renderer.tokens.list(),
        mine=visit.session.token.id,
        roles=ROLES,
        role_descriptions=ROLE_DESCRIPTIONS,
        days=DEFAULT_DAYS,
        created=created,
        submission=submission,
    )


def _require_admin(visit: Visit) -> None:
    if not visit.actor.may("admin"):
        raise NotAllowed("manage tokens", role=visit.actor.role, needed="admin")
