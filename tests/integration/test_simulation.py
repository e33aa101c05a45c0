"""A real fleet and its simulation: four processes, one Redis, a hot key and an outage."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from headgate import Limit
from headgate.bounds import OvershootMeter
from headgate.simulation.scenario import Fault, read_scenario
from headgate.simulation.simulator import simulate
from support.faults import paused

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

NODES = 4
SECONDS = 4.0
OUTAGE_S = (1.5, 0.7)
HOT, COLD = "800/second", "100/minute"

NODE = f"""
import json, random, sys, time
from headgate import Limit, Limiter
url, namespace, node, begin = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
hot, cold = Limit.parse({HOT!r}, name="hot"), Limit.parse({COLD!r}, name="cold")
rng = random.Random(node)
limiter = Limiter(url, namespace=namespace, on_failure="local", budget=0.1, nodes={NODES})
limiter.engine.configure(budget=0.1, share=limiter.engine.local.fleet.share, nodes={NODES}, remember=10_000,
                         lease_us=100_000, announced=[hot], never_leased=[])
sent, admitted = [], []
due = begin
while due < begin + {SECONDS}:
    time.sleep(max(0.0, due - time.time()))
    name = "hot" if rng.random() < 0.6 else "cold"
    client = "acme" if name == "hot" else f"key-{{int(500 * rng.random() ** 2)}}"
    at = time.time()
    decision = limiter.check((hot if name == "hot" else cold).by(client))
    sent.append((at, name, client))
    if decision.allowed:
        decided = time.time() if decision.degraded or not decision.at_us else decision.at_us / 1e6
        admitted.append((decided, name, client))
    due += rng.expovariate(500)
print(json.dumps({{"calls": limiter.stats["calls"], "sent": sent, "admitted": admitted}}))
limiter.close()
"""


def test_simulation_agrees_with_a_real_fleet(server: RedisServer, unique: str, tmp_path: Path) -> None:
    begin = time.time() + 1.5
    command = [sys.executable, "-c", NODE, server.url, unique]
    nodes = [
        subprocess.Popen([*command, str(number), str(begin)], stdout=subprocess.PIPE, text=True)
        for number in range(NODES)
    ]
    time.sleep(max(0.0, begin + OUTAGE_S[0] - time.time()))
    began = time.time()
    with paused(server):
        time.sleep(OUTAGE_S[1])
    ended = time.time()
    found = [json.loads(node.communicate(timeout=60)[0]) for node in nodes]

    first = min(at for node in found for at, _, _ in node["sent"])
    for name in ("hot", "cold"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["time", "client", "node"])
            for number, node in enumerate(found):
                rows.writerows([f"{at:.6f}", client, number] for at, limit, client in node["sent"] if limit == name)
    scenario = read_scenario(
        f"""
duration: 30 s
nodes: {{count: {NODES}, on_failure: local, budget: 100 ms}}
network: {{round_trip: 200 us}}
limits: {{hot: {{allows: {HOT}, lease: always}}, cold: {COLD}}}
traffic:
  - {{limits: hot, log: {tmp_path / "hot.csv"}}}
  - {{limits: cold, log: {tmp_path / "cold.csv"}}}
"""
    )
    outage = Fault("store_down", began - first, ended - began, how="hang")
    simulated = simulate(replace(scenario, faults=(outage,)))

    requests = sum(len(node["sent"]) for node in found)
    assert simulated.requests == requests
    real = sum(node["calls"] for node in found) / requests
    assert simulated.store_calls_per_request == pytest.approx(real, rel=0.1)
    assert simulated.degraded > 0
    for limit in simulated.limits:
        meters: dict[str, OvershootMeter] = {}
        for at, name, client in sorted(entry for node in found for entry in node["admitted"]):
            if name == limit.limit:
                parsed = Limit.parse(HOT if name == "hot" else COLD)
                meters.setdefault(client, OvershootMeter(parsed)).add(round(at * 1_000_000))
        assert limit.bound is not None
        largest = max(meter.largest for meter in meters.values())
        assert (largest <= limit.bound) == limit.bound_holds
        assert limit.bound_holds
