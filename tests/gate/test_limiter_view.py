"""A limiter beside a gate in memory: what it reads and changes is what the gate counts and blocks by."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from headgate import InvalidConfiguration
from headgate.adapters.asgi import AsgiRequest
from headgate.gate.gate import AsyncGate, Gate
from headgate.policy.loader import read
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from headgate.keys import Key
    from support.servers import RedisServer

POLICY = read("limits: [{name: requests, by: ip, bucket: 3/minute}]")


def make_request() -> AsgiRequest:
    return AsgiRequest({"type": "http", "path": "/", "headers": [], "client": ("203.0.113.9", 1)})


def status(gate: AsyncGate | Gate) -> int:
    admission = gate.admit(make_request()) if isinstance(gate, Gate) else asyncio.run(gate.admit(make_request()))
    return 200 if admission.refusal is None else admission.refusal.status


def key(gate: AsyncGate | Gate) -> Key:
    snapshot = gate.active_policy.snapshot
    who = {"ip": "203.0.113.9", "address": "203.0.113.9"}
    return snapshot.resolve(snapshot.route("GET", "/"), who, 0).keys[0]


@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_it_reads_what_the_gate_has_counted_and_resets_it(kind: type[Gate] | type[AsyncGate]) -> None:
    gate = kind(POLICY, clock=FakeClock())
    beside = gate.limiter_view()
    assert [status(gate) for _ in range(4)] == [200, 200, 200, 429]
    assert beside.peek(key(gate)).remaining == 0
    beside.reset(key(gate))
    assert beside.peek(key(gate)).remaining == 3
    assert status(gate) == 200
    assert beside.check(key(gate)).remaining == 1, "its checks count, too"
    assert beside.stats.keys == 1


def test_refunded_tokens_can_be_used_by_denied_clients() -> None:
    gate = Gate(read("limits: [{by: ip, bucket: 1/day, count_when: status == 401}]"), clock=FakeClock())
    first = gate.admit(make_request())
    assert [status(gate) for _ in range(2)] == [429, 429]
    gate.finish(first, 200)
    assert status(gate) == 200


def test_its_blocks_are_those_of_the_gate() -> None:
    gate = AsyncGate(POLICY, clock=FakeClock())
    beside = gate.limiter_view()
    beside.block("ip", "203.0.113.0/24", reason="attack")
    assert status(gate) == 403
    asyncio.run(gate.unblock("ip", "203.0.113.0/24"))
    assert beside.blocked() == []
    assert status(gate) == 200


def test_its_clock_is_that_of_the_gate() -> None:
    clock = FakeClock()
    gate = AsyncGate(POLICY, clock=clock)
    beside = gate.limiter_view()
    assert beside.check(key(gate), cost=3).remaining == 0
    clock.advance(20)
    assert beside.peek(key(gate)).remaining == 1


def test_to_close_it_leaves_the_gate_alone() -> None:
    gate = AsyncGate(POLICY, clock=FakeClock())
    assert [status(gate) for _ in range(3)] == [200, 200, 200]
    with gate.limiter_view():
        pass
    assert status(gate) == 429


def test_gate_on_redis_is_looked_after_by_its_url(redis7: RedisServer) -> None:
    gate = AsyncGate(POLICY, redis7.url, secret="sixteen bytes or more")
    try:
        with pytest.raises(InvalidConfiguration, match="create a Limiter with the same URL and namespace"):
            gate.limiter_view()
    finally:
        asyncio.run(gate.close())
