"""Statements: what an account was granted and charged in a period.

Each entry has the totals of its account, so that the sums of a period are the difference between two entries. A
statement opens as fast with a million entries as with ten.
"""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import func, select

from headgate.clock import EPOCH
from headgate.quotas.entries import LedgerEntry
from headgate.quotas.tables import ENTRIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

__all__ = ["Statement", "StatementDay", "StatementLine", "read_lines", "read_statement"]

MAX_DAYS: Final = 366
PAGE: Final = 1000

_MICROSECOND: Final = timedelta(microseconds=1)


class StatementLine(NamedTuple):
    """An entry that changes what the account owns: not a mere hold."""

    position: int
    number: int
    at_us: int
    kind: str
    amount: int
    """Added to the account if positive, taken from it if negative."""
    uncovered: int
    """Used beyond the balance, and not charged."""
    owned: int
    """Available and held units after the entry."""
    id: str
    source: str
    """The origin of a grant; for charges, a JSON array of the grants that paid, with their amounts."""
    author: str
    reason: str
    reference: str


class StatementDay(NamedTuple):
    """The sums of one local day."""

    day: str
    """As in "2026-10-31"."""
    granted: int
    """With adjustments upwards and downwards."""
    charged: int
    expired: int
    owned: int
    """At the end of the day."""


class Statement(NamedTuple):
    """The sums of an account in a period: opening + granted + adjusted - charged - expired = closing."""

    account: str
    since_us: int
    until_us: int
    opening: int
    """Available and held units at the beginning."""
    granted: int
    adjusted: int
    charged: int
    expired: int
    closing: int
    held: int
    """The part of `closing` that is held for reservations."""
    uncovered: int
    entries: int
    """The number of entries, including reservations, which have no line."""
    days: tuple[StatementDay, ...]
    """Empty for periods of more than 366 days."""
    lines: tuple[StatementLine, ...]
    has_more: bool
    """True if there are more lines."""
    last_hash: str
    """The hash of the last entry: with it, one can prove later that nothing before it was changed."""


class _RunningTotals(NamedTuple):
    granted: int = 0
    adjusted: int = 0
    charged: int = 0
    expired: int = 0
    held: int = 0
    position: int = 0

    @property
    def owned(self) -> int:
        return self.granted + self.adjusted - self.charged - self.expired


def read_statement(
    connection: Connection, account: str, since_us: int, until_us: int, *, most: int, zone: tzinfo
) -> Statement:
    before, after = _totals(connection, account, since_us), _totals(connection, account, until_us)
    lines = read_lines(connection, account, since_us, until_us, after=0, most=most + 1)
    uncovered = select(func.sum(ENTRIES.c.uncovered)).where(
        ENTRIES.c.account == account,
        ENTRIES.c.at_us >= since_us,
        ENTRIES.c.at_us < until_us,
        ENTRIES.c.uncovered > 0,
    )
    query = select(ENTRIES).where(ENTRIES.c.account == account, ENTRIES.c.position == after.position)
    last = connection.execute(query).one_or_none()
    return Statement(
        account,
        since_us,
        until_us,
        before.owned,
        after.granted - before.granted,
        after.adjusted - before.adjusted,
        after.charged - before.charged,
        after.expired - before.expired,
        after.owned,
        after.held,
        int(connection.scalar(uncovered) or 0),
        after.position - before.position,
        tuple(_days(connection, account, since_us, until_us, before, zone)),
        tuple(lines[:most]),
        len(lines) > most,
        "" if last is None else LedgerEntry(*last).hash,
    )


def read_lines(
    connection: Connection, account: str, since_us: int, until_us: int, *, after: int, most: int
) -> list[StatementLine]:
    """Up to `most` lines of a period, of entries after a position."""
    query = select(ENTRIES).where(ENTRIES.c.account == account, ENTRIES.c.at_us < until_us)
    start = query.where(ENTRIES.c.at_us < since_us).order_by(ENTRIES.c.at_us.desc(), ENTRIES.c.position.desc()).limit(1)
    first = connection.execute(start).one_or_none()
    position = max(after, 0 if first is None else first.position)
    previous = _owned_at(connection, account, position)
    lines: list[StatementLine] = []
    while len(lines) < most:
        page = query.where(ENTRIES.c.position > position).order_by(ENTRIES.c.position).limit(PAGE)
        rows = connection.execute(page).all()
        for row in rows:
            entry = LedgerEntry(*row)
            owned = entry.balance + entry.held
            if owned != previous or entry.uncovered:
                lines.append(_line(entry, owned - previous, owned))
                if len(lines) == most:
                    return lines
            previous = owned
        if len(rows) < PAGE:
            return lines
        position = rows[-1].position
    return lines


def _line(entry: LedgerEntry, amount: int, owned: int) -> StatementLine:
    source = entry.sources if entry.kind in ("commit", "adjust") and entry.sources else entry.source
    attribution = (entry.author, entry.reason, entry.reference)
    head = (entry.position, entry.number, entry.at_us, entry.kind, amount, entry.uncovered, owned)
    return StatementLine(*head, entry.id, source, *attribution)


def _owned_at(connection: Connection, account: str, position: int) -> int:
    query = select(ENTRIES).where(ENTRIES.c.account == account, ENTRIES.c.position == position)
    row = connection.execute(query).one_or_none()
    return 0 if row is None else row.granted + row.adjusted - row.charged - row.expired


def _totals(connection: Connection, account: str, before_us: int) -> _RunningTotals:
    """The totals after the last entry before an instant."""
    columns = [ENTRIES.c[name] for name in _RunningTotals._fields]
    query = select(*columns).where(ENTRIES.c.account == account, ENTRIES.c.at_us < before_us)
    row = connection.execute(query.order_by(ENTRIES.c.at_us.desc(), ENTRIES.c.position.desc()).limit(1)).one_or_none()
    return _RunningTotals() if row is None else _RunningTotals(*row)


def _days(
    connection: Connection, account: str, since_us: int, until_us: int, before: _RunningTotals, zone: tzinfo
) -> Iterator[StatementDay]:
    if until_us - since_us > MAX_DAYS * 86_400_000_000:
        return
    day = (EPOCH + timedelta(microseconds=since_us)).astimezone(zone).date()
    while True:
        following = day + timedelta(days=1)
        midnight = datetime(following.year, following.month, following.day, tzinfo=zone)
        end_us = min((midnight - EPOCH) // _MICROSECOND, until_us)
        after = _totals(connection, account, end_us)
        granted = after.granted + after.adjusted - before.granted - before.adjusted
        charged, expired = after.charged - before.charged, after.expired - before.expired
        yield StatementDay(day.isoformat(), granted, charged, expired, after.owned)
        if end_us == until_us:
            return
        day, before = following, after
