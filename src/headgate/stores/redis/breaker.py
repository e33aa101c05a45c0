"""Circuit breakers, one per server.

While a breaker is closed, requests find out how the server is. Once it is open they fail at once, until the maintenance
thread (`local.maintenance`) has seen the server serve and closes the breaker.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.encoding import Node

__all__ = ["CircuitBreaker", "CircuitBreakers", "CircuitOpen"]

MAX_FAILURES: Final = 5
"""Failures in a row that open a breaker."""
FAILURE_SPACING_S: Final = 0.005
"""Time within which failures count as one: one incident, however many requests it affects."""
WINDOW_S: Final = 10.0
"""Time over which the share of failures is computed."""
MIN_INCIDENTS: Final = 10
"""Incidents in the window below which the share means nothing."""


class CircuitOpen(StoreUnavailable):
    """The breaker of the server is open; nothing was sent."""


@dataclass(slots=True, eq=False)
class CircuitBreaker:
    """The breaker of one server; `on_open` is called when it opens."""

    on_open: Callable[[], None]
    now: Callable[[], float] = time.monotonic
    is_open: bool = False
    opened_at: float = 0.0
    """On the monotonic clock."""
    reason: str | None = None
    """The failure that opened it, or the last probe."""
    _succeeded: int = 0
    _failed: int = 0
    _consecutive: int = 0
    _last: float = -FAILURE_SPACING_S
    _incidents: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=2_000))
    """Of the window: the time, and the numbers of successes and failures before."""

    def succeed(self) -> None:
        """Record a reply. Called for every round trip, so it does next to nothing."""
        self._succeeded += 1
        self._consecutive = 0

    def fail(self, error: StoreError) -> None:
        """Record that the server did not reply, or refused to serve."""
        self._failed += 1
        now = self.now()
        if self.is_open or now - self._last < FAILURE_SPACING_S:
            return
        self._last = now
        self._consecutive += 1
        if self._consecutive >= MAX_FAILURES or self._mostly_fails(now):
            self.is_open, self.opened_at, self.reason = True, now, str(error)
            self.on_open()

    def trip(self, reason: str) -> None:
        """Open the breaker at once: the server must not be used."""
        if not self.is_open:
            self.is_open, self.opened_at, self.reason = True, self.now(), reason
            self.on_open()

    def close(self) -> None:
        """Close the breaker: the server serves again."""
        self._consecutive = 0
        self._incidents.clear()
        self.is_open = False

    def refusal(self) -> CircuitOpen:
        """The error of a request to this server while the breaker is open."""
        return CircuitOpen(f"{self.reason} (circuit breaker open)")

    def _mostly_fails(self, now: float) -> bool:
        """True if at least half of the round trips in the window failed, in several incidents."""
        incidents = self._incidents
        incidents.append((now, self._succeeded, self._failed - 1))
        while now - incidents[0][0] > WINDOW_S:
            incidents.popleft()
        _, succeeded, failed = incidents[0]
        return len(incidents) >= MIN_INCIDENTS and self._failed - failed >= self._succeeded - succeeded


class CircuitBreakers:
    """The breakers of all servers, shared by the threads and event loops of a store."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.on_open: Callable[[Node | None], Any] = lambda node: None
        """Called with the server of each breaker that opens."""
        self._all: dict[Node | None, CircuitBreaker] = {}

    def __getitem__(self, node: Node | None) -> CircuitBreaker:
        breaker = self._all.get(node)
        if breaker is None:
            breaker = self._all.setdefault(node, CircuitBreaker(lambda: self.on_open(node), self._now))
        return breaker

    def succeed(self, node: Node | None) -> None:
        self[node].succeed()

    def fail(self, node: Node | None, error: StoreError) -> None:
        """Record a failure. Sentinels have no breakers: they are asked seldom, and are interchangeable."""
        if node is None or node.role == "server":
            self[node].fail(error)

    def open_breakers(self) -> dict[Node | None, CircuitBreaker]:
        """The open breakers, by server."""
        return {node: breaker for node, breaker in list(self._all.items()) if breaker.is_open}

    def reset(self) -> None:
        """Close all, as in a new process."""
        for breaker in list(self._all.values()):
            breaker.close()
