"""Add an index for paging clients by label.

On the label alone: with the value, the longest rows would exceed the size limit of PostgreSQL indexes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Must equal the ORDER BY expression of the queries to be used.
    is_sqlite = op.get_context().dialect.name == "sqlite"
    small = sa.text("lower(label)" if is_sqlite else 'lower(label COLLATE "C") COLLATE "C"')
    has_name = sa.text("until_version IS NULL AND label IS NOT NULL")
    name, table = "headgate_clients_label", "headgate_clients"
    op.create_index(name, table, [small], sqlite_where=has_name, postgresql_where=has_name)
