"""A bad network: a process between the nodes and a server, that delays, swallows, cuts or queues what passes it.

The kernel of a test machine seldom can do this, and a process of its own takes no time from those who are measured.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

HOST: Final = "127.0.0.1"
BUCKET_NS: Final = 50_000_000
RETRANSMISSION: Final = 0.2
"""Seconds after which Linux sends a lost packet again, at least."""
_NO_LINGERING: Final = struct.pack("ii", 1, 0)


class Weather(NamedTuple):
    """What happens to connections and bytes from now on.

    - fair: all passes as it comes
    - slow: answers come `amount` seconds late
    - distant: slow, and the packets of a share of `loss` of the answers are lost and sent again
    - refused: open connections are reset, and new ones refused
    - silent: connections are taken, and nothing ever comes back
    - dripping: answers come byte by byte, `amount` seconds apart
    - crowded: the server works on one request at a time, `amount` seconds for each byte of it: the more is asked, the
      later come the answers, and what nobody waits for any more is worked on all the same
    """

    kind: Literal["fair", "slow", "distant", "refused", "silent", "dripping", "crowded"] = "fair"
    amount: float = 0.0
    loss: float = 0.0


FAIR: Final = Weather()


class Order(NamedTuple):
    """What the proxy is told: change the weather, hang up on everybody, or tell what has passed."""

    what: Literal["weather", "hang up", "traffic"]
    door: int | None = None
    """Which port; None for all of them."""
    weather: Weather = FAIR


class Traffic(NamedTuple):
    """What came from the nodes in one twentieth of a second."""

    at_ns: int
    requests: int
    size: int


def serve(line: Connection, server_port: int, doors: int) -> None:
    """The life of the process: says its ports, then does what it is told, and ends when the line is closed."""
    server = _Server(server_port)
    asyncio.run(_serve(line, [_Door(server) for _ in range(doors)]))


def serve_links(line: Connection, server_ports: Sequence[int]) -> None:
    """The same, with one door in front of each of several servers."""
    asyncio.run(_serve(line, [_Door(_Server(port)) for port in server_ports]))


async def _serve(line: Connection, doors: list[_Door]) -> None:
    orders: asyncio.Queue[Order | None] = asyncio.Queue()

    def hear() -> None:
        try:
            orders.put_nowait(line.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(line.fileno())
            orders.put_nowait(None)

    for door in doors:
        await door.open()
    asyncio.get_running_loop().add_reader(line.fileno(), hear)
    line.send([door.port for door in doors])
    while (order := await orders.get()) is not None:
        meant = doors if order.door is None else [doors[order.door]]
        for door in meant:
            if order.what == "weather":
                await door.turn(order.weather)
            elif order.what == "hang up":
                door.hang_up()
        line.send([each for door in meant for each in door.traffic()] if order.what == "traffic" else None)
    for door in doors:
        door.close()
        door.hang_up()


class _Server:
    """What is behind all doors."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.busy_until = 0.0
        """When the work that it has taken on will be done, in crowded times."""


class _Door:
    """One port, in front of the server."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.weather = FAIR
        self.connections: set[_ProxiedConnection] = set()
        # As with the tests' servers, the port stays ours while it is closed, and connections to it are refused.
        self._holder = socket.socket()
        self._holder.bind((HOST, 0))
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port: int = self._holder.getsockname()[1]
        self._listening: asyncio.Server | None = None
        self._traffic: dict[int, tuple[int, int]] = {}

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: _ProxiedConnection(self), HOST, self.port, reuse_address=True
        )

    async def turn(self, weather: Weather) -> None:
        was, self.weather = self.weather, weather
        if weather.kind == "refused":
            self.close()
        elif was.kind == "refused":
            await self.open()
        if "refused" in (was.kind, weather.kind) or was.kind in ("silent", "dripping"):
            self.hang_up()  # on a connection that has lost something, nothing more can be said

    def hang_up(self) -> None:
        for connection in list(self.connections):
            connection.reset()

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def count(self, size: int) -> None:
        at = time.monotonic_ns() // BUCKET_NS
        requests, sizes = self._traffic.get(at, (0, 0))
        self._traffic[at] = (requests + 1, sizes + size)

    def traffic(self) -> list[Traffic]:
        return [Traffic(at * BUCKET_NS, *counted) for at, counted in self._traffic.items()]


class _ProxiedConnection(asyncio.Protocol):
    """One connection of a node's, and the one to the server that belongs to it."""

    def __init__(self, door: _Door) -> None:
        self._door = door
        self._node: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._early = bytearray()
        """What came before the server was connected to."""
        self._asked: deque[bytes] = deque()
        """Requests that the server has not come to yet, in their order."""
        self._due: deque[bytes] = deque()
        """Answers that are being kept back, in their order."""
        self._arrival = 0.0
        """When the last answer arrives that is on a long way."""
        self._dripping = False
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._node = transport
        if self._door.weather.kind == "refused":  # it was taken in the moment when the door was closed
            self.reset()
            return
        self._door.connections.add(self)
        self._connecting = asyncio.create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        self._door.count(len(data))
        weather = self._door.weather
        if weather.kind == "silent":
            return
        now, server = time.monotonic(), self._door.server
        if weather.kind == "crowded" or server.busy_until > now:
            work = len(data) * weather.amount if weather.kind == "crowded" else 0.0
            server.busy_until = max(now, server.busy_until) + work
            self._asked.append(data)
            self._later(server.busy_until - now, lambda: self._to_server(self._asked.popleft()))
        else:
            self._to_server(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._node = None
        self.reset()

    def reset(self) -> None:
        self._door.connections.discard(self)
        for transport in (self._node, self._server):
            if transport is not None and not transport.is_closing():
                # Without lingering, what is closed is reset: the other end is told that something was lost.
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
                transport.abort()

    def answer(self, data: bytes) -> None:
        weather = self._door.weather
        if weather.kind in ("slow", "distant") or self._due:
            self._due.append(data)
            if weather.kind == "slow":
                self._later(weather.amount, self._to_node)
            elif weather.kind == "distant":
                now, lost = time.monotonic(), random.random() < weather.loss
                # What follows a lost packet waits for it.
                self._arrival = max(self._arrival, now + weather.amount + RETRANSMISSION * lost)
                self._later(self._arrival - now, self._to_node)
            elif not self._dripping:
                self._to_node()
        elif weather.kind == "dripping":
            self._due.extend(data[at : at + 1] for at in range(len(data)))
            self._drip()
        elif weather.kind != "silent" and self._node is not None:
            self._node.write(data)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server, _ = await loop.create_connection(lambda: _Far(self), HOST, self._door.server.port)
        except OSError:
            self.reset()
            return
        if self not in self._door.connections:
            self._server.abort()
        elif self._early:
            self._server.write(bytes(self._early))

    def _to_server(self, data: bytes) -> None:
        if self._server is None:
            self._early += data
        else:
            self._server.write(data)

    def _to_node(self) -> None:
        if self._due and self._node is not None:
            self._node.write(self._due.popleft())

    def _drip(self) -> None:
        self._to_node()
        self._dripping = bool(self._due)
        if self._dripping:
            self._later(self._door.weather.amount, self._drip)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, then)


class _Far(asyncio.Protocol):
    """The server's end."""

    def __init__(self, connection: _ProxiedConnection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.answer(data)

    def connection_lost(self, _: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop may be closing
            self._connection.reset()
