"""The deadline of calls."""

from __future__ import annotations

import asyncio

import pytest

from headgate.server.call_deadline import CallDeadline, CallTimedOut


async def value() -> int:
    await asyncio.sleep(0)
    return 7


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_call_in_time_returns_its_result() -> None:
    async def main() -> list[int]:
        deadline = CallDeadline(60)
        return [await deadline.run(value()), *await asyncio.gather(*[deadline.run(value()) for _ in range(3)])]

    assert asyncio.run(main()) == [7, 7, 7, 7]


def test_calls_that_take_too_long_end_and_their_tasks_go_on() -> None:
    async def main() -> list[str]:
        deadline = CallDeadline(0.01)

        async def call() -> str:
            with pytest.raises(CallTimedOut):
                await deadline.run(never())
            assert await deadline.run(value()) == 7  # the task is not cancelled any more
            return "done"

        return await asyncio.gather(call(), call())

    assert asyncio.run(main()) == ["done", "done"]


def test_a_cancelled_task_stays_cancelled() -> None:
    async def main() -> None:
        task = asyncio.create_task(CallDeadline(60).run(never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_an_error_is_that_of_the_call() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(CallDeadline(60).run(fail()))


def test_a_timeout_of_the_call_itself_is_another_error() -> None:
    async def fail() -> None:
        raise TimeoutError("from within")

    with pytest.raises(TimeoutError) as raised:
        asyncio.run(CallDeadline(60).run(fail()))
    assert raised.type is TimeoutError
