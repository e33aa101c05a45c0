"""The state of all regions."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from headgate._fork import reinit_after_fork
from headgate.control.service.dependencies import ServiceDependencies, TopicService
from headgate.errors import InvalidConfiguration
from headgate.telemetry.region_overview import RegionOverview, read_region_overview, without_addresses

if TYPE_CHECKING:
    from headgate.control.service.models import Actor
    from headgate.policy.model import Policy

__all__ = ["RegionService"]

MAX_AGE_S: Final = 1.0
"""Age up to which a reading is shown again. Regions exchange usage once a second, so that a newer one says no more."""


class RegionService(TopicService):
    """Reads the stores of all regions of the policy."""

    def __init__(self, deps: ServiceDependencies, namespace: str) -> None:
        super().__init__(deps)
        self._namespace = namespace
        self._last: tuple[Policy, float, RegionOverview] | None = None
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()

    def overview(self, actor: Actor | None = None) -> RegionOverview:
        """The state of all regions, and the limits that they share. Only operators see the addresses of stores."""
        found = self._read(self._deps.current_policy().policy)
        return found if actor is not None and actor.may("operator") else without_addresses(found)

    def _read(self, policy: Policy) -> RegionOverview:
        with self._lock:  # all who look at the page at the same time share a reading
            if self._last is not None and self._last[0] is policy and time.monotonic() - self._last[1] < MAX_AGE_S:
                return self._last[2]
            try:
                found = read_region_overview(policy, namespace=self._namespace)
            except InvalidConfiguration as error:  # an environment variable is not set
                found = RegionOverview(troubles=(f"{error}: set it for the admin server",))
            self._last = policy, time.monotonic(), found
            return found
