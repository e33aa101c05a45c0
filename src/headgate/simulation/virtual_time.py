"""Virtual time: a queue of events, and the runtime of a simulated process, whose clocks follow it."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from headgate.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

__all__ = ["START_NS", "VirtualRuntime", "VirtualTime"]

START_NS: Final = 1_767_225_600 * 1_000_000_000
"""2026-01-01T00:00:00Z: windows of up to a day begin with the simulation."""


class VirtualTime:
    """The time of a simulation. It advances from event to event; those of one instant run first come, first served."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self._events: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, at_ns: int, act: Callable[..., object], *args: Any) -> None:
        """Call a function at an instant, or at once if that is over."""
        heappush(self._events, (max(at_ns, self.now_ns), next(self._numbers), act, args))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now_ns + round(seconds * 1_000_000_000), act, *args)

    def advance(self, until_ns: int) -> None:
        """Run all events up to an instant, and set the time to it."""
        events = self._events
        while events and events[0][0] <= until_ns:
            self.now_ns, _, act, args = heappop(events)
            act(*args)
        self.now_ns = until_ns


class VirtualRuntime(Runtime):
    """The runtime of one simulated process. Its wall clock may be wrong by `skew_us`."""

    def __init__(self, time: VirtualTime, random: Random) -> None:
        super().__init__()
        self.random = random
        self.skew_us = 0
        self._time = time
        self._workers: list[_Worker] = []
        self.monotonic_ns = lambda: time.now_ns - START_NS
        self.monotonic = lambda: (time.now_ns - START_NS) / 1_000_000_000

    def now_us(self) -> int:
        return self._time.now_ns // 1000 + self.skew_us

    def new_event(self) -> Any:
        return _Wakeup()

    def start(self, name: str, target: Callable[..., None], *args: Any) -> Any:
        """Call the function at once: in virtual time it does not wait."""
        target(*args)
        return _Worker()

    def new_executor(self, name: str, workers: int) -> Any:
        return _Executor()

    def kill_workers(self) -> None:
        """End all background workers where they are, as a crash does."""
        for worker in self._workers:
            worker.is_alive = False

    def start_worker(self, name: str, steps: Iterator[float], wakeup: Any) -> Any:
        worker = _Worker()
        self._workers = [*filter(lambda each: each.is_alive, self._workers), worker]

        def step(number: int) -> None:
            if number != worker.steps or not worker.is_alive:  # woken before its time
                return
            worker.steps += 1
            seconds = next(steps, None)
            if seconds is None:
                worker.is_alive = False
            else:
                self._time.after(seconds, step, worker.steps)

        wakeup.wake = lambda: self._time.after(0, step, worker.steps)
        wakeup.wake()
        return worker


class _Worker:
    """A background worker, in place of a thread."""

    has_failed = is_current = False

    def __init__(self) -> None:
        self.is_alive = True
        self.steps = 0


class _Executor(Executor):
    """Carries out calls at once: in virtual time they do not wait for each other."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Wakeup:
    """An event that makes the next step of a worker due."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def set(self) -> None:
        self.wake()

    def clear(self) -> None:
        """Nothing to clear: a worker that is woken runs once."""
