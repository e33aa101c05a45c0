"""Idempotency records in memory: the first answer to each id, for as long as the same id must not be charged again."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from headgate.algorithms import Verdict

__all__ = ["ExpiringTable", "IdRecord"]

Value = TypeVar("Value")

Name: TypeAlias = tuple[Any, ...]


class IdRecord:
    """The part of a check with an id that concerns one counter; without holders, a refund whose id no check had."""

    __slots__ = ("at_us", "cost", "holders", "left", "verdict")

    def __init__(self, at_us: int, cost: int = 0, verdict: Verdict = (0, 0, 0, 0), *, holders: int = 1) -> None:
        self.at_us = at_us
        self.cost = cost
        self.left = cost
        """What has not been refunded. Less than the cost: the one refund of this id has been made."""
        self.holders = holders
        """Callers that got this answer and did not withdraw. The last one that does gives the charge back."""
        self.verdict = verdict


class ExpiringTable(Generic[Value]):
    """A bounded dict whose entries expire. When it is full, the entry that expires first makes room.

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
        """Entries that were dropped before they expired."""
        self._entries: dict[Name, tuple[int, Value]] = {}
        self._due: list[tuple[int, Name]] = []
        """Expiry times, as a heap; also of entries that are gone or were replaced."""

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
        """Drop what has expired, and what is beyond the bound."""
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
