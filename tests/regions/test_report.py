"""The report on all regions, read from real stores."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limit, Limiter
from headgate.cli import main
from headgate.policy import read
from headgate.regions.report import WorkerStatus, _overshoot, read_regions_report
from headgate.telemetry.region_overview import read_region_overview, without_addresses
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headgate.regions.report import RegionsReport
    from support.servers import RedisServer

HOUR = timedelta(hours=1)
EXCHANGED = Limit(1000, HOUR, algorithm="fixed_window", region="reconciled", name="exchanged")
LEASED = Limit(10_000, HOUR, algorithm="fixed_window", region="reserved", name="leased")


@pytest.fixture
def urls(redis7: RedisServer, valkey9: RedisServer) -> dict[str, str]:
    return {"eu": redis7.url, "us": valkey9.url}


@pytest.fixture
def limiters(urls: dict[str, str], unique: str) -> Iterator[dict[str, Limiter]]:
    """A limiter in each region."""
    with ExitStack() as stack:
        options: Any = {"regions": urls, "home": "eu", "namespace": unique}
        yield {name: stack.enter_context(closing(Limiter(url, region=name, **options))) for name, url in urls.items()}


def test_report_shows_usage_and_held_tokens(urls: dict[str, str], limiters: dict[str, Limiter], unique: str) -> None:
    def report() -> RegionsReport:
        return read_regions_report(urls, "eu", namespace=unique)

    for name, cost in (("eu", 30), ("us", 12)):
        assert limiters[name].check(EXCHANGED.by("ada"), cost=cost).allowed
        assert limiters[name].check(LEASED.by("ada")).allowed

    def is_exchanged() -> bool:
        eu, us = report().regions
        return (eu.imports[0].known, us.imports[0].known, eu.owed, us.owed) == (12, 30, 0, 0) and eu.held > 0

    wait_until(is_exchanged, "the exchange of usage")
    found = report()
    eu, us = found.regions
    assert (eu.name, eu.is_home, us.name, us.is_home) == ("eu", True, "us", False)
    assert (eu.error, eu.shared, us.shared, eu.imports[0].unread) == (None, 30, 12, 0)
    assert eu.round_trip_ms is not None
    assert eu.age_s is not None
    assert 0 <= eu.age_s < 15
    assert (eu.processes, us.processes) == (1, 1)
    assert found.limit("exchanged").used == {"eu": 30, "us": 12}
    assert found.limit("exchanged").overshoot == 0
    assert found.limit("leased").held["eu"] == eu.held


def test_report_on_regions_without_traffic_is_empty(urls: dict[str, str], unique: str) -> None:
    found = read_regions_report(urls, "eu", namespace=unique)
    assert found.limits == ()
    assert [(each.error, each.shared, each.held, each.owed, each.age_s) for each in found.regions] == [
        (None, 0, 0, 0, None)
    ] * 2


def test_region_that_cannot_be_reached_does_not_hide_the_others(urls: dict[str, str], unique: str) -> None:
    found = read_regions_report({**urls, "asia": "redis://:open-sesame@127.0.0.1:1/0"}, "eu", namespace=unique)
    asia, eu, _ = found.regions
    assert asia.error is not None
    assert "sesame" not in asia.error
    assert (eu.error, [each.unread for each in eu.imports]) == (None, [None, 0])


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"at_us":1,"ages":[],"held":[]}', '{"at_us":1,"ages":{},"held":[1]}']
)
def test_status_of_another_version_is_ignored(text: str) -> None:
    assert WorkerStatus.parse(text) is None


@pytest.mark.parametrize(
    ("limit", "slots", "over"),
    [
        (Limit(10, HOUR, algorithm="fixed_window"), [(4, 6), (4, 7)], 3),
        (Limit(10, HOUR, algorithm="fixed_window"), [(4, 6), (5, 7)], 0),
        (Limit(8, timedelta(seconds=8)), [(100, 8), (100, 4)], 3),
        (Limit(8, timedelta(seconds=8)), [(100, 8), (101, 2)], 0),
        (Limit(8, timedelta(seconds=8), algorithm="sliding_log"), [(100, 8), (100, 9)], 1),
    ],
)
def test_overshoot_is_what_one_store_would_not_have_admitted(
    limit: Limit, slots: list[tuple[int, int]], over: int
) -> None:
    assert _overshoot(limit, slots) == over


POLICY = """
regions: {{home: eu, stores: {{eu: "{eu}", us: "{us}"}}}}
limits:
  - {{name: exchanged, by: global, bucket: "1000/hour, fixed_window", region: reconciled}}
  - {{name: exact, by: global, bucket: 10/hour, region: central}}
  - {{name: own, by: ip, bucket: 10/hour}}
"""


def test_overview_has_the_shared_limits_of_the_policy(
    urls: dict[str, str], limiters: dict[str, Limiter], unique: str
) -> None:
    limiters["us"].check(EXCHANGED.by(), cost=7)
    policy = read(POLICY.format(**urls))

    def exchanged() -> Any:
        return read_region_overview(policy, namespace=unique).limits[0]

    wait_until(lambda: exchanged().used == {"us": 7}, "shared usage")
    overview = read_region_overview(policy, namespace=unique)
    assert [(each.name, each.mode, each.bound, each.over) for each in overview.limits] == [
        ("exchanged", "reconciled", 1000, 0),
        ("exact", "central", 0, None),
    ]
    assert overview.limits[1].latency == "1 round trip to eu, within 500 ms"
    assert overview.troubles == ()


def test_overview_without_regions_says_so() -> None:
    overview = read_region_overview(read("limits: [{by: ip, bucket: 10/hour}]"))
    assert overview.troubles == ("the policy has no regions; add regions: with the stores of all regions",)


def test_command_prints_regions_and_limits(
    urls: dict[str, str], unique: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.format(eu=urls["eu"], us="redis://127.0.0.1:1/0"))
    command = ["regions", "--policy", str(file), "--namespace", unique]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "region"
    assert lines[1].startswith("eu (home)  reachable")
    assert lines[2].startswith("us         unreachable: ")
    assert lines[-1].split("  ")[0] == "exact"
    assert "at most 0 over the limit" in lines[-1]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["regions"]] == ["eu", "us"]
    file.write_text("regions: {home: x}\nlimits: []")
    assert main(command) == 1
    assert "the regions have no stores" in capsys.readouterr().err


def test_addresses_of_stores_can_be_left_out(urls: dict[str, str], unique: str) -> None:
    policy = read(POLICY.format(eu=urls["eu"], us="redis://127.0.0.1:1/0"))
    eu, us = without_addresses(read_region_overview(policy, namespace=unique)).regions
    assert (eu.error, us.error) == (None, "its store cannot be read")
