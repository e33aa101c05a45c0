"""Database engines and transactions of the config store, on SQLite or PostgreSQL."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool

from headgate._sqlite import FileId, create_file, file_id, set_journal_mode
from headgate.control.config.resolver import BoundedResolver, Unresolved
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from sqlalchemy import Connection, Engine

__all__ = [
    "NOTIFY_CHANNEL",
    "ConfigMissing",
    "ConfigUnavailable",
    "default_decision_log_url",
    "display_url",
    "open_engine",
    "read_transaction",
    "write_transaction",
]

NOTIFY_CHANNEL: Final = "headgate_config"
"""The PostgreSQL channel for new versions."""

WRITES: Final = "headgate_writes"

LOCK_TIMEOUT_S: Final = 10.0
"""Limit for waiting for another writer, and for any statement on PostgreSQL."""
SILENCE_TIMEOUT_S: Final = 4.0
"""Time without a response after which a server is considered hung, regardless of TCP."""
COOLDOWN_S: Final = 2.0
"""Time for which a hung server is not contacted, so that only one caller waits for it."""
IDLE_TRANSACTION_TIMEOUT_S: Final = 60.0
"""Time after which PostgreSQL aborts an idle transaction: a disconnected client would block all writers until TCP
notices, which may take hours."""


class ConfigUnavailable(HeadgateError):
    """The config store cannot be reached or has failed. The message contains its URL and is meant for operators."""

    discreet: Final = "the config store is unavailable"
    """A message without internals, for any reader."""


class ConfigMissing(ConfigUnavailable):
    """The file of a SQLite config store does not exist."""


def open_engine(url: str | URL, *, create: bool = True, keep: int = 0, journal: str = "wal") -> Engine:
    """An engine for a database URL.

    Connections are closed after use, so that forked children inherit none; on PostgreSQL, where connecting takes longer
    than most queries, up to `keep` stay open. With `create`, the first connection creates a missing SQLite file with
    mode 0600. Later ones do not: an empty store in place of a deleted one would be wrong, not just unavailable.
    `journal` is SQLite's journal mode.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidConfiguration(
            "invalid config store URL; write it like sqlite:///headgate.db or postgresql://host/name"
        ) from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return _open_postgresql(parsed.set(drivername="postgresql+psycopg"), keep)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidConfiguration(
            f"unsupported config store database {parsed.drivername}; use sqlite:///headgate.db or postgresql://host/name"
        )
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidConfiguration("the config store cannot be in memory; name a file, like sqlite:///headgate.db")
    file = Path(parsed.database)
    engine = create_engine(parsed, poolclass=NullPool, hide_parameters=True, connect_args={"timeout": LOCK_TIMEOUT_S})

    may_create = create

    @event.listens_for(engine, "do_connect")
    def _find(*_: Any) -> None:
        nonlocal may_create
        if may_create:
            create_file(file)
            may_create = False
        elif not file.exists():
            raise ConfigMissing(f"config store {display_url(engine)}: file does not exist")

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # begin transactions explicitly
        set_journal_mode(connection, journal, timeout=LOCK_TIMEOUT_S)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads before it writes could not be upgraded: writers take the lock first.
        immediate = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """A connection with a consistent view of the database."""
    with _translate_errors(engine), engine.connect() as connection:
        yield connection


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """The only writing transaction; rolled back if the block raises."""
    with (
        _translate_errors(engine),
        engine.connect().execution_options(**{WRITES: True}) as connection,
        connection.begin(),
    ):
        if engine.dialect.name == "postgresql":
            # Serializes writers even before the tables exist, and does not block readers.
            with _lock_timeout(connection):
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('headgate config'))")
        file = _file_of(engine)
        yield connection
    if _file_of(engine) != file:
        raise ConfigUnavailable(
            f"config store {display_url(engine)}: the file was deleted or replaced during the change, which was lost"
        )


def _file_of(engine: Engine) -> FileId | None:
    """The identity of SQLite's file; None for PostgreSQL."""
    return file_id(str(engine.url.database)) if engine.dialect.name == "sqlite" else None


def default_decision_log_url(url: str) -> str | None:
    """The URL of the decision log next to a SQLite config store; None for other databases.

    >>> default_decision_log_url("sqlite:///headgate.db")
    'sqlite:///headgate-decisions.db'
    """
    parsed = make_url(url)
    if not parsed.drivername.startswith("sqlite") or not parsed.database:
        return None
    file = Path(parsed.database)
    return f"sqlite:///{file.with_name(f'{file.stem}-decisions.db')}"


def display_url(engine: Engine) -> str:
    """The URL without its password."""
    return engine.url.render_as_string(hide_password=True).replace("+psycopg", "", 1)


def _open_postgresql(url: URL, keep: int) -> Engine:
    timeouts = {
        "connect_timeout": str(int(SILENCE_TIMEOUT_S)),
        # Without keepalives, a listener would wait for hours for a host that is gone.
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "20000",
    }
    pool: dict[str, Any] = {"poolclass": NullPool}
    if keep:
        pool = {"pool_size": keep, "max_overflow": 10, "pool_pre_ping": True, "pool_timeout": SILENCE_TIMEOUT_S}
    try:
        engine = create_engine(
            url,
            **pool,
            hide_parameters=True,
            use_native_hstore=False,  # avoids a query per connection for an unused type
            connect_args={name: value for name, value in timeouts.items() if name not in url.query},
        )
    except ModuleNotFoundError as missing:
        if missing.name != "psycopg":
            raise
        raise InvalidConfiguration(
            "a config store in PostgreSQL needs the package 'psycopg': pip install 'headgate[postgres]'"
        ) from None
    driver: Any = engine.dialect.dbapi
    cooldown, resolver = _Cooldown(), BoundedResolver()
    connection_class = _with_silence_timeout(driver, cooldown)

    @event.listens_for(engine, "do_connect")
    def _connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
        if not cooldown.is_over():
            raise ConfigUnavailable(f"config store {display_url(engine)}: {SILENT}")
        try:
            connection = connection_class.connect(*arguments, **resolver.resolve(options, SILENCE_TIMEOUT_S))
        except TimeoutError:
            cooldown.begin()
            raise driver.OperationalError(UNRESOLVED) from None
        except Unresolved as unknown:
            cooldown.end()
            raise driver.OperationalError(str(unknown)) from None
        except driver.errors.ConnectionTimeout:
            cooldown.begin()
            raise
        except driver.Error:
            cooldown.end()  # the server has responded
            raise
        cooldown.end()
        return connection

    bounds = {"statement_timeout": LOCK_TIMEOUT_S, "idle_in_transaction_session_timeout": IDLE_TRANSACTION_TIMEOUT_S}
    given = str(url.query.get("options", ""))
    settings = "; ".join(f"SET {name} = '{most:.0f}s'" for name, most in bounds.items() if name not in given)

    @event.listens_for(engine, "connect")
    def _bound(connection: Any, _: Any) -> None:
        connection.autocommit = True
        connection.execute(settings)  # connection poolers reject these as startup options
        connection.autocommit = False

    return engine


SILENT: Final = f"no response from the server for {SILENCE_TIMEOUT_S:.0f} seconds"
UNRESOLVED: Final = f"the name of the server was not resolved within {SILENCE_TIMEOUT_S:.0f} seconds"


class _Cooldown:
    """Keeps callers from a hung server for a while; after that, one of them probes it.

    Has no lock, which a fork could leave locked: at worst, two callers probe.
    """

    def __init__(self) -> None:
        self._until: float | None = None

    def begin(self) -> None:
        self._until = time.monotonic() + COOLDOWN_S

    def is_over(self) -> bool:
        """True if the caller may connect."""
        now, until = time.monotonic(), self._until
        if until is None or now < until:
            return until is None
        self._until = now + SILENCE_TIMEOUT_S + COOLDOWN_S
        return True

    def end(self) -> None:
        self._until = None


def _with_silence_timeout(driver: Any, cooldown: _Cooldown) -> Any:
    """A connection class that fails when the server does not respond for too long."""

    class TimedConnection(driver.Connection):  # type: ignore[misc] # the driver is optional
        silence_timeout_s = SILENCE_TIMEOUT_S

        def wait(self, steps: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(_limit_silence(steps, self.silence_timeout_s), *arguments, **options)
            except _ServerSilence:
                cooldown.begin()
                self.pgconn.finish()  # otherwise the rollback would wait again
                raise driver.OperationalError(SILENT) from None

    return TimedConnection


class _ServerSilence(Exception):
    """The server has not responded for too long."""


def _limit_silence(steps: Any, timeout_s: float) -> Generator[Any, Any, Any]:
    """Run the driver's I/O generator; raise _ServerSilence if nothing is received for `timeout_s`."""
    last = time.monotonic()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last >= timeout_s:
                raise _ServerSilence
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


@contextmanager
def _lock_timeout(connection: Connection) -> Iterator[None]:
    """Allow for silence while another writer holds the lock."""
    driver: Any = connection.connection.driver_connection
    driver.silence_timeout_s = LOCK_TIMEOUT_S + SILENCE_TIMEOUT_S
    try:
        yield
    finally:
        driver.silence_timeout_s = SILENCE_TIMEOUT_S


@contextmanager
def _translate_errors(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DataError, OverflowError) as error:
        # Values are validated where they are entered; this is the last resort.
        raise InvalidInput(
            "the change contains a number or character that the config store cannot represent"
        ) from error
    except PoolTimeout as error:
        raise ConfigUnavailable(f"config store {display_url(engine)}: all connections are in use") from error
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigUnavailable(f"config store {display_url(engine)}: {reason}") from error
