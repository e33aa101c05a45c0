"""aiohttp behind a policy: a real server, and every kind of answer that it can give."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientResponse, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from headgate import Limit
from headgate.adapters.aiohttp import ADMISSION, exempt, limit, setup
from headgate.errors import InvalidConfiguration
from headgate.gate.admission import UNLIMITED, current_admission
from headgate.gate.gate import AsyncGate
from headgate.policy.loader import read
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headgate.gate.admission import RequestInfo

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
def test_every_response_is_counted_once_and_has_headers(
    method: str, path: str, status: int, body: bytes | None
) -> None:
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


def test_handler_without_response_is_an_aiohttp_error(caplog: pytest.LogCaptureFixture) -> None:
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


def test_websocket_is_limited_and_gets_headers() -> None:
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


def test_stream_is_sent_as_it_is_made_and_holds_its_lease_to_the_end() -> None:
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


def test_encoded_slash_leads_to_no_other_limit() -> None:
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


def test_app_says_what_a_request_has_cost() -> None:
    async def spend(request: web.Request) -> web.Response:
        assert request[ADMISSION] is current_admission()
        current_admission().commit(int(request.query["cost"]))
        return web.Response()

    app = application(web.get("/", spend))
    setup(app, read("limits: [{by: ip, bucket: 10/minute, reserve: 5}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get(f"/?cost={cost}")).status for cost in (1, 1, 4, 0)]

    assert run(app, conversation) == [200, 200, 200, 429]


def test_route_that_is_exempt_is_untouched() -> None:
    async def look(request: web.Request) -> web.Response:
        return web.json_response([ADMISSION in request, current_admission() is UNLIMITED])

    app = application(web.get("/health", look))
    setup(app, read("routes: [{path: /health, cost: 0}]\nlimits: [{by: ip, bucket: 1/minute}]"), clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> None:
        for _ in range(3):
            answer = await client.get("/health")
            assert not LIMIT_FIELDS & names(answer)
            assert await answer.json() == [False, True]

    run(app, conversation)


def test_user_is_read_from_outer_middleware() -> None:
    who = web.RequestKey("who", str)

    @web.middleware
    async def sign_in(request: web.Request, handler: Any) -> web.StreamResponse:
        request[who] = request.headers["X-User"]
        return await handler(request)  # type: ignore[no-any-return]

    async def user(request: RequestInfo) -> str:
        return str(request.native[who])

    app = application(web.get("/", hello))
    app.middlewares.append(sign_in)
    setup(app, read("limits: [{by: user, bucket: 1/minute}]"), identities={"user": user}, clock=FakeClock())

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get("/", headers={"X-User": name})).status for name in ("ada", "bob", "ada")]

    assert run(app, conversation) == [200, 200, 429]


@pytest.mark.parametrize(("mode", "expected"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 429, 429])])
def test_store_that_is_away_is_answered_for(mode: Any, expected: list[int]) -> None:
    app = application(web.get("/", hello))
    setup(app, policy(on_failure=mode), "redis://127.0.0.1:1/0")

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        return [(await client.get("/")).status for _ in range(3)]

    assert run(app, conversation) == expected


def test_store_is_closed_when_the_app_ends() -> None:
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


def test_gate_needs_a_policy() -> None:
    with pytest.raises(TypeError, match="give a policy"):
        setup(web.Application())


# ------------------------------------------------------------------ limits on handlers


def asked(app: web.Application, *requests: str, headers: list[dict[str, str]] | None = None) -> list[int]:
    """The statuses of the answers to requests like "/path" or "POST /path"."""

    async def conversation(client: TestClient[Any, Any]) -> list[int]:
        found = []
        for number, each in enumerate(requests):
            method, _, path = each.rpartition(" ")
            sent = headers[number] if headers else {}
            async with client.request(method or "GET", path, headers=sent) as answer:
                await answer.read()
                found.append(answer.status)
        return found

    statuses: list[int] = run(app, conversation)
    return statuses


def limited_app(*routes: web.RouteDef, policy: Policy | None = None, **options: Any) -> web.Application:
    app = application(*routes)
    setup(app, Policy() if policy is None else policy, **{"clock": FakeClock(), **options})
    return app


@limit("1/minute")
class Orders(web.View):
    async def get(self) -> web.Response:
        return web.Response(text="orders")

    @limit("1/hour", name="placing")
    async def post(self) -> web.Response:
        return web.Response(text="placed")


class Shop:
    @limit("1/minute")
    async def index(self, request: web.Request) -> web.Response:
        return web.Response(text=request.path)


def test_handlers_classes_and_methods_are_limited() -> None:
    app = limited_app(
        web.get("/items/{id}", limit("1/minute")(hello)), web.view("/orders", Orders), web.get("/shop", Shop().index)
    )
    assert asked(app, "/items/1", "/items/2", "/orders", "/orders", "/shop", "/shop") == [200, 429] * 3
    app = limited_app(web.view("/orders", Orders))
    assert asked(app, "POST /orders", "POST /orders") == [200, 429]


def test_refusal_by_a_handler_gives_back_what_the_policy_has_charged() -> None:
    app = limited_app(
        web.get("/", limit("1/minute", by="global")(limit("5/hour; 9/day")(hello))),
        web.get("/other", hello),
        policy=policy("3/minute"),
    )

    async def conversation(client: TestClient[Any, Any]) -> None:
        answers = [await client.get("/") for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 429, 429, 429]
        assert answers[0].headers["ratelimit-policy"] == (
            '"all";q=3;w=60, "1/minute by global";q=1;w=60, "5/hour by ip";q=5;w=3600, "9/day by ip";q=9;w=86400'
        )
        assert answers[0].headers.getall("x-ratelimit-limit") == ["1"]
        assert answers[3].headers["ratelimit"].startswith('"1/minute by global";r=0;t=60, "5/hour by ip";r=4;')
        assert (await answers[3].json())["violated-policies"] == ["1/minute by global"]
        assert (await client.get("/other")).headers["x-ratelimit-remaining"] == "1"

    run(app, conversation)


async def from_device(request: web.Request) -> str | None:
    await asyncio.sleep(0)
    return request.headers.get("x-device")


def test_identity_function_may_be_async() -> None:
    app = limited_app(web.get("/", limit("1/minute", by=from_device)(hello)))
    devices = [{"x-device": "a"}, {"x-device": "b"}, {"x-device": "a"}, {}, {}]
    assert asked(app, *["/"] * 5, headers=devices) == [200, 200, 429, 200, 429]


def test_leases_and_costs_of_a_handler_are_settled_with_its_answer() -> None:
    one = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")

    async def login(request: web.Request) -> web.Response:
        return web.Response(status=int(request.query["status"]))

    app = limited_app(
        *[web.get(each.path, limit(one)(each.handler)) for each in KINDS],
        web.get("/login", limit("1/minute", count_when="status == 401")(login)),
    )
    logins = [f"/login?status={status}" for status in (200, 401, 200)]
    answers = asked(app, "/hello", "/stream", "/gone", "/broken", "/hello", *logins)
    assert answers == [200, 200, 410, 500, 200, 200, 401, 429]


def test_what_a_handler_was_granted_ends_with_its_request() -> None:
    """A connection serves all of its requests in one task, whose context must not keep an admission."""

    async def look(request: web.Request) -> web.Response:
        return web.json_response(current_admission().decision is not None)

    app = limited_app(web.get("/limited", limit("5/minute")(look)), web.get("/free", look))

    async def conversation(client: TestClient[Any, Any]) -> list[bool]:
        return [await (await client.get(path)).json() for path in ("/limited", "/free")]

    assert run(app, conversation) == [True, False]


def test_exempt_handlers_are_left_out_of_the_policy() -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response(text="fine")

    class Pages(web.View):
        async def get(self) -> web.Response:
            return web.Response(text="page")

    subapp = application(web.get("/health", exempt(health)))
    app = application(
        web.view("/pages", exempt(Pages)),
        web.get("/own", exempt(limit("1/hour")(health))),
        web.get("/", hello),
        sub=subapp,
    )
    setup(app, policy("1/minute"), clock=FakeClock())
    assert asked(app, *["/sub/health", "/pages"] * 2, "/own", "/own", "/", "/") == [200] * 5 + [429, 200, 429]


def test_handler_without_a_gate_says_so() -> None:
    with pytest.raises(InvalidConfiguration, match=r"call setup\(app, policy\), with Policy\(\)"):
        asyncio.run(limit("5/minute")(hello)(make_mocked_request("GET", "/")))


def test_paths_of_sub_applications_without_their_prefix_are_warned_of_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def nothing(client: TestClient[Any, Any]) -> None:
        pass

    app = application(sub=application(web.get("/items/{id}", hello), deep=application(web.get("/x", hello))))
    setup(app, read('limits: [{path: ["/items/{id}", "/deep/x", "/sub/deep/x"], by: ip, bucket: 1/hour}]'))
    run(app, nothing)
    warned = [record.getMessage() for record in caplog.records if "never matches" in record.getMessage()]
    assert [text.partition(" have the path ")[2] for text in warned] == [
        "/sub/items/{id}; use that",
        "/sub/deep/x; use that",
    ]
