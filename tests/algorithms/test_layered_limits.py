"""Several limits in one check are charged all or none, on every store."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate import Decision, Limit
from support.limiter_probe import ALGORITHMS, HOUR, MINUTE, SECOND, LimiterProbe, limit_of


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layered_limits_charge_all_or_nothing(probe: LimiterProbe, algorithm: str) -> None:
    """Pitfall 12: the limits that would have allowed keep what they have."""
    layers = [limit_of(algorithm, quota, HOUR, name=name) for name, quota in (("ip", 10), ("user", 5), ("key", 3))]
    keys = [probe.key(limit) for limit in layers]
    assert probe.limiter.check(*keys, cost=3).allowed
    denied = probe.limiter.check(*keys, cost=1)
    assert (denied.allowed, denied.denied_by, denied.remaining) == (False, ("key",), 0)
    assert [(outcome.allowed, outcome.remaining) for outcome in denied.outcomes] == [
        (True, 7),
        (True, 2),
        (False, 0),
    ]
    assert [probe.remaining(limit) for limit in layers] == [7, 2, 0]


def test_order_of_limits_does_not_matter(probe: LimiterProbe) -> None:
    """Pitfall 12: every limit that denies is named, and the longest wait is reported."""
    short = limit_of("fixed_window", 2, SECOND, name="short")
    long = limit_of("sliding_log", 3, MINUTE, name="long")
    wide = limit_of("token_bucket", 9, MINUTE, name="wide")
    probe.at(0).check(probe.key(short), probe.key(long), cost=2)

    def verdict(limits: tuple[Limit, ...]) -> tuple[set[str], int, int | None, int]:
        denied = probe.limiter.check(*map(probe.key, limits), cost=2)
        return set(denied.denied_by), denied.remaining, denied.retry_after_us, denied.reset_after_us

    verdicts = [verdict(order) for order in itertools.permutations((short, long, wide))]
    assert verdicts == [({"short", "long"}, 0, 60_000_000, 60_000_000)] * 6


def test_denied_requests_do_not_use_up_the_longer_limit(probe: LimiterProbe) -> None:
    """Pitfall P2: of six requests the short limit rejects four; the long one counts two."""
    short, long = (
        limit_of("fixed_window", 2, SECOND, name="short"),
        limit_of("fixed_window", 100, HOUR, name="long"),
    )
    passed = [probe.at(0).check(probe.key(short), probe.key(long)).allowed for _ in range(6)]
    assert passed == [True, True, False, False, False, False]
    assert probe.remaining(long) == 98


def test_concurrent_checks_pass_a_limit_of_one_once(probe: LimiterProbe) -> None:
    """Pitfall 13: limits judged one after the other let the losers charge the wide limit."""
    wide, narrow = Limit(1000, HOUR, name="wide"), Limit(1, HOUR, name="narrow")

    def attempt(_: int) -> Decision:
        return probe.limiter.check(probe.key(wide), probe.key(narrow))

    with ThreadPoolExecutor(16) as pool:
        decisions = list(pool.map(attempt, range(100)))
    assert sum(decision.allowed for decision in decisions) == 1
    assert (probe.remaining(wide), probe.remaining(narrow)) == (999, 0)
