"""Simulated fleets: nodes that hold prepaid tokens, one store, and time that passes only here.

Each node is what a limiter is to one process: its own purses, on a clock of its own that started at another moment. A
check that goes to the store leaves at one instant, is decided at another and heard of at a third.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.local.hot_keys import SAMPLED_EVERY
from headgate.local.prepaid import PrepaidTokens
from headgate.stores.memory import MemoryStore
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from headgate import Decision, Key, Limit
    from headgate.stores.operations import Check, Refund

START_US = 1_763_251_200 * 1_000_000


class Arrival(NamedTuple):
    """A request, and how long its way to the store and back would take; without a call, the node's background thread,
    which gives back what was held too long."""

    at_us: int
    node: int
    call: Check | None
    there_us: int = 0
    back_us: int = 0


class Spent(NamedTuple):
    """A token that somebody has got: taken out of a purse, or charged by the store for that very request."""

    at_us: int
    key: Key
    cost: int


class Fleet:
    """Runs arrivals, and remembers what was spent when."""

    def __init__(self, nodes: int, *, lease_us: int = 100_000, announce: Iterable[Limit] = (), told: int = 0) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock)
        self.nodes = [
            PrepaidTokens(lease_us=lease_us, nodes=lambda: told or nodes, now_us=self._watch(offset_us))
            for offset_us in range(7, 7 + 1_000_003 * nodes, 1_000_003)
        ]
        for node in self.nodes:
            node.announce(announce)
        self.calls = 0
        self.asked = 0
        self.charged: Counter[Key] = Counter()
        self.returned = 0
        self.spent: list[Spent] = []
        self._seen = [0] * nodes
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Let all of them come, in the order of their instants, and wait for the last answer."""
        for arrival in arrivals:
            self._pass_time(arrival.at_us)
            self._meet(arrival)
        self._pass_time(2**52 - 1)

    @property
    def admitted(self) -> int:
        return sum([cost for _, _, cost in self.spent])

    def admitted_by(self, key: Key) -> int:
        return sum([cost for _, spender, cost in self.spent if spender == key])

    def kept_by(self, key: Key) -> int:
        """Tokens of the key that its nodes hold, or held too long and have not given back yet."""
        prepaid = [node._counters.get((key.limit.space, key.identity)) for node in self.nodes]
        return sum(
            [batch.tokens for counter in prepaid if counter for batch in (*counter._batches(), *counter.expired)]
        )

    def _watch(self, offset_us: int) -> Callable[[], int]:
        return lambda: self.clock.now_us() - START_US + offset_us

    def _pass_time(self, until_us: int) -> None:
        while self._waiting and self._waiting[0][0] <= until_us:
            at_us, _, act = heapq.heappop(self._waiting)
            self.clock.set_us(at_us)
            act()
        if until_us < 2**52 - 1:
            self.clock.set_us(until_us)

    def _later(self, delay_us: int, act: Callable[[], None]) -> None:
        if delay_us:
            heapq.heappush(self._waiting, (self.clock.now_us() + delay_us, next(self._order), act))
        else:
            act()

    def _meet(self, arrival: Arrival) -> None:
        prepaid = self.nodes[arrival.node]
        if arrival.call is None:
            for refund in prepaid.take_refunds():
                self._later(arrival.there_us, lambda refund=refund: self._give_back(refund))  # type: ignore[misc]
            return
        self.asked += 1
        self._seen[arrival.node] += 1
        if self._seen[arrival.node] % SAMPLED_EVERY == 0:
            prepaid.sample(arrival.call)
        answer = prepaid.take(arrival.call) if prepaid else None
        if answer is None:
            call = arrival.call
            self._ask(arrival, call, lambda decision: self._end(arrival, decision, call.costs))
        elif isinstance(answer, tuple):
            self._end(arrival, answer, ())
        else:
            # What is paid out of a purse is spent when it is set aside for the request, however often that asks then.
            self._drive(arrival, answer, next(answer), self.clock.now_us())

    def _drive(
        self, arrival: Arrival, steps: Generator[Check, Decision, Decision], check: Check, set_aside_us: int
    ) -> None:
        def heard(decision: Decision) -> None:
            try:
                following = steps.send(decision)
            except StopIteration as end:
                self._end(arrival, end.value, check.costs if decision.allowed else (), set_aside_us)
            else:
                self._drive(arrival, steps, following, set_aside_us)

        self._ask(arrival, check, heard)

    def _ask(self, arrival: Arrival, check: Check, hear: Callable[[Decision], None]) -> None:
        def decide() -> None:
            self.calls += 1
            decision = self.store.decide(check)
            if decision.allowed:
                self.charged.update(dict(zip(check.keys, check.costs, strict=True)))
            self._later(arrival.back_us, lambda: hear(decision))

        self._later(arrival.there_us, decide)

    def _give_back(self, refund: Refund) -> None:
        self.returned += self.store.run(refund)

    def _end(self, arrival: Arrival, decision: Decision, charged: tuple[int, ...], set_aside_us: int = 0) -> None:
        """`charged` is what the store was asked for each key by the check that was granted; nothing, if none was."""
        assert arrival.call is not None
        assert decision.keys == arrival.call.keys
        if not decision.allowed:
            return
        for index, (key, cost) in enumerate(zip(arrival.call.keys, arrival.call.costs, strict=True)):
            at_us = self.clock.now_us()
            if charged:
                at_us = decision.at_us if charged[index] else set_aside_us
            self.spent.append(Spent(at_us, key, cost))


def steady(per_second: int, seconds: float, nodes: int, call: Check, **ways: Any) -> Iterable[Arrival]:
    """Requests at even intervals, one node after the other."""
    for number in range(round(per_second * seconds)):
        yield Arrival(START_US + number * 1_000_000 // per_second, number % nodes, call, **ways)
