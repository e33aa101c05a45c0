"""The decision log as JSON lines, in files that are rotated by size."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # without file locks, only one process may write
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["JsonLinesSink"]


class JsonLinesSink:
    """Appends to a file that is renamed to `name.1` when it is full; `files` of those are kept.

    The file is opened for each batch, so that other programs may rotate it, and many processes may write to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, size_mb: float = 100, files: int = 5) -> None:
        self._path = os.fspath(path)
        self._max_bytes = int(size_mb * 1_000_000)
        self._files = files

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        lines = "".join([f"{record.as_json()}\n" for record in batch]).encode("ascii")
        while True:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not self._is_current(file):
                    continue  # another process has rotated it meanwhile
                size = os.fstat(file).st_size
                if size and size + len(lines) > self._max_bytes:
                    self._rotate()
                    continue
                self._append(file, lines, size)
                return
            finally:
                os.close(file)

    def close(self) -> None:
        """No effect: nothing is open between two batches."""

    def _append(self, file: int, lines: bytes, size: int) -> None:
        """Write all lines or none: a partial line would corrupt the next one."""
        try:
            rest = lines
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        if self._files:
            os.replace(self._path, f"{self._path}.1")
        else:
            os.remove(self._path)
