"""Exports of the ledger for billing systems: CloudEvents as JSON lines, and CSV.

An export is appended to a file. The file is its own cursor: the next run cuts off a line that was interrupted, reads
the number of the last entry, and continues after it. So each entry is in the file exactly once, whatever is killed.
"""

from __future__ import annotations

import csv
import io
import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headgate._sqlite import lock_file
from headgate.clock import EPOCH
from headgate.errors import InvalidInput
from headgate.quotas.entries import LedgerEntry, decode_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from headgate.quotas.ledger import Ledger

__all__ = ["CSV_FIELDS", "FORMATS", "cloud_event", "csv_text", "export_lines", "export_to_file", "utc_text"]

SOURCE: Final = "/headgate/ledger"
CSV_FIELDS: Final = (*LedgerEntry._fields, "balance", "hash", "at")
PAGE: Final = 2000
READ_SIZE: Final = 8192


def utc_text(at_us: int) -> str:
    """An instant as RFC 3339.

    >>> utc_text(1_790_000_000_000_001)
    '2026-09-21T14:13:20.000001Z'
    """
    return (EPOCH + timedelta(microseconds=at_us)).isoformat().replace("+00:00", "Z")


def cloud_event(entry: LedgerEntry) -> dict[str, Any]:
    """An entry as a CloudEvent 1.0 in the JSON format. Its `id` is unique: receivers can recognise repetitions."""
    data = {**entry._asdict(), "sources": [*map(list, decode_sources(entry.sources))]}
    data |= {"is_lease": bool(entry.is_lease), "balance": entry.balance, "hash": entry.hash}
    return {
        "specversion": "1.0",
        "id": entry.id,
        "source": SOURCE,
        "type": f"headgate.ledger.{entry.kind}",
        "subject": entry.account,
        "time": utc_text(entry.at_us),
        "sequence": f"{entry.number:019d}",
        "datacontenttype": "application/json",
        "data": data,
    }


def _cloud_event_line(entry: LedgerEntry) -> str:
    return json.dumps(cloud_event(entry), separators=(",", ":")) + "\n"


def _csv_line(entry: LedgerEntry) -> str:
    return csv_text([*entry, entry.balance, entry.hash, utc_text(entry.at_us)]) + "\n"


def csv_text(cells: Sequence[Any]) -> str:
    """Cells as a line of CSV, without its end.

    >>> print(csv_text([1, "a,b", "=1+1"]))
    1,"a,b",'=1+1
    """
    line = io.StringIO()
    # Spreadsheets execute cells that begin like a formula.
    safe = [f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell for cell in cells]
    csv.writer(line, lineterminator="").writerow(safe)
    return line.getvalue()


FORMATS: Final[dict[str, tuple[str, Callable[[LedgerEntry], str], Callable[[str], int]]]] = {
    "cloudevents": ("", _cloud_event_line, lambda line: int(json.loads(line)["sequence"])),
    "csv": (csv_text(CSV_FIELDS) + "\n", _csv_line, lambda line: int(line.partition(",")[0])),
}
"""For each format the first line, the line of an entry, and the number of the entry of a line."""


def export_lines(ledger: Ledger, format: str, *, after: int = 0, account: str | None = None) -> Iterator[str]:
    """The lines of all entries after a number, with the title of a CSV file if that is 0."""
    title, line, _ = FORMATS[format]
    if title and not after:
        yield title
    while page := ledger.after(after, account=account, most=PAGE):
        yield from map(line, page)
        after = page[-1].number


def export_to_file(ledger: Ledger, path: str, format: str, *, account: str | None = None) -> tuple[int, int]:
    """Append the entries that a file does not contain; returns how many, and the number of the last one."""
    try:
        with open(path, "a+b") as file:
            if not lock_file(file.fileno()):
                raise InvalidInput(f"{path}: another export is writing to it; wait until it ends")
            after = _resume(file, path, format)
            written, last = 0, after
            for line in export_lines(ledger, format, after=after, account=account):
                file.write(line.encode())
                if line != FORMATS[format][0]:
                    written += 1
                    last = FORMATS[format][2](line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror}") from None
    return written, last


def _resume(file: BinaryIO, path: str, format: str) -> int:
    """Cut off an interrupted line, and return the number of the last entry in the file; 0 for none."""
    title, _, number = FORMATS[format]
    start = size = file.seek(0, os.SEEK_END)
    tail = b""
    while start and tail.count(b"\n") < 2:
        start = max(0, size - 2 * len(tail) - READ_SIZE)
        file.seek(start)
        tail = file.read()
    complete = tail.rfind(b"\n") + 1
    file.truncate(start + complete)
    line = tail[:complete].rstrip(b"\n").rpartition(b"\n")[2].decode("utf-8", "replace")
    if not line or f"{line}\n" == title:
        file.truncate(0)  # the title is written again
        return 0
    try:
        return number(line)
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(f"{path}: its last line is not from an export as {format}; name another file") from None
