"""The Redis store for threads: round trips that threads share, on connections that each round trip has to itself.

A thread that finds no other talking to the servers that its call needs is the leader: it takes all calls that wait for
the same servers, its own among them, and carries them there in one round trip; the others wait for it. When it is back,
the first that came meanwhile leads next. With one thread nothing is added; with many, Redis sees few and full round
trips, and the interpreter lock is fought over less.

No call takes longer than the budget: connections are opened by threads of their own, a call that finds a server's
breaker open does not wait at all, and nobody relies on a leader to come back. Signal handlers may raise between any two
steps of a leader, and again while it cleans up; daemon threads stop for ever when the interpreter ends. So there is no
lock that a thread could take along. All changes to what threads share are single steps, which neither an exception nor
another thread can divide, and whoever waits looks now and then whether its leader is still there.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from headgate._fork import reinit_after_fork
from headgate._interrupts import wake
from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.redis.base import FIRST_CONNECTION_S, RedisStoreBase
from headgate.stores.redis.batch_protocol import (
    LEAST_TIME_S,
    BudgetExhausted,
    NotSent,
    deadline,
    deadline_of_round,
    public,
    refusal,
    run_batch,
    servers_of,
)
from headgate.stores.redis.decoding import decode_alone, unexpected
from headgate.stores.redis.sync_connection import PendingConnection, SyncConnection

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import Command, CommandEncoder, Node

__all__ = ["RedisStore"]

LARGEST_BATCH: Final = 256
MAX_IDLE: Final = 4
"""Connections to one server that are kept while nobody uses them."""
MAX_LANES: Final = 1_000
"""Sets of servers whose lanes are kept, where there are many servers."""
FIRST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 0.05
"""Seconds between two looks at the leader by those who wait for it; they double from the one to the other."""
OVERDUE_S: Final = 0.25
"""Seconds after its deadline at which a leader counts as gone: it may have waited for the interpreter before that."""
LEADER: Final = 0
"""The only key of a lane's `leader`."""


class RedisStore(RedisStoreBase):
    """Counts in Redis. Nothing is connected before the first call."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        super().__init__(factory, encoder)
        self.budget = budget
        """Seconds that a call may take."""
        self._begin()
        reinit_after_fork(self)

    def _begin(self) -> None:
        self._lane = _Lane()
        """For all calls, unless there are several servers that have keys."""
        self._lanes: dict[Hashable, _Lane] = {None: self._lane}
        self._idle: dict[Node | None, list[SyncConnection]] = {}
        """Connections that nobody uses. One that is used is its leader's alone, so that it cannot be returned by
        anybody else, and never is if the leader is interrupted."""
        self._openings: dict[Node | None, PendingConnection] = {}
        self._calls = self._round_trips = 0
        self._patient_until: float | None = None
        """Until when calls may exceed the budget to connect; None if that begins with the next connection. It ends with
        the first one, except in a forked process, which starts together with many others."""
        self._is_forked = False

    @property
    def stats(self) -> dict[str, int]:
        """The number of calls, of the round trips that carried them, and of connections that were out of step."""
        return {"calls": self._calls, "round_trips": self._round_trips, "unexpected_replies": self.unexpected_replies}

    def run(self, call: Call) -> Any:
        """Carry out a call, together with those of other threads that wait at this moment."""
        lane = self._lane
        if self._only is None:
            lane = self._lane_of(call)
        elif self._only.is_open:
            raise public(self._only.refusal())
        turn = _Waiter(call, self.budget)
        try:
            leading = lane.leader.setdefault(LEADER, turn)
            answer = self._lead_alone(lane, turn) if leading is turn else self._follow(lane, turn, leading)
        except BaseException:  # an interrupt, which may come between any two steps
            # Before anything that could be interrupted itself: those who wait for this thread look at it.
            turn.is_over = True
            self._leave(lane, turn)
            raise
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def warm(self, *, wait: float = 0) -> None:
        """Begin to connect, and wait so many seconds for it: the first call needs it within its budget."""
        if self._only is not None and not self._openings and not self._idle:
            self._openings[None] = self._opening(None)
            if wait:
                with suppress(StoreError):
                    self._openings[None].wait(wait)

    def preconnect(self, node: Node | None, *, wait: float) -> None:
        """Connect to a server that serves again before requests go there; called from another thread, which waits."""
        if not self._idle.get(node):
            opening = self._openings.get(node)
            if opening is None or opening.has_failed or opening.is_claimed:
                # Requests find its breaker open still, and none of them looks here.
                opening = self._openings[node] = self._opening(node)
            with suppress(StoreError):
                opening.wait(wait)

    def drop_preconnected(self, node: Node | None) -> None:
        """Nobody needs the connection that was prepared."""
        opening = self._openings.pop(node, None)
        if opening is not None:
            opening.abandon()

    def set_budget(self, budget: float) -> None:
        """Give each call so many seconds from now on."""
        self.budget = budget

    def close(self) -> None:
        idle, openings = self._idle, self._openings
        self._idle, self._openings = {}, {}
        lines = [line for its in idle.values() for line in its]
        for lane in list(self._lanes.values()):
            leading = lane.leader.get(LEADER)
            lines += leading.lines if leading is not None else ()
        for line in lines:
            line.close()
        for opening in openings.values():
            opening.abandon()

    def reset_after_fork(self) -> None:
        """A child must not talk on its parent's connections, and no thread waits in it."""
        self._begin()
        self._is_forked = True
        self.breakers.reset()

    def _lane_of(self, call: Call) -> _Lane:
        """Where calls wait that need the same servers."""
        servers = servers_of(call, self.encoder, self.factory.topology)
        lane = self._lanes.get(servers)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:  # those who wait in one of them still know it
                self._lanes = {None: self._lane}
            lane = self._lanes.setdefault(servers, _Lane())
        return lane

    def _lead_alone(self, lane: _Lane, turn: _Waiter) -> Any:
        """The answer to a call that found no other thread talking to Redis."""
        answer = self._ask_shortly(lane, turn)
        if answer is None:
            return self._lead(lane, turn, lane.take(turn) or NO_BATCH)
        self._calls += 1
        self._let_next_lead(lane, turn)
        return answer

    def _follow(self, lane: _Lane, turn: _Waiter, leading: _Waiter) -> Any:
        """The answer to a call that found another thread talking to Redis, which brings it, or lets this one lead."""
        if turn.thread in [other.thread for other in (leading, *lane.next.turns) if not other.is_over]:
            # It would wait for itself. Finalizers and signals' handlers come between any two steps.
            return StoreUnavailable("this thread is asking Redis already, and cannot ask for whoever came between")
        lane.join(turn)
        pause = FIRST_LOOK_S
        while not turn.is_answered:
            taker = turn.batch.taker
            if taker is None:
                if self._may_lead(lane, turn):
                    batch = lane.take(turn)
                    if batch is not None:
                        return self._lead(lane, turn, batch)
                    self._let_next_lead(lane, turn)
            elif taker.is_over:
                if taker.has_sent:
                    return _Interrupted("the thread that carried the call was interrupted")
                lane.join(turn)
                continue
            elif time.monotonic() > taker.deadline + OVERDUE_S:
                turn.is_over = True
                error = StoreTimeout("the thread that carried the call did not come back within the budget")
                error.may_have_happened = True
                return error
            if not turn.wait(pause):
                pause = min(2 * pause, LONGEST_LOOK_S)
        return turn.answer

    def _may_lead(self, lane: _Lane, turn: _Waiter) -> bool:
        """True if the turn is the leader, or has become so because there is none that will come back."""
        leading = lane.leader.setdefault(LEADER, turn)
        if leading is turn:
            return True
        if leading.is_over or time.monotonic() > leading.deadline + OVERDUE_S:
            # Two of those who wait may both come here. Each would carry other calls, on a connection of its own.
            lane.leader[LEADER] = turn
            return True
        return False

    def _lead(self, lane: _Lane, mine: _Waiter, batch: _Batch) -> Any:
        """Carry all that wait, then let the next one lead."""
        turns = [mine, *[turn for turn in batch.turns if turn is not mine and not turn.is_over]]
        for start in range(0, len(turns), LARGEST_BATCH):
            part, now = turns[start : start + LARGEST_BATCH], time.monotonic()
            oldest = min([turn.began for turn in part])
            mine.deadline = end = deadline(oldest, now, self.budget, after_failure=lane.has_failed)
            conversation = run_batch([turn.call for turn in part], self.encoder, self.factory.topology)
            answers = self._drive(lane, mine, conversation, end)
            self._calls += len(part)
            for turn, answer in zip(part, answers, strict=True):
                turn.finish(answer, wake_it=turn is not mine)
        self._let_next_lead(lane, mine)
        return mine.answer

    def _let_next_lead(self, lane: _Lane, turn: _Waiter) -> None:
        if lane.leader.get(LEADER) is not turn:  # it took too long, and another has begun
            return
        following = lane.first_waiting()
        if following is None:
            lane.leader.pop(LEADER, None)
            # One that has come since may believe that this one leads.
            following = lane.first_waiting()
        else:
            lane.leader[LEADER] = following
        if following is not None:
            wake(following.gate)

    def _leave(self, lane: _Lane, turn: _Waiter) -> None:
        """Leave without an answer. If this is interrupted, too, those who wait find out by themselves."""
        for line in turn.lines:  # the answer that is on its way must not be taken for another
            line.close()
        if turn.batch.taker is turn:
            for other in turn.batch.turns.copy():
                wake(other.gate)
        self._let_next_lead(lane, turn)

    def _ask_shortly(self, lane: _Lane, turn: _Waiter) -> Any:
        """The answer to a check that goes alone; None if it has to go the long way.

        An error of the server's means that nothing was done, and the long way knows what to do about each.
        """
        only, idle = self._only, self._idle.get(None)
        if not idle or only is None or lane.next.turns or (packed := self.encoder.pack_alone(turn.call)) is None:
            return None
        try:
            line = idle.pop()
        except IndexError:
            return None
        if not line.is_usable():
            self._discard(line)
            return None
        turn.lines = [line]
        turn.has_sent = True
        self._round_trips += 1
        try:
            line.set_budget(self.budget)
            line.send(packed)
            turn.deadline = end = time.monotonic() + self.budget
            reply = line.receive(end)
            answer = decode_alone(turn.call, reply) if type(reply) is list else None  # type: ignore[arg-type] # a Check
            if answer is None and not isinstance(reply, ReplyError):
                raise unexpected(reply)
            line.check_in_step()
        except StoreError as error:
            line.close()
            lane.has_failed = True
            self.note_failure(None, error)
            return public(error)
        turn.lines = []
        idle.append(line)
        if answer is None:
            return None
        only.succeed()
        lane.has_failed = False
        return answer

    def _drive(
        self, lane: _Lane, turn: _Waiter, conversation: Generator[list[Command], None, list[Any]], end: float
    ) -> list[Any]:
        try:
            commands, has_failed = next(conversation), lane.has_failed
            while True:
                now = time.monotonic()
                until = deadline_of_round(commands, now, end, self.budget, after_failure=has_failed)
                has_failed = lane.has_failed = self._exchange(turn, commands, until)
                commands = conversation.send(None)
        except StopIteration as end_of_it:
            answers: list[Any] = end_of_it.value
            return answers

    def _exchange(self, turn: _Waiter, commands: list[Command], end: float) -> bool:
        """One round trip to every server concerned, all at the same time, and over by then; whether one failed."""
        self._round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            command.reply = None
            by_node.setdefault(command.node, []).append(command)
        sent: list[tuple[Node | None, SyncConnection, list[Command]]] = []
        has_failed, connects_first = False, self._patient_until != 0.0
        for node, its in by_node.items():
            try:
                line = self._line(node, end)
            except StoreError as error:
                has_failed = True
                self._fail(node, its, error)
                continue
            turn.lines = [*turn.lines, line]
            turn.has_sent = True
            try:
                line.send(b"".join([command.pack() for command in its]))
                sent.append((node, line, its))
            except StoreError as error:
                has_failed = True
                self._drop(turn, line)
                self._fail(node, its, error)
        # A server that could not be reached has used the time of the others, too; the first connection needs longer.
        least = self.budget if connects_first else min(LEAST_TIME_S, self.budget)
        end = max(end, self._patient_until or 0.0, time.monotonic() + least)
        for node, line, its in sent:
            try:
                line.hurry(end)
                line.answer(its, end)
            except StoreError as error:
                has_failed = True
                self._drop(turn, line)
                self._fail(node, [command for command in its if command.reply is None], error)
            else:
                self._keep(turn, node, line)
                self._note(node, its)
        return has_failed

    def _line(self, node: Node | None, end: float) -> SyncConnection:
        """A connection for the caller alone."""
        idle = self._idle.get(node)
        while idle:
            try:
                line = idle.pop()
            except IndexError:  # another thread was quicker
                break
            if line.is_usable():
                line.set_budget(self.budget)
                return line
            self._discard(line)
        breaker = self.breakers[node]
        if breaker.is_open:
            raise breaker.refusal()
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + FIRST_CONNECTION_S
        end = max(end, self._patient_until)
        if now >= end:
            raise BudgetExhausted("cannot reach Redis: the budget was used up before it was its turn")
        while True:
            line = SyncConnection(self._connect(node, end), self.budget, watched=True)
            if line.is_usable():
                if not self._is_forked:
                    self._patient_until = 0.0
                return line
            line.close()  # it was closed again before anybody needed it

    def _connect(self, node: Node | None, end: float) -> Any:
        """A connection that no other thread has."""
        while True:
            opening = self._openings.get(node)
            if opening is None or opening.is_old_news or opening.is_claimed:
                opening = self._openings[node] = self._opening(node)
            try:
                connection = opening.wait(end - time.monotonic())
            except NotSent:
                # One that comes a moment later is for the next who needs it.
                if opening.has_failed and self._openings.get(node) is opening:
                    self._openings.pop(node, None)
                raise
            if opening.claim():
                if self._openings.get(node) is opening:
                    self._openings.pop(node, None)
                return connection

    def _opening(self, node: Node | None) -> PendingConnection:
        return PendingConnection(lambda: self.factory.connection(node, asynchronous=False))

    def _keep(self, turn: _Waiter, node: Node | None, line: SyncConnection) -> None:
        """Let others use a connection. It has one user at any moment, or is dropped."""
        turn.lines = [one for one in turn.lines if one is not line]
        idle = self._idle.setdefault(node, [])
        if len(idle) < MAX_IDLE:
            idle.append(line)
        else:
            line.close()

    def _drop(self, turn: _Waiter, line: SyncConnection) -> None:
        """A line that failed once is not trusted again: what comes in on it late would answer the wrong question."""
        turn.lines = [one for one in turn.lines if one is not line]
        line.close()

    def _discard(self, line: SyncConnection) -> None:
        """Close a connection on which something has come in that nobody asked for, or that the server has closed."""
        self.unexpected_replies += line.has_stray_bytes()
        line.close()

    def _note(self, node: Node | None, commands: list[Command]) -> None:
        """Tell the breaker how the server is."""
        for command in commands:
            refused = refusal(command.reply)
            if refused is not None:
                self.breakers.fail(node, refused)
                return
        self.breakers.succeed(node)

    def _fail(self, node: Node | None, commands: list[Command], error: StoreError) -> None:
        if not isinstance(error, BudgetExhausted):  # else nothing was found out about this one
            self.note_failure(node, error)
        for command in commands:
            command.reply = error


class _Interrupted(StoreError):
    """Whoever carried the call was interrupted on the way: nobody knows how far it came."""

    may_have_happened = True


class _Waiter:
    """A call that waits for its answer, or for its turn to carry the others'."""

    is_over = False
    """True if the thread has left without an answer. It is the last thing that is known of it."""
    is_answered = False
    answer: Any = None
    has_sent = False
    """True if anything may have been sent to a server."""
    lines: Sequence[SyncConnection] = ()
    """The connections that it uses."""
    batch: _Batch
    gate: threading.Lock
    """Released to wake the thread that waits."""

    def __init__(self, call: Call, budget: float) -> None:
        self.call = call
        self.thread = get_ident()
        self.began = now = time.monotonic()
        self.deadline = now + budget
        """When the round trip that it leads must be over."""

    def wait(self, seconds: float) -> bool:
        """Wait so many seconds to be woken; whether that has happened."""
        return self.gate.acquire(timeout=seconds)

    def finish(self, answer: Any, *, wake_it: bool) -> None:
        # No interrupt comes between these: Python looks for them after calls only.
        self.answer = answer
        self.is_answered = True
        if wake_it:
            wake(self.gate)


class _Batch:
    """Calls that wait for the same leader."""

    __slots__ = ("taker", "turns")

    def __init__(self) -> None:
        self.turns: list[_Waiter] = []
        self.taker: _Waiter | None = None
        """The leader that carries them. Who is not among them by then joins the next batch."""


class _Lane:
    """Where calls to the same servers wait for each other.

    Nothing in here is locked. The interpreter runs other threads, and signal handlers, only after a call and where a
    loop begins again: what is written below without a call in between is one step.
    """

    __slots__ = ("has_failed", "leader", "next")

    def __init__(self) -> None:
        self.leader: dict[int, _Waiter] = {}
        """The turn of the thread that talks to Redis, if there is one: `setdefault` finds or sets it in one step."""
        self.next = _Batch()
        """Those who wait for it."""
        self.has_failed = False
        """True if the last round trip did."""

    def join(self, turn: _Waiter) -> None:
        """Wait with the others."""
        gate = threading.Lock()
        gate.acquire()
        turn.gate = gate
        turn.batch = self.next
        turn.batch.turns.append(turn)

    def take(self, leader: _Waiter) -> _Batch | None:
        """All who wait, for the leader alone; None if it is among those whom another has taken."""
        following = _Batch()
        if leader.batch.taker is not None:
            return None
        batch = leader.batch = self.next
        batch.taker = leader
        self.next = following
        return batch

    def first_waiting(self) -> _Waiter | None:
        for turn in self.next.turns.copy():
            if not turn.is_over:
                return turn
        return None


NO_BATCH: Final = _Batch()
_Waiter.batch, _Waiter.gate = NO_BATCH, threading.Lock()  # of those who do not wait
