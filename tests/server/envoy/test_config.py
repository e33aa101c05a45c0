"""Configuration files of envoyproxy/ratelimit."""

from __future__ import annotations

import pytest

from headgate.server.envoy.config import ConfigError, DescriptorRule, limit_name, load

MISMATCH = "error loading config file: yaml: unmarshal errors:\n  "
LIMIT_ERROR = "config error, rate_limit at line 2, column 36: "

BASIC = """
domain: shop
descriptors:
  - key: user
    rate_limit: {unit: MINUTE, requests_per_unit: 10}
    descriptors:
      - key: path
        value: /a
        rate_limit: {unit: hour, requests_per_unit: 5, name: slow, replaces: [{name: fast}]}
  - key: port
    value: 8080
    shadow_mode: yes
    rate_limit: {unit: day, requests_per_unit: 1_000}
"""


def rules(text: str) -> dict[str, DescriptorRule]:
    return {rule.full_key: rule for rule in load([("test.yaml", text)]).rules()}


def test_a_file_becomes_rules_with_their_full_keys() -> None:
    found = rules(BASIC)
    assert list(found) == ["shop.user", "shop.user.path_/a", "shop.port_8080"]
    assert (found["shop.user"].requests_per_unit, found["shop.user"].unit) == (10, 2)
    assert found["shop.user.path_/a"].replaces == ("fast",)
    assert found["shop.port_8080"].shadow_mode
    assert found["shop.port_8080"].requests_per_unit == 1000
    assert str(found["shop.user"].limit) == "10 per minute, fixed_window"


def test_describe_lists_a_rule_per_line() -> None:
    assert load([("test.yaml", BASIC)]).describe().splitlines()[0] == (
        "shop.user: unit=MINUTE requests_per_unit=10, shadow_mode: false, quota_mode: false"
    )


def test_algorithms_bursts_and_windows_go_beyond_the_original_format() -> None:
    found = rules(
        "domain: d\ndescriptors:\n"
        "  - {key: a, rate_limit: {unit: second, requests_per_unit: 5, algorithm: token_bucket, burst: 20}}\n"
        "  - {key: b, rate_limit: {window: 90 seconds, requests_per_unit: 5, algorithm: sliding_log}}\n"
    )
    assert str(found["d.a"].limit) == "5 per second, burst 20, token_bucket"
    assert str(found["d.b"].limit) == "5 per 90 seconds, sliding_log"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config file cannot have empty domain"),
        ("domain: ''", "config file cannot have empty domain"),
        ("domain: d\nfoo: 1", "config error, unknown key 'foo'"),
        ("domain: d\nyes: 1", "config error, key is not of type string: true"),
        ("domain: d\ndescriptors: [a]", "config error, yaml file contains list of type other than map: a"),
        ("domain: d\ndescriptors: [[a, ~]]", "config error, yaml file contains list of type other than map: [a <nil>]"),
        ("domain: 1.5", "error checking config"),
        ("domain: d\ndescriptors: [{value: x}]", "descriptor has empty key"),
        (
            "domain: d\ndescriptors: [{key: a, value: b}, {key: a, value: b}]",
            "duplicate descriptor composite key 'd.a_b'",
        ),
        (
            "domain: d\ndescriptors: [{key: a, descriptors: [{key: b}, {key: b}]}]",
            "duplicate descriptor composite key 'd.a.b'",
        ),
        ("domain: d\ndescriptors: [{key: a, rate_limit: {unit: eon}}]", "invalid rate limit unit 'eon'"),
        ("domain: d\ndescriptors: [{key: a, rate_limit: {}}]", "invalid rate limit unit ''"),
        ("domain: d\ndescriptors: [{key: a, rate_limit: {unit: unknown}}]", "invalid rate limit unit 'unknown'"),
        (
            "domain: d\ndescriptors: [{key: a, rate_limit: {unlimited: true, unit: day}}]",
            "should not specify rate limit unit when unlimited",
        ),
        (
            "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, replaces: [{name: ''}]}}]",
            "should not have an empty replaces entry",
        ),
        (
            "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, name: x, replaces: [{name: x}]}}]",
            "replaces should not contain name of same descriptor",
        ),
        (
            "domain: d\ndescriptors: [{key: a, value: b, share_threshold: true}]",
            "share_threshold can only be used with wildcard values (containing '*'), but found key 'a_b'",
        ),
        (
            "domain: d\ndescriptors:\n  - key: a\n    unit: minute",
            "config error, misplaced key 'unit' at line 4, column 5: it belongs below rate_limit",
        ),
        (
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit: {shadow_mode: true, unit: day}",
            "config error, misplaced key 'shadow_mode' at line 4, column 18: it belongs in an entry of descriptors",
        ),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day, requests_per_unit: lots}",
            f"{MISMATCH}line 4: cannot unmarshal !!str `lots` into uint32",
        ),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day, requests_per_unit: 4294967296}",
            f"{MISMATCH}line 4: cannot unmarshal !!int `4294967296` into uint32",
        ),
        (
            "domain: d\ndescriptors: nothing-of-that",
            f"{MISMATCH}line 2: cannot unmarshal !!str `nothing...` into []config.YamlDescriptor",
        ),
        (
            "domain: [a]\ndescriptors: [{key: a, shadow_mode: 5}]",
            "config error, yaml file contains list of type other than map: a",
        ),
        (
            "domain: d\ndescriptors:\n- key: a\n  shadow_mode: 1\n  rate_limit: {requests_per_unit: lots}",
            MISMATCH
            + "line 4: cannot unmarshal !!int `1` into bool\n  line 5: cannot unmarshal !!str `lots` into uint32",
        ),
        ("domain: .inf", "error checking config"),
        ("1.0: a", "config error, key is not of type string: 1"),
        ("1e+300: a", "config error, key is not of type string: 1e+300"),
        ("domain: *d", "error loading config file: yaml: unknown anchor 'd' referenced"),
        ("domain: \a", "error loading config file: yaml: control characters are not allowed"),
        (
            "- a",
            MISMATCH + "line 1: cannot unmarshal !!seq into map[interface {}]interface {}",
        ),
        (
            "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1, algorithm: concurrency}}]",
            f"{LIMIT_ERROR}Envoy does not report when a request ends, so concurrency cannot be limited",
        ),
        (
            "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, window: 1 hour, requests_per_unit: 1}}]",
            f"{LIMIT_ERROR}give either unit or window",
        ),
    ],
)
def test_an_invalid_file_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([("test.yaml", text)])
    assert str(caught.value) == f"test.yaml: {message}"


def test_a_domain_is_in_one_file_unless_files_are_merged() -> None:
    files = [("a.yaml", "domain: d\ndescriptors: [{key: a}]"), ("b.yaml", "domain: d\ndescriptors: [{key: b}]")]
    with pytest.raises(ConfigError, match=r"^b.yaml: duplicate domain 'd' in config file$"):
        load(files)
    assert [key for key, _ in load(files, merge_domains=True).domains["d"].root.children] == ["a", "b"]
    files[1] = files[1][0], files[0][1]
    with pytest.raises(ConfigError, match=r"^b.yaml: duplicate descriptor composite key 'd.a'$"):
        load(files, merge_domains=True)


def test_a_file_that_cannot_be_read_is_reported_before_one_with_invalid_rules() -> None:
    with pytest.raises(ConfigError, match=r"^b.yaml: config error, unknown key 'foo'$"):
        load([("a.yaml", "domain: ''"), ("b.yaml", "foo: 1")])


@pytest.mark.parametrize(
    ("pattern", "value", "matches"),
    [
        ("a*", "abc", True),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("*", "", True),
        ("a*c", "abc", True),
        ("ab*bc", "abc", False),
        ("*b*", "abc", True),
        ("a.c*", "abc", False),
        ("a*\nb", "a\nb", True),
    ],
)
def test_asterisks_stand_for_any_characters(pattern: str, value: str, matches: bool) -> None:
    text = f"domain: d\ndescriptors: [{{key: k, value: {pattern!r}}}]".replace("\\n", "\n\n")
    child, by_pattern = load([("test.yaml", text)]).domains["d"].root.find("k", value)
    assert (child is not None, by_pattern) == (matches, matches)


def test_a_match_is_exact_then_by_pattern_in_file_order_then_by_key() -> None:
    text = "domain: d\ndescriptors: [{key: k}, {key: k, value: a*}, {key: k, value: ab*}, {key: k, value: abc}]"
    root = load([("test.yaml", text)]).domains["d"].root
    assert [root.find("k", value)[0].value for value in ("abc", "abd", "x", "")] == [  # type: ignore[union-attr]
        "abc",
        "a*",
        None,
        None,
    ]
    assert root.find("other", "a") == (None, False)


def test_key_and_value_are_kept_apart() -> None:
    root = load([("test.yaml", "domain: d\ndescriptors: [{key: a_b}, {key: a, value: b}]")]).domains["d"].root
    assert root.find("a", "b")[0].label == "a_b"  # type: ignore[union-attr]
    assert root.find("a", "b")[0] is not root.find("a_b", "x")[0]
    assert root.find("a", "c")[0] is None


def test_names_of_limits_are_printable_short_and_distinct() -> None:
    names = [limit_name(key) for key in ("shop.user", "shop.\u00e9", "shop.\\xe9", "x" * 200, "x" * 199 + "y")]
    assert names[0] == "shop.user"
    assert len(set(names)) == 5
    assert all(len(name) <= 100 and name.isascii() and name.isprintable() for name in names)


TIERS = """
domain: shop
clients: {acme: pro, 8080: free}
descriptors:
  - key: tenant
    rate_limit:
      unit: minute
      requests_per_unit: 10
      tiers:
        pro: {requests_per_unit: 100}
        free: {requests_per_unit: 2}
      overrides:
        globex: {requests_per_unit: 500}
        internal: {unlimited: true}
"""


def test_tiers_and_overrides_change_the_numbers_of_a_rule() -> None:
    configuration = load([("test.yaml", TIERS)])
    (rule,) = configuration.rules()
    clients = configuration.domains["shop"].clients
    found = {value: rule.for_value(value, clients) for value in ("acme", "8080", "globex", "internal", "other")}
    numbers = {value: (each.requests_per_unit, each.unlimited, each.origin) for value, each in found.items()}
    assert numbers == {
        "acme": (100, False, "tier"),
        "8080": (2, False, "tier"),
        "globex": (500, False, "override"),
        "internal": (0, True, "override"),
        "other": (10, False, ""),
    }
    assert {each.limit.space for each in found.values() if each.limit is not None} == {rule.limit and rule.limit.space}


LIMIT = "{key: a, rate_limit: {unit: minute, requests_per_unit: 10, "
VARIANT = "the limits of overrides accept requests_per_unit, burst, unlimited"
IMPOSSIBLE = "the most that can be left, so that no request would ever pass; lower cost, or raise the limit"


@pytest.mark.parametrize(
    ("top", "descriptor", "message"),
    [
        ("", LIMIT + "cost: @0}}", "cost 0 at @: give at least 1, or use unlimited: true"),
        (
            "",
            "{key: a, rate_limit: @{unit: minute, requests_per_unit: 10, cost: 11}}",
            f"rate_limit at @: cost 11 exceeds 10, {IMPOSSIBLE}",
        ),
        ("", "{key: a, @cost: 5}", "misplaced key 'cost' at @: it belongs below rate_limit"),
        ("@tiers: {}", "{key: a}", "misplaced key 'tiers' at @: it belongs below rate_limit"),
        ("", "{key: a, @clients: {}}", "misplaced key 'clients' at @: it belongs at the top level"),
        ("", LIMIT + "tiers: @5}}", "tiers at @: give a mapping from names to limits"),
        ("", LIMIT + "tiers: {p: @5}}}", "'p' in tiers at @: give a limit, such as {requests_per_unit: 100}"),
        (
            "",
            LIMIT + "overrides: {x: @{}}}}",
            "'x' in overrides at @: give either requests_per_unit or unlimited: true",
        ),
        ("", LIMIT + "overrides: {x: {@unit: hour}}}}", f"misplaced key 'unit' at @: {VARIANT}"),
        ("", LIMIT + "overrides: {x: {@rate: 5}}}}", "unknown key 'rate'"),
        (
            "",
            LIMIT + "overrides: {x: @{requests_per_unit: 5, burst: 9}}}}",
            "rate_limit at @: burst 9 means nothing",
        ),
        (
            "clients: {x: @gold}",
            "{key: a}",
            "unknown tier 'gold' of client 'x' at @: add it below tiers of a rate_limit",
        ),
        (
            "clients: {x: @gold}",
            LIMIT + "tiers: {pro: {requests_per_unit: 5}}}}",
            "unknown tier 'gold' of client 'x' at @: use one of pro",
        ),
        (
            "",
            "{key: a, value: x*, share_threshold: true, rate_limit: @{unit: day, overrides: {x1: {unlimited: true}}}}",
            "overrides of the rate_limit at @: values that share a counter by share_threshold have the same limit",
        ),
    ],
)
def test_mistakes_in_costs_tiers_and_overrides_are_located(top: str, descriptor: str, message: str) -> None:
    text = f"domain: d\n{top}\ndescriptors:\n  - {descriptor}"
    before = text[: text.index("@")]  # the marked place
    place = f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
    with pytest.raises(ConfigError) as raised:
        load([("test.yaml", text.replace("@", ""))])
    assert str(raised.value).startswith(f"test.yaml: config error, {message.replace('@', place)}")


def test_tiers_of_a_client_in_several_files_must_agree() -> None:
    files = [("a.yaml", TIERS), ("b.yaml", "domain: shop\nclients: {acme: free}")]
    with pytest.raises(ConfigError, match=r"^b.yaml: .* line 2, column 17: another file has tier 'pro'$"):
        load(files, merge_domains=True)
    load([("a.yaml", TIERS), ("b.yaml", "domain: shop\nclients: {initech: free}")], merge_domains=True)


def test_keys_of_metadata_are_those_of_the_original() -> None:
    found = rules(
        "domain: d\ndescriptors:\n"
        "- {key: a, rate_limit: {unit: day}, metadata: {010: x, n: {1: x, no: z, ~: [{2.50: v}]}}}"
    )
    assert found["d.a"].metadata == {"010": "x", "n": {"1": "x", "false": "z", "<nil>": [{"2.5": "v"}]}}


def test_a_merged_limit_is_changed_in_part_like_in_the_original() -> None:
    found = rules(
        "domain: d\ndescriptors:\n"
        "- &base {key: a, rate_limit: {unit: hour, requests_per_unit: 5, name: n}, metadata: {x: {p: 1}, z: 1}}\n"
        "- {<<: *base, key: b, rate_limit: {requests_per_unit: 9}, metadata: {x: {q: 2}}}\n"
        "- {<<: *base, key: c, rate_limit: , metadata: }\n"
    )
    assert list(found) == ["d.a", "d.b"]
    assert (found["d.b"].unit, found["d.b"].requests_per_unit, found["d.b"].name) == (3, 9, "n")
    assert found["d.b"].metadata == {"x": {"q": 2}, "z": 1}
    assert (found["d.a"].requests_per_unit, found["d.a"].metadata) == (5, {"x": {"p": 1}, "z": 1})
