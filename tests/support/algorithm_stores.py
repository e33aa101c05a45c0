"""Stores that run one operation at a given instant: Python's algorithms, and Lua's on a real server."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from hiredis import Reader

from headgate.stores.memory import MemoryStore
from headgate.stores.redis.decoding import decode
from headgate.stores.redis.encoding import (
    Command,
    CommandEncoder,
    Undo,
)
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis import Redis

    from headgate import Limit
    from headgate.stores.operations import Call


SECOND = 1_000_000


serial = count()


class InMemory:
    """Python's algorithms."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)

    def run(self, call: Call, now_us: int) -> Any:
        self.clock.set_us(now_us)
        return self.store.run(call)


RECORDING = """
local issued, lifetime, time = {}, %s, %s
local function recorded(run)
  return function(...)
    issued[#issued + 1] = { ... }
    return ... == 'PTTL' and lifetime or ... == 'TIME' and time or run(...)
  end
end
local reply = (function(redis)
%s
end)({ call = recorded(redis.call), pcall = recorded(redis.pcall) })
return { reply, issued }
"""


def names_of(command: Command) -> list[str]:
    """The stored keys of a command, as a server reads them."""
    reader = Reader(encoding="utf-8")
    reader.feed(b"*%d\r\n%b" % (command.keys.number, command.keys.packed))
    names: list[str] = reader.gets()
    assert reader.gets() is False
    assert names[:1] == ([command.keys.first] if names else [])
    return names


class InRedis:
    """Lua's algorithms, on one connection to a real server, with a record of the commands that a script ran there."""

    def __init__(self, client: Redis, *, server_clock: bool = False) -> None:
        self.client = client
        self.clock = FakeClock()
        self.wire = CommandEncoder(f"differential-{next(serial)}", None if server_clock else self.clock)
        self.reply: Any = None
        self.issued: list[list[str]] = []
        self.pretended_ms: str | None = None
        """What PTTL shall say, where a real one would go on running."""
        self.pretended_us: int | None = None
        """What TIME shall say."""

    def run(self, call: Call | Undo, now_us: int = 0) -> Any:
        (answer,) = self.run_together([call], now_us)
        return answer

    def run_together(self, calls: Sequence[Call | Undo], now_us: int = 0) -> list[Any]:
        """All in one script run."""
        self.clock.set_us(now_us)
        (command,) = self.wire.encode(calls)
        if command.script is None:
            self.client.execute_command(*command.args, *names_of(command))
            return [None]
        time = "nil"
        if self.pretended_us is not None:
            time = f"{{ '{self.pretended_us // SECOND}', '{self.pretended_us % SECOND}' }}"
        recording = RECORDING % (self.pretended_ms or "nil", time, command.script.text.decode())
        names = names_of(command)
        self.reply, self.issued = self.client.eval(recording, len(names), *names, *command.args)
        return decode(command.calls, self.reply)

    @property
    def written(self) -> list[str]:
        """The strings that the last script run wrote, by their keys."""
        strings = [words for name, *words in self.issued if name in ("SET", "SETRANGE", "MSET")]
        return [key for words in strings for key in words[: len(words) & ~1 : 2]]

    @property
    def lifetimes_ms(self) -> dict[str, int]:
        """How long each key is to live that the last script run wrote."""
        given = {}
        for name, *words in self.issued:
            if name == "SET" and "PX" in words:
                given[words[0]] = int(words[words.index("PX") + 1])
            elif name == "PEXPIRE":
                given[words[0]] = int(words[1])
            elif name == "PEXPIREAT":
                now_us = self.reply[0]
                given[words[0]] = int(words[1]) - now_us // 1000
        return given


def more_us(limit: Limit) -> int:
    """What is added to a life that is to be long: up to a sixteenth of the time that an empty bucket takes to fill."""
    return -(-limit.capacity * limit.ticks // (16 * limit.tokens))
