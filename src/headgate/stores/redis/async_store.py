"""The Redis store for asyncio: calls made in one iteration of the loop, or while others are in flight, are batched.

No batch waits for a timer: a call that finds nothing in flight is sent at the end of this iteration of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.operations import Call, Check
from headgate.stores.redis.base import RedisStoreBase
from headgate.stores.redis.batch_protocol import BudgetExhausted, ConnectionLost, NotSent, public
from headgate.stores.redis.breaker import CircuitOpen
from headgate.stores.redis.busy_poll import BUSY_POLL_S, BusyPoll
from headgate.stores.redis.decoding import INCOMPLETE, ReplyReader, UnexpectedReply
from headgate.stores.redis.exchange import FIRST_CONNECTION_S, MAX_BATCH, MIN_REPLY_S, Lanes, LoneCheck, ServerRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node

__all__ = ["AsyncRedisStore"]

MAX_IN_FLIGHT: Final = 2
"""Batches in flight per lane: Redis works on one while this process encodes and decodes the other."""
MIN_SPLIT: Final = 16
"""Calls that are better sent as two batches than as one, if this process is idle until the replies arrive."""
PROMPT_S_PER_CALL: Final = 0.00004
"""Duration of a batch, per call, up to which this process was idle meanwhile. A busy one gains nothing from two."""

LATE_CHECKS: Final = 3
"""Iterations of the loop after the deadline in which a reply that has arrived still counts."""


class AsyncRedisStore(RedisStoreBase):
    """Counters in Redis, for asyncio. Connects on the first call; each event loop has connections of its own."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        super().__init__(factory, encoder, budget=budget)
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._last: LoopBatcher | None = None
        self.batchers: dict[asyncio.AbstractEventLoop, LoopBatcher] = {}
        self._grace_s = FIRST_CONNECTION_S
        """Time beyond the budget that the next loop may take to connect."""

    def run(self, call: Call) -> asyncio.Future[Any]:
        """Carry out a call, together with those of other tasks that are waiting."""
        if self.only_breaker is not None and self.only_breaker.is_open:
            raise public(self.only_breaker.refusal())
        batcher = self._last
        if batcher is None or batcher.thread_of._thread_id != get_ident():  # noqa: SLF001 - see LoopBatcher
            loop = asyncio.get_running_loop()
            if batcher is None or batcher.loop is not loop:
                batcher = self._last = self._batcher_of(loop)
        return batcher.submit(call)

    def warm(self, *, wait: float = 0) -> None:
        """Start to connect, if a loop is running: the first call needs a connection within its budget."""
        with suppress(RuntimeError):
            self._start_warming()

    async def warm_up(self, *, wait: float) -> None:
        opening = self._start_warming()
        if opening:
            await asyncio.wait(opening, timeout=wait)

    def _start_warming(self) -> list[asyncio.Task[None]]:
        batcher = self._batcher_of(asyncio.get_running_loop())
        return [task for node in self.nodes() if (task := batcher.warm(node)) is not None]

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
        # Comparing the thread of a loop with the current one takes a fifth of the time of `get_running_loop`, which is
        # a system call on Python 3.11. Only asyncio's own loops know their thread.
        self.thread_of: Any = loop if isinstance(loop, asyncio.BaseEventLoop) else SimpleNamespace(_thread_id=None)
        self.store = store
        self.connections: dict[Node | None, AsyncConnection] = {}
        self._is_closed = False
        self._grace_until = loop.time() + grace_s if grace_s else 0.0
        """Until when connecting may take longer than the budget; it ends with the first connection."""
        self.lanes = Lanes(lambda: LoopLane(self), store.encoder, store.factory.topology)
        self.submit: Callable[[Call], asyncio.Future[Any]] = self.lanes.default.submit
        if store.factory.topology.has_shards:
            self.submit = lambda call: self.lanes.find(call).submit(call)

    def warm(self, node: Node | None) -> asyncio.Task[None] | None:
        """Start to connect, even if the breaker is open; None if this is closed."""
        if self._is_closed:
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
        for request in requests:
            try:
                connection = self._connection(request.node)
                if connection.is_open:
                    self._grace_until = 0.0
                else:
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
        self._loop = batcher.loop
        self._store = batcher.store
        has_wrapper = type(self._loop).create_future is asyncio.BaseEventLoop.create_future  # in Python
        self._create_future = partial(asyncio.Future, loop=self._loop) if has_wrapper else self._loop.create_future
        self._is_flush_scheduled = False
        self._is_lone = True
        """True if the last batch had one call: then another is unlikely to join the next one, either."""
        self._busy_poll = BusyPoll()

    def submit(self, call: Call) -> asyncio.Future[Any]:
        future = self._create_future()
        if type(call) is Check or not getattr(call, "goes_first", False):
            self.waiting.append(call)
            self.futures.append(future)
            self.arrivals.append(monotonic())
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
            self.waiting.append(check.call)
            self.futures.append(future)
            self.arrivals.append(monotonic())
            self._flush()

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
        if connection is None or len(self.waiting) > 1 or not connection.is_open:
            return False
        packed = self._store.encoder.pack_alone(self.waiting[0])
        if packed is None:
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


class AsyncConnection(asyncio.Protocol):
    """A connection to one server, shared by all requests of an event loop: redis-py opens it, then replies arrive here.

    No request waits for longer than its deadline, neither for a reply nor for the connection to be open: if it has not
    been sent by then, it never is. `on_failure` is called once for each failure, however many requests it affects.
    """

    def __init__(self, connection: Any, budget_s: float, on_failure: Callable[[StoreError], None]) -> None:
        self.is_closed = False
        self.budget_s = budget_s
        """For error messages, and for requests sent when the connection opens late."""
        self.pending: deque[ServerRequest | _InFlightCheck] = deque()
        self._on_failure = on_failure
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._replies = ReplyReader()
        self._transport: asyncio.Transport | None = None
        self._streams: Any = None
        self._opening: asyncio.Task[None] | None = None
        self._timer_at: float | None = None
        self._overdue = 0.0
        self._late_checks = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.is_closed

    def send(self, request: ServerRequest | _InFlightCheck) -> None:
        self.pending.append(request)
        if self._transport is not None:
            self._transport.write(request.pack())
        else:
            self.open()
        if self._timer_at is None or request.deadline < self._timer_at:
            self._set_timer(request.deadline)

    def open(self) -> asyncio.Task[None]:
        """Start to connect; the task ends when the connection is open, or has failed."""
        if self._opening is None:
            self._opening = self._loop.create_task(self._open())
        return self._opening

    def data_received(self, data: bytes) -> None:
        replies, pending = self._replies, self.pending
        complete: list[ServerRequest | _InFlightCheck] = []
        try:
            replies.feed(data, len(data))
            while (reply := replies.next_reply()) is not INCOMPLETE:
                if not pending:
                    raise UnexpectedReply("the store sent more replies than it was asked for")
                if pending[0].take(reply):
                    complete.append(pending.popleft())
            if not pending and replies.has_leftover():
                raise UnexpectedReply("the store sent more replies than it was asked for")
        except UnexpectedReply as error:
            pending.extendleft(reversed(complete))  # it is unknown which of the replies were theirs
            self._fail(error)
            return
        for request in complete:
            request.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionLost(f"the connection to Redis broke: {error or 'it was closed by the server'}"))

    async def close(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._connection.disconnect(nowait=True)
        self._fail(NotSent("the limiter was closed"))
        await asyncio.sleep(0)  # lets the transport close

    async def _open(self) -> None:
        connection = self._connection
        try:
            await connection.connect()
        except Exception as error:  # including those of a credential provider
            unsent = NotSent(f"cannot reach Redis: {error}")
            unsent.__cause__ = error
            self._fail(unsent)
            return
        # redis-py has no public way to its streams. They stay referenced, as they close the transport when collected.
        self._streams = connection._reader, connection._writer  # noqa: SLF001 - redis-py has no public ones
        connection._reader = connection._writer = None  # noqa: SLF001 - it must not close them
        transport = self._streams[1].transport
        transport.set_protocol(self)
        transport.resume_reading()
        if self.is_closed:
            transport.abort()
            return
        self._transport = transport
        earliest = self._loop.time() + min(MIN_REPLY_S, self.budget_s)
        for request in self.pending:
            request.deadline = max(request.deadline, earliest)
            transport.write(request.pack())

    def _set_timer(self, deadline: float) -> None:
        """Set one timer for the request whose deadline is next, not one for each."""
        self._timer_at = deadline
        self._loop.call_at(deadline, self._check_deadlines, deadline)

    def _check_deadlines(self, deadline: float) -> None:
        if deadline != self._timer_at:  # replaced by an earlier one
            return
        self._timer_at = None
        if not self.pending or self.is_closed:
            return
        now, first = self._loop.time(), min([request.deadline for request in self.pending])
        if first > now:
            self._set_timer(first)
        elif first != self._overdue or self._late_checks < LATE_CHECKS:
            # The loop may have been busy, and some loops run timers first: a reply that has arrived counts.
            self._late_checks = self._late_checks + 1 if first == self._overdue else 0
            self._overdue = first
            self._timer_at = deadline
            self._loop.call_soon(self._check_deadlines, deadline)
        elif self._transport is None:
            self._fail_unsent(now)
        else:
            self._fail(StoreTimeout(f"Redis did not answer within the budget of {self.budget_s * 1000:g} ms"))

    def _fail_unsent(self, now: float) -> None:
        """Fail the requests that have waited too long for the connection, which goes on being opened for others."""
        error = NotSent("cannot reach Redis: there is no connection within the budget")
        self._on_failure(error)
        late = [request for request in self.pending if request.deadline <= now]
        self.pending = deque([request for request in self.pending if request.deadline > now])
        if self.pending:
            self._set_timer(min([request.deadline for request in self.pending]))
        for request in late:
            request.fail(error)

    def _fail(self, error: StoreError) -> None:
        """Close the connection: a late reply would be taken for that of another request."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_failure(error)
        if self._transport is not None:
            self._transport.abort()
        pending, self.pending = self.pending, deque()
        for request in pending:
            request.fail(error)


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_is_done = asyncio.Future.done
