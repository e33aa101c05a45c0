"""Ids that were admitted without the store: a repeated id gets the same answer and is charged once."""

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
    """The first decision for each id that a failure mode admitted; `max_ids` bounds them.

    The store has no record of such an id: its charge is in the ledger, or of unknown outcome.
    """

    def __init__(self, now_us: Callable[[], int], *, max_ids: int = 100_000) -> None:
        self._now_us = now_us
        self._decisions: ExpiringTable[Decision] = ExpiringTable(max_ids)
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held. The ids stay: the parent charges them."""
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        """True if there is any id that has not expired."""
        if len(self._decisions):
            with self._lock:
                self._decisions.expire(self._now_us())
        return len(self._decisions) > 0

    def get(self, check: Check) -> Decision | None:
        """The first decision for the id of a check, in the order of its keys."""
        with self._lock:
            first = self._decisions.get(_name(check), self._now_us())
        if first is None or first.keys == check.keys:
            return first
        order = [[_counter(key) for key in first.keys].index(_counter(key)) for key in check.keys]
        cost = first.cost if isinstance(first.cost, int) else tuple([first.cost[index] for index in order])
        verdicts = tuple([first.verdicts[index] for index in order])
        return first._replace(keys=check.keys, verdicts=verdicts, cost=cost)

    def record(self, check: Check, decision: Decision) -> Decision | None:
        """Record a decision, or return the first one if the id was admitted in the meantime."""
        with self._lock:
            first = self.get(check)
            if first is None:
                now_us = self._now_us()
                self._decisions.put(_name(check), decision, now_us + id_validity_us(check.keys), now_us)
            return first


def _counter(key: Key) -> tuple[str, str]:
    return key.limit.space, key.identity


def _name(check: Check) -> tuple[str, ...]:
    """The id and the counters, sorted."""
    return (check.id or "", *[text for counter in sorted(map(_counter, check.keys)) for text in counter])
