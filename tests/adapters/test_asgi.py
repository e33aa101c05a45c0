"""The ASGI middleware in front of real apps of four frameworks, and of hand-made ones where it gets rough."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import litestar
import litestar.response
import pytest
import quart
from aiohttp import web
from fastapi import APIRouter, BackgroundTasks, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute

from headgate.adapters.aiohttp import setup as setup_aiohttp
from headgate.adapters.asgi import AsgiRequest, HeadgateMiddleware
from headgate.adapters.fastapi import FastAPILimits
from headgate.adapters.grpc import AsyncHeadgateInterceptor, HeadgateInterceptor
from headgate.adapters.wsgi import HeadgateMiddleware as WsgiMiddleware
from headgate.errors import InvalidConfiguration, InvalidPolicy
from headgate.gate.admission import UNLIMITED, current_admission
from headgate.gate.gate import AsyncGate
from headgate.policy.loader import read
from headgate.policy.model import Policy
from headgate.testing import FakeClock
from support.asgi_client import PEER, ask, client, fields, knock, live, scope, statuses, talk
from support.sites import END_OF_BODY, policy_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from starlette.requests import Request

    from headgate.gate.admission import Admission, RequestInfo
    from support.servers import RedisServer

LIMIT_FIELDS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-policy", "ratelimit"}
ONE_AT_ONCE = "limits: [{name: one, by: ip, bucket: {algorithm: concurrency, quota: 1, period: 1 minute}}]"


def gated(app: Any, policy: str, store: Any = "memory://", **options: Any) -> HeadgateMiddleware:
    if store == "memory://":
        options = {"clock": FakeClock(), **options}
    return HeadgateMiddleware(app, read(policy), store, **options)


def per_ip(text: str, **more: Any) -> str:
    return json.dumps({"limits": [{"name": "all", "by": "ip", "bucket": text, **more}]})


@pytest.mark.parametrize("policy", [{"limits": []}, b"limits.yaml", 5])
def test_what_is_no_policy_is_refused_by_name(policy: Any) -> None:
    told = f"^expected a policy file path or a Policy, got {type(policy).__name__}$"
    with pytest.raises(InvalidConfiguration, match=told):
        HeadgateMiddleware(starlette_app(), policy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda **it: HeadgateMiddleware(FastAPI(), Policy(), **it), "HeadgateMiddleware has no option 'storage'"),
        (
            lambda **it: HeadgateMiddleware(FastAPI(), gate=AsyncGate(Policy()), **it),
            "HeadgateMiddleware has no option",
        ),
        (lambda **it: WsgiMiddleware(lambda environ, start: [], Policy(), **it), "HeadgateMiddleware has no option"),
        (lambda **it: FastAPILimits(**it), "FastAPILimits has no option 'storage'"),
        (lambda **it: setup_aiohttp(web.Application(), Policy(), **it), "setup() has no option 'storage'"),
        (lambda **it: HeadgateInterceptor(Policy(), **it), "HeadgateInterceptor has no option 'storage'"),
        (lambda **it: AsyncHeadgateInterceptor(Policy(), **it), "AsyncHeadgateInterceptor has no option 'storage'"),
        (lambda **it: AsyncGate(Policy(), **it), "AsyncGate has no option 'storage'"),
    ],
)
def test_unknown_option_is_named_with_the_nearest_one(make: Any, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{re.escape(message)}.*; did you mean 'store'\\?$"):
        make(storage="memory://")
    with pytest.raises(InvalidConfiguration, match=r"has no option 'xyz'; it has .*budget, .*"):
        make(xyz=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"reload_every": "1"}, "reload_every '1': give seconds above 0, or None to disable reloading"),
        ({"reload_every": 0}, "reload_every 0: give seconds above 0, or None to disable reloading"),
        ({"reload_every": True}, "reload_every True: give seconds above 0, or None to disable reloading"),
        ({"on_decision": "print"}, "on_decision 'print' cannot be called: give a function"),
        ({"refusal_body": b"no"}, "refusal_body b'no' cannot be called: give a function"),
        ({"identities": {"user": "ada"}}, "identities['user'] 'ada' cannot be called: give a function"),
    ],
)
def test_option_that_cannot_work_is_refused_at_once(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{re.escape(told)}$"):
        gated(starlette_app(), per_ip("1/s"), **options)


# ---------------------------------------------------------------------------- the same small app in each framework


async def chunks() -> AsyncIterator[bytes]:
    for chunk in (b"a", b"b"):
        yield chunk


def starlette_app() -> Any:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(chunks())

    async def broken(request: Request) -> PlainTextResponse:
        raise RuntimeError("broken")

    async def echo(websocket: Any) -> None:
        await websocket.accept()

    routes = [Route("/hello", hello), Route("/stream", stream), Route("/broken", broken), WebSocketRoute("/ws", echo)]
    return Starlette(routes=[*routes, Mount("/sub", Starlette(routes=[Route("/hello", hello)]))])


def fastapi_app() -> Any:
    app, router = FastAPI(), APIRouter(prefix="/sub")

    @router.get("/hello")
    @app.get("/hello", response_class=PlainTextResponse)
    def hello() -> str:
        return "hello"

    @app.get("/stream")
    def stream() -> StreamingResponse:
        return StreamingResponse(chunks())

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("broken")

    @app.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()

    app.include_router(router)
    return app


def litestar_app() -> Any:
    @litestar.get("/hello")
    async def hello() -> str:
        return "hello"

    @litestar.get("/stream")
    async def stream() -> litestar.response.Stream:
        return litestar.response.Stream(chunks())

    @litestar.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @litestar.websocket("/ws")
    async def echo(socket: litestar.WebSocket[Any, Any, Any]) -> None:
        await socket.accept()

    sub = litestar.Router("/sub", route_handlers=[hello])
    return litestar.Litestar([hello, stream, broken, echo, sub], logging_config=None)


def quart_app() -> Any:
    app, sub = quart.Quart("app"), quart.Blueprint("sub", "sub")

    @sub.get("/hello")
    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    @app.get("/stream")
    async def stream() -> Any:
        return chunks()

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.websocket("/ws")
    async def echo() -> None:
        await quart.websocket.accept()

    app.register_blueprint(sub, url_prefix="/sub")
    return app


every_framework = pytest.mark.parametrize("make", [starlette_app, fastapi_app, litestar_app, quart_app])


@every_framework
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/hello", 200),
        ("HEAD", "/stream", {200, 405}),
        ("OPTIONS", "/hello", {200, 204, 405}),
        ("DELETE", "/hello", 405),
        ("GET", "/stream", 200),
        ("GET", "/broken", 500),
        ("GET", "/sub/hello", 200),
        ("GET", "/sub/nowhere", 404),
        ("GET", "/nowhere", 404),
        ("MADEUP", "/hello", {400, 405}),
    ],
)
def test_every_response_is_counted_and_has_headers(
    make: Callable[[], Any], method: str, path: str, status: Any
) -> None:
    app = gated(make(), per_ip("2/minute"))
    first, second, refused = ask(app, *[(method, path)] * 3)
    assert first.status_code in (status if isinstance(status, set) else {status})
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert [answer.headers.get_list("x-ratelimit-remaining") for answer in (first, second)] == [["1"], ["0"]]
    assert set(first.headers) >= LIMIT_FIELDS
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    assert set(refused.headers) >= {*LIMIT_FIELDS, "cache-control", "content-type", "content-length"}
    assert not refused.content if method == "HEAD" else refused.json()["violated-policies"] == ["all"]


@every_framework
def test_exactly_as_many_pass_as_may(make: Callable[[], Any], redis7: RedisServer, unique: str) -> None:
    """Of 200 that come at once to two machines."""
    policy = json.dumps({"limits": [{"name": unique, "by": "ip", "bucket": "60/hour"}]})
    machines = [gated(make(), policy, redis7.url, budget=5) for _ in range(2)]

    async def run() -> list[int]:
        async with client(machines[0]) as one, client(machines[1]) as other:
            answers = await asyncio.gather(*[machine.get("/hello") for machine in (one, other) for _ in range(100)])
        for machine in machines:
            await machine.gate.close()
        return statuses(answers)

    got = asyncio.run(run())
    assert (got.count(200), got.count(429)) == (60, 140)


@every_framework
def test_websocket_is_limited_and_gets_headers(make: Callable[[], Any]) -> None:
    app = gated(make(), per_ip("1/minute"))
    accepted, *_ = knock(app, "/ws")
    assert (accepted["type"], set(fields(accepted)) >= LIMIT_FIELDS) == ("websocket.accept", True)
    start, body = knock(app, "/ws")
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 429)
    assert fields(start)["content-type"] == "application/problem+json"
    assert (body["type"], json.loads(body["body"])["status"]) == ("websocket.http.response.body", 429)
    assert knock(app, "/ws", extensions={}) == [{"type": "websocket.close", "code": 1013}]


@every_framework
def test_lifespan_is_the_apps_own_and_closes_the_gate(make: Callable[[], Any]) -> None:
    gate = WatchedGate(read(per_ip("1/minute")))
    sent = asyncio.run(live(HeadgateMiddleware(make(), gate=gate)))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert gate.closed == 1


# ------------------------------------------------------------------------------------------------------- lifespan


class WatchedGate(AsyncGate):
    closed = 0

    async def close(self) -> None:
        self.closed += 1
        await super().close()


async def only_http(scope: Any, receive: Any, send: Any) -> None:
    """Like many small apps: it has never heard of a lifespan."""
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"kept")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def ignores_lifespan(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await only_http(scope, receive, send)


@pytest.mark.parametrize("app", [only_http, ignores_lifespan])
def test_app_without_a_lifespan_is_served_and_closed_as_well(app: Any) -> None:
    gate = WatchedGate(read(per_ip("1/minute")))
    sent = asyncio.run(live(HeadgateMiddleware(app, gate=gate)))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert gate.closed == 1


def test_gate_is_closed_after_the_app_and_before_the_server_hears_of_it() -> None:
    order: list[str] = []

    class Gate(AsyncGate):
        async def close(self) -> None:
            order.append("gate")
            await super().close()

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
        yield {"state": "kept"}
        order.append("app")

    async def run() -> None:
        events = iter(["lifespan.startup", "lifespan.shutdown"])
        told: dict[str, Any] = {"type": "lifespan", "state": {}}

        async def receive() -> dict[str, str]:
            return {"type": next(events)}

        async def send(message: Any) -> None:
            order.append(message["type"])

        await HeadgateMiddleware(Starlette(lifespan=lifespan), gate=Gate(read(per_ip("1/minute"))))(told, receive, send)
        assert told["state"] == {"state": "kept"}

    asyncio.run(run())
    assert order == ["lifespan.startup.complete", "app", "gate", "lifespan.shutdown.complete"]


def test_app_that_cannot_start_says_so_itself() -> None:
    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        raise RuntimeError("no database")
        yield

    app = gated(Starlette(lifespan=lifespan), per_ip("1/minute"))
    with pytest.raises(RuntimeError, match="no database"):
        asyncio.run(live(app))


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
def test_bad_policy_of_a_middleware_that_is_made_late_keeps_the_server_from_starting(
    kind: type[Any], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("limits: [{by: ip, bukcet: 1/minute}]")
    app = kind()
    app.add_middleware(HeadgateMiddleware, file)
    (sent,) = asyncio.run(live(app))
    mistake = f"{file}:1:19: unknown field 'bukcet'; did you mean 'bucket'?"
    assert sent == {"type": "lifespan.startup.failed", "message": f"headgate: {mistake}"}
    assert statuses(ask(app, "/", "/")) == [500, 500]
    for _ in range(2):
        with pytest.raises(InvalidPolicy) as told:
            asyncio.run(talk(app, scope("/")))
        assert str(told.value) == mistake


def test_invalid_policy_is_rejected_by_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(InvalidPolicy, match="cannot be read"):
        HeadgateMiddleware(FastAPI(), tmp_path / "nowhere.yaml")


# ---------------------------------------------------------------------------------------------- streams and their ends


def test_stream_is_neither_buffered_nor_hurried() -> None:
    made: list[int] = []

    async def run() -> None:
        first, go_on = asyncio.Event(), asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            for number in range(100):
                made.append(number)
                yield b"%d" % number

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                first.set()
                await go_on.wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def endpoint(request: Request) -> StreamingResponse:
            return StreamingResponse(endless())

        app = gated(Starlette(routes=[Route("/", endpoint)]), ONE_AT_ONCE)
        task = asyncio.create_task(app(scope(), receive, send))
        await first.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert made == [0]  # the client has not taken the first chunk yet
        go_on.set()
        await task

    asyncio.run(run())
    assert len(made) == 100


def test_retry_after_of_a_concurrency_limit_follows_how_long_requests_take() -> None:
    clock = FakeClock()
    refused: list[Any] = []

    async def app(scope_: Any, receive: Any, send: Any) -> None:
        start, *_ = await talk(gate, scope("/inner"))
        refused.append((start["status"], fields(start)["retry-after"]))
        clock.advance(3)
        await PlainTextResponse("hello")(scope_, receive, send)

    async def run() -> None:
        for _ in range(2):
            assert (await talk(gate, scope()))[0]["status"] == 200

    gate = gated(app, ONE_AT_ONCE, clock=clock)
    asyncio.run(run())
    assert refused == [(429, "2"), (429, "3")]


def test_background_tasks_run_and_hold_nothing() -> None:
    async def run() -> None:
        done, go_on = asyncio.Event(), asyncio.Event()

        async def later() -> None:
            await go_on.wait()
            done.set()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            answer = PlainTextResponse("hello", background=BackgroundTask(later) if scope["path"] == "/later" else None)
            await answer(scope, receive, send)

        gate = gated(app, ONE_AT_ONCE)
        running = asyncio.create_task(talk(gate, scope("/later")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await talk(gate, scope()))[0]["status"] == 200
        assert not done.is_set()
        go_on.set()
        await running
        assert done.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("answers_first", [True, False])
def test_client_that_goes_away_settles_and_leaves(answers_first: bool) -> None:
    """A server cancels the app; what was held is left, what was reserved is charged by how far the answer came."""
    policy = json.dumps(
        {
            "limits": [
                {"name": "one", "by": "ip", "bucket": {"algorithm": "concurrency", "quota": 1, "period": "1 minute"}},
                {"name": "served", "by": "ip", "bucket": "1/minute", "count_when": "status < 500"},
            ]
        }
    )

    async def run() -> None:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if answers_first:
                await send({"type": "http.response.start", "status": 200})
            started.set()
            await go_on.wait()
            await only_http(scope, receive, send)

        gate = gated(app, policy)
        task = asyncio.create_task(talk(gate, scope()))
        await started.wait()
        assert (await talk(gate, scope()))[0]["status"] == 429
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert (await talk(gate, scope()))[0]["status"] == (429 if answers_first else 200)

    asyncio.run(run())


def test_what_was_held_is_left_even_if_the_server_loses_patience() -> None:
    class Slow(AsyncGate):
        async def finish(self, admission: Admission, status: int) -> None:
            await leaving.wait()
            await super().finish(admission, status)
            left.set()

    leaving, left, started = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async def run() -> None:
        gate = Slow(read(ONE_AT_ONCE))
        task = asyncio.create_task(talk(HeadgateMiddleware(app, gate=gate), scope()))
        await started.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        leaving.set()
        await asyncio.wait_for(left.wait(), 5)
        assert (await gate.admit(AsgiRequest(scope()))).allowed

    asyncio.run(run())


def test_refusal_of_head_has_no_body() -> None:
    gate = gated(only_http, per_ip("1/minute"))
    _, (start, body) = (asyncio.run(talk(gate, scope(method="HEAD"))) for _ in range(2))
    assert (start["status"], int(fields(start)["content-length"]) > 0, body["body"]) == (429, True, b"")


@every_framework
def test_exceptions_settle_as_500(make: Callable[[], Any]) -> None:
    app = gated(make(), per_ip("1/minute", count_when="status == 500"))
    assert statuses(ask(app, "/hello", "/hello", "/broken", "/hello")) == [200, 200, 500, 429]


def test_app_that_raises_without_an_answer_settles_as_500() -> None:
    app = gated(only_http, per_ip("1/minute", count_when="status == 500"))
    with pytest.raises(NotImplementedError):
        knock(app, "/")
    assert statuses(ask(app, "/")) == [429]


def test_websocket_that_the_app_turns_away_settles_as_403() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 1008})

    gate = gated(app, per_ip("1/minute", count_when="status == 403"))
    assert [knock(gate, "/")[0]["type"] for _ in range(2)] == ["websocket.close", "websocket.http.response.start"]


def test_message_that_an_app_sends_again_and_again_stays_its_own() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"kept")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body"})

    for policy in (per_ip("9/minute"), per_ip("9/minute", count_when="status == 500")):
        answers = ask(gated(app, policy), "/", "/")
        assert [answer.headers.get_list("x-ratelimit-limit") for answer in answers] == [["9"], ["9"]]
    assert start["headers"] == [(b"x-mine", b"kept")]


# ------------------------------------------------------------------------------------------------- what the app is told


def test_app_finds_its_own_admission_and_no_other() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = current_admission()
        body = b"free" if found is UNLIMITED else b"%d" % found.decision.remaining  # type: ignore[union-attr]
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": body})

    gate = gated(app, "routes: [{path: /health, cost: 0}]\nlimits: [{by: ip, bucket: 5/minute}]")
    health, one, again, two = ask(gate, "/health", "/", "/health", "/")  # all in one task
    assert [answer.text for answer in (health, one, again, two)] == ["free", "4", "free", "3"]
    assert not LIMIT_FIELDS & set(health.headers)


def test_app_says_what_a_request_has_cost() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        current_admission().commit(int(scope["path"][1:]))
        await only_http(scope, receive, send)

    gate = gated(app, per_ip("10/minute", reserve=5))
    assert statuses(ask(gate, "/1", "/1", "/4", "/0")) == [200, 200, 200, 429]


def test_commit_after_the_response_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await only_http(scope, receive, send)
        current_admission().commit(1)

    gate = gated(app, per_ip("10/minute", reserve=5))
    assert statuses(ask(gate, "/", "/", "/")) == [200, 200, 429]
    too_late = "commit(1) ignored: the response was already sent and the request settled"
    assert caplog.messages == [too_late] * 2


# ----------------------------------------------------------------------------------------------------------- who it is


async def tenant(request: RequestInfo) -> str | None:
    await asyncio.sleep(0)
    return next(iter(request.header("x-tenant")), None)


async def broken_tenant(request: RequestInfo) -> str:
    raise RuntimeError("no such table")


@pytest.mark.parametrize(
    ("function", "expected"), [(tenant, [200, 200, 429]), (broken_tenant, [200, 429, 429])], ids=["works", "fails"]
)
def test_functions_may_be_asynchronous(function: Any, expected: list[int]) -> None:
    app = gated(only_http, "limits: [{by: tenant, bucket: 1/minute}]", identities={"tenant": function})
    answers = [ask(app, "/", headers={"x-tenant": name})[0] for name in ("a", "b", "a")]
    assert statuses(answers) == expected


def test_authenticated_user_is_counted_by_name() -> None:
    gate = gated(only_http, "limits: [{by: user, bucket: 1/minute}]")

    class Unnamed:
        is_authenticated = True
        username = "eve"

        @property
        def identity(self) -> str:
            raise NotImplementedError

    users: list[Any] = [
        SimpleNamespace(is_authenticated=True, identity="ada"),
        SimpleNamespace(is_authenticated=True, username="bob"),
        Unnamed(),
        SimpleNamespace(is_authenticated=False, username="nobody"),
        None,
        SimpleNamespace(is_authenticated=True, display_name="ada"),
        SimpleNamespace(is_authenticated=True, username="eve"),
    ]
    got = [asyncio.run(talk(gate, scope(user=user)))[0]["status"] for user in users]
    assert got == [200, 200, 200, 200, 429, 429, 429]  # the two without a name share their address


MEGABYTE = "6" * 2**20
TRUSTING = '{"identity": {"proxies": ["10.0.0.0/8"]}, "limits": [{"by": "ip", "bucket": "1/minute"}]}'
BY_KEY = '{"limits": [{"by": "api_key", "bucket": "1/minute"}]}'
PLAIN = per_ip("1/minute")


@pytest.mark.parametrize(
    ("policy", "peer", "attempts"),
    [
        (PLAIN, "6.6.6.6", [[("x-forwarded-for", f"1.1.1.{number}")] for number in range(3)]),
        (
            PLAIN,
            "6.6.6.6",
            [[("x-real-ip", f"1.1.1.{number}"), ("forwarded", f"for=1.1.1.{number}")] for number in range(3)],
        ),
        (TRUSTING, "6.6.6.6", [[("x-forwarded-for", f"1.1.1.{number}")] for number in range(3)]),
        (TRUSTING, "10.0.0.1", [[("x-forwarded-for", f"1.1.1.{number}, 6.6.6.6")] for number in range(3)]),
        (
            TRUSTING,
            "10.0.0.1",
            [[("x-forwarded-for", f"1.1.1.{number}"), ("x-forwarded-for", "6.6.6.6")] for number in range(3)],
        ),
        (TRUSTING, "10.0.0.1", [[("x-forwarded-for", f"{number}{MEGABYTE}, 6.6.6.6")] for number in range(3)]),
        (TRUSTING, "10.0.0.1", [[("x-forwarded-for", f"6.6.6.6, {number}{MEGABYTE}")] for number in range(3)]),
        (BY_KEY, "6.6.6.6", [[("x-api-key", f"a{number}"), ("x-api-key", "b")] for number in range(3)]),
        (BY_KEY, "6.6.6.6", [[("x-api-key", f"{number}{MEGABYTE}")] for number in range(3)]),
        (
            BY_KEY,
            "6.6.6.6",
            [[("x-api-key", f"a{number}{end}")] for number, end in enumerate(("\r\nx: y", "\0", "\x7f"))],
        ),
        (
            BY_KEY,
            "6.6.6.6",
            [[("authorization", f"Bearer a{number}"), ("authorization", "Bearer b")] for number in range(3)],
        ),
        (PLAIN, "6.6.6.6", [[("x-ratelimit-cost", "0")], [("cost", "-5")], [("x-cost", "0"), ("ratelimit", "r=99")]]),
        (
            PLAIN.replace('"by"', '"methods": ["POST"], "by"'),
            "6.6.6.6",
            [[("x-http-method-override", method)] for method in ("GET", "OPTIONS", "HEAD")],
        ),
    ],
)
def test_request_contents_do_not_escape_limits(policy: str, peer: str, attempts: list[list[tuple[str, str]]]) -> None:
    gate = gated(only_http, policy)
    got = []
    for headers in attempts:
        sent = [(name.encode(), value.encode()) for name, value in headers]
        answer = asyncio.run(talk(gate, scope(method="POST", headers=sent, client=(peer, 1))))
        got.append(answer[0]["status"])
    assert got == [200, 429, 429]


@pytest.mark.parametrize("value", ["\r\nset-cookie: x", "\0", "ü", "%all", "|", "a" * 5000, "{tag}"])
def test_no_identity_reaches_an_answer(value: str) -> None:
    app = gated(only_http, "limits: [{by: tenant, bucket: 1/minute}]", identities={"tenant": lambda request: value})
    allowed, refused = ask(app, "/", "/")
    assert statuses([allowed, refused]) == [200, 429]
    for answer in (allowed, refused):
        assert value not in answer.text + " ".join(answer.headers.values())


def test_request_without_a_peer_is_counted() -> None:
    """As over a Unix socket."""
    gate = gated(only_http, per_ip("1/minute"))
    assert [asyncio.run(talk(gate, scope(client=None)))[0]["status"] for _ in range(2)] == [200, 429]


def test_random_keys_fill_no_memory() -> None:
    random.seed(7)
    policy = '{"limits": [{"by": "api_key", "bucket": "5/minute"}]}'
    gate = gated(only_http, policy, max_keys=1000)

    async def run() -> None:
        for _ in range(20_000):
            key = b"%x" % random.getrandbits(64)
            await gate.gate.admit(AsgiRequest(scope(headers=[(b"x-api-key", key)])))

    asyncio.run(run())
    assert gate.gate._limiter.stats.keys <= 1000


# ------------------------------------------------------------------------------------------------ a store that is away


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


@pytest.mark.parametrize("place", ["refused", "silent"])
def test_store_that_is_away_costs_milliseconds_and_each_route_answers_for_itself(place: str, silent: str) -> None:
    policy = """
        on_failure: open
        routes: [{path: /pay, on_failure: closed}, {path: /login, on_failure: local}]
        limits: [{by: ip, bucket: 10/minute}]
    """
    gate = gated(only_http, policy, silent if place == "silent" else "redis://127.0.0.1:1/0")
    start = time.monotonic()
    opened, closed, local = (ask(gate, *[path] * 20) for path in ("/search", "/pay", "/login"))
    took = time.monotonic() - start
    assert statuses(opened) == [200] * 20
    assert statuses(closed) == [503] * 20
    assert statuses(local) == [200] * 2 + [429] * 18
    assert not LIMIT_FIELDS & {*opened[0].headers, *closed[0].headers}
    assert (closed[0].headers["retry-after"], closed[0].json()["error"]) == ("1", "limiter_unavailable")
    assert took < 3  # 60 requests: what a single one costs elsewhere


def test_streams_websockets_and_background_tasks_are_unchanged() -> None:
    """P19: all three broke under a middleware that buffers answers."""
    app, events = FastAPI(), list[str]()

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"one", b"two"):
            events.append(f"made {chunk.decode()}")
            yield chunk

    @app.get("/stream")
    async def stream(later: BackgroundTasks) -> StreamingResponse:
        later.add_task(events.append, "afterwards")
        return StreamingResponse(chunks(), background=later)

    @app.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    gated = HeadgateMiddleware(app, read(policy_json({"by": "ip", "bucket": "2/hour"})), clock=FakeClock())

    async def send(message: Any) -> None:
        if message.get("body"):
            events.append(f"sent {message['body'].decode()}")

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()  # a client that stays

    asyncio.run(gated(scope("/stream"), receive, send))
    assert events == ["made one", "sent one", "made two", "sent two", "afterwards"]
    said = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hello"}]
    accepted, echoed, *_ = asyncio.run(talk(gated, scope("/ws", "websocket"), *said))
    assert (accepted["type"], echoed["text"]) == ("websocket.accept", "hello")
    assert knock(gated, "/ws")[0]["status"] == 429


def test_headers_of_the_app_are_kept() -> None:
    """P19: answers of the app keep their own headers, whatever they are called, beside those of the gate."""
    app = Starlette()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"7"), (b"vary", b"a")]}
        )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    app.mount("/inner", inner)
    gated = HeadgateMiddleware(app, read(policy_json({"by": "ip", "bucket": "2/hour"})), clock=FakeClock())
    start, _ = asyncio.run(talk(gated, scope("/inner/x", client=(PEER, 1)), END_OF_BODY))
    assert [name for name, _ in start["headers"]][:2] == [b"x-request-id", b"vary"]
    assert len(start["headers"]) == 2 + 5
