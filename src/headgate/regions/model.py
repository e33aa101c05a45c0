"""The regions of a limiter: their names and stores, the one it runs in, and the home region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headgate.errors import InvalidConfiguration
from headgate.regions.reserved import DEFAULT_SAFE_SHARE

if TYPE_CHECKING:
    from headgate.limits import Limit

__all__ = ["Regions", "read_regions", "share_of"]

MAX_NAME_LENGTH = 50
MAX_SAFE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Regions:
    """All regions, in the order of their names."""

    own: str
    """The region of this limiter."""
    home: str
    """The region whose store decides `central` limits."""
    urls: tuple[tuple[str, Any], ...]
    """Name and store of each region, sorted by name: every region must number them in the same way."""
    safe_share: float = DEFAULT_SAFE_SHARE
    """The part of reserved limits that regions may spend without the home region, or later than it was charged."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([name for name, _ in self.urls])

    @property
    def home_url(self) -> Any:
        return dict(self.urls)[self.home]

    @property
    def is_home(self) -> bool:
        """True if this limiter runs in the home region."""
        return self.own == self.home

    @property
    def index(self) -> int:
        """The number of the own region, from 0."""
        return self.names.index(self.own)


def read_regions(
    url: Any, region: Any, regions: Any, home: Any, safe_share: Any = DEFAULT_SAFE_SHARE
) -> Regions | None:
    """Validate the arguments of a limiter; None without regions."""
    if isinstance(safe_share, bool) or not isinstance(safe_share, int | float) or not 0 < safe_share <= MAX_SAFE_SHARE:
        raise InvalidConfiguration(
            f"safe_share {safe_share!r}: give the part of reserved limits that regions may spend without the home "
            f"region, above 0, up to {MAX_SAFE_SHARE}"
        )
    if regions is None:
        if region is None and home is None:
            return None
        given = "region" if region is not None else "home"
        raise InvalidConfiguration(f"{given}= needs regions=: the stores of all regions by name")
    if not isinstance(regions, Mapping) or not regions:
        raise InvalidConfiguration(f'regions {regions!r}: give the stores by name, like {{"eu": "redis://eu"}}')
    for name, store in regions.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidConfiguration(f"region name {name!r}: use 1 to {MAX_NAME_LENGTH} printable characters")
        if isinstance(store, str) and store.startswith("memory:"):
            raise InvalidConfiguration(f"the store of region {name!r} is in memory, which no other region can reach")
    names = ", ".join(sorted(regions))
    if region not in regions:
        raise InvalidConfiguration(f"region {region!r} is not one of the regions: {names}")
    if home is None and len(regions) == 1:
        home = region
    if home not in regions:
        raise InvalidConfiguration(f"home {home!r} is not one of the regions: {names}")
    if isinstance(url, str) and isinstance(regions[region], str) and url != regions[region]:
        raise InvalidConfiguration(f"the limiter's URL differs from that of its region {region!r} in regions=")
    return Regions(region, home, tuple(sorted(regions.items())), float(safe_share))


def share_of(limit: Limit, count: int, index: int) -> tuple[int, int]:
    """Quota and burst of one of `count` equal regions; the first ones get the remainder.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> [share_of(Limit(10, timedelta(minutes=1)), 3, index) for index in range(3)]
    [(4, 4), (3, 3), (3, 3)]
    """
    return _part(limit.quota, count, index), _part(limit.capacity, count, index)


def _part(number: int, count: int, index: int) -> int:
    return number // count + (index < number % count)
