"""Single flight: of identical requests whose cached denial has just ended, one asks the store for all of them.

Without it, all of them would reach the store at the same moment, and usually one passes. The leader's answer also
answers the others if it says until when they are denied. If it says that more may pass, so many of them ask next.
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

MAX_AGE_S: Final = 1.0
"""Age from which no request joins a flight: its leader may be gone without having ended it."""


class SingleFlight:
    """Requests on their way to the store on behalf of all identical ones: as many as are likely to pass."""

    __slots__ = ("_is_over", "_leaders", "_lock", "_now", "_seats", "_started", "_wakers", "error")

    def __init__(self, seats: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._seats = seats
        """Requests that may still become leaders."""
        self._leaders = 0
        self._now = now
        self._started = now()
        self._lock = threading.RLock()
        self._is_over = False
        self._wakers: list[Callable[[], Any]] = []
        self.error: StoreError | None = None
        """The error with which the store failed."""

    @property
    def is_lost(self) -> bool:
        """True if it has lasted too long to wait for it."""
        return self._now() - self._started > MAX_AGE_S

    @property
    def has_waiters(self) -> bool:
        return bool(self._wakers)

    def try_lead(self) -> bool:
        """True if the caller is to ask the store, and to call `finish_leader` afterwards."""
        with self._lock:
            if not self._seats:
                return False
            self._seats -= 1
            self._leaders += 1
            return True

    def finish_leader(self, *, is_denied: bool) -> bool:
        """True if the flight is over: the answer denies the others, too, or no other leader is under way."""
        with self._lock:
            self._leaders -= 1
            return is_denied or self._leaders <= 0

    def end(self) -> None:
        """Wake all waiters."""
        with self._lock:
            self._is_over = True
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def add_waiter(self, wake: Callable[[], Any]) -> bool:
        """Call `wake` when the flight is over; False if it is over already."""
        with self._lock:
            if not self._is_over:
                self._wakers.append(wake)
            return not self._is_over

    def wait(self, timeout: float) -> None:
        """Block the thread until the flight is over, or the timeout."""
        over = threading.Lock()
        over.acquire()
        if self.add_waiter(over.release):
            over.acquire(timeout=timeout)

    def future(self, timeout: float) -> asyncio.Future[None]:
        """A future that is done when the flight is over, or at the timeout."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def wake() -> None:
            with suppress(RuntimeError):  # its loop was closed in the meantime
                if threading.get_ident() == thread:
                    _finish(future)
                else:
                    loop.call_soon_threadsafe(_finish, future)

        if self.add_waiter(wake):
            timer = loop.call_later(timeout, _finish, future)
            future.add_done_callback(lambda _: timer.cancel())
        else:
            future.set_result(None)
        return future


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
