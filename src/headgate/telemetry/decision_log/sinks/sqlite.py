"""The decision log in an SQLite file, shared by all processes of a machine."""

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

from headgate._sqlite import FileId, close_stale, create_file, file_id, set_journal_mode
from headgate.clock import DAY_US
from headgate.errors import InvalidConfiguration
from headgate.telemetry.decision_log.record import REJECTIONS, DecisionRecord, id_prefix
from headgate.telemetry.decision_log.sinks import REJECTED, ConnectedSink, Count, InvalidLog, MissingLog, parse_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from urllib.parse import SplitResult

__all__ = ["SqliteReader", "SqliteSink", "open_reader", "open_sink"]

logger = logging.getLogger("headgate")

VERSION: Final = 2
"""The version of the schema, in `PRAGMA user_version`."""
ROWS_PER_INSERT: Final = 1000
"""Each statement releases the GIL once, which for single rows would cost more than the row."""
CLEANUP_INTERVAL_S: Final = 30.0
LOCK_TIMEOUT_S: Final = 5.0
ROWS_PER_DELETE: Final = 5000
MAX_SCANNED: Final = 100_000
"""Records that are scanned for those of one outcome."""
AFTER_ALL: Final = "g"
"""Sorts after all ids, which are hexadecimal."""
PAGES_PER_VACUUM: Final = 4000
"""Free pages that are returned to the file system at a time; SQLite reuses the others."""

CACHE_KB: Final = 16_000
PAGES_BEFORE_CHECKPOINT: Final = 16_000
"""Pages of 4 kB in the write-ahead log before a checkpoint: by then, most have changed more than once."""

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
    # Ids are ordered by time, and so are the rows: old ones are adjacent.
    + ") WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS decisions_of (client TEXT, id TEXT, PRIMARY KEY (client, id)) WITHOUT ROWID",
)
"""The second table is the index by client and time."""

UPGRADES: Final = {1: "ALTER TABLE decisions ADD COLUMN quotas TEXT NOT NULL DEFAULT ''"}
"""The statements that upgrade the schema, by the version before."""

SIZE: Final = """
    SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size
"""
ROW: Final = f"({', '.join('?' * len(DecisionRecord._fields))})"
INDEX: Final = """
    INSERT OR IGNORE INTO decisions_of
    SELECT of.value, decisions.id FROM decisions, json_each(decisions.clients) AS of
    WHERE decisions.id IN (SELECT value FROM json_each(?))
    ORDER BY 1, 2
"""
"""Sorted, so that each page of the index, which is most of the cost of a record, is visited once."""


def open_sink(parts: SplitResult, settings: dict[str, str]) -> SqliteSink:
    path, numbers = parse_file(parts, settings, "days", "size_mb")
    return SqliteSink(path, **numbers)


def open_reader(parts: SplitResult, settings: dict[str, str]) -> SqliteReader:
    return SqliteReader(parse_file(parts, settings, "days", "size_mb")[0])


class SqliteSink(ConnectedSink):
    """Writes to a file, which keeps records for `days`, and about `size_mb` megabytes at most.

    A file that is deleted, moved away or replaced while it is in use is created again, with mode 0600.
    """

    batch = 10 * ROWS_PER_INSERT
    every = 0.5
    """The larger a batch, the fewer pages of the index are written per record."""

    def __init__(self, path: str | os.PathLike[str], *, days: float = 30, size_mb: float = 1024) -> None:
        super().__init__()
        self._path = os.path.abspath(path)  # the process may change its directory before the file is opened again
        self._max_age_us = int(days * DAY_US)
        self._max_bytes = int(size_mb * 1_000_000)
        self._file: FileId | None = None
        """Identity of the file that the connection has open."""
        self._next_cleanup = 0.0

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        connection = self._connected()
        with _transaction(connection):
            _insert(connection, batch)
        if self._is_stale():  # the batch went into a deleted file, and must be written again
            raise sqlite3.OperationalError(f"{self._path} was deleted or replaced while records were written to it")
        if time.monotonic() >= self._next_cleanup:
            self._next_cleanup = time.monotonic() + CLEANUP_INTERVAL_S
            self.clean_up()

    def clean_up(self) -> None:
        """Delete records that are too old, and the oldest ones if the file is too large."""
        connection = self._connected()
        newest = connection.execute("SELECT max(id) FROM decisions").fetchone()[0]
        if newest is None:
            return
        # By the time of the records if it is behind, as with a fake clock.
        now_us = min(int(newest[:14], 16), time.time_ns() // 1000)
        while self._forget_some(connection, id_prefix(now_us - self._max_age_us)):
            pass
        while connection.execute(SIZE).fetchone()[0] > self._max_bytes and self._forget_some(connection, newest):
            pass
        # As a script, which runs the pragma to its end: execute() would free one page.
        connection.executescript(f"PRAGMA incremental_vacuum({PAGES_PER_VACUUM})")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._is_stale():
            close_stale(connection, self._path)
        elif connection is not None:
            connection.close()

    def _forget_some(self, connection: sqlite3.Connection, before: str) -> bool:
        """Delete some records before an id, not all, as others want to write, too; False if there are none."""
        older = f"SELECT id FROM decisions WHERE id < ? ORDER BY id LIMIT {ROWS_PER_DELETE + 1}"
        ids = connection.execute(older, (before,)).fetchall()
        if not ids:
            return False
        end = ids[-1][0] if len(ids) > ROWS_PER_DELETE else before
        keys = "SELECT DISTINCT value FROM decisions, json_each(decisions.clients) WHERE decisions.id < ?"
        with _transaction(connection):
            connection.execute(f"DELETE FROM decisions_of WHERE client IN ({keys}) AND id < ?", (end, end))
            connection.execute("DELETE FROM decisions WHERE id < ?", (end,))
        return True

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
                self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=16
            )
            try:
                _prepare(self._connection, self._path)
                if self._is_stale():
                    raise sqlite3.OperationalError(f"{self._path} was deleted or replaced while it was opened")
            except BaseException:
                self.close()
                raise
        connection: sqlite3.Connection = self._connection
        return connection


class SqliteReader:
    """Reads the file of a `SqliteSink`, also while it is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise MissingLog(f"there is no decision log at {path}")
        self._connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=LOCK_TIMEOUT_S)
        version, problem = None, "it has no decisions, or those of another version of Headgate"
        try:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            problem = str(error)
        if version != VERSION:
            self._connection.close()
            raise InvalidLog(f"{path} is not a decision log: {problem}")

    def find(self, keys: Sequence[str], *, since_us: int, until_us: int, most: int) -> list[DecisionRecord]:
        found = self._connection.execute(
            f"SELECT {COLUMNS} FROM decisions WHERE id IN ({_ids_of(keys)}) ORDER BY id LIMIT ?",
            (*keys, id_prefix(since_us), id_prefix(until_us), most),
        )
        return [DecisionRecord.from_row(row) for row in found]

    def nearest(self, keys: Sequence[str], *, at_us: int) -> tuple[int | None, int | None]:
        marks = ", ".join("?" * len(REJECTIONS))
        query = f"SELECT at_us FROM decisions WHERE id IN ({_ids_of(keys)}) AND outcome IN ({marks}) ORDER BY id"
        ends = ((id_prefix(0), id_prefix(at_us), "DESC"), (id_prefix(at_us), AFTER_ALL, "ASC"))
        before, after = [
            self._connection.execute(f"{query} {order} LIMIT 1", (*keys, since, until, *REJECTIONS)).fetchone()
            for since, until, order in ends
        ]
        return before and before[0], after and after[0]

    def recent(
        self, keys: Sequence[str] = (), *, after: str = "", before: str = "", outcome: str | None = None, most: int
    ) -> list[DecisionRecord]:
        order = "ASC" if after else "DESC"
        wanted = () if outcome is None else REJECTIONS if outcome == REJECTED else (outcome,)
        scanned = MAX_SCANNED if wanted else most
        if keys:
            some = f"SELECT id FROM decisions_of WHERE client = ? AND id > ? AND id < ? ORDER BY id {order} LIMIT ?"
            ids = " UNION ".join([f"SELECT * FROM ({some})"] * len(keys))
            given: list[Any] = [each for key in keys for each in (key, after, before or AFTER_ALL, scanned)]
        else:
            ids = f"SELECT id FROM decisions WHERE id > ? AND id < ? ORDER BY id {order} LIMIT ?"
            given = [after, before or AFTER_ALL, scanned]
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


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """Create the tables, or check that they are those of a decision log."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION, *UPGRADES):
        raise InvalidConfiguration(f"{path} is not a decision log of this version; name a new file")
    if not version:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    set_journal_mode(connection, "WAL", timeout=LOCK_TIMEOUT_S)
    # The last records may be lost in a power failure, but not in a crash of the process.
    connection.execute("PRAGMA synchronous = NORMAL")
    # Clients are in random order: pages of the index are changed again and again.
    connection.execute(f"PRAGMA cache_size = -{CACHE_KB}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_BEFORE_CHECKPOINT}")
    if version != VERSION:
        with _transaction(connection):
            version = connection.execute("PRAGMA user_version").fetchone()[0]  # another process may have been faster
            changes = TABLES if not version else [UPGRADES[each] for each in range(version, VERSION)]
            for statement in (*changes, f"PRAGMA user_version = {VERSION}"):
                connection.execute(statement)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that waits for other writers at its beginning."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _insert(connection: sqlite3.Connection, records: Sequence[DecisionRecord]) -> None:
    """Insert records; those that exist already are left unchanged."""
    for start in range(0, len(records), ROWS_PER_INSERT):
        some = records[start : start + ROWS_PER_INSERT]
        values = [*chain.from_iterable([record.as_row() for record in some])]
        connection.execute(f"INSERT OR IGNORE INTO decisions ({COLUMNS}) VALUES {', '.join([ROW] * len(some))}", values)
    connection.execute(INDEX, (json.dumps([record.id for record in records]),))


def _ids_of(keys: Sequence[str]) -> str:
    marks = ", ".join("?" * len(keys))
    return f"SELECT id FROM decisions_of WHERE client IN ({marks}) AND id >= ? AND id < ?"
