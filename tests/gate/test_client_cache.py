"""Who comes again is read and resolved as whoever comes first, and what is remembered of clients stays small."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.gate.active_policy import MAX_CLIENTS, MAX_MISSES, ActivePolicy, ClientCache
from headgate.gate.identity import IdentityExtractor
from headgate.gate.responses import ResponseBuilder
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.loader import read
from headgate.policy.model import IdentitySettings
from headgate.policy.snapshot import Snapshot
from headgate.testing import FakeRequest

if TYPE_CHECKING:
    from headgate.policy.snapshot import Identities
    from headgate.stores.operations import Check

KEYS = ApiKeyHasher(bytes(range(32)))
ALL = frozenset({"ip", "subnet", "api_key", "user"})
KIND_SETS = [ALL, frozenset({"ip"}), frozenset({"api_key"}), frozenset({"subnet", "user"})]


def some(*lines: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(lines), max_size=2)


headers = st.fixed_dictionaries(
    {
        "x-api-key": some("one", "two", " one", "", "one,two", "Bearer one"),
        "authorization": some("Bearer one", "Bearer two", "Basic one", "one", ""),
        "x-forwarded-for": some("198.51.100.1", "198.51.100.2", "198.51.100.1, 10.0.0.2", "x"),
    }
)
arrivals = st.builds(
    FakeRequest,
    headers=headers,
    peer=st.sampled_from(["203.0.113.9", "10.0.0.1", "2001:db8::1", "x", "1" * 300, None]),
    native=st.sampled_from(["ada", "bob", None]),
)
settings = st.builds(
    IdentitySettings,
    proxies=st.sampled_from([(), ("10.0.0.0/8",)]),
    api_key_header=st.sampled_from(["x-api-key", "authorization", None]),
    bearer_token=st.booleans(),
)


def told_user(request: FakeRequest) -> Any:
    return request.native


def made(settings: IdentitySettings, functions: Any = None) -> ActivePolicy:
    """Rules that count everybody by everything."""
    policy = read("limits: [{name: all, by: [ip, subnet, api_key, user], bucket: 1/s}]")
    return ActivePolicy(Snapshot(policy), ResponseBuilder(policy.answers), IdentityExtractor(settings, KEYS, functions))


def who(rules: ActivePolicy, request: FakeRequest, kinds: frozenset[str] = ALL) -> Identities:
    """As whom the request is counted."""
    route = rules.snapshot.route("GET", "/")
    return rules.resolve(route, request, kinds, rules.identities.from_app(request, kinds)[0], 0)[0].who


def known(rules: ActivePolicy) -> dict[Any, Any]:
    return rules.cached_clients


@given(settings, st.lists(st.tuples(arrivals, st.sampled_from(KIND_SETS)), min_size=1, max_size=20))
def test_client_cache_does_not_change_identities(
    settings: IdentitySettings, asked: list[tuple[FakeRequest, frozenset[str]]]
) -> None:
    rules = made(settings, {"user": told_user})
    for request, kinds in asked * 2:
        assert who(rules, request, kinds) == who(made(settings, {"user": told_user}), request, kinds)


def test_line_without_a_key_leaves_it_to_the_next_header() -> None:
    rules = made(IdentitySettings())
    for key in ("one", "two", "one"):
        sent = {"x-api-key": ["no key"], "authorization": [f"Bearer {key}"]}
        assert who(rules, FakeRequest(headers=sent))["api_key"] == KEYS.hashed(key)


def test_what_functions_say_is_asked_of_each_request() -> None:
    rules = made(IdentitySettings(), {"user": told_user})
    for user in ("ada", None, "bob"):
        assert who(rules, FakeRequest(native=user)).get("user") == user


def test_function_for_api_keys_has_the_word_and_no_header() -> None:
    rules = made(IdentitySettings(), {"api_key": told_user})
    for key in ("one", None, "two"):
        told = who(rules, FakeRequest(headers={"x-api-key": ["three"]}, native=key)).get("api_key")
        assert told == (None if key is None else KEYS.hashed(key))


def test_clients_that_are_remembered_are_bounded_in_number_and_size() -> None:
    rules = made(IdentitySettings(proxies=("10.0.0.0/8",)))
    for number in range(5000):
        who(rules, FakeRequest(headers={"x-api-key": [f"key-{number}"]}))
    assert len(known(rules)) == MAX_CLIENTS
    rules = made(IdentitySettings(proxies=("10.0.0.0/8",)))
    for sent in ({"x-forwarded-for": ["x" * 600]}, {"x-forwarded-for": ["x"] * 600}, {"x-api-key": ["x"] * 300}):
        who(rules, FakeRequest(headers=sent))
    who(rules, FakeRequest(peer="1" * 600))
    assert not known(rules)


def test_api_key_is_not_kept() -> None:
    rules = made(IdentitySettings())
    for sent in ({"x-api-key": ["sk_live_4f9a"]}, {"authorization": ["Bearer sk_live_4f9a"]}):
        who(rules, FakeRequest(headers=sent))
    assert len(known(rules)) == 2
    assert "sk_live" not in repr(known(rules))


# ------------------------------------------------------------------ what they meet

START = datetime(2026, 5, 28, tzinfo=UTC)
START_US = int(START.timestamp()) * 1_000_000
HOUR_US = 3_600_000_000
LIMITS = f"""
limits: [{{name: posts, by: user, bucket: 10/minute}}]
overrides:
  - {{limit: posts, user: ada, bucket: 20/minute, valid_from: "{START:%Y-%m-%dT%H:%M:%SZ}", reason: launch,
      valid_until: "{START + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"}}
blocked: [{{user: eve, valid_until: "{START + timedelta(hours=2):%Y-%m-%dT%H:%M:%SZ}", reason: unpaid}}]
"""


@pytest.fixture
def rules() -> ActivePolicy:
    policy = read(LIMITS)
    return ActivePolicy(Snapshot(policy), ResponseBuilder(policy.answers), IdentityExtractor(policy.identity, KEYS))


def check(rules: ActivePolicy, user: str, now_us: int) -> Check | None:
    route = rules.snapshot.route("GET", "/posts")
    return rules.resolve(route, FakeRequest(), route.kinds, {"user": user}, now_us)[1]


@pytest.mark.parametrize("order", [1, -1])
def test_override_begins_and_ends_at_its_very_moment(rules: ActivePolicy, order: int) -> None:
    instants = [(-1, 10), (0, 20), (1, 20), (HOUR_US - 1, 20), (HOUR_US, 10), (HOUR_US + 1, 10)]
    for after_us, quota in instants[::order]:
        for _ in range(2):
            asked = check(rules, "ada", START_US + after_us)
            assert asked is not None
            assert asked.keys[0].limit.quota == quota


@pytest.mark.parametrize("order", [1, -1])
def test_block_ends_at_its_very_moment(rules: ActivePolicy, order: int) -> None:
    for after_us, is_blocked in [(-2, True), (-1, True), (0, False), (1, False)][::order]:
        assert (check(rules, "eve", START_US + 2 * HOUR_US + after_us) is None) is is_blocked


def test_routes_and_kinds_are_distinguished() -> None:
    policy = read("limits: [{path: /a, by: user, bucket: 1/s}, {path: /b, by: tenant, bucket: 1/s, missing: skip}]")
    rules = ActivePolicy(Snapshot(policy), ResponseBuilder(policy.answers), IdentityExtractor(policy.identity, KEYS))
    for path, kind, met in [("/a", "user", 1), ("/b", "user", 0), ("/b", "tenant", 1), ("/a", "tenant", 1)] * 2:
        route = rules.snapshot.route("GET", path)
        found, *_ = rules.resolve(route, FakeRequest(), route.kinds, {kind: "acme"}, START_US)
        assert len(found.keys) == met
        assert all((key.parts == ("acme",)) is (kind == found.rules[0].rule.by[0]) for key in found.keys)


def test_frequent_clients_are_cached_again_after_a_flood() -> None:
    busy: Any = ClientCache()
    for number in range(MAX_CLIENTS):
        assert busy.has_room()
        busy[number] = "busy"
    assert not any(busy.has_room() for _ in range(MAX_MISSES - 1))
    assert len(busy) == MAX_CLIENTS
    assert not busy.has_room()
    assert busy.has_room()
    assert not busy


def test_what_they_meet_is_bounded_in_number_and_size(rules: ActivePolicy) -> None:
    check(rules, "u" * 1000, START_US)
    assert not known(rules)
    for number in range(5000):
        check(rules, f"user-{number}", START_US)
    assert len(known(rules)) == MAX_CLIENTS


def test_nothing_of_a_period_that_is_over_is_kept(rules: ActivePolicy) -> None:
    check(rules, "ada", START_US)
    check(rules, "ada", START_US + HOUR_US)
    assert len(known(rules)) == 1
