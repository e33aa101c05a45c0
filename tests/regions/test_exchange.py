"""The exchange of reconciled usage between regions: three real servers, and a clock that the tests advance."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from headgate import Decision, InvalidLimit, Limit, Limiter
from headgate.limits import ReconciledLimits
from headgate.regions.exchange import CLEANUP_INTERVAL, RegionExchange
from headgate.stores.operations import Check
from headgate.stores.redis.region_client import RegionClient
from headgate.testing import FakeClock
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headgate.stores.redis.region_client import ChangePage

SECOND = 1_000_000
START_US = 1_763_251_200 * SECOND
REGIONS = ("ap", "eu", "us")
HOME = "eu"


class Fleet:
    """One process in each of three regions."""

    def __init__(self, servers: dict[str, RedisServer], clock: FakeClock, namespace: str, stack: ExitStack) -> None:
        self.servers, self.clock, self.namespace, self.stack = servers, clock, namespace, stack
        self.limiters = {name: self.limiter(server.url) for name, server in servers.items()}
        self.exchanges = {name: self.exchange(name) for name in REGIONS}
        self.unreachable = self.limiter(f"redis://127.0.0.1:{_unused_port()}").engine.store

    def limiter(self, url: str) -> Limiter:
        return self.stack.enter_context(Limiter(url, clock=self.clock, namespace=self.namespace, budget=20))

    def exchange(self, own: str) -> RegionExchange:
        exchange = RegionExchange(own, {name: self.client(name) for name in REGIONS}, home=HOME)
        self.stack.callback(exchange.close)
        return exchange

    def client(self, name: str) -> RegionClient:
        client = RegionClient(self.limiters[name].engine.store.background_client())
        self.stack.callback(client.close)
        return client

    def check(self, region: str, limit: Limit, who: str = "ada") -> Decision:
        key = limit.by(who)
        decision = self.limiters[region].check(key)
        if decision.allowed:
            self.exchanges[region].counter.record(key, 1, decision.at_us)
        return decision

    def exchange_all(self) -> None:
        for _ in range(2):  # what one region shares after another has read it is read in the second round
            for exchange in self.exchanges.values():
                exchange.run_once()

    def run(self, limit: Limit, seconds: int, per_second: dict[str, int], *, exchanging: bool = True) -> int:
        """Requests at even distances for some seconds, with an exchange each second; returns the admitted ones."""
        admitted = 0
        for _ in range(seconds):
            for tenth in range(10):
                for region, rate in per_second.items():
                    due = rate * (tenth + 1) // 10 - rate * tenth // 10
                    admitted += sum(self.check(region, limit).allowed for _ in range(due))
                self.clock.advance(0.1)
            if exchanging:
                for exchange in self.exchanges.values():
                    exchange.run_once()
        return admitted

    def partition(self, region: str) -> None:
        """This region and the others do not reach each other."""
        for other in REGIONS:
            self.cut(region, other)
            self.cut(other, region)

    def cut(self, own: str, other: str) -> None:
        """One region does not reach another."""
        if own != other:
            self.exchanges[own].clients[other] = RegionClient(self.unreachable.background_client())

    def heal(self) -> None:
        for own, exchange in self.exchanges.items():
            for name in REGIONS:
                if name != own:
                    exchange.clients[name] = self.client(name)

    def used(self, region: str, limit: Limit, who: str = "ada") -> int:
        return limit.capacity - self.limiters[region].peek(limit.by(who)).remaining


def _unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RedisServer]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(RedisServer()) for name in REGIONS}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


@pytest.fixture
def fleet(servers: dict[str, RedisServer], clock: FakeClock, unique: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(servers, clock, unique, stack)


def minutely(algorithm: str = "fixed_window", quota: int = 600) -> Limit:
    return Limit(quota, timedelta(minutes=1), algorithm=algorithm, name="minutely")


def test_every_region_charges_the_usage_of_the_others(fleet: Fleet) -> None:
    limit = minutely()
    for region, number in (("ap", 5), ("eu", 7), ("us", 9)):
        for _ in range(number):
            assert fleet.check(region, limit).allowed
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [21, 21, 21]
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [21, 21, 21]


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_log"])
def test_even_spread_stays_within_a_tenth_of_the_limit(fleet: Fleet, algorithm: str) -> None:
    """Three regions with 10 requests per second each: three times the limit of 600 per minute."""
    admitted = fleet.run(minutely(algorithm), 59, dict.fromkeys(REGIONS, 10))
    assert 600 <= admitted <= 660


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_log"])
def test_even_spread_stays_within_a_tenth_of_the_limit_for_several_periods(fleet: Fleet, algorithm: str) -> None:
    """What one region admits beyond the limit is charged to all, also while the counters are used up."""
    limit = Limit(200, timedelta(seconds=20), algorithm=algorithm, name="long")
    admitted = fleet.run(limit, 100, dict.fromkeys(REGIONS, 7))
    assert 0.9 * 1000 <= admitted <= 1.1 * 1000


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra"])
def test_a_bucket_stays_within_a_tenth_of_the_limit(fleet: Fleet, algorithm: str) -> None:
    """Over two minutes, a bucket admits its burst and what is refilled."""
    limit = Limit(600, timedelta(minutes=1), burst=300, algorithm=algorithm, name="bucket")
    admitted = fleet.run(limit, 120, dict.fromkeys(REGIONS, 10))
    assert 0.9 * 1500 <= admitted <= 1.1 * 1500


def test_a_partition_is_bounded_and_heals_without_double_counting(fleet: Fleet) -> None:
    limit = minutely()
    before = fleet.run(limit, 5, dict.fromkeys(REGIONS, 10))
    fleet.partition("us")
    during = fleet.run(limit, 10, dict.fromkeys(REGIONS, 10))
    assert (before, during) == (150, 300)
    # Of the partitioned region, the others know what they had read before.
    assert fleet.used("us", limit) <= 150 + 100
    assert fleet.exchanges["ap"].last_read["eu"] > fleet.exchanges["ap"].last_read["us"]
    fleet.heal()
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [450, 450, 450]
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [450, 450, 450]


def test_a_partition_admits_at_most_the_limit_in_each_part(fleet: Fleet) -> None:
    limit = minutely(quota=100)
    fleet.partition("us")
    fleet.partition("eu")
    assert fleet.run(limit, 20, dict.fromkeys(REGIONS, 10)) == 300
    fleet.heal()
    fleet.exchange_all()
    assert not any(fleet.check(region, limit).allowed for region in REGIONS)
    fleet.clock.advance(40)
    assert all(fleet.check(region, limit).allowed for region in REGIONS)


def test_usage_passes_through_the_home_region(fleet: Fleet) -> None:
    """One call to another region in each exchange, whatever the number of regions, and none from the home region."""
    for own, other in (("ap", "us"), ("us", "ap"), (HOME, "ap"), (HOME, "us")):
        fleet.cut(own, other)
    limit = minutely()
    for region in REGIONS:
        fleet.check(region, limit)
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [3, 3, 3]


def test_regions_exchange_usage_without_the_home_region(fleet: Fleet) -> None:
    limit = minutely()
    fleet.run(limit, 2, dict.fromkeys(REGIONS, 10))
    fleet.exchange_all()
    fleet.partition(HOME)
    fleet.run(limit, 3, dict.fromkeys(REGIONS, 10))
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [120, 90, 120]
    fleet.heal()
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [150, 150, 150]


def test_a_region_that_only_reaches_some_exchanges_usage_with_them(fleet: Fleet) -> None:
    limit = minutely()
    fleet.cut("us", HOME)
    for region in REGIONS:
        fleet.check(region, limit)
    fleet.exchange_all()
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in ("ap", "us")] == [3, 2]


def test_a_home_region_that_lost_its_data_gets_all_usage_again(fleet: Fleet) -> None:
    limit = minutely()
    fleet.partition("us")
    fleet.check("ap", limit)
    fleet.exchange_all()
    with fleet.servers[HOME].client() as client:
        client.flushall()
    fleet.cut("ap", "us")
    fleet.heal()
    fleet.cut("us", "ap")
    fleet.exchange_all()
    fleet.exchange_all()
    assert fleet.used("us", limit) == 1


def test_a_region_that_does_not_answer_does_not_delay_the_others(fleet: Fleet) -> None:
    limit, answers = minutely(), threading.Event()
    fleet.partition(HOME)
    fleet.exchange_all()  # from now on, ap and us call each other
    ap = fleet.exchanges["ap"]
    ap.clients[HOME] = fleet.client(HOME)
    exchange = ap.clients[HOME].exchange

    def exchange_late(epoch: str, number: int, prefix: str, reports: Mapping[str, str]) -> ChangePage:
        answers.wait(20)
        return exchange(epoch, number, prefix, reports)

    ap.clients[HOME].exchange = exchange_late  # type: ignore[method-assign]
    for used in (1, 2):
        fleet.check("us", limit)
        fleet.exchange_all()
        assert fleet.used("ap", limit) == used
    fleet.check("ap", limit)
    answers.set()
    fleet.exchange_all()
    assert fleet.used(HOME, limit) == 1


def test_a_region_shares_its_last_usage_when_it_ends(fleet: Fleet) -> None:
    limit = minutely()
    fleet.exchange_all()
    fleet.check("ap", limit)
    fleet.exchanges["ap"].close()
    fleet.exchanges["us"].run_once()
    assert fleet.used("us", limit) == 1


def test_usage_of_a_window_that_is_over_is_not_charged(fleet: Fleet) -> None:
    limit = minutely()
    fleet.partition("us")
    assert fleet.run(limit, 10, {"us": 10}) == 100
    fleet.clock.advance(50)
    fleet.heal()
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [0, 0, 0]
    assert fleet.exchanges["eu"].owed("us") == 0


def test_an_agent_that_is_replaced_imports_nothing_twice(fleet: Fleet) -> None:
    limit = minutely()
    fleet.run(limit, 3, dict.fromkeys(REGIONS, 10))
    fleet.exchange_all()
    standby = fleet.exchange("eu")
    standby.run_once()
    assert not standby.is_agent
    fleet.clock.advance(10)  # the agent has crashed, and its lease expires
    standby.run_once()
    assert standby.is_agent
    assert fleet.used("eu", limit) == 90
    fleet.exchanges["eu"].run_once()
    assert not fleet.exchanges["eu"].is_agent


def test_a_closed_exchange_hands_over_at_once(fleet: Fleet) -> None:
    limit = minutely()
    fleet.exchange_all()
    fleet.check("eu", limit)
    fleet.exchanges["eu"].close()
    standby = fleet.exchange("eu")
    standby.run_once()
    assert standby.is_agent
    fleet.exchanges["us"].run_once()
    assert fleet.used("us", limit) == 1


def test_two_processes_of_a_region_are_added_up(fleet: Fleet) -> None:
    limit = minutely()
    second = fleet.exchange("eu")
    for exchange in (fleet.exchanges["eu"], second):
        exchange.counter.record(limit.by("ada"), 4, START_US)
    second.run_once()
    fleet.exchange_all()
    assert fleet.used("us", limit) == 8


def test_a_store_that_lost_its_data_starts_anew(fleet: Fleet) -> None:
    limit = minutely()
    fleet.run(limit, 2, {"us": 10})
    fleet.exchange_all()
    with fleet.servers["us"].client() as client:
        client.flushall()
    for _ in range(5):
        fleet.check("us", limit)
    fleet.exchange_all()
    assert fleet.used("eu", limit) == 25


def test_refunds_reach_all_regions(fleet: Fleet) -> None:
    limit, key = minutely(), minutely().by("ada")
    for _ in range(10):
        decision = fleet.check("eu", limit)
    fleet.exchange_all()
    assert fleet.limiters["eu"].refund(key, 4)
    fleet.exchanges["eu"].counter.record_refund(key, 4, decision.at_us)
    fleet.exchange_all()
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in REGIONS] == [6, 6, 6]


def test_resets_reach_all_regions_once(fleet: Fleet) -> None:
    limit = minutely(quota=20)
    fleet.partition("us")
    fleet.run(limit, 2, {"us": 10, "eu": 5})
    fleet.heal()
    fleet.exchange_all()
    fleet.limiters["us"].reset(limit.by("ada"))
    fleet.exchanges["us"].post_reset(limit.by("ada"))
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in ("ap", "eu")] == [0, 0]
    assert fleet.exchanges["eu"].owed("us") == 0
    fleet.check("eu", limit)
    fleet.exchange_all()
    assert [fleet.used(region, limit) for region in ("ap", "eu")] == [1, 1]


def test_blocks_reach_all_regions(fleet: Fleet) -> None:
    def blocked() -> list[list[str]]:
        clients = [fleet.limiters[region].engine.store.background_client() for region in ("ap", "us")]
        found = [[block.value for block in client.blocks()] for client in clients]
        for client in clients:
            client.close()
        return found

    fleet.exchanges["eu"].post_block("address", "203.0.113.9", until_us=None, reason="abuse")
    fleet.exchange_all()
    assert blocked() == [["203.0.113.9"]] * 2
    fleet.exchanges["eu"].post_unblock("address", "203.0.113.9")
    fleet.exchange_all()
    assert blocked() == [[], []]


def test_old_messages_and_usage_are_dropped(fleet: Fleet) -> None:
    limit = minutely()
    for region in ("eu", "ap"):
        fleet.exchanges[region].post_block("address", "203.0.113.9", until_us=None, reason=None)
        fleet.check(region, limit)
    fleet.exchange_all()
    for seconds, kept in ((180, "%message"), (2 * 3600, "none")):
        fleet.clock.advance(seconds)
        for _ in range(CLEANUP_INTERVAL):
            fleet.exchanges["eu"].run_once()
            fleet.exchanges["ap"].run_once()
        for region in ("eu", "ap"):
            usage = fleet.exchanges[region].clients[region].shared_usage()
            found = [field for field in usage if "minutely" in field or "%message" in field]
            assert all(kept in field for field in found)
            assert bool(found) == (kept == "%message")
    for region, other in (("eu", "ap"), ("ap", "eu")):
        imported = fleet.exchanges[region].clients[region].imported(other)
        assert [field for field in imported if "%message" in field] == []


def test_malformed_usage_of_another_region_is_ignored(fleet: Fleet) -> None:
    limit = minutely()
    us = fleet.exchanges["us"].clients["us"]
    for field, text in (("nonsense", "1 1"), ("%message:x", "[]"), ("%message:y", "{"), ("[1]", "x")):
        us.post(field, text)
    fleet.check("us", limit)
    fleet.exchange_all()
    assert fleet.used("eu", limit) == 1


@pytest.fixture
def limiters(servers: dict[str, RedisServer], unique: str) -> Iterator[dict[str, Limiter]]:
    """A limiter in each region, with all of its background work."""
    urls = {name: server.url for name, server in servers.items()}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Limiter(url, namespace=unique, region=name, regions=urls, home="eu", budget=20))
            for name, url in urls.items()
        }


def hourly(algorithm: str) -> Limit:
    return Limit(1000, timedelta(hours=1), algorithm=algorithm, region="reconciled", name="hourly")


@pytest.mark.parametrize("algorithm", ["sliding_log", "token_bucket"])
def test_usage_refunds_and_resets_reach_all_regions(limiters: dict[str, Limiter], algorithm: str) -> None:
    """Up to a token of the bucket is refilled meanwhile."""
    key, (ap, eu, us) = hourly(algorithm).by("ada"), limiters.values()
    for limiter in (ap, us):
        limiter.peek(key)  # which starts their exchange
    decision = eu.check(key, cost=7)
    for limiter in (ap, us):
        wait_until(lambda: 993 <= limiter.peek(key).remaining <= 994, "the usage")  # noqa: B023
    eu.refund(key, 4, of=decision)
    for limiter in (ap, us):
        wait_until(lambda: 997 <= limiter.peek(key).remaining <= 998, "the refund")  # noqa: B023
    us.reset(key)
    for limiter in (ap, eu):
        wait_until(lambda: limiter.peek(key).remaining == 1000, "the reset")  # noqa: B023


def test_a_region_without_requests_knows_the_usage_of_the_others(limiters: dict[str, Limiter]) -> None:
    key = Limit(100, timedelta(days=1), algorithm="fixed_window", region="reconciled", name="idle").by("ada")
    limiters["us"].check(key, cost=60)
    counted = limiters["eu"].engine.router.counted(key)
    wait_until(lambda: limiters["eu"].engine.store.run(Check((counted,), 0)).remaining == 40, "the usage of the other")
    assert limiters["eu"].check(key).remaining == 39


def test_limiters_exchange_nothing_without_a_reconciled_limit(
    servers: dict[str, RedisServer], unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReconciledLimits, "_exist", False)
    urls = {name: server.url for name, server in servers.items()}
    with Limiter(urls["us"], namespace=unique, region="us", regions=urls, home="eu") as limiter:
        worker = limiter.engine.worker
        assert worker is not None
        limiter.check(Limit(100, region="central", name="other", period=timedelta(days=1)).by("ada"))
        assert worker.exchange is None
        Limit(100, timedelta(days=1), region="reconciled", name="new")
        assert worker.exchange is not None


def test_blocks_of_a_limiter_reach_all_regions(limiters: dict[str, Limiter]) -> None:
    ap, eu, us = limiters.values()
    for limiter in (ap, us):
        limiter.peek(hourly("gcra"))
    eu.block("ip", "203.0.113.9", reason="abuse")
    wait_until(lambda: [block.value for block in us.blocked()] == ["203.0.113.9"], "the block")
    assert eu.unblock("ip", "203.0.113.9")
    wait_until(lambda: not us.blocked() and not ap.blocked(), "the end of the block")


def test_denied_requests_and_peeks_are_not_shared(limiters: dict[str, Limiter]) -> None:
    limit = Limit(2, timedelta(hours=1), algorithm="sliding_log", region="reconciled", name="small")
    ap, eu, us = limiters.values()
    assert [eu.check(limit.by("ada")).allowed for _ in range(4)] == [True, True, False, False]
    us.peek(limit.by("ada"))
    wait_until(lambda: us.peek(limit.by("ada")).remaining == 0, "the usage")
    exchange = us.engine.worker.exchange
    wait_until(lambda: exchange.is_agent, "the agent")
    assert ap.check(limit.by("bob")).allowed
    assert [*exchange.counter.begin_flush()[1]] == []


def test_a_limiter_stops_its_threads(servers: dict[str, RedisServer], unique: str) -> None:
    urls = {name: server.url for name, server in servers.items()}
    limiter = Limiter(urls["us"], namespace=unique, region="us", regions=urls, home="eu")
    limiter.check(hourly("gcra").by("ada"))
    assert limiter.engine.worker is not None
    assert limiter.engine.worker.is_running
    limiter.close()
    assert not limiter.engine.worker.is_running


def test_concurrency_cannot_be_reconciled(limiters: dict[str, Limiter]) -> None:
    limit = Limit(3, timedelta(minutes=1), algorithm="concurrency", region="reconciled", name="jobs")
    with pytest.raises(InvalidLimit, match="cannot be reconciled; use region='central' or 'divided'"):
        limiters["us"].check(limit.by("ada"))
