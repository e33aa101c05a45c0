"""Access control: tokens with the role "check", and client certificates.

A client that can send requests to the server can use up the limits of others. So operations that charge limits need a
token or a client certificate wherever they can be reached from other machines.
"""

from __future__ import annotations

import asyncio
import re
from hmac import compare_digest
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from headgate import Limit, Limiter
from headgate.control.admin.tokens import Tokens, digest
from headgate.control.config import ConfigUnavailable
from headgate.control.service.models import CHECK_ROLE
from headgate.server.forwarded import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.adapters.asgi import App, Receive, Scope, Send

__all__ = ["CERTIFICATE", "AccessControl", "AccessDenied", "TokenVerifier", "bearer_token"]

CERTIFICATE: Final = "headgate.certificate"
"""The key of the scope that is true if the client showed a certificate of the authority."""

PROTECTED: Final = ("/v1", "/auth", "/json")
"""Paths that charge limits, with those below them."""

VALIDITY_S: Final = 5.0
"""Time after which a token is verified again; a revoked one is accepted at most so long."""
OUTAGE_VALIDITY_S: Final = 300.0
"""Time for which a verified token stays valid while the config store cannot be read."""
MAX_CACHED_TOKENS: Final = 10_000
MAX_LOOKUPS: Final = 4
"""Reads of the config store at the same time."""
MAX_WAITING: Final = 100
"""Requests that wait for these reads; further ones are rejected."""
FAILED_TOKENS: Final = Limit.parse("30/minute", name="failed-tokens")
"""Limit on tokens of one address that are not valid; beyond it, unknown tokens are rejected without a lookup."""
MAX_ADDRESSES: Final = 100_000

_TOKEN: Final = re.compile(r"hg_([0-9a-z]{10})_[A-Za-z0-9]{43}")


class AccessDenied(Exception):
    """A request without access: the HTTP status, and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Verified(NamedTuple):
    digest: bytes
    at_s: float
    expires_us: int


class TokenVerifier:
    """Verifies tokens with the role "check". Verified ones are cached, so that most requests read no database."""

    def __init__(self, tokens: Tokens, *, time: Callable[[], float] = monotonic) -> None:
        self._tokens = tokens
        self._time = time
        self._verified: dict[str, _Verified] = {}
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._pending: dict[bytes, asyncio.Task[None]] = {}
        self._failures = Limiter("memory://", max_keys=MAX_ADDRESSES)

    async def verify(self, text: str | None, peer: str | None) -> None:
        """Raise AccessDenied unless `text` is a valid token; `peer` is the address of the client."""
        match = _TOKEN.fullmatch(text or "")
        if text is None or match is None:
            raise AccessDenied(401, 'send a token with the role "check": Authorization: Bearer hg_...')
        id, hashed = match[1], digest(text)
        known = self._verified.get(id)
        is_known = known is not None and compare_digest(known.digest, hashed)
        if is_known and known is not None and self._is_fresh(known, VALIDITY_S):
            return
        failures = FAILED_TOKENS.by(peer or "")
        # A token that was valid before is verified again whatever else comes from its address.
        if not is_known and not self._failures.peek(failures).remaining:
            raise AccessDenied(429, "too many invalid tokens from this address; wait a minute")
        await self._look_up(id, text, hashed)
        known = self._verified.get(id)
        if known is None or not compare_digest(known.digest, hashed) or not self._is_fresh(known, OUTAGE_VALIDITY_S):
            self._failures.check(failures)
            raise AccessDenied(401, 'this token is mistyped, expired, revoked, or has another role than "check"')

    async def _look_up(self, id: str, text: str, hashed: bytes) -> None:
        """Verify a token in the config store, once for all requests that bring it at the same time."""
        task = self._pending.get(hashed)
        if task is None:
            if len(self._pending) >= MAX_WAITING:
                raise AccessDenied(503, "too many unknown tokens are being verified")
            task = self._pending[hashed] = asyncio.create_task(self._read(id, text, hashed))
            task.add_done_callback(lambda _: self._pending.pop(hashed, None))
        await asyncio.shield(task)

    async def _read(self, id: str, text: str, hashed: bytes) -> None:
        begun_s = self._time()
        known = self._verified.get(id)
        try:
            async with self._lookups:
                token = await asyncio.to_thread(self._tokens.check, text, roles=(CHECK_ROLE,))
        except ConfigUnavailable:
            if known is None or not compare_digest(known.digest, hashed):
                raise AccessDenied(503, "the config store with the tokens cannot be read") from None
            return
        if token is not None:
            if len(self._verified) >= MAX_CACHED_TOKENS:
                self._verified.clear()
            self._verified[id] = _Verified(hashed, begun_s, token.expires_us)
        elif known is not None and compare_digest(known.digest, hashed):
            del self._verified[id]

    def _is_fresh(self, known: _Verified, validity_s: float) -> bool:
        return self._time() - known.at_s < validity_s and self._tokens.clock.now_us() < known.expires_us


def bearer_token(value: str | None) -> str | None:
    """The token of an Authorization header; None if it has another form."""
    if value is None or value[:7].lower() != "bearer ":
        return None
    return value[7:].strip()


class AccessControl:
    """ASGI middleware that admits requests to paths which charge limits with a token or a client certificate."""

    def __init__(self, app: App, verifier: TokenVerifier | None = None) -> None:
        """Without a verifier, only client certificates count."""
        self._app = app
        self._verifier = verifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(tuple(f"{path}/" for path in PROTECTED)):
            try:
                await self._check(scope)
            except AccessDenied as error:
                headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
                name = {401: "unauthorized", 429: "too_many_failures"}.get(error.status, "unavailable")
                answer = JSONResponse({"error": name, "message": str(error)}, error.status, headers)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        if scope.get(CERTIFICATE):
            return
        if self._verifier is None:
            raise AccessDenied(401, "this server needs a client certificate of its --client-ca")
        headers = Headers(scope=scope)
        text = headers.get(TOKEN_HEADER) or bearer_token(headers.get("authorization"))
        await self._verifier.verify(text, (scope.get("client") or (None,))[0])
