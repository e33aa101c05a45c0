"""Fair shares: the guarantees, next to an independent model in exact fractions, on every store."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headgate import AsyncLimiter, FairLimit, InvalidLimit, Limit, Limiter
from headgate.algorithms import fair_share
from headgate.bounds import OvershootMeter, fair_share_wait
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

SECOND = 1_000_000
NOW = 1_763_251_200 * SECOND
TENANTS = ["a", "b", "c", "d|e", "f g", "ü"]

numbers = st.tuples(
    st.sampled_from([1, 3, 8, 20, 100, 1_000]),
    st.sampled_from([1_000, 999_983, SECOND, 60 * SECOND]),
    st.sampled_from([1, 2, 7, 16, 100]),
)
requests = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([1, 1, 1, 2, 3, 5, 0]),
        st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.1, 0.5, 1.1, 2.5]),
    ),
    min_size=8,
    max_size=60,
)


@dataclass
class FairModel:
    """Guaranteed buckets that are filled one by one, piece by piece of time, in exact fractions.

    It has no virtual clock, no cached floor and no rounding."""

    limit: FairLimit
    start_us: int = 0
    now_us: int = 0
    level: Fraction = Fraction(0)
    own: dict[str, Fraction] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    borrowed: Counter[str] = field(default_factory=Counter)
    surplus: Fraction | None = None

    @property
    def rate(self) -> Fraction:
        return Fraction(self.limit.tokens, self.limit.ticks)

    def cap(self, weight: int) -> Fraction:
        return Fraction(self.limit.capacity * weight, 2 * sum(self.weights.values()))

    def clip(self) -> None:
        for name, weight in self.weights.items():
            self.own[name] = min(self.own[name], self.cap(weight))

    def advance(self, to_us: int) -> None:
        length_us = -(-self.limit.full // self.limit.tokens)
        if not self.weights:
            self.start_us = self.now_us = to_us
            self.level = Fraction(self.limit.capacity)
        while self.now_us < to_us:
            until_us = min(to_us, self.start_us + length_us)
            gained = self.rate * (until_us - self.now_us)
            self.level = min(Fraction(self.limit.capacity), self.level + gained)
            total = sum(self.weights.values())
            for name, weight in self.weights.items():
                self.own[name] += gained * weight / total
            self.clip()
            self.now_us = until_us
            if until_us == self.start_us + length_us:
                self.start_us = until_us
                self.rotate()
                if not self.weights:
                    self.start_us = self.now_us = to_us
                    self.level = Fraction(self.limit.capacity)

    def rotate(self) -> None:
        level = self.surplus
        # Of the surplus, those that took three quarters of its level divide what the others left.
        heavy = [
            name
            for name, taken in self.borrowed.items()
            if level is not None and 4 * taken > 3 * level * self.weights[name]
        ]
        chosen = heavy or list(self.borrowed)
        total = sum(self.borrowed[name] for name in chosen)
        weight = sum(self.weights[name] for name in chosen)
        self.surplus = Fraction(total * 64 // weight, 64) if weight else None
        self.weights = {name: weight for name, weight in self.weights.items() if name in self.present}
        self.own = {name: self.own[name] for name in self.weights}
        self.present, self.borrowed = set(), Counter()

    def enter(self, name: str, weight: int) -> None:
        if weight > self.weights.get(name, 0):
            self.own[name] = Fraction(0)
        self.weights[name] = weight
        self.present.add(name)
        self.clip()

    def room(self, name: str) -> tuple[Fraction, Fraction]:
        weight, total = self.weights[name], sum(self.weights.values())
        reserve = -(-(Fraction(self.limit.capacity, 2) * (total - weight) / total) // 1)
        left = self.level - reserve
        if self.surplus is not None:
            share = self.surplus * weight // 1 - self.borrowed[name]
            left = max(left - reserve // 2, min(left, share))
        return self.own[name], left

    def charge(self, name: str, cost: int, *, borrows: bool) -> None:
        self.level -= cost
        if borrows:
            self.own[name] = Fraction(0)
            self.borrowed[name] += cost
        else:
            self.own[name] -= cost


@given(numbers, requests, st.sampled_from([(1, 1, 1, 1), (1, 2, 4, 1), (5, 3, 1, 1)]))
def test_decisions_agree_with_the_model(
    shape: tuple[int, int, int], history: list[tuple[int, int, float]], weights: tuple[int, ...]
) -> None:
    quota, period_us, burst = shape
    limit = FairLimit(quota, timedelta(microseconds=period_us), burst=burst, name="api")
    length_us = fair_share.epoch_us(limit)
    clock, model = FakeClock(NOW), FairModel(limit)
    with Limiter("memory://", clock=clock) as limiter:
        for which, cost, step in history:
            clock.set_us(clock.now_us() + int(step * length_us))
            if not cost:
                continue
            name, weight = TENANTS[which], weights[which]
            model.advance(clock.now_us())
            if cost <= limit.capacity:
                model.enter(name, weight)
            decision = limiter.check(limit.by(name, weight=weight), cost=cost)
            if cost > limit.capacity:
                assert decision.unsatisfiable
                continue
            own, left = model.room(name)
            # The clock of shares rounds against the tenant, by less than this for each request and epoch.
            slack = Fraction(len(history) * 4 * max(weights), fair_share.scale(limit))
            if abs(own - cost) <= slack:
                return  # either is right
            assert decision.allowed is (own >= cost or left >= cost), (name, cost, float(own), float(left))
            if decision.allowed:
                model.charge(name, cost, borrows=own < cost)
            assert sum(model.own.values()) <= model.level + slack


@pytest.fixture(scope="module")
def pair(store_url: str) -> Iterator[tuple[Limiter, Limiter, FakeClock]]:
    clock = FakeClock(NOW)
    with Limiter("memory://", clock=clock) as expected, Limiter(store_url, clock=clock) as tested:
        yield expected, tested, clock


@settings(max_examples=settings().max_examples // 2)
@given(numbers, requests, st.integers(0, 2**32))
def test_all_stores_decide_alike(
    pair: Any,
    store_url: str,
    fresh_name: Any,
    shape: tuple[int, int, int],
    history: list[tuple[int, int, float]],
    seed: int,
) -> None:
    """Each field of each decision, also after refunds, changes of weight and steps of the clock into the past."""
    quota, period_us, burst = shape
    chance, name = random.Random(seed), fresh_name()
    limit = FairLimit(quota, timedelta(microseconds=period_us), burst=burst, name=name)
    other = FairLimit(quota + 1, timedelta(microseconds=period_us), burst=burst + 1, name=name)
    own = Limit(5, timedelta(seconds=1), name=f"{name}-own")
    length_us = fair_share.epoch_us(limit)
    # On several servers, what another limit denies is charged and given back.
    can_combine = store_url.startswith(("memory:", "redis:", "redis+sentinel:"))
    expected, tested, clock = pair
    clock.set_us(NOW)
    for which, cost, step in history:
        back_us = chance.choice([0, 0, 0, 0, 0, 0, 0, length_us // 3, 4 * length_us])
        clock.set_us(clock.now_us() + int(step * length_us) - back_us)
        chosen = chance.choice([limit, limit, limit, limit, limit, limit, other])
        key = chosen.by(TENANTS[which + chance.randrange(3)], weight=chance.choice([1, 1, 2, 7]))
        if chance.random() < 0.1:
            assert tested.refund(key, cost) == expected.refund(key, cost)
            continue
        keys = (key, own.by("x")) if can_combine and chance.random() < 0.3 else (key,)
        ours, theirs = (each.check(*keys, cost=cost) for each in (tested, expected))
        assert (ours.allowed, ours.verdicts, ours.at_us) == (theirs.allowed, theirs.verdicts, theirs.at_us)


@given(numbers, requests)
def test_remaining_and_retry_after_are_exact(
    shape: tuple[int, int, int], history: list[tuple[int, int, float]]
) -> None:
    quota, period_us, burst = shape
    limit = FairLimit(quota, timedelta(microseconds=period_us), burst=burst, name="api")
    length_us = fair_share.epoch_us(limit)
    state, now_us, meter = None, NOW, OvershootMeter(Limit(quota, timedelta(microseconds=period_us), burst=burst))
    for which, cost, step in history:
        now_us += int(step * length_us)
        member: Any = limit.by(TENANTS[which]).limit
        after, (remaining, retry_us, reset_us, _) = fair_share.decide(state, now_us, cost, member)
        if not retry_us and cost:
            meter.add(now_us, cost)
        if cost:
            state = after
        assert fair_share.decide(state, now_us, 0, member)[1][0] == remaining
        if remaining:
            assert fair_share.decide(state, now_us, remaining, member)[1][1] == 0
        if remaining < burst:
            assert fair_share.decide(state, now_us, remaining + 1, member)[1][1] > 0
        if retry_us > 0:
            assert fair_share.decide(state, now_us + retry_us, cost, member)[1][1] == 0
            if retry_us > 1:
                assert fair_share.decide(state, now_us + retry_us - 1, cost, member)[1][1] == 1
        # As new: nobody's share is kept any more, and the common bucket is full.
        assert fair_share.decide(state, now_us + reset_us, 0, member)[1] == (burst, 0, 0, 0)
    assert meter.largest == 0


def saturate(limiter: Limiter, keys: list[Any], clock: FakeClock, *, until_us: int, step_us: int) -> Counter[str]:
    """Each client sends as often as the clock ticks, in turn."""
    admitted: Counter[str] = Counter()
    while clock.now_us() < until_us:
        for key in keys:
            admitted[key.parts[0]] += limiter.check(key).allowed
        clock.set_us(clock.now_us() + step_us)
    return admitted


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def limiter(clock: FakeClock) -> Iterator[Limiter]:
    with Limiter("memory://", clock=clock) as limiter:
        yield limiter


def test_a_tenant_alone_gets_the_whole_limit(limiter: Limiter, clock: FakeClock) -> None:
    limit = FairLimit(100, timedelta(seconds=1), name="api")
    assert [limiter.check(limit.by("a")).allowed for _ in range(101)] == [True] * 100 + [False]
    admitted = saturate(limiter, [limit.by("a")], clock, until_us=NOW + 10 * SECOND, step_us=2_000)
    assert admitted["a"] == pytest.approx(1_000, abs=2)
    # Again, a while after another one has left.
    limiter.check(limit.by("b"))
    clock.advance(2)
    assert limiter.peek(limit.by("a")).remaining == 100


def test_what_others_leave_is_used_while_they_are_active(limiter: Limiter, clock: FakeClock) -> None:
    limit = FairLimit(100, timedelta(seconds=1), name="api")
    idlers = [limit.by(f"t{number}") for number in range(9)]
    admitted = 0
    for _ in range(10):
        for key in idlers:
            assert limiter.check(key).allowed
        admitted += saturate(limiter, [limit.by("hog")], clock, until_us=clock.now_us() + SECOND, step_us=1_000)["hog"]
    # The burst and ten seconds, less the ten requests of each of the nine others.
    assert admitted >= 1_000 - 90


@pytest.mark.parametrize("hogs", [1, 7, 19])
def test_a_newcomer_is_admitted_within_the_bound(limiter: Limiter, clock: FakeClock, hogs: int) -> None:
    limit = FairLimit(1_000, timedelta(seconds=1), name="api")
    keys = [limit.by(f"hog-{number}") for number in range(hogs)]
    saturate(limiter, keys, clock, until_us=NOW + 3 * SECOND, step_us=1_000)
    for number in range(20):
        key, began_us = limit.by(f"new-{number}"), clock.now_us()
        bound_us = fair_share_wait(limit, 1, hogs + number + 1)
        assert bound_us is not None
        decision = limiter.check(key)
        while not decision.allowed:
            assert clock.now_us() < began_us + bound_us
            wait_us = decision.retry_after_us or 0
            saturate(limiter, keys, clock, until_us=clock.now_us() + wait_us, step_us=max(1, wait_us))
            decision = limiter.check(key)
        assert clock.now_us() - began_us <= bound_us


@given(
    numbers,
    st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=1, max_size=6),
    st.sampled_from([1, 2, 7]),
    st.integers(1, 4),
    st.lists(st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.9, 1.3]), max_size=4),
    st.lists(st.floats(0, 1), max_size=3),
)
def test_others_cannot_starve_a_tenant(
    shape: tuple[int, int, int],
    weights: list[int],
    weight: int,
    part: int,
    history: list[float],
    moments: list[float],
) -> None:
    """Tenants of any weight take everything at any moments: another one waits for its first request within the bound,
    and never again while it stays within its share."""
    quota, period_us, burst = shape
    total = weight + sum(weights)
    burst = max(burst, -(-2 * total // weight))  # so that there is a bound
    limit = FairLimit(quota, timedelta(microseconds=period_us), burst=burst, name="api")
    others = [limit.by(f"other-{number}", weight=each) for number, each in enumerate(weights)]
    key, cost = limit.by("another", weight=weight), max(1, burst * weight // (2 * total * part))
    bound_us = fair_share_wait(limit, weight, total, cost)
    assume(bound_us is not None)
    assert bound_us is not None
    clock = FakeClock(NOW)
    with Limiter("memory://", clock=clock) as limiter:

        def take_everything(at_us: int) -> None:
            clock.set_us(at_us)
            for other in others:
                for each in (burst, burst // 4 + 1, 1):
                    while limiter.check(other, cost=each).allowed:
                        pass

        take_everything(NOW)
        for step in history:
            take_everything(clock.now_us() + int(step * fair_share.epoch_us(limit)))
        began_us = clock.now_us()
        is_admitted = limiter.check(key, cost=cost).allowed
        for moment in sorted(moments):
            take_everything(began_us + int(moment * bound_us))
        take_everything(began_us + bound_us)
        assert is_admitted or limiter.check(key, cost=cost).allowed
        for _ in range(20):
            take_everything(clock.now_us() + bound_us)
            assert limiter.check(key, cost=cost).allowed


def test_a_tenant_within_its_share_never_waits(limiter: Limiter, clock: FakeClock) -> None:
    limit = FairLimit(1_000, timedelta(seconds=1), name="api")
    hogs = [limit.by(f"hog-{number}") for number in range(9)]
    modest = limit.by("modest")
    limiter.check(modest)
    saturate(limiter, hogs, clock, until_us=NOW + SECOND // 2, step_us=1_000)
    for _ in range(300):
        assert limiter.check(modest).allowed
        saturate(limiter, hogs, clock, until_us=clock.now_us() + 10_000, step_us=1_000)


@pytest.mark.parametrize(
    ("weights", "shares"), [((1, 1), (0.5, 0.5)), ((3, 1), (0.75, 0.25)), ((1, 2, 5), (0.125, 0.25, 0.625))]
)
def test_saturating_tenants_get_shares_by_weight(
    limiter: Limiter, clock: FakeClock, weights: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    limit = FairLimit(200, timedelta(seconds=1), name="api")
    keys = [limit.by(f"t{number}", weight=weight) for number, weight in enumerate(weights)]
    # The first one sends ten times as often.
    keys = [keys[0]] * 10 + keys[1:]
    saturate(limiter, keys, clock, until_us=NOW + 3 * SECOND, step_us=2_500)
    admitted = saturate(limiter, keys, clock, until_us=NOW + 13 * SECOND, step_us=2_500)
    assert sum(admitted.values()) == pytest.approx(2_000, abs=3)
    for number, share in enumerate(shares):
        assert admitted[f"t{number}"] / 2_000 == pytest.approx(share, abs=0.03)


def test_the_surplus_of_modest_tenants_is_divided_by_weight(limiter: Limiter, clock: FakeClock) -> None:
    """Weighted max-min: twenty modest tenants get what they ask for, and two others half of the rest each."""
    limit = FairLimit(300, timedelta(seconds=1), name="api")
    modest = [limit.by(f"modest-{number}") for number in range(20)]
    hogs = [limit.by("loud")] * 10 + [limit.by("quiet")]
    admitted: Counter[str] = Counter()
    for second in range(20):
        for key in modest:
            assert limiter.check(key).allowed
        found = saturate(limiter, hogs, clock, until_us=clock.now_us() + SECOND, step_us=3_000)
        if second >= 6:
            admitted += found
    total = admitted["loud"] + admitted["quiet"]
    assert total == pytest.approx(14 * 280, rel=0.02)
    assert admitted["quiet"] / total == pytest.approx(0.5, abs=0.05)


def test_a_denied_request_is_not_charged(limiter: Limiter) -> None:
    limit, own = FairLimit(10, timedelta(seconds=10), name="api"), Limit(1, timedelta(seconds=10), name="own")
    assert limiter.check(limit.by("a"), own.by("a")).allowed
    assert not limiter.check(limit.by("a"), own.by("a")).allowed
    assert limiter.peek(limit.by("a")).remaining == 9


def test_the_state_is_bounded_by_active_tenants(redis7: RedisServer, fresh_name: Any, clock: FakeClock) -> None:
    limit = FairLimit(1_000, timedelta(seconds=1), name=fresh_name())
    with Limiter(redis7.url, clock=clock) as limiter:
        for number in range(600):
            limiter.check(limit.by(f"t{number}"))
            clock.advance(0.05)
    with closing(redis.Redis.from_url(redis7.admin_url)) as server:
        (key,) = server.scan_iter(f"*{limit.name}*", count=100_000)
        # In two epochs, forty tenants are active, with two fields each. Others leave as new ones come.
        assert server.hlen(key) <= 1 + 2 * 41
        assert 0 < server.pttl(key) < 4_000_000
    state: Any = None
    for number in range(20_000):
        state, _ = fair_share.decide(state, NOW + number * 50_000, 1, limit.by(f"t{number}").limit)
    assert sum(map(len, state.leaves)) <= 2 * fair_share.LEAVES


def test_a_batch_admits_the_whole_limit_and_no_more(remote_url: str, fresh_name: Any, clock: FakeClock) -> None:
    limit = FairLimit(30, timedelta(seconds=10), name=fresh_name())
    own = Limit(1_000, timedelta(seconds=10), name=f"{limit.name}-own")

    async def send() -> Counter[str]:
        async with AsyncLimiter(remote_url, clock=clock) as limiter:
            keys = [limit.by(f"t{number % 5}") for number in range(100)]
            pairs = [limiter.check(key, own.by("x")) for key in keys[50:]]
            found = await asyncio.gather(*map(limiter.check, keys[:50]), *pairs)
            assert not (await limiter.peek(limit.by("t0"))).remaining
            return Counter([each.allowed for each in found])

    admitted = asyncio.run(send())[True]
    assert 15 <= admitted <= 30


def test_an_id_is_of_one_tenant(store_url: str, fresh_name: Any, clock: FakeClock) -> None:
    limit = FairLimit(10, timedelta(seconds=10), name=fresh_name())
    with Limiter(store_url, clock=clock) as limiter:
        for _ in range(2):
            assert limiter.check(limit.by("a"), id="order-1").remaining == 9
            assert limiter.check(limit.by("b"), id="order-1").allowed
        assert limiter.peek(limit.by("a")).allowed
        assert limiter.check(limit.by("a"), cost=0).remaining + 2 <= 8


@pytest.mark.parametrize("weight", [0, 1001, 1.5, True, "3"])
def test_invalid_weights_are_refused(weight: Any) -> None:
    with pytest.raises(InvalidLimit, match="is not a whole number from 1 to 1000"):
        FairLimit(10, timedelta(seconds=1)).by("a", weight=weight)
