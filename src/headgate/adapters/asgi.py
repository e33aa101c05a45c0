"""ASGI: Starlette, FastAPI, Litestar, Quart, every other app. Streams, background tasks and lifespan are untouched."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache, partial
from inspect import currentframe
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from headgate.errors import InvalidInput
from headgate.gate.admission import UNLIMITED, enter_context, leave_context
from headgate.gate.base import check_options
from headgate.gate.gate import AsyncGate
from headgate.gate.mounts import asgi_routes, find_root_path, split_mount

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, MutableMapping
    from os import PathLike
    from types import FrameType

    from headgate.gate.admission import Admission
    from headgate.gate.base import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import Policy

    Scope: TypeAlias = MutableMapping[str, Any]
    Message: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["AsgiRequest", "HeadgateMiddleware", "finish_shielded", "refuse", "run_lifespan", "serve", "signed_in_user"]

_encoded = lru_cache(maxsize=64)(str.encode)

ARRIVALS: Final = frozenset({"http", "websocket"})

ANSWERS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The messages that begin an answer, and carry its header fields."""

BODIES: Final = frozenset({"http.response.body", "websocket.http.response.body"})

TRY_AGAIN_LATER: Final = 1013
"""The close code of a websocket whose server cannot say 429."""


class AsgiRequest:
    """A request, or the handshake of a websocket. `native` is its scope."""

    __slots__ = ("below", "method", "native", "path", "peer")

    def __init__(self, scope: Scope, root: str = "") -> None:
        self.native = scope
        self.method: str = scope.get("method", "GET")
        self.path: str
        self.below: str | None
        self.path, self.below = split_mount(scope["path"], root or scope.get("root_path", ""))
        client = scope.get("client")
        self.peer: str | None = client[0] if client else None

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header; the name in lower case."""
        wanted = _encoded(name)
        return [value.decode("latin-1") for key, value in self.native["headers"] if key == wanted]


class HeaderSend:
    """Sends what the app sends, with the fields of its admission, which is current until `leave`.

    But not while the last of an answer goes out: servers begin to wait for the connection's next request then, with a
    timer that keeps the context as it is at that moment. Admissions would pile up there, one for each connection, and
    have Python's collector run all the time.
    """

    __slots__ = ("_admission", "_send", "_token")

    def __init__(self, send: Send, admission: Admission, /) -> None:
        self._send = send
        self._admission = admission
        self.enter()

    def __call__(self, message: Message, /) -> Awaitable[None]:
        kind = message["type"]
        if kind in ANSWERS:
            message = {**message, "headers": [*message.get("headers", ()), *self._admission.headers]}
        elif kind in BODIES and not message.get("more_body", False):
            return send_last(self, self._send, message)
        return self._send(message)

    def enter(self) -> None:
        self._token = enter_context(self._admission)

    def leave(self) -> None:
        leave_context(self._token)


class _Sent:
    """What to await, or to make a task of, where nothing is left to wait for."""

    __await__: Any = ().__iter__

    def send(self, _: None) -> None:
        raise StopIteration

    def throw(self, kind: Any, error: BaseException | None = None, _: object = None) -> None:
        raise kind if error is None else error

    def close(self) -> None:
        """There is nothing to end."""


def send_last(telling: HeaderSend, send: Send, message: Message) -> Awaitable[None]:
    """Send what may be the last of an answer; what runs after it finds its admission again.

    At once, and not when it is awaited, which every app does: servers seldom have to wait here, and a coroutine around
    theirs would cost each request more than all that it does.
    """
    telling.leave()
    try:
        sending = send(message)
        if not isinstance(sending, CoroutineType):
            return wait_for(telling, sending)
        waited_for = sending.send(None)
    except BaseException as end:
        telling.enter()
        if isinstance(end, StopIteration):
            return SENT
        raise
    return go_on(telling, sending, waited_for)


async def wait_for(telling: HeaderSend, sending: Awaitable[None]) -> None:
    """The same where a server does not send by a coroutine."""
    try:
        await sending
    finally:
        telling.enter()


@coroutine
def go_on(telling: HeaderSend, sending: CoroutineType[Any, Any, None], waited_for: Any) -> Generator[Any, Any, None]:
    """The same where a server has to wait, as it does for clients that read slowly."""
    try:
        while True:
            try:
                answer = yield waited_for
            except BaseException as error:
                waited_for = sending.throw(error)
            else:
                waited_for = sending.send(answer)
    except StopIteration:
        return
    finally:
        telling.enter()


SENT: Final = _Sent()


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
        **options: Unpack[GateOptions],
    ) -> None:
        self.app = app
        self._root = find_root_path(app)
        try:
            check_options(type(self).__name__, options)
            if gate is None:
                options["identities"] = {"user": signed_in_user, **(options.get("identities") or {})}
                gate = AsyncGate(policy, store, **options)
        except InvalidInput as error:
            if not _is_made_by_a_call():
                raise
            gate = _FailedGate(error)
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ARRIVALS:
            if scope["type"] != "lifespan":
                return await self.app(scope, receive, send)
            if isinstance(self.gate, _FailedGate):
                return await self.gate.decline(receive, send)
            return await run_lifespan(self.app, scope, receive, send, self.gate)
        arrival, gate = AsgiRequest(scope, self._root), self.gate
        admission = await gate.admit(arrival)
        return await self._let_in(admission, scope, receive, send)

    async def _let_in(self, admission: Admission, scope: Scope, receive: Receive, send: Send) -> None:
        if admission.refusal is not None:
            return await refuse(admission.refusal, scope, receive, send)
        if admission is UNLIMITED:
            return await self.app(scope, receive, send)
        telling = HeaderSend(send, admission)
        try:
            if not admission.is_over:
                return await serve(self.app, scope, receive, telling, partial(self.gate.finish, admission))
            return await self.app(scope, receive, telling)
        finally:
            telling.leave()  # servers may serve the next request of a connection in the same task


class _FailedGate(AsyncGate):
    """Stands where no gate could be made: the server is told why as it starts, and who comes nevertheless is, too."""

    def __init__(self, error: InvalidInput) -> None:
        self._error = error

    async def decline(self, receive: Receive, send: Send) -> None:
        """Let the server not start."""
        await receive()
        await send({"type": "lifespan.startup.failed", "message": f"headgate: {self._error}"})

    async def admit(self, arrival: Any, rules: Any = None) -> Admission:
        raise self._error.with_traceback(None)


def _is_made_by_a_call() -> bool:
    """Whether an app makes its middleware only when it is first called, as Starlette does: what is raised then looks to
    servers as if the app had no lifespan, so that they start it, and every request fails."""
    frame: FrameType | None = currentframe()
    while frame is not None and not {"scope", "receive", "send"} <= {*frame.f_code.co_varnames}:
        frame = frame.f_back
    return frame is not None


async def serve(
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    finish: Callable[[int], Awaitable[None]],
    headers: Callable[[], list[Header]] | None = None,
) -> None:
    """Run the app, add header fields to its answer, and call `finish` with its status as soon as it is out.

    What runs after the answer, as background tasks do, is no longer held against the client.
    """
    status = 500
    is_finished = False

    async def end() -> None:
        nonlocal is_finished
        if not is_finished:
            is_finished = True
            await finish_shielded(finish(status))

    async def watched_send(message: Message) -> None:
        nonlocal status
        kind = message["type"]
        if kind in ANSWERS:
            status = message.get("status", 101)
            if headers is not None:
                message = {**message, "headers": [*message.get("headers", ()), *headers()]}
        elif kind == "websocket.close" and status == 500:  # it was never accepted
            status = 403
        await send(message)
        if kind in BODIES and not message.get("more_body", False):
            await end()

    try:
        await app(scope, receive, watched_send)
    finally:
        await end()


async def run_lifespan(app: App, scope: Scope, receive: Receive, send: Send, gate: AsyncGate) -> None:
    """Run the app's lifespan, and close the gate at its end; also of an app that has none."""
    is_heard = False
    gate.warm()
    gate.warn_of_mounts(asgi_routes(app))

    async def watched_receive() -> Message:
        nonlocal is_heard
        is_heard = True
        return await receive()

    async def closing_send(message: Message) -> None:
        if message["type"].startswith("lifespan.shutdown."):  # once that is sent, the server may stop the event loop
            await gate.close()
        await send(message)

    try:
        await app(scope, watched_receive, closing_send)
    except Exception:
        if is_heard:
            raise
    if not is_heard:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await closing_send({"type": "lifespan.shutdown.complete"})


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


async def refuse(refusal: Rejection, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a refusal: to a websocket without being able to say why, where the server has no way to."""
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    if kind == "websocket.http.response" and kind not in (scope.get("extensions") or ()):
        await receive()  # a server without the extension can only close, which its client sees as a 403
        return await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
    body = b"" if scope.get("method") == "HEAD" else refusal.body
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": refusal.headers})
    return await send({"type": f"{kind}.body", "body": body})


_unfinished: set[asyncio.Future[None]] = set()


async def finish_shielded(work: Any) -> None:
    """Finish it, even if the client has gone and this task is cancelled: nothing that was held may stay held."""
    task = asyncio.ensure_future(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)
