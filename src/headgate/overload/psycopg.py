"""psycopg_pool: connection pools with a guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.errors import name_missing_extra

with name_missing_extra("headgate.overload.psycopg needs", "postgres", "psycopg_pool"):
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout, TooManyRequests

if TYPE_CHECKING:
    from headgate.overload.guard import Guard, PrioritySource
    from headgate.overload.load_shedder import Permit

__all__ = ["AsyncGuardedPool", "GuardedPool"]

WAITED_IN_VAIN = PoolTimeout, TooManyRequests


class GuardedPool(ConnectionPool[Any]):
    """A `ConnectionPool` whose `guard` admits or sheds calls before they wait for a connection.

    A call lasts until the connection is returned. The other arguments are those of `ConnectionPool`.
    """

    def __init__(self, *args: Any, guard: Guard, priority: PrioritySource = "normal", **options: Any) -> None:
        self.guard, self._priority = guard, priority
        self._permits: dict[int, Permit] = {}
        super().__init__(*args, **options)

    def getconn(self, timeout: float | None = None) -> Any:
        permit = self.guard.acquire(self._priority)
        try:
            connection = super().getconn(timeout)
        except BaseException as error:
            _release_failed(self.guard, permit, error)
            raise
        self._permits[id(connection)] = permit
        return connection

    def putconn(self, conn: Any) -> None:
        permit = self._permits.pop(id(conn), None)
        try:
            super().putconn(conn)
        finally:
            if permit is not None:
                self.guard.release(permit)


class AsyncGuardedPool(AsyncConnectionPool[Any]):
    """An `AsyncConnectionPool` whose `guard` admits or sheds calls before they wait for a connection.

    A call lasts until the connection is returned. The other arguments are those of `AsyncConnectionPool`.
    """

    def __init__(self, *args: Any, guard: Guard, priority: PrioritySource = "normal", **options: Any) -> None:
        self.guard, self._priority = guard, priority
        self._permits: dict[int, Permit] = {}
        super().__init__(*args, **options)

    async def getconn(self, timeout: float | None = None) -> Any:
        permit = self.guard.acquire(self._priority)
        try:
            connection = await super().getconn(timeout)
        except BaseException as error:
            _release_failed(self.guard, permit, error)
            raise
        self._permits[id(connection)] = permit
        return connection

    async def putconn(self, conn: Any) -> None:
        permit = self._permits.pop(id(conn), None)
        try:
            await super().putconn(conn)
        finally:
            if permit is not None:
                self.guard.release(permit)


def _release_failed(guard: Guard, permit: Permit, error: BaseException) -> None:
    """End a call that got no connection. If it has waited in vain, the database is slower than the limit permits."""
    if isinstance(error, WAITED_IN_VAIN):
        permit.release("dropped")
    else:
        guard.release(permit, error)
