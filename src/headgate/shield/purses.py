"""Prepaid tokens for hot counters: most checks of a hot key are answered in this process, and none too many.

An order is an ordinary check at a larger cost, so that the store stays the truth and needs no script for it. Whatever
passes here was charged there before, and at most a lease earlier: in every span D, the whole fleet lets no more than
C + r(D + L) pass. See docs/decisions/0012-prepaid-tokens.md for the proof.

Nothing in here waits or knows a store: where one has to be asked, the answer is a generator that yields the check to
send, and is sent the decision.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from headgate._forks import renew_in_children
from headgate.decisions import Decision
from headgate.shield.heat import HOT_RATE, Heat
from headgate.shield.orders import Item, Order, denial, standing
from headgate.shield.purse import Purse, PursesStats, can_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.shield.heat import Counter
    from headgate.stores.calls import Check, Refund

__all__ = ["LEASE_US", "Ordering", "Purses"]

LEASE_US: Final = 100_000
USEFUL_US: Final = 1_000_000
"""For how long purses are asked after a request was seen that is hot on all its keys: a lease is over by then."""
MOST_PURSES: Final = 256
"""More counters than this cannot be hot in one process: each is asked a thousand times a second."""

Ordering: TypeAlias = "Generator[Check, Decision, Decision]"
"""Yields the check to send, is sent the store's decision, returns the caller's."""


class Purses:
    """The prepaid tokens of all hot counters of this process.

    `lease_us` is how long a token may be held, `nodes` tells how many processes share the limits (only the size of
    orders depends on it), and `now_us` is a clock that does not jump.
    """

    def __init__(
        self,
        *,
        lease_us: int = LEASE_US,
        nodes: Callable[[], int] = lambda: 1,
        now_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        self.lease_us = lease_us
        self._nodes = nodes
        self._now_us = now_us
        self._announced: dict[str, list[Limit]] = {}
        self._excluded: frozenset[str] = frozenset()
        self._allowed = self._denied = self._orders = self._found = 0
        self._begin()
        renew_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._heat = Heat()
        self._purses: dict[Counter, Purse] = {}
        self._useful_until_us = 0
        self._is_useful = False
        self._returns: list[Refund] = []
        self._pending = 0

    def renew_after_fork(self) -> None:
        """What was prepaid is the parent's to spend: in both, it would be spent twice."""
        self._begin()

    def __bool__(self) -> bool:
        """Whether `provide` may have anything for anybody. Not for requests that always meet a cold key, too: where all
        are such, no one need ask, though some keys are hot."""
        return bool(self._announced or (self._is_useful and self._purses))

    @property
    def pending_orders(self) -> int:
        """Orders sent to the store and not yet answered."""
        return self._pending

    @property
    def has_refunds(self) -> bool:
        """True if `overdue` may return something, now or once tokens held here expire."""
        return bool(self._purses or self._returns)

    @property
    def stats(self) -> PursesStats:
        with self._lock:
            now_us = self._now_us()
            held = sum([purse.held(now_us) for purse in self._purses.values()])
            return PursesStats(len(self._purses), held, self._allowed, self._denied, self._orders, self._found)

    def sample(self, call: Check) -> None:
        """Look at one check in `SAMPLED_EVERY`, however it is answered: this finds what is hot, and what is no more."""
        with self._lock:
            now_us = self._now_us()
            for key, cost in zip(call.keys, call.costs, strict=True):
                limit, _, identity = key
                if cost and self._can_lease(limit) and self._heat.note((limit.space, identity), now_us):
                    self._open(key, now_us)
            self._close_cold(now_us)
            if self._purses and all((key.limit.space, key.identity) in self._purses for key in call.keys):
                self._useful_until_us = now_us + USEFUL_US
            self._is_useful = now_us < self._useful_until_us

    def provide(self, call: Check) -> Ordering | Decision | None:
        """What a check gets out of the purses.

        A decision: it was answered here. None: not all of its keys are hot, or another order is on its way; ask the
        store as if there were no purses. Else a generator that has to be run at once: it yields the check to send and
        returns the decision. If the store fails, throw that in: it comes out again, and nothing is held for it.

        A driver that is cancelled while the store works on an order must still send the answer in before it closes
        the generator. Otherwise the tokens charged for later requests are lost.
        """
        keys, cost, id = call
        if len(keys) == 1 and type(cost) is int:
            # The common case by itself: one key that has more than enough.
            limit, _, identity = keys[0]
            purse = self._purses.get((limit.space, identity))
            if purse is None and not self._announced:
                return None
            if purse is not None and purse.limit is limit and cost:
                with self._lock:
                    now_us = self._now_us()
                    tokens = purse.tokens - cost
                    # Little is left, and no more is there yet, or on its way: then it has to be ordered.
                    is_low = tokens < purse.low and not purse.later and now_us >= purse.order_until_us
                    if tokens >= 0 and now_us < purse.ends_us and not is_low:
                        purse.tokens = tokens
                        purse.demand += cost
                        self._allowed += 1
                        since_us = now_us - purse.said_us
                        if purse.later:  # which end later, too
                            tokens += sum([batch.tokens for batch in purse.later])
                        verdict = ((purse.left or 0) + tokens, 0, max(0, purse.reset_us - since_us), 0)
                        return Decision(True, keys, (verdict,), id, None, purse.at_us + since_us, 0, cost)
                    if not purse.tokens and cost >= purse.rest_from and purse.dry and now_us < purse.rest_until_us:
                        purse.demand += cost
                        self._denied += 1
                        return denial(call, [(purse, cost)], now_us)
        with self._lock:
            now_us = self._now_us()
            return self._paid(call, now_us) or self._provide(call, now_us)

    def announce(self, limits: Iterable[Limit]) -> None:
        """These, and no others, are hot from the first check on, and get larger provisions: a burst was announced."""
        announced: dict[str, list[Limit]] = {}
        for limit in limits:
            if can_lease(limit, self.lease_us):
                announced.setdefault(limit.space, []).append(limit)
        with self._lock:
            self._announced = announced
            for purse in self._purses.values():
                purse.generous = self._is_announced(purse.limit)

    def exclude(self, limits: Iterable[Limit]) -> None:
        """All limits that go by the names of these, and no others, are never leased."""
        with self._lock:
            self._excluded = frozenset([limit.space for limit in limits])
            for counter in [counter for counter in self._purses if counter[0] in self._excluded]:
                self._close(counter, self._now_us())

    def forget(self, space: str, identity: str) -> None:
        """The counter was reset, or its limit has changed: what was prepaid is worth nothing any more, and is not given
        back, either."""
        with self._lock:
            now_us = self._now_us()
            self._returns = [
                refund for refund in self._returns if (refund.key.limit.space, refund.key.identity) != (space, identity)
            ]
            purse = self._purses.get((space, identity))
            if purse is not None:
                purse.drop()
                # A new one: what an order that is still on its way brings is put into the old, which nobody looks at.
                self._purses[space, identity] = self._purse(purse.key, now_us, purse.per_second)

    def deny(self, call: Check, decision: Decision, asked_us: int) -> None:
        """The store was asked at that instant for a check that nothing was held for, and has denied it: whoever finds
        nothing here either need not ask for the same."""
        with self._lock:
            now_us = self._now_us()
            for key, cost, verdict in zip(call.keys, call.costs, decision.verdicts, strict=True):
                purse = self._purses.get((key.limit.space, key.identity))
                if purse is None or purse.limit != key.limit:
                    continue
                if verdict[1] > 0 and asked_us > purse.since_us:
                    purse.hear(verdict, decision.at_us, now_us)
                    purse.deny(cost, verdict, now_us)

    def awaken(self, space: str, identity: str) -> None:
        """Something was given back to the counter: it may pass again before the time that was told."""
        with self._lock:
            purse = self._purses.get((space, identity))
            if purse is not None:
                purse.awaken(self._now_us())

    def overdue(self) -> list[Refund]:
        """What was held too long, for the store. Send it at once, or not at all: it is right for a short while only."""
        with self._lock:
            now_us = self._now_us()
            self._close_cold(now_us)
            refunds, self._returns = self._returns, []
            for purse in self._purses.values():
                refunds += purse.give_back(now_us)
            return refunds

    def clear(self) -> list[Refund]:
        """Hold nothing any more; what was not spent goes back to the store."""
        with self._lock:
            now_us = self._now_us()
            for counter in list(self._purses):
                self._close(counter, now_us)
            refunds, self._returns = self._returns, []
            return refunds

    # ------------------------------------------------- behind the lock

    def _paid(self, call: Check, now_us: int) -> Decision | None:
        """The short way for several keys: all have more than enough."""
        purses = []
        for key, cost in zip(call.keys, call.costs, strict=True):
            purse = self._purses.get((key.limit.space, key.identity))
            if purse is None or purse.limit is not key.limit or not 0 < cost <= purse.tokens:
                return None
            is_low = purse.tokens - cost < purse.low and not purse.later and now_us >= purse.order_until_us
            if now_us >= purse.ends_us or is_low:
                return None
            purses.append(purse)
        self._allowed += 1
        for purse, cost in zip(purses, call.costs, strict=True):
            purse.tokens -= cost
            purse.demand += cost
        return standing(call, purses, now_us)

    def _provide(self, call: Check, now_us: int) -> Ordering | Decision | None:
        found: list[tuple[Purse, int]] = []
        for key, cost in zip(call.keys, call.costs, strict=True):
            purse = self._find(key, now_us)
            if purse is None or not 0 < cost <= key.limit.capacity:
                return None
            found.append((purse, cost))
        for purse, cost in found:
            purse.demand += cost
        short = [(purse, cost) for purse, cost in found if purse.held(now_us) < cost]
        if any(purse.rests(cost, now_us) for purse, cost in short):
            self._denied += 1
            return denial(call, found, now_us)
        if any(now_us < max(purse.order_until_us, purse.shy_until_us) for purse, _ in short):
            return None
        nodes = max(1, self._nodes())
        extras = [self._extra(purse, cost, now_us, nodes) for purse, cost in found]
        if not short and not any(extras):
            return self._payment(call, found, now_us)
        items = [
            Item(purse, cost, extra, purse.wanted(now_us)) for (purse, cost), extra in zip(found, extras, strict=True)
        ]
        for item in items:
            if item.extra is not None:
                item.purse.wakes(now_us)
        return self._order(call, items)

    def _extra(self, purse: Purse, cost: int, now_us: int, nodes: int) -> int | None:
        """What to order beside the cost; None if the purse pays for itself."""
        spare = purse.held(now_us) - cost
        if spare < 0:
            return purse.extra(cost, now_us, nodes)
        if spare >= purse.low or now_us < purse.order_until_us or (purse.dry and now_us < purse.rest_until_us):
            return None
        return purse.extra(cost, now_us, nodes) or None

    def _order(self, call: Check, items: list[Item]) -> Ordering:
        """Ask for more than is needed; where that is too much, for less; at last for exactly what is needed."""
        with self._lock:
            self._pending += 1
        try:
            for _ in range(2):
                if not any(item.extra for item in items):
                    break
                sent_us = self._now_us()
                decision = yield self._ordered(call, items)
                answer = self._hear(call, items, decision, sent_us)
                if answer is not None:
                    return answer
            for item in items:
                item.extra = item.extra and 0
            sent_us = self._now_us()
            decision = yield self._ordered(call, items)
            return self._hear(call, items, decision, sent_us) or self._refuse(call, items, decision)
        finally:
            self._release(items)

    def _ordered(self, call: Check, items: list[Item]) -> Check:
        with self._lock:
            self._orders += 1
        costs = tuple([0 if item.extra is None else item.cost + item.extra for item in items])
        return Order(call.keys, costs if len(costs) > 1 else costs[0], call.id)

    def _hear(self, call: Check, items: list[Item], decision: Decision, sent_us: int) -> Decision | None:
        """The caller's answer, if there is one: that the order was granted, or that the purses have it after all."""
        with self._lock:
            now_us = self._now_us()
            for item, verdict in zip(items, decision.verdicts, strict=True):
                item.purse.hear(verdict, decision.at_us, now_us)
            if decision.allowed:
                return self._grant(call, items, decision, sent_us, now_us)
            short = [item for item in items if item.extra is not None and item.purse.held(now_us) < item.cost]
            if not short:
                for item in items:
                    if item.extra is not None:
                        item.purse.take(item.cost)
                    item.taken = []
                return standing(call, [item.purse for item in items], now_us)
            for item, verdict in zip(items, decision.verdicts, strict=True):
                if item.extra:
                    item.extra = item.purse.smaller(item.extra, item.cost, verdict[0])
            return None

    def _grant(self, call: Check, items: list[Item], decision: Decision, sent_us: int, now_us: int) -> Decision:
        verdicts = []
        for item, verdict in zip(items, decision.verdicts, strict=True):
            purse = item.purse
            if item.extra is not None:
                batch = purse.batch(item.extra, sent_us, verdict, decision.at_us)
                purse.stock(batch, now_us, cost=item.cost, wanted=item.wanted)
            item.taken = []
            verdicts.append((verdict[0] + purse.held(now_us), *verdict[1:]))
            self._return_if_closed(purse, now_us)
        return Decision(True, call.keys, tuple(verdicts), call.id, None, decision.at_us, 0, call.cost)

    def _refuse(self, call: Check, items: list[Item], decision: Decision) -> Decision:
        with self._lock:
            now_us = self._now_us()
            verdicts = []
            for item, verdict in zip(items, decision.verdicts, strict=True):
                left, wait_us, reset_us, delay_us = verdict
                if wait_us:
                    item.purse.deny(item.cost, verdict, now_us)
                    # Whoever comes back earlier would meet a purse that rests.
                    wait_us = max(wait_us, item.purse.rest_until_us - now_us)
                verdicts.append((left, wait_us, max(reset_us, wait_us), delay_us))
            return Decision(False, call.keys, tuple(verdicts), call.id, None, decision.at_us, 0, call.cost)

    def _release(self, items: list[Item]) -> None:
        with self._lock:
            self._pending = max(0, self._pending - 1)  # 0 in a child forked meanwhile
            for item in items:
                if item.extra is not None:
                    item.purse.order_until_us = 0
                item.purse.put(*item.taken)
                self._return_if_closed(item.purse, self._now_us())

    def _return_if_closed(self, purse: Purse, now_us: int) -> None:
        """Queue a refund of tokens that arrive after their purse was closed: no request looks there again."""
        if purse.is_closed:
            self._returns += purse.give_back(now_us, everything=True)

    def _payment(self, call: Check, found: list[tuple[Purse, int]], now_us: int) -> Decision:
        self._allowed += 1
        for purse, cost in found:
            purse.take(cost)
        return standing(call, [purse for purse, _ in found], now_us)

    def _find(self, key: Key, now_us: int) -> Purse | None:
        limit, _, identity = key
        counter = limit.space, identity
        purse = self._purses.get(counter)
        if purse is None:
            if not self._announced or not self._is_announced(limit) or not self._can_lease(limit):
                return None
            return self._open(key, now_us)
        if purse.limit is not limit:
            if purse.limit != limit:
                purse.drop()
                self._heat.drop(counter)
                del self._purses[counter]
                return None
            purse.limit, purse.key = limit, key
        return purse

    def _open(self, key: Key, now_us: int) -> Purse | None:
        limit = key.limit
        counter = limit.space, key.identity
        if len(self._purses) >= MOST_PURSES:
            self._heat.drop(counter)
            return None
        self._heat.add(counter, now_us)
        self._found += counter not in self._purses
        # Nothing is measured yet: the least that makes it hot, or what is this node's share of an announced burst.
        share = limit.tokens * 1_000_000 // limit.ticks // max(1, self._nodes())
        per_second = max(HOT_RATE, share) if self._is_announced(limit) else HOT_RATE
        return self._purses.setdefault(counter, self._purse(key, now_us, per_second))

    def _purse(self, key: Key, now_us: int, per_second: int) -> Purse:
        generous = self._is_announced(key.limit)
        return Purse(key, now_us, lease_us=self.lease_us, per_second=per_second, generous=generous)

    def _close(self, counter: Counter, now_us: int) -> None:
        self._heat.drop(counter)
        purse = self._purses.pop(counter)
        purse.is_closed = True
        self._returns += purse.give_back(now_us, everything=True)

    def _close_cold(self, now_us: int) -> None:
        for counter in self._heat.take_cold(now_us):
            if counter in self._purses:
                self._close(counter, now_us)

    def _can_lease(self, limit: Limit) -> bool:
        return can_lease(limit, self.lease_us) and limit.space not in self._excluded

    def _is_announced(self, limit: Limit) -> bool:
        return limit in self._announced.get(limit.space, ())
