"""The pool: tokens deposited in batches that expire, spent by requests. Python, Lua, and every store."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, InvalidLimit, Key, Limit, Limiter
from headgate.algorithms import pool
from headgate.limits import PoolLimit
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Call, Check, Deposit, Refund, Reset, TakeBack
from headgate.testing import FakeClock
from support.algorithm_stores import SECOND, InMemory, InRedis

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import RedisServer

NOW = 1_763_251_200 * SECOND
LIMIT = PoolLimit(100, timedelta(seconds=10), name="pool")


def amounts(state: pool.State) -> list[tuple[int, int]]:
    """Unspent and spent tokens of each batch."""
    return [(tokens, spent) for _, tokens, spent in state or ()]


def with_batches(*batches: tuple[int, int]) -> pool.State:
    """A pool with so many tokens, each batch for so many seconds."""
    state: pool.State = None
    for tokens, seconds in batches:
        state, _ = pool.deposit(state, NOW, tokens, seconds * SECOND, LIMIT)
    return state


# ------------------------------------------------------------- rules


def test_an_empty_pool_denies_and_estimates_when_to_ask_again() -> None:
    assert pool.decide(None, NOW, 1, LIMIT) == (None, (0, pool.RETRY_US, 0, 0))


def test_a_cost_beyond_the_quota_never_passes() -> None:
    state = with_batches((100, 5))
    assert pool.decide(state, NOW, 101, LIMIT) == (state, (100, -1, 5 * SECOND, 0))


def test_tokens_that_expire_first_are_spent_first() -> None:
    state, verdict = pool.decide(with_batches((5, 9), (3, 2), (4, 5)), NOW, 6, LIMIT)
    assert amounts(state) == [(0, 3), (1, 3), (5, 0)]
    assert verdict == (6, 0, 9 * SECOND, 2 * SECOND)


def test_a_batch_counts_until_the_microsecond_of_its_expiry() -> None:
    state = with_batches((3, 2), (4, 5))
    assert pool.decide(state, NOW + 2 * SECOND - 1, 0, LIMIT)[1] == (7, 0, 3 * SECOND + 1, 0)
    assert pool.decide(state, NOW + 2 * SECOND, 0, LIMIT)[1] == (4, 0, 3 * SECOND, 0)
    assert pool.decide(state, NOW + 5 * SECOND, 0, LIMIT)[1] == (0, 0, 0, 0)


def test_a_batch_from_the_future_does_not_count() -> None:
    state = with_batches((3, 2))
    assert pool.decide(state, NOW - 8 * SECOND, 0, LIMIT)[1][0] == 3
    assert pool.decide(state, NOW - 8 * SECOND - 1, 0, LIMIT)[1][0] == 0


def test_a_deposit_is_limited_to_quota_and_period() -> None:
    state, accepted = pool.deposit(with_batches((70, 5)), NOW, 40, 60 * SECOND, LIMIT)
    assert accepted == 30
    assert (state or ())[-1] == (NOW + 10 * SECOND, 30, 0)
    assert pool.deposit(state, NOW, 1, SECOND, LIMIT) == (state, 0)


def test_too_many_batches_merge_and_expire_with_the_earlier_one() -> None:
    state = with_batches(*[(1, 2 + place % 8) for place in range(pool.MAX_BATCHES)])
    state, _ = pool.decide(state, NOW, 1, LIMIT)
    state, _ = pool.deposit(state, NOW, 5, SECOND, LIMIT)
    assert len(state) == pool.MAX_BATCHES
    assert state[0] == (NOW + SECOND, 5, 1)


def test_a_refund_returns_all_to_live_batches_or_nothing() -> None:
    state, _ = pool.decide(with_batches((3, 2), (4, 5)), NOW, 5, LIMIT)
    assert amounts(pool.refund(state, NOW, 4, LIMIT)) == [(3, 0), (3, 1)]
    assert pool.refund(state, NOW, 6, LIMIT) is state
    assert amounts(pool.refund(state, NOW + 2 * SECOND, 2, LIMIT)) == [(4, 0)]
    assert pool.refund(state, NOW + 2 * SECOND, 3, LIMIT) is state
    unspent = with_batches((3, 2))
    assert pool.refund(unspent, NOW, 1, LIMIT) is unspent


def test_taken_tokens_cannot_be_refunded() -> None:
    state, _ = pool.decide(with_batches((3, 2), (4, 5)), NOW, 1, LIMIT)
    state, taken = pool.take_back(state, NOW, 5, 9 * SECOND, LIMIT)
    assert (amounts(state), taken) == ([(0, 1), (1, 0)], 5)
    state = pool.refund(state, NOW, 1, LIMIT)
    assert amounts(state) == [(1, 0), (1, 0)]
    assert pool.refund(state, NOW, 1, LIMIT) is state
    assert pool.take_back(state, NOW, 99, 5 * SECOND, LIMIT)[1] == 2
    assert pool.take_back(state, NOW, 99, 5 * SECOND - 1, LIMIT)[1] == 1


def test_own_tokens_expire_with_the_period_and_cannot_be_taken_back() -> None:
    state, _ = pool.deposit(with_batches((3, 2)), NOW + 4, 5, 0, LIMIT)
    assert state == ((NOW + 2 * SECOND, 3, 0), (NOW + 10 * SECOND, 5, 0))
    assert pool.take_back(state, NOW + 4, 99, 10 * SECOND, LIMIT) == (((NOW + 10 * SECOND, 5, 0),), 3)


@pytest.mark.parametrize("place", range(3))
def test_own_tokens_are_merged_with_no_others(place: int) -> None:
    limit, boundary = PoolLimit(100, timedelta(seconds=100), name="pool"), NOW + 100 * SECOND
    state: pool.State = None
    for index in range(pool.MAX_BATCHES):
        seconds = 40 + index if index < place else 60 + index
        state, _ = pool.deposit(state, NOW + 50 * SECOND, 1, seconds * SECOND, limit)
    state, _ = pool.deposit(state, NOW + 50 * SECOND, 7, 0, limit)
    assert boundary % limit.period_us == 0
    assert len(state) == pool.MAX_BATCHES
    assert (boundary, 7, 0) in state


# ------------------------------------------------------------- internal


def test_users_cannot_create_a_pool() -> None:
    with pytest.raises(InvalidLimit, match="unknown algorithm 'pool'"):
        Limit(5, timedelta(seconds=1), algorithm="pool")
    with pytest.raises(InvalidLimit, match="unknown algorithm 'gcra'"):
        PoolLimit(5, timedelta(seconds=1), algorithm="gcra")


def test_a_pool_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(LIMIT))
    assert copy == LIMIT
    assert type(copy) is PoolLimit


# ------------------------------------------------------------- Python and Lua

KEY = st.sampled_from([LIMIT.by("ada"), LIMIT.by("bob")])
SMALL = st.one_of(st.integers(1, 12), st.integers(90, 110), st.just(2**60))
OPERATION = st.one_of(
    st.builds(lambda key, cost: Check((key,), cost), KEY, st.integers(0, 12) | SMALL),
    st.builds(
        Deposit, KEY, SMALL, st.just(0) | st.integers(1, 12 * SECOND), st.sampled_from("abcdefgh") | st.uuids().map(str)
    ),
    st.builds(TakeBack, KEY, SMALL, st.integers(0, 12 * SECOND)),
    st.builds(Refund, KEY, SMALL, st.none() | st.sampled_from("rs")),
    st.builds(lambda key: Reset((key,)), KEY),
)
STEP = st.integers(0, 3 * SECOND) | st.integers(-12 * SECOND, 0) | st.just(0)
HISTORY = st.lists(st.tuples(STEP, OPERATION), max_size=40)


@given(HISTORY)
def test_lua_decides_as_python(redis7: RedisServer, history: list[tuple[int, Call]]) -> None:
    here, now_us = InMemory(), NOW
    with redis7.client() as client:
        there = InRedis(client)
        for step_us, operation in history:
            now_us += step_us
            answers = [store.run(operation, now_us) for store in (here, there)]
            if isinstance(operation, Check):
                answers = [answer._replace(next_allowed_us=0) for answer in answers]
            assert answers[0] == answers[1], operation


@given(st.lists(st.tuples(st.integers(0, 3 * SECOND), OPERATION.filter(lambda each: type(each) is not Reset))))
def test_no_token_is_spent_that_was_not_deposited_or_has_expired(history: list[tuple[int, Call]]) -> None:
    store, now_us = InMemory(), NOW
    deposits: list[tuple[Key, int, int]] = []  # key, tokens, expiry
    spent: dict[Key, int] = {}
    seen: set[tuple[Key, str]] = set()
    for step_us, operation in history:
        now_us += step_us
        answer = store.run(operation, now_us)
        if isinstance(operation, Deposit):
            if (operation.key, operation.id) not in seen:
                deposits.append((operation.key, answer, pool.expiry(now_us, operation.ttl_us, LIMIT)))
            seen.add((operation.key, operation.id))
        elif isinstance(operation, Check):
            key = operation.keys[0]
            live = sum(tokens for of, tokens, expiry_us in deposits if of == key and expiry_us > now_us)
            assert answer.remaining + (operation.costs[0] if answer.allowed else 0) <= min(live, LIMIT.quota)
            spent[key] = spent.get(key, 0) + (operation.costs[0] if answer.allowed else 0)
        elif isinstance(operation, TakeBack):
            spent[operation.key] = spent.get(operation.key, 0) + answer
        elif isinstance(operation, Refund) and answer:
            spent[operation.key] = max(0, spent.get(operation.key, 0) - operation.amount)
    for key, total in spent.items():
        assert total <= sum(tokens for of, tokens, _ in deposits if of == key)


# ------------------------------------------------------------- stores


def run_sync(url: str, clock: FakeClock, calls: list[Any]) -> list[Any]:
    with Limiter(url, clock=clock, budget=20) as limiter:
        return [call() if callable(call) else limiter.engine.run(call) for call in calls]


def run_async(url: str, clock: FakeClock, calls: list[Any]) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncLimiter(url, clock=clock, budget=20) as limiter:
            return [call() if callable(call) else await limiter.engine.run(call) for call in calls]

    return asyncio.run(run())


Runner = pytest.mark.parametrize("run", [run_sync, run_async], ids=["sync", "async"])


@Runner
def test_every_store_has_pools(run: Callable[..., list[Any]], store_url: str, unique: str) -> None:
    clock = FakeClock(NOW)
    key = PoolLimit(100, timedelta(seconds=10), name=unique).by("ada")
    other = Limit(50, timedelta(hours=1), algorithm="fixed_window", name=unique).by("ada")
    one, both = Check((key,), 4), Check((key, other), 4)
    answers = run(
        store_url,
        clock,
        [
            *[one, Deposit(key, 10, 5 * SECOND, "d1"), Deposit(key, 10, 5 * SECOND, "d1"), one, both, both],
            *[
                TakeBack(key, 1, 10 * SECOND),
                Refund(key, 3),
                TakeBack(key, 99, 10 * SECOND),
                lambda: clock.advance(5),
                one,
            ],
            *[Deposit(key, 4, 5 * SECOND, "d2"), both, both, Reset((key,)), Deposit(key, 4, 5 * SECOND, "d2")],
        ],
    )
    decisions = [answer for answer in answers if hasattr(answer, "allowed")]
    assert [(each.allowed, each.verdicts[0][0]) for each in decisions] == [
        *[(False, 0), (True, 6), (True, 2), (False, 2), (False, 0), (True, 0), (False, 0)]
    ]
    # A check that the pool denies is not charged to the other limit.
    assert [each.verdicts[1][0] for each in decisions if len(each.keys) == 2] == [46, 46, 42, 42]
    assert [answer for answer in answers if not hasattr(answer, "allowed")] == [*[10, 10, 1, True, 4, None, 4, None, 4]]


@Runner
def test_a_deposit_after_a_denial_is_seen_at_once(run: Callable[..., list[Any]], store_url: str, unique: str) -> None:
    clock = FakeClock(NOW)
    key = PoolLimit(100, timedelta(seconds=10), name=unique).by("ada")
    denied = [Check((key,), 1)] * 10
    *answers, _, last = run(store_url, clock, [*denied, Deposit(key, 1, SECOND, "d"), Check((key,), 1)])
    assert [answer.allowed for answer in answers] == [False] * 10
    assert {answer.retry_after for answer in answers} == {0.1}
    assert last.allowed


def test_a_full_store_in_memory_accepts_no_deposits() -> None:
    clock = FakeClock(NOW)
    store = MemoryStore(clock, max_keys=1)
    blocked = Limit(1, timedelta(minutes=1), name="blocked").by("ada")
    assert store.run(Check((blocked,), 1)).allowed
    assert store.run(Deposit(LIMIT.by("bob"), 5, SECOND, "d")) == 0
    assert not store.run(Check((LIMIT.by("bob"),), 1)).allowed


def test_a_deposit_that_arrives_late_lives_for_the_rest_of_its_time(store_url: str, unique: str) -> None:
    clock, key = FakeClock(NOW), PoolLimit(100, timedelta(seconds=10), name=unique).by("ada")
    late, too_late = [Deposit(key, 10, 5 * SECOND, id, NOW - age * SECOND) for id, age in (("d1", 3), ("d2", 5))]
    early = Deposit(key, 10, 5 * SECOND, "d3", NOW + SECOND)  # the clock was set back
    peek = Check((key,), 0)
    *amounts, first, _, second = run_sync(
        store_url, clock, [late, too_late, early, peek, lambda: clock.advance(2), peek]
    )
    assert amounts == [10, 0, 10]
    assert first.verdicts == ((20, 0, 5 * SECOND, 0),)
    assert second.verdicts == ((10, 0, 3 * SECOND, 0),)
