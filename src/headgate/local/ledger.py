"""The outage ledger: what was admitted without the store, to be charged there after the outage.

A debt follows the rule of its own limit: each request is charged here as the store would have charged it, and a counter
owes what it would lack now. So buckets pay back by refilling, a window that is over owes nothing, and no counter owes
more than its capacity: no client is locked out for longer than the limit itself could have done.

A bucket refills once for the whole fleet. So each of n nodes deducts an n-th of the refill from its debts, as each
admits an n-th of a limit in mode `local`.

Each charge is sent at most once: one of unknown outcome is not repeated, and is counted as uncertain. Refunds that
failed are kept, too. They have an id, so that they can be sent until there is an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from headgate._fork import reinit_after_fork
from headgate.clock import SystemClock
from headgate.errors import ScriptError, StoreError
from headgate.stores.operations import Check, Refund, refund_memory_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["OutageDebt", "OutageLedger", "OutageOvershoot", "Settlement", "settle"]

MAX_BATCH: Final = 256
MAX_ATTEMPTS: Final = 8
"""Charges of what is left in a counter that live requests empty at the same time."""

REFUND_LATENCY_US: Final = 100_000
"""Upper bound on the way of a refund: what a bucket refills in that time is not returned, either."""

_REFILLED: Final = frozenset({"gcra", "leaky_bucket", "token_bucket"})
_WINDOWS: Final = frozenset({"fixed_window", "sliding_window"})
_EVICTION_CANDIDATES: Final = 8


class OutageDebt(NamedTuple):
    """Unsettled charges and refunds."""

    keys: int
    """Counters to charge, and refunds to make."""
    tokens: int
    """Owed when each counter was last charged: by now it may be less."""


class Settlement(NamedTuple):
    """The result of a settlement."""

    keys: int
    """Counters that were charged."""
    charged: int
    """Tokens, as all that follow."""
    forgiven: int
    """Admitted beyond the limits, here or in the store, and not charged."""
    uncertain: int
    """Sent but not answered, and not sent again. Requests as well as charges of the ledger."""
    left: int
    """Back in the ledger, as it could not be sent."""
    returned: int = 0
    """Refunded, of what could not be refunded before."""


class OutageOvershoot(NamedTuple):
    """The counter that was furthest over its limit after an outage, as far as this process knows."""

    limit: Limit
    over: int
    """Tokens that this process admitted, and that exceeded the limit."""
    outage_us: int
    """The time since its first request without the store."""
    nodes: int
    """Live nodes when it began."""
    is_bounded: bool
    """False if the failure mode admitted everything."""


class OutageLedger:
    """The debts of counters; `max_counters` bounds their number.

    It uses the system clock, not a monotonic one, unless one is injected: windows begin where the store's do. `nodes`
    returns the number of processes that share the limits.
    """

    def __init__(
        self, clock: Clock | None = None, *, max_counters: int = 100_000, nodes: Callable[[], int] = lambda: 1
    ) -> None:
        self._now_us: Callable[[], int] = (clock or SystemClock()).now_us
        self._max_counters = max_counters
        self._nodes = nodes
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave the debts to the parent."""
        self._lock = threading.RLock()
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        self._taken: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        """The accounts that were taken last, until the outcome is known."""
        self._tokens = self._forgiven = self._uncertain = 0
        self._overshoot: OutageOvershoot | None = None
        self._refunds: OrderedDict[tuple[str, str, int], Refund] = OrderedDict()
        """Refunds that were never sent, and can still grow."""
        self._sent_refunds: deque[Refund] = deque(maxlen=self._max_counters)
        """Refunds that were sent but not answered, whose amounts are fixed."""

    @property
    def debt(self) -> OutageDebt:
        return OutageDebt(len(self._accounts) + self.refunds, self._tokens)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to settle and nothing to report."""
        return not (self._accounts or self._refunds or self._sent_refunds or self._uncertain)

    @property
    def counters(self) -> int:
        return len(self._accounts)

    @property
    def refunds(self) -> int:
        return len(self._refunds) + len(self._sent_refunds)

    def record(self, check: Check, *, is_bounded: bool = True) -> None:
        """Charge a check that was admitted without the store, and certainly not charged there.

        `is_bounded` is False if its failure mode admits everything.
        """
        keys, costs, _ = check
        for index, key in enumerate(keys):
            cost = costs[index] if isinstance(costs, tuple) else costs
            if cost and key[0].algorithm != "concurrency":  # leases end by themselves
                self._charge(key, cost, is_bounded=is_bounded)

    def record_uncertain(self, check: Check) -> None:
        """Count a check that was admitted without the store but may have been charged there."""
        charges = zip(check.keys, check.costs, strict=True)
        with self._lock:
            self._uncertain += sum([cost for key, cost in charges if key.limit.algorithm != "concurrency"])

    def record_refund(self, refund: Refund) -> None:
        """Keep a refund that was certainly not made, of a charge whose instant is known. Those of one counter, or of
        one window, become one."""
        limit, identity = refund.key.limit, refund.key.account
        at_us = refund.at_us or 0
        if limit.calendar is not None:
            window = limit.calendar.window(at_us)[0]
        else:
            window = at_us // (limit.period_us if limit.algorithm in _WINDOWS else 1)
        name = limit.space, identity, 0 if limit.algorithm in _REFILLED else window
        with self._lock:
            known = self._refunds.get(name)
            if known is None:
                if len(self._refunds) >= self._max_counters:
                    self._refunds.popitem(last=False)  # the oldest, which is worth the least
                known = refund._replace(id=uuid4().hex, amount=0)
            amount, earliest_us = known.amount + refund.amount, min(known.at_us or 0, at_us)
            self._refunds[name] = known._replace(key=refund.key, amount=amount, at_us=earliest_us)

    def take_refunds(self, most: int) -> list[tuple[Refund, int]]:
        """Remove the oldest refunds, each with the amount that may be returned now.

        Windows and logs return a charge to where it was counted, and know when that is over. A bucket may have become
        full since, and then its capacity and the refund would both be spent: what it has refilled since the charge
        stays charged. See docs/decisions/0012-prepaid-tokens.md for the proof.
        """
        with self._lock:
            taken = [self._sent_refunds.popleft() for _ in range(min(most, len(self._sent_refunds)))]
            more = min(most - len(taken), len(self._refunds))
            taken += [self._refunds.popitem(last=False)[1] for _ in range(more)]
        now_us = self._now_us()
        amounts = [(refund, _refundable(refund, now_us)) for refund in taken]
        return [(refund, amount) for refund, amount in amounts if amount > 0]

    def put_back_refunds(self, refunds: list[Refund]) -> None:
        """Send these again, whatever their outcome: they have an id, and are made once."""
        with self._lock:
            self._sent_refunds.extend(refunds)

    def take(self, most: int | None = None) -> list[tuple[Key, int]]:
        """Remove the accounts that have waited longest, each with what it owes now.

        Computing the debts of all accounts may take too long: take no more than can be settled.
        """
        with self._lock:
            count = len(self._accounts) if most is None else min(most, len(self._accounts))
            self._taken = OrderedDict([self._accounts.popitem(last=False) for _ in range(count)])
            accounts = list(self._taken.values())
            for account in accounts:
                self._compare_overshoot(account)
            self._tokens -= sum([account.owed for account in accounts])
        now_us = self._now_us()
        owed = [(account.key, account.owed_at(now_us)) for account in accounts]
        return [(key, tokens) for key, tokens in owed if tokens]

    def put_back(self, owed: list[tuple[Key, int]]) -> None:
        """Restore debts that could not be sent. Everything else that was taken is done."""
        for key, tokens in owed:
            if not self._restore(key, tokens):
                self._charge(key, tokens)
        with self._lock:
            self._taken = OrderedDict()

    def take_uncertain(self) -> int:
        """Tokens recorded as uncertain since the last call."""
        with self._lock:
            uncertain, self._uncertain = self._uncertain, 0
        return uncertain

    def take_forgiven(self) -> int:
        """Tokens not recorded since the last call: over their limit, or of a counter that was evicted."""
        with self._lock:
            forgiven, self._forgiven = self._forgiven, 0
        return forgiven

    def record_forgiven(self, key: Key, tokens: int) -> None:
        """Record that the store had so much less left than an account owed."""
        with self._lock:
            account = self._taken.get((key.limit.space, key.account))
            if account is not None:
                account.forgiven += tokens
                self._compare_overshoot(account)

    def take_overshoot(self) -> OutageOvershoot | None:
        """The largest overshoot of one counter that was settled since the last call; None if there was none."""
        with self._lock:
            overshoot, self._overshoot = self._overshoot, None
            return overshoot

    def _compare_overshoot(self, account: _Account) -> None:
        if account.forgiven > (0 if self._overshoot is None else self._overshoot.over):
            outage_us = max(0, self._now_us() - account.start_us)
            nodes, is_bounded = account.nodes, account.is_bounded
            self._overshoot = OutageOvershoot(account.key.limit, account.forgiven, outage_us, nodes, is_bounded)

    def _charge(self, key: Key, cost: int, *, is_bounded: bool = True) -> None:
        name = key.limit.space, key.account
        now_us = self._now_us()
        with self._lock:
            account = self._accounts.get(name)
            if account is None:
                if len(self._accounts) >= self._max_counters:
                    self._evict(now_us)
                account = self._accounts[name] = _Account(key, now_us, max(1, self._nodes()))
            before = account.owed
            forgiven = account.charge(key, cost, now_us)
            account.forgiven += forgiven
            account.is_bounded &= is_bounded
            self._forgiven += forgiven
            self._tokens += account.owed - before

    def _restore(self, key: Key, tokens: int) -> bool:
        """Put an account back as it was: if it were charged anew, each failed attempt would extend its debt."""
        name = key.limit.space, key.account
        now_us = self._now_us()
        with self._lock:
            account = self._taken.pop(name, None)
            if account is None or name in self._accounts or len(self._accounts) >= self._max_counters:
                return False
            if account.owed_at(now_us) > tokens:  # a part of it was settled
                return False
            self._accounts[name] = account
            self._tokens += account.owed
            return True

    def _evict(self, now_us: int) -> None:
        """Drop accounts that owe nothing any more; if there are none, the one whose debt ends first."""
        count = min(_EVICTION_CANDIDATES, len(self._accounts))
        candidates = [self._accounts.popitem(last=False) for _ in range(count)]
        candidates.sort(key=lambda item: item[1].verdict_at(now_us)[2])
        for rank, (name, account) in enumerate(candidates):
            owed = account.owed_at(now_us)
            if rank and owed:
                self._accounts[name] = account
            else:
                self._forgiven += owed
                self._tokens -= account.owed


@dataclass(slots=True, eq=False)
class _Account:
    """One counter, in the state that it would have in the store."""

    key: Key
    start_us: int
    nodes: int
    state: Any = None
    owed: int = 0
    """When it was last charged."""
    forgiven: int = 0
    is_bounded: bool = True

    def charge(self, key: Key, cost: int, now_us: int) -> int:
        """Charge as much as the limit allows; return what is forgiven."""
        limit, algorithm, state = key.limit, key.limit.implementation, self.state
        now_us = self._scaled(now_us)
        if state is not None and self.key.limit is not limit:
            state = algorithm.adopt(state, now_us, self.key.limit, limit)
        charged = cost
        after, verdict = algorithm.decide(state, now_us, charged, limit)
        if verdict[1]:
            charged = verdict[0]
            after, verdict = algorithm.decide(state, now_us, charged, limit)
        self.key, self.state, self.owed = key, after, limit.capacity - verdict[0]
        return cost - charged

    def owed_at(self, now_us: int) -> int:
        """The charge that settles the debt now, in whole tokens.

        A fraction of a token counts as a whole one, as it does for the limit: no request passes with it. With several
        nodes, each rounds to the nearest, so that the fractions do not add up.
        """
        limit = self.key.limit
        if self.nodes > 1 and limit.algorithm in _REFILLED:
            now_us += self.nodes * limit.ticks // (2 * limit.tokens)
        return limit.capacity - self.verdict_at(now_us)[0]

    def verdict_at(self, now_us: int) -> Verdict:
        return self.key.limit.implementation.decide(self.state, self._scaled(now_us), 0, self.key.limit)[1]

    def _scaled(self, now_us: int) -> int:
        """The instant at which the whole refill is this node's share of it now. Windows and logs add up over the nodes
        without this."""
        if self.nodes == 1 or self.key.limit.algorithm not in _REFILLED:
            return now_us
        return self.start_us + (now_us - self.start_us) // self.nodes


def _refundable(refund: Refund, now_us: int) -> int:
    limit, age_us = refund.key.limit, max(0, now_us - (refund.at_us or 0)) + REFUND_LATENCY_US
    if age_us >= refund_memory_us(refund.key):  # the store may have forgotten the id: it could be made twice
        return 0
    return refund.amount + (-age_us * limit.tokens // limit.ticks if limit.algorithm in _REFILLED else 0)


def settle(
    ledger: OutageLedger, run_all: Callable[[list[Any]], list[Any]], *, timeout_s: float, now: Callable[[], float]
) -> Settlement:
    """Charge the debts of the ledger to the store, until the timeout; the rest stays in the ledger.

    Refunds come first, so that less has to be forgiven. `run_all` carries out the operations, each by itself and never
    twice. Where the store has less left than is owed, all of that is charged. As soon as a whole batch is not answered,
    the rest is kept for later.
    """
    end = now() + timeout_s
    returned, is_answered = _send_refunds(ledger, run_all, lambda: now() < end)
    untaken = ledger.counters
    keys = charged = left = 0
    forgiven, uncertain = ledger.take_forgiven(), ledger.take_uncertain()
    while untaken > 0 and is_answered and now() < end:
        waiting = deque([(key, owed, 1) for key, owed in ledger.take(min(MAX_BATCH, untaken))])
        untaken -= MAX_BATCH
        unsettled: list[tuple[Key, int]] = []
        try:
            while waiting and is_answered:
                batch = [waiting.popleft() for _ in range(len(waiting))]
                answers = run_all([Check((key,), amount) for key, amount, _ in batch])
                is_answered = False
                for (key, amount, attempt), answer in zip(batch, answers, strict=True):
                    if isinstance(answer, StoreError):
                        if answer.may_have_happened:
                            uncertain += amount
                        else:
                            unsettled.append((key, amount))
                        continue
                    is_answered = True
                    if answer.allowed:
                        keys, charged = keys + 1, charged + amount
                        continue
                    # Nothing was charged: try again with what is left.
                    rest = min(amount, answer.remaining)
                    forgiven += amount - rest
                    ledger.record_forgiven(key, amount - rest)
                    if rest and attempt < MAX_ATTEMPTS:
                        waiting.append((key, rest, attempt + 1))
                    elif rest:
                        unsettled.append((key, rest))
        finally:
            unsettled += [(key, amount) for key, amount, _ in waiting]
            ledger.put_back(unsettled)
        left += sum(amount for _, amount in unsettled)
    if untaken > 0:  # including what was not taken, and what has come in since
        left = ledger.debt.tokens
    return Settlement(keys, charged, forgiven, uncertain, left, returned)


def _send_refunds(
    ledger: OutageLedger, run_all: Callable[[list[Any]], list[Any]], may_continue: Callable[[], bool]
) -> tuple[int, bool]:
    """The amount that was refunded, and whether the store answers."""
    returned, untaken = 0, ledger.refunds
    while untaken > 0 and may_continue():
        batch = ledger.take_refunds(min(MAX_BATCH, untaken))
        untaken -= MAX_BATCH
        unanswered = [refund for refund, _ in batch]
        try:
            answers = run_all([refund._replace(amount=amount) for refund, amount in batch]) if batch else []
            unanswered = [refund for refund, answer in zip(unanswered, answers, strict=True) if _is_lost(answer)]
        finally:
            ledger.put_back_refunds(unanswered)
        returned += sum([amount for (_, amount), answer in zip(batch, answers, strict=True) if answer is True])
        if batch and len(unanswered) == len(batch):
            return returned, False
    return returned, True


def _is_lost(answer: object) -> bool:
    return isinstance(answer, StoreError) and not isinstance(answer, ScriptError)
