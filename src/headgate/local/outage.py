"""Tracks whether requests are decided without the store, and reports it: at once, then at intervals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.errors import StoreError
    from headgate.events import EventEmitter

__all__ = ["OutageTracker"]

REPORT_INTERVAL_S: Final = 10.0
RECOVERY_S: Final = 0.5
"""Time without a failure after which an outage is over: one answer between failures is not a recovery."""


class OutageTracker:
    """The outage that a limiter is in, if any."""

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
            self._event_emitter.emit(
                "store-lost" if is_first else "store-away",
                f"Redis is unavailable; requests are handled by on_failure ({self.failures} so far): {error}",
                reason=str(error),
                requests=self.failures,
                seconds=now - self._started,
            )

    def record_answer(self) -> None:
        """End the outage if the store answers and nothing has failed lately. Call it only while there are failures."""
        if self.is_calm(RECOVERY_S):
            self.end()

    def end(self) -> None:
        now = self._now()
        failures = self.failures
        if failures:
            self.failures, self.reason = 0, None
            self._event_emitter.emit(
                "store-back",
                f"Redis is available again: {failures} requests were handled by on_failure "
                f"in {now - self._started:.1f} s",
                requests=failures,
                seconds=now - self._started,
            )
