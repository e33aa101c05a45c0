"""Add tokens, sessions, one-time codes and idempotent responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "headgate_tokens",
        sa.Column("id", sa.String(20), primary_key=True),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        _number("made_us"),
        sa.Column("made_by", sa.String(200), nullable=False),
        _number("expires_us"),
        _number("used_us", nullable=True),
        _number("revoked_us", nullable=True),
        sa.Column("revoked_by", sa.String(200), nullable=True),
    )
    op.create_table(
        "headgate_sessions",
        sa.Column("hash", sa.LargeBinary(32), primary_key=True),
        sa.Column("token_id", sa.String(20), nullable=False, index=True),
        sa.Column("csrf", sa.String(64), nullable=False),
        _number("made_us"),
        _number("expires_us", index=True),
    )
    op.create_table(
        "headgate_codes",
        sa.Column("hash", sa.LargeBinary(32), primary_key=True),
        sa.Column("token_id", sa.String(20), nullable=False),
        _number("expires_us"),
    )
    op.create_table(
        "headgate_answers",
        sa.Column("token_id", sa.String(20), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        _number("at_us", index=True),
        sa.Column("status", sa.Integer, nullable=True),
        _number("etag", nullable=True),
        sa.Column("body", sa.Text, nullable=True),
    )


def _number(name: str, *, nullable: bool = False, index: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable, index=index)
