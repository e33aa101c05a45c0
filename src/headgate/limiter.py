"""Limiter and AsyncLimiter: the two front doors, thin drivers of one flow."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from headgate import flow
from headgate.clock import SystemClock
from headgate.errors import InvalidConfiguration, StoreError
from headgate.failure import FailurePolicy
from headgate.keys import Key, escape
from headgate.leases import Renewals, leaving, renew_forever
from headgate.stores import open_store
from headgate.stores.calls import Leave, Renew, Reset, checked, checked_keys, checked_lease, checked_refund
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType
    from typing import Self

    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.failure import FailureMode
    from headgate.limits import Limit

__all__ = ["AsyncLimiter", "Limiter"]

PATIENT_BUDGET: Final = 1.0
QUICK_BUDGET: Final = 0.005


class _Gate:
    """What both limiters are made of: the store, the answer for when it fails, and the door's own checks."""

    _asynchronous: bool

    def __init__(
        self,
        url: Any = "memory://",
        *,
        clock: Clock | None = None,
        namespace: str = "headgate",
        on_failure: FailureMode = "raise",
        budget: float | None = None,
        max_keys: int = 1_000_000,
    ) -> None:
        if clock is not None and not callable(getattr(clock, "now_us", None)):
            raise InvalidConfiguration(f"{clock!r} is no clock: it must have a method now_us()")
        default_clock = SystemClock()
        self._failure = FailurePolicy(on_failure, clock or default_clock)
        self._clock = clock
        self._store = open_store(
            url,
            clock=clock,
            default_clock=default_clock,
            namespace=_checked_namespace(namespace),
            budget=_checked_budget(budget, on_failure),
            max_keys=_checked_max_keys(max_keys),
            asynchronous=self._asynchronous,
        )
        # The memory store answers at once and cannot fail: it is asked without the flow, in a third of the time.
        self._memory: MemoryStore | None = self._store if isinstance(self._store, MemoryStore) else None
        self._make_ready()

    def _make_ready(self) -> None:
        """What one kind of limiter needs beside."""

    @property
    def stats(self) -> Any:
        """What the store knows of itself: for memory, its keys and whether it had to forgive any debt."""
        return self._store.stats

    def _elapsed(self) -> Callable[[], float]:
        """How many seconds have passed since now, on the clock that this limiter waits by."""
        if self._clock is not None and hasattr(self._clock, "sleep"):
            now_us, start_us = self._clock.now_us, self._clock.now_us()
            return lambda: (now_us() - start_us) / 1_000_000
        start = time.monotonic()
        return lambda: time.monotonic() - start


class Limiter(_Gate):
    """Decides whether requests may pass, for code with threads; `AsyncLimiter` is the same for asyncio.

    `url` names the store: "memory://" (this process alone), "redis://host:6379/0", "rediss://", "unix:///path", "redis+cluster://host:7000",
    "redis+sentinel://host:26379/name", or a redis-py client that you have already. Nothing is connected before the
    first call.

    `clock` replaces the store's clock, for tests. `on_failure` says what to answer when the store fails: "raise" a
    StoreError, "open" (allow), "closed" (deny) or "local" (a fifth of each limit, counted in this process).
    `budget` is how many seconds the store may take: 0.005 by default, 1.0 where the only other answer is an
    exception.

    >>> from datetime import timedelta
    >>> from headgate import Limit, Limiter
    >>> limiter = Limiter()
    >>> per_ip = Limit(2, timedelta(minutes=1), name="per-ip")
    >>> [limiter.check(per_ip.by("203.0.113.9")).allowed for _ in range(3)]
    [True, True, False]
    """

    _asynchronous = False

    def check(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Decision:
        """Charge all keys or none, at one instant: `cost` on each, or a cost for each key, in their order. A denial is
        a value, not an exception."""
        if self._memory is not None:
            return self._memory.check(*keys, cost=cost, id=id)
        call = checked(keys, cost, id)
        try:
            decision: Decision = self._store.run(call)
        except StoreError as error:
            return self._failure.decide(call, error)
        return decision

    def peek(self, *keys: Key | Limit) -> Decision:
        """What the limits stand at. Reads, never writes."""
        return self.check(*keys, cost=0)

    def acquire(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, timeout: float | None = None, id: str | None = None
    ) -> Decision:
        """Like `check`, but waits until the request may pass; a denial comes back as soon as waiting cannot help in
        `timeout` seconds."""
        call = checked(keys, cost, id)
        decision: Decision = self._drive(flow.acquire(call, self._failure, _checked_timeout(timeout), self._elapsed()))
        return decision

    def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Give back what was not used; whether anything was. With an `id`, at most once. `of` is the decision that
        charged it."""
        done: bool = self._drive(flow.ask(checked_refund(key, amount, id, of), self._failure))
        return done

    def reset(self, *keys: Key | Limit) -> None:
        """Forget all that is known of the keys: they are as new."""
        self._store.run(Reset(checked_keys(keys)))

    def enter(self, *keys: Key | Limit, id: str | None = None, cost: int | tuple[int, ...] = 1) -> Decision:
        """Take a lease on the concurrency limits among the keys (and charge the others); `decision.id` names it."""
        return self.check(*keys, cost=cost, id=id)

    def renew(self, key: Key | Limit, *, id: str) -> bool:
        """Prolong a lease by the limit's period from now; False if it was not held any more."""
        done: bool = self._drive(flow.ask(Renew(*checked_lease(key, id)), self._failure))
        return done

    def leave(self, key: Key | Limit, *, id: str) -> bool:
        """Give a lease up; False if it was not held any more, and then nothing changes."""
        done: bool = self._drive(flow.ask(Leave(*checked_lease(key, id)), self._failure))
        return done

    @contextmanager
    def hold(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Iterator[Decision]:
        """Enter, renew in the background while the block runs, leave. Look at the decision: the block runs also
        when it is denied."""
        decision = self.enter(*keys, cost=cost, id=id)
        leased = [key for key in decision.keys if key.limit.algorithm == "concurrency"]
        if not decision.allowed or not leased or decision.id is None:
            yield decision
            return
        stop = self._renewals.start(leased, decision.id, self.renew)
        try:
            yield decision
        finally:
            stop()
            for key in leased:
                with leaving(key, decision.id):
                    self.leave(key, id=decision.id)

    def close(self) -> None:
        """Close the connections. The limiter must not be used after."""
        self._renewals.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_ready(self) -> None:
        self._renewals = Renewals()
        if self._memory is not None and type(self).check is Limiter.check:
            # Its answers need neither waiting nor failure modes: a call in between would cost a tenth of the check.
            self.check = self._memory.check  # type: ignore[method-assign]

    def _drive(self, steps: flow.Flow) -> Any:
        run = self._store.run
        sleep = getattr(self._clock, "sleep", time.sleep)
        try:
            step = next(steps)
            while True:
                if isinstance(step, flow.Pause):
                    sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    answer = run(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value


class AsyncLimiter(_Gate):
    """The same as `Limiter`, with methods to await; nothing in it ever blocks the event loop.

    >>> from datetime import timedelta
    >>> from headgate import AsyncLimiter, Limit
    >>> async def main():
    ...     async with AsyncLimiter() as limiter:
    ...         decision = await limiter.check(Limit(2, timedelta(minutes=1)).by("ada"), cost=2)
    ...         return decision.allowed, decision.remaining
    >>> asyncio.run(main())
    (True, 0)
    """

    _asynchronous = True

    async def check(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Decision:
        """Charge all keys or none, at one instant: `cost` on each, or a cost for each key, in their order. A denial is
        a value, not an exception."""
        if self._memory is not None:
            return self._memory.check(*keys, cost=cost, id=id)
        call = checked(keys, cost, id)
        try:
            decision: Decision = await self._store.run(call)
        except StoreError as error:
            return self._failure.decide(call, error)
        return decision

    async def peek(self, *keys: Key | Limit) -> Decision:
        """What the limits stand at. Reads, never writes."""
        return await self.check(*keys, cost=0)

    async def acquire(
        self,
        *keys: Key | Limit,
        cost: int | tuple[int, ...] = 1,
        timeout: float | None = None,
        id: str | None = None,
    ) -> Decision:
        """Like `check`, but waits until the request may pass; a denial comes back as soon as waiting cannot help in
        `timeout` seconds."""
        call = checked(keys, cost, id)
        decision: Decision = await self._drive(
            flow.acquire(call, self._failure, _checked_timeout(timeout), self._elapsed())
        )
        return decision

    async def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Give back what was not used; whether anything was. With an `id`, at most once. `of` is the decision that
        charged it."""
        done: bool = await self._drive(flow.ask(checked_refund(key, amount, id, of), self._failure))
        return done

    async def reset(self, *keys: Key | Limit) -> None:
        """Forget all that is known of the keys: they are as new."""
        await self._run(Reset(checked_keys(keys)))

    async def enter(self, *keys: Key | Limit, id: str | None = None, cost: int | tuple[int, ...] = 1) -> Decision:
        """Take a lease on the concurrency limits among the keys (and charge the others); `decision.id` names it."""
        return await self.check(*keys, cost=cost, id=id)

    async def renew(self, key: Key | Limit, *, id: str) -> bool:
        """Prolong a lease by the limit's period from now; False if it was not held any more."""
        done: bool = await self._drive(flow.ask(Renew(*checked_lease(key, id)), self._failure))
        return done

    async def leave(self, key: Key | Limit, *, id: str) -> bool:
        """Give a lease up; False if it was not held any more, and then nothing changes."""
        done: bool = await self._drive(flow.ask(Leave(*checked_lease(key, id)), self._failure))
        return done

    @asynccontextmanager
    async def hold(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None
    ) -> AsyncIterator[Decision]:
        """Enter, renew in the background while the block runs, leave. Look at the decision: the block runs also
        when it is denied."""
        decision = await self.enter(*keys, cost=cost, id=id)
        leased = [key for key in decision.keys if key.limit.algorithm == "concurrency"]
        if not decision.allowed or not leased or decision.id is None:
            yield decision
            return
        renewing = asyncio.create_task(renew_forever(leased, decision.id, self.renew))
        try:
            yield decision
        finally:
            renewing.cancel()
            for key in leased:
                with leaving(key, decision.id):
                    await self.leave(key, id=decision.id)

    async def close(self) -> None:
        """Close the connections. The limiter must not be used after."""
        if self._memory is not None:
            self._memory.close()
        else:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _run(self, call: Any) -> Awaitable[Any]:
        if self._memory is None:
            answer: Awaitable[Any] = self._store.run(call)
            return answer
        return _at_once(self._memory.run(call))

    async def _drive(self, steps: flow.Flow) -> Any:
        run = self._run
        try:
            step = next(steps)
            while True:
                if isinstance(step, flow.Pause):
                    await self._sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    answer = await run(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

    async def _sleep(self, seconds: float) -> None:
        sleep = getattr(self._clock, "sleep", None)
        if sleep is not None:
            sleep(seconds)
        await asyncio.sleep(0 if sleep is not None else seconds)


async def _at_once(answer: Any) -> Any:
    return answer


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise InvalidConfiguration(f"timeout {timeout!r} is not a number of seconds >= 0; None waits for ever")
    return timeout


def _checked_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not namespace or not namespace.isprintable() or len(namespace) > 100:
        raise InvalidConfiguration(f"namespace {namespace!r}: use 1 to 100 printable characters")
    return escape(namespace)


def _checked_budget(budget: float | None, on_failure: str) -> float:
    if budget is None:
        return PATIENT_BUDGET if on_failure == "raise" else QUICK_BUDGET
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 60:
        raise InvalidConfiguration(
            f"budget {budget!r}: give the seconds that the store may take, above 0 and at most 60"
        )
    return float(budget)


def _checked_max_keys(max_keys: int) -> int:
    if type(max_keys) is not int or max_keys < 1:
        raise InvalidConfiguration(f"max_keys {max_keys!r} is not a whole number of at least 1")
    return max_keys
