"""Batching of gRPC calls: those that arrive together reach the store together."""

from __future__ import annotations

import asyncio
from typing import Any, Final

__all__ = ["CallBatcher"]

MAX_CALLS: Final = 32
MAX_WAIT_S: Final = 0.001
IDLE_PASSES: Final = 10
"""Iterations of the event loop without a further call after which none is expected: 40 us if there is nothing to do."""


class CallBatcher:
    """Lets a call wait while others are in progress, and continue together with those that arrive meanwhile.

    grpc.aio accepts one call in each iteration of the event loop, so that each would run a script of its own: the store
    batches the calls of one iteration. A busy loop keeps collecting, for MAX_WAIT_S at most, as its calls would queue
    anyway. An idle one continues at once, and a call that is alone does not wait.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unfinished = 0
        """Calls whose answer was not sent."""
        self._waiting: list[asyncio.Future[None]] = []
        """Those of them that wait."""
        self._idle_passes = 0
        self._ends_at = 0.0
        self._is_watching = False

    def join(self, context: Any) -> asyncio.Future[None] | None:
        """The turn of the call with this context of gRPC, to wait for; None if it is alone."""
        self._unfinished += 1
        context.add_done_callback(self._end)
        if self._unfinished == 1:
            return None
        turn = self._loop.create_future()
        waiting = self._waiting
        waiting.append(turn)
        self._idle_passes = 0
        if len(waiting) == 1:
            self._ends_at = self._loop.time() + MAX_WAIT_S
            if not self._is_watching:
                self._is_watching = True
                self._loop.call_soon(self._watch)
        elif len(waiting) == MAX_CALLS:
            self._release()
        return turn

    def _end(self, _: object) -> None:
        self._unfinished -= 1

    def _watch(self) -> None:
        """Count the iterations of the loop until it is idle; a timer of asyncio would wait for a whole millisecond."""
        self._idle_passes += 1
        if self._waiting and (self._idle_passes >= IDLE_PASSES or self._loop.time() >= self._ends_at):
            self._release()
        if self._waiting:
            self._loop.call_soon(self._watch)
        else:
            self._is_watching = False

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():  # cancelled by the client
                turn.set_result(None)
