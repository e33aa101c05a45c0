"""The background work of a limiter with regions: one thread exchanges usage and messages, another leases tokens.

They start with the first request that needs them, and end with the limiter: neither keeps one alive that is not used
any more.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from headgate.errors import StoreError
from headgate.regions.exchange import RegionExchange
from headgate.regions.reconciled import AdmissionCounter
from headgate.regions.reserved import Demand
from headgate.regions.reserved_agent import ReservedAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.regions.model import Regions
    from headgate.stores.redis.region_client import RegionClient

__all__ = ["EXCHANGE_INTERVAL_S", "RegionWorker"]

logger = logging.getLogger("headgate")

EXCHANGE_INTERVAL_S: Final = 1.05
"""From one exchange to the next: fewer than one call per second to each other region."""
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
    ) -> None:
        self.regions, self.interval_s = regions, interval_s
        self.counter = AdmissionCounter()
        self._open_client = open_client
        self._is_closed, self._deadline = False, 0.0
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """A child has neither the threads nor the clients of its parent."""
        self.demand = Demand()
        self.exchange: RegionExchange | None = None
        self.agent: ReservedAgent | None = None
        self._threads: dict[str, tuple[BackgroundThread, InterruptSafeEvent]] = {}

    def ensure_exchange(self) -> RegionExchange:
        """The exchange, which runs from now on."""
        if self.exchange is None:
            clients = {name: self._open_client(name) for name in self.regions.names}
            self.exchange = RegionExchange(self.regions.own, clients, counter=self.counter)
        self._start("exchange", _run_exchange)
        return self.exchange

    def ensure_agent(self) -> None:
        """Lease tokens for reserved limits from now on."""
        if self.agent is None:
            own, home = self._open_client(self.regions.own), self._open_client(self.regions.home)
            self.agent = ReservedAgent(own, home, self.demand, regions=len(self.regions.names))
        event = self._start("leases", _run_agent)
        self.demand.wake = event.set

    def close(self) -> None:
        """Stop the threads, after they have shared what was admitted; see `is_stopping`."""
        self._is_closed, self._deadline = True, time.monotonic() + CLOSE_TIMEOUT_S
        for _, event in self._threads.values():
            event.set()

    @property
    def is_stopping(self) -> bool:
        """True after `close`, while threads are running; at most for `CLOSE_TIMEOUT_S`."""
        return self._is_closed and self.is_running and time.monotonic() < self._deadline

    @property
    def is_running(self) -> bool:
        """True while a thread is running, other than the caller's."""
        return any(thread.is_alive and not thread.is_current for thread, _ in self._threads.values())

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _start(self, name: str, run: Callable[..., Any]) -> InterruptSafeEvent:
        running = self._threads.get(name)
        if (running is None or not running[0].is_alive) and not self._is_closed:
            event = InterruptSafeEvent()
            thread = BackgroundThread(f"headgate-{name}", run, weakref.ref(self, lambda _: event.set()), event)
            running = self._threads[name] = thread, event
        return running[1] if running is not None else InterruptSafeEvent()


def _run_exchange(reference: weakref.ref[RegionWorker], event: InterruptSafeEvent) -> None:
    wait_s, exchange = 0.0, None
    while not event.wait(wait_s):
        worker = reference()
        if worker is None or worker.is_closed:
            break
        exchange, next_at = worker.exchange, time.monotonic() + worker.interval_s
        held = {} if worker.agent is None else worker.agent.held()
        del worker
        if exchange is not None:
            try:
                exchange.run_once()
                exchange.publish(held)
            except StoreError as error:
                logger.warning("region %s: no exchange: %s", exchange.own, error)
        wait_s = max(MIN_PAUSE_S, next_at - time.monotonic())
    if exchange is not None:
        exchange.close()


def _run_agent(reference: weakref.ref[RegionWorker], event: InterruptSafeEvent) -> None:
    wait_s, agent = 0.0, None
    while True:
        event.wait(wait_s)
        time.sleep(MIN_AGENT_INTERVAL_S)  # so that many new clients share a run
        event.clear()
        worker = reference()
        if worker is None or worker.is_closed:
            break
        agent = worker.agent
        del worker
        wait_s = IDLE_INTERVAL_S
        if agent is not None:
            try:
                wait_s = agent.run_once() or IDLE_INTERVAL_S
            except StoreError as error:
                logger.warning("no tokens are leased from the home region: %s", error)
                wait_s = 1.0
    if agent is not None:
        agent.close()
