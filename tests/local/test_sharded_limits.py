"""Sharded limits: all shards together never exceed the limit, and the decisions they give."""

from __future__ import annotations

import itertools
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidLimit, Limit
from headgate.local.sharded_limits import is_sharded, merge, shard, shard_operation
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, IdempotentCheck, Refund, Reset
from headgate.testing import FakeClock

MINUTE = timedelta(minutes=1)
SPLITTABLE = ("fixed_window", "sliding_window", "sliding_log", "token_bucket", "gcra", "leaky_bucket")
every_splittable_algorithm = pytest.mark.parametrize("algorithm", SPLITTABLE)


class Counters:
    """A memory store whose shards are chosen by the test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)

    def check(self, limit: Limit, part: int, cost: int = 1) -> Any:
        call = Check((limit.by("ada"),), cost)
        return merge(call, self.store.decide(shard(call, lambda _: part)))


def test_limit_has_one_shard_by_default() -> None:
    limit = Limit(100, MINUTE)
    assert (limit.split, limit.part) == (1, None)
    assert repr(limit) == (
        "Limit(quota=100, period=datetime.timedelta(seconds=60), burst=100, algorithm='token_bucket', name='default')"
    )
    key = limit.by("ada")
    assert key.part(0) is key
    call = Check((key,), 1)
    assert shard(call, lambda _: 0) is call
    assert not is_sharded(call)


def test_shard_has_its_share_under_the_same_name() -> None:
    limit = Limit(100, MINUTE, burst=40, name="busy", split=4)
    assert limit.part == Limit(25, MINUTE, burst=10, name="busy")
    assert limit.part.space == limit.space
    assert str(limit) == str(Limit(100, MINUTE, burst=40, name="busy"))
    assert eval(repr(limit), {"Limit": Limit, "datetime": __import__("datetime")}) == limit
    assert pickle.loads(pickle.dumps(limit)) == limit
    assert limit != Limit(100, MINUTE, burst=40, name="busy")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"quota": 100, "split": 3},
            "quota 100 cannot be split over 3 counters evenly; write 99 or 102, or another split",
        ),
        (
            {"quota": 100, "burst": 30, "split": 4},
            "burst 30 cannot be split over 4 counters evenly; write 28 or 32, or another split",
        ),
        ({"quota": 2, "split": 4}, "quota 2 cannot be split over 4 counters evenly; write 4, or another split"),
        ({"quota": 100, "split": 0}, "split 0 is not a whole number of at least 1"),
        ({"quota": 100, "split": True}, "split True is not a whole number of at least 1"),
        ({"quota": 100, "split": 2.0}, "split 2.0 is not a whole number of at least 1"),
        (
            {"quota": 100, "split": 2, "algorithm": "concurrency"},
            "split 2 means nothing to concurrency, which finds a lease by its id; leave it out",
        ),
    ],
)
def test_invalid_split_is_rejected_with_a_remedy(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLimit) as caught:
        Limit(period=MINUTE, **numbers)
    assert str(caught.value) == message


@given(st.text(max_size=200), st.integers(0, 7), st.integers(0, 7))
def test_no_identity_equals_that_of_a_shard(text: str, one: int, other: int) -> None:
    limit = Limit(8, MINUTE, split=8)
    part = limit.by(text).part(one)
    assert part.identity not in {limit.by(part.identity).identity, limit.by(text, f"%part-{one}").identity}
    assert part.identity != limit.by(text).identity
    assert (part == limit.by(text).part(other)) is (one == other)
    assert limit.by().part(one).identity == f"%all|%part-{one}"


@every_splittable_algorithm
@given(data=st.data())
def test_all_shards_never_exceed_the_limit(algorithm: str, data: st.DataObject) -> None:
    limit = Limit(24, MINUTE, algorithm=algorithm, split=data.draw(st.sampled_from([2, 3, 8])))
    counters = Counters()
    asked = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), max_size=60))
    assert sum([cost for part, cost in asked if counters.check(limit, part, cost)]) <= 24


@every_splittable_algorithm
def test_evenly_used_shards_allow_the_whole_limit(algorithm: str) -> None:
    limit = Limit(24, MINUTE, algorithm=algorithm, split=4)
    counters = Counters()
    assert [bool(counters.check(limit, number)) for number in range(28)] == [True] * 24 + [False] * 4


@every_splittable_algorithm
def test_shard_may_deny_while_others_are_full(algorithm: str) -> None:
    """The cost of sharding: three quarters of the capacity may be left."""
    limit = Limit(24, MINUTE, algorithm=algorithm, split=4)
    counters = Counters()
    assert all(counters.check(limit, 0) for _ in range(6))
    assert not counters.check(limit, 0)
    assert [bool(counters.check(limit, 1 + number % 3)) for number in range(21)] == [True] * 18 + [False] * 3


def test_cost_above_a_shard_is_unsatisfiable() -> None:
    limit = Limit(24, MINUTE, split=4)
    assert Counters().check(limit, 0, cost=6).allowed
    assert Counters().check(limit, 0, cost=7).unsatisfiable


def test_decision_names_the_limit_and_estimates_remaining() -> None:
    limit, whole = Limit(24, MINUTE, name="busy", split=4), Limit(10, MINUTE, name="whole")
    counters = Counters()
    call = Check((limit.by("ada"), whole.by("ada")), 2)
    sent = shard(call, lambda parts: parts + 1)
    assert [key.identity for key in sent.keys] == ["ada|%part-1", "ada"]
    decision = merge(call, counters.store.decide(sent))
    assert decision.keys == call.keys
    assert [outcome.remaining for outcome in decision.outcomes] == [16, 8]
    assert decision.reason == "allowed: 8 left of whole (10 per minute, token_bucket)"


def test_denial_reports_the_answer_of_its_shard() -> None:
    limit = Limit(24, MINUTE, split=4)
    counters = Counters()
    assert counters.check(limit, 3, cost=5).allowed
    denial = counters.check(limit, 3, cost=2)
    assert (denial.allowed, denial.remaining, denial.retry_after) == (False, 1, 10.0)
    counters.clock.advance(10)
    assert counters.check(limit, 3, cost=2).allowed


def test_refund_with_an_id_goes_to_one_shard() -> None:
    limit = Limit(24, MINUTE, split=4)
    key = limit.by("ada")
    picks = iter(range(100))
    assert {shard_operation(Refund(key, 1, "a"), lambda _: next(picks)).key for _ in range(8)} <= {
        key.part(index) for index in range(4)
    }
    assert len({shard_operation(Refund(key, 1, "a"), lambda _: next(picks)).key for _ in range(8)}) == 1
    assert len({shard_operation(Refund(key, 1, f"id-{number}"), lambda _: 0).key for number in range(64)}) == 4
    assert shard_operation(Refund(key, 1, at_us=7), lambda _: 2) == Refund(key.part(2), 1, at_us=7)
    whole = Refund(Limit(24, MINUTE).by("ada"), 1, "a")
    assert shard_operation(whole, lambda _: 2) == whole


def test_reset_covers_all_shards() -> None:
    limit, whole = Limit(24, MINUTE, name="busy", split=3), Limit(10, MINUTE, name="whole")
    key = limit.by("ada")
    assert shard_operation(Reset((key, whole.by("ada"))), lambda _: 0) == Reset(
        (*map(key.part, range(3)), whole.by("ada"))
    )


def test_idempotent_check_and_its_refund_share_a_shard() -> None:
    key = Limit(100, timedelta(minutes=1), name="all", split=4).by("ada")
    picks = itertools.cycle(range(4))
    check = IdempotentCheck((key,), 1, "req-1")
    parts = {shard(check, lambda _: next(picks)).keys[0] for _ in range(8)}
    assert parts == {shard_operation(Refund(key, 1, "req-1"), lambda _: next(picks)).key}
    assert type(shard(check, lambda _: 0)) is IdempotentCheck
    assert len({shard(IdempotentCheck((key,), 1, f"{number}"), lambda _: 0).keys for number in range(64)}) == 4
