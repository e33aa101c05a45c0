"""`python -m bench.hot_keys`: one key that a whole fleet asks for, with prepaid tokens and without, on a real Redis.

Real processes offer checks at an even pace from a common instant. What is measured: how many calls reach the store,
whether more passes in any interval than was promised, and how much of the limit is used. Then a single client that
knocks a hundred times as often as it may.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import redis

from bench.progress import Progress
from bench.redis_server import running_redis
from headgate import AsyncLimiter, Limit, Limiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEASE = 0.1
SECOND_NS = 1_000_000_000
TOGETHER = 50
"""Tasks that a process which is behind starts at most before it lets them run."""
GET_READY = 1.0
"""Seconds for all processes to hear of the common instant before it comes."""

LEAST_SAVED, LEAST_USED, LEAST_REMEMBERED = 0.90, 0.98, 0.99


@dataclass(frozen=True, slots=True)
class Load:
    """What one run offers, and to which kind of limiter."""

    limit: Limit
    rate: int
    """Checks a second, from all processes together."""
    seconds: float
    processes: int
    options: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False

    @property
    def times(self) -> float:
        """The demand, in limits."""
        return self.rate * self.limit.period_us / 1_000_000 / self.limit.quota


@dataclass(slots=True)
class Told:
    """What one process has seen. Instants are nanoseconds on the clock that all processes of a machine share."""

    offered: Counter[int] = field(default_factory=Counter)
    """How many checks began in each second of the epoch."""
    began: array[int] = field(default_factory=lambda: array("q"))
    ended: array[int] = field(default_factory=lambda: array("q"))
    """Of those that were admitted."""
    wall_ns: int = 0
    """What to add for the epoch's time."""
    stats: dict[str, int] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Outcome:
    load: Load
    checks: int
    admitted: int
    calls: int
    """Calls that the limiters sent to the store."""
    scripts: int
    """Scripts that Redis ran: calls may have travelled together, and what was not spent has gone back beside them."""
    spare: float
    """By how much the fullest interval stayed below what was promised, in capacities; below 0, it did not."""
    used: float
    """The share of what the limit allows that was admitted, as far as it was asked for."""
    failures: dict[str, int]

    @property
    def calls_per_check(self) -> float:
        return max(self.calls, self.scripts if not self.load.asynchronous else 0) / self.checks


def main() -> None:
    options = _options()
    progress = Progress()
    with running_redis() as url:
        rows = list(_hot_rows(url, options, progress))
        lonely = list(_lonely_rows(url, options, progress))
    progress.done()
    kind = "AsyncLimiter" if options.asyncio else "Limiter"
    print(
        f"\n{options.rate:,} checks/s from {options.processes} processes, {options.seconds:g} s, {kind}. "
        "Calls are those to the store, as a share of the checks.\n"
    )
    print(*_table(HOT_HEAD, rows), sep="\n")
    print("\nOne client at 100 times its limit, one process:\n")
    print(*_table(LONELY_HEAD, lonely), sep="\n")


# -- the scenarios ---------------------------------------------------------------------------------------------

HOT_HEAD = (
    "limit", "demand", "checks/s", "calls: neither", "calls: no leases", "calls: leases", "fewer than neither",
    "fewer than no leases", "below the bound by", "used", "used: neither", "failures",
)  # fmt: skip
LONELY_HEAD = (
    "limit", "checks", "admitted", "calls to the store", "fewer", "of the denied, fewer", "below the bound by", "used",
)  # fmt: skip


def _hot_rows(url: str, options: argparse.Namespace, progress: Progress) -> Iterator[tuple[str, ...]]:
    fleet = {"on_failure": "local", "budget": 0.25} if options.fleet else {}
    for algorithm in options.algorithm or ("token_bucket", "fixed_window"):
        for times in options.demand or (0.5, 2.0, 20.0):
            quota = round(options.rate / times)
            limit = Limit(quota, timedelta(seconds=1), algorithm=algorithm, name=f"hot-{algorithm}-{times:g}")
            load = Load(limit, options.rate, options.seconds, options.processes, fleet, options.asyncio)
            title = f"{algorithm}, demand {times:g} times the limit"
            outcomes = []
            for name, kind in (
                ("neither", {"lease": 0, "remember": 0}),
                ("no leases", {"lease": 0}),
                ("leases", {"lease": LEASE}),
            ):
                progress.say(f"{title}, {name}", f"{options.seconds:g} s")
                seconds = options.seconds if name == "leases" else min(options.seconds, 4.0)
                outcomes.append(_run(url, replace(load, options={**fleet, **kind}, seconds=seconds)))
            neither, remembering, leases = outcomes
            saved = 1 - leases.calls_per_check / neither.calls_per_check
            more = 1 - leases.calls_per_check / remembering.calls_per_check
            yield (
                f"{algorithm} {quota:,}/s",
                f"{times:g}x",
                f"{leases.checks / options.seconds:,.0f}",
                *[f"{each.calls_per_check:.2%}" for each in outcomes],
                _judged(saved, LEAST_SAVED),
                f"{more:.1%}",
                _judged(leases.spare, 0.0),
                _judged(leases.used, LEAST_USED),
                f"{neither.used:.1%}",
                " ".join(f"{count} {name}" for each in outcomes for name, count in each.failures.items()) or "none",
            )


def _lonely_rows(url: str, options: argparse.Namespace, progress: Progress) -> Iterator[tuple[str, ...]]:
    for algorithm in options.algorithm or ("token_bucket", "fixed_window"):
        for quota, period in ((600, 60), (10, 1), (100, 1)):
            limit = Limit(
                quota, timedelta(seconds=period), algorithm=algorithm, burst=None, name=f"lonely-{quota}-{period}"
            )
            progress.say(f"{algorithm}, a client at 100 times {quota} in {period} s", f"{options.seconds:g} s")
            load = Load(limit, 100 * quota // period, options.seconds, 1, {}, options.asyncio)
            told = _run(url, load)
            denied = told.checks - told.admitted
            asked_for_denied = max(0, told.calls - told.admitted)
            yield (
                f"{algorithm} {quota}/{period} s",
                f"{told.checks:,}",
                f"{told.admitted:,}",
                f"{told.calls:,}",
                f"{1 - told.calls / told.checks:.2%}",
                _judged(1 - asked_for_denied / denied if denied else 1.0, LEAST_REMEMBERED),
                _judged(told.spare, 0.0),
                f"{told.used:.1%}",
            )


def _judged(value: float, least: float) -> str:
    return f"{value:.1%}" if value >= least else f"**{value:.1%}** (wanted {least:.0%})"


# -- one run ---------------------------------------------------------------------------------------------------


def _run(url: str, load: Load) -> Outcome:
    context = multiprocessing.get_context("spawn")
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.flushall()
        pipes, processes = [], []
        for number in range(load.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_offer, args=(url, load, number, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # it is connected
        client.config_resetstat()
        start_ns = _next_second_ns() if load.limit.algorithm == "fixed_window" else time.monotonic_ns()
        for pipe in pipes:
            pipe.send(start_ns + round(GET_READY * SECOND_NS))
        told: list[Told] = [pipe.recv() for pipe in pipes]
        scripts = sum(
            figures["calls"] for name, figures in client.info("commandstats").items() if name.startswith("cmdstat_eval")
        )
        for process in processes:
            process.join()
    return _outcome(load, told, scripts)


def _next_second_ns() -> int:
    """The next whole second of the epoch, on the steady clock."""
    return time.monotonic_ns() + SECOND_NS - time.time_ns() % SECOND_NS


def _offer(url: str, load: Load, number: int, pipe: Any) -> None:
    """One process: paced checks from the common instant on."""
    if load.asynchronous:
        pipe.send(asyncio.run(_offer_async(url, load, number, pipe)))
    else:
        pipe.send(_offer_sync(url, load, number, pipe))


def _offer_sync(url: str, load: Load, number: int, pipe: Any) -> Told:
    told = Told(wall_ns=time.time_ns() - time.monotonic_ns())
    key = load.limit.by("everybody")
    with Limiter(url, **load.options) as limiter:
        limiter.peek(load.limit.by(f"nobody-{number}"))
        start_ns = _common_instant(pipe)
        before = dict(limiter.stats)
        for _ in _turns(load, start_ns):
            began = time.monotonic_ns()
            told.offered[(began + told.wall_ns) // SECOND_NS] += 1
            try:
                decision = limiter.check(key)
            except Exception as error:
                told.failures[type(error).__name__] += 1
                continue
            _note(told, decision, began)
        told.stats = _since(before, limiter.stats)
    return told


async def _offer_async(url: str, load: Load, number: int, pipe: Any) -> Told:
    told = Told(wall_ns=time.time_ns() - time.monotonic_ns())
    key = load.limit.by("everybody")

    async def ask(limiter: AsyncLimiter) -> None:
        began = time.monotonic_ns()
        told.offered[(began + told.wall_ns) // SECOND_NS] += 1
        try:
            decision = await limiter.check(key)
        except Exception as error:
            told.failures[type(error).__name__] += 1
        else:
            _note(told, decision, began)

    async with AsyncLimiter(url, **load.options) as limiter:
        await limiter.peek(load.limit.by(f"nobody-{number}"))
        start_ns = _common_instant(pipe)
        before = dict(limiter.stats)
        running: set[asyncio.Task[None]] = set()
        for turn, is_due in enumerate(_due(load, start_ns)):
            if not is_due or turn % TOGETHER == 0:
                await asyncio.sleep(0 if is_due else 0.0005)
            if not is_due:
                continue
            task = asyncio.create_task(ask(limiter))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        told.stats = _since(before, limiter.stats)
    return told


def _note(told: Told, decision: Any, began: int) -> None:
    if decision.degraded is not None:
        told.failures[f"degraded: {decision.degraded}"] += 1
    if decision.allowed:
        told.began.append(began)
        told.ended.append(time.monotonic_ns())


def _turns(load: Load, start_ns: int) -> Iterator[None]:
    for is_due in _due(load, start_ns):
        if is_due:
            yield
        else:
            time.sleep(0.0005)


def _due(load: Load, start_ns: int) -> Iterator[bool]:
    """Yields when the next check is due; a task that has fallen behind catches up until the end."""
    rate, done, end_ns = load.rate / load.processes, 0, start_ns + round(load.seconds * SECOND_NS)
    while (now := time.monotonic_ns()) < end_ns:
        due = (now - start_ns) * rate / SECOND_NS > done
        done += due
        yield due


def _common_instant(pipe: Any) -> int:
    """The instant to start at, once it has come."""
    pipe.send("ready")
    start_ns: int = pipe.recv()
    time.sleep(max(0, start_ns - time.monotonic_ns()) / SECOND_NS)
    return start_ns


def _since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items()}


# -- what is made of it ----------------------------------------------------------------------------------------


def _outcome(load: Load, told: Sequence[Told], scripts: int) -> Outcome:
    offered = sum((each.offered for each in told), Counter[int]())
    admitted = sum(len(each.ended) for each in told)
    limit, failures = load.limit, sum((each.failures for each in told), Counter[str]())
    if limit.algorithm == "fixed_window":
        windows = Counter[int]()
        period = limit.period_us // 1_000_000
        for second, count in offered.items():
            windows[second // period] += count
        possible = sum(min(count, limit.quota) for count in windows.values())
        spare = 1 - max(_within_windows(load, told).values(), default=0) / limit.quota
    else:
        possible = min(sum(offered.values()), limit.capacity + _span(told) * _per_second(limit))
        most = limit.capacity + LEASE * _per_second(limit)
        spare = (most - _most_above_rate(load, told)) / limit.capacity
    return Outcome(
        load,
        sum(offered.values()),
        admitted,
        sum(each.stats["calls"] for each in told),
        scripts,
        spare,
        admitted / possible,
        dict(failures),
    )


def _within_windows(load: Load, told: Sequence[Told]) -> Counter[int]:
    """How many were certainly admitted within each window: they began and ended in it."""
    period_ns = load.limit.period_us * 1000
    within = Counter[int]()
    for each in told:
        for began, ended in zip(each.began, each.ended, strict=True):
            window = (began + each.wall_ns) // period_ns
            if window == (ended + each.wall_ns) // period_ns:
                within[window] += 1
    return within


def _most_above_rate(load: Load, told: Sequence[Told]) -> float:
    """The largest of (admitted in D) - rD over all intervals D, from where any of them began to where any ended."""
    per_ns = _per_second(load.limit) / SECOND_NS
    pairs = sorted((ended, began) for each in told for began, ended in zip(each.began, each.ended, strict=True))
    most, best = 0.0, float("-inf")
    for number, (ended, began) in enumerate(pairs):
        best = max(best, began * per_ns - number)
        most = max(most, number + 1 - ended * per_ns + best)
    return most


def _span(told: Sequence[Told]) -> float:
    """Seconds from the first that was admitted to the last."""
    return (max(each.ended[-1] for each in told) - min(each.began[0] for each in told)) / SECOND_NS


def _per_second(limit: Limit) -> float:
    return limit.quota * 1_000_000 / limit.period_us


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' --: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hot_keys", description=__doc__)
    parser.add_argument("--rate", type=int, default=20_000, help="checks a second, from all processes together")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each run with leases takes")
    parser.add_argument("--demand", type=float, action="append", help="in limits (may be given again)")
    parser.add_argument("--algorithm", action="append", help="this one (may be given again)")
    parser.add_argument("--asyncio", action="store_true", help="AsyncLimiter instead of Limiter")
    parser.add_argument("--fleet", action="store_true", help="limiters that know how many they are (on_failure=local)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
