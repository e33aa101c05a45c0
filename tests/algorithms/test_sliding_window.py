"""The sliding window's estimate and retry times, on every store."""

from __future__ import annotations

from support.limiter_probe import MINUTE, LimiterProbe, limit_of


def test_retry_after_of_a_full_window_is_in_the_next(probe: LimiterProbe) -> None:
    """Pitfall 26: not after a whole window, but as soon as the estimate has decayed by one."""
    probe.replay(
        limit_of("sliding_window", 100, MINUTE),
        [((10_000, 100), (True, 0, 0)), ((10_000, 1), (False, 0, 50_600)), ((60_600, 1), (True, 0, 0))],
    )


def test_large_cost_waits_until_enough_has_decayed(probe: LimiterProbe) -> None:
    """Pitfall 26: half of the limit needs half of the next window."""
    probe.replay(
        limit_of("sliding_window", 100, MINUTE),
        [((0, 100), (True, 0, 0)), ((0, 50), (False, 0, 90_000)), ((90_000, 50), (True, 0, 0))],
    )


def test_wait_across_the_boundary_counts_both_windows(probe: LimiterProbe) -> None:
    """Pitfall 26: with 100 before and 60 now, a wait of 15,600 looks right and ends in a denial."""
    probe.replay(
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


def test_estimate_is_compared_as_a_fraction(probe: LimiterProbe) -> None:
    """Pitfall 27: rounding 9.98 down to 9 admits a request 5.9 seconds early."""
    probe.replay(
        limit_of("sliding_window", 10, MINUTE),
        [((0, 10), (True, 0, 0)), ((60_100, 1), (False, 0, 5_900)), ((66_000, 1), (True, 0, 0))],
    )


def test_cost_is_added_before_the_comparison(probe: LimiterProbe) -> None:
    """Pitfall 28: comparing before the cost is added lets 16 through a limit of 10."""
    probe.replay(
        limit_of("sliding_window", 10, MINUTE),
        [((0, 8), (True, 2, 0)), ((0, 8), (False, 2, 105_000)), ((0, 2), (True, 0, 0))],
    )
