"""The cost of each region mode as numbers: its bound, the latency it adds, and the share that one region can use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headgate import bounds
from headgate.regions.reserved import DEFAULT_SAFE_SHARE, reserve

if TYPE_CHECKING:
    from headgate.limits import Limit

__all__ = ["RegionCost", "region_cost"]


class RegionCost(NamedTuple):
    """The price of a region mode for one limit."""

    bound: int
    """The most that all regions together may admit in one period beyond what one store would, whatever fails."""
    round_trips: int
    """Round trips to another region that a request waits for."""
    usable: float
    """The share of the limit that clients of a single region can use."""
    connected: int
    """The bound while all regions exchange their usage in time."""


def region_cost(limit: Limit, count: int, safe_share: float = DEFAULT_SAFE_SHARE) -> RegionCost:
    """The cost of a limit over so many regions.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> region_cost(Limit(100, timedelta(minutes=1), algorithm="fixed_window"), 3)
    RegionCost(bound=200, round_trips=0, usable=1.0, connected=200)
    >>> region_cost(Limit(600, timedelta(minutes=1), burst=50, region="reconciled"), 3)
    RegionCost(bound=1300, round_trips=0, usable=1.0, connected=180)
    >>> region_cost(Limit(100, timedelta(minutes=1), region="central"), 3)
    RegionCost(bound=0, round_trips=1, usable=1.0, connected=0)
    """
    round_trips, usable = 0, 1.0
    if limit.region == "divided":
        usable = limit.quota // count / limit.quota
    elif limit.region == "reserved":
        usable = reserve(limit, count, safe_share).usable
    elif limit.region == "central":
        round_trips = min(1, count - 1)
    return RegionCost(bounds.regions(limit, count), round_trips, usable, bounds.connected_regions(limit, count))
