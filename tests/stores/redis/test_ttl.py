"""Keys that are met in large batches get a long life, so that most requests need not set one: but no debt is ever
forgotten, and no key is ever left without an end."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from headgate import Limit
from headgate.stores.operations import Check, Refund, Reset
from headgate.stores.redis.encoding import SERVER_MARGIN_MS
from support.algorithm_stores import InMemory, InRedis, more_us
from support.servers import AclUser, RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.keys import Key
    from headgate.stores.operations import Call

SECOND = 1_000_000
HOUR = 3600 * SECOND
BUSY = 32  # keys: the least that are met in a large batch


@pytest.fixture(scope="module", params=["redis", "valkey"])
def client(request: pytest.FixtureRequest) -> Iterator[Redis]:
    """A server on which nobody else leaves keys."""
    with RedisServer(request.param) as server, server.client(socket_timeout=5) as client:
        yield client


class Busy(InRedis):
    """A server whose clock the test sets."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, server_clock=True)
        client.flushall()
        seconds, _ = client.time()
        # Ahead of the real one, by which keys end; and, so that each run is alike, where all lives would be rounded to.
        self.pretended_us = (seconds // 9000 + 2) * 9000 * SECOND

    def run_together(self, calls: Any, now_us: int = 0) -> list[Any]:
        if now_us:
            self.pretended_us = now_us
        return super().run_together(calls)

    @property
    def now_us(self) -> int:
        assert self.pretended_us is not None
        return self.pretended_us

    @property
    def commands(self) -> set[str]:
        """What the last script run asked for."""
        return {name for name, *_ in self.issued}

    def ends_ms(self, key: Key) -> int:
        ends: int = self.client.pexpiretime(self.wire.name(key))
        return ends

    def text(self, key: Key) -> str:
        text: str = self.client.get(self.wire.name(key))
        return text


@pytest.fixture
def busy(client: Redis) -> Busy:
    return Busy(client)


def limit_of(algorithm: str = "token_bucket", quota: int = 1000, period_us: int = HOUR, name: str = "") -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), algorithm=algorithm, name=name or algorithm)


def crowd(limit: Limit, size: int = BUSY, cost: int = 1) -> list[Check]:
    return [Check((limit.by(number),), cost) for number in range(size)]


def needed_ms(at_us: int, reset_us: int) -> int:
    return -(-(at_us + reset_us) // 1000) + SERVER_MARGIN_MS


# ------------------------------------------------------------------------------- it is quicker


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra"])
@pytest.mark.parametrize("limits", [1, 3])
def test_keys_that_live_long_enough_are_only_written(busy: Busy, algorithm: str, limits: int) -> None:
    met = [limit_of(algorithm, name=f"{algorithm}-{number}") for number in range(limits)]
    checks = [Check(tuple(limit.by(number) for limit in met), 1) for number in range(BUSY)]
    busy.run_together(checks)
    assert {"MSET", "PEXPIREAT"} <= busy.commands
    keys = [key for check in checks for key in check.keys]
    ends_ms = [busy.ends_ms(key) for key in keys]
    told = busy.run_together(checks, busy.now_us + 1)
    assert busy.commands == {"TIME", "MGET", "INFO", "SETRANGE"}
    assert busy.written == [busy.wire.name(key) for key in keys]
    assert [busy.ends_ms(key) for key in keys] == ends_ms
    assert {verdict[0] for decision in told for verdict in decision.verdicts} == {998}


@pytest.mark.parametrize("size", [BUSY - 1, BUSY])
def test_few_keys_live_exactly_as_long_as_they_must(busy: Busy, size: int) -> None:
    limit = limit_of(quota=7)
    checks = crowd(limit, size)
    for _ in range(2):
        told = busy.run_together(checks, busy.now_us + 1)
        exactly_ms = [needed_ms(busy.now_us, decision.verdicts[0][2]) for decision in told]
        ends_ms = [busy.ends_ms(check.keys[0]) for check in checks]
        assert (ends_ms == exactly_ms) is (size < BUSY)
        assert ("INFO" in busy.commands) is (size >= BUSY)
        assert {"\t" in busy.text(check.keys[0]) for check in checks} == {size >= BUSY}


@pytest.mark.parametrize("size", [1, BUSY - 1, BUSY])
@pytest.mark.parametrize("algorithm", ["fixed_window", "gcra", "leaky_bucket", "sliding_window", "token_bucket"])
@pytest.mark.parametrize("change", ["a clock set back", "a longer period", "a shorter period"])
def test_migrated_state_lives_as_long_as_it_owes_even_if_it_was_denied(
    busy: Busy, algorithm: str, size: int, change: str
) -> None:
    """Neither shorter, so that no debt is forgotten, nor for the hours that the clock was set back by."""
    limit, now_us = limit_of(algorithm, quota=6), busy.now_us + 9 * HOUR
    busy.run_together(crowd(limit, size, cost=6), now_us)
    if change == "a clock set back":
        now_us -= 5 * HOUR  # still ahead of the server's own clock, by which keys end
    else:
        limit = limit_of(algorithm, 6, 3 * HOUR if change == "a longer period" else HOUR // 2)
    checks = crowd(limit, size, cost=limit.quota)
    told = busy.run_together(checks, now_us + 1)
    for decision in told:
        assert not decision.allowed
        lifetime_ms = busy.lifetimes_ms[busy.wire.name(decision.keys[0])]
        needs_ms = needed_ms(0, decision.verdicts[0][2])
        assert needs_ms <= lifetime_ms + 1 <= needs_ms + more_us(limit) // 1000 + 2
    again = busy.run_together(checks, now_us + 2)
    assert [one.retry_after_us for one in again] == [one.retry_after_us - 1 for one in told]


def test_clock_that_goes_back_leaves_nothing_to_rely_on(busy: Busy) -> None:
    checks = crowd(limit_of())
    now_us = busy.now_us
    for step in (0, 0, -1, -SECOND):
        told = busy.run_together(checks, now_us + step)
        assert "PEXPIREAT" in busy.commands
        for check, decision in zip(checks, told, strict=True):
            assert busy.ends_ms(check.keys[0]) >= needed_ms(now_us + step, decision.verdicts[0][2])


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra"])
def test_life_is_set_anew_with_the_first_state_that_outlasts_it(busy: Busy, algorithm: str) -> None:
    """A token takes 100 ms, a life is rounded to seconds."""
    checks = crowd(limit_of(algorithm, quota=160, period_us=16 * SECOND))
    began_us = busy.now_us - 1
    is_set = []
    for spent in range(1, 32):
        busy.run_together(checks, began_us + spent)
        is_set.append("PEXPIREAT" in busy.commands)
        as_new_us = began_us + 1 + spent * 100_000  # at first; then on the second with each tenth token
        assert {busy.ends_ms(check.keys[0]) for check in checks} == {(as_new_us // SECOND + 1) * 1000 + 1000}
    assert [spent for spent, is_it in enumerate(is_set, 1) if is_it] == [1, 10, 20, 30]


def test_state_whose_length_changes_is_written_whole(busy: Busy) -> None:
    limit = limit_of(quota=1000, period_us=1000 * SECOND)  # 10**9 units when it is full
    checks = crowd(limit)
    busy.run_together(checks)
    assert busy.text(checks[0].keys[0]) == f"{busy.now_us}\t999000000 1/1000000/1000"
    busy.run_together(crowd(limit, cost=9), busy.now_us + 1)
    assert "SETRANGE" in busy.commands
    costs = [Check(check.keys, 895) for check in checks]
    busy.run_together(costs, busy.now_us + 1)
    assert busy.text(checks[0].keys[0]) == f"{busy.now_us}\t95000002 1/1000000/1000"
    busy.run_together(crowd(limit, cost=90), busy.now_us + 1)
    assert "SETRANGE" not in busy.commands
    assert busy.text(checks[0].keys[0]) == f"{busy.now_us}\t5000003 1/1000000/1000"


# ------------------------------------------------------------------------------- and exact


def test_key_found_without_a_lifetime_gets_one(busy: Busy) -> None:
    checks = crowd(limit_of())
    for step in range(1, 3):
        busy.run_together(checks, busy.now_us + step)
    for check in checks[::5]:
        assert busy.client.persist(busy.wire.name(check.keys[0]))
    busy.run_together(checks, busy.now_us + 1)
    assert "SETRANGE" not in busy.commands
    told = busy.run_together([Check(check.keys, 0) for check in checks])
    for check, decision in zip(checks, told, strict=True):
        assert busy.ends_ms(check.keys[0]) >= needed_ms(busy.now_us, decision.verdicts[0][2])
    for _ in range(2):  # and then all have one
        busy.run_together(checks, busy.now_us + 1)
    assert "SETRANGE" in busy.commands


def test_where_others_keep_keys_for_ever_lifetimes_are_set_each_time(busy: Busy) -> None:
    checks = crowd(limit_of())
    with busy.client.client() as elsewhere:
        elsewhere.execute_command("SELECT", 1)
        elsewhere.set("somebody's", "1")
        for step in range(1, 4):
            busy.run_together(checks, busy.now_us + step)
            assert {"MSET", "PEXPIREAT"} <= busy.commands
            assert {"\t" in busy.text(check.keys[0]) for check in checks} == {False}
        elsewhere.delete("somebody's")
    for step in range(1, 3):
        busy.run_together(checks, busy.now_us + step)
    assert "SETRANGE" in busy.commands


def test_denial_gives_no_less_than_the_state_speaks_of(busy: Busy) -> None:
    """The state of a persisted key still says that its life is long when a denial has given it one."""
    limit = limit_of(quota=160, period_us=16 * SECOND)
    checks = crowd(limit, cost=155)
    busy.run_together(checks)
    key = checks[0].keys[0]
    text = busy.text(key)
    for together in ([Check((key,), 6)], [Check((key, limit_of(name="other").by()), 6)], [Check((key,), 6)] * 2):
        assert busy.client.persist(busy.wire.name(key))
        assert not busy.run_together(together, busy.now_us)[0]
        assert busy.lifetimes_ms == {busy.wire.name(key): 15_500 + 1_000 + SERVER_MARGIN_MS}
        assert busy.text(key) == text


@pytest.mark.parametrize("refused", [("info",), ("setrange",), ("mget",), ("mset",), ("pexpireat",), ("info", "mset")])
def test_restricted_permissions_give_the_same_answers(refused: tuple[str, ...]) -> None:
    allowed = {"eval", "time", "get", "set", "mget", "mset", "pttl", "pexpire", "pexpireat", "setrange", "info"}
    rules = "-@all ~* " + " ".join(f"+{command}" for command in (*(allowed - {*refused}), "flushall", "pexpiretime"))
    user = AclUser("gate", "secret", rules)
    with RedisServer(user=user) as server, Redis.from_url(server.url, decode_responses=True) as client:
        busy = Busy(client)
        checks, ends_ms = crowd(limit_of(), BUSY + 1), dict[str, int]()
        for spent in range(1, 5):
            told = busy.run_together(checks, busy.now_us + 1)
            assert {decision.verdicts[0][0] for decision in told} == {1000 - spent}
            ends_ms |= {name: busy.now_us // 1000 + life_ms for name, life_ms in busy.lifetimes_ms.items()}
            for check, decision in zip(checks, told, strict=True):
                least_ms = needed_ms(busy.now_us, decision.verdicts[0][2])
                ends = ends_ms[busy.wire.name(check.keys[0])]
                assert least_ms - 1 <= ends <= least_ms + more_us(check.keys[0].limit) // 1000 + 1
        assert ("SETRANGE" in busy.commands) is not bool({"info", "mget"} & {*refused})


PLANS = {
    "token_bucket": [(160, 16 * SECOND), (7, 90 * SECOND), (1000, HOUR)],
    "gcra": [(160, 16 * SECOND), (7, 90 * SECOND), (999_983, HOUR)],
    "leaky_bucket": [(160, 16 * SECOND), (50, 7 * SECOND)],
    "fixed_window": [(20, SECOND), (50, 60 * SECOND)],
    "sliding_window": [(20, SECOND), (50, 60 * SECOND)],
}


@pytest.mark.parametrize("seed", range(8))
def test_no_debt_is_forgotten_whatever_happens(busy: Busy, seed: int) -> None:
    """Crowds and single requests, refunds, denials, new plans and persisted keys, at any pace: answers are those of the
    memory, and whatever is written lives for as long as it owes, and the margin, and a sixteenth longer at most."""
    random, memory = Random(seed), InMemory()
    plans = {name: random.choice(numbers) for name, numbers in PLANS.items()}
    people = range(BUSY // 2)
    ends_ms: dict[str, int | None] = {}
    """As they were set: some lives are told in ms from now on, and so counted by the real clock."""
    kept, persisted = 0, None
    for _ in range(80):
        now_us = busy.now_us + int(2 ** random.uniform(0, random.choice([4, 15, 20, 20, 25, 30])))
        if random.random() < 0.1:
            name = random.choice([*PLANS])
            plans[name] = random.choice(PLANS[name])
        calls = some_calls(random, [limit_of(name, *numbers) for name, numbers in plans.items()], people)
        told = busy.run_together(calls, now_us)
        ends_ms |= {name: now_us // 1000 + lifetime_ms for name, lifetime_ms in busy.lifetimes_ms.items()}
        kept += "SETRANGE" in busy.commands
        written = {*busy.written}
        assert [with_no_again(answer) for answer in told] == [memory.run(call, now_us) for call in calls]
        keys = [key for call in calls for key in (call.keys if isinstance(call, Check) else [call.key])]
        for key in keys:
            if (name := busy.wire.name(key)) in written:
                _, _, reset_us, _ = memory.run(Check((key,), 0), now_us).verdicts[0]
                ends = ends_ms[name]
                assert ends is not None, "a key that was persisted by hand has no lifetime"
                least_ms = needed_ms(now_us // 1000 * 1000, reset_us)  # told from now on, as this ms began
                assert least_ms <= ends <= least_ms + more_us(key.limit) // 1000 + 2
        if persisted is not None and ends_ms[busy.wire.name(persisted)] is None:  # nobody has asked for it since
            for store in (memory, busy):
                store.run(Reset((persisted,)), now_us)
        persisted = random.choice(keys) if random.random() < 0.15 else None
        if persisted is not None and busy.client.persist(name := busy.wire.name(persisted)):
            ends_ms[name] = None
        else:
            persisted = None
    assert kept > 3


def some_calls(random: Random, limits: list[Limit], people: range) -> list[Call]:
    met = random.sample(limits, random.choice([1, 2, 2, 3]))
    if random.random() < 0.1:
        return [Refund(random.choice(met).by(random.choice(people)), random.randint(1, 5))]
    cost = random.choice([1, 1, 1, 2, random.randint(0, 20)])
    number = random.choice([1, len(people), len(people), len(people)])
    calls: list[Call] = [
        Check(tuple(limit.by(person) for limit in met), cost) for person in random.sample(people, number)
    ]
    if len(met) == 1 and number > 1:  # as many keys as in a large batch
        calls += [Check((limit_of("token_bucket", 500, 9 * SECOND, "beside").by(person),), 1) for person in people]
    return calls


def with_no_again(answer: Any) -> Any:
    return answer._replace(next_allowed_us=0) if hasattr(answer, "_replace") else answer
