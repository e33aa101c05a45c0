"""The budget holds for each request, whatever else happens: one shard of a cluster hangs, or the primary of a Sentinel
set. Requests to the other shards notice nothing of it."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter, StoreError
from support.faults import LONG, paused, timed
from support.servers import RedisCluster, SentinelSet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUDGET = 0.4
MOST = 0.7
"""Seconds that any request may take on a busy machine; twice the budget is 0.8."""
HANGS = 1.5
"""Seconds; a cluster whose primary is away for longer begins to replace it."""


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


class Told(NamedTuple):
    began: float
    seconds: float
    answer: Any


def ask_with_threads(
    url: str, options: dict[str, Any], asked: list[tuple[Key, ...]], break_it: Callable[[], None]
) -> list[list[Told]]:
    """What each of several threads was told, each of which asks for its own keys all the time."""
    told: list[list[Told]] = [[] for _ in asked]
    stopped = threading.Event()
    with Limiter(url, lease=0, remember=0, **options) as limiter:

        def work(index: int) -> None:
            while not stopped.is_set():
                began = time.monotonic()
                answer, seconds = timed(lambda: limiter.check(*asked[index]))
                told[index].append(Told(began, seconds, answer))
                time.sleep(0.005)

        for keys in asked:
            wait_until(lambda keys=keys: is_exact(timed(lambda: limiter.check(*keys)).answer), "an exact answer")  # type: ignore[misc]
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(asked))]
        for thread in threads:
            thread.start()
        try:
            break_it()
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
        for keys in asked:
            wait_until(lambda keys=keys: is_exact(timed(lambda: limiter.check(*keys)).answer), "an exact answer again")  # type: ignore[misc]
    return told


def ask_with_tasks(
    url: str, options: dict[str, Any], asked: list[tuple[Key, ...]], break_it: Callable[[], None]
) -> list[list[Told]]:
    """The same with tasks."""
    told: list[list[Told]] = [[] for _ in asked]

    async def main() -> None:
        async with AsyncLimiter(url, lease=0, remember=0, **options) as limiter:

            async def ask(keys: tuple[Key, ...]) -> Any:
                try:
                    return await limiter.check(*keys)
                except StoreError as error:
                    return error

            async def work(index: int) -> None:
                while True:
                    began = time.monotonic()
                    answer = await ask(asked[index])
                    told[index].append(Told(began, time.monotonic() - began, answer))
                    await asyncio.sleep(0.005)

            async def become_exact() -> None:
                for keys in asked:
                    async with asyncio.timeout(20):
                        while not is_exact(await ask(keys)):  # noqa: ASYNC110
                            await asyncio.sleep(0.01)

            await become_exact()
            tasks = [asyncio.create_task(work(index)) for index in range(len(asked))]
            await asyncio.to_thread(break_it)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await become_exact()

    asyncio.run(main())
    return told


def is_exact(answer: Any) -> bool:
    return isinstance(answer, Decision) and answer.degraded is None


both_kinds = pytest.mark.parametrize("ask", [ask_with_threads, ask_with_tasks], ids=["sync", "async"])
both_modes = pytest.mark.parametrize("mode", ["raise", "closed"])


@both_kinds
@both_modes
def test_hanging_shard_delays_only_its_own_keys(own_cluster: RedisCluster, unique: str, ask: Any, mode: str) -> None:
    hanging, *healthy = own_cluster.nodes[:3]
    keys: dict[int, list[Key]] = {}
    for number in range(100):
        key = Limit(10**9, LONG, name=f"{unique}-{number}").by("ada")
        keys.setdefault(own_cluster.primary_for(f"headgate:{key.limit.name}:token_bucket.1:ada").port, []).append(key)
        if len(keys) == 3 and min(map(len, keys.values())) >= 3:
            break
    lost, one, other = (keys[node.port] for node in (hanging, *healthy))
    need_it = [(lost[0],), (lost[1],), (lost[2], one[2]), (lost[0], one[0], other[0])]
    do_not = [(one[0],), (one[1],), (other[0],), (other[1], one[1]), (one[2], other[2])]
    times: list[float] = []

    def hang() -> None:
        time.sleep(0.3)
        with paused(hanging):
            times.append(time.monotonic())
            time.sleep(HANGS)
            times.append(time.monotonic())

    told = ask(own_cluster.url, {"on_failure": mode, "budget": BUDGET}, [*need_it, *do_not], hang)
    start, end = times
    hit = [each for rows in told[: len(need_it)] for each in rows if start < each.began < end]
    spared = [each for rows in told[len(need_it) :] for each in rows if start < each.began < end]
    assert sum(not is_exact(each.answer) for each in hit) > 4
    assert max(each.seconds for each in hit) < MOST
    assert max(each.seconds for each in spared) < MOST
    assert statistics.median(each.seconds for each in spared) < BUDGET / 8
    assert sum(each.seconds > BUDGET / 2 for each in spared) <= len(spared) // 50
    assert sum(not is_exact(each.answer) for each in spared) <= len(spared) // 50
    assert min(sum(start < each.began < end for each in rows) for rows in told[len(need_it) :]) > 20


@both_kinds
@both_modes
@pytest.mark.parametrize("hanging", ["primary", "sentinel", "both"])
def test_budget_holds_where_a_sentinel_or_its_primary_hangs(
    sentinel_set: SentinelSet, unique: str, ask: Any, mode: str, hanging: str
) -> None:
    primary, first = sentinel_set.nodes[0], sentinel_set.sentinels[0]
    broken = {"primary": [primary], "sentinel": [first], "both": [primary, first]}[hanging]
    asked = [(Limit(10**9, LONG, name=unique).by(str(number)),) for number in range(6)]

    def hang() -> None:
        time.sleep(0.2)
        with primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for server in broken:
            server.pause()
        try:
            time.sleep(HANGS)
        finally:
            for server in broken:
                server.resume()

    told = ask(sentinel_set.urls, {"on_failure": mode, "budget": BUDGET}, asked, hang)
    assert max(each.seconds for rows in told for each in rows) < MOST
    assert min(map(len, told)) > 3


@pytest.fixture(scope="module")
def sentinel_set() -> Iterator[SentinelSet]:
    with SentinelSet() as sentinel:
        yield sentinel
