"""The first request of a limiter finds a connection, also where Redis takes longer to accept one than a request may."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from headgate import AsyncLimiter, Limit, Limiter
from headgate.gate.gate import AsyncGate, Gate
from headgate.policy import read
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = Limit(10, timedelta(minutes=1)).by("ada")
BUSY = 0.12
BUDGET = 0.05
"""Less than that, so that a request that had to connect would be answered without the store."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as one:
        yield one


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    server.pause()
    resuming = threading.Timer(BUSY, server.resume)
    resuming.start()
    try:
        yield
    finally:
        resuming.join()


def test_a_limiter_waits_for_it_while_it_is_made(server: RedisServer) -> None:
    with busy(server), Limiter(server.url, on_failure="local", budget=BUDGET) as limiter:
        assert limiter.check(KEY).degraded is None


def test_an_asynchronous_one_waits_when_it_is_entered(server: RedisServer) -> None:
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
def test_the_first_request_of_a_gate_is_decided_by_a_busy_store(server: RedisServer, is_async: bool) -> None:
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


class FakeRequest:
    method, path, mounted_path, native, peer = "GET", "/", None, None, "192.0.2.1"

    def header(self, name: str) -> list[str]:
        return []
