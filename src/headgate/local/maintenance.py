"""Background maintenance of a limiter: health probes, heartbeats, settlement of debts, refunds of unspent tokens.

One thread does this while there is work, over connections of its own. A second one receives pub/sub messages. Neither
keeps a limiter alive that is not used any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from headgate import bounds
from headgate._fork import reinit_after_fork
from headgate.errors import StoreError, StoreTimeout
from headgate.health import Health, OutageReport, Shard
from headgate.local.ledger import settle
from headgate.local.live_clients import LiveClientStore
from headgate.runtime import SYSTEM, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate.local.ledger import OutageOvershoot
    from headgate.local.tier import LocalTier

__all__ = ["MaintenanceThread"]

logger = logging.getLogger("headgate")

FIRST_PROBE_S: Final = 0.02
MAX_PROBE_S: Final = 0.4
"""Interval between two probes of an unavailable server; doubles from the first to the last."""
PROBE_TIMEOUT_S: Final = 0.1
"""Per answer, as other servers wait to be probed."""
PRECONNECT_TIMEOUT_S: Final = 0.1
"""Time that requests are held back while the connection to a recovered server is opened."""
HEARTBEAT_INTERVAL_S: Final = 2.0
MISSED_HEARTBEATS: Final = 3
"""Heartbeats that a member of the fleet may miss before it counts as dead."""
SETTLING_HEARTBEATS: Final = 3
"""At first and after an outage, this many heartbeats follow each other quickly, and the fleet is not taken to be
smaller than before: not all members have sent theirs yet."""
ROLLOUT_POLL_S: Final = 1.0
"""Interval between two reads of the rollout of scripts."""
FIRST_ROLLOUT_POLL_S: Final = 1.0
"""A limiter without heartbeats follows rollouts after it was used for so long: others need no thread."""
IDLE_ROLLOUT_POLLS: Final = 5
"""It stops after so many polls without a check in between, until it is used again."""
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

    def background_client(self) -> Any: ...
    def rollout_follower(self, client: Any) -> Any: ...
    def message_sources(self) -> list[Any]: ...
    def subscriber(self, source: Any, **callbacks: Any) -> Any: ...
    def is_available(self, call: Any) -> bool: ...
    def preconnect(self, node: Any, *, wait: float) -> None: ...
    def drop_preconnected(self, node: Any) -> None: ...
    def nodes(self) -> list[Any]: ...
    def address(self, node: Any) -> str: ...


class MaintenanceThread:
    """Maintains the store and the local tier of one limiter."""

    def __init__(
        self,
        local: LocalTier,
        store: MaintainedStore,
        *,
        sends_heartbeats: bool,
        follows_rollouts: bool = False,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.sends_heartbeats = sends_heartbeats
        self.follows_rollouts = follows_rollouts
        """True to follow rollouts of scripts also without heartbeats, while the limiter is used."""
        self.needs_block_list = False
        """True to subscribe at once and follow the block list; otherwise as soon as denials are cached."""
        self._local, self._store, self._runtime = local, store, runtime
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
        self._member_id = uuid4().hex
        self._next_heartbeat = 0.0
        self._heartbeats = 0
        """Heartbeats that were answered."""
        self.unsettled_heartbeats = SETTLING_HEARTBEATS
        """Heartbeats until the fleet may be taken to be smaller than before."""
        self._lock = threading.RLock()
        self._wakeup = self._runtime.new_event()
        self._finalizer = weakref.finalize(self, self._wakeup.set)
        self._thread: Any = None
        self._workers: dict[int, object] = {}
        """The running thread, if any: `setdefault` finds it or sets it in one step."""
        self._subscribers: list[Any] = []
        self._probes: dict[Any, tuple[float, float]] = {}
        """Unavailable servers: the time of the next probe, and the interval after it."""
        self._planned = 0
        """The work for which the thread wakes up by itself."""
        self._next_refund = self._next_settlement = 0.0
        self._epochs: dict[str, str] = {}
        self._next_poll = 0.0
        self._follow_from: float | None = None
        """When to begin to follow rollouts; None before the first check."""
        self._is_following = False
        self._idle_polls, self._checks_polled = 0, -1
        self.rollout_follower = self._store.rollout_follower(self._client)
        self.rollout_follower.wake = self._wakeup.set
        self._settled = [0, 0, 0, 0]

    def reset_after_fork(self) -> None:
        """A child is a new member of the fleet, without threads."""
        self._finalizer.detach()  # the parent's thread may have been inside the event at that moment
        self._init_process()

    def ensure(self) -> None:
        """Start the threads that are needed; cheap enough to be called by requests now and then."""
        if self.is_closed:
            return
        thread, has_begun = self._thread, self._begin_following()
        if (thread is None or thread.has_failed) and (
            self.sends_heartbeats or self._is_following or self._work_to_do()
        ):
            with self._lock:
                if self._thread is thread:
                    self._thread = self._runtime.start_worker(
                        "headgate-maintenance", _steps(weakref.ref(self)), self._wakeup
                    )
        elif (
            has_begun or self._work_to_do() & ~self._planned
        ):  # otherwise it wakes up by itself, not for each request of an outage
            self._wakeup.set()
        if not self._subscribers and (self.needs_block_list or self._local.denial_cache):
            self._subscribe()

    @property
    def knows_fleet_size(self) -> bool:
        return self._heartbeats > 0

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
            thread, subscribers = self._thread, self._subscribers
        for subscriber in subscribers:
            subscriber.stop()
        if thread is None:
            self._client.close()
        else:
            self._wakeup.set()

    def health(self) -> Health:
        """The health of the limiter and of each known server."""
        store, now = self._store, self._runtime.monotonic()
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
        self._probes[node] = self._runtime.monotonic() + FIRST_PROBE_S, FIRST_PROBE_S
        self.ensure()
        self._wakeup.set()

    def claim(self, worker: object) -> bool:
        """True for the one worker that may call `work`. If the starting thread is interrupted, there may be two."""
        return self._workers.setdefault(0, worker) is worker

    def work(self) -> float | None:
        """Do the work that is due; return the seconds until more is due, None to end the thread."""
        now = self._runtime.monotonic()
        if self.is_closed:
            self._finish()
            return None
        for node, (due, _) in list(self._probes.items()):
            if due <= now:
                self._probe(node)
        if self.sends_heartbeats and self._next_heartbeat <= now:
            self._send_heartbeat()
        if self._needs_polls() and (self._next_poll <= now or self.rollout_follower.needs_poll):
            self._follow_rollout()
        if self._next_refund <= now and self._has_refunds():
            self._next_refund = now + REFUND_INTERVAL_S
            self._refund_unspent()
        if self._next_settlement <= now and not self._local.ledger.is_empty:
            self._next_settlement = now + SETTLE_INTERVAL_S
            if not self._probes and self._local.outage.is_calm(CALM_BEFORE_SETTLING_S):
                self._settle()
        now = self._runtime.monotonic()
        self._planned = work = self._work_to_do()
        dues = [due for due, _ in self._probes.values()]
        dues += [self._next_heartbeat] if self.sends_heartbeats else []
        dues += [self._next_poll] if self._needs_polls() else []
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
        try:
            if not self._store.breakers.open_breakers():
                self._refund_unspent()
                if self.sends_heartbeats:
                    self._client.leave(self._member_id)
        except StoreError:
            pass  # tokens and membership expire by themselves
        finally:
            self._client.close()

    def _probe(self, node: Any) -> None:
        """Probe a server whose breaker is open, and close the breaker if the server is available."""
        breaker, timeout_s = self._store.breakers[node], max(PROBE_TIMEOUT_S, self._store.budget)
        try:
            suspects = self._store.breakers.open_breakers()
            primaries = self._client.find_primaries(suspects, of=node, timeout_s=timeout_s)
            if node in primaries:
                if self._needs_polls() or self.rollout_follower.is_refused:
                    self.rollout_follower.check_store()
                self._check_epoch(node, timeout_s=timeout_s)
                self._check_latency(node)
                # It may have been suspended for so long that another server has been promoted.
                primaries = self._client.find_primaries(suspects, of=node, timeout_s=timeout_s)
            if node in primaries:
                self._settle()
                self._store.preconnect(node, wait=PRECONNECT_TIMEOUT_S)
                if self.is_closed:  # in the meantime, so that nothing else closes the connection
                    self._store.drop_preconnected(node)
            else:
                server, others = self._store.address(node), ", ".join(map(self._store.address, primaries))
                message = f"{server} is no longer a primary; requests go to {others}"
                self._local.event_emitter.emit("moved", message, server=server)
        except StoreError as error:
            breaker.reason = str(error)
            _, interval = self._probes[node]
            interval = min(interval * 2, MAX_PROBE_S)
            # Jitter: the processes of a fleet should not probe at the same moment.
            self._probes[node] = self._runtime.monotonic() + interval * self._runtime.random.uniform(0.5, 1.0), interval
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
            server = self._store.address(node)
            message = f"{server} has lost its counters: its limits start from zero"
            self._local.event_emitter.emit("state-lost", message, server=server)

    def _send_heartbeat(self) -> None:
        """Report that this process is alive, and count the live ones that share the limits."""
        local = self._local
        interval = HEARTBEAT_INTERVAL_S / 8 if self.unsettled_heartbeats else HEARTBEAT_INTERVAL_S
        self._next_heartbeat = self._runtime.monotonic() + interval * self._runtime.random.uniform(0.8, 1.0)
        if self._store.breakers.open_breakers():  # keep the known size of the fleet: the others cannot send, either
            self.unsettled_heartbeats = SETTLING_HEARTBEATS
            return
        try:
            local.live_clients.sweep(self._runtime.now_us())
            nodes = self._client.heartbeat(self._member_id, int(HEARTBEAT_INTERVAL_S * MISSED_HEARTBEATS * 1_000_000))
            local.fleet.nodes = max(nodes, local.fleet.nodes) if self.unsettled_heartbeats else nodes
            if self._heartbeats % EPOCH_HEARTBEATS == 0:
                for node in self._client.find_primaries():
                    self._check_epoch(node)
            self._heartbeats += 1
            self.unsettled_heartbeats = max(0, self.unsettled_heartbeats - 1)
            if local.outage.failures:  # a node that is not ready gets no requests whose answers would end the outage
                local.outage.record_answer()
        except StoreError:  # requests will notice if it lasts
            self.unsettled_heartbeats = SETTLING_HEARTBEATS

    def _begin_following(self) -> bool:
        """True if the limiter follows rollouts from now on: it was used for a while."""
        if self._is_following or self.sends_heartbeats or not self.follows_rollouts:
            return False
        now = self._runtime.monotonic()
        if self._follow_from is None:
            self._follow_from = now + FIRST_ROLLOUT_POLL_S
        self._is_following = now >= self._follow_from
        return self._is_following

    def _needs_polls(self) -> bool:
        return self.sends_heartbeats or self._is_following

    def _follow_rollout(self) -> None:
        """Follow the rollout of scripts. A store in a format that this library cannot read is not used."""
        self._next_poll = self._runtime.monotonic() + ROLLOUT_POLL_S * self._runtime.random.uniform(0.8, 1.0)
        self._idle_polls = self._idle_polls + 1 if self._local.checks == self._checks_polled else 0
        self._checks_polled = self._local.checks
        if self._idle_polls >= IDLE_ROLLOUT_POLLS:
            self._is_following = False
        if self._store.breakers.open_breakers():
            return
        try:
            self.rollout_follower.check_store()
        except StoreError as error:
            if self.rollout_follower.is_refused:
                for node in self._store.nodes():
                    self._store.breakers[node].trip(str(error))
            return
        with suppress(StoreError):  # the next poll follows in a second
            self.rollout_follower.poll()

    def _refund_unspent(self) -> None:
        unspent = self._local.prepaid.take_refunds()
        while self._local.unspent:  # only this thread removes
            unspent.append(self._local.unspent.popleft())
        refunds = [refund for refund in unspent if self._store.is_available(refund)]
        if refunds:
            self._client.run_all(refunds)  # tokens whose refund fails stay charged

    def _settle(self) -> None:
        if self._local.ledger.is_empty:
            return
        result = settle(
            self._local.ledger, self._client.run_all, timeout_s=SETTLE_TIMEOUT_S, now=self._runtime.monotonic
        )
        for index, number in enumerate(result[:4]):
            self._settled[index] += number
        if not result.left and any(self._settled):
            (keys, charged, forgiven, uncertain), self._settled = self._settled, [0, 0, 0, 0]
            message = (
                f"requests admitted during the outage are settled: {charged} tokens charged to {keys} counters, "
                f"{forgiven} over their limits, {uncertain} uncertain"
            )
            details: dict[str, Any] = {"keys": keys, "charged": charged, "forgiven": forgiven, "uncertain": uncertain}
            overshoot = self._local.ledger.take_overshoot()
            report = self._local.last_outage = None if overshoot is None else self._describe_overshoot(overshoot)
            if report is not None:
                message += f"; {report}"
                details |= asdict(report)
            self._local.event_emitter.emit("settled", message, **details)

    def _describe_overshoot(self, found: OutageOvershoot) -> OutageReport:
        """The use of the counter that was furthest over its limit, and the most that all nodes may have admitted."""
        limit, capacity = found.limit, found.limit.capacity
        over = bounds.local_failure(limit, self._local.fleet.share, found.nodes, found.outage_us)
        bound = capacity + over if found.is_bounded else None
        return OutageReport(limit.name, capacity + found.over, capacity, bound)

    def _subscribe(self) -> None:
        with self._lock:
            if self._subscribers or self.is_closed:
                return
            local = self._local
            denial_cache, prepaid = local.denial_cache, local.prepaid
            clients = LiveClientStore(local.live_clients, self._store) if self.needs_block_list else None

            def invalidate(space: str, identity: str) -> None:
                denial_cache.invalidate(space, identity)
                prepaid.wake(space, identity)

            def refresh(changed: list[tuple[str, str]] | None) -> None:
                """Read the blocks and restrictions of these identities from the store; for None, all of them."""
                if clients is not None:
                    with clients:
                        clients.refresh(changed)

            def connected() -> None:
                denial_cache.clear()
                refresh(None)

            started = []
            for index, source in enumerate(self._store.message_sources()):
                subscriber = self._store.subscriber(
                    source,
                    # The block list is on the first one, and the others work without it.
                    on_blocks_changed=(lambda changed: None) if index else refresh,
                    on_forget=invalidate,
                    on_connect=denial_cache.clear if index else connected,
                    on_lost=lambda _: denial_cache.clear(),
                )
                weakref.finalize(self, subscriber.stop)
                if self._runtime.start("headgate-pubsub", subscriber.listen) is not None:
                    started.append(subscriber)
            local.listeners = started
            self._subscribers = started  # last: an interrupt before this lets another thread try


def _with(reference: weakref.ref[MaintenanceThread], do: Callable[[MaintenanceThread], None]) -> None:
    thread = reference()
    if thread is not None:
        do(thread)


def _steps(reference: weakref.ref[MaintenanceThread]) -> Iterator[float]:
    """The work of a maintenance thread; yields the seconds to wait before the next step."""
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
        yield wait
