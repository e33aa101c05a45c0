"""Servers that die, stall or forget: what a limiter answers then, how soon, and that it charges nobody twice."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter, StoreError, StoreTimeout, StoreUnavailable
from support.faults import LONG, SLACK, Gate, Proxy, key_of, paused, reach, stored, timed
from support.servers import HOST, RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

# A server that is gone, and comes back


def test_restarted_server_has_forgotten_all_and_is_used_again(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url), key_of(unique)
    for _ in range(3):
        assert gate.check(key, cost=60).remaining == 40
        server.restart()
        gate.idle(0.1)


def test_idle_connection_that_was_closed_is_noticed_before_it_is_used(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url), key_of(unique)
    with server.client() as client:
        for used in range(1, 6):
            assert gate.check(key).remaining == 100 - used
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            gate.idle(0.1)


def test_server_that_is_gone_is_an_error_at_once_and_none_when_it_is_back(
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
    wait_until(lambda: isinstance(timed(lambda: gate.peek(key)).answer, Decision), "an answer again")
    assert gate.check(key).remaining == 99


@pytest.mark.parametrize("url", ["redis://no-such-host.invalid", f"redis://{HOST}:1", "unix:///no/such/socket"])
def test_server_that_was_never_there_is_an_error_too(open_gate: Callable[..., Gate], url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot reach Redis"):
        open_gate(url).check(key_of("nowhere"))


def test_scripts_that_are_flushed_again_and_again_cost_nothing_but_time(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, keys = open_gate(server.url, remember=0), [key_of(unique, name, quota=50) for name in "abcd"]
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
        assert flushing.result() > 2, "it was flushed again and again"
    assert [answer for answer in answers if not isinstance(answer, Decision)] == []
    assert sum(answer.allowed for answer in answers) == 200


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(("--maxmemory", "1", "--maxmemory-policy", "noeviction"), "OOM"), (("--replicaof", HOST, "1"), "READONLY")],
    ids=["no memory", "a replica"],
)
def test_server_that_refuses_is_unavailable_and_no_bug(
    open_gate: Callable[..., Gate], unique: str, trouble: tuple[str, ...], said: str
) -> None:
    with RedisServer(extra=trouble) as refusing:
        with pytest.raises(StoreUnavailable, match=said):
            open_gate(refusing.url).check(key_of(unique))
        degraded = open_gate(refusing.url, on_failure="open", budget=1).check(key_of(unique))
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
    for decision in (gate.check(key), gate.check(key, cost=100), gate.enter(room, id="a")):
        assert (decision.allowed, decision.retry_after, decision.unsatisfiable) == (allowed, retry_after, False)
        assert decision.degraded.startswith(f"{mode}: cannot reach Redis")
        assert decision.degraded in decision.reason
        assert decision.denied_by == (() if allowed else (unique,))
    assert gate.check(key, cost=101).unsatisfiable
    assert gate.peek(key).allowed
    assert [gate.refund(key, 1), gate.renew(room, id="a"), gate.leave(room, id="a")] == [False] * 3
    server.start()
    wait_until(lambda: gate.peek(key).degraded is None, "an exact answer again")
    if mode == "closed":  # what is allowed is charged afterwards, as far as the limit goes
        assert gate.check(key).remaining == 99


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
    wait_until(lambda: gate.peek(key).degraded is None, "an exact answer again")
    assert gate.check(key).remaining == 79  # what was allowed meanwhile is charged


# A server that does not answer


def is_told_why(mode: str, answer: Any) -> bool:
    if mode == "raise":
        return isinstance(answer, StoreTimeout | StoreUnavailable)
    return answer.degraded.startswith(f"{mode}: ") and ("budget" in answer.degraded or "reach" in answer.degraded)


@pytest.mark.parametrize(
    ("mode", "budget"), [("raise", 0.2), ("raise", 0.005), ("open", 0.005), ("closed", 0.005), ("local", 0.005)]
)
def test_stalled_server_is_waited_for_no_longer_than_the_budget(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, mode: str, budget: float
) -> None:
    gate, key = open_gate(server.url, on_failure=mode, budget=budget), key_of(unique)
    wait_until(lambda: isinstance(timed(lambda: gate.check(key)).answer, Decision), "a first answer")
    with paused(server):
        first = timed(lambda: gate.check(key))
        assert is_told_why(mode, first.answer)
        assert first.seconds < budget + SLACK
        # After a few of them nobody waits any more.
        start = time.monotonic()
        assert all(is_told_why(mode, timed(lambda: gate.check(key)).answer) for _ in range(20))
        assert time.monotonic() - start < 5 * budget + SLACK
    wait_until(lambda: timed(lambda: getattr(gate.check(key), "degraded", "")).answer is None, "an exact answer again")


def test_crowd_is_not_kept_waiting_one_after_the_other(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    budget = 0.02
    gate, key = open_gate(server.url, on_failure="open", budget=budget), key_of(unique)
    reach(gate, key)
    with paused(server):
        told = timed(lambda: gate.at_once(*[(key,)] * 1_000))
    assert all(answer.allowed and answer.degraded for answer in told.answer)
    assert told.seconds < 4 * budget + 0.25 + 2 * SLACK


def test_silent_server_is_an_error_within_the_budget(open_gate: Callable[..., Gate], unique: str) -> None:
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
    reach(gate, key)
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
def test_answer_that_gets_lost_is_an_error_and_not_a_second_request(
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


def test_line_that_failed_is_not_trusted_again(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    """An answer that comes late, or with others, must not answer the next question."""
    gate, wrong, right = open_gate(server.url, budget=0.1), key_of(unique, "wrong"), key_of(unique, "right")
    reach(gate, right)
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
def test_interrupted_request_leaves_no_reply_behind(server: RedisServer, unique: str, pause: float) -> None:
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
        reach(limiter, key_of(unique))
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


def test_interrupted_follower_delays_no_other(server: RedisServer, unique: str) -> None:
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
def test_close_leaves_no_request_waiting(server: RedisServer, unique: str, connected: bool) -> None:
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
