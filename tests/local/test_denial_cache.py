"""The denial cache: cached denials equal the answers of the store, to the microsecond."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Decision, Key, Limit
from headgate.algorithms import NEVER
from headgate.local.denial_cache import MAX_AGE_US, MAX_INVALIDATIONS, DenialCache
from headgate.local.single_flight import SingleFlight
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Leave, Refund, Reset
from headgate.testing import FakeClock
from support.next_allowed import with_again

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 1_000_000
ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")
CACHED_ALGORITHMS = ALGORITHMS[1:]

each_algorithm = pytest.mark.parametrize("algorithm", CACHED_ALGORITHMS)


def limit_of(algorithm: str, quota: int, period_us: int, name: str = "x") -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), algorithm=algorithm, name=name)


TEN = limit_of("token_bucket", 10, 10 * SECOND, "ten")
USER = limit_of("token_bucket", 2, 10 * SECOND, "user")
EVERYBODY = limit_of("fixed_window", 6, 100 * SECOND, "everybody")


class CachedStore:
    """A memory store behind a denial cache, on a fake clock."""

    def __init__(
        self, now_us: int = 100 * SECOND, *, most: int = 100, reports_next_allowed: bool = False, min_denials: int = 0
    ) -> None:
        self.clock = FakeClock(now_us)
        self.store = MemoryStore(self.clock)
        self.cache = DenialCache(self.clock, max_entries=most, min_denials=min_denials)
        self.reports_next_allowed = reports_next_allowed
        self.sent = 0

    def check(self, *keys: Key, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Decision:
        return self.run(Check(keys, cost, id))

    def run(self, call: Check) -> Decision:
        found = self.cache.get(call)
        if isinstance(found, Decision):
            return found
        asked_us = self.cache.now_us()
        decision = self.ask(call)
        self.cache.record(call, decision, asked_us)
        if found is not None:
            self.cache.end_flight(call, found)
        return decision

    def ask(self, call: Check) -> Decision:
        self.sent += 1
        decision: Decision = self.store.run(call)
        return with_again(decision, call.cost, lambda: self.store.run(call)) if self.reports_next_allowed else decision

    def refund(self, key: Key, amount: int) -> bool:
        given: bool = self.store.run(Refund(key, amount))
        self.cache.invalidate(key.limit.space, key.identity)
        return given

    def is_cached(self, *keys: Key, cost: int | tuple[int, ...] = 1) -> bool:
        """True if the cache answers this check; the store is not called."""
        return isinstance(self.cache.get(Check(keys, cost)), Decision)


@pytest.fixture
def cached() -> CachedStore:
    return CachedStore()


# ------------------------------------------------------------ expiry


@each_algorithm
def test_denial_is_cached_until_it_ends(cached: CachedStore, algorithm: str) -> None:
    key = limit_of(algorithm, 3, 7 * SECOND).by("ada")
    cached.check(key, cost=2)
    denied = cached.check(key, cost=2)
    assert (denied.allowed, cached.sent) == (False, 2)
    assert denied.retry_after_us is not None
    start_us = cached.clock.now_us()
    for after_us in (0, 1, denied.retry_after_us // 2, denied.retry_after_us - 1):
        cached.clock.set_us(start_us + after_us)
        again = cached.check(key, cost=2)
        direct = cached.store.run(Check((key,), 2))
        assert again._replace(verdicts=()) == direct._replace(verdicts=())
        assert again.verdicts[0][1:] == direct.verdicts[0][1:]
        assert again.denied_by == ("x",)
    assert (cached.sent, cached.cache.hits) == (2, 4)
    cached.clock.set_us(start_us + denied.retry_after_us)
    assert cached.check(key, cost=2)
    assert cached.sent == 3


@pytest.mark.parametrize(("age_us", "is_hit"), [(0, True), (MAX_AGE_US - SECOND, True), (MAX_AGE_US, False)])
def test_denial_is_cached_for_at_most_five_seconds(age_us: int, is_hit: bool) -> None:
    denials, call = DenialCache(), Check((TEN.by("ada"),), 3)
    denied = Decision(False, call.keys, ((0, 60 * SECOND, 99 * SECOND, 0),))
    denials.record(call, denied, denials.now_us() - age_us)
    assert isinstance(denials.get(call), Decision) == is_hit


def test_real_clock_denial_does_not_outlast_its_wait() -> None:
    denials, call = DenialCache(), Check((TEN.by("ada"),), 3)
    for wait_us, is_hit in ((2 * SECOND, True), (SECOND, False), (SECOND - 1, False)):
        denials.record(call, Decision(False, call.keys, ((0, wait_us, wait_us, 0),)), denials.now_us() - SECOND)
        assert isinstance(denials.get(call), Decision) == is_hit


@pytest.mark.parametrize(("after_us", "is_hit"), [(0, True), (MAX_AGE_US - 1, True), (MAX_AGE_US, False)])
def test_unsatisfiable_check_is_repeated_every_five_seconds(cached: CachedStore, after_us: int, is_hit: bool) -> None:
    assert cached.check(TEN.by("ada"), cost=11).unsatisfiable
    cached.clock.set_us(cached.clock.now_us() + after_us)
    assert cached.is_cached(TEN.by("ada"), cost=11) == is_hit
    assert cached.check(TEN.by("ada"), cost=11).retry_after is None


def test_clock_before_the_denial_misses_but_keeps_it(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    cached.clock.set_us(cached.clock.now_us() - 1)
    assert not cached.is_cached(TEN.by("ada"))
    cached.clock.set_us(cached.clock.now_us() + 1)
    assert cached.is_cached(TEN.by("ada"))


# ------------------------------------------------------- cached requests


@pytest.mark.parametrize(("cost", "is_hit"), [(1, False), (4, False), (5, True), (6, False), (11, False)])
def test_denial_answers_its_own_cost(cached: CachedStore, cost: int, is_hit: bool) -> None:
    """Pitfall 33: a smaller cost may pass, and the wait of a larger cost is unknown."""
    cached.check(TEN.by("ada"), cost=6)
    assert not cached.check(TEN.by("ada"), cost=5)
    assert cached.is_cached(TEN.by("ada"), cost=cost) == is_hit


def test_denial_answers_its_own_client(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    others = [
        TEN.by("bob"),
        limit_of("token_bucket", 10, 10 * SECOND).by("ada"),
        limit_of("gcra", 10, 1, "ten").by("ada"),
    ]
    assert [cached.is_cached(key) for key in (TEN.by("ada"), *others)] == [True, False, False, False]


def test_peek_is_never_answered_from_the_cache(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    assert cached.check(TEN.by("ada"), cost=0)
    assert not cached.is_cached(TEN.by("ada"), cost=0)
    assert cached.is_cached(TEN.by("ada"))


def test_denied_leases_are_not_cached(cached: CachedStore) -> None:
    """A holder may release its lease at any moment."""
    inside, key = limit_of("concurrency", 1, 10 * SECOND).by("ada"), TEN.by("ada")
    cached.check(inside, id="a")
    assert not cached.check(inside, id="b")
    assert not cached.check(inside, key, id="b")
    assert (len(cached.cache), cached.sent) == (0, 3)


def test_degraded_decision_is_not_cached() -> None:
    denials, call = DenialCache(FakeClock()), Check((TEN.by("ada"),), 1)
    denials.record(call, Decision(False, call.keys, ((0, 9, 9, 0),), degraded="closed: gone"), 0)
    assert denials.get(call) is None
    denials.record(call, Decision(False, call.keys, ((0, 9, 9, 0),)), 0)
    denials.record(call, Decision(True, call.keys, ((9, 0, 9, 0),), degraded="open: gone"), 0)
    assert denials.get(call) is not None


def test_cached_denial_has_the_id_of_its_request(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"), id="first")
    assert cached.check(TEN.by("ada"), id="second").id == "second"
    assert cached.sent == 2


# ---------------------------------------------------------- layered limits


def test_each_limit_denies_until_its_own_time(cached: CachedStore) -> None:
    quick, slow, wide = (limit_of("gcra", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20, 200))
    cached.check(quick, slow, cost=2)
    cached.check(wide)
    start_us = cached.clock.now_us()
    rows = [  # after, denied_by, retry
        (0, ("2 s", "20 s"), 10 * SECOND),
        (SECOND - 1, ("2 s", "20 s"), 9 * SECOND + 1),
        (SECOND, ("20 s",), 9 * SECOND),
        (10 * SECOND - 1, ("20 s",), 1),
    ]
    for after_us, denied_by, retry_us in rows:
        cached.clock.set_us(start_us + after_us)
        denied = cached.check(quick, slow, wide)
        direct = cached.store.run(Check((quick, slow, wide), 1))
        assert (denied.denied_by, denied.retry_after_us) == (denied_by, retry_us)
        assert [verdict[1:] for verdict in denied.verdicts] == [verdict[1:] for verdict in direct.verdicts]
    assert cached.sent == 3
    cached.clock.set_us(start_us + 10 * SECOND)
    assert cached.check(quick, slow, wide)


def test_refilled_limit_reports_the_cost_as_remaining(cached: CachedStore) -> None:
    quick, slow = (limit_of("token_bucket", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20))
    cached.check(quick, slow, cost=2)
    cached.check(quick, slow, cost=2)
    cached.clock.advance(3)
    assert [outcome.remaining for outcome in cached.check(quick, slow, cost=2).outcomes] == [2, 0]
    assert cached.cache.hits == 1


def test_pass_on_a_shared_limit_keeps_denials_of_another(cached: CachedStore) -> None:
    ada, bob, all_of_them = USER.by("ada"), USER.by("bob"), EVERYBODY.by()
    cached.check(ada, all_of_them, cost=2)
    cached.check(ada, all_of_them)
    cached.check(bob, all_of_them)
    asked = cached.sent
    denied = cached.check(ada, all_of_them)
    assert (denied.denied_by, cached.sent) == (("user",), asked)
    assert [outcome.remaining for outcome in denied.outcomes] == [0, 3]


def test_shared_limit_exhausted_by_others_denies_too(cached: CachedStore) -> None:
    ada, all_of_them = USER.by("ada"), EVERYBODY.by()
    cached.check(ada, all_of_them, cost=2)
    cached.check(ada, all_of_them)
    cached.check(all_of_them, cost=4)
    asked = cached.sent
    denied = cached.check(ada, all_of_them)
    assert (denied.denied_by, denied.retry_after, cached.sent) == (("user", "everybody"), 100.0, asked + 1)


def test_charge_on_a_denying_limit_extends_the_denial(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=6)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 1
    assert cached.check(TEN.by("ada"), cost=4)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 5
    assert (cached.sent, cached.cache.hits) == (4, 0)


def test_lease_with_a_charge_extends_the_denial(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=6)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 1
    assert cached.check(TEN.by("ada"), limit_of("concurrency", 9, SECOND).by("ada"), cost=4, id="a")
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 5


# ---------------------------------------------- denials known in advance


@pytest.mark.parametrize("algorithm", ["fixed_window", "gcra", "sliding_log", "sliding_window", "token_bucket"])
def test_last_token_is_followed_by_local_denials(algorithm: str) -> None:
    cached = CachedStore(reports_next_allowed=True)
    key, wide = limit_of(algorithm, 3, 7 * SECOND).by("ada"), limit_of("gcra", 2, SECOND, "wide").by("ada")
    taken = cached.check(key, wide, cost=(2, 1))
    assert taken
    assert taken.next_allowed_us > 0
    start_us = cached.clock.now_us()
    for after_us in (0, 1, taken.next_allowed_us - 1):
        cached.clock.set_us(start_us + after_us)
        denied = cached.check(key, wide, cost=(2, 1))
        direct = cached.store.run(Check((key, wide), (2, 1)))
        assert (denied.denied_by, denied.at_us) == (("x",), direct.at_us)
        assert [verdict[1:] for verdict in denied.verdicts] == [verdict[1:] for verdict in direct.verdicts]
    assert cached.sent == 1
    cached.clock.set_us(start_us + taken.next_allowed_us)
    assert cached.check(key, wide, cost=(2, 1))


def test_denial_is_cached_from_the_third_time() -> None:
    cached = CachedStore(reports_next_allowed=True, min_denials=3)
    key, other = limit_of("gcra", 2, 2 * SECOND).by("ada"), limit_of("gcra", 2, 2 * SECOND).by("bob")
    cached.check(other, cost=2)
    assert cached.check(key, cost=2).next_allowed_us > 0
    asked = []
    for _ in range(5):
        assert not cached.check(key, cost=2).allowed
        asked.append(cached.sent - 2)
    assert asked == [1, 2, 3, 3, 3]
    assert not cached.is_cached(other, cost=2)
    cached.clock.advance(2)
    assert cached.check(key, cost=2).next_allowed_us > 0
    assert cached.is_cached(key, cost=2)


def test_denial_counts_are_bounded() -> None:
    cached = CachedStore(most=2, min_denials=2)
    keys = [limit_of("gcra", 1, SECOND).by(name) for name in ("ada", "bob", "eve")]
    for key in keys:
        cached.check(key)
        cached.check(key)
    for key in keys[1:]:
        cached.check(key)
    cached.check(keys[0])
    assert [cached.is_cached(key) for key in keys] == [False, True, True]


def test_two_exhausted_limits_are_decided_by_the_store() -> None:
    cached = CachedStore(reports_next_allowed=True)
    quick, slow = (limit_of("gcra", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20))
    assert cached.check(quick, slow, cost=2).next_allowed_us == 20 * SECOND
    assert cached.check(quick, slow, cost=2).denied_by == ("2 s", "20 s")
    assert cached.check(quick, slow, cost=2).denied_by == ("2 s", "20 s")
    cached.clock.advance(2)
    assert cached.check(quick, slow, cost=2).denied_by == ("20 s",)
    assert cached.sent == 2


# ---------------------------------------------------------- invalidation


def test_refund_can_be_spent_at_once(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    assert not cached.check(TEN.by("ada"), cost=5)
    assert cached.refund(TEN.by("ada"), 5)
    assert cached.check(TEN.by("ada"), cost=5)


def test_refund_ends_all_denials_of_its_counter_only(cached: CachedStore) -> None:
    ada, bob, all_of_them = USER.by("ada"), USER.by("bob"), EVERYBODY.by()
    for keys in ((ada, all_of_them), (bob,)):
        cached.check(*keys, cost=2)
        cached.check(*keys)
    cached.check(ada)
    cached.refund(ada, 1)
    met = [(ada, all_of_them), (ada,), (bob,)]
    assert [cached.is_cached(*keys) for keys in met] == [False, False, True]


@pytest.mark.parametrize("before", [0.0, 0.000_001, 2.0])
def test_denial_requested_before_a_refund_is_not_cached(cached: CachedStore, before: float) -> None:
    call = Check((TEN.by("ada"),), 5)
    cached.check(TEN.by("ada"), cost=10)
    asked_us = cached.cache.now_us()
    denied = cached.ask(call)
    cached.clock.advance(before)
    cached.refund(TEN.by("ada"), 5)
    cached.cache.record(call, denied, asked_us)
    assert cached.cache.get(call) is None
    cached.clock.advance(0.001)
    cached.check(TEN.by("ada"), cost=5)
    assert not cached.check(TEN.by("ada"), cost=5)
    assert cached.is_cached(TEN.by("ada"), cost=5)


def test_denial_before_a_refund_is_dropped_after_overflow(cached: CachedStore) -> None:
    call = Check((TEN.by("ada"),), 5)
    cached.check(TEN.by("ada"), cost=10)
    asked_us = cached.cache.now_us()
    denied = cached.ask(call)
    cached.clock.advance(0.001)
    cached.refund(TEN.by("ada"), 5)
    for number in range(MAX_INVALIDATIONS):
        cached.cache.invalidate(TEN.space, f"{number}")
    assert len(cached.cache._invalidated_us) == MAX_INVALIDATIONS
    cached.cache.record(call, denied, asked_us)
    assert cached.cache.get(call) is None


def test_repeated_refunds_do_not_keep_others_uncached(cached: CachedStore) -> None:
    for number in range(MAX_INVALIDATIONS):
        cached.cache.invalidate(TEN.space, f"{number}")
    cached.clock.advance(0.001)
    asked_us = cached.cache.now_us()
    denied = cached.ask(Check((TEN.by("ada"),), 11))
    cached.clock.advance(0.001)
    cached.cache.invalidate(TEN.space, "0")
    cached.cache.invalidate(TEN.space, "one more")
    cached.cache.record(Check((TEN.by("ada"),), 11), denied, asked_us)
    assert cached.is_cached(TEN.by("ada"), cost=11)


def test_clear_removes_everything(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    cached.cache.clear()
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)
    assert not cached.is_cached(TEN.by("ada"))


def test_denial_requested_before_clear_is_not_cached(cached: CachedStore) -> None:
    call, asked_us = Check((TEN.by("ada"),), 11), cached.cache.now_us()
    denied = cached.ask(call)
    cached.clock.advance(0.001)
    cached.cache.clear()
    cached.cache.record(call, denied, asked_us)
    assert cached.cache.get(call) is None


def test_unexpected_refill_ends_the_denial(cached: CachedStore) -> None:
    """A peek shows a refund by another process."""
    cached.check(TEN.by("ada"), cost=10)
    assert not cached.check(TEN.by("ada"), cost=5)
    cached.store.run(Refund(TEN.by("ada"), 5))
    assert cached.is_cached(TEN.by("ada"), cost=5)
    assert cached.check(TEN.by("ada"), cost=0).remaining == 5
    assert cached.check(TEN.by("ada"), cost=5)


def test_changed_limit_misses_and_ends_the_old_denial(cached: CachedStore) -> None:
    """A change of limit converts the stored state, so earlier retry times no longer apply."""
    old, new = (limit_of("gcra", quota, 10 * SECOND, "plan").by("ada") for quota in (1, 10))
    cached.check(old)
    assert not cached.check(old)
    assert not cached.is_cached(new)
    assert len(cached.cache) == 0
    assert not cached.check(old)
    assert cached.check(new, cost=2).retry_after == 1.0 + 1.0
    assert not cached.is_cached(old)


def test_equal_limit_shares_the_denial(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    twin = limit_of("token_bucket", 10, 10 * SECOND, "ten")
    assert twin is not TEN
    assert cached.is_cached(twin.by("ada"))
    cached.check(twin.by("ada"), cost=0)
    assert cached.is_cached(TEN.by("ada"))


# ------------------------------------------------------------ its own comparison


def test_least_recently_used_denial_is_evicted_first() -> None:
    cached = CachedStore(most=3)
    keys = [TEN.by(name) for name in ("ada", "bob", "cat", "dan")]
    for key in keys[:3]:
        cached.check(key, cost=10)
        cached.check(key)
    cached.check(keys[0])
    cached.check(keys[3], cost=10)
    cached.check(keys[3])
    assert len(cached.cache) == 3
    assert [cached.is_cached(key) for key in keys] == [True, False, True, True]


def test_evicted_denials_leave_no_counters() -> None:
    cached = CachedStore(most=10)
    for number in range(100):
        cached.check(TEN.by(number), EVERYBODY.by(number), cost=11)
    assert (len(cached.cache), len(cached.cache._counters)) == (10, 20)
    for number in range(90, 100):
        cached.clock.advance(10)
        cached.is_cached(TEN.by(number), EVERYBODY.by(number), cost=11)
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)


def test_equal_denials_share_one_entry(cached: CachedStore) -> None:
    call, asked_us = Check((TEN.by("ada"),), 11), cached.cache.now_us()
    for _ in range(2):
        cached.cache.record(call, cached.ask(call), asked_us)
    assert len(cached.cache) == 1
    cached.clock.advance(5)
    assert not cached.is_cached(*call.keys, cost=call.cost)
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)


def test_smaller_capacity_applies_at_the_next_denial(cached: CachedStore) -> None:
    for number in range(5):
        cached.check(TEN.by(number), cost=11)
    cached.cache.max_entries = 2
    cached.check(TEN.by(4), cost=12)
    assert (len(cached.cache), len(cached.cache._counters)) == (2, 1)


def test_cache_of_size_zero_stores_nothing() -> None:
    cached = CachedStore(most=0)
    cached.check(TEN.by("ada"), cost=11)
    assert (len(cached.cache), cached.is_cached(TEN.by("ada"), cost=11)) == (0, False)


def test_forked_child_starts_empty_and_unlocked(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=11)
    cached.cache._lock.acquire()  # held by a thread that does not exist in the child
    cached.cache.reset_after_fork()
    assert not cached.is_cached(TEN.by("ada"), cost=11)
    cached.check(TEN.by("ada"), cost=11)
    assert cached.is_cached(TEN.by("ada"), cost=11)


def test_threads_share_one_cache() -> None:
    denials = DenialCache(max_entries=20)
    limits = [limit_of("gcra", 1, SECOND, name) for name in "abc"]

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3_000):
            keys = tuple(limit.by(draw.randrange(20)) for limit in draw.sample(limits, draw.choice([1, 2])))
            call, asked_us, wait_us = Check(keys, draw.choice([1, 2])), denials.now_us(), draw.choice([0, 10, NEVER])
            found = denials.get(call)
            if not isinstance(found, Decision):
                denials.record(call, Decision(wait_us == 0, keys, ((0, wait_us, 9, 0),) * len(keys)), asked_us)
            elif found.allowed or found.keys is not keys:
                failures.append(found)
            if isinstance(found, SingleFlight) and found.try_lead():
                denials.end_flight(call, found)
            if draw.random() < 0.1:
                denials.invalidate(keys[0].limit.space, keys[0].identity)

    failures: list[Decision] = []
    run_all([lambda seed=seed: use(seed) for seed in range(4)], failures)
    assert failures == []
    assert denials.hits > 0
    assert len(denials) <= 20
    assert denials._flights == {}
    uses = [counter for entry in denials._entries.values() for counter, *_ in entry.parts if counter.limit is not None]
    assert {counter.name for counter in uses} == set(denials._counters)
    assert len(uses) == sum(counter.uses for counter in denials._counters.values())


def run_all(jobs: list[Callable[[], None]], failures: list[Any]) -> None:
    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ----------------------------------------------- comparison with the store


class Comparison:
    """Runs the same operations on a plain store and on one behind a denial cache."""

    def __init__(self, plans: list[list[Limit]], *, reports_next_allowed: bool) -> None:
        self.direct, self.cached = CachedStore(50), CachedStore(50, reports_next_allowed=reports_next_allowed)
        self.plans = plans
        """For each limit, the numbers that it may change between."""
        self.limits = [choices[0] for choices in plans]
        self.log: list[str] = []

    def check(self, met: list[int], who: str, costs: list[int], id: str) -> Decision:
        limits = [self.limits[place] for place in met]
        leased = any(limit.algorithm == "concurrency" for limit in limits)
        cost = costs[0] if len(set(costs[: len(met)])) == 1 else tuple(costs[: len(met)])
        call = Check(tuple(self._key(limit, who) for limit in limits), cost, id if leased else None)
        told, true = self.cached.run(call), self.direct.store.run(call)
        self.log.append(
            f"@{self.cached.clock.now_us()} {[str(limit) for limit in limits]} {who} {cost} -> {true.verdicts}"
        )
        story = "\n".join(self.log[-15:])
        assert told.allowed == true.allowed, story
        assert told.retry_after_us == true.retry_after_us, story
        assert told.denied_by == true.denied_by, story
        assert (told.keys, told.id, told.at_us) == (true.keys, true.id, true.at_us), story
        for mine, its in zip(told.verdicts, true.verdicts, strict=True):
            assert mine[1:] == its[1:], story
            assert mine[0] <= its[0], story
        return told

    def give_back(self, place: int, who: str, amount: int, id: str) -> None:
        key = self._key(self.limits[place], who)
        call = Leave(key, id) if key.limit.algorithm == "concurrency" else Refund(key, amount)
        self._both(call, key)

    def reset(self, place: int, who: str) -> None:
        key = self._key(self.limits[place], who)
        self._both(Reset((key,)), key)

    def change(self, place: int, plan: int) -> None:
        choices = self.plans[place]
        self.limits[place] = choices[plan % len(choices)]
        self.log.append(f"{place} is {self.limits[place]}")

    def move(self, step_us: int) -> None:
        for cached in (self.direct, self.cached):
            cached.clock.set_us(max(0, cached.clock.now_us() + step_us))

    def _both(self, call: Leave | Refund | Reset, key: Key) -> None:
        self.log.append(f"@{self.cached.clock.now_us()} {call}")
        for cached in (self.direct, self.cached):
            cached.store.run(call)
        self.cached.cache.invalidate(key.limit.space, key.identity)

    def _key(self, limit: Limit, who: str) -> Key:
        """All clients share the first limit."""
        return limit.by() if limit.name == "0" else limit.by(who)


@st.composite
def plans(draw: st.DrawFn) -> list[list[Limit]]:
    algorithms = draw(st.lists(st.sampled_from(ALGORITHMS), min_size=1, max_size=3))
    numbers = st.tuples(st.integers(1, 5), st.integers(1, 12))
    return [
        [limit_of(algorithm, *draw(numbers), f"{place}") for _ in range(draw(st.sampled_from([1, 1, 2])))]
        for place, algorithm in enumerate(algorithms)
    ]


who = st.sampled_from(["ada", "ada", "bob"])
place = st.integers(0, 2)
id = st.sampled_from("ab")
# Mostly repeated requests, as from clients that ignore denials.
costs = st.sampled_from([[1, 1, 1]] * 4 + [[2, 2, 2]] * 2 + [[1, 2, 1], [2, 1, 3], [0, 1, 2], [0, 0, 0], [6, 6, 6]])
checks = st.tuples(st.just("check"), st.permutations([0, 1, 2]), st.integers(1, 3), who, costs, id)
steps = st.one_of(
    *[checks] * 6,
    st.tuples(st.just("move"), st.sampled_from([0, 1, 1, 1, 2, 3, 5, 12, 30, -1, -7])),
    st.tuples(st.just("give_back"), place, who, st.integers(1, 4), id),
    st.tuples(st.just("reset"), place, who),
    st.tuples(st.just("change"), place, st.integers(0, 1)),
)


def apply_step(comparison: Comparison, step: tuple[Any, ...]) -> None:
    what, *words = step
    if what == "check":
        order, number, who, costs, id = words
        comparison.check([place for place in order if place < len(comparison.limits)][:number], who, costs, id)
    elif what == "move":
        comparison.move(*words)
    elif words[0] < len(comparison.limits):
        getattr(comparison, what)(*words)


@given(plans(), st.booleans(), st.lists(steps, min_size=10, max_size=60))
def test_cached_decisions_equal_the_store_decisions(
    plans: list[list[Limit]], reports_next_allowed: bool, steps: list[tuple[Any, ...]]
) -> None:
    comparison = Comparison(plans, reports_next_allowed=reports_next_allowed)
    for step in steps:
        apply_step(comparison, step)


@pytest.mark.parametrize("reports_next_allowed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_long_run_equals_the_store_with_many_hits(seed: int, reports_next_allowed: bool) -> None:
    """As above, but long enough that cached denials see every kind of operation."""
    draw = random.Random(seed)
    plans = [
        [limit_of(draw.choice(CACHED_ALGORITHMS), draw.randint(1, 5), draw.randint(5, 40), f"{place}")]
        for place in range(draw.randint(1, 3))
    ]
    plans[-1].append(limit_of(plans[-1][0].algorithm, draw.randint(1, 5), draw.randint(5, 40), plans[-1][0].name))
    comparison = Comparison(plans, reports_next_allowed=reports_next_allowed)
    for _ in range(600):
        if draw.random() < 0.3:
            comparison.move(draw.choice([1, 1, 1, 1, 2, 3, 10, -1]))
        if draw.random() < 0.04:
            comparison.give_back(draw.randrange(len(plans)), draw.choice(["ada", "bob"]), draw.randint(1, 4), "a")
        if draw.random() < 0.01:
            comparison.reset(draw.randrange(len(plans)), draw.choice(["ada", "bob"]))
        if draw.random() < 0.02:
            comparison.change(draw.randrange(len(plans)), draw.randint(0, 1))
        met = sorted(draw.sample(range(len(plans)), draw.randint(1, len(plans))))
        costs = draw.choice([[1, 1, 1], [1, 1, 1], [2, 2, 2], [1, 2, 3], [0, 1, 2]])
        comparison.check(met, draw.choice(["ada", "bob"]), costs, "a")
    assert comparison.cached.cache.hits > 30
