"""Clocks that go back or differ, expiry of state, and window boundaries, on every store."""

from __future__ import annotations

import pytest

from headgate import Limit
from support.limiter_probe import ALGORITHMS, SECOND, LimiterProbe, limit_of


def test_clock_going_back_mints_no_tokens(probe: LimiterProbe) -> None:
    """Pitfall 1: a bucket that takes the earlier time as its own refills the same second twice."""
    probe.replay(
        Limit(1, SECOND, burst=10),
        [
            ((10_000, 10), (True, 0, 0)),
            ((5_000, 1), (False, 0, 6_000)),
            ((10_000, 5), (False, 0, 5_000)),
        ],
    )


def test_skewed_clocks_share_one_bucket(probe: LimiterProbe) -> None:
    """Pitfall 2."""
    probe.replay(
        Limit(10, SECOND),
        [
            ((100_000, 10), (True, 0, 0)),
            ((99_500, 1), (False, 0, 600)),
            ((100_100, 1), (True, 0, 0)),
            ((99_700, 1), (False, 0, 500)),
        ],
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_algorithm_gains_when_the_clock_goes_back(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfalls 1 and 2: what was used up at an instant stays used up when that instant comes again."""
    limit = limit_of(algorithm, 5, SECOND)
    assert probe.answer(limit, 500, 5) == (True, 0, 0)
    for now_ms in (499, 0, 250, 500):
        assert probe.answer(limit, now_ms, 1)[:2] == (False, 0)


def test_state_outlives_the_longest_refill(probe: LimiterProbe) -> None:
    """Pitfall 21: state that expires after a fixed minute forgives what is still owed."""
    probe.replay(
        Limit(1, SECOND, burst=100),
        [((0, 100), (True, 0, 0)), ((61_000, 62), (False, 61, 1_000)), ((61_000, 61), (True, 0, 0))],
    )


def test_windows_end_exactly_at_the_boundary(probe: LimiterProbe) -> None:
    """Pitfall 29."""
    probe.replay(
        limit_of("fixed_window", 2, SECOND),
        [((1_999, 2), (True, 0, 0)), ((1_999, 1), (False, 0, 1)), ((2_000, 1), (True, 1, 0))],
    )
    probe.replay(
        limit_of("sliding_log", 1, SECOND),
        [((0, 1), (True, 0, 0)), ((999, 1), (False, 0, 1)), ((1_000, 1), (True, 0, 0))],
    )
