"""SQLite files: private permissions, journal modes under contention, and detection of deleted or replaced files."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

try:
    import fcntl
except ImportError:  # without file locks, only one process should write to a file
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FileId", "close_stale", "create_file", "file_id", "lock_file", "set_journal_mode"]

FileId = tuple[int, int]  # device and inode

MODE: Final = 0o600  # permissions of new files; SQLite gives its -wal and -shm files those of the database
COMPANIONS: Final = ("-wal", "-shm", "-journal")
LOCK_TIMEOUT_S: Final = 5.0
RETRY_INTERVAL_S: Final = 0.005
PRIMARY_CODE: Final = 0xFF  # the bits of an extended SQLite result code that hold the primary code

_kept: list[sqlite3.Connection] = []  # connections that are never closed


def file_id(path: str | os.PathLike[str]) -> FileId | None:
    """Return the identity of the file at a path, or None if there is none.

    SQLite keeps writing to a file that was deleted or replaced, without an error: compare the identity to notice.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def create_file(path: str | os.PathLike[str]) -> FileId | None:
    """Create an empty, private file if there is none, and return the identity of the file at this path.

    Journals that a deleted database left behind are removed: processes that have not noticed the deletion may still
    use them, and a new database must not share them. Return None where the file cannot be created; SQLite says why.
    """
    if (found := file_id(path)) is not None:
        return found
    path = os.path.realpath(path)  # as SQLite does, to name its journals
    with _directory_lock(path):
        if (found := file_id(path)) is not None:
            return found
        for suffix in COMPANIONS:
            with suppress(OSError):
                os.unlink(path + suffix)
        with suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, MODE))
        return file_id(path)


def close_stale(connection: sqlite3.Connection, path: str) -> None:
    """Close a connection to a file that is no longer at `path`, without harming the file that is there now.

    A file that was moved away is complete afterwards: the write-ahead log is copied into it first. SQLite deletes the
    journals of the last connection by name, and by now they may belong to another database. So the connection is
    closed while no process can create that database, or without touching any journal.
    """
    path = os.path.realpath(path)
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with _directory_lock(path):
        if file_id(path) is None:
            connection.close()
            return
    option = getattr(sqlite3, "SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE", None)  # Python 3.12 and newer
    if option is not None:
        stale: Any = connection
        stale.setconfig(option, True)
        connection.close()
        return
    _kept.append(connection)
    with suppress(ImportError, AttributeError):  # not even closed when the interpreter clears its modules at exit
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def lock_file(descriptor: int) -> bool:
    """Lock a file exclusively until it is closed; False if another process has locked it. Where files cannot be locked,
    do without."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def set_journal_mode(connection: sqlite3.Connection, mode: str, *, timeout: float) -> None:
    """Set SQLite's journal mode. When several connections do so on a new file, SQLite reports "database is locked"
    at once instead of waiting, so retry until the timeout."""
    end = time.monotonic() + timeout
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & PRIMARY_CODE != sqlite3.SQLITE_BUSY or time.monotonic() >= end:
                raise
            time.sleep(RETRY_INTERVAL_S)
        else:
            return


@contextmanager
def _directory_lock(path: str) -> Iterator[None]:
    """Hold an exclusive lock on the directory of a file. Where directories cannot be locked, do without."""
    try:
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        _lock(directory)
        yield
    finally:
        os.close(directory)  # releases the lock


def _lock(directory: int) -> None:
    end = time.monotonic() + LOCK_TIMEOUT_S
    while fcntl is not None:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise sqlite3.OperationalError("another process keeps the directory of the file locked") from None
            time.sleep(RETRY_INTERVAL_S)
        except OSError:
            return
        else:
            return
