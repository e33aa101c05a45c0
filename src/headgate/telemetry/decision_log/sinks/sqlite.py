"""The decision log in one SQLite file: for as many processes of a machine as there are, and without a server."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from headgate._fork import reinit_after_fork
from headgate._sqlite import FileId, close_stale, create_file, file_id, set_journal_mode
from headgate.errors import InvalidConfiguration
from headgate.telemetry.decision_log.record import REJECTIONS, DecisionRecord, id_prefix
from headgate.telemetry.decision_log.sinks import MOST_LOOKED_AT, REJECTED, Count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SqliteReader", "SqliteSink"]

logger = logging.getLogger("headgate")

DAY_US: Final = 86_400_000_000
VERSION: Final = 1
"""Of the tables, in `PRAGMA user_version`."""
AT_ONCE: Final = 1000
"""Rows of one statement: for each statement the interpreter's lock is given away once, for each row it would cost more
than the row."""
TIDIES: Final = 30.0
"""Seconds between two looks for what is too old, or too much."""
PATIENCE: Final = 5.0
"""Seconds to wait for another process that writes."""
AT_ONCE_FORGOTTEN: Final = 5000
"""Rows of one transaction that forgets."""
AFTER_ALL: Final = "g"
"""Sorts after all ids, which are hexadecimal."""
PAGES_AT_ONCE: Final = 4000
"""Pages that are given back to the file system at a time; those that are not are used again."""

CACHE_KB: Final = 16_000
PAGES_BEFORE_CHECKPOINT: Final = 16_000
"""Of 4 kB, that may stand in the journal before they are put into the file itself: by then most have been changed more
than once."""

NUMBERS: Final = frozenset({"at_us", "quota", "period_us", "burst", "cost", "remaining", "retry_us", "shadow"})
COLUMNS: Final = ", ".join(f'"{name}"' for name in DecisionRecord._fields)

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS decisions ("
    + ", ".join(
        f'"{name}" '
        + ("INTEGER" if name in NUMBERS else "REAL" if name == "weight" else "TEXT")
        + (" PRIMARY KEY" if name == "id" else "" if name == "retry_us" else " NOT NULL")
        for name in DecisionRecord._fields
    )
    # Ids are in the order of time: so are the rows, and what is old lies together.
    + ") WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS decisions_of (client TEXT, id TEXT, PRIMARY KEY (client, id)) WITHOUT ROWID",
)
"""The second table is the index by client and time."""


ROW: Final = f"({', '.join('?' * len(DecisionRecord._fields))})"
INDEX: Final = """
    INSERT OR IGNORE INTO decisions_of
    SELECT of.value, decisions.id FROM decisions, json_each(decisions.clients) AS of
    WHERE decisions.id IN (SELECT value FROM json_each(?))
    ORDER BY 1, 2
"""
"""In its own order, so that each page of it is visited once: most of what a record costs is spent on these."""


class SqliteSink:
    """Writes to one file. It keeps records for `days`, and no more than about `size_mb` megabytes of them.

    A file that is deleted, moved away or replaced while it is in use is created again, with mode 0600.
    """

    batch = 10 * AT_ONCE
    every = 0.5
    """Seconds between two batches: the more go together, the fewer pages of the index are written for each."""

    def __init__(self, path: str | os.PathLike[str], *, days: float = 30, size_mb: float = 1024) -> None:
        self._path = os.path.abspath(path)  # the process may change its directory before the file is opened again
        self._most_us = int(days * DAY_US)
        self._most_bytes = int(size_mb * 1_000_000)
        self._connection: sqlite3.Connection | None = None
        self._file: FileId | None = None
        """Identity of the file that the connection has open."""
        self._next_tidying = 0.0
        reinit_after_fork(self)

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        connection = self._connected()
        with _transaction(connection):
            _insert(connection, batch)
        if self._is_stale():  # the batch went into a file that nobody can read any more: have it written again
            raise sqlite3.OperationalError(f"{self._path} was deleted or replaced while records were written to it")
        if time.monotonic() >= self._next_tidying:
            self._next_tidying = time.monotonic() + TIDIES
            self.tidy()

    def tidy(self) -> None:
        """Forget what is too old, and the oldest of what is too much."""
        connection = self._connected()
        newest = connection.execute("SELECT max(id) FROM decisions").fetchone()[0]
        if newest is None:
            return
        # By the records' own time where that is behind: a clock that stands still in a test is no reason to forget.
        now_us = min(int(newest[:14], 16), time.time_ns() // 1000)
        while self._forget_some(connection, id_prefix(now_us - self._most_us)):
            pass
        while self._size(connection) > self._most_bytes and self._forget_some(connection, newest):
            pass
        # As a script, for which SQLite is asked until it is done: elsewhere this would free one page.
        connection.executescript(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._is_stale():
            close_stale(connection, self._path)
        else:
            connection.close()

    def reset_after_fork(self) -> None:
        """A connection is of the process that opened it: here it is neither used nor closed."""
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None

    def _forget_some(self, connection: sqlite3.Connection, before: str) -> bool:
        """Forget some of what is older than an id: not all, for others want to write, too. Whether there was any."""
        older = "SELECT id FROM decisions WHERE id < ? ORDER BY id"
        if connection.execute(f"{older} LIMIT 1", (before,)).fetchone() is None:
            return False
        bound = connection.execute(f"{older} LIMIT 1 OFFSET {AT_ONCE_FORGOTTEN}", (before,)).fetchone()
        end = before if bound is None else bound[0]
        keys = "SELECT DISTINCT value FROM decisions, json_each(decisions.clients) WHERE decisions.id < ?"
        with _transaction(connection):
            connection.execute(f"DELETE FROM decisions_of WHERE client IN ({keys}) AND id < ?", (end, end))
            connection.execute("DELETE FROM decisions WHERE id < ?", (end,))
        return True

    def _size(self, connection: sqlite3.Connection) -> int:
        pages, free, size = (
            connection.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _is_stale(self) -> bool:
        """True if the file was deleted or replaced since it was opened: what is written to it then is lost."""
        return file_id(self._path) != self._file

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._is_stale():
            logger.warning("decision log %s was deleted or replaced; opening it again", self._path)
            self.close()
        if self._connection is None:
            self._file = create_file(self._path)
            self._connection = sqlite3.connect(
                self._path, timeout=PATIENCE, isolation_level=None, check_same_thread=False, cached_statements=16
            )
            try:
                _prepare(self._connection, self._path)
                if self._is_stale():
                    raise sqlite3.OperationalError(f"{self._path} was deleted or replaced while it was opened")
            except BaseException:
                self.close()
                raise
        return self._connection


class SqliteReader:
    """Reads what a `SqliteSink` has written, also while it writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise InvalidConfiguration(f"there is no decision log at {path}")
        self._connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=PATIENCE)
        try:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            version, problem = None, str(error)
        else:
            problem = "it has no decisions, or those of another headgate"
        if version != VERSION:
            self._connection.close()
            raise InvalidConfiguration(f"{path} is no decision log: {problem}")

    def find(self, keys: Sequence[str], *, since_us: int, until_us: int, most: int) -> list[DecisionRecord]:
        found = self._connection.execute(
            f"SELECT {COLUMNS} FROM decisions WHERE id IN ({_ids_of(keys)}) ORDER BY id LIMIT ?",
            (*keys, id_prefix(since_us), id_prefix(until_us), most),
        )
        return [DecisionRecord.from_row(row) for row in found]

    def nearest(self, keys: Sequence[str], *, at_us: int) -> tuple[int | None, int | None]:
        marks = ", ".join("?" * len(REJECTIONS))
        asked = f"SELECT at_us FROM decisions WHERE id IN ({_ids_of(keys)}) AND outcome IN ({marks}) ORDER BY id"
        ends = ((id_prefix(0), id_prefix(at_us), "DESC"), (id_prefix(at_us), "g", "ASC"))
        found = [
            self._connection.execute(f"{asked} {order} LIMIT 1", (*keys, since, until, *REJECTIONS)).fetchone()
            for since, until, order in ends
        ]
        before, after = (row and int(row[0]) for row in found)
        return before, after

    def recent(
        self,
        keys: Sequence[str] = (),
        *,
        after: str = "",
        before: str = "",
        outcome: str | None = None,
        most: int = 100,
    ) -> list[DecisionRecord]:
        order = "ASC" if after else "DESC"
        wanted = () if outcome is None else REJECTIONS if outcome == REJECTED else (outcome,)
        looked_at = MOST_LOOKED_AT if wanted else most
        if keys:
            some = f"SELECT id FROM decisions_of WHERE client = ? AND id > ? AND id < ? ORDER BY id {order} LIMIT ?"
            ids = " UNION ".join([f"SELECT * FROM ({some})"] * len(keys))
            given: list[Any] = [each for key in keys for each in (key, after, before or AFTER_ALL, looked_at)]
        else:
            ids = f"SELECT id FROM decisions WHERE id > ? AND id < ? ORDER BY id {order} LIMIT ?"
            given = [after, before or AFTER_ALL, looked_at]
        marks = f"AND outcome IN ({', '.join('?' * len(wanted))})" if wanted else ""
        found = self._connection.execute(
            f"SELECT {COLUMNS} FROM decisions WHERE id IN ({ids}) {marks} ORDER BY id {order} LIMIT ?",
            (*given, *wanted, most),
        )
        return sorted([DecisionRecord.from_row(row) for row in found], key=lambda record: record.id)

    def counts(self, keys: Sequence[str] = (), *, since_us: int, until_us: int, width_us: int) -> list[Count]:
        within = f"id IN ({_ids_of(keys)})" if keys else "id >= ? AND id < ?"
        found = self._connection.execute(
            "SELECT (at_us - ?) / ?, outcome, sum(weight), sum(CASE WHEN degraded = '' THEN 0 ELSE weight END) "
            f"FROM decisions WHERE {within} GROUP BY 1, 2 ORDER BY 1, 2",
            (since_us, width_us, *keys, id_prefix(since_us), id_prefix(until_us)),
        )
        return [Count(*row) for row in found]

    def close(self) -> None:
        self._connection.close()


_inherited: list[Any] = []
"""Connections of parents, kept so that they are never closed."""


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """See that the tables are there, and that nobody else's are."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise InvalidConfiguration(f"{path} is the decision log of another headgate, or no such log; name a new file")
    if not version:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    set_journal_mode(connection, "WAL", timeout=PATIENCE)
    # What the last moments before a power failure wrote may be lost; what a crash of the process leaves never is.
    connection.execute("PRAGMA synchronous = NORMAL")
    # Clients come in any order: much of the index is touched again and again, and should be neither read from the file
    # nor written back to it each time.
    connection.execute(f"PRAGMA cache_size = -{CACHE_KB}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_BEFORE_CHECKPOINT}")
    if not version:
        with _transaction(connection):
            for statement in (*TABLES, f"PRAGMA user_version = {VERSION}"):
                connection.execute(statement)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; whoever else writes is waited for at its beginning, not in its middle."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _insert(connection: sqlite3.Connection, records: Sequence[DecisionRecord]) -> None:
    """Rows that are there already stay as they are. The index is SQLite's own work, for which nobody has to wait."""
    for start in range(0, len(records), AT_ONCE):
        some = records[start : start + AT_ONCE]
        values = [*chain.from_iterable([record.as_row() for record in some])]
        connection.execute(f"INSERT OR IGNORE INTO decisions VALUES {', '.join([ROW] * len(some))}", values)
    connection.execute(INDEX, (json.dumps([record.id for record in records]),))


def _ids_of(keys: Sequence[str]) -> str:
    marks = ", ".join("?" * len(keys))
    return f"SELECT id FROM decisions_of WHERE client IN ({marks}) AND id >= ? AND id < ?"
