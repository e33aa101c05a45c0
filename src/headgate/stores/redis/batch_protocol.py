"""The batch protocol: which commands to send for a batch of calls, which to send again, and which charges to undo.

Pure: generators yield the commands of one round trip at a time and read their replies from them, so that every rule
about NOSCRIPT, MOVED or a denial by another shard is here, once. `exchange` runs them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hiredis import ReplyError

from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreError, StoreUnavailable
from headgate.stores.operations import Call, Check, IdempotentCheck, Reset, id_validity_us, joined_costs
from headgate.stores.redis.breaker import CircuitOpen
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.encoding import Command, CommandEncoder, Node, Undo
from headgate.stores.redis.topology import Cluster, Topology

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterator, Sequence

    from headgate.limits import Limit

__all__ = [
    "BudgetExhausted", "ConnectionLost", "NotSent", "deliver", "error_of", "is_undo", "public", "refusal",
    "run_batch",
]  # fmt: skip

MAX_ROUNDS: Final = 6
"""Round trips of a command, including redirections in a cluster that is being resharded."""

_REFUSALS: Final = (
    *("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOPERM", "NOREPLICAS", "OOM", "READONLY"),
    *("WRONGPASS", "ERR The user executing the script"),  # NOPERM inside a script of Redis 7.0
)
"""Errors of a server that does not serve at the moment, whatever the command."""

_MOVED: Final = re.compile(r"([0-9]{1,5}) (\S*):([0-9]{1,5})(?: .*)?")
"""A redirection: slot, host and port."""

_PERIODS_UNTIL_RESET: Final = {"fixed_window": 1, "sliding_log": 1, "sliding_window": 2}
"""Periods from the instant of a charge, or the start of its window, until the key is as new. For other algorithms the
instant does not matter, or is that of the clock."""


class NotSent(StoreUnavailable):
    """The server could not be reached. Nothing was sent, so it is safe to try another."""


class BudgetExhausted(NotSent):
    """The budget was spent on other servers; says nothing about this one."""


class ConnectionLost(StoreUnavailable):
    """The connection broke after the command was sent."""

    may_have_happened = True


def public(error: StoreError) -> StoreError:
    """The error as callers see it: the reason for which a server is unavailable matters only in this package."""
    if not isinstance(error, NotSent | ConnectionLost | CircuitOpen | UnexpectedReply):
        return error
    unavailable = StoreUnavailable(str(error))
    unavailable.may_have_happened = error.may_have_happened
    return unavailable


def is_undo(commands: list[Command]) -> bool:
    """True if these only take back what other commands have charged."""
    return all(isinstance(call, Undo) for command in commands for call in command.calls) and bool(commands[0].calls)


def refusal(reply: Any) -> StoreUnavailable | None:
    """The error for a reply of a server that does not serve at the moment; None for other replies."""
    if isinstance(reply, ReplyError) and str(reply).startswith(_REFUSALS):
        return StoreUnavailable(f"the store answered: {reply}")
    return None


def run_batch(
    calls: Sequence[Call], encoder: CommandEncoder, topology: Topology
) -> Generator[list[Command], None, list[Any]]:
    """The answers to the calls, in their order; an exception among them belongs to that call alone."""
    if topology.has_shards:
        return (yield from _run_on_shards(calls, encoder, topology))
    commands = encoder.encode(calls)
    yield from deliver(commands, topology, encoder)
    if len(commands) == 1:
        return _read_answers(commands[0])
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    return [answers[id(call)] for call in calls]


class _Piece(NamedTuple):
    """The part of a call that one script run can carry out."""

    call: Any
    positions: Sequence[int]
    """Of its keys, among those of the whole call."""


def _run_on_shards(
    calls: Sequence[Call], encoder: CommandEncoder, topology: Topology
) -> Generator[list[Command], None, list[Any]]:
    """Check each key on its shard. A check over several shards is sent to all at once, and undone on those that allowed
    it if another did not."""
    by_group: dict[Hashable, list[Check]] = {}
    commands: list[Command] = []
    parts: list[list[_Piece]] = []
    for call in calls:
        if not isinstance(call, Check | Reset):
            commands.append(encoder.encode_other(call))
            parts.append([_Piece(call, (0,))])
            continue
        pieces = _split(call, encoder, topology)
        for group, (piece, _) in pieces.items():
            if isinstance(piece, IdempotentCheck):
                commands.append(encoder.encode_idempotent(piece, id_validity_us(call.keys)))
            elif isinstance(piece, Reset):
                commands.append(encoder.encode_other(piece))
            else:
                by_group.setdefault(group, []).append(piece)
        parts.append(list(pieces.values()))
    commands += [encoder.encode_checks(checks) for checks in by_group.values()]
    yield from deliver(commands, topology, encoder)
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    undone = yield from _undo_denied(parts, answers, encoder, topology)
    return [_join(call, pieces, answers, undone) for call, pieces in zip(calls, parts, strict=True)]


def _split(call: Check | Reset, encoder: CommandEncoder, topology: Topology) -> dict[Hashable, _Piece]:
    """One piece for each group of keys that a single script run can use."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(call.keys):
        groups.setdefault(topology.script_group(encoder.name(key)), []).append(position)
    if len(groups) == 1:
        return {group: _Piece(call, positions) for group, positions in groups.items()}
    return {group: _Piece(_piece_of(call, positions), positions) for group, positions in groups.items()}


def _piece_of(call: Check | Reset, positions: list[int]) -> Check | Reset:
    keys = tuple([call.keys[position] for position in positions])
    if isinstance(call, Reset):
        return Reset(keys)
    is_idempotent = isinstance(call, IdempotentCheck) and any(key.limit.algorithm != "concurrency" for key in keys)
    costs = call.costs
    cost = joined_costs([costs[position] for position in positions])
    return (IdempotentCheck if is_idempotent else Check)(keys, cost, call.id)


def _is_allowed(answer: Any) -> bool:
    return isinstance(answer, Decision) and answer.allowed


def _undo_denied(
    parts: list[list[_Piece]], answers: dict[int, Any], encoder: CommandEncoder, topology: Topology
) -> Generator[list[Command], None, dict[tuple[int, int], Any]]:
    """Undo charges on shards where another one denied or failed; returns the verdicts after that, by piece and index of
    the key in it."""
    undos = [
        (id(piece), index, undo)
        for pieces in parts
        if len(pieces) > 1 and not all(_is_allowed(answers[id(piece)]) for piece, _ in pieces)
        for piece, _ in pieces
        if _is_allowed(answers[id(piece)])
        for index, undo in _undos(piece, answers[id(piece)])
    ]
    if not undos:
        return {}
    commands = [encoder.encode_other(undo) for _, _, undo in undos]
    yield from deliver(commands, topology, encoder)
    replies = [answer for command in commands for _, answer in _answers(command)]
    return {
        (piece, index): reply
        for (piece, index, _), reply in zip(undos, replies, strict=True)
        if not isinstance(reply, Exception)
    }


def _undos(check: Check, decision: Decision) -> Iterator[tuple[int, Undo]]:
    """The undo of each key that an allowed check has charged, with the index of the key."""
    for index, (key, cost, verdict) in enumerate(zip(check.keys, check.costs, decision.verdicts, strict=True)):
        is_idempotent = isinstance(check, IdempotentCheck) and key.limit.algorithm != "concurrency"
        if cost or is_idempotent:  # even at no cost, a check with an id has a record
            alone = (IdempotentCheck if is_idempotent else Check)((key,), cost, check.id)
            yield index, Undo(alone, key, _charged_us(key.limit, decision.at_us, verdict[2]))


def _charged_us(limit: Limit, at_us: int, reset_us: int) -> int:
    """The instant to which a shard charged a limit, derived from the reset time: if the clock was set back, that is the
    instant of the last request."""
    if limit.calendar is not None:
        return at_us + reset_us - 1  # inside of the window, whenever that began
    periods = _PERIODS_UNTIL_RESET.get(limit.algorithm)
    return at_us if periods is None else at_us + reset_us - periods * limit.period_us


def _join(call: Call, pieces: list[_Piece], answers: dict[int, Any], undone: dict[tuple[int, int], Any]) -> Any:
    """Combine the answers of the shards."""
    parts = [answers[id(piece)] for piece, _ in pieces]
    errors = [answer for answer in parts if isinstance(answer, StoreError)]
    if errors:
        worst = max(errors, key=lambda error: error.may_have_happened)
        charged = [
            (id(piece), index)
            for piece, _ in pieces
            if _is_allowed(answers[id(piece)])
            for index, cost in enumerate(piece.costs)
            if cost
        ]
        if worst.may_have_happened or all(each in undone for each in charged):
            return worst
        # A shard has charged it, and that could not be undone: it must not be charged again.
        error = type(worst)(str(worst))
        error.may_have_happened = True
        return error
    if not isinstance(call, Check) or len(parts) == 1:
        return parts[0]
    allowed = all(decision.allowed for decision in parts)
    can_wait = allowed and all(key.limit.algorithm != "concurrency" for key in call.keys)
    verdicts: list[Any] = [None] * len(call.keys)
    costs = [0] * len(call.keys)
    for (piece, positions), decision in zip(pieces, parts, strict=True):
        each = decision.cost if type(decision.cost) is tuple else (decision.cost,) * len(positions)
        for index, position in enumerate(positions):
            verdicts[position] = undone.get((id(piece), index), decision.verdicts[index])
            costs[position] = each[index]
    return Decision(
        allowed,
        call.keys,
        tuple(verdicts),
        call.id,
        None,
        max(decision.at_us for decision in parts),
        max(decision.next_allowed_us for decision in parts) if can_wait else 0,
        joined_costs(costs) if allowed else call.cost,  # with an id, those recorded
    )


def deliver(
    commands: list[Command], topology: Topology, encoder: CommandEncoder | None = None
) -> Generator[list[Command], None, None]:
    """Send commands until each has a final reply."""
    has_rediscovered = False
    # An undo is for the server that charged, wherever its keys are now.
    pending = yield from topology.assign(commands, discovers=not is_undo(commands))
    for _ in range(MAX_ROUNDS):
        if not pending:
            return
        yield pending
        again = [command for command in pending if _must_repeat(command, topology, encoder)]
        stale = [command for command in pending if _is_stale(command)]
        if stale:
            # Ask other servers first: one that hangs would use up the budget.
            topology.forget([command.node for command in stale])
        # A command that may have been carried out is never sent again.
        unsent = [
            command
            for command in stale
            if topology.part_of(command.node).can_move and not getattr(command.reply, "may_have_happened", False)
        ]
        if unsent and not has_rediscovered:
            has_rediscovered = True
            again += yield from topology.assign(unsent)
        pending = again


def _must_repeat(command: Command, topology: Topology, encoder: CommandEncoder | None) -> bool:
    """True if the command must be sent again: with its text, other edges of a calendar, or to another server."""
    if not isinstance(command.reply, ReplyError):
        return False
    kind, _, rest = str(command.reply).partition(" ")
    if kind == "NOSCRIPT" and not command.send_text:
        command.send_text = True
        return True
    if kind == "EDGES" and encoder is not None and re.fullmatch("[0-9]{1,16}", rest):
        return encoder.replace_edges(command, int(rest))
    command.asking = kind == "ASK"
    cluster = topology.part_of(command.node)
    if kind in ("MOVED", "ASK") and isinstance(cluster, Cluster) and command.node is not None:
        match = _MOVED.fullmatch(rest)
        if match is None:
            return False
        slot, host, port = match.groups()
        command.node = Node(host.strip("[]") or command.node.host, int(port), shard=command.node.shard)
        if kind == "MOVED":
            cluster.record_move(int(slot), command.node)
        return True
    return kind == "TRYAGAIN"


def _is_stale(command: Command) -> bool:
    """True if the reply suggests that the servers have moved."""
    if isinstance(command.reply, ReplyError):
        return str(command.reply).startswith("READONLY")
    # While a breaker is open, the maintenance thread rediscovers the servers, and not every request.
    return isinstance(command.reply, StoreError) and not isinstance(command.reply, CircuitOpen)


def error_of(reply: Any) -> StoreError | None:
    """The error that callers get for a reply; None if it is a value."""
    if isinstance(reply, ReplyError):
        is_moving = str(reply).startswith(("TRYAGAIN", "MOVED", "ASK "))  # a slot that migrates for too long
        message = f"the store answered: {reply}"
        return refusal(reply) or (StoreUnavailable(message) if is_moving else ScriptError(message))
    return public(reply) if isinstance(reply, StoreError) else None


def _answers(command: Command) -> list[tuple[Any, Any]]:
    return list(zip(command.calls, _read_answers(command), strict=True))


def _read_answers(command: Command) -> list[Any]:
    error = error_of(command.reply)
    return command.answers if error is None else [error] * len(command.calls)
