"""One suite for every store, for threads and for asyncio: whoever counts, and however it is asked, the answers are the
same.

Time is a FakeClock's, so that a wait of an hour costs nothing and is exact; only leases that are renewed in the
background, and one wait beside another, need the real one.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter
from headgate.errors import InvalidInput
from headgate.testing import FakeClock
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECOND = 1_000_000
HOUR = timedelta(hours=1)
TEN_SECONDS = timedelta(seconds=10)
START_US = 1_763_251_200 * SECOND  # a whole hour, so that windows begin here

ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")
QUEUES = ("gcra", "leaky_bucket")
"""Those that go by the raw clock, and deny while it is far behind."""
REFUNDABLE = [name for name in ALGORITHMS if name != "concurrency"]


class Threaded(Limiter):
    """A Limiter whose calls can also be begun, and their answer asked for later."""

    def begin(self, method: str, *args: Any, **options: Any) -> Callable[[], Any]:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(getattr(self, method), *args, **options)
        pool.shutdown(wait=False)
        return future.result


class Looped:
    """An AsyncLimiter that is asked like a Limiter: each call runs this limiter's own event loop until the answer."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._limiter = AsyncLimiter(url, **options)

    def begin(self, method: str, *args: Any, **options: Any) -> Callable[[], Any]:
        async def begun() -> asyncio.Task[Any]:
            task = asyncio.create_task(getattr(self._limiter, method)(*args, **options))
            await asyncio.sleep(0)
            return task

        task = self._runner.run(begun())
        return lambda: self._runner.run(asyncio.wait_for(task, None))

    @contextmanager
    def hold(self, *keys: Key | Limit, **options: Any) -> Iterator[Decision]:
        holding = self._limiter.hold(*keys, **options)
        with ExitStack() as stack:
            decision = self._runner.run(holding.__aenter__())

            def leave(*error: Any) -> bool | None:
                return self._runner.run(holding.__aexit__(*error))

            stack.push(leave)
            yield decision

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **options: self._runner.run(getattr(self._limiter, method)(*args, **options))

    def __enter__(self) -> Self:
        self._runner.run(self._limiter.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._limiter.__aexit__(*error))
        self._runner.close()


Gate = Threaded | Looped
BUDGET = 20.0
"""Seconds. These tests are about decisions; a busy machine must not turn one into a timeout of the store."""


@pytest.fixture(params=[Threaded, Looped], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Gate]:
    made: type[Gate] = request.param
    return made


@pytest.fixture
def open_gate(kind: type[Gate], store_url: str) -> Iterator[Callable[..., Gate]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(kind(store_url, budget=BUDGET, **options))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_US)


@pytest.fixture
def gate(open_gate: Callable[..., Gate], clock: FakeClock) -> Gate:
    return open_gate(clock=clock)


def limit_of(algorithm: str, quota: int, name: str, period: timedelta = HOUR) -> Limit:
    return Limit(quota, period, algorithm=algorithm, name=f"{name}-{algorithm}")


class Plan(NamedTuple):
    """What a plan change may change."""

    quota: int
    hours: float = 1

    def limit(self, algorithm: str, name: str) -> Limit:
        return limit_of(algorithm, self.quota, name, timedelta(hours=self.hours))


def one_of_each(name: str, quota: int = 5) -> list[Limit]:
    return [limit_of(algorithm, quota, name) for algorithm in ALGORITHMS]


def state(gate: Gate, key: Key) -> tuple[Any, ...]:
    """All that a peek tells of a key; the id that a peek at leases makes up is not a part of it."""
    return gate.peek(key).verdicts


# check

# (remaining, retry, reset, delay) of three requests on two per ten seconds, in seconds.
TWO_PER_TEN_SECONDS: dict[str, list[tuple[int, float, float, float]]] = {
    "concurrency": [(1, 0, 10, 0), (0, 0, 10, 0), (0, 10, 10, 0)],
    "fixed_window": [(1, 0, 10, 0), (0, 0, 10, 0), (0, 10, 10, 0)],
    "gcra": [(1, 0, 5, 0), (0, 0, 10, 0), (0, 5, 10, 0)],
    "leaky_bucket": [(1, 0, 5, 0), (0, 0, 10, 5), (0, 5, 10, 0)],
    "sliding_log": [(1, 0, 10, 0), (0, 0, 10, 0), (0, 10, 10, 0)],
    "sliding_window": [(1, 0, 20, 0), (0, 0, 20, 0), (0, 15, 20, 0)],
    "token_bucket": [(1, 0, 5, 0), (0, 0, 10, 0), (0, 5, 10, 0)],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_check_answers_all_that_one_may_want_to_know(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 2, unique, TEN_SECONDS).by("ada")
    decisions = [gate.check(key) for _ in range(3)]
    assert [
        (decision.remaining, decision.retry_after, decision.reset_after, decision.delay) for decision in decisions
    ] == TWO_PER_TEN_SECONDS[algorithm]
    assert [decision.allowed for decision in decisions] == [bool(decision) for decision in decisions]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [decision.denied_by for decision in decisions] == [(), (), (key.limit.name,)]
    assert {(decision.degraded, decision.unsatisfiable, decision.at_us) for decision in decisions} == {
        (None, False, START_US)
    }
    for decision in decisions:
        (outcome,) = decision.outcomes
        assert (outcome.limit, outcome.key) == (key.limit, key)
        for field in ("allowed", "remaining", "retry_after_us", "reset_after_us", "delay_us", "unsatisfiable"):
            assert getattr(outcome, field) == getattr(decision, field)


def test_decision_says_why(gate: Gate, unique: str) -> None:
    limit = Limit(1, timedelta(minutes=1), name=unique)
    words = f"{unique} ({limit})"
    assert gate.check(limit.by("ada")).reason == f"allowed: 0 left of {words}"
    assert gate.check(limit.by("ada")).reason == f"denied by {words}: 0 left, passes in 60 s"
    assert gate.check(limit.by("bob"), cost=2).reason == (
        f"denied by {words}: it costs more than the whole capacity of 1, so it can never pass"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cost_may_be_the_whole_capacity_and_not_one_more(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    assert gate.check(key, cost=3).remaining == 2
    too_many = gate.check(key, cost=3)
    assert (too_many.allowed, too_many.remaining) == (False, 2)
    assert gate.check(key, cost=2).remaining == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_costs_more_than_everything_is_refused_for_ever(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    for cost in (6, 2**53, 10**30):
        refused = gate.check(key, cost=cost)
        assert (refused.allowed, refused.unsatisfiable) == (False, True)
        assert (refused.retry_after, refused.retry_after_us, refused.remaining) == (None, None, 5)
    assert state(gate, key) == ((5, 0, 0, 0),)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clients_have_separate_counters_and_a_bare_limit_one(gate: Gate, unique: str, algorithm: str) -> None:
    limit = limit_of(algorithm, 1, unique)
    assert [bool(gate.check(key)) for key in (limit, limit.by(), limit.by("ada"), limit.by("bob"))] == [
        True,
        False,
        True,
        True,
    ]


# peek


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_peek_says_what_is_left_and_leaves_it(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 2, unique, TEN_SECONDS).by("ada")
    as_new = (2, 0, 0, 0)
    assert [state(gate, key) for _ in range(2)] == [(as_new,)] * 2
    gate.check(key, cost=2)
    peeks = [gate.peek(key), gate.check(key, cost=0), gate.peek(key)]
    assert {(peek.allowed, peek.remaining, peek.retry_after, peek.denied_by) for peek in peeks} == {(True, 0, 0, ())}
    assert len({peek.reset_after for peek in peeks}) == 1


def test_peek_at_several_limits_reports_the_tightest(gate: Gate, unique: str) -> None:
    keys = [limit.by("ada") for limit in one_of_each(unique)]
    gate.check(keys[3], cost=4)
    seen = gate.peek(*keys)
    assert (seen.allowed, seen.remaining) == (True, 1)
    assert [outcome.remaining for outcome in seen.outcomes] == [5, 5, 5, 1, 5, 5, 5]


# acquire


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "leaky_bucket"])
def test_acquire_waits_exactly_until_its_turn(gate: Gate, clock: FakeClock, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 2, unique, TEN_SECONDS).by("ada")
    gate.check(key, cost=2)
    (_, wait, _, _) = TWO_PER_TEN_SECONDS[algorithm][-1]
    assert gate.acquire(key).allowed
    assert clock.now_us() == START_US + wait * SECOND


def test_acquire_waits_for_the_slowest_of_several(gate: Gate, clock: FakeClock, unique: str) -> None:
    keys = [limit_of(algorithm, 2, unique, TEN_SECONDS).by("ada") for algorithm in ("gcra", "sliding_window")]
    gate.check(*keys, cost=2)
    assert gate.acquire(*keys).allowed
    assert clock.now_us() == START_US + 15 * SECOND


@pytest.mark.parametrize(("timeout", "allowed", "waited"), [(0, False, 0), (4.999999, False, 0), (5, True, 5)])
def test_acquire_gives_up_at_once_if_its_turn_comes_too_late(
    gate: Gate, clock: FakeClock, unique: str, timeout: float, allowed: bool, waited: int
) -> None:
    key = limit_of("token_bucket", 2, unique, TEN_SECONDS).by("ada")
    gate.check(key, cost=2)
    decision = gate.acquire(key, timeout=timeout)
    assert (decision.allowed, decision.retry_after) == (allowed, 0 if allowed else 5)
    assert clock.now_us() == START_US + waited * SECOND
    assert gate.peek(key).remaining == 0


def test_acquire_never_waits_for_what_cannot_be(gate: Gate, clock: FakeClock, unique: str) -> None:
    key = limit_of("token_bucket", 2, unique).by("ada")
    assert gate.acquire(key, cost=3).unsatisfiable
    assert clock.now_us() == START_US


def test_queue_lets_go_at_an_even_pace(gate: Gate, clock: FakeClock, unique: str) -> None:
    key = limit_of("leaky_bucket", 5, unique, TEN_SECONDS).by("ada")
    let_go = []
    for _ in range(4):
        clock.set_us(START_US)
        assert gate.acquire(key).allowed
        let_go.append((clock.now_us() - START_US) / SECOND)
    assert let_go == [0, 2, 4, 6]


def test_acquire_beyond_its_timeout_takes_no_queue_place(gate: Gate, clock: FakeClock, unique: str) -> None:
    key = limit_of("leaky_bucket", 5, unique, TEN_SECONDS).by("ada")
    gate.check(key, cost=2)
    before = state(gate, key)
    late = gate.acquire(key, timeout=3.9)
    assert (late.allowed, late.retry_after, late.delay, late.denied_by) == (False, 4, 0, (key.limit.name,))
    assert (clock.now_us(), state(gate, key)) == (START_US, before)
    assert gate.acquire(key, timeout=4).allowed
    assert clock.now_us() == START_US + 4 * SECOND


def test_abandoned_wait_reports_the_queue_without_it(gate: Gate, unique: str) -> None:
    key = limit_of("leaky_bucket", 5, unique, TEN_SECONDS).by("ada")
    gate.check(key, cost=2)
    late, seen = gate.acquire(key, timeout=1), gate.peek(key)
    assert (late.remaining, late.reset_after) == (seen.remaining, seen.reset_after) == (3, 4)


def test_acquire_takes_a_lease_as_soon_as_one_is_released(open_gate: Callable[..., Gate], unique: str) -> None:
    gate = open_gate()
    seat = limit_of("concurrency", 1, unique, timedelta(minutes=5)).by("ada")
    gate.enter(seat, id="first")
    answer = gate.begin("acquire", seat, id="second")
    gate.leave(seat, id="first")
    waited = answer()
    assert waited.allowed
    assert waited.id == "second"


@pytest.mark.parametrize("timeout", [0, 0.004, 0.3, 9.999999])
def test_acquire_looks_for_a_place_until_its_time_is_over(
    gate: Gate, clock: FakeClock, unique: str, timeout: float
) -> None:
    seat = limit_of("concurrency", 1, unique, TEN_SECONDS).by("ada")
    gate.enter(seat, id="first")
    late = gate.acquire(seat, id="second", timeout=timeout)
    assert (late.allowed, late.remaining) == (False, 0)
    assert clock.now_us() == START_US + round(timeout * SECOND)


def test_acquire_waits_for_no_place_that_a_limit_of_another_kind_denies(
    gate: Gate, clock: FakeClock, unique: str
) -> None:
    seat = limit_of("concurrency", 1, unique, TEN_SECONDS).by("ada")
    units = limit_of("token_bucket", 2, unique, TEN_SECONDS).by("ada")
    gate.enter(seat, id="first")
    gate.check(units, cost=2)
    assert not gate.acquire(seat, units, id="second", timeout=4.9).allowed
    assert clock.now_us() == START_US
    assert gate.acquire(seat, units, id="second", timeout=10).allowed
    assert clock.now_us() == START_US + 10 * SECOND


def test_acquire_does_not_wait_to_get_into_a_queue_that_is_too_long(gate: Gate, clock: FakeClock, unique: str) -> None:
    key = limit_of("leaky_bucket", 5, unique, TEN_SECONDS).by("ada")
    gate.check(key, cost=5)
    assert not gate.acquire(key, timeout=9.9).allowed
    assert clock.now_us() == START_US
    assert gate.acquire(key, timeout=10).allowed
    assert clock.now_us() == START_US + 10 * SECOND


def test_lease_from_before_survives_a_turn_that_comes_too_late(gate: Gate, unique: str) -> None:
    seat = limit_of("concurrency", 1, unique, TEN_SECONDS).by("ada")
    queue = limit_of("leaky_bucket", 5, unique, TEN_SECONDS).by("ada")
    gate.check(queue, cost=2)
    gate.enter(seat, id="job")
    assert not gate.acquire(seat, queue, id="job", timeout=3).allowed
    assert gate.renew(seat, id="job")
    gate.leave(seat, id="job")
    assert not gate.acquire(seat, queue, id="job", timeout=3).allowed
    assert not gate.renew(seat, id="job")


def test_wait_on_one_key_does_not_delay_another(open_gate: Callable[..., Gate], unique: str) -> None:
    gate = open_gate()
    limit = Limit(1, timedelta(milliseconds=300), name=unique)
    gate.check(limit.by("slow"))
    answer = gate.begin("acquire", limit.by("slow"))
    quick = gate.check(limit.by("quick"))
    waited = answer()
    assert quick.allowed
    assert waited.allowed
    assert quick.at_us < waited.at_us


# Leases


def test_lease_is_entered_once_renewed_and_left(gate: Gate, clock: FakeClock, unique: str) -> None:
    room = limit_of("concurrency", 2, unique, TEN_SECONDS).by("ada")
    first = gate.enter(room, id="a")
    assert (first.allowed, first.remaining, first.id) == (True, 1, "a")
    assert gate.enter(room, id="a").remaining == 1
    clock.advance(9)
    assert gate.renew(room, id="a")
    clock.advance(9)
    assert gate.peek(room).remaining == 1
    assert [gate.leave(room, id="a") for _ in range(2)] == [True, False]
    assert not gate.renew(room, id="a")
    assert gate.peek(room).remaining == 2


def test_lease_ends_by_itself_on_the_microsecond(gate: Gate, clock: FakeClock, unique: str) -> None:
    room = limit_of("concurrency", 1, unique, TEN_SECONDS).by("ada")
    gate.enter(room, id="a")
    clock.set_us(START_US + 10 * SECOND - 1)
    assert not gate.enter(room, id="b").allowed
    clock.set_us(START_US + 10 * SECOND)
    assert not gate.renew(room, id="a")
    assert not gate.leave(room, id="a")
    assert gate.enter(room, id="b").allowed


def test_expired_lease_is_counted_again(gate: Gate, clock: FakeClock, unique: str) -> None:
    room = limit_of("concurrency", 1, unique, TEN_SECONDS).by("ada")
    gate.enter(room, id="a")
    clock.advance(11)
    assert gate.enter(room, id="a").remaining == 0
    assert not gate.enter(room, id="b").allowed
    assert gate.renew(room, id="a")
    assert gate.leave(room, id="a")


def test_missing_id_is_generated(gate: Gate, unique: str) -> None:
    room = limit_of("concurrency", 3, unique).by("ada")
    ids = [gate.enter(room).id for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(gate.leave(room, id=id) for id in ids)


def test_lease_has_a_cost(gate: Gate, unique: str) -> None:
    room = limit_of("concurrency", 5, unique).by("ada")
    assert gate.enter(room, id="a", cost=4).remaining == 1
    assert not gate.enter(room, id="b", cost=2).allowed
    assert gate.leave(room, id="a")
    assert gate.enter(room, id="b", cost=5).allowed


@pytest.mark.parametrize("id", ["a b", "a%b", "{a}", "ü", "x" * 128, "1 2 3"])
def test_any_printable_text_can_be_the_id_of_a_lease(gate: Gate, unique: str, id: str) -> None:
    room = limit_of("concurrency", 2, unique).by("ada")
    assert [gate.enter(room, id=id).remaining for _ in range(2)] == [1, 1]
    assert not gate.leave(room, id=id[1:] + "y")
    assert gate.renew(room, id=id)
    assert gate.leave(room, id=id)


def test_hold_is_left_at_the_end_of_its_block_whatever_happens(gate: Gate, unique: str) -> None:
    room = limit_of("concurrency", 1, unique).by("ada")
    with gate.hold(room) as decision:
        assert decision.allowed
        assert gate.peek(room).remaining == 0
    assert gate.peek(room).remaining == 1
    with pytest.raises(LookupError, match="the block's own"), gate.hold(room, id="a"):
        raise LookupError("the block's own")
    assert gate.peek(room).remaining == 1


def test_denied_hold_runs_its_block_and_takes_no_lease(gate: Gate, unique: str) -> None:
    room = limit_of("concurrency", 1, unique).by("ada")
    with gate.hold(room) as first:
        with gate.hold(room) as second:
            assert (first.allowed, second.allowed, second.retry_after) == (True, False, 3600)
        assert gate.peek(room).remaining == 0
        assert gate.renew(room, id=first.id)


def test_hold_charges_the_other_limits_and_keeps_that(gate: Gate, unique: str) -> None:
    room, rate = limit_of("concurrency", 1, unique).by("ada"), limit_of("token_bucket", 5, unique).by("ada")
    with gate.hold(room, rate) as decision:
        assert [outcome.remaining for outcome in decision.outcomes] == [0, 4]
    assert [outcome.remaining for outcome in gate.peek(room, rate).outcomes] == [1, 4]
    with gate.hold(rate, cost=2) as decision:
        assert decision.remaining == 2
    assert gate.peek(rate).remaining == 2


def test_hold_is_renewed_for_as_long_as_the_block_runs(open_gate: Callable[..., Gate], unique: str) -> None:
    gate = open_gate()
    room = limit_of("concurrency", 1, unique, timedelta(milliseconds=300)).by("ada")
    renewals, left_us = 0, 0

    def has_outlived_itself() -> bool:
        nonlocal renewals, left_us
        seen = gate.peek(room)
        assert seen.remaining == 0
        renewals += seen.reset_after_us > left_us
        left_us = seen.reset_after_us
        return renewals > 5  # the first is the entering, and of the others only three fit into a lease's time

    with gate.hold(room) as decision:
        wait_until(has_outlived_itself, "five renewals")
        assert gate.renew(room, id=decision.id)
    assert gate.peek(room).remaining == 1


# Ids


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_repeated_id_is_answered_as_the_first_time_and_charged_once(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str
) -> None:
    key = limit_of(algorithm, 10, unique).by("ada")
    first = gate.check(key, cost=3, id="req-1")
    assert (first.allowed, first.remaining, first.id, first.cost) == (True, 7, "req-1", 3)
    clock.advance(1)
    gate.check(key, cost=2)
    clock.advance(1)
    before = state(gate, key)
    assert [gate.check(key, cost=cost, id="req-1") for cost in (3, 1, 11)] == [first] * 3
    assert state(gate, key) == before
    assert gate.check(key, cost=1, id="req-2") != first


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_denied_id_is_decided_anew(gate: Gate, clock: FakeClock, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 2, unique).by("ada")
    gate.check(key, cost=2)
    denied = gate.check(key, id="req-1")
    assert not denied
    clock.set_us(START_US + denied.retry_after_us)
    assert [gate.check(key, id="req-1").allowed for _ in range(2)] == [True, True]
    assert not gate.check(key, cost=2, id="req-2")


@pytest.mark.parametrize("algorithm", REFUNDABLE)
@pytest.mark.parametrize(("period", "valid"), [(1, 60), (120, 120), (30 * 86_400, 86_400)])
def test_id_is_valid_for_the_period_but_a_minute_to_a_day(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str, period: int, valid: int
) -> None:
    key = limit_of(algorithm, 10**6, unique, timedelta(seconds=period)).by("ada")
    first = gate.check(key, cost=10, id="req-1")
    clock.set_us(START_US + valid * SECOND - 1)
    assert gate.check(key, cost=10, id="req-1") == first
    clock.set_us(START_US + valid * SECOND)
    again = gate.check(key, cost=10, id="req-1")
    assert again.at_us == START_US + valid * SECOND


def test_longest_period_counts_for_all_keys_of_a_check(gate: Gate, clock: FakeClock, unique: str) -> None:
    quick = limit_of("fixed_window", 5, unique, timedelta(seconds=1)).by("ada")
    slow = limit_of("token_bucket", 5, unique, timedelta(seconds=600)).by("ada")
    first = gate.check(quick, slow, id="req-1")
    clock.advance(599)
    assert gate.check(quick, slow, id="req-1") == first
    assert gate.peek(quick).remaining == 5


def test_id_on_other_keys_is_another_one(gate: Gate, unique: str) -> None:
    limit, other = limit_of("token_bucket", 5, unique), limit_of("gcra", 5, unique)
    for key in (limit.by("ada"), limit.by("bob"), other.by("ada")):
        assert gate.check(key, cost=2, id="req-1").remaining == 3
        assert gate.peek(key).remaining == 3


def test_id_on_several_limits_charges_each_once_and_in_any_order(gate: Gate, unique: str) -> None:
    keys = [limit.by("ada") for limit in one_of_each(unique) if limit.algorithm != "concurrency"]
    costs = tuple(range(len(keys)))  # one of them nothing
    first = gate.check(*keys, cost=costs, id="req-1")
    assert (first.allowed, first.cost) == (True, costs)
    assert gate.check(*keys, cost=costs, id="req-1") == first
    turned = gate.check(*keys[::-1], cost=1, id="req-1")
    assert (turned.verdicts, turned.cost) == (first.verdicts[::-1], costs[::-1])
    assert [gate.peek(key).remaining for key in keys] == [5 - cost for cost in costs]


def test_limits_that_an_id_has_not_charged_yet_decide_all_or_nothing(gate: Gate, unique: str) -> None:
    known, other, full = (limit_of("token_bucket", 5, f"{unique}-{name}").by("ada") for name in "abc")
    gate.check(full, cost=5)
    first = gate.check(known, cost=2, id="req-1")
    denied = gate.check(known, other, full, cost=2, id="req-1")
    assert (denied.allowed, denied.denied_by) == (False, (full.limit.name,))
    assert [outcome.remaining for outcome in denied.outcomes] == [3, 5, 0]
    assert [gate.peek(key).remaining for key in (known, other, full)] == [3, 5, 0]
    gate.reset(full)
    allowed = gate.check(known, other, full, cost=1, id="req-1")
    assert (allowed.allowed, allowed.cost, allowed.consumed(known)) == (True, (2, 1, 1), 2)
    assert gate.check(known, cost=2, id="req-1") == first
    assert [gate.peek(key).remaining for key in (known, other, full)] == [3, 4, 4]


def test_denied_id_leaves_nothing_behind_on_the_limits_that_would_have_passed(gate: Gate, unique: str) -> None:
    """On a cluster they are on other shards, charged, and given back with their record."""
    limits = [limit.by("ada") for limit in one_of_each(unique) if limit.algorithm != "concurrency"]
    full = limit_of("token_bucket", 1, f"{unique}-full").by("ada")
    gate.check(full)
    for _ in range(2):
        assert not gate.check(*limits, full, cost=1, id="req-1")
        assert [state(gate, key) for key in limits] == [((5, 0, 0, 0),)] * len(limits)
    for key in limits:
        assert not gate.refund(key, 1, id="req-1")
    gate.reset(full)
    assert [gate.check(*limits, full, cost=1, id="req-1").allowed for _ in range(2)] == [True] * 2
    assert [gate.peek(key).remaining for key in limits] == [4] * len(limits)


def test_id_names_the_lease_and_charges_the_other_limits_once(gate: Gate, clock: FakeClock, unique: str) -> None:
    rate, seats = limit_of("token_bucket", 5, unique).by("ada"), limit_of("concurrency", 1, unique).by("ada")
    assert gate.check(rate, seats, id="req-1")
    clock.advance(1_800)
    assert gate.check(rate, seats, id="req-1").remaining == 0
    assert (gate.peek(rate).remaining, gate.peek(seats).reset_after) == (5, 3_600)
    gate.reset(rate)
    assert not gate.check(rate, seats, id="req-2")
    assert gate.leave(seats, id="req-1")
    assert gate.check(rate, seats, id="req-2")
    denied = gate.check(rate, seats, id="req-1")  # the lease was given up, and another has the place
    assert (denied.allowed, denied.denied_by) == (False, (seats.limit.name,))
    assert gate.peek(rate).remaining == 4


def test_hold_with_an_id_charges_once_and_one_without_each_time(gate: Gate, unique: str) -> None:
    rate, seats = limit_of("fixed_window", 9, unique).by("ada"), limit_of("concurrency", 1, unique).by("ada")
    for id, remaining in (("job", 8), ("job", 8), (None, 7), (None, 6)):
        with gate.hold(rate, seats, id=id) as decision:
            assert decision
        assert (gate.peek(rate).remaining, gate.peek(seats).remaining) == (remaining, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_peek_with_an_id_is_a_peek(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    assert gate.check(key, cost=0, id="req-1").remaining == 5
    gate.check(key, cost=2, id="req-1")
    gate.check(key, cost=1, id="req-2")
    assert gate.check(key, cost=0, id="req-1").remaining == 2


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_by_the_id_of_a_check_gives_back_at_most_what_that_consumed(
    gate: Gate, unique: str, algorithm: str
) -> None:
    key = limit_of(algorithm, 10, unique).by("ada")
    assert not gate.refund(key, 3, id="req-1")  # it comes too early, and can be repeated
    gate.check(key, cost=4)
    first = gate.check(key, cost=3, id="req-1")
    assert [gate.refund(key, 10**6, id="req-1") for _ in range(2)] == [True, False]
    assert gate.peek(key).remaining == 6
    assert gate.check(key, cost=3, id="req-1") == first
    assert gate.peek(key).remaining == 6
    gate.check(key, cost=2, id="req-2")
    assert [gate.refund(key, 1, id="req-2") for _ in range(2)] == [True, False]
    assert gate.peek(key).remaining == 5


def test_refund_by_id_goes_to_the_window_that_was_charged(gate: Gate, clock: FakeClock, unique: str) -> None:
    key = limit_of("fixed_window", 5, unique, timedelta(seconds=30)).by("ada")
    gate.check(key, cost=2, id="req-1")
    clock.advance(30)
    gate.check(key, cost=2)
    assert not gate.refund(key, 2, id="req-1")
    assert gate.peek(key).remaining == 3


def test_acquire_with_an_id_takes_its_place_in_a_queue_once(gate: Gate, clock: FakeClock, unique: str) -> None:
    limit = Limit(1, timedelta(seconds=10), burst=9, algorithm="leaky_bucket", name=unique)
    key = limit.by("ada")
    gate.check(key, cost=2)
    first = gate.acquire(key, cost=5, id="req-1", timeout=60)
    assert (first.allowed, first.delay, clock.now_us()) == (True, 20, START_US + 20 * SECOND)
    assert gate.acquire(key, cost=5, id="req-1", timeout=60) == first
    assert gate.peek(key).remaining == 6  # of the seven that were in the queue, four have left in 40 seconds


def test_acquire_that_would_wait_too_long_leaves_no_record(gate: Gate, clock: FakeClock, unique: str) -> None:
    queue = Limit(1, timedelta(seconds=10), burst=9, algorithm="leaky_bucket", name=unique).by("ada")
    rate = limit_of("fixed_window", 5, unique).by("ada")
    gate.check(queue, cost=2)
    for _ in range(2):
        assert not gate.acquire(queue, rate, id="req-1", timeout=5)
        assert (gate.peek(queue).remaining, gate.peek(rate).remaining) == (7, 5)
    clock.advance(20)
    assert gate.acquire(queue, rate, id="req-1", timeout=5)
    assert (gate.peek(queue).remaining, gate.peek(rate).remaining) == (8, 4)


def test_acquire_never_gives_back_what_another_with_the_same_id_relies_on(gate: Gate, unique: str) -> None:
    queue = Limit(1, timedelta(seconds=10), burst=9, algorithm="leaky_bucket", name=unique).by("ada")
    gate.check(queue, cost=2)
    assert gate.check(queue, id="req-1").delay == 20
    assert not gate.acquire(queue, id="req-1", timeout=5)
    assert gate.peek(queue).remaining == 6
    assert gate.check(queue, id="req-1").delay == 20


def test_ids_that_look_alike_are_different(gate: Gate, unique: str) -> None:
    key = limit_of("token_bucket", 100, unique).by("ada")
    ids = ["a", "A", "a ", "%61", "{a}", "}", "é", "e\N{COMBINING ACUTE ACCENT}", "x" * 127, "x" * 128, "1", "😀" * 128]
    for number, id in enumerate(ids):
        assert [gate.check(key, id=id).remaining for _ in range(2)] == [99 - number] * 2


# refund and reset


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_gives_back_what_was_charged_and_says_so(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    assert not gate.refund(key, 1)
    charged = gate.check(key, cost=3)
    assert gate.refund(key, 1)
    assert gate.peek(key).remaining == 3
    assert gate.refund(key, 1, of=charged)
    assert gate.refund(key, 99)
    assert gate.peek(key).remaining == 5


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_of_a_decision_gives_back_at_most_what_that_decision_consumed(
    gate: Gate, unique: str, algorithm: str
) -> None:
    key, other = (limit_of(algorithm, 10, unique).by(name) for name in ("ada", "bob"))
    gate.check(key, cost=4)
    charged = gate.check(key, cost=3)
    assert gate.refund(key, 10**6, of=charged)
    assert gate.peek(key).remaining == 6
    several = gate.check(key, other, cost=(1, 2))
    assert gate.refund(other, 10**6, of=several)
    assert (gate.peek(key).remaining, gate.peek(other).remaining) == (5, 10)
    denied = gate.check(key, cost=7)
    assert not gate.refund(key, 7, of=denied)
    assert gate.peek(key).remaining == 5
    with pytest.raises(InvalidInput, match="does not name this key"):
        gate.refund(other, 1, of=charged)


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_that_gives_nothing_back_says_so(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    gate.check(key, cost=2)
    assert not gate.refund(key, 0)
    assert gate.refund(key, 2)
    assert [gate.refund(key, amount) for amount in (0, 1, 2**60)] == [False] * 3
    assert state(gate, key) == ((5, 0, 0, 0),)


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_is_made_once_for_its_id_and_key(gate: Gate, unique: str, algorithm: str) -> None:
    ada, bob = (limit_of(algorithm, 5, unique).by(name) for name in ("ada", "bob"))
    gate.check(ada, cost=5)
    gate.check(bob, cost=5)
    assert [gate.refund(ada, 2, id=id) for id in ("1", "1", "2", "1")] == [True, False, True, False]
    assert gate.refund(bob, 2, id="1")
    assert (gate.peek(ada).remaining, gate.peek(bob).remaining) == (4, 2)


@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_refund_that_found_nothing_does_not_use_up_its_id(gate: Gate, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    assert not gate.refund(key, 2, id="1")
    gate.check(key, cost=3)
    assert not gate.refund(key, 0, id="1")
    assert [gate.refund(key, 2, id="1") for _ in range(2)] == [True, False]
    assert gate.peek(key).remaining == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reset_key_is_as_new_and_others_are_not(gate: Gate, unique: str, algorithm: str) -> None:
    ada, bob, eve = (limit_of(algorithm, 5, unique).by(name) for name in ("ada", "bob", "eve"))
    for key in (ada, bob, eve):
        gate.check(key, cost=5)
    gate.reset(ada, bob)
    assert [gate.peek(key).remaining for key in (ada, bob, eve)] == [5, 5, 0]
    gate.reset(limit_of(algorithm, 5, unique).by("nobody"))
    assert gate.check(ada, cost=5).allowed


# Several limits


def test_several_limits_are_charged_together(gate: Gate, unique: str) -> None:
    keys = [limit.by("ada") for limit in one_of_each(unique)]
    assert [outcome.remaining for outcome in gate.check(*keys, cost=2).outcomes] == [3] * 7
    assert [gate.peek(key).remaining for key in keys] == [3] * 7


@pytest.mark.parametrize("drained", ALGORITHMS)
@pytest.mark.parametrize("used", [0, 2])
def test_what_one_limit_denies_no_other_has_counted(
    gate: Gate, clock: FakeClock, unique: str, drained: str, used: int
) -> None:
    """Not now, and not later either: a twin that never met the denial looks the same at any time after it."""
    ada, twin = ([limit.by(name) for limit in one_of_each(unique)] for name in ("ada", "twin"))
    for keys in (ada, twin):
        if used:
            gate.check(*keys, cost=used)
        gate.check(keys[ALGORITHMS.index(drained)], cost=5 - used)
    clock.advance(1)
    before = [state(gate, key) for key in ada]
    denied = gate.check(*ada)
    assert denied.denied_by == (f"{unique}-{drained}",)
    assert [outcome.allowed for outcome in denied.outcomes] == [name != drained for name in ALGORITHMS]
    assert [state(gate, key) for key in ada] == before
    assert [(outcome.remaining, outcome.reset_after_us) for outcome in denied.outcomes] == [
        (peek.remaining, peek.reset_after_us) for peek in map(gate.peek, ada)
    ]
    for seconds in (1_799, 1_799, 3_600):
        clock.advance(seconds)
        assert [state(gate, key) for key in ada] == [state(gate, key) for key in twin]


@pytest.mark.parametrize("used", [0, 2])
def test_what_is_denied_while_the_clock_is_behind_is_not_counted_either(
    gate: Gate, clock: FakeClock, unique: str, used: int
) -> None:
    """The clock went back over the windows' beginning: what is charged now counts where the last request did."""
    keys = [limit_of(algorithm, 5, unique).by("ada") for algorithm in ALGORITHMS if algorithm not in QUEUES]
    never = Limit(1, HOUR, name=f"{unique}-never")
    if used:
        gate.check(*keys, cost=used, id="a")
    clock.advance(-7_000)
    before = [state(gate, key) for key in keys]
    assert gate.check(*keys, never, cost=2, id="b").denied_by == (never.name,)
    assert [state(gate, key) for key in keys] == before


@pytest.mark.parametrize("later", [0, 3])
def test_lease_that_is_held_outlasts_a_denial_but_not_itself(
    gate: Gate, clock: FakeClock, unique: str, later: int
) -> None:
    """Neither renewed nor given up, also when the denial comes in the microsecond in which it was taken."""
    room = limit_of("concurrency", 2, unique, TEN_SECONDS).by("ada")
    full = limit_of("fixed_window", 1, unique).by("ada")
    gate.check(full)
    gate.enter(room, id="a")
    clock.advance(later)
    for _ in range(2):
        denied = gate.enter(room, full, id="a")
        assert denied.denied_by == (full.limit.name,)
        assert [outcome.reset_after for outcome in denied.outcomes] == [10 - later, 3600 - later]
    clock.set_us(START_US + 10 * SECOND - 1)
    assert gate.peek(room).remaining == 1
    clock.advance(0.000001)
    assert gate.peek(room).remaining == 2


def test_lease_that_was_renewed_and_then_denied_keeps_what_it_was_renewed_to(
    gate: Gate, clock: FakeClock, unique: str
) -> None:
    room = limit_of("concurrency", 2, unique, TEN_SECONDS).by("ada")
    full = limit_of("fixed_window", 1, unique).by("ada")
    gate.check(full)
    gate.enter(room, id="a")
    clock.advance(3)
    assert gate.enter(room, id="a").allowed
    clock.advance(3)
    assert not gate.enter(room, full, id="a").allowed
    assert gate.peek(room).reset_after == 7
    clock.advance(1)
    assert gate.renew(room, id="a")
    assert not gate.enter(room, full, id="a").allowed
    assert gate.peek(room).reset_after == 10


def test_each_limit_may_have_a_cost_of_its_own(gate: Gate, clock: FakeClock, unique: str) -> None:
    """One request and its 4, 3, 2, 1 or 0 units: each key is charged its own, all or nothing."""
    keys = [limit.by("ada") for limit in one_of_each(unique)]
    costs = (4, 3, 2, 1, 0, 5, 1)
    charged = gate.check(*keys, cost=costs)
    assert [outcome.remaining for outcome in charged.outcomes] == [1, 2, 3, 4, 5, 0, 4]
    clock.advance(1)
    denied = gate.check(*keys, cost=(1, 2, 3, 4, 5, 1, 1), id="another")
    assert denied.denied_by == (f"{unique}-sliding_window",)
    assert [gate.peek(key).remaining for key in keys] == [1, 2, 3, 4, 5, 0, 4]
    never = gate.check(*keys[2:5], cost=(1, 6, 1))
    assert [outcome.unsatisfiable for outcome in never.outcomes] == [False, True, False]
    assert gate.check(*keys[2:5], cost=(3, 4, 5)).allowed


def test_costs_that_are_all_alike_are_one(gate: Gate, unique: str) -> None:
    keys = [Limit(5, HOUR, name=f"{unique}-{name}").by("ada") for name in "ab"]
    assert gate.check(*keys, cost=(2, 2)) == gate.check(*keys, cost=2)._replace(
        verdicts=((3, 0, 1_440_000_000, 0), (3, 0, 1_440_000_000, 0)), next_allowed_us=0
    )


def test_acquire_refunds_each_limit_its_own_cost(gate: Gate, clock: FakeClock, unique: str) -> None:
    queue = Limit(5, TEN_SECONDS, algorithm="leaky_bucket", name=f"{unique}-queue").by("ada")
    units = Limit(9, HOUR, name=f"{unique}-units").by("ada")
    gate.check(queue, cost=2)
    gate.acquire(queue, units, cost=(1, 7), timeout=3)
    assert (gate.peek(queue).remaining, gate.peek(units).remaining) == (3, 9)


def test_every_limit_that_denies_is_named_and_the_longest_wait_is_given(gate: Gate, unique: str) -> None:
    quick, slow, wide = (
        Limit(2, timedelta(seconds=seconds), name=f"{unique}-{name}").by("ada")
        for name, seconds in (("quick", 2), ("slow", 20), ("wide", 200))
    )
    gate.check(quick, slow, cost=2)
    for order in itertools.permutations((quick, slow, wide)):
        denied = gate.check(*order)
        assert denied.denied_by == tuple(key.limit.name for key in order if key is not wide)
        assert (denied.retry_after, denied.reset_after, denied.remaining) == (10, 20, 0)
        assert [outcome.key for outcome in denied.outcomes] == list(order)
        assert {outcome.limit.name: outcome.retry_after for outcome in denied.outcomes} == {
            f"{unique}-quick": 1,
            f"{unique}-slow": 10,
            f"{unique}-wide": 0,
        }
    assert gate.peek(wide).remaining == 2


def test_one_limit_that_can_never_pass_makes_the_request_unsatisfiable(gate: Gate, unique: str) -> None:
    small, large = (Limit(quota, HOUR, name=f"{unique}-{quota}").by("ada") for quota in (5, 50))
    gate.check(large, cost=45)
    for order in ((small, large), (large, small)):
        denied = gate.check(*order, cost=6)
        assert (denied.allowed, denied.unsatisfiable, denied.retry_after) == (False, True, None)
        assert set(denied.denied_by) == {f"{unique}-5", f"{unique}-50"}
        assert {outcome.limit.quota: outcome.unsatisfiable for outcome in denied.outcomes} == {5: True, 50: False}
    assert (gate.peek(small).remaining, gate.peek(large).remaining) == (5, 5)


def test_delay_is_the_longest_and_denials_have_none(gate: Gate, unique: str) -> None:
    short, long = (
        Limit(5, timedelta(seconds=seconds), algorithm="leaky_bucket", name=f"{unique}-{seconds}").by("ada")
        for seconds in (5, 50)
    )
    drained = Limit(1, HOUR, name=f"{unique}-drained").by("ada")
    gate.check(short, long, drained)
    assert gate.check(short, long).delay == 10
    assert gate.check(short, long, drained).delay == 0


# Plan changes

HOURLY = Plan(6)
CHANGED_PLANS = {
    "a larger quota": Plan(600),
    "a smaller quota": Plan(2),
    "a longer period": Plan(6, hours=24 * 30),
    "a shorter period": Plan(6, hours=0.01),
    "all of it larger": Plan(60, hours=10),
}
# After 4 of 6 an hour: what is left of other quotas.
LEFT = {10: 6, 5: 1, 3: 0}
LEFT_IN_TIME = {10: 3, 5: 1, 3: 1}
"""For gcra and the queue, which keep the 40 minutes that they need to be as new."""


@pytest.mark.parametrize("change", CHANGED_PLANS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_key_that_is_as_new_is_as_new_under_a_changed_plan_expired_or_not(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str, change: str
) -> None:
    before, after = HOURLY.limit(algorithm, unique), CHANGED_PLANS[change].limit(algorithm, unique)
    for client in ("kept", "forgotten"):
        gate.check(before.by(client), cost=6)
    clock.advance(gate.peek(before.by("kept")).reset_after)
    gate.reset(before.by("forgotten"))  # as its expiry does
    assert state(gate, after.by("kept")) == state(gate, after.by("forgotten")) == ((after.capacity, 0, 0, 0),)
    decisions = [gate.check(after.by(client), cost=after.capacity) for client in ("kept", "forgotten")]
    assert decisions[0].allowed
    assert decisions[0].verdicts == decisions[1].verdicts


@pytest.mark.parametrize("algorithm", ["gcra", "leaky_bucket", "token_bucket"])
@pytest.mark.parametrize("burst", [1, 2, 100])
def test_bucket_that_has_filled_up_is_full_under_another_burst(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str, burst: int
) -> None:
    def limit(quota: int, burst: int) -> Limit:
        return Limit(quota, timedelta(minutes=1), burst=burst, algorithm=algorithm, name=unique)

    gate.check(limit(60, 2).by("ada"))
    clock.advance(1)
    assert gate.peek(limit(600, burst).by("ada")).remaining == burst
    assert gate.check(limit(600, burst).by("ada"), cost=burst).allowed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_plan_change_keeps_what_is_used(gate: Gate, unique: str, algorithm: str) -> None:
    gate.check(HOURLY.limit(algorithm, unique).by("ada"), cost=4)
    for quota, left in (LEFT_IN_TIME if algorithm in QUEUES else LEFT).items():
        assert gate.peek(Plan(quota).limit(algorithm, unique).by("ada")).remaining == left
    assert gate.peek(HOURLY.limit(algorithm, unique).by("ada")).remaining == 2, "a peek changes no plan"


@pytest.mark.parametrize("change", CHANGED_PLANS)
@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_denial_that_first_sees_a_plan_change_knows_exactly_when_to_come_again(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str, change: str
) -> None:
    before, after = HOURLY.limit(algorithm, unique), CHANGED_PLANS[change].limit(algorithm, unique)
    gate.check(before.by("ada"), cost=6)
    clock.advance(1)
    assert_retry_is_exact(gate, clock, after.by("ada"), cost=after.capacity)


# A clock that is set back


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clock_that_is_set_back_by_an_hour_locks_out_for_one_period_at_most(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str
) -> None:
    key = limit_of(algorithm, 10, unique, timedelta(seconds=2)).by("ada")
    gate.check(key, cost=10)
    assert [gate.check(key).allowed for _ in range(4)] == [False] * 4
    clock.advance(-3_600)
    before = state(gate, key)
    assert [gate.peek(key).verdicts for _ in range(2)] == [before] * 2, "a peek re-dates nothing"
    denied = [gate.check(key) for _ in range(4)]
    assert {decision.retry_after_us for decision in denied} == {denied[0].retry_after_us}
    period = 2 if algorithm != "sliding_window" else 4  # in which what was used up there is as new
    assert denied[0].reset_after <= period
    assert_retry_is_exact(gate, clock, key)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_used_stays_used_when_the_clock_is_set_back(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str
) -> None:
    key = limit_of(algorithm, 10, unique, timedelta(seconds=2)).by("ada")
    gate.check(key, cost=4)
    clock.advance(-3_600)
    # gcra and the queue keep an instant only, so that all may have been used.
    left = 0 if algorithm in QUEUES else 6
    assert not gate.check(key, cost=left + 1).allowed
    assert gate.peek(key).remaining == left
    assert gate.check(key, cost=left).allowed


@pytest.mark.parametrize("back", [0.000_001, 0.5, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clock_that_is_set_back_by_a_period_at_most_gives_nothing_away(
    gate: Gate, clock: FakeClock, unique: str, algorithm: str, back: float
) -> None:
    key, other = (limit_of(algorithm, 10, unique, timedelta(seconds=2)).by(name) for name in ("ada", "bob"))
    for each in (key, other):
        gate.check(each, cost=10)
    for _ in range(3):
        clock.advance(-back)
        assert not gate.check(key).allowed
        clock.advance(back)
        assert not gate.check(key).allowed
    assert state(gate, key) == state(gate, other)


def test_lease_that_the_clock_left_behind_ends_after_its_own_time(gate: Gate, clock: FakeClock, unique: str) -> None:
    """Of each lease by its own ttl, whatever that of the limit is by now."""
    long, short = (limit_of("concurrency", 2, unique, timedelta(seconds=ttl)).by("ada") for ttl in (30, 3))
    gate.enter(long, id="long")
    gate.enter(short, id="short")
    assert not gate.enter(short, id="third").allowed
    assert gate.peek(short).reset_after == 30, "a plan change shortens no lease"
    clock.advance(-3_600)
    denied = gate.enter(short, id="third")
    assert (denied.allowed, denied.retry_after, denied.reset_after) == (False, 3, 30)
    clock.advance(2)
    assert gate.renew(short, id="short")
    clock.advance(2.999_999)
    assert not gate.enter(short, id="third").allowed
    clock.advance(0.000_001)
    assert gate.enter(short, id="third").allowed
    assert gate.leave(long, id="long")


def assert_retry_is_exact(gate: Gate, clock: FakeClock, key: Key, cost: int = 1) -> None:
    """The request is denied now, and passes after `retry_after`, not a microsecond earlier, asked in between or not."""
    denied = gate.check(key, cost=cost)
    assert not denied.allowed
    wait_us = denied.retry_after_us
    start_us = clock.now_us()
    for elapsed_us in (wait_us // 2, wait_us - 1):
        clock.set_us(start_us + elapsed_us)
        again = gate.check(key, cost=cost)
        assert (again.allowed, again.retry_after_us) == (False, wait_us - elapsed_us)
    clock.set_us(start_us + wait_us)
    assert gate.check(key, cost=cost).allowed


# Keys

NASTY = [
    *[
        (text,)
        for text in ("", " ", "|", "||", "%", "%%", "{", "}", "{}", "{a}", ":", "::", "/", "\\", "*", "?", "[a]")
    ],
    *[
        ("a",),
        ("A",),
        ("ä",),
        ("a\u0308",),
        ("\u03a9",),
        ("\u2126",),
        ("ｆ",),
        ("🙂",),
        ("\ud83d",),
        ("\ude42",),
        ("\ud800\ud800",),
    ],
    *[("\ud83d", "\ude42"), ("%uD83D",), ("%25uD83D",), ("\0",), ("\0\0",), ("\n",), ("\r\n",), ("\r",), ("\t",)],
    *[("a|b", "c"), ("a", "b|c"), ("a", "b", "c"), ("a|b|c",), ("a%7Cb", "c"), ("a%257Cb", "c"), ("a", "b", "c", "")],
    *[("", ""), ("", "", ""), ("a", ""), ("", "a"), (), ("%all",), ("%25all",), ("all",)],
    *[("x" * 127,), ("x" * 128,), ("x" * 129,), ("x" * 10_000,), ("x" * 9_999 + "y",), ("x" * 5_000, "x" * 5_000)],
    *[("|" * 127,), ("|" * 128,), ("ä" * 128,), ("ä" * 129,), ("\ud800" * 129,), ("%hash-" + "0" * 48,)],
    *[(0,), (-1,), (1,), (10**40,), (1, 1), (11,), ("a}:refund:b",), ("a:token_bucket.1:b",), ("\x1b[2J",), ("\x7f",)],
]


def test_no_two_identities_meet_in_one_counter(gate: Gate, unique: str) -> None:
    limit = Limit(1, HOUR, name=unique)
    assert [parts for parts in NASTY if not gate.check(limit.by(*parts))] == []
    assert [parts for parts in NASTY if gate.check(limit.by(*parts))] == []
    gate.reset(*[limit.by(*parts) for parts in NASTY])
    assert [parts for parts in NASTY if not gate.check(limit.by(*parts))] == []


def test_every_call_knows_every_identity(gate: Gate, unique: str) -> None:
    def is_known(parts: tuple[str | int, ...]) -> bool:
        key, room = Limit(3, HOUR, name=unique).by(*parts), limit_of("concurrency", 1, unique).by(*parts)
        gate.check(key, cost=3)
        answers = [gate.refund(key, 1, id="1"), not gate.refund(key, 1, id="1"), gate.peek(key).remaining == 1]
        answers += [gate.enter(room, id="a").allowed, gate.renew(room, id="a"), gate.leave(room, id="a")]
        return all(answers)

    assert [parts for parts in NASTY if not is_known(parts)] == []


def test_number_and_its_digits_are_the_same_client(gate: Gate, unique: str) -> None:
    """Some callers have the id from a database, others from a path."""
    limit = Limit(1, HOUR, name=unique)
    assert gate.check(limit.by(42, 7))
    assert not gate.check(limit.by("42", "7"))


def test_no_name_runs_into_an_identity(gate: Gate, unique: str) -> None:
    pairs = [
        *[("a:b", "c"), ("a", "b:c"), ("a:b:c", ""), ("a", ":b:c"), ("a%3Ab", "c"), ("a%253Ab", "c")],
        *[("a|b", "c"), ("a%7Cb", "c"), ("{a}", "b"), ("a", "{b}"), ("{a", "b}"), ("%7Ba}", "b")],
        *[("a:token_bucket.1", "b"), ("a", "token_bucket.1:b"), ("a:token_bucket.1:b", "")],
    ]
    keys = [Limit(1, HOUR, name=f"{unique}{name}").by(identity) for name, identity in pairs]
    assert [pair for pair, key in zip(pairs, keys, strict=True) if not gate.check(key)] == []
    assert [pair for pair, key in zip(pairs, keys, strict=True) if gate.check(key)] == []


# close


def test_limiter_may_be_closed_twice_and_without_ever_having_been_used(gate: Gate) -> None:
    gate.close()
    gate.close()


def test_what_leaves_the_block_is_the_blocks_own_error(kind: type[Gate], store_url: str) -> None:
    with pytest.raises(LookupError, match="the block's own"), kind(store_url):
        raise LookupError("the block's own")
