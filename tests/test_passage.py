"""How a request passes the ASGI middleware: the same in C as in Python, whatever becomes of the store, the app or the
task."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import pytest

from asgi_client import fields, scope, talk
from growth import assert_nothing_grows
from headgate.adapters.asgi import AsgiArrival, HeadgateMiddleware, PlainEntrance
from headgate.adapters.way import FREE, current_admission
from headgate.errors import StoreUnavailable
from headgate.policy.loading import read
from headgate.testing import FakeClock
from servers import RedisServer

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
Passage = import_module("headgate.adapters._passage").Passage
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


class Plain(HeadgateMiddleware):
    __call__ = PlainEntrance.__call__


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How requests pass, in all tests that ask for it."""
    if request.param == "plain":
        monkeypatch.setattr(sys.modules[__name__], "HeadgateMiddleware", Plain)
    which: str = request.param
    return which


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


def test_who_may_pass_is_served_and_who_may_not_is_refused(way: str, store: str, unique: str) -> None:
    app = App()

    async def run() -> None:
        gate = gated(app, store, unique)
        assert await again(gate, times=7) == [200] * 5 + [429] * 2
        assert await ask(gate, client=("203.0.113.77", 1)) == 200
        assert await again(gate, "/health") == [200] * 3
        await gate.gate.close()

    asyncio.run(run())
    assert [admission is FREE for admission in app.admissions] == [False] * 6 + [True] * 3
    assert [admission.decision.remaining for admission in app.admissions[:6]] == [4, 3, 2, 1, 0, 4]


def test_what_takes_more_than_a_check_is_done_too(way: str, store: str, unique: str) -> None:
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


def test_the_fields_are_those_of_the_admission(way: str, store: str, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), store, unique)
        for remaining in ("4", "3", "2"):
            [start, end] = await talk(gate, scope("/"))
            assert fields(start)["x-ratelimit-remaining"] == remaining
            assert end == END
        await gate.gate.close()

    asyncio.run(run())


def test_only_who_is_new_or_special_takes_the_long_way(store: str, unique: str) -> None:
    """Else the tests here would compare that with itself."""
    taken: list[str] = []

    async def run() -> None:
        gate = gated(App(), store, unique, quota=100)
        admit = gate.gate.admit

        def watched(arrival: Any) -> Any:
            taken.append(arrival.path)
            return admit(arrival)

        gate.gate.admit = watched
        await ask(gate)
        gate.gate._front.is_alert = False  # as it is after the first checks
        for path in ("/", "/", "/jobs", "/jobs", "/new", "/new", "/split", "/split", "/", "/"):
            await ask(gate, path)
        await gate.gate.close()

    asyncio.run(run())
    assert [path for path in taken if path in ("/", "/jobs", "/new")] == ["/", "/jobs", "/jobs", "/new", "/new"]


def test_somebody_may_listen_to_every_decision(way: str, store: str, unique: str) -> None:
    heard: list[Any] = []

    async def run() -> None:
        gate = gated(App(), store, unique, on_decision=lambda arrival, admission: heard.append(admission.allowed))
        await again(gate, times=6)
        gate.gate.on_decision = None
        await again(gate, times=2)
        await gate.gate.close()

    asyncio.run(run())
    assert heard == [True] * 5 + [False]


def test_a_denial_is_remembered_as_ever(way: str, redis7: RedisServer, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), redis7.url, unique)
        assert await again(gate, times=40) == [200] * 5 + [429] * 35
        # Not the first of them; and when the news of other processes begin to be heard, all start anew.
        assert gate.gate._limiter.stats["remembered"] >= 20
        await gate.gate.close()

    asyncio.run(run())


# -- In the task of whoever waits ------------------------------------------------------------------------------------


def test_an_admission_is_current_while_its_request_is_served(way: str, store: str, unique: str) -> None:
    async def broken(receive: Any, send: Any) -> None:
        raise KeyError("of the app")

    async def run() -> None:
        gate = gated(App(broken=broken), store, unique, quota=100)
        for _ in range(3):
            await ask(gate)
            assert current_admission() is FREE
            with pytest.raises(KeyError, match="of the app"):
                await ask(gate, "/broken")
            assert current_admission() is FREE
        assert all(admission is not FREE for admission in gate.app.admissions)
        await gate.gate.close()

    asyncio.run(run())


def test_nothing_happens_before_it_is_awaited(way: str, store: str, unique: str) -> None:
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
        assert current_admission() is FREE
        assert len(sent) == 4
        await gate.gate.close()

    asyncio.run(run())


def test_the_app_may_be_cancelled_or_left(way: str, store: str, unique: str) -> None:
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


def test_who_goes_while_the_store_is_asked_is_served_no_more(way: str, own_redis: RedisServer, unique: str) -> None:
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
    way: str, own_redis: RedisServer, unique: str, on_failure: str, status: int
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


def test_what_a_bug_of_ours_raises_is_not_taken_for_an_outage(redis7: RedisServer, unique: str) -> None:
    async def run() -> None:
        gate = gated(App(), redis7.url, unique)
        await again(gate)

        def ask_nobody(_: Any) -> Any:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(ZeroDivisionError("of ours"))
            return future

        gate.gate._asking = *gate.gate._asking[:3], ask_nobody
        with pytest.raises(ZeroDivisionError, match="of ours"):
            await ask(gate)
        assert gate.gate.health().state == "ready"
        for wrong, error in ((lambda _: 5, TypeError), (lambda _: 1 / 0, ZeroDivisionError)):
            gate.gate._asking = *gate.gate._asking[:3], wrong
            with pytest.raises(error):
                await ask(gate)
        assert current_admission() is FREE
        await gate.gate.close()

    asyncio.run(run())


# -- What servers and event loops do with it --------------------------------------------------------------------------


def test_servers_see_that_it_is_asynchronous(way: str) -> None:
    """Else some take it for an app of WSGI, or of an ASGI that is long gone."""
    app = gated(App(), "memory://", "x")
    assert inspect.iscoroutinefunction(app.__call__)
    assert asyncio.iscoroutinefunction(app.__call__)

    async def run() -> None:
        passage = app(scope=scope("/"), receive=None, send=None)
        assert asyncio.iscoroutine(passage)
        assert type(passage) is (CoroutineType if way == "plain" else Passage)
        passage.close()
        assert (await talk(app.__call__, scope("/")))[0]["status"] == 200

    asyncio.run(run())


def test_an_app_may_answer_with_whatever_can_be_awaited(way: str) -> None:
    class Done:
        def __await__(self) -> Iterator[None]:
            return iter(())

    class Odd:
        def __await__(self) -> Any:
            return 5

    async def later() -> None:
        await asyncio.sleep(0)

    def answers(made: Callable[[], Any]) -> Any:
        return gated(lambda *_: made(), "memory://", "x", clock=FakeClock())

    async def run() -> None:
        for made in (Done, later, lambda: asyncio.ensure_future(later())):
            for _ in range(2):
                await answers(made)(scope("/"), None, None)
        for made, told in ((Odd, "__await__.. returned non-iterator of type 'int'"), (object, "object can't be used")):
            app = answers(made)
            for _ in range(2):
                with pytest.raises(TypeError, match=told):
                    await app(scope("/"), None, None)
                assert current_admission() is FREE

    asyncio.run(run())


def test_it_is_one_for_debuggers_too(way: str, store: str, unique: str) -> None:
    """Which have coroutines go on by other means."""

    async def run() -> None:
        gate = gated(App(), store, unique)
        sys.settrace(lambda *_: None)
        try:
            assert await again(gate, times=6) == [200] * 5 + [429]
        finally:
            sys.settrace(None)
        await gate.gate.close()

    asyncio.run(run())


def waiting(seen: list[Any]) -> Any:
    """A passage whose app waits, and its first step."""

    class Step:
        def __await__(self) -> Any:
            try:
                seen.append((yield "a step"))
                seen.append((yield "another"))
            except ValueError as error:
                seen.append(error)
                yield "a last one"
            finally:
                seen.append(current_admission() is FREE)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Step()

    middleware = gated(app, "memory://", "x", clock=FakeClock())
    return middleware(scope("/"), None, None)


def test_it_can_be_driven_by_hand(way: str) -> None:
    seen: list[Any] = []
    passage = waiting(seen)
    assert (passage.send(None), passage.send(5)) == ("a step", "another")
    with pytest.raises(StopIteration) as stop:
        passage.send(6)
    assert stop.value.value is None
    assert seen == [5, 6, False]
    assert current_admission() is FREE
    with pytest.raises(RuntimeError, match="cannot reuse already awaited"):
        passage.send(None)


OLD_FORM = "ignore:the .type, exc, tb. signature of throw:DeprecationWarning"
"""From Python 3.12 on, coroutines warn of the form in which it still throws itself."""


@pytest.mark.filterwarnings(OLD_FORM)
@pytest.mark.parametrize("thrown", [(ValueError("x"),), (ValueError,), (ValueError, ValueError("x"), None)])
def test_what_is_thrown_is_the_apps_to_catch(way: str, thrown: tuple[Any, ...]) -> None:
    seen: list[Any] = []
    passage = waiting(seen)
    passage.send(None)
    assert passage.throw(*thrown) == "a last one"
    with pytest.raises(KeyError):
        passage.throw(KeyError("y"))
    assert isinstance(seen[0], ValueError)
    assert seen[1:] == [False]
    assert current_admission() is FREE


@pytest.mark.filterwarnings(OLD_FORM)
def test_what_is_thrown_before_it_begins_ends_it(way: str) -> None:
    for thrown in ((ValueError("x"),), (ValueError, "x"), (ValueError, ValueError("x"), None)):
        passage = waiting(seen := [])
        with pytest.raises(ValueError, match="x"):
            passage.throw(*thrown)
        assert seen == []
        with pytest.raises(RuntimeError):
            passage.send(None)
    for wrong in ((), (1, 2, 3, 4), ("no exception",)):
        passage = waiting([])
        with pytest.raises(TypeError):
            passage.throw(*wrong)
        passage.close()


def test_it_can_be_closed_at_any_time(way: str) -> None:
    waiting([]).close()
    passage = waiting(seen := [])
    passage.send(None)
    passage.close()
    passage.close()
    assert seen == [False]
    assert current_admission() is FREE


def test_it_does_not_go_on_while_it_goes_on(way: str) -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for step in (passage.close, lambda: passage.send(None), lambda: passage.throw(KeyError("x"))):
            with pytest.raises(ValueError, match="already executing") as refused:
                step()
            told.append(str(refused.value))

    middleware = gated(app, "memory://", "x", clock=FakeClock())
    for _ in range(2):
        passage = middleware(scope("/"), None, None)
        with pytest.raises(StopIteration):
            passage.send(None)
    assert len(told) == 6


def test_what_waits_without_being_able_to_hear_of_it_is_ended(way: str) -> None:
    class Deaf:
        def __await__(self) -> Any:
            return iter(["a step"])

    middleware = gated(lambda *_: Deaf(), "memory://", "x", clock=FakeClock())
    for _ in range(2):
        passage = middleware(scope("/"), None, None)
        assert passage.send(None) == "a step"
        with pytest.raises(ValueError, match="x"):
            passage.throw(ValueError("x"))
        assert current_admission() is FREE
    passage = middleware(scope("/"), None, None)
    passage.send(None)
    passage.close()
    assert current_admission() is FREE


def test_what_goes_wrong_at_the_beginning_is_the_callers_to_hear(way: str) -> None:
    async def run() -> None:
        app = gated(App(), "memory://", "x", clock=FakeClock())
        for wrong in ({}, {"type": "http"}, {**scope("/"), "client": 5}):
            with pytest.raises((KeyError, TypeError)):
                await app(wrong, None, None)
        del app.gate
        with pytest.raises(AttributeError, match="gate"):
            await app(scope("/"), None, None)

    asyncio.run(run())
    for args in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            gated(App(), "memory://", "x")(*args)
    for maker in (Passage, object.__new__):
        with pytest.raises(TypeError):
            maker(Passage)


def test_a_passage_that_nobody_ends_is_forgotten() -> None:
    """With all that refers to itself there: the frames of an app, and what waits for them."""

    def are_there() -> int:
        gc.collect()
        return sum(type(thing) is Passage for thing in gc.get_objects())

    seen: list[Any] = []
    before = are_there()  # others' errors may keep one
    for _ in range(600):  # more than are kept to be used again
        passage = waiting(seen)
        passage.send(None)
        seen.append(passage)
    seen.clear()
    del passage
    assert are_there() <= before


def test_it_gives_back_all_that_it_has_borrowed() -> None:
    async def broken(receive: Any, send: Any) -> None:
        raise KeyError

    async def slow(receive: Any, send: Any) -> None:
        await asyncio.sleep(0)

    clock = FakeClock()
    memory = gated(App(broken=broken, slow=slow), "memory://", "x", quota=10_000_000, clock=clock)
    asking = gated(App(broken=broken), "memory://", "x", quota=10_000_000, clock=clock)
    runner = asyncio.Runner()
    told = runner.run(asking.gate.admit(AsgiArrival(scope("/"), ""))).decision

    def at_once(check: Any) -> Any:
        future = runner.get_loop().create_future()
        future.set_result(told)
        return future

    def failing(check: Any) -> Any:
        future = runner.get_loop().create_future()
        future.set_exception(asyncio.CancelledError())
        return future

    def refusing(check: Any) -> Any:
        raise StoreUnavailable("not now")

    way, asking.gate.short_way = asking.gate.short_way, None

    async def rounds() -> None:
        for app in (memory, asking):
            for path in ("/", "/health", "/broken"):
                for ask_by in (at_once, refusing, failing):
                    app.gate._asking = way, asking.gate._front, asking.gate._front.now_ns, ask_by
                    with suppress(KeyError, asyncio.CancelledError):
                        await talk(app, scope(path))
                    app.app.admissions.clear()
        passage = memory(scope("/slow"), None, None)
        passage.send(None)
        with suppress(KeyError):
            passage.throw(KeyError)

    def once() -> None:
        # Not by `run`, which looks after signals: Python keeps a text of what it asks for them, now and then.
        runner.get_loop().run_until_complete(rounds())
        clock.advance(timedelta(hours=1))

    with runner:
        assert_nothing_grows(once, rounds=300)
