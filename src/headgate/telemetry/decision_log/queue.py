"""The queue of the decision log: delivers encoded events to the sink in batches, at least once each.

A thread does this while there are events. Events that the sink does not take are sent again until it does; meanwhile
the queue fills up to its bound, beyond which events are lost, counted and reported by a record in the log itself.
"""

from __future__ import annotations

import atexit
import logging
import random
import secrets
import threading
import time
import weakref
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.gate.event_stream import flush_all
from headgate.telemetry.decision_log.codec import encode_loss
from headgate.telemetry.decision_log.delivery import YIELD_S, EventBatch

if TYPE_CHECKING:
    from headgate.telemetry.decision_log.delivery import AdaptiveDelivery

__all__ = ["EXIT_TIMEOUT_S", "LogQueue", "LogStats"]

logger = logging.getLogger("headgate")

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 10.0
"""Exponential backoff after a failed write."""
LOG_INTERVAL_S: Final = 10.0
"""The time between two messages about the same problem."""
IDLE_S: Final = 5.0
"""The thread ends after this time without an event; the next event starts another."""
EXIT_TIMEOUT_S: Final = 2.0
"""The time that the exit of the process waits for the sink."""
GRACE_S: Final = 0.2
"""Additional time for the thread to log what it could not write."""


class LogStats(NamedTuple):
    """The state of a decision log."""

    written: int
    waiting: int
    lost: int
    """Because the queue was full, or the sink did not take them before the end."""
    failures: int
    """Failed attempts to write; their records were kept."""
    error: str | None
    """The error of the last attempt; None if it succeeded."""


_queues: weakref.WeakSet[LogQueue] = weakref.WeakSet()


class LogQueue:
    """Delivers the encoded events in `events`."""

    def __init__(self, delivery: AdaptiveDelivery, *, max_waiting: int, every: float) -> None:
        self.events: deque[bytes | threading.Event] = deque()
        """Encoded events, and between them markers that are set when everything before them is written."""
        self._delivery = delivery
        self._max_waiting = max_waiting
        self._every = every
        self._begin()
        reinit_after_fork(self)
        _queues.add(self)

    def _begin(self) -> None:
        self.events.clear()
        self.thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._wakeup = threading.Event()
        self._batch: list[bytes] = []
        """The events to write next, and again if that fails."""
        self._token = secrets.token_hex(5)
        self._first = 1
        """Record ids consist of the token, unique to this process, and a number: this one for the batch's first."""
        self._markers: list[threading.Event] = []
        """The markers that wait for the batch."""
        self._queued_markers = 0
        self._retry_s = self._retry_at = 0.0
        self._idle_since: float | None = None
        self._written = self._lost = self._failures = 0
        self._unreported: tuple[int, int, int] | None = None
        """Losses that are not in the log yet: their number, and the times of the first and the last."""
        self._error: str | None = None
        self._logged_at: dict[str, float] = {}
        self._is_closed = False
        self._deadline = float("inf")

    def reset_after_fork(self) -> None:
        """Start with an empty queue: the events of the parent are written by the parent."""
        self._begin()
        self._delivery.reset_after_fork()

    @property
    def stats(self) -> LogStats:
        return LogStats(self._written, len(self.events) + len(self._batch), self._lost, self._failures, self._error)

    def lose(self, at_us: int) -> None:
        """Count an event that the queue has no room for."""
        with self._lock:
            self._lost += 1
            count, since_us, _ = self._unreported or (0, at_us, at_us)
            self._unreported = count + 1, since_us, at_us
        if not self._is_closed:
            text = "the decision log is losing records, as its sink is too slow: %d lost, %d waiting%s"
            self._log_error("lost", text, self._lost, len(self.events), f": {self._error}" if self._error else "")

    def ensure_thread(self) -> None:
        """Start the thread if there are events, and it does not run."""
        if self.thread is not None or not self.events:
            return
        with self._lock:
            if self.thread is None and not self._is_closed:
                self.thread = threading.Thread(target=self._run, name="headgate-decision-log", daemon=True)
                self.thread.start()

    def flush(self, timeout: float) -> bool:
        """Write all queued events; False if that takes longer than `timeout` seconds."""
        if self._is_closed:
            return not self.events
        marker = threading.Event()
        with self._lock:
            self._queued_markers += 1
            self.events.append(marker)
        self.ensure_thread()
        self._retry_at = 0.0
        self._wakeup.set()
        return marker.wait(timeout)

    def close(self, timeout: float, *, wait: bool = True) -> None:
        """Write all queued events, within `timeout` seconds, and close the sink; without `wait` in the background."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            self._deadline, self._retry_at = time.monotonic() + timeout, 0.0
            thread = self.thread
        self._wakeup.set()
        if thread is None and not was_closed:
            self._run()
        elif thread is not None and wait:
            thread.join(timeout + GRACE_S)
            if thread.is_alive() and not was_closed:
                waiting = len(self.events) + len(self._batch)
                logger.error("the decision log ends while its sink hangs; %d records may be lost", waiting)

    # The following methods run in the thread.

    def _run(self) -> None:
        while True:
            try:
                wait_s = self._step()
            except Exception:
                logger.exception("the decision log failed on a batch, which is lost")
                self._discard()
                wait_s = None if self._is_closed else self._every
            if wait_s is None:
                return
            self._wakeup.wait(wait_s)
            self._wakeup.clear()

    def _step(self) -> float | None:
        """Write one batch. Returns the seconds until the next, or None to end the thread."""
        if not self._batch:
            self._take_batch()
        if self._batch:
            now, self._idle_since = time.monotonic(), None
            if now < min(self._retry_at, self._deadline):
                return min(self._retry_at, self._deadline) - now
            if not self._send():
                if (now := time.monotonic()) < self._deadline:
                    return max(0.0, min(self._retry_at, self._deadline) - now)
                self._discard(everything=True)
            if self._batch:
                return YIELD_S
        for marker in self._markers:
            marker.set()
        self._markers = []
        if self.events:
            is_urgent = len(self.events) >= self._delivery.size or self._is_closed or self._queued_markers
            return YIELD_S if is_urgent else self._every
        return self._rest()

    def _take_batch(self) -> None:
        events, batch, size = self.events, self._batch, self._delivery.size
        while events and len(batch) < size:
            taken: list[Any] = [*map(deque.popleft, repeat(events, min(len(events), size - len(batch))))]
            if self._queued_markers:  # counted before it is queued
                markers = [each for each in taken if not isinstance(each, bytes)]
                with self._lock:
                    self._queued_markers -= len(markers)
                self._markers += markers
                taken = [each for each in taken if isinstance(each, bytes)]
            batch += taken
        if self._unreported is not None and (batch or not events):
            with self._lock:
                unreported, self._unreported = self._unreported, None
            batch.append(encode_loss(*unreported))

    def _send(self) -> bool:
        result = self._delivery.deliver(EventBatch(self._token, self._first, self._batch))
        self._batch = self._batch[result.done :]
        self._first += result.done
        self._written += result.done - len(result.failed)
        for at_us, error in result.failed:
            self.lose(at_us)
            self._log_error("record", "a decision could not be recorded: %s", error)
        if result.error is not None:
            self._failures += 1
            self._error = result.error
            self._retry_s = min(max(MIN_RETRY_S, self._retry_s * 2), MAX_RETRY_S)
            self._retry_at = time.monotonic() + self._retry_s * random.uniform(0.5, 1.0)  # not all nodes at once
            text = "the decision log cannot write to its sink: %s; %d records are waiting (at most %d)"
            self._log_error("failed", text, self._error, len(self.events) + len(self._batch), self._max_waiting)
            return False
        if self._error is not None:
            self._log_error("back", "the decision log writes to its sink again; %d records were lost", self._lost)
        self._error, self._retry_s = None, 0.0
        return True

    def _rest(self) -> float | None:
        """Wait for events, or end the thread: after a while, or, once the log is closed, together with the sink."""
        with self._lock:
            if self.events:
                return YIELD_S
            if not self._is_closed:
                now = time.monotonic()
                self._idle_since = self._idle_since or now
                if self._delivery.needs_thread() or now - self._idle_since < IDLE_S:
                    return self._every
                self._idle_since = self.thread = None
                self.ensure_thread()  # for events that came before the end of the thread was visible
                return None
        self._delivery.close()
        return None

    def _discard(self, *, everything: bool = False) -> None:
        """Count the batch as lost, or everything that waits."""
        lost, self._batch = len(self._batch), []
        while everything and self.events:
            event = self.events.popleft()
            if isinstance(event, bytes):
                lost += 1
            else:
                self._markers.append(event)
        with self._lock:
            self._lost += lost
        logger.error("the decision log has lost %d records that its sink did not take", lost)

    def _log_error(self, topic: str, message: str, *arguments: Any) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(topic, float("-inf")) >= LOG_INTERVAL_S:
            self._logged_at[topic] = now
            logger.error(message, *arguments)


@atexit.register
def _close_all() -> None:
    """Write the remaining records at exit: daemon threads end without notice."""
    flush_all()
    for queue in list(_queues):
        queue.close(EXIT_TIMEOUT_S)
