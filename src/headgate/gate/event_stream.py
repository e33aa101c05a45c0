"""The event stream of a gate: one event per decision, delivered to observers in batches, outside of the request.

A request only appends to a bounded buffer. A background thread delivers the events when a batch is complete or
`INTERVAL_S` has passed; `flush` delivers them at once, for observers that are about to be read.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from contextlib import suppress
from itertools import repeat
from random import random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from headgate._fork import reinit_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from headgate.abuse.detector import ObservedRequest
    from headgate.decisions import Decision
    from headgate.events import Event
    from headgate.gate.admission import Admission, RequestInfo, Shadow
    from headgate.gate.client_actions import ActionCounts
    from headgate.gate.messages import MessageCounts
    from headgate.gate.metering import QuotaCharge
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.local.restrictions import Restriction
    from headgate.overload.load_shedder import OverloadStats
    from headgate.policy.lists.list_watcher import ListStatus
    from headgate.policy.model import Policy
    from headgate.policy.snapshot import Resolution

__all__ = [
    "DecisionEvent", "DecisionHook", "DecisionSource", "EventStream", "Observer", "Outcome", "RequestObserver",
    "flush_all", "is_observer", "outcome_of",
]  # fmt: skip

logger = logging.getLogger("headgate")

BATCH_SIZE: Final = 128
"""Events that wake the thread. Small, so that the garbage collector seldom finds events that are waiting."""
INTERVAL_S: Final = 0.1
"""The longest time for which an event waits in an incomplete batch."""
MAX_EVENTS: Final = 16_384
"""Buffered events; further events are dropped and counted."""
IDLE_INTERVALS: Final = 10
"""Intervals without an event after which the thread ends; the next event starts another."""

Outcome: TypeAlias = Literal["allowed", "denied", "blocked", "unavailable"]
DecisionHook: TypeAlias = "Callable[[RequestInfo, Admission], None]"

_new_tuple = tuple.__new__


class DecisionEvent(NamedTuple):
    """One decision of a gate. Requests to exempt routes have none."""

    received_us: int
    """The time at which the request was received, by the gate's clock."""
    duration_us: int
    """The time that the decision took; negative if the clock was set back meanwhile."""
    method: str
    outcome: Outcome
    resolution: Resolution
    """The route and the limits that apply, and the client's identities."""
    decision: Decision | None
    """The answer of the limits; None if none applies, the client is blocked, or the request was shed."""
    shadows: Sequence[Shadow]
    """The answers of limits in shadow mode."""
    sample: tuple[list[str], str] | None
    """The values of the User-Agent header and the path, for the share of requests that an observer has asked for."""
    quotas: Sequence[QuotaCharge] = ()
    """The charges to the ledger."""
    restrictions: Sequence[Restriction] = ()
    """The actions of scenarios that have applied; of a request that one of them has refused, only that one."""

    @classmethod
    def of(cls, request: RequestInfo, admission: Admission, now_us: int) -> Self:
        """The event of a decision that was made at `now_us`, without a sample."""
        resolution, received_us = admission.resolution, admission.received_us
        assert resolution is not None, "requests to exempt routes have no event"
        return cls(
            received_us,
            now_us - received_us,
            request.method,
            outcome_of(admission),
            resolution,
            admission.decision,
            admission.shadows,
            None,
            admission.quotas,
            admission.restrictions,
        )


class Observer(Protocol):
    """Receives the events of a gate: see `GateBase.add_observer`.

    An observer with a float attribute `sample_share` gets `DecisionEvent.sample` for that share of the requests.
    """

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Process a batch, in the order of the decisions. Only one thread calls this at a time for one gate."""


class RequestObserver(Protocol):
    """Receives the completed requests of a gate that scenarios of abuse look at."""

    def observe_requests(self, requests: Sequence[ObservedRequest]) -> None:
        """Process a batch, about in the order in which the requests were completed."""


class DecisionSource(Protocol):
    """A gate, or another source of decisions, for observers that also report on its store and its rules."""

    is_closed: bool

    @property
    def observers(self) -> tuple[Observer, ...]: ...
    @property
    def dropped_events(self) -> int: ...
    @property
    def identity_secret(self) -> str | bytes: ...
    @property
    def policy(self) -> Policy:
        """The rules in force."""

    @property
    def policy_version(self) -> str | None: ...
    @property
    def policy_error(self) -> str | None: ...
    @property
    def policy_age_s(self) -> float | None: ...
    @property
    def store_stats(self) -> Any: ...
    @property
    def message_counts(self) -> MessageCounts: ...
    @property
    def list_status(self) -> Sequence[ListStatus]: ...
    def add_observer(self, observer: DecisionHook | Observer) -> None: ...
    def remove_observer(self, observer: DecisionHook | Observer) -> None: ...
    def add_store_listener(self, listener: Callable[[Event], Any]) -> None: ...
    def flush_events(self) -> None: ...
    def hot_counters(self) -> list[tuple[Key, int]]: ...
    def overload_stats(self) -> dict[str, OverloadStats]: ...
    @property
    def action_counts(self) -> ActionCounts: ...
    def health(self) -> Health: ...
    def now_us(self) -> int: ...


class EventStream:
    """Buffers the events of one gate and delivers them to its observers."""

    def __init__(self, build: Callable[[Any], DecisionEvent] | None = None) -> None:
        """`build` makes an event of what was published, when it is delivered: outside of the requests."""
        self.observers: tuple[Observer, ...] = ()
        self._build = build
        self.request_observer: RequestObserver | None = None
        self._sample_share = 0.0
        self.reset_after_fork()
        reinit_after_fork(self)
        _streams.add(self)

    def reset_after_fork(self) -> None:
        """Start with an empty buffer: the events of the parent are delivered by the parent."""
        self._events: deque[Any] = deque()
        self._requests: deque[ObservedRequest] = deque()
        self._delivery = threading.RLock()
        self._is_delivering = False
        self._lock = threading.Lock()
        """Never held during a delivery: requests may wait for it."""
        self._wakeup = threading.Event()
        self._thread: threading.Thread | None = None
        self._idle_intervals = 0
        self.dropped = 0
        """Events that the buffer had no room for."""

    def add(self, observer: Observer) -> None:
        """Deliver the events from now on to an observer as well; once, however often it is added."""
        self.remove(observer, observer)

    def remove(self, observer: Observer, *successors: Observer) -> None:
        """Deliver the events so far, and no more, to an observer; from now on, to its successors instead."""
        with self._delivery:
            self.flush()
            self.observers = (*[each for each in self.observers if each is not observer], *successors)
            self._sample_share = max([getattr(each, "sample_share", 0.0) for each in self.observers], default=0.0)

    def emit(self, request: RequestInfo, admission: Admission, now_us: int) -> None:
        """Append the event of a decision. This runs in every request."""
        resolution = admission.resolution
        if resolution is None:
            return
        received_us, share, shadows = admission.received_us, self._sample_share, admission.shadows
        outcome = "allowed" if admission.refusal is None else outcome_of(admission)
        sample = (request.header("user-agent"), request.path) if share and random() < share else None
        duration_us, method, decision = now_us - received_us, request.method, admission.decision
        more = decision, shadows, sample, admission.quotas, admission.restrictions
        self.publish(_new_tuple(DecisionEvent, (received_us, duration_us, method, outcome, resolution, *more)))

    def publish(self, event: Any) -> None:
        """Append an event, or what one is made of; dropped and counted if the buffer is full."""
        events = self._events
        if len(events) >= MAX_EVENTS:
            self._drop()
            return
        events.append(event)
        if self._thread is None:
            self._start()
        elif len(events) == BATCH_SIZE:
            self._wakeup.set()

    def complete(self, request: ObservedRequest) -> None:
        """Append a completed request, for the request observer; dropped and counted if the buffer is full."""
        requests = self._requests
        if len(requests) >= MAX_EVENTS:
            self._drop()
            return
        requests.append(request)
        if self._thread is None:
            self._start()
        elif len(requests) == BATCH_SIZE:
            self._wakeup.set()

    def flush(self) -> None:
        """Deliver all events that were emitted before this call. Returns at once if called by an observer."""
        with self._delivery:
            if self._is_delivering:
                return
            self._is_delivering = True
            try:
                remaining = len(self._events)
                while remaining > 0:
                    batch = [*map(deque.popleft, repeat(self._events, min(remaining, BATCH_SIZE)))]
                    remaining -= len(batch)
                    _deliver(self.observers, self._built(batch))
                if self._requests:
                    self._flush_requests()
            finally:
                self._is_delivering = False

    def run_once(self) -> bool:
        """Do the work of the background thread once; False if there has been none for a while, and it shall end."""
        self._idle_intervals = 0 if self._events or self._requests else self._idle_intervals + 1
        self.flush()
        if self._idle_intervals < IDLE_INTERVALS:
            return True
        self._thread = None
        if self._events or self._requests:  # emitted before the end of the thread was visible
            self._start()
        return False

    def _built(self, batch: list[Any]) -> list[DecisionEvent]:
        return batch if self._build is None else [*map(self._build, batch)]

    def _flush_requests(self) -> None:
        requests = [*map(deque.popleft, repeat(self._requests, len(self._requests)))]
        if self.request_observer is not None:
            try:
                self.request_observer.observe_requests(requests)
            except Exception:
                logger.exception("the detection of abuse failed on %d requests", len(requests))

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1
            dropped = self.dropped
        if dropped & (dropped - 1) == 0:  # 1, 2, 4, 8 ...
            logger.error("%d events dropped: an observer of the gate is too slow", dropped)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._idle_intervals = 0
            work = weakref.ref(self), self._wakeup
            self._thread = threading.Thread(target=_deliver_forever, args=work, name="headgate-events", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is shutting down; `flush_all` runs at exit
                self._thread = None

    def __del__(self) -> None:
        """Deliver the last events of a gate that is gone: in a thread, as the garbage collector runs at any point."""
        if self._events and self.observers:
            with suppress(RuntimeError):  # the interpreter is shutting down
                events = self._built([*self._events])
                threading.Thread(target=_deliver, args=(self.observers, events), daemon=True).start()


def _deliver(observers: Iterable[Observer], batch: Sequence[DecisionEvent]) -> None:
    for observer in observers:
        try:
            observer.observe(batch)
        except Exception:
            logger.exception("an observer of the gate failed on %d events: %r", len(batch), observer)


def _deliver_forever(there: weakref.ref[EventStream], wakeup: threading.Event) -> None:
    """Deliver events until there have been none for a while, or the stream is gone with its gate."""
    while True:
        wakeup.wait(INTERVAL_S)
        wakeup.clear()
        stream = there()
        if stream is None or not stream.run_once():
            return
        del stream


_streams: weakref.WeakSet[EventStream] = weakref.WeakSet()


@atexit.register
def flush_all() -> None:
    """Deliver the buffered events of all gates in this process."""
    for stream in list(_streams):
        stream.flush()


def outcome_of(admission: Admission) -> Outcome:
    """The outcome of a request: "allowed", "denied" (429), "blocked" (403) or "unavailable" (503).

    A request that was shed during overload is unavailable, and has no decision. One that was challenged, or could not
    be held back, is blocked, as is that of a blocked client.
    """
    if admission.refusal is None:
        return "allowed"
    if admission.resolution is not None and admission.resolution.block is not None:
        return "blocked"
    if admission.refusal.status == 503:
        return "unavailable"
    return "blocked" if admission.decision is None and admission.restrictions else "denied"


def is_observer(candidate: Any) -> bool:
    """True for an object that can be passed to `EventStream.add`."""
    return callable(getattr(candidate, "observe", None))
