"""Reads and writes the tables of the ledger."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, select

from headgate.errors import HeadgateError
from headgate.quotas.account import AccountState
from headgate.quotas.entries import FIRST_HASH, LedgerEntry, chain_usage, encode_usage, hash_usage
from headgate.quotas.tables import ACCOUNTS, CHECKPOINTS, ENTRIES, USAGE, USAGE_HASHES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from sqlalchemy import Connection, Table

    from headgate.quotas.entries import EntryDraft, UsageRecord
    from headgate.quotas.usage_alerts import UsageMonitor

__all__ = ["CHECKPOINT_INTERVAL", "LedgerDamaged", "StateCache", "WriteBatch", "find_entries", "read_state"]

CHECKPOINT_INTERVAL: Final = 1000
"""Entries of an account between two checkpoints: as many as a process replays to get to know an account."""
MIN_COPY_ROWS: Final = 20
"""From here on, PostgreSQL's COPY is faster than single inserts."""


class LedgerDamaged(HeadgateError):
    """The entries of an account contradict its last known state. The account is not changed any more."""

    def __init__(self, account: str) -> None:
        super().__init__(
            f"the entries of account {account!r} contradict its last state; "
            "run `headgate ledger verify`, and restore a backup"
        )
        self.account = account


class StateCache:
    """States of the accounts that this process has used last."""

    def __init__(self, most: int = 10_000) -> None:
        self._states: OrderedDict[str, tuple[AccountState, int]] = OrderedDict()
        self._most = most

    def get(self, account: str) -> tuple[AccountState, int] | None:
        """The state, and the position of the last checkpoint."""
        return self._states.get(account)

    def put(self, state: AccountState, checkpoint: int) -> None:
        self._states[state.account] = state, checkpoint
        self._states.move_to_end(state.account)
        if len(self._states) > self._most:
            self._states.popitem(last=False)

    def forget(self, accounts: Collection[str]) -> None:
        for account in accounts:
            self._states.pop(account, None)


class WriteBatch:
    """A transaction of the ledger: see `LedgerTransaction`."""

    def __init__(self, connection: Connection, cache: StateCache, monitor: UsageMonitor, now_us: int) -> None:
        self.now_us = now_us
        self._connection, self._cache, self._monitor = connection, cache, monitor
        self._found: dict[str, LedgerEntry] = {}
        self._looked_up: set[str] = set()
        self._states: dict[str, AccountState] = {}
        self._checkpoints: dict[str, int] = {}
        self._damaged: dict[str, LedgerDamaged] = {}
        self._entries: list[LedgerEntry] = []
        self._used: dict[str, None] = {}
        """Accounts with new usage records."""
        self._first = self._number = connection.scalar(select(func.max(ENTRIES.c.number))) or 0

    @property
    def accounts(self) -> Collection[str]:
        """The accounts whose states were used, and possibly changed."""
        return self._states.keys()

    def prepare(self, ids: Collection[str], accounts: Collection[str]) -> None:
        """Read the entries with these ids, and the states of their accounts and of these."""
        self._found |= find_entries(self._connection, ids)
        self._looked_up.update(ids)
        self._load({*accounts, *[entry.account for entry in self._found.values()]})

    def find(self, id: str) -> LedgerEntry | None:
        if id not in self._looked_up:
            self.prepare([id], ())
        return self._found.get(id)

    def state(self, account: str) -> AccountState:
        if account not in self._states:
            self._load([account])
        if account in self._damaged:
            raise self._damaged[account]
        state = self._states[account]
        while (draft := state.next_expiry(max(self.now_us, state.at_us))) is not None:
            self.append(state, draft)
        return state

    def append(self, state: AccountState, draft: EntryDraft, usage: tuple[int, str] = (0, "")) -> LedgerEntry:
        self._number += 1
        entry = state.append(draft, self.now_us, self._number, usage)
        self._entries.append(entry)
        self._found[entry.id] = entry
        return entry

    def known_usage(self, ids: Collection[str]) -> dict[str, tuple[str, int]]:
        return read_known_usage(self._connection, ids)

    def add_usage(self, records: Sequence[UsageRecord]) -> set[str]:
        known = self.known_usage([record.id for record in records])
        number = self._connection.scalar(select(func.max(USAGE.c.number))) or 0
        new: dict[str, UsageRecord] = {}
        repeated = set()
        for record in records:
            if record.id in new:
                repeated.add(record.id)
            elif (first := known.get(record.id)) is None:
                new[record.id] = record
            elif first != (record.lease, record.at_us):  # else the record itself was written: its answer was lost
                repeated.add(record.id)
        if new:
            self._used |= dict.fromkeys([record.account for record in new.values()])
            self._insert_usage([(number + at, *each) for at, each in enumerate(new.values(), 1)])
        return repeated

    def _insert_usage(self, rows: Sequence[tuple[Any, ...]]) -> None:
        newest = select(USAGE_HASHES.c.hash).order_by(USAGE_HASHES.c.number.desc()).limit(1)
        chain = chain_usage(self._connection.scalar(newest) or FIRST_HASH)
        chain.update(b"".join(map(encode_usage, rows)))
        insert_rows(self._connection, USAGE, rows)
        insert_rows(self._connection, USAGE_HASHES, [(rows[-1][0], chain.hexdigest())])

    def usage_of(self, lease: str) -> tuple[int, int, str]:
        query = select(USAGE).where(USAGE.c.lease == lease).order_by(USAGE.c.number)
        rows = [tuple(row) for row in self._connection.execute(query)]
        amount = sum(row[4] for row in rows)
        return len(rows), amount, hash_usage(rows) if rows else ""

    def write(self) -> None:
        """Write the new entries, the heads and checkpoints of their accounts, and the thresholds that they reach."""
        accounts = dict.fromkeys([entry.account for entry in self._entries])
        if self._entries:
            insert_rows(self._connection, ENTRIES, self._entries)
            self._write_heads([self._states[account] for account in accounts])
        used = [state for account in {**accounts, **self._used} if (state := self._states.get(account)) is not None]
        self._monitor.check(self._connection, used, self.now_us)

    def _write_heads(self, changed: Sequence[AccountState]) -> None:
        heads = [
            (state.account, state.position, state.number, state.at_us, state.hash, state.available, state.next_due_us())
            for state in changed
        ]
        _upsert(self._connection, ACCOUNTS, heads)
        due = [each for each in changed if each.position >= self._checkpoints[each.account] + CHECKPOINT_INTERVAL]
        for state in due:
            self._checkpoints[state.account] = state.position
        if due:
            _upsert(self._connection, CHECKPOINTS, [(state.account, state.position, state.dump()) for state in due])

    def keep_states(self) -> None:
        """Put the states into the cache, once the transaction is committed."""
        for account, state in self._states.items():
            self._cache.put(state, self._checkpoints[account])

    def _load(self, accounts: Collection[str]) -> None:
        missing = [each for each in accounts if each not in self._states and each not in self._damaged]
        if not missing:
            return
        heads = {
            account: (position, hash)
            for account, position, hash in self._connection.execute(
                select(ACCOUNTS.c.account, ACCOUNTS.c.position, ACCOUNTS.c.hash).where(ACCOUNTS.c.account.in_(missing))
            )
        }
        for account in missing:
            try:
                self._states[account], self._checkpoints[account] = _current_state(
                    self._connection, account, heads.get(account), self._cache.get(account)
                )
            except LedgerDamaged as damage:  # the other accounts of the batch are not affected
                self._damaged[account] = damage


def _current_state(
    connection: Connection,
    account: str,
    head: tuple[int, str] | None,
    cached: tuple[AccountState, int] | None,
) -> tuple[AccountState, int]:
    if head is None:
        return AccountState(account), 0
    if cached is not None and (cached[0].position, cached[0].hash) == head:
        return cached
    if cached is None or cached[0].position >= head[0]:
        cached = _checkpoint(connection, account)
    state, checkpoint = cached
    for entry in _entries_after(connection, account, state.position):
        if state.replay(entry) != entry:
            break
    if (state.position, state.hash) != head:
        raise LedgerDamaged(account)
    return state, checkpoint


def read_state(connection: Connection, account: str) -> AccountState:
    """The state of an account after its last entry."""
    columns = select(ACCOUNTS.c.position, ACCOUNTS.c.hash).where(ACCOUNTS.c.account == account)
    head = connection.execute(columns).one_or_none()
    return _current_state(connection, account, None if head is None else (head[0], head[1]), None)[0]


def _checkpoint(connection: Connection, account: str) -> tuple[AccountState, int]:
    found = connection.scalar(select(CHECKPOINTS.c.state).where(CHECKPOINTS.c.account == account))
    state = AccountState(account) if found is None else AccountState.load(account, found)
    return state, state.position


def _entries_after(connection: Connection, account: str, position: int) -> Iterator[LedgerEntry]:
    query = select(ENTRIES).where(ENTRIES.c.account == account, ENTRIES.c.position > position)
    for row in connection.execute(query.order_by(ENTRIES.c.position)):
        yield LedgerEntry(*row)


def find_entries(connection: Connection, ids: Collection[str]) -> dict[str, LedgerEntry]:
    """The entries with these ids."""
    if not ids:
        return {}
    rows = connection.execute(select(ENTRIES).where(ENTRIES.c.id.in_([*ids])))
    return {entry.id: entry for entry in (LedgerEntry(*row) for row in rows)}


def read_known_usage(connection: Connection, ids: Collection[str]) -> dict[str, tuple[str, int]]:
    """The lease and the time of those ids of which there is a usage record."""
    # With a parameter for each of thousands of ids, building the statement takes longer than running it.
    is_sqlite = connection.dialect.name == "sqlite"
    given = "SELECT value AS id FROM json_each(?)" if is_sqlite else "SELECT unnest(%s::text[]) AS id"
    query = f"SELECT id, lease, at_us FROM ({given}) AS given JOIN {USAGE.name} USING (id)"
    rows = connection.exec_driver_sql(query, (json.dumps([*ids]) if is_sqlite else [*ids],))
    return {id: (lease, at_us) for id, lease, at_us in rows}


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert complete rows."""
    names = ", ".join(table.columns.keys())
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(table.columns))
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", [*map(tuple, rows)])
        return
    if len(rows) < MIN_COPY_ROWS:
        marks = ", ".join(["%s"] * len(table.columns))
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", [*map(tuple, rows)])
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _upsert(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, or replace those with the same primary key."""
    names = table.columns.keys()
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    updates = ", ".join([f"{name} = excluded.{name}" for name in names if name not in table.primary_key.columns])
    keys = ", ".join(table.primary_key.columns.keys())
    statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join([mark] * len(names))})"
    connection.exec_driver_sql(f"{statement} ON CONFLICT ({keys}) DO UPDATE SET {updates}", [*rows])
