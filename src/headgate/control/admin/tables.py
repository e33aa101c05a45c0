"""Tables of the admin server, in the config store's database: tokens, sessions and recorded responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, String, Table, Text

__all__ = ["ANSWERS", "CODES", "METADATA", "SESSIONS", "TOKENS"]

METADATA: Final = MetaData()

TOKENS: Final = Table(
    "headgate_tokens",
    METADATA,
    Column("id", String(20), primary_key=True),
    Column("hash", LargeBinary(32), nullable=False),
    Column("name", String(100), nullable=False),
    Column("role", String(20), nullable=False),
    Column("made_us", BigInteger, nullable=False),
    Column("made_by", String(200), nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("used_us", BigInteger, nullable=True),
    Column("revoked_us", BigInteger, nullable=True),
    Column("revoked_by", String(200), nullable=True),
)

SESSIONS: Final = Table(
    "headgate_sessions",
    METADATA,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("token_id", String(20), nullable=False, index=True),
    Column("csrf", String(64), nullable=False),
    Column("made_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
)

CODES: Final = Table(
    "headgate_codes",
    METADATA,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("token_id", String(20), nullable=False),
    Column("expires_us", BigInteger, nullable=False),
)

ANSWERS: Final = Table(
    "headgate_answers",
    METADATA,
    Column("token_id", String(20), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("fingerprint", LargeBinary(32), nullable=False),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("status", Integer, nullable=True),
    Column("etag", BigInteger, nullable=True),
    Column("body", Text, nullable=True),
)
"""The first response to each Idempotency-Key; without a status while the request is in progress."""
