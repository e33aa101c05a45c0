"""Knows whether requests are decided without the store, since when, and how many; tells it loudly, but in no flood."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.errors import StoreError
    from headgate.events import EventEmitter

__all__ = ["OutageTracker"]

TOLD_EVERY: Final = 10.0
"""Seconds between two messages while it lasts."""
CALM: Final = 0.5
"""Seconds without a failure after which it is over: one answer between failures is no recovery."""


class OutageTracker:
    """What a limiter knows of the outage that it is in, if any."""

    def __init__(self, herald: EventEmitter, now: Callable[[], float] = time.monotonic) -> None:
        self._herald = herald
        self._now = now
        self.failures = 0
        """Requests that were decided without the store since it failed; 0 while all is well."""
        self.reason: str | None = None
        self._began = self._last = self._told = 0.0

    @property
    def lasts(self) -> float | None:
        """Seconds since it began; None while all is well."""
        return self._now() - self._began if self.failures else None

    def is_calm(self, seconds: float) -> bool:
        """Whether nothing has failed for so long."""
        return self._now() - self._last >= seconds

    def note_failure(self, error: StoreError) -> None:
        now = self._now()
        begins = not self.failures
        self.failures += 1
        self._last = now
        if begins:
            self._began = now
        if begins or now - self._told >= TOLD_EVERY:
            self._told, self.reason = now, str(error)
            self._herald.tell(
                "store-lost" if begins else "store-away",
                f"Redis is unavailable; requests are handled by on_failure ({self.failures} so far): {error}",
                reason=str(error),
                requests=self.failures,
                seconds=now - self._began,
            )

    def note_answer(self) -> None:
        """To be called for answers of the store, while there are failures."""
        if self._now() - self._last >= CALM:
            self.end()

    def end(self) -> None:
        """The store has been seen to serve."""
        now = self._now()
        failures = self.failures
        if failures:
            self.failures, self.reason = 0, None
            self._herald.tell(
                "store-back",
                f"the store answers again: {failures} requests were decided without it in {now - self._began:.1f} s",
                requests=failures,
                seconds=now - self._began,
            )
