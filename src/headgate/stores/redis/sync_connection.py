"""A connection for threads: redis-py opens it, in a thread of its own, then bytes go and come without it."""

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

from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from headgate.errors import StoreTimeout
from headgate.stores.redis.batch_protocol import ConnectionLost, NotSent
from headgate.stores.redis.busy_poll import WATCH, BusyPoll
from headgate.stores.redis.decoding import UnexpectedReply, accept
from headgate.stores.redis.reply_reader import INCOMPLETE, MAX_REPLY_BYTES, ReplyReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.encoding import Command

__all__ = ["PendingConnection", "SyncConnection"]

STALE: Final = 0.1
"""Seconds after which it is tried again to connect, whatever came of the last time."""
INBOX: Final = 65_536
"""Bytes that are read at once, at most."""


class PendingConnection:
    """A connection under way. Whoever needs it waits as long as it likes; it goes on being opened for the next."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connection: Any = None
        self._error: Exception | None = None
        self._abandoned = False
        self._over = InterruptSafeEvent()
        self._ended = 0.0
        self._unclaimed = [True]
        try:
            BackgroundThread("headgate-connecting", self._work, failed=self._fail)
        except RuntimeError as error:  # there are too many threads, or the interpreter is about to end
            self._fail(error)

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

    @property
    def is_claimed(self) -> bool:
        """True if somebody uses the connection."""
        return not self._unclaimed

    def claim(self) -> bool:
        """Reserve the connection for the caller; False if another caller was quicker."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def wait(self, seconds: float) -> Any:
        """The connection, once it is open."""
        if not self._over.wait(max(seconds, 0)):
            raise NotSent("cannot reach Redis: there is no connection within the budget")
        if self._error is not None:
            raise NotSent(f"cannot reach Redis: {self._error}") from self._error
        return self._connection

    def abandon(self) -> None:
        """Nobody will ask for it any more."""
        self._abandoned = True
        if self._over.is_set() and self._connection is not None:
            self._connection.disconnect()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._ended = time.monotonic()
        self._over.set()

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


class SyncConnection:
    """A connection to one server, used by one thread at a time. Where somebody waits for its answers, it is to be
    `watched`."""

    def __init__(
        self, connection: Any, budget: float, *, watched: bool = False, max_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._connection = connection  # kept: it closes the socket when it is collected
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        if self._socket is None or self._socket.fileno() < 0:
            raise NotSent("cannot reach Redis: the connection was closed as soon as it was open")
        self._budget = budget
        self._replies = ReplyReader(max_bytes)
        self._inbox = bytearray(INBOX)  # one for all replies, and not a new one for each
        self._hurried = True
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._is_plain = not is_tls and sys.platform != "win32"
        # Sockets that libraries like gevent put in its place let others run while they wait, and nobody while we look.
        is_pythons_own = type(self._socket).__module__ in ("socket", "ssl")
        self._poll = _poll(self._socket, is_pythons_own=is_pythons_own)
        self._has_pending = self._socket.pending if is_tls else None
        self._vigil = BusyPoll() if watched and self._is_plain and is_pythons_own else None

    def set_budget(self, budget: float) -> None:
        """Wait so many seconds for answers from now on."""
        if budget != self._budget:
            self._budget = budget
            self._hurried = True

    def is_usable(self) -> bool:
        """True if nothing has come in unasked: the end of file of a server that went away, or a stray reply, which
        would be taken for the answer to the next command."""
        try:
            if self._socket.fileno() < 0 or self._poll(0):
                return False
            return self._has_pending is None or not self._has_pending()
        except (OSError, ValueError):  # another thread has closed it
            return False

    def has_stray_bytes(self) -> bool:
        """True if the server has sent anything that nobody asked for, and not only closed the connection."""
        try:
            if self._has_pending is not None:
                return bool(self._has_pending())
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def answer(self, commands: list[Command], deadline: float) -> None:
        """Give each command, of which all were sent, its reply. After an UnexpectedReply none of them has one."""
        try:
            for command in commands:
                if command.asking:
                    self.receive(deadline)
                accept(command, self.receive(deadline))
            self.check_in_step()
        except UnexpectedReply:
            for command in commands:
                command.reply = None
            raise

    def check_in_step(self) -> None:
        """See that nothing has arrived beyond the replies: which of them are the answers would be anybody's guess."""
        if self._replies.has_leftover():
            raise UnexpectedReply("the store sent more replies than it was asked for")

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
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error
        if packed:
            self._send_patiently(packed)

    def _send_patiently(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except TimeoutError as error:
            raise StoreTimeout(f"Redis took nothing within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error

    def receive(self, deadline: float) -> Any:
        """The next reply; one that has arrived already counts, however late this thread comes to see it."""
        replies = self._replies
        late = False
        try:
            while (reply := replies.next_reply()) is INCOMPLETE:
                if late:  # each piece came in time, but all of them together did not
                    raise TimeoutError
                try:
                    size = self._watched(deadline) or self._socket.recv_into(self._inbox)
                except TimeoutError:
                    size = self._last_look()
                if not size:
                    raise ConnectionLost("Redis closed the connection while the answer was on its way")
                replies.feed(self._inbox, size)
                late = time.monotonic() > deadline
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            raise StoreTimeout(f"Redis did not answer within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from error
        return reply

    def hurry(self, deadline: float) -> None:
        """Wait no longer than until then, in what is received next."""
        with suppress(OSError):  # another thread has closed it, and who receives will be told
            self._socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
        self._hurried = True

    def close(self) -> None:
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


def _poll(its: Any, *, is_pythons_own: bool) -> Callable[[float], list[Any]]:
    """A function that looks whether there is something to read, without waiting if it is given 0."""
    if is_pythons_own and hasattr(select, "poll"):
        poll = select.poll()
        poll.register(its, select.POLLIN)
        return poll.poll
    watch = selectors.DefaultSelector()
    watch.register(its, selectors.EVENT_READ)
    return watch.select
