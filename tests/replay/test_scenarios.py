"""Scenarios of abuse evaluated on a log."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import cli

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START = datetime(2026, 2, 20, 10, tzinfo=UTC)
BOTS = [f"10.0.0.{number}" for number in range(60)]
POLICY = """
limits: [{name: per-ip, by: ip, bucket: 100/minute}]
abuse:
  scenarios: {botnet: on, enumeration: shadow, retry-storm: on, credential-stuffing: on}
  allow: [{ip: 10.0.0.7}]
"""


def line(second: float, client: str, method: str, path: str, status: int, agent: str = "curl") -> tuple[float, str]:
    at = f"{START + timedelta(seconds=second):%d/%b/%Y:%H:%M:%S} +0000"
    return second, f'{client} - - [{at}] "{method} {path} HTTP/1.1" {status} 1 "-" "{agent}"\n'


def bots(seconds: int) -> list[tuple[float, str]]:
    """A botnet whose logins succeed, one of each bot per second."""
    return [line(second, bot, "POST", "/login", 200, "bot/1") for second in range(seconds) for bot in BOTS]


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def replay(rows: list[tuple[float, str]], *options: str, policy: str = POLICY) -> Any:
        (tmp_path / "policy.yaml").write_text(policy)
        (tmp_path / "access.log").write_text("".join([text for _, text in sorted(rows)]))
        code = cli.main(["replay", f"{tmp_path}/policy.yaml", f"{tmp_path}/access.log", *options])
        out = capsys.readouterr().out
        return (code, json.loads(out)) if "--json" in options else (code, out)

    return replay


def test_botnet_is_found_and_the_requests_after_it_are_counted(replay: Callable[..., Any]) -> None:
    people = [line(at * 7, "192.0.2.1", "POST", "/login", 200, "bot/1") for at in range(4)]
    _, found = replay([*bots(30), *people], "--json", "--all-clients")
    botnet = found["by_scenario"]["botnet"]
    assert found["found_clients"] == botnet["clients"] == 60
    assert {each["client"] for each in botnet["found"]} == {*BOTS}
    assert botnet["actions"] == {"block": 59}
    first = min(each["at"] for each in botnet["found"])
    assert first <= "2026-02-20T10:00:12Z"
    assert 59 * 17 <= botnet["affected"] <= 59 * 19
    (allowed,) = [each for each in botnet["found"] if each["client"] == "10.0.0.7"]
    assert (allowed["allowed"], allowed["actions"], allowed["affected"]) == (True, [], 0)
    assert "other addresses with the same user agent (bot/1)" in allowed["evidence"]


def test_blocked_requests_do_not_feed_other_scenarios_and_shadow_mode_changes_nothing(
    replay: Callable[..., Any],
) -> None:
    probes = [line(at / 2, "192.0.2.9", "GET", f"/users/{at}", 404) for at in range(200)]
    for mode, refused in (("shadow", False), ("{steps: [block for 1 hour]}", True)):
        scenarios = f"{{enumeration: {mode}, mine: {{by: ip, when: {{requests: 150}}}}}}"
        policy = f"limits: [{{by: ip, bucket: 1000/minute}}]\nabuse: {{scenarios: {scenarios}}}"
        _, found = replay(probes, "--json", policy=policy)
        assert found["by_scenario"]["enumeration"]["clients"] == 1
        assert found["by_scenario"]["mine"]["clients"] == (0 if refused else 1)


def test_rejections_of_the_policy_are_what_scenarios_see(replay: Callable[..., Any]) -> None:
    storm = [line(at / 10, "192.0.2.9", "GET", "/", 200) for at in range(300)]
    _, found = replay(storm, "--json")
    assert found["rejected"] > 100
    assert found["by_scenario"]["retry-storm"]["clients"] == 1
    _, found = replay(storm, "--json", policy=POLICY.replace("100/minute", "1000/minute"))
    assert found["by_scenario"]["retry-storm"]["clients"] == 0


def test_every_report_shows_what_was_found(replay: Callable[..., Any], tmp_path: Path) -> None:
    probes = [line(at, "192.0.2.9", "GET", f"/users/{at}", 404, "<b>") for at in range(80)]
    code, text = replay(probes, "--html", f"{tmp_path}/report.html", "--fail-if", "found_clients > 0")
    assert code == 1
    assert "enumeration (shadow)" in text
    assert "192.0.2.9 requested" in text
    assert "192.0.2.9 requested" in (tmp_path / "report.html").read_text()
    _, markdown = replay(probes, "--markdown")
    assert "| enumeration | 1 |" in markdown


def test_report_says_what_the_log_lacks(replay: Callable[..., Any]) -> None:
    rows = [(second, text.replace(' "-" "bot/1"', "")) for second, text in bots(20)]
    _, found = replay(rows, "--json")
    assert found["by_scenario"]["botnet"]["clients"] == 0
    assert "The log has no user agents, so 'botnet' could not find anything." in found["notes"]


def test_policy_without_scenarios_has_none_in_its_report(replay: Callable[..., Any]) -> None:
    _, found = replay(bots(3), "--json", policy="limits: [{by: ip, bucket: 100/minute}]")
    assert (found["by_scenario"], found["found_clients"]) == ({}, 0)
