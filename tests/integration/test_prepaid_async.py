"""Prepaid tokens of hot keys under asyncio: cancelled requests, closing, and refills in flight."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from headgate import AsyncLimiter, Decision, Limit
from headgate.local.prepaid import RefillCheck
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import RedisServer


every_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@every_loop
def test_cancelled_refill_denies_only_briefly(server: RedisServer, run: Callable[[Any], Any]) -> None:
    limit = Limit(2_000, timedelta(seconds=1), name="cancelled")

    async def main() -> float:
        async with AsyncLimiter(server.url) as limiter:
            limiter.engine.local.prepaid.announce([limit])
            key = limit.by("everybody")
            while (await limiter.check(key)).allowed:
                pass
            await asyncio.sleep(0.05)
            kept = []  # a task that is kept keeps its error, and that the frames that it went through
            while not kept:
                task = asyncio.create_task(limiter.check(key))
                await asyncio.sleep(0)
                if not task.done():
                    task.cancel()
                    kept.append(task)
            await asyncio.wait(kept)
            start = time.monotonic()
            decision = await limiter.acquire(key, timeout=5)
            assert decision.allowed
            return time.monotonic() - start

    assert run(main()) < 0.5


@every_loop
@pytest.mark.parametrize("lease", [0, 0.1])
def test_cancelled_requests_leave_nothing_behind(server: RedisServer, run: Callable[[Any], Any], lease: float) -> None:
    chance = random.Random(7)
    limit = Limit(2_000, timedelta(days=1), name=f"storm-{lease}")
    small = Limit(5, timedelta(days=1), name="small")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncLimiter(server.url, lease=lease) as limiter:
            limiter.engine.local.prepaid.announce([limit] if lease else [])
            admitted = 0
            for turn in range(150):
                keys = [(limit.by("a"), small.by(str(turn))) if i % 5 == 0 else (limit.by("a"),) for i in range(20)]
                tasks = [asyncio.create_task(limiter.check(*each)) for each in keys]
                for task in tasks:
                    if chance.random() < 0.3:
                        loop.call_later(chance.choice((0, 0.0002, 0.001)) * chance.random(), task.cancel)
                done, late = await asyncio.wait(tasks, timeout=5)
                assert not late
                admitted += sum([not task.cancelled() and task.result().allowed for task in done])
            await asyncio.sleep(0.1)
            (batcher,) = limiter.engine.store.batchers.values()
            lane = batcher.lanes.default
            assert (lane.in_flight, lane.waiting, lane.futures, lane.arrivals) == (0, [], [], [])
            assert [len(connection.pending) for connection in batcher.connections.values()] == [0]
            assert admitted <= 2_000
            assert admitted + (await limiter.peek(limit.by("a"))).remaining <= 2_000

    run(main())


@every_loop
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log"])
def test_cancelled_checks_of_a_hot_key_are_not_overcharged(
    remote_url: str, run: Callable[[Any], Any], unique: str, algorithm: str
) -> None:
    chance = random.Random(11)
    limit = Limit(2_000_000, timedelta(days=30), name=unique, algorithm=algorithm)
    key = limit.by("everybody")

    async def main() -> tuple[int, int, int, int]:
        loop = asyncio.get_running_loop()
        requested = admitted = 0
        limiter = AsyncLimiter(remote_url)
        limiter.engine.local.prepaid.announce([limit])
        for _ in range(200):
            tasks = [asyncio.create_task(limiter.check(key)) for _ in range(40)]
            requested += len(tasks)
            for task in tasks:
                if chance.random() < 0.4:
                    loop.call_later(chance.choice((0, 0.0002, 0.001)) * chance.random(), task.cancel)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            admitted += sum([isinstance(answer, Decision) and answer.allowed for answer in answers])
        prepaid = limiter.stats["prepaid"]
        await limiter.close()
        async with AsyncLimiter(remote_url) as other:
            charged = limit.capacity - (await other.peek(key)).remaining
        return admitted, charged, requested, prepaid

    admitted, charged, requested, prepaid = run(main())
    assert prepaid > 0
    assert admitted <= charged <= requested


@every_loop
def test_close_returns_tokens_of_refills_in_flight(server: RedisServer, run: Callable[[Any], Any]) -> None:
    limit = Limit(100_000, timedelta(days=1), name="closing", algorithm="fixed_window")
    key = limit.by("everybody")

    async def main() -> int:
        limiter = AsyncLimiter(server.url)
        limiter.engine.local.prepaid.announce([limit])
        task = asyncio.create_task(limiter.check(key))
        await asyncio.sleep(0)
        assert limiter.engine.local.prepaid.pending_refills == 1
        task.cancel()
        await limiter.close()
        async with AsyncLimiter(server.url) as other:
            return limit.capacity - (await other.peek(key)).remaining

    assert run(main()) == 1


@every_loop
def test_refill_does_not_wait_behind_earlier_requests(server: RedisServer, run: Callable[[Any], Any]) -> None:
    """Else a process that is behind stays behind: what it orders would have ended before it comes."""
    limit = Limit(100_000, timedelta(days=1), name="behind")

    async def main() -> int:
        async with AsyncLimiter(server.url) as limiter:
            answered: list[int] = []
            calls = [Check((limit.by(str(number)),), 1) for number in range(3_000)]
            futures = [limiter.engine.store.run(call) for call in (*calls, RefillCheck((limit.by("hot"),), 100))]
            for number, future in enumerate(futures):
                future.add_done_callback(lambda _, number=number: answered.append(number))
            await asyncio.gather(*futures)
            await asyncio.sleep(0)
            return answered.index(3_000)

    assert run(main()) < 1_000
