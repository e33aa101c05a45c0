"""The regions of a gate: their stores, the limits that they can share, and the identities that may leave them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import InvalidConfiguration
from headgate.gate.options import SECRET_VARIABLE
from headgate.policy.api_keys import IdentityHashes
from headgate.policy.model import RegionSettings
from headgate.policy.region_settings import REGION_OPTIONS, region_arguments, stay_objection
from headgate.regions.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.policy.model import Policy

__all__ = ["GateRegions"]

logger = logging.getLogger("headgate")

PUBLIC_KEY: Final = b"headgate regions"
"""The key of hashes of identities that leave the region, if there is no secret."""


class GateRegions:
    """The regions of one gate, from its options and its policies.

    The first policy, or the options, determine the stores; a later change of these takes effect after a restart.
    """

    def __init__(self, options: Mapping[str, Any], hash_identity: IdentityHashes, *, has_secret: bool) -> None:
        self._options = {name: value for name, value in options.items() if name in REGION_OPTIONS}
        self._has_secret = has_secret
        self.hash_leaving = hash_identity if has_secret else IdentityHashes(PUBLIC_KEY)
        """Hashes of identities that leave the region."""
        self._first: RegionSettings | None = None

    def open(self, policy: Policy, store: Any) -> tuple[Any, dict[str, Any]]:
        """The store of this process, and the arguments of a limiter that describe the regions."""
        self._first = policy.regions
        return region_arguments(policy.regions, store, self._options)

    def check(self, policy: Policy, engine: Any) -> None:
        """Raise InvalidConfiguration for limits that the regions of this process cannot share."""
        if engine.memory is not None:
            return  # counts every limit in its own memory
        for limit in policy.region_limits:
            if engine.router is None:
                what = f"limit {limit.name!r} is {limit.region}, and this process "
                if policy.regions is not None and policy.regions.stores:
                    raise InvalidConfiguration(f"{what}was started without regions; restart it")
                remedy = "add regions: to the policy, or give region=, regions= and home="
                raise InvalidConfiguration(f"{what}has no regions; {remedy}")
            engine.bound(limit)
        settings = policy.regions or RegionSettings()
        for rule in policy.rules:
            if (cannot := stay_objection(rule, settings)) is not None:  # of a view; a file is checked before
                raise InvalidConfiguration(cannot)

    def residency(self, policy: Policy) -> Residency:
        """The rules for identities that leave the region."""
        settings, prefix = policy.regions or RegionSettings(), policy.identity.ipv6_prefix
        hashes = None if settings.identities == "plain" else self.hash_leaving
        return Residency(hashes, frozenset(settings.stay), prefix)

    def shared_hash(self, policy: Policy, engine: Any) -> IdentityHashes | None:
        """The function that hashes identities which leave the region; None if none do, or in plain text."""
        form = None if policy.regions is None else policy.regions.identities
        leaving = [rule.name for rule in policy.rules if rule.by and rule.leaves_region]
        if not leaving or engine.memory is not None or form == "plain":
            return None
        if self._has_secret:
            return self.hash_leaving
        problem = f"limit {leaving[0]!r} shares identities with other regions as hashes, and there is no secret"
        remedy = f"give secret=, or set {SECRET_VARIABLE}, to the same 16 or more random bytes on every machine"
        if form == "hashed":
            raise InvalidConfiguration(f"{problem} to key them with: {remedy}")
        logger.warning("%s to key them with, so that they can be guessed: %s", problem, remedy)
        return self.hash_leaving

    def central_budget(self, policy: Policy) -> float | None:
        """Seconds that the home region may take; None for what it has now."""
        given: float | None = self._options.get("central_budget")
        settings = policy.regions
        return given if given is not None or settings is None else settings.central_budget.total_seconds()

    def warn_of_change(self, policy: Policy, engine: Any) -> None:
        """Log a warning if the regions of a policy differ from those that the process was started with."""
        before, after = self._first, policy.regions
        if before is None or after is None:
            is_changed = before is not after and engine.memory is None
        else:
            is_changed = (before.own, before.home, before.stores) != (after.own, after.home, after.stores)
        if is_changed:
            logger.warning("policy %s: regions: has changed, which takes effect after a restart", policy.name)
