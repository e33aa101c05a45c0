"""Load shedding: admits calls to a service up to an adaptive limit, by priority and fairly among tenants.

There is no queue: a call is admitted or shed at once, and the client retries after `Retry-After`. What a call may use
depends on its priority: normal calls the limit, background calls a part of it, and critical calls more than it, so that
some of their bursts fit when the others have filled it. While calls of a lower priority are shed, those of a higher one
are not, unless they alone exceed the limit.

Fairness among tenants is a priority, too. A tenant with more than its fair share of the calls in progress may use only
`SHARE_OF_HEAVY_TENANTS` of that, so that the rest is left to the others. A tenant with less than its share is shed only
if such tenants fill the limit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidConfiguration
from headgate.overload.gradient import GradientLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.overload.gradient import ConcurrencySettings

__all__ = ["PRIORITIES", "LoadShedder", "OverloadStats", "Permit", "Priority", "checked_priority"]

Priority: TypeAlias = Literal["critical", "normal", "background"]
PRIORITIES: Final[tuple[Priority, ...]] = ("critical", "normal", "background")

SHARE_OF_BACKGROUND: Final = 0.6
CRITICAL_HEADROOM: Final = 1.5
CRITICAL_EXTRA: Final = 2
"""Calls by which critical traffic may exceed its headroom: half of a small limit is too little for a burst."""
SHARE_OF_HEAVY_TENANTS: Final = 0.8


class OverloadStats(NamedTuple):
    """The state of a load shedder."""

    limit: int
    in_flight: int
    latency: float
    """Seconds, over the last tenth of a second; 0 until it is known."""
    base_latency: float
    """Seconds, without a queue; 0 until it is known."""
    admitted: int
    shed: dict[Priority, int]


class Permit:
    """An admitted call; `release` it once, when it has ended."""

    __slots__ = ("_shedder", "_started_us", "_tenant")

    def __init__(self, shedder: LoadShedder, started_us: int, tenant: str | None) -> None:
        self._shedder: LoadShedder | None = shedder
        self._started_us = started_us
        self._tenant = tenant

    def release(self, outcome: Literal["ok", "dropped", "ignored"] = "ok") -> None:
        """End the call. Its latency counts if it is "ok"; "dropped" for one that timed out or was rejected, which
        lowers the limit; "ignored" for one whose latency says nothing, such as a failed one. Idempotent."""
        shedder, self._shedder = self._shedder, None
        if shedder is not None:
            shedder.release(self._started_us, self._tenant, outcome)


class LoadShedder:
    """Admits calls up to an adaptive limit. Thread-safe; never waits.

    >>> from headgate.overload.gradient import ConcurrencySettings
    >>> shedder = LoadShedder(ConcurrencySettings(minimum=2, maximum=2), lambda: 0)
    >>> calls = [shedder.acquire("normal") for _ in range(3)]
    >>> [call is not None for call in calls], shedder.stats().shed["normal"]
    ([True, True, False], 1)
    """

    def __init__(self, settings: ConcurrencySettings, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._settings = settings
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Begin anew: the calls in progress are those of the parent."""
        self._lock = threading.Lock()
        self._limit = GradientLimit(self._settings, self._now_us())
        self._in_flight = self._admitted = 0
        self._tenants: dict[str, int] = {}
        """Calls in progress of the tenants that have any."""
        self._shed: dict[Priority, int] = {"critical": 0, "normal": 0, "background": 0}

    def configure(self, settings: ConcurrencySettings) -> None:
        """Use other bounds from now on."""
        with self._lock:
            self._settings = settings
            self._limit.configure(settings)

    def acquire(self, priority: Priority, tenant: str | None = None) -> Permit | None:
        """Admit a call, or shed it (None)."""
        now_us = self._now_us()
        with self._lock:
            in_flight, limit = self._in_flight, float(self._limit.limit)
            if in_flight:  # one call is always admitted
                if priority == "critical":
                    limit = max(limit * CRITICAL_HEADROOM + CRITICAL_EXTRA, self._limit.full_limit)
                elif priority == "background":
                    limit *= SHARE_OF_BACKGROUND
                if tenant is not None and in_flight + 1 > limit * SHARE_OF_HEAVY_TENANTS:
                    calls = self._tenants.get(tenant, 0)
                    if calls and calls + 1 > limit / len(self._tenants):
                        limit *= SHARE_OF_HEAVY_TENANTS
                if in_flight + 1 > limit:
                    self._shed[priority] += 1
                    return None
            self._in_flight = in_flight + 1
            self._admitted += 1
            if tenant is not None:
                self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        return Permit(self, now_us, tenant)

    def release(self, started_us: int, tenant: str | None, outcome: str) -> None:
        """End a call; called by its permit."""
        now_us = self._now_us()
        with self._lock:
            if outcome == "ok":
                self._limit.add(now_us, now_us - started_us, self._in_flight)
            elif outcome == "dropped":
                self._limit.add_drop(now_us, self._in_flight)
            if self._in_flight == 0:  # admitted before a fork
                return
            self._in_flight -= 1
            if tenant is not None and tenant in self._tenants:
                self._tenants[tenant] -= 1
                if not self._tenants[tenant]:
                    del self._tenants[tenant]

    def stats(self) -> OverloadStats:
        """The limit, the calls in progress and the latencies now; counts since the start of the process."""
        with self._lock:
            limit = self._limit
            latencies = limit.latency_us / 1_000_000, limit.base_us / 1_000_000
            return OverloadStats(limit.limit, self._in_flight, *latencies, self._admitted, dict(self._shed))


def checked_priority(priority: str) -> Priority:
    """The priority, or InvalidConfiguration."""
    for known in PRIORITIES:
        if priority == known:
            return known
    raise InvalidConfiguration(f"priority {priority!r} is unknown; use one of {', '.join(PRIORITIES)}")
