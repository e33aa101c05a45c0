"""The tables of the config store. A row is in force from version `since` until before `until_version`.

Rows are never overwritten, so that the state at any version and the changes of a version can be queried. Migrations
bring a database to this schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table, Text, text

from headgate.control.config.rows import SECTIONS, UNIQUE_KEYS

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

__all__ = ["AUDIT", "METADATA", "TABLES", "VERSIONS"]

METADATA: Final = MetaData()

_ROW_NUMBER: Final = BigInteger().with_variant(Integer(), "sqlite")  # SQLite autoincrements only INTEGER keys


def _text(name: str, length: int | None = None, *, nullable: bool = False) -> Column[str]:
    kind: TypeEngine[str] = Text() if length is None else String(length)
    return Column(name, kind, nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _limit() -> list[Column[int] | Column[str]]:
    return [
        _number("quota"),
        _number("period_us"),
        _number("burst", nullable=True),
        _text("algorithm", 50, nullable=True),
    ]


def _client() -> list[Column[str]]:
    return [_text("kind", 50), _text("value", 500)]


def _validity() -> list[Column[int] | Column[str]]:
    return [
        _number("valid_from_us", nullable=True),
        _number("valid_until_us", nullable=True),
        _text("reason", 500, nullable=True),
        _text("author", 200, nullable=True),
    ]


VERSIONS: Final = Table(
    "headgate_versions",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    _number("at_us"),
    _text("author", 200),
    _text("reason", 500),
    _text("what"),
    _number("restores", nullable=True),
    Index("headgate_versions_at", "at_us", "version"),
)

AUDIT: Final = Table(
    "headgate_audit",
    METADATA,
    Column("number", _ROW_NUMBER, primary_key=True, autoincrement=True),
    _number("at_us"),
    _text("author", 200),
    _text("action", 100),
    _text("about", 600),
    _text("reason", 500),
    Index("headgate_audit_at", "at_us", "number"),
)
"""Audited actions other than versions."""

_COLUMNS: Final[dict[str, list[Column[int] | Column[str]]]] = {
    "documents": [_text("text"), _text("format", 10), _text("name", 500)],
    "tiers": [_text("tier", 100), _text("limit_name", 100), *_limit()],
    "routes": [_text("path", 1100), _number("cost"), _text("route_class", 100, nullable=True)],
    "clients": [*_client(), _text("tier", 100, nullable=True), _text("label", 500, nullable=True)],
    "overrides": [
        *_client(),
        _text("limit_name", 100, nullable=True),
        _text("route_class", 100, nullable=True),
        *_limit(),
        *_validity(),
    ],
    "blocked": [*_client(), *_validity()],
}


def _table(section: str) -> Table:
    name = f"headgate_{section}"
    columns: list[Column[int] | Column[str]] = [
        Column("number", _ROW_NUMBER, primary_key=True, autoincrement=True),
        _number("id"),
        _number("since"),
        _number("until_version", nullable=True),
        *_COLUMNS[section],
    ]
    in_force, ended = text("until_version IS NULL"), text("until_version IS NOT NULL")
    key = UNIQUE_KEYS[section]
    indices = [
        Index(f"{name}_id", "id", unique=True, sqlite_where=in_force, postgresql_where=in_force),
        Index(f"{name}_since", "since"),
        Index(f"{name}_until", "until_version", sqlite_where=ended, postgresql_where=ended),
    ]
    if key != ():
        words = ("kind", "value") if key is None else key
        is_one = key is not None
        indices.append(Index(f"{name}_key", *words, unique=is_one, sqlite_where=in_force, postgresql_where=in_force))
    return Table(name, METADATA, *columns, *indices)


TABLES: Final = {section: _table(section) for section in SECTIONS}
