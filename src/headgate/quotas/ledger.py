"""The ledger: accounts with grants, reservations and charges, in SQLite or PostgreSQL."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from heapq import merge
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import func, select

from headgate._fork import reinit_after_fork
from headgate.clock import SystemClock
from headgate.control.config.engine import (
    ConfigUnavailable,
    display_url,
    open_engine,
    read_transaction,
    write_transaction,
)
from headgate.control.config.migrations import migrate
from headgate.errors import HeadgateError, InvalidCost, InvalidInput
from headgate.quotas.arguments import (
    MAX_AMOUNT,
    check_account,
    check_amount,
    check_id,
    check_priority,
    check_text,
    instant_us,
)
from headgate.quotas.charges import find_accounts, read_exhausted, read_single_charges, read_usage
from headgate.quotas.entries import EntryDraft, LedgerEntry, UsageRecord, derived_id
from headgate.quotas.group_commit import GroupCommit
from headgate.quotas.operations import (
    Charge,
    CloseLease,
    EndReservation,
    OpenPeriod,
    Post,
    RecordUsage,
    Reserve,
    SettleOutage,
    TakeLease,
    WriteExpired,
)
from headgate.quotas.statement import read_lines, read_statement
from headgate.quotas.storage import LedgerDamaged, StateCache, WriteBatch, read_known_usage, read_state
from headgate.quotas.tables import ACCOUNTS, ENTRIES, USAGE
from headgate.quotas.usage_alerts import UsageMonitor, read_alerts, read_thresholds, write_thresholds
from headgate.quotas.verify import verify_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Engine

    from headgate.clock import Clock
    from headgate.quotas.charges import ChargedRequest
    from headgate.quotas.entries import LeaseAnswer, LedgerProblem, QuotaReservation
    from headgate.quotas.operations import Operation
    from headgate.quotas.plans import QuotaPlan
    from headgate.quotas.statement import Statement, StatementLine
    from headgate.quotas.usage_alerts import UsageAlert

__all__ = ["AccountSummary", "GrantSummary", "Ledger", "LedgerUnavailable"]

DEFAULT_PRIORITY: Final = 100
RESERVATION_TTL: Final = timedelta(hours=1)
LEASE_TTL: Final = timedelta(hours=24)
WRITE_LOCK: Final = "headgate ledger"
MAX_EXPIRY_BATCH: Final = 500
LINES_PAGE: Final = 5000


class LedgerUnavailable(HeadgateError):
    """The ledger cannot be reached or has failed. An operation with an id can be repeated: it takes effect once."""


class GrantSummary(NamedTuple):
    """A grant of which something is left."""

    id: str
    source: str
    priority: int
    expires_us: int | None
    remaining: int
    held: int


class AccountSummary(NamedTuple):
    """The totals of an account, and its open grants in the order in which they are spent."""

    account: str
    available: int
    held: int
    granted: int
    adjusted: int
    charged: int
    expired: int
    entries: int
    reservations: int
    """The number of open reservations."""
    grants: tuple[GrantSummary, ...]


class Ledger:
    """Accounts in whole units: requests, tokens, bytes or cents. Thread-safe; several processes may share a database.

    Every change is an entry that is durable when the method returns, and that is never edited. `id` makes a change
    idempotent: a repetition with the same content returns the first result, and one with other content raises
    `InvalidInput`. Without an `id`, each call is a change of its own.
    """

    def __init__(
        self,
        url: str,
        *,
        author: str = "app",
        clock: Clock | None = None,
        create: bool = True,
        connect: bool = True,
    ) -> None:
        """Open a database, such as "sqlite:///quota.db" or "postgresql://host/name", and create or upgrade its tables.

        `author` is recorded with each entry, unless a call names another one. With `create=False`, a SQLite file that
        does not exist raises `LedgerUnavailable`. With `connect=False`, the database is first reached by the first
        operation.
        """
        self.author = check_text("author", author, 200)
        self.clock: Clock = clock or SystemClock()
        with _translate():
            self._engine = open_engine(url, create=create, keep=4, keep_files=4, name="ledger")
            weakref.finalize(self, self._engine.dispose)
            self._is_migrated = False
            if connect:
                self._migrate()
        self._cache, self._monitor = StateCache(), UsageMonitor()
        self._writer = GroupCommit(self._execute)
        reinit_after_fork(self)

    def close(self) -> None:
        """Close pooled connections; the ledger opens new ones if it is used again."""
        self._engine.dispose()

    def reset_after_fork(self) -> None:
        self._engine.dispose(close=False)
        self._cache, self._monitor = StateCache(), UsageMonitor()
        self._writer.reset()

    def __repr__(self) -> str:
        return f"Ledger({display_url(self._engine)!r})"

    # ------------------------------------------------------------------ changes

    def grant(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        expires_at: datetime | int | None = None,
        priority: int = DEFAULT_PRIORITY,
        source: str = "grant",
        author: str | None = None,
        reason: str = "",
        reference: str = "",
    ) -> LedgerEntry:
        """Add to the balance of an account, until `expires_at`: an aware datetime, or microseconds since the epoch.

        Grants of a lower `priority` are spent first; among equals, the one that expires first. `source` names the
        origin on statements, such as "allowance" or "credit pack".
        """
        draft = EntryDraft(
            check_id(id),
            "grant",
            check_amount(amount, least=1),
            expires_us=None if expires_at is None else instant_us("expires_at", expires_at),
            priority=check_priority(priority),
            source=check_text("source", source, 100),
            **self._attribution(author, reason, reference),
        )
        entry: LedgerEntry = self._run(Post(check_account(account), draft))
        return entry

    def adjust(
        self,
        account: str,
        amount: int,
        *,
        reason: str,
        id: str | None = None,
        author: str | None = None,
        reference: str = "",
    ) -> LedgerEntry:
        """Correct the balance of an account, up or down, but not below 0. The reason appears on the statement."""
        if not reason:
            raise InvalidInput("an adjustment needs a reason: it appears on the statement")
        draft = EntryDraft(
            check_id(id),
            "adjust",
            check_amount(amount, least=-MAX_AMOUNT),
            source="adjustment",
            **self._attribution(author, reason, reference),
        )
        if not amount:
            raise InvalidCost("an adjustment of 0 has no effect; give a positive or negative amount")
        entry: LedgerEntry = self._run(Post(check_account(account), draft))
        return entry

    def reserve(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        ttl: timedelta = RESERVATION_TTL,
        author: str | None = None,
        reason: str = "",
        reference: str = "",
    ) -> QuotaReservation | None:
        """Hold an amount until it is committed or voided, or `ttl` has passed; None if the balance is too low.

        A refusal is not recorded: a repetition with the same `id` is decided anew.
        """
        draft = self._reservation(amount, id, ttl, author, reason, reference)
        reservation: QuotaReservation | None = self._run(Reserve(check_account(account), draft))
        return reservation

    def commit(
        self, reservation_id: str, amount: int, *, author: str | None = None, reason: str = "", reference: str = ""
    ) -> LedgerEntry:
        """End a reservation, and charge the amount that was really used; the rest is available again.

        More than was reserved is charged as far as the balance allows. What it does not cover is recorded as
        `uncovered` in the entry, and not charged: a balance is never below 0. The same applies after the reservation
        has expired.
        """
        id = check_text("reservation_id", reservation_id, 200, needs_text=True)
        draft = EntryDraft(
            derived_id("commit", id),
            "commit",
            check_amount(amount),
            id,
            **self._attribution(author, reason, reference),
        )
        entry: LedgerEntry = self._run(EndReservation(draft))
        return entry

    def void(
        self, reservation_id: str, *, author: str | None = None, reason: str = "", reference: str = ""
    ) -> LedgerEntry:
        """End a reservation without a charge. One that has expired stays as it is."""
        id = check_text("reservation_id", reservation_id, 200, needs_text=True)
        draft = EntryDraft(derived_id("void", id), "void", 0, id, **self._attribution(author, reason, reference))
        entry: LedgerEntry = self._run(EndReservation(draft))
        return entry

    def charge(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        author: str | None = None,
        reason: str = "",
        reference: str = "",
    ) -> LedgerEntry | None:
        """Charge an amount without a reservation; None, and no entry, if the balance is too low."""
        draft = EntryDraft(check_id(id), "commit", check_amount(amount), **self._attribution(author, reason, reference))
        entry: LedgerEntry | None = self._run(Charge(check_account(account), draft))
        return entry

    def open_period(self, account: str, plan: QuotaPlan) -> list[LedgerEntry]:
        """Grant an account what it has in the current period of a plan; returns the grants that were missing."""
        entries: list[LedgerEntry] = self._run(OpenPeriod(check_account(account), plan))
        return entries

    # ------------------------------------------------------------------ leases

    def lease(
        self,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        least: int = 1,
        share: int = 1,
        ttl: timedelta = LEASE_TTL,
    ) -> QuotaReservation | None:
        """Reserve up to `amount` for many requests, which are recorded one by one with `record_usage`.

        The amount is at most a part of the balance, 1 / `share`, but at least `least`; None if the balance is lower. A
        lease that is not closed within `ttl` is charged as a whole. `QuotaMeter` does all this for a process.
        """
        draft = self._reservation(amount, id, ttl, None, "", "")._replace(is_lease=True)
        least, share = check_amount(least, least=1), check_amount(share, least=1)
        operation = TakeLease(check_account(account), draft, least=least, share=share)
        answer: LeaseAnswer = self._run(operation)
        return answer.lease

    def record_usage(self, records: Sequence[UsageRecord]) -> set[str]:
        """Record requests that were charged to open leases; returns the ids that another record has charged.

        Each id is charged once, to the lease with which it was recorded first. The same records can be given again.
        """
        for record in records:
            check_amount(record.amount)
            check_text("id", record.id, 200, needs_text=True)
            check_text("reference", record.reference, 500)
        repeated: set[str] = self._run(RecordUsage(records))
        return repeated

    def close_lease(self, lease_id: str) -> LedgerEntry | None:
        """Charge the sum of the usage records of a lease, and return the rest. None for an unknown lease."""
        entry: LedgerEntry | None = self._run(self._close(lease_id))
        return entry

    def charged_ids(self, ids: Collection[str]) -> set[str]:
        """Those of these ids of which there is a usage record: requests that were charged to a lease."""
        with self._read() as connection:
            return {*read_known_usage(connection, ids)}

    def usage(self, lease_id: str) -> list[UsageRecord]:
        """The usage records of a lease, in the order in which they were recorded."""
        query = select(USAGE).where(USAGE.c.lease == lease_id).order_by(USAGE.c.number)
        with self._read() as connection:
            return [UsageRecord(*row[1:]) for row in connection.execute(query)]

    def exchange(
        self,
        *,
        usage: Sequence[UsageRecord] = (),
        close: Sequence[str] = (),
        lease: Sequence[tuple[str, str, int, int]] = (),
        outages: Mapping[str, Sequence[UsageRecord]] | None = None,
        plans: Mapping[str, QuotaPlan] | None = None,
        share: int = 1,
        ttl: timedelta = LEASE_TTL,
    ) -> tuple[set[str], list[LeaseAnswer]]:
        """Everything that a process with leases has to do, in one transaction.

        Records usage, settles outages, closes leases, and takes new ones, each given as (account, id, amount, least).
        The periods of the `plans` of their accounts are opened before.
        Returns the ids that other records have charged, and an answer for each lease. All of it can be repeated.
        """
        operations: list[Operation] = []
        if usage:
            operations.append(RecordUsage(usage))
        for id, records in (outages or {}).items():
            draft = EntryDraft(
                derived_id("commit", id), "commit", 0, id, author=self.author, reason="ledger was unavailable"
            )
            account = records[0].account
            operations.append(SettleOutage(account, draft, records, plan=(plans or {}).get(account)))
        operations += [self._close(id) for id in close]
        for account, id, amount, least in lease:
            draft = self._reservation(amount, id, ttl, None, "", "")._replace(is_lease=True)
            plan = (plans or {}).get(account)
            operations.append(TakeLease(account, draft, least=least, share=share, plan=plan))
        results = self._writer.run_all(operations)
        return results[0] if usage else set(), results[len(results) - len(lease) :]

    def _close(self, lease_id: str) -> CloseLease:
        draft = EntryDraft("", "commit", 0, lease_id, is_lease=True, author=self.author)
        return CloseLease(lease_id, draft)

    # ------------------------------------------------------------------ expiry

    def expire(self) -> int:
        """Write the entries for all grants and reservations that have expired; returns the number of accounts.

        Balances are correct without it; call it now and then, so that statements of idle accounts are complete.
        """
        query = select(ACCOUNTS.c.account).where(ACCOUNTS.c.next_due_us <= self.clock.now_us())
        with self._read() as connection:
            accounts = connection.scalars(query).all()
        for start in range(0, len(accounts), MAX_EXPIRY_BATCH):
            self._writer.run_all([WriteExpired(account) for account in accounts[start : start + MAX_EXPIRY_BATCH]])
        return len(accounts)

    # ------------------------------------------------------------------ reads

    def balance(self, account: str) -> int:
        """The available units of an account now: not charged, held or expired. 0 for an unknown account."""
        query = select(ACCOUNTS.c.balance, ACCOUNTS.c.next_due_us).where(ACCOUNTS.c.account == check_account(account))
        now_us = self.clock.now_us()
        with self._read() as connection:
            row = connection.execute(query).one_or_none()
            if row is None:
                return 0
            return (
                int(row.balance) if now_us < row.next_due_us else read_state(connection, account).at(now_us).available
            )

    def summary(self, account: str) -> AccountSummary:
        """The totals, open grants and number of reservations of an account, as of now."""
        with self._read() as connection:
            state = read_state(connection, check_account(account))
        state = state.at(self.clock.now_us())
        grants = [
            GrantSummary(grant.id, grant.source, grant.priority, grant.expiry_us(), grant.remaining, grant.allocated)
            for grant in sorted(state.grants.values(), key=lambda each: each.rank)
        ]
        totals = (state.granted, state.adjusted, state.charged, state.expired)
        numbers = (state.position, len(state.holds))
        return AccountSummary(account, state.available, state.held, *totals, *numbers, tuple(grants))

    def accounts(self, *, prefix: str = "", after: str = "", most: int = 1000) -> list[str]:
        """The names of accounts that begin with `prefix`, in alphabetical order; for the next page, pass the last one
        as `after`."""
        query = select(ACCOUNTS.c.account).where(ACCOUNTS.c.account > after).order_by(ACCOUNTS.c.account).limit(most)
        if prefix:
            query = query.where(ACCOUNTS.c.account.startswith(prefix, autoescape=True))
        with self._read() as connection:
            return [*connection.scalars(query)]

    def entries(
        self, account: str, since: datetime | int | None = None, until: datetime | int | None = None
    ) -> list[LedgerEntry]:
        """The entries of an account from `since` to before `until`, oldest first."""
        query = select(ENTRIES).where(ENTRIES.c.account == check_account(account)).order_by(ENTRIES.c.position)
        if since is not None:
            query = query.where(ENTRIES.c.at_us >= instant_us("since", since))
        if until is not None:
            query = query.where(ENTRIES.c.at_us < instant_us("until", until))
        with self._read() as connection:
            return [LedgerEntry(*row) for row in connection.execute(query)]

    def newest_number(self) -> int:
        """The number of the newest entry, which is that of all entries; 0 for an empty ledger."""
        with self._read() as connection:
            return int(connection.scalar(select(func.max(ENTRIES.c.number))) or 0)

    def after(self, number: int, *, account: str | None = None, most: int = 1000) -> list[LedgerEntry]:
        """Up to `most` entries after the one with this number, in the order in which they were written.

        Numbers have no gaps, and entries appear in their order: the last number seen is a cursor that misses nothing.
        """
        query = select(ENTRIES).where(ENTRIES.c.number > number).order_by(ENTRIES.c.number).limit(most)
        if account is not None:
            query = query.where(ENTRIES.c.account == account)
        with self._read() as connection:
            return [LedgerEntry(*row) for row in connection.execute(query)]

    def statement(
        self,
        account: str,
        since: datetime | int,
        until: datetime | int,
        *,
        most: int = 100,
        zone: tzinfo = UTC,
    ) -> Statement:
        """The sums of a period, its days in a time zone, and its first `most` lines.

        The sums are those of all lines. They take two entries to compute, however many there are.
        """
        period = instant_us("since", since), instant_us("until", until)
        if period[0] >= period[1]:
            raise InvalidInput(f"until must be later than since, got {since!r} and {until!r}")
        with self._read() as connection:
            return read_statement(connection, check_account(account), *period, most=most, zone=zone)

    def statement_lines(self, account: str, since: datetime | int, until: datetime | int) -> Iterator[StatementLine]:
        """All lines of a statement, read in pages."""
        since_us, until_us = instant_us("since", since), instant_us("until", until)
        after = 0
        while True:
            with self._read() as connection:
                page = read_lines(connection, check_account(account), since_us, until_us, after=after, most=LINES_PAGE)
            yield from page
            if len(page) < LINES_PAGE:
                return
            after = page[-1].position

    def find_accounts(self, names: Collection[str], *, most: int = 100) -> list[str]:
        """The accounts with one of these names, and those of the clients with one of them, in any plan."""
        with self._read() as connection:
            return find_accounts(connection, names, most)

    def charged_requests(self, account: str, since: datetime | int, until: datetime | int) -> Iterator[ChargedRequest]:
        """All requests that were charged in a period, with the sources that have paid, read in pages."""
        period = check_account(account), instant_us("since", since), instant_us("until", until)
        pages = self._pages(read_single_charges, *period), self._pages(read_usage, *period)
        return merge(*pages, key=lambda request: request.at_us)

    def _pages(self, read: Callable[..., tuple[list[ChargedRequest], Any]], *period: Any) -> Iterator[ChargedRequest]:
        after: Any = None
        while True:
            with self._read() as connection:
                page, after = read(connection, *period, after=after)
            yield from page
            if after is None:
                return

    def exhausted_times(
        self, account: str, since: datetime | int, until: datetime | int
    ) -> list[tuple[int, int | None]]:
        """The times in a period in which the balance was 0, each with its beginning and its end, None if that has not
        come."""
        period = instant_us("since", since), instant_us("until", until)
        with self._read() as connection:
            return [*read_exhausted(connection, check_account(account), *period)]

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> list[LedgerProblem]:
        """All contradictions between entries, accounts and checkpoints; an empty list if there are none.

        Recomputes all hashes, totals, balances and sources. `progress(done, total)` is called now and then.
        """
        with self._database():
            return verify_entries(self._engine, progress or (lambda done, total: None))

    # ------------------------------------------------------------------ usage alerts

    @property
    def engine(self) -> Engine:
        """The database."""
        return self._engine

    def usage_alerts(self, account: str, *, most: int = 20) -> list[UsageAlert]:
        """The thresholds that an account has reached, newest first."""
        with self._read() as connection:
            return read_alerts(connection, check_account(account), most)

    def usage_thresholds(self) -> tuple[int, ...]:
        """The thresholds of usage alerts, in percent of an allowance."""
        with self._read() as connection:
            return read_thresholds(connection)

    def set_usage_thresholds(self, percents: Iterable[int]) -> None:
        """Set the thresholds, for all accounts and processes. What was reached before is not reported again."""
        with self._database(), write_transaction(self._engine, lock=WRITE_LOCK) as connection:
            write_thresholds(connection, percents)

    # ------------------------------------------------------------------ transactions

    def _run(self, operation: Operation) -> Any:
        return self._writer.run(operation)

    def _execute(self, batch: list[Operation]) -> None:
        ids = [id for each in batch for id in each.ids]
        accounts = [each.account for each in batch if each.account is not None]
        transaction: WriteBatch | None = None
        try:
            with self._database(), write_transaction(self._engine, lock=WRITE_LOCK) as connection:
                transaction = WriteBatch(connection, self._cache, self._monitor, self.clock.now_us())
                transaction.prepare(ids, accounts)
                for operation in batch:
                    try:
                        operation.result = operation.run(transaction)
                    except (InvalidInput, LedgerDamaged) as error:
                        operation.error = error
                transaction.write()
        except BaseException:
            if transaction is not None:  # their states contain entries that were not written
                self._cache.forget(transaction.accounts)
                self._monitor.forget(transaction.accounts)
            raise
        transaction.keep_states()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._database(), read_transaction(self._engine) as connection:
            yield connection

    @contextmanager
    def _database(self) -> Iterator[None]:
        """Create or upgrade the tables before the first use, and raise LedgerUnavailable if that or the block fails."""
        with _translate():
            if not self._is_migrated:
                self._migrate()
            yield

    def _migrate(self) -> None:
        with write_transaction(self._engine) as connection:
            migrate(connection)
        self._is_migrated = True

    # ------------------------------------------------------------------ arguments

    def _reservation(
        self, amount: int, id: str | None, ttl: timedelta, author: str | None, reason: str, reference: str
    ) -> EntryDraft:
        if not isinstance(ttl, timedelta) or not timedelta(0) < ttl <= timedelta(days=366):
            raise InvalidInput(f"ttl must be a timedelta of more than 0 and at most 366 days, got {ttl!r}")
        return EntryDraft(
            check_id(id),
            "reserve",
            check_amount(amount),
            expires_us=self.clock.now_us() + ttl // timedelta(microseconds=1),
            **self._attribution(author, reason, reference),
        )

    def _attribution(self, author: str | None, reason: str, reference: str) -> dict[str, Any]:
        return {
            "author": self.author if author is None else check_text("author", author, 200),
            "reason": check_text("reason", reason, 500),
            "reference": check_text("reference", reference, 500),
        }


@contextmanager
def _translate() -> Iterator[None]:
    try:
        yield
    except ConfigUnavailable as error:
        raise LedgerUnavailable(str(error)) from error
