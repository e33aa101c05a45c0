"""Plain functions behind limits: they run when they may, and never when they may not."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, Limit, Limiter
from headgate.adapters.functions import limited
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidCost, InvalidKey, InvalidLimit, RequestDenied
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

ONE = Limit(1, timedelta(minutes=1), algorithm="concurrency", name="one")
TWICE = Limit(2, timedelta(minutes=1), name="twice")


class Runs:
    """One function of each kind, all of which count how often they have run."""

    def __init__(self) -> None:
        self.times = 0

    def plain(self, value: Any = None) -> Any:
        self.times += 1
        return value

    def generator(self, value: Any = None) -> Iterator[Any]:
        yield self.plain(value)

    async def coroutine(self, value: Any = None) -> Any:
        return self.plain(value)

    async def async_generator(self, value: Any = None) -> AsyncIterator[Any]:
        yield self.plain(value)


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives, of whatever kind it is."""
    if inspect.iscoroutinefunction(function):
        return asyncio.run(function(*arguments))
    if inspect.isasyncgenfunction(function):

        async def collect() -> list[Any]:
            return [value async for value in function(*arguments)]

        return asyncio.run(collect())[0]
    return next(function(*arguments)) if inspect.isgeneratorfunction(function) else function(*arguments)


every_kind = pytest.mark.parametrize("kind", ["plain", "generator", "coroutine", "async_generator"])


def limiter_for(kind: str, clock: FakeClock | None = None) -> Any:
    return (AsyncLimiter if "async" in kind or kind == "coroutine" else Limiter)(clock=clock or FakeClock())


@every_kind
def test_function_runs_as_often_as_it_may_and_never_when_denied(kind: str) -> None:
    runs = Runs()
    guarded = limited("2/minute", limiter=limiter_for(kind))(getattr(runs, kind))
    assert [run(guarded, value) for value in (1, 2)] == [1, 2]
    for _ in range(3):
        with pytest.raises(RequestDenied) as caught:
            run(guarded, 3)
    assert (runs.times, caught.value.decision.retry_after) == (2, 30)


@every_kind
def test_function_stays_what_it_was(kind: str) -> None:
    original = getattr(Runs(), kind)
    guarded = limited("2/minute", limiter=limiter_for(kind))(original)
    assert (guarded.__name__, inspect.signature(guarded)) == (kind, inspect.signature(original))
    for test in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert test(guarded) is test(original)


@every_kind
def test_function_that_waits_runs_in_its_turn_or_not_at_all(kind: str) -> None:
    clock, runs = FakeClock(), Runs()
    guarded = limited("1/second", limiter=limiter_for(kind, clock), wait=2.0)(getattr(runs, kind))
    for _ in range(4):
        run(guarded)
    assert clock.now_us() == 3_000_000
    hasty = limited("1/minute", limiter=limiter_for(kind, clock), wait=2.0)(getattr(runs, kind))
    run(hasty)
    with pytest.raises(RequestDenied):
        run(hasty)
    assert (clock.now_us(), runs.times) == (3_000_000, 5)


def test_to_wait_for_no_time_at_all_is_no_denial() -> None:
    guarded = limited("1/minute", limiter=Limiter(), wait=0)(lambda: "done")
    assert guarded() == "done"
    with pytest.raises(RequestDenied):
        guarded()


def test_queue_gives_each_call_its_turn() -> None:
    clock = FakeClock()
    queue = Limit(1, timedelta(seconds=1), burst=5, algorithm="leaky_bucket", name="queue")
    guarded = limited(queue, limiter=Limiter(clock=clock), wait=9)(clock.now_us)
    assert [guarded() for _ in range(3)] == [0, 1_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("by", "calls", "allowed"),
    [
        (None, ["ada", "bob", "eve"], 2),
        (lambda name: name, ["ada", "bob", "ada", "bob", "ada"], 4),
        (lambda name: ("team", len(name)), ["ada", "bob", "lovelace", "eve"], 3),
        ("relay", ["ada", "bob", "eve"], 2),
        (("relay", 7), ["ada", "bob", "eve"], 2),
    ],
)
def test_counted_identity(by: Any, calls: list[str], allowed: int) -> None:
    guarded = limited(TWICE, by=by, limiter=Limiter(clock=FakeClock()))(lambda name: name)
    passed = 0
    for name in calls:
        try:
            passed += guarded(name) == name
        except RequestDenied:
            continue
    assert passed == allowed


def one() -> str:
    return "one"


def other() -> str:
    return "other"


def test_each_function_has_a_counter_of_its_own_unless_it_shares_a_name() -> None:
    limiter = Limiter(clock=FakeClock())
    assert [limited("1/minute", limiter=limiter)(function)() for function in (one, other)] == ["one", "other"]
    shared = limited("1/minute", name="shared", limiter=limiter)
    assert shared(one)() == "one"
    with pytest.raises(RequestDenied, match="denied by shared"):
        shared(other)()


def test_one_text_may_hold_several_limits() -> None:
    limiter = Limiter(clock=FakeClock())

    @limited("1/minute; 5/hour", limiter=limiter, name="mail")
    def send() -> None: ...

    send()
    with pytest.raises(RequestDenied) as denied:
        send()
    assert denied.value.decision.denied_by == ("mail 1/minute",)
    assert limiter.peek(Limit.parse("5/hour", name="mail 5/hour")).remaining == 4


def test_several_limits_are_charged_all_or_none() -> None:
    limiter = Limiter(clock=FakeClock())
    guarded = limited("1/minute", "5/day", TWICE, name="both", limiter=limiter)(lambda: None)
    guarded()
    with pytest.raises(RequestDenied) as caught:
        guarded()
    assert caught.value.decision.denied_by == ("both 1/minute",)
    assert [outcome.remaining for outcome in caught.value.decision.outcomes] == [0, 4, 1]


def test_generator_holds_its_lease_until_it_has_ended() -> None:
    limiter = Limiter()

    @limited(ONE, limiter=limiter)
    def numbers() -> Iterator[int]:
        yield from (1, 2)

    for end in (list, lambda running: running.close()):
        running = numbers()  # nothing is held before it starts
        assert next(running) == 1
        with pytest.raises(RequestDenied):
            list(numbers())
        end(running)
    assert list(numbers()) == [1, 2]


def test_generator_can_be_sent_values_and_returns_one() -> None:
    @limited(TWICE, limiter=Limiter())
    def echo() -> Any:
        return (yield (yield "first"))

    running = echo()
    assert (next(running), running.send("second")) == ("first", "second")
    with pytest.raises(StopIteration) as caught:
        running.send("last")
    assert caught.value.value == "last"


def test_async_generator_holds_its_lease_until_it_has_ended() -> None:
    held_at_the_end: list[bool] = []

    async def main() -> list[int]:
        async with AsyncLimiter() as limiter:

            @limited(ONE, limiter=limiter)
            async def numbers() -> AsyncIterator[int]:
                try:
                    for number in (1, 2):
                        yield number
                finally:
                    held_at_the_end.append((await limiter.peek(ONE)).remaining == 0)

            running = numbers()
            assert await anext(running) == 1
            with pytest.raises(RequestDenied):
                await anext(numbers())
            await running.aclose()  # type: ignore[attr-defined]
            assert held_at_the_end == [True]
            return [number async for number in numbers()]

    assert asyncio.run(main()) == [1, 2]


def test_async_generators_receive_values() -> None:
    async def main() -> list[str]:
        @limited("1/minute", limiter=AsyncLimiter())
        async def parrot() -> Any:
            said = yield "first"
            yield said

        running: Any = parrot()
        return [await anext(running), await running.asend("second"), await anext(running, "over")]

    assert asyncio.run(main()) == ["first", "second", "over"]


def test_block_that_is_made_of_an_async_generator_hears_how_it_ended() -> None:
    ended: list[str] = []

    async def main() -> None:
        async with AsyncLimiter() as limiter:

            @asynccontextmanager
            @limited(ONE, limiter=limiter)
            async def transaction() -> AsyncIterator[None]:
                try:
                    yield
                except ZeroDivisionError:
                    ended.append("rolled back")
                else:
                    ended.append("committed")

            for number in (1, 0):
                async with transaction():
                    assert 1 / number
            with pytest.raises(KeyError):
                async with transaction():
                    raise KeyError
            assert (await limiter.peek(ONE)).remaining == 1

    asyncio.run(main())
    assert ended == ["committed", "rolled back"]


class Jobs:
    @limited("1/minute", by=lambda cls, name: name, limiter=Limiter(clock=FakeClock()))
    @classmethod
    def of_class(cls, name: str) -> tuple[type, str]:
        return cls, name

    @limited("1/minute", by=lambda name: name, limiter=Limiter(clock=FakeClock()))
    @staticmethod
    def of_none(name: str) -> str:
        return name


def test_decorator_may_stand_above_what_makes_a_method_another_kind() -> None:
    assert (Jobs.of_class("ada"), Jobs().of_class("bob")) == ((Jobs, "ada"), (Jobs, "bob"))
    assert (Jobs.of_none("ada"), Jobs().of_none("bob")) == ("ada", "bob")
    for call in (Jobs.of_class, Jobs().of_none):
        with pytest.raises(RequestDenied):
            call("ada")


class Adder:
    def __call__(self, number: int) -> int:
        return number + 1


class Look:
    """Tells, a moment later, what is left of the limit."""

    def __init__(self, limiter: AsyncLimiter) -> None:
        self._limiter = limiter

    async def __call__(self) -> int:
        await asyncio.sleep(0)
        return (await self._limiter.peek(ONE)).remaining


@pytest.mark.parametrize("add", [partial(Adder.__call__, Adder()), Adder()])
def test_whatever_can_be_called_is_a_function(add: Any) -> None:
    guarded = limited("1/minute", name="adding", limiter=Limiter())(add)
    assert guarded(1) == 2
    with pytest.raises(RequestDenied):
        guarded(1)


@pytest.mark.parametrize("made", [Look, lambda limiter: partial(Look.__call__, Look(limiter))])
def test_what_gives_a_coroutine_holds_its_lease_until_that_has_ended(made: Any) -> None:
    async def main() -> None:
        async with AsyncLimiter() as limiter:
            look = limited(ONE, limiter=limiter)(made(limiter))
            assert [await look(), (await limiter.peek(ONE)).remaining] == [0, 1]

    asyncio.run(main())


@pytest.mark.parametrize("wait", [None, 5.0])
def test_lease_ends_with_the_call_also_if_it_fails(wait: float | None) -> None:
    @limited(ONE, limiter=Limiter(), wait=wait)
    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()


@pytest.mark.parametrize("wait", [None, 0.0])
def test_no_more_run_at_once_than_may(wait: float | None) -> None:
    denied: list[RequestDenied] = []
    others_are_denied = Event()

    @limited(Limit(3, timedelta(minutes=1), algorithm="concurrency", name="three"), limiter=Limiter(), wait=wait)
    def work() -> bool:
        return others_are_denied.wait(30)

    def attempt(_: int) -> bool:
        try:
            return work()
        except RequestDenied as error:
            denied.append(error)
            if len(denied) == 5:
                others_are_denied.set()
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 3


def test_block_runs_when_it_may_and_never_when_denied() -> None:
    limiter, ran = Limiter(clock=FakeClock()), []
    for name in ("ada", "ada", "bob"):
        with limited("2/minute", by=name, name="exports", limiter=limiter) as decision:
            ran.append((name, decision.remaining))
    with pytest.raises(RequestDenied), limited("2/minute", by="ada", name="exports", limiter=limiter):
        ran.append(("ada", -1))
    assert ran == [("ada", 1), ("ada", 0), ("bob", 1)]


def test_one_block_can_be_entered_again_inside_itself() -> None:
    limiter = Limiter()
    two = limited(Limit(2, timedelta(minutes=1), algorithm="concurrency", name="two"), limiter=limiter)
    for _ in range(2):
        with two, two, pytest.raises(RequestDenied), two:
            pass


def test_asynchronous_block() -> None:
    async def main() -> None:
        async with AsyncLimiter() as limiter:
            one = limited(ONE, by="ada", limiter=limiter)
            for _ in range(2):
                async with one as decision:
                    assert decision.allowed
                    with pytest.raises(RequestDenied):
                        async with one:
                            pass

    asyncio.run(main())


def test_cancelled_task_leaves_its_lease() -> None:
    async def main() -> None:
        async with AsyncLimiter() as limiter:
            started = asyncio.Event()

            @limited(ONE, limiter=limiter)
            async def work(then: Any) -> None:
                started.set()
                await then.wait()

            task = asyncio.create_task(work(asyncio.Event()))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await limiter.peek(ONE)).remaining == 1

    asyncio.run(main())


def test_exception_says_why_and_travels_between_processes() -> None:
    guarded = limited("1/minute", name="mail", limiter=Limiter(clock=FakeClock()))(lambda: None)
    guarded()
    with pytest.raises(HeadgateError) as caught:
        guarded()
    other = pickle.loads(pickle.dumps(caught.value))
    assert str(other) == "denied by mail (1 per minute, token_bucket): 0 left, passes in 60 s"
    assert other.decision.retry_after == 60


async def coroutine() -> None: ...


SHARED = Limiter()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: limited(limiter=SHARED), InvalidConfiguration, "no limit given"),
        (lambda: limited("2/fortnight", limiter=SHARED), InvalidLimit, "unknown unit"),
        (lambda: limited("1/s, burst 5, leaky_bucket", limiter=SHARED), InvalidConfiguration, "wait="),
        (lambda: limited("1/s", limiter=SHARED)(coroutine), InvalidConfiguration, "coroutine needs .* AsyncLimiter"),
        (lambda: limited("1/s", limiter=AsyncLimiter())(print), InvalidConfiguration, "print needs .* a Limiter"),
        (lambda: limited("1/s", limiter=None)(print), InvalidConfiguration, "not None"),
        (lambda: limited("1/s", limiter=SHARED).__enter__(), InvalidConfiguration, "give name="),
        (lambda: limited(TWICE, limiter=AsyncLimiter()).__enter__(), InvalidConfiguration, "`with` needs"),
        (lambda: limited(TWICE, by=len, limiter=SHARED).__enter__(), InvalidConfiguration, "no arguments"),
        (lambda: limited(TWICE, by=lambda: None, limiter=SHARED)(lambda: 1)(), InvalidKey, "without an identity"),
        (lambda: limited("1/s", name="ü", limiter=SHARED)(print), InvalidLimit, "printable ASCII.*name="),
        (lambda: limited("1/s", limiter=SHARED)(Adder()), InvalidConfiguration, "'1/s' has no name: give name="),
        (lambda: limited(TWICE, limiter=SHARED)(Look(AsyncLimiter())), InvalidConfiguration, "needs .* AsyncLimiter"),
        (lambda: limited("1/s", limiter=SHARED)(3), InvalidConfiguration, "3 is not callable"),  # type: ignore[arg-type]
        (lambda: limited("1/s", cost=-1, limiter=SHARED), InvalidCost, "cost -1 is not a whole number >= 0"),
        (lambda: limited("1/s", cost=True, limiter=SHARED), InvalidCost, "cost True is not a whole number"),
        (lambda: limited("1/s", wait=-1, limiter=SHARED), InvalidConfiguration, "wait -1 is not .* seconds >= 0"),
        (lambda: limited("1/s", wait=float("nan"), limiter=SHARED), InvalidConfiguration, "wait nan is not"),
        (lambda: limited("1/s", wait=True, limiter=SHARED), InvalidConfiguration, "wait True is not"),
    ],
)
def test_mistakes_are_reported(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_same_on_redis(redis7: Any, unique: str) -> None:
    runs = Runs()
    with Limiter(redis7.url) as limiter:
        guarded = limited("3/minute", ONE, name=unique, by=unique, limiter=limiter, wait=0.2)(runs.plain)
        for _ in range(3):
            guarded()
        with pytest.raises(RequestDenied):
            guarded()
    assert runs.times == 3
