"""The Redis store for threads: one connection to each server, and round trips that threads share.

A thread that finds nobody talking to Redis takes all calls that wait, its own among them, and carries them there in
one round trip; the others wait for it. When it is back, the first that came meanwhile goes next. With one thread
nothing is added; with many, Redis sees few and full round trips, and the interpreter lock is fought over less.
"""

from __future__ import annotations

import os
import selectors
import ssl
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import redis
from hiredis import HiredisError, Reader

from headgate._forks import renew_in_children
from headgate.errors import StoreError, StoreTimeout
from headgate.stores.redis.conversation import Lost, Stuck, Unsent, converse, public
from headgate.stores.redis.wire import decode_one

if TYPE_CHECKING:
    from collections.abc import Generator

    from headgate.stores.calls import Call
    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Command, Node, Wire

__all__ = ["RedisStore"]

LARGEST_BATCH: Final = 256
SHORTEST_CONNECT: Final = 0.25
"""Seconds that opening a connection may take, whatever the budget for a call is."""
IDLE: Final = 0.05
"""Seconds after which a connection is looked at before it is used: in between, nobody closes it for being idle."""


class RedisStore:
    """Counts in Redis. Nothing is connected before the first call."""

    def __init__(self, place: Place, wire: Wire, *, budget: float) -> None:
        self._place = place
        self._wire = wire
        self._budget = budget
        self._mutex = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        self._led = False
        self._lines: dict[Node | None, _Line] = {}
        self._stuck = Stuck()
        self._calls = self._round_trips = 0
        renew_in_children(self)

    @property
    def stats(self) -> dict[str, int]:
        """How many calls were carried in how many round trips."""
        return {"calls": self._calls, "round_trips": self._round_trips}

    def run(self, call: Call) -> Any:
        """Carry out a call, together with those of other threads that wait at this moment."""
        with self._mutex:
            turn = _Turn(call) if self._led else None
            if turn is not None:
                self._waiting.append(turn)
            self._led = True
        if turn is None:
            answer = self._run_leading(call)
        else:
            self._wait(turn)
            if not turn.answered:
                self._lead(turn)
            answer = turn.answer
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def close(self) -> None:
        with self._mutex:
            lines = self._lines
            self._lines = {}
        for line in lines.values():
            line.close()

    def renew_after_fork(self) -> None:
        """A child must not talk on its parent's connections, and nobody waits for them here."""
        self._mutex = threading.Lock()
        self._waiting.clear()
        self._led = False
        self._lines = {}

    def _run_leading(self, call: Call) -> Any:
        """The answer to a call that found nobody talking to Redis."""
        try:
            answer = self._ask_shortly(call)
        except BaseException:  # an interrupt: the answer that is on its way must not be taken for another
            self.close()
            self._let_next_lead()
            raise
        if answer is not None:
            self._calls += 1
            self._let_next_lead()
            return answer
        turn = _Turn(call)
        with self._mutex:
            self._waiting.appendleft(turn)
        self._lead(turn)
        return turn.answer

    def _lead(self, mine: _Turn) -> None:
        """Carry all that wait, then let the next one lead."""
        with self._mutex:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
        answers: list[Any] = [StoreError("the call was interrupted")] * len(batch)
        try:
            answers = self._drive(converse([turn.call for turn in batch], self._wire, self._place.topology))
        except BaseException:
            self.close()
            raise
        finally:
            self._calls += len(batch)
            for turn, answer in zip(batch, answers, strict=True):
                turn.finish(answer, wake=turn is not mine)
            self._let_next_lead()

    def _let_next_lead(self) -> None:
        with self._mutex:
            following = self._waiting[0] if self._waiting else None
            self._led = following is not None
            if following is not None:
                following.leads = True
        if following is not None:
            following.wake()

    def _wait(self, turn: _Turn) -> None:
        try:
            turn.wait()
        except BaseException:  # an interrupt: whoever goes must not be waited for
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            if turn.leads:
                self._let_next_lead()
            raise

    def _ask_shortly(self, call: Call) -> Any:
        """The answer to the commonest call when it goes alone; None if it has to go the long way.

        An error of the server's means that nothing was done, and the long way knows what to do about each.
        """
        line = self._lines.get(None)
        if line is None or (packed := self._wire.pack_one(call)) is None or not line.is_usable():
            return None
        self._round_trips += 1
        try:
            line.send(packed)
            reply = line.receive(time.monotonic() + self._budget)
        except StoreError as error:
            self._fail(None, [], error)
            return public(error)
        return decode_one(call, reply) if type(reply) is list else None  # type: ignore[arg-type] # a Check, or not packed

    def _drive(self, conversation: Generator[list[Command], None, list[Any]]) -> list[Any]:
        try:
            commands = next(conversation)
            while True:
                self._exchange(commands)
                commands = conversation.send(None)
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers

    def _exchange(self, commands: list[Command]) -> None:
        """One round trip to every server concerned, all at the same time."""
        self._round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            command.reply = None
            by_node.setdefault(command.node, []).append(command)
        sent = []
        for node, its in by_node.items():
            try:
                line = self._line(node)
                line.send(b"".join([command.pack() for command in its]))
                sent.append((node, line, its))
            except StoreError as error:
                self._fail(node, its, error)
        deadline = time.monotonic() + self._budget
        for node, line, its in sent:
            try:
                if len(sent) > 1:  # all of them together have the budget of one
                    line.hurry(deadline)
                for command in its:
                    if command.asking:
                        line.receive(deadline)
                    command.reply = line.receive(deadline)
            except StoreError as error:
                self._fail(node, [command for command in its if command.reply is None], error)

    def _line(self, node: Node | None) -> _Line:
        line = self._lines.get(node)
        if line is not None and line.is_usable():
            return line
        if line is not None:
            line.close()
        self._stuck.check(node)
        timeout = max(self._budget, SHORTEST_CONNECT)
        try:
            line = _Line(self._place.connection(node, timeout=timeout, asynchronous=False), self._budget)
        except Unsent as error:
            self._stuck.note(node, error)
            raise
        self._lines[node] = line
        return line

    def _fail(self, node: Node | None, commands: list[Command], error: StoreError) -> None:
        """A line that failed once is not trusted again: what comes in on it late would answer the wrong question."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.close()
        for command in commands:
            command.reply = error


class _Turn:
    """A call that waits for its answer, or for its turn to carry the others'."""

    __slots__ = ("_gate", "answer", "answered", "call", "leads")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.answered = False
        self.answer: Any = None
        self.leads = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self) -> None:
        self._gate.acquire()

    def wake(self) -> None:
        self._gate.release()

    def finish(self, answer: Any, *, wake: bool) -> None:
        self.answer = answer
        self.answered = True
        if wake:
            self._gate.release()


class _Line:
    """A connection to one server: redis-py opens it, then bytes go and come without it."""

    def __init__(self, connection: Any, budget: float) -> None:
        try:
            connection.connect()
        except (redis.RedisError, OSError) as error:
            raise Unsent(f"cannot reach Redis: {error}") from error
        self._connection = connection  # kept: it closes the socket when it is collected
        self._socket = connection._sock  # noqa: SLF001 - redis-py has no public way to its socket
        self._budget = budget
        self._reader = Reader()
        self._used = time.monotonic()
        self._watch = selectors.DefaultSelector()
        self._watch.register(self._socket, selectors.EVENT_READ)
        self._socket.settimeout(budget)
        self._hurried = False
        self._can_write = not isinstance(self._socket, ssl.SSLSocket) and sys.platform != "win32"

    def is_usable(self) -> bool:
        """Whether nothing has come in unasked: a server that went away has sent its end of file."""
        return time.monotonic() - self._used < IDLE or not self._watch.select(0)

    def send(self, packed: bytes) -> None:
        if self._hurried:
            self._socket.settimeout(self._budget)
            self._hurried = False
        try:
            if self._can_write:
                # Without asking first whether the socket can take it, as Python would: it nearly always can.
                packed = packed[os.write(self._socket.fileno(), packed) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error
        if packed:
            self._send_patiently(packed)

    def _send_patiently(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except TimeoutError as error:
            raise StoreTimeout(f"Redis took nothing within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error

    def receive(self, deadline: float) -> Any:
        """The next reply; one that has arrived already counts, however late this thread comes to see it."""
        reader = self._reader
        late = False
        try:
            while (reply := reader.gets()) is False:
                if late:  # each piece came in time, but all of them together did not
                    raise TimeoutError
                data = self._socket.recv(65536)
                if not data:
                    raise Lost("Redis closed the connection while the answer was on its way")
                reader.feed(data)
                self._used = time.monotonic()
                late = self._used > deadline
        except TimeoutError as error:
            raise StoreTimeout(f"Redis did not answer within the budget of {self._budget * 1000:g} ms") from error
        except OSError as error:
            raise Lost(f"the connection to Redis broke: {error}") from error
        except HiredisError as error:
            raise Lost(f"what came from Redis is no answer: {error}") from error
        return reply

    def hurry(self, deadline: float) -> None:
        """Wait no longer than until then, in what is received next."""
        self._socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
        self._hurried = True

    def close(self) -> None:
        self._watch.close()
        self._connection.disconnect()
