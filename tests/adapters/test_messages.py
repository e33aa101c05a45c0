"""Limits on messages and bytes inside connections: excess waits, is dropped or closes the connection."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import quart
import uvicorn
import websockets
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from headgate.adapters.asgi import EventCounter, HeadgateMiddleware
from headgate.adapters.flask import Headgate
from headgate.adapters.grpc import AsyncHeadgateInterceptor, HeadgateInterceptor
from headgate.policy.loader import read
from headgate.testing import FakeClock
from support.asgi_client import client, scope, talk
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from headgate.policy.model import Policy
    from support.servers import RedisServer

CONNECT, LEAVE = {"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}


def limited(bucket: str, count: str = "messages", **more: Any) -> Policy:
    limit = {"name": "chat", "by": "ip", "bucket": bucket, "count": count, **more}
    return read(json.dumps({"limits": [limit]}), format="json")


def texts(*words: str) -> list[dict[str, Any]]:
    return [{"type": "websocket.receive", "text": word} for word in words]


def fastapi_echo() -> Any:
    app = FastAPI()

    @app.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_text(await websocket.receive_text())
        except WebSocketDisconnect:
            pass

    return app


def starlette_echo() -> Any:
    async def echo(websocket: Any) -> None:
        await websocket.accept()
        async for word in websocket.iter_text():
            await websocket.send_text(word)

    return Starlette(routes=[WebSocketRoute("/ws", echo)])


def quart_echo() -> Any:
    app = quart.Quart("chat")

    @app.websocket("/ws")
    async def echo() -> None:
        while True:
            await quart.websocket.send(await quart.websocket.receive())

    return app


every_framework = pytest.mark.parametrize("make", [fastapi_echo, starlette_echo, quart_echo])


def chat(app: Any, policy: Policy, *words: str, clock: FakeClock | None = None) -> list[Any]:
    """What a client gets that sends these words: texts, and the message that closes the connection."""
    gated = HeadgateMiddleware(app, policy, clock=clock or FakeClock())
    sent: list[Any] = []
    left = [CONNECT, *texts(*words)]

    async def receive() -> dict[str, Any]:
        for _ in range(50):  # lets the app answer, as Quart reads ahead and stops at once when its client leaves
            await asyncio.sleep(0)
        return left.pop(0) if left else LEAVE

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await gated(scope("/ws", "websocket"), receive, send)
        await gated.gate.close()

    asyncio.run(run())
    return [message.get("text", message) for message in sent if message["type"] != "websocket.accept"]


# ---------------------------------------------------------------------------- websockets


@every_framework
def test_messages_wait_for_their_turn(make: Callable[[], Any]) -> None:
    clock = FakeClock()
    words = [f"{number}" for number in range(11)]
    heard = chat(make(), limited("10/second, burst 1", direction="received"), *words, clock=clock)
    assert heard[:11] == words
    assert clock.now_us() == 1_000_000, "the first passes at once, and the others at intervals of 0.1 s"


@pytest.mark.parametrize(("direction", "seconds"), [("received", 4), ("sent", 4), ("both", 9)])
def test_direction(direction: str, seconds: int) -> None:
    clock = FakeClock()
    policy = limited("1/second, burst 1", direction=direction)
    assert chat(starlette_echo(), policy, *"abcde", clock=clock)[:5] == [*"abcde"]
    assert clock.now_us() == seconds * 1_000_000


@every_framework
def test_excess_is_dropped(make: Callable[[], Any]) -> None:
    heard = chat(make(), limited("3/hour", direction="received", on_excess="drop"), *"abcde")
    assert [each for each in heard if isinstance(each, str)] == [*"abc"]


@pytest.mark.parametrize("direction", ["received", "sent"])
@every_framework
def test_excess_closes_the_connection(make: Callable[[], Any], direction: str) -> None:
    heard = chat(make(), limited("3/hour", direction=direction, on_excess="close"), *"abcde")
    reason = 'The limit "chat" has been reached. Try again later.'
    closing = {"type": "websocket.close", "code": 1013, "reason": reason}
    assert heard[:4] == [*"abc", closing]
    assert [each for each in heard if isinstance(each, str)] == [*"abc"]


def test_message_that_can_never_pass_is_told_apart() -> None:
    heard = chat(starlette_echo(), limited("10/second", "bytes", on_excess="close"), "x" * 11)
    assert heard == [
        {"type": "websocket.close", "code": 1008, "reason": 'A message is larger than the limit "chat" allows.'}
    ]


def test_wait_of_more_than_a_minute_closes_the_connection() -> None:
    clock = FakeClock()
    heard = chat(starlette_echo(), limited("1/hour, burst 2", direction="received"), *"abc", clock=clock)
    assert heard[:2] == [*"ab"]
    assert heard[2]["code"] == 1013
    assert clock.now_us() == 0, "it is known at once that waiting does not help"


def test_large_message_passes_in_parts() -> None:
    """Ten times the burst: it takes as long as its bytes do, and no longer."""
    clock = FakeClock()
    policy = limited("100/second", "bytes", direction="received")
    assert chat(starlette_echo(), policy, "x" * 1000, clock=clock)[0] == "x" * 1000
    assert clock.now_us() == 9_000_000


def test_bytes_are_those_of_utf_8() -> None:
    clock = FakeClock()
    policy = limited("6/second", "bytes", direction="received")
    assert chat(starlette_echo(), policy, "äöü", "é", clock=clock)[:2] == ["äöü", "é"]
    assert clock.now_us() == 333_334, "two of eight bytes had to wait"


def test_cost_of_a_message() -> None:
    clock = FakeClock()
    chat(starlette_echo(), limited("10/second", cost=5, direction="received"), *"abc", clock=clock)
    assert clock.now_us() == 500_000


def test_limits_by_message_and_by_request_apply_together() -> None:
    limits = [
        {"name": "handshakes", "by": "ip", "bucket": "1/minute"},
        {"name": "chat", "by": "ip", "bucket": "1/second, burst 1", "count": "messages", "path": "/ws"},
        {"name": "elsewhere", "by": "ip", "bucket": "1/hour", "count": "messages", "path": "/other"},
    ]
    clock = FakeClock()
    app = HeadgateMiddleware(starlette_echo(), read(json.dumps({"limits": limits}), format="json"), clock=clock)
    told = scope("/ws", "websocket")
    first = asyncio.run(talk(app, told, CONNECT, *texts("a"), LEAVE))
    assert [message["type"] for message in first][:2] == ["websocket.accept", "websocket.send"]
    assert clock.now_us() == 1_000_000
    again = asyncio.run(talk(app, told, CONNECT, LEAVE))
    assert again[0]["status"] == 429


def test_store_that_is_away_is_answered_by_the_failure_mode() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for mode, heard in (("open", [*"abc"]), ("closed", [])):
        policy = limited("1/hour", on_excess="drop", on_failure=mode)
        app = HeadgateMiddleware(starlette_echo(), policy, f"redis://127.0.0.1:{port}/0", secret="x" * 16)

        async def run(app: Any = app) -> list[Any]:
            sent = await talk(app, scope("/ws", "websocket"), CONNECT, *texts(*"abc"), LEAVE)
            await app.gate.close()
            return sent

        assert [each["text"] for each in asyncio.run(run()) if each["type"] == "websocket.send"] == heard


def test_connections_of_a_client_share_one_exact_limit(redis7: RedisServer, unique: str) -> None:
    policy = limited("30/hour", direction="received", on_excess="drop")

    async def run() -> list[list[Any]]:
        apps = [
            HeadgateMiddleware(starlette_echo(), policy, redis7.url, namespace=unique, secret="x" * 16, budget=20.0)
            for _ in range(3)
        ]
        told = [scope("/ws", "websocket", client=("203.0.113.9", number)) for number in range(6)]
        talks = [talk(apps[at % 3], each, CONNECT, *texts(*"abcdefghij"), LEAVE) for at, each in enumerate(told)]
        heard = await asyncio.gather(*talks)
        for app in apps:
            await app.gate.close()
        return heard

    heard = asyncio.run(run())
    assert sum(message["type"] == "websocket.send" for messages in heard for message in messages) == 30


@contextmanager
def uvicorn_server(app: Any) -> Iterator[int]:
    """A real server, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", ws_ping_interval=None, timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started, "uvicorn to start")
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def test_client_of_a_real_server_has_to_wait_too() -> None:
    """The server stops reading, so that the client's `send` blocks instead of filling the server's memory."""
    heard: list[int] = []

    async def listen(websocket: Any) -> None:
        await websocket.accept()
        while True:
            heard.append(len(await websocket.receive_bytes()))

    app = Starlette(routes=[WebSocketRoute("/ws", listen)])
    # Two messages of a megabyte pass at once, and the third has to wait for half a minute.
    policy = limited("2097152/minute", "bytes", direction="received")

    async def run(port: int) -> int:
        url = f"ws://127.0.0.1:{port}/ws"
        async with websockets.connect(url, ping_interval=None, close_timeout=0.1, compression=None) as connection:
            sent = 0
            try:
                async with asyncio.timeout(2):
                    for _ in range(200):
                        await connection.send(bytes(1_048_576))
                        sent += 1
            except TimeoutError:
                pass
            connection.transport.abort()
            return sent

    with uvicorn_server(HeadgateMiddleware(app, policy)) as port:
        sent = asyncio.run(run(port))
    assert sent < 100
    assert len(heard) <= 3


def test_real_client_sees_why_it_was_disconnected() -> None:
    async def run(port: int) -> tuple[list[Any], Any]:
        async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as connection:
            heard = []
            try:
                for word in "abcde":
                    await connection.send(word)
                    heard.append(await connection.recv())
            except websockets.ConnectionClosed as closed:
                return heard, closed.rcvd
            return heard, None

    app = HeadgateMiddleware(starlette_echo(), limited("3/hour", direction="received", on_excess="close"))
    with uvicorn_server(app) as port:
        heard, closing = asyncio.run(run(port))
    assert heard == [*"abc"]
    assert (closing.code, closing.reason) == (1013, 'The limit "chat" has been reached. Try again later.')


# ---------------------------------------------------------------------------- event streams and bodies


EVENTS = [f"data: {number}\n\n".encode() for number in range(6)]


def stream_app(chunks: list[bytes], media_type: str = "text/event-stream; charset=utf-8") -> Any:
    async def produce() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def stream(request: Any) -> StreamingResponse:
        return StreamingResponse(produce(), media_type=media_type)

    async def upload(request: Any) -> PlainTextResponse:
        return PlainTextResponse(f"{len(await request.body())}")

    return Starlette(routes=[Route("/", stream), Route("/upload", upload, methods=["POST"])])


def fetch(app: Any, policy: Policy, clock: FakeClock, **request: Any) -> tuple[int, bytes]:
    gated = HeadgateMiddleware(app, policy, clock=clock)

    async def run() -> tuple[int, bytes]:
        async with client(gated) as http:
            answer = await http.request(request.pop("method", "GET"), request.pop("path", "/"), **request)
            return answer.status_code, answer.content

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "body", "seconds"),
    [
        ({"bucket": "1/second, burst 2"}, b"".join(EVENTS), 4),
        ({"bucket": "2/hour", "on_excess": "drop"}, b"".join(EVENTS[:2]), 0),
        ({"bucket": "2/hour", "on_excess": "close"}, b"".join(EVENTS[:2]), 0),
        ({"bucket": "9/second", "count": "bytes"}, b"".join(EVENTS), 5),
        ({"bucket": "1/hour", "direction": "received"}, b"".join(EVENTS), 0),
    ],
)
def test_events_of_a_stream(options: dict[str, Any], body: bytes, seconds: int) -> None:
    clock = FakeClock()
    assert fetch(stream_app(EVENTS), limited(**options), clock) == (200, body)
    assert clock.now_us() == seconds * 1_000_000


def test_parts_of_an_event_are_never_left_out() -> None:
    halves = [b"data: a\n", b"\ndata: b", b"\n\n", b"data: c\n\n"]
    clock = FakeClock()
    policy = limited("1/second, burst 1", on_excess="drop")
    assert fetch(stream_app(halves), policy, clock) == (200, b"data: a\n\ndata: b\n\n")
    assert clock.now_us() == 1_000_000, "an event that has begun waits instead"


def test_bytes_of_a_download_and_of_an_upload() -> None:
    clock = FakeClock()
    app = stream_app([bytes(500)] * 4, "application/octet-stream")
    policy = limited("1000/second", "bytes", on_excess="drop", direction="sent")
    assert fetch(app, policy, clock) == (200, bytes(2000)), "a body is slowed down, and stays whole"
    assert clock.now_us() == 1_000_000
    clock = FakeClock()
    policy = limited("1000/second", "bytes", on_excess="close", direction="received")
    assert fetch(app, policy, clock, method="POST", path="/upload", content=bytes(3000)) == (200, b"3000")
    assert clock.now_us() == 2_000_000


def test_bodies_have_no_messages() -> None:
    clock = FakeClock()
    app = stream_app([bytes(500)] * 4, "application/octet-stream")
    assert fetch(app, limited("1/hour"), clock) == (200, bytes(2000))
    assert clock.now_us() == 0


@given(
    st.lists(st.sampled_from(["data: x\n", "\n", ": ping\n", "id: 1\n", "data: é\n\n"]), max_size=12),
    st.lists(st.integers(0, 80), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_counted_wherever_a_stream_is_cut(lines: list[str], cuts: list[int], end: str) -> None:
    stream = "".join(lines).replace("\n", end).encode()
    at = sorted({0, *[min(cut, len(stream)) for cut in cuts], len(stream)})
    counter = EventCounter()
    found = sum(counter.count(stream[start:stop]) for start, stop in pairwise(at))
    expected = [block for block in stream.replace(b"\r", b"").split(b"\n\n")[:-1] if block.strip(b"\n")]
    assert found == len(expected)


# ---------------------------------------------------------------------------- gRPC


def double(request: bytes, context: Any) -> bytes:
    return request * 2


def total(requests: Iterator[bytes], context: Any) -> bytes:
    return b"".join(requests)


def count_up(request: bytes, context: Any) -> Iterator[bytes]:
    for number in range(int(request)):
        yield b"%d" % number


def echo(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    yield from requests


async def double_async(request: bytes, context: Any) -> bytes:
    return request * 2


async def total_async(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([request async for request in requests])


async def count_up_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(int(request)):
        yield b"%d" % number


async def echo_async(requests: Any, context: Any) -> None:
    """Reads and writes by the context."""
    while (request := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        await context.write(request)


class Utf16:
    """A serializer whose messages have other sizes than their content."""

    @staticmethod
    def dumps(message: bytes) -> bytes:
        return message.decode().encode("utf-16-le")

    @staticmethod
    def loads(content: bytes) -> bytes:
        return content.decode("utf-16-le").encode()


KINDS = {"unary_unary": "double", "stream_unary": "total", "unary_stream": "count_up", "stream_stream": "echo"}


def rpcs(suffix: str) -> grpc.GenericRpcHandler:
    found = {
        name: getattr(grpc, f"{kind}_rpc_method_handler")(globals()[name + suffix], Utf16.loads, Utf16.dumps)
        for kind, name in KINDS.items()
    }
    return grpc.method_handlers_generic_handler("test.Chat", found)


class Calls:
    """Calls RPCs: the code, and the responses before it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __call__(self, name: str, *requests: bytes) -> tuple[str, list[bytes]]:
        kind = next(kind for kind, each in KINDS.items() if each == name)
        rpc = getattr(self._channel, kind)(f"/test.Chat/{name}", Utf16.dumps, Utf16.loads)
        argument: Any = iter(requests) if kind.startswith("stream") else requests[0]
        responses: list[bytes] = []
        try:
            answer = rpc(argument, timeout=30)
            responses += answer if kind.endswith("stream") else [answer]
        except grpc.RpcError as error:
            return error.code().name, responses
        return "OK", responses


@contextmanager
def threaded(policy: Policy, clock: FakeClock) -> Iterator[Calls]:
    interceptor = HeadgateInterceptor(policy, clock=clock)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[rpcs("")], interceptors=[interceptor])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Calls(channel)
    server.stop(None).wait()
    interceptor.close()


@contextmanager
def asynchronous(policy: Policy, clock: FakeClock) -> Iterator[Calls]:
    ports: list[int] = []
    stop = asyncio.Event()

    async def serve() -> None:
        interceptor = AsyncHeadgateInterceptor(policy, clock=clock)
        server = grpc.aio.server(handlers=[rpcs("_async")], interceptors=[interceptor])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ports.append(port)
        await stop.wait()
        await server.stop(None)
        await interceptor.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    wait_until(lambda: ports, "the server to start")
    with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        yield Calls(channel)
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.mark.parametrize("serving", [threaded, asynchronous])
def test_rpcs_wait_by_message_and_by_serialized_bytes(serving: Any) -> None:
    clock = FakeClock()
    with serving(limited("1/second, burst 1", direction="sent"), clock) as call:
        assert call("count_up", b"5") == ("OK", [b"0", b"1", b"2", b"3", b"4"])
        assert clock.now_us() == 4_000_000
        assert call("echo", *[b"x"] * 3) == ("OK", [b"x"] * 3)
        assert clock.now_us() == 7_000_000
        assert call("double", b"ab") == ("OK", [b"abab"])
        assert clock.now_us() == 8_000_000
    clock = FakeClock()
    with serving(limited("100/second", "bytes", direction="received"), clock) as call:
        assert call("total", b"a" * 50, b"b" * 50, b"c" * 100) == ("OK", [b"a" * 50 + b"b" * 50 + b"c" * 100])
        assert clock.now_us() == 3_000_000, "400 bytes, of which the first 100 pass at once"
        assert call("double", b"x" * 50) == ("OK", [b"x" * 100])
        assert clock.now_us() == 4_000_000


@pytest.mark.parametrize("serving", [threaded, asynchronous])
def test_rpcs_over_a_limit_are_dropped_or_aborted(serving: Any) -> None:
    with serving(limited("2/hour", direction="sent", on_excess="drop"), FakeClock()) as call:
        assert call("count_up", b"5") == ("OK", [b"0", b"1"])
        assert call("double", b"ab") == ("RESOURCE_EXHAUSTED", []), "a single response cannot be left out"
    with serving(limited("2/hour", direction="received", on_excess="drop"), FakeClock()) as call:
        assert call("total", *[b"x"] * 5) == ("OK", [b"xx"])
    with serving(limited("2/hour", direction="received", on_excess="close"), FakeClock()) as call:
        code, responses = call("echo", *[b"x"] * 5)
        assert (code, responses) == ("RESOURCE_EXHAUSTED", [b"x", b"x"])


# ---------------------------------------------------------------------------- what operators see


def test_outcomes_are_counted() -> None:
    async def run(app: Any) -> None:
        await talk(app, scope("/ws", "websocket"), CONNECT, *texts(*"abcde"), LEAVE)

    counts: Counter[tuple[str, str]] = Counter()
    for mode in ("wait", "drop", "close"):
        app = HeadgateMiddleware(
            starlette_echo(), limited("3/minute", direction="received", on_excess=mode), clock=FakeClock()
        )
        asyncio.run(run(app))
        counts.update(app.gate.message_counts)
    assert counts == {("chat", "delayed"): 2, ("chat", "dropped"): 2, ("chat", "closed"): 1}


def test_adapter_that_counts_no_messages_says_so(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("shop")
    Headgate(app, limited("1/hour", "bytes"))
    for _ in range(3):
        app.test_client().get("/").close()
    assert caplog.text.count("limit 'chat' counts bytes, which this adapter does not, so that it has no effect") == 1
    app.extensions["headgate"].gate.close()
