"""Tools for your own tests: time that stands still until you move it."""

from __future__ import annotations

from headgate.errors import InvalidInput

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that moves only when told to; give it to a limiter on any store and nothing has to sleep.

    >>> from datetime import timedelta
    >>> from headgate import Limit, Limiter
    >>> clock = FakeClock()
    >>> limiter = Limiter(clock=clock)
    >>> login = Limit(1, timedelta(minutes=1), name="login").by("ada")
    >>> limiter.check(login).allowed, limiter.check(login).retry_after
    (True, 60.0)
    >>> clock.advance(60)
    >>> limiter.check(login).allowed
    True
    """

    __slots__ = ("_now_us",)

    def __init__(self, start_us: int = 0) -> None:
        self.set_us(start_us)

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float) -> None:
        """Move by `seconds`, rounded to whole microseconds; a negative number moves the clock back."""
        self.set_us(self._now_us + round(seconds * 1_000_000))

    def set_us(self, now_us: int) -> None:
        """Jump to an instant, also backwards: real clocks do."""
        if type(now_us) is not int or not 0 <= now_us < 2**52:
            raise InvalidInput(f"a clock cannot stand at {now_us!r}: give whole microseconds from 0 to 2**52")
        self._now_us = now_us

    def sleep(self, seconds: float) -> None:
        """What `acquire` does on this clock instead of waiting: time passes at once."""
        self.advance(seconds)

    def __repr__(self) -> str:
        return f"FakeClock(start_us={self._now_us})"
