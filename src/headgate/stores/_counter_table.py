"""The counters of one limit in the memory store, and the order in which they may be evicted."""

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

__all__ = ["SECOND_BITS", "CounterTable", "Debt"]

_Meter = speedups.pick("Meter")
_METERED: Final = speedups.pick("ALGORITHMS", ())

SECOND_BITS: Final = 20
"""A bucket of the schedule is 2**20 microseconds wide."""


class Debt(NamedTuple):
    """The part of a counter that is used, for ranking counters by the cost of evicting them."""

    used: float
    """As a fraction of the capacity: 0 for a counter that is as new, 1 for one that denies a cost of 1."""
    owed_us: int
    """The time until the counter is as new."""
    blocked_us: int
    """The time for which it still denies a cost of 1; 0 if it does not."""


class _Schedule:
    """Identities by the second in which they are due."""

    __slots__ = ("_buckets", "_seconds")

    def __init__(self) -> None:
        self._buckets: dict[int, list[str]] = {}
        self._seconds: list[int] = []
        """The buckets' seconds, as a heap."""

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
        "_blocked", "_due", "_meters", "adopt", "decide", "limit", "only", "refund", "states", "was_reset", "writers",
    )  # fmt: skip

    def __init__(self, limit: Limit, meters: dict[str, Any]) -> None:
        algorithm = ALGORITHMS[limit.algorithm]
        self.decide = algorithm.decide
        self.refund = algorithm.refund
        self.adopt = algorithm.adopt
        self.limit: LimitNumbers
        """Under whose numbers the states were written, but for those in `writers`."""
        self.only: LimitNumbers | None
        """The same while there are no others: the one comparison of the short path."""
        self._meters = meters
        """Where the compiled `charge` finds these counters, while `only` is set."""
        self.states: dict[str, Any] = {}
        self.writers: dict[str, LimitNumbers] = {}
        self._due = _Schedule()
        """Keys by when they are as new, as far as is known."""
        self._blocked = _Schedule()
        """Keys that were found blocked, by when they no longer are. Until then they are not candidates for eviction."""
        self.was_reset: set[str] = set()
        """Keys that are gone, but are still in a schedule: if they come back, they have their place already."""
        self.obey(limit)

    def obey(self, limit: Limit) -> None:
        """Begin with the numbers of that limit."""
        self.limit = self.only = limit
        if limit.algorithm in _METERED:
            self._meters[limit.space] = _Meter(limit, self.states)

    def is_written_by(self, limit: LimitNumbers, identity: str) -> bool:
        """Whether the state can be read with the numbers of `limit` as it stands."""
        return _numbers(self.writers.get(identity, self.limit)) == _numbers(limit)

    def write(self, key: Key, state: Any) -> None:
        """Put a state in, signed first: a reader that finds the new state must find its writer, too."""
        if self.writers or key.limit is not self.limit:
            if _numbers(key.limit) == _numbers(self.limit):
                self.writers.pop(key.identity, None)
            else:
                self.only = None
                self._meters.pop(key.limit.space, None)
                self.writers[key.identity] = key.limit
        self.states[key.identity] = state

    def drop(self, identity: str) -> None:
        del self.states[identity]
        self.writers.pop(identity, None)

    def reset(self, identity: str) -> None:
        self.drop(identity)
        self.was_reset.add(identity)

    def enlist(self, identity: str, at_us: int) -> None:
        """Give a new key its place in the schedule."""
        if identity in self.was_reset:
            self.was_reset.remove(identity)
        else:
            self.schedule(identity, at_us)

    def schedule(self, identity: str, at_us: int) -> None:
        """Look at a key again when it is as new."""
        self._due.add(identity, at_us)

    def hold_back(self, identity: str, until_us: int) -> None:
        """Look at a key again when it is no longer blocked."""
        self._blocked.add(identity, until_us)

    def release(self, now_us: int, most: int) -> None:
        """Make candidates for eviction of some keys whose block is over, or nearly so."""
        for _ in range(most):
            identity = self._take(self._blocked, (now_us >> SECOND_BITS) + 1)
            if identity is None:
                return
            self._due.add(identity, now_us)

    def take_due(self, before: int) -> str | None:
        """A key that was due before that second, and is now scheduled no more."""
        return self._take(self._due, before)

    def next_due(self) -> int:
        """The second in which the next key may be as new."""
        return self._due.next_second()

    def debt(self, identity: str, now_us: int) -> Debt:
        state, limit = self.states.get(identity), self.writers.get(identity, self.limit)
        verdict: Verdict = self.decide(state, now_us, 0, limit)[1]
        remaining, _, owed_us, _ = verdict
        if remaining or not owed_us:
            return Debt(1 - remaining / limit.capacity if owed_us else 0, owed_us, 0)
        return Debt(1, owed_us, self.decide(state, now_us, 1, limit)[1][1])

    def _take(self, schedule: _Schedule, before: int) -> str | None:
        while (identity := schedule.pop(before)) is not None:
            if identity in self.states:
                return identity
            self.was_reset.discard(identity)
        return None


def _numbers(limit: LimitNumbers) -> tuple[int, int, int]:
    """All numbers of a limit: its period follows from them where its capacity is its quota."""
    return limit.tokens, limit.ticks, limit.capacity
