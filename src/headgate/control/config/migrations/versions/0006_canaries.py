"""Create the table of canaries of the policy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "headgate_canaries",
        sa.Column("number", number, primary_key=True, autoincrement=True),
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("since", sa.BigInteger, nullable=False),
        sa.Column("until_version", sa.BigInteger, nullable=True),
        sa.Column("canary", sa.String(20), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("format", sa.String(10), nullable=False),
        sa.Column("name", sa.String(500), nullable=False),
        sa.Column("percent", sa.BigInteger, nullable=True),
        sa.Column("nodes", sa.Text(), nullable=True),
        sa.Column("max_rejections_bp", sa.BigInteger, nullable=False),
        sa.Column("max_errors_bp", sa.BigInteger, nullable=False),
        sa.Column("max_latency_percent", sa.BigInteger, nullable=False),
        sa.Column("run_us", sa.BigInteger, nullable=True),
        sa.Column("promotes", sa.BigInteger, nullable=False),
        sa.Column("begun_us", sa.BigInteger, nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("ended_us", sa.BigInteger, nullable=True),
        sa.Column("ended_by", sa.String(200), nullable=True),
        sa.Column("end_reason", sa.String(500), nullable=True),
    )
    current, ended = sa.text("until_version IS NULL"), sa.text("until_version IS NOT NULL")
    for name, column, where, unique in (
        ("id", "id", current, True),
        ("since", "since", None, False),
        ("until", "until_version", ended, False),
    ):
        op.create_index(
            f"headgate_canaries_{name}",
            "headgate_canaries",
            [column],
            unique=unique,
            sqlite_where=where,
            postgresql_where=where,
        )
