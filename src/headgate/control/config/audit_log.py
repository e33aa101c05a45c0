"""Who did what: the versions, and what is no version, as one list in the order of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, insert, or_, select

from headgate.control.config.tables import AUDIT, VERSIONS
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Table

__all__ = ["AuditRecord", "list_entries", "record"]

NOTE: Final = "n"
VERSION: Final = "v"
"""What stands before the number in the id of a deed; of one moment, notes come before versions."""


class AuditRecord(NamedTuple):
    """What somebody did: a version, or what was noted."""

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
        """Sorts by time; the same deed always has the same."""
        return f"{max(0, self.at_us):016x}-{self.source}{self.number:012d}"


def record(connection: Connection, *, at_us: int, author: str, action: str, about: str, reason: str) -> None:
    """Keep what somebody did that is no version."""
    connection.execute(insert(AUDIT).values(at_us=at_us, author=author, action=action, about=about, reason=reason))


def list_entries(
    connection: Connection, *, before: str | None, most: int, author: str | None = None, search: str = ""
) -> list[AuditRecord]:
    """The newest first; `before` is the id of the last one that was seen."""
    place = None if before is None else _place(before)
    versions = _some(
        connection, VERSIONS, VERSION, ("version", "author", "reason", "what", "restores"), place, most, author, search
    )
    notes = _some(
        connection, AUDIT, NOTE, ("number", "author", "reason", "action", "about"), place, most, author, search
    )
    found = [
        AuditRecord(at_us, VERSION, number, by, why, "", what, back) for at_us, number, by, why, what, back in versions
    ]
    found += [
        AuditRecord(at_us, NOTE, number, by, why, action, about) for at_us, number, by, why, action, about in notes
    ]
    return sorted(found, key=lambda deed: deed[:3], reverse=True)[:most]


def _some(
    connection: Connection,
    table: Table,
    source: str,
    names: tuple[str, ...],
    place: tuple[int, str, int] | None,
    most: int,
    author: str | None,
    search: str,
) -> list[tuple[Any, ...]]:
    number = table.c[names[0]]
    query = select(table.c.at_us, *[table.c[name] for name in names])
    if place is not None:
        query = query.where(_is_before(table, source, number, place))
    if author is not None:
        query = query.where(table.c.author == author)
    if search:
        texts = [table.c[name] for name in names if name in ("author", "reason", "what", "action", "about")]
        query = query.where(or_(*[text.icontains(search, autoescape=True) for text in texts]))
    query = query.order_by(table.c.at_us.desc(), number.desc()).limit(most)
    return [tuple(row) for row in connection.execute(query)]


def _is_before(
    table: Table, source: str, number: ColumnElement[int], place: tuple[int, str, int]
) -> ColumnElement[bool]:
    at_us, of, last = place
    earlier = table.c.at_us < at_us
    if source < of:
        return table.c.at_us <= at_us
    return earlier if source > of else or_(earlier, and_(table.c.at_us == at_us, number < last))


def _place(id: str) -> tuple[int, str, int]:
    at, _, rest = id.partition("-")
    try:
        place = int(at, 16), rest[:1], int(rest[1:])
    except ValueError:
        place = 0, "", -1
    if len(at) != 16 or place[1] not in (NOTE, VERSION) or not 0 <= place[0] < 2**63 or not 0 <= place[2] < 2**63:
        raise InvalidInput("before is no id of an audit entry; give the `next` of the page before")
    return place
