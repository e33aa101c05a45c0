"""Opens the database that a URL names: a file of SQLite's, or PostgreSQL."""

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
"""On which PostgreSQL tells of new versions."""

WRITES: Final = "headgate_writes"

LOCK_TIMEOUT_S: Final = 10.0
"""Seconds to wait for another writer. PostgreSQL itself gives up what takes longer."""
SILENCE_TIMEOUT_S: Final = 4.0
"""Seconds after which a server that says nothing at all is taken for hung, whatever TCP still hopes for."""
COOLDOWN_S: Final = 2.0
"""Seconds for which a server that was silent is not asked: nobody else need find out by waiting."""
IDLE_TRANSACTION_TIMEOUT_S: Final = 60.0
"""Seconds after which PostgreSQL ends a transaction in which nobody says anything: a client that the network has cut
off would keep all writers waiting until TCP notices, which may take hours."""


class ConfigUnavailable(HeadgateError):
    """The config store could not be reached, or it refused. The message says where it is: it is for operators."""

    discreet: Final = "the config store cannot be asked"
    """What everybody may read of it."""


class ConfigMissing(ConfigUnavailable):
    """There is no file at the config store's URL."""


def open_engine(url: str | URL, *, create: bool = True, keep: int = 0, journal: str = "wal") -> Engine:
    """An engine. What it opens is closed after use, so that nothing is left for a forked child; but for up to `keep`
    connections to PostgreSQL, where opening takes longer than most questions.

    With `create`, the first connection creates a missing file, with mode 0600. Later ones do not: an empty config store
    in place of one that was deleted would be wrong, not just unavailable. `journal` is SQLite's journal mode.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidConfiguration(
            "the config store's URL cannot be read; write it like sqlite:///headgate.db or postgresql://host/name"
        ) from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return _opened_postgresql(parsed.set(drivername="postgresql+psycopg"), keep)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidConfiguration(
            f"cannot keep a configuration in {parsed.drivername}; use sqlite:///headgate.db or postgresql://host/name"
        )
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidConfiguration("a config store in memory would be lost; name a file, like sqlite:///headgate.db")
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
            raise ConfigMissing(f"config store {display_url(engine)}: there is no such file")

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say, and not where the driver guesses
        set_journal_mode(connection, journal, timeout=LOCK_TIMEOUT_S)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes then may find that another one was faster: writers wait at once.
        immediate = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """A connection that sees one state of the database."""
    with _told(engine), engine.connect() as connection:
        yield connection


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction, the only one that writes now; undone if the block fails."""
    with _told(engine), engine.connect().execution_options(**{WRITES: True}) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            # One at a time, also while there are no tables yet; readers are not kept waiting.
            with _patiently(connection):
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('headgate config'))")
        file = _file_of(engine)
        yield connection
    if _file_of(engine) != file:
        raise ConfigUnavailable(
            f"config store {display_url(engine)}: the file was deleted or replaced during the change, which is lost"
        )


def _file_of(engine: Engine) -> FileId | None:
    """The identity of SQLite's file; None for PostgreSQL."""
    return file_id(str(engine.url.database)) if engine.dialect.name == "sqlite" else None


def default_decision_log_url(url: str) -> str | None:
    """The URL of the decision log that belongs to a config store in SQLite; None for any other database.

    >>> decision_log_beside("sqlite:///headgate.db")
    'sqlite:///headgate-decisions.db'
    """
    parsed = make_url(url)
    if not parsed.drivername.startswith("sqlite") or not parsed.database:
        return None
    file = Path(parsed.database)
    return f"sqlite:///{file.with_name(f'{file.stem}-decisions.db')}"


def display_url(engine: Engine) -> str:
    """The URL as it may be told: without its password."""
    return engine.url.render_as_string(hide_password=True).replace("+psycopg", "", 1)


def _opened_postgresql(url: URL, keep: int) -> Engine:
    patience = {
        "connect_timeout": str(int(SILENCE_TIMEOUT_S)),
        # A host that is gone does not say so: without these a listener would wait for hours.
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
            use_native_hstore=False,  # else each connection begins with a question about a type that we don't use
            connect_args={name: value for name, value in patience.items() if name not in url.query},
        )
    except ModuleNotFoundError as missing:
        if missing.name != "psycopg":
            raise
        raise InvalidConfiguration(
            "a config store in PostgreSQL needs the package 'psycopg': pip install 'headgate[postgres]'"
        ) from None
    driver: Any = engine.dialect.dbapi
    rest, hosts = _Cooldown(), BoundedResolver()
    connection_class = _watched(driver, rest)

    @event.listens_for(engine, "do_connect")
    def _connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
        if not rest.is_over():
            raise ConfigUnavailable(f"config store {display_url(engine)}: {SILENT}")
        try:
            made = connection_class.connect(*arguments, **hosts.found(options, SILENCE_TIMEOUT_S))
        except TimeoutError:
            rest.begin()
            raise driver.OperationalError(UNRESOLVED) from None
        except Unresolved as unknown:
            rest.end()
            raise driver.OperationalError(str(unknown)) from None
        except driver.errors.ConnectionTimeout:
            rest.begin()
            raise
        except driver.Error:
            rest.end()  # it has answered, or somebody did for it
            raise
        rest.end()
        return made

    bounds = {"statement_timeout": LOCK_TIMEOUT_S, "idle_in_transaction_session_timeout": IDLE_TRANSACTION_TIMEOUT_S}
    given = str(url.query.get("options", ""))
    set_here = "; ".join(f"SET {name} = '{most:.0f}s'" for name, most in bounds.items() if name not in given)

    @event.listens_for(engine, "connect")
    def _bound(connection: Any, _: Any) -> None:
        connection.autocommit = True
        connection.execute(set_here)  # not among the options, which poolers refuse
        connection.autocommit = False

    return engine


SILENT: Final = f"the server has said nothing for {SILENCE_TIMEOUT_S:.0f} seconds"
UNRESOLVED: Final = f"nobody has said for {SILENCE_TIMEOUT_S:.0f} seconds which address the server's name has"


class _Cooldown:
    """Whether a server that was silent is left alone; then one asks it again, and the others go by what it hears."""

    # Without a lock, which a fork could leave taken for ever: at worst two ask where one would do.

    def __init__(self) -> None:
        self._until: float | None = None

    def begin(self) -> None:
        self._until = time.monotonic() + COOLDOWN_S

    def is_over(self) -> bool:
        """Whether the caller may ask."""
        now, until = time.monotonic(), self._until
        if until is None or now < until:
            return until is None
        self._until = now + SILENCE_TIMEOUT_S + COOLDOWN_S
        return True

    def end(self) -> None:
        self._until = None


def _watched(driver: Any, rest: _Cooldown) -> Any:
    """The driver's connections, of which no wait is longer than a server may be silent."""

    class Watched(driver.Connection):  # type: ignore[misc] # the driver is imported by who needs it
        patience = SILENCE_TIMEOUT_S

        def wait(self, steps: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(_heard(steps, self.patience), *arguments, **options)
            except _ServerSilence:
                rest.begin()
                self.pgconn.finish()  # else what follows would wait again, to take back what was begun
                raise driver.OperationalError(SILENT) from None

    return Watched


class _ServerSilence(Exception):
    """A server has said nothing for too long."""


def _heard(steps: Any, patience: float) -> Generator[Any, Any, Any]:
    """The same steps of the driver, as long as the server goes on to say something."""
    last = time.monotonic()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last >= patience:
                raise _ServerSilence
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


@contextmanager
def _patiently(connection: Connection) -> Iterator[None]:
    """While another one may write: nobody says anything then, and that is right."""
    driver: Any = connection.connection.driver_connection
    driver.patience = LOCK_TIMEOUT_S + SILENCE_TIMEOUT_S
    try:
        yield
    finally:
        driver.patience = SILENCE_TIMEOUT_S


@contextmanager
def _told(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DataError, OverflowError) as error:
        # A number or a letter that it cannot hold. Whoever takes input refuses such, and says which.
        raise InvalidInput("there is a number or a letter in this that the config store cannot keep") from error
    except PoolTimeout as error:
        raise ConfigUnavailable(f"config store {display_url(engine)}: all connections are taken") from error
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigUnavailable(f"config store {display_url(engine)}: {reason}") from error
