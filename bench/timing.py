"""Timed loops around the expression of a contender."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from time import perf_counter, process_time
from typing import Any

import redis

from bench.contenders import Contender
from bench.correctness import all_allowed, expect_allowed_async
from bench.expressions import compiled, open_contender
from bench.setups import Setting

Run = Callable[[Coroutine[Any, Any, Any]], Any]  # asyncio.run, or uvloop's
FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one contender."""

    rate: float  # checks (or whole requests) a second
    p50_us: float = 0.0
    p99_us: float = 0.0
    client_us: float = 0.0  # CPU time for each, in this process
    server_us: float = 0.0  # and in the server's

    @property
    def time_us(self) -> float:
        return 1e6 / self.rate


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of several rounds."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


# -- memory: the loop is timed as a whole, since a clock around each check would cost as much as the check ---

_LOOP = """
def compiled(keys):
    began = clock()
    for key in keys:
        {check}
    return clock() - began
"""


def in_memory(
    contender: Contender, setting: Setting, draws: Iterator[list[str]], seconds: float, *, check: str
) -> Sample:
    """One thread, asking for keys as they are drawn, on the clock of the CPU: neighbours on the machine do not count.

    Every key has been seen once before, but its str is new, as in a request: its hash is not cached yet.
    """
    keys = _keys(setting)
    with open_contender(contender, setting) as names, all_allowed(contender, names, keys):
        loop = compiled(_LOOP, {**names, "clock": process_time}, check=check)
        loop(keys)
        checks, spent = 0, 0.0
        with tidy():
            while spent < seconds:
                drawn = next(draws)
                spent += loop(drawn)
                checks += len(drawn)
    return Sample(rate=checks / spent)


def in_memory_threads(contender: Contender, setting: Setting, seconds: float) -> Sample:
    """`setting.callers` threads over the same keys."""
    keys = _keys(setting)
    checks = [0] * setting.callers
    with open_contender(contender, setting) as names, all_allowed(contender, names, keys):
        loop = compiled(_LOOP, names, check=contender.one)

        def call(caller: int, until: float) -> None:
            while perf_counter() < until:
                loop(keys)
                checks[caller] += len(keys)

        loop(keys)
        with tidy():
            spent = _in_threads(call, setting.callers, seconds)
    return Sample(rate=sum(checks) / spent)


# -- Redis: each check is timed, since its wait is what a caller sees ----------------------------------------

_CALLER = """
{define} compiled(keys, until, laps):
    for key in keys:
        began = clock()
        {check}
        ended = clock()
        laps.append(ended - began)
        if ended >= until:
            return
"""


def on_redis(contender: Contender, setting: Setting, seconds: float) -> Sample:
    """`setting.callers` threads, each asking again as soon as it has its answer."""
    keys = _keys(setting)
    laps: list[float] = []
    with open_contender(contender, setting) as names, all_allowed(contender, names, keys):
        caller = compiled(_CALLER, names, check=contender.one, define="def")

        def warm(number: int, _: float) -> None:
            caller(keys[number :: setting.callers], FOR_EVER, [])

        def call(number: int, until: float) -> None:
            caller(_round(keys, number, setting), until, laps)

        _in_threads(warm, setting.callers, 0)
        with tidy():
            cpu_before = _cpu_seconds(setting)
            spent = _in_threads(call, setting.callers, seconds)
            cpu_after = _cpu_seconds(setting)
    return _sample(laps, spent, cpu_before, cpu_after)


async def on_redis_async(contender: Contender, setting: Setting, seconds: float, *, check: str) -> Sample:
    """`setting.callers` tasks on one loop, each asking again as soon as it has its answer."""
    keys = _keys(setting)
    laps: list[float] = []
    everyone = range(setting.callers)
    async with AsyncExitStack() as stack:
        names = await contender.setup(setting, stack)
        caller = compiled(_CALLER, names, check=check, define="async def")
        await asyncio.gather(*[caller(keys[n :: setting.callers], FOR_EVER, []) for n in everyone])
        with tidy():
            cpu_before = _cpu_seconds(setting)
            began = perf_counter()
            await asyncio.gather(*[caller(_round(keys, n, setting), began + seconds, laps) for n in everyone])
            spent = perf_counter() - began
            cpu_after = _cpu_seconds(setting)
        await expect_allowed_async(contender, names, check, keys)
    return _sample(laps, spent, cpu_before, cpu_after)


@contextmanager
def tidy() -> Iterator[None]:
    """Whatever is there already is not looked through again by the garbage collector: most of it is the modules of all
    the other contenders."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _keys(setting: Setting) -> list[str]:
    return [f"user-{number}" for number in range(setting.keys)]


def _round(keys: list[str], caller: int, setting: Setting) -> Iterator[str]:
    """Round and round all keys, each caller starting elsewhere, so that they seldom meet on one."""
    return islice(cycle(keys), caller * len(keys) // setting.callers, None)


def _cpu_seconds(setting: Setting) -> tuple[float, float]:
    """What this process and the server have worked so far."""
    return process_time(), redis_cpu_seconds(setting.url)


def redis_cpu_seconds(url: str) -> float:
    """What the server has worked so far."""
    with redis.Redis.from_url(url) as client:
        used = client.info("cpu")
    seconds: float = used["used_cpu_user"] + used["used_cpu_sys"]
    return seconds


def _sample(laps: list[float], spent: float, cpu_before: tuple[float, ...], cpu_after: tuple[float, ...]) -> Sample:
    laps.sort()
    client, server = (after - before for before, after in zip(cpu_before, cpu_after, strict=True))
    return Sample(
        rate=len(laps) / spent,
        p50_us=laps[len(laps) // 2] * 1e6,
        p99_us=laps[len(laps) * 99 // 100] * 1e6,
        client_us=client / len(laps) * 1e6,
        server_us=server / len(laps) * 1e6,
    )


def _in_threads(call: Callable[[int, float], None], callers: int, seconds: float) -> float:
    """How long it took until every caller was done. What fails in a thread is raised here."""
    failures: list[BaseException] = []

    def guarded(caller: int) -> None:
        try:
            call(caller, began + seconds)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(caller,)) for caller in range(callers)]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return perf_counter() - began
