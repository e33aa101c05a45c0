"""Hot-key detection: counters that this process checks so often that a store call for each check is a waste.

One check in `SAMPLED_EVERY` is sampled. Samples are counted in windows of 100 ms. A counter is hot after three whole
windows in a row with at least `HOT_RATE` checks a second, so that a short burst, however steep, goes to the store. It
is cold again after a second below half of that rate.
"""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["HOT_RATE", "SAMPLED_EVERY", "WINDOW_US", "Counter", "HotKeyDetector"]

Counter: TypeAlias = tuple[str, str]
"""A limit's space and an identity: one counter in the store."""

SAMPLED_EVERY: Final = 16
HOT_RATE: Final = 1000
"""Checks a second, in this process alone."""
WINDOW_US: Final = 100_000

_HOT_SAMPLES: Final = HOT_RATE * WINDOW_US // 1_000_000 // SAMPLED_EVERY
_HOT_WINDOWS: Final = 3
_COLD_WINDOWS: Final = 10
_MAX_COUNTERS: Final = 2048
"""Counters per window. A flood of keys fills this up and is then ignored; a hot counter is among the first samples of
the window, or was in the last one."""


class HotKeyDetector:
    """Counts samples. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._window = 0
        self._samples: dict[Counter, int] = {}
        self._busy: set[Counter] = set()
        """Counters that have reached the threshold in this window."""
        self._streaks: dict[Counter, int] = {}
        """The number of consecutive windows before this one in which a counter was busy."""
        self._idle: dict[Counter, int] = {}
        """The hot counters, and the number of windows for which each has been below half of the threshold."""
        self._cold: list[Counter] = []

    def record_sample(self, counter: Counter, now_us: int) -> bool:
        """Count one sample; True if the counter has just become hot."""
        self._advance(now_us)
        samples = self._samples
        seen = samples.get(counter, 0) + 1
        if seen == 1 and len(samples) >= _MAX_COUNTERS and counter not in self._streaks and counter not in self._idle:
            return False
        samples[counter] = seen
        if seen == _HOT_SAMPLES:
            self._busy.add(counter)
        if self._streaks.get(counter, 0) < _HOT_WINDOWS or counter in self._idle:
            return False
        self._idle[counter] = 0
        return True

    def add(self, counter: Counter, now_us: int) -> None:
        """Treat a counter as hot until it cools down."""
        self._advance(now_us)
        self._idle.setdefault(counter, 0)

    def take_cold(self, now_us: int) -> list[Counter]:
        """The counters that have become cold since the last call."""
        self._advance(now_us)
        cold, self._cold = self._cold, []
        return cold

    def drop(self, counter: Counter) -> None:
        """Measure a counter from the beginning."""
        self._idle.pop(counter, None)
        self._streaks.pop(counter, None)
        self._busy.discard(counter)

    def _advance(self, now_us: int) -> None:
        """Close the window if it is over. Windows without samples may lie between it and the new one."""
        window = now_us // WINDOW_US
        if window == self._window:
            return
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
