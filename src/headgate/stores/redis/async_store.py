"""The Redis store for asyncio: calls that arrive in one turn of the loop, or while others are on their way, travel
together.

Nothing waits for a timer: a call that finds the line free leaves at the end of this turn of the loop. Replies come
in through a protocol of our own on the transport that redis-py has opened, so that a batch costs one write and one
read. Calls travel, and wait, only with those that need the same servers: one that does not answer delays nobody else.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from headgate._fork import reinit_after_fork
from headgate.decisions import Decision
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.operations import Check
from headgate.stores.redis.async_connection import AsyncConnection
from headgate.stores.redis.base import FIRST_CONNECTION_S, RedisStoreBase
from headgate.stores.redis.batch_protocol import (
    BudgetExhausted,
    NotSent,
    deadline,
    deadline_of_round,
    public,
    refusal,
    run_batch,
    servers_of,
)
from headgate.stores.redis.breaker import CircuitOpen
from headgate.stores.redis.busy_poll import WATCH, BusyPoll
from headgate.stores.redis.decoding import decode_alone, unexpected
from headgate.stores.redis.topology import Cluster, Standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import Command, CommandEncoder, Node

__all__ = ["AsyncRedisStore", "maker_of_futures", "self_aware"]

LARGEST_BATCH: Final = 256
MOST_ON_THE_WAY: Final = 2
"""Batches under way at the same time: Redis works on one while this process makes and reads the other."""
MAX_LANES: Final = 1_000
"""Sets of servers whose lanes are kept, where there are many servers."""
WORTH_SPLITTING: Final = 16
"""Calls that are better sent as two batches than as one, where this process waits for the answers."""
PROMPT: Final = 0.00004
"""Seconds a call for whoever waits for answers. One that reads them later has other work to do, as servers have: two
batches would cost it the more, and win nothing."""


class AsyncRedisStore(RedisStoreBase):
    """Counts in Redis. Nothing is connected before the first call; each event loop gets connections of its own."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        super().__init__(factory, encoder)
        self.budget = budget
        """Seconds that a call may take."""
        self._desk: _LoopBatcher | None = None
        """That of the loop that called last."""
        self._desks: dict[asyncio.AbstractEventLoop, _LoopBatcher] = {}
        self._patience = FIRST_CONNECTION_S
        """Seconds that the next loop may take to connect, beyond the budget."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """A child has loops of its own, and finds out by itself how the servers are."""
        self._desk, self._desks = None, {}
        self._patience = FIRST_CONNECTION_S
        self.breakers.reset()

    @property
    def stats(self) -> dict[str, int]:
        """The number of calls and of the round trips that carried them, by the loops that are still there, and of
        connections that were out of step."""
        desks = list(self._desks.values())
        return {
            "calls": sum(desk.calls for desk in desks),
            "round_trips": sum(desk.round_trips for desk in desks),
            "unexpected_replies": self.unexpected_replies,
        }

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

    def preconnect(self, node: Node | None, *, wait: float) -> None:
        """Connect to a server that serves again before requests go there; called from another thread, which waits."""
        desks = [desk for desk in list(self._desks.values()) if not desk.loop.is_closed()]
        for desk in desks:
            with suppress(RuntimeError):  # its loop was closed meanwhile
                desk.loop.call_soon_threadsafe(desk.warm, node)
        end = time.monotonic() + wait
        while time.monotonic() < end and not all(desk.is_warm(node) for desk in desks if desk.loop.is_running()):
            time.sleep(0.002)

    def drop_preconnected(self, node: Node | None) -> None:
        """What was prepared is closed with its loop's other connections."""

    def set_budget(self, budget: float) -> None:
        """Give each call so many seconds from now on."""
        self.budget = budget
        for desk in list(self._desks.values()):
            desk.set_budget(budget)

    async def close(self) -> None:
        """Close the connections of this loop; what is still waiting fails."""
        desk = self._desks.pop(asyncio.get_running_loop(), None)
        self._desk = None
        if desk is not None:
            await desk.close()

    def _desk_of(self, loop: asyncio.AbstractEventLoop) -> _LoopBatcher:
        desk = self._desks.get(loop)
        if desk is None:
            for other in [other for other in list(self._desks) if other.is_closed()]:
                self._desks.pop(other, None)
            desk = self._desks[loop] = _LoopBatcher(loop, self, self.factory, self.encoder, self._patience)
            self._patience = 0.0
        return desk


class _LoopBatcher:
    """The connections of one event loop, and the lanes in which calls wait for each other."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: AsyncRedisStore,
        factory: ConnectionFactory,
        encoder: CommandEncoder,
        patience: float,
    ) -> None:
        self.loop = loop
        self.aware = self_aware(loop)
        self.calls = self.round_trips = 0
        self.breakers = store.breakers
        self.budget = store.budget
        self.encoder = encoder
        self.topology = factory.topology
        self.lines: dict[Node | None, AsyncConnection] = {}
        self._note_failure = store.note_failure
        self.factory = factory
        self._closed = False
        self._patient_until = loop.time() + patience if patience else 0.0
        """Until when connections may take longer than the budget."""
        self._lane = _Lane(self)
        """For all calls, unless there are several servers that have keys."""
        self._lanes: dict[Hashable, _Lane] = {None: self._lane}
        self.ask: Callable[[Call], asyncio.Future[Any]] = (
            self._ask_its_servers if isinstance(factory.topology, Cluster) else self._lane.ask
        )

    def _ask_its_servers(self, call: Call) -> asyncio.Future[Any]:
        servers = servers_of(call, self.encoder, self.topology)
        lane = self._lanes.get(servers)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:  # those who wait in one of them still know it
                self._lanes = {None: self._lane}
            lane = self._lanes[servers] = _Lane(self)
        return lane.ask(call)

    def warm(self, node: Node | None = None) -> asyncio.Task[None] | None:
        """Begin to connect, whatever the breaker says; what is over when that is, where it is known whom to."""
        if self._closed or (node is None and not isinstance(self.factory.topology, Standalone)):
            return None
        line = self.lines.get(node)
        if line is None or line.closed:
            line = self._open_line(node)
        return line.open()

    def is_warm(self, node: Node | None) -> bool:
        line = self.lines.get(node)
        return self._closed or (line is not None and line.is_open())

    def set_budget(self, budget: float) -> None:
        self.budget = budget
        for line in list(self.lines.values()):
            line.budget = budget

    async def close(self) -> None:
        self._closed = True
        for lane in list(self._lanes.values()):
            lane.fail_waiting(StoreUnavailable("the limiter was closed"))
        for line in list(self.lines.values()):
            await line.close()

    def exchange(self, commands: list[Command], go_on: Callable[[], None], end: float) -> None:
        """One round trip to every server concerned, all at the same time, and over by then; then `go_on`."""
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
                line = self._line(node)
                until = end if line.is_open() else max(end, self._patient_until)
                if self.loop.time() >= until:
                    raise BudgetExhausted("cannot reach Redis: the budget was used up before it was its turn")
                line.ask(its, answered, until)
            except (NotSent, CircuitOpen) as error:
                for command in its:
                    command.reply = error
                # Not before this function is left: the conversation must not go on inside itself.
                self.loop.call_soon(answered)

    def _line(self, node: Node | None) -> AsyncConnection:
        line = self.lines.get(node)
        if line is None or line.closed:
            if self._closed:
                raise NotSent("the limiter was closed")
            breaker = self.breakers[node]
            if breaker.is_open:
                raise breaker.refusal()
            line = self._open_line(node)
        return line

    def _open_line(self, node: Node | None) -> AsyncConnection:
        connection = self.factory.connection(node, asynchronous=True)
        line = self.lines[node] = AsyncConnection(connection, self.budget, lambda error: self._failed(node, error))
        return line

    def _note(self, node: Node | None, commands: list[Command]) -> None:
        """Tell the breaker how the server is; lines tell it themselves when they fail."""
        for command in commands:
            refused = refusal(command.reply)
            if refused is not None:
                self.breakers.fail(node, refused)
                return
            if isinstance(command.reply, StoreError):
                return
        self.breakers.succeed(node)

    def _failed(self, node: Node | None, error: StoreError) -> None:
        if not self._closed:
            self._note_failure(node, error)


class _Lane:
    """Where calls to the same servers wait for each other."""

    def __init__(self, desk: _LoopBatcher) -> None:
        self._desk = desk
        self._loop = desk.loop
        self._create_future = maker_of_futures(desk.loop)
        self._waiting: list[Call] = []
        self._futures: list[asyncio.Future[Any]] = []
        self._arrivals: list[float] = []
        """Of those who wait, in the same order; when each has come."""
        self._flushing = False
        self.on_the_way = 0
        self.waits = self._alone = True
        """True if the answers to the last batch were waited for, and it was of one call: then nobody is likely
        to join the next one, either."""
        self.has_failed = False
        """True if the last batch did."""
        self._vigil = BusyPoll()

    def ask(self, call: Call) -> asyncio.Future[Any]:
        future = self._create_future()
        if type(call) is Check or not getattr(call, "goes_first", False):
            self._waiting.append(call)
            self._futures.append(future)
            self._arrivals.append(monotonic())
        else:
            self._waiting.insert(0, call)
            self._futures.insert(0, future)
            self._arrivals.insert(0, monotonic())
        if not self._flushing:
            if self._alone and not self.on_the_way:
                if not self._ask_shortly():
                    self._flush()
            else:
                self._flushing = True
                self._loop.call_soon(self._flush)
        return future

    def fail_waiting(self, error: StoreError) -> None:
        waiting, self._waiting, self._futures, self._arrivals = self._futures, [], [], []
        for future in waiting:
            _tell(future, error)

    def _flush(self) -> None:
        self._flushing = False
        desk = self._desk
        while self._waiting and self.on_the_way < MOST_ON_THE_WAY:
            size = min(len(self._waiting), LARGEST_BATCH)
            if self.waits and not self.on_the_way and size >= WORTH_SPLITTING:
                size = (size + 1) // 2  # else all callers would wait for one batch, and Redis for all callers, in turn
            calls, futures, oldest = self._waiting[:size], self._futures[:size], min(self._arrivals[:size])
            del self._waiting[:size], self._futures[:size], self._arrivals[:size]
            if any(map(_is_done, futures)):  # who was cancelled while waiting asks for nothing
                kept = [index for index, future in enumerate(futures) if not future.done()]
                calls, futures = [calls[index] for index in kept], [futures[index] for index in kept]
            if calls:
                self.on_the_way += 1
                self._alone = len(calls) == 1
                desk.calls += len(calls)
                now = self._loop.time()
                end = deadline(now - (monotonic() - oldest), now, desk.budget, after_failure=self.has_failed)
                _InFlightBatch(desk, self, run_batch(calls, desk.encoder, desk.topology), futures, end).go_on()

    def _ask_shortly(self) -> bool:
        """Send a check that goes alone; false if it has to go the long way."""
        desk = self._desk
        line = desk.lines.get(None)
        packed = desk.encoder.pack_alone(self._waiting[0])
        if line is None or packed is None or len(self._waiting) > 1 or not line.is_open():
            return False
        self.on_the_way += 1
        desk.calls += 1
        desk.round_trips += 1
        self._arrivals.clear()
        end = self._loop.time() + desk.budget
        line.send(_InFlightCheck(self, packed, self._waiting.pop(), self._futures.pop(), end))
        if self._vigil.is_due():
            self._watch(desk.round_trips, self._loop.time() + WATCH)
        return True

    def _watch(self, round_trip: int, end: float) -> None:
        """Keep the loop awake until the answer is there: a loop that has something to do looks for answers, and lets
        all others run, before it comes back to this."""
        if not self.on_the_way or self._desk.round_trips != round_trip:
            self._vigil.ended(in_vain=False)
        elif self._loop.time() >= end:
            self._vigil.ended(in_vain=True)
        else:
            self._loop.call_soon(self._watch, round_trip, end)

    def back(self, *, has_failed: bool) -> None:
        """A batch has been answered, or has failed."""
        self.on_the_way -= 1
        self.has_failed = has_failed
        if self._waiting and not self._flushing:
            self._flush()

    def succeeded(self) -> None:
        """The only server has answered."""
        self._desk.breakers.succeed(None)

    def take_long_way(self, call: Call, future: asyncio.Future[Any]) -> None:
        self._waiting.append(call)
        self._futures.append(future)
        self._arrivals.append(monotonic())
        self._flush()


class _InFlightBatch:
    """A conversation under way: driven by the replies as they come in, without a task of its own."""

    __slots__ = ("_began", "_commands", "_conversation", "_desk", "_end", "_futures", "_lane")

    def __init__(
        self,
        desk: _LoopBatcher,
        lane: _Lane,
        conversation: Generator[list[Command], None, list[Any]],
        futures: list[asyncio.Future[Any]],
        end: float,
    ) -> None:
        self._desk = desk
        self._lane = lane
        self._conversation = conversation
        self._futures = futures
        self._commands: list[Command] = []
        self._end = end
        self._began = time.perf_counter()

    def go_on(self) -> None:
        desk, lane = self._desk, self._lane
        has_failed = any([isinstance(command.reply, StoreError) for command in self._commands])  # noqa: C419
        try:
            commands = self._commands = self._conversation.send(None)
        except StopIteration as last:
            answers: list[Any] = last.value
        except Exception as error:
            answers = [error] * len(self._futures)
        else:
            now = desk.loop.time()
            end = deadline_of_round(commands, now, self._end, desk.budget, after_failure=has_failed)
            desk.exchange(commands, self.go_on, end)
            return
        lane.waits = time.perf_counter() - self._began < PROMPT * len(answers)
        for future, answer in zip(self._futures, answers, strict=True):
            # The common case by itself: this runs for every request.
            if type(answer) is Decision and not future.done():
                future.set_result(answer)
            else:
                _tell(future, answer)
        lane.back(has_failed=has_failed)


class _InFlightCheck:
    """A check, sent by itself."""

    __slots__ = ("_answer", "_call", "_future", "_lane", "_packed", "deadline")

    def __init__(self, lane: _Lane, packed: bytes, call: Any, future: asyncio.Future[Any], deadline: float) -> None:
        self._lane = lane
        self._packed = packed
        self._call = call
        self._future = future
        self._answer: Any = None
        self.deadline = deadline

    def pack(self) -> bytes:
        return self._packed

    def take(self, reply: Any) -> bool:
        if type(reply) is list:
            self._answer = decode_alone(self._call, reply)
        elif not isinstance(reply, ReplyError):
            raise unexpected(reply)
        return True

    def finish(self) -> None:
        lane = self._lane
        if self._answer is not None:
            lane.succeeded()
            _tell(self._future, self._answer)
            lane.back(has_failed=False)
        else:
            # An error of the server's: nothing was done, and the long way knows what to do about each.
            lane.back(has_failed=False)
            lane.take_long_way(self._call, self._future)

    def fail(self, error: StoreError) -> None:
        _tell(self._future, public(error))
        self._lane.back(has_failed=True)


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    """Give the answer to whoever still waits for it."""
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_is_done = asyncio.Future.done


class _LoopUnaware:
    _thread_id: Final = None


def self_aware(loop: asyncio.AbstractEventLoop) -> Any:
    """What has the thread that the loop runs in as its `_thread_id`: asyncio's own loops do, those of others never say.

    Whoever finds its own thread there knows which loop runs. To ask for that takes five times as long, as it is a call
    of the system on Python 3.11.
    """
    return loop if isinstance(loop, asyncio.BaseEventLoop) else _LoopUnaware


def maker_of_futures(loop: asyncio.AbstractEventLoop) -> Callable[[], asyncio.Future[Any]]:
    """The loop's own, without the step of Python that is around it in asyncio's."""
    if type(loop).create_future is asyncio.BaseEventLoop.create_future:
        return partial(asyncio.Future, loop=loop)
    return loop.create_future
