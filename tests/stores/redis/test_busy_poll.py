"""When an answer is watched for, and that a loop which watches stays awake, and lets others run."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Limit
from headgate.stores.redis import async_store
from headgate.stores.redis.busy_poll import MAX_MISSES, PAUSE_REPLIES, BusyPoll

if TYPE_CHECKING:
    from headgate import Key
    from support.servers import RedisServer


def test_after_a_few_answers_in_vain_many_are_slept_for() -> None:
    busy_poll = BusyPoll()
    for _ in range(2):
        for _ in range(MAX_MISSES):
            assert busy_poll.should_poll()
            busy_poll.record(is_hit=False)
        assert [busy_poll.should_poll() for _ in range(PAUSE_REPLIES)] == [False] * PAUSE_REPLIES


def test_answer_that_comes_begins_the_count_anew() -> None:
    busy_poll = BusyPoll()
    for is_hit in (False, True) * MAX_MISSES:
        assert busy_poll.should_poll()
        busy_poll.record(is_hit=is_hit)
    assert busy_poll.should_poll()


class Sleeper(asyncio.SelectorEventLoop):
    """Notes how long it is ready to sleep, each time that it looks for something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[float | None] = []
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def noted(timeout: float | None = None) -> Any:
            self.naps.append(timeout)
            return select(timeout)

        selector.select = noted


async def naps_of_a_check(limiter: AsyncLimiter, *keys: Key) -> list[float | None]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Sleeper)
    await limiter.check(*keys)  # connects
    loop.naps.clear()
    assert (await limiter.check(*keys)).allowed
    return loop.naps.copy()


@pytest.mark.parametrize("limits", [1, 3])
def test_loop_that_watches_does_not_sleep(
    redis7: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch, limits: int
) -> None:
    keys = [Limit(9, timedelta(hours=1), name=f"{unique}-{number}").by("ada") for number in range(limits)]

    async def main() -> tuple[list[float | None], list[float | None]]:
        async with AsyncLimiter(redis7.url) as limiter:
            monkeypatch.setattr(async_store, "BUSY_POLL_S", 60.0)
            watched = await naps_of_a_check(limiter, *keys)
            monkeypatch.setattr(BusyPoll, "should_poll", lambda _: False)
            return watched, await naps_of_a_check(limiter, *keys)

    with asyncio.Runner(loop_factory=Sleeper) as runner:
        watched, slept = runner.run(main())
    assert set(watched) == {0}
    assert None in slept or max(nap or 0 for nap in slept) > 0


def test_others_run_while_a_loop_watches(redis7: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Limit(9, timedelta(hours=1), name=unique).by("ada")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with AsyncLimiter(redis7.url) as limiter:
            await limiter.check(key)
            monkeypatch.setattr(async_store, "BUSY_POLL_S", 60.0)
            with redis7.client() as client:
                client.client_pause(50)
            ticking = asyncio.create_task(tick())
            assert (await limiter.check(key)).allowed
            ticking.cancel()

    asyncio.run(main())
    assert ticks > 10
