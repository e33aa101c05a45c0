"""A deadline for calls that all have the same time: one timer for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["CallDeadline", "CallTimedOut"]

T = TypeVar("T")


class CallTimedOut(TimeoutError):
    """A call was ended because its time was over."""


@dataclass(slots=True, eq=False)
class _TimedCall:
    ends_at: float
    task: asyncio.Task[Any] | None
    """None once the call has ended."""
    is_expired: bool = False


class CallDeadline:
    """Ends calls that take longer than a fixed time, like `asyncio.timeout`.

    Setting a timer and taking it back for each call would take as long as a check of limits. Since all calls have the
    same time, they expire in the order in which they began, and one timer for the first is enough.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: deque[_TimedCall] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Raises CallTimedOut if its time is over."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        call = _TimedCall(loop.time() + self._seconds, task)
        self._calls.append(call)
        if self._timer is None:
            self._timer = loop.call_at(call.ends_at, self._expire, loop)
        cancelling = task.cancelling()
        try:
            return await work
        except asyncio.CancelledError as error:
            if call.is_expired and task.uncancel() <= cancelling:
                raise CallTimedOut from error
            raise
        finally:
            call.task = None
            while self._calls and self._calls[0].task is None:
                self._calls.popleft()

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the calls whose time is over, and set the timer for the next one."""
        calls, now = self._calls, loop.time()
        while calls and calls[0].ends_at <= now:
            call = calls.popleft()
            if call.task is not None:
                call.is_expired = True
                call.task.cancel()
        self._timer = loop.call_at(calls[0].ends_at, self._expire, loop) if calls else None
