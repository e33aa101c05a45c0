"""Pacing: the rate at which a client may use a quota that it shares with clients it does not know.

This file is the policy of the whole package; it has no clock and does not wait.

A response says what is left of a quota, `remaining`, for how long, `reset_after`, and often the quota and its window.
The difference of two responses is what all clients together have used in between, and the part of this client in it is
its share. The pacer aims at a rate of all clients that keeps the quota half full: unused quota is lost when it is
full, and requests are rejected when it is empty. Its own rate is its share of that.

- A quota that refills continuously (a bucket, or a window of a few seconds): the rate of refill, corrected by how far
  `remaining` is from half the quota.
- A quota that is restored at the end of a window: what is left, spread over what is left of the window.

More than half of a quota is left to a client that is alone: it need not wait until it has used the other half. The
correction is slow compared with the time between two requests of this client, since all clients correct at once. The
time of the next request is planned when it is sent, and again when its response has arrived, which is newer.
Shares approach each other, as large ones shrink a little with each response.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.clients.quotas import Quota

__all__ = ["QuotaPacer"]

SETPOINT: Final = 0.5
"""The part of a quota that is kept as a reserve against the unknown use by others."""
CORRECTION: Final = 2.5
"""The time in own intervals in which a deviation from the setpoint is corrected."""
MIN_SAMPLE_S: Final = 0.25
"""The shortest time from which a share is estimated; shorter ones count too few requests."""
SMOOTHING: Final = 0.5  # weight of a new estimate
FAIRNESS: Final = 0.01
"""The part of the quota by which shares are pulled together: large ones shrink by FAIRNESS * limit * share."""
MAX_SHRINKING: Final = 0.1
SHORT_S: Final = 2.0
"""Windows up to here are taken as continuous, since resets are reported in whole seconds."""
MAX_INTERVAL_S: Final = 60.0
"""The longest time between two requests by pacing alone, as longer ones could not notice that others have stopped."""
MAX_BLOCK_S: Final = 3600.0
"""An exhausted quota is tried again after an hour, even if the server has said that it takes longer."""
FULL: Final = 0.9
"""A quota of which this part is left is being lost: all clients may double their rate with each answer."""
MAIN_SHARE: Final = 0.4
"""A client with a share from here on may use a surplus at once; others leave time to those that are slower."""
MAX_SPEED: Final = 8.0  # times the rate of refill, and at least 1 / MAX_SPEED of it


class QuotaPacer:
    """The pace of this client on one quota. All times are seconds on one clock that does not go back."""

    __slots__ = (
        "_idle_s",
        "_is_continuous",
        "_learned_at",
        "_limit",
        "_most",
        "_next_at",
        "_own",
        "_pending",
        "_random",
        "_rejections",
        "_remaining",
        "_resets_at",
        "_sample_at",
        "_sample_remaining",
        "_share",
        "_slot",
        "_window",
        "blocked_until",
    )

    def __init__(self, random: Callable[[], float]) -> None:
        self.blocked_until = -inf
        """No request may be sent before."""
        self._random = random
        self._limit: int | None = None
        self._window: float | None = None
        self._remaining: int | None = None
        self._most = 0  # the most that was ever left
        self._learned_at = self._resets_at = -inf
        self._is_continuous = False
        self._share: float | None = None
        self._sample_at, self._sample_remaining, self._own = -inf, 0, 0
        self._idle_s = 0.0  # time in the sample in which a request could have been sent and was not
        self._rejections = 0  # before the first success
        self._pending = 0  # own requests sent since the last response
        self._next_at = self._slot = -inf

    # ------------------------------------------------------------ sending

    def next_at(self, now: float) -> float:
        """The time at which a request may be sent."""
        return max(now, self._next_at, self.blocked_until)

    def take(self, at: float) -> None:
        """Count a request that is sent at that time."""
        if self._next_at > -inf:
            self._idle_s += max(0.0, at - max(self._next_at, self._slot))
        self._slot = at
        self._pending += 1
        self._next_at = at + self._interval(at)

    def _interval(self, now: float) -> float:
        rate = self._target_rate(now)
        if rate is None or self._share is None:
            return 0.0
        jitter = 0.9 + 0.2 * self._random()  # clients that were started together drift apart
        return min(jitter / (rate * self._share), MAX_INTERVAL_S)

    def _target_rate(self, now: float) -> float | None:
        """The rate that all clients together should have; None if the quota says nothing about time."""
        if self._remaining is None:
            return None
        left = max(0, self._remaining - self._pending)
        refill = self._refill_rate()
        until_reset = self._resets_at - now
        if refill is not None and (self._is_continuous or until_reset <= 0):
            capacity = self._capacity()
            if until_reset <= -MAX_INTERVAL_S:  # long ago: it is full by now
                left = capacity
            surplus = max(self._surplus(left), refill if left >= FULL * capacity else -refill)
            return min(max(refill + surplus, refill / MAX_SPEED), refill * MAX_SPEED)
        if until_reset <= 0:
            return None
        return max(left, 0.5) / until_reset + max(0.0, self._surplus(left))

    def _surplus(self, left: float) -> float:
        """The correction of the rate; positive if more than the setpoint is left."""
        if self._limit is None:
            return 0.0
        gap = max(self._slot - self._learned_at, 0.0)
        gap = max(self._next_at - self._slot, gap, 0.001) if self._next_at > -inf else max(gap, 0.001)
        excess = left - max(0.0, SETPOINT * self._capacity() - 1)  # a quota of one or two needs no reserve
        if excess > 0 and (self._share or 1) < MAIN_SHARE:
            gap = max(gap, MIN_SAMPLE_S)
        return excess / (CORRECTION * gap)

    # ------------------------------------------------------------ learning

    def learn(self, quota: Quota, now: float, *, in_flight: int = 0, is_rejection: bool = False) -> None:
        """Take over what a response says; `in_flight` is the number of own requests that are not answered yet."""
        earlier, until = self._remaining, self._resets_at
        self._limit, self._window = quota.limit or self._limit, quota.window or self._window
        self._own += not is_rejection
        if is_rejection:
            self._shrink()
        if quota.remaining is None:
            return
        left = self._remaining = quota.remaining
        self._most = max(self._most, left)
        self._pending = in_flight
        reset_after = quota.reset_after if quota.reset_after is not None else self._window
        self._learned_at, self._resets_at = now, -inf if reset_after is None else now + reset_after
        if left == 0 and reset_after is not None:
            self.block(now, reset_after)
        if self._limit is None and self._window is None and reset_after is None:
            return
        short = (self._window or reset_after or inf) <= SHORT_S
        if short or (earlier is not None and left > earlier + in_flight and now < until - 1):
            self._is_continuous = True
        if not is_rejection:
            self._estimate_share(left, now, is_new_window=now >= until)
            if in_flight == 0 and self._slot > -inf:  # what was planned when it was sent is outdated
                self._next_at = self._slot + self._interval(now)

    def _estimate_share(self, left: int, now: float, *, is_new_window: bool) -> None:
        elapsed, refill = now - self._sample_at, self._refill_rate()
        if self._share is None or (is_new_window and not self._is_continuous):
            if self._share is None:
                self._share = self._first_share(left)
                self._next_at = max(self._next_at, now + self._interval(now))
            self._start_sample(left, now)
            return
        if elapsed < MIN_SAMPLE_S:
            return
        refilled = refill * elapsed if self._is_continuous and refill is not None else 0.0
        used = max(self._sample_remaining + refilled - left, self._own, 1.0)
        share = min(1.0, max(self._own, 0.5) / used)
        if self._idle_s > elapsed / 2:
            share = max(share, self._first_share(left))
        else:
            capacity = self._capacity()
            share *= 1 - min(FAIRNESS * capacity * share, MAX_SHRINKING) * (share < 1)
        self._share = self._share ** (1 - SMOOTHING) * share**SMOOTHING
        self._start_sample(left, now)

    def _start_sample(self, left: int, now: float) -> None:
        self._sample_at, self._sample_remaining, self._own, self._idle_s = now, left, 0, 0.0

    def _first_share(self, left: int) -> float:
        """The share to begin with. It is small if much was used recently: the others may be many, and slow to yield."""
        refill = self._refill_rate()
        used = self._capacity() - left
        return 1.0 if refill is None else 2.0**-self._rejections / max(1.0, (min(used, refill / 2) / 2) ** 2)

    def _shrink(self) -> None:
        """The share was too large, as a request was rejected."""
        if self._share is None:
            self._rejections += 1
        else:
            self._share /= 2

    def block(self, now: float, seconds: float) -> None:
        """Send nothing for that time, and not all at once after it."""
        self.blocked_until = max(self.blocked_until, now + min(seconds, MAX_BLOCK_S))

    def _capacity(self) -> int:
        return max(self._limit or 0, self._most)

    def _refill_rate(self) -> float | None:
        return self._limit / self._window if self._limit and self._window else None
