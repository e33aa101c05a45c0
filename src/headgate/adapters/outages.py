"""Tells the log when requests are decided without the store, and when it is back: loudly, but no flood."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.errors import StoreError

__all__ = ["Outage"]

logger = logging.getLogger("headgate")

TOLD_EVERY: Final = 10.0
"""Seconds between two messages while it lasts."""
CALM: Final = 1.0
"""Seconds without a failure after which it is over: one answer between failures is no recovery."""


class Outage:
    """What a gate knows of the outage that it is in, if any."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.failures = 0
        """Requests that were decided without the store since it failed; 0 while all is well."""
        self._began = self._last = 0.0
        self._told: float | None = None

    def note_failure(self, error: StoreError) -> None:
        now = self._now()
        if not self.failures:
            self._began, self._told = now, None
        self.failures += 1
        self._last = now
        if self._told is None or now - self._told >= TOLD_EVERY:
            self._told = now
            logger.error(
                "the store cannot be asked, and routes answer by their failure modes (%d requests in %.0f s): %s",
                self.failures,
                now - self._began,
                error,
            )

    def note_answer(self) -> None:
        """To be called for answers of the store, while there are failures."""
        now = self._now()
        if now - self._last >= CALM:
            logger.warning(
                "the store answers again: %d requests were decided without it in %.1f s",
                self.failures,
                now - self._began,
            )
            self.failures = 0
