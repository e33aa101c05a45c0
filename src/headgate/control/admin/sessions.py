"""Sessions of people at their browsers: a cookie after signing in, and what keeps forms safe from other sites."""

from __future__ import annotations

import secrets
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import delete, insert, select

from headgate.control.admin.tables import SESSIONS
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from headgate.control.admin.tokens import Token, Tokens
    from headgate.control.service.models import Actor

__all__ = ["CSRF_FIELD", "FormRefused", "Session", "Sessions"]

LASTS_US: Final = 12 * 3_600_000_000
"""A day at work; then the token is asked for again."""
CSRF_FIELD: Final = "csrf"
"""The name of the field in forms."""


class FormRefused(HeadgateError):
    """A form that did not come from a page of this server, or from one of a session that is over."""


class Session(NamedTuple):
    """Somebody who has signed in."""

    actor: Actor
    csrf: str
    """What every form must carry in its field `csrf`."""
    token: Token
    expires_us: int

    def __repr__(self) -> str:
        return f"Session({self.actor!r})"


class Sessions:
    """Begins, finds and ends sessions. All of it asks the database: call it from a thread, not from an event loop."""

    def __init__(self, tokens: Tokens, *, secure: bool = False) -> None:
        """`secure`: browsers reach the server by HTTPS only, so that the cookie never travels in clear."""
        self._tokens = tokens
        self._secure = secure
        # Browsers take a cookie of the first name only from this very host, by HTTPS, and for all paths.
        self._cookie = "__Host-headgate" if secure else "headgate"

    def begin(self, token: Token, response: Response) -> Session:
        """A session for who holds this token; the response brings its cookie to the browser."""
        now_us = self._tokens.clock.now_us()
        cookie, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        expires_us = min(now_us + LASTS_US, token.expires_us)
        row = {
            "hash": _hashed(cookie),
            "token_id": token.id,
            "csrf": csrf,
            "made_us": now_us,
            "expires_us": expires_us,
        }
        with write_transaction(self._tokens.engine) as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.expires_us <= now_us))
            connection.execute(insert(SESSIONS).values(row))
        self._tokens.changes += 1
        seconds = (expires_us - now_us) // 1_000_000
        response.set_cookie(
            self._cookie, cookie, max_age=seconds, path="/", secure=self._secure, httponly=True, samesite="strict"
        )
        return Session(token.actor, csrf, token, expires_us)

    def of(self, request: Request) -> Session | None:
        """Whose request this is; None for who must sign in, again or for the first time."""
        cookie = request.cookies.get(self._cookie)
        if cookie is None:
            return None
        with read_transaction(self._tokens.engine) as connection:
            row = connection.execute(select(SESSIONS).where(SESSIONS.c.hash == _hashed(cookie))).one_or_none()
        if row is None or row.expires_us <= self._tokens.clock.now_us():
            return None
        token = self._tokens.by_id(row.token_id)  # a token that is revoked ends its sessions
        return None if token is None else Session(token.actor, row.csrf, token, row.expires_us)

    def end(self, request: Request, response: Response) -> None:
        """Sign out: the session is no more, also for who has copied the cookie."""
        cookie = request.cookies.get(self._cookie)
        if cookie is not None:
            with write_transaction(self._tokens.engine) as connection:
                connection.execute(delete(SESSIONS).where(SESSIONS.c.hash == _hashed(cookie)))
        response.delete_cookie(self._cookie, path="/", secure=self._secure, httponly=True, samesite="strict")

    def check_form(self, request: Request, form: Mapping[str, object]) -> Session:
        """Whose form this is; FormRefused, if it is not from a page that this session was shown."""
        self.check_origin(request)
        session = self.of(request)
        if session is None:
            raise FormRefused("you have been signed out; sign in, and send the form again")
        sent = form.get(CSRF_FIELD)
        if not isinstance(sent, str) or not compare_digest(sent.encode(), session.csrf.encode()):
            raise FormRefused("this form is of another session; go back, reload the page, and send it again")
        return session

    def check_origin(self, request: Request) -> None:
        """FormRefused, if the browser says that another site has sent this: for /login, which has no session yet."""
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            raise FormRefused("this form was sent by another site")
        # The port of the Host counts, the scheme does not: a proxy that ends TLS speaks HTTP to this server.
        if origin is not None and _host(origin) != request.headers.get("host", "").lower():
            raise FormRefused("this form was sent by another site")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hashed(cookie: str) -> bytes:
    return sha256(cookie.encode()).digest()
