"""SQLAlchemy: a guard around the connections of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.errors import name_missing_extra

with name_missing_extra("headgate.overload.sqlalchemy needs", "config", "sqlalchemy"):
    from sqlalchemy import event
    from sqlalchemy.exc import TimeoutError as PoolTimeout

if TYPE_CHECKING:
    from headgate.overload.guard import Guard, PrioritySource

__all__ = ["protect"]

PERMIT: Final = "headgate.permit"
"""The key of the permit in the `record_info` of a connection that is checked out."""
FAILURE: Final = "headgate.failure"
"""The key of the last exception of the database during a call."""


def protect(engine: Any, guard: Guard, *, priority: PrioritySource = "normal") -> None:
    """Let a guard admit or shed the checkouts of an `Engine` or `AsyncEngine`, before they wait for the pool.

    A call lasts until the connection is returned to the pool. Its latency does not count if a statement has failed.
    Call it once for each engine.
    """
    engine = getattr(engine, "sync_engine", engine)

    def wrap(pool: Any) -> None:
        connect = pool.connect

        def guarded_connect() -> Any:
            permit = guard.acquire(priority)
            try:
                connection = connect()
            except BaseException as error:
                guard.release(permit, error, drops=(PoolTimeout,))
                raise
            connection.record_info[PERMIT] = permit
            connection.record_info.pop(FAILURE, None)
            return connection

        # The event "checkout" comes too late: the connection is taken, and SQLAlchemy closes it if a listener raises.
        pool.connect = guarded_connect

    def release(_: object, record: Any) -> None:
        permit = record.record_info.pop(PERMIT, None)
        if permit is not None:
            guard.release(permit, record.record_info.pop(FAILURE, None))

    def keep_failure(context: Any) -> None:
        connection = context.connection
        if connection is not None and not connection.closed and not connection.invalidated:
            connection.connection.record_info[FAILURE] = context.original_exception

    wrap(engine.pool)
    event.listen(engine, "engine_disposed", lambda disposed: wrap(disposed.pool))  # which has a new pool
    event.listen(engine, "handle_error", keep_failure)
    event.listen(engine, "checkin", release)
    event.listen(engine, "detach", release)
