"""Verification of the ledger: replays all entries, and compares them with what was stored.

All entries are read once, in the order in which they were written, while the states of all accounts are recomputed.
The rows of accounts and checkpoints must agree with them.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from sqlalchemy import func, select

from headgate.control.config.engine import read_transaction
from headgate.quotas.account import AccountState
from headgate.quotas.entries import FIRST_HASH, LedgerEntry, LedgerProblem, chain_usage, encode_usage
from headgate.quotas.tables import ACCOUNTS, CHECKPOINTS, ENTRIES, USAGE, USAGE_HASHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from hashlib import _Hash as HASH

    from sqlalchemy import Engine

__all__ = ["verify_entries"]

PAGE: Final = 20_000


def verify_entries(engine: Engine, progress: Callable[[int, int], None]) -> list[LedgerProblem]:
    """Check the entries up to the last one at the time of the call."""
    return [*_Verification(engine, progress).run()]


class _Verification:
    def __init__(self, engine: Engine, progress: Callable[[int, int], None]) -> None:
        self._engine, self._progress = engine, progress
        self._states: dict[str, AccountState] = {}
        self._damaged: set[str] = set()
        self._leases: dict[str, str] = {}
        """The accounts of leases."""
        self._closed: dict[str, LedgerEntry] = {}
        """The entries that sum up usage records, by lease."""

    def run(self) -> Iterator[LedgerProblem]:
        # One statement, so that heads and checkpoints belong to the same instant.
        last = select(func.max(ENTRIES.c.number)).scalar_subquery()
        last_usage = select(func.max(USAGE.c.number)).scalar_subquery()
        last_hashed = select(func.max(USAGE_HASHES.c.number)).scalar_subquery()
        joined = ACCOUNTS.outerjoin(CHECKPOINTS, CHECKPOINTS.c.account == ACCOUNTS.c.account)
        query = select(
            *(*ACCOUNTS.columns, CHECKPOINTS.c.position, CHECKPOINTS.c.state),
            *(newest := (last, last_usage, last_hashed)),
        ).select_from(joined)
        with read_transaction(self._engine) as connection:
            rows = connection.execute(query).all()
            total, usage, hashed = rows[0][-3:] if rows else connection.execute(select(*newest)).one()
            orphans = connection.scalars(
                select(CHECKPOINTS.c.account).where(CHECKPOINTS.c.account.not_in(select(ACCOUNTS.c.account)))
            ).all()
        self._checkpoints = {row[0]: (row[7], row[8]) for row in rows if row[7] is not None}
        heads = {row[0]: tuple(row[1:7]) for row in rows}
        yield from self._entries(total or 0)
        yield from self._usage(usage or 0, hashed or 0)
        for account, state in self._states.items():
            if account in self._damaged:
                continue
            expected = (*(state.position, state.number, state.at_us, state.hash, state.available, state.next_due_us()),)
            head = heads.get(account)
            if head is None:
                yield LedgerProblem(account, 0, "there are entries, but no row for the account")
            elif head != expected:
                yield LedgerProblem(account, 0, f"the account's row does not match its last entry, {state.number}")
        for account in heads.keys() - self._states.keys():
            yield LedgerProblem(account, 0, "there is a row for the account, but no entries")
        for account, (position, _) in self._checkpoints.items():
            if account not in self._damaged:
                yield LedgerProblem(account, 0, f"the checkpoint is of entry {position}, which does not exist")
        for account in orphans:
            yield LedgerProblem(account, 0, "there is a checkpoint, but no row for the account")

    def _entries(self, total: int) -> Iterator[LedgerProblem]:
        expected = 1
        self._progress(0, total)
        while True:
            query = select(ENTRIES).where(ENTRIES.c.number <= total, ENTRIES.c.number >= expected)
            with read_transaction(self._engine) as connection:
                rows = connection.execute(query.order_by(ENTRIES.c.number).limit(PAGE)).all()
            for row in rows:
                entry = LedgerEntry(*row)
                if entry.number != expected:
                    missing = f"{expected}" if entry.number == expected + 1 else f"{expected} to {entry.number - 1}"
                    yield LedgerProblem("", 0, f"no entry has the number {missing}")
                expected = entry.number + 1
                yield from self._entry(entry)
            self._progress(min(expected - 1, total), total)
            if len(rows) < PAGE:
                return

    def _usage(self, total: int, hashed: int) -> Iterator[LedgerProblem]:
        if total != hashed:
            yield LedgerProblem("", 0, f"the last usage record is {total}, and the last hash is that of {hashed}")
        found: dict[str, tuple[int, HASH]] = {}
        expected = first = 1
        chain = chain_usage(FIRST_HASH)
        while expected <= total:
            query = select(USAGE).where(USAGE.c.number <= total, USAGE.c.number >= expected)
            with read_transaction(self._engine) as connection:
                rows = connection.execute(query.order_by(USAGE.c.number).limit(PAGE)).all()
                is_in_page = USAGE_HASHES.c.number.between(rows[0][0], rows[-1][0])
                hashes = {row.number: row.hash for row in connection.execute(select(USAGE_HASHES).where(is_in_page))}
            for row in rows:
                if row[0] != expected:
                    yield LedgerProblem("", 0, f"no usage record has the number {expected}")
                expected = row[0] + 1
                account, lease = row[2], row[3]
                if self._leases.get(lease) != account:
                    yield LedgerProblem(
                        account, 0, f"usage record {row[0]} is of a lease that the account does not have"
                    )
                line = encode_usage(row)
                count, state = found.get(lease) or (0, sha256())
                state.update(line)
                found[lease] = count + 1, state
                chain.update(line)
                if (stored := hashes.get(row[0])) is not None:
                    if stored != chain.hexdigest():
                        yield LedgerProblem("", 0, f"usage records {first} to {row[0]} do not match their hash")
                    first, chain = row[0] + 1, chain_usage(stored)
        for lease, entry in self._closed.items():
            count, state = found.get(lease) or (0, sha256())
            if (entry.usage_count, entry.usage_hash) != (count, state.hexdigest() if count else ""):
                yield LedgerProblem(entry.account, entry.number, "the usage records of the lease do not match")

    def _entry(self, entry: LedgerEntry) -> Iterator[LedgerProblem]:
        account = entry.account
        state = self._states.get(account)
        if state is None:
            state = self._states[account] = AccountState(account)
        if entry.is_lease and entry.kind == "reserve":
            self._leases[entry.id] = account
        elif entry.kind in ("commit", "adjust") and entry.subject and (entry.usage_count or entry.is_lease):
            self._leases.setdefault(entry.subject, account)
            self._closed[entry.subject] = entry
        if account in self._damaged:
            return  # all that follows would differ, too
        problem = self._compare(state, entry)
        position, stored = self._checkpoints.get(account, (0, ""))
        if problem is None and position == entry.position:
            del self._checkpoints[account]
            if not _is_same_state(stored, state):
                problem = f"the checkpoint of entry {entry.number} does not match the entries"
        if problem is not None:
            self._damaged.add(account)
            yield LedgerProblem(account, entry.number, problem)

    def _compare(self, state: AccountState, entry: LedgerEntry) -> str | None:
        if entry.position != state.position + 1:
            return f"its position is {entry.position}, expected {state.position + 1}: entries are missing or moved"
        if entry.previous_hash != state.hash:
            return "the hash of the previous entry does not match: that entry or this one was changed"
        if entry.number <= state.number:
            return "it is older than the previous entry of the account"
        try:
            expected = state.replay(entry)
        except (KeyError, IndexError, ValueError, TypeError):
            return "it contradicts the entries before it"
        if expected != entry:
            names = [
                name for name, one, other in zip(LedgerEntry._fields, expected, entry, strict=True) if one != other
            ]
            return f"{', '.join(names)} do not follow from the entries before it"
        return None


def _is_same_state(stored: str, state: AccountState) -> bool:
    try:
        return bool(json.loads(stored) == json.loads(state.dump()))
    except ValueError:
        return False
