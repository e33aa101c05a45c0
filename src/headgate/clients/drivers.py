"""Drivers of `PoliteClient.send`: they send and wait, for threads and for asyncio. All decisions are in the flow."""

from __future__ import annotations

import asyncio
import time
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from headgate.clients.client import Attempt, Discard, Question
from headgate.errors import InvalidConfiguration
from headgate.flow import Pause
from headgate.limiter import AsyncLimiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headgate.clients.client import PoliteClient, Reply, Steps

__all__ = ["run", "run_async"]


def run(
    client: PoliteClient, steps: Steps, send: Callable[[], Reply], discard: Callable[[Any], Any] = lambda _: None
) -> Reply:
    """Run the steps of a request in this thread."""
    sleep = getattr(client.clock, "sleep", time.sleep)
    result: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(result) if failure is None else steps.throw(failure)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        result = failure = None
        try:
            match step:
                case Pause(seconds):
                    sleep(seconds)
                case Attempt():
                    result = send()
                case Discard(reply):
                    discard(reply.native)
                case Question():
                    result = _ask(step)
        except BaseException as error:
            failure = error


async def run_async(
    client: PoliteClient,
    steps: Steps,
    send: Callable[[], Awaitable[Reply]],
    discard: Callable[[Any], Any] = lambda _: None,
) -> Reply:
    """Run the steps of a request in this task."""
    sleep = getattr(client.clock, "sleep", None)
    result: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(result) if failure is None else steps.throw(failure)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        result = failure = None
        try:
            match step:
                case Pause(seconds):
                    if sleep is not None:  # of a fake clock
                        sleep(seconds)
                    await asyncio.sleep(0 if sleep is not None else seconds)
                case Attempt():
                    result = await send()
                case Discard(reply):
                    closing = discard(reply.native)
                    if isawaitable(closing):
                        await closing
                case Question():
                    _check_async(step.limiter)
                    result = _ask(step, is_async=True)
                    if isawaitable(result):
                        result = await result
        except BaseException as error:
            failure = error


def _ask(question: Question, *, is_async: bool = False) -> Any:
    limiter = question.limiter
    if isinstance(limiter, AsyncLimiter) and not is_async:
        raise InvalidConfiguration("this client is synchronous: give it a Limiter, not an AsyncLimiter")
    if question.refund is None:
        return limiter.check(*question.keys, cost=question.cost)
    refunds = [limiter.refund(key, question.cost, of=question.refund) for key in question.keys]
    return _gather(refunds) if isinstance(limiter, AsyncLimiter) else None


async def _gather(refunds: list[Any]) -> None:
    for refund in refunds:
        await refund


def _check_async(limiter: Any) -> None:
    if not isinstance(limiter, AsyncLimiter) and limiter.engine.memory is None:
        raise InvalidConfiguration("this client is asynchronous: give it an AsyncLimiter, as a Limiter blocks the loop")
