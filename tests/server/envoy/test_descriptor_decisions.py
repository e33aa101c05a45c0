"""Decisions on descriptors in the decision log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.server.envoy import AsyncRateLimitService, RateLimitService
from headgate.server.envoy.descriptor_decisions import identity_kind
from headgate.server.envoy.quota_service import QuotaService
from headgate.telemetry import DecisionLog
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.testing import FakeClock
from support.envoy import ProxyClient, rate_limit_request
from support.traffic import Kept

if TYPE_CHECKING:
    from headgate.telemetry.decision_log.record import DecisionRecord

SECRET = "for tests only, as long as it has to be"
HASHES = Pseudonymizer(SECRET)
TEXT = """
domain: shop
clients: {acme: pro}
descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: remote_address, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: api_key, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: path, value: /search*, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: dark, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: model, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: shut, rate_limit: {unit: minute}}
  - key: tenant
    rate_limit: {unit: minute, requests_per_unit: 1, tiers: {pro: {requests_per_unit: 2}}}
    descriptors:
      - {key: x-plan, rate_limit: {unit: minute, requests_per_unit: 1, algorithm: token_bucket, burst: 1}}
"""


class LoggedService:
    """A service whose decision log is kept in memory."""

    def __init__(self, env: dict[str, str] | None = None, text: str = TEXT, **limiter: Any) -> None:
        self.clock = FakeClock(600_000_000)
        limiter = {"url": "memory://", "clock": self.clock, **limiter}
        self.service = RateLimitService.from_texts([("shop.yaml", text)], Limiter(**limiter), env=env or {})
        self._sink = Kept()
        self._log = DecisionLog(self._sink, secret=SECRET, sample=1)
        self.service.decisions.add_observer(self._log)

    def ask(self, *descriptors: list[tuple[str, str]], **options: Any) -> DecisionRecord:
        """Send a request; the record of its decision."""
        before = len(self.records())
        self.service.should_rate_limit(rate_limit_request("shop", *descriptors, **options))
        (record,) = self.records()[before:]
        return record

    def records(self) -> list[DecisionRecord]:
        assert self._log.flush()
        return self._sink.records


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SECRET", SECRET)


def test_a_denial_names_domain_limit_and_next_time() -> None:
    logged = LoggedService()
    logged.clock.advance(12)
    records = [logged.ask([("user", "ada")]) for _ in range(3)]
    assert [record.outcome for record in records] == ["allowed", "allowed", "denied"]
    denied = records[2]
    assert (denied.policy, denied.method, denied.route) == ("envoy", "ENVOY", "shop")
    assert (denied.limit, denied.by, denied.quota, denied.remaining) == ("shop.user", "user", 2, 0)
    assert (denied.cost, denied.retry_us) == (1, 48_000_000)
    assert denied.words == (
        f"denied ENVOY shop of user {HASHES.key('user', 'ada')[:13]}: "
        "shop.user (2 per minute, fixed_window): cost 1, 0 left, passes in 48 s"
    )


def test_clients_are_pseudonyms_and_found_by_every_entry() -> None:
    logged = LoggedService()
    entries = [("user", "ada"), ("remote_address", "2001:DB8::7"), ("api_key", "sk_live"), ("x-plan", "gold")]
    record = logged.ask(*[[entry] for entry in entries])
    found = dict(zip(record.kinds, record.clients, strict=True))
    assert found == {
        "user": HASHES.hash_of("user", "ada"),
        "ip": HASHES.hash_of("ip", "2001:db8::7"),
        "api_key": HASHES.hash_of("api_key", "sk_live"),
        "x_plan": HASHES.hash_of("x_plan", "gold"),
        "domain": HASHES.hash_of("domain", "shop"),
    }
    assert record.client_kind == "api_key"
    assert not any(value in record.as_json() for value in ("ada", "sk_live", "gold", "2001:"))


def test_a_request_is_found_by_a_client_whose_own_limit_allowed_it() -> None:
    logged = LoggedService()
    logged.ask([("path", "/search?q=a")])
    record = logged.ask([("user", "ada")], [("path", "/search?q=a")])
    assert (record.outcome, record.limit, record.also) == ("denied", "shop.path_/search*", ())
    assert HASHES.key("user", "ada") in record.clients


def test_all_limits_that_denied_are_named() -> None:
    logged = LoggedService()
    for _ in range(2):
        logged.ask([("user", "ada")])
    logged.ask([("path", "/search")])
    record = logged.ask([("user", "ada")], [("path", "/search")])
    assert sorted([record.limit, *[each.limit for each in record.also]]) == ["shop.path_/search*", "shop.user"]


def test_shadow_limits_are_marked_and_do_not_reject() -> None:
    logged = LoggedService()
    logged.ask([("dark", "a")])
    record = logged.ask([("dark", "a")], [("user", "ada")])
    assert (record.outcome, record.shadow, record.limit) == ("allowed", True, "shop.dark")


def test_global_shadow_mode_marks_all_limits() -> None:
    logged = LoggedService({"SHADOW_MODE": "true"})
    records = [logged.ask([("path", "/search")]) for _ in range(2)]
    assert [(each.outcome, each.shadow) for each in records] == [("allowed", False), ("allowed", True)]


def test_a_quota_denies_once_all_are_used_up() -> None:
    logged = LoggedService()
    both = [("model", "small")], [("model", "large")]
    logged.ask(both[0])
    assert logged.ask(*both).outcome == "allowed"
    record = logged.ask(*both)
    assert (record.outcome, record.limit, len(record.also)) == ("denied", "shop.model", 1)


def test_a_rule_that_allows_nothing_is_a_block() -> None:
    record = LoggedService().ask([("shut", "x")], [("user", "ada")])
    assert (record.outcome, record.note) == ("blocked", "shop.shut allows no requests")


@pytest.mark.parametrize(("tenant", "quota", "origin"), [("acme", 2, "tier"), ("other", 1, "")])
def test_the_source_of_the_numbers_is_named(tenant: str, quota: int, origin: str) -> None:
    record = LoggedService().ask([("tenant", tenant)])
    assert (record.quota, record.origin, record.label) == (quota, origin, f"tenant {tenant}")


def test_unmatched_requests_and_returned_hits_have_no_limit() -> None:
    logged = LoggedService()
    assert logged.ask([("unknown", "x")]).reason == "no-limit"
    assert logged.ask([("tenant", "acme"), ("unknown", "x")]).reason == "no-limit"


def test_nested_entries_count_by_all_of_their_keys() -> None:
    logged = LoggedService()
    entries = [("tenant", "acme"), ("x-plan", "gold")]
    logged.ask(entries)
    record = logged.ask(entries)
    assert (record.outcome, record.by, record.retry_us) == ("denied", "tenant+x_plan", 60_000_000)


def test_refused_requests_that_are_charged_pass_with_the_next_window() -> None:
    logged = LoggedService(text="charge_refused: true" + TEXT)
    records = [logged.ask([("path", "/search")]) for _ in range(3)]
    assert [each.outcome for each in records] == ["allowed", "denied", "denied"]
    assert (records[2].quota, records[2].retry_us) == (1, 60_000_000)


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"), [("closed", "unavailable", "store-away"), ("open", "allowed", "within-limits")]
)
def test_decisions_without_the_store_say_so(mode: str, outcome: str, reason: str) -> None:
    logged = LoggedService(url="redis://127.0.0.1:1/0", on_failure=mode)
    record = logged.ask([("user", "ada")])
    assert (record.outcome, record.reason) == (outcome, reason)
    assert record.degraded.startswith(f"{mode}: ")


def test_unknown_domains_are_not_logged() -> None:
    logged = LoggedService()
    logged.service.should_rate_limit(rate_limit_request("elsewhere", [("user", "ada")]))
    assert logged.records() == []


def test_requests_that_a_proxy_denies_by_its_quota_are_logged() -> None:
    async def main() -> list[DecisionRecord]:
        sink = Kept()
        async with AsyncLimiter(clock=FakeClock(600_000_000)) as limiter:
            service = AsyncRateLimitService.from_texts([("shop.yaml", TEXT)], limiter, env={})
            with DecisionLog(sink, secret=SECRET) as log:
                service.decisions.add_observer(log)
                proxy = ProxyClient(QuotaService(limiter, service))
                await proxy.report(2, 0, seconds=0, bucket={"user": "ada"})
                await proxy.report(2, 7, bucket={"user": "ada"})
                log.flush()
                return sink.records

    (record,) = asyncio.run(main())
    assert (record.method, record.route, record.limit, record.cost) == ("ENVOY-QUOTA", "shop", "shop.user", 7)
    assert (record.outcome, record.retry_us) == ("denied", 60_000_000)
    assert HASHES.key("user", "ada") in record.clients


@pytest.mark.parametrize(
    ("key", "kind"),
    [("user", "user"), ("remote_address", "ip"), (":path", "_path"), ("", "_"), ("2fa", "_2fa"), ("label", "label_")],
)
def test_the_key_of_an_entry_is_a_kind_of_identity(key: str, kind: str) -> None:
    assert identity_kind(key) == kind
