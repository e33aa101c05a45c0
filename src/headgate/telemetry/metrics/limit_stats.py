"""What is known of all who are counted by one limit: how many, how much is left to them, who has had nothing for long.

Bounded whatever happens: a thousand marks for an estimate, ten thousand who are at zero.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from headgate.algorithms import NEVER
from headgate.telemetry.metrics.families import SHARES, Histogram

__all__ = ["LONG_US", "MOST_AT_ZERO", "WINDOW_US", "DistinctCounter", "LimitStats"]

WINDOW_US: Final = 300_000_000
"""Counters are counted over so long."""
LONG_US: Final = 300_000_000
"""Whoever has been at zero for longer needs another limit, or has a bug."""
PATIENCE_US: Final = 60_000_000
"""Whoever is not heard of for so long, and could have something again, is not believed to be at zero any more."""
MOST_AT_ZERO: Final = 10_000
MOST_MARKS: Final = 1024


class DistinctCounter:
    """How many different texts there were, from a sample that halves whenever it is full.

    A text is in the sample if the last bits of its hash are zero: how many bits grows with the crowd. Exact up to
    1024; beyond that, the error is mostly below a twentieth.

    >>> guests = DistinctCounter()
    >>> for name in ("ada", "bob", "ada"):
    ...     guests.add(name)
    >>> guests.estimate
    2
    """

    __slots__ = ("marks", "mask")

    def __init__(self) -> None:
        self.mask = 0
        """The bits that are zero in all hashes of the sample."""
        self.marks: set[int] = set()

    def add(self, text: str) -> None:
        mark = hash(text)
        if mark & self.mask or mark in self.marks:
            return
        self.marks.add(mark)
        while len(self.marks) > MOST_MARKS:
            self.mask = self.mask * 2 + 1
            self.marks = {mark for mark in self.marks if not mark & self.mask}

    @property
    def estimate(self) -> int:
        return len(self.marks) * (self.mask + 1)


class LimitStats:
    """All who are counted by one limit. Whoever asks holds a lock."""

    __slots__ = ("_at_zero", "_before", "_counts", "_seen", "_total", "by")

    def __init__(self, by: str) -> None:
        self.by = by
        """The kinds of identity that they are counted by."""
        self._counts = [0] * (len(SHARES) + 1)
        self._total = 0.0
        self._seen = DistinctCounter()
        self._before = 0
        """How many there were in the window before."""
        self._at_zero: dict[str, tuple[int, int]] = {}
        """Since when each has had nothing, and how long that is believed if nothing more is heard."""

    def note(self, identity: str, share: float, retry_us: int, now_us: int) -> None:
        """One of them was told what is left: a share of the limit; and when to come back, 0 if it passed.

        This runs on every request for each of its limits.
        """
        self._counts[bisect_left(SHARES, share)] += 1
        self._total += share
        seen, mark = self._seen, hash(identity)
        if not mark & seen.mask and mark not in seen.marks:  # looked at here, as it is rarely new
            seen.add(identity)
        if share and not retry_us:
            if self._at_zero:
                self._at_zero.pop(identity, None)
            return
        known = self._at_zero.get(identity)
        if known is not None and now_us < known[1]:
            since_us = known[0]
        elif known is not None or len(self._at_zero) < MOST_AT_ZERO:
            since_us = now_us
        else:
            return
        wait_us = PATIENCE_US if retry_us == NEVER or retry_us < PATIENCE_US else retry_us
        self._at_zero[identity] = since_us, now_us + wait_us

    def end_window(self) -> None:
        """Count them afresh."""
        self._before, self._seen = self._seen.estimate, DistinctCounter()

    def forget_recovered(self, now_us: int) -> None:
        """Make room for others."""
        self._at_zero = {identity: known for identity, known in self._at_zero.items() if now_us < known[1]}

    @property
    def size(self) -> int:
        """How many there were in the last window, or are in this one already."""
        return max(self._before, self._seen.estimate)

    @property
    def remaining(self) -> Histogram:
        return Histogram(SHARES, tuple(self._counts), self._total)

    def at_zero(self, now_us: int) -> int:
        """How many have had nothing for long."""
        return sum([since_us + LONG_US < now_us < until_us for since_us, until_us in self._at_zero.values()])
