"""Rate limit headers of real APIs are understood, and no header a server can send stalls or crashes a client."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.client import parse_headers as parse_message
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import http_sf
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from requests.structures import CaseInsensitiveDict

from headgate.clients import Quota, parse_headers
from headgate.clients.field_values import LARGEST, MAX_RESET_S
from headgate.clients.quotas import MAX_QUOTAS, RETRY_AFTER
from headgate.clients.structured_fields import parse_dictionary, parse_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.client import HTTPMessage

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
        "Zendesk, an endpoint",
        {"Zendesk-RateLimit-Tickets-Index": "total=100; remaining=99; resets=41"},
        [Quota("tickets-index", 100, 99, 41)],
    ),
    Sample(
        "Twitch",
        {"Ratelimit-Limit": "800", "Ratelimit-Remaining": "799", "Ratelimit-Reset": f"{EPOCH + 3}"},
        [Quota(None, 800, 799, 3)],
    ),
    Sample(
        "Okta",
        {"X-Rate-Limit-Limit": "600", "X-Rate-Limit-Remaining": "598", "X-Rate-Limit-Reset": f"{EPOCH + 30}"},
        [Quota(None, 600, 598, 30)],
    ),
    Sample(
        "Vimeo",
        {
            "X-RateLimit-Limit": "250",
            "X-RateLimit-Remaining": "240",
            "X-RateLimit-Reset": "2026-11-18T12:15:30+00:00",
        },
        [Quota(None, 250, 240, 930)],
    ),
    Sample(
        "Cerebras",
        {
            "x-ratelimit-limit-requests-day": "14400",
            "x-ratelimit-remaining-requests-day": "14399",
            "x-ratelimit-reset-requests-day": "33011.38",
            "x-ratelimit-limit-tokens-minute": "60000",
            "x-ratelimit-remaining-tokens-minute": "59000",
        },
        [
            Quota("requests-day", 14_400, 14_399, 33_011.38, 86_400),
            Quota("tokens-minute", 60_000, 59_000, None, 60, unit="tokens"),
        ],
    ),
    Sample(
        "Mistral",
        {"x-ratelimit-limit-tokens-5-minute": "500000", "x-ratelimit-remaining-tokens-5-minute": "499000"},
        [Quota("tokens-5-minute", 500_000, 499_000, None, 300, unit="tokens")],
    ),
    Sample(
        "Strava",
        {
            "X-RateLimit-Limit": "200,2000",
            "X-RateLimit-Usage": "100,1500",
            "X-ReadRateLimit-Limit": "100,1000",
            "X-ReadRateLimit-Usage": "10,20",
        },
        [Quota(None, 200, 100), Quota(None, 2000, 500), Quota(None, 100, 90), Quota(None, 1000, 980)],
    ),
    Sample(
        "Riot Games",
        {"X-App-Rate-Limit": "20:1,100:120", "X-App-Rate-Limit-Count": "1:1,5:120"},
        [Quota(None, 20, 19, None, 1), Quota(None, 100, 95, None, 120)],
    ),
    Sample(
        "Trello",
        {
            "x-rate-limit-api-key-interval-ms": "10000",
            "x-rate-limit-api-key-max": "300",
            "x-rate-limit-api-key-remaining": "299",
        },
        [Quota("api-key", 300, 299, None, 10)],
    ),
    Sample(
        "BigCommerce",
        {
            "X-Rate-Limit-Requests-Left": "149",
            "X-Rate-Limit-Requests-Quota": "150",
            "X-Rate-Limit-Time-Reset-Ms": "3000",
            "X-Rate-Limit-Time-Window-Ms": "30000",
        },
        [Quota(None, 150, 149, 3, 30)],
    ),
    Sample(
        "Datadog",
        {
            "X-RateLimit-Limit": "100",
            "X-RateLimit-Period": "3600",
            "X-RateLimit-Remaining": "99",
            "X-RateLimit-Reset": "1234",
            "X-RateLimit-Name": "logs_queries",
        },
        [Quota("logs_queries", 100, 99, 1234, 3600)],
    ),
    Sample("Crossref", {"X-Rate-Limit-Limit": "50", "X-Rate-Limit-Interval": "1s"}, [Quota(None, 50, window=1)]),
    Sample(
        "Discogs",
        {"X-Discogs-Ratelimit": "60", "X-Discogs-Ratelimit-Used": "1", "X-Discogs-Ratelimit-Remaining": "59"},
        [Quota(None, 60, 59)],
    ),
    Sample(
        "Sentry",
        {
            "X-Sentry-Rate-Limit-Limit": "40",
            "X-Sentry-Rate-Limit-Remaining": "39",
            "X-Sentry-Rate-Limit-Reset": f"{EPOCH + 1}",
            "X-Sentry-Rate-Limit-ConcurrentLimit": "25",
            "X-Sentry-Rate-Limit-ConcurrentRemaining": "24",
        },
        [Quota(None, 40, 39, 1), Quota("concurrent", 25, 24, unit="concurrent-requests")],
    ),
    Sample(
        "Imgur",
        {
            "X-RateLimit-UserLimit": "500",
            "X-RateLimit-UserRemaining": "499",
            "X-RateLimit-UserReset": f"{EPOCH + 60}",
            "X-RateLimit-ClientLimit": "12500",
            "X-RateLimit-ClientRemaining": "12000",
        },
        [Quota("user", 500, 499, 60), Quota("client", 12_500, 12_000)],
    ),
    Sample(
        "Help Scout, 429",
        {"X-RateLimit-Limit-Minute": "400", "X-RateLimit-Remaining-Minute": "0", "X-RateLimit-Retry-After": "10"},
        [Quota("minute", 400, 0, None, 60), Quota(RETRY_AFTER, None, 0, 10)],
    ),
    Sample("Zoom, 429", {"Retry-After": "2026-11-19T00:00:00Z"}, [Quota(RETRY_AFTER, None, 0, 43_200)]),
    Sample("Salesforce", {"Sforce-Limit-Info": "api-usage=18/5000"}, [Quota(None, 5000, 4982)]),
    Sample(
        "Klaviyo",
        {"RateLimit-Limit": "3, 3;w=1, 60;w=60", "RateLimit-Remaining": "2", "RateLimit-Reset": "1"},
        [Quota(None, 3, 2, 1, 1)],
    ),
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
        "draft -07, with a named policy",
        {"RateLimit": "limit=100, remaining=50, reset=5", "RateLimit-Policy": '"a";q=1000;w=3600, "b";q=100;w=60'},
        [Quota(None, 100, 50, 5, 60)],
    ),
    Sample(
        "draft -07, without a limit",
        {"RateLimit": "remaining=50, reset=5", "RateLimit-Policy": "100;w=60"},
        [Quota(None, None, 50, 5)],
    ),
    Sample(
        "only policies, without names",
        {"RateLimit-Policy": "10;w=1, 50;w=60"},
        [Quota(None, 10, window=1), Quota(None, 50, window=60)],
    ),
    Sample("a part of a second", {"RateLimit": '"a";r=1;t=1.5'}, [Quota("a", None, 1, 1.5)]),
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
    Sample("a repeated number", {"Retry-After": "10, 10"}, [Quota(RETRY_AFTER, None, 0, 10)]),
    Sample("a time since 1970", {"Retry-After": f"{EPOCH + 30}"}, [Quota(RETRY_AFTER, None, 0, 30)]),
    Sample("a date in the past", {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, [Quota(RETRY_AFTER, None, 0, 0)]),
]


def as_message(headers: dict[str, str]) -> HTTPMessage:
    """The headers of urllib's responses, which are no mapping."""
    return parse_message(BytesIO("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()))


RESETS = [
    ("30", 30),
    ("1500.5", 1500.5),
    (f"{EPOCH + 30}", 30),
    (f"{EPOCH + 30}.250", 30.25),
    (f"{EPOCH + 30}250", 30.25),
    (f"{EPOCH + 30}000000", 30),
    (f"{EPOCH + 30}000000000", 30),
    (f"{EPOCH - 30}", 0),
    ("6m0s", 360),
    ("1s 500ms", 1.5),
    ("1h2m3.5s", 3723.5),
    ("1.5h", 5400),
    ("2d", 172_800),
    ("250ms", 0.25),
    ("PT1M30S", 90),
    ("P1DT1H", 90_000),
    ("2026-11-18T12:00:30Z", 30),
    ("2026-11-18T13:00:30+01:00", 30),
    ("2026-11-18T12:00:30.1234567Z", 30.123456),
    ("2026-11-18 12:00:30", 30),
    ("2026-11-18 12:00:30 UTC", 30),
    ("2026-11-18 12:00:30 +0000", 30),
    ("Wed, 18 Nov 2026 12:00:30 GMT", 30),
    ("Wednesday, 18-Nov-26 12:00:30 GMT", 30),
    ("p", None),
    ("1h 2", None),
    ("tomorrow", None),
]


@pytest.mark.parametrize(("text", "seconds"), RESETS, ids=[text for text, _ in RESETS])
def test_resets_are_read_in_any_form(text: str, seconds: float | None) -> None:
    (quota,) = parse_headers({"X-RateLimit-Remaining": "7", "X-RateLimit-Reset": text}, NOW)
    assert quota.reset_after == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.api)
def test_samples_are_understood(sample: Sample) -> None:
    assert parse_headers(sample.headers, NOW) == sample.quotas


@pytest.mark.parametrize(
    "make",
    [dict, httpx.Headers, CIMultiDict, CaseInsensitiveDict, as_message, lambda headers: list(headers.items())],
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
        {"X-Cache": "MISS, HIT"},
        {"X-Cache": "TCP_HIT from a.example"},
        {"X-From-Cache": "1"},
        {"Cache-Status": "ExampleCache; hit; ttl=30"},
    ],
    ids=str,
)
def test_cached_responses_say_nothing(cache: dict[str, str]) -> None:
    assert parse_headers({"RateLimit": '"a";r=1;t=2', "Retry-After": "9", **cache}, NOW) == []


@pytest.mark.parametrize(
    "cache",
    [
        {"Age": "0"},
        {"CF-Cache-Status": "DYNAMIC"},
        {"X-Cache": "MISS"},
        {"Cache-Status": "x; fwd=miss"},
        {"X-Cache": "RefreshHit"},
    ],
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


@pytest.mark.parametrize("fill", ["a", "1", " ", ",", ";", "=", '"', "\\", ":", ";a", "a=1;", "1,", "h,", "\t"])
@pytest.mark.parametrize("start", ["", "remaining=", '"', "a;", "api-usage=", "hit"])
def test_time_is_in_proportion_to_the_length_of_fields(start: str, fill: str) -> None:
    names = ["ratelimit", "ratelimit-policy", "cache-status", "x-cache", "sforce-limit-info", "retry-after", "date"]
    names += [f"x-ratelimit-{word}-{number}" for word in ("limit", "remaining", "reset", "a") for number in range(5)]

    def cpu_s(length: int) -> float:
        """CPU seconds of this thread, which do not depend on what else the machine is doing."""
        headers = [(name, (start + fill * length)[:length]) for name in names]
        begin = time.thread_time()
        parse_headers(headers, NOW)
        return time.thread_time() - begin

    short, long = (min(cpu_s(length) for _ in range(3)) for length in (500, 4000))
    assert long <= 24 * short + 0.002  # 8 times is linear, 64 times quadratic


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
