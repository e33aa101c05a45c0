"""Access: signing in and out, and the page on which admins create and revoke tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import HTMLResponse, RedirectResponse, Response

from headgate.control.admin.middleware import FAILED_SIGN_INS
from headgate.control.admin.pages.base import local_path
from headgate.control.admin.pages.forms import FieldError, submit
from headgate.control.admin.problems import too_many_failures
from headgate.control.admin.sessions import FormRefused
from headgate.control.admin.tokens import DEFAULT_DAYS
from headgate.control.service.models import TOKEN_ROLES

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.control.admin.pages.base import PageRenderer, Visit
    from headgate.control.admin.pages.forms import Submission
    from headgate.control.admin.tokens import NewToken, Token

__all__ = ["create_token", "enter", "login", "revoke_token", "sign_in", "sign_out", "tokens"]

INTRODUCTION: Final = "Monitor and manage the rate limits of your API."
MAX_TOKEN_LENGTH: Final = 200
ROLE_DESCRIPTIONS: Final = {
    "viewer": "View everything except tokens",
    "support": "Also add overrides, reset counters, assign tiers and block single clients",
    "operator": "Also block networks, change tiers, routes and the policy, and roll back",
    "admin": "Also manage tokens",
    "check": "Only ask headgate serve; no access to this server",
}


def login(renderer: PageRenderer, request: Request) -> Response:
    next = local_path(request.query_params.get("next", "/"))
    if renderer.sessions.find(request) is not None:
        return RedirectResponse(next, 303)
    return _login_page(renderer, next=next)


def sign_in(renderer: PageRenderer, request: Request) -> Response:
    renderer.sessions.check_origin(request)
    form = renderer.form(request)
    next = local_path(form.get("next", "/"))
    token = renderer.tokens.check(form.get("token", "")[:MAX_TOKEN_LENGTH])
    if token is None:
        error = "This token isn't valid. It may be mistyped, expired or revoked."
        return _failed(renderer, request, next=next, error=error)
    return _start_session(renderer, token, next, "with the token")


def enter(renderer: PageRenderer, request: Request) -> Response:
    """Sign in with a one-time link. Links are printed in a terminal and never mailed: scanners would use them up."""
    token = renderer.tokens.redeem(request.query_params.get("code", "")[:MAX_TOKEN_LENGTH])
    if token is None:
        text = "This link has already been used or has expired. Sign in with a token."
        return _failed(renderer, request, next="/", introduction=text)
    return _start_session(renderer, token, "/", "with a link for the token")


def sign_out(renderer: PageRenderer, request: Request) -> Response:
    response = RedirectResponse("/login", 303)
    try:
        renderer.sessions.check_form(request, renderer.form(request))
    except FormRefused:
        if renderer.sessions.find(request) is not None:
            raise
    renderer.sessions.end(request, response)
    return response


def tokens(visit: Visit, submission: Submission | None = None, *, created: NewToken | None = None) -> Response:
    visit.actor.require("admin", "manage tokens")
    return visit.page(
        "tokens.html",
        "/tokens",
        submission=submission,
        tokens=visit.renderer.tokens.list(),
        mine=visit.session.token.id,
        roles=TOKEN_ROLES,
        role_descriptions=ROLE_DESCRIPTIONS,
        days=DEFAULT_DAYS,
        created=created,
    )


def create_token(visit: Visit) -> Response:
    """Create a token and show it. There is no redirect: the token is not stored and could not be shown after it."""
    visit.actor.require("admin", "manage tokens")
    name, role, days = (visit.form.get(field, "") for field in ("name", "role", "days"))

    def change() -> Response:
        if not name:
            raise FieldError("name", "Enter a name.")
        if not (days.isascii() and days.isdigit()):
            raise FieldError("days", "Enter a number of days, for example 90.")
        created = visit.renderer.tokens.make(name, role, by=visit.actor.name, days=int(days[:6]))  # type: ignore[arg-type] # checked there
        token = created.token
        visit.service.audit.record(visit.actor, "made token", f"{token.name} ({token.role}, {token.id})")
        return tokens(visit, created=created)

    return submit(visit, "token", change, page=tokens)


def revoke_token(visit: Visit) -> Response:
    """Revoke a token after a confirmation; this cannot be undone."""
    visit.actor.require("admin", "manage tokens")
    if "again" in visit.form:
        return tokens(visit)
    id = visit.request.path_params["id"]
    found = next((each for each in visit.renderer.tokens.list() if each.id == id), None)
    if found is not None and "sure" not in visit.form:
        return visit.page("token_revoke.html", "/tokens", token=found, is_mine=found.id == visit.session.token.id)
    token = visit.renderer.tokens.revoke(id, by=visit.actor.name)
    visit.service.audit.record(visit.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
    return visit.redirect("/tokens", f"Token of {token.name} revoked. All of its sessions have ended.")


def _start_session(renderer: PageRenderer, token: Token, next: str, how: str) -> Response:
    response = RedirectResponse(next, 303)
    renderer.sessions.begin(token, response)
    renderer.service.audit.record(token.actor, "signed in", f"{how} {token.name} ({token.role}, {token.id})")
    return response


def _failed(renderer: PageRenderer, request: Request, **texts: str) -> Response:
    """Count a failed attempt and show the form again; after too many from an address, with the time to wait."""
    wait = request.app.state.failures.count(request.scope, FAILED_SIGN_INS)
    if wait is None:
        return _login_page(renderer, **texts, status=401)
    problem = too_many_failures(wait)
    response = _login_page(renderer, next=texts["next"], status=problem.status, error=problem.detail)
    response.headers.update(problem.headers)
    return response


def _login_page(
    renderer: PageRenderer, *, next: str, status: int = 200, introduction: str = INTRODUCTION, error: str = ""
) -> Response:
    return HTMLResponse(renderer.render("login.html", next=next, introduction=introduction, error=error), status)
