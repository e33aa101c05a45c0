"""Simulated regions: each mode keeps its bound, connected and cut off, on the code of production."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit, Limiter, bounds
from headgate.cli import main
from headgate.regions import worker
from headgate.simulation.scenario import NetworkModel, ServerModel, read_scenario
from headgate.simulation.simulated_regions import RegionUsage, SimulatedRegionClient
from headgate.simulation.simulated_store import SimulatedShard, SimulatedStore
from headgate.simulation.simulator import simulate
from headgate.simulation.virtual_time import VirtualTime
from headgate.stores.redis.region_client import RegionClient
from support.paths import ROOT

if TYPE_CHECKING:
    from headgate.simulation.simulator import SimulationResult
    from support.servers import RedisServer

CUT = "faults: [{kind: partition, at: 2 s, for: 2 s, region: us}]\n"


def run(
    mode: str, *, allows: str = "6000/minute, burst 500", more: str = "", region: str = "", clients: str = ""
) -> SimulationResult:
    """Three regions, whose clients together send six times what the limit allows."""
    return simulate(
        read_scenario(
            f"""
duration: 6 s
nodes: {{count: 3, on_failure: local}}
regions: {{names: [eu, us, ap], round_trip: 80 ms}}
limits: {{api: {{allows: "{allows}", region: {mode}}}}}
traffic: [{{limits: api, rate: 600/second{region}{clients}}}]
{more}"""
        )
    )


@pytest.mark.parametrize("more", ["", CUT], ids=["connected", "cut off"])
@pytest.mark.parametrize("mode", ["regional", "divided", "reserved", "reconciled", "central"])
def test_bound_of_each_mode_holds(mode: str, more: str) -> None:
    result = run(mode, more=more)
    [limit] = result.limits
    assert limit.bound_holds
    if mode in ("divided", "reserved") or (mode == "central" and not more):
        assert limit.largest_overshoot == 0
        assert 550 < limit.admitted <= 1.05 * 1100
    if mode == "regional":
        assert limit.largest_overshoot > 1500, "each region admits the limit"
        assert limit.admitted == pytest.approx(3 * 1100, rel=0.02)
    if mode == "reconciled":
        assert limit.largest_overshoot > 0, "regions know of the others only after a second"


def test_overshoot_of_reconciled_limits_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exchange between regions, the bound of connected regions does not hold."""
    assert run("reconciled", allows="6000/minute, burst 100").bounds_hold
    monkeypatch.setattr(worker.RegionExchange, "run_once", lambda self: None)
    assert not run("reconciled", allows="6000/minute, burst 100").bounds_hold


def test_central_limits_take_a_round_trip_to_the_home_region() -> None:
    home, other = (
        run("central", region=f", region: {region}", clients=", clients: 1000").p50_ms for region in ("eu", "us")
    )
    assert home < 5
    assert other == pytest.approx(80, rel=0.3)


def test_one_region_uses_the_share_of_its_mode() -> None:
    admitted = {
        mode: run(mode, allows="600/minute, fixed_window", region=", region: us").limits[0].admitted
        for mode in ("divided", "reserved", "central")
    }
    assert admitted["divided"] == 200
    assert 500 < admitted["reserved"] <= 600
    assert admitted["central"] == 600


def test_regions_are_deterministic() -> None:
    first, second = [json.dumps(run("reserved", more=CUT).as_dict()) for _ in range(2)]
    assert first == second


def test_shipped_scenario_is_that_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text("utf-8")
    assert main(["simulate", str(ROOT / "examples" / "scenarios" / "regions.yaml")]) == 0
    assert f"$ headgate simulate examples/scenarios/regions.yaml\n{capsys.readouterr().out}```" in page


# ------------------------------------------------------------------ the twin of region_usage.lua


def simulated_client() -> SimulatedRegionClient:
    shard = SimulatedShard(0, VirtualTime(), ServerModel())
    store = SimulatedStore([shard], NetworkModel(), budget=1.0, random=Random(1), is_cut_off=lambda number: False)
    return SimulatedRegionClient(store.background_client())


def state(client: Any, reader: dict[str, Any]) -> dict[str, Any]:
    """Everything that a client can read; `reader` is the position of one that reads on."""
    page = client.read_changes(reader.get("epoch", ""), reader.get("number", 0))
    reader.update(epoch=page.epoch, number=page.number)
    shared = {name: text for name, text in client.shared_usage().items() if not name.startswith(("%epoch", "%flush"))}
    shared.pop("%number", None)
    return {
        "changes": (page.number, page.fields),
        "shared": shared,
        "imported": client.imported("us"),
        "statuses": client.statuses(),
    }


def test_shared_usage_is_that_of_redis(server: RedisServer, unique: str) -> None:
    with closing(Limiter(server.url, namespace=unique)) as limiter:
        real, twin = RegionClient(limiter.engine.store.background_client()), simulated_client()
        readers: list[dict[str, Any]] = [{}, {}]
        random = Random(7)
        for step in range(300):
            name = f'["api","token_bucket",10,1000,10,"c{random.randrange(4)}",{random.randrange(3)}]'
            flush, amounts = step // 2, (random.randrange(5), random.randrange(3))
            numbers = " ".join(str(random.randrange(20)) for _ in range(4))
            process, kind = f"p{random.randrange(2)}", random.randrange(8)
            reports = {f"ap\ne\n{name}": f"{flush} {amounts[0]}", "ap\n\n%time": f"{step // 4}"}
            read: list[Any] = []
            for client, reader in zip((real, twin), readers, strict=True):
                match kind:
                    case 0 | 1:
                        client.add_usage({name: amounts}, process=process, flush=flush)
                    case 2:
                        client.save_imported("us", {name: numbers})
                    case 3:
                        client.post(f"%message:{step % 3}", f"{step}")
                    case 4:
                        client.note_position("us", f"epoch {step}")
                    case 5:
                        client.publish_status(process, f"{step}")
                    case 6:
                        page = client.exchange(reader.get("epoch", ""), reader.get("number", 0), "ap\n", reports)
                        read.append((page.number, page.fields, page.has_more))
                    case _:
                        client.drop_usage([name])
                        client.drop_imported("us", [name])
                        client.drop_statuses([process])
            assert read[:1] == read[1:], f"step {step}"
            if step % 5 == 0:
                assert state(real, readers[0]) == state(twin, readers[1]), f"step {step}"
        real.close()


def test_usage_of_a_store_that_lost_its_data_has_another_epoch() -> None:
    shard = SimulatedShard(0, VirtualTime(), ServerModel())
    before = shard.usage
    before.publish("a", "1 0")
    shard.restart(loses_data=True)
    shard.usage.publish("a", "2 0")
    assert isinstance(shard.usage, RegionUsage)
    assert shard.usage.read(before.epoch, before.number).fields == {"a": "2 0"}


def test_overshoot_bound_of_a_span_is_that_of_all_regions() -> None:
    limit = Limit(60, timedelta(minutes=1), burst=10, region="regional")
    assert bounds.regions(limit, 3) == 2 * 70
    assert bounds.regions(limit, 3, 5_000_000) == 2 * 15
    window = Limit(60, timedelta(minutes=1), algorithm="fixed_window", region="regional")
    assert bounds.regions(window, 3, 5_000_000) == 120
