"""Create the tables of usage alerts."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _number(name: str, *, nullable: bool = False, primary_key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, primary_key=primary_key, autoincrement=False)


def upgrade() -> None:
    op.create_table(
        "headgate_ledger_alerts",
        sa.Column("id", sa.String(40), nullable=False, primary_key=True),
        sa.Column("account", sa.String(200), nullable=False),
        _number("period_end_us"),
        _number("percent"),
        _number("at_us"),
        _number("used"),
        _number("allowance"),
        _number("attempts"),
        _number("next_us", nullable=True),
        _number("delivered_us", nullable=True),
        sa.Column("error", sa.String(500), nullable=True),
    )
    op.create_table("headgate_ledger_thresholds", _number("percent", primary_key=True))
    op.create_index(
        "headgate_ledger_alerts_account",
        "headgate_ledger_alerts",
        ["account", "period_end_us", "percent"],
        unique=True,
    )
    op.create_index("headgate_ledger_alerts_next", "headgate_ledger_alerts", ["next_us"])
