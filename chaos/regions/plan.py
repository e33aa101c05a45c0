"""The plan of an experiment: its regions, limits and load, and when which region is cut off."""

from __future__ import annotations

from datetime import timedelta
from typing import Final, NamedTuple

from headgate import Limit

MODES: Final = ("divided", "reserved", "reconciled", "central")
HOME: Final = "r0"
LATENCY_S: Final = 0.1
"""Added to each round trip between two regions."""
LOSS: Final = 0.01
"""The share of answers between regions of which a packet is lost."""
SKEW_S: Final = 0.2


class Traffic(NamedTuple):
    """Requests on one key, at an even rate."""

    key: str
    limit: Limit
    region: str | None
    """The only region that has requests; None for all of them."""
    rate: float
    """Requests per second, of all regions together."""

    @property
    def mode(self) -> str:
        return self.limit.region

    def comes_from(self, region: str) -> bool:
        return self.region in (None, region)


class Plan(NamedTuple):
    """An experiment. Time is divided into windows of the limits' period, which the home region's clock numbers."""

    regions: int
    processes: int
    """In each region."""
    quota: int = 1200
    period_s: int = 60
    overload: float = 2.0
    """Requests, as a multiple of what the limits let pass."""
    windows: int = 3
    """Whole windows under load. In the second one, a region is cut off, from a sixth of it on for half of it; in the
    next window, the home region is, if there is a further one to heal in."""
    has_skew: bool = True
    cuts_home: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"r{number}" for number in range(self.regions))

    def skew_s(self, region: str) -> float:
        """The clock of a region's store, relative to that of the home region."""
        return (0, SKEW_S, -SKEW_S)[int(region[1:]) % 3] if self.has_skew and region != HOME else 0.0

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """For each mode, a window and a bucket with even traffic, and a window with traffic from one region."""
        far, rate = self.names[-1], self.overload * self.quota / self.period_s
        found = []
        for mode in MODES:
            for name, algorithm, region in (
                ("even window", "fixed_window", None),
                ("even bucket", "token_bucket", None),
                ("one region", "fixed_window", far),
            ):
                limit = Limit(
                    self.quota,
                    timedelta(seconds=self.period_s),
                    algorithm=algorithm,
                    region=mode,
                    name=f"{mode} {name}",
                )
                found.append(Traffic(name, limit, region, rate))
        return tuple(found)

    @property
    def cuts(self) -> tuple[tuple[str, float, float], ...]:
        """Regions that are cut off from all others: name, and seconds since the first window began."""
        first = 1 + 1 / 6
        cuts = [(self.names[1], first * self.period_s, (first + 0.5) * self.period_s)]
        if self.cuts_home:
            cuts.append((HOME, (first + 1) * self.period_s, (first + 1.5) * self.period_s))
        return tuple(cuts)


SHORT: Final = Plan(regions=3, processes=2, quota=300, period_s=5, windows=3, has_skew=False)
THREE: Final = Plan(regions=3, processes=3, windows=4, cuts_home=True)
TEN: Final = Plan(regions=10, processes=2, windows=3)
