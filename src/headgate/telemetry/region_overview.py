"""The overview of all regions: the state of their stores, and each limit that they share, with its bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headgate.policy.region_settings import region_terms, region_urls
from headgate.regions.report import RegionReport, read_regions_report

if TYPE_CHECKING:
    from headgate.limits import Limit
    from headgate.policy.model import Policy
    from headgate.regions.report import RegionsReport

__all__ = ["RegionOverview", "SharedLimit", "read_region_overview", "without_addresses"]


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """A limit that several regions share."""

    name: str
    mode: str
    allows: str
    bound: int | None
    """The most that all regions together may admit in one period beyond the limit, whatever fails."""
    connected_bound: int | None
    """The same while all regions can reach each other."""
    overshoot: str
    """Both in words."""
    latency: str
    used: dict[str, int]
    """Usage that counts now, of a reconciled limit, by region."""
    held: dict[str, int]
    """Leased tokens of a reserved limit, by region."""
    over: int | None
    """The most that all regions together have admitted to one client beyond the limit; None if it is not measured."""


@dataclass(frozen=True, slots=True)
class RegionOverview:
    """The state of all regions."""

    regions: tuple[RegionReport, ...] = ()
    limits: tuple[SharedLimit, ...] = ()
    troubles: tuple[str, ...] = ()


def read_region_overview(policy: Policy, *, namespace: str = "headgate") -> RegionOverview:
    """Read the stores of the policy's regions; raise InvalidConfiguration if an environment variable is not set."""
    settings = policy.regions
    if settings is None or not settings.stores:
        return RegionOverview(troubles=("the policy has no regions; add regions: with the stores of all regions",))
    report = read_regions_report(region_urls(settings), settings.home, namespace=namespace)
    shared = [limit for rule in policy.rules if rule.region != "regional" for limit in rule.limits]
    limits = tuple([_shared(limit, policy, report) for limit in dict.fromkeys(shared)])
    return RegionOverview(report.regions, limits)


def without_addresses(overview: RegionOverview) -> RegionOverview:
    """The overview for people who may not see the addresses of stores."""
    regions = [
        each if each.error is None else replace(each, error="its store cannot be read") for each in overview.regions
    ]
    return replace(overview, regions=tuple(regions))


def _shared(limit: Limit, policy: Policy, report: RegionsReport) -> SharedLimit:
    terms, usage = region_terms(limit, policy.regions), report.limit(limit.name)
    return SharedLimit(
        limit.name,
        limit.region,
        str(limit),
        terms.bound,
        terms.connected_bound,
        terms.overshoot,
        terms.latency,
        {**usage.used},
        {**usage.held},
        usage.overshoot if limit.region == "reconciled" else None,
    )
