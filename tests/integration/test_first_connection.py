"""The first request of a limiter finds a connection, also where Redis takes longer to accept one than a request may."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from headgate import AsyncLimiter, Limit, Limiter
from servers import RedisServer

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
