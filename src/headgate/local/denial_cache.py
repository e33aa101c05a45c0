"""One denial that is remembered, and the counters that it rests on."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate._fork import reinit_after_fork
from headgate.algorithms import NEVER
from headgate.decisions import Decision
from headgate.local.single_flight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.stores.operations import Check

__all__ = ["CachedDenial", "CounterDenials", "CounterName", "DenialCache", "waits"]

CounterName: TypeAlias = tuple[str, str]
"""The limit's space, and the identity in it."""


class CounterDenials:
    """What a counter stood at when it was last told of."""

    __slots__ = ("charges", "limit", "name", "remaining", "reset_at_us", "told_us", "uses")

    def __init__(self, name: CounterName, limit: Limit) -> None:
        self.name = name
        self.limit: Limit | None = limit
        """None when nothing that rests on it holds any longer."""
        self.charges = 0
        """How many requests were seen to take from it: each makes who is denied here wait for longer."""
        self.uses = 0
        """By how many denials it is met."""
        self.told_us = self.remaining = self.reset_at_us = 0

    def is_of(self, limit: Limit) -> bool:
        return self.limit is limit or self.limit == limit

    def tell(self, verdict: Verdict, asked_us: int) -> None:
        self.told_us, self.remaining, self.reset_at_us = asked_us, verdict[0], asked_us + verdict[2]


class CachedDenial:
    """A request that is denied: for how long by each of its limits, from the instant before the store was asked."""

    __slots__ = ("asked_us", "at_us", "counters", "parts", "until_us")

    def __init__(
        self,
        call: Check,
        counters: list[CounterDenials],
        waits_us: list[int],
        asked_us: int,
        until_us: int,
        at_us: int,
    ) -> None:
        self.counters = counters
        self.parts = [
            (counter, cost, wait_us, counter.charges)
            for counter, cost, wait_us in zip(counters, call.costs, waits_us, strict=True)
        ]
        self.asked_us = asked_us
        self.until_us = until_us
        self.at_us = at_us

    def verdicts(self, keys: tuple[Key, ...], now_us: int, *, exactly: bool) -> tuple[Verdict, ...] | None:
        """What each limit says now; None if something has happened to one of them since.

        Time gives back to limits that deny and to those that don't, so that what remains may be more than was told;
        None also for that, where it has to be told exactly.
        """
        elapsed_us = now_us - self.asked_us
        told: list[Verdict] = []
        for (limit, _, _), (counter, cost, wait_us, charges) in zip(keys, self.parts, strict=True):
            if counter.limit is not limit and counter.limit != limit:
                return None
            if now_us < counter.told_us or (wait_us and counter.charges != charges):
                return None
            remaining, reset_us = counter.remaining, counter.reset_at_us - now_us
            if reset_us < 0:
                reset_us = 0
            # One more would pass; or all of it is there.
            stands_still = (wait_us > elapsed_us and remaining == cost - 1) or remaining == limit.capacity
            if exactly and now_us != counter.told_us and not stands_still:
                return None
            if wait_us > elapsed_us:
                if remaining >= cost:  # somebody, somewhere, has given something back
                    return None
                told.append((remaining, wait_us - elapsed_us, reset_us, 0))
            elif wait_us == NEVER:
                told.append((remaining, NEVER, reset_us, 0))
            elif wait_us or remaining >= cost:
                # It would pass here, and says what a peek says: in a queue, how long the next one waits.
                delay_us = reset_us if limit.algorithm == "leaky_bucket" else 0
                told.append((max(remaining, cost), 0, reset_us, delay_us))
            else:
                return None
        return tuple(told)


def waits(call: Check, decision: Decision) -> list[int] | None:
    """How long each limit denies the same request from now on, 0 where it does not, NEVER for ever; None where that is
    not known.

    A lease ends when its holder likes. An allowed answer knows only the longest wait: so of two limits that
    it has left with too little, nobody knows when the first of them ceases to deny.
    """
    if decision.allowed and not decision.again_us:
        return None
    if "concurrency" in [key.limit.algorithm for key in call.keys]:
        return None
    if not decision.allowed:
        waits_us = [verdict[1] for verdict in decision.verdicts]
    else:
        waits_us = [
            decision.again_us if verdict[0] < cost else 0
            for verdict, cost in zip(decision.verdicts, call.costs, strict=True)
        ]
        if len(waits_us) - waits_us.count(0) != 1:
            return None
    return waits_us


TRUST_US: Final = 5_000_000
"""For how long a denial is believed without asking again: the clocks of two machines drift, and a server's may step."""

MIN_DENIALS: Final = 3
"""Which denial in a row is the first to be remembered. One that is seldom asked for saves nothing; and whoever deletes
a counter by hand, or resets it elsewhere, finds the next request let in."""

MOST_FORGOTTEN: Final = 1_000
"""Counters of which is known when they were forgotten. For older ones, one instant stands for all."""

_new_decision = tuple.__new__

EntryName: TypeAlias = tuple[Any, ...]


class DenialCache:
    """What was denied, and until when; safe to be used from many threads.

    `most` is how many denials are remembered; those that nobody asked for the longest go first. A `clock` that is given
    is the store's own, too, so that it is exact for any length of time.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> from headgate.stores.operations import Check
    >>> from headgate.stores.memory import MemoryStore
    >>> from headgate.testing import FakeClock
    >>> clock = FakeClock()
    >>> store, denials = MemoryStore(clock), DenialCache(clock)
    >>> login = Check((Limit(1, timedelta(minutes=1), name="login").by("ada"),), 1)
    >>> for _ in range(2):
    ...     asked_us = denials.now_us()
    ...     denials.note(login, store.run(login), asked_us)
    >>> clock.advance(20)
    >>> denials.recall(login).reason
    'denied by login (1 per minute, token_bucket): 0 left, passes in 40 s'
    >>> clock.advance(40)
    >>> type(denials.recall(login)).__name__, denials.hits
    ('SingleFlight', 1)
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        most: int = 10_000,
        exactly: bool = False,
        knocks: int = 0,
        is_heard: Callable[[int, Limit], bool] = lambda cost, limit: True,
    ) -> None:
        self._clock = clock
        self._exactly = exactly
        """Whether nothing is told that could be more by now."""
        self._knocks = knocks
        """Which of the denials of a request is the first to be remembered; 0: also one that is yet to come."""
        self._is_heard = is_heard
        """Whether refunds elsewhere, by which so much of a limit may pass, are heard of here."""
        self.most = most
        self.hits = 0
        """How many answers were given from memory."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it, nor to finish what it guarded."""
        self._lock = threading.RLock()
        self._entries: OrderedDict[EntryName, CachedDenial] = OrderedDict()
        self._counters: dict[CounterName, CounterDenials] = {}
        """Those that an entry meets."""
        self._inquiries: dict[EntryName, SingleFlight] = {}
        """Of entries that are over: requests that are on their way to the store, for all that are alike."""
        self._knocked: OrderedDict[EntryName, int] = OrderedDict()
        """How often what was denied came again, up to where it is remembered."""
        self._forgotten: OrderedDict[CounterName, int] = OrderedDict()
        self._all_forgotten_us = -1

    def __len__(self) -> int:
        """How many are kept. One that is over goes when it is asked for, or when it is the oldest."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """Whether `recall` may have an answer to anything."""
        return True if self._entries or self._inquiries else False  # noqa: SIM210 - runs on every request

    def now_us(self) -> int:
        """The instant to give to `note`: read it before the store is asked."""
        return time.monotonic_ns() // 1000 if self._clock is None else self._clock.now_us()

    def recall(self, call: Check) -> Decision | SingleFlight | None:
        """The denial of this request, as the store would tell it now; None where the store has to be asked.

        Whether it is allowed, who denies it, and the times are the store's own. `remaining` is what was told last.

        An inquiry, where the denial is just over: who can take it asks the store, and then calls `end`; all others wait
        for that, and then look for what it `brought`.
        """
        keys, cost, id = call
        if len(keys) == 1:
            # The common case by itself: this runs on every request.
            limit, _, identity = keys[0]
            name: EntryName = (limit.space, identity, cost)
        else:
            name = _name(call)
        if name not in self._entries:
            return self._inquiries.get(name) if self._inquiries else None
        now_us = self.now_us()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or now_us < entry.asked_us:
                return None
            is_over = now_us >= entry.until_us
            verdicts = None if is_over else entry.verdicts(keys, now_us, exactly=self._exactly)
            if verdicts is None:
                del self._entries[name]
                self._release(entry)
                return self._inquire(name) if is_over else None
            self._entries.move_to_end(name)
            self.hits += 1
        return _new_decision(
            Decision, (False, keys, verdicts, id, None, entry.at_us + now_us - entry.asked_us, 0, cost)
        )

    def end(self, call: Check, inquiry: SingleFlight, decision: Decision | None = None) -> None:
        """Whoever asked has noted the answer, or has none: who waits for it goes on."""
        name, left, is_denied = _name(call), 0, False
        if decision is not None:
            is_denied = not decision.allowed or decision.again_us > 0
            costs = zip(call.costs, decision.verdicts, strict=True)
            left = 0 if is_denied else min([verdict[0] // cost for cost, verdict in costs if cost], default=0)
        with self._lock:
            if not inquiry.leave(is_denied=is_denied):
                return
            if self._inquiries.get(name) is inquiry:
                del self._inquiries[name]
                if left and inquiry.is_awaited:
                    self._inquiries[name] = SingleFlight(left)
        inquiry.end()

    def brought(self, call: Check, came_us: int) -> Decision | None:
        """The denial of a request that came at that instant and has waited for an inquiry; None if that brought none.

        As the store would tell it now. If it is over by now, because this process is behind, as it was told to whoever
        came: so those are answered who travel together.
        """
        name = _name(call)
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            at_us = max(entry.asked_us, self.now_us())
            if at_us >= entry.until_us:
                at_us = max(entry.asked_us, came_us)
            verdicts = entry.verdicts(call.keys, at_us, exactly=self._exactly) if at_us < entry.until_us else None
            if verdicts is None:
                return None
            self._entries.move_to_end(name)
            self.hits += 1
        return Decision(False, call.keys, verdicts, call.id, None, entry.at_us + at_us - entry.asked_us, 0, call.cost)

    def note(self, call: Check, decision: Decision, asked_us: int) -> None:
        """Learn from the store's answer to a request that `recall` had none for; `asked_us` is from before it was
        asked.

        Allowed ones count as well: they change what entries rest on, and may say when the same would pass again.
        """
        if decision.degraded is not None:
            return
        if decision.allowed and not decision.again_us:
            # The common case by itself: it passed, and nothing that is remembered rests on what it took.
            for limit, _, identity in call.keys:
                if (limit.space, identity) in self._counters:
                    break
            else:
                return
        waits_us = waits(call, decision)
        if waits_us is not None and not self._hears_of_all(call, waits_us):
            waits_us = None
        names = [(limit.space, identity) for limit, _, identity in call.keys]
        with self._lock:
            for name, key, cost, verdict in zip(names, call.keys, call.costs, decision.verdicts, strict=True):
                counter = self._counters.get(name)
                if counter is None:
                    continue
                if counter.is_of(key.limit):
                    counter.tell(verdict, asked_us)
                    counter.charges += decision.allowed and cost > 0
                else:
                    self._retire(name)
            if waits_us is not None and self._is_knocking(call, decision) and not self._is_outdated(names, asked_us):
                self._remember(call, decision, waits_us, names, asked_us)

    def forget(self, space: str, identity: str) -> None:
        """Drop what rests on this counter: something was given back, or it was reset, or its limit has changed.

        To be called when that is done. Answers to what was asked before are not learnt from any more.
        """
        name = (space, identity)
        with self._lock:
            self._retire(name)
            self._forgotten[name] = self.now_us()
            self._forgotten.move_to_end(name)
            if len(self._forgotten) > MOST_FORGOTTEN:
                _, forgotten_us = self._forgotten.popitem(last=False)
                self._all_forgotten_us = max(self._all_forgotten_us, forgotten_us)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._counters.clear()
            self._forgotten.clear()
            self._all_forgotten_us = self.now_us()

    def _inquire(self, name: EntryName) -> SingleFlight:
        inquiry = self._inquiries.get(name)
        if inquiry is None or inquiry.is_lost:
            inquiry = self._inquiries[name] = SingleFlight()
        return inquiry

    def _remember(
        self, call: Check, decision: Decision, waits_us: list[int], names: list[CounterName], asked_us: int
    ) -> None:
        longest_us = TRUST_US if NEVER in waits_us else max(waits_us)
        if self._clock is None:
            longest_us = min(longest_us, TRUST_US)
        counters = []
        for name, key, verdict in zip(names, call.keys, decision.verdicts, strict=True):
            counter = self._counters.get(name)
            if counter is None:
                counter = self._counters[name] = CounterDenials(name, key.limit)
                counter.tell(verdict, asked_us)
            counter.uses += 1
            counters.append(counter)
        entry = CachedDenial(call, counters, waits_us, asked_us, asked_us + longest_us, decision.at_us)
        name = _name(call)
        replaced = self._entries.pop(name, None)
        self._entries[name] = entry
        if replaced is not None:
            self._release(replaced)
        while len(self._entries) > self.most:
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)

    def _is_knocking(self, call: Check, decision: Decision) -> bool:
        """Whether it was denied so often by now that it is worth to be remembered."""
        name = _name(call)
        knocked = self._knocked.get(name, 0)
        if knocked < self._knocks and not decision.allowed:
            knocked = self._knocked[name] = knocked + 1
            if len(self._knocked) > self.most:
                self._knocked.popitem(last=False)
        elif knocked:
            self._knocked.move_to_end(name)
        return knocked >= self._knocks

    def _hears_of_all(self, call: Check, waits_us: list[int]) -> bool:
        """Whether nothing can end the denial early without being heard of."""
        parts = zip(call.keys, call.costs, waits_us, strict=True)
        return all(wait_us <= 0 or self._is_heard(cost, key.limit) for key, cost, wait_us in parts)

    def _is_outdated(self, names: list[CounterName], asked_us: int) -> bool:
        """Whether one of the counters was forgotten after the store was asked: maybe also after it answered."""
        forgotten_us = max([self._forgotten.get(name, -1) for name in names])
        return asked_us <= max(forgotten_us, self._all_forgotten_us)

    def _retire(self, name: CounterName) -> None:
        """No entry that rests on this counter holds any longer. Each finds out when it is asked for."""
        counter = self._counters.pop(name, None)
        if counter is not None:
            counter.limit = None

    def _release(self, entry: CachedDenial) -> None:
        for counter in entry.counters:
            counter.uses -= 1
            if not counter.uses and self._counters.get(counter.name) is counter:
                del self._counters[counter.name]


def _name(call: Check) -> EntryName:
    if len(call.keys) == 1:
        limit, _, identity = call.keys[0]
        return limit.space, identity, call.cost
    return (call.cost, *[text for limit, _, identity in call.keys for text in (limit.space, identity)])
