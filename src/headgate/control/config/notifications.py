"""Waits for new versions: LISTEN on PostgreSQL, polling on SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from sqlalchemy.exc import DBAPIError

from headgate._fork import block_forks
from headgate.control.config.engine import NOTIFY_CHANNEL, ConfigUnavailable
from headgate.control.config.reading import newest_stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from headgate.control.config.reading import VersionStamp

__all__ = ["RETRY_INTERVAL_S", "ChangeNotifications", "open_notifications"]

SQLITE_POLL_INTERVAL_S: Final = 0.2
"""Polling reads the change counter of the file, which takes microseconds."""

STOP_CHECK_INTERVAL_S: Final = 0.5
"""Interval at which a waiting thread checks whether it should stop."""

RETRY_INTERVAL_S: Final = 1.0
"""Pause after a failed attempt."""

VERSION_CHECK_INTERVAL_S: Final = 5.0
"""Interval of queries while listening: a dead connection sends no notifications either."""


class ChangeNotifications(Protocol):
    """A source of change notifications, for use by one thread."""

    def wait(self, seconds: float, pause: Callable[[float], bool], on_unchanged: Callable[[], None]) -> None:
        """Return when there may be a new version, or after `seconds`.

        `pause` waits so many seconds and returns False to stop. `on_unchanged` is called whenever the store is known to
        have nothing new.
        """

    def close(self) -> None: ...


def open_notifications(engine: Engine) -> ChangeNotifications:
    return _PostgresListen(engine) if engine.dialect.name == "postgresql" else _SqlitePoll(engine)


class _PostgresListen:
    """LISTEN on a dedicated connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._newest: VersionStamp | None = None
        """The newest version when the caller last checked, or earlier."""

    def wait(self, seconds: float, pause: Callable[[float], bool], on_unchanged: Callable[[], None]) -> None:
        if self._connection is None:
            # Versions written before LISTEN send no notification: return, so that the caller checks.
            if not self._listen():
                pause(min(seconds, RETRY_INTERVAL_S))
            return
        began = checked = time.monotonic()
        driver: Any = self._connection.connection.driver_connection
        try:
            while time.monotonic() < began + seconds and pause(0):
                is_notified = bool(list(driver.notifies(timeout=STOP_CHECK_INTERVAL_S, stop_after=1)))
                if is_notified or time.monotonic() >= checked + VERSION_CHECK_INTERVAL_S:
                    before, self._newest = self._newest, self._read_stamp(self._connection)
                    if is_notified or self._newest != before:
                        return
                    checked = time.monotonic()
                    on_unchanged()
        except (driver.Error, DBAPIError):
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.invalidate()
            connection.close()

    def _listen(self) -> bool:
        try:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection.exec_driver_sql(f"LISTEN {NOTIFY_CHANNEL}")
            self._newest = self._read_stamp(self._connection)
        except (DBAPIError, ConfigUnavailable):
            self.close()
            return False
        return True

    @staticmethod
    def _read_stamp(connection: Connection) -> VersionStamp:
        with block_forks():
            return newest_stamp(connection)


class _SqlitePoll:
    """Polls the change counter that SQLite keeps for each connection."""

    def __init__(self, engine: Engine) -> None:
        self._file = str(engine.url.database)
        self._url = f"file:{quote(self._file)}?mode=ro"
        self._connection: sqlite3.Connection | None = None
        self._counter: tuple[int, ...] | None = None

    def wait(self, seconds: float, pause: Callable[[float], bool], on_unchanged: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        try:
            if self._connection is None:
                with block_forks():
                    self._connection = sqlite3.connect(self._url, uri=True, timeout=RETRY_INTERVAL_S)
                self._counter = self._read_counter()
                return  # earlier changes are not counted: the caller has to check
            while time.monotonic() < end and pause(SQLITE_POLL_INTERVAL_S):
                if (now := self._read_counter()) != self._counter:
                    self._counter = now
                    return
                on_unchanged()
        except (sqlite3.Error, OSError):
            self.close()
            pause(min(seconds, RETRY_INTERVAL_S))
        else:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            with block_forks():
                self._connection.close()
            self._connection = None

    def _read_counter(self) -> tuple[int, ...]:
        """A value that changes with every commit, and when the file is replaced, as by a restored backup."""
        assert self._connection is not None
        with block_forks():
            changes = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            file = os.stat(self._file)
            return changes, file.st_dev, file.st_ino
