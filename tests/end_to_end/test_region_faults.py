"""The short form of the experiments over regions: latency, loss, a partition, and a judge that notices violations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.regions.experiment import run
from chaos.regions.judge import admissions, bucket_excess, judge
from chaos.regions.plan import MODES, SHORT, Plan
from chaos.regions.report import table, verdict
from chaos.regions.worker import ALLOWED, DEGRADED_ALLOWED, DEGRADED_DENIED, DENIED, FAILED, Row

if TYPE_CHECKING:
    from chaos.regions.judge import Outcome

SECOND = 1_000_000
START_US = 1_763_251_200 * SECOND
LONG = Plan(regions=3, processes=1, quota=1200, period_s=60, windows=2)


def test_regions_bear_latency_loss_and_a_partition() -> None:
    result = run(SHORT)
    assert verdict([result]) == [f"- 3 regions: 0 rules broken in {len(result.rows):,} requests"]
    assert {outcome.traffic.mode for outcome in result.outcomes} == {*MODES}
    assert min(outcome.requests for outcome in result.outcomes) > 1_000
    by_mode = {outcome.traffic.mode: outcome for outcome in result.outcomes if outcome.traffic.key == "one region"}
    assert min(by_mode["reconciled"].windows) == SHORT.quota
    assert max(by_mode["divided"].windows) == SHORT.quota / 3
    assert by_mode["central"].waiting > 0.3
    assert len(table([result])) == 2 + len(result.outcomes)


# ------------------------------------------------------------------- the judge


def rows_of(
    plan: Plan,
    mode: str,
    key: str,
    count: int,
    *,
    region: str = "r0",
    at_us: int = START_US,
    every_us: int = 0,
    took_us: int = 1_000,
    result: int = ALLOWED,
) -> list[Row]:
    """As many requests, the first one decided at that instant."""
    place = next(place for place, each in enumerate(plan.traffic) if (each.mode, each.key) == (mode, key))
    times = [at_us + index * every_us for index in range(count)]
    return [Row(region, place, time_us, took_us, result, time_us) for time_us in times]


def full_windows(plan: Plan, count: int) -> list[Row]:
    """So many admissions in each window of all traffic."""
    return [
        row
        for traffic in plan.traffic
        for window in range(plan.windows)
        for row in rows_of(
            plan,
            traffic.mode,
            traffic.key,
            count if traffic.mode != "divided" or traffic.region is None else count // plan.regions,
            at_us=START_US + window * plan.period_s * SECOND,
            every_us=plan.period_s * SECOND // count,
        )
    ]


def find(outcomes: list[Outcome], mode: str, key: str) -> Outcome:
    return next(each for each in outcomes if (each.traffic.mode, each.traffic.key) == (mode, key))


def test_judge_lets_pass_what_is_right() -> None:
    assert [outcome.wrong for outcome in judge(LONG, full_windows(LONG, 1200), START_US)] == [()] * 12


@pytest.mark.parametrize("mode", ["divided", "reserved", "central"])
@pytest.mark.parametrize("key", ["even window", "even bucket"])
def test_judge_notices_one_admission_too_many(mode: str, key: str) -> None:
    # At the end of the first window the bucket has refilled what was admitted before.
    at_us = START_US + 60 * SECOND - 1
    extra = rows_of(LONG, mode, key, 1201 if key == "even bucket" else 1, at_us=at_us)
    outcomes = judge(LONG, [*full_windows(LONG, 1200), *extra], START_US)
    assert find(outcomes, mode, key).wrong[0].endswith("more than the limit were admitted")
    assert sum(bool(outcome.wrong) for outcome in outcomes) == 1


def test_judge_notices_that_a_bound_is_exceeded() -> None:
    at_bound, beyond = [
        find(judge(LONG, rows_of(LONG, "reconciled", "even window", count), START_US), "reconciled", "even window")
        for count in (3600, 3601)
    ]
    assert not any("bound" in text for text in at_bound.wrong)
    assert "2401 more than the limit were admitted, and the bound is 2400" in beyond.wrong


def test_judge_notices_more_than_a_tenth_under_an_even_spread() -> None:
    within, over = [
        find(judge(LONG, [*full_windows(LONG, 1200), *extra], START_US), "reconciled", "even window")
        for extra in (rows_of(LONG, "reconciled", "even window", 120), rows_of(LONG, "reconciled", "even window", 121))
    ]
    assert (within.wrong, over.wrong) == ((), ("1.10 times the limit were admitted under an even spread",))


@pytest.mark.parametrize("mode", ["reserved", "reconciled", "central"])
def test_judge_notices_that_one_region_cannot_use_the_limit(mode: str) -> None:
    outcomes = judge(LONG, full_windows(LONG, 1139), START_US)
    assert find(outcomes, mode, "one region").wrong == ("94.9% of the limit were usable from one region",)
    assert find(outcomes, "divided", "one region").wrong == ()


def test_judge_notices_requests_that_wait_for_another_region() -> None:
    rows = [row._replace(took_us=100_000) for row in full_windows(LONG, 1200)]
    wrong = {outcome.traffic.mode: outcome.wrong for outcome in judge(LONG, rows, START_US)}
    text = "100.0% of the requests took as long as a round trip to another region"
    assert wrong == {"divided": (text,), "reserved": (text,), "reconciled": (text,), "central": ()}


@pytest.mark.parametrize(("slow", "is_wrong"), [(0.02, False), (0.04, True)])
def test_judge_allows_for_a_busy_machine(slow: float, is_wrong: bool) -> None:
    """2 % of the requests on divided limits, which cannot wait for another region, are late, too."""
    shares = {"divided": 0.02, "reserved": slow, "reconciled": 0.0, "central": 1.0}
    rows = [
        row._replace(took_us=100_000 if index % 1000 < 1000 * shares[LONG.traffic[row.traffic].mode] else 1_000)
        for index, row in enumerate(full_windows(LONG, 1200))
    ]
    outcomes = judge(LONG, rows, START_US)
    assert any(outcome.wrong for outcome in outcomes) is is_wrong


def test_judge_notices_wrong_answers_without_the_store() -> None:
    failed = rows_of(LONG, "central", "even window", 2, result=FAILED)
    open_ = rows_of(LONG, "central", "even window", 1, result=DEGRADED_ALLOWED)
    closed = rows_of(LONG, "central", "even window", 5, result=DEGRADED_DENIED)
    denied = rows_of(LONG, "central", "even window", 5, result=DENIED)
    outcome = find(judge(LONG, [*failed, *open_, *closed, *denied], START_US), "central", "even window")
    assert outcome.wrong == (
        "2 requests raised an exception",
        "a request was allowed without the store, though the failure mode is closed",
    )
    assert sum(outcome.windows) == 1


def test_admissions_count_by_the_clock_of_the_home_region() -> None:
    assert [LONG.skew_s(name) for name in LONG.names] == [0, 0.2, -0.2]
    rows = [Row(name, 0, START_US, 1_000, ALLOWED, START_US) for name in LONG.names]
    by_home = [START_US - 200_000, START_US, START_US + 200_000]
    own_windows = [("divided", "even window"), ("reconciled", "even window")]
    for traffic in LONG.traffic:
        if traffic.mode == "central" or traffic.key == "one region":
            continue
        expected = [START_US] * 3 if (traffic.mode, traffic.key) in own_windows else by_home
        assert admissions(LONG, traffic, rows) == expected


def test_excess_of_a_bucket() -> None:
    assert bucket_excess([0] * 10, 10, 1e-6) == 0
    assert bucket_excess([0] * 13, 10, 1e-6) == 3
    assert bucket_excess([0] * 10 + [2_000_000] * 2, 10, 1e-6) == 0
    assert bucket_excess([0] * 10 + [2_000_000] * 3, 10, 1e-6) == 1
    assert bucket_excess([], 10, 1e-6) == 0
