"""The outage ledger: debts decay as the limit does, and settlement charges each token at most once."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Decision, Key, Limit, StoreTimeout, StoreUnavailable
from headgate.algorithms import ALGORITHMS
from headgate.local.ledger import MAX_ATTEMPTS, MAX_BATCH, OutageDebt, OutageLedger, OutageOvershoot, Settlement, settle
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund, Reset
from headgate.testing import FakeClock
from support.model import Model, Plan, Subject

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 1_000_000
NOW = 1_763_251_200 * SECOND
MINUTE = timedelta(minutes=1)

RATES = sorted({*ALGORITHMS} - {"concurrency"})
every_algorithm = pytest.mark.parametrize("algorithm", RATES)


def limit_of(algorithm: str, quota: int = 10, *, name: str = "x") -> Limit:
    return Limit(quota, MINUTE, algorithm=algorithm, name=name)


def owed(ledger: OutageLedger) -> dict[str, int]:
    """The debt of each counter; the ledger is unchanged."""
    taken = ledger.take()
    ledger.put_back(taken)
    return {f"{key.limit.name} {key.identity}": tokens for key, tokens in taken}


class Store:
    """A recovered store: a memory store with faults injected into the given calls."""

    def __init__(self, clock: FakeClock) -> None:
        self.memory = MemoryStore(clock)
        self.faults: dict[int, str] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.sent: list[Any] = []
        self.batches: list[int] = []
        self._numbers = count()

    def run_all(self, calls: list[Any]) -> list[Any]:
        self.batches.append(len(calls))
        return [self._run(call, self.faults.get(next(self._numbers))) for call in calls]

    def _run(self, call: Any, fault: str | None) -> Any:
        self.sent.append(call)
        self.meanwhile()
        if fault == "unsent":
            return StoreUnavailable("nobody is there")
        answer = self.memory.run(call) if fault != "lost on the way" else None
        return StoreTimeout("no answer") if fault or answer is None else answer

    def used(self, key: Key) -> int:
        return key.limit.capacity - self.memory.decide(Check((key,), 0)).remaining


def settle_all(ledger: OutageLedger, store: Store, *, most_seconds: float = 60) -> Settlement:
    return settle(ledger, store.run_all, timeout_s=most_seconds, now=lambda: 0.0)


# ------------------------------------------------------------------ debts


@every_algorithm
def test_admitted_cost_is_owed_by_each_counter(algorithm: str) -> None:
    ledger, limit = OutageLedger(FakeClock(NOW)), limit_of(algorithm)
    for _ in range(3):
        ledger.record(Check((limit.by("ada"), limit_of(algorithm, 100, name="y").by("ada")), (2, 5)))
    ledger.record(Check((limit.by("bob"),), 1))
    assert ledger.debt == OutageDebt(3, 22)
    assert owed(ledger) == {"x ada": 6, "y ada": 15, "x bob": 1}


@every_algorithm
def test_debt_is_capped_by_the_limit(algorithm: str) -> None:
    ledger, key = OutageLedger(FakeClock(NOW)), limit_of(algorithm).by("ada")
    for cost in (4, 4, 4, 40):
        ledger.record(Check((key,), cost))
    assert (owed(ledger), ledger.debt, ledger.take_forgiven()) == ({"x ada": 10}, OutageDebt(1, 10), 42)
    assert ledger.take_forgiven() == 0


@pytest.mark.parametrize(
    ("algorithm", "after"),
    [
        # Debt after 0, 1, 6, 7, 30, 59.999999, 60 and 90 seconds, for 10 per minute at the start of a window.
        ("token_bucket", [10, 10, 9, 9, 5, 1, 0, 0]),
        ("gcra", [10, 10, 9, 9, 5, 1, 0, 0]),
        ("leaky_bucket", [10, 10, 9, 9, 5, 1, 0, 0]),
        ("fixed_window", [10, 10, 10, 10, 10, 10, 0, 0]),
        ("sliding_log", [10, 10, 10, 10, 10, 10, 0, 0]),
        ("sliding_window", [10, 10, 10, 10, 10, 10, 10, 5]),
    ],
)
def test_debts_decay_as_the_limit_does(algorithm: str, after: list[int]) -> None:
    seen = []
    for wait_us in (0, 1 * SECOND, 6 * SECOND, 7 * SECOND, 30 * SECOND, 60 * SECOND - 1, 60 * SECOND, 90 * SECOND):
        clock = FakeClock(NOW)
        ledger = OutageLedger(clock)
        ledger.record(Check((limit_of(algorithm).by("ada"),), 10))
        clock.set_us(NOW + wait_us)
        seen.append(sum(tokens for _, tokens in ledger.take()))
    assert seen == after


def test_leases_and_peeks_are_not_recorded_as_debt() -> None:
    ledger = OutageLedger(FakeClock(NOW))
    room, rate = limit_of("concurrency").by("ada"), limit_of("gcra").by("ada")
    ledger.record(Check((room, rate), (1, 0), "a"))
    assert (ledger.debt, ledger.take()) == (OutageDebt(0, 0), [])


def test_taken_debt_is_removed_unless_put_back() -> None:
    ledger, key = OutageLedger(FakeClock(NOW)), limit_of("gcra").by("ada")
    ledger.record(Check((key,), 4))
    assert ledger.take() == [(key, 4)]
    assert (ledger.take(), ledger.debt) == ([], OutageDebt(0, 0))
    ledger.record(Check((key,), 3))
    ledger.put_back([(key, 4)])
    assert (owed(ledger), ledger.debt) == ({"x ada": 7}, OutageDebt(1, 7))


@every_algorithm
def test_failed_settlements_do_not_prolong_a_debt(algorithm: str) -> None:
    clock = FakeClock(NOW)
    ledger, key = OutageLedger(clock), limit_of(algorithm, 7).by("ada")
    ledger.record(Check((key,), 7))
    for _ in range(120):
        ledger.put_back(ledger.take())
        clock.advance(1)
    assert (ledger.take(), ledger.take_forgiven()) == ([], 0)


def test_returned_debt_is_added_to_new_debt() -> None:
    clock = FakeClock(NOW)
    ledger, limit = OutageLedger(clock, max_counters=2), limit_of("gcra")
    for name in ("ada", "bob"):
        ledger.record(Check((limit.by(name),), 4))
    taken = ledger.take()
    ledger.record(Check((limit.by("ada"),), 3))
    ledger.put_back([(key, tokens - 1) for key, tokens in taken])
    assert (ledger.debt, owed(ledger)) == (OutageDebt(2, 9), {"x ada": 6, "x bob": 3})
    ledger.put_back(taken)  # already settle_all
    assert owed(ledger) == {"x ada": 10, "x bob": 7}


@every_algorithm
def test_debt_follows_a_changed_limit(algorithm: str) -> None:
    ledger, wide, narrow = OutageLedger(FakeClock(NOW)), limit_of(algorithm, 20), limit_of(algorithm, 5)
    ledger.record(Check((wide.by("ada"),), 2))
    ledger.record(Check((narrow.by("ada"),), 1))
    ((key, tokens),) = ledger.take()
    # As in the store: buckets and windows keep the used amount; gcra and leaky_bucket keep the time at which they are
    # full again.
    assert (key.limit, tokens) == (narrow, 2 if algorithm in ("gcra", "leaky_bucket") else 3)


def test_ledger_is_bounded_and_evicts_the_smallest_debt() -> None:
    clock = FakeClock(NOW)
    ledger, limit = OutageLedger(clock, max_counters=20), limit_of("gcra")
    for number in range(20):
        ledger.record(Check((limit.by(number),), 2 if number == 3 else 5))
    ledger.record(Check((limit.by("new"),), 1))
    assert ledger.debt == OutageDebt(20, 19 * 5 + 1)
    assert ledger.take_forgiven() == 2
    clock.advance(31)  # almost all debts decay
    for number in range(5):
        ledger.record(Check((limit.by("late", number),), 1))
    assert (ledger.debt.keys <= 20, ledger.take_forgiven()) == (True, 0)
    assert owed(ledger) == {f"x late|{number}": 1 for number in range(5)}


def test_flood_of_counters_keeps_totals_consistent() -> None:
    clock = FakeClock(NOW)
    ledger, limit = OutageLedger(clock, max_counters=50), limit_of("token_bucket")
    for number in range(2_000):
        ledger.record(Check((limit.by(number % 300),), 1 + number % 4))
        clock.advance(0.01)
        assert ledger.debt.keys <= 50
    assert ledger.debt.tokens == sum(account.owed for account in ledger._accounts.values())


def test_threads_lose_no_debt() -> None:
    ledger, keys = OutageLedger(FakeClock(NOW)), [limit_of("gcra", 100_000).by(name) for name in "abc"]
    taken: list[tuple[Key, int]] = []
    done = threading.Event()

    def note() -> None:
        for number in range(2_000):
            ledger.record(Check((keys[number % 3],), 1))

    def take() -> None:
        while not done.is_set():
            taken.extend(ledger.take())

    writers, reader = [threading.Thread(target=note) for _ in range(4)], threading.Thread(target=take)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert sum(tokens for _, tokens in (*taken, *ledger.take())) == 8_000


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking with threads, as servers do
def test_forked_child_does_not_settle_debts_of_its_parent() -> None:
    ledger = OutageLedger(FakeClock(NOW))
    ledger.record(Check((limit_of("gcra").by("ada"),), 3))
    with ledger._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if (ledger.take(), ledger.debt) == ([], OutageDebt(0, 0)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ledger.debt == OutageDebt(1, 3)


# ------------------------------------------------------------------ against the model

plans = st.builds(
    lambda algorithm, quota, period_us, burst: Plan(
        algorithm, quota, period_us, burst if ALGORITHMS[algorithm].SHAPES_BURST else quota, "x"
    ),
    st.sampled_from(RATES),
    st.integers(1, 12),
    st.sampled_from([7, 1_000, 999_983, SECOND, 60 * SECOND]),
    st.integers(1, 12),
)
steps = st.tuples(
    st.sampled_from(["ada", "bob"]), st.integers(0, 15), st.sampled_from([0, 1, 3, 500, 10_007, SECOND, 30 * SECOND])
)


def key_of(plan: Plan, identity: str) -> Key:
    burst = plan.capacity if ALGORITHMS[plan.algorithm].SHAPES_BURST else None
    period = timedelta(microseconds=plan.period_us)
    return Limit(plan.quota, period, burst=burst, algorithm=plan.algorithm, name=plan.name).by(identity)


@given(plans, st.lists(steps, max_size=30), st.sampled_from([0, 1, 499, SECOND]), st.booleans())
def test_debt_equals_the_usage_of_the_model(
    plan: Plan, done: list[tuple[str, int, int]], wait_us: int, attempts: bool
) -> None:
    """With and without failed settlements in between."""
    clock, model = FakeClock(NOW), Model()
    ledger = OutageLedger(clock)
    forgiven = 0
    for identity, cost, step_us in done:
        ledger.record(Check((key_of(plan, identity),), cost))
        subject = (Subject(plan, identity),)
        answer = model.check(subject, clock.now_us(), cost)
        if not answer.allowed:
            forgiven += cost - answer.remaining
            model.check(subject, clock.now_us(), answer.remaining)
        clock.set_us(clock.now_us() + step_us)
        if attempts:
            ledger.put_back(ledger.take())
    clock.set_us(clock.now_us() + wait_us)
    lacking = {
        identity: plan.capacity - model.peek((Subject(plan, identity),), clock.now_us()).remaining
        for identity in {identity for identity, _, _ in done}
    }
    assert {key.identity: tokens for key, tokens in ledger.take()} == {
        who: much for who, much in lacking.items() if much
    }
    assert ledger.take_forgiven() == forgiven


faults = st.dictionaries(
    st.integers(0, 40), st.sampled_from(["unsent", "lost on the way", "lost on the way back"]), max_size=12
)


@given(
    st.sampled_from(RATES),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 15)), max_size=40),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=10),
    faults,
)
def test_every_token_is_charged_once_or_accounted_for(
    algorithm: str, noted: list[tuple[int, int]], spent_before: list[tuple[int, int]], foreseen: dict[int, str]
) -> None:
    """At a fixed time, each admitted token is charged, forgiven, uncertain or still owed, and none is counted twice."""
    clock, limit = FakeClock(NOW), limit_of(algorithm)
    ledger, store = OutageLedger(clock), Store(clock)
    for who, cost in spent_before:
        store.memory.decide(Check((limit.by(who),), cost))
    before = {who: store.used(limit.by(who)) for who in range(10)}
    for who, cost in noted:
        ledger.record(Check((limit.by(who),), cost))
    store.faults = foreseen
    result = [settle_all(ledger, store) for _ in range(4)]
    store.faults = {}
    result.append(settle_all(ledger, store))
    admitted, charged = sum(cost for _, cost in noted), sum(each.charged for each in result)
    uncertain, forgiven = sum(each.uncertain for each in result), sum(each.forgiven for each in result)
    assert (ledger.debt, result[-1].left) == (OutageDebt(0, 0), 0)
    assert charged + forgiven + uncertain == admitted
    spent = sum(store.used(limit.by(who)) - before[who] for who in range(10))
    assert charged <= spent <= charged + uncertain
    if not uncertain:
        asked = {who: sum(cost for each, cost in noted if each == who) for who in range(10)}
        assert [store.used(limit.by(who)) for who in range(10)] == [
            min(10, before[who] + asked[who]) for who in range(10)
        ]


# ------------------------------------------------------------------ fleets


REFILLED = ("gcra", "leaky_bucket", "token_bucket")


@pytest.mark.parametrize("algorithm", REFILLED)
@pytest.mark.parametrize("nodes", [1, 2, 4, 12])
@pytest.mark.parametrize(("admitted", "left"), [(120, 0), (96, 0), (72, 8), (60, 19), (36, 20)])
def test_fleet_repays_the_refill_of_an_outage_once(algorithm: str, nodes: int, admitted: int, left: int) -> None:
    """10 per second, burst 20, six seconds: 80 requests would have passed, whatever the number of nodes."""
    limit = Limit(10, timedelta(seconds=1), burst=20, algorithm=algorithm, name="fleet")
    clock = FakeClock(NOW)
    ledgers, store = [OutageLedger(clock, nodes=lambda: nodes) for _ in range(nodes)], Store(clock)
    for number in range(admitted):
        clock.set_us(NOW + number * 6 * SECOND // admitted)
        ledgers[number % nodes].record(Check((limit.by("ada"),), 1))
    clock.set_us(NOW + 6 * SECOND)
    for ledger in ledgers:
        settle_all(ledger, store)
    # Each node rounds its debt to whole tokens.
    assert abs(limit.capacity - store.used(limit.by("ada")) - left) <= max(1, nodes // 2)


@given(
    st.sampled_from(REFILLED),
    st.integers(2, 8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * SECOND)), max_size=20),
)
def test_nodes_with_equal_traffic_owe_as_one_node(algorithm: str, nodes: int, rounds: list[tuple[int, int]]) -> None:
    limit = Limit(7, timedelta(seconds=1), burst=10_000, algorithm=algorithm, name="fleet")
    clock = FakeClock(NOW)
    alone, fleet = OutageLedger(clock), [OutageLedger(clock, nodes=lambda: nodes) for _ in range(nodes)]
    for cost, wait_us in rounds:
        alone.record(Check((limit.by("ada"),), cost * nodes))
        for ledger in fleet:
            ledger.record(Check((limit.by("ada"),), cost))
        clock.set_us(clock.now_us() + wait_us)
    owed = sum(tokens for _, tokens in alone.take())
    assert abs(sum(tokens for ledger in fleet for _, tokens in ledger.take()) - owed) <= nodes / 2 + 1


@pytest.mark.parametrize("algorithm", sorted({*RATES} - {*REFILLED}))
def test_windows_and_logs_are_summed_over_nodes(algorithm: str) -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock, nodes=lambda: 5), Store(clock)
    ledger.record(Check((limit_of(algorithm).by("ada"),), 4))
    clock.set_us(NOW + 1)
    settle_all(ledger, store)
    assert store.used(limit_of(algorithm).by("ada")) == 4


def test_uncertain_charges_are_reported() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    keys = limit_of("gcra").by("ada"), limit_of("concurrency").by("ada")
    assert ledger.is_empty
    ledger.record_uncertain(Check(keys, (3, 1), "lease"))
    assert (ledger.is_empty, ledger.debt) == (False, OutageDebt(0, 0))
    assert settle_all(ledger, store) == Settlement(0, 0, 0, 3, 0)
    assert ledger.is_empty
    assert settle_all(ledger, store) == Settlement(0, 0, 0, 0, 0)


# ------------------------------------------------------------------ settlement


def test_debt_beyond_the_remaining_quota_is_forgiven() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    ada, bob, eve = (limit_of("gcra").by(name) for name in ("ada", "bob", "eve"))
    store.memory.decide(Check((ada,), 7))
    store.memory.decide(Check((eve,), 10))
    for key, cost in ((ada, 9), (bob, 4), (eve, 1), (bob, 30)):
        ledger.record(Check((key,), cost))
    assert settle_all(ledger, store) == Settlement(keys=2, charged=13, forgiven=6 + 24 + 1, uncertain=0, left=0)
    assert [store.used(key) for key in (ada, bob, eve)] == [10, 10, 10]
    assert [(call.keys[0].identity, call.cost) for call in store.sent] == [
        ("ada", 9),
        ("bob", 10),
        ("eve", 1),
        ("ada", 3),
    ]


def test_largest_overshoot_of_an_outage_is_reported_once() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock, nodes=lambda: 3), Store(clock)
    ada, bob = limit_of("fixed_window").by("ada"), limit_of("fixed_window", name="y").by("bob")
    store.memory.decide(Check((ada,), 7))
    ledger.record(Check((ada,), 5))
    ledger.record(Check((bob,), 14), is_bounded=False)
    clock.advance(2)
    settle_all(ledger, store)
    assert ledger.take_overshoot() == OutageOvershoot(bob.limit, 4, 2_000_000, 3, is_bounded=False)
    assert ledger.take_overshoot() is None
    store.memory.run(Reset((ada,)))
    ledger.record(Check((ada,), 9))
    settle_all(ledger, store)
    assert ledger.take_overshoot() is None, "everything fitted"


def test_charges_are_sent_in_batches() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    for number in range(2 * MAX_BATCH + 5):
        ledger.record(Check((limit_of("gcra").by(number),), 1))
    assert settle_all(ledger, store).charged == 2 * MAX_BATCH + 5
    assert store.batches == [MAX_BATCH, MAX_BATCH, 5]


def test_only_unsent_charges_are_sent_again() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    ada, bob, eve = keys = [limit_of("gcra").by(name) for name in ("ada", "bob", "eve")]
    for key, cost in zip(keys, (2, 3, 4), strict=True):
        ledger.record(Check((key,), cost))
    store.faults = {0: "lost on the way back", 1: "unsent"}
    assert settle_all(ledger, store) == Settlement(keys=1, charged=4, forgiven=0, uncertain=2, left=3)
    assert owed(ledger) == {"x bob": 3}
    assert settle_all(ledger, store) == Settlement(keys=1, charged=3, forgiven=0, uncertain=0, left=0)
    assert [store.used(key) for key in (ada, bob, eve)] == [2, 3, 4]


@pytest.mark.parametrize("fault", ["unsent", "lost on the way"])
def test_settlement_stops_when_the_store_is_unavailable(fault: str) -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    for number in range(3 * MAX_BATCH):
        ledger.record(Check((limit_of("gcra").by(number),), 1))
    store.faults = dict.fromkeys(range(MAX_BATCH), fault)
    uncertain = 0 if fault == "unsent" else MAX_BATCH
    assert settle_all(ledger, store) == Settlement(0, 0, 0, uncertain, 3 * MAX_BATCH - uncertain)
    assert (store.batches, ledger.debt.keys) == ([MAX_BATCH], 3 * MAX_BATCH - uncertain)


def test_settlement_respects_its_timeout() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    for number in range(3 * MAX_BATCH):
        ledger.record(Check((limit_of("gcra").by(number),), 1))
    ticks = count()
    result = settle(ledger, store.run_all, timeout_s=1.5, now=lambda: float(next(ticks)))
    assert (result.charged, result.left, ledger.debt.keys) == (MAX_BATCH, 2 * MAX_BATCH, 2 * MAX_BATCH)


def test_concurrent_requests_do_not_forgive_the_rest() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    key = limit_of("gcra", 100).by("ada")
    store.memory.decide(Check((key,), 50))
    ledger.record(Check((key,), 80))
    others = iter([0, 1, 1])
    store.meanwhile = lambda: store.memory.decide(Check((key,), next(others, 0)))
    assert settle_all(ledger, store) == Settlement(keys=1, charged=48, forgiven=32, uncertain=0, left=0)
    assert [call.cost for call in store.sent] == [80, 50, 49, 48]


def test_contended_counter_is_retried_later() -> None:
    clock = FakeClock(NOW)
    ledger, store = OutageLedger(clock), Store(clock)
    key = limit_of("gcra", 100).by("ada")
    ledger.record(Check((key,), 100))
    store.meanwhile = lambda: store.memory.decide(Check((key,), 1))
    result = settle_all(ledger, store)
    assert (result.charged, result.forgiven, result.left) == (0, MAX_ATTEMPTS, 100 - MAX_ATTEMPTS)
    assert owed(ledger) == {"x ada": 100 - MAX_ATTEMPTS}


def test_unsent_debt_survives_any_error() -> None:
    ledger = OutageLedger(FakeClock(NOW))
    for number in range(MAX_BATCH + 7):
        ledger.record(Check((limit_of("gcra").by(number),), 1))

    def fail(calls: list[Check]) -> Any:
        raise RuntimeError("the interpreter is going down")

    with pytest.raises(RuntimeError):
        settle(ledger, fail, timeout_s=60, now=lambda: 0.0)
    assert ledger.debt == OutageDebt(7, 7)


def test_no_debts_need_no_store_call() -> None:
    ledger, store = OutageLedger(FakeClock(NOW)), Store(FakeClock(NOW))
    assert (settle_all(ledger, store), store.batches) == (Settlement(0, 0, 0, 0, 0), [])


# ------------------------------------------------------------------ what could not be given back


def charged(algorithm: str, amount: int, *, quota: int = 10) -> tuple[FakeClock, Store, Key, int]:
    """Return a store in which ada was charged this amount, and the time of the charge."""
    clock = FakeClock(NOW)
    store, key = Store(clock), limit_of(algorithm, quota).by("ada")
    decision = store.memory.decide(Check((key,), amount))
    assert decision.allowed
    return clock, store, key, decision.at_us


@pytest.mark.parametrize(
    ("algorithm", "after", "returned"),
    [
        # A window or log refunds the full charge for as long as it counts.
        *[
            (algorithm, after, 6)
            for algorithm in ("fixed_window", "sliding_window", "sliding_log")
            for after in (0, 50)
        ],
        *[(algorithm, 60, 0) for algorithm in ("fixed_window", "sliding_log")],
        ("sliding_window", 60, 0),
        # A bucket subtracts the refill since then: one per six seconds, rounded up.
        *[(bucket, after, 5) for bucket in ("gcra", "leaky_bucket", "token_bucket") for after in (0, 5)],
        *[(bucket, 6, 4) for bucket in ("gcra", "leaky_bucket", "token_bucket")],
        *[(bucket, 36, 0) for bucket in ("gcra", "leaky_bucket", "token_bucket")],
    ],
)
def test_failed_refund_is_made_when_the_store_is_back(algorithm: str, after: int, returned: int) -> None:
    clock, store, key, at_us = charged(algorithm, 6)
    ledger = OutageLedger(clock)
    ledger.record_refund(Refund(key, 6, None, at_us))
    assert ledger.debt == OutageDebt(1, 0)
    clock.advance(after)
    before = store.used(key)
    assert settle_all(ledger, store) == Settlement(0, 0, 0, 0, 0, returned)
    assert before - store.used(key) == returned
    assert ledger.debt == OutageDebt(0, 0)
    assert settle_all(ledger, store) == Settlement(0, 0, 0, 0, 0, 0)


def test_refunds_of_a_counter_are_merged_and_rounded_once() -> None:
    clock, store, key, at_us = charged("token_bucket", 6)
    ledger = OutageLedger(clock)
    for later in (3, 0, 2):
        ledger.record_refund(Refund(key, 1, None, at_us + later))
    assert settle_all(ledger, store).returned == 2
    assert store.sent == [Refund(key, 2, store.sent[0].id, at_us)]


def test_refunds_of_different_windows_are_separate() -> None:
    clock, store, key, at_us = charged("fixed_window", 6)
    ledger = OutageLedger(clock)
    clock.advance(60)
    store.memory.decide(Check((key,), 5))
    for amount, when_us in ((6, at_us), (1, at_us + 60 * SECOND), (2, at_us + 61 * SECOND)):
        ledger.record_refund(Refund(key, amount, None, when_us))
    assert settle_all(ledger, store).returned == 3
    assert store.used(key) == 2


@pytest.mark.parametrize("fault", ["unsent", "lost on the way", "answer lost"])
@pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket"])
def test_uncertain_refund_is_retried_and_made_once(algorithm: str, fault: str) -> None:
    clock, store, key, at_us = charged(algorithm, 9)
    ledger = OutageLedger(clock)
    ledger.record_refund(Refund(key, 6, None, at_us))
    store.faults = {0: fault}
    assert settle_all(ledger, store).returned == 0
    assert ledger.debt.keys == 1
    ledger.record_refund(Refund(key, 2, None, at_us))  # not part of the refund that was already sent
    settle_all(ledger, store)
    assert store.sent[0].id == store.sent[1].id != store.sent[2].id
    assert ledger.debt.keys == 0
    assert store.used(key) == 9 - (8 if algorithm == "fixed_window" else 6)


def test_waiting_refund_shrinks_with_the_refill() -> None:
    clock, store, key, at_us = charged("token_bucket", 10)
    ledger = OutageLedger(clock)
    ledger.record_refund(Refund(key, 6, None, at_us))
    store.faults = {0: "unsent"}
    settle_all(ledger, store)
    clock.advance(12)
    settle_all(ledger, store)
    assert [refund.amount for refund in store.sent] == [5, 3]
    assert store.used(key) == 10 - 2 - 3


def test_refund_is_dropped_before_its_id_expires() -> None:
    clock = FakeClock(NOW)
    store, key = Store(clock), Limit(10, timedelta(minutes=50), algorithm="sliding_log", name="x").by("ada")
    ledger = OutageLedger(clock)
    ledger.record_refund(Refund(key, 1, None, NOW))
    clock.advance(3600 - 0.1)
    assert settle_all(ledger, store).returned == 0
    assert store.sent == []


def test_refunds_are_sent_before_charges() -> None:
    clock, store, key, at_us = charged("fixed_window", 10)
    ledger = OutageLedger(clock)
    ledger.record(Check((key,), 4))
    ledger.record_refund(Refund(key, 4, None, at_us))
    assert settle_all(ledger, store) == Settlement(1, 4, 0, 0, 0, 4)
    assert store.used(key) == 10


def test_failed_refund_stops_the_settlement() -> None:
    clock, store, key, at_us = charged("fixed_window", 5)
    ledger = OutageLedger(clock)
    ledger.record(Check((key,), 4))
    ledger.record_refund(Refund(key, 4, None, at_us))
    store.faults = {0: "unsent"}
    assert settle_all(ledger, store).left == 4
    assert ledger.debt == OutageDebt(2, 4)
    assert store.batches == [1]


def test_number_of_refunds_is_bounded() -> None:
    clock = FakeClock(NOW)
    ledger, limit = OutageLedger(clock, max_counters=3), limit_of("fixed_window")
    for number in range(5):
        ledger.record_refund(Refund(limit.by(f"{number}"), 1, None, NOW))
    store = Store(clock)
    settle_all(ledger, store)
    assert [refund.key.identity for refund in store.sent] == ["2", "3", "4"]


HOUR = timedelta(hours=1)


def test_settlement_stops_at_its_timeout_with_many_debts() -> None:
    """Reading all debts of a long outage used to take longer than the timeout, so that none were settle_all."""
    ledger = OutageLedger(FakeClock(10**15))
    for number in range(10 * MAX_BATCH):
        ledger.record(Check((Limit(5, HOUR).by(number),), 2))
    seconds = count()
    looked_at: list[int] = []

    def run_all(checks: list[Check]) -> list[Decision]:
        looked_at.append(10 * MAX_BATCH - ledger.debt.keys)
        return [Decision(True, check.keys, ((3, 0, 0, 0),), None) for check in checks]

    result = settle(ledger, run_all, timeout_s=2.5, now=lambda: float(next(seconds)))
    assert looked_at == [MAX_BATCH, 2 * MAX_BATCH]
    assert (result.charged, result.left, ledger.debt) == (
        4 * MAX_BATCH,
        16 * MAX_BATCH,
        OutageDebt(8 * MAX_BATCH, 16 * MAX_BATCH),
    )
