"""`python -m bench.fleet`: simulate the large fleet with other settings, and write the tables of docs/scaling.md.

Simulations are exact: on every machine they give the same tables. They take about two minutes of CPU time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.scaling import write_tables
from headgate.simulation.scenario import load_scenario
from headgate.simulation.simulator import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.simulation.scenario import Scenario
    from headgate.simulation.simulator import SimulationResult

SCENARIO: Final = "examples/scenarios/fleet.yaml"
SHARDS: Final = (1, 3, 6, 12)
WHOLE_FLEET_S: Final = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the tables, and do not write the page")
    options = parser.parse_args()
    tables = {"fleet": [*_settings_rows()], "shards": [*_shards_rows()]}
    for name, rows in tables.items():
        print(f"\n{name}\n" + "\n".join(rows))
    if not options.dry:
        write_tables(tables)


def _settings_rows() -> Iterator[str]:
    """One part in ten of the fleet under different settings."""
    yield "| | store calls per request | store calls/s | without the store | p99 of a check | bounds hold |"
    yield "| --- |" + " --: |" * 5
    for name, change in SETTINGS.items():
        yield settings_row(name, simulate(change(load_scenario(SCENARIO))))


def settings_row(name: str, result: SimulationResult) -> str:
    calls_per_s = result.store_calls * result.scale / result.duration_s
    cells = [
        f"{result.store_calls_per_request:.3f}",
        f"{calls_per_s:,.0f}",
        f"{result.degraded / result.requests:.1%}".replace("%", " %"),
        f"{result.p99_ms:.3g} ms",
        "yes" if result.bounds_hold else "**no**",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _without_prepaid_tokens(scenario: Scenario) -> Scenario:
    return replace(scenario, announced=frozenset(), never_leased=frozenset({"contract"}))


def _random_routing(scenario: Scenario) -> Scenario:
    return replace(scenario, traffic=tuple([replace(each, is_sticky=False) for each in scenario.traffic]))


def _more_traffic_than_allowed(scenario: Scenario) -> Scenario:
    """The tenant sends a quarter more than its limit."""
    acme, *others = scenario.traffic
    contract = scenario.limits["contract"]
    return replace(scenario, traffic=(replace(acme, rate=contract.quota * scenario.scale * 1.25), *others))


SETTINGS: Final[dict[str, Callable[[Scenario], Scenario]]] = {
    "as shipped": lambda scenario: scenario,
    "`routing: random`": _random_routing,
    "without the denial cache": lambda scenario: replace(scenario, nodes=replace(scenario.nodes, remember=0)),
    "the tenant sends 25 % more than its limit": _more_traffic_than_allowed,
    "without prepaid tokens": _without_prepaid_tokens,
}


def _shards_rows() -> Iterator[str]:
    """The whole fleet, with more and fewer servers, after its first second."""
    yield "| servers | calls/s of the busiest | its CPU | all servers together | p99 of a check | servers per month |"
    yield "| --: |" + " --: |" * 5
    for shards in SHARDS:
        scenario = load_scenario(SCENARIO, scale=1)
        store = replace(scenario.store, shards=shards)
        result = simulate(replace(scenario, duration_s=WHOLE_FLEET_S, store=store, described_shards=shards))
        later = result.seconds[1:]
        busiest = max(result.shards, key=lambda each: each.cpu)
        cpu = max([second.shard_cpu[busiest.shard] for second in later])
        total = sum([sum(second.shard_cpu) for second in later]) / len(later)
        assert result.cost is not None
        cells = [
            f"{busiest.calls_per_s:,.0f}",
            f"{cpu:.0%}".replace("%", " %"),
            f"{total:.2f} cores",
            f"{max([second.p99_ms for second in later]):.3g} ms",
            f"{result.cost['shards']:,.0f} {result.cost['currency']}",
        ]
        yield f"| {shards} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
