"""A changed limit keeps what was used, on every store."""

from __future__ import annotations

import pytest

from headgate import Limit
from support.limiter_probe import ALGORITHMS, HOUR, MINUTE, SECOND, WINDOWS, LimiterProbe, limit_of


@pytest.mark.parametrize(("capacity", "left"), [(20, 0), (100, 40), (200, 140)])
def test_bucket_keeps_the_used_amount_when_the_limit_changes(probe: LimiterProbe, capacity: int, left: int) -> None:
    """Pitfall 30: neither a free refill, nor a debt that is larger than the new burst."""
    probe.answer(Limit(1, HOUR, burst=100), 0, 60)
    changed = Limit(2, HOUR, burst=capacity)
    assert probe.answer(changed, 0, capacity + 1) == (False, left, None)
    assert probe.answer(changed, 0, left) == (True, 0, 0)


def test_bucket_refills_at_the_old_rate_until_the_change(probe: LimiterProbe) -> None:
    """Pitfall 30: the new rate starts with the first request that brings it."""
    slow, fast = Limit(1, SECOND, burst=10), Limit(5, SECOND, burst=10)
    probe.replay(slow, [((0, 10), (True, 0, 0))])
    probe.replay(fast, [((1_000, 1), (True, 0, 0)), ((2_000, 5), (True, 0, 0))])


@pytest.mark.parametrize("algorithm", ["gcra", "leaky_bucket"])
def test_smaller_limit_denies_no_longer_than_its_own_burst(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 30: 3,000 of 3,600 an hour used, then 60 a minute: locked for 2,941,000 unless clamped."""
    probe.answer(limit_of(algorithm, 3_600, HOUR), 0, 3_000)
    probe.replay(limit_of(algorithm, 60, MINUTE), [((0, 1), (False, 0, 1_000)), ((1_000, 1), (True, 0, 0))])


@pytest.mark.parametrize("algorithm", [*WINDOWS, "concurrency"])
def test_counts_survive_a_quota_change(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 30: upwards only the difference is new; downwards nothing passes until enough is over."""
    before, more, fewer = (limit_of(algorithm, quota, HOUR) for quota in (10, 15, 4))
    assert probe.answer(before, 0, 8) == (True, 2, 0)
    assert probe.answer(more, 0, 1) == (True, 6, 0)
    assert probe.answer(fewer, 0, 1)[:2] == (False, 0)
    assert probe.answer(before, 0, 1) == (True, 0, 0)


def test_algorithms_have_separate_counters(probe: LimiterProbe) -> None:
    """Pitfall 31: a state of one kind read as another is an error from the store at best."""
    for algorithm in (*ALGORITHMS, *ALGORITHMS):
        probe.answer(limit_of(algorithm, 5, HOUR), 0, 2)
    assert [probe.remaining(limit_of(algorithm, 5, HOUR)) for algorithm in ALGORITHMS] == [1] * len(ALGORITHMS)
