"""Polite clients pace, retry and give up as documented, with every library, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import aiohttp
import httpx
import pytest
import requests
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headgate import AsyncLimiter, InvalidConfiguration, Limit, Limiter
from headgate.clients import PoliteClient, Quota, Throttle, WaitEvent, WaitTooLong, deadline, polite
from headgate.clients.aiohttp import rate_limit_middleware
from headgate.clients.httpx import AsyncRateLimitTransport, RateLimitTransport
from headgate.clients.requests import RateLimitAdapter
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_US = 1_795_000_000_000_000
URL = "https://api.example.com/items/1"
HOST = "https://api.example.com"


class Api:
    """A server that answers from a script, repeating the last entry, and records the times of requests."""

    def __init__(self, clock: FakeClock, *answers: tuple[int, dict[str, str]]) -> None:
        self.clock, self.answers = clock, list(answers)
        self.times: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.times.append((self.clock.now_us() - START_US) / 1_000_000)
        status, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return httpx.Response(status, headers=headers)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


def session(api: Callable[[httpx.Request], httpx.Response], clock: FakeClock, **options: Any) -> httpx.Client:
    options = {"random": random.Random(0).random} | options
    transport = RateLimitTransport(httpx.MockTransport(api), clock=clock, **options)
    return httpx.Client(transport=transport)


OK: tuple[int, dict[str, str]] = (200, {})


# ---------------------------------------------------------------- retries


def test_a_rejected_request_is_repeated_after_retry_after(clock: FakeClock) -> None:
    api = Api(clock, (429, {"Retry-After": "7"}), OK)
    assert session(api, clock).get(URL).status_code == 200
    assert 7 <= api.times[1] <= 8


def test_an_unavailable_server_is_asked_again_with_growing_random_delays(clock: FakeClock) -> None:
    api = Api(clock, (503, {}))
    assert session(api, clock, retries=5, random=lambda: 1.0).get(URL).status_code == 503
    assert api.times == [0, 1, 3, 7, 15, 31]


def test_jitter_is_full(clock: FakeClock) -> None:
    api = Api(clock, (503, {}))
    assert session(api, clock, retries=2, random=lambda: 0.0).get(URL).status_code == 503
    assert api.times == [0, 0, 0]


def test_retry_after_can_be_a_date(clock: FakeClock) -> None:
    api = Api(clock, (429, {"Retry-After": "Wed, 18 Nov 2026 11:06:50 GMT"}), OK)  # START_US is at :40
    session(api, clock).get(URL)
    assert 10 <= api.times[1] <= 11


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 500, 502])
def test_other_answers_are_not_repeated(clock: FakeClock, status: int) -> None:
    api = Api(clock, (status, {}))
    assert session(api, clock).get(URL).status_code == status
    assert len(api.times) == 1


def test_a_secondary_limit_of_github_is_a_rejection(clock: FakeClock) -> None:
    api = Api(clock, (403, {"Retry-After": "60", "X-RateLimit-Remaining": "10"}), OK)
    assert session(api, clock, max_wait=90).get(URL).status_code == 200
    assert api.times[1] >= 60


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_requests_that_are_not_idempotent_are_not_repeated(clock: FakeClock, method: str) -> None:
    api = Api(clock, (429, {"Retry-After": "1"}), OK)
    assert session(api, clock).request(method, URL).status_code == 429
    assert len(api.times) == 1


def test_post_is_repeated_if_allowed_or_with_an_idempotency_key(clock: FakeClock) -> None:
    api = Api(clock, (429, {"Retry-After": "1"}), OK)
    assert session(api, clock, retry_methods={"post"}).post(URL).status_code == 200
    api = Api(clock, (429, {"Retry-After": "1"}), OK)
    assert session(api, clock).post(URL, headers={"Idempotency-Key": "a"}).status_code == 200


def test_a_body_that_can_be_read_once_is_not_sent_twice(clock: FakeClock) -> None:
    def parts() -> Iterator[bytes]:
        yield b"once"

    api = Api(clock, (429, {"Retry-After": "1"}), OK)
    assert session(api, clock).put(URL, content=parts()).status_code == 429
    assert len(api.times) == 1


def test_the_retry_budget_limits_all_requests_together(clock: FakeClock) -> None:
    api = Api(clock, (503, {}))
    client = session(api, clock, retry_budget="1/hour, burst 4", random=lambda: 0.0)
    for _ in range(5):
        client.get(URL)
    assert len(api.times) == 5 + 4


def test_a_failure_to_send_is_raised_and_forgotten(clock: FakeClock) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = session(fail, clock)
    for _ in range(3):
        with pytest.raises(httpx.ConnectError):
            client.get(URL)


# ---------------------------------------------------------------- waiting at most so long


def test_a_wait_that_is_too_long_returns_the_rejection(clock: FakeClock) -> None:
    api = Api(clock, (429, {"Retry-After": "61"}), OK)
    assert session(api, clock).get(URL).status_code == 429
    assert clock.now_us() == START_US


def test_a_request_to_an_exhausted_quota_is_not_sent(clock: FakeClock) -> None:
    api = Api(clock, (200, {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "900"}))
    client = session(api, clock)
    client.get(URL)
    with pytest.raises(
        WaitTooLong, match=r"GET https://api.example.com was not sent: it would have to wait 900 s"
    ) as no:
        client.get(URL)
    assert no.value.seconds == 900
    assert len(api.times) == 1
    clock.advance(850)
    assert client.get(URL).status_code == 200
    assert api.times[1] >= 900


def test_deadlines_end_waits(clock: FakeClock) -> None:
    api = Api(clock, (429, {"Retry-After": "5"}), OK)
    client = session(api, clock)
    with deadline(3, clock=clock):
        assert client.get(URL).status_code == 429
        with pytest.raises(WaitTooLong, match="may wait 3 s"):
            client.get(URL)
    assert client.get(URL).status_code == 200


def test_a_server_cannot_stop_a_client_for_long(clock: FakeClock) -> None:
    absurd = {"RateLimit": '"a";r=0;t=999999999999999', "Retry-After": "9" * 30}
    api = Api(clock, (200, absurd), OK)
    client = session(api, clock)
    client.get(URL)
    with pytest.raises(WaitTooLong):
        client.get(URL)
    clock.advance(3600)
    assert client.get(URL).status_code == 200


# ---------------------------------------------------------------- pacing


def bucket_api(clock: FakeClock, limit: str) -> Callable[[httpx.Request], httpx.Response]:
    """A server with a real limiter that reports as Headgate does."""
    from headgate.adapters.wsgi import HeadgateMiddleware
    from headgate.policy import read

    def app(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])
        return [b""]

    policy = read(f"limits: [{{name: api, by: ip, {limit}}}]")
    transport = httpx.WSGITransport(HeadgateMiddleware(app, policy, clock=clock), remote_addr="203.0.113.9")
    return transport.handle_request


@pytest.mark.parametrize(
    ("limit", "requests_sent", "at_most_s"),
    [
        ("bucket: 10/second", 60, 7.0),
        ("bucket: 100/minute", 150, 65.0),
        ("bucket: 5/10 seconds", 20, 50.0),
        ("bucket: 20/10 seconds, algorithm: fixed_window", 60, 40.0),
        ("bucket: 1/second", 10, 12.0),
    ],
)
def test_a_client_that_paces_itself_is_never_rejected(
    clock: FakeClock, limit: str, requests_sent: int, at_most_s: float
) -> None:
    client = session(bucket_api(clock, limit), clock, retries=0, max_wait=100)
    statuses = [client.get(URL).status_code for _ in range(requests_sent)]
    assert statuses == [200] * requests_sent
    assert clock.now_us() - START_US <= at_most_s * 1_000_000


def test_what_is_left_is_spread_over_the_window(clock: FakeClock) -> None:
    headers = {"RateLimit-Limit": "100", "RateLimit-Remaining": "10", "RateLimit-Reset": "20"}
    api = Api(clock, (200, headers))
    client = session(api, clock)
    for _ in range(5):
        client.get(URL)
    assert [round(time) for time in api.times] == [0, 2, 4, 6, 8]


def test_more_than_half_of_a_quota_is_used_without_waiting(clock: FakeClock) -> None:
    client = session(bucket_api(clock, "bucket: 100/hour, algorithm: fixed_window"), clock)
    for _ in range(50):
        client.get(URL)
    assert clock.now_us() - START_US < 1_000_000


def test_quotas_are_learned_by_host_credentials_and_route(clock: FakeClock) -> None:
    exhausted = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50", "X-RateLimit-Resource": "search"}
    core = {"X-RateLimit-Limit": "5000", "X-RateLimit-Remaining": "4999", "X-RateLimit-Resource": "core"}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=exhausted if request.url.path.startswith("/search") else core)

    client = session(answer, clock)
    for path in ("/repos/x", "/search/code", "/repos/y", "/users"):
        client.get(f"{HOST}{path}")
    client.get("https://other.example.com/search/code")
    client.get(f"{HOST}/search/code", headers={"Authorization": "Bearer b"})
    assert clock.now_us() == START_US
    client.get(f"{HOST}/search/issues")
    assert clock.now_us() >= START_US + 50_000_000


def test_a_partition_can_be_chosen(clock: FakeClock) -> None:
    api = Api(clock, (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"}))
    client = session(api, clock, partition=lambda request: request.headers["tenant"])
    client.get(URL, headers={"tenant": "a"})
    client.get(URL, headers={"tenant": "b"})
    assert clock.now_us() == START_US


def test_cached_answers_teach_nothing(clock: FakeClock) -> None:
    api = Api(clock, (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50", "Age": "9"}))
    client = session(api, clock)
    client.get(URL)
    client.get(URL)
    assert api.times == [0, 0]


def test_tokens_are_not_paced_as_requests(clock: FakeClock) -> None:
    headers = {"x-ratelimit-remaining-tokens": "10", "x-ratelimit-reset-tokens": "6m0s"}
    api = Api(clock, (200, headers), (200, headers | {"x-ratelimit-remaining-tokens": "0"}), OK)
    client = session(api, clock, max_wait=400)
    for _ in range(3):
        client.get(URL)
    assert api.times == [0, 0, 360]


# ---------------------------------------------------------------- hostile servers

FIELDS = st.dictionaries(
    st.sampled_from(
        ["RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"]
    ),
    st.sampled_from(
        ["0", "1", "50", "NaN", "-1", "9" * 15, "9" * 30, "0.001", "1795000000", "9999999999999", ""]
        + [f'"a";{p}={n}' for p in ("r", "q", "w", "t") for n in (0, 1, 10**15 - 1, -5)]
        + ['"a";r=1;t=0', '"a";q=1;w=1', '"a";r=999999999999999;t=1', '"a";q=1;qu="concurrent-requests"', '"a";r=0;t=5']
    ),
)


@given(script=st.lists(st.tuples(st.sampled_from([200, 429, 503]), FIELDS), min_size=1, max_size=12))
def test_no_server_stops_a_client_longer_than_it_may_wait(script: list[tuple[int, dict[str, str]]]) -> None:
    clock = FakeClock(START_US)
    api = Api(clock, *script)
    client = session(api, clock, max_wait=10, retries=2)
    waits: list[float | None] = []
    for _ in range(8):
        before = clock.now_us()
        try:
            client.get(URL)
        except WaitTooLong as error:
            waits.append(error.seconds)
        assert clock.now_us() - before <= 11_000_000
    assert all(wait is not None and 0 < wait <= 3601 for wait in waits)


# ---------------------------------------------------------------- concurrency


def test_concurrency_limits_are_kept() -> None:
    clock, now, most = FakeClock(START_US), 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        left = 4 - now
        for _ in range(20):
            await asyncio.sleep(0)
        now -= 1
        headers = {"RateLimit-Policy": '"c";q=4;qu="concurrent-requests"', "RateLimit": f'"c";r={max(left, 0)}'}
        return httpx.Response(200, headers=headers)

    async def main() -> list[int]:
        transport = AsyncRateLimitTransport(httpx.MockTransport(handle), clock=clock, max_wait=1e6)
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(URL)
            answers = await asyncio.gather(*[client.get(URL) for _ in range(30)])
        return [answer.status_code for answer in answers]

    assert asyncio.run(main()) == [200] * 30
    assert 2 <= most <= 4


def test_concurrent_requests_wait_for_the_first_answer() -> None:
    clock, times = FakeClock(START_US), []
    answers = iter([{"X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "20"}])

    async def handle(request: httpx.Request) -> httpx.Response:
        times.append(clock.now_us() - START_US)
        await asyncio.sleep(0)
        return httpx.Response(200, headers=next(answers, {}))

    async def main() -> None:
        transport = AsyncRateLimitTransport(httpx.MockTransport(handle), clock=clock)
        async with httpx.AsyncClient(transport=transport) as client:
            await asyncio.gather(*[client.get(URL) for _ in range(3)])

    asyncio.run(main())
    assert times[0] == 0
    assert all(time >= 20_000_000 for time in times[1:])


def test_a_cancelled_request_gives_back_its_place() -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    async def main() -> int:
        transport = AsyncRateLimitTransport(httpx.MockTransport(handle))
        async with httpx.AsyncClient(transport=transport) as client:
            task = asyncio.create_task(client.get(URL))
            for _ in range(20):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        (scope,) = transport.client._scopes.values()
        return scope.in_flight

    assert asyncio.run(main()) == 0


# ---------------------------------------------------------------- throttles and shared quotas


def test_a_throttle_keeps_to_a_documented_limit(clock: FakeClock) -> None:
    throttle = Throttle(Limit.parse("2/second", name="documented"), weights={"POST /search": 2}, clock=clock)
    api = Api(clock, OK)
    client = session(api, clock, throttle=throttle)
    for _ in range(4):
        client.get(URL)
    client.post(f"{HOST}/search")
    assert api.times == [0, 0, 0.5, 1, 2]


def test_a_throttle_gives_up_in_time(clock: FakeClock) -> None:
    api = Api(clock, OK)
    client = session(api, clock, throttle=Throttle("1/hour", clock=clock))
    client.get(URL)
    with pytest.raises(WaitTooLong, match="throttle"):
        client.get(URL)
    with pytest.raises(WaitTooLong, match="would never be allowed"):
        session(api, clock, throttle=Throttle("1/hour", weights={"*": 5}, clock=clock)).get(URL)


def test_processes_share_a_learned_quota(clock: FakeClock) -> None:
    store = Limiter(clock=clock)
    server = bucket_api(clock, "bucket: 10/second")
    clients = [session(server, clock, shared=store, retries=0) for _ in range(5)]
    statuses = [client.get(URL).status_code for _ in range(40) for client in clients]
    assert statuses == [200] * 200
    assert clock.now_us() - START_US == pytest.approx(200 / 10 * 1_000_000, rel=0.03)


def test_a_shared_store_that_fails_does_not_stop_requests(clock: FakeClock) -> None:
    store = Limiter("redis://127.0.0.1:1/0", clock=clock)
    client = session(bucket_api(clock, "bucket: 10/second"), clock, shared=store)
    assert [client.get(URL).status_code for _ in range(3)] == [200] * 3
    store.close()


def test_limiters_must_fit_the_client() -> None:
    async def ask() -> None:
        api = httpx.MockTransport(lambda _: httpx.Response(200))
        with Limiter("redis://127.0.0.1:1/0") as limiter:
            transport = AsyncRateLimitTransport(api, throttle=Throttle("1/second", limiter=limiter))
            await httpx.AsyncClient(transport=transport).get(URL)

    with pytest.raises(InvalidConfiguration, match="give it an AsyncLimiter"):
        asyncio.run(ask())
    clock = FakeClock()
    with pytest.raises(InvalidConfiguration, match="give it a Limiter"):
        session(Api(clock, OK), clock, throttle=Throttle("1/second", limiter=AsyncLimiter())).get(URL)


# ---------------------------------------------------------------- events, options


def test_waits_are_reported_and_counted(clock: FakeClock) -> None:
    events: list[WaitEvent] = []
    api = Api(clock, (429, {"Retry-After": "2"}), OK)
    client = session(api, clock, on_wait=events.append, random=lambda: 0.5)
    client.get(URL)
    assert events == [WaitEvent(HOST, "GET", 2.5, "retry", None, 429)]
    stats = client._transport.client.stats  # type: ignore[attr-defined]
    assert (stats.requests, stats.rejected, stats.retries, stats.waits, stats.waited_s) == (2, 1, 1, 1, 2.5)


def test_an_error_of_on_wait_is_logged(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    client = session(Api(clock, (503, {}), OK), clock, on_wait=lambda _: 1 / 0)
    assert client.get(URL).status_code == 200
    assert "on_wait failed" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, "retries -1 is not a whole number"),
        ({"max_wait": float("nan")}, "max_wait nan is not a number of seconds"),
        ({"retry_methods": "GET"}, "is a text: write"),
        ({"throttle": "1/second"}, "is not a Throttle"),
        ({"shared": "redis://"}, "is not a Limiter"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        PoliteClient(**options)


# ---------------------------------------------------------------- other libraries


def test_functions_are_paced_and_repeated(clock: FakeClock) -> None:
    answers = [httpx.Response(429, headers={"Retry-After": "3"}), httpx.Response(200)]

    @polite("api", method="GET", clock=clock, random=lambda: 0.0)
    def fetch() -> httpx.Response:
        return answers.pop(0)

    assert fetch().status_code == 200
    assert clock.now_us() == START_US + 3_000_000


def test_exceptions_with_a_response_are_read(clock: FakeClock) -> None:
    answers = [429, 200]

    @polite("api", method="GET", clock=clock, random=lambda: 0.0)
    async def fetch() -> int:
        response = httpx.Response(answers.pop(0), headers={"Retry-After": "3"}, request=httpx.Request("GET", URL))
        return response.raise_for_status().status_code

    assert asyncio.run(fetch()) == 200

    @polite("api", clock=clock)
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()


class Server:
    """An aiohttp server that rejects every other request."""

    def __init__(self) -> None:
        self.count = 0
        self.bodies: list[bytes] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.count += 1
        self.bodies.append(await request.read())
        if self.count % 2:
            return web.Response(status=429, headers={"Retry-After": "0"}, text="no")
        return web.Response(text="yes")

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


def test_aiohttp_requests_httpx_and_urllib_repeat_on_a_real_server() -> None:
    server = Server()

    async def main() -> None:
        runner, url = await server.start()
        middleware = rate_limit_middleware(retries=1, random=lambda: 0.0)
        async with aiohttp.ClientSession(middlewares=[middleware]) as client:
            async with client.put(url, data=b"a") as response:
                assert (response.status, await response.text()) == (200, "yes")
            async with client.get(url) as response:
                assert (response.status, await response.text()) == (200, "yes")
        async with httpx.AsyncClient(transport=AsyncRateLimitTransport(random=lambda: 0.0)) as polite_client:
            assert (await polite_client.put(url, content=b"a")).text == "yes"

        def use_requests() -> None:
            with requests.Session() as session:
                session.mount("http://", RateLimitAdapter(retries=1, random=lambda: 0.0))
                assert session.put(url, data=b"a").text == "yes"
            with httpx.Client(transport=RateLimitTransport(random=lambda: 0.0)) as polite_client:
                assert polite_client.put(url, content=b"a").text == "yes"
            assert fetch_with_requests() == fetch_with_urllib() == b"yes"

        @polite("api", method="GET", random=lambda: 0.0)
        def fetch_with_requests() -> bytes:
            response = requests.get(url, timeout=10)
            response.raise_for_status()
            return response.content

        @polite("api", method="GET", random=lambda: 0.0)
        def fetch_with_urllib() -> bytes:
            with urlopen(url, timeout=10) as response:
                return response.read()  # type: ignore[no-any-return]

        await asyncio.to_thread(use_requests)
        await runner.cleanup()

    asyncio.run(main())
    gc.collect()  # a connection that was not closed would warn here
    assert server.bodies == [b"a", b"a", b"", b"", *[b"a"] * 6, *[b""] * 4]


def test_quotas_can_be_inspected(clock: FakeClock) -> None:
    client = session(Api(clock, (200, {"RateLimit": '"a";r=5;t=9', "Retry-After": "1"})), clock)
    client.get(URL)
    transport: Any = client._transport
    assert transport.client.quotas(HOST) == [Quota("a", None, 5, 9)]
