"""The alerts and the dashboard, by a real Prometheus: rules are tried, a gate is scraped, and an outage is seen."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from headgate.adapters.asgi import AsgiRequest
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.quotas import Ledger, QuotaMeter
from headgate.telemetry.prometheus import register, register_meter
from support.paths import ROOT
from support.servers import HOST, RedisServer, ServerError, _port_of, _reserve_port, _spawn, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

OPS = ROOT / "ops"
RULES = OPS / "prometheus" / "alerts.yml"

POLICY = """
lists: {listed: listed.txt}
overload: adaptive
routes:
  - {path: /search, class: search}
limits:
  - {name: per-ip, by: ip, bucket: 5/day, tiers: {pro: 100/day}}
  - {name: watched, by: ip, bucket: 1/day, shadow: true}
"""


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        raise ServerError("there is no promtool: scripts/install-packages servers brings it")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60)


class Prometheus:
    """A server that scrapes one address every half second."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **parameters: str) -> Any:
        with urlopen(f"http://{HOST}:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def number(self, expression: str) -> float | None:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def is_up(self) -> bool:
        try:
            return self.ask("status/buildinfo") is not None
        except OSError:
            return False


@contextmanager
def prometheus(target: int) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        raise ServerError("there is no prometheus: scripts/install-packages servers brings it")
    with closing(_reserve_port()) as reservation, tempfile.TemporaryDirectory(prefix="headgate-") as directory:
        port, home = _port_of(reservation), Path(directory)
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"},
            "rule_files": [f"{RULES}"],
            "scrape_configs": [{"job_name": "api", "static_configs": [{"targets": [f"{HOST}:{target}"]}]}],
        }
        (home / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        with (home / "log").open("wb") as log:
            process = _spawn(
                [
                    binary,
                    f"--config.file={home}/prometheus.yml",
                    f"--storage.tsdb.path={home}/data",
                    f"--web.listen-address={HOST}:{port}",
                ],
                log.fileno(),
            )
        try:
            server = Prometheus(port)
            wait_until(lambda: process.poll() is not None or server.is_up(), "Prometheus to answer")
            if process.poll() is not None:
                raise ServerError(f"Prometheus ended as it started; its log:\n{(home / 'log').read_text()}")
            yield server
        finally:
            process.terminate()
            process.wait(15)


def make_request(client: str) -> AsgiRequest:
    return AsgiRequest({"type": "http", "method": "GET", "path": "/search", "client": (client, 1), "headers": []})


def expressions() -> list[str]:
    """What the dashboard asks for, with its variables filled in."""
    board = json.loads((OPS / "grafana" / "headgate.json").read_text("utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    found += [annotation["expr"] for annotation in board["annotations"]["list"]]
    for variable in ("$job", "$instance", "$gate"):
        found = [each.replace(variable, ".*") for each in found]
    return [each.replace("$__rate_interval", "10s").replace("[5m]", "[10s]") for each in found]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Gate, RedisServer, Prometheus]]:
    registry = CollectorRegistry()
    ledger = Ledger(f"sqlite:///{tmp_path}/quota.db")
    ledger.grant("acme", 1)
    (tmp_path / "listed.txt").write_text("198.51.100.0/24\n")
    with (
        RedisServer() as redis,
        closing(Gate(read(POLICY.replace("listed.txt", f"{tmp_path}/listed.txt")), redis.url, budget=0.5)) as gate,
        QuotaMeter(ledger, wait_s=20) as meter,
    ):
        register(gate, registry)
        register_meter(meter, registry)
        assert [meter.charge("acme", 1) for _ in range(2)] == [True, False]
        web, thread = start_http_server(0, HOST, registry)
        try:
            with prometheus(web.server_port) as server:
                yield gate, redis, server
        finally:
            web.shutdown()
            web.server_close()
            thread.join(5)


def test_rules_are_well_written() -> None:
    told = promtool("check", "rules", RULES)
    assert told.returncode == 0, told.stdout + told.stderr


def test_rules_fire_when_they_should_and_only_then() -> None:
    told = promtool("test", "rules", OPS / "prometheus" / "alerts_test.yml")
    assert told.returncode == 0, told.stdout + told.stderr


def test_prometheus_scrapes_a_gate_draws_its_dashboard_and_pages_when_redis_is_gone(
    served: tuple[Gate, RedisServer, Prometheus],
) -> None:
    gate, redis, server = served
    total = 'sum(rate_limiter_decisions_total{outcome="%s", route_class="search", endpoint="/search"})'
    for client in range(3):
        for _ in range(8):
            gate.admit(make_request(f"203.0.113.{client}"))
    wait_until(lambda: server.number(total % "denied") == 9, "a scrape that tells the denials")
    assert server.number(total % "allowed") == 15
    assert server.number('sum(rate_limiter_shadow_blocked_total{policy="watched"})') == 12
    assert server.number('sum(rate_limiter_rejections_total{tier="none", reason="limit"})') == 9
    assert server.number('rate_limiter_keys{policy="per-ip", by="ip"}') == 3
    assert server.number("sum(rate_limiter_quota_charges_total)") == 1
    assert server.number('sum(rate_limiter_quota_rejections_total{quota="none", reason="exhausted"})') == 1
    answered = server.number("sum(rate_limiter_local_cache_hits_total) + sum(rate_limiter_redis_ops_total)")
    assert answered == 24 + 15  # the shadows were asked for each request that passed
    for client in range(3, 6):  # for the rates of series that are known by now
        gate.admit(make_request(f"203.0.113.{client}"))
    wait_until(lambda: (server.number(f"rate({total[4:-1] % 'allowed'}[10s])") or 0) > 0, "a rate")
    empty = [expression for expression in expressions() if not server.query(expression)]
    quiet = (
        "rate_limiter_actions",
        "rate_limiter_findings_total",
        "rate_limiter_memory",
        "rate_limiter_messages",
        "rate_limiter_outage",
        "store_events_total{kind=~",
        "> 0",
    )
    assert [each for each in empty if not any(part in each for part in quiet)] == []
    assert not server.firing() & {"HeadgateDegraded", "HeadgateScriptErrors", "HeadgateCountsLost"}

    redis.kill()
    gate.admit(make_request("203.0.113.9"))
    wait_until(lambda: "HeadgateDegraded" in server.firing(), "a page")
    assert server.number('rate_limiter_degraded_mode_total{mode="fail_open"}') == 1
    assert server.number("rate_limiter_fallback_mode_total") == 1
