"""Charging a bucket for requests that another region has admitted, beyond what is left. Python and Lua."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limit
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Call, Check, Overdraw, Refund, Reset
from headgate.testing import FakeClock
from support.algorithm_stores import SECOND, InMemory, InRedis

if TYPE_CHECKING:
    from support.servers import RedisServer

NOW = 1_763_251_200 * SECOND
BUCKETS = ("gcra", "leaky_bucket", "token_bucket")
LIMITS = [
    Limit(7, timedelta(seconds=3), burst=burst, algorithm=algorithm, name=f"{algorithm}-{burst}")
    for algorithm in BUCKETS
    for burst in (None, 2, 20)
]


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_debt_delays_the_next_request(algorithm: str) -> None:
    clock = FakeClock()
    store, key = MemoryStore(clock), Limit(10, timedelta(seconds=10), algorithm=algorithm, name="debt").by("ada")
    assert store.run(Overdraw(key, 10, "a")) == 10
    assert store.run(Overdraw(key, 4, "b")) == 4
    assert store.check(key).retry_after == 5
    clock.advance(5)
    assert [store.check(key).allowed for _ in range(2)] == [True, False]


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_debt_is_at_most_the_capacity(algorithm: str) -> None:
    store, key = MemoryStore(FakeClock()), Limit(10, timedelta(seconds=10), algorithm=algorithm, name="debt").by("ada")
    for id in "abcdef":
        assert store.run(Overdraw(key, 99, id)) == 10
    assert store.check(key).retry_after == 11


def test_repeated_id_is_charged_once() -> None:
    store, key = MemoryStore(FakeClock()), Limit(10, timedelta(seconds=10), name="debt").by("ada")
    assert [store.run(Overdraw(key, amount, "same")) for amount in (3, 9)] == [3, 3]
    assert store.check(key, cost=0).remaining == 7


KEY = st.sampled_from([limit.by(who) for limit in LIMITS for who in ("ada", "bob")])
AMOUNT = st.integers(1, 30)
OPERATION = st.one_of(
    st.builds(lambda key, cost: Check((key,), cost), KEY, st.integers(0, 8)),
    st.builds(Overdraw, KEY, AMOUNT, st.sampled_from("abc") | st.uuids().map(str)),
    st.builds(Refund, KEY, AMOUNT, st.none() | st.sampled_from("rs")),
    st.builds(lambda key: Reset((key,)), KEY),
)
STEP = st.integers(0, 3 * SECOND) | st.integers(-SECOND, 0) | st.just(0)


@given(st.lists(st.tuples(STEP, OPERATION), max_size=30))
def test_lua_overdraws_as_python(redis7: RedisServer, history: list[tuple[int, Call]]) -> None:
    here, now_us = InMemory(), NOW
    with redis7.client() as client:
        there = InRedis(client)
        for step_us, operation in history:
            now_us += step_us
            answers = [store.run(operation, now_us) for store in (here, there)]
            if isinstance(operation, Check):
                answers = [answer._replace(next_allowed_us=0) for answer in answers]
            assert answers[0] == answers[1], operation
