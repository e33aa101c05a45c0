"""SQLAlchemy: a guard around the connections of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.errors import name_missing_extra

with name_missing_extra("headgate.overload.sqlalchemy needs", "config", "sqlalchemy"):
    from sqlalchemy import event

if TYPE_CHECKING:
    from headgate.overload.guard import Guard, PrioritySource

__all__ = ["protect"]

PERMIT: Final = "headgate.permit"
"""The key of the permit in the `record_info` of a connection that is checked out."""


def protect(engine: Any, guard: Guard, *, priority: PrioritySource = "normal") -> None:
    """Let a guard admit or shed the checkouts of an `Engine` or `AsyncEngine`, before they wait for the pool.

    A call lasts until the connection is returned to the pool. Call it once for each engine.
    """
    engine = getattr(engine, "sync_engine", engine)

    def wrap(pool: Any) -> None:
        connect = pool.connect

        def guarded_connect() -> Any:
            permit = guard.acquire(priority)
            try:
                connection = connect()
            except BaseException as error:
                guard.release(permit, error)
                raise
            connection.record_info[PERMIT] = permit
            return connection

        # The event "checkout" comes too late: the connection is taken, and SQLAlchemy closes it if a listener raises.
        pool.connect = guarded_connect

    def release(_: object, record: Any) -> None:
        permit = record.record_info.pop(PERMIT, None)
        if permit is not None:
            guard.release(permit)

    wrap(engine.pool)
    event.listen(engine, "engine_disposed", lambda disposed: wrap(disposed.pool))  # which has a new pool
    event.listen(engine, "checkin", release)
    event.listen(engine, "detach", release)
