"""One asks for all: requests that are alike, and were denied until this moment, wait for the answer to the first.

When a remembered denial ends, all who knock meanwhile would ask the store at once, and mostly one of them passes. So
the first of them asks. What it brings answers the others too, if it says until when they are denied. If it says that
there is more, so many more ask.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.errors import StoreError

__all__ = ["SingleFlight"]

LONGEST: Final = 1.0
"""Seconds after which nobody new waits for an answer: whoever asked may have vanished, and nobody was told."""


class SingleFlight:
    """Requests that go to the store for all that are alike: so many as are likely to pass. The others wait by its
    `gate`, or its `future`."""

    __slots__ = ("_asking", "_began", "_is_over", "_lock", "_places", "_wakes", "error")

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._asking = 0
        self._began = time.monotonic()
        self._lock = threading.RLock()
        self._is_over = False
        self._wakes: list[Callable[[], Any]] = []
        self.error: StoreError | None = None
        """How the store has failed, if it did."""

    @property
    def is_lost(self) -> bool:
        """Whether it has lasted for too long to wait for it."""
        return time.monotonic() - self._began > LONGEST

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for it."""
        return bool(self._wakes)

    def take(self) -> bool:
        """Whether the caller is one of those who ask; it has to `leave` afterwards."""
        with self._lock:
            if not self._places:
                return False
            self._places -= 1
            self._asking += 1
            return True

    def leave(self, *, is_denied: bool) -> bool:
        """Whether it is over with this one: the others are denied by what it brings, or nobody asks any more."""
        with self._lock:
            self._asking -= 1
            return is_denied or self._asking <= 0

    def end(self) -> None:
        """Wake all who wait."""
        with self._lock:
            self._is_over = True
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def gate(self) -> threading.Lock:
        """For threads: a lock that can be acquired once it is over."""
        gate = threading.Lock()
        with self._lock:
            if not self._is_over:
                gate.acquire()
                self._wakes.append(gate.release)
        return gate

    def future(self, seconds: float) -> asyncio.Future[None]:
        """For tasks: a future that is done once it is over, or after so many seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def wake() -> None:
            with suppress(RuntimeError):  # its loop was closed meanwhile
                if threading.get_ident() == thread:
                    _finish(future)
                else:
                    loop.call_soon_threadsafe(_finish, future)

        with self._lock:
            if self._is_over:
                future.set_result(None)
                return future
            self._wakes.append(wake)
        timer = loop.call_later(seconds, _finish, future)
        future.add_done_callback(lambda _: timer.cancel())
        return future


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
