"""Envoy's rate limit service, on memory and on Redis."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import AsyncLimiter, Limiter
from headgate.server.envoy import AsyncRateLimitService, ConfigError, RateLimitService, ServiceError
from headgate.testing import FakeClock
from support.envoy import UpstreamModel, rate_limit_request

if TYPE_CHECKING:
    from support.envoy import Entries

OK, OVER = 1, 2
NOON_US = 1_700_000_000_500_000
PREFIX = "ratelimit.service.rate_limit."


def service(*descriptors: str, clock: FakeClock | None = None, domain: str = "d", **env: str) -> RateLimitService:
    text = f"{domain if ':' in domain else f'domain: {domain}'}\ndescriptors: [{', '.join(descriptors)}]"
    return RateLimitService.from_texts([("test.yaml", text)], Limiter(clock=clock or FakeClock(NOON_US)), env=env)


def nested(key: str, child: str, more: str = "") -> str:
    return f"{{key: {key}, {more} descriptors: [{child}]}}"


def rule(key: str, limit: int, unit: str = "minute", more: str = "", limit_more: str = "") -> str:
    return f"{{key: {key}, {more} rate_limit: {{unit: {unit}, requests_per_unit: {limit} {limit_more}}}}}"


def ask(subject: RateLimitService, *descriptors: Entries, hits: int = 0, domain: str = "d") -> Any:
    return subject.should_rate_limit(rate_limit_request(domain, *descriptors, hits=hits))


def codes(response: Any) -> list[int]:
    return [response.overall_code, *[status.code for status in response.statuses]]


def remaining(response: Any) -> list[int]:
    return [status.limit_remaining for status in response.statuses]


def test_a_limit_allows_its_number_per_window() -> None:
    clock = FakeClock(NOON_US)
    subject = service(rule("user", 2), clock=clock)
    answers = [ask(subject, [("user", "ada")]) for _ in range(3)]
    assert [codes(each) for each in answers] == [[OK, OK], [OK, OK], [OVER, OVER]]
    assert [remaining(each) for each in answers] == [[1], [0], [0]]
    status = answers[0].statuses[0]
    assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (2, 2)
    assert status.duration_until_reset.seconds == 40
    assert codes(ask(subject, [("user", "bob")])) == [OK, OK]
    clock.advance(40)
    assert codes(ask(subject, [("user", "ada")])) == [OK, OK]


def test_a_rejected_request_charges_nothing() -> None:
    subject = service(rule("user", 10), rule("path", 1))
    assert codes(ask(subject, [("user", "ada")], [("path", "/")])) == [OK, OK, OK]
    denied = ask(subject, [("user", "ada")], [("path", "/")])
    assert (codes(denied), remaining(denied)) == ([OVER, OK, OVER], [9, 0])
    assert remaining(ask(subject, [("user", "ada")])) == [8]


def test_charge_refused_counts_rejected_requests_like_the_original() -> None:
    subject = service(rule("user", 10), rule("path", 1), domain="domain: d\ncharge_refused: true")
    for left in (9, 8, 7):
        assert remaining(ask(subject, [("user", "ada")], [("path", "/")]))[0] == left
    assert codes(ask(subject, [("user", "ada")], hits=20)) == [OVER, OVER]
    assert codes(ask(subject, [("user", "ada")])) == [OVER, OVER]


def test_charge_refused_can_stop_when_a_limit_is_exceeded() -> None:
    subject = service(
        rule("user", 10),
        rule("path", 1),
        domain="domain: d\ncharge_refused: true",
        STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT="true",
    )
    answers = [ask(subject, [("user", "ada")], [("path", "/")]) for _ in range(3)]
    assert [remaining(each) for each in answers] == [[9, 0], [9, 0], [9, 0]]
    assert [codes(each) for each in answers] == [[OK, OK, OK], [OVER, OK, OVER], [OVER, OK, OVER]]


def test_hits_of_request_and_descriptor() -> None:
    subject = service(rule("user", 10))
    assert remaining(ask(subject, [("user", "ada")], hits=3)) == [7]
    request = rate_limit_request("d", [("user", "ada")], hits=3)
    request.descriptors[0].hits_addend.value = 5
    assert remaining(subject.should_rate_limit(request)) == [2]
    request.descriptors[0].hits_addend.value = 0
    assert remaining(subject.should_rate_limit(request)) == [2]
    assert codes(ask(subject, [("user", "ada")], hits=3)) == [OVER, OVER]
    assert remaining(ask(subject, [("user", "ada")], hits=2)) == [0]
    request.descriptors[0].hits_addend.value = 0
    assert codes(subject.should_rate_limit(request)) == [OK, OK]


def test_negative_hits_are_returned_and_always_pass() -> None:
    subject = service(rule("user", 10))
    ask(subject, [("user", "ada")], hits=10)
    assert remaining(subject.should_rate_limit(refund([("user", "ada")], 4))) == [4]
    assert remaining(subject.should_rate_limit(refund([("user", "ada")], 400))) == [10]
    assert codes(subject.should_rate_limit(refund([("user", "bob")], 1))) == [OK, OK]
    assert remaining(ask(subject, [("user", "bob")])) == [9]
    stats = subject.stats()
    assert stats[f"{PREFIX}d.user.total_negative_hits"] == 405
    assert stats[f"{PREFIX}d.user.total_hits"] == 11


def refund(entries: Entries, hits: int) -> Any:
    request = rate_limit_request("d", entries)
    descriptor = request.descriptors[0]
    descriptor.hits_addend.value = hits
    # is_negative_hits = true, as a client with newer definitions sends it
    descriptor.MergeFromString(b"\x20\x01")
    return request


def test_a_descriptor_twice_in_a_request_is_charged_twice() -> None:
    subject = service(rule("user", 3))
    assert remaining(ask(subject, [("user", "ada")], [("user", "ada")])) == [2, 1]
    assert codes(ask(subject, [("user", "ada")], [("user", "ada")])) == [OVER, OK, OVER]
    assert remaining(ask(subject, [("user", "ada")])) == [0]


def test_a_limit_applies_at_exactly_the_depth_of_the_descriptor() -> None:
    subject = service("{key: a, rate_limit: {unit: day, requests_per_unit: 1}, descriptors: [" + rule("b", 1) + "]}")
    for entries in ([("a", "x"), ("b", "y"), ("c", "z")], [("b", "y")], [("a", "x"), ("c", "z")]):
        assert not ask(subject, entries).statuses[0].HasField("current_limit")
    assert ask(subject, [("a", "x")]).statuses[0].current_limit.unit == 4
    assert ask(subject, [("a", "x"), ("b", "y")]).statuses[0].current_limit.unit == 2


def test_a_rule_without_requests_rejects_everything() -> None:
    subject = service("{key: a, rate_limit: {unit: day}}", rule("b", 5))
    denied = ask(subject, [("a", "x")], [("b", "x")])
    assert (codes(denied), remaining(denied)) == ([OVER, OVER, OK], [0, 5])
    assert remaining(ask(subject, [("b", "x")])) == [4]


def test_unlimited_is_neither_counted_nor_limited() -> None:
    subject = service(
        "{key: a, rate_limit: {unlimited: true, replaces: [{name: n}]}}", rule("b", 0, limit_more=", name: n")
    )
    response = ask(subject, [("a", "x")], [("b", "x")])
    assert (codes(response), remaining(response)) == ([OK, OK, OK], [2**32 - 1, 0])
    assert not any(name.startswith(f"{PREFIX}d.a.") for name in subject.stats())


def test_a_replaced_limit_is_not_charged() -> None:
    subject = service(rule("a", 1, limit_more=", name: x, replaces: [{name: y}]"), rule("b", 1, limit_more=", name: y"))
    assert codes(ask(subject, [("a", "x")], [("b", "x")])) == [OK, OK, OK]
    assert remaining(ask(subject, [("b", "x")])) == [0]


def test_limits_that_replace_each_other_both_vanish() -> None:
    subject = service(
        rule("a", 0, limit_more=", name: x, replaces: [{name: y}]"),
        rule("b", 0, limit_more=", name: y, replaces: [{name: x}]"),
    )
    assert codes(ask(subject, [("a", "x")], [("b", "x")])) == [OK, OK, OK]


def test_shadow_mode_of_a_rule_counts_and_lets_pass() -> None:
    subject = service(rule("a", 1, more="shadow_mode: true,"))
    answers = [ask(subject, [("a", "x")]) for _ in range(3)]
    assert [(codes(each), remaining(each)) for each in answers] == [([OK, OK], [0])] * 3
    stats = subject.stats()
    assert (stats[f"{PREFIX}d.a.over_limit"], stats[f"{PREFIX}d.a.shadow_mode"]) == (2, 2)


def test_global_shadow_mode_changes_only_the_overall_code() -> None:
    subject = service(rule("a", 0), SHADOW_MODE="true")
    assert codes(ask(subject, [("a", "x")])) == [OK, OVER]
    assert subject.stats()["ratelimit.service.global_shadow_mode"] == 1


def test_quotas_reject_only_if_all_are_used_up() -> None:
    subject = service(rule("a", 1, more="quota_mode: true,"), rule("b", 2, more="quota_mode: true,"))
    answers = [codes(ask(subject, [("a", "x")], [("b", "x")])) for _ in range(3)]
    assert answers == [[OK, OK, OK], [OK, OVER, OK], [OVER, OVER, OVER]]


def test_an_exhausted_quota_returns_what_ordinary_limits_charged() -> None:
    subject = service(rule("a", 1, more="quota_mode: true,"), rule("b", 5))
    assert codes(ask(subject, [("a", "x")], [("b", "x")])) == [OK, OK, OK]
    denied = ask(subject, [("a", "x")], [("b", "x")])
    assert (codes(denied), remaining(denied)) == ([OVER, OVER, OK], [0, 4])
    assert remaining(ask(subject, [("b", "x")])) == [3]


def test_a_request_over_an_ordinary_limit_does_not_charge_quotas() -> None:
    subject = service(rule("a", 5, more="quota_mode: true,"), rule("b", 0))
    assert codes(ask(subject, [("a", "x")], [("b", "x")])) == [OVER, OK, OVER]
    assert remaining(ask(subject, [("a", "x")])) == [4]


def test_global_quota_mode_passes_if_a_descriptor_has_no_limit() -> None:
    subject = service(rule("a", 0), QUOTA_MODE="true")
    assert codes(ask(subject, [("a", "x")])) == [OVER, OVER]
    assert codes(ask(subject, [("a", "x")], [("b", "x")])) == [OK, OVER, OK]


def test_a_limit_override_precedes_the_rules_of_a_known_domain() -> None:
    subject = service(rule("a", 100, more="shadow_mode: true,"))
    request = rate_limit_request("d", [("a", "x")])
    request.descriptors[0].limit.requests_per_unit, request.descriptors[0].limit.unit = 1, 3
    answers = [subject.should_rate_limit(request) for _ in range(2)]
    assert [codes(each) for each in answers] == [[OK, OK], [OVER, OVER]]
    assert answers[0].statuses[0].current_limit.unit == 3
    assert remaining(ask(subject, [("a", "x")])) == [99]
    assert subject.stats()[f"{PREFIX}d.a_x.total_hits"] == 2
    request.domain = "unknown"
    assert codes(subject.should_rate_limit(request)) == [OK, OK]


def test_an_override_with_an_unknown_unit_fails_only_its_request() -> None:
    subject = service(rule("a", 1))
    request = rate_limit_request("d", [("a", "x")])
    request.descriptors[0].limit.requests_per_unit = 1
    with pytest.raises(ServiceError, match="invalid rate limit unit 0"):
        subject.should_rate_limit(request)
    assert codes(ask(subject, [("a", "x")])) == [OK, OK]
    assert subject.stats()["ratelimit.service.call.should_rate_limit.service_error"] == 1


def test_counters_of_different_units_are_different() -> None:
    clock = FakeClock(0)
    subject = service(rule("a", 10, "second"), clock=clock)
    ask(subject, [("a", "x")], hits=10)
    subject.reload([("test.yaml", f"domain: d\ndescriptors: [{rule('a', 10, 'minute')}]")])
    assert remaining(ask(subject, [("a", "x")])) == [9]


def test_values_with_separators_do_not_share_counters() -> None:
    subject = service("{key: a, descriptors: [" + rule("b", 1) + "]}", rule("c", 1))
    assert codes(ask(subject, [("a", "x|b"), ("b", "y")])) == [OK, OK]
    assert codes(ask(subject, [("a", "x"), ("b", "b|y")])) == [OK, OK]
    assert codes(ask(subject, [("c", "x_y")])) == [OK, OK]


def test_shared_thresholds_use_one_counter_for_all_values() -> None:
    subject = service(rule("file", 2, more='value: "a/*", share_threshold: true,'))
    assert [codes(ask(subject, [("file", f"a/{n}")])) for n in range(3)] == [[OK, OK], [OK, OK], [OVER, OVER]]
    assert subject.stats()[f"{PREFIX}d.file_a/*.total_hits"] == 3


def test_a_shared_threshold_of_a_parent_applies_to_the_limit_below() -> None:
    subject = service('{key: f, value: "a*", share_threshold: true, descriptors: [' + rule("user", 1) + "]}")
    assert codes(ask(subject, [("f", "a1"), ("user", "ada")])) == [OK, OK]
    assert codes(ask(subject, [("f", "a2"), ("user", "ada")])) == [OVER, OVER]
    assert codes(ask(subject, [("f", "a2"), ("user", "bob")])) == [OK, OK]


@pytest.mark.parametrize(
    ("descriptor", "entries", "key"),
    [
        (rule("a", 1), [("a", "x")], "d.a"),
        (rule("a", 1, more="value: x,"), [("a", "x")], "d.a_x"),
        (rule("a", 1, more='value: "x*",'), [("a", "xy")], "d.a_x*"),
        (rule("a", 1, more='value: "x*", value_to_metric: true,'), [("a", "xy")], "d.a_xy"),
        (rule("a", 1, more="value_to_metric: true,"), [("a", "x")], "d.a_x"),
        (rule("a", 1, more="value_to_metric: true,"), [("a", "")], "d.a"),
        (rule("a", 1, more="detailed_metric: true,"), [("a", "x")], "d.a_x"),
        (nested("a", rule("b", 1, more="detailed_metric: true,")), [("a", "x"), ("b", "y")], "d.a_x.b_y"),
        (rule("a", 1, more="detailed_metric: true,"), [("a", "")], "d.a_"),
        (
            nested("a", rule("b", 1, more='value: "y*", share_threshold: true, detailed_metric: true,')),
            [("a", ""), ("b", "yz")],
            "d.a.b_y*",
        ),
        (rule("a*", 1), [("ab", "x")], "d.ab_a*"),
        (rule("a*", 1, more="value_to_metric: true,"), [("ab", "x")], "d.ab_x"),
        (nested("a", rule("b", 1), "value_to_metric: true,"), [("a", "x"), ("b", "y")], "d.a_x.b"),
        (nested("a", rule("b", 1, more="value_to_metric: true,")), [("a", "x"), ("b", "y")], "d.a.b_y"),
    ],
)
def test_names_of_statistics(descriptor: str, entries: Entries, key: str) -> None:
    subject = service(descriptor)
    ask(subject, entries)
    assert subject.stats()[f"{PREFIX}{key}.total_hits"] == 1


def test_names_of_statistics_without_dots() -> None:
    subject = service(rule("path.prefix", 1, more="value_to_metric: true,"), SANITIZE_DESCRIPTOR_METRIC_DOTS="true")
    assert not [name for name in subject.stats() if name.startswith(f"{PREFIX}d.")]
    ask(subject, [("path.prefix", "/v1.2")])
    assert subject.stats()[f"{PREFIX}d.path_prefix_/v1_2.total_hits"] == 1


def test_response_headers_describe_the_tightest_limit() -> None:
    names = {"LIMIT_LIMIT_HEADER": "x-limit", "LIMIT_REQUEST_HEADERS_ENABLED": "true"}
    subject = service(rule("a", 5), rule("b", 3), rule("c", 1), LIMIT_RESPONSE_HEADERS_ENABLED="true", **names)

    def headers(*keys: str) -> list[tuple[str, str]]:
        response = ask(subject, *[[(key, "x")] for key in keys])
        assert len(response.request_headers_to_add) == len(response.response_headers_to_add)
        return [(each.key, each.value) for each in response.response_headers_to_add]

    assert headers("a", "b") == [("x-limit", "3"), ("RateLimit-Remaining", "2"), ("RateLimit-Reset", "40")]
    assert headers("c")[0] == ("x-limit", "1")
    assert headers("a", "c", "b")[0] == ("x-limit", "1")
    assert headers("unknown") == []


def test_dynamic_metadata_describes_request_and_passed_descriptors() -> None:
    subject = service(
        rule("a", 5, more="metadata: {tier: gold, nested: {x: 1}},"),
        rule("b", 5, more="metadata: {tier: tin, nested: {x: 2, z: [1, two]}},"),
        rule("c", 0, more="metadata: {blocked: true},"),
        QUOTA_MODE="true",
        RESPONSE_DYNAMIC_METADATA="true",
    )
    request = rate_limit_request(
        "d",
        [("a", "x")],
        [
            ("b", "y"),
        ],
        [("c", "z")],
        hits=2,
    )
    request.descriptors[0].hits_addend.value = 3
    assert MessageToDict(subject.should_rate_limit(request).dynamic_metadata) == {
        "domain": "d",
        "descriptors": [{"entries": ["a=x"], "hitsAddend": 3.0}, {"entries": ["b=y"]}, {"entries": ["c=z"]}],
        "hitsAddend": 2.0,
        "metadata": {"tier": "gold", "nested": {"x": 1.0, "z": [1.0, "two"]}},
    }


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (rate_limit_request("", [("a", "x")]), "rate limit domain must not be empty"),
        (rate_limit_request("d"), "rate limit descriptor list must not be empty"),
    ],
)
def test_a_malformed_request_is_an_error(request_: Any, message: str) -> None:
    subject = service(rule("a", 1))
    with pytest.raises(ServiceError, match=f"^{message}$"):
        subject.should_rate_limit(request_)
    assert subject.stats()["ratelimit.service.call.should_rate_limit.service_error"] == 1


def test_requests_before_the_first_configuration_are_errors() -> None:
    with pytest.raises(ServiceError, match=r"^no rate limit configuration loaded$"):
        RateLimitService(Limiter(), env={}).should_rate_limit(rate_limit_request("d", [("a", "x")]))


def test_an_unknown_domain_passes_and_is_counted() -> None:
    subject = service(rule("a", 0))
    assert codes(ask(subject, [("a", "x")], domain="other")) == [OK, OK]
    assert subject.stats()["ratelimit.service.rate_limit.other.domain_not_found"] == 1


def test_a_bad_reload_keeps_the_previous_configuration() -> None:
    environment = {"SHADOW_MODE": "false"}
    subject = RateLimitService.from_texts(
        [("test.yaml", f"domain: d\ndescriptors: [{rule('a', 1)}]")], Limiter(clock=FakeClock(NOON_US)), env=environment
    )
    with pytest.raises(ConfigError, match=r"^bad.yaml: config error, unknown key 'x'$"):
        subject.reload([("bad.yaml", "x: 1")])
    assert [codes(ask(subject, [("a", "x")])) for _ in range(2)] == [[OK, OK], [OVER, OVER]]
    environment["SHADOW_MODE"] = "true"
    subject.reload([("test.yaml", f"domain: d\ndescriptors: [{rule('a', 1)}]")])
    assert codes(ask(subject, [("a", "x")])) == [OK, OVER]
    stats = subject.stats()
    assert (stats["ratelimit.service.config_load_success"], stats["ratelimit.service.config_load_error"]) == (2, 1)


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [("second", 1), ("minute", 40), ("hour", 2800), ("day", 6400), ("week", 92_800), ("month", 352_000)],
)
def test_windows_are_aligned_to_1970(unit: str, seconds: int) -> None:
    subject = service(rule("a", 1, unit))
    assert ask(subject, [("a", "x")]).statuses[0].duration_until_reset.seconds == seconds


def test_calendar_months_end_with_the_month() -> None:
    clock = FakeClock(NOON_US)  # 2023-11-14 22:13:20 UTC
    subject = service(rule("a", 1, "month"), clock=clock, USE_CALENDAR_MONTH_RATE_LIMIT="true")
    left = ask(subject, [("a", "x")]).statuses[0].duration_until_reset.seconds
    assert left == 16 * 86_400 + 6400
    for seconds, expected in ((left - 1, OVER), (1, OK), (30 * 86_400, OVER), (86_400, OK)):
        clock.advance(seconds)
        assert ask(subject, [("a", "x")]).overall_code == expected


def test_other_algorithms_report_when_the_request_passes() -> None:
    clock = FakeClock(NOON_US)
    subject = service(rule("a", 2, limit_more=", algorithm: token_bucket, burst: 1"), clock=clock)
    assert codes(ask(subject, [("a", "x")])) == [OK, OK]
    denied = ask(subject, [("a", "x")])
    assert (codes(denied), denied.statuses[0].duration_until_reset.seconds) == ([OVER, OVER], 30)
    clock.advance(30)
    assert codes(ask(subject, [("a", "x")])) == [OK, OK]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.lists(
                st.tuples(st.sampled_from("abz"), st.sampled_from("xy"), st.integers(0, 4)), min_size=1, max_size=3
            ),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_charge_refused_answers_and_counts_as_the_original(steps: list[Any]) -> None:
    clock = FakeClock(NOON_US)
    subject = service(rule("a", 3), rule("b", 7, "hour"), clock=clock, domain="domain: d\ncharge_refused: true")
    model = UpstreamModel({"a": (3, 60), "b": (7, 3600)})
    for wait, descriptors in steps:
        clock.advance(wait)
        request = rate_limit_request("d", *[[(key, value)] for key, value, _ in descriptors])
        for descriptor, (_, _, hits) in zip(request.descriptors, descriptors, strict=True):
            descriptor.hits_addend.value = hits
        response = subject.should_rate_limit(request)
        expected = model.decide(clock.now_us() // 1_000_000, descriptors)
        actual = [(each.code, each.limit_remaining, each.duration_until_reset.seconds) for each in response.statuses]
        assert actual == expected
        assert response.overall_code == max(code for code, _, _ in expected)
    stats = subject.stats()
    assert {key: stats.get(f"{PREFIX}d.{key}", 0) for key in model.stats} == model.stats


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), min_size=1, max_size=4), max_size=40))
@settings(max_examples=150, deadline=None)
def test_requests_are_charged_all_or_nothing(requests: list[list[tuple[str, int]]]) -> None:
    subject, used, limits = service(rule("a", 9), rule("b", 14)), {"a": 0, "b": 0}, {"a": 9, "b": 14}
    for descriptors in requests:
        request = rate_limit_request("d", *[[(key, "x")] for key, _ in descriptors])
        for descriptor, (_, hits) in zip(request.descriptors, descriptors, strict=True):
            descriptor.hits_addend.value = hits
        total = {key: sum(hits for each, hits in descriptors if each == key) for key in used}
        passes = all(used[key] + total[key] <= limits[key] for key in used)
        assert subject.should_rate_limit(request).overall_code == (OK if passes else OVER)
        if passes:
            used = {key: used[key] + total[key] for key in used}


def test_asyncio_answers_the_same() -> None:
    async def main() -> list[list[int]]:
        async with AsyncLimiter(clock=FakeClock(NOON_US)) as limiter:
            text = f"domain: d\ndescriptors: [{rule('a', 1, more='quota_mode: true,')}, {rule('b', 1)}]"
            subject = AsyncRateLimitService.from_texts([("test.yaml", text)], limiter, env={})
            request = rate_limit_request("d", [("a", "x")], [("b", "x")])
            return [codes(await subject.should_rate_limit(request)) for _ in range(2)]

    assert asyncio.run(main()) == [[OK, OK, OK], [OVER, OVER, OVER]]


def test_a_store_that_fails_is_an_error_or_answered_by_the_failure_mode() -> None:
    url, text = "redis://127.0.0.1:1/0", f"domain: d\ndescriptors: [{rule('a', 5)}]"
    with Limiter(url) as limiter:
        subject = RateLimitService.from_texts([("test.yaml", text)], limiter, env={})
        with pytest.raises(ServiceError):
            ask(subject, [("a", "x")])
        assert subject.stats()["ratelimit.service.call.should_rate_limit.redis_error"] == 1
    for mode, code in (("open", OK), ("closed", OVER), ("local", OK)):
        with Limiter(url, on_failure=mode) as limiter:  # type: ignore[arg-type]
            assert (
                ask(RateLimitService.from_texts([("test.yaml", text)], limiter, env={}), [("a", "x")]).overall_code
                == code
            )


def test_calls_go_on_while_a_thousand_rules_are_reloaded() -> None:
    def text(quota: int) -> str:
        rules = [rule("user", quota, more=f"value: u{number},") for number in range(1000)]
        return f"domain: d\ndescriptors: [{', '.join(rules)}]"

    async def main() -> None:
        subject = AsyncRateLimitService.from_texts([("a.yaml", text(10))], AsyncLimiter(), env={})
        requests = [rate_limit_request("d", [("user", f"u{number}")]) for number in range(1000)]
        during: list[tuple[int, int]] = []
        for quota in (20, 30):
            reloading = asyncio.create_task(subject.reload_in_background([("a.yaml", text(quota))]))
            number = 0
            while not reloading.done():
                response = await subject.should_rate_limit(requests[number % 1000])
                during.append((response.overall_code, response.statuses[0].current_limit.requests_per_unit))
                number += 1
                await asyncio.sleep(0)
            await reloading
            after = await subject.should_rate_limit(requests[999])
            assert after.statuses[0].current_limit.requests_per_unit == quota
        assert {limit for _, limit in during} == {10, 20, 30}
        with pytest.raises(ConfigError):
            await subject.reload_in_background([("a.yaml", "nonsense: 1")])
        assert (await subject.should_rate_limit(requests[0])).statuses[0].current_limit.requests_per_unit == 30

    asyncio.run(main())


def test_a_tier_or_an_override_replaces_the_number_for_a_value() -> None:
    tenant = rule("tenant", 2, limit_more=", tiers: {pro: {requests_per_unit: 4}}, overrides: {vip: {unlimited: true}}")
    subject = service(tenant, domain="domain: d\nclients: {acme: pro}")
    answers = {name: ask(subject, [("tenant", name)]) for name in ("acme", "vip", "other")}
    assert [remaining(each) for each in answers.values()] == [[3], [2**32 - 1], [1]]
    assert answers["acme"].statuses[0].current_limit.requests_per_unit == 4
    assert subject.stats()[f"{PREFIX}d.tenant.total_hits"] == 2


def test_a_changed_tier_keeps_the_usage() -> None:
    text = "domain: d\nclients: {{acme: {}}}\ndescriptors: [{}]"
    tenant = rule("tenant", 2, limit_more=", tiers: {pro: {requests_per_unit: 10}, free: {requests_per_unit: 3}}")
    limiter = Limiter(clock=FakeClock(NOON_US))
    subject = RateLimitService.from_texts([("a.yaml", text.format("free", tenant))], limiter, env={})
    assert [codes(ask(subject, [("tenant", "acme")]))[0] for _ in range(4)] == [OK, OK, OK, OVER]
    subject.reload([("a.yaml", text.format("pro", tenant))])
    assert remaining(ask(subject, [("tenant", "acme")])) == [6]


def test_a_cost_multiplies_the_hits() -> None:
    subject = service(rule("job", 10, limit_more=", cost: 4"))
    assert remaining(ask(subject, [("job", "export")])) == [6]
    assert codes(ask(subject, [("job", "export")], hits=2)) == [OVER, OVER]
    assert remaining(ask(subject, [("job", "export")])) == [2]
    assert subject.stats()[f"{PREFIX}d.job.within_limit"] == 8
