"""The dependencies that all topic services share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.clock import SystemClock
from headgate.control.config.engine import read_transaction
from headgate.control.config.queries import find_row
from headgate.control.service.client_lookup import ClientLookup, open_pseudonymizer
from headgate.control.service.effective_policy import BasePolicyCache, effective_policy
from headgate.control.service.errors import NotFound, log_and_summarize
from headgate.control.service.log_reader import DecisionLogReader
from headgate.errors import HeadgateError
from headgate.telemetry.fleet.aggregator import FleetAggregator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection

    from headgate.clock import Clock
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config.queries import LabelledRow
    from headgate.control.config.store import ConfigStore
    from headgate.control.service.client_lookup import ClientFacts
    from headgate.control.service.effective_policy import EffectivePolicy
    from headgate.control.service.models import ClientRef
    from headgate.limiter import Limiter
    from headgate.local.block_list import LiveBlock
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["MAX_ID", "ResolvedClient", "ServiceDependencies"]

MAX_ID: Final = 2**63 - 1
"""The largest integer that the databases store."""


class ResolvedClient(NamedTuple):
    """A client and the policy that applies to it."""

    facts: ClientFacts
    effective: EffectivePolicy

    @property
    def label(self) -> str | None:
        """The client's own label, or that of the smallest network that contains it."""
        labels = {(each.identity.kind, each.identity.value): each.label for each in self.effective.policy.clients}
        found = (labels.get((kind, value)) for kind, values in self.facts.identities.items() for value in values)
        return next((label for label in found if label), None)


class ServiceDependencies:
    """Config store, counters, decision log, node status and client lookup, as the topic services use them."""

    def __init__(
        self,
        config: ConfigStore,
        *,
        counters: Limiter | None,
        log: str | None,
        status_store: StatusStore | None,
        secret: str | bytes | None,
        clock: Clock | None,
        anomalies: AnomalyLog | None,
    ) -> None:
        self.config = config
        self.counters = counters
        self.clock = clock or SystemClock()
        self.policies = BasePolicyCache(config.engine)
        self.log = DecisionLogReader(log)
        self.fleet = None if status_store is None else FleetAggregator(status_store, clock=clock)
        self.lookup = ClientLookup(
            config, self.policies, self.log, open_pseudonymizer(secret), status_label=self._status_label
        )
        self.anomalies = anomalies
        self.write_lock = threading.Lock()
        """Held from the checks of a change to its write, so that no other change of this process comes between."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, whose owner may not exist in the child."""
        self.write_lock = threading.Lock()

    def now_us(self) -> int:
        return self.clock.now_us()

    def reading(self) -> AbstractContextManager[Connection]:
        """A read transaction on the config store."""
        return read_transaction(self.config.engine)

    def resolve(self, client: ClientRef) -> ResolvedClient:
        """The facts about a client in its canonical spelling, and its effective policy, as one consistent read."""
        with self.reading() as connection:
            base = self.policies.get(connection)
            facts = self.lookup.facts(client, base.policy)
            return ResolvedClient(facts, effective_policy(connection, base, facts.identities))

    def find_row(self, connection: Connection, section: str, noun: str, id: int) -> LabelledRow:
        """The current row with this id; raise NotFound if there is none."""
        found = find_row(connection, section, id) if 0 <= id <= MAX_ID else None
        if found is None:
            raise NotFound(f"there is no {noun} {id}")
        return found

    def require_version(self, version: int) -> int:
        """Return the version; raise NotFound if it does not exist."""
        newest = self.config.version
        if not 0 <= version <= newest:
            raise NotFound(f"there is no version {version}; the newest is {newest}")
        return version

    def live_blocks(self) -> tuple[Sequence[LiveBlock], str | None]:
        """The blocks that are active on the nodes, and the error message if they could not be read."""
        if self.counters is None:
            return (), None
        try:
            return self.counters.blocked(), None
        except HeadgateError as error:
            return (), log_and_summarize("live blocks cannot be read", error)

    def _status_label(self, key: str) -> str | None:
        """The label under which nodes report the client with this hash; None if no node reports it."""
        if self.fleet is None:
            return None
        found = self.fleet.gather()
        labels = {each.key: each.label for each in found.near} | {each.key: each.label for each in found.top_denied}
        return labels.get(key)
