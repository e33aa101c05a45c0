"""The exchange of one batch of calls with the servers, from the first byte to the last answer. Sans-io.

`batch_protocol` decides which commands to send next; an `Exchange` makes of them one request per server and round
trip, with a deadline, and reports the health of the servers. Drivers only connect, send and receive:
`connection_pool` with blocking sockets, `async_store` in an event loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from hiredis import ReplyError

from headgate.stores.operations import Call, Check, Reset
from headgate.stores.redis.batch_protocol import is_undo, refusal
from headgate.stores.redis.decoding import UnexpectedReply, accept, decode_alone, unexpected

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headgate.errors import StoreError
    from headgate.stores.redis.breaker import CircuitBreakers
    from headgate.stores.redis.encoding import Command, CommandEncoder, Node
    from headgate.stores.redis.topology import Topology

__all__ = [
    "FIRST_CONNECTION_S",
    "MAX_BATCH",
    "MIN_BUDGET_SHARE",
    "MIN_REPLY_S",
    "Exchange",
    "Lanes",
    "LoneCheck",
    "ServerRequest",
]

MAX_BATCH: Final = 256
"""Calls sent together."""
MAX_LANES: Final = 1_000
"""Sets of servers with a lane of their own."""
FIRST_CONNECTION_S: Final = 0.5
"""Time beyond the budget that the first calls of a process may wait for a connection."""
MIN_REPLY_S: Final = 0.002
"""Time that a server has to reply even if the budget was spent on others before."""
MIN_BUDGET_SHARE: Final = 0.5
"""Share of the budget left to calls that waited for a batch which succeeded: that time may have passed in this process
and says nothing about the servers."""
UNDO_S: Final = 0.02
UNDO_BUDGET_SHARE: Final = 0.25
"""Time for a refund after a denial by another shard: the longer of the two, and at most the budget."""

LaneT = TypeVar("LaneT")


class ServerRequest:
    """The commands of one round trip for one server: bytes to send, and replies to take."""

    __slots__ = ("_commands", "_exchange", "_missing", "deadline", "node")

    def __init__(self, exchange: Exchange, node: Node | None, commands: list[Command]) -> None:
        self.node = node
        self.deadline = exchange.deadline
        self._exchange = exchange
        self._commands = commands
        # Redis replies to ASKING by itself, before the command that it precedes.
        self._missing = [
            step for command in reversed(commands) for step in ((command, None) if command.asking else (command,))
        ]

    def pack(self) -> bytes:
        return b"".join([command.pack() for command in self._commands])

    def take(self, reply: Any) -> bool:
        """Match the next reply with its command; True if it was the last."""
        command = self._missing.pop()
        if command is not None:
            accept(command, reply)
        return not self._missing

    def finish(self) -> None:
        self._exchange.report_health(self.node, self._commands)
        self._exchange.end_request()

    def fail(self, error: StoreError) -> None:
        """Fail the commands without a reply; all of them if it is unknown which replies were theirs."""
        for command in self._commands if isinstance(error, UnexpectedReply) else self._missing:
            if command is not None:
                command.reply = error
                if command.script is not None and command.script.observer is not None:
                    command.script.observer.fail(error)
        self._exchange.has_failed = True
        self._exchange.end_request()


@dataclass(slots=True, eq=False)
class LoneCheck:
    """A check that goes alone to the only server, which needs neither a batch nor a Command."""

    call: Call
    packed: bytes
    deadline: float = 0.0
    answer: Any = None
    """The decision; None after an error of the server, which has done nothing: retry the check as a batch."""

    def pack(self) -> bytes:
        return self.packed

    def take(self, reply: Any) -> bool:
        if type(reply) is list:
            self.answer = decode_alone(self.call, reply)  # type: ignore[arg-type] # a Check
        elif not isinstance(reply, ReplyError):
            raise unexpected(reply)
        return True


@dataclass(slots=True, eq=False)
class Exchange:
    """Runs the rounds of a batch: call `next_round`, then `finish` or `fail` each of its requests, until none are left.

    `end` is when the batch must be answered; without it, each round has the whole budget.
    """

    rounds: Generator[list[Command], None, Any]
    budget_s: float
    end: float = math.inf
    breakers: CircuitBreakers | None = None
    answers: Any = None
    """Once there are no more rounds: the answers to the calls, in their order, with StoreErrors among them."""
    deadline: float = 0.0
    """When the current round must be over."""
    has_failed: bool = False
    """True if a request of the last round failed."""
    round_trips: int = 0
    on_round_done: Callable[[], None] | None = None
    _pending: int = 0

    def next_round(self, now: float) -> list[ServerRequest]:
        """The requests of the next round trip, to be sent at the same time; empty when there are `answers`."""
        try:
            commands = self.rounds.send(None)
        except StopIteration as stop:
            self.answers = stop.value
            return []
        self.deadline = self._round_deadline(commands, now)
        self.has_failed = False
        self.round_trips += 1
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            command.reply = None
            by_node.setdefault(command.node, []).append(command)
        self._pending = len(by_node)
        return [ServerRequest(self, node, its) for node, its in by_node.items()]

    def extend_deadline(self, now: float, *, is_first_connection: bool) -> float:
        """Allow for the time that connecting to other servers took; returns the new deadline."""
        is_whole = is_first_connection or self.end == math.inf
        self.deadline = max(self.deadline, now + (self.budget_s if is_whole else min(MIN_REPLY_S, self.budget_s)))
        return self.deadline

    def report_health(self, node: Node | None, commands: list[Command]) -> None:
        """Record in the breaker of a server that it replied, or refused to serve."""
        if self.breakers is None:
            return
        for command in commands:
            if (refused := refusal(command.reply)) is not None:
                self.breakers.fail(node, refused)
                return
        self.breakers.succeed(node)

    def end_request(self) -> None:
        self._pending -= 1
        if not self._pending and self.on_round_done is not None:
            self.on_round_done()

    def _round_deadline(self, commands: list[Command], now: float) -> float:
        if self.end == math.inf:
            return now + self.budget_s
        if is_undo(commands):
            # The servers that charged do reply, so they get time however much the others have used up.
            return now + min(self.budget_s, max(UNDO_S, self.budget_s * UNDO_BUDGET_SHARE))
        if commands[0].script is None and self.end > now:
            # Discovery: leaves time to ask another server if this one does not reply.
            return now + (self.end - now) / 2
        return self.end if self.has_failed else max(self.end, now + min(MIN_REPLY_S, self.budget_s))


class Lanes(Generic[LaneT]):
    """One lane per set of servers. Calls wait, and travel, only with calls to the same servers, so that a server that
    does not reply delays no call to others."""

    __slots__ = ("_by_servers", "_encoder", "_new_lane", "_topology", "default")

    def __init__(self, new_lane: Callable[[], LaneT], encoder: CommandEncoder, topology: Topology) -> None:
        self.default = new_lane()
        """The lane of all calls, unless there are several servers with keys."""
        self._by_servers: dict[Any, LaneT] = {None: self.default}
        self._new_lane = new_lane
        self._encoder = encoder
        self._topology = topology

    def find(self, call: Call) -> LaneT:
        """The lane of the servers that a call needs, as far as they are known."""
        if not self._topology.has_shards:
            return self.default
        keys = call.keys if isinstance(call, Check | Reset) else (call.key,)
        servers = self._topology.servers_of([self._encoder.name(key) for key in keys])
        lane = self._by_servers.get(servers)
        if lane is None:
            if len(self._by_servers) >= MAX_LANES:  # calls that wait in one keep it alive
                self._by_servers = {None: self.default}
            lane = self._by_servers.setdefault(servers, self._new_lane())
        return lane

    def all(self) -> list[LaneT]:
        return list(self._by_servers.values())
