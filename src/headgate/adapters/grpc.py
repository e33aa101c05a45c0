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
from headgate.leases import keep_task

try:  # not dependencies of grpcio
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
    from headgate.gate.responses import Header, Rejection
    from headgate.policy.model import Policy

    Behavior: TypeAlias = Callable[[Any, Any], Any]
    Details: TypeAlias = grpc.HandlerCallDetails
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

__all__ = ["AsyncHeadgateInterceptor", "GrpcRequest", "HeadgateInterceptor"]

REFUSALS: Final = {
    429: (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMIT_EXCEEDED"),
    503: (grpc.StatusCode.UNAVAILABLE, "LIMITER_UNAVAILABLE"),
    403: (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED"),
}
"""gRPC status codes and reasons by the HTTP status of a refusal."""

HTTP_STATUSES: Final = (200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)
"""The status for `count_when`, for each gRPC code from OK to UNAUTHENTICATED, as google.rpc.Code maps them."""

CANCELLED: Final = 1
UNKNOWN: Final = 2
SENT_PREFIXES: Final = (b"x-ratelimit-", b"ratelimit", b"retry-after")
"""Prefixes of the header fields that are sent as metadata."""


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


class _GateOwner:
    _gate_type: type[Any]

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        store: Any = "memory://",
        *,
        gate: Any = None,
        **options: Unpack[GateOptions],
    ) -> None:
        check_options(type(self).__name__, options)
        if options.get("health_path") is not None:
            raise InvalidConfiguration("gRPC has no health_path: report gate.health() through the gRPC health service")
        self.gate: Any = gate or self._gate_type(policy, store, **options)


class HeadgateInterceptor(_GateOwner, grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Applies a policy to a server with threads: `grpc.server(pool, interceptors=[HeadgateInterceptor(...)])`.

    `policy` is a file path or a `Policy`; `store` and all other options are those of `Gate`. Call `close` after the
    server has stopped.
    """

    _gate_type = Gate
    gate: Gate

    def close(self) -> None:
        """Close the gate and its store."""
        self.gate.close()

    def intercept_service(
        self, continuation: Callable[[Details], Handler | None], handler_call_details: Details
    ) -> Handler:
        def guarded(behavior: Behavior, streams: bool) -> Behavior:
            def respond(request: Any, context: Any) -> Any:
                with self._admit(GrpcRequest(handler_call_details, context)):
                    return behavior(request, context)

            def respond_stream(request: Any, context: Any) -> Iterator[Any]:
                with self._admit(GrpcRequest(handler_call_details, context)):
                    yield from behavior(request, context)

            return respond_stream if streams else respond

        unknown = grpc.unary_unary_rpc_method_handler(_not_found)
        return _wrap(continuation(handler_call_details) or unknown, guarded)

    @contextmanager
    def _admit(self, request: GrpcRequest) -> Iterator[None]:
        context = request.native
        admission = self.gate.admit(request)
        if admission.refusal is not None:
            context.abort(*_refuse(context, admission, admission.refusal))
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


class AsyncHeadgateInterceptor(_GateOwner, grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # as above
    """Applies a policy to an asyncio server: `grpc.aio.server(interceptors=[AsyncHeadgateInterceptor(...)])`.

    Handlers must be asynchronous. Await `close` after the server has stopped.
    """

    _gate_type = AsyncGate
    gate: AsyncGate

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
        return keep_task(loop.create_task(self.gate.close()))

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
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

        unknown = grpc.unary_unary_rpc_method_handler(_not_found_async)
        return _wrap(await continuation(handler_call_details) or unknown, guarded)

    @asynccontextmanager
    async def _admit(self, request: GrpcRequest) -> AsyncIterator[Any]:
        context = request.native
        admission = await self.gate.admit(request)
        if admission.refusal is not None:
            await context.abort(*_refuse(context, admission, admission.refusal))
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


def _wrap(handler: Handler, guarded: Callable[[Behavior, bool], Behavior]) -> Handler:
    """A handler of the same kind behind the gate."""
    names = {True: "stream", False: "unary"}
    kind = f"{names[handler.request_streaming]}_{names[handler.response_streaming]}"
    behavior = guarded(getattr(handler, kind), handler.response_streaming)
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _not_found(request: Any, context: Any) -> None:
    """The behavior of a method that does not exist; such requests are counted as well."""
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
    if headers := admission.headers:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), *_metadata(headers)))


def _metadata(headers: Iterable[Header]) -> Metadata:
    return tuple((name.decode(), value.decode()) for name, value in headers if name.startswith(SENT_PREFIXES))


def _refuse(context: Any, admission: Admission, refusal: Rejection) -> tuple[grpc.StatusCode, str]:
    """Set the header fields of a refusal and its details in the rich error model; returns the arguments of `abort`."""
    fields, decision = dict(refusal.headers), admission.decision
    code, reason = REFUSALS[refusal.status]
    details: list[Message] = [ErrorInfo(reason=reason, domain="headgate")]
    if b"retry-after" in fields:
        details.append(RetryInfo(retry_delay=Duration(seconds=int(fields[b"retry-after"]))))
    if refusal.status == 429 and decision is not None:
        names = [f"limit:{name}" for name in decision.denied_by]
        violations = [QuotaFailure.Violation(subject=name, description=refusal.message) for name in names]
        details.append(QuotaFailure(violations=violations))
    status = Status(code=code.value[0], message=refusal.message)
    for detail in details:
        status.details.add().Pack(detail)
    rich_error = "grpc-status-details-bin", status.SerializeToString()
    context.set_trailing_metadata((*_metadata(refusal.headers), rich_error))
    return code, refusal.message
