"""`Limiter` and `AsyncLimiter`: the public API, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from headgate import flow
from headgate.engine import DEFAULT_CENTRAL_BUDGET_S, FIRST_CONNECTION_TIMEOUT_S, AsyncEngine, Engine, SyncEngine
from headgate.leases import LeaseRenewer, checked_timeout, leased_keys, release_on_cancel, renew_forever
from headgate.local.block_list import checked_block
from headgate.regions.reserved import DEFAULT_SAFE_SHARE
from headgate.stores.operations import Leave, Renew, Reset, checked, checked_keys, checked_lease, checked_refund

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
    from datetime import datetime
    from typing import Self

    from headgate.clock import Clock
    from headgate.decisions import Decision
    from headgate.events import Event
    from headgate.failure import FailureMode
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.local.block_list import LiveBlock
    from headgate.stores.operations import Call, Check

__all__ = ["AsyncLimiter", "Limiter", "creation_hooks", "limiters"]

limiters: Final[WeakSet[Any]] = WeakSet()
"""All limiters of the process that do not belong to a gate, for the fixtures of `headgate.testing`."""

creation_hooks: Final[list[Callable[[Any], None]]] = []  # called with each such limiter when it is created


class _LimiterBase:
    """The part of the API that does not wait. Gates pass an engine instead of a URL."""

    _engine_type: type[Any]
    engine: Any  # the internal interface, for gates

    def __init__(
        self,
        url: Any = "memory://",
        *,
        clock: Clock | None = None,
        namespace: str = "headgate",
        on_failure: FailureMode = "raise",
        budget: float | None = None,
        max_keys: int = 1_000_000,
        remember: int | None = None,
        lease: float = 0.1,
        share: float = 0.2,
        nodes: int = 1,
        on_event: Callable[[Event], Any] | None = None,
        region: str | None = None,
        regions: Mapping[str, Any] | None = None,
        home: str | None = None,
        central_budget: float = DEFAULT_CENTRAL_BUDGET_S,
        safe_share: float = DEFAULT_SAFE_SHARE,
    ) -> None:
        if isinstance(url, Engine):
            self.engine = url
            self._connect_engine()
            return
        local = {"max_keys": max_keys, "remember": remember, "lease": lease}
        outage = {"on_failure": on_failure, "budget": budget, "share": share, "nodes": nodes, "on_event": on_event}
        modes = {"central_budget": central_budget, "safe_share": safe_share}
        across = {"region": region, "regions": regions, "home": home, **modes}
        self.engine = self._engine_type(url, clock=clock, namespace=namespace, **local, **outage, **across)
        self._connect_engine()
        limiters.add(self)
        for hook in creation_hooks:
            hook(self)

    def _connect_engine(self) -> None:
        """Prepare what depends on the engine."""

    def health(self) -> Health:
        """Report whether the store decides, the state of its servers, and the debt of an outage."""
        return self.engine.health()  # type: ignore[no-any-return]

    def bound(self, limit: Limit) -> int:
        """The most that all regions together may admit in one period beyond what a single store would."""
        return self.engine.bound(limit)  # type: ignore[no-any-return]

    @property
    def stats(self) -> Any:
        """For memory, its keys and how many were evicted. For Redis, the operations sent, the round trips they took,
        and what was answered locally."""
        return self.engine.stats

    def _change(self, operation: Call) -> Generator[Any, Any, bool]:
        return flow.change(operation, self.engine.tier, self.engine.failure, self.engine.router)

    def _acquire(self, call: Check, timeout: float | None) -> Generator[Any, Any, Decision]:
        engine, timeout = self.engine, checked_timeout(timeout)
        times = {"timeout": timeout, "elapsed": engine.stopwatch()}
        return flow.acquire(call, engine.tier, engine.failure, **times, router=engine.router)

    def _release(self, keys: list[Key], id: str, elapsed: Callable[[], float]) -> flow.Flow:
        engine = self.engine
        times = {"hold_times": engine.hold_times, "elapsed": elapsed}
        return flow.release(keys, id, engine.tier, engine.failure, **times, router=engine.router)


class Limiter(_LimiterBase):
    """Decides whether requests may pass, for code with threads; `AsyncLimiter` is the same for asyncio.

    `url` names the store: "memory://" (this process alone), "redis://host:6379/0", "rediss://", "unix:///path",
    "redis+cluster://host:7000", "redis+sentinel://host:26379/name", or an existing redis-py client. `clock` replaces
    the store's clock, for tests.

    `on_failure` is the answer when the store fails: "raise" a StoreError, "open" (allow), "closed" (deny) or "local"
    (`share` of each limit, divided by the live `nodes`, counted in this process). `budget` is the time in seconds that
    the store may take, connecting included: 0.005 by default, 1.0 with on_failure="raise". `on_event` is called when
    the store fails and when it is back. See docs/outages.md.

    `remember` is the size of the denial cache (10,000), `lease` the time in seconds for which tokens of hot keys are
    prepaid; 0 turns either off. With an injected `clock`, both are off by default. See docs/hot-keys.md.

    `regions` are the stores of all regions by name, `region` the one in which this limiter runs, and `home` the one
    that decides limits with region="central", within `central_budget` seconds (0.5). `safe_share` is the part of limits
    with region="reserved" that is spent without the home region; the same in all regions. See docs/regions.md.

    >>> from datetime import timedelta
    >>> from headgate import Limit, Limiter
    >>> limiter = Limiter()
    >>> per_ip = Limit(2, timedelta(minutes=1), name="per-ip")
    >>> [limiter.check(per_ip.by("203.0.113.9")).allowed for _ in range(3)]
    [True, True, False]
    """

    _engine_type = SyncEngine
    engine: SyncEngine

    def check(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Decision:
        """Charge all keys or none, at one instant; `cost` is for each key, or a tuple with one cost per key.

        A denial is a value, not an exception. With an `id`, a repeated check gets the first answer and is charged once.
        """
        if self.engine.memory is not None:
            return self.engine.memory.check(*keys, cost=cost, id=id)
        return self.engine.decide(checked(keys, cost, id), self.engine.failure)

    def peek(self, *keys: Key | Limit) -> Decision:
        """Read the state of the limits without changing it."""
        return self.check(*keys, cost=0)

    def acquire(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, timeout: float | None = None, id: str | None = None
    ) -> Decision:
        """Like `check`, but wait until the request may pass. Return the denial as soon as waiting cannot help within
        `timeout` seconds."""
        return self.engine.drive(self._acquire(checked(keys, cost, id), timeout))

    def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Return unused tokens; True if any were returned.

        `of` is the decision that charged them, `id` the id of the check: at most what that consumed is returned. With
        an `id`, at most once.
        """
        return self.engine.drive(self._change(checked_refund(key, amount, id, of)))

    def reset(self, *keys: Key | Limit) -> None:
        """Delete the counters of the keys."""
        self.engine.run(Reset(checked_keys(keys)))

    def enter(self, *keys: Key | Limit, id: str | None = None, cost: int | tuple[int, ...] = 1) -> Decision:
        """Take a lease on the concurrency limits among the keys, and charge the others; `decision.id` names it."""
        return self.check(*keys, cost=cost, id=id)

    def renew(self, key: Key | Limit, *, id: str) -> bool:
        """Extend a lease to the limit's period from now; False if it was no longer held."""
        return self.engine.drive(self._change(Renew(*checked_lease(key, id))))

    def leave(self, key: Key | Limit, *, id: str) -> bool:
        """End a lease; False if it was no longer held."""
        return self.engine.drive(self._change(Leave(*checked_lease(key, id))))

    @contextmanager
    def hold(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Iterator[Decision]:
        """Enter, renew while the block runs, leave. The block also runs after a denial: check the decision."""
        decision = self.enter(*keys, cost=cost, id=id)
        leased = leased_keys(decision)
        if not leased or decision.id is None:
            yield decision
            return
        stop, elapsed = self._renewer.start(leased, decision.id, self.renew), self.engine.stopwatch()
        try:
            yield decision
        finally:
            stop()
            self.engine.drive(self._release(leased, decision.id, elapsed))

    def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Reject a client on all nodes whose adapters use this store: block("ip", "203.0.113.0/24").

        It takes effect within milliseconds. `check` has no identities and is not affected.
        """
        self.engine.block(checked_block(kind, value, until, reason))

    def unblock(self, kind: str, value: str) -> bool:
        """End a block; False if there was none."""
        return self.engine.unblock(checked_block(kind, value))

    def blocked(self) -> list[LiveBlock]:
        """List all blocks in force."""
        return self.engine.blocks()

    def close(self) -> None:
        """Return prepaid tokens to the store and close the connections. The limiter must not be used afterwards."""
        self._renewer.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect_engine(self) -> None:
        self._renewer = LeaseRenewer()
        if self.engine.memory is not None and type(self).check is Limiter.check:
            # The memory store needs neither waiting nor failure modes; a call in between costs a tenth of a check.
            self.check = self.engine.memory.check  # type: ignore[method-assign]


class AsyncLimiter(_LimiterBase):
    """The same as `Limiter`, with methods to await; nothing in it blocks the event loop.

    >>> from datetime import timedelta
    >>> from headgate import AsyncLimiter, Limit
    >>> async def main():
    ...     async with AsyncLimiter() as limiter:
    ...         decision = await limiter.check(Limit(2, timedelta(minutes=1)).by("ada"), cost=2)
    ...         return decision.allowed, decision.remaining
    >>> asyncio.run(main())
    (True, 0)
    """

    _engine_type = AsyncEngine
    engine: AsyncEngine

    async def check(self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None) -> Decision:
        """Charge all keys or none, at one instant; `cost` is for each key, or a tuple with one cost per key.

        A denial is a value, not an exception. With an `id`, a repeated check gets the first answer and is charged once.
        """
        if self.engine.memory is not None:
            return self.engine.memory.check(*keys, cost=cost, id=id)
        return await self.engine.decide(checked(keys, cost, id), self.engine.failure)

    async def peek(self, *keys: Key | Limit) -> Decision:
        """Read the state of the limits without changing it."""
        return await self.check(*keys, cost=0)

    async def acquire(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, timeout: float | None = None, id: str | None = None
    ) -> Decision:
        """Like `check`, but wait until the request may pass. Return the denial as soon as waiting cannot help within
        `timeout` seconds."""
        call = checked(keys, cost, id)
        with nullcontext() if id is not None else release_on_cancel(call, self.leave):
            return await self.engine.drive(self._acquire(call, timeout))

    async def refund(self, key: Key | Limit, amount: int, *, id: str | None = None, of: Decision | None = None) -> bool:
        """Return unused tokens; True if any were returned.

        `of` is the decision that charged them, `id` the id of the check: at most what that consumed is returned. With
        an `id`, at most once.
        """
        return await self.engine.drive(self._change(checked_refund(key, amount, id, of)))

    async def reset(self, *keys: Key | Limit) -> None:
        """Delete the counters of the keys."""
        await self.engine.run(Reset(checked_keys(keys)))

    async def enter(self, *keys: Key | Limit, id: str | None = None, cost: int | tuple[int, ...] = 1) -> Decision:
        """Take a lease on the concurrency limits among the keys, and charge the others; `decision.id` names it."""
        return await self.check(*keys, cost=cost, id=id)

    async def renew(self, key: Key | Limit, *, id: str) -> bool:
        """Extend a lease to the limit's period from now; False if it was no longer held."""
        return await self.engine.drive(self._change(Renew(*checked_lease(key, id))))

    async def leave(self, key: Key | Limit, *, id: str) -> bool:
        """End a lease; False if it was no longer held."""
        return await self.engine.drive(self._change(Leave(*checked_lease(key, id))))

    @asynccontextmanager
    async def hold(
        self, *keys: Key | Limit, cost: int | tuple[int, ...] = 1, id: str | None = None
    ) -> AsyncIterator[Decision]:
        """Enter, renew while the block runs, leave. The block also runs after a denial: check the decision."""
        call = checked(keys, cost, id)
        with release_on_cancel(call, self.leave):
            decision: Decision = await self.engine.run(call)
        leased = leased_keys(decision)
        if not leased or decision.id is None:
            yield decision
            return
        renewal, elapsed = asyncio.create_task(renew_forever(leased, decision.id, self.renew)), self.engine.stopwatch()
        try:
            yield decision
        finally:
            renewal.cancel()
            with release_on_cancel(call, self.leave):
                await self.engine.drive(self._release(leased, decision.id, elapsed))

    async def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Reject a client on all nodes whose adapters use this store: block("ip", "203.0.113.0/24").

        It takes effect within milliseconds. `check` has no identities and is not affected.
        """
        await asyncio.to_thread(self.engine.block, checked_block(kind, value, until, reason))

    async def unblock(self, kind: str, value: str) -> bool:
        """End a block; False if there was none."""
        return await asyncio.to_thread(self.engine.unblock, checked_block(kind, value))

    async def blocked(self) -> list[LiveBlock]:
        """List all blocks in force."""
        return await asyncio.to_thread(self.engine.blocks)

    async def close(self) -> None:
        """Return prepaid tokens to the store and close the connections. The limiter must not be used afterwards."""
        await self.engine.close()

    async def __aenter__(self) -> Self:
        if self.engine.preconnects:
            await self.engine.store.warm_up(wait=FIRST_CONNECTION_TIMEOUT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
