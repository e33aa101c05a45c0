"""Redis decides as Python does: the same calls at the same instants, in memory and on a server, and every field of
every answer is equal, also where a product is more than Lua's doubles can hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Decision, InvalidLimit, Key, Limit, Limiter
from headgate.testing import FakeClock
from support.next_allowed import with_again

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

SECOND = 1_000_000
DAY = 86_400 * SECOND
NOW_US = 1_763_251_200 * SECOND
LATEST_US = 2**52 - 1

ALGORITHMS = ("concurrency", "fixed_window", "gcra", "leaky_bucket", "sliding_log", "sliding_window", "token_bucket")
REFILLED = ("gcra", "leaky_bucket", "token_bucket")


@dataclass
class Twins:
    """A limiter in memory and one on Redis, at the same instant; whatever is asked, both answer alike."""

    here: Limiter
    there: Limiter
    clock: FakeClock
    remembers: bool
    said: list[str] = field(default_factory=list)

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        words = [f"{word.limit}" if isinstance(word, Key) else f"{word}" for word in args]
        words += [f"{name}={word.at_us if isinstance(word, Decision) else word}" for name, word in options.items()]
        self.said.append(f"@{self.clock.now_us()} {method} {'; '.join(words)}")
        answers = [getattr(limiter, method)(*args, **options) for limiter in (self.here, self.there)]
        # Of checks with an id, Redis does not say when the same would pass again: the same would be a repetition.
        if method == "check" and (
            options.get("id") is None or all(key.limit.algorithm == "concurrency" for key in args)
        ):
            answers[0] = with_again(answers[0], options["cost"], lambda: self.here.check(*args, **options))
        if self.remembers and method == "check":
            answers[1] = as_told_last(*answers)
        assert answers[0] == answers[1], "memory and Redis differ after\n" + "\n".join(self.said[-12:])
        return answers[0]


def as_told_last(here: Decision, there: Decision) -> Decision:
    """The decision on Redis, where a denial that was remembered says of what remains only what was told last."""
    if here.allowed or any(told[0] > true[0] for true, told in zip(here.verdicts, there.verdicts, strict=True)):
        return there
    verdicts = [(true[0], *told[1:]) for true, told in zip(here.verdicts, there.verdicts, strict=True)]
    return there._replace(verdicts=tuple(verdicts))


@pytest.fixture(params=[("redis7", 0), ("valkey9", 0), ("redis7", 100)], ids=["redis7", "valkey9", "remembering"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    name, remember = request.param
    server: RedisServer = request.getfixturevalue(name)
    clock = FakeClock(NOW_US)
    with Limiter(clock=clock) as here, Limiter(server.url, clock=clock, remember=remember) as there:
        yield Twins(here, there, clock, remember > 0)


def limit_of(algorithm: str, quota: int, period_us: int, name: str, burst: int | None = None) -> Limit:
    return Limit(quota, timedelta(microseconds=period_us), burst=burst, algorithm=algorithm, name=name)


def any_limit(rng: random.Random, algorithm: str, name: str) -> Limit:
    """Of any magnitude that can be: most of them are large, and few of their numbers have a common divisor."""
    while True:
        quota, period_us, burst = (int(2 ** rng.uniform(0, bits)) for bits in (53, 48, 53))
        try:
            return limit_of(algorithm, quota, period_us, name, burst if algorithm in REFILLED else None)
        except InvalidLimit:
            continue


def any_cost(rng: random.Random, limit: Limit, remaining: int) -> int:
    return rng.choice(
        [1, 2, remaining, remaining + 1, limit.capacity, limit.capacity + 1, rng.randint(1, limit.capacity), 2**60]
    )


def any_step(rng: random.Random, limit: Limit, waits_us: list[int]) -> int:
    """To the microsecond at which something is promised to change, or around it, or anywhere; at times, back."""
    return rng.choice(
        [
            *[0, 1, limit.period_us // 2, limit.period_us, 2 * limit.period_us, rng.randint(0, 3 * limit.period_us)],
            *[wait_us + around for wait_us in waits_us for around in (-1, 0, 1)],
            *[-1, -rng.randint(0, 2 * limit.period_us)],
        ]
    )


def wander(twins: Twins, seed: str, algorithms: tuple[str, ...], name: str, *, back: bool, change: bool) -> None:
    """A random life of some keys: charged alone and together, looked at, given back and reset, and, if so wanted, with
    a clock that goes back and with plans that change."""
    rng = random.Random(seed)
    limits = [any_limit(rng, algorithm, f"{name}-{place}") for place, algorithm in enumerate(algorithms)]
    twins.clock.set_us(rng.choice([0, 1, NOW_US, LATEST_US // 2]))
    charged, waits_us, remaining = None, [0], 1
    for turn in range(120):
        limit = rng.choice(limits)
        step_us = any_step(rng, limit, waits_us)
        twins.clock.set_us(min(max(0, twins.clock.now_us() + (step_us if back else abs(step_us))), LATEST_US))
        key, lease = limit.by("ada"), rng.choice("abc")
        what = rng.choice(["check"] * 8 + ["together"] * 2 + ["look", "refund", "refund", "lease", "change", "reset"])
        if what in ("check", "together", "look"):
            keys = [one.by("ada") for one in limits] if what == "together" else [key]
            cost = 0 if what == "look" else any_cost(rng, limit, remaining)
            has_lease = any(one.limit.algorithm == "concurrency" for one in keys)
            id = rng.choice([lease if has_lease else None, f"{turn}", f"{turn - 1}", f"{turn - 2}"])
            decision = twins.ask("check", *keys, cost=cost, id=id)
            waits_us = [decision.retry_after_us or 0, decision.reset_after_us]
            remaining = decision.remaining
            charged = decision if decision.allowed and cost else charged
        elif what == "refund" and limit.algorithm != "concurrency":
            amount = rng.choice([0, 1, limit.capacity, rng.randint(1, limit.capacity)])
            # How long an id is remembered is a matter of real time on a server: it is asked for twice at once.
            id = rng.choice([None, f"refund-{turn}", f"{turn - 1}", f"{turn - 2}"])
            of = charged if charged is not None and charged.consumed(key) is not None else None
            for _ in range(2):
                twins.ask("refund", key, amount, id=id, of=rng.choice([None, of]))
        elif what == "lease" and limit.algorithm == "concurrency":
            twins.ask(rng.choice(["renew", "leave"]), key, id=lease)
        elif what == "change" and change:
            limits[limits.index(limit)] = any_limit(rng, limit.algorithm, limit.name)
        elif what == "reset" and not rng.randrange(4):
            twins.ask("reset", key)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("back", "change"), [(True, False), (False, True), (True, True)], ids=["back", "change", "both"]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_limit_answers_alike(
    twins: Twins, unique: str, algorithm: str, back: bool, change: bool, seed: int
) -> None:
    wander(twins, f"{algorithm} {seed}", (algorithm,), unique, back=back, change=change)


@pytest.mark.parametrize("seed", range(10))
def test_all_limits_together_answer_alike(twins: Twins, unique: str, seed: int) -> None:
    algorithms = random.Random(seed).sample(ALGORITHMS, 2 + seed % 6)
    wander(twins, f"together {seed}", tuple(algorithms), unique, back=True, change=seed % 2 == 0)


# The largest limits of each kind, which the seeds may miss


def widest(algorithm: str, name: str) -> Limit:
    """The largest quota that is still let in, at a period with which it has no common divisor."""
    low, high = 1, 2**53
    while high - low > 1:
        middle = (low + high) // 2
        try:
            limit_of(algorithm, middle, SECOND, name)
            low = middle
        except InvalidLimit:
            high = middle
    return limit_of(algorithm, low, SECOND, name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_widest_limit_counts_to_the_last_unit(twins: Twins, unique: str, algorithm: str) -> None:
    limit = widest(algorithm, unique)
    key = limit.by("ada")
    assert twins.ask("check", key, cost=limit.capacity - 2, id="a").remaining == 2
    assert not twins.ask("check", key, cost=3, id="b")
    assert twins.ask("check", key, cost=1, id="c").remaining == 1
    assert twins.ask("check", key, cost=1, id="d").remaining == 0
    denied = twins.ask("check", key, cost=1, id="e")
    twins.clock.set_us(NOW_US + denied.retry_after_us - 1)
    assert not twins.ask("check", key, cost=1, id="e")
    twins.clock.set_us(NOW_US + denied.retry_after_us)
    assert twins.ask("check", key, cost=1, id="e")


@pytest.mark.parametrize("cost", [1, 999_999_999, 10**9])
def test_billion_a_day_slides_exactly(twins: Twins, unique: str, cost: int) -> None:
    """10**9 times a day in microseconds is 8.64e19, ten thousand times what a double counts exactly."""
    key = limit_of("sliding_window", 10**9, DAY, unique).by("ada")
    twins.ask("check", key, cost=10**9)
    denied = twins.ask("check", key, cost=cost)
    assert not denied
    for around in (-1, 0):
        twins.clock.set_us(NOW_US + denied.retry_after_us + around)
        assert twins.ask("check", key, cost=cost).allowed == (around == 0)
    twins.clock.advance(12_345.678_901)
    twins.ask("check", key, cost=10**9 // 3)


def test_log_that_is_never_empty_counts_on_for_ever(twins: Twins, unique: str) -> None:
    """Its running total has no end: it must not run out of exact numbers, or of the digits that keep its order."""
    limit = widest("sliding_log", unique)
    key, half = limit.by("ada"), limit.capacity // 2 - 4
    for turn in range(40):
        assert twins.ask("check", key, cost=half - turn % 2)
        twins.ask("check", key, cost=3)
        twins.ask("check", key, cost=1)
        twins.clock.set_us(NOW_US + (turn + 1) * limit.period_us // 2)


@pytest.mark.parametrize("algorithm", REFILLED)
@pytest.mark.parametrize("quotas", [(999_983, 1_000_003), (7, 999_999_937), (999_999_937, 7), (3, 10**9)])
def test_plan_that_shares_no_divisor_with_the_last_is_adopted_exactly(
    twins: Twins, unique: str, algorithm: str, quotas: tuple[int, int]
) -> None:
    """Here old and new fractions of a token multiply to far more than 2**53."""
    rng = random.Random(f"{algorithm} {quotas}")
    key: Key
    for turn in range(30):
        limit = limit_of(algorithm, quotas[turn % 2], rng.choice([SECOND, 999_979, 1_000_033]), unique, burst=999)
        key = limit.by("ada")
        twins.ask("check", key, cost=rng.randint(1, 300))
        twins.clock.set_us(twins.clock.now_us() + rng.randint(0, 5_000))
        twins.ask("peek", key)
        if turn % 5 == 0:
            twins.ask("refund", key, rng.randint(0, 100))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ends_of_time_are_counted_like_any_other(twins: Twins, unique: str, algorithm: str) -> None:
    key = limit_of(algorithm, 3, 10 * 365 * DAY, unique).by("ada")
    for now_us in (0, 1, LATEST_US, LATEST_US - 1, 0):
        twins.clock.set_us(now_us)
        for cost in (2, 1, 1, 0):
            twins.ask("check", key, cost=cost, id="abc"[cost])
            twins.ask("check", key, cost=0, id="a")
