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

_chance = random.Random()

QUIET: Final = 2.0
"""Seconds without a word after which the server is asked for one."""
SILENCE: Final = 2.0
"""Seconds after that question in which an answer must come: else the connection is lost, whatever it looks like."""
SHORTEST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts to connect: they double from the one to the other."""
GLANCE: Final = 0.05
"""Seconds after which it is looked whether to stop."""

MAX_MESSAGE_BYTES: Final = 32_768
"""Longer messages are skipped as they arrive, without being stored."""
MAX_PENDING: Final = 1_000
"""Changed blocks waiting to be read. With more of them, all blocks are read instead."""
MAX_READ_AT_ONCE: Final = 50
READ_INTERVAL_S: Final = 0.02
"""Between two reads of changed blocks. The first after a pause is immediate."""
READ_ALL_INTERVAL_S: Final = 1.0
READ_ALL_MAX_SHARE: Final = 0.1
"""Of the time, at most, is spent on reading all blocks: where there are many, they are read less often."""
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
    StoreError from any of these makes it connect again. `on_lost` is called with the reason when the connection is
    lost, or cannot be opened: once, and not again before the next `on_connect`.
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
        self._channel = encoder.news
        self._on_blocks_changed = on_blocks_changed
        self._on_forget = on_forget
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._node: Node | None = None
        """The server that was chosen last."""
        self._stopped = False
        self._bell: socket.socket | None = None
        self._pending = _Pending()
        self.ignored = 0
        """Messages that were malformed or too long."""
        self._ignored_before = 0
        self._warn_at = 0.0
        reinit_after_fork(self)

    def listen(self) -> None:
        """Listen until `stop` is called, however often the connection is lost."""
        ear, bell = socket.socketpair()
        with ear, bell, suppress(_Stopped):
            self._bell = bell
            pause, hears = SHORTEST_PAUSE, True
            while True:
                began = time.monotonic()
                try:
                    with closing(self._open(ear)) as ears:
                        ears.subscribe(self._channel)
                        self._pending = _Pending()
                        self._look_anew()
                        hears = True
                        for message in ears.messages(self._is_current, self._pending.due):
                            if message is not None and not self._pending.add(message):
                                self._ignore()
                            self._apply()
                except StoreError as error:
                    if hears:
                        self._tell(self._on_lost, error)
                    hears = False
                except Exception as error:  # nobody would begin to listen again
                    logger.exception("what came on %s could not be understood; it is connected to anew", self._channel)
                    if hears:
                        self._tell(self._on_lost, StoreUnavailable(f"what came from Redis is no news: {error}"))
                    hears = False
                lasted = time.monotonic() - began
                pause = SHORTEST_PAUSE if lasted > LONGEST_PAUSE else min(pause * 2, LONGEST_PAUSE)
                self._rest(ear, pause * _chance.uniform(0.5, 1.0))

    def stop(self) -> None:
        """Let `listen` return: at once, or as soon as a function that it has called does."""
        self._stopped = True
        if self._bell is not None:
            with suppress(OSError):  # it has returned already
                self._bell.send(b"!")

    def reset_after_fork(self) -> None:
        """Nobody listens in a child, and it must not ring its parent's bell."""
        self._stopped, self._bell = False, None

    def _open(self, ear: socket.socket) -> _SubscriberConnection:
        """A connection to one of the servers. All that may take long is done by a thread that nobody waits for."""
        chosen: list[Node | None] = []
        opening = PendingConnection(lambda: self._connection(chosen))
        try:
            late = time.monotonic() + REPLY_TIMEOUT_S
            while True:
                if self._stopped:
                    raise _Stopped
                try:
                    return _SubscriberConnection(opening.wait(GLANCE), ear)
                except NotSent:
                    if opening.is_done or time.monotonic() > late:
                        raise
        except BaseException:
            opening.abandon()
            raise
        finally:
            if chosen:
                (self._node,) = chosen

    def _connection(self, chosen: list[Node | None]) -> Any:
        try:
            chosen.append(self._choose())
        except StoreError as error:
            raise OSError(str(error)) from error  # as one that cannot be connected to
        return self.factory.connection(chosen[0], asynchronous=False, timeout=CONNECT_TIMEOUT_S)

    def _choose(self) -> Node | None:
        """A primary: in a cluster, all of them hear everything. The one that was lost is not asked again, if there are
        others."""
        companion = BackgroundClient(self.factory, self.encoder)
        try:
            primaries = companion.find_primaries(suspects=(self._node,))
        finally:
            companion.close()
        return _chance.choice([node for node in primaries if node != self._node] or primaries)

    def _is_current(self) -> bool:
        """Whether the server still is a primary: what a server hears that was cut off, nobody knows."""
        return self._node in (self.factory.topology.primaries() or [self._node])

    def _rest(self, ear: socket.socket, seconds: float) -> None:
        ear.settimeout(seconds)
        with suppress(TimeoutError):
            ear.recv(1)
        if self._stopped:
            raise _Stopped

    def _look_anew(self) -> None:
        try:
            self._on_connect()
        except StoreError:
            raise
        except Exception:
            logger.exception("what is stored beside %s could not be taken in", self._channel)

    def _apply(self) -> None:
        """Act on pending messages as far as the rate limits allow."""
        now = time.monotonic()
        for space, identity in self._pending.take_forgotten(now):
            self._tell(self._on_forget, space, identity)
        if self._pending.take_all(now):
            self._read_blocks(None)
            self._pending.note_read_all(now, time.monotonic())
        elif identities := self._pending.take_blocks(now):
            self._read_blocks(identities)

    def _read_blocks(self, identities: list[tuple[str, str]] | None) -> None:
        try:
            self._on_blocks_changed(identities)
        except StoreError:
            raise
        except Exception:
            logger.exception("blocks could not be read after a message on %s", self._channel)

    def _ignore(self) -> None:
        """Count a malformed or oversized message, and warn now and then."""
        self.ignored += 1
        now = time.monotonic()
        if now >= self._warn_at:
            count, self._ignored_before = self.ignored - self._ignored_before, self.ignored
            logger.warning("ignored %d malformed or oversized messages on %s", count, self._channel)
            self._warn_at = now + LOG_INTERVAL_S

    def _tell(self, listener: Callable[..., Any], *news: Any) -> None:
        """A mistake of whoever hears it must not be the end of all news."""
        try:
            listener(*news)
        except Exception:
            logger.exception("what was heard on %s could not be taken in", self._channel)


class _Pending:
    """Coalesces messages: each counter and each block is there once, however often it was named."""

    def __init__(self) -> None:
        self._forgotten: dict[tuple[str, str], None] = {}
        self._blocks: dict[tuple[str, str], None] = {}
        self._all = False
        self._forget_at = self._read_at = self._read_all_at = 0.0

    def add(self, message: bytes) -> bool:
        """Note a message; False if it is malformed."""
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        verb, _, rest = message.partition(b" ")
        if verb == b"block" and not rest:
            self._note_all()
            return True
        if verb == b"block":
            block = read_block(rest)
            if block is None:
                return False
            self._blocks[block.kind, block.value] = None
            if len(self._blocks) > MAX_PENDING:
                self._note_all()
            return True
        if verb == b"forget" and rest.count(b":") >= 2:
            try:
                # A limit's name has no colon, nor has its algorithm; the identity may have any.
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

    def note_read_all(self, began: float, ended: float) -> None:
        self._read_all_at = max(began + READ_ALL_INTERVAL_S, ended + (ended - began) / READ_ALL_MAX_SHARE)

    def _note_all(self) -> None:
        self._all = True
        self._blocks.clear()


OVERSIZED: Final = b"\xff"
"""Stands for a message that was too long to be received; no message is spelled like that."""
_INCOMPLETE: Final = object()


class _Reader:
    """Incremental RESP parser for a subscribed connection; stores at most MAX_MESSAGE_BYTES of any message."""

    MAX_LINE: Final = 4_096
    MAX_ITEMS: Final = 8
    MAX_SKIPPED: Final = 2**32

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
        if reply is _INCOMPLETE:
            return reply
        self._skipped = max(0, end - len(self._buffer))
        del self._buffer[:end]
        return reply

    def _parse(self, start: int) -> tuple[Any, int]:
        """A reply and where it ends, which may be beyond what was received of an oversized one."""
        line_end = self._buffer.find(b"\r\n", start, start + self.MAX_LINE)
        if line_end < 0:
            if len(self._buffer) - start >= self.MAX_LINE:
                raise StoreUnavailable("what came from Redis is no reply")
            return _INCOMPLETE, 0
        kind, line = bytes(self._buffer[start : start + 1]), bytes(self._buffer[start + 1 : line_end])
        end = line_end + 2
        if kind in (b"*", b">"):
            return self._parse_items(_length(line, self.MAX_ITEMS), end)
        if kind == b"$":
            return self._parse_text(_length(line, self.MAX_SKIPPED), end)
        if kind == b"-":
            return ReplyError(line.decode("utf-8", "replace")), end
        if kind in (b"+", b":", b"_"):
            return line, end
        raise StoreUnavailable("what came from Redis is no reply")

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


def _length(line: bytes, most: int) -> int:
    if not line.removeprefix(b"-").isdigit() or len(line) > 12 or int(line) > most:
        raise StoreUnavailable("what came from Redis is no reply")
    return int(line)


class _Stopped(BaseException):
    """It is time to stop."""


class _SubscriberConnection:
    """One connection that has subscribed."""

    def __init__(self, connection: Any, ear: socket.socket) -> None:
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        self._socket.settimeout(GLANCE)
        self._reader = _Reader()
        self._watch = selectors.DefaultSelector()
        self._watch.register(self._socket, selectors.EVENT_READ)
        self._watch.register(ear, selectors.EVENT_READ)
        self._ear = ear

    def subscribe(self, channel: str) -> None:
        self._send(Command(None, NO_KEYS, ("SUBSCRIBE", channel)).pack())
        reply = self._next(time.monotonic() + REPLY_TIMEOUT_S)
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(f"the store answered: {reply}")
        if reply is None:
            raise StoreUnavailable("Redis did not answer to SUBSCRIBE")

    def messages(self, is_current: Callable[[], bool], due: Callable[[], float | None]) -> Iterator[bytes | None]:
        """Yield messages as they arrive, OVERSIZED in place of one that is too long, and None whenever it is `due`.

        Raises a StoreError when the connection is lost, or the server is not the right one any more.
        """
        heard_at = time.monotonic()
        probe_at = heard_at + QUIET
        while True:
            next_due = due()
            reply = self._next(probe_at if next_due is None else min(probe_at, next_due))
            now = time.monotonic()
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(f"the store answered: {reply}")
            if reply is not None:
                heard_at = now
            if reply is OVERSIZED:
                yield OVERSIZED
            elif isinstance(reply, list) and len(reply) == 3 and reply[0] == b"message" and type(reply[2]) is bytes:
                yield reply[2]
            elif reply is None:
                yield None
            if now >= probe_at:
                if now - heard_at >= QUIET + SILENCE:
                    raise StoreUnavailable("Redis has fallen silent")
                if not is_current():
                    raise StoreUnavailable("the server is no primary any more")
                self._send(_PING)
                probe_at = now + QUIET

    def close(self) -> None:
        self._watch.close()
        self._connection.disconnect()

    def _next(self, deadline: float) -> Any:
        """The next reply, or None if there is none until then."""
        while (reply := self._reader.get()) is _INCOMPLETE:
            seconds = 0.0 if self._has_more() else max(0.0, deadline - time.monotonic())
            ready = [key.fileobj for key, _ in self._watch.select(seconds)]
            if self._ear in ready:
                raise _Stopped
            if not ready and not self._has_more():
                return None
            try:
                self._reader.feed(self._receive())
            except TimeoutError:
                continue  # a part of what TLS sends in one piece
            except OSError as error:
                raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
        return reply

    def _receive(self) -> bytes:
        data: bytes = self._socket.recv(65536)
        if not data:
            raise ConnectionError("it was closed by the server")
        return data

    def _has_more(self) -> bool:
        """Whether something has been received that no look at the socket would tell of."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _send(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            raise StoreUnavailable(f"the connection to Redis broke: {error}") from error
