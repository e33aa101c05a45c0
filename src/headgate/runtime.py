"""The runtime of a limiter: its clocks, random numbers and background workers.

Everything that a limiter does besides answering goes through a runtime, so that a simulation can run it in virtual
time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, Any, Final

from headgate._interrupts import BackgroundThread, InterruptSafeEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

__all__ = ["SYSTEM", "Runtime"]


class Runtime:
    """The runtime of this process: the clocks of the machine, and daemon threads. It is a `Clock`, too."""

    # Not methods, as a call in between is measurable on every request.
    monotonic_ns: Callable[[], int] = staticmethod(time.monotonic_ns)
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.random = Random()
        """Not the shared generator, which tests may seed."""

    def now_us(self) -> int:
        """The wall clock, in microseconds since the epoch; it may step."""
        return time.time_ns() // 1000

    def new_event(self) -> Any:
        """An event with `set` and `clear`, which wakes a worker."""
        return InterruptSafeEvent()

    def start(self, name: str, target: Callable[..., None], *args: Any) -> Any:
        """Run a function in the background; None if there are too many threads, or the interpreter is shutting down."""
        try:
            return BackgroundThread(name, target, *args)
        except RuntimeError:
            return None

    def new_executor(self, name: str, workers: int) -> Executor:
        """An executor for calls that wait for each other."""
        return ThreadPoolExecutor(workers, thread_name_prefix=name)

    def start_worker(self, name: str, steps: Iterator[float], wakeup: Any) -> Any:
        """Run steps in the background, each of which yields the seconds until the next; `wakeup` ends a wait."""
        return self.start(name, _run_steps, steps, wakeup)


def _run_steps(steps: Iterator[float], wakeup: InterruptSafeEvent) -> None:
    for seconds in steps:
        wakeup.wait(seconds)
        wakeup.clear()


SYSTEM: Final = Runtime()
"""The runtime of all limiters outside simulations."""
