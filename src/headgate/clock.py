"""Clocks: whole microseconds since the epoch, and units of that."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DAY_US", "EPOCH", "MINUTE_US", "SECOND_US", "Clock", "SystemClock", "in_ns"]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SECOND_US: Final = 1_000_000
MINUTE_US: Final = 60 * SECOND_US
DAY_US: Final = 86_400 * SECOND_US


class Clock(Protocol):
    """A source of time in microseconds; `headgate.testing.FakeClock` is one for tests."""

    def now_us(self) -> int: ...


class SystemClock:
    """The clock of this machine. It may step back; the algorithms never create capacity when it does."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.time_ns() // 1000


def in_ns(clock: Clock | None) -> Callable[[], int]:
    """A function that returns the time of a clock in nanoseconds; for the system clock, without a Python call."""
    return time.time_ns if clock is None or isinstance(clock, SystemClock) else lambda: clock.now_us() * 1000
