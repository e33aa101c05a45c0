"""A store that is away is told of loudly, without a flood, and so is its return."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from headgate import Limit, StoreUnavailable
from headgate.adapters.asgi import AsgiArrival
from headgate.adapters.gate import AsyncGate, Gate
from headgate.adapters.outages import Outage
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock

if TYPE_CHECKING:
    import pytest

    from servers import RedisServer

POLICY = Policy(rules=(Rule("per-ip", Limit(5, timedelta(minutes=1), name="per-ip"), ("ip",)),))
AWAY = StoreUnavailable("nobody is there")


def messages(log: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in log.records]
    log.clear()
    return told


def test_an_outage_is_told_of_at_once_then_now_and_then_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(1_000_000)
    outage = Outage(lambda: clock.now_us() / 1_000_000)
    outage.note_failure(AWAY)
    assert messages(caplog) == [
        "the store cannot be asked, and routes answer by their failure modes (1 requests in 0 s): nobody is there"
    ]
    for _ in range(99):
        clock.advance(0.1)
        outage.note_failure(AWAY)
    assert messages(caplog) == []
    clock.advance(0.1)
    outage.note_failure(AWAY)
    assert messages(caplog) == [
        "the store cannot be asked, and routes answer by their failure modes (101 requests in 10 s): nobody is there"
    ]
    clock.advance(0.999)
    outage.note_answer()
    assert (messages(caplog), outage.failures) == ([], 101)
    clock.advance(0.001)
    outage.note_answer()
    assert messages(caplog) == ["the store answers again: 101 requests were decided without it in 11.0 s"]
    assert outage.failures == 0
    outage.note_failure(AWAY)
    assert len(messages(caplog)) == 1


def arrival() -> AsgiArrival:
    return AsgiArrival({"type": "http", "method": "GET", "path": "/", "client": ("203.0.113.9", 1), "headers": []})


def test_a_gate_tells_of_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(POLICY, "redis://127.0.0.1:1/0")
    assert gate.admit(arrival()).allowed
    assert gate.outage.failures == 1
    assert "the store cannot be asked" in messages(caplog)[0]


def test_an_asynchronous_gate_tells_of_it_too_and_of_its_return(
    redis7: RedisServer, caplog: pytest.LogCaptureFixture, unique: str
) -> None:
    async def served() -> None:
        gate = AsyncGate(POLICY, redis7.url, namespace=unique, budget=1.0)
        gate.outage = Outage(lambda: clock.now_us() / 1_000_000)
        gate.outage.note_failure(AWAY)
        clock.advance(2)
        assert (await gate.admit(arrival())).allowed
        await gate.close()

    clock = FakeClock(1_000_000)
    asyncio.run(served())
    assert "the store answers again: 1 requests" in messages(caplog)[-1]


def test_identities_that_nobody_supplies_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mistyped = Policy(rules=(Rule("a", Limit(5, timedelta(minutes=1), name="a"), ("ipp", "user")),))
    Gate(mistyped, identities={"user": lambda _: "ada"})
    assert "the policy counts by ipp, for which no function is given" in messages(caplog)[0]
    Gate(POLICY)
    assert messages(caplog) == []
