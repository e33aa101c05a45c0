"""The tables of the ledger, created by the migrations of the config store.

Rows of ENTRIES and USAGE are only ever added. ACCOUNTS and CHECKPOINTS are derived from them, and verified.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, Text, text

__all__ = ["ACCOUNTS", "ALERTS", "CHECKPOINTS", "ENTRIES", "METADATA", "THRESHOLDS", "USAGE", "USAGE_HASHES"]

METADATA: Final = MetaData()


def _number(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _text(name: str, length: int) -> Column[str]:
    return Column(name, String(length), nullable=False)


ENTRIES: Final = Table(
    "headgate_ledger",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    _text("account", 200),
    _number("position"),
    _text("id", 250),
    _number("at_us"),
    _text("kind", 20),
    _number("amount"),
    _text("subject", 250),
    _number("expires_us", nullable=True),
    _number("priority"),
    _text("source", 100),
    _number("is_lease"),
    _text("author", 200),
    _text("reason", 500),
    _text("reference", 500),
    _number("usage_count"),
    _text("usage_hash", 64),
    Column("sources", Text, nullable=False),
    _number("uncovered"),
    _number("granted"),
    _number("adjusted"),
    _number("charged"),
    _number("expired"),
    _number("held"),
    _text("previous_hash", 64),
    Index("headgate_ledger_id", "id", unique=True),
    Index("headgate_ledger_account", "account", "position", unique=True),
    Index("headgate_ledger_at", "account", "at_us", "position"),
    Index(
        "headgate_ledger_uncovered",
        *("account", "at_us", "uncovered"),
        sqlite_where=text("uncovered > 0"),
        postgresql_where=text("uncovered > 0"),
    ),
)
"""The columns are the fields of `LedgerEntry`, in the same order."""

ACCOUNTS: Final = Table(
    "headgate_ledger_accounts",
    METADATA,
    Column("account", String(200), primary_key=True),
    _number("position"),
    _number("number"),
    _number("at_us"),
    _text("hash", 64),
    _number("balance"),
    _number("next_due_us"),
    Index("headgate_ledger_due", "next_due_us"),
)
"""The last entry of each account, with its hash."""

CHECKPOINTS: Final = Table(
    "headgate_ledger_checkpoints",
    METADATA,
    Column("account", String(200), primary_key=True),
    _number("position"),
    Column("state", Text, nullable=False),
)
"""The state of accounts after one of their last entries, so that a process need not read all of them."""

USAGE: Final = Table(
    "headgate_ledger_usage",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    _text("id", 200),
    _text("account", 200),
    _text("lease", 250),
    _number("amount"),
    _number("at_us"),
    _text("reference", 500),
    Index("headgate_ledger_usage_id", "id", unique=True),
    Index("headgate_ledger_usage_lease", "lease", "number"),
    Index("headgate_ledger_usage_at", "account", "at_us", "number"),
)
"""One row per request that was charged to a lease."""

USAGE_HASHES: Final = Table(
    "headgate_ledger_usage_hashes",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    _text("hash", 64),
)
"""The hash of each batch of usage records, by the number of its last record. It contains that of the previous batch."""

ALERTS: Final = Table(
    "headgate_ledger_alerts",
    METADATA,
    Column("id", String(40), primary_key=True),
    _text("account", 200),
    _number("period_end_us"),
    _number("percent"),
    _number("at_us"),
    _number("used"),
    _number("allowance"),
    _number("attempts"),
    _number("next_us", nullable=True),
    _number("delivered_us", nullable=True),
    Column("error", String(500), nullable=True),
    Index("headgate_ledger_alerts_account", "account", "period_end_us", "percent", unique=True),
    Index("headgate_ledger_alerts_next", "next_us"),
)
"""Thresholds that accounts have crossed, and the state of their delivery; `next_us` is the time of the next webhook
attempt, or None."""

THRESHOLDS: Final = Table(
    "headgate_ledger_thresholds",
    METADATA,
    Column("percent", BigInteger, primary_key=True, autoincrement=False),
)
"""The thresholds of usage alerts; empty for the default ones."""
