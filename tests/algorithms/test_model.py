"""The reference model gives the numbers that were worked out by hand, so that the other tests may trust it.

A row reads `(now, cost) -> (allowed, remaining, retry_after)`, in milliseconds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.model import ALGORITHMS, Model, Plan, Subject

SECOND = 1_000_000
MINUTE = 60 * SECOND


def plan(algorithm: str, quota: int, period_us: int, capacity: int | None = None, name: str = "x") -> Plan:
    return Plan(algorithm, quota, period_us, quota if capacity is None else capacity, name)


def answer(model: Model, limit: Plan, now_ms: int, cost: int) -> tuple[bool, int, float | None]:
    decision = model.check([Subject(limit)], now_ms * 1000, cost)
    retry_after = decision.retry_after_us
    return decision.allowed, decision.remaining, None if retry_after is None else retry_after / 1000


TRACES = {
    "a bucket gets nothing from a clock that goes back": (
        plan("token_bucket", 1, SECOND, 10),
        [
            ((10_000, 10), (True, 0, 0)),
            ((5_000, 1), (False, 0, 6_000)),
            ((10_000, 5), (False, 0, 5_000)),
        ],
    ),
    "callers whose clocks differ share one bucket": (
        plan("token_bucket", 10, SECOND),
        [
            ((100_000, 10), (True, 0, 0)),
            ((99_500, 1), (False, 0, 600)),
            ((100_100, 1), (True, 0, 0)),
            ((99_700, 1), (False, 0, 500)),
        ],
    ),
    "a huge cost is unsatisfiable and takes nothing": (
        plan("token_bucket", 5, SECOND),
        [
            ((0, 6), (False, 5, None)),
            ((0, 2**53 + 1), (False, 5, None)),
            ((0, 10**30), (False, 5, None)),
            ((0, 5), (True, 0, 0)),
            ((0, 0), (True, 0, 0)),
        ],
    ),
    "a denial takes nothing": (
        plan("fixed_window", 5, SECOND),
        [
            ((0, 3), (True, 2, 0)),
            ((0, 4), (False, 2, 1_000)),
            ((1, 4), (False, 2, 999)),
            ((2, 2), (True, 0, 0)),
        ],
    ),
    "a bucket owes for longer than a minute": (
        plan("token_bucket", 1, SECOND, 100),
        [((0, 100), (True, 0, 0)), ((61_000, 62), (False, 61, 1_000))],
    ),
    "a full window decays in the next one": (
        plan("sliding_window", 100, MINUTE),
        [((10_000, 100), (True, 0, 0)), ((10_000, 1), (False, 0, 50_600))],
    ),
    "half a window's worth waits for half of the next window": (
        plan("sliding_window", 100, MINUTE),
        [((0, 100), (True, 0, 0)), ((0, 50), (False, 0, 90_000))],
    ),
    "both windows of a sliding window decide": (
        plan("sliding_window", 100, MINUTE),
        [
            ((0, 100), (True, 0, 0)),
            ((110_000, 60), (True, 23, 0)),
            ((110_000, 50), (False, 23, 20_000)),
        ],
    ),
    "the estimate is not rounded down": (
        plan("sliding_window", 10, MINUTE),
        [((0, 10), (True, 0, 0)), ((60_100, 1), (False, 0, 5_900)), ((66_000, 1), (True, 0, 0))],
    ),
    "a window begins at its boundary": (
        plan("fixed_window", 2, SECOND),
        [((1_999, 2), (True, 0, 0)), ((1_999, 1), (False, 0, 1)), ((2_000, 1), (True, 1, 0))],
    ),
    "a log entry is gone one window later": (
        plan("sliding_log", 1, SECOND),
        [((0, 1), (True, 0, 0)), ((999, 1), (False, 0, 1)), ((1_000, 1), (True, 0, 0))],
    ),
    "a small cost passes where a large one was denied": (
        plan("token_bucket", 1, SECOND, 100),
        [((0, 96), (True, 4, 0)), ((10, 5), (False, 4, 990)), ((20, 1), (True, 3, 0))],
    ),
}


@pytest.mark.parametrize("trace", TRACES)
def test_model_answers_as_worked_out_by_hand(trace: str) -> None:
    limit, rows = TRACES[trace]
    model = Model()
    assert [answer(model, limit, *event) for event, _ in rows] == [expected for _, expected in rows]


def test_polling_just_below_the_rate_passes_all_but_one() -> None:
    model, limit = Model(), plan("token_bucket", 10, SECOND)
    assert answer(model, limit, 0, 10) == (True, 0, 0)
    assert sum(answer(model, limit, 99 * poll, 1)[0] for poll in range(1, 101)) == 99


def test_bucket_admits_its_burst_and_a_minutes_refill_in_the_first_minute() -> None:
    model, limit = Model(), plan("token_bucket", 1000, MINUTE, 200)
    assert sum(answer(model, limit, ms, 1)[0] for ms in range(0, 60_001, 20)) == 1_200


def test_layered_limits_are_all_or_nothing() -> None:
    model = Model()
    layers = [
        Subject(plan("token_bucket", quota, MINUTE, name=name)) for name, quota in (("ip", 10), ("user", 5), ("key", 3))
    ]
    assert model.check(layers, 0, 3).allowed
    denied = model.check(layers, 0, 1)
    assert denied.denied_by == ("key",)
    assert [outcome.remaining for outcome in denied.outcomes] == [7, 2, 0]
    assert [model.peek([layer], 0).remaining for layer in layers] == [7, 2, 0]


@pytest.mark.parametrize(("capacity", "left"), [(20, 0), (80, 20), (200, 140)])
def test_bucket_keeps_its_usage_through_a_plan_change(capacity: int, left: int) -> None:
    model = Model()
    answer(model, plan("token_bucket", 1, MINUTE, 100), 0, 60)
    assert answer(model, plan("token_bucket", 1, MINUTE, capacity), 0, 0) == (True, left, 0)


def test_smaller_gcra_limit_denies_no_longer_than_its_own_burst() -> None:
    model = Model()
    answer(model, plan("gcra", 3_600, 60 * MINUTE), 0, 3_000)
    assert answer(model, plan("gcra", 60, MINUTE), 0, 1) == (False, 0, 1_000)


def test_refund_fills_up_to_the_capacity_and_counts_once_per_id() -> None:
    model, bucket = Model(), Subject(plan("token_bucket", 5, MINUTE))
    model.check([bucket], 0, 5)
    assert model.refund(bucket, 0, 2, id="a")
    assert not model.refund(bucket, 0, 2, id="a")
    assert model.peek([bucket], 0).remaining == 2
    assert model.refund(bucket, 0, 99)
    assert model.peek([bucket], 0).remaining == 5


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
def test_refund_after_the_window_is_dropped(algorithm: str) -> None:
    model, window = Model(), Subject(plan(algorithm, 5, SECOND))
    model.check([window], 0, 5)
    assert not model.refund(window, SECOND, 5)
    model.check([window], 2 * SECOND, 5)
    assert not model.refund(window, 2 * SECOND, 5, charged_at=0)
    assert model.refund(window, 2 * SECOND, 5, charged_at=2 * SECOND)


def test_lease_ends_once() -> None:
    model, seats = Model(), Subject(plan("concurrency", 1, SECOND))
    assert model.check([seats], 0, id="a").allowed
    assert model.check([seats], 0, id="b").retry_after_us == SECOND
    assert model.check([seats], SECOND, id="b").allowed
    assert not model.leave(seats, SECOND, "a")
    assert not model.renew(seats, SECOND, "a")
    assert not model.check([seats], SECOND, id="c").allowed
    assert model.leave(seats, SECOND, "b")
    assert not model.leave(seats, SECOND, "b")


events = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 7)), max_size=30)


@given(events, st.integers(1, 9), st.integers(1, 40), st.integers(1, 6))
def test_bucket_gcra_and_queue_admit_alike_while_time_does_not_go_back(
    events: list[tuple[int, int]], quota: int, period_us: int, capacity: int
) -> None:
    model, now = Model(), 0
    for step, cost in events:
        now += step
        bucket, gcra, queue = (
            model.check([Subject(plan(algorithm, quota, period_us, capacity))], now, cost)
            for algorithm in ("token_bucket", "gcra", "leaky_bucket")
        )
        assert bucket == gcra == queue._replace(delay_us=0, outcomes=gcra.outcomes)


@given(st.sampled_from(sorted(ALGORITHMS)), events, st.integers(1, 9), st.integers(1, 40))
def test_models_promises_are_exact(algorithm: str, events: list[tuple[int, int]], quota: int, period_us: int) -> None:
    model, now, subject = Model(), 0, Subject(plan(algorithm, quota, period_us))
    for number, (step, cost) in enumerate(events):
        now += step
        decision = model.check([subject], now, cost, id=str(number))
        state = model.state(subject, now)
        if decision.retry_after_us:
            assert not state.fits(now + decision.retry_after_us - 1, cost)
            assert state.fits(now + decision.retry_after_us, cost)
        if decision.reset_after_us:
            assert not state.is_new(now + decision.reset_after_us - 1)
            assert state.is_new(now + decision.reset_after_us)
