"""What all work at the desk needs: the configuration, the counters, the log, the board, and a clock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from headgate._fork import reinit_after_fork
from headgate.clock import SystemClock
from headgate.control.config.engine import read_transaction
from headgate.control.service.client_lookup import ClientLookup, opened_clients
from headgate.control.service.effective_policy import BasePolicyCache
from headgate.control.service.errors import NotAllowed, NotFound, discreet
from headgate.control.service.log_reader import DecisionLogReader
from headgate.errors import HeadgateError
from headgate.telemetry.fleet.aggregator import FleetAggregator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection

    from headgate.clock import Clock
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config.store import ConfigStore
    from headgate.control.service.client_lookup import ClientFacts
    from headgate.control.service.effective_policy import BasePolicy, EffectivePolicy
    from headgate.control.service.models import Actor, ClientRef, Role
    from headgate.limiter import Limiter
    from headgate.local.block_list import LiveBlock
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["LARGEST", "ServiceDependencies"]

LARGEST: Final = 2**63 - 1
"""What databases can number."""


class ServiceDependencies:
    """All of the desk but what can be asked of it."""

    def __init__(
        self,
        config: ConfigStore,
        *,
        counters: Limiter | None = None,
        log: str | None = None,
        board: StatusStore | None = None,
        secret: str | bytes | None = None,
        clock: Clock | None = None,
        steps: AnomalyLog | None = None,
    ) -> None:
        """`counters` is a limiter on the store that the gates count in, and `board` one beside it; `log` is the URL of
        the decision log. What is not given is told among the troubles. `secret` is the gates' own, or HEADGATE_SECRET.
        """
        self._config = config
        self._counters = counters
        self._clock = clock or SystemClock()
        self._grounds = BasePolicyCache(config.engine)
        self._log = DecisionLogReader(log)
        self._finder = ClientLookup(config, self._grounds, self._log, opened_clients(secret))
        self._beats = None if board is None else FleetAggregator(board, clock=clock)
        self._finder.status_label = self._status_label
        self._steps = steps
        self._writing = threading.Lock()
        """What is checked against what holds is written before anybody else here writes."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it."""
        self._writing = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config!r})"

    def _now_us(self) -> int:
        return self._clock.now_us()

    def _ground(self) -> BasePolicy:
        return self._grounds.current()

    def _holding(self, who: ClientRef) -> tuple[ClientFacts, EffectivePolicy]:
        """What is known of somebody, and what holds for it."""
        known = self._finder.known(who, self._ground().base)
        return known, self._grounds.holding(known.identities)

    def _live_blocks(self) -> tuple[Sequence[LiveBlock], str | None]:
        """Whom nodes were told to keep out; and the trouble there was in asking."""
        if self._counters is None:
            return (), None
        try:
            return self._counters.blocked(), None
        except HeadgateError as error:
            return (), discreet("live blocks cannot be read", error)

    def _status_label(self, key: str) -> str | None:
        """The label by which nodes report a client now, by its hash; None for clients that they don't report."""
        if self._beats is None:
            return None
        found = self._beats.gather()
        labels = {each.key: each.label for each in found.near} | {each.key: each.label for each in found.top_denied}
        return labels.get(key)

    def _existing(self, version: int) -> int:
        """NotFound for a version that is none."""
        newest = self._config.version
        if not 0 <= version <= newest:
            raise NotFound(f"there is no version {version}; the newest is {newest}")
        return version

    @staticmethod
    def _possible(id: int, what: str) -> None:
        """NotFound for what no row can be."""
        if not 0 <= id <= LARGEST:
            raise NotFound(f"there is no such {what}")

    @staticmethod
    def _allow(actor: Actor, role: Role, what: str) -> None:
        if not actor.may(role):
            raise NotAllowed(what, role=actor.role, needed=role)

    def _reading(self) -> AbstractContextManager[Connection]:
        return read_transaction(self._config.engine)
