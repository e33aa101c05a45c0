"""The Redis store for asyncio: calls that arrive in one turn of the loop, or while others are on their way, travel
together.

Nothing waits for a timer: a call that finds the line free leaves at the end of this turn of the loop. Replies come
in through a protocol of our own on the transport that redis-py has opened, so that a batch costs one write and one
read.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from headgate._forks import renew_in_children
from headgate.decisions import Decision
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.calls import Check
from headgate.stores.redis.aio_line import Line
from headgate.stores.redis.breaker import Shut
from headgate.stores.redis.conversation import OutOfTime, Unsent, converse, gives_back, public, refusal
from headgate.stores.redis.loops import maker_of_futures, self_aware
from headgate.stores.redis.replies import decode_alone
from headgate.stores.redis.shared import SharedStore
from headgate.stores.redis.topology import Standalone
from headgate.stores.redis.vigil import WATCH, Vigil

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.stores.calls import Call
    from headgate.stores.redis.breaker import Breakers
    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Command, Node, Wire

__all__ = ["AsyncRedisStore"]

LARGEST_BATCH: Final = 256
MOST_ON_THE_WAY: Final = 2
"""Batches under way at the same time: Redis works on one while this process makes and reads the other."""
WORTH_SPLITTING: Final = 16
"""Calls that are better sent as two batches than as one, where this process waits for the answers."""
PROMPT: Final = 0.00004
"""Seconds a call for whoever waits for answers. One that reads them later has other work to do, as servers have: two
batches would cost it the more, and win nothing."""


class AsyncRedisStore(SharedStore):
    """Counts in Redis. Nothing is connected before the first call; each event loop gets connections of its own."""

    def __init__(self, place: Place, wire: Wire, *, budget: float) -> None:
        super().__init__(place, wire)
        self.budget = budget
        """Seconds that a call may take."""
        self._desk: _Desk | None = None
        """That of the loop that called last."""
        self._desks: dict[asyncio.AbstractEventLoop, _Desk] = {}
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """A child has loops of its own, and finds out by itself how the servers are."""
        self._desk, self._desks = None, {}
        self.breakers.reset()

    @property
    def stats(self) -> dict[str, int]:
        """How many calls were carried in how many round trips, by the loops that are still there."""
        desks = list(self._desks.values())
        return {"calls": sum(desk.calls for desk in desks), "round_trips": sum(desk.round_trips for desk in desks)}

    def run(self, call: Call) -> asyncio.Future[Any]:
        """Carry out a call, together with those of other tasks that wait at this moment."""
        if self._only is not None and self._only.is_open:
            raise public(self._only.refusal())
        desk = self._desk
        if desk is None or desk.aware._thread_id != get_ident():  # noqa: SLF001 - see self_aware
            loop = asyncio.get_running_loop()
            if desk is None or desk.loop is not loop:
                desk = self._desk = self._desk_of(loop)
        return desk.ask(call)

    def warm(self, *, wait: float = 0) -> None:
        """Begin to connect, if there is a loop to do it in, for which nobody can wait here: the first call needs it
        within its budget."""
        with suppress(RuntimeError):
            self._desk_of(asyncio.get_running_loop()).warm()

    async def warm_up(self, *, wait: float) -> None:
        """Connect, and wait so many seconds for it."""
        opening = self._desk_of(asyncio.get_running_loop()).warm()
        if opening is not None:
            await asyncio.wait([opening], timeout=wait)

    def prepare(self, node: Node | None, *, wait: float) -> None:
        """Connect to a server that serves again before requests go there; called from another thread, which waits."""
        desks = [desk for desk in list(self._desks.values()) if not desk.loop.is_closed()]
        for desk in desks:
            with suppress(RuntimeError):  # its loop was closed meanwhile
                desk.loop.call_soon_threadsafe(desk.warm, node)
        end = time.monotonic() + wait
        while time.monotonic() < end and not all(desk.is_warm(node) for desk in desks if desk.loop.is_running()):
            time.sleep(0.002)

    def abandon(self, node: Node | None) -> None:
        """What was prepared is closed with its loop's other connections."""

    def allow(self, budget: float) -> None:
        """Give each call so many seconds from now on."""
        self.budget = budget
        for desk in list(self._desks.values()):
            desk.allow(budget)

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
            desk = self._desks[loop] = _Desk(loop, self._place, self._wire, self.budget, self.breakers)
        return desk


class _Desk:
    """Where the calls of one event loop wait for each other."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, place: Place, wire: Wire, budget: float, breakers: Breakers
    ) -> None:
        self.loop = loop
        self.aware = self_aware(loop)
        self._create_future = maker_of_futures(loop)
        self.calls = self.round_trips = 0
        self._breakers = breakers
        self._place = place
        self._wire = wire
        self.budget = budget
        self._waiting: list[Call] = []
        self._futures: list[asyncio.Future[Any]] = []
        """Of those who wait, in the same order."""
        self._flushing = False
        self._on_the_way = 0
        self._waits = self._alone = True
        """Whether the answers to the last batch were waited for, and whether it was of one call: then nobody is likely
        to join the next one, either."""
        self._lines: dict[Node | None, Line] = {}
        self._vigil = Vigil()
        self._closed = False

    def warm(self, node: Node | None = None) -> asyncio.Task[None] | None:
        """Begin to connect, whatever the breaker says; what is over when that is, where it is known whom to."""
        if self._closed or (node is None and not isinstance(self._place.topology, Standalone)):
            return None
        line = self._lines.get(node)
        if line is None or line.closed:
            line = self._open_line(node)
        return line.open()

    def is_warm(self, node: Node | None) -> bool:
        line = self._lines.get(node)
        return self._closed or (line is not None and line.is_open())

    def allow(self, budget: float) -> None:
        self.budget = budget
        for line in list(self._lines.values()):
            line.budget = budget

    def ask(self, call: Call) -> asyncio.Future[Any]:
        future = self._create_future()
        if type(call) is Check or not getattr(call, "goes_first", False):
            self._waiting.append(call)
            self._futures.append(future)
        else:
            self._waiting.insert(0, call)
            self._futures.insert(0, future)
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
            if self._waits and not self._on_the_way and size >= WORTH_SPLITTING:
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
        """Send a check that goes alone; false if it has to go the long way."""
        line = self._lines.get(None)
        packed = self._wire.pack_alone(self._waiting[0])
        if line is None or packed is None or len(self._waiting) > 1 or not line.is_open():
            return False
        self._on_the_way += 1
        self.calls += 1
        self.round_trips += 1
        line.send(_Single(self, packed, self._waiting.pop(), self._futures.pop()))
        if self._vigil.is_due():
            self._watch(self.round_trips, self.loop.time() + WATCH)
        return True

    def _watch(self, round_trip: int, end: float) -> None:
        """Keep the loop awake until the answer is there: a loop that has something to do looks for answers, and lets
        all others run, before it comes back to this."""
        if not self._on_the_way or self.round_trips != round_trip:
            self._vigil.ended(in_vain=False)
        elif self.loop.time() >= end:
            self._vigil.ended(in_vain=True)
        else:
            self.loop.call_soon(self._watch, round_trip, end)

    def _back(self) -> None:
        """A batch has been answered."""
        self._on_the_way -= 1
        if self._waiting and not self._flushing:
            self._flush()

    def _take_long_way(self, call: Call, future: asyncio.Future[Any]) -> None:
        self._waiting.append(call)
        self._futures.append(future)
        self._flush()

    def _exchange(self, commands: list[Command], go_on: Callable[[], None], end: float | None) -> None:
        """One round trip to every server concerned, all at the same time, unless it is too late; then `go_on`."""
        self.round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        missing = len(by_node)

        def answered() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                for node, its in by_node.items():
                    self._note(node, its)
                go_on()

        for node, its in by_node.items():
            try:
                if end is not None and self.loop.time() >= end:
                    raise OutOfTime("cannot reach Redis: the budget was used up before it was its turn")
                self._line(node).ask(its, answered)
            except (Unsent, Shut) as error:
                for command in its:
                    command.reply = error
                # Not before this function is left: the conversation must not go on inside itself.
                self.loop.call_soon(answered)

    def _line(self, node: Node | None) -> Line:
        line = self._lines.get(node)
        if line is None or line.closed:
            if self._closed:
                raise Unsent("the limiter was closed")
            breaker = self._breakers[node]
            if breaker.is_open:
                raise breaker.refusal()
            line = self._open_line(node)
        return line

    def _open_line(self, node: Node | None) -> Line:
        connection = self._place.connection(node, asynchronous=True)
        line = self._lines[node] = Line(connection, self.budget, lambda error: self._failed(node, error))
        return line

    def _note(self, node: Node | None, commands: list[Command]) -> None:
        """Tell the breaker how the server is; lines tell it themselves when they fail."""
        for command in commands:
            refused = refusal(command.reply)
            if refused is not None:
                self._breakers.fail(node, refused)
                return
            if isinstance(command.reply, StoreError):
                return
        self._breakers.succeed(node)

    def _failed(self, node: Node | None, error: StoreError) -> None:
        if not self._closed:
            self._breakers.fail(node, error)


class _Errand:
    """A conversation under way: driven by the replies as they come in, without a task of its own."""

    __slots__ = ("_began", "_commands", "_conversation", "_desk", "_end", "_futures")

    def __init__(
        self,
        desk: _Desk,
        conversation: Generator[list[Command], None, list[Any]],
        futures: list[asyncio.Future[Any]],
    ) -> None:
        self._desk = desk
        self._conversation = conversation
        self._futures = futures
        self._commands: list[Command] = []
        self._end = 0.0
        self._began = time.perf_counter()

    def go_on(self) -> None:
        desk = self._desk
        end = None
        if not self._end:
            self._end = desk.loop.time() + desk.budget
        elif any(isinstance(command.reply, StoreError) for command in self._commands):
            end = self._end  # whoever did not answer has used the time of all that follows
        try:
            commands = self._commands = self._conversation.send(None)
        except StopIteration as last:
            answers: list[Any] = last.value
        except Exception as error:
            answers = [error] * len(self._futures)
        else:
            # What is given back goes to servers that serve: the time of those that do not is not theirs.
            desk._exchange(commands, self.go_on, None if gives_back(commands) else end)  # noqa: SLF001
            return
        desk._waits = time.perf_counter() - self._began < PROMPT * len(answers)  # noqa: SLF001
        for future, answer in zip(self._futures, answers, strict=True):
            # The common case by itself: this runs for every request.
            if type(answer) is Decision and not future.done():
                future.set_result(answer)
            else:
                _tell(future, answer)
        desk._back()  # noqa: SLF001


class _Single:
    """A check, sent by itself."""

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
            self._desk._breakers.succeed(None)  # noqa: SLF001 - a part of the desk, in its own file
            _tell(self._future, decode_alone(self._call, self._reply))
            self._desk._back()  # noqa: SLF001
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
