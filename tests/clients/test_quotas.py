"""Rate limit headers of real APIs are understood, and no header a server can send stalls or crashes a client."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import http_sf
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from requests.structures import CaseInsensitiveDict

from headgate.clients import Quota, parse_headers
from headgate.clients.quotas import LARGEST, MAX_QUOTAS, MAX_RESET_S, RETRY_AFTER
from headgate.clients.structured_fields import parse_dictionary, parse_list

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())


class Sample(NamedTuple):
    """The headers of one response, as an API's documentation shows them, at the time `NOW`."""

    api: str
    headers: dict[str, str]
    quotas: list[Quota]


SAMPLES = [
    Sample(
        "GitHub",
        {
            "x-ratelimit-limit": "60",
            "x-ratelimit-remaining": "56",
            "x-ratelimit-used": "4",
            "x-ratelimit-resource": "core",
            "x-ratelimit-reset": f"{EPOCH + 3540}",
        },
        [Quota("core", 60, 56, 3540)],
    ),
    Sample(
        "GitHub, secondary limit",
        {"retry-after": "60", "x-ratelimit-remaining": "0", "x-ratelimit-reset": f"{EPOCH + 90}"},
        [Quota(None, None, 0, 90), Quota(RETRY_AFTER, None, 0, 60)],
    ),
    Sample(
        "OpenAI",
        {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-limit-tokens": "150000",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-remaining-tokens": "149984",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-reset-tokens": "6m0s",
        },
        [Quota("requests", 60, 59, 1), Quota("tokens", 150_000, 149_984, 360, unit="tokens")],
    ),
    Sample(
        "OpenAI, 2025",
        {
            "x-ratelimit-limit-tokens_usage_based": "160000",
            "x-ratelimit-remaining-tokens_usage_based": "159976",
            "x-ratelimit-reset-tokens_usage_based": "9ms",
        },
        [Quota("tokens_usage_based", 160_000, 159_976, 0.009, unit="tokens")],
    ),
    Sample("OpenAI, milliseconds", {"retry-after-ms": "1500", "retry-after": "2"}, [Quota(RETRY_AFTER, None, 0, 1.5)]),
    Sample(
        "Groq",
        {
            "x-ratelimit-limit-requests": "14400",
            "x-ratelimit-remaining-requests": "14370",
            "x-ratelimit-reset-requests": "2m59.56s",
        },
        [Quota("requests", 14_400, 14_370, 179.56)],
    ),
    Sample(
        "Anthropic",
        {
            "anthropic-ratelimit-requests-limit": "50",
            "anthropic-ratelimit-requests-remaining": "49",
            "anthropic-ratelimit-requests-reset": "2026-11-18T12:00:30Z",
            "anthropic-ratelimit-input-tokens-limit": "50000",
            "anthropic-ratelimit-input-tokens-remaining": "49500",
            "anthropic-ratelimit-input-tokens-reset": "2026-11-18T12:01:00Z",
            "retry-after": "60",
        },
        [
            Quota("requests", 50, 49, 30),
            Quota("input-tokens", 50_000, 49_500, 60, unit="tokens"),
            Quota(RETRY_AFTER, None, 0, 60),
        ],
    ),
    Sample(
        "Twitter/X",
        {"x-rate-limit-limit": "900", "x-rate-limit-remaining": "899", "x-rate-limit-reset": f"{EPOCH + 900}"},
        [Quota(None, 900, 899, 900)],
    ),
    Sample(
        "Reddit",
        {"x-ratelimit-used": "2", "x-ratelimit-remaining": "598.0", "x-ratelimit-reset": "300"},
        [Quota(None, None, 598, 300)],
    ),
    Sample(
        "Discord",
        {
            "X-RateLimit-Limit": "5",
            "X-RateLimit-Remaining": "0",
            "X-RateLimit-Reset": "1470173023.123",
            "X-RateLimit-Reset-After": "64.57",
            "X-RateLimit-Bucket": "abcd1234",
            "Retry-After": "65",
            "X-RateLimit-Scope": "user",
        },
        [Quota("abcd1234", 5, 0, 64.57), Quota(RETRY_AFTER, None, 0, 65)],
    ),
    Sample("Shopify", {"X-Shopify-Shop-Api-Call-Limit": "32/40"}, [Quota(None, 40, 8)]),
    Sample("Shopify, 429", {"Retry-After": "2.0"}, [Quota(RETRY_AFTER, None, 0, 2)]),
    Sample("Slack", {"Retry-After": "30"}, [Quota(RETRY_AFTER, None, 0, 30)]),
    Sample(
        "Stripe", {"Stripe-Rate-Limited-Reason": "global-rate", "Retry-After": "1"}, [Quota(RETRY_AFTER, None, 0, 1)]
    ),
    Sample(
        "Atlassian Jira",
        {
            "Beta-RateLimit-Policy": '"tenant-app-quota";q=100100;w=3600',
            "Beta-RateLimit": '"tenant-app-quota";r=17842;t=2107',
            "X-Beta-RateLimit-Reason": "jira-quota-tenant-based",
            "X-Beta-RateLimit-NearLimit": "true",
            "X-RateLimit-Limit": "350",
            "X-RateLimit-Remaining": "349",
        },
        [Quota("tenant-app-quota", 100_100, 17_842, 2107, 3600), Quota(None, 350, 349)],
    ),
    Sample(
        "Atlassian Jira, 429",
        {"X-RateLimit-Limit": "350", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-11-18T12:01Z"},
        [Quota(None, 350, 0, 60)],
    ),
    Sample(
        "Atlassian Confluence Data Center",
        {
            "X-RateLimit-Limit": "100",
            "X-RateLimit-Remaining": "99",
            "X-RateLimit-Interval-Seconds": "60",
            "X-RateLimit-FillRate": "10",
        },
        [Quota(None, 100, 99, None, 60)],
    ),
    Sample(
        "GitLab",
        {
            "RateLimit-Limit": "600",
            "RateLimit-Name": "throttle_authenticated_web",
            "RateLimit-Observed": "6",
            "RateLimit-Remaining": "594",
            "RateLimit-Reset": f"{EPOCH + 60}",
            "RateLimit-ResetTime": "Wed, 18 Nov 2026 12:01:00 GMT",
        },
        [Quota("throttle_authenticated_web", 600, 594, 60)],
    ),
    Sample(
        "HubSpot",
        {
            "X-HubSpot-RateLimit-Daily": "250000",
            "X-HubSpot-RateLimit-Daily-Remaining": "249999",
            "X-HubSpot-RateLimit-Interval-Milliseconds": "10000",
            "X-HubSpot-RateLimit-Max": "100",
            "X-HubSpot-RateLimit-Remaining": "99",
        },
        [Quota("daily", 250_000, 249_999, None, 86_400), Quota(None, 100, 99, None, 10)],
    ),
    Sample(
        "Cloudflare",
        {"Ratelimit": '"default";r=50;t=30', "Ratelimit-Policy": '"burst";q=100;w=60'},
        [Quota("default", None, 50, 30), Quota("burst", 100, None, None, 60)],
    ),
    Sample(
        "Cloudflare, 2025",
        {"X-RateLimit-Limit": "1200", "X-RateLimit-Reset": "Wed, 18 Nov 2026 12:05:00 GMT", "Retry-After": "300"},
        [Quota(None, 1200, None, 300), Quota(RETRY_AFTER, None, 0, 300)],
    ),
    Sample(
        "Docker Hub",
        {"ratelimit-limit": "100;w=21600", "ratelimit-remaining": "76;w=21600"},
        [Quota(None, 100, 76, None, 21_600)],
    ),
    Sample(
        "Brave Search",
        {
            "X-RateLimit-Limit": "1, 15000",
            "X-RateLimit-Policy": "1;w=1, 15000;w=2592000",
            "X-RateLimit-Remaining": "1, 1000",
            "X-RateLimit-Reset": "1, 1419704",
        },
        [Quota(None, 1, 1, 1, 1), Quota(None, 15_000, 1000, 1_419_704, 2_592_000)],
    ),
    Sample(
        "Kong",
        {
            "X-RateLimit-Limit-Hour": "3600",
            "X-RateLimit-Remaining-Hour": "3590",
            "RateLimit-Limit": "10",
            "RateLimit-Remaining": "9",
            "RateLimit-Reset": "47",
        },
        [Quota("hour", 3600, 3590, None, 3600), Quota(None, 10, 9, 47)],
    ),
    Sample(
        "Envoy",
        {
            "x-ratelimit-limit": '10, 10;w=1;name="per-second", 1000;w=3600',
            "x-ratelimit-remaining": "9",
            "x-ratelimit-reset": "1",
        },
        [Quota(None, 10, 9, 1, 1)],
    ),
    Sample("Zendesk", {"X-Rate-Limit": "700", "X-Rate-Limit-Remaining": "699"}, [Quota(None, 700, 699)]),
    Sample(
        "Linear",
        {
            "X-RateLimit-Requests-Limit": "1500",
            "X-RateLimit-Requests-Remaining": "1499",
            "X-RateLimit-Requests-Reset": f"{EPOCH * 1000 + 3_600_000}",
        },
        [Quota("requests", 1500, 1499, 3600)],
    ),
    Sample(
        "draft -06",
        {
            "RateLimit-Limit": "2",
            "RateLimit-Policy": "1000;w=60, 2;w=30",
            "RateLimit-Remaining": "1",
            "RateLimit-Reset": "28",
        },
        [Quota(None, 2, 1, 28, 30)],
    ),
    Sample(
        "draft -07",
        {"RateLimit": "limit=100, remaining=50, reset=5", "RateLimit-Policy": "100;w=60"},
        [Quota(None, 100, 50, 5, 60)],
    ),
    Sample(
        "draft -11, as Headgate sends it",
        {
            "x-ratelimit-limit": "2",
            "x-ratelimit-remaining": "1",
            "x-ratelimit-reset": "1763251230",
            "ratelimit-policy": '"per-ip";q=1000;w=60, "search";q=2;w=30',
            "ratelimit": '"per-ip";r=999;t=60, "search";r=1;t=28',
        },
        [Quota("per-ip", 1000, 999, 60, 60), Quota("search", 2, 1, 28, 30)],
    ),
    Sample(
        "draft -11, partitions and units",
        {
            "ratelimit-policy": '"conn";q=5;qu="concurrent-requests", "size";q=9000;qu="content-bytes";w=60',
            "ratelimit": '"conn";r=3;pk=:QUI=:, "size";r=10;t=1',
        },
        [
            Quota("conn", 5, 3, unit="concurrent-requests", partition=b"AB"),
            Quota("size", 9000, 10, 1, 60, unit="content-bytes"),
        ],
    ),
    Sample(
        "the draft after -11",
        {"ratelimit-policy": "default;q=100;w=60", "ratelimit": "default;a=50;w=30;c=2"},
        [Quota("default", 100, 50, 30, 60)],
    ),
    Sample("a date", {"Retry-After": "Wed, 18 Nov 2026 12:02:00 GMT"}, [Quota(RETRY_AFTER, None, 0, 120)]),
    Sample("a date in the past", {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, [Quota(RETRY_AFTER, None, 0, 0)]),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.api)
def test_samples_are_understood(sample: Sample) -> None:
    assert parse_headers(sample.headers, NOW) == sample.quotas


@pytest.mark.parametrize(
    "make", [dict, httpx.Headers, CIMultiDict, CaseInsensitiveDict, lambda headers: list(headers.items())]
)
def test_any_kind_of_headers_is_read(make: Callable[[dict[str, str]], Any]) -> None:
    headers = make({"X-RateLimit-Remaining": "7", "X-RateLimit-Reset": "30"})
    assert parse_headers(headers, NOW) == [Quota(None, None, 7, 30)]


def test_bytes_and_repeated_lines_are_read() -> None:
    lines = [(b"RateLimit", b'"a";r=1;t=2'), (b"ratelimit", b'"b";r=3;t=4')]
    assert parse_headers(lines, NOW) == [Quota("a", None, 1, 2), Quota("b", None, 3, 4)]


def test_a_time_without_zone_is_utc() -> None:
    assert (
        parse_headers({"Retry-After": format_datetime(NOW, usegmt=True)}, NOW.replace(tzinfo=None))[0].reset_after == 0
    )


@pytest.mark.parametrize(
    "cache",
    [
        {"Age": "1"},
        {"CF-Cache-Status": "HIT"},
        {"X-Cache": "Hit from cloudfront"},
        {"X-From-Cache": "1"},
        {"Cache-Status": "ExampleCache; hit; ttl=30"},
    ],
    ids=str,
)
def test_cached_responses_say_nothing(cache: dict[str, str]) -> None:
    assert parse_headers({"RateLimit": '"a";r=1;t=2', "Retry-After": "9", **cache}, NOW) == []


@pytest.mark.parametrize(
    "cache",
    [{"Age": "0"}, {"CF-Cache-Status": "DYNAMIC"}, {"X-Cache": "MISS"}, {"Cache-Status": "x; fwd=miss"}],
    ids=str,
)
def test_responses_that_passed_a_cache_are_read(cache: dict[str, str]) -> None:
    assert parse_headers({"Retry-After": "9", **cache}, NOW) == [Quota(RETRY_AFTER, None, 0, 9)]


@pytest.mark.parametrize("text", ["-1", "NaN", "inf", "1e99", "soon", "", "1,", "٣", "0x10", "1_000", "9" * 5000])
@pytest.mark.parametrize("field", ["Retry-After", "X-RateLimit-Reset", "X-RateLimit-Remaining", "RateLimit-Limit"])
def test_impossible_numbers_are_ignored(field: str, text: str) -> None:
    assert all(quota.reset_after is None or text == "1," for quota in parse_headers({field: text}, NOW))


def test_huge_numbers_are_lowered() -> None:
    headers = {"X-RateLimit-Limit": "9" * 40, "X-RateLimit-Remaining": "9" * 40, "X-RateLimit-Reset": "999999999"}
    assert parse_headers(headers, NOW) == [Quota(None, LARGEST, LARGEST, MAX_RESET_S)]
    assert parse_headers({"Retry-After": "9" * 40}, NOW)[0].reset_after == MAX_RESET_S
    assert parse_headers({"X-RateLimit-Reset": "9999-12-31T23:59:59-23:59"}, NOW)[0].reset_after == MAX_RESET_S


# ---------------------------------------------------------------- hostile servers

NAMES = st.sampled_from([name for sample in SAMPLES for name in sample.headers] + ["Age", "Date", "x-cache"])
NASTY = st.sampled_from(
    ["NaN", "-1", "1e309", "9" * 30, ",", ";", "=", '"', "\\", ":", "::", "?1", "Infinity", "\x00", "ß", "1" * 5000]
)
VALUES = st.lists(NASTY | st.sampled_from([v for s in SAMPLES for v in s.headers.values()]) | st.text(max_size=30)).map(
    "".join
)


@given(headers=st.lists(st.tuples(NAMES, VALUES), max_size=40))
def test_any_headers_give_possible_quotas(headers: list[tuple[str, str]]) -> None:
    for quota in parse_headers(headers, NOW):
        for number in (quota.limit, quota.remaining, quota.window):
            assert number is None or (type(number) is int and 0 <= number <= LARGEST)
        assert quota.reset_after is None or 0 <= quota.reset_after <= MAX_RESET_S


@pytest.mark.parametrize(
    "headers",
    [
        [("ratelimit", ", ".join(f'"p{number}";r=1;t=1' for number in range(10_000)))],
        [("ratelimit", f'"p{number}";r=1;t=1') for number in range(10_000)],
        [(f"x-ratelimit-remaining-{number}", "1") for number in range(10_000)],
        [("x-ratelimit-limit", "1, " * 100_000), ("x-ratelimit-remaining", "1, " * 100_000)],
        [("ratelimit", '"' + "\\" * 100_000)],
        [("retry-after", " " * 100_000 + "1" * 100_000)],
        [("x-ratelimit-reset", "1h" * 50_000)],
        [("a-" * 50_000 + "ratelimit-remaining", "1")],
    ],
    ids=["items", "lines", "kinds", "numbers", "escapes", "digits", "durations", "name"],
)
def test_work_is_bounded(headers: list[tuple[str, str]]) -> None:
    """Counts the calls of Python functions, which does not depend on the machine."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        quotas = parse_headers(headers, NOW)
    finally:
        sys.setprofile(None)
    assert len(quotas) <= MAX_QUOTAS
    assert calls <= 60_000


# ---------------------------------------------------------------- structured fields

KEYS = st.from_regex(r"\A[a-z*][a-z0-9_.*-]{0,5}\Z")
BARE = (
    st.integers(-(10**15) + 1, 10**15 - 1)
    | st.floats(-(10**9), 10**9).map(lambda number: round(number, 3))
    | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=10)
    | st.binary(max_size=10)
    | st.booleans()
    | st.from_regex(r"\A[a-z*][a-zA-Z0-9!#$%:/.-]{0,5}\Z").map(http_sf.Token)
)
PARAMETERS = st.dictionaries(KEYS, BARE, max_size=4)


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, str | http_sf.Token) else value


def as_plain(item: Any) -> Any:
    value, parameters = item
    return plain(value), {name: plain(each) for name, each in parameters.items()}


@given(items=st.lists(st.tuples(BARE, PARAMETERS), min_size=1, max_size=5))
def test_lists_are_read_as_http_sf_writes_them(items: list[Any]) -> None:
    found = parse_list(http_sf.ser(items))
    assert found is not None
    assert [as_plain(item) for item in found] == [as_plain(item) for item in items]


@given(members=st.dictionaries(KEYS, st.tuples(BARE, PARAMETERS), min_size=1, max_size=5))
def test_dictionaries_are_read_as_http_sf_writes_them(members: dict[str, Any]) -> None:
    found = parse_dictionary(http_sf.ser(members))
    assert found is not None
    assert {key: as_plain(item) for key, item in found.items()} == {
        key: as_plain(item) for key, item in members.items()
    }


PIECES = st.lists(
    st.sampled_from(
        [
            '"a"',
            "a",
            "A1",
            "5",
            "-5",
            "1.5",
            "1.",
            ";",
            "; ",
            "r",
            "=",
            ",",
            " ",
            "\t",
            '"',
            "\\",
            ":YQ==:",
            "?1",
            "?",
            "*",
        ]
    )
).map("".join)


@given(text=PIECES)
def test_fields_are_valid_if_and_only_if_they_are_to_http_sf(text: str) -> None:
    for ours, kind in ((parse_list, "list"), (parse_dictionary, "dictionary")):
        try:
            expected: Any = http_sf.parse(text.encode(), tltype=kind)
        except http_sf.StructuredFieldError:
            expected = None
        assert (ours(text) is None) == (expected is None), kind


def test_a_reset_just_ahead_is_close() -> None:
    soon = (NOW + timedelta(milliseconds=1500)).isoformat()
    assert parse_headers({"X-RateLimit-Reset": soon}, NOW)[0].reset_after == 1.5
