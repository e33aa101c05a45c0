"""Batching of concurrent gRPC calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headgate.server.call_batcher import MAX_CALLS, CallBatcher

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_a_call_waits_for_those_in_progress_and_continues_with_the_others() -> None:
    async def main() -> None:
        batcher = CallBatcher()
        first, second, third = Call(batcher), Call(batcher), Call(batcher)
        assert [each.waits for each in (first, second, third)] == [False, True, True]
        first.end()
        fourth = Call(batcher)
        assert [each.waits for each in (second, third, fourth)] == [False, False, True]
        second.end()
        assert [fourth.waits, third.end(), fourth.waits] == [True, None, False]  # type: ignore[func-returns-value]
        fourth.end()
        assert Call(batcher).turn is None

    asyncio.run(main())


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
        first, cancelled, other = Call(batcher), Call(batcher), Call(batcher)
        assert cancelled.turn is not None
        cancelled.turn.cancel()
        cancelled.end()
        first.end()
        assert not other.waits

    asyncio.run(main())
