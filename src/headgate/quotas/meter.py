"""The quota meter: charges requests to leases in memory, and writes them to the ledger in batches.

A lease is an amount that the ledger has reserved for this process. A charge takes from a lease, and writes one line to
the journal. A background thread writes the charges to the ledger as usage records, takes leases before they run out,
and closes those that are used up. So no request waits for the ledger, except for the first of an account.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias
from uuid import uuid4

from headgate._fork import reinit_after_fork
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput
from headgate.quotas.arguments import MAX_AMOUNT, MAX_REFERENCE, check_account, check_amount, check_id, check_text
from headgate.quotas.entries import UsageRecord, slice_sources
from headgate.quotas.journal import UsageJournal, abandoned_journals
from headgate.quotas.ledger import LEASE_TTL, LedgerUnavailable
from headgate.quotas.storage import LedgerDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Self

    from headgate.quotas.entries import LeaseAnswer, QuotaReservation, Sources
    from headgate.quotas.ledger import Ledger
    from headgate.quotas.plans import QuotaPlan

__all__ = ["AccountBalance", "MeterReservation", "MeterStats", "QuotaMeter", "Refusal"]

logger = logging.getLogger("headgate")

LEASE_S: Final = 5.0
"""The time for which a lease should last at the current rate."""
RETIRE_AFTER_S: Final = 12 * 3600.0
"""Leases are not spent any more after half of their lifetime, so that they are closed long before they expire."""
IDLE_S: Final = 30.0
FIRST_LEASE: Final = 100
REFILL_AT: Final = 0.5
SHARE: Final = 4
"""A lease is at most this part of the balance, so that leases shrink near the end, and other processes find some."""
REFUSAL_S: Final = 0.5
"""The time for which an account without balance is not looked at again."""
MAX_RECENT_IDS: Final = 100_000
MAX_USAGE_BATCH: Final = 2000
MAX_QUESTIONS: Final = 2000
"""The number of ids that the ledger is asked about at the same time."""
RECOVERY_INTERVAL_S: Final = 30.0
NO_PLAN: Final = "none"
ENDED: Final = -1
"""The amount of a reservation that was committed or voided."""
OUTAGE: Final = "outage"
"""The source of units that were admitted without a lease, and are charged when the ledger is available again."""


Refusal: TypeAlias = Literal["exhausted", "unavailable", "pending"]
"""Why there is no reservation: the account has too little left, the ledger does not answer, or has not answered yet."""


class AccountBalance(NamedTuple):
    """The units that an account has left, as far as this process knows."""

    remaining: int
    """Its own leases, and the balance when the ledger was last asked for one: without the leases of other processes."""
    period_end_us: int
    """The end of the current period; 0 if that is not known."""


class MeterStats(NamedTuple):
    """The state of a meter, for metrics."""

    leased: int
    """Units in open leases that are not spent."""
    unwritten: int
    """Charged units that are not yet in the ledger: in doubt if the machine crashes."""
    outage: int
    """Units that were admitted without a lease while the ledger was unavailable, and are not settled."""
    leases: int
    charges: int
    ledger_writes: int
    is_ledger_available: bool
    unwritten_s: float
    """The age of the oldest charge that is not yet in the ledger; 0 if there is none."""
    rejections: dict[tuple[str, str], int]
    """The number of requests that were refused, by the name of the plan, "none" without one, and the reason."""


class _MeterLease:
    __slots__ = ("account", "amount", "id", "left", "open", "paid_by", "retire_at", "used_at", "valid_until_us")

    def __init__(self, made: QuotaReservation, now: float) -> None:
        self.account, self.id, self.amount, self.left = made.account, made.id, made.amount, made.amount
        self.valid_until_us, self.paid_by = made.valid_until_us, made.paid_by
        self.open = 0
        """Reservations that are not committed, and usage that is not written."""
        self.used_at = now
        self.retire_at = now + RETIRE_AFTER_S


class _MeteredAccount:
    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.plan: QuotaPlan | None = None
        self.leases: deque[_MeterLease] = deque()
        self.needed = 0
        """The largest charge that waits for a lease."""
        self.is_asking = False
        self.refused_until = 0.0
        self.refused_amount = 0
        """The smallest amount for which the balance was too low."""
        self.spent = 0
        self.rate = 0.0
        self.measured_at = self.used_at = now
        self.outage_id = ""
        self.outage_used = 0
        self.balance = self.period_end_us = 0

    def is_refused(self, amount: int, now: float) -> bool:
        return now < self.refused_until and amount >= self.refused_amount

    def refuse(self, amount: int, now: float) -> None:
        is_known = now < self.refused_until
        self.refused_amount = min(amount, self.refused_amount) if is_known else amount
        self.refused_until = now + REFUSAL_S

    @property
    def is_damaged(self) -> bool:
        return self.refused_until == math.inf

    def take_outage(self, amount: int, most: int) -> bool:
        """Admit an amount without a lease, while there are at most so many units."""
        if self.is_damaged or self.outage_used + amount > most:
            return False
        self.outage_used += amount
        self.outage_id = self.outage_id or f"outage-{uuid4().hex}"
        return True

    def is_idle(self, now: float) -> bool:
        """True if nothing is known of it that the ledger does not know."""
        is_in_use = self.leases or self.needed or self.outage_used or self.is_damaged
        return not is_in_use and now - self.used_at > IDLE_S

    def left(self) -> int:
        left = 0
        for lease in self.leases:
            left += lease.left
        return left

    def remaining(self) -> int:
        """The units that the account has left, without the leases of other processes."""
        return self.left() + self.balance

    def measure(self, now: float) -> None:
        elapsed = max(now - self.measured_at, 0.001)
        rate = self.spent / elapsed
        self.rate = max(rate, (rate + self.rate) / 2) if elapsed < LEASE_S else rate
        self.spent, self.measured_at = 0, now

    def wanted(self) -> int:
        """The size of a lease that is due; 0 if none is."""
        target = max(FIRST_LEASE, self.needed, int(self.rate * LEASE_S))
        return target if self.needed or self.left() < target * REFILL_AT else 0


class MeterReservation:
    """Units that are held for a request. End it with `commit` or `void`."""

    __slots__ = (
        "_meter", "_part", "account", "amount", "holders", "id", "is_repeated", "lease", "period_end_us", "reference",
        "remaining",
    )  # fmt: skip

    def __init__(
        self, meter: QuotaMeter, lease: _MeterLease | None, state: _MeteredAccount, amount: int, id: str, reference: str
    ) -> None:
        self._meter, self.lease = meter, lease
        self.account, self.remaining, self.period_end_us = state.name, state.remaining(), state.period_end_us
        self.amount, self.id, self.reference = amount, id, reference
        self._part: tuple[Sources, int, int]
        """The sources, and the start and size of the part of a lease that pays for it."""
        if lease is None:
            self._part = ((OUTAGE, amount),), 0, amount
        else:
            self._part = lease.paid_by, lease.amount - lease.left - amount, amount
        self.holders = 1
        """The requests with its id that have not ended it: a retry may arrive before the first one is done."""
        self.is_repeated = False
        """True for a request that was charged before: it is charged once, whatever is committed now."""

    @classmethod
    def of_charged(cls, meter: QuotaMeter, state: _MeteredAccount, id: str, reference: str) -> Self:
        """The repetition of a request that is in the ledger."""
        made = cls(meter, None, state, ENDED, id, reference)
        made.is_repeated, made._part = True, ((), 0, 0)
        return made

    @property
    def paid_by(self) -> Sources:
        """The sources that pay for it, such as "allowance" or "pay as you go", with their amounts: "outage" for a
        request that was admitted without a lease, and none for one that another process has charged."""
        return self._part[0] if self.lease is None else slice_sources(*self._part)

    def commit(self, amount: int) -> None:
        """Charge the amount that was really used, once; the rest is available again."""
        self._meter.settle(self, check_amount(amount))

    def void(self) -> None:
        """End the reservation without a charge, unless another request with its id commits it."""
        self._meter.settle(self, None)


class QuotaMeter:
    """Charges requests of one process to accounts of a ledger. Thread-safe.

    `journal` is a directory for the journals of all processes on this machine: without it, charges of the last moments
    are lost with the process. While the ledger is unavailable, leases are spent, and then up to `outage_units` per
    account, which are settled later; with 0, requests are refused.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        journal: str | os.PathLike[str] | None = None,
        outage_units: int = 0,
        write_interval_s: float = 0.1,
        wait_s: float = 1.0,
        on_change: Callable[[HeadgateError | None], None] | None = None,
    ) -> None:
        """`on_change` is called by the background thread: with an error when the ledger becomes unavailable, with None
        when it is available again."""
        self._ledger = ledger
        self._directory = None if journal is None else os.path.abspath(journal)
        self._on_change = on_change
        self._outage_units, self._interval_s, self._wait_s = outage_units, write_interval_s, wait_s
        self._start()
        self._journal: UsageJournal | None = None
        if self._directory is not None:
            self._journal = UsageJournal(self._directory)
        reinit_after_fork(self)

    def _start(self) -> None:
        self._exchange_lock = threading.Lock()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._journal = None
        self._accounts: dict[str, _MeteredAccount] = {}
        self._recent: OrderedDict[str, MeterReservation] = OrderedDict()
        self._id_prefix, self._numbers = uuid4().hex, count(1)
        """Ids of requests without one: unique, faster to make than random ones, and next to each other in an index."""
        self._questions: dict[str, None] = {}
        """Ids of requests that the balance does not cover, until the ledger has answered if they are repetitions."""
        self._answers: dict[str, tuple[bool, float]] = {}
        """By such an id, the answer, and the time until which it is used."""
        self._usage: list[tuple[_MeterLease, UsageRecord]] = []
        self._outages: dict[str, list[UsageRecord]] = {}
        self._closing: list[_MeterLease] = []
        self._pending: list[tuple[str, str, int, int]] = []
        """Leases that the ledger was asked for, without an answer yet."""
        self._charges = self._writes = self._unwritten = 0
        self._rejections: Counter[tuple[str, str]] = Counter()
        self._is_available, self._is_closed, self._has_damage = True, False, False
        self._exchange_began = 0.0
        """When the ledger was asked, while its answer is awaited."""
        self._waiters: list[Callable[[], None]] = []
        self._next_recovery = 0.0
        self._thread: threading.Thread | None = None

    def reset_after_fork(self) -> None:
        """The leases and the journal of the parent stay with it. The child opens its own with its first charge, as many
        children never charge."""
        if self._journal is not None:
            self._journal.abandon()  # it would keep the parent's lock
        is_closed = self._is_closed
        self._start()
        self._is_closed = is_closed

    def close(self) -> None:
        """Write all charges, and close all leases. If the ledger is unavailable, the journal is kept for recovery."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()
        with self._lock:
            for account in self._accounts.values():
                self._closing += account.leases
                account.leases.clear()
                account.needed = 0
        is_written = self._exchange()
        while is_written and self._usage:
            is_written = self._exchange()
        is_written = is_written and self._exchange()  # closes the leases
        if self._journal is not None:
            if is_written and not self._closing and not self._has_damage:
                self._journal.close()
            else:
                self._journal.abandon()
            self._journal = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ charges

    def charge(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        reference: str = "",
        plan: QuotaPlan | None = None,
    ) -> bool:
        """Charge an amount now; False if the account has too little left. A repeated `id` is charged once."""
        reservation = self.reserve(account, amount, id=id, reference=reference, plan=plan)
        if reservation is None:
            return False
        reservation.commit(amount)
        return True

    def reserve(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        reference: str = "",
        plan: QuotaPlan | None = None,
        wait: bool = True,
    ) -> MeterReservation | None:
        """Hold an estimate for a request; None if the account has too little left.

        With a `plan`, the account has what the plan grants in the current period. The first request of an account
        waits for its lease, up to a second; with `wait=False`, it is refused.
        """
        made = self.try_reserve(account, amount, id=id, reference=reference, plan=plan)
        end = time.monotonic() + self._wait_s if wait and made == "pending" else 0.0
        while made == "pending" and time.monotonic() < end:
            answered = threading.Event()
            made = self.try_reserve(account, amount, id=id, reference=reference, plan=plan, waiter=answered.set)
            if made == "pending":
                answered.wait(end - time.monotonic())
        if made == "pending":
            self.count_rejection(plan, made)
        return made if isinstance(made, MeterReservation) else None

    def try_reserve(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        reference: str = "",
        plan: QuotaPlan | None = None,
        outage_units: int | None = None,
        waiter: Callable[[], None] | None = None,
    ) -> MeterReservation | Refusal:
        """Like `reserve`, without waiting. If the answer is "pending", try again when `waiter` is called, which happens
        once, in another thread. `outage_units` replaces that of the meter."""
        check_amount(amount)
        if id is not None:
            check_id(id)
        if reference:
            check_text("reference", reference, MAX_REFERENCE)
        if self._thread is None:
            self._start_thread()
        with self._lock:
            if id is not None and (found := self._recent.get(id)) is not None:
                found.is_repeated = True
                found.holders += 1
                return found
            now = time.monotonic()
            state = self._accounts.get(account)
            if state is None:
                state = self._accounts[check_account(account)] = _MeteredAccount(account, now)
            state.plan = plan or state.plan
            lease = self._take(state, amount, now)
            if lease is None:
                refusal = self._refusal(state, amount, now)
                if refusal == "exhausted" and id is not None:
                    is_charged = self._was_charged(id, now)
                    if is_charged:
                        made = MeterReservation.of_charged(self, state, id, reference)
                        self._remember(made)
                        return made
                    refusal = "pending" if is_charged is None else refusal
                units = self._outage_units if outage_units is None else outage_units
                if refusal != "unavailable" or not state.take_outage(amount, units):
                    if refusal != "pending":
                        self.count_rejection(state.plan, refusal)
                    elif waiter is not None:
                        self._waiters.append(waiter)
                    return refusal
            id_ = f"{self._id_prefix}-{next(self._numbers)}" if id is None else id
            made = MeterReservation(self, lease, state, amount, id_, reference)
            if id is not None:
                self._remember(made)
            return made

    def balance(self, account: str) -> AccountBalance:
        """The units that an account has left, as far as this process knows."""
        with self._lock:
            state = self._accounts.get(account)
            if state is None:
                return AccountBalance(0, 0)
            return AccountBalance(state.remaining(), state.period_end_us)

    def count_rejection(self, plan: QuotaPlan | None, reason: Refusal) -> None:
        """Count a request that was refused. `try_reserve` does it, except for those whose answer has come too late."""
        self._rejections[NO_PLAN if plan is None else plan.name, reason] += 1

    def stats(self) -> MeterStats:
        """Counts and amounts, for metrics."""
        with self._lock:
            leases = [lease for account in self._accounts.values() for lease in account.leases]
            outage = sum(account.outage_used for account in self._accounts.values())
            left = sum(lease.left for lease in leases)
            counts = (len(leases), self._charges, self._writes, self._is_available)
            oldest = [records[0] for records in self._outages.values()]
            oldest += [record for _, record in self._usage[:1]]
            now_us = self._ledger.clock.now_us()
            unwritten_s = max([0, *[now_us - record.at_us for record in oldest]]) / 1_000_000
            return MeterStats(left, self._unwritten, outage, *counts, unwritten_s, dict(self._rejections))

    def flush(self) -> bool:
        """Write all charges of before to the ledger; False if it is unavailable."""
        return self._exchange()

    def _take(self, account: _MeteredAccount, amount: int, now: float) -> _MeterLease | None:
        account.used_at = now
        for lease in account.leases:
            if lease.left >= amount and now < lease.retire_at and self._is_valid(lease):
                lease.left -= amount
                lease.open += 1
                lease.used_at = now
                account.spent += amount
                if lease.left < lease.amount * REFILL_AT:
                    self._ask(account, now)
                return lease
        if not account.is_refused(amount, now):
            account.needed = max(account.needed, amount, 1)
            self._ask(account, now)
        return None

    def _is_valid(self, lease: _MeterLease) -> bool:
        """False if a grant that the lease draws on has expired: nothing is charged to a period that is over."""
        return not lease.valid_until_us or self._ledger.clock.now_us() < lease.valid_until_us

    def _ask(self, account: _MeteredAccount, now: float) -> None:
        """Have the background thread look after the leases of an account."""
        if not account.is_asking and (account.needed or now >= account.refused_until):
            account.is_asking = True
            self._wake.set()

    def _remember(self, reservation: MeterReservation) -> None:
        """Find the reservation when its id is repeated."""
        self._recent[reservation.id] = reservation
        if len(self._recent) > MAX_RECENT_IDS:
            self._recent.popitem(last=False)

    def _was_charged(self, id: str, now: float) -> bool | None:
        """True if a request that the balance does not cover is the repetition of one that the ledger has charged; None
        if it is to be asked."""
        is_charged, until = self._answers.get(id, (False, 0.0))
        if is_charged or now < until:
            return is_charged
        if self._is_closed or not self._is_available or len(self._questions) >= MAX_QUESTIONS:
            return False
        self._questions[id] = None
        self._wake.set()
        return None

    def _add_answers(self, ids: Iterable[str], charged: Collection[str], now: float) -> None:
        """Keep answers for as long as a refusal."""
        for id in [id for id, (_, until) in self._answers.items() if until <= now]:
            del self._answers[id]
        for id in ids:
            self._questions.pop(id, None)
            self._answers[id] = id in charged, now + REFUSAL_S

    def _refusal(self, account: _MeteredAccount, amount: int, now: float) -> Refusal:
        if account.is_refused(amount, now):
            return "unavailable" if account.is_damaged else "exhausted"
        is_late = self._exchange_began and now - self._exchange_began > self._wait_s
        return "unavailable" if is_late or self._is_closed or not self._is_available else "pending"

    def settle(self, reservation: MeterReservation, amount: int | None) -> None:
        """End a reservation, with None for no charge; its methods are shorter."""
        with self._lock:
            if reservation.amount == ENDED:
                return
            if amount is None and reservation.holders > 1:
                reservation.holders -= 1
                return
            held, reservation.amount = reservation.amount, ENDED
            lease = reservation.lease
            account = self._accounts[reservation.account]
            if (amount is None or amount < held) and not account.is_damaged:
                account.refused_until = 0.0  # there is more now
            if amount is None:
                self._recent.pop(reservation.id, None)  # a retry is a new attempt
                if lease is None:
                    account.outage_used -= held
                else:
                    lease.left += held
                    lease.open -= 1
                return
            self._charges += 1
            self._unwritten += amount
            if lease is None and not account.outage_id:  # the last one was settled meanwhile
                account.outage_id = f"outage-{uuid4().hex}"
            batch = account.outage_id if lease is None else lease.id
            at_us = self._ledger.clock.now_us()
            record = UsageRecord(reservation.id, reservation.account, batch, amount, at_us, reservation.reference)
            if self._journal is not None:
                self._journal.add_usage(record, is_outage=lease is None)
            if lease is None:
                account.outage_used += amount - held
                self._outages.setdefault(batch, []).append(record)
            else:
                lease.left += max(held - amount, -lease.left)  # what exceeds the lease is charged when it is closed
                self._usage.append((lease, record))
            if len(self._usage) >= MAX_USAGE_BATCH:
                self._wake.set()

    # ------------------------------------------------------------------ background

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._open_journal()
                self._thread = threading.Thread(target=self._run, name="headgate-quota-meter", daemon=True)
                self._thread.start()

    def _open_journal(self) -> None:
        if self._directory is not None and self._journal is None:
            try:
                self._journal = UsageJournal(self._directory)
            except InvalidConfiguration as error:
                logger.error("charges of this process are in no journal: %s", error)

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                is_written = self._exchange()
                if time.monotonic() >= self._next_recovery:
                    self._next_recovery = time.monotonic() + RECOVERY_INTERVAL_S
                    self.recover()
            except (
                Exception
            ) as error:  # this thread is needed by all accounts; the charges are kept for another attempt
                logger.exception("charges are not written to the ledger")
                self._note_failure(HeadgateError(f"{type(error).__name__}: {error}"))
                is_written = False
            if not is_written:
                self._wake.wait(self._interval_s)

    def recover(self) -> int:
        """Settle the journals of processes that have died; returns the number of journals."""
        if self._directory is None:
            return 0
        settled = 0
        for journal in abandoned_journals(self._directory):
            try:
                for start in range(0, len(journal.usage), MAX_USAGE_BATCH):
                    self._ledger.exchange(usage=journal.usage[start : start + MAX_USAGE_BATCH])
                self._ledger.exchange(close=journal.leases, outages=journal.outages)
            except (InvalidInput, LedgerDamaged, LedgerUnavailable) as error:
                logger.warning("the journal of a process that has died is not settled: %s", error)
                journal.release()
            else:
                journal.delete()
                settled += 1
        return settled

    def _exchange(self) -> bool:
        """Write to the ledger what is due, in one transaction; False if the ledger is unavailable."""
        with self._exchange_lock:
            now = time.monotonic()
            is_done = self._exchange_once(now) and self._answer_questions(now)
            with self._lock:
                self._notify()
            return is_done

    def _answer_questions(self, now: float) -> bool:
        """Find out which of the requests that the balance does not cover were charged before."""
        with self._lock:
            questions = [*self._questions]
        if not questions:
            return True
        try:
            charged = self._ledger.charged_ids(questions)
        except LedgerUnavailable as error:
            self._note_failure(error)
            return False
        with self._lock:
            self._add_answers(questions, charged, now)
        return True

    def _exchange_once(self, now: float) -> bool:
        with self._lock:
            usage = self._usage[:MAX_USAGE_BATCH]
            outages = {id: [*records] for id, records in self._outages.items()}
            for account in self._accounts.values():
                if account.outage_id in outages:
                    account.outage_id = ""  # what follows is settled under another id
            self._retire(now)
            self._ask_for_leases(now)
            pending = [*self._pending]
            names = {name for name, *_ in pending} | {records[0].account for records in outages.values()}
            accounts = [self._accounts[name] for name in names]
            plans = {account.name: account.plan for account in accounts if account.plan is not None}
            closing = [lease for lease in self._closing if self._is_done(lease, usage)]
        if not (usage or outages or pending or closing):
            return True
        self._exchange_began = time.monotonic()
        try:
            repeated, leases = self._ledger.exchange(
                usage=[record for _, record in usage],
                outages=outages,
                close=[lease.id for lease in closing],
                lease=pending,
                plans=plans,
                share=SHARE,
                ttl=LEASE_TTL,
            )
        except LedgerDamaged as error:
            self._isolate(error)
            return False
        except (InvalidInput, LedgerUnavailable) as error:
            self._note_failure(error)
            return False
        finally:
            self._exchange_began = 0.0
        with self._lock:
            self._writes += 1
            was_available, self._is_available = self._is_available, True
            del self._usage[: len(usage)]
            for lease, record in usage:
                lease.open -= 1
                self._unwritten -= record.amount
                if record.id in repeated:  # charged to another lease before
                    lease.left = min(lease.amount, lease.left + record.amount)
            for id_, records in outages.items():
                self._settle_outage(id_, records)
            self._closing = [lease for lease in self._closing if lease not in closing]
            for lease in closing:
                if (state := self._accounts.get(lease.account)) is not None:
                    state.balance += lease.left
            self._add_leases(leases, now)
            self._compact_journal()
        if not was_available and self._on_change is not None:
            self._on_change(None)
        return True

    def _compact_journal(self) -> None:
        """Drop from the journal what is in the ledger. The journal of a damaged account is kept."""
        if self._journal is None or self._has_damage or not self._journal.needs_compaction(len(self._usage)):
            return
        leases = [*[lease for account in self._accounts.values() for lease in account.leases], *self._closing]
        outages = [record for records in self._outages.values() for record in records]
        self._journal.compact([lease.id for lease in leases], [record for _, record in self._usage], outages)

    def _notify(self) -> None:
        """Let the requests that wait for an answer try again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def _is_done(self, lease: _MeterLease, usage: list[tuple[_MeterLease, UsageRecord]]) -> bool:
        """True if this batch contains all that is left to write of a lease."""
        return lease.open == sum(1 for other, _ in usage if other is lease)

    def _settle_outage(self, id: str, records: list[UsageRecord]) -> None:
        del self._outages[id]
        for record in records:
            self._unwritten -= record.amount
            self._accounts[record.account].outage_used -= record.amount

    def _retire(self, now: float) -> None:
        """Close leases that are used up, too small, idle or old."""
        for account in self._accounts.values():
            for lease in [*account.leases]:
                is_over = now - lease.used_at > IDLE_S or now >= lease.retire_at or not self._is_valid(lease)
                # The rest of a lease that is too small helps to pay for the request that waits.
                if is_over or not lease.left or lease.left < account.needed:
                    account.leases.remove(lease)
                    self._closing.append(lease)
        in_use = {lease.account for lease in self._closing} | {name for name, *_ in self._pending}
        for name in [account.name for account in self._accounts.values() if account.is_idle(now)]:
            if name not in in_use:
                del self._accounts[name]

    def _ask_for_leases(self, now: float) -> None:
        asked = {account for account, *_ in self._pending}
        for account in self._accounts.values():
            if now - account.measured_at >= 0.05:
                account.measure(now)
            if self._is_closed or account.name in asked:
                continue
            is_due = account.needed or (now >= account.refused_until and now - account.used_at < IDLE_S)
            wanted = account.wanted() if is_due else 0
            if not wanted:
                account.is_asking = False
                continue
            request = (account.name, f"lease-{uuid4().hex}", min(wanted, MAX_AMOUNT), max(account.needed, 1))
            if self._journal is not None:
                self._journal.add_lease(request[1])
            self._pending.append(request)

    def _add_leases(self, answers: list[LeaseAnswer], now: float) -> None:
        for (name, _, _, least), (made, balance, period_end_us) in zip(self._pending, answers, strict=True):
            account = self._accounts[name]
            account.balance, account.period_end_us = balance, period_end_us
            account.is_asking = False
            if made is None:
                account.refuse(least, time.monotonic())
            else:
                leases = self._closing if self._is_closed else account.leases
                leases.append(_MeterLease(made, now))
            if account.needed <= least or made is None:
                account.needed = 0
        self._pending.clear()

    def _isolate(self, error: LedgerDamaged) -> None:
        """Leave a damaged account alone, so that the others are served. The journal is kept until it is repaired."""
        with self._lock:
            logger.error("requests of this account are refused until this process restarts: %s", error)
            account = self._accounts[error.account]
            self._has_damage = True
            self._pending = [each for each in self._pending if each[0] != account.name]
            damaged = {lease.id for lease in [*account.leases, *self._closing] if lease.account == account.name}
            self._closing = [lease for lease in self._closing if lease.id not in damaged]
            account.leases.clear()
            account.needed, account.is_asking = 0, False
            account.refused_until, account.refused_amount = math.inf, 0

    def _note_failure(self, error: HeadgateError) -> None:
        with self._lock:
            self._questions.clear()
            was_available, self._is_available = self._is_available, False
        if was_available and self._on_change is not None:
            self._on_change(error)
        elif was_available:
            logger.warning("the ledger is unavailable, quotas spend their leases: %s", error)
        with self._lock:
            self._notify()
