"""Envoy's rate limit quota service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import AsyncLimiter, Limit
from headgate.bounds import quota_grants
from headgate.server.envoy import AsyncRateLimitService
from headgate.server.envoy.quota_service import QuotaService
from headgate.server.quota_grants import IDLE_REPORTS
from headgate.telemetry.fleet.aggregator import FleetAggregator
from headgate.telemetry.fleet.model import QuotaHolding
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.testing import FakeClock
from support.envoy import ProxyClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEXT = """
domain: shop
descriptors:
  - key: group
    value: api
    descriptors:
      - {key: user, rate_limit: {unit: minute, requests_per_unit: 1000}}
  - {key: free, rate_limit: {unlimited: true}}
  - {key: shut, rate_limit: {unit: minute}}
"""
ALLOW_ALL, DENY_ALL = 0, 1


def run(test: Callable[[QuotaService, FakeClock], Awaitable[None]], text: str = TEXT) -> None:
    async def main() -> None:
        clock = FakeClock(600_000_000)
        async with AsyncLimiter(clock=clock) as limiter:
            service = AsyncRateLimitService.from_texts([("a.yaml", text)], limiter, env={})
            await test(QuotaService(limiter, service), clock)

    asyncio.run(main())


def test_a_grant_covers_recent_demand() -> None:
    async def test(service: QuotaService, _: FakeClock) -> None:
        proxy = ProxyClient(service)
        first = await proxy.report(1, 0, seconds=0)
        assert (proxy.tokens, first.assignment_time_to_live.seconds) == (500, 15)
        second = await proxy.report(60, 40)
        assert (proxy.tokens, second.assignment_time_to_live.seconds) == (450, 3)  # 100 a second and a half more
        bucket = second.rate_limit_strategy.token_bucket
        assert (bucket.max_tokens, bucket.tokens_per_fill.value, bucket.fill_interval.seconds) == (112, 338, 3)

    run(test)


@pytest.mark.parametrize(
    ("bucket", "rule"), [({"free": "x"}, ALLOW_ALL), ({"unknown": "x"}, ALLOW_ALL), ({"shut": "x"}, DENY_ALL)]
)
def test_buckets_without_a_number_get_a_blanket_rule(bucket: dict[str, str], rule: int) -> None:
    async def test(service: QuotaService, _: FakeClock) -> None:
        action = await ProxyClient(service).report(0, 5, bucket=bucket)
        assert action.rate_limit_strategy.WhichOneof("strategy") == "blanket_rule"
        assert action.rate_limit_strategy.blanket_rule == rule
        assert action.assignment_time_to_live.seconds == 60

    run(test)


def test_unused_tokens_return_and_shares_follow_demand() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        busy, calm = ProxyClient(service), ProxyClient(service)
        served = [0, 0]
        for _ in range(15):
            clock.advance(1)
            served[0] += await busy.demand(60)
            served[1] += await calm.demand(5)
        assert served[0] > 750
        assert served[1] > 60
        assert sum(served) <= 1000

    run(test)


def test_the_limit_is_used_up_but_never_exceeded() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        proxies = [ProxyClient(service) for _ in range(4)]
        served = 0
        for _ in range(30):
            clock.advance(1)
            for proxy in proxies:
                served += await proxy.demand(100)
        assert 980 <= served <= 1000
        clock.advance(30)
        assert sum([await proxy.demand(100) for proxy in proxies]) <= 1000

    run(test)


def test_a_silent_proxy_leaves_the_rest_to_the_others() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        silent, other = ProxyClient(service), ProxyClient(service)
        await silent.report(0, 100)
        held = silent.tokens
        await silent.disconnect()
        served = 0
        for _ in range(20):
            clock.advance(1)
            served += await other.demand(200)
        assert 990 - held <= served <= 1000 - held

    run(test)


def test_an_idle_bucket_is_abandoned_and_its_tokens_return() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        idle, other = ProxyClient(service), ProxyClient(service)
        await idle.report(0, 100)
        for _ in range(IDLE_REPORTS - 1):
            await idle.report(0)
            assert not idle.is_abandoned
        await idle.report(0)
        assert idle.is_abandoned
        assert idle.tokens == 0
        assert service.holdings() == []
        await idle.report(1, seconds=0)  # a new request creates the bucket again
        assert idle.tokens > 0
        clock.advance(60)
        await other.report(0, 1000)
        assert other.tokens == 1000

    run(test)


def test_holdings_are_the_tokens_that_proxies_may_still_use() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        proxies = [ProxyClient(service) for _ in range(3)]
        await proxies[0].report(0, 10)
        await proxies[1].report(0, 10)
        await proxies[2].report(0, 10, bucket={"user": "bob", "group": "api"})
        held = sum([proxy.tokens for proxy in proxies])
        assert service.holdings() == [("shop.group_api.user", 2, held, 1000, 0, 0)]
        await proxies[0].report(2000)  # passed before the first assignment
        excess = 2000 + proxies[1].tokens - 1000
        assert [each.excess for each in service.holdings()] == [excess]
        clock.advance(60)
        assert service.holdings() == []  # all grants have ended

    run(test)


def test_holdings_of_a_bucket_have_the_bound_of_the_grants_that_are_valid() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        proxy = ProxyClient(service)
        await proxy.report(0, 10, seconds=2)
        [held] = service.holdings()
        assert held.bound == quota_grants(Limit.parse("1000/minute"), 6_000_000) == 100

    run(test, TEXT.replace("1000}", "1000, algorithm: token_bucket}"))


def test_holdings_reach_the_status_of_the_fleet() -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        store = MemoryStatusStore()
        proxies = [ProxyClient(service), ProxyClient(service)]
        for proxy in proxies:
            await proxy.report(0, 10)
        for _ in range(2):  # two servers
            StatusReporter(service.decisions, store, every=None).report()
        (found,) = FleetAggregator(store).gather().quotas
        held = 2 * sum([proxy.tokens for proxy in proxies])
        assert found == QuotaHolding("shop.group_api.user", counters=1, held=held, capacity=1000, excess=0)

    run(test)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 400), st.sampled_from([0.2, 1.0, 7.0]), st.booleans()), max_size=40
    )
)
@settings(max_examples=80, deadline=None)
def test_proxies_never_use_more_than_the_limit_in_a_window(steps: list[tuple[int, int, float, bool]]) -> None:
    async def test(service: QuotaService, clock: FakeClock) -> None:
        proxies = [ProxyClient(service) for _ in range(3)]
        served: dict[int, int] = {}
        expires = [0, 0, 0]
        for index, requests, wait, reconnects in steps:
            clock.advance(wait)
            proxy = proxies[index]
            if reconnects:
                await proxy.disconnect()
                proxies[index] = proxy = ProxyClient(service)
            if clock.now_us() >= expires[index]:
                proxy.tokens = 0
            window = clock.now_us() // 60_000_000
            used = min(requests, proxy.tokens)
            served[window] = served.get(window, 0) + used
            action = await proxy.report(used, requests - used, seconds=wait)
            ttl = action.assignment_time_to_live
            expires[index] = clock.now_us() + ttl.seconds * 1_000_000 + ttl.nanos // 1000
        assert all(total <= 1000 for total in served.values())

    run(test)
