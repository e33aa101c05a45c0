"""Memory, stored keys and CPU time that hostile requests can cause are bounded."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.asgi_client import scope
from support.sites import empty_asgi, empty_wsgi, environ, policy_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import RedisServer
    from support.sites import MakeSite, Site


def test_unknown_paths_and_methods_share_counters_and_memory(make_site: MakeSite) -> None:
    site = make_site(
        policy_json({"by": "ip+endpoint", "bucket": "5/hour"}, {"path": "/users/{id}", "by": "ip", "bucket": "9/hour"})
    )
    requests = [{"path": f"/{number}é" * 9, "method": f"M{number}"} for number in range(10_000)]
    requests += [{"path": "/x" * 5000, "method": "M" * 5000}, {"path": "/" + "\0" * 1000}]
    app, site.app.app = site.app.app, empty_asgi if site.kind == "asgi" else empty_wsgi
    got = site.statuses(*requests)
    site.app.app = app
    assert (got.count(200), got.count(429)) == (5, len(requests) - 5)
    snapshot = site.gate.active_policy.snapshot
    assert len(snapshot._routes) < 10
    assert len(snapshot._matcher._states) < 10
    assert site.gate._limiter.stats.keys < 3


def flood(site: Site, keys: list[str]) -> None:
    """A request with each key, each from an address of its own, without the cost of a framework."""
    if site.kind == "wsgi":
        for number, key in enumerate(keys):
            told = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "HTTP_X_API_KEY": key}
            site.app({**told, "REMOTE_ADDR": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}, lambda *_: None)
        return

    async def send(message: Any) -> None:
        pass

    async def run() -> None:
        for number, key in enumerate(keys):
            told = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-api-key", key.encode())]}
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
            await site.app({**told, "client": (address, 1)}, None, send)

    site.loop.run_until_complete(run())  # type: ignore[attr-defined]


def random_keys(number: int) -> list[str]:
    source = random.Random(7)
    return [f"{source.getrandbits(64):x}" for _ in range(number)]


def test_flood_of_keys_is_bounded_and_frees_no_denied_client(make_site: MakeSite) -> None:
    """Who owes most is forgotten last: a flood does not bring back who has used up a limit."""
    site = make_site(policy_json({"by": "api_key", "bucket": "5/hour"}), max_keys=19_000)
    site.app.app = empty_asgi if site.kind == "asgi" else empty_wsgi
    debtor = {"path": "/", "headers": [("x-api-key", "mine")]}
    assert site.statuses(*[debtor] * 6) == [200] * 5 + [429]
    flood(site, random_keys(20_000))
    assert site.gate._limiter.stats.keys == 19_000
    assert site.ask(**debtor).status == 429


def test_redis_keys_of_a_flood_expire(make_site: MakeSite, redis7: RedisServer, unique: str) -> None:
    limits = {"by": "api_key", "bucket": "5/minute"}, {"by": "ip", "bucket": "5/minute"}
    site = make_site(policy_json(*limits), redis7.url, namespace=unique, budget=5.0, secret="sixteen bytes or more")
    site.app.app = empty_asgi if site.kind == "asgi" else empty_wsgi
    flood(site, random_keys(3000))
    with redis7.client() as redis:
        keys = list(redis.scan_iter(match=f"{unique}:[^%]*", count=10_000))
        pipeline = redis.pipeline(transaction=False)
        for key in keys:
            pipeline.pttl(key)
        lives = pipeline.execute()
    assert len(keys) == 6000
    assert 0 < min(lives) <= max(lives) <= 3 * 60_000


def test_denied_requests_create_no_counters(make_site: MakeSite) -> None:
    """One address, a new key each time: the limit by address is all that its requests are counted on."""
    site = make_site(policy_json({"by": "api_key", "bucket": "5/hour"}, {"by": "ip", "bucket": "5/hour"}))
    got = site.statuses(*[{"headers": [("x-api-key", key)]} for key in random_keys(300)])
    assert (got.count(200), got.count(429)) == (5, 295)
    assert site.gate._limiter.stats.keys == 6


LARGE = 2**18


@pytest.mark.parametrize(
    "hostile",
    [
        lambda size: {"headers": [("x-forwarded-for", "1.1.1.1," * (size // 8))]},
        lambda size: {"headers": [("x-forwarded-for", "," * size)]},
        lambda size: {"headers": [("x-forwarded-for", "")] * (size // 16)},
        lambda size: {"headers": [("x-api-key", "k" * size)]},
        lambda size: {"headers": [("authorization", "Bearer" + " " * size + "x")]},
        lambda size: {"path": "/" * size},
        lambda size: {"path": "/a" * (size // 2)},
        lambda size: {"path": "a//" * (size // 3) + "/" * size},
        lambda size: {"path": "/.." * (size // 3)},
        lambda size: {"path": "x:" * (size // 2)},
        lambda size: {"method": "M" * size},
        lambda size: {"headers": [("x-tenant", "|" * size)]},
    ],
    ids=[
        "hops", "commas", "lines", "key", "blanks", "slashes", "segments", "doubled", "dots", "no slash", "method",
        "tenant",
    ],
)  # fmt: skip
def test_denial_time_is_linear_in_request_size(make_site: MakeSite, hostile: Callable[[int], Any]) -> None:
    limits = [{"by": kind, "bucket": "1/hour"} for kind in ("global", "api_key", "tenant")]
    more = {"identity": {"proxies": ["10.0.0.0/8", "1.1.1.1"]}, "routes": [{"path": "/a/{b}/{c}/*", "class": "deep"}]}
    tenant = {"tenant": lambda request: (request.header("x-tenant") or [None])[0]}
    site = make_site(policy_json(*limits, **more), identities=tenant)
    site.ask()

    def seconds(size: int) -> float:
        """Of admission alone, at its best: what the test itself does with the request is none of it."""
        request = {"peer": "10.0.0.1", **hostile(size)}
        if site.kind == "wsgi":
            request = site.app._make_request(environ(**request))
            return min(timed(lambda: site.gate.admit(request)) for _ in range(5))
        headers = [(name.encode(), value.encode()) for name, value in request.get("headers", ())]
        path, method = request.get("path", "/login"), request.get("method", "GET")
        told = scope(path, method=method, headers=headers, client=("10.0.0.1", 1))

        async def refuse() -> None:
            await site.app(told, None, ignore_message)

        loop = site.loop  # type: ignore[attr-defined]
        return min(timed(lambda: loop.run_until_complete(refuse())) for _ in range(5))

    # A machine that is busy with something else may slow one of the two; what grows too fast does so every time.
    assert any(seconds(4 * LARGE) < 10 * seconds(LARGE) + 0.005 for _ in range(5))
    assert seconds(2**16) < 0.05  # what servers let through at most


async def ignore_message(message: Any) -> None:
    pass


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, which do not depend on what else the machine is doing."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
