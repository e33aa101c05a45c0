"""What is measured: each scenario asks every contender in turn, several times over."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import redis

from bench.answers import expect_right_answers, expect_right_answers_async
from bench.ceiling import script_rate
from bench.contenders import ASYNC, SYNC, Contender, Setting
from bench.footprint import bytes_per_key
from bench.measure import Run, Sample, in_memory, in_memory_threads, on_redis, on_redis_async
from bench.progress import Progress

PARTS = ("memory", "sync", "async", "three", "ceiling")
THREADS = (1, 2, 8)
SYNC_CALLERS = (1, 16)
ASYNC_CALLERS = (1, 64, 256, 1024)
THREE_CALLERS = 64
CHECKS_PER_RUN = (1, 64)

# The limits are never met while the clock runs. The hot key takes all that a fast loop can ask of it; the usual limit
# is one under which a key is still remembered when it comes again.
HOT = (10_000_000, timedelta(minutes=1))
USUAL = (100_000, timedelta(hours=1))
TINY = (3, timedelta(hours=1))

HEADGATE = "headgate"
HEADGATE_ONE = "headgate, one limit"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything, and of what."""

    rounds: int = 5
    seconds: float = 0.6  # the length of one measurement
    memory_keys: int = 100_000
    redis_keys: int = 2_000
    footprint_keys: int = 200_000
    parts: frozenset[str] = frozenset(PARTS)
    contenders: frozenset[str] = frozenset()  # empty: all of them

    def chosen(self, contenders: Sequence[Contender]) -> list[Contender]:
        return [c for c in contenders if not self.contenders or c.name in self.contenders]


@dataclass(slots=True)
class Results:
    """Everything that was seen."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # scenario, contender: one a round
    bytes_per_key: dict[str, float] = field(default_factory=dict)
    ceiling: dict[int, list[float]] = field(default_factory=dict)  # by checks per run: checks a second, one a round


class Bench:
    """A run of everything that the plan asks for, on the server at `url`."""

    def __init__(self, plan: Plan, url: str, run: Run, progress: Progress) -> None:
        self.plan = plan
        self.url = url
        self.run = run
        self.progress = progress
        self.results = Results()

    def everything(self) -> Results:
        for part in PARTS:
            if part in self.plan.parts:
                getattr(self, f"_{part}")()
        return self.results

    def _memory(self) -> None:
        contenders, seconds, keys = self.plan.chosen(SYNC), self.plan.seconds, self.plan.memory_keys
        for contender in contenders:
            expect_right_answers(contender, Setting("memory://", *TINY))

        hot = Setting("memory://", *HOT, keys=1)
        self._rounds("memory, hot key", contenders, lambda c: in_memory(c, hot, _draws(1), seconds))
        many = Setting("memory://", *USUAL, keys=keys)
        self._rounds("memory, many keys", contenders, lambda c: in_memory(c, many, _draws(keys), seconds))
        for threads in THREADS:
            shared = Setting("memory://", *HOT, callers=threads, keys=1_000)
            measure = partial(in_memory_threads, setting=shared, seconds=seconds)
            self._rounds(f"memory, {threads} threads", contenders, measure)
        for contender in contenders:
            self.progress.say(f"memory, bytes per key at {self.plan.footprint_keys:,} keys", contender.name)
            self.results.bytes_per_key[contender.name] = bytes_per_key(contender, self.plan.footprint_keys)

    def _sync(self) -> None:
        contenders = self.plan.chosen(SYNC)
        for contender in contenders:
            self._flush()
            expect_right_answers(contender, Setting(self.url, *TINY))
        for threads in SYNC_CALLERS:
            setting = Setting(self.url, *USUAL, callers=threads, keys=self.plan.redis_keys)
            measure = partial(on_redis, setting=setting, seconds=self.plan.seconds)
            self._rounds(f"sync, {threads} threads", contenders, measure)

    def _async(self) -> None:
        contenders = self._right_async()
        for tasks in ASYNC_CALLERS:
            self._rounds(f"async, {tasks} tasks", contenders, self._async_measure(tasks, "one"))

    def _three(self) -> None:
        contenders = self._right_async()
        scenario = f"three limits, {THREE_CALLERS} tasks"
        one, three = (self._async_measure(THREE_CALLERS, limits) for limits in ("one", "three"))

        def measure(contender: Contender) -> Sample:
            if contender.name == HEADGATE:  # beside its own single limit, in the same breath
                self.results.samples[scenario].setdefault(HEADGATE_ONE, []).append(one(contender))
            return three(contender)

        self._rounds(scenario, contenders, measure)

    def _ceiling(self) -> None:
        for _ in range(self.plan.rounds):
            for checks in CHECKS_PER_RUN:
                self.progress.say("the server's own limit", f"{checks} checks a run")
                self._flush()
                rate = script_rate(self.url, checks, self.plan.redis_keys, self.plan.seconds)
                self.results.ceiling.setdefault(checks, []).append(rate)

    def _rounds(
        self, scenario: str, contenders: Sequence[Contender], measure: Callable[[Contender], Sample]
    ) -> None:
        """Everyone once a round, and each round begins with another, so that nobody always follows the same."""
        seen = self.results.samples[scenario] = {}
        for number in range(self.plan.rounds):
            first = number % max(1, len(contenders))
            for contender in [*contenders[first:], *contenders[:first]]:
                self.progress.say(scenario, f"round {number + 1} of {self.plan.rounds}, {contender.name}")
                self._flush()
                seen.setdefault(contender.name, []).append(measure(contender))

    def _async_measure(self, tasks: int, limits: str) -> Callable[[Contender], Sample]:
        setting = Setting(self.url, *USUAL, callers=tasks, keys=max(tasks, self.plan.redis_keys))
        return lambda c: self.run(on_redis_async(c, setting, self.plan.seconds, check=getattr(c, limits)))

    def _right_async(self) -> list[Contender]:
        contenders = self.plan.chosen(ASYNC)
        for contender in contenders:
            self._flush()
            self.run(expect_right_answers_async(contender, Setting(self.url, *TINY)))
        return contenders

    def _flush(self) -> None:
        """The same empty server for everybody."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


def _draws(keys: int) -> Iterator[list[str]]:
    """Lists of keys drawn at random, each a new string that nobody has hashed yet."""
    chance = random.Random(keys)
    while True:
        yield [f"user-{chance.randrange(keys)}" for _ in range(5_000)]
