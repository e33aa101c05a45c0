"""Create the tables of messages to customers and of their requests for higher limits, and a column of anomalies."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def _number(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, autoincrement=False)


def _text(name: str, length: int, *, nullable: bool = False, primary_key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(length), nullable=nullable, primary_key=primary_key)


def upgrade() -> None:
    op.create_table(
        "headgate_notices",
        _text("id", 60, primary_key=True),
        _text("anomaly", 40),
        _text("customer", 600),
        _text("channel", 200),
        sa.Column("raised", sa.Text, nullable=False),
        _number("at_us"),
        _number("attempts"),
        _number("next_us", nullable=True),
        _number("delivered_us", nullable=True),
        _text("error", 500, nullable=True),
    )
    op.create_index("headgate_notices_next", "headgate_notices", ["next_us"])
    op.create_table(
        "headgate_limit_requests",
        _text("id", 40, primary_key=True),
        _text("anomaly", 40),
        _text("kind", 50),
        _text("value", 500),
        _text("limit_name", 100),
        _text("current", 200),
        _text("wanted", 200),
        _text("message", 500),
        _number("at_us"),
        _text("state", 20),
        _text("decided_by", 200, nullable=True),
        _number("decided_us", nullable=True),
    )
    op.add_column("headgate_steps", sa.Column("dominant", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("headgate_limit_requests_client", "headgate_limit_requests", ["kind", "value"])
    op.create_index("headgate_limit_requests_state", "headgate_limit_requests", ["state", "at_us"])
