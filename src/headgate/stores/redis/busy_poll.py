"""Whether to watch for an answer, or to sleep for it: pure, for threads and asyncio alike.

On a virtual machine, to be put to sleep and woken takes longer than a server that is near takes to answer, and as much
of the processor. So who has nothing else to do looks again and again for a moment. Where that was in vain a few times,
it is left for a while.
"""

from __future__ import annotations

from typing import Final

__all__ = ["IN_VAIN", "REST", "WATCH", "BusyPoll"]

WATCH: Final = 0.00015
"""Seconds for which an answer is watched for."""
IN_VAIN: Final = 4
REST: Final = 256
"""After so many answers in a row that did not come meanwhile, so many are slept for: a server that is far away is
hardly watched for, and one that was asleep itself has time to wake up."""


class BusyPoll:
    """Of one connection. Each answer that `is_due` must be told to have `ended`."""

    __slots__ = ("_in_vain", "_rest")

    def __init__(self) -> None:
        self._in_vain = 0
        self._rest = 0
        """How many answers are to be slept for."""

    def is_due(self) -> bool:
        """Whether to watch for the next answer."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def ended(self, *, in_vain: bool) -> None:
        """It has come, or it has not."""
        if not in_vain:
            self._in_vain = 0
            return
        self._in_vain += 1
        if self._in_vain == IN_VAIN:
            self._rest, self._in_vain = REST, 0
