"""Add the audit log, and indexes for paged lists.

The index on the end of rows excludes current rows: SQLite would use it for every query on those, and sort all of them
for one page.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SECTIONS = ("documents", "tiers", "routes", "clients", "overrides", "blocked")


def upgrade() -> None:
    op.create_table(
        "headgate_audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("author", sa.String(200), nullable=False),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("about", sa.String(600), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
    )
    op.create_index("headgate_audit_at", "headgate_audit", ["at_us", "number"])
    op.create_index("headgate_versions_at", "headgate_versions", ["at_us", "version"])
    ended = sa.text("until_version IS NOT NULL")
    for section in SECTIONS:
        name = f"headgate_{section}"
        op.drop_index(f"{name}_until", name)
        op.create_index(f"{name}_until", name, ["until_version"], sqlite_where=ended, postgresql_where=ended)
