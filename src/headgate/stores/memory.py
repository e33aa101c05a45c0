"""The memory store: exact under threads and tasks, bounded, without a thread of its own.

Threads. A check of one key reads the state, decides, and sets the new state only if the old one is still there (compare
and set); otherwise it decides again, under the lock. There is no call and no loop between comparison and assignment, so
that CPython does not switch threads there: no lock is needed. Everything that changes several keys (several limits, a
new key, a refund) takes the lock and sets `_is_locked`, which disables this fast path. On interpreters without a global
lock, `_is_locked` is always set.

The lock is reentrant: a finalizer, which the garbage collector may run at any allocation, or a signal handler may use
the store. The interrupted operation finds that `_version` has changed, and decides anew.

Memory. Each counter is scheduled for the second in which it is expected to be as new. Inserting a key looks at a few
that are due: those that are as new are dropped, the others are rescheduled. At `max_keys`, each new key evicts another:
of a few that are due first, the one of which the smallest part of the capacity is used. If that is not as new, the
forgiven usage is counted and logged. A counter that denies a cost of 1 is never evicted, which would unblock a client.
If all counters are such, clients without a counter share one for each limit, until one can be evicted again.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from headgate import speedups
from headgate._fork import reinit_after_fork
from headgate.algorithms import LimitNumbers, Verdict, concurrency, gcra, leaky_bucket, pool, token_bucket
from headgate.clock import Clock, in_ns
from headgate.decisions import Decision
from headgate.keys import Key
from headgate.stores.operations import (
    Call,
    Check,
    Cost,
    Deposit,
    IdempotentCheck,
    Leave,
    Overdraw,
    Refund,
    Renew,
    Reset,
    TakeBack,
    Withdraw,
    checked,
    id_validity_us,
    joined_costs,
    refund_memory_us,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.limits import Limit

__all__ = ["ExpiringTable", "MemoryStats", "MemoryStore"]

logger = logging.getLogger("headgate")

Value = TypeVar("Value")
Name: TypeAlias = tuple[Any, ...]

_GRACE_US: Final = 60 * 1_000_000
"""Counters that are as new are kept for a minute while there is room: the clock may step back."""
_EVICTION_CANDIDATES: Final = 16
_MAX_PROBES: Final = 2048
"""Counters to look at to find the candidates. Blocked ones are set aside, so that they are looked at once."""
_SHARED_IDENTITY: Final = "%shared"
"""The counter of all clients without their own. Identities of clients never contain a bare percent sign."""

_BUCKETS: Final[dict[str, Any]] = {"gcra": gcra, "leaky_bucket": leaky_bucket, "token_bucket": token_bucket}

_NO_KEY: Final[Any] = object()

_new_decision = tuple.__new__
_charge = speedups.pick("charge")
_admit = speedups.pick("admit")
_Meter = speedups.pick("Meter")
_METERED: Final = speedups.pick("ALGORITHMS", ())

_SECOND_BITS: Final = 20
"""A "second" of the schedule is 2**20 microseconds."""


class _EvictionCost(NamedTuple):
    """The rank of a counter among candidates for eviction: the used fraction of the capacity (1 if it denies a cost of
    1), the time until it is as new, and the time for which it denies a cost of 1."""

    used: float
    owed_us: int
    blocked_us: int


@dataclass(slots=True)
class _Schedule:
    """Identities by the second in which they are due."""

    _buckets: dict[int, list[str]] = field(default_factory=dict)
    _seconds: list[int] = field(default_factory=list)
    """The keys of the buckets, as a heap."""

    def add(self, identity: str, at_us: int) -> None:
        second = at_us >> _SECOND_BITS
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = []
            heappush(self._seconds, second)
        bucket.append(identity)

    def pop(self, before: int) -> str | None:
        """Remove and return an identity that is due before that second."""
        while self._seconds and self._seconds[0] < before:
            bucket = self._buckets[self._seconds[0]]
            if bucket:
                return bucket.pop()
            del self._buckets[heappop(self._seconds)]
        return None

    def next_second(self) -> int:
        return self._seconds[0] if self._seconds else sys.maxsize


class _CounterTable:
    """The counters of one limit name and algorithm."""

    __slots__ = (
        *("_meters", "adopt", "blocked", "decide", "due", "limit", "refund", "reset_identities", "retained_us"),
        *("single_limit", "states", "writers"),
    )

    def __init__(self, limit: Limit, meters: dict[str, Any]) -> None:
        algorithm = limit.implementation
        self.decide, self.refund, self.adopt = algorithm.decide, algorithm.refund, algorithm.adopt
        self.retained_us = getattr(algorithm, "retained_us", None)
        """The time for which a state is kept that may be as new; None for as long as it is not."""
        self.limit: LimitNumbers
        """The limit whose numbers all states were written with, except those in `writers`."""
        self.single_limit: LimitNumbers | None
        """The same, or None if there are exceptions: the one comparison of the fast path."""
        self._meters = meters
        """The counters for the compiled `charge`; includes these while `single_limit` is set."""
        self.states: dict[str, Any] = {}
        self.writers: dict[str, LimitNumbers] = {}
        self.due = _Schedule()
        """Counters by the time at which they are as new, as far as is known."""
        self.blocked = _Schedule()
        """Counters that deny a cost of 1, by the end of that; until then they are not candidates for eviction."""
        self.reset_identities: set[str] = set()
        """Identities without a counter that are still in a schedule, and need not be added again."""
        self.use_limit(limit)

    def use_limit(self, limit: Limit) -> None:
        """Set the limit of an empty table."""
        self.limit = self.single_limit = limit
        if limit.counter_algorithm in _METERED:
            self._meters[limit.space] = _Meter(limit, self.states)

    def is_written_by(self, limit: LimitNumbers, identity: str) -> bool:
        """True if the state of an identity can be read with the numbers of this limit."""
        return _numbers(self.writers.get(identity, self.limit)) == _numbers(limit)

    def write(self, key: Key, state: Any) -> None:
        """Set a state, its writer first: a reader that finds the new state must find its writer, too."""
        if self.writers or key.limit is not self.limit:
            if _numbers(key.limit) == _numbers(self.limit):
                self.writers.pop(key.identity, None)
            else:
                self.single_limit = None
                self._meters.pop(key.limit.space, None)
                self.writers[key.identity] = key.limit
        self.states[key.identity] = state

    def drop(self, identity: str) -> None:
        del self.states[identity]
        self.writers.pop(identity, None)

    def schedule_new(self, identity: str, at_us: int) -> None:
        if identity in self.reset_identities:
            self.reset_identities.remove(identity)
        else:
            self.due.add(identity, at_us)

    def unblock(self, now_us: int, most: int) -> None:
        """Make some counters candidates for eviction that no longer deny a cost of 1, or will soon."""
        for _ in range(most):
            identity = self.pop(self.blocked, (now_us >> _SECOND_BITS) + 1)
            if identity is None:
                return
            self.due.add(identity, now_us)

    def pop(self, schedule: _Schedule, before: int) -> str | None:
        """Remove from a schedule, and return, an identity with a counter that is due before that second."""
        while (identity := schedule.pop(before)) is not None:
            if identity in self.states:
                return identity
            self.reset_identities.discard(identity)
        return None

    def lifetime_us(self, identity: str, now_us: int) -> int:
        """The time for which a counter must be kept while there is room."""
        if self.retained_us is None:
            return self.eviction_cost(identity, now_us).owed_us
        kept_us: int = self.retained_us(self.states.get(identity), now_us, self.writers.get(identity, self.limit))
        return kept_us

    def eviction_cost(self, identity: str, now_us: int) -> _EvictionCost:
        state, limit = self.states.get(identity), self.writers.get(identity, self.limit)
        verdict: Verdict = self.decide(state, now_us, 0, limit)[1]
        remaining, _, owed_us, _ = verdict
        if remaining or not owed_us:
            return _EvictionCost(1 - remaining / limit.capacity if owed_us else 0, owed_us, 0)
        return _EvictionCost(1, owed_us, self.decide(state, now_us, 1, limit)[1][1])


def _numbers(limit: LimitNumbers) -> tuple[int, int, int]:
    """The numbers that a state depends on. The period follows from them where the capacity is the quota."""
    return limit.tokens, limit.ticks, limit.capacity


@dataclass(slots=True)
class IdRecord:
    """The record of a check with an id for one counter; without holders, that of a refund with an id of its own."""

    at_us: int
    cost: int = 0
    left: int = 0
    """The amount that was not refunded; less than the cost once the one refund of this id was made."""
    verdict: Verdict = (0, 0, 0, 0)
    holders: int = 1
    """Callers that got this result and did not withdraw. The last one that withdraws returns the charge."""


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


class MemoryStats(NamedTuple):
    keys: int
    evicted: int
    """Keys dropped to stay within `max_keys`."""
    forgiven: int
    """Those of them that were in use: if this grows, raise `max_keys`."""


class MemoryStore:
    """Counters in this process; `max_keys` bounds their number."""

    __slots__ = (
        *("__weakref__", "_is_locked", "_evicted", "_forgiven", "_ids", "_keys", "_lock", "_always_locks", "_max_keys"),
        *("_kept_keys", "_meters", "_now_us", "_shared", "_fast_tables", "_tables", "_time_ns", "_version"),
    )

    def __init__(self, clock: Clock, *, max_keys: int = 1_000_000, kept_keys: int = 0) -> None:
        """Up to `kept_keys`, counters that are as new are kept, too: for many requests of clients that come back."""
        self._now_us: Callable[[], int] = clock.now_us
        self._time_ns = in_ns(clock)
        self._max_keys = max_keys
        self._kept_keys = kept_keys
        self._tables: dict[str, _CounterTable] = {}
        self._meters: dict[str, Any] = {}
        """By limit space, the counters that the compiled `charge` may change; maintained by the tables."""
        self._fast_tables: dict[str, _CounterTable] = {}
        self._ids: ExpiringTable[IdRecord] = ExpiringTable(max_keys)
        """Records of checks and refunds with an id, by limit space, identity and id."""
        self._lock = threading.RLock()
        self._always_locks = not getattr(sys, "_is_gil_enabled", lambda: True)()
        self._is_locked = self._always_locks
        self._version = 0
        """The number of changes under the lock."""
        self._keys = self._evicted = self._forgiven = 0
        self._shared = 0
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()
        self._is_locked = self._always_locks

    @property
    def stats(self) -> MemoryStats:
        return MemoryStats(self._keys, self._evicted, self._forgiven)

    def check(
        self, key: Key | Limit = _NO_KEY, /, *others: Key | Limit, cost: Cost = 1, id: str | None = None
    ) -> Decision:
        """Charge all keys or none; see `Limiter.check`."""
        if _charge is not None and id is None and type(cost) is int:
            keys = (key, *others) if others else (key,)
            decision: Decision | None = _charge(self._meters, keys, cost, self._time_ns(), self._is_locked)
            if decision is not None:
                return decision
        if not others and id is None and type(cost) is int and cost >= 0 and type(key) is Key:
            limit = key.limit
            table = self._fast_tables.get(limit.space)
            if table is not None:
                identity = key.identity
                states, decide, time_ns = table.states, table.decide, self._time_ns  # local names are faster
                now_us = time_ns() // 1000
                # The state before its writer: `_CounterTable.write` sets the writer first.
                state = states.get(identity)
                if table.single_limit is limit or table.is_written_by(limit, identity):
                    after, verdict = decide(state, now_us, cost, limit)
                    made = _new_decision(Decision, (verdict[1] == 0, (key,), (verdict,), None, None, now_us, 0, cost))
                    if after is state or not cost:
                        return made
                    if state is not None:
                        try:
                            # Compare and set: no call and no loop may come between the two (see the module docstring).
                            if not self._is_locked and states[identity] is state:
                                states[identity] = after
                                return made
                        except KeyError:  # it was reset or dropped in the meantime
                            pass
        return self.decide(checked(() if key is _NO_KEY else (key, *others), cost, id))

    def run(self, operation: Call) -> Any:
        if isinstance(operation, Check):
            return self.decide(operation)
        with self._locked():
            if isinstance(operation, Reset):
                for key in operation.keys:
                    self._reset(key)
                self._version += 1
                return None
            if isinstance(operation, Refund):
                return self._refund(operation)
            if isinstance(operation, Deposit | TakeBack):
                return self._change_pool(operation)
            if isinstance(operation, Overdraw):
                return self._overdraw(operation)
            return self._change_lease(operation)

    def close(self) -> None:
        with self._locked():
            self._tables.clear()
            self._meters.clear()
            self._fast_tables.clear()
            self._ids.clear()
            self._keys = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, with the fast path disabled."""
        with self._lock:
            was_locked, self._is_locked = self._is_locked, True
            try:
                yield
            finally:
                self._is_locked = was_locked

    def decide(self, check: Check) -> Decision:
        """Decide a check: in C if it is a common one, otherwise under the lock."""
        keys, cost, id = check
        if _charge is not None and id is None:
            charged: Decision | None = _charge(self._meters, keys, cost, self._time_ns(), self._is_locked)
            if charged is not None:
                return charged
        if type(check) is IdempotentCheck:
            return self._decide_once(check)
        lock = self._lock
        lock.acquire()  # inline, as `_locked` is slower
        was_locked, self._is_locked = self._is_locked, True
        try:
            decision = None
            while decision is None:  # again if a finalizer has changed something
                decision = self._try_decide(keys, cost, id)
            return decision
        finally:
            self._is_locked = was_locked
            lock.release()

    def admit(self, check: Check, floors: tuple[int, ...]) -> bool:
        """Charge a check, in C and without the numbers of a decision, if at least so much is left of each limit.

        False for all others, with nothing changed: call `decide` for these.
        """
        if _admit is None:
            return False
        admitted: bool = _admit(self._meters, check[0], check[1], self._time_ns(), floors, self._is_locked)
        return admitted

    def _try_decide(self, keys: tuple[Key, ...], cost: Cost, id: str | None) -> Decision | None:
        """Decide a check under the lock; None if something was changed in the meantime."""
        lease = id or ""
        costs = iter(cost) if type(cost) is tuple else None
        known: list[tuple[dict[str, Any], str, Any]] = []
        others: list[tuple[_CounterTable, Key, Any, int]] = []
        verdicts: list[Verdict] = []
        allowed = True
        tables, version = self._tables, self._version
        now_us = self._time_ns() // 1000
        room = self._make_room(keys, cost, now_us) if self._keys + len(keys) > self._max_keys else len(keys)
        for key in keys:
            each: int = cost if costs is None else next(costs)  # type: ignore[assignment]
            limit, identity = key.limit, key.identity
            table = tables.get(limit.space)
            # The common case: an existing counter, written with the same numbers.
            if table is not None and table.single_limit is limit and (state := table.states.get(identity)) is not None:
                after, verdict = table.decide(state, now_us, each, limit, lease)
                known.append((table.states, identity, after if each else state))
            else:
                table, state = self._find(key, now_us, adopt=each > 0)
                if state is None and each:
                    if room:
                        room -= 1
                    else:
                        key = key._replace(identity=_SHARED_IDENTITY)
                        table, state = self._find(key, now_us)
                after, verdict = table.decide(state, now_us, each, limit, lease)
                if after is not state and each:
                    others.append((table, key, after, verdict[2]))
            verdicts.append(verdict)
            if verdict[1]:
                allowed = False
        changes, additions = iter(known), iter(others)  # no allocations from here on, so that no finalizer runs
        if version != self._version:
            return None
        if allowed:
            self._version += 1
            for states, identity, after in changes:
                states[identity] = after
            for table, key, after, reset_us in additions:
                self._put(table, key, after, now_us, reset_us)
        else:
            self._deny(keys, cost, verdicts, now_us)
        return _new_decision(Decision, (allowed, keys, tuple(verdicts), id, None, now_us, 0, cost))

    def _decide_once(self, check: IdempotentCheck) -> Decision:
        """Decide a check with an id: keys that have its record give the recorded verdict and are not charged."""
        keys, _, id = check
        with self._locked():
            while True:
                now_us = self._time_ns() // 1000
                records = [self._record(key, id, now_us) for key in keys]
                if all(records):
                    at_us = max([record.at_us for record in records if record])
                    decision = Decision(True, keys, (), id, None, at_us)
                    break
                due = tuple([0 if record else cost for record, cost in zip(records, check.costs, strict=True)])
                decided = self._try_decide(keys, due, id)
                if decided is not None:  # otherwise again: a finalizer has changed something
                    decision = decided
                    break
            verdicts = [*decision.verdicts] or [(0, 0, 0, 0)] * len(keys)
            costs = [*check.costs]
            for index, (key, record) in enumerate(zip(keys, records, strict=True)):
                if record is not None:
                    verdicts[index], costs[index] = record.verdict, record.cost
                    record.holders += decision.allowed
                elif decision.allowed and key.limit.algorithm != "concurrency":
                    new = IdRecord(decision.at_us, costs[index], costs[index], verdicts[index])
                    self._add_record(key, id, new, now_us + id_validity_us(keys), now_us)
        cost = joined_costs(costs) if decision.allowed else check.cost
        return decision._replace(verdicts=tuple(verdicts), cost=cost)

    def _record(self, key: Key, id: str | None, now_us: int) -> IdRecord | None:
        record = self._ids.get((key.limit.space, key.account, id), now_us)
        return record if record is not None and record.holders else None

    def _add_record(self, key: Key, id: str | None, record: IdRecord, until_us: int, now_us: int) -> None:
        evicted = self._ids.evicted
        self._ids.put((key.limit.space, key.account, id), record, until_us, now_us)
        if self._ids.evicted > evicted:
            effect = "at %d ids: %d were dropped early, so a repeated check may be charged again"
            self._warn_full(self._ids.evicted, effect)

    def _deny(self, keys: tuple[Key, ...], cost: Cost, verdicts: list[Verdict], now_us: int) -> None:
        """Set the verdicts of a denial: limits under which the request would have passed report what a peek reports.

        Nothing is charged, but migrations are written: `_find` has written plan changes, this writes re-dated states,
        and tenants of fair limits that are active from now on.
        """
        for index, key in enumerate(keys):
            table, state = self._find(key, now_us, adopt=False)
            each: int = cost[index] if type(cost) is tuple else cost  # type: ignore[assignment]
            is_denied = verdicts[index][1] != 0
            after, verdict = table.decide(state, now_us, each if is_denied else 0, key.limit)
            if not is_denied:
                verdicts[index] = verdict
            if after is not state and state is not None and each:
                self._replace(table, key.identity, state, after)

    def _replace(self, table: _CounterTable, identity: str, state: Any, after: Any) -> None:
        """Write a migrated state, unless a finalizer has changed it."""
        if table.states.get(identity) is state:
            self._version += 1
            table.states[identity] = after

    def _refund(self, refund: Refund) -> bool:
        key, amount, id, at_us = refund
        now_us = self._now_us()
        record = None if id is None else self._ids.get((key.limit.space, key.account, id), now_us)
        if isinstance(refund, Withdraw):
            if record is None or record.holders != 1:  # another caller relies on it
                if record is not None and record.holders:
                    record.holders -= 1
                return False
            self._ids.drop((key.limit.space, key.account, id))
            amount = record.left
        elif record is not None:
            if not record.holders or record.left < record.cost:  # the one refund of this id has been made
                return False
            amount = min(amount, record.left)
            at_us = record.at_us if at_us is None else at_us
        if not self._refund_counter(key, amount, at_us, now_us):
            return False
        if record is not None:
            record.left -= amount
        elif id is not None:
            self._add_record(key, id, IdRecord(now_us, holders=0), now_us + refund_memory_us(key), now_us)
        return True

    def _refund_counter(self, key: Key, amount: int, at_us: int | None, now_us: int) -> bool:
        while True:
            version = self._version
            table, found = self._find(key, now_us)
            state = table.decide(found, now_us, 0, key.limit)[0]  # re-dated if the clock was set back
            after = table.refund(state, now_us, amount, key.limit, at_us)
            if version == self._version:
                break
        if state is not found:
            self._replace(table, key.identity, found, state)
        if after is None or after == state:
            return False
        self._version += 1
        table.states[key.identity] = after
        return True

    def _change_lease(self, operation: Renew | Leave) -> bool:
        shared = operation.key._replace(identity=_SHARED_IDENTITY)
        return self._change_lease_of(operation.key, operation) or (
            self._table_with(shared) is not None and self._change_lease_of(shared, operation)
        )

    def _change_lease_of(self, key: Key, operation: Renew | Leave) -> bool:
        now_us = self._now_us()
        while True:
            version = self._version
            table, state = self._find(key, now_us)
            if isinstance(operation, Renew):
                after, held = concurrency.renew(state, now_us, key.limit, operation.id)
            else:
                after, held = concurrency.leave(state, now_us, operation.id)
            if version == self._version:
                break
        if held:
            self._version += 1
            table.states[key.identity] = after
        return held

    def _change_pool(self, operation: Deposit | TakeBack) -> int:
        key, now_us, ttl_us = operation.key, self._now_us(), 0
        if isinstance(operation, Deposit):
            ttl_us = operation.ttl_us
            if ttl_us and operation.since_us is not None:
                ttl_us -= max(0, now_us - operation.since_us)
                if ttl_us <= 0:
                    return 0
            record = self._ids.get((key.limit.space, key.account, operation.id), now_us)
            if record is not None:
                return record.cost
        while True:
            version = self._version
            room = self._make_room((key,), 1, now_us)
            table, state = self._find(key, now_us)
            if isinstance(operation, TakeBack):
                after, moved = pool.take_back(state, now_us, operation.amount, operation.within_us, key.limit)
            elif state is None and not room:  # no tokens rather than those of another counter
                after, moved = (), 0
            else:
                after, moved = pool.deposit(state, now_us, operation.tokens, ttl_us, key.limit)
            if version == self._version:
                break
        if moved:
            self._version += 1
            _, verdict = pool.decide(after, now_us, 0, key.limit)
            self._put(table, key, after, now_us, verdict[2])
        if isinstance(operation, Deposit):
            record = IdRecord(now_us, cost=moved, holders=0)
            self._add_record(key, operation.id, record, pool.expiry(now_us, ttl_us, key.limit), now_us)
        return moved

    def _overdraw(self, operation: Overdraw) -> int:
        key, now_us = operation.key, self._now_us()
        record = self._ids.get((key.limit.space, key.account, operation.id), now_us)
        if record is not None:
            return record.cost
        amount = min(operation.amount, key.limit.capacity)
        while True:
            version = self._version
            self._make_room((key,), 1, now_us)
            table, state = self._find(key, now_us)
            after = _BUCKETS[key.limit.algorithm].overdraw(state, now_us, amount, key.limit)
            if version == self._version:
                break
        self._version += 1
        self._put(table, key, after, now_us, table.decide(after, now_us, 0, key.limit)[1][2])
        record = IdRecord(now_us, cost=amount, holders=0)
        self._add_record(key, operation.id, record, now_us + id_validity_us((key,)), now_us)
        return amount

    def _find(self, key: Key, now_us: int, *, adopt: bool = True) -> tuple[_CounterTable, Any]:
        """The table of a key, and its state converted to the numbers of the key's limit."""
        limit, _, identity = key
        table = self._tables.get(limit.space)
        if table is None:
            table = self._tables[limit.space] = _CounterTable(limit, self._meters)
            if limit.algorithm != "concurrency":  # leases need an id
                self._fast_tables[limit.space] = table
        elif not table.states:
            table.use_limit(limit)
        state = table.states.get(identity)
        if table.single_limit is limit or state is None or table.is_written_by(limit, identity):
            return table, state
        state = table.adopt(state, now_us, table.writers.get(identity, table.limit), limit)
        if adopt:
            table.write(key, state)
        return table, state

    def _put(self, table: _CounterTable, key: Key, state: Any, now_us: int, reset_us: int) -> None:
        is_new = key.identity not in table.states
        table.write(key, state)
        is_shared = key.identity == _SHARED_IDENTITY
        if is_shared:
            self._shared += 1
            effect = "and all keys belong to blocked clients: %d requests of other clients were counted together"
            self._warn_full(self._shared, f"(%d keys), {effect}")
        if is_new:
            self._drop_due(table, now_us)
            table.schedule_new(key.identity, now_us + reset_us)
            self._keys += not is_shared

    def _reset(self, key: Key) -> None:
        if table := self._table_with(key):
            table.drop(key.identity)
            table.reset_identities.add(key.identity)
            self._keys -= 1

    def _drop_due(self, table: _CounterTable, now_us: int) -> None:
        """Drop up to two counters that have been as new for a while: more than are inserted."""
        if self._keys < self._kept_keys:
            return
        table.unblock(now_us, 2)
        for _ in range(2):
            identity = table.pop(table.due, (now_us - _GRACE_US) >> _SECOND_BITS)
            if identity is None:
                return
            if kept_us := table.lifetime_us(identity, now_us):
                table.due.add(identity, now_us + kept_us)
            else:
                self._drop(table, identity)

    def _make_room(self, keys: tuple[Key, ...], cost: Cost, now_us: int) -> int:
        """Evict counters until there is room for the new keys of a request; return the number of free places."""
        charged = [key for key, each in zip(keys, Check(keys, cost).costs, strict=True) if each]
        while self._keys + len([key for key in charged if not self._table_with(key)]) > self._max_keys:
            if not self._evict(now_us):
                break
        return max(0, self._max_keys - self._keys)

    def _table_with(self, key: Key) -> _CounterTable | None:
        table = self._tables.get(key.limit.space)
        return table if table is not None and key.identity in table.states else None

    def _evict(self, now_us: int) -> bool:
        """Evict at least one counter; False if there are none, or all are blocked."""
        candidates: list[tuple[_EvictionCost, int, _CounterTable, str]] = []
        tables = list(self._tables.values())
        if not tables:
            return False
        for table in tables:
            table.unblock(now_us, _EVICTION_CANDIDATES)
        for place in range(_MAX_PROBES):
            table = min(tables, key=lambda each: each.due.next_second())
            if table.due.next_second() == sys.maxsize:
                break
            identity = table.pop(table.due, sys.maxsize)
            if identity is None:
                continue
            rank = table.eviction_cost(identity, now_us)
            if blocked_us := rank.owed_us if identity == _SHARED_IDENTITY else rank.blocked_us:
                table.blocked.add(identity, now_us + blocked_us)
            else:
                candidates.append((rank, place, table, identity))
                if len(candidates) == _EVICTION_CANDIDATES:
                    break
        candidates.sort()
        for place, (rank, _, table, identity) in enumerate(candidates):
            if place and rank.owed_us:
                table.due.add(identity, now_us + rank.owed_us)
                continue
            self._version += 1
            self._drop(table, identity)
            self._evicted += 1
            if rank.owed_us:
                self._forgiven += 1
                self._warn_full(self._forgiven, "(%d keys): %d keys were evicted while in use")
        return bool(candidates)

    def _drop(self, table: _CounterTable, identity: str) -> None:
        if identity in table.states:  # otherwise a finalizer has dropped it
            table.drop(identity)
            self._keys -= identity != _SHARED_IDENTITY

    def _warn_full(self, count: int, message: str) -> None:
        """Log a warning at 1, 2, 4, 8 ... occurrences."""
        if count & (count - 1) == 0:
            logger.warning(f"memory store is full {message}; raise max_keys", self._max_keys, count)
