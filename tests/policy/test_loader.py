"""Policies are read strictly: what is right loads alike in every format, and what is wrong is told by its place.

`corpus/bad` is a corpus of mistakes, each file with the exact messages that it gets beside it.
"""

from __future__ import annotations

import json
import random
import re
import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headgate import Calendar, Limit
from headgate.errors import HeadgateError, InvalidPolicy
from headgate.policy.formats import FORMATS, SUFFIXES
from headgate.policy.formats.document import SourcePosition
from headgate.policy.loader import LARGEST, TOO_LARGE, load, read
from headgate.policy.model import AnswerSettings, Identity, IdentitySettings, Policy, RegionSettings, StoreSettings
from headgate.policy.schema import json_schema
from support.paths import DOCS

if TYPE_CHECKING:
    from collections.abc import Callable


POLICIES = Path(__file__).parent / "corpus"
PAGE = DOCS / "policies.md"

GOOD = sorted(POLICIES.glob("good/*"))
BAD = sorted(file for file in POLICIES.glob("bad/*") if file.suffix != ".expected")

MINUTE = timedelta(minutes=1)


def text_of(file: Path) -> str:
    return file.read_bytes().decode()


def mistakes(text: str, **options: Any) -> list[str]:
    with pytest.raises(InvalidPolicy) as refused:
        read(text, **options)
    return list(refused.value.problems)


def outcome(text: str, **options: Any) -> Policy | tuple[str, ...]:
    try:
        return read(text, **options)
    except InvalidPolicy as refused:
        return refused.problems


# ------------------------------------------------------------------ the corpus


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.name)
def test_every_mistake_gets_its_message(file: Path) -> None:
    expected = file.with_suffix(".expected").read_text("utf-8").splitlines()
    assert mistakes(text_of(file), file=file.name) == expected


def test_no_two_bad_files_share_their_messages() -> None:
    assert len({file.stem for file in BAD}) == len(BAD) >= 60
    assert {file.stem for file in POLICIES.glob("bad/*.expected")} == {file.stem for file in BAD}


def test_messages_show_no_key() -> None:
    for file in POLICIES.glob("bad/*.expected"):
        assert "sk_live" not in file.read_text("utf-8")


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.name)
def test_good_policies_load(file: Path) -> None:
    assert isinstance(load(file), Policy)


def test_policy_is_the_same_in_every_format() -> None:
    first, *others = [load(POLICIES / "good" / f"everything.{suffix}") for suffix in ("yaml", "toml", "json")]
    assert others == [first, first]


# ------------------------------------------------------------------ what policies mean


def test_list_of_limits() -> None:
    policy = load(POLICIES / "good" / "limits-alone.yaml")
    assert [(rule.name, rule.by, [each.text for each in rule.templates], str(rule.limit)) for rule in policy.rules] == [
        ("/api/v1/login by ip", ("ip",), ["/api/v1/login"], "10 per minute, token_bucket"),
        ("/api/v1/login by user", ("user",), ["/api/v1/login"], "5 per minute, token_bucket"),
        ("/api/v1/search by api_key", ("api_key",), ["/api/v1/search"], "1000 per minute, burst 200, token_bucket"),
        ("/api/v1/posts by api_key", ("api_key",), ["/api/v1/posts"], "100 per second, burst 50, token_bucket"),
    ]


def test_calendar_periods() -> None:
    policy = load(POLICIES / "good" / "calendar-periods.yaml")
    exports, *others = policy.rules
    assert (exports.limit, *exports.tiers.values()) == (
        Limit(1000, Calendar("month"), name="exports"),
        Limit(1000, Calendar("month", starts=15, timezone="Europe/Berlin"), name="exports"),
        Limit(50, Calendar("week", starts=7), name="exports"),
    )
    assert [rule.limit for rule in others] == [
        Limit(10_000, Calendar("year", starts="04-01"), name="yearly"),
        Limit(100, Calendar("day", timezone="Asia/Tokyo"), name="daily"),
        Limit(100, timedelta(days=1), name="bucket"),
        Limit(100, Calendar("week"), name="week"),
        Limit(100, timedelta(days=7), name="seven", algorithm="gcra"),
    ]
    (override,) = policy.overrides
    assert override.limit == Limit(5000, Calendar("month", starts=31, timezone="America/New_York"), name="exports")


def test_numbers_by_name_belong_to_the_tier_and_are_exact() -> None:
    policy = load(POLICIES / "good" / "one-tier.yaml")
    (rule,) = policy.rules
    assert (rule.limit, rule.by, policy.default_tier, policy.tiers) == (None, ("client",), "pro", ("pro",))
    assert rule.tiers == {"pro": Limit(1667, timedelta(seconds=100), burst=200, name="default")}


def test_names_of_classes_make_limits_for_them() -> None:
    policy = load(POLICIES / "good" / "by-class.yml")
    assert [(rule.name, rule.classes, str(rule.limit), sorted(rule.tiers)) for rule in policy.rules] == [
        ("search", ("search",), "10 per minute, token_bucket", ["pro"]),
        ("default", (), "100 per minute, token_bucket", []),
        ("export", (), "None", ["enterprise", "pro"]),
    ]


def test_every_section_arrives() -> None:
    policy = load(POLICIES / "good" / "everything.yaml")
    rules = {rule.name: rule for rule in policy.rules}
    assert policy.identity == IdentitySettings(
        ("10.0.0.0/8", "2001:db8::/32", "192.0.2.7/32"), "forwarded", 56, 20, 40, "x-shop-key", False
    )
    assert policy.answers == AnswerSettings(False, True, timedelta(seconds=1.5), "https://example.com/limits")
    assert policy.store == StoreSettings(timedelta(milliseconds=20), Fraction(1, 8), 4, 500, timedelta(milliseconds=50))
    urls = {"eu": "redis://eu.example", "us": "rediss://:${US_PASSWORD}@us.example:6380/0"}
    budget, stay = timedelta(milliseconds=250), ("ip", "device_id")
    assert policy.regions == RegionSettings("${REGION}", "eu", urls, budget, "plain", stay, Fraction(1, 20))
    assert [limit.name for limit in policy.region_limits] == ["tokens"]
    assert (policy.name, policy.default_tier, policy.on_failure) == ("shop", "free", "local")
    assert policy.tiers == ("pro", "free", "enterprise")
    assert [(route.template.text, sorted(route.methods), route.route_class, route.cost) for route in policy.routes] == [
        ("/api/search", ["GET"], "search", 5),
        ("/api/pay", ["POST"], "pay", 1),
        ("/static/*", ["GET"], None, 0),
    ]
    login = rules["login"]
    assert (login.methods, login.missing, login.on_failure) == (frozenset(["POST", "PUT"]), "ip", "closed")
    assert login.count_when is not None
    assert [status for status in range(100, 600) if login.count_when(status)] == list(range(400, 500))
    assert rules["search"].tiers["enterprise"] == Limit(
        1667, timedelta(seconds=100), burst=800, algorithm="gcra", name="search"
    )
    assert (rules["tokens"].cost, rules["tokens"].settled, rules["tokens"].unit) == (500, True, "tokens")
    assert (rules["reports"].unit, rules["all"].by, rules["devices"].shadow) == ("concurrent-requests", (), True)
    assert {name: (rule.lease, rule.split) for name, rule in rules.items() if rule.lease != "auto"} == {
        "all": ("always", 4),
        "devices": ("never", 1),
    }
    assert (rules["search"].lease, rules["search"].split) == ("auto", 1)
    assert [client.identity for client in policy.clients] == [
        Identity("api_key", "sk_live_x"),
        Identity("tenant", "4711"),
        Identity("device_id", "d-1"),
    ]
    assert [block.identity.value for block in policy.blocked] == [
        "203.0.113.0/24",
        "198.51.100.7",
        "hmac:00112233445566778899aabbccddeeff",
    ]
    override = policy.overrides[0]
    assert (override.rule, override.route_class, override.reason) == ("search", "search", "contract 4711")
    assert override.limit == Limit(10000, MINUTE, algorithm="sliding_log", name="search")
    assert override.validity.until == datetime(2096, 5, 28, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("test", "counted"),
    [
        ("status in [401, 403]", {401, 403}),
        ("status not in [1xx, 2xx, 3xx, 4xx]", set(range(500, 600))),
        ("status == 4xx", set(range(400, 500))),
        ("status != 200", set(range(100, 600)) - {200}),
        ("status < 102", {100, 101}),
        ("status<=100", {100}),
        (" status  >  598 ", {599}),
        ("status >= 599", {599}),
    ],
)
def test_count_when_counts_these_answers(test: str, counted: set[int]) -> None:
    (rule,) = read(json.dumps({"limits": [{"bucket": "5/minute", "count_when": test}]}), format="json").rules
    assert rule.count_when is not None
    assert rule.count_when.statuses == counted


def store_of(settings: str) -> StoreSettings:
    return read(f"limits: [{{by: ip, bucket: 5/minute}}]\nstore: {settings}\n").store


def test_policy_that_says_nothing_of_the_store_has_its_settings() -> None:
    assert store_of("{}") == read("limits: [{by: ip, bucket: 5/minute}]").store == StoreSettings()
    assert StoreSettings() == StoreSettings(
        timedelta(milliseconds=5), Fraction(1, 5), 1, 10_000, timedelta(milliseconds=100)
    )


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ("{budget: 1ms}", "budget", timedelta(milliseconds=1)),
        ("{budget: 60 s}", "budget", timedelta(seconds=60)),
        ("{share: 1%}", "share", Fraction(1, 100)),
        ('{share: "100 %"}', "share", 1),
        ("{share: 33.3%}", "share", Fraction(333, 1000)),
        ("{nodes: 100000}", "nodes", 100_000),
        ("{remember: 0}", "remember", 0),
        ("{lease: 1 second}", "lease", timedelta(seconds=1)),
        ("{lease: 0}", "lease", timedelta()),
        ("{lease: off}", "lease", timedelta()),
        ('{lease: "off"}', "lease", timedelta()),
        ("{lease: false}", "lease", timedelta()),
    ],
)
def test_settings_of_the_store_reach_to_their_bounds(settings: str, name: str, value: object) -> None:
    assert getattr(store_of(settings), name) == value


def test_shards_of_a_limit_are_equal() -> None:
    policy = read("""
        limits: [{name: a, by: tenant, bucket: "12/minute, burst 8", split: 4, cost: 2, tiers: {pro: 16/minute}}]
        overrides: [{tenant: acme, limit: a, bucket: 20/minute}]
        """)
    rule, override = policy.rules[0], policy.overrides[0]
    assert (rule.split, [limit.split for limit in (*rule.limits, override.limit)]) == (4, [4, 4, 4])


def test_overrides_and_tiers_count_as_their_limit_does_unless_they_say() -> None:
    policy = read("""
        limits:
          - {name: a, by: tenant, bucket: "5/minute, sliding_log", tiers: {pro: 9/minute, max: "9/minute, gcra"}}
        overrides:
          - {tenant: a, limit: a, bucket: 7/minute}
          - {tenant: b, limit: a, bucket: 7/minute, algorithm: gcra}
          - {tenant: c, limit: a, bucket: "7/minute, fixed_window"}
        """)
    assert {tier: limit.algorithm for tier, limit in policy.rules[0].tiers.items()} == {
        "pro": "sliding_log",
        "max": "gcra",
    }
    assert [override.limit.algorithm for override in policy.overrides] == ["sliding_log", "gcra", "fixed_window"]


def test_class_finds_the_one_limit_that_it_means() -> None:
    policy = read(
        """
        routes: [{path: /search, class: search}, {path: /export, class: export}]
        limits:
          - {name: addresses, path: /search, by: ip, bucket: 5/minute}
          - {name: one, path: "/search", by: tenant, bucket: 5/minute}
          - {name: other, class: export, by: tenant, bucket: 5/minute}
        overrides: [{tenant: acme, class: search, bucket: 7/minute}]
        """
    )
    assert policy.overrides[0].rule == "one"


def test_limit_may_have_its_numbers_with_the_tiers() -> None:
    (rule,) = read("{limits: [{name: a, by: user}], tiers: {pro: {limits: {a: 5/minute}}}}").rules
    assert (rule.by, rule.limit, str(rule.tiers["pro"])) == (("user",), None, "5 per minute, token_bucket")


def test_route_may_be_said_twice_if_it_is_the_same_or_of_other_methods() -> None:
    routes = "[{path: /a}, {path: /a/}, {path: /a, methods: GET, cost: 2}, {path: POST /a, cost: 3}]"
    assert [route.cost for route in read(f"routes: {routes}").routes] == [1, 1, 2, 3]


# ------------------------------------------------------------------ warnings


WARNED = "limit 'keys' is counted by api_key, and no limit by ip, subnet or global applies to all of its routes"


@pytest.mark.parametrize(
    ("limits", "warned"),
    [
        ("[{name: keys, by: api_key, bucket: 5/minute}]", True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, bucket: 9/minute}]", False),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: global, bucket: 9/minute}]", False),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: subnet, bucket: 9/minute, shadow: true}]", True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, path: /a, bucket: 9/minute}]", True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, methods: GET, bucket: 9/minute}]", True),
        ("[{name: keys, path: /a/b, by: api_key, bucket: 5/minute}, {by: ip, path: /a/*, bucket: 9/minute}]", False),
        ("[{name: keys, path: /a/*, by: api_key, bucket: 5/minute}, {by: ip, path: /a/b, bucket: 9/minute}]", True),
        ("[{name: keys, class: one, by: api_key, bucket: 5/minute}, {by: ip, class: one, bucket: 9/minute}]", False),
        ("[{name: keys, class: one, by: api_key, bucket: 5/minute}, {by: ip, path: /one, bucket: 9/minute}]", False),
        ("[{name: keys, class: one, by: api_key, bucket: 5/minute}, {by: ip, path: /two, bucket: 9/minute}]", True),
        ("[{name: keys, by: [api_key, ip], bucket: 5/minute}]", True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: [ip, endpoint], bucket: 9/minute}]", False),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: [ip, api_key], bucket: 9/minute, shadow: true}]", True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, bucket: 9/minute, count_when: status == 401}]", True),
        ('[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, bucket: "9/minute, concurrency"}]', True),
        ("[{name: keys, by: api_key, bucket: 5/minute}, {by: ip, tiers: {pro: 9/minute}}]", True),
    ],
)
def test_limits_that_another_key_escapes_are_warned_of(limits: str, warned: bool) -> None:
    policy = read(f"limits: {limits}\nroutes: [{{path: /one, class: one}}]\n")
    assert [warning.startswith(f"policy.yaml:1:10: {WARNED}") for warning in policy.warnings] == [True] * warned


@pytest.mark.parametrize(
    ("written", "factor", "warned"),
    [
        ("", 10, "also count by address, at 10 times its numbers"),
        ("identity: {api_key: {unknown_factor: 3}}", 3, "also count by address, at 3 times its numbers"),
        (
            "identity: {api_key: {unknown_factor: off}}",
            None,
            "a client that sends a new key with each request is",
        ),
    ],
)
def test_factor_for_unknown_keys_can_be_set_and_turned_off(written: str, factor: int | None, warned: str) -> None:
    policy = read(f"{written}\nlimits: {{default: 5/minute}}")
    assert policy.identity.unknown_key_factor == factor
    assert len(policy.warnings) == 1
    assert warned in policy.warnings[0]


@pytest.mark.parametrize("written", ["0", "1001", "-1", "1.5", "true", "ten", "[10]", "null"])
def test_other_factors_are_refused(written: str) -> None:
    with pytest.raises(InvalidPolicy, match="a whole number from 1 to 1,000, like 10, or off"):
        read(f"identity: {{api_key: {{unknown_factor: {written}}}}}\nlimits: {{default: 5/minute}}")


@pytest.mark.parametrize("written", ["7", "'11'", "true", "11.0"])
def test_drafts_that_are_not_supported_are_refused(written: str) -> None:
    assert read("answers: {draft: 6}\nlimits: [{by: ip, bucket: 5/minute}]").answers.draft == 6
    with pytest.raises(InvalidPolicy, match="write a draft that is supported: 11, or 6 for separate fields"):
        read(f"answers: {{draft: {written}}}\nlimits: [{{by: ip, bucket: 5/minute}}]")


def test_networks_behind_nat64_are_networks_of_ipv4() -> None:
    text = "limits: [{{by: ip, bucket: 5/minute}}]\nblocked: [{{ip: {}}}]"
    named = {"64:ff9b::203.0.113.9": "203.0.113.9", '"64:ff9b::cb00:7100/120"': "203.0.113.0/24"}
    for written, found in named.items():
        assert read(text.format(written)).blocked[0].identity.value == found
    with pytest.raises(InvalidPolicy, match="64:ff9b::/96 is every IPv4 address behind NAT64"):
        read(text.format('"64:ff9b::/96"'))
    proxies = read("limits: [{by: ip, bucket: 5/minute}]\nidentity: {proxies: ['64:ff9b::/96']}").identity.proxies
    assert proxies == ("64:ff9b::/96",)


def test_names_of_safety_nets_are_reserved() -> None:
    with pytest.raises(InvalidPolicy, match=r"names that end in '\(unknown keys\)' are reserved"):
        read("limits: {default (unknown keys): 5/minute}")


KNOWN = "identity: {api_key: {known_only: true}}\nlimits: [{name: keys, by: api_key, bucket: 5/minute}]\n"


@pytest.mark.parametrize(
    "named", ["clients: [{api_key: k}]", "overrides: [{api_key: k, limit: keys, bucket: 9/minute}]"]
)
def test_where_only_known_keys_count_no_other_key_escapes(named: str) -> None:
    policy = read(KNOWN + named)
    assert policy.identity.known_keys_only
    assert policy.warnings == ()


@pytest.mark.parametrize("named", ["", "clients: [{tenant: acme}]", "blocked: [{api_key: k}]"])
def test_that_no_key_is_known_is_warned_of(named: str) -> None:
    (warning,) = read(KNOWN + named).warnings
    assert warning.startswith("policy.yaml:1:34: only API keys that are known count, and neither clients nor overrides")


def test_what_has_ended_is_warned_of_where_it_stands() -> None:
    policy = load(POLICIES / "good" / "blocks-alone.json")
    file = POLICIES / "good" / "blocks-alone.json"
    assert policy.warnings == (
        f"{file}:1:51: it ended 2020-01-01T00:00:00+00:00 and no longer applies; remove the entry",
    )


@pytest.mark.parametrize(
    ("policy", "warned"),
    [
        ("limits: [{name: a, by: [ip, endpoint], bucket: 5/minute}]", True),
        ("limits: [{name: a, by: [ip, endpoint], bucket: 5/minute}]\nroutes: [{path: /users, cost: 2}]", False),
        ("limits: [{name: a, by: [ip, endpoint], path: /users/*, bucket: 5/minute}]", False),
        ("limits: [{name: a, by: ip, bucket: 5/minute}]", False),
    ],
)
def test_unused_endpoint_kind_is_warned_of(policy: str, warned: bool) -> None:
    begins = "policy.yaml:1:10: limit 'a' is counted by endpoint, but the policy names no paths"
    assert [warning.startswith(begins) for warning in read(policy).warnings] == [True] * warned


def test_queue_without_waiting_is_warned_of() -> None:
    (warning,) = read("limits: [{name: mails, by: ip, bucket: '5/minute, leaky_bucket'}]").warnings
    assert warning.startswith("policy.yaml:1:10: limit 'mails' is a leaky_bucket, which assigns each request a delay")
    assert read("limits: [{name: mails, by: ip, bucket: '5/minute, gcra'}]").warnings == ()


def test_list_of_no_limits_is_warned_of() -> None:
    (warning,) = read("limits: []").warnings
    assert warning.startswith("policy.yaml:1:9: there are no limits, so nothing is counted")
    assert read("blocked: [{ip: 203.0.113.9}]").warnings == ()


@pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0"])
def test_block_of_all_addresses_is_warned_of(network: str) -> None:
    (warning,) = read(f"blocked: [{{user: mallory}}, {{ip: '{network}'}}]").warnings
    assert (
        warning
        == f"policy.yaml:1:28: {network} matches every address: all requests are rejected, except to routes of cost 0"
    )


@pytest.mark.parametrize("network", ["fd00::/8", "fc00::/7", "fd12:3456::/32", "10.0.0.0/8", "2001::/16"])
def test_proxies_may_be_a_whole_private_network(network: str) -> None:
    policy = read(f"{{identity: {{proxies: ['{network}']}}, limits: [{{by: ip, bucket: 5/minute}}]}}")
    assert policy.identity.proxies == (network,)


@pytest.mark.parametrize("network", ["fc00::/6", "fe00::/9", "2000::/3"])
def test_proxies_may_not_have_more_than_that(network: str) -> None:
    with pytest.raises(InvalidPolicy, match="would let clients choose their address"):
        read(f"{{identity: {{proxies: ['{network}']}}, limits: [{{by: ip, bucket: 5/minute}}]}}")


def test_identity_that_looks_misspelled_is_warned_of() -> None:
    assert read("limits: [{by: tennant, bucket: 5/minute}]").warnings == (
        "policy.yaml:1:15: 'tennant' is an identity that the app has to supply; did you mean 'tenant'?",
    )


def test_limit_that_never_counts_is_warned_of() -> None:
    assert read("limits: [{name: searches, by: ip, bucket: 5/minute, cost: 0}]").warnings == (
        (
            "policy.yaml:1:59: limit 'searches' never counts anything, as its cost is 0; leave cost out, or leave out "
            "the limit. To exempt a route from all limits, write its cost under routes"
        ),
    )


def test_tier_that_no_limit_has_numbers_for_is_warned_of() -> None:
    (warning,) = read("{tier: gold, limits: [{by: ip, bucket: 5/minute}]}").warnings
    assert warning.startswith("policy.yaml:1:8: tier 'gold' changes nothing, as no limit has numbers for any tier;")
    assert read("{tier: free, limits: [{by: ip, bucket: 5/minute, tiers: {pro: 9/minute}}]}").warnings == ()


# ------------------------------------------------------------------ files


def test_thousand_limits_and_a_hundred_thousand_overrides_fit() -> None:
    limit = {"name": "limit-1000", "path": "/api/v1/resources-1000/{id}", "by": "tenant", "bucket": "1000/minute"}
    override = {
        "tenant": "tenant-100000",
        "limit": "limit-1000",
        "bucket": "100000/minute",
        "valid_from": "2026-05-28T02:01:00Z",
        "valid_until": "2026-05-28T02:01:00Z",
        "reason": "contract 100000, signed by sales",
    }
    assert 1_000 * len(json.dumps(limit)) + 100_000 * (len(json.dumps(override)) + 2) < LARGEST


def test_unreadable_files_are_policy_problems(tmp_path: Path) -> None:
    missing, binary, large = tmp_path / "missing.yaml", tmp_path / "binary.yaml", tmp_path / "large.json"
    binary.write_bytes(b"name: \xff\n")
    with large.open("wb") as file:
        file.truncate(33 * 1024 * 1024)
    for path, message in [
        (missing, "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "not UTF-8 at byte 6; save the file as UTF-8"),
        (large, TOO_LARGE),
    ]:
        with pytest.raises(InvalidPolicy, match=f"^{re.escape(f'{path}: {message}')}$"):
            load(path)


def test_format_is_the_suffix_or_what_the_caller_says() -> None:
    text = '{"limits": [{"by": "ip", "bucket": "5/minute"}]}'
    assert read(text, file="policy.JSON") == read(text, file="policy", format="json") == read(text)
    assert mistakes(text, file="policy") == [
        "policy: cannot tell its format; name the file .yaml, .yml, .toml or .json, or say format="
    ]


def test_without_pyyaml_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "headgate.policy.formats.from_yaml", None)
    monkeypatch.delattr("headgate.policy.formats.from_yaml", raising=False)
    assert mistakes("name: a") == [
        "policy.yaml: reading YAML requires PyYAML: pip install 'headgate[yaml]'; or use JSON or TOML"
    ]


# ------------------------------------------------------------------ whatever is written

LINES = sorted({line for file in (*GOOD, *BAD) for line in text_of(file).splitlines() if len(line) < 200})

texts = st.one_of(
    st.text(),
    st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    st.lists(st.sampled_from(LINES), max_size=12).map("\n".join),
    st.tuples(st.sampled_from([text_of(file) for file in GOOD]), st.integers(0, 3000), st.text(max_size=5)).map(
        lambda edit: edit[0][: edit[1]] + edit[2] + edit[0][edit[1] + len(edit[2]) :]
    ),
)


@given(texts, st.sampled_from(sorted(FORMATS)))
def test_whatever_is_written_loads_or_is_refused_with_a_place(text: str, format: str) -> None:
    told = outcome(text, file="f", format=format)
    assert isinstance(told, Policy) or told
    assert isinstance(told, Policy) or all(re.match(r"f(:\d+:\d+)?: \S", problem) for problem in told)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals(allow_nan=False, allow_infinity=False).map(float)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["limits", "by", "bucket", "x"]), inner)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(list(json_schema()["properties"])), json_values), st.booleans())
def test_values_of_every_type_in_every_section_are_refused_properly(value: dict[str, Any], indent: bool) -> None:
    told = outcome(json.dumps(value, indent=2 if indent else None), format="json")
    assert isinstance(told, Policy) or told


def paths(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, child in children for each in paths(child, (*path, key)))]


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.name)
def test_every_value_has_its_place(file: Path) -> None:
    """Where a place is said to be, there stands the key, or the value in the format's own words."""
    text = text_of(file)
    document = FORMATS[SUFFIXES[file.suffix]](text)
    spots = {SourcePosition(path, at_key) for path in paths(document.value)[1:] for at_key in (True, False)}
    places = document.places(spots)
    lines = text.splitlines()
    for spot in spots:
        if spot.at_key and isinstance(spot.path[-1], int):
            continue
        rest = lines[places[spot].line - 1][places[spot].column - 1 :]
        value: Any = document.value
        for step in spot.path:
            value = value[step]
        if spot.at_key:
            assert re.match(rf"""\[*["']?(\w+\.)*{spot.path[-1]}\b""", rest), (spot, rest)
        elif isinstance(value, str):
            assert rest.lstrip("\"'").startswith(value), (spot, rest)
        elif type(value) in (int, bool, Decimal):
            assert rest.replace("_", "").startswith(json.dumps(value, default=str).strip('"')), (spot, rest)


# ------------------------------------------------------------------ the schema


def plain(value: object) -> Any:
    """As an editor sees it: JSON's own types."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Decimal):
        return float(value)
    return value.isoformat() if isinstance(value, date) else value


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.name)
def test_good_policies_pass_the_schema(file: Path) -> None:
    value = plain(FORMATS[SUFFIXES[file.suffix]](text_of(file)).value)
    Draft202012Validator.check_schema(json_schema())
    Draft202012Validator(json_schema()).validate(value)


IN_FORM = (
    "answers",
    "identity-settings",
    "names",
    "routes",
    "store",
    "unknown-fields",
    "words",
    "wrong-types",
    "wrong-types-of-entries",
)


@pytest.mark.parametrize("name", IN_FORM)
def test_mistakes_in_form_fail_the_schema(name: str) -> None:
    value = plain(FORMATS["yaml"](text_of(POLICIES / "bad" / f"{name}.yaml")).value)
    schema = json_schema()
    for section in value:
        alone = {**schema, "properties": {section: schema["properties"].get(section, False)}}
        assert not Draft202012Validator(alone).is_valid({section: value[section]}) or section == "limits", section
    assert not Draft202012Validator(schema).is_valid(value)


def test_schema_describes_every_field() -> None:
    def described(schema: dict[str, Any]) -> bool:
        fields = schema.get("properties", {}).values()
        inner = [*fields, *schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
        return all("description" in each for each in fields) and all(
            described(each) for each in inner if isinstance(each, dict)
        )

    assert described(json_schema())


# ------------------------------------------------------------------ size and docs


def test_hundred_thousand_overrides_load_in_seconds() -> None:
    """Far more than a good machine needs: the bound tells linear from quadratic, not fast from slow."""
    numbers = random.Random(1)
    value = {
        "routes": [{"path": f"/r{i}/{{id}}", "class": f"c{i}", "cost": 1 + i % 5} for i in range(1000)],
        "limits": [
            {"name": f"l{i}", "class": f"c{i}", "by": "tenant", "bucket": f"{i + 9}/minute"} for i in range(1000)
        ],
        "overrides": [
            {"tenant": f"t{i}", "limit": f"l{i % 1000}", "bucket": f"{numbers.randrange(1000, 1100)}/minute"}
            for i in range(100_000)
        ],
    }
    text = json.dumps(value)
    started = time.process_time()
    assert len(read(text, format="json").overrides) == 100_000
    for override in value["overrides"]:
        override["limit"] = "nobody"
    assert len(mistakes(json.dumps(value), format="json")) == 51
    assert time.process_time() - started < 30


def test_docs_name_every_field() -> None:
    page = PAGE.read_text("utf-8")
    for section, form in json_schema()["properties"].items():
        assert f"`{section}`" in page
        for each in [form, form.get("items", {}), *form.get("anyOf", ())]:
            inner = {**each.get("properties", {}), **each.get("items", {}).get("properties", {})}
            assert not [name for name in inner if f"`{name}`" not in page and f"{name}:" not in page], section


MEGABYTE = 2**20


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, which do not depend on what else the machine is doing."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("yaml", "limits: " + "9" * MEGABYTE + "x"),
        ("yaml", "limits: " + "1:" * MEGABYTE + "x"),
        ("yaml", "limits: " + "1_" * MEGABYTE + ".x"),
        ("yaml", "limits: " + "[" * MEGABYTE),
        ("yaml", "limits: [{by: ip, bucket: " + "9" * MEGABYTE + "/minute}]"),
        ("yaml", "limits: [{by: ip, bucket: 5/minute" + " " * MEGABYTE + "x}]"),
        ("json", '{"limits": ' + "9" * MEGABYTE + "}"),
        ("json", '{"limits": ' * MEGABYTE),
        ("toml", "limits = " + "9" * MEGABYTE),
        ("toml", "limits = " + "[" * MEGABYTE),
    ],
    ids=lambda value: value[:4] + value[-12:],
)
def test_pathological_policy_text_is_rejected_fast(format: str, text: str) -> None:
    """It is read beside the requests, and a pattern that goes back and forth would stop them all."""

    def refuse() -> None:
        with pytest.raises(HeadgateError):
            read(text, format=format)

    assert timed(refuse) < 5
