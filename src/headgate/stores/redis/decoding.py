"""Replies: parsing them within bounds, and decoding them as answers to the calls of a command. Sans-io.

hiredis allocates an array as soon as it has read its header, and buffers a string of any length, so a server that is
broken, or not a Redis at all, could exhaust the memory of the process. Headers are checked before hiredis sees them.

The shape of a reply, its types and the range of its numbers are checked. One that cannot be the reply to its command
means that the connection is out of step, or that the server is not a Redis: `accept` raises an UnexpectedReply, and the
connection must be closed.

The reply to a batch of which every check is allowed is decoded in C where possible.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from hiredis import HiredisError, Reader, ReplyError

from headgate import speedups
from headgate.decisions import Decision
from headgate.errors import ScriptError, StoreUnavailable
from headgate.limits import EXACT
from headgate.stores.operations import (
    Check,
    Deposit,
    IdempotentCheck,
    Leave,
    Overdraw,
    Renew,
    Reset,
    TakeBack,
    joined_costs,
)
from headgate.stores.redis.encoding import Command, Undo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.keys import Key

__all__ = [
    "INCOMPLETE", "MAX_REPLY_BYTES", "ReplyReader", "UnexpectedReply", "accept", "decode", "decode_alone",
    "unexpected",
]  # fmt: skip

INCOMPLETE: Final = object()
"""Returned by `next_reply` while the next reply has not arrived in full."""

MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Many times the size of the reply to the fullest batch."""
MAX_ELEMENTS: Final = 1_000_000
"""Elements that all arrays of one reply may announce."""
MAX_HEADER_BYTES: Final = 12
"""More than the longest header within these bounds: a sign, digits, and the end of the line."""

_ARRAYS: Final = b"*>"
_NEWLINE: Final = 10

_new_decision = tuple.__new__


class UnexpectedReply(StoreUnavailable):
    """Something arrived that is not the reply to what was sent."""

    may_have_happened = True


class ReplyReader:
    """Parser of the replies on one connection, which must be closed after an UnexpectedReply."""

    __slots__ = ("_elements", "_gets", "_max_bytes", "_pending", "_reader", "_tail")

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._reader = Reader(notEnoughData=INCOMPLETE)
        self._gets = self._reader.gets
        self._max_bytes = max_bytes
        self._pending = self._elements = 0
        """Bytes received, and array elements announced, since the last complete reply."""
        self._tail: bytes | None = b""
        """The start of an incomplete line; None inside a line that cannot be a header."""

    def feed(self, data: bytes | bytearray, size: int) -> None:
        """Take in the first `size` bytes of `data`."""
        self._pending += size
        if self._pending > self._max_bytes:
            raise UnexpectedReply(f"the store sent a reply of more than {self._max_bytes} bytes")
        # Nearly all replies are arrays of integers, which have only these headers.
        self._check_headers(data, size, b"*")
        if data.find(b"$", 0, size) >= 0:
            self._check_headers(data, size, b"$")
        if data.find(b">", 0, size) >= 0:
            self._check_headers(data, size, b">")
        if self._tail or data[size - 1] != _NEWLINE:
            self._check_split_header(data, size)
        else:
            self._tail = b""
        try:
            self._reader.feed(data, 0, size)  # type: ignore[arg-type] # any buffer will do
        except HiredisError as error:
            raise UnexpectedReply(f"the store sent an invalid reply: {error}") from error

    def next_reply(self) -> Any:
        try:
            reply = self._gets()
        except HiredisError as error:
            raise UnexpectedReply(f"the store sent an invalid reply: {error}") from error
        if reply is not INCOMPLETE:
            self._pending = self._elements = 0
        return reply

    def has_leftover(self) -> bool:
        """True if bytes have arrived beyond the last reply."""
        return bool(self._reader.has_data())

    def _check_headers(self, data: bytes | bytearray, size: int, sign: bytes) -> None:
        """Check each header of that kind that begins in `data`."""
        at = data.find(sign, 0, size)
        while at >= 0:
            if data[at - 1] == _NEWLINE if at else self._tail == b"":
                self._check_header(bytes(data[at : min(size, at + MAX_HEADER_BYTES)]))
            at = data.find(sign, at + 1, size)

    def _check_header(self, line: bytes) -> None:
        """Check what a line announces, as far as it has arrived."""
        digits, is_complete, _ = line[1:].partition(b"\r")
        if not digits.isdigit():  # null, part of a string, or what hiredis refuses
            return
        if not is_complete:
            if len(line) < MAX_HEADER_BYTES:
                return
        elif line[0] in _ARRAYS:
            self._elements += int(digits)
            if self._elements <= MAX_ELEMENTS:
                return
        elif int(digits) <= self._max_bytes:
            return
        raise UnexpectedReply(f"the store announced a reply that is too large: {line!r}")

    def _check_split_header(self, data: bytes | bytearray, size: int) -> None:
        """Check a header whose line has arrived in several pieces."""
        start = data.rfind(b"\n", 0, size) + 1
        if self._tail:
            line = self._tail + bytes(data[: min(size, MAX_HEADER_BYTES)])
            if line[:1] in (b"*", b">", b"$"):
                self._check_header(line[:MAX_HEADER_BYTES])
        if start:
            self._tail = bytes(data[start:size]) if size - start < MAX_HEADER_BYTES else None
        elif self._tail is not None:
            self._tail = self._tail + bytes(data[:size]) if len(self._tail) + size < MAX_HEADER_BYTES else None


def accept(command: Command, reply: Any) -> None:
    """Set the reply of a command; raises UnexpectedReply if it cannot be one to this command."""
    if command.script is not None and command.script.observer is not None:
        reply = command.script.observer.take(command, reply)
    if not isinstance(reply, ReplyError):
        if command.calls:
            command.answers = decode(command.calls, reply)
        elif not isinstance(reply, command.expects):
            raise unexpected(reply)
    command.reply = reply


def decode(calls: Sequence[Any], reply: Any) -> list[Any]:
    """The answers to the calls of one command, in their order; an exception among them belongs to that call alone."""
    call = calls[0]
    if isinstance(call, IdempotentCheck):
        return [_decode_idempotent(call, reply)]
    if isinstance(call, Check):
        return [decode_alone(call, reply)] if len(calls) == 1 else _decode_checks(calls, reply)
    if isinstance(call, Reset):
        if _is_whole(reply):
            return [None]
    elif isinstance(call, Renew | Leave):
        if _is_whole(reply, -1):
            return [_foreign(call.key) if reply < 0 else bool(reply)]
    elif isinstance(call, Deposit | TakeBack | Overdraw):
        if _is_whole(reply, -1):
            return [_foreign(call.key) if reply < 0 else reply]
    elif type(reply) is list and len(reply) == 5 and all([_is_whole(number, -1) for number in reply]):  # noqa: C419
        if reply[0] < 0:
            return [_foreign(call.key)]
        return [tuple(reply[1:]) if isinstance(call, Undo) else bool(reply[0])]
    raise unexpected(reply)


def decode_alone(check: Check, reply: Any) -> Decision | ScriptError:
    if len(check[0]) == 1:
        return decode_one(check, reply)
    answer: Decision | ScriptError = _decode_checks([check], reply)[0]
    return answer


def decode_one(check: Check, reply: Any) -> Decision | ScriptError:
    retry_us = delay_us = next_allowed_us = 0
    if type(reply) is not list:
        raise unexpected(reply)
    if len(reply) == 3:
        now_us, remaining, reset_us = reply
    elif len(reply) == 6:
        now_us, remaining, reset_us, retry_us, delay_us, next_allowed_us = reply
        if not (_is_whole(retry_us, -1) and _is_whole(delay_us) and _is_whole(next_allowed_us)):
            raise unexpected(reply)
    else:
        raise unexpected(reply)
    if not (type(now_us) is type(remaining) is type(reset_us) is int):
        raise unexpected(reply)
    if not (0 <= now_us < EXACT and -1 <= remaining < EXACT and 0 <= reset_us < EXACT):
        raise unexpected(reply)
    if remaining < 0:
        return _foreign(*check.keys)
    keys, cost, lease = check
    verdicts = ((remaining, retry_us, reset_us, delay_us),)
    return _new_decision(Decision, (retry_us == 0, keys, verdicts, lease, None, now_us, next_allowed_us, cost))


def _decode_idempotent(check: IdempotentCheck, reply: Any) -> Decision | ScriptError:
    """The answer to a check with an id, with the costs that were charged."""
    if type(reply) is not list or len(reply) != 5:
        raise unexpected(reply)
    *batch_reply, costs = reply
    decision: Decision | ScriptError = plain_answers([check], batch_reply)[0]
    if isinstance(decision, ScriptError) or not decision.allowed:
        return decision
    if type(costs) is not list or len(costs) != len(check.keys) or not all([_is_whole(cost) for cost in costs]):  # noqa: C419
        raise unexpected(reply)
    return decision._replace(cost=joined_costs(costs))


def _decode_checks(checks: Sequence[Check], reply: Any) -> list[Any]:
    return answers(checks, reply) or plain_answers(checks, reply)  # C handles the case that all are allowed


def plain_answers(checks: Sequence[Check], reply: Any) -> list[Any]:
    if not _is_batch_reply(reply, sum([len(check[0]) for check in checks]), len(checks)):
        raise unexpected(reply)
    now_us, states, unusual, agains = reply
    verdicts = tuple(zip(states[::2], repeat(0), states[1::2], repeat(0)))
    if unusual:
        changed = list(verdicts)
        for index, retry_us, delay_us in zip(unusual[::3], unusual[1::3], unusual[2::3], strict=True):
            remaining, _, reset_us, _ = changed[index]
            changed[index] = remaining, retry_us, reset_us, delay_us
        verdicts = tuple(changed)
    decisions: list[Any] = []
    at, allowed = 0, True
    for keys, cost, lease in checks:
        if len(keys) == 1:
            own: tuple[Any, ...] = (verdicts[at],)
            at += 1
        else:
            own = verdicts[at : at + len(keys)]
            at += len(keys)
        if unusual:
            allowed = not any([verdict[1] for verdict in own])  # noqa: C419 - a list is quicker than a generator
        if own[0][0] < 0:
            decisions.append(_foreign(*keys))
        else:
            decisions.append(_new_decision(Decision, (allowed, keys, own, lease, None, now_us, 0, cost)))
    for index, next_allowed_us in zip(agains[::2], agains[1::2], strict=True):
        if isinstance(decisions[index], Decision):
            decisions[index] = decisions[index]._replace(next_allowed_us=next_allowed_us)
    return decisions


def _is_batch_reply(reply: Any, number_of_keys: int, number_of_checks: int) -> bool:
    """True if a reply can be that of check_batch.lua for that many keys and checks."""
    if type(reply) is not list or len(reply) != 4 or not _is_whole(reply[0]):
        return False
    _, states, unusual, agains = reply
    if not (type(states) is type(unusual) is type(agains) is list) or len(states) != 2 * number_of_keys:
        return False
    if {*map(type, states), *map(type, unusual), *map(type, agains)} - {int} or len(unusual) % 3 or len(agains) % 2:
        return False
    if not all([min(numbers) >= -1 and max(numbers) < EXACT for numbers in (states, unusual, agains) if numbers]):  # noqa: C419
        return False
    # Only remaining (a foreign value) and retry (never) may be -1.
    return (
        min(states[1::2], default=0) >= 0
        and min(unusual[2::3], default=0) >= 0
        and min(agains, default=0) >= 0
        and all([0 <= index < number_of_keys for index in unusual[::3]])  # noqa: C419
        and all([index < number_of_checks for index in agains[::2]])  # noqa: C419
    )


def _is_whole(number: Any, least: int = 0) -> bool:
    """True for an integer that a script could have replied."""
    return type(number) is int and least <= number < EXACT


def unexpected(reply: Any) -> UnexpectedReply:
    return UnexpectedReply(f"the store answered {str(reply)[:100]}, which is not a reply to the command")


def _foreign(*keys: Key) -> ScriptError:
    names = ", ".join(repr(key.limit.name) for key in keys)
    return ScriptError(f"a stored value of {names} was not written by headgate: reset it, or use another namespace")


answers: Final[Callable[..., list[Any] | None]] = speedups.pick("decode_allowed", plain_answers)
