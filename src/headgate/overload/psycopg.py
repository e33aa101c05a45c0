"""psycopg_pool: connection pools with a guard."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import name_missing_extra

with name_missing_extra("headgate.overload.psycopg needs", "postgres", "psycopg_pool"):
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout, TooManyRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from headgate.overload.guard import Guard, PrioritySource
    from headgate.overload.load_shedder import Permit

__all__ = ["AsyncGuardedPool", "GuardedPool"]

POOL_TIMEOUTS: Final = (PoolTimeout, TooManyRequests)
"""Raised to calls that got no connection: the database is slower than the limit permits."""


class _GuardedCalls:
    """The permits of the connections that are in use, by connection."""

    def __init__(self, *args: Any, guard: Guard, priority: PrioritySource = "normal", **options: Any) -> None:
        self.guard, self._priority = guard, priority
        self._permits: dict[int, Permit] = {}
        super().__init__(*args, **options)

    def _end_call(self, connection: Any, error: BaseException | None = None) -> None:
        permit = self._permits.pop(id(connection), None)
        if permit is not None:
            self.guard.release(permit, error)


class GuardedPool(_GuardedCalls, ConnectionPool[Any]):
    """A `ConnectionPool` whose `guard` admits or sheds calls before they wait for a connection.

    A call lasts until the connection is returned. The other arguments are those of `ConnectionPool`.
    """

    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[Any]:
        with super().connection(timeout) as connection:
            try:
                yield connection
            except BaseException as error:
                self._end_call(connection, error)
                raise

    def getconn(self, timeout: float | None = None) -> Any:
        permit = self.guard.acquire(self._priority)
        try:
            connection = super().getconn(timeout)
        except BaseException as error:
            self.guard.release(permit, error, drops=POOL_TIMEOUTS)
            raise
        self._permits[id(connection)] = permit
        return connection

    def putconn(self, conn: Any) -> None:
        self._end_call(conn)  # first, as another thread may receive the connection at once
        super().putconn(conn)


class AsyncGuardedPool(_GuardedCalls, AsyncConnectionPool[Any]):
    """An `AsyncConnectionPool` whose `guard` admits or sheds calls before they wait for a connection.

    A call lasts until the connection is returned. The other arguments are those of `AsyncConnectionPool`.
    """

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[Any]:
        async with super().connection(timeout) as connection:
            try:
                yield connection
            except BaseException as error:
                self._end_call(connection, error)
                raise

    async def getconn(self, timeout: float | None = None) -> Any:
        permit = self.guard.acquire(self._priority)
        try:
            connection = await super().getconn(timeout)
        except BaseException as error:
            self.guard.release(permit, error, drops=POOL_TIMEOUTS)
            raise
        self._permits[id(connection)] = permit
        return connection

    async def putconn(self, conn: Any) -> None:
        self._end_call(conn)
        await super().putconn(conn)
