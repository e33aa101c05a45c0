"""Database engines and transactions of the config store, on SQLite or PostgreSQL.

Neither the system nor the driver resolves names with a timeout, so `_BoundedResolver` does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool

from headgate._sqlite import create_file, file_id, set_journal_mode
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

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

NOTIFY_CHANNEL: Final = "headgate_config"  # the PostgreSQL channel for new versions
WRITES: Final = "headgate_writes"
NAME: Final = "headgate_name"
FILE: Final = "headgate_file"
EXAMPLE_URLS: Final = "sqlite:///headgate.db or postgresql://host/name"
DEFAULT_PORT: Final = "5432"
SOCKET_PREFIXES: Final = ("/", "@")  # prefixes of Unix socket paths

LOCK_TIMEOUT_S: Final = 10.0  # limit for waiting for another writer, and for any statement on PostgreSQL
SILENCE_TIMEOUT_S: Final = 4.0  # time without a response after which a server is considered hung, regardless of TCP
COOLDOWN_S: Final = 2.0  # time for which a hung server is not contacted, so that only one caller waits for it
IDLE_TRANSACTION_TIMEOUT_S: Final = 60.0
"""Time after which PostgreSQL aborts an idle transaction: a disconnected client would block all writers until TCP
notices, which may take hours."""


class ConfigUnavailable(HeadgateError):
    """The config store cannot be reached or has failed. The message contains its URL and is meant for operators."""

    discreet: Final = "the config store is unavailable"
    """A message without internals, for any reader."""


class ConfigMissing(ConfigUnavailable):
    """The file of a SQLite config store does not exist."""


def open_engine(
    url: str | URL,
    *,
    create: bool = True,
    keep: int = 0,
    keep_files: int = 0,
    journal: str = "wal",
    name: str = "config store",
) -> Engine:
    """An engine for a database URL.

    Connections are closed after use, so that forked children inherit none; on PostgreSQL, where connecting takes longer
    than most queries, up to `keep` stay open, and up to `keep_files` on SQLite. With `create`, the first connection
    creates a missing SQLite file with mode 0600. Later ones do not: an empty store in place of a deleted one would be
    wrong, not just unavailable. `journal` is SQLite's journal mode, and `name` what error messages call the database.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidConfiguration(f"invalid {name} URL; write it like {EXAMPLE_URLS}") from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return _open_postgresql(parsed.set(drivername="postgresql+psycopg"), keep, name)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidConfiguration(f"unsupported {name} database {parsed.drivername}; use {EXAMPLE_URLS}")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidConfiguration(f"the {name} cannot be in memory; name a file, like sqlite:///headgate.db")
    file = Path(parsed.database)
    pool: dict[str, Any] = {"pool_size": keep_files, "max_overflow": 8} if keep_files else {"poolclass": NullPool}
    connect_args = {"timeout": LOCK_TIMEOUT_S}
    engine = create_engine(
        parsed, **pool, hide_parameters=True, connect_args=connect_args, execution_options={NAME: name}
    )
    may_create = create

    @event.listens_for(engine, "do_connect")
    def _find(*_: Any) -> None:
        nonlocal may_create
        if may_create:
            may_create = create_file(file) is None  # as long as that fails, for example for want of a directory
        elif not file.exists():
            raise ConfigMissing(f"{_place(engine)}: file does not exist")

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # begin transactions explicitly
        set_journal_mode(connection, journal, timeout=LOCK_TIMEOUT_S)
        record.info[FILE] = file_id(file)

    @event.listens_for(engine, "checkout")
    def _check_file(_: Any, record: Any, __: Any) -> None:
        if file_id(file) != record.info[FILE]:  # deleted or replaced while the connection was kept
            raise DisconnectionError

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
def write_transaction(engine: Engine, *, lock: str = "headgate config") -> Iterator[Connection]:
    """The only writing transaction; rolled back if the block raises. On PostgreSQL, only among those of one `lock`."""
    is_sqlite = engine.dialect.name == "sqlite"
    options = {WRITES: True}
    with _translate_errors(engine), engine.connect().execution_options(**options) as connection, connection.begin():
        if not is_sqlite:
            _lock_writers(connection, lock)
        file = file_id(str(engine.url.database)) if is_sqlite else None
        yield connection
    if is_sqlite and file_id(str(engine.url.database)) != file:
        problem = "the file was deleted or replaced during the change, which was lost"
        raise ConfigUnavailable(f"{_place(engine)}: {problem}")


def _lock_writers(connection: Connection, name: str) -> None:
    """Serialize writers on PostgreSQL, even before the tables exist; does not block readers."""
    driver: Any = connection.connection.driver_connection
    driver.silence_timeout_s = LOCK_TIMEOUT_S + SILENCE_TIMEOUT_S  # while another writer holds the lock
    try:
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext(%s))", (name,))
    finally:
        driver.silence_timeout_s = SILENCE_TIMEOUT_S


def default_decision_log_url(url: str) -> str | None:
    """The URL of the decision log next to a SQLite config store; None for other databases.

    >>> default_decision_log_url("sqlite:///headgate.db")
    'sqlite:///headgate-decisions.db'
    """
    parsed = make_url(url)
    file = Path(parsed.database or "")
    is_file = parsed.drivername.startswith("sqlite") and file.name
    return f"sqlite:///{file.with_name(f'{file.stem}-decisions.db')}" if is_file else None


def _place(engine: Engine) -> str:
    return f"{engine.get_execution_options()[NAME]} {display_url(engine)}"


def display_url(engine: Engine) -> str:
    """The URL without its password."""
    return engine.url.render_as_string(hide_password=True).replace("+psycopg", "", 1)


def _open_postgresql(url: URL, keep: int, name: str) -> Engine:
    # Without keepalives, a listener would wait for hours for a host that is gone.
    keepalives = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
    timeouts = {"connect_timeout": str(int(SILENCE_TIMEOUT_S)), **keepalives, "tcp_user_timeout": "20000"}
    pool: dict[str, Any] = {"poolclass": NullPool}
    if keep:
        pool = {"pool_size": keep, "max_overflow": 10, "pool_pre_ping": True, "pool_timeout": SILENCE_TIMEOUT_S}
    try:
        # The type hstore is not used, and would cost a query per connection.
        connect_args = {name: value for name, value in timeouts.items() if name not in url.query}
        engine = create_engine(
            url,
            **pool,
            hide_parameters=True,
            use_native_hstore=False,
            connect_args=connect_args,
            execution_options={NAME: name},
        )
    except ModuleNotFoundError as missing:
        if missing.name != "psycopg":
            raise
        problem = f"a {name} in PostgreSQL needs the package 'psycopg': pip install 'headgate[postgres]'"
        raise InvalidConfiguration(problem) from None
    driver: Any = engine.dialect.dbapi
    cooldown, resolver = _Cooldown(), _BoundedResolver()
    connection_class = _with_silence_timeout(driver, cooldown)

    @event.listens_for(engine, "do_connect")
    def _connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
        if not cooldown.is_over():
            raise ConfigUnavailable(f"{_place(engine)}: {SILENT}")
        try:
            connection = connection_class.connect(*arguments, **resolver.resolve(options, SILENCE_TIMEOUT_S))
        except (TimeoutError, driver.errors.ConnectionTimeout) as error:
            cooldown.begin()
            raise driver.OperationalError(UNRESOLVED) if isinstance(error, TimeoutError) else error from None
        except (_Unresolved, driver.Error) as error:
            cooldown.end()  # the server, or the resolver, has responded
            raise driver.OperationalError(str(error)) if isinstance(error, _Unresolved) else error from None
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
            except TimeoutError:
                cooldown.begin()
                self.pgconn.finish()  # otherwise the rollback would wait again
                raise driver.OperationalError(SILENT) from None

    return TimedConnection


def _limit_silence(steps: Any, timeout_s: float) -> Generator[Any, Any, Any]:
    """Run the driver's I/O generator; raise TimeoutError if nothing is received for `timeout_s`."""
    last = time.monotonic()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last >= timeout_s:
                raise TimeoutError
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


@contextmanager
def _translate_errors(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DataError, OverflowError) as error:
        # Values are validated where they are entered; this is the last resort.
        problem = "the change contains a number or character that the database cannot represent"
        raise InvalidInput(problem) from error
    except PoolTimeout as error:
        raise ConfigUnavailable(f"{_place(engine)}: all connections are in use") from error
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigUnavailable(f"{_place(engine)}: {reason}") from error


class _Unresolved(Exception):
    """None of the hosts has an address."""


class _BoundedResolver:
    """Resolves names in daemon threads; concurrent callers share a lookup.

    Has no lock, which a fork could leave locked: at worst, a name is looked up twice.
    """

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, str], _Lookup] = {}

    def resolve(self, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Connection options with the addresses of all host names.

        Raises TimeoutError if resolution takes longer than `seconds`, and _Unresolved if all names are unknown.
        """
        given = str(options.get("host") or os.environ.get("PGHOST") or "")
        is_resolved = options.get("hostaddr") or os.environ.get("PGHOSTADDR")
        hosts = given.split(",")
        ports = str(options.get("port") or os.environ.get("PGPORT") or "").split(",")
        if is_resolved or not any(map(_is_name, hosts)) or len(ports) not in (1, len(hosts)):
            return dict(options)
        end = time.monotonic() + seconds
        pairs = list(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=True))
        lookups = {pair: self._lookup(*pair) for pair in pairs if _is_name(pair[0])}  # in parallel
        endpoints: list[tuple[str, str, str]] = []
        for host, port in pairs:
            if _is_name(host):
                lookups[host, port].join(max(0.0, end - time.monotonic()))
                endpoints += [(host, address, port) for address in lookups[host, port].addresses]
            else:
                endpoints.append((host, "" if host.startswith(SOCKET_PREFIXES) else host, port))
        if not endpoints:
            failures = [each.failure for each in lookups.values()]
            if None in failures:
                raise TimeoutError
            raise _Unresolved(f"failed to resolve host {given!r}: {failures[-1]}")
        names, addresses, numbers = (",".join(each) for each in zip(*endpoints, strict=True))
        return {**options, "host": names, "hostaddr": addresses, **({"port": numbers} if any(ports) else {})}

    def _lookup(self, host: str, port: str) -> _Lookup:
        lookup = self._lookups.get((host, port))
        if lookup is None or not lookup.is_alive():  # earlier results may be outdated
            lookup = self._lookups[host, port] = _Lookup(host, port)
        return lookup


class _Lookup(threading.Thread):
    """A lookup in progress or done."""

    def __init__(self, host: str, port: str) -> None:
        super().__init__(name=f"headgate-resolve {host}", daemon=True)
        self.addresses: list[str] = []
        self.failure: OSError | None = None
        self._place = host, port or DEFAULT_PORT
        self.start()

    def run(self) -> None:
        try:
            found = socket.getaddrinfo(*self._place, proto=socket.IPPROTO_TCP, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            self.failure = error if isinstance(error, OSError) else OSError(str(error))
        else:
            self.addresses = [str(each[4][0]) for each in found]


def _is_name(host: str) -> bool:
    if not host or host.startswith(SOCKET_PREFIXES):
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
