"""Leases that are kept alive while a block runs: a thread for `Limiter.hold`, a task for `AsyncLimiter.hold`.

Also how long they are held, to estimate when a place in a concurrency limit becomes free.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from headgate._fork import reinit_after_fork
from headgate.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.stores.operations import Check

__all__ = ["HoldTimes", "LeaseRenewer", "leaving", "left_if_cancelled", "renew_forever"]

logger = logging.getLogger("headgate")

RENEWALS_PER_LEASE: Final = 3
"""Two renewals may fail before a lease is lost."""


class HoldTimes:
    """Recent hold times of concurrency limits in this process: an exponentially weighted mean for each limit.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> streams, times = Limit(2, timedelta(minutes=1), algorithm="concurrency", name="streams"), HoldTimes()
    >>> times.expected_wait_us(streams)
    2000000
    >>> times.record(streams, 30.0)
    >>> times.expected_wait_us(streams), times.expected_wait_us(streams, places=2)
    (15000000, 30000000)
    """

    DEFAULT_WAIT_US: Final = 2_000_000
    """Before anything was observed: long enough for clients not to hammer, short compared with most lease times."""
    MIN_WAIT_US: Final = 1_000_000
    WEIGHT: Final = 0.2
    """Of the newest hold time in the mean."""
    MAX_LIMITS: Final = 1_000
    """Limits that a mean is kept for; the least recently used goes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._means: OrderedDict[str, float] = OrderedDict()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """A thread that held the lock does not exist in a child."""
        self._lock = threading.Lock()

    def record(self, limit: Limit, seconds: float) -> None:
        """Note that a lease was held for so long."""
        with self._lock:
            mean = self._means.get(limit.space, seconds)
            self._means[limit.space] = mean + self.WEIGHT * (seconds - mean)
            self._means.move_to_end(limit.space)
            if len(self._means) > self.MAX_LIMITS:
                self._means.popitem(last=False)

    def expected_wait_us(self, limit: Limit, places: int = 1) -> int:
        """An estimate of the time until so many places of an exhausted limit are free.

        With all places taken at independent moments, one becomes free every mean hold time divided by the quota.
        """
        mean = self._means.get(limit.space)
        if mean is None:
            return self.DEFAULT_WAIT_US
        return max(self.MIN_WAIT_US, round(mean * 1_000_000 * min(places, limit.quota) / limit.quota))


class LeaseRenewer:
    """Renews the leases of all holds of one limiter from one thread, which lives only while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Key, str, Callable[..., bool]]] = []
        self._held: set[int] = set()
        self._numbers = count()
        self._thread: threading.Thread | None = None
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """The parent keeps its own leases alive; a child has none yet, and no thread."""
        self._changed = threading.Condition()
        self._due, self._held, self._thread = [], set(), None

    def start(self, keys: list[Key], id: str, renew: Callable[..., bool]) -> Callable[[], None]:
        """Keep the leases alive until the returned function is called."""
        with self._changed:
            numbers = [self._schedule(key, id, renew) for key in keys]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headgate-renewals", daemon=True)
                self._thread.start()
            self._changed.notify()
        return lambda: self._stop(numbers)

    def close(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify()

    def _schedule(self, key: Key, id: str, renew: Callable[..., bool]) -> int:
        number = next(self._numbers)
        self._held.add(number)
        heappush(self._due, (time.monotonic() + _interval(key), number, key, id, renew))
        return number

    def _stop(self, numbers: list[int]) -> None:
        with self._changed:
            self._held.difference_update(numbers)
            self._changed.notify()

    def _work(self) -> None:
        while (due := self._next()) is not None:
            key, id, renew = due
            with _renewing(key, id) as told:
                told.append(renew(key, id=id))

    def _next(self) -> tuple[Key, str, Callable[..., bool]] | None:
        """The lease to renew now, put back for its next time; None when nothing is held any more."""
        with self._changed:
            while self._held:
                if self._due[0][1] not in self._held:
                    heappop(self._due)
                    continue
                wait = self._due[0][0] - time.monotonic()
                if wait <= 0:
                    _, number, key, id, renew = heappop(self._due)
                    heappush(self._due, (time.monotonic() + _interval(key), number, key, id, renew))
                    return key, id, renew
                self._changed.wait(wait)
            self._due.clear()
            self._thread = None
            return None


async def renew_forever(keys: list[Key], id: str, renew: Callable[..., Awaitable[bool]]) -> None:
    """Keep the leases alive until cancelled."""
    while True:
        await asyncio.sleep(min(map(_interval, keys)))
        for key in keys:
            with _renewing(key, id) as told:
                told.append(await renew(key, id=id))


_farewells: set[asyncio.Task[None]] = set()


@contextmanager
def left_if_cancelled(call: Check, leave: Callable[..., Awaitable[bool]]) -> Iterator[None]:
    """Who is cancelled on the way in may get in all the same, and nobody else knows of it: so it leaves at once."""

    async def say_farewell(key: Key, id: str) -> None:
        with leaving(key, id):
            await leave(key, id=id)

    try:
        yield
    except asyncio.CancelledError:
        for key in call.keys:
            if key.limit.algorithm == "concurrency" and call.id is not None:
                task = asyncio.create_task(say_farewell(key, call.id))
                _farewells.add(task)  # a loop keeps only weak references
                task.add_done_callback(_farewells.discard)
        raise


@contextmanager
def leaving(key: Key, id: str) -> Iterator[None]:
    """A store that fails at the end of a hold does not fail the work that was held for: the lease ends by itself."""
    try:
        yield
    except StoreError as error:
        logger.warning("lease %r on limit %r could not be left, and ends by itself: %s", id, key.limit.name, error)


@contextmanager
def _renewing(key: Key, id: str) -> Iterator[list[bool]]:
    """A renewal that failed, or came too late, is told to the log: the holder goes on, and the next one may succeed."""
    held: list[bool] = []
    try:
        yield held
    except StoreError as error:
        logger.warning("lease %r on limit %r could not be renewed: %s", id, key.limit.name, error)
    if held == [False]:
        logger.warning("lease %r on limit %r was lost: it was not renewed in time", id, key.limit.name)


def _interval(key: Key) -> float:
    return key.limit.period_us / 1_000_000 / RENEWALS_PER_LEASE
