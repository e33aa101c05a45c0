"""Ids that were admitted without the store: repeated in this process, they are answered alike and charged once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from headgate._fork import reinit_after_fork
from headgate.stores.idempotency import ExpiringTable
from headgate.stores.operations import id_validity_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.stores.operations import Check

__all__ = ["AdmittedIds"]


class AdmittedIds:
    """The first decision for each id that a failure mode admitted; `most` bounds how many there are.

    The store has no record of such an id: its charge is in the ledger, or of unknown outcome.
    """

    def __init__(self, now_us: Callable[[], int], *, most: int = 100_000) -> None:
        self._now_us = now_us
        self._decisions: ExpiringTable[Decision] = ExpiringTable(most)
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held. The ids stay: their charge is the parent's."""
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        """True while there are any."""
        if len(self._decisions):
            with self._lock:
                self._decisions.expire(self._now_us())
        return len(self._decisions) > 0

    def get(self, call: Check) -> Decision | None:
        """The first decision for the id on these keys, in the order of the call."""
        with self._lock:
            first = self._decisions.get(_name(call), self._now_us())
        if first is None or first.keys == call.keys:
            return first
        order = [[_counter(key) for key in first.keys].index(_counter(key)) for key in call.keys]
        cost = first.cost if isinstance(first.cost, int) else tuple([first.cost[index] for index in order])
        verdicts = tuple([first.verdicts[index] for index in order])
        return first._replace(keys=call.keys, verdicts=verdicts, cost=cost)

    def record(self, call: Check, decision: Decision) -> Decision | None:
        """Record the decision; or get the first one, if the id was admitted in the meantime."""
        with self._lock:
            first = self.get(call)
            if first is None:
                now_us = self._now_us()
                self._decisions.put(_name(call), decision, now_us + id_validity_us(call.keys), now_us)
            return first


def _counter(key: Key) -> tuple[str, str]:
    return key.limit.space, key.identity


def _name(call: Check) -> tuple[str, ...]:
    """The id and the counters, whatever their order."""
    return (call.id or "", *[text for counter in sorted(map(_counter, call.keys)) for text in counter])
