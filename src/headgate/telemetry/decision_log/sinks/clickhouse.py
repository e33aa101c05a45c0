"""The decision log in ClickHouse, written directly or through Kafka. The tables are in clickhouse.sql."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from clickhouse_connect import get_client

from headgate.telemetry.decision_log.record import REJECTIONS, DecisionRecord
from headgate.telemetry.decision_log.sinks import REJECTED, ConnectedSink, Count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from urllib.parse import SplitResult

__all__ = ["ClickHouse", "open_reader", "open_sink", "statements"]

TIMEOUT_S: Final = 10
COLUMNS: Final = ", ".join(f'"{name}"' for name in DecisionRecord._fields)
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,100}")


class ClickHouse(ConnectedSink):
    """Sink and reader of a table, which is created if it is missing.

    A batch that is written again is recognised by its ids: the table is a ReplacingMergeTree.
    """

    batch = 10_000
    every = 1.0
    """ClickHouse prefers few and large inserts."""

    def __init__(self, connect: Callable[[], Any], *, table: str = "decisions", create: bool = True) -> None:
        super().__init__()
        if not _TABLE.fullmatch(table):
            raise ValueError(f"table={table} is not a valid name; use letters, digits and underscores")
        self._connect = connect
        self._table = table
        self._creates = create

    def write(self, batch: Sequence[DecisionRecord]) -> None:
        rows = [[*record[:-1], record.as_row()[-1]] for record in batch]
        self._connected().insert(self._table, rows, column_names=DecisionRecord._fields)

    def find(self, keys: Sequence[str], *, since_us: int, until_us: int, most: int) -> list[DecisionRecord]:
        # FINAL: duplicates are removed also before ClickHouse has merged them.
        query = (
            f"SELECT {COLUMNS} FROM {self._table} FINAL WHERE hasAny(clients, {{keys:Array(String)}}) "
            "AND at_us >= {since:Int64} AND at_us < {until:Int64} ORDER BY id LIMIT {most:UInt32}"
        )
        given = {"keys": [*keys], "since": since_us, "until": until_us, "most": most}
        return [DecisionRecord.from_row(row) for row in self._rows(query, given)]

    def nearest(self, keys: Sequence[str], *, at_us: int) -> tuple[int | None, int | None]:
        query = (
            "SELECT maxOrNullIf(at_us, at_us < {at:Int64}), minOrNullIf(at_us, at_us >= {at:Int64}) "
            f"FROM {self._table} WHERE hasAny(clients, {{keys:Array(String)}}) AND outcome IN {REJECTIONS}"
        )
        before, after = self._rows(query, {"keys": [*keys], "at": at_us})[0]
        return before, after

    def recent(
        self, keys: Sequence[str] = (), *, after: str = "", before: str = "", outcome: str | None = None, most: int
    ) -> list[DecisionRecord]:
        tests = ["id > {after:String}"]
        if before:
            tests.append("id < {before:String} AND at_us <= {until:Int64}")
        if keys:
            tests.append("hasAny(clients, {keys:Array(String)})")
        if after:  # ids are ordered by time, and the index is by time
            tests.append("at_us >= {since:Int64}")
        if outcome is not None:
            tests.append(f"outcome IN {REJECTIONS}" if outcome == REJECTED else "outcome = {outcome:String}")
        order = "ASC" if after else "DESC"
        query = (
            f"SELECT {COLUMNS} FROM {self._table} FINAL WHERE {' AND '.join(tests)} "
            f"ORDER BY at_us {order}, id {order} LIMIT {{most:UInt32}}"
        )
        times = {"since": _time_of(after), "until": _time_of(before)}
        given = {"keys": [*keys], "after": after, "before": before, "outcome": outcome or "", "most": most, **times}
        return sorted([DecisionRecord.from_row(row) for row in self._rows(query, given)], key=lambda record: record.id)

    def counts(self, keys: Sequence[str] = (), *, since_us: int, until_us: int, width_us: int) -> list[Count]:
        of_keys = "AND hasAny(clients, {keys:Array(String)})" if keys else ""
        query = (
            "SELECT intDiv(at_us - {since:Int64}, {width:Int64}) AS slot, toString(outcome), sum(weight), "
            f"sumIf(weight, degraded != '') FROM {self._table} FINAL "
            f"WHERE at_us >= {{since:Int64}} AND at_us < {{until:Int64}} {of_keys} "
            "GROUP BY slot, outcome ORDER BY slot, outcome"
        )
        given = {"keys": [*keys], "since": since_us, "until": until_us, "width": width_us}
        return [Count(*row) for row in self._rows(query, given)]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> Any:
        if self._connection is None:
            client = self._connect()
            if self._creates:
                for statement in statements("clickhouse.sql", table=self._table):
                    client.command(statement)
            self._connection = client
        return self._connection

    def _rows(self, query: str, given: dict[str, Any]) -> Any:
        return self._connected().query(query, parameters=given).result_rows


def open_sink(parts: SplitResult, settings: dict[str, Any]) -> ClickHouse:
    """The table of clickhouse://host:8123/database, clickhouses:// with TLS, or chdb:///directory for the engine in
    this process. Other settings are those of clickhouse_connect.get_client."""
    table, create = settings.pop("table", "decisions"), settings.pop("create", "yes")
    if create not in ("yes", "no"):
        raise ValueError(f"create={create} is neither yes nor no")
    place = unquote(parts.path.removeprefix("/"))
    options = {**settings, "interface": "chdb", "path": place or None}
    if parts.scheme != "chdb":
        if not parts.hostname:
            raise ValueError("write clickhouse://user:password@host:8123/database")
        is_secure = parts.scheme == "clickhouses"
        options = {
            "connect_timeout": TIMEOUT_S,
            "send_receive_timeout": TIMEOUT_S,
            **settings,
            "host": parts.hostname,
            "port": parts.port or (8443 if is_secure else 8123),
            "username": unquote(parts.username or "default"),
            "password": unquote(parts.password or ""),
            "database": place or "default",
            "interface": "https" if is_secure else "http",
            "autogenerate_session_id": False,  # with a session, a retry would find it still busy
        }
    return ClickHouse(lambda: get_client(**options), table=table, create=create == "yes")


def open_reader(parts: SplitResult, settings: dict[str, Any]) -> ClickHouse:
    return open_sink(parts, {**settings, "create": "no"})  # readers create no tables


def _time_of(id: str) -> int:
    """The time of a record in microseconds, from its id; 0 for an invalid id."""
    try:
        return int(id[:14], 16)
    except ValueError:
        return 0


def statements(file: str, *, table: str = "decisions") -> list[str]:
    """The statements of a file in this package, for a table name."""
    text = (files("headgate.telemetry.decision_log.sinks") / file).read_text("utf-8")
    without_comments = re.sub(r"--.*", "", text)
    named = re.sub(r"\bdecisions(?=\b|_)", table, without_comments)
    return [statement.strip() for statement in named.split(";") if statement.strip()]
