"""Load for `headgate serve`: gRPC and HTTP calls with content that is encoded in advance.

Ordinary clients, grpcio among them, would use more CPU time than the server that they measure. These parse only as
much of a response as they need to recognise its end and a failure.
"""

import random
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from time import perf_counter, process_time
from typing import Protocol

from bench.correctness import WrongAnswerError

TIMEOUT_S = 10.0
MAX_READ = 262_144

# HTTP/2: frame types, flags and settings
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW = 2**31 - 1
SUCCESS = b"\x0bgrpc-status\x010"
"""`grpc-status: 0` as a literal of the trailers."""
ALLOWED = b"\x08\x01"
"""The first field of a `RateLimitResponse`: `overall_code: OK`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Calls to make: `messages` in turn, over `concurrent` connections with one call in progress on each."""

    address: tuple[str, int]
    messages: Sequence[bytes]
    concurrent: int
    seconds: float
    path: str | None = None
    """The method of gRPC; None for HTTP, where messages are whole requests."""
    rate: float | None = None
    """Calls a second, at random times; None to begin a call as soon as another ends."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The seconds that each call took, sorted, and the time of the run."""

    laps: list[float]
    seconds: float
    cpu_s: float
    """CPU time of the client."""

    @property
    def rate(self) -> float:
        return len(self.laps) / self.seconds

    def percentile_us(self, percent: int) -> float:
        return self.laps[len(self.laps) * percent // 100] * 1e6


def run_load(load: Load) -> LoadResult:
    """Make the calls; raises WrongAnswerError if one fails or is not allowed.

    With a rate, a call takes from the time at which it is due, so that the time during which all connections are busy
    counts as well.
    """
    connections: list[_Connection] = [
        _HttpConnection(load.address) if load.path is None else _GrpcConnection(load.address, load.path)
        for _ in range(load.concurrent)
    ]
    # epoll waits for whole milliseconds, select for microseconds.
    selector = selectors.DefaultSelector() if load.rate is None else selectors.SelectSelector()
    try:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        cpu = process_time()
        began = perf_counter()
        laps = _run(load, connections, selector, began)
        return LoadResult(sorted(laps), perf_counter() - began, process_time() - cpu)
    finally:
        selector.close()
        for connection in connections:
            connection.socket.close()


def _run(
    load: Load, connections: "list[_Connection]", selector: selectors.BaseSelector, began: float
) -> Iterator[float]:
    until = began + load.seconds
    supply = cycle(load.messages)
    due = iter(_due_times(load, began))
    next_due = next(due)
    free = deque(connections)
    since: dict[_Connection, float] = {}
    while True:
        now = perf_counter()
        while free and next_due <= now < until:
            connection = free.popleft()
            since[connection] = now if load.rate is None else next_due
            connection.send(next(supply))
            next_due = next(due)
        if not since and max(now, next_due) >= until:
            return
        waits_for_due = bool(free) and max(now, next_due) < until
        ready = selector.select(max(0.0, next_due - perf_counter()) if waits_for_due else TIMEOUT_S)
        if not ready and not waits_for_due:
            raise WrongAnswerError(f"{len(since)} calls have no answer after {TIMEOUT_S:g} s")
        for key, _ in ready:
            connection = key.data
            if connection.receive():
                yield perf_counter() - since.pop(connection)
                free.append(connection)


def _due_times(load: Load, began: float) -> Iterator[float]:
    """The times at which calls begin, if a connection is free."""
    if load.rate is None:
        yield from repeat(began)
    else:
        chance = random.Random(load.seed)
        while True:
            began += chance.expovariate(load.rate)
            yield began


class _Connection(Protocol):
    socket: socket.socket

    def send(self, message: bytes) -> None:
        """Begin a call."""

    def receive(self) -> bool:
        """Read what has arrived; True if the call has ended."""


class _HttpConnection:
    """HTTP/1.1 with one call at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = _connect(address)
        self._received = b""

    def send(self, message: bytes) -> None:
        self.socket.sendall(message)

    def receive(self) -> bool:
        content = self._received = self._received + self.socket.recv(MAX_READ)
        head = content.find(b"\r\n\r\n")
        if not content or not content.startswith(b"HTTP/1.1 200 "[: len(content)]):
            raise WrongAnswerError(f"a call failed: {content!r}")
        if head < 0:
            return False
        at = content.find(b"content-length: ", 0, head) + 16
        if len(content) < head + 4 + int(content[at : content.find(b"\r", at)]):
            return False
        self._received = b""
        return True


class _GrpcConnection:
    """HTTP/2 with one call at a time, without compression of headers."""

    def __init__(self, address: tuple[str, int], path: str) -> None:
        self.socket = _connect(address)
        self._header_block = _header_block(path, f"{address[0]}:{address[1]}")
        self._stream = 1
        self._received = b""
        # No dynamic table, so that trailers are literals; no flow control of what the server sends.
        settings = struct.pack(">HIHI", HEADER_TABLE_SIZE, 0, INITIAL_WINDOW_SIZE, MAX_WINDOW)
        window = struct.pack(">I", MAX_WINDOW - 65_535)
        self.socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window))

    def send(self, message: bytes) -> None:
        stream = self._stream
        self._stream += 2
        body = struct.pack(">BI", 0, len(message)) + message
        self.socket.sendall(
            _frame(HEADERS, END_HEADERS, stream, self._header_block) + _frame(DATA, END_STREAM, stream, body)
        )

    def receive(self) -> bool:
        content = self._received + self.socket.recv(MAX_READ)
        at, size, has_ended = 0, len(content), False
        if not size:
            raise WrongAnswerError("the server closed a connection")
        while size - at >= 9:
            length = content[at] << 16 | content[at + 1] << 8 | content[at + 2]
            end = at + 9 + length
            if end > size:
                break
            kind, flags = content[at + 3], content[at + 4]
            if kind == HEADERS and flags & END_STREAM:
                if SUCCESS not in content[at:end]:
                    raise WrongAnswerError(f"a call failed: {content[at:end]!r}")
                has_ended = True
            elif kind == DATA:
                if length and content[at + 14 : at + 16] != ALLOWED:
                    raise WrongAnswerError(f"not allowed: {content[at:end]!r}")
            elif kind == SETTINGS and not flags & ACK:
                self.socket.sendall(_frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self.socket.sendall(_frame(PING, ACK, 0, content[at + 9 : end]))
            elif kind in (RESET, GOAWAY):
                raise WrongAnswerError(f"the server ended a call: frame {content[at:end]!r}")
            at = end
        self._received = content[at:]
        return has_ended


def _connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _header_block(path: str, authority: str) -> bytes:
    """Headers of a call in HPACK, without compression."""
    fields = {":path": path, ":authority": authority, "te": "trailers", "content-type": "application/grpc"}
    method_post, scheme_http = b"\x83", b"\x86"  # of the static table
    return method_post + scheme_http + b"".join([b"\x00" + _literal(name) + _literal(fields[name]) for name in fields])


def _literal(text: str) -> bytes:
    content = text.encode("ascii")
    assert len(content) < 127
    return bytes([len(content)]) + content
