"""Simulate a fleet: its store calls, load, response times and overshoot, in virtual time.

headgate simulate fleet.yaml
headgate simulate fleet.yaml --html fleet.html
headgate simulate fleet.yaml --scale 20 --seed 7 --json

exit code: 0 all bounds hold, 1 a bound does not hold, 2 invalid scenario or call
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.cli.options import JSON, option
from headgate.cli.terminal import GREEN, RED, Terminal, table, titled_table
from headgate.errors import InvalidInput, name_missing_extra

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.simulation.simulator import SimulationResult

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    option("file", metavar="SCENARIO", help="scenario file: .yaml, .yml, .toml or .json"),
    option("--seed", metavar="N", type=int, help="seed, in place of that of the scenario"),
    option("--scale", metavar="N", type=int, help="simulate one part in N, in place of the scale of the scenario"),
    option("--html", metavar="FILE", help="write a page with plots to FILE"),
    JSON,
)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    with name_missing_extra("headgate simulate needs", "redis", "redis", "hiredis"):
        from headgate.simulation.scenario import load_scenario
        from headgate.simulation.simulation_page import simulation_page
        from headgate.simulation.simulator import simulate
    if arguments.scale is not None and arguments.scale < 1:
        raise InvalidInput(f"--scale {arguments.scale}: give a whole number of at least 1")
    scenario = load_scenario(arguments.file, scale=arguments.scale)
    if arguments.seed is not None:
        scenario = replace(scenario, seed=arguments.seed)
    result = simulate(scenario, _show_progress if sys.stderr.isatty() else lambda share: None)
    if arguments.html is not None:
        try:
            Path(arguments.html).write_text(simulation_page(result), "utf-8")
        except OSError as error:
            raise InvalidInput(f"--html {arguments.html}: cannot be written: {error.strerror}") from None
    out.print(*([json.dumps(result.as_dict(), indent=2)] if arguments.json else _lines(result, out)))
    return 0 if result.bounds_hold else 1


def _show_progress(share: float) -> None:
    end = "\n" if share >= 1 else ""
    sys.stderr.write(f"\rsimulating: {share:.0%}{end}")
    sys.stderr.flush()


def _lines(result: SimulationResult, out: Terminal) -> Iterator[str]:
    scale = f" (one part in {result.scale} of the scenario)" if result.scale > 1 else ""
    facts = {
        "scenario": result.name,
        "nodes": f"{result.nodes:,}{scale}",
        "virtual time": f"{result.duration_s:g} s, seed {result.seed}",
        "requests": f"{result.requests:,}: {result.admitted:,} admitted, {result.denied:,} denied",
        "store calls": f"{result.store_calls:,}, {result.store_calls_per_request:.3f} per request",
        "check": f"p50 {result.p50_ms:g} ms, p99 {result.p99_ms:g} ms, p99.9 {result.p999_ms:g} ms",
        "node": f"{result.node_cpu:.1%} of a core for checks",
    }
    if result.gateway_calls:
        alone = f"; {result.undecided:,} requests decided without a node" if result.undecided else ""
        per_request = result.gateway_calls / result.requests
        facts["gateways"] = f"{result.gateway_calls:,} calls to nodes, {per_request:.3f} per request{alone}"
    if result.degraded or result.errors:
        facts["without the store"] = f"{result.degraded:,} requests, at most {result.node_outage_s:.1f} s on one node"
    if result.cost is not None:
        facts["cost"] = f"{result.cost['total']:,.0f} {result.cost['currency']} per month"
    yield from table([*facts.items()], width=out.width)
    yield ""
    rows = []
    for each in result.limits:
        bound = "none" if each.bound is None else f"{each.bound:,}"
        holds = out.paint("yes", GREEN) if each.bound_holds else out.paint("no", RED)
        rows.append([each.limit, each.allows, f"{each.admitted:,}", f"{each.largest_overshoot:,}", bound, holds])
    yield from titled_table(["limit", "allows", "admitted", "largest overshoot", "bound", "holds"], rows, out)
    yield ""
    loads = [
        [
            each.name,
            f"{each.calls_per_s:,.0f}",
            f"{each.peak_calls_per_s:,}",
            f"{each.cpu:.1%}",
            f"{each.peak_cpu:.1%}",
        ]
        for each in result.shards
    ]
    yield from titled_table(["shard", "calls/s", "peak calls/s", "CPU", "peak CPU"], loads, out)
