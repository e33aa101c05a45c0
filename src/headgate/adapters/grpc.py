"""gRPC server interceptors, for threads and for asyncio, and for all four kinds of RPC.

To a policy, the RPC `/shop.Orders/Create` is a POST to that path, and metadata are header fields. RateLimit fields are
sent as trailing metadata, which a handler cannot have sent before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Unpack
from urllib.parse import unquote

import grpc

from headgate.adapters.asgi import finish_shielded
from headgate.errors import InvalidConfiguration, Overloaded
from headgate.gate.admission import enter_context
from headgate.gate.gate import AsyncGate, Gate
from headgate.gate.options import check_options
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
    from headgate.gate.messages import Direction, MessageMeter
    from headgate.gate.options import GateOptions
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
SENT_PREFIXES: Final = (b"x-ratelimit-", b"ratelimit", b"retry-after", b"headgate-shed")
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
                with self._admit(GrpcRequest(handler_call_details, context)) as meter:
                    if sizes is None:
                        return behavior(request, context)
                    metered = MeteredRpc(self.gate, meter, context, sizes)
                    return metered.respond(behavior(metered.receive(request), context))

            def respond_stream(request: Any, context: Any) -> Iterator[Any]:
                with self._admit(GrpcRequest(handler_call_details, context)) as meter:
                    if sizes is None:
                        yield from behavior(request, context)
                        return
                    metered = MeteredRpc(self.gate, meter, context, sizes)
                    with closing_if_generator(behavior(metered.receive(request), context)) as messages:
                        yield from metered.send(messages)

            return respond_stream if streams else respond

        handler = continuation(handler_call_details) or grpc.unary_unary_rpc_method_handler(_not_found)
        sizes = MessageSizes(handler) if self.gate.limits_messages else None
        return _wrap(handler, guarded, sizes)

    @contextmanager
    def _admit(self, request: GrpcRequest) -> Iterator[MessageMeter | None]:
        context = request.native
        admission = self.gate.admit(request)
        if admission.refusal is not None:
            context.abort(*_refuse(context, admission, admission.refusal))
        enter_context(admission)  # also without limits: the thread has served other requests
        failure: BaseException | None = None
        try:
            yield self.gate.message_meter(admission) if admission.needs_finish else None
        except Overloaded as error:
            failure = error
            context.abort(*_refuse(context, admission, self.gate.overloaded(error)))
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
                async with self._admit(GrpcRequest(handler_call_details, context), sizes) as admitted_context:
                    if sizes is None:
                        return await behavior(request, admitted_context)
                    response = await behavior(await admitted_context.metered(request), admitted_context)
                    return None if streams_by_write else await admitted_context.metered_response(response)

            async def respond_stream(request: Any, context: Any) -> AsyncIterator[Any]:
                async with self._admit(GrpcRequest(handler_call_details, context), sizes) as admitted_context:
                    if sizes is not None:
                        request = await admitted_context.metered(request)
                    async with aclosing(behavior(request, admitted_context)) as messages:
                        async for message in messages:
                            if sizes is None:
                                yield message
                            elif (content := await admitted_context.send(message)) is not None:
                                yield content

            streams_by_write = streams
            if isasyncgenfunction(behavior):
                return respond_stream
            if iscoroutinefunction(behavior):  # may stream by context.write
                return respond
            raise InvalidConfiguration(
                f"the handler of {handler_call_details.method} is a plain function; on an asyncio server behind "
                "AsyncHeadgateInterceptor, write `async def`"
            )

        handler = await continuation(handler_call_details) or grpc.unary_unary_rpc_method_handler(_not_found_async)
        sizes = MessageSizes(handler) if self.gate.limits_messages else None
        return _wrap(handler, guarded, sizes)

    @asynccontextmanager
    async def _admit(self, request: GrpcRequest, sizes: MessageSizes | None) -> AsyncIterator[Any]:
        context = request.native
        admission = await self.gate.admit(request)
        if admission.refusal is not None:
            await context.abort(*_refuse(context, admission, admission.refusal))
        enter_context(admission)  # each RPC has its own task
        failure: BaseException | None = None
        try:
            meter = self.gate.message_meter(admission) if admission.needs_finish else None
            if sizes is None:
                yield _AdmittedContext(context, admission)
            else:
                yield _MeteredContext(context, admission, self.gate, meter, sizes)
        except Overloaded as error:
            failure = error
            await context.abort(*_refuse(context, admission, self.gate.overloaded(error)))
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


class MessageSizes:
    """The sizes of the messages of one RPC: its requests are measured before they are parsed, and its responses are
    serialized before they are sent."""

    def __init__(self, handler: Handler) -> None:
        self._parse = handler.request_deserializer
        self._serialize = handler.response_serializer
        self._received: deque[int] = deque()

    def parse(self, content: bytes) -> Any:
        """The deserializer of the RPC."""
        self._received.append(len(content))
        return content if self._parse is None else self._parse(content)

    def serialize(self, message: Any) -> bytes:
        return message if self._serialize is None else self._serialize(message)  # type: ignore[no-any-return]

    def next_received(self) -> int:
        """The size of the next request that is passed on."""
        return self._received.popleft() if self._received else 0


class MeteredRpc:
    """The messages of an RPC on a server with threads."""

    def __init__(self, gate: Gate, meter: MessageMeter | None, context: Any, sizes: MessageSizes) -> None:
        self._gate = gate
        self._meter = meter
        self._context = context
        self._sizes = sizes

    def receive(self, request: Any) -> Any:
        """The request, or an iterator of requests that waits before it passes one on."""
        if hasattr(request, "__next__"):
            return (message for message in request if self._passes("received", self._sizes.next_received()))
        self._passes("received", self._sizes.next_received(), can_drop=False)
        return request

    def respond(self, message: Any) -> bytes:
        """The only response, serialized, when it may be sent."""
        content = self._sizes.serialize(message)
        self._passes("sent", len(content), can_drop=False)
        return content

    def send(self, messages: Iterable[Any]) -> Iterator[bytes]:
        """The serialized responses that may be sent, each at its time."""
        for message in messages:
            content = self._sizes.serialize(message)
            if self._passes("sent", len(content)):
                yield content

    def _passes(self, direction: Direction, size: int, *, can_drop: bool = True) -> bool:
        if self._meter is None:
            return True
        verdict = self._gate.charge_messages(self._meter, direction, 1, size)
        if verdict.action == "close" or (verdict.action == "drop" and not can_drop):
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, verdict.reason)
        return verdict.action == "pass"


class _MeteredContext(_AdmittedContext):
    """The context of an RPC on an asyncio server whose messages are limited, also those that its handler reads and
    writes itself."""

    def __init__(
        self, context: Any, admission: Admission, gate: AsyncGate, meter: MessageMeter | None, sizes: MessageSizes
    ) -> None:
        super().__init__(context, admission)
        self._gate = gate
        self._meter = meter
        self._sizes = sizes

    async def metered(self, request: Any) -> Any:
        """The request, or an iterator of requests that waits before it passes one on."""
        if hasattr(request, "__anext__") or hasattr(request, "__aiter__"):
            return self._requests(request)
        await self._passes("received", self._sizes.next_received(), can_drop=False)
        return request

    async def metered_response(self, message: Any) -> bytes:
        content = self._sizes.serialize(message)
        await self._passes("sent", len(content), can_drop=False)
        return content

    async def send(self, message: Any) -> bytes | None:
        """The serialized response when it may be sent; None if it is dropped."""
        content = self._sizes.serialize(message)
        return content if await self._passes("sent", len(content)) else None

    async def read(self) -> Any:
        while True:
            message = await self._context.read()
            is_end = message is grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
            if is_end or await self._passes("received", self._sizes.next_received()):
                return message

    async def write(self, message: Any) -> None:
        if (content := await self.send(message)) is not None:
            await self._context.write(content)

    async def _requests(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in requests:
            if await self._passes("received", self._sizes.next_received()):
                yield message

    async def _passes(self, direction: Direction, size: int, *, can_drop: bool = True) -> bool:
        if self._meter is None:
            return True
        verdict = await self._gate.charge_messages(self._meter, direction, 1, size)
        if verdict.action == "close" or (verdict.action == "drop" and not can_drop):
            await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, verdict.reason)
        return verdict.action == "pass"


@contextmanager
def closing_if_generator(messages: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Close a generator at the end, as `yield from` does; other iterables have nothing to close."""
    try:
        yield messages
    finally:
        if isinstance(messages, Generator):
            messages.close()


def _wrap(
    handler: Handler, guarded: Callable[[Behavior, bool], Behavior], sizes: MessageSizes | None = None
) -> Handler:
    """A handler of the same kind behind the gate."""
    names = {True: "stream", False: "unary"}
    kind = f"{names[handler.request_streaming]}_{names[handler.response_streaming]}"
    behavior = guarded(getattr(handler, kind), handler.response_streaming)
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    if sizes is not None:
        return make(behavior, sizes.parse, None)
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
    if refusal.status == 503 and (decision is None or decision.allowed):
        reason = "OVERLOADED"
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
