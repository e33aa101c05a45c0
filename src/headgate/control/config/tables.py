"""The tables of the config store. A row is in force from version `since` until before `until_version`.

Rows are never overwritten, so that the state at any version and the changes of a version can be queried. Migrations
bring a database to this schema.
"""

from __future__ import annotations

from typing import Any, Final, get_type_hints

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table, Text, text

from headgate.control.config.rows import SECTIONS, UNIQUE_KEYS

__all__ = ["AUDIT", "METADATA", "TABLES", "VERSIONS"]

METADATA: Final = MetaData()
_ROW_NUMBER: Final = BigInteger().with_variant(Integer(), "sqlite")  # SQLite autoincrements only INTEGER keys

_LENGTHS: Final = (
    dict.fromkeys(("value", "name", "label", "reason"), 500)
    | dict.fromkeys(("tier", "limit_name", "route_class", "action"), 100)
    | {"format": 10, "kind": 50, "algorithm": 50, "author": 200, "about": 600, "path": 1100}
    | {"timezone": 50, "starts": 10}
    | {"canary": 20, "state": 20, "ended_by": 200, "end_reason": 500}
)
"""Of texts; others are unlimited."""


def _columns(**kinds: Any) -> list[Column[Any]]:
    """Columns by name, for fields of type int, str, or one of these and None."""
    return [
        Column(
            name,
            BigInteger() if kind in (int, int | None) else String(_LENGTHS[name]) if name in _LENGTHS else Text(),
            nullable=kind in (int | None, str | None),
        )
        for name, kind in kinds.items()
    ]


def _table(section: str) -> Table:
    name, key = f"headgate_{section}", UNIQUE_KEYS[section]
    current, ended = text("until_version IS NULL"), text("until_version IS NOT NULL")
    indexes = [
        Index(f"{name}_id", "id", unique=True, sqlite_where=current, postgresql_where=current),
        Index(f"{name}_since", "since"),
        Index(f"{name}_until", "until_version", sqlite_where=ended, postgresql_where=ended),
    ]
    if key != ():
        names, is_unique = key or ("kind", "value"), key is not None
        indexes.append(Index(f"{name}_key", *names, unique=is_unique, sqlite_where=current, postgresql_where=current))
    number = Column("number", _ROW_NUMBER, primary_key=True, autoincrement=True)
    columns = _columns(id=int, since=int, until_version=int | None, **get_type_hints(SECTIONS[section]))
    return Table(name, METADATA, number, *columns, *indexes)


TABLES: Final = {section: _table(section) for section in SECTIONS}

VERSIONS: Final = Table(
    "headgate_versions",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    *_columns(at_us=int, author=str, reason=str, what=str, restores=int | None),
    Index("headgate_versions_at", "at_us", "version"),
)

AUDIT: Final = Table(
    "headgate_audit",
    METADATA,
    Column("number", _ROW_NUMBER, primary_key=True, autoincrement=True),
    *_columns(at_us=int, author=str, action=str, about=str, reason=str),
    Index("headgate_audit_at", "at_us", "number"),
)
"""Audited actions other than versions."""
