"""What the tests of failures share: both kinds of limiter behind one face, a stopwatch, and a bad connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headgate import AsyncLimiter, Key, Limit, Limiter, StoreError
from support.servers import HOST, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.health import Health
    from support.servers import RedisServer

LONG = timedelta(days=30)
"""Nothing refills while a test runs."""
SLACK = 1.0
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
    wait_until(lambda: timed(lambda: gate.peek(key).degraded).answer is None, "an exact answer", timeout=10)


class Proxy:
    """Stands between a limiter and a server, and passes all on until a request contains a certain word.

    From then on it does to that connection what it was made for: "swallow" passes requests on and keeps the answers,
    "drop" passes the request on and hangs up, and anything else is said to the limiter in place of an answer.
    """

    def __init__(self, server: RedisServer, word: bytes, then: bytes | str) -> None:
        self._port, self._word, self._then = server.port, word, then
        self._listening = socket.create_server((HOST, 0))
        self.url = f"redis://{HOST}:{self._listening.getsockname()[1]}/0"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

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
                server = socket.create_connection((HOST, self._port))
                self._sockets += [caller, server]
                met = threading.Event()
                for work in (self._pass_requests, self._pass_answers):
                    thread = threading.Thread(target=work, args=(caller, server, met), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_requests(self, caller: socket.socket, server: socket.socket, met: threading.Event) -> None:
        with suppress(OSError):
            while data := caller.recv(65536):
                if self._word in data:
                    met.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _pass_answers(self, caller: socket.socket, server: socket.socket, met: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if not met.is_set():
                    caller.sendall(data)
                elif self._then == "drop":
                    caller.shutdown(socket.SHUT_RDWR)
                elif isinstance(self._then, bytes):
                    caller.sendall(self._then)
