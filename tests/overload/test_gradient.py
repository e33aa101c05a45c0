"""The gradient algorithm: bounds, windows, drops, measurements of the base latency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidConfiguration
from headgate.overload.gradient import (
    MAX_STEP_WINDOWS,
    MIN_SAMPLES,
    PROBE_INTERVAL_US,
    WINDOW_US,
    ConcurrencySettings,
    GradientLimit,
)

MS = 1000


def feed(limit: GradientLimit, now_us: int, latency_us: int, in_flight: int, windows: int = 1) -> int:
    """Complete windows of equal latencies; returns the time after them."""
    for _ in range(windows):
        width_us = max(WINDOW_US, 2 * latency_us)
        for _ in range(MIN_SAMPLES + 2):
            now_us += width_us // MIN_SAMPLES + 1
            limit.add(now_us, latency_us, in_flight)
    return now_us


@given(
    st.lists(
        st.tuples(st.integers(0, 300 * MS), st.integers(-5, 2_000 * MS), st.integers(0, 300), st.booleans()),
        max_size=300,
    ),
    st.integers(1, 20),
    st.integers(0, 200),
)
def test_limit_stays_within_its_bounds(calls: list[tuple[int, int, int, bool]], minimum: int, more: int) -> None:
    limit = GradientLimit(ConcurrencySettings(minimum, minimum + more), 0)
    now_us = 0
    for pause_us, latency_us, in_flight, is_drop in calls:
        now_us += pause_us
        if is_drop:
            limit.add_drop(now_us, in_flight)
        else:
            limit.add(now_us, latency_us, in_flight)
        assert minimum <= limit.full_limit <= minimum + more
        assert 1 <= limit.limit <= limit.full_limit


def test_limit_grows_while_it_is_used_and_latency_stays() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=5, windows=3)
    assert limit.limit == 20
    feed(limit, now_us, 10 * MS, in_flight=20, windows=10)
    assert limit.limit > 40


def test_limit_that_is_not_used_stays() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    feed(limit, 0, 10 * MS, in_flight=9, windows=50)
    assert limit.limit == 20


def test_limit_falls_when_latency_rises() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=5, windows=3)
    feed(limit, now_us, 40 * MS, in_flight=20, windows=2)
    assert limit.limit < 15


def test_timeouts_lower_the_limit_once_in_each_window() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    for now_us in range(0, WINDOW_US + 1, MS):
        limit.add_drop(now_us, 20)
    assert limit.limit == 16


def test_fixed_limit_ignores_latency_and_timeouts() -> None:
    limit = GradientLimit(ConcurrencySettings(8, 8), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=2)
    now_us = feed(limit, now_us, 900 * MS, in_flight=8, windows=5)
    limit.add_drop(now_us + 10 * WINDOW_US, 8)
    assert limit.limit == 8


def test_unused_service_that_becomes_slower_has_a_higher_base_latency() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=5, windows=3)
    feed(limit, now_us, 40 * MS, in_flight=5, windows=20)
    assert limit.base_us == pytest.approx(40 * MS, rel=0.01)


def saturated(latency_us: int) -> tuple[GradientLimit, int]:
    """A limit whose base latency of 10 ms was measured long ago, and whose measurement has just begun."""
    limit = GradientLimit(ConcurrencySettings(tolerance=10), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=5, windows=3)
    while limit.limit == limit.full_limit:
        assert now_us < 3 * PROBE_INTERVAL_US
        now_us = feed(limit, now_us, latency_us, in_flight=limit.limit)
    return limit, now_us


def test_measurement_begins_at_a_multiple_of_its_interval() -> None:
    """So that all processes that use the same database empty its queue at the same time."""
    _, now_us = saturated(50 * MS)
    assert now_us // PROBE_INTERVAL_US == 2
    assert now_us % PROBE_INTERVAL_US < 4 * WINDOW_US


def test_measurement_lowers_the_limit_until_latency_falls_no_further() -> None:
    limit, now_us = saturated(50 * MS)
    full = limit.full_limit
    steps = [limit.limit]
    for latency_us in (30 * MS, 15 * MS, 15 * MS):
        step = limit.limit
        for _ in range(100):
            now_us = feed(limit, now_us, latency_us, in_flight=step)
            if limit.limit != step:
                break
        steps.append(limit.limit)
    assert steps == [full // 2, full // 4, full // 8, full]
    assert limit.base_us == 15 * MS


def test_base_is_measured_at_once_when_the_limit_is_at_its_minimum() -> None:
    limit = GradientLimit(ConcurrencySettings(minimum=10, initial=20), 0)
    now_us = feed(limit, 0, 10 * MS, in_flight=9, windows=3)
    while limit.limit >= 10:
        now_us = feed(limit, now_us, 100 * MS, in_flight=14)  # critical calls exceed the limit
        assert now_us < PROBE_INTERVAL_US
    while limit.limit < 10:
        now_us = feed(limit, now_us, 90 * MS, in_flight=5)
    assert limit.base_us == 90 * MS
    assert limit.limit > 10
    assert now_us < PROBE_INTERVAL_US


def test_service_that_is_too_small_for_the_minimum_is_not_measured_again_and_again() -> None:
    limit = GradientLimit(ConcurrencySettings(minimum=10, initial=20), 0)
    now_us, began_us = feed(limit, 0, 10 * MS, in_flight=9, windows=3), []
    while now_us < 8 * PROBE_INTERVAL_US // 10:
        was_measuring = limit.limit < 10
        now_us = feed(limit, now_us, 10 * MS * limit.limit, in_flight=limit.limit)  # it serves one call at a time
        if limit.limit < 10 and not was_measuring:
            began_us.append(now_us)
    assert len(began_us) == 1
    assert limit.limit == 10
    assert limit.base_us < 30 * MS


def test_measurement_without_answers_ends() -> None:
    """All calls time out, so that there is no latency to measure."""
    limit, now_us = saturated(50 * MS)
    base_us = limit.base_us
    for _ in range(2):
        now_us += 2 * MAX_STEP_WINDOWS * WINDOW_US
        limit.add_drop(now_us, 10)
    assert limit.limit == limit.full_limit
    assert limit.base_us == base_us


def test_clock_that_is_set_back_changes_nothing() -> None:
    limit = GradientLimit(ConcurrencySettings(), 1_000_000_000)
    limit.add(999_000_000, -5 * MS, 20)
    limit.add(999_000_000, 5 * MS, 20)
    now_us = feed(limit, 999_000_000, 10 * MS, in_flight=20, windows=10)
    assert limit.limit > 40
    assert now_us < 1_000_000_000 + 100 * WINDOW_US


def test_new_bounds_keep_what_was_measured() -> None:
    limit = GradientLimit(ConcurrencySettings(), 0)
    feed(limit, 0, 10 * MS, in_flight=20, windows=10)
    limit.configure(ConcurrencySettings(maximum=30))
    assert (limit.limit, limit.base_us) == (30, 10 * MS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minimum": 0}, "minimum 0 is not a number of requests"),
        ({"maximum": 2.5}, "maximum 2.5 is not a number"),
        ({"initial": True}, "initial True is not a number"),
        ({"minimum": 10, "maximum": 5}, "the minimum 10 is above the maximum 5"),
        ({"tolerance": 0.5}, "tolerance 0.5 is not a number from 1 to 10"),
    ],
)
def test_invalid_bounds_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        ConcurrencySettings(**settings)
