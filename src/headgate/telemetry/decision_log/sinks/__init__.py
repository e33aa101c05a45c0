"""Sinks and readers of the decision log, by URL."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headgate._fork import reinit_after_fork
from headgate._limit_syntax import suggest
from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = ["REJECTED", "Count", "InvalidLog", "MissingLog", "Reader", "Sink", "open_reader", "open_sink"]

REJECTED: Final = "rejected"
"""Stands for all outcomes that are rejections."""

_MODULES: Final = {
    "sqlite": "sqlite",
    "jsonl": "text",
    "logging": "text",
    "kafka": "kafka",
    **dict.fromkeys(("clickhouse", "clickhouses", "chdb"), "clickhouse"),
}
"""The modules of schemes; each has functions `open_sink` and, if it can be read, `open_reader`."""
_READABLE: Final = ("sqlite", "clickhouse", "clickhouses", "chdb")
_EXTRAS: Final = {"confluent_kafka": "kafka", "clickhouse_connect": "clickhouse", "chdb": "clickhouse"}
"""The extra to install for a missing package."""


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
        self, keys: Sequence[str] = (), *, after: str = "", before: str = "", outcome: str | None = None, most: int
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


class ConnectedSink:
    """Base of sinks with a connection, which belongs to the process that opened it."""

    def __init__(self) -> None:
        self._connection: Any = None
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Drop the parent's connection, which is neither used nor closed here."""
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None


_inherited: list[Any] = []
"""Connections of parents, kept alive so that they are never closed."""


class MissingLog(InvalidConfiguration):
    """There is no decision log at the URL: nothing may have been written yet."""


class InvalidLog(InvalidConfiguration):
    """The file at the URL is not a decision log of this version."""


def open_sink(url: str) -> Sink:
    """The sink of a URL, not yet connected: "sqlite:///decisions.db", "jsonl:///var/log/decisions.jsonl",
    "logging://name", "kafka://host:9092/topic" or "clickhouse://user:password@host:8123/database"."""
    sink: Sink = _open(url, [*_MODULES], "sink", "open_sink")
    return sink


def open_reader(url: str) -> Reader:
    """The reader of a URL: "sqlite:///decisions.db" or "clickhouse://host:8123/database"."""
    reader: Reader = _open(url, [*_READABLE], "decision log", "open_reader")
    return reader


def _open(url: str, schemes: list[str], what: str, function: str) -> Any:
    try:
        parts = urlsplit(url)
        settings = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        if parts.scheme not in schemes or "://" not in url:
            raise ValueError(suggest(parts.scheme, schemes) if parts.scheme else f"known are {', '.join(schemes)}")
        return getattr(import_module(f"{__name__}.{_MODULES[parts.scheme]}"), function)(parts, dict(settings))
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        remedy = f"needs the package {name!r}: pip install 'headgate[{_EXTRAS[name]}]'"
        raise InvalidConfiguration(f"a {what} of this kind {remedy}") from None
    except ValueError as error:
        kind = type(error) if isinstance(error, InvalidConfiguration) else InvalidConfiguration
        raise kind(f"cannot open the {what} {without_password(url)!r}: {error}") from None


def without_password(url: str) -> str:
    """A URL without credentials and settings."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}{separator}{rest}"


def check_known(settings: dict[str, str], *known: str) -> None:
    """Raise ValueError for a setting that is not known."""
    for name in settings.keys() - {*known}:
        raise ValueError(f"unknown setting {name!r}; {suggest(name, [*known])}")


def parse_file(parts: SplitResult, settings: dict[str, str], *known: str) -> tuple[str, dict[str, float]]:
    """The file of sqlite:///decisions.db (relative) or sqlite:////var/lib/decisions.db (absolute), and its settings,
    which are numbers above 0."""
    check_known(settings, *known)
    numbers: dict[str, float] = {}
    for name, text in settings.items():
        with suppress(ValueError):
            numbers[name] = float(text)
        if not numbers.get(name, 0) > 0:
            raise ValueError(f"{name}={text} is not a number above 0")
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path:
        raise ValueError(f"write {parts.scheme}:///decisions.db, or {parts.scheme}:////var/lib/app/decisions.db")
    return path, numbers
