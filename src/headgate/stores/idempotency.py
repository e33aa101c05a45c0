"""Idempotency records in memory: the first result of each id, while a repeated id must not be charged again."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from headgate.algorithms import Verdict

__all__ = ["ExpiringTable", "IdRecord"]

Value = TypeVar("Value")

Name: TypeAlias = tuple[Any, ...]


class IdRecord:
    """The record of a check with an id for one counter; without holders, that of a refund with an id of its own."""

    __slots__ = ("at_us", "cost", "holders", "left", "verdict")

    def __init__(self, at_us: int, cost: int = 0, verdict: Verdict = (0, 0, 0, 0), *, holders: int = 1) -> None:
        self.at_us = at_us
        self.cost = cost
        self.left = cost
        """The amount that was not refunded; less than the cost once the one refund of this id was made."""
        self.holders = holders
        """Callers that got this result and did not withdraw. The last one that withdraws returns the charge."""
        self.verdict = verdict


class ExpiringTable(Generic[Value]):
    """A bounded dict whose entries expire. When it is full, the entry that expires first is evicted.

    >>> table = ExpiringTable(2)
    >>> for name, until_us in (("a", 30), ("b", 20), ("c", 40)):
    ...     table.put((name,), name.upper(), until_us, now_us=10)
    >>> [table.get((name,), now_us=30) for name in "abc"], table.evicted
    ([None, None, 'C'], 1)
    """

    __slots__ = ("_due", "_entries", "evicted", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.evicted = 0
        """Entries dropped before they expired."""
        self._entries: dict[Name, tuple[int, Value]] = {}
        self._due: list[tuple[int, Name]] = []
        """Expiry times as a heap, including those of entries that were dropped or replaced."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: Name, now_us: int) -> Value | None:
        entry = self._entries.get(name)
        return entry[1] if entry is not None and now_us < entry[0] else None

    def put(self, name: Name, value: Value, until_us: int, now_us: int) -> None:
        self._entries[name] = until_us, value
        heappush(self._due, (until_us, name))
        self.expire(now_us)
        if len(self._due) > 2 * len(self._entries) + 64:
            self._due = [(until_us, name) for name, (until_us, _) in self._entries.items()]
            heapify(self._due)

    def expire(self, now_us: int) -> None:
        """Drop expired entries, and those beyond the bound."""
        entries, due = self._entries, self._due
        while due and (due[0][0] <= now_us or len(entries) > self.most):
            until_us, name = heappop(due)
            if name in entries and entries[name][0] == until_us:
                del entries[name]
                self.evicted += until_us > now_us

    def drop(self, name: Name) -> None:
        self._entries.pop(name, None)

    def clear(self) -> None:
        self._entries.clear()
        self._due.clear()
