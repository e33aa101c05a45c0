"""Guards in code: blocks, decorators, asyncio, exceptions, and the pools and transports that use them."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import QueuePool

from headgate.errors import InvalidConfiguration
from headgate.overload import Guard, Overloaded
from headgate.overload.httpx import AsyncGuardedTransport, GuardedTransport
from headgate.overload.psycopg import AsyncGuardedPool, GuardedPool
from headgate.overload.sqlalchemy import protect
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from support.postgres import PostgresServer


def one_at_a_time(**options: Any) -> Guard:
    return Guard("database", minimum=1, maximum=1, **options)


def test_block_is_shed_before_it_runs() -> None:
    guard = one_at_a_time()
    with guard.call(), pytest.raises(Overloaded) as shed, guard.call("background"):
        pytest.fail("it ran")
    assert str(shed.value) == "database is overloaded: a background call was shed; try again in 1 s"
    assert (shed.value.guard, shed.value.priority, shed.value.retry_after) == ("database", "background", 1.0)
    assert str(pickle.loads(pickle.dumps(shed.value))) == str(shed.value)
    with guard.call("background"):
        assert guard.stats().in_flight == 1
    assert guard.stats().in_flight == 0


def test_decorated_functions_are_guarded_each_time() -> None:
    guard = one_at_a_time()

    @guard.call("normal")
    def plain(depth: int) -> int:
        return plain(depth - 1) if depth else 0

    @guard.call("normal")
    async def asynchronous(depth: int) -> int:
        await asyncio.sleep(0)
        return await asynchronous(depth - 1) if depth else 0

    assert [plain(0), plain(0), asyncio.run(asynchronous(0))] == [0, 0, 0]
    with pytest.raises(Overloaded):
        plain(1)
    with pytest.raises(Overloaded):
        asyncio.run(asynchronous(1))
    assert guard.stats().in_flight == 0


def test_async_block() -> None:
    guard = one_at_a_time()

    async def run() -> None:
        async with guard.call():
            with pytest.raises(Overloaded):
                async with guard.call():
                    pass

    asyncio.run(run())
    assert guard.stats().in_flight == 0


def test_priority_may_come_from_the_request() -> None:
    guard = Guard("database", minimum=10, maximum=10)
    permits = [guard.acquire("background") for _ in range(6)]
    with pytest.raises(Overloaded, match="a background call"), guard.call(lambda: "background"):
        pass
    with guard.call(lambda: "critical"):
        pass
    assert len(permits) == 6


@pytest.mark.parametrize(("error", "is_drop"), [(TimeoutError(), True), (ValueError(), False), (None, False)])
def test_timeouts_lower_the_limit(error: Exception | None, is_drop: bool) -> None:
    clock = FakeClock()
    guard = Guard("database", clock=clock)
    for _ in range(3):
        permit = guard.acquire()
        clock.advance(0.06)
        guard.release(permit, error)
    assert (guard.stats().limit < 20) is is_drop


def test_mistakes_are_named() -> None:
    guard = one_at_a_time()
    with pytest.raises(InvalidConfiguration, match="priority 'high' is unknown; use one of critical, normal"):
        guard.call("high")
    with pytest.raises(InvalidConfiguration, match="guard name ''"):
        Guard("")
    with pytest.raises(InvalidConfiguration, match="retry_after 0"):
        Guard("database", retry_after=0)
    with pytest.raises(InvalidConfiguration, match="is a generator"):
        guard.call()(lambda: (yield))
    call = guard.call()
    with call, pytest.raises(InvalidConfiguration, match="entered twice"):
        call.__enter__()
    assert guard.stats().in_flight == 0


def test_sqlalchemy_engine(tmp_path: Path) -> None:
    guard = Guard("database", minimum=2, maximum=2)
    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}", poolclass=QueuePool, pool_size=5)
    protect(engine, guard)
    with engine.connect() as first, engine.connect() as second:
        assert guard.stats().in_flight == 2
        with pytest.raises(Overloaded):
            engine.connect()
        assert [each.execute(text("SELECT 1")).scalar() for each in (first, second)] == [1, 1]
    assert guard.stats().in_flight == 0
    assert engine.pool.checkedin() == 2  # what was shed has closed no connection
    with engine.connect() as connection:
        connection.invalidate()
    with engine.connect() as connection:
        connection.detach()
        assert guard.stats().in_flight == 0
    engine.dispose()
    with engine.connect():
        assert guard.stats().in_flight == 1
    assert guard.stats().in_flight == 0
    engine.dispose()


def test_sqlalchemy_failed_connection_frees_its_place(tmp_path: Path) -> None:
    guard = one_at_a_time()
    engine = create_engine(f"sqlite:///{tmp_path / 'missing' / 'a.db'}")
    protect(engine, guard)
    for _ in range(2):
        with pytest.raises(Exception, match="unable to open"):
            engine.connect()
    assert guard.stats().in_flight == 0


def test_sqlalchemy_pool_timeouts_lower_the_limit() -> None:
    clock = FakeClock()
    guard = Guard("database", clock=clock)
    options: Any = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0}
    engine = create_engine("sqlite://", poolclass=QueuePool, **options)
    protect(engine, guard)
    with engine.connect():
        for _ in range(3):
            clock.advance(0.1)
            with pytest.raises(PoolTimeout):
                engine.connect()
    assert guard.stats().limit < 20
    assert guard.stats().in_flight == 0
    engine.dispose()


def latency_after(guard: Guard, calls: Callable[[str], None], statement: str) -> float:
    """The latency that was measured in calls of 10 ms each with this statement."""
    for _ in range(30):
        with suppress(DBAPIError, psycopg.Error):
            calls(statement)
    return guard.stats().latency


def test_latency_of_failed_statements_is_ignored(postgres: PostgresServer) -> None:
    clock = FakeClock()

    def run(connection: Any, statement: Any) -> None:
        clock.advance(0.01)
        connection.execute(statement)

    def through_sqlalchemy(statement: str) -> None:
        with engine.connect() as connection:
            run(connection, text(statement))

    def through_psycopg(statement: str) -> None:
        with pool.connection() as connection:
            run(connection, statement)

    async def through_async_psycopg(statement: str) -> float:
        guard = Guard("database", clock=clock)
        async with AsyncGuardedPool(postgres.url, guard=guard, min_size=1, open=False) as pool:
            for _ in range(30):
                with suppress(psycopg.Error):
                    async with pool.connection() as connection:
                        clock.advance(0.01)
                        await connection.execute(statement)
        return guard.stats().latency

    for statement, latency in (("SELECT missing", 0.0), ("SELECT 1", 0.01)):
        guard = Guard("database", clock=clock)
        engine = create_engine(postgres.url.replace("postgresql://", "postgresql+psycopg://"))
        protect(engine, guard)
        assert latency_after(guard, through_sqlalchemy, statement) == pytest.approx(latency)
        engine.dispose()
        guard = Guard("database", clock=clock)
        with GuardedPool(postgres.url, guard=guard, min_size=1) as pool:
            assert latency_after(guard, through_psycopg, statement) == pytest.approx(latency)
        assert asyncio.run(through_async_psycopg(statement)) == pytest.approx(latency)


def test_psycopg_pool(postgres: PostgresServer) -> None:
    guard = Guard("database", minimum=2, maximum=2)
    with GuardedPool(postgres.url, guard=guard, min_size=1, max_size=4) as pool:
        with pool.connection() as first, pool.connection():
            assert first.execute("SELECT 1").fetchone() == (1,)
            assert guard.stats().in_flight == 2
            with pytest.raises(Overloaded), pool.connection():
                pass
        with pytest.raises(ValueError, match="broken"), pool.connection():
            raise ValueError("broken")
        assert guard.stats().in_flight == 0


def test_psycopg_async_pool_and_sqlalchemy_async_engine(postgres: PostgresServer) -> None:
    guard = one_at_a_time()

    async def run() -> None:
        async with AsyncGuardedPool(postgres.url, guard=guard, min_size=1, open=False) as pool:
            async with pool.connection() as connection:
                assert await (await connection.execute("SELECT 1")).fetchone() == (1,)
                with pytest.raises(Overloaded):
                    async with pool.connection():
                        pass
            assert guard.stats().in_flight == 0
        engine = create_async_engine(postgres.url.replace("postgresql://", "postgresql+psycopg://"))
        protect(engine, guard)
        async with engine.connect() as other:
            assert (await other.execute(text("SELECT 1"))).scalar() == 1
            with pytest.raises(Overloaded):
                await engine.connect()
        assert guard.stats().in_flight == 0
        await engine.dispose()

    asyncio.run(run())


def test_httpx_transport_holds_its_place_until_the_response_is_closed() -> None:
    guard = one_at_a_time()
    transport = GuardedTransport(guard, httpx.MockTransport(lambda _: httpx.Response(200, content=iter([b"hello"]))))
    with httpx.Client(transport=transport, base_url="http://api.example.com") as client:
        with client.stream("GET", "/") as response:
            assert guard.stats().in_flight == 1
            with pytest.raises(Overloaded):
                client.get("/")
            assert response.read() == b"hello"
        assert [client.get("/").text for _ in range(3)] == ["hello"] * 3
    assert guard.stats().in_flight == 0


def test_httpx_async_transport() -> None:
    guard = one_at_a_time()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"hello"

    async def run() -> None:
        transport = AsyncGuardedTransport(guard, httpx.MockTransport(lambda _: httpx.Response(200, content=chunks())))
        async with httpx.AsyncClient(transport=transport, base_url="http://api.example.com") as client:
            async with client.stream("GET", "/") as response:
                with pytest.raises(Overloaded):
                    await client.get("/")
                assert await response.aread() == b"hello"
            assert (await client.get("/")).text == "hello"

    asyncio.run(run())
    assert guard.stats().in_flight == 0


def reject(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503)


def time_out(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("slow", request=request)


def break_down(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.mark.parametrize(("answer", "is_drop"), [(reject, True), (time_out, True), (break_down, False)])
def test_httpx_rejections_and_timeouts_lower_the_limit(answer: Any, is_drop: bool) -> None:
    clock = FakeClock()
    guard = Guard("api", clock=clock)

    def slow(request: httpx.Request) -> httpx.Response:
        clock.advance(0.06)
        response: httpx.Response = answer(request)
        return response

    with httpx.Client(transport=GuardedTransport(guard, httpx.MockTransport(slow))) as client:
        for _ in range(3):
            try:
                client.get("http://api.example.com/")
            except httpx.TransportError:
                continue
    assert (guard.stats().limit < 20) is is_drop
    assert guard.stats().in_flight == 0
