"""Blocking connections to the servers, and the driver that runs exchanges on them.

Connections are opened in threads of their own, so that no caller waits for longer than its budget. A connection in use
belongs to one thread, and is closed if that thread is interrupted: a late reply would be taken for that of another
command. Nothing is locked, as signal handlers may raise between any two steps of the main thread.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
import sys
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from headgate.errors import StoreError, StoreTimeout
from headgate.stores.redis.batch_protocol import BudgetExhausted, ConnectionLost, NotSent
from headgate.stores.redis.busy_poll import BUSY_POLL_S, BusyPoll
from headgate.stores.redis.decoding import INCOMPLETE, MAX_REPLY_BYTES, ReplyReader, UnexpectedReply
from headgate.stores.redis.exchange import FIRST_CONNECTION_S, Exchange, LoneCheck, ServerRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.stores.redis.breaker import CircuitBreakers
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import Node

__all__ = ["CONNECT_TIMEOUT_S", "ConnectionPool", "ConnectionUser", "PendingConnection", "SyncConnection", "socket_of"]

MAX_IDLE: Final = 4
"""Idle connections kept per server."""
RECONNECT_AFTER_S: Final = 0.1
"""Age at which a failed attempt to connect says nothing about the next one."""
CONNECT_TIMEOUT_S: Final = 0.25
"""For background work."""
MAX_BACKGROUND_REPLY_BYTES: Final = 256 * 1024 * 1024
"""The status documents of all nodes of a fleet are one reply."""


class SyncConnection:
    """A connection to one server, used by one thread at a time: redis-py opens it, then bytes are sent and received
    without it. It may busy poll if a request waits for its replies."""

    def __init__(
        self, connection: Any, budget_s: float, *, can_busy_poll: bool = False, max_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._connection = connection
        self._socket = socket_of(connection)
        if self._socket is None or self._socket.fileno() < 0:
            raise NotSent("cannot reach Redis: the connection was closed as soon as it was open")
        self._budget_s = budget_s
        self._replies = ReplyReader(max_bytes)
        self._buffer = bytearray(65_536)
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
                try:  # noqa: SIM105 - several times as fast
                    packed = packed[os.write(self._socket.fileno(), packed) :]
                except BlockingIOError:
                    pass
            if packed:
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


def socket_of(connection: Any) -> Any:
    """The socket of a connection of redis-py, which has no public way to it."""
    return connection._sock  # noqa: SLF001 - see the docstring


def close_when_collected(connection: Any) -> None:
    """Close the socket before anything that is collected with it, as in a limiter that was forgotten, not closed:
    `__del__` of redis-py comes at a random place among the finalizers of a cycle."""
    if (opened := socket_of(connection)) is not None:
        weakref.finalize(connection, opened.close).atexit = False


def _new_poll(sock: Any, *, is_native: bool) -> Callable[[float], list[Any]]:
    """A function that returns True if the socket is readable, within a timeout."""
    if is_native and hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    return selector.select


class PendingConnection:
    """A connection being opened in a thread. It stays available after a caller has stopped waiting for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connection: Any = None
        self.error: Exception | None = None
        self._is_abandoned = False
        self._done = InterruptSafeEvent()
        self._done_at = 0.0
        self._unclaimed = [True]
        try:
            BackgroundThread("headgate-connecting", self._open, failed=self._finish)
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            self._finish(error)

    @property
    def is_done(self) -> bool:
        """True once there is a connection, or the reason why there is none."""
        return self._done.is_set()

    @property
    def is_reusable(self) -> bool:
        """True unless a caller has claimed the connection, or it failed some time ago."""
        return bool(self._unclaimed) and not (self.error and time.monotonic() - self._done_at > RECONNECT_AFTER_S)

    def claim(self) -> bool:
        """Reserve the connection for the caller; False if another caller was quicker."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def wait(self, timeout_s: float) -> Any:
        """The connection once it is open; raises NotSent."""
        if not self._done.wait(max(timeout_s, 0)):
            raise NotSent("cannot reach Redis: there is no connection within the budget")
        if self.error is not None:
            raise NotSent(f"cannot reach Redis: {self.error}") from self.error
        return self._connection

    def abandon(self) -> None:
        """Close the connection, now or when it is open."""
        self._is_abandoned = True
        if self._done.is_set() and self._connection is not None:
            self._connection.disconnect()

    def _open(self) -> None:
        connection = None
        try:
            connection = self._make()
            connection.connect()
            close_when_collected(connection)
            self._connection = connection
            self._finish(None)
        except Exception as error:  # including those of a credential provider: a caller is waiting
            if connection is not None:
                connection.disconnect()
            self._finish(error)
        if self._is_abandoned:
            self.abandon()

    def _finish(self, error: Exception | None) -> None:
        self.error = error
        self._done_at = time.monotonic()
        self._done.set()


class ConnectionUser:
    """The connections that one thread is using."""

    connections: Sequence[SyncConnection] = ()
    has_sent = False

    def close_connections(self) -> None:
        """Close connections on which a reply may still arrive."""
        for connection in self.connections:
            connection.close()


class ConnectionPool:
    """Connections for requests, or, without breakers, for background work: those wait longer and accept large replies.

    `on_failure` is called with each failure of a connection or server.
    """

    def __init__(
        self,
        factory: ConnectionFactory,
        budget_s: float,
        *,
        breakers: CircuitBreakers | None = None,
        on_failure: Callable[[Node | None, StoreError], None] = lambda node, error: None,
        is_forked: bool = False,
    ) -> None:
        self.budget_s = budget_s
        self.unexpected_replies = 0
        """Idle connections that were closed because something arrived on them."""
        self._factory = factory
        self._breakers = breakers
        self._on_failure = on_failure
        self._is_forked = is_forked
        self._idle: dict[Node | None, list[SyncConnection]] = {}
        self._pending: dict[Node | None, PendingConnection] = {}
        self._grace_until: float | None = 0.0 if breakers is None else None
        """Until when calls may exceed their budget to connect; None before the first attempt. It ends with the first
        connection, except in a forked process, which starts together with many others."""

    def run(self, exchange: Exchange, user: ConnectionUser) -> Any:
        """Run an exchange to its end; returns its answers."""
        while requests := exchange.next_round(time.monotonic()):
            is_first_connection = self._grace_until != 0.0
            sent = []
            for request in requests:
                connection = self._send(request, exchange.deadline, user)
                if connection is not None:
                    sent.append((request, connection))
            deadline = exchange.extend_deadline(time.monotonic(), is_first_connection=is_first_connection)
            deadline = max(deadline, self._grace_until or 0.0)
            for request, connection in sent:
                try:
                    connection.set_deadline(deadline)
                    connection.read(request, deadline)
                except StoreError as error:
                    self._fail(request, error, user, connection)
                else:
                    user.connections = [one for one in user.connections if one is not connection]
                    self.release(request.node, connection)
                    request.finish()
        return exchange.answers

    def take_idle(self, node: Node | None) -> SyncConnection | None:
        """An idle connection on which nothing has arrived, for the caller alone."""
        idle = self._idle.get(node)
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if connection.is_usable():
                connection.set_budget(self.budget_s)
                return connection
            self.unexpected_replies += connection.has_stray_bytes()
            connection.close()
        return None

    def release(self, node: Node | None, connection: SyncConnection) -> None:
        """Return a connection that has read all its replies."""
        idle = self._idle.setdefault(node, [])
        if len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def preconnect(self, node: Node | None, *, wait_s: float) -> None:
        """Open a connection ahead of the first request, unless there is one."""
        if self._idle.get(node):
            return
        pending = self._pending.get(node)
        if pending is None or pending.error or not pending.is_reusable:
            pending = self._pending[node] = self._open(node)
        if wait_s:
            with suppress(StoreError):
                pending.wait(wait_s)

    def drop_preconnected(self, node: Node | None) -> None:
        pending = self._pending.pop(node, None)
        if pending is not None:
            pending.abandon()

    def close(self) -> None:
        idle, self._idle, pending, self._pending = self._idle, {}, self._pending, {}
        for connection in [one for connections in idle.values() for one in connections]:
            connection.close()
        for each in pending.values():
            each.abandon()

    def _send(self, request: ServerRequest, deadline: float, user: ConnectionUser) -> SyncConnection | None:
        """Send a request; None if it has failed."""
        connection = None
        try:
            connection = self.take_idle(request.node) or self._connect(request.node, deadline)
            user.connections = [*user.connections, connection]
            user.has_sent = True
            connection.send(request.pack())
        except StoreError as error:
            self._fail(request, error, user, connection)
            return None
        return connection

    def _fail(
        self, request: ServerRequest, error: StoreError, user: ConnectionUser, connection: SyncConnection | None
    ) -> None:
        if connection is not None:
            user.connections = [one for one in user.connections if one is not connection]
            connection.close()
        if not isinstance(error, BudgetExhausted):  # which says nothing about this server
            self._on_failure(request.node, error)
        request.fail(error)

    def _connect(self, node: Node | None, deadline: float) -> SyncConnection:
        is_background = self._breakers is None
        if self._breakers is not None and self._breakers[node].is_open:
            raise self._breakers[node].refusal()
        now = time.monotonic()
        if self._grace_until is None:
            self._grace_until = now + FIRST_CONNECTION_S
        deadline = max(deadline, now + CONNECT_TIMEOUT_S if is_background else self._grace_until)
        if now >= deadline:
            raise BudgetExhausted("cannot reach Redis: the budget was spent before its turn")
        max_bytes = MAX_BACKGROUND_REPLY_BYTES if is_background else MAX_REPLY_BYTES
        while True:
            opened = self._await_connection(node, deadline)
            connection = SyncConnection(opened, self.budget_s, can_busy_poll=not is_background, max_bytes=max_bytes)
            if connection.is_usable():
                if not self._is_forked:
                    self._grace_until = 0.0
                return connection
            connection.close()  # the server has closed it meanwhile

    def _await_connection(self, node: Node | None, deadline: float) -> Any:
        """A redis-py connection for the caller alone."""
        while True:
            pending = self._pending.get(node)
            if pending is None or not pending.is_reusable:
                pending = self._pending[node] = self._open(node)
            try:
                connection = pending.wait(deadline - time.monotonic())
            except NotSent:
                # One that is still being opened stays for the next caller.
                if pending.error and self._pending.get(node) is pending:
                    self._pending.pop(node, None)
                raise
            if pending.claim():
                if self._pending.get(node) is pending:
                    self._pending.pop(node, None)
                return connection

    def _open(self, node: Node | None) -> PendingConnection:
        options = {"timeout": CONNECT_TIMEOUT_S} if self._breakers is None else {}
        return PendingConnection(lambda: self._factory.connection(node, asynchronous=False, **options))
