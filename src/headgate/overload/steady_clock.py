"""The clock of load shedders: the time of day at import, continued by the monotonic clock, so that it never steps."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["steady_now_us"]

_OFFSET_NS: Final = time.time_ns() - time.monotonic_ns()


def steady_now_us() -> int:
    """Microseconds since the epoch. Processes agree as far as their clocks did when they were started."""
    return (time.monotonic_ns() + _OFFSET_NS) // 1000
