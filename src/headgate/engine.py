"""The engine of a limiter: its store, local tier and maintenance thread, and the driver of its flows.

This is the interface between limiters and gates: `Limiter` and `AsyncLimiter` are the public API over an engine, and
gates use `limiter.engine` where they need more than that API offers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from _thread import get_ident, start_new_thread
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate import flow
from headgate.clock import SystemClock
from headgate.decisions import Decision
from headgate.errors import InvalidConfiguration, StoreError, StoreUnavailable
from headgate.events import EventEmitter
from headgate.failure import FailurePolicy, FleetShare
from headgate.keys import escape
from headgate.leases import HoldTimes
from headgate.local.block_list import LiveBlock
from headgate.local.maintenance import MaintenanceThread
from headgate.local.prepaid import RefillCheck
from headgate.local.single_flight import SingleFlight
from headgate.local.tier import LocalTier
from headgate.stores import open_store
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from fractions import Fraction
    from typing import Self

    from headgate.clock import Clock
    from headgate.events import Event
    from headgate.failure import FailureMode, Fallback
    from headgate.health import Health
    from headgate.limits import Limit
    from headgate.local.block_list import BlockList
    from headgate.stores.operations import Call, Check

__all__ = ["AsyncEngine", "Engine", "SyncEngine"]

T = TypeVar("T")

DEFAULT_BUDGET_S: Final = 0.005
RAISE_BUDGET_S: Final = 1.0
"""Default budget where the only alternative to an answer of the store is an exception."""
FIRST_CONNECTION_TIMEOUT_S: Final = 0.25
"""Upper bound on how long the constructor waits for the first connection, so that the first request need not."""
DEFAULT_REMEMBER: Final = 10_000
CLOSE_TIMEOUT_S: Final = 0.25
"""Upper bound on how long `close` waits for prepaid tokens to be returned to the store."""
CLOSE_POLL_INTERVAL_S: Final = 0.001


class Engine:
    """Everything of a limiter except the waiting, which `SyncEngine` and `AsyncEngine` add."""

    is_async: bool

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
    ) -> None:
        if clock is not None and not callable(getattr(clock, "now_us", None)):
            raise InvalidConfiguration(f"{clock!r} is not a clock: it must have a method now_us()")
        default_clock = SystemClock()
        events = EventEmitter(_checked_listener(on_event))
        fleet = FleetShare(share=share, nodes=nodes)
        self.clock = clock
        self.failure = FailurePolicy(on_failure, clock or default_clock, fleet)
        """The failure mode of checks that do not bring their own."""
        self.hold_times = HoldTimes()
        self.store = open_store(
            url,
            clock=clock,
            default_clock=default_clock,
            namespace=_checked_namespace(namespace),
            budget=_checked_budget(budget, on_failure),
            max_keys=_checked_max_keys(max_keys),
            asynchronous=self.is_async,
        )
        self.memory: MemoryStore | None = self.store if isinstance(self.store, MemoryStore) else None
        """The store if it is in memory: it answers at once and cannot fail, so that nothing else is consulted."""
        self._owns_store = True
        self.local = LocalTier(events, clock=clock, fleet=fleet)
        self.local.configure(remember=_checked_remember(remember, clock), lease_us=_checked_lease(lease))
        self.maintenance: MaintenanceThread | None = None
        if self.memory is None:
            reports = on_failure != "raise" or on_event is not None
            self.maintenance = MaintenanceThread(self.local, self.store, events, sends_heartbeats=reports)
        self.preconnects = self.maintenance is not None and on_failure != "raise"
        """True if the first request should find a connection, as its budget is too short to open one."""
        if self.preconnects:
            self.store.warm(wait=FIRST_CONNECTION_TIMEOUT_S)

    @classmethod
    def over_memory(cls, store: MemoryStore, clock: Clock | None, block_list: BlockList | None = None) -> Self:
        """An engine on a memory store that another owner closes."""
        engine = cls(clock=clock)
        engine.store = engine.memory = store
        engine._owns_store = False
        if block_list is not None:
            engine.local.block_list = block_list
        return engine

    def disconnect_store(self) -> None:
        """Answer by the failure mode from now on, as if the store were unavailable: for tests."""
        self.store, self.memory = _UnavailableStore(), None

    @property
    def tier(self) -> LocalTier | None:
        """The local tier for flows: None for a store in memory, which is asked for every check."""
        return self.local if self.memory is None else None

    def health(self) -> Health:
        """Report whether the store decides, the state of its servers, and the debt of an outage."""
        return self.local.health() if self.maintenance is None else self.maintenance.health()

    @property
    def stats(self) -> Any:
        return self.store.stats if self.memory is not None else {**self.store.stats, **self.local.stats}

    def join_fleet(self) -> FleetShare:
        """Send heartbeats and follow the block list, for a gate; return this node's share of the limits."""
        if self.maintenance is not None:
            self.maintenance.sends_heartbeats = self.maintenance.needs_block_list = True
            self.maintenance.ensure()
            self.store.warm()
        return self.local.fleet

    def configure(
        self,
        *,
        budget: float,
        share: Fraction,
        nodes: int,
        remember: int,
        lease_us: int,
        announced: Iterable[Limit],
        never_leased: Iterable[Limit],
    ) -> None:
        """Apply the store settings of a policy."""
        local = self.local
        local.fleet.share = share
        if self.maintenance is None:
            return
        self.store.set_budget(budget)
        if not self.maintenance.knows_fleet_size:
            local.fleet.nodes = nodes
        local.configure(remember=remember, lease_us=lease_us)
        local.prepaid.announce(announced)
        local.prepaid.exclude(never_leased)

    # ---------------------------------------------------------------- block list: these may wait for the store

    def block(self, block: LiveBlock) -> None:
        kind, value, until_us, reason = block
        if self.maintenance is not None:
            with closing(self.store.background_client()) as client:
                client.block(kind, value, until_us=until_us, reason=reason)
        self.local.block_list.set(*block)

    def unblock(self, block: LiveBlock) -> bool:
        """True if there was such a block."""
        kind, value, _, _ = block
        if self.maintenance is None:
            return self.local.block_list.drop(kind, value)
        with closing(self.store.background_client()) as client:
            existed: bool = client.unblock(kind, value)
        self.local.block_list.drop(kind, value)
        return existed

    def blocks(self) -> list[LiveBlock]:
        if self.maintenance is None:
            now_us = (self.clock or SystemClock()).now_us()
            return [block for block in self.local.block_list if block.applies_at(now_us)]
        with closing(self.store.background_client()) as client:
            return [LiveBlock(*block) for block in client.blocks()]

    # ---------------------------------------------------------------- for the drivers

    def stopwatch(self) -> Callable[[], float]:
        """A function that returns the seconds since this call, on the clock by which the engine waits."""
        if self.clock is not None and hasattr(self.clock, "sleep"):
            now_us, start_us = self.clock.now_us, self.clock.now_us()
            return lambda: (now_us() - start_us) / 1_000_000
        start = time.monotonic()
        return lambda: time.monotonic() - start

    def _stop_maintenance(self) -> Iterator[float]:
        """Return prepaid tokens and stop the maintenance thread; yields the seconds to sleep before the next step.

        Refills in flight are awaited first: tokens that arrive after the limiter is closed would stay charged.
        """
        maintenance = self.maintenance
        if maintenance is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.local.stop_prepaying()
        while self.local.prepaid.pending_refills and time.monotonic() < deadline:
            yield CLOSE_POLL_INTERVAL_S
        maintenance.close()
        while maintenance.is_stopping and time.monotonic() < deadline:
            yield CLOSE_POLL_INTERVAL_S


class SyncEngine(Engine):
    """Drives flows with threads."""

    is_async = False

    def decide(self, check: Check, fallback: Fallback) -> Decision:
        """Decide a check; see `headgate.flow` for the order of steps."""
        local = self.local
        found = flow.start(check, local, fallback)
        if found is None:
            sent_ns = local.now_ns()
            try:
                decision: Decision = self.store.run(check)
            except StoreError as error:
                return local.handle_failure(check, error, fallback)
            local.record_answer(check, decision, sent_ns)
            return decision
        return found if isinstance(found, Decision) else self.drive(found)

    def run(self, operation: Call) -> Any:
        """Run any operation; only checks have a failure mode."""
        return self.drive(flow.run(operation, self.tier, self.failure))

    def drive(self, steps: Generator[Any, Any, T]) -> T:
        """Run a flow to its end and return its result."""
        sleep = getattr(self.clock, "sleep", time.sleep)
        refill: _RefillThread | None = None
        try:
            step = next(steps)
            while True:
                if type(step) is RefillCheck and get_ident() == threading.main_thread().ident:
                    refill = _RefillThread(steps, step, self.store.run)
                    step, refill = refill.wait(), None
                    continue
                try:
                    result = None
                    if isinstance(step, flow.Pause):
                        sleep(step.seconds)
                    elif isinstance(step, SingleFlight):
                        step.wait(2 * self.store.budget)
                    else:
                        result = self.store.run(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            if refill is None:
                steps.close()  # now: a caller that keeps the exception would keep the flow open
            else:
                refill.abandon()

    def close(self) -> None:
        for seconds in self._stop_maintenance():
            time.sleep(seconds)
        if self._owns_store:
            self.store.close()


class AsyncEngine(Engine):
    """Drives flows with `await`."""

    is_async = True

    async def decide(self, check: Check, fallback: Fallback) -> Decision:
        """Decide a check; see `headgate.flow` for the order of steps."""
        local = self.local
        found = flow.start(check, local, fallback)
        if found is None:
            sent_ns = local.now_ns()
            try:
                decision: Decision = await self.store.run(check)
            except StoreError as error:
                return local.handle_failure(check, error, fallback)
            local.record_answer(check, decision, sent_ns)
            return decision
        return found if isinstance(found, Decision) else await self.drive(found)

    async def run(self, operation: Call) -> Any:
        """Run any operation; only checks have a failure mode."""
        return await self.drive(flow.run(operation, self.tier, self.failure))

    async def drive(self, steps: Generator[Any, Any, T]) -> T:
        """Run a flow to its end and return its result."""
        refill: asyncio.Future[Any] | None = None
        try:
            step = next(steps)
            while True:
                try:
                    result: Any = None
                    if isinstance(step, flow.Pause):
                        await self._sleep(step.seconds)
                    elif isinstance(step, SingleFlight):
                        await step.future(2 * self.store.budget)
                    elif self.memory is not None:
                        result = self.memory.run(step)
                    elif type(step) is RefillCheck:
                        refill = asyncio.ensure_future(self.store.run(step))
                        result = await asyncio.shield(refill)
                    else:
                        result = await self.store.run(step)
                except StoreError as error:
                    refill = None
                    step = steps.throw(error)
                else:
                    refill = None
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            if refill is None:
                steps.close()  # now: a caller that keeps the exception would keep the flow open
            else:  # cancelled, but the refill is in flight, and its tokens are for later requests
                refill.add_done_callback(partial(_finish_refill, steps))

    async def close(self) -> None:
        for seconds in self._stop_maintenance():
            await asyncio.sleep(seconds)
        if self.memory is None:
            await self.store.close()
        elif self._owns_store:
            self.memory.close()

    async def _sleep(self, seconds: float) -> None:
        sleep = getattr(self.clock, "sleep", None)
        if sleep is not None:
            sleep(seconds)
        await asyncio.sleep(0 if sleep is not None else seconds)


class _RefillThread:
    """Runs a refill of prepaid tokens for the main thread, in a thread in which no signal handler runs.

    A handler that raises would lose the answer, and with it tokens that were charged for later requests. Here it ends
    only the waiting check: the refill continues, and its flow gets the answer.
    """

    def __init__(self, steps: flow.Flow, refill: RefillCheck, run: Callable[[Any], Any]) -> None:
        self._steps, self._refill, self._run = steps, refill, run
        self._finished = threading.Lock()
        self._finished.acquire()
        self._is_finished = self._is_abandoned = False
        self._next_step: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Return the next step of the flow, or raise what ends it."""
        try:
            start_new_thread(self._work, ())
        except RuntimeError:  # too many threads, or the interpreter is shutting down
            self._work()
        self._finished.acquire()
        if self._error is not None:
            raise self._error
        return self._next_step

    def abandon(self) -> None:
        """Close the flow as soon as it has the answer."""
        self._is_abandoned = True
        if self._is_finished:
            self._steps.close()

    def _work(self) -> None:
        try:
            try:
                result = self._run(self._refill)
            except StoreError as error:
                self._next_step = self._steps.throw(error)
            else:
                self._next_step = self._steps.send(result)
        except BaseException as error:
            self._error = error
        finally:
            self._is_finished = True
            if self._is_abandoned:
                with suppress(ValueError):  # `abandon` closes it at this moment
                    self._steps.close()
            self._finished.release()


def _finish_refill(steps: flow.Flow, refill: asyncio.Future[Any]) -> None:
    """Pass the answer of a refill to its flow after the check was cancelled. Later steps of the flow are not run."""
    with suppress(StopIteration, StoreError):
        if not refill.cancelled():
            error = refill.exception()
            steps.send(refill.result()) if error is None else steps.throw(error)
    steps.close()


class _UnavailableStore:
    """A store that fails every operation, for tests."""

    budget = DEFAULT_BUDGET_S
    stats: Final[dict[str, int]] = {}

    def run(self, operation: object) -> Any:
        raise StoreUnavailable("the store is unavailable: store_down() of headgate.testing")

    def close(self) -> None:
        """Nothing to close."""


def _checked_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not namespace or not namespace.isprintable() or len(namespace) > 100:
        raise InvalidConfiguration(f"namespace {namespace!r}: use 1 to 100 printable characters")
    return escape(namespace)


def _checked_budget(budget: float | None, on_failure: str) -> float:
    if budget is None:
        return RAISE_BUDGET_S if on_failure == "raise" else DEFAULT_BUDGET_S
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 60:
        raise InvalidConfiguration(
            f"budget {budget!r}: give the seconds that the store may take, above 0 and at most 60"
        )
    return float(budget)


def _checked_remember(remember: int | None, clock: Clock | None) -> int:
    if remember is None:
        # An injected clock is for tests, which expect every answer from the store.
        return DEFAULT_REMEMBER if clock is None else 0
    if type(remember) is not int or remember < 0:
        raise InvalidConfiguration(f"remember {remember!r} is not a number of denials: give a whole number, 0 for none")
    return remember


def _checked_lease(lease: float) -> int:
    if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 <= lease <= 1:
        raise InvalidConfiguration(f"lease {lease!r}: give seconds from 0, which turns prepaying off, up to 1")
    return round(lease * 1_000_000)


def _checked_listener(on_event: Any) -> Any:
    if on_event is not None and not callable(on_event):
        raise InvalidConfiguration(f"on_event {on_event!r} cannot be called: give a function that takes an event")
    return on_event


def _checked_max_keys(max_keys: int) -> int:
    if type(max_keys) is not int or max_keys < 1:
        raise InvalidConfiguration(f"max_keys {max_keys!r} is not a whole number of at least 1")
    return max_keys
