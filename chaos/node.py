"""A node of the fleet: a process that asks at a given pace, in all four modes, and remembers every answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
import time
from array import array
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from chaos.load import BUDGET, LIMITS, MODES, SHARE, STEADY, TURN_NS, Happening, Kind, Row, Verdict, Witness, keys_of
from chaos.load import namespace_of as spaced
from headgate import AsyncLimiter, Limiter, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from chaos.load import Mode, Orders
    from headgate import Decision, Key

THREADS: Final = 3
"""For each mode."""
TASKS: Final = 6
BACKLOG_NS: Final = 20_000_000
"""A worker that was kept waiting catches up on so much of what it has missed, and no more."""
WARMING: Final = 8.0
"""Seconds that connecting, and finding each other, may take before there is any fault."""
FIRST: Final = tuple(LIMITS[kind].by("first") for kind in Kind)
FIELDS: Final = 6


def serve(line: Connection, pace: Any) -> None:
    """The life of the process: runs what it is told to, until the line is closed or nothing more comes.

    `pace` is shared with the parent process: the load is that multiple of the steady one, and ends at 0.
    """
    logging.getLogger("headgate").addHandler(logging.NullHandler())  # the report tells what there is to tell
    try:
        while (orders := line.recv()) is not None:
            (_run_tasks if orders.asynchronous else _run_threads)(orders, line, pace)
    except EOFError:
        return  # the parent process is gone


def _run_threads(orders: Orders, line: Connection, pace: Any) -> None:
    happenings: list[Happening] = []
    limiters = {mode: Limiter(orders.url, **_options(orders, mode, happenings)) for mode in MODES}
    logs = _logs(pace, orders, THREADS)

    def work(log: _Log, check: Any) -> None:
        for seconds in log.waits():
            if seconds > 0:
                time.sleep(seconds)
            key = log.begin()
            try:
                log.note(check(key))
            except Exception as error:
                log.note_error(error)

    threads = [threading.Thread(target=work, args=(log, limiters[mode].check)) for mode in MODES for log in logs[mode]]
    for _ in _attempts(limiters, orders):
        for limiter in limiters.values():
            with suppress(StoreError):
                limiter.peek(*FIRST)
        time.sleep(0.05)
    _settle_down()
    line.send("ready")
    line.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = {mode: _state(limiter) for mode, limiter in limiters.items()}
    line.send(_witness(orders, logs, happenings, states))
    line.recv()
    for limiter in limiters.values():
        limiter.close()
    line.send("closed")


def _run_tasks(orders: Orders, line: Connection, pace: Any) -> None:
    async def work(log: _Log, check: Any) -> None:
        for seconds in log.waits():
            await asyncio.sleep(max(seconds, 0))
            key = log.begin()
            try:
                log.note(await check(key))
            except Exception as error:
                log.note_error(error)

    async def main() -> None:
        happenings: list[Happening] = []
        limiters = {mode: AsyncLimiter(orders.url, **_options(orders, mode, happenings)) for mode in MODES}
        logs = _logs(pace, orders, TASKS)
        for _ in _attempts(limiters, orders):
            for limiter in limiters.values():
                with suppress(StoreError):
                    await limiter.peek(*FIRST)
            await asyncio.sleep(0.05)
        _settle_down()
        line.send("ready")
        await asyncio.to_thread(line.recv)
        await asyncio.gather(*[work(log, limiters[mode].check) for mode in MODES for log in logs[mode]])
        states = {mode: _state(limiter) for mode, limiter in limiters.items()}
        line.send(_witness(orders, logs, happenings, states))
        await asyncio.to_thread(line.recv)  # meanwhile the limiters have a loop to settle on
        for limiter in limiters.values():
            await limiter.close()

    asyncio.run(main())
    line.send("closed")


def _options(orders: Orders, mode: Mode, happenings: list[Happening]) -> dict[str, Any]:
    def heard(event: Any) -> None:
        uncertain = event.details.get("uncertain", 0)
        happenings.append(Happening(orders.node, mode, event.kind, time.monotonic_ns(), event.text, uncertain))

    return {
        "on_failure": mode,
        "budget": BUDGET,
        "namespace": spaced(orders.namespace, mode),
        "share": SHARE,
        "on_event": heard,
    }


def _attempts(limiters: Mapping[Mode, Limiter | AsyncLimiter], orders: Orders) -> Iterator[None]:
    """Once more, until all limiters have reached the store and know how many nodes there are."""
    deadline = time.monotonic() + WARMING
    yield
    while any(limiter.health().nodes != orders.fleet or _state(limiter) != "ready" for limiter in limiters.values()):
        if time.monotonic() > deadline:
            found = {mode: limiter.health() for mode, limiter in limiters.items()}
            raise TimeoutError(f"the nodes did not find each other in {WARMING:g} s: {found}")
        yield


def _state(limiter: Limiter | AsyncLimiter) -> str:
    return str(limiter.health().state)


def _settle_down() -> None:
    """Leave nothing over that the garbage collector would look through in the midst of the load."""
    gc.collect()
    gc.freeze()


def _logs(pace: Any, orders: Orders, workers: int) -> dict[Mode, list[_Log]]:
    """One for each worker; their checks are spread evenly over time, over all modes."""
    interval_ns = workers * 1e9 / STEADY
    return {
        mode: [
            _Log(pace, orders, worker, interval_ns, interval_ns * (worker + place / len(MODES)) / workers)
            for worker in range(workers)
        ]
        for place, mode in enumerate(MODES)
    }


class _Log:
    """One worker's checks: when the next is due, and what became of each, as numbers in one row after the other."""

    def __init__(self, pace: Any, orders: Orders, worker: int, interval_ns: float, offset_ns: float) -> None:
        self._pace = pace
        self._retries = orders.retries
        self._interval_ns = interval_ns
        self._offset_ns = offset_ns
        self._keys = keys_of(worker + orders.node)
        self._now = self._asked = (Kind.WIDE, 0)
        self._again = 0
        self._start_ns = 0
        self.cells = array("q")
        self.texts: dict[str, int] = {}

    def waits(self) -> Iterator[float]:
        """Seconds until each check; ends when the pace is 0."""
        due_ns = last_pace = 0.0
        while (pace := self._pace.value) > 0:
            now_ns = time.monotonic_ns()
            if self._again:  # a client that was not let in asks for the same thing again, at once
                self._again -= 1
                yield 0.0
                continue
            self._again = self._retries
            self._now = next(self._keys)
            step_ns, offset_ns = self._interval_ns / pace, self._offset_ns / pace
            due_ns += step_ns
            if pace != last_pace or due_ns < now_ns - BACKLOG_NS:
                # Its own place in time again: else all who were kept waiting together would go on together.
                due_ns, last_pace = ceil((now_ns - offset_ns) / step_ns) * step_ns + offset_ns, pace
            yield (due_ns - now_ns) / 1e9

    def begin(self) -> Key:
        """The key to ask for; its time runs from now on."""
        kind, number = self._now
        if kind == Kind.TURN:
            number = time.monotonic_ns() // TURN_NS
        self._asked = (kind, number)
        key = LIMITS[kind].by(str(number))
        self._start_ns = time.monotonic_ns()
        return key

    def note(self, decision: Decision) -> None:
        took_ns = time.monotonic_ns() - self._start_ns
        if decision.allowed:
            self._again = 0
        self._add(took_ns, Verdict.ALLOWED if decision.allowed else Verdict.DENIED, decision.degraded)

    def note_error(self, error: Exception) -> None:
        took_ns = time.monotonic_ns() - self._start_ns
        if isinstance(error, StoreError):
            self._add(took_ns, Verdict.RAISED, f"raise: {error}")
        else:
            self._add(took_ns, Verdict.BROKE, f"{type(error).__name__}: {error}")

    def _add(self, took_ns: int, verdict: Verdict, why: str | None) -> None:
        text = 0
        if why is not None:
            why = re.sub(r"\d+", "#", why)  # ports and times: the kinds of failure are few
            text = self.texts.setdefault(why, len(self.texts) + 1)
        self.cells.extend((*self._asked, self._start_ns, took_ns, verdict, text))


def _witness(
    orders: Orders, logs: dict[Mode, list[_Log]], happenings: list[Happening], states: dict[Mode, str]
) -> Witness:
    rows = []
    for mode, those in logs.items():
        for log in those:
            words = {number: text for text, number in log.texts.items()}
            for at in range(0, len(log.cells), FIELDS):
                kind, number, start_ns, took_ns, verdict, text = log.cells[at : at + FIELDS]
                rows.append(
                    Row(orders.node, mode, Kind(kind), number, start_ns, took_ns, Verdict(verdict), words.get(text))
                )
    return Witness(rows, happenings, states)
