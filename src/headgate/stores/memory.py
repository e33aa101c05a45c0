"""The memory store: exact under threads and tasks, bounded, without a thread of its own.

Threads. A check of one key reads the state, decides, and sets the new state only if the old one is still there (compare
and set); otherwise it decides again, under the lock. There is no call and no loop between comparison and assignment, so
that CPython does not switch threads there: no lock is needed. Everything that changes several keys (several limits, a
new key, a refund) takes the lock and sets `_is_locked`, which disables this fast path. On interpreters without a global
lock, `_is_locked` is always set.

The lock is reentrant: a finalizer, which the garbage collector may run at any allocation, or a signal handler may use
the store. `_version` tells the interrupted operation, which then decides anew.

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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate import speedups
from headgate._fork import reinit_after_fork
from headgate.algorithms import concurrency
from headgate.clock import in_ns
from headgate.decisions import Decision
from headgate.keys import Key
from headgate.stores._counter_table import SECOND_BITS, CounterTable, EvictionCost
from headgate.stores.idempotency import ExpiringTable, IdRecord
from headgate.stores.operations import (
    Check,
    IdempotentCheck,
    Leave,
    Refund,
    Renew,
    Reset,
    Withdraw,
    checked,
    id_validity_us,
    joined_costs,
    refund_memory_us,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.limits import Limit
    from headgate.stores.operations import Call, Cost

__all__ = ["MemoryStats", "MemoryStore"]

logger = logging.getLogger("headgate")

_GRACE_US: Final = 60 * 1_000_000
"""Counters that are as new are kept for a minute while there is room: the clock may step back."""
_EVICTION_CANDIDATES: Final = 16
_MAX_PROBES: Final = 2048
"""Counters to look at to find the candidates. Blocked ones are set aside, so that they are looked at once."""
_SHARED_IDENTITY: Final = "%shared"
"""The counter of all clients without their own. Identities of clients never contain a bare percent sign."""

_NO_KEY: Final[Any] = object()

_new_decision = tuple.__new__
_charge = speedups.pick("charge")


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
        *("_meters", "_now_us", "_shared", "_fast_tables", "_tables", "_time_ns", "_version"),
    )

    def __init__(self, clock: Clock, *, max_keys: int = 1_000_000) -> None:
        self._now_us: Callable[[], int] = clock.now_us
        self._time_ns = in_ns(clock)
        self._max_keys = max_keys
        self._tables: dict[str, CounterTable] = {}
        self._meters: dict[str, Any] = {}
        """By limit space, the counters that the compiled `charge` may change; maintained by the tables."""
        self._fast_tables: dict[str, CounterTable] = {}
        """The tables for the fast path."""
        self._ids: ExpiringTable[IdRecord] = ExpiringTable(max_keys)
        """Records of checks and refunds with an id, by limit space, identity and id."""
        self._lock = threading.RLock()
        self._always_locks = not getattr(sys, "_is_gil_enabled", lambda: True)()
        self._is_locked = self._always_locks
        self._version = 0
        """The number of changes under the lock."""
        self._keys = self._evicted = self._forgiven = 0
        self._shared = 0
        """Requests counted in shared counters."""
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
                # The state before its writer: `CounterTable.write` sets the writer first.
                state = states.get(identity)
                if table.single_limit is limit or table.is_written_by(limit, identity):
                    after, verdict = decide(state, now_us, cost, limit)
                    allowed = verdict[1] == 0
                    if after is state or not cost:
                        return _new_decision(Decision, (allowed, (key,), (verdict,), None, None, now_us, 0, cost))
                    if state is not None:
                        try:
                            # Compare and set: no call and no loop may come between the two (see the module docstring).
                            if not self._is_locked and states[identity] is state:
                                states[identity] = after
                                return _new_decision(
                                    Decision, (allowed, (key,), (verdict,), None, None, now_us, 0, cost)
                                )
                        except KeyError:  # it was reset or dropped in the meantime
                            pass
        return self.decide(checked(() if key is _NO_KEY else (key, *others), cost, id))

    def run(self, operation: Call) -> Any:
        """Run any operation."""
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
            return self._change_lease(operation)

    def close(self) -> None:
        """Drop all counters."""
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

    def _try_decide(self, keys: tuple[Key, ...], cost: Cost, id: str | None) -> Decision | None:
        """Decide a check under the lock; None if something was changed in the meantime."""
        lease = id or ""
        costs = iter(cost) if type(cost) is tuple else None
        known: list[tuple[dict[str, Any], str, Any]] = []
        others: list[tuple[CounterTable, Key, Any, int]] = []
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
                        key = _shared_key(key)
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
                    new = IdRecord(decision.at_us, costs[index], verdicts[index])
                    self._add_record(key, id, new, now_us + id_validity_us(keys), now_us)
        cost = joined_costs(costs) if decision.allowed else check.cost
        return decision._replace(verdicts=tuple(verdicts), cost=cost)

    def _record(self, key: Key, id: str | None, now_us: int) -> IdRecord | None:
        """The record of a check with that id on that key."""
        record = self._ids.get((key.limit.space, key.identity, id), now_us)
        return record if record is not None and record.holders else None

    def _add_record(self, key: Key, id: str | None, record: IdRecord, until_us: int, now_us: int) -> None:
        evicted = self._ids.evicted
        self._ids.put((key.limit.space, key.identity, id), record, until_us, now_us)
        evictions = self._ids.evicted
        if evictions > evicted and evictions & (evictions - 1) == 0:  # at 1, 2, 4, 8 ...
            logger.warning(
                "memory store is full at %d ids: %d were dropped early, so a repeated check may be charged again; "
                "raise max_keys",
                self._max_keys,
                evictions,
            )

    def _deny(self, keys: tuple[Key, ...], cost: Cost, verdicts: list[Verdict], now_us: int) -> None:
        """Set the verdicts of a denial: limits under which the request would have passed report what a peek reports.

        Nothing is charged, but migrations are written: `_find` has written plan changes, this writes re-dated states.
        """
        for index, key in enumerate(keys):
            table, state = self._find(key, now_us, adopt=False)
            after, verdict = table.decide(state, now_us, 0, key.limit)
            if not verdicts[index][1]:
                verdicts[index] = verdict
            if after is not state and (cost[index] if type(cost) is tuple else cost):
                self._replace(table, key.identity, state, after)

    def _replace(self, table: CounterTable, identity: str, state: Any, after: Any) -> None:
        """Write a migrated state, unless a finalizer has changed it."""
        if table.states.get(identity) is state:
            self._version += 1
            table.states[identity] = after

    def _refund(self, refund: Refund) -> bool:
        key, amount, id, at_us = refund
        now_us = self._now_us()
        record = None if id is None else self._ids.get((key.limit.space, key.identity, id), now_us)
        if isinstance(refund, Withdraw):
            if record is None or not self._release_record(refund, record):
                return False
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

    def _release_record(self, refund: Refund, record: IdRecord) -> bool:
        """Release a record; True if no other caller relies on it, and then it is dropped."""
        if record.holders == 1:
            self._ids.drop((refund.key.limit.space, refund.key.identity, refund.id))
            return True
        record.holders = max(0, record.holders - 1)
        return False

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
        if self._change_lease_of(operation.key, operation):
            return True
        table = self._tables.get(operation.key.limit.space)
        is_shared = table is not None and _SHARED_IDENTITY in table.states
        return is_shared and self._change_lease_of(_shared_key(operation.key), operation)

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

    def _find(self, key: Key, now_us: int, *, adopt: bool = True) -> tuple[CounterTable, Any]:
        """The table of a key, and its state converted to the numbers of the key's limit."""
        limit, _, identity = key
        table = self._tables.get(limit.space)
        if table is None:
            table = self._tables[limit.space] = CounterTable(limit, self._meters)
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

    def _put(self, table: CounterTable, key: Key, state: Any, now_us: int, reset_us: int) -> None:
        is_new = key.identity not in table.states
        table.write(key, state)
        is_shared = key.identity == _SHARED_IDENTITY
        if is_shared:
            self._count_shared()
        if is_new:
            self._drop_due(table, now_us)
            table.schedule_new(key.identity, now_us + reset_us)
            self._keys += not is_shared

    def _reset(self, key: Key) -> None:
        table = self._tables.get(key.limit.space)
        if table is not None and key.identity in table.states:
            table.reset(key.identity)
            self._keys -= 1

    def _drop_due(self, table: CounterTable, now_us: int) -> None:
        """Drop up to two counters that have been as new for a while: more than are inserted."""
        table.unblock(now_us, 2)
        for _ in range(2):
            identity = table.pop_due((now_us - _GRACE_US) >> SECOND_BITS)
            if identity is None:
                return
            if owed_us := table.eviction_cost(identity, now_us).owed_us:
                table.schedule(identity, now_us + owed_us)
            else:
                self._drop(table, identity)

    def _make_room(self, keys: tuple[Key, ...], cost: Cost, now_us: int) -> int:
        """Evict counters until there is room for the new keys of a request; return the number of free places."""
        charged = [key for key, each in zip(keys, Check(keys, cost).costs, strict=True) if each]
        while self._keys + sum([self._is_new(key) for key in charged]) > self._max_keys and self._evict(now_us):
            pass
        return max(0, self._max_keys - self._keys)

    def _is_new(self, key: Key) -> bool:
        table = self._tables.get(key.limit.space)
        return table is None or key.identity not in table.states

    def _evict(self, now_us: int) -> bool:
        """Evict at least one counter; False if there are none, or all are blocked."""
        candidates: list[tuple[EvictionCost, int, CounterTable, str]] = []
        tables = list(self._tables.values())
        if not tables:
            return False
        for table in tables:
            table.unblock(now_us, _EVICTION_CANDIDATES)
        for place in range(_MAX_PROBES):
            table = min(tables, key=CounterTable.next_due)
            if table.next_due() == sys.maxsize:
                break
            identity = table.pop_due(sys.maxsize)
            if identity is None:
                continue
            rank = table.eviction_cost(identity, now_us)
            if identity == _SHARED_IDENTITY and rank.owed_us:
                table.schedule_blocked(identity, now_us + rank.owed_us)
            elif rank.blocked_us:
                table.schedule_blocked(identity, now_us + rank.blocked_us)
            else:
                candidates.append((rank, place, table, identity))
                if len(candidates) == _EVICTION_CANDIDATES:
                    break
        candidates.sort()
        for place, (rank, _, table, identity) in enumerate(candidates):
            if place and rank.owed_us:
                table.schedule(identity, now_us + rank.owed_us)
                continue
            self._version += 1
            self._drop(table, identity)
            self._evicted += 1
            if rank.owed_us:
                self._forgiven += 1
                _log_at_powers_of_two(
                    self._forgiven,
                    "memory store is full (%d keys): %d keys were evicted while in use; raise max_keys",
                    self._max_keys,
                )
        return bool(candidates)

    def _drop(self, table: CounterTable, identity: str) -> None:
        if identity in table.states:  # otherwise a finalizer has dropped it
            table.drop(identity)
            self._keys -= identity != _SHARED_IDENTITY

    def _count_shared(self) -> None:
        self._shared += 1
        _log_at_powers_of_two(
            self._shared,
            "memory store is full (%d keys), and all keys belong to blocked clients: %d requests of other clients were "
            "counted together; raise max_keys",
            self._max_keys,
        )


def _shared_key(key: Key) -> Key:
    return key._replace(identity=_SHARED_IDENTITY)


def _log_at_powers_of_two(count: int, message: str, max_keys: int) -> None:
    """Log a warning at 1, 2, 4, 8 ... occurrences."""
    if count & (count - 1) == 0:
        logger.warning(message, max_keys, count)
