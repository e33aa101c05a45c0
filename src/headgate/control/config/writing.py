"""Writes a version atomically: all of its changes, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, and_, func, insert, select, true, update

from headgate.control.config.engine import NOTIFY_CHANNEL
from headgate.control.config.history import Difference, Version
from headgate.control.config.reading import VersionStamp, in_force, newest_version, read_contents, rows_at
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, UNIQUE_KEYS, CanaryRow, Row
from headgate.control.config.tables import TABLES, VERSIONS
from headgate.errors import HeadgateError, InvalidInput
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from headgate.control.config.rows import StoredRow

__all__ = ["Change", "ConcurrentChange", "Conflict", "Put", "Remove", "reject_running_canary", "write"]

MAX_AUTHOR_LENGTH: Final = 200
MAX_REASON_LENGTH: Final = 500
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

    Raises InvalidPolicy if the result would not load, InvalidInput if it would change the document under a running
    canary, Conflict if a row has changed after `based_on`, and
    ConcurrentChange if the newest version is not `expected_version`.
    """
    if len(scalars.label(author)) > MAX_AUTHOR_LENGTH:
        raise InvalidInput(f"an author has at most {MAX_AUTHOR_LENGTH} characters")
    scalars.label(reason)
    newest = newest_version(connection)
    if expected_version not in (None, newest):
        raise ConcurrentChange("the configuration was changed concurrently; try again", version=newest)
    if based_on is not None and based_on > newest:
        raise Conflict(f"version {based_on} does not exist; the newest is {newest}", version=newest)
    resolved: list[Difference] = []
    for section in dict.fromkeys(change.section for change in changes):
        these = [change for change in changes if change.section == section]
        resolved += _SectionChanges(connection, section, these, newest, based_on).resolve()
    if len({(each.section, each.id) for each in resolved}) < len(resolved):
        raise InvalidInput("one change cannot put or remove the same row twice; keep one of them")
    differences = [each for each in resolved if each.before != each.after]
    if not differences:
        return None
    if {each.section for each in differences} & {"documents", "canaries"} == {"documents"}:
        reject_running_canary(connection, newest)  # which is compared with the current document
    version, what = newest + 1, _summary(differences, restores)
    row = {"at_us": at_us, "author": author, "reason": reason, "what": what, "restores": restores}
    connection.execute(insert(VERSIONS).values(version=version, **row))
    for section in SECTIONS:
        _store(connection, section, [each for each in differences if each.section == section], version)
    _validate(connection, differences, version)
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(NOTIFY_CHANNEL, str(version))))
    return Version(version, at_us, author, reason, what, restores, tuple(each.id for each in differences))


def reject_running_canary(connection: Connection, newest: int) -> None:
    """Raises InvalidInput while a canary is running."""
    for each in list(rows_at(connection, "canaries", newest)):
        if each.row.is_running:
            raise InvalidInput(f"a canary of {each.row.name} is running; promote it or roll it back first")


class _SectionChanges:
    """The changes to one table, resolved against its current rows."""

    def __init__(
        self, connection: Connection, section: str, changes: list[Change], newest: int, based_on: int | None
    ) -> None:
        self._section, self._changes, self._newest, self._based_on = section, changes, newest, based_on
        self._table = table = TABLES[section]
        self._key = UNIQUE_KEYS[section]
        where = [self._is_affected(changes)] if len(changes) <= MAX_INCREMENTAL else []  # otherwise read all rows
        self._found = {each.id: each for each in rows_at(connection, section, newest, *where)}
        self._by_key = {self._key_of(each.row): each for each in self._found.values()}
        self._next = int(connection.scalar(select(func.max(table.c.id))) or 0) + 1
        self._ended = self._read_endings(connection)

    def resolve(self) -> list[Difference]:
        return [self._put(change) if isinstance(change, Put) else self._remove(change) for change in self._changes]

    def _put(self, change: Put) -> Difference:
        row, id = change.row, change.id
        if id is not None:
            before = self._found.get(id)
            if before is None and self._ended.get(id) is None:
                raise InvalidInput(f"{self._section} {id} does not exist; omit the id to add one")
        else:
            before = None if self._key is None else self._by_key.get(self._key_of(row))
            if before is None:
                id, self._next = self._next, self._next + 1
                return Difference(self._section, id, None, row)
            id = before.id
        self._reject_newer(id, before)
        return Difference(self._section, id, before and before.row, row)

    def _remove(self, change: Remove) -> Difference:
        before = self._found.get(change.id)
        self._reject_newer(change.id, before)
        if before is None:
            raise InvalidInput(f"{self._section} {change.id} does not exist")
        return Difference(self._section, change.id, before.row, None)

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._key or ())

    def _reject_newer(self, id: int, stored: StoredRow[Any] | None) -> None:
        last = max(stored.since if stored else 0, self._ended.get(id) or 0)
        if self._based_on is not None and last > self._based_on:
            raise Conflict(
                f"{self._section} {id} was changed in version {last}, after version {self._based_on} on which this "
                "change is based; review it and try again",
                version=self._newest,
            )

    def _read_endings(self, connection: Connection) -> dict[int, int | None]:
        """The last version in which each affected row was removed or replaced."""
        ids = {change.id for change in self._changes if change.id is not None} | self._found.keys()
        columns = self._table.c
        query = select(columns.id, func.max(columns.until_version)).group_by(columns.id)
        if len(ids) <= MAX_INCREMENTAL:
            query = query.where(columns.id.in_(ids))
        return {id: ended or 0 for id, ended in connection.execute(query)} if ids else {}

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
        connection.execute(update(table).where(these, in_force(section)).values(until_version=version))
    added = [{"id": each.id, "since": version, **each.after._asdict()} for each in differences if each.after]
    if added:
        connection.execute(insert(table), added)


def _validate(connection: Connection, differences: list[Difference], version: int) -> None:
    """Raises InvalidPolicy if the version would not load.

    A candidate is validated when its canary starts, and with its promotion. Changes meanwhile are not refused because
    of it: a node that cannot apply the candidate any more reports that, and the canary is rolled back.
    """
    started = [each.after for each in differences if isinstance(each.after, CanaryRow) and each.after.is_running]
    is_base = any(each.section in BASE_SECTIONS for each in differences)
    if started or is_base or len(differences) > MAX_INCREMENTAL:
        everything = read_contents(connection, VersionStamp(version, 0))
        for canary in started:
            everything.candidate_template(canary).compose(everything.lists)
        if is_base or not started:
            everything.template.compose(everything.lists)
        return
    rows: dict[str, dict[int, Row]] = {section: {} for section in LIST_SECTIONS}
    for each in differences:
        if each.after and each.section in rows:
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
