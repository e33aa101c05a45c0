"""Reserved limits: each region leases tokens from a counter in the home region before it spends them.

A token is charged in the home region, then deposited in a pool of the own region, and spent there or not at all. So all
regions together never admit more than the home counter has charged, whatever connection fails. The home counter admits
less than the limit, by what regions may spend later than it was charged, or without being charged:

- Tokens of a busy client expire `lease_us` after their lease was requested. A bucket of the home region is smaller by
  what is refilled in that time, and a sliding window is longer by it. Tokens of a fixed window expire with it.
- Each region may keep a few tokens of each client for longer, so that a client with few requests finds some: at most
  `safe`.
- Each region has `safe` tokens of its own in each period, for the first requests of a client and for the time without
  the home region. They count twice, as the clocks of regions differ.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from headgate.errors import InvalidLimit
from headgate.limits import Limit, PoolLimit
from headgate.stores.operations import Refund

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.keys import Key

__all__ = ["DEFAULT_SAFE_SHARE", "Demand", "HomeState", "KeyDemand", "Reservation", "reserve"]

DEFAULT_SAFE_SHARE: Final = 0.02
"""The part of a limit that regions may spend without the home region, or later than it was charged."""
LEASES_PER_FILL: Final = 40
MIN_LEASE_US: Final = 1_500_000
SPENT_AT: Final = 0.84
"""The part of a lease after which its tokens should be spent, and the next ones have arrived."""
MAX_LEASE_US: Final = 10_000_000
MAX_SKEW_US: Final = 1_000_000
"""Assumed difference between the clocks of two regions."""
MAX_REFUNDS: Final = 10_000
MAX_SENT_REFUNDS: Final = 200
"""Refunds in one call to the home region."""
MIN_FILL_US: Final = 4_000_000
_BUCKETS: Final = frozenset({"gcra", "token_bucket"})
_WINDOWS: Final = frozenset({"fixed_window", "sliding_log", "sliding_window"})


class Reservation(NamedTuple):
    """The counters of a reserved limit."""

    limit: Limit
    home: Limit
    """Counted in the home region's store."""
    pool: PoolLimit
    """The tokens of one region, in its own store."""
    safe: int
    """Tokens that a region has without the home region, in each period."""
    lease_us: int
    """The time for which leased tokens may be spent."""

    @property
    def usable(self) -> float:
        """The share of the limit that clients of a single region can use."""
        return self.home.quota / self.limit.quota * self.limit.period_us / self.home.period_us

    def lifetime_us(self, tokens: int, left: int, reset_us: int) -> int:
        """The lifetime of leased tokens, given what the pool has left and the time until the home window is over."""
        if tokens + left <= self.safe:
            return self.pool.period_us
        return min(self.lease_us, reset_us) if self.home.algorithm == "fixed_window" else self.lease_us

    def wanted(self, *, rate: float, left: int, denied: int, home_left: int | None, regions: int) -> int:
        """The tokens to lease next.

        `rate` is the demand of the region in tokens per second, `left` what its pool has, and `home_left` what the home
        counter had after the last lease; None before the first one. A region leases what it will spend until the next
        lease, and at least an equal share of that time if it had to deny; but at most an equal share of what is left,
        so that leases shrink near the limit. With half of that in its pool, it waits.
        """
        if denied:
            rate = max(rate, self.limit.quota * 1_000_000 / self.limit.period_us / regions)
        wanted = rate * self.lease_us * SPENT_AT / 1_000_000
        if not denied and left >= max(wanted / 2, self.safe):
            return 0
        known = self.home.capacity if home_left is None else home_left
        return max(0, min(max(ceil(wanted), self.safe) - left, max(1, known // regions)))


def reserve(limit: Limit, count: int, safe_share: float = DEFAULT_SAFE_SHARE) -> Reservation:
    """Divide a limit over so many regions; raises InvalidLimit if that cannot be done.

    A third of `safe_share` is the part of the limit that they may spend without the home region; the rest makes up for
    the difference of their clocks, and for tokens that are spent later than they were charged.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> minutely = Limit(1000, timedelta(minutes=1), algorithm="fixed_window", region="reserved")
    >>> reservation = reserve(minutely, 3)
    >>> reservation.home.quota, reservation.safe, reservation.lease_us
    (982, 2, 1500000)
    """
    if limit.algorithm not in _BUCKETS | _WINDOWS:
        raise InvalidLimit(
            f"limit {limit.name!r}: {limit.algorithm} cannot be reserved, as its tokens cannot be leased; "
            "use region='central' or 'divided'"
        )
    fill_us = limit.period_us if limit.algorithm in _WINDOWS else limit.full // limit.tokens
    if fill_us < MIN_FILL_US:
        what = "period" if limit.algorithm in _WINDOWS else "time to fill the bucket"
        raise InvalidLimit(
            f"limit {limit.name!r}: its {what}, {fill_us / 1_000_000:g} s, is too short for leases of 1.5 s; "
            "use region='central' or 'reconciled'"
        )
    lease_us = min(max(fill_us // LEASES_PER_FILL, MIN_LEASE_US), MAX_LEASE_US)
    safe = max(1, int(min(limit.quota, limit.capacity) * safe_share / (3 * count)))
    quota, burst, period_us = limit.quota - 3 * count * safe, None, limit.period_us
    if limit.algorithm in _BUCKETS:
        # Over any time, the bucket and the safe shares together admit no more than the limit's bucket.
        quota = limit.quota - count * safe
        burst = limit.capacity - 3 * count * safe - -(-lease_us * limit.tokens // limit.ticks)
    elif limit.algorithm != "fixed_window":
        period_us += lease_us
    if 2 * quota < limit.quota or (burst is not None and 2 * burst < limit.capacity):
        problem = f"limit {limit.name!r} ({limit}) is too small to be reserved by {count} regions"
        smaller = ", or a smaller safe_share" if safe > 1 else ""
        raise InvalidLimit(f"{problem}; use region='central'{smaller}")
    home = Limit(quota, timedelta(microseconds=period_us), burst=burst, algorithm=limit.algorithm, name=limit.name)
    pool = PoolLimit(limit.capacity, timedelta(microseconds=max(limit.period_us, lease_us)), name=limit.name)
    return Reservation(limit, home, pool, safe, lease_us)


class HomeState(NamedTuple):
    """The last answer of the home region about a key."""

    left: int
    until_us: int
    """When the counter has refilled, or may admit again; by the clock of the own region's store."""


UNKNOWN: Final = HomeState(0, 0)
"""Before the first answer."""


class KeyDemand(list[int]):
    """The demand on one key since it was last looked at: a list that compiled code can change. Counts may miss a few,
    as threads share them.

    Its items are the tokens spent, those left in the pool, those left in the home region and until when, as `HomeState`
    has them, and the capacity of the limit.
    """

    __slots__ = ("denied", "key", "reservation")

    def __init__(self, key: Key, reservation: Reservation, home: HomeState) -> None:
        super().__init__((0, 0, *home, reservation.limit.capacity))
        self.key, self.reservation = key, reservation
        """The key of the pool."""
        self.denied = 0

    @property
    def spent(self) -> int:
        return self[0]

    @property
    def left(self) -> int:
        """Tokens in the pool after the last answer."""
        return self[1]

    def set_home(self, home: HomeState) -> None:
        self[2:4] = home

    def record(self, cost: int, verdict: Verdict, decision: Decision) -> Verdict:
        """Count a request; returns the verdict on the pool, completed by what is known of the home counter."""
        left, retry_us, reset_us, _ = verdict
        if decision[0]:
            self[0] += cost
        elif retry_us:  # another limit may have denied it
            self.denied += cost
        self[1] = left
        _, _, home_left, until_us, capacity = self
        wait_us = until_us - decision[5]
        if not home_left and 0 < retry_us < wait_us:
            retry_us = wait_us
        return min(left + home_left, capacity), retry_us, max(reset_us, wait_us), 0


class Demand:
    """The demand of this process on reserved keys, for the agent; and what the agent knows of the home counters."""

    def __init__(self) -> None:
        self.keys: dict[Key, KeyDemand] = {}
        """The demand since the last `take`. Always the same object, as compiled code refers to it."""
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.wake: Callable[[], Any] = lambda: None
        """Called when a key needs the agent, which has not scheduled it."""
        self.scheduled: Mapping[Key, Any] = {}
        """The keys that the agent looks at next without being woken."""
        self.refunds: deque[Refund] = deque(maxlen=MAX_REFUNDS)
        """Refunds to send to the home region."""
        self._home: dict[Key, HomeState] = {}
        self.keys.clear()

    def open(self, key: Key, reservation: Reservation) -> KeyDemand:
        """Begin to count the demand on a key; wakes the agent for one that it does not expect."""
        demand = self.keys[key] = KeyDemand(key, reservation, self._home.get(key, UNKNOWN))
        if key not in self.scheduled:
            self.wake()
        return demand

    def return_home(self, key: Key, reservation: Reservation, amount: int, at_us: int) -> None:
        """Refund tokens that the pool does not take back, as their batch has expired.

        They were charged at home up to a lease before they were spent, and clocks differ: an instant that is too early
        returns less, and never more.
        """
        lease_us = 0 if reservation.home.algorithm == "fixed_window" else reservation.lease_us
        charged_us = max(1, at_us - lease_us - MAX_SKEW_US)
        self.refunds.append(Refund(key._replace(limit=reservation.home), amount, uuid4().hex, charged_us))
        self.wake()

    def take(self) -> list[KeyDemand]:
        """The demand since the last call."""
        return [self.keys.pop(key) for key in list(self.keys)]

    def take_refunds(self) -> list[Refund]:
        return [self.refunds.popleft() for _ in range(min(len(self.refunds), MAX_SENT_REFUNDS))]

    def set_home(self, key: Key, state: HomeState) -> None:
        self._home[key] = state
        if (demand := self.keys.get(key)) is not None:
            demand.set_home(state)

    def forget(self, key: Key) -> None:
        self._home.pop(key, None)
