"""The Redis store for asyncio: calls that arrive in one turn of the loop, or while others are on their way, travel
together.

Nothing waits for a timer: a call that finds the line free leaves at the end of this turn of the loop. Replies come
in through a protocol of our own on the transport that redis-py has opened, so that a batch costs one write and one
read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import StoreUnavailable
from headgate.stores.redis.aio_line import Line
from headgate.stores.redis.conversation import Stuck, Unsent, converse, public
from headgate.stores.redis.wire import decode_one

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.errors import StoreError
    from headgate.stores.calls import Call
    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Command, Node, Wire

__all__ = ["AsyncRedisStore"]

LARGEST_BATCH: Final = 256
MOST_ON_THE_WAY: Final = 2
"""Batches under way at the same time: Redis works on one while this process makes and reads the other."""
WORTH_SPLITTING: Final = 16
"""Calls that are better sent as two batches than as one."""
SHORTEST_CONNECT: Final = 0.25
"""Seconds that opening a connection may take, whatever the budget for a call is."""


class AsyncRedisStore:
    """Counts in Redis. Nothing is connected before the first call; each event loop gets connections of its own."""

    def __init__(self, place: Place, wire: Wire, *, budget: float) -> None:
        self._place = place
        self._wire = wire
        self._budget = budget
        self._desk: _Desk | None = None
        """That of the loop that called last."""
        self._desks: dict[asyncio.AbstractEventLoop, _Desk] = {}

    @property
    def stats(self) -> dict[str, int]:
        """How many calls were carried in how many round trips, by the loops that are still there."""
        desks = list(self._desks.values())
        return {"calls": sum(desk.calls for desk in desks), "round_trips": sum(desk.round_trips for desk in desks)}

    def run(self, call: Call) -> asyncio.Future[Any]:
        """Carry out a call, together with those of other tasks that wait at this moment."""
        loop = asyncio.get_running_loop()
        desk = self._desk
        if desk is None or desk.loop is not loop:
            desk = self._desk = self._desk_of(loop)
        return desk.ask(call)

    async def close(self) -> None:
        """Close the connections of this loop; what is still waiting fails."""
        desk = self._desks.pop(asyncio.get_running_loop(), None)
        self._desk = None
        if desk is not None:
            await desk.close()

    def _desk_of(self, loop: asyncio.AbstractEventLoop) -> _Desk:
        desk = self._desks.get(loop)
        if desk is None:
            for other in [other for other in list(self._desks) if other.is_closed()]:
                self._desks.pop(other, None)
            desk = self._desks[loop] = _Desk(loop, self._place, self._wire, self._budget)
        return desk


class _Desk:
    """Where the calls of one event loop wait for each other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, place: Place, wire: Wire, budget: float) -> None:
        self.loop = loop
        self.calls = self.round_trips = 0
        self._place = place
        self._wire = wire
        self._budget = budget
        self._waiting: list[Call] = []
        self._futures: list[asyncio.Future[Any]] = []
        """Of those who wait, in the same order."""
        self._flushing = False
        self._on_the_way = 0
        self._alone = True
        """Whether the last batch was of one call: then nobody is likely to join the next one, either."""
        self._lines: dict[Node | None, Line] = {}
        self._stuck = Stuck()
        self._closed = False

    def ask(self, call: Call) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        self._waiting.append(call)
        self._futures.append(future)
        if not self._flushing:
            if self._alone and not self._on_the_way:
                if not self._ask_shortly():
                    self._flush()
            else:
                self._flushing = True
                self.loop.call_soon(self._flush)
        return future

    async def close(self) -> None:
        self._closed = True
        waiting, self._waiting, self._futures = self._futures, [], []
        for future in waiting:
            _tell(future, StoreUnavailable("the limiter was closed"))
        for line in list(self._lines.values()):
            await line.close()

    def _flush(self) -> None:
        self._flushing = False
        while self._waiting and self._on_the_way < MOST_ON_THE_WAY:
            size = min(len(self._waiting), LARGEST_BATCH)
            if not self._on_the_way and size >= WORTH_SPLITTING:
                size = (size + 1) // 2  # else all callers would wait for one batch, and Redis for all callers, in turn
            calls, futures = self._waiting[:size], self._futures[:size]
            del self._waiting[:size], self._futures[:size]
            if any(map(_is_done, futures)):  # who was cancelled while waiting asks for nothing
                kept = [index for index, future in enumerate(futures) if not future.done()]
                calls, futures = [calls[index] for index in kept], [futures[index] for index in kept]
            if calls:
                self._on_the_way += 1
                self._alone = len(calls) == 1
                self.calls += len(calls)
                _Errand(self, converse(calls, self._wire, self._place.topology), futures).go_on()

    def _ask_shortly(self) -> bool:
        """Send the commonest call when it goes alone; false if it has to go the long way."""
        line = self._lines.get(None)
        packed = self._wire.pack_one(self._waiting[0])
        if line is None or packed is None or len(self._waiting) > 1 or not line.is_open():
            return False
        self._on_the_way += 1
        self.calls += 1
        self.round_trips += 1
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
        self.round_trips += 1
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
                self.loop.call_soon(answered)

    def _line(self, node: Node | None) -> Line:
        line = self._lines.get(node)
        if line is None or line.closed:
            if self._closed:
                raise Unsent("the limiter was closed")
            self._stuck.check(node)
            timeout = max(self._budget, SHORTEST_CONNECT)
            connection = self._place.connection(node, timeout=timeout, asynchronous=True)
            line = self._lines[node] = Line(connection, self._budget, lambda error: self._stuck.note(node, error))
        return line


class _Errand:
    """A conversation under way: driven by the replies as they come in, without a task of its own."""

    __slots__ = ("_conversation", "_desk", "_futures")

    def __init__(
        self,
        desk: _Desk,
        conversation: Generator[list[Command], None, list[Any]],
        futures: list[asyncio.Future[Any]],
    ) -> None:
        self._desk = desk
        self._conversation = conversation
        self._futures = futures

    def go_on(self) -> None:
        desk = self._desk
        try:
            commands = self._conversation.send(None)
        except StopIteration as end:
            answers: list[Any] = end.value
        except Exception as error:
            answers = [error] * len(self._futures)
        else:
            desk._exchange(commands, self.go_on)  # noqa: SLF001 - a part of the desk, in its own file
            return
        for future, answer in zip(self._futures, answers, strict=True):
            _tell(future, answer)
        desk._back()  # noqa: SLF001


class _Single:
    """The commonest call, sent by itself."""

    __slots__ = ("_call", "_desk", "_future", "_packed", "_reply", "deadline")

    def __init__(self, desk: _Desk, packed: bytes, call: Any, future: asyncio.Future[Any]) -> None:
        self._desk = desk
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
            self._desk._back()  # noqa: SLF001 - a part of the desk, in its own file
        else:
            # An error of the server's: nothing was done, and the long way knows what to do about each.
            self._desk._back()  # noqa: SLF001
            self._desk._take_long_way(self._call, self._future)  # noqa: SLF001

    def fail(self, error: StoreError) -> None:
        _tell(self._future, public(error))
        self._desk._back()  # noqa: SLF001


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    """Give the answer to whoever still waits for it."""
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_is_done = asyncio.Future.done
