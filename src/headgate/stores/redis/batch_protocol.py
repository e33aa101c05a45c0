"""The batch protocol: which commands to send for a batch of calls, which to send again, and which charges to undo.

Pure: generators yield the commands of one round trip at a time and read their replies from them, so that every rule
about NOSCRIPT, MOVED or a denial by another shard is here, once. `exchange` runs them.
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
    from collections.abc import Generator, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.encoding import CommandEncoder
    from headgate.stores.redis.topology import Topology

__all__ = ["BudgetExhausted", "ConnectionLost", "NotSent", "deliver", "is_undo", "public", "refusal", "run_batch"]

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
    if isinstance(topology, Cluster):
        return (yield from _run_on_shards(calls, encoder, topology))
    commands = encoder.encode(calls)
    yield from deliver(commands, topology)
    if len(commands) == 1:
        return _read_answers(commands[0])
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    return [answers[id(call)] for call in calls]


def _run_on_shards(
    calls: Sequence[Call], encoder: CommandEncoder, cluster: Cluster
) -> Generator[list[Command], None, list[Any]]:
    """Check each key on its shard. A check over several shards is sent to all at once, and undone on those that allowed
    it if another did not."""
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
            resets = [Reset((key,)) for key in call.keys]
            commands += map(encoder.encode_other, resets)
            parts.append(resets)
        else:
            commands.append(encoder.encode_other(call))
            parts.append([call])
    commands += [encoder.encode_checks(checks) for checks in by_key.values()]
    yield from deliver(commands, cluster)
    answers = {id(call): answer for command in commands for call, answer in _answers(command)}
    undone = yield from _undo_denied(calls, parts, answers, encoder, cluster)
    return [
        _join(call, [answers[id(piece)] for piece in pieces], undone) for call, pieces in zip(calls, parts, strict=True)
    ]


def _split(check: Check, encoder: CommandEncoder) -> dict[str, Check]:
    """One check per key: while slots migrate, servers accept only commands of a single key at any time."""
    if len(check.keys) == 1:
        return {encoder.name(check.keys[0]): check}
    is_idempotent = isinstance(check, IdempotentCheck)
    return {
        encoder.name(key): (IdempotentCheck if is_idempotent and key.limit.algorithm != "concurrency" else Check)(
            (key,), cost, check.id
        )
        for key, cost in zip(check.keys, check.costs, strict=True)
    }


def _undo_denied(
    calls: Sequence[Call], parts: list[list[Any]], answers: dict[int, Any], encoder: CommandEncoder, cluster: Cluster
) -> Generator[list[Command], None, dict[tuple[int, str, str], Any]]:
    """Undo charges on shards where another one denied or failed; returns the verdicts after that."""
    undos: list[tuple[tuple[int, str, str], Command]] = []
    for call, pieces in zip(calls, parts, strict=True):
        decisions = [answers[id(piece)] for piece in pieces]
        if isinstance(call, Check) and not all(isinstance(one, Decision) and one.allowed for one in decisions):
            for piece, decision in zip(pieces, decisions, strict=True):
                # Even at no cost, a check with an id has a record.
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
    """The instant to which a shard charged a limit, derived from the reset time: if the clock was set back, that is the
    instant of the last request."""
    limit = decision.keys[0].limit
    _, _, reset_us, _ = decision.verdicts[0]
    periods = _PERIODS_UNTIL_RESET.get(limit.algorithm)
    return decision.at_us if periods is None else decision.at_us + reset_us - periods * limit.period_us


def _join(call: Call, parts: list[Any], undone: dict[tuple[int, str, str], Any]) -> Any:
    """Combine the answers of the shards."""
    errors = [answer for answer in parts if isinstance(answer, StoreError)]
    if errors:
        return _join_errors(call, parts, errors, undone)
    if not isinstance(call, Check) or len(parts) == 1:
        return parts[0]
    verdicts = {
        (key.limit.space, key.identity): verdict
        for decision in parts
        for key, verdict in zip(decision.keys, decision.verdicts, strict=True)
    }
    for key in call.keys:
        name = (key.limit.space, key.identity)
        verdicts[name] = undone.get((id(call), *name), verdicts[name])
    allowed = all(decision.allowed for decision in parts)
    can_wait = allowed and all(key.limit.algorithm != "concurrency" for key in call.keys)
    return Decision(
        allowed,
        call.keys,
        tuple(verdicts[key.limit.space, key.identity] for key in call.keys),
        call.id,
        None,
        max(decision.at_us for decision in parts),
        max(decision.next_allowed_us for decision in parts) if can_wait else 0,
        joined_costs([decision.cost for decision in parts]) if allowed else call.cost,  # with an id, those recorded
    )


def _join_errors(
    call: Call, parts: list[Any], errors: list[StoreError], undone: dict[tuple[int, str, str], Any]
) -> StoreError:
    """The error of a call that some shards did not answer. If a shard may have charged it, or has and the charge could
    not be undone, it may have happened, and must not be charged again."""
    worst = max(errors, key=lambda error: error.may_have_happened)
    taken = [
        (id(call), key.limit.space, key.identity)
        for decision in parts
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
    """Send commands until each has a final reply."""
    pending, has_rediscovered = commands, False
    try:
        if not is_undo(pending):  # an undo is for the server that charged, wherever its keys are now
            yield from topology.discover()
        for command in pending:
            topology.locate(command)
        for _ in range(MAX_ROUNDS):
            yield pending
            again = [command for command in pending if _redirect(command, topology)]
            stale = [command for command in pending if _is_stale(command)]
            if stale:
                # Ask other servers first: one that hangs would use up the budget.
                topology.forget([command.node for command in stale])
            # A command that may have been carried out is never sent again.
            unsent = [command for command in stale if not getattr(command.reply, "may_have_happened", False)]
            if unsent and topology.can_move and not has_rediscovered:
                has_rediscovered = True
                pending = [*again, *unsent]  # which fail if discovery does
                yield from topology.discover()
                for command in unsent:
                    topology.locate(command)
                again += unsent
            pending = again
            if not pending:
                return
    except StoreError as error:
        for command in pending:
            command.reply = error


def _redirect(command: Command, topology: Topology) -> bool:
    """True if the command must be sent again: with its text, or to another server."""
    if not isinstance(command.reply, ReplyError):
        return False
    kind, _, rest = str(command.reply).partition(" ")
    if kind == "NOSCRIPT" and not command.send_text:
        command.send_text = True
        return True
    command.asking = kind == "ASK"
    if kind in ("MOVED", "ASK") and isinstance(topology, Cluster) and command.node is not None:
        match = _MOVED.fullmatch(rest)
        if match is None:
            return False
        slot, host, port = match.groups()
        command.node = Node(host.strip("[]") or command.node.host, int(port))
        if kind == "MOVED":
            topology.record_move(int(slot), command.node)
        return True
    return kind == "TRYAGAIN"


def _is_stale(command: Command) -> bool:
    """True if the reply suggests that the servers have moved."""
    if isinstance(command.reply, ReplyError):
        return str(command.reply).startswith("READONLY")
    # While a breaker is open, the maintenance thread rediscovers the servers, and not every request.
    return isinstance(command.reply, StoreError) and not isinstance(command.reply, CircuitOpen)


def _answers(command: Command) -> list[tuple[Any, Any]]:
    """Pairs of call and answer."""
    return list(zip(command.calls, _read_answers(command), strict=True))


def _read_answers(command: Command) -> list[Any]:
    """The answers to the calls of a command, in their order."""
    reply = command.reply
    if isinstance(reply, ReplyError):
        is_moving = str(reply).startswith(("TRYAGAIN", "MOVED", "ASK "))  # a slot that migrates for too long
        message = f"the store answered: {reply}"
        reply = refusal(reply) or (StoreUnavailable(message) if is_moving else ScriptError(message))
    elif isinstance(reply, StoreError):
        reply = public(reply)
    return [reply] * len(command.calls) if isinstance(reply, StoreError) else command.answers
