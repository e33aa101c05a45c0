"""Who comes again is read and resolved as whoever comes first, and what is remembered of clients stays small."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.adapters.answers import Answers
from headgate.adapters.identities import MOST_KNOWN, PATIENCE, Identities, Known
from headgate.adapters.way import Rules
from headgate.policy.credentials import ApiKeys
from headgate.policy.loading import read
from headgate.policy.model import IdentitySettings
from headgate.policy.snapshot import Snapshot

if TYPE_CHECKING:
    from headgate.stores.calls import Check

KEYS = ApiKeys(bytes(range(32)))
ALL = frozenset({"ip", "subnet", "api_key", "user"})
KIND_SETS = [ALL, frozenset({"ip"}), frozenset({"api_key"}), frozenset({"subnet", "user"})]


class Arrival(NamedTuple):
    """A request with these lines of headers."""

    sent: dict[str, list[str]]
    peer: str | None = "203.0.113.9"
    native: Any = None
    path: str = "/"
    method: str = "GET"
    below: str | None = None

    def header(self, name: str) -> list[str]:
        return self.sent.get(name, [])


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
    Arrival,
    headers,
    st.sampled_from(["203.0.113.9", "10.0.0.1", "2001:db8::1", "x", "1" * 300, None]),
    st.sampled_from(["ada", "bob", None]),
)
settings = st.builds(
    IdentitySettings,
    proxies=st.sampled_from([(), ("10.0.0.0/8",)]),
    api_key_header=st.sampled_from(["x-api-key", "authorization", None]),
    bearer_token=st.booleans(),
)


def told_user(arrival: Arrival) -> Any:
    return arrival.native


@given(settings, st.lists(st.tuples(arrivals, st.sampled_from(KIND_SETS)), min_size=1, max_size=20))
def test_who_was_read_before_does_not_matter(
    settings: IdentitySettings, asked: list[tuple[Arrival, frozenset[str]]]
) -> None:
    known = Identities(settings, KEYS, {"user": told_user})
    for arrival, kinds in asked * 2:
        assert known.read(arrival, kinds) == Identities(settings, KEYS, {"user": told_user}).read(arrival, kinds)


def test_a_line_without_a_key_leaves_it_to_the_next_header() -> None:
    identities = Identities(IdentitySettings(), KEYS)
    for key in ("one", "two", "one"):
        sent = {"x-api-key": ["no key"], "authorization": [f"Bearer {key}"]}
        assert identities.read(Arrival(sent), ALL)["api_key"] == KEYS.hashed(key)


def test_what_functions_say_is_asked_of_each_request() -> None:
    identities = Identities(IdentitySettings(), KEYS, {"user": told_user})
    for user in ("ada", None, "bob"):
        assert identities.read(Arrival({}, native=user), ALL).get("user") == user


def test_clients_that_are_remembered_are_bounded_in_number_and_size() -> None:
    identities = Identities(IdentitySettings(proxies=("10.0.0.0/8",)), KEYS)
    for number in range(5000):
        identities.read(Arrival({"x-api-key": [f"key-{number}"]}), ALL)
    assert len(identities._known) == 4096
    identities = Identities(IdentitySettings(proxies=("10.0.0.0/8",)), KEYS)
    for sent in ({"x-forwarded-for": ["x" * 300]}, {"x-forwarded-for": ["x"] * 300}, {"x-api-key": ["x"] * 300}):
        identities.read(Arrival(sent), ALL)
    identities.read(Arrival({}, peer="1" * 300), ALL)
    assert not identities._known


def test_an_api_key_is_not_kept() -> None:
    identities = Identities(IdentitySettings(), KEYS)
    for sent in ({"x-api-key": ["sk_live_4f9a"]}, {"authorization": ["Bearer sk_live_4f9a"]}):
        identities.read(Arrival(sent), ALL)
    assert len(identities._known) == 2
    assert "sk_live" not in repr(identities._known)


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
def rules() -> Rules:
    policy = read(LIMITS)
    return Rules(Snapshot(policy), Answers(policy.answers), Identities(policy.identity, KEYS))


def check(rules: Rules, user: str, now_us: int) -> Check | None:
    who = {"address": "203.0.113.9", "ip": "203.0.113.9", "user": user}
    return rules.meet(rules.snapshot.route("GET", "/posts"), who, now_us)[1]


@pytest.mark.parametrize("order", [1, -1])
def test_an_override_begins_and_ends_at_its_very_moment(rules: Rules, order: int) -> None:
    instants = [(-1, 10), (0, 20), (1, 20), (HOUR_US - 1, 20), (HOUR_US, 10), (HOUR_US + 1, 10)]
    for after_us, quota in instants[::order]:
        for _ in range(2):
            asked = check(rules, "ada", START_US + after_us)
            assert asked is not None
            assert asked.keys[0].limit.quota == quota


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_ends_at_its_very_moment(rules: Rules, order: int) -> None:
    for after_us, is_blocked in [(-2, True), (-1, True), (0, False), (1, False)][::order]:
        assert (check(rules, "eve", START_US + 2 * HOUR_US + after_us) is None) is is_blocked


def test_routes_and_kinds_are_told_apart() -> None:
    policy = read("limits: [{path: /a, by: user, bucket: 1/s}, {path: /b, by: tenant, bucket: 1/s, missing: skip}]")
    rules = Rules(Snapshot(policy), Answers(policy.answers), Identities(policy.identity, KEYS))
    for path, kind, met in [("/a", "user", 1), ("/b", "user", 0), ("/b", "tenant", 1), ("/a", "tenant", 1)] * 2:
        found, _, _ = rules.meet(rules.snapshot.route("GET", path), {"address": "x", "ip": "x", kind: "acme"}, START_US)
        assert len(found.keys) == met
        assert all((key.parts == ("acme",)) is (kind == found.rules[0].rule.by[0]) for key in found.keys)


def test_after_many_strangers_the_busy_are_known_again() -> None:
    known: Known[int, str] = Known()
    for number in range(MOST_KNOWN):
        assert known.has_room()
        known[number] = "busy"
    assert not any(known.has_room() for _ in range(PATIENCE - 1))
    assert len(known) == MOST_KNOWN
    assert not known.has_room()
    assert known.has_room()
    assert not known


def test_what_they_meet_is_bounded_in_number_and_size(rules: Rules) -> None:
    check(rules, "u" * 1000, START_US)
    assert not rules._period[2]
    for number in range(5000):
        check(rules, f"user-{number}", START_US)
    assert len(rules._period[2]) == 4096


def test_nothing_of_a_period_that_is_over_is_kept(rules: Rules) -> None:
    check(rules, "ada", START_US)
    check(rules, "ada", START_US + HOUR_US)
    assert len(rules._period[2]) == 1
