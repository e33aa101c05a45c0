"""The knowledge of a client about one host and partition: quotas, the routes they apply to, requests in flight."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from headgate.clients.pacing import QuotaPacer
from headgate.clients.quotas import CONCURRENT, RETRY_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from headgate.clients.quotas import Quota

__all__ = ["Scope", "Turn"]

MAX_PACERS: Final = 64
MAX_ROUTES: Final = 512
COMPARED_ROUTES: Final = 16
FIRST_ANSWER_S: Final = 1.0
"""The time for which other requests wait for the first answer of a host, which may report its limits."""
RESERVED_AHEAD_S: Final = 0.25
"""Requests take their turn this long in advance, as the pace may change while they wait."""
POLL_S: Final = 0.01
MAX_POLL_S: Final = 0.25


class Turn(NamedTuple):
    """The answer to a request that wants to be sent: it may be sent after so many seconds, or ask again then."""

    is_taken: bool
    seconds: float
    reason: Literal["pace", "exhausted", "concurrency", "first"]
    quota: Quota | None = None
    """The quota that causes the wait."""


class Scope:
    """The quotas of one host and partition. Not thread-safe: the client locks."""

    def __init__(self, random: Callable[[], float]) -> None:
        self.quotas: dict[Hashable, Quota] = {}
        """The last report of each quota."""
        self.in_flight = 0
        self._random = random
        self._pacers: dict[Hashable, QuotaPacer] = {}
        self._routes: dict[str, tuple[Hashable, ...]] = {}
        self._max_in_flight: float = inf
        self._is_answered = False
        self._first_sent_at = -inf
        self._polls = 0

    # ------------------------------------------------------------ sending

    def take_turn(self, path: str, now: float, *, is_paced: bool) -> Turn:
        """Count a request as sent, or say how long it has to wait. Without `is_paced`, only exhausted quotas count."""
        if not self._is_answered and self.in_flight and now < self._first_sent_at + FIRST_ANSWER_S:
            return Turn(False, self._poll(), "first")
        if self.in_flight >= self._max_in_flight:
            return Turn(False, self._poll(), "concurrency")
        keys = self.keys_for(path)
        at, slowest = now, None
        for key in keys:
            pacer = self._pacers[key]
            ready = pacer.next_at(now) if is_paced else max(now, pacer.blocked_until)
            if ready > at:
                at, slowest = ready, key
        if slowest is not None and at - now > RESERVED_AHEAD_S:
            is_blocked = self._pacers[slowest].blocked_until >= at
            wait = at - now if is_blocked else min(max(at - now - RESERVED_AHEAD_S, POLL_S), MAX_POLL_S)
            return Turn(False, wait, "exhausted" if is_blocked else "pace", self.quotas.get(slowest))
        for key in keys:
            self._pacers[key].take(at)
        self.in_flight += 1
        self._polls = 0
        if not self._is_answered:
            self._first_sent_at = now
        return Turn(True, at - now, "pace", None if slowest is None else self.quotas.get(slowest))

    def _poll(self) -> float:
        self._polls += 1
        return min(POLL_S * 1.5 ** min(self._polls, 20), MAX_POLL_S) * (0.5 + self._random())

    def keys_for(self, path: str) -> tuple[Hashable, ...]:
        """The quotas that apply to a path: those of the last answer on its route, or on a similar one.

        To a route of which nothing is known apply those that the routes used last have in common.
        """
        for route in _routes(path):
            if (keys := self._routes.get(route)) is not None:
                return tuple([key for key in keys if key in self._pacers])
        recent = [self._routes[route] for route in islice(reversed(self._routes), COMPARED_ROUTES)]
        return tuple([key for key in self._pacers if recent and all(key in keys for keys in recent)])

    # ------------------------------------------------------------ learning

    def learn(self, path: str, quotas: Sequence[Quota], now: float, *, is_rejection: bool) -> None:
        """Take over what a response says."""
        self._is_answered = True
        routes = _routes(path)
        keys = []
        for quota in quotas:
            if quota.unit == CONCURRENT:
                self._limit_concurrency(quota)
                continue
            key = (RETRY_AFTER, routes[0]) if quota.name == RETRY_AFTER else _key(quota)
            pacer = self._pacers.pop(key, None) or QuotaPacer(self._random)
            self._pacers[key] = pacer
            self.quotas[key] = quota
            keys.append(key)
            if quota.name == RETRY_AFTER:
                if is_rejection:
                    pacer.block(now, quota.reset_after or 0.0)
            elif quota.unit == "requests":
                pacer.learn(quota, now, in_flight=self.in_flight, is_rejection=is_rejection)
            elif quota.remaining == 0 and quota.reset_after is not None:  # a cost that only the server knows
                pacer.block(now, quota.reset_after)
        for route in routes:
            earlier = self._routes.pop(route, ())
            self._routes[route] = tuple(keys) or earlier  # an answer from a cache, for example, reports nothing
        while len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        while len(self._pacers) > MAX_PACERS:
            oldest = next(iter(self._pacers))
            del self._pacers[oldest]
            self.quotas.pop(oldest, None)

    def _limit_concurrency(self, quota: Quota) -> None:
        if quota.remaining is not None:  # others hold the rest; the answered request has given back its own
            self._max_in_flight = max(1, self.in_flight + quota.remaining + 1)
        if quota.limit is not None:
            self._max_in_flight = max(1, min(self._max_in_flight, quota.limit))

    def finish(self) -> None:
        """Count a request as answered, or failed."""
        self.in_flight = max(0, self.in_flight - 1)


def _key(quota: Quota) -> Hashable:
    """Quotas without a name are distinguished by their size."""
    return (quota.name, quota.partition, quota.unit, quota.limit if quota.name is None else None)


def _routes(path: str) -> tuple[str, str]:
    """The first two segments of a path, and the first: /v1/search/5 is on the route /v1/search, or else on /v1."""
    first, _, rest = path.partition("?")[0][:512].lstrip("/").partition("/")
    return f"{first}/{rest.partition('/')[0]}", first
