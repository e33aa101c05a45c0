"""What was admitted while the store was away, so that it can be charged there when it is back.

A debt follows the rule of its own limit: each request is charged here as the store would have charged it, and what a
counter owes is what it would lack now. So buckets pay back by themselves, a window that is over owes nothing, and no
counter owes more than its capacity: nobody is locked out for longer than the limit itself could have done it.

Each charge is sent at most once. Of one whose fate is unknown, nobody is charged twice; it is counted as uncertain.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._forks import renew_in_children
from headgate.algorithms import ALGORITHMS
from headgate.clock import SystemClock
from headgate.errors import StoreError
from headgate.stores.calls import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.keys import Key

__all__ = ["Debt", "Ledger", "Settled", "settle"]

BATCH: Final = 256
"""Charges that are sent together."""
MOST_TRIES: Final = 8
"""How often what is left of a counter is asked for that live requests empty at the same time."""

_PROBES: Final = 8
"""How many counters are looked at, where there are too many, to find the one to forget."""


class Debt(NamedTuple):
    """What is not settled yet."""

    keys: int
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
    """Sent, but not answered: charged or not, it is not sent again."""
    left: int
    """Back in the ledger, as it could not be sent."""


class Ledger:
    """What counters owe the store; `most` bounds how many there are.

    Without a clock of a test's own it goes by the machine's, and not by a monotonic one: windows begin where the
    store's do.
    """

    def __init__(self, clock: Clock | None = None, *, most: int = 100_000) -> None:
        self._now_us: Callable[[], int] = (clock or SystemClock()).now_us
        self._most = most
        self.renew_after_fork()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """The parent settles what it has admitted; a child begins without debts."""
        self._lock = threading.Lock()
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        self._taken: OrderedDict[tuple[str, str], _Account] = OrderedDict()
        """What was taken last, until it is known what became of it."""
        self._tokens = self._forgiven = 0

    @property
    def debt(self) -> Debt:
        return Debt(len(self._accounts), self._tokens)

    def note(self, call: Check) -> None:
        """This was admitted without the store, and certainly not charged there."""
        for key, cost in zip(call.keys, call.costs, strict=True):
            # Who is inside leaves by itself, or is forgotten when its lease is over.
            if cost and key.limit.algorithm != "concurrency":
                self._charge(key, cost)

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
                account = self._accounts[name] = _Account(key)
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

    __slots__ = ("key", "owed", "state")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.state: Any = None
        self.owed = 0
        """When it was last charged."""

    def charge(self, key: Key, cost: int, now_us: int) -> int:
        """Charge so much of it as the limit holds; what is forgiven."""
        limit, algorithm, state = key.limit, ALGORITHMS[key.limit.algorithm], self.state
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
        """A part of a token counts as a whole one, as it does for the limit: it does not let a request pass."""
        return self.key.limit.capacity - self.verdict_at(now_us)[0]

    def verdict_at(self, now_us: int) -> Verdict:
        return ALGORITHMS[self.key.limit.algorithm].decide(self.state, now_us, 0, self.key.limit)[1]


def settle(
    ledger: Ledger,
    run_all: Callable[[list[Check]], list[Decision | StoreError]],
    *,
    most_seconds: float,
    now: Callable[[], float],
) -> Settled:
    """Charge the store with what the ledger holds, for at most so many seconds; what is left stays in the ledger.

    `run_all` carries out the checks, each by itself, and never twice. Where the store has less than is owed, all
    that it has is taken. As soon as it answers nothing of a batch, the rest is kept for another time.
    """
    end = now() + most_seconds
    untaken = ledger.debt.keys
    keys = charged = uncertain = left = 0
    forgiven = ledger.take_forgiven()
    is_answered = True
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
    return Settled(keys, charged, forgiven, uncertain, left)
