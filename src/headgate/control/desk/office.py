"""What all work at the desk needs: the configuration, the counters, the log, the board, and a clock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from headgate._forks import renew_in_children
from headgate.clock import SystemClock
from headgate.control.config.database import reading
from headgate.control.desk.errors import NotAllowed, NotFound, discreet
from headgate.control.desk.finding import Finder, opened_clients
from headgate.control.desk.ground import Grounds
from headgate.control.desk.logbook import Logbook
from headgate.errors import HeadgateError
from headgate.telemetry.beats import Beats

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection

    from headgate.clock import Clock
    from headgate.control.config.store import ConfigStore
    from headgate.control.desk.finding import Known
    from headgate.control.desk.ground import Ground, Holding
    from headgate.control.desk.views import Actor, Role, Who
    from headgate.control.steps import StepLog
    from headgate.limiter import Limiter
    from headgate.shield.blocks import LiveBlock
    from headgate.telemetry.boards import Board

__all__ = ["LARGEST", "Office"]

LARGEST: Final = 2**63 - 1
"""What databases can number."""


class Office:
    """All of the desk but what can be asked of it."""

    def __init__(
        self,
        config: ConfigStore,
        *,
        counters: Limiter | None = None,
        log: str | None = None,
        board: Board | None = None,
        secret: str | bytes | None = None,
        clock: Clock | None = None,
        steps: StepLog | None = None,
    ) -> None:
        """`counters` is a limiter on the store that the gates count in, and `board` one beside it; `log` is the URL of
        the decision log. What is not given is told among the troubles. `secret` is the gates' own, or HEADGATE_SECRET.
        """
        self._config = config
        self._counters = counters
        self._clock = clock or SystemClock()
        self._grounds = Grounds(config.engine)
        self._log = Logbook(log)
        self._finder = Finder(config, self._grounds, self._log, opened_clients(secret))
        self._beats = None if board is None else Beats(board, clock=clock)
        self._finder.status_label = self._status_label
        self._steps = steps
        self._writing = threading.Lock()
        """What is checked against what holds is written before anybody else here writes."""
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it."""
        self._writing = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config!r})"

    def _now_us(self) -> int:
        return self._clock.now_us()

    def _ground(self) -> Ground:
        return self._grounds.current()

    def _holding(self, who: Who) -> tuple[Known, Holding]:
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
        return reading(self._config.engine)
