"""Journals of usage: charges that a process has admitted and not yet written to the ledger.

A line is written before a charge is admitted. It survives the death of the process, not that of the machine. Each
process has a file of its own, locked as long as it lives; another process that finds it unlocked settles it. While the
disk is full, charges go on without it: they are in doubt if the process dies before it has written them to the ledger.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from headgate._sqlite import lock_file
from headgate.errors import InvalidConfiguration
from headgate.quotas.entries import UsageRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["AbandonedJournal", "UsageJournal", "abandoned_journals"]

logger = logging.getLogger("headgate")

SUFFIX: Final = ".usage"
MODE: Final = 0o600
MAX_SIZE: Final = 4_000_000
"""Bytes after which a new file replaces the old one."""
MAX_LINE_SIZE: Final = 1500
"""An upper estimate of a usage record."""

_quote = json.encoder.encode_basestring_ascii


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
        self._is_torn = False
        """True if the last line was not written, or only in part."""

    def add_lease(self, lease: str) -> None:
        """Record a lease before the ledger is asked for it."""
        self._append(_lease_line(lease).encode())

    def add_usage(self, record: UsageRecord, *, is_outage: bool) -> None:
        self._append(_usage_line(record, is_outage=is_outage).encode())

    def needs_compaction(self, unwritten: int) -> bool:
        """True if a new file, with this number of usage records, would be much smaller."""
        return self._size >= MAX_SIZE and unwritten * MAX_LINE_SIZE < self._size

    def compact(self, leases: Sequence[str], usage: Iterable[UsageRecord], outages: Iterable[UsageRecord]) -> None:
        """Begin a new file with what is not in the ledger: open leases, and usage.

        If the process is killed before the old file is removed, both are settled: the same record is charged once.
        """
        lines = [_lease_line(lease) for lease in leases]
        lines += [_usage_line(record, is_outage=False) for record in usage]
        lines += [_usage_line(record, is_outage=True) for record in outages]
        content = "".join(lines).encode()
        try:
            new = self._create()
        except OSError:  # there may be room later
            return
        is_complete = False
        with suppress(OSError):
            is_complete = os.write(new[1], content) == len(content)
        if not is_complete:
            _remove(*new)
            return
        _remove(self._path, self._file)
        self._path, self._file = new
        self._size, self._is_torn = len(content), False

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

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            written, problem = 0, f"{error.strerror}"
        else:
            problem = "there is no room"
        self._size += written
        if written == len(line):
            self._is_torn = False
        elif not self._is_torn:
            self._is_torn = True
            logger.error("charges are not in the journal %s until it can be written: %s", self._path, problem)


def _lease_line(lease: str) -> str:
    return f"[{_quote(lease)}]\n"


def _usage_line(record: UsageRecord, *, is_outage: bool) -> str:
    """As the encoder of JSON would write it, but in half the time: this is the largest part of a charge."""
    id, account, lease, amount, at_us, reference = record
    texts = f"{_quote(id)},{_quote(account)},{_quote(lease)},{amount},{at_us},{_quote(reference)}"
    return f"[{texts},{'true' if is_outage else 'false'}]\n"


class AbandonedJournal:
    """The journal of a process that has ended, locked by this one."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file
        self.leases: list[str] = []
        self.usage: list[UsageRecord] = []
        self.outages: dict[str, list[UsageRecord]] = {}
        """Charges without a lease, by the id under which they are settled."""
        for line in path.read_bytes().split(b"\n")[:-1]:  # an interrupted line was not acknowledged
            try:
                fields = json.loads(line)
            except ValueError:  # a part of a line, which was written when the disk was full
                continue
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
