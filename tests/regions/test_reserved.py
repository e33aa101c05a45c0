"""Reserved limits: regions lease tokens from the home region, and never admit more than the limit in total."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import AsyncLimiter, InvalidLimit, Limit, Limiter
from headgate.errors import StoreUnavailable
from headgate.regions.model import Regions
from headgate.regions.reserved import reserve
from headgate.regions.reserved_agent import ReservedAgent
from headgate.regions.routing import RegionRouter
from headgate.regions.worker import RegionWorker
from headgate.runtime import Runtime
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund
from support.servers import RedisServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headgate.decisions import Decision
    from headgate.stores.operations import Call

REGIONS = ("ap", "eu", "us")
SECOND = 1_000_000
START_US = 1_763_251_200 * SECOND
MINUTE = timedelta(minutes=1)


def reserved(quota: int = 1000, algorithm: str = "fixed_window", **fields: Any) -> Limit:
    return Limit(quota, MINUTE, algorithm=algorithm, region="reserved", name="worldwide", **fields)


# ------------------------------------------------------------- the division of a limit


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "sliding_window", "token_bucket", "gcra"])
@pytest.mark.parametrize(("quota", "count"), [(1000, 2), (1000, 3), (10_000, 10)])
def test_most_of_a_limit_is_usable_from_one_region(algorithm: str, quota: int, count: int) -> None:
    assert 0.95 <= reserve(reserved(quota, algorithm), count).usable < 1


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (reserved(algorithm="leaky_bucket"), "leaky_bucket cannot be reserved.*use region='central' or 'divided'"),
        (reserved(algorithm="concurrency"), "concurrency cannot be reserved"),
        (reserved(10), "too small to be reserved by 3 regions; use region='central'"),
        (reserved(1000, "token_bucket", burst=20), "time to fill the bucket, 1.2 s, is too short"),
        (Limit(1000, timedelta(seconds=1), algorithm="fixed_window", region="reserved"), "period, 1 s, is too short"),
    ],
)
def test_a_limit_that_cannot_be_reserved_is_rejected_with_a_remedy(limit: Limit, problem: str) -> None:
    with pytest.raises(InvalidLimit, match=problem):
        reserve(limit, 3)


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "sliding_window", "token_bucket", "gcra"])
@pytest.mark.parametrize(("safe_share", "safe"), [(0.005, 5), (0.02, 22), (0.3, 333)])
def test_the_safe_share_is_taken_from_the_home_region(algorithm: str, safe_share: float, safe: int) -> None:
    limit = reserved(10_000, algorithm)
    reservation = reserve(limit, 3, safe_share)
    assert reservation.safe == safe
    assert reservation.home.capacity + 3 * 3 * safe <= limit.capacity
    assert reservation.usable >= 1 - safe_share - 0.03


def test_a_safe_share_that_leaves_too_little_is_rejected() -> None:
    with pytest.raises(InvalidLimit, match="use region='central', or a smaller safe_share"):
        reserve(reserved(1000, "token_bucket"), 3, 0.5)


def test_leases_shrink_near_the_limit() -> None:
    reservation, usual = reserve(reserved(), 3), {"rate": 100.0, "left": 0, "denied": 0, "regions": 3}
    assert [reservation.wanted(home_left=left, **usual) for left in (None, 900, 90, 9, 1, 0)] == [126, 126, 30, 3, 1, 1]


def test_a_region_that_denies_leases_at_least_an_equal_share() -> None:
    reservation = reserve(reserved(), 3)
    assert reservation.wanted(rate=0.1, left=0, denied=3, home_left=900, regions=3) == 7
    assert reservation.wanted(rate=0.1, left=0, denied=0, home_left=900, regions=3) == reservation.safe


# ------------------------------------------------------------- the total of all regions


class Time:
    """The time of all regions; the clock of each region differs by a constant."""

    def __init__(self) -> None:
        self.now_us = START_US

    def monotonic(self) -> float:
        return self.now_us / SECOND


class SkewedClock:
    def __init__(self, time: Time, skew_us: int) -> None:
        self._time, self._skew_us = time, skew_us

    def now_us(self) -> int:
        return self._time.now_us + self._skew_us


class Connection:
    """A client of a region's store, which may fail before or after it has carried out an operation."""

    def __init__(self, store: MemoryStore, time: Time) -> None:
        self.store, self.time = store, time
        self.state = "works"
        self.latency_us = 0

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        self.time.now_us += self.latency_us // 2
        if self.state == "cut":
            return [StoreUnavailable("partition")] * len(calls)
        answers = [self.store.run(call) for call in calls]
        self.time.now_us += self.latency_us // 2
        return answers if self.state == "works" else [StoreUnavailable("the reply was lost")] * len(calls)


class Region:
    """One process in one region."""

    def __init__(self, name: str, time: Time, stores: dict[str, MemoryStore]) -> None:
        regions = Regions(name, "eu", tuple((each, f"redis://{each}") for each in REGIONS))
        self.store, self.home = stores[name], Connection(stores["eu"], time)
        worker = RegionWorker(regions, lambda _: None)  # type: ignore[arg-type,return-value]
        worker.ensure_agent = lambda: None  # type: ignore[method-assign]
        self.router = RegionRouter(regions, worker, lambda: time.now_us)
        own: Any = Connection(self.store, time)
        self.agent = ReservedAgent(own, self.home, worker.demand, regions=3, monotonic=time.monotonic)  # type: ignore[arg-type]
        self.demand = worker.demand

    def check(self, limit: Limit, cost: int, who: str = "ada") -> bool:
        pool = self.router.counted(limit.by(who))
        check = Check((pool,), cost)
        decision: Decision = self.store.run(check)
        deposits = [] if decision.allowed else self.router.safe_deposits(check, decision)
        if deposits:
            self.store.run(deposits[0])
            decision = self.store.run(check)
        return self.router.finish(Check((limit.by(who),), cost), check, decision).allowed


LIMITS = [
    reserved(100, "fixed_window"),
    reserved(100, "sliding_log"),
    reserved(100, "token_bucket"),
    reserved(100, "gcra"),
    Limit(100, timedelta(seconds=10), algorithm="token_bucket", burst=200, region="reserved", name="fast"),
]
SKEW = st.integers(-300_000, 300_000)


@settings(max_examples=40)
@given(st.sampled_from(LIMITS), st.integers(0, 2**32), st.tuples(SKEW, SKEW), st.integers(0, 400_000))
def test_no_partition_lets_all_regions_exceed_the_limit(
    limit: Limit, seed: int, skews: tuple[int, int], latency_us: int
) -> None:
    """Skewed clocks, lost requests, lost replies: against the definition of each limit, by the clock of the home."""
    source, time = random.Random(seed), Time()
    offsets = dict(zip(("ap", "us"), skews, strict=True)) | {"eu": 0}
    stores = {name: MemoryStore(SkewedClock(time, offsets[name])) for name in REGIONS}
    regions = [Region(name, time, stores) for name in REGIONS]
    for region in regions:
        region.home.latency_us = latency_us
    admitted: list[tuple[int, int]] = []
    for _ in range(400):
        region = source.choice(regions)
        match source.randrange(8):
            case 0:
                region.home.state = source.choice(["works", "works", "cut", "mute"])
            case 1 | 2:
                time.now_us += source.choice([10_000, 200_000, 1_000_000, 7_000_000])
            case 3 | 4:
                for each in regions:
                    each.agent.run_once()
            case _:
                for _ in range(source.randrange(1, 30)):
                    cost = source.choice([1, 1, 1, 5])
                    if region.check(limit, cost):
                        admitted.append((time.now_us, cost))
    assert_within(limit, admitted)


def assert_within(limit: Limit, admitted: list[tuple[int, int]]) -> None:
    if limit.algorithm == "fixed_window":
        windows: dict[int, int] = {}
        for at_us, cost in admitted:
            windows[at_us // limit.period_us] = windows.get(at_us // limit.period_us, 0) + cost
        assert max(windows.values(), default=0) <= limit.quota
    elif limit.algorithm == "sliding_log":
        for start_us, _ in admitted:
            within = sum(cost for at_us, cost in admitted if start_us <= at_us < start_us + limit.period_us)
            assert within <= limit.quota
    else:
        level, last_us = limit.full, START_US
        for at_us, cost in admitted:
            level = min(limit.full, level + (at_us - last_us) * limit.tokens) - cost * limit.ticks
            last_us = at_us
            assert level >= 0


@pytest.mark.parametrize("limit", LIMITS[:4], ids=lambda limit: limit.algorithm)
def test_one_region_can_use_nearly_all_of_the_limit(limit: Limit) -> None:
    time = Time()
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region, admitted = Region("us", time, stores), 0
    for _ in range(600):  # a minute at ten per second
        admitted += region.check(limit, 1)
        region.agent.run_once()
        time.now_us += 100_000
    one_store = MemoryStore(SkewedClock(time, 0))
    assert admitted >= 0.85 * limit.quota  # 100 is small: each region has at least one token of its own
    assert one_store.check(limit.by("ada")).allowed


def test_one_call_leases_for_all_hot_keys() -> None:
    time = Time()
    region = Region("us", time, {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS})
    limit, tenths = reserved(100_000), 300
    for tenth in range(tenths):
        for number in range(min(20, 1 + tenth)):  # each begins at another time
            region.check(limit, 2, f"client {number}")
        region.agent.run_once()
        time.now_us += SECOND // 10
    assert region.agent.home_calls <= 20 + tenths / 10


def test_unspent_tokens_return_to_the_home_region() -> None:
    time, limit = Time(), reserved(1000, "token_bucket")
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region = Region("us", time, stores)
    for _ in range(50):  # a second at fifty per second, and then nothing
        region.check(limit, 1)
        region.agent.run_once()
        time.now_us += 20_000
    for _ in range(100):
        region.agent.run_once()
        time.now_us += 100_000
    (leases,) = region.agent.keys.values()
    assert leases.returned > 0
    home = stores["eu"].check(leases.home_key, cost=0)
    assert home.remaining == leases.reservation.home.capacity  # refilled, or returned


@pytest.mark.parametrize("algorithm", ["fixed_window", "gcra", "sliding_log", "sliding_window"])
@pytest.mark.parametrize("pause_s", [0, 1, 3, 5])
def test_unspent_tokens_of_several_leases_return(algorithm: str, pause_s: int) -> None:
    """The first of two leases is nearly over when the tokens of the second one would be returned."""
    time, limit = Time(), Limit(10**4, timedelta(days=1), algorithm=algorithm, region="reserved", name="daily")
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region, spent = Region("us", time, stores), 0
    for second in (0, pause_s):
        while time.now_us < START_US + (second + 2) * SECOND:
            spent += sum(region.check(limit, 1) for _ in range(10))
            region.agent.run_once()
            time.now_us += 20_000
        region.agent.run_once()
        time.now_us = max(time.now_us, START_US + pause_s * SECOND)
    for _ in range(150):
        region.agent.run_once()
        time.now_us += 100_000
    (leases,) = region.agent.keys.values()
    home = leases.reservation.home
    held = stores["us"].check(region.router.counted(limit.by("ada")), cost=0).remaining
    assert leases.returned > 0
    left = stores["eu"].check(leases.home_key, cost=0).remaining
    assert home.capacity - left <= spent + held + (2 if algorithm == "gcra" else 0)


@pytest.mark.parametrize("algorithm", ["fixed_window", "gcra", "sliding_window", "token_bucket"])
def test_a_refund_after_the_lease_returns_to_the_home_region_once(algorithm: str) -> None:
    time, limit = Time(), Limit(1000, timedelta(days=1), algorithm=algorithm, region="reserved", name="daily")
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region = Region("us", time, stores)
    while not region.check(limit, 50):
        region.agent.run_once()
        time.now_us += SECOND
    at_us = time.now_us
    for _ in range(30):
        time.now_us += 2 * SECOND
        region.agent.run_once()
    time.now_us += 2 * SECOND
    home_key = region.router.reservation(limit).home.by("ada")

    def used() -> int:
        return home_key.limit.capacity - stores["eu"].check(home_key, cost=0).remaining

    before, refund = used(), Refund(limit.by("ada"), 40, None, at_us)
    (routed,) = region.router.route(refund)
    assert not region.store.run(routed)
    region.router.record_change(refund, result=False)
    region.home.state = "mute"
    region.agent.run_once()
    assert used() == before - 40
    region.home.state = "works"
    for _ in range(3):  # the reply was lost, and it is sent again
        time.now_us += 2 * SECOND
        region.agent.run_once()
    assert before - 41 <= used() <= before - 40  # a bucket refills
    assert not region.demand.refunds


def test_tokens_that_arrive_too_late_return_to_the_home_region() -> None:
    time, limit = Time(), Limit(1000, timedelta(days=1), algorithm="fixed_window", region="reserved", name="daily")
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region = Region("us", time, stores)
    home_key = reserve(limit, 3).home.by("ada")
    region.home.latency_us = 4 * SECOND
    for _ in range(5):
        region.check(limit, 1)
        region.agent.run_once()
        time.now_us += 2 * SECOND
    region.home.latency_us = 0
    assert not region.agent.keys[region.router.counted(limit.by("ada"))].leased
    assert stores["eu"].check(home_key, cost=0).remaining < home_key.limit.quota
    for _ in range(3):
        time.now_us += 2 * SECOND
        region.agent.run_once()
    assert stores["eu"].check(home_key, cost=0).remaining == home_key.limit.quota


def test_a_client_who_comes_now_and_then_finds_tokens() -> None:
    """Tokens of busy clients expire within seconds; a request every ten seconds must pass nevertheless."""
    time, limit = Time(), reserved(1000, "sliding_log")
    stores = {name: MemoryStore(SkewedClock(time, 0)) for name in REGIONS}
    region = Region("us", time, stores)
    for _ in range(60):
        assert region.check(limit, 1)
        for _ in range(10):
            region.agent.run_once()
            time.now_us += SECOND


# ------------------------------------------------------------- real servers


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RedisServer]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(RedisServer()) for name in REGIONS}


@pytest.fixture
def limiters(servers: dict[str, RedisServer], unique: str) -> Iterator[dict[str, Limiter]]:
    urls = {name: server.url for name, server in servers.items()}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Limiter(url, namespace=unique, region=name, regions=urls, home="eu"))
            for name, url in urls.items()
        }


def test_shares_follow_demand(limiters: dict[str, Limiter]) -> None:
    """400 for one region, and 300 for each of the others, whose demands decide: the limit is not divided in advance."""
    key = Limit(1000, timedelta(days=1), algorithm="sliding_log", region="reserved", name="daily").by("ada")
    wanted, admitted = {"ap": 400, "eu": 300, "us": 300}, dict.fromkeys(REGIONS, 0)

    def spend() -> bool:
        for name, limiter in limiters.items():
            for _ in range(4):
                if admitted[name] < wanted[name] * 0.95:
                    admitted[name] += limiter.check(key).allowed
        return all(admitted[name] >= wanted[name] * 0.95 for name in REGIONS)

    wait_until(spend, "all regions to get what they want", timeout=60)
    assert sum(admitted.values()) <= 1000


def test_without_the_home_region_a_region_spends_its_safe_share(servers: dict[str, RedisServer], unique: str) -> None:
    with RedisServer() as home:
        urls = {"eu": home.url, "us": servers["us"].url}
        with Limiter(urls["us"], namespace=unique, region="us", regions=urls, home="eu") as limiter:
            limit = Limit(1000, timedelta(days=1), algorithm="fixed_window", region="reserved", name="daily")
            home.pause()
            safe = reserve(limit, 2).safe
            assert [limiter.check(limit.by("ada")).allowed for _ in range(safe + 2)] == [True] * safe + [False] * 2
            home.resume()
            wait_until(lambda: limiter.check(limit.by("ada")).allowed, "tokens of the home region")


def test_a_reset_gives_the_limit_back(limiters: dict[str, Limiter]) -> None:
    key = Limit(100, timedelta(days=1), algorithm="fixed_window", region="reserved", name="daily").by("ada")
    us = limiters["us"]
    wait_until(lambda: not us.check(key).allowed and us.peek(key).remaining == 0, "the limit to be used up", timeout=60)
    us.reset(key)
    wait_until(lambda: us.check(key).allowed, "tokens after the reset")


def test_asyncio(servers: dict[str, RedisServer], unique: str) -> None:
    urls = {name: server.url for name, server in servers.items()}

    async def run() -> None:
        async with AsyncLimiter(urls["us"], namespace=unique, region="us", regions=urls, home="eu") as limiter:
            key = reserved().by("ada")
            assert (await limiter.check(key)).allowed
            assert limiter.bound(key.limit) == 0

    asyncio.run(run())


def test_denials_say_when_the_home_region_has_tokens_again(limiters: dict[str, Limiter]) -> None:
    key = Limit(100, timedelta(days=1), algorithm="fixed_window", region="reserved", name="hint").by("ada")
    us = limiters["us"]
    wait_until(lambda: (us.check(key).retry_after or 0) > 1, "the home region to be used up", timeout=60)
    assert us.check(key).remaining == 0


def test_repeated_id_is_charged_once(limiters: dict[str, Limiter]) -> None:
    key = Limit(1000, timedelta(days=1), algorithm="fixed_window", region="reserved", name="ids").by("ada")
    us = limiters["us"]
    first = us.check(key, id="order-7")
    assert first.allowed
    assert us.check(key, id="order-7").allowed
    pool = us.engine.router.counted(key)
    assert us.engine.store.run(Check((pool,), 0)).remaining == reserve(key.limit, 3).safe - 1


def test_agents_of_one_region_share_a_lock(servers: dict[str, RedisServer], unique: str) -> None:
    """Two processes of a region do not both lease for the same demand."""
    urls = {name: server.url for name, server in servers.items()}
    options: Any = {"namespace": unique, "region": "us", "regions": urls, "home": "eu"}
    with Limiter(urls["us"], **options) as one, Limiter(urls["us"], **options) as two:
        key = Limit(1000, timedelta(days=1), algorithm="fixed_window", region="reserved", name="lock").by("ada")
        for limiter in (one, two):
            limiter.check(key)
        agents = [limiter.engine.worker.agent for limiter in (one, two)]
        wait_until(lambda: sum(one.check(key).allowed and two.check(key).allowed for _ in range(5)) > 0, "tokens")
        assert agents[0] is not agents[1]

        def leased() -> list[int]:
            return [sum(leases.leased for leases in [*agent.keys.values()]) for agent in agents]

        wait_until(lambda: max(leased()) > 0, "a lease")
        assert min(leased()) == 0


class RacingRuntime(Runtime):
    """Starts workers while another thread wants to start them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.race: Callable[[], Any] = lambda: None
        self.threads: list[threading.Thread] = []

    def start_worker(self, name: str, steps: Iterator[float], wakeup: Any) -> Any:
        self.started.append(name)
        if not self.threads:
            self.threads.append(threading.Thread(target=self.race))
            self.threads[0].start()
            self.threads[0].join(0.2)  # it cannot end before this call does
        return SimpleNamespace(is_alive=True, is_current=False)


@pytest.mark.parametrize("work", ["exchange", "agent"])
def test_threads_that_are_first_at_the_same_time_start_one_worker(work: str) -> None:
    opened: list[str] = []

    def open_client(region: str) -> Any:
        opened.append(region)
        return SimpleNamespace()

    runtime = RacingRuntime()
    worker = RegionWorker(Regions("us", "eu", (("eu", ""), ("us", ""))), open_client, runtime=runtime)
    runtime.race = getattr(worker, f"ensure_{work}")
    runtime.race()
    runtime.threads[0].join()
    assert len(runtime.started) == 1
    assert sorted(opened) == ["eu", "us"]
