"""Scenario files: defaults, units, and errors that name the place and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headgate import InvalidInput
from headgate.errors import InvalidPolicy
from headgate.simulation.scenario import Retries, load_scenario, read_scenario
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCENARIOS = sorted((ROOT / "examples" / "scenarios").glob("*.yaml"))
LEAST = "duration: 1 s\nlimits: {api: 10/minute}\ntraffic: [{limits: api, rate: 5/second}]\n"


def test_least_scenario_has_defaults() -> None:
    scenario = read_scenario(LEAST)
    assert (scenario.nodes.count, scenario.store.shards, scenario.seed, scenario.scale) == (1, 1, 1, 1)
    assert (scenario.nodes.budget_s, scenario.nodes.lease_us, scenario.nodes.on_failure) == (0.005, 100_000, "open")
    [source] = scenario.traffic
    assert (source.name, source.limits, source.rate, source.clients) == ("traffic-1", ("api",), 5.0, 1)


def test_units_are_converted() -> None:
    scenario = read_scenario(
        """
duration: 2 minutes
nodes: {count: 3, on_failure: local, share: 50%, budget: 10 ms, lease: 50 ms, cpu_local: 3 us}
store: {shards: 2, cpu_call: 6 us}
network: {round_trip: 1 ms, loss: 0.01%}
limits: {api: {allows: "1000/second, burst 50", lease: always, split: 2}, cold: {allows: 5/minute, lease: never}}
traffic:
  - {limits: [api, cold], rate: 60/minute, clients: 10, zipf: 1.1, retry: {after: retry-after, share: 50%}}
faults:
  - {kind: clock_step, at: 0, by: -5 s}
"""
    )
    assert (scenario.duration_s, scenario.nodes.budget_s, scenario.nodes.lease_us) == (120.0, 0.01, 50_000)
    assert (scenario.nodes.local_ns, scenario.store.call_ns, scenario.network.round_trip_ns) == (
        3_000,
        6_000,
        1_000_000,
    )
    assert scenario.network.loss == pytest.approx(0.0001)
    assert (scenario.announced, scenario.never_leased) == ({"api"}, {"cold"})
    assert (scenario.limits["api"].split, scenario.limits["api"].capacity) == (2, 50)
    assert scenario.traffic[0].retries == Retries(0.5, None, 3)
    assert scenario.faults[0].by_s == -5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a scenario: a mapping with fields like name, seed, duration"),
        ("duration: 1 s\n", "1:1: limits: is missing; a scenario has at least duration:, limits: and traffic:"),
        (LEAST + "seed: x\n", "4:7: seed: "),
        (LEAST + "nodes: {cuont: 3}\n", "4:9: unknown field 'cuont'; did you mean 'count'?"),
        (LEAST + "network: {loss: 200%}\n", "4:17: loss: cannot read"),
        (LEAST.replace("limits: api", "limits: web"), "3:20: limits: 'web' is not one of the limits: api"),
        (LEAST.replace("rate: 5/second", "cost: 1"), "rate: give either a rate or a log"),
        (LEAST.replace("5/second", "5/second, cost: 11"), "cost: 11 exceeds the capacity of limit 'api', 10"),
        (LEAST.replace("10/minute", '"10/minute, concurrency"'), "leave concurrency limits out"),
        (LEAST.replace("10/minute", "10/month"), "a simulation is shorter than a calendar period"),
        (LEAST + "faults: [{kind: store_down, at: 0}]\n", "store_down needs for:, how long it lasts"),
        (LEAST + "faults: [{kind: store_down, at: 3 s, for: 1 s}]\n", "at: is after the end of the simulation"),
        (
            LEAST + "faults: [{kind: slow_shard, at: 0, for: 1 s, shard: 4}]\n",
            "shard: there are 1 shards, counted from 0",
        ),
        (LEAST + "faults: [{kind: clock_step, at: 0}]\n", "clock_step needs by:"),
        (LEAST.replace("5/second", "900000000/second"), "more than 200,000,000 requests"),
        (LEAST + "scale: 2\n", "scale 2 does not divide the 1 nodes; give a divisor of it"),
    ],
)
def test_mistakes_are_named_with_place_and_remedy(text: str, message: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        read_scenario(text)
    assert str(caught.value).startswith("scenario.yaml:")
    assert message in str(caught.value)


def test_scaling_divides_nodes_shards_and_the_limits_of_single_clients() -> None:
    scenario = load_scenario(ROOT / "examples" / "scenarios" / "fleet.yaml")
    assert (scenario.scale, scenario.nodes.count, scenario.store.shards) == (10, 20, 1)
    assert scenario.limits["contract"].quota == 30_000
    assert scenario.limits["per-key"].quota == 100
    with pytest.raises(InvalidInput, match="scale 3 does not divide the 20 nodes"):
        scenario.scaled(3)


def test_limit_of_one_client_and_of_many_cannot_be_scaled() -> None:
    text = LEAST.replace("traffic: [", "nodes: {count: 2}\ntraffic: [{limits: api, rate: 1/second, clients: 9}, ")
    with pytest.raises(InvalidInput, match="'api' is of one client and of many"):
        read_scenario(text).scaled(2)


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.name)
def test_shipped_scenarios_are_valid(file: Path) -> None:
    assert load_scenario(file).traffic
