"""Journals of usage: charges that a process has admitted and not yet written to the ledger.

A line is written before a charge is admitted. It survives the death of the process, not that of the machine. Each
process has a file of its own, locked as long as it lives; whoever finds one that is not locked settles it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from headgate._sqlite import lock_file
from headgate.errors import InvalidConfiguration
from headgate.quotas.entries import UsageRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

__all__ = ["AbandonedJournal", "UsageJournal", "abandoned_journals"]

SUFFIX: Final = ".usage"
MODE: Final = 0o600
MAX_SIZE: Final = 4_000_000
"""Bytes after which a new file replaces the old one, once everything in it is in the ledger."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class UsageJournal:
    """The journal of this process. Not thread-safe."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path, self._file = self._create()
        except OSError as error:
            raise InvalidConfiguration(f"journal {directory}: cannot be written: {error.strerror}") from None
        self._size = 0

    def add_lease(self, lease: str) -> None:
        """Record a lease before the ledger is asked for it."""
        self._write([lease])

    def add_usage(self, record: UsageRecord, *, is_outage: bool) -> None:
        self._write([*record, is_outage])

    def compact(self, leases: Sequence[str]) -> None:
        """Begin a new file if the old one is large. Everything in it must be in the ledger, except open leases."""
        if self._size < MAX_SIZE:
            return
        old = self._path, self._file
        self._path, self._file = self._create()
        self._size = 0
        for lease in leases:
            self.add_lease(lease)
        _remove(*old)

    def close(self) -> None:
        """Delete the file: everything in it is in the ledger, and all leases are closed."""
        _remove(self._path, self._file)

    def abandon(self) -> None:
        """Leave the file to be settled by another process."""
        os.close(self._file)

    def _create(self) -> tuple[Path, int]:
        path = self._directory / f"{uuid4().hex}{SUFFIX}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, MODE)
        lock_file(file)
        return path, file

    def _write(self, fields: Sequence[Any]) -> None:
        line = (_encode(fields) + "\n").encode()
        os.write(self._file, line)
        self._size += len(line)


class AbandonedJournal:
    """The journal of a process that has ended, locked by this one."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file
        self.leases: list[str] = []
        self.usage: list[UsageRecord] = []
        self.outages: dict[str, list[UsageRecord]] = {}
        """Charges without a lease, by the id under which they are settled."""
        for line in path.read_bytes().split(b"\n")[:-1]:  # an interrupted line was not acknowledged
            fields = json.loads(line)
            if len(fields) == 1:
                self.leases.append(fields[0])
                continue
            record = UsageRecord(*fields[:-1])
            if fields[-1]:
                self.outages.setdefault(record.lease, []).append(record)
            else:
                self.usage.append(record)

    def delete(self) -> None:
        _remove(self._path, self._file)

    def release(self) -> None:
        """Leave the file for another attempt."""
        os.close(self._file)


def abandoned_journals(directory: str | os.PathLike[str]) -> Iterator[AbandonedJournal]:
    """The journals in a directory that no living process has locked."""
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if lock_file(file) and path.exists():  # its owner may have deleted it before it released the lock
            yield AbandonedJournal(path, file)
        else:
            os.close(file)


def _remove(path: Path, file: int) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    os.close(file)
