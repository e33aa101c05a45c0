"""Pub/sub notifications from other processes: blocks that have changed, and cached denials that have become invalid.

Redis lets every client of a server publish, from any database and to any channel, so a message is only a hint. It names
what to read again and is never believed: a forged message costs a bounded number of reads and changes no decision.
Messages are coalesced, so a flood of them does not become a flood of reads.

Redis stores no messages: those published while the connection is lost never arrive. So subscribers read all that is
stored each time they connect.
"""

from __future__ import annotations

import logging
import random
import selectors
import socket
import ssl
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from headgate._fork import reinit_after_fork
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.background_client import REPLY_TIMEOUT_S, BackgroundClient, read_block
from headgate.stores.redis.batch_protocol import NotSent
from headgate.stores.redis.connection_pool import CONNECT_TIMEOUT_S, PendingConnection
from headgate.stores.redis.encoding import NO_KEYS, Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node

__all__ = ["Subscriber"]

logger = logging.getLogger("headgate")

_random = random.Random()

PING_INTERVAL_S: Final = 2.0
"""Silence after which the server is pinged."""
PING_TIMEOUT_S: Final = 2.0
MIN_RECONNECT_S: Final = 0.05
MAX_RECONNECT_S: Final = 2.0
"""Pauses between attempts to connect: they double from the first to the second."""
STOP_CHECK_INTERVAL_S: Final = 0.05

MAX_MESSAGE_BYTES: Final = 32_768
"""Longer messages are skipped as they arrive, without being stored."""
MAX_PENDING: Final = 1_000
"""Changed blocks waiting to be read. With more of them, all blocks are read instead."""
MAX_READ_AT_ONCE: Final = 50
READ_INTERVAL_S: Final = 0.02
"""Between two reads of changed blocks. The first after a pause is immediate."""
READ_ALL_INTERVAL_S: Final = 1.0
READ_ALL_MAX_SHARE: Final = 0.1
"""Of the time, at most, is spent on reading all blocks: if there are many, they are read less often."""
FORGET_INTERVAL_S: Final = 0.005
"""Between two invalidations of the same cached denial."""
LOG_INTERVAL_S: Final = 60.0
"""Between two warnings about ignored messages."""

_PING: Final = Command(None, NO_KEYS, ("PING",)).pack()


class Subscriber:
    """Subscriber to the notifications of one namespace; runs in a thread that it is given.

    `on_blocks_changed` is called with the identities, as (kind, value), whose blocks have to be read again, or with
    None to read all of them. `on_forget` is called for each counter whose cached denials are invalid. Both are rate
    limited. `on_connect` is called whenever messages will be received from now on: read all that is stored then. A
    StoreError from any of these makes it reconnect. `on_lost` is called with the reason when the connection is lost, or
    cannot be opened: once, and not again before the next `on_connect`.
    """

    def __init__(
        self,
        factory: ConnectionFactory,
        encoder: CommandEncoder,
        *,
        on_blocks_changed: Callable[[list[tuple[str, str]] | None], Any],
        on_forget: Callable[[str, str], Any],
        on_connect: Callable[[], Any] = lambda: None,
        on_lost: Callable[[StoreError], Any] = lambda error: None,
    ) -> None:
        self.factory = factory
        self.encoder = encoder
        self.ignored = 0
        """Messages that were malformed or too long."""
        self._on_blocks_changed = on_blocks_changed
        self._on_forget = on_forget
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._node: Node | None = None
        """The server chosen last."""
        self._is_stopped = False
        self._stop_signal: socket.socket | None = None
        self._pending = _Pending()
        self._ignored_before = 0
        self._warn_at = 0.0
        reinit_after_fork(self)

    def listen(self) -> None:
        """Receive messages until `stop` is called, reconnecting as often as needed."""
        stop_reader, stop_signal = socket.socketpair()
        with stop_reader, stop_signal, suppress(_Stopped):
            self._stop_signal = stop_signal
            pause_s, was_connected = MIN_RECONNECT_S, True
            while True:
                started = time.monotonic()
                try:
                    with closing(self._open(stop_reader)) as connection:
                        connection.subscribe(self.encoder.channel)
                        self._pending = _Pending()
                        self._call(self._on_connect)
                        was_connected = True
                        for message in connection.messages(self._is_current, self._pending.due):
                            if message is not None and not self._pending.add(message):
                                self._ignore()
                            self._apply()
                except Exception as error:
                    reason = error if isinstance(error, StoreError) else StoreUnavailable(f"it failed: {error}")
                    if reason is not error:
                        logger.exception("subscription to %s failed; reconnecting", self.encoder.channel)
                    if was_connected:
                        with suppress(StoreError):
                            self._call(self._on_lost, reason)
                    was_connected = False
                lasted_s = time.monotonic() - started
                pause_s = MIN_RECONNECT_S if lasted_s > MAX_RECONNECT_S else min(pause_s * 2, MAX_RECONNECT_S)
                stop_reader.settimeout(pause_s * _random.uniform(0.5, 1.0))
                with suppress(TimeoutError):
                    stop_reader.recv(1)
                if self._is_stopped:
                    return

    def stop(self) -> None:
        """Make `listen` return: immediately, or after the callback that it is in."""
        self._is_stopped = True
        if self._stop_signal is not None:
            with suppress(OSError):  # it has returned already
                self._stop_signal.send(b"!")

    def reset_after_fork(self) -> None:
        """Start afresh: a child has no such thread, and must not stop that of its parent."""
        self._is_stopped, self._stop_signal = False, None

    def _open(self, stop_reader: socket.socket) -> _SubscriberConnection:
        """A connection to one of the servers, opened in another thread so that `stop` need not wait for it."""
        chosen: list[Node | None] = []
        pending = PendingConnection(lambda: self._new_connection(chosen))
        try:
            deadline = time.monotonic() + REPLY_TIMEOUT_S
            while True:
                if self._is_stopped:
                    raise _Stopped
                try:
                    return _SubscriberConnection(pending.wait(STOP_CHECK_INTERVAL_S), stop_reader)
                except NotSent:
                    if pending.is_done or time.monotonic() > deadline:
                        raise
        except BaseException:
            pending.abandon()
            raise
        finally:
            if chosen:
                (self._node,) = chosen

    def _new_connection(self, chosen: list[Node | None]) -> Any:
        try:
            chosen.append(self._choose())
        except StoreError as error:
            raise OSError(str(error)) from error  # as if it could not be connected to
        return self.factory.connection(chosen[0], asynchronous=False, timeout=CONNECT_TIMEOUT_S)

    def _choose(self) -> Node | None:
        """A primary: those of a cluster forward all messages to each other. Another than the last one, if possible."""
        with closing(BackgroundClient(self.factory, self.encoder)) as client:
            primaries = client.find_primaries(suspects=(self._node,))
        return _random.choice([node for node in primaries if node != self._node] or primaries)

    def _is_current(self) -> bool:
        """True if the server is still a primary; one that was cut off may miss messages."""
        return self._node in (self.factory.topology.primaries() or [self._node])

    def _apply(self) -> None:
        """Act on pending messages as far as the rate limits allow."""
        now = time.monotonic()
        for space, identity in self._pending.take_forgotten(now):
            self._call(self._on_forget, space, identity)
        if self._pending.take_all(now):
            self._call(self._on_blocks_changed, None)
            self._pending.note_read_all(now, time.monotonic())
        elif identities := self._pending.take_blocks(now):
            self._call(self._on_blocks_changed, identities)

    def _ignore(self) -> None:
        """Count a malformed or oversized message, and warn now and then."""
        self.ignored += 1
        now = time.monotonic()
        if now >= self._warn_at:
            count, self._ignored_before = self.ignored - self._ignored_before, self.ignored
            logger.warning("ignored %d malformed or oversized messages on %s", count, self.encoder.channel)
            self._warn_at = now + LOG_INTERVAL_S

    def _call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call back; an error other than a StoreError is logged and must not end the subscription."""
        try:
            callback(*args)
        except StoreError:
            raise
        except Exception:
            logger.exception("could not process a message on %s", self.encoder.channel)


class _Pending:
    """Coalesces messages: each counter and each block is there once, however often it was named."""

    def __init__(self) -> None:
        self._forgotten: dict[tuple[str, str], None] = {}
        self._blocks: dict[tuple[str, str], None] = {}
        self._all = False
        self._forget_at = self._read_at = self._read_all_at = 0.0

    def add(self, message: bytes) -> bool:
        """Add a message; False if it is malformed."""
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        verb, _, rest = message.partition(b" ")
        if verb == b"block" and not rest:
            self._add_all()
            return True
        if verb == b"block":
            block = read_block(rest)
            if block is None:
                return False
            self._blocks[block.kind, block.value] = None
            if len(self._blocks) > MAX_PENDING:
                self._add_all()
            return True
        if verb == b"forget" and rest.count(b":") >= 2:
            try:
                # Neither a limit's name nor its algorithm has a colon; the identity may have any.
                name, algorithm, identity = rest.decode("utf-8", "surrogatepass").split(":", 2)
            except UnicodeDecodeError:
                return False
            self._forgotten[f"{name}:{algorithm}", identity] = None
            if len(self._forgotten) > MAX_PENDING:
                self._forget_at = 0.0
            return True
        return False

    def due(self) -> float | None:
        """The next instant, on the monotonic clock, at which something is to be done."""
        dues = [self._forget_at] if self._forgotten else []
        dues += [self._read_at] if self._blocks else []
        dues += [self._read_all_at] if self._all else []
        return min(dues, default=None)

    def take_forgotten(self, now: float) -> list[tuple[str, str]]:
        if not self._forgotten or now < self._forget_at:
            return []
        taken, self._forgotten = list(self._forgotten), {}
        self._forget_at = now + FORGET_INTERVAL_S
        return taken

    def take_blocks(self, now: float) -> list[tuple[str, str]]:
        if not self._blocks or now < self._read_at:
            return []
        taken = list(self._blocks)[:MAX_READ_AT_ONCE]
        for identity in taken:
            del self._blocks[identity]
        self._read_at = now + READ_INTERVAL_S
        return taken

    def take_all(self, now: float) -> bool:
        if not self._all or now < self._read_all_at:
            return False
        self._all = False
        self._blocks.clear()
        return True

    def note_read_all(self, started: float, ended: float) -> None:
        self._read_all_at = max(started + READ_ALL_INTERVAL_S, ended + (ended - started) / READ_ALL_MAX_SHARE)

    def _add_all(self) -> None:
        self._all = True
        self._blocks.clear()


OVERSIZED: Final = b"\xff"
"""Stands for a message that was too long to be received; no message is spelled like that."""
_INCOMPLETE: Final = object()


class _MessageReader:
    """Incremental RESP parser for a subscribed connection; stores at most MAX_MESSAGE_BYTES of any message."""

    MAX_LINE_BYTES: Final = 4_096
    MAX_ITEMS: Final = 8
    MAX_SKIPPED_BYTES: Final = 2**32

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skipped = 0
        """Bytes of an oversized message that are still to come."""

    def feed(self, data: bytes) -> None:
        skipped = min(self._skipped, len(data))
        self._skipped -= skipped
        self._buffer += data[skipped:] if skipped else data

    def get(self) -> Any:
        """The next reply, OVERSIZED in place of one that is too long, or _INCOMPLETE."""
        if not self._buffer:
            return _INCOMPLETE
        reply, end = self._parse(0)
        if reply is not _INCOMPLETE:
            self._skipped = max(0, end - len(self._buffer))
            del self._buffer[:end]
        return reply

    def _parse(self, start: int) -> tuple[Any, int]:
        """A reply and where it ends, which may be beyond what was received of an oversized one."""
        line_end = self._buffer.find(b"\r\n", start, start + self.MAX_LINE_BYTES)
        if line_end < 0:
            if len(self._buffer) - start >= self.MAX_LINE_BYTES:
                raise StoreUnavailable("Redis sent an invalid reply")
            return _INCOMPLETE, 0
        kind, line = bytes(self._buffer[start : start + 1]), bytes(self._buffer[start + 1 : line_end])
        end = line_end + 2
        if kind in (b"*", b">"):
            return self._parse_items(_parse_length(line, self.MAX_ITEMS), end)
        if kind == b"$":
            return self._parse_text(_parse_length(line, self.MAX_SKIPPED_BYTES), end)
        if kind == b"-":
            return ReplyError(line.decode("utf-8", "replace")), end
        if kind in (b"+", b":", b"_"):
            return line, end
        raise StoreUnavailable("Redis sent an invalid reply")

    def _parse_items(self, count: int, end: int) -> tuple[Any, int]:
        items = []
        for _ in range(count):
            item, end = self._parse(end)
            if item is _INCOMPLETE or item is OVERSIZED:
                return item, end
            items.append(item)
        return items, end

    def _parse_text(self, length: int, start: int) -> tuple[Any, int]:
        if length < 0:
            return b"", start
        end = start + length + 2
        if length > MAX_MESSAGE_BYTES:
            return OVERSIZED, end
        if end > len(self._buffer):
            return _INCOMPLETE, 0
        return bytes(self._buffer[start : end - 2]), end


def _parse_length(line: bytes, maximum: int) -> int:
    if not line.removeprefix(b"-").isdigit() or len(line) > 12 or int(line) > maximum:
        raise StoreUnavailable("Redis sent an invalid reply")
    return int(line)


class _Stopped(BaseException):
    """Raised in `listen` after `stop`."""


class _SubscriberConnection:
    """A connection that receives messages until it is closed, or `stop_reader` is readable."""

    def __init__(self, connection: Any, stop_reader: socket.socket) -> None:
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        self._socket.settimeout(STOP_CHECK_INTERVAL_S)
        self._reader = _MessageReader()
        self._stop_reader = stop_reader
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(stop_reader, selectors.EVENT_READ)

    def subscribe(self, channel: str) -> None:
        self._send(Command(None, NO_KEYS, ("SUBSCRIBE", channel)).pack())
        if self._next_reply(time.monotonic() + REPLY_TIMEOUT_S) is None:
            raise StoreUnavailable("Redis did not answer to SUBSCRIBE")

    def messages(self, is_current: Callable[[], bool], due: Callable[[], float | None]) -> Iterator[bytes | None]:
        """Yield messages as they arrive, OVERSIZED in place of one that is too long, and None whenever it is `due`.

        Raises a StoreError when the connection is lost, or the server is not a primary any more.
        """
        received_at = time.monotonic()
        ping_at = received_at + PING_INTERVAL_S
        while True:
            next_due = due()
            reply = self._next_reply(ping_at if next_due is None else min(ping_at, next_due))
            now = time.monotonic()
            if reply is not None:
                received_at = now
            if reply is OVERSIZED or reply is None:
                yield reply
            elif isinstance(reply, list) and len(reply) == 3 and reply[0] == b"message" and type(reply[2]) is bytes:
                yield reply[2]
            if now >= ping_at:
                if now - received_at >= PING_INTERVAL_S + PING_TIMEOUT_S:
                    raise StoreUnavailable("Redis did not answer to PING")
                if not is_current():
                    raise StoreUnavailable("the server is not a primary any more")
                self._send(_PING)
                ping_at = now + PING_INTERVAL_S

    def close(self) -> None:
        self._selector.close()
        self._connection.disconnect()

    def _next_reply(self, deadline: float) -> Any:
        """The next reply, or None after the deadline."""
        while (reply := self._reader.get()) is _INCOMPLETE:
            timeout_s = 0.0 if self._has_tls_pending() else max(0.0, deadline - time.monotonic())
            ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
            if self._stop_reader in ready:
                raise _Stopped
            if not ready and not self._has_tls_pending():
                return None
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                continue  # only a part of a TLS record has arrived
            except OSError as error:
                raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
            if not data:
                raise StoreUnavailable("the connection to Redis broke: it was closed by the server")
            self._reader.feed(data)
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(f"the store answered: {reply}")
        return reply

    def _has_tls_pending(self) -> bool:
        """True if TLS has received data that the selector does not see."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _send(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
