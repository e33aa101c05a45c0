"""Connections that are out of step, and servers that are not Redis: nobody gets the answer of another."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Decision, Limit, StoreError, StoreUnavailable
from support.faults import SLACK, Gate, Proxy, RelayProxy, SocketServer, key_of, timed
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

STRAYS = [
    b"+OK\r\n",
    b":1\r\n",
    b"$3\r\nabc\r\n",
    b"*3\r\n:1763251200000000\r\n:77\r\n:5\r\n",
    b"*0\r\n",
    b"$-1\r\n",
    b"*1",
]
QUOTAS = [40, 50, 60, 70]


class InjectingProxy(RelayProxy):
    """Passes everything between a limiter and a server, and injects bytes of its own into the replies."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server, b"EVALSHA")
        self._callers: list[socket.socket] = []
        self.before: bytes = b""
        self.after: bytes = b""
        """Sent once, in one piece with the next reply to a script."""

    def inject(self, stray: bytes) -> None:
        """Send it now, on every connection."""
        for caller in self._callers:
            with suppress(OSError):
                caller.sendall(stray)

    def _serve(self, caller: socket.socket) -> Iterable[Callable[[], None]]:
        work = super()._serve(caller)
        self._callers.append(caller)
        return work

    def _reply(self, caller: socket.socket, data: bytes, was_sent: bool) -> None:
        if was_sent:
            data, self.before, self.after = self.before + data + self.after, b"", b""
        caller.sendall(data)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[InjectingProxy]:
    with InjectingProxy(server) as proxy:
        yield proxy


class Clients:
    """Asks in turn for clients whose limits tell them apart, and notes who has got another's answer, or none."""

    def __init__(self, gate: Gate, name: str) -> None:
        self._gate = gate
        self._keys = [
            Limit(quota * 1_000, key_of(name).limit.period, name=f"{name}-{quota}").by("ada") for quota in QUOTAS
        ]
        self.wrong: list[Any] = []
        self.failed: list[StoreError] = []
        self.spent = dict.fromkeys(QUOTAS, 0)
        """What may have been charged to each at most."""
        self._least = dict.fromkeys(QUOTAS, 0)

    def ask(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            for quota, key in zip(QUOTAS, self._keys, strict=True):
                told = timed(lambda key=key: self._gate.check(key))  # type: ignore[misc]
                self.spent[quota] += 1
                if isinstance(told.answer, StoreError):
                    self.failed.append(told.answer)
                    continue
                self._least[quota] += 1
                most, least = quota * 1_000 - self._least[quota], quota * 1_000 - self.spent[quota]
                if not least <= told.answer.remaining <= most or told.answer.keys != (key,):
                    self.wrong.append((quota, told.answer))

    def settle(self) -> None:
        """See that each client was charged once for each request at most."""
        for quota, key in zip(QUOTAS, self._keys, strict=True):
            used = quota * 1_000 - self._gate.peek(key).remaining
            assert self._least[quota] <= used <= self.spent[quota]


@pytest.mark.parametrize("stray", STRAYS, ids=repr)
@pytest.mark.parametrize("when", ["between", "before", "after", "at any moment"])
def test_stray_reply_never_answers_another_request(
    open_gate: Callable[..., Gate], proxy: InjectingProxy, unique: str, stray: bytes, when: str
) -> None:
    gate = open_gate(proxy.url, lease=0, remember=0)
    clients = Clients(gate, unique)
    clients.ask(2)
    assert not clients.failed
    if when == "between":
        proxy.inject(stray)
        gate.idle(0.01)
    elif when == "before":
        proxy.before = stray
    elif when == "after":
        proxy.after = stray
    else:
        threading.Timer(0.002, proxy.inject, [stray]).start()
    clients.ask(25)
    clients.settle()
    if when == "at any moment" and stray.startswith(b"*3"):
        # One that looks exactly like a reply, and arrives just while one is awaited, is taken for it, and that one's
        # for the next; but only while requests follow each other without a pause.
        gate.idle(0.01)
        wrong = len(clients.wrong)
        clients.ask(5)
        assert len(clients.wrong) == wrong
    else:
        assert not clients.wrong
    if when == "between":
        assert not clients.failed, "nothing had been sent yet, so it could be asked again"
    elif when != "at any moment":
        assert len(clients.failed) <= 1
        assert all(error.may_have_happened for error in clients.failed)
    if when != "at any moment":
        assert gate.stats["unexpected_replies"] == 1


def test_many_stray_replies_under_load_never_answer_another_request(
    open_gate: Callable[..., Gate], proxy: InjectingProxy, unique: str
) -> None:
    gate = open_gate(proxy.url, lease=0, remember=0, budget=5.0)
    keys = [
        Limit(10**6 + number * 10**5, key_of(unique).limit.period, name=f"{unique}-{number}").by("x")
        for number in range(8)
    ]
    stopped = threading.Event()

    def keep_injecting() -> None:
        while not stopped.wait(0.01):
            proxy.inject(b"+OK\r\n")

    injecting = threading.Thread(target=keep_injecting)
    injecting.start()
    told: list[Any] = []
    end = time.monotonic() + 1.5
    try:
        while time.monotonic() < end:
            told += zip(keys * 4, gate.at_once(*[(key,) for key in keys * 4]), strict=True)
    finally:
        stopped.set()
        injecting.join()
    answers = [(key, answer) for key, answer in told if isinstance(answer, Decision)]
    assert len(answers) > 50
    for key, answer in answers:
        assert answer.keys == (key,)
        assert key.limit.capacity - 50_000 < answer.remaining < key.limit.capacity


class Impostor(SocketServer):
    """A server that gives the same reply to everything but the handshake."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self._reply = reply

    def _serve(self, caller: socket.socket) -> Iterable[Callable[[], None]]:
        return (partial(self._answer, caller),)

    def _answer(self, caller: socket.socket) -> None:
        while data := caller.recv(65536):
            if b"EVAL" in data or b"CLUSTER" in data or b"SENTINEL" in data:
                caller.sendall(self._reply)
            else:
                caller.sendall(b"+OK\r\n" * data.count(b"CLIENT") or b"+OK\r\n")


@pytest.mark.parametrize(
    "reply",
    [
        *(
            b"$3\r\nabc\r\n",
            b"+OK\r\n",
            b":1\r\n",
            b"*0\r\n",
            b"*3\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n",
            b"$-1\r\n",
            b"*-1\r\n",
        ),
        *(
            b"*3\r\n:1\r\n:-5\r\n:0\r\n",
            b"*6\r\n:1\r\n:4\r\n:0\r\n:-9\r\n:0\r\n:0\r\n",
            b"#t\r\n",
            b"%1\r\n+a\r\n:1\r\n",
            b",1.5\r\n",
        ),
        *(b"*3\r\n:1\r\n:99999999999999999\r\n:0\r\n", b"hello\r\n", b"*1\r\n*1\r\n*1\r\n:1\r\n"),
    ],
    ids=repr,
)
def test_reply_of_the_wrong_shape_allows_nothing(open_gate: Callable[..., Gate], reply: bytes, unique: str) -> None:
    with Impostor(reply) as impostor:
        gate = open_gate(impostor.url, on_failure="closed", budget=0.5)
        for _ in range(10):
            decision = gate.check(key_of(unique, quota=5))
            assert not decision.allowed
            assert decision.degraded


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize(
    "reply", [b"+OK\r\n", b"*1\r\n*1\r\n:1\r\n", b"*2\r\n:1\r\n:2\r\n", b"$3\r\nabc\r\n", b"*150000000\r\n"], ids=repr
)
def test_server_that_does_not_know_its_topology_is_an_error(
    open_gate: Callable[..., Gate], scheme: str, reply: bytes, unique: str
) -> None:
    with Impostor(reply) as impostor:
        url = impostor.url.replace("redis://", f"{scheme}://").replace("/0", "/main" if "sentinel" in scheme else "")
        told = timed(lambda: open_gate(url, budget=0.5).check(key_of(unique)))
    assert isinstance(told.answer, StoreUnavailable)
    assert told.seconds < 0.5 + SLACK


@pytest.mark.parametrize(
    "reply",
    [b"*150000000\r\n", b"*2000000000\r\n", b"*2\r\n:1\r\n*150000000\r\n", b"$200000000\r\n" + b"a" * 1000],
    ids=lambda reply: reply[:24],
)
def test_reply_that_announces_gigabytes_costs_neither_time_nor_memory(
    open_gate: Callable[..., Gate], reply: bytes, unique: str
) -> None:
    with Impostor(reply) as impostor:
        gate = open_gate(impostor.url, on_failure="closed", budget=1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        told = timed(lambda: gate.check(key_of(unique)))
        assert not told.answer.allowed
        assert told.seconds < 1.0
        assert gate.stats["unexpected_replies"] == 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_connection_that_was_out_of_step_counts_as_a_failure_of_its_server(
    open_gate: Callable[..., Gate], unique: str
) -> None:
    with Impostor(b"+OK\r\n") as impostor:
        gate = open_gate(impostor.url, on_failure="closed", budget=0.5)

        def is_open() -> bool:
            gate.check(key_of(unique))
            gate.idle(0.01)
            return not gate.health().shards[0].ready

        wait_until(is_open, "the breaker to open")


@pytest.mark.parametrize("reply", [b"*1\r\n:5\r\n", b"*5\r\n:1\r\n+a\r\n+b\r\n:1\r\n:1\r\n", b":7\r\n"])
def test_malformed_check_reply_is_a_store_failure(
    server: RedisServer, open_gate: Callable[..., Gate], reply: bytes
) -> None:
    with Proxy(server, b"EVALSHA", reply) as proxy:
        gate = open_gate(proxy.url)
        answer, seconds = timed(lambda: gate.check(key_of("strange")))
        assert type(answer) is StoreUnavailable
        assert answer.may_have_happened
        assert seconds < 1.0
