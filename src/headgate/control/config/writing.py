"""Writes a version: all of its changes, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, and_, func, insert, select, true, update

from headgate.control.config.engine import NOTIFY_CHANNEL
from headgate.control.config.history import Difference, Version
from headgate.control.config.reading import ConfigContents, VersionStamp, newest_version, read_contents, rows_at
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, UNIQUE_KEYS, Row
from headgate.control.config.tables import TABLES, VERSIONS
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

__all__ = ["Change", "ConcurrentChange", "Conflict", "Put", "Remove", "write"]

FEW: Final = 500
"""Up to so many rows are checked by themselves; more take as long as all of them would."""


class Conflict(HeadgateError):
    """Somebody else has changed the same since the version that this change was based on; nothing was written."""

    def __init__(self, text: str, *, version: int) -> None:
        super().__init__(text)
        self.version = version
        """The version to look at now."""


class ConcurrentChange(Conflict):
    """There is a newer version than the one that a change was judged by: it is to be judged again."""


class Put(NamedTuple):
    """A row that shall hold: in place of that with this id, or with its key, if there is one."""

    section: str
    row: Row
    id: int | None = None


class Remove(NamedTuple):
    """A row that shall hold no more."""

    section: str
    id: int


Change: TypeAlias = Put | Remove


class _Step(NamedTuple):
    section: str
    id: int
    before: Row | None
    after: Row | None


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
    """The new version, in force when the transaction ends; None if there is nothing to change.

    InvalidPolicy, if what came out would not load; Conflict, if a row has changed after the version `based_on`; Moved,
    if there is a newer version than the one that it was `expected_version`.
    """
    newest = newest_version(connection)
    if expected_version not in (None, newest):
        raise ConcurrentChange("others have changed the configuration all the while; try again", version=newest)
    if based_on is not None and based_on > newest:
        raise Conflict(f"version {based_on} does not exist; the newest is {newest}", version=newest)
    steps = [step for step in _steps(connection, changes, newest, based_on) if step.before != step.after]
    if not steps:
        return None
    version = newest + 1
    what = _told(steps, restores)
    connection.execute(
        insert(VERSIONS).values(
            version=version, at_us=at_us, author=author, reason=reason, what=what, restores=restores
        )
    )
    for section in SECTIONS:
        _store(connection, section, [step for step in steps if step.section == section], version)
    _check(connection, steps, version)
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(NOTIFY_CHANNEL, str(version))))
    return Version(version, at_us, author, reason, what, restores, tuple(step.id for step in steps))


def _steps(connection: Connection, changes: Sequence[Change], newest: int, based_on: int | None) -> list[_Step]:
    by_section: dict[str, list[Change]] = {}
    for change in changes:
        by_section.setdefault(change.section, []).append(change)
    steps: list[_Step] = []
    for section, these in by_section.items():
        steps += _Section(connection, section, these, newest, based_on).steps()
    if len({(step.section, step.id) for step in steps}) < len(steps):
        raise InvalidInput("one change cannot put or remove the same row twice; keep one of them")
    return steps


class _Section:
    """The changes of one table, beside what it holds now."""

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
        if len(changes) <= FEW:  # else all of them are fetched at once
            where = [self._names_one_of(changes)]
        self._found = {each.id: each for each in rows_at(connection, section, newest, *where)}
        self._by_key = {self._key_of(each.row): each for each in self._found.values()}
        self._next = int(connection.scalar(select(func.max(table.c.id))) or 0) + 1
        self._ended = self._endings(connection)

    def steps(self) -> list[_Step]:
        return [self._put(change) if isinstance(change, Put) else self._remove(change) for change in self._changes]

    def _put(self, change: Put) -> _Step:
        row = change.row
        if change.id is not None:
            before = self._found.get(change.id)
            if before is None and self._ended.get(change.id) is None:
                raise InvalidInput(f"there is no {self._section} {change.id}; leave the id out to add one")
            self._refuse_newer(change.id, before.since if before else 0)
            return _Step(self._section, change.id, before and before.row, row)
        before = None if self._key is None else self._by_key.get(self._key_of(row))
        if before is None:
            id, self._next = self._next, self._next + 1
            return _Step(self._section, id, None, row)
        self._refuse_newer(before.id, before.since)
        return _Step(self._section, before.id, before.row, row)

    def _remove(self, change: Remove) -> _Step:
        before = self._found.get(change.id)
        self._refuse_newer(change.id, before.since if before else 0)
        if before is None:
            raise InvalidInput(f"there is no {self._section} {change.id} to remove")
        return _Step(self._section, change.id, before.row, None)

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._key or ())

    def _refuse_newer(self, id: int, since: int) -> None:
        last = max(since, self._ended.get(id) or 0)
        if self._based_on is not None and last > self._based_on:
            raise Conflict(
                f"{self._section} {id} has changed in version {last}, after version {self._based_on} that this change "
                "is based on; look at it again",
                version=self._newest,
            )

    def _endings(self, connection: Connection) -> dict[int, int | None]:
        """The last version in which a row that this is about was ended, or replaced."""
        ids = {change.id for change in self._changes if change.id is not None} | self._found.keys()
        if not ids:
            return {}
        table = self._table
        query = select(table.c.id, func.max(table.c.until_version)).group_by(table.c.id)
        if len(ids) <= FEW:
            query = query.where(table.c.id.in_(ids))
        return {id: ended or 0 for id, ended in connection.execute(query)}

    def _names_one_of(self, changes: list[Change]) -> ColumnElement[bool]:
        if self._key == ():
            return true()
        condition: ColumnElement[bool] = self._table.c.id.in_([each.id for each in changes if each.id is not None])
        for change in changes:
            if self._key is not None and isinstance(change, Put) and change.id is None:
                same = zip(self._key, self._key_of(change.row), strict=True)
                condition = condition | and_(*(self._table.c[name] == value for name, value in same))
        return condition


def _store(connection: Connection, section: str, steps: list[_Step], version: int) -> None:
    table = TABLES[section]
    ended = [step.id for step in steps if step.before is not None]
    for start in range(0, len(ended), FEW):
        these = table.c.id.in_(ended[start : start + FEW])
        connection.execute(update(table).where(these, table.c.until_version.is_(None)).values(until_version=version))
    made = [{"id": step.id, "since": version, **step.after._asdict()} for step in steps if step.after is not None]
    if made:
        connection.execute(insert(table), made)


def _check(connection: Connection, steps: list[_Step], version: int) -> None:
    """Raises InvalidPolicy, if what is written would not load."""
    if len(steps) > FEW or any(step.section in BASE_SECTIONS for step in steps):
        all_of_it = read_contents(connection, VersionStamp(version, 0))
        all_of_it.frame.read(all_of_it.lists)
        return
    rows: dict[str, dict[int, Row]] = {section: {} for section in LIST_SECTIONS}
    for step in steps:
        if step.after is not None:
            rows[step.section][step.id] = step.after
    table = TABLES["overrides"]
    for who in {(row.kind, row.value) for row in rows["overrides"].values()}:  # type: ignore[union-attr] # OverrideRow
        # Whether two of them say the same is only seen beside each other.
        mine = rows_at(connection, "overrides", version, table.c.kind == who[0], table.c.value == who[1])
        rows["overrides"].update({each.id: each.row for each in mine})
    frame_rows = {
        section: {each.id: each.row for each in rows_at(connection, section, version)} for section in BASE_SECTIONS
    }
    frame = ConfigContents(VersionStamp(version, 0), frame_rows).frame
    frame.read({section: list(each.values()) for section, each in rows.items()})


def _told(steps: list[_Step], restores: int | None) -> str:
    differences = [Difference(*step) for step in steps]
    if restores is not None:
        return f"went back to version {restores}: {len(steps)} {'change' if len(steps) == 1 else 'changes'}"
    if len(differences) <= 3:
        return "; ".join(difference.what for difference in differences)
    counts = {section: sum(step.section == section for step in steps) for section in SECTIONS}
    return ", ".join(f"{count} {section}" for section, count in counts.items() if count)
