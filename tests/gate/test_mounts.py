"""Mounted apps: both names of a path where all of the app is mounted, and whole paths where apps are mounted in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from werkzeug.test import Client

from headgate.adapters import asgi, wsgi
from headgate.adapters.asgi import AsgiRequest
from headgate.gate.mounts import asgi_routes, unreachable_paths
from headgate.policy.loader import read
from headgate.policy.routes import Matcher, Template
from headgate.testing import FakeClock
from support.asgi_client import PEER, ask, live, statuses

if TYPE_CHECKING:
    from collections.abc import Callable

ON_THE_ROUTE = "limits: [{path: POST /login, by: ip, bucket: 2/hour}]"
ON_THE_WHOLE = "limits: [{path: POST /api/login, by: ip, bucket: 2/hour}]"
BOTH = "limits: [{path: [POST /api/login, POST /login], by: endpoint, bucket: 2/hour}]"


def login(root: str = "") -> FastAPI:
    app = FastAPI()
    app.root_path = root
    app.post("/login", response_class=PlainTextResponse)(lambda: "in")
    return app


def in_front(app: Any, policy: str) -> Any:
    return asgi.HeadgateMiddleware(app, read(policy), clock=FakeClock(), health_path="/health")


def within(app: Any, policy: str) -> Any:
    app.add_middleware(asgi.HeadgateMiddleware, policy=read(policy), clock=FakeClock(), health_path="/health")
    return app


def behind_another(app: Any, policy: str) -> Any:
    class Other:
        def __init__(self) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    return in_front(Other(), policy)


def posted(app: Any, *paths: str, root: str = "") -> list[int]:
    async def run() -> list[int]:
        transport = httpx.ASGITransport(app, client=(PEER, 1), root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.post(path)).status_code for path in paths]

    return asyncio.run(run())


@pytest.mark.parametrize("policy", [ON_THE_ROUTE, ON_THE_WHOLE, BOTH])
@pytest.mark.parametrize("put", [in_front, within, behind_another])
def test_app_that_says_where_it_is_mounted_serves_both_names_under_one_limit(
    put: Callable[[Any, str], Any], policy: str
) -> None:
    app = put(login("/api"), policy)
    assert posted(app, "/login", "/api/login", "/login", "/api/login", "/api/other") == [200, 200, 429, 429, 404]


@pytest.mark.parametrize("policy", [ON_THE_ROUTE, ON_THE_WHOLE])
def test_server_may_say_so(policy: str) -> None:
    app = in_front(login(), policy)
    assert posted(app, *["/api/login"] * 3, root="/api") == [200, 200, 429]


@pytest.mark.parametrize("policy", [ON_THE_ROUTE, ON_THE_WHOLE])
def test_mounted_app_may_have_a_gate_of_its_own(policy: str) -> None:
    app = Starlette(routes=[Mount("/api", within(login(), policy))])
    assert posted(app, *["/api/login"] * 3) == [200, 200, 429]


def test_health_path_works_by_either_name() -> None:
    for path in ("/health", "/api/health"):
        [answer] = posted(in_front(login("/api"), ON_THE_ROUTE), path)
        assert answer == 200


def test_root_that_is_only_the_beginning_of_a_word_is_none() -> None:
    assert posted(in_front(login("/log"), ON_THE_ROUTE), *["/login"] * 3) == [200, 200, 429]


@pytest.mark.parametrize("policy", [ON_THE_ROUTE, ON_THE_WHOLE])
def test_wsgi_servers_split_the_path(policy: str) -> None:
    app = Flask("shop")
    app.post("/login")(lambda: "in")
    client = Client(wsgi.HeadgateMiddleware(app, read(policy), clock=FakeClock()))
    answers = [client.post("/login", base_url="http://localhost/api").status_code for _ in range(3)]
    assert answers == [200, 200, 429]


@pytest.mark.parametrize(
    ("path", "root", "whole", "mounted_path"),
    [
        ("/api/login", "/api", "/api/login", "/login"),
        ("/login", "/api", "/api/login", "/login"),
        ("/api", "/api", "/api", "/"),
        ("/apis", "/api", "/api/apis", "/apis"),
        ("/login", "", "/login", None),
        ("/login", "/", "/login", None),
    ],
)
def test_names_of_a_path(path: str, root: str, whole: str, mounted_path: str | None) -> None:
    request = AsgiRequest({"type": "http", "path": path, "root_path": root, "headers": []})
    assert (request.path, request.mounted_path) == (whole, mounted_path)


TEMPLATES = [Template.parse(text) for text in ("*", "/a", "/a/*", "/{x}", "/a/{x}", "/{x}/b", "/b", "/b/*")]
paths = st.lists(st.sampled_from("abc"), max_size=3).map(lambda words: "/" + "/".join(words))


@given(paths, paths)
def test_both_names_together_fit_what_either_fits_the_most_specific_first(path: str, mounted_path: str) -> None:
    matcher = Matcher(TEMPLATES)
    either = {*matcher.match(path), *matcher.match(mounted_path)}
    everything = sorted(range(len(TEMPLATES)), key=matcher._ranks.__getitem__)
    assert matcher.match(path, mounted_path) == tuple(index for index in everything if index in either)
    assert matcher.match(path, mounted_path) is matcher.match(mounted_path, path)


# ------------------------------------------------------------------ apps inside the app behind the gate

ITEMS = "limits: [{name: items, path: %s, by: ip, bucket: 1/hour}]"


def items(*, as_router: bool = False) -> Any:
    inner = APIRouter() if as_router else FastAPI()
    inner.get("/items/{item_id}")(lambda item_id: item_id)
    return inner


def shop(*, has_own_items: bool = False) -> FastAPI:
    app = FastAPI()
    app.mount("/sub", items())
    if has_own_items:
        app.include_router(items(as_router=True))
    return app


@pytest.mark.parametrize("mount", [in_front, within])
def test_gate_in_front_matches_whole_paths(mount: Callable[..., Any]) -> None:
    for path, passed in (("/items/{id}", [200, 200]), ("/sub/items/{id}", [200, 429])):
        app = mount(shop(), ITEMS % f'"{path}"')
        assert statuses(ask(app, "/sub/items/1", "/sub/items/1")) == passed


@pytest.mark.parametrize("mount", [in_front, within])
@pytest.mark.parametrize(
    ("path", "has_own_items", "warned"),
    [
        ("/items/{id}", False, ["/sub/items/{id}"]),
        ("/items/*", False, ["/sub/items/*"]),
        ("/items/{id}", True, []),
        ("/sub/items/{id}", False, []),
        ("/sub/*", False, []),
        ("/nowhere", False, []),
        ("*", False, []),
    ],
)
def test_paths_that_match_only_below_a_mount_are_warned_of_at_the_start(
    mount: Callable[..., Any], path: str, has_own_items: bool, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(live(mount(shop(has_own_items=has_own_items), ITEMS % f'"{path}"')))
    found = [record.getMessage() for record in caplog.records if "never matches" in record.getMessage()]
    assert found == [
        f"the policy path {path} never matches: the app is mounted, and its requests have the path {meant}; use that"
        for meant in warned
    ]


def test_apps_that_are_mounted_in_mounted_apps_are_looked_at_too() -> None:
    outer = Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/b", items())])), Mount("", items())])
    policy = read('limits: [{path: ["/b/items/{id}", "/docs", "/items/{id}"], by: ip, bucket: 1/hour}]')
    assert unreachable_paths(policy, asgi_routes(outer)) == [("/b/items/{id}", "/a/b/items/{id}")]


def test_app_with_routes_of_an_unknown_kind_is_warned_of_nothing() -> None:
    app = shop()
    app.routes.append(object())  # type: ignore[arg-type]
    assert asgi_routes(app) == []
    assert asgi_routes(lambda scope, receive, send: None) == []
