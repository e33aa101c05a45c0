"""The same calls on two stores, answer by answer: Python beside the reference model, Lua beside Python.

Seeded, so that every run is the same run, and short: these are the tests that `make mutate` asks of each mutant. A
call is one of the values of `headgate.stores.operations`; a store is anything that carries one out at an instant.
"""

from __future__ import annotations

from datetime import timedelta
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from redis.exceptions import ResponseError

from headgate import Decision, InvalidLimit, Key, Limit, ScriptError
from headgate.algorithms import NEVER
from headgate.stores.operations import Call, Check, Leave, Refund, Renew, Reset
from headgate.stores.redis.encoding import (
    CALLER_MARGIN_MS,
    MAX_PACKED,
    SERVER_MARGIN_MS,
    Command,
    CommandEncoder,
    Undo,
)
from headgate.testing import FakeClock
from support.algorithm_stores import SECOND, InMemory, InRedis, more_us, names_of
from support.model import Model, Plan, Subject
from support.next_allowed import with_again

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from redis import Redis

    from support.servers import RedisServer

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
    (10**12 + 39, 3 * SECOND, 5),  # between this and the next, fractions multiply to 10**24
    (10**12 + 61, 7 * SECOND, 2),
    (94_906_265, 94_906_267, 94_906_263),  # the capacity just fits below 2**53
    (1, YEAR, 9),
]
WINDOW_NUMBERS = [
    (1, 1),
    (5, 7),
    (10, SECOND),
    (97, 999_983),
    (1_000_003, 60 * SECOND),
    (2**40 + 1, 30 * DAY + 1),
    (2**51 - 1, 10 * YEAR),
]
LEASE_NUMBERS = [(1, 1), (3, 10), (5, SECOND), (7, DAY)]
NUMBERS: dict[str, list[tuple[int, ...]]] = {
    **{algorithm: [*BUCKET_NUMBERS] for algorithm in BUCKETS},
    **{algorithm: [*WINDOW_NUMBERS] for algorithm in WINDOWS},
    "concurrency": [*LEASE_NUMBERS],
}

each_algorithm = pytest.mark.parametrize("algorithm", NUMBERS)


def limit_of(algorithm: str, quota: int, period_us: int, burst: int | None = None, name: str = "x") -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), burst=burst, algorithm=algorithm, name=name)


def plans_of(algorithm: str) -> list[Limit]:
    return [limit_of(algorithm, *numbers, name=algorithm) for numbers in NUMBERS[algorithm]]


# ------------------------------------------------------------------- stores


class Store(Protocol):
    def run(self, call: Call, now_us: int) -> Any: ...


class InMemoryWithAgain(InMemory):
    """And when the same request would pass again, as Redis says."""

    def run(self, call: Call, now_us: int) -> Any:
        answer = super().run(call, now_us)
        return with_again(answer, call.cost, lambda: self.store.run(call)) if isinstance(call, Check) else answer


class InTheory:
    """The reference model."""

    def __init__(self) -> None:
        self.model = Model()

    def run(self, call: Call, now_us: int) -> Any:
        if isinstance(call, Check):
            told = self.model.check([subject_of(key) for key in call.keys], now_us, call.cost, call.id)
            verdicts = tuple(
                (one.remaining, NEVER if one.unsatisfiable else one.retry_after_us, one.reset_after_us, one.delay_us)
                for one in told.outcomes
            )
            return Decision(told.allowed, call.keys, verdicts, call.id, None, now_us, 0, call.cost)
        if isinstance(call, Reset):
            return self.model.reset(*map(subject_of, call.keys))
        subject = subject_of(call.key)
        if isinstance(call, Refund):
            return self.model.refund(subject, now_us, call.amount, call.id, call.at_us)
        return (self.model.renew if isinstance(call, Renew) else self.model.leave)(subject, now_us, call.id)


def subject_of(key: Key) -> Subject:
    limit = key.limit
    return Subject(Plan(limit.algorithm, limit.quota, limit.period_us, limit.capacity, limit.name), key.identity)


class InRedisForLongEnough(InRedis):
    """And whatever is written lives until it is as new, and for the margin."""

    def run(self, call: Call | Undo, now_us: int = 0) -> Any:
        answer = super().run(call, now_us)
        if isinstance(call, Reset):
            return answer
        lifetimes_ms = self.lifetimes_ms
        changes = zip(call.keys, call.costs, strict=True) if isinstance(call, Check) else [(call.key, call[1])]
        for key, amount in changes:
            lifetime_ms = lifetimes_ms.get(self.wire.name(key))
            if lifetime_ms is None:
                assert not answer or amount == 0, "what was charged or given back must be written"
            else:
                is_mended = ["PTTL", self.wire.name(key)] in self.issued
                decision = super().run(Check((key,), 0), now_us)
                assert lifetime_ms == lifetime_of(decision, more_us=more_us(key.limit) if is_mended else 0)
        return answer


def lifetime_of(decision: Decision, margin_ms: int = CALLER_MARGIN_MS, more_us: int = 0) -> int:
    return -(-(decision.reset_after_us + more_us) // 1000) + margin_ms


@pytest.fixture(scope="module")
def client(redis7: RedisServer) -> Iterator[Redis]:
    with redis7.client(socket_timeout=5) as client:
        yield client


@pytest.fixture
def lua(client: Redis) -> InRedis:
    return InRedis(client)


# ---------------------------------------------------------------- sequences
class Scene:
    """Where a sequence of calls stands: the limits in force, the instant, and what was said last."""

    def __init__(self, seed: int, *choices: Sequence[Limit], dated: bool = True) -> None:
        self.random = Random(seed)
        self.dated = dated
        """Whether refunds may say when it was that they were charged."""
        self.choices = choices
        """For each limit of a request, the plans that it may change between."""
        self.limits = [self.random.choice(plans) for plans in choices]
        self.now_us = self.said_at_us = self.random.choice([0, 1, NOW, NOW + 1, LATEST // 2])
        self.charged_at_us: list[int] = []
        self.remaining, self.retry_us, self.reset_us = self.limits[0].capacity, 0, 0

    def move(self) -> None:
        """To the present, to a promised instant, to the end of a window, or back; a microsecond off as often as not."""
        draw, period_us = self.random, self.limits[0].period_us
        instants = {
            self.now_us: 8,
            self.said_at_us + self.retry_us: 5,
            self.said_at_us + self.reset_us: 2,
            (self.now_us // period_us + 1) * period_us: 2,
            self.now_us + period_us: 1,
            self.now_us + draw.randint(0, 2 * period_us): 1,
            self.now_us - period_us: 1,
            self.now_us - draw.randint(0, 3 * period_us): 1,
        }
        (instant_us,) = draw.choices(list(instants), list(instants.values()))
        self.now_us = min(max(0, instant_us + draw.choice([-1, 0, 0, 0, 1])), LATEST)

    def call(self) -> Call:
        draw = self.random
        kind = draw.random()
        if kind < 0.1:
            place = draw.randrange(len(self.choices))
            self.limits[place] = draw.choice(self.choices[place])
        keys = tuple(limit.by("ada") for limit in self.limits)
        leased = [key for key in keys if key.limit.algorithm == "concurrency"]
        id = draw.choice("abc") if leased else None
        if kind < 0.7:
            return Check(keys, tuple(self._cost() for _ in keys) if kind < 0.3 and len(keys) > 1 else self._cost(), id)
        key = draw.choice(keys)
        if kind < 0.72:
            return Reset((key,))
        if key in leased:
            return (Renew if kind < 0.86 else Leave)(key, draw.choice("abc"))
        charged_at_us = (
            draw.choice(self.charged_at_us[-4:]) if kind < 0.86 and self.dated and self.charged_at_us else None
        )
        return Refund(
            key, draw.choice([1, 1, 2, (key.limit.capacity + 1) // 2, key.limit.capacity]), None, charged_at_us
        )

    def hear(self, call: Call, answer: Any) -> None:
        if isinstance(call, Check):
            self.said_at_us = self.now_us
            self.remaining, self.retry_us, self.reset_us = (
                answer.remaining,
                answer.retry_after_us or 0,
                answer.reset_after_us,
            )
            if answer.allowed and any(call.costs):
                self.charged_at_us.append(self.now_us)

    def _cost(self) -> int:
        capacity, left = self.limits[0].capacity, self.remaining
        return self.random.choice([0, 1, 1, 1, 2, (capacity + 1) // 2, left, left, left + 1, capacity, capacity + 1])


def play(scene: Scene, one: Store, other: Store, *, length: int = 25) -> None:
    told: list[Any] = []
    for _ in range(length):
        scene.move()
        call = scene.call()
        answer = one.run(call, scene.now_us)
        told.append((scene.now_us, call, answer))
        assert other.run(call, scene.now_us) == answer, "\n".join(map(str, told))
        scene.hear(call, answer)


@each_algorithm
def test_python_decides_as_the_model(algorithm: str) -> None:
    for seed in range(40):
        play(Scene(seed, plans_of(algorithm), dated=False), InMemory(), InTheory())


@each_algorithm
def test_lua_decides_as_python(client: Redis, algorithm: str) -> None:
    for seed in range(40):
        play(Scene(seed, plans_of(algorithm)), InMemoryWithAgain(), InRedisForLongEnough(client))


@pytest.mark.parametrize("seed", range(12))
def test_lua_decides_over_several_limits_as_python(client: Redis, seed: int) -> None:
    algorithms = Random(seed).sample(list(NUMBERS), 2 + seed % 2)
    play(Scene(seed, *map(plans_of, algorithms)), InMemoryWithAgain(), InRedisForLongEnough(client))


@pytest.mark.parametrize("seed", range(12))
def test_lua_decides_requests_that_ride_together_as_if_one_by_one(lua: InRedis, seed: int) -> None:
    draw, python = Random(seed), InMemoryWithAgain()
    limits = [limit_of(algorithm, 4, SECOND, name=algorithm) for algorithm in draw.sample(list(NUMBERS), 3)]
    for now_us in range(NOW, NOW + 2 * SECOND, SECOND // 4):
        checks: list[Check] = []
        for _ in range(draw.choice([1, 4])):  # of one group, no two meet at a key
            met, cost = draw.sample(limits, draw.choice([1, 1, 2, 3])), draw.choice([0, 1, 1, 2])
            if len(met) > 1 and draw.random() < 0.5:
                cost = tuple(draw.choice([0, 1, 2]) for _ in met)
            id = "a" if any(limit.algorithm == "concurrency" for limit in met) else None
            # Alike but for the identity: these are described to the script once, as a group.
            identities = draw.sample(["ada", "bob", "eve"], draw.choice([1, 2, 3]))
            checks += [Check(tuple(limit.by(identity) for limit in met), cost, id) for identity in identities]
        assert lua.run_together(checks, now_us) == [python.run(check, now_us) for check in checks]


def test_lua_reports_a_wait_of_one_microsecond(lua: InRedis) -> None:
    one, other = (limit_of("leaky_bucket", 2, 2, name=name).by("ada") for name in ("one", "other"))
    for keys in ((one,), (one, other)):
        lua.run(Reset(keys))
        told = lua.run_together([Check(keys, 1)] * 3, NOW)
        assert [(decision.delay_us, decision.retry_after_us) for decision in told] == [(0, 0), (1, 0), (0, 1)]


def test_lua_writes_a_key_once_however_many_requests_meet_there(lua: InRedis) -> None:
    one, other = (limit_of("token_bucket", 9, SECOND, name=name) for name in ("one", "other"))
    for checks, keys in (
        ([Check((one.by("ada"),), 1)] * 5, 1),
        ([Check((one.by(), other.by(name)), 1) for name in ("ada", "bob")], 3),
        ([Check((one.by(name), other.by(name)), 1) for name in ("eve", "joe")], 4),
    ):
        assert all(decision.allowed for decision in lua.run_together(checks, NOW))
        assert len(lua.written) == len(set(lua.written)) == len(lua.lifetimes_ms) == keys


@pytest.mark.parametrize("together", [1, 2])
def test_lua_reports_the_next_time_only_when_allowed(lua: InRedis, together: int) -> None:
    """Also where the plan has changed, so that a denial is written down."""
    old, new = (limit_of("token_bucket", quota, DAY) for quota in (5, 4))
    assert lua.run(check(old, 5), NOW).next_allowed_us == DAY
    denied = lua.run_together([check(new, 1)] * together, NOW)
    assert [(one.allowed, one.next_allowed_us) for one in denied] == [(False, 0)] * together


def test_lua_gives_no_key_a_lifetime_for_being_looked_at_together_with_others(lua: InRedis) -> None:
    queue = limit_of("leaky_bucket", 5, SECOND).by("ada")
    lua.run_together([Check((queue,), 1)] * 2, NOW)
    assert [peek.delay_us for peek in lua.run_together([Check((queue,), 0)] * 2, NOW)] == [400_000] * 2
    assert {name for name, *_ in lua.issued} == {"MGET"}


@pytest.mark.parametrize(("cost", "written"), [(0, 0), (1, 1)])
def test_lua_adopts_no_plan_of_what_a_denied_request_only_looks_at(lua: InRedis, cost: int, written: int) -> None:
    old, new = (limit_of("token_bucket", quota, DAY).by("ada") for quota in (5, 4))
    narrow = limit_of("token_bucket", 1, DAY, name="narrow").by("ada")
    lua.run(Check((old, narrow), 1), NOW)
    assert lua.run(Check((new, narrow), (cost, 1)), NOW).denied_by == ("narrow",)
    assert len(lua.written) == written


@each_algorithm
def test_state_is_redated_from_the_same_microsecond_on_everywhere(client: Redis, algorithm: str) -> None:
    """One period and a microsecond in the future; for gcra, whose instant is a period later, two periods."""
    for limit in plans_of(algorithm):
        period_us = limit.capacity * limit.period_us // limit.quota
        for used in {1, limit.capacity}:
            for back_us in {
                period_us - 1,
                period_us,
                period_us + 1,
                2 * period_us,
                2 * period_us + 1,
                2 * period_us + 2,
            }:
                python, lua, theory = InMemory(), InRedis(client), InTheory()
                for store in (python, lua, theory):
                    store.run(check(limit, used, "a"), NOW)
                for cost, at_us in ((limit.capacity, NOW - back_us), (0, NOW - back_us + 1), (1, NOW - back_us + 1)):
                    request = check(limit, cost, "b")
                    told = python.run(request, at_us)
                    assert lua.run(request, at_us)._replace(next_allowed_us=0) == told
                    assert theory.run(request, at_us).verdicts == told.verdicts


# ------------------------------------------------------------------ stories


def check(limit: Limit, cost: int, id: str | None = None) -> Check:
    return Check((limit.by("ada"),), cost, id)


LOG = limit_of("sliding_log", 5, SECOND)
LOG_REFUND = Refund(LOG.by("ada"), 1, at_us=NOW)
LEASES = limit_of("concurrency", 8, SECOND)
SLOW, SLOW_AND_SMALL = (limit_of("gcra", 3, 7, burst) for burst in (4, 3))
SEVENTHS, HALVES = limit_of("gcra", 7, 3, 3), limit_of("gcra", 2, 3, 3)
THIRDS = limit_of("token_bucket", 1, 3, 5)
LARGE, SMALL = (limit_of("token_bucket", 1, 2, burst) for burst in (9, 5))

STORIES: dict[str, tuple[list[tuple[int, Call]], tuple[int, int, int, int]]] = {
    "a refund that reaches over several charges leaves the oldest": (
        [(0, check(LOG, 1)), (1, check(LOG, 1)), (2, check(LOG, 1)), (3, Refund(LOG.by("ada"), 2)), (3, check(LOG, 0))],
        (4, 0, SECOND - 3, 0),
    ),
    "a refund of one of two charges of an instant leaves the other": (
        [(0, check(LOG, 1)), (0, check(LOG, 1)), (1, check(LOG, 1)), (1, LOG_REFUND), (1, check(LOG, 0))],
        (3, 0, SECOND, 0),
    ),
    "a debt is cut to the new plan's, also by a part of a microsecond": (
        [(0, check(SLOW, 4)), (2, check(SLOW_AND_SMALL, 0))],
        (0, 0, 7, 0),
    ),
    "what is used of a bucket stays used under a smaller plan, to a part of a token": (
        [(0, check(LARGE, 4)), (1, check(SMALL, 2))],
        (1, 1, 7, 0),
    ),
    "what is used of a bucket stays used under a larger plan, to a part of a token": (
        [(0, check(SMALL, 4)), (1, check(LARGE, 6))],
        (5, 1, 7, 0),
    ),
    "a bucket of which more is used than the new plan holds is empty": (
        [(0, check(LARGE, 9)), (1, check(SMALL, 1))],
        (0, 2, 10, 0),
    ),
    "what is used is rounded up where the new plan counts in larger parts of a token": (
        [(0, check(THIRDS, 1)), (1, check(SMALL, 0))],
        (4, 0, 2, 0),
    ),
    "a full bucket stays full": (
        [(0, check(SMALL, 5)), (10, check(LARGE, 9))],
        (0, 0, 18, 0),
    ),
    "an instant a seventh of a microsecond beyond two periods is redated": (
        [(0, check(SEVENTHS, 3)), (1, check(SEVENTHS, 1)), (-1, check(SEVENTHS, 1))],
        (0, 1, 2, 0),
    ),
    "an instant exactly two periods ahead is not redated": (
        [(0, check(HALVES, 2)), (-6, check(HALVES, 1))],
        (0, 6, 9, 0),
    ),
    "leases that end together are freed together": (
        [*((0, check(LEASES, 1, id)) for id in "abcdefgh"), (1, check(LEASES, 5, "i"))],
        (0, SECOND - 1, SECOND - 1, 0),
    ),
}


@pytest.mark.parametrize(("calls", "verdict"), STORIES.values(), ids=STORIES)
def test_python_and_lua_agree(lua: InRedis, calls: list[tuple[int, Call]], verdict: tuple[int, int, int, int]) -> None:
    for store in (InMemory(), lua):
        *_, last = [store.run(call, NOW + after_us) for after_us, call in calls]
        assert last.verdicts == (verdict,)


# ---------------------------------------------------------- what is written


def drained(algorithm: str, store: Store, now_us: int = NOW, name: str = "x") -> Key:
    """A key that was just used up: two of two, for a second."""
    key = limit_of(algorithm, 2, SECOND, name=name).by("ada")
    assert store.run(Check((key,), 2, "a"), now_us)
    return key


@each_algorithm
def test_lua_writes_nothing_for_a_peek_or_a_denial_where_nothing_has_to_be_migrated(
    lua: InRedis, algorithm: str
) -> None:
    key, other = drained(algorithm, lua), limit_of(algorithm, 5, SECOND, name="other").by("ada")
    changed = limit_of(algorithm, 3, SECOND).by("ada")
    before = lua.client.dump(lua.wire.name(key))
    for keys, cost in (((key,), 0), ((changed,), 0), ((changed, other), 0), ((key,), 1), ((key, other), 1)):
        request = Check(keys, cost, "b")
        for together in ([request], [request, Check((other,), 0, "c")]):
            lua.run_together(together, NOW + 1)
            assert lua.lifetimes_ms == {}
            assert lua.client.dump(lua.wire.name(key)) == before
            assert not lua.client.exists(lua.wire.name(other))


@pytest.mark.parametrize(("left_ms", "is_given_more"), [(-2, 0), (-1, 1), (0, 1), (1999, 1), (2000, 0), (2001, 0)])
def test_lua_gives_its_time_to_a_key_that_would_live_too_long_or_too_short(
    lua: InRedis, left_ms: int, is_given_more: bool
) -> None:
    """Here the key owes for two seconds. It gets a sixteenth more, as its state could have spoken of a long life."""
    key, other = drained("sliding_window", lua), limit_of("sliding_window", 5, SECOND, name="other").by("ada")
    lua.pretended_ms = str(left_ms)
    alone, beside, peek = Check((key,), 1), Check((key, other), 1), Check((key,), 0)
    for checks in ([alone], [beside], [alone, peek], [beside, peek]):
        assert not lua.run_together(checks, NOW)[0]
        assert lua.lifetimes_ms.get(lua.wire.name(key)) == (2063 + CALLER_MARGIN_MS if is_given_more else None)
    for checks in ([peek], [peek, peek], [Check((key, other), 0)]):
        lua.run_together(checks, NOW)
        assert lua.lifetimes_ms == {}


def test_lua_reads_the_servers_clock_where_no_other_is_given(client: Redis) -> None:
    lua = InRedis(client, server_clock=True)
    key, leased = (limit_of(algorithm, 5, YEAR).by("ada") for algorithm in ("fixed_window", "concurrency"))
    for call in (Check((key,), 1), Check((leased,), 1, "a")):
        earliest_us, decision, latest_us = time_us(client), lua.run(call), time_us(client)
        assert earliest_us <= decision.at_us <= latest_us
        assert lua.lifetimes_ms == {lua.wire.name(call.keys[0]): lifetime_of(decision, SERVER_MARGIN_MS)}
    assert lua.run(Refund(key, 1))
    assert lua.run(Renew(leased, "a"))
    assert lua.run(Check((leased,), 0, "a")).reset_after_us <= YEAR


def test_lua_says_by_the_servers_clock_when_the_keys_of_a_batch_end(client: Redis) -> None:
    lua = InRedis(client, server_clock=True)
    checks = [Check((limit_of("gcra", 7, 7 * days * DAY, name=f"{days}").by(),), 1) for days in (1, 2, 3)]
    told = lua.run_together(checks)
    ends_ms = [-(-(each.at_us + each.reset_after_us) // 1000) + SERVER_MARGIN_MS for each in told]
    assert [each.reset_after_us for each in told] == [DAY, 2 * DAY, 3 * DAY]
    assert ends_ms == [lua.client.pexpiretime(lua.wire.name(check.keys[0])) for check in checks]


def test_lua_reads_and_writes_more_keys_in_a_run_than_one_command_takes(lua: InRedis) -> None:
    limit = limit_of("token_bucket", 2, DAY)
    checks = [Check((limit.by(number),), 1) for number in range(8_200)]
    for left in (1, 0):
        assert {(decision.allowed, decision.remaining) for decision in lua.run_together(checks, NOW)} == {(True, left)}
        assert len(lua.lifetimes_ms) == 8_200
    assert not any(lua.run_together(checks, NOW))


def time_us(client: Redis) -> int:
    seconds, microseconds = client.time()
    return seconds * SECOND + microseconds


FOREIGN = {
    "a text": ("SET", "nonsense"),
    "a text that begins well": ("SET", "1 2 nonsense"),
    "a list": ("RPUSH", "nonsense"),
    "a hash": ("HSET", "a", "nonsense"),
    "a log that ends well": ("ZADD", NOW, "nonsense", NOW + 1, "2:1:1000000"),
    "a log that begins well": ("ZADD", NOW, "1:1:1000000", NOW + 1, "nonsense"),
}


@pytest.mark.parametrize("cost", [0, 1, 7, 10**30, (1, 2, 500)], ids=str)
@pytest.mark.parametrize("who", ["ada", "{ada}", "ä|%", "\ud800", "a" * 1000, ""])
def test_what_goes_alone_is_packed_as_it_is_among_others(who: str, cost: Any) -> None:
    limits = [limit_of(algorithm, 5, 1, name=algorithm) for algorithm in ("token_bucket", "gcra", "fixed_window")]
    wire = CommandEncoder("headgate", None)
    for met in (limits, limits[::-1], limits[:1] if isinstance(cost, int) else limits):
        check = Check(tuple([limit.by(who) for limit in met]), cost)
        for _ in range(2):  # also when it is kept
            assert wire.pack_alone(check) == wire.encode_checks([check]).pack()


SHAPED = tuple(limit_of("gcra", 5, 1, name=name) for name in "abc")


def told_of(command: Command) -> list[tuple[str | None, list[tuple[str, int]]]]:
    """What a script is told of each request: its lease, and the keys with the cost on each, whose limits must fit."""
    _, _, count, *args = command.args
    stored = names_of(command)
    names = [limit.name for key in stored for limit in SHAPED if key.startswith(f"headgate:{limit.space}:")]
    described, groups, keys = args[: 5 * count], args[5 * count :], iter(zip(stored, names, strict=True))
    assert all(tuple(described[at : at + 2]) == ("gcra", 5) for at in range(0, len(described), 5))
    limits: dict[int, str] = {}
    told = []
    while groups:
        size, lease, length, *groups = groups
        pairs, groups = groups[: 2 * length], groups[2 * length :]
        for _ in range(size):
            request = [(next(keys), pairs[at], pairs[at + 1]) for at in range(0, 2 * length, 2)]
            for (_, name), index, _ in request:
                assert limits.setdefault(index, name) == name
            told.append((lease or None, [(key, cost) for (key, _), _, cost in request]))
    assert len({*limits.values()}) == len(limits) == count
    assert next(keys, None) is None
    return told


def test_batch_says_of_each_request_what_it_meets() -> None:
    draw, wire = Random(5), CommandEncoder("headgate", None)
    a, b, _ = SHAPED
    # Of other lengths, and yet the same limits one after the other.
    batches = [[Check((a.by("x"), b.by("x")), 1), Check((a.by("x"),), 1), Check((b.by("x"), a.by("x"), b.by("y")), 1)]]
    for _ in range(500):
        met, cost, lease = draw.sample(SHAPED, draw.randint(1, 3)), draw.choice([0, 1, 99]), None
        batch = []
        for _ in range(draw.randint(2, 5)):
            if draw.random() < 0.2:
                met, cost = draw.sample(SHAPED, draw.randint(1, 3)), draw.choice([0, 1, (1, 2, 3)[: len(met)]])
            if isinstance(cost, tuple) and len(cost) != len(met):
                cost = 2
            lease = draw.choice([None] * 9 + ["lease"])
            batch.append(Check(tuple(limit.by(draw.choice("xyz")) for limit in met), cost, lease))
        batches.append(batch)
    for checks in batches:
        assert told_of(wire.encode_checks(checks)) == [
            (check.id, [(wire.name(key), min(cost, 6)) for key, cost in zip(check.keys, check.costs, strict=True)])
            for check in checks
        ]


def test_what_takes_a_lease_or_brings_the_time_goes_the_long_way() -> None:
    check = Check((limit_of("gcra", 5, 1, name="posts").by("ada"),), 1)
    assert CommandEncoder("headgate", None).pack_alone(check._replace(id="a")) is None
    assert CommandEncoder("headgate", FakeClock()).pack_alone(check) is None
    assert CommandEncoder("headgate", None).pack_alone(Reset(check.keys)) is None


def test_what_is_kept_of_packed_checks_is_bounded() -> None:
    wire, key = CommandEncoder("headgate", None), limit_of("gcra", 5, 1, name="posts").by("ada")
    for cost in range(3 * MAX_PACKED):
        wire.pack_alone(Check((key,), cost))
        assert len(wire._packed) <= MAX_PACKED


def test_lua_uses_the_short_form_for_a_single_check(lua: InRedis) -> None:
    key = limit_of("leaky_bucket", 2, 2, name="queue").by("ada")
    assert len(CommandEncoder("headgate", None).encode_one(Check((key,), 1)).args) == 4
    lua.run(Check((key,), 1), NOW)
    assert lua.reply == [NOW, 1, 1]
    lua.run(Check((key,), 1), NOW)
    assert lua.reply == [NOW, 0, 2, 0, 1, 1]
    lua.run(Check((key,), 1), NOW)
    assert lua.reply == [NOW, 0, 2, 1, 0, 0]


NO_NUMBERS = ["a 5", "5 a", "5", "", " ", "1 2 3", "5 ", " 5", f"{NOW} a", f"{NOW} 5a", f"{NOW}a 5"]


@pytest.mark.parametrize("numbers", NO_NUMBERS)
@pytest.mark.parametrize("algorithm", ["gcra", "leaky_bucket", "token_bucket"])
def test_lua_takes_no_numbers_from_a_text_only_for_its_signature(lua: InRedis, algorithm: str, numbers: str) -> None:
    key, other = (limit_of(algorithm, 5, SECOND, name=name).by("ada") for name in ("one", "other"))
    text = f"{numbers} 1/200000/5"
    lua.run_together([Check((other,), 1)] * 2, NOW)
    assert lua.client.get(lua.wire.name(other)).endswith(" 1/200000/5")
    lua.client.set(lua.wire.name(key), text)
    for checks in ([Check((key,), 1)], [Check((key, other), 1)], [Check((key,), 1), Check((other,), 0)]):
        assert isinstance(lua.run_together(checks, NOW)[0], ScriptError)
    assert lua.client.get(lua.wire.name(key)) == text


@pytest.mark.parametrize("numbers", NO_NUMBERS)
@each_algorithm
def test_lua_charges_once_beside_a_foreign_value(lua: InRedis, algorithm: str, numbers: str) -> None:
    beside, python = limit_of(algorithm, 9, SECOND, name="beside"), InMemoryWithAgain()
    foreign = limit_of("token_bucket", 5, SECOND, name="foreign").by("ada")
    lua.client.set(lua.wire.name(foreign), f"{numbers} 1/200000/5")
    before, *after = [Check((beside.by(name),), 2, lease) for name, lease in (("ada", "a"), ("bob", "b"), ("ada", "c"))]
    for _ in range(2):
        answers = lua.run_together([before, Check((foreign,), 1), *after], NOW)
        assert isinstance(answers.pop(1), ScriptError)
        assert answers == [python.run(check, NOW) for check in (before, *after)]


def test_lua_charges_once_with_restricted_permissions(redis7: RedisServer, client: Redis) -> None:
    client.acl_setuser("no-hashes", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-hset"])
    log, leases = (limit_of(name, 5, SECOND, name=name).by("ada") for name in ("sliding_log", "concurrency"))
    with redis7.client(single_connection_client=True) as login:
        login.execute_command("AUTH", "no-hashes", "any")
        lua = InRedis(login)
        with pytest.raises(ResponseError, match="can't run this command"):
            lua.run_together([Check((log,), 1), Check((leases,), 1, "a")], NOW)
        assert lua.run(Check((log,), 0), NOW).remaining == 4
    client.acl_deluser("no-hashes")


@pytest.mark.parametrize("command", FOREIGN.values(), ids=FOREIGN)
@each_algorithm
def test_lua_leaves_what_is_not_headgates_as_it_is(lua: InRedis, algorithm: str, command: tuple[Any, ...]) -> None:
    key, other = (limit_of(algorithm, 5, SECOND, name=name).by("ada") for name in ("foreign", "other"))
    name = lua.wire.name(key)
    lua.client.execute_command(command[0], name, *command[1:])
    before = lua.client.dump(name)
    alone, beside, peek = Check((key,), 1, "a"), Check((other, key), 6, "a"), Check((other,), 0, "a")
    as_new, refused = [5, 0], [-1, 0]
    for checks, reply in (
        ([alone], [-1, 0]),
        ([beside], [refused * 2, [], []]),
        ([alone, peek], [refused + as_new, [], []]),
        ([beside, peek], [refused * 2 + as_new, [], []]),
    ):
        assert isinstance(lua.run_together(checks, NOW)[0], ScriptError)
        assert lua.reply == [NOW, *reply]
    assert isinstance(lua.run_together([peek, beside], NOW)[1], ScriptError)
    assert lua.reply == [NOW, as_new + refused * 2, [], []]
    for call in [Renew(key, "a"), Leave(key, "a")] if algorithm == "concurrency" else [Refund(key, 1)]:
        assert isinstance(lua.run(call, NOW), ScriptError)
        assert lua.reply in (-1, [-1, 0, 0, 0, 0])
    assert lua.client.dump(name) == before
    assert not lua.client.exists(lua.wire.name(other))


@each_algorithm
def test_keys_of_one_run_have_instants_and_lifetimes_of_their_own(lua: InRedis, algorithm: str) -> None:
    """What keys have in common becomes text once; the one in the middle was charged by a clock that is ahead."""
    limit = limit_of(algorithm, 9, SECOND)
    keys = [limit.by(name) for name in ("ada", "bob", "eve")]
    lua.run(Check((keys[1],), 2, "a"), NOW + 300_000)
    checks = [Check((key,), 3, "b") for key in keys]
    decisions = lua.run_together(checks, NOW)
    assert lua.lifetimes_ms == {
        lua.wire.name(key): lifetime_of(decision) for key, decision in zip(keys, decisions, strict=True)
    }
    for key, decision in zip(keys, decisions, strict=True):
        ((remaining, _, reset_us, _),) = decision.verdicts
        ((still_remaining, _, still_reset_us, _),) = lua.run(Check((key,), 0, "b"), NOW).verdicts
        assert (still_remaining, still_reset_us) == (remaining, reset_us)


@each_algorithm
def test_lua_undoes_what_another_shard_denied(lua: InRedis, algorithm: str) -> None:
    key = limit_of(algorithm, 5, SECOND).by("ada")
    lua.run(Check((key,), 1, "a"), NOW)
    before = lua.run(Check((key,), 0), NOW + 7)
    denied = Check((key,), 2, "b")
    assert lua.run(denied, NOW + 7)
    assert lua.run(Undo(denied, key, NOW + 7), NOW + 7) == before.verdicts[0]
    assert lua.lifetimes_ms == {lua.wire.name(key): lifetime_of(before)}


def test_lua_undoes_what_lies_in_the_window_before(lua: InRedis) -> None:
    """It is over, but it still weighs: all of it at the first instant of the next one."""
    limit = limit_of("sliding_window", 9, SECOND)
    key = limit.by("ada")
    for at_us, cost in ((NOW - SECOND - 1, 1), (NOW - 1, 4), (NOW, 1)):
        lua.run(check(limit, cost), at_us)
    assert lua.run(check(limit, 0), NOW).remaining == 4
    for at_us, cost, remaining in ((NOW - 1, 2, 6), (NOW - SECOND - 1, 1, 6), (NOW - 1, 3, 8), (NOW, 1, 9)):
        assert lua.run(Undo(check(limit, cost), key, at_us), NOW)[0] == remaining


# A lease whose id is used by calls that overlap, as a server sees them: at which second a check comes in, its holder
# renews or leaves it, or what the check of another second did is taken back. Then when it ends; None if it has.
ENTER, RENEW, LEAVE = "enter", "renew", "leave"
OVERLAPS: dict[str, tuple[list[tuple[int, str | int]], int | None]] = {
    "taken and taken back": ([(0, ENTER), (1, 0)], None),
    "taken back after its end": ([(0, ENTER), (10, 0)], None),
    "renewed and taken back": ([(0, ENTER), (3, ENTER), (4, 3)], 10),
    "renewed and taken back, twice": ([(0, ENTER), (3, ENTER), (4, 3), (5, 3)], 10),
    "renewed and taken back, again and again": ([(0, ENTER), (3, ENTER), (4, 3), (5, ENTER), (6, 5)], 10),
    "renewed in the same instant and taken back": ([(0, ENTER), (0, ENTER), (0, 0)], 10),
    "taken back after another has renewed it": ([(0, ENTER), (3, ENTER), (4, 0)], 13),
    "a renewal taken back after another": ([(0, ENTER), (3, ENTER), (5, ENTER), (6, 3)], 15),
    "two renewals taken back, of which one step is known": ([(0, ENTER), (3, ENTER), (5, ENTER), (6, 5), (6, 3)], 13),
    "renewed by its holder meanwhile": ([(0, ENTER), (3, ENTER), (4, RENEW), (5, 3)], 14),
    "taken, renewed by its holder, and taken back": ([(0, ENTER), (1, RENEW), (2, 0)], None),
    "left meanwhile": ([(0, ENTER), (3, ENTER), (4, LEAVE), (5, 3)], None),
    "left and taken anew meanwhile": ([(0, ENTER), (3, ENTER), (4, LEAVE), (5, ENTER), (6, 3)], 15),
    "of an instant before it was taken": ([(5, ENTER), (6, 0)], 15),
    "of an instant in which nothing happened": ([(0, ENTER), (3, ENTER), (5, 4)], 13),
    "a clock that went back renews nothing": ([(5, ENTER), (2, ENTER), (3, 2)], 15),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_lua_undoes_of_a_lease_what_the_check_did_and_nothing_that_came_after(lua: InRedis, case: str) -> None:
    key = limit_of("concurrency", 5, 10 * SECOND).by("ada")
    entered = Check((key,), 2, "a")
    calls = {ENTER: entered, RENEW: Renew(key, "a"), LEAVE: Leave(key, "a")}
    events, end = OVERLAPS[case]
    for second, event in events:
        call = calls[event] if isinstance(event, str) else Undo(entered, key, NOW + event * SECOND)
        assert lua.run(call, NOW + second * SECOND)
    last_us = NOW + events[-1][0] * SECOND
    ends_us = last_us if end is None else NOW + end * SECOND
    assert lua.run(Check((key,), 0), last_us).verdicts == ((5 if end is None else 3, 0, ends_us - last_us, 0),)


def test_lua_forgets_any_number_of_expired_leases(lua: InRedis) -> None:
    """More of them than Lua can pass to one command."""
    limit = limit_of("concurrency", 5, SECOND)
    name = lua.wire.name(limit.by("ada"))
    lua.client.hset(name, mapping={f"expired-{number}": f"1 {NOW} {NOW - 1} {SECOND}" for number in range(9_000)})
    assert lua.run(check(limit, 1, "a"), NOW)
    assert lua.client.hkeys(name) == ["a"]


@pytest.mark.parametrize("algorithm", [*BUCKETS, *WINDOWS])
def test_nothing_given_back_is_nothing(lua: InRedis, algorithm: str) -> None:
    for store in (InMemory(), lua):
        key = drained(algorithm, store)
        assert not store.run(Refund(key, 0), NOW)
    assert lua.lifetimes_ms == {}


def test_lua_gives_back_once_for_an_id(lua: InRedis) -> None:
    key = drained("fixed_window", lua)
    assert lua.run(Refund(key, 1, "once"), NOW)
    assert lua.reply == [1, 1, 0, SECOND, 0]
    assert sorted(lua.lifetimes_ms.values()) == [CALLER_MARGIN_MS + 1000, CALLER_MARGIN_MS + 3_600_000]
    assert not lua.run(Refund(key, 1, "once"), NOW)
    assert lua.reply == [0, 1, 0, SECOND, 0]
    assert lua.run(Refund(key, 1, "twice"), NOW)
    assert lua.reply == [1, 2, 0, 0, 0]


def test_lua_says_whether_a_lease_was_held(lua: InRedis) -> None:
    key = drained("concurrency", lua)
    for call, reply in ((Renew(key, "a"), 1), (Renew(key, "b"), 0), (Leave(key, "a"), 1), (Leave(key, "a"), 0)):
        assert lua.run(call, NOW) is bool(reply)
        assert lua.reply == reply


def test_lua_numbers_a_log_anew_before_its_totals_leave_exactness(lua: InRedis) -> None:
    key = limit_of("sliding_log", 9, SECOND).by("ada")
    name = lua.wire.name(key)
    lua.client.zadd(
        name, {f"{2**52 - 8}:1:1000000": NOW - SECOND, f"{2**52 - 6}:2:1000000": NOW, f"{2**52 - 3}:3:1000000": NOW + 1}
    )
    assert lua.run(Check((key,), 2), NOW + 2).remaining == 2
    assert lua.client.zrange(name, 0, -1) == [
        *[f"{2**52 - 6}:2:1000000", f"{2**52 - 3}:3:1000000", f"{2**52 - 1}:2:1000000"],
    ]
    assert lua.run(Check((key,), 1), NOW + 3).remaining == 1
    written = lua.client.zrange(name, 0, -1, withscores=True)
    assert written == [
        ("0000000000000002:2:1000000", NOW),
        ("0000000000000005:3:1000000", NOW + 1),
        ("0000000000000007:2:1000000", NOW + 2),
        ("0000000000000008:1:1000000", NOW + 3),
    ]


# --------------------------------------------------------------- arithmetic


def reckon(client: Redis, expression: str, rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What a function of _exact.lua says of each row (a, b, c), to the last digit."""
    exact = files("headgate.algorithms").joinpath("_exact.lua").read_text("utf-8")
    script = f"""{exact}
        local a, b, c = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
        local answers = {{ {expression} }}
        for index, answer in ipairs(answers) do answers[index] = format('%.17g', answer) end
        return answers"""
    return [tuple(map(int, client.eval(script, 0, *row))) for row in rows]


NASTY = [1, 2, 3, 7, 10, 999_983, 2**26 + 1, 2**31 - 1, 10**12 + 39, 2**51 - 1, 2**52, 2**52 + 1, 2**53 - 1]


def test_lua_divides_exactly(client: Redis) -> None:
    rows = [(a, b) for a in (0, *NASTY) for b in NASTY if a + b <= 2**53]
    assert reckon(client, "div(a, b), ceil_div(a, b), ceil_div(-a, b)", rows) == [
        (a // b, -(-a // b), -(a // b)) for a, b in rows
    ]


def test_lua_multiplies_and_divides_exactly_also_beyond_2_to_the_53(client: Redis) -> None:
    draw = Random(0)
    drawn = [tuple(int(2 ** draw.uniform(0, 53)) for _ in range(3)) for _ in range(600)]
    picked = [(a, b, c) for a in NASTY for b in NASTY for c in NASTY]
    # 321 * 28059810762433 is 2**53 + 1, which a double takes for 2**53.
    edges = [(321, 28_059_810_762_433, 321), (2**26, 2**27, 3), (2**53 - 1, 1, 2**53 - 1), (0, 2**53 - 1, 5)]
    rows = [(a, b, c) for a, b, c in drawn + picked + edges if a * b // c < 2**53]
    assert reckon(client, "mul_div(a, b, c)", rows) == [divmod(a * b, c) for a, b, c in rows]


@pytest.mark.parametrize(
    ("algorithm", "quota", "burst"),
    [
        ("fixed_window", 2**52 - 1, None),
        ("sliding_log", 2**52 - 1, None),
        ("concurrency", 2**52 - 1, None),
        ("sliding_window", 2**51 - 1, None),
        ("token_bucket", 1_000, 2**53 - 1_001),
        ("gcra", 1_000, 2**53 - 1_001),
        ("leaky_bucket", 1_000, 2**53 - 1_001),
    ],
)
def test_limit_may_be_as_large_as_its_arithmetic_is_exact(algorithm: str, quota: int, burst: int | None) -> None:
    limit_of(algorithm, quota, 1, burst)
    with pytest.raises(InvalidLimit, match="beyond 2"):
        limit_of(algorithm, quota + (burst is None), 1, burst and burst + 1)


@each_algorithm
def test_stored_form_has_a_version(algorithm: str) -> None:
    version = 1 if algorithm in BUCKETS else 2
    assert limit_of(algorithm, 1, 1).space == f"x:{algorithm}.{version}"


@each_algorithm
def test_only_buckets_have_a_burst(algorithm: str) -> None:
    if algorithm in BUCKETS:
        assert limit_of(algorithm, 5, SECOND, burst=3).capacity == 3
    else:
        with pytest.raises(InvalidLimit, match="burst 3 means nothing"):
            limit_of(algorithm, 5, SECOND, burst=3)
