"""The Redis store for asyncio: calls that arrive in one turn of the loop, or while others are on their way, travel
together.

Nothing waits for a timer: a call that finds the line free leaves at the end of this turn of the loop. Replies come
in through a protocol of our own on the transport that redis-py has opened, so that a batch costs one write and one
read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import redis
from hiredis import Reader

from headgate.errors import StoreError, StoreTimeout
from headgate.stores.redis.conversation import Lost, Stuck, Unsent, converse, public
from headgate.stores.redis.wire import decode_one

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.stores.calls import Call
    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Command, Node, Wire

__all__ = ["AsyncRedisStore"]

LARGEST_BATCH: Final = 256
MOST_ON_THE_WAY: Final = 2
"""Batches under way at the same time: Redis works on one while this process makes and reads the other."""
SHORTEST_CONNECT: Final = 0.25
"""Seconds that opening a connection may take, whatever the budget for a call is."""


class AsyncRedisStore:
    """Counts in Redis. Nothing is connected before the first call; each event loop gets connections of its own."""

    def __init__(self, place: Place, wire: Wire, *, budget: float) -> None:
        self._place = place
        self._wire = wire
        self._budget = budget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[Call] = []
        self._futures: list[asyncio.Future[Any]] = []
        """Of those who wait, in the same order."""
        self._flushing = False
        self._on_the_way = 0
        self._alone = True
        """Whether the last batch was of one call: then nobody is likely to join the next one, either."""
        self._lines: dict[Node | None, _Line] = {}
        self._stuck = Stuck()
        self._calls = self._round_trips = 0

    @property
    def stats(self) -> dict[str, int]:
        """How many calls were carried in how many round trips."""
        return {"calls": self._calls, "round_trips": self._round_trips}

    def run(self, call: Call) -> asyncio.Future[Any]:
        """Carry out a call, together with those of other tasks that wait at this moment."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._start_afresh(loop)
        future = loop.create_future()
        self._waiting.append(call)
        self._futures.append(future)
        if not self._flushing:
            if self._alone and not self._on_the_way:
                if not self._ask_shortly():
                    self._flush()
            else:
                self._flushing = True
                loop.call_soon(self._flush)
        return future

    async def close(self) -> None:
        """Close the connections; what is still waiting fails."""
        for line in list(self._lines.values()):
            await line.close()
        self._lines.clear()

    def _start_afresh(self, loop: asyncio.AbstractEventLoop) -> None:
        """In another loop, which cannot use the old one's connections; whoever waited there is gone with it."""
        self._loop = loop
        self._waiting, self._futures = [], []
        self._flushing = False
        self._on_the_way = 0
        self._lines = {}

    def _flush(self) -> None:
        self._flushing = False
        while self._waiting and self._on_the_way < MOST_ON_THE_WAY:
            calls, futures = self._waiting[:LARGEST_BATCH], self._futures[:LARGEST_BATCH]
            del self._waiting[:LARGEST_BATCH], self._futures[:LARGEST_BATCH]
            if any(map(_is_done, futures)):  # who was cancelled while waiting asks for nothing
                kept = [index for index, future in enumerate(futures) if not future.done()]
                calls, futures = [calls[index] for index in kept], [futures[index] for index in kept]
            if calls:
                self._on_the_way += 1
                self._alone = len(calls) == 1
                self._calls += len(calls)
                _Errand(self, converse(calls, self._wire, self._place.topology), futures).go_on()

    def _ask_shortly(self) -> bool:
        """Send the commonest call when it goes alone; false if it has to go the long way."""
        line = self._lines.get(None)
        packed = self._wire.pack_one(self._waiting[0])
        if line is None or packed is None or len(self._waiting) > 1 or not line.is_open():
            return False
        self._on_the_way += 1
        self._calls += 1
        self._round_trips += 1
        line.send(_Single(self, packed, self._waiting.pop(), self._futures.pop()))
        return True

    def _back(self) -> None:
        """A batch has been answered."""
        self._on_the_way -= 1
        if self._waiting and not self._flushing:
            self._flush()

    def _take_long_way(self, call: Call, future: asyncio.Future[Any]) -> None:
        self._waiting.append(call)
        self._futures.append(future)
        self._flush()

    def _exchange(self, commands: list[Command], go_on: Callable[[], None]) -> None:
        """One round trip to every server concerned, all at the same time; then `go_on`."""
        self._round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        missing = len(by_node)

        def answered() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                go_on()

        for node, its in by_node.items():
            try:
                self._line(node).ask(its, answered)
            except Unsent as error:
                for command in its:
                    command.reply = error
                # Not before this function is left: the conversation must not go on inside itself.
                asyncio.get_running_loop().call_soon(answered)

    def _line(self, node: Node | None) -> _Line:
        line = self._lines.get(node)
        if line is None or line.closed:
            self._stuck.check(node)
            timeout = max(self._budget, SHORTEST_CONNECT)
            connection = self._place.connection(node, timeout=timeout, asynchronous=True)
            line = self._lines[node] = _Line(connection, self._budget, lambda error: self._stuck.note(node, error))
        return line


class _Errand:
    """A conversation under way: driven by the replies as they come in, without a task of its own."""

    __slots__ = ("_conversation", "_futures", "_store")

    def __init__(
        self,
        store: AsyncRedisStore,
        conversation: Generator[list[Command], None, list[Any]],
        futures: list[asyncio.Future[Any]],
    ) -> None:
        self._store = store
        self._conversation = conversation
        self._futures = futures

    def go_on(self) -> None:
        store = self._store
        try:
            commands = self._conversation.send(None)
        except StopIteration as end:
            answers: list[Any] = end.value
        except Exception as error:
            answers = [error] * len(self._futures)
        else:
            store._exchange(commands, self.go_on)  # noqa: SLF001 - a part of the store, in its own file
            return
        for future, answer in zip(self._futures, answers, strict=True):
            _tell(future, answer)
        store._back()  # noqa: SLF001


class _Line(asyncio.Protocol):
    """A connection to one server: redis-py opens it, then bytes go and come without it."""

    def __init__(self, connection: Any, budget: float, cannot_open: Callable[[Unsent], None]) -> None:
        self.closed = False
        self._cannot_open = cannot_open
        self._connection = connection
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._streams: Any = None
        self._asked: deque[_Question | _Single] = deque()
        self._opening: asyncio.Task[None] | None = None
        self._watching = False

    def ask(self, commands: list[Command], answered: Callable[[], None]) -> None:
        """Send the commands and call back when each has its reply, or an error as such."""
        self.send(_Question(commands, answered))

    def is_open(self) -> bool:
        return self._transport is not None and not self.closed

    def send(self, question: _Question | _Single) -> None:
        """Send a question, or keep it until the connection is open."""
        self._asked.append(question)
        if self._transport is not None:
            self._send(question)
        elif self._opening is None:
            self._opening = self._loop.create_task(self._open())

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            if self._asked and self._asked[0].take(reply):
                self._asked.popleft().finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(Lost(f"the connection to Redis broke: {error or 'it was closed by the server'}"))

    async def close(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
        self._fail(Unsent("the limiter was closed"))
        await asyncio.sleep(0)  # lets the transport close

    async def _open(self) -> None:
        connection = self._connection
        try:
            await connection.connect()
        except (TimeoutError, redis.RedisError, OSError) as error:
            unsent = Unsent(f"cannot reach Redis: {error}")
            unsent.__cause__ = error
            self._cannot_open(unsent)
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
        for question in self._asked:
            self._send(question)

    def _send(self, question: _Question | _Single) -> None:
        if self._transport is None:
            return
        self._transport.write(question.pack())
        question.deadline = self._loop.time() + self._budget
        if not self._watching:
            self._watching = True
            self._loop.call_at(question.deadline, self._watch)

    def _watch(self) -> None:
        """One timer for the oldest question, not one for each. A line that failed once is not trusted again."""
        self._watching = False
        if self._asked and not self.closed:
            deadline = self._asked[0].deadline
            if deadline <= self._loop.time():
                self._fail(StoreTimeout(f"Redis did not answer within the budget of {self._budget * 1000:g} ms"))
            else:
                self._watching = True
                self._loop.call_at(deadline, self._watch)

    def _fail(self, error: StoreError) -> None:
        if self.closed:
            return
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        asked, self._asked = self._asked, deque()
        for question in asked:
            question.fail(error)


class _Question:
    """Commands that were sent together, and how many of their replies have come."""

    __slots__ = ("_answered", "_commands", "_missing", "deadline")

    def __init__(self, commands: list[Command], answered: Callable[[], None]) -> None:
        self._commands = commands
        self._answered = answered
        # Redis answers ASKING by itself, before the command that it goes with.
        self._missing = [
            step for command in reversed(commands) for step in ((command, None) if command.asking else (command,))
        ]
        self.deadline = 0.0

    def pack(self) -> bytes:
        return b"".join([command.pack() for command in self._commands])

    def take(self, reply: Any) -> bool:
        """Give the reply to the command that it belongs to; whether that was the last one."""
        command = self._missing.pop()
        if command is not None:
            command.reply = reply
        return not self._missing

    def finish(self) -> None:
        self._answered()

    def fail(self, error: StoreError) -> None:
        for command in self._missing:
            if command is not None:
                command.reply = error
        self._answered()


class _Single:
    """The commonest call, sent by itself."""

    __slots__ = ("_call", "_future", "_packed", "_reply", "_store", "deadline")

    def __init__(self, store: AsyncRedisStore, packed: bytes, call: Any, future: asyncio.Future[Any]) -> None:
        self._store = store
        self._packed = packed
        self._call = call
        self._future = future
        self._reply: Any = None
        self.deadline = 0.0

    def pack(self) -> bytes:
        return self._packed

    def take(self, reply: Any) -> bool:
        self._reply = reply
        return True

    def finish(self) -> None:
        if type(self._reply) is list:
            _tell(self._future, decode_one(self._call, self._reply))
            self._store._back()  # noqa: SLF001 - a part of the store, in its own file
        else:
            # An error of the server's: nothing was done, and the long way knows what to do about each.
            self._store._back()  # noqa: SLF001
            self._store._take_long_way(self._call, self._future)  # noqa: SLF001

    def fail(self, error: StoreError) -> None:
        _tell(self._future, public(error))
        self._store._back()  # noqa: SLF001


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    """Give the answer to whoever still waits for it."""
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_is_done = asyncio.Future.done
