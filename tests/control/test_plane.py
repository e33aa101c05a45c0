"""`control=` connects an app to its control plane: policy, decision log, node status and metrics, in every adapter."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from flask import Flask
from prometheus_client import CollectorRegistry, generate_latest

from headgate.adapters import aiohttp as aiohttp_adapter
from headgate.adapters import asgi, fastapi, grpc, wsgi
from headgate.adapters.flask import Headgate
from headgate.control.config import ConfigStore, default_decision_log_url
from headgate.control.plane import ControlPlane
from headgate.errors import InvalidConfiguration, InvalidPolicy
from headgate.gate.gate import Gate
from headgate.policy.loader import read
from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.decision_log.sinks import open_reader
from headgate.telemetry.fleet.aggregator import FleetAggregator
from headgate.telemetry.fleet.status_store import open_status_store
from headgate.testing import FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import RedisServer

SECRET = "a secret of at least sixteen bytes"
TWO_AN_HOUR = "limits: [{name: requests, by: ip, bucket: 2/hour}]"
ONE_AN_HOUR = "limits: [{name: requests, by: ip, bucket: 1/hour}]"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Replaces prometheus-client's default registry, which all tests of a process share."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    return registry


@pytest.fixture
def url(tmp_path: Path, registry: CollectorRegistry) -> str:
    return f"sqlite:///{tmp_path}/headgate.db"


@pytest.fixture
def config(url: str) -> Iterator[ConfigStore]:
    """A config store with a policy."""
    with closing(ConfigStore(url, secret=SECRET)) as store:
        store.put_policy(TWO_AN_HOUR, author="ada", reason="first policy")
        yield store


def answers(gate: Gate, count: int) -> list[bool]:
    return [gate.admit(FakeRequest()).allowed for _ in range(count)]


def denied_in_log(url: str) -> int:
    log = default_decision_log_url(url)
    assert log is not None
    if not Path(log.removeprefix("sqlite:///")).exists():
        return 0  # it is created with its first record
    with closing(open_reader(log)) as reader:
        return sum(
            round(each.requests)
            for each in reader.counts(since_us=0, until_us=2**52, width_us=2**52)
            if each.outcome == "denied"
        )


def test_one_option_connects_policy_log_status_and_metrics(
    url: str, config: ConfigStore, registry: CollectorRegistry
) -> None:
    board = open_status_store("memory://")
    with closing(Gate(control=ControlPlane(url, node="plane-test"), secret=SECRET)) as gate:
        assert answers(gate, 3) == [True, True, False]
        gate.control.status.report()
        (node,) = [each for each in FleetAggregator(board).gather().nodes if each.name.startswith("plane-test:")]
        assert (node.state, node.policy_version) == ("ready", "1")
        assert b"rate_limiter_decisions_total" in generate_latest(registry)
        config.put_policy(ONE_AN_HOUR, author="ada", reason="less")
        gate.policy_watcher.look()
        assert gate.policy_version == "2"
    assert not [name for name in board.read("beats/") if "plane-test" in name], "a node that has left is not shown"
    assert denied_in_log(url) == 1, "closing the gate flushes the log"


def test_status_goes_to_the_store_that_the_gate_counts_in(
    url: str, config: ConfigStore, redis7: RedisServer, unique: str
) -> None:
    with closing(Gate(None, redis7.url, control=url, secret=SECRET, namespace=unique)) as gate:
        gate.control.status.report()
        with closing(open_status_store(redis7.url, namespace=unique)) as board:
            assert len(FleetAggregator(board).gather().nodes) == 1


def test_policy_file_becomes_the_first_version(url: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(TWO_AN_HOUR)
    with closing(Gate(file, control=url, secret=SECRET)) as gate:
        assert answers(gate, 3) == [True, True, False]
    with closing(ConfigStore(url)) as store:
        (version,) = store.history()
        assert (version.reason, version.what) == ("initial policy", "added policy document limits.yaml")


def test_saved_policy_wins_over_the_file_and_the_log_says_so(
    url: str, config: ConfigStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(ONE_AN_HOUR)
    with closing(Gate(file, control=url, secret=SECRET)) as gate:
        assert answers(gate, 3) == [True, True, False]
    assert f"{file} is not used" in caplog.text
    caplog.clear()
    file.write_text(TWO_AN_HOUR)
    Gate(file, control=url, secret=SECRET).close()
    assert caplog.text == ""


def test_invalid_file_is_not_saved(url: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("limits: [{by: ip, bukcet: 2/hour}]")
    with pytest.raises(InvalidPolicy, match="did you mean 'bucket'"):
        Gate(file, control=url, secret=SECRET)
    with closing(ConfigStore(url)) as store:
        assert store.document() is None


def test_without_any_policy_it_says_how_to_save_one(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match="has no policy yet: pass the path of a policy file"):
        Gate(control=url, secret=SECRET)


def test_policy_of_the_app_itself_stays(url: str) -> None:
    with closing(Gate(read(ONE_AN_HOUR), control=url, secret=SECRET)) as gate:
        assert answers(gate, 2) == [True, False]
    assert denied_in_log(url) == 1


def test_log_that_the_app_has_opened_is_used_and_left_open(url: str, config: ConfigStore, tmp_path: Path) -> None:
    with DecisionLog(f"sqlite:///{tmp_path}/own.db", secret=SECRET) as log:
        with closing(Gate(control=url, secret=SECRET, on_decision=log)) as gate:
            assert gate.control.log is log
            assert answers(gate, 3) == [True, True, False]
        assert log.flush()
        assert log.stats.written >= 1
    assert not (tmp_path / "headgate-decisions.db").exists()


def test_log_elsewhere_and_no_log(url: str, config: ConfigStore, tmp_path: Path) -> None:
    log = f"sqlite:///{tmp_path}/elsewhere.db"
    Gate(control=ControlPlane(url, log=log), secret=SECRET).close()
    with closing(Gate(control=ControlPlane(url, log=None), secret=SECRET)) as gate:
        assert gate.control.log is None
    assert not (tmp_path / "headgate-decisions.db").exists()


def test_postgresql_names_no_log_and_the_gate_says_so(caplog: pytest.LogCaptureFixture, registry: Any) -> None:
    plane = ControlPlane("postgresql://ada:hidden@127.0.0.1:1/headgate")
    with closing(Gate(read(ONE_AN_HOUR), control=plane, secret=SECRET)) as gate:
        assert gate.control.log is None
    assert "no decision log: only" in caplog.text
    assert "hidden" not in caplog.text


def test_without_a_secret_it_says_what_to_set(url: str, config: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    with pytest.raises(InvalidConfiguration, match="set HEADGATE_SECRET"):
        Gate(control=url)


@pytest.mark.parametrize(("control", "message"), [("mysql://h/x", "sqlite:///headgate.db"), (7, "ControlPlane")])
def test_another_control_is_refused(control: Any, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        Gate(control=control)


def test_neither_policy_nor_control_is_an_error() -> None:
    with pytest.raises(TypeError, match="give a policy"):
        Gate()


# ------------------------------------------------------------------ every adapter


def app(*_: Any) -> Any:
    return []


async def async_app(*_: Any) -> None: ...


def flask_gate(options: dict[str, Any]) -> Any:
    flask = Flask("shop")
    flask.config["HEADGATE_CONTROL"] = options.pop("control")
    Headgate(flask, **options)
    return flask.extensions["headgate"].gate


SYNC: dict[str, Callable[[dict[str, Any]], Any]] = {
    "wsgi": lambda options: wsgi.HeadgateMiddleware(app, **options).gate,
    "flask": flask_gate,
    "grpc": lambda options: grpc.HeadgateInterceptor(**options).gate,
}

ASYNC: dict[str, Callable[[dict[str, Any]], Any]] = {
    "asgi": lambda options: asgi.HeadgateMiddleware(async_app, **options).gate,
    "aiohttp": lambda options: aiohttp_adapter.setup(web.Application(), **options),
    "grpc.aio": lambda options: grpc.AsyncHeadgateInterceptor(**options).gate,
    "fastapi": lambda options: fastapi.FastAPILimits(**options).gate,
}


@pytest.mark.parametrize("adapter", SYNC)
def test_every_adapter_for_threads_takes_it(adapter: str, url: str, config: ConfigStore) -> None:
    with closing(SYNC[adapter]({"control": url, "secret": SECRET})) as gate:
        assert gate.policy_version == "1"
        assert answers(gate, 3) == [True, True, False]
    assert denied_in_log(url) == 1


@pytest.mark.parametrize("adapter", ASYNC)
def test_every_adapter_for_asyncio_takes_it(adapter: str, url: str, config: ConfigStore) -> None:
    async def run() -> None:
        gate = ASYNC[adapter]({"control": url, "secret": SECRET})
        allowed = [(await gate.admit(FakeRequest())).allowed for _ in range(3)]
        # The limits of FastAPI's dependencies are in the app's code, and no policy is beside them.
        assert allowed == ([True, True, True] if adapter == "fastapi" else [True, True, False])
        await gate.close()

    asyncio.run(run())
    assert denied_in_log(url) == (0 if adapter == "fastapi" else 1)
