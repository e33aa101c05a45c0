"""After a server has failed: who looks after it, what is told of it, and that what passed meanwhile is paid for."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from headgate import Decision, Limiter, StoreError, StoreUnavailable
from headgate.local import maintenance
from headgate.local.denial_cache import MIN_DENIALS
from headgate.local.maintenance import MaintenanceThread
from support.faults import SLACK, Gate, key_of, open_breaker, paused, reach, stored, timed
from support.servers import RedisServer, SentinelSet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.events import Event
    from support.servers import RedisCluster, RedisServer

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")


BUDGET = 0.05
"""Seconds: a machine that is busy with other things takes longer than a healthy one to open a connection."""


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


@pytest.mark.parametrize("mode", ["open", "closed", "local", "raise"])
def test_open_breaker_answers_without_waiting(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, mode: str
) -> None:
    gate, key = open_gate(server.url, on_failure=mode, budget=BUDGET), key_of(unique)
    reach(gate, key)
    with paused(server):
        open_breaker(gate, key)
        took = [timed(lambda: gate.check(key)).seconds for _ in range(100)]
        # Far below the budget: the server is not asked.
        assert statistics.median(took) < BUDGET / 10
    reach(gate, key)
    assert gate.health().state == "ready"


def test_what_was_allowed_without_the_store_is_charged_once_when_it_is_back(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    events: list[Event] = []
    gate, key = open_gate(server.url, on_failure="open", budget=BUDGET, on_event=events.append), key_of(unique)
    reach(gate, key)
    events.clear()
    gate.check(key, cost=10)
    with paused(server):
        open_breaker(gate, key)
        counted = gate.health().owed_tokens
        for _ in range(30):
            assert gate.check(key).allowed
        health = gate.health()
        assert (health.state, health.owed_keys, health.owed_tokens) == ("degraded", 1, counted + 30)
    reach(gate, key)
    wait_until(lambda: gate.health().owed_keys == 0, "the debt to be settled")
    # Those who were on their way when it stopped may have been charged by the server itself.
    with Limiter(server.url) as other:
        used = 100 - other.peek(key).remaining
        assert 10 + counted + 30 <= used <= 10 + counted + 30 + 6
        time.sleep(0.3)
        assert other.peek(key).remaining == 100 - used
    wait_until(lambda: "settled" in kinds(events), "the news of it")
    assert kinds(events)[0] == "store-lost"
    assert "store-back" in kinds(events)
    uncertain = sum(event.details["uncertain"] for event in events if event.kind == "settled")
    assert used - (10 + counted + 30) <= uncertain <= 6


def test_what_fails_closed_owes_nothing(open_gate: Callable[..., Gate], server: RedisServer, unique: str) -> None:
    gate, key = open_gate(server.url, on_failure="closed", budget=BUDGET), key_of(unique)
    reach(gate, key)
    gate.check(key)
    server.kill()
    open_breaker(gate, key)
    assert not gate.check(key).allowed
    assert gate.health().owed_keys == 0
    server.start()
    reach(gate, key)
    assert gate.peek(key).remaining == 100


def test_health_names_the_server_the_reason_and_the_time(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url, on_failure="open", budget=BUDGET), key_of(unique)
    reach(gate, key)
    gate.check(key)
    well = gate.health()
    assert (well.state, well.reason, well.degraded_for, well.ready) == ("ready", None, None, True)
    assert [(shard.name, shard.ready) for shard in well.shards] == [(f"127.0.0.1:{server.port}", True)]
    server.kill()
    open_breaker(gate, key)
    ill = gate.health()
    (shard,) = ill.shards
    assert (ill.state, shard.ready) == ("degraded", False)
    assert "cannot reach Redis" in (ill.reason or "")
    assert ill.degraded_for is not None
    assert shard.down_for is not None
    assert ill.degraded_for >= shard.down_for >= 0
    assert ill.decided_without >= 1
    assert ill.as_dict()["shards"][0]["name"] == shard.name


def test_empty_restart_of_the_server_is_reported(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    events: list[Event] = []
    gate, key = open_gate(server.url, on_failure="open", budget=BUDGET, on_event=events.append), key_of(unique)
    with server.client() as client:
        reach(gate, key)
        gate.check(key)
        wait_until(lambda: client.keys("headgate:%mark*"), "a first mark")
        gate.idle(0.1)
        server.kill()
        open_breaker(gate, key)
        server.start()
        reach(gate, key)
    wait_until(lambda: "state-lost" in kinds(events), "the news that all is forgotten")


def test_fleet_is_counted_and_remembered(server: RedisServer, unique: str) -> None:
    members = [Limiter(server.url, on_failure="local", namespace=unique, budget=1.0) for _ in range(4)]
    key = key_of(unique)
    try:
        for member in members:
            member.check(key)
        wait_until(lambda: all(member.health().nodes == 4 for member in members), "four members to know of each other")
        server.kill()
        allowed = 0
        for member in members:
            answers = [member.check(key) for _ in range(30)]
            assert all(answer.degraded for answer in answers)
            allowed += sum(answer.allowed for answer in answers)
            assert member.health().nodes == 4
        assert allowed == 20  # a fifth of 100, over all of them
        server.start()
        members.pop().close()
        wait_until(lambda: members[0].health().nodes == 3, "one to be missed")
    finally:
        for member in members:
            member.close()


def test_script_that_is_refused_its_key_is_no_outage(server: RedisServer, unique: str) -> None:
    key, other = key_of(unique), key_of(unique, "grace")
    with Limiter(server.url, on_failure="open", budget=1.0) as limiter, server.client() as client:
        client.rpush(stored(key), "something foreign")
        for _ in range(20):
            assert limiter.check(key).allowed
            assert limiter.check(other).degraded is None
        assert limiter.stats["script_errors"] == 20
        assert limiter.health().state == "ready"


@pytest.mark.parametrize("word", ["OOM", "READONLY"])
def test_server_that_refuses_opens_the_breaker_and_is_used_when_it_serves_again(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, word: str
) -> None:
    gate, key = open_gate(server.url, on_failure="open", budget=BUDGET), key_of(unique)
    reach(gate, key)
    gate.check(key)
    with server.client() as client:
        if word == "OOM":
            client.config_set("maxmemory", 1)
        else:
            client.replicaof("127.0.0.1", "1")
        open_breaker(gate, key)
        assert word in (gate.health().reason or "")
        assert gate.check(key).allowed
        if word == "OOM":
            client.config_set("maxmemory", 0)
        else:
            client.replicaof("NO", "ONE")
        reach(gate, key)


def test_one_shard_that_is_down_leaves_the_others_exact(cluster: RedisCluster, unique: str) -> None:
    keys = [key_of(unique, f"client-{number}") for number in range(60)]
    with Limiter(cluster.url, on_failure="open", budget=0.1) as limiter:
        for key in keys:
            reach(limiter, key)
        victim = cluster.primary_for(stored(keys[0]))
        theirs = [key for key in keys if cluster.primary_for(stored(key)) is victim]
        others = [key for key in keys if key not in theirs]
        victim.pause()
        try:
            end = time.monotonic() + 5
            while limiter.health().state == "ready":
                assert time.monotonic() < end
                limiter.check(theirs[0])
            assert all(limiter.check(key).degraded for key in theirs)
            assert not any(limiter.check(key).degraded for key in others)
            down = [shard.name for shard in limiter.health().shards if not shard.ready]
            assert down == [f"127.0.0.1:{victim.port}"]
        finally:
            victim.resume()
        wait_until(lambda: limiter.peek(theirs[0]).degraded is None, "the shard, or its replica, to serve")
        wait_until(lambda: limiter.health().state == "ready", "all to be well")


def test_sentinels_new_primary_is_found_without_a_request_waiting_for_it(unique: str) -> None:
    events: list[Event] = []
    key = key_of(unique)
    with (
        SentinelSet() as sentinel,
        Limiter(sentinel.urls, on_failure="open", budget=0.02, on_event=events.append) as limiter,
    ):
        reach(limiter, key)
        primary = sentinel.primary()
        primary.pause()
        try:
            took = []
            end = time.monotonic() + 20
            while time.monotonic() < end:
                told = timed(lambda: limiter.peek(key))
                took.append(told.seconds)
                if len(took) > 20 and told.answer.degraded is None:
                    break
                time.sleep(0.005)
            assert told.answer.degraded is None
            assert statistics.median(took) < 0.02
            assert max(took) < 0.02 + SLACK
            wait_until(lambda: "moved" in kinds(events), "the event of the new primary")
        finally:
            primary.resume()


def test_block_reaches_all_processes(server: RedisServer, unique: str) -> None:
    with Limiter(server.url) as one, Limiter(server.url) as other:
        other.engine.join_fleet()
        one.block("ip", "203.0.113.0/24", reason="a scan")
        wait_until(lambda: other.engine.local.live_clients.blocks.find({"address": "203.0.113.9"}, 0), "the news")
        assert [(block.kind, block.value, block.reason) for block in one.blocked()] == [
            ("ip", "203.0.113.0/24", "a scan")
        ]
        server.kill()
        assert other.engine.local.live_clients.blocks.find({"address": "203.0.113.9"}, 0)  # the last that is known
        with pytest.raises(StoreUnavailable):
            one.unblock("ip", "203.0.113.0/24")
        server.start()
        one.block("ip", "203.0.113.0/24")
        assert one.unblock("ip", "203.0.113.0/24")
        wait_until(lambda: not other.engine.local.live_clients.blocks, "the news of its end")


def test_refund_by_another_process_ends_what_is_remembered_here(server: RedisServer, unique: str) -> None:
    key = key_of(unique, quota=1)
    with Limiter(server.url) as one, Limiter(server.url) as other, server.client() as client:
        one.check(key)
        for _ in range(MIN_DENIALS):
            assert not other.check(key).allowed
        wait_until(lambda: client.pubsub_numsub("headgate:%news")[0][1] == 1, "the other to listen")
        wait_until(lambda: not other.check(key).allowed and other.stats["remembered"], "the denial to be remembered")
        assert one.refund(key, 1)
        wait_until(lambda: other.check(key).allowed, "the news of the refund", timeout=2)


def test_threads_end_when_the_limiter_is_closed_or_forgotten(server: RedisServer, unique: str) -> None:
    gc.collect()  # limiters of earlier tests
    before = {*threading.enumerate()}

    def ours() -> list[str]:
        since = {*threading.enumerate()} - before
        return [thread.name for thread in since if thread.name.startswith("headgate-")]

    limiter = Limiter(server.url, on_failure="open")
    forgotten = Limiter(server.url, on_failure="open")
    for one in (limiter, forgotten):
        one.engine.join_fleet()
        one.check(key_of(unique))
    wait_until(lambda: len(ours()) >= 4, "two threads of each")
    limiter.close()
    del forgotten, one

    def is_over() -> bool:
        gc.collect()  # each time: a thread at work keeps its limiter alive until it waits again
        return not ours()

    wait_until(is_over, f"all threads to end: {ours()}")


def test_requests_during_an_outage_do_not_wake_maintenance(unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper looks at the server when it is time to, and not once for each request that it did not get."""
    works = []
    work = MaintenanceThread.work
    monkeypatch.setattr(MaintenanceThread, "work", lambda keeper: works.append(keeper) or work(keeper))
    with Limiter("redis://127.0.0.1:1", on_failure="open") as limiter:
        wait_until(
            lambda: limiter.check(key_of(unique)) and limiter.engine.store.breakers.open_breakers(),
            "the breaker to open",
        )
        works.clear()
        for _ in range(500):
            limiter.check(key_of(unique))
            time.sleep(0.001)
        assert 0 < len(works) < 100


def test_what_a_request_took_on_one_shard_is_given_back_when_another_does_not_answer(
    cluster: RedisCluster, unique: str
) -> None:
    pairs = [(key_of(unique, f"a{number}"), key_of(f"{unique}-b", f"b{number}")) for number in range(60)]
    with Limiter(cluster.url, budget=0.2, remember=0) as limiter, Limiter(cluster.url) as other:
        here, there = next(
            pair for pair in pairs if cluster.primary_for(stored(pair[0])) is not cluster.primary_for(stored(pair[1]))
        )
        reach(limiter, here)
        reach(limiter, there)
        limiter.check(here, there)
        other.peek(here)
        victim = cluster.primary_for(stored(there))
        with paused(victim):
            assert isinstance(timed(lambda: limiter.check(here, there)).answer, StoreError)
            assert other.peek(here).remaining == 99
        wait_until(lambda: isinstance(timed(lambda: other.peek(there)).answer, Decision), "the shard to serve again")


def test_busy_interpreter_does_not_keep_the_breaker_open(server: RedisServer, unique: str) -> None:
    key, stopped = key_of(unique), threading.Event()

    def burn() -> None:
        while not stopped.is_set():
            sum(range(2_000))

    with Limiter(server.url, on_failure="open", budget=0.005, lease=0) as limiter:
        reach(limiter, key)
        threads = [threading.Thread(target=burn, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            with paused(server):
                open_breaker(limiter, key)
            wait_until(lambda: limiter.health().shards[0].ready, "the breaker to close")
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def test_idle_node_recovers_without_requests(server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "HEARTBEAT_INTERVAL_S", 0.4)
    with Limiter(server.url, on_failure="open", budget=BUDGET) as limiter:
        reach(limiter, key_of(unique))
        with paused(server):
            assert limiter.check(key_of(unique)).degraded is not None
        assert limiter.health().state == "degraded"
        wait_until(lambda: limiter.health().ready, "nothing but time")


def test_fleet_size_is_kept_after_an_outage(server: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were silent: the first that is heard again is not the only one."""
    monkeypatch.setattr(maintenance, "HEARTBEAT_INTERVAL_S", 0.5)
    key = key_of(unique)
    with ExitStack() as stack:
        fleet = [stack.enter_context(Limiter(server.url, on_failure="local", budget=BUDGET)) for _ in range(3)]
        for limiter in fleet:
            reach(limiter, key)
        wait_until(lambda: all(limiter.health().nodes == 3 for limiter in fleet), "three to know each other")
        wait_until(
            lambda: all(not limiter.engine.maintenance.unsettled_heartbeats for limiter in fleet),
            "that they are sure of it",
        )
        with paused(server):
            for limiter in fleet:
                open_breaker(limiter, key)
            time.sleep(maintenance.HEARTBEAT_INTERVAL_S * (maintenance.MISSED_HEARTBEATS + 1))
        seen = set()
        for _ in range(300):
            seen |= {limiter.health().nodes for limiter in fleet}
            time.sleep(0.005)
        assert seen == {3}
