"""What the tests of failures share: both kinds of limiter behind one face, a stopwatch, and a bad connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headgate import AsyncLimiter, Key, Limit, Limiter, StoreError
from support.servers import HOST, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headgate.health import Health
    from support.servers import RedisServer

LONG = timedelta(days=30)
"""Nothing refills while a test runs."""
SLACK = 2.0
"""Seconds that a busy machine may add to an answer."""


def key_of(name: str, identity: str = "ada", *, quota: int = 100) -> Key:
    return Limit(quota, LONG, name=name).by(identity)


def stored(key: Key) -> str:
    return f"headgate:{key.limit.name}:{key.limit.algorithm}.1:{key.identity}"


class Looped:
    """An AsyncLimiter that is asked like a Limiter."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._limiter = AsyncLimiter(url, **options)

    def at_once(self, *calls: tuple[Any, ...]) -> list[Any]:
        """The answers to checks that set out together, errors among them."""

        async def gather() -> list[Any]:
            asked = [self._limiter.check(*keys) for keys in calls]
            return await asyncio.gather(*asked, return_exceptions=True)

        return self._runner.run(gather())

    def idle(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def health(self) -> Health:
        return self._limiter.health()

    @property
    def stats(self) -> Any:
        return self._limiter.stats

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **options: self._runner.run(getattr(self._limiter, method)(*args, **options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._limiter.close())
        self._runner.close()


class Threaded(Limiter):
    """A Limiter with the same extras."""

    def at_once(self, *calls: tuple[Any, ...]) -> list[Any]:
        def ask(keys: tuple[Any, ...]) -> Any:
            try:
                return self.check(*keys)
            except StoreError as error:
                return error

        with ThreadPoolExecutor(min(len(calls), 32)) as pool:
            return list(pool.map(ask, calls))

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)


Gate = Threaded | Looped


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


class Timed(NamedTuple):
    answer: Any
    """Or the StoreError."""
    seconds: float


def timed(call: Callable[[], Any]) -> Timed:
    start = time.monotonic()
    try:
        answer = call()
    except StoreError as error:
        answer = error
    return Timed(answer, time.monotonic() - start)


def reach(gate: Limiter | Looped, key: Key) -> None:
    """Wait until the store answers, without charging anything: to connect may take a busy machine longer than the
    budget."""
    wait_until(lambda: timed(lambda: gate.peek(key).degraded).answer is None, "an exact answer")


def open_breaker(gate: Limiter | Looped, key: Key) -> None:
    """Send checks to a server that is down until its breaker opens."""

    def is_open() -> bool:
        timed(lambda: gate.check(key))
        if isinstance(gate, Looped):
            gate.idle(0.002)
        return not all(shard.ready for shard in gate.health().shards)

    wait_until(is_open, "the breaker to open")


class SocketServer:
    """Listens on a port, and serves each connection with the threads that `_serve` names."""

    def __init__(self) -> None:
        self._listening = socket.create_server((HOST, 0))
        self.url = f"redis://{HOST}:{self._listening.getsockname()[1]}/0"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def _serve(self, caller: socket.socket) -> Iterable[Callable[[], None]]:
        """The work of each thread of a connection."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                self._sockets.append(caller)
                for work in self._serve(caller):
                    thread = threading.Thread(target=self._run, args=(work,), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _run(work: Callable[[], None]) -> None:
        with suppress(OSError):
            work()


class RelayProxy(SocketServer):
    """Passes everything between a limiter and a server; `_reply` may change what goes back after a certain word."""

    def __init__(self, server: RedisServer, word: bytes) -> None:
        super().__init__()
        self._port, self._word = server.port, word

    def _serve(self, caller: socket.socket) -> Iterable[Callable[[], None]]:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = socket.create_connection((HOST, self._port))
        self._sockets.append(server)
        was_sent = threading.Event()
        return partial(self._pass_requests, caller, server, was_sent), partial(
            self._pass_replies, caller, server, was_sent
        )

    def _pass_requests(self, caller: socket.socket, server: socket.socket, was_sent: threading.Event) -> None:
        while data := caller.recv(65536):
            if self._word in data:
                was_sent.set()
            server.sendall(data)
        server.shutdown(socket.SHUT_RDWR)

    def _pass_replies(self, caller: socket.socket, server: socket.socket, was_sent: threading.Event) -> None:
        while data := server.recv(65536):
            self._reply(caller, data, was_sent.is_set())
        caller.shutdown(socket.SHUT_RDWR)

    def _reply(self, caller: socket.socket, data: bytes, was_sent: bool) -> None:
        caller.sendall(data)


class Proxy(RelayProxy):
    """A proxy that fails as soon as a request contains a certain word.

    From then on, "swallow" passes requests on and drops the replies, "drop" passes the request on and closes the
    connection, and bytes replace each reply.
    """

    def __init__(self, server: RedisServer, word: bytes, then: bytes | str) -> None:
        super().__init__(server, word)
        self._then = then

    def _reply(self, caller: socket.socket, data: bytes, was_sent: bool) -> None:
        if not was_sent:
            caller.sendall(data)
        elif self._then == "drop":
            caller.shutdown(socket.SHUT_RDWR)
        elif isinstance(self._then, bytes):
            caller.sendall(self._then)
