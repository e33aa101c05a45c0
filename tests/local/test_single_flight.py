"""When a denial ends, one asks for all who are alike, and what it brings is what the store would have told each."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Decision, Key, Limit, flow
from headgate.errors import ScriptError, StoreError, StoreTimeout, StoreUnavailable
from headgate.events import EventEmitter
from headgate.failure import FailurePolicy, FleetShare
from headgate.local.denial_cache import MIN_DENIALS
from headgate.local.single_flight import MAX_AGE_S, SingleFlight
from headgate.local.tier import LocalTier
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund
from headgate.testing import FakeClock
from support.next_allowed import with_again

if TYPE_CHECKING:
    from headgate.flow import Flow

SECOND = 1_000_000
ONE = Limit(1, timedelta(seconds=1), name="one")
FIVE = Limit(5, timedelta(seconds=1), algorithm="fixed_window", name="five")


class Request:
    """A check that is under way: what it waits for, until it has its answer."""

    def __init__(self, site: Site, key: Key, cost: int = 1) -> None:
        self.site = site
        self.call = Check((key,), cost)
        self.answer: Decision | None = None
        self.error: StoreError | None = None
        self.flow: Flow | None = None
        self.step: Any = self.call
        self.asked_ns = site.local.now_ns()
        ready = flow.start(self.call, site.local, site.fallback)
        if isinstance(ready, Decision):
            self.answer, self.step = ready, None
        elif ready is not None:
            self.flow = ready
            self._take(next(ready))

    @property
    def waits(self) -> bool:
        """Whether it waits for another; else it has its answer, or asks the store."""
        return isinstance(self.step, SingleFlight)

    def reach_store(self) -> Decision:
        """What the store says, at this instant; the answer is still on its way back."""
        self.site.asked += 1
        store = self.site.store
        return with_again(store.run(self.call), self.call.cost, lambda: store.run(self.call))

    def go_on(self, answer: Decision | StoreError | None = None) -> None:
        """The store's answer, or its failure, has come; or what it waited for is over."""
        if self.flow is None:
            assert isinstance(answer, Decision)
            self.site.local.record_answer(self.call, answer, self.asked_ns)
            self.answer, self.step = answer, None
            return
        try:
            self._take(self.flow.throw(answer) if isinstance(answer, StoreError) else self.flow.send(answer))
        except StopIteration as end:
            self.answer, self.step = end.value, None
        except StoreError as error:
            self.error, self.step = error, None

    def _take(self, step: Any) -> None:
        self.step = step
        if isinstance(step, SingleFlight):
            step.add_waiter(lambda: None)

    def finish(self) -> Decision:
        self.go_on(self.reach_store())
        assert self.answer is not None
        return self.answer

    def give_up(self) -> None:
        assert self.flow is not None
        self.flow.close()


class Site:
    """A store in memory, behind what stands before it."""

    def __init__(self) -> None:
        self.clock = FakeClock(100 * SECOND)
        self.store = MemoryStore(self.clock)
        self.local = LocalTier(EventEmitter(), clock=self.clock, fleet=FleetShare())
        self.local.configure(remember=100, lease_us=0)
        self.fallback = FailurePolicy("raise", self.clock)
        self.asked = 0

    def begin(self, key: Key, cost: int = 1) -> Request:
        return Request(self, key, cost)

    def use_up(self, key: Key, cost: int = 1) -> None:
        """So much at once, until it is denied so often that it is remembered, and the denial is over."""
        while self.begin(key, cost).finish().next_allowed_us == 0:
            pass
        for _ in range(MIN_DENIALS):
            self.begin(key, cost).finish()
        self.clock.set_us(self.clock.now_us() + SECOND)
        self.asked = 0


@pytest.fixture
def site() -> Site:
    return Site()


def test_one_asks_and_what_it_leaves_answers_the_others(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first, *others = [site.begin(ONE.by("ada")) for _ in range(10)]
    assert [request.waits for request in (first, *others)] == [False, *[True] * 9]
    assert first.finish().allowed
    site.clock.advance(0.25)
    for request in others:
        request.go_on()
        truth = site.store.run(request.call)
        assert request.answer == truth
        assert (truth.allowed, truth.retry_after) == (False, 0.75)
    assert site.asked == 1


def test_a_denial_that_it_brings_answers_them_as_well(site: Site) -> None:
    """Another process was quicker."""
    site.use_up(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    site.store.run(first.call)
    assert not first.finish().allowed
    other.go_on()
    assert other.answer == site.store.run(other.call)
    assert site.asked == 1


def test_if_there_is_more_so_many_more_ask(site: Site) -> None:
    site.use_up(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(9)]
    assert first.finish().remaining == 4
    for request in others:
        request.go_on()
    assert [request.waits for request in others] == [*[False] * 4, *[True] * 4]
    late = site.begin(FIVE.by("ada"))
    assert late.waits
    assert [request.finish().allowed for request in others[:4]] == [True] * 4
    truth = site.store.run(first.call)
    for request in (*others[4:], late):
        request.go_on()
        assert request.answer == truth
    assert (truth.allowed, site.asked) == (False, 5)


def test_if_there_is_more_than_anybody_wants_nobody_waits(site: Site) -> None:
    site.use_up(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(3)]
    first.finish()
    for request in others:
        request.go_on()
    assert [request.finish().remaining for request in others] == [3, 2]
    assert site.local.denial_cache._flights == {}


def test_of_larger_requests_fewer_ask(site: Site) -> None:
    fifty = Limit(50, timedelta(seconds=1), algorithm="fixed_window", name="fifty").by("ada")
    site.use_up(fifty, cost=4)
    first, *others = [site.begin(fifty, cost=4) for _ in range(14)]
    assert first.finish().remaining == 46
    for request in others:
        request.go_on()
    assert [request.waits for request in others] == [*[False] * 11, *[True] * 2]


def test_those_who_wait_for_several_hear_of_the_first_denial(site: Site) -> None:
    """Another process has taken what was said to be there."""
    site.use_up(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(9)]
    first.finish()
    site.store.run(Check(first.call.keys, 4))
    for request in others:
        request.go_on()
    assert not others[0].finish().allowed
    others[-1].go_on()
    assert others[-1].answer == site.store.run(first.call)
    assert [request.finish().allowed for request in others[1:4]] == [False] * 3


@pytest.mark.parametrize(
    ("key", "cost"), [(ONE.by("bob"), 1), (ONE.by("ada"), 0), (FIVE.by("ada"), 1), (FIVE.by("ada"), 2)]
)
def test_nobody_waits_for_what_is_not_alike(site: Site, key: Key, cost: int) -> None:
    site.use_up(ONE.by("ada"))
    assert not site.begin(ONE.by("ada")).waits
    assert not site.begin(key, cost).waits


@pytest.mark.parametrize(
    "error", [StoreTimeout("no answer within 5 ms"), StoreUnavailable("connection refused")], ids=["late", "refused"]
)
def test_if_the_store_fails_they_are_told_that_theirs_was_never_sent(site: Site, error: StoreError) -> None:
    site.use_up(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    first.go_on(error)
    other.go_on()
    assert first.error is error
    assert (type(other.error), str(other.error)) == (type(error), str(error))
    assert other.error is not None
    assert other.error is not error
    assert not other.error.may_have_happened, "it is owed, and will be charged"
    assert not site.begin(ONE.by("ada")).waits


def test_if_its_script_fails_each_asks_for_itself(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    first.go_on(ScriptError("a foreign value"))
    other.go_on()
    assert other.finish().allowed


def test_if_whoever_asks_gives_up_the_others_are_not_lost(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first, *others = [site.begin(ONE.by("ada")) for _ in range(3)]
    first.give_up()
    for request in others:
        request.go_on()
        assert not request.waits
    assert [request.finish().allowed for request in others] == [True, False]


def test_who_came_while_it_held_is_told_of_a_denial_that_is_over_by_the_time_it_is_heard_of(site: Site) -> None:
    """As those are who travel together: this process was behind, and not the store."""
    site.use_up(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    brought = first.reach_store()
    site.clock.advance(0.4)
    other = site.begin(ONE.by("ada"))
    truth = site.store.run(other.call)
    site.clock.advance(0.6)
    first.go_on(brought)
    other.go_on()
    assert other.answer == truth
    assert truth.retry_after == 0.6


def test_who_came_after_that_waits_once_more_and_no_longer(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    brought = first.reach_store()
    site.clock.advance(1)
    second, *others = [site.begin(ONE.by("ada")) for _ in range(5)]
    first.go_on(brought)
    for request in (second, *others):
        request.go_on()
    assert [request.waits for request in (second, *others)] == [False, *[True] * 4]
    brought = second.reach_store()
    site.clock.advance(5)
    second.go_on(brought)
    for request in others:
        request.go_on()
    assert brought.allowed
    assert [request.answer.retry_after for request in others if request.answer is not None] == [1.0] * 4
    assert site.asked == 2


def test_a_refund_meanwhile_lets_them_ask(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    brought = first.reach_store()
    site.store.run(Refund(ONE.by("ada"), 1))
    site.local.invalidate(Refund(ONE.by("ada"), 1))
    first.go_on(brought)
    other.go_on()
    assert other.finish().allowed


def test_other_numbers_meanwhile_are_not_answered_by_the_old_ones(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    more = site.begin(Limit(3, timedelta(seconds=1), name="one").by("ada"))
    first.finish()
    if more.waits:
        more.go_on()
    assert more.step == more.call


def test_whoever_vanishes_is_waited_for_no_longer_than_a_second(site: Site) -> None:
    site.use_up(ONE.by("ada"))
    vanished = site.begin(ONE.by("ada"))
    flight = site.begin(ONE.by("ada")).step
    flight._started -= MAX_AGE_S
    assert not site.begin(ONE.by("ada")).waits
    site.begin(ONE.by("ada")).finish()
    site.clock.advance(1)
    following = site.begin(ONE.by("ada"))
    assert not following.waits, "it asks for all"
    assert site.begin(ONE.by("ada")).waits
    vanished.give_up()
    assert site.begin(ONE.by("ada")).waits, "and is not taken for the one that vanished"
    assert following.finish().allowed


# -------------------------------------------------------- how they wait


def test_a_thread_waits_until_it_is_over_and_not_at_all_after_that() -> None:
    flight = SingleFlight()
    threads = [threading.Thread(target=flight.wait, args=(60,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    flight.wait(0.01)
    assert all(thread.is_alive() for thread in threads)
    flight.end()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    flight.wait(60)
    flight.end()


def test_tasks_of_several_loops_wait_for_the_same() -> None:
    flight, told = SingleFlight(), []
    waiting = threading.Barrier(4)

    async def wait() -> None:
        future = flight.future(60)
        await asyncio.to_thread(waiting.wait, 60)
        await future
        told.append(threading.get_ident())

    threads = [threading.Thread(target=asyncio.run, args=(wait(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait(60)
    flight.end()
    for thread in threads:
        thread.join(60)
    assert len(set(told)) == 3


def test_a_task_waits_no_longer_than_it_wants_and_leaves_no_timer() -> None:
    async def wait(flight: SingleFlight, seconds: float) -> None:
        future = flight.future(seconds)
        if seconds > 1:
            flight.end()
        await future
        await asyncio.sleep(0)
        assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    asyncio.run(wait(SingleFlight(), 0.001))
    asyncio.run(wait(SingleFlight(), 60))
    over = SingleFlight()
    over.end()
    asyncio.run(wait(over, 60))


def test_of_several_who_ask_the_last_ends_it_or_the_first_who_is_denied() -> None:
    several = SingleFlight(3)
    assert [several.try_lead() for _ in range(4)] == [True, True, True, False]
    assert [several.finish_leader(is_denied=False) for _ in range(3)] == [False, False, True]
    several = SingleFlight(3)
    assert [several.try_lead(), several.try_lead()] == [True, True]
    assert several.finish_leader(is_denied=True)


def test_a_loop_that_is_closed_does_not_keep_the_others_waiting() -> None:
    flight = SingleFlight()

    async def leave() -> None:
        flight.future(60)

    thread = threading.Thread(target=asyncio.run, args=(leave(),))
    thread.start()
    thread.join(60)
    asyncio.run(leave())
    woken: list[bool] = []
    assert flight.add_waiter(lambda: woken.append(True))
    flight.end()
    assert woken == [True]
