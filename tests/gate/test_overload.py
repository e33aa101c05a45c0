"""Limits on requests in progress: what is shed and how it is explained, and that no place is lost."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from headgate.gate import current_priority
from headgate.gate.admission import NOT_SERVED, enter_context
from headgate.gate.gate import AsyncGate, Gate
from headgate.overload import Guard
from headgate.policy import read
from headgate.telemetry import DecisionLog
from headgate.telemetry.human_time import Span
from headgate.telemetry.metrics.counters import Metrics
from headgate.telemetry.why.render import details, mail
from headgate.telemetry.why.report import ClientQuery, why
from headgate.testing import FakeClock, FakeRequest
from support.traffic import Kept, Request, Traffic

POLICY = """
overload: 5
routes:
  - {path: /checkout, priority: critical}
  - {path: /export, priority: background}
  - {path: /health, cost: 0}
  - {path: /stream, overload: none}
  - {path: /search, overload: 2}
  - {path: "/report/{id}", overload: 3, class: reports}
  - {path: /summary, overload: 3, class: reports}
limits:
  - {name: all, by: ip, bucket: 1000/hour}
"""


@pytest.fixture
def gate() -> Any:
    return Gate(read(POLICY), clock=FakeClock())


def hold(gate: Gate, path: str, count: int, **more: Any) -> list[Any]:
    """Requests that are in progress afterwards."""
    admissions = [gate.admit(FakeRequest(path, **more)) for _ in range(count)]
    assert all(each.allowed and each.needs_finish for each in admissions)
    return admissions


def test_requests_are_shed_by_priority(gate: Gate) -> None:
    held = hold(gate, "/export", 3)
    assert not gate.admit(FakeRequest("/export")).allowed
    held += hold(gate, "/other", 2)
    assert not gate.admit(FakeRequest("/other")).allowed
    held += hold(gate, "/checkout", 2)
    for each in held:
        gate.finish(each, 200)
    assert gate.overload_stats()["*"].in_flight == 0
    hold(gate, "/other", 5)


def test_refusal_says_what_happened_and_charges_nothing(gate: Gate) -> None:
    hold(gate, "/other", 5)
    refusal = gate.admit(FakeRequest("/other")).refusal
    assert refusal is not None
    assert refusal.status == 503
    assert dict(refusal.headers)[b"retry-after"] == b"1"
    assert dict(refusal.headers)[b"headgate-shed"] == b"normal"
    assert dict(refusal.headers)[b"cache-control"] == b"no-store"
    problem = json.loads(refusal.body)
    assert problem["type"].endswith("#temporary-reduced-capacity")
    assert (problem["error"], problem["retry_after_seconds"]) == ("overloaded", 1)
    assert problem["detail"] == "The service is overloaded. Try again in 1 second."
    decision = gate.admit(FakeRequest("/checkout")).decision
    assert decision is not None
    assert decision.remaining == 1000 - 5 - 1


def test_routes_may_have_a_limit_of_their_own_or_none(gate: Gate) -> None:
    hold(gate, "/search", 2)
    assert not gate.admit(FakeRequest("/search")).allowed
    hold(gate, "/report/1", 2)
    hold(gate, "/summary", 1)
    assert not gate.admit(FakeRequest("/report/2")).allowed  # routes of a class share it
    for path in ("/stream", "/health"):
        assert not any(gate.admit(FakeRequest(path)).needs_finish for _ in range(20))
    hold(gate, "/other", 5)
    assert {name: stats.in_flight for name, stats in gate.overload_stats().items()} == {
        "*": 5, "/search": 2, "reports": 3,
    }  # fmt: skip


def test_client_with_more_than_its_share_leaves_room_to_others() -> None:
    policy = read("overload: 10\nlimits: [{name: all, by: ip, bucket: 1000/hour}]")
    gate = Gate(policy, clock=FakeClock(), identities={"tenant": lambda request: request.header("x-tenant")[0]})
    mine, others = {"x-tenant": "a"}, {"x-tenant": "b"}
    hold(gate, "/", 1, headers=others)
    hold(gate, "/", 7, headers=mine)
    assert not gate.admit(FakeRequest("/", headers=mine)).allowed
    hold(gate, "/", 2, headers=others)


def test_invented_api_keys_share_the_place_of_their_address() -> None:
    gate = Gate(read("overload: 10\nlimits: [{name: all, by: ip, bucket: 1000/hour}]"), clock=FakeClock())
    hold(gate, "/", 1, peer="198.51.100.1")
    for number in range(7):
        hold(gate, "/", 1, headers={"x-api-key": f"invented-{number}"})
    assert not gate.admit(FakeRequest("/", headers={"x-api-key": "another"})).allowed
    hold(gate, "/", 1, peer="198.51.100.1")


def test_every_way_to_end_a_request_frees_its_place(gate: Gate) -> None:
    for status in (200, 304, 404, 429, 500, 503, 504, NOT_SERVED):
        for each in hold(gate, "/other", 5):
            gate.finish(each, status)
            gate.finish(each, status)
    assert gate.overload_stats()["*"].in_flight == 0


@pytest.mark.parametrize(
    "limits",
    [
        "[{name: one, by: ip, bucket: 1/hour}]",
        "[{name: one, by: ip, bucket: {algorithm: concurrency, quota: 1, period: 1 hour}}]",
        "[{name: one, by: ip, bucket: 1/hour}, {name: watched, by: ip, bucket: 1/hour, shadow: true}]",
    ],
)
def test_request_that_a_limit_denies_takes_no_place(limits: str) -> None:
    gate = Gate(read(f"overload: 5\nlimits: {limits}"), clock=FakeClock())
    held = hold(gate, "/", 1)
    for _ in range(20):
        refusal = gate.admit(FakeRequest("/")).refusal
        assert refusal is not None
        assert refusal.status == 429
    assert gate.overload_stats()["*"].in_flight == len(held)


def test_request_without_limits_is_shed_as_well() -> None:
    gate = Gate(read("overload: 2"), clock=FakeClock())
    hold(gate, "/", 2)
    assert not gate.admit(FakeRequest("/")).allowed


def test_blocked_client_takes_no_place() -> None:
    gate = Gate(read("overload: 2\nblocked: [{ip: 203.0.113.9}]"), clock=FakeClock())
    refusals = [gate.admit(FakeRequest("/")).refusal for _ in range(5)]
    assert [refusal and refusal.status for refusal in refusals] == [403] * 5


def test_cancelled_request_frees_its_place() -> None:
    """While its check waits for the store."""

    async def run() -> None:
        gate = AsyncGate(read(POLICY), clock=FakeClock())
        waits = asyncio.Event()

        async def never(*_: Any) -> None:
            waits.set()
            await asyncio.Event().wait()

        gate._memory = None
        gate._decide = never
        task = asyncio.create_task(gate.admit(FakeRequest("/other")))
        await waits.wait()
        assert gate.overload_stats()["*"].in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.overload_stats()["*"].in_flight == 0
        await gate.close()

    asyncio.run(run())


def test_async_gate_sheds_alike() -> None:
    async def run() -> list[bool]:
        gate = AsyncGate(read(POLICY), clock=FakeClock())
        admissions = [await gate.admit(FakeRequest("/other")) for _ in range(6)]
        await gate.finish(admissions[0], 200)
        admissions.append(await gate.admit(FakeRequest("/other")))
        await gate.close()
        return [each.allowed for each in admissions]

    assert asyncio.run(run()) == [True] * 5 + [False, True]


def test_new_policy_keeps_requests_in_progress_and_what_was_measured(gate: Gate) -> None:
    held = hold(gate, "/other", 5)
    gate._activate(read(POLICY.replace("overload: 5", "overload: 7")))
    hold(gate, "/other", 2)
    assert not gate.admit(FakeRequest("/other")).allowed
    for each in held:
        gate.finish(each, 200)
    assert gate.overload_stats()["*"].in_flight == 2
    gate._activate(read("limits: [{name: all, by: ip, bucket: 1000/hour}]"))
    assert gate.overload_stats() == {}
    assert not gate.admit(FakeRequest("/other")).needs_finish


def test_adaptive_limit_follows_the_latency_of_successful_responses() -> None:
    clock = FakeClock()
    gate = Gate(read("overload: {maximum: 30, retry_after: 3 seconds}"), clock=clock)

    def serve(seconds: float, count: int, status: int = 200) -> None:
        for _ in range(count):
            admissions = [gate.admit(FakeRequest("/")) for _ in range(18)]
            clock.advance(seconds)
            for each in admissions:
                if each.allowed:
                    gate.finish(each, status)

    serve(0.01, 30)
    before = gate.overload_stats()["*"]
    assert before.base_latency == pytest.approx(0.01)
    assert before.limit > 20
    serve(0.0, 100, 404)  # quick failures say nothing
    assert gate.overload_stats()["*"].base_latency == before.base_latency
    serve(0.05, 6)
    assert gate.overload_stats()["*"].limit < before.limit
    hold(gate, "/", gate.overload_stats()["*"].limit)
    refusal = gate.admit(FakeRequest("/")).refusal
    assert refusal is not None
    assert dict(refusal.headers)[b"retry-after"] == b"3"


def test_server_that_does_not_serve_the_requests_itself_sheds_none(gate: Gate) -> None:
    gate.serves_requests = False
    assert all(gate.admit(FakeRequest("/other")).allowed for _ in range(20))


def test_decision_log_why_and_metrics_explain_a_request_that_was_shed() -> None:
    sink = Kept()
    log = DecisionLog(sink, secret="thirty-two bytes, kept elsewhere", node="n1", every=0.005)
    traffic = Traffic(POLICY, log)
    metrics = Metrics()
    metrics.watch(traffic.gate)
    guard = Guard("database", clock=traffic.clock)
    traffic.gate.add_guard(guard)
    with guard.call("critical"):
        traffic.send(path="/export", times=5, tenant="acme")
        assert log.flush()
        found = {(sample.family.name, sample.labels): sample.value for sample in metrics.read()}
    shed = [record for record in sink.records if record.is_rejection]
    assert [(each.outcome, each.reason, each.note) for each in shed] == [
        ("unavailable", "overloaded", "background traffic was shed")
    ] * 2
    assert shed[0].words.startswith("unavailable GET /export of")
    assert shed[0].words.endswith(": overloaded, background traffic was shed")
    assert found["rate_limiter_rejections", ("none", "overload")] == 2
    assert found["rate_limiter_overload_shed", ("*", "background")] == 2
    assert found["rate_limiter_overload_limit", ("*",)] == 5
    assert found["rate_limiter_overload_in_flight", ("*",)] == 3
    assert found["rate_limiter_overload_in_flight", ("database",)] == 1
    report = why(
        _Reader(sink.records),
        ClientQuery("tenant=acme", (), {}),
        Span(datetime(2026, 11, 15, tzinfo=UTC), datetime(2026, 11, 16, tzinfo=UTC), None),
    )
    assert (report.unavailable, report.overloaded, report.denied) == (2, 2, 0)
    assert any("503" in each for each in mail(report, zone=None))
    expected = "Both were rejected because the service was overloaded: background traffic was shed."
    assert expected in details(report, zone=None)
    log.close(1)


class _Reader:
    """Finds all records."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def find(self, keys: Any, **_: Any) -> list[Any]:
        return [each for each in self._records if "lost" not in keys]

    def nearest(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None


def test_guards_take_the_priority_of_the_request(gate: Gate) -> None:
    guard = Guard("database", minimum=10, maximum=10)
    permits = [guard.acquire("normal") for _ in range(10)]
    enter_context(gate.admit(FakeRequest("/checkout")))
    with guard.call(current_priority):
        assert guard.stats().in_flight == 11
    enter_context(gate.admit(Request("/export")))
    assert current_priority() == "background"
    assert len(permits) == 10
