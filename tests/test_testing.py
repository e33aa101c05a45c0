"""What users test their own apps with: limits that begin anew for each test, and gates that are out of the way."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Limit, Limiter
from headgate.adapters.functions import limited
from headgate.clock import SystemClock
from headgate.errors import InvalidInput, RequestDenied, StoreUnavailable
from headgate.gate.admission import UNLIMITED, Admission
from headgate.gate.gate import Gate
from headgate.policy.loader import read
from headgate.testing import DAY_US, FakeClock, FakeRequest, IsolatedLimits, isolated_limits, limits_off
from support.paths import DOCS, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

pytest_plugins = ["pytester"]

POLICY = read(
    """
    routes:
      - {path: /health, cost: 0}
    limits:
      - {name: per-ip, by: ip, bucket: 3/minute}
      - {name: login-ip, path: POST /login, by: ip, bucket: 2/minute}
      - {name: searches, path: /search, by: ip, bucket: 1/day, algorithm: fixed_window, shadow: true}
    blocked:
      - {ip: 203.0.113.66}
    """
)


def ask(gate: Gate, method: str, path: str, *, times: int = 1, peer: str = "203.0.113.9") -> list[bool]:
    return [gate.admit(FakeRequest(path, method, peer)).allowed for _ in range(times)]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate(POLICY)
    yield gate
    gate.close()


@pytest.fixture
def limits(gate: Gate) -> Iterator[IsolatedLimits]:
    with isolated_limits() as limits:
        yield limits


# ------------------------------------------------------------------ isolation


def test_block_counts_from_nothing_and_leaves_nothing_behind(gate: Gate) -> None:
    assert ask(gate, "GET", "/", times=2) == [True, True]
    with isolated_limits():
        assert ask(gate, "GET", "/", times=4) == [True, True, True, False]
    with isolated_limits():
        assert ask(gate, "GET", "/", times=4) == [True, True, True, False]
    assert ask(gate, "GET", "/", times=2) == [True, False], "the two from before still count, those of the blocks don't"


def test_time_stands_still_until_it_is_moved(gate: Gate, limits: IsolatedLimits) -> None:
    assert ask(gate, "GET", "/", times=4) == [True, True, True, False]
    limits.clock.advance(19.999999)
    assert ask(gate, "GET", "/") == [False]
    limits.clock.advance(0.000001)
    assert ask(gate, "GET", "/", times=2) == [True, False]


def test_clock_starts_today_at_the_beginning_of_every_window() -> None:
    with isolated_limits() as limits:
        assert limits.clock.now_us() % DAY_US == 0
        assert 0 <= SystemClock().now_us() - limits.clock.now_us() <= DAY_US
    with isolated_limits(start_us=7) as limits:
        assert limits.clock.now_us() == 7


def test_gates_that_are_made_inside_are_isolated_too(gate: Gate) -> None:
    with isolated_limits() as limits:
        late = Gate(POLICY)
        assert ask(late, "GET", "/", times=4) == [True, True, True, False]
        assert ask(gate, "GET", "/") == [True], "gates that share no store share no counters"
        limits.clock.advance(60)
        assert ask(late, "GET", "/") == [True]
    assert ask(late, "GET", "/", times=4) == [True, True, True, False], "it has its own store again"
    with isolated_limits():
        pass
    assert ask(late, "GET", "/") == [False]


def test_no_server_is_needed_where_the_app_counts_in_redis() -> None:
    gate = Gate(read("on_failure: closed\nlimits: [{name: per-ip, by: ip, bucket: 1/minute}]"), "redis://127.0.0.1:1/0")
    assert ask(gate, "GET", "/") == [False]
    with isolated_limits():
        assert ask(gate, "GET", "/", times=2) == [True, False]
    assert gate.admit(FakeRequest()).decision.degraded
    gate.close()


def test_all_is_put_back_even_if_the_test_fails(gate: Gate) -> None:
    seen: list[str] = []
    gate.on_decision = lambda request, _: seen.append(request.path)
    for block in (isolated_limits, limits_off):
        with pytest.raises(LookupError):
            ask_and_fail(block(), gate)
    assert ask(gate, "GET", "/after", times=4) == [True, True, True, False]
    assert seen == [*["/inside"] * 4, *["/after"] * 4], "the app's own function is told as always"


def ask_and_fail(block: AbstractContextManager[Any], gate: Gate) -> None:
    with block:
        ask(gate, "GET", "/inside", times=4)
        raise LookupError


def test_reset_forgets_counts_and_decisions_and_keeps_the_time(gate: Gate, limits: IsolatedLimits) -> None:
    ask(gate, "GET", "/", times=4)
    limits.clock.advance(1)
    now_us = limits.clock.now_us()
    limits.reset()
    assert (limits.decisions, limits.clock.now_us()) == ([], now_us)
    assert ask(gate, "GET", "/", times=4) == [True, True, True, False]


def test_blocks_can_stand_in_each_other(gate: Gate) -> None:
    with isolated_limits() as outer:
        ask(gate, "GET", "/", times=3)
        with isolated_limits() as inner:
            assert ask(gate, "GET", "/inner") == [True]
        with limits_off():
            assert ask(gate, "GET", "/off") == [True]
        assert ask(gate, "GET", "/") == [False]
        assert [passage.path for passage in inner.decisions] == ["/inner"]
        assert [passage.path for passage in outer.decisions] == ["/", "/", "/", "/inner", "/"]


# ------------------------------------------------------------------ limits that are off


def test_gates_that_are_off_count_nothing(gate: Gate) -> None:
    with limits_off():
        late = Gate(POLICY)
        for each in (gate, late):
            assert ask(each, "GET", "/", times=10) == [True] * 10
            assert ask(each, "GET", "/", peer="203.0.113.66") == [True], "nobody is blocked, either"
            assert each.admit(FakeRequest()) is UNLIMITED
    for each in (gate, late):
        assert ask(each, "GET", "/", times=4) == [True, True, True, False]


def test_costs_can_be_committed_where_nothing_is_counted() -> None:
    UNLIMITED.commit(5)
    UNLIMITED.commit(5, "tokens")
    assert not UNLIMITED.needs_finish


def test_gate_that_was_off_before_stays_off(gate: Gate) -> None:
    gate.is_on = False
    with limits_off():
        pass
    assert not gate.is_on


# ------------------------------------------------------------------ assertions


def test_isolated_limits_record_every_limited_request(gate: Gate, limits: IsolatedLimits) -> None:
    ask(gate, "POST", "/login", times=3)
    ask(gate, "GET", "/health")
    ask(gate, "GET", "/search", peer="203.0.113.7", times=2)
    ask(gate, "GET", "/", peer="203.0.113.66")
    told = [(each.method, each.path, each.allowed, each.denied_by, each.blocked) for each in limits.decisions]
    assert told == [
        ("POST", "/login", True, (), False),
        ("POST", "/login", True, (), False),
        ("POST", "/login", False, ("login-ip",), False),
        ("GET", "/search", True, (), False),
        ("GET", "/search", True, (), False),
        ("GET", "/", False, (), True),
    ]
    assert [each.would_be_denied_by for each in limits.decisions[3:5]] == [(), ("searches",)]
    assert isinstance(limits.decisions[0].admission, Admission)


def test_assertions_hold_where_they_should(gate: Gate, limits: IsolatedLimits) -> None:
    ask(gate, "POST", "/login")
    limits.assert_allowed()
    limits.assert_allowed(on="/login")
    ask(gate, "POST", "/login", times=2)
    limits.assert_denied_by("login-ip")
    limits.assert_denied_by()
    ask(gate, "GET", "/search")
    limits.assert_allowed(on="GET /search")
    limits.assert_denied_by("login-ip", on="POST /login")
    ask(gate, "POST", "/login")
    limits.assert_denied_by("login-ip", "per-ip")
    ask(gate, "GET", "/", peer="203.0.113.66")
    limits.assert_blocked()


UNRECORDED = "Requests to routes of cost 0 and to exempt views are not recorded"
FIRST_LOGIN = "POST /login was allowed: 1 left of login-ip (2 per minute, token_bucket)"
THIRD_LOGIN = "POST /login was denied by login-ip (2 per minute, token_bucket): 0 left, passes in 30 s"


@pytest.mark.parametrize(
    ("requests", "assertion", "told"),
    [
        ([], lambda it: it.assert_allowed(), f"no request was decided on; there were none at all. {UNRECORDED}"),
        (
            ["POST /login"],
            lambda it: it.assert_allowed(on="GET /login"),
            f"no request to GET /login was decided on; there were: POST /login. {UNRECORDED}",
        ),
        (["POST /login"] * 3, lambda it: it.assert_allowed(), f"not allowed: {THIRD_LOGIN}"),
        (["POST /login"], lambda it: it.assert_denied_by("login-ip"), f"not denied by 'login-ip': {FIRST_LOGIN}"),
        (["POST /login"], lambda it: it.assert_denied_by(), f"not denied: {FIRST_LOGIN}"),
        (["POST /login"] * 3, lambda it: it.assert_denied_by("per-ip"), f"not denied by 'per-ip': {THIRD_LOGIN}"),
        (
            ["POST /login"] * 3,
            lambda it: it.assert_denied_by("login"),
            f"not denied by 'login': {THIRD_LOGIN}; no limit is called 'login', only 'per-ip', 'login-ip', 'searches'",
        ),
        (
            ["GET /search"] * 2,
            lambda it: it.assert_denied_by("searches"),
            (
                "not denied by 'searches': GET /search was allowed: 1 left of per-ip (3 per minute, token_bucket); "
                "'searches' would deny it, but is a shadow"
            ),
        ),
        (["POST /login"], lambda it: it.assert_blocked(), f"not blocked: {FIRST_LOGIN}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_assertions_fail_with_what_happened(requests: list[str], assertion: Any, told: str) -> None:
    with isolated_limits() as limits:
        gate = Gate(POLICY)
        limits._gates[:] = [gate]  # those that other tests have left behind are not counted
        for request in requests:
            ask(gate, *request.split())
        with pytest.raises(AssertionError) as failed:
            assertion(limits)
    assert str(failed.value) == told


def test_blocked_request_is_neither_allowed_nor_denied_by_a_limit(gate: Gate, limits: IsolatedLimits) -> None:
    ask(gate, "GET", "/", peer="203.0.113.66")
    for assertion in (limits.assert_allowed, limits.assert_denied_by):
        with pytest.raises(AssertionError, match="GET / was blocked"):
            assertion()


def test_request_without_limits_is_allowed_and_says_so() -> None:
    with isolated_limits() as limits:
        ask(Gate(read("limits: [{path: /login, by: ip, bucket: 1/day}]")), "GET", "/")
        limits.assert_allowed()
        assert str(limits.decisions[-1]) == "GET / was allowed: no limit applies to it"


@pytest.mark.parametrize("instant", [-1, 2**52, 1.5, True, "0"])
def test_clock_cannot_stand_anywhere(instant: Any) -> None:
    with pytest.raises(InvalidInput, match="a clock cannot stand at"):
        FakeClock(instant)


@pytest.mark.parametrize("step", [90, 90.0, timedelta(minutes=1, seconds=30)])
def test_clock_moves_by_seconds_or_by_a_timedelta(step: float | timedelta) -> None:
    clock = FakeClock(5)
    clock.advance(step)
    assert clock.now_us() == 90_000_005


# ------------------------------------------------------------------ limiters without a gate

UNREACHABLE = "redis://127.0.0.1:1/0"
LIMIT = Limit.parse("2/minute", name="mail")


def test_limiters_count_from_nothing_and_without_their_store() -> None:
    for limiter in (Limiter(UNREACHABLE), Limiter(clock=FakeClock())):
        limiter.check(LIMIT, cost=2) if limiter.engine.memory else None
        with isolated_limits() as limits:
            assert [limiter.check(LIMIT).allowed for _ in range(3)] == [True, True, False]
            limits.clock.advance(30)
            assert limiter.check(LIMIT).allowed
            limits.reset()
            assert limiter.peek(LIMIT).remaining == 2
            assert limiter.acquire(LIMIT, cost=2).allowed
            assert limiter.acquire(LIMIT, cost=2, timeout=60).allowed, "the clock moves instead of waiting"
        if limiter.engine.memory:
            assert limiter.peek(LIMIT).remaining == 0, "as before the block"
        else:
            with pytest.raises(StoreUnavailable):
                limiter.check(LIMIT)
        limiter.close()


def test_limiters_that_are_made_in_a_block_are_isolated_too() -> None:
    with isolated_limits() as limits, Limiter(UNREACHABLE) as limiter:
        assert [limiter.check(LIMIT).allowed for _ in range(3)] == [True, True, False]
        with isolated_limits():
            assert limiter.check(LIMIT).allowed
        assert not limiter.check(LIMIT).allowed
        limits.reset()
        assert limiter.check(LIMIT).allowed


def test_asynchronous_limiters_are_isolated_and_turned_off() -> None:
    async def main() -> list[bool]:
        async with AsyncLimiter(UNREACHABLE) as limiter:
            with isolated_limits():
                found = [(await limiter.check(LIMIT)).allowed for _ in range(3)]
            with limits_off():
                found += [(await limiter.check(LIMIT, cost=99)).allowed]
                async with limiter.hold(LIMIT) as decision:
                    found += [decision.allowed]
        return found

    assert asyncio.run(main()) == [True, True, False, True, True]


def test_limited_functions_are_isolated_and_turned_off() -> None:
    limiter = Limiter(UNREACHABLE)

    @limited(LIMIT, limiter=limiter)
    def send() -> str:
        return "sent"

    with isolated_limits():
        assert [send(), send()] == ["sent"] * 2
        with pytest.raises(RequestDenied):
            send()
    with limits_off():
        assert [send() for _ in range(4)] == ["sent"] * 4
    limiter.close()


def test_limiter_that_is_off_allows_everything_and_keeps_nothing() -> None:
    seats = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="seats")
    queue = Limit.parse("1/minute, leaky_bucket", name="queue")
    with Limiter(UNREACHABLE) as limiter:
        with limits_off():
            assert limiter.check(LIMIT, cost=10**9).allowed
            assert limiter.check(LIMIT.by("a"), LIMIT.by("b"), cost=(3, 4)).remaining == 2
            with limiter.hold(seats) as first, limiter.hold(seats) as second:
                assert first.allowed
                assert second.allowed
            assert [limiter.acquire(queue).delay for _ in range(3)] == [0, 0, 0]
            assert limiter.refund(LIMIT, 1) is False
            assert limiter.enter(seats, id="a").allowed
            assert limiter.leave(seats, id="a") is False
            with pytest.raises(InvalidInput):
                limiter.check(LIMIT, cost=-1)
        with pytest.raises(StoreUnavailable):
            limiter.check(LIMIT)


# ------------------------------------------------------------------ a store that is down


OUTAGE_POLICY = read(
    """
    store: {share: 50%}
    limits:
      - {name: login, path: /login, by: ip, bucket: 4/minute, on_failure: closed}
      - {name: search, path: /search, by: ip, bucket: 4/minute}
      - {name: reports, path: /reports, by: ip, bucket: 4/minute, on_failure: local}
      - {name: jobs, path: /jobs, by: ip, bucket: 1/minute, algorithm: concurrency, on_failure: closed}
    """
)


def statuses(gate: Gate, *paths: str) -> list[int]:
    found = []
    for path in paths:
        admission = gate.admit(FakeRequest(path))
        found.append(200 if admission.refusal is None else admission.refusal.status)
        gate.finish(admission, 200)
    return found


def test_store_that_is_down_leaves_it_to_each_route() -> None:
    gate = Gate(OUTAGE_POLICY)
    with isolated_limits() as limits:
        assert statuses(gate, *["/login"] * 3) == [200] * 3
        with limits.store_down():
            assert statuses(gate, "/login", "/jobs", *["/search"] * 9) == [503, 503, *[200] * 9]
            assert statuses(gate, *["/reports"] * 3) == [200, 200, 429], "half of the limit"
            assert gate.health().state == "degraded"
            limits.assert_denied_by("reports", on="/reports")
        assert gate.health().state == "ready"
        assert statuses(gate, "/login", "/login") == [200, 429], "counts are as they were"
    gate.close()


def test_gates_that_are_made_while_the_store_is_down_find_it_again() -> None:
    with isolated_limits() as limits:
        with limits.store_down():
            gate, limiter = Gate(OUTAGE_POLICY), Limiter(on_failure="closed")
            assert statuses(gate, "/login") == [503]
            assert not limiter.check(LIMIT).allowed
        assert statuses(gate, "/login") == [200]
        assert limiter.check(LIMIT).allowed


@pytest.mark.parametrize("mode", ["raise", "open", "closed"])
def test_limiters_answer_by_their_own_failure_mode_while_the_store_is_down(mode: Any) -> None:
    async def ask_async(limiter: AsyncLimiter) -> bool:
        return (await limiter.check(LIMIT)).allowed

    with isolated_limits() as limits, Limiter(on_failure=mode) as limiter:
        other = AsyncLimiter(on_failure=mode)
        with limits.store_down():
            if mode == "raise":
                for fail in (lambda: limiter.check(LIMIT), lambda: asyncio.run(ask_async(other))):
                    with pytest.raises(StoreUnavailable, match="store_down"):
                        fail()
            else:
                assert limiter.check(LIMIT).allowed == asyncio.run(ask_async(other)) == (mode == "open")
        assert limiter.check(LIMIT).remaining == 1


# ------------------------------------------------------------------ the pytest plugin

PLUGIN = ("-p", "no:headgate", "-p", "headgate.pytest_plugin")
"""By its module, so that it is the one under test, whatever is installed."""

USERS_POLICY = "limits: [{name: per-ip, by: ip, bucket: 2/hour}]"

USERS_APPS = """
import asyncio
import warnings
import django
import httpx
from django.conf import settings
from django.http import HttpResponse
from django.urls import path
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from headgate.adapters import asgi
from headgate.adapters.flask import Headgate

with warnings.catch_warnings(action="ignore"):
    from starlette.testclient import TestClient

POLICY = __file__.replace("apps.py", "policy.yaml")

starlette_app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
starlette_app.add_middleware(asgi.HeadgateMiddleware, policy=POLICY)

flask_app = Flask("apps")
flask_app.add_url_rule("/", view_func=lambda: "hello")
Headgate(flask_app, POLICY)

urlpatterns = [path("", lambda request: HttpResponse("hello"))]
settings.configure(
    ROOT_URLCONF="apps",
    ALLOWED_HOSTS=["*"],
    MIDDLEWARE=["headgate.adapters.django.HeadgateMiddleware"],
    HEADGATE={"policy": POLICY},
)
django.setup()

def by_starlette():
    with TestClient(starlette_app) as client:
        return [client.get("/").status_code for _ in range(3)]

def by_httpx():
    async def ask():
        transport = httpx.ASGITransport(starlette_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.get("/")).status_code for _ in range(3)]

    return asyncio.run(ask())

def by_flask():
    client = flask_app.test_client()
    return [client.get("/").status_code for _ in range(3)]

def by_django():
    from django.test import Client

    client = Client()
    return [client.get("/").status_code for _ in range(3)]

ALL = [by_starlette, by_httpx, by_flask, by_django]
"""

USERS_TESTS = """
import pytest
from apps import ALL

every_framework = pytest.mark.parametrize("ask", ALL, ids=lambda ask: ask.__name__)

@every_framework
@pytest.mark.parametrize("run", ["first", "again"])
def test_limits(headgate_limits, ask, run):
    assert ask() == [200, 200, 429]
    headgate_limits.assert_denied_by("per-ip")
    headgate_limits.clock.advance(3600)
    assert ask() == [200, 200, 429]
    headgate_limits.reset()
    assert ask() == [200, 200, 429]
    assert len(headgate_limits.decisions) == 3

@every_framework
def test_off(headgate_off, ask):
    assert ask() == [200, 200, 200]

def test_fails(headgate_limits):
    ALL[2]()
    headgate_limits.assert_allowed()

def test_without():
    assert ALL[2]() == [200, 200, 429]
    assert ALL[2]() == [429, 429, 429]
"""


def test_fixtures_work_in_a_users_suite_with_every_framework(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("policy.yaml").write_text(USERS_POLICY)
    pytester.makepyfile(apps=USERS_APPS, test_users=USERS_TESTS)
    result = pytester.runpytest_subprocess(*PLUGIN, "-W", "error", "-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(passed=13, failed=1)
    result.stdout.fnmatch_lines(
        ["E *AssertionError: not allowed: GET / was denied by per-ip (2 per hour, token_bucket): *"]
    )
    result.stdout.no_fnmatch_line("*raise AssertionError*")  # the user's own line is shown, and none of ours


def test_limits_can_be_off_unless_a_test_asks_for_them(pytester: pytest.Pytester) -> None:
    page = (DOCS / "testing.md").read_text("utf-8")
    advice = re.search(r"`conftest.py`.*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert advice is not None
    pytester.makeconftest(advice[1])
    pytester.makepyfile(
        """
        from headgate.gate.gate import Gate
        from headgate.policy.model import Policy

        gate = Gate(Policy())

        def test_limits(headgate_limits):
            assert gate.is_on

        def test_another():
            assert not gate.is_on
        """
    )
    pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", timeout=60).assert_outcomes(passed=2)


def test_fixtures_explain_themselves(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*PLUGIN, "--fixtures", timeout=60)
    result.stdout.fnmatch_lines(
        ["headgate_limits *", "*Empty counters in memory and a fake clock for all gates and limiters*"]
    )
    result.stdout.fnmatch_lines(["headgate_off *", "*Let all gates and limiters allow everything in this test.*"])


def test_pytest_finds_the_plugin_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"headgate": "headgate.pytest_plugin"}


@pytest.mark.parametrize("module", ["headgate.pytest_plugin", "headgate.testing"])
def test_nothing_heavy_is_imported_before_it_is_used(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    heavy = ("headgate.adapters", "headgate.policy", "headgate.stores.redis", "redis", "yaml", "fastapi")
    assert not [name for name in loaded.stdout.split() if name.startswith(heavy)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FakeClock(-1), "a clock cannot stand at -1: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock(2**52), f"a clock cannot stand at {2**52}: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock(1.5), "a clock cannot stand at 1.5: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock().advance(-1), "a clock cannot stand at -1000000: give whole microseconds from 0 to 2**52"),
        (lambda: FakeClock().advance("60"), "a clock cannot move by '60': give seconds, or a timedelta"),  # type: ignore[arg-type]
        (lambda: FakeClock().advance(math.inf), "a clock cannot move by inf: give seconds, or a timedelta"),
        (lambda: FakeClock().advance(True), "a clock cannot move by True: give seconds, or a timedelta"),
        (lambda: FakeClock().set_us(True), "a clock cannot stand at True: give whole microseconds from 0 to 2**52"),
    ],
)
def test_fake_clock_rejects_invalid_times(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        call()
    assert str(raised.value) == message
