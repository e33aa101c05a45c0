"""Denials that are remembered until the exact moment at which the same request could pass: a client that keeps on
knocking is answered here, and the store is asked only when there is something to be had.

What is remembered never denies what the store would let pass. A denial at an instant, with a wait, holds until both are
over, as nobody but time gives anything back; whoever does so (a refund, a reset) says so by `forget`. The instant is
the one before the store was asked, which is not later than the store's own. An entry answers its own keys at its own
costs: smaller costs may pass, and of larger ones nobody has said when they will.

Only who keeps on knocking is remembered: from the third denial on, and from then on also by what the store says of
requests that pass.

What a counter stood at, all entries that meet it share, as told last: a request that passed elsewhere on one of an
entry's limits need not undo the entry, unless that limit is the one that denies, or has become one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate._forks import renew_in_children
from headgate.algorithms import NEVER
from headgate.decisions import Decision
from headgate.shield.denial import Counter, Denial, waits
from headgate.shield.inquiry import Inquiry

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.clock import Clock
    from headgate.limits import Limit
    from headgate.shield.denial import CounterName
    from headgate.stores.calls import Check

__all__ = ["Denials"]

TRUST_US: Final = 5_000_000
"""For how long a denial is believed without asking again: the clocks of two machines drift, and a server's may step."""

KNOCKS: Final = 3
"""Which denial in a row is the first to be remembered. One that is seldom asked for saves nothing; and whoever deletes
a counter by hand, or resets it elsewhere, finds the next request let in."""

MOST_FORGOTTEN: Final = 1_000
"""Counters of which is known when they were forgotten. For older ones, one instant stands for all."""

_new_decision = tuple.__new__

EntryName: TypeAlias = tuple[Any, ...]


class Denials:
    """What was denied, and until when; safe to be used from many threads.

    `most` is how many denials are remembered; those that nobody asked for the longest go first. A `clock` that is given
    is the store's own, too, so that it is exact for any length of time.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> from headgate.stores.calls import Check
    >>> from headgate.stores.memory import MemoryStore
    >>> from headgate.testing import FakeClock
    >>> clock = FakeClock()
    >>> store, denials = MemoryStore(clock), Denials(clock)
    >>> login = Check((Limit(1, timedelta(minutes=1), name="login").by("ada"),), 1)
    >>> for _ in range(2):
    ...     asked_us = denials.now_us()
    ...     denials.note(login, store.run(login), asked_us)
    >>> clock.advance(20)
    >>> denials.recall(login).reason
    'denied by login (1 per minute, token_bucket): 0 left, passes in 40 s'
    >>> clock.advance(40)
    >>> type(denials.recall(login)).__name__, denials.hits
    ('Inquiry', 1)
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
        self.renew_after_fork()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it, nor to finish what it guarded."""
        self._lock = threading.RLock()
        self._entries: OrderedDict[EntryName, Denial] = OrderedDict()
        self._counters: dict[CounterName, Counter] = {}
        """Those that an entry meets."""
        self._inquiries: dict[EntryName, Inquiry] = {}
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

    def recall(self, call: Check) -> Decision | Inquiry | None:
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

    def end(self, call: Check, inquiry: Inquiry, decision: Decision | None = None) -> None:
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
                    self._inquiries[name] = Inquiry(left)
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

    def _inquire(self, name: EntryName) -> Inquiry:
        inquiry = self._inquiries.get(name)
        if inquiry is None or inquiry.is_lost:
            inquiry = self._inquiries[name] = Inquiry()
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
                counter = self._counters[name] = Counter(name, key.limit)
                counter.tell(verdict, asked_us)
            counter.uses += 1
            counters.append(counter)
        entry = Denial(call, counters, waits_us, asked_us, asked_us + longest_us, decision.at_us)
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

    def _release(self, entry: Denial) -> None:
        for counter in entry.counters:
            counter.uses -= 1
            if not counter.uses and self._counters.get(counter.name) is counter:
                del self._counters[counter.name]


def _name(call: Check) -> EntryName:
    if len(call.keys) == 1:
        limit, _, identity = call.keys[0]
        return limit.space, identity, call.cost
    return (call.cost, *[text for limit, _, identity in call.keys for text in (limit.space, identity)])
