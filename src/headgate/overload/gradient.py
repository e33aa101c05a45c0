"""An adaptive concurrency limit, which follows latency: the gradient algorithm, without clock, lock or I/O.

A service that is overloaded queues: its latency rises above the latency that it has without a queue, the base latency.
At the end of each window, the limit is multiplied by the gradient

    tolerance * base latency / latency of the window        (between 1/2 and 2)

and raised by half of its square root, the queue that is always permitted, so that it grows until latency does. This is
the rule of Gradient2 in Netflix's concurrency-limits, and of Envoy's adaptive concurrency. They differ in the base
latency. Here it is the latency of windows in which less than half of the limit was in use. If there were none for
`PROBE_INTERVAL_US`, the base is measured: the limit is halved step by step until latency falls no further, which takes
a few round trips. Measurements begin at multiples of the interval on the clock, so that all processes that use the same
database empty its queue at the same time.

A service may also have become slower without a queue, for example because its requests have. Then a lower limit does
not help: if latency is about the same with half of the calls in progress, it is the new base latency; and if the limit
has fallen to its minimum without success, the base is measured at once. Without this, a base that is too low would shed
most of the traffic of a service that is well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

from headgate.errors import InvalidConfiguration

__all__ = ["ConcurrencySettings", "GradientLimit"]

WINDOW_US: Final = 100_000
"""The shortest window; longer for a service with a latency of more than half of it."""
MIN_SAMPLES: Final = 20
"""Latencies in a window; a smaller number says little about their mean."""
HEADROOM: Final = 0.5
"""The queue that is always permitted, as a multiple of the square root of the limit."""
RISE: Final = 0.3
"""The weight of a higher value of the limit, and of a new value of the base latency."""
FALL: Final = 0.6
"""The weight of a lower value of the limit."""
LOWEST_GRADIENT: Final = 0.5
HIGHEST_GRADIENT: Final = 2.0
DROP_FACTOR: Final = 0.8
"""The decrease in a window in which calls have timed out, whatever the latency of the others."""
PROBE_INTERVAL_US: Final = 10_000_000
MAX_PROBE_STEPS: Final = 6
DRAIN_LATENCIES: Final = 2
"""The time in which the queue empties after the limit was halved, as a multiple of the latency before."""
MIN_RELIEF: Final = 0.75
"""With half of the calls in progress, latency falls to half while there is a queue, and not at all without one. Up to
this part of it, there was a queue, and there may still be one."""
MAX_NOISE: Final = 1.1
"""A latency that is higher by this factor is not only higher by chance."""
MINIMUM_WINDOWS: Final = 3
"""Windows at the minimum of the limit after which the base latency is measured."""
MAX_STEP_WINDOWS: Final = 10
"""Windows after which a step of a probe ends with the latencies that it has."""


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """The bounds of an adaptive concurrency limit. The limit is fixed if `minimum` and `maximum` are equal."""

    minimum: int = 4
    maximum: int = 1000
    initial: int = 20
    tolerance: float = 1.25
    """The latency that is accepted, as a multiple of the base latency."""

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum", "initial"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidConfiguration(f"{name} {value!r} is not a number of requests; use a whole number >= 1")
        if self.minimum > self.maximum:
            message = f"the minimum {self.minimum} is above the maximum {self.maximum}; exchange them, or change one"
            raise InvalidConfiguration(message)
        if isinstance(self.tolerance, bool) or not 1 <= self.tolerance <= 10:
            raise InvalidConfiguration(f"tolerance {self.tolerance!r} is not a number from 1 to 10")

    @property
    def is_fixed(self) -> bool:
        return self.minimum == self.maximum


class GradientLimit:
    """The limit on calls in progress. All times are microseconds on one clock; not thread-safe."""

    __slots__ = (
        "_at_minimum", "_base_at_us", "_drops", "_limit", "_most_in_flight", "_probe_steps", "_samples",
        "_settings", "_slowest", "_sum_us", "_window_from_us", "base_us", "latency_us", "limit",
    )  # fmt: skip

    def __init__(self, settings: ConcurrencySettings, now_us: int) -> None:
        self.base_us = 0.0
        """The latency without a queue; 0 until it is known."""
        self.latency_us = 0.0
        """The mean latency of the last window."""
        self._limit = float(settings.initial)
        self._samples = self._sum_us = self._drops = self._most_in_flight = 0
        self.configure(settings)
        self._base_at_us = now_us
        self._probe_steps = 0
        self._slowest: tuple[float, int] | None = None
        """The highest latency since the limit began to fall, and the calls in progress then."""
        self._at_minimum = 0
        """Windows with a latency that is too high in which the limit was at its minimum."""
        self._begin_window(now_us)

    def configure(self, settings: ConcurrencySettings) -> None:
        """Use other bounds from now on; what was measured is kept."""
        self._settings = settings
        self._limit = min(max(self._limit, settings.minimum), settings.maximum)
        self.limit = int(self._limit)
        """Calls that may be in progress now."""

    @property
    def full_limit(self) -> int:
        """The limit without the measurement that may be running."""
        return int(self._limit)

    def add(self, now_us: int, latency_us: int, in_flight: int) -> None:
        """Record a call that has succeeded; `in_flight` includes it."""
        if self._settings.is_fixed or latency_us < 0:  # the clock was set back
            return
        self._most_in_flight = max(self._most_in_flight, in_flight)
        if now_us >= self._window_from_us:
            self._samples += 1
            self._sum_us += latency_us
        self._end_window(now_us)

    def add_drop(self, now_us: int, in_flight: int) -> None:
        """Record a call that has timed out, or that was rejected for want of capacity."""
        if self._settings.is_fixed:
            return
        self._most_in_flight = max(self._most_in_flight, in_flight)
        self._drops += 1
        self._end_window(now_us)

    def _begin_window(self, now_us: int) -> None:
        self._window_from_us = now_us
        self._samples = self._sum_us = self._drops = self._most_in_flight = 0

    def _end_window(self, now_us: int) -> None:
        age_us, width_us = now_us - self._window_from_us, max(WINDOW_US, 2 * self.latency_us)
        if self._probe_steps:
            if (age_us >= width_us / 2 and self._samples >= MIN_SAMPLES) or age_us > MAX_STEP_WINDOWS * width_us:
                self._end_probe_step(now_us)
        elif age_us < 0:
            self._begin_window(now_us)
        elif age_us >= width_us and (self._samples >= MIN_SAMPLES or self._drops):
            self._update(now_us)

    def _update(self, now_us: int) -> None:
        is_saturated = self._most_in_flight * 2 >= self._limit
        if self._samples >= MIN_SAMPLES:
            is_first = not self.latency_us
            self.latency_us = latency_us = self._sum_us / self._samples
            if is_first:  # its slower calls have not finished: it says when the next window may begin
                self._begin_window(now_us + int(DRAIN_LATENCIES * latency_us))
                return
            if not self.base_us:
                self.base_us = latency_us
            elif not is_saturated or latency_us * MAX_NOISE < self.base_us:
                self.base_us += RISE * (latency_us - self.base_us)
            if not is_saturated:
                self._base_at_us = now_us
            else:
                self._recognize_base(now_us)
                gradient = self._settings.tolerance * self.base_us / latency_us
                gradient = min(HIGHEST_GRADIENT, max(LOWEST_GRADIENT, gradient))
                change = self._limit * (gradient - 1) + HEADROOM * sqrt(self._limit)
                self._set(self._limit + (RISE if change > 0 else FALL) * change)
        if self._drops:
            self._set(self._limit * DROP_FACTOR)
        self._begin_window(now_us)
        has_old_base = now_us // PROBE_INTERVAL_US - self._base_at_us // PROBE_INTERVAL_US > 1
        if is_saturated and self.base_us and (has_old_base or self._at_minimum == MINIMUM_WINDOWS):
            self._begin_probe_step(now_us)

    def _recognize_base(self, now_us: int) -> None:
        """Raise the base latency if latency does not fall with the calls in progress."""
        in_flight, latency_us = self._most_in_flight, self.latency_us
        slowest = self._slowest
        if latency_us <= self._settings.tolerance * self.base_us:
            self._slowest = None
            self._at_minimum = 0
            return
        # Once in each time that it is there: a service may be too small for the minimum, too.
        self._at_minimum += self._limit <= self._settings.minimum
        if slowest is None or latency_us > MAX_NOISE * slowest[0]:
            self._slowest = latency_us, in_flight
        elif in_flight * 2 <= slowest[1]:
            if latency_us > MIN_RELIEF * slowest[0]:
                self.base_us = latency_us
                self._base_at_us = now_us
                self._restore()
            else:
                self._slowest = latency_us, in_flight

    def _restore(self) -> None:
        """Undo half of the fall of the limit if there was no queue before it either; the other half, it grows."""
        slowest, self._slowest = self._slowest, None
        if slowest is not None and self.base_us > MIN_RELIEF * slowest[0]:
            self._at_minimum = 0
            self._set(max(self._limit, (self._limit + slowest[1]) / 2))

    def _begin_probe_step(self, now_us: int) -> None:
        self._probe_steps += 1
        self.limit = max(int(self._limit / 2**self._probe_steps), 1)
        # First the queue empties, and what has waited in it finishes.
        self._begin_window(now_us + int(DRAIN_LATENCIES * self.latency_us))

    def _end_probe_step(self, now_us: int) -> None:
        if self._samples:
            before_us, self.latency_us = self.latency_us, self._sum_us / self._samples
            has_gained = self.latency_us <= MIN_RELIEF * before_us
            if has_gained or self._probe_steps == 1:
                self.base_us = self.latency_us
            else:
                self.base_us = (self.base_us + self.latency_us) / 2
            if has_gained and self._probe_steps < MAX_PROBE_STEPS and self.limit > 1:
                self._begin_probe_step(now_us)
                return
        self._probe_steps = 0
        self._base_at_us = now_us
        self.limit = int(self._limit)
        if self._at_minimum:
            self._restore()
        self._begin_window(now_us)

    def _set(self, limit: float) -> None:
        self._limit = min(max(limit, self._settings.minimum), self._settings.maximum)
        self.limit = int(self._limit)
