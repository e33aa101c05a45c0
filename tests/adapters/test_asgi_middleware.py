"""How a request passes the ASGI middleware, whatever becomes of the store, the app or the task."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from headgate.adapters.asgi import HeaderSend, HeadgateMiddleware
from headgate.gate.admission import UNLIMITED, Admission, current_admission
from headgate.policy.loader import read
from support.asgi_client import fields, scope, talk
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

POLICY = """
on_failure: {on_failure}
routes:
  - {{path: /health, cost: 0}}
limits:
  - {{name: each, by: ip, bucket: "{quota}/hour"}}
  - {{name: failed, path: /login, by: ip, bucket: 3/hour, count_when: status == 401}}
  - {{name: held, path: /jobs, by: ip, bucket: {{algorithm: concurrency, quota: 1, period: 1 minute}}}}
  - {{name: watched, path: /new, by: ip, bucket: 1/hour, shadow: true}}
  - {{name: everybody, path: /split, by: global, bucket: 1000/hour, split: 2}}
"""
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"hello"}


class App:
    """Answers, and remembers how it was called; `instead` is what it does at a path."""

    def __init__(self, **instead: Callable[[Any, Any], Awaitable[None]]) -> None:
        self.instead = {f"/{name}": function for name, function in instead.items()}
        self.admissions: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        self.admissions.append(current_admission())
        if scope["path"] in self.instead:
            return await self.instead[scope["path"]](receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.accept"})
        await send({**START, "status": 401} if scope["path"] == "/login" else START)
        return await send(END)


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis7").url


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """One that may be made to wait."""
    with RedisServer() as server:
        yield server


def gated(app: Any, store: Any, namespace: str, *, on_failure: str = "closed", quota: int = 5, **more: Any) -> Any:
    policy = read(POLICY.format(on_failure=on_failure, quota=quota))
    return HeadgateMiddleware(app, policy, store, namespace=namespace, budget=more.pop("budget", 1.0), **more)


async def ask(app: Any, path: str = "/", **more: Any) -> int:
    """The status of the answer."""
    status: int = (await talk(app, scope(path, **more)))[0]["status"]
    return status


async def again(app: Any, path: str = "/", times: int = 3) -> list[int]:
    return [await ask(app, path) for _ in range(times)]


# -- Everything as ever ----------------------------------------------------------------------------------------------


def test_allowed_requests_are_served_and_denied_ones_rejected(store: str, unique: str) -> None:
    app = App()

    async def run() -> None:
        gate = gated(app, store, unique)
        assert await again(gate, times=7) == [200] * 5 + [429] * 2
        assert await ask(gate, client=("203.0.113.77", 1)) == 200
        assert await again(gate, "/health") == [200] * 3
        await gate.gate.close()

    asyncio.run(run())
    assert [admission is UNLIMITED for admission in app.admissions] == [False] * 6 + [True] * 3
    assert [admission.decision.remaining for admission in app.admissions[:6]] == [4, 3, 2, 1, 0, 4]


def test_what_takes_more_than_a_check_is_done_too(store: str, unique: str) -> None:
    app = App()

    async def run() -> None:
        gate = gated(app, store, unique, quota=100)
        assert await again(gate, "/login", 4) == [401] * 3 + [429], "settled by the answer"
        assert await again(gate, "/jobs") == [200] * 3, "held only while it is served"
        assert await again(gate, "/new") == [200] * 3
        assert await again(gate, "/split") == [200] * 3, "counted in one of two parts"
        sent = await talk(gate, scope("/", "websocket"))
        assert (sent[0]["type"], "ratelimit" in fields(sent[0])) == ("websocket.accept", True)
        assert [message["type"] for message in await talk(gate, {"type": "lifespan"})] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
        ]

    asyncio.run(run())
    shadows = [admission.shadows for admission in app.admissions if admission.shadows]
    assert [len(shadow) for shadow in shadows] == [1] * 3
    assert [shadow[0].decision.allowed for shadow in shadows] == [True, False, False]


def test_fields_are_those_of_the_admission(store: str, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), store, unique)
        for remaining in ("4", "3", "2"):
            [start, end] = await talk(gate, scope("/"))
            assert fields(start)["x-ratelimit-remaining"] == remaining
            assert end == END
        await gate.gate.close()

    asyncio.run(run())


def test_decision_listener_receives_every_decision(store: str, unique: str) -> None:
    heard: list[Any] = []

    async def run() -> None:
        gate = gated(App(), store, unique, on_decision=lambda arrival, admission: heard.append(admission.allowed))
        await again(gate, times=6)
        gate.gate.on_decision = None
        await again(gate, times=2)
        await gate.gate.close()

    asyncio.run(run())
    assert heard == [True] * 5 + [False]


def test_denial_is_remembered_as_ever(redis7: RedisServer, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), redis7.url, unique)
        assert await again(gate, times=40) == [200] * 5 + [429] * 35
        # Not the first of them; and when the news of other processes begin to be heard, all start anew.
        assert gate.gate._limiter.stats["remembered"] >= 20
        await gate.gate.close()

    asyncio.run(run())


# -- In the task of whoever waits ------------------------------------------------------------------------------------


def test_admission_is_current_while_its_request_is_served(store: str, unique: str) -> None:
    async def broken(receive: Any, send: Any) -> None:
        raise KeyError("of the app")

    async def run() -> None:
        gate = gated(App(broken=broken), store, unique, quota=100)
        for _ in range(3):
            await ask(gate)
            assert current_admission() is UNLIMITED
            with pytest.raises(KeyError, match="of the app"):
                await ask(gate, "/broken")
            assert current_admission() is UNLIMITED
        assert all(admission is not UNLIMITED for admission in gate.app.admissions)
        await gate.gate.close()

    asyncio.run(run())


def test_nothing_happens_before_it_is_awaited(store: str, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), store, unique)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        for _ in range(2):
            await ask(gate)
        unused: Any = gate(scope("/"), None, send)
        unused.close()
        assert await again(gate) == [200] * 3, "it was not counted"
        await asyncio.create_task(gate(scope("/health"), None, send))
        await asyncio.wait_for(gate(scope("/health"), None, send), 5)
        assert current_admission() is UNLIMITED
        assert len(sent) == 4
        await gate.gate.close()

    asyncio.run(run())


def test_app_may_be_cancelled_or_left(store: str, unique: str) -> None:
    seen: list[str] = []
    is_there = asyncio.Event()

    async def slow(receive: Any, send: Any) -> None:
        is_there.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def stubborn(receive: Any, send: Any) -> None:
        is_there.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(0)
        await send(START)

    async def begun(gate: Any, path: str) -> asyncio.Task[int]:
        task = asyncio.create_task(ask(gate, path))
        await asyncio.wait_for(is_there.wait(), 10)
        is_there.clear()
        return task

    async def run() -> None:
        gate = gated(App(slow=slow, stubborn=stubborn), store, unique, quota=100)
        for _ in range(3):
            task = await begun(gate, "/slow")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            task = await begun(gate, "/stubborn")
            task.cancel()
            assert await task == 200, "it is the app's to say what becomes of that"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(gate, "/slow"), 0.01)
        assert await ask(gate) == 200
        await gate.gate.close()

    asyncio.run(run())
    assert seen == ["cancelled"] * 4


def test_client_gone_during_the_check_is_not_served(own_redis: RedisServer, unique: str) -> None:
    app = App()

    async def run() -> None:
        gate = gated(app, own_redis.url, unique, quota=100)
        await again(gate)
        app.admissions.clear()
        with own_redis.client() as client:
            client.execute_command("CLIENT", "PAUSE", "300", "ALL")
        asked = gate.gate._limiter.stats["round_trips"]
        tasks = [asyncio.create_task(ask(gate)) for _ in range(4)]
        for _ in range(5):  # turns of the loop, in which they ask
            await asyncio.sleep(0)
        assert gate.gate._limiter.stats["round_trips"] > asked
        for task in tasks[:3]:
            task.cancel()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [*[_Cancelled()] * 3, 200]
        assert len(app.admissions) == 1
        await gate.gate.close()

    asyncio.run(run())


class _Cancelled:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, asyncio.CancelledError)

    __hash__ = None  # type: ignore[assignment]


# -- The store fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503), ("local", 200)])
def test_each_route_has_its_own_answer_when_the_store_fails(
    own_redis: RedisServer, unique: str, on_failure: str, status: int
) -> None:
    app = App()

    async def run() -> None:
        gate = gated(app, own_redis.url, unique, on_failure=on_failure, quota=100, budget=0.1)
        await again(gate)
        app.admissions.clear()
        with own_redis.client() as client:
            client.execute_command("CLIENT", "PAUSE", "400", "ALL")
        tasks = [asyncio.create_task(ask(gate)) for _ in range(5)]
        assert await asyncio.gather(*tasks) == [status] * 5
        degraded = [admission.decision.degraded for admission in app.admissions]
        assert [reason.split(":")[0] for reason in degraded] == [on_failure] * (5 if status == 200 else 0)
        assert gate.gate.health().state == "degraded"
        await gate.gate.close()

    asyncio.run(run())


def test_servers_see_that_the_middleware_is_asynchronous() -> None:
    """uvicorn takes an app whose `__call__` is not a coroutine function for one of ASGI 2."""
    assert inspect.iscoroutinefunction(gated(App(), "memory://", "x").__call__)


# -- The last message of an answer -----------------------------------------------------------------------------------


def granted() -> Any:
    """An admission without headers."""
    return Admission(None, None, None, None, 0)


def test_answer_may_end_in_a_task_of_its_own_more_than_once_or_not_at_all() -> None:
    current: list[Any] = []
    last = {"type": "http.response.body"}

    async def send(message: Any) -> None:
        current.append(current_admission())
        if message is not last:
            raise OSError("the client is gone")

    async def serve() -> None:
        admission: Any = granted()
        telling = HeaderSend(send, admission)
        for _ in range(2):
            await asyncio.create_task(telling(last))
            await telling(last)
            assert current_admission() is admission
        with pytest.raises(OSError, match="gone"):
            await telling({"type": "http.response.body", "body": b"..."})
        assert current_admission() is admission
        telling.leave()
        telling.leave()
        assert current_admission() is UNLIMITED

    asyncio.run(serve())
    assert current == [UNLIMITED] * 5


def test_server_may_have_to_wait_for_its_client() -> None:
    """And be cancelled then, or told of an error: it is the server's to hear, and what runs after it is as ever."""
    current: list[Any] = []
    last = {"type": "http.response.body"}

    async def send(message: Any) -> None:
        for _ in range(2):
            current.append(current_admission())
            try:
                await flowing
            except asyncio.CancelledError:
                current.append("cancelled")
                raise

    async def serve() -> None:
        nonlocal flowing
        admission: Any = granted()
        telling = HeaderSend(send, admission)
        for error in (None, OSError("gone")):
            flowing = loop.create_future()
            loop.call_soon(*([flowing.set_result, None] if error is None else [flowing.set_exception, error]))
            with suppress(OSError):
                await telling(last)
            assert current_admission() is admission
        flowing = loop.create_future()
        task = asyncio.current_task()
        assert task is not None
        loop.call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await telling(last)
        assert current_admission() is admission
        flowing = loop.create_future()
        begun: Any = telling(last)
        begun.send(None)
        begun.close()
        assert current_admission() is admission
        telling.leave()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        flowing: asyncio.Future[None]
        runner.run(serve())
    assert current == [UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, "cancelled", UNLIMITED]


def test_server_may_send_by_whatever_can_be_awaited() -> None:
    last = {"type": "http.response.body"}

    def send(message: Any) -> asyncio.Future[None]:
        current.append(current_admission())
        return asyncio.ensure_future(asyncio.sleep(0))

    current: list[Any] = []

    async def serve() -> None:
        admission: Any = granted()
        telling = HeaderSend(send, admission)
        await telling(last)
        assert current_admission() is admission
        telling.leave()

    asyncio.run(serve())
    assert current == [UNLIMITED]


def test_what_is_sent_can_be_awaited_or_made_a_task_of() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def serve() -> None:
        admission: Any = granted()
        telling: Any = HeaderSend(send, admission)
        last = {"type": "http.response.body"}
        await telling(last)
        await asyncio.create_task(telling(last))
        await asyncio.gather(telling(last), telling(last))
        telling.leave()

    asyncio.run(serve())
    assert len(sent) == 4
