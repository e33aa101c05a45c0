"""Nodes without a control plane find together what none of them could find alone."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.testing import FakeRequest
from support.servers import wait_until

if TYPE_CHECKING:
    from support.servers import RedisServer

POLICY = """
limits: [{by: ip, bucket: 1000/minute}]
abuse:
  scenarios:
    enumeration: {steps: [block for 1 hour]}
  allow: [{ip: 192.0.2.7}]
"""
ATTACKER, FRIEND = "203.0.113.9", "192.0.2.7"


def test_nodes_that_share_a_store_find_and_block_together(redis7: RedisServer, unique: str) -> None:
    with ExitStack() as stack:
        gates = [
            stack.enter_context(closing(Gate(read(POLICY), redis7.url, namespace=unique, secret="s" * 16, budget=2)))
            for _ in range(3)
        ]
        for number in range(150):
            for address in (ATTACKER, FRIEND):
                admission = gates[number % 3].admit(FakeRequest(f"/users/{number}", peer=address))
                gates[number % 3].finish(admission, 404)
        wait_until(
            lambda: not any(gate.admit(FakeRequest("/", peer=ATTACKER)).allowed for gate in gates),
            "all nodes block the attacker",
        )
        assert all(gate.admit(FakeRequest("/", peer=FRIEND)).allowed for gate in gates)
        evidence = [finding.evidence for gate in gates if gate.abuse for finding in gate.abuse.findings]
        assert any(" nodes" in text for text in evidence)


def test_closed_gates_and_those_without_a_secret_share_nothing(redis7: RedisServer, unique: str) -> None:
    gate = Gate(read(POLICY), redis7.url, namespace=unique)
    assert gate.abuse is not None
    assert not gate.abuse.is_shared
    gate.close()
    gate = Gate(read(POLICY), redis7.url, namespace=unique, secret="s" * 16)
    exchange = gate._exchange
    gate.close()
    assert exchange.is_closed
