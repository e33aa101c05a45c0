"""The scenarios: each measures all contenders in interleaved rounds."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import redis

from bench.apps import BARE_APP, FASTAPI, FLASK, AppContender
from bench.asgi_cpu import cpu_time, expect_limits
from bench.contenders import ASYNC, HEADGATE, HEADGATE_ONE_LIMIT, SYNC, Contender
from bench.correctness import expect_right_answers, expect_right_answers_async
from bench.http_load import CONNECTIONS, under_load
from bench.memory_footprint import bytes_per_key
from bench.policy_costs import LARGE, PolicySample, policy_costs, yaml_seconds
from bench.progress import Progress
from bench.redis_ceiling import script_rate
from bench.setups import Setting
from bench.timing import Run, Sample, in_memory, in_memory_threads, on_redis, on_redis_async

PARTS = ("memory", "sync", "async", "three", "ceiling", "http", "policy")
THREADS = (1, 2, 8)
SHARED_KEYS = 1_000
SYNC_CALLERS = (1, 16)
ASYNC_CALLERS = (1, 64, 256, 1024)
BUSY_CALLERS = (256, 1024)  # where headgate's batches are full
THREE_CALLERS = 64
CHECKS_PER_RUN = (1, 64)
STORES = ("memory", "Redis")
CPU_CALLERS = (1, 64)

# No limit is reached while it is timed. HOT allows everything that a fast loop can request of one key. Under USUAL, a
# key has not fully recovered when it is used again, so that no store can have dropped it.
HOT = (10_000_000, timedelta(minutes=1))
USUAL = (1_000, timedelta(hours=1))
TINY = (3, timedelta(hours=1))

HOT_KEY = "memory, one hot key"
HEADERS = "memory, one hot key, with the numbers for headers"
MANY_KEYS = "memory, many keys"
CEILING = "the limit of the Redis server"
PAIRS = 5  # measurements of one limit and three per round
THREE_LIMITS = f"three limits on one request, {THREE_CALLERS} tasks"
POLICY = f"a policy of {LARGE}"


def memory_threads(callers: int) -> str:
    return f"memory, {callers} thread{'s' * (callers > 1)}"


def threads(callers: int) -> str:
    return f"threads, {callers}"


def tasks(callers: int) -> str:
    return f"tasks, {callers:,}"


def http(framework: str, store: str) -> str:
    server = {"FastAPI": "uvicorn", "Flask": "gunicorn"}[framework]
    return f"{framework} under {server}, {CONNECTIONS} connections, {store}"


def cpu(store: str, callers: int) -> str:
    return f"FastAPI called directly, {callers} at once, {store}"


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyContender = TypeVar("AnyContender", bound=Named)


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a run."""

    rounds: int = 5
    seconds: float = 0.5  # the length of one measurement
    tasks: tuple[int, ...] = ASYNC_CALLERS
    memory_keys: int = 100_000
    redis_keys: int = 2_000
    footprint_keys: int = 200_000
    http_seconds: float = 3.0  # the length of a run of wrk
    yaml: bool = True  # also load the large policy as YAML, which is slow
    parts: frozenset[str] = frozenset(PARTS)
    contenders: frozenset[str] = frozenset()  # empty: all of them
    is_quick: bool = False

    def chosen(self, contenders: Sequence[AnyContender]) -> list[AnyContender]:
        """The selected contenders, and the bare app."""
        return [c for c in contenders if not self.contenders or c.name in (*self.contenders, BARE_APP)]


@dataclass(slots=True)
class Results:
    """All measurements, one per round."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by scenario and contender
    ceiling: dict[int, list[float]] = field(default_factory=dict)  # checks a second, by checks per run
    bytes_per_key: dict[str, float] = field(default_factory=dict)
    policies: list[PolicySample] = field(default_factory=list)
    yaml_s: float | None = None


class Bench:
    """A benchmark run against the Redis at `url`."""

    def __init__(self, plan: Plan, url: str, run: Run, progress: Progress) -> None:
        self.plan = plan
        self.url = url
        self.run = run
        self.progress = progress
        self.results = Results()

    def measure_all(self) -> Results:
        for part in PARTS:
            if part in self.plan.parts:
                getattr(self, f"_{part}")()
        return self.results

    def _memory(self) -> None:
        contenders, seconds, keys = self.plan.chosen(SYNC), self.plan.seconds, self.plan.memory_keys
        for contender in contenders:
            expect_right_answers(contender, Setting("memory://", *TINY))
        stores = [c for c in contenders if c.name != "slowapi"]  # it uses the store of limits

        hot = Setting("memory://", *HOT, keys=1)
        self._rounds(HOT_KEY, contenders, lambda c: in_memory(c, hot, _draws(1), seconds, check=c.one))
        telling = [c for c in contenders if c.headers]
        self._rounds(HEADERS, telling, lambda c: in_memory(c, hot, _draws(1), seconds, check=c.headers))
        many = Setting("memory://", *USUAL, keys=keys)
        self._rounds(MANY_KEYS, stores, lambda c: in_memory(c, many, _draws(keys), seconds, check=c.one))
        for callers in THREADS:
            shared = Setting("memory://", *HOT, callers=callers, keys=SHARED_KEYS)
            measure = partial(in_memory_threads, setting=shared, seconds=seconds)
            self._rounds(memory_threads(callers), contenders, measure)
        for contender in stores:
            self.progress.say(f"memory, bytes per key at {self.plan.footprint_keys:,} keys", contender.name)
            self.results.bytes_per_key[contender.name] = bytes_per_key(contender, self.plan.footprint_keys)

    def _sync(self) -> None:
        contenders = self.plan.chosen(SYNC)
        for contender in contenders:
            self._flush()
            expect_right_answers(contender, Setting(self.url, *TINY))
        for callers in SYNC_CALLERS:
            setting = Setting(self.url, *USUAL, callers=callers, keys=self.plan.redis_keys)
            measure = partial(on_redis, setting=setting, seconds=self.plan.seconds)
            self._rounds(threads(callers), contenders, measure)

    def _async(self) -> None:
        contenders = self._right_async()
        for callers in self.plan.tasks:
            self._rounds(tasks(callers), contenders, self._async_measure(callers, "one"))

    def _three(self) -> None:
        contenders = self._right_async()
        one, three = (self._async_measure(THREE_CALLERS, limits) for limits in ("one", "three"))

        def measure(contender: Contender) -> Sample:
            if contender.name != HEADGATE:
                return three(contender)
            # One limit and three directly after each other; of several such pairs, the median.
            pairs = sorted([(one(contender), three(contender)) for _ in range(PAIRS)], key=_ratio)
            single, threefold = pairs[PAIRS // 2]
            self.results.samples[THREE_LIMITS].setdefault(HEADGATE_ONE_LIMIT, []).append(single)
            return threefold

        self._rounds(THREE_LIMITS, contenders, measure)

    def _ceiling(self) -> None:
        """The rate of the script in redis-benchmark, and of Headgate directly after it."""

        def measure(contender: Contender) -> Sample:
            for checks in CHECKS_PER_RUN:
                rate = script_rate(self.url, checks, self.plan.redis_keys, self.plan.seconds)
                self.results.ceiling.setdefault(checks, []).append(rate)
                self._flush()
            samples = [self._async_measure(callers, "one")(contender) for callers in BUSY_CALLERS]
            return max(samples, key=lambda sample: sample.rate)

        self._rounds(CEILING, [contender for contender in ASYNC if contender.name == HEADGATE], measure)

    def _http(self) -> None:
        for store in STORES:
            self._http_on(store, "memory://" if store == "memory" else self.url)

    def _http_on(self, store: str, url: str) -> None:
        for framework, everyone in (("FastAPI", FASTAPI), ("Flask", FLASK)):
            contenders = self.plan.chosen(everyone)
            for contender in contenders:
                self._flush()
                self.run(expect_limits(framework, contender, Setting(url, *TINY)))

            def measure(contender: AppContender, framework: str = framework) -> Sample:
                return under_load(framework, contender, Setting(url, *HOT), self.url, self.plan.http_seconds)

            self._rounds(http(framework, store), contenders, measure)
        contenders = self.plan.chosen(FASTAPI)
        for callers in CPU_CALLERS:
            seen = self.results.samples[cpu(store, callers)] = {}
            for number in range(self.plan.rounds):
                self.progress.say(cpu(store, callers), f"round {number + 1} of {self.plan.rounds}")
                self._flush()
                setting = Setting(url, *HOT, callers=callers)
                for name, sample in self.run(cpu_time(contenders, setting, self.plan.seconds)).items():
                    seen.setdefault(name, []).append(sample)

    def _policy(self) -> None:
        for number in range(self.plan.rounds):
            self.progress.say(POLICY, f"round {number + 1} of {self.plan.rounds}")
            self.results.policies.append(policy_costs())
        if self.plan.yaml:
            self.progress.say(POLICY, "as YAML")
            self.results.yaml_s = yaml_seconds()

    def _rounds(
        self, scenario: str, contenders: Sequence[AnyContender], measure: Callable[[AnyContender], Sample]
    ) -> None:
        """Measure every contender once per round, in an order that rotates."""
        seen = self.results.samples[scenario] = {}
        for number in range(self.plan.rounds):
            first = number % max(1, len(contenders))
            for contender in [*contenders[first:], *contenders[:first]]:
                self.progress.say(scenario, f"round {number + 1} of {self.plan.rounds}, {contender.name}")
                self._flush()
                seen.setdefault(contender.name, []).append(measure(contender))

    def _async_measure(self, callers: int, limits: str) -> Callable[[Contender], Sample]:
        setting = Setting(self.url, *USUAL, callers=callers, keys=max(callers, self.plan.redis_keys))
        return lambda c: self.run(on_redis_async(c, setting, self.plan.seconds, check=getattr(c, limits)))

    def _right_async(self) -> list[Contender]:
        contenders = self.plan.chosen(ASYNC)
        for contender in contenders:
            self._flush()
            self.run(expect_right_answers_async(contender, Setting(self.url, *TINY)))
        return contenders

    def _flush(self) -> None:
        """Empty the server."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


def _draws(keys: int) -> Iterator[list[str]]:
    """Yield lists of random keys."""
    chance = random.Random(keys)
    while True:
        yield [f"user-{chance.randrange(keys)}" for _ in range(5_000)]


def _ratio(pair: tuple[Sample, Sample]) -> float:
    one, other = pair
    return one.rate / other.rate
