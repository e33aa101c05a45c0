"""Add traffic baselines and anomalies."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "headgate_minutes",
        sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(50), primary_key=True),
        sa.Column("key", sa.String(100), primary_key=True),
        _number("missing"),
        sa.Column("counts", sa.Text, nullable=False),
    )
    op.create_index("headgate_minutes_client", "headgate_minutes", ["kind", "key"])
    op.create_table(
        "headgate_watch",
        sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
        _number("minutes"),
        _number("last_minute"),
    )
    op.create_table(
        "headgate_steps",
        sa.Column("id", sa.String(40), primary_key=True),
        _number("minute"),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("key", sa.String(100), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        _number("requests"),
        _number("requests_before"),
        _number("usual"),
        sa.Column("verdict", sa.String(20), nullable=False),
        _number("agents"),
        _number("addresses"),
        _number("paths"),
        _number("looked_at"),
        _number("last_over"),
        _number("attempts"),
        _number("next_us", nullable=True),
        _number("delivered_us", nullable=True),
        sa.Column("error", sa.String(500), nullable=True),
    )
    op.create_index("headgate_steps_client", "headgate_steps", ["kind", "key", "minute"], unique=True)
    op.create_index("headgate_steps_minute", "headgate_steps", ["minute"])
    op.create_index("headgate_steps_next", "headgate_steps", ["next_us"])


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)
