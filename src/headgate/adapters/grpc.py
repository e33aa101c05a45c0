"""gRPC: interceptors for servers with threads and for asyncio, and all four kinds of RPC.

To a policy, the RPC `/shop.Orders/Create` is a POST to that path, and metadata are header fields. What clients are told
stands in the trailing metadata, which a handler cannot have sent already.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Unpack
from urllib.parse import unquote

import grpc

from headgate.adapters.asgi import finish_shielded
from headgate.errors import InvalidConfiguration
from headgate.gate.admission import enter_context
from headgate.gate.base import check_options
from headgate.gate.gate import AsyncGate, Gate

try:  # which grpcio alone does not bring along
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo  # type: ignore[import-untyped]
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
except ImportError as missing:
    raise ImportError(f"{missing}: refusals need it for their details; pip install 'headgate[grpc]'") from missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
    from os import PathLike
    from typing import TypeAlias

    from google.protobuf.message import Message

    from headgate.gate.admission import Admission
    from headgate.gate.base import GateOptions
    from headgate.gate.responses import Header
    from headgate.policy.model import Policy

    Behavior: TypeAlias = Callable[[Any, Any], Any]
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

__all__ = ["AsyncHeadgateInterceptor", "GrpcRequest", "HeadgateInterceptor"]

CODES: Final = {
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    403: grpc.StatusCode.PERMISSION_DENIED,
}
"""For each status of a refusal."""

REASONS: Final = {429: "RATE_LIMIT_EXCEEDED", 503: "LIMITER_UNAVAILABLE", 403: "BLOCKED"}

HTTP_STATUSES: Final = (200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)
"""What `count_when` sees, for each code of gRPC from OK to UNAUTHENTICATED: as google.rpc.Code maps them."""

CANCELLED: Final = 1
UNKNOWN: Final = 2

TOLD: Final = (b"x-ratelimit-", b"ratelimit", b"retry-after")
"""How the names of fields start that mean something outside of HTTP."""


_closing: set[asyncio.Task[None]] = set()
"""Interceptors that are being closed: event loops keep no reference to tasks."""


class GrpcRequest:
    """An RPC. `native` is its context."""

    __slots__ = ("_metadata", "method", "native", "path", "peer")
    mounted_path = None

    def __init__(self, details: grpc.HandlerCallDetails, context: Any) -> None:
        self.native = context
        self.method = "POST"
        self.path: str = details.method
        self.peer = _address(context.peer())
        self._metadata = details.invocation_metadata or ()

    def header(self, name: str) -> list[str]:
        """The values of all metadata of that name; binary ones are none."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]


class HeadgateInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Puts a policy in front of a server with threads: `grpc.server(pool, interceptors=[HeadgateInterceptor(...)])`.

    `policy` is a file, or a `Policy`; `store` and all other options are those of `Gate`. Call `close` when the server
    has stopped.
    """

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: Gate | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        _check_options(self, options)
        self.gate = gate or Gate(policy, store, **options)

    def close(self) -> None:
        """Close the store, and watch the policy no more."""
        self.gate.close()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        def guarded(behavior: Behavior, streams: bool) -> Behavior:
            def answer(request: Any, context: Any) -> Any:
                with self._admitted(GrpcRequest(handler_call_details, context)):
                    return behavior(request, context)

            def answers(request: Any, context: Any) -> Iterator[Any]:
                with self._admitted(GrpcRequest(handler_call_details, context)):
                    yield from behavior(request, context)

            return answers if streams else answer

        return _rebuilt(continuation(handler_call_details) or _unknown(_not_found), guarded)

    @contextmanager
    def _admitted(self, arrival: GrpcRequest) -> Iterator[None]:
        context = arrival.native
        admission = self.gate.admit(arrival)
        if admission.refusal is not None:
            context.set_trailing_metadata(_refusal_metadata(admission))
            context.abort(CODES[admission.refusal.status], admission.refusal.message)
        enter_context(admission)  # also where nothing is met: the thread has served others before
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            _tell(context, admission)
            if admission.needs_finish:
                self.gate.finish(admission, _status(context, failure))


class AsyncHeadgateInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """The same for asyncio: `grpc.aio.server(interceptors=[AsyncHeadgateInterceptor(...)])`, with async handlers.

    Await `close` when the server has stopped.
    """

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: AsyncGate | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        _check_options(self, options)
        self.gate = gate or AsyncGate(policy, store, **options)

    def close(self) -> Awaitable[None]:
        """Close the store, and stop watching the policy: `await interceptor.close()`.

        It begins at once, also if it is not awaited, and needs the event loop of the server.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidConfiguration(
                "AsyncHeadgateInterceptor.close() needs the event loop of its server: call it as "
                "`await interceptor.close()`, after `await server.stop(...)`"
            ) from None
        closing = loop.create_task(self.gate.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        return closing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        def guarded(behavior: Behavior, streams: bool) -> Behavior:
            async def answer(request: Any, context: Any) -> Any:
                async with self._admitted(GrpcRequest(handler_call_details, context)) as told:
                    return await behavior(request, told)

            async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
                async with (
                    self._admitted(GrpcRequest(handler_call_details, context)) as told,
                    aclosing(behavior(request, told)) as messages,
                ):
                    async for message in messages:
                        yield message

            if isasyncgenfunction(behavior):
                return answers
            if iscoroutinefunction(behavior):  # which may stream, too, by context.write
                return answer
            raise InvalidConfiguration(
                f"the handler of {handler_call_details.method} is a plain function; on an asyncio server behind "
                "AsyncHeadgateInterceptor, write `async def`"
            )

        return _rebuilt(await continuation(handler_call_details) or _unknown(_not_found_async), guarded)

    @asynccontextmanager
    async def _admitted(self, arrival: GrpcRequest) -> AsyncIterator[Any]:
        context = arrival.native
        admission = await self.gate.admit(arrival)
        if admission.refusal is not None:
            context.set_trailing_metadata(_refusal_metadata(admission))
            await context.abort(CODES[admission.refusal.status], admission.refusal.message)
        enter_context(admission)  # each RPC has a task of its own
        failure: BaseException | None = None
        try:
            yield _AdmittedContext(context, admission)
        except BaseException as error:
            failure = error
            raise
        finally:
            _tell(context, admission)
            if admission.needs_finish:
                await finish_shielded(self.gate.finish(admission, _status(context, failure)))


class _AdmittedContext:
    """The context of an RPC on an asyncio server, for its handler: `abort` sends the end at once, so it tells here."""

    def __init__(self, context: Any, admission: Admission) -> None:
        self._context = context
        self._admission = admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        own = trailing_metadata or self._context.trailing_metadata() or ()
        await self._context.abort(code, details, (*own, *_metadata(self._admission.headers)))


def _check_options(interceptor: object, options: GateOptions) -> None:
    check_options(type(interceptor).__name__, options)
    if options.get("health_path") is not None:
        raise InvalidConfiguration("gRPC has no health_path: let its health service tell what gate.health() says")


def _rebuilt(handler: Handler, guarded: Callable[[Behavior, bool], Behavior]) -> Handler:
    """The same handler behind the gate."""
    kind = "_".join(
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )
    behavior = guarded(getattr(handler, kind), handler.response_streaming)
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _unknown(behavior: Behavior) -> Handler:
    """A method that the server does not have: asking for it counts as well."""
    return grpc.unary_unary_rpc_method_handler(behavior)


def _not_found(request: Any, context: Any) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


async def _not_found_async(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def _address(peer: str) -> str | None:
    """The address in "ipv4:203.0.113.9:50051" or "ipv6:%5B2001:db8::1%5D:50051"; None for Unix sockets."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None


def _status(context: Any, failure: BaseException | None) -> int:
    """The status that an answer over HTTP would have had."""
    code = context.code() or 0
    number: int = code if isinstance(code, int) else code.value[0]
    if number == 0 and failure is not None:
        number = CANCELLED if isinstance(failure, GeneratorExit | asyncio.CancelledError) else UNKNOWN
    return HTTP_STATUSES[number] if number < len(HTTP_STATUSES) else 500


def _tell(context: Any, admission: Admission) -> None:
    """Add the fields to what the handler itself has to say at the end."""
    headers = admission.headers
    if headers:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), *_metadata(headers)))


def _metadata(headers: Iterable[Header]) -> Metadata:
    return tuple((name.decode(), value.decode()) for name, value in headers if name.startswith(TOLD))


def _refusal_metadata(admission: Admission) -> Metadata:
    """The fields of a refusal, and its details in the rich error model that clients of all languages can read."""
    refusal, decision = admission.refusal, admission.decision
    assert refusal is not None
    told = dict(refusal.headers)
    details: list[Message] = [ErrorInfo(reason=REASONS[refusal.status], domain="headgate")]
    if b"retry-after" in told:
        details.append(RetryInfo(retry_delay=Duration(seconds=int(told[b"retry-after"]))))
    if refusal.status == 429 and decision is not None:
        violations = [
            QuotaFailure.Violation(subject=f"limit:{name}", description=refusal.message) for name in decision.denied_by
        ]
        details.append(QuotaFailure(violations=violations))
    packed = [AnyMessage() for _ in details]
    for place, detail in zip(packed, details, strict=True):
        place.Pack(detail)
    status = Status(code=CODES[refusal.status].value[0], message=refusal.message, details=packed)
    return (*_metadata(refusal.headers), ("grpc-status-details-bin", status.SerializeToString()))
