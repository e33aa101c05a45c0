"""Single flight: when a denial ends, one check goes to the store, and its followers get the answers that the store
would give.
"""

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
    """A check in progress."""

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
        """True if it follows another check; otherwise it is answered or goes to the store."""
        return isinstance(self.step, SingleFlight)

    def reach_store(self) -> Decision:
        """Run it in the store now; the reply is still in transit."""
        self.site.asked += 1
        store = self.site.store
        return with_again(store.run(self.call), self.call.cost, lambda: store.run(self.call))

    def resume(self, answer: Decision | StoreError | None = None) -> None:
        """Continue with the reply or error of the store, or after the flight has ended."""
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
        self.resume(self.reach_store())
        assert self.answer is not None
        return self.answer

    def cancel(self) -> None:
        assert self.flow is not None
        self.flow.close()


class Site:
    """A memory store behind a local tier."""

    def __init__(self) -> None:
        self.clock = FakeClock(100 * SECOND)
        self.store = MemoryStore(self.clock)
        self.local = LocalTier(EventEmitter(), clock=self.clock, fleet=FleetShare())
        self.local.configure(remember=100, lease_us=0)
        self.fallback = FailurePolicy("raise", self.clock)
        self.asked = 0

    def begin(self, key: Key, cost: int = 1) -> Request:
        return Request(self, key, cost)

    def exhaust(self, key: Key, cost: int = 1) -> None:
        """Spend the quota, repeat the denial until it is cached, and wait until it ends."""
        while self.begin(key, cost).finish().next_allowed_us == 0:
            pass
        for _ in range(MIN_DENIALS):
            self.begin(key, cost).finish()
        self.clock.set_us(self.clock.now_us() + SECOND)
        self.asked = 0


@pytest.fixture
def site() -> Site:
    return Site()


def test_followers_are_answered_from_the_leaders_reply(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first, *others = [site.begin(ONE.by("ada")) for _ in range(10)]
    assert [request.waits for request in (first, *others)] == [False, *[True] * 9]
    assert first.finish().allowed
    site.clock.advance(0.25)
    for request in others:
        request.resume()
        truth = site.store.run(request.call)
        assert request.answer == truth
        assert (truth.allowed, truth.retry_after) == (False, 0.75)
    assert site.asked == 1


def test_followers_share_the_denial_of_the_leader(site: Site) -> None:
    """Another process was faster."""
    site.exhaust(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    site.store.run(first.call)
    assert not first.finish().allowed
    other.resume()
    assert other.answer == site.store.run(other.call)
    assert site.asked == 1


def test_remaining_quota_releases_as_many_followers(site: Site) -> None:
    site.exhaust(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(9)]
    assert first.finish().remaining == 4
    for request in others:
        request.resume()
    assert [request.waits for request in others] == [*[False] * 4, *[True] * 4]
    late = site.begin(FIVE.by("ada"))
    assert late.waits
    assert [request.finish().allowed for request in others[:4]] == [True] * 4
    truth = site.store.run(first.call)
    for request in (*others[4:], late):
        request.resume()
        assert request.answer == truth
    assert (truth.allowed, site.asked) == (False, 5)


def test_followers_proceed_when_enough_quota_is_left(site: Site) -> None:
    site.exhaust(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(3)]
    first.finish()
    for request in others:
        request.resume()
    assert [request.finish().remaining for request in others] == [3, 2]
    assert site.local.denial_cache._flights == {}


def test_large_costs_release_fewer_followers(site: Site) -> None:
    fifty = Limit(50, timedelta(seconds=1), algorithm="fixed_window", name="fifty").by("ada")
    site.exhaust(fifty, cost=4)
    first, *others = [site.begin(fifty, cost=4) for _ in range(14)]
    assert first.finish().remaining == 46
    for request in others:
        request.resume()
    assert [request.waits for request in others] == [*[False] * 11, *[True] * 2]


def test_followers_of_several_flights_get_the_first_denial(site: Site) -> None:
    """Another process spent the reported quota."""
    site.exhaust(FIVE.by("ada"))
    first, *others = [site.begin(FIVE.by("ada")) for _ in range(9)]
    first.finish()
    site.store.run(Check(first.call.keys, 4))
    for request in others:
        request.resume()
    assert not others[0].finish().allowed
    others[-1].resume()
    assert others[-1].answer == site.store.run(first.call)
    assert [request.finish().allowed for request in others[1:4]] == [False] * 3


@pytest.mark.parametrize(
    ("key", "cost"), [(ONE.by("bob"), 1), (ONE.by("ada"), 0), (FIVE.by("ada"), 1), (FIVE.by("ada"), 2)]
)
def test_different_requests_do_not_share_a_flight(site: Site, key: Key, cost: int) -> None:
    site.exhaust(ONE.by("ada"))
    assert not site.begin(ONE.by("ada")).waits
    assert not site.begin(key, cost).waits


@pytest.mark.parametrize(
    "error", [StoreTimeout("no answer within 5 ms"), StoreUnavailable("connection refused")], ids=["late", "refused"]
)
def test_followers_of_a_failed_leader_are_reported_as_not_sent(site: Site, error: StoreError) -> None:
    site.exhaust(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    first.resume(error)
    other.resume()
    assert first.error is error
    assert (type(other.error), str(other.error)) == (type(error), str(error))
    assert other.error is not None
    assert other.error is not error
    assert not other.error.may_have_happened, "it is owed, and will be charged"
    assert not site.begin(ONE.by("ada")).waits


def test_script_error_affects_the_leader_only(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    first.resume(ScriptError("a foreign value"))
    other.resume()
    assert other.finish().allowed


def test_followers_survive_a_cancelled_leader(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first, *others = [site.begin(ONE.by("ada")) for _ in range(3)]
    first.cancel()
    for request in others:
        request.resume()
        assert not request.waits
    assert [request.finish().allowed for request in others] == [True, False]


def test_follower_gets_a_denial_that_expired_meanwhile(site: Site) -> None:
    """As for requests of one batch: the process was late, not the store."""
    site.exhaust(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    reply = first.reach_store()
    site.clock.advance(0.4)
    other = site.begin(ONE.by("ada"))
    truth = site.store.run(other.call)
    site.clock.advance(0.6)
    first.resume(reply)
    other.resume()
    assert other.answer == truth
    assert truth.retry_after == 0.6


def test_late_follower_waits_for_one_more_flight(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    reply = first.reach_store()
    site.clock.advance(1)
    second, *others = [site.begin(ONE.by("ada")) for _ in range(5)]
    first.resume(reply)
    for request in (second, *others):
        request.resume()
    assert [request.waits for request in (second, *others)] == [False, *[True] * 4]
    reply = second.reach_store()
    site.clock.advance(5)
    second.resume(reply)
    for request in others:
        request.resume()
    assert reply.allowed
    assert [request.answer.retry_after for request in others if request.answer is not None] == [1.0] * 4
    assert site.asked == 2


def test_refund_during_a_flight_releases_followers(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first, other = [site.begin(ONE.by("ada")) for _ in range(2)]
    reply = first.reach_store()
    site.store.run(Refund(ONE.by("ada"), 1))
    site.local.invalidate(Refund(ONE.by("ada"), 1))
    first.resume(reply)
    other.resume()
    assert other.finish().allowed


def test_changed_limit_does_not_share_a_flight(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    first = site.begin(ONE.by("ada"))
    more = site.begin(Limit(3, timedelta(seconds=1), name="one").by("ada"))
    first.finish()
    if more.waits:
        more.resume()
    assert more.step == more.call


def test_lost_leader_is_waited_for_one_second(site: Site) -> None:
    site.exhaust(ONE.by("ada"))
    vanished = site.begin(ONE.by("ada"))
    flight = site.begin(ONE.by("ada")).step
    flight._started -= MAX_AGE_S
    assert not site.begin(ONE.by("ada")).waits
    site.begin(ONE.by("ada")).finish()
    site.clock.advance(1)
    following = site.begin(ONE.by("ada"))
    assert not following.waits, "it asks for all"
    assert site.begin(ONE.by("ada")).waits
    vanished.cancel()
    assert site.begin(ONE.by("ada")).waits, "and is not taken for the one that vanished"
    assert following.finish().allowed


# -------------------------------------------------------- waiting


def test_thread_waits_until_the_flight_ends() -> None:
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


def test_tasks_of_several_loops_share_a_flight() -> None:
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


def test_task_wait_times_out_and_leaves_no_timer() -> None:
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


def test_flight_ends_with_its_last_request_or_first_denial() -> None:
    several = SingleFlight(3)
    assert [several.try_lead() for _ in range(4)] == [True, True, True, False]
    assert [several.finish_leader(is_denied=False) for _ in range(3)] == [False, False, True]
    several = SingleFlight(3)
    assert [several.try_lead(), several.try_lead()] == [True, True]
    assert several.finish_leader(is_denied=True)


def test_closed_loop_does_not_block_other_waiters() -> None:
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
