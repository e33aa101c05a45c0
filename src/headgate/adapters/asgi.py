"""ASGI: Starlette, FastAPI, Litestar, Quart and every other app. Streams, background tasks and lifespan are untouched."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.adapters.gate import AsyncGate
from headgate.adapters.way import FREE, enter_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from os import PathLike

    from headgate.adapters.answers import Refusal
    from headgate.adapters.way import Admission
    from headgate.policy.model import Policy

    Scope: TypeAlias = MutableMapping[str, Any]
    Message: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["AsgiArrival", "HeadgateMiddleware", "signed_in_user"]

_encoded = lru_cache(maxsize=64)(str.encode)

ANSWERS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The messages that begin an answer, and carry its header fields."""

TRY_AGAIN_LATER: Final = 1013
"""The close code of a websocket whose server cannot say 429."""


class AsgiArrival:
    """A request, or the handshake of a websocket. `native` is its scope."""

    __slots__ = ("method", "native", "path", "peer")

    def __init__(self, scope: Scope) -> None:
        self.native = scope
        self.method: str = scope.get("method", "GET")
        self.path: str = scope["path"]
        client = scope.get("client")
        self.peer: str | None = client[0] if client else None

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header; the name in lower case."""
        wanted = _encoded(name)
        return [value.decode("latin-1") for key, value in self.native["headers"] if key == wanted]


class HeadgateMiddleware:
    """Puts a policy in front of an ASGI app. Make it the outermost middleware that may refuse.

    `policy` is a file, or a `Policy`; `store` and all other options are those of `AsyncGate`. Users who have signed in
    (`scope["user"]`, where a middleware further out has set it) are the identity `user`, unless a function for `user`
    is given.
    """

    def __init__(
        self,
        app: App,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: AsyncGate | None = None,
        **options: Any,
    ) -> None:
        self.app = app
        if gate is None:
            if policy is None:
                raise TypeError("give a policy (a file's path, or a Policy), or a gate")
            options["identities"] = {"user": signed_in_user, **(options.get("identities") or {})}
            gate = AsyncGate(policy, store, **options)
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            return await self._lifespan(scope, receive, send)
        if kind not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        admission = await self.gate.admit(AsgiArrival(scope))
        if admission.refusal is not None:
            return await _refuse(admission.refusal, scope, receive, send)
        if admission is FREE:
            return await self.app(scope, receive, send)
        status = 500

        def send_with_headers(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] in ANSWERS:
                status = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), *admission.headers]
            return send(message)

        enter_context(admission)
        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            if not admission.is_over:
                await _whatever_happens(self.gate.finish(admission, status))
        return None

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "lifespan.startup.complete"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            if has_started:  # apps without a lifespan fail here at once, and serve nevertheless
                await self.gate.close()


def signed_in_user(arrival: Any) -> str | None:
    """Whoever a middleware for authentication has found out, by the conventions of Starlette."""
    user = arrival.native.get("user")
    if not getattr(user, "is_authenticated", False):
        return None
    for name in ("identity", "username", "display_name"):
        with suppress(NotImplementedError):
            value = getattr(user, name, None)
            if value:
                return str(value)
    return None


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    if kind == "websocket.http.response" and kind not in (scope.get("extensions") or ()):
        await receive()  # a server without the extension can only close, which its client sees as a 403
        return await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
    body = b"" if scope.get("method") == "HEAD" else refusal.body
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": refusal.headers})
    return await send({"type": f"{kind}.body", "body": body})


_unfinished: set[asyncio.Future[None]] = set()


async def _whatever_happens(work: Any) -> None:
    """Finish it, even if the client has gone and this task is cancelled: nothing that was held may stay held."""
    task = asyncio.ensure_future(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)
