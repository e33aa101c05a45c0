"""`AdminService`: its views match the gate, its changes are checked, confirmed and attributed, and no API key leaks."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from headgate import HeadgateError, InvalidInput, InvalidPolicy, Limiter
from headgate.control.config import Assignment, ConfigStore, ConfigUnavailable, Conflict, Put
from headgate.control.config.engine import write_transaction
from headgate.control.config.watcher import ConfigSource
from headgate.control.config.writing import ConcurrentChange
from headgate.control.service import (
    ROLES,
    Actor,
    AdminService,
    Change,
    ChangeContext,
    ClientRef,
    NeedsConfirmation,
    NotAllowed,
    NotFound,
    OverrideSpec,
)
from headgate.control.service.client_lookup import mask, short_label
from headgate.control.service.effective_policy import applicable_limits
from headgate.gate.gate import Gate
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log.sinks import open_reader
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.testing import FakeClock
from support.traffic import SECRET, START_US, Request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headgate.control.service.models import LimitUsage
    from support.servers import RedisServer

POLICY = """
tier: free
on_failure: open
routes:
  - {path: /search, class: search, cost: 2}
  - {path: "GET /items/{id}", class: items}
  - {path: "POST /login", on_failure: closed}
  - {path: /health, cost: 0}
limits:
  - {name: search, class: search, by: client, bucket: 100/minute, tiers: {pro: 1000/minute}}
  - {name: login, path: /login, by: ip, bucket: 5/minute, on_failure: closed}
  - {name: strangers, by: ip, bucket: 6000/minute}
  - {name: everybody, by: global, bucket: 90000/minute}
  - {name: seats, by: tenant+user, missing: skip, bucket: 60/minute}
  - {name: pages, path: "/items/{id}", by: tenant+endpoint, missing: skip, bucket: 30/minute, algorithm: fixed_window}
  - {name: watched, path: "/items/{id}", by: tenant, missing: skip, bucket: 7/minute, shadow: true}
clients:
  - {tenant: initech, tier: pro, label: Initech}
  - {ip: 198.51.100.0/24, label: The office}
blocked:
  - {tenant: evil, reason: fraud}
"""

KEY = "sk_live_7Qm2vN8xLpR4"
CLIENTS = Pseudonymizer(SECRET)
ACME, GLOBEX = ClientRef("tenant", "acme"), ClientRef("tenant", "globex")
SUE, OTTO, VERA = Actor("sue", "support"), Actor("otto", "operator"), Actor("vera", "viewer")


class World:
    """A gate that takes its policy from a config store, and a service that looks after it."""

    def __init__(self, url: str, folder: Path, *, store: str = "memory://", namespace: str = "headgate") -> None:
        self.url, self.log_url = url, f"sqlite:///{folder}/decisions.db"
        self.clock = FakeClock(START_US)
        self.config = ConfigStore(url, secret=SECRET, clock=self.clock)
        self.config.put_policy(POLICY, author="ada", reason="begin")
        self.log = DecisionLog(self.log_url, secret=SECRET, sample=1.0, every=0.005, writer="thread")
        identities = {"user": lambda request: request.user, "tenant": lambda request: request.tenant}
        options: Any = {"clock": self.clock, "namespace": namespace}
        self.gate = Gate(
            ConfigSource(url),
            store,
            secret=SECRET,
            on_decision=self.log,
            identities=identities,
            reload_every=None,
            **options,
        )
        self.board = MemoryStatusStore()
        self.reporter = StatusReporter(self.gate, self.board, secret=SECRET, node="web-1", every=None)
        self.counters = self.gate.limiter_view() if store == "memory://" else Limiter(store, **options)
        self.service = self.made()

    def made(self, **other: Any) -> AdminService:
        given = {"counters": self.counters, "log": self.log_url, "status_store": self.board, "secret": SECRET}
        return AdminService(self.config, clock=self.clock, **{**given, **other})

    def send(self, times: int = 1, **request: Any) -> list[bool]:
        return [self.gate.admit(Request(**request)).allowed for _ in range(times)]

    def hear(self) -> None:
        """What the gate does within a second by itself."""
        self.gate.policy_watcher.look()

    def close(self) -> None:
        self.reporter.close()
        self.log.close()
        self.gate.close()
        self.counters.close()
        self.config.close()


@pytest.fixture
def world(empty_store_url: str, tmp_path: Path) -> Iterator[World]:
    """On each kind of database."""
    with closing(World(empty_store_url, tmp_path)) as world:
        yield world


@pytest.fixture
def here(tmp_path: Path, migrated: dict[str, str]) -> Iterator[World]:
    """On SQLite, for what does not depend on the database."""
    if "sqlite" not in migrated:
        migrated["sqlite"] = f"sqlite:///{migrated['directory']}/config.db"
        ConfigStore(migrated["sqlite"]).close()
    shutil.copy(migrated["sqlite"].removeprefix("sqlite:///"), tmp_path / "config.db")
    with closing(World(f"sqlite:///{tmp_path}/config.db", tmp_path)) as world:
        yield world


@pytest.fixture
def office(tmp_path: Path, migrated: dict[str, str]) -> Iterator[AdminService]:
    """A service alone, on SQLite: for what no gate is needed for."""
    if "policy" not in migrated:
        migrated["policy"] = f"{migrated['directory']}/policy.db"
        with a_desk(migrated["policy"]) as service:
            service.policy.put(ChangeContext(OTTO, "begin"), POLICY)
    shutil.copy(migrated["policy"], tmp_path / "config.db")
    with a_desk(f"{tmp_path}/config.db") as service:
        yield service


@pytest.fixture
def furnished(tmp_path: Path, migrated: dict[str, str]) -> Iterator[AdminService]:
    """A service alone, with something of everything that can be removed."""
    if "furnished" not in migrated:
        migrated["furnished"] = f"{migrated['directory']}/furnished.db"
        with a_desk(migrated["furnished"]) as service:
            service.policy.put(ChangeContext(OTTO, "set up"), POLICY)
            service.overrides.add(ChangeContext(SUE, "set up"), GLOBEX, OverrideSpec("95/minute", limit="search"))
            service.blocks.add(ChangeContext(SUE, "set up"), ClientRef("tenant", "kept-out"))
            service.blocks.add(ChangeContext(OTTO, "set up"), ClientRef("ip", "198.51.100.0/28"))
            service.clients.assign_tier(ChangeContext(SUE, "set up"), ClientRef("tenant", "put-in"), "pro")
            service.policy.set_tier(ChangeContext(OTTO, "set up"), "free", "search", "90/minute")
            service.policy.set_route(ChangeContext(OTTO, "set up"), "/exports", 4)
    shutil.copy(migrated["furnished"], tmp_path / "config.db")
    with a_desk(f"{tmp_path}/config.db") as service:
        yield service


@contextmanager
def a_desk(file: str) -> Iterator[AdminService]:
    clock = FakeClock(START_US)
    config = ConfigStore(f"sqlite:///{file}", secret=SECRET, clock=clock)
    with closing(config), Limiter(clock=clock) as counters:
        yield AdminService(config, counters=counters, secret=SECRET, clock=clock)


def standing(service: AdminService, who: ClientRef, limit: str) -> LimitUsage:
    (found,) = [each for each in service.clients.get(who).limits if each.limit == limit]
    return found


def in_days(world: World, days: float) -> datetime:
    return datetime.fromtimestamp(world.clock.now_us() / 1_000_000, UTC) + timedelta(days=days)


def codes(error: pytest.ExceptionInfo[NeedsConfirmation]) -> list[str]:
    return [risk.code for risk in error.value.risks]


# ------------------------------------------------------------------ one client


def test_client_is_shown_with_its_limits_and_where_they_come_from(world: World) -> None:
    service = world.service
    service.clients.assign_tier(ChangeContext(SUE, "has paid"), ACME, "pro", label="Acme Inc")
    service.overrides.add(
        ChangeContext(SUE, "launch"), ACME, OverrideSpec("5000/minute", limit="search", valid_until=in_days(world, 2))
    )
    service.overrides.add(ChangeContext(SUE, "just so"), ACME, OverrideSpec("9/minute", limit="watched"))
    view = service.clients.get(ACME)
    assert (view.who, view.label, view.tier, view.tier_from) == (ACME, "Acme Inc", "pro", "assigned")
    assert (view.block, view.can_count, view.troubles) == (None, True, ())
    assert [(each.limit, each.bucket, each.from_, each.override_id, each.routes, each.own) for each in view.limits] == [
        ("search", "5000/minute", "override", 1, ("/search",), True),
        ("login", "5/minute", "policy", None, ("/login",), False),
        ("strangers", "6000/minute", "policy", None, ("*",), False),
        ("everybody", "90000/minute", "policy", None, ("*",), False),
        ("seats", "60/minute", "policy", None, ("*",), False),
        ("pages", "30/minute", "policy", None, ("/items/{id}",), True),
        ("watched", "9/minute", "override", 2, ("/items/{id}",), True),
    ]
    search = view.limits[0]
    assert (search.reason, search.valid_until_us) == ("launch", START_US + 2 * 86_400_000_000)
    assert [each.id for each in view.overrides] == [2, 1]
    service.overrides.remove(ChangeContext(SUE, "over"), 1)
    assert standing(service, ACME, "search").from_ == "tier"
    service.clients.unassign_tier(ChangeContext(SUE, "has not paid"), ACME)
    assert (standing(service, ACME, "search").from_, standing(service, ACME, "search").bucket) == (
        "policy",
        "100/minute",
    )
    assert (service.clients.get(ACME).label, service.clients.find("acme inc")) == ("Acme Inc", ACME), (
        "it is still called so"
    )
    service.clients.unassign_tier(ChangeContext(SUE, "nor its name"), ACME)
    assert service.clients.get(ACME).label is None
    initech = ClientRef("tenant", "initech")
    service.clients.assign_tier(ChangeContext(SUE, "a trial"), initech, "free", label="Initech")
    service.clients.unassign_tier(ChangeContext(SUE, "over"), initech)
    assert service.clients.get(initech).tier == "pro", "as the document says"
    assert service.clients.get(ClientRef("tenant", "initech")).tier_from == "policy"


def test_what_is_shown_as_used_is_what_the_gate_has_counted(here: World) -> None:
    here.send(10, path="/search", tenant="acme", user="ada")
    here.send(3, path="/items/7", tenant="acme", user="ada")
    search, watched, pages = (standing(here.service, ACME, name) for name in ("search", "watched", "pages"))
    assert (search.used, search.remaining, search.capacity, search.unknown) == (20, 80, 100, None)
    assert search.reset_s == 12.0
    assert (watched.used, watched.remaining, watched.shadow) == (3, 4, True)
    assert (pages.used, pages.algorithm, pages.reset_s) == (3, "fixed_window", 60.0)
    assert standing(here.service, ACME, "seats").unknown == "counted per user"
    assert standing(here.service, ACME, "everybody").used == 23
    assert standing(here.service, ClientRef("ip", "203.0.113.9"), "strangers").used == 23


@pytest.mark.parametrize("limit", ["strangers", "watched", "pages"])
def test_wait_that_is_shown_is_exact(here: World, limit: str) -> None:
    who = ClientRef("ip", "203.0.113.9") if limit == "strangers" else ACME
    _, met = applicable_limits(here.service._deps.resolve(who), here.clock.now_us())
    (key,) = [each.key for each in met if each.rule.name == limit]
    while here.counters.check(key):
        here.clock.advance(0.001)
    shown = standing(here.service, who, limit)
    assert shown.remaining == 0
    assert shown.retry_s
    here.clock.set_us(here.clock.now_us() + round(shown.retry_s * 1_000_000) - 1)
    assert not here.counters.check(key)
    here.clock.set_us(here.clock.now_us() + 1)
    assert here.counters.check(key)


WHO_IS_COUNTED = [
    {"tenant": "acme"},
    {"tenant": "initech"},
    {"tenant": "globex"},
    {"user": "ada"},
    {"api_key": CLIENTS.hash_of("api_key", KEY)},
    {"ip": "203.0.113.9"},
    {"ip": "198.51.100.7"},
]


@pytest.mark.parametrize("who", WHO_IS_COUNTED, ids=str)
def test_limits_of_a_client_are_those_that_its_requests_meet(here: World, who: dict[str, str]) -> None:
    """The service reads only the client's own rows, and the gate has all of them: they agree."""
    config, by = here.config, {"author": "ada", "reason": "test"}
    config.assign(("tenant", "globex"), "pro", **by)
    config.set_tier("free", "strangers", "5000/minute", **by)
    config.set_route("/items/{id}", 3, route_class="search", **by)
    config.override(("tenant", "acme"), "444/minute", limit="search", **by)
    config.override(("tenant", "acme"), "555/minute", limit="search", route_class="search", **by)
    config.override(("ip", "203.0.113.0/24"), "70/minute", limit="strangers", **by)
    config.override(("ip", "203.0.113.9"), "80/minute", limit="login", valid_until=in_days(here, 1), **by)
    config.override(("ip", "203.0.113.9"), "81/minute", limit="login", valid_from=in_days(here, 1), **by)
    config.override(("user", "ada"), "90/minute", limit="search", **by)
    config.override(("api_key", KEY), "91/minute", limit="search", **by)
    here.hear()
    ((kind, value),) = who.items()
    shown = {
        (each.limit, each.bucket, route)
        for each in here.service.clients.get(ClientRef(kind, value)).limits
        if each.own
        for route in each.routes
    }
    address = value if kind == "ip" else "192.0.2.1"
    snapshot, met = here.gate.active_policy.snapshot, set()
    for method, path, name in (
        ("GET", "/search", "/search"),
        ("GET", "/items/5", "/items/{id}"),
        ("POST", "/login", "/login"),
        ("GET", "/elsewhere", "other paths"),
    ):
        identities = {"address": address, "ip": address, **who}
        resolution = snapshot.resolve(snapshot.route(method, path), identities, here.clock.now_us())
        for each in (*resolution.applied_limits, *resolution.shadows):
            if kind in each.rule.by or "client" in each.rule.by:
                numbers = f"{each.key.limit.quota}/minute"
                burst = f", burst {each.key.limit.burst}" if each.key.limit.burst != each.key.limit.quota else ""
                if each.lacks is None and not {"user", "tenant"} & {*each.rule.by} - {kind}:
                    met.add((each.rule.name, numbers + burst, name))
    everywhere = {(limit, numbers) for limit, numbers, route in shown if route == "*"}
    assert {(limit, numbers) for limit, numbers, _ in met} == {(limit, numbers) for limit, numbers, _ in shown}
    assert all((limit, numbers) in everywhere or (limit, numbers, route) in shown for limit, numbers, route in met)


def test_network_is_shown_with_what_holds_for_its_addresses(here: World) -> None:
    view = here.service.clients.get(ClientRef("ip", "198.51.100.0/24"))
    assert (view.label, view.can_count) == ("The office", False)
    assert view.troubles == (
        "A network has no counters of its own. To see what is used, search for one of its addresses.",
    )
    assert view.log_keys == ("label:the office",)
    assert here.service.clients.get(ClientRef("ip", "198.51.100.77")).label == "The office"


def test_counters_that_cannot_be_asked_are_a_trouble(here: World) -> None:
    with Limiter("redis://127.0.0.1:1/0", budget=0.05) as away:
        view = here.made(counters=away).clients.get(ACME)
    assert any("the counters are unavailable" in each for each in view.troubles)
    assert {each.unknown for each in view.limits if each.own} == {"the counters are unavailable"}
    assert {each.used for each in view.limits} == {None}
    without = here.made(counters=None).clients.get(ACME)
    assert "the admin server was started without --store, so usage is unknown" in without.troubles


def test_without_a_policy_there_is_nothing_to_show_and_that_is_said(tmp_path: Path) -> None:
    service = AdminService(ConfigStore(f"sqlite:///{tmp_path}/empty.db", secret=SECRET), secret=SECRET)
    assert service.clients.get(ACME).troubles[0] == "there is no policy yet"
    assert (
        service.policy.get().text,
        service.policy.tiers(),
        service.policy.routes(),
        service.overrides.list().items,
    ) == ("", [], [], ())
    with pytest.raises(InvalidPolicy, match="there is no policy yet"):
        service.overrides.add(ChangeContext(SUE, "early"), ACME, OverrideSpec("10/minute"))


def test_hundred_thousand_overrides_are_not_read_for_one_client(here: World) -> None:
    with write_transaction(here.config.engine) as connection:
        connection.execute(
            text(
                "INSERT INTO headgate_overrides (id, since, kind, value, limit_name, quota, period_us) "
                "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 101000) "
                "SELECT i, 1, 'tenant', 't' || i, 'search', 50, 60000000 FROM n"
            )
        )
    looked: list[int] = []
    resolve = here.service._deps.resolve

    def watched(client: ClientRef) -> Any:
        resolved = resolve(client)
        looked.append(sum(map(len, resolved.rows.values())))
        return resolved

    here.service._deps.resolve = watched  # type: ignore[method-assign]
    assert standing(here.service, ClientRef("tenant", "t5000"), "search").from_ == "override"
    assert looked == [1]
    page = here.service.overrides.list(after="50000", most=3)
    assert ([each.id for each in page.items], page.next) == ([49999, 49998, 49997], "49997")
    with here.config.engine.connect() as connection:
        asked = "SELECT id FROM headgate_overrides WHERE until_version IS NULL AND id < 9 ORDER BY id DESC LIMIT 3"
        plan = str(connection.execute(text(f"EXPLAIN QUERY PLAN {asked}")).all())
    assert "headgate_overrides_id" in plan
    assert "TEMP B-TREE" not in plan


# ------------------------------------------------------------------ who is meant


@pytest.mark.parametrize(("written", "meant"), [
    ("tenant=acme", ("tenant", "acme")),
    (" tenant=nobody-yet ", ("tenant", "nobody-yet")),
    ("203.0.113.9", ("ip", "203.0.113.9")),
    ("::ffff:203.0.113.9", ("ip", "203.0.113.9")),
    ("2001:DB8::1", ("ip", "2001:db8::1")),
    ("203.0.113.0/24", ("ip", "203.0.113.0/24")),
    ("initech", ("tenant", "initech")),
    ("INITECH", ("tenant", "initech")),
    ("label=initech", ("tenant", "initech")),
    ("the  office", ("ip", "198.51.100.0/24")),
    ("acme inc", ("tenant", "acme")),
    ("acme", ("tenant", "acme")),
    (KEY, ("api_key", CLIENTS.hash_of("api_key", KEY))),
    (f"api_key={KEY}", ("api_key", CLIENTS.hash_of("api_key", KEY))),
    (CLIENTS.hash_of("api_key", KEY).upper().replace("HMAC", "hmac"), ("api_key", CLIENTS.hash_of("api_key", KEY))),
    ("seen-in-the-log", ("user", "seen-in-the-log")),
    (CLIENTS.hash_of("tenant", "logged"), ("tenant", "logged")),
    (CLIENTS.hash_of("user", "seen-in-the-log"), ("user", CLIENTS.hash_of("user", "seen-in-the-log"))),
    (CLIENTS.hash_of("tenant", "initech"), ("tenant", "initech")),
    (CLIENTS.hash_of("tenant", "globex"), ("tenant", "globex")),
    ("sk_live_known_to_log", ("api_key", CLIENTS.hash_of("api_key", "sk_live_known_to_log"))),
    ("hmac:" + "0" * 32, ("api_key", "hmac:" + "0" * 32)),
])  # fmt: skip
def test_client_lookup_finds_the_client(found_in: World, written: str, meant: tuple[str, str]) -> None:
    assert found_in.service.clients.find(written) == meant


@pytest.fixture(scope="module")
def found_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world with clients in the tables, in the document and in the log."""
    folder = tmp_path_factory.mktemp("found")
    with closing(World(f"sqlite:///{folder}/config.db", folder)) as world:
        world.service.clients.assign_tier(ChangeContext(SUE, "test"), ACME, "pro", label="Acme Inc")
        world.service.clients.assign_tier(
            ChangeContext(SUE, "test"), ClientRef("tenant", "globex"), "pro", label="Globex Corp"
        )
        world.service.blocks.add(ChangeContext(SUE, "test"), ClientRef("api_key", KEY))
        world.hear()
        world.send(path="/search", user="seen-in-the-log", peer="192.0.2.1")
        world.send(path="/search", tenant="logged", peer="192.0.2.2")
        world.send(path="/search", tenant="globex", peer="192.0.2.2")
        world.send(path="/search", api_key="sk_live_known_to_log", peer="192.0.2.3")
        assert world.log.flush()
        yield world


@pytest.mark.parametrize(
    "written", ["sk_live_of_nobody_at_all", "pass=word=of/nobody", "label=sk_live_of_nobody", "x" * 600]
)
def test_unknown_client_is_not_echoed(found_in: World, written: str) -> None:
    with pytest.raises(NotFound) as error:
        found_in.service.clients.find(written)
    assert written.removeprefix("label=") not in str(error.value)


@pytest.mark.parametrize("written", [
    "", "  ", "ip=sk_live_of_nobody", "subnet=sk_live_of_nobody", "hmac:sk_live_of_nobody", "api_key=sk_live_of nobody",
    "x" * 5000,
])  # fmt: skip
def test_invalid_client_is_rejected_and_not_echoed(found_in: World, written: str) -> None:
    with pytest.raises(InvalidInput) as error:
        found_in.service.clients.find(written)
    assert "of_nobody" not in str(error.value)


def test_without_a_secret_keys_cannot_be_looked_for(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    service = here.made(secret=None)
    assert service.clients.find("initech") == ("tenant", "initech")
    with pytest.raises(NotFound, match="needs the secret of the gates"):
        service.clients.find(KEY)
    with pytest.raises(InvalidInput, match="needs the secret of the gates"):
        service.clients.get(ClientRef("api_key", KEY))


def test_hashed_client_shows_the_log_only(here: World) -> None:
    here.send(60, path="/search", user="ada", peer="192.0.2.9")
    assert here.log.flush()
    nobody = ClientRef("user", CLIENTS.hash_of("user", "ada"))
    view = here.service.clients.get(nobody)
    assert (view.who, view.can_count, view.limits) == (nobody, False, ())
    assert view.troubles == (
        "We only store a hash of this user. You can block it. To see its limits, search for the user itself.",
    )
    assert here.service.clients.why(nobody, at="2026-11-15", zone=UTC).denied == 10
    assert len(here.service.clients.decisions(client=nobody)) == 60
    for change in (
        lambda: here.service.overrides.add(ChangeContext(SUE, "x"), nobody, OverrideSpec("10/minute")),
        lambda: here.service.clients.assign_tier(ChangeContext(SUE, "x"), nobody, "pro"),
        lambda: here.service.clients.reset(ChangeContext(SUE, "x"), nobody),
    ):
        with pytest.raises(InvalidInput, match="we only store a hash of this user"):
            change()


# ------------------------------------------------------------------ the log


def test_timeline_decisions_and_why_agree_with_what_happened(here: World) -> None:
    said = []
    for _ in range(6):
        said.append(here.send(20, path="/search", tenant="acme"))
        here.clock.advance(10)
    here.send(2, path="/search", tenant="evil")
    assert here.log.flush()
    since = START_US - 30_000_000
    line = here.service.clients.timeline(ACME, since_us=since, until_us=since + 120_000_000, slots=12)
    assert [slot.at_us for slot in line.slots] == [since + index * 10_000_000 for index in range(12)]
    assert [(slot.allowed, slot.denied) for slot in line.slots[3:9]] == [(sum(each), 20 - sum(each)) for each in said]
    assert not any(slot.allowed or slot.denied for slot in (*line.slots[:3], *line.slots[9:]))
    assert [record.at_us for record in line.recent] == sorted((record.at_us for record in line.recent), reverse=True)
    assert (len(line.recent), line.recent[0].at_us, line.troubles) == (50, START_US + 50_000_000, ())
    earlier = here.service.clients.timeline(ACME, since_us=since, until_us=START_US + 20_000_000, slots=1)
    assert earlier.recent[0].at_us == START_US + 10_000_000
    denied = sum(not each for some in said for each in some)
    assert here.service.clients.why(ACME, at="2026-11-15 15:00", zone=UTC).denied == denied
    assert (
        here.service.clients.timeline(ClientRef("tenant", "evil"), since_us=since, until_us=START_US + 10**8, slots=1)
        .slots[0]
        .blocked
        == 2
    )
    newest = here.service.clients.decisions(most=5)
    assert [record.outcome for record in newest][-2:] == ["blocked", "blocked"]
    assert [record.id for record in newest] == sorted(record.id for record in newest)
    assert here.service.clients.decisions(after=newest[1].id, most=2) == newest[2:4]
    assert here.service.clients.decisions(after=newest[-1].id) == []
    assert here.service.clients.decisions(before=newest[-1].id, most=3) == newest[1:4]
    assert here.service.clients.decisions(after=newest[0].id, before=newest[-1].id, most=2) == newest[1:3]
    assert {record.outcome for record in here.service.clients.decisions(outcome="blocked", most=1000)} == {"blocked"}
    assert len(here.service.clients.decisions(outcome="rejected", most=1000)) == denied + 2
    assert len(here.service.clients.decisions(client=ACME, outcome="denied", most=7)) == 7
    json.dumps([line.as_dict(), [record.as_dict() for record in newest]])


def test_log_that_is_not_there_yet_is_a_trouble_and_no_error(here: World, tmp_path: Path) -> None:
    service = here.made(log=f"sqlite:///{tmp_path}/later.db")
    line = service.clients.timeline(ACME, since_us=0, until_us=60, slots=3)
    assert line.troubles == (f"there is no decision log at sqlite:///{tmp_path}/later.db yet",)
    assert (len(line.slots), service.clients.decisions(), service.clients.why(ACME).rejected) == (3, [], 0)
    assert line.troubles[0] in service.fleet.overview().troubles
    none = here.made(log=None)
    assert none.clients.timeline(ACME, since_us=0, until_us=60).troubles == (
        "no decision log was given to the admin server; start it with --log",
    )
    with pytest.raises(NotFound, match="start it with --log"):
        none.clients.why(ACME)


IN_CLICKHOUSE = """
import os, pickle, sys
from headgate.telemetry.decision_log.sinks import open_sink
answers, sink = os.fdopen(os.dup(1), "wb"), open_sink("chdb:///")
os.dup2(2, 1)
records, questions = pickle.load(sys.stdin.buffer)
sink.write(records)
sink.write(records[:30])
pickle.dump([getattr(sink, name)(keys, **more) for name, keys, more in questions], answers)
answers.flush()
"""


def test_sqlite_and_clickhouse_find_the_newest_and_count_alike(here: World) -> None:
    for second in range(80):
        here.send(path="/search", tenant=("acme", "globex", "evil")[second % 3], peer=f"192.0.2.{second % 2}")
        here.send(4, path="/items/5", tenant="acme")
        here.clock.advance(0.5)
    assert here.log.flush()
    with closing(open_reader(here.log_url)) as reader:
        records = reader.recent(most=1000)
        assert len(records) == 400
        middle, late = records[90].id, records[300].id
        questions: list[tuple[str, list[str], dict[str, Any]]] = [
            ("recent", keys, {"after": after, "before": before, "outcome": outcome, "most": most})
            for keys in (
                [],
                [CLIENTS.hash_of("tenant", "acme")],
                list({*records[0].clients, *records[5].clients}),
            )
            for after in ("", middle)
            for before in ("", late)
            for outcome in (None, "denied", "rejected")
            for most in (7, 1000)
        ]
        for _, keys, given in questions:
            kinds = {"denied", "blocked", "unavailable"} if given["outcome"] == "rejected" else {given["outcome"]}
            fitting = [
                record
                for record in records
                if (not keys or {*keys} & {*record.clients})
                and given["after"] < record.id < (given["before"] or "g")
                and (given["outcome"] is None or record.outcome in kinds)
            ]
            wanted = fitting[: given["most"]] if given["after"] else fitting[-given["most"] :]
            assert reader.recent(keys, **given) == wanted
        questions = questions[5::11]  # ClickHouse takes its time for each
        times = {"since_us": START_US + 3_000_000, "until_us": START_US + 33_000_000, "width_us": 7_000_000}
        questions += [("counts", keys, times) for keys in ([], [CLIENTS.hash_of("tenant", "acme")])]
        answers = [getattr(reader, name)(keys, **more) for name, keys, more in questions]
    asked = pickle.dumps((records, questions))
    told = subprocess.run([sys.executable, "-c", IN_CLICKHOUSE], input=asked, stdout=subprocess.PIPE, check=True)
    assert pickle.loads(told.stdout) == answers


@pytest.mark.parametrize("question", [
    {"since_us": 5, "until_us": 5}, {"since_us": 0, "until_us": 9, "slots": 0}, {"since_us": -1, "until_us": 9},
    {"since_us": 0, "until_us": 10**18}, {"since_us": 0, "until_us": 9, "slots": 100_000},
])  # fmt: skip
def test_times_that_are_none_are_refused(found_in: World, question: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        found_in.service.clients.timeline(ACME, **question)


# ------------------------------------------------------------------ roles


CHANGES: dict[str, tuple[str, Callable[[AdminService, Actor], Any]]] = {
    "add override": (
        "support",
        lambda service, by: service.overrides.add(
            ChangeContext(by, "r"), ACME, OverrideSpec("99/minute", limit="search")
        ),
    ),
    "change override": (
        "support",
        lambda service, by: service.overrides.change(
            ChangeContext(by, "r"), 1, OverrideSpec("98/minute", limit="search")
        ),
    ),
    "remove override": ("support", lambda service, by: service.overrides.remove(ChangeContext(by, "r"), 1)),
    "block": ("support", lambda service, by: service.blocks.add(ChangeContext(by, "r"), ClientRef("ip", "192.0.2.77"))),
    "unblock": (
        "support",
        lambda service, by: service.blocks.remove(ChangeContext(by, "r"), ClientRef("tenant", "kept-out")),
    ),
    "reset": ("support", lambda service, by: service.clients.reset(ChangeContext(by, "r"), ACME)),
    "assign": ("support", lambda service, by: service.clients.assign_tier(ChangeContext(by, "r"), ACME, "pro")),
    "unassign": (
        "support",
        lambda service, by: service.clients.unassign_tier(ChangeContext(by, "r"), ClientRef("tenant", "put-in")),
    ),
    "block network": (
        "operator",
        lambda service, by: service.blocks.add(ChangeContext(by, "r"), ClientRef("ip", "192.0.2.0/24")),
    ),
    "unblock network": (
        "operator",
        lambda service, by: service.blocks.remove(ChangeContext(by, "r"), ClientRef("ip", "198.51.100.0/28")),
    ),
    "set tier": (
        "operator",
        lambda service, by: service.policy.set_tier(ChangeContext(by, "r"), "pro", "strangers", "7000/minute"),
    ),
    "remove tier": ("operator", lambda service, by: service.policy.remove_tier(ChangeContext(by, "r"), "free")),
    "set route": ("operator", lambda service, by: service.policy.set_route(ChangeContext(by, "r"), "/reports", 5)),
    "remove route": ("operator", lambda service, by: service.policy.remove_route(ChangeContext(by, "r"), "/exports")),
    "put policy": ("operator", lambda service, by: service.policy.put(ChangeContext(by, "r"), POLICY + "# more")),
    "rollback": (
        "operator",
        lambda service, by: service.policy.rollback(ChangeContext(by, "r", confirmed=["policy"]), 1),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_need_the_right_role(furnished: AdminService, name: str) -> None:
    service = furnished
    needed, change = CHANGES[name]
    service._deps.clock.advance(1)  # type: ignore[attr-defined]
    before = (service.version, len(service.audit.list().items))
    for role in ROLES[: ROLES.index(needed)]:
        with pytest.raises(NotAllowed) as error:
            change(service, Actor("somebody", role))
    assert (error.value.needed, str(error.value)[-len(needed) - 1 :]) == (needed, f"{needed}.")
    assert (service.version, len(service.audit.list().items)) == before
    done = change(service, Actor("somebody", needed))
    (newest, *_) = service.audit.list(most=1).items
    assert (newest.author, newest.reason, newest.version) == ("somebody", "r", done.version and done.version.number)
    assert newest.version is None or newest.version == before[0] + 1


# ------------------------------------------------------------------ risks


Command = Callable[[AdminService, ChangeContext], Change]


def override(bucket: str, who: ClientRef = ACME, **more: Any) -> Command:
    return lambda service, change: service.overrides.add(change, who, OverrideSpec(bucket, limit="search", **more))


def tier(limit: str, bucket: str) -> Command:
    return lambda service, change: service.policy.set_tier(change, "pro", limit, bucket)


def block(kind: str, value: str) -> Command:
    return lambda service, change: service.blocks.add(change, ClientRef(kind, value))


def route(cost: int, path: str = "/search", route_class: str | None = None) -> Command:
    return lambda service, change: service.policy.set_route(change, path, cost, route_class=route_class)


def document(text: str) -> Command:
    return lambda service, change: service.policy.put(change, text)


def without(words: str) -> str:
    return "".join(line for line in POLICY.splitlines(keepends=True) if words not in line)


def overriding(tenant: str, bucket: str) -> str:
    return f"{POLICY}overrides: [{{tenant: {tenant}, limit: search, bucket: {bucket}}}]\n"


OPENED = POLICY.replace('"POST /login", on_failure: closed', '"POST /login"')

RISKS: dict[str, tuple[Command, list[str]]] = {
    "more than ten times": (override("1001/minute"), ["ten-times"]),
    "ten times": (override("1000/minute"), []),
    "less than a tenth": (override("9/minute"), ["tenth"]),
    "a tenth": (override("10/minute"), []),
    "another window": (override("100/second"), ["ten-times"]),
    "at once": (override("100/minute, burst 1001"), ["ten-times"]),
    "on a class": (override("5000/minute", route_class="search"), ["ten-times"]),
    "of what its tier has": (override("5000/minute", ClientRef("tenant", "initech")), []),
    "a tier": (tier("search", "20000/minute"), ["ten-times"]),
    "a tier with less": (tier("search", "20/minute"), ["tenth"]),
    "a tier's first numbers": (tier("strangers", "9/minute"), ["tenth"]),
    "a wide network": (block("ip", "203.0.112.0/23"), ["wildcard-block"]),
    "a network": (block("ip", "203.0.113.0/24"), []),
    "a wide network of IPv6": (block("ip", "2001:db8::/47"), ["wildcard-block"]),
    "a network of IPv6": (block("subnet", "2001:db8::/48"), []),
    "a route that costs nothing": (route(0), ["ten-times"]),
    "a dear route": (route(21), ["tenth"]),
    "a route that is not so dear": (route(20), []),
    "some methods of a route out of its class": (route(2, "GET /search"), ["policy"]),
    "some methods of a route in its class": (route(2, "GET /search", "search"), []),
    "a document's route out of its class": (
        document(
            POLICY.replace("path: /search, class: search, ", "path: /search, ").replace(
                "class: search, by", "class: items, by"
            )
        ),
        ["policy"],
    ),
    "a limit that is gone": (document(without("name: seats")), ["policy"]),
    "a limit that is only watched": (document(POLICY.replace("bucket: 60/", "shadow: true, bucket: 60/")), ["policy"]),
    "a watched limit that is gone": (document(without("name: watched")), []),
    "what fails closed no more": (document(OPENED), ["policy"]),
    "what fails closed by default": (document(OPENED.replace("on_failure: open", "on_failure: closed")), []),
    "a wide network in a document": (document(f"{POLICY}  - {{ip: 10.0.0.0/8}}\n"), ["wildcard-block"]),
    "everybody in a document": (document(f"{POLICY}  - {{ip: '::/0'}}\n"), ["wildcard-block"]),
    "a network in a document": (document(f"{POLICY}  - {{ip: 10.0.0.0/24}}\n"), []),
    "an override in a document": (document(overriding("acme", "1001/minute")), ["ten-times"]),
    "an override in a document with less": (document(overriding("acme", "9/minute")), ["tenth"]),
    "an override in a document by its tier": (document(overriding("initech", "1001/minute")), []),
    "a document's numbers": (document(POLICY.replace("100/minute", "5000/minute")), ["ten-times"]),
}


@pytest.mark.parametrize("name", RISKS)
def test_what_is_probably_a_mistake_wants_a_second_look(office: AdminService, name: str) -> None:
    command, risks = RISKS[name]
    before = office.version

    def change(*confirm: str) -> Any:
        return command(office, ChangeContext(OTTO, "r", confirmed=confirm))

    if risks:
        for confirm in ((), ("something-else",)):
            with pytest.raises(NeedsConfirmation) as error:
                change(*confirm)
            assert codes(error) == risks
            assert all(risk.text for risk in error.value.risks)
        assert office.version == before
        assert not office.blocks.list(search="20").items
    assert change(*risks).version.number == before + 1


def test_danger_says_what_is_and_what_would_be(office: AdminService) -> None:
    with pytest.raises(NeedsConfirmation) as error:
        office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("2500/minute", limit="search"))
    assert error.value.risks == (
        ("ten-times", "tenant acme has 100/minute on search now; 2500/minute is 25 times that"),
    )


def test_what_an_override_is_compared_with_is_what_holds_now(office: AdminService) -> None:
    service = office
    service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("900/minute", limit="search"))
    service.overrides.change(
        ChangeContext(SUE, "r", confirmed=["ten-times"]), 1, OverrideSpec("8000/minute", limit="search")
    )
    with pytest.raises(NeedsConfirmation) as error:
        service.overrides.change(ChangeContext(SUE, "r"), 1, OverrideSpec("700/minute", limit="search"))
    assert codes(error) == ["tenth"]


def test_duplicate_override_names_the_existing_one(office: AdminService) -> None:
    office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("900/minute", limit="search"))
    with pytest.raises(InvalidInput, match="override 1 is for the same client, limit and time: change it, or remove"):
        office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("800/minute", limit="search"))
    for_a_time: Any = {"limit": "search", "valid_until": datetime(2096, 1, 1, tzinfo=UTC)}
    office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("800/minute", **for_a_time))
    with pytest.raises(InvalidInput, match="override 1 is for the same"):
        office.overrides.change(ChangeContext(SUE, "r"), 2, OverrideSpec("800/minute", limit="search"))
    office.overrides.change(ChangeContext(SUE, "r"), 2, OverrideSpec("700/minute", **for_a_time))


@pytest.mark.parametrize("bucket", ["0/minute", "0 per day"])
def test_limit_of_nothing_is_a_block_and_refused(office: AdminService, bucket: str) -> None:
    for change in (
        lambda: office.overrides.add(
            ChangeContext(SUE, "r", confirmed=["tenth"]), ACME, OverrideSpec(bucket, limit="search")
        ),
        lambda: office.policy.set_tier(ChangeContext(OTTO, "r", confirmed=["tenth"]), "pro", "search", bucket),
    ):
        with pytest.raises(InvalidInput, match="block the client instead"):
            change()


@pytest.mark.parametrize("who", [("ip", "*"), ("tenant", "*"), ("ip", "0.0.0.0/0"), ("ip", "::/0")])
def test_block_of_everything_is_rejected(office: AdminService, who: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput):
        office.blocks.add(ChangeContext(OTTO, "r", confirmed=["wildcard-block"]), ClientRef(*who))
    assert office.blocks.list(search=who[1]).items == ()


# ------------------------------------------------------------------ changes


def test_override_takes_effect_at_the_gate(world: World) -> None:
    service = world.service
    assert sum(world.send(60, path="/search", tenant="acme")) == 50
    service.overrides.add(
        ChangeContext(SUE, "launch"), ACME, OverrideSpec("200/minute", limit="search", valid_until=in_days(world, 1))
    )
    service.clients.reset(ChangeContext(SUE, "start anew"), ACME, limits=["search"])
    world.hear()
    assert sum(world.send(120, path="/search", tenant="acme", peer="192.0.2.5")) <= 100
    assert (
        standing(service, ACME, "search").used
        == standing(service, ACME, "search").capacity - standing(service, ACME, "search").remaining
    )  # type: ignore[operator]
    world.clock.advance(90_000)
    assert standing(service, ACME, "search").from_ == "policy"
    (view,) = service.overrides.list(client=ACME).items
    assert (view.state, view.bucket, view.author, view.reason) == ("expired", "200/minute", "sue", "launch")


@pytest.mark.parametrize(
    ("typed", "kinds"),
    [
        ("sk_live_aaaa567890abcdef", ["api_key"]),  # looks like a key, so that it is never stored as a name
        ("d41d8cd98f00b204e9800998ecf8427e", ["api_key"]),
        ("Authorization: Bearer d41d8cd98f00b204", ["api_key"]),
        ("X-API-Key: k", ["api_key"]),
        ("api_key=k", ["api_key"]),
        ("203.0.113.9", ["ip"]),
        ("203.0.113.9:443", ["ip"]),
        ("203.0.113.0/24", ["ip"]),
        ("203.0.113.9/24", ["ip", "ip"]),
        ("2001:db8::1", ["ip", "ip"]),
        ("tenant=nobody-yet", ["tenant"]),
        ("user=nobody-yet", ["user"]),
        ("nobody-yet", ["tenant", "user", "api_key"]),
        ("Nobody Yet", ["tenant", "user"]),  # a key has no blanks
        ("initech", ["tenant"]),  # known, so that nothing else is offered
        ("the office", ["ip"]),
    ],
)
def test_typed_text_offers_every_client_that_it_can_mean(world: World, typed: str, kinds: list[str]) -> None:
    assert [each.who.kind for each in world.service.clients.candidates(typed)] == kinds


def test_candidates_say_what_a_block_of_them_matches(world: World) -> None:
    told = {
        each.title: each.matches
        for text in ("203.0.113.9/24", "acme")
        for each in world.service.clients.candidates(text)
    }
    assert told["Network 203.0.113.0/24"] == "every address in 203.0.113.0/24 (256 addresses)"
    assert told["Address 203.0.113.9"] == "every request from this address"
    assert told["Tenant acme"] == "every request of the tenant “acme”"


def test_candidate_shows_an_api_key_masked(world: World) -> None:
    key = "sk_live_aaaa567890abcdef"
    (found,) = world.service.clients.candidates(key)
    assert found.title == "API key sk_live_…cdef"
    assert found.who.value == CLIENTS.hash_of("api_key", key)
    assert key not in json.dumps(found.as_dict())


@pytest.mark.parametrize("typed", ["", "a\nb", "x" * 5000, "hmac:123"])
def test_text_that_can_mean_no_client_is_refused(world: World, typed: str) -> None:
    with pytest.raises(InvalidInput):
        world.service.clients.candidates(typed)


@given(st.text(min_size=1, max_size=60))
def test_masked_key_gives_at_most_half_of_it_away(key: str) -> None:
    shown = mask(key).replace("…", "", 1)
    assert 2 * len(shown) <= len(key)


def test_client_of_which_only_a_hash_is_known_is_blocked_by_it(world: World) -> None:
    address = ClientRef("ip", CLIENTS.key("ip", "192.0.2.77"))
    assert world.send(peer="192.0.2.77", path="/login", method="POST") == [True]
    world.service.blocks.add(ChangeContext(SUE, "tries passwords"), address)
    assert world.send(peer="192.0.2.77") == [False]  # as soon as the live block is heard of
    assert world.send(peer="192.0.2.78") == [True]
    world.hear()
    world.counters.unblock(*address)
    assert world.send(peer="192.0.2.77") == [False]  # by the policy alone
    for who in (address, ClientRef("ip", "192.0.2.77")):
        view = world.service.clients.get(who).block
        assert view is not None
        assert (view.reason, view.who) == ("tries passwords", address)
    world.service.blocks.remove(
        ChangeContext(SUE, "a mistake"), ClientRef("ip", "192.0.2.77")
    )  # by the address, whose hash it is
    world.hear()
    assert world.send(peer="192.0.2.77") == [True]


def test_hash_is_blocked_by_its_name_where_that_is_known(world: World) -> None:
    hashed = ClientRef("tenant", CLIENTS.key("tenant", "initech"))
    assert "tenant initech" in world.service.blocks.add(ChangeContext(SUE, "unpaid"), hashed).what


def test_client_goes_by_the_same_name_on_the_overview_and_on_its_own_page(world: World) -> None:
    world.send(8, peer="192.0.2.77", path="/login", method="POST")
    world.clock.advance(1)
    world.reporter.report()
    (top,) = world.service.fleet.overview().top_denied
    shown = short_label(top.kind, top.key, top.label)
    assert re.fullmatch(r"192\.0\.2\.\* \([0-9a-f]{8}\)", shown)
    assert world.service.clients.get(ClientRef(top.kind, top.key)).label == shown
    world.service.blocks.add(ChangeContext(SUE, "tries passwords"), ClientRef(top.kind, top.key))
    assert [each.label for each in world.service.blocks.list().items if each.source == "config"] == [shown]


def test_rollback_is_previewed_with_everything_that_it_changes(world: World) -> None:
    service, before = world.service, world.service.version
    service.overrides.add(ChangeContext(SUE, "launch"), ACME, OverrideSpec("200/minute", limit="search"))
    service.blocks.add(ChangeContext(OTTO, "unpaid"), GLOBEX)
    world.counters.block("tenant", "by-hand")
    seen = service.policy.preview_rollback(OTTO, before)
    assert [each.what.partition(" of ")[0] for each in seen.differences] == ["removed override", "removed block"]
    assert [each.author for each in seen.undone] == ["otto", "sue"]
    assert [each.who for each in seen.live] == [("tenant", "by-hand")]
    assert service.version == seen.version == before + 2  # nothing is done by looking
    assert [
        each.section for each in service.policy.preview_rollback(OTTO, before, sections=["overrides"]).differences
    ] == ["overrides"]
    with pytest.raises(NotAllowed):
        service.policy.preview_rollback(SUE, before)


def test_live_blocks_follow_a_rollback_and_others_are_kept(world: World) -> None:
    service, before = world.service, world.service.version
    service.blocks.add(ChangeContext(OTTO, "unpaid"), GLOBEX)
    blocked = service.version
    world.counters.block("tenant", "by-hand")
    world.hear()
    assert world.send(tenant="globex") == [False]
    notes = service.policy.rollback(ChangeContext(OTTO, "a mistake"), before).notes
    assert notes == (
        "Blocks: 1 lifted, 0 active again.",
        "1 live block outside the configuration is kept: tenant by-hand.",
    )
    world.hear()
    assert (world.send(tenant="globex"), world.send(tenant="by-hand")) == ([True], [False])
    service.policy.rollback(ChangeContext(OTTO, "no mistake"), blocked)
    assert world.send(tenant="globex") == [False]  # before the policy is read


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("init", ["initech"]),
        ("INITECH", ["initech"]),
        ("office", ["198.51.100.0/24"]),
        ("198.51.100.0", ["198.51.100.0"]),
        ("198.51", ["198.51.100.0/24"]),
        ("corner", ["corner-1", "corner-2"]),
        ("only-logged", ["only-logged-tenant"]),
        ("nowhere", []),
    ],
)
def test_part_of_a_name_finds_every_client_that_contains_it(world: World, typed: str, found: list[str]) -> None:
    for number in (1, 2):
        world.service.clients.assign_tier(
            ChangeContext(SUE, "r"), ClientRef("tenant", f"corner-{number}"), "pro", label=f"Corner Cafe {number}"
        )
    world.send(tenant="only-logged-tenant")
    assert world.log.flush()
    assert [each.who.value for each in world.service.clients.matches(typed)] == found


def test_client_that_was_never_seen_is_flagged(world: World) -> None:
    world.send(tenant="acme")
    assert world.log.flush()
    assert (
        world.service.clients.get(ACME).is_seen,
        world.service.clients.get(ClientRef("tenant", "acmee")).is_seen,
    ) == (True, False)
    assert (
        world.service.clients.get(ClientRef("ip", "192.0.2.200")).is_seen is None
    )  # most addresses were never heard of
    spec = OverrideSpec("200/minute", limit="search")
    assert world.service.overrides.add(ChangeContext(SUE, "r"), ACME, spec).notes == ()
    typo = world.service.overrides.add(ChangeContext(SUE, "r"), ClientRef("tenant", "acmee"), spec)
    assert typo.notes == ("No tenant of this name was ever seen. Check the spelling.",)


def test_limits_say_whether_they_can_be_overridden_for_a_client(world: World) -> None:
    limits = {each.limit: each.can_override for each in world.service.clients.get(ACME).limits}
    assert {name for name, can in limits.items() if can} == {"search", "seats", "pages", "watched"}
    for name, can in limits.items():
        if can:
            world.service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("50/minute", limit=name))
        else:
            with pytest.raises(InvalidInput, match="can't be overridden for a tenant"):
                world.service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("50/minute", limit=name))


def test_overrides_of_the_policy_document_are_listed_with_the_others(world: World) -> None:
    overrides = "overrides: [{tenant: globex, limit: search, bucket: 150/minute, reason: contract}]"
    world.service.policy.put(ChangeContext(OTTO, "contract"), f"{POLICY}\n{overrides}")
    world.service.overrides.add(ChangeContext(SUE, "launch"), ACME, OverrideSpec("200/minute", limit="search"))
    listed = world.service.overrides.list().items
    assert [(each.who.value, each.source, each.bucket) for each in listed] == [
        ("acme", "config", "200/minute"),
        ("globex", "policy", "150/minute"),
    ]
    pages = world.service.overrides.list(most=1)
    assert [*pages.items, *world.service.overrides.list(most=1, after=pages.next).items] == [*listed]
    assert [each.source for each in world.service.overrides.list(search="contract").items] == ["policy"]
    assert [each.source for each in world.service.overrides.list(client=GLOBEX).items] == ["policy"]


def test_names_stand_in_the_place_of_hashes(world: World) -> None:
    hashed = CLIENTS.hash_of("api_key", KEY)
    world.service.clients.assign_tier(ChangeContext(SUE, "r"), ClientRef("api_key", KEY), "pro", label="Acme")
    assert world.service.clients.insert_names(f"removed block of api_key {hashed}") == (
        f"removed block of api_key Acme ({hashed[:13]}…)"
    )
    with pytest.raises(NeedsConfirmation, match="Acme has 1000/minute on search now"):
        world.service.overrides.add(
            ChangeContext(SUE, "r"), ClientRef("api_key", KEY), OverrideSpec("90000/minute", limit="search")
        )


def test_block_holds_at_once_and_after_the_policy_is_read(world: World) -> None:
    service = world.service
    done = service.blocks.add(ChangeContext(SUE, "stolen"), ClientRef("api_key", KEY), valid_until=in_days(world, 1))
    assert (done.version and done.version.number, done.notes) == (2, ())
    assert world.send(api_key=KEY) == [False]
    assert world.send(api_key="another") == [True]
    (live,) = world.counters.blocked()
    assert (live.reason, live.until_us) == ("stolen", START_US + 86_400_000_000)
    view = service.clients.get(ClientRef("api_key", KEY)).block
    assert view is not None
    assert (view.source, view.id, view.author, view.reason, view.state) == ("config", 1, "sue", "stolen", "active")
    world.counters.unblock(*view.who)
    assert world.send(api_key=KEY) == [True]
    world.hear()
    assert world.send(api_key=KEY) == [False]
    assert service.blocks.remove(ChangeContext(SUE, "found"), 1).version
    world.hear()
    assert world.send(api_key=KEY) == [True]
    assert service.clients.get(ClientRef("api_key", KEY)).block is None
    with pytest.raises(NotFound):
        service.blocks.remove(ChangeContext(SUE, "again"), 1)


def test_block_known_to_nodes_only_is_listed_and_removed(here: World) -> None:
    here.counters.block("ip", "192.0.2.0/28", reason="by hand")
    here.counters.block("tenant", "acme")
    assert [(each.who, each.source, each.id) for each in here.service.blocks.list().items] == [
        (("tenant", "evil"), "policy", None),
        (("ip", "192.0.2.0/28"), "live", None),
        (("tenant", "acme"), "live", None),
    ]
    view = here.service.clients.get(ClientRef("ip", "192.0.2.3")).block
    assert view is not None
    assert (view.who.value, view.source, view.reason) == ("192.0.2.0/28", "live", "by hand")
    here.clock.advance(1)
    done = here.service.blocks.remove(ChangeContext(SUE, "no reason"), ACME)
    assert (done.version, done.what) == (None, "unblocked tenant acme")
    assert here.service.audit.list(most=1).items[0].what == "unblocked tenant acme"
    with pytest.raises(NotFound, match="the block is in the policy document"):
        here.service.blocks.remove(ChangeContext(SUE, "r"), ClientRef("tenant", "evil"))
    with pytest.raises(NotFound, match="none exists"):
        here.service.blocks.remove(ChangeContext(SUE, "r"), ACME)


def test_block_is_stored_when_nodes_cannot_be_notified(here: World) -> None:
    assert here.made(counters=None).blocks.add(ChangeContext(SUE, "r"), ACME).notes == (
        "the admin server was started without --store, so nodes apply this within a second, not at once",
    )
    with Limiter("redis://127.0.0.1:1/0", budget=0.05) as away:
        service = here.made(counters=away)
        done = service.blocks.add(ChangeContext(SUE, "r"), ClientRef("tenant", "globex"))
        assert done.version
        assert "within a second" in done.notes[0]
        ended = service.blocks.remove(ChangeContext(SUE, "r"), ClientRef("tenant", "globex"))
        assert ended.version
        assert "may still block this client" in ended.notes[0]


def test_reset_affects_only_its_client(here: World) -> None:
    here.send(50, path="/search", tenant="acme", peer="192.0.2.1")
    here.send(50, path="/search", tenant="globex", peer="192.0.2.1")
    here.clock.advance(0.001)
    done = here.service.clients.reset(ChangeContext(SUE, "our mistake"), ACME)
    assert done.what == "reset tenant acme: search, pages, watched"
    assert done.notes == ("not reset, because other clients share the counter: login, strangers, everybody, seats",)
    assert [standing(here.service, ClientRef("tenant", each), "search").used for each in ("acme", "globex")] == [0, 100]
    assert standing(here.service, ACME, "everybody").used == 199
    assert here.service.audit.list(most=1).items[0].about == "tenant acme: search, pages, watched"
    with pytest.raises(NotFound, match="no such limit applies to this client; its limits are search"):
        here.service.clients.reset(ChangeContext(SUE, "r"), ACME, limits=["nothing"])
    with pytest.raises(NotFound, match="this client has no counter of its own in everybody"):
        here.service.clients.reset(ChangeContext(SUE, "r"), ACME, limits=["everybody"])
    with pytest.raises(InvalidInput, match="start it with --store"):
        here.made(counters=None).clients.reset(ChangeContext(SUE, "r"), ACME)


def test_on_a_real_redis_blocks_usage_and_resets_are_those_of_the_gate(
    redis7: RedisServer, tmp_path: Path, unique: str
) -> None:
    with closing(World(f"sqlite:///{tmp_path}/config.db", tmp_path, store=redis7.url, namespace=unique)) as world:
        assert all(world.send(10, path="/search", tenant="acme"))
        assert (standing(world.service, ACME, "search").used, standing(world.service, ACME, "search").remaining) == (
            20,
            80,
        )
        world.service.clients.reset(ChangeContext(SUE, "r"), ACME)
        assert standing(world.service, ACME, "search").used == 0
        assert world.service.blocks.add(ChangeContext(SUE, "abuse"), ACME).notes == ()
        assert [block.value for block in world.counters.blocked()] == ["acme"]
        assert [each.source for each in world.service.blocks.list(search="acme").items] == ["config"]
        world.service.blocks.remove(ChangeContext(SUE, "r"), ACME)
        assert world.counters.blocked() == []


def test_change_on_what_has_changed_meanwhile_is_refused(world: World) -> None:
    service = world.service
    service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("200/minute", limit="search"))
    seen = service.version
    service.overrides.change(ChangeContext(SUE, "r", based_on=seen), 1, OverrideSpec("300/minute", limit="search"))
    for change in (
        lambda: service.overrides.change(
            ChangeContext(OTTO, "r", based_on=seen), 1, OverrideSpec("400/minute", limit="search")
        ),
        lambda: service.overrides.remove(ChangeContext(OTTO, "r", based_on=seen), 1),
        lambda: service.policy.put(ChangeContext(OTTO, "r", based_on=0), POLICY),
    ):
        with pytest.raises(Conflict) as error:
            change()
        assert error.value.version == seen + 1
    assert service.overrides.get(1).bucket == "300/minute"
    assert service.overrides.add(
        ChangeContext(SUE, "r", based_on=seen), ACME, OverrideSpec("70/minute", limit="watched")
    ).version


class Overtaken(ConfigStore):
    """The store of an admin server, at which somebody is quicker: writes between a look and the write that follows."""

    others: list[Callable[[], Any]]

    def write(self, changes: Any, **more: Any) -> Any:
        if self.others:
            self.others.pop()()
        return super().write(changes, **more)


def test_what_was_judged_is_what_is_written_over_two_admin_servers(world: World) -> None:
    store = Overtaken(world.url, secret=SECRET, clock=world.clock)
    store.others = []
    mine, theirs = AdminService(store, secret=SECRET, clock=world.clock), world.made()

    def lower(number: int) -> Callable[[], Any]:
        return lambda: theirs.policy.set_tier(ChangeContext(OTTO, "r"), "pro", "search", f"{number}/minute")

    store.others = [lower(500)]
    with pytest.raises(NeedsConfirmation, match="500/minute on search now; 9000/minute is 18 times"):
        mine.policy.set_tier(ChangeContext(OTTO, "r"), "pro", "search", "9000/minute")  # nine times what it was
    assert [each.row.quota for each in store.tiers()] == [500]

    store.others = [lambda: theirs.blocks.add(ChangeContext(OTTO, "r"), GLOBEX)]
    assert mine.policy.set_tier(ChangeContext(OTTO, "r"), "pro", "search", "600/minute").version, (
        "looked at again, and harmless"
    )
    store.others = [lower(600 + number) for number in range(10)]
    with pytest.raises(Conflict, match="changed concurrently"):
        mine.policy.set_tier(ChangeContext(OTTO, "r"), "pro", "search", "700/minute")
    assert len(store.others) == 5
    store.close()


def test_change_that_was_judged_by_an_older_version_is_not_written(world: World) -> None:
    store = world.config
    seen = store.version
    world.service.blocks.add(ChangeContext(SUE, "r"), GLOBEX)
    by: Any = {"author": "ada", "reason": "r"}
    for change in (
        lambda: store.expecting(seen).assign(ACME, None, **by),
        lambda: store.expecting(seen).rollback(seen, **by),
        lambda: store.expecting(seen).put_policy(POLICY + "# later", **by),
    ):
        with pytest.raises(ConcurrentChange):
            change()
    assert store.version == seen + 1
    assert store.expecting(seen + 1).rollback(seen, **by)
    assert store.assign(ACME, None, label="Acme", **by), "nobody else is held back"


@pytest.mark.parametrize("reason", ["", "  ", "x" * 501, "two\nlines"])
def test_every_change_has_a_reason(found_in: World, reason: str) -> None:
    before = found_in.service.version
    with pytest.raises(InvalidInput, match="reason"):
        found_in.service.clients.assign_tier(ChangeContext(SUE, reason), ACME, "free")
    assert found_in.service.version == before


def test_what_is_not_there_cannot_be_changed(found_in: World) -> None:
    service, before = found_in.service, found_in.service.version
    for change in (
        lambda: service.overrides.get(99),
        lambda: service.overrides.change(ChangeContext(SUE, "r"), 99, OverrideSpec("10/minute")),
        lambda: service.overrides.remove(ChangeContext(SUE, "r"), 99),
        lambda: service.blocks.remove(ChangeContext(SUE, "r"), 99),
        lambda: service.clients.unassign_tier(ChangeContext(SUE, "r"), ClientRef("tenant", "nobody")),
        lambda: service.policy.remove_tier(ChangeContext(OTTO, "r"), "pro", "strangers"),
        lambda: service.policy.remove_route(ChangeContext(OTTO, "r"), "/nowhere"),
        lambda: service.policy.rollback(ChangeContext(OTTO, "r"), 99),
        lambda: service.policy.get(99),
        lambda: service.policy.diff(0, 99),
    ):
        with pytest.raises(NotFound):
            change()
    for change in (
        lambda: service.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "platinum"),
        lambda: service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("10/minute", limit="no-such-limit")),
        lambda: service.overrides.add(
            ChangeContext(SUE, "r"), ACME, OverrideSpec("10/minute", limit="search", valid_until=in_days(found_in, -1))
        ),
        lambda: service.blocks.add(ChangeContext(SUE, "r"), ACME, valid_until=in_days(found_in, -1)),
        lambda: service.policy.rollback(ChangeContext(OTTO, "r"), 1, sections=["nonsense"]),
    ):
        with pytest.raises(InvalidInput):
            change()
    assert service.version == before


def test_what_a_table_says_of_a_client_holds_before_the_document(office: AdminService) -> None:
    initech = ClientRef("tenant", "initech")
    office.clients.assign_tier(ChangeContext(SUE, "has not paid"), initech, "free")
    view = office.clients.get(initech)
    assert (view.tier, view.tier_from, view.label) == ("free", "assigned", "Initech")
    assert standing(office, initech, "search").bucket == "100/minute"
    assert [(each.name, each.clients) for each in office.policy.tiers()] == [("pro", 0), ("free", 1)]


def test_name_stays_with_a_client_that_changes_its_tier(office: AdminService) -> None:
    office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", label="Acme Inc")
    office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "free")
    assert (office.clients.get(ACME).label, office.clients.get(ACME).tier) == ("Acme Inc", "free")
    assert office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "free").notes == (
        "Nothing to change: it was already set.",
    )


def test_calendar_stays_with_a_client_that_changes_its_tier(office: AdminService) -> None:
    def calendar() -> tuple[str | None, int | str | None]:
        view = office.clients.get(ACME)
        return view.timezone, view.starts

    assert calendar() == (None, None)
    office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", timezone="Europe/Berlin", starts="15")
    assert calendar() == ("Europe/Berlin", 15)
    office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "free", starts="04-01")
    assert calendar() == ("Europe/Berlin", "04-01")
    office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "free", timezone="")
    assert calendar() == (None, "04-01")
    office.clients.unassign_tier(ChangeContext(SUE, "r"), ACME)
    assert calendar() == (None, "04-01"), "only the tier is removed"
    initech = ClientRef("tenant", "initech")
    office.clients.assign_tier(ChangeContext(SUE, "r"), initech, "pro", timezone="Asia/Tokyo")
    office.clients.unassign_tier(ChangeContext(SUE, "r"), initech)
    view = office.clients.get(initech)
    assert (view.tier_from, view.timezone) == ("policy", None), "the entry in the document applies again"
    for mistake in ({"timezone": "Tokio"}, {"starts": 0}, {"starts": "32"}, {"starts": "02-30"}):
        with pytest.raises(InvalidInput, match=r"unknown time zone|neither a day of a month nor of a year"):
            office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", **mistake)


# ------------------------------------------------------------------ the policy and its past


def test_policy_is_shown_with_what_tables_add(world: World) -> None:
    service = world.service
    service.policy.set_tier(ChangeContext(OTTO, "r"), "pro", "strangers", "7000/minute")
    service.policy.set_route(ChangeContext(OTTO, "r"), "/search", 3, route_class="search")
    service.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro")
    view = service.policy.get()
    assert (view.version, view.since, view.format, view.text) == (4, 1, "yaml", POLICY)
    assert {rule.name: rule.tiers for rule in view.rules}["strangers"] == {"pro": "7000/minute"}
    assert {rule.name: rule.tiers for rule in service.policy.get(1).rules}["strangers"] == {}
    (pro, free) = service.policy.tiers()
    assert (pro.name, pro.clients, free.name, free.is_default) == ("pro", 2, "free", True)
    assert [(each.limit, each.bucket, each.from_, each.since) for each in pro.limits] == [
        ("search", "1000/minute", "policy", None), ("strangers", "7000/minute", "table", 2),
    ]  # fmt: skip
    assert [(each.path, each.methods, each.cost, each.from_) for each in service.policy.routes()] == [
        ("/search", (), 3, "table"), ("/items/{id}", ("GET",), 1, "policy"), ("/login", ("POST",), 1, "policy"),
        ("/health", (), 0, "policy"),
    ]  # fmt: skip
    service.policy.remove_tier(ChangeContext(OTTO, "r"), "pro", "strangers")
    service.policy.remove_route(ChangeContext(OTTO, "r"), "/search")
    assert service.policy.routes()[0].cost == 2
    json.dumps([each.as_dict() for each in (*service.policy.tiers(), *service.policy.routes(), view)])


def test_document_is_checked_beside_the_rows_that_there_are(world: World) -> None:
    service = world.service
    service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("200/minute", limit="seats"))
    assert service.policy.check(POLICY, file="policy.yaml") == []
    (problem,) = service.policy.check(without("name: seats"), file="policy.yaml")
    assert problem.startswith("override of tenant acme on limit seats: 200/minute: no limit is called 'seats'")
    assert service.policy.check("limits: 5", file="policy.yaml")[0].startswith("policy.yaml:1")
    assert service.policy.check("limits: {", file="policy.yaml")
    assert "cannot tell its format" in service.policy.check(POLICY, file="policy.doc")[0]
    (told,) = service.policy.check(POLICY + f"  - {{api_key: {KEY}}}\n", file="policy.yaml")
    assert KEY not in told
    with pytest.raises(InvalidPolicy):
        service.policy.put(ChangeContext(OTTO, "r", confirmed=["policy"]), without("name: seats"))
    assert service.version == 2


def test_going_back_is_compared_with_what_holds(world: World) -> None:
    service = world.service
    service.policy.put(ChangeContext(OTTO, "more"), POLICY.replace("100/minute", "900/minute"))
    service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("1000/minute", limit="search"))
    service.policy.put(
        ChangeContext(OTTO, "more", confirmed=["ten-times"]), POLICY.replace("100/minute", "5000/minute")
    )
    with pytest.raises(NeedsConfirmation) as error:
        service.policy.rollback(ChangeContext(OTTO, "all of it"), 1)
    assert codes(error) == ["tenth"]
    assert service.policy.rollback(ChangeContext(OTTO, "a little"), 3).version
    assert [each.section for each in service.policy.diff(1, 3)] == ["documents", "overrides"]
    assert service.policy.rollback(ChangeContext(OTTO, "some of it"), 1, sections=["overrides"]).version
    assert service.overrides.list().items == ()
    assert [version.restores for version in service.policy.versions(most=2)] == [1, 3]
    assert service.policy.get().text == POLICY.replace("100/minute", "900/minute")


# ------------------------------------------------------------------ lists


def test_overrides_are_searched_and_paged(world: World) -> None:
    service = world.service
    service.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", label="Acme_Inc 100%")
    service.overrides.add(
        ChangeContext(SUE, "Contract 5%"),
        ACME,
        OverrideSpec("200/minute", limit="search", valid_until=in_days(world, 1)),
    )
    service.overrides.add(
        ChangeContext(SUE, "r"),
        ClientRef("tenant", "ac"),
        OverrideSpec("200/minute", limit="seats", valid_from=in_days(world, 2)),
    )
    service.overrides.add(
        ChangeContext(OTTO, "contract 50"), ClientRef("api_key", KEY), OverrideSpec("200/minute", limit="search")
    )
    world.clock.advance(3600 * 30)

    def ids(**question: Any) -> list[int]:
        return [each.id for each in service.overrides.list(**question).items]

    assert ids() == [3, 2, 1]
    assert (ids(search="ac"), ids(search="CONTRACT"), ids(search="5%"), ids(search="5%0")) == (
        [3, 2, 1],
        [3, 1],
        [1],
        [],
    )
    assert (ids(search="acme_inc"), ids(search="100%"), ids(search="otto"), ids(search="seats")) == ([1], [1], [3], [2])
    assert (ids(search=KEY), ids(search=CLIENTS.hash_of("api_key", KEY))) == ([3], [3])
    assert (ids(state="active"), ids(state="future"), ids(state="expired")) == ([3], [2], [1])
    clients = (ACME, ClientRef("api_key", KEY), ClientRef("tenant", "x"))
    assert tuple(ids(client=each) for each in clients) == (
        [1],
        [3],
        [],
    )
    pages, after = [], None
    while True:
        page = service.overrides.list(most=1, after=after)
        pages += page.items
        if page.next is None:
            break
        after = page.next
    assert [each.id for each in pages] == [3, 2, 1]
    assert [each.state for each in pages] == ["active", "future", "expired"]
    assert pages[-1].label == "Acme_Inc 100%"
    for odd in (
        {"state": "odd"},
        {"most": 0},
        {"most": 10_000},
        {"after": "x"},
        {"after": "-1"},
        {"search": "x" * 501},
    ):
        with pytest.raises(InvalidInput):
            ids(**odd)


def test_blocks_of_all_sources_are_one_list(world: World) -> None:
    service = world.service
    for tenant in ("one", "two", "three"):
        service.blocks.add(
            ChangeContext(SUE, f"about {tenant}"), ClientRef("tenant", tenant), valid_until=in_days(world, 1)
        )
    world.counters.block("user", "live-one")
    world.counters.block("user", "live-two", reason="told")
    expected = [
        ("config", "three"), ("config", "two"), ("config", "one"), ("policy", "evil"), ("live", "live-one"),
        ("live", "live-two"),
    ]  # fmt: skip
    for most in (1, 2, 3, 4, 50):
        found, after = [], None
        while True:
            page = service.blocks.list(most=most, after=after)
            assert len(page.items) <= most
            found += [(each.source, each.who.value) for each in page.items]
            if page.next is None:
                break
            after = page.next
        assert found == expected
    assert [each.who.value for each in service.blocks.list(search="TWO").items] == ["two", "live-two"]
    world.clock.advance(3600 * 30)
    assert [each.who.value for each in service.blocks.list(state="expired").items] == ["three", "two", "one"]
    assert [each.who.value for each in service.blocks.list(state="active").items] == ["evil", "live-one", "live-two"]
    for odd in ("x", "live:x", "live:[1,2]", "config:x", "nowhere:1"):
        with pytest.raises(InvalidInput):
            service.blocks.list(after=odd)


def test_clients_of_document_and_tables_are_one_list(world: World) -> None:
    service = world.service
    service.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", label="Acme Inc")
    service.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("200/minute", limit="search"))
    service.overrides.add(
        ChangeContext(SUE, "r"), ClientRef("tenant", "initech"), OverrideSpec("2000/minute", limit="search")
    )
    service.overrides.add(
        ChangeContext(SUE, "r"), ClientRef("api_key", KEY), OverrideSpec("200/minute", limit="search")
    )
    service.blocks.add(ChangeContext(SUE, "r"), ClientRef("user", "mallory"))
    everybody = {
        ("ip", "198.51.100.0/24"): ("The office", None, 0, False),
        ("tenant", "evil"): (None, None, 0, True),
        ("api_key", CLIENTS.hash_of("api_key", KEY)): (None, None, 1, False),
        ("tenant", "acme"): ("Acme Inc", "pro", 1, False),
        ("tenant", "initech"): ("Initech", "pro", 1, False),
        ("user", "mallory"): (None, None, 0, True),
    }
    for most in (1, 2, 3, 50):
        found, after = [], None
        while True:
            page = service.clients.list(most=most, after=after)
            assert len(page.items) <= most
            found += page.items
            if page.next is None:
                break
            after = page.next
        assert {tuple(each.who): (each.label, each.tier, each.overrides, each.blocked) for each in found} == everybody
        assert len(found) == len(everybody)
        assert [each.label for each in found] == ["Acme Inc", "Initech", "The office", None, None, None]
    assert [each.who.value for each in service.clients.list(search="ACME").items] == ["acme"]
    assert [each.who.value for each in service.clients.list(search="office").items] == ["198.51.100.0/24"]
    assert [each.who.kind for each in service.clients.list(search=KEY).items] == ["api_key"]


def test_clients_come_by_their_names_over_all_pages(world: World) -> None:
    """Names of rows and of the document are one order, whatever the database thinks of letters."""
    names = ["zebra", "Ähre", "acme 2", "Acme 10", "b_c", "B-D", "ÖSEN", "the end", "É", "𝔄", "~", "Initech", "acme 2"]
    rows = [Put("clients", Assignment("tenant", f"t{number}", None, name)) for number, name in enumerate(names)]
    rows += [Put("clients", Assignment("tenant", f"n{number}", "pro", None)) for number in range(3)]
    rows += [Put("clients", Assignment("tenant", "initech", "free", None))]
    world.config.write(rows, author="ada", reason="many")
    found: list[Any] = []
    after = None
    while True:
        page = world.service.clients.list(most=2, after=after)
        found += page.items
        if page.next is None:
            break
        after = page.next
        assert re.fullmatch(r"[!-~]+", after), "it may stand in an address"
    labels = [each.label for each in found]
    small = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")
    named = sorted([*names, "Initech", "The office"], key=lambda name: name.translate(small))
    assert [each for each in labels if each is not None] == named
    assert labels[len(named) :] == [None] * 4
    assert [each.who.value for each in found if each.label is None] == ["evil", "n0", "n1", "n2"]
    assert [each.tier for each in found if each.who.value == "initech"] == ["free"], "what a row says of it"


def test_audit_is_all_that_was_done_in_the_order_of_time(world: World) -> None:
    service = world.service
    for number in range(3):
        world.clock.advance(1)
        service.audit.record(VERA, "signed in", f"from 192.0.2.{number}")
        service.blocks.add(
            ChangeContext(SUE, f"reason {number}"), ClientRef("tenant", f"t{number}")
        )  # in the same microsecond
    service.policy.rollback(ChangeContext(OTTO, "back"), 2)
    told = [(each.action, each.about, each.author, each.version) for each in service.audit.list().items]
    assert told == [
        ("restored", "version 2", "otto", 5),
        ("added", "block of tenant t2", "sue", 4), ("signed in", "from 192.0.2.2", "vera", None),
        ("added", "block of tenant t1", "sue", 3), ("signed in", "from 192.0.2.1", "vera", None),
        ("added", "block of tenant t0", "sue", 2), ("signed in", "from 192.0.2.0", "vera", None),
        ("added", "policy document policy.yaml", "ada", 1),
    ]  # fmt: skip
    for most in (1, 2, 3):
        found, before = [], None
        while True:
            page = service.audit.list(most=most, before=before)
            found += page.items
            if page.next is None:
                break
            before = page.next
            service.audit.record(VERA, "signed in", "while somebody reads")
        seen = [each for each in found if each.about != "while somebody reads"]
        assert [(each.action, each.about, each.author, each.version) for each in seen] == told
        assert [each.id for each in found] == sorted((each.id for each in found), reverse=True)
    assert {each.author for each in service.audit.list(author="sue").items} == {"sue"}
    assert [each.version for each in service.audit.list(search="T1").items] == [3]
    assert [each.version for each in service.audit.list(search="reason 0").items] == [2]
    for odd in ("x", "-", "00-v1", "0" * 16 + "-x1"):
        with pytest.raises(InvalidInput):
            service.audit.list(before=odd)


# ------------------------------------------------------------------ nothing secret


def test_api_key_gets_nowhere(here: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pasted into every field there is: it is refused, or hashed, and never told again."""
    service, told = here.service, []
    here.send(path="/search", api_key=KEY)
    assert here.log.flush()
    who = ClientRef("api_key", KEY)
    sue, otto = ChangeContext(SUE, "r"), ChangeContext(OTTO, "r")
    questions: list[Callable[[], Any]] = [
        lambda: service.clients.find(KEY),
        lambda: service.clients.get(who),
        lambda: service.clients.why(who),
        lambda: service.clients.decisions(client=who),
        lambda: service.overrides.list(search=KEY),
        lambda: service.clients.list(search=KEY),
        lambda: service.blocks.list(search=KEY),
        lambda: service.overrides.list(client=who),
        lambda: service.audit.list(search=KEY, author=KEY),
        lambda: service.overrides.list(after=KEY),
        lambda: service.blocks.list(after=f"live:{KEY}"),
        lambda: service.clients.decisions(outcome=KEY),
        lambda: service.clients.decisions(after=KEY),
        lambda: service.clients.get(ClientRef(KEY, "x")),
        lambda: service.clients.get(ClientRef("ip", KEY)),
        lambda: service.clients.get(ClientRef("subnet", KEY)),
        lambda: service.overrides.add(sue, who, OverrideSpec("200/minute", limit="search")),
        lambda: service.overrides.add(sue, ClientRef("tenant", KEY), OverrideSpec("200/minute", limit="search")),
        lambda: service.overrides.add(sue, ACME, OverrideSpec(KEY, limit="search")),
        lambda: service.overrides.add(sue, ACME, OverrideSpec("200/minute", limit=KEY)),
        lambda: service.overrides.add(sue, ACME, OverrideSpec("200/minute", route_class=KEY)),
        lambda: service.overrides.add(
            ChangeContext(SUE, f"key={KEY}, see mail"), ACME, OverrideSpec("200/minute", limit="search")
        ),
        lambda: service.clients.assign_tier(sue, who, "pro"),
        lambda: service.clients.assign_tier(sue, ACME, KEY),
        lambda: service.clients.assign_tier(sue, ACME, "pro", label=f"has {KEY}."),
        lambda: service.blocks.add(ChangeContext(SUE, f"stolen ({KEY})"), who),
        lambda: service.blocks.add(sue, who),
        lambda: service.blocks.add(sue, ClientRef("user", KEY)),
        lambda: service.blocks.add(sue, ClientRef("ip", KEY)),
        lambda: service.clients.reset(sue, who),
        lambda: service.clients.reset(sue, ACME, limits=[KEY]),
        lambda: service.policy.set_tier(otto, KEY, "search", "200/minute"),
        lambda: service.policy.set_tier(otto, "pro", KEY, "2000/minute"),
        lambda: service.policy.set_tier(otto, "pro", "search", KEY),
        lambda: service.policy.set_route(ChangeContext(OTTO, KEY), f"/{KEY} ", 1),
        lambda: service.policy.set_route(otto, KEY, 1),
        lambda: service.policy.put(otto, POLICY + f"  - {{api_key: {KEY}}}\n"),
        lambda: service.policy.put(otto, POLICY, file=KEY),
        lambda: service.blocks.remove(sue, who),
        lambda: service.clients.unassign_tier(sue, who),
        lambda: service.clients.timeline(who, since_us=0, until_us=START_US + 10**9),
        service.fleet.overview,
        lambda: service.blocks.list(),
        lambda: service.clients.list(),
        lambda: service.audit.list(),
    ]
    done = 0
    for question in questions:
        try:
            told.append(repr(question()))
            done += 1
        except HeadgateError as error:
            told.append(f"{error!r} {error}")
    assert done > 15
    assert not [each for each in told if KEY in each]
    assert KEY not in repr(service) + repr(here.config) + caplog.text
    here.config.close()
    with suppress(sqlite3.Error), closing(sqlite3.connect(tmp_path / "config.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for file in tmp_path.iterdir():
        assert KEY.encode() not in file.read_bytes(), file.name


def test_key_that_only_the_configuration_knows_is_no_reason_nor_a_name(office: AdminService) -> None:
    office.blocks.add(ChangeContext(SUE, "r"), ClientRef("api_key", KEY))
    for change in (
        lambda: office.clients.assign_tier(ChangeContext(SUE, f"see '{KEY}'"), ACME, "pro"),
        lambda: office.clients.assign_tier(ChangeContext(SUE, "r"), ACME, "pro", label=KEY),
        lambda: office.blocks.add(ChangeContext(SUE, "r"), ClientRef("tenant", KEY)),
    ):
        with pytest.raises(InvalidInput, match="the text contains an API key"):
            change()


def test_key_that_a_change_is_about_is_not_kept_beside_it(office: AdminService) -> None:
    """Also one that nobody has heard of before."""
    fresh, who = "fresh-and-plain-0042", ClientRef("api_key", "fresh-and-plain-0042")
    for change in (
        lambda: office.overrides.add(
            ChangeContext(SUE, f"for {fresh}"), who, OverrideSpec("50/minute", limit="search")
        ),
        lambda: office.clients.assign_tier(ChangeContext(SUE, "r"), who, "pro", label=f"customer/{fresh}"),
        lambda: office.blocks.add(ChangeContext(SUE, f"leaked: {fresh}"), who),
    ):
        with pytest.raises(InvalidInput, match="the text contains an API key"):
            change()
    assert office.blocks.add(ChangeContext(SUE, "leaked"), who).version is not None


def test_text_that_may_be_a_key_is_not_shown(office: AdminService) -> None:
    unknown = "sk_live_nobody_knows_this"
    for change in (
        lambda: office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec(unknown, limit="search")),
        lambda: office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("10/minute", limit=unknown)),
        lambda: office.policy.set_tier(ChangeContext(OTTO, "r"), "pro", unknown, "10/minute"),
        lambda: office.blocks.add(ChangeContext(SUE, "r"), ClientRef("ip", unknown)),
    ):
        with pytest.raises(InvalidInput) as error:
            change()
        assert unknown not in str(error.value)
    with pytest.raises(InvalidInput, match="cannot read the limit 'ten a day'"):
        office.overrides.add(ChangeContext(SUE, "r"), ACME, OverrideSpec("ten a day", limit="search"))


# ------------------------------------------------------------------ the fleet


def test_overview_is_what_the_nodes_said(here: World) -> None:
    for _ in range(5):
        here.send(30, path="/search", tenant="acme")
        here.clock.advance(1)
        here.reporter.report()
    here.clock.advance(2)
    here.reporter.report()
    assert here.log.flush()
    view = here.service.fleet.overview()
    assert [(node.name.partition(":")[0], node.state, node.policy_version) for node in view.nodes] == [
        ("web-1", "ready", "1")
    ]
    assert view.series is not None
    assert len(view.series.allowed) == 300
    assert (sum(view.series.allowed), sum(view.series.denied)) == (view.totals.allowed, view.totals.denied)
    assert view.totals.allowed + view.totals.denied == 150
    assert [(each.kind, each.key, each.label) for each in view.top_denied] == [
        ("tenant", CLIENTS.hash_of("tenant", "acme"), "tenant acme")
    ]
    assert here.service.clients.find(view.top_denied[0].key) == ACME
    assert (view.version, view.troubles) == (1, ())
    json.dumps(view.as_dict())


def test_overview_never_fails(here: World, tmp_path: Path) -> None:
    service = here.made(status_store=None, log=None)
    assert len(service.fleet.overview().troubles) == 2
    here.config.close()
    (tmp_path / "config.db").rename(tmp_path / "gone.db")
    for leftover in tmp_path.glob("config.db*"):
        leftover.unlink()
    (tmp_path / "config.db").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    view = service.fleet.overview()
    assert (view.version, view.nodes, view.series) == (None, (), None)
    assert any("config store" in trouble for trouble in view.troubles)
    with pytest.raises(ConfigUnavailable):
        service.clients.get(ACME)


def test_threads_share_one_service(here: World) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            who = ClientRef("tenant", f"t{number}")
            for round in range(2):
                here.service.overrides.add(
                    ChangeContext(SUE, "r", confirmed=()), who, OverrideSpec(f"{200 + round}/minute", limit="search")
                )
                here.service.clients.get(who)
                here.service.clients.decisions(client=who)
                here.service.overrides.remove(
                    ChangeContext(SUE, "r"), here.service.overrides.list(client=who).items[0].id
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert here.service.version == 1 + 4 * 2 * 2
