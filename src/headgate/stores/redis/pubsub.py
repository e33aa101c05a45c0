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
import re
import socket
import time
from contextlib import closing, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from headgate._fork import reinit_after_fork
from headgate._interrupts import InterruptSafeEvent
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.background_client import REPLY_TIMEOUT_S, BackgroundClient, read_block
from headgate.stores.redis.batch_protocol import NotSent
from headgate.stores.redis.connection_pool import CONNECT_TIMEOUT_S, PendingConnection, socket_of
from headgate.stores.redis.encoding import NO_KEYS, Command, CommandEncoder, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.stores.redis.connection_factory import ConnectionFactory

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
MAX_PENDING: Final = 25_000
"""Changed entries waiting to be read. With more of them, all are read instead."""
MAX_FORGOTTEN: Final = 1_000
"""Invalidated denials waiting to be forgotten. With more of them, this happens at once."""
MIN_READ_AT_ONCE: Final = 50
MAX_READ_AT_ONCE: Final = 1_000
READ_PART: Final = 4
"""A quarter of what waits is read at once: thousands of blocks in a moment are known within a second."""
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
        self._on_blocks_changed = on_blocks_changed
        self._on_forget = on_forget
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._node: Node | None = None
        """The server chosen last."""
        self._pending = _Pending()
        self._ignored_before = 0
        self._warn_at = 0.0
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Start afresh: a child has no such thread, and must not stop that of its parent."""
        self._stopped = InterruptSafeEvent()
        self._socket: socket.socket | None = None

    def listen(self) -> None:
        """Receive messages until `stop` is called, reconnecting as often as needed."""
        pause_s, was_connected = MIN_RECONNECT_S, True
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                with closing(self._open()) as connection:
                    connection.subscribe(self.encoder.channel)
                    self._pending = _Pending()
                    self._call(self._on_connect)
                    was_connected = True
                    for message in connection.messages(self._is_current, self._pending.due):
                        if message is not None and not self._pending.add(message):
                            self._ignore()
                        self._apply()
            except Exception as error:
                if self._stopped.is_set():
                    return
                reason = error if isinstance(error, StoreError) else StoreUnavailable(f"it failed: {error}")
                if reason is not error:
                    logger.exception("subscription to %s failed; reconnecting", self.encoder.channel)
                if was_connected:
                    with suppress(StoreError):
                        self._call(self._on_lost, reason)
                was_connected = False
            lasted_s = time.monotonic() - started
            pause_s = MIN_RECONNECT_S if lasted_s > MAX_RECONNECT_S else min(pause_s * 2, MAX_RECONNECT_S)
            self._stopped.wait(pause_s * _random.uniform(0.5, 1.0))

    def stop(self) -> None:
        """Make `listen` return: immediately, or after the callback that it is in."""
        self._stopped.set()
        if self._socket is not None:
            with suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _open(self) -> _SubscriberConnection:
        """A connection to one of the servers, opened in another thread so that `stop` need not wait for it."""
        chosen: list[Node | None] = []
        pending = PendingConnection(lambda: self._new_connection(chosen))
        try:
            deadline = time.monotonic() + REPLY_TIMEOUT_S
            while True:
                try:
                    connection = _SubscriberConnection(pending.wait(STOP_CHECK_INTERVAL_S))
                    break
                except NotSent:
                    if pending.is_done or time.monotonic() > deadline or self._stopped.is_set():
                        raise
            self._socket = connection.socket
            if self._stopped.is_set():  # before it could be shut down
                raise NotSent("the subscriber was stopped")
        except BaseException:
            pending.abandon()
            raise
        finally:
            if chosen:
                (self._node,) = chosen
        return connection

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
        now, pending = time.monotonic(), self._pending
        for space, identity in pending.take_forgotten(now):
            self._call(self._on_forget, space, identity)
        if pending.all_changed and now >= pending.read_all_at:
            pending.all_changed = False
            self._call(self._on_blocks_changed, None)
            ended = time.monotonic()
            pending.read_all_at = max(now + READ_ALL_INTERVAL_S, ended + (ended - now) / READ_ALL_MAX_SHARE)
        elif identities := pending.take_blocks(now):
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
        self.all_changed = False
        """True if all blocks have to be read again, and not only those that were named."""
        self.read_all_at = 0.0
        self._forgotten: dict[tuple[str, str], None] = {}
        self._blocks: dict[tuple[str, str], None] = {}
        self._forget_at = self._read_at = 0.0

    def add(self, message: bytes) -> bool:
        """Add a message; False if it is malformed."""
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        verb, _, rest = message.partition(b" ")
        if verb == b"block":
            block = read_block(rest)
            if block is not None:
                self._blocks[block.kind, block.value] = None
            elif rest:
                return False
            if block is None or len(self._blocks) > MAX_PENDING:
                self.all_changed = True
                self._blocks.clear()
            return True
        if verb == b"forget" and rest.count(b":") >= 2:
            try:
                # Neither a limit's name nor its algorithm has a colon; the identity may have any.
                name, algorithm, identity = rest.decode("utf-8", "surrogatepass").split(":", 2)
            except UnicodeDecodeError:
                return False
            self._forgotten[f"{name}:{algorithm}", identity] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forget_at = 0.0
            return True
        return False

    def due(self) -> float | None:
        """The next instant, on the monotonic clock, at which something is to be done."""
        dues = [self._forget_at] if self._forgotten else []
        dues += [self._read_at] if self._blocks else []
        dues += [self.read_all_at] if self.all_changed else []
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
        most = min(max(MIN_READ_AT_ONCE, len(self._blocks) // READ_PART), MAX_READ_AT_ONCE)
        taken = list(islice(self._blocks, most))
        for identity in taken:
            del self._blocks[identity]
        self._read_at = now + READ_INTERVAL_S
        return taken


OVERSIZED: Final = b"\xff"
"""Stands for a message that was too long to be received; no message consists of these bytes."""
_INCOMPLETE: Final = object()
_HEADER: Final = re.compile(rb"([*>$+:_-])([^\r\n]{0,4096})\r\n")
_MAX_HEADER_BYTES: Final = 4_099
_MAX_LENGTHS: Final = {b"*": 8, b">": 8, b"$": 2**32}
"""The items that an array, and the bytes that a text may announce."""


class _MessageReader:
    """Incremental RESP parser for a subscribed connection; stores at most MAX_MESSAGE_BYTES of any message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skipped = 0
        """Bytes of an oversized message that are still to come."""

    def feed(self, data: bytes) -> None:
        skipped = min(self._skipped, len(data))
        self._skipped -= skipped
        self._buffer += data[skipped:]

    def get(self) -> Any:
        """The next reply, OVERSIZED in place of one that is too long, or _INCOMPLETE."""
        reply, end = self._parse(0)
        if reply is not _INCOMPLETE:
            self._skipped = max(0, end - len(self._buffer))
            del self._buffer[:end]
        return reply

    def _parse(self, start: int) -> tuple[Any, int]:
        """A reply and where it ends, which may be beyond what was received of an oversized one."""
        header = _HEADER.match(self._buffer, start)
        if header is None:
            if len(self._buffer) - start >= _MAX_HEADER_BYTES:
                raise StoreUnavailable("Redis sent an invalid reply")
            return _INCOMPLETE, 0
        kind, line, end = header[1], header[2], header.end()
        if kind == b"-":
            return ReplyError(line.decode("utf-8", "replace")), end
        if kind not in _MAX_LENGTHS:
            return line, end
        if not re.fullmatch(rb"-?[0-9]{1,11}", line) or int(line) > _MAX_LENGTHS[kind]:
            raise StoreUnavailable("Redis sent an invalid reply")
        if kind == b"$":
            return self._parse_text(int(line), end)
        items = []
        for _ in range(int(line)):
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


class _SubscriberConnection:
    """A connection that receives messages until it is closed, or its socket is shut down."""

    def __init__(self, connection: Any) -> None:
        self.socket: socket.socket = socket_of(connection)
        self.close = connection.disconnect
        self._reader = _MessageReader()

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

    def _next_reply(self, deadline: float) -> Any:
        """The next reply, or None after the deadline."""
        while (reply := self._reader.get()) is _INCOMPLETE:
            try:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
                data = self.socket.recv(65536)
            except TimeoutError:
                return None
            except OSError as error:
                raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
            if not data:
                raise StoreUnavailable("the connection to Redis broke: it was closed by the server")
            self._reader.feed(data)
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(f"the store answered: {reply}")
        return reply

    def _send(self, packed: bytes) -> None:
        try:
            self.socket.settimeout(STOP_CHECK_INTERVAL_S)
            self.socket.sendall(packed)
        except OSError as error:
            raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
