"""After an outage of a real server, its counts are what passed meanwhile: capped by the limit, and charged once."""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from headgate import Decision, Key, Limit, Limiter, StoreError
from headgate.algorithms import ALGORITHMS
from headgate.clock import SystemClock
from headgate.failure import FailurePolicy, FleetShare
from headgate.gate.gate import AsyncGate, Gate
from headgate.local.ledger import OutageDebt, OutageLedger, Settlement, settle
from headgate.policy.loader import read
from headgate.stores.operations import Check
from headgate.testing import FakeClock, FakeRequest
from support.faults import LONG, Proxy, paused
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.events import Event
    from headgate.failure import FailureMode
    from support.servers import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

NOW = 1_763_251_200_000_000
RATES = sorted({*ALGORITHMS} - {"concurrency"})
every_algorithm = pytest.mark.parametrize("algorithm", RATES)


class Passed(NamedTuple):
    noted: int
    uncertain: int
    """Admitted after a charge whose fate is unknown, so that it is not owed."""


class Node:
    """A node that goes on without the store, and settles with it afterwards."""

    def __init__(self, url: str, mode: FailureMode = "open", fleet: FleetShare | None = None) -> None:
        self._url = url
        self.limiter = Limiter(url, budget=0.2)
        self.ledger = OutageLedger()
        self._policy = FailurePolicy(mode, SystemClock(), fleet)

    def send(self, key: Key, times: int, cost: int = 1) -> Passed:
        noted = uncertain = 0
        for _ in range(times):
            call = Check((key,), cost)
            answer = attempt(self.limiter, call)
            if isinstance(answer, StoreError) and self._policy.decide(call, answer).allowed:
                if answer.may_have_happened:
                    uncertain += cost
                else:
                    noted += cost
                    self.ledger.record(call)
        return Passed(noted, uncertain)

    def find_store_again(self) -> None:
        """At once: how long a breaker stands before a server that is back is not the matter here."""
        self.limiter.close()
        self.limiter = Limiter(self._url, budget=0.2)

    def settle(self) -> Settlement:
        return settled(self.ledger, self.limiter)

    def used(self, key: Key) -> int:
        return key.limit.capacity - self.limiter.peek(key).remaining


def attempt(limiter: Limiter, call: Check) -> Decision | StoreError:
    try:
        return limiter.check(*call.keys, cost=call.cost)
    except StoreError as error:
        return error


def settled(ledger: OutageLedger, limiter: Limiter) -> Settlement:
    return settle(
        ledger,
        lambda calls: [attempt(limiter, call) for call in calls],
        timeout_s=10,
        now=time.monotonic,
    )


@pytest.fixture
def node(server: RedisServer) -> Iterator[Node]:
    node = Node(server.url)
    yield node
    node.limiter.close()


@every_algorithm
def test_count_after_an_outage_is_what_passed_capped_by_the_limit(
    node: Node, server: RedisServer, unique: str, algorithm: str
) -> None:
    limit = Limit(20, LONG, algorithm=algorithm, name=unique)
    few, many = limit.by("few"), limit.by("many")
    node.limiter.peek(few)
    server.kill()
    time.sleep(0.1)
    assert node.send(few, 3, cost=2) == Passed(6, 0)
    assert node.send(many, 30) == Passed(30, 0)
    assert node.settle() == Settlement(keys=0, charged=0, forgiven=10, uncertain=0, left=26)
    server.start()
    node.find_store_again()
    assert node.settle() == Settlement(keys=2, charged=26, forgiven=0, uncertain=0, left=0)
    assert (node.used(few), node.used(many)) == (6, 20)
    assert node.settle() == Settlement(0, 0, 0, 0, 0)
    assert (node.used(few), node.used(many), node.ledger.debt) == (6, 20, OutageDebt(0, 0))


def test_what_was_counted_before_the_outage_and_by_others_since_counts_on(server: RedisServer, unique: str) -> None:
    limit = Limit(100, LONG, name=unique)
    key = limit.by("ada")
    nodes = [Node(server.url, "local", FleetShare(share=0.4, nodes=2)) for _ in range(2)]
    try:
        assert nodes[0].limiter.check(key, cost=50).allowed
        with paused(server):
            passed = [node.send(key, 30) for node in nodes]
        for node in nodes:
            node.find_store_again()
        told = [node.settle() for node in nodes]
        noted, uncertain = (sum(each) for each in zip(*passed, strict=True))
        # What was sent to a server that stood still has happened, or not; what was not sent certainly has not.
        assert all(each.noted + each.uncertain == 20 for each in passed)
        assert sum(each.charged for each in told) == noted
        assert 50 + noted <= nodes[0].used(key) <= 50 + noted + uncertain
    finally:
        for node in nodes:
            node.limiter.close()


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_log"])
def test_charge_whose_answer_is_lost_is_not_made_twice(server: RedisServer, unique: str, algorithm: str) -> None:
    key = Limit(20, LONG, algorithm=algorithm, name=unique).by("ada")
    with Limiter(server.url) as witness, Proxy(server, unique.encode(), "drop") as proxy:
        witness.check(Limit(20, LONG, algorithm=algorithm, name="other").by("ada"))  # so that the script is there
        node = Node(proxy.url)
        node.ledger.record(Check((key,), 7))
        told = node.settle()
        assert told == Settlement(keys=0, charged=0, forgiven=0, uncertain=7, left=0)
        assert node.settle() == Settlement(0, 0, 0, 0, 0)
        node.limiter.close()
        assert witness.peek(key).remaining == 13


@pytest.mark.parametrize("budget", [0.005, 0.05])
def test_all_that_was_let_in_is_reported_as_charged_or_uncertain(
    server: RedisServer, unique: str, budget: float
) -> None:
    key = Limit(10_000, LONG, algorithm="fixed_window", name=unique).by("ada")
    settled_events: list[Event] = []

    def listen(event: Event) -> None:
        if event.kind == "settled":
            settled_events.append(event)

    def told(*what: str) -> int:
        return sum(event.details[each] for event in settled_events for each in what)

    with Limiter(server.url, on_failure="open", budget=budget, on_event=listen) as limiter:
        limiter.check(key)
        with paused(server):
            decisions = [limiter.check(key) for _ in range(300)]
        admitted = sum(decision.degraded is not None for decision in decisions)
        wait_until(lambda: told("charged", "uncertain") >= admitted, "all of it to be settled")
        assert told("charged", "uncertain") == admitted
        assert told("uncertain") > 0
        assert told("forgiven") == 0
    with Limiter(server.url) as other:
        used = key.limit.capacity - other.peek(key).remaining
    assert 301 - told("uncertain") <= used <= 301


@every_algorithm
def test_what_is_owed_is_charged_alike_on_every_store(remote_url: str, unique: str, algorithm: str) -> None:
    """By a clock of the test's own: debts decay until they are settled, and the rest of the limit is left."""
    clock = FakeClock(NOW)
    limit = Limit(60, timedelta(minutes=1), algorithm=algorithm, name=unique)
    ada, bob = limit.by("ada"), limit.by("bob")
    with Limiter(remote_url, clock=clock) as limiter:
        ledger = OutageLedger(clock)
        limiter.check(bob, cost=59)
        ledger.record(Check((ada, bob), (40, 50)))
        clock.advance(15.5)
        ((_, of_ada), (_, of_bob)) = owed = ledger.take()
        ledger.put_back(owed)
        free = limiter.peek(bob).remaining
        told = settled(ledger, limiter)
        assert (60 - limiter.peek(ada).remaining, limiter.peek(bob).remaining) == (of_ada, free - min(free, of_bob))
        assert told == Settlement(2, of_ada + min(free, of_bob), max(0, of_bob - free), 0, 0)
    decays = ALGORITHMS[algorithm].SHAPES_BURST
    assert (of_ada, of_bob, free) == ((25, 35, 16) if decays else (40, 50, 1))


SETTLED_LATER = """
limits:
  - {name: failures-UNIQUE, by: ip, bucket: "100/30 days, fixed_window", count_when: status >= 500}
  - {name: words-UNIQUE, by: ip, bucket: "100/30 days, fixed_window", reserve: 2}
"""


@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_cost_of_requests_that_end_in_an_outage_is_settled_after_it(
    redis7: RedisServer, unique: str, kind: Any
) -> None:
    with closing(asyncio.new_event_loop()) as loop:

        def done(result: Any) -> Any:
            return loop.run_until_complete(result) if inspect.isawaitable(result) else result

        async def made() -> Any:
            return kind(read(SETTLED_LATER.replace("UNIQUE", unique)), redis7.url, budget=0.2)

        gate = loop.run_until_complete(made())
        inside = [done(gate.admit(FakeRequest(peer="203.0.113.9"))) for _ in range(6)]
        assert [admission.decision.degraded for admission in inside] == [None] * 6
        with paused(redis7):
            while not gate._limiter.engine.store.breakers.open_breakers():
                done(gate.admit(FakeRequest(peer="203.0.113.10")))
            for number, admission in enumerate(inside):
                admission.commit(1 if number else 9)
                done(gate.finish(admission, 200))

        def is_settled() -> bool:
            done(asyncio.sleep(0.01))
            health = gate.health()
            return health.state == "ready" and health.owed_keys == 0

        wait_until(is_settled, "what is owed to be settled")
        decision = done(gate._limiter.peek(*inside[0].decision.keys))
        done(gate.close())
    assert [100 - outcome.remaining for outcome in decision.outcomes] == [0, 9 + 5]
