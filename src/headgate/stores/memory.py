"""The store inside the process: exact under threads and tasks, bounded, and without a thread of its own.

Threads. A check of one limit reads the state, decides, and puts the new state in only if the old one is still there
(compare and set), else it decides again, behind the lock. Between comparison and assignment there is no call and no
loop, and only there could CPython hand the interpreter to another thread: no lock is needed, and none is held while
Python runs. Everything that touches several keys (several limits, a new key, a refund) takes the lock and raises
`_busy`, which keeps the short path out. On interpreters without a global lock, `_busy` is always up.

The lock lets its own thread in again: a finalizer, which the collector may run wherever something is made, or the
handler of a signal may leave a lease, or ask. `_turn` tells whoever it came between, who then decides anew.

Memory. Each key is scheduled for the second in which it is due to be as new. Inserting a key looks at a few that are
due: those that are as new are dropped, those that were charged since are rescheduled. At `max_keys` a key has to be
evicted for each new one: of a few that are due first, the one of which the least is used, relative to its capacity. If
that is not as new, the forgiven debt is counted and logged. A key that denies a cost of 1 is never evicted, as that
would free a client that is blocked. If all keys are such, there is no room: clients without a key then share one
counter for each limit, until a key can be evicted again.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate import speedups
from headgate._fork import reinit_after_fork
from headgate.algorithms import concurrency
from headgate.clock import in_ns
from headgate.decisions import Decision
from headgate.keys import Key
from headgate.stores._counter_table import SECOND_BITS, CounterTable, Debt
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
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.limits import Limit
    from headgate.stores.operations import Call, Cost

__all__ = ["MemoryStats", "MemoryStore"]

logger = logging.getLogger("headgate")

_MARGIN_US: Final = 60 * 1_000_000
"""What is as new is kept for a minute more while there is room: a clock that steps back finds it again."""
_CANDIDATES: Final = 16
"""Keys among which the one to be evicted is chosen."""
_MAX_PROBES: Final = 2048
"""Keys to look at, at most, to find these. Those that are blocked are set aside, so that they are looked at once."""
_SHARED_IDENTITY: Final = "%shared"
"""The counter of all clients for whom there is no room. No identity of a client can become this: a percent sign is
always escaped."""

NOTHING: Final[Any] = object()
"""Where no key is given."""

_new_decision = tuple.__new__
_charge = speedups.pick("charge")


class MemoryStats(NamedTuple):
    keys: int
    evicted: int
    """Keys that were dropped to stay within `max_keys`."""
    forgiven: int
    """Those of them that still owed something: if this grows, raise `max_keys`."""


class MemoryStore:
    """Counters in a dict. `max_keys` bounds them; see `stats`."""

    __slots__ = (
        *("__weakref__", "_busy", "_evicted", "_forgiven", "_ids", "_keys", "_lock", "_locks_always", "_max_keys"),
        *("_meters", "_now_us", "_shared", "_short", "_spaces", "_time_ns", "_turn"),
    )

    def __init__(self, clock: Clock, *, max_keys: int = 1_000_000) -> None:
        self._now_us: Callable[[], int] = clock.now_us
        self._time_ns = in_ns(clock)
        self._max_keys = max_keys
        self._spaces: dict[str, CounterTable] = {}
        self._meters: dict[str, Any] = {}
        """By limit space, the counters that the compiled `charge` may change; maintained by their tables."""
        self._short: dict[str, CounterTable] = {}
        """Those that the short path may use."""
        self._ids: ExpiringTable[IdRecord] = ExpiringTable(max_keys)
        """The records of checks and refunds with an id, by limit space, identity and id."""
        self._lock = threading.RLock()
        self._locks_always = not getattr(sys, "_is_gil_enabled", lambda: True)()
        self._busy = self._locks_always
        self._turn = 0
        """How often something was changed behind the lock."""
        self._keys = self._evicted = self._forgiven = 0
        self._shared = 0
        """How often a request was counted in a shared counter."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it."""
        self._lock = threading.RLock()
        self._busy = self._locks_always

    @property
    def stats(self) -> MemoryStats:
        return MemoryStats(self._keys, self._evicted, self._forgiven)

    def check(
        self, key: Key | Limit = NOTHING, /, *others: Key | Limit, cost: Cost = 1, id: str | None = None
    ) -> Decision:
        """Charge all keys or none."""
        if _charge is not None and id is None and type(cost) is int:
            keys = (key, *others) if others else (key,)
            decision: Decision | None = _charge(self._meters, keys, cost, self._time_ns(), self._busy)
            if decision is not None:
                return decision
        if not others and id is None and type(cost) is int and cost >= 0 and type(key) is Key:
            limit = key.limit
            space = self._short.get(limit.space)
            if space is not None:
                identity = key.identity
                states, decide, time_ns = space.states, space.decide, self._time_ns  # cheaper to call by a name
                now_us = time_ns() // 1000
                # The state before its writer: whoever adopts a state signs it first.
                state = states.get(identity)
                if space.only is limit or space.is_written_by(limit, identity):
                    after, verdict = decide(state, now_us, cost, limit)
                    allowed = verdict[1] == 0
                    if after is state or not cost:
                        return _new_decision(Decision, (allowed, (key,), (verdict,), None, None, now_us, 0, cost))
                    if state is not None:
                        try:
                            # Compare and set: no call and no loop may come between the two (see above).
                            if not self._busy and states[identity] is state:
                                states[identity] = after
                                return _new_decision(
                                    Decision, (allowed, (key,), (verdict,), None, None, now_us, 0, cost)
                                )
                        except KeyError:  # it was reset or forgotten in the meantime
                            pass
        return self.decide(checked(() if key is NOTHING else (key, *others), cost, id))

    def run(self, call: Call) -> Any:
        """Carry out any call."""
        if isinstance(call, Check):
            return self.decide(call)
        with self._alone():
            if isinstance(call, Reset):
                for key in call.keys:
                    self._forget(key)
                self._turn += 1
                return None
            if isinstance(call, Refund):
                return self._refund(call)
            return self._change_lease(call)

    def close(self) -> None:
        """Forget everything."""
        with self._alone():
            self._spaces.clear()
            self._meters.clear()
            self._short.clear()
            self._ids.clear()
            self._keys = 0

    def _alone(self) -> _Uncontended:
        return _Uncontended(self)

    def decide(self, call: Check) -> Decision:
        """The answer to a check: by the compiled charge, if it is a common one, else behind the lock."""
        keys, cost, id = call
        if _charge is not None and id is None:
            answer: Decision | None = _charge(self._meters, keys, cost, self._time_ns(), self._busy)
            if answer is not None:
                return answer
        if type(call) is IdempotentCheck:
            return self._decide_once(call)
        lock = self._lock
        lock.acquire()  # by hand: a `with` costs a thousand instructions more
        was_busy, self._busy = self._busy, True
        try:
            decision = None
            while decision is None:  # again, if a finalizer came between
                decision = self._decided(keys, cost, id)
            return decision
        finally:
            self._busy = was_busy
            lock.release()

    def _decided(self, keys: tuple[Key, ...], cost: Cost, id: str | None) -> Decision | None:
        """The answer to a check; None if something was changed in the meantime."""
        lease = id or ""
        costs = iter(cost) if type(cost) is tuple else None
        known: list[tuple[dict[str, Any], str, Any]] = []
        others: list[tuple[CounterTable, Key, Any, int]] = []
        verdicts: list[Verdict] = []
        allowed = True
        spaces, turn = self._spaces, self._turn
        now_us = self._time_ns() // 1000
        room = self._make_room(keys, cost, now_us) if self._keys + len(keys) > self._max_keys else len(keys)
        for key in keys:
            each: int = cost if costs is None else next(costs)  # type: ignore[assignment]
            limit, identity = key.limit, key.identity
            space = spaces.get(limit.space)
            # The common case by itself: a key that is there, written under the same numbers.
            if space is not None and space.only is limit and (state := space.states.get(identity)) is not None:
                after, verdict = space.decide(state, now_us, each, limit, lease)
                known.append((space.states, identity, after if each else state))
            else:
                space, state = self._find(key, now_us, adopt=each > 0)
                if state is None and each:
                    if room:
                        room -= 1
                    else:
                        key = _shared_key(key)
                        space, state = self._find(key, now_us)
                after, verdict = space.decide(state, now_us, each, limit, lease)
                if after is not state and each:
                    others.append((space, key, after, verdict[2]))
            verdicts.append(verdict)
            if verdict[1]:
                allowed = False
        changes, additions = iter(known), iter(others)  # nothing is made from here on, so that no finalizer comes
        if turn != self._turn:
            return None
        if allowed:
            self._turn += 1
            for states, identity, after in changes:
                states[identity] = after
            for space, key, after, reset_us in additions:
                self._put(space, key, after, now_us, reset_us)
        else:
            self._deny(keys, cost, verdicts, now_us)
        return _new_decision(Decision, (allowed, keys, tuple(verdicts), id, None, now_us, 0, cost))

    def _decide_once(self, call: IdempotentCheck) -> Decision:
        """The answer to a check with an id: on keys that have its record, the recorded one, without a charge."""
        keys, _, id = call
        with self._alone():
            while True:
                now_us = self._time_ns() // 1000
                records = [self._record(key, id, now_us) for key in keys]
                if all(records):
                    at_us = max([record.at_us for record in records if record])
                    decision = Decision(True, keys, (), id, None, at_us)
                    break
                due = tuple([0 if record else cost for record, cost in zip(records, call.costs, strict=True)])
                decided = self._decided(keys, due, id)
                if decided is not None:  # else again: a finalizer came between
                    decision = decided
                    break
            verdicts = [*decision.verdicts] or [(0, 0, 0, 0)] * len(keys)
            costs = [*call.costs]
            for index, (key, record) in enumerate(zip(keys, records, strict=True)):
                if record is not None:
                    verdicts[index], costs[index] = record.verdict, record.cost
                    record.holders += decision.allowed
                elif decision.allowed and key.limit.algorithm != "concurrency":
                    new = IdRecord(decision.at_us, costs[index], verdicts[index])
                    self._keep_record(key, id, new, now_us + id_validity_us(keys), now_us)
        cost = joined_costs(costs) if decision.allowed else call.cost
        return decision._replace(verdicts=tuple(verdicts), cost=cost)

    def _record(self, key: Key, id: str | None, now_us: int) -> IdRecord | None:
        """What is recorded of the check with that id on that key."""
        record = self._ids.get((key.limit.space, key.identity, id), now_us)
        return record if record is not None and record.holders else None

    def _keep_record(self, key: Key, id: str | None, record: IdRecord, until_us: int, now_us: int) -> None:
        evicted = self._ids.evicted
        self._ids.put((key.limit.space, key.identity, id), record, until_us, now_us)
        evictions = self._ids.evicted
        if evictions > evicted and evictions & (evictions - 1) == 0:  # at 1, 2, 4, 8 ...
            logger.warning(
                "memory store is full at %d ids: %d were forgotten early, so a repeated check may be charged again; "
                "raise max_keys",
                self._max_keys,
                evictions,
            )

    def _deny(self, keys: tuple[Key, ...], cost: Cost, verdicts: list[Verdict], now_us: int) -> None:
        """Charge nothing: a limit under which the denied request would have passed reports what a peek reports.

        Migrations are written nevertheless: plan changes were by `_find`, and states that had to be re-dated are here.
        """
        for index, key in enumerate(keys):
            space, state = self._find(key, now_us, adopt=False)
            after, verdict = space.decide(state, now_us, 0, key.limit)
            if not verdicts[index][1]:
                verdicts[index] = verdict
            if after is not state and (cost[index] if type(cost) is tuple else cost):
                self._replace(space, key.identity, state, after)

    def _replace(self, space: CounterTable, identity: str, state: Any, after: Any) -> None:
        """Write a migrated state, unless a finalizer has changed it in the meantime."""
        if space.states.get(identity) is state:
            self._turn += 1
            space.states[identity] = after

    def _refund(self, call: Refund) -> bool:
        key, amount, id, at_us = call
        now_us = self._now_us()
        record = None if id is None else self._ids.get((key.limit.space, key.identity, id), now_us)
        if isinstance(call, Withdraw):
            if record is None or not self._is_last_holder(call, record):
                return False
            amount = record.left
        elif record is not None:
            if not record.holders or record.left < record.cost:  # the one refund of this id has been made
                return False
            amount = min(amount, record.left)
            at_us = record.at_us if at_us is None else at_us
        if not self._give_back(key, amount, at_us, now_us):
            return False
        if record is not None:
            record.left -= amount
        elif id is not None:
            self._keep_record(key, id, IdRecord(now_us, holders=0), now_us + refund_memory_us(key), now_us)
        return True

    def _is_last_holder(self, call: Refund, record: IdRecord) -> bool:
        """Let go of a record; True if no other caller relies on it, and then it is dropped."""
        if record.holders == 1:
            self._ids.drop((call.key.limit.space, call.key.identity, call.id))
            return True
        record.holders = max(0, record.holders - 1)
        return False

    def _give_back(self, key: Key, amount: int, at_us: int | None, now_us: int) -> bool:
        while True:
            turn = self._turn
            space, found = self._find(key, now_us)
            state = space.decide(found, now_us, 0, key.limit)[0]  # re-dated, if the clock was set back
            after = space.refund(state, now_us, amount, key.limit, at_us)
            if turn == self._turn:
                break
        if state is not found:
            self._replace(space, key.identity, found, state)
        if after is None or after == state:
            return False
        self._turn += 1
        space.states[key.identity] = after
        return True

    def _change_lease(self, call: Renew | Leave) -> bool:
        if self._change_lease_of(call.key, call):
            return True
        space = self._spaces.get(call.key.limit.space)
        is_shared = space is not None and _SHARED_IDENTITY in space.states
        return is_shared and self._change_lease_of(_shared_key(call.key), call)

    def _change_lease_of(self, key: Key, call: Renew | Leave) -> bool:
        now_us = self._now_us()
        while True:
            turn = self._turn
            space, state = self._find(key, now_us)
            if isinstance(call, Renew):
                after, held = concurrency.renew(state, now_us, key.limit, call.id)
            else:
                after, held = concurrency.leave(state, now_us, call.id)
            if turn == self._turn:
                break
        if held:
            self._turn += 1
            space.states[key.identity] = after
        return held

    def _find(self, key: Key, now_us: int, *, adopt: bool = True) -> tuple[CounterTable, Any]:
        """The key's space, and its state as the key's own limit has to see it."""
        limit, _, identity = key
        space = self._spaces.get(limit.space)
        if space is None:
            space = self._spaces[limit.space] = CounterTable(limit, self._meters)
            if limit.algorithm != "concurrency":  # whose ids are given out behind the lock
                self._short[limit.space] = space
        elif not space.states:
            space.obey(limit)
        state = space.states.get(identity)
        if space.only is limit or state is None or space.is_written_by(limit, identity):
            return space, state
        state = space.adopt(state, now_us, space.writers.get(identity, space.limit), limit)
        if adopt:
            space.write(key, state)
        return space, state

    def _put(self, space: CounterTable, key: Key, state: Any, now_us: int, reset_us: int) -> None:
        is_new = key.identity not in space.states
        space.write(key, state)
        is_shared = key.identity == _SHARED_IDENTITY
        if is_shared:
            self._note_shared()
        if is_new:
            self._drop_due(space, now_us)
            space.enlist(key.identity, now_us + reset_us)
            self._keys += not is_shared

    def _forget(self, key: Key) -> None:
        space = self._spaces.get(key.limit.space)
        if space is not None and key.identity in space.states:
            space.reset(key.identity)
            self._keys -= 1

    def _drop_due(self, space: CounterTable, now_us: int) -> None:
        """Drop keys that have been as new for a while: two at most, which is more than are inserted."""
        space.release(now_us, 2)
        for _ in range(2):
            identity = space.take_due((now_us - _MARGIN_US) >> SECOND_BITS)
            if identity is None:
                return
            if owed_us := space.debt(identity, now_us).owed_us:
                space.schedule(identity, now_us + owed_us)
            else:
                self._drop(space, identity)

    def _make_room(self, keys: tuple[Key, ...], cost: Cost, now_us: int) -> int:
        """Evict keys until there is room for those of the request that are new, and return for how many there is."""
        charged = [key for key, each in zip(keys, Check(keys, cost).costs, strict=True) if each]
        while self._keys + sum([self._is_new(key) for key in charged]) > self._max_keys and self._evict(now_us):
            pass
        return max(0, self._max_keys - self._keys)

    def _is_new(self, key: Key) -> bool:
        space = self._spaces.get(key.limit.space)
        return space is None or key.identity not in space.states

    def _evict(self, now_us: int) -> bool:
        """Evict at least one key; False if there is none, or all are blocked."""
        candidates: list[tuple[Debt, int, CounterTable, str]] = []
        spaces = list(self._spaces.values())
        if not spaces:
            return False
        for space in spaces:
            space.release(now_us, _CANDIDATES)
        for place in range(_MAX_PROBES):
            space = min(spaces, key=CounterTable.next_due)
            if space.next_due() == sys.maxsize:
                break
            identity = space.take_due(sys.maxsize)
            if identity is None:
                continue
            debt = space.debt(identity, now_us)
            if identity == _SHARED_IDENTITY and debt.owed_us:
                space.hold_back(identity, now_us + debt.owed_us)
            elif debt.blocked_us:
                space.hold_back(identity, now_us + debt.blocked_us)
            else:
                candidates.append((debt, place, space, identity))
                if len(candidates) == _CANDIDATES:
                    break
        candidates.sort()
        for rank, (debt, _, space, identity) in enumerate(candidates):
            if rank and debt.owed_us:
                space.schedule(identity, now_us + debt.owed_us)
                continue
            self._turn += 1
            self._drop(space, identity)
            self._evicted += 1
            if debt.owed_us:
                self._forgiven += 1
                _warn_now_and_then(
                    self._forgiven,
                    "memory store is full (%d keys): %d keys were evicted while in use; raise max_keys",
                    self._max_keys,
                )
        return bool(candidates)

    def _drop(self, space: CounterTable, identity: str) -> None:
        if identity in space.states:  # no finalizer has dropped it
            space.drop(identity)
            self._keys -= identity != _SHARED_IDENTITY

    def _note_shared(self) -> None:
        self._shared += 1
        _warn_now_and_then(
            self._shared,
            "memory store is full (%d keys), and all keys belong to blocked clients: %d requests of other clients were "
            "counted together; raise max_keys",
            self._max_keys,
        )


def _shared_key(key: Key) -> Key:
    return key._replace(identity=_SHARED_IDENTITY)


def _warn_now_and_then(count: int, message: str, max_keys: int) -> None:
    """Log at 1, 2, 4, 8 ... occurrences."""
    if count & (count - 1) == 0:
        logger.warning(message, max_keys, count)


class _Uncontended:
    """Holds the store's lock with the short path shut out."""

    __slots__ = ("_store", "_was_busy")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._lock.acquire()  # noqa: SLF001 - a part of the store, in its own file
        self._was_busy, self._store._busy = self._store._busy, True  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        self._store._busy = self._was_busy  # noqa: SLF001
        self._store._lock.release()  # noqa: SLF001
