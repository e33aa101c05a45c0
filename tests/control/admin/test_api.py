"""The admin API: who may do what, on which version, how often, and what it never tells."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response

from headgate import Calendar, Limiter
from headgate.abuse.actions import ActionDispatcher, list_actions
from headgate.abuse.model import AbuseScenario, ActionStep, Finding, Threshold
from headgate.cli import main
from headgate.control.admin import AdminServer, Tokens, create_app
from headgate.control.admin.api.dependencies import Parts
from headgate.control.admin.api.schemas import WriteAnswer
from headgate.control.admin.idempotency import IdempotencyStore
from headgate.control.admin.middleware import MAX_BODY_BYTES, MAX_POLICY_BYTES, BodyLimit
from headgate.control.admin.problems import TITLES, of_error
from headgate.control.admin.sessions import FormRefused, Sessions
from headgate.control.admin.tables import SESSIONS
from headgate.control.config import CanarySpec, ConfigStore, ConfigUnavailable
from headgate.control.config.engine import read_transaction
from headgate.control.service.errors import NotFound
from headgate.control.service.models import ROLES, Change
from headgate.control.service.service import AdminService
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput
from headgate.quotas import Ledger, QuotaPlan
from headgate.stores.redis.rollout import CanaryThresholds, RolloutClient, new_rollout
from headgate.stores.redis.scripts import ScriptSet
from headgate.testing import FakeClock
from support.asgi_client import scope, talk
from support.servers import wait_until
from support.webhook_receiver import WebhookReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from support.servers import RedisServer

POLICY = """
tier: free
routes: [{path: /api/search, class: search, cost: 2}]
limits:
  - {name: search, class: search, by: client, bucket: 100/minute, tiers: {pro: 1000/minute}}
  - {name: "/api/pay by ip", path: /api/pay, by: ip, bucket: 10/minute, on_failure: closed}
"""
SECRET = "the same sixteen bytes or more"
START_US = 1_794_800_000_000_000
DAY = 86_400.0
RAW_KEY = "sk_live_4f9aQ7xTt51H8xk2eZvKYlo2C"
ACME = {"kind": "tenant", "value": "acme"}


class Admin:
    """An admin server with a real service, asked as programs ask it."""

    def __init__(self, url: str, directory: Path) -> None:
        self.clock = FakeClock(START_US)
        self.url = url
        self.store = ConfigStore(url, secret=SECRET, clock=self.clock)
        self.tokens = Tokens(url, clock=self.clock)
        self.texts = dict(TEXTS)
        if self.store.version == 0:
            self.store.put_policy(POLICY, author="ada", reason="first policy")
            self.texts = {role: self.tokens.make(role, role, by="the test").text for role in ROLES}
        self.counters = Limiter(clock=self.clock)
        self.ledger = Ledger(f"sqlite:///{directory}/ledger.db", clock=self.clock)
        self.service = AdminService(
            self.store,
            counters=self.counters,
            log=f"sqlite:///{directory}/decisions.db",
            secret=SECRET,
            clock=self.clock,
            ledger=self.ledger,
        )
        self.app = shared_app()
        self.app.state.parts = Parts(self.service, self.tokens, IdempotencyStore(self.tokens))
        self.app.state.credentials.__init__(self.tokens)
        self.pace = 1.0
        """Seconds between requests, by the clock of the server's own limits."""
        GATE_CLOCK.advance(3600)
        self._runner = asyncio.Runner()

    def count_in(self, counters: Limiter) -> None:
        """Use these counters from now on."""
        self.counters.close()
        self.counters = counters
        self.service = AdminService(self.store, counters=counters, secret=SECRET, clock=self.clock)
        self.app.state.parts = Parts(self.service, self.tokens, IdempotencyStore(self.tokens))

    def ask(self, method: str, path: str, *, role: str | None = "admin", **options: Any) -> httpx.Response:
        return self.together((method, path), role=role, **options)[0]

    def together(self, *requests: tuple[str, str], role: str | None = "admin", **options: Any) -> list[httpx.Response]:
        """The answers to requests that are sent at the same time."""
        headers = {} if role is None else {"Authorization": f"Bearer {self.texts.get(role, role)}"}
        headers |= options.pop("headers", {})
        GATE_CLOCK.advance(self.pace)

        async def run() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app, client=("203.0.113.9", 1234), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                asked = [http.request(method, _path(path), headers=headers, **options) for method, path in requests]
                return list(await asyncio.gather(*asked))

        return self._runner.run(run())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()
        self.counters.close()
        self.tokens.close()
        self.ledger.close()
        self.store.close()


GATE_CLOCK = FakeClock(START_US)


@cache
def shared_app() -> Any:
    """One for all tests, which give it their own service: it makes its routes ready when it is first asked."""
    nothing: Any = None
    return create_app(nothing, nothing, pages=False, clock=GATE_CLOCK)


def _path(path: str) -> str:
    return path if path.startswith("/") else f"/api/v1/{path}"


TEXTS: dict[str, str] = {}
"""The tokens of the database that each test has a copy of."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that is ready: a policy, and a token of each role."""
    directory = tmp_path_factory.mktemp("begun")
    with Admin(f"sqlite:///{directory}/config.db", directory) as admin:
        TEXTS.update(admin.texts)
    return directory / "config.db"


@pytest.fixture
def admin(tmp_path: Path, begun: Path) -> Iterator[Admin]:
    shutil.copy(begun, tmp_path / "config.db")
    with Admin(f"sqlite:///{tmp_path}/config.db", tmp_path) as admin:
        yield admin


@pytest.fixture(scope="module")
def begun_furnished(tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Path:
    """The same with something for each row of the table to be about."""
    directory = tmp_path_factory.mktemp("furnished")
    shutil.copy(begun, directory / "config.db")
    signed: dict[str, Any] = {"author": "ada", "reason": "a start"}
    with Admin(f"sqlite:///{directory}/config.db", directory) as admin:
        admin.store.override(("tenant", "acme"), "150/minute", limit="search", **signed)
        admin.store.assign(("tenant", "acme"), "pro", **signed)
        admin.store.block(("tenant", "acme"), **signed)
        admin.store.set_tier("pro", "search", "1500/minute", **signed)
        admin.store.set_route("/api/find", 3, route_class="search", **signed)
    return directory / "config.db"


@pytest.fixture
def furnished(tmp_path: Path, begun_furnished: Path) -> Iterator[Admin]:
    shutil.copy(begun_furnished, tmp_path / "config.db")
    with Admin(f"sqlite:///{tmp_path}/config.db", tmp_path) as admin:
        admin.ledger.grant("acme", 100)
        yield admin


@pytest.fixture
def anywhere(config_url: str, tmp_path: Path) -> Iterator[Admin]:
    """The same on each kind of database."""
    with Admin(config_url, tmp_path) as admin:
        yield admin


def override(**more: Any) -> dict[str, Any]:
    return {"who": ACME, "bucket": "200/minute", "limit": "search", "reason": "contract 4711"} | more


# ------------------------------------------------------------------ who may do what


class Row(NamedTuple):
    """A request, and the least role that may send it."""

    role: str
    method: str
    path: str
    body: dict[str, Any] | None = None
    based_on: bool = False


WHO = "kind=tenant&value=acme"
WHY = {"reason": "a test"}
TIME = "since=2026-11-16T00:00:00Z&until=2026-11-16T01:00:00Z"
TABLE = [
    Row("viewer", "GET", "overview"),
    Row("viewer", "GET", "steps"),
    Row("viewer", "GET", "decisions"),
    Row("viewer", "POST", "find", {"client": "tenant=acme"}),
    Row("viewer", "POST", "candidates", {"client": "tenant=acme"}),
    Row("viewer", "POST", "matches", {"client": "acm"}),
    Row("viewer", "POST", "search", {"text": "acme"}),
    Row("viewer", "GET", f"client?{WHO}"),
    Row("viewer", "GET", f"client/why?{WHO}&at=today&zone=Europe/Berlin"),
    Row("viewer", "GET", f"client/timeline?{WHO}&{TIME}"),
    Row("viewer", "GET", "clients"),
    Row("viewer", "GET", "overrides"),
    Row("viewer", "GET", "overrides/1"),
    Row("viewer", "GET", "blocks"),
    Row("viewer", "GET", "actions?state=active&search=198.51"),
    Row("viewer", "GET", "tiers"),
    Row("viewer", "GET", "routes"),
    Row("viewer", "GET", "policy"),
    Row("viewer", "POST", "policy/check", {"text": POLICY}),
    Row("viewer", "GET", "policy/canary"),
    Row("viewer", "GET", "regions"),
    Row("viewer", "GET", "scripts"),
    Row("viewer", "GET", "ledger/accounts"),
    Row("viewer", "GET", "ledger/account?account=acme"),
    Row("viewer", "GET", f"ledger/statement?account=acme&{TIME}"),
    Row("viewer", "GET", "versions"),
    Row("viewer", "GET", "versions/1/diff"),
    Row("viewer", "GET", "audit"),
    Row("support", "POST", "client/reset", {"who": ACME} | WHY),
    Row("support", "PUT", "client/tier", {"who": ACME, "tier": "pro", "label": "Acme Inc."} | WHY),
    Row("support", "PUT", "client/tier", {"who": ACME, "tier": "pro", "timezone": "Asia/Tokyo", "starts": 15} | WHY),
    Row("support", "DELETE", f"client/tier?{WHO}&reason=over"),
    Row("support", "POST", "overrides", override(who={"kind": "tenant", "value": "zeta"})),
    Row("support", "PUT", "overrides/1", override(bucket="300/minute")),
    Row("support", "DELETE", "overrides/1?reason=over"),
    Row("support", "POST", "blocks", {"who": {"kind": "ip", "value": "203.0.113.9"}} | WHY),
    Row("support", "DELETE", "blocks/1?reason=over"),
    Row("support", "DELETE", f"blocks?{WHO}&reason=over"),
    Row("support", "DELETE", "actions/ACTION?reason=over"),
    Row("operator", "POST", "blocks", {"who": {"kind": "ip", "value": "203.0.113.0/24"}} | WHY),
    Row("operator", "PUT", "tiers/pro/search", {"bucket": "2000/minute"} | WHY),
    Row("operator", "DELETE", "tiers/pro/search?reason=over"),
    Row("operator", "PUT", "routes", {"path": "/api/search", "cost": 3, "class": "search"} | WHY),
    Row("operator", "DELETE", "routes?path=/api/find&reason=over"),
    Row("operator", "PUT", "policy", {"text": POLICY + "name: shop\n", "file": "policy.yaml"} | WHY, based_on=True),
    Row("operator", "POST", "policy/canary", {"text": POLICY + "name: shop\n", "percent": 10} | WHY, based_on=True),
    Row("operator", "GET", "policy/suggestions"),
    Row("operator", "POST", "policy/canary/promote", {"confirm": ["canary"]} | WHY),
    Row("operator", "POST", "policy/canary/rollback", {} | WHY),
    Row("operator", "POST", "scripts/promote", {"confirm": ["canary"]} | WHY),
    Row("operator", "POST", "scripts/rollback", {} | WHY),
    Row("operator", "POST", "ledger/grants", {"account": "acme", "amount": 100} | WHY),
    Row("operator", "POST", "ledger/adjustments", {"account": "acme", "amount": -5} | WHY),
    Row("operator", "POST", "versions/1/restore", {"sections": ["tiers"]} | WHY),
    Row("admin", "GET", "tokens"),
    Row("admin", "POST", "tokens", {"name": "eve", "role": "viewer", "days": 3}),
    Row("admin", "DELETE", "tokens/TOKEN"),
]


def start_scripts(limiter: Limiter) -> str:
    """Start a canary of scripts; returns the version of the candidate."""
    shipped = ScriptSet.shipped()
    candidate = shipped.replace({"gcra": f"-- faster\n{shipped.sources['gcra']}"})
    with closing(limiter.engine.store.background_client()) as background:
        client = RolloutClient(background)
        by: dict[str, Any] = {"author": "ada", "reason": "faster"}
        rollout = new_rollout(candidate, CanaryThresholds(), percent=50, nodes=(), view=client.read(), **by)
        assert client.write(rollout, 0)
    return candidate.digest


def take_action(admin: Admin) -> str:
    """Delay a client; returns the id of the action."""
    engine, step = admin.counters.engine, ActionStep("delay", timedelta(minutes=5))
    scenario = AbuseScenario("scraping", "ip", (Threshold("paths", 9),), timedelta(minutes=1), (step,))
    found = Finding("scraping", "ip", "198.51.100.7", START_US, "paths", 10, 9, "10 paths in one minute")
    ActionDispatcher(engine, admin.clock.now_us).apply(found, scenario)
    (action,) = list_actions(engine, admin.clock.now_us())
    return action.id


def path_of(admin: Admin, row: Row) -> str:
    path = row.path.replace("TOKEN", admin.texts["viewer"].split("_")[1])
    return path.replace("ACTION", take_action(admin)) if "ACTION" in path else path


def sent(admin: Admin, row: Row, role: str | None) -> httpx.Response:
    path = path_of(admin, row)
    headers = {"If-Match": f'"{admin.store.version}"'} if row.based_on else {}
    return admin.ask(row.method, path, role=role, json=row.body, headers=headers)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.method} {row.path.partition('?')[0]}")
def test_each_role_may_do_what_those_before_it_may_and_no_more(
    row: Row, furnished: Admin, redis7: RedisServer, unique: str
) -> None:
    admin = furnished
    if row.path.startswith("scripts/"):
        admin.count_in(Limiter(redis7.url, namespace=unique))
        start_scripts(admin.counters)
    if row.path in ("policy/canary/promote", "policy/canary/rollback"):
        admin.store.start_canary(POLICY + "name: shop\n", CanarySpec(percent=10), author="ada", reason="a test")
    before = admin.store.version
    nobody = sent(admin, row, None)
    assert (nobody.status_code, nobody.json()["type"]) == (401, "token-needed")
    assert nobody.headers["www-authenticate"].startswith("Bearer")
    for role in ROLES[: ROLES.index(row.role)]:
        refused = sent(admin, row, role)
        assert (refused.status_code, refused.json()["type"]) == (403, "role-too-low"), role
        assert "Your role (" in refused.json()["detail"]
        assert admin.store.version == before
    allowed = sent(admin, row, row.role)
    assert allowed.status_code == 200, allowed.text


def test_scripts_are_promoted_and_rolled_back(admin: Admin, redis7: RedisServer, unique: str) -> None:
    for path in ("promote", "rollback"):
        refused = admin.ask("POST", f"scripts/{path}", json=WHY)
        assert (refused.status_code, refused.json()["detail"]) == (422, "counters in memory need no scripts")
    admin.count_in(Limiter(redis7.url, namespace=unique))
    assert admin.ask("POST", "scripts/promote", json=WHY).json()["detail"] == "there is no rollout of scripts"
    version = start_scripts(admin.counters)
    refused = admin.ask("POST", "scripts/promote", json=WHY)
    assert (refused.status_code, refused.json()["type"]) == (409, "confirmation-needed")
    assert "no node has compared" in refused.text
    done = admin.ask("POST", "scripts/promote", json={"confirm": ["canary"]} | WHY)
    assert done.json()["what"] == f"promoted version {version} of the scripts"
    rollout = admin.ask("GET", "scripts").json()["rollout"]
    assert (rollout["state"], rollout["ended_by"], rollout["reason"]) == ("promoted", "admin", "a test")
    again = admin.ask("POST", "scripts/promote", json=WHY)
    assert (again.status_code, again.json()["detail"]) == (404, "the rollout is promoted already")
    admin.clock.advance(1)
    assert admin.ask("POST", "scripts/rollback", json=WHY).status_code == 200
    entries = [each for each in admin.ask("GET", "audit").json()["items"] if "scripts" in each["action"]]
    assert [(each["action"], each["about"]) for each in entries] == [
        (f"{state} scripts", f"version {version}") for state in ("rolled back", "promoted")
    ]


def test_scripts_that_differed_are_promoted_with_a_confirmation(admin: Admin, redis7: RedisServer, unique: str) -> None:
    admin.count_in(Limiter(redis7.url, namespace=unique))
    start_scripts(admin.counters)
    with closing(admin.counters.engine.store.background_client()) as background:
        client = RolloutClient(background)
        client.poll(-1, "web-2:8", json.dumps({"role": "canary", "runs": 500, "differences": 2}), {})
        assert "runs 500, differences 2" in admin.ask("POST", "scripts/promote", json=WHY).text
        client.poll(-1, "web-2:8", json.dumps({"role": "canary", "runs": 500, "differences": 0}), {})
        assert admin.ask("POST", "scripts/promote", json=WHY).status_code == 200


def test_table_knows_every_endpoint(admin: Admin) -> None:
    described = {
        (method.upper(), path)
        for path, methods in admin.app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/api/")
    }
    templates = {(method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path))): path for method, path in described}
    for row in TABLE:
        path = f"/api/v1/{row.path.partition('?')[0]}"
        fits = {key: each for key, each in templates.items() if key[0] == row.method and key[1].fullmatch(path)}
        described -= {(row.method, each) for each in fits.values()}
    assert not described


def test_what_is_done_is_signed_and_audited(admin: Admin) -> None:
    made = admin.ask("POST", "overrides", role="support", json=override()).json()
    assert WriteAnswer(**made).version == admin.store.version
    newest = admin.ask("GET", "versions").json()["items"][0]
    assert (newest["author"], newest["reason"], newest["version"]) == ("support", "contract 4711", made["version"])
    assert admin.ask("GET", f"overrides/{made['ids'][0]}").json()["author"] == "support"
    admin.clock.advance(1)
    admin.ask("POST", "tokens", json={"name": "eve", "role": "viewer"})
    entry = admin.ask("GET", "audit").json()["items"][0]
    assert (entry["author"], entry["action"]) == ("admin", "made token")
    assert "eve" in entry["about"] + entry["what"]


# ------------------------------------------------------------------ tokens


def test_token_is_shown_once_and_kept_as_a_hash(anywhere: Admin) -> None:
    made = anywhere.ask("POST", "tokens", json={"name": "eve", "role": "operator", "days": 3}).json()
    assert re.fullmatch(r"hg_[0-9a-z]{10}_[0-9A-Za-z]{43}", made["token"])
    assert made["expires_us"] == START_US + 3 * 86_400_000_000
    listed = anywhere.ask("GET", "tokens").json()["items"]
    assert {each["name"]: each["state"] for each in listed} == dict.fromkeys([*ROLES, "eve"], "active")
    assert made["token"] not in json.dumps(listed)
    assert anywhere.ask("GET", "policy", role=made["token"]).status_code == 200
    if anywhere.url.startswith("sqlite"):
        assert made["token"].split("_")[2].encode() not in every_byte(anywhere)


def test_token_ends_when_it_says_so(anywhere: Admin) -> None:
    text = anywhere.tokens.make("eve", "viewer", by="ada", days=1).text
    anywhere.clock.advance(DAY - 1)
    assert anywhere.ask("GET", "policy", role=text).status_code == 200
    anywhere.clock.advance(1)
    assert anywhere.ask("GET", "policy", role=text).status_code == 401
    states = {each["name"]: each["state"] for each in anywhere.ask("GET", "tokens").json()["items"]}
    assert states["eve"] == "expired"


def test_revoked_token_ends_at_once_and_stays_for_the_audit(anywhere: Admin) -> None:
    token, text = anywhere.tokens.make("eve", "viewer", by="ada")
    assert anywhere.ask("GET", "policy", role=text).status_code == 200
    assert anywhere.ask("DELETE", f"tokens/{token.id}").json()["what"] == "revoked token eve"
    assert anywhere.ask("GET", "policy", role=text).status_code == 401
    kept = {each["id"]: each for each in anywhere.ask("GET", "tokens").json()["items"]}[token.id]
    assert (kept["state"], kept["revoked_by"], kept["revoked_us"]) == ("revoked", "admin", START_US)
    assert anywhere.ask("DELETE", "tokens/0000000000").status_code == 404


def test_use_is_noted_once_a_minute(admin: Admin) -> None:
    def used_us() -> int | None:
        return next(token.used_us for token in admin.tokens.list() if token.name == "viewer")

    assert used_us() is None
    admin.ask("GET", "policy", role="viewer")
    assert used_us() == START_US
    admin.clock.advance(59)
    admin.ask("GET", "policy", role="viewer")
    assert used_us() == START_US
    admin.clock.advance(1)
    admin.ask("GET", "policy", role="viewer")
    assert used_us() == START_US + 60_000_000


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1] + ("a" if text[-1] != "a" else "b"),
        lambda text: text + "a",
        lambda text: text[:-1],
        lambda text: text.upper(),
        lambda text: f"hg_0000000000_{text.split('_')[2]}",
        lambda text: f" {text}x",
        lambda text: "x" * 8000,
    ],
)
def test_what_is_almost_a_token_is_none(change: Callable[[str], str], admin: Admin) -> None:
    headers = {"Authorization": f"Bearer {change(admin.texts['admin'])}"}
    refused = admin.ask("GET", "policy", role=None, headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (401, "token-needed")
    assert admin.tokens.check(change(admin.texts["admin"])) is None


def test_first_token_is_made_once_however_many_servers_start(config_url: str) -> None:
    made: list[Any] = []
    servers = [Tokens(config_url, clock=FakeClock(START_US)) for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: made.append(each.first())) for each in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (found,) = [each for each in made if each is not None]
    assert (found.token.role, found.token.expires_us) == ("admin", START_US + 7 * 86_400_000_000)
    assert found.text not in repr(found)
    assert servers[0].first() is None
    servers[0].revoke(found.token.id, by="ada")
    assert servers[0].first() is None, "who has lost all tokens asks for one where the database is"
    for each in servers:
        each.close()


def test_two_tokens_that_hold_have_two_names(admin: Admin) -> None:
    refused = admin.ask("POST", "tokens", json={"name": "viewer", "role": "viewer"})
    assert refused.status_code == 422
    viewer = next(token for token in admin.tokens.list() if token.name == "viewer")
    admin.tokens.revoke(viewer.id, by="ada")
    assert admin.ask("POST", "tokens", json={"name": "viewer", "role": "viewer"}).status_code == 200


# ------------------------------------------------------------------ sessions


def visit(cookie: str | None = None, **headers: str) -> Request:
    given = {"host": "127.0.0.1:8001", **({} if cookie is None else {"cookie": cookie}), **headers}
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    return Request(scope("/", headers=fields))


def signed_in(admin: Admin, role: str = "support", *, secure: bool = False) -> tuple[Sessions, str, Response]:
    sessions, response = Sessions(admin.tokens, secure=secure), Response()
    token = admin.tokens.check(admin.texts[role])
    assert token is not None
    sessions.begin(token, response)
    return sessions, response.headers["set-cookie"].partition(";")[0], response


def test_session_belongs_to_its_user_until_it_ends(anywhere: Admin) -> None:
    sessions, cookie, response = signed_in(anywhere)
    session = sessions.find(visit(cookie))
    assert session is not None
    assert (session.actor.name, session.actor.role) == ("support", "support")
    assert session.csrf not in repr(session)
    flags = {part.strip().lower() for part in response.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", "max-age=43200"} <= flags
    assert "secure" not in flags
    assert sessions.find(visit()) is None
    assert sessions.find(visit(cookie + "x")) is None
    anywhere.clock.advance(12 * 3600)
    assert sessions.find(visit(cookie)) is None


def test_behind_tls_the_cookie_is_of_this_host_and_never_in_clear(admin: Admin) -> None:
    _, cookie, response = signed_in(admin, secure=True)
    assert cookie.startswith("__Host-headgate=")
    assert "; Secure" in response.headers["set-cookie"]


def test_session_ends_with_its_token_or_at_logout(admin: Admin) -> None:
    sessions, cookie, _ = signed_in(admin)
    left = Response()
    sessions.end(visit(cookie), left)
    assert sessions.find(visit(cookie)) is None
    assert "Max-Age=0" in left.headers["set-cookie"]
    sessions, cookie, _ = signed_in(admin)
    token = next(token for token in admin.tokens.list() if token.name == "support")
    admin.tokens.revoke(token.id, by="ada")
    assert sessions.find(visit(cookie)) is None
    with read_transaction(admin.tokens.engine) as connection:
        assert connection.execute(select(SESSIONS)).all() == []


def test_form_needs_its_token_and_comes_from_here(admin: Admin) -> None:
    sessions, cookie, _ = signed_in(admin)
    session = sessions.find(visit(cookie))
    assert session is not None
    good = {"csrf": session.csrf}
    here = {"origin": "http://127.0.0.1:8001", "sec_fetch_site": "same-origin"}
    assert sessions.check_form(visit(cookie, **here), good) == session
    assert sessions.check_form(visit(cookie), good) == session, "browsers of old say nothing of where a form is from"
    for form, headers in [
        ({}, here),
        ({"csrf": ""}, here),
        ({"csrf": session.csrf + "x"}, here),
        ({"csrf": "é"}, here),
        (good, {"origin": "http://127.0.0.1:8002"}),
        (good, {"origin": "https://evil.example"}),
        (good, {"origin": "null"}),
        (good, {"origin": "http://[::1"}),
        (good, {"sec_fetch_site": "cross-site"}),
        (good, {"sec_fetch_site": "same-site"}),
    ]:
        with pytest.raises(FormRefused):
            sessions.check_form(visit(cookie, **headers), form)
    with pytest.raises(FormRefused):
        sessions.check_form(visit(None, **here), good)


def test_link_signs_in_once_and_soon(anywhere: Admin) -> None:
    token = anywhere.tokens.check(anywhere.texts["admin"])
    assert token is not None
    code = anywhere.tokens.create_code(token)
    found = anywhere.tokens.redeem(code)
    assert found is not None
    assert found.id == token.id
    assert anywhere.tokens.redeem(code) is None
    late = anywhere.tokens.create_code(token)
    anywhere.clock.advance(600)
    assert anywhere.tokens.redeem(late) is None
    assert anywhere.tokens.redeem("made up") is None


# ------------------------------------------------------------------ versions


def test_reads_of_the_configuration_say_their_version(furnished: Admin) -> None:
    admin = furnished
    for path in (
        "policy",
        "overrides",
        "overrides/1",
        "blocks",
        "tiers",
        "routes",
        "clients",
        "versions",
        f"client?{WHO}",
    ):
        assert admin.ask("GET", path).headers["etag"] == f'"{admin.store.version}"', path


def test_change_on_what_has_changed_since_is_refused(anywhere: Admin) -> None:
    made = anywhere.ask("POST", "overrides", json=override())
    seen, id = made.headers["etag"], made.json()["ids"][0]
    path = f"overrides/{id}"
    second = anywhere.ask("PUT", path, json=override(bucket="250/minute"), headers={"If-Match": seen})
    assert second.status_code == 200, second.text
    refused = anywhere.ask("PUT", path, json=override(bucket="300/minute"), headers={"If-Match": seen})
    assert (refused.status_code, refused.json()["type"]) == (412, "changed-meanwhile")
    assert refused.json()["version"] == anywhere.store.version
    assert anywhere.ask("GET", path).json()["bucket"] == "250/minute"
    elsewhere = anywhere.ask("PUT", "client/tier", json={"who": ACME, "tier": "pro"} | WHY, headers={"If-Match": seen})
    assert elsewhere.status_code == 200, "what is changed is as it was then, whatever else has changed"


def test_policy_is_written_only_over_one_that_was_seen(admin: Admin) -> None:
    body = {"text": POLICY + "name: shop\n", "file": "policy.yaml"} | WHY
    unseen = admin.ask("PUT", "policy", json=body)
    assert (unseen.status_code, unseen.json()["type"]) == (428, "if-match-needed")
    etag = admin.ask("GET", "policy").headers["etag"]
    assert admin.ask("PUT", "policy", json=body, headers={"If-Match": etag}).status_code == 200
    body["text"] += "on_failure: open\n"
    again = admin.ask("PUT", "policy", json=body, headers={"If-Match": etag})
    assert (again.status_code, again.json()["type"]) == (412, "changed-meanwhile")


@pytest.mark.parametrize("given", ["abc", '"x"', 'W/"1"', '"99999999999999999"', '"1", "2"'])
def test_invalid_version_is_reported(given: str, admin: Admin) -> None:
    refused = admin.ask("POST", "overrides", json=override(), headers={"If-Match": given})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid")


# ------------------------------------------------------------------ writes that are sent again


def test_same_write_with_the_same_key_is_done_once(anywhere: Admin) -> None:
    headers = {"Idempotency-Key": "a-1"}
    first = anywhere.ask("POST", "overrides", json=override(), headers=headers)
    again = anywhere.ask("POST", "overrides", json=override(), headers=headers)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert first.headers["etag"] == again.headers["etag"]
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert len(anywhere.store.overrides()) == 1


def test_key_is_of_one_request_and_of_one_token(admin: Admin) -> None:
    headers = {"Idempotency-Key": "a-1"}
    assert admin.ask("POST", "overrides", json=override(), headers=headers).status_code == 200
    other = admin.ask("POST", "overrides", json=override(reason="another"), headers=headers)
    assert (other.status_code, other.json()["type"]) == (422, "key-reused")
    elsewhere = admin.ask("POST", "blocks", json={"who": ACME} | WHY, headers=headers)
    assert elsewhere.json()["type"] == "key-reused"
    theirs = admin.ask("POST", "blocks", json={"who": ACME} | WHY, headers=headers, role="support")
    assert theirs.status_code == 200


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.method == "DELETE" and "reason" in row.path], ids=lambda row: row.path
)
def test_reason_may_stand_in_a_header_field_where_no_log_keeps_it(row: Row, furnished: Admin) -> None:
    path = path_of(furnished, row).replace("&reason=over", "").replace("?reason=over", "")
    bare = furnished.ask("DELETE", path, role=row.role)
    assert (bare.status_code, bare.json()["problems"]) == (
        422,
        ["reason: give it in the header Headgate-Reason, or in the query"],
    )
    said = {"Headgate-Reason": "50%25 back, says J%C3%BCrgen", "Idempotency-Key": "r-1"}
    assert furnished.ask("DELETE", path, role=row.role, headers=said).status_code == 200
    entries = furnished.ask("GET", "audit", role="viewer").json()["items"]
    assert "50% back, says Jürgen" in [entry["reason"] for entry in entries]
    other = furnished.ask("DELETE", path, role=row.role, headers={**said, "Headgate-Reason": "another"})
    assert (other.status_code, other.json()["type"]) == (422, "key-reused")


@pytest.mark.parametrize("reason", ["%20", "%ff", "a%0Ab", "x" * 501, "his key is sk_live_51H8xkTtQq", "tab\there"])
def test_reason_in_a_header_field_is_as_strict_as_in_a_body(furnished: Admin, reason: str) -> None:
    refused = furnished.ask("DELETE", "overrides/1", role="support", headers={"Headgate-Reason": reason})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid")
    assert "sk_live" not in refused.text


def test_key_is_free_again_after_a_day_or_a_refusal(admin: Admin) -> None:
    headers = {"Idempotency-Key": "a-1"}
    refused = admin.ask("POST", "overrides", json=override(limit="serch"), headers=headers)
    assert refused.status_code == 422
    assert admin.ask("POST", "overrides", json=override(), headers=headers).status_code == 200
    admin.clock.advance(DAY - 1)
    assert "idempotency-replayed" in admin.ask("POST", "overrides", json=override(), headers=headers).headers
    admin.clock.advance(1)
    free = admin.ask("POST", "overrides", json=override(valid_until="2096-01-01T00:00:00Z"), headers=headers)
    assert free.status_code == 200, free.text


def test_of_many_that_come_at_once_one_is_done(anywhere: Admin) -> None:
    headers = {"Idempotency-Key": "a-1"}
    answers = anywhere.together(*[("POST", "overrides")] * 12, json=override(), headers=headers)
    told = [(answer.status_code, answer.json().get("type")) for answer in answers]
    assert set(told) <= {(200, None), (409, "in-progress")}
    assert sum("idempotency-replayed" not in each.headers for each in answers if each.status_code == 200) == 1
    assert len(anywhere.store.overrides()) == 1


def test_idempotency_key_is_taken_during_its_write(admin: Admin) -> None:
    replays = IdempotencyStore(admin.tokens)

    def dies() -> Any:
        with pytest.raises(HeadgateError) as second:
            replays.once("t", "k", fingerprint=b"same", work=dies)
        assert of_error(second.value).type == "in-progress"
        raise ConfigUnavailable("in the middle")

    with pytest.raises(ConfigUnavailable):
        replays.once("t", "k", fingerprint=b"same", work=dies)
    admin.clock.advance(60)
    with pytest.raises(HeadgateError) as later:
        replays.once("t", "k", fingerprint=b"same", work=dies)
    assert of_error(later.value).type == "outcome-unknown"


def test_repeated_token_request_does_not_reveal_the_token(admin: Admin) -> None:
    headers = {"Idempotency-Key": "a-1"}
    body = {"name": "eve", "role": "viewer"}
    first = admin.ask("POST", "tokens", json=body, headers=headers).json()
    again = admin.ask("POST", "tokens", json=body, headers=headers).json()
    assert first["token"]
    assert again == {**first, "token": None}
    assert first["token"].encode() not in every_byte(admin)


# ------------------------------------------------------------------ dangers


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row("support", "POST", "overrides", override(bucket="5000/minute")), "ten-times"),
        (Row("support", "POST", "overrides", override(bucket="9/minute")), "tenth"),
        (Row("operator", "PUT", "tiers/pro/search", {"bucket": "90000/minute"} | WHY), "ten-times"),
        (Row("operator", "POST", "blocks", {"who": {"kind": "ip", "value": "10.0.0.0/8"}} | WHY), "wildcard-block"),
        (Row("operator", "PUT", "policy", {"text": "limits: [{by: ip, bucket: 10/minute}]"} | WHY, True), "policy"),
    ],
    ids=["much-more", "much-less", "tier", "network", "policy"],
)
def test_what_is_probably_a_mistake_is_confirmed_first(row: Row, code: str, admin: Admin) -> None:
    before = admin.store.version
    refused = sent(admin, row, row.role)
    assert (refused.status_code, refused.json()["type"]) == (409, "confirmation-needed"), refused.text
    codes = [danger["code"] for danger in refused.json()["dangers"]]
    assert code in codes
    assert admin.store.version == before
    assert row.body is not None
    done = sent(admin, row._replace(body=row.body | {"confirm": codes}), row.role)
    assert done.status_code == 200, done.text
    assert admin.store.version == before + 1


@pytest.mark.parametrize("body", [override(bucket="0/minute"), override(limit=None, bucket="0 per day")])
def test_limit_of_nothing_is_refused(body: dict[str, Any], admin: Admin) -> None:
    refused = admin.ask("POST", "overrides", json=body)
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid")
    assert admin.store.version == 1


# ------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (override(bucket=200), "bucket"),
        (override(reason=""), "reason"),
        ({"who": ACME, "bucket": "200/minute"}, "reason"),
        (override(resaon="x"), "resaon"),
        (override(who={"kind": "tenant"}), "value"),
        (override(who="acme"), "who"),
        (override(limit="serch"), "serch"),
        (override(bucket="many"), "many"),
        (override(valid_until="friday"), "valid_until"),
        (override(valid_until="2026-11-20T18:00:00"), "zone"),
        (override(confirm=["whatever"]), "confirm"),
        (override(reason="a\x00b"), "reason"),
        (override(reason="x" * 501), "reason"),
        ([], "body"),
    ],
)
def test_mistakes_are_reported_with_their_position(body: Any, told: str, admin: Admin) -> None:
    refused = admin.ask("POST", "overrides", json=body)
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid"), refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert any(told in problem for problem in refused.json()["problems"]), refused.text


def test_invalid_policy_is_reported_line_by_line(admin: Admin) -> None:
    text = "limits:\n  - {by: ip, bukcet: 10/minute}\n  - {by: ip, bucket: 10/fortnight}\n"
    problems = admin.ask("POST", "policy/check", json={"text": text}).json()["problems"]
    assert {problem.split(":")[1] for problem in problems} == {"2", "3"}
    refused = admin.ask("PUT", "policy", json={"text": text} | WHY, headers={"If-Match": '"1"'})
    assert refused.json()["problems"] == problems
    assert admin.ask("POST", "policy/check", json={"text": POLICY}).json() == {"problems": []}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "nothing", 404, "not-found"),
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/docs", 404, "not-found"),
        ("PATCH", "overrides", 405, "wrong-method"),
        ("GET", "overrides/77", 404, "not-found"),
        ("DELETE", "overrides/77?reason=x", 404, "not-found"),
        ("GET", "overrides/0", 422, "invalid"),
        ("GET", "overrides/99999999999999999999", 422, "invalid"),
        ("GET", "versions/77/diff", 404, "not-found"),
        ("GET", "policy?version=77", 404, "not-found"),
        ("GET", "overrides?state=whatever", 422, "invalid"),
        ("GET", "overrides?page=2", 422, "invalid"),
        ("GET", "overrides?most=501", 422, "invalid"),
        ("GET", "overrides?kind=tenant", 422, "invalid"),
        ("GET", "client?kind=tenant", 422, "invalid"),
        ("GET", f"client/why?{WHO}&zone=Mars/Phobos", 422, "invalid"),
        ("GET", f"client/why?{WHO}&zone=Europe", 422, "invalid"),
        ("GET", f"client/why?{WHO}&at=someday", 422, "invalid"),
        ("GET", f"client/timeline?{WHO}&since=2026-11-16T01:00:00Z&until=2026-11-16T01:00:00Z", 422, "invalid"),
        ("DELETE", "tiers/pro/nothing?reason=x", 404, "not-found"),
    ],
)
def test_unknown_resource_is_a_problem_response(method: str, path: str, status: int, kind: str, admin: Admin) -> None:
    refused = admin.ask(method, path)
    assert (refused.status_code, refused.json()["type"]) == (status, kind), refused.text
    assert refused.json()["status"] == status
    assert refused.json()["title"] == TITLES[kind][1]


def test_wrong_method_lists_the_allowed_methods(admin: Admin) -> None:
    refused = admin.ask("PATCH", "overrides/1")
    assert refused.headers["Allow"] == "DELETE, GET, PUT"
    assert refused.json()["detail"] == "This path does not support the method. Use DELETE, GET, PUT."


def test_control_characters_are_named(admin: Admin) -> None:
    told = admin.ask("POST", "blocks", json={"who": {"kind": "tenant", "value": "a\x00b"}, "reason": "a\nb"}).json()
    said = "it contains control characters or a line break"
    assert told["problems"] == [f"body.reason: {said}", f"body.who.value: {said}"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b'{"who": NaN}', b"[" * 50_000])
def test_unreadable_body_is_reported(content: bytes, admin: Admin) -> None:
    refused = admin.ask("POST", "overrides", content=content, headers={"Content-Type": "application/json"})
    assert refused.status_code in (400, 422)
    assert refused.json()["type"] in ("bad-request", "invalid")


def test_unavailable_store_is_reported_without_its_address(
    admin: Admin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Tokens(f"sqlite:///{tmp_path}/other.db", clock=admin.clock)) as tokens:
        text = tokens.make("ada", "admin", by="ada").text
        admin.app.state.parts = admin.app.state.parts._replace(tokens=tokens, idempotency=IdempotencyStore(tokens))
        for file in tmp_path.glob("config.db*"):
            file.write_bytes(b"no database at all, but long enough to be looked at as one" * 100)
        refused = admin.ask("GET", "overrides", role=text)
    assert (refused.status_code, refused.json()["type"]) == (503, "config-away")
    assert refused.headers["retry-after"] == "5"
    assert str(tmp_path) not in refused.text
    assert str(tmp_path) in caplog.text


def test_internal_error_is_reported_and_logged(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any, **__: Any) -> Change:
        raise ZeroDivisionError("a secret")

    admin.service.policy.get = fail  # type: ignore[method-assign,assignment]
    failed = admin.ask("GET", "policy")
    assert (failed.status_code, failed.json()["type"]) == (500, "failed")
    assert "secret" not in failed.text
    assert "ZeroDivisionError" in caplog.text
    assert failed.headers["x-content-type-options"] == "nosniff"


# ------------------------------------------------------------------ bounds


def test_bodies_are_bounded_whatever_they_say_of_their_length(admin: Admin) -> None:
    async def in_pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // 1024 + 1):
            yield b" " * 1024

    for content in (b" " * (MAX_BODY_BYTES + 1), in_pieces()):
        refused = admin.ask("POST", "overrides", content=content)
        assert (refused.status_code, refused.json()["type"]) == (413, "too-large")
        assert refused.headers["x-content-type-options"] == "nosniff"
    fits = json.dumps(override()).encode().ljust(MAX_BODY_BYTES)
    assert admin.ask("POST", "overrides", content=fits, headers={"Content-Type": "application/json"}).status_code == 200


def test_body_that_says_it_is_too_large_is_not_even_read() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("nobody shall see it")

    told = scope("/api/v1/find", method="POST", headers=[(b"content-length", b"%d" % (MAX_BODY_BYTES + 1))])
    start, _ = asyncio.run(talk(BodyLimit(app), told))
    assert start["status"] == 413


def test_policy_may_be_larger(admin: Admin) -> None:
    text = POLICY + "#" * (MAX_POLICY_BYTES - len(POLICY) - 1000)
    assert admin.ask("POST", "policy/check", json={"text": text}).json() == {"problems": []}
    assert admin.ask("POST", "policy/check", json={"text": text + "#" * 1000}).status_code == 413


def test_body_that_never_ends_is_waited_for_only_so_long() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("nobody shall see it")

    async def run() -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.005)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            heard.append(message)

        await BodyLimit(app, deadline=0.05)(scope("/api/v1/find", method="POST"), receive, send)
        return heard

    start, body = asyncio.run(run())
    assert (start["status"], json.loads(body["body"])["type"]) == (408, "too-slow")


def test_client_gone_before_its_body_is_complete_is_ignored() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("nobody shall see it")

    told = {"type": "http.request", "body": b"{", "more_body": True}
    assert asyncio.run(talk(BodyLimit(app), scope("/api/v1/find", method="POST"), told)) == []


@pytest.mark.parametrize("path", ["/health", "/openapi.json", "/nothing", "policy", "policy?version=x"])
def test_every_answer_is_guarded(path: str, admin: Admin) -> None:
    headers = admin.ask("GET", path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == ("same-origin" if path.startswith("/") else "no-referrer")


def test_health_needs_no_token(admin: Admin) -> None:
    answer = admin.ask("GET", "/health", role=None)
    assert (answer.status_code, answer.json()) == (200, {"state": "ready"})


def test_only_known_names_lead_here(admin: Admin) -> None:
    admin.app = create_app(admin.service, admin.tokens, pages=False, hosts={"127.0.0.1", "admin.example.org"})
    for host, status in [
        ("127.0.0.1", 200),
        ("127.0.0.1:8001", 200),
        ("Admin.Example.org", 200),
        ("evil.example", 421),
        ("evil.example:8001", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ]:
        assert admin.ask("GET", "/health", headers={"Host": host}).status_code == status, host


def test_token_guessing_is_limited_by_address(admin: Admin) -> None:
    admin.pace = 0
    guesses = [admin.ask("GET", "policy", role="hg_0000000000_" + "a" * 43).status_code for _ in range(32)]
    assert guesses == [401] * 30 + [429] * 2
    refused = admin.ask("GET", "policy", role="hg_0000000000_" + "a" * 43)
    assert refused.headers["content-type"] == "application/problem+json"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["type"] == "too-many-failures"
    assert admin.ask("GET", "policy").status_code == 200, "a valid token passes"
    assert admin.ask("GET", "policy", role="hg_0000000000_" + "a" * 43).status_code == 429
    GATE_CLOCK.advance(60)
    assert admin.ask("GET", "policy", role="hg_0000000000_" + "a" * 43).status_code == 401


def test_failed_logins_of_an_address_do_not_lock_out_valid_tokens(admin: Admin) -> None:
    admin.pace = 0
    asked = [admin.ask("GET", "nothing", role=f"hg_{number:010}_{'a' * 43}").status_code for number in range(302)]
    assert asked == [404] * 300 + [429] * 2
    assert admin.ask("GET", "policy").status_code == 200
    assert admin.ask("GET", "policy", role=None).status_code == 429
    late = admin.tokens.make("late", "viewer", by="the test").text
    assert admin.ask("GET", "policy", role=late).status_code == 200, "also one that was made meanwhile"


def test_token_has_a_limit_of_its_own(admin: Admin) -> None:
    admin.pace = 0
    told = [admin.ask("GET", "nothing", role="viewer").status_code for _ in range(301)]
    assert set(told[:300]) == {404}
    assert told[300] == 429
    assert admin.ask("GET", "nothing", role="support").status_code == 404


# ------------------------------------------------------------------ nothing secret leaves


def every_byte(admin: Admin) -> bytes:
    assert admin.url.startswith("sqlite:///")
    file = Path(admin.url.removeprefix("sqlite:///"))
    return b"".join(each.read_bytes() for each in file.parent.glob(f"{file.name}*"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a body holds text."""
    if isinstance(value, str):
        yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], text: str) -> Any:
    if not path:
        return text
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = put(value[path[0]], path[1:], text)
    return made


WHOLE = {
    "confirm": ["ten-times"],
    "valid_from": "2026-11-16T00:00:00Z",
    "valid_until": "2096-11-16T00:00:00Z",
    "class": "search",
}


@pytest.mark.parametrize("key", [RAW_KEY, "correct-horse-battery-staple"], ids=["usual", "unusual"])
def test_raw_key_is_in_no_answer_no_log_and_no_database(
    key: str, furnished: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    admin = furnished
    admin.store.assign(("api_key", key), "pro", label="the usual one", author="ada", reason="has paid")
    bodies = [row for row in TABLE if row.body is not None]
    bodies.append(Row("support", "POST", "overrides", override(**WHOLE)))
    bodies.append(Row("support", "POST", "client/reset", {"who": ACME, "limits": ["search"]} | WHY))
    bodies.append(Row("support", "POST", "blocks", {"who": {"kind": "api_key", "value": "x"}} | WHY))
    rows: list[Row] = []
    for row in bodies:
        texts = (key, f"his key is {key}.")
        rows += [row._replace(body=put(row.body, place, text)) for place in places(row.body) for text in texts]
        rows.append(row._replace(body={**(row.body or {}), key: key}))
    for row in TABLE:
        path, _, query = row.path.partition("?")
        names = [part.partition("=")[0] for part in query.split("&") if query]
        rows += [row._replace(path=re.sub(rf"{name}=[^&]*", f"{name}={key}", row.path)) for name in names]
        rows.append(row._replace(path=f"{path}?{query}&search={key}&author={key}&after={key}&{key}={key}"))
        rows.append(row._replace(path=f"{path.rpartition('/')[0]}/{key}"))
    said = [sent(admin, row, "admin") for row in rows]
    fields = ({"If-Match": key}, {"Idempotency-Key": key}, {"Authorization": f"Bearer {key}"})
    said += [admin.ask("POST", "overrides", json=override(), headers=headers) for headers in fields]
    found = admin.ask("POST", "find", json={"client": key}).json()
    assert found["kind"] == "api_key"
    assert found["value"].startswith("hmac:")
    assert admin.ask("POST", "blocks", json={"who": {"kind": "api_key", "value": key}} | WHY).status_code == 200
    assert {answer.status_code for answer in said} & {429, 500} == set()
    told = [f"{answer.request.method} {answer.request.url} {answer.text}" for answer in said if key in answer.text]
    assert told == []
    assert key not in "".join(str(answer.headers) for answer in said)
    assert key not in "".join(str(each) for each in caplog.records if each.name != "httpx")
    assert key not in "".join(each.getMessage() for each in caplog.records if each.name != "httpx")
    assert key.encode() not in every_byte(admin)


def test_api_key_in_a_url_is_refused(admin: Admin) -> None:
    for path in (f"client?kind=api_key&value={RAW_KEY}", f"overrides?kind=api_key&value={RAW_KEY}"):
        refused = admin.ask("GET", path)
        assert refused.status_code == 422
        assert "POST /api/v1/find" in refused.text


# ------------------------------------------------------------------ the server


def test_server_runs_in_a_thread_and_ends(admin: Admin) -> None:
    with AdminServer(admin.service, admin.tokens, port=0, pages=False) as server:
        assert httpx.get(f"{server.url}/health").json() == {"state": "ready"}
        assert httpx.get(f"{server.url}/health", headers={"Host": "evil.example"}).status_code == 421
        token = admin.tokens.check(admin.texts["admin"])
        assert token is not None
        assert re.fullmatch(rf"{server.url}/enter\?code=[\w-]{{43}}", server.link(token))
        with pytest.raises(InvalidConfiguration, match="choose another --port"):
            AdminServer(admin.service, admin.tokens, port=server.port)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert "headgate-admin" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "admin.example.org"])
def test_tokens_do_not_travel_in_clear(host: str, admin: Admin) -> None:
    with pytest.raises(InvalidConfiguration, match="unencrypted"):
        AdminServer(admin.service, admin.tokens, host=host, port=0)


def test_behind_tls_it_listens_elsewhere(admin: Admin) -> None:
    with ExitStack() as stack:
        server = AdminServer(
            admin.service,
            admin.tokens,
            host="0.0.0.0",
            port=0,
            behind_tls=True,
            names=["admin.example.org"],
            pages=False,
        )
        stack.enter_context(server)
        url = f"http://127.0.0.1:{server.port}/health"
        assert httpx.get(url, headers={"Host": "admin.example.org"}).status_code == 200
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("name", "role", "days"),
    [
        ("", "viewer", 1),
        ("a\nb", "viewer", 1),
        ("x" * 101, "viewer", 1),
        ("hg_7c2m9x4k1q_" + "a" * 43, "viewer", 1),
        ("eve", "root", 1),
        ("eve", "viewer", 0),
        ("eve", "viewer", 4000),
    ],
)
def test_token_that_cannot_be_is_refused(name: str, role: Any, days: int, admin: Admin) -> None:
    with pytest.raises(InvalidInput):
        admin.tokens.make(name, role, by="ada", days=days)


def test_token_that_is_not_there_cannot_be_revoked(admin: Admin) -> None:
    with pytest.raises(NotFound):
        admin.tokens.revoke("0000000000", by="ada")


# ------------------------------------------------------------------ at the command line


def test_config_store_access_allows_making_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["admin", "token", "ada", "--role", "support", "--days", "30", "--config", "sqlite:///mine.db"]) == 0
    told = capsys.readouterr()
    with closing(Tokens("sqlite:///mine.db")) as tokens, closing(ConfigStore("sqlite:///mine.db")) as store:
        token = tokens.check(told.out.strip())
        assert token is not None
        assert (token.name, token.role) == ("ada", "support")
        assert token.expires_us - token.made_us == 30 * 86_400_000_000
        assert told.out.strip() not in told.err
        (entry,) = AdminService(store).audit.list().items
        assert entry.author.endswith("at the command line")
    assert main(["admin", "--config", "sqlite:///mine.db", "token", "ada", "--role", "support"]) == 2
    assert "revoke it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "unencrypted"),
        (["--cert", "cert.pem"], "belong together"),
        (["--webhook", "http://127.0.0.1:1/"], "go together"),
        (["--webhook", "http://127.0.0.1:1/", "--webhook-secret-file", "none"], "--store"),
        (
            ["--store", "memory://", "--webhook", "http://127.0.0.1:1/", "--webhook-secret-file", "none"],
            "cannot be read",
        ),
        (["--usage-thresholds", "50"], "needs --ledger"),
        (["--ledger", "sqlite:///ledger.db", "--usage-thresholds", "50%"], "percents like 50,80,100"),
        (["--ledger", "sqlite:///ledger.db", "--usage-thresholds", "0"], "from 1 to 100"),
        (["--config", "mysql://nothing"], "sqlite:///"),
        (["--secret-file", "none"], "cannot be read"),
    ],
)
def test_invalid_server_options_are_rejected_before_the_start(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["admin", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_report_on_a_client_lists_its_charges(admin: Admin) -> None:
    admin.ledger.grant("exports/acme", 10, source="credit pack")
    admin.ledger.charge("exports/acme", 4, id="export-1")
    found = admin.ask("GET", f"client/why?{WHO}&at=today&zone=UTC").json()
    assert "Account exports/acme: 1 request charged with 4 units, paid by credit pack 4." in found["details"]
    assert not any("exports/acme" in text for text in found["mail"])
    assert [(each["account"], each["amount"]) for each in found["answer"]["charges"]] == [("exports/acme", 4)]


def test_server_sends_usage_alerts_of_its_ledger(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of 16 bytes or more")
    plan = QuotaPlan("exports", 100, Calendar("month"))
    with WebhookReceiver() as receiver, closing(Ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        webhook = ("--webhook", receiver.url, "--webhook-secret-file", "secret")
        usage = ("--ledger", "sqlite:///ledger.db", "--usage-thresholds", "40,90")
        command = [sys.executable, "-m", "headgate", "admin", "--port", "0", *webhook, *usage]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: ledger.usage_thresholds() == (40, 90), "the thresholds are set")
                ledger.open_period("exports/acme", plan)
                ledger.charge("exports/acme", 40)
                wait_until(lambda: len(receiver.calls) == 1, "the alert is sent")
            finally:
                process.terminate()
    assert json.loads(receiver.calls[0].body)["usage"]["account"] == "exports/acme"


@pytest.mark.parametrize("proxies", [[], ["--proxy", "127.0.0.1"]], ids=["unnamed", "named"])
def test_missing_proxies_are_warned_of_at_the_start(proxies: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headgate", "admin", "--behind-tls", "--port", "0", *proxies]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = ""
            while "with the role they need" not in told:  # the last line before it serves
                line = process.stderr.readline()
                assert line, told
                told += line
        finally:
            process.terminate()
    note = "without --proxy, all clients behind the proxy share one address and its limits for failed sign-ins"
    assert (note in told) == (not proxies)


def first_start(tmp_path: Path, stderr: int | Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headgate", "admin", "--port", "0"]
    return subprocess.Popen(command, cwd=tmp_path, stderr=stderr, text=True)


def test_first_token_gets_into_a_private_file_where_there_is_no_terminal(tmp_path: Path) -> None:
    with first_start(tmp_path, subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            told = ""
            while "with the role they need" not in told:
                line = process.stderr.readline()
                assert line, told
                told += line
        finally:
            process.terminate()
    (file,) = tmp_path.glob("headgate-admin-token-*")
    assert str(file) in told
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text().strip()
    assert text not in told
    assert "hg_" not in told
    assert "code=" not in told
    with closing(Tokens(f"sqlite:///{tmp_path}/headgate.db")) as tokens:
        token = tokens.check(text)
        assert token is not None
        assert token.role == "admin"


def test_first_token_is_printed_at_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with first_start(tmp_path, theirs) as process:
            try:
                told = ""
                while "with the role they need" not in told:
                    told += os.read(ours, 65536).decode()
            finally:
                process.terminate()
    finally:
        os.close(ours)
        os.close(theirs)
    assert re.search(r"hg_[0-9a-z]{10}_[A-Za-z0-9]{43}", told)
    assert "/enter?code=" in told
    assert [*tmp_path.glob("headgate-admin-token-*")] == []
