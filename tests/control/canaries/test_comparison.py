"""The comparison of a canary's nodes with the others: the same seconds, enough requests, and no chance findings."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.control.canaries.comparison import compare
from headgate.control.config.rows import CanaryRow
from headgate.telemetry.fleet.model import CanaryNode, CanarySecond
from headgate.telemetry.fleet.rollups import bucket_of

CANARY = CanaryRow(
    "c1", "running", "{}", "json", "policy.json", 10, None, max_rejections_bp=500, max_errors_bp=100,
    max_latency_percent=200, run_us=None, promotes=0, begun_us=0, author="ada", reason="test",
)  # fmt: skip


def node(role: Any, *seconds: CanarySecond, name: str = "", canary: str = "c1", error: str | None = None) -> CanaryNode:
    return CanaryNode(name or role, canary, role, error, seconds)


def second(
    number: int, *, allowed: int = 0, denied: int = 0, blocked: int = 0, failed: int = 0, us: int = 100
) -> CanarySecond:
    """A second in which `failed` of the allowed requests were answered by the failure mode."""
    requests = allowed + denied + blocked
    return CanarySecond(number, [allowed, denied, blocked, 0, failed], {bucket_of(us): requests})


def verdicts(*nodes: CanaryNode) -> dict[str, str]:
    return {each.name: each.verdict for each in compare(CANARY, nodes).measures}


def test_equal_nodes_are_within_the_thresholds() -> None:
    found = compare(
        CANARY, [node(role, second(1, allowed=900, denied=100, failed=3)) for role in ("candidate", "stable")]
    )
    assert (found.verdict, found.reasons) == ("within thresholds", ())
    assert found.candidate == found.stable
    assert (found.candidate.requests, found.candidate.rejections, found.candidate.errors) == (1000, 100, 3)


def test_more_rejections_exceed_the_threshold() -> None:
    candidate = node("candidate", second(1, allowed=600, denied=300, blocked=100))
    found = compare(CANARY, [candidate, node("stable", second(1, allowed=960, denied=40))])
    assert found.verdict == "threshold exceeded"
    assert found.reasons == (
        "rejections 40.0 % of requests with the candidate, 4.0 % on other nodes; at most 9.0 % permitted",
    )


@pytest.mark.parametrize(("denied", "verdict"), [(90, "within threshold"), (91, "exceeded")])
def test_threshold_itself_is_permitted(denied: int, verdict: str) -> None:
    stable = node("stable", second(1, allowed=96_000, denied=4_000))
    candidate = node("candidate", second(1, allowed=100_000 - denied * 100, denied=denied * 100))
    assert verdicts(candidate, stable)["rejections"] == verdict


def test_fewer_rejections_are_permitted() -> None:
    stable = node("stable", second(1, allowed=500, denied=500))
    assert compare(CANARY, [node("candidate", second(1, allowed=1000)), stable]).verdict == "within thresholds"


def test_difference_that_may_be_chance_is_no_reason() -> None:
    # 9 points more, but with a standard error of 4.
    few = verdicts(node("candidate", second(1, allowed=85, denied=15)), node("stable", second(1, allowed=94, denied=6)))
    assert few["rejections"] == "within threshold"
    many = node("candidate", second(1, allowed=850, denied=150)), node("stable", second(1, allowed=940, denied=60))
    assert verdicts(*many)["rejections"] == "exceeded"


def test_more_answers_by_the_failure_mode_exceed_the_threshold() -> None:
    found = compare(
        CANARY, [node("candidate", second(1, allowed=1000, failed=30)), node("stable", second(1, allowed=1000))]
    )
    assert found.verdict == "threshold exceeded"
    assert found.reasons == (
        "errors 3.0 % of requests with the candidate, 0.0 % on other nodes; at most 1.0 % permitted",
    )


@pytest.mark.parametrize(
    ("candidate_us", "stable_us", "verdict"),
    [(10_000, 2_000, "exceeded"), (3_000, 2_000, "within threshold"), (400, 20, "within threshold")],
)
def test_latency_is_compared_by_its_99th_percentile(candidate_us: int, stable_us: int, verdict: str) -> None:
    nodes = [
        node("candidate", second(1, allowed=980), second(10, allowed=20, us=candidate_us)),
        node("stable", second(1, allowed=980), second(10, allowed=20, us=stable_us)),
    ]
    assert verdicts(*nodes)["latency"] == verdict


def test_pause_of_a_process_at_the_start_is_not_judged() -> None:
    seconds = second(1, allowed=900), second(9, allowed=100, us=90_000)
    nodes = node("candidate", *seconds), node("stable", second(1, allowed=1000))
    assert verdicts(*nodes)["latency"] == "too few requests"
    later = [second(10, allowed=1) for _ in nodes]
    assert verdicts(node("candidate", *seconds, later[0]), nodes[1])["latency"] == "exceeded"


def test_too_few_requests_are_not_judged() -> None:
    found = compare(CANARY, [node("candidate", second(1, denied=99)), node("stable", second(1, allowed=5000))])
    assert (found.verdict, found.reasons) == ("too few requests", ())
    assert found.measures[0].candidate == 100.0
    assert verdicts(node("candidate", second(1, denied=100)), node("stable", second(1, allowed=100))) == {
        "rejections": "exceeded", "errors": "within threshold", "latency": "too few requests",
    }  # fmt: skip


def test_groups_without_nodes_are_named() -> None:
    some = second(1, allowed=1000)
    assert compare(CANARY, []).verdict == "no candidate nodes"
    assert compare(CANARY, [node("stable", some)]).verdict == "no candidate nodes"
    assert compare(CANARY, [node("candidate", some)]).verdict == "no other nodes"
    assert compare(CANARY, [node("candidate", some), node("stable")]).verdict == "too few requests"
    assert compare(CANARY, [node("candidate", some), node("stable", some, canary="c0")]).verdict == "no other nodes"


def test_node_that_cannot_apply_the_candidate_is_a_reason() -> None:
    found = compare(CANARY, [node("stable", second(1, allowed=9), name="web-3", error="line 2: no such limit")])
    assert (found.verdict, found.invalid_nodes) == ("invalid candidate", ("web-3",))
    assert found.reasons == ("web-3 cannot apply the candidate: line 2: no such limit",)


def test_groups_are_compared_over_the_same_seconds() -> None:
    # The attack of seconds 1 and 2 was over when the candidate's node learned of the canary.
    stable = node("stable", *[second(at, denied=1000) for at in (1, 2)], second(3, allowed=1000))
    found = compare(CANARY, [node("candidate", second(3, allowed=1000)), stable])
    assert (found.seconds, found.stable.requests, found.stable.rejections) == (1, 1000, 0)


def test_last_minute_is_compared_if_it_has_enough_requests() -> None:
    good, bad = [second(at, allowed=50) for at in range(200)], [second(at, denied=50) for at in range(200, 210)]
    stable = node("stable", *[second(at, allowed=50) for at in range(210)])
    found = compare(CANARY, [node("candidate", *good, *bad), stable])
    assert (found.seconds, found.candidate.requests, found.candidate.rejections) == (60, 3000, 500)
    assert found.verdict == "threshold exceeded"


def test_five_minutes_are_compared_if_the_last_one_has_few_requests() -> None:
    slow = [second(at, allowed=1) for at in range(300)]
    found = compare(CANARY, [node("candidate", *slow), node("stable", *slow)])
    assert (found.seconds, found.candidate.requests, found.verdict) == (300, 300, "within thresholds")


def test_processes_of_a_group_are_summed() -> None:
    nodes = [node("stable", second(1, allowed=100, us=us), name=f"web-{us}") for us in (100, 200, 300)]
    found = compare(CANARY, [*nodes, node("candidate", second(1, allowed=100))])
    assert (found.stable.nodes, found.stable.requests) == (3, 300)
    assert 160 <= (found.stable.p50_us or 0) <= 224
