"""Prepaid tokens: a fleet never exceeds the documented bound, a hot key needs few calls, and few tokens are lost."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Calendar, Decision, Limit, StoreTimeout
from headgate.clock import SystemClock
from headgate.limits import PoolLimit
from headgate.local.prepaid import PrepaidTokens, can_prepay
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Deposit, Refund
from headgate.testing import FakeClock
from support.fleets import START_US, Arrival, Fleet, Spent, steady

if TYPE_CHECKING:
    from headgate import Key

SECOND = 1_000_000
LEASE_US = 100_000
BUCKETS = ("token_bucket", "gcra")
LEASED = (*BUCKETS, "fixed_window", "sliding_window", "sliding_log")

every_leased_algorithm = pytest.mark.parametrize("algorithm", LEASED)


def limit_of(quota: int, seconds: float, algorithm: str = "token_bucket", **more: Any) -> Limit:
    return Limit(quota, timedelta(seconds=seconds), algorithm=algorithm, **more)


class Node:
    """One process with prepaid tokens and a memory store, on a fake clock."""

    def __init__(self, *limits: Limit, lease_us: int = LEASE_US) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.prepaid = PrepaidTokens(lease_us=lease_us, now_us=self.clock.now_us)
        self.prepaid.announce(limits)
        self.calls = 0

    def check(self, *keys: Key, cost: int | tuple[int, ...] = 1) -> Decision:
        call = Check(keys, cost)
        answer = self.prepaid.take(call)
        if isinstance(answer, Decision):
            return answer
        if answer is None:
            return self.ask(call)
        try:
            step = next(answer)
            while True:
                step = answer.send(self.ask(step))
        except StopIteration as end:
            decision: Decision = end.value
            return decision

    def ask(self, call: Check) -> Decision:
        self.calls += 1
        return self.store.decide(call)

    def left(self, key: Key) -> int:
        """The tokens remaining in the store."""
        return self.store.decide(Check((key,), 0)).remaining

    def held(self) -> int:
        return self.prepaid.stats.held


def test_prepaid_tokens_end_with_a_calendar_day() -> None:
    """A day of Berlin has exactly its quota, although tokens were held when it began."""
    limit = Limit(1000, Calendar("day", timezone="Europe/Berlin"), name="daily")
    node, midnight_us = Node(limit), 1_793_487_600_000_000  # 23:00 UTC
    node.clock.set_us(midnight_us - 50_000)
    for _ in range(250):
        node.check(limit.by("a"))
        node.clock.advance(0.0001)
    assert node.held()
    node.clock.set_us(midnight_us)
    admitted = 0
    for _ in range(4000):
        admitted += node.check(limit.by("a")).allowed
        node.clock.advance(0.0001)
    assert admitted == 1000
    assert node.calls < 2000


# --------------------------------------------------------------------- never more than the limit


def excess_over_bound(limit: Limit, spent: list[Spent]) -> int:
    """The largest excess over C + r(D + L) in any interval, in 1/ticks of a token; negative if there is none.

    For the interval between two spendings the sum between them counts, so it is enough to know, for each, the
    worst start before it.
    """
    total, lowest, worst = 0, 0, -limit.full
    for index, (at_us, _, cost) in enumerate(sorted(spent)):
        start = total * limit.ticks - at_us * limit.tokens
        lowest = start if index == 0 else min(lowest, start)
        total += cost
        worst = max(worst, total * limit.ticks - at_us * limit.tokens - lowest)
    return worst - limit.full - limit.tokens * LEASE_US


def most_in_a_window(limit: Limit, spent: list[Spent]) -> int:
    """The fullest window; for a sliding window, with the weighted share of the previous one."""
    counts: dict[int, int] = {}
    worst = 0
    for at_us, _, cost in sorted(spent):
        window, elapsed_us = divmod(at_us, limit.period_us)
        counts[window] = counts.get(window, 0) + cost
        share = counts.get(window - 1, 0) * (limit.period_us - elapsed_us) if limit.algorithm == "sliding_window" else 0
        worst = max(worst, counts[window] * limit.period_us + share)
    return worst


def most_in_a_span(span_us: int, spent: list[Spent]) -> int:
    """The most spent in any interval shorter than span_us."""
    most = total = oldest = 0
    ordered = sorted(spent)
    for at_us, _, cost in ordered:
        total += cost
        while ordered[oldest].at_us <= at_us - span_us:
            total -= ordered[oldest].cost
            oldest += 1
        most = max(most, total)
    return most


def assert_bounded(limit: Limit, spent: list[Spent]) -> None:
    if limit.algorithm in ("fixed_window", "sliding_window"):
        assert most_in_a_window(limit, spent) <= limit.quota * limit.period_us
    else:
        assert excess_over_bound(limit, spent) <= 0
    if limit.algorithm == "sliding_log":
        assert most_in_a_span(limit.period_us - LEASE_US, spent) <= limit.quota


@st.composite
def limits(draw: st.DrawFn, algorithm: str, name: str = "x") -> Limit:
    """Limits small enough to exhaust and large enough to prepay."""
    quota = draw(st.integers(100, 300))
    least_us = 10 * LEASE_US if algorithm.startswith("sliding") else 2 * LEASE_US
    period_us = draw(st.integers(least_us, 3 * least_us) | st.just(86_400 * SECOND))
    return Limit(quota, timedelta(microseconds=period_us), algorithm=algorithm, name=name)


delays_us = st.sampled_from([0, 1, 300, 5_000, 40_000, 130_000])


@st.composite
def arrivals(draw: st.DrawFn, nodes: int, keys: tuple[Key, ...], *, most_gap_us: int, returns: bool) -> list[Arrival]:
    """Bursts with pauses, from all nodes, with various costs and delays."""
    at_us, made = START_US, []
    for _ in range(draw(st.integers(1, 12))):
        at_us += draw(st.integers(0, most_gap_us) | st.just(0))
        there_us, back_us = draw(delays_us), draw(delays_us)
        if returns and draw(st.integers(0, 3)) == 0:
            made += [Arrival(at_us, node, None, min(there_us, LEASE_US)) for node in range(nodes)]
        cost = draw(st.sampled_from([1, 1, 2, 7, 40]))
        met = keys if draw(st.booleans()) else keys[:1]
        among = draw(st.integers(1, nodes))
        made += [
            Arrival(at_us + index * 100, index % among, Check(met, cost), there_us, back_us)
            for index in range(draw(st.sampled_from([1, 2, 10, 50])))
        ]
    return sorted(made, key=lambda arrival: arrival.at_us)


@every_leased_algorithm
@given(data=st.data())
def test_fleet_never_exceeds_the_bound_in_any_interval(algorithm: str, data: st.DataObject) -> None:
    limit, other = data.draw(limits(algorithm)), data.draw(limits("token_bucket", "y"))
    nodes = data.draw(st.integers(1, 5))
    fleet = Fleet(nodes, announce=[limit, other], told=data.draw(st.sampled_from([0, 1, 50])))
    keys = limit.by("ada"), other.by("ada")
    fleet.run(data.draw(arrivals(nodes, keys, most_gap_us=150_000, returns=True)))
    for key in keys:
        assert_bounded(key.limit, [each for each in fleet.spent if each.key == key])


@every_leased_algorithm
@given(data=st.data())
def test_every_token_is_charged_once_and_accounted_for(algorithm: str, data: st.DataObject) -> None:
    """If one of two limits denies, nothing is taken from either, in the store or locally."""
    limit, other = data.draw(limits(algorithm)), data.draw(limits("gcra", "y"))
    nodes = data.draw(st.integers(1, 3))
    fleet = Fleet(nodes, announce=[limit, other])
    keys = limit.by("ada"), other.by("ada")
    fleet.run(data.draw(arrivals(nodes, keys, most_gap_us=20_000, returns=False)))
    for key in keys:
        assert fleet.charged[key] == fleet.admitted_by(key) + fleet.kept_by(key)


def test_bound_is_tight() -> None:
    """A looser bound would hide overspending."""
    limit = limit_of(1_000, 1)
    fleet = Fleet(1, announce=[limit])
    call = Check((limit.by("ada"),), 1)
    stock = Arrival(START_US, 0, call)
    burst = [Arrival(START_US + 90_000, 0, call) for _ in range(2_000)]
    fleet.run([stock, *burst])
    assert fleet.admitted > limit.capacity
    assert_bounded(limit, fleet.spent)


@every_leased_algorithm
@pytest.mark.parametrize("early_us", [1_000, 30_000, 99_000])
def test_fleet_stays_in_bounds_at_a_window_boundary(algorithm: str, early_us: int) -> None:
    limit = limit_of(2_000, 2, algorithm)
    fleet = Fleet(4, announce=[limit])
    call = Check((limit.by("ada"),), 1)
    stocks = [Arrival(START_US + 2 * SECOND - early_us, node, call) for node in range(4)]
    bursts = [Arrival(START_US + 2 * SECOND + number, number % 4, call) for number in range(4_000)]
    fleet.run([*stocks, *bursts])
    assert fleet.admitted >= 0.8 * limit.capacity
    assert_bounded(limit, fleet.spent)


def test_held_tokens_expire_while_the_bucket_refills() -> None:
    """A hundred tokens held and a hundred refilled: without expiry, two hundred would pass at once."""
    limit = limit_of(100, 10)
    fleet = Fleet(10, announce=[limit])
    call = Check((limit.by("ada"),), 1)
    stocks = [Arrival(START_US, node, call) for node in range(10)]
    bursts = [Arrival(START_US + 20 * SECOND, number % 10, call) for number in range(400)]
    fleet.run([*stocks, *bursts])
    assert limit.capacity <= fleet.admitted <= 10 + limit.capacity
    assert_bounded(limit, fleet.spent)


# --------------------------------------------------------------------- few calls, and nothing lost


@every_leased_algorithm
@pytest.mark.parametrize("demand", [0.5, 2, 20])
def test_hot_key_needs_a_tenth_of_the_calls(algorithm: str, demand: float) -> None:
    """20,000 checks per second from four nodes, including the first ones, before the key is known to be hot."""
    limit = limit_of(int(20_000 / demand), 1, algorithm)
    fleet = Fleet(4)
    fleet.run(steady(20_000, 5, 4, Check((limit.by("ada"),), 1), there_us=200, back_us=200))
    could_pass = 5 * limit.quota + (limit.capacity if algorithm in BUCKETS else 0)
    assert fleet.calls <= 0.1 * fleet.asked
    assert fleet.admitted >= 0.98 * min(could_pass, fleet.asked)
    assert_bounded(limit, fleet.spent)


@pytest.mark.parametrize("told", [1, 16])
def test_wrong_node_count_only_costs_calls(told: int) -> None:
    limit = limit_of(10_000, 1)
    fleet = Fleet(4, told=told)
    fleet.run(steady(20_000, 3, 4, Check((limit.by("ada"),), 1), there_us=200, back_us=200))
    assert fleet.calls <= 0.13 * fleet.asked  # a tenth of the run passes before the key is hot
    assert fleet.admitted >= 0.98 * 4 * limit.quota
    assert_bounded(limit, fleet.spent)


def test_slow_store_is_compensated_by_earlier_refills() -> None:
    limit = limit_of(40_000, 1)
    fleet = Fleet(4)
    fleet.run(steady(20_000, 5, 4, Check((limit.by("ada"),), 1), there_us=5_000, back_us=5_000))
    assert fleet.calls <= 0.1 * fleet.asked
    assert fleet.admitted == fleet.asked


def test_refills_slower_than_a_lease_waste_few_tokens() -> None:
    limit = limit_of(40_000, 1)
    fleet = Fleet(1)
    fleet.run(steady(5_000, 5, 1, Check((limit.by("ada"),), 1), there_us=60_000, back_us=60_000))
    assert fleet.admitted == fleet.asked
    assert fleet.charged.total() <= 1.1 * fleet.admitted


@every_leased_algorithm
@pytest.mark.parametrize("step_us", [0, 10])
@pytest.mark.parametrize("cost", [1, 3])
def test_single_node_admits_exactly_the_limit(algorithm: str, step_us: int, cost: int) -> None:
    limit = limit_of(1_000, 86_400, algorithm)
    fleet = Fleet(1, announce=[limit])
    call = Check((limit.by("ada"),), cost)
    fleet.run(Arrival(START_US + number * step_us, 0, call) for number in range(3_000))
    assert fleet.admitted == limit.capacity // cost * cost
    assert fleet.calls < 60


def test_threads_sharing_prepaid_tokens_admit_exactly_the_limit() -> None:
    limit = limit_of(2_000, 86_400, "fixed_window")
    store = MemoryStore(SystemClock())
    prepaid = PrepaidTokens(lease_us=60 * SECOND)
    prepaid.announce([limit])
    call = Check((limit.by("ada"),), 1)
    admitted = []

    def run() -> None:
        passed = 0
        for _ in range(1_500):
            answer = prepaid.take(call)
            if answer is None:
                answer = store.decide(call)
            elif not isinstance(answer, Decision):
                try:
                    step = next(answer)
                    while True:
                        step = answer.send(store.decide(step))
                except StopIteration as end:
                    answer = end.value
            passed += answer.allowed
        admitted.append(passed)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) + prepaid.stats.held == limit.quota
    assert prepaid.stats.held == 0


# --------------------------------------------------------------------- tokens of one key


def test_prepaid_token_expires_one_lease_after_its_refill() -> None:
    limit = limit_of(1_000, 60)
    node = Node(limit)
    call = Check((limit.by("ada"),), 1)
    steps = node.prepaid.take(call)
    assert steps is not None
    assert not isinstance(steps, Decision)
    order = next(steps)
    node.clock.advance(0.04)
    answer = node.ask(order)
    node.clock.advance(0.03)
    with pytest.raises(StopIteration):
        steps.send(answer)
    held = node.held()
    assert held > 0
    node.clock.set_us(START_US + LEASE_US - 1)
    assert isinstance(node.prepaid.take(call), Decision)
    assert node.held() == held - 1
    node.clock.set_us(START_US + LEASE_US)
    assert node.held() == 0
    assert not isinstance(node.prepaid.take(call), Decision)


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
def test_tokens_of_a_window_expire_with_it(algorithm: str) -> None:
    limit = limit_of(100_000, 10, algorithm)
    node = Node(limit)
    node.clock.set_us(START_US + 10 * SECOND - 30_000)
    assert node.check(limit.by("ada")).allowed
    assert node.held() > 0
    node.clock.set_us(START_US + 10 * SECOND - 1)
    assert node.held() > 0
    node.clock.set_us(START_US + 10 * SECOND)
    assert node.held() == 0


def test_prepaid_decision_reports_stored_and_held_tokens() -> None:
    limit = limit_of(1_000, 100)
    node = Node(limit)
    first = node.check(limit.by("ada"))
    assert (first.allowed, first.remaining) == (True, 999)
    node.clock.advance(0.01)
    second = node.check(limit.by("ada"), cost=2)
    assert node.calls == 1
    assert second == Decision(
        True, (limit.by("ada"),), ((997, 0, first.reset_after_us - 10_000, 0),), None, None, START_US + 10_000, 0, 2
    )


def test_nearly_empty_key_is_checked_exactly() -> None:
    limit = limit_of(1_000, 86_400)
    node = Node(limit)
    node.store.decide(Check((limit.by("ada"),), 991))
    assert node.check(limit.by("ada")).allowed  # remaining is unknown: the refill requests more and gets less
    assert node.held() == 0
    calls = node.calls
    assert [node.check(limit.by("ada")).allowed for _ in range(8)] == [True] * 8
    assert node.calls == calls + 8
    assert not node.check(limit.by("ada")).allowed


def test_exhausted_key_is_rechecked_at_intervals() -> None:
    limit = limit_of(1_000, 1)  # one token per millisecond
    node = Node(limit)
    key = limit.by("ada")
    while (denial := node.check(key)).allowed:
        pass
    assert denial.retry_after_us == LEASE_US // 10, "the next refill is later than the millisecond of the store"
    calls = node.calls
    denial = node.check(key)
    assert (denial.allowed, denial.remaining, denial.retry_after_us, denial.denied_by) == (
        False,
        0,
        LEASE_US // 10,
        ("default",),
    )
    node.clock.advance(0.009999)
    assert node.check(key).retry_after_us == 1
    assert node.calls == calls
    node.clock.advance(0.000001)
    assert node.check(key).allowed
    assert node.calls == calls + 1
    assert not node.check(key).allowed, "one order each time"
    assert node.calls == calls + 1


def test_denial_reports_the_later_time_of_the_store() -> None:
    limit = limit_of(1_000, 10, "fixed_window")
    node = Node(limit)
    node.clock.advance(4)
    while node.check(limit.by("ada")).allowed:
        pass
    node.clock.advance(0.05)
    assert node.check(limit.by("ada")).retry_after_us == 5_950_000
    node.clock.advance(5.95)
    assert node.check(limit.by("ada")).allowed


def test_smaller_cost_is_checked_after_a_denial() -> None:
    limit = limit_of(100, 86_400)
    node = Node(limit)
    node.store.decide(Check((limit.by("ada"),), 95))
    assert not node.check(limit.by("ada"), cost=6).allowed
    assert not node.check(limit.by("ada"), cost=6).allowed
    assert node.check(limit.by("ada"), cost=5).allowed


def test_small_cost_does_not_report_the_wait_of_a_large_one() -> None:
    limit = limit_of(100, 86_400)
    node = Node(limit)
    node.store.decide(Check((limit.by("ada"),), 50))
    assert (node.check(limit.by("ada"), cost=60).retry_after_us or 0) > 3_600 * SECOND
    while (decision := node.check(limit.by("ada"))).allowed:
        pass
    assert decision.retry_after_us == LEASE_US // 10
    assert (node.check(limit.by("ada"), cost=60).retry_after_us or 0) > 3_600 * SECOND
    assert (node.check(limit.by("ada"), cost=61).retry_after_us or 0) > 3_600 * SECOND + 864 * SECOND


def test_check_during_a_refill_goes_to_the_store() -> None:
    limit = limit_of(1_000, 60)
    node = Node(limit)
    call = Check((limit.by("ada"),), 1)
    steps = node.prepaid.take(call)
    assert steps is not None
    assert not isinstance(steps, Decision)
    next(steps)
    assert node.prepaid.take(call) is None
    steps.close()  # as if its caller was cancelled
    assert node.prepaid.take(call) is not None


def test_check_during_a_refill_of_an_exhausted_key_is_denied() -> None:
    limit = limit_of(1_000, 1)
    node = Node(limit)
    call = Check((limit.by("ada"),), 1)
    while node.check(limit.by("ada")).allowed:
        pass
    node.clock.advance(0.02)
    steps = node.prepaid.take(call)
    assert steps is not None
    assert not isinstance(steps, Decision)
    order = next(steps)
    node.clock.advance(0.05)
    denial = node.prepaid.take(call)
    assert isinstance(denial, Decision)
    assert (denial.allowed, denial.retry_after_us) == (False, LEASE_US // 10)
    with pytest.raises(StopIteration) as end:
        steps.send(node.ask(order))
    assert end.value.value.allowed


def test_denied_early_refill_denies_no_request() -> None:
    hot, other = limit_of(1_000, 86_400, name="hot"), limit_of(1_000, 86_400, name="other")
    node = Node(hot, other)
    keys = hot.by("ada"), other.by("ada")
    node.check(*keys)
    one, two = (node.prepaid._counters[key.limit.space, "ada"] for key in keys)
    one.take(one.tokens - 2)
    one.refill_below = 5
    two.take(two.tokens - 1)
    node.store.decide(Check(keys[:1], node.left(keys[0])))
    calls = node.calls
    assert node.check(*keys).allowed, "both have enough"
    assert (node.calls, one.tokens, two.tokens) == (calls + 1, 1, 0)


def test_failed_refill_changes_nothing() -> None:
    hot, other = limit_of(1_000, 60, name="hot"), limit_of(1_000, 60, name="other")
    node = Node(hot, other)
    node.check(hot.by("ada"))
    held = node.held()
    steps = node.prepaid.take(Check((hot.by("ada"), other.by("ada")), 1))
    assert steps is not None
    assert not isinstance(steps, Decision)
    order = next(steps)
    assert order.costs[0] == 0, "what the purse has is not asked for"
    assert order.costs[1] > 1
    assert node.held() == held - 1, "it is set aside meanwhile"
    with pytest.raises(StoreTimeout):
        steps.throw(StoreTimeout("too late"))
    assert node.held() == held
    assert node.check(hot.by("ada"), other.by("ada")).allowed


def test_denial_by_another_limit_takes_no_prepaid_tokens() -> None:
    hot, empty = limit_of(1_000, 86_400, name="hot"), limit_of(100, 86_400, name="empty")
    node = Node(hot, empty)
    node.store.decide(Check((empty.by("ada"),), 100))
    node.check(hot.by("ada"))
    held, left = node.held(), node.left(hot.by("ada"))
    decision = node.check(hot.by("ada"), empty.by("ada"))
    assert (decision.allowed, decision.denied_by) == (False, ("empty",))
    calls = node.calls
    again = node.check(hot.by("ada"), empty.by("ada"))
    assert (again.allowed, again.denied_by) == (False, ("empty",))
    assert node.calls == calls, "it rests"
    assert (node.held(), node.left(hot.by("ada"))) == (held, left)


def test_several_hot_keys_are_charged_without_a_call() -> None:
    one, two = limit_of(1_000, 60, name="one"), limit_of(1_000, 60, name="two", algorithm="gcra")
    node = Node(one, two)
    keys = one.by("ada"), two.by("ada")
    assert node.check(*keys, cost=(1, 2)).allowed
    held = node.held()
    decision = node.check(*keys, cost=(1, 2))
    assert (decision.allowed, [outcome.remaining for outcome in decision.outcomes]) == (True, [998, 996])
    assert (node.calls, node.held()) == (1, held - 3)
    assert (node.prepaid.stats.hot, node.prepaid.stats.found) == (2, 2), "each was found once"


def test_decision_time_is_the_earliest_of_its_refills() -> None:
    """A refund at that time must find the charged window, not the next one."""
    one, two = limit_of(1_000, 60, name="one"), limit_of(1_000, 60, name="two")
    node = Node(one, two)
    node.check(one.by("ada"))
    steps = node.prepaid.take(Check((two.by("ada"),), 1))
    assert steps is not None
    assert not isinstance(steps, Decision)
    answer = node.ask(next(steps))
    node.clock.advance(0.005)
    with pytest.raises(StopIteration):
        steps.send(answer)
    node.clock.advance(0.01)
    for keys in ((one.by("ada"), two.by("ada")), (two.by("ada"), one.by("ada"))):
        assert node.check(*keys).at_us == START_US + 10_000
    assert node.check(one.by("ada")).at_us == START_US + 15_000


# --------------------------------------------------------------------- what is never leased


@pytest.mark.parametrize(
    ("limit", "leased"),
    [
        (limit_of(100, 1), True),
        (limit_of(99, 1), False),
        (limit_of(10_000, 1, burst=2_000), True),
        (limit_of(10_000, 1, burst=1_999), False),
        (limit_of(200, 0.2, "fixed_window"), True),
        (limit_of(200, 0.199999, "fixed_window"), False),
        (limit_of(200, 1, "sliding_log"), True),
        (limit_of(200, 0.999999, "sliding_window"), False),
        (limit_of(10_000, 1, "leaky_bucket"), False),
        (limit_of(10_000, 60, "concurrency"), False),
    ],
    ids=str,
)
def test_only_large_enough_limits_are_prepaid(limit: Limit, leased: bool) -> None:
    assert can_prepay(limit, LEASE_US) is leased
    node = Node(limit)
    assert bool(node.prepaid) is leased
    assert (node.prepaid.take(Check((limit.by("ada"),), 1, "id")) is not None) is leased


def test_peeks_and_mixed_requests_go_to_the_store() -> None:
    hot, cold = limit_of(1_000, 60, name="hot"), limit_of(1_000, 60, name="cold")
    node = Node(hot)
    node.check(hot.by("ada"))
    for call in (
        Check((hot.by("ada"),), 0),
        Check((hot.by("ada"),), 1_001),
        Check((hot.by("ada"), cold.by("ada")), 1),
        Check((cold.by("ada"),), 1),
    ):
        assert node.prepaid.take(call) is None


def test_excluded_limit_returns_its_tokens() -> None:
    limit = limit_of(1_000, 86_400)
    node = Node(limit)
    node.check(limit.by("ada"))
    held = node.held()
    node.prepaid.exclude([limit])
    assert node.prepaid.take(Check((limit.by("ada"),), 1)) is None
    assert [(refund.key, refund.amount) for refund in node.prepaid.take_refunds()] == [(limit.by("ada"), held - 1)]


def test_changed_limit_discards_prepaid_tokens() -> None:
    limit = limit_of(1_000, 60)
    node = Node(limit)
    node.check(limit.by("ada"))
    assert node.prepaid.take(Check((limit_of(1_000, 60).by("ada"),), 1)) is not None, "an equal limit shares the tokens"
    assert node.prepaid.take(Check((limit_of(900, 60).by("ada"),), 1)) is None
    assert node.held() == 0


# --------------------------------------------------------------------- returned tokens


@pytest.mark.parametrize(
    ("limit", "age_us", "lost"),
    [
        (limit_of(1_000, 86_400), 0, 1),
        (limit_of(1_000, 10), LEASE_US, 20),
        (limit_of(1_000, 10, "gcra"), LEASE_US, 20),
        (limit_of(1_000, 10, "gcra"), 150_000, 25),
        (limit_of(1_000, 10, "fixed_window"), LEASE_US, 0),
        (limit_of(1_000, 10, "sliding_window"), LEASE_US, 0),
        (limit_of(1_000, 10, "sliding_log"), LEASE_US, 0),
        (limit_of(1_000, 10, "fixed_window"), 10 * SECOND, None),
        (limit_of(10_000, 1), LEASE_US, None),
    ],
    ids=str,
)
def test_expired_tokens_are_returned_minus_the_refill(limit: Limit, age_us: int, lost: int | None) -> None:
    """One more lease is subtracted for the delay of the refund."""
    node = Node(limit)
    node.check(limit.by("ada"))
    held = node.held()
    node.clock.set_us(START_US + age_us)
    refunds = node.prepaid.take_refunds() if age_us else node.prepaid.clear()
    assert refunds == ([] if lost is None else [Refund(limit.by("ada"), held - lost, None, START_US)])
    assert (node.held(), node.prepaid.take_refunds()) == (0, [])


def test_returned_tokens_can_be_spent_again() -> None:
    limit = limit_of(1_000, 86_400, "sliding_log")
    node = Node(limit)
    node.check(limit.by("ada"))
    assert node.left(limit.by("ada")) < 999
    for refund in node.prepaid.clear():
        node.store.run(refund)
    assert node.left(limit.by("ada")) == 999


def test_cold_keys_return_their_tokens() -> None:
    limit, other = limit_of(1_000, 86_400), limit_of(50, 1, name="other")
    node = Node()
    call = Check((limit.by("ada"),), 1)
    for number in range(400):
        node.clock.set_us(START_US + number * 1_000)
        node.prepaid.sample(call)
    assert node.prepaid.stats.hot == 1
    node.check(limit.by("ada"))
    held = node.held()
    for _ in range(20):
        node.clock.advance(0.1)
        node.prepaid.sample(Check((other.by("x"),), 1))
    assert (node.prepaid.stats.hot, bool(node.prepaid)) == (0, False)
    assert [refund.amount for refund in node.prepaid.take_refunds()] == [held - 1]


@every_leased_algorithm
def test_tokens_arriving_for_a_cold_key_are_returned(algorithm: str) -> None:
    limit = limit_of(1_000, 86_400, algorithm)
    node = Node(limit)
    steps = node.prepaid.take(Check((limit.by("ada"),), 1))
    assert steps is not None
    assert not isinstance(steps, Decision)
    order = next(steps)
    assert node.prepaid.pending_refills == 1
    assert node.prepaid.clear() == []
    with pytest.raises(StopIteration):
        steps.send(node.ask(order))
    assert (node.prepaid.pending_refills, node.prepaid.has_refunds, node.held()) == (0, True, 0)
    lost = 1 if algorithm in BUCKETS else 0  # refilled meanwhile, rounded up
    assert [refund.amount for refund in node.prepaid.take_refunds()] == [order.costs[0] - 1 - lost]
    assert not node.prepaid.has_refunds


def test_reset_discards_prepaid_tokens() -> None:
    limit = limit_of(1_000, 86_400)
    node = Node(limit)
    call = Check((limit.by("ada"),), 1)
    node.check(limit.by("ada"))
    node.prepaid.discard(limit.space, "ada")
    assert (node.held(), node.prepaid.take_refunds()) == (0, [])
    steps = node.prepaid.take(call)
    assert steps is not None
    assert not isinstance(steps, Decision)
    answer = node.ask(next(steps))
    node.prepaid.discard(limit.space, "ada")
    with pytest.raises(StopIteration):
        steps.send(answer)
    assert (node.held(), node.prepaid.clear()) == (0, [])


def test_refund_wakes_an_exhausted_key() -> None:
    limit = limit_of(1_000, 86_400, "fixed_window")
    node = Node(limit)
    while node.check(limit.by("ada")).allowed:
        pass
    node.store.run(Refund(limit.by("ada"), 1))
    assert not node.check(limit.by("ada")).allowed
    node.prepaid.wake(limit.space, "ada")
    assert node.check(limit.by("ada")).allowed


def test_forked_child_has_no_tokens_of_its_parent() -> None:
    limit = limit_of(1_000, 60)
    node = Node(limit)
    node.check(limit.by("ada"))
    node.prepaid.reset_after_fork()
    assert (node.held(), node.prepaid.clear()) == (0, [])


def test_announced_burst_gets_larger_refills() -> None:
    limit = limit_of(10_000, 1)
    announced, found = Node(limit), Node()
    call = Check((limit.by("ada"),), 1)
    for number in range(400):
        found.clock.set_us(START_US + number * 1_000)
        found.prepaid.sample(call)
    for node in (announced, found):
        node.check(limit.by("ada"))
    assert announced.held() >= 5 * found.held() > 0


def test_hot_keys_do_not_slow_requests_with_a_cold_key() -> None:
    """Such a request goes to the store with all its keys, so prepaid tokens are not consulted if all requests are
    mixed.
    """
    everybody, own = limit_of(10_000, 1, name="everybody"), limit_of(100, 1, name="own")
    clock = FakeClock(START_US)
    prepaid = PrepaidTokens(now_us=clock.now_us)

    def send(seconds: float, *, mixed: bool) -> list[bool]:
        said = []
        for number in range(round(seconds * 1_000)):
            keys = (everybody.by(), own.by(str(number))) if mixed else (everybody.by(),)
            prepaid.sample(Check(keys, 1))
            said.append(bool(prepaid))
            clock.advance(0.001)
        return said

    assert not any(send(1.5, mixed=True))
    assert prepaid.stats.hot == 1  # still reported as hot
    assert all(send(0.1, mixed=False))
    said = send(1.5, mixed=True)
    assert (said[0], said[900], said[1_000]) == (True, True, False)
    send(0.1, mixed=False)
    clock.advance(30)
    prepaid.take_refunds()
    assert (bool(prepaid), prepaid.stats.hot) == (False, 0)


def test_tokens_of_a_pool_return_while_their_batch_lives() -> None:
    pool = PoolLimit(10_000, timedelta(seconds=60), name="pool")
    node = Node(pool)
    node.store.run(Deposit(pool.by("ada"), 500, SECOND, "first"))
    assert node.check(pool.by("ada")).allowed
    held = node.held()
    node.clock.advance(LEASE_US / SECOND)
    assert [refund.amount for refund in node.prepaid.take_refunds()] == [held]


def test_tokens_of_a_pool_are_spent_before_their_batch_expires_and_do_not_return_later() -> None:
    """A refund would put them into a batch that expires later."""
    pool = PoolLimit(10_000, timedelta(seconds=60), name="pool")
    node = Node(pool)
    node.store.run(Deposit(pool.by("ada"), 300, LEASE_US // 2, "first"))
    node.store.run(Deposit(pool.by("ada"), 500, 10 * SECOND, "second"))
    assert node.check(pool.by("ada")).allowed
    assert node.held() > 0
    node.clock.advance(LEASE_US / 2 / SECOND)
    assert (node.held(), node.prepaid.take_refunds()) == (0, [])
    assert node.check(pool.by("ada")).allowed
    assert node.check(pool.by("ada"), cost=0).remaining < 500
