"""Waits until the config store has something new: PostgreSQL tells, a file of SQLite's is looked at."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from sqlalchemy.exc import DBAPIError

from headgate._forks import at_work
from headgate.control.config.database import CHANNEL, ConfigUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

__all__ = ["News", "news_of"]

LOOK_EVERY: Final = 0.2
"""Seconds between looks at a file's counter of changes, which cost microseconds."""

SLICE: Final = 0.5
"""Seconds after which a waiting thread sees whether it is still wanted."""

RETRY: Final = 1.0


class News(Protocol):
    """Something to wait for. Belongs to one thread."""

    def wait(self, seconds: float, wanted: Callable[[float], bool]) -> None:
        """Return when there may be something new, or when the time is over; `wanted` waits so many seconds, and says
        whether somebody still listens."""

    def close(self) -> None: ...


def news_of(engine: Engine) -> News:
    return _Told(engine) if engine.dialect.name == "postgresql" else _Seen(engine)


class _Told:
    """PostgreSQL says so, on a connection that is kept open for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    def wait(self, seconds: float, wanted: Callable[[float], bool]) -> None:
        if self._connection is None:
            # What came between the last look and now has been told to nobody: who has just begun to listen looks again.
            if not self._listen():
                wanted(min(seconds, RETRY))
            return
        end = time.monotonic() + seconds
        driver: Any = self._connection.connection.driver_connection
        try:
            while time.monotonic() < end and wanted(0):
                if list(driver.notifies(timeout=SLICE, stop_after=1)):
                    return
        except driver.Error:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.invalidate()
            connection.close()

    def _listen(self) -> bool:
        try:
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql(f"LISTEN {CHANNEL}")
        except (DBAPIError, ConfigUnavailable):
            return False
        self._connection = connection
        return True


class _Seen:
    """SQLite counts the changes of others in each connection."""

    def __init__(self, engine: Engine) -> None:
        self._url = f"file:{quote(str(engine.url.database))}?mode=ro"
        self._connection: sqlite3.Connection | None = None
        self._counted: int | None = None

    def wait(self, seconds: float, wanted: Callable[[float], bool]) -> None:
        end = time.monotonic() + seconds
        try:
            if self._connection is None:
                with at_work():
                    self._connection = sqlite3.connect(self._url, uri=True, timeout=RETRY)
                self._counted = self._count()
                return  # what came before is counted nowhere: look again
            while time.monotonic() < end and wanted(LOOK_EVERY):
                if (now := self._count()) != self._counted:
                    self._counted = now
                    return
        except sqlite3.Error:
            self.close()
            wanted(min(seconds, RETRY))
        else:
            self.close()  # the file may be another one by now

    def close(self) -> None:
        if self._connection is not None:
            with at_work():
                self._connection.close()
            self._connection = None

    def _count(self) -> int:
        assert self._connection is not None
        with at_work():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
