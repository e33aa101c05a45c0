"""One process of a region: makes its part of the requests, and records what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from chaos.regions.plan import Plan
    from headgate import Decision

THREADS: Final = 12
BUDGET_S: Final = 1.0
"""Of the own store, which never fails here, but shares the processor with all others."""
FIELDS: Final = 5
ALLOWED, DENIED, DEGRADED_ALLOWED, DEGRADED_DENIED, FAILED = range(5)


class Orders(NamedTuple):
    """What a process does in an experiment."""

    plan: Plan
    region: str
    number: int
    """Of the process in its region: odd ones use asyncio, even ones threads."""
    urls: dict[str, str]
    """The stores of all regions, as this one reaches them."""
    namespace: str
    start_ns: int
    end_ns: int
    """On the wall clock."""


class Row(NamedTuple):
    """One request."""

    region: str
    traffic: int
    """Its place in the plan's traffic."""
    start_us: int
    """On the machine's clock, which no store has."""
    took_us: int
    result: int
    at_us: int
    """The instant of the decision, on the clock of the store that made it."""


def serve(line: Connection) -> None:
    """The life of the process: take orders, make the requests, report the rows; ends when the line is closed."""
    line.send("started")
    orders = line.recv()
    rows = asyncio.run(_run_async(line, orders)) if orders.number % 2 else _run_threads(line, orders)
    line.send(rows.tobytes())


def read_rows(region: str, data: bytes) -> list[Row]:
    numbers = array("q")
    numbers.frombytes(data)
    return [Row(region, *numbers[at : at + FIELDS]) for at in range(0, len(numbers), FIELDS)]


def _options(orders: Orders) -> dict[str, Any]:
    return {
        "region": orders.region,
        "regions": orders.urls,
        "home": orders.plan.names[0],
        "namespace": orders.namespace,
        "on_failure": "closed",
        "budget": BUDGET_S,
        "central_budget": 0.5,
    }


def _arrivals(orders: Orders) -> Iterator[tuple[int, int]]:
    """The instants of this process's requests in nanoseconds on the wall clock, with their traffic, in order."""
    plan, streams = orders.plan, []
    for place, traffic in enumerate(plan.traffic):
        if not traffic.comes_from(orders.region):
            continue
        sources = plan.processes * (plan.regions if traffic.region is None else 1)
        interval_ns = round(sources * 1e9 / traffic.rate)
        index = int(orders.region[1:]) if traffic.region is None else 0
        offset_ns = interval_ns * (index * plan.processes + orders.number) // sources
        streams.append([orders.start_ns + offset_ns, interval_ns, place])
    while streams:
        stream = min(streams)
        if stream[0] >= orders.end_ns:
            return
        yield stream[0], stream[2]
        stream[0] += stream[1]


def _run_threads(line: Connection, orders: Orders) -> array[int]:
    rows, lock = array("q"), threading.Lock()
    keys = [traffic.limit.by("ada") for traffic in orders.plan.traffic]
    with Limiter(orders.urls[orders.region], **_options(orders)) as limiter, ThreadPoolExecutor(THREADS) as pool:

        def check(place: int) -> None:
            start_ns = time.time_ns()
            try:
                row = _row(place, start_ns, limiter.check(keys[place]))
            except Exception:
                row = (place, start_ns // 1000, (time.time_ns() - start_ns) // 1000, FAILED, 0)
            with lock:
                rows.extend(row)

        limiter.engine.worker.ensure_exchange()
        line.send("ready")
        line.recv()
        for at_ns, place in _arrivals(orders):
            time.sleep(max(0, at_ns - time.time_ns()) / 1e9)
            pool.submit(check, place)
    return rows


async def _run_async(line: Connection, orders: Orders) -> array[int]:
    rows = array("q")
    keys = [traffic.limit.by("ada") for traffic in orders.plan.traffic]
    async with AsyncLimiter(orders.urls[orders.region], **_options(orders)) as limiter:

        async def check(place: int) -> None:
            start_ns = time.time_ns()
            try:
                rows.extend(_row(place, start_ns, await limiter.check(keys[place])))
            except Exception:
                rows.extend((place, start_ns // 1000, (time.time_ns() - start_ns) // 1000, FAILED, 0))

        limiter.engine.worker.ensure_exchange()
        line.send("ready")
        await asyncio.to_thread(line.recv)
        tasks: set[asyncio.Task[None]] = set()
        for at_ns, place in _arrivals(orders):
            await asyncio.sleep(max(0, at_ns - time.time_ns()) / 1e9)
            task = asyncio.create_task(check(place))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        with contextlib.suppress(ValueError):  # no tasks
            await asyncio.wait([*tasks])
    return rows


def _row(place: int, start_ns: int, decision: Decision) -> tuple[int, int, int, int, int]:
    took_us = (time.time_ns() - start_ns) // 1000
    if decision.degraded is None:
        result = ALLOWED if decision.allowed else DENIED
    else:
        result = DEGRADED_ALLOWED if decision.allowed else DEGRADED_DENIED
    return place, start_ns // 1000, took_us, result, decision.at_us
