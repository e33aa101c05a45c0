"""Create the table of the hashes of usage records, with one for those that exist."""

from __future__ import annotations

import json
from hashlib import sha256

import sqlalchemy as sa
from alembic import op

__all__ = ["branch_labels", "depends_on", "down_revision", "revision", "upgrade"]

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

FIRST_HASH = "0" * 64


def upgrade() -> None:
    hashes = op.create_table(
        "headgate_ledger_usage_hashes",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    columns = "number, id, account, lease, amount, at_us, reference"
    query = sa.text(f"SELECT {columns} FROM headgate_ledger_usage ORDER BY number")
    state, number = sha256(FIRST_HASH.encode()), 0
    for row in op.get_bind().execute(query):
        state.update(json.dumps([*row], separators=(",", ":")).encode() + b"\n")
        number = row[0]
    if number:
        op.bulk_insert(hashes, [{"number": number, "hash": state.hexdigest()}])
