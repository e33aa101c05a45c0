"""What clients are told: the rate limit fields, Retry-After, and the refusals, read as a strict client reads them."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, Decision, InvalidConfiguration, Limit, Limiter
from headgate.algorithms import ALGORITHMS, NEVER
from headgate.errors import HeadgateError
from headgate.failure import local_limit
from headgate.gate.responses import Rejection, RejectionInfo, ResponseBuilder
from headgate.leases import HoldTimes
from headgate.policy.loader import read
from headgate.policy.model import AnswerSettings, Policy, Rule
from headgate.testing import FakeClock
from support.sites import policy_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.algorithms import Verdict
    from headgate.gate.responses import RejectionBody
    from support.sites import MakeSite

SECOND = 1_000_000
DAY = 86_400 * SECOND
NOW = 1_763_251_200 * SECOND

PER_IP = Limit(1000, timedelta(minutes=1), name="per-ip")
SEARCH = Limit(10, timedelta(seconds=1), burst=50, name="search")
EXPORTS = Limit(1000, timedelta(days=30), algorithm="fixed_window", name="exports")
REPORTS = Limit(5, timedelta(seconds=60), algorithm="concurrency", name="reports")

X_FIELDS = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]
IETF_FIELDS = ["ratelimit-policy", "ratelimit"]

TYPES = "https://iana.org/assignments/http-problem-types#"


def fields(
    *judged: tuple[Limit, Verdict],
    now_us: int = NOW,
    settings: AnswerSettings | None = None,
    unit: str = "requests",
    costs: Sequence[int] | None = None,
) -> dict[str, str]:
    limits, verdicts = zip(*judged, strict=True) if judged else ((), ())
    description = ResponseBuilder(settings or AnswerSettings()).header_template(limits, [unit] * len(limits), costs)
    return as_text(description.headers(verdicts, now_us))


def as_text(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The fields by name, each of which may stand only once, in the bytes that HTTP allows."""
    for name, value in headers:
        assert re.fullmatch(rb"[a-z-]+", name)
        assert re.fullmatch(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", value), value
    named = {name.decode(): value.decode() for name, value in headers}
    assert len(named) == len(headers)
    return named


def denial(*judged: tuple[Limit, Verdict], at_us: int = NOW, degraded: str | None = None) -> Decision:
    keys = tuple(limit.by("sk_secret", "203.0.113.9") for limit, _ in judged)
    return Decision(False, keys, tuple(verdict for _, verdict in judged), degraded=degraded, at_us=at_us)


def refuse(decision: Decision, settings: AnswerSettings | None = None, body: RejectionBody | None = None) -> Rejection:
    answers = ResponseBuilder(settings or AnswerSettings(), body=body)
    limits = [key.limit for key in decision.keys]
    return answers.denied(decision, answers.header_template(limits, ["requests"] * len(limits)))


def body_of(refusal: Rejection) -> dict[str, Any]:
    headers = as_text(refusal.headers)
    assert headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = json.loads(refusal.body)
    assert body["status"] == refusal.status
    assert body["detail"] == body["message"]
    assert str(body["retry_after_seconds"]) == headers.get("retry-after", "None")
    return body


# ------------------------------------------- structured fields, read strictly


def parse_list(text: str) -> list[tuple[str | int, dict[str, str | int]]]:
    """A List of Strings and Integers with Parameters, by the algorithms of RFC 9651, section 4.2."""
    assert text.isascii(), text
    text = text.strip(" ")
    members = []
    while text:
        value, text = parse_bare_item(text)
        parameters: dict[str, str | int] = {}
        while text.startswith(";"):
            key = re.match(r"; *([a-z*][a-z0-9_.*-]*)=", text)
            assert key, f"no parameter with a value at {text!r}"
            parameters[key[1]], text = parse_bare_item(text[key.end() :])
        members.append((value, parameters))
        text = text.lstrip(" \t")
        if text:
            assert text[0] == ",", f"no comma at {text!r}"
            text = text[1:].lstrip(" \t")
            assert text, "a comma at the end"
    return members


def parse_bare_item(text: str) -> tuple[str | int, str]:
    if number := re.match(r"-?[0-9]+", text):
        assert len(number[0].lstrip("-")) <= 15, f"{number[0]} is too long for an Integer"
        assert not text[number.end() :].startswith("."), "a Decimal"
        return int(number[0]), text[number.end() :]
    assert text.startswith('"'), f"neither a String nor an Integer at {text!r}"
    position, value = 1, ""
    while (character := text[position]) != '"':
        if character == "\\":
            position += 1
            character = text[position]
            assert character in '"\\', f"\\{character} is no escape"
        assert "\x20" <= character <= "\x7e"
        value += character
        position += 1
    return value, text[position + 1 :]


@pytest.mark.parametrize(
    "text", ['"a', '"a" "b"', '"a",', '"a\\n"', '"a";r=1.5', '"a";r=1000000000000000', '"a";R=1', "a", '"a";r']
)
def test_parser_of_these_tests_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        parse_list(text)


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "leaky_bucket", "fixed_window"])
@pytest.mark.parametrize(("quota", "period"), [(10, 60), (3, 1), (7, 3600), (1, 5)])
def test_where_nothing_is_left_t_is_when_there_is_more(algorithm: str, quota: int, period: int) -> None:
    """As the next request is told, which comes at the same moment and is denied."""
    limit = Limit(quota, timedelta(seconds=period), algorithm=algorithm, name="x")
    limiter = Limiter(clock=FakeClock(1_763_251_200_000_000))
    last, denied = limiter.check(limit.by("ada"), cost=quota), limiter.check(limit.by("ada"))
    [(_, left), (_, told)] = [parse_list(fields((limit, each.verdicts[0]))["ratelimit"])[0] for each in (last, denied)]
    assert (left["r"], left["t"]) == (0, -(-denied.retry_after_us // SECOND)) == (0, told["t"])


@pytest.mark.parametrize("portion", [Fraction(1, 15), Fraction(1, 2), Fraction(1, 1000)])
def test_no_part_of_a_limit_that_a_node_goes_by_alone_has_more_before_now(portion: Fraction) -> None:
    """Its numbers are not those that are described: less at once, in a shorter time."""
    limit = Limit(100, timedelta(minutes=1), name="x")
    own, limiter = local_limit(limit, portion), Limiter(clock=FakeClock())
    last = limiter.check(own.by("ada"), cost=own.capacity)
    [(_, told)] = parse_list(fields((limit, last.verdicts[0]))["ratelimit"])
    assert told["r"] == 0
    assert 0 <= told["t"] <= -(-last.reset_after_us // SECOND)


# --------------------------------------------------------------- X-RateLimit


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        pytest.param([(PER_IP, (999, 0, 60_000, 0))], (1000, 999, 1), id="one limit"),
        pytest.param([(PER_IP, (999, 0, 0, 0))], (1000, 999, 0), id="as new: now"),
        pytest.param([(PER_IP, (0, 0, SECOND, 0))], (1000, 0, 1), id="a whole second stays"),
        pytest.param([(PER_IP, (0, 0, SECOND + 1, 0))], (1000, 0, 2), id="and a microsecond more is the next"),
        pytest.param([(SEARCH, (50, 0, 0, 0))], (10, 50, 0), id="the quota, not the burst"),
        pytest.param(
            [(PER_IP, (100, 0, 54 * SECOND, 0)), (SEARCH, (6, 0, 2 * SECOND, 0))],
            (10, 6, 2),
            id="what passes now, not the share",
        ),
        pytest.param(
            [(PER_IP, (0, 0, 60 * SECOND, 0)), (EXPORTS, (0, 0, DAY, 0))], (1000, 0, 86_400), id="equal: the slower"
        ),
        pytest.param(
            [(SEARCH, (0, 100_000, 5 * SECOND, 0)), (PER_IP, (3, 40_000, 60 * SECOND, 0))],
            (10, 0, 5),
            id="longest wait",
        ),
        pytest.param(
            [(PER_IP, (0, 0, 60 * SECOND, 0)), (SEARCH, (20, 1, 3 * SECOND, 0))],
            (10, 20, 3),
            id="who denied comes first",
        ),
        pytest.param(
            [(PER_IP, (0, 60 * SECOND, 60 * SECOND, 0)), (SEARCH, (50, NEVER, 0, 0))],
            (10, 50, 0),
            id="never is longest",
        ),
        pytest.param([(REPORTS, (2, 0, 60 * SECOND, 0))], (5, 2, 60), id="concurrency"),
    ],
)
def test_x_ratelimit_speaks_of_the_tightest_limit(
    judged: list[tuple[Limit, Verdict]], expected: tuple[int, int, int]
) -> None:
    for order in (judged, judged[::-1]):
        told = fields(*order)
        limit, remaining, reset = (int(told[name]) for name in X_FIELDS)
        assert (limit, remaining, reset - NOW // SECOND) == expected


def test_limits_of_different_units_are_compared_by_the_requests_that_they_admit() -> None:
    """A chat request costs 1 of 300 requests, of which 297 are left, and 500 of 100,000 tokens, of which 999 are."""
    requests = Limit(300, timedelta(minutes=1), name="requests")
    tokens = Limit(100_000, timedelta(days=1), name="tokens")
    judged = [(requests, (297, 0, SECOND, 0)), (tokens, (999, 0, DAY, 0))]
    for order, costs in ((judged, (1, 500)), (judged[::-1], (500, 1))):
        told = fields(*order, costs=costs)
        assert [told[name] for name in X_FIELDS[:2]] == ["100000", "999"]
    free = fields(*judged, costs=(0, 500))
    assert free["x-ratelimit-limit"] == "100000", "a limit on which the request costs nothing never denies it"


def test_of_two_equal_verdicts_the_limit_that_denies_first_is_named() -> None:
    same = (20, 0, SECOND, 0)
    told = fields((PER_IP, same), (SEARCH, same), costs=(1, 5))
    assert told["x-ratelimit-limit"] == str(SEARCH.quota)


def test_instant_of_the_reset_is_rounded_up_not_the_span() -> None:
    assert fields((PER_IP, (0, 0, 300_000, 0)), now_us=NOW + 600_000)["x-ratelimit-reset"] == str(NOW // SECOND + 1)
    assert fields((PER_IP, (0, 0, 300_000, 0)), now_us=NOW + 700_001)["x-ratelimit-reset"] == str(NOW // SECOND + 2)


# ------------------------------------------------- RateLimit, RateLimit-Policy


@pytest.mark.parametrize(
    ("limit", "unit", "expected"),
    [
        (PER_IP, "requests", '"per-ip";q=1000;w=60'),
        (PER_IP, "tokens", '"per-ip";q=1000;w=60;qu="tokens"'),
        (SEARCH, "requests", '"search";q=10;w=1'),
        (EXPORTS, "content-bytes", '"exports";q=1000;w=2592000;qu="content-bytes"'),
        (REPORTS, "requests", '"reports";q=5;qu="concurrent-requests"'),
        (REPORTS, "seats", '"reports";q=5;qu="seats"'),
        (Limit(5, timedelta(milliseconds=100), name="x"), "requests", '"x";q=50;w=1'),
        (Limit(5, timedelta(milliseconds=300), name="x"), "requests", '"x";q=16;w=1'),
        (Limit(3, timedelta(milliseconds=1500), name="x"), "requests", '"x";q=4;w=2'),
        (Limit(1, timedelta(seconds=59, microseconds=1), name="x"), "requests", '"x";q=1;w=60'),
        (Limit(2**53 // 2 - 1, timedelta(microseconds=1), name="x"), "requests", '"x";q=999999999999999;w=1'),
        (Limit(1, timedelta(seconds=1), name='say "a\\b" 100%d'), "requests", r'"say \"a\\b\" 100%d";q=1;w=1'),
        (Limit(1, timedelta(seconds=1), name=" "), 'a"\\', r'" ";q=1;w=1;qu="a\"\\"'),
    ],
)
def test_ratelimit_policy_is_a_quota_per_whole_seconds(limit: Limit, unit: str, expected: str) -> None:
    told = fields((limit, (1, 0, 0, 0)), unit=unit)
    assert told["ratelimit-policy"] == expected
    assert [parse_list(told[name])[0][0] for name in IETF_FIELDS] == [limit.name] * 2


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        pytest.param((999, 0, 0, 0), "r=999;t=60", id="as new: no faster than the policy"),
        pytest.param((999, 0, 1, 0), "r=999;t=60", id="nearly: no faster than the policy"),
        pytest.param((50, 0, 30 * SECOND, 0), "r=50;t=30", id="allowed: until it is as new"),
        pytest.param((50, 0, 30 * SECOND + 1, 0), "r=50;t=31", id="rounded up"),
        pytest.param((500, 0, 30 * SECOND, 0), "r=500;t=30", id="exactly as fast as the policy"),
        pytest.param((501, 0, 30 * SECOND, 0), "r=501;t=31", id="one more takes longer"),
        pytest.param((0, 0, 1, 0), "r=0;t=1", id="nothing left: a microsecond is a second"),
        pytest.param((3, SECOND + 1, 30 * SECOND, 0), "r=3;t=2", id="denied: until it passes"),
        pytest.param((3, NEVER, 30 * SECOND, 0), "r=3;t=30", id="unsatisfiable: until it is as new"),
        pytest.param((0, 30 * DAY, 30 * DAY, 0), "r=0;t=2592000", id="thirty days"),
        pytest.param((10**15, 0, 0, 0), "r=999999999999999;t=60000000000000", id="more than a field can say"),
    ],
)
def test_ratelimit_says_what_is_left_and_when_more_comes(verdict: Verdict, expected: str) -> None:
    assert fields((PER_IP, verdict))["ratelimit"] == f'"per-ip";{expected}'


limits_of_any_kind = st.builds(
    lambda quota, milliseconds, algorithm: Limit(
        quota, timedelta(milliseconds=milliseconds), algorithm=algorithm, name="x"
    ),
    st.integers(1, 5000),
    st.integers(1, 100_000),
    st.sampled_from(["token_bucket", "gcra", "leaky_bucket", "sliding_window", "sliding_log"]),
)


@given(limits_of_any_kind, st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 20)), min_size=1, max_size=20))
def test_pacing_by_r_over_t_never_exceeds_the_policy(limit: Limit, requests: list[tuple[int, int]]) -> None:
    clock = FakeClock(NOW)
    limiter = Limiter(clock=clock)
    for later_us, cost in requests:
        clock.set_us(clock.now_us() + later_us)
        told = fields((limit, limiter.check(limit.by("ada"), cost=cost).verdicts[0]))
        [(_, policy)], [(_, left)] = parse_list(told["ratelimit-policy"]), parse_list(told["ratelimit"])
        if left["r"]:
            assert Fraction(left["r"], left["t"]) <= Fraction(policy["q"], policy["w"])


def test_t_of_a_fixed_window_is_its_end() -> None:
    limit = Limit(1000, timedelta(minutes=1), algorithm="fixed_window", name="x")
    clock = FakeClock(1_763_251_200_000_000 + 58 * SECOND)
    limiter = Limiter(clock=clock)
    assert fields((limit, limiter.check(limit.by("ada")).verdicts[0]))["ratelimit"] == '"x";r=999;t=2'
    assert fields((limit, limiter.peek(limit.by("bob")).verdicts[0]))["ratelimit"] == '"x";r=1000;t=60'


def test_draft_6_has_a_field_for_each_number_of_the_limit_that_denies_first() -> None:
    told = fields(
        (PER_IP, (50, 0, 57 * SECOND, 0)),
        (REPORTS, (4, 0, SECOND, 0)),
        (SEARCH, (6, 0, 1, 0)),
        costs=(1, 1, 2),
        settings=AnswerSettings(x_ratelimit=False, draft=6),
    )
    assert told == {
        "ratelimit-limit": "10",
        "ratelimit-policy": "1000;w=60, 10;w=1",
        "ratelimit-remaining": "6",
        "ratelimit-reset": "1",
    }


def test_all_limits_are_listed_in_order() -> None:
    told = fields((PER_IP, (50, 0, 57 * SECOND, 0)), (REPORTS, (4, 0, SECOND, 0)), (EXPORTS, (9, 0, DAY, 0)))
    assert parse_list(told["ratelimit-policy"]) == [
        ("per-ip", {"q": 1000, "w": 60}),
        ("reports", {"q": 5, "qu": "concurrent-requests"}),
        ("exports", {"q": 1000, "w": 2_592_000}),
    ]
    assert parse_list(told["ratelimit"]) == [
        ("per-ip", {"r": 50, "t": 57}),
        ("reports", {"r": 4, "t": 1}),
        ("exports", {"r": 9, "t": 86_400}),
    ]


@pytest.mark.parametrize("x_ratelimit", [True, False])
@pytest.mark.parametrize("ratelimit", [True, False])
def test_each_family_of_fields_can_be_left_out(x_ratelimit: bool, ratelimit: bool) -> None:
    settings = AnswerSettings(x_ratelimit=x_ratelimit, ratelimit=ratelimit)
    wanted = X_FIELDS * x_ratelimit + IETF_FIELDS * ratelimit
    denied = (PER_IP, (0, SECOND, SECOND, 0))
    assert list(fields((PER_IP, (1, 0, 0, 0)), settings=settings)) == wanted
    assert [*as_text(refuse(denial(denied), settings=settings).headers)] == [
        *wanted,
        *("retry-after", "cache-control", "content-type", "content-length"),
    ]


def test_no_limits_give_no_headers() -> None:
    assert fields() == {}


@pytest.mark.parametrize("text", ["", "to\r\nkens", "tökens", "a\tb", "\x7f"])
def test_what_cannot_stand_in_a_header_never_gets_there(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=re.escape(repr(text))):
        fields((PER_IP, (1, 0, 0, 0)), unit=text)
    with pytest.raises(ValueError, match="printable ASCII"):
        Limit(1, timedelta(seconds=1), name=text)


@pytest.mark.parametrize("verdicts", [[(1, 0, 0, 0)], [(1, 0, 0, 0)] * 3])
def test_verdicts_of_other_limits_are_an_error(verdicts: list[Verdict]) -> None:
    description = ResponseBuilder(AnswerSettings()).header_template([PER_IP, SEARCH], ["requests"] * 2)
    with pytest.raises((IndexError, TypeError)):
        description.headers(verdicts, NOW)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wait_us", "jitter", "chance", "expected"),
    [
        (1, 0, 0.0, 1),
        (SECOND, 0, 0.0, 1),
        (SECOND + 1, 0, 0.0, 2),
        (30 * DAY, 0, 0.0, 2_592_000),
        (SECOND, 10, 0.0, 1),
        (SECOND, 10, 0.5, 6),
        (SECOND, 10, 0.999_999_999, 11),
        (SECOND + 2, 10, 0.999_999_999, 12),
        (300_000, 0.25, 0.999, 1),
    ],
)
def test_retry_after_is_whole_seconds_and_never_early(
    wait_us: int, jitter: float, chance: float, expected: int
) -> None:
    answers = ResponseBuilder(AnswerSettings(jitter=timedelta(seconds=jitter)), chance=lambda: chance)
    decision = denial((PER_IP, (0, wait_us, wait_us, 0)))
    description = answers.header_template([PER_IP], ["requests"])
    for refusal in (
        answers.denied(decision, description),
        answers.unavailable(decision),
        answers.blocked(wait_us),
    ):
        assert as_text(refusal.headers)["retry-after"] == str(expected)
        assert body_of(refusal)["retry_after_seconds"] == expected


@pytest.mark.parametrize(
    ("bound_us", "expected_us", "seconds"),
    [(60 * SECOND, SECOND, 1), (60 * SECOND, 7_200_000, 8), (3 * SECOND, 20 * SECOND, 3), (400_000, SECOND, 1)],
)
def test_denial_by_a_concurrency_limit_reports_the_expected_wait(bound_us: int, expected_us: int, seconds: int) -> None:
    """And not when the leases would expire, which is the least that is certain."""
    streams = Limit(5, timedelta(minutes=1), algorithm="concurrency", name="streams")
    asked: list[tuple[str, int]] = []

    def expected_wait_us(limit: Limit, places: int) -> int:
        asked.append((limit.name, places))
        return expected_us

    answers = ResponseBuilder(AnswerSettings(), expected_wait_us=expected_wait_us)
    decision = denial((streams, (2, bound_us, 60 * SECOND, 0)))._replace(cost=5)
    refusal = answers.denied(decision, answers.header_template([streams], ["requests"]))
    headers = as_text(refusal.headers)
    assert (headers["retry-after"], body_of(refusal)["retry_after_seconds"]) == (str(seconds), seconds)
    assert parse_list(headers["ratelimit"]) == [("streams", {"r": 2, "t": seconds})]
    assert int(headers["x-ratelimit-reset"]) == -(-(decision.at_us + min(bound_us, expected_us)) // SECOND)
    assert asked == [("streams", 3)]
    assert decision.retry_after_us == bound_us


def test_limits_that_are_no_concurrency_limits_keep_their_exact_wait() -> None:
    streams = Limit(5, timedelta(minutes=1), algorithm="concurrency", name="streams")
    answers = ResponseBuilder(AnswerSettings(), expected_wait_us=lambda limit, places: SECOND)
    decision = denial((PER_IP, (0, 42 * SECOND, 42 * SECOND, 0)), (streams, (0, 60 * SECOND, 60 * SECOND, 0)))
    refusal = answers.denied(decision, answers.header_template([PER_IP, streams], ["requests"] * 2))
    assert as_text(refusal.headers)["retry-after"] == "42"


def test_expected_wait_follows_recent_hold_times() -> None:
    streams = Limit(4, timedelta(minutes=10), algorithm="concurrency", name="streams")
    times = HoldTimes()
    assert times.expected_wait_us(streams) == 2 * SECOND
    times.record(streams, 0.5)
    assert times.expected_wait_us(streams) == SECOND
    for _ in range(50):
        times.record(streams, 40.0)
    assert times.expected_wait_us(streams) == pytest.approx(10 * SECOND, rel=0.01)
    assert times.expected_wait_us(streams, places=3) == pytest.approx(30 * SECOND, rel=0.01)
    for number in range(2 * HoldTimes.MAX_LIMITS):
        times.record(Limit(4, timedelta(minutes=1), algorithm="concurrency", name=f"other-{number}"), 9.0)
    assert len(times._means) == HoldTimes.MAX_LIMITS
    assert times.expected_wait_us(streams) == 2 * SECOND


def test_both_limiters_observe_how_long_leases_are_held() -> None:
    streams = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="streams")
    clock = FakeClock()

    async def hold() -> int:
        limiter = AsyncLimiter(clock=clock)
        async with limiter.hold(streams.by("ada")):
            clock.advance(3)
        return limiter.engine.hold_times.expected_wait_us(streams)

    limiter = Limiter(clock=clock)
    with limiter.hold(streams.by("ada")):
        clock.advance(3)
        with limiter.hold(streams.by("ada")) as denied:
            clock.advance(30)
        assert not denied.allowed
    assert limiter.engine.hold_times.expected_wait_us(streams) == 33 * SECOND, "a denied request holds nothing"
    assert asyncio.run(hold()) == 3 * SECOND


def test_jitter_that_would_be_too_early_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match=r"jitter -1 day, 23:59:59 .* use 0 or more"):
        ResponseBuilder(AnswerSettings(jitter=timedelta(seconds=-1)))


def test_denial_names_what_was_violated_and_when_to_come_back() -> None:
    decision = denial((PER_IP, (0, 28 * SECOND, 60 * SECOND, 0)), (EXPORTS, (7, 0, DAY, 0)))
    refusal = refuse(decision, settings=AnswerSettings(doc_url="https://api.example.com/limits"))
    sentence = 'The limit "per-ip" has been reached. Try again in 28 seconds.'
    assert refusal.status == 429
    assert json.loads(refusal.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Quota Exceeded",
        "status": 429,
        "detail": sentence,
        "violated-policies": ["per-ip"],
        "error": "rate_limit_exceeded",
        "message": sentence,
        "retry_after_seconds": 28,
        "doc_url": "https://api.example.com/limits",
    }
    assert as_text(refusal.headers) == {
        "x-ratelimit-limit": "1000",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(NOW // SECOND + 60),
        "ratelimit-policy": '"per-ip";q=1000;w=60, "exports";q=1000;w=2592000',
        "ratelimit": '"per-ip";r=0;t=28, "exports";r=7;t=86400',
        "retry-after": "28",
        "cache-control": "no-store",
        "content-type": "application/problem+json",
        "content-length": str(len(refusal.body)),
    }


@pytest.mark.parametrize(
    ("judged", "message", "retry"),
    [
        ([(PER_IP, 1)], 'The limit "per-ip" has been reached. Try again in 1 second.', 1),
        ([(PER_IP, 119 * SECOND)], 'The limit "per-ip" has been reached. Try again in 119 seconds.', 119),
        ([(PER_IP, 120 * SECOND)], 'The limit "per-ip" has been reached. Try again in 2 minutes.', 120),
        ([(PER_IP, 121 * SECOND)], 'The limit "per-ip" has been reached. Try again in 3 minutes.', 121),
        ([(EXPORTS, 7_201 * SECOND)], 'The limit "exports" has been reached. Try again in 3 hours.', 7_201),
        ([(EXPORTS, 30 * DAY)], 'The limit "exports" has been reached. Try again in 30 days.', 2_592_000),
        (
            [(PER_IP, SECOND), (SEARCH, 3 * SECOND)],
            'The limits "per-ip" and "search" have been reached. Try again in 3 seconds.',
            3,
        ),
        (
            [(PER_IP, SECOND), (SEARCH, 3 * SECOND), (REPORTS, 9 * SECOND)],
            'The limits "per-ip", "search" and "reports" have been reached. Try again in 9 seconds.',
            9,
        ),
        (
            [(PER_IP, SECOND), (SEARCH, NEVER)],
            'This request costs more than the limit "search" can ever allow: waiting does not help.',
            None,
        ),
        ([], "A limit has been reached. Try again in 1 second.", 1),
    ],
)
def test_message_is_for_people(judged: list[tuple[Limit, int]], message: str, retry: int | None) -> None:
    body = body_of(refuse(denial(*((limit, (0, wait_us, 0, 0)) for limit, wait_us in judged))))
    assert (body["message"], body["retry_after_seconds"]) == (message, retry)
    assert body.get("violated-policies", []) == [limit.name for limit, _ in judged]


@pytest.mark.parametrize(
    ("refusal", "status", "title", "error", "message", "retry"),
    [
        pytest.param(
            ResponseBuilder(AnswerSettings()).unavailable(),
            *(503, "Temporary Reduced Capacity", "limiter_unavailable"),
            *("This request cannot be checked right now. Try again in 1 second.", 1),
            id="store away",
        ),
        pytest.param(
            ResponseBuilder(AnswerSettings()).unavailable(
                denial((PER_IP, (0, 5 * SECOND, 5 * SECOND, 0)), degraded="closed")
            ),
            *(503, "Temporary Reduced Capacity", "limiter_unavailable"),
            *("This request cannot be checked right now. Try again in 5 seconds.", 5),
            id="store away for a while",
        ),
        pytest.param(
            ResponseBuilder(AnswerSettings()).blocked(),
            *(403, "Forbidden", "blocked", "Access is blocked.", None),
            id="blocked",
        ),
        pytest.param(
            ResponseBuilder(AnswerSettings()).blocked(2 * 3_600 * SECOND),
            *(403, "Forbidden", "blocked", "Access is blocked. Try again in 2 hours.", 7_200),
            id="blocked for a while",
        ),
    ],
)
def test_other_rejections_mention_no_limits(
    refusal: Rejection, status: int, title: str, error: str, message: str, retry: int | None
) -> None:
    assert body_of(refusal) == {
        "type": f"{TYPES}temporary-reduced-capacity" if status == 503 else "about:blank",
        "title": title,
        "status": status,
        "detail": message,
        "error": error,
        "message": message,
        "retry_after_seconds": retry,
        "doc_url": None,
    }
    assert refusal.status == status
    assert as_text(refusal.headers) == ({} if retry is None else {"retry-after": str(retry)}) | {
        "cache-control": "no-store",
        "content-type": "application/problem+json",
        "content-length": str(len(refusal.body)),
    }


def test_rejections_reveal_neither_client_nor_failure() -> None:
    decision = denial((SEARCH, (0, SECOND, SECOND, 0)), degraded="closed: cannot reach Redis: redis-7.internal:6379")
    for refusal in (refuse(decision), ResponseBuilder(AnswerSettings()).unavailable(decision)):
        told = repr(refusal).lower()
        assert not [word for word in ("secret", "203.0.113.9", "redis", "internal", "closed", "6379") if word in told]


# ---------------------------------------------------------- bodies of one's own


@pytest.mark.parametrize(
    ("content", "content_type", "sent"),
    [
        (b"\x00\xff", None, (b"\x00\xff", "application/octet-stream")),
        ("zu viel: größer", None, ("zu viel: größer".encode(), "text/plain; charset=utf-8")),
        ({"code": "größer"}, None, (b'{"code": "gr\\u00f6\\u00dfer"}', "application/json")),
        ("<p>slow down</p>", "text/html", (b"<p>slow down</p>", "text/html")),
        ({"code": 7}, "application/vnd.api+json", (b'{"code": 7}', "application/vnd.api+json")),
    ],
)
def test_hook_replaces_the_body_and_nothing_else(
    content: bytes | str | dict[str, Any], content_type: str | None, sent: tuple[bytes, str]
) -> None:
    decision = denial((PER_IP, (0, SECOND, SECOND, 0)))
    usual, refusal = refuse(decision), refuse(decision, body=lambda facts: (content, content_type))
    assert refusal.body == sent[0]
    changed = {"content-type": sent[1], "content-length": str(len(sent[0]))}
    assert as_text(refusal.headers) == as_text(usual.headers) | changed


def test_hook_receives_the_rejection_info() -> None:
    seen: list[RejectionInfo] = []

    def body(facts: RejectionInfo) -> tuple[str, None]:
        seen.append(facts)
        return facts.message, None

    answers = ResponseBuilder(AnswerSettings(), body=body)
    decision = denial((PER_IP, (0, SECOND, SECOND, 0)), (SEARCH, (1, 0, SECOND, 0)))
    refusals = [
        answers.denied(decision, answers.header_template([PER_IP, SEARCH], ["requests"] * 2)),
        answers.unavailable(decision),
        answers.blocked(),
    ]
    reached = 'The limit "per-ip" has been reached. Try again in 1 second.'
    unchecked = "This request cannot be checked right now. Try again in 1 second."
    assert seen == [
        RejectionInfo(429, "rate_limit_exceeded", reached, 1, ("per-ip",), decision),
        RejectionInfo(503, "limiter_unavailable", unchecked, 1, (), decision),
        RejectionInfo(403, "blocked", "Access is blocked.", None),
    ]
    assert [refusal.body.decode() for refusal in refusals] == [facts.message for facts in seen]


def broken(facts: RejectionInfo) -> Any:
    raise RuntimeError("no template")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(broken, id="raises"),
        pytest.param(lambda facts: None, id="gives nothing"),
        pytest.param(lambda facts: ({"when": object()}, None), id="no JSON"),
        pytest.param(lambda facts: ({"when": float("nan")}, None), id="no number of JSON"),
        pytest.param(lambda facts: ("\ud800", None), id="no text"),
        pytest.param(lambda facts: ("x", "text/html\r\nset-cookie: a=b"), id="a header in a header"),
        pytest.param(lambda facts: ("x", "text/höml"), id="not ASCII"),
    ],
)
def test_hook_that_fails_is_logged_once_and_the_usual_body_goes_out(
    body: Callable[[RejectionInfo], Any], caplog: pytest.LogCaptureFixture
) -> None:
    decision = denial((PER_IP, (0, SECOND, SECOND, 0)))
    answers = ResponseBuilder(AnswerSettings(), body=body)
    description = answers.header_template([PER_IP], ["requests"])
    with caplog.at_level(logging.ERROR, "headgate"):
        assert [answers.denied(decision, description) for _ in range(3)] == [refuse(decision)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "refusal_body failed for status 429; using the default body"
    ]
    assert caplog.records[0].exc_info


@pytest.mark.parametrize(
    ("names", "degraded", "kind"),
    [
        (["a"], None, "quota-exceeded"),
        (["a"], "local", "temporary-reduced-capacity"),
        (["a (unknown keys)"], None, "abnormal-usage-detected"),
        (["a (unknown keys)", "a"], None, "quota-exceeded"),
    ],
)
def test_problem_type_says_why_a_limit_denied(names: list[str], degraded: str | None, kind: str) -> None:
    """A share of the limit while the store is away; many unknown API keys from one address; or the client itself."""
    limits = [Limit(1, timedelta(minutes=1), name=name) for name in names]
    refusal = refuse(denial(*[(limit, (0, SECOND, SECOND, 0)) for limit in limits], degraded=degraded))
    assert (refusal.status, body_of(refusal)["type"]) == (429, f"{TYPES}{kind}")
    assert body_of(refusal)["violated-policies"] == names


# -------------------------------------------------------------- whatever comes

names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=100)
spans = st.integers(0, 3 * SECOND) | st.integers(0, 3_660 * DAY)
quotas = st.integers(1, 1000) | st.integers(1, 2**51)


@st.composite
def judgements(draw: st.DrawFn) -> tuple[Limit, Verdict]:
    period = timedelta(microseconds=draw(st.integers(1, 3 * SECOND) | st.integers(1, 3_660 * DAY)))
    algorithm = draw(st.sampled_from(["fixed_window", "concurrency"]))
    limit = Limit(draw(quotas), period, algorithm=algorithm, name=draw(names))
    return limit, (draw(st.integers(0, limit.capacity)), draw(st.just(NEVER) | st.just(0) | spans), draw(spans), 0)


@given(st.lists(judgements(), min_size=1, max_size=4), st.integers(0, 2**52), spans, names)
def test_any_decision_makes_fields_that_can_be_read_and_are_true(
    judged: list[tuple[Limit, Verdict]], now_us: int, jitter_us: int, unit: str
) -> None:
    answers = ResponseBuilder(AnswerSettings(jitter=timedelta(microseconds=jitter_us)))
    limits, decision = [limit for limit, _ in judged], denial(*judged, at_us=now_us)
    refusal = answers.denied(decision, answers.header_template(limits, [unit] * len(limits)))
    told, body = as_text(refusal.headers), body_of(refusal)

    policies, states = parse_list(told["ratelimit-policy"]), parse_list(told["ratelimit"])
    for (limit, verdict), (name, policy), (same_name, state) in zip(judged, policies, states, strict=True):
        remaining, retry_us, reset_us, _ = verdict
        assert name == same_name == limit.name
        assert policy.keys() - {"qu"} == ({"q"} if limit.algorithm == "concurrency" else {"q", "w"})
        if limit.algorithm != "concurrency":
            seconds, told_quota = int(policy["w"]), int(policy["q"])
            assert 0 <= seconds * SECOND - limit.period_us < SECOND
            assert told_quota * limit.period_us <= limit.quota * seconds * SECOND
            assert told_quota >= min(limit.quota, 10**15 - 1)
        assert state["r"] == min(remaining, 10**15 - 1)
        wait_us = retry_us if retry_us > 0 else reset_us
        if wait_us or not remaining or limit.algorithm == "concurrency":
            assert 0 <= int(state["t"]) * SECOND - wait_us < SECOND
        else:
            assert state["t"] == -(-int(state["r"]) * int(policy["w"]) // int(policy["q"]))

    assert body["violated-policies" if decision.denied_by else "status"] == ([*decision.denied_by] or 429)
    if decision.retry_after_us is None:
        assert "retry-after" not in told
    else:
        late_us = int(told["retry-after"]) * SECOND - decision.retry_after_us
        assert 0 <= late_us < jitter_us + SECOND or told["retry-after"] == "1"
    assert (told["x-ratelimit-limit"], int(told["x-ratelimit-remaining"]), int(told["x-ratelimit-reset"])) in [
        (str(limit.quota), remaining, -(-(now_us + reset_us) // SECOND))
        for limit, (remaining, _, reset_us, _) in judged
    ]


@given(
    st.sampled_from(list(ALGORITHMS)),
    st.integers(1, 20),
    st.integers(1, 5 * SECOND) | st.just(30 * DAY),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3 * SECOND)), min_size=4, max_size=12),
)
def test_waiting_for_retry_after_succeeds(
    algorithm: str, quota: int, period_us: int, requests: list[tuple[int, int]]
) -> None:
    clock = FakeClock(NOW)
    limiter, limit = Limiter(clock=clock), Limit(quota, timedelta(microseconds=period_us), algorithm=algorithm)
    for cost, pause_us in requests:
        clock.set_us(clock.now_us() + pause_us)
        decision = limiter.check(limit, cost=cost)
        if not decision.allowed:
            seconds = as_text(refuse(decision).headers).get("retry-after")
            assert (seconds is None) == (cost > quota)
            if seconds is not None:
                clock.advance(int(seconds))
                assert limiter.check(limit, cost=cost).allowed


def test_limit_names_cannot_inject_headers(make_site: MakeSite) -> None:
    for name in ("a\r\nset-cookie: x=1", "a\nb", "\0", "ä", ""):
        with pytest.raises(HeadgateError):
            Limit(1, timedelta(hours=1), name=name)
        with pytest.raises(HeadgateError):
            read(policy_json({"name": name, "by": "ip", "bucket": "1/hour"}))
    name = 'a", "b";q=9\\ %d %s %'
    site = make_site(Policy((Rule(name, Limit(1, timedelta(hours=1), name=name), ("ip",)),)))
    for status in (200, 429):
        answer = site.ask()
        assert answer.status == status
        assert answer.fields["ratelimit-policy"] == r'"a\", \"b\";q=9\\ %d %s %";q=1;w=3600'
        assert answer.fields["ratelimit"] == r'"a\", \"b\";q=9\\ %d %s %";r=0;t=3600'
    assert json.loads(answer.body)["violated-policies"] == [name]


SECRETS = ["sk_live_secret", "contract 4711", "Ada's label", "scraping", "127.0.0.1", "redis", "Traceback", "hmac:"]


@pytest.mark.parametrize(
    ("more", "store", "expected"),
    [
        ({}, "memory://", [200, 429]),
        ({"blocked": [{"api_key": "sk_live_secret", "reason": "scraping"}]}, "memory://", [403, 403]),
        ({"clients": [{"api_key": "sk_live_secret", "tier": "pro", "label": "Ada's label"}]}, "memory://", [200, 429]),
        (
            {"overrides": [{"api_key": "sk_live_secret", "limit": "a", "bucket": "1/day", "reason": "contract 4711"}]},
            "memory://",
            [200, 429],
        ),
        ({"on_failure": "closed"}, "redis://:sk_live_secret@127.0.0.1:1/0", [503, 503]),
        ({"on_failure": "open"}, "redis://:sk_live_secret@127.0.0.1:1/0", [200, 200]),
    ],
    ids=["denied", "blocked", "client", "override", "closed", "open"],
)
def test_responses_and_logs_contain_no_secrets(
    make_site: MakeSite, more: dict[str, Any], store: str, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    limit = {"name": "a", "by": "api_key", "bucket": "1/hour", "tiers": {"pro": "1/minute"}}
    site = make_site(policy_json(limit, **more), store, secret="sixteen bytes or more")
    answers = [site.ask(headers=[("x-api-key", "sk_live_secret")]) for _ in range(2)]
    assert [answer.status for answer in answers] == expected
    for answer in answers:
        told = " ".join(itertools.chain(*answer.lines)) + answer.body.decode()
        assert not [secret for secret in SECRETS if secret in told]
    assert "sk_live_secret" not in caplog.text


def test_retry_after_jitter_spreads_clients_and_is_never_early(make_item_site: MakeSite) -> None:
    """Row 43: all who are denied in one window would come back in the same second."""
    site = make_item_site(
        policy_json({"by": "ip", "bucket": "1/minute", "algorithm": "fixed_window"}, answers={"jitter": "30 seconds"})
    )
    site.ask("/items/1")
    waits = [int(site.ask("/items/1").fields["retry-after"]) for _ in range(200)]
    assert min(waits) >= 60
    assert max(waits) <= 90
    assert len(set(waits)) > 15
