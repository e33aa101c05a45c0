"""What is usual for each client, and step changes: tables beside those of the config store, made by its migrations."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, Text

__all__ = ["METADATA", "MINUTES", "STEPS", "WATCH"]

METADATA: Final = MetaData()


def _number(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


MINUTES: Final = Table(
    "headgate_minutes",
    METADATA,
    Column("day", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(50), primary_key=True),
    Column("key", String(100), primary_key=True),
    _number("missing"),
    Column("counts", Text, nullable=False),
    Index("headgate_minutes_client", "kind", "key"),
)
"""How many requests clients have sent in the minutes of a day (since 1970, UTC); `missing` are the minutes of the day
before a client was first seen."""

WATCH: Final = Table(
    "headgate_watch",
    METADATA,
    Column("day", BigInteger, primary_key=True, autoincrement=False),
    _number("minutes"),
    _number("last_minute"),
)
"""How many minutes of a day are counted in the other table, and the last that somebody has looked at."""

STEPS: Final = Table(
    "headgate_steps",
    METADATA,
    Column("id", String(40), primary_key=True),
    _number("minute"),
    Column("kind", String(50), nullable=False),
    Column("key", String(100), nullable=False),
    Column("label", String(200), nullable=False),
    _number("requests"),
    _number("requests_before"),
    _number("usual"),
    Column("verdict", String(20), nullable=False),
    _number("agents"),
    _number("addresses"),
    _number("paths"),
    _number("looked_at"),
    _number("last_over"),
    _number("attempts"),
    _number("next_us", nullable=True),
    _number("delivered_us", nullable=True),
    Column("error", String(500), nullable=True),
    Index("headgate_steps_client", "kind", "key", "minute", unique=True),
    Index("headgate_steps_minute", "minute"),
    Index("headgate_steps_next", "next_us"),
)
"""Step changes, and how far their webhook has come: `next_us` is when it is tried next, None if never."""
