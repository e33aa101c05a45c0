"""Browser sessions: cookies after a sign-in, and CSRF protection of forms."""

from __future__ import annotations

import secrets
from contextlib import suppress
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import delete, insert, select

from headgate.control.admin.tables import SESSIONS
from headgate.control.admin.tokens import digest
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from headgate.control.admin.tokens import Token, Tokens
    from headgate.control.service.models import Actor

__all__ = ["CSRF_FIELD", "FormRefused", "Session", "Sessions"]

LIFETIME_US: Final = 12 * 3_600_000_000
CSRF_FIELD: Final = "csrf"
"""The form field with the CSRF token."""


class FormRefused(HeadgateError):
    """A form that was not sent by a page of this session."""


class Session(NamedTuple):
    """The session of a signed-in person."""

    actor: Actor
    csrf: str
    token: Token
    expires_us: int

    def __repr__(self) -> str:
        return f"Session({self.actor!r})"


class Sessions:
    """Begins, finds and ends sessions. It blocks on the database: call it from a thread, not from an event loop."""

    def __init__(self, tokens: Tokens, *, secure: bool = False) -> None:
        """`secure` is true if browsers reach the server by HTTPS only, so that the cookie is never sent unencrypted."""
        self._tokens = tokens
        self.cookie_options: Final[dict[str, Any]] = {"secure": secure, "httponly": True, "samesite": "strict"}
        # Browsers accept a __Host- cookie only from this host, by HTTPS, and for all paths.
        self._cookie = "__Host-headgate" if secure else "headgate"

    def begin(self, token: Token, response: Response) -> Session:
        """Begin a session with a token, and set its cookie on the response."""
        now_us = self._tokens.clock.now_us()
        cookie, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        expires_us = min(now_us + LIFETIME_US, token.expires_us)
        row = {"hash": digest(cookie), "token_id": token.id, "csrf": csrf, "made_us": now_us, "expires_us": expires_us}
        with write_transaction(self._tokens.engine) as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.expires_us <= now_us))
            connection.execute(insert(SESSIONS).values(row))
        self._tokens.changes += 1
        response.set_cookie(self._cookie, cookie, max_age=(expires_us - now_us) // 1_000_000, **self.cookie_options)
        return Session(token.actor, csrf, token, expires_us)

    def find(self, request: Request) -> Session | None:
        """The session of a request; None if there is none, or if it has expired."""
        cookie = request.cookies.get(self._cookie)
        if cookie is None:
            return None
        with read_transaction(self._tokens.engine) as connection:
            row = connection.execute(select(SESSIONS).where(SESSIONS.c.hash == digest(cookie))).one_or_none()
        if row is None or row.expires_us <= self._tokens.clock.now_us():
            return None
        token = self._tokens.by_id(row.token_id)  # None for a revoked token
        return None if token is None else Session(token.actor, row.csrf, token, row.expires_us)

    def end(self, request: Request, response: Response) -> None:
        """Sign out: end the session on the server, so that copies of the cookie are invalid."""
        cookie = request.cookies.get(self._cookie)
        if cookie is not None:
            with write_transaction(self._tokens.engine) as connection:
                connection.execute(delete(SESSIONS).where(SESSIONS.c.hash == digest(cookie)))
        response.delete_cookie(self._cookie, **self.cookie_options)

    def check_form(self, request: Request, form: Mapping[str, object]) -> Session:
        """The session of a form; raise FormRefused if the form was not sent by a page of this session."""
        self.check_origin(request)
        session = self.find(request)
        if session is None:
            raise FormRefused("you have been signed out; sign in, and submit the form again")
        sent = form.get(CSRF_FIELD)
        if not isinstance(sent, str) or not compare_digest(sent.encode(), session.csrf.encode()):
            raise FormRefused("this form belongs to another session; go back, reload the page, and submit it again")
        return session

    def check_origin(self, request: Request) -> None:
        """Raise FormRefused for a cross-site request; also used for /login, which has no session yet."""
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            raise FormRefused("this form was sent by another site")
        # Ports are compared, schemes are not: a proxy that terminates TLS sends HTTP.
        with suppress(ValueError):  # of an origin that is not a URL
            if origin is None or urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower():
                return
        raise FormRefused("this form was sent by another site")
