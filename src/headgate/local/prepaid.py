"""Prepaid tokens: a hot counter is charged for many requests at once, which are then admitted without the store.

A token may be spent until `lease_us` after the instant before its refill was sent, by this process's own clock: so
never later than that after the store charged it. Tokens of a window expire with the window.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
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

__all__ = ["PrepaidCounter", "PrepaidStats", "PrepaidTokens", "Refill", "RefillCheck", "can_prepay"]

LEASE_US: Final = 100_000
MIN_CAPACITY: Final = 100
MIN_POOL_CAPACITY: Final = 10_000
"""Tokens of a pool that are held too long are lost for a period: only where that is a small part of it."""
MIN_LEFT: Final = 10
"""With no more than this left in the store nothing is prepaid: the last tokens go to single requests."""
SLOW_STORE_US: Final = 1_000_000
"""Time without refills after answers took most of a lease: their tokens would expire unspent."""
USEFUL_US: Final = 1_000_000
"""Time for which prepaid tokens are consulted after a request was sampled whose counters are all hot."""
MAX_HOT_COUNTERS: Final = 256
"""A process cannot have more: each is checked a thousand times a second."""

_MAX_EXPIRED: Final = 64
"""Expired batches kept for refunds; the oldest are worth the least."""
_ALGORITHMS: Final = frozenset({"fixed_window", "gcra", "pool", "sliding_log", "sliding_window", "token_bucket"})
"""A leaky bucket gives every request its own turn, and a concurrency lease has an id: neither can be prepaid."""
_BUCKETS: Final = frozenset({"gcra", "token_bucket"})
_WINDOWS: Final = frozenset({"fixed_window", "sliding_window"})
_SLIDING: Final = frozenset({"sliding_log", "sliding_window"})
"""Capacity that stays unspent in one of these for a period is lost, where a bucket would still have it."""

Refill: TypeAlias = "Generator[Check, Decision, Decision]"
"""A flow: yields the checks to send, gets the store's decisions, returns the caller's."""


def can_prepay(limit: Limit, lease_us: int) -> bool:
    """True if tokens of the limit can be held for so long: it must be large enough for what its nodes may hold."""
    leases = 10 if limit.algorithm in _SLIDING else 2
    least = MIN_POOL_CAPACITY if limit.algorithm == "pool" else MIN_CAPACITY
    return (
        limit.algorithm in _ALGORITHMS
        and limit.capacity >= least
        and limit.full >= leases * limit.tokens * lease_us  # in 1/ticks of a token, as all exact amounts
    )


class TokenBatch(NamedTuple):
    """Tokens that were charged together."""

    tokens: int
    sent_us: int
    """The instant before the refill was sent, on this process's clock."""
    expires_us: int
    """From here on they must not be spent, on the same clock."""
    at_us: int
    """When the store charged them, on the store's clock."""
    dies_us: int = 0
    """When tokens of a pool expire in the store, on this process's clock."""


class PrepaidCounter:
    """The prepaid tokens of one hot counter: how many, until when, and the size of the next refill.

    Not thread-safe: the caller holds a lock.
    """

    __slots__ = (
        *("answered_us", "at_us", "backoff_from", "backoff_until_us", "charged_us", "demand", "demand_us"),
        *("denied_cost", "dies_us", "expired", "expires_us", "is_announced", "is_closed", "is_exhausted"),
        *("key", "later"),
        *("lease_us", "left", "limit", "no_refill_until_us", "pace_us", "rate", "refill_below", "refill_until_us"),
        *("reset_us", "retry_at_us", "round_trip_us", "sent_us", "since_us", "single_refills", "tokens"),
    )

    def __init__(self, key: Key, now_us: int, *, lease_us: int, rate: int, is_announced: bool = False) -> None:
        self.key, self.limit, self.lease_us = key, key.limit, lease_us
        self.is_announced = is_announced
        """True if the policy announces bursts of this limit: refills are larger."""
        self.is_closed = False
        """True once the counter is no longer hot: tokens that arrive later go straight back to the store."""
        # The batch that is being spent, unpacked, as every check reads it.
        self.tokens = self.sent_us = self.expires_us = self.charged_us = self.dies_us = 0
        self.later: list[TokenBatch] = []
        self.expired: list[TokenBatch] = []
        """Batches that expired before they were spent."""
        self.refill_below = 0
        """With fewer tokens than this, the next refill is sent while the rest is being spent."""
        # The last answer of the store.
        self.left: int | None = None
        self.reset_us = self.at_us = 0
        self.answered_us = now_us
        self.since_us = now_us
        """Denials of checks that were sent earlier do not count: something was refunded since."""
        # The demand of this process, and the latency of the store.
        self.rate = rate
        """Tokens per second."""
        self.demand, self.demand_us = 0, now_us
        self.round_trip_us = 0
        # When to ask the store.
        self.refill_until_us = 0
        """Before this instant a refill is in flight; bounded, as its driver may vanish."""
        self.no_refill_until_us = 0
        self.is_exhausted = False
        """True if the store has denied, and was not well filled since: then it is asked at a pace."""
        self.single_refills = 0
        """Refills in a row that brought no more than the request's own cost."""
        self.backoff_until_us = 0
        self.backoff_from = 1
        """Lower costs are sent to the store in spite of the backoff."""
        self.denied_cost, self.retry_at_us = 0, 0
        """The cost that was denied last, and until when, on this process's clock."""
        slack_us = key.limit.period_us // 128 if key.limit.algorithm in _SLIDING else lease_us
        self.pace_us = max(1, min(lease_us // 10, slack_us))

    def available(self, now_us: int) -> int:
        """The tokens that can be spent now."""
        if self.tokens and now_us < self.expires_us and not self.later:
            return self.tokens
        batches = self._batches()
        self.expired += [batch for batch in batches if now_us >= batch.expires_us]
        del self.expired[:-_MAX_EXPIRED]
        self._set_batches([batch for batch in batches if now_us < batch.expires_us])
        return self.tokens + sum([batch.tokens for batch in self.later])

    def take(self, cost: int) -> list[TokenBatch]:
        """Spend available tokens, those first that expire first; returns them, so that they can be put back."""
        taken, kept = [], []
        for batch in self._batches():
            part = min(cost, batch.tokens)
            cost -= part
            if part:
                taken.append(batch._replace(tokens=part))
            kept.append(batch._replace(tokens=batch.tokens - part))
        self._set_batches(kept)
        return taken

    def put(self, *batches: TokenBatch) -> None:
        self._set_batches(sorted([*self._batches(), *batches], key=lambda batch: batch.expires_us))

    def discard(self) -> None:
        """Drop all tokens without a refund: the counter was reset, and the store has no record of them."""
        self.expired.clear()
        self._set_batches([])

    def new_batch(self, tokens: int, sent_us: int, verdict: Verdict, at_us: int) -> TokenBatch:
        """The batch that the store charged with this verdict at `at_us`, for a refill that was sent at `sent_us`."""
        lease_us, dies_us = self.lease_us, 0
        if self.limit.algorithm in _WINDOWS:
            # From the verdict, as each shard of a cluster has its own clock. A sliding window is reset only when the
            # next window is over, too.
            weighs_us = self.limit.period_us if self.limit.algorithm == "sliding_window" else 0
            lease_us = min(lease_us, verdict[2] - weighs_us)
        elif self.limit.algorithm == "pool":
            lease_us, dies_us = min(lease_us, verdict[3]), sent_us + verdict[3]
        return TokenBatch(tokens, sent_us, sent_us + lease_us, at_us, dies_us)

    def take_refunds(self, now_us: int, *, everything: bool = False) -> list[Refund]:
        """Refunds of expired tokens, or of all tokens."""
        self.available(now_us)
        batches = [*self.expired, *(self._batches() if everything else ())]
        self.expired.clear()
        if everything:
            self._set_batches([])
        refunds = [Refund(self.key, self._refundable(batch, now_us), at_us=batch.at_us) for batch in batches]
        return [refund for refund in refunds if refund.amount > 0]

    def _refundable(self, batch: TokenBatch, now_us: int) -> int:
        """The part of a batch that can be returned without admitting more than the limit.

        What a bucket has refilled since the charge stays charged: it may have become full in the meantime, and then
        its capacity and the refund would both be spent. One lease is added for the refund's own way. Windows and logs
        return a charge to where it was counted, so that no part of it is too late. Tokens of a pool that have expired
        there would return to a batch that expires later.
        """
        if self.limit.algorithm == "pool":
            return batch.tokens if now_us + self.lease_us < batch.dies_us else 0
        age_us = now_us - batch.sent_us + self.lease_us
        if self.limit.algorithm in _BUCKETS:
            return batch.tokens + -age_us * self.limit.tokens // self.limit.ticks
        if self.limit.algorithm in _WINDOWS and now_us - batch.sent_us >= self._until_boundary_us(batch.at_us):
            return 0
        return batch.tokens

    def _batches(self) -> list[TokenBatch]:
        first = TokenBatch(self.tokens, self.sent_us, self.expires_us, self.charged_us, self.dies_us)
        return [first, *self.later] if self.tokens else [*self.later]

    def _set_batches(self, batches: list[TokenBatch]) -> None:
        kept = [batch for batch in batches if batch.tokens]
        self.tokens, self.sent_us, self.expires_us, self.charged_us, self.dies_us = kept[0] if kept else (0,) * 5
        self.later = kept[1:]

    def _until_boundary_us(self, at_us: int) -> int:
        if self.limit.calendar is not None:
            return self.limit.calendar.window(at_us)[1] - at_us
        return self.limit.period_us - at_us % self.limit.period_us

    # ---------------------------------------------------------------- refills

    def is_low(self, tokens: int, now_us: int) -> bool:
        """True if, with so many tokens, more are needed and none are in flight."""
        return tokens < self.refill_below and not self.later and now_us >= self.refill_until_us

    def refill_size(self, cost: int, now_us: int, nodes: int) -> int:
        """The tokens to prepay with a request of that cost: a multiple of the cost."""
        if now_us < self.no_refill_until_us:
            return 0
        target = self.target_size(now_us)
        left = self._estimate_left(now_us)
        if left is None:
            return _round_down(min(target, (self.limit.capacity - cost) // 2), cost)
        if left < cost + (min(MIN_LEFT, self.limit.capacity // 200) if self.is_exhausted else MIN_LEFT):
            return 0
        # All nodes return to an exhausted counter at the same pace, each for its share of what has been refilled in the
        # meantime. Asking for more would make their refills fail each other.
        takes_share = self.is_exhausted and self.limit.algorithm not in _SLIDING
        return _round_down(min(target, (left - cost) // (nodes + 1 if takes_share else 2)), cost)

    def target_size(self, now_us: int) -> int:
        """The demand of this process in half a lease, as far as the window reaches."""
        self._measure_demand(now_us)
        span_us = self.lease_us * 9 // 10 if self.is_announced else self.lease_us // 2
        if self.limit.algorithm in _WINDOWS and self.at_us:
            span_us = min(span_us, self._until_boundary_us(self.at_us + now_us - self.answered_us))
        return max(1, self.rate * span_us // 1_000_000)

    def reduced_size(self, extra: int, cost: int, left: int) -> int:
        """The tokens to prepay after a larger refill was denied with so much left."""
        return _round_down(min(extra, (left - cost) // 2), cost) if left >= cost + MIN_LEFT else 0

    def record_verdict(self, verdict: Verdict, at_us: int, now_us: int) -> None:
        self.left, _, self.reset_us, _ = verdict
        self.at_us, self.answered_us = at_us, now_us

    def add(self, batch: TokenBatch, now_us: int, *, cost: int, target: int) -> None:
        """Add the tokens of a refill that was sent with a request of that cost; `target` is its full size."""
        # Bounded: one answer that took long must not be remembered for long.
        self.round_trip_us = (self.round_trip_us + min(now_us - batch.sent_us, self.lease_us)) // 2
        # After so many single tokens, the last ones must have been refilled in the meantime: it is exhausted, too.
        self.single_refills = 0 if batch.tokens else self.single_refills + 1
        if batch.tokens > max(0, target - cost):
            self.is_exhausted = False
        elif self.single_refills > MIN_LEFT:
            self.is_exhausted = True
        if self.is_exhausted:
            self.backoff_from, self.refill_below = 1, 0
        else:
            self.refill_below = min(batch.tokens * 3 // 4, 2 * self.rate * self.round_trip_us // 1_000_000)
        # Not earlier: if it is this process that is behind, sending every check would keep it there.
        if self.round_trip_us > self.lease_us * 9 // 10:
            self.no_refill_until_us = now_us + SLOW_STORE_US
        if batch.tokens:
            self.put(batch)

    def record_denial(self, cost: int, verdict: Verdict, now_us: int) -> None:
        """Back off: the store has denied a single request."""
        left, wait_us, _, _ = verdict
        self.is_exhausted, self.refill_below = True, 0
        self.backoff_from = left + 1
        self.denied_cost, self.retry_at_us = cost, now_us + wait_us
        self.backoff_until_us = max(self.backoff_until_us, now_us + max(self.pace_us, min(wait_us, self.lease_us)))

    def start_refill(self, now_us: int) -> None:
        """Note that a refill is sent: other requests wait for its tokens."""
        # Tokens that arrive later than this have expired already. An abandoned refill never reports its end.
        self.refill_until_us = now_us + self.lease_us
        if self.is_exhausted:
            self.backoff_until_us, self.backoff_from = now_us + self.pace_us, 1

    def wake(self, now_us: int) -> None:
        """End the backoff: something was refunded."""
        self.backoff_until_us = self.retry_at_us = 0
        self.since_us = now_us

    def is_backing_off(self, cost: int, now_us: int) -> bool:
        """True if a request that costs more than is available is denied without asking the store."""
        if not self.is_exhausted:
            return False
        return now_us < self.refill_until_us or (cost >= self.backoff_from and now_us < self.backoff_until_us)

    def retry_after_us(self, cost: int, now_us: int) -> int:
        """The retry time of a request that is denied during a backoff: not before its end, nor before the store's."""
        retry_us = self.retry_at_us if cost >= self.denied_cost else 0
        if cost > self.denied_cost and self.limit.algorithm in _BUCKETS and retry_us > now_us:
            retry_us += (cost - self.denied_cost) * self.limit.ticks // self.limit.tokens
        until_us = max(self.backoff_until_us, retry_us)
        return until_us - now_us if until_us > now_us else self.pace_us

    def _estimate_left(self, now_us: int) -> int | None:
        """The tokens left in the store, if no other node has taken any; None if unknown."""
        if self.left is None:
            return None
        limit, since_us = self.limit, now_us - self.answered_us
        if limit.algorithm == "fixed_window":
            return limit.capacity if since_us >= self._until_boundary_us(self.at_us) else self.left
        if limit.algorithm == "pool" or (self.is_exhausted and since_us < self.lease_us):
            return self.left
        return min(limit.capacity, self.left + since_us * limit.tokens // limit.ticks)

    def _measure_demand(self, now_us: int) -> None:
        span_us = now_us - self.demand_us
        if span_us < self.lease_us // 4:
            return
        measured = self.demand * 1_000_000 // span_us
        self.rate = measured if span_us > self.lease_us else (self.rate + measured) // 2
        self.demand, self.demand_us = 0, now_us


class PrepaidStats(NamedTuple):
    hot: int
    """Hot counters now."""
    held: int
    """Tokens that can be spent now."""
    allowed: int
    denied: int
    """Checks that were answered without asking the store; denied during the backoff of an exhausted counter."""
    found: int
    """Counters that became hot, over time."""


class RefillCheck(Check):
    """A check that pays for many requests: in a process that is behind, it overtakes other checks."""

    __slots__ = ()

    goes_first = True


@dataclass(slots=True, eq=False)
class _RefillItem:
    """One key of a refill."""

    counter: PrepaidCounter
    cost: int
    extra: int | None
    """Tokens to prepay beside the cost; None if the cost is paid with available tokens."""
    target: int
    taken: list[TokenBatch]
    """Tokens set aside for the request, and put back if it is denied."""


class PrepaidTokens:
    """The prepaid tokens of all hot counters of this process; thread-safe.

    `lease_us` bounds how long a token may be held, `nodes` returns the number of processes that share the limits (only
    the size of refills depends on it), and `now_us` is a monotonic clock.
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
        self._allowed = self._denied = self._found = 0
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave the tokens to the parent: in both processes, they would be spent twice."""
        self._lock = threading.RLock()
        self._detector = HotKeyDetector()
        self._counters: dict[Counter, PrepaidCounter] = {}
        self._useful_until_us = 0
        self._is_useful = False
        self._refunds: list[Refund] = []
        self.pending_refills = 0
        """Refills sent to the store and not yet answered."""

    def __bool__(self) -> bool:
        """False if `take` has nothing to offer: also if all requests have a cold key beside their hot ones."""
        return bool(self._announced or (self._is_useful and self._counters))

    @property
    def has_refunds(self) -> bool:
        """True if `take_refunds` may return something, now or once tokens expire."""
        return bool(self._counters or self._refunds)

    @property
    def stats(self) -> PrepaidStats:
        with self._lock:
            now_us = self._now_us()
            held = sum([counter.available(now_us) for counter in self._counters.values()])
            return PrepaidStats(len(self._counters), held, self._allowed, self._denied, self._found)

    def hot_counters(self) -> list[PrepaidCounter]:
        with self._lock:
            return list(self._counters.values())

    def sample(self, check: Check) -> None:
        """Look at one check in `SAMPLED_EVERY`, however it is answered, to find counters that become hot or cold."""
        with self._lock:
            now_us = self._now_us()
            for key, cost in zip(check.keys, check.costs, strict=True):
                limit, _, identity = key
                if cost and self._can_prepay(limit) and self._detector.record_sample((limit.space, identity), now_us):
                    self._open(key, now_us)
            self._close_cold(now_us)
            if self._counters and all((key.limit.space, key.identity) in self._counters for key in check.keys):
                self._useful_until_us = now_us + USEFUL_US
            self._is_useful = now_us < self._useful_until_us

    def take(self, check: Check) -> Decision | Refill | None:
        """Pay for a check with prepaid tokens.

        A decision if the check is answered here. None if one of its keys is not hot, or a refill is in flight: send the
        check to the store. Otherwise a refill, to be driven at once: it yields the checks to send and returns the
        decision. A driver that is cancelled while the store works on a refill must still send the answer in before it
        closes the generator, or tokens that were charged for later requests are lost.
        """
        keys, cost, id = check
        if len(keys) == 1 and type(cost) is int:
            # The common case without calls: one key, with more tokens than needed.
            limit, _, identity = keys[0]
            counter = self._counters.get((limit.space, identity))
            if counter is None and not self._announced:
                return None
            if counter is not None and counter.limit is limit and cost:
                with self._lock:
                    now_us = self._now_us()
                    tokens = counter.tokens - cost
                    is_low = tokens < counter.refill_below and not counter.later and now_us >= counter.refill_until_us
                    if tokens >= 0 and now_us < counter.expires_us and not is_low:
                        counter.tokens = tokens
                        counter.demand += cost
                        self._allowed += 1
                        since_us = now_us - counter.answered_us
                        if counter.later:
                            tokens += sum([batch.tokens for batch in counter.later])
                        verdict = ((counter.left or 0) + tokens, 0, max(0, counter.reset_us - since_us), 0)
                        return Decision(True, keys, (verdict,), id, None, counter.at_us + since_us, 0, cost)
                    is_backing_off = counter.is_exhausted and now_us < counter.backoff_until_us
                    if is_backing_off and not counter.tokens and cost >= counter.backoff_from:
                        counter.demand += cost
                        self._denied += 1
                        return _deny(check, [(counter, cost)], now_us)
        with self._lock:
            now_us = self._now_us()
            return self._pay_all(check, now_us) or self._pay_or_refill(check, now_us)

    def announce(self, limits: Iterable[Limit]) -> None:
        """Set the limits whose bursts are announced: hot from the first check on, and with larger refills."""
        announced: dict[str, list[Limit]] = {}
        for limit in limits:
            if can_prepay(limit, self.lease_us):
                announced.setdefault(limit.space, []).append(limit)
        with self._lock:
            self._announced = announced
            for counter in self._counters.values():
                counter.is_announced = self._is_announced(counter.limit)

    def exclude(self, limits: Iterable[Limit]) -> None:
        """Set the limits, by their names, whose tokens are never prepaid."""
        with self._lock:
            self._excluded = frozenset([limit.space for limit in limits])
            for counter in [counter for counter in self._counters if counter[0] in self._excluded]:
                self._close(counter, self._now_us())

    def discard(self, space: str, identity: str) -> None:
        """Drop the tokens of a counter that was reset, without refunds."""
        with self._lock:
            now_us = self._now_us()
            name = space, identity
            self._refunds = [each for each in self._refunds if (each.key.limit.space, each.key.identity) != name]
            counter = self._counters.get(name)
            if counter is not None:
                counter.discard()
                # A new one: tokens of a refill in flight are added to the old one, which is not used any more.
                self._counters[name] = self._new_counter(counter.key, now_us, counter.rate)

    def record_denial(self, check: Check, decision: Decision, sent_us: int) -> None:
        """Back off after the store has denied a check that was sent at that instant, as no tokens were available."""
        with self._lock:
            now_us = self._now_us()
            for key, cost, verdict in zip(check.keys, check.costs, decision.verdicts, strict=True):
                counter = self._counters.get((key.limit.space, key.identity))
                if counter is None or counter.limit != key.limit:
                    continue
                if verdict[1] > 0 and sent_us > counter.since_us:
                    counter.record_verdict(verdict, decision.at_us, now_us)
                    counter.record_denial(cost, verdict, now_us)

    def wake(self, space: str, identity: str) -> None:
        """End the backoff of a counter that was refunded."""
        with self._lock:
            counter = self._counters.get((space, identity))
            if counter is not None:
                counter.wake(self._now_us())

    def take_refunds(self) -> list[Refund]:
        """Refunds of expired tokens. Send them at once or not at all: their amounts are right for a short time only."""
        with self._lock:
            now_us = self._now_us()
            self._close_cold(now_us)
            refunds, self._refunds = self._refunds, []
            for counter in self._counters.values():
                refunds += counter.take_refunds(now_us)
            return refunds

    def clear(self) -> list[Refund]:
        """Drop all counters; returns the refunds of their tokens."""
        with self._lock:
            now_us = self._now_us()
            for counter in list(self._counters):
                self._close(counter, now_us)
            refunds, self._refunds = self._refunds, []
            return refunds

    # ---------------------------------------------------------------- under the lock

    def _pay_all(self, check: Check, now_us: int) -> Decision | None:
        """The fast path for several keys: all have more tokens than needed."""
        counters = []
        for key, cost in zip(check.keys, check.costs, strict=True):
            counter = self._counters.get((key.limit.space, key.identity))
            if counter is None or counter.limit is not key.limit or not 0 < cost <= counter.tokens:
                return None
            if now_us >= counter.expires_us or counter.is_low(counter.tokens - cost, now_us):
                return None
            counters.append(counter)
        self._allowed += 1
        for counter, cost in zip(counters, check.costs, strict=True):
            counter.tokens -= cost
            counter.demand += cost
        return _allow(check, counters, now_us)

    def _pay_or_refill(self, check: Check, now_us: int) -> Refill | Decision | None:
        found: list[tuple[PrepaidCounter, int]] = []
        for key, cost in zip(check.keys, check.costs, strict=True):
            counter = self._find(key, now_us)
            if counter is None or not 0 < cost <= key.limit.capacity:
                return None
            found.append((counter, cost))
        for counter, cost in found:
            counter.demand += cost
        short = [(counter, cost) for counter, cost in found if counter.available(now_us) < cost]
        if any(counter.is_backing_off(cost, now_us) for counter, cost in short):
            self._denied += 1
            return _deny(check, found, now_us)
        if any(now_us < max(counter.refill_until_us, counter.no_refill_until_us) for counter, _ in short):
            return None
        nodes = max(1, self._nodes())
        extras = [self._extra(counter, cost, now_us, nodes) for counter, cost in found]
        if not short and not any(extras):
            self._allowed += 1
            for counter, cost in found:
                counter.take(cost)
            return _allow(check, [counter for counter, _ in found], now_us)
        items = []
        for (counter, cost), extra in zip(found, extras, strict=True):
            taken = counter.take(cost) if extra is None else []
            items.append(_RefillItem(counter, cost, extra, counter.target_size(now_us), taken))
            if extra is not None:
                counter.start_refill(now_us)
        return self._refill(check, items)

    def _extra(self, counter: PrepaidCounter, cost: int, now_us: int, nodes: int) -> int | None:
        """The tokens to prepay beside the cost; None if the cost is paid with available tokens."""
        spare = counter.available(now_us) - cost
        if spare < 0:
            return counter.refill_size(cost, now_us, nodes)
        is_backing_off = counter.is_exhausted and now_us < counter.backoff_until_us
        if spare >= counter.refill_below or now_us < counter.refill_until_us or is_backing_off:
            return None
        return counter.refill_size(cost, now_us, nodes) or None

    def _refill(self, check: Check, items: list[_RefillItem]) -> Refill:
        """Ask for more than the request needs; if that is denied, for less, and at last for what it needs."""
        with self._lock:
            self.pending_refills += 1
        try:
            for is_last in (False, False, True):
                if not is_last and not any(item.extra for item in items):
                    continue
                for item in items if is_last else ():
                    item.extra = item.extra and 0
                sent_us = self._now_us()
                decision = yield self._refill_check(check, items)
                answer = self._record_answer(check, items, decision, sent_us)
                if answer is not None:
                    return answer
            return self._refuse(check, items, decision)
        finally:
            self._release(items)

    @staticmethod
    def _refill_check(check: Check, items: list[_RefillItem]) -> Check:
        costs = tuple([0 if item.extra is None else item.cost + item.extra for item in items])
        return RefillCheck(check.keys, costs if len(costs) > 1 else costs[0], check.id)

    def _record_answer(
        self, check: Check, items: list[_RefillItem], decision: Decision, sent_us: int
    ) -> Decision | None:
        """The decision on the request if the refill was granted, or if there are enough tokens in the meantime."""
        with self._lock:
            now_us = self._now_us()
            for item, verdict in zip(items, decision.verdicts, strict=True):
                item.counter.record_verdict(verdict, decision.at_us, now_us)
            if decision.allowed:
                return self._grant(check, items, decision, sent_us, now_us)
            unpaid = [item for item in items if item.extra is not None]
            if all(item.counter.available(now_us) >= item.cost for item in unpaid):
                for item in unpaid:
                    item.counter.take(item.cost)
                for item in items:
                    item.taken = []
                return _allow(check, [item.counter for item in items], now_us)
            for item, verdict in zip(items, decision.verdicts, strict=True):
                if item.extra:
                    item.extra = item.counter.reduced_size(item.extra, item.cost, verdict[0])
            return None

    def _grant(self, check: Check, items: list[_RefillItem], decision: Decision, sent_us: int, now_us: int) -> Decision:
        verdicts = []
        for item, verdict in zip(items, decision.verdicts, strict=True):
            counter = item.counter
            if item.extra is not None:
                batch = counter.new_batch(item.extra, sent_us, verdict, decision.at_us)
                counter.add(batch, now_us, cost=item.cost, target=item.target)
            item.taken = []
            verdicts.append((verdict[0] + counter.available(now_us), *verdict[1:]))
            self._refund_if_closed(counter, now_us)
        return Decision(True, check.keys, tuple(verdicts), check.id, None, decision.at_us, 0, check.cost)

    def _refuse(self, check: Check, items: list[_RefillItem], decision: Decision) -> Decision:
        with self._lock:
            now_us = self._now_us()
            verdicts = []
            for item, verdict in zip(items, decision.verdicts, strict=True):
                left, wait_us, reset_us, delay_us = verdict
                if wait_us:
                    item.counter.record_denial(item.cost, verdict, now_us)
                    # An earlier retry would be denied by the backoff.
                    wait_us = max(wait_us, item.counter.backoff_until_us - now_us)
                verdicts.append((left, wait_us, max(reset_us, wait_us), delay_us))
            return Decision(False, check.keys, tuple(verdicts), check.id, None, decision.at_us, 0, check.cost)

    def _release(self, items: list[_RefillItem]) -> None:
        with self._lock:
            self.pending_refills = max(0, self.pending_refills - 1)  # 0 in a child that was forked in the meantime
            for item in items:
                if item.extra is not None:
                    item.counter.refill_until_us = 0
                item.counter.put(*item.taken)
                self._refund_if_closed(item.counter, self._now_us())

    def _refund_if_closed(self, counter: PrepaidCounter, now_us: int) -> None:
        """Queue a refund of tokens that arrive after their counter was closed: no request will spend them."""
        if counter.is_closed:
            self._refunds += counter.take_refunds(now_us, everything=True)

    def _find(self, key: Key, now_us: int) -> PrepaidCounter | None:
        limit, _, identity = key
        name = limit.space, identity
        counter = self._counters.get(name)
        if counter is None:
            is_hot = self._announced and self._is_announced(limit) and self._can_prepay(limit)
            return self._open(key, now_us) if is_hot else None
        if counter.limit is not limit:
            if counter.limit != limit:
                counter.discard()
                self._detector.drop(name)
                del self._counters[name]
                return None
            counter.limit, counter.key = limit, key
        return counter

    def _open(self, key: Key, now_us: int) -> PrepaidCounter | None:
        limit = key.limit
        name = limit.space, key.identity
        if len(self._counters) >= MAX_HOT_COUNTERS:
            self._detector.drop(name)
            return None
        self._detector.add(name, now_us)
        self._found += name not in self._counters
        # Nothing is measured yet: the least rate that is hot, or this node's share of an announced burst.
        share = limit.tokens * 1_000_000 // limit.ticks // max(1, self._nodes())
        rate = max(HOT_RATE, share) if self._is_announced(limit) else HOT_RATE
        return self._counters.setdefault(name, self._new_counter(key, now_us, rate))

    def _new_counter(self, key: Key, now_us: int, rate: int) -> PrepaidCounter:
        is_announced = self._is_announced(key.limit)
        return PrepaidCounter(key, now_us, lease_us=self.lease_us, rate=rate, is_announced=is_announced)

    def _close(self, name: Counter, now_us: int) -> None:
        self._detector.drop(name)
        counter = self._counters.pop(name)
        counter.is_closed = True
        self._refunds += counter.take_refunds(now_us, everything=True)

    def _close_cold(self, now_us: int) -> None:
        for name in self._detector.take_cold(now_us):
            if name in self._counters:
                self._close(name, now_us)

    def _can_prepay(self, limit: Limit) -> bool:
        return can_prepay(limit, self.lease_us) and limit.space not in self._excluded

    def _is_announced(self, limit: Limit) -> bool:
        return limit in self._announced.get(limit.space, ())


def _allow(check: Check, counters: list[PrepaidCounter], now_us: int) -> Decision:
    """Allow a request that was paid for: the store's last answer, plus the available tokens."""
    verdicts = []
    at_us = counters[0].at_us + now_us - counters[0].answered_us
    for counter in counters:
        since_us = now_us - counter.answered_us
        tokens = counter.available(now_us) if counter.later else counter.tokens
        verdicts.append(((counter.left or 0) + tokens, 0, max(0, counter.reset_us - since_us), 0))
        # The earliest: what one window charged must not seem to belong to the next.
        at_us = min(at_us, counter.at_us + since_us)
    return Decision(True, check.keys, tuple(verdicts), check.id, None, at_us, 0, check.cost)


def _deny(check: Check, found: list[tuple[PrepaidCounter, int]], now_us: int) -> Decision:
    """Deny a request during the backoff of the counters that have too few tokens."""
    verdicts = []
    for counter, cost in found:
        available = counter.available(now_us)
        reset_us = max(0, counter.reset_us - (now_us - counter.answered_us))
        if available < cost and counter.is_backing_off(cost, now_us):
            wait_us = counter.retry_after_us(cost, now_us)
            verdicts.append((available, wait_us, max(reset_us, wait_us), 0))
        else:
            verdicts.append((available + (counter.left or 0), 0, reset_us, 0))
    at_us = min([counter.at_us + now_us - counter.answered_us for counter, _ in found])
    return Decision(False, check.keys, tuple(verdicts), check.id, None, at_us, 0, check.cost)


def _round_down(tokens: int, cost: int) -> int:
    """A multiple of the cost: a remainder could not be spent."""
    return tokens - tokens % cost
