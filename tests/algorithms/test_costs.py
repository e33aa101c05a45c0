"""Costs of checks, denials and peeks, on every store."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headgate import InvalidCost, Limit
from support.limiter_probe import ALGORITHMS, HOUR, SECOND, LimiterProbe, limit_of


@pytest.mark.parametrize("cost", [6, 2**53 + 1, 2**60, 10**30])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cost_above_capacity_is_unsatisfiable(probe: LimiterProbe, algorithm: str, cost: int) -> None:
    """Pitfalls 7 and 10: it will never pass, so there is no time to retry at, and nothing is taken."""
    limit = limit_of(algorithm, 5, SECOND)
    refused = probe.at(0).check(probe.key(limit), cost=cost)
    assert (refused.allowed, refused.unsatisfiable, refused.retry_after, refused.remaining) == (
        False,
        True,
        None,
        5,
    )
    assert probe.answer(limit, 0, 5) == (True, 0, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_cost_passes_an_exhausted_limit(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 8."""
    limit = limit_of(algorithm, 5, SECOND)
    charged = probe.at(0).check(probe.key(limit), cost=5)
    for _ in range(3):
        free = probe.limiter.check(probe.key(limit), cost=0)
        assert (free.allowed, free.remaining, free.retry_after_us) == (True, 0, 0)
        assert free.reset_after_us == charged.reset_after_us


@pytest.mark.parametrize(
    "cost", [-5, -1, 1.0, math.nan, math.inf, -math.inf, True, None, "1", "nan", "0x10", " 1 ", "-inf", b"1"]
)
def test_invalid_cost_is_rejected_and_charges_nothing(probe: LimiterProbe, cost: Any) -> None:
    """Pitfalls 9 and P13: a negative cost restores quota, and Lua reads numbers out of strange texts."""
    limit = Limit(10, HOUR)
    probe.answer(limit, 0, 4)
    with pytest.raises(InvalidCost):
        probe.limiter.check(probe.key(limit), cost=cost)
    with pytest.raises(InvalidCost):
        probe.limiter.refund(probe.key(limit), cost)
    assert probe.remaining(limit) == 6


def test_denial_charges_nothing(probe: LimiterProbe) -> None:
    """Pitfall 11: counters that go down with each denial lock out whoever retries."""
    probe.replay(
        limit_of("fixed_window", 5, SECOND),
        [
            ((0, 3), (True, 2, 0)),
            ((0, 4), (False, 2, 1_000)),
            ((0, 4), (False, 2, 1_000)),
            ((0, 2), (True, 0, 0)),
        ],
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_denied_cost_is_not_charged(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall P3: of costs 8, 5 and 1 on a limit of 10, the last must pass."""
    limit = limit_of(algorithm, 10, HOUR)
    answers = [probe.answer(limit, 0, cost)[:2] for cost in (8, 5, 1)]
    assert answers == [(True, 2), (False, 2), (True, 1)]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "concurrency"])
def test_smaller_cost_passes_after_a_larger_was_denied(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 33: a remembered denial answers for its cost and above, until something is given back."""
    limit = limit_of(algorithm, 100, HOUR)
    probe.replay(limit, [((0, 96), (True, 4, 0))])
    assert not probe.answer(limit, 10, 5)[0]
    assert probe.answer(limit, 20, 1) == (True, 3, 0)
    assert not probe.answer(limit, 20, 5)[0]
    assert probe.limiter.refund(probe.key(limit), 2)
    assert probe.answer(limit, 20, 5) == (True, 0, 0)
    assert not probe.answer(limit, 20, 5)[0]
    probe.limiter.reset(probe.key(limit))
    assert probe.answer(limit, 20, 5) == (True, 95, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_peek_reports_like_check_and_writes_nothing(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall P16: statistics by a second call race with the first, and a peek that counts is no peek."""
    limit = limit_of(algorithm, 5, HOUR)
    for used in range(5):
        assert [probe.at(used).peek(probe.key(limit)).remaining for _ in range(3)] == [5 - used] * 3
        charged, seen = probe.limiter.check(probe.key(limit)), probe.limiter.peek(probe.key(limit))
        assert (seen.allowed, seen.remaining, seen.reset_after_us) == (True, 4 - used, charged.reset_after_us)
