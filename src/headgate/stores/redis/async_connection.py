"""An asyncio connection: redis-py opens it, then replies arrive through a protocol of our own.

No request waits for longer than its deadline, neither for a reply nor for the connection to be open: if it has not been
sent by then, it never is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from headgate.errors import StoreError, StoreTimeout
from headgate.stores.redis.batch_protocol import ConnectionLost, NotSent
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.exchange import MIN_REPLY_S
from headgate.stores.redis.reply_reader import INCOMPLETE, ReplyReader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AsyncConnection"]

LATE_CHECKS: Final = 3
"""Iterations of the loop after the deadline in which a reply that has arrived still counts."""


class OutgoingRequest(Protocol):
    """Bytes to send, and the replies or the error that they lead to; see ServerRequest."""

    deadline: float
    """On the clock of the loop; includes the time to connect."""

    def pack(self) -> bytes: ...
    def take(self, reply: Any) -> bool: ...
    def finish(self) -> None: ...
    def fail(self, error: StoreError) -> None: ...


class AsyncConnection(asyncio.Protocol):
    """A connection to one server, shared by all requests of an event loop.

    `on_failure` is called once for each failure, however many requests it leaves without a reply.
    """

    def __init__(self, connection: Any, budget_s: float, on_failure: Callable[[StoreError], None]) -> None:
        self.is_closed = False
        self.budget_s = budget_s
        """For error messages, and for requests sent when the connection opens late."""
        self.pending: deque[OutgoingRequest] = deque()
        self._on_failure = on_failure
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._replies = ReplyReader()
        self._transport: asyncio.Transport | None = None
        self._streams: Any = None
        self._opening: asyncio.Task[None] | None = None
        self._timer_at: float | None = None
        """When the timer fires; None if there is none."""
        self._overdue = 0.0
        self._late_checks = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.is_closed

    def send(self, request: OutgoingRequest) -> None:
        """Send a request, now or when the connection is open."""
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
        complete: list[OutgoingRequest] = []
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
