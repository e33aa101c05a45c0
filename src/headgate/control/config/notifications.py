"""Waits until the config store has something new: PostgreSQL tells, a file of SQLite's is looked at."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from sqlalchemy.exc import DBAPIError

from headgate._fork import at_work
from headgate.control.config.engine import NOTIFY_CHANNEL, ConfigUnavailable
from headgate.control.config.reading import newest_stamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from headgate.control.config.reading import VersionStamp

__all__ = ["RETRY_INTERVAL_S", "ChangeNotifications", "open_notifications"]

LOOK_EVERY: Final = 0.2
"""Seconds between looks at a file's counter of changes, which cost microseconds."""

SLICE: Final = 0.5
"""Seconds after which a waiting thread sees whether it is still wanted."""

RETRY_INTERVAL_S: Final = 1.0
"""Seconds before a store is asked again that could not be."""

ASK_EVERY: Final = 5.0
"""Seconds after which PostgreSQL is asked for its newest version, though it would tell: a connection that is dead says
nothing either."""


class ChangeNotifications(Protocol):
    """Something to wait for. Belongs to one thread."""

    def wait(self, seconds: float, wanted: Callable[[float], bool], nothing: Callable[[], None]) -> None:
        """Return when there may be something new, or when the time is over; `wanted` waits so many seconds, and says
        whether somebody still listens. `nothing` is told whenever it is known that there is nothing new since."""

    def close(self) -> None: ...


def open_notifications(engine: Engine) -> ChangeNotifications:
    return _PostgresListen(engine) if engine.dialect.name == "postgresql" else _SqlitePoll(engine)


class _PostgresListen:
    """PostgreSQL says so, on a connection that is kept open for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._newest: VersionStamp | None = None
        """When the caller looked last, or before."""

    def wait(self, seconds: float, wanted: Callable[[float], bool], nothing: Callable[[], None]) -> None:
        if self._connection is None:
            # What came between the last look and now has been told to nobody: who has just begun to listen looks again.
            if not self._listen():
                wanted(min(seconds, RETRY_INTERVAL_S))
            return
        began = asked = time.monotonic()
        driver: Any = self._connection.connection.driver_connection
        try:
            while time.monotonic() < began + seconds and wanted(0):
                is_told = bool(list(driver.notifies(timeout=SLICE, stop_after=1)))
                if is_told or time.monotonic() >= asked + ASK_EVERY:
                    before, self._newest = self._newest, self._ask(self._connection)
                    if is_told or self._newest != before:
                        return
                    asked = time.monotonic()
                    nothing()
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
            self._newest = self._ask(self._connection)
        except (DBAPIError, ConfigUnavailable):
            self.close()
            return False
        return True

    @staticmethod
    def _ask(connection: Connection) -> VersionStamp:
        with at_work():
            return newest_stamp(connection)


class _SqlitePoll:
    """SQLite counts the changes of others in each connection."""

    def __init__(self, engine: Engine) -> None:
        self._file = str(engine.url.database)
        self._url = f"file:{quote(self._file)}?mode=ro"
        self._connection: sqlite3.Connection | None = None
        self._counted: tuple[int, ...] | None = None

    def wait(self, seconds: float, wanted: Callable[[float], bool], nothing: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        try:
            if self._connection is None:
                with at_work():
                    self._connection = sqlite3.connect(self._url, uri=True, timeout=RETRY_INTERVAL_S)
                self._counted = self._count()
                return  # what came before is counted nowhere: look again
            while time.monotonic() < end and wanted(LOOK_EVERY):
                if (now := self._count()) != self._counted:
                    self._counted = now
                    return
                nothing()
        except (sqlite3.Error, OSError):
            self.close()
            wanted(min(seconds, RETRY_INTERVAL_S))
        else:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            with at_work():
                self._connection.close()
            self._connection = None

    def _count(self) -> tuple[int, ...]:
        """Another for each change; also if there is another file of that name, as after a backup was put back."""
        assert self._connection is not None
        with at_work():
            changes = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            file = os.stat(self._file)
            return changes, file.st_dev, file.st_ino
