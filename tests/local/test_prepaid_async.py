"""Prepaid tokens while refills are pending: denials, abandoned and slow refills, and recovery from an outage."""

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
    """One process with a hot key and a memory store."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.prepaid = PrepaidTokens(lease_us=LEASE_US, now_us=self.clock.now_us)
        self.prepaid.announce([LIMIT])

    def start_refill(self) -> tuple[Refill, Check]:
        """Start a check that refills; return its steps and the operation for the store."""
        steps = self.prepaid.take(ONE)
        assert steps is not None
        assert not isinstance(steps, Decision)
        return steps, next(steps)

    def drain(self) -> None:
        """Check until the store denies a refill."""
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


def test_denial_beside_a_refill_is_cached() -> None:
    node = Node()
    waiting, _ = node.start_refill()
    assert node.prepaid.take(ONE) is None  # a refill is pending: go to the store
    node.store.decide(ALL)
    node.clock.advance(0.001)
    node.prepaid.record_denial(ONE, node.store.decide(ONE), node.clock.now_us())
    denial = node.prepaid.take(ONE)
    assert isinstance(denial, Decision)
    assert not denial.allowed
    waiting.close()


def test_limiter_reports_denials_to_prepaid_tokens() -> None:
    """Many tasks arrive during one refill; without the denial, all of them would go to the store each time."""
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


def test_unsatisfiable_cost_does_not_affect_other_costs() -> None:
    node = Node()
    waiting, _ = node.start_refill()
    large = Check((LIMIT.by("ada"),), 1_001)
    node.clock.advance(0.001)
    node.prepaid.record_denial(large, node.store.decide(large), node.clock.now_us())
    assert node.prepaid.take(ONE) is None
    waiting.close()


@pytest.mark.parametrize("event", ["discard", "wake"])
def test_denial_requested_before_a_refund_is_ignored(event: str) -> None:
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


def test_abandoned_refill_blocks_for_one_lease_at_most() -> None:
    node = Node()
    node.drain()
    node.clock.advance(0.2)
    abandoned, _ = node.start_refill()  # kept alive by a traceback, never closed
    node.store.run(Refund(LIMIT.by("ada"), 500))
    assert isinstance(node.prepaid.take(ONE), Decision)
    node.clock.advance(LEASE_US / 1_000_000)
    again, _ = node.start_refill()
    again.close()
    abandoned.close()


def test_one_slow_refill_does_not_stop_prepaying() -> None:
    node = Node()
    for seconds in (0.001, 0.5, 0.001):
        steps, ordered = node.start_refill()
        assert ordered.costs > (1,)
        node.clock.advance(seconds)
        with pytest.raises(StopIteration):
            steps.send(node.store.decide(ordered))
        node.clock.advance(0.2)


def test_refills_slower_than_a_lease_stop_prepaying() -> None:
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


def test_answered_refill_ends_an_outage() -> None:
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
