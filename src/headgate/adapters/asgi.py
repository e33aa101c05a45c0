"""ASGI middleware: Starlette, FastAPI, Litestar, Quart and other apps. Streaming and lifespan are passed through."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from headgate.errors import InvalidInput
from headgate.gate.admission import UNLIMITED, current_admission, enter_context, leave_context
from headgate.gate.base import check_options
from headgate.gate.gate import AsyncGate
from headgate.gate.mounts import asgi_routes, find_root_path, split_mount
from headgate.leases import keep_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from os import PathLike

    from headgate.gate.admission import Admission
    from headgate.gate.base import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import Policy

    Scope: TypeAlias = MutableMapping[str, Any]
    Message: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = [
    "AsgiRequest",
    "HeaderSend",
    "HeadgateMiddleware",
    "finish_shielded",
    "refuse",
    "run_lifespan",
    "signed_in_user",
]

RESPONSE_STARTS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The messages that contain the header fields of a response."""

BODIES: Final = frozenset({"http.response.body", "websocket.http.response.body"})
TRY_AGAIN_LATER: Final = 1013  # WebSocket close code, for servers that cannot reject the handshake with a status

_encoded = lru_cache(maxsize=64)(str.encode)


class AsgiRequest:
    """An HTTP request or a WebSocket handshake. `native` is its scope."""

    __slots__ = ("method", "mounted_path", "native", "path", "peer")

    def __init__(self, scope: Scope, root_path: str = "") -> None:
        self.native = scope
        self.method: str = scope.get("method", "GET")
        self.path: str = scope["path"]
        self.mounted_path: str | None = None
        root_path = root_path or scope.get("root_path", "")
        if root_path or self.path[:1] != "/":
            self.path, self.mounted_path = split_mount(self.path, root_path)
        client = scope.get("client")
        self.peer: str | None = client[0] if client else None

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header, given its name in lower case."""
        wanted, values = _encoded(name), []
        for key, value in self.native["headers"]:
            if key == wanted:
                values.append(value.decode("latin-1"))
        return values


class HeadgateMiddleware:
    """Applies a policy to an ASGI app. Make it the outermost middleware that may refuse requests.

    `policy` is a file path or a `Policy`; `store` and all other options are those of `AsyncGate`. The signed-in user
    (`scope["user"]`, set by a middleware further out) is the identity `user`, unless `identities` has a function for
    it.

    Starlette creates middleware when the app is first called, and servers take an exception there for an app without a
    lifespan. So in a running event loop, a configuration error is raised by the lifespan's startup and by each request.
    """

    def __init__(
        self,
        app: App,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: AsyncGate | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        self.app = app
        self._root_path = find_root_path(app)
        try:
            check_options(type(self).__name__, options)
            if gate is None:
                options["identities"] = {"user": signed_in_user, **(options.get("identities") or {})}
                gate = AsyncGate(policy, store, **options)
        except InvalidInput as error:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                raise error from None
            gate = FailedGate(error)
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            return await run_lifespan(self.app, scope, receive, send, self.gate)
        if kind not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        gate = self.gate
        admission = await gate.admit(AsgiRequest(scope, self._root_path))
        if admission.refusal is not None:
            return await refuse(admission.refusal, scope, receive, send)
        if admission is UNLIMITED:
            return await self.app(scope, receive, send)
        if admission.needs_finish:
            return await HeaderSend(send, admission, partial(gate.finish, admission)).serve(self.app, scope, receive)
        header_send = HeaderSend(send, admission)
        try:
            return await self.app(scope, receive, header_send)
        finally:
            header_send.leave()


class FailedGate(AsyncGate):
    """Stands in for a gate that could not be created, and reports the error at startup and for each request."""

    def __init__(self, error: InvalidInput) -> None:
        self.error = error

    async def admit(self, request: Any, policy: Any = None) -> Admission:
        raise self.error.with_traceback(None)


class HeaderSend:
    """The `send` of an admitted request: adds header fields, and calls `finish` once the response was sent.

    The admission is the current one while the app runs, but not while the end of the response is sent: servers start
    the keep-alive timer then, which would retain the context, and with it the admission, for each connection.
    """

    __slots__ = ("_admission", "_finish", "_headers", "_send", "_status", "_token")

    def __init__(
        self,
        send: Send,
        admission: Admission,
        finish: Callable[[int], Awaitable[None]] | None = None,
        headers: Callable[[], list[Header]] | None = None,
    ) -> None:
        self._send = send
        self._finish = finish
        self._status = 500
        self._token = enter_context(admission)
        self._admission = admission
        self._headers = headers

    async def serve(self, app: App, scope: Scope, receive: Receive) -> None:
        """Call the app. Background tasks, which run after the response, do not delay `finish`."""
        try:
            await app(scope, receive, self)
        finally:
            self.leave()  # servers may serve the next request of a connection in the same task
            if self._finish is not None:
                await self._finish_once()

    def __call__(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind in RESPONSE_STARTS:
            self._status = message.get("status", 101)
            headers = self._admission.headers if self._headers is None else self._headers()
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        elif kind == "websocket.close" and self._status == 500:  # never accepted
            self._status = 403
        if kind in BODIES and not message.get("more_body", False):
            return self._send_last(message)
        return self._send(message)

    def leave(self) -> None:
        """Restore the admission that was current before."""
        leave_context(self._token)

    async def _send_last(self, message: Message) -> None:
        admission = current_admission()
        self.leave()
        try:
            await self._send(message)
        finally:
            self._token = enter_context(admission)
        if self._finish is not None:
            await self._finish_once()

    async def _finish_once(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            await finish_shielded(finish(self._status))


async def run_lifespan(app: App, scope: Scope, receive: Receive, send: Send, gate: AsyncGate) -> None:
    """Run the app's lifespan, or a minimal one for an app without, and close the gate at shutdown."""
    if isinstance(gate, FailedGate):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": f"headgate: {gate.error}"})
        return
    has_lifespan = False
    gate.preconnect()
    gate.warn_of_mounts(asgi_routes(app))

    async def observed_receive() -> Message:
        nonlocal has_lifespan
        has_lifespan = True
        return await receive()

    async def closing_send(message: Message) -> None:
        if message["type"].startswith("lifespan.shutdown."):  # the server may stop the event loop after it
            await gate.close()
        await send(message)

    try:
        await app(scope, observed_receive, closing_send)
    except Exception:
        if has_lifespan:
            raise
    if not has_lifespan:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await closing_send({"type": "lifespan.shutdown.complete"})


def signed_in_user(request: Any) -> str | None:
    """The user that an authentication middleware has set, by Starlette's conventions."""
    user = request.native.get("user")
    if not getattr(user, "is_authenticated", False):
        return None
    for name in ("identity", "username", "display_name"):
        with suppress(NotImplementedError):
            value = getattr(user, name, None)
            if value:
                return str(value)
    return None


async def refuse(refusal: Rejection, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a refusal; to a WebSocket only a close code, if the server cannot send a response."""
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    if kind == "websocket.http.response" and kind not in (scope.get("extensions") or ()):
        await receive()  # the handshake; the client sees its rejection as 403
        return await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
    body = b"" if scope.get("method") == "HEAD" else refusal.body
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": refusal.headers})
    return await send({"type": f"{kind}.body", "body": body})


async def finish_shielded(finishing: Any) -> None:
    """Await it even if the client disconnects and this task is cancelled, so that no lease stays taken."""
    await asyncio.shield(keep_task(asyncio.ensure_future(finishing)))
