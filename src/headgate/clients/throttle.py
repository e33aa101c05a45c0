"""Throttles: limits of APIs that are documented and not reported in responses."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from headgate.errors import InvalidConfiguration
from headgate.limiter import AsyncLimiter, Limiter
from headgate.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headgate.clock import Clock
    from headgate.keys import Key

__all__ = ["Throttle"]


class Throttle:
    """Limits that a client keeps to on its own: `Throttle(Limit.parse("100/minute"))`.

    Requests wait until all limits allow them. Each host has its own counters. They are in this process unless
    `limiter` is given, a `Limiter` or an `AsyncLimiter` on the store that all processes share.

    `weights` are costs of routes, by pattern: {"POST /search": 5, "/v1/reports/*": 10}; the first match counts, and
    the default is 1. It can also be a function of method and path.

    >>> throttle = Throttle("100/minute", weights={"POST /search": 5, "/health": 0})
    >>> throttle.weight("POST", "/search"), throttle.weight("GET", "/search"), throttle.weight("GET", "/health")
    (5, 1, 0)
    """

    def __init__(
        self,
        *limits: Limit | str,
        limiter: Limiter | AsyncLimiter | None = None,
        weights: Mapping[str, int] | Callable[[str, str], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not limits:
            raise InvalidConfiguration('no limit given: write it like Throttle("100/minute")')
        texts = sum(isinstance(limit, str) for limit in limits)
        self.limits = tuple(
            limit if isinstance(limit, Limit) else Limit.parse(limit, name="throttle" if texts == 1 else limit)
            for limit in limits
        )
        for limit in self.limits:
            if limit.algorithm == "concurrency":
                raise InvalidConfiguration(f"the limit {limit.name!r} is of concurrency: give max_in_flight= instead")
        if limiter is not None and not isinstance(limiter, Limiter | AsyncLimiter):
            raise InvalidConfiguration(f"limiter {limiter!r} is not a Limiter or an AsyncLimiter")
        self.limiter: Any = Limiter(clock=clock) if limiter is None else limiter
        self._weights = weights

    def keys(self, host: str) -> tuple[Key, ...]:
        """The counters of a host."""
        return tuple([limit.by(host) for limit in self.limits])

    def weight(self, method: str, path: str) -> int:
        """The cost of a request."""
        if callable(self._weights):
            return self._weights(method, path)
        for pattern, weight in (self._weights or {}).items():
            verb, _, route = pattern.rpartition(" ")
            if verb in ("", method) and fnmatchcase(path, route):
                return weight
        return 1
