"""Where people sign in and out."""

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

HELLO: Final = "Monitor and manage the rate limits of your API."
LONGEST: Final = 200


def routes(frame: PageRenderer) -> Iterator[tuple[str, list[str], Callable[[Request], Response]]]:
    """Paths that are open to who has not signed in yet."""
    for path, method, answer in (
        ("/login", "GET", login),
        ("/login", "POST", sign_in),
        ("/enter", "GET", enter),
        ("/logout", "POST", sign_out),
    ):
        yield path, [method], frame.open(partial(answer, frame))


def login(frame: PageRenderer, request: Request) -> Response:
    next = local_path(request.query_params.get("next", "/"))
    if frame.sessions.of(request) is not None:
        return RedirectResponse(next, 303)
    return _door(frame, next=next)


def sign_in(frame: PageRenderer, request: Request) -> Response:
    frame.sessions.check_origin(request)
    form = frame.form(request)
    next = local_path(form.get("next", "/"))
    token = frame.tokens.check(form.get("token", "")[:LONGEST])
    if token is None:
        why = "This token isn't valid. It may be mistyped, expired or revoked."
        return _failed(frame, request, next=next, error=why)
    return _in(frame, token, next, "with the token")


def enter(frame: PageRenderer, request: Request) -> Response:
    """A link that holds once. What looks at links before people do (scanners of mails, previews) would use it up: these
    links are printed in a terminal, and never mailed."""
    token = frame.tokens.redeem(request.query_params.get("code", "")[:LONGEST])
    if token is None:
        text = "This link has already been used or has expired. Sign in with a token."
        return _failed(frame, request, next="/", hello=text)
    return _in(frame, token, "/", "with a link for the token")


def sign_out(frame: PageRenderer, request: Request) -> Response:
    response = RedirectResponse("/login", 303)
    try:
        frame.sessions.check_form(request, frame.form(request))
    except FormRefused:
        if frame.sessions.of(request) is not None:
            raise
    frame.sessions.end(request, response)
    return response


def _in(frame: PageRenderer, token: Token, next: str, how: str) -> Response:
    response = RedirectResponse(next, 303)
    frame.sessions.begin(token, response)
    frame.service.audit.record(token.actor, "signed in", f"{how} {token.name} ({token.role}, {token.id})")
    return response


def _failed(frame: PageRenderer, request: Request, **texts: str) -> Response:
    """Count a failed attempt, and show the form again; after too many from this address, say how long to wait."""
    wait = request.app.state.failures.count(request.scope, FAILED_SIGN_INS)
    if wait is None:
        return _door(frame, **texts, status=401)
    problem = too_many_failures(wait)
    response = _door(frame, next=texts["next"], status=problem.status, error=problem.detail)
    response.headers.update(problem.headers)
    return response


def _door(frame: PageRenderer, *, next: str, status: int = 200, hello: str = HELLO, error: str = "") -> Response:
    return HTMLResponse(frame.render("login.html", next=next, hello=hello, error=error), status)
