"""Batching of gRPC calls: those that arrive together reach the store together."""

from __future__ import annotations

import asyncio
from typing import Any, Final

__all__ = ["CallBatcher"]

MAX_CALLS: Final = 16
MAX_WAIT_S: Final = 0.001


class CallBatcher:
    """Lets a call wait while others are in progress, and continue together with those that arrive meanwhile.

    grpc.aio accepts one call in each iteration of the event loop, so that each would run a script of its own: the store
    batches the calls of one iteration. A call that is alone does not wait, and none waits longer than MAX_WAIT_S.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unfinished = 0
        """Calls whose answer was not sent."""
        self._waiting: list[asyncio.Future[None]] = []
        """Those of them that wait."""
        self._timer: asyncio.TimerHandle | None = None

    def join(self, context: Any) -> asyncio.Future[None] | None:
        """The turn of the call with this context of gRPC, to wait for; None if it is alone."""
        self._unfinished += 1
        context.add_done_callback(self._end)
        if self._unfinished == 1:
            return None
        turn = self._loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == MAX_CALLS:
            self._release()
        elif self._timer is None:
            self._timer = self._loop.call_later(MAX_WAIT_S, self._release)
        return turn

    def _end(self, _: object) -> None:
        self._unfinished -= 1
        if self._waiting and self._unfinished <= len(self._waiting):
            self._release()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():  # cancelled by the client
                turn.set_result(None)
