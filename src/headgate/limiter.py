"""Limiter and AsyncLimiter: the two front doors, thin drivers of one flow."""

from __future__ import annotations

import asyncio
import threading
import time
from _thread import get_ident, start_new_thread
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, cast

from headgate import flow
from headgate._limiter_base import FIRST_CONNECTION, LimiterBase, checked_timeout
from headgate.decisions import Decision
from headgate.errors import StoreError
from headgate.leases import LeaseRenewer, leaving, left_if_cancelled, renew_forever
from headgate.local.prepaid import RefillCheck
from headgate.local.sharded_limits import gathered, spread, spread_change
from headgate.local.single_flight import SingleFlight
from headgate.local.tier import LOOKS
from headgate.stores.operations import Check, Leave, Renew, Reset, checked, checked_keys, checked_lease, checked_refund

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from datetime import datetime
    from types import TracebackType
    from typing import Self

    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.local.block_list import LiveBlock
    from headgate.stores.operations import Call

__all__ = ["AsyncLimiter", "Limiter"]

_pick: Final = Random().randrange
"""Chooses parts of split limits."""


class Limiter(LimiterBase):
    """Decides whether requests may pass, for code with threads; `AsyncLimiter` is the same for asyncio.

    `url` names the store: "memory://" (this process alone), "redis://host:6379/0", "rediss://", "unix:///path", "redis+cluster://host:7000",
    "redis+sentinel://host:26379/name", or a redis-py client that you have already. `clock` replaces the store's clock,
    for tests.

    `on_failure` says what to answer when the store fails: "raise" a StoreError, "open" (allow), "closed" (deny) or
    "local" (`share` of each limit, over all live `nodes`, counted in this process). `budget` is how many seconds the
    store may take, connecting included: 0.005 by default, 1.0 where the only other answer is an exception. `on_event`
    is told when it is lost, and back. More in docs/outages.md.

    `remember` is how many denials are kept until they end (10,000), `lease` for how many seconds tokens of hot keys are
    prepaid; 0 turns either off. With a `clock` of yours neither is on by itself. More in docs/hot-keys.md.

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
        a value, not an exception. With an `id`, a repeated check is answered as the first time, and charged once."""
        if self._memory is not None:
            return self._memory.check(*keys, cost=cost, id=id)
        return self._decide(checked(keys, cost, id), self._failure)

    def peek(self, *keys: Key | Limit) -> Decision:
        """What the limits stand at. Reads, never writes."""
        return self.check(*keys, cost=0)

    def acquire(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, timeout: float | None = None, id: str | None = None
    ) -> Decision:
        """Like `check`, but waits until the request may pass; a denial comes back as soon as waiting cannot help in
        `timeout` seconds."""
        call = checked(keys, cost, id)
        decision: Decision = self._drive(flow.acquire(call, self._failure, checked_timeout(timeout), self._elapsed()))
        return decision

    def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Give back what was not used; True if anything was. `of` is the decision that charged it, `id` the id of the
        check: at most what that consumed is given back. With an `id`, at most once."""
        done: bool = self._drive(flow.ask(checked_refund(key, amount, id, of), self._failure))
        return done

    def reset(self, *keys: Key | Limit) -> None:
        """Forget all that is known of the keys: they are as new."""
        self._answer(Reset(checked_keys(keys)))

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
        """Enter, renew while the block runs, leave. The block also runs when it is denied: look at the decision."""
        decision = self.enter(*keys, cost=cost, id=id)
        leased = [key for key in decision.keys if key.limit.algorithm == "concurrency"]
        if not decision.allowed or not leased or decision.id is None:
            yield decision
            return
        stop, elapsed = self._renewals.start(leased, decision.id, self.renew), self._elapsed()
        try:
            yield decision
        finally:
            stop()
            for key in leased:
                self._hold_times.record(key.limit, elapsed())
                with leaving(key, decision.id):
                    self.leave(key, id=decision.id)

    def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Keep somebody out, on all nodes whose adapters count in this store: block("ip", "203.0.113.0/24").

        It takes effect there within milliseconds. `check` knows no kinds of identity, and blocks nobody.
        """
        self._block(self._checked_block(kind, value, until, reason))

    def unblock(self, kind: str, value: str) -> bool:
        """End a block; whether there was one."""
        return self._unblock(kind, self._checked_block(kind, value).value)

    def blocked(self) -> list[LiveBlock]:
        """All blocks that hold."""
        return self._blocked()

    def close(self) -> None:
        """Return prepaid tokens to the store and close the connections. The limiter must not be used after."""
        self._renewals.close()
        for seconds in self._stop_background_work():
            time.sleep(seconds)
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_ready(self) -> None:
        self._renewals = LeaseRenewer()
        if self._memory is not None and type(self).check is Limiter.check:
            # Its answers need neither waiting nor failure modes: a call in between would cost a tenth of the check.
            self.check = self._memory.check  # type: ignore[method-assign]

    def _decide(self, call: Check, fallback: flow.Fallback) -> Decision:
        """The answer to a check: remembered, prepaid, the store's, or, if that fails, the fallback's."""
        for key in call[0]:
            if key[0].split > 1:
                return gathered(call, self._decide(spread(call, _pick), fallback))
        front = self._front
        front.checks += 1
        ready = front.at_once(call, fallback) if front.is_alert or not front.checks & LOOKS else None
        if ready is not None and isinstance(ready, Decision):
            return ready
        asked_ns = front.now_ns()
        try:
            if ready is not None:
                return cast("Decision", self._drive(ready, self._store.run))
            decision: Decision = self._store.run(call)
        except StoreError as error:
            return front.failed(call, error, fallback)
        if not decision[0] or decision[6] or front.is_alert:
            front.answered(call, decision, asked_ns)
        return decision

    def _answer(self, call: Call) -> Any:
        """The answer to any call."""
        if self._memory is not None:
            return self._memory.run(call)
        if isinstance(call, Check):
            return self._decide(call, self._failure)
        call = spread_change(call, _pick)
        try:
            answer = self._store.run(call)
        except StoreError as error:
            self._front.note_failure(error)
            raise
        finally:  # also what failed may have happened
            self._front.changed(call)
        return answer

    def _drive(self, steps: flow.Flow, run: Callable[[Any], Any] | None = None) -> Any:
        run = run or self._answer
        sleep = getattr(self._clock, "sleep", time.sleep)
        order: _Order | None = None
        try:
            step = next(steps)
            while True:
                if isinstance(step, flow.Pause):
                    sleep(step.seconds)
                    step = steps.send(None)
                    continue
                if type(step) is RefillCheck and get_ident() == threading.main_thread().ident:
                    order = _Order(steps, step, run)
                    return order.carry_out()
                try:
                    answer = (
                        step.gate().acquire(timeout=2 * self._store.budget) if type(step) is SingleFlight else run(step)
                    )
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            if order is None:
                steps.close()  # at once, also where somebody keeps the exception that ends it here


class AsyncLimiter(LimiterBase):
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
        a value, not an exception. With an `id`, a repeated check is answered as the first time, and charged once."""
        if self._memory is not None:
            return self._memory.check(*keys, cost=cost, id=id)
        return await self._decide(checked(keys, cost, id), self._failure)

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
        steps = flow.acquire(call, self._failure, checked_timeout(timeout), self._elapsed())
        with nullcontext() if id is not None else left_if_cancelled(call, self.leave):
            decision: Decision = await self._drive(steps)
        return decision

    async def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Give back what was not used; True if anything was. `of` is the decision that charged it, `id` the id of the
        check: at most what that consumed is given back. With an `id`, at most once."""
        done: bool = await self._drive(flow.ask(checked_refund(key, amount, id, of), self._failure))
        return done

    async def reset(self, *keys: Key | Limit) -> None:
        """Forget all that is known of the keys: they are as new."""
        await self._answer(Reset(checked_keys(keys)))

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
        """Enter, renew while the block runs, leave. The block also runs when it is denied: look at the decision."""
        call = checked(keys, cost, id)
        with left_if_cancelled(call, self.leave):
            decision = await self._answer(call)
        leased = [key for key in decision.keys if key.limit.algorithm == "concurrency"]
        if not decision.allowed or not leased or decision.id is None:
            yield decision
            return
        renewing, elapsed = asyncio.create_task(renew_forever(leased, decision.id, self.renew)), self._elapsed()
        try:
            yield decision
        finally:
            renewing.cancel()
            for key in leased:
                self._hold_times.record(key.limit, elapsed())
                with left_if_cancelled(call, self.leave), leaving(key, decision.id):
                    await self.leave(key, id=decision.id)

    async def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Keep somebody out, on all nodes whose adapters count in this store: block("ip", "203.0.113.0/24").

        It takes effect there within milliseconds. `check` knows no kinds of identity, and blocks nobody.
        """
        await asyncio.to_thread(self._block, self._checked_block(kind, value, until, reason))

    async def unblock(self, kind: str, value: str) -> bool:
        """End a block; whether there was one."""
        return await asyncio.to_thread(self._unblock, kind, self._checked_block(kind, value).value)

    async def blocked(self) -> list[LiveBlock]:
        """All blocks that hold."""
        return await asyncio.to_thread(self._blocked)

    async def close(self) -> None:
        """Return prepaid tokens to the store and close the connections. The limiter must not be used after."""
        if self._keeper is None:
            self._store.close()
            return
        for seconds in self._stop_background_work():
            await asyncio.sleep(seconds)
        await self._store.close()

    async def __aenter__(self) -> Self:
        if self._is_quick:
            await self._store.warm_up(wait=FIRST_CONNECTION)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _decide(self, call: Check, fallback: flow.Fallback) -> Decision:
        """The answer to a check: remembered, prepaid, the store's, or, if that fails, the fallback's."""
        for key in call[0]:
            if key[0].split > 1:
                return gathered(call, await self._decide(spread(call, _pick), fallback))
        front = self._front
        front.checks += 1
        ready = front.at_once(call, fallback) if front.is_alert or not front.checks & LOOKS else None
        if ready is not None and isinstance(ready, Decision):
            return ready
        asked_ns = front.now_ns()
        try:
            if ready is not None:
                return cast("Decision", await self._drive(ready, self._store.run))
            decision: Decision = await self._store.run(call)
        except StoreError as error:
            return front.failed(call, error, fallback)
        if not decision[0] or decision[6] or front.is_alert:
            front.answered(call, decision, asked_ns)
        return decision

    async def _answer(self, call: Call) -> Any:
        """The answer to any call."""
        if self._memory is not None:
            return self._memory.run(call)
        if isinstance(call, Check):
            return await self._decide(call, self._failure)
        call = spread_change(call, _pick)
        try:
            answer = await self._store.run(call)
        except StoreError as error:
            self._front.note_failure(error)
            raise
        finally:  # also what failed may have happened
            self._front.changed(call)
        return answer

    async def _drive(self, steps: flow.Flow, run: Callable[[Any], Awaitable[Any]] | None = None) -> Any:
        run = run or self._answer
        order: asyncio.Future[Any] | None = None
        try:
            step = next(steps)
            while True:
                if isinstance(step, flow.Pause):
                    await self._sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    answer: Any = None
                    if type(step) is SingleFlight:
                        await step.future(2 * self._store.budget)
                    elif type(step) is RefillCheck:
                        order = asyncio.ensure_future(run(step))
                        answer = await asyncio.shield(order)
                    else:
                        answer = await run(step)
                except StoreError as error:
                    order = None
                    step = steps.throw(error)
                else:
                    order = None
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            if order is None:
                steps.close()  # at once, also where somebody keeps the exception that ends it here
            else:  # cancelled, but the order is on its way, and what it brings belongs to requests to come
                order.add_done_callback(partial(_conclude, steps))

    async def _sleep(self, seconds: float) -> None:
        sleep = getattr(self._clock, "sleep", None)
        if sleep is not None:
            sleep(seconds)
        await asyncio.sleep(0 if sleep is not None else seconds)


class _Order:
    """An order of prepaid tokens, carried out for the main thread by a thread in which no signal handler runs.

    A handler that raises would cut off the answer, and with it tokens that were charged for requests to come. It ends
    the check that waits here instead, while the order itself goes on.
    """

    def __init__(self, steps: flow.Flow, first: RefillCheck, run: Callable[[Any], Any]) -> None:
        self._steps = steps
        self._first = first
        self._run = run
        self._done = threading.Lock()
        self._done.acquire()
        self._is_abandoned = False
        self._answer: Any = None
        self._error: BaseException | None = None

    def carry_out(self) -> Any:
        """The answer to the check that sent the order."""
        try:
            start_new_thread(self._work, ())
        except RuntimeError:  # too many threads, or the interpreter is about to end
            self._work()
        try:
            self._done.acquire()
        except BaseException:
            self._is_abandoned = True
            raise
        if self._error is not None:
            raise self._error
        return self._answer

    def _work(self) -> None:
        step: Any = self._first
        try:
            while not self._is_abandoned or step is self._first:
                try:
                    answer = self._run(step)
                except StoreError as error:
                    step = self._steps.throw(error)
                else:
                    step = self._steps.send(answer)
        except StopIteration as end:
            self._answer = end.value
        except BaseException as error:
            self._error = error
        finally:
            self._steps.close()
            self._done.release()


def _conclude(steps: flow.Flow, order: asyncio.Future[Any]) -> None:
    """Pass the answer to an order on to its flow after the check that sent it was cancelled. The check itself ends
    here: whatever the flow would ask next is not asked."""
    with suppress(StopIteration, StoreError):
        if not order.cancelled():
            error = order.exception()
            steps.send(order.result()) if error is None else steps.throw(error)
    steps.close()
