"""A connection on asyncio: redis-py opens it, then replies come in through a protocol of our own.

Nobody waits for longer than the budget, neither for a reply nor for the connection to be open: what was not sent by
then never is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from headgate.errors import StoreError, StoreTimeout
from headgate.stores.redis.batch_protocol import LEAST_TIME_S, ConnectionLost, NotSent
from headgate.stores.redis.decoding import UnexpectedReply, accept
from headgate.stores.redis.reply_reader import INCOMPLETE, ReplyReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.encoding import Command

__all__ = ["AsyncConnection", "PendingReply"]

LAST_LOOKS: Final = 3
"""Turns of the loop after the budget, in which it looks for replies before it is said that there are none."""


class PendingReply(Protocol):
    """Something that was sent on a line and gets its replies from there, or an error."""

    deadline: float
    """When it must have all of them, on the loop's clock; the time to connect included."""

    def pack(self) -> bytes: ...

    def take(self, reply: Any) -> bool:
        """Take the next reply; whether it was the last one. Raises an UnexpectedReply if it cannot be one."""

    def finish(self) -> None: ...
    def fail(self, error: StoreError) -> None: ...


class AsyncConnection(asyncio.Protocol):
    """A connection to one server: redis-py opens it, then bytes go and come without it."""

    def __init__(self, connection: Any, budget: float, failed: Callable[[StoreError], None]) -> None:
        self.closed = False
        self.budget = budget
        """Seconds that a question may wait; for what is said of it."""
        self._failed = failed
        """Told of each failure, once, however many questions it leaves without an answer."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._replies = ReplyReader()
        self._transport: asyncio.Transport | None = None
        self._streams: Any = None
        self._asked: deque[PendingReply] = deque()
        self._opening: asyncio.Task[None] | None = None
        self._watching = False
        self._watched_until = 0.0
        """The time for which the timer is set."""
        self._overdue = 0.0
        self._looks = 0

    def ask(self, commands: list[Command], answered: Callable[[], None], deadline: float) -> None:
        """Send the commands and call back when each has its reply, or an error as such."""
        self.send(_Commands(commands, answered, deadline))

    def is_open(self) -> bool:
        return self._transport is not None and not self.closed

    def send(self, question: PendingReply) -> None:
        """Send a question, or keep it until the connection is open."""
        self._asked.append(question)
        if self._transport is not None:
            self._transport.write(question.pack())
        else:
            self.open()
        if not self._watching or question.deadline < self._watched_until:
            self._watch_until(question.deadline)

    def open(self) -> asyncio.Task[None]:
        """Begin to connect; what is over when it is open, or has failed."""
        if self._opening is None:
            self._opening = self._loop.create_task(self._open())
        return self._opening

    def data_received(self, data: bytes) -> None:
        replies, asked = self._replies, self._asked
        answered: list[PendingReply] = []
        try:
            replies.feed(data, len(data))
            while (reply := replies.next_reply()) is not INCOMPLETE:
                if not asked:
                    raise UnexpectedReply("the store sent more replies than it was asked for")
                if asked[0].take(reply):
                    answered.append(asked.popleft())
            if not asked and replies.has_leftover():
                raise UnexpectedReply("the store sent more replies than it was asked for")
        except UnexpectedReply as error:
            asked.extendleft(reversed(answered))  # which of the replies were theirs is not known
            self._fail(error)
            return
        for question in answered:
            question.finish()

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
        except Exception as error:  # also what a provider of credentials may raise
            unsent = NotSent(f"cannot reach Redis: {error}")
            unsent.__cause__ = error
            self._fail(unsent)
            return
        # redis-py has no public way to its streams; they stay referenced, as they would close the transport when
        # collected.
        self._streams = connection._reader, connection._writer  # noqa: SLF001
        connection._reader = connection._writer = None  # noqa: SLF001
        transport = self._streams[1].transport
        transport.set_protocol(self)
        transport.resume_reading()
        if self.closed:
            transport.abort()
            return
        self._transport = transport
        least = self._loop.time() + min(LEAST_TIME_S, self.budget)
        for question in self._asked:
            question.deadline = max(question.deadline, least)
            transport.write(question.pack())

    def _watch_until(self, deadline: float) -> None:
        """Look at that time for who has waited too long."""
        self._watching = True
        self._watched_until = deadline
        self._loop.call_at(deadline, self._watch, deadline)

    def _watch(self, deadline: float) -> None:
        """One timer for the question that must be answered next, not one for each. A line that failed once is not
        trusted again."""
        if deadline != self._watched_until:  # another one has been set, for an earlier time
            return
        self._watching = False
        if self._asked and not self.closed:
            now, first = self._loop.time(), min([question.deadline for question in self._asked])
            if first > now:
                self._watch_until(first)
            elif first != self._overdue or self._looks < LAST_LOOKS:
                # The loop may have been busy, and some look at their timers first: a reply that is there counts.
                self._looks = self._looks + 1 if first == self._overdue else 0
                self._overdue = first
                self._watching = True
                self._loop.call_soon(self._watch, deadline)
            elif self._transport is None:
                self._stop_waiting(now)
            else:
                self._fail(StoreTimeout(f"Redis did not answer within the budget of {self.budget * 1000:g} ms"))

    def _stop_waiting(self, now: float) -> None:
        """The connection takes too long for those who have waited: it is opened for others who come later."""
        error = NotSent("cannot reach Redis: there is no connection within the budget")
        self._failed(error)
        late = [question for question in self._asked if question.deadline <= now]
        self._asked = deque([question for question in self._asked if question.deadline > now])
        if self._asked:
            self._watch_until(min([question.deadline for question in self._asked]))
        for question in late:
            question.fail(error)

    def _fail(self, error: StoreError) -> None:
        if self.closed:
            return
        self.closed = True
        self._failed(error)
        if self._transport is not None:
            self._transport.abort()
        asked, self._asked = self._asked, deque()
        for question in asked:
            question.fail(error)


class _Commands:
    """Commands that were sent together, and how many of their replies have come."""

    __slots__ = ("_answered", "_commands", "_missing", "deadline")

    def __init__(self, commands: list[Command], answered: Callable[[], None], deadline: float) -> None:
        self._commands = commands
        self._answered = answered
        # Redis answers ASKING by itself, before the command that it goes with.
        self._missing = [
            step for command in reversed(commands) for step in ((command, None) if command.asking else (command,))
        ]
        self.deadline = deadline

    def pack(self) -> bytes:
        return b"".join([command.pack() for command in self._commands])

    def take(self, reply: Any) -> bool:
        """Give the reply to the command that it belongs to; whether that was the last one."""
        command = self._missing.pop()
        if command is not None:
            accept(command, reply)
        return not self._missing

    def finish(self) -> None:
        self._answered()

    def fail(self, error: StoreError) -> None:
        out_of_step = isinstance(error, UnexpectedReply)
        for command in self._commands if out_of_step else self._missing:
            if command is not None:
                command.reply = error
        self._answered()
