"""Add the time zone and the first day of periods to clients."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("headgate_clients", sa.Column("timezone", sa.String(50), nullable=True))
    op.add_column("headgate_clients", sa.Column("starts", sa.String(10), nullable=True))
