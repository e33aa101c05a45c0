"""Status stores: short-lived documents that nodes write and operators read.

Documents are expendable: while a status store is unavailable, charts lack their last seconds, and requests lose
nothing. The store's own clock measures how old a document is, whatever the clocks of the nodes say.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from headgate.errors import InvalidConfiguration, name_missing_extra
from headgate.keys import escape
from headgate.stores import REDIS_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryStatusStore", "StatusDocument", "StatusStore", "open_status_store", "split_name"]

MAX_DOCUMENTS: Final = 10_000
"""In a memory store; beyond, the oldest are removed."""


class StatusDocument(NamedTuple):
    """A document as read from a status store."""

    document: bytes
    age: float
    """Seconds since it was written, by the store's own clock."""


@runtime_checkable
class StatusStore(Protocol):
    """Documents by name, such as "beats/web-1". Methods may block and raise StoreError: for background threads."""

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        """Write or replace a document that expires after `keep` seconds; 0 deletes it."""

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        """All documents whose names begin with a prefix ("beats/")."""

    def close(self) -> None:
        """Close the connections; another call opens them again."""


class MemoryStatusStore:
    """A status store within one process, for gates with a memory store.

    >>> store = MemoryStatusStore()
    >>> store.put("beats/here", b"{}", keep=60)
    >>> [(name, stored.document) for name, stored in store.read("beats/").items()]
    [('beats/here', b'{}')]
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._documents: dict[str, tuple[bytes, float, float]] = {}
        """Each with the times of its write and of its expiry."""

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        split_name(name)
        now = self._monotonic()
        with self._lock:
            self._documents.pop(name, None)
            if keep > 0:
                self._documents[name] = document, now, now + keep
            if len(self._documents) > MAX_DOCUMENTS:
                self._documents = {name: each for name, each in self._documents.items() if now < each[2]}
                for oldest in list(self._documents)[:-MAX_DOCUMENTS]:
                    del self._documents[oldest]

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        split_name(prefix)
        now = self._monotonic()
        with self._lock:
            self._documents = {name: each for name, each in self._documents.items() if now < each[2]}
            found = [(name, each) for name, each in self._documents.items() if name.startswith(prefix)]
        return {name: StatusDocument(document, max(0.0, now - at)) for name, (document, at, _) in found}

    def close(self) -> None:
        """No effect."""


_process_store: Final = MemoryStatusStore()


def open_status_store(where: Any = "memory://", *, namespace: str = "headgate") -> StatusStore:
    """The status store that belongs to a gate's store: `where` is its URL or Redis client.

    "memory://" is one store for the whole process. Connections are opened by the first call of a method.
    """
    if not isinstance(where, str) and isinstance(where, StatusStore):
        return where
    if isinstance(where, str):
        if where in ("memory:", "memory://"):
            return _process_store
        scheme, separator, _ = where.partition("://")
        if scheme not in REDIS_SCHEMES or not separator:
            raise InvalidConfiguration(
                f"no status store for {scheme!r}: give memory://, or the URL of the Redis that the nodes count in"
            )
    with name_missing_extra("a status store in Redis needs", "redis", "redis", "hiredis"):
        from headgate.telemetry.fleet.redis_status_store import RedisStatusStore
    return RedisStatusStore(where, namespace=escape(namespace))


def split_name(name: str) -> tuple[str, str]:
    """The collection of a document and its name there: "beats" and "web-1" of "beats/web-1"."""
    collection, slash, rest = name.partition("/")
    if not collection or not slash:
        raise InvalidConfiguration(f"{name!r} is not the name of a status document, like 'beats/web-1'")
    return collection, rest
