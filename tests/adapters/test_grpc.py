"""gRPC behind a policy: real servers, with threads and with asyncio, and all four kinds of RPC."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo
from grpc_status import rpc_status

from headgate import Limit
from headgate.adapters.grpc import AsyncHeadgateInterceptor, GrpcRequest, HeadgateInterceptor, _address
from headgate.errors import InvalidConfiguration
from headgate.gate.admission import UNLIMITED, current_admission
from headgate.gate.gate import AsyncGate
from headgate.policy.loader import read
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
LIMIT_FIELDS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-policy", "ratelimit"}


def policy(text: str = "5/minute", **options: Any) -> Policy:
    return Policy((Rule("all", Limit.parse(text, name="all"), ("ip",), **options),))


# --------------------------------------------------------------- the services: each echoes, or fails as it is told to


def act(request: bytes, context: Any) -> None:
    if request == b"give up":
        context.set_trailing_metadata((("mine", "kept"),))
        context.abort(grpc.StatusCode.ABORTED, "as it must be")
    if request.startswith(b"abort "):
        context.abort(grpc.StatusCode[request[6:].decode()], "as you wish")
    if request == b"raise":
        raise RuntimeError("broken")
    if request.startswith(b"commit "):
        current_admission().commit(int(request[7:]))
    context.set_trailing_metadata((("mine", "kept"),))


def unary_unary(request: bytes, context: Any) -> bytes:
    act(request, context)
    return request


def unary_stream(request: bytes, context: Any) -> Iterator[bytes]:
    act(request, context)
    for number in range(10**6 if request == b"endless" else 3):
        yield b"%s%d" % (request, number)


def stream_unary(requests: Iterator[bytes], context: Any) -> bytes:
    return unary_unary(b"".join(requests), context)


def stream_stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    for request in requests:
        yield unary_unary(request, context)


async def act_async(request: bytes, context: Any) -> None:
    if request == b"give up":
        await context.abort(grpc.StatusCode.ABORTED, "as it must be", (("mine", "kept"),))
    if request.startswith(b"abort "):
        await context.abort(grpc.StatusCode[request[6:].decode()], "as you wish")
    act(request, context)


async def unary_unary_async(request: bytes, context: Any) -> bytes:
    await act_async(request, context)
    return request


async def unary_stream_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    await act_async(request, context)
    for number in range(10**6 if request == b"endless" else 3):
        yield b"%s%d" % (request, number)


async def stream_unary_async(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return await unary_unary_async(b"".join([request async for request in requests]), context)


async def stream_stream_async(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(await unary_unary_async(request, context))


def plain(request: bytes, context: Any) -> bytes:
    return b"free" if current_admission() is UNLIMITED else b"counted"


def handlers(suffix: str) -> grpc.GenericRpcHandler:
    behaviors = {kind: globals()[kind + suffix] for kind in KINDS}
    made = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behavior) for kind, behavior in behaviors.items()}
    return grpc.method_handlers_generic_handler(
        "test.Echo", made | {"plain": grpc.unary_unary_rpc_method_handler(plain)}
    )


class Answer:
    """How an RPC ended."""

    def __init__(self, call: Any, code: grpc.StatusCode, messages: list[bytes], trailing: Any) -> None:
        self.call, self.code, self.messages = call, code, messages
        self.metadata = {key: value for key, value in trailing or ()}  # noqa: C416 - of pairs that are no tuples

    @property
    def details(self) -> dict[type, Any]:
        """The messages of the rich error model, by their types."""
        status = rpc_status.from_call(self.call)
        found: dict[type, Any] = {}
        for packed in status.details:
            for kind in (ErrorInfo, QuotaFailure, RetryInfo):
                if packed.Is(kind.DESCRIPTOR):
                    found[kind] = kind()
                    packed.Unpack(found[kind])
        return found


class Client:
    """Makes RPCs, one after another."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def __call__(self, kind: str = "unary_unary", request: bytes = b"hi", **options: Any) -> Answer:
        path = options.pop("path", f"/test.Echo/{kind}")
        argument = iter([request]) if kind.startswith("stream") else request
        rpc: Any = getattr(self.channel, kind)(path)
        try:
            if kind.endswith("stream"):
                call = rpc(argument, timeout=20, **options)
                messages = list(call)
            else:
                message, call = rpc.with_call(argument, timeout=20, **options)
                messages = [message]
        except grpc.RpcError as error:
            return Answer(error, error.code(), [], error.trailing_metadata())
        return Answer(call, call.code(), messages, call.trailing_metadata())


@contextmanager
def threaded(given: Any, **options: Any) -> Iterator[Any]:
    """Asks a server with threads."""
    interceptor = HeadgateInterceptor(given, **options)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handlers("")], interceptors=[interceptor])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Client(channel)
    server.stop(None).wait()
    interceptor.close()


@contextmanager
def asynchronous(given: Any, **options: Any) -> Iterator[Any]:
    """Asks an asyncio server, which runs in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    loop = asyncio.new_event_loop()

    @asynccontextmanager
    async def serving() -> AsyncIterator[int]:
        interceptor = AsyncHeadgateInterceptor(given, **options)
        server = grpc.aio.server(handlers=[handlers("_async")], interceptors=[interceptor])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield port
        await server.stop(None)
        await interceptor.close()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    thread.submit(loop.run_forever)
    block = serving()
    port = run(block.__aenter__())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Client(channel)
    run(block.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.shutdown()
    loop.close()


both = pytest.mark.parametrize("serving", [threaded, asynchronous])
OK, EXHAUSTED = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED


@both
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rpc_is_limited(serving: Any, kind: str) -> None:
    with serving(policy("1/minute"), clock=FakeClock()) as ask:
        served, refused = ask(kind), ask(kind)
    assert (served.code, served.messages[0][:2], served.metadata["mine"]) == (OK, b"hi", "kept")
    assert set(served.metadata) >= LIMIT_FIELDS
    assert served.metadata["x-ratelimit-remaining"] == "0"
    assert (refused.code, refused.metadata["retry-after"]) == (EXHAUSTED, "60")
    assert set(refused.metadata) == {*LIMIT_FIELDS, "retry-after", "grpc-status-details-bin"}
    assert refused.details[RetryInfo].retry_delay.seconds == 60
    assert (refused.details[ErrorInfo].reason, refused.details[ErrorInfo].domain) == ("RATE_LIMIT_EXCEEDED", "headgate")
    assert [violation.subject for violation in refused.details[QuotaFailure].violations] == ["limit:all"]
    assert refused.call.details() == 'The limit "all" has been reached. Try again in 60 seconds.'
    assert rpc_status.from_call(refused.call).message == refused.call.details()


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_", [b"abort NOT_FOUND", b"give up", b"raise"])
def test_failed_rpc_gets_rate_limit_metadata(serving: Any, kind: str, request_: bytes) -> None:
    with serving(policy("5/minute"), clock=FakeClock()) as ask:
        failed, unknown = ask(kind, request_), ask(path="/test.Echo/Nothing")
    assert failed.code is not OK
    assert set(failed.metadata) == (LIMIT_FIELDS | {"mine"} if request_ == b"give up" else LIMIT_FIELDS)
    assert (set(unknown.metadata), unknown.metadata["x-ratelimit-remaining"]) == (LIMIT_FIELDS, "3")


@both
def test_exactly_as_many_pass_as_may(serving: Any) -> None:
    with serving(policy("20/minute"), clock=FakeClock()) as ask, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask().code, range(60)))
    assert (answers.count(OK), answers.count(EXHAUSTED)) == (20, 40)


@both
def test_methods_that_do_not_exist_are_counted(serving: Any) -> None:
    with serving(policy("2/minute"), clock=FakeClock()) as ask:
        codes = [ask(path=f"/test.Echo/Nothing{number}").code for number in range(3)]
    assert codes == [grpc.StatusCode.UNIMPLEMENTED] * 2 + [EXHAUSTED]


@both
def test_policy_names_methods_as_paths_and_reads_metadata(serving: Any) -> None:
    rules = read(
        """
        routes: [{path: /test.Echo/unary_stream, cost: 0}]
        limits: [{path: POST /test.Echo/unary_unary, by: api_key, bucket: 1/minute}]
        blocked: [{tenant: mallory}]
        """
    )

    def tenant(request: GrpcRequest) -> str | None:
        return next(iter(request.header("x-tenant")), None)

    with serving(rules, clock=FakeClock(), identities={"tenant": tenant}) as ask:
        keyed = [ask(metadata=(("x-api-key", key), ("raw-bin", b"\0"))).code for key in ("a", "b", "a")]
        exempt, other = ask("unary_stream"), ask("stream_unary")
        blocked = ask("stream_stream", metadata=(("x-tenant", "mallory"),))
    assert keyed == [OK, OK, EXHAUSTED]
    assert (exempt.metadata, other.metadata) == ({"mine": "kept"}, {"mine": "kept"})
    assert (blocked.code, blocked.details[ErrorInfo].reason) == (grpc.StatusCode.PERMISSION_DENIED, "BLOCKED")
    assert RetryInfo not in blocked.details


@both
@pytest.mark.parametrize(
    ("request_", "code", "counts"),
    [
        (b"hi", "OK", False),
        (b"abort UNAUTHENTICATED", "UNAUTHENTICATED", True),
        (b"abort PERMISSION_DENIED", "PERMISSION_DENIED", True),
        (b"abort NOT_FOUND", "NOT_FOUND", False),
        (b"raise", "UNKNOWN", True),
    ],
)
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_answers_are_settled_by_their_code(serving: Any, kind: str, request_: bytes, code: str, counts: bool) -> None:
    rules = read("limits: [{by: ip, bucket: 1/minute, count_when: 'status in [401, 403, 500]'}]")
    with serving(rules, clock=FakeClock()) as ask:
        assert ask(kind, request_).code.name == code
        assert ask(kind).code is (EXHAUSTED if counts else OK)


def test_rpc_that_meets_no_limit_finds_no_admission_of_another() -> None:
    rules = read("routes: [{path: /test.Echo/plain, cost: 0}]\nlimits: [{by: ip, bucket: 99/minute}]")
    with threaded(rules) as ask:
        for _ in range(8):  # more than there are threads
            assert ask().code is OK
        assert [ask(path="/test.Echo/plain").messages for _ in range(8)] == [[b"free"]] * 8


@both
def test_app_says_what_an_rpc_has_cost(serving: Any) -> None:
    with serving(read("limits: [{by: ip, bucket: 10/minute, reserve: 5}]"), clock=FakeClock()) as ask:
        assert [ask(request=b"commit %d" % cost).code for cost in (1, 1, 4, 0)] == [OK, OK, OK, EXHAUSTED]


@both
def test_stream_that_is_cancelled_leaves_its_lease(serving: Any) -> None:
    one = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")
    with serving(Policy((Rule("one", one, ("ip",)),))) as ask:
        stream: Any = ask.channel.unary_stream("/test.Echo/unary_stream")(b"endless")
        assert next(stream) == b"endless0"
        assert ask().code is EXHAUSTED
        stream.cancel()
        give_up = time.monotonic() + 10
        while ask().code is not OK:  # the server hears of it in its own time
            assert time.monotonic() < give_up


@both
@pytest.mark.parametrize(
    ("mode", "codes"),
    [
        ("open", ["OK"] * 3),
        ("closed", ["UNAVAILABLE"] * 3),
        ("local", ["OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]),
    ],
)
def test_store_that_is_away_is_answered_for(serving: Any, mode: Any, codes: list[str]) -> None:
    with serving(policy(on_failure=mode), store="redis://127.0.0.1:1/0") as ask:
        answers = [ask() for _ in range(3)]
    assert [answer.code.name for answer in answers] == codes
    if mode == "closed":
        assert answers[0].details[ErrorInfo].reason == "LIMITER_UNAVAILABLE"


def test_handlers_on_an_asyncio_server_have_to_be_asynchronous() -> None:
    with threaded(policy()) as ask:
        assert ask(path="/test.Echo/plain").code is OK
    with asynchronous(policy()) as ask:
        assert ask(path="/test.Echo/plain").code is not OK


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:203.0.113.9:50051", "203.0.113.9"),
        ("ipv6:[2001:db8::1]:50051", "2001:db8::1"),
        ("ipv6:%5B2001:db8::1%5D:50051", "2001:db8::1"),
        ("ipv6:%5B::ffff:203.0.113.9%5D:1", "::ffff:203.0.113.9"),
        ("unix:", None),
        ("unix:/run/app.sock", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_address_of_a_peer(peer: str, address: str | None) -> None:
    assert _address(peer) == address


@pytest.mark.parametrize("interceptor", [HeadgateInterceptor, AsyncHeadgateInterceptor])
def test_gate_needs_a_policy(interceptor: Any) -> None:
    with pytest.raises(TypeError, match="give a policy"):
        interceptor()


@pytest.mark.parametrize("interceptor", [HeadgateInterceptor, AsyncHeadgateInterceptor])
def test_grpc_has_no_path_for_health(interceptor: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="gRPC has no health_path"):
        interceptor(policy(), health_path="/health")


class ClosedGate(AsyncGate):
    is_closed = False

    async def close(self) -> None:
        await super().close()
        self.is_closed = True


@pytest.mark.parametrize("is_awaited", [True, False])
def test_closing_an_asyncio_interceptor_begins_at_once(is_awaited: bool) -> None:
    async def main() -> bool:
        gate = ClosedGate(policy())
        closing = AsyncHeadgateInterceptor(gate=gate).close()
        if is_awaited:
            await closing
        else:
            await asyncio.sleep(0)
        return gate.is_closed

    assert asyncio.run(main())


def test_closing_an_asyncio_interceptor_outside_of_its_loop_says_how() -> None:
    with pytest.raises(InvalidConfiguration, match=r"`await interceptor.close\(\)`"):
        AsyncHeadgateInterceptor(policy()).close()
