"""FastAPI's dependencies: limits beside their routes, with the same refusals and header fields as everywhere."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from starlette.requests import HTTPConnection

from headgate import Limit
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.adapters.fastapi import FastAPILimits, admission
from headgate.errors import InvalidConfiguration, InvalidCost, InvalidInput, InvalidLimit
from headgate.gate.admission import Admission, current_admission
from headgate.policy.model import AnswerSettings, IdentitySettings, Policy, Rule
from headgate.testing import FakeClock
from support.asgi_client import ask, client, fields, knock, live, statuses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_FIELDS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-policy", "ratelimit"}


def made(**options: Any) -> tuple[FastAPI, FastAPILimits]:
    app, limits = FastAPI(), FastAPILimits(clock=FakeClock(), **options)
    limits.install(app)
    return app, limits


def test_route_needs_no_request_parameter_and_answers_as_the_middleware_would() -> None:
    app, limits = made()

    @app.get("/reports", dependencies=[Depends(limits.allow("2/minute", by="ip"))])
    def reports() -> str:
        return "here"

    first, second, refused = ask(app, "/reports", "/reports", "/reports")
    assert (first.json(), second.headers["x-ratelimit-remaining"]) == ("here", "0")
    assert first.headers["ratelimit-policy"] == '"2/minute by ip";q=2;w=60'
    limit = Limit.parse("2/minute", name="2/minute by ip")
    middleware = HeadgateMiddleware(FastAPI(), Policy((Rule(limit.name, limit, ("ip",)),)), clock=FakeClock())
    same = ask(middleware, "/", "/", "/")[2]
    assert (refused.status_code, dict(refused.headers), refused.content) == (429, dict(same.headers), same.content)
    assert refused.headers["content-type"] == "application/problem+json"
    assert statuses(ask(app, "/reports", ip="203.0.113.10")) == [200]


def test_route_is_counted_by_its_template_and_methods() -> None:
    """Never by the URL (every id would be free), nor by the name of the view (strangers would share a counter)."""
    app, limits = made()
    once = [Depends(limits.allow("1/minute"))]
    for method in ("get", "post"):
        for path in ("/users/{id}", "/items/{id}"):

            @getattr(app, method)(path, dependencies=once)
            def view(id: str) -> str:
                return id

    paths = [(method, f"/{kind}/{id}") for method in ("GET", "POST") for kind in ("users", "items") for id in (1, 2)]
    assert statuses(ask(app, *paths)) == [200, 429] * 4


def test_prefixes_of_included_routers_belong_to_the_template() -> None:
    app, limits = made()
    router = APIRouter(prefix="/inner", dependencies=[Depends(limits.allow("1/minute"))])
    for path in ("/{id}", "/{id}/parts"):
        router.get(path)(lambda: None)

    @router.websocket("/{id}/live")
    async def watch(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    for prefix in ("/v1", "/v2"):
        app.include_router(router, prefix=prefix)
    paths = [f"/{version}/inner/{id}{rest}" for version in ("v1", "v2") for rest in ("", "/parts") for id in (1, 2)]
    assert statuses(ask(app, *paths)) == [200, 429] * 4
    for version in ("v1", "v2"):
        sent = [knock(app, f"/{version}/inner/{id}/live")[0] for id in (1, 2)]
        assert [message.get("status", message["type"]) for message in sent] == ["websocket.accept", 429]


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_where_an_app_is_mounted_belongs_to_the_template(root: str) -> None:
    app, limits = made()
    app.root_path = root
    once = [Depends(limits.allow("1/minute"))]
    app.get("/items/{id}", dependencies=once)(lambda: None)
    for path in ("/v1", "/v2", "/{version}"):
        version = FastAPI()
        limits.install(version)
        version.get("/items/{id}", dependencies=once)(lambda: None)
        app.mount(path, version)
    paths = [f"{root}{mount}/items/{id}" for id in (1, 2) for mount in ("", "/v1", "/v2")]
    assert statuses(ask(app, *paths)) == [200, 200, 200, 429, 429, 429]
    # What a client made up is no route of its own.
    assert statuses(ask(app, f"{root}/v3/items/1", f"{root}/v4/items/1")) == [429, 429]


def test_name_or_a_limit_counts_all_its_routes_together() -> None:
    app, limits = made()
    exports = Limit(2, timedelta(days=1), name="exports")
    for path in ("/a", "/b"):
        app.get(path, dependencies=[Depends(limits.allow("2/minute", name="shared"))])(lambda: None)
        app.get(path + "/export", dependencies=[Depends(limits.allow(exports))])(lambda: None)
    assert statuses(ask(app, "/a", "/b", "/a", "/b")) == [200, 200, 429, 429]
    assert statuses(ask(app, "/a/export", "/b/export", "/a/export")) == [200, 200, 429]


def of_header(connection: HTTPConnection) -> str | None:
    return connection.headers.get("x-device")


async def of_header_later(connection: HTTPConnection) -> str | None:
    await asyncio.sleep(0)
    return of_header(connection)


def broken(connection: HTTPConnection) -> str:
    raise RuntimeError("no such table")


@pytest.mark.parametrize(
    ("by", "devices", "expected"),
    [
        (of_header, ["a", "b", "a"], [200, 200, 429]),
        (of_header_later, ["a", "b", "a"], [200, 200, 429]),
        ("device", ["a", "b", "a"], [200, 200, 429]),
        ("device+ip", ["a", "b", "a"], [200, 200, 429]),
        ("endpoint", ["a", "b", "a"], [200, 429, 429]),
        ("global", ["a", "b", "a"], [200, 429, 429]),
        (of_header, ["a", "", ""], [200, 200, 429]),  # without an identity by address, apart from those with one
        (broken, ["a", "b"], [200, 429]),
    ],
)
def test_counted_identity(by: Any, devices: list[str], expected: list[int]) -> None:
    app, limits = made(identities={"device": lambda request: of_header(request.native)})
    app.get("/", dependencies=[Depends(limits.allow("1/minute", by=by))])(lambda: None)
    answers = [ask(app, "/", headers={"x-device": device} if device else {})[0] for device in devices]
    assert statuses(answers) == expected


@pytest.mark.parametrize("texts", [("1/minute", "5/day"), ("1/minute; 5/day",)])
def test_several_limits_are_charged_all_or_none(texts: tuple[str, ...]) -> None:
    app, limits = made()
    app.get("/", dependencies=[Depends(limits.allow(*texts))])(lambda: None)
    *_, refused = ask(app, "/", "/", "/")
    assert refused.headers["ratelimit"] == '"1/minute by ip";r=0;t=60, "5/day by ip";r=4;t=69120'
    assert json.loads(refused.content)["violated-policies"] == ["1/minute by ip"]


def test_what_one_dependency_granted_is_given_back_when_the_next_refuses() -> None:
    app, limits = made()
    running = Limit(9, timedelta(minutes=1), algorithm="concurrency", name="running")
    first, second = limits.allow("9/day", running), limits.allow("1/minute", by="global")
    router = APIRouter(dependencies=[Depends(first)])
    router.get("/", dependencies=[Depends(second)])(lambda: None)
    router.get("/other")(lambda: None)
    app.include_router(router)
    assert statuses(ask(app, "/", "/", "/")) == [200, 429, 429]
    key = Limit.parse("9/day", name="9/day by ip").by("GET /", "203.0.113.9")
    assert asyncio.run(limits.gate._limiter.peek(key, running.by("203.0.113.9"))).remaining == 8
    told = ask(app, "/other")[0].headers
    assert told["ratelimit"].startswith('"9/day by ip";r=8;')


def test_headers_of_several_dependencies_are_merged() -> None:
    app, limits = made()
    loose, tight = Depends(limits.allow("100/minute")), Depends(limits.allow("3/minute", by="global"))
    app.get("/", dependencies=[loose, tight])(lambda: None)
    (answer,) = ask(app, "/")
    assert answer.headers.get_list("x-ratelimit-limit") == ["3"]
    assert answer.headers.get_list("x-ratelimit-remaining") == ["2"]
    assert answer.headers.get_list("ratelimit-policy") == [
        '"100/minute by ip";q=100;w=60, "3/minute by global";q=3;w=60'
    ]


def stream() -> Iterator[str]:
    yield from "abc"


@pytest.mark.parametrize(
    ("view", "status"),
    [
        (lambda: {"a": 1}, 200),
        (lambda: Response("raw", 202), 202),
        (lambda: StreamingResponse(stream()), 200),
        (lambda: (_ for _ in ()).throw(HTTPException(418)), 418),
        (lambda: (_ for _ in ()).throw(RuntimeError("broken")), 500),
    ],
    ids=["value", "response", "stream", "HTTPException", "exception"],
)
def test_every_kind_of_answer_has_the_fields(view: Callable[[], Any], status: int) -> None:
    app, limits = made()

    @app.get("/", dependencies=[Depends(limits.allow("5/minute"))], response_model=None)
    def endpoint() -> Any:
        return view()

    (answer,) = ask(app, "/")
    assert answer.status_code == status
    if status != 500:  # which is sent from outside of all middleware
        assert set(answer.headers) >= LIMIT_FIELDS


def test_only_answers_that_count_are_counted() -> None:
    app, limits = made()

    @app.post("/login/{status}", dependencies=[Depends(limits.allow("2/minute", count_when="status in [401]"))])
    def login(status: int) -> Response:
        return Response(status_code=status)

    sent = [("POST", f"/login/{status}") for status in (200, 401, 200, 200, 401, 200)]
    assert statuses(ask(app, *sent)) == [200, 401, 200, 200, 401, 429]


@pytest.mark.parametrize("status", [204, 304, 451, 599, 600, 999])
def test_every_answer_counts_unless_it_is_said_which(status: int) -> None:
    app, limits = made()
    app.get("/", dependencies=[Depends(limits.allow("1/minute"))])(lambda: Response(status_code=status))
    assert statuses(ask(app, "/", "/")) == [status, 429]


def test_lease_lasts_until_the_stream_has_ended() -> None:
    app, limits = made()
    one = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.get("/", dependencies=[Depends(limits.allow(one))])
    async def endpoint() -> StreamingResponse:
        async def chunks() -> Any:
            yield "a"
            started.set()
            await go_on.wait()
            yield "b"

        return StreamingResponse(chunks())

    async def run() -> list[int]:
        async with client(app) as http:
            streaming = asyncio.create_task(http.get("/"))
            await started.wait()
            denied = (await http.get("/")).status_code
            go_on.set()
            return [(await streaming).status_code, denied, (await http.get("/")).status_code]

    assert asyncio.run(run()) == [200, 429, 200]


def test_dependency_gives_the_admission() -> None:
    app, limits = made()
    first, then = Depends(limits.allow("5/minute")), Depends(admission)

    @app.get("/own")
    def own(granted: Admission = first, found: Admission = then) -> Any:
        return [granted is found is current_admission(), granted.decision and granted.decision.remaining]

    @app.get("/free")
    async def free(found: Annotated[Admission, Depends(admission)]) -> Any:
        return [found.decision, current_admission().decision]

    async def in_one_task() -> list[Any]:
        async with client(app) as http:
            return [(await http.get(path)).json() for path in ("/own", "/free")]

    assert asyncio.run(in_one_task()) == [[True, 4], [None, None]]


def test_policy_and_dependencies_work_side_by_side() -> None:
    app, limits = made()
    app.get("/", dependencies=[Depends(limits.allow("1/minute"))])(lambda: None)
    everything = Limit.parse("3/minute", name="everything")
    policy = Policy((Rule("everything", everything, ("ip",)),))
    answers = ask(HeadgateMiddleware(app, policy, clock=FakeClock()), "/", "/", "/", "/")
    assert statuses(answers) == [200, 429, 429, 429]
    assert [answer.headers.get_list("x-ratelimit-limit") for answer in answers] == [["1"], ["1"], ["1"], ["3"]]
    assert answers[0].headers["ratelimit"] == '"everything";r=2;t=40, "1/minute by ip";r=0;t=60'
    assert answers[1].headers["ratelimit"] == '"everything";r=1;t=40, "1/minute by ip";r=0;t=60'
    violated = [json.loads(answer.content)["violated-policies"] for answer in answers[1:]]
    assert violated == [["1/minute by ip"], ["1/minute by ip"], ["everything"]]


def test_several_stores_in_one_app_each_settle_their_own() -> None:
    app, limits = made()
    others = FastAPILimits(clock=FakeClock())
    others.install(app)
    failed = {"count_when": "status == 401"}
    granted = [
        Depends(limits.allow("1/minute", name="a", **failed)),
        Depends(others.allow("1/minute", name="b", **failed)),
    ]
    app.get("/{status}", dependencies=granted)(lambda status: Response(status_code=int(status)))
    answers = ask(app, "/200", "/200", "/401", "/401")
    assert statuses(answers) == [200, 200, 401, 429]
    assert answers[0].headers["ratelimit"] == '"a";r=0;t=60, "b";r=0;t=60'


def test_gate_says_how_it_is_at_a_path_of_no_route() -> None:
    app, limits = made(health_path="/healthz")
    app.get("/", dependencies=[Depends(limits.allow("1/minute"))])(lambda: None)
    mounting = FastAPI()
    mounting.mount("/api", app)
    answers = [*ask(app, "/healthz", "/", "/other"), *ask(mounting, "/api/healthz", "/healthz")]
    assert statuses(answers) == [200, 200, 404, 200, 404]
    assert [answers[index].json()["state"] for index in (0, 3)] == ["ready", "ready"]


def test_settings_are_those_of_a_policy() -> None:
    app, limits = made(
        identity=IdentitySettings(proxies=("10.0.0.0/8",)),
        answers=AnswerSettings(x_ratelimit=False, doc_url="https://x"),
    )
    app.get("/", dependencies=[Depends(limits.allow("1/minute"))])(lambda: None)
    behind = [
        ask(app, "/", ip="10.0.0.1", headers={"x-forwarded-for": ip})[0] for ip in ("6.6.6.6", "7.7.7.7", "6.6.6.6")
    ]
    assert statuses(behind) == [200, 200, 429]
    assert "x-ratelimit-limit" not in behind[0].headers
    assert behind[2].json()["doc_url"] == "https://x"


@pytest.mark.parametrize(("mode", "expected"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 429, 429])])
def test_store_that_is_away_is_answered_for(mode: Any, expected: list[int]) -> None:
    app, limits = FastAPI(), FastAPILimits("redis://127.0.0.1:1/0")
    limits.install(app)
    app.get("/", dependencies=[Depends(limits.allow("5/minute", on_failure=mode))])(lambda: None)
    assert statuses(ask(app, "/", "/", "/")) == expected


def test_store_is_closed_when_the_app_ends() -> None:
    app, limits = made()
    closed = []

    async def close() -> None:
        closed.append(True)

    limits.gate.close = close  # type: ignore[method-assign]
    sent = asyncio.run(live(app))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert closed == [True]


def test_websocket_is_limited_and_gets_headers() -> None:
    app, limits = made()

    @app.websocket("/live", dependencies=[Depends(limits.allow("1/minute"))])
    async def watch(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    accepted, *_ = knock(app, "/live")
    assert (accepted["type"], set(fields(accepted)) >= LIMIT_FIELDS) == ("websocket.accept", True)
    start, body = knock(app, "/live")
    assert (start["status"], fields(start)["retry-after"]) == (429, "60")
    assert json.loads(body["body"])["error"] == "rate_limit_exceeded"
    assert knock(app, "/live", extensions={}) == [{"type": "websocket.close", "code": 1013, "reason": ""}]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((), {}, InvalidConfiguration, "one or more limits"),
        (("1/minute", "1/minute"), {}, InvalidConfiguration, "limits with distinct names"),
        (("1/fortnight",), {}, InvalidLimit, "unknown unit"),
        (("1/minute",), {"by": "tenant"}, InvalidConfiguration, r"give identities=\{'tenant': function\}"),
        (("1/minute",), {"by": "usr"}, InvalidConfiguration, "did you mean 'user'"),
        (("1/minute",), {"by": "ip+ip"}, InvalidInput, "twice"),
        (("1/minute",), {"count_when": "sometimes"}, InvalidInput, "status in"),
        (("1/minute",), {"cost": -1}, InvalidCost, "cost -1"),
        (("1/minute",), {"cost": 0}, InvalidCost, "needs no limit"),
        (
            (Limit(1, timedelta(minutes=1), algorithm="concurrency"),),
            {"count_when": "status in [401]"},
            InvalidConfiguration,
            "no count_when",
        ),
    ],
)
def test_mistakes_are_reported_when_the_route_is_declared(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FastAPILimits().allow(*arguments, **options)


def test_limits_that_are_not_installed_are_an_error() -> None:
    app, limits = FastAPI(), FastAPILimits()
    app.websocket("/", dependencies=[Depends(limits.allow("1/minute"))])(lambda: None)
    with pytest.raises(InvalidConfiguration, match=r"limits\.install\(app\)"):
        knock(app, "/")


@pytest.mark.parametrize("is_installed", [True, False])
def test_mounted_app_refuses_too(is_installed: bool) -> None:
    """Where the limits are not installed in it, with FastAPI's own body; status and fields are right all the same."""
    app, limits = made()
    mounted = FastAPI()
    if is_installed:
        limits.install(mounted)
    mounted.get("/{id}", dependencies=[Depends(limits.allow("1/minute"))])(lambda: None)
    app.mount("/sub", mounted)
    first, refused = ask(app, "/sub/1", "/sub/2")
    assert (first.status_code, first.headers.get_list("x-ratelimit-remaining")) == (200, ["0"])
    assert (refused.status_code, refused.headers["retry-after"], refused.headers["x-ratelimit-limit"]) == (
        429,
        "60",
        "1",
    )
    kind = "application/problem+json" if is_installed else "application/json"
    assert (refused.headers["content-type"], refused.headers["cache-control"]) == (kind, "no-store")


def test_request_is_what_functions_get() -> None:
    app, limits = made()
    seen: list[Any] = []
    app.get("/{id}", dependencies=[Depends(limits.allow("5/minute", by=lambda request: seen.append(request)))])(
        lambda request_id=None: None
    )
    ask(app, "/7")
    assert [(type(each) in (HTTPConnection, Request), each.path_params) for each in seen] == [(True, {"id": "7"})]
