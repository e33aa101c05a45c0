"""ASGI middleware: Starlette, FastAPI, Litestar, Quart and other apps. Streaming and lifespan are passed through."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from headgate.errors import InvalidInput, Overloaded
from headgate.gate.admission import UNLIMITED, current_admission, enter_context, leave_context
from headgate.gate.gate import AsyncGate
from headgate.gate.mounts import asgi_routes, find_root_path, split_mount
from headgate.gate.options import check_options
from headgate.leases import keep_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from os import PathLike

    from headgate.gate.admission import Admission
    from headgate.gate.messages import MessageMeter, MessageVerdict
    from headgate.gate.options import GateOptions
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

logger = logging.getLogger("headgate")

RESPONSE_STARTS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The messages that contain the header fields of a response."""

BODIES: Final = frozenset({"http.response.body", "websocket.http.response.body"})
METERED: Final = frozenset({"websocket.send", "http.response.body"})
"""The messages from the app that limits on messages count."""
EMPTY_LINES: Final = re.compile(rb"\n{2,}")
POLICY_VIOLATION: Final = 1008
MAX_REASON_BYTES: Final = 123
"""Of the reason in a WebSocket close frame."""
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
        try:
            if admission is UNLIMITED:
                return await self.app(scope, receive, send)
            if admission.needs_finish and not admission.is_only_observed:
                meter = gate.message_meter(admission)
                app = self.app if meter is None else partial(serve_metered, self.app, gate, meter)
                return await HeaderSend(send, admission, partial(gate.finish, admission)).serve(app, scope, receive)
            header_send = HeaderSend(send, admission)
            try:
                return await self.app(scope, receive, header_send)
            finally:
                header_send.leave()
                if admission.is_only_observed:
                    gate.observe_response(admission, header_send.status)
        except Overloaded as error:
            try:
                return await refuse(gate.overloaded(error), scope, receive, send)
            except Exception:  # the response had begun
                raise error from None


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

    __slots__ = ("_admission", "_finish", "_headers", "_send", "_token", "status")

    def __init__(
        self,
        send: Send,
        admission: Admission,
        finish: Callable[[int], Awaitable[None]] | None = None,
        headers: Callable[[], list[Header]] | None = None,
    ) -> None:
        self._send = send
        self._finish = finish
        self.status = 500
        """The status of the response; 500 until it begins."""
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
            self.status = message.get("status", 101)
            headers = self._admission.headers if self._headers is None else self._headers()
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        elif kind == "websocket.close" and self.status == 500:  # never accepted
            self.status = 403
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
            await finish_shielded(finish(self.status))


async def serve_metered(
    app: App, gate: AsyncGate, meter: MessageMeter, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call the app on a connection whose messages are limited."""
    connection = MeteredConnection(gate, meter, receive, send)
    try:
        await app(scope, connection.receive, connection.send)
    except Exception as error:
        if not connection.is_closed:
            raise
        logger.debug("the app has ended with %r after its connection was closed", error)


class MeteredConnection:
    """The `receive` and `send` of a connection whose messages or bytes are limited.

    A message that has to wait is not passed on, and the next one is not read meanwhile, so that the server's and the
    kernel's buffers fill and the other side waits, too.
    """

    def __init__(self, gate: AsyncGate, meter: MessageMeter, receive: Receive, send: Send) -> None:
        self._charge = partial(gate.charge_messages, meter)
        self._receive = receive
        self._send = send
        self._sending = asyncio.Lock()
        """Keeps messages in order that several tasks send."""
        self._events: EventCounter | None = None
        """Counts the events of a response that is an event stream."""
        self._closed: Message | None = None
        """The message that the app receives after the connection was closed."""

    @property
    def is_closed(self) -> bool:
        """True after a limit has closed the connection."""
        return self._closed is not None

    async def receive(self) -> Message:
        while self._closed is None:
            message = await self._receive()
            kind = message["type"]
            if kind == "websocket.receive":
                verdict = await self._charge("received", 1, _websocket_size(message))
            elif kind == "http.request":
                verdict = await self._charge("received", 0, len(message.get("body", b"")), can_end=False)
            else:
                return message
            if verdict.action == "pass":
                return message
            if verdict.action == "close":
                await self._close(verdict, kind)
        return self._closed

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and _is_event_stream(message):
            self._events = EventCounter()
        if kind not in METERED:
            await self._send(message)
            return
        async with self._sending:
            if self._closed is not None:
                raise ConnectionClosed("the connection was closed because a limit on its messages was reached")
            if kind == "websocket.send":
                verdict = await self._charge("sent", 1, _websocket_size(message))
            else:
                body = message.get("body", b"")
                counter = self._events
                was_between = counter is not None and counter.is_between_events
                events = 0 if counter is None else counter.count(body)
                is_whole = was_between and counter is not None and counter.is_between_events
                can_end = is_whole and message.get("more_body", False)
                verdict = await self._charge("sent", events, len(body), can_end=can_end)
            if verdict.action == "pass":
                await self._send(message)
            if verdict.action == "close":
                await self._close(verdict, kind)
                raise ConnectionClosed(verdict.reason)

    async def _close(self, verdict: MessageVerdict, kind: str) -> None:
        if not kind.startswith("websocket."):
            self._closed = {"type": "http.disconnect"}
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        code = POLICY_VIOLATION if verdict.is_final else TRY_AGAIN_LATER
        reason = verdict.reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        self._closed = {"type": "websocket.disconnect", "code": code, "reason": reason}
        with suppress(OSError, RuntimeError):  # the client may be gone
            await self._send({"type": "websocket.close", "code": code, "reason": reason})


class ConnectionClosed(OSError):
    """Raised by `send` after a limit on messages has closed the connection, as servers do after a disconnect."""


class EventCounter:
    """Counts the events of an event stream: they end with an empty line, wherever the parts of the body do."""

    def __init__(self) -> None:
        self.is_between_events = True
        """True if the stream may end here, or go on with another event."""
        self._ends_line = False

    def count(self, body: bytes) -> int:
        """The number of events that end in this part."""
        text = body.replace(b"\r", b"")
        if self.is_between_events:
            text = text.lstrip(b"\n")
        elif self._ends_line:
            text = b"\n" + text
        if text:
            self.is_between_events, self._ends_line = text.endswith(b"\n\n"), text.endswith(b"\n")
        return len(EMPTY_LINES.findall(text))


def _websocket_size(message: Message) -> int:
    text = message.get("text")
    if text is None:
        return len(message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _is_event_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.partition(b";")[0].strip().lower() == b"text/event-stream"
        for name, value in message.get("headers", ())
    )


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
