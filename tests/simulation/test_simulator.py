"""The simulator: equal results for equal seeds, exact limits, bounds under faults, network and servers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from headgate import InvalidInput
from headgate.cli import main
from headgate.simulation.scenario import load_scenario, read_scenario
from headgate.simulation.simulated_node import SimulatedNode
from headgate.simulation.simulated_store import SimulatedShard
from headgate.simulation.simulator import LimitResult, SimulationResult, simulate
from headgate.simulation.virtual_time import VirtualTime
from headgate.stores.operations import Check
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCENARIOS = ROOT / "examples" / "scenarios"
SMALL = """
duration: 2 s
nodes: {count: 4, on_failure: local}
limits: {api: 1000/second}
traffic: [{name: acme, limits: api, rate: 2000/second}]
"""


def run(text: str) -> SimulationResult:
    return simulate(read_scenario(text))


def only_limit(result: SimulationResult) -> LimitResult:
    [limit] = result.limits
    return limit


# ------------------------------------------------------------------ determinism and scaling


def test_equal_seeds_give_equal_results() -> None:
    faults = "{kind: store_down, at: 500 ms, for: 300 ms}, {kind: partition, at: 1 s, for: 500 ms, nodes: 50%}"
    scenario = read_scenario(f"{SMALL}faults: [{faults}]\nnetwork: {{loss: 0.1%}}\n")
    first, second = [json.dumps(simulate(scenario).as_dict()) for _ in range(2)]
    assert first == second
    assert json.dumps(simulate(replace(scenario, seed=2)).as_dict()) != first


def test_scaling_does_not_change_the_result() -> None:
    """The fleet at one part in 20 and in 40: per request and per node it does the same."""
    fleet = replace(load_scenario(SCENARIOS / "fleet.yaml"), duration_s=3.0)
    larger, smaller = simulate(fleet.scaled(2)), simulate(fleet.scaled(4))
    assert larger.requests > 1.8 * smaller.requests
    assert smaller.store_calls_per_request == pytest.approx(larger.store_calls_per_request, rel=0.1)
    assert smaller.admitted / smaller.requests == pytest.approx(larger.admitted / larger.requests, rel=0.05)
    assert smaller.node_cpu == pytest.approx(larger.node_cpu, rel=0.1)
    assert smaller.shards[0].cpu == pytest.approx(larger.shards[0].cpu, rel=0.15)


def test_large_fleet_needs_few_store_calls_and_keeps_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    """The documentation shows what the shipped scenarios print."""
    page = (ROOT / "docs" / "simulate.md").read_text("utf-8")
    assert main(["simulate", str(SCENARIOS / "fleet.yaml")]) == 0
    printed = capsys.readouterr().out
    assert f"$ headgate simulate examples/scenarios/fleet.yaml\n{printed}```" in page
    [calls] = re.findall(r"([0-9.]+) per request", printed)
    assert float(calls) <= 0.1
    assert f"| as shipped | {calls} |" in (ROOT / "docs" / "scaling.md").read_text("utf-8")


def test_bounds_hold_on_a_bad_day(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text("utf-8")
    assert main(["simulate", str(SCENARIOS / "outage.yaml")]) == 0
    assert f"$ headgate simulate examples/scenarios/outage.yaml\n{capsys.readouterr().out}```" in page


# ------------------------------------------------------------------ the real core


def test_store_admits_exactly_the_limit() -> None:
    """Every request is a store call, so the limit is exact, whatever the nodes and the latency."""
    limit = only_limit(run(SMALL.replace("api: 1000/second", 'api: {allows: "100/hour", lease: never}')))
    assert (limit.admitted, limit.largest_overshoot, limit.bound) == (100, 0, 0)


def test_cached_denials_and_prepaid_tokens_save_store_calls() -> None:
    text = SMALL.replace("2000/second", "8000/second").replace("api: 1000", "api: 6000")
    prepaid = run(text.replace("6000/second", "{allows: 6000/second, lease: always}"))
    asked = run(
        text.replace("6000/second", "{allows: 6000/second, lease: never}").replace("local}", "local, remember: 0}")
    )
    assert asked.store_calls_per_request == 1
    assert prepaid.store_calls_per_request < 0.15
    assert prepaid.admitted == pytest.approx(asked.admitted, rel=0.05)
    assert only_limit(prepaid).bound == 600
    assert prepaid.bounds_hold


def test_split_and_combined_limits_are_counted_on_several_shards() -> None:
    text = """
duration: 1 s
nodes: {count: 2}
store: {shards: 4}
limits: {tenant: {allows: 400/hour, split: 4, lease: never}, user: 50/hour}
traffic: [{name: ada, limits: [tenant, user], rate: 500/second}]
"""
    result = run(text)
    tenant, user = result.limits
    assert (tenant.admitted, user.admitted) == (50, 50), "all or nothing"
    assert result.bounds_hold
    assert sum(shard.calls > 0 for shard in result.shards) > 1


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("how", ["hang", "refuse"])
def test_outage_is_answered_by_the_failure_mode(how: str) -> None:
    result = run(SMALL + f"faults: [{{kind: store_down, at: 500 ms, for: 500 ms, how: {how}}}]\n")
    limit = only_limit(result)
    assert 500 < result.degraded < 2500
    assert 0.5 <= result.node_outage_s < 1.6
    assert limit.bound is not None
    assert 0 <= limit.largest_overshoot <= limit.bound
    assert result.seconds[1].shard_cpu[0] > 0, "the store is used again"


@pytest.mark.parametrize(("mode", "bound"), [("local", "bound 121"), ("open", "not bounded")])
def test_overshoot_of_an_outage_is_reported_with_its_bound(mode: str, bound: str) -> None:
    text = (
        SMALL.replace("count: 4", "count: 1")
        .replace("local", mode)
        .replace("1000/second", "{allows: 100/hour, lease: never}")
    )
    scenario, time, events = read_scenario(text), VirtualTime(), []
    shard = SimulatedShard(0, time, scenario.store)
    node = SimulatedNode(0, scenario, {"": [shard]}, Random(1))
    node.engine.local.event_emitter.add_listener(events.append)
    check = Check((scenario.limits["api"].by("ada"),), 1)

    def send(times: int) -> None:
        for _ in range(times):
            node.engine.decide(check, lambda decision, at_ns: None)
            time.advance(time.now_ns + 2_000_000)

    send(88)  # 12 are left when the store fails
    shard.failure = "refuse"
    send(24 if mode == "open" else 200)
    shard.failure = None
    time.advance(time.now_ns + 2_000_000_000)
    [settled] = [event for event in events if event.kind == "settled"]
    over = settled.details["forgiven"]
    assert over == (12 if mode == "open" else 8)
    assert settled.text.endswith(f"; limit 'api' admitted {100 + over} of 100; {bound}")
    assert f"{node.engine.health().last_outage}" == f"limit 'api' admitted {100 + over} of 100; {bound}"


def test_without_a_failure_mode_that_counts_nothing_is_bounded() -> None:
    down = "faults: [{kind: store_down, at: 500 ms, for: 500 ms}]\n"
    limit = only_limit(run(SMALL.replace("on_failure: local", "on_failure: open") + down))
    assert limit.bound is None
    assert limit.largest_overshoot > 0
    closed = run(SMALL.replace("on_failure: local", "on_failure: closed") + down)
    assert (only_limit(closed).bound, only_limit(closed).largest_overshoot) == (100, 0)


def test_lost_data_grants_the_limit_again() -> None:
    text = SMALL.replace("1000/second", "{allows: 300/hour, lease: never}").replace("local", "closed, remember: 0")
    restart = "faults: [{kind: restart, at: 1 s, for: 100 ms, shard: 0, loses_data: true}]\n"
    limit = only_limit(run(text + restart))
    assert (limit.admitted, limit.largest_overshoot, limit.bound) == (600, 300, 300)
    kept = only_limit(run(text + restart.replace("true", "false")))
    assert (kept.admitted, kept.largest_overshoot) == (300, 0)


@pytest.mark.parametrize(
    "fault",
    [
        "kind: partition, at: 500 ms, for: 500 ms, nodes: 50%",
        "kind: slow_shard, at: 500 ms, for: 500 ms, factor: 500",
        "kind: clock_step, at: 500 ms, by: 30 s, shard: 0",
        "kind: clock_step, at: 500 ms, by: -30 s, nodes: 50%",
        "kind: restart, at: 500 ms, for: 300 ms, nodes: 25%",
        "kind: deploy, at: 200 ms, for: 1 s, nodes: 50%",
    ],
)
def test_bounds_hold_under_faults(fault: str) -> None:
    result = run(SMALL.replace("1000/second", '"1000/second, burst 200"') + f"faults: [{{{fault}}}]\n")
    assert result.bounds_hold
    assert result.requests > 3_500
    assert result.errors == 0


def test_store_that_is_overloaded_answers_late() -> None:
    """One shard can serve 2,000 calls per second: at 4,000 its queue exceeds the budget, and breakers open."""
    text = SMALL.replace("2000/second", "4000/second").replace("1000/second", "{allows: 9000/second, lease: never}")
    busy = run(text + "store: {cpu_call: 480 us, cpu_batch: 20 us}\n")
    idle = run(text)
    assert busy.shards[0].peak_cpu > 0.9
    assert busy.p99_ms > 4 > idle.p99_ms
    assert busy.degraded > 0 == idle.degraded


def test_lost_messages_time_out() -> None:
    result = run(SMALL.replace("1000/second", "{allows: 9000/second, lease: never}") + "network: {loss: 1%}\n")
    assert result.degraded > 0
    assert result.p999_ms >= 4.9, "the budget"
    assert result.bounds_hold


# ------------------------------------------------------------------ traffic


def test_retries_add_requests() -> None:
    text = SMALL.replace("1000/second", "10/hour")
    once, often = run(text), run(text.replace("2000/second", "2000/second, retry: {after: 1 ms, times: 2}"))
    assert often.requests == pytest.approx(3 * once.requests, rel=0.05)


def test_cycle_start_and_end_shape_the_rate() -> None:
    cycle = run(SMALL.replace("2000/second", "2000/second, cycle: {period: 2 s, low: 20%}"))
    assert cycle.requests == pytest.approx(4000 * 0.6, rel=0.1)
    short = run(SMALL.replace("2000/second", "2000/second, start: 1 s, end: 1500 ms"))
    assert short.requests == pytest.approx(1000, rel=0.15)
    assert short.seconds[0].requests == 0


def test_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time,client\n2026-01-01T00:00:00Z,ada\n1767225600.5,ben\n1767225600.25,ada\n1767225699,ada\n")
    result = run(SMALL.replace("rate: 2000/second", f"log: {log}"))
    assert (result.requests, result.admitted, only_limit(result).counters) == (3, 3, 2)
    log.write_text("time,client\nyesterday,ada\n")
    with pytest.raises(InvalidInput, match=r"log\.csv:2: cannot read the line; a log has a header and the columns"):
        run(SMALL.replace("rate: 2000/second", f"log: {log}"))


def test_costs_are_monthly() -> None:
    result = run(SMALL + "prices: {node: 10, shard: 100, million_calls: 1}\n")
    assert result.cost is not None
    assert (result.cost["nodes"], result.cost["shards"]) == (40, 100)
    assert result.cost["total"] == pytest.approx(140 + result.store_calls / 2 * 30 * 86_400 / 1e6)
