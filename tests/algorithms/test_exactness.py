"""Exactly the promised number of requests passes, on every store."""

from __future__ import annotations

import math

import pytest

from headgate import Limit
from support.limiter_probe import ALGORITHMS, HOUR, MINUTE, REFILLED, SECOND, LimiterProbe, Row, limit_of


@pytest.mark.parametrize("algorithm", REFILLED)
def test_polling_just_below_the_rate_is_not_starved(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfalls 4 and 5: whole tokens with `last = now` pass none of these, floats err at the hundredth."""
    limit = limit_of(algorithm, 10, SECOND)
    assert probe.answer(limit, 0, 10) == (True, 0, 0)
    assert probe.admitted(limit, [99 * poll for poll in range(1, 101)]) == 99


@pytest.mark.parametrize("algorithm", REFILLED)
def test_rates_above_one_per_microsecond_still_limit(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 5: at 10 tokens per microsecond, a time in float seconds since the epoch never moves."""
    limit = limit_of(algorithm, 10_000_000, SECOND, burst=100)
    probe.replay(
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
def test_fractional_intervals_never_drift(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 6: beyond 5,298 per period one double cannot hold the time of arrival; 10,007 is a prime."""
    limit = limit_of(algorithm, 10_007, SECOND, burst=2)
    now_ms, passed = 0.0, -2
    while passed < 100:
        allowed, _, retry_after = probe.answer(limit, now_ms)
        passed += allowed
        now_ms = round(now_ms + (retry_after or 0), 3)
    # Coming back exactly when told to costs the rounding up to a microsecond once, not each time.
    assert round(now_ms * 1000) == math.ceil(100 * 1_000_000 / 10_007) == 9_994


def test_ninety_per_minute_delivers_ninety(probe: LimiterProbe) -> None:
    """Pitfall P5: a clock of whole seconds and a floor make 60 of it."""
    limit = Limit(90, MINUTE, burst=2)
    assert probe.answer(limit, 0, 2)[0]
    assert probe.admitted(limit, range(250, 60_001, 250)) == 90


def test_token_bucket_admits_burst_plus_refill(probe: LimiterProbe) -> None:
    """Pitfall 47: a burst of 200 and 1000 a minute admit 1,200 in the first 60 seconds, and say so."""
    limit = Limit(1000, MINUTE, burst=200)
    rows: list[Row] = [((0, 200), (True, 0, 0))]
    rows += [((tenth * 6_000, 100), (True, 0, 0)) for tenth in range(1, 11)]
    probe.replay(limit, [*rows, ((60_000, 1), (False, 0, 60))])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exactly_the_limit_passes(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 46: comparing before counting admits 101 of 100."""
    assert probe.admitted(limit_of(algorithm, 100, HOUR), [0] * 110) == 100


@pytest.mark.parametrize("algorithm", REFILLED)
def test_fast_rate_with_small_burst_keeps_its_state(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall P4: a lifetime rounded down to 0 s deletes the key, and 1000 of 1000 pass."""
    assert probe.admitted(limit_of(algorithm, 100, SECOND, burst=10), [0] * 100) == 10


def test_requests_of_the_same_instant_count_separately(probe: LimiterProbe) -> None:
    """Pitfall 41: a log whose members are timestamps counts them once."""
    probe.replay(
        limit_of("sliding_log", 3, SECOND),
        [((0, 1), (True, 2, 0)), ((0, 1), (True, 1, 0)), ((0, 1), (True, 0, 0)), ((0, 1), (False, 0, 1_000))],
    )
