"""Writes a version atomically: all of its changes, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, and_, func, insert, select, true, update

from headgate.control.config.engine import NOTIFY_CHANNEL
from headgate.control.config.history import Difference, Version
from headgate.control.config.reading import VersionStamp, newest_version, read_contents, rows_at
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, UNIQUE_KEYS, Row
from headgate.control.config.tables import TABLES, VERSIONS
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

__all__ = ["Change", "ConcurrentChange", "Conflict", "Put", "Remove", "write"]

MAX_INCREMENTAL: Final = 500
"""Changed rows up to which only those are read and validated; beyond it, reading everything is as fast."""


class Conflict(HeadgateError):
    """The rows were changed after the version that a change was based on; nothing was written."""

    def __init__(self, text: str, *, version: int) -> None:
        super().__init__(text)
        self.version = version
        """The newest version."""


class ConcurrentChange(Conflict):
    """A newer version than the expected one exists; check the change against it and retry."""


class Put(NamedTuple):
    """Add a row, or replace the one with this id or the same key."""

    section: str
    row: Row
    id: int | None = None


class Remove(NamedTuple):
    """Remove a row."""

    section: str
    id: int


Change: TypeAlias = Put | Remove


def write(
    connection: Connection,
    changes: Sequence[Change],
    *,
    author: str,
    reason: str,
    at_us: int,
    based_on: int | None = None,
    restores: int | None = None,
    expected_version: int | None = None,
) -> Version | None:
    """Write a version, in force when the transaction commits. Returns None if nothing changes.

    Raises InvalidPolicy if the result would not load, Conflict if a row has changed after `based_on`, and
    ConcurrentChange if the newest version is not `expected_version`.
    """
    newest = newest_version(connection)
    if expected_version not in (None, newest):
        raise ConcurrentChange("the configuration was changed concurrently; try again", version=newest)
    if based_on is not None and based_on > newest:
        raise Conflict(f"version {based_on} does not exist; the newest is {newest}", version=newest)
    differences = [each for each in _resolve(connection, changes, newest, based_on) if each.before != each.after]
    if not differences:
        return None
    version = newest + 1
    what = _summary(differences, restores)
    connection.execute(
        insert(VERSIONS).values(
            version=version, at_us=at_us, author=author, reason=reason, what=what, restores=restores
        )
    )
    for section in SECTIONS:
        _store(connection, section, [each for each in differences if each.section == section], version)
    _validate(connection, differences, version)
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(NOTIFY_CHANNEL, str(version))))
    return Version(version, at_us, author, reason, what, restores, tuple(each.id for each in differences))


def _resolve(connection: Connection, changes: Sequence[Change], newest: int, based_on: int | None) -> list[Difference]:
    by_section: dict[str, list[Change]] = {}
    for change in changes:
        by_section.setdefault(change.section, []).append(change)
    found: list[Difference] = []
    for section, these in by_section.items():
        found += _SectionChanges(connection, section, these, newest, based_on).resolve()
    if len({(each.section, each.id) for each in found}) < len(found):
        raise InvalidInput("one change cannot put or remove the same row twice; keep one of them")
    return found


class _SectionChanges:
    """The changes to one table, resolved against its current rows."""

    def __init__(
        self, connection: Connection, section: str, changes: list[Change], newest: int, based_on: int | None
    ) -> None:
        self._section = section
        self._changes = changes
        self._based_on = based_on
        self._newest = newest
        self._table = table = TABLES[section]
        self._key = UNIQUE_KEYS[section]
        where = []
        if len(changes) <= MAX_INCREMENTAL:  # otherwise read all rows
            where = [self._is_affected(changes)]
        self._found = {each.id: each for each in rows_at(connection, section, newest, *where)}
        self._by_key = {self._key_of(each.row): each for each in self._found.values()}
        self._next = int(connection.scalar(select(func.max(table.c.id))) or 0) + 1
        self._ended = self._read_endings(connection)

    def resolve(self) -> list[Difference]:
        return [self._put(change) if isinstance(change, Put) else self._remove(change) for change in self._changes]

    def _put(self, change: Put) -> Difference:
        row = change.row
        if change.id is not None:
            before = self._found.get(change.id)
            if before is None and self._ended.get(change.id) is None:
                raise InvalidInput(f"{self._section} {change.id} does not exist; omit the id to add one")
            self._reject_newer(change.id, before.since if before else 0)
            return Difference(self._section, change.id, before and before.row, row)
        before = None if self._key is None else self._by_key.get(self._key_of(row))
        if before is None:
            id, self._next = self._next, self._next + 1
            return Difference(self._section, id, None, row)
        self._reject_newer(before.id, before.since)
        return Difference(self._section, before.id, before.row, row)

    def _remove(self, change: Remove) -> Difference:
        before = self._found.get(change.id)
        self._reject_newer(change.id, before.since if before else 0)
        if before is None:
            raise InvalidInput(f"{self._section} {change.id} does not exist")
        return Difference(self._section, change.id, before.row, None)

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._key or ())

    def _reject_newer(self, id: int, since: int) -> None:
        last = max(since, self._ended.get(id) or 0)
        if self._based_on is not None and last > self._based_on:
            raise Conflict(
                f"{self._section} {id} was changed in version {last}, after version {self._based_on} on which this "
                "change is based; review it and try again",
                version=self._newest,
            )

    def _read_endings(self, connection: Connection) -> dict[int, int | None]:
        """The last version in which each affected row was removed or replaced."""
        ids = {change.id for change in self._changes if change.id is not None} | self._found.keys()
        if not ids:
            return {}
        table = self._table
        query = select(table.c.id, func.max(table.c.until_version)).group_by(table.c.id)
        if len(ids) <= MAX_INCREMENTAL:
            query = query.where(table.c.id.in_(ids))
        return {id: ended or 0 for id, ended in connection.execute(query)}

    def _is_affected(self, changes: list[Change]) -> ColumnElement[bool]:
        if self._key == ():
            return true()
        condition: ColumnElement[bool] = self._table.c.id.in_([each.id for each in changes if each.id is not None])
        for change in changes:
            if self._key is not None and isinstance(change, Put) and change.id is None:
                same = zip(self._key, self._key_of(change.row), strict=True)
                condition = condition | and_(*(self._table.c[name] == value for name, value in same))
        return condition


def _store(connection: Connection, section: str, differences: list[Difference], version: int) -> None:
    table = TABLES[section]
    ended = [each.id for each in differences if each.before is not None]
    for start in range(0, len(ended), MAX_INCREMENTAL):
        these = table.c.id.in_(ended[start : start + MAX_INCREMENTAL])
        connection.execute(update(table).where(these, table.c.until_version.is_(None)).values(until_version=version))
    added = [
        {"id": each.id, "since": version, **each.after._asdict()} for each in differences if each.after is not None
    ]
    if added:
        connection.execute(insert(table), added)


def _validate(connection: Connection, differences: list[Difference], version: int) -> None:
    """Raises InvalidPolicy if the version would not load."""
    if len(differences) > MAX_INCREMENTAL or any(each.section in BASE_SECTIONS for each in differences):
        everything = read_contents(connection, VersionStamp(version, 0))
        everything.template.compose(everything.lists)
        return
    rows: dict[str, dict[int, Row]] = {section: {} for section in LIST_SECTIONS}
    for each in differences:
        if each.after is not None:
            rows[each.section][each.id] = each.after
    table = TABLES["overrides"]
    for who in {(row.kind, row.value) for row in rows["overrides"].values()}:  # type: ignore[union-attr] # OverrideRow
        # Duplicates are only found among all overrides of a client.
        mine = rows_at(connection, "overrides", version, table.c.kind == who[0], table.c.value == who[1])
        rows["overrides"].update({stored.id: stored.row for stored in mine})
    base = read_contents(connection, VersionStamp(version, 0), BASE_SECTIONS)
    base.template.compose({section: list(these.values()) for section, these in rows.items()})


def _summary(differences: list[Difference], restores: int | None) -> str:
    if restores is not None:
        return f"rolled back to version {restores}: {len(differences)} change{'' if len(differences) == 1 else 's'}"
    if len(differences) <= 3:
        return "; ".join(difference.what for difference in differences)
    counts = {section: sum(each.section == section for each in differences) for section in SECTIONS}
    return ", ".join(f"{count} {section}" for section, count in counts.items() if count)
