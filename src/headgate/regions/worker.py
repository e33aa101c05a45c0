"""The background work of a limiter with regions: one worker exchanges usage and messages, another leases tokens.

They start with the first request that needs them, the exchange as soon as there is a reconciled limit, and end with the
limiter: neither keeps one alive that is not used any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.errors import StoreError
from headgate.regions.exchange import RegionExchange
from headgate.regions.reconciled import AdmissionCounter
from headgate.regions.reserved import Demand
from headgate.regions.reserved_agent import ReservedAgent
from headgate.runtime import SYSTEM, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.regions.model import Regions
    from headgate.stores.redis.region_client import RegionClient

__all__ = ["EXCHANGE_INTERVAL_S", "RegionWorker"]

logger = logging.getLogger("headgate")

EXCHANGE_INTERVAL_S: Final = 1.05
"""From one exchange to the next: fewer than one call to another region per second."""
MIN_PAUSE_S: Final = 0.25
IDLE_INTERVAL_S: Final = 5.0
MIN_AGENT_INTERVAL_S: Final = 0.01
CLOSE_TIMEOUT_S: Final = 1.5


class RegionWorker:
    """Runs the exchange and the agent of reserved limits for one limiter."""

    def __init__(
        self,
        regions: Regions,
        open_client: Callable[[str], RegionClient],
        *,
        interval_s: float = EXCHANGE_INTERVAL_S,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.regions, self.interval_s, self.runtime = regions, interval_s, runtime
        self.counter, self.demand = AdmissionCounter(), Demand()
        self._open_client = open_client
        self._is_closed, self._deadline = False, 0.0
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """A child has neither the workers nor the clients of its parent."""
        self._start_lock = threading.RLock()
        """Held while workers are started: requests in several threads may be the first at the same time."""
        self.demand.clear()
        self.exchange: RegionExchange | None = None
        self.agent: ReservedAgent | None = None
        self._running: dict[str, tuple[Any, Any]] = {}
        """Workers by name, with the events that wake them."""

    def ensure_exchange(self) -> RegionExchange:
        """The exchange, which runs from now on."""
        with self._start_lock:
            if self.exchange is None:
                clients = {name: self._open_client(name) for name in self.regions.names}
                own, home = self.regions.own, self.regions.home
                self.exchange = RegionExchange(own, clients, home=home, counter=self.counter, runtime=self.runtime)
            self._start("exchange", _run_exchange)
            return self.exchange

    def ensure_agent(self) -> None:
        """Lease tokens for reserved limits from now on."""
        with self._start_lock:
            if self.agent is None:
                own, home = self._open_client(self.regions.own), self._open_client(self.regions.home)
                monotonic, count = self.runtime.monotonic, len(self.regions.names)
                self.agent = ReservedAgent(own, home, self.demand, regions=count, monotonic=monotonic)
            event = self._start("leases", _run_agent)
            self.demand.wake = event.set

    def close(self) -> None:
        """Stop the workers, after they have shared what was admitted; see `is_stopping`."""
        self._is_closed, self._deadline = True, self.runtime.monotonic() + CLOSE_TIMEOUT_S
        for _, event in self._running.values():
            event.set()

    @property
    def is_stopping(self) -> bool:
        """True after `close`, while workers are running; at most for `CLOSE_TIMEOUT_S`."""
        return self._is_closed and self.is_running and self.runtime.monotonic() < self._deadline

    @property
    def is_running(self) -> bool:
        """True while a worker is running, other than the caller."""
        return any(
            worker is not None and worker.is_alive and not worker.is_current for worker, _ in self._running.values()
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _start(self, name: str, run: Callable[..., Iterator[float]]) -> Any:
        """Start a worker that is not running; returns the event that wakes it."""
        worker, event = self._running.get(name, (None, None))
        if (worker is None or not worker.is_alive) and not self._is_closed:
            event = self.runtime.new_event()
            steps = run(weakref.ref(self, lambda _: event.set()))
            self._running[name] = self.runtime.start_worker(f"headgate-{name}", steps, event), event
        return event if event is not None else self.runtime.new_event()


def _run_exchange(reference: weakref.ref[RegionWorker]) -> Iterator[float]:
    wait_s, exchange, is_failing = 0.0, None, False
    while True:
        yield wait_s
        worker = reference()
        if worker is None or worker.is_closed:
            break
        exchange, monotonic = worker.exchange, worker.runtime.monotonic
        next_at = monotonic() + worker.interval_s
        held = {} if worker.agent is None else worker.agent.held()
        del worker
        if exchange is not None:
            try:
                exchange.run_once()
                exchange.publish(held)
                is_failing = False
            except StoreError as error:
                if not is_failing:
                    logger.warning("region %s: no exchange: %s", exchange.own, error)
                is_failing = True
        wait_s = max(MIN_PAUSE_S, next_at - monotonic())
    if exchange is not None:
        exchange.close()


def _run_agent(reference: weakref.ref[RegionWorker]) -> Iterator[float]:
    wait_s, agent = 0.0, None
    while True:
        yield wait_s
        worker = reference()
        if worker is None or worker.is_closed:
            break
        agent, monotonic = worker.agent, worker.runtime.monotonic
        del worker
        begin = monotonic() + MIN_AGENT_INTERVAL_S  # so that many new clients share a run
        while (left_s := begin - monotonic()) > 1e-6:  # less is a rounding error
            yield left_s
        wait_s = IDLE_INTERVAL_S
        if agent is not None:
            try:
                wait_s = agent.run_once() or IDLE_INTERVAL_S
            except StoreError as error:
                logger.warning("no tokens are leased from the home region: %s", error)
                wait_s = 1.0
    if agent is not None:
        agent.close()
