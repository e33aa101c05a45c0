"""Background maintenance of a limiter: health probes, heartbeats, settlement of debts, refunds of unspent tokens.

One thread does this while there is work, over connections of its own. A second one receives pub/sub messages. Neither
keeps a limiter alive that is not used any more.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from headgate._fork import reinit_after_fork
from headgate._interrupts import BackgroundThread, InterruptSafeEvent
from headgate.errors import StoreError, StoreTimeout
from headgate.health import Health, Shard
from headgate.local.ledger import settle
from headgate.local.membership import HEARTBEAT_INTERVAL_S, Membership

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.events import EventEmitter
    from headgate.local.block_list import BlockList
    from headgate.local.tier import LocalTier

__all__ = ["MaintenanceThread"]

logger = logging.getLogger("headgate")

_random = random.Random()
"""Not the shared generator, which tests may seed."""

FIRST_PROBE_S: Final = 0.02
MAX_PROBE_S: Final = 0.4
"""Interval between two probes of an unavailable server; doubles from the first to the last."""
PROBE_TIMEOUT_S: Final = 0.1
"""Per answer, as other servers wait to be probed."""
PRECONNECT_TIMEOUT_S: Final = 0.1
"""Time that requests are held back while the connection to a recovered server is opened."""
EPOCH_HEARTBEATS: Final = 5
"""Every so many heartbeats, the epochs of all servers are compared with the last known ones."""
REFUND_INTERVAL_S: Final = 0.05
"""Interval between two returns of unspent prepaid tokens."""
SETTLE_INTERVAL_S: Final = 0.1
CALM_BEFORE_SETTLING_S: Final = 0.3
"""Time without failures before debts are settled: otherwise the charges themselves might be lost."""
SETTLE_TIMEOUT_S: Final = 0.3
"""Time that requests may wait longer for an exact answer, so that debts are charged before it."""

PROBE, REFUND, SETTLE = 1, 2, 4
"""Kinds of work, as bits."""


class MaintainedStore(Protocol):
    """The interface of a store that needs maintenance."""

    breakers: Any
    budget: float
    """Seconds that an operation may take."""

    def background_client(self) -> Any:
        """A blocking client of the same store, for background threads."""

    def subscriber(self, **callbacks: Any) -> Any:
        """A subscriber to the messages of other processes."""

    def preconnect(self, node: Any, *, wait: float) -> None:
        """Connect to a server before requests are sent there."""

    def drop_preconnected(self, node: Any) -> None:
        """Close such a connection."""

    def nodes(self) -> list[Any]:
        """The known servers that have keys."""

    def address(self, node: Any) -> str:
        """The address of a server for people."""


class MaintenanceThread:
    """Maintains the store and the local tier of one limiter."""

    def __init__(
        self, local: LocalTier, store: MaintainedStore, event_emitter: EventEmitter, *, sends_heartbeats: bool
    ) -> None:
        self.sends_heartbeats = sends_heartbeats
        self.needs_block_list = False
        """True to subscribe at once and follow the block list; otherwise as soon as denials are cached."""
        self._local = local
        self._store = store
        self._event_emitter = event_emitter
        self._client = store.background_client()
        # Also if this is dropped before its thread gets to close the client.
        weakref.finalize(self, self._client.close).atexit = False
        self.is_closed = False
        self._init_process()
        reference = weakref.ref(self)  # a limiter that is not used any more is freed at once, with its connections
        store.breakers.on_open = lambda node: _with(reference, lambda thread: thread.start_probing(node))
        local.ensure = lambda: _with(reference, MaintenanceThread.ensure)
        local.breaker = store.breakers[None] if store.nodes() == [None] else None
        reinit_after_fork(self)

    def _init_process(self) -> None:
        self.membership = Membership(self._client, self._local.fleet)
        self._lock = threading.RLock()
        self._wakeup = InterruptSafeEvent()
        self._finalizer = weakref.finalize(self, self._wakeup.set)
        self._thread: BackgroundThread | None = None
        self._workers: dict[int, object] = {}
        """The running thread, if any: `setdefault` finds it or sets it in one step."""
        self._subscriber: Any = None
        self._probes: dict[Any, tuple[float, float]] = {}
        """Unavailable servers: the time of the next probe, and the interval after it."""
        self._planned = 0
        """The work for which the thread wakes up by itself."""
        self._next_refund = self._next_settlement = 0.0
        self._epochs: dict[str, str] = {}
        self._settled = [0, 0, 0, 0]

    def reset_after_fork(self) -> None:
        """A child is a new member of the fleet, without threads."""
        self._finalizer.detach()  # the parent's thread may have been inside the event at that moment
        self._init_process()

    def ensure(self) -> None:
        """Start the threads that are needed; cheap enough to be called by requests now and then."""
        if self.is_closed:
            return
        thread = self._thread
        if (thread is None or thread.has_failed) and (self.sends_heartbeats or self._work_to_do()):
            with self._lock:
                if self._thread is thread:
                    self._thread = _start_thread("headgate-maintenance", _run, weakref.ref(self), self._wakeup)
        elif self._work_to_do() & ~self._planned:  # otherwise it wakes up by itself, not for each request of an outage
            self._wakeup.set()
        if self._subscriber is None and (self.needs_block_list or self._local.denial_cache):
            self._subscribe()

    @property
    def knows_fleet_size(self) -> bool:
        return self.membership.heartbeats > 0

    @property
    def is_stopping(self) -> bool:
        """True after `close`, while the thread returns prepaid tokens and leaves the fleet."""
        thread = self._thread
        # A listener of events may close the limiter from that thread, which cannot wait for itself.
        return self.is_closed and thread is not None and thread.is_alive and not thread.is_current

    def close(self) -> None:
        """Stop, after the thread has returned prepaid tokens and left the fleet; see `is_stopping`."""
        self._local.stop_prepaying()
        self.ensure()
        with self._lock:
            self.is_closed = True
            thread, subscriber = self._thread, self._subscriber
        if subscriber is not None:
            subscriber.stop()
        if thread is None:
            self._client.close()
        else:
            self._wakeup.set()

    def health(self) -> Health:
        """The health of the limiter and of each known server."""
        store, now = self._store, time.monotonic()
        down = store.breakers.open_breakers()
        shards = [
            Shard(store.address(node), False, now - down[node].opened_at, down[node].reason)
            if node in down
            else Shard(store.address(node), True)
            for node in dict.fromkeys((*store.nodes(), *down))
        ]
        return self._local.health(tuple(shards))

    def start_probing(self, node: Any) -> None:
        """Probe a server whose circuit breaker has opened."""
        if self.is_closed:  # no thread will probe it: the remaining requests have to try
            self._store.breakers[node].close()
            return
        self._probes[node] = time.monotonic() + FIRST_PROBE_S, FIRST_PROBE_S
        self.ensure()
        self._wakeup.set()

    def claim(self, worker: object) -> bool:
        """True for the one worker that may call `work`. If the starting thread is interrupted, there may be two."""
        return self._workers.setdefault(0, worker) is worker

    def work(self) -> float | None:
        """Do the work that is due; return the seconds until more is due, None to end the thread."""
        now = time.monotonic()
        if self.is_closed:
            self._finish()
            return None
        for node, (due, _) in list(self._probes.items()):
            if due <= now:
                self._probe(node)
        if self.sends_heartbeats and self.membership.next_heartbeat <= now:
            self._send_heartbeat()
        if self._next_refund <= now and self._has_refunds():
            self._next_refund = now + REFUND_INTERVAL_S
            self._refund_unspent()
        if self._next_settlement <= now and not self._local.ledger.is_empty:
            self._next_settlement = now + SETTLE_INTERVAL_S
            if not self._probes and self._local.outage.is_calm(CALM_BEFORE_SETTLING_S):
                self._settle()
        now = time.monotonic()
        self._planned = work = self._work_to_do()
        dues = [due for due, _ in self._probes.values()]
        dues += [self.membership.next_heartbeat] if self.sends_heartbeats else []
        dues += [self._next_refund] if work & REFUND else []
        dues += [self._next_settlement] if work & SETTLE else []
        with self._lock:
            if not dues and not self._work_to_do() and not self.is_closed:  # nothing has come in since
                self._workers.clear()
                self._thread = None
                return None
        return max(min(dues, default=now) - now, 0.001)

    def _work_to_do(self) -> int:
        return PROBE * bool(self._probes) | REFUND * self._has_refunds() | SETTLE * (not self._local.ledger.is_empty)

    def _has_refunds(self) -> bool:
        return bool(self._local.prepaid.has_refunds or self._local.unspent)

    def _finish(self) -> None:
        """Return prepaid tokens, leave the fleet and disconnect."""
        try:
            if not self._store.breakers.open_breakers():
                self._refund_unspent()
                if self.sends_heartbeats:
                    self.membership.leave()
        except StoreError:
            pass  # tokens and membership expire by themselves
        finally:
            self._client.close()

    def _probe(self, node: Any) -> None:
        """Probe a server whose breaker is open, and close the breaker if the server is available."""
        breaker, timeout_s = self._store.breakers[node], max(PROBE_TIMEOUT_S, self._store.budget)
        try:
            suspects = self._store.breakers.open_breakers()
            primaries = self._client.find_primaries(suspects, timeout_s=timeout_s)
            if node in primaries:
                self._check_epoch(node, timeout_s=timeout_s)
                self._check_latency(node)
                # It may have been suspended for so long that another server has been promoted.
                primaries = self._client.find_primaries(suspects, timeout_s=timeout_s)
            if node in primaries:
                self._settle()
                self._store.preconnect(node, wait=PRECONNECT_TIMEOUT_S)
                if self.is_closed:  # in the meantime, so that no one else closes the connection
                    self._store.drop_preconnected(node)
            else:
                self._event_emitter.emit(
                    "moved",
                    f"{self._store.address(node)} is no longer a primary; requests go to "
                    + ", ".join(map(self._store.address, primaries)),
                    server=self._store.address(node),
                )
        except StoreError as error:
            breaker.reason = str(error)
            _, interval = self._probes[node]
            interval = min(interval * 2, MAX_PROBE_S)
            # Jitter: the processes of a fleet should not probe at the same moment.
            self._probes[node] = time.monotonic() + interval * _random.uniform(0.5, 1.0), interval
            return
        del self._probes[node]
        breaker.close()
        if not self._probes:
            self._local.outage.end()

    def _check_latency(self, node: Any) -> None:
        """Raise StoreTimeout if a server that answers takes longer than the budget of requests."""
        try:
            self._client.read_epoch(node, uuid4().hex, timeout_s=self._store.budget)
        except StoreTimeout as error:
            message = f"Redis answers, but not within the budget of {self._store.budget * 1000:g} ms"
            raise StoreTimeout(message) from error

    def _check_epoch(self, node: Any, *, timeout_s: float = 1.0) -> None:
        """Read the epoch of a server. If it has changed, the server has lost its counters."""
        epoch = self._client.read_epoch(node, uuid4().hex, timeout_s=timeout_s)
        name = self._client.epoch_key(node)  # the same on a replica that is promoted
        known = self._epochs.get(name)
        self._epochs[name] = epoch
        if known is not None and known != epoch:
            self._local.denial_cache.clear()
            self._event_emitter.emit(
                "state-lost",
                f"{self._store.address(node)} has lost its counters: its limits start from zero",
                server=self._store.address(node),
            )

    def _send_heartbeat(self) -> None:
        local, membership = self._local, self.membership
        membership.schedule_heartbeat()
        if self._store.breakers.open_breakers():
            membership.record_outage()
            return
        try:
            local.block_list.sweep(time.time_ns() // 1000)
            membership.send_heartbeat()
            if membership.heartbeats % EPOCH_HEARTBEATS == 0:
                for node in self._client.find_primaries():
                    self._check_epoch(node)
            membership.record_success()
            if local.outage.failures:  # a node that is not ready gets no requests whose answers would end the outage
                local.outage.record_answer()
        except StoreError:
            membership.record_outage()  # requests will notice if it lasts

    def _refund_unspent(self) -> None:
        unspent = self._local.prepaid.take_refunds()
        while self._local.unspent:  # only this thread removes
            unspent.append(self._local.unspent.popleft())
        if unspent and not self._store.breakers.open_breakers():
            self._client.run_all(unspent)  # tokens whose refund fails stay charged

    def _settle(self) -> None:
        """Charge what was admitted without the store."""
        if self._local.ledger.is_empty:
            return
        result = settle(self._local.ledger, self._client.run_all, timeout_s=SETTLE_TIMEOUT_S, now=time.monotonic)
        for index, number in enumerate(result[:4]):
            self._settled[index] += number
        if not result.left and any(self._settled):
            (keys, charged, forgiven, uncertain), self._settled = self._settled, [0, 0, 0, 0]
            self._event_emitter.emit(
                "settled",
                f"requests admitted during the outage are settled: {charged} tokens charged to {keys} counters, "
                f"{forgiven} over their limits, {uncertain} uncertain",
                keys=keys,
                charged=charged,
                forgiven=forgiven,
                uncertain=uncertain,
            )

    def _subscribe(self) -> None:
        with self._lock:
            if self._subscriber is not None or self.is_closed:
                return
            local = self._local
            block_list, denial_cache, prepaid = local.block_list, local.denial_cache, local.prepaid
            client = self._store.background_client() if self.needs_block_list else None

            def invalidate(space: str, identity: str) -> None:
                denial_cache.invalidate(space, identity)
                prepaid.wake(space, identity)

            def refresh(changed: list[tuple[str, str]] | None) -> None:
                if client is not None:
                    _refresh(block_list, changed, client)

            def connected() -> None:
                denial_cache.clear()
                refresh(None)

            subscriber = self._store.subscriber(
                on_blocks_changed=refresh,
                on_forget=invalidate,
                on_connect=connected,
                on_lost=lambda _: denial_cache.clear(),
            )
            local.listener = subscriber
            weakref.finalize(self, subscriber.stop)
            if _start_thread("headgate-pubsub", subscriber.listen) is not None:
                self._subscriber = subscriber  # last: an interrupt before this lets another thread try


def _refresh(block_list: BlockList, changed: list[tuple[str, str]] | None, client: Any) -> None:
    """Read the blocks of these identities from the store; for None, all blocks."""
    with closing(client):
        if changed is None:
            block_list.reload(client.blocks)
        else:
            block_list.refresh(changed, client.find_blocks)


def _with(reference: weakref.ref[MaintenanceThread], do: Callable[[MaintenanceThread], None]) -> None:
    thread = reference()
    if thread is not None:
        do(thread)


def _run(reference: weakref.ref[MaintenanceThread], wakeup: InterruptSafeEvent) -> None:
    worker = object()
    while (thread := reference()) is not None:
        if not thread.claim(worker):
            return
        try:
            wait = thread.work()
        except Exception:
            logger.exception("background maintenance failed; trying again in %g s", HEARTBEAT_INTERVAL_S)
            wait = HEARTBEAT_INTERVAL_S
        if wait is None:
            return
        del thread
        wakeup.wait(wait)
        wakeup.clear()


def _start_thread(name: str, target: Callable[..., None], *args: Any) -> BackgroundThread | None:
    """Start a thread; None if there are too many, or the interpreter is shutting down."""
    try:
        return BackgroundThread(name, target, *args)
    except RuntimeError:
        return None
