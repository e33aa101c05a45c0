"""A store that is away is told of loudly, without a flood, and so is its return."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Limit, Limiter, StoreUnavailable
from headgate.adapters.asgi import AsgiRequest
from headgate.events import Event, EventEmitter
from headgate.gate.gate import AsyncGate, Gate
from headgate.local.outage import OutageTracker
from headgate.policy.model import Policy, Rule
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from support.servers import RedisServer

POLICY = Policy(rules=(Rule("per-ip", Limit(5, timedelta(minutes=1), name="per-ip"), ("ip",)),))
AWAY = StoreUnavailable("nobody is there")


def messages(log: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in log.records]
    log.clear()
    return told


def test_an_outage_is_told_of_at_once_then_now_and_then_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(1_000_000)
    events: list[Event] = []
    outage = OutageTracker(EventEmitter(events.append), lambda: clock.now_us() / 1_000_000)
    assert outage.duration is None
    outage.record_failure(AWAY)
    assert messages(caplog) == ["Redis is unavailable; requests are handled by on_failure (1 so far): nobody is there"]
    for _ in range(99):
        clock.advance(0.1)
        outage.record_failure(AWAY)
    assert messages(caplog) == []
    clock.advance(0.1)
    outage.record_failure(AWAY)
    assert messages(caplog) == [
        "Redis is unavailable; requests are handled by on_failure (101 so far): nobody is there"
    ]
    assert (outage.duration, outage.reason) == (10.0, "nobody is there")
    clock.advance(0.499)
    outage.record_answer()
    assert (messages(caplog), outage.failures) == ([], 101)
    clock.advance(0.001)
    outage.record_answer()
    assert messages(caplog) == ["Redis is available again: 101 requests were handled by on_failure in 10.5 s"]
    assert (outage.failures, outage.duration, outage.reason) == (0, None, None)
    assert [event.kind for event in events] == ["store-lost", "store-away", "store-back"]
    assert events[-1].details == {"requests": 101, "seconds": 10.5}
    outage.record_failure(AWAY)
    assert len(messages(caplog)) == 1


def arrival() -> AsgiRequest:
    return AsgiRequest({"type": "http", "method": "GET", "path": "/", "client": ("203.0.113.9", 1), "headers": []})


def test_a_gate_tells_of_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(POLICY, "redis://127.0.0.1:1/0")
    assert gate.admit(arrival()).allowed
    assert (gate.health().state, gate.health().decided_without) == ("degraded", 1)
    assert "Redis is unavailable" in messages(caplog)[0]


def test_an_asynchronous_gate_tells_of_it_too_and_of_its_return(
    redis7: RedisServer, caplog: pytest.LogCaptureFixture, unique: str
) -> None:
    async def served() -> None:
        gate = AsyncGate(POLICY, redis7.url, namespace=unique, budget=1.0, on_event=events.append)
        local = gate._limiter.engine.local
        local.outage = OutageTracker(EventEmitter(events.append), lambda: clock.now_us() / 1_000_000)
        local.outage.record_failure(AWAY)
        clock.advance(2)
        assert (await gate.admit(arrival())).allowed
        await gate.close()

    events: list[Event] = []
    clock = FakeClock(1_000_000)
    asyncio.run(served())
    assert "Redis is available again: 1 requests" in messages(caplog)[-1]
    assert [event.kind for event in events] == ["store-lost", "store-back"]


def test_who_is_told_of_events_and_fails_is_told_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    EventEmitter(lambda event: 1 / 0).emit("store-lost", "it is gone")
    assert messages(caplog) == ["it is gone", "on_event failed on store-lost"]


def test_identities_that_nobody_supplies_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mistyped = Policy(rules=(Rule("a", Limit(5, timedelta(minutes=1), name="a"), ("ipp", "user")),))
    Gate(mistyped, identities={"user": lambda _: "ada"})
    assert messages(caplog)[0] == (
        "The policy has limits by ipp, but no identities['ipp'] function was given; "
        "those limits will count by IP address instead"
    )
    Gate(POLICY)
    assert messages(caplog) == []
    Gate(mistyped, identities={"user": lambda _: "ada", "iip": lambda _: "x"})
    assert "no identities['ipp'] function was given (is identities['iip'] a misspelling?);" in messages(caplog)[0]


# ------------------------------------------------- while the breaker is open


def opened(limiter: Limiter | AsyncLimiter) -> None:
    """Its store has failed until nobody asks it any more; and nobody looks after it."""
    assert limiter.engine.maintenance is not None
    limiter.engine.maintenance.close()
    breaker = limiter.engine.store.breakers[None]
    breaker.is_open, breaker.reason = True, str(AWAY)
    limiter.engine.local.record_failure(AWAY)


UNSENT = f"{AWAY} (circuit breaker open)"


@pytest.mark.parametrize("cost", [0, 2, (2, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["open", "closed", "local"])
def test_while_nobody_asks_the_store_each_mode_answers_as_ever(mode: Any, cost: Any) -> None:
    """The short way and the long way by an exception of the store's are one."""
    keys = [Limit(100, timedelta(minutes=1), name=name).by("ada") for name in ("a", "b")]
    with Limiter("redis://127.0.0.1:1/0", on_failure=mode, clock=FakeClock()) as limiter:
        opened(limiter)
        limiter.engine.local.breaker, breaker = None, limiter.engine.local.breaker
        long = limiter.check(*keys, cost=cost)
        owed = limiter.health().owed_tokens
        limiter.engine.local.breaker = breaker
        limiter.engine.store.run = None  # it is not even asked
        short = limiter.check(*keys, cost=cost)
        assert short.degraded == f"{mode}: {UNSENT}"
        assert short.allowed == long.allowed
        assert short == long or mode == "local", "which counts"
        assert limiter.health().owed_tokens == 2 * owed
        assert limiter.health().decided_without == 3


def test_where_it_raises_each_gets_an_exception_of_its_own() -> None:
    async def ask(limiter: AsyncLimiter) -> list[Any]:
        opened(limiter)
        key = Limit(10, timedelta(minutes=1)).by("ada")
        told = await asyncio.gather(*[limiter.check(key) for _ in range(2)], return_exceptions=True)
        await limiter.close()
        return told

    told = asyncio.run(ask(AsyncLimiter("redis://127.0.0.1:1/0")))
    assert [(type(error), str(error), error.may_have_happened) for error in told] == [
        (StoreUnavailable, UNSENT, False)
    ] * 2
    assert told[0] is not told[1]


def test_as_soon_as_the_breaker_closes_the_store_is_asked(redis7: RedisServer, unique: str) -> None:
    with Limiter(redis7.url, on_failure="open", budget=5.0) as limiter:
        key = Limit(10, timedelta(minutes=1), name=unique).by("ada")
        assert limiter.check(key).degraded is None
        opened(limiter)
        assert limiter.check(key).degraded == f"open: {UNSENT}"
        limiter.engine.local.breaker.close()
        assert limiter.check(key).remaining == 8


def test_where_there_are_several_servers_each_has_a_breaker_of_its_own() -> None:
    for url in ("redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/main"):
        with Limiter(url, on_failure="open") as limiter:
            assert limiter.engine.local.breaker is None
