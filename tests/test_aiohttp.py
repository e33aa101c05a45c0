"""aiohttp behind a policy: a real server, and every kind of answer that it can give."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientResponse, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from headgate import Limit
from headgate.adapters.aiohttp import ADMISSION, setup
from headgate.adapters.gate import AsyncGate
from headgate.adapters.way import FREE, Arrival, current_admission
from headgate.policy.loading import read
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LIMIT_FIELDS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-policy", "ratelimit"}


def policy(text: str = "5/minute", **options: Any) -> Policy:
    return Policy((Rule("all", Limit.parse(text, name="all"), ("ip",), **options),))


def run(app: web.Application, conversation: Callable[[TestClient[Any, Any]], Awaitable[Any]]) -> Any:
    """What a conversation with a real server on loopback gives."""

    async def main() -> Any:
        async with TestClient(TestServer(app)) as client:
            return await conversation(client)

    return asyncio.run(main())


def application(*routes: web.RouteDef, **subapps: web.Application) -> web.Application:
    app = web.Application()
    app.add_routes(routes)
    for name, subapp in subapps.items():
        app.add_subapp(f"/{name}", subapp)
    return app


def names(answer: ClientResponse) -> set[str]:
    return {name.lower() for name in answer.headers}


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for chunk in (b"a", b"b"):
        await response.write(chunk)
    return response


async def missing(request: web.Request) -> web.Response:
    raise web.HTTPGone


async def broken(request: web.Request) -> web.Response:
    raise RuntimeError("broken")


KINDS = [web.get("/hello", hello), web.get("/stream", stream), web.get("/gone", missing), web.get("/broken", broken)]


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/hello", 200, b"hello"),
        ("HEAD", "/hello", 200, b""),
        ("GET", "/stream", 200, b"ab"),
        ("GET", "/gone", 410, b"410: Gone"),
        ("GET", "/nowhere", 404, b"404: Not Found"),
        ("OPTIONS", "/hello", 405, b"405: Method Not Allowed"),
        ("GET", "/sub/hello", 200, b"hello"),
        ("GET", "/sub/nowhere", 404, b"404: Not Found"),
        ("GET", "/broken", 500, None),
    ],
)
def test_every_answer_is_counted_once_and_told(method: str, path: str, status: int, body: bytes | None) -> None:
    app = application(*KINDS, sub=application(*KINDS))
    setup(app, policy("2/minute"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> None:
        for left in ("1", "0"):
            answer = await client.request(method, path)
            assert answer.status == status
            assert body is None or await answer.read() == body
            assert names(answer) >= LIMIT_FIELDS
            assert answer.headers.getall("X-RateLimit-Remaining") == [left]
        refused = await client.request(method, path)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "30")
        assert refused.headers["Content-Type"] == "application/problem+json"
        content = await refused.read()
        assert not content if method == "HEAD" else json.loads(content)["violated-policies"] == ["all"]

    run(app, conversation)


def test_of_a_handler_that_gives_nothing_aiohttp_tells(caplog: pytest.LogCaptureFixture) -> None:
    async def forgetful(request: web.Request) -> Any: ...

    app = application(web.get("/", forgetful))
    setup(app, read("limits: [{by: ip, bucket: 1/minute, count_when: status == 500}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get("/")).status for _ in range(2)]

    assert run(app, conversation) == [500, 429]
    assert "Missing return statement on request handler" in caplog.text


def test_exactly_as_many_pass_as_may() -> None:
    app = application(web.get("/", hello))
    setup(app, policy("20/minute"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return sorted([answer.status for answer in await asyncio.gather(*[client.get("/") for _ in range(60)])])

    assert run(app, conversation) == [200] * 20 + [429] * 40


def test_a_websocket_is_told_of_its_limits_and_refused() -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_str(message.data)
        return websocket

    app = application(web.get("/live", echo))
    setup(app, policy("1/minute"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> None:
        websocket = await client.ws_connect("/live")
        assert names(websocket._response) >= LIMIT_FIELDS
        await websocket.send_str("still there?")
        assert await websocket.receive_str() == "still there?"
        await websocket.close()
        with pytest.raises(WSServerHandshakeError) as caught:
            await client.ws_connect("/live")
        assert caught.value.status == 429

    run(app, conversation)


def test_a_stream_is_sent_as_it_is_made_and_holds_its_lease_to_the_end() -> None:
    go_on = asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await go_on.wait()
        await response.write(b"last")
        return response

    app = application(web.get("/", slowly))
    one = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")
    setup(app, Policy((Rule("one", one, ("ip",)),)))

    async def conversation(client: TestClient[Any, Any]) -> list[Any]:
        streaming = await client.get("/")
        first = await streaming.content.readany()
        denied = (await client.get("/")).status
        go_on.set()
        return [first, denied, await streaming.read(), (await client.get("/")).status]

    assert run(app, conversation) == [b"first", 429, b"last", 200]


def test_an_encoded_slash_leads_to_no_other_limit() -> None:
    app = application(web.get("/users/{id}", hello))
    setup(app, read("limits: [{path: '/users/{id}', by: ip, bucket: 1/minute}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get(path)).status for path in ("/users/1", "/users/a%2Fb", "/users/%61")]

    assert run(app, conversation) == [200, 429, 429]


@pytest.mark.parametrize(
    ("counted", "sent", "expected"),
    [
        ("401", (200, 401, 500, 200, 401, 200), [200, 401, 500, 200, 401, 429]),
        ("500", (200, 500, 401, 200, 500, 200), [200, 500, 401, 200, 500, 429]),
    ],
)
def test_answers_are_settled_by_their_status(counted: str, sent: tuple[int, ...], expected: list[int]) -> None:
    async def login(request: web.Request) -> web.Response:
        status = int(request.query["status"])
        if status == 401:
            raise web.HTTPUnauthorized
        if status == 500:
            raise RuntimeError("broken")
        return web.Response(status=status)

    app = application(web.get("/login", login))
    setup(app, read(f"limits: [{{by: ip, bucket: 2/minute, count_when: 'status == {counted}'}}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get(f"/login?status={status}")).status for status in sent]

    assert run(app, conversation) == expected


def test_the_app_says_what_a_request_has_cost() -> None:
    async def spend(request: web.Request) -> web.Response:
        assert request[ADMISSION] is current_admission()
        current_admission().commit(int(request.query["cost"]))
        return web.Response()

    app = application(web.get("/", spend))
    setup(app, read("limits: [{by: ip, bucket: 10/minute, reserve: 5}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get(f"/?cost={cost}")).status for cost in (1, 1, 4, 0)]

    assert run(app, conversation) == [200, 200, 200, 429]


def test_a_route_that_is_exempt_is_untouched() -> None:
    async def look(request: web.Request) -> web.Response:
        return web.json_response([ADMISSION in request, current_admission() is FREE])

    app = application(web.get("/health", look))
    setup(app, read("routes: [{path: /health, cost: 0}]\nlimits: [{by: ip, bucket: 1/minute}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> None:
        for _ in range(3):
            answer = await client.get("/health")
            assert not LIMIT_FIELDS & names(answer)
            assert await answer.json() == [False, True]

    run(app, conversation)


def test_users_are_who_middlewares_further_out_say() -> None:
    who = web.RequestKey("who", str)

    @web.middleware
    async def sign_in(request: web.Request, handler: Any) -> web.StreamResponse:
        request[who] = request.headers["X-User"]
        return await handler(request)  # type: ignore[no-any-return]

    async def user(arrival: Arrival) -> str:
        return str(arrival.native[who])

    app = application(web.get("/", hello))
    app.middlewares.append(sign_in)
    setup(app, read("limits: [{by: user, bucket: 1/minute}]"), identities={"user": user}, clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get("/", headers={"X-User": name})).status for name in ("ada", "bob", "ada")]

    assert run(app, conversation) == [200, 200, 429]


@pytest.mark.parametrize(("mode", "expected"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 429, 429])])
def test_a_store_that_is_away_is_answered_for(mode: Any, expected: list[int]) -> None:
    app = application(web.get("/", hello))
    setup(app, policy(on_failure=mode), "redis://127.0.0.1:1/0")

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get("/")).status for _ in range(3)]

    assert run(app, conversation) == expected


def test_the_store_is_closed_when_the_app_ends() -> None:
    class Watched(AsyncGate):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            await super().close()

    app, gate = application(web.get("/", hello)), Watched(policy())
    assert setup(app, gate=gate) is gate

    async def conversation(client: TestClient[Any, Any]) -> int:
        await client.get("/")
        return gate.closed

    assert (run(app, conversation), gate.closed) == (0, 1)


def test_a_gate_needs_a_policy() -> None:
    with pytest.raises(TypeError, match="give a policy"):
        setup(web.Application())
