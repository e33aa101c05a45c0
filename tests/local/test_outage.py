"""Store outages: logging without floods, events, and the failure modes behind an open circuit breaker."""

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
    lines = [record.getMessage() for record in log.records]
    log.clear()
    return lines


def test_outage_is_logged_at_start_periodically_and_at_end(caplog: pytest.LogCaptureFixture) -> None:
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


def make_request() -> AsgiRequest:
    return AsgiRequest({"type": "http", "method": "GET", "path": "/", "client": ("203.0.113.9", 1), "headers": []})


def test_gate_reports_an_unavailable_store(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(POLICY, "redis://127.0.0.1:1/0")
    assert gate.admit(make_request()).allowed
    assert (gate.health().state, gate.health().decided_without) == ("degraded", 1)
    assert "Redis is unavailable" in messages(caplog)[0]


def test_async_gate_reports_outage_and_recovery(
    redis7: RedisServer, caplog: pytest.LogCaptureFixture, unique: str
) -> None:
    async def served() -> None:
        gate = AsyncGate(POLICY, redis7.url, namespace=unique, budget=1.0, on_event=events.append)
        local = gate._limiter.engine.local
        local.outage = OutageTracker(EventEmitter(events.append), lambda: clock.now_us() / 1_000_000)
        local.outage.record_failure(AWAY)
        clock.advance(2)
        assert (await gate.admit(make_request())).allowed
        await gate.close()

    events: list[Event] = []
    clock = FakeClock(1_000_000)
    asyncio.run(served())
    assert "Redis is available again: 1 requests" in messages(caplog)[-1]
    assert [event.kind for event in events] == ["store-lost", "store-back"]


def test_failing_event_listener_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    EventEmitter(lambda event: 1 / 0).emit("store-lost", "it is gone")
    assert messages(caplog) == ["it is gone", "on_event failed on store-lost"]


def test_unsupplied_identities_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
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


def open_breaker(limiter: Limiter | AsyncLimiter) -> None:
    """Open the circuit breaker of the limiter and stop its maintenance."""
    assert limiter.engine.maintenance is not None
    limiter.engine.maintenance.close()
    breaker = limiter.engine.store.breakers[None]
    breaker.is_open, breaker.reason = True, str(AWAY)
    limiter.engine.local.record_failure(AWAY)


UNSENT = f"{AWAY} (circuit breaker open)"


@pytest.mark.parametrize("cost", [0, 2, (2, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["open", "closed", "local"])
def test_failure_modes_apply_while_the_breaker_is_open(mode: Any, cost: Any) -> None:
    """The shortcut gives the same decisions as an exception of the store."""
    keys = [Limit(100, timedelta(minutes=1), name=name).by("ada") for name in ("a", "b")]
    with Limiter("redis://127.0.0.1:1/0", on_failure=mode, clock=FakeClock()) as limiter:
        open_breaker(limiter)
        limiter.engine.local.breaker, breaker = None, limiter.engine.local.breaker
        long = limiter.check(*keys, cost=cost)
        owed = limiter.health().owed_tokens
        limiter.engine.local.breaker = breaker
        limiter.engine.store.run = None  # the store must not be called
        short = limiter.check(*keys, cost=cost)
        assert short.degraded == f"{mode}: {UNSENT}"
        assert short.allowed == long.allowed
        assert short == long or mode == "local", "which counts"
        assert limiter.health().owed_tokens == 2 * owed
        assert limiter.health().decided_without == 3


def test_each_caller_gets_its_own_exception() -> None:
    async def ask(limiter: AsyncLimiter) -> list[Any]:
        open_breaker(limiter)
        key = Limit(10, timedelta(minutes=1)).by("ada")
        errors = await asyncio.gather(*[limiter.check(key) for _ in range(2)], return_exceptions=True)
        await limiter.close()
        return errors

    errors = asyncio.run(ask(AsyncLimiter("redis://127.0.0.1:1/0")))
    assert [(type(error), str(error), error.may_have_happened) for error in errors] == [
        (StoreUnavailable, UNSENT, False)
    ] * 2
    assert errors[0] is not errors[1]


def test_closed_breaker_lets_the_next_check_through(redis7: RedisServer, unique: str) -> None:
    with Limiter(redis7.url, on_failure="open", budget=5.0) as limiter:
        key = Limit(10, timedelta(minutes=1), name=unique).by("ada")
        assert limiter.check(key).degraded is None
        open_breaker(limiter)
        assert limiter.check(key).degraded == f"open: {UNSENT}"
        limiter.engine.local.breaker.close()
        assert limiter.check(key).remaining == 8


def test_cluster_and_sentinel_have_a_breaker_per_server() -> None:
    for url in ("redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/main"):
        with Limiter(url, on_failure="open") as limiter:
            assert limiter.engine.local.breaker is None
