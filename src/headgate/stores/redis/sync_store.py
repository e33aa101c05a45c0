"""The Redis store for threads: calls that wait at the same time share a round trip.

A thread that finds no other talking to the servers that its call needs becomes the leader: it takes all calls waiting
for the same servers, its own among them, and carries them out in one exchange; the other threads wait for it. Then the
first call that has arrived meanwhile leads. With one thread nothing is added; with many, Redis sees few and full round
trips, and the interpreter lock is contended less.

No call takes longer than its budget, and none relies on the leader to return: signal handlers may raise between any
two of its steps, and again while it cleans up, and daemon threads stop for ever when the interpreter exits. So there is
no lock that a thread could leave locked. Every change to shared state is a single step, which neither an exception nor
another thread can divide, and waiting threads check from time to time that their leader is still there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate._interrupts import wake
from headgate.errors import StoreError, StoreTimeout, StoreUnavailable
from headgate.stores.redis.base import RedisStoreBase
from headgate.stores.redis.batch_protocol import public
from headgate.stores.redis.connection_pool import ConnectionPool, ConnectionUser
from headgate.stores.redis.exchange import MAX_BATCH, Lanes, LoneCheck

if TYPE_CHECKING:
    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node

__all__ = ["RedisStore"]

FIRST_LEADER_CHECK_S: Final = 0.001
LEADER_CHECK_INTERVAL_S: Final = 0.05
"""Time after which waiting threads look at their leader: it doubles from the first to the second."""
OVERDUE_S: Final = 0.25
"""Time after its deadline at which a leader is considered lost; it may have waited for the interpreter before."""
LEADER: Final = 0
"""The only key of `ThreadLane.leader`."""


class RedisStore(RedisStoreBase):
    """Counters in Redis, for threads. Connects on the first call."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        super().__init__(factory, encoder, budget=budget)
        self._start(is_forked=False)
        reinit_after_fork(self)

    def _start(self, *, is_forked: bool) -> None:
        self.lanes = Lanes(ThreadLane, self.encoder, self.factory.topology)
        self._pool = ConnectionPool(
            self.factory, self.budget, breakers=self.breakers, on_failure=self.report_failure, is_forked=is_forked
        )

    @property
    def stats(self) -> dict[str, int]:
        return {**super().stats, "unexpected_replies": self.unexpected_replies + self._pool.unexpected_replies}

    def run(self, call: Call) -> Any:
        """Carry out a call, together with those of other threads that are waiting."""
        lane = self.lanes.default
        if self.only_breaker is None:
            lane = self.lanes.find(call)
        elif self.only_breaker.is_open:
            raise public(self.only_breaker.refusal())
        waiter = Waiter(call, self.budget)
        try:
            leader = lane.leader.setdefault(LEADER, waiter)
            answer = self._lead_first(lane, waiter) if leader is waiter else self._follow(lane, waiter, leader)
        except BaseException:  # an interrupt, which may come between any two steps
            # First of all, as this may be interrupted as well: the waiting threads look at it.
            waiter.is_gone = True
            self._leave(lane, waiter)
            raise
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def warm(self, *, wait: float = 0) -> None:
        """Start to connect, and wait that many seconds for it: the first call needs a connection within its budget."""
        nodes, end = self.nodes(), time.monotonic() + wait
        for node in nodes:
            self._pool.preconnect(node, wait_s=0)
        for node in nodes if wait else ():
            self._pool.preconnect(node, wait_s=max(end - time.monotonic(), 0.0))

    def preconnect(self, node: Node | None, *, wait: float) -> None:
        """Connect to a recovered server before requests are sent there; called from another thread, which waits."""
        self._pool.preconnect(node, wait_s=wait)

    def drop_preconnected(self, node: Node | None) -> None:
        self._pool.drop_preconnected(node)

    def set_budget(self, budget: float) -> None:
        self.budget = self._pool.budget_s = budget

    def close(self) -> None:
        self._pool.close()
        for lane in self.lanes.all():
            leader = lane.leader.get(LEADER)
            if leader is not None:
                leader.close_connections()

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._start(is_forked=True)

    def _lead_first(self, lane: ThreadLane, waiter: Waiter) -> Any:
        answer = self._run_lone(lane, waiter)
        if answer is None:
            return self._lead(lane, waiter, lane.take(waiter) or NO_BATCH)
        self._pass_lead(lane, waiter)
        return answer

    def _follow(self, lane: ThreadLane, waiter: Waiter, leader: Waiter) -> Any:
        """The answer to a call that found a leader, which carries it out, or lets this thread lead next."""
        if waiter.thread in [other.thread for other in (leader, *lane.next.waiters) if not other.is_gone]:
            # A finalizer or signal handler has interrupted this thread, which would wait for itself.
            return StoreUnavailable("this thread is waiting for Redis already, and cannot wait for a nested call")
        lane.join(waiter)
        timeout_s = FIRST_LEADER_CHECK_S
        while not waiter.is_answered:
            taker = waiter.batch.taker
            if taker is None:
                if self._try_lead(lane, waiter):
                    batch = lane.take(waiter)
                    if batch is not None:
                        return self._lead(lane, waiter, batch)
                    self._pass_lead(lane, waiter)
            elif taker.is_gone:
                if taker.has_sent:
                    return _Interrupted("the thread that carried the call was interrupted")
                lane.join(waiter)
                continue
            elif time.monotonic() > taker.deadline + OVERDUE_S:
                waiter.is_gone = True
                error = StoreTimeout("the thread that carried the call did not come back within the budget")
                error.may_have_happened = True
                return error
            if not waiter.wait(timeout_s):
                timeout_s = min(2 * timeout_s, LEADER_CHECK_INTERVAL_S)
        return waiter.answer

    def _try_lead(self, lane: ThreadLane, waiter: Waiter) -> bool:
        """True if this thread is the leader, or replaces one that will not return."""
        leader = lane.leader.setdefault(LEADER, waiter)
        if leader is waiter:
            return True
        if leader.is_gone or time.monotonic() > leader.deadline + OVERDUE_S:
            # Two waiting threads may both get here. Each carries other calls, on connections of its own.
            lane.leader[LEADER] = waiter
            return True
        return False

    def _lead(self, lane: ThreadLane, mine: Waiter, batch: Batch) -> Any:
        """Carry out all waiting calls, then let the next thread lead."""
        waiters = [mine, *[waiter for waiter in batch.waiters if waiter is not mine and not waiter.is_gone]]
        for start in range(0, len(waiters), MAX_BATCH):
            part, now = waiters[start : start + MAX_BATCH], time.monotonic()
            arrived = min([waiter.arrived for waiter in part])
            calls = [waiter.call for waiter in part]
            exchange = self.start_exchange(calls, arrived, now, after_failure=lane.has_failed)
            mine.deadline = exchange.end
            answers = self._pool.run(exchange, mine)
            self.round_trips += exchange.round_trips
            lane.has_failed = exchange.has_failed
            for waiter, answer in zip(part, answers, strict=True):
                waiter.finish(answer, needs_wake=waiter is not mine)
        self._pass_lead(lane, mine)
        return mine.answer

    def _pass_lead(self, lane: ThreadLane, waiter: Waiter) -> None:
        if lane.leader.get(LEADER) is not waiter:  # it was overdue, and has been replaced
            return
        following = lane.first_waiting()
        if following is None:
            lane.leader.pop(LEADER, None)
            # A call that has arrived since then may believe that this thread still leads.
            following = lane.first_waiting()
        else:
            lane.leader[LEADER] = following
        if following is not None:
            wake(following.lock)

    def _leave(self, lane: ThreadLane, waiter: Waiter) -> None:
        """Leave without an answer. If this is interrupted as well, the waiting threads find out by themselves."""
        waiter.close_connections()
        if waiter.batch.taker is waiter:
            for other in waiter.batch.waiters.copy():
                wake(other.lock)
        self._pass_lead(lane, waiter)

    def _run_lone(self, lane: ThreadLane, waiter: Waiter) -> Any:
        """The answer to a check that travels alone; None if it has to be sent as a batch."""
        if self.only_breaker is None or lane.next.waiters or (packed := self.encoder.pack_alone(waiter.call)) is None:
            return None
        connection = self._pool.take_idle(None)
        if connection is None:
            return None
        waiter.connections = [connection]
        waiter.has_sent = True
        self.round_trips += 1
        check = LoneCheck(waiter.call, packed)
        try:
            connection.send(packed)
            waiter.deadline = deadline = time.monotonic() + self.budget
            connection.read(check, deadline)
        except StoreError as error:
            connection.close()
            lane.has_failed = True
            self.calls += 1
            self.report_failure(None, error)
            return public(error)
        waiter.connections = ()
        self._pool.release(None, connection)
        if check.answer is not None:
            self.only_breaker.succeed()
            lane.has_failed = False
            self.calls += 1
        return check.answer


class _Interrupted(StoreError):
    """The thread that carried the call was interrupted; the call may have been carried out."""

    may_have_happened = True


class Waiter(ConnectionUser):
    """A call that waits for its answer, or for its thread to lead."""

    is_gone = False
    """True if the thread has left without an answer."""
    is_answered = False
    answer: Any = None
    batch: Batch
    lock: threading.Lock
    """Released to wake the waiting thread."""

    def __init__(self, call: Call, budget: float) -> None:
        self.call = call
        self.thread = get_ident()
        self.arrived = now = time.monotonic()
        self.deadline = now + budget
        """When the exchange that this thread leads must be over."""

    def wait(self, timeout_s: float) -> bool:
        return self.lock.acquire(timeout=timeout_s)

    def finish(self, answer: Any, *, needs_wake: bool) -> None:
        # No interrupt comes between these two: Python checks for them after calls only.
        self.answer = answer
        self.is_answered = True
        if needs_wake:
            wake(self.lock)


@dataclass(slots=True, eq=False)
class Batch:
    """Calls that wait for the same leader."""

    waiters: list[Waiter] = field(default_factory=list)
    taker: Waiter | None = None
    """The leader that carries them out; calls that arrive later join the next batch."""


@dataclass(slots=True, eq=False)
class ThreadLane:
    """A queue of calls to the same servers, without locks.

    The interpreter switches threads and runs signal handlers only after a call and at the start of a loop: statements
    below without a call between them are one step.
    """

    leader: dict[int, Waiter] = field(default_factory=dict)
    """The waiter of the leading thread, if any: `setdefault` finds or sets it in one step."""
    next: Batch = field(default_factory=Batch)
    has_failed: bool = False

    def join(self, waiter: Waiter) -> None:
        lock = threading.Lock()
        lock.acquire()
        waiter.lock = lock
        waiter.batch = self.next
        waiter.batch.waiters.append(waiter)

    def take(self, leader: Waiter) -> Batch | None:
        """All waiting calls, for the leader alone; None if another thread has taken its own call along."""
        following = Batch()
        if leader.batch.taker is not None:
            return None
        batch = leader.batch = self.next
        batch.taker = leader
        self.next = following
        return batch

    def first_waiting(self) -> Waiter | None:
        for waiter in self.next.waiters.copy():
            if not waiter.is_gone:
                return waiter
        return None


NO_BATCH: Final = Batch()
Waiter.batch, Waiter.lock = NO_BATCH, threading.Lock()  # defaults of calls that do not wait
