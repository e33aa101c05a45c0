"""Tables of traffic baselines and anomalies, created by the migrations of the config store."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, Text

__all__ = ["ANOMALIES", "CLIENT_DAYS", "LIMIT_REQUESTS", "METADATA", "NOTICES", "WATCHED_DAYS"]

METADATA: Final = MetaData()


def _number(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


CLIENT_DAYS: Final = Table(
    "headgate_minutes",
    METADATA,
    Column("day", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(50), primary_key=True),
    Column("key", String(100), primary_key=True),
    _number("missing"),
    Column("counts", Text, nullable=False),
    Index("headgate_minutes_client", "kind", "key"),
)
"""A client's histogram of requests per minute on a day (since 1970, UTC). `missing` is the number of watched minutes of
that day before the client was first seen."""

WATCHED_DAYS: Final = Table(
    "headgate_watch",
    METADATA,
    Column("day", BigInteger, primary_key=True, autoincrement=False),
    _number("minutes"),
    _number("last_minute"),
)
"""The number of watched minutes of a day, and the last minute that a detector has processed."""

ANOMALIES: Final = Table(
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
    Column("dominant", BigInteger, nullable=False, server_default="0"),
    _number("last_over"),
    _number("attempts"),
    _number("next_us", nullable=True),
    _number("delivered_us", nullable=True),
    Column("error", String(500), nullable=True),
    Index("headgate_steps_client", "kind", "key", "minute", unique=True),
    Index("headgate_steps_minute", "minute"),
    Index("headgate_steps_next", "next_us"),
)
"""Anomalies and the state of their delivery; `next_us` is the time of the next webhook attempt, or None."""

NOTICES: Final = Table(
    "headgate_notices",
    METADATA,
    Column("id", String(60), primary_key=True),
    Column("anomaly", String(40), nullable=False),
    Column("customer", String(600), nullable=False),
    Column("channel", String(200), nullable=False),
    Column("raised", Text, nullable=False),
    _number("at_us"),
    _number("attempts"),
    _number("next_us", nullable=True),
    _number("delivered_us", nullable=True),
    Column("error", String(500), nullable=True),
    Index("headgate_notices_next", "next_us"),
)
"""Messages to customers about anomalies, one for each channel, and the state of their delivery. A row without a
channel, whose id is that of the anomaly, records that it was handled."""

LIMIT_REQUESTS: Final = Table(
    "headgate_limit_requests",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("anomaly", String(40), nullable=False),
    Column("kind", String(50), nullable=False),
    Column("value", String(500), nullable=False),
    Column("limit_name", String(100), nullable=False),
    Column("current", String(200), nullable=False),
    Column("wanted", String(200), nullable=False),
    Column("message", String(500), nullable=False),
    _number("at_us"),
    Column("state", String(20), nullable=False),
    Column("decided_by", String(200), nullable=True),
    _number("decided_us", nullable=True),
    Index("headgate_limit_requests_client", "kind", "value"),
    Index("headgate_limit_requests_state", "state", "at_us"),
)
"""Requests of customers for higher limits; the state is "open", "approved" or "declined"."""
