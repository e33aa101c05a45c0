"""A blocking connection: redis-py opens it, then bytes are sent and received without it."""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import StoreTimeout
from headgate.stores.redis.batch_protocol import ConnectionLost, NotSent
from headgate.stores.redis.busy_poll import BUSY_POLL_S, BusyPoll
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.reply_reader import INCOMPLETE, MAX_REPLY_BYTES, ReplyReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.exchange import LoneCheck, ServerRequest

__all__ = ["SyncConnection"]

READ_SIZE_BYTES: Final = 65_536


class SyncConnection:
    """A connection to one server, used by one thread at a time. It may busy poll if a request waits for its replies."""

    def __init__(
        self, connection: Any, budget_s: float, *, can_busy_poll: bool = False, max_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._connection = connection  # closes the socket when collected
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        if self._socket is None or self._socket.fileno() < 0:
            raise NotSent("cannot reach Redis: the connection was closed as soon as it was open")
        self._budget_s = budget_s
        self._replies = ReplyReader(max_bytes)
        self._buffer = bytearray(READ_SIZE_BYTES)
        self._needs_timeout = True
        """True if the timeout of the socket is not the budget."""
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._is_plain = not is_tls and sys.platform != "win32"
        # Cooperative sockets, as gevent's, let other green threads run while they wait, but not while we poll.
        is_native = type(self._socket).__module__ in ("socket", "ssl")
        self._poll = _new_poll(self._socket, is_native=is_native)
        self._tls_pending = self._socket.pending if is_tls else None
        self._busy_poll = BusyPoll() if can_busy_poll and self._is_plain and is_native else None

    def set_budget(self, budget_s: float) -> None:
        """Change how long replies are waited for."""
        if budget_s != self._budget_s:
            self._budget_s = budget_s
            self._needs_timeout = True

    def set_deadline(self, deadline: float) -> None:
        """Wait until then, and not for the budget, for what is received next."""
        with suppress(OSError):  # closed by another thread, as receive will report
            self._socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
        self._needs_timeout = True

    def is_usable(self) -> bool:
        """True if nothing has arrived: neither the end of the stream nor a stray reply, which would be taken for the
        reply to the next command."""
        try:
            if self._socket.fileno() < 0 or self._poll(0):
                return False
            return self._tls_pending is None or not self._tls_pending()
        except (OSError, ValueError):  # closed by another thread
            return False

    def has_stray_bytes(self) -> bool:
        """True if data has arrived, and not only the end of the stream."""
        try:
            if self._tls_pending is not None:
                return bool(self._tls_pending())
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def send(self, packed: bytes) -> None:
        try:
            if self._needs_timeout:
                self._socket.settimeout(self._budget_s)
                self._needs_timeout = False
            if self._is_plain:
                # Python would first poll whether the socket is writable; it nearly always is.
                packed = packed[os.write(self._socket.fileno(), packed) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error
        if packed:
            self._send_rest(packed)

    def _send_rest(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except TimeoutError as error:
            raise StoreTimeout(f"Redis took nothing within the budget of {self._budget_s * 1000:g} ms") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error

    def read(self, request: ServerRequest | LoneCheck, deadline: float) -> None:
        """Receive all replies to a request."""
        while not request.take(self.receive(deadline)):
            pass
        if self._replies.has_leftover():
            raise UnexpectedReply("the store sent more replies than it was asked for")

    def receive(self, deadline: float) -> Any:
        """The next reply. One that has arrived in time counts, however late this thread gets to see it."""
        replies = self._replies
        is_late = False
        try:
            while (reply := replies.next_reply()) is INCOMPLETE:
                if is_late:  # each piece arrived in time, but not all of them
                    raise TimeoutError
                try:
                    size = self._busy_read(deadline) or self._socket.recv_into(self._buffer)
                except TimeoutError:
                    size = self._read_available()
                if not size:
                    raise ConnectionLost("Redis closed the connection while the answer was on its way")
                replies.feed(self._buffer, size)
                is_late = time.monotonic() > deadline
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            raise StoreTimeout(f"Redis did not answer within the budget of {self._budget_s * 1000:g} ms") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error
        return reply

    def close(self) -> None:
        self._connection.disconnect()

    def _busy_read(self, deadline: float) -> int:
        """Bytes read by busy polling; 0 if that is paused or was in vain. Each poll lets other threads run."""
        busy_poll = self._busy_poll
        if busy_poll is None or not busy_poll.should_poll():
            return 0
        end, buffers, size = min(time.monotonic() + BUSY_POLL_S, deadline), (self._buffer,), 0
        while True:
            try:
                size = os.readv(self._socket.fileno(), buffers)
            except BlockingIOError:
                if time.monotonic() < end:
                    continue
            busy_poll.record(is_hit=size > 0)
            return size

    def _read_available(self) -> int:
        """Bytes that have arrived: this thread may have waited for the interpreter, and not for the server."""
        self._socket.settimeout(0)
        self._needs_timeout = True
        size: int = self._socket.recv_into(self._buffer)
        return size


def _new_poll(sock: Any, *, is_native: bool) -> Callable[[float], list[Any]]:
    """A function that tells if the socket is readable, within a timeout."""
    if is_native and hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    return selector.select
