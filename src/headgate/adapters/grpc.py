"""gRPC server interceptors, for threads and for asyncio, and for all four kinds of RPC.

To a policy, the RPC `/shop.Orders/Create` is a POST to that path, and metadata are header fields. RateLimit fields are
sent as trailing metadata, which a handler cannot have sent before.
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

try:  # not dependencies of grpcio
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo  # type: ignore[import-untyped]
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
except ImportError as missing:
    raise ImportError(f"{missing}: needed for the details of refusals; pip install 'headgate[grpc]'") from missing

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
"""gRPC status codes by the HTTP status of a refusal."""

REASONS: Final = {429: "RATE_LIMIT_EXCEEDED", 503: "LIMITER_UNAVAILABLE", 403: "BLOCKED"}

HTTP_STATUSES: Final = (200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)
"""The status for `count_when`, for each gRPC code from OK to UNAUTHENTICATED, as google.rpc.Code maps them."""

CANCELLED: Final = 1
UNKNOWN: Final = 2

SENT_PREFIXES: Final = (b"x-ratelimit-", b"ratelimit", b"retry-after")
"""Prefixes of the header fields that are sent as metadata."""

_closing: set[asyncio.Task[None]] = set()
"""Strong references to tasks, of which event loops keep only weak ones."""


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
        """The values of all text metadata of that name."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]


class HeadgateInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Applies a policy to a server with threads: `grpc.server(pool, interceptors=[HeadgateInterceptor(...)])`.

    `policy` is a file path or a `Policy`; `store` and all other options are those of `Gate`. Call `close` after the
    server has stopped.
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
        """Close the gate and its store."""
        self.gate.close()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        def guarded(behavior: Behavior, streams: bool) -> Behavior:
            def respond(request: Any, context: Any) -> Any:
                with self._admit(GrpcRequest(handler_call_details, context)):
                    return behavior(request, context)

            def respond_stream(request: Any, context: Any) -> Iterator[Any]:
                with self._admit(GrpcRequest(handler_call_details, context)):
                    yield from behavior(request, context)

            return respond_stream if streams else respond

        return _wrap(continuation(handler_call_details) or _unknown(_not_found), guarded)

    @contextmanager
    def _admit(self, request: GrpcRequest) -> Iterator[None]:
        context = request.native
        admission = self.gate.admit(request)
        if admission.refusal is not None:
            context.set_trailing_metadata(_refusal_metadata(admission))
            context.abort(CODES[admission.refusal.status], admission.refusal.message)
        enter_context(admission)  # also without limits: the thread has served other requests
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            _add_metadata(context, admission)
            if admission.needs_finish:
                self.gate.finish(admission, _status(context, failure))


class AsyncHeadgateInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Applies a policy to an asyncio server: `grpc.aio.server(interceptors=[AsyncHeadgateInterceptor(...)])`.

    Handlers must be asynchronous. Await `close` after the server has stopped.
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
        """Close the gate and its store: `await interceptor.close()`, in the event loop of the server.

        Starts at once, even if it is not awaited.
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
            async def respond(request: Any, context: Any) -> Any:
                async with self._admit(GrpcRequest(handler_call_details, context)) as admitted_context:
                    return await behavior(request, admitted_context)

            async def respond_stream(request: Any, context: Any) -> AsyncIterator[Any]:
                async with (
                    self._admit(GrpcRequest(handler_call_details, context)) as admitted_context,
                    aclosing(behavior(request, admitted_context)) as messages,
                ):
                    async for message in messages:
                        yield message

            if isasyncgenfunction(behavior):
                return respond_stream
            if iscoroutinefunction(behavior):  # may stream by context.write
                return respond
            raise InvalidConfiguration(
                f"the handler of {handler_call_details.method} is a plain function; on an asyncio server behind "
                "AsyncHeadgateInterceptor, write `async def`"
            )

        return _wrap(await continuation(handler_call_details) or _unknown(_not_found_async), guarded)

    @asynccontextmanager
    async def _admit(self, request: GrpcRequest) -> AsyncIterator[Any]:
        context = request.native
        admission = await self.gate.admit(request)
        if admission.refusal is not None:
            context.set_trailing_metadata(_refusal_metadata(admission))
            await context.abort(CODES[admission.refusal.status], admission.refusal.message)
        enter_context(admission)  # each RPC has its own task
        failure: BaseException | None = None
        try:
            yield _AdmittedContext(context, admission)
        except BaseException as error:
            failure = error
            raise
        finally:
            _add_metadata(context, admission)
            if admission.needs_finish:
                await finish_shielded(self.gate.finish(admission, _status(context, failure)))


class _AdmittedContext:
    """The context for the handler on an asyncio server, whose `abort` adds the header fields as it ends the RPC."""

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
        raise InvalidConfiguration("gRPC has no health_path: report gate.health() through the gRPC health service")


def _wrap(handler: Handler, guarded: Callable[[Behavior, bool], Behavior]) -> Handler:
    """A handler of the same kind behind the gate."""
    kind = "_".join(
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )
    behavior = guarded(getattr(handler, kind), handler.response_streaming)
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _unknown(behavior: Behavior) -> Handler:
    """The handler of a method that does not exist; such requests are counted as well."""
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
    """The HTTP status that corresponds to the end of an RPC."""
    code = context.code() or 0
    number: int = code if isinstance(code, int) else code.value[0]
    if number == 0 and failure is not None:
        number = CANCELLED if isinstance(failure, GeneratorExit | asyncio.CancelledError) else UNKNOWN
    return HTTP_STATUSES[number] if number < len(HTTP_STATUSES) else 500


def _add_metadata(context: Any, admission: Admission) -> None:
    """Add the header fields to the trailing metadata of the handler."""
    headers = admission.headers
    if headers:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), *_metadata(headers)))


def _metadata(headers: Iterable[Header]) -> Metadata:
    return tuple((name.decode(), value.decode()) for name, value in headers if name.startswith(SENT_PREFIXES))


def _refusal_metadata(admission: Admission) -> Metadata:
    """The header fields of a refusal, and its details in the rich error model of gRPC."""
    refusal, decision = admission.refusal, admission.decision
    assert refusal is not None
    fields = dict(refusal.headers)
    details: list[Message] = [ErrorInfo(reason=REASONS[refusal.status], domain="headgate")]
    if b"retry-after" in fields:
        details.append(RetryInfo(retry_delay=Duration(seconds=int(fields[b"retry-after"]))))
    if refusal.status == 429 and decision is not None:
        violations = [
            QuotaFailure.Violation(subject=f"limit:{name}", description=refusal.message) for name in decision.denied_by
        ]
        details.append(QuotaFailure(violations=violations))
    packed = [AnyMessage() for _ in details]
    for message, detail in zip(packed, details, strict=True):
        message.Pack(detail)
    status = Status(code=CODES[refusal.status].value[0], message=refusal.message, details=packed)
    return (*_metadata(refusal.headers), ("grpc-status-details-bin", status.SerializeToString()))
