"""Signing in and out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.responses import HTMLResponse, RedirectResponse, Response

from headgate.control.admin.middleware import FAILED_SIGN_INS
from headgate.control.admin.pages.base import local_path
from headgate.control.admin.problems import too_many_failures
from headgate.control.admin.sessions import FormRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

    from headgate.control.admin.pages.base import PageRenderer
    from headgate.control.admin.tokens import Token

__all__ = ["routes"]

INTRODUCTION: Final = "Monitor and manage the rate limits of your API."
MAX_TOKEN_LENGTH: Final = 200


def routes(renderer: PageRenderer) -> Iterator[tuple[str, list[str], Callable[[Request], Response]]]:
    """Routes that do not require a session."""
    for path, method, handler in (
        ("/login", "GET", login),
        ("/login", "POST", sign_in),
        ("/enter", "GET", enter),
        ("/logout", "POST", sign_out),
    ):
        yield path, [method], renderer.public_endpoint(partial(handler, renderer))


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
