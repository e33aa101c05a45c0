"""The counters of one limit in the memory store, and the order in which they may be forgotten."""

from __future__ import annotations

import sys
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from headgate._compiled import compiled
from headgate.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from headgate.algorithms import LimitNumbers, Verdict
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["SECOND_BITS", "Space"]

_meter = compiled("headgate.stores._meter")

SECOND_BITS: Final = 20
"""A bucket of the schedule is 2**20 microseconds wide."""


class Space:
    """The counters of one limit name and algorithm."""

    __slots__ = (
        "adopt", "buckets", "decide", "due", "limit", "meter", "only", "refund", "states", "was_reset",
        "writers",
    )  # fmt: skip

    def __init__(self, limit: Limit) -> None:
        algorithm = ALGORITHMS[limit.algorithm]
        self.decide = algorithm.decide
        self.refund = algorithm.refund
        self.adopt = algorithm.adopt
        self.limit: LimitNumbers
        """Under whose numbers the states were written, but for those in `writers`."""
        self.only: LimitNumbers | None
        """The same while there are no others: the one comparison of the short path."""
        self.meter: Any
        """The same for the compiled `charge`: the limit, with its states. None while there are others, too."""
        self.states: dict[str, Any] = {}
        self.writers: dict[str, LimitNumbers] = {}
        self.buckets: dict[int, list[str]] = {}
        self.was_reset: set[str] = set()
        """Keys that are gone, but still stand in a bucket: if they come back, they have their place already."""
        self.due: list[int] = []
        """The buckets' seconds, as a heap."""
        self.obey(limit)

    def obey(self, limit: Limit) -> None:
        """Begin with the numbers of that limit."""
        self.limit = self.only = limit
        self.meter = _meter.Meter(limit, self.states) if _meter and limit.algorithm in _meter.METERED else None

    def is_written_by(self, limit: LimitNumbers, identity: str) -> bool:
        """Whether the state can be read with the numbers of `limit` as it stands."""
        return _numbers(self.writers.get(identity, self.limit)) == _numbers(limit)

    def write(self, key: Key, state: Any) -> None:
        """Put a state in, signed first: a reader that finds the new state must find its writer, too."""
        if self.writers or key.limit is not self.limit:
            if _numbers(key.limit) == _numbers(self.limit):
                self.writers.pop(key.identity, None)
            else:
                self.only = self.meter = None
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
        second = at_us >> SECOND_BITS
        bucket = self.buckets.get(second)
        if bucket is None:
            bucket = self.buckets[second] = []
            heappush(self.due, second)
        bucket.append(identity)

    def take_due(self, before: int) -> str | None:
        """A key that was due before that second, and is now scheduled no more."""
        while self.due and self.due[0] < before:
            bucket = self.buckets[self.due[0]]
            while bucket:
                identity = bucket.pop()
                if identity in self.states:
                    return identity
                self.was_reset.discard(identity)
            del self.buckets[heappop(self.due)]
        return None

    def next_due(self) -> int:
        """The second in which the next key may be as new."""
        return self.due[0] if self.due else sys.maxsize

    def reset_us(self, identity: str, now_us: int) -> int:
        """How long until the key is as new."""
        verdict: Verdict = self.decide(self.states[identity], now_us, 0, self.writers.get(identity, self.limit))[1]
        return verdict[2]


def _numbers(limit: LimitNumbers) -> tuple[int, int, int]:
    """All numbers of a limit: its period follows from them where its capacity is its quota."""
    return limit.tokens, limit.ticks, limit.capacity
