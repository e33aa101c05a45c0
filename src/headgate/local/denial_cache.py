"""An exact negative cache: denied requests, until the instant at which the store would let them pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate._fork import reinit_after_fork
from headgate.algorithms import NEVER
from headgate.decisions import Decision
from headgate.local.single_flight import SingleFlight
from headgate.runtime import SYSTEM, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.stores.operations import Check

__all__ = ["DenialCache"]

MAX_AGE_US: Final = 5_000_000
"""Upper bound on the age of an entry: the clocks of two machines drift, and a server's may step."""

MIN_DENIALS: Final = 3
"""The denial in a row from which a request is cached. Caching rare requests saves nothing, and after a counter was
deleted by hand, or reset by another process, the next request is let in."""

MAX_INVALIDATIONS: Final = 1_000
"""Counters whose invalidation times are kept; for older ones, one instant applies to all."""

CounterName: TypeAlias = tuple[str, str]
"""A limit's space, and the identity in it."""

EntryName: TypeAlias = tuple[Any, ...]

_new_decision = tuple.__new__


class DenialCache:
    """Denied requests and the times at which they pass; thread-safe.

    `max_entries` bounds the entries; the least recently used go first. With an injected `clock`, which is then the
    store's, too, entries are exact for any length of time.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> from headgate.stores.operations import Check
    >>> from headgate.stores.memory import MemoryStore
    >>> from headgate.testing import FakeClock
    >>> clock = FakeClock()
    >>> store, cache = MemoryStore(clock), DenialCache(clock)
    >>> login = Check((Limit(1, timedelta(minutes=1), name="login").by("ada"),), 1)
    >>> for _ in range(2):
    ...     sent_us = cache.now_us()
    ...     cache.record(login, store.run(login), sent_us)
    >>> clock.advance(20)
    >>> cache.get(login).reason
    'denied by login (1 per minute, token_bucket): 0 left, passes in 40 s'
    >>> clock.advance(40)
    >>> type(cache.get(login)).__name__, cache.hits
    ('SingleFlight', 1)
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        max_entries: int = 10_000,
        exact: bool = False,
        min_denials: int = 0,
        is_refund_announced: Callable[[int, Limit], bool] = lambda cost, limit: True,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self._clock, self._exact = clock, exact
        """True to answer only where `remaining` cannot have grown since."""
        self._min_denials = min_denials
        """0 to cache a request also when the answer that allows it says that the next one is denied."""
        self._is_refund_announced = is_refund_announced
        """Called with a cost and a limit: True if this process receives every refund after which that cost passes."""
        self._runtime = runtime
        self.max_entries = max_entries
        self.hits = 0
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, and all that it guards, which a thread of the parent may have been changing."""
        self._lock = threading.RLock()
        self._entries: OrderedDict[EntryName, _Entry] = OrderedDict()
        self._counters: dict[CounterName, _Counter] = {}
        """The counters of all entries."""
        self._flights: dict[EntryName, SingleFlight] = {}
        """By entries that have ended: the requests that ask the store."""
        self._denials: OrderedDict[EntryName, int] = OrderedDict()
        """Denials of each request, up to the number from which it is cached."""
        self._invalidated_us: OrderedDict[CounterName, int] = OrderedDict()
        self._all_invalidated_us = -1

    def __len__(self) -> int:
        """Entries, including those that have ended and were not looked up since."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """False if `get` has no answer to anything."""
        return True if self._entries or self._flights else False  # noqa: SIM210 - runs on every request

    def now_us(self) -> int:
        """The instant to pass to `record`: read it before the store is asked."""
        return self._runtime.monotonic_ns() // 1000 if self._clock is None else self._clock.now_us()

    def get(self, check: Check) -> Decision | SingleFlight | None:
        """The denial of this request as the store would give it now; None if the store has to be asked.

        Outcome, limits and times are exact; `remaining` is of the last answer. A `SingleFlight` if the denial has just
        ended: its leader asks the store and calls `end_flight`, the others wait and then call `get_from_flight`.
        """
        keys, cost, id = check
        if len(keys) == 1:  # the common case without a call, as this runs on every request
            limit, _, identity = keys[0]
            name: EntryName = (limit.space, identity, cost)
        else:
            name = _entry_name(check)
        if name not in self._entries:
            return self._flights.get(name) if self._flights else None
        now_us = self.now_us()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or now_us < entry.sent_us:
                return None
            is_over = now_us >= entry.until_us
            verdicts = None if is_over else entry.verdicts(keys, now_us, exact=self._exact)
            if verdicts is None:
                del self._entries[name]
                self._release_counters(entry)
                if is_over and (name not in self._flights or self._flights[name].is_lost):
                    self._flights[name] = SingleFlight(now=self._runtime.monotonic)
                return self._flights[name] if is_over else None
            self._entries.move_to_end(name)
            self.hits += 1
        return _new_decision(Decision, (False, keys, verdicts, id, None, entry.at_us + now_us - entry.sent_us, 0, cost))

    def end_flight(self, check: Check, flight: SingleFlight, decision: Decision | None = None) -> None:
        """Wake the waiters of a flight, after the leader has recorded the decision, or failed."""
        name, left, is_denied = _entry_name(check), 0, False
        if decision is not None:
            is_denied = not decision.allowed or decision.next_allowed_us > 0
            costs = zip(check.costs, decision.verdicts, strict=True)
            left = 0 if is_denied else min([verdict[0] // cost for cost, verdict in costs if cost], default=0)
        with self._lock:
            if not flight.finish_leader(is_denied=is_denied):
                return
            if self._flights.get(name) is flight:
                del self._flights[name]
                if left and flight.has_waiters:
                    self._flights[name] = SingleFlight(left, self._runtime.monotonic)
        flight.end()

    def get_from_flight(self, check: Check, received_us: int) -> Decision | None:
        """The denial of a request that was received at that instant and has waited for a flight; None if the flight
        brought no denial.

        If the denial has ended by now, because this process is behind, the request is denied as of when it was
        received: as it would have been in one batch with the leader.
        """
        name = _entry_name(check)
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            at_us = max(entry.sent_us, self.now_us())
            if at_us >= entry.until_us:
                at_us = max(entry.sent_us, received_us)
            verdicts = entry.verdicts(check.keys, at_us, exact=self._exact) if at_us < entry.until_us else None
            if verdicts is None:
                return None
            self._entries.move_to_end(name)
            self.hits += 1
        decided_us = entry.at_us + at_us - entry.sent_us
        return Decision(False, check.keys, verdicts, check.id, None, decided_us, 0, check.cost)

    def record(self, check: Check, decision: Decision, sent_us: int) -> None:
        """Learn from the store's answer to a request that was sent after `sent_us`.

        Allowed requests count, too: they change the counters of entries, and may say when the same would pass again.
        """
        if decision.degraded is not None:
            return
        if decision.allowed and not decision.next_allowed_us:
            # The common case: it passed, and no entry depends on its counters.
            for limit, _, identity in check.keys:
                if (limit.space, identity) in self._counters:
                    break
            else:
                return
        waits_us = _waits_us(check, decision)
        names = [(limit.space, identity) for limit, _, identity in check.keys]
        with self._lock:
            for name, key, cost, verdict in zip(names, check.keys, check.costs, decision.verdicts, strict=True):
                counter = self._counters.get(name)
                if counter is None:
                    continue
                if counter.limit is key.limit or counter.limit == key.limit:
                    counter.update(verdict, sent_us)
                    counter.charges += decision.allowed and cost > 0
                else:
                    self._retire(name)
            if waits_us is None or not self._hears_of_refunds(check, waits_us):
                return
            if self._is_repeated(check, decision) and not self._is_outdated(names, sent_us):
                self._add(check, decision, waits_us, names, sent_us)

    def invalidate(self, space: str, identity: str) -> None:
        """Drop the entries of a counter, after it was refunded or reset, or its limit has changed.

        Answers to requests that were sent before are not recorded any more.
        """
        name = (space, identity)
        with self._lock:
            self._retire(name)
            self._invalidated_us[name] = self.now_us()
            self._invalidated_us.move_to_end(name)
            if len(self._invalidated_us) > MAX_INVALIDATIONS:
                _, at_us = self._invalidated_us.popitem(last=False)
                self._all_invalidated_us = max(self._all_invalidated_us, at_us)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._counters.clear()
            self._invalidated_us.clear()
            self._all_invalidated_us = self.now_us()

    def _add(
        self, check: Check, decision: Decision, waits_us: list[int], names: list[CounterName], sent_us: int
    ) -> None:
        longest_us = MAX_AGE_US if NEVER in waits_us else max(waits_us)
        if self._clock is None:
            longest_us = min(longest_us, MAX_AGE_US)
        parts = []
        for name, key, cost, wait_us, verdict in zip(
            names, check.keys, check.costs, waits_us, decision.verdicts, strict=True
        ):
            counter = self._counters.get(name)
            if counter is None:
                counter = self._counters[name] = _Counter(name, key.limit)
                counter.update(verdict, sent_us)
            counter.uses += 1
            parts.append((counter, cost, wait_us, counter.charges))
        entry_name = _entry_name(check)
        replaced = self._entries.pop(entry_name, None)
        self._entries[entry_name] = _Entry(parts, sent_us, sent_us + longest_us, decision.at_us)
        if replaced is not None:
            self._release_counters(replaced)
        while len(self._entries) > self.max_entries:
            self._release_counters(self._entries.popitem(last=False)[1])

    def _is_repeated(self, check: Check, decision: Decision) -> bool:
        """Count a denial; True if the request was denied often enough to be cached."""
        name = _entry_name(check)
        denials = self._denials.get(name, 0)
        if denials < self._min_denials and not decision.allowed:
            denials = self._denials[name] = denials + 1
            if len(self._denials) > self.max_entries:
                self._denials.popitem(last=False)
        elif denials:
            self._denials.move_to_end(name)
        return denials >= self._min_denials

    def _hears_of_refunds(self, check: Check, waits_us: list[int]) -> bool:
        """True if this process receives a message of everything that ends the denial early."""
        parts = zip(check.keys, check.costs, waits_us, strict=True)
        return all(wait_us <= 0 or self._is_refund_announced(cost, key.limit) for key, cost, wait_us in parts)

    def _is_outdated(self, names: list[CounterName], sent_us: int) -> bool:
        """True if one of the counters was invalidated after the check was sent, perhaps after it was answered."""
        invalidated_us = max([self._invalidated_us.get(name, -1) for name in names])
        return sent_us <= max(invalidated_us, self._all_invalidated_us)

    def _retire(self, name: CounterName) -> None:
        """Invalidate all entries of a counter; they are dropped when they are looked up."""
        counter = self._counters.pop(name, None)
        if counter is not None:
            counter.limit = None

    def _release_counters(self, entry: _Entry) -> None:
        for counter, *_ in entry.parts:
            counter.uses -= 1
            if not counter.uses and self._counters.get(counter.name) is counter:
                del self._counters[counter.name]


@dataclass(slots=True, eq=False)
class _Counter:
    """The last known state of a counter."""

    name: CounterName
    limit: Limit | None
    """None once its entries are invalid."""
    charges: int = 0
    """Requests seen to be charged to it: each makes the denied ones wait longer."""
    uses: int = 0
    """Entries that depend on it."""
    updated_us: int = 0
    remaining: int = 0
    reset_at_us: int = 0

    def update(self, verdict: Verdict, sent_us: int) -> None:
        self.updated_us, self.remaining, self.reset_at_us = sent_us, verdict[0], sent_us + verdict[2]


class _Entry(NamedTuple):
    """A denied request: how long each limit denies it, from the instant before the store was asked."""

    parts: list[tuple[_Counter, int, int, int]]
    """Of each limit: its counter, the cost, the wait, and the charges of the counter at that time."""
    sent_us: int
    until_us: int
    at_us: int

    def verdicts(self, keys: tuple[Key, ...], now_us: int, *, exact: bool) -> tuple[Verdict, ...] | None:
        """The verdict of each limit now; None if one of the counters has changed since.

        Limits refill over time, those that deny as well as the others, so `remaining` may be more than it was. Where
        it has to be exact, that also gives None.
        """
        elapsed_us = now_us - self.sent_us
        verdicts: list[Verdict] = []
        for (limit, _, _), (counter, cost, wait_us, charges) in zip(keys, self.parts, strict=True):
            if counter.limit is not limit and counter.limit != limit:
                return None
            if now_us < counter.updated_us or (wait_us and counter.charges != charges):
                return None
            remaining, reset_us = counter.remaining, counter.reset_at_us - now_us
            if reset_us < 0:
                reset_us = 0
            # With one more it would pass; or the counter is full.
            is_constant = (wait_us > elapsed_us and remaining == cost - 1) or remaining == limit.capacity
            if exact and now_us != counter.updated_us and not is_constant:
                return None
            if wait_us > elapsed_us:
                if remaining >= cost:  # another process has refunded something
                    return None
                verdicts.append((remaining, wait_us - elapsed_us, reset_us, 0))
            elif wait_us == NEVER:
                verdicts.append((remaining, NEVER, reset_us, 0))
            elif wait_us or remaining >= cost:
                # This limit would let it pass, and reports what a peek reports: for a queue, the delay of the next one.
                delay_us = reset_us if limit.algorithm == "leaky_bucket" else 0
                verdicts.append((max(remaining, cost), 0, reset_us, delay_us))
            else:
                return None
        return tuple(verdicts)


def _waits_us(check: Check, decision: Decision) -> list[int] | None:
    """The time for which each limit denies the same request: 0 if it does not, NEVER for ever; None if unknown.

    A lease may end at any moment, and the end of a denial by a fair limit depends on other tenants. An allowed answer
    has only the longest wait: if it leaves two limits with too little, the wait of the other one is unknown.
    """
    if decision.allowed and not decision.next_allowed_us:
        return None
    algorithms = [key.limit.algorithm for key in check.keys]
    if {"concurrency", "pool"} & {*algorithms}:
        return None
    if "fair_share" in algorithms and (decision.allowed or decision.verdicts[algorithms.index("fair_share")][1]):
        return None
    if not decision.allowed:
        return [verdict[1] for verdict in decision.verdicts]
    waits_us = [
        decision.next_allowed_us if verdict[0] < cost else 0
        for verdict, cost in zip(decision.verdicts, check.costs, strict=True)
    ]
    return waits_us if len(waits_us) - waits_us.count(0) == 1 else None


def _entry_name(check: Check) -> EntryName:
    if len(check.keys) == 1:
        limit, _, identity = check.keys[0]
        return limit.space, identity, check.cost
    return (check.cost, *[text for limit, _, identity in check.keys for text in (limit.space, identity)])
