"""What was admitted while the store was away, so that it can be charged there when it is back.

A debt follows the rule of its own limit: each request is charged here as the store would have charged it, and what a
counter owes is what it would lack now. So buckets pay back by themselves, a window that is over owes nothing, and no
counter owes more than its capacity: nobody is locked out for longer than the limit itself could have done it.

A bucket refills once for the whole fleet. So each of n nodes deducts an n-th of the refill from its debts, as each
grants an n-th of a limit in mode `local`.

Each charge is sent at most once. Of one whose fate is unknown, nobody is charged twice; it is counted as uncertain.

What could not be given back is kept, too. It has an id, so that it can be sent until there is an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from headgate._fork import reinit_after_fork
from headgate.algorithms import ALGORITHMS
from headgate.clock import SystemClock
from headgate.errors import ScriptError, StoreError
from headgate.stores.operations import Check, Refund, refund_memory_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.keys import Key

__all__ = ["Debt", "OutageLedger", "Settled", "settle"]

BATCH: Final = 256
"""Charges that are sent together."""
MOST_TRIES: Final = 8
"""How often what is left of a counter is asked for that live requests empty at the same time."""

REFUND_WAY_US: Final = 100_000
"""So much later than now a refund may arrive: what a bucket refills until then does not come back, either."""

_REFILLED: Final = frozenset({"gcra", "leaky_bucket", "token_bucket"})
_WINDOWS: Final = frozenset({"fixed_window", "sliding_window"})
_PROBES: Final = 8
"""How many counters are looked at, where there are too many, to find the one to forget."""


class Debt(NamedTuple):
    """What is not settled yet."""

    keys: int
    """Counters that are to be charged, and refunds that are to be made."""
    tokens: int
    """What the counters owed when each was last charged: they may owe less by now."""


class Settled(NamedTuple):
    """What became of a debt."""

    keys: int
    """Counters that were charged."""
    charged: int
    """Tokens, as all that follow."""
    forgiven: int
    """Admitted beyond what the limits hold, here or in the store: charged to nobody."""
    uncertain: int
    """Sent, but not answered: charged or not, it is not sent again. Requests as well as charges of the ledger's own."""
    left: int
    """Back in the ledger, as it could not be sent."""
    returned: int = 0
    """Given back, of what could not be before."""


class OutageLedger:
    """What counters owe the store; `most` bounds how many there are.

    Without a clock of a test's own it goes by the machine's, and not by a monotonic one: windows begin where the
    store's do. `nodes` returns how many processes share the limits.
    """

    def __init__(
        self, clock: Clock | None = None, *, most: int = 100_000, nodes: Callable[[], int] = lambda: 1
    ) -> None:
        self._now_us: Callable[[], int] = (clock or SystemClock()).now_us
        self._most = most
        self._nodes = nodes
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """The parent settles what it has admitted; a child begins without debts."""
        self._lock = threading.RLock()
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        self._taken: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        """What was taken last, until it is known what became of it."""
        self._tokens = self._forgiven = self._uncertain = 0
        self._refunds: OrderedDict[tuple[str, str, int], Refund] = OrderedDict()
        """Those that were never sent, and can still grow."""
        self._sent: deque[Refund] = deque(maxlen=self._most)
        """Those that were sent, but not answered: nothing can be added to them any more."""

    @property
    def debt(self) -> Debt:
        return Debt(len(self._accounts) + self.refunds, self._tokens)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to settle and nothing to report."""
        return not (self._accounts or self._refunds or self._sent or self._uncertain)

    @property
    def counters(self) -> int:
        """How many owe anything."""
        return len(self._accounts)

    @property
    def refunds(self) -> int:
        """How many are to be made."""
        return len(self._refunds) + len(self._sent)

    def note_refund(self, refund: Refund) -> None:
        """This was certainly not given back, of a charge whose instant is known. Those of one counter become one."""
        limit, _, identity = refund.key
        at_us = place = refund.at_us or 0
        if limit.algorithm in _REFILLED:
            place = 0
        elif limit.algorithm in _WINDOWS:
            place = at_us // limit.period_us
        name = limit.space, identity, place
        with self._lock:
            known = self._refunds.get(name)
            if known is not None:
                refund = refund._replace(
                    amount=known.amount + refund.amount, id=known.id, at_us=min(known.at_us or 0, at_us)
                )
            else:
                if len(self._refunds) >= self._most:
                    self._refunds.popitem(last=False)  # the oldest, as it is worth the least
                refund = refund._replace(id=uuid4().hex)
            self._refunds[name] = refund

    def take_refunds(self, most: int) -> list[tuple[Refund, int]]:
        """So many that have waited the longest, and how much of each may come back; they are in the ledger no more.

        Windows and logs take a refund out of where it was charged, and know when that is over. A bucket may have become
        full since, and then its capacity and what comes back would both be spent: what it has refilled since the charge
        stays charged. See docs/decisions/0012-prepaid-tokens.md for the proof.
        """
        with self._lock:
            taken = [self._sent.popleft() for _ in range(min(most, len(self._sent)))]
            more = min(most - len(taken), len(self._refunds))
            taken += [self._refunds.popitem(last=False)[1] for _ in range(more)]
        now_us = self._now_us()
        worths = [(refund, _worth(refund, now_us)) for refund in taken]
        return [(refund, worth) for refund, worth in worths if worth > 0]

    def send_again(self, refunds: list[Refund]) -> None:
        """Whatever became of these: they have an id, and happen once."""
        with self._lock:
            self._sent.extend(refunds)

    def note(self, call: Check) -> None:
        """This was admitted without the store, and certainly not charged there."""
        keys, costs, _ = call
        for index, key in enumerate(keys):
            cost = costs[index] if isinstance(costs, tuple) else costs
            # Who is inside leaves by itself, or is forgotten when its lease is over.
            if cost and key[0].algorithm != "concurrency":
                self._charge(key, cost)

    def note_uncertain(self, call: Check) -> None:
        """This was admitted without the store, but may have been charged there: it is reported, and not charged."""
        tokens = sum(
            [cost for key, cost in zip(call.keys, call.costs, strict=True) if key.limit.algorithm != "concurrency"]
        )
        with self._lock:
            self._uncertain += tokens

    def take_uncertain(self) -> int:
        """Tokens noted as uncertain since the last call."""
        with self._lock:
            uncertain, self._uncertain = self._uncertain, 0
        return uncertain

    def take(self, most: int | None = None) -> list[tuple[Key, int]]:
        """What each counter owes now, or each of so many that have waited the longest; they are in the ledger no more.

        To look at all of them can take longer than anybody may wait: whoever cannot settle all should not take all."""
        with self._lock:
            count = len(self._accounts) if most is None else min(most, len(self._accounts))
            self._taken = OrderedDict([self._accounts.popitem(last=False) for _ in range(count)])
            accounts = list(self._taken.values())
            self._tokens -= sum([account.owed for account in accounts])
        now_us = self._now_us()
        owed = [(account.key, account.owes_at(now_us)) for account in accounts]
        return [(key, tokens) for key, tokens in owed if tokens]

    def put_back(self, owed: list[tuple[Key, int]]) -> None:
        """Owe it again, as if it had never been taken: it could not even be sent. All else that was taken is done."""
        for key, tokens in owed:
            if not self._restore(key, tokens):
                self._charge(key, tokens)
        with self._lock:
            self._taken = OrderedDict()

    def take_forgiven(self) -> int:
        """How many tokens were not noted since this was last asked: beyond their limit, or in one counter too many."""
        with self._lock:
            forgiven, self._forgiven = self._forgiven, 0
        return forgiven

    def _charge(self, key: Key, cost: int) -> None:
        limit, _, identity = key
        name = limit.space, identity
        now_us = self._now_us()
        with self._lock:
            account = self._accounts.get(name)
            if account is None:
                if len(self._accounts) >= self._most:
                    self._make_room(now_us)
                account = self._accounts[name] = _Account(key, now_us, max(1, self._nodes()))
            before = account.owed
            self._forgiven += account.charge(key, cost, now_us)
            self._tokens += account.owed - before

    def _restore(self, key: Key, tokens: int) -> bool:
        """Put a counter back as it was: charged anew, each vain attempt to settle would make its debt last longer."""
        name = key.limit.space, key.identity
        now_us = self._now_us()
        with self._lock:
            account = self._taken.pop(name, None)
            if account is None or name in self._accounts or len(self._accounts) >= self._most:
                return False
            if account.owes_at(now_us) > tokens:  # a part of it was settled
                return False
            self._accounts[name] = account
            self._tokens += account.owed
            return True

    def _make_room(self, now_us: int) -> None:
        """Forget what owes nothing any more; if nothing does, what is nearest to it."""
        probed = [self._accounts.popitem(last=False) for _ in range(min(_PROBES, len(self._accounts)))]
        probed.sort(key=lambda item: item[1].verdict_at(now_us)[2])
        for rank, (name, account) in enumerate(probed):
            owed = account.owes_at(now_us)
            if rank and owed:
                self._accounts[name] = account
            else:
                self._forgiven += owed
                self._tokens -= account.owed


class _Account:
    """One counter: what the store would know of it, had it been asked."""

    __slots__ = ("began_us", "key", "nodes", "owed", "state")

    def __init__(self, key: Key, began_us: int, nodes: int) -> None:
        self.key = key
        self.began_us, self.nodes = began_us, nodes
        self.state: Any = None
        self.owed = 0
        """When it was last charged."""

    def charge(self, key: Key, cost: int, now_us: int) -> int:
        """Charge so much of it as the limit holds; what is forgiven."""
        limit, algorithm, state = key.limit, ALGORITHMS[key.limit.algorithm], self.state
        now_us = self._slowed(now_us)
        if state is not None and self.key.limit is not limit:
            state = algorithm.adopt(state, now_us, self.key.limit, limit)
        charged = cost
        after, verdict = algorithm.decide(state, now_us, charged, limit)
        if verdict[1]:
            charged = verdict[0]
            after, verdict = algorithm.decide(state, now_us, charged, limit)
        self.key, self.state, self.owed = key, after, limit.capacity - verdict[0]
        return cost - charged

    def owes_at(self, now_us: int) -> int:
        """The charge to settle the debt now, in whole tokens.

        A part of a token counts as a whole one, as it does for the limit: it does not let a request pass. Of several
        nodes each rounds to the nearest, so that the parts do not add up.
        """
        limit = self.key.limit
        if self.nodes > 1 and limit.algorithm in _REFILLED:
            now_us += self.nodes * limit.ticks // (2 * limit.tokens)
        return limit.capacity - self.verdict_at(now_us)[0]

    def verdict_at(self, now_us: int) -> Verdict:
        return ALGORITHMS[self.key.limit.algorithm].decide(self.state, self._slowed(now_us), 0, self.key.limit)[1]

    def _slowed(self, now_us: int) -> int:
        """The instant at which the whole refill would be what this node's share of it is now. Windows and logs add up
        over the nodes by themselves."""
        if self.nodes == 1 or self.key.limit.algorithm not in _REFILLED:
            return now_us
        return self.began_us + (now_us - self.began_us) // self.nodes


def _worth(refund: Refund, now_us: int) -> int:
    """How much of a refund may come back now."""
    limit, age_us = refund.key.limit, max(0, now_us - (refund.at_us or 0)) + REFUND_WAY_US
    if age_us >= refund_memory_us(refund.key):  # the store may not know the id any more: it could come back twice
        return 0
    return refund.amount + (-age_us * limit.tokens // limit.ticks if limit.algorithm in _REFILLED else 0)


def settle(
    ledger: OutageLedger,
    run_all: Callable[[list[Any]], list[Any]],
    *,
    most_seconds: float,
    now: Callable[[], float],
) -> Settled:
    """Charge the store with what the ledger holds, for at most so many seconds; what is left stays in the ledger.

    First it gets back what it could not get before, so that less has to be forgiven.
    `run_all` carries out the calls, each by itself, and never twice. Where the store has less than is owed, all
    that it has is taken. As soon as it answers nothing of a batch, the rest is kept for another time.
    """
    end = now() + most_seconds
    returned, is_answered = _give_back(ledger, run_all, lambda: now() < end)
    untaken = ledger.counters
    keys = charged = left = 0
    forgiven, uncertain = ledger.take_forgiven(), ledger.take_uncertain()
    while untaken > 0 and is_answered and now() < end:
        waiting = deque([(key, owed, 1) for key, owed in ledger.take(min(BATCH, untaken))])
        untaken -= BATCH
        back: list[tuple[Key, int]] = []
        try:
            while waiting and is_answered:
                batch = [waiting.popleft() for _ in range(len(waiting))]
                answers = run_all([Check((key,), amount) for key, amount, _ in batch])
                is_answered = False
                for (key, amount, tries), answer in zip(batch, answers, strict=True):
                    if isinstance(answer, StoreError):
                        if answer.may_have_happened:
                            uncertain += amount
                        else:
                            back.append((key, amount))
                        continue
                    is_answered = True
                    if answer.allowed:
                        keys += 1
                        charged += amount
                        continue
                    # Nothing was charged, so it can be asked again: for what is left.
                    rest = min(amount, answer.remaining)
                    forgiven += amount - rest
                    if rest and tries < MOST_TRIES:
                        waiting.append((key, rest, tries + 1))
                    elif rest:
                        back.append((key, rest))
        finally:
            back += [(key, amount) for key, amount, _ in waiting]
            ledger.put_back(back)
        left += sum(amount for _, amount in back)
    if untaken > 0:  # with what was not even looked at, and what has come in since
        left = ledger.debt.tokens
    return Settled(keys, charged, forgiven, uncertain, left, returned)


def _give_back(
    ledger: OutageLedger, run_all: Callable[[list[Any]], list[Any]], may_go_on: Callable[[], bool]
) -> tuple[int, bool]:
    """How much was given back, and whether the store answers."""
    returned, untaken = 0, ledger.refunds
    while untaken > 0 and may_go_on():
        batch = ledger.take_refunds(min(BATCH, untaken))
        untaken -= BATCH
        left = [refund for refund, _ in batch]
        try:
            answers = run_all([refund._replace(amount=worth) for refund, worth in batch]) if batch else []
            left = [refund for refund, answer in zip(left, answers, strict=True) if _is_lost(answer)]
        finally:
            ledger.send_again(left)
        returned += sum([worth for (_, worth), answer in zip(batch, answers, strict=True) if answer is True])
        if batch and len(left) == len(batch):
            return returned, False
    return returned, True


def _is_lost(answer: object) -> bool:
    return isinstance(answer, StoreError) and not isinstance(answer, ScriptError)
