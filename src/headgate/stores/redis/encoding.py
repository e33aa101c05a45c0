"""Encoding of calls as Redis commands. Pure; `pack_keys` is compiled where possible."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from hiredis import pack_command

from headgate import speedups
from headgate.calendars import EdgeText
from headgate.limits import EXACT, FairLimit, Limit
from headgate.stores.operations import (
    Call,
    Check,
    Cost,
    Deposit,
    IdempotentCheck,
    Leave,
    Overdraw,
    Refund,
    Renew,
    Reset,
    TakeBack,
    Withdraw,
    id_validity_us,
    refund_memory_us,
)
from headgate.stores.redis.scripts import Script, ScriptSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.clock import Clock
    from headgate.keys import Key

__all__ = ["NO_KEYS", "Command", "CommandEncoder", "Keys", "Node", "Undo"]

SERVER_MARGIN_MS: Final = 1_000
"""Time that a key outlives its debt, if the clock of the server applies to both."""
CALLER_MARGIN_MS: Final = 3_600_000
"""The same for clocks of clients, which may differ from each other, or be stopped."""

MAX_PACKED: Final = 1_000
"""Combinations of limits whose packed form is cached."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Node(NamedTuple):
    """The address of a server; its role is "server" or "sentinel"."""

    host: str
    port: int
    role: str = "server"
    shard: str = ""
    """The name of its deployment in a sharded store; empty in others."""


class Keys(NamedTuple):
    """The keys of a command, packed."""

    number: int
    packed: bytes
    first: str
    """One of them: all are on the same server."""

    @classmethod
    def of(cls, *names: str) -> Keys:
        return cls(len(names), _packed(names), *names[:1] or ("",))


NO_KEYS: Final = Keys(0, b"", "")


@dataclass(slots=True, eq=False)
class Command:
    """A command for one server, with the calls that its reply answers."""

    script: Script | None
    """None for a plain command, which consists of `args` and then the keys."""
    keys: Keys
    args: Sequence[Any]
    calls: Sequence[Any] = ()
    expects: type | tuple[type, ...] = object
    """The types of the reply to a command without calls."""
    node: Node | None = None
    """The server; None for the only one."""
    asking: bool = False
    send_text: bool = False
    reply: Any = None
    """A value, an error of the server (hiredis.ReplyError), or a StoreError."""
    answers: Any = ()
    """The answers to the calls, in their order."""

    def pack(self) -> bytes:
        # Numbers as text: hiredis crashes if an interrupt (Ctrl-C) comes while it formats a number.
        args: list[Any] = [str(arg) if type(arg) is int else arg for arg in self.args]
        number, keys, _ = self.keys
        if self.script is None:
            packed = b"*%d\r\n%b%b" % (len(args) + number, _packed(args), keys)
        else:
            name, body = ("EVAL", self.script.text) if self.send_text else ("EVALSHA", self.script.sha)
            head = _packed((name, body, str(number)))
            packed = b"*%d\r\n%b%b%b" % (3 + number + len(args), head, keys, _packed(args))
        return b"*1\r\n$6\r\nASKING\r\n" + packed if self.asking else packed


class Undo(NamedTuple):
    """Undo the charge of a check on one shard, as another shard denied it."""

    check: Check
    key: Key
    at_us: int


class CommandEncoder:
    """Encoder for one namespace and clock."""

    def __init__(self, namespace: str, clock: Clock | None, *, database: int = 0) -> None:
        self._prefix = namespace + ":"
        self._clock = clock
        self._packed: dict[tuple[Any, ...], tuple[Any, bytes, bytes]] = {}
        self._script: Callable[[str, tuple[str, ...], int], Script] = ScriptSet.shipped().script
        self._sends_alone = clock is None
        self._store_ahead_us = 0
        """Correction of the clock of this process, once it was found to differ from the server's by more than a day."""
        self._margin = SERVER_MARGIN_MS if clock is None else CALLER_MARGIN_MS
        # Messages reach the subscribers of all databases, so each has a channel of its own.
        self.channel = self.own_name(f"news:{database}" if database else "news")

    def name(self, key: Key) -> str:
        """The stored key of a counter."""
        name = f"{self._prefix}{key.limit.space}:{key.identity}"
        return name if name.isascii() and "{" not in name and "}" not in name else _safe(name)

    def record_name(self, key: Key, id: str) -> str:
        """The stored key of an idempotency record, on the shard of its counter, whose stored key is the hash tag.

        The id is hashed, so that its length does not matter and no text of a caller is stored.
        """
        if type(key.limit) is FairLimit:
            id = f"{id}|{key.limit.member}"
        digest = blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"{{{self.name(key)}}}:id:{digest}"

    def own_name(self, name: str) -> str:
        """The stored key, or channel, of other data than counters: the name of no limit starts with a bare "%"."""
        return _safe(f"{self._prefix}%{name}")

    def own_script(self, name: str) -> Script:
        return ScriptSet.shipped().script(name, (), self._margin)

    def use_scripts(self, scripts: Callable[[str, tuple[str, ...], int], Script], *, is_canary: bool = False) -> None:
        """Decide with these scripts from now on. The replies of a canary are not those of a check that goes alone."""
        self._sends_alone = self._clock is None and not is_canary
        self._script = scripts
        # Last: a thread that fills the new cache uses the new scripts.
        self._packed = {}

    def now(self) -> str | int:
        """The time for the scripts; empty for the clock of the server."""
        return "" if self._clock is None else self._clock.now_us()

    def describe(self, limit: Limit) -> tuple[Any, ...]:
        """The arguments for a limit. Scripts do not know time zones, so they receive the edges of a calendar."""
        period: Any = limit.period_us if limit.calendar is None else limit.calendar.edges(self._edges_now_us())
        if type(limit) is FairLimit:
            period = f"{period} ~{limit.weight}:{_safe(limit.member)}"
        return limit.capacity, limit.tokens, limit.ticks, period

    def replace_edges(self, command: Command, now_us: int) -> bool:
        """Replace the edges of calendars by those around the time of the store; False if there are none."""
        if self._clock is None:
            self._store_ahead_us = now_us - time.time_ns() // 1000
        args = [arg.calendar.edges(now_us) if type(arg) is EdgeText else arg for arg in command.args]
        has_changed = args != command.args
        command.args = args
        return has_changed

    def _edges_now_us(self) -> int:
        if self._clock is not None:
            return self._clock.now_us()
        return time.time_ns() // 1000 + self._store_ahead_us

    def encode(self, calls: Sequence[Call]) -> list[Command]:
        """The commands for one server: one script run for all checks, and one command for each other call."""
        checks: list[Any] = [*calls]
        others: list[Any] = []
        if {*map(type, calls)} != {Check}:
            checks = [call for call in calls if isinstance(call, Check) and type(call) is not IdempotentCheck]
            others = [call for call in calls if not isinstance(call, Check) or type(call) is IdempotentCheck]
        commands = [self.encode_checks(checks)] if checks else []
        return commands + [self.encode_other(call) for call in others]

    def pack_alone(self, call: Call) -> bytes | None:
        """The command of a lone check, packed; None for a call that needs a batch.

        All but the keys depends on limits and cost only, and is cached.
        """
        if type(call) is not Check or call[2] is not None or not self._sends_alone:
            return None
        keys, cost, _ = call
        if len(keys) == 1:
            limit = keys[0][0]
            shape: tuple[Any, ...] = (cost, id(limit))
            if limit.calendar is not None:
                shape += (limit.calendar.edges(self._edges_now_us()),)
            names = b"$%d\r\n%b\r\n" % (len(name := self.name(keys[0]).encode()), name)
        else:
            shape = (cost, *[id(key[0]) if key[0].calendar is None else self.describe(key[0]) for key in keys])
            names = b"".join([b"$%d\r\n%b\r\n" % (len(name := self.name(key).encode()), name) for key in keys])
        packed = self._packed.get(shape)
        if packed is None:
            packed = self._pack_around(call, shape, names)
            if packed is None:
                return None
        return packed[1] + names + packed[2]

    def _pack_around(self, check: Check, shape: tuple[Any, ...], names: bytes) -> tuple[Any, bytes, bytes] | None:
        """The parts before and after the keys of a packed check; None if a canary has started meanwhile."""
        cache = self._packed
        if len(cache) >= MAX_PACKED:
            cache.clear()
        command = self.encode_checks([check])
        if command.script is None or command.script.observer is not None:
            return None
        head, tail = command.pack().split(names, 1)
        # References the limits, so that their ids are not reused.
        packed = cache[shape] = [key.limit for key in check.keys], head, tail
        return packed

    def encode_one(self, check: Check) -> Command:
        (key,), _, lease = check
        limit = key.limit
        args = [*self.describe(limit)]
        # The defaults of the script: cost 1, the clock of the server, and no lease.
        if check.cost != 1 or self._clock is not None or lease is not None:
            args += min(check.costs[0], limit.capacity + 1), self.now(), lease or ""
        its = self._script("check_one", (limit.counter_algorithm,), self._margin)
        return Command(its, Keys.of(self.name(key)), args, [check])

    def encode_checks(self, checks: list[Check]) -> Command:
        """One script run for all checks. Consecutive checks of the same limits and cost are described once."""
        if len(checks) == 1 and len(checks[0].keys) == 1:
            return self.encode_one(checks[0])
        shapes = _Shapes(self.describe)
        limits = tuple([key.limit for key in checks[0].keys])
        uniform = checks, limits, self._heads(limits)
        packed = pack_keys(*uniform)
        if packed is None and pack_keys is not plain_pack_keys:  # C handles the common case only
            packed = plain_pack_keys(*uniform)
        if packed is not None:
            shapes.add(checks[0], limits, len(checks))
        else:
            packed = _pack_names(self._encode_shapes(checks, shapes))
        number, keys, has_duplicates = packed
        args = [self.now(), "meeting" if has_duplicates else "", len(shapes.indices), *shapes.limits, *shapes.groups]
        algorithms = tuple(sorted(shapes.algorithms))
        its = Keys(number, keys, self.name(checks[0].keys[0]))
        return Command(self._script("check_batch", algorithms, self._margin), its, args, checks)

    def encode_idempotent(self, check: IdempotentCheck, validity_us: int) -> Command:
        """A single check with an id, whose records are valid for that time."""
        keys, _, id = check
        names = [self.name(key) for key in keys]
        records = [self.record_name(key, id or "") for key in keys if key.limit.algorithm != "concurrency"]
        shapes = _Shapes(self.describe)
        shapes.add(check, [key.limit for key in keys])
        args = [self.now(), "", len(shapes.indices), *shapes.limits, *shapes.groups, validity_us]
        its = self._script("check_idempotent", tuple(sorted(shapes.algorithms)), self._margin)
        return Command(its, Keys.of(*names, *records), args, [check])

    def _encode_shapes(self, checks: Sequence[Check], shapes: _Shapes) -> list[str]:
        """The stored keys of checks that differ in limits or cost."""
        prefix = self._prefix
        keys: list[str] = []
        heads: tuple[str, ...] = ()
        limits: tuple[Limit, ...]
        last_limits: tuple[Limit, ...] = ()
        last_cost: Cost = 0
        for check in checks:
            check_keys, cost, lease = check
            if len(check_keys) == 1:
                limit, _, identity = check_keys[0]
                keys.append(f"{prefix}{limit.space}:{identity}")
                limits = (limit,)
            else:
                limits, _, identities = zip(*check_keys, strict=True)
                if limits != last_limits:
                    heads = self._heads(limits)
                keys += map(add, heads, identities)
            if lease is None and limits == last_limits and cost == last_cost:
                shapes.repeat()
            else:
                shapes.add(check, limits)
                last_limits, last_cost = (limits, cost) if lease is None else ((), 0)
        return keys

    def _heads(self, limits: Sequence[Limit]) -> tuple[str, ...]:
        return tuple([f"{self._prefix}{limit.space}:" for limit in limits])

    def encode_other(
        self, call: IdempotentCheck | Refund | Renew | Leave | Reset | Deposit | TakeBack | Overdraw | Undo
    ) -> Command:
        if isinstance(call, IdempotentCheck):
            return self.encode_idempotent(call, id_validity_us(call.keys))
        if isinstance(call, Reset):
            names, subjects = map(self.name, call.keys), map(_subject, call.keys)
            return Command(self.own_script("reset"), Keys.of(*names), [self.channel, *subjects], [call])
        limit = call.key.limit
        name = self.name(call.key)
        head = [*self.describe(limit), self.now()]
        if isinstance(call, Renew | Leave):
            verb = "renew" if isinstance(call, Renew) else "leave"
            its = self._script("lease", (limit.counter_algorithm,), self._margin)
            return Command(its, Keys.of(name), [*head, verb, call.id], [call])
        if isinstance(call, Overdraw):
            keys = Keys.of(name, self.record_name(call.key, call.id))
            args = [*head, min(call.amount, limit.capacity), id_validity_us((call.key,))]
            return Command(self._script("overdraw", (limit.counter_algorithm,), self._margin), keys, args, [call])
        if isinstance(call, Deposit | TakeBack):
            its = self._script("deposit", (limit.counter_algorithm,), self._margin)
            if isinstance(call, TakeBack):
                args = [*head, min(call.amount, EXACT - 1), min(call.within_us, limit.period_us)]
                return Command(its, Keys.of(name), args, [call])
            keys = Keys.of(name, self.record_name(call.key, call.id))
            since: Any = "" if call.since_us is None else call.since_us
            return Command(its, keys, [*head, min(call.tokens, EXACT - 1), min(call.ttl_us, EXACT - 1), since], [call])
        # Denials of leases are not cached, so their end is not published.
        message = (
            ("", "") if limit.algorithm in ("concurrency", "fair_share", "pool") else (self.channel, _subject(call.key))
        )
        if isinstance(call, Undo):
            id = call.check.id if isinstance(call.check, IdempotentCheck) else None
            what = [call.check.cost, call.at_us, 0, call.check.id or "", "undo"]
        else:
            id = call.id
            # Capped where integers are exact in Lua, which is more than any key can owe.
            amount = min(call.amount, (EXACT - 1) // (limit.ticks if limit.implementation.SHAPES_BURST else 2))
            charged_us = "" if call.at_us is None else call.at_us
            what = [amount, charged_us, refund_memory_us(call.key), "", "undo" if isinstance(call, Withdraw) else ""]
        keys = Keys.of(name) if id is None else Keys.of(name, self.record_name(call.key, id))
        return Command(
            self._script("refund", (limit.counter_algorithm,), self._margin), keys, [*head, *what, *message], [call]
        )


@dataclass(slots=True)
class _Shapes:
    """The description of checks for the script: their limits, each once, and runs of checks of one shape."""

    describe: Callable[[Limit], tuple[Any, ...]]
    indices: dict[int, int] = field(default_factory=dict)
    limits: list[Any] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    algorithms: set[str] = field(default_factory=set)
    _size_at: int = -1

    def add(self, check: Check, limits: Sequence[Limit], size: int = 1) -> None:
        indices = self.indices
        for limit in limits:
            if id(limit) not in indices:
                indices[id(limit)] = len(indices) + 1
                self.limits += (limit.counter_algorithm, *self.describe(limit))
                self.algorithms.add(limit.counter_algorithm)
        self._size_at = len(self.groups)
        self.groups += (size, check.id or "", len(limits))
        for limit, each in zip(limits, check.costs, strict=True):
            # Capped: any cost beyond the capacity can never be allowed.
            self.groups += (indices[id(limit)], min(each, limit.capacity + 1))

    def repeat(self) -> None:
        self.groups[self._size_at] += 1


Packed: TypeAlias = "tuple[int, bytes, bool]"
"""The number of keys, the packed keys, and True if there are duplicates."""


def plain_pack_keys(checks: Sequence[Check], limits: tuple[Limit, ...], heads: tuple[str, ...]) -> Packed | None:
    """The packed keys of checks that differ in their identities only; None for others. `heads` are the prefixes of the
    stored keys of the limits."""
    all_keys, costs, leases = zip(*checks, strict=True)
    size = len(checks)
    if not costs.count(costs[0]) == leases.count(None) == [*map(len, all_keys)].count(len(limits)) == size:
        return None
    all_limits, _, identities = zip(*chain.from_iterable(all_keys), strict=True)
    return _pack_names([*map(add, heads * size, identities)]) if all_limits == limits * size else None


def _pack_names(keys: list[str]) -> Packed:
    has_duplicates = len(set(keys)) < len(keys)
    if not (joined := "".join(keys)).isascii() or "{" in joined or "}" in joined:
        keys = [_safe(key) for key in keys]
    return len(keys), _packed(keys), has_duplicates


def _packed(args: Sequence[Any]) -> bytes:
    """Arguments of a command, without the header with their number."""
    packed: bytes = pack_command((*args,))
    return packed[packed.index(b"\n") + 1 :]


def _subject(key: Key) -> bytes:
    """The name of a counter in notifications, exactly as callers name it."""
    return f"{key.limit.space}:{key.identity}".encode("utf-8", "surrogatepass")


def _safe(key: str) -> str:
    """Escape braces, which a cluster takes for hash tags, and surrogates, which UTF-8 cannot encode."""
    key = key.replace("{", "%7B").replace("}", "%7D")
    if not key.isascii():
        key = _SURROGATE.sub(lambda found: f"%u{ord(found[0]):X}", key)
    return key


pack_keys: Final[Callable[..., Packed | None]] = speedups.pick("pack_keys", plain_pack_keys)
