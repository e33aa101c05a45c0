"""Where time comes from: whole microseconds since the epoch, from one place."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Anything that tells the time in microseconds; `headgate.testing.FakeClock` is one that you set yourself."""

    def now_us(self) -> int: ...


class SystemClock:
    """This machine's clock. It may step back: the algorithms never mint capacity when it does."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.time_ns() // 1000
