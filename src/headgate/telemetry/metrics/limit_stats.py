"""Statistics over all counters of one limit: their number, the share that is left, and those at zero for long.

Memory is bounded: a sample of `MAX_MARKS` hashes for the estimate, and `MAX_AT_ZERO` counters at zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final

from headgate.algorithms import NEVER
from headgate.telemetry.metrics.families import REMAINING_SHARES, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["LONG_US", "MAX_AT_ZERO", "MAX_MARKS", "WINDOW_US", "DistinctCounter", "LimitStats"]

WINDOW_US: Final = 300_000_000
"""The window in which distinct counters are counted."""
LONG_US: Final = 300_000_000
"""A client that is at zero for longer needs a higher limit, or has a bug."""
SILENCE_US: Final = 60_000_000
"""A counter that could have recovered, and has not been seen for this long, no longer counts as at zero."""
MAX_AT_ZERO: Final = 10_000
MAX_MARKS: Final = 1024


class DistinctCounter:
    """Estimates the number of distinct strings from a sample of hashes that is halved whenever it is full.

    A string is in the sample if the last bits of its hash are zero; the number of these bits grows. Exact up to 1024;
    beyond that, the error is mostly below 5 %.

    >>> names = DistinctCounter()
    >>> names.update(["ada", "bob", "ada"])
    >>> names.estimate
    2
    """

    __slots__ = ("marks", "mask")

    def __init__(self) -> None:
        self.mask = 0
        """The bits that are zero in all hashes of the sample."""
        self.marks: set[int] = set()

    def update(self, texts: Iterable[str]) -> None:
        mask = self.mask
        self.marks.update([mark for mark in map(hash, texts) if not mark & mask] if mask else map(hash, texts))
        while len(self.marks) > MAX_MARKS:
            self.mask = self.mask * 2 + 1
            self.marks = {mark for mark in self.marks if not mark & self.mask}

    @property
    def estimate(self) -> int:
        return len(self.marks) * (self.mask + 1)


class LimitStats:
    """The statistics of one limit. Not thread-safe."""

    __slots__ = ("_at_zero", "_counts", "_distinct", "_previous_estimate", "_total", "by")

    def __init__(self, by: str) -> None:
        self.by = by
        """The kinds of identity that the limit counts by."""
        self._counts = [0] * (len(REMAINING_SHARES) + 1)
        self._total = 0.0
        self._distinct = DistinctCounter()
        self._previous_estimate = 0
        self._at_zero: dict[str, tuple[int, int]] = {}
        """Since when each counter has been at zero, and until when that is assumed if it is not seen again."""

    def record(self, identity: str, share: float, retry_us: int, now_us: int) -> None:
        """Record one answer: the share of the limit that is left, and the time to wait (0 if the request passed)."""
        self._counts[bisect_left(REMAINING_SHARES, share)] += 1
        self._total += share
        self._distinct.update((identity,))
        if share and not retry_us:
            self._at_zero.pop(identity, None)
            return
        known = self._at_zero.get(identity)
        if known is not None and now_us < known[1]:
            since_us = known[0]
        elif known is not None or len(self._at_zero) < MAX_AT_ZERO:
            since_us = now_us
        else:
            return
        wait_us = SILENCE_US if retry_us == NEVER or retry_us < SILENCE_US else retry_us
        self._at_zero[identity] = since_us, now_us + wait_us

    def record_passed(self, identities: Sequence[str], remaining: Sequence[int], capacity: int) -> bool:
        """Record answers to requests that passed, if no counter is or was at zero; False if nothing was recorded.

        The same as `record` for each of them, in a fraction of the time.
        """
        if 0 in remaining or (self._at_zero and not self._at_zero.keys().isdisjoint(identities)):
            return False
        for bucket, count in Counter(map(bisect_left, repeat(_bounds(capacity)), remaining)).items():
            self._counts[bucket] += count
        self._total += sum(remaining) / capacity
        self._distinct.update(identities)
        return True

    def start_window(self) -> None:
        """Begin to count distinct counters anew."""
        self._previous_estimate, self._distinct = self._distinct.estimate, DistinctCounter()

    def forget_recovered(self, now_us: int) -> None:
        """Remove the counters that are no longer assumed to be at zero."""
        self._at_zero = {identity: known for identity, known in self._at_zero.items() if now_us < known[1]}

    @property
    def size(self) -> int:
        """The number of distinct counters in the previous window, or in this one if it is larger already."""
        return max(self._previous_estimate, self._distinct.estimate)

    @property
    def remaining(self) -> Histogram:
        return Histogram(REMAINING_SHARES, tuple(self._counts), self._total)

    def count_at_zero(self, now_us: int) -> int:
        """The number of counters that have been at zero for longer than `LONG_US`."""
        return sum([since_us + LONG_US < now_us < until_us for since_us, until_us in self._at_zero.values()])


@lru_cache(maxsize=1024)
def _bounds(capacity: int) -> tuple[int, ...]:
    """The histogram's bounds in tokens: the largest whole numbers that are at most such shares of the capacity."""
    return tuple([int(Fraction(str(share)) * capacity) for share in REMAINING_SHARES])
