"""Carries what was decided to a sink in the background: in batches, at least once each, and never at the cost of a
request.

One thread does it, which lives while there is something to do. What the sink does not take is sent again until it does;
meanwhile the queue fills up to its bound, and what comes after that is lost, counted, and told.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import secrets
import threading
import time
import weakref
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headgate._fork import reinit_after_fork
from headgate.gate.event_stream import flush_all
from headgate.telemetry.decision_log.codec import packed_loss
from headgate.telemetry.decision_log.delivery import BREATH, EventBatch

if TYPE_CHECKING:
    from headgate.telemetry.decision_log.delivery import Delivery

__all__ = ["PATIENCE", "LogQueue", "LogStats"]

logger = logging.getLogger("headgate")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Seconds between two attempts to write what a sink did not take; they double from the one to the other."""
QUIET: Final = 10.0
"""Seconds between two words in the log on the same trouble."""
IDLE: Final = 5.0
"""Seconds without a record after which the thread ends; the next record starts another."""
PATIENCE: Final = 2.0
"""Seconds that the end of a process waits for what is still to be written."""
STANDSTILL: Final = 1.0
"""Seconds that a fork waits for a sink."""
GRACE: Final = 0.2
"""Seconds more for the thread to say what it could not write."""


class LogStats(NamedTuple):
    """What became of the records so far."""

    written: int
    waiting: int
    lost: int
    """Because the queue was full, or because the sink did not take them before the end."""
    failures: int
    """Attempts to write that failed; what they were to write was kept."""
    error: str | None
    """Why the sink takes nothing now; None while it does."""


class _QueuedEvents(Protocol):
    def set(self) -> None: ...


_writers: weakref.WeakSet[LogQueue] = weakref.WeakSet()


class LogQueue:
    """Carries what is put into `queue` to the sink."""

    def __init__(self, carrier: Delivery, *, most: int, every: float) -> None:
        self.queue: deque[bytes | _QueuedEvents] = deque()
        """Decisions as they were packed, and between them marks that are set when all before them is written."""
        self.thread: threading.Thread | None = None
        self._carrier = carrier
        self._most = most
        self._every = every
        self._begin()
        reinit_after_fork(self)
        _writers.add(self)

    def _begin(self) -> None:
        self.queue.clear()
        self.thread = None
        self._lock = threading.RLock()
        self._bell = threading.Event()
        self._batch: list[bytes] = []
        """What is to be written next, and again if that fails."""
        self._token = secrets.token_hex(5)
        self._first = 1
        """Of these the ids are made: no other process has the token, and the first of the batch is of this number."""
        self._marks: list[_QueuedEvents] = []
        """Of those who wait for the batch."""
        self._awaited = 0
        """How many marks there are in the queue."""
        self._forking: set[int] = set()
        """The thread for whose fork the sink stands still."""
        self._pause = 0.0
        self._not_before = 0.0
        self._idle_since: float | None = None
        self._written = self._lost = self._failures = 0
        self._untold: tuple[int, int, int] | None = None
        """Losses that no record speaks of yet: how many, from when, until when."""
        self._error: str | None = None
        self._told: dict[str, float] = {}
        self._closed = False
        self._end = float("inf")
        """When nobody waits for the sink any more."""

    def stand_still(self) -> None:
        """Before a fork: wait until the sink is not at work. What a library holds in that moment, its child would never
        get; but a sink that hangs must not keep anybody from forking."""
        if self._carrier.stand_still(STANDSTILL):
            self._forking.add(threading.get_ident())

    def go_on(self) -> None:
        """After a fork, in the parent."""
        if threading.get_ident() in self._forking:
            self._forking.remove(threading.get_ident())
            self._carrier.go_on()

    def reset_after_fork(self) -> None:
        """What its parent had to write is its parent's to write."""
        self._begin()
        self._carrier.reset_after_fork()

    @property
    def stats(self) -> LogStats:
        return LogStats(self._written, len(self.queue) + len(self._batch), self._lost, self._failures, self._error)

    def lose(self, at_us: int) -> None:
        """Count what the queue has no room for. To stop here for a moment is all that a full queue costs a request."""
        with self._lock:
            self._lost += 1
            count, since_us, _ = self._untold or (0, at_us, at_us)
            self._untold = count + 1, since_us, at_us
        if self._closed:
            return
        self._tell(
            "lost",
            "the decision log is losing records: %d so far, as %d wait already and the sink takes them too slowly%s",
            self._lost,
            len(self.queue),
            f": {self._error}" if self._error else "",
        )

    def ensure(self) -> None:
        """Have the thread run; to be called when something was put into the queue, and `thread` is None."""
        with self._lock:
            if self.thread is None and not self._closed:
                self.thread = threading.Thread(target=self._run, name="headgate-decision-log", daemon=True)
                self.thread.start()

    def flush(self, timeout: float) -> bool:
        """Write all that is queued by now; whether that was done in so many seconds."""
        if self._closed:
            return not self.queue
        written = threading.Event()
        with self._lock:
            self._awaited += 1
            self.queue.append(written)
        self.ensure()
        self._not_before = 0.0  # somebody waits: the sink is asked now, whenever it failed last
        self._bell.set()
        return written.wait(timeout)

    def close(self, timeout: float, *, wait: bool = True) -> None:
        """Write what is queued, as far as that is done in so many seconds, and close the sink; or have it done."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._end, self._not_before = time.monotonic() + timeout, 0.0
            thread = self.thread
        self._bell.set()
        if thread is None and not was_closed:
            self._run()
        elif thread is not None and wait:
            thread.join(timeout + GRACE)
            if thread.is_alive() and not was_closed:
                waiting = len(self.queue) + len(self._batch)
                logger.error("the decision log ends while its sink hangs; %d records may be lost", waiting)

    # ------------------------------------------------------------------ the thread's own

    def _run(self) -> None:
        while True:
            try:
                wait = self._step()
            except Exception:  # a bug of ours must not end the log for good
                logger.exception("the decision log failed on a batch, which is lost")
                self._give_up()
                wait = None if self._closed else self._every
            if wait is None:
                return
            self._bell.wait(wait)
            self._bell.clear()

    def _step(self) -> float | None:
        """Write one batch; how many seconds until the next, None to end the thread."""
        if not self._batch:
            self._take()
        if self._batch:
            now, self._idle_since = time.monotonic(), None
            if now < min(self._not_before, self._end):
                return min(self._not_before, self._end) - now
            if not self._send():
                if (now := time.monotonic()) < self._end:
                    return max(0.0, min(self._not_before, self._end) - now)
                self._give_up(everything=True)
            if self._batch:
                return BREATH
        for mark in self._marks:
            mark.set()
        self._marks = []
        if self.queue:
            # A whole batch waits already, or somebody for the end; else more may come to go together.
            is_urgent = len(self.queue) >= self._carrier.size or self._closed or self._awaited
            return BREATH if is_urgent else self._every
        return self._rest()

    def _take(self) -> None:
        """The next batch out of the queue, with its marks."""
        queue, batch, size = self.queue, self._batch, self._carrier.size
        while queue and len(batch) < size:
            # Without a step of Python's for each: requests wait meanwhile.
            some: list[Any] = [*map(deque.popleft, repeat(queue, min(len(queue), size - len(batch))))]
            if self._awaited:  # who waits has been counted before being queued
                marks = [raw for raw in some if not isinstance(raw, bytes)]
                with self._lock:
                    self._awaited -= len(marks)
                self._marks += marks
                some = [raw for raw in some if isinstance(raw, bytes)]
            batch += some
        if self._untold is not None and (batch or not queue):
            with self._lock:
                untold, self._untold = self._untold, None
            batch.append(packed_loss(*untold))

    def _send(self) -> bool:
        carried = self._carrier.carry(EventBatch(self._token, self._first, self._batch))
        self._batch = self._batch[carried.done :]
        self._first += carried.done
        self._written += carried.done - len(carried.unmade)
        for at_us, error in carried.unmade:
            self.lose(at_us)
            self._tell("record", "a decision could not be made into a record: %s", error)
        if carried.error is not None:
            self._failures += 1
            self._error = carried.error
            self._pause = min(max(FIRST_PAUSE, self._pause * 2), LONGEST_PAUSE)
            # Not all processes of a fleet at the same moment.
            self._not_before = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
            self._tell(
                "failed",
                "the decision log cannot write to its sink: %s; %d records wait, and up to %d are kept",
                self._error,
                len(self.queue) + len(self._batch),
                self._most,
            )
            return False
        if self._error is not None:
            self._tell("back", "the decision log's sink takes records again; %d were lost so far", self._lost)
        self._error, self._pause = None, 0.0
        return True

    def _rest(self) -> float | None:
        """Nothing is left to write."""
        with self._lock:
            if self.queue:  # it has come since; what has not come by now comes to a log that is closed
                return BREATH
            if not self._closed:
                now = time.monotonic()
                self._idle_since = self._idle_since or now
                if self._carrier.is_needed() or now - self._idle_since < IDLE:
                    return self._every
                self._idle_since = self.thread = None
                if self.queue:  # it came before anybody could see that the thread ends
                    self.ensure()
                return None
        self._carrier.close()
        return None

    def _give_up(self, *, everything: bool = False) -> None:
        """The batch is lost, or all that waits, for there is no time left to wait for the sink."""
        lost, self._batch = len(self._batch), []
        while everything and self.queue:
            raw = self.queue.popleft()
            if isinstance(raw, bytes):
                lost += 1
            else:
                self._marks.append(raw)  # nobody has to wait any longer for what will not be
        with self._lock:
            self._lost += lost
        logger.error("the decision log has lost %d records, which its sink did not take before the end", lost)

    def _tell(self, what: str, message: str, *details: Any) -> None:
        now = time.monotonic()
        if now - self._told.get(what, float("-inf")) >= QUIET:
            self._told[what] = now
            logger.error(message, *details)


@atexit.register
def _finish() -> None:
    """Write what can still be written at the end of the process: its threads end without a word."""
    flush_all()
    for writer in list(_writers):
        writer.close(PATIENCE)


def _stand_still() -> None:
    for writer in list(_writers):
        writer.stand_still()


def _go_on() -> None:
    for writer in list(_writers):
        writer.go_on()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_stand_still, after_in_parent=_go_on)
