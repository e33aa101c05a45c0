"""Refunds are bounded, idempotent and tied to their window, on every store."""

from __future__ import annotations

import pytest

from support.limiter_probe import HOUR, REFILLED, SECOND, WINDOWS, LimiterProbe, limit_of


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_refund_is_capped_by_the_capacity(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 32: 99 given back to a drained limit of 5 are 5."""
    limit = limit_of(algorithm, 5, HOUR)
    probe.answer(limit, 0, 5)
    assert probe.limiter.refund(probe.key(limit), 99)
    assert probe.answer(limit, 0, 6) == (False, 5, None)
    assert probe.answer(limit, 0, 5) == (True, 0, 0)


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_refund_counts_once_per_id(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 32: whoever retries a refund after a timeout must not be paid twice."""
    limit = limit_of(algorithm, 5, HOUR)
    probe.answer(limit, 0, 5)
    given_back = [probe.limiter.refund(probe.key(limit), 1, id=id) for id in ("a", "a", "b", "a")]
    assert given_back == [True, False, True, False]
    assert probe.remaining(limit) == 2


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
def test_refund_belongs_to_the_charged_window(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 32: once that window is over the refund is dropped, or it would pay into another."""
    limit = limit_of(algorithm, 4, SECOND)
    key = probe.key(limit)
    first = probe.at(0).check(key, cost=2)
    assert not probe.at(1_000).refund(key, 2)
    assert not probe.limiter.refund(key, 2, of=first)
    second = probe.at(2_500).check(key, cost=2)
    assert not probe.limiter.refund(key, 2, of=first)
    assert probe.remaining(limit) == 2
    assert probe.limiter.refund(key, 2, of=second)
    assert probe.remaining(limit) == 4


@pytest.mark.parametrize("algorithm", [*WINDOWS, *REFILLED])
def test_refund_to_an_unused_key_returns_false(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 32: and it says so, whether the key is new, was paid back already, or has recovered by itself."""
    limit = limit_of(algorithm, 4, SECOND)
    key = probe.key(limit)
    assert not probe.at(0).refund(key, 1)
    probe.limiter.check(key, cost=4)
    assert [probe.limiter.refund(key, 2) for _ in range(3)] == [True, True, False]
    recovered_us = probe.limiter.check(key, cost=3).reset_after_us
    assert not probe.at(recovered_us / 1000).refund(key, 1)


@pytest.mark.parametrize("algorithm", WINDOWS)
def test_refund_covers_charges_of_a_larger_limit(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfalls 30 and 32: 100 charged before the plan shrank to 20 are 100 to give back."""
    probe.answer(limit_of(algorithm, 100, HOUR), 0, 100)
    smaller = limit_of(algorithm, 20, HOUR)
    assert probe.limiter.refund(probe.key(smaller), 100)
    assert probe.remaining(smaller) == 20


def test_refund_removes_the_newest_log_entries(probe: LimiterProbe) -> None:
    """Pitfall 32: what is oldest has nearly been paid for."""
    limit = limit_of("sliding_log", 6, SECOND)
    for now_ms in (0, 400, 800):
        probe.answer(limit, now_ms, 2)
    assert probe.limiter.refund(probe.key(limit), 3)
    probe.replay(limit, [((800, 4), (False, 3, 200)), ((1_000, 4), (True, 1, 0))])
