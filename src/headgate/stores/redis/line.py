"""A connection for threads: redis-py opens it, in a thread of its own, then bytes go and come without it."""

from __future__ import annotations

import os
import selectors
import ssl
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from hiredis import HiredisError, Reader

from headgate.errors import StoreTimeout
from headgate.stores.redis.conversation import Lost, Unsent
from headgate.stores.redis.vigil import WATCH, Vigil

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Line", "Opening"]

STALE: Final = 0.1
"""Seconds after which it is tried again to connect, whatever came of the last time."""
INBOX: Final = 65_536
"""Bytes that are read at once, at most."""
IDLE: Final = 0.05
"""Seconds after which a connection is looked at before it is used: in between, nobody closes it for being idle."""


class Opening:
    """A connection under way. Whoever needs it waits as long as it likes; it goes on being opened for the next."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connection: Any = None
        self._error: Exception | None = None
        self._abandoned = False
        self._over = threading.Event()
        self._ended = 0.0
        try:
            threading.Thread(target=self._work, name="headgate-connecting", daemon=True).start()
        except RuntimeError as error:  # there are too many threads, or the interpreter is about to end
            self._error = error
            self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether there is a connection, or the reason why there is none."""
        return self._over.is_set()

    @property
    def is_old_news(self) -> bool:
        """Whether it failed, and so long ago that it may be otherwise by now."""
        return self._over.is_set() and self._error is not None and time.monotonic() - self._ended > STALE

    @property
    def has_failed(self) -> bool:
        """Whether there is no connection, nor will be."""
        return self._error is not None

    def wait(self, seconds: float) -> Any:
        """The connection, once it is open."""
        if not self._over.wait(max(seconds, 0)):
            raise Unsent("cannot reach Redis: there is no connection within the budget")
        if self._error is not None:
            raise Unsent(f"cannot reach Redis: {self._error}") from self._error
        return self._connection

    def abandon(self) -> None:
        """Nobody will ask for it any more."""
        self._abandoned = True
        if self._over.is_set() and self._connection is not None:
            self._connection.disconnect()

    def _work(self) -> None:
        connection = None
        try:
            connection = self._make()
            connection.connect()
            self._connection = connection
        except Exception as error:  # whatever a provider of credentials may raise, too: somebody waits for an end
            self._error = error
            if connection is not None:
                connection.disconnect()
        self._ended = time.monotonic()
        self._over.set()
        if self._abandoned:
            self.abandon()


class Line:
    """A connection to one server. Where somebody waits for its answers, it is to be `watched`."""

    def __init__(self, connection: Any, budget: float, *, watched: bool = False) -> None:
        self._connection = connection  # kept: it closes the socket when it is collected
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        if self._socket is None or self._socket.fileno() < 0:
            raise Unsent("cannot reach Redis: the connection was closed as soon as it was open")
        self._budget = budget
        self._reader = Reader()
        self._inbox = bytearray(INBOX)  # one for all replies, and not a new one for each
        self._used = -IDLE  # it may have waited for somebody to need it
        self._watch = selectors.DefaultSelector()
        self._watch.register(self._socket, selectors.EVENT_READ)
        self._hurried = True
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket) and sys.platform != "win32"
        # Sockets that libraries like gevent put in its place let others run while they wait, and nobody while we look.
        is_pythons_own = type(self._socket).__module__ == "socket"
        self._vigil = Vigil() if watched and self._is_plain and is_pythons_own else None

    def allow(self, budget: float) -> None:
        """Wait so many seconds for answers from now on."""
        self._budget = budget
        self._hurried = True

    def is_usable(self) -> bool:
        """Whether nothing has come in unasked: a server that went away has sent its end of file."""
        if time.monotonic() - self._used < IDLE:
            return True
        try:
            return not self._watch.select(0)
        except (OSError, ValueError):  # another thread has closed it
            return False

    def send(self, packed: bytes) -> None:
        try:
            if self._hurried:
                self._socket.settimeout(self._budget)
                self._hurried = False
            if self._is_plain:
                # Without asking first whether the socket can take it, as Python would: it nearly always can.
                packed = packed[os.write(self._socket.fileno(), packed) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error
        if packed:
            self._send_patiently(packed)

    def _send_patiently(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except TimeoutError as error:
            raise StoreTimeout(f"Redis took nothing within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error

    def receive(self, deadline: float) -> Any:
        """The next reply; one that has arrived already counts, however late this thread comes to see it."""
        reader = self._reader
        late = False
        try:
            while (reply := reader.gets()) is False:
                if late:  # each piece came in time, but all of them together did not
                    raise TimeoutError
                try:
                    size = self._watched(deadline) or self._socket.recv_into(self._inbox)
                except TimeoutError:
                    size = self._last_look()
                if not size:
                    raise Lost("Redis closed the connection while the answer was on its way")
                reader.feed(self._inbox, 0, size)  # type: ignore[arg-type] # any buffer will do
                self._used = time.monotonic()
                late = self._used > deadline
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            raise StoreTimeout(f"Redis did not answer within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error
        except HiredisError as error:
            raise Lost(f"what came from Redis is no answer: {error}") from error
        return reply

    def hurry(self, deadline: float) -> None:
        """Wait no longer than until then, in what is received next."""
        with suppress(OSError):  # another thread has closed it, and who receives will be told
            self._socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
        self._hurried = True

    def close(self) -> None:
        self._watch.close()
        self._connection.disconnect()

    def _watched(self, deadline: float) -> int:
        """How much has come while this thread watched; nothing where it did not, or in vain."""
        vigil = self._vigil
        if vigil is None or not vigil.is_due():
            return 0
        size = self._look_until(min(time.monotonic() + WATCH, deadline))
        vigil.ended(in_vain=not size)
        return size

    def _look_until(self, end: float) -> int:
        """How much has come by then. Each look lets other threads run, who keep this one waiting no more than if it had
        slept."""
        inbox = (self._inbox,)
        while True:
            try:
                return os.readv(self._socket.fileno(), inbox)
            except BlockingIOError:
                if time.monotonic() >= end:
                    return 0

    def _last_look(self) -> int:
        """How much is there now: this thread may have waited for the interpreter, and not for the server."""
        self._socket.settimeout(0)
        self._hurried = True
        size: int = self._socket.recv_into(self._inbox)
        return size
