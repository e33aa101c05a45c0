"""The Redis store for threads: one connection to each server, and round trips that threads share.

A thread that finds nobody talking to Redis takes all calls that wait, its own among them, and carries them there in
one round trip; the others wait for it. When it is back, the first that came meanwhile goes next. With one thread
nothing is added; with many, Redis sees few and full round trips, and the interpreter lock is fought over less.

Nobody waits for longer than the budget: connections are opened by threads of their own, and who finds a server's
breaker open does not wait at all.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from headgate._forks import renew_in_children
from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.conversation import OutOfTime, Unsent, converse, gives_back, public, refusal
from headgate.stores.redis.line import Line, Opening
from headgate.stores.redis.replies import decode_alone
from headgate.stores.redis.shared import SharedStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from headgate.stores.calls import Call
    from headgate.stores.redis.places import Place
    from headgate.stores.redis.wire import Command, Node, Wire

__all__ = ["RedisStore"]

LARGEST_BATCH: Final = 256
LEAST_PATIENCE: Final = 0.002
"""Seconds that those who waited in vain for another's round trip give to their own."""


class RedisStore(SharedStore):
    """Counts in Redis. Nothing is connected before the first call."""

    def __init__(self, place: Place, wire: Wire, *, budget: float) -> None:
        super().__init__(place, wire)
        self.budget = budget
        """Seconds that a call may take."""
        self._mutex = threading.RLock()
        self._waiting: list[_Turn] = []
        self._leader: int | None = None
        """The thread that talks to Redis. Who waits is woken once it is this one, or has its answer."""
        self._batch: list[_Turn] = []
        """The calls that it carries, its own among them."""
        self._failed = False
        """Whether the last round trip did."""
        self._lines: dict[Node | None, Line] = {}
        self._openings: dict[Node | None, Opening] = {}
        self._calls = self._round_trips = 0
        renew_in_children(self)

    @property
    def stats(self) -> dict[str, int]:
        """How many calls were carried in how many round trips."""
        return {"calls": self._calls, "round_trips": self._round_trips}

    def run(self, call: Call) -> Any:
        """Carry out a call, together with those of other threads that wait at this moment."""
        if self._only is not None and self._only.is_open:
            raise public(self._only.refusal())
        me, turn = get_ident(), None
        if self._is_asking(me):
            # It would wait for itself. Finalizers and signals' handlers come between any two steps.
            raise StoreUnavailable("this thread is asking Redis already, and cannot ask for whoever came between")
        try:
            with self._mutex:
                if self._leader is None:
                    self._leader = me
                else:
                    turn = _Turn(call)
                    self._waiting.append(turn)
            answer = self._lead_alone(call, me) if turn is None else self._follow(turn, me)
        except BaseException:  # an interrupt, which may come between any two steps: nobody must wait for this thread
            self._give_up(turn, me)
            raise
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def warm(self, *, wait: float = 0) -> None:
        """Begin to connect, and wait so many seconds for it: the first call needs it within its budget."""
        if self._only is not None and not self._openings and not self._lines:
            self._openings[None] = self._opening(None)
            if wait:
                with suppress(StoreError):
                    self._openings[None].wait(wait)

    def prepare(self, node: Node | None, *, wait: float) -> None:
        """Connect to a server that serves again before requests go there; called from another thread, which waits."""
        if node not in self._lines:
            opening = self._openings.get(node)
            if opening is None or opening.has_failed:
                # Requests find its breaker open still, and none of them looks here.
                opening = self._openings[node] = self._opening(node)
            with suppress(StoreError):
                opening.wait(wait)

    def abandon(self, node: Node | None) -> None:
        """Nobody needs the connection that was prepared."""
        opening = self._openings.pop(node, None)
        if opening is not None:
            opening.abandon()

    def allow(self, budget: float) -> None:
        """Give each call so many seconds from now on."""
        self.budget = budget
        for line in list(self._lines.values()):
            line.allow(budget)

    def close(self) -> None:
        with self._mutex:
            lines, openings = self._lines, self._openings
            self._lines, self._openings = {}, {}
        for line in lines.values():
            line.close()
        for opening in openings.values():
            opening.abandon()

    def renew_after_fork(self) -> None:
        """A child must not talk on its parent's connections, and nobody waits for them here."""
        self._mutex = threading.RLock()
        self._waiting, self._batch, self._leader = [], [], None
        self._lines, self._openings = {}, {}
        self.breakers.reset()

    def _is_asking(self, me: int) -> bool:
        """Whether this thread leads, or waits for a turn: it may be made the leader, and would not wake."""
        if self._leader == me or self._mutex._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - as Condition does
            return True
        # Others take turns out of there meanwhile, but none of them puts one of this thread's in.
        return bool(self._waiting) and me in [turn.thread for turn in [*self._waiting]]

    def _lead_alone(self, call: Call, me: int) -> Any:
        """The answer to a call that found nobody talking to Redis."""
        answer = self._ask_shortly(call)
        if answer is None:
            return self._lead(_Turn(call), me)
        self._calls += 1
        self._let_next_lead(me)
        return answer

    def _follow(self, turn: _Turn, me: int) -> Any:
        """The answer to a call that found somebody talking to Redis, who brings it, or lets this thread lead next."""
        turn.wait()
        return turn.answer if turn.answered else self._lead(turn, me)

    def _lead(self, mine: _Turn, me: int) -> Any:
        """Carry all that wait, then let the next one lead."""
        with self._mutex:
            if self._waiting and self._waiting[0] is mine:
                del self._waiting[0]
            batch = self._batch = [mine, *self._waiting[: LARGEST_BATCH - 1]]
            del self._waiting[: LARGEST_BATCH - 1]
        end = time.monotonic() + self.budget
        if self._failed:  # they have waited for that already
            end = max(min(turn.began for turn in batch) + self.budget, end - self.budget + LEAST_PATIENCE)
        answers = self._drive(converse([turn.call for turn in batch], self._wire, self._place.topology), end)
        self._calls += len(batch)
        for turn, answer in zip(batch, answers, strict=True):
            turn.finish(answer, wake=turn is not mine)
        self._let_next_lead(me)
        return mine.answer

    def _let_next_lead(self, me: int) -> None:
        with self._mutex:
            if self._leader == me:
                self._batch = []
                following = self._waiting[0] if self._waiting else None
                self._leader = None if following is None else following.thread
                if following is not None:
                    following.gate.release()

    def _give_up(self, turn: _Turn | None, me: int) -> None:
        """Leave without an answer: whoever waits for this thread must not do so for ever."""
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
        if self._leader == me:
            self.close()  # the answer that is on its way must not be taken for another
            for other in self._batch:
                if not other.answered:
                    other.finish(_Interrupted("the call was interrupted"), wake=True)
            self._let_next_lead(me)

    def _ask_shortly(self, call: Call) -> Any:
        """The answer to a check that goes alone; None if it has to go the long way.

        An error of the server's means that nothing was done, and the long way knows what to do about each.
        """
        line, only = self._lines.get(None), self._only
        if line is None or only is None or (packed := self._wire.pack_alone(call)) is None or not line.is_usable():
            return None
        self._round_trips += 1
        try:
            line.send(packed)
            reply = line.receive(time.monotonic() + self.budget)
        except StoreError as error:
            self._fail(None, [], error)
            return public(error)
        if type(reply) is not list:
            return None
        only.succeed()
        self._failed = False
        return decode_alone(call, reply)  # type: ignore[arg-type] # a Check, or not packed

    def _drive(self, conversation: Generator[list[Command], None, list[Any]], end: float) -> list[Any]:
        try:
            commands = next(conversation)
            while True:
                self._exchange(commands, end)
                if not self._failed:  # it serves: what it has asked for is given its own time
                    end = time.monotonic() + self.budget
                commands = conversation.send(None)
                if gives_back(commands):  # on servers that serve: the time of those that do not is not theirs
                    self._failed, end = False, time.monotonic() + self.budget
        except StopIteration as end_of_it:
            answers: list[Any] = end_of_it.value
            return answers

    def _exchange(self, commands: list[Command], end: float) -> None:
        """One round trip to every server concerned, all at the same time, and over by then."""
        self._round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            command.reply = None
            by_node.setdefault(command.node, []).append(command)
        sent, hasty = [], self._failed
        self._failed = False
        for node, its in by_node.items():
            try:
                if hasty and time.monotonic() >= end:
                    raise OutOfTime("cannot reach Redis: the budget was used up before it was its turn")
                line = self._line(node, end)
                line.send(b"".join([command.pack() for command in its]))
                sent.append((node, line, its))
            except StoreError as error:
                self._fail(node, its, error)
        now = time.monotonic()
        # Whoever could not be reached has used the time of the others, too.
        deadline = end if hasty else max(end, now + LEAST_PATIENCE) if self._failed else now + self.budget
        hasty = self._failed or hasty
        for node, line, its in sent:
            try:
                if hasty or len(sent) > 1:  # all of them together have the budget of one
                    line.hurry(deadline)
                for command in its:
                    if command.asking:
                        line.receive(deadline)
                    command.reply = line.receive(deadline)
            except StoreError as error:
                self._fail(node, [command for command in its if command.reply is None], error)
            else:
                self._note(node, its)

    def _line(self, node: Node | None, end: float) -> Line:
        line = self._lines.get(node)
        if line is not None and line.is_usable():
            return line
        if line is not None:
            line.close()
        breaker = self.breakers[node]
        if breaker.is_open:
            raise breaker.refusal()
        line = self._opened_line(node, end)
        if not line.is_usable():  # it was closed again before anybody needed it
            line.close()
            line = self._opened_line(node, end)
        self._lines[node] = line
        return line

    def _opened_line(self, node: Node | None, end: float) -> Line:
        opening = self._openings.get(node)
        if opening is None or opening.is_old_news:
            opening = self._openings[node] = self._opening(node)
        try:
            connection = opening.wait(end - time.monotonic())
        except Unsent:
            # One that comes a moment later is for the next who needs it.
            if opening.has_failed and self._openings.get(node) is opening:
                self._openings.pop(node, None)
            raise
        if self._openings.get(node) is opening:
            self._openings.pop(node, None)
        return Line(connection, self.budget, watched=True)

    def _opening(self, node: Node | None) -> Opening:
        return Opening(lambda: self._place.connection(node, asynchronous=False))

    def _note(self, node: Node | None, commands: list[Command]) -> None:
        """Tell the breaker how the server is."""
        for command in commands:
            refused = refusal(command.reply)
            if refused is not None:
                self.breakers.fail(node, refused)
                return
        self.breakers.succeed(node)

    def _fail(self, node: Node | None, commands: list[Command], error: StoreError) -> None:
        """A line that failed once is not trusted again: what comes in on it late would answer the wrong question."""
        self._failed = True
        if isinstance(error, OutOfTime):  # nothing was found out about this one
            for command in commands:
                command.reply = error
            return
        self.breakers.fail(node, error)
        line = self._lines.pop(node, None)
        if line is not None:
            line.close()
        for command in commands:
            command.reply = error


class _Interrupted(StoreError):
    """Whoever carried the call was interrupted on the way: nobody knows how far it came."""

    may_have_happened = True


class _Turn:
    """A call that waits for its answer, or for its turn to carry the others'."""

    __slots__ = ("answer", "answered", "began", "call", "gate", "thread")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.thread = get_ident()
        self.began = time.monotonic()
        self.answered = False
        self.answer: Any = None
        self.gate = threading.Lock()
        """Released to wake the thread that waits."""
        self.gate.acquire()

    def wait(self) -> None:
        self.gate.acquire()

    def finish(self, answer: Any, *, wake: bool) -> None:
        # No interrupt comes between these: Python looks for them after calls only.
        self.answer = answer
        self.answered = True
        if wake:
            self.gate.release()
