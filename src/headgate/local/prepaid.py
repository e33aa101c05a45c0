"""The prepaid tokens of one hot counter: what is held, until when, and how much to order next. Pure arithmetic.

A token may be spent until `lease_us` after the instant before it was ordered, by this process's own clock: so never
later than that after the store charged it. Tokens of a window die with the window.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.local.hot_keys import HOT_RATE, HotKeyDetector
from headgate.stores.operations import Check, Refund

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from headgate.algorithms import Verdict
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.local.hot_keys import Counter

__all__ = [
    "LEASE_US",
    "Ordering",
    "PrepaidCounter",
    "PrepaidStats",
    "PrepaidTokens",
    "RefillCheck",
    "RefillItem",
    "TokenBatch",
    "can_lease",
    "denial",
    "standing",
]

LEASED: Final = frozenset({"fixed_window", "gcra", "sliding_log", "sliding_window", "token_bucket"})
"""A queue gives every request its own turn, and what is inside has an id: neither can be bought in advance."""
LEAST_CAPACITY: Final = 100
FEW: Final = 10
"""With no more than this left in the store nothing is ordered in advance: the last tokens are for whoever asks."""
SHY_US: Final = 1_000_000
"""For how long a counter is asked exactly where answers take most of a lease: what they bring would end unspent."""

_MOST_OVER: Final = 64
"""Batches that wait to be given back; should nobody fetch them, the oldest are worth the least."""
_BUCKETS: Final = frozenset({"gcra", "token_bucket"})
_WINDOWS: Final = frozenset({"fixed_window", "sliding_window"})
_SLIDING: Final = frozenset({"sliding_log", "sliding_window"})
"""What stays unspent in one of these for a period is lost, where a bucket would have it still."""


def can_lease(limit: Limit, lease_us: int) -> bool:
    """Whether tokens of the limit can be held for so long: it must be large enough for what its nodes may hold."""
    leases = 10 if limit.algorithm in _SLIDING else 2
    return (
        limit.algorithm in LEASED
        and limit.capacity >= LEAST_CAPACITY
        and limit.full >= leases * limit.tokens * lease_us  # in 1/ticks of a token, like all that is exact
    )


class TokenBatch(NamedTuple):
    """Tokens that were charged together."""

    tokens: int
    sent_us: int
    """Before the order left, on this process's clock."""
    ends_us: int
    """From here on they must not be spent, on the same clock."""
    at_us: int
    """When the store charged them, on the store's clock."""


class PrepaidCounter:
    """One counter's tokens. Whoever asks holds a lock: nothing in here is safe by itself."""

    __slots__ = (
        *("at_us", "charged_us", "demand", "demand_us", "denied", "dry", "ends_us", "generous", "is_closed", "key"),
        *("later", "lease_us", "left", "limit", "low", "order_until_us", "over", "pace_us", "per_second", "reset_us"),
        *("rest_from", "rest_until_us", "retry_us", "said_us", "sent_us", "shy_until_us", "since_us", "singles"),
        *("tokens", "trip_us"),
    )

    def __init__(self, key: Key, now_us: int, *, lease_us: int, per_second: int, generous: bool = False) -> None:
        limit = key.limit
        self.key, self.limit, self.lease_us = key, limit, lease_us
        self.generous = generous
        """Whether a burst was announced: larger orders."""
        self.is_closed = False
        """True once the counter is no longer hot: tokens that arrive later go straight back to the store."""

        # The batch that is being spent, spelled out: every check looks at it.
        self.tokens = self.sent_us = self.ends_us = self.charged_us = 0
        self.later: list[TokenBatch] = []
        self.over: list[TokenBatch] = []
        """What ended before it was spent."""
        self.low = 0
        """With fewer than this held, the next order goes out while the rest is still being spent."""

        # What the store said last, and when.
        self.left: int | None = None
        self.reset_us = self.at_us = 0
        self.said_us = now_us
        self.since_us = now_us
        """Denials of what was asked earlier say nothing: something was given back since."""

        # How much this process asks for, and how long an answer takes.
        self.per_second = per_second
        self.demand, self.demand_us = 0, now_us
        self.trip_us = 0

        # When to ask.
        self.order_until_us = 0
        """While now is before this, an order is on its way; it has an end, should its driver vanish."""
        self.shy_until_us = 0
        self.dry = False
        """Whether the store was found exhausted, and not well filled since: then it is asked at a pace."""
        self.singles = 0
        """Orders in a row that brought no more than a request's own cost."""
        self.rest_until_us = 0
        self.rest_from = 1
        """Costs below this may be asked for all the same."""
        self.denied, self.retry_us = 0, 0
        """The cost that was denied last, and until when, on this process's clock."""
        slack_us = limit.period_us // 128 if limit.algorithm in _SLIDING else lease_us
        self.pace_us = max(1, min(lease_us // 10, slack_us))

    # -------------------------------------------------------------- tokens

    def held(self, now_us: int) -> int:
        """How many tokens can be spent now."""
        if self.tokens and now_us < self.ends_us and not self.later:
            return self.tokens
        batches = self._batches()
        self.over += [batch for batch in batches if now_us >= batch.ends_us]
        del self.over[:-_MOST_OVER]
        self._keep([batch for batch in batches if now_us < batch.ends_us])
        return self.tokens + sum([batch.tokens for batch in self.later])

    def take(self, cost: int) -> list[TokenBatch]:
        """Spend tokens that are held, those that end first before others; they can be put back."""
        taken, kept = [], []
        for batch in self._batches():
            part = min(cost, batch.tokens)
            cost -= part
            if part:
                taken.append(batch._replace(tokens=part))
            kept.append(batch._replace(tokens=batch.tokens - part))
        self._keep(kept)
        return taken

    def put(self, *batches: TokenBatch) -> None:
        """Hold these, too."""
        self._keep(sorted([*self._batches(), *batches], key=lambda batch: batch.ends_us))

    def drop(self) -> None:
        """Hold nothing, and give nothing back: the store knows nothing of these tokens any more."""
        self.over.clear()
        self._keep([])

    def batch(self, tokens: int, sent_us: int, verdict: Verdict, at_us: int) -> TokenBatch:
        """Tokens that the store charged with this verdict at `at_us`, on an order that left at `sent_us`."""
        held_us = self.lease_us
        if self.limit.algorithm in _WINDOWS:
            # From the verdict, as each shard of a cluster has a clock of its own. A sliding window is as new only when
            # the next one is over, too.
            weighs_us = self.limit.period_us if self.limit.algorithm == "sliding_window" else 0
            held_us = min(held_us, verdict[2] - weighs_us)
        return TokenBatch(tokens, sent_us, sent_us + held_us, at_us)

    def give_back(self, now_us: int, *, everything: bool = False) -> list[Refund]:
        """What to return to the store: what has ended, or all that there is."""
        self.held(now_us)
        ended = [*self.over, *(self._batches() if everything else ())]
        self.over.clear()
        if everything:
            self._keep([])
        refunds = [Refund(self.key, self._returned(batch, now_us), at_us=batch.at_us) for batch in ended]
        return [refund for refund in refunds if refund.amount > 0]

    def _returned(self, batch: TokenBatch, now_us: int) -> int:
        """How much of it can go back without anybody getting more than the limit.

        What a bucket has refilled since it was charged stays charged: it may have become full in the meantime, and
        then its capacity and what comes back would both be spent. A lease more is for the refund's own way. Windows
        and logs take a charge out of where it was counted, so nothing of it is too late.
        """
        age_us = now_us - batch.sent_us + self.lease_us
        if self.limit.algorithm in _BUCKETS:
            return batch.tokens + -age_us * self.limit.tokens // self.limit.ticks
        if self.limit.algorithm in _WINDOWS and now_us - batch.sent_us >= self._to_boundary_us(batch.at_us):
            return 0
        return batch.tokens

    def _batches(self) -> list[TokenBatch]:
        first = [TokenBatch(self.tokens, self.sent_us, self.ends_us, self.charged_us)] if self.tokens else []
        return [*first, *self.later]

    def _keep(self, batches: list[TokenBatch]) -> None:
        kept = [batch for batch in batches if batch.tokens]
        self.tokens, self.sent_us, self.ends_us, self.charged_us = kept[0] if kept else (0, 0, 0, 0)
        self.later = kept[1:]

    def _to_boundary_us(self, at_us: int) -> int:
        return self.limit.period_us - at_us % self.limit.period_us

    # -------------------------------------------------------------- orders

    def extra(self, cost: int, now_us: int, nodes: int) -> int:
        """How many tokens to order beside what a request costs itself: enough for so many more like it."""
        if now_us < self.shy_until_us:
            return 0
        wanted = self.wanted(now_us)
        left = self._left(now_us)
        if left is None:
            return _whole(min(wanted, (self.limit.capacity - cost) // 2), cost)
        if left < cost + (min(FEW, self.limit.capacity // 200) if self.dry else FEW):
            return 0
        # Where it is dry, all nodes come back at the same pace, each for its share of what has come in meanwhile: more
        # than that, and their orders would fail each other.
        is_patient = self.dry and self.limit.algorithm not in _SLIDING
        return _whole(min(wanted, (left - cost) // (nodes + 1 if is_patient else 2)), cost)

    def wanted(self, now_us: int) -> int:
        """What this process spends in half a lease, as far as the window goes."""
        self._measure(now_us)
        span_us = self.lease_us * 9 // 10 if self.generous else self.lease_us // 2
        if self.limit.algorithm in _WINDOWS and self.at_us:
            span_us = min(span_us, self._to_boundary_us(self.at_us + now_us - self.said_us))
        return max(1, self.per_second * span_us // 1_000_000)

    def smaller(self, extra: int, cost: int, left: int) -> int:
        """What to order beside the cost where the store has said that so much is left."""
        return _whole(min(extra, (left - cost) // 2), cost) if left >= cost + FEW else 0

    def hear(self, verdict: Verdict, at_us: int, now_us: int) -> None:
        """Note what the store said."""
        self.left, _, self.reset_us, _ = verdict
        self.at_us, self.said_us = at_us, now_us

    def stock(self, batch: TokenBatch, now_us: int, *, cost: int, wanted: int) -> None:
        """An order was granted, to a request of that cost; `wanted` is what it would have been if there is enough."""
        # What is too late is too late: one answer that was held up for long must not be remembered for long.
        self.trip_us = (self.trip_us + min(now_us - batch.sent_us, self.lease_us)) // 2
        # Down from a few, so many single tokens could only be had if more came in all the time: it is dry, too.
        self.singles = 0 if batch.tokens else self.singles + 1
        if batch.tokens > max(0, wanted - cost):
            self.dry = False
        elif self.singles > FEW:
            self.dry = True
        if self.dry:
            self.rest_from = 1
        self.low = 0 if self.dry else min(batch.tokens * 3 // 4, 2 * self.per_second * self.trip_us // 1_000_000)
        # Not earlier: where it is this process that is behind, asking exactly would keep it there.
        if self.trip_us > self.lease_us * 9 // 10:
            self.shy_until_us = now_us + SHY_US
        if batch.tokens:
            self.put(batch)

    def deny(self, cost: int, verdict: Verdict, now_us: int) -> None:
        """The store has not even what a request costs: leave it alone for a while."""
        left, wait_us, _, _ = verdict
        self.dry, self.low = True, 0
        self.rest_from = left + 1
        self.denied, self.retry_us = cost, now_us + wait_us
        self.rest_until_us = max(self.rest_until_us, now_us + max(self.pace_us, min(wait_us, self.lease_us)))

    def wakes(self, now_us: int) -> None:
        """An order leaves: whoever else finds nothing here waits for its answer."""
        # What comes later than that has ended already. An order may have been given up, and nobody told.
        self.order_until_us = now_us + self.lease_us
        if self.dry:
            self.rest_until_us, self.rest_from = now_us + self.pace_us, 1

    def awaken(self, now_us: int) -> None:
        """Something was given back to the store: ask it again at once."""
        self.rest_until_us = self.retry_us = 0
        self.since_us = now_us

    def rests(self, cost: int, now_us: int) -> bool:
        """Whether a request that costs more than is held is denied without asking."""
        if not self.dry:
            return False
        return now_us < self.order_until_us or (cost >= self.rest_from and now_us < self.rest_until_us)

    def wait_us(self, cost: int, now_us: int) -> int:
        """When to come back to a purse that rests: not before it asks again, nor before the store said."""
        retry_us = self.retry_us if cost >= self.denied else 0
        if cost > self.denied and self.limit.algorithm in _BUCKETS and retry_us > now_us:
            retry_us += (cost - self.denied) * self.limit.ticks // self.limit.tokens
        until_us = max(self.rest_until_us, retry_us)
        return until_us - now_us if until_us > now_us else self.pace_us

    def _left(self, now_us: int) -> int | None:
        """What is left in the store, as far as it can be known; other nodes may have taken of it."""
        if self.left is None:
            return None
        since_us = now_us - self.said_us
        limit = self.limit
        if limit.algorithm == "fixed_window":
            return limit.capacity if since_us >= self._to_boundary_us(self.at_us) else self.left
        if self.dry and since_us < self.lease_us:
            return self.left
        return min(limit.capacity, self.left + since_us * limit.tokens // limit.ticks)

    def _measure(self, now_us: int) -> None:
        """How much this process asks for, from what it asked for since the last time."""
        span_us = now_us - self.demand_us
        if span_us < self.lease_us // 4:
            return
        measured = self.demand * 1_000_000 // span_us
        self.per_second = measured if span_us > self.lease_us else (self.per_second + measured) // 2
        self.demand, self.demand_us = 0, now_us


class PrepaidStats(NamedTuple):
    hot: int
    """Counters that tokens are held for."""
    held: int
    """Tokens that were prepaid and can be spent now."""
    allowed: int
    """Checks that were allowed without asking the store."""
    denied: int
    """Checks that were denied without asking the store, while a counter that was found exhausted rested."""
    orders: int
    """Checks that were sent to the store to order more."""
    found: int
    """How often a counter was found to be hot."""


def _whole(tokens: int, cost: int) -> int:
    """As many as can be spent at that cost: what is left over would be of no use to anybody."""
    return tokens - tokens % cost


class RefillCheck(Check):
    """A check that is good for many requests: where a process is behind, it does not wait for all that came before."""

    __slots__ = ()

    goes_first = True


class RefillItem:
    """One key of a request that is under way to the store."""

    __slots__ = ("cost", "extra", "purse", "taken", "wanted")

    def __init__(self, purse: PrepaidCounter, cost: int, extra: int | None, wanted: int) -> None:
        self.purse = purse
        self.cost = cost
        self.extra = extra
        """What is ordered beside the cost; None where the cost is paid out of the purse."""
        self.wanted = wanted
        self.taken: list[TokenBatch] = purse.take(cost) if extra is None else []
        """What was set aside for it, and counts as spent since then, unless the request is denied."""


def standing(call: Check, purses: list[PrepaidCounter], now_us: int) -> Decision:
    """A request passes without the store: what that said last, with what is held beside."""
    verdicts = []
    at_us = purses[0].at_us + now_us - purses[0].said_us
    for purse in purses:
        since_us = now_us - purse.said_us
        reset_us = purse.reset_us - since_us
        held = purse.held(now_us) if purse.later else purse.tokens
        verdicts.append(((purse.left or 0) + held, 0, max(0, reset_us), 0))
        # The earliest: what a window charged must not seem to belong to the next one.
        at_us = min(at_us, purse.at_us + since_us)
    return Decision(True, call.keys, tuple(verdicts), call.id, None, at_us, 0, call.cost)


def denial(call: Check, found: list[tuple[PrepaidCounter, int]], now_us: int) -> Decision:
    """A request is denied without the store, by those that have not enough and rest."""
    verdicts = []
    for purse, cost in found:
        held = purse.held(now_us)
        reset_us = max(0, purse.reset_us - (now_us - purse.said_us))
        if held < cost and purse.rests(cost, now_us):
            wait_us = purse.wait_us(cost, now_us)
            verdicts.append((held, wait_us, max(reset_us, wait_us), 0))
        else:
            verdicts.append((held + (purse.left or 0), 0, reset_us, 0))
    at_us = min([purse.at_us + now_us - purse.said_us for purse, _ in found])
    return Decision(False, call.keys, tuple(verdicts), call.id, None, at_us, 0, call.cost)


LEASE_US: Final = 100_000
USEFUL_US: Final = 1_000_000
"""For how long purses are asked after a request was seen that is hot on all its keys: a lease is over by then."""
MOST_PURSES: Final = 256
"""More counters than this cannot be hot in one process: each is asked a thousand times a second."""

Ordering: TypeAlias = "Generator[Check, Decision, Decision]"
"""Yields the check to send, is sent the store's decision, returns the caller's."""


class PrepaidTokens:
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
        reinit_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._heat = HotKeyDetector()
        self._purses: dict[Counter, PrepaidCounter] = {}
        self._useful_until_us = 0
        self._is_useful = False
        self._returns: list[Refund] = []
        self._pending = 0

    def reset_after_fork(self) -> None:
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
    def stats(self) -> PrepaidStats:
        with self._lock:
            now_us = self._now_us()
            held = sum([purse.held(now_us) for purse in self._purses.values()])
            return PrepaidStats(len(self._purses), held, self._allowed, self._denied, self._orders, self._found)

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
        found: list[tuple[PrepaidCounter, int]] = []
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
            RefillItem(purse, cost, extra, purse.wanted(now_us))
            for (purse, cost), extra in zip(found, extras, strict=True)
        ]
        for item in items:
            if item.extra is not None:
                item.purse.wakes(now_us)
        return self._order(call, items)

    def _extra(self, purse: PrepaidCounter, cost: int, now_us: int, nodes: int) -> int | None:
        """What to order beside the cost; None if the purse pays for itself."""
        spare = purse.held(now_us) - cost
        if spare < 0:
            return purse.extra(cost, now_us, nodes)
        if spare >= purse.low or now_us < purse.order_until_us or (purse.dry and now_us < purse.rest_until_us):
            return None
        return purse.extra(cost, now_us, nodes) or None

    def _order(self, call: Check, items: list[RefillItem]) -> Ordering:
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

    def _ordered(self, call: Check, items: list[RefillItem]) -> Check:
        with self._lock:
            self._orders += 1
        costs = tuple([0 if item.extra is None else item.cost + item.extra for item in items])
        return RefillCheck(call.keys, costs if len(costs) > 1 else costs[0], call.id)

    def _hear(self, call: Check, items: list[RefillItem], decision: Decision, sent_us: int) -> Decision | None:
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

    def _grant(self, call: Check, items: list[RefillItem], decision: Decision, sent_us: int, now_us: int) -> Decision:
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

    def _refuse(self, call: Check, items: list[RefillItem], decision: Decision) -> Decision:
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

    def _release(self, items: list[RefillItem]) -> None:
        with self._lock:
            self._pending = max(0, self._pending - 1)  # 0 in a child forked meanwhile
            for item in items:
                if item.extra is not None:
                    item.purse.order_until_us = 0
                item.purse.put(*item.taken)
                self._return_if_closed(item.purse, self._now_us())

    def _return_if_closed(self, purse: PrepaidCounter, now_us: int) -> None:
        """Queue a refund of tokens that arrive after their purse was closed: no request looks there again."""
        if purse.is_closed:
            self._returns += purse.give_back(now_us, everything=True)

    def _payment(self, call: Check, found: list[tuple[PrepaidCounter, int]], now_us: int) -> Decision:
        self._allowed += 1
        for purse, cost in found:
            purse.take(cost)
        return standing(call, [purse for purse, _ in found], now_us)

    def _find(self, key: Key, now_us: int) -> PrepaidCounter | None:
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

    def _open(self, key: Key, now_us: int) -> PrepaidCounter | None:
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

    def _purse(self, key: Key, now_us: int, per_second: int) -> PrepaidCounter:
        generous = self._is_announced(key.limit)
        return PrepaidCounter(key, now_us, lease_us=self.lease_us, per_second=per_second, generous=generous)

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
