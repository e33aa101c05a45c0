"""Bounds: no mode exceeds its bound, and each is reached, so that none is looser than it must be."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limit, StoreUnavailable, bounds
from headgate.algorithms import ALGORITHMS
from headgate.bounds import Bound, OvershootMeter
from headgate.failure import FailurePolicy, FleetShare
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check
from headgate.testing import FakeClock
from support.fleets import START_US, Fleet, steady

SECOND = timedelta(seconds=1)
RATES = sorted({*ALGORITHMS} - {"concurrency"})
WINDOWS = ("fixed_window", "sliding_window")
DOWN = StoreUnavailable("down")

every_rate = pytest.mark.parametrize("algorithm", RATES)


def worst_excess(limit: Limit, admitted: list[tuple[int, int]]) -> Fraction:
    """The excess over the limit, by comparing every pair of requests: an independent model of the meter."""
    worst = Fraction(0)
    for index, (start_us, _) in enumerate(admitted):
        for end in range(index, len(admitted)):
            end_us = admitted[end][0]
            if limit.algorithm not in WINDOWS:
                inside = sum(cost for _, cost in admitted[index : end + 1])
                refill = Fraction((end_us - start_us) * limit.quota, limit.period_us)
                worst = max(worst, inside - limit.capacity - refill)
                continue
            window, elapsed_us = divmod(end_us, limit.period_us)
            used = sum(cost for at_us, cost in admitted[: end + 1] if at_us // limit.period_us == window)
            before = sum(cost for at_us, cost in admitted if at_us // limit.period_us == window - 1)
            weight = 1 - Fraction(elapsed_us, limit.period_us) if limit.algorithm == "sliding_window" else 0
            worst = max(worst, used + before * weight - limit.quota)
    return worst


@every_rate
@given(data=st.data())
def test_meter_finds_the_worst_interval(algorithm: str, data: st.DataObject) -> None:
    limit = Limit(data.draw(st.integers(1, 9)), SECOND, algorithm=algorithm)
    gaps = data.draw(st.lists(st.tuples(st.integers(0, 700_000), st.integers(1, 4)), max_size=12))
    meter, at_us, admitted = OvershootMeter(limit), START_US, []
    for gap_us, cost in gaps:
        at_us += gap_us
        admitted.append((at_us, cost))
        meter.add(at_us, cost)
    excess = worst_excess(limit, admitted)
    assert meter.largest == -(-excess.numerator // excess.denominator)


@every_rate
@given(quota=st.integers(1, 30), gaps=st.lists(st.integers(0, 400_000), max_size=60))
def test_one_store_never_exceeds_its_limit(algorithm: str, quota: int, gaps: list[int]) -> None:
    limit, clock = Limit(quota, SECOND, algorithm=algorithm), FakeClock(START_US)
    store, meter = MemoryStore(clock), OvershootMeter(limit)
    for gap_us in gaps:
        clock.advance(gap_us / 1_000_000)
        if store.decide(Check((limit.by("ada"),), 1)).allowed:
            meter.add(clock.now_us())
    assert meter.largest == 0


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "sliding_log", "fixed_window", "sliding_window"])
def test_prepaid_tokens_keep_their_bound(algorithm: str) -> None:
    limit = Limit(5_000, SECOND, algorithm=algorithm)
    fleet, meter = Fleet(4, announce=[limit]), OvershootMeter(limit)
    fleet.run(steady(20_000, 2, 4, Check((limit.by("ada"),), 1), there_us=300, back_us=300))
    for spent in sorted(fleet.spent):
        meter.add(spent.at_us, spent.cost)
    assert meter.largest <= bounds.prepaid(limit, 100_000)


def test_prepaid_bound_is_the_refill_of_a_lease() -> None:
    assert bounds.prepaid(Limit(1_001, SECOND), 100_000) == 101
    assert bounds.prepaid(Limit(10, SECOND), 100_000) == 0, "too small to be prepaid"
    assert bounds.prepaid(Limit(1_000, SECOND), 0) == 0
    assert bounds.prepaid(Limit(1_000, SECOND, algorithm="leaky_bucket"), 100_000) == 0
    assert bounds.prepaid(Limit(1_000, SECOND, algorithm="fixed_window"), 100_000) == 0


@every_rate
@given(quota=st.integers(1, 200), nodes=st.integers(1, 7), outage_us=st.integers(1, 5_000_000))
def test_local_failure_keeps_its_bound(algorithm: str, quota: int, nodes: int, outage_us: int) -> None:
    """The store admits all it can until it fails; then every node is flooded until the end of the outage."""
    limit, clock = Limit(quota, SECOND, algorithm=algorithm), FakeClock(START_US)
    check, meter, total = Check((limit.by("ada"),), 1), OvershootMeter(limit), 0
    store, fleet = MemoryStore(clock), FleetShare(share=0.2, nodes=nodes)
    while store.decide(check).allowed:
        meter.add(clock.now_us())
    parts = [FailurePolicy("local", clock, fleet) for _ in range(nodes)]
    for _ in range(8):
        for part in parts:
            while part.decide(check, DOWN).allowed:
                total += 1
                meter.add(clock.now_us())
        clock.advance(outage_us / 8_000_000)
    bound = bounds.local_failure(limit, 0.2, nodes, outage_us)
    assert meter.largest <= bound
    if algorithm not in WINDOWS:
        assert total <= bound


def test_local_bound_is_reached() -> None:
    limit, clock = Limit(1_000, SECOND), FakeClock(START_US)
    check = Check((limit.by("ada"),), 1)
    parts = [FailurePolicy("local", clock, FleetShare(nodes=10)) for _ in range(10)]
    admitted = sum(part.decide(check, DOWN).allowed for part in parts for _ in range(100))
    clock.advance(1)
    admitted += sum(part.decide(check, DOWN).allowed for part in parts for _ in range(100))
    assert admitted == bounds.local_failure(limit, 0.2, 10, 1_000_000) == 400
    assert bounds.local_failure(Limit(3, SECOND, algorithm="concurrency"), 0.2, 10) == 10
    assert bounds.local_failure(Limit(3, SECOND, algorithm="fixed_window"), 0.2, 10) == 20, "windows of their own"


def test_bounds_of_the_other_modes() -> None:
    limit = Limit(100, SECOND)
    assert bounds.sharded(Limit(100, SECOND, split=4)) == 0
    assert bounds.lost_data(limit, 3) == 300
    assert bounds.quota_grants(limit, 60_000_000) == 6_000
    assert bounds.quota_grants(Limit(100, SECOND, algorithm="fixed_window"), 60_000_000) == 0


def test_bounds_of_a_policy_name_the_modes_in_use() -> None:
    limit = Limit(1_000, SECOND)
    found = bounds.policy_bounds(limit, lease_us=100_000, fails_local=True, share=Fraction(1, 5), nodes=4)
    assert found == (
        Bound("prepaid tokens, within 100 ms", 100),
        Bound("store unavailable for one period, 4 nodes", 400),
    )
    assert bounds.policy_bounds(limit, lease_us=0, fails_local=False, share=Fraction(1, 5), nodes=1) == ()
