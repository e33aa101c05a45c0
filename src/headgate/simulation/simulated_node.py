"""A process of a simulated fleet: the engine of a limiter, and the driver of its flows in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate import flow
from headgate.decisions import Decision
from headgate.engine import Engine
from headgate.errors import StoreError
from headgate.local.single_flight import SingleFlight
from headgate.regions.routing import AtHome
from headgate.simulation.simulated_regions import SimulatedRegionClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from headgate.events import Event
    from headgate.regions.model import Regions
    from headgate.simulation.scenario import NodeSettings, Scenario
    from headgate.simulation.simulated_store import SimulatedShard
    from headgate.stores.operations import Check

from headgate.simulation.simulated_store import SimulatedStore
from headgate.simulation.virtual_time import VirtualRuntime

__all__ = ["Answer", "FlowRun", "SimulatedEngine", "SimulatedNode"]

Answer = "Callable[[Decision | StoreError, int], None]"
"""Receives a decision, or the error of mode `raise`, and when it was made: by the server, or now."""


class SimulatedEngine(Engine):
    """Drives flows with events in virtual time: the third driver, beside those for threads and asyncio."""

    is_async = False
    store: SimulatedStore

    def __init__(self, store: SimulatedStore, runtime: VirtualRuntime, **options: Any) -> None:
        self.time = store.time
        super().__init__(store, runtime=runtime, **options)

    def _open_store(self, url: Any, **options: Any) -> Any:
        return url

    def decide(self, check: Check, answer: Callable[[Any, int], None]) -> None:
        """Decide a check; see `headgate.flow` for the order of steps."""
        local, router = self.local, self.router
        counted = check if router is None else router.own_check(check)
        if counted is not check:
            answer = partial(self._finish, check, counted, answer)
        found = flow.start(counted, local, self.failure, router)
        if found is None:
            sent_ns = local.now_ns()

            def receive(result: Any, executed_ns: int) -> None:
                if isinstance(result, StoreError):
                    try:
                        answer(local.handle_failure(counted, result, self.failure), self.time.now_ns)
                    except StoreError as error:
                        answer(error, self.time.now_ns)
                    return
                local.record_answer(counted, result, sent_ns)
                answer(result, executed_ns)

            self.store.submit(counted, receive)
        elif isinstance(found, Decision):
            answer(found, self.time.now_ns)
        else:
            FlowRun(self, found, answer).advance()

    def _finish(
        self, check: Check, counted: Check, answer: Callable[[Any, int], None], result: Any, at_ns: int
    ) -> None:
        """Translate the decision on the keys that the own region counts to those of the caller."""
        if isinstance(result, StoreError):
            answer(result, at_ns)
        elif result.allowed:
            answer(self.router.finish(check, counted, result), at_ns)
        else:
            found = flow.finish(check, counted, result, self.local, self.failure, self.router)
            if isinstance(found, Decision):
                answer(found, at_ns)
            else:
                FlowRun(self, found, answer).advance()

    def _region_clients(self, regions: Regions, *options: Any) -> Any:
        stores = dict(regions.urls)
        return lambda region: SimulatedRegionClient(stores[region].background_client())

    def stop(self) -> None:
        """Return prepaid tokens and leave the fleet, as `close()` does."""
        if self.home is not None:
            self.home.stop()
        if self.worker is not None:
            self.worker.close()
        self.local.stop_prepaying()
        if self.maintenance is not None:
            self.maintenance.close()


class FlowRun:
    """A flow on its way."""

    __slots__ = ("_answer", "_engine", "_executed_ns", "_steps", "_waits")

    def __init__(self, engine: SimulatedEngine, steps: flow.Flow, answer: Callable[[Any, int], None]) -> None:
        self._engine, self._steps, self._answer = engine, steps, answer
        self._executed_ns = 0
        self._waits = 0

    def advance(self, result: Any = None) -> None:
        engine, steps = self._engine, self._steps
        try:
            step = steps.throw(result) if isinstance(result, StoreError) else steps.send(result)
        except StopIteration as end:
            self._answer(end.value, self._executed_ns or engine.time.now_ns)
            return
        except StoreError as error:
            self._answer(error, engine.time.now_ns)
            return
        self._waits += 1
        if isinstance(step, flow.Pause):
            engine.time.after(step.seconds, self._resume, self._waits)
        elif isinstance(step, SingleFlight):
            waits = self._waits
            if step.add_waiter(lambda: engine.time.after(0, self._resume, waits)):
                engine.time.after(2 * engine.store.budget, self._resume, waits)
            else:
                engine.time.after(0, self._resume, waits)
        elif isinstance(step, AtHome):
            home: SimulatedEngine = engine.home
            steps = flow.run(step.operation, home.tier, step.fallback or home.failure, home.router)
            FlowRun(home, steps, self._receive).advance()
        else:
            engine.store.submit(step, self._receive)

    def _resume(self, waits: int) -> None:
        if waits == self._waits:  # not resumed by something else already
            self._waits += 1
            self.advance()

    def _receive(self, result: Any, executed_ns: int) -> None:
        self._executed_ns = executed_ns
        self.advance(result)


class SimulatedNode:
    """One process of the fleet: its engine, which a restart replaces, and the time it was without the store."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        shards: Mapping[str, Sequence[SimulatedShard]],
        random: Random,
    ) -> None:
        """`shards` are the servers of each region, by its name."""
        self.number = number
        self._time = next(iter(shards.values()))[0].time
        self.region = scenario.regions.names[number % len(scenario.regions.names)]
        self.runtime = VirtualRuntime(self._time, random)
        self.cut_off: set[int] = set()
        """The shards that this process cannot reach."""
        self.is_down = False
        self.outages: list[tuple[int, int, int]] = []
        """Of each time without the store: its begin and end, in virtual nanoseconds, and the live nodes it assumed."""
        self.retired_calls = self.retired_round_trips = 0
        """Of the processes before the last restart."""
        self._scenario, self._shards, self._random = scenario, shards, random
        self._outage: tuple[int, int] | None = None
        self._lost = 0
        """The stores that are unavailable: that of the own region, and that of the home region."""
        self.start()

    def start(self) -> None:
        settings: NodeSettings = self._scenario.nodes
        regions = self._scenario.regions
        stores = {region: self._new_store(region) for region in self._shards}
        nodes = -(-settings.count // len(stores))
        self.is_down = False
        options: dict[str, Any] = {}
        if len(stores) > 1:
            options = {"region": self.region, "regions": stores, "home": regions.home}
            options["central_budget"] = regions.central_budget_s
        self.engine = SimulatedEngine(
            stores[self.region],
            self.runtime,
            on_failure=settings.on_failure,
            budget=settings.budget_s,
            remember=settings.remember,
            lease=settings.lease_us / 1_000_000,
            share=settings.share,
            nodes=nodes,
            on_event=self._record_event,
            **options,
        )
        limits = self._scenario.limits
        self.engine.configure(
            budget=settings.budget_s,
            share=settings.share,
            nodes=nodes,
            remember=settings.remember,
            lease_us=settings.lease_us,
            announced=[limits[name] for name in self._scenario.announced],
            never_leased=[limits[name] for name in self._scenario.never_leased],
        )

    def _new_store(self, region: str) -> SimulatedStore:
        """The store of a region as this process reaches it."""
        network, budget_s = self._scenario.network, self._scenario.nodes.budget_s
        if region != self.region:
            network = replace(network, round_trip_ns=self._scenario.regions.round_trip_ns)
            budget_s = self._scenario.regions.central_budget_s
        is_cut_off = self.cut_off.__contains__
        return SimulatedStore(
            self._shards[region], network, budget=budget_s, random=self._random, is_cut_off=is_cut_off
        )

    def crash(self) -> None:
        """End the process without returning anything."""
        self._retire()
        self.runtime.kill_workers()
        for engine in (self.engine, self.engine.home):
            if engine is not None and engine.maintenance is not None:
                engine.maintenance.sends_heartbeats = False
                engine.maintenance.is_closed = True
        if self.engine.worker is not None:
            self.engine.worker.close()

    def shut_down(self) -> None:
        """End the process as a deploy does."""
        self.engine.stop()
        self._retire()

    @property
    def store_calls(self) -> int:
        return self.retired_calls + (0 if self.is_down else sum(store.calls for store in self._stores()))

    @property
    def round_trips(self) -> int:
        return self.retired_round_trips + (0 if self.is_down else sum(store.round_trips for store in self._stores()))

    def finish(self) -> None:
        """Record the end of the simulation."""
        self._end_outage()

    def _retire(self) -> None:
        self._end_outage()
        self.is_down = True
        self._lost = 0
        self.retired_calls += sum(store.calls for store in self._stores())
        self.retired_round_trips += sum(store.round_trips for store in self._stores())

    def _stores(self) -> list[SimulatedStore]:
        """The stores that requests are sent to: that of the own region, and that of the home region."""
        home = self.engine.home
        return [self.engine.store] if home is None else [self.engine.store, home.store]

    def _record_event(self, event: Event) -> None:
        if event.kind == "store-lost":
            self._lost += 1
            self._outage = self._outage or (self._time.now_ns, self.engine.local.fleet.nodes)
        elif event.kind == "store-back":
            self._lost = max(0, self._lost - 1)
            if not self._lost:
                self._end_outage()

    def _end_outage(self) -> None:
        if self._outage is not None:
            began_ns, nodes = self._outage
            self._outage = None
            self.outages.append((began_ns, self._time.now_ns, min(nodes, self.engine.local.fleet.nodes)))
