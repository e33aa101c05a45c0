"""The section `regions` of a policy: its checks, and the arguments of a limiter that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidConfiguration, InvalidLimit
from headgate.policy.model import LOCAL_MODES, RegionSettings
from headgate.policy.rules import nearest
from headgate.policy.scalars import VARIABLE
from headgate.policy.snapshot import CLIENT_KINDS
from headgate.regions.cost import region_cost
from headgate.regions.model import Regions
from headgate.regions.routing import counted_limit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.limits import Limit
    from headgate.policy.loader import PolicyProblems
    from headgate.policy.model import Rule
    from headgate.policy.rules import RuleDraft
    from headgate.policy.schema import StructValue
    from headgate.regions.cost import RegionCost

__all__ = [
    "REGION_OPTIONS",
    "REGION_VARIABLE",
    "RegionTerms",
    "build_region_settings",
    "check_region_modes",
    "expand_variables",
    "has_plain_password",
    "is_in_memory",
    "region_arguments",
    "region_objection",
    "region_terms",
    "region_urls",
    "stay_objection",
]

REGION_VARIABLE: Final = "HEADGATE_REGION"
REGION_OPTIONS: Final = ("region", "regions", "home", "central_budget")
"""The arguments of limiters and gates that settings of a policy stand in for."""


def build_region_settings(entry: StructValue, problems: PolicyProblems) -> RegionSettings:
    """The settings of the parsed section; adds contradictions to `problems`."""
    settings = RegionSettings(**entry.fields)
    names = ", ".join(sorted(settings.stores))
    if "stores" not in entry.fields:
        for field in {"own", "home"} & entry.fields.keys() - entry.unread:
            entry.report(field, "the regions have no stores; add stores:, like {eu: redis://eu.example}")
        return settings
    if entry.broken:
        return settings
    if not settings.stores:
        entry.report("stores", "there are no stores; add some, like {eu: redis://eu.example, us: redis://us.example}")
        return settings
    for field, region in (("own", settings.own), ("home", settings.home)):
        if region is not None and region not in settings.stores and not VARIABLE.fullmatch(region):
            remedy = nearest(region, settings.stores, "add it to stores:")
            entry.report(field, f"region {region!r} has no store; {remedy}")
    if settings.home is None and len(settings.stores) > 1:
        problems.add(entry.path, f"several regions, and none of them is the home region; add home:, one of {names}")
    return settings


def check_region_modes(drafts: Iterable[RuleDraft], settings: RegionSettings | None, problems: PolicyProblems) -> None:
    """Report limits that these regions cannot share, or whose identities may not leave a region."""
    if settings is None:
        return
    for draft in drafts:
        if draft.region == "regional":
            continue
        for tier, limit in draft.limits.items():
            if (cannot := region_objection(limit, settings)) is not None:
                problems.add(draft.numbers[tier][1], cannot)
        if (cannot := stay_objection(draft.rule(), settings)) is not None:
            draft.entry.report("by", cannot)


def region_objection(limit: Limit, settings: RegionSettings) -> str | None:
    """The reason why these regions cannot share a limit; None if they can, or if their stores are not known."""
    if not settings.stores or limit.region == "regional":
        return None
    try:
        _cost(limit, settings)
    except InvalidLimit as error:
        return str(error)
    return None


class RegionTerms(NamedTuple):
    """The price of a limit's region mode, as numbers. None stands for numbers that depend on unknown regions."""

    mode: str
    bound: int | None
    """The most that all regions together may admit in one period beyond the limit, whatever fails."""
    connected_bound: int | None
    """The same while all regions can reach each other."""
    round_trips: int | None
    """Round trips to another region that a request waits for."""
    usable: float | None
    """The share of the limit that clients of a single region can use."""
    home: str | None
    budget_ms: float

    @property
    def overshoot(self) -> str:
        if self.bound is None:
            return "depends on the regions, which the policy does not name"
        most = f"at most {self.bound:,} over the limit"
        if self.connected_bound == self.bound:
            return most
        return f"{most}, {self.connected_bound:,} while all regions are connected"

    @property
    def latency(self) -> str:
        if self.round_trips is None:
            return "a round trip to the home region" if self.mode == "central" else "no wait for another region"
        if not self.round_trips:
            return "no wait for another region"
        trips = f"{self.round_trips} round trip{'s' * (self.round_trips > 1)}"
        return f"{trips} to {self.home}, within {self.budget_ms:,g} ms"


def region_terms(limit: Limit, settings: RegionSettings | None) -> RegionTerms:
    """The price of a limit under these settings.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> settings = RegionSettings(home="eu", stores={"eu": "redis://eu", "us": "redis://us"})
    >>> terms = region_terms(Limit(10, timedelta(minutes=1), region="central"), settings)
    >>> terms.overshoot, terms.latency
    ('at most 0 over the limit', '1 round trip to eu, within 500 ms')
    """
    settings = settings or RegionSettings()
    home, budget_ms = settings.home, settings.central_budget.total_seconds() * 1000
    if not settings.stores:
        return RegionTerms(limit.region, None, None, None, None, home, budget_ms)
    cost = _cost(limit, settings)
    return RegionTerms(limit.region, cost.bound, cost.connected, cost.round_trips, cost.usable, home, budget_ms)


def _cost(limit: Limit, settings: RegionSettings) -> RegionCost:
    """The cost of a limit over these regions; raises InvalidLimit if they cannot share it."""
    stores = tuple(sorted(settings.stores.items()))
    if limit.region not in ("regional", "reserved"):
        counted_limit(limit, Regions(stores[0][0], stores[0][0], stores))
    return region_cost(limit, len(stores), float(settings.safe_share))


def stay_objection(rule: Rule, settings: RegionSettings) -> str | None:
    """The reason why a limit may not count by its identities; None if it may."""
    if rule.region in LOCAL_MODES:
        return None
    for kind in settings.stay:
        what = f"limit {rule.name!r} is {rule.region}, and {kind} may not leave its region"
        if kind in rule.by:
            return f"{what}; write region: divided, or leave region out"
        if "client" in rule.by and kind in CLIENT_KINDS:
            return f"{what}, but some clients are counted by it; count by another identity, or write region: divided"
        is_known = "client" in rule.by or {*rule.by} <= {"subnet", "endpoint"}
        if kind == "ip" and not is_known and rule.missing != "skip":
            remedy = "write missing: skip, or region: divided"
            return f"{what}, but requests without an identity are counted by it; {remedy}"
    return None


def region_urls(settings: RegionSettings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The URLs of all stores, with the values of environment variables."""
    return {
        name: expand_variables(url, f"the store of region {name!r}", environment)
        for name, url in settings.stores.items()
    }


def has_plain_password(url: str) -> bool:
    """True if a URL contains a password that is not an environment variable.

    >>> has_plain_password("redis://ada:sesame@eu.example"), has_plain_password("redis://ada:${PASSWORD}@eu.example")
    (True, False)
    """
    user, at, _ = url.partition("://")[2].rpartition("@")
    query = url.partition("?")[2].split("&")
    passwords = [user.partition(":")[2] if at else "", *(each.partition("=")[2] for each in query if "pass" in each)]
    return any(VARIABLE.sub("", password) for password in passwords)


def is_in_memory(store: Any) -> bool:
    return isinstance(store, str) and store.startswith("memory:")


def region_arguments(
    settings: RegionSettings | None,
    store: Any,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Any, dict[str, Any]]:
    """The store of a gate, and its options about regions: those given, and for others the settings of its policy.

    A gate without a store of its own uses that of its region. One whose region is not named runs in that of its store.
    """
    given = {name: options[name] for name in REGION_OPTIONS if options.get(name) is not None}
    settings = settings or RegionSettings()
    if "regions" not in given:
        if not settings.stores:
            return store, given
        given["regions"] = region_urls(settings, environment)
    stores = given["regions"]
    if not isinstance(stores, Mapping):
        return store, given  # the engine raises the error
    if "region" not in given:
        own = settings.own and expand_variables(settings.own, "the own region", environment)
        own = own or environment.get(REGION_VARIABLE) or _region_of(store, stores)
        if own is None:
            raise InvalidConfiguration(
                f"this process does not know its region: set {REGION_VARIABLE}, or give region=, to one of "
                f"{', '.join(sorted(stores))}"
            )
        given["region"] = own
    if settings.home is not None:
        given.setdefault("home", settings.home)
    given.setdefault("central_budget", settings.central_budget.total_seconds())
    given["safe_share"] = float(settings.safe_share)
    return stores.get(given["region"], store) if is_in_memory(store) else store, given


def _region_of(store: Any, stores: Mapping[str, Any]) -> str | None:
    return next((name for name, url in sorted(stores.items()) if isinstance(url, str) and url == store), None)


def expand_variables(text: str, what: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text with the values of environment variables; raises InvalidConfiguration if one is not set."""
    for name in VARIABLE.findall(text):
        if not environment.get(name):
            raise InvalidConfiguration(f"{what} needs the environment variable {name}, which is not set")
    return VARIABLE.sub(lambda found: environment[found[1]], text)
