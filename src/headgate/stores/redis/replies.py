"""What Redis replied, as answers to the calls of a command: pure, like `wire.py`, which has put the question.

What every request of a batch needs is here as Python; `_wire.c` is the same, compiled.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from headgate._compiled import compiled
from headgate.decisions import Decision
from headgate.errors import ScriptError
from headgate.stores.calls import Check, Leave, Renew, Reset
from headgate.stores.redis.wire import Undo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.keys import Key
    from headgate.stores.redis.wire import Command

__all__ = ["decode", "decode_alone", "decode_one"]

_new_decision = tuple.__new__


def decode(command: Command) -> list[Any]:
    """The answers to a command's calls, in their order; an exception among them is that call's alone."""
    try:
        return _decode(command)
    except (IndexError, TypeError, ValueError):
        return [_strange(command.reply)] * len(command.calls)


def _decode(command: Command) -> list[Any]:
    call = command.calls[0]
    if isinstance(call, Check):
        if len(command.calls) == 1:
            return [decode_alone(call, command.reply)]
        return _decode_checks(command.calls, command.reply)
    if isinstance(call, Reset):
        return [None]
    told = command.reply if isinstance(call, Renew | Leave) else command.reply[0]
    if told < 0:
        return [_foreign(call.key)]
    return [tuple(command.reply[1:5])] if isinstance(call, Undo) else [bool(told)]


def decode_alone(check: Check, reply: list[Any]) -> Decision | ScriptError:
    """The answer to a check that went alone."""
    if len(check[0]) == 1:
        return decode_one(check, reply)
    try:
        answer: Decision | ScriptError = _decode_checks([check], reply)[0]
    except (IndexError, TypeError, ValueError):
        return _strange(reply)
    return answer


def decode_one(check: Check, reply: list[int]) -> Decision | ScriptError:
    """The same for a check of one limit."""
    retry_us = delay_us = again_us = 0
    try:
        if len(reply) == 3:
            now_us, remaining, reset_us = reply
        else:
            now_us, remaining, reset_us, retry_us, delay_us, again_us = reply
        if remaining < 0:
            return _foreign(*check.keys)
    except (TypeError, ValueError):
        return _strange(reply)
    keys, cost, lease = check
    verdicts = ((remaining, retry_us, reset_us, delay_us),)
    return _new_decision(Decision, (retry_us == 0, keys, verdicts, lease, None, now_us, again_us, cost))


def _decode_checks(checks: Sequence[Check], reply: list[Any]) -> list[Any]:
    return answers(checks, reply) or plain_answers(checks, reply)  # in C, only where all pass


def plain_answers(checks: Sequence[Check], reply: list[Any]) -> list[Any]:
    """The answers to a batch."""
    now_us, told, unusual, agains = reply
    verdicts = tuple(zip(told[::2], repeat(0), told[1::2], repeat(0)))
    if unusual:
        changed = list(verdicts)
        for index, retry_us, delay_us in zip(unusual[::3], unusual[1::3], unusual[2::3], strict=True):
            remaining, _, reset_us, _ = changed[index]
            changed[index] = remaining, retry_us, reset_us, delay_us
        verdicts = tuple(changed)
    told_each: list[Any] = []
    at, allowed = 0, True
    for keys, cost, lease in checks:
        if len(keys) == 1:
            its: tuple[Any, ...] = (verdicts[at],)
            at += 1
        else:
            its = verdicts[at : at + len(keys)]
            at += len(keys)
        if unusual:
            allowed = not any([verdict[1] for verdict in its])  # noqa: C419 - a list is quicker than a generator
        if its[0][0] < 0:
            told_each.append(_foreign(*keys))
        else:
            told_each.append(_new_decision(Decision, (allowed, keys, its, lease, None, now_us, 0, cost)))
    if at != len(verdicts):
        raise ValueError(f"{len(verdicts)} verdicts on {at} keys")
    for index, again_us in zip(agains[::2], agains[1::2], strict=True):
        told_each[index] = told_each[index]._replace(again_us=again_us)
    return told_each


def _strange(reply: Any) -> ScriptError:
    """Whoever said this does not run our scripts: a proxy, or no Redis at all."""
    return ScriptError(f"the store answered {str(reply)[:100]}, which is no answer to what it was asked")


def _foreign(*keys: Key) -> ScriptError:
    names = ", ".join(repr(key.limit.name) for key in keys)
    return ScriptError(f"a stored value of {names} is not headgate's: reset the key, or use a namespace of your own")


answers: Final[Callable[..., list[Any] | None]] = getattr(
    compiled("headgate.stores.redis._wire"), "answers", plain_answers
)
