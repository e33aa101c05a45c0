"""Outages: whether requests are decided without the store, and the ids that were admitted meanwhile."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from headgate._fork import reinit_after_fork
from headgate.stores.memory import ExpiringTable
from headgate.stores.operations import id_validity_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.decisions import Decision
    from headgate.errors import StoreError
    from headgate.events import EventEmitter
    from headgate.keys import Key
    from headgate.stores.operations import Check

__all__ = ["AdmittedIds", "OutageTracker"]

REPORT_INTERVAL_S: Final = 10.0
RECOVERY_S: Final = 0.5
"""Time without a failure after which an outage is over: one answer between failures is not a recovery."""


class OutageTracker:
    """The outage that a limiter is in, if any; reported at once, then at intervals."""

    def __init__(self, event_emitter: EventEmitter, now: Callable[[], float] = time.monotonic) -> None:
        self._event_emitter = event_emitter
        self._now = now
        self.failures = 0
        """Requests decided without the store since it failed; 0 outside outages."""
        self.reason: str | None = None
        self._started = self._last_failure = self._last_report = 0.0

    @property
    def duration(self) -> float | None:
        """Seconds since the outage began; None outside outages."""
        return self._now() - self._started if self.failures else None

    def is_calm(self, seconds: float) -> bool:
        """True if nothing has failed for so long."""
        return self._now() - self._last_failure >= seconds

    def record_failure(self, error: StoreError) -> None:
        now = self._now()
        is_first = not self.failures
        self.failures += 1
        self._last_failure = now
        if is_first:
            self._started = now
        if is_first or now - self._last_report >= REPORT_INTERVAL_S:
            self._last_report, self.reason = now, str(error)
            message = f"Redis is unavailable; requests are handled by on_failure ({self.failures} so far): {error}"
            details = {"reason": self.reason, "requests": self.failures, "seconds": now - self._started}
            self._event_emitter.emit("store-lost" if is_first else "store-away", message, **details)

    def record_answer(self) -> None:
        """End the outage if the store answers and nothing has failed lately. Call it only while there are failures."""
        if self.is_calm(RECOVERY_S):
            self.end()

    def end(self) -> None:
        if failures := self.failures:
            self.failures, self.reason = 0, None
            seconds = self._now() - self._started
            message = f"Redis is available again: {failures} requests were handled by on_failure in {seconds:.1f} s"
            self._event_emitter.emit("store-back", message, requests=failures, seconds=seconds)


class AdmittedIds:
    """The first decision for each id that a failure mode admitted: a repeated id gets it again and is charged once.

    The store has no record of such an id: its charge is in the ledger, or of unknown outcome. `max_ids` bounds them.
    """

    def __init__(self, now_us: Callable[[], int], *, max_ids: int = 100_000) -> None:
        self._now_us = now_us
        self._decisions: ExpiringTable[Decision] = ExpiringTable(max_ids)
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held. The ids stay: the parent charges them."""
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        """True if there is any id that has not expired."""
        if len(self._decisions):
            with self._lock:
                self._decisions.expire(self._now_us())
        return len(self._decisions) > 0

    def get(self, check: Check) -> Decision | None:
        """The first decision for the id of a check, in the order of its keys."""
        with self._lock:
            first = self._decisions.get(_name(check), self._now_us())
        if first is None or first.keys == check.keys:
            return first
        order = [[_counter(key) for key in first.keys].index(_counter(key)) for key in check.keys]
        cost = first.cost if isinstance(first.cost, int) else tuple([first.cost[index] for index in order])
        verdicts = tuple([first.verdicts[index] for index in order])
        return first._replace(keys=check.keys, verdicts=verdicts, cost=cost)

    def record(self, check: Check, decision: Decision) -> Decision | None:
        """Record a decision, or return the first one if the id was admitted in the meantime."""
        with self._lock:
            first = self.get(check)
            if first is None:
                now_us = self._now_us()
                self._decisions.put(_name(check), decision, now_us + id_validity_us(check.keys), now_us)
            return first


def _counter(key: Key) -> tuple[str, str]:
    return key.limit.space, key.identity


def _name(check: Check) -> tuple[str, ...]:
    return (check.id or "", *[text for counter in sorted(map(_counter, check.keys)) for text in counter])
