"""Boards: where nodes put what they are doing, and where those who operate them look.

What is on a board is short-lived and nobody's truth: a board that is away costs a chart its last seconds, and no
request anything. How long ago something was put there is told by the board's own clock, whatever the nodes' clocks say.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from headgate.errors import InvalidConfiguration
from headgate.keys import escape
from headgate.stores import REDIS_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryStatusStore", "StatusDocument", "StatusStore", "open_status_store"]

MOST_DOCUMENTS: Final = 10_000
"""On one board in memory; the oldest make room."""


class StatusDocument(NamedTuple):
    """A document as it was found on a board."""

    document: bytes
    age: float
    """Seconds since it was put there, by the board's own clock."""


@runtime_checkable
class StatusStore(Protocol):
    """Where documents are put under names like "beats/web-1", each in place of the one before.

    Methods may raise a StoreError, and may wait for a server: they are for threads in the background.
    """

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        """Put a document, to be forgotten after `keep` seconds; at once, if that is 0."""

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        """All documents of a room ("beats/"), by their whole names."""

    def close(self) -> None:
        """Close what is open; whoever puts or reads again opens it anew."""


class MemoryStatusStore:
    """A board for one process: for a store in memory, which lives there, too.

    >>> board = MemoryStatusStore()
    >>> board.put("beats/here", b"{}", keep=60)
    >>> [(name, posted.document) for name, posted in board.read("beats/").items()]
    [('beats/here', b'{}')]
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._documents: dict[str, tuple[bytes, float, float]] = {}
        """Each with when it was put, and until when it is kept."""

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        """Put a document, to be forgotten after `keep` seconds; at once, if that is 0."""
        room_of(name)
        now = self._monotonic()
        with self._lock:
            self._documents.pop(name, None)
            if keep > 0:
                self._documents[name] = document, now, now + keep
            if len(self._documents) > MOST_DOCUMENTS:
                self._documents = {name: each for name, each in self._documents.items() if now < each[2]}
                for oldest in list(self._documents)[:-MOST_DOCUMENTS]:
                    del self._documents[oldest]

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        """All documents of a room ("beats/"), by their whole names."""
        room_of(prefix)
        now = self._monotonic()
        with self._lock:
            over = [name for name, (_, _, until) in self._documents.items() if until <= now]
            for name in over:
                del self._documents[name]
            found = [(name, each) for name, each in self._documents.items() if name.startswith(prefix)]
        return {name: StatusDocument(document, max(0.0, now - at)) for name, (document, at, _) in found}

    def close(self) -> None:
        """Nothing is open."""


_here: Final = MemoryStatusStore()
"""The one board in memory of this process. A child that is forked has its own copy, and no way to its parent's."""


def open_status_store(where: Any = "memory://", *, namespace: str = "headgate") -> StatusStore:
    """The board beside a store: give what the store is opened by, a URL or a Redis client, and its namespace.

    "memory://" is one board for the whole process. Nothing is connected yet.
    """
    if not isinstance(where, str) and isinstance(where, StatusStore):
        return where
    if isinstance(where, str):
        scheme, separator, rest = where.partition("://")
        if where == "memory:" or (scheme == "memory" and separator and not rest):
            return _here
        if scheme not in REDIS_SCHEMES or not separator:
            raise InvalidConfiguration(
                f"there is no board at {scheme!r}: give memory://, or the URL of the Redis that the nodes count in"
            )
    try:
        from headgate.telemetry.fleet.redis_status_store import RedisStatusStore
    except ModuleNotFoundError as missing:
        if missing.name not in ("redis", "hiredis"):
            raise
        raise InvalidConfiguration(
            f"a board in Redis needs the package {missing.name!r}: pip install 'headgate[redis]'"
        ) from None
    return RedisStatusStore(where, namespace=escape(namespace))


def room_of(name: str) -> tuple[str, str]:
    """The room of a name, and the rest: documents of one room are read together."""
    room, slash, rest = name.partition("/")
    if not room or not slash:
        raise InvalidConfiguration(f"{name!r} is no name on a board: write it like 'beats/web-1'")
    return room, rest
