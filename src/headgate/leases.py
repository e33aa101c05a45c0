"""Concurrency leases: renewal while a `hold` block runs, by a thread or a task, and statistics of hold times."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidConfiguration, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.stores.operations import Check

__all__ = [
    "HoldTimes",
    "LeaseRenewer",
    "checked_timeout",
    "keep_task",
    "leased_keys",
    "log_failed_release",
    "release_on_cancel",
    "renew_forever",
]

logger = logging.getLogger("headgate")

T = TypeVar("T")
RENEWALS_PER_LEASE: Final = 3  # two renewals may fail before a lease is lost


class HoldTimes:
    """Hold times of concurrency limits in this process: an exponentially weighted moving average per limit.

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
    """Without observations: long enough to slow retries down, short compared with most lease times."""
    MIN_WAIT_US: Final = 1_000_000
    WEIGHT: Final = 0.2  # the weight of the newest hold time
    MAX_LIMITS: Final = 1_000  # upper bound on the averages; the least recently used goes first

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._means: OrderedDict[str, float] = OrderedDict()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()

    def record(self, limit: Limit, seconds: float) -> None:
        with self._lock:
            mean = self._means.get(limit.space, seconds)
            self._means[limit.space] = mean + self.WEIGHT * (seconds - mean)
            self._means.move_to_end(limit.space)
            if len(self._means) > self.MAX_LIMITS:
                self._means.popitem(last=False)

    def expected_wait_us(self, limit: Limit, places: int = 1) -> int:
        """The estimated time until so many places of an exhausted limit are free.

        If leases start independently of each other, one ends every mean hold time divided by the quota.
        """
        mean = self._means.get(limit.space)
        if mean is None:
            return self.DEFAULT_WAIT_US
        return max(self.MIN_WAIT_US, round(mean * 1_000_000 * min(places, limit.quota) / limit.quota))


class LeaseRenewer:
    """Renews the leases of all `hold` blocks of a limiter in one thread, which runs only while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Key, str, Callable[..., bool]]] = []
        self._held: set[int] = set()
        self._numbers = count()
        self._thread: threading.Thread | None = None
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave the leases to the parent."""
        self._changed = threading.Condition()
        self._due, self._held, self._thread = [], set(), None

    def start(self, keys: list[Key], id: str, renew: Callable[..., bool]) -> Callable[[], None]:
        """Renew the leases until the returned function is called."""
        with self._changed:
            numbers = [next(self._numbers) for _ in keys]
            self._held.update(numbers)
            for number, key in zip(numbers, keys, strict=True):
                heappush(self._due, (time.monotonic() + _interval(key), number, key, id, renew))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headgate-renewals", daemon=True)
                self._thread.start()
            self._changed.notify()

        def stop() -> None:
            with self._changed:
                self._held.difference_update(numbers)
                self._changed.notify()

        return stop

    def close(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify()

    def _work(self) -> None:
        while (due := self._next()) is not None:
            key, id, renew = due
            with _log_failed_renewal(key, id) as results:
                results.append(renew(key, id=id))

    def _next(self) -> tuple[Key, str, Callable[..., bool]] | None:
        """Wait for the next lease to renew, and reschedule it; None when no leases are left."""
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
    """Renew the leases until cancelled."""
    while True:
        await asyncio.sleep(min(map(_interval, keys)))
        for key in keys:
            with _log_failed_renewal(key, id) as results:
                results.append(await renew(key, id=id))


_tasks: set[asyncio.Future[Any]] = set()


def keep_task(task: asyncio.Future[T]) -> asyncio.Future[T]:
    """Keep a task alive until it is done: event loops have only weak references."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


@contextmanager
def release_on_cancel(check: Check, leave: Callable[..., Awaitable[bool]]) -> Iterator[None]:
    """Release the leases of a check that is cancelled: the store may grant them after that."""

    async def release(key: Key, id: str) -> None:
        with log_failed_release(key, id):
            await leave(key, id=id)

    try:
        yield
    except asyncio.CancelledError:
        for key in check.keys:
            if key.limit.algorithm == "concurrency" and check.id is not None:
                keep_task(asyncio.create_task(release(key, check.id)))
        raise


@contextmanager
def log_failed_release(key: Key, id: str) -> Iterator[None]:
    """Log a store error at the end of a hold: the work is done, and the lease expires by itself."""
    try:
        yield
    except StoreError as error:
        logger.warning("lease %r on limit %r could not be released and will expire: %s", id, key.limit.name, error)


@contextmanager
def _log_failed_renewal(key: Key, id: str) -> Iterator[list[bool]]:
    """Log a renewal that failed or came too late: the work goes on, and the next renewal may succeed."""
    held: list[bool] = []
    try:
        yield held
    except StoreError as error:
        logger.warning("lease %r on limit %r could not be renewed: %s", id, key.limit.name, error)
    if held == [False]:
        logger.warning("lease %r on limit %r was lost: it was not renewed in time", id, key.limit.name)


def _interval(key: Key) -> float:
    return key.limit.period_us / 1_000_000 / RENEWALS_PER_LEASE


def leased_keys(decision: Decision) -> list[Key]:
    """The keys on which a request holds a lease."""
    return [key for key in decision.keys if key.limit.algorithm == "concurrency"] if decision.allowed else []


def checked_timeout(timeout: float | None) -> float | None:
    """Seconds, or None to wait for ever."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise InvalidConfiguration(f"timeout {timeout!r} is not a number of seconds >= 0; None waits for ever")
    return timeout
