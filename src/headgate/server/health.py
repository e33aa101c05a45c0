"""The health of a server: it follows the store, also while there are no requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from headgate.errors import StoreError
from headgate.limits import Limit

if TYPE_CHECKING:
    from headgate.limiter import AsyncLimiter

__all__ = ["StoreProbe"]

PROBE_INTERVAL_S: Final = 1.0
PROBE_LIMIT: Final = Limit(1, timedelta(minutes=1), name="healthcheck")


class StoreProbe:
    """Reads a counter every second and reports whether the store decides.

    A load balancer sends no requests to a server that is not ready. Without the probe, such a server would not learn
    that the store is back, and an idle one not that it failed.
    """

    def __init__(self, limiter: AsyncLimiter) -> None:
        self._limiter = limiter

    @property
    def is_ready(self) -> bool:
        return self._limiter.health().ready

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            with suppress(StoreError):  # recorded by the limiter
                await self._limiter.peek(PROBE_LIMIT)
            await asyncio.sleep(PROBE_INTERVAL_S)
