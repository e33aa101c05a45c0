"""What the tests share: real servers, each started once, when the first test asks for it."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from headgate import Limiter
from headgate.gate.admission import UNLIMITED, enter_context
from headgate.testing import FakeClock
from support.limiter_probe import START_US, LimiterProbe
from support.servers import RedisCluster, RedisServer, SentinelSet, ShardSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from support.postgres import PostgresServer

settings.register_profile("ci", max_examples=60, derandomize=False, deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HEADGATE_HYPOTHESIS", "ci"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell runs in the background ignores interrupts, and so would all programs that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def outside_of_any_request() -> None:
    """Threads that serve one request after the other keep the last one's admission until the next comes."""
    enter_context(UNLIMITED)


@pytest.fixture(autouse=True, scope="session")
def lists_are_stored_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reputation lists are not stored in the home directory of the developer."""
    os.environ["HEADGATE_CACHE"] = str(tmp_path_factory.mktemp("lists"))


DEPLOYMENTS = ("redis7", "valkey9", "cluster", "sentinel")
REMOTE = (*DEPLOYMENTS, "sharded")


@pytest.fixture(scope="session")
def redis7() -> Iterator[RedisServer]:
    with RedisServer("redis") as server:
        yield server


@pytest.fixture(scope="session")
def valkey9() -> Iterator[RedisServer]:
    with RedisServer("valkey") as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def sentinel() -> Iterator[SentinelSet]:
    with SentinelSet() as sentinels:
        yield sentinels


@pytest.fixture(scope="session")
def sharded() -> Iterator[ShardSet]:
    with ShardSet() as shards:
        yield shards


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that only this test uses, and may break."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    from support.postgres import PostgresServer

    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty ledger: copying it is faster than migrating another one for each test."""
    from headgate.quotas import Ledger

    file = tmp_path_factory.mktemp("ledger") / "quota.db"
    with closing(Ledger(f"sqlite:///{file}")):
        return file


@pytest.fixture(params=["sqlite", "postgresql"])
def config_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty config store of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/config.db"
    fresh: Callable[[], str] = request.getfixturevalue("postgres").fresh_url
    return fresh()


@pytest.fixture(scope="module")
def brokers() -> Iterator[str]:
    """The addresses of Kafka brokers."""
    from support.kafka import mock_brokers

    with mock_brokers() as addresses:
        yield addresses


@pytest.fixture(scope="module")
def clickhouse() -> Iterator[str]:
    """The address of a ClickHouse server."""
    from support.clickhouse import clickhouse_server

    with clickhouse_server() as address:
        yield address


@pytest.fixture(
    scope="module"
)  # not longer: Playwright keeps an event loop running, in which no test could run its own
def browser() -> Iterator[Browser]:
    from support.chromium import chromium_browser

    with chromium_browser() as browser:
        yield browser


@pytest.fixture(scope="session", params=DEPLOYMENTS)
def deployment_url(request: pytest.FixtureRequest) -> str:
    """The URL of each single deployment in turn: for tests that also look into the server."""
    return _url(request)


@pytest.fixture(scope="session", params=REMOTE)
def remote_url(request: pytest.FixtureRequest) -> str:
    """The URL of each shared store in turn; a test that breaks its server makes one of its own."""
    return _url(request)


@pytest.fixture(scope="session", params=("memory", *REMOTE))
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of every store in turn, the one in memory included."""
    return _url(request)


def _url(request: pytest.FixtureRequest) -> str:
    url: str = "memory://" if request.param == "memory" else request.getfixturevalue(request.param).url
    return url


@pytest.fixture(scope="session")
def fresh_name() -> Callable[[], str]:
    """Makes limit names that were never used: for tests, as those of Hypothesis, that need many."""
    run, numbers = secrets.token_hex(3), itertools.count(1)
    return lambda: f"t{run}-{next(numbers)}"


@pytest.fixture
def unique(fresh_name: Callable[[], str]) -> str:
    """A limit name of this test's own, so that tests share a server and never meet."""
    return fresh_name()


@pytest.fixture
def probe(store_url: str, unique: str) -> Iterator[LimiterProbe]:
    """A limiter on every store in turn, with a fake clock and an identity of its own."""
    clock = FakeClock(START_US)
    with Limiter(store_url, clock=clock) as limiter:
        yield LimiterProbe(limiter, clock, unique)
