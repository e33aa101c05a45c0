"""Which counters are hot: asked so often by this process that a store call for each check is a waste.

Only one check in `SAMPLED_EVERY` is looked at. Samples are counted in windows of 100 ms; a counter is hot when three
whole windows in a row had at least `HOT_RATE` checks a second, so that a short burst, however steep, stays with the
store. It is cold again after a second below half of that.
"""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["HOT_RATE", "SAMPLED_EVERY", "WINDOW_US", "Counter", "HotKeyDetector"]

Counter: TypeAlias = tuple[str, str]
"""A limit's space and an identity: one counter in the store."""

SAMPLED_EVERY: Final = 16
"""One check in so many is looked at."""
HOT_RATE: Final = 1000
"""Checks a second, in this process alone."""
WINDOW_US: Final = 100_000

_HOT_SAMPLES: Final = HOT_RATE * WINDOW_US // 1_000_000 // SAMPLED_EVERY
_HOT_WINDOWS: Final = 3
_COLD_WINDOWS: Final = 10
_MOST_COUNTED: Final = 2048
"""Counters in one window. A flood of keys fills this up and is not looked at further; a counter that is hot beside it
is among the first samples of a window, or was already in the last."""


class HotKeyDetector:
    """Counts samples. Whoever asks holds a lock: nothing in here is safe by itself."""

    def __init__(self) -> None:
        self._window = 0
        self._samples: dict[Counter, int] = {}
        self._busy: set[Counter] = set()
        """What has reached the threshold in this window."""
        self._streaks: dict[Counter, int] = {}
        """In how many windows before this one, without a gap, each counter was busy."""
        self._idle: dict[Counter, int] = {}
        """The hot counters, and for how many windows each has been below half of the threshold."""
        self._cold: list[Counter] = []

    def note(self, counter: Counter, now_us: int) -> bool:
        """Count one sample; whether the counter has become hot with it."""
        if now_us // WINDOW_US != self._window:
            self._turn(now_us // WINDOW_US)
        samples = self._samples
        seen = samples.get(counter, 0) + 1
        if seen == 1 and len(samples) >= _MOST_COUNTED and counter not in self._streaks and counter not in self._idle:
            return False
        samples[counter] = seen
        if seen == _HOT_SAMPLES:
            self._busy.add(counter)
        if self._streaks.get(counter, 0) < _HOT_WINDOWS or counter in self._idle:
            return False
        self._idle[counter] = 0
        return True

    def add(self, counter: Counter, now_us: int) -> None:
        """Hot from now on, without having been measured, until it cools down."""
        if now_us // WINDOW_US != self._window:
            self._turn(now_us // WINDOW_US)
        self._idle.setdefault(counter, 0)

    def take_cold(self, now_us: int) -> list[Counter]:
        """The counters that have been hot and are no more; each is told once."""
        if now_us // WINDOW_US != self._window:
            self._turn(now_us // WINDOW_US)
        cold, self._cold = self._cold, []
        return cold

    def drop(self, counter: Counter) -> None:
        """Not hot any more, and measured anew."""
        self._idle.pop(counter, None)
        self._streaks.pop(counter, None)
        self._busy.discard(counter)

    def _turn(self, window: int) -> None:
        """The window is over. Between it and the new one there may be others, in which nothing was asked."""
        empty = max(0, window - self._window - 1)
        for counter in self._idle:
            is_idle = 2 * self._samples.get(counter, 0) < _HOT_SAMPLES
            self._idle[counter] = (self._idle[counter] + 1 if is_idle else 0) + empty
        cold = [counter for counter, idle in self._idle.items() if idle >= _COLD_WINDOWS]
        for counter in cold:
            self.drop(counter)
        self._cold += cold
        self._streaks = {} if empty else {counter: self._streaks.get(counter, 0) + 1 for counter in self._busy}
        self._busy = set()
        self._samples = {}
        self._window = window
