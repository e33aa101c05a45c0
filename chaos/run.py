"""One run: a fleet under load, a fault in the midst of it, and what came of that."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from chaos.judge import owed
from chaos.load import IDENTITIES, LIMITS, MODES, SPIKE, Kind, namespace_of
from headgate import Limiter

if TYPE_CHECKING:
    from chaos.faults import Fault
    from chaos.fleet import Fleet
    from chaos.load import Happening, Mode, Row
    from chaos.proxy import Traffic
    from chaos.rigs import Rig

Load: TypeAlias = Literal["steady", "burst"]
LOADS: Final[tuple[Load, ...]] = ("steady", "burst")

BEFORE: Final = 1.0
EARLIER: Final = 0.3
"""A burst begins so many seconds before the fault, and ends as much after it."""
AFTER: Final = 1.6
SETTLING: Final = 3.0
"""Seconds that are given to the books after the load, before what is missing in them is reported."""


class Run(NamedTuple):
    """What happened."""

    fault: Fault
    load: Load
    rows: list[Row]
    happenings: list[Happening]
    states: dict[tuple[int, Mode], str]
    struck_ns: tuple[int, int]
    """When the fault began to be made, and when it was there."""
    healed_ns: tuple[int, int]
    """When it began to be healed, and when the store could serve again."""
    lost: list[tuple[int, int]]
    counted: dict[Mode, int]
    """What the store says in the end that the wide keys have used."""
    traffic: list[Traffic]
    lateness_us: list[float]
    """By how much a thread that only sleeps came too late: what the machine itself adds to any wait."""


def run(fault: Fault, load: Load, fleet: Fleet, rig: Rig) -> Run:
    """Put a fleet under load, break its store, mend it, and ask everybody what they saw."""
    rig.namespace = f"chaos-{secrets.token_hex(3)}"
    rig.lost.clear()
    fleet.begin(rig, retries=fault.retries)
    spike = SPIKE if load == "burst" else 1.0
    sleeper = _Sleeper()
    time.sleep(BEFORE - EARLIER)
    if not fault.is_spike:
        fleet.ask_times(spike)
    time.sleep(EARLIER)

    striking = fault.strike(rig)
    started_ns = time.monotonic_ns()
    next(striking)
    if fault.is_spike:
        fleet.ask_times(spike)
    struck_ns = time.monotonic_ns()
    time.sleep(fault.lasts)
    if fault.is_spike:
        fleet.ask_times(1.0)
    ending_ns = time.monotonic_ns()
    next(striking, None)
    healed_ns = time.monotonic_ns()

    time.sleep(EARLIER)
    fleet.ask_times(1.0)
    time.sleep(AFTER - EARLIER)
    lateness_us = sleeper.end()
    witnesses = fleet.end()
    rows = [row for witness in witnesses for row in witness.rows]
    counted = _settled(rig, rows)
    traffic = rig.proxy.traffic() if rig.proxy is not None else []
    fleet.close()
    return Run(
        fault,
        load,
        sorted(rows, key=lambda row: row.start_ns),
        [happening for witness in witnesses for happening in witness.happenings],
        {(node, mode): state for node, witness in enumerate(witnesses) for mode, state in witness.states.items()},
        (started_ns, struck_ns),
        (ending_ns, healed_ns),
        list(rig.lost),
        counted,
        traffic,
        lateness_us,
    )


class _Sleeper:
    """Sleeps for two milliseconds, over and over, and notes for how much longer that took."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._lateness_us: list[float] = []
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()

    def end(self) -> list[float]:
        self._over.set()
        self._thread.join()
        return self._lateness_us

    def _sleep(self) -> None:
        while not self._over.is_set():
            start_ns = time.monotonic_ns()
            time.sleep(0.002)
            self._lateness_us.append((time.monotonic_ns() - start_ns) / 1000 - 2000)


def _settled(rig: Rig, rows: list[Row]) -> dict[Mode, int]:
    """What the store counts, as soon as that is all that passed, or when that has been waited for long enough."""
    passed = {mode: owed(rows, rig.lost, mode) for mode in MODES}
    deadline = time.monotonic() + SETTLING
    while True:
        counted = {mode: _used(rig, mode) for mode in MODES}
        if all(counted[mode] >= passed[mode] for mode in MODES) or time.monotonic() > deadline:
            return counted
        time.sleep(0.05)


def _used(rig: Rig, mode: Mode) -> int:
    limit = LIMITS[Kind.WIDE]
    with Limiter(rig.store_url, namespace=namespace_of(rig.namespace, mode), remember=0, lease=0) as limiter:
        return sum(limit.quota - limiter.peek(limit.by(str(number))).remaining for number in range(IDENTITIES))
