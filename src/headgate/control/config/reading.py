"""Rows in force at a version, and the changes between two versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, or_, select

from headgate.control.config.compose import PolicyTemplate
from headgate.control.config.rows import (
    BASE_SECTIONS,
    LIST_SECTIONS,
    SECTIONS,
    CanaryRow,
    PolicyDocument,
    Row,
    StoredRow,
)
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sqlalchemy import Connection

__all__ = [
    "ConfigRows",
    "VersionStamp",
    "in_force",
    "newest_stamp",
    "newest_version",
    "read_changes",
    "read_contents",
    "rows_at",
    "select_rows",
]

FETCH_SIZE: Final = 500  # rows fetched at a time, few enough that other threads get their turn


class VersionStamp(NamedTuple):
    """A version and its time. Stores that diverged, as after a restored backup, differ in the time of a version."""

    version: int
    at_us: int


class ConfigRows(NamedTuple):
    """All rows in force at a version, or those that changed since another one."""

    stamp: VersionStamp
    rows: Mapping[str, dict[int, Any]]  # by section and id; None for removed rows
    since: VersionStamp | None = None  # None for all rows

    @property
    def template(self) -> PolicyTemplate:
        return self._template_of(next(iter(self.rows["documents"].values()), None))

    @property
    def running_canary(self) -> CanaryRow | None:
        """The canary that is running; None also if its section was not read."""
        canary: CanaryRow | None = next(iter(self.rows.get("canaries", {}).values()), None)
        return canary if canary is not None and canary.is_running else None

    def candidate_template(self, canary: CanaryRow) -> PolicyTemplate:
        """The template with the candidate of a canary in place of the document."""
        return self._template_of(canary.document)

    def _template_of(self, document: PolicyDocument | None) -> PolicyTemplate:
        return PolicyTemplate(document, self.rows["tiers"].values(), self.rows["routes"].values())

    @property
    def lists(self) -> dict[str, list[Row]]:
        return {section: list(self.rows[section].values()) for section in LIST_SECTIONS}

    @property
    def affects_template(self) -> bool:
        return any(self.rows[section] for section in BASE_SECTIONS)

    @property
    def affects_lists(self) -> bool:
        return any(self.rows[section] for section in LIST_SECTIONS)


def newest_version(connection: Connection) -> int:
    """The newest version; 0 for an empty store."""
    return newest_stamp(connection).version


def newest_stamp(connection: Connection) -> VersionStamp:
    query = select(VERSIONS.c.version, VERSIONS.c.at_us).order_by(VERSIONS.c.version.desc()).limit(1)
    return VersionStamp(*next(iter(connection.execute(query)), (0, 0)))


def read_contents(connection: Connection, stamp: VersionStamp, sections: Iterable[str] = tuple(SECTIONS)) -> ConfigRows:
    """All rows in force at a version, whatever is written meanwhile."""
    found = {section: rows_at(connection, section, stamp.version) for section in sections}
    return ConfigRows(stamp, {section: {each.id: each.row for each in rows} for section, rows in found.items()})


def read_changes(connection: Connection, since: VersionStamp, stamp: VersionStamp) -> ConfigRows | None:
    """The changes after `since`, up to and including `stamp`; None if `since` is not in this store's past."""
    is_past = VERSIONS.c.version == since.version, VERSIONS.c.at_us == since.at_us
    if since.version > stamp.version or connection.scalar(select(VERSIONS.c.version).where(*is_past)) is None:
        return None
    found: dict[str, dict[int, Row | None]] = {}
    for section in SECTIONS:
        columns = TABLES[section].c
        until = columns.until_version
        ended = select(columns.id).where(until > since.version, until <= stamp.version)
        added = rows_at(connection, section, stamp.version, columns.since > since.version)
        found[section] = {id: None for (id,) in connection.execute(ended)} | {each.id: each.row for each in added}
    return ConfigRows(stamp, found, since)


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


def in_force(section: str, version: int | None = None) -> ColumnElement[bool]:
    """Matches the current rows of a section, or those of a version."""
    since, until = TABLES[section].c.since, TABLES[section].c.until_version
    return until.is_(None) if version is None else and_(since <= version, or_(until.is_(None), until > version))
