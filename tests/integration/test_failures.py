"""Servers that die, stall, move or forget: what a limiter answers then, how soon, and that it charges nobody twice."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest
import redis
from redis.crc import key_slot

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter, StoreError, StoreTimeout, StoreUnavailable
from servers import HOST, RedisCluster, RedisServer, SentinelSet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = timedelta(days=30)
"""Nothing refills while a test runs."""
SLACK = 0.3
"""Seconds that a busy machine may add to an answer."""


def key_of(name: str, identity: str = "ada", *, quota: int = 100) -> Key:
    return Limit(quota, LONG, name=name).by(identity)


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


@pytest.fixture(params=[Threaded, Looped], ids=["sync", "async"])
def open_gate(request: pytest.FixtureRequest) -> Iterator[Callable[..., Gate]]:
    with ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(request.param(url, **options))


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """A connection that was lost but never closed is Python's warning, and with it an error, in its own test."""
    yield
    gc.collect()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own, to be broken."""
    with RedisServer() as server:
        yield server


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


# A server that is gone, and comes back


def test_a_restarted_server_has_forgotten_all_and_is_used_again(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url), key_of(unique)
    for _ in range(3):
        assert gate.check(key, cost=60).remaining == 40
        server.restart()
        gate.idle(0.1)


def test_an_idle_connection_that_was_closed_is_noticed_before_it_is_used(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url), key_of(unique)
    with server.client() as client:
        for used in range(1, 6):
            assert gate.check(key).remaining == 100 - used
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            gate.idle(0.1)


def test_a_server_that_is_gone_is_an_error_at_once_and_none_when_it_is_back(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url), key_of(unique)
    gate.check(key)
    server.kill()
    gate.idle(0.1)
    for call in (
        lambda: gate.check(key),
        lambda: gate.peek(key),
        lambda: gate.acquire(key),
        lambda: gate.refund(key, 1),
        lambda: gate.reset(key),
    ):
        told = timed(call)
        assert type(told.answer) is StoreUnavailable
        assert str(told.answer).startswith("cannot reach Redis")
        assert told.seconds < SLACK
    server.start()
    assert gate.check(key).remaining == 99


@pytest.mark.parametrize("url", ["redis://no-such-host.invalid", f"redis://{HOST}:1", "unix:///no/such/socket"])
def test_a_server_that_was_never_there_is_an_error_too(open_gate: Callable[..., Gate], url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot reach Redis"):
        open_gate(url).check(key_of("nowhere"))


def test_scripts_that_are_flushed_again_and_again_cost_nothing_but_time(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, keys = open_gate(server.url), [key_of(unique, name, quota=50) for name in "abcd"]
    stopped = threading.Event()

    def flush() -> int:
        with server.client() as client:
            for times in count():
                if stopped.is_set():
                    return times
                client.script_flush()
                time.sleep(0.001)
        raise AssertionError("count() never ends")

    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush)
        try:
            answers = [answer for _ in range(20) for answer in gate.at_once(*[(key,) for key in keys * 4])]
        finally:
            stopped.set()
        assert flushing.result() > 10
    assert [answer for answer in answers if not isinstance(answer, Decision)] == []
    assert sum(answer.allowed for answer in answers) == 200


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(("--maxmemory", "1", "--maxmemory-policy", "noeviction"), "OOM"), (("--replicaof", HOST, "1"), "READONLY")],
    ids=["no memory", "a replica"],
)
def test_a_server_that_refuses_is_unavailable_and_no_bug(
    open_gate: Callable[..., Gate], unique: str, trouble: tuple[str, ...], said: str
) -> None:
    with RedisServer(extra=trouble) as refusing:
        with pytest.raises(StoreUnavailable, match=said):
            open_gate(refusing.url).check(key_of(unique))
        degraded = open_gate(refusing.url, on_failure="open").check(key_of(unique))
        assert (degraded.allowed, said in degraded.degraded) == (True, True)


# What is answered instead

MODES: dict[str, tuple[bool, float]] = {"open": (True, 0), "closed": (False, 1)}


@pytest.mark.parametrize("mode", MODES)
def test_open_and_closed_answer_as_their_names_say(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, mode: str
) -> None:
    gate, key = open_gate(server.url, on_failure=mode), key_of(unique)
    room = Limit(5, LONG, algorithm="concurrency", name=unique).by("ada")
    server.kill()
    allowed, retry_after = MODES[mode]
    for decision in (gate.check(key), gate.check(key, cost=1_000), gate.enter(room, id="a")):
        assert (decision.allowed, decision.retry_after, decision.unsatisfiable) == (allowed, retry_after, False)
        assert decision.degraded.startswith(f"{mode}: cannot reach Redis")
        assert decision.degraded in decision.reason
        assert decision.denied_by == (() if allowed else (unique,))
    assert gate.peek(key).allowed
    assert [gate.refund(key, 1), gate.renew(room, id="a"), gate.leave(room, id="a")] == [False] * 3
    server.start()
    assert (gate.check(key).remaining, gate.check(key).degraded) == (99, None)


def test_local_allows_a_fifth_by_itself(open_gate: Callable[..., Gate], server: RedisServer, unique: str) -> None:
    gate = open_gate(server.url, on_failure="local")
    server.kill()
    for algorithm in ("fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket"):
        key = Limit(100, LONG, algorithm=algorithm, name=f"{unique}-{algorithm}").by("ada")
        decisions = [gate.check(key) for _ in range(30)]
        assert [decision.allowed for decision in decisions] == [True] * 20 + [False] * 10
        assert all(decision.degraded.startswith("local: cannot reach Redis") for decision in decisions)
        assert decisions[0].outcomes[0].limit == key.limit
    server.start()
    assert gate.check(key).remaining == 99


# A server that does not answer


def is_told_why(mode: str, answer: Any) -> bool:
    if mode == "raise":
        return isinstance(answer, StoreTimeout | StoreUnavailable)
    return answer.degraded.startswith(f"{mode}: ") and ("budget" in answer.degraded or "reach" in answer.degraded)


@pytest.mark.parametrize(
    ("mode", "budget"), [("raise", 0.2), ("raise", 0.005), ("open", 0.005), ("closed", 0.005), ("local", 0.005)]
)
def test_a_stalled_server_is_waited_for_no_longer_than_the_budget(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, mode: str, budget: float
) -> None:
    gate, key = open_gate(server.url, on_failure=mode, budget=budget), key_of(unique)
    wait_until(lambda: isinstance(timed(lambda: gate.check(key)).answer, Decision), "a first answer")
    with paused(server):
        first = timed(lambda: gate.check(key))
        assert is_told_why(mode, first.answer)
        assert first.seconds < budget + SLACK
        # To open a new connection takes longer, but not for each of those who come now.
        start = time.monotonic()
        assert all(is_told_why(mode, timed(lambda: gate.check(key)).answer) for _ in range(20))
        assert time.monotonic() - start < max(budget, 0.25) + SLACK
    wait_until(lambda: timed(lambda: getattr(gate.check(key), "degraded", "")).answer is None, "an exact answer again")


def test_a_crowd_is_not_kept_waiting_one_after_the_other(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    budget = 0.02
    gate, key = open_gate(server.url, on_failure="open", budget=budget), key_of(unique)
    gate.check(key)
    with paused(server):
        told = timed(lambda: gate.at_once(*[(key,)] * 1_000))
    assert all(answer.allowed and answer.degraded for answer in told.answer)
    assert told.seconds < 4 * budget + 0.25 + 2 * SLACK


def test_who_connects_to_a_server_that_never_says_a_word_is_told_soon(
    open_gate: Callable[..., Gate], unique: str
) -> None:
    with socket.create_server((HOST, 0)) as silent:
        gate = open_gate(f"redis://{HOST}:{silent.getsockname()[1]}/0", budget=0.01)
        told = timed(lambda: gate.check(key_of(unique)))
        assert type(told.answer) is StoreUnavailable
        assert told.seconds < 0.25 + SLACK


@pytest.mark.parametrize("kind", ["standalone", "sentinel", "cluster"])
def test_what_ran_out_of_time_is_not_asked_twice(
    request: pytest.FixtureRequest, open_gate: Callable[..., Gate], server: RedisServer, kind: str, unique: str
) -> None:
    """Pitfall 18: the server counts what it had received, when it goes on."""
    servers = server if kind == "standalone" else request.getfixturevalue(kind)
    key = key_of(unique)
    gate = open_gate(servers.url, budget=0.05)
    assert gate.check(key).remaining == 99
    primary = {
        "standalone": lambda: server,
        "sentinel": lambda: servers.primary(),
        "cluster": lambda: servers.primary_for(stored(key)),
    }[kind]()
    with paused(primary):
        answers = [timed(lambda: gate.check(key)).answer for _ in range(4)]
    assert type(answers[0]) is StoreTimeout
    assert all(isinstance(answer, StoreError) for answer in answers)
    with Limiter(servers.url) as other:
        wait_until(lambda: isinstance(timed(lambda: other.peek(key)).answer, Decision), "the server to go on")
        assert 99 - 4 <= other.peek(key).remaining <= 99


# Answers that get lost on their way


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


def used(server: RedisServer, key: Key) -> int:
    with Limiter(server.url) as limiter:
        return key.limit.capacity - limiter.peek(key).remaining


@pytest.mark.parametrize("word", [b"EVALSHA\r\n", b"EVAL\r\n"], ids=["known script", "sent script"])
@pytest.mark.parametrize(
    ("then", "error"),
    [
        ("swallow", StoreTimeout),
        ("drop", StoreUnavailable),
        (b"*5\r\n:1", StoreTimeout),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StoreUnavailable),
    ],
    ids=["never comes", "connection breaks", "is cut short", "is gibberish"],
)
def test_an_answer_that_gets_lost_is_an_error_and_not_a_second_request(
    open_gate: Callable[..., Gate],
    server: RedisServer,
    unique: str,
    word: bytes,
    then: bytes | str,
    error: type[StoreError],
) -> None:
    key = key_of(unique)
    if word == b"EVALSHA\r\n":
        used(server, key)  # the peek's script is the check's
    with Proxy(server, word, then) as proxy:
        told = timed(lambda: open_gate(proxy.url, budget=0.2).check(key))
        assert isinstance(told.answer, error)
        assert told.seconds < 0.2 + 0.25 + SLACK
        wait_until(lambda: used(server, key), "what was asked to be counted")
        assert used(server, key) == 1


def test_a_line_that_failed_is_not_trusted_again(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    """An answer that comes late, or with others, must not answer the next question."""
    gate, wrong, right = open_gate(server.url, budget=0.1), key_of(unique, "wrong"), key_of(unique, "right")
    gate.check(right, cost=40)
    for _ in range(5):
        with paused(server):
            timed(lambda: gate.check(wrong, cost=7))
        wait_until(lambda: isinstance(timed(lambda: gate.peek(right)).answer, Decision), "an answer")
        assert gate.peek(right).remaining == 60


# Calls that are interrupted


class Interrupted(Exception):
    """What a signal's handler raises: a worker's timeout, or Ctrl-C."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("pause", [0, 0.1], ids=["at once", "a little later"])
def test_who_is_interrupted_leaves_no_answer_behind_for_the_next(
    server: RedisServer, unique: str, pause: float
) -> None:
    wrong, right = key_of(unique, "wrong"), key_of(unique, "right")
    with Limiter(server.url, budget=5) as limiter:
        limiter.check(right, cost=40)
        for _ in range(3):
            with paused(server), interrupted_after(0.05):
                limiter.check(wrong, cost=7)
            time.sleep(pause)
            assert [limiter.peek(right).remaining for _ in range(3)] == [60] * 3


@pytest.mark.parametrize("budget", [0.05, 0.3])
def test_signals_that_keep_coming_do_not_stretch_the_budget(server: RedisServer, unique: str, budget: float) -> None:
    """As those of a profiler: each of them wakes up whoever waits for the network."""
    stopped, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def keep_sending() -> None:
        while not stopped.wait(0.02):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    sending = threading.Thread(target=keep_sending)
    with Limiter(server.url, budget=budget) as limiter:
        limiter.check(key_of(unique))
        resuming = threading.Timer(5, server.resume)
        with paused(server):
            resuming.start()
            sending.start()
            told = timed(lambda: limiter.check(key_of(unique)))
            stopped.set()
            sending.join()
            resuming.cancel()
    signal.signal(signal.SIGUSR1, before)
    assert isinstance(told.answer, StoreTimeout)
    assert told.seconds < budget + SLACK


def begin(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """The call's answer to come, from a thread that keeps nobody from ending if it never does."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def test_who_is_interrupted_while_waiting_for_another_holds_nobody_up(server: RedisServer, unique: str) -> None:
    key = key_of(unique)
    with Limiter(server.url, budget=5) as limiter:
        limiter.check(key)
        with paused(server):
            leading = begin(limiter.check, key)
            time.sleep(0.1)
            with interrupted_after(0.05):
                limiter.check(key)
        assert leading.result(5).allowed
        assert begin(limiter.check, key).result(5).allowed


@pytest.mark.parametrize("connected", [True, False], ids=["while asking", "while connecting"])
def test_closing_leaves_nobody_waiting(server: RedisServer, unique: str, connected: bool) -> None:
    key = key_of(unique)

    async def main() -> list[Any]:
        limiter = AsyncLimiter(server.url, budget=5)
        if connected:
            await limiter.check(key)
        server.pause()
        asked = [asyncio.create_task(limiter.check(key)) for _ in range(600)]
        await asyncio.sleep(0.05)
        await limiter.close()
        server.resume()
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 3)

    answers = asyncio.run(main())
    assert all(isinstance(answer, Decision | StoreError) for answer in answers)


# A primary that dies


def stored(key: Key) -> str:
    return f"headgate:{key.limit.name}:{key.limit.algorithm}.1:{key.identity}"


def replicate(primary: RedisServer) -> None:
    """Return when at least one replica has all that was written so far."""
    with primary.client(socket_timeout=5) as client:
        assert client.wait(1, 4_000) >= 1


def survive(primary: RedisServer, key: Key, patient: Limiter, quick: Looped, *, within: float) -> None:
    """A primary is killed with half of a limit used; a limiter that raises and one that fails open go on asking."""
    admitted = sum(patient.check(key).allowed for _ in range(50))
    assert quick.check(key, cost=0).degraded is None
    replicate(primary)
    primary.kill()
    dead = time.monotonic()
    failed, degraded = 0, 0
    while time.monotonic() < dead + within:
        told = timed(lambda: patient.check(key))
        assert told.seconds < 0.5 + 3 * SLACK
        if isinstance(told.answer, Decision):
            admitted += told.answer.allowed
            break
        assert isinstance(told.answer, StoreTimeout | StoreUnavailable)
        failed += 1
        instead = timed(lambda: quick.check(key, cost=0))
        assert instead.answer.allowed
        assert instead.seconds < 0.1 + 3 * SLACK
        degraded += instead.answer.degraded is not None
        time.sleep(0.02)
    else:
        raise AssertionError(f"no answer {within} s after the primary died")
    assert failed > 0
    assert degraded > 0
    wait_until(lambda: quick.check(key, cost=0).degraded is None, "exact answers again", timeout=5)
    admitted += sum(patient.check(key).allowed for _ in range(100))
    # All writes had been replicated, so none is lost; a call that failed may have been counted all the same.
    assert 100 - failed <= admitted <= 100


def test_a_cluster_whose_primary_dies_counts_on(unique: str) -> None:
    key = key_of(unique)
    with (
        RedisCluster() as cluster,
        Limiter(cluster.url, budget=0.5) as patient,
        Looped(cluster.url, on_failure="open", budget=0.1) as quick,
    ):
        survive(cluster.primary_for(stored(key)), key, patient, quick, within=20)


def test_a_primary_that_dies_under_sentinels_is_replaced(unique: str) -> None:
    with (
        SentinelSet() as sentinels,
        Limiter(sentinels.urls, budget=0.5) as patient,
        Looped(sentinels.urls, on_failure="open", budget=0.1) as quick,
    ):
        survive(sentinels.primary(), key_of(unique), patient, quick, within=20)


# A primary that is replaced as planned


def test_a_planned_switch_in_a_cluster_is_followed(
    open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str
) -> None:
    gate, key = open_gate(cluster.url), key_of(unique)
    assert gate.check(key).remaining == 99
    primary = cluster.primary_for(stored(key))
    replicate(primary)
    with primary.client() as client:
        port = client.info("replication")["slave0"]["port"]
    replica = next(node for node in cluster.nodes if node.port == port)
    with replica.client() as client:
        client.execute_command("CLUSTER", "FAILOVER")
    wait_until(lambda: cluster.primary_for(stored(key)) is replica, "the replica to take over")
    wait_until(lambda: not is_primary(primary), "the primary to step down")
    gate.idle(0.1)
    assert [gate.check(key).remaining for _ in range(3)] == [98, 97, 96]


def test_a_planned_switch_under_sentinels_is_followed(unique: str) -> None:
    key = key_of(unique)
    with SentinelSet() as sentinels, Threaded(sentinels.urls) as threaded, Looped(sentinels.urls) as looped:
        assert [threaded.check(key).remaining, looped.check(key).remaining] == [99, 98]
        primary = sentinels.primary()
        replicate(primary)
        with sentinels.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "FAILOVER", sentinels.name)
        wait_until(lambda: sentinels.primary() is not primary, "another primary")
        # The sentinels tell it to step down, too, but take their time.
        with primary.client() as client:
            client.replicaof(HOST, sentinels.primary().port)
        looped.idle(0.1)
        assert [threaded.check(key).remaining, looped.check(key).remaining] == [97, 96]


# Slots that move


def is_primary(node: RedisServer) -> bool:
    with node.client() as client:
        return bool(client.info("replication")["role"] == "master")


class Migration:
    """One slot's way from a server of a cluster to another, a step at a time."""

    def __init__(self, cluster: RedisCluster, slot_of: str) -> None:
        self.slot = key_slot(slot_of.encode())
        self.source = cluster.primary_for(slot_of)
        self._primaries = [node for node in cluster.nodes if is_primary(node)]
        self.target = next(node for node in self._primaries if node is not self.source)
        self._under_way = False

    def begin(self) -> None:
        self._under_way = True
        self._set(self.target, "IMPORTING", self._id(self.source))
        self._set(self.source, "MIGRATING", self._id(self.target))

    def move(self, *keys: str) -> None:
        with self.source.client(socket_timeout=5) as client:
            client.execute_command("MIGRATE", HOST, self.target.port, "", 0, 5_000, "KEYS", *keys)

    def end(self) -> None:
        if not self._under_way:
            return
        with self.source.client() as client:
            left = client.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1_000)
        if left:
            self.move(*left)
        for node in (self.target, self.source, *self._primaries):
            self._set(node, "NODE", self._id(self.target))
        self._under_way = False

    def reverse(self) -> None:
        self.source, self.target = self.target, self.source

    def _set(self, node: RedisServer, *words: str) -> None:
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", self.slot, *words)

    def _id(self, node: RedisServer) -> str:
        with node.client() as client:
            return str(client.execute_command("CLUSTER", "MYID"))


@contextmanager
def migration_of(cluster: RedisCluster, slot_of: str) -> Iterator[Migration]:
    """A move that has an end, whatever the block left undone: the cluster is whole again for the next test."""
    migration = Migration(cluster, slot_of)
    yield migration
    migration.end()


def neighbours(name: str, number: int) -> list[Key]:
    """Keys of one limit that share a slot, as any two may."""
    first = key_of(name, "0")
    slot = key_slot(stored(first).encode())
    found = (key_of(name, str(client)) for client in count(1))
    return [first, *(next(key for key in found if key_slot(stored(key).encode()) == slot) for _ in range(number - 1))]


def test_a_slot_that_moves_is_followed_step_by_step(
    open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str
) -> None:
    gate, (here, there, new) = open_gate(cluster.url), neighbours(unique, 3)
    with migration_of(cluster, stored(here)) as migration:
        assert [gate.check(here).remaining, gate.check(there).remaining] == [99, 99]
        migration.begin()
        assert [gate.check(here).remaining, gate.check(there).remaining] == [98, 98]
        migration.move(stored(there))
        assert [gate.check(key).remaining for key in (here, there, new)] == [97, 97, 99]
        assert [gate.refund(here, 1), gate.refund(there, 1)] == [True, True]
        migration.end()
        assert [gate.check(key).remaining for key in (here, there, new)] == [97, 97, 98]


def test_a_reset_follows_a_slot_that_moves(open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str) -> None:
    gate, (here, there, new) = open_gate(cluster.url), neighbours(unique, 3)
    with migration_of(cluster, stored(here)) as migration:
        for key in (here, there):
            gate.check(key)
        migration.begin()
        migration.move(stored(there))
        gate.check(new)
        gate.reset(here, there, new)
        assert [gate.peek(key).remaining for key in (here, there, new)] == [100, 100, 100]


def test_neighbours_on_both_sides_of_a_move_are_answered_together(
    open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str
) -> None:
    """Pitfall 16: one script over keys of which some have moved is refused until all have; each by itself is not."""
    gate, (here, there) = open_gate(cluster.url), neighbours(unique, 2)
    with migration_of(cluster, stored(here)) as migration:
        gate.at_once((here,), (there,), (here,), (there,))
        migration.begin()
        migration.move(stored(there))
        for _ in range(3):
            answers = gate.at_once(*[(here,), (there,)] * 4)
            assert [answer for answer in answers if not isinstance(answer, Decision)] == []
    assert [gate.peek(here).remaining, gate.peek(there).remaining] == [100 - 2 - 12] * 2


def test_a_refund_in_the_middle_of_a_move_is_made_or_refused_but_no_bug(
    open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str
) -> None:
    gate, (key,) = open_gate(cluster.url), neighbours(unique, 1)
    with migration_of(cluster, stored(key)) as migration:
        gate.check(key, cost=10)
        migration.begin()
        told = timed(lambda: gate.refund(key, 1, id="r"))
        assert told.answer is True or type(told.answer) is StoreUnavailable
    made = told.answer is True
    assert gate.refund(key, 1, id="r") is not made
    assert gate.peek(key).remaining == 91


def test_slots_that_move_under_load_lose_and_double_nothing(cluster: RedisCluster, unique: str) -> None:
    keys = neighbours(unique, 6)
    stopped = threading.Event()

    def ask(gate: Gate) -> list[Any]:
        answers: list[Any] = []
        while not stopped.is_set():
            answers += gate.at_once(*[(key,) for key in keys])
        return answers

    with (
        migration_of(cluster, stored(keys[0])) as migration,
        Threaded(cluster.url) as threaded,
        ThreadPoolExecutor(2) as pool,
    ):

        def ask_on_a_loop() -> list[Any]:
            with Looped(cluster.url) as looped:
                return ask(looped)

        asking = [pool.submit(ask, threaded), pool.submit(ask_on_a_loop)]
        try:
            for _ in range(2):
                migration.begin()
                for key in keys:
                    time.sleep(0.02)
                    with suppress(redis.ResponseError):  # one that does not exist yet
                        migration.move(stored(key))
                migration.end()
                migration.reverse()
        finally:
            stopped.set()
        answers = [answer for one in asking for answer in one.result(10)]
        assert [answer for answer in answers if not isinstance(answer, Decision)] == []
        assert sum(answer.allowed for answer in answers) == 100 * len(keys)


def test_a_move_to_a_server_that_stalls_is_not_asked_twice(
    open_gate: Callable[..., Gate], cluster: RedisCluster, unique: str
) -> None:
    gate, (key,) = open_gate(cluster.url, budget=0.1), neighbours(unique, 1)
    with migration_of(cluster, stored(key)) as migration:
        others = (key_of(unique, f"other-{number}") for number in count())
        on_target = next(other for other in others if cluster.primary_for(stored(other)) is migration.target)
        gate.check(key)
        gate.check(on_target)  # so that there is a connection, and the script is known
        migration.begin()
        migration.end()
        migration.target.pause()
        resuming = threading.Timer(0.2, migration.target.resume)
        resuming.start()
        told = timed(lambda: gate.check(key))
        resuming.join()
        assert isinstance(told.answer, StoreTimeout)
        with Limiter(cluster.url) as other:
            wait_until(lambda: isinstance(timed(lambda: other.peek(key)).answer, Decision), "the server to go on")
            assert 98 <= other.peek(key).remaining <= 99
