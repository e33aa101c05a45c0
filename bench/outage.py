"""`python -m bench.outage`: what checks cost while the store is stopped or refuses, for one limiter by itself.

The fault suite (`make chaos`) breaks the store under a whole fleet; here nothing else runs, so that what is measured is
the limiter and not its neighbours. A process beside it does nothing but sleep: by how much it comes too late is what
the machine adds to any wait, and stands beside the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import redis

from bench.progress import Progress
from bench.redis_server import free_port, start_redis
from headgate import AsyncLimiter, Limit, Limiter

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from multiprocessing.connection import Connection

BUDGET = 0.005
AIM_MS = (BUDGET + 0.002) * 1000
AIM_OPEN_US = 50
AIM_BACK_S = 1.0

RATE = 2000
"""Checks a second."""
ASKERS = 8
"""Threads, or tasks, that ask them."""
BEFORE, DURING, AFTER = 1.0, 5.0, 2.0
"""Seconds of the store being there, away, and there again."""
KEYS = 500
LIMIT = Limit(1_000_000, timedelta(minutes=1), name="outage")


@dataclass(slots=True)
class Seen:
    """Each check: when it began, how long it took in seconds, and whether the store decided."""

    checks: list[tuple[float, float, bool]] = field(default_factory=list)
    failures: int = 0


def main() -> None:
    options = _options()
    progress = Progress()
    rows = []
    for asynchronous in (False, True):
        for fault in ("stopped", "refused"):
            name = f"{fault}, {'asyncio' if asynchronous else 'threads'}"
            rounds = []
            for number in range(options.rounds):
                progress.say(name, f"round {number + 1} of {options.rounds}")
                rounds.append(_measured(fault, asynchronous=asynchronous))
            rows.append((name, rounds))
    progress.done()
    print(
        f"{RATE:,} checks/s of {ASKERS} threads or tasks, budget {BUDGET * 1000:g} ms, {options.rounds} rounds: the "
        "median, and the worst of them. `machine` is what it adds to a process that only sleeps.\n"
    )
    aims = f"p99.9 (aim {AIM_MS:g} ms) | max | p50 once open (aim {AIM_OPEN_US} us) | back after (aim {AIM_BACK_S:g} s)"
    print(f"| fault | {aims} | machine p99.9 | failures |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, rounds in rows:
        columns = [
            _told([each[index] for each in rounds], unit) for index, unit in enumerate(("ms", "ms", "us", "ms", "ms"))
        ]
        print(f"| {name} | {' | '.join(columns)} | {sum(each[5] for each in rounds)} |")


def _told(values: list[float], unit: str) -> str:
    scale = {"ms": 1000, "us": 1_000_000}[unit]
    return f"{statistics.median(values) * scale:.1f} (at most {max(values) * scale:.1f}) {unit}"


def _measured(fault: str, *, asynchronous: bool) -> tuple[float, float, float, float, float, int]:
    """p99.9, the longest, and p50 once the breaker is open; until the store decides again; the machine; exceptions."""
    port = free_port()
    server = start_redis(port)
    seen = Seen()
    here, there = multiprocessing.Pipe()
    sleeper = multiprocessing.get_context("spawn").Process(target=_sleep, args=(there,), daemon=True)
    sleeper.start()
    here.recv()  # it has begun
    url = f"redis://127.0.0.1:{port}/0"
    start = time.perf_counter() + 0.5
    moments = {"lost": start + BEFORE, "back": start + BEFORE + DURING, "end": start + BEFORE + DURING + AFTER}
    breaker = threading.Thread(target=_break, args=(fault, server, port, moments))
    breaker.start()
    try:
        if asynchronous:
            asyncio.run(_ask_async(url, seen, start, moments["end"]))
        else:
            _ask_in_threads(url, seen, start, moments["end"])
    finally:
        breaker.join()
        here.send(None)
        lateness = here.recv()
        sleeper.join()
        _stop(port)
        server.wait(10)
    away = [(began, took) for began, took, exact in seen.checks if moments["lost"] <= began < moments["back"]]
    opened = [took for began, took in away if began >= moments["lost"] + 1.0]
    decided = [began + took for began, took, exact in seen.checks if exact and began >= moments["back"]]
    durations = sorted(took for _, took in away)
    return (
        durations[int(len(durations) * 0.999)],
        durations[-1],
        statistics.median(opened),
        (min(decided) if decided else moments["end"]) - moments["back"],
        lateness,
        seen.failures,
    )


def _break(fault: str, server: subprocess.Popen[bytes], port: int, moments: dict[str, float]) -> None:
    """Takes the store away and brings it back, at these moments."""
    _wait_for(moments["lost"])
    if fault == "stopped":
        os.kill(server.pid, signal.SIGSTOP)
        _wait_for(moments["back"])
        os.kill(server.pid, signal.SIGCONT)
    else:
        server.kill()
        server.wait()
        _wait_for(moments["back"] - 0.05)  # what it takes to start
        start_redis(port)


def _stop(port: int) -> None:
    with redis.Redis(port=port) as client:
        client.shutdown(nosave=True)


def _wait_for(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _ask_in_threads(url: str, seen: Seen, start: float, end: float) -> None:
    with Limiter(url, on_failure="open", budget=BUDGET) as limiter:
        limiter.check(LIMIT.by("warm"))
        threads = [
            threading.Thread(target=_ask, args=(limiter.check, seen, start, end, number)) for number in range(ASKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _ask(check: Callable[..., Any], seen: Seen, start: float, end: float, number: int) -> None:
    keys = [LIMIT.by(f"client-{each}") for each in range(KEYS)]
    due, step = start + number / RATE, ASKERS / RATE
    while due < end:
        _wait_for(due)
        began = time.perf_counter()
        try:
            decision = check(keys[int(due * RATE) % KEYS])
        except Exception:
            seen.failures += 1
        else:
            seen.checks.append((began, time.perf_counter() - began, decision.degraded is None))
        due += step


async def _ask_async(url: str, seen: Seen, start: float, end: float) -> None:
    async with AsyncLimiter(url, on_failure="open", budget=BUDGET) as limiter:
        await limiter.check(LIMIT.by("warm"))
        await asyncio.gather(*[_ask_in_turn(limiter, seen, start, end, number) for number in range(ASKERS)])


async def _ask_in_turn(limiter: AsyncLimiter, seen: Seen, start: float, end: float, number: int) -> None:
    keys = [LIMIT.by(f"client-{each}") for each in range(KEYS)]
    due, step = start + number / RATE, ASKERS / RATE
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        try:
            decision = await limiter.check(keys[int(due * RATE) % KEYS])
        except Exception:
            seen.failures += 1
        else:
            seen.checks.append((began, time.perf_counter() - began, decision.degraded is None))
        due += step


def _sleep(pipe: Connection) -> None:
    """Sleep for as long as a budget, again and again; then tell how late one in a thousand was."""
    pipe.send(None)
    late = []
    while not pipe.poll():
        due = time.perf_counter() + BUDGET
        time.sleep(BUDGET)
        late.append(time.perf_counter() - due)
    pipe.send(sorted(late)[int(len(late) * 0.999)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.outage", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
