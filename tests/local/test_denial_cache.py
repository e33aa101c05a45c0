"""Denials that are remembered say what the store would say: whether, who, and to the microsecond when."""

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
REMEMBERED = ALGORITHMS[1:]

each_algorithm = pytest.mark.parametrize("algorithm", REMEMBERED)


def limit_of(algorithm: str, quota: int, period_us: int, name: str = "x") -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), algorithm=algorithm, name=name)


TEN = limit_of("token_bucket", 10, 10 * SECOND, "ten")
USER = limit_of("token_bucket", 2, 10 * SECOND, "user")
EVERYBODY = limit_of("fixed_window", 6, 100 * SECOND, "everybody")


class CachedStore:
    """A store in memory behind what it denied, at one instant."""

    def __init__(
        self, now_us: int = 100 * SECOND, *, most: int = 100, tells_again: bool = False, min_denials: int = 0
    ) -> None:
        self.clock = FakeClock(now_us)
        self.store = MemoryStore(self.clock)
        self.cache = DenialCache(self.clock, max_entries=most, min_denials=min_denials)
        self.tells_again = tells_again
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
        return with_again(decision, call.cost, lambda: self.store.run(call)) if self.tells_again else decision

    def refund(self, key: Key, amount: int) -> bool:
        given: bool = self.store.run(Refund(key, amount))
        self.cache.invalidate(key.limit.space, key.identity)
        return given

    def answers_from_memory(self, *keys: Key, cost: int | tuple[int, ...] = 1) -> bool:
        """Whether the answer to this request is remembered; it is looked for, and nobody is asked."""
        return isinstance(self.cache.get(Check(keys, cost)), Decision)


@pytest.fixture
def cached() -> CachedStore:
    return CachedStore()


# ------------------------------------------------------------ for how long


@each_algorithm
def test_a_denial_is_remembered_until_the_very_moment_at_which_it_ends(cached: CachedStore, algorithm: str) -> None:
    key = limit_of(algorithm, 3, 7 * SECOND).by("ada")
    cached.check(key, cost=2)
    denied = cached.check(key, cost=2)
    assert (denied.allowed, cached.sent) == (False, 2)
    assert denied.retry_after_us is not None
    start_us = cached.clock.now_us()
    for after_us in (0, 1, denied.retry_after_us // 2, denied.retry_after_us - 1):
        cached.clock.set_us(start_us + after_us)
        again = cached.check(key, cost=2)
        truth = cached.store.run(Check((key,), 2))
        assert again._replace(verdicts=()) == truth._replace(verdicts=())
        assert again.verdicts[0][1:] == truth.verdicts[0][1:]
        assert again.denied_by == ("x",)
    assert (cached.sent, cached.cache.hits) == (2, 4)
    cached.clock.set_us(start_us + denied.retry_after_us)
    assert cached.check(key, cost=2)
    assert cached.sent == 3


@pytest.mark.parametrize(("age_us", "is_remembered"), [(0, True), (MAX_AGE_US - SECOND, True), (MAX_AGE_US, False)])
def test_by_the_real_clock_a_denial_is_trusted_for_five_seconds(age_us: int, is_remembered: bool) -> None:
    denials, call = DenialCache(), Check((TEN.by("ada"),), 3)
    denied = Decision(False, call.keys, ((0, 60 * SECOND, 99 * SECOND, 0),))
    denials.record(call, denied, denials.now_us() - age_us)
    assert isinstance(denials.get(call), Decision) == is_remembered


def test_by_the_real_clock_a_denial_does_not_outlast_its_wait() -> None:
    denials, call = DenialCache(), Check((TEN.by("ada"),), 3)
    for wait_us, is_remembered in ((2 * SECOND, True), (SECOND, False), (SECOND - 1, False)):
        denials.record(call, Decision(False, call.keys, ((0, wait_us, wait_us, 0),)), denials.now_us() - SECOND)
        assert isinstance(denials.get(call), Decision) == is_remembered


@pytest.mark.parametrize(("after_us", "is_remembered"), [(0, True), (MAX_AGE_US - 1, True), (MAX_AGE_US, False)])
def test_what_can_never_pass_is_asked_for_every_five_seconds(
    cached: CachedStore, after_us: int, is_remembered: bool
) -> None:
    assert cached.check(TEN.by("ada"), cost=11).unsatisfiable
    cached.clock.set_us(cached.clock.now_us() + after_us)
    assert cached.answers_from_memory(TEN.by("ada"), cost=11) == is_remembered
    assert cached.check(TEN.by("ada"), cost=11).retry_after is None


def test_an_instant_before_the_denial_is_not_answered_and_does_not_end_it(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    cached.clock.set_us(cached.clock.now_us() - 1)
    assert not cached.answers_from_memory(TEN.by("ada"))
    cached.clock.set_us(cached.clock.now_us() + 1)
    assert cached.answers_from_memory(TEN.by("ada"))


# ------------------------------------------------------- what is remembered


@pytest.mark.parametrize(("cost", "is_remembered"), [(1, False), (4, False), (5, True), (6, False), (11, False)])
def test_a_denial_answers_its_own_cost(cached: CachedStore, cost: int, is_remembered: bool) -> None:
    """Pitfall 33: a smaller cost may pass. Of a larger one nobody has said yet when it will."""
    cached.check(TEN.by("ada"), cost=6)
    assert not cached.check(TEN.by("ada"), cost=5)
    assert cached.answers_from_memory(TEN.by("ada"), cost=cost) == is_remembered


def test_a_denial_answers_its_own_client(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    others = [
        TEN.by("bob"),
        limit_of("token_bucket", 10, 10 * SECOND).by("ada"),
        limit_of("gcra", 10, 1, "ten").by("ada"),
    ]
    assert [cached.answers_from_memory(key) for key in (TEN.by("ada"), *others)] == [True, False, False, False]


def test_a_peek_is_never_answered_from_memory(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    assert cached.check(TEN.by("ada"), cost=0)
    assert not cached.answers_from_memory(TEN.by("ada"), cost=0)
    assert cached.answers_from_memory(TEN.by("ada"))


def test_leases_are_never_remembered(cached: CachedStore) -> None:
    """Whoever holds one may give it up at any moment."""
    inside, key = limit_of("concurrency", 1, 10 * SECOND).by("ada"), TEN.by("ada")
    cached.check(inside, id="a")
    assert not cached.check(inside, id="b")
    assert not cached.check(inside, key, id="b")
    assert (len(cached.cache), cached.sent) == (0, 3)


def test_an_answer_that_is_not_the_stores_own_is_never_remembered() -> None:
    denials, call = DenialCache(FakeClock()), Check((TEN.by("ada"),), 1)
    denials.record(call, Decision(False, call.keys, ((0, 9, 9, 0),), degraded="closed: gone"), 0)
    assert denials.get(call) is None
    denials.record(call, Decision(False, call.keys, ((0, 9, 9, 0),)), 0)
    denials.record(call, Decision(True, call.keys, ((9, 0, 9, 0),), degraded="open: gone"), 0)
    assert denials.get(call) is not None


def test_the_id_of_a_request_is_its_own(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"), id="first")
    assert cached.check(TEN.by("ada"), id="second").id == "second"
    assert cached.sent == 2


# ---------------------------------------------------------- several limits


def test_each_limit_denies_for_its_own_time(cached: CachedStore) -> None:
    quick, slow, wide = (limit_of("gcra", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20, 200))
    cached.check(quick, slow, cost=2)
    cached.check(wide)
    start_us = cached.clock.now_us()
    rows = [  # after, who denies, retry
        (0, ("2 s", "20 s"), 10 * SECOND),
        (SECOND - 1, ("2 s", "20 s"), 9 * SECOND + 1),
        (SECOND, ("20 s",), 9 * SECOND),
        (10 * SECOND - 1, ("20 s",), 1),
    ]
    for after_us, denied_by, retry_us in rows:
        cached.clock.set_us(start_us + after_us)
        denied = cached.check(quick, slow, wide)
        truth = cached.store.run(Check((quick, slow, wide), 1))
        assert (denied.denied_by, denied.retry_after_us) == (denied_by, retry_us)
        assert [verdict[1:] for verdict in denied.verdicts] == [verdict[1:] for verdict in truth.verdicts]
    assert cached.sent == 3
    cached.clock.set_us(start_us + 10 * SECOND)
    assert cached.check(quick, slow, wide)


def test_a_limit_that_would_pass_meanwhile_says_that_as_much_is_left(cached: CachedStore) -> None:
    quick, slow = (limit_of("token_bucket", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20))
    cached.check(quick, slow, cost=2)
    cached.check(quick, slow, cost=2)
    cached.clock.advance(3)
    assert [outcome.remaining for outcome in cached.check(quick, slow, cost=2).outcomes] == [2, 0]
    assert cached.cache.hits == 1


def test_who_passes_on_a_shared_limit_does_not_wake_those_whom_another_denies(cached: CachedStore) -> None:
    ada, bob, all_of_them = USER.by("ada"), USER.by("bob"), EVERYBODY.by()
    cached.check(ada, all_of_them, cost=2)
    cached.check(ada, all_of_them)
    cached.check(bob, all_of_them)
    asked = cached.sent
    denied = cached.check(ada, all_of_them)
    assert (denied.denied_by, cached.sent) == (("user",), asked)
    assert [outcome.remaining for outcome in denied.outcomes] == [0, 3]


def test_a_shared_limit_that_others_use_up_denies_as_well(cached: CachedStore) -> None:
    ada, all_of_them = USER.by("ada"), EVERYBODY.by()
    cached.check(ada, all_of_them, cost=2)
    cached.check(ada, all_of_them)
    cached.check(all_of_them, cost=4)
    asked = cached.sent
    denied = cached.check(ada, all_of_them)
    assert (denied.denied_by, denied.retry_after, cached.sent) == (("user", "everybody"), 100.0, asked + 1)


def test_who_takes_from_the_limit_that_denies_makes_the_others_wait_longer(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=6)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 1
    assert cached.check(TEN.by("ada"), cost=4)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 5
    assert (cached.sent, cached.cache.hits) == (4, 0)


def test_a_lease_that_is_taken_together_with_a_charge_counts_as_that_charge(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=6)
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 1
    assert cached.check(TEN.by("ada"), limit_of("concurrency", 9, SECOND).by("ada"), cost=4, id="a")
    assert cached.check(TEN.by("ada"), cost=5).retry_after == 5


# ---------------------------------------------- what an allowed answer says


@pytest.mark.parametrize("algorithm", ["fixed_window", "gcra", "sliding_log", "sliding_window", "token_bucket"])
def test_whoever_takes_the_last_is_denied_without_asking(algorithm: str) -> None:
    cached = CachedStore(tells_again=True)
    key, wide = limit_of(algorithm, 3, 7 * SECOND).by("ada"), limit_of("gcra", 2, SECOND, "wide").by("ada")
    taken = cached.check(key, wide, cost=(2, 1))
    assert taken
    assert taken.next_allowed_us > 0
    start_us = cached.clock.now_us()
    for after_us in (0, 1, taken.next_allowed_us - 1):
        cached.clock.set_us(start_us + after_us)
        denied = cached.check(key, wide, cost=(2, 1))
        truth = cached.store.run(Check((key, wide), (2, 1)))
        assert (denied.denied_by, denied.at_us) == (("x",), truth.at_us)
        assert [verdict[1:] for verdict in denied.verdicts] == [verdict[1:] for verdict in truth.verdicts]
    assert cached.sent == 1
    cached.clock.set_us(start_us + taken.next_allowed_us)
    assert cached.check(key, wide, cost=(2, 1))


def test_only_who_keeps_on_knocking_is_remembered_and_then_from_the_last_that_passes() -> None:
    cached = CachedStore(tells_again=True, min_denials=3)
    key, other = limit_of("gcra", 2, 2 * SECOND).by("ada"), limit_of("gcra", 2, 2 * SECOND).by("bob")
    cached.check(other, cost=2)
    assert cached.check(key, cost=2).next_allowed_us > 0
    asked = []
    for _ in range(5):
        assert not cached.check(key, cost=2).allowed
        asked.append(cached.sent - 2)
    assert asked == [1, 2, 3, 3, 3]
    assert not cached.answers_from_memory(other, cost=2)
    cached.clock.advance(2)
    assert cached.check(key, cost=2).next_allowed_us > 0
    assert cached.answers_from_memory(key, cost=2)


def test_those_who_knocked_are_forgotten_too() -> None:
    cached = CachedStore(most=2, min_denials=2)
    keys = [limit_of("gcra", 1, SECOND).by(name) for name in ("ada", "bob", "eve")]
    for key in keys:
        cached.check(key)
        cached.check(key)
    for key in keys[1:]:
        cached.check(key)
    cached.check(keys[0])
    assert [cached.answers_from_memory(key) for key in keys] == [False, True, True]


def test_of_two_limits_that_are_used_up_together_the_store_is_asked_who_denies_for_how_long() -> None:
    cached = CachedStore(tells_again=True)
    quick, slow = (limit_of("gcra", 2, seconds * SECOND, f"{seconds} s").by("ada") for seconds in (2, 20))
    assert cached.check(quick, slow, cost=2).next_allowed_us == 20 * SECOND
    assert cached.check(quick, slow, cost=2).denied_by == ("2 s", "20 s")
    assert cached.check(quick, slow, cost=2).denied_by == ("2 s", "20 s")
    cached.clock.advance(2)
    assert cached.check(quick, slow, cost=2).denied_by == ("20 s",)
    assert cached.sent == 2


# ---------------------------------------------------------- what ends it


def test_what_is_given_back_can_be_had_at_once(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    assert not cached.check(TEN.by("ada"), cost=5)
    assert cached.refund(TEN.by("ada"), 5)
    assert cached.check(TEN.by("ada"), cost=5)


def test_what_is_given_back_ends_every_denial_of_that_counter_and_no_other(cached: CachedStore) -> None:
    ada, bob, all_of_them = USER.by("ada"), USER.by("bob"), EVERYBODY.by()
    for keys in ((ada, all_of_them), (bob,)):
        cached.check(*keys, cost=2)
        cached.check(*keys)
    cached.check(ada)
    cached.refund(ada, 1)
    met = [(ada, all_of_them), (ada,), (bob,)]
    assert [cached.answers_from_memory(*keys) for keys in met] == [False, False, True]


@pytest.mark.parametrize("before", [0.0, 0.000_001, 2.0])
def test_an_answer_that_comes_after_a_refund_but_was_asked_for_before_is_not_learnt_from(
    cached: CachedStore, before: float
) -> None:
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
    assert cached.answers_from_memory(TEN.by("ada"), cost=5)


def test_that_holds_also_where_too_many_were_given_back_to_know_each(cached: CachedStore) -> None:
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


def test_one_that_is_given_back_to_again_and_again_does_not_keep_others_from_being_learnt(cached: CachedStore) -> None:
    for number in range(MAX_INVALIDATIONS):
        cached.cache.invalidate(TEN.space, f"{number}")
    cached.clock.advance(0.001)
    asked_us = cached.cache.now_us()
    denied = cached.ask(Check((TEN.by("ada"),), 11))
    cached.clock.advance(0.001)
    cached.cache.invalidate(TEN.space, "0")
    cached.cache.invalidate(TEN.space, "one more")
    cached.cache.record(Check((TEN.by("ada"),), 11), denied, asked_us)
    assert cached.answers_from_memory(TEN.by("ada"), cost=11)


def test_clear_forgets_all_of_it(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    cached.cache.clear()
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)
    assert not cached.answers_from_memory(TEN.by("ada"))


def test_an_answer_that_was_asked_for_before_all_was_forgotten_is_not_learnt_from(cached: CachedStore) -> None:
    call, asked_us = Check((TEN.by("ada"),), 11), cached.cache.now_us()
    denied = cached.ask(call)
    cached.clock.advance(0.001)
    cached.cache.clear()
    cached.cache.record(call, denied, asked_us)
    assert cached.cache.get(call) is None


def test_a_remaining_that_grew_faster_than_time_ends_the_denial(cached: CachedStore) -> None:
    """Another process has given something back, and a peek has seen it."""
    cached.check(TEN.by("ada"), cost=10)
    assert not cached.check(TEN.by("ada"), cost=5)
    cached.store.run(Refund(TEN.by("ada"), 5))
    assert cached.answers_from_memory(TEN.by("ada"), cost=5)
    assert cached.check(TEN.by("ada"), cost=0).remaining == 5
    assert cached.check(TEN.by("ada"), cost=5)


def test_a_limit_with_other_numbers_is_asked_for_anew_and_ends_what_the_old_one_denied(cached: CachedStore) -> None:
    """A bucket is cut, or a debt is, when the numbers change: what the old ones promised does not hold any more."""
    old, new = (limit_of("gcra", quota, 10 * SECOND, "plan").by("ada") for quota in (1, 10))
    cached.check(old)
    assert not cached.check(old)
    assert not cached.answers_from_memory(new)
    assert len(cached.cache) == 0
    assert not cached.check(old)
    assert cached.check(new, cost=2).retry_after == 1.0 + 1.0
    assert not cached.answers_from_memory(old)


def test_an_equal_limit_is_the_same(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=10)
    cached.check(TEN.by("ada"))
    twin = limit_of("token_bucket", 10, 10 * SECOND, "ten")
    assert twin is not TEN
    assert cached.answers_from_memory(twin.by("ada"))
    cached.check(twin.by("ada"), cost=0)
    assert cached.answers_from_memory(TEN.by("ada"))


# ------------------------------------------------------------ its own life


def test_the_denial_that_nobody_asked_for_the_longest_goes_first() -> None:
    cached = CachedStore(most=3)
    keys = [TEN.by(name) for name in ("ada", "bob", "cat", "dan")]
    for key in keys[:3]:
        cached.check(key, cost=10)
        cached.check(key)
    cached.check(keys[0])
    cached.check(keys[3], cost=10)
    cached.check(keys[3])
    assert len(cached.cache) == 3
    assert [cached.answers_from_memory(key) for key in keys] == [True, False, True, True]


def test_nothing_is_kept_of_what_was_forgotten() -> None:
    cached = CachedStore(most=10)
    for number in range(100):
        cached.check(TEN.by(number), EVERYBODY.by(number), cost=11)
    assert (len(cached.cache), len(cached.cache._counters)) == (10, 20)
    for number in range(90, 100):
        cached.clock.advance(10)
        cached.answers_from_memory(TEN.by(number), EVERYBODY.by(number), cost=11)
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)


def test_two_who_were_denied_at_the_same_time_are_one_denial(cached: CachedStore) -> None:
    call, asked_us = Check((TEN.by("ada"),), 11), cached.cache.now_us()
    for _ in range(2):
        cached.cache.record(call, cached.ask(call), asked_us)
    assert len(cached.cache) == 1
    cached.clock.advance(5)
    assert not cached.answers_from_memory(*call.keys, cost=call.cost)
    assert (len(cached.cache), len(cached.cache._counters)) == (0, 0)


def test_a_memory_that_is_made_smaller_lets_go_with_the_next_denial(cached: CachedStore) -> None:
    for number in range(5):
        cached.check(TEN.by(number), cost=11)
    cached.cache.max_entries = 2
    cached.check(TEN.by(4), cost=12)
    assert (len(cached.cache), len(cached.cache._counters)) == (2, 1)


def test_a_memory_of_no_size_remembers_nothing() -> None:
    cached = CachedStore(most=0)
    cached.check(TEN.by("ada"), cost=11)
    assert (len(cached.cache), cached.answers_from_memory(TEN.by("ada"), cost=11)) == (0, False)


def test_a_forked_child_begins_with_nothing_and_waits_for_nobody(cached: CachedStore) -> None:
    cached.check(TEN.by("ada"), cost=11)
    cached.cache._lock.acquire()  # by a thread that is not in the child
    cached.cache.reset_after_fork()
    assert not cached.answers_from_memory(TEN.by("ada"), cost=11)
    cached.check(TEN.by("ada"), cost=11)
    assert cached.answers_from_memory(TEN.by("ada"), cost=11)


def test_threads_share_one_memory() -> None:
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


# ----------------------------------------------- beside a store that is asked


class Life:
    """The same requests, asked of a store directly, and of one behind what it has denied."""

    def __init__(self, plans: list[list[Limit]], *, tells_again: bool) -> None:
        self.truth, self.cached = CachedStore(50), CachedStore(50, tells_again=tells_again)
        self.plans = plans
        """For each limit, the numbers that it may change between."""
        self.limits = [choices[0] for choices in plans]
        self.said: list[str] = []

    def check(self, met: list[int], who: str, costs: list[int], id: str) -> Decision:
        limits = [self.limits[place] for place in met]
        leased = any(limit.algorithm == "concurrency" for limit in limits)
        cost = costs[0] if len(set(costs[: len(met)])) == 1 else tuple(costs[: len(met)])
        call = Check(tuple(self._key(limit, who) for limit in limits), cost, id if leased else None)
        told, true = self.cached.run(call), self.truth.store.run(call)
        self.said.append(
            f"@{self.cached.clock.now_us()} {[str(limit) for limit in limits]} {who} {cost} -> {true.verdicts}"
        )
        story = "\n".join(self.said[-15:])
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
        self.said.append(f"{place} is {self.limits[place]}")

    def move(self, step_us: int) -> None:
        for cached in (self.truth, self.cached):
            cached.clock.set_us(max(0, cached.clock.now_us() + step_us))

    def _both(self, call: Leave | Refund | Reset, key: Key) -> None:
        self.said.append(f"@{self.cached.clock.now_us()} {call}")
        for cached in (self.truth, self.cached):
            cached.store.run(call)
        self.cached.cache.invalidate(key.limit.space, key.identity)

    def _key(self, limit: Limit, who: str) -> Key:
        """The first limit is everybody's."""
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
# Mostly the same request, again and again: so do those whom a memory is for.
costs = st.sampled_from([[1, 1, 1]] * 4 + [[2, 2, 2]] * 2 + [[1, 2, 1], [2, 1, 3], [0, 1, 2], [0, 0, 0], [6, 6, 6]])
checks = st.tuples(st.just("check"), st.permutations([0, 1, 2]), st.integers(1, 3), who, costs, id)
steps = st.one_of(
    *[checks] * 6,
    st.tuples(st.just("move"), st.sampled_from([0, 1, 1, 1, 2, 3, 5, 12, 30, -1, -7])),
    st.tuples(st.just("give_back"), place, who, st.integers(1, 4), id),
    st.tuples(st.just("reset"), place, who),
    st.tuples(st.just("change"), place, st.integers(0, 1)),
)


def live(life: Life, step: tuple[Any, ...]) -> None:
    what, *words = step
    if what == "check":
        order, number, who, costs, id = words
        life.check([place for place in order if place < len(life.limits)][:number], who, costs, id)
    elif what == "move":
        life.move(*words)
    elif words[0] < len(life.limits):
        getattr(life, what)(*words)


@given(plans(), st.booleans(), st.lists(steps, min_size=10, max_size=60))
def test_behind_the_memory_every_decision_is_the_stores_own(
    plans: list[list[Limit]], tells_again: bool, steps: list[tuple[Any, ...]]
) -> None:
    life = Life(plans, tells_again=tells_again)
    for step in steps:
        live(life, step)


@pytest.mark.parametrize("tells_again", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_long_life_is_answered_alike_and_often_from_memory(seed: int, tells_again: bool) -> None:
    """The same as above, for long enough that what is remembered meets all that can happen to it."""
    draw = random.Random(seed)
    plans = [
        [limit_of(draw.choice(REMEMBERED), draw.randint(1, 5), draw.randint(5, 40), f"{place}")]
        for place in range(draw.randint(1, 3))
    ]
    plans[-1].append(limit_of(plans[-1][0].algorithm, draw.randint(1, 5), draw.randint(5, 40), plans[-1][0].name))
    life = Life(plans, tells_again=tells_again)
    for _ in range(600):
        if draw.random() < 0.3:
            life.move(draw.choice([1, 1, 1, 1, 2, 3, 10, -1]))
        if draw.random() < 0.04:
            life.give_back(draw.randrange(len(plans)), draw.choice(["ada", "bob"]), draw.randint(1, 4), "a")
        if draw.random() < 0.01:
            life.reset(draw.randrange(len(plans)), draw.choice(["ada", "bob"]))
        if draw.random() < 0.02:
            life.change(draw.randrange(len(plans)), draw.randint(0, 1))
        met = sorted(draw.sample(range(len(plans)), draw.randint(1, len(plans))))
        costs = draw.choice([[1, 1, 1], [1, 1, 1], [2, 2, 2], [1, 2, 3], [0, 1, 2]])
        life.check(met, draw.choice(["ada", "bob"]), costs, "a")
    assert life.cached.cache.hits > 30
