"""Simulated gateways: calls with a timeout, and quotas with the grants of production."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headgate import bounds
from headgate.cli import main
from headgate.errors import InvalidPolicy
from headgate.limits import Limit
from headgate.simulation.scenario import read_scenario
from headgate.simulation.simulator import simulate
from support.paths import ROOT

if TYPE_CHECKING:
    from headgate.simulation.simulator import SimulationResult

CALLS = """
duration: 2 s
nodes: {count: 2, on_failure: closed, budget: 20 ms}
network: {jitter: 0%}
gateways: {count: 4, round_trip: 2 ms, timeout: 10 ms}
limits: {api: {allows: 300/second, lease: never}}
traffic: [{name: acme, limits: api, rate: 500/second}]
"""
QUOTAS = """
duration: 25 s
nodes: {count: 2, on_failure: closed, budget: 20 ms}
gateways: {count: 6, mode: quotas, report: 1 s, without_quota: deny}
limits: {api: {allows: "6000/minute, burst 600", lease: never}}
traffic: [{name: acme, limits: api, rate: 300/second}]
"""


def run(text: str) -> SimulationResult:
    return simulate(read_scenario(text))


def test_gateways_call_a_node_for_each_request() -> None:
    result = run(CALLS)
    assert result.gateway_calls == result.requests
    assert result.undecided == 0
    assert result.p50_ms > 2, "the way to the node and back"
    [limit] = result.limits
    assert (limit.largest_overshoot, limit.bound, limit.bound_holds) == (0, 0, True)
    assert limit.admitted == pytest.approx(300 + 300 * 2, rel=0.02)


@pytest.mark.parametrize("on_failure", ["allow", "deny"])
def test_gateways_decide_calls_without_an_answer_in_time(on_failure: str) -> None:
    text = CALLS.replace("timeout: 10 ms", f"timeout: 10 ms, on_failure: {on_failure}")
    result = run(f"{text}faults: [{{kind: store_down, at: 1 s, for: 500 ms}}]\n")
    assert result.undecided > 0, "the budget of the store is longer than the timeout of a call"
    [limit] = result.limits
    assert limit.bound == (None if on_failure == "allow" else 0)
    assert limit.bound_holds


def test_grants_keep_all_gateways_together_within_the_limit() -> None:
    result = run(QUOTAS)
    [limit] = result.limits
    assert limit.bound == bounds.quota_grants(Limit.parse("6000/minute"), 15_000_500)
    assert limit.bound_holds
    assert 0.6 * 25 * 100 < limit.admitted <= 600 + 25 * 100, "the limit is used, and not exceeded over the whole time"
    assert result.gateway_calls == pytest.approx(6 * 26, abs=6), "one report per gateway and second, and the first one"
    assert result.store_calls_per_request < 0.1


def test_requests_before_the_first_grant_are_a_part_of_the_bound() -> None:
    text = QUOTAS.replace("without_quota: deny", "without_quota: allow").replace("6000/minute, burst 600", "6/minute")
    [limit] = run(text).limits
    denied = run(text.replace("without_quota: allow", "without_quota: deny")).limits[0]
    assert limit.admitted > denied.admitted
    assert limit.bound is not None
    assert denied.bound is not None
    assert limit.bound > denied.bound
    assert limit.bound_holds
    assert denied.bound_holds


def test_gateways_find_another_node_and_the_store_again() -> None:
    faults = "{kind: restart, at: 8 s, for: 5 s, nodes: 50%}, {kind: store_down, at: 15 s, for: 1 s}"
    result = run(f"{QUOTAS}faults: [{faults}]\n")
    [limit] = result.limits
    assert limit.bound_holds
    assert limit.admitted > 0.4 * 25 * 100


def test_idle_buckets_are_forgotten() -> None:
    text = QUOTAS.replace("rate: 300/second}", "rate: 300/second, end: 2 s}")
    assert run(text).gateway_calls < 6 * 20, "after twelve reports without a request"


def test_shipped_scenario_keeps_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text("utf-8")
    assert main(["simulate", str(ROOT / "examples" / "scenarios" / "gateways.yaml")]) == 0
    assert f"$ headgate simulate examples/scenarios/gateways.yaml\n{capsys.readouterr().out}```" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CALLS.replace("timeout: 10 ms", "report: 1 s"), "report: means nothing in mode calls"),
        (QUOTAS.replace("report: 1 s", "timeout: 1 s"), "timeout: means nothing in mode quotas"),
        (QUOTAS.replace("limits: api", "limits: [api, api]"), "give each traffic one limit"),
        (QUOTAS + "scale: 2\n" + "regions: {names: [eu, us]}\n", "quotas are simulated in one region"),
        (CALLS.replace("count: 4", "count: 3") + "scale: 2\n", "scale 2 does not divide the 3 gateways"),
    ],
)
def test_mistakes_are_reported_with_a_remedy(text: str, message: str) -> None:
    with pytest.raises(InvalidPolicy, match=message):
        read_scenario(text)
