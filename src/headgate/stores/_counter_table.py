"""The counters of one limit in the memory store, and the order of their eviction."""

from __future__ import annotations

import sys
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate import speedups
from headgate.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from headgate.algorithms import LimitNumbers, Verdict
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["SECOND_BITS", "CounterTable", "EvictionCost"]

_Meter = speedups.pick("Meter")
_METERED: Final = speedups.pick("ALGORITHMS", ())

SECOND_BITS: Final = 20
"""A "second" of the schedule is 2**20 microseconds."""


class EvictionCost(NamedTuple):
    """The rank of a counter among candidates for eviction."""

    used: float
    """The used fraction of the capacity: 0 for an unused counter, 1 for one that denies a cost of 1."""
    owed_us: int
    """The time until the counter is as new."""
    blocked_us: int
    """The time for which it denies a cost of 1; 0 if it does not."""


class _Schedule:
    """Identities by the second in which they are due."""

    __slots__ = ("_buckets", "_seconds")

    def __init__(self) -> None:
        self._buckets: dict[int, list[str]] = {}
        self._seconds: list[int] = []
        """The keys of the buckets, as a heap."""

    def add(self, identity: str, at_us: int) -> None:
        second = at_us >> SECOND_BITS
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = []
            heappush(self._seconds, second)
        bucket.append(identity)

    def pop(self, before: int) -> str | None:
        """Remove and return an identity that is due before that second."""
        while self._seconds and self._seconds[0] < before:
            bucket = self._buckets[self._seconds[0]]
            if bucket:
                return bucket.pop()
            del self._buckets[heappop(self._seconds)]
        return None

    def next_second(self) -> int:
        return self._seconds[0] if self._seconds else sys.maxsize


class CounterTable:
    """The counters of one limit name and algorithm."""

    __slots__ = (
        *("_blocked", "_due", "_meters", "adopt", "decide", "limit", "refund", "reset_identities", "single_limit"),
        *("states", "writers"),
    )

    def __init__(self, limit: Limit, meters: dict[str, Any]) -> None:
        algorithm = ALGORITHMS[limit.algorithm]
        self.decide = algorithm.decide
        self.refund = algorithm.refund
        self.adopt = algorithm.adopt
        self.limit: LimitNumbers
        """The limit whose numbers all states were written with, except those in `writers`."""
        self.single_limit: LimitNumbers | None
        """The same, or None if there are exceptions: the one comparison of the fast path."""
        self._meters = meters
        """The counters for the compiled `charge`; includes these while `single_limit` is set."""
        self.states: dict[str, Any] = {}
        self.writers: dict[str, LimitNumbers] = {}
        self._due = _Schedule()
        """Counters by the time at which they are as new, as far as is known."""
        self._blocked = _Schedule()
        """Counters that deny a cost of 1, by the end of that; until then they are not candidates for eviction."""
        self.reset_identities: set[str] = set()
        """Identities without a counter that are still in a schedule, and need not be added again."""
        self.use_limit(limit)

    def use_limit(self, limit: Limit) -> None:
        """Set the limit of an empty table."""
        self.limit = self.single_limit = limit
        if limit.algorithm in _METERED:
            self._meters[limit.space] = _Meter(limit, self.states)

    def is_written_by(self, limit: LimitNumbers, identity: str) -> bool:
        """True if the state of an identity can be read with the numbers of this limit."""
        return _numbers(self.writers.get(identity, self.limit)) == _numbers(limit)

    def write(self, key: Key, state: Any) -> None:
        """Set a state, its writer first: a reader that finds the new state must find its writer, too."""
        if self.writers or key.limit is not self.limit:
            if _numbers(key.limit) == _numbers(self.limit):
                self.writers.pop(key.identity, None)
            else:
                self.single_limit = None
                self._meters.pop(key.limit.space, None)
                self.writers[key.identity] = key.limit
        self.states[key.identity] = state

    def drop(self, identity: str) -> None:
        del self.states[identity]
        self.writers.pop(identity, None)

    def reset(self, identity: str) -> None:
        self.drop(identity)
        self.reset_identities.add(identity)

    def schedule_new(self, identity: str, at_us: int) -> None:
        """Schedule a new counter."""
        if identity in self.reset_identities:
            self.reset_identities.remove(identity)
        else:
            self.schedule(identity, at_us)

    def schedule(self, identity: str, at_us: int) -> None:
        """Schedule a counter for the time at which it is as new."""
        self._due.add(identity, at_us)

    def schedule_blocked(self, identity: str, until_us: int) -> None:
        """Schedule a counter for the time at which it no longer denies a cost of 1."""
        self._blocked.add(identity, until_us)

    def unblock(self, now_us: int, most: int) -> None:
        """Make some counters candidates for eviction that no longer deny a cost of 1, or will soon."""
        for _ in range(most):
            identity = self._pop(self._blocked, (now_us >> SECOND_BITS) + 1)
            if identity is None:
                return
            self._due.add(identity, now_us)

    def pop_due(self, before: int) -> str | None:
        """Remove an identity from the schedule that is due before that second."""
        return self._pop(self._due, before)

    def next_due(self) -> int:
        """The second of the next counter in the schedule."""
        return self._due.next_second()

    def eviction_cost(self, identity: str, now_us: int) -> EvictionCost:
        state, limit = self.states.get(identity), self.writers.get(identity, self.limit)
        verdict: Verdict = self.decide(state, now_us, 0, limit)[1]
        remaining, _, owed_us, _ = verdict
        if remaining or not owed_us:
            return EvictionCost(1 - remaining / limit.capacity if owed_us else 0, owed_us, 0)
        return EvictionCost(1, owed_us, self.decide(state, now_us, 1, limit)[1][1])

    def _pop(self, schedule: _Schedule, before: int) -> str | None:
        while (identity := schedule.pop(before)) is not None:
            if identity in self.states:
                return identity
            self.reset_identities.discard(identity)
        return None


def _numbers(limit: LimitNumbers) -> tuple[int, int, int]:
    """The numbers that a state depends on. The period follows from them where the capacity is the quota."""
    return limit.tokens, limit.ticks, limit.capacity
