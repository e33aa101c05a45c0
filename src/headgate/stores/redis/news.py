"""What other processes tell through the store: who is blocked, and which remembered denials hold no longer.

News are kept by nobody: what is said while the connection is lost is never heard. So whoever listens looks anew at
what is stored each time that it is connected.
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

from hiredis import HiredisError, Reader, ReplyError

from headgate._forks import renew_in_children
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.companion import CONNECT, PATIENCE, Companion, read_block
from headgate.stores.redis.conversation import Unsent
from headgate.stores.redis.line import Opening
from headgate.stores.redis.wire import NO_KEYS, Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Node, Wire

__all__ = ["Listener"]

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

_PING: Final = Command(None, NO_KEYS, ("PING",)).pack()


class Listener:
    """Hears the news of one namespace, in a thread that it is given, and passes each on as it comes.

    `on_connect` is called whenever news will be heard from now on: look then at all that is stored. What is said
    meanwhile is passed on afterwards, so that nothing is missed, and the later word holds. If it raises a StoreError,
    the connection is tried anew. `on_lost` is called with the reason when nothing is heard any more, or cannot be from
    the start: once, and not again before the next `on_connect`.
    """

    def __init__(
        self,
        place: Place,
        wire: Wire,
        *,
        on_block: Callable[[str, str, int | None, str | None], Any],
        on_unblock: Callable[[str, str], Any],
        on_forget: Callable[[str, str], Any],
        on_connect: Callable[[], Any] = lambda: None,
        on_lost: Callable[[StoreError], Any] = lambda error: None,
    ) -> None:
        self._place = place
        self._wire = wire
        self._channel = wire.news
        self._on_block = on_block
        self._on_unblock = on_unblock
        self._on_forget = on_forget
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._node: Node | None = None
        """The server that was chosen last."""
        self._stopped = False
        self._bell: socket.socket | None = None
        renew_in_children(self)

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
                        self._look_anew()
                        hears = True
                        for message in ears.messages(self._is_current):
                            self._tell(self._pass_on, message)
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

    def renew_after_fork(self) -> None:
        """Nobody listens in a child, and it must not ring its parent's bell."""
        self._stopped, self._bell = False, None

    def _open(self, ear: socket.socket) -> _Ears:
        """A connection to one of the servers. All that may take long is done by a thread that nobody waits for."""
        chosen: list[Node | None] = []
        opening = Opening(lambda: self._connection(chosen))
        try:
            late = time.monotonic() + PATIENCE
            while True:
                if self._stopped:
                    raise _Stopped
                try:
                    return _Ears(opening.wait(GLANCE), ear)
                except Unsent:
                    if opening.is_over or time.monotonic() > late:
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
        return self._place.connection(chosen[0], asynchronous=False, timeout=CONNECT)

    def _choose(self) -> Node | None:
        """A primary: in a cluster, all of them hear everything. The one that was lost is not asked again, if there are
        others."""
        companion = Companion(self._place, self._wire)
        try:
            primaries = companion.shards(suspects=(self._node,))
        finally:
            companion.close()
        return _chance.choice([node for node in primaries if node != self._node] or primaries)

    def _is_current(self) -> bool:
        """Whether the server still is a primary: what a server hears that was cut off, nobody knows."""
        return self._node in (self._place.topology.primaries() or [self._node])

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

    def _pass_on(self, message: bytes) -> None:
        verb, _, rest = message.partition(b" ")
        block = read_block(rest) if verb in (b"block", b"unblock") else None
        if verb == b"block" and block is not None:
            self._tell(self._on_block, *block)
        elif block is not None:
            self._tell(self._on_unblock, block.kind, block.value)
        elif verb == b"forget" and rest.count(b":") >= 2:
            # A limit's name has no colon, nor has its algorithm; the identity may have any.
            name, algorithm, identity = rest.decode("utf-8", "surrogatepass").split(":", 2)
            self._tell(self._on_forget, f"{name}:{algorithm}", identity)
        else:
            logger.warning("news that nobody understands came on %s, and were left out", self._channel)

    def _tell(self, listener: Callable[..., Any], *news: Any) -> None:
        """A mistake of whoever hears it must not be the end of all news."""
        try:
            listener(*news)
        except Exception:
            logger.exception("what was heard on %s could not be taken in", self._channel)


class _Stopped(BaseException):
    """It is time to stop."""


class _Ears:
    """One connection that has subscribed."""

    def __init__(self, connection: Any, ear: socket.socket) -> None:
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        self._socket.settimeout(GLANCE)
        self._reader = Reader()
        self._watch = selectors.DefaultSelector()
        self._watch.register(self._socket, selectors.EVENT_READ)
        self._watch.register(ear, selectors.EVENT_READ)
        self._ear = ear

    def subscribe(self, channel: str) -> None:
        self._send(Command(None, NO_KEYS, ("SUBSCRIBE", channel)).pack())
        reply = self._next(time.monotonic() + PATIENCE)
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(f"the store answered: {reply}")
        if reply is None:
            raise StoreUnavailable("Redis did not answer to SUBSCRIBE")

    def messages(self, is_current: Callable[[], bool]) -> Iterator[bytes]:
        """What is told, as it comes; a StoreError when the connection is lost, or the server not the right one."""
        asked = False
        while True:
            reply = self._next(time.monotonic() + (SILENCE if asked else QUIET))
            if isinstance(reply, list):
                asked = False
                if reply[0] == b"message":
                    yield reply[2]
            elif isinstance(reply, ReplyError):
                raise StoreUnavailable(f"the store answered: {reply}")
            elif asked:
                raise StoreUnavailable("Redis has fallen silent")
            elif not is_current():
                raise StoreUnavailable("the server is no primary any more")
            else:
                self._send(_PING)
                asked = True

    def close(self) -> None:
        self._watch.close()
        self._connection.disconnect()

    def _next(self, deadline: float) -> Any:
        """The next reply, or None if there is none until then."""
        while (reply := self._reader.gets()) is False:
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
            except (OSError, HiredisError) as error:
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
