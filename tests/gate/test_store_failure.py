"""Requests through a gate whose Redis server fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from headgate.adapters.asgi import HeadgateMiddleware
from headgate.policy.loader import read
from support.asgi_client import scope, talk
from support.servers import RedisServer, wait_until
from support.sites import END_OF_BODY, fastapi_item_app, policy_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sites import MakeSite


def test_script_flush_loses_no_request(make_item_site: MakeSite, redis7: RedisServer, unique: str) -> None:
    """P11, row 17: SCRIPT FLUSH was an exception in the request. And every key ends."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "4/minute"}), redis7.url, namespace=unique, budget=5.0)
    got = []
    with redis7.client() as redis:
        for _ in range(6):
            redis.script_flush()
            got.append(site.ask("/items/1").status)
        lives = [redis.pttl(key) for key in redis.scan_iter(match=f"{unique}:[^%]*", count=1000)]
    assert got == [200] * 4 + [429] * 2
    assert len(lives) == 1
    assert lives[0] > 0


FAILING = policy_json(
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
def test_store_outage_costs_milliseconds_and_follows_the_failure_mode(make_item_site: MakeSite, how: str) -> None:
    """P10 and row 36: 500s while Redis is down, and seconds or for ever while it is stopped. `local` is a fifth."""
    with RedisServer("redis") as server:
        site = make_item_site(FAILING, server.url, budget=0.02)
        # To connect may take a busy machine longer than the budget.
        wait_until(lambda: site.ask("/items/2").status == 200, "the store to be asked")
        assert [site.ask(f"/items/{number}").status for number in (1, 2, 3)] == [200, 200, 200]
        with stopped(server, how):
            start = time.monotonic()
            got = [[site.ask(f"/items/{number}").status for _ in range(8)] for number in (1, 2, 3, 4)]
            took = time.monotonic() - start
        assert got == [[200] * 8, [503] * 8, [200] * 2 + [429] * 6, [200] * 8]
        assert took < 2.5  # 32 requests


def test_event_loop_is_not_blocked_by_a_hung_store() -> None:
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
        app = HeadgateMiddleware(fastapi_item_app([]), read(FAILING), server.url, budget=0.5)
        server.pause()
        start = time.monotonic()
        got, longest = asyncio.run(run(app))
        took = time.monotonic() - start
        server.resume()
    assert got == [503] * 20
    assert took >= 0.5  # they did wait
    assert longest < 0.25
