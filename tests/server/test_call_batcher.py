"""Batching of concurrent gRPC calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headgate.server import call_batcher
from headgate.server.call_batcher import IDLE_PASSES, MAX_CALLS, CallBatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Call:
    """A call in progress, as grpc.aio describes it."""

    def __init__(self, batcher: CallBatcher) -> None:
        self._callbacks: list[Callable[[Any], None]] = []
        self.turn = batcher.join(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)

    @property
    def waits(self) -> bool:
        return self.turn is not None and not self.turn.done()


async def passes(number: int) -> None:
    """Let the event loop run."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_call_that_is_alone_does_not_wait() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        first = Call(batcher)
        assert first.turn is None
        first.end()
        assert Call(batcher).turn is None

    asyncio.run(main())


def test_a_call_waits_for_those_that_arrive_after_it() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        _first, second = Call(batcher), Call(batcher)
        await passes(IDLE_PASSES // 2)
        third = Call(batcher)
        await passes(IDLE_PASSES // 2 + 1)
        assert second.waits
        assert third.waits
        await passes(IDLE_PASSES)
        assert not second.waits
        assert not third.waits
        fourth = Call(batcher)
        assert fourth.waits
        await passes(IDLE_PASSES + 1)
        assert not fourth.waits

    asyncio.run(main())


def test_calls_do_not_wait_until_others_stop_arriving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_batcher, "MAX_CALLS", 10**9)

    async def main() -> None:
        batcher = CallBatcher()
        _first, second = Call(batcher), Call(batcher)
        while second.waits:
            assert Call(batcher).waits
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_full_batch_does_not_wait() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        calls = [Call(batcher) for _ in range(MAX_CALLS + 2)]
        assert [each.waits for each in calls] == [False] * (MAX_CALLS + 1) + [True]

    asyncio.run(main())


def test_no_call_waits_for_a_slow_one() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        _slow, call = Call(batcher), Call(batcher)
        assert call.turn is not None
        await asyncio.wait_for(call.turn, 5)

    asyncio.run(main())


def test_cancelled_calls_do_not_delay_others() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        _first, cancelled, other = Call(batcher), Call(batcher), Call(batcher)
        assert cancelled.turn is not None
        cancelled.turn.cancel()
        cancelled.end()
        assert other.turn is not None
        await asyncio.wait_for(other.turn, 5)

    asyncio.run(main())
