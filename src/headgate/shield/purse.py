"""The prepaid tokens of one hot counter: what is held, until when, and how much to order next. Pure arithmetic.

A token may be spent until `lease_us` after the instant before it was ordered, by this process's own clock: so never
later than that after the store charged it. Tokens of a window die with the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.stores.calls import Refund

if TYPE_CHECKING:
    from headgate.algorithms import Verdict
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["Batch", "Purse", "PursesStats", "can_lease"]

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


class Batch(NamedTuple):
    """Tokens that were charged together."""

    tokens: int
    sent_us: int
    """Before the order left, on this process's clock."""
    ends_us: int
    """From here on they must not be spent, on the same clock."""
    at_us: int
    """When the store charged them, on the store's clock."""


class Purse:
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
        self.later: list[Batch] = []
        self.over: list[Batch] = []
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

    def take(self, cost: int) -> list[Batch]:
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

    def put(self, *batches: Batch) -> None:
        """Hold these, too."""
        self._keep(sorted([*self._batches(), *batches], key=lambda batch: batch.ends_us))

    def drop(self) -> None:
        """Hold nothing, and give nothing back: the store knows nothing of these tokens any more."""
        self.over.clear()
        self._keep([])

    def batch(self, tokens: int, sent_us: int, verdict: Verdict, at_us: int) -> Batch:
        """Tokens that the store charged with this verdict at `at_us`, on an order that left at `sent_us`."""
        held_us = self.lease_us
        if self.limit.algorithm in _WINDOWS:
            # From the verdict, as each shard of a cluster has a clock of its own. A sliding window is as new only when
            # the next one is over, too.
            weighs_us = self.limit.period_us if self.limit.algorithm == "sliding_window" else 0
            held_us = min(held_us, verdict[2] - weighs_us)
        return Batch(tokens, sent_us, sent_us + held_us, at_us)

    def give_back(self, now_us: int, *, everything: bool = False) -> list[Refund]:
        """What to return to the store: what has ended, or all that there is."""
        self.held(now_us)
        ended = [*self.over, *(self._batches() if everything else ())]
        self.over.clear()
        if everything:
            self._keep([])
        refunds = [Refund(self.key, self._returned(batch, now_us), at_us=batch.at_us) for batch in ended]
        return [refund for refund in refunds if refund.amount > 0]

    def _returned(self, batch: Batch, now_us: int) -> int:
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

    def _batches(self) -> list[Batch]:
        first = [Batch(self.tokens, self.sent_us, self.ends_us, self.charged_us)] if self.tokens else []
        return [*first, *self.later]

    def _keep(self, batches: list[Batch]) -> None:
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

    def stock(self, batch: Batch, now_us: int, *, cost: int, wanted: int) -> None:
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


class PursesStats(NamedTuple):
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
