"""Clients are listed by their names, a page at a time: an index finds the first of them, and those after another.

By the name alone: with the value beside it, the longest ones would not fit into PostgreSQL's indices.
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
    # To the letter what queries sort by: else the index is not used.
    is_sqlite = op.get_context().dialect.name == "sqlite"
    small = sa.text("lower(label)" if is_sqlite else 'lower(label COLLATE "C") COLLATE "C"')
    has_name = sa.text("until_version IS NULL AND label IS NOT NULL")
    name, table = "headgate_clients_label", "headgate_clients"
    op.create_index(name, table, [small], sqlite_where=has_name, postgresql_where=has_name)
