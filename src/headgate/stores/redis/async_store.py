"""The Redis store for asyncio: calls made in one iteration of the loop, or while others are in flight, are batched.

No batch waits for a timer: a call that finds nothing in flight is sent at the end of this iteration of the loop.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.operations import Check
from headgate.stores.redis.async_connection import AsyncConnection
from headgate.stores.redis.base import RedisStoreBase
from headgate.stores.redis.batch_protocol import BudgetExhausted, NotSent, public
from headgate.stores.redis.breaker import CircuitOpen
from headgate.stores.redis.busy_poll import BUSY_POLL_S, BusyPoll
from headgate.stores.redis.exchange import FIRST_CONNECTION_S, MAX_BATCH, Lanes, LoneCheck
from headgate.stores.redis.topology import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node
    from headgate.stores.redis.exchange import ServerRequest

__all__ = ["AsyncRedisStore"]

MAX_IN_FLIGHT: Final = 2
"""Batches in flight per lane: Redis works on one while this process encodes and decodes the other."""
MIN_SPLIT: Final = 16
"""Calls that are better sent as two batches than as one, if this process is idle until the replies arrive."""
PROMPT_S_PER_CALL: Final = 0.00004
"""Duration of a batch, per call, up to which this process was idle meanwhile. A busy one gains nothing from two."""


class AsyncRedisStore(RedisStoreBase):
    """Counters in Redis, for asyncio. Connects on the first call; each event loop has connections of its own."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        super().__init__(factory, encoder, budget=budget)
        self._start()
        reinit_after_fork(self)

    def _start(self) -> None:
        self._last: LoopBatcher | None = None
        """The batcher of the loop that called last."""
        self.batchers: dict[asyncio.AbstractEventLoop, LoopBatcher] = {}
        self._grace_s = FIRST_CONNECTION_S
        """Time beyond the budget that the next loop may take to connect."""

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._start()

    def run(self, call: Call) -> asyncio.Future[Any]:
        """Carry out a call, together with those of other tasks that are waiting."""
        if self.only_breaker is not None and self.only_breaker.is_open:
            raise public(self.only_breaker.refusal())
        batcher = self._last
        if batcher is None or batcher.thread_of._thread_id != get_ident():  # noqa: SLF001 - see _ThreadUnknown
            loop = asyncio.get_running_loop()
            if batcher is None or batcher.loop is not loop:
                batcher = self._last = self._batcher_of(loop)
        return batcher.submit(call)

    def warm(self, *, wait: float = 0) -> None:
        """Start to connect, if a loop is running: the first call needs a connection within its budget."""
        with suppress(RuntimeError):
            self._batcher_of(asyncio.get_running_loop()).warm()

    async def warm_up(self, *, wait: float) -> None:
        """Connect, and wait that many seconds for it."""
        opening = self._batcher_of(asyncio.get_running_loop()).warm()
        if opening is not None:
            await asyncio.wait([opening], timeout=wait)

    def preconnect(self, node: Node | None, *, wait: float) -> None:
        """Connect to a recovered server before requests are sent there; called from another thread, which waits."""
        batchers = [batcher for batcher in list(self.batchers.values()) if not batcher.loop.is_closed()]
        for batcher in batchers:
            with suppress(RuntimeError):  # its loop has been closed meanwhile
                batcher.loop.call_soon_threadsafe(batcher.warm, node)
        end = time.monotonic() + wait
        while time.monotonic() < end and not all(each.is_warm(node) for each in batchers if each.loop.is_running()):
            time.sleep(0.002)

    def drop_preconnected(self, node: Node | None) -> None:
        """Do nothing: the connections of a loop are closed together."""

    def set_budget(self, budget: float) -> None:
        """Change the number of seconds that a call may take."""
        self.budget = budget
        for batcher in list(self.batchers.values()):
            for connection in list(batcher.connections.values()):
                connection.budget_s = budget

    async def close(self) -> None:
        """Close the connections of the running loop; calls that are waiting fail."""
        batcher = self.batchers.pop(asyncio.get_running_loop(), None)
        self._last = None
        if batcher is not None:
            await batcher.close()

    def _batcher_of(self, loop: asyncio.AbstractEventLoop) -> LoopBatcher:
        batcher = self.batchers.get(loop)
        if batcher is None:
            for other in [other for other in list(self.batchers) if other.is_closed()]:
                self.batchers.pop(other, None)
            batcher = self.batchers[loop] = LoopBatcher(loop, self, self._grace_s)
            self._grace_s = 0.0
        return batcher


class LoopBatcher:
    """The connections and lanes of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: AsyncRedisStore, grace_s: float) -> None:
        self.loop = loop
        self.thread_of: Any = loop if isinstance(loop, asyncio.BaseEventLoop) else _ThreadUnknown
        self.store = store
        self.connections: dict[Node | None, AsyncConnection] = {}
        self._is_closed = False
        self._grace_until = loop.time() + grace_s if grace_s else 0.0
        """Until when connecting may take longer than the budget."""
        self.lanes = Lanes(lambda: LoopLane(self), store.encoder, store.factory.topology)
        self.submit: Callable[[Call], asyncio.Future[Any]] = self.lanes.default.submit
        if isinstance(store.factory.topology, Cluster):
            self.submit = lambda call: self.lanes.find(call).submit(call)

    def warm(self, node: Node | None = None) -> asyncio.Task[None] | None:
        """Start to connect, even if the breaker is open; None if it is not known where to."""
        if self._is_closed or (node is None and self.store.only_breaker is None):
            return None
        connection = self.connections.get(node)
        if connection is None or connection.is_closed:
            connection = self._connect(node)
        return connection.open()

    def is_warm(self, node: Node | None) -> bool:
        connection = self.connections.get(node)
        return self._is_closed or (connection is not None and connection.is_open)

    async def close(self) -> None:
        self._is_closed = True
        for lane in self.lanes.all():
            lane.fail_waiting(StoreUnavailable("the limiter was closed"))
        for connection in list(self.connections.values()):
            await connection.close()

    def send(self, requests: list[ServerRequest]) -> None:
        """Send the requests of one round trip."""
        for request in requests:
            try:
                connection = self._connection(request.node)
                if not connection.is_open:
                    request.deadline = max(request.deadline, self._grace_until)
                if self.loop.time() >= request.deadline:
                    raise BudgetExhausted("cannot reach Redis: the budget was spent before its turn")
                connection.send(request)
            except (NotSent, CircuitOpen) as error:
                # Later: the exchange must not continue inside itself.
                self.loop.call_soon(request.fail, error)

    def _connection(self, node: Node | None) -> AsyncConnection:
        connection = self.connections.get(node)
        if connection is None or connection.is_closed:
            if self._is_closed:
                raise NotSent("the limiter was closed")
            breaker = self.store.breakers[node]
            if breaker.is_open:
                raise breaker.refusal()
            connection = self._connect(node)
        return connection

    def _connect(self, node: Node | None) -> AsyncConnection:
        def report(error: StoreError) -> None:
            if not self._is_closed:
                self.store.report_failure(node, error)

        opened = self.store.factory.connection(node, asynchronous=True)
        connection = self.connections[node] = AsyncConnection(opened, self.store.budget, report)
        return connection


class LoopLane:
    """A queue of calls to the same servers."""

    def __init__(self, batcher: LoopBatcher) -> None:
        self.batcher = batcher
        self.waiting: list[Call] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.arrivals: list[float] = []
        """Arrival times of the waiting calls, in the same order."""
        self.in_flight = 0
        self.is_prompt = True
        """True if this process was idle until the replies to the last batch arrived."""
        self.has_failed = False
        """True if the last exchange did."""
        self._loop = batcher.loop
        self._store = batcher.store
        self._create_future = _future_factory(batcher.loop)
        self._is_flush_scheduled = False
        self._is_lone = True
        """True if the last batch had one call: then another is unlikely to join the next one, either."""
        self._busy_poll = BusyPoll()

    def submit(self, call: Call) -> asyncio.Future[Any]:
        """Queue a call; the future gets its answer."""
        future = self._create_future()
        if type(call) is Check or not getattr(call, "goes_first", False):
            self._append(call, future)
        else:
            self.waiting.insert(0, call)
            self.futures.insert(0, future)
            self.arrivals.insert(0, monotonic())
        if not self._is_flush_scheduled:
            if self._is_lone and not self.in_flight:
                if not self._send_lone():
                    self._flush()
            else:
                self._is_flush_scheduled = True
                self._loop.call_soon(self._flush)
        return future

    def fail_waiting(self, error: StoreError) -> None:
        waiting, self.waiting, self.futures, self.arrivals = self.futures, [], [], []
        for future in waiting:
            _resolve(future, error)

    def end_batch(self, *, has_failed: bool) -> None:
        """Continue with the calls that have arrived while a batch was in flight."""
        self.in_flight -= 1
        self.has_failed = has_failed
        if self.waiting and not self._is_flush_scheduled:
            self._flush()

    def end_lone(self, check: LoneCheck, future: asyncio.Future[Any]) -> None:
        """Deliver the answer to a lone check, or send it again as a batch."""
        if check.answer is not None:
            self._store.breakers.succeed(None)
            _resolve(future, check.answer)
            self.end_batch(has_failed=False)
        else:
            self.end_batch(has_failed=False)
            self._append(check.call, future)
            self._flush()

    def _append(self, call: Call, future: asyncio.Future[Any]) -> None:
        self.waiting.append(call)
        self.futures.append(future)
        self.arrivals.append(monotonic())

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        while self.waiting and self.in_flight < MAX_IN_FLIGHT:
            size = min(len(self.waiting), MAX_BATCH)
            if self.is_prompt and not self.in_flight and size >= MIN_SPLIT:
                size = (size + 1) // 2  # so that this process and Redis do not wait for each other in turn
            calls, futures, arrived = self.waiting[:size], self.futures[:size], min(self.arrivals[:size])
            del self.waiting[:size], self.futures[:size], self.arrivals[:size]
            if any(map(_is_done, futures)):  # cancelled while they waited
                kept = [index for index, future in enumerate(futures) if not future.done()]
                calls, futures = [calls[index] for index in kept], [futures[index] for index in kept]
            if calls:
                self.in_flight += 1
                self._is_lone = len(calls) == 1
                InFlightBatch(self, calls, futures, arrived).advance()

    def _send_lone(self) -> bool:
        """Send a check that travels alone; False if it has to be sent as a batch."""
        connection = self.batcher.connections.get(None)
        packed = self._store.encoder.pack_alone(self.waiting[0])
        if connection is None or packed is None or len(self.waiting) > 1 or not connection.is_open:
            return False
        self.in_flight += 1
        self._store.calls += 1
        self._store.round_trips += 1
        self.arrivals.clear()
        check = _InFlightCheck(self.waiting.pop(), packed, self, self.futures.pop())
        check.deadline = self._loop.time() + self._store.budget
        connection.send(check)
        if self._busy_poll.should_poll():
            self._poll(check, self._loop.time() + BUSY_POLL_S)
        return True

    def _poll(self, check: _InFlightCheck, end: float) -> None:
        """Keep the loop from sleeping until the reply arrives: with a callback scheduled it polls, and runs others."""
        if check.is_done or self.in_flight > 1:
            self._busy_poll.record(is_hit=True)
        elif self._loop.time() >= end:
            self._busy_poll.record(is_hit=False)
        else:
            self._loop.call_soon(self._poll, check, end)


class InFlightBatch:
    """An exchange in an event loop: driven by replies as they arrive, without a task of its own."""

    __slots__ = ("_exchange", "_futures", "_lane", "_started")

    def __init__(self, lane: LoopLane, calls: list[Call], futures: list[asyncio.Future[Any]], arrived: float) -> None:
        store, now = lane.batcher.store, lane.batcher.loop.time()
        arrived += now - monotonic()  # on the clock of the loop
        self._exchange = store.start_exchange(calls, arrived, now, after_failure=lane.has_failed)
        self._exchange.on_round_done = self.advance
        self._lane = lane
        self._futures = futures
        self._started = time.perf_counter()

    def advance(self) -> None:
        """Send the next round, or deliver the answers."""
        exchange, lane = self._exchange, self._lane
        try:
            requests = exchange.next_round(lane.batcher.loop.time())
        except Exception as error:
            requests, exchange.answers = [], [error] * len(self._futures)
        if requests:
            lane.batcher.send(requests)
            return
        exchange.on_round_done = None  # it refers to this object
        lane.batcher.store.round_trips += exchange.round_trips
        lane.is_prompt = time.perf_counter() - self._started < PROMPT_S_PER_CALL * len(self._futures)
        for future, answer in zip(self._futures, exchange.answers, strict=True):
            # The common case without a call, as this runs for every request.
            if type(answer) is Decision and not future.done():
                future.set_result(answer)
            else:
                _resolve(future, answer)
        lane.end_batch(has_failed=exchange.has_failed)


class _InFlightCheck(LoneCheck):
    """A lone check, whose answer is delivered as soon as it arrives."""

    __slots__ = ("_future", "_lane", "is_done")

    def __init__(self, call: Call, packed: bytes, lane: LoopLane, future: asyncio.Future[Any]) -> None:
        super().__init__(call, packed)
        self.is_done = False
        self._lane = lane
        self._future = future

    def finish(self) -> None:
        self.is_done = True
        self._lane.end_lone(self, self._future)

    def fail(self, error: StoreError) -> None:
        self.is_done = True
        _resolve(self._future, public(error))
        self._lane.end_batch(has_failed=True)


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_is_done = asyncio.Future.done


class _ThreadUnknown:
    """In place of a loop that does not tell its thread, as asyncio's own loops do by `_thread_id`.

    Comparing that with the current thread shows which loop runs in a fifth of the time of `get_running_loop`, which is
    a system call on Python 3.11.
    """

    _thread_id: Final = None


def _future_factory(loop: asyncio.AbstractEventLoop) -> Callable[[], asyncio.Future[Any]]:
    """The loop's `create_future`, without asyncio's wrapper in Python around it."""
    if type(loop).create_future is asyncio.BaseEventLoop.create_future:
        return partial(asyncio.Future, loop=loop)
    return loop.create_future
