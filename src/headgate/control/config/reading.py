"""Rows in force at a version, and the changes between two versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, or_, select

from headgate.control.config.compose import PolicyTemplate
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, PolicyDocument, Row, StoredRow
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sqlalchemy import Connection

__all__ = [
    "ConfigChanges",
    "ConfigContents",
    "VersionStamp",
    "in_force",
    "newest_stamp",
    "newest_version",
    "read_changes",
    "read_contents",
    "rows_at",
    "select_rows",
]

FETCH_SIZE: Final = 500
"""Rows fetched at a time, few enough that other threads get their turn."""


class VersionStamp(NamedTuple):
    """A version and its time. Stores that diverged, as after a restored backup, differ in the time of a version."""

    version: int
    at_us: int


class ConfigContents(NamedTuple):
    """All rows in force at a version."""

    stamp: VersionStamp
    rows: Mapping[str, dict[int, Any]]
    """By section and id."""

    @property
    def template(self) -> PolicyTemplate:
        document: PolicyDocument | None = next(iter(self.rows["documents"].values()), None)
        return PolicyTemplate(document, self.rows["tiers"].values(), self.rows["routes"].values())

    @property
    def lists(self) -> dict[str, list[Row]]:
        return {section: list(self.rows[section].values()) for section in LIST_SECTIONS}


class ConfigChanges(NamedTuple):
    """Rows that differ between two versions."""

    since: VersionStamp
    stamp: VersionStamp
    rows: Mapping[str, dict[int, Any]]
    """By section and id; None for removed rows."""

    @property
    def affect_template(self) -> bool:
        return any(self.rows[section] for section in BASE_SECTIONS)


def newest_version(connection: Connection) -> int:
    """The newest version; 0 for an empty store."""
    return newest_stamp(connection).version


def newest_stamp(connection: Connection) -> VersionStamp:
    query = select(VERSIONS.c.version, VERSIONS.c.at_us).order_by(VERSIONS.c.version.desc()).limit(1)
    return VersionStamp(*next(iter(connection.execute(query)), (0, 0)))


def read_contents(
    connection: Connection, stamp: VersionStamp, sections: Iterable[str] = tuple(SECTIONS)
) -> ConfigContents:
    """All rows in force at a version, whatever is written meanwhile."""
    rows = {
        section: {each.id: each.row for each in rows_at(connection, section, stamp.version)} for section in sections
    }
    return ConfigContents(stamp, rows)


def read_changes(connection: Connection, since: VersionStamp, stamp: VersionStamp) -> ConfigChanges | None:
    """The changes after `since`, up to and including `stamp`; None if `since` is not in this store's past."""
    is_past = VERSIONS.c.version == since.version, VERSIONS.c.at_us == since.at_us
    if since.version > stamp.version or connection.scalar(select(VERSIONS.c.version).where(*is_past)) is None:
        return None
    found: dict[str, dict[int, Row | None]] = {}
    for section in SECTIONS:
        table = TABLES[section]
        ends = table.c.until_version
        ended = select(table.c.id).where(ends > since.version, ends <= stamp.version)
        added = select_rows(connection, section, and_(table.c.since > since.version, in_force(section, stamp.version)))
        found[section] = {id: None for (id,) in connection.execute(ended)} | {each.id: each.row for each in added}
    return ConfigChanges(since, stamp, found)


def rows_at(
    connection: Connection, section: str, version: int, *where: ColumnElement[bool]
) -> Iterator[StoredRow[Any]]:
    return select_rows(connection, section, in_force(section, version), *where)


def select_rows(connection: Connection, section: str, *where: ColumnElement[bool]) -> Iterator[StoredRow[Any]]:
    """The rows of a section that match all conditions, ordered by id."""
    table, kind = TABLES[section], SECTIONS[section]
    columns = [table.c[name] for name in kind._fields]
    query = select(table.c.id, table.c.since, *columns).where(*where).order_by(table.c.id)
    for id, since, *fields in connection.execute(query.execution_options(yield_per=FETCH_SIZE)):
        yield StoredRow(id, since, kind(*fields))


def in_force(section: str, version: int) -> ColumnElement[bool]:
    table = TABLES[section]
    ends = table.c.until_version
    return and_(table.c.since <= version, or_(ends.is_(None), ends > version))
