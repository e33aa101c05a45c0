"""A local copy of the configuration, for starting a node while the config store is down."""

from __future__ import annotations

import os
import sqlite3
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, delete, insert

from headgate.control.config.engine import ConfigUnavailable, open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.control.config.reading import ConfigRows, newest_stamp, read_contents
from headgate.control.config.rows import SECTIONS
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from os import PathLike

    from sqlalchemy import Connection, Engine

__all__ = ["DiskCache"]

BATCH_SIZE: Final = 200  # rows written at a time; other threads wait meanwhile


class DiskCache:
    """A SQLite file with the newest known configuration. The workers of a machine may share it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path).absolute()  # the process may change its directory

    @property
    def checked_us(self) -> int:
        """When the store was last known to have nothing newer; the modification time set by `touch`."""
        return self._path.stat().st_mtime_ns // 1000

    def read(self) -> ConfigRows | None:
        """The stored configuration, or None. Raises ConfigUnavailable if the file cannot be read."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return None
        with read_transaction(self._engine(create=False)) as connection:
            stamp = newest_stamp(connection)
            return read_contents(connection, stamp) if stamp.version else None

    def update(self, found: ConfigRows) -> bool:
        """Store a version. Returns False if the copy is too old for these changes and needs the whole contents."""
        try:
            return self._update(found)
        except ConfigUnavailable as error:
            # DatabaseError itself, not a subclass such as OperationalError, means that the file is corrupt.
            if type(getattr(error.__cause__, "orig", None)) is not sqlite3.DatabaseError:
                raise
            self._path.unlink(missing_ok=True)
            return self._update(found)

    def touch(self) -> bool:
        """Record that the store has nothing newer. Returns False if the file is missing and must be written again."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def _update(self, found: ConfigRows) -> bool:
        with write_transaction(self._engine(create=True)) as connection:
            migrate(connection)
            stored = newest_stamp(connection)
            if stored == found.stamp:
                return True  # written by another worker
            if found.since not in (None, stored):
                return False
            for section in SECTIONS:
                _write_section(connection, section, found)
            connection.execute(delete(VERSIONS))
            connection.execute(insert(VERSIONS).values([(*found.stamp, "-", "-", "a copy", None)]))
        return True

    def _engine(self, *, create: bool) -> Engine:
        return open_engine(URL.create("sqlite", database=str(self._path)), create=create, journal="delete")


def _write_section(connection: Connection, section: str, found: ConfigRows) -> None:
    table, rows = TABLES[section], found.rows[section]
    if found.since is None:
        connection.execute(delete(table))
    elif rows:
        connection.exec_driver_sql(f"DELETE FROM {table.name} WHERE id = ?", [(id,) for id in rows])
    # Passing tuples to the driver directly is three times as fast.
    names = ("id", "since", *SECTIONS[section]._fields)
    statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    values = ((id, found.stamp.version, *row) for id, row in rows.items() if row is not None)
    while some := list(islice(values, BATCH_SIZE)):
        connection.exec_driver_sql(statement, some)
