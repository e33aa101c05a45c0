"""The operations behind the JSON and gRPC APIs: settlement of reservations, and the bounds."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter
from headgate.abuse.model import AbuseScenario, ActionStep, Finding, Threshold
from headgate.gate.gate import AsyncGate
from headgate.policy import read
from headgate.server.check_service import (
    CheckBody,
    CheckService,
    CommitBody,
    DeadlineExceeded,
    LeaseBody,
    LimitsBody,
    RefundBody,
    ServerOverloaded,
)
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headgate.failure import FailureMode
    from support.servers import RedisServer

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "gcra", "leaky_bucket")
POLICY = """
routes: [{path: /pay, on_failure: closed}, {path: /read, on_failure: open}]
limits: [{name: per-ip, by: ip, bucket: 100/minute}]
"""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def limit(name: str, **more: Any) -> dict[str, Any]:
    return {"limit": "100/minute", "name": name, "by": ["ada"], **more}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_commit_is_charged_once_and_says_what_was_not(store_url: str, unique: str, algorithm: str) -> None:
    reserved = [limit(unique, cost=80, algorithm=algorithm)]

    async def test() -> None:
        clock = FakeClock(1_700_000_000_000_000)
        async with AsyncLimiter(store_url, clock=clock, budget=5) as limiter:
            service = CheckService(limiter, deadline=10)
            assert (await service.reserve(LeaseBody(limits=reserved, id="r-1"))).remaining == 20
            commit = CommitBody(limits=reserved, id="r-1", actual=130)
            first = await service.commit(commit)
            assert (first.allowed, first.remaining, first.limits[0].uncharged) == (False, 0, 30)
            assert first.denied_by == [unique]
            assert first.reason == f"30 of the actual cost not charged to {unique}"
            clock.advance(30)
            left = (await service.peek(LimitsBody(limits=reserved))).remaining
            for _ in range(2):
                again = await service.commit(commit)
                assert (again.allowed, again.remaining, again.limits[0].uncharged) == (False, left, 30)

    run(test)


def test_a_commit_on_an_empty_limit_is_not_charged_later(store_url: str, unique: str) -> None:
    reserved = [limit(unique, cost=100)]

    async def test() -> None:
        clock = FakeClock(1_700_000_000_000_000)
        async with AsyncLimiter(store_url, clock=clock, budget=5) as limiter:
            service = CheckService(limiter, deadline=10)
            await service.reserve(LeaseBody(limits=reserved, id="r-1"))
            commit = CommitBody(limits=reserved, id="r-1", actual=130)
            assert (await service.commit(commit)).limits[0].uncharged == 30
            clock.advance(30)
            again = await service.commit(commit)
            assert (again.remaining, again.limits[0].uncharged) == (50, 30)

    run(test)


def test_concurrent_commits_and_refunds_of_one_id_count_once(store_url: str, unique: str) -> None:
    more, less = limit(f"{unique}-more", cost=10), limit(f"{unique}-less", cost=60)

    async def test() -> None:
        clock = FakeClock(1_700_000_000_000_000)
        async with AsyncLimiter(store_url, clock=clock, budget=5) as limiter:
            service = CheckService(limiter, deadline=10)
            await service.reserve(LeaseBody(limits=[more, less], id="r-1"))
            commit = CommitBody(limits=[more, less], id="r-1", actual=30)
            answers = await asyncio.gather(*[service.commit(commit) for _ in range(20)])
            assert all(each.allowed for each in answers)
            peeked = await service.peek(LimitsBody(limits=[more, less]))
            assert [each.remaining for each in peeked.limits] == [70, 70]
            await service.check(CheckBody(limits=[more], id="r-2"))
            refund = RefundBody(limit=more, amount=50, id="r-2")
            changed = [each.changed for each in await asyncio.gather(*[service.refund(refund) for _ in range(20)])]
            assert changed.count(True) == 1
            assert (await service.peek(LimitsBody(limits=[more]))).remaining == 70

    run(test)


@pytest.mark.parametrize(("mode", "allowed"), [("open", True), ("closed", False), ("local", True), ("raise", None)])
def test_overload_and_deadlines_are_answered_by_the_failure_mode(
    server: RedisServer, mode: FailureMode, allowed: bool | None
) -> None:
    body = CheckBody(limits=[{"limit": "1000/minute"}])

    async def test() -> None:
        async with AsyncLimiter(server.url, on_failure=mode, budget=30) as limiter:
            service = CheckService(limiter, max_concurrent=5, deadline=1)
            assert (await service.check(body)).degraded is None
            server.pause()
            try:
                waiting = [asyncio.create_task(service.check(body)) for _ in range(5)]
                await asyncio.sleep(0)
                rejected = await asyncio.gather(*[service.check(body) for _ in range(20)], return_exceptions=True)
                assert not any(task.done() for task in waiting)  # nobody waited for them
                late = await asyncio.gather(*waiting, return_exceptions=True)
            finally:
                server.resume()
            if allowed is None:
                assert [type(each) for each in (*rejected, *late)] == [ServerOverloaded] * 20 + [DeadlineExceeded] * 5
            else:
                assert [each.allowed for each in (*rejected, *late)] == [allowed] * 25
                assert all(each.degraded.startswith(f"{mode}: 5 requests are in progress") for each in rejected)
                assert all(each.degraded.startswith(f"{mode}: no answer within 1 s") for each in late)

    run(test)


def test_overload_is_answered_by_the_failure_mode_of_the_route(server: RedisServer) -> None:
    def ask(path: str) -> CheckBody:
        return CheckBody.model_validate({"request": {"path": path, "ip": "203.0.113.9"}})

    async def test() -> None:
        async with AsyncLimiter(server.url, budget=30) as limiter:
            gate = AsyncGate(read(POLICY), server.url, budget=30)
            service = CheckService(limiter, gate, max_concurrent=5, deadline=1)
            assert (await service.check(ask("/read"))).allowed
            server.pause()
            try:
                waiting = [asyncio.create_task(service.check(ask("/pay"))) for _ in range(5)]
                await asyncio.sleep(0)
                opened, closed = await asyncio.gather(service.check(ask("/read")), service.check(ask("/pay")))
                late = await asyncio.gather(*waiting)
            finally:
                server.resume()
            assert (opened.allowed, str(opened.degraded).partition(":")[0]) == (True, "open")
            assert (closed.allowed, closed.status) == (False, 503)
            assert [(each.allowed, each.status) for each in late] == [(False, 503)] * 5
            await gate.close()

    run(test)


def test_held_requests_neither_time_out_nor_keep_others_out() -> None:
    def ask(ip: str) -> CheckBody:
        return CheckBody.model_validate({"request": {"path": "/read", "ip": ip}})

    async def test() -> None:
        async with AsyncLimiter() as limiter:
            gate = AsyncGate(read("limits: [{by: ip, bucket: 100/minute}]"))
            service = CheckService(limiter, gate, max_concurrent=8, deadline=0.2)
            steps = (ActionStep("delay", timedelta(minutes=5), delay=timedelta(seconds=10)),)
            scraping = AbuseScenario("scraping", "ip", (Threshold("paths", 9),), timedelta(minutes=1), steps)
            gate.actions.apply(Finding("scraping", "ip", "203.0.113.9", 0, "paths", 10, 9, "10 paths"), scraping)
            held = [asyncio.create_task(service.check(ask("203.0.113.9"))) for _ in range(5)]
            await asyncio.sleep(0)
            assert (await service.check(ask("192.0.2.1"))).allowed
            found = await asyncio.gather(*held)
            assert sorted([(each.allowed, each.status) for each in found], key=str) == [
                *[(False, 429)] * 3,
                *[(True, None)] * 2,
            ]
            assert {each.degraded for each in found} == {None}
            await gate.close()

    run(test)
