"""The breaker of each server: after several failures in a row nobody waits for it, until somebody has seen it serve.

While it is closed, requests find out how the server is. Once it is open none of them goes there: each is told at once,
and a background thread looks after the server (`shield.keeper`), which closes the breaker again.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.errors import StoreError
    from headgate.stores.redis.encoding import Node

__all__ = ["CircuitBreaker", "CircuitBreakers", "CircuitOpen"]

IN_A_ROW: Final = 5
"""Failures without an answer in between that open it."""
SPACING: Final = 0.005
"""Seconds within which failures count as one: what breaks in one moment is one blip, however many waited for it."""
WINDOW: Final = 10.0
"""Seconds over which the share of failures is looked at."""
FEWEST: Final = 10
"""Moments of failure in the window below which its share means nothing."""


class CircuitOpen(StoreUnavailable):
    """Nobody asks this server now: the answer is known to be none. Not a byte was sent."""


class CircuitBreaker:
    """What is known of one server: `is_open` while it is not to be asked."""

    __slots__ = (
        "_answered", "_failed", "_in_a_row", "_last", "_moments", "_now", "_opened", "is_open", "opened_at", "reason",
    )  # fmt: skip

    def __init__(self, opened: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self.opened_at = 0.0
        """When it opened last, on the monotonic clock."""
        self.reason: str | None = None
        """The failure that opened it."""
        self._opened = opened
        self._now = now
        self._answered = self._failed = self._in_a_row = 0
        self._last = -SPACING
        self._moments: deque[tuple[float, int, int]] = deque(maxlen=2_000)
        """Those of failure in the window: when, and after how many answers and failures in all."""

    def succeed(self) -> None:
        """The server has answered: to be called for every round trip, so it does next to nothing."""
        self._answered += 1
        self._in_a_row = 0

    def fail(self, error: StoreError) -> None:
        """The server has not answered, or refused to serve."""
        self._failed += 1
        now = self._now()
        if self.is_open or now - self._last < SPACING:
            return
        self._last = now
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW or self._fails_mostly(now):
            self.is_open, self.opened_at, self.reason = True, now, str(error)
            self._opened()

    def close(self) -> None:
        """The server has been seen to serve."""
        self._in_a_row = 0
        self._moments.clear()
        self.is_open = False

    def refusal(self) -> CircuitOpen:
        """What a request is told that would have gone there."""
        return CircuitOpen(f"{self.reason} (and it is not asked again until it is seen to answer)")

    def _fails_mostly(self, now: float) -> bool:
        """Whether at least half of what was asked in the window failed, and not in one moment alone."""
        moments = self._moments
        moments.append((now, self._answered, self._failed - 1))
        while now - moments[0][0] > WINDOW:
            moments.popleft()
        _, answered, failed = moments[0]
        return len(moments) >= FEWEST and self._failed - failed >= self._answered - answered


class CircuitBreakers:
    """One breaker for each server; shared by all threads and event loops of a store."""

    def __init__(self) -> None:
        self.on_open: Callable[[Node | None], Any] = lambda node: None
        """Told of each breaker that opens."""
        self._all: dict[Node | None, CircuitBreaker] = {}

    def __getitem__(self, node: Node | None) -> CircuitBreaker:
        breaker = self._all.get(node)
        if breaker is None:
            breaker = self._all.setdefault(node, CircuitBreaker(lambda: self.on_open(node)))
        return breaker

    def succeed(self, node: Node | None) -> None:
        """That server has answered."""
        self[node].succeed()

    def fail(self, node: Node | None, error: StoreError) -> None:
        """That server has not. Sentinels have none: they are asked seldom, and one of them is as good as another."""
        if node is None or node.role == "server":
            self[node].fail(error)

    def open_breakers(self) -> dict[Node | None, CircuitBreaker]:
        """Those that are open now, by their servers."""
        return {node: breaker for node, breaker in list(self._all.items()) if breaker.is_open}

    def reset(self) -> None:
        """All closed, as in a new process."""
        for breaker in list(self._all.values()):
            breaker.close()
