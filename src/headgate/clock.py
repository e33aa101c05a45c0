"""Where time comes from: whole microseconds since the epoch, from one place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Clock", "SystemClock", "in_ns"]


class Clock(Protocol):
    """Anything that tells the time in microseconds; `headgate.testing.FakeClock` is one that you set yourself."""

    def now_us(self) -> int: ...


class SystemClock:
    """This machine's clock. It may step back: the algorithms never mint capacity when it does."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.time_ns() // 1000


def in_ns(clock: Clock | None) -> Callable[[], int]:
    """What tells the clock's time in nanoseconds: for that of the system, without a Python call in between."""
    return time.time_ns if clock is None or isinstance(clock, SystemClock) else lambda: clock.now_us() * 1000
