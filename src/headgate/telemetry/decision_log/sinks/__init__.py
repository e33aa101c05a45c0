"""Sinks and readers of the decision log, by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headgate._limit_syntax import suggest
from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = [
    "MAX_SCANNED",
    "REJECTED",
    "Count",
    "InvalidLog",
    "MissingLog",
    "Reader",
    "Sink",
    "open_reader",
    "open_sink",
    "time_of",
]

REJECTED: Final = "rejected"
"""Stands for all outcomes that are rejections."""

MAX_SCANNED: Final = 100_000
"""Records that are scanned for those of one outcome."""


class Sink(Protocol):
    """Writes records. Only one thread calls it at a time.

    Optional attributes are `batch`, the preferred number of records per call, and `every`, the seconds between calls.
    """

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        """Write all records, or raise an exception: then they are written again, with the same ids."""

    def close(self) -> None:
        """Release all resources."""


class Reader(Protocol):
    """Finds records."""

    def find(self, keys: Sequence[str], *, since_us: int, until_us: int, most: int) -> list[DecisionRecord]:
        """The first `most` records of the clients with these keys in a time range, oldest first."""

    def nearest(self, keys: Sequence[str], *, at_us: int) -> tuple[int | None, int | None]:
        """The times of the last rejection before a time, and of the first at or after it."""

    def recent(
        self,
        keys: Sequence[str] = (),
        *,
        after: str = "",
        before: str = "",
        outcome: str | None = None,
        most: int = 100,
    ) -> list[DecisionRecord]:
        """The newest records, or the first `after` an id, or the last `before` one; oldest first. Optionally only those
        of the clients with these keys, and of one outcome or `REJECTED`."""

    def counts(self, keys: Sequence[str] = (), *, since_us: int, until_us: int, width_us: int) -> list[Count]:
        """The numbers of requests by outcome and by slots of `width_us`."""

    def close(self) -> None: ...


class Count(NamedTuple):
    """The number of requests in one slot."""

    slot: int
    outcome: str
    requests: float
    degraded: float
    """Those that were decided without the store."""


def time_of(id: str) -> int:
    """The time of a record in microseconds, from its id; 0 for an invalid id."""
    try:
        return int(id[:14], 16)
    except ValueError:
        return 0


def open_sink(url: str) -> Sink:
    """The sink of a URL, not yet connected: "sqlite:///decisions.db", "jsonl:///var/log/decisions.jsonl",
    "logging://name", "kafka://host:9092/topic" or "clickhouse://user:password@host:8123/database"."""
    sink: Sink = _open(url, _SINKS, "sink")
    return sink


class MissingLog(InvalidConfiguration):
    """There is no decision log at the URL: nothing may have been written yet."""


class InvalidLog(InvalidConfiguration):
    """The file at the URL is not a decision log of this version."""


def open_reader(url: str) -> Reader:
    """The reader of a URL: "sqlite:///decisions.db" or "clickhouse://host:8123/database"."""
    reader: Reader = _open(url, _READERS, "decision log")
    return reader


def _open(url: str, openers: Mapping[str, Callable[[SplitResult, dict[str, str]], Any]], what: str) -> Any:
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        opener = openers.get(parts.scheme)
        if opener is None or "://" not in url:
            raise ValueError(suggest(parts.scheme, [*openers]) if parts.scheme else f"known are {', '.join(openers)}")
        return opener(parts, dict(given))
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRAS:
            raise
        name = (missing.name or "").partition(".")[0]
        raise InvalidConfiguration(
            f"a {what} of this kind needs the package {name!r}: pip install 'headgate[{_EXTRAS[name]}]'"
        ) from None
    except ValueError as error:
        kind = type(error) if isinstance(error, InvalidConfiguration) else InvalidConfiguration
        raise kind(f"cannot open the {what} {without_password(url)!r}: {error}") from None


def without_password(url: str) -> str:
    """A URL without credentials and settings."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}{separator}{rest}"


def _path(parts: SplitResult) -> str:
    """The file of sqlite:///decisions.db (relative) or sqlite:////var/lib/decisions.db (absolute)."""
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path:
        raise ValueError(f"write {parts.scheme}:///decisions.db, or {parts.scheme}:////var/lib/app/decisions.db")
    return path


def _number(settings: dict[str, str], name: str, default: float) -> float:
    text = settings.pop(name, None)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise ValueError(f"{name}={text} is not a number above 0")
    return number


def _reject_unknown(settings: dict[str, str], *known: str) -> None:
    for name in settings:
        raise ValueError(f"unknown setting {name!r}; {suggest(name, [*known]) if known else 'it has none'}")


# ------------------------------------------------------------------ by scheme


def _sqlite(parts: SplitResult, settings: dict[str, str]) -> Sink:
    from headgate.telemetry.decision_log.sinks.sqlite import SqliteSink

    days, size_mb = _number(settings, "days", 30), _number(settings, "size_mb", 1024)
    _reject_unknown(settings, "days", "size_mb")
    return SqliteSink(_path(parts), days=days, size_mb=size_mb)


def _jsonl(parts: SplitResult, settings: dict[str, str]) -> Sink:
    from headgate.telemetry.decision_log.sinks.jsonl import JsonLinesSink

    size_mb, files = _number(settings, "size_mb", 100), _number(settings, "files", 5)
    _reject_unknown(settings, "size_mb", "files")
    return JsonLinesSink(_path(parts), size_mb=size_mb, files=int(files))


def _logging(parts: SplitResult, settings: dict[str, str]) -> Sink:
    from headgate.telemetry.decision_log.sinks.logging_sink import LoggingSink

    level = settings.pop("level", "info")
    _reject_unknown(settings, "level")
    return LoggingSink(parts.netloc or "headgate.decisions", level=level)


def _kafka(parts: SplitResult, settings: dict[str, str]) -> Sink:
    from headgate.telemetry.decision_log.sinks.kafka import KafkaSink

    topic = unquote(parts.path.removeprefix("/"))
    if not parts.netloc or not topic:
        raise ValueError("write kafka://host:9092/topic")
    return KafkaSink(parts.netloc, topic, settings=settings)


def _clickhouse(parts: SplitResult, settings: dict[str, str]) -> Any:
    from headgate.telemetry.decision_log.sinks.clickhouse import ClickHouse, connector

    table, create = settings.pop("table", "decisions"), settings.pop("create", "yes")
    if create not in ("yes", "no"):
        raise ValueError(f"create={create} is neither yes nor no")
    return ClickHouse(connector(parts, settings), table=table, create=create == "yes")


def _sqlite_reader(parts: SplitResult, settings: dict[str, str]) -> Reader:
    from headgate.telemetry.decision_log.sinks.sqlite import SqliteReader

    settings.pop("days", None), settings.pop("size_mb", None)
    _reject_unknown(settings)
    return SqliteReader(_path(parts))


def _clickhouse_reader(parts: SplitResult, settings: dict[str, str]) -> Any:
    return _clickhouse(parts, {**settings, "create": "no"})  # readers create no tables


_SINKS: Final[Mapping[str, Callable[[SplitResult, dict[str, str]], Any]]] = {
    "sqlite": _sqlite,
    "jsonl": _jsonl,
    "logging": _logging,
    "kafka": _kafka,
    "clickhouse": _clickhouse,
    "clickhouses": _clickhouse,
    "chdb": _clickhouse,
}
_READERS: Final[Mapping[str, Callable[[SplitResult, dict[str, str]], Any]]] = {
    "sqlite": _sqlite_reader,
    "clickhouse": _clickhouse_reader,
    "clickhouses": _clickhouse_reader,
    "chdb": _clickhouse_reader,
}
_EXTRAS: Final = {"confluent_kafka": "kafka", "clickhouse_connect": "clickhouse", "chdb": "clickhouse"}
"""The extra to install for a missing package."""
