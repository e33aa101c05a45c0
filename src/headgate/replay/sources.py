"""Sources of logs: files and globs, plain or compressed, standard input, and decision logs by URL."""

from __future__ import annotations

import glob
import gzip
import os
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import quote

from headgate.errors import InvalidInput, name_missing_extra
from headgate.replay.formats import CsvLines, DecisionLines, decision_request, detect, make_parser
from headgate.telemetry.decision_log.record import LOST, id_prefix
from headgate.telemetry.decision_log.sinks import open_reader, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headgate.replay.formats import LogFormat, LoggedRequest, ParserSettings
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Reader

__all__ = ["DecisionRecords", "LogReader", "expand"]

BLOCK_BYTES: Final = 1 << 19
MAX_LINE_BYTES: Final = 1 << 20
"""Longer lines are skipped."""
DETECTION_CHARS: Final = 1 << 16
RECORDS_PER_PAGE: Final = 10_000
GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
SQLITE: Final = b"SQLite format 3\0"
STDIN: Final = "-"


def expand(names: Sequence[str]) -> list[str]:
    """The logs that are named: globs are expanded, in the order of their names; InvalidInput if one matches nothing."""
    found: list[str] = []
    for name in names:
        if "://" in name or name == STDIN or Path(name).exists() or not glob.has_magic(name):
            found.append(name)
            continue
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise InvalidInput(f"no file matches {name!r}")
        found += matches
    return found


@dataclass(eq=False)
class LogReader:
    """Reads logs one after the other, in batches of requests, and counts the lines that it cannot read."""

    names: Sequence[str]
    settings: ParserSettings
    format: str | None = None
    """The name of the format; None to detect it for each log."""
    on_progress: Callable[[int, int], None] | None = None
    """Called now and then with the number of bytes read, and of all bytes: 0 if unknown."""
    lines: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)
    """Lines that are not requests of the format. Empty lines are not counted."""
    sampled: int = field(default=0, init=False)
    """Records of decision logs that stand for several requests."""
    lost: float = field(default=0.0, init=False)
    """Decisions that a decision log could not record."""
    is_decision_log: bool = field(default=False, init=False)
    bytes_read: int = field(default=0, init=False)
    total_bytes: int = field(default=0, init=False)
    is_cut: Final = False

    def __post_init__(self) -> None:
        self.names = expand(self.names)
        for name in self.names:
            if "://" not in name and name != STDIN:
                try:
                    self.total_bytes += os.stat(name).st_size
                except OSError as error:
                    raise InvalidInput(f"{name}: cannot be read: {error.strerror}") from None

    def batches(self) -> Iterator[list[LoggedRequest]]:
        """All requests, in the order of the logs."""
        for name in self.names:
            yield from self._records(name) if "://" in name else self._file(name)

    def _file(self, name: str) -> Iterator[list[LoggedRequest]]:
        try:
            with sys.stdin.buffer if name == STDIN else Path(name).open("rb") as raw:
                head = _peek(raw)
                if head.startswith(SQLITE):
                    yield from self._records(f"sqlite:///{quote(name)}")
                    return
                yield from self._parse(name, _blocks(_decompressed(_Counted(raw, head, self), head, name)))
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or f"{error}"
            raise InvalidInput(f"{name}: cannot be read: {reason}") from None

    def _parse(self, name: str, blocks: Iterator[str]) -> Iterator[list[LoggedRequest]]:
        parser: LogFormat | None = None
        for text in blocks:
            if parser is None:
                parser = self._parser(text[:DETECTION_CHARS].split("\n"), name)
            found, lines = parser.parse_block(text)
            self.lines += lines
            self.skipped += lines - len(found)
            if isinstance(parser, CsvLines) and parser.take_header():
                self.lines -= 1
                self.skipped -= 1
            if self.on_progress is not None:
                self.on_progress(self.bytes_read, self.total_bytes)
            yield found
        if isinstance(parser, DecisionLines):
            self.is_decision_log = True
            self.sampled += parser.sampled
            self.lost += parser.lost

    def _parser(self, lines: list[str], name: str) -> LogFormat:
        """The parser for a log that begins with these lines; InvalidInput if it is not of the format."""
        if self.format is None:
            return detect(lines, self.settings, name)
        parser, sample = make_parser(self.format, self.settings), [line for line in lines[:50] if line.strip()]
        tried = make_parser(self.format, self.settings)
        if sample and not isinstance(parser, CsvLines) and not any(map(tried.parse, sample)):
            raise InvalidInput(
                f"{name}: none of its first {len(sample)} lines is of the format {self.format!r}; "
                "leave --format out to detect it"
            )
        return parser

    def _records(self, url: str) -> Iterator[list[LoggedRequest]]:
        """The requests of a decision log in a database."""
        self.is_decision_log = True
        with closing(open_reader(url)) as reader:
            records = DecisionRecords(reader)
            batches = records.batches()
            while True:
                try:
                    found = next(batches, None)
                except Exception as error:  # of SQLite, or of the ClickHouse client
                    shown = without_password(url)
                    raise InvalidInput(f"{shown}: the decision log cannot be read: {error}") from error
                if found is None:
                    break
                if self.on_progress is not None:
                    self.on_progress(self.bytes_read, self.total_bytes)
                yield found
        self.lines += records.lines
        self.skipped += records.skipped
        self.sampled += records.sampled
        self.lost += records.lost


@dataclass(eq=False)
class DecisionRecords:
    """Reads the requests of a decision log in a database, in batches."""

    reader: Reader
    since_us: int = 0
    """Older records are not read."""
    max_records: int | None = None
    """The number of records that are read: the newest ones. None for all."""
    lines: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)
    sampled: int = field(default=0, init=False)
    lost: float = field(default=0.0, init=False)

    @property
    def is_cut(self) -> bool:
        """True if older records were not read, because there are too many."""
        return self.max_records is not None and self.lines >= self.max_records

    def batches(self) -> Iterator[list[LoggedRequest]]:
        """All requests, in the order of the log unless their number is limited."""
        for records in self._pages():
            found: list[LoggedRequest] = []
            for record in records:
                self.lines += 1
                request = decision_request(record._asdict())
                if request is not None:
                    self.sampled += record.weight > 1
                    found.append(request)
                else:
                    self.skipped += 1
                    self.lost += record.weight if record.outcome == LOST else 0
            yield found

    def _pages(self) -> Iterator[list[DecisionRecord]]:
        """Pages from the oldest to the newest; if the number of records is limited, from the newest to the oldest."""
        reader, last, before, left = self.reader, id_prefix(self.since_us), "", self.max_records
        while True:
            if left is None:
                records = reader.recent((), after=last, most=RECORDS_PER_PAGE)
            else:
                newest = reader.recent((), before=before, most=min(RECORDS_PER_PAGE, left)) if left else []
                records = [record for record in newest if record.id >= last]
                left -= len(records)
            if not records:
                return
            yield records
            last, before = last if left is not None else records[-1].id, records[0].id


class _Counted:
    """A binary stream that returns first what was peeked, and counts the bytes read."""

    def __init__(self, raw: BinaryIO, head: bytes, reader: LogReader) -> None:
        self._raw = raw
        self._head = head
        self._reader = reader

    def read(self, size: int = -1) -> bytes:
        if self._head:
            data, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        else:
            data = self._raw.read(size)
        self._reader.bytes_read += len(data)
        return data


def _peek(raw: BinaryIO) -> bytes:
    """The beginning of a stream: at least the bytes that identify the format of a file, unless it is shorter."""
    head = b""
    while len(head) < len(SQLITE) and (more := raw.read(len(SQLITE) - len(head))):
        head += more
    return head


def _decompressed(stream: Any, head: bytes, name: str) -> Any:
    if head.startswith(GZIP):
        return gzip.GzipFile(fileobj=stream)
    if head.startswith(ZSTD):
        with name_missing_extra(f"{name} is compressed with zstd, which needs", "zstd", "zstandard"):
            from zstandard import ZstdDecompressor

        return ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return stream


def _blocks(stream: Any) -> Iterator[str]:
    """The text of a stream in blocks of whole lines, without the last line end, in UTF-8; other bytes are escaped.
    An overlong line becomes an invalid one."""
    rest = b""
    is_overlong = False
    while block := stream.read(BLOCK_BYTES):
        first, newline, last = block.rpartition(b"\n")
        if not newline:
            rest += block
            if len(rest) > MAX_LINE_BYTES:
                rest, is_overlong = b"", True
            continue
        data = rest + first
        if is_overlong:
            data, is_overlong = b"\0\n" + data.partition(b"\n")[2], False
        rest = last
        yield _text(data)
    if is_overlong:
        yield "\0"
    elif rest:
        yield _text(rest)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").replace("\r", "")
