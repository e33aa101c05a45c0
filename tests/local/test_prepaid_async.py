"""What a review of hot keys has found: purses that learn too late, wait too long, or hide that the store is back."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from headgate import Decision, Limit, StoreTimeout, flow
from headgate.clock import SystemClock
from headgate.events import EventEmitter
from headgate.failure import FailurePolicy, FleetShare
from headgate.local.outage import RECOVERY_S
from headgate.local.prepaid import PrepaidTokens
from headgate.local.tier import LocalTier
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund
from headgate.testing import FakeClock
from support.fleets import START_US

if TYPE_CHECKING:
    from headgate.local.prepaid import Refill

LEASE_US = 100_000
LIMIT = Limit(1_000, timedelta(days=1), name="hot", algorithm="fixed_window")
ONE = Check((LIMIT.by("ada"),), 1)
ALL = Check((LIMIT.by("ada"),), 1_000)


class Node:
    """One process with a hot key, and the store at hand."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.prepaid = PrepaidTokens(lease_us=LEASE_US, now_us=self.clock.now_us)
        self.prepaid.announce([LIMIT])

    def order(self) -> tuple[Refill, Check]:
        """A request that goes to the store for more than it needs, and what it asks there."""
        steps = self.prepaid.take(ONE)
        assert steps is not None
        assert not isinstance(steps, Decision)
        return steps, next(steps)

    def drain(self) -> None:
        """Ask until the store has denied an order."""
        while True:
            answer = self.prepaid.take(ONE)
            if isinstance(answer, Decision):
                if not answer.allowed:
                    return
                continue
            assert answer is not None
            try:
                step = next(answer)
                while True:
                    step = answer.send(self.store.decide(step))
            except StopIteration:
                pass


def test_a_denial_beside_an_order_is_known_to_those_who_come_after() -> None:
    node = Node()
    waiting, _ = node.order()
    assert node.prepaid.take(ONE) is None  # the order is on its way: ask the store
    node.store.decide(ALL)
    node.clock.advance(0.001)
    node.prepaid.record_denial(ONE, node.store.decide(ONE), node.clock.now_us())
    denial = node.prepaid.take(ONE)
    assert isinstance(denial, Decision)
    assert not denial.allowed
    waiting.close()


def test_a_limiter_tells_its_purses_of_denials() -> None:
    """Tasks come in crowds, and find an order on its way: else all of them go to the store, turn after turn."""
    local = LocalTier(EventEmitter(None), clock=None, fleet=FleetShare())
    local.configure(remember=0, lease_us=LEASE_US)
    local.prepaid.announce([LIMIT])
    local.checks += 2
    waiting = local.try_local(ONE)
    assert waiting is not None
    assert not isinstance(waiting, Decision)
    next(waiting)
    assert local.try_local(ONE) is None
    store = MemoryStore(FakeClock(START_US))
    store.decide(ALL)
    local.record_answer(ONE, store.decide(ONE), local.now_ns() + 1_000)
    assert isinstance(local.try_local(ONE), Decision)
    waiting.close()


def test_a_cost_that_no_limit_can_bear_says_nothing_about_others() -> None:
    node = Node()
    waiting, _ = node.order()
    large = Check((LIMIT.by("ada"),), 1_001)
    node.clock.advance(0.001)
    node.prepaid.record_denial(large, node.store.decide(large), node.clock.now_us())
    assert node.prepaid.take(ONE) is None
    waiting.close()


@pytest.mark.parametrize("event", ["discard", "wake"])
def test_a_denial_of_what_was_asked_before_something_came_back_is_not_learnt(event: str) -> None:
    node = Node()
    node.drain()
    asked_us = node.clock.now_us()
    denied = node.store.decide(ONE)
    assert not denied.allowed
    node.clock.advance(0.001)
    node.store.run(Refund(LIMIT.by("ada"), 500))
    getattr(node.prepaid, event)(LIMIT.space, "ada")
    node.prepaid.record_denial(ONE, denied, asked_us)
    assert not isinstance(node.prepaid.take(ONE), Decision)


def test_an_order_that_was_given_up_hinders_nobody_for_longer_than_a_lease() -> None:
    node = Node()
    node.drain()
    node.clock.advance(0.2)
    abandoned, _ = node.order()  # kept by a traceback: nobody closes it
    node.store.run(Refund(LIMIT.by("ada"), 500))
    assert isinstance(node.prepaid.take(ONE), Decision)
    node.clock.advance(LEASE_US / 1_000_000)
    again, _ = node.order()
    again.close()
    abandoned.close()


def test_one_answer_that_was_held_up_does_not_end_prepaying() -> None:
    node = Node()
    for seconds in (0.001, 0.5, 0.001):
        steps, ordered = node.order()
        assert ordered.costs > (1,)
        node.clock.advance(seconds)
        with pytest.raises(StopIteration):
            steps.send(node.store.decide(ordered))
        node.clock.advance(0.2)


def test_answers_that_always_take_a_lease_end_it() -> None:
    node = Node()
    asked = []
    for _ in range(8):
        answer = node.prepaid.take(ONE)
        asked.append(answer is not None)
        if answer is None:
            continue
        assert not isinstance(answer, Decision)
        ordered = next(answer)
        node.clock.advance(0.12)
        with pytest.raises(StopIteration):
            answer.send(node.store.decide(ordered))
    assert asked[0]
    assert not asked[-1]


def test_an_order_that_is_answered_ends_an_outage() -> None:
    local = LocalTier(EventEmitter(None), clock=None, fleet=FleetShare())
    local.configure(remember=0, lease_us=LEASE_US)
    local.prepaid.announce([LIMIT])
    now = 0.0
    local.outage._now = lambda: now
    local.record_failure(StoreTimeout("no answer"))
    assert local.health().state == "degraded"
    now += RECOVERY_S
    local.checks += 2
    steps = flow.decide(ONE, local, FailurePolicy("raise", SystemClock()))
    with pytest.raises(StopIteration) as end:
        steps.send(MemoryStore(FakeClock(START_US)).decide(next(steps)))
    assert end.value.value.allowed
    assert local.health().state == "ready"
