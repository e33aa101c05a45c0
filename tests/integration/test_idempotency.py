"""Checks with an id on real servers that lose answers or go away: repeated, they are charged once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit, Limiter, StoreError
from support.faults import LONG, Gate, Proxy, key_of, paused, reach, timed
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

ALGORITHMS = ("fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")


@pytest.mark.parametrize("algorithms", [*[(one,) for one in ALGORITHMS], ALGORITHMS], ids="-".join)
def test_check_whose_answer_was_lost_is_charged_once_when_it_is_repeated(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, algorithms: tuple[str, ...]
) -> None:
    limits = [Limit(10, timedelta(days=30), algorithm=each, name=f"{unique}-{each}") for each in algorithms]
    keys = [limit.by("ada") for limit in limits]
    gate = open_gate(server.url)
    gate.check(*[limit.by("bob") for limit in limits], id="so that the server knows the script")
    with Proxy(server, b":id:", "drop") as proxy:
        cut_off = open_gate(proxy.url)
        lost = timed(lambda: cut_off.check(*keys, cost=3, id="req-1")).answer
        assert isinstance(lost, StoreError)
        assert lost.may_have_happened
    wait_until(lambda: gate.peek(*keys).remaining == 7, "the charge of the check whose answer was lost")
    answers = [gate.check(*keys, cost=3, id="req-1") for _ in range(2)]
    assert answers[0] == answers[1]
    assert (answers[0].allowed, answers[0].remaining) == (True, 7)
    assert gate.peek(*keys).remaining == 7


def test_check_that_a_stalled_server_carries_out_later_is_charged_once_when_it_is_repeated(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate, key = open_gate(server.url, budget=0.2), key_of(unique)
    gate.check(key, id="so that the server knows the script")
    with paused(server):
        lost = timed(lambda: gate.check(key, cost=3, id="req-1")).answer
        assert isinstance(lost, StoreError)
        assert lost.may_have_happened
    reach(gate, key)
    first = gate.check(key, cost=3, id="req-1")
    assert first.allowed
    assert gate.check(key, cost=3, id="req-1") == first
    assert gate.peek(key).remaining == 96


@pytest.mark.parametrize("mode", ["open", "local"])
@pytest.mark.parametrize("is_sent", [False, True], ids=["never sent", "outcome unknown"])
def test_id_that_was_admitted_in_an_outage_is_charged_once_during_it_and_after_it(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str, mode: str, is_sent: bool
) -> None:
    gate = open_gate(server.url, on_failure=mode, share=1.0, budget=0.2)
    key, other = key_of(unique), key_of(f"{unique}-other")
    reach(gate, key)
    gate.check(other, id="so that the server knows the script")
    if is_sent:
        server.pause()
    else:
        server.kill()
        gate.idle(0.1)
    try:
        answers = [gate.check(key, cost=30, id="req-1") for _ in range(4)]
    finally:
        if is_sent:
            server.resume()
        else:
            server.launch()
    assert answers == [answers[0]] * 4
    assert (answers[0].allowed, str(answers[0].degraded).partition(":")[0]) == (True, mode)
    server.wait_until_ready()
    wait_until(lambda: gate.health().ready and not gate.health().owed_keys, "everything settled")
    assert gate.check(key, cost=30, id="req-1") == answers[0]
    reach(gate, key)
    assert gate.peek(key).remaining == 70
    assert gate.check(key, cost=1, id="req-2").remaining == 69


def test_id_is_answered_by_the_store_where_its_denial_is_remembered(server: RedisServer, unique: str) -> None:
    key = key_of(unique, quota=1)
    with Limiter(server.url) as limiter:
        first = limiter.check(key, id="req-1")
        assert not any(limiter.check(key) for _ in range(9))
        assert limiter.stats["remembered"] > 0
        assert limiter.check(key, id="req-1") == first
        assert not limiter.check(key, id="req-2")


def test_id_is_answered_by_the_store_where_tokens_are_prepaid(server: RedisServer, unique: str) -> None:
    key = Limit(1_000_000, timedelta(days=1), name=unique).by("ada")
    with Limiter(server.url) as limiter:
        first = limiter.check(key, id="req-1")
        wait_until(
            lambda: all(limiter.check(key) for _ in range(200)) and limiter.stats["prepaid"] > 100, "prepaid tokens"
        )
        assert limiter.check(key, id="req-1") == first
        second = limiter.check(key, id="req-2")
        assert limiter.check(key, id="req-2") == second


def test_id_that_many_send_at_once_is_charged_once(remote_url: str, unique: str) -> None:
    keys = [Limit(100, LONG, algorithm=each, name=f"{unique}-{each}").by("ada") for each in ALGORITHMS]
    with Limiter(remote_url) as one, Limiter(remote_url) as other, ThreadPoolExecutor(16) as pool:
        answers: list[Any] = list(pool.map(lambda number: (one, other)[number % 2].check(*keys, id="req-1"), range(64)))
        assert {answer.verdicts for answer in answers} == {answers[0].verdicts}
        assert one.peek(*keys).remaining == 99
