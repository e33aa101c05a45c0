"""Create the tables of the ledger."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _number(name: str, *, nullable: bool = False, primary_key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, primary_key=primary_key, autoincrement=False)


def _text(name: str, length: int, *, primary_key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(length), nullable=False, primary_key=primary_key)


def upgrade() -> None:
    op.create_table(
        "headgate_ledger",
        _number("number", primary_key=True),
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
        sa.Column("sources", sa.Text, nullable=False),
        _number("uncovered"),
        _number("granted"),
        _number("adjusted"),
        _number("charged"),
        _number("expired"),
        _number("held"),
        _text("previous_hash", 64),
    )
    op.create_table(
        "headgate_ledger_accounts",
        _text("account", 200, primary_key=True),
        _number("position"),
        _number("number"),
        _number("at_us"),
        _text("hash", 64),
        _number("balance"),
        _number("next_due_us"),
    )
    op.create_table(
        "headgate_ledger_checkpoints",
        _text("account", 200, primary_key=True),
        _number("position"),
        sa.Column("state", sa.Text, nullable=False),
    )
    op.create_table(
        "headgate_ledger_usage",
        _number("number", primary_key=True),
        _text("id", 200),
        _text("account", 200),
        _text("lease", 250),
        _number("amount"),
        _number("at_us"),
        _text("reference", 500),
    )
    for name, table, columns, unique in (
        ("headgate_ledger_id", "headgate_ledger", ["id"], True),
        ("headgate_ledger_account", "headgate_ledger", ["account", "position"], True),
        ("headgate_ledger_at", "headgate_ledger", ["account", "at_us", "position"], False),
        ("headgate_ledger_due", "headgate_ledger_accounts", ["next_due_us"], False),
        ("headgate_ledger_usage_id", "headgate_ledger_usage", ["id"], True),
        ("headgate_ledger_usage_lease", "headgate_ledger_usage", ["lease", "number"], False),
        ("headgate_ledger_usage_at", "headgate_ledger_usage", ["account", "at_us", "number"], False),
    ):
        op.create_index(name, table, columns, unique=unique)
    op.create_index(
        "headgate_ledger_uncovered",
        "headgate_ledger",
        ["account", "at_us", "uncovered"],
        sqlite_where=sa.text("uncovered > 0"),
        postgresql_where=sa.text("uncovered > 0"),
    )
