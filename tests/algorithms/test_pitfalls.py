"""What rate limiters get wrong, one test per known mistake, with the numbers that show it, on every store.

A docstring names the pitfall's number; those with a P were seen in libraries that people use. A row reads
`(now, cost) -> (allowed, remaining, retry_after)`, in milliseconds after `START_US`.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Decision, InvalidCost, Key, Limit, Limiter
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
START_US = 1_763_251_200_000_000  # a whole hour, so that every window here begins at 0 ms

ALGORITHMS = (
    "concurrency",
    "fixed_window",
    "gcra",
    "leaky_bucket",
    "sliding_log",
    "sliding_window",
    "token_bucket",
)
WINDOWS = ("fixed_window", "sliding_window", "sliding_log")
REFILLED = ("token_bucket", "gcra", "leaky_bucket")

Row = tuple[tuple[float, int], tuple[bool, int, float | None]]
serial = itertools.count()


@dataclass
class Desk:
    """A limiter, the clock that it goes by, and an identity that nobody used before."""

    limiter: Limiter
    clock: FakeClock
    identity: str

    def at(self, now_ms: float) -> Limiter:
        self.clock.set_us(START_US + round(now_ms * 1000))
        return self.limiter

    def key(self, limit: Limit) -> Key:
        return limit.by(self.identity)

    def answer(self, limit: Limit, now_ms: float, cost: int = 1) -> tuple[bool, int, float | None]:
        decision = self.at(now_ms).check(self.key(limit), cost=cost)
        retry_after_us = decision.retry_after_us
        return decision.allowed, decision.remaining, None if retry_after_us is None else retry_after_us / 1000

    def replay(self, limit: Limit, rows: Sequence[Row]) -> None:
        answers = [(event, self.answer(limit, *event)) for event, _ in rows]
        assert answers == list(rows)

    def admitted(self, limit: Limit, instants_ms: Sequence[float]) -> int:
        return sum(self.answer(limit, now_ms)[0] for now_ms in instants_ms)

    def remaining(self, limit: Limit) -> int:
        return self.limiter.peek(self.key(limit)).remaining


@pytest.fixture
def desk(store_url: str) -> Iterator[Desk]:
    clock = FakeClock(START_US)
    with Limiter(store_url, clock=clock) as limiter:
        yield Desk(limiter, clock, f"pitfall-{next(serial)}")


def limit_of(algorithm: str, quota: int, period: timedelta, burst: int | None = None, name: str = "x") -> Limit:
    return Limit(quota, period, burst=burst, algorithm=algorithm, name=name)


# Time


def test_a_clock_that_goes_back_mints_no_tokens(desk: Desk) -> None:
    """Pitfall 1: a bucket that takes the earlier time as its own refills the same second twice."""
    desk.replay(
        Limit(1, SECOND, burst=10),
        [
            ((10_000, 10), (True, 0, 0)),
            ((5_000, 1), (False, 0, 6_000)),
            ((10_000, 5), (False, 0, 5_000)),
        ],
    )


def test_callers_with_skewed_clocks_share_one_bucket(desk: Desk) -> None:
    """Pitfall 2."""
    desk.replay(
        Limit(10, SECOND),
        [
            ((100_000, 10), (True, 0, 0)),
            ((99_500, 1), (False, 0, 600)),
            ((100_100, 1), (True, 0, 0)),
            ((99_700, 1), (False, 0, 500)),
        ],
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_algorithm_gains_when_the_clock_goes_back(desk: Desk, algorithm: str) -> None:
    """Pitfalls 1 and 2: what was used up at an instant stays used up when that instant comes again."""
    limit = limit_of(algorithm, 5, SECOND)
    assert desk.answer(limit, 500, 5) == (True, 0, 0)
    for now_ms in (499, 0, 250, 500):
        assert desk.answer(limit, now_ms, 1)[:2] == (False, 0)


def test_a_debt_is_owed_for_as_long_as_it_takes(desk: Desk) -> None:
    """Pitfall 21: state that expires after a fixed minute forgives what is still owed."""
    desk.replay(
        Limit(1, SECOND, burst=100),
        [((0, 100), (True, 0, 0)), ((61_000, 62), (False, 61, 1_000)), ((61_000, 61), (True, 0, 0))],
    )


def test_windows_turn_at_the_boundary_and_not_a_millisecond_later(desk: Desk) -> None:
    """Pitfall 29."""
    desk.replay(
        limit_of("fixed_window", 2, SECOND),
        [((1_999, 2), (True, 0, 0)), ((1_999, 1), (False, 0, 1)), ((2_000, 1), (True, 1, 0))],
    )
    desk.replay(
        limit_of("sliding_log", 1, SECOND),
        [((0, 1), (True, 0, 0)), ((999, 1), (False, 0, 1)), ((1_000, 1), (True, 0, 0))],
    )


# Exactness


@pytest.mark.parametrize("algorithm", REFILLED)
def test_polling_just_below_the_rate_is_not_starved(desk: Desk, algorithm: str) -> None:
    """Pitfalls 4 and 5: whole tokens with `last = now` pass none of these, floats err at the hundredth."""
    limit = limit_of(algorithm, 10, SECOND)
    assert desk.answer(limit, 0, 10) == (True, 0, 0)
    assert desk.admitted(limit, [99 * poll for poll in range(1, 101)]) == 99


@pytest.mark.parametrize("algorithm", REFILLED)
def test_an_interval_below_a_microsecond_still_limits(desk: Desk, algorithm: str) -> None:
    """Pitfall 5: at 10 tokens per microsecond, a time in float seconds since the epoch never moves."""
    limit = limit_of(algorithm, 10_000_000, SECOND, burst=100)
    desk.replay(
        limit,
        [
            ((0, 99), (True, 1, 0)),
            ((0, 2), (False, 1, 0.001)),
            ((0, 1), (True, 0, 0)),
            ((0.001, 10), (True, 0, 0)),
            ((0.003, 21), (False, 20, 0.001)),
        ],
    )


@pytest.mark.parametrize("algorithm", REFILLED)
def test_an_interval_that_is_no_whole_number_never_drifts(desk: Desk, algorithm: str) -> None:
    """Pitfall 6: beyond 5,298 per period one double cannot hold the time of arrival; 10,007 is a prime."""
    limit = limit_of(algorithm, 10_007, SECOND, burst=2)
    now_ms, passed = 0.0, -2
    while passed < 100:
        allowed, _, retry_after = desk.answer(limit, now_ms)
        passed += allowed
        now_ms = round(now_ms + (retry_after or 0), 3)
    # Coming back exactly when told to costs the rounding up to a microsecond once, not each time.
    assert round(now_ms * 1000) == math.ceil(100 * 1_000_000 / 10_007) == 9_994


def test_ninety_a_minute_delivers_ninety(desk: Desk) -> None:
    """Pitfall P5: a clock of whole seconds and a floor make 60 of it."""
    limit = Limit(90, MINUTE, burst=2)
    assert desk.answer(limit, 0, 2)[0]
    assert desk.admitted(limit, range(250, 60_001, 250)) == 90


def test_a_bucket_is_not_a_window(desk: Desk) -> None:
    """Pitfall 47: a burst of 200 and 1000 a minute admit 1,200 in the first 60 seconds, and say so."""
    limit = Limit(1000, MINUTE, burst=200)
    rows: list[Row] = [((0, 200), (True, 0, 0))]
    rows += [((tenth * 6_000, 100), (True, 0, 0)) for tenth in range(1, 11)]
    desk.replay(limit, [*rows, ((60_000, 1), (False, 0, 60))])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exactly_the_limit_passes(desk: Desk, algorithm: str) -> None:
    """Pitfall 46: comparing before counting admits 101 of 100."""
    assert desk.admitted(limit_of(algorithm, 100, HOUR), [0] * 110) == 100


@pytest.mark.parametrize("algorithm", REFILLED)
def test_a_fast_rate_with_a_small_burst_is_not_forgotten_at_once(desk: Desk, algorithm: str) -> None:
    """Pitfall P4: a lifetime rounded down to 0 s deletes the key, and 1000 of 1000 pass."""
    assert desk.admitted(limit_of(algorithm, 100, SECOND, burst=10), [0] * 100) == 10


def test_two_requests_of_one_instant_are_two(desk: Desk) -> None:
    """Pitfall 41: a log whose members are timestamps counts them once."""
    desk.replay(
        limit_of("sliding_log", 3, SECOND),
        [((0, 1), (True, 2, 0)), ((0, 1), (True, 1, 0)), ((0, 1), (True, 0, 0)), ((0, 1), (False, 0, 1_000))],
    )


# The sliding window's estimate


def test_a_full_window_frees_its_first_place_in_the_next(desk: Desk) -> None:
    """Pitfall 26: not after a whole window, but as soon as the estimate has decayed by one."""
    desk.replay(
        limit_of("sliding_window", 100, MINUTE),
        [((10_000, 100), (True, 0, 0)), ((10_000, 1), (False, 0, 50_600)), ((60_600, 1), (True, 0, 0))],
    )


def test_a_large_cost_waits_until_enough_has_decayed(desk: Desk) -> None:
    """Pitfall 26: half of the limit needs half of the next window."""
    desk.replay(
        limit_of("sliding_window", 100, MINUTE),
        [((0, 100), (True, 0, 0)), ((0, 50), (False, 0, 90_000)), ((90_000, 50), (True, 0, 0))],
    )


def test_a_wait_across_the_boundary_counts_both_windows(desk: Desk) -> None:
    """Pitfall 26: with 100 before and 60 now, a wait of 15,600 looks right and ends in a denial."""
    desk.replay(
        limit_of("sliding_window", 100, MINUTE),
        [
            ((0, 100), (True, 0, 0)),
            ((110_000, 60), (True, 23, 0)),
            ((110_000, 50), (False, 23, 20_000)),
            ((125_600, 0), (True, 45, 0)),
            ((125_600, 50), (False, 45, 4_400)),
            ((130_000, 50), (True, 0, 0)),
        ],
    )


def test_the_estimate_is_compared_as_a_fraction(desk: Desk) -> None:
    """Pitfall 27: rounding 9.98 down to 9 admits a request 5.9 seconds early."""
    desk.replay(
        limit_of("sliding_window", 10, MINUTE),
        [((0, 10), (True, 0, 0)), ((60_100, 1), (False, 0, 5_900)), ((66_000, 1), (True, 0, 0))],
    )


def test_the_sliding_window_weighs_the_cost_before_it_admits(desk: Desk) -> None:
    """Pitfall 28: comparing before the cost is added lets 16 through a limit of 10."""
    desk.replay(
        limit_of("sliding_window", 10, MINUTE),
        [((0, 8), (True, 2, 0)), ((0, 8), (False, 2, 105_000)), ((0, 2), (True, 0, 0))],
    )


# Costs


@pytest.mark.parametrize("cost", [6, 2**53 + 1, 2**60, 10**30])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cost_above_the_capacity_is_unsatisfiable(desk: Desk, algorithm: str, cost: int) -> None:
    """Pitfalls 7 and 10: it will never pass, so there is no time to retry at, and nothing is taken."""
    limit = limit_of(algorithm, 5, SECOND)
    refused = desk.at(0).check(desk.key(limit), cost=cost)
    assert (refused.allowed, refused.unsatisfiable, refused.retry_after, refused.remaining) == (
        False,
        True,
        None,
        5,
    )
    assert desk.answer(limit, 0, 5) == (True, 0, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cost_nothing_passes_a_used_up_limit_and_changes_nothing(desk: Desk, algorithm: str) -> None:
    """Pitfall 8."""
    limit = limit_of(algorithm, 5, SECOND)
    charged = desk.at(0).check(desk.key(limit), cost=5)
    for _ in range(3):
        free = desk.limiter.check(desk.key(limit), cost=0)
        assert (free.allowed, free.remaining, free.retry_after_us) == (True, 0, 0)
        assert free.reset_after_us == charged.reset_after_us


@pytest.mark.parametrize(
    "cost", [-5, -1, 1.0, math.nan, math.inf, -math.inf, True, None, "1", "nan", "0x10", " 1 ", "-inf", b"1"]
)
def test_a_cost_that_is_no_whole_number_is_refused_before_anything_is_touched(desk: Desk, cost: Any) -> None:
    """Pitfalls 9 and P13: a negative cost restores quota, and Lua reads numbers out of strange texts."""
    limit = Limit(10, HOUR)
    desk.answer(limit, 0, 4)
    with pytest.raises(InvalidCost):
        desk.limiter.check(desk.key(limit), cost=cost)
    with pytest.raises(InvalidCost):
        desk.limiter.refund(desk.key(limit), cost)
    assert desk.remaining(limit) == 6


# What a denial leaves behind


def test_a_denial_takes_nothing(desk: Desk) -> None:
    """Pitfall 11: counters that go down with each denial lock out whoever retries."""
    desk.replay(
        limit_of("fixed_window", 5, SECOND),
        [
            ((0, 3), (True, 2, 0)),
            ((0, 4), (False, 2, 1_000)),
            ((0, 4), (False, 2, 1_000)),
            ((0, 2), (True, 0, 0)),
        ],
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_denied_cost_is_not_charged(desk: Desk, algorithm: str) -> None:
    """Pitfall P3: of costs 8, 5 and 1 on a limit of 10, the last must pass."""
    limit = limit_of(algorithm, 10, HOUR)
    answers = [desk.answer(limit, 0, cost)[:2] for cost in (8, 5, 1)]
    assert answers == [(True, 2), (False, 2), (True, 1)]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "concurrency"])
def test_a_smaller_cost_passes_where_a_larger_one_was_denied(desk: Desk, algorithm: str) -> None:
    """Pitfall 33: a remembered denial answers for its cost and above, until something is given back."""
    limit = limit_of(algorithm, 100, HOUR)
    desk.replay(limit, [((0, 96), (True, 4, 0))])
    assert not desk.answer(limit, 10, 5)[0]
    assert desk.answer(limit, 20, 1) == (True, 3, 0)
    assert not desk.answer(limit, 20, 5)[0]
    assert desk.limiter.refund(desk.key(limit), 2)
    assert desk.answer(limit, 20, 5) == (True, 0, 0)
    assert not desk.answer(limit, 20, 5)[0]
    desk.limiter.reset(desk.key(limit))
    assert desk.answer(limit, 20, 5) == (True, 95, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_peek_reads_all_that_the_check_said_and_writes_nothing(desk: Desk, algorithm: str) -> None:
    """Pitfall P16: statistics by a second call race with the first, and a peek that counts is no peek."""
    limit = limit_of(algorithm, 5, HOUR)
    for used in range(5):
        assert [desk.at(used).peek(desk.key(limit)).remaining for _ in range(3)] == [5 - used] * 3
        charged, seen = desk.limiter.check(desk.key(limit)), desk.limiter.peek(desk.key(limit))
        assert (seen.allowed, seen.remaining, seen.reset_after_us) == (True, 4 - used, charged.reset_after_us)


# Several limits


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layered_limits_take_all_or_nothing(desk: Desk, algorithm: str) -> None:
    """Pitfall 12: the limits that would have allowed keep what they have."""
    layers = [limit_of(algorithm, quota, HOUR, name=name) for name, quota in (("ip", 10), ("user", 5), ("key", 3))]
    keys = [desk.key(limit) for limit in layers]
    assert desk.limiter.check(*keys, cost=3).allowed
    denied = desk.limiter.check(*keys, cost=1)
    assert (denied.allowed, denied.denied_by, denied.remaining) == (False, ("key",), 0)
    assert [(outcome.allowed, outcome.remaining) for outcome in denied.outcomes] == [
        (True, 7),
        (True, 2),
        (False, 0),
    ]
    assert [desk.remaining(limit) for limit in layers] == [7, 2, 0]


def test_the_order_of_the_limits_does_not_matter(desk: Desk) -> None:
    """Pitfall 12: every limit that denies is named, and the longest wait is reported."""
    short = limit_of("fixed_window", 2, SECOND, name="short")
    long = limit_of("sliding_log", 3, MINUTE, name="long")
    wide = limit_of("token_bucket", 9, MINUTE, name="wide")
    desk.at(0).check(desk.key(short), desk.key(long), cost=2)

    def verdict(limits: tuple[Limit, ...]) -> tuple[set[str], int, int | None, int]:
        denied = desk.limiter.check(*map(desk.key, limits), cost=2)
        return set(denied.denied_by), denied.remaining, denied.retry_after_us, denied.reset_after_us

    verdicts = [verdict(order) for order in itertools.permutations((short, long, wide))]
    assert verdicts == [({"short", "long"}, 0, 60_000_000, 60_000_000)] * 6


def test_rejected_requests_do_not_use_up_the_longer_limit(desk: Desk) -> None:
    """Pitfall P2: of six requests the short limit rejects four; the long one counts two."""
    short, long = (
        limit_of("fixed_window", 2, SECOND, name="short"),
        limit_of("fixed_window", 100, HOUR, name="long"),
    )
    passed = [desk.at(0).check(desk.key(short), desk.key(long)).allowed for _ in range(6)]
    assert passed == [True, True, False, False, False, False]
    assert desk.remaining(long) == 98


def test_a_hundred_at_once_pass_a_narrow_limit_once(desk: Desk) -> None:
    """Pitfall 13: limits judged one after the other let the losers charge the wide limit."""
    wide, narrow = Limit(1000, HOUR, name="wide"), Limit(1, HOUR, name="narrow")

    def attempt(_: int) -> Decision:
        return desk.limiter.check(desk.key(wide), desk.key(narrow))

    with ThreadPoolExecutor(16) as pool:
        decisions = list(pool.map(attempt, range(100)))
    assert sum(decision.allowed for decision in decisions) == 1
    assert (desk.remaining(wide), desk.remaining(narrow)) == (999, 0)


# Changes


@pytest.mark.parametrize(("capacity", "left"), [(20, 0), (100, 40), (200, 140)])
def test_a_bucket_keeps_what_is_used_when_the_plan_changes(desk: Desk, capacity: int, left: int) -> None:
    """Pitfall 30: neither a free refill, nor a debt that is larger than the new burst."""
    desk.answer(Limit(1, HOUR, burst=100), 0, 60)
    changed = Limit(2, HOUR, burst=capacity)
    assert desk.answer(changed, 0, capacity + 1) == (False, left, None)
    assert desk.answer(changed, 0, left) == (True, 0, 0)


def test_a_bucket_refills_at_the_old_rate_until_the_change(desk: Desk) -> None:
    """Pitfall 30: the new rate starts with the first request that brings it."""
    slow, fast = Limit(1, SECOND, burst=10), Limit(5, SECOND, burst=10)
    desk.replay(slow, [((0, 10), (True, 0, 0))])
    desk.replay(fast, [((1_000, 1), (True, 0, 0)), ((2_000, 5), (True, 0, 0))])


@pytest.mark.parametrize("algorithm", ["gcra", "leaky_bucket"])
def test_a_smaller_plan_locks_nobody_out_for_longer_than_its_own_burst(desk: Desk, algorithm: str) -> None:
    """Pitfall 30: 3,000 of 3,600 an hour used, then 60 a minute: locked for 2,941,000 unless clamped."""
    desk.answer(limit_of(algorithm, 3_600, HOUR), 0, 3_000)
    desk.replay(limit_of(algorithm, 60, MINUTE), [((0, 1), (False, 0, 1_000)), ((1_000, 1), (True, 0, 0))])


@pytest.mark.parametrize("algorithm", [*WINDOWS, "concurrency"])
def test_counts_survive_a_change_of_the_quota(desk: Desk, algorithm: str) -> None:
    """Pitfall 30: upwards only the difference is new; downwards nothing passes until enough is over."""
    before, more, fewer = (limit_of(algorithm, quota, HOUR) for quota in (10, 15, 4))
    assert desk.answer(before, 0, 8) == (True, 2, 0)
    assert desk.answer(more, 0, 1) == (True, 6, 0)
    assert desk.answer(fewer, 0, 1)[:2] == (False, 0)
    assert desk.answer(before, 0, 1) == (True, 0, 0)


def test_another_algorithm_is_another_key(desk: Desk) -> None:
    """Pitfall 31: a state of one kind read as another is an error from the store at best."""
    for algorithm in (*ALGORITHMS, *ALGORITHMS):
        desk.answer(limit_of(algorithm, 5, HOUR), 0, 2)
    assert [desk.remaining(limit_of(algorithm, 5, HOUR)) for algorithm in ALGORITHMS] == [1] * len(ALGORITHMS)


# Refunds


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_a_refund_fills_no_further_than_the_capacity(desk: Desk, algorithm: str) -> None:
    """Pitfall 32: 99 given back to a drained limit of 5 are 5."""
    limit = limit_of(algorithm, 5, HOUR)
    desk.answer(limit, 0, 5)
    assert desk.limiter.refund(desk.key(limit), 99)
    assert desk.answer(limit, 0, 6) == (False, 5, None)
    assert desk.answer(limit, 0, 5) == (True, 0, 0)


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_a_refund_counts_once_per_id(desk: Desk, algorithm: str) -> None:
    """Pitfall 32: whoever retries a refund after a timeout must not be paid twice."""
    limit = limit_of(algorithm, 5, HOUR)
    desk.answer(limit, 0, 5)
    given_back = [desk.limiter.refund(desk.key(limit), 1, id=id) for id in ("a", "a", "b", "a")]
    assert given_back == [True, False, True, False]
    assert desk.remaining(limit) == 2


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
def test_a_refund_belongs_to_the_window_that_was_charged(desk: Desk, algorithm: str) -> None:
    """Pitfall 32: once that window is over the refund is dropped, or it would pay into another."""
    limit = limit_of(algorithm, 4, SECOND)
    key = desk.key(limit)
    first = desk.at(0).check(key, cost=2)
    assert not desk.at(1_000).refund(key, 2)
    assert not desk.limiter.refund(key, 2, of=first)
    second = desk.at(2_500).check(key, cost=2)
    assert not desk.limiter.refund(key, 2, of=first)
    assert desk.remaining(limit) == 2
    assert desk.limiter.refund(key, 2, of=second)
    assert desk.remaining(limit) == 4


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_a_refund_to_a_key_that_is_as_new_gives_nothing_back(desk: Desk, algorithm: str) -> None:
    """Pitfall 32: and it says so, whether the key is new, was paid back already, or has recovered by itself."""
    limit = limit_of(algorithm, 4, SECOND)
    key = desk.key(limit)
    assert not desk.at(0).refund(key, 1)
    desk.limiter.check(key, cost=4)
    assert [desk.limiter.refund(key, 2) for _ in range(3)] == [True, True, False]
    recovered_us = desk.limiter.check(key, cost=3).reset_after_us
    assert not desk.at(recovered_us / 1000).refund(key, 1)


@pytest.mark.parametrize("algorithm", WINDOWS)
def test_a_refund_gives_back_what_a_larger_plan_was_charged(desk: Desk, algorithm: str) -> None:
    """Pitfalls 30 and 32: 100 charged before the plan shrank to 20 are 100 to give back."""
    desk.answer(limit_of(algorithm, 100, HOUR), 0, 100)
    smaller = limit_of(algorithm, 20, HOUR)
    assert desk.limiter.refund(desk.key(smaller), 100)
    assert desk.remaining(smaller) == 20


def test_a_refund_takes_back_the_newest_entries_of_a_log(desk: Desk) -> None:
    """Pitfall 32: what is oldest has nearly been paid for."""
    limit = limit_of("sliding_log", 6, SECOND)
    for now_ms in (0, 400, 800):
        desk.answer(limit, now_ms, 2)
    assert desk.limiter.refund(desk.key(limit), 3)
    desk.replay(limit, [((800, 4), (False, 3, 200)), ((1_000, 4), (True, 1, 0))])


# Leases


def test_a_late_release_frees_nobody_elses_place(desk: Desk) -> None:
    """Pitfall 44: an expired lease is over, whoever still believes to hold it."""
    limit = limit_of("concurrency", 1, SECOND)
    place = desk.key(limit)
    assert desk.at(0).enter(place, id="a").allowed
    assert desk.at(999).enter(place, id="b").retry_after_us == 1_000
    assert desk.at(1_000).enter(place, id="b").allowed
    assert not desk.limiter.leave(place, id="a")
    assert not desk.limiter.renew(place, id="a")
    assert not desk.limiter.enter(place, id="c").allowed


def test_whoever_lost_a_place_can_take_one_again(desk: Desk) -> None:
    """Pitfall 44: the same id after its lease expired is a new lease, at its new cost."""
    place = desk.key(limit_of("concurrency", 3, SECOND))
    desk.at(0).enter(place, id="a", cost=2)
    assert desk.at(1_000).enter(place, id="a", cost=3).remaining == 0
    assert desk.at(1_999).peek(place).remaining == 0


def test_a_place_is_released_once(desk: Desk) -> None:
    """Pitfall 44: a second release of the same lease is no second place."""
    place = desk.key(limit_of("concurrency", 2, SECOND))
    desk.at(0).enter(place, id="a")
    desk.limiter.enter(place, id="b")
    assert [desk.limiter.leave(place, id="a") for _ in range(2)] == [True, False]
    assert desk.limiter.peek(place).remaining == 1


def test_a_renewed_place_is_held_from_then_on(desk: Desk) -> None:
    """Pitfall 44: renewal counts from its own instant, and entering again renews and counts nobody twice."""
    place = desk.key(limit_of("concurrency", 1, SECOND))
    desk.at(0).enter(place, id="a")
    assert desk.at(900).renew(place, id="a")
    again = desk.at(1_800).enter(place, id="a")
    assert (again.allowed, again.remaining, again.reset_after_us) == (True, 0, 1_000_000)
    assert not desk.at(2_799).enter(place, id="b").allowed
    assert not desk.at(2_800).renew(place, id="a")
    assert desk.limiter.enter(place, id="b").allowed


# Keys


def test_no_two_identities_share_a_counter(desk: Desk) -> None:
    """Pitfall P7: parts joined by a separator collide where a part contains it."""
    limit = Limit(1, HOUR, name="identities")
    identities = [
        ("a/b", "c"),
        ("a", "b/c"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("a", "b", "c"),
        ("a%3Ab", "c"),
        ("a\\:b", "c"),
        ("abc",),
        ("{abc}",),
        ("a", "bc"),
        ("A", "bc"),
        ("é",),
        ("e\u0301",),
        ("a\nb",),
        ("a\0b",),
        ("x" * 1_000,),
        ("x" * 1_001,),
    ]
    refused = [parts for parts in identities if not desk.limiter.check(limit.by(desk.identity, *parts))]
    assert refused == []


def test_no_two_limits_share_a_counter(desk: Desk) -> None:
    """Pitfall P7: nor do a name and an identity run into each other."""
    keys = [
        Limit(1, HOUR, name="a").by(desk.identity, "b"),
        Limit(1, HOUR, name="b").by(desk.identity, "a"),
        Limit(1, HOUR, name=f"a-{desk.identity}").by("b"),
        Limit(1, HOUR, name="a").by(f"{desk.identity}-b"),
    ]
    assert [desk.limiter.check(key).allowed for key in keys] == [True] * len(keys)
