"""The audit log: versions and other actions, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import and_, insert, literal, null, or_, select

from headgate.control.config.tables import AUDIT, VERSIONS
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Table

__all__ = ["AuditRecord", "list_audit_records", "record_action"]

ACTION: Final = "n"
VERSION: Final = "v"
"""Prefixes of the number in the id of an audit record. At the same time, actions sort before versions."""


class AuditRecord(NamedTuple):
    """An entry of the audit log: a version or another audited action."""

    at_us: int
    source: str
    number: int
    author: str
    reason: str
    action: str
    """Empty for a version."""
    what: str
    restores: int | None = None

    @property
    def id(self) -> str:
        """Stable, and sorts by time."""
        return f"{max(0, self.at_us):016x}-{self.source}{self.number:012d}"


def record_action(connection: Connection, *, at_us: int, author: str, action: str, about: str, reason: str) -> None:
    """Log an action other than a version."""
    connection.execute(insert(AUDIT).values(at_us=at_us, author=author, action=action, about=about, reason=reason))


def list_audit_records(
    connection: Connection, *, before: str | None, most: int, author: str | None = None, search: str = ""
) -> list[AuditRecord]:
    """Audit records, newest first; `before` is the id of the last one of the previous page."""
    versions, actions = VERSIONS.c, AUDIT.c
    found = []
    for table, source, number, *texts, restores in (
        (VERSIONS, VERSION, versions.version, literal(""), versions.what, versions.restores),
        (AUDIT, ACTION, actions.number, actions.action, actions.about, null()),
    ):
        columns = [table.c.author, table.c.reason, *texts]
        query = select(table.c.at_us, literal(source), number, *columns, restores)
        if before is not None:
            query = query.where(_is_before(table, source, number, *_parse_id(before)))
        if author is not None:
            query = query.where(table.c.author == author)
        if search:
            query = query.where(or_(*[column.icontains(search, autoescape=True) for column in columns]))
        newest = query.order_by(table.c.at_us.desc(), number.desc()).limit(most)
        found += [AuditRecord(*row) for row in connection.execute(newest)]
    return sorted(found, key=lambda entry: entry[:3], reverse=True)[:most]


def _is_before(
    table: Table, source: str, number: ColumnElement[int], at_us: int, last_source: str, last_number: int
) -> ColumnElement[bool]:
    if source < last_source:
        return table.c.at_us <= at_us
    earlier = table.c.at_us < at_us
    return earlier if source > last_source else or_(earlier, and_(table.c.at_us == at_us, number < last_number))


def _parse_id(id: str) -> tuple[int, str, int]:
    at, _, rest = id.partition("-")
    try:
        at_us, source, number = int(at, 16), rest[:1], int(rest[1:])
    except ValueError:
        at_us, source, number = 0, "", 0
    is_possible = 0 <= at_us < 2**63 and 0 <= number < 2**63
    if len(at) != 16 or source not in (ACTION, VERSION) or not is_possible:
        raise InvalidInput("before is not the id of an audit entry; pass the `next` of the previous page")
    return at_us, source, number
