"""What broke once under interrupts, forks, a busy interpreter, or whatever else nobody expects: threads and servers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis

from headgate import Limiter
from headgate.local import membership
from support.faults import key_of, paused, timed
from support.servers import HOST, RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

BUDGET = 0.05
"""Seconds: a machine that is busy with other things takes longer than a healthy one to open a connection."""


class Interrupted(BaseException):
    """What a signal's handler may raise: Ctrl-C, or the time limit of a worker."""


def is_exact(limiter: Limiter, key: Any) -> bool:
    return timed(lambda: limiter.peek(key).degraded).answer is None


def lose(limiter: Limiter, key: Any) -> None:
    """Ask until nobody waits for the server any more."""

    def is_lost() -> bool:
        timed(lambda: limiter.check(key))
        return not all(shard.ready for shard in limiter.health().shards)

    wait_until(is_lost, "the breaker to open")


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Raise at the so-manieth moment at which Python looks for signals while the store's own code runs."""
    left = step

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith("redis/sync.py"):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise Interrupted

    sys.setprofile(look)
    try:
        yield
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)


def test_an_interrupt_at_any_step_leaves_nobody_waiting(server: RedisServer, unique: str) -> None:
    key = key_of(unique, quota=10**9)
    with Limiter(server.url, lease=0, remember=0) as limiter:
        limiter.check(key)
        counts, stopped = [0, 0], threading.Event()

        def keep_asking(index: int) -> None:
            while not stopped.is_set():
                timed(lambda: limiter.check(key))
                counts[index] += 1

        threads = [threading.Thread(target=keep_asking, args=(index,), daemon=True) for index in range(2)]
        for thread in threads:
            thread.start()
        try:
            for step in range(1, 60):
                for _ in range(3):
                    with interrupted_at(step):
                        limiter.check(key, cost=1 + step % 2)
                before = list(counts)
                wait_until(
                    lambda before=before: all(now > then for now, then in zip(counts, before, strict=True)),  # type: ignore[misc]
                    f"the others, after an interrupt at step {step}",
                    timeout=5,
                )
        finally:
            stopped.set()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


def test_a_busy_interpreter_does_not_keep_the_breaker_open(server: RedisServer, unique: str) -> None:
    key, stopped = key_of(unique), threading.Event()

    def burn() -> None:
        while not stopped.is_set():
            sum(range(2_000))

    with Limiter(server.url, on_failure="open", budget=0.005, lease=0) as limiter:
        wait_until(lambda: is_exact(limiter, key), "a connection")
        threads = [threading.Thread(target=burn, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            with paused(server):
                lose(limiter, key)
            wait_until(lambda: limiter.health().shards[0].ready, "the breaker to close", timeout=5)
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def test_a_node_that_gets_no_requests_becomes_ready_by_itself(
    server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL_S", 0.4)
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter:
        wait_until(lambda: is_exact(limiter, key_of(unique)), "a connection")
        with paused(server):
            assert limiter.check(key_of(unique)).degraded is not None
        assert limiter.health().state == "degraded"
        wait_until(lambda: limiter.health().ready, "nothing but time", timeout=5)


def test_the_fleet_is_not_believed_to_be_smaller_after_an_outage(
    server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were silent: the first that is heard again is not the only one."""
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL_S", 0.5)
    key = key_of(unique)
    with ExitStack() as stack:
        fleet = [stack.enter_context(Limiter(server.url, on_failure="local", budget=BUDGET)) for _ in range(3)]
        for limiter in fleet:
            wait_until(lambda limiter=limiter: is_exact(limiter, key), "a connection")  # type: ignore[misc]
        wait_until(lambda: all(limiter.health().nodes == 3 for limiter in fleet), "three to know each other")
        wait_until(
            lambda: all(not limiter.engine.maintenance.membership.unsettled for limiter in fleet),
            "that they are sure of it",
        )
        with paused(server):
            for limiter in fleet:
                lose(limiter, key)
            time.sleep(membership.HEARTBEAT_INTERVAL_S * (membership.MISSED_HEARTBEATS + 1))
        seen = set()
        for _ in range(300):
            seen |= {limiter.health().nodes for limiter in fleet}
            time.sleep(0.005)
        assert seen == {3}


@pytest.mark.parametrize("said", [b"forget \xff:a:b", b"block " + b"[" * 200_000, b"\x00", b"block {}"])
def test_news_are_heard_whatever_else_is_said(server: RedisServer, said: bytes) -> None:
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter, Limiter(server.url) as other:
        limiter.engine.maintenance.needs_block_list = True  # type: ignore[union-attr] # as behind a gate
        limiter.engine.maintenance.ensure()  # type: ignore[union-attr]
        with server.client() as client:
            wait_until(lambda: client.publish("headgate:%news", b"forget a:b:c") == 1, "somebody to listen")
            client.publish("headgate:%news", said)
        other.block("tenant", "acme")
        wait_until(
            lambda: [block.value for block in limiter.engine.local.block_list] == ["acme"], "the block", timeout=5
        )


def test_publishing_from_another_database_blocks_and_unblocks_nobody(server: RedisServer) -> None:
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter, Limiter(server.url) as other:
        limiter.engine.maintenance.needs_block_list = True  # type: ignore[union-attr] # as behind a gate
        limiter.engine.maintenance.ensure()  # type: ignore[union-attr]
        other.block("user", "eve")
        wait_until(lambda: len(limiter.engine.local.block_list) == 1, "the block")
        with server.client(db=15) as client:
            client.publish("headgate:%news", 'block {"until_us":null,"kind":"ip","value":"0.0.0.0/0","reason":null}')
            client.publish("headgate:%news", 'unblock {"kind":"user","value":"eve"}')
            client.publish("headgate:%news", 'block {"kind":"user","value":"eve"}')
        other.block("user", "last")
        wait_until(lambda: limiter.engine.local.block_list.find({"user": "last"}, 0), "a genuine message")
        assert limiter.engine.local.block_list.find({"ip": "203.0.113.9"}, 0) is None
        assert limiter.engine.local.block_list.find({"user": "eve"}, 0) is not None
        assert limiter.stats["ignored_messages"] == 1


def test_credentials_that_could_not_be_had_are_asked_for_again(unique: str) -> None:
    class Provider(redis.CredentialProvider):
        is_away = True

        def get_credentials(self) -> tuple[str, str]:
            if self.is_away:
                raise KeyError("nobody knows the token")
            return "default", "secret"

    provider, key = Provider(), key_of(unique)
    with RedisServer(password="secret") as server:
        client = redis.Redis(host=HOST, port=server.port, credential_provider=provider)
        with Limiter(client, on_failure="open", budget=BUDGET, lease=0) as limiter:
            lose(limiter, key)
            provider.is_away = False
            wait_until(lambda: is_exact(limiter, key), "an exact answer", timeout=5)


def test_a_server_that_was_not_there_yet_is_not_held_against_it(unique: str) -> None:
    server = RedisServer()
    try:
        with Limiter(server.url, on_failure="closed", budget=0.5) as limiter:
            wait_until(lambda: limiter.engine.store._pool._pending[None].is_done, "the first attempt to fail")
            server.start()
            time.sleep(0.2)
            assert limiter.check(key_of(unique)).degraded is None
    finally:
        server.stop()


def test_closing_while_others_ask_is_no_error_to_them(server: RedisServer, unique: str) -> None:
    key, failed = key_of(unique), []
    for attempt in range(60):
        limiter, stopped = Limiter(server.url, on_failure="open", budget=BUDGET, lease=0), threading.Event()

        def keep_asking(limiter: Limiter = limiter, stopped: threading.Event = stopped) -> None:
            while not stopped.is_set():
                try:
                    limiter.check(key)
                except Exception as error:
                    failed.append(error)

        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.001 * (attempt % 7))
        limiter.close()
        time.sleep(0.002)
        stopped.set()
        for thread in threads:
            thread.join()
        limiter.close()
    assert not failed


def test_a_limiter_that_is_used_after_it_was_closed_has_no_breaker_to_get_stuck_on(
    server: RedisServer, unique: str
) -> None:
    limiter, key = Limiter(server.url, on_failure="open", budget=BUDGET), key_of(unique)
    wait_until(lambda: is_exact(limiter, key), "a connection")
    limiter.close()
    with paused(server):
        for _ in range(8):
            limiter.check(key)
    wait_until(lambda: is_exact(limiter, key), "an exact answer", timeout=5)
    limiter.close()


def test_a_listener_of_events_may_close_the_limiter(server: RedisServer, unique: str) -> None:
    told, key = [], key_of(unique)

    def on_event(event: Any) -> None:
        told.append(event.kind)
        if event.kind == "store-back":
            limiter.close()
            told.append("closed")

    limiter = Limiter(server.url, on_failure="open", budget=BUDGET, on_event=on_event)
    with paused(server):
        lose(limiter, key)
    wait_until(lambda: "closed" in told, "the limiter to be closed", timeout=5)


def test_a_child_forked_at_the_worst_moment_works_and_ends(server: RedisServer, unique: str) -> None:
    key = key_of(unique)
    with Limiter(server.url, on_failure="local", budget=1.0) as limiter:
        limiter.check(key)
        front, kept = limiter.engine.local, limiter.engine.maintenance
        assert kept is not None
        wait_until(lambda: kept._thread is not None and kept.knows_fleet_size, "the keeper")
        farewell = kept._finalizer
        locks = [front.block_list._lock, front.denial_cache._lock, front.prepaid._lock, front.ledger._lock]
        locks += [kept._lock, kept._client._lock]
        for lock in locks:
            with lock:
                pid = os.fork()
                if not pid:
                    status = 1
                    try:
                        signal.alarm(10)
                        front.block_list.set("tenant", "acme", None, None)
                        status = 0 if limiter.check(key).degraded is None else 2
                        farewell()  # what is done at the end must not wait, either
                    finally:
                        os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, lock
