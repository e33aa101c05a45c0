"""Events in the life of a limiter's store: outages, recoveries, lost state."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Event", "EventEmitter", "EventKind"]

logger = logging.getLogger("headgate")

EventKind: TypeAlias = Literal[
    "store-lost",
    "store-away",
    "store-back",
    "settled",
    "state-lost",
    "moved",
    "list-failed",
    "list-back",
    "ledger-lost",
    "ledger-back",
]

LEVELS: Final[Mapping[EventKind, int]] = {
    "store-lost": logging.ERROR,
    "store-away": logging.ERROR,
    "store-back": logging.WARNING,
    "settled": logging.INFO,
    "state-lost": logging.ERROR,
    "moved": logging.WARNING,
    "list-failed": logging.ERROR,
    "list-back": logging.WARNING,
    "ledger-lost": logging.ERROR,
    "ledger-back": logging.WARNING,
}


class Event(NamedTuple):
    """An event that operators want to know of.

    "store-lost": requests are decided without the store from now on; "store-away": they still are; "store-back": no
    longer; "settled": what was admitted in the meantime is charged; "state-lost": a server has lost its counters;
    "moved": another server has taken over; "list-failed": the newest version of a reputation list cannot be used, and
    the last good one stays in force; "list-back": it can again; "ledger-lost": quotas spend what they have leased from
    the ledger, and then follow their failure policy; "ledger-back": they take leases again.
    """

    kind: EventKind
    at_us: int
    """By this machine's clock, since the epoch."""
    text: str
    """A message for people."""
    details: Mapping[str, Any]
    """The numbers of the message."""


class EventEmitter:
    """Logs events and passes them to listeners. Errors of listeners are logged and not raised."""

    def __init__(self, listener: Callable[[Event], Any] | None = None) -> None:
        self._listeners: tuple[Callable[[Event], Any], ...] = () if listener is None else (listener,)

    def add_listener(self, listener: Callable[[Event], Any]) -> None:
        self._listeners = (*self._listeners, listener)

    def emit(self, kind: EventKind, text: str, **details: Any) -> None:
        logger.log(LEVELS[kind], "%s", text)
        event = Event(kind, time.time_ns() // 1000, text, details)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("on_event failed on %s", kind)
