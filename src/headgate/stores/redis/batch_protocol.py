"""One batch of calls from first byte to last answer: what to send, what to send again, what to give back.

Pure: a generator that yields the commands of one round trip at a time and finds their replies in them. The drivers in
`sync.py` and `aio.py` only move bytes, so every rule about NOSCRIPT, MOVED or a denial on another shard stands
here, once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from hiredis import ReplyError

from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreError, StoreUnavailable
from headgate.stores.operations import Check, IdempotentCheck, Reset, id_validity_us, joined_costs
from headgate.stores.redis.breaker import CircuitOpen
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.encoding import Command, Node, Undo
from headgate.stores.redis.topology import Cluster

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.encoding import CommandEncoder
    from headgate.stores.redis.topology import Topology

__all__ = [
    "LEAST_TIME_S",
    "BudgetExhausted",
    "ConnectionLost",
    "NotSent",
    "deadline",
    "deadline_of_round",
    "deliver",
    "gives_back",
    "public",
    "refusal",
    "run_batch",
    "servers_of",
]

MOST_ROUNDS: Final = 6
"""How often a command may be sent, with the redirections of a cluster that is being resharded."""

LEAST_TIME_S: Final = 0.002
"""Seconds that calls have which have spent their budget on waiting for a batch that failed."""
LEAST_SHARE: Final = 0.5
"""The part of the budget that is left to calls which have waited for a batch that was answered."""
UNDO_TIME_S: Final = 0.02
UNDO_SHARE: Final = 0.25
"""Seconds, and the part of the budget, for giving back; the longer one of them, and at most the budget."""

_REFUSALS: Final = (
    *("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOPERM", "NOREPLICAS", "OOM", "READONLY"),
    *("WRONGPASS", "ERR The user executing the script"),  # so Redis 7.0 says NOPERM inside a script
)
"""Errors by which a server says that it does not serve now: nothing is wrong with what was asked."""

_MOVED: Final = re.compile(r"([0-9]{1,5}) (\S*):([0-9]{1,5})(?: .*)?")
"""A redirection: the slot, and the host and port of the server that has it."""

_CHARGED_FOR: Final = {"fixed_window": 1, "sliding_log": 1, "sliding_window": 2}
"""For how many periods after the instant that was charged to, or after the beginning of its window, a key is not as
new. For the others the instant does not matter, or is the clock's."""


class NotSent(StoreUnavailable):
    """The server could not be reached; not a byte was sent, so it is safe to ask another."""


class BudgetExhausted(NotSent):
    """Others have used up the budget before this server's turn came: nothing is known of it."""


class ConnectionLost(StoreUnavailable):
    """The connection broke while the answer was on its way."""

    may_have_happened = True


def public(error: StoreError) -> StoreError:
    """The error as callers know it: how a server could not be reached matters only in here."""
    if not isinstance(error, NotSent | ConnectionLost | CircuitOpen | UnexpectedReply):
        return error
    told = StoreUnavailable(str(error))
    told.may_have_happened = error.may_have_happened
    return told


def deadline(began: float, now: float, budget: float, *, after_failure: bool) -> float:
    """When a batch must be answered, of which the oldest call has arrived at `began`.

    The budget of a call includes the time in which it waited for other batches. If those were answered, a part of it is
    left in any case: the time may have passed in this process, and says nothing about the store.
    """
    return max(began + budget, now + (min(LEAST_TIME_S, budget) if after_failure else budget * LEAST_SHARE))


def deadline_of_round(
    commands: list[Command], now: float, end: float, budget: float, *, after_failure: bool = False
) -> float:
    """When one round trip must be over, in a conversation that has until `end`."""
    if gives_back(commands):
        # The servers that have charged do answer: they get time for it, however much the others have used up.
        return now + min(budget, max(UNDO_TIME_S, budget * UNDO_SHARE))
    if commands[0].script is None and end > now:
        # A server is asked where the keys live. If it does not answer, there is time left to ask another.
        return now + (end - now) / 2
    return end if after_failure else max(end, now + min(LEAST_TIME_S, budget))


def gives_back(commands: list[Command]) -> bool:
    """Whether these only take back what other commands have charged."""
    return all(isinstance(call, Undo) for command in commands for call in command.calls) and bool(commands[0].calls)


def refusal(reply: Any) -> StoreUnavailable | None:
    """The error in a reply by which a server says that it does not serve, if it is one."""
    if isinstance(reply, ReplyError) and str(reply).startswith(_REFUSALS):
        return StoreUnavailable(f"the store answered: {reply}")
    return None


def servers_of(call: Call, encoder: CommandEncoder, topology: Topology) -> Hashable:
    """The servers that a call needs, as far as they are known. Calls travel only with those of the same servers: one
    that does not answer delays nobody who does not need it."""
    if not isinstance(topology, Cluster):
        return None
    keys = call.keys if isinstance(call, Check | Reset) else (call.key,)
    return topology.servers_of([encoder.name(key) for key in keys])


def run_batch(
    calls: Sequence[Call], encoder: CommandEncoder, topology: Topology
) -> Generator[list[Command], None, list[Any]]:
    """The answers to the calls, in their order; an exception among them is that call's alone."""
    if isinstance(topology, Cluster):
        return (yield from _converse_with_shards(calls, encoder, topology))
    commands = encoder.encode(calls)
    yield from deliver(commands, topology)
    if len(commands) == 1:
        return _told(commands[0])
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    return [answers[id(call)] for call in calls]


def _converse_with_shards(
    calls: Sequence[Call], encoder: CommandEncoder, cluster: Cluster
) -> Generator[list[Command], None, list[Any]]:
    """Each key on its own shard. A request over several is asked of all at once, and given back where another one
    denied."""
    by_key: dict[str, list[Check]] = {}
    commands: list[Command] = []
    parts: list[list[Any]] = []
    for call in calls:
        if isinstance(call, Check):
            pieces = _split(call, encoder)
            for name, piece in pieces.items():
                if isinstance(piece, IdempotentCheck):
                    commands.append(encoder.encode_idempotent(piece, id_validity_us(call.keys)))
                else:
                    by_key.setdefault(name, []).append(piece)
            parts.append(list(pieces.values()))
        elif isinstance(call, Reset):
            pieces_of_reset = [Reset((key,)) for key in call.keys]
            commands += map(encoder.encode_other, pieces_of_reset)
            parts.append(pieces_of_reset)
        else:
            commands.append(encoder.encode_other(call))
            parts.append([call])
    commands += [encoder.encode_checks(checks) for checks in by_key.values()]
    yield from deliver(commands, cluster)
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    undone = yield from _give_back(calls, parts, answers, encoder, cluster)
    return [
        _join(call, [answers[id(piece)] for piece in pieces], undone) for call, pieces in zip(calls, parts, strict=True)
    ]


def _split(check: Check, encoder: CommandEncoder) -> dict[str, Check]:
    """A check for each key: only commands of one key are answered at any moment while slots are moved."""
    if len(check.keys) == 1:
        return {encoder.name(check.keys[0]): check}
    is_idempotent = isinstance(check, IdempotentCheck)
    return {
        encoder.name(key): (IdempotentCheck if is_idempotent and key.limit.algorithm != "concurrency" else Check)(
            (key,), cost, check.id
        )
        for key, cost in zip(check.keys, check.costs, strict=True)
    }


def _give_back(
    calls: Sequence[Call], parts: list[list[Any]], answers: dict[int, Any], encoder: CommandEncoder, cluster: Cluster
) -> Generator[list[Command], None, dict[tuple[int, str, str], Any]]:
    """What requests took on one shard while another denied or failed; answered by how the limits stand then."""
    undos: list[tuple[tuple[int, str, str], Command]] = []
    for call, pieces in zip(calls, parts, strict=True):
        told = [answers[id(piece)] for piece in pieces]
        if isinstance(call, Check) and not all(isinstance(one, Decision) and one.allowed for one in told):
            for piece, decision in zip(pieces, told, strict=True):
                # Also where an id costs nothing: it has a record.
                is_charged = piece.cost or isinstance(piece, IdempotentCheck)
                if is_charged and isinstance(decision, Decision) and decision.allowed:
                    (key,) = piece.keys
                    undo = Undo(piece, key, _charged_us(decision))
                    undos.append(((id(call), key.limit.space, key.identity), encoder.encode_other(undo)))
    if undos:
        yield from deliver([command for _, command in undos], cluster)
    return {
        name: answer for name, command in undos for _, answer in _answers(command) if not isinstance(answer, Exception)
    }


def _charged_us(decision: Decision) -> int:
    """The instant to which a shard charged one limit: a clock that has gone back charges to the last request's. When
    the key is as new tells it, as that is always so long after the charge, or after the beginning of its window."""
    limit = decision.keys[0].limit
    _, _, reset_us, _ = decision.verdicts[0]
    periods = _CHARGED_FOR.get(limit.algorithm)
    return decision.at_us if periods is None else decision.at_us + reset_us - periods * limit.period_us


def _join(call: Call, told: list[Any], undone: dict[tuple[int, str, str], Any]) -> Any:
    """One answer from those of the shards."""
    errors = [answer for answer in told if isinstance(answer, StoreError)]
    if errors:
        return _joined_error(call, told, errors, undone)
    if not isinstance(call, Check) or len(told) == 1:
        return told[0]
    verdicts = {
        (key.limit.space, key.identity): verdict
        for decision in told
        for key, verdict in zip(decision.keys, decision.verdicts, strict=True)
    }
    for key in call.keys:
        name = (key.limit.space, key.identity)
        verdicts[name] = undone.get((id(call), *name), verdicts[name])
    allowed = all(decision.allowed for decision in told)
    can_wait = allowed and all(key.limit.algorithm != "concurrency" for key in call.keys)
    return Decision(
        allowed,
        call.keys,
        tuple(verdicts[key.limit.space, key.identity] for key in call.keys),
        call.id,
        None,
        max(decision.at_us for decision in told),
        max(decision.again_us for decision in told) if can_wait else 0,
        joined_costs([decision.cost for decision in told]) if allowed else call.cost,  # with an id, those recorded
    )


def _joined_error(
    call: Call, told: list[Any], errors: list[StoreError], undone: dict[tuple[int, str, str], Any]
) -> StoreError:
    """The error of a call that some shards did not answer. If one may have charged it all the same, or has, and could
    not be made to give it back, it may have happened: whoever is told must not charge it again."""
    worst = max(errors, key=lambda error: error.may_have_happened)
    taken = [
        (id(call), key.limit.space, key.identity)
        for decision in told
        if isinstance(call, Check) and isinstance(decision, Decision) and decision.allowed
        for key, cost in zip(call.keys, call.costs, strict=True)
        if cost and key in decision.keys
    ]
    if worst.may_have_happened or all(name in undone for name in taken):
        return worst
    error = type(worst)(str(worst))
    error.may_have_happened = True
    return error


def deliver(commands: list[Command], topology: Topology) -> Generator[list[Command], None, None]:
    """Sends the commands until each has a reply that is final; afterwards each has one."""
    pending, asked_anew = commands, False
    try:
        if not gives_back(pending):  # that is for where it was taken, and not worth looking for
            yield from topology.discover()
        for command in pending:
            topology.locate(command)
        for _ in range(MOST_ROUNDS):
            yield pending
            again = [command for command in pending if _redirect(command, topology)]
            stale = [command for command in pending if _is_stale(command)]
            if stale:
                # One that hangs would use up the time of a request that others could serve.
                topology.forget([command.node for command in stale])
            # What may have happened is never asked twice.
            unheard = [command for command in stale if not getattr(command.reply, "may_have_happened", False)]
            if unheard and topology.moves and not asked_anew:
                asked_anew = True
                pending = [*again, *unheard]  # whose answer it is if nobody can be found
                yield from topology.discover()
                for command in unheard:
                    topology.locate(command)
                again += unheard
            pending = again
            if not pending:
                return
    except StoreError as error:
        for command in pending:
            command.reply = error


def _redirect(command: Command, topology: Topology) -> bool:
    """Whether the server wants the command again: with its text, or at another place."""
    if not isinstance(command.reply, ReplyError):
        return False
    kind, _, rest = str(command.reply).partition(" ")
    if kind == "NOSCRIPT" and not command.send_text:
        command.send_text = True
        return True
    command.asking = kind == "ASK"
    if kind in ("MOVED", "ASK") and isinstance(topology, Cluster) and command.node is not None:
        found = _MOVED.fullmatch(rest)
        if found is None:
            return False
        slot, host, port = found.groups()
        command.node = Node(host.strip("[]") or command.node.host, int(port))
        if kind == "MOVED":
            topology.moved(int(slot), command.node)
        return True
    return kind == "TRYAGAIN"


def _is_stale(command: Command) -> bool:
    """Whether the reply says that the servers are not where they were thought to be."""
    if isinstance(command.reply, ReplyError):
        return str(command.reply).startswith("READONLY")
    # Where a breaker is open, the servers are asked anew by whoever looks after it, and not by every request.
    return isinstance(command.reply, StoreError) and not isinstance(command.reply, CircuitOpen)


def _answers(command: Command) -> list[tuple[Any, Any]]:
    """Each call of the command with its answer."""
    return list(zip(command.calls, _told(command), strict=True))


def _told(command: Command) -> list[Any]:
    """The answers to a command's calls, in their order."""
    reply = command.reply
    if isinstance(reply, ReplyError):
        # A slot on its way to another server, that could not be asked for in time, is nobody's mistake either.
        moving = str(reply).startswith(("TRYAGAIN", "MOVED", "ASK "))
        told = f"the store answered: {reply}"
        reply = refusal(reply) or (StoreUnavailable(told) if moving else ScriptError(told))
    elif isinstance(reply, StoreError):
        reply = public(reply)
    return [reply] * len(command.calls) if isinstance(reply, StoreError) else command.answers
