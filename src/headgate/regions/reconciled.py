"""Reconciled limits: each region counts by itself, and charges what the others have admitted to its own counter.

Pure; `headgate.regions.exchange` has the I/O. A region shares, for each counter and slot of time, the total that it has
admitted and the total that was refunded. Both only grow (a PN-counter), so that reports may be late, repeated, out of
order or lost: the largest value seen is the latest. `ImportedUsage` records how much of it has been applied to the
region's own counter; the difference is applied next. Each step has an id that follows from the record before it, so
that an agent that repeats a step of another agent, or its own, changes nothing.

Time is divided into slots, because usage matters only for a while: windows for "fixed_window", an eighth of the horizon
for others. Usage of a slot that has left the horizon is forgotten.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from headgate import speedups
from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.errors import HeadgateError
from headgate.keys import Key
from headgate.limits import Limit
from headgate.stores.operations import Check, IdempotentCheck, Overdraw, Refund

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "AdmissionCounter",
    "ImportedUsage",
    "UsageSlot",
    "charged_amount",
    "horizon_us",
    "parse_field",
    "parse_totals",
    "slot_us",
]

SLOTS_PER_HORIZON: Final = 8
MIN_SLOT_US: Final = 1_000_000
MAX_TOTAL: Final = 2**53 - 1
WINDOWS: Final = frozenset({"fixed_window", "sliding_log", "sliding_window"})
OVERDRAFT_QUOTA: Final = 2**48
"""More than all regions can admit, and small enough for exact arithmetic."""


def horizon_us(limit: Limit) -> int:
    """The time for which usage counts after its slot has ended: until a bucket is full again, or a window is over."""
    if limit.algorithm == "fixed_window":
        return 0
    if limit.algorithm in ("sliding_log", "sliding_window"):
        return limit.period_us
    return -(-limit.full // limit.tokens)


def slot_us(limit: Limit) -> int:
    """The length of the slots of time into which the usage of a limit is divided."""
    if limit.algorithm == "fixed_window":
        return limit.period_us
    return max(MIN_SLOT_US, horizon_us(limit) // SLOTS_PER_HORIZON)


class UsageSlot(NamedTuple):
    """The usage of one counter in one slot of time.

    >>> hourly = Limit(100, timedelta(hours=1), algorithm="fixed_window", name="hourly")
    >>> slot = UsageSlot.at(hourly.by("ada"), 7_200_000_001)
    >>> slot.number, slot.counts_at(10_799_999_999), slot.counts_at(10_800_000_000)
    (2, True, False)
    """

    limit: Limit
    identity: str
    number: int

    @classmethod
    def at(cls, key: Key, at_us: int) -> Self:
        return cls(key.limit, key.identity, at_us // slot_us(key.limit))

    @property
    def key(self) -> Key:
        return Key(self.limit, (self.identity,), self.identity)

    @property
    def overdraft_key(self) -> Key:
        """The counter of a window under a limit that denies nothing, to charge what other regions have admitted.

        The state of a window does not depend on the quota, and may exceed it, as after a plan change.
        """
        return self.key._replace(limit=_overdraft(self.limit.name, self.limit.algorithm, self.limit.period_us))

    @property
    def end_us(self) -> int:
        """The instant from which this usage no longer counts."""
        return (self.number + 1) * slot_us(self.limit) + horizon_us(self.limit)

    def counts_at(self, now_us: int) -> bool:
        return now_us < self.end_us

    @property
    def field(self) -> str:
        """The name of this slot in the stores of all regions."""
        limit = self.limit
        numbers = [limit.quota, limit.period_us, limit.capacity]
        return json.dumps([limit.name, limit.algorithm, *numbers, self.identity, self.number], separators=(",", ":"))


@lru_cache(maxsize=10_000)
def parse_field(field: str) -> UsageSlot | None:
    """The slot that a field stands for; None if it is not one."""
    try:
        name, algorithm, quota, period_us, burst, identity, number = json.loads(field)
        if not (type(identity) is str and type(number) is int and 0 <= number <= MAX_TOTAL and type(period_us) is int):
            return None
        limit = _limit(name, algorithm, quota, period_us, burst)
    except (ValueError, TypeError, OverflowError, RecursionError, HeadgateError):
        return None
    return None if algorithm == "concurrency" else UsageSlot(limit, identity, number)


@lru_cache(maxsize=1_000)
def _limit(name: str, algorithm: str, quota: int, period_us: int, burst: int) -> Limit:
    """One object for equal limits, as stores compare them by identity first."""
    return Limit(quota, timedelta(microseconds=period_us), burst=burst, algorithm=algorithm, name=name)


@lru_cache(maxsize=1_000)
def _overdraft(name: str, algorithm: str, period_us: int) -> Limit:
    return Limit(OVERDRAFT_QUOTA, timedelta(microseconds=period_us), algorithm=algorithm, name=name)


def parse_totals(text: str, count: int = 2) -> tuple[int, ...] | None:
    """Whole numbers, separated by spaces; None if there are not `count`, or one is too large to be exact."""
    parts = text.split(" ")
    if len(parts) != count or not all(part.isascii() and part.isdecimal() and len(part) <= 16 for part in parts):
        return None
    totals = tuple(map(int, parts))
    return totals if max(totals) <= MAX_TOTAL else None


class ImportedUsage(NamedTuple):
    """The usage of another region's slot, and how much of it was applied to this region's counter.

    >>> usage = ImportedUsage().merge(10, 0)
    >>> usage.balance, usage.after_charge(7).balance
    (10, 3)
    >>> usage.after_charge(10).merge(9, 0).merge(12, 4).balance
    -2
    """

    admitted: int = 0
    refunded: int = 0
    charged: int = 0
    returned: int = 0

    def merge(self, admitted: int, refunded: int) -> Self:
        """Take in a report: totals only grow, so the largest is the latest."""
        return self._replace(admitted=max(self.admitted, admitted), refunded=max(self.refunded, refunded))

    @property
    def balance(self) -> int:
        """The amount to charge next; negative for an amount to return."""
        return max(0, self.admitted - self.refunded) - self.charged + self.returned

    def charge(self, slot: UsageSlot, source: str) -> IdempotentCheck | Overdraw | None:
        """The operation that charges the balance, even beyond the limit; None if there is nothing to charge.

        Its answer has the amount that was charged (see `charged_amount`): at most the capacity of a bucket, and that of
        the first step with the same id.
        """
        if self.balance <= 0:
            return None
        id = self._step(slot, source)
        if slot.limit.algorithm in WINDOWS:
            return IdempotentCheck((slot.overdraft_key,), self.balance, id)
        return Overdraw(slot.key, min(self.balance, slot.limit.capacity), id)

    def refund(self, slot: UsageSlot, source: str) -> Refund | None:
        """The operation that returns a negative balance, at most once."""
        return Refund(slot.key, -self.balance, self._step(slot, source)) if self.balance < 0 else None

    def after_charge(self, amount: int) -> Self:
        return self._replace(charged=self.charged + amount)

    def after_refund(self) -> Self:
        return self._replace(returned=self.returned - min(0, self.balance))

    def settled(self) -> Self:
        """Without a balance: the counter was reset."""
        return self.after_charge(self.balance) if self.balance > 0 else self.after_refund()

    @property
    def text(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(*parse_totals(text, 4) or ())

    def _step(self, slot: UsageSlot, source: str) -> str:
        return f"region:{source}:{slot.number}:{self.charged}:{self.returned}"


def charged_amount(answer: Any) -> int | None:
    """The amount in the answer to a charge; None if it failed."""
    if isinstance(answer, Decision):
        return sum(Check(answer.keys, answer.cost).costs) if answer.allowed else None
    return answer if type(answer) is int else None


class AdmissionCounter:
    """Counts the admissions and refunds of this process since the last flush; thread-safe.

    A flush that may or may not have been carried out is repeated with the same number, which counts once.
    """

    def __init__(self) -> None:
        self.open_slots: dict[Key, list[int]] = {}
        """The slot of the last admission of each key: its number, from when to when it lasts, what was admitted. Always
        the same object, as compiled code refers to it."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave what the parent has counted to the parent."""
        self._lock = threading.Lock()
        self._usage: dict[UsageSlot, list[int]] = {}
        """Admitted and refunded amounts by slot, without those in `open_slots`."""
        self._in_flight: dict[UsageSlot, tuple[int, int]] = {}
        self.open_slots.clear()
        self.add: Callable[[Key, int, int], bool] = self._add
        if add_usage is not None:
            self.add = partial(add_usage, self.open_slots)
        """Count an admitted request, given the time of the decision, if it is not the first one in its slot since the
        last flush; else return False, for `record` to count it."""
        self._flushes = 0

    def record(self, key: Key, cost: int, at_us: int) -> None:
        """Count an admitted request; `at_us` is the time of the decision."""
        with self._lock:
            if not (add_usage or plain_add_usage)(self.open_slots, key, cost, at_us):
                self._close_slot(key)
                length_us = slot_us(key.limit)
                number = at_us // length_us
                self.open_slots[key] = [number, number * length_us, (number + 1) * length_us, cost]

    def record_refund(self, key: Key, amount: int, at_us: int) -> None:
        """Count a refund of what was charged at that time."""
        with self._lock:
            self._usage.setdefault(UsageSlot.at(key, at_us), [0, 0])[1] += amount

    def begin_flush(self) -> tuple[int, Mapping[UsageSlot, tuple[int, int]]]:
        """The number of the flush, and the usage to add; empty if there is nothing to do."""
        with self._lock:
            if not self._in_flight and (self._usage or self.open_slots):
                for key in list(self.open_slots):
                    self._close_slot(key)
                self._in_flight = {slot: (admitted, refunded) for slot, (admitted, refunded) in self._usage.items()}
                self._usage = {}
                self._flushes += 1
            return self._flushes, self._in_flight

    def _add(self, key: Key, cost: int, at_us: int) -> bool:
        with self._lock:
            return plain_add_usage(self.open_slots, key, cost, at_us)

    def _close_slot(self, key: Key) -> None:
        # Removed before it is read: `add_usage`, which takes no lock, then adds no more to it.
        slot = self.open_slots.pop(key, None)
        if slot is not None:
            number, _, _, admitted = slot
            self._usage.setdefault(UsageSlot(key.limit, key.identity, number), [0, 0])[0] += admitted

    def end_flush(self) -> None:
        """The flush was carried out."""
        with self._lock:
            self._in_flight = {}


def plain_add_usage(open_slots: dict[Key, list[int]], key: Key, cost: int, at_us: int) -> bool:
    """Add an admission to the slot that is open for a key; False if none is open at that time."""
    slot = open_slots.get(key)
    if slot is None or not slot[1] <= at_us < slot[2]:
        return False
    slot[3] += cost
    return True


add_usage: Final[Callable[..., bool] | None] = speedups.pick("add_usage")
"""The same in C, where no other thread runs meanwhile; None if it is not compiled."""
