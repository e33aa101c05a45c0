"""Adaptive busy polling: decides when to poll for a reply instead of sleeping.

On a virtual machine, being put to sleep and woken takes longer than a nearby server takes to reply, and as much CPU
time. After a few polls without a reply, polling pauses: the server is far away, or was asleep itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BUSY_POLL_S", "MAX_MISSES", "PAUSE_REPLIES", "BusyPoll"]

BUSY_POLL_S: Final = 0.00015
"""Time for which a reply is polled for."""
MAX_MISSES: Final = 4
"""Misses in a row that pause polling."""
PAUSE_REPLIES: Final = 256
"""Replies for which polling pauses."""


class BusyPoll:
    """The polling state of one connection. Call `record` after every reply for which `should_poll` was true."""

    __slots__ = ("_misses", "_paused")

    def __init__(self) -> None:
        self._misses = self._paused = 0

    def should_poll(self) -> bool:
        if self._paused:
            self._paused -= 1
            return False
        return True

    def record(self, *, is_hit: bool) -> None:
        self._misses = 0 if is_hit else self._misses + 1
        if self._misses == MAX_MISSES:
            self._paused, self._misses = PAUSE_REPLIES, 0
