"""Quotas behind a gate: one decision with the limits, settlement, idempotency, failures of the ledger."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import InvalidConfiguration
from headgate.adapters.flask import limit as flask_limit
from headgate.calendars import Calendar
from headgate.gate import AsyncGate, Gate
from headgate.gate.admission import Admission, current_admission
from headgate.policy import read
from headgate.quotas import Ledger
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log.record import lost_record
from headgate.telemetry.decision_log.sinks.sqlite import SqliteReader, SqliteSink
from headgate.telemetry.metrics.counters import Metrics
from headgate.testing import FakeClock, FakeRequest
from support.processes import run_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.sites import MakeSite

NOW_US = 1_791_200_000_000_000
"""In October 2026."""
DAY_S = 86_400


@dataclass
class Shop:
    """Gates and a ledger on one SQLite file."""

    url: str
    clock: FakeClock = field(default_factory=lambda: FakeClock(NOW_US))
    gates: list[Gate] = field(default_factory=list)

    def policy(self, *limits: dict[str, Any], **sections: Any) -> Any:
        quotas = {"ledger": self.url, "budget": "20 s", **sections.pop("quotas", {})}
        return read(json.dumps({"limits": [*limits], "quotas": quotas, **sections}), format="json")

    def gate(self, *limits: dict[str, Any], options: Any = None, **sections: Any) -> Gate:
        own = {"clock": self.clock, "identities": {"tenant": tenant}, **(options or {})}
        self.gates.append(Gate(self.policy(*limits, **sections), **own))
        return self.gates[-1]

    def close(self) -> None:
        for gate in self.gates:
            gate.close()
        self.gates.clear()

    def ledger(self) -> Ledger:
        return Ledger(self.url, clock=self.clock)

    def charged(self, account: str) -> int:
        """After all gates are closed."""
        self.close()
        with closing(self.ledger()) as ledger:
            assert ledger.verify() == []
            summary = ledger.summary(account)
            assert summary.held == 0
            return summary.charged


def tenant(request: Any) -> str | None:
    return (request.header("x-tenant") or [None])[0]


def sent_by(name: str, *, key: str | None = None, **more: Any) -> FakeRequest:
    headers = {"x-tenant": name} | ({} if key is None else {"idempotency-key": key})
    return FakeRequest("/exports", method="POST", headers=headers, **more)


EXPORTS = {"name": "exports", "by": "tenant", "quota": "3/month"}


@pytest.fixture
def shop(tmp_path: Path, migrated_file: Path) -> Iterator[Shop]:
    shutil.copy(migrated_file, tmp_path / "quota.db")
    shop = Shop(f"sqlite:///{tmp_path}/quota.db")
    yield shop
    shop.close()


def ask(gate: Gate, request: FakeRequest) -> Admission:
    """Admit a request, and send its response."""
    admission = gate.admit(request)
    if admission.needs_finish:
        gate.finish(admission, 200)
    return admission


def paid(admission: Admission) -> list[tuple[str, int]]:
    return [source for charge in admission.quotas for source in charge.paid_by]


# ------------------------------------------------------------------------------------------------------- decisions


def test_waterfall(shop: Shop) -> None:
    with closing(shop.ledger()) as ledger:
        ledger.grant("exports/acme", 2, source="credit pack")
    gate = shop.gate({**EXPORTS, "quota": {"allowance": 3, "per": "month", "pay_as_you_go": 1}})
    sources = [paid(ask(gate, sent_by("acme"))) for _ in range(7)]
    assert sources == [
        *[[("allowance", 1)]] * 3,
        *[[("credit pack", 1)]] * 2,
        [("pay as you go", 1)],
        [],
    ]
    assert shop.charged("exports/acme") == 6


def test_admission_says_what_was_charged(shop: Shop) -> None:
    gate = shop.gate({**EXPORTS, "cost": 2})
    admission = ask(gate, sent_by("acme"))
    (charge,) = admission.quotas
    assert (charge.name, charge.account, charge.amount) == ("exports", "exports/acme", 2)
    assert charge.paid_by == (("allowance", 2),)
    assert not charge.is_repeated
    assert repr(charge) == "<2 of exports/acme, paid by allowance: 2>"
    assert ask(gate, sent_by("acme")).quotas == ()
    shop.close()
    with closing(shop.ledger()) as ledger:
        (lease, *_) = [entry for entry in ledger.entries("exports/acme") if entry.kind == "reserve"]
        (record,) = ledger.usage(lease.id)
    assert (record.id, record.amount, record.reference) == (charge.id, 2, "POST unmatched")


def test_rejected_request_is_charged_nowhere(shop: Shop) -> None:
    burst = {"name": "burst", "by": "tenant", "bucket": "4/minute"}
    gate = shop.gate(burst, EXPORTS, {"name": "tokens", "by": "tenant", "quota": "100/month", "cost": 40})
    first, second, third = (ask(gate, sent_by("acme")) for _ in range(3))
    assert (first.allowed, second.allowed) == (True, True)
    assert third.decision is not None
    assert third.decision.denied_by == ("tokens",)
    assert third.decision.remaining == 20
    shop.clock.advance(30)
    decision = ask(gate, sent_by("globex", peer="203.0.113.7")).decision
    assert decision is not None
    assert [outcome.remaining for outcome in decision.outcomes] == [3, 2, 60]
    for _ in range(2):
        ask(gate, sent_by("acme"))
    fourth = ask(gate, sent_by("acme"))
    assert fourth.decision is not None
    assert fourth.decision.denied_by == ("tokens",), "the limit was not charged for rejected requests"
    assert (shop.charged("exports/acme"), shop.charged("tokens/acme")) == (2, 80)


def test_request_denied_by_a_limit_is_not_charged(shop: Shop) -> None:
    gate = shop.gate({"name": "burst", "by": "tenant", "bucket": "1/hour"}, EXPORTS)
    admissions = [ask(gate, sent_by("acme", key=f"{number}")) for number in range(4)]
    assert [each.allowed for each in admissions] == [True, False, False, False]
    assert [charge.amount for each in admissions for charge in each.quotas] == [1, 0, 0, 0]
    assert admissions[1].decision is not None
    assert admissions[1].decision.denied_by == ("burst",)
    assert shop.charged("exports/acme") == 1


def test_responses(make_site: MakeSite, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    policy = shop.policy({**EXPORTS, "quota": "2/month, timezone Europe/Berlin"})
    site = make_site(policy, identities={"tenant": tenant}, clock=shop.clock)
    answers = [site.ask("/login", headers=[("x-tenant", "acme")]) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.fields["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0"]
    until_us = Calendar("month", timezone="Europe/Berlin").window(NOW_US)[1] - NOW_US
    left = -(until_us // -1_000_000)
    assert answers[0].fields["ratelimit"] == f'"exports";r=1;t={left}'
    assert answers[2].fields["retry-after"] == f"{left}"
    problem = json.loads(answers[2].body)
    assert problem["violated-policies"] == ["exports"]
    assert problem["type"].endswith("#quota-exceeded")
    assert problem["retry_after_seconds"] == left
    assert site.ask("/login", headers=[("x-tenant", "globex")]).status == 200
    assert caplog.records == []


def test_request_that_no_period_can_pay_has_no_retry_after(shop: Shop) -> None:
    terms = {"allowance": 3, "per": "month", "rollover": 1, "pay_as_you_go": 1}
    gate = shop.gate({**EXPORTS, "quota": terms, "cost": 6})
    admission = ask(gate, sent_by("acme"))
    assert admission.decision is not None
    assert admission.decision.unsatisfiable
    assert admission.refusal is not None
    assert b"retry-after" not in dict(admission.refusal.headers)
    with closing(shop.ledger()) as ledger:
        ledger.grant("exports/globex", 6)
    assert ask(gate, sent_by("globex")).allowed, "a grant pays for it"


def test_concurrent_first_requests_of_an_account(shop: Shop) -> None:
    policy = shop.policy({**EXPORTS, "quota": "25/month"}, {"by": "ip", "bucket": "1000/minute"})

    async def ask_all() -> list[bool]:
        gate = AsyncGate(policy, clock=shop.clock, identities={"tenant": tenant})
        admissions = await asyncio.gather(*[gate.admit(sent_by("acme")) for _ in range(30)])
        for admission in admissions:
            await gate.finish(admission, 200)
        await gate.close()
        return [admission.allowed for admission in admissions]

    assert sum(asyncio.run(ask_all())) == 25
    assert shop.charged("exports/acme") == 25


# ------------------------------------------------------------------------------------------------------- settlement


@pytest.mark.parametrize("actual", [0, 3, 10, 15])
def test_app_settles_the_actual_amount(shop: Shop, actual: int) -> None:
    gate = shop.gate({"name": "tokens", "by": "tenant", "quota": "100/month", "reserve": 10})
    admission = gate.admit(sent_by("acme"))
    assert admission.needs_finish
    admission.commit(actual)
    gate.finish(admission, 200)
    gate.finish(admission, 200)
    assert [charge.amount for charge in admission.quotas] == [actual]
    assert shop.charged("tokens/acme") == actual


@pytest.mark.parametrize(("status", "expected"), [(200, 1), (404, 0)])
def test_only_some_responses_count(shop: Shop, status: int, expected: int) -> None:
    gate = shop.gate({**EXPORTS, "count_when": "status == 200"})
    gate.finish(gate.admit(sent_by("acme")), status)
    assert shop.charged("exports/acme") == expected


def test_reservations_of_requests_in_flight_are_held(shop: Shop) -> None:
    gate = shop.gate({"name": "tokens", "by": "tenant", "quota": "100/month", "reserve": 40})
    first, second, third = (gate.admit(sent_by("acme")) for _ in range(3))
    assert [first.allowed, second.allowed, third.allowed] == [True, True, False]
    first.commit(1)
    gate.finish(first, 200)
    gate.finish(second, 200)
    assert shop.charged("tokens/acme") == 41


def test_refusal_by_the_limit_of_a_view_is_not_charged(shop: Shop) -> None:
    view = flask_limit("1/hour", by="global")(lambda: "ok")
    gate = shop.gate(EXPORTS)
    admission = gate.admit(sent_by("acme"))
    assert admission.needs_finish, "a view may refuse the request later"
    gate.finish(admission, 0)
    assert shop.charged("exports/acme") == 0
    del view


def test_quota_beside_a_concurrency_limit(shop: Shop) -> None:
    one = {"name": "one", "by": "tenant", "bucket": {"algorithm": "concurrency", "quota": 1, "period": "1 hour"}}
    gate = shop.gate(one, EXPORTS)
    first, second = gate.admit(sent_by("acme")), gate.admit(sent_by("acme"))
    assert (first.allowed, second.allowed) == (True, False)
    gate.finish(first, 200)
    admissions = []
    for _ in range(3):
        admissions.append(gate.admit(sent_by("acme")))
        if admissions[-1].needs_finish:
            gate.finish(admissions[-1], 200)
    assert [each.allowed for each in admissions] == [True, True, False]
    assert shop.charged("exports/acme") == 3


def test_app_reads_and_settles_its_admission(make_site: MakeSite, shop: Shop) -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        current_admission().commit(7)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def wsgi(environ: Any, start_response: Any) -> list[bytes]:
        current_admission().commit(7)
        start_response("200 OK", [])
        return [b"ok"]

    limit = {"name": "tokens", "by": "tenant", "quota": "100/month", "reserve": 30}
    site = make_site(shop.policy(limit), identities={"tenant": tenant}, clock=shop.clock)
    site.app.app = asgi if site.kind == "asgi" else wsgi
    assert site.ask(headers=[("x-tenant", "acme")]).status == 200
    site.gate.quota_meter.flush()
    assert site.gate.quota_meter.balance("tokens/acme").remaining == 93


# ------------------------------------------------------------------------------------------------------- idempotency


@pytest.mark.parametrize("keys", [("k", "k"), ('"k"', "k"), ('"k"', '"k"')])
def test_repeated_request_is_charged_once(shop: Shop, keys: tuple[str, str]) -> None:
    gate = shop.gate(EXPORTS)
    first, second = (ask(gate, sent_by("acme", key=key)) for key in keys)
    assert first.quotas[0].id == second.quotas[0].id
    assert (first.quotas[0].is_repeated, second.quotas[0].is_repeated) == (False, True)
    assert shop.charged("exports/acme") == 1


def test_repeated_request_is_charged_once_by_all_processes_for_ever(shop: Shop) -> None:
    for _ in range(3):
        one, other = shop.gate(EXPORTS), shop.gate(EXPORTS)
        assert ask(one, sent_by("acme", key="k")).allowed
        assert ask(other, sent_by("acme", key="k")).allowed
        shop.close()
        shop.clock.advance(3 * DAY_S)
    assert shop.charged("exports/acme") == 1


def test_keys_belong_to_clients_and_paths(shop: Shop) -> None:
    shared = {"name": "shared", "by": "global", "quota": "100/month"}
    gate = shop.gate({**EXPORTS, "quota": "100/month"}, shared)
    for name in ("acme", "globex", "acme|%2F"):
        for path in ("/exports", "/other"):
            for method in ("POST", "PUT"):
                headers = {"x-tenant": name, "idempotency-key": "k"}
                for _ in range(2):
                    assert ask(gate, FakeRequest(path, method=method, headers=headers)).allowed
    assert shop.charged("exports/acme") == 4
    assert shop.charged("shared/%all") == 12


def test_retry_of_a_request_that_was_denied_is_a_new_attempt(shop: Shop) -> None:
    gate = shop.gate({"name": "burst", "by": "tenant", "bucket": "1/minute"}, EXPORTS)
    assert ask(gate, sent_by("acme", key="1")).allowed
    assert not ask(gate, sent_by("acme", key="2")).allowed
    shop.clock.advance(60)
    assert ask(gate, sent_by("acme", key="2")).allowed
    assert shop.charged("exports/acme") == 2


def test_app_names_requests(shop: Shop) -> None:
    gate = shop.gate(EXPORTS, options={"idempotency_key": lambda request: request.header("x-order")[0]})
    for order in ("1", "2", "1", "2", "2"):
        assert ask(gate, FakeRequest(headers={"x-tenant": "acme", "x-order": order})).allowed
    assert shop.charged("exports/acme") == 2


@pytest.mark.parametrize("header", ["none", "x-request-id"])
def test_header_can_be_changed(shop: Shop, header: str) -> None:
    gate = shop.gate(EXPORTS, quotas={"idempotency_header": header})
    for _ in range(2):
        assert ask(gate, sent_by("acme", key="k")).allowed
    for _ in range(2):
        ask(gate, FakeRequest(headers={"x-tenant": "globex", "x-request-id": "7"}))
    assert shop.charged("exports/acme") == 2
    assert shop.charged("exports/globex") == (2 if header == "none" else 1)


@pytest.mark.parametrize("key", ["", '""', "a" * 5000, "ü", "\udc80", "a\x00b"])
def test_unusual_keys_and_identities_do_no_harm(shop: Shop, key: str) -> None:
    gate = shop.gate(EXPORTS)
    assert ask(gate, sent_by(f"acme{key}", key=key)).allowed
    assert ask(gate, FakeRequest(method="A" * 5000, headers={"x-tenant": "b", "idempotency-key": ["a", "b"]})).allowed
    shop.close()
    with closing(shop.ledger()) as ledger:
        assert len(ledger.accounts()) == 2
        assert ledger.summary("exports/b").charged == 1


# ------------------------------------------------------------------------------------------------------- failures


@pytest.fixture
def lost(tmp_path: Path) -> Shop:
    """A shop whose ledger cannot be opened until its directory exists."""
    return Shop(f"sqlite:///{tmp_path}/missing/quota.db")


def journal(tmp_path: Path) -> dict[str, Any]:
    return {"quotas": {"journal": f"{tmp_path}/journal"}}


def test_requests_are_refused_while_the_ledger_is_unavailable(lost: Shop, tmp_path: Path) -> None:
    events: list[str] = []
    gate = lost.gate(
        {"name": "burst", "by": "tenant", "bucket": "5/minute"},
        EXPORTS,
        options={"on_event": lambda event: events.append(event.kind)},
        **journal(tmp_path),
    )
    for _ in range(7):
        admission = ask(gate, sent_by("acme"))
        assert admission.refusal is not None
        assert admission.refusal.status == 503
        assert dict(admission.refusal.headers)[b"retry-after"] == b"1"
        assert admission.decision is not None
        assert admission.decision.degraded == "ledger unavailable"
    assert events == ["ledger-lost"]
    (tmp_path / "missing").mkdir()
    gate.quota_meter.flush()
    assert ask(gate, sent_by("acme")).allowed, "the limit was not charged for what the ledger has refused"
    assert events == ["ledger-lost", "ledger-back"]
    assert lost.charged("exports/acme") == 1


def test_quota_continues_up_to_its_bound(lost: Shop, tmp_path: Path) -> None:
    gate = lost.gate(
        {**EXPORTS, "quota": "100/month", "on_ledger_failure": {"continue_up_to": 5}},
        {"name": "strict", "by": "tenant", "quota": "100/month", "path": "/strict", "on_ledger_failure": "lease"},
        **journal(tmp_path),
    )
    admissions = [ask(gate, sent_by("acme")) for _ in range(8)]
    assert [each.allowed for each in admissions] == [True] * 5 + [False] * 3
    assert paid(admissions[0]) == [("outage", 1)]
    assert ask(gate, sent_by("globex")).allowed, "each account has its own bound"
    assert not ask(gate, FakeRequest("/strict", headers={"x-tenant": "hooli"})).allowed
    (tmp_path / "missing").mkdir()
    gate.quota_meter.flush()
    assert lost.charged("exports/acme") == 5


def test_request_waits_no_longer_than_its_budget(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    exchange = Ledger.exchange

    def hang(self: Ledger, **arguments: Any) -> Any:
        release.wait()
        return exchange(self, **arguments)

    monkeypatch.setattr(Ledger, "exchange", hang)
    gate = shop.gate(EXPORTS, quotas={"budget": "10 ms"})
    assert [ask(gate, sent_by(name)).allowed for name in ("acme", "globex", "acme")] == [False] * 3
    release.set()
    assert shop.charged("exports/acme") == 0


def test_cancelled_request_is_not_charged(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    exchange = Ledger.exchange

    def hang(self: Ledger, **arguments: Any) -> Any:
        release.wait()
        return exchange(self, **arguments)

    policy = shop.policy(EXPORTS, {"name": "tokens", "by": "tenant", "quota": "9/month", "path": "/tokens"})

    async def cancel() -> None:
        gate = AsyncGate(policy, clock=shop.clock, identities={"tenant": tenant})
        finished = await gate.admit(sent_by("acme"))
        assert finished.allowed
        await gate.finish(finished, 200)
        monkeypatch.setattr(Ledger, "exchange", hang)
        # The first quota is reserved, and the second one waits for the ledger.
        waiting = asyncio.create_task(gate.admit(FakeRequest("/tokens", headers={"x-tenant": "acme"})))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()
        await gate.close()

    asyncio.run(cancel())
    assert shop.charged("exports/acme") == 1
    assert shop.charged("tokens/acme") == 0


def test_gate_that_was_closed_charges_again_when_it_is_used(shop: Shop) -> None:
    gate = shop.gate({**EXPORTS, "quota": "400/month"})
    assert ask(gate, sent_by("acme")).allowed
    gate.close()
    with ThreadPoolExecutor(4) as pool:
        admissions = list(pool.map(lambda _: ask(gate, sent_by("acme")), range(4)))
    assert [paid(each) for each in admissions] == [[("allowance", 1)]] * 4
    gate.close()
    gate.close()
    assert shop.charged("exports/acme") == 5


def test_deadline_is_answered_without_waiting(shop: Shop) -> None:
    from headgate.errors import StoreTimeout

    gate = shop.gate({**EXPORTS, "quota": "400/month"})
    error = StoreTimeout("too late")
    first = gate.admit_without_store(sent_by("acme"), error)
    assert first.decision is not None
    assert first.decision.degraded == "ledger unavailable"
    assert ask(gate, sent_by("acme")).allowed
    admission = gate.admit_without_store(sent_by("acme"), error)
    assert admission.allowed, "there is a lease now"
    gate.finish(admission, 200)
    assert shop.charged("exports/acme") == 2


def test_quota_is_charged_while_the_store_is_away(shop: Shop, server: Any) -> None:
    policy = shop.policy({"name": "burst", "by": "tenant", "bucket": "5/minute"}, EXPORTS, on_failure="open")
    gate = Gate(policy, server.url, identities={"tenant": tenant})
    shop.gates.append(gate)
    server.stop()
    admissions = [ask(gate, sent_by("acme")) for _ in range(4)]
    assert [each.allowed for each in admissions] == [True, True, True, False]
    assert admissions[0].decision is not None
    assert admissions[0].decision.degraded is not None
    assert shop.charged("exports/acme") == 3


def test_forked_child_charges_on_leases_of_its_own(shop: Shop) -> None:
    gate = shop.gate({**EXPORTS, "quota": "400/month"})
    assert ask(gate, sent_by("acme")).allowed

    def work() -> None:
        assert ask(gate, sent_by("acme")).allowed
        gate.close()

    assert run_in_child(work) == 0
    assert ask(gate, sent_by("acme")).allowed
    assert shop.charged("exports/acme") == 3


# ------------------------------------------------------------------------------------------------------- configuration


def test_quotas_need_a_ledger() -> None:
    policy = read("limits: [{name: exports, by: ip, quota: 5/month}]")
    with pytest.raises(InvalidConfiguration, match="there is no ledger to charge them to"):
        Gate(policy)


def test_policies_without_quotas_open_no_ledger(shop: Shop) -> None:
    gate = shop.gate({"by": "ip", "bucket": "5/minute"})
    assert gate.quota_meter is None
    assert ask(gate, sent_by("acme")).quotas == ()


def test_app_gives_its_own_ledger(shop: Shop) -> None:
    policy = read("quotas: {budget: 20 s}\nlimits: [{name: exports, by: ip, quota: 5/month}]")
    with closing(shop.ledger()) as ledger:
        with closing(Gate(policy, ledger=ledger, clock=shop.clock)) as gate:
            assert ask(gate, FakeRequest(peer="203.0.113.9")).allowed
        assert ledger.summary("exports/203.0.113.9").charged == 1


def test_ledger_of_the_environment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTA_FILE", shop.url.removeprefix("sqlite:///"))
    gate = shop.gate(EXPORTS, quotas={"ledger": "sqlite:///${QUOTA_FILE}"})
    assert ask(gate, sent_by("acme")).allowed
    monkeypatch.delenv("QUOTA_FILE")
    with pytest.raises(InvalidConfiguration, match="needs the environment variable QUOTA_FILE"):
        shop.gate(EXPORTS, quotas={"ledger": "sqlite:///${QUOTA_FILE}"})


def test_warns_of_a_missing_journal(postgres: Any, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(postgres.fresh_url())
    gate = shop.gate(EXPORTS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "quotas have no journal" in caplog.text
    assert ask(gate, sent_by("acme")).allowed
    assert shop.charged("exports/acme") == 1


def test_reload_keeps_the_meter_unless_the_ledger_changes(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"

    def write(allowance: int, ledger: str) -> None:
        quotas = {"ledger": ledger, "budget": "20 s"}
        file.write_text(json.dumps({"limits": [{**EXPORTS, "quota": f"{allowance}/month"}], "quotas": quotas}))

    write(2, shop.url)
    gate = Gate(file, clock=shop.clock, identities={"tenant": tenant}, reload_every=None)
    shop.gates.append(gate)
    assert [ask(gate, sent_by("acme")).allowed for _ in range(3)] == [True, True, False]
    meter = gate.quota_meter
    write(5, shop.url)
    gate.policy_watcher.look()
    assert gate.quota_meter is meter
    wait_until_admitted(gate)
    assert [ask(gate, sent_by("acme")).allowed for _ in range(3)] == [True, True, False]
    write(5, f"sqlite:///{tmp_path}/other.db")
    gate.policy_watcher.look()
    assert gate.quota_meter is not meter
    assert ask(gate, sent_by("acme")).allowed
    assert shop.charged("exports/acme") == 5


def wait_until_admitted(gate: Gate) -> None:
    """Until a request is admitted: after a refusal, the account is not looked at again for a moment."""
    pause = threading.Event()
    while not ask(gate, sent_by("acme")).allowed:
        pause.wait(0.01)


@pytest.mark.parametrize("written_in", ["tier", "override", "client"])
def test_changed_calendar_never_grants_a_period_twice(shop: Shop, tmp_path: Path, written_in: str) -> None:
    file = tmp_path / "policy.json"

    def write(day: int, zone: str) -> None:
        limit: dict[str, Any] = {"name": "exports", "by": "tenant", "quota": "3/month"}
        calendar = {"starts": day, "timezone": zone}
        policy: dict[str, Any] = {"quotas": {"ledger": shop.url, "budget": "20 s"}}
        if written_in == "tier":
            limit["tiers"] = {"pro": calendar}
            policy["clients"] = [{"tenant": "acme", "tier": "pro"}]
        elif written_in == "override":
            policy["overrides"] = [{"tenant": "acme", "limit": "exports", "quota": calendar}]
        else:
            policy["clients"] = [{"tenant": "acme", **calendar}]
        file.write_text(json.dumps({"limits": [limit], **policy}))

    write(1, "UTC")
    gate = Gate(file, clock=shop.clock, identities={"tenant": tenant}, reload_every=None)
    shop.gates.append(gate)
    served = 0
    for step in range(60):  # two months, in which the calendar changes daily
        write(1 + step * 7 % 28, ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago")[step % 3])
        gate.policy_watcher.look()
        while ask(gate, sent_by("acme", key=f"{served}")).allowed:
            served += 1
            assert served <= 9
        shop.clock.advance(DAY_S)
    assert served <= 9, "the months of October, November and December"
    assert shop.charged("exports/acme") == served


# ------------------------------------------------------------------------------------------------------- a model


@dataclass
class Model:
    """A limit and two quotas, in plain sums."""

    burst: dict[str, int] = field(default_factory=dict)
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    served: dict[tuple[str, str], set[int]] = field(default_factory=dict)

    def may_pass(self, client: str, key: int | None) -> bool:
        is_paid = key is not None and key in self.served.get((client, "keys"), ())
        fits = all(self.used.get((client, name), 0) + cost <= most for name, (cost, most) in QUOTAS.items())
        return self.burst.get(client, 0) < 4 and (fits or is_paid)

    def serve(self, client: str, key: int | None) -> None:
        self.burst[client] = self.burst.get(client, 0) + 1
        keys = self.served.setdefault((client, "keys"), set())
        if key is None or key not in keys:
            for name, (cost, _) in QUOTAS.items():
                self.used[client, name] = self.used.get((client, name), 0) + cost
        if key is not None:
            keys.add(key)


QUOTAS = {"exports": (1, 7), "tokens": (13, 60)}
REQUESTS = st.lists(
    st.tuples(st.sampled_from(["acme", "globex"]), st.none() | st.integers(0, 3), st.booleans()), max_size=40
)


@settings(max_examples=25)
@given(requests=REQUESTS)
def test_requests_are_decided_as_by_the_model(
    requests: list[tuple[str, int | None, bool]], migrated_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("shop")
    shutil.copy(migrated_file, directory / "quota.db")
    shop, model = Shop(f"sqlite:///{directory}/quota.db"), Model()
    quotas = [
        {"name": name, "by": "tenant", "quota": f"{most}/month", "cost": cost} for name, (cost, most) in QUOTAS.items()
    ]
    gate = shop.gate({"name": "burst", "by": "tenant", "bucket": "4/minute, fixed_window"}, *quotas)
    for client, key, is_later in requests:
        if is_later:
            shop.clock.advance(60)
            model.burst.clear()
        expected = model.may_pass(client, key)
        admission = ask(gate, sent_by(client, key=None if key is None else f"{key}"))
        assert admission.allowed == expected, admission.decision
        if expected:
            model.serve(client, key)
    for client in ("acme", "globex"):
        for name in QUOTAS:
            assert shop.charged(f"{name}/{client}") == model.used.get((client, name), 0)


# ------------------------------------------------------------------------------------------------------- records


def test_decision_log_has_the_charges(shop: Shop, tmp_path: Path) -> None:
    log = DecisionLog(f"sqlite:///{tmp_path}/decisions.db", secret=b"s" * 16, sample=1)
    prompts = {"name": "tokens", "by": "tenant", "quota": "100/month", "reserve": 40}
    gate = shop.gate(EXPORTS, prompts, options={"on_decision": log})
    admissions = [gate.admit(sent_by("acme")) for _ in range(3)]
    gate.finish(admissions[0], 200)
    gate.flush_events()
    log.close()
    with closing(SqliteReader(tmp_path / "decisions.db")) as reader:
        records = reader.recent(most=10)
    ids = [[charge.id for charge in each.quotas] for each in admissions]
    assert [record.charges for record in records] == [
        (("exports", 1, (("allowance", 1),), ids[number][0]), ("tokens", 40, (("allowance", 40),), ids[number][1]))
        for number in range(2)
    ] + [()]
    assert [record.outcome for record in records] == ["allowed", "allowed", "denied"]
    assert (records[2].limit, records[2].remaining, records[2].cost) == ("tokens", 20, 40)
    assert records[0].words.endswith("1 of exports paid by allowance; 40 of tokens paid by allowance")


def test_older_decision_log_gets_the_column(tmp_path: Path) -> None:
    file = tmp_path / "decisions.db"
    with closing(SqliteSink(file)) as sink:
        sink.write([])
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.executescript("ALTER TABLE decisions DROP COLUMN quotas; PRAGMA user_version = 1")
    lost = lost_record("0" * 14, 1, since_us=1, until_us=2, node="", region="")
    with closing(SqliteSink(file)) as sink:
        sink.write([lost._replace(quotas="[]")])
    with closing(SqliteReader(file)) as reader:
        assert [record.quotas for record in reader.recent(most=2)] == ["[]"]


def test_metrics_contain_quotas(shop: Shop) -> None:
    gate = shop.gate(EXPORTS)
    metrics = Metrics()
    metrics.watch(gate)
    for _ in range(4):
        ask(gate, sent_by("acme"))
    gate.flush_events()
    samples = {(sample.family.name, sample.labels): sample.value for sample in metrics.read()}
    assert samples["rate_limiter_quota_charges", ()] == 3
    assert samples["rate_limiter_quota_rejections", ("exports", "exhausted")] == 1
    assert samples["rate_limiter_blocked", ("exports", "none", "unmatched")] == 1
