"""Gates in several regions: the arguments, the section `regions` of the policy, and limits that the regions share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from headgate import InvalidConfiguration, InvalidLimit, Limit
from headgate.adapters.asgi import HeadgateMiddleware as AsgiMiddleware
from headgate.adapters.wsgi import HeadgateMiddleware as WsgiMiddleware
from headgate.gate import AsyncGate, Gate
from headgate.gate.view_limits import LimitDeclaration
from headgate.policy import read
from headgate.policy.api_keys import IdentityHashes
from headgate.policy.model import RegionSettings
from headgate.policy.region_settings import REGION_VARIABLE, region_arguments, region_urls
from headgate.testing import FakeRequest
from support.sites import policy_json

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.policy.model import Policy
    from support.servers import RedisServer
    from support.sites import MakeSite

SECRET = b"a secret of thirty-two bytes ..."
CENTRAL = {"name": "worldwide", "by": "global", "bucket": "4/hour", "region": "central"}
DIVIDED = {"name": "shared", "by": "global", "bucket": "5/hour", "region": "divided"}
SETTINGS = RegionSettings("eu", "eu", {"eu": "redis://eu", "us": "redis://us"})


@pytest.fixture
def urls(redis7: RedisServer, valkey9: RedisServer) -> dict[str, str]:
    """The stores of two regions."""
    return {"eu": redis7.url, "us": valkey9.url}


def policy_of(*limits: dict[str, Any], **more: Any) -> Policy:
    return read(policy_json(*limits, **more), format="json")


def regional_policy(urls: dict[str, str], *limits: dict[str, Any], **regions: Any) -> Policy:
    return policy_of(*limits, regions={"home": "eu", "stores": urls, "central_budget": "5 seconds", **regions})


def statuses(site: Any, count: int) -> list[int]:
    return [site.ask("/items/1").status for _ in range(count)]


# ------------------------------------------------------------------ requests


def test_regions_of_the_policy_share_a_central_limit(
    make_item_site: MakeSite, urls: dict[str, str], unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = regional_policy(urls, CENTRAL)
    found = []
    for region in ("us", "eu", "us"):
        monkeypatch.setenv(REGION_VARIABLE, region)
        found.append(statuses(make_item_site(policy, urls[region], namespace=unique, budget=5.0), 2))
    assert found == [[200, 200], [200, 200], [429, 429]]


def test_regions_given_as_arguments_share_limits(make_item_site: MakeSite, urls: dict[str, str], unique: str) -> None:
    shared: dict[str, Any] = {"regions": urls, "home": "eu", "central_budget": 5.0, "namespace": unique, "budget": 5.0}
    policy = policy_of(DIVIDED)
    eu = make_item_site(policy, urls["eu"], region="eu", **shared)
    us = make_item_site(policy, urls["us"], region="us", **shared)
    assert statuses(us, 3) == [200, 200, 429]
    assert statuses(eu, 4) == [200, 200, 200, 429]


def test_gate_without_a_store_uses_that_of_its_region(urls: dict[str, str], unique: str, redis7: RedisServer) -> None:
    gate = Gate(regional_policy(urls, CENTRAL, own="eu"), namespace=unique)
    try:
        gate.block("ip", "203.0.113.9")
        with redis7.client() as redis:
            assert list(redis.scan_iter(match=f"{unique}:*"))
    finally:
        gate.close()


@pytest.mark.parametrize("middleware", [AsgiMiddleware, WsgiMiddleware])
def test_middleware_takes_the_arguments_of_a_limiter(middleware: Any, urls: dict[str, str]) -> None:
    options: dict[str, Any] = {"region": "us", "regions": urls, "home": "eu"}
    gate = middleware(None, policy_of(CENTRAL), urls["us"], **options).gate
    assert gate._limiter.bound(read_limit(CENTRAL)) == 0
    assert gate._limiter.engine.home is not None


def test_budget_of_the_home_region_follows_the_policy(urls: dict[str, str], tmp_path: Path) -> None:
    def written(budget: str) -> None:
        stores = f"{{eu: {urls['eu']!r}, us: {urls['us']!r}}}"
        limits = "limits: [{by: global, bucket: 4/hour, region: central}]"
        path.write_text(f"regions: {{own: us, home: eu, stores: {stores}, central_budget: {budget}}}\n{limits}\n")

    path = tmp_path / "policy.yaml"
    written("300 ms")
    gate = Gate(path, reload_every=None)
    try:
        assert gate._limiter.engine.home.store.budget == 0.3
        written("700 ms")
        assert gate.policy_watcher.look()
        assert gate._limiter.engine.home.store.budget == 0.7
    finally:
        gate.close()


def read_limit(limit: dict[str, Any]) -> Limit:
    (rule,) = policy_of(limit).rules
    assert rule.limit is not None
    return rule.limit


# ------------------------------------------------------------------ identities that leave a region


def keys_of(gate: Gate, **request: Any) -> dict[str, str]:
    """The identities by which a request is counted, by the names of limits."""
    pending: Any = gate.prepare(FakeRequest(**request))
    return {key.limit.name: key.identity for key in pending.check.keys}


def test_shared_limits_count_by_keyed_hashes(urls: dict[str, str], unique: str) -> None:
    limits = [{**CENTRAL, "by": "ip"}, {**DIVIDED, "by": "ip"}, {"name": "own", "by": "ip", "bucket": "9/hour"}]
    hashed = IdentityHashes(SECRET)("counter", "203.0.113.9")
    for form, secret, expected in (("hashed", SECRET, hashed), ("plain", SECRET, "203.0.113.9")):
        policy = regional_policy(urls, *limits, own="us", identities=form)
        gate = Gate(policy, urls["us"], secret=secret, namespace=unique)
        try:
            names = keys_of(gate)
            assert names == {"worldwide": expected, "shared": "203.0.113.9", "own": "203.0.113.9"}
        finally:
            gate.close()


def test_hashes_need_a_secret_if_the_policy_asks_for_them(urls: dict[str, str]) -> None:
    policy = regional_policy(urls, {**CENTRAL, "by": "ip"}, own="us", identities="hashed")
    with pytest.raises(InvalidConfiguration, match="limit 'worldwide' shares identities with other regions as hashes"):
        Gate(policy, urls["us"])


def test_net_of_unknown_keys_stays_with_its_addresses(urls: dict[str, str], unique: str) -> None:
    limit = {"name": "keys", "by": "api_key", "bucket": "4/hour", "region": "central", "missing": "skip"}
    modes = {}
    for stay in ("ip", "user"):
        gate = Gate(regional_policy(urls, limit, own="us", stay=stay), secret=SECRET, namespace=unique)
        try:
            pending: Any = gate.prepare(FakeRequest(headers={"x-api-key": "unknown"}))
            modes[stay] = [key.limit.region for key in pending.check.keys]
            addresses = [key.identity for key in pending.check.keys if key.limit.name != "keys"]
            assert (addresses == ["203.0.113.9"]) == (stay == "ip")
        finally:
            gate.close()
    assert modes == {"ip": ["central", "regional"], "user": ["central", "central"]}


def test_view_limit_keeps_identities_that_stay(urls: dict[str, str]) -> None:
    policy = regional_policy(urls, {"by": "ip", "bucket": "4/hour"}, own="us", stay="ip")
    gate = Gate(policy, secret=SECRET)
    try:
        with pytest.raises(InvalidConfiguration, match="limit 'worldwide' is central, and ip may not leave its region"):
            gate.compile_view([LimitDeclaration(read_limit(CENTRAL), by="ip")], "view")
    finally:
        gate.close()


# ------------------------------------------------------------------ mistakes and changes


def test_limit_over_regions_needs_regions(urls: dict[str, str]) -> None:
    message = "limit 'worldwide' is central, and this process has no regions; add regions: to the policy, or give"
    for kind in (Gate, AsyncGate):
        with pytest.raises(InvalidConfiguration, match=message):
            kind(policy_of(CENTRAL), urls["eu"])
    Gate(policy_of(CENTRAL)).close()  # in memory, for tests


def test_view_limit_over_regions_needs_regions(urls: dict[str, str]) -> None:
    gate = Gate(policy_of({"by": "ip", "bucket": "4/hour"}), urls["eu"])
    try:
        with pytest.raises(InvalidConfiguration, match="limit 'worldwide' is central, and this process has no regions"):
            gate.compile_view([LimitDeclaration(read_limit(CENTRAL), by="ip")], "view")
    finally:
        gate.close()


def test_limit_that_the_regions_cannot_share_is_rejected(urls: dict[str, str]) -> None:
    policy = policy_of({**DIVIDED, "bucket": "1/hour"})
    with pytest.raises(InvalidLimit, match="limit 'shared': quota 1 cannot be divided over 2 regions"):
        Gate(policy, urls["eu"], region="eu", regions=urls, home="eu")


def test_unknown_region_of_a_gate_is_rejected(urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = regional_policy(urls, CENTRAL)
    with pytest.raises(InvalidConfiguration, match="set HEADGATE_REGION, or give region=, to one of eu, us"):
        Gate(policy)
    monkeypatch.setenv(REGION_VARIABLE, "ue")
    with pytest.raises(InvalidConfiguration, match="region 'ue' is not one of the regions: eu, us"):
        Gate(policy)


def test_change_of_regions_takes_effect_after_a_restart(
    urls: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stores = f"{{eu: {urls['eu']!r}, us: {urls['us']!r}}}"
    path = tmp_path / "policy.yaml"
    path.write_text("limits: [{by: global, bucket: 4/hour}]")
    gate = Gate(path, urls["us"], reload_every=None)
    regions = f"regions: {{own: us, home: eu, stores: {stores}}}\n"
    try:
        path.write_text(f"{regions}limits: [{{name: worldwide, by: global, bucket: 4/hour, region: central}}]")
        assert not gate.policy_watcher.look()
        expected = "limit 'worldwide' is central, and this process was started without regions; restart it"
        assert gate.policy_error == expected
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headgate"):
            path.write_text(f"{regions}limits: [{{by: global, bucket: 5/hour}}]")
            assert gate.policy_watcher.look()
        assert gate.policy_error is None
        assert [record.message for record in caplog.records] == [
            "policy policy: regions: has changed, which takes effect after a restart"
        ]
    finally:
        gate.close()


# ------------------------------------------------------------------ arguments and settings


def test_arguments_take_precedence_over_the_policy() -> None:
    given = {"region": "us", "regions": {"us": "redis://a", "as": "redis://b"}, "home": "as", "central_budget": 2.0}
    assert region_arguments(SETTINGS, "redis://a", given, {REGION_VARIABLE: "as"}) == (
        "redis://a",
        {**given, "safe_share": 0.02},
    )


def test_settings_of_the_policy_stand_in_for_arguments() -> None:
    expected = {"region": "eu", "regions": SETTINGS.stores, "home": "eu", "central_budget": 0.5, "safe_share": 0.02}
    assert region_arguments(SETTINGS, "memory://", {}, {}) == ("redis://eu", expected)
    assert region_arguments(SETTINGS, "redis://eu", {"region": None}, {REGION_VARIABLE: "us"})[1] == expected


@pytest.mark.parametrize(
    ("own", "store", "environment", "region"),
    [
        (None, "memory://", {REGION_VARIABLE: "us"}, "us"),
        ("${WHERE}", "memory://", {REGION_VARIABLE: "eu", "WHERE": "us"}, "us"),
        (None, "redis://us", {}, "us"),
        (None, "redis://us", {REGION_VARIABLE: "eu"}, "eu"),
    ],
)
def test_region_comes_from_the_environment_or_the_store(
    own: str | None, store: str, environment: dict[str, str], region: str
) -> None:
    settings = RegionSettings(own, "eu", SETTINGS.stores)
    assert region_arguments(settings, store, {}, environment)[1]["region"] == region


def test_environment_alone_makes_no_regions() -> None:
    assert region_arguments(None, "redis://eu", {}, {REGION_VARIABLE: "eu"}) == ("redis://eu", {})


def test_password_comes_from_the_environment_and_is_not_shown() -> None:
    settings = RegionSettings("eu", "eu", {"eu": "redis://:${SECRET}@eu", "us": "redis://:open-sesame@us"})
    assert region_urls(settings, {"SECRET": "pass"}) == {"eu": "redis://:pass@eu", "us": "redis://:open-sesame@us"}
    with pytest.raises(InvalidConfiguration) as raised:
        region_urls(settings, {})
    expected = "the store of region 'eu' needs the environment variable SECRET, which is not set"
    assert str(raised.value) == expected
    assert "sesame" not in repr(settings)


@pytest.mark.parametrize("text", ["regions: {stores: %s}", "regions: %s", "regions: {stores: {eu: %s}}"])
def test_mistakes_do_not_show_urls(text: str) -> None:
    with pytest.raises(ValueError, match=r"regions|stores|eu") as raised:
        read(text % "'http://:open-sesame@us'" + "\nlimits: [{by: ip, bucket: 1/minute}]")
    assert "sesame" not in str(raised.value)
