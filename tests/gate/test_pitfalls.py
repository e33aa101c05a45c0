"""What limiters get wrong on the web, a test for each, on real apps: FastAPI and Flask, and Redis where it matters."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import flask
import pytest
from fastapi import APIRouter, BackgroundTasks, FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from flask import Blueprint, Flask
from starlette.applications import Starlette
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from headgate import Limit
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.errors import InvalidCost
from headgate.gate.admission import current_admission
from headgate.policy.loader import read
from headgate.policy.model import Identity, Override
from headgate.testing import FakeClock
from support.asgi_client import PEER, knock, scope, talk
from support.servers import RedisServer, wait_until
from support.sites import END_OF_BODY, AsgiSite, WsgiSite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from support.sites import Answer, Site

    Make = Callable[..., Site]

SECRET = "sixteen bytes or more"


def fastapi_shop(ran: list[str]) -> FastAPI:
    """Two views of one name, a router, a mounted app, and a view that says what it has cost."""
    app, router, mounted = FastAPI(), APIRouter(prefix="/admin"), FastAPI()

    @app.get("/items/{id}")
    async def show(id: str) -> str:
        ran.append(id)
        return id

    @router.get("/items/{id}", name="show")
    async def show_to_admins(id: str) -> str:
        return id

    @mounted.get("/items/{id}")
    async def show_mounted(id: str) -> str:
        return id

    @app.get("/ask")
    async def ask(cost: int) -> int:
        current_admission().commit(cost)
        return cost

    app.include_router(router)
    app.mount("/mounted", mounted)
    return app


def flask_shop(ran: list[str]) -> Any:
    app, admin, mounted = Flask("shop", static_folder=None), Blueprint("admin", "admin"), Flask("mounted")

    @app.get("/items/<id>")
    def show(id: str) -> str:
        ran.append(id)
        return id

    @mounted.get("/items/<id>")
    @admin.get("/items/<id>", endpoint="show")
    def show_elsewhere(id: str) -> str:
        return id

    @app.get("/ask")
    def ask() -> str:
        current_admission().commit(int(flask.request.args["cost"]))
        return "done"

    app.register_blueprint(admin, url_prefix="/admin")
    return DispatcherMiddleware(app, {"/mounted": mounted})


@pytest.fixture
def ran() -> list[str]:
    """The items that the app was asked for, of those requests that reached it."""
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_763_251_200_000_000)


@pytest.fixture(params=["fastapi", "flask"])
def make(request: pytest.FixtureRequest, ran: list[str], clock: FakeClock) -> Iterator[Make]:
    """Opens the shop behind a policy, in FastAPI and in Flask."""
    sites: list[Site] = []

    def opened(policy: Any, store: str = "memory://", **options: Any) -> Site:
        if store == "memory://":
            options = {"clock": clock, **options}
        kind, shop = (AsgiSite, fastapi_shop) if request.param == "fastapi" else (WsgiSite, flask_shop)
        sites.append(kind(shop(ran), policy, store, **options))
        return sites[-1]

    yield opened
    for site in sites:
        site.close()


def policy(*limits: dict[str, Any], **more: Any) -> str:
    return json.dumps({"limits": limits, **more})


def item(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"path": f"/items/{number}", **more}


def left(answer: Answer) -> list[int]:
    """What is left of each limit, as the answer tells it."""
    return [int(part.split(";r=")[1].split(";")[0]) for part in answer.fields["ratelimit"].split(", ")]


# ------------------------------------------------------------------------------------------------ who is counted


def test_each_client_has_its_own_quota(make: Make) -> None:
    """P1: a limiter that ignored the client, so that the third request from another address got a 429."""
    site = make(policy({"by": "ip", "bucket": "2/minute"}))
    got = site.statuses(item(), item(), item(peer="198.51.100.7"), item(), item(peer="198.51.100.7"))
    assert got == [200, 200, 200, 429, 200]


def test_a_route_is_counted_by_its_template_and_views_of_one_name_apart(make: Make) -> None:
    """P8: /u/1, /u/2, ... were each a counter of their own, and views of one name shared one."""
    paths = ["/items/{id}", "/admin/items/{id}"]
    site = make(policy({"path": paths, "by": "ip+endpoint", "bucket": "2/minute"}))
    assert site.statuses(*[item(number) for number in range(4)]) == [200, 200, 429, 429]
    assert site.statuses(*[{"path": f"/admin/items/{number}"} for number in range(3)]) == [200, 200, 429]


@pytest.mark.parametrize(
    "paths",
    [
        [f"/mounted/items/{number}" for number in range(4)],
        [f"/admin/items/{number}" for number in range(4)],
        [f"/nowhere/{number}" for number in range(4)],
        [f"/mounted/nowhere/{number}" for number in range(4)],
        ["/items/1", "/mounted/items/1", "/nowhere", "/admin/items/1"],
    ],
    ids=["mounted", "router", "404", "404 below a mount", "mixed"],
)
def test_nothing_that_the_app_serves_is_exempt_by_accident(make: Make, paths: list[str]) -> None:
    """P9: mounted apps, included routers and 404s were never counted. What no template fits shares one class."""
    site = make(policy({"by": "ip+endpoint", "bucket": "3/minute"}))
    answers = [site.ask(path) for path in paths]
    assert [answer.status == 429 for answer in answers] == [False, False, False, True]
    assert all("ratelimit" in answer.fields for answer in answers)


def test_the_address_is_the_rightmost_hop_that_no_trusted_proxy_is(make: Make) -> None:
    """P14: X-Forwarded-For was believed from anybody, and its first hop taken."""
    site = make(policy({"by": "ip", "bucket": "1/minute"}, identity={"proxies": ["10.0.0.0/8"]}))

    def by(peer: str, *hops: str) -> dict[str, Any]:
        return item(peer=peer, headers=[("x-forwarded-for", ", ".join(hops))])

    assert site.statuses(by("6.6.6.6", "1.1.1.1"), by("6.6.6.6", "1.1.1.2")) == [200, 429]
    assert site.statuses(by("10.0.0.1", "1.1.1.3", "7.7.7.7"), by("10.0.0.2", "7.7.7.7", "10.0.0.9")) == [200, 429]
    assert site.statuses(by("10.0.0.1", "1.1.1.4")) == [200]  # an honest client behind the proxy


def test_an_ipv4_address_in_ipv6_clothes_is_that_address_and_not_all_of_them(make: Make) -> None:
    """Row 42: ::ffff:1.2.3.4/64 is ::/64, which is everybody."""
    site = make(policy({"by": "ip", "bucket": "1/minute"}))
    peers = ["::ffff:1.2.3.4", "::ffff:5.6.7.8", "1.2.3.4", "::ffff:102:304"]
    assert site.statuses(*[item(peer=peer) for peer in peers]) == [200, 200, 429, 429]


def test_a_thousand_addresses_of_one_network_are_one_client(make: Make) -> None:
    """Row 40: ten million random IPv6 addresses would be 1.7 GB of counters."""
    site = make(policy({"by": "ip", "bucket": "5/minute"}))
    got = site.statuses(*[item(peer=f"2001:db8:1:2::{number:x}") for number in range(200)])
    assert (got.count(200), got.count(429), site.gate._limiter.stats.keys) == (5, 195, 1)
    assert site.ask("/items/1", peer="2001:db8:1:3::1").status == 200


# ---------------------------------------------------------------------------------------------- what is consumed


def test_rejected_requests_do_not_use_up_the_longer_limit(make: Make) -> None:
    """P2: two of a short limit, a hundred of a long one, six requests of which four are rejected: 98 are left."""
    limits = [{"name": name, "by": "ip", "bucket": name} for name in ("2/second", "100/day")]
    site = make(policy(*limits))
    answers = [site.ask("/items/1") for _ in range(6)]
    assert [answer.status for answer in answers] == [200, 200, 429, 429, 429, 429]
    assert left(answers[-1]) == [0, 98]
    assert json.loads(answers[-1].body)["violated-policies"] == ["2/second"]


def test_a_cost_that_was_denied_is_not_charged(make: Make) -> None:
    """P3, rows 11 and 33: ten in a window, costs of 8, 5 and 1: the 1 passes, also right after the denial."""
    routes = [{"path": path, "cost": cost} for path, cost in (("/items/8", 8), ("/items/5", 5), ("/items/1", 1))]
    site = make(policy({"by": "ip", "bucket": "10/minute", "algorithm": "fixed_window"}, routes=routes))
    assert site.statuses(item(8), item(5), item(5), item(1), item(1), item(1)) == [200, 429, 429, 200, 200, 429]


def test_layered_limits_take_all_or_nothing(make: Make) -> None:
    """Row 12: 10 by address, 5 by user, 3 by key. A fourth request is denied by the key, and takes nothing."""
    kinds = {"ip": 10, "user": 5, "api_key": 3}
    site = make(
        policy(*[{"name": kind, "by": kind, "bucket": f"{quota}/hour"} for kind, quota in kinds.items()]),
        identities={"user": lambda arrival: "ada"},
    )
    answers = [site.ask("/items/1", headers=[("x-api-key", "k")]) for _ in range(5)]
    assert [(answer.status, left(answer)) for answer in answers[2:]] == [(200, [7, 2, 0])] + [(429, [7, 2, 0])] * 2
    assert left(site.ask("/items/1", headers=[("x-api-key", "another")])) == [6, 1, 2]


def test_a_hundred_at_once_pass_a_narrow_limit_once(make: Make, redis7: RedisServer, unique: str) -> None:
    """Row 13: 1000 by address and 1 by user, in one step on the server: 1 passes, and 1 of the 1000 is used."""
    site = make(
        policy({"name": "ip", "by": "ip", "bucket": "1000/day"}, {"name": "user", "by": "user", "bucket": "1/day"}),
        redis7.url,
        identities={"user": lambda arrival: "ada"},
        namespace=unique,
        budget=5.0,
    )
    answers = site.ask_all([item()] * 100)
    assert [answer.status for answer in answers].count(200) == 1
    assert {tuple(left(answer)) for answer in answers} == {(999, 0)}


def test_exactly_the_limit_passes_whoever_comes_at_once(make: Make, redis7: RedisServer, unique: str) -> None:
    """Row 46 and P18: `if n > 100: 429; n += 1` lets 101 pass, and what is read and written apart even more."""
    site = make(policy({"by": "ip", "bucket": "100/day"}), redis7.url, namespace=unique, budget=5.0)
    got = [answer.status for answer in site.ask_all([item()] * 150)]
    assert (got.count(200), got.count(429)) == (100, 50)


def test_a_bucket_is_not_a_window(make: Make, clock: FakeClock) -> None:
    """Row 47: 1000 a minute with a burst of 200 lets 1200 pass in the first 60 seconds, and says 1000."""
    site = make(policy({"by": "ip", "bucket": "1000/minute, burst 200"}))
    passed = site.statuses(*[item()] * 201).count(200)
    for _ in range(60):
        clock.advance(1)
        passed += site.statuses(*[item()] * 18).count(200)
    assert passed == 1200
    assert site.ask("/items/1").fields["x-ratelimit-limit"] == "1000"


def test_a_cost_beyond_the_capacity_is_told_to_be_hopeless(make: Make) -> None:
    """Row 7: a wait of 50 minutes was told for what never passes. Nothing is consumed, and there is no Retry-After."""
    text = policy({"name": "a", "by": "user", "bucket": "100/hour"}, routes=[{"path": "/items/6", "cost": 6}])
    bob = Override(Identity("user", "bob"), "a", Limit(5, timedelta(hours=1), name="a"))  # a file is checked for it
    site = make(replace(read(text), overrides=(bob,)), identities={"user": lambda arrival: arrival.header("x-user")[0]})
    refused, allowed = (site.ask(f"/items/{number}", headers=[("x-user", "bob")]) for number in (6, 1))
    assert (refused.status, allowed.status) == (429, 200)
    assert "retry-after" not in refused.fields
    assert json.loads(refused.body)["retry_after_seconds"] is None
    assert (left(refused), left(allowed)) == ([5], [4])
    assert site.ask("/items/6", headers=[("x-user", "ada")]).status == 200


def test_what_costs_nothing_passes_a_limit_that_is_used_up(make: Make) -> None:
    """Row 8: and takes nothing from it."""
    site = make(policy({"by": "ip", "bucket": "1/hour"}, routes=[{"path": "/items/0", "cost": 0}]))
    assert site.statuses(item(0), item(1), item(0), item(1), item(0)) == [200, 200, 200, 429, 200]
    assert "ratelimit" not in site.ask("/items/0").fields


def test_no_cost_that_the_app_says_brings_quota_back(make: Make) -> None:
    """Row 9 and P13: a negative cost is the app's mistake, and no gift. What was reserved stays charged."""
    site = make(policy({"path": "/ask", "by": "ip", "bucket": "10/hour", "reserve": 4}))
    if site.kind == "asgi":
        with pytest.raises(InvalidCost, match="cost -5 is not a whole number >= 0"):
            site.ask("/ask", query="cost=-5")
    else:
        assert site.ask("/ask", query="cost=-5").status == 500
    assert left(site.ask("/ask", query="cost=0")) == [2]
    assert left(site.ask("/ask", query="cost=0")) == [2]  # the 0 before was settled: 6 - 4


def test_a_changed_plan_keeps_what_was_used(make: Make, tmp_path: Path) -> None:
    """Row 30: of 100, 60 are used. A plan of 80 leaves 20, and a plan of 200 as many more as it has more."""
    path = tmp_path / "policy.json"

    def plan(quota: int) -> None:
        path.write_text(policy({"name": "plan", "by": "ip", "bucket": f"{quota}/day"}))

    plan(100)
    site = make(path, reload_every=None)
    site.statuses(*[item()] * 59)
    assert left(site.ask("/items/1")) == [40]
    for quota, expected in ((80, 19), (200, 138)):
        plan(quota)
        assert site.gate.policy_watcher.look()
        assert left(site.ask("/items/1")) == [expected]


# ------------------------------------------------------------------------------------------------- what is told


def test_a_herd_is_spread_and_never_sent_back_too_early(make: Make) -> None:
    """Row 43: all who are denied in one window would come back in the same second."""
    site = make(
        policy({"by": "ip", "bucket": "1/minute", "algorithm": "fixed_window"}, answers={"jitter": "30 seconds"})
    )
    site.ask("/items/1")
    waits = [int(site.ask("/items/1").fields["retry-after"]) for _ in range(200)]
    assert min(waits) >= 60
    assert max(waits) <= 90
    assert len(set(waits)) > 15


def test_who_is_denied_never_reaches_the_app(make: Make, ran: list[str]) -> None:
    """P11: the call was made all the same, and its result thrown away."""
    site = make(policy({"by": "ip", "bucket": "2/minute"}))
    site.statuses(*[item(number) for number in range(5)])
    assert ran == ["0", "1"]


# ------------------------------------------------------------------------------------------------ the store


def test_a_server_that_forgets_its_scripts_forgets_no_request(make: Make, redis7: RedisServer, unique: str) -> None:
    """P11, row 17: SCRIPT FLUSH was an exception in the request. And every key ends."""
    site = make(policy({"by": "ip", "bucket": "4/minute"}), redis7.url, namespace=unique, budget=5.0)
    got = []
    with redis7.client() as redis:
        for _ in range(6):
            redis.script_flush()
            got.append(site.ask("/items/1").status)
        lives = [redis.pttl(key) for key in redis.scan_iter(match=f"{unique}:[^%]*", count=1000)]
    assert got == [200] * 4 + [429] * 2
    assert len(lives) == 1
    assert lives[0] > 0


FAILING = policy(
    {"by": "ip", "bucket": "10/day"},
    on_failure="open",
    routes=[
        {"path": "/items/2", "on_failure": "closed"},
        {"path": "/items/3", "on_failure": "local"},
        {"path": "/items/4", "cost": 0},
    ],
)


@contextmanager
def stopped(server: RedisServer, how: str) -> Iterator[None]:
    if how == "silent":
        server.pause()
        yield
        server.resume()
    else:
        server.kill()
        yield
        server.restart()


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_store_that_fails_costs_milliseconds_and_each_route_does_as_it_says(make: Make, how: str) -> None:
    """P10 and row 36: 500s while Redis is down, and seconds or for ever while it is stopped. `local` is a fifth."""
    with RedisServer("redis") as server:
        site = make(FAILING, server.url, budget=0.02)
        # To connect may take a busy machine longer than the budget.
        wait_until(lambda: site.ask("/items/2").status == 200, "the store to be asked")
        assert [site.ask(f"/items/{number}").status for number in (1, 2, 3)] == [200, 200, 200]
        with stopped(server, how):
            start = time.monotonic()
            got = [[site.ask(f"/items/{number}").status for _ in range(8)] for number in (1, 2, 3, 4)]
            took = time.monotonic() - start
        assert got == [[200] * 8, [503] * 8, [200] * 2 + [429] * 6, [200] * 8]
        assert took < 2.5  # 32 requests


def test_the_event_loop_goes_on_while_the_store_is_silent() -> None:
    """P15: a blocking call to Redis in async code stops every other request of the process."""

    async def run(app: HeadgateMiddleware) -> tuple[list[int], float]:
        """The statuses of requests, and the longest that the loop was held up meanwhile."""
        longest = 0.0
        is_over = False

        async def tick() -> None:
            nonlocal longest
            while not is_over:
                start = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - start)

        ticking = asyncio.create_task(tick())
        asked = [talk(app, scope("/items/2"), END_OF_BODY) for _ in range(20)]
        got = [sent[0]["status"] for sent in await asyncio.gather(*asked)]
        is_over = True
        await ticking
        await app.gate.close()
        return got, longest

    with RedisServer("redis") as server:
        app = HeadgateMiddleware(fastapi_shop([]), read(FAILING), server.url, budget=0.5)
        server.pause()
        start = time.monotonic()
        got, longest = asyncio.run(run(app))
        took = time.monotonic() - start
        server.resume()
    assert got == [503] * 20
    assert took >= 0.5  # they did wait
    assert longest < 0.25


# --------------------------------------------------------------------------------------------- the app's own ways


def test_streams_websockets_and_background_tasks_are_as_without_a_gate() -> None:
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

    gated = HeadgateMiddleware(app, read(policy({"by": "ip", "bucket": "2/hour"})), clock=FakeClock())

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


def test_an_inner_middleware_of_the_apps_own_is_left_alone() -> None:
    """P19: answers of the app keep their own headers, whatever they are called, beside those of the gate."""
    app = Starlette()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"7"), (b"vary", b"a")]}
        )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    app.mount("/inner", inner)
    gated = HeadgateMiddleware(app, read(policy({"by": "ip", "bucket": "2/hour"})), clock=FakeClock())
    start, _ = asyncio.run(talk(gated, scope("/inner/x", client=(PEER, 1)), END_OF_BODY))
    assert [name for name, _ in start["headers"]][:2] == [b"x-request-id", b"vary"]
    assert len(start["headers"]) == 2 + 5
