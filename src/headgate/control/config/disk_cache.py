"""The copy that a node keeps on its disk: what it runs on after a restart while the config store is down."""

from __future__ import annotations

import os
import sqlite3
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, delete, insert

from headgate.control.config.engine import ConfigUnavailable, open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.control.config.reading import ConfigChanges, ConfigContents, newest_stamp, read_contents
from headgate.control.config.rows import SECTIONS
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from os import PathLike

    from sqlalchemy import Connection, Engine

__all__ = ["DiskCache"]

AT_ONCE: Final = 200
"""Rows that are written in one go, while others wait."""


class DiskCache:
    """A file with the newest contents that were seen. The workers of one machine may share it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path).absolute()  # it is written in the background, by when the process may have moved

    @property
    def seen_us(self) -> int:
        """When the store was last known to have nothing newer: the time of the file, which `touch` sets."""
        return self._path.stat().st_mtime_ns // 1000

    def read(self) -> ConfigContents | None:
        """What is kept; None if there is nothing. ConfigUnavailable, if it cannot be read."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return None
        with read_transaction(self._engine(create=False)) as connection:
            stamp = newest_stamp(connection)
            return read_contents(connection, stamp) if stamp.version else None

    def keep(self, found: ConfigContents | ConfigChanges) -> bool:
        """Bring the copy to this version; False, if it is too old for these changes, and wants the contents."""
        try:
            return self._keep(found)
        except ConfigUnavailable as error:
            # Not SQLite's OperationalError, of which it is the parent: the file is no database any more.
            if type(getattr(error.__cause__, "orig", None)) is not sqlite3.DatabaseError:
                raise
            self._path.unlink(missing_ok=True)
            return self._keep(found)

    def touch(self) -> bool:
        """Note that the store has nothing newer. Return False if the copy was deleted, and has to be written again."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def _keep(self, found: ConfigContents | ConfigChanges) -> bool:
        with write_transaction(self._engine(create=True)) as connection:
            migrate(connection)
            kept = newest_stamp(connection)
            if kept == found.stamp:
                return True  # another worker was here
            if isinstance(found, ConfigChanges) and kept != found.since:
                return False
            for section in SECTIONS:
                _put(connection, section, found)
            connection.execute(delete(VERSIONS))
            version, at_us = found.stamp
            connection.execute(
                insert(VERSIONS).values(version=version, at_us=at_us, author="-", reason="-", what="a copy")
            )
        return True

    def _engine(self, *, create: bool) -> Engine:
        return open_engine(URL.create("sqlite", database=str(self._path)), create=create, journal="delete")


def _put(connection: Connection, section: str, found: ConfigContents | ConfigChanges) -> None:
    table, rows = TABLES[section], found.rows[section]
    if isinstance(found, ConfigContents):
        connection.execute(delete(table))
    elif rows:
        connection.exec_driver_sql(f"DELETE FROM {table.name} WHERE id = ?", [(id,) for id in rows])
    # The driver itself takes tuples as they are, which is three times as fast.
    names = ("id", "since", *SECTIONS[section]._fields)
    statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    made = ((id, found.stamp.version, *row) for id, row in rows.items() if row is not None)
    while some := list(islice(made, AT_ONCE)):
        connection.exec_driver_sql(statement, some)
