"""Bounds: the most that each approximate mode admits beyond what one store would.

Every mode that decides without asking one store for each request has its bound here, as a number of tokens:

| mode | bound on what all nodes admit beyond the limit | function |
| --- | --- | --- |
| prepaid tokens | the refill of one lease; windows: 0 | `prepaid` |
| sharded limits | 0; but a shard may deny while others have some left | `sharded` |
| failure mode `local` | the shares of all nodes, and their refill while the store is down | `local_failure` |
| a store that loses its data | the capacity, each time | `lost_data` |
| regions | what the other regions admit in one period | `regions`, `connected_regions` |
| quotas of Envoy (RLQS) | the refill while a grant is valid | `quota_grants` |

A limit admits `C + r D` in an interval D: its capacity and its refill. A window of a windowed limit admits its quota.
`OvershootMeter` measures the excess over that, so that a measurement and its bound have the same unit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.algorithms import fair_share
from headgate.failure import local_limit
from headgate.local.prepaid import can_prepay

if TYPE_CHECKING:
    from headgate.limits import FairLimit, Limit

__all__ = [
    "EXCHANGE_LAG_US", "Bound", "OvershootMeter", "connected_regions", "fair_share_wait", "local_failure",
    "lost_data",
    "most_in_one_period", "policy_bounds", "prepaid", "quota_grants", "regions", "sharded",
]  # fmt: skip

EXCHANGE_LAG_US: Final = 4_000_000
"""The time after which all connected regions know of an admission: it reaches the own store, the home region and the
other region within a second each, and that takes at most a fourth."""

_ROUNDING_PARTS: Final = 2
"""Parts of a token that the clock of shares loses while a tenant waits: at the end of an epoch, and when it is read."""
_WINDOWS: Final = ("fixed_window", "sliding_window")


def most_in_one_period(limit: Limit) -> int:
    """The most that one counter admits in one period: a bucket that is full at first refills meanwhile."""
    return limit.quota + (limit.capacity if limit.implementation.SHAPES_BURST else 0)


def prepaid(limit: Limit, lease_us: int) -> int:
    """The bound of prepaid tokens: a token is spent within one lease of its charge, whatever the number of nodes.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> prepaid(Limit(10_000, timedelta(seconds=1)), 100_000)
    1000
    """
    if limit.algorithm in _WINDOWS or not (lease_us and can_prepay(limit, lease_us)):
        return 0  # tokens of a window expire with it
    return _refill(limit, lease_us)


def sharded(limit: Limit) -> int:
    """The bound of a limit with `split`: its shards together are the limit."""
    return 0


def local_failure(
    limit: Limit, share: Fraction | float, nodes: int, outage_us: int | None = None, *, down: int | None = None
) -> int:
    """The bound of the failure mode `local` for nodes that were without the store for so long, by default one period.

    Each node has a share of the limit, full at first, which refills. A window grants each share once. `down` is the
    number of nodes that were without the store, by default all.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> local_failure(Limit(1000, timedelta(minutes=1), algorithm="fixed_window"), 0.2, nodes=50)
    200
    >>> local_failure(Limit(1000, timedelta(minutes=1)), 0.2, nodes=50, outage_us=30_000_000)
    300
    """
    local, down = local_limit(limit, _fraction(share) / nodes), nodes if down is None else down
    if local.algorithm == "concurrency":
        return down * local.capacity
    if local.algorithm in _WINDOWS:
        # A longer window than the limit's own does not begin with it: two may overlap one of the limit's.
        return down * local.quota * (1 if local.period_us == limit.period_us else 2)
    return down * (local.capacity + _refill(local, limit.period_us if outage_us is None else outage_us))


def lost_data(limit: Limit, times: int) -> int:
    """The bound of a store that loses its counters so many times: each time, all limits start afresh."""
    return times * limit.capacity


def regions(limit: Limit, count: int, span_us: int | None = None) -> int:
    """The bound of a region mode for so many regions, whatever fails: in one period, or, of a bucket, in a span."""
    if limit.region not in ("regional", "reconciled"):
        return 0
    if span_us is None or limit.algorithm in _WINDOWS:
        return (count - 1) * most_in_one_period(limit)
    return (count - 1) * (limit.capacity + _refill(limit, span_us))


def connected_regions(limit: Limit, count: int) -> int:
    """The bound while all regions exchange their usage in time."""
    bound = regions(limit, count)
    if limit.region != "reconciled" or not limit.implementation.SHAPES_BURST:
        return bound
    return min(bound, (count - 1) * (limit.capacity + _refill(limit, EXCHANGE_LAG_US)))


def quota_grants(limit: Limit, validity_us: int) -> int:
    """The bound of quotas that proxies spend by themselves: a grant is charged in advance, and spent while it is valid.

    It does not cover requests that a proxy admits before its first grant; they are charged as far as possible.
    """
    return 0 if limit.algorithm == "fixed_window" else _refill(limit, validity_us)


def fair_share_wait(limit: FairLimit, weight: int, total: int, cost: int = 1) -> int | None:
    """The longest that a tenant within its share waits while others saturate a fair limit, in microseconds: the time in
    which its share of the rate provides the cost. None if its bucket is too small for the cost, so that there is none.

    `total` is the weight of all active tenants with its own. With the capacity B, the rate r, the weight w of the
    tenant and the total W, a cost c of at most B w / 2W is admitted after c W / (r w), which is at most B / 2r, plus
    rounding: two parts of a token, of which there are usually a million.

    >>> from datetime import timedelta
    >>> from headgate import FairLimit
    >>> fair_share_wait(FairLimit(1000, timedelta(seconds=1)), weight=1, total=20)
    20001
    """
    parts = fair_share.scale(limit)
    need = -(-cost * parts // weight)
    if need > parts * limit.capacity // (2 * total):
        return None
    return -(-(need + _ROUNDING_PARTS) * total * limit.ticks // (parts * limit.tokens))


class Bound(NamedTuple):
    """The bound of one approximate mode that a policy uses for a limit."""

    mode: str
    """Such as "prepaid tokens"."""
    over: int
    """Tokens beyond the limit."""


def policy_bounds(limit: Limit, *, lease_us: int, fails_local: bool, share: Fraction, nodes: int) -> tuple[Bound, ...]:
    """The bounds of all modes that may apply to a limit in one region, without those that are 0."""
    nodes_text = f"{nodes} node{'s' * (nodes > 1)}"
    found = (
        Bound(f"prepaid tokens, within {lease_us / 1000:g} ms", prepaid(limit, lease_us)),
        Bound(
            f"store unavailable for one period, {nodes_text}", local_failure(limit, share, nodes) if fails_local else 0
        ),
    )
    return tuple([bound for bound in found if bound.over])


class OvershootMeter:
    """Measures the largest excess of what was admitted over what the limit admits, in tokens.

    Give it all admitted requests of one counter in the order of time. For buckets, queues and logs the excess is over
    `C + r D` in the worst interval D; for windows it is over the quota in the fullest window, to which a sliding window
    adds the weighted part of the previous one.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> meter = OvershootMeter(Limit(10, timedelta(seconds=1)))
    >>> for number in range(15):
    ...     meter.add(number * 100_000 + 1_000_000)
    >>> meter.add(3_000_000, cost=12)
    >>> meter.largest
    2
    """

    __slots__ = ("_excess", "_is_window", "_last", "_limit", "_previous", "_used", "_weight")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._is_window = limit.algorithm in _WINDOWS
        self._weight = limit.algorithm == "sliding_window"
        self._last = 0
        """The last request's time, or its window."""
        self._used = 0
        """Of a bucket, what an unlimited one would lack, in 1/ticks of a token; of a window, its tokens."""
        self._previous = 0
        self._excess = 0

    @property
    def largest(self) -> int:
        """The largest excess so far, in whole tokens, rounded up; 0 if there was none."""
        return -(-self._excess // (self._limit.period_us if self._is_window else self._limit.ticks))

    def add(self, at_us: int, cost: int = 1) -> None:
        """Count an admitted request."""
        limit = self._limit
        if not self._is_window:
            self._used = max(0, self._used - (at_us - self._last) * limit.tokens) + cost * limit.ticks
            self._last = at_us
            self._excess = max(self._excess, self._used - limit.full)
            return
        window, elapsed_us = divmod(at_us, limit.period_us)
        if window != self._last:
            self._previous = self._used if self._last == window - 1 else 0
            self._used, self._last = 0, window
        self._used += cost
        weighted = self._weight * self._previous * (limit.period_us - elapsed_us)
        self._excess = max(self._excess, (self._used - limit.quota) * limit.period_us + weighted)


def _refill(limit: Limit, span_us: int) -> int:
    """The tokens that arrive in a span, rounded up."""
    return -(-span_us * limit.tokens // limit.ticks)


def _fraction(share: Fraction | float) -> Fraction:
    return share if isinstance(share, Fraction) else Fraction(repr(share))
