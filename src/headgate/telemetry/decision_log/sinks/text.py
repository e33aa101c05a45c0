"""The decision log as text: JSON lines in files that are rotated by size, or messages of Python's logging."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from headgate.telemetry.decision_log.sinks import check_known, parse_file

try:
    import fcntl
except ImportError:  # without file locks, only one process may write
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Sink

__all__ = ["JsonLinesSink", "LoggingSink", "open_sink"]


def open_sink(parts: SplitResult, settings: dict[str, str]) -> Sink:
    if parts.scheme == "jsonl":
        path, numbers = parse_file(parts, settings, "size_mb", "files")
        return JsonLinesSink(path, **numbers)
    check_known(settings, "level")
    return LoggingSink(parts.netloc or "headgate.decisions", **settings)


class JsonLinesSink:
    """Appends to a file that is renamed to `name.1` when it is full; `files` of those are kept.

    The file is opened for each batch, so that other programs may rotate it, and many processes may write to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, size_mb: float = 100, files: float = 5) -> None:
        self._path = os.fspath(path)
        self._max_bytes = int(size_mb * 1_000_000)
        self._files = int(files)

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
            while lines:
                lines = lines[os.write(file, lines) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise

    def _is_current(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        if self._files:
            os.replace(self._path, f"{self._path}.1")
        else:
            os.remove(self._path)


class LoggingSink:
    """Logs one message per record; handlers find all fields in the dictionary `record.decision`."""

    def __init__(self, name: str = "headgate.decisions", *, level: str = "info") -> None:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise ValueError(f"unknown level={level}; write debug, info, warning or error")
        self._level = number
        self._logger = logging.getLogger(name)

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        if self._logger.isEnabledFor(self._level):
            for record in batch:
                self._logger.log(self._level, "%s", record.words, extra={"decision": record.as_dict()})

    def close(self) -> None:
        """No effect: handlers belong to logging."""
