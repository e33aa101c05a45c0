"""The first request of a limiter finds a connection, also where Redis takes longer to accept one than a request may."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import redis

from headgate import AsyncLimiter, Limit, Limiter
from headgate.gate.gate import AsyncGate, Gate
from headgate.policy import read
from headgate.testing import FakeRequest
from support.faults import key_of, open_breaker, reach
from support.servers import HOST, RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

KEY = Limit(10, timedelta(minutes=1)).by("ada")
BUSY = 0.12
BUDGET = 0.05
"""Less than that, so that a request that had to connect would be answered without the store."""


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    server.pause()
    resuming = threading.Timer(BUSY, server.resume)
    resuming.start()
    try:
        yield
    finally:
        resuming.join()


def test_limiter_waits_for_it_while_it_is_made(server: RedisServer) -> None:
    with busy(server), Limiter(server.url, on_failure="local", budget=BUDGET) as limiter:
        assert limiter.check(KEY).degraded is None


def test_asynchronous_one_waits_when_it_is_entered(server: RedisServer) -> None:
    async def first() -> str | None:
        async with AsyncLimiter(server.url, on_failure="local", budget=BUDGET) as limiter:
            return (await limiter.check(KEY)).degraded

    with busy(server):
        assert asyncio.run(first()) is None


def test_neither_waits_for_ever(server: RedisServer) -> None:
    server.pause()
    try:
        with Limiter(server.url, on_failure="local", budget=BUDGET) as limiter:
            assert limiter.check(KEY).degraded
    finally:
        server.resume()


@pytest.mark.parametrize("is_async", [False, True])
def test_first_request_of_a_gate_is_decided_by_a_busy_store(server: RedisServer, is_async: bool) -> None:
    policy = read("limits: [{by: ip, bucket: 1/hour, on_failure: open}]")

    async def ask() -> list[bool]:
        gate = AsyncGate(policy, server.url, budget=BUDGET)
        try:
            return [(await gate.admit(FakeRequest())).allowed for _ in range(3)]
        finally:
            await gate.close()

    with busy(server):
        if is_async:
            answers = asyncio.run(ask())
        else:
            with closing(Gate(policy, server.url, budget=BUDGET)) as gate:
                answers = [gate.admit(FakeRequest()).allowed for _ in range(3)]
    assert answers == [True, False, False]


def test_failed_credential_lookup_is_retried(unique: str) -> None:
    class Provider(redis.CredentialProvider):
        is_away = True

        def get_credentials(self) -> tuple[str, str]:
            if self.is_away:
                raise KeyError("nobody knows the token")
            return "default", "secret"

    provider, key = Provider(), key_of(unique)
    with RedisServer(password="secret") as server:
        client = redis.Redis(host=HOST, port=server.port, credential_provider=provider)
        with Limiter(client, on_failure="open", budget=BUDGET, lease=0) as limiter:
            open_breaker(limiter, key)
            provider.is_away = False
            reach(limiter, key)


def test_late_server_is_used_as_soon_as_it_listens(unique: str) -> None:
    server = RedisServer()
    try:
        with Limiter(server.url, on_failure="closed", budget=0.5) as limiter:
            wait_until(lambda: limiter.engine.store._pool._pending[None].is_done, "the first attempt to fail")
            server.start()
            time.sleep(0.2)
            assert limiter.check(key_of(unique)).degraded is None
    finally:
        server.stop()


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_a_connection_lost_early_is_replaced_within_the_budget(server: RedisServer, is_async: bool) -> None:
    async def waits() -> list[float]:
        async with AsyncLimiter(server.url, on_failure="open", budget=BUDGET) as limiter:
            await limiter.check(KEY)
            server.pause()
            return [await duration(limiter.check(KEY)) for _ in range(3)]

    async def duration(check: Awaitable[object]) -> float:
        start = time.perf_counter()
        await check
        return time.perf_counter() - start

    try:
        if is_async:
            taken = asyncio.run(waits())
        else:
            with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter:
                limiter.check(KEY)
                server.pause()
                taken = [asyncio.run(duration(asyncio.to_thread(limiter.check, KEY))) for _ in range(3)]
    finally:
        server.resume()
    assert max(taken) < 0.4  # the first connection may take half a second more
