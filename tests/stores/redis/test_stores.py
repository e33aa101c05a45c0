"""What is particular to Redis: how often it is asked, what it keeps and for how long, and what it does with what it
does not understand."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis

from headgate import AsyncLimiter, Decision, Key, Limit, Limiter, ScriptError, StoreUnavailable
from headgate.algorithms import ALGORITHMS as ALGORITHM_MODULES
from headgate.stores.redis import async_store
from headgate.stores.redis.sync_store import Waiter
from headgate.testing import FakeClock
from support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import RedisCluster, RedisServer

HOUR = timedelta(hours=1)
ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")
REFUNDABLE = [name for name in ALGORITHMS if name != "concurrency"]
WRITES = {
    *("set", "mset", "del", "unlink", "pexpire", "pexpireat"),
    *("hset", "hdel", "zadd", "zrem", "zremrangebyscore", "zremrangebyrank"),
}


@pytest.fixture(params=["redis7", "valkey9"])
def server(request: pytest.FixtureRequest) -> RedisServer:
    started: RedisServer = request.getfixturevalue(request.param)
    return started


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def limiter(server: RedisServer) -> Iterator[Limiter]:
    with Limiter(server.url) as limiter:
        yield limiter


def limit_of(algorithm: str, quota: int, name: str, period: timedelta = HOUR) -> Limit:
    return Limit(quota, period, algorithm=algorithm, name=name)


def stored(key: Key, namespace: str = "headgate") -> str:
    """The documented name of a key whose parts need no escaping."""
    version = ALGORITHM_MODULES[key.limit.algorithm].VERSION
    return f"{namespace}:{key.limit.name}:{key.limit.algorithm}.{version}:{key.identity}"


def trace(client: redis.Redis, key: Key) -> tuple[Any, ...]:
    """All that Redis keeps of a key: its value as bytes, and the instant at which it will be gone."""
    raw = redis.Redis(connection_pool=client.connection_pool)
    dumped = raw.execute_command("DUMP", stored(key), NEVER_DECODE=True)
    return dumped, client.pexpiretime(stored(key))


@contextmanager
def commands_of(client: redis.Redis) -> Iterator[Counter[str]]:
    """How often each command runs in the block, those that scripts call included; known at its end."""

    def calls() -> Counter[str]:
        stats = client.info("commandstats")
        return Counter({name.removeprefix("cmdstat_"): numbers["calls"] for name, numbers in stats.items()})

    before, counted = calls(), Counter[str]()
    yield counted
    counted.update(calls() - before)
    del counted["info"]


# How often Redis is asked


def test_script_that_is_not_known_there_is_sent_once(limiter: Limiter, client: redis.Redis, unique: str) -> None:
    key = Limit(5, HOUR, name=unique).by("ada")
    client.script_flush()
    with commands_of(client) as first:
        assert limiter.check(key).remaining == 4
    with commands_of(client) as later:
        assert [limiter.check(key).remaining for _ in range(3)] == [3, 2, 1]
    assert (first["evalsha"], first["eval"]) == (1, 1)
    assert (later["evalsha"], later["eval"]) == (3, 0)


@pytest.mark.parametrize("algorithms", [("token_bucket",), ("token_bucket", "sliding_log", "concurrency"), ALGORITHMS])
def test_however_many_limits_a_request_meets_it_is_one_round_trip(
    limiter: Limiter, client: redis.Redis, unique: str, algorithms: tuple[str, ...]
) -> None:
    keys = [limit_of(algorithm, 5, unique).by("ada") for algorithm in algorithms]
    limiter.peek(*keys)
    trips = limiter.stats["round_trips"]
    with commands_of(client) as commands:
        assert limiter.check(*keys).allowed
    assert (commands["evalsha"], commands["eval"]) == (1, 0)
    assert limiter.stats["round_trips"] == trips + 1


def test_tasks_that_ask_at_the_same_time_travel_together(server: RedisServer, client: redis.Redis, unique: str) -> None:
    limits = [Limit(5, HOUR, name=f"{unique}-{number}") for number in range(3)]

    async def ask(limiter: AsyncLimiter) -> list[Decision]:
        return await asyncio.gather(
            *[limiter.check(limits[number % 3].by(number), cost=number % 4) for number in range(200)]
        )

    async def main() -> tuple[Counter[str], list[Decision]]:
        async with AsyncLimiter(server.url) as limiter:
            await ask(limiter)  # the first of these goes ahead, as nobody was expected to join it
            with commands_of(client) as commands:
                decisions = await ask(limiter)
            return commands, decisions

    commands, decisions = asyncio.run(main())
    # Redis decides one half while this process makes and reads the other, unless that was too slow the last time.
    assert commands["evalsha"] in (1, 2)
    assert [decision.keys for decision in decisions] == [(limits[number % 3].by(number),) for number in range(200)]
    assert [decision.remaining for decision in decisions] == [
        5 - 2 * (number % 4) if number % 4 < 3 else 2 for number in range(200)
    ]


def test_lone_task_does_not_wait_for_company(server: RedisServer, client: redis.Redis, unique: str) -> None:
    key = Limit(50, HOUR, name=unique).by("ada")

    async def main() -> Counter[str]:
        async with AsyncLimiter(server.url) as limiter:
            await limiter.check(key)
            with commands_of(client) as commands:
                for _ in range(10):
                    await limiter.check(key)
            return commands

    assert asyncio.run(main())["evalsha"] == 10


def test_threads_that_ask_at_the_same_time_share_round_trips(limiter: Limiter, unique: str) -> None:
    key = Limit(400, HOUR, name=unique).by("ada")
    with ThreadPoolExecutor(16) as pool:
        decisions = list(pool.map(lambda _: limiter.check(key), range(800)))
    assert sum(decision.allowed for decision in decisions) == 400
    assert limiter.stats["calls"] + limiter.stats["remembered"] == 800
    assert limiter.stats["round_trips"] < 800


def test_handler_of_a_signal_that_asks_in_between_gets_an_answer_or_an_error_but_never_hangs(
    limiter: Limiter, unique: str
) -> None:
    limit = Limit(10**6, HOUR, name=unique, algorithm="fixed_window")
    told: Counter[str] = Counter()

    def ask(*_: object) -> None:
        try:
            limiter.check(limit.by("ada"))
            told["answered"] += 1
        except StoreUnavailable as error:
            told[
                "refused" if "waiting for Redis already" in str(error) and not error.may_have_happened else "failed"
            ] += 1

    def work(number: int) -> None:
        for _ in range(number):
            assert limiter.check(limit.by("bob"))

    before = signal.signal(signal.SIGVTALRM, ask)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(work, 300) for _ in range(2)]
            while told["refused"] < 5 or told["answered"] < 2:
                work(1)
            for other in others:
                other.result()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert not told["failed"]
    assert limiter.peek(limit.by("ada")).remaining == 10**6 - told["answered"]


def test_reentrant_check_is_rejected_and_delays_no_other(
    limiter: Limiter, client: redis.Redis, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal's handler may, just before the thread goes to sleep: whoever leads would let it lead next, and wake
    only the call that it is not waiting for."""
    key, wait = Limit(50, HOUR, name=unique).by("ada"), Waiter.wait
    refused: list[str] = []

    def wait_after_another(turn: Waiter, seconds: float) -> bool:
        if not refused:
            with pytest.raises(StoreUnavailable) as refusal:
                limiter.check(key)
            refused.append(str(refusal.value))
        return wait(turn, seconds)

    limiter.check(key)
    monkeypatch.setattr(Waiter, "wait", wait_after_another)
    client.execute_command("CLIENT", "PAUSE", 300, "WRITE")
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(limiter.check, key)
        wait_until(lambda: limiter.engine.store.lanes.default.leader, "somebody to lead")
        assert limiter.check(key).allowed
        assert leading.result().allowed
    assert refused == ["this thread is waiting for Redis already, and cannot wait for a nested call"]
    assert limiter.peek(key).remaining == 47


@pytest.mark.parametrize("store", ["redis7", "valkey9", "cluster", "sentinel"])
def test_flushed_scripts_do_not_fail_a_mixed_batch(request: pytest.FixtureRequest, store: str, unique: str) -> None:
    servers = request.getfixturevalue(store)
    keys = [limit_of(algorithm, 5, unique).by("ada") for algorithm in ALGORITHMS]
    room, *others = keys

    async def main() -> None:
        async with AsyncLimiter(servers.url) as limiter:
            await limiter.check(*keys, cost=3, id="a")
            for node in getattr(servers, "nodes", [servers]):
                with node.client() as client:
                    client.script_flush()
            answers = await asyncio.gather(
                *[limiter.check(key) for key in others],
                *[limiter.refund(key, 1, id="1") for key in others],
                limiter.renew(room, id="a"),
                limiter.enter(room, id="b", cost=2),
                limiter.reset(limit_of("gcra", 5, unique).by("bob")),
            )
            assert [answer.allowed for answer in answers[:6]] == [True] * 6
            assert answers[6:13] == [True] * 7
            assert (answers[13].allowed, answers[14]) == (True, None)
            assert [outcome.remaining for outcome in (await limiter.peek(*keys)).outcomes] == [0, 2, 2, 2, 2, 2, 2]

    asyncio.run(main())


# What Redis keeps


def test_key_can_be_read_by_people(limiter: Limiter, client: redis.Redis, unique: str) -> None:
    for algorithm in ALGORITHMS:
        limiter.check(limit_of(algorithm, 5, unique).by("tenant-7", "ada@example.org", 42))
    limiter.check(Limit(5, HOUR, name=f"{unique}:v1"))
    kept = {name: client.type(name) for name in client.scan_iter(f"*{unique}*", count=1000)}
    assert kept == {
        f"headgate:{unique}:concurrency.2:tenant-7|ada@example.org|42": "hash",
        f"headgate:{unique}:fixed_window.2:tenant-7|ada@example.org|42": "string",
        f"headgate:{unique}:gcra.1:tenant-7|ada@example.org|42": "string",
        f"headgate:{unique}:leaky_bucket.1:tenant-7|ada@example.org|42": "string",
        f"headgate:{unique}:sliding_log.2:tenant-7|ada@example.org|42": "zset",
        f"headgate:{unique}:sliding_window.2:tenant-7|ada@example.org|42": "string",
        f"headgate:{unique}:token_bucket.1:tenant-7|ada@example.org|42": "string",
        f"headgate:{unique}%3Av1:token_bucket.1:%all": "string",
    }


@pytest.mark.parametrize("denied", [0, 1, 2])
@pytest.mark.parametrize("clock", [None, FakeClock()])
def test_lost_counter_starts_again_at_once(
    server: RedisServer, client: redis.Redis, unique: str, clock: FakeClock | None, denied: int
) -> None:
    """Pitfall 37. Only who knocks on and on is denied from memory; with a clock for tests, nobody is."""
    key = Limit(100, HOUR, name=unique).by("ada")
    with Limiter(server.url, clock=clock) as limiter:
        assert [limiter.check(key).allowed for _ in range(100 + denied)].count(True) == 100
        client.delete(*client.keys(f"*{unique}*"))
        assert all(limiter.check(key).allowed for _ in range(100))
        assert not limiter.check(key).allowed


def test_no_caller_chooses_a_slot_or_stores_a_megabyte(limiter: Limiter, client: redis.Redis, unique: str) -> None:
    limit = Limit(5, HOUR, name=unique)
    limiter.check(limit.by("x" * 1_000_000))
    limiter.check(limit.by("{user}", "}{"))
    limiter.check(Limit(5, HOUR, name=f"{unique}{{tag}}").by("ada"))
    names = list(client.scan_iter(f"*{unique}*", count=1000))
    assert len(names) == 3
    assert all(len(name) < 300 and "{" not in name for name in names)


def test_namespaces_are_worlds_apart(server: RedisServer, client: redis.Redis, unique: str) -> None:
    key = Limit(1, HOUR, name=unique).by("ada")
    namespaces = ("headgate", "staging", "a:b", "ü")
    for namespace in namespaces:
        with Limiter(server.url, namespace=namespace) as limiter:
            assert [limiter.check(key).allowed for _ in range(2)] == [True, False]
    assert {name.partition(":")[0] for name in client.scan_iter(f"*{unique}*", count=1000)} == {
        "headgate",
        "staging",
        "a%3Ab",
        "ü",
    }
    with Limiter(server.url, namespace="staging") as limiter:
        limiter.reset(key)
        assert limiter.check(key)
    with Limiter(server.url) as limiter:
        assert not limiter.check(key)


def test_peek_writes_nothing_at_all(limiter: Limiter, client: redis.Redis, unique: str) -> None:
    keys = [limit_of(algorithm, 5, unique).by("ada") for algorithm in ALGORITHMS]
    fresh = [limit_of(algorithm, 5, unique).by("bob") for algorithm in ALGORITHMS]
    limiter.check(*keys, cost=3)
    before = [trace(client, key) for key in keys]
    with commands_of(client) as commands:
        for key in (*keys, *fresh):
            limiter.peek(key)
            limiter.check(key, cost=0)
        limiter.peek(*keys, *fresh)
    assert set(commands) & WRITES == set()
    assert [trace(client, key) for key in keys] == before
    assert client.exists(*map(stored, fresh)) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_denial_leaves_no_trace(limiter: Limiter, client: redis.Redis, unique: str, algorithm: str) -> None:
    key, beside = limit_of(algorithm, 5, unique).by("ada"), Limit(9, HOUR, name=f"{unique}-beside").by("ada")
    limiter.check(key, beside, cost=3)
    before = trace(client, key), trace(client, beside)
    with commands_of(client) as commands:
        assert not limiter.check(key, cost=3)
        assert not limiter.check(key, cost=6)
        assert not limiter.check(key, beside, cost=3)
        assert not limiter.check(beside, key, cost=2**60)
        assert not limiter.check(limit_of(algorithm, 5, unique).by("bob"), cost=6)
    assert set(commands) & WRITES == set()
    assert (trace(client, key), trace(client, beside)) == before


# For how long


def reset_ms(limiter: Limiter, key: Key) -> float:
    return limiter.peek(key).reset_after * 1000


WRITING: dict[str, Callable[[Limiter, Key], Any]] = {
    "the first check": lambda limiter, key: None,
    "another check": lambda limiter, key: limiter.check(key),
    "a larger cost": lambda limiter, key: limiter.check(key, cost=3),
    "a refund": lambda limiter, key: limiter.refund(key, 1),
    "a refund of everything": lambda limiter, key: limiter.refund(key, 5),
    "a refund by id": lambda limiter, key: limiter.refund(key, 1, id="r"),
    "a check with an id": lambda limiter, key: limiter.check(key, id="r"),
    "a repeated id": lambda limiter, key: [limiter.check(key, id="r") for _ in range(3)],
    "a refund of an id": lambda limiter, key: limiter.check(key, id="r") and limiter.refund(key, 1, id="r"),
}


@pytest.mark.parametrize("write", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("algorithm", REFUNDABLE)
def test_key_lives_until_its_debt_is_paid_and_hardly_longer(
    limiter: Limiter, client: redis.Redis, unique: str, algorithm: str, write: Callable[[Limiter, Key], Any]
) -> None:
    key = limit_of(algorithm, 5, unique, timedelta(seconds=20)).by("ada")
    limiter.check(key, cost=2)
    write(limiter, key)
    owed = reset_ms(limiter, key)
    assert owed <= client.pttl(stored(key)) <= owed + 3_000
    assert all(client.pttl(name) > 0 for name in client.scan_iter(f"*{unique}*", count=1000))


def test_record_of_an_id_is_short_and_lives_as_long_as_the_id_is_valid(
    limiter: Limiter, client: redis.Redis, unique: str
) -> None:
    keys = [
        limit_of("token_bucket", 5, f"{unique}-{seconds}", timedelta(seconds=seconds)).by("ada") for seconds in (1, 90)
    ]
    id = "secret-" + "\N{GRINNING FACE}" * 121
    limiter.check(*keys, id=id)
    limiter.check(*keys, id=id)
    records = list(client.scan_iter(f"*{unique}*:id:*", count=1000))
    assert len(records) == 2
    for record in records:
        name = record if isinstance(record, str) else record.decode()
        assert len(name) < 150
        assert "secret" not in name
        assert 80_000 < client.pttl(record) <= 91_000
    assert not limiter.check(*keys, cost=5, id="denied")
    assert len(list(client.scan_iter(f"*{unique}*:id:*", count=1000))) == 2


@pytest.mark.parametrize(
    "value", ["", "1", "1 2 3 4 5 6 7", "9e99 1 1 1 1 1 1 1", "-1 1 1 1 1 1 1 1", "\0", "x" * 10_000]
)
def test_foreign_value_in_a_record_is_an_error_and_charges_nothing(
    limiter: Limiter, client: redis.Redis, unique: str, value: str
) -> None:
    key, other = limit_of("fixed_window", 5, unique).by("ada"), limit_of("gcra", 5, unique).by("ada")
    limiter.check(key, id="req-1")
    (record,) = client.scan_iter(f"*{unique}*:id:*", count=1000)
    client.set(record, value)
    for call in (
        lambda: limiter.check(key, id="req-1"),
        lambda: limiter.check(other, key, id="req-1"),
        lambda: limiter.refund(key, 1, id="req-1"),
    ):
        with pytest.raises(ScriptError, match="was not written by headgate"):
            call()
    client.delete(record)
    client.lpush(record, "a list")
    with pytest.raises(ScriptError):
        limiter.check(key, id="req-1")
    assert (limiter.peek(key).remaining, limiter.peek(other).remaining) == (4, 5)


@pytest.mark.parametrize("algorithm", REFUNDABLE)
@pytest.mark.parametrize("cost", [1, 4, 9], ids=["allowed", "denied", "unsatisfiable"])
def test_key_lives_by_the_plan_that_last_met_it(
    limiter: Limiter, client: redis.Redis, unique: str, algorithm: str, cost: int
) -> None:
    """A window of 90 s remembers what one of 20 s has counted, also if all that it ever does is deny."""
    old, new = (
        limit_of(algorithm, quota, unique, timedelta(seconds=seconds)).by("ada")
        for quota, seconds in ((5, 20), (7, 90))
    )
    limiter.check(old, cost=4)
    limiter.check(new, cost=cost)
    owed = reset_ms(limiter, new)
    # Denying never shortens a life: where the new window ends first, that of the old one is kept. Nor is it given less
    # than a busy key is: a sixteenth of the window more.
    assert owed <= client.pttl(stored(new)) <= max(owed, 20_000) + 90_000 // 16 + 3_000


LEASING: dict[str, Callable[[Limiter, Key], Any]] = {
    "entering": lambda limiter, room: limiter.enter(room, id="b"),
    "entering again": lambda limiter, room: limiter.enter(room, id="a"),
    "renewing": lambda limiter, room: limiter.renew(room, id="a"),
    "leaving": lambda limiter, room: limiter.enter(room, id="b") and limiter.leave(room, id="a"),
    "leaving in vain": lambda limiter, room: limiter.leave(room, id="nobody"),
}


@pytest.mark.parametrize("change", LEASING.values(), ids=LEASING)
def test_leases_live_until_the_last_one_ends(
    limiter: Limiter, client: redis.Redis, unique: str, change: Callable[[Limiter, Key], Any]
) -> None:
    room = limit_of("concurrency", 5, unique, timedelta(seconds=20)).by("ada")
    limiter.enter(room, id="a")
    change(limiter, room)
    assert 19_000 < reset_ms(limiter, room) <= client.pttl(stored(room)) <= 23_000


def test_last_to_leave_turns_off_the_light(limiter: Limiter, client: redis.Redis, unique: str) -> None:
    room = limit_of("concurrency", 5, unique).by("ada")
    limiter.enter(room, id="a")
    assert limiter.leave(room, id="a")
    assert client.exists(stored(room)) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_callers_bring_the_time_a_key_lives_at_least_as_long(
    server: RedisServer, client: redis.Redis, unique: str, algorithm: str
) -> None:
    clock = FakeClock(10**15)
    with Limiter(server.url, clock=clock) as limiter:
        key = limit_of(algorithm, 5, unique, timedelta(seconds=20)).by("ada")
        for step in (0, 7, -100, 300):
            clock.advance(step)
            limiter.check(key, id=str(step))
            assert client.pttl(stored(key)) >= reset_ms(limiter, key)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shortest_debt_is_remembered_and_the_longest_can_be(
    limiter: Limiter, client: redis.Redis, unique: str, algorithm: str
) -> None:
    """A lifetime that is rounded down to 0 deletes the key; one that is too long is an error."""
    for period in (timedelta(microseconds=1), timedelta(milliseconds=1), timedelta(days=3660)):
        key = limit_of(algorithm, 1, f"{unique}-{period.days}{period.microseconds}", period).by("ada")
        assert limiter.check(key).allowed
        assert client.pttl(stored(key)) > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_key_that_was_made_to_live_for_ever_is_mended_by_the_next_check_but_not_by_a_peek(
    limiter: Limiter, client: redis.Redis, unique: str, algorithm: str
) -> None:
    key, beside = limit_of(algorithm, 5, unique).by("ada"), Limit(1, HOUR, name=f"{unique}-beside").by("ada")
    limiter.check(key, cost=3, id="a")
    limiter.check(beside)
    checks: dict[str, Callable[[], Decision]] = {
        "allowed": lambda: limiter.check(key, id="b"),
        "denied": lambda: limiter.check(key, cost=3, id="c"),
        "unsatisfiable": lambda: limiter.check(key, cost=6, id="c"),
        "denied by another limit": lambda: limiter.check(key, beside, id="d"),
    }
    left_for_ever = []
    for name, check in checks.items():
        assert client.persist(stored(key))
        limiter.peek(key)
        assert client.pttl(stored(key)) == -1
        check()
        if not reset_ms(limiter, key) <= client.pttl(stored(key)):
            left_for_ever.append(name)
    assert left_for_ever == []


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "leaky_bucket"])
def test_peeks_that_travel_together_adopt_no_plan(
    server: RedisServer, client: redis.Redis, unique: str, algorithm: str
) -> None:
    old, new = limit_of(algorithm, 5, unique).by("ada"), limit_of(algorithm, 3, unique).by("ada")

    async def main() -> None:
        async with AsyncLimiter(server.url) as limiter:
            await limiter.check(old, cost=2)
            before = trace(client, old)
            await asyncio.gather(*[limiter.peek(new) for _ in range(5)])
            assert trace(client, old)[0] == before[0]

    asyncio.run(main())


# What is not ours

FOREIGN: dict[str, Callable[[redis.Redis, str], Any]] = {
    "text": lambda client, name: client.set(name, "garbage"),
    "nothing": lambda client, name: client.set(name, ""),
    "a number": lambda client, name: client.set(name, "5"),
    "bytes": lambda client, name: client.set(name, b"\xff\x00\xfe"),
    "three words": lambda client, name: client.set(name, "1 2 x"),
    "five numbers": lambda client, name: client.set(name, "1 2 3 4 5"),
    "a list": lambda client, name: client.rpush(name, "garbage"),
    "a set": lambda client, name: client.sadd(name, "garbage"),
    "a hash": lambda client, name: client.hset(name, "field", "garbage"),
    "a sorted set": lambda client, name: client.zadd(name, {"garbage": time.time() * 1_000_000}),
    "a stream": lambda client, name: client.xadd(name, {"field": "garbage"}),
}


@pytest.mark.parametrize("poison", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_foreign_value_fails_only_the_checks_of_its_key(
    server: RedisServer, client: redis.Redis, unique: str, algorithm: str, poison: Callable[[redis.Redis, str], Any]
) -> None:
    limit = limit_of(algorithm, 5, unique)
    foreign, beside = limit.by("foreign"), Limit(5, HOUR, name=f"{unique}-beside").by("ada")
    poison(client, stored(foreign))
    before = trace(client, foreign)

    async def main() -> None:
        async with AsyncLimiter(server.url) as limiter:
            await asyncio.gather(limiter.peek(beside), limiter.peek(beside))  # so that the next ones ride together
            answers = await asyncio.gather(
                limiter.check(limit.by("first")),
                limiter.check(foreign),
                limiter.peek(foreign),
                limiter.check(beside, foreign),
                limiter.check(limit.by("last"), beside),
                return_exceptions=True,
            )
            assert [isinstance(answer, ScriptError) for answer in answers] == [False, True, True, True, False]
            assert f"'{unique}'" in str(answers[1])
            assert [answer.allowed for answer in (answers[0], answers[4])] == [True, True]
            # What the one request would have charged beside its foreign key was not charged.
            assert (await limiter.peek(beside)).remaining == 4
            assert trace(client, foreign) == before
            await limiter.reset(foreign)
            assert (await limiter.check(foreign)).allowed

    asyncio.run(main())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neither_leases_nor_refunds_take_a_foreign_value_for_an_answer(
    limiter: Limiter, client: redis.Redis, unique: str, algorithm: str
) -> None:
    key = limit_of(algorithm, 5, unique).by("ada")
    client.set(stored(key), "garbage")
    calls: list[Callable[[], Any]] = [lambda: limiter.refund(key, 1), lambda: limiter.refund(key, 1, id="1")]
    if algorithm == "concurrency":
        calls = [lambda: limiter.renew(key, id="a"), lambda: limiter.leave(key, id="a")]
    for call in calls:
        with pytest.raises(ScriptError):
            call()
    # An id is used up by a refund, not by the attempt.
    limiter.reset(key)
    if algorithm != "concurrency":
        limiter.check(key, cost=3)
        assert limiter.refund(key, 1, id="1")


def test_ten_thousand_crashed_holders_are_forgotten_in_one_go(
    limiter: Limiter, client: redis.Redis, unique: str
) -> None:
    """Lua passes at most 8,000 arguments at once."""
    room = limit_of("concurrency", 10_000, unique).by("ada")
    client.hset(stored(room), mapping={f"crashed-{number}": "1 1000 500 500" for number in range(10_000)})
    assert limiter.enter(room, id="a").remaining == 9_999
    assert client.hlen(stored(room)) == 1


# Whose clock


def test_default_clock_is_that_of_the_server(server: RedisServer, client: redis.Redis, unique: str) -> None:
    limiter = Limiter(server.url)
    keys = [limit_of(algorithm, 5, unique).by("ada") for algorithm in ALGORITHMS]
    with client.monitor() as monitor:
        limiter.check(*keys, id="a")
        limiter.refund(keys[1], 1)
        limiter.renew(keys[0], id="a")
        limiter.close()
        client.echo(unique)
        said = []
        for heard in monitor.listen():
            if heard["command"] == f"ECHO {unique}":
                break
            if heard["command"].startswith("EVAL") and heard["client_type"] != "lua":
                said.append(heard["command"].split())
    assert len(said) >= 3
    now_us = time.time() * 1_000_000
    numbers = [int(word) for words in said for word in words[2:] if word.isdecimal()]
    assert [number for number in numbers if abs(number - now_us) < 10 * 366 * 86_400 * 1_000_000] == []


def test_wrong_clock_on_a_callers_machine_changes_nothing(
    server: RedisServer, client: redis.Redis, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five a minute are five, whatever three machines believe what time it is."""
    key = limit_of("sliding_log", 5, unique, timedelta(minutes=1)).by("ada")
    real_time_ns = time.time_ns
    decisions = []
    for skew in (-120, 0, 120):
        monkeypatch.setattr(time, "time_ns", lambda skew=skew: real_time_ns() + skew * 1_000_000_000)
        monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1_000_000_000)
        with Limiter(server.url) as limiter:
            decisions += [limiter.check(key) for _ in range(5)]
    monkeypatch.undo()
    seconds, microseconds = client.time()
    now_us = seconds * 1_000_000 + microseconds
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 10
    # A denial that is remembered takes the way to the server for a part of its age.
    assert all(-100_000 <= now_us - decision.at_us < 5_000_000 for decision in decisions)


# How long a caller must wait at T, where one whose clock is two minutes fast has just used up five in five minutes:
# time does not fall behind the last request.
AFTER_A_FAST_CLOCK = {
    "concurrency": 420,
    "fixed_window": 300,
    "gcra": 180,
    "leaky_bucket": 180,
    "sliding_log": 420,
    "sliding_window": 360,
    "token_bucket": 180,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_injected_clocks_two_minutes_apart_share_one_limit(server: RedisServer, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 5, unique, timedelta(minutes=5)).by("ada")
    noon_us = 1_763_251_200_000_000
    clocks = {skew: FakeClock(noon_us + skew * 1_000_000) for skew in (120, 0, -120)}
    with (
        Limiter(server.url, clock=clocks[120]) as fast,
        Limiter(server.url, clock=clocks[0]) as right,
        Limiter(server.url, clock=clocks[-120]) as slow,
    ):
        assert fast.check(key, cost=5).allowed
        wait = AFTER_A_FAST_CLOCK[algorithm]
        for limiter, behind in ((fast, 0), (right, 120), (slow, 240)):
            denied = limiter.check(key)
            assert (denied.allowed, denied.remaining, denied.retry_after) == (False, 0, wait - 120 + behind)
        clocks[0].advance(wait - 0.000_001)
        assert not right.check(key).allowed
        clocks[0].advance(0.000_001)
        assert right.check(key).allowed


# In a cluster


def names_in(cluster: RedisCluster, pattern: str) -> dict[str, int]:
    """The stored names that match, each with the port of the primary that has it."""
    found = {}
    for node in cluster.nodes:
        with node.client() as client:
            if client.info("replication")["role"] == "master":
                found.update(dict.fromkeys(client.scan_iter(pattern, count=1000), node.port))
    return found


def test_limits_of_one_request_live_on_several_servers(cluster: RedisCluster, unique: str) -> None:
    """What the conformance suite shows for a cluster, it shows for limits that are apart."""
    keys = [Limit(5, HOUR, name=f"{unique}-{number}").by("ada") for number in range(12)]
    with Limiter(cluster.url) as limiter:
        assert limiter.check(*keys).allowed
        trips = limiter.stats["round_trips"]
        assert limiter.check(*keys, cost=4).allowed
        assert limiter.stats["round_trips"] == trips + 1
    assert len(set(names_in(cluster, f"*{unique}*").values())) == 3


def test_batch_is_split_only_by_a_process_that_waits_for_it(
    redis7: RedisServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has other work meanwhile, as a server has, would pay for two batches and win nothing."""
    key = Limit(10_000, timedelta(days=1), name=unique).by("ada")

    async def main() -> None:
        async with AsyncLimiter(redis7.url, lease=0) as limiter:

            async def trips(*, working: float = 0) -> int:
                before = limiter.stats["round_trips"]
                tasks = [asyncio.create_task(limiter.check(key)) for _ in range(32)]
                for _ in range(3):  # turns of the loop, in which all have asked, and were sent
                    await asyncio.sleep(0)
                end = time.perf_counter() + working
                while time.perf_counter() < end:
                    pass
                assert all(await asyncio.gather(*tasks))
                return limiter.stats["round_trips"] - before

            monkeypatch.setattr(async_store, "PROMPT_S_PER_CALL", 60.0)
            await trips()
            assert await trips() == 2
            monkeypatch.setattr(async_store, "PROMPT_S_PER_CALL", 0.00004)
            await trips(working=0.05)
            monkeypatch.setattr(async_store, "PROMPT_S_PER_CALL", 60.0)
            assert [await trips(), await trips()] == [1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("identity", ["ada", "{ada}", "a}b", "{a}{b}", "}{", "a:b", "ü", "x" * 500, "%"])
def test_what_remembers_a_refund_lives_where_the_counter_does(
    cluster: RedisCluster, unique: str, identity: str
) -> None:
    key = Limit(5, HOUR, name=unique).by(identity)
    with Limiter(cluster.url) as limiter:
        limiter.check(key, cost=5)
        assert [limiter.refund(key, 1, id=id) for id in ("r1", "{r2}", "}", "r1")] == [True, True, True, False]
    names = names_in(cluster, f"*{unique}*")
    assert len(names) == 4
    with cluster.nodes[0].client() as client:
        assert len({client.execute_command("CLUSTER", "KEYSLOT", name) for name in names}) == 1
    assert len(set(names.values())) == 1


def test_no_refund_of_one_key_uses_up_the_id_of_another(limiter: Limiter, unique: str) -> None:
    limit = Limit(5, HOUR, name=unique)
    pairs = [("a", "b}:refund:c"), ("a}:refund:b", "c"), ("a", "b%7D:refund:c"), ("a:refund:b", "c")]
    for identity, _ in pairs:
        limiter.check(limit.by(identity), cost=5)
    assert [limiter.refund(limit.by(identity), 1, id=id) for identity, id in pairs] == [True] * 4


@pytest.mark.parametrize("way", ["hold", "acquire"])
def test_cancelled_enter_holds_no_lease(redis7: RedisServer, unique: str, way: str) -> None:
    async def enter(limiter: AsyncLimiter, room: Limit) -> None:
        if way == "hold":
            async with limiter.hold(room):
                await asyncio.Event().wait()
        else:
            decision = await limiter.acquire(room, timeout=1)
            assert await limiter.leave(room, id=decision.id or "")  # it was in before it could be cancelled

    async def main() -> list[int]:
        rooms = [limit_of("concurrency", 1, f"{unique}-{number}") for number in range(8)]
        async with AsyncLimiter(redis7.url) as limiter:
            await limiter.peek(rooms[0])  # it is connected
            for turns, room in enumerate(rooms):
                task = asyncio.create_task(enter(limiter, room))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            for _ in range(100):  # whoever got in all the same is leaving
                left = [(await limiter.peek(room)).remaining for room in rooms]
                if all(left):
                    break
        return left

    assert asyncio.run(main()) == [1] * 8
