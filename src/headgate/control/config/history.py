"""Versions, and the differences between them."""

from __future__ import annotations

from difflib import unified_diff
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import and_, or_, select

from headgate.control.config.reading import in_force, select_rows
from headgate.control.config.rows import SECTIONS, CanaryRow, PolicyDocument, Row
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["Difference", "Version", "diff_versions", "list_versions"]


class Version(NamedTuple):
    """One atomic change of the configuration."""

    number: int
    at_us: int
    author: str
    reason: str
    what: str
    """A one-line summary."""
    restores: int | None = None
    """The version that a rollback restored."""
    ids: tuple[int, ...] = ()
    """Ids of the changed rows; only set on the result of a write."""


class Difference(NamedTuple):
    """A row before and after."""

    section: str
    id: int
    before: Row | None
    after: Row | None

    @property
    def what(self) -> str:
        """A one-line summary."""
        if isinstance(self.after, CanaryRow):
            return f"{'started' if self.after.is_running else self.after.state} {self.after}"
        if self.after is None:
            return f"removed {self.before}"
        return f"{'added' if self.before is None else 'changed'} {self.after}"

    @property
    def lines(self) -> list[str]:
        """The difference as in `diff -u`; a row without a document is one line."""
        before, after = map(_row_lines, (self.before, self.after))
        return list(unified_diff(before, after, lineterm="", n=2))[2:]


def _row_lines(row: Row | None) -> list[str]:
    if isinstance(row, CanaryRow):
        return [f"{row}: {row.state}", *row.text.splitlines()]
    return row.text.splitlines() if isinstance(row, PolicyDocument) else [] if row is None else [str(row)]


def list_versions(connection: Connection, *, before: int | None, most: int) -> list[Version]:
    """Versions, newest first."""
    query = select(VERSIONS).order_by(VERSIONS.c.version.desc()).limit(most)
    if before is not None:
        query = query.where(VERSIONS.c.version < before)
    return [Version(*row) for row in connection.execute(query)]


def diff_versions(connection: Connection, one: int, other: int) -> list[Difference]:
    """The differences from one version to another, in either direction."""
    first, last = sorted((one, other))
    found: list[Difference] = []
    for section in SECTIONS:
        since, until = TABLES[section].c.since, TABLES[section].c.until_version
        # Only rows that began or ended in between can differ.
        touched = or_(and_(since > first, since <= last), and_(until.is_not(None), until > first, until <= last))
        before, after = (
            {each.id: each.row for each in select_rows(connection, section, touched, in_force(section, version))}
            for version in (one, other)
        )
        rows = [Difference(section, id, before.get(id), after.get(id)) for id in sorted({*before, *after})]
        found += [row for row in rows if row.before != row.after]
    return found
