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
from headgate.limits import ReconciledLimits
from headgate.local.block_list import LiveBlock
from headgate.local.live_clients import LiveClientStore
from headgate.local.maintenance import MaintenanceThread
from headgate.local.prepaid import RefillCheck
from headgate.local.single_flight import SingleFlight
from headgate.local.tier import LocalTier
from headgate.regions.model import read_regions
from headgate.regions.reserved import DEFAULT_SAFE_SHARE
from headgate.regions.routing import AtHome, RegionRouter, check_region
from headgate.regions.worker import RegionWorker
from headgate.runtime import SYSTEM, Runtime
from headgate.stores import open_store
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from fractions import Fraction
    from typing import Self

    from headgate.clock import Clock
    from headgate.events import Event
    from headgate.failure import FailureMode, Fallback
    from headgate.health import Health
    from headgate.limits import Limit
    from headgate.local.live_clients import LiveClients
    from headgate.regions.cost import RegionCost
    from headgate.regions.model import Regions
    from headgate.stores.operations import Call, Check
    from headgate.stores.redis.region_client import RegionClient

__all__ = ["AsyncEngine", "Engine", "SyncEngine"]

T = TypeVar("T")
DEFAULT_BUDGET_S: Final = 0.005
RAISE_BUDGET_S: Final = 1.0  # default budget where the only alternative to an answer of the store is an exception
FIRST_CONNECTION_TIMEOUT_S: Final = 0.25
"""Upper bound on how long the constructor waits for the first connection, so that the first request need not."""
DEFAULT_REMEMBER: Final = 10_000
DEFAULT_CENTRAL_BUDGET_S: Final = 0.5  # for a round trip to the home region
CLOSE_TIMEOUT_S: Final = 0.25  # upper bound on how long `close` waits for prepaid tokens to be returned to the store
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
        region: str | None = None,
        regions: Mapping[str, Any] | None = None,
        home: str | None = None,
        central_budget: float = DEFAULT_CENTRAL_BUDGET_S,
        safe_share: float = DEFAULT_SAFE_SHARE,
        runtime: Runtime = SYSTEM,
    ) -> None:
        has_clock = clock is None or callable(getattr(clock, "now_us", None))
        _check(has_clock, f"{clock!r} is not a clock: it must have a method now_us()")
        is_name = isinstance(namespace, str) and 0 < len(namespace) <= 100 and namespace.isprintable()
        _check(is_name, f"namespace {namespace!r}: use 1 to 100 printable characters")
        if budget is None:
            budget = RAISE_BUDGET_S if on_failure == "raise" else DEFAULT_BUDGET_S
        problem = f"budget {budget!r}: give the seconds that the store may take, above 0 and at most 60"
        _check(_is_number(budget) and 0 < budget <= 60, problem)
        is_size = type(max_keys) is int and max_keys >= 1
        _check(is_size, f"max_keys {max_keys!r} is not a whole number of at least 1")
        if remember is None:
            remember = DEFAULT_REMEMBER if clock is None else 0  # tests expect every answer from the store
        problem = f"remember {remember!r} is not a number of denials: give a whole number, 0 for none"
        _check(type(remember) is int and remember >= 0, problem)
        problem = f"lease {lease!r}: give seconds from 0, which turns prepaying off, up to 1"
        _check(_is_number(lease) and 0 <= lease <= 1, problem)
        problem = f"on_event {on_event!r} cannot be called: give a function that takes an event"
        _check(on_event is None or callable(on_event), problem)
        problem = (
            f"central_budget {central_budget!r}: give the seconds that the home region may take, above 0, up to 60"
        )
        _check(_is_number(central_budget) and 0 < central_budget <= 60, problem)
        known_regions = read_regions(url, region, regions, home, safe_share)
        default_clock: Clock = SystemClock() if runtime is SYSTEM else runtime
        events = EventEmitter(on_event)
        fleet = FleetShare(share=share, nodes=nodes)
        self.clock = clock
        self.failure = FailurePolicy(on_failure, clock or default_clock, fleet)
        """The failure mode of checks that do not bring their own."""
        self.hold_times = HoldTimes()
        self.store = self._open_store(
            url,
            clock=clock,
            default_clock=default_clock,
            namespace=escape(namespace),
            budget=float(budget),
            max_keys=max_keys,
            asynchronous=self.is_async,
        )
        self.memory: MemoryStore | None = self.store if isinstance(self.store, MemoryStore) else None
        """The store if it is in memory: it answers at once and cannot fail, so that nothing else is consulted."""
        self._owns_store = True
        self.local = LocalTier(events, clock=clock, fleet=fleet, runtime=runtime)
        self.local.configure(remember=remember, lease_us=round(lease * 1_000_000))
        self.maintenance: MaintenanceThread | None = None
        if self.memory is None:
            reports = on_failure != "raise" or on_event is not None
            self.maintenance = MaintenanceThread(
                self.local,
                self.store,
                sends_heartbeats=reports,
                follows_rollouts=clock is None and runtime is SYSTEM,
                runtime=runtime,
            )
        self.preconnects = self.maintenance is not None and on_failure != "raise"
        """True if the first request should find a connection, as its budget is too short to open one."""
        self.worker: RegionWorker | None = None
        """The background work between regions; None without regions."""
        self.router: Any = None
        """Translates limits with a region mode; None without regions."""
        if known_regions is not None:
            opener = self._region_clients(known_regions, clock, default_clock, escape(namespace))
            self.worker = RegionWorker(known_regions, opener, runtime=runtime)
            self.router = RegionRouter(known_regions, self.worker, (clock or default_clock).now_us)
            if len(known_regions.urls) > 1 and runtime is SYSTEM:
                ReconciledLimits.listen(self.worker)
        self.home: Any = None
        """The engine of the home region's store; None without regions, and in the home region itself."""
        if known_regions is not None and not known_regions.is_home:
            local: dict[str, Any] = {"remember": remember, "lease": lease, "share": share, "nodes": nodes}
            options: dict[str, Any] = {
                "clock": clock,
                "namespace": namespace,
                "on_failure": on_failure,
                "on_event": on_event,
                "runtime": runtime,
                **local,
            }
            self.home = type(self)(known_regions.home_url, budget=central_budget, **options)
        if self.preconnects:
            self.store.warm(wait=FIRST_CONNECTION_TIMEOUT_S)

    @classmethod
    def over_memory(cls, store: MemoryStore, clock: Clock | None, live_clients: LiveClients | None = None) -> Self:
        """An engine on a memory store that another owner closes."""
        engine = cls(clock=clock)
        engine.store = engine.memory = store
        engine._owns_store = False
        if live_clients is not None:
            engine.local.live_clients = live_clients
        return engine

    def _open_store(self, url: Any, **options: Any) -> Any:
        return open_store(url, **options)

    def _region_clients(self, regions: Regions, *options: Any) -> Callable[[str], RegionClient]:
        """A function that opens the client of a region's store, for background work."""
        return _ClientOpener(regions, self.store, *options)

    def disconnect_store(self) -> None:
        """Answer by the failure mode from now on, as if the store were unavailable: for tests."""
        self.store, self.memory = _UnavailableStore(), None

    @property
    def tier(self) -> LocalTier | None:
        """The local tier for flows: None for a store in memory, which is asked for every check."""
        return self.local if self.memory is None else None

    def bound(self, limit: Limit) -> int:
        """The most that all regions together may admit in one period beyond what one store would."""
        if self.router is None:
            check_region([limit.by()])
            return 0
        cost: RegionCost = self.router.cost(limit)
        return cost.bound

    def health(self) -> Health:
        """Report whether the store decides, the state of its servers, and the debt of an outage."""
        return self.local.health() if self.maintenance is None else self.maintenance.health()

    @property
    def stats(self) -> Any:
        return self.store.stats if self.memory is not None else {**self.store.stats, **self.local.stats}

    def join_fleet(self) -> FleetShare:
        """Send heartbeats and follow the block list, for a gate; return this node's share of the limits."""
        if self.home is not None:
            self.home.store.warm()
        if self.worker is not None:
            self.worker.ensure_exchange()
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
        central_budget: float | None = None,
    ) -> None:
        """Apply the store settings of a policy."""
        local = self.local
        local.fleet.share = share
        if self.maintenance is None:
            return
        if self.router is not None:
            (announced, announced_at_home), (never_leased, never_leased_at_home) = [
                self.router.counted_limits(limits) for limits in (announced, never_leased)
            ]
            if self.home is not None:
                self.home.configure(
                    budget=central_budget or self.home.store.budget,
                    share=share,
                    nodes=nodes,
                    remember=remember,
                    lease_us=lease_us,
                    announced=announced_at_home,
                    never_leased=never_leased_at_home,
                )
        self.store.set_budget(budget)
        if not self.maintenance.knows_fleet_size:
            local.fleet.nodes = nodes
        local.configure(remember=remember, lease_us=lease_us)
        local.prepaid.announce(announced)
        local.prepaid.exclude(never_leased)

    def block(self, block: LiveBlock) -> None:
        """Add a block. Like the next two methods, it may wait for the store."""
        with self.live_client_store() as store:
            store.block_all([block])

    def unblock(self, block: LiveBlock) -> bool:
        """True if there was such a block."""
        with self.live_client_store() as store:
            return store.unblock(block.kind, block.value)

    def blocks(self) -> list[LiveBlock]:
        if self.maintenance is None:
            now_us = (self.clock or SystemClock()).now_us()
            return [block for block in self.local.live_clients.blocks if block.applies_at(now_us)]
        with closing(self.store.background_client()) as client:
            return [LiveBlock(*block) for block in client.blocks()]

    def live_client_store(self) -> LiveClientStore:
        """Reads and writes the blocks and restrictions that all nodes share."""
        store = None if self.maintenance is None else self.store
        return LiveClientStore(self.local.live_clients, store, self._announce_block)

    def _announce_block(self, block: LiveBlock, is_set: bool) -> None:
        """Post a change of a block to the other regions."""
        kind, value, until_us, reason = block
        if self.worker is None or not (notice := self.router.residency.notice(kind, value, reason)):
            return
        if is_set:
            self.worker.ensure_exchange().post_block(notice.kind, notice.value, until_us=until_us, reason=notice.reason)
        else:
            self.worker.ensure_exchange().post_unblock(notice.kind, notice.value)

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
        if self.worker is not None:
            self.worker.close()
            while self.worker.is_stopping:
                yield CLOSE_POLL_INTERVAL_S
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
        local, router = self.local, self.router
        counted = check if router is None else router.own_check(check)
        found = flow.start(counted, local, fallback, router)
        if found is None:
            sent_ns = local.now_ns()
            try:
                decision: Decision = self.store.run(counted)
            except StoreError as error:
                decision = local.handle_failure(counted, error, fallback)
            else:
                local.record_answer(counted, decision, sent_ns)
        else:
            decision = found if isinstance(found, Decision) else self.drive(found)
        if counted is check:
            return decision
        known: Decision | None = router.finish_known(check, counted, decision)
        if known is not None:
            return known
        finished = flow.finish(check, counted, decision, local, fallback, router)
        return finished if isinstance(finished, Decision) else self.drive(finished)

    def run(self, operation: Call, fallback: Fallback | None = None) -> Any:
        """Run any operation; only checks have a failure mode, by default that of the engine."""
        return self.drive(flow.run(operation, self.tier, fallback or self.failure, self.router))

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
                    elif isinstance(step, AtHome) and self.home is not None:
                        result = self.home.run(step.operation, step.fallback)
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
        if self.home is not None:
            self.home.close()
        for seconds in self._stop_maintenance():
            time.sleep(seconds)
        if self._owns_store:
            self.store.close()


class AsyncEngine(Engine):
    """Drives flows with `await`."""

    is_async = True

    async def decide(self, check: Check, fallback: Fallback) -> Decision:
        """Decide a check; see `headgate.flow` for the order of steps."""
        local, router = self.local, self.router
        counted = check if router is None else router.own_check(check)
        found = flow.start(counted, local, fallback, router)
        if found is None:
            sent_ns = local.now_ns()
            try:
                decision: Decision = await self.store.run(counted)
            except StoreError as error:
                decision = local.handle_failure(counted, error, fallback)
            else:
                local.record_answer(counted, decision, sent_ns)
        else:
            decision = found if isinstance(found, Decision) else await self.drive(found)
        if counted is check:
            return decision
        known: Decision | None = router.finish_known(check, counted, decision)
        if known is not None:
            return known
        finished = flow.finish(check, counted, decision, local, fallback, router)
        return finished if isinstance(finished, Decision) else await self.drive(finished)

    async def run(self, operation: Call, fallback: Fallback | None = None) -> Any:
        """Run any operation; only checks have a failure mode, by default that of the engine."""
        return await self.drive(flow.run(operation, self.tier, fallback or self.failure, self.router))

    async def drive(self, steps: Generator[Any, Any, T]) -> T:
        """Run a flow to its end and return its result."""
        sleep = getattr(self.clock, "sleep", None)
        refill: asyncio.Future[Any] | None = None
        try:
            step = next(steps)
            while True:
                try:
                    result: Any = None
                    if isinstance(step, flow.Pause):
                        if sleep is not None:  # of a fake clock
                            sleep(step.seconds)
                        await asyncio.sleep(0 if sleep is not None else step.seconds)
                    elif isinstance(step, SingleFlight):
                        await step.future(2 * self.store.budget)
                    elif isinstance(step, AtHome) and self.home is not None:
                        result = await self.home.run(step.operation, step.fallback)
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
        if self.home is not None:
            await self.home.close()
        for seconds in self._stop_maintenance():
            await asyncio.sleep(seconds)
        if self.memory is None:
            await self.store.close()
        elif self._owns_store:
            self.memory.close()


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


class _ClientOpener:
    """Opens clients of the regions' stores for background work."""

    def __init__(self, regions: Regions, store: Any, clock: Clock | None, default_clock: Clock, namespace: str) -> None:
        self._regions, self._store = regions, store
        self._options: dict[str, Any] = {"clock": clock, "default_clock": default_clock, "namespace": namespace}

    def __call__(self, region: str) -> RegionClient:
        from headgate.stores.redis.region_client import RegionClient

        if region == self._regions.own:
            return RegionClient(self._store.background_client())
        url = dict(self._regions.urls)[region]
        store = open_store(url, **self._options, budget=RAISE_BUDGET_S, max_keys=1, asynchronous=False)
        return RegionClient(store.background_client())


class _UnavailableStore:
    """A store that fails every operation, for tests."""

    budget = DEFAULT_BUDGET_S
    stats: Final[dict[str, int]] = {}

    def run(self, operation: object) -> Any:
        raise StoreUnavailable("the store is unavailable: store_down() of headgate.testing")

    def close(self) -> None:
        """Nothing to close."""


def _check(is_valid: bool, problem: str) -> None:
    if not is_valid:
        raise InvalidConfiguration(problem)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
