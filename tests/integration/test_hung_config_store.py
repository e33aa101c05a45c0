"""A config store that hangs, and neither answers nor hangs up: every wait ends, nothing is half done, gates go on.
So does every wait for a resolver that hangs."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import make_url, text

from headgate import Limiter
from headgate.control.admin import AdminServer, Tokens
from headgate.control.config import ConfigStore, ConfigUnavailable, engine
from headgate.control.config.engine import SILENCE_TIMEOUT_S, open_engine, read_transaction, write_transaction
from headgate.control.config.watcher import ConfigSource
from headgate.control.service import AdminService
from headgate.gate.gate import Gate
from headgate.testing import FakeRequest
from support.postgres import PostgresServer
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

BY: Any = {"author": "ada", "reason": "test"}
POLICY = "limits: [{name: search, by: tenant, bucket: 1000/minute}]\n"
SOON = 2.5 * SILENCE_TIMEOUT_S
"""Seconds: far from what TCP would take, and enough for a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


@pytest.fixture
def store(server: PostgresServer) -> Iterator[ConfigStore]:
    server.resume()
    with closing(ConfigStore(server.fresh_url(), secret="sixteen bytes or more")) as made:
        made.put_policy(POLICY, **BY)
        yield made
        server.resume()


def url_of(store: ConfigStore) -> str:
    return store.engine.url.render_as_string(hide_password=False).replace("+psycopg", "")


def test_hung_config_store_is_reported_within_seconds(server: PostgresServer, store: ConfigStore) -> None:
    counters = Limiter()
    service = AdminService(store, counters=counters, secret="sixteen bytes or more")
    tokens = Tokens(url_of(store))
    made = tokens.make("ada", "admin", by="the test")
    block = {"who": {"kind": "tenant", "value": "acme"}, "reason": "test"}
    with (
        closing(tokens),
        AdminServer(service, tokens, port=0) as admin,
        httpx.Client(base_url=admin.url, timeout=60, headers={"Authorization": f"Bearer {made.text}"}) as program,
        httpx.Client(base_url=admin.url, timeout=60, headers={"Accept": "text/html"}) as person,
    ):
        assert person.get("/enter", params={"code": tokens.create_code(made.token)}).status_code in (200, 303)
        assert person.get("/blocks").status_code == 200
        server.pause()
        began = time.monotonic()
        refused = program.post("/api/v1/blocks", json=block, headers={"Idempotency-Key": "one"})
        page = person.get("/blocks")
        many = [0.0] * 30

        def ask(number: int) -> None:
            at = time.monotonic()
            assert httpx.get(f"{admin.url}/blocks", cookies=person.cookies, timeout=60).status_code == 503
            many[number] = time.monotonic() - at

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(len(many))]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        took = time.monotonic() - began
        assert (refused.status_code, refused.json()["type"], refused.headers["Retry-After"]) == (
            503,
            "config-away",
            "5",
        )
        assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
        assert "The config store is unavailable" in page.text
        assert 'href="/blocks">Try again' in page.text
        assert took < 2 * SOON
        assert all(many), "each has had an answer"
        assert not counters.blocked()
        assert program.get("/health").status_code == 200
        server.resume()

        def answers() -> bool:
            return program.get("/api/v1/blocks").status_code == 200

        wait_until(answers, "the server to ask again", timeout=SOON)
        assert program.get("/api/v1/blocks").json()["items"] == []
        assert store.version == 1
        done = program.post("/api/v1/blocks", json=block, headers={"Idempotency-Key": "two"})
        assert (done.status_code, done.json()["version"]) == (200, 2)
        assert person.get("/blocks").status_code == 200
    counters.close()


def test_gate_goes_on_and_says_how_old_its_policy_is(
    server: PostgresServer, store: ConfigStore, caplog: pytest.LogCaptureFixture
) -> None:
    feed: Any = ConfigSource(url_of(store))
    gate = Gate(feed, identities={"tenant": lambda _: "acme"}, health_path="/headgate/health")
    following: Any = gate.policy_watcher
    wait_until(lambda: following.age < 1, "the gate to follow")
    server.pause()
    waits = []
    began = time.monotonic()
    while following.error is None and time.monotonic() < began + 4 * SOON:
        at = time.monotonic()
        assert gate.admit(FakeRequest()).allowed
        waits.append(time.monotonic() - at)
        time.sleep(0.02)
    assert isinstance(following.error, ConfigUnavailable)
    assert sorted(waits)[len(waits) // 2] < 0.05, "no request has waited for the config store"
    assert max(waits) < SILENCE_TIMEOUT_S / 2
    assert following.age > SILENCE_TIMEOUT_S
    assert gate.policy_version == "1"
    assert f":{server.port}/postgres" in (gate.policy_error or "")
    assert f":{server.port}/postgres" in caplog.text
    page = gate.admit(FakeRequest("/headgate/health")).refusal
    assert page is not None
    assert json.loads(page.body)["policy_error"] == "the config store is unavailable", "and not where it is"
    assert "version 1 stays in force, 0:00:" in caplog.text
    server.resume()
    wait_until(lambda: following.error is None and following.age < 1, "the gate to be in touch again", timeout=4 * SOON)
    store.put_policy(POLICY.replace("1000/", "2000/"), **BY)
    wait_until(lambda: gate.policy_version == "2", "the change to arrive", timeout=SOON)
    gate.close()


def test_what_was_begun_when_the_server_hung_is_undone(server: PostgresServer, store: ConfigStore) -> None:
    def lose() -> None:
        with write_transaction(store.engine) as connection:
            connection.execute(text("DELETE FROM headgate_versions"))
            server.pause()
            connection.execute(text("SELECT 1"))

    with pytest.raises(ConfigUnavailable, match="no response from the server"):
        lose()
    server.resume()
    time.sleep(engine.COOLDOWN_S)
    assert store.version == 1
    assert store.assign(("tenant", "acme"), None, **BY) is not None, "nobody holds the lock of writers"


def test_transactions_have_timeouts_on_the_server(store: ConfigStore) -> None:
    names = ("statement_timeout", "idle_in_transaction_session_timeout")

    def shown(url: str) -> list[str | None]:
        engine = open_engine(url)
        with engine.connect() as connection:
            return [connection.scalar(text(f"SHOW {name}")) for name in names]

    assert shown(url_of(store)) == ["10s", "1min"]
    own = "".join(f"%20-c{name}%3D7s" for name in names)
    assert shown(f"{url_of(store)}{own}") == ["7s", "7s"], "what the URL says holds"


def test_writer_waits_for_another_longer_than_for_a_silent_server(store: ConfigStore) -> None:
    """Silence has a reason then."""
    done: list[Any] = []
    with write_transaction(store.engine):
        other = threading.Thread(target=lambda: done.append(store.assign(("tenant", "acme"), None, **BY)))
        other.start()
        time.sleep(SILENCE_TIMEOUT_S + 1)
        assert not done
    other.join()
    assert done[0].number == 2


def test_write_lock_timeout_is_reported(store: ConfigStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOCK_TIMEOUT_S", 1.0)
    with (
        closing(ConfigStore(url_of(store))) as hasty,
        write_transaction(store.engine),
        pytest.raises(ConfigUnavailable, match="statement timeout"),
    ):
        hasty.assign(("tenant", "acme"), None, **BY)
    assert store.version == 1


def named(url: str, *hosts: str) -> str:
    """The same server, under these names."""
    parsed = make_url(url)
    options = f"options={quote(str(parsed.query['options']))}"
    where = "&".join(f"host={host}:{parsed.port}" for host in hosts)
    return f"postgresql://{parsed.username}@/{parsed.database}?{options}&{where}"


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While the event is not set, nobody hears from the resolver which address hung.invalid has; else it is
    localhost's. The system's own cannot be made to hang for one process."""
    answers = threading.Event()
    asked = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "hung.invalid":
            answers.wait()
            host = "localhost"
        return asked(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield answers
    answers.set()


def resolving() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("headgate-resolve")]


def test_hanging_resolver_delays_no_request(store: ConfigStore, resolver: threading.Event) -> None:
    url = named(url_of(store), "hung.invalid")
    began = time.monotonic()
    with pytest.raises(ConfigUnavailable, match="the name of the server was not resolved within 4 seconds"):
        ConfigStore(url)
    assert SILENCE_TIMEOUT_S <= time.monotonic() - began < SOON
    engine = open_engine(url)
    waits: list[float] = []

    def ask() -> None:
        at = time.monotonic()
        with pytest.raises(ConfigUnavailable), read_transaction(engine):
            pass
        waits.append(time.monotonic() - at)

    before = len(resolving())
    asking = [threading.Thread(target=ask) for _ in range(20)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert len(waits) == len(asking)
    assert max(waits) < SOON
    assert len(resolving()) - before < len(asking) // 2, "they have waited for the same answer"
    at = time.monotonic()
    ask()
    assert time.monotonic() - at < SILENCE_TIMEOUT_S / 2, "who comes then need not find out by waiting"
    resolver.set()

    def answers() -> bool:
        try:
            with read_transaction(engine) as connection:
                return bool(connection.scalar(text("SELECT 1")))
        except ConfigUnavailable:
            return False

    wait_until(answers, "the server to be asked again", timeout=SOON)


def test_name_that_hangs_or_is_unknown_leaves_the_other_servers(store: ConfigStore, resolver: threading.Event) -> None:
    for hosts in (("localhost",), ("127.0.0.1", "hung.invalid"), ("unknown.invalid", "localhost")):
        with closing(ConfigStore(named(url_of(store), *hosts))) as found:
            assert found.version == 1, hosts
    with pytest.raises(ConfigUnavailable, match=r"failed to resolve host 'unknown\.invalid'"):
        ConfigStore(named(url_of(store), "unknown.invalid"))
