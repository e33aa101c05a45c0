"""Actions on clients that were found: progression in the store, undo, several nodes, and older ones."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limiter
from headgate.abuse import actions
from headgate.abuse.actions import ActionDispatcher, ClientAction, list_actions, undo_action
from headgate.abuse.model import AbuseScenario, ActionStep, Finding, Threshold
from headgate.testing import FakeClock
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

SECOND = 1_000_000
START_US = 1_763_251_200 * SECOND
STEPS = (
    ActionStep("tighten", timedelta(minutes=5)),
    ActionStep("delay", timedelta(minutes=5)),
    ActionStep("block", timedelta(minutes=10)),
)


def scenario(name: str = "login-botnet", **more: Any) -> AbuseScenario:
    settings: Any = {"window": timedelta(minutes=1), "steps": STEPS, **more}
    return AbuseScenario(name, "ip", (Threshold("accounts", 20),), **settings)


def finding(value: str = "203.0.113.9", kind: str = "ip", evidence: str = "45 accounts were tried") -> Finding:
    return Finding("login-botnet", kind, value, START_US, "accounts", 45, 20, evidence)


class Node:
    """A process of the fleet, on a clock that all of them share."""

    def __init__(self, url: str, clock: FakeClock, namespace: str, **more: Any) -> None:
        self.clock = clock
        self.limiter = Limiter(url, clock=clock, namespace=namespace)
        self.engine = self.limiter.engine
        self.engine.join_fleet()
        self.taken: list[ClientAction] = []
        self.dispatcher = ActionDispatcher(self.engine, clock.now_us, on_action=self.taken.append, **more)

    def find(self, found: Finding | None = None, rules: AbuseScenario | None = None) -> None:
        self.dispatcher.apply(found or finding(), rules or scenario())
        self.dispatcher.flush()

    def levels(self) -> dict[str, tuple[str, int]]:
        return {
            each.value: (each.restriction.action, each.restriction.level)
            for each in list_actions(self.engine, self.clock.now_us())
        }

    def undo(self, by: str = "ada") -> Any:
        (action, *_) = list_actions(self.engine, self.clock.now_us())
        return undo_action(self.engine, action, grace=timedelta(hours=1), by=by, now_us=self.clock.now_us())


@pytest.fixture
def nodes(store_url: str, unique: str) -> Iterator[Any]:
    """Creates nodes that share a store; in memory, there is only one."""
    with ExitStack() as stack:
        clock = FakeClock(START_US)

        def node(**more: Any) -> Node:
            created = Node(store_url, clock, unique, **more)
            stack.enter_context(created.limiter)
            return created

        yield node


def test_findings_climb_the_steps_and_end_by_themselves(nodes: Any) -> None:
    node = nodes()
    live = node.engine.local.live_clients
    assert not live.is_active
    node.find()
    node.find()
    assert node.levels() == {"203.0.113.9": ("tighten", 1)}
    assert live.is_active
    node.clock.advance(60)
    node.find()
    assert node.levels() == {"203.0.113.9": ("delay", 2)}
    assert not node.limiter.blocked()
    node.clock.advance(60)
    node.find()
    (block,) = node.limiter.blocked()
    assert (block.value, block.until_us) == ("203.0.113.9", node.clock.now_us() + 600 * SECOND)
    assert block.reason == "Blocked until 00:12: 45 accounts were tried (login-botnet)."
    assert [each.restriction.action for each in node.taken] == ["tighten", "delay", "block"]
    node.clock.advance(600)
    assert not node.limiter.blocked()
    assert node.levels() == {"203.0.113.9": ("block", 3)}  # remembered until the level has decayed
    node.clock.advance(3 * 3600)
    assert node.levels() == {}
    live.sweep(node.clock.now_us())
    assert not live.is_active


def test_undo_ends_the_action_and_grants_a_grace_time(nodes: Any) -> None:
    node = nodes()
    block = scenario(steps=STEPS[2:])
    node.find(rules=block)
    assert node.limiter.blocked()
    undone = node.undo()
    assert (undone.undone_by, undone.level) == ("ada", 0)
    assert not node.limiter.blocked()
    assert node.undo().undone_us == undone.undone_us  # a second click changes nothing
    node.clock.advance(3599)
    node.find(rules=block)
    assert not node.limiter.blocked()
    other = scenario("scraping", steps=STEPS[2:])
    node.find(rules=other)  # which a person has not judged
    assert len(node.limiter.blocked()) == 1
    node.clock.advance(1)
    node.find(rules=block)
    assert {each.restriction.scenario for each in list_actions(node.engine, node.clock.now_us())} == {
        "login-botnet",
        "scraping",
    }


def test_longer_block_of_a_person_stays(nodes: Any) -> None:
    node = nodes()
    node.limiter.block("ip", "203.0.113.9", reason="court order")
    node.find(rules=scenario(steps=STEPS[2:]))
    assert [each.reason for each in node.limiter.blocked()] == ["court order"]
    node.undo()
    assert [each.reason for each in node.limiter.blocked()] == ["court order"]


def test_allowed_and_unnamed_clients_are_never_acted_on(nodes: Any) -> None:
    node = nodes(is_allowed=lambda kind, value: (kind, value) == ("tenant", "acme"))
    node.find(finding("acme", "tenant"))
    node.find(finding("*", "global"))
    node.find(finding("no address"))
    node.find(rules=scenario(steps=()))
    assert node.levels() == {}
    node.find(finding("other", "tenant"))
    assert node.levels() == {"other": ("tighten", 1)}


def test_shadow_mode_only_records(nodes: Any) -> None:
    node = nodes()
    node.find(rules=scenario(steps=STEPS[2:], shadow=True))
    assert node.levels() == {"203.0.113.9": ("block", 1)}
    assert not node.limiter.blocked()
    assert [each.restriction.sentence for each in node.taken] == [
        "Would be blocked until 00:10: 45 accounts were tried (login-botnet)."
    ]


def test_spellings_of_a_network_are_one_client(nodes: Any) -> None:
    node = nodes()
    node.find(finding("2001:DB8::1/48"))
    node.find(finding("2001:db8::/48"))
    assert node.levels() == {"2001:db8::/48": ("tighten", 1)}


def test_forged_clients_exhaust_no_memory(monkeypatch: pytest.MonkeyPatch, unique: str) -> None:
    monkeypatch.setattr(actions, "MAX_RECORDS", 100)
    node = Node("memory://", FakeClock(START_US), unique)
    for number in range(1_000):
        node.find(finding(f"10.0.{number >> 8}.{number & 255}"))
    assert len(node.levels()) == 100
    node.clock.advance(86_400)
    node.engine.local.live_clients.sweep(node.clock.now_us())
    node.find(finding("192.0.2.1"))
    assert node.levels() == {"192.0.2.1": ("tighten", 1)}


def test_many_findings_are_applied_in_batches(nodes: Any) -> None:
    node = nodes()
    for number in range(1_000):
        node.dispatcher.apply(finding(f"10.0.{number >> 8}.{number & 255}"), scenario(steps=STEPS[2:]))
    node.dispatcher.flush()
    assert len(node.levels()) == len(node.limiter.blocked()) == 1_000


@pytest.mark.parametrize("deployment", ["redis7", "cluster"])
def test_concurrent_findings_of_several_nodes_count_once(
    deployment: str, request: pytest.FixtureRequest, unique: str
) -> None:
    url, clock = request.getfixturevalue(deployment).url, FakeClock(START_US)
    with ExitStack() as stack:
        fleet = [Node(url, clock, unique) for _ in range(4)]
        for node in fleet:
            stack.enter_context(node.limiter)
        for expected in (("tighten", 1), ("delay", 2), ("block", 3)):
            start = threading.Barrier(len(fleet))

            def report(node: Node, start: threading.Barrier = start) -> None:
                start.wait()
                for _ in range(3):
                    node.find()

            threads = [threading.Thread(target=report, args=(node,)) for node in fleet]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert fleet[0].levels() == {"203.0.113.9": expected}
            clock.advance(60)
        assert sum(len(node.taken) for node in fleet) == 3
        assert len(fleet[0].limiter.blocked()) == 1


def test_restrictions_reach_other_nodes_and_survive_restarts(server: RedisServer, unique: str) -> None:
    with Limiter(server.url) as one, Limiter(server.url) as other:
        for limiter in (one, other):
            limiter.engine.join_fleet()
        live = other.engine.local.live_clients
        one_node = ActionDispatcher(one.engine, lambda: START_US + 10**15)
        one_node.apply(finding("203.0.113.0/24"), scenario())
        wait_until(lambda: live.restrictions.find({"address": "203.0.113.77"}, START_US + 10**15), "the restriction")
        assert not live.blocks.has_entries
        (action,) = list_actions(one.engine, START_US + 10**15)
        undo_action(one.engine, action, grace=timedelta(hours=1), by="ada", now_us=START_US + 10**15)
        wait_until(lambda: not live.restrictions.find({"address": "203.0.113.77"}, START_US + 10**15), "its end")
    with Limiter(server.url) as restarted:
        restarted.engine.join_fleet()
        (action,) = list_actions(restarted.engine, START_US + 10**15)
        assert action.restriction.undone_by == "ada"
        wait_until(lambda: restarted.engine.local.live_clients.is_active, "the record after a restart")


def test_older_nodes_do_not_take_other_restrictions_for_blocks(redis7: RedisServer, unique: str) -> None:
    """They read the hash of blocks alone, and are told of nothing but identities to read again."""
    clock = FakeClock(START_US)
    node = Node(redis7.url, clock, unique)
    with node.limiter, redis7.client() as client, client.pubsub() as messages:
        messages.subscribe(f"{unique}:%news")
        assert messages.get_message(timeout=5)
        node.find()
        assert client.hgetall(f"{unique}:%blocks") == {}
        message = messages.get_message(timeout=5)
        verb, _, identity = message["data"].partition(" ")
        assert (verb, json.loads(identity)) == ("block", {"kind": "ip", "value": "203.0.113.9"})
        assert client.hlen(f"{unique}:%restrictions") == 2
        assert 0 < client.pttl(f"{unique}:%restrictions") < 3 * 3600 * 1000


def test_unavailable_store_drops_findings_and_says_so(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with Limiter(server.url) as limiter:
        dispatcher = ActionDispatcher(limiter.engine, lambda: START_US)
        server.kill()
        dispatcher.apply(finding(), scenario())
        dispatcher.flush()
        wait_until(lambda: dispatcher.dropped == 1, "the finding to be dropped")
        assert "1 findings could not be applied" in caplog.text
