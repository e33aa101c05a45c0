"""Parsers of reputation lists: plain text, CSV, JSON and decisions of CrowdSec."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidInput
from headgate.policy.lists.ranges import AddressRanges, RangeBuilder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headgate.policy.model import ListSource

__all__ = ["LIST_FORMATS", "ListContent", "parse_list"]

MAX_INVALID_SHARE: Final = 100
"""Of so many entries, one may be invalid: it is skipped. With more, the whole version is refused."""
MAX_LINE_CHARS: Final = 65_536
CROWDSEC_SCOPES: Final = ("ip", "range")


class ListContent(NamedTuple):
    """The content of one version of a list."""

    ranges: AddressRanges
    networks: int
    """The number of entries."""
    invalid: int
    """Entries that were skipped."""


def parse_list(data: bytes, source: ListSource) -> ListContent:
    """Parse a list. Raises InvalidInput if it has no networks, too many, or too many invalid entries."""
    builder, invalid, first = RangeBuilder(), 0, ""
    try:
        for entry in LIST_FORMATS[source.format](data, source):
            try:
                builder.add(entry)
            except InvalidInput as error:
                invalid, first = invalid + 1, first or f"{error}"
                if invalid > source.max_networks:
                    break
            if len(builder) > source.max_networks:
                raise InvalidInput(f"has more than {source.max_networks:,} networks; raise max_networks")
    except (csv.Error, UnicodeError, RecursionError) as error:
        raise InvalidInput(f"is not {source.format}: {error}") from None
    if invalid * MAX_INVALID_SHARE > len(builder):
        raise InvalidInput(f"has {invalid:,} invalid entries and {len(builder):,} networks; the first: {first}")
    if not len(builder) and source.format != "crowdsec":  # of decisions, there may be none
        raise InvalidInput("has no networks")
    return ListContent(builder.build(), len(builder), invalid)


def _plain(data: bytes, source: ListSource) -> Iterator[str]:
    """One network per line, the rest of which is ignored after a blank; comments start with # or ;."""
    for line in _lines(data):
        entry = line.partition("#")[0].partition(";")[0].strip()
        if entry:
            yield entry if "-" in entry else entry.split(None, 1)[0]


def _csv(data: bytes, source: ListSource) -> Iterator[str]:
    rows = csv.reader(_without_comments(_lines(data)), skipinitialspace=True)
    column = source.column
    if isinstance(column, str):
        header = [name.strip() for name in next(rows, [])]
        if column not in header:
            raise InvalidInput(f"has no column {column!r}; its first line has {', '.join(header)[:200] or 'nothing'}")
        index = header.index(column)
    else:
        index = (column or 1) - 1
    for row in rows:
        if row:
            yield row[index].strip() if index < len(row) else ""


def _json(data: bytes, source: ListSource) -> Iterator[str]:
    """All texts in an array; or all texts under the key, at any depth, in one document or in one per line."""
    for document in _documents(data):
        yield from _values_of(document, source.key)


def _crowdsec(data: bytes, source: ListSource) -> Iterator[str]:
    """The bans of addresses and ranges: as an array of decisions, of alerts with decisions, or a stream with `new`."""
    for document in _documents(data):
        is_stream = isinstance(document, dict) and "new" in document
        entries = document["new"] if is_stream else document
        if entries is not None and not isinstance(entries, list):
            raise InvalidInput("is not crowdsec: expected an array of decisions")
        for entry in entries or ():
            decisions = entry.get("decisions", [entry]) if isinstance(entry, dict) else [None]
            for decision in decisions or ():
                if not isinstance(decision, dict) or "value" not in decision:
                    raise InvalidInput("is not crowdsec: a decision without a value")
                scope = f"{decision.get('scope', 'ip')}".lower()
                if scope in CROWDSEC_SCOPES and f"{decision.get('type', 'ban')}".lower() == "ban":
                    yield f"{decision['value']}"


LIST_FORMATS: Final = {"plain": _plain, "csv": _csv, "json": _json, "crowdsec": _crowdsec}
"""The entries of a list by format: texts that may be networks."""


def _lines(data: bytes) -> Iterator[str]:
    """The lines of a text; a line that is too long for a network is truncated."""
    with io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", errors="replace") as text:
        while line := text.readline(MAX_LINE_CHARS):
            yield line


def _without_comments(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _documents(data: bytes) -> Iterator[Any]:
    text = data.decode("utf-8-sig")
    try:
        yield json.loads(text)
        return
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("{") or error.msg != "Extra data":
            raise InvalidInput(f"is not JSON: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidInput(f"is not JSON lines: line {number}: {error}") from None


def _values_of(value: Any, key: str | None) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            if isinstance(each, str):
                if key is None:
                    yield each
            else:
                yield from _values_of(each, key)
    elif isinstance(value, dict):
        if key is None:
            raise InvalidInput("has objects; give key:, the name of the field with the network")
        for name, each in value.items():
            if name == key and isinstance(each, str):
                yield each
            else:
                yield from _values_of(each, key)
