"""The same calls on two stores, decision by decision: Python beside the reference model, Lua beside Python.

Seeded, so that every run is the same run, and short: these are the tests that `make mutate` asks of each mutant. A
call is one of the values of `headgate.stores.calls`, a store is anything that runs one at an instant.
"""

from __future__ import annotations

import json
from datetime import timedelta
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

from headgate import Decision, Key, Limit
from headgate.algorithms import NEVER
from headgate.stores.calls import Call, Check, Leave, Refund, Renew, Reset
from headgate.stores.memory import MemoryStore
from headgate.stores.redis.wire import CALLER_MARGIN_MS, Undo, Wire, decode
from headgate.testing import FakeClock
from model import Model, Plan, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from redis import Redis

    from servers import RedisServer

SECOND = 1_000_000
DAY = 86_400 * SECOND
YEAR = 365 * DAY
NOW = 1_763_251_200 * SECOND
LATEST = 2**52 - 1

BUCKETS = ("token_bucket", "gcra", "leaky_bucket")
WINDOWS = ("fixed_window", "sliding_window", "sliding_log")

BUCKET_NUMBERS = [  # quota, period in microseconds, burst
    (1, 1, 1),
    (3, 7, 5),
    (7, 3, 2),
    (10, SECOND, 10),
    (90, 60 * SECOND, 7),
    (999_983, SECOND, 1_000),
    (2**31 - 1, 30 * DAY, 3),
    (10**12 + 39, 3 * SECOND, 5),
    (10**12 + 61, 7 * SECOND, 2),
    (94_906_265, 94_906_267, 94_906_263),  # the capacity just below 2**53
    (1, YEAR, 9),
]
WINDOW_NUMBERS = [
    (1, 1),
    (5, 7),
    (10, SECOND),
    (97, 999_983),
    (1_000_003, 60 * SECOND),
    (2**51 - 1, 10 * YEAR),  # sliding_window's share is beyond 2**53 before it is divided
    (2**40 + 1, 30 * DAY + 1),
]
LEASE_NUMBERS = [(1, 1), (3, 10), (5, SECOND), (7, DAY)]


def limits_of(algorithm: str) -> list[Limit]:
    rows = BUCKET_NUMBERS if algorithm in BUCKETS else LEASE_NUMBERS if algorithm == "concurrency" else WINDOW_NUMBERS
    return [limit_of(algorithm, *row) for row in rows]


def limit_of(algorithm: str, quota: int, period_us: int, burst: int | None = None, name: str = "x") -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), burst=burst, algorithm=algorithm, name=name)


# ------------------------------------------------------------------- stores


class Store(Protocol):
    def run(self, call: Call, now_us: int) -> Any: ...


class InMemory:
    """Python's algorithms."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)

    def run(self, call: Call, now_us: int) -> Any:
        self.clock.set_us(now_us)
        return self.store.run(call)


class InTheory:
    """The reference model."""

    def __init__(self) -> None:
        self.model = Model()

    def run(self, call: Call, now_us: int) -> Any:
        if isinstance(call, Check):
            subjects = [subject_of(key) for key in call.keys]
            told = self.model.check(subjects, now_us, call.cost, call.id)
            verdicts = tuple(
                (one.remaining, NEVER if one.retry_after_us is None else one.retry_after_us, one.reset_after_us, one.delay_us)
                for one in told.outcomes
            )
            return Decision(told.allowed, call.keys, verdicts, call.id, None, now_us)
        if isinstance(call, Reset):
            return self.model.reset(*map(subject_of, call.keys))
        subject = subject_of(call.key)
        if isinstance(call, Refund):
            return self.model.refund(subject, now_us, call.amount, call.id, call.at_us)
        change = self.model.renew if isinstance(call, Renew) else self.model.leave
        return change(subject, now_us, call.id)


def subject_of(key: Key) -> Subject:
    limit = key.limit
    return Subject(Plan(limit.algorithm, limit.quota, limit.period_us, limit.capacity, limit.name), key.identity)


RECORDING = """
local issued = {}
local function call(...)
  issued[#issued + 1] = { ... }
  return redis.call(...)
end
local reply = (function(redis)
%s
end)({ call = call, pcall = redis.pcall })
return { reply, issued }
"""


class InRedis:
    """Lua's algorithms, on one connection to a real server, with a record of what the script did there."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.clock = FakeClock()
        self.wire = Wire("differential", self.clock)
        self.issued: list[list[str]] = []

    def run(self, call: Call | Undo, now_us: int) -> Any:
        (answer,) = self.run_together([call], now_us)
        return answer

    def run_together(self, calls: Sequence[Call | Undo], now_us: int) -> list[Any]:
        """All in one script run."""
        self.clock.set_us(now_us)
        (command,) = self.wire.encode(calls)
        if command.script is None:
            self.client.execute_command(*command.args, *command.keys)
            return [None]
        recording = RECORDING % command.script.text.decode()
        command.reply, self.issued = self.client.eval(recording, len(command.keys), *command.keys, *command.args)
        return decode(command)

    def lifetimes(self) -> dict[str, int]:
        """The expiry, in milliseconds, that the last script run gave to each key."""
        given = {}
        for name, key, *rest in self.issued:
            if name == "SET":
                given[key] = int(rest[rest.index("PX") + 1])
            elif name == "PEXPIRE":
                given[key] = int(rest[0])
        return given


@pytest.fixture(scope="module")
def client(redis7: RedisServer) -> Iterator[Redis]:
    with redis7.client(socket_timeout=5) as client:
        yield client


@pytest.fixture
def lua(client: Redis) -> InRedis:
    client.flushall()
    return InRedis(client)


# ----------------------------------------------------------------- sequences


class Scene:
    """Where a sequence stands: the limit in force, the instant, and what was said last."""

    def __init__(self, random: Random, limits: Sequence[Limit]) -> None:
        self.random = random
        self.limits = limits
        self.limit = random.choice(limits)
        self.now_us = self.said_at_us = random.choice([0, 1, NOW, NOW + 1, LATEST // 2])
        self.charged_at_us: list[int] = []
        self.remaining, self.retry_us, self.reset_us = self.limit.capacity, 0, 0

    def move(self) -> None:
        period_us = self.limit.period_us
        boundary_us = (self.now_us // period_us + 1) * period_us
        step = self.random.choice(
            [
                *[self.now_us] * 6,
                *[self.now_us + self.random.randint(-3, 3)] * 2,
                *[self.said_at_us + self.retry_us + self.random.randint(-1, 1)] * 5,
                *[self.said_at_us + self.reset_us + self.random.randint(-1, 1)] * 2,
                *[boundary_us + self.random.randint(-1, 1)] * 2,
                self.now_us + self.random.randint(0, 2 * period_us),
                self.now_us + period_us,
                self.now_us - period_us,
                self.now_us - self.random.randint(0, 3 * period_us),
            ]
        )
        self.now_us = min(max(0, step), LATEST)

    def cost(self) -> int:
        capacity = self.limit.capacity
        return self.random.choice(
            [0, 1, 1, 1, 2, (capacity + 1) // 2, self.remaining, self.remaining, self.remaining + 1, capacity, capacity + 1]
        )

    def call(self) -> Call:
        key = self.limit.by("ada")
        id = self.random.choice("abc") if self.limit.algorithm == "concurrency" else None
        kind = self.random.random()
        if kind < 0.08:
            self.limit = self.random.choice(self.limits)
            return Check((self.limit.by("ada"),), self.cost(), id)
        if kind < 0.7:
            return Check((key,), self.cost(), id)
        if kind < 0.72:
            return Reset((key,))
        if id is not None:
            return (Renew if kind < 0.85 else Leave)(key, id)
        amount = self.random.choice([1, 1, 2, (self.limit.capacity + 1) // 2, self.limit.capacity])
        charged_at_us = self.random.choice(self.charged_at_us[-4:] or [None]) if kind < 0.85 else None
        return Refund(key, amount, None, charged_at_us)

    def hear(self, call: Call, answer: Any) -> None:
        if isinstance(call, Check):
            self.said_at_us = self.now_us
            self.remaining, self.retry_us, self.reset_us, _ = answer.verdicts[0]
            if answer.allowed and call.cost:
                self.charged_at_us.append(self.now_us)


def play(scene: Scene, one: Store, other: Store, *, length: int) -> None:
    told = []
    for _ in range(length):
        scene.move()
        call = scene.call()
        answer = one.run(call, scene.now_us)
        told.append((scene.now_us, call, answer))
        assert other.run(call, scene.now_us) == answer, told
        scene.hear(call, answer)


ALGORITHMS = (*BUCKETS, *WINDOWS, "concurrency")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_python_decides_as_the_model(algorithm):
    import time
    t=time.time(); n=0
    for seed in range(60):
        scene = Scene(Random(seed), limits_of(algorithm))
        try:
            play(scene, InMemory(), InTheory(), length=25)
        except AssertionError as e:
            n+=1
            if n==1: print(seed, str(e)[:3000])
    print(algorithm, time.time()-t, n)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lua_decides_as_python(lua, algorithm):
    import time
    t=time.time(); n=0
    for seed in range(60):
        scene = Scene(Random(seed), limits_of(algorithm))
        try:
            lua.client.flushall()
            play(scene, InMemory(), lua, length=25)
        except AssertionError as e:
            n+=1
            if n==1: print(seed, str(e)[:3000])
    print(algorithm, time.time()-t, n)
