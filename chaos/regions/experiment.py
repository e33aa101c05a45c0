"""One experiment: servers, links and processes, the load, and partitions in its midst."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from chaos.proxy import Weather
from chaos.regions import worker
from chaos.regions.judge import judge
from chaos.regions.plan import LATENCY_S, LOSS
from chaos.rigs import Links, SkewedServer
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.regions.judge import Outcome
    from chaos.regions.plan import Plan
    from chaos.regions.worker import Row

STARTUP_S: Final = 2.0
"""From the last process being ready to the first window, at least."""
DISTANT: Final = Weather("distant", LATENCY_S, LOSS)
SILENT: Final = Weather("silent")
_spawning = multiprocessing.get_context("spawn")


class Result(NamedTuple):
    """An experiment and what became of it."""

    plan: Plan
    rows: list[Row]
    start_us: int
    outcomes: list[Outcome]


def run(plan: Plan, say: Callable[[str], object] = lambda step: None) -> Result:
    """Run an experiment; `say` is told the steps."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(plan.skew_s(name))) for name in plan.names}
        pairs = [(source, target) for source in plan.names for target in plan.names if source != target]
        links = stack.enter_context(Links([servers[target].port for _, target in pairs]))
        links.turn(DISTANT)
        doors = {pair: number for number, pair in enumerate(pairs)}
        urls = {
            source: {
                target: servers[target].url if source == target else links.urls[doors[source, target]]
                for target in plan.names
            }
            for source in plan.names
        }
        say("processes start")
        # The children import for seconds: they get their orders, with the time of the first window, when all are ready.
        processes = [_Process(region, number) for region in plan.names for number in range(plan.processes)]
        stack.callback(lambda: [process.close() for process in processes])
        for process in processes:
            process.line.recv()
        start_s = -(-(time.time() + STARTUP_S * (1 + plan.regions / 5)) // plan.period_s) * plan.period_s
        end_s = start_s + plan.windows * plan.period_s
        namespace = f"chaos-{secrets.token_hex(3)}"
        for process in processes:
            orders = worker.Orders(
                plan,
                process.region,
                process.number,
                urls[process.region],
                namespace,
                round(start_s * 1e9),
                round(end_s * 1e9),
            )
            process.line.send(orders)
        for process in processes:
            process.line.recv()
        for process in processes:
            process.line.send("go")
        for region, from_s, to_s in plan.cuts:
            cut = [number for pair, number in doors.items() if region in pair]
            _sleep_until(start_s + from_s)
            say(f"{region} is cut off")
            for door in cut:
                links.turn(SILENT, door)
            _sleep_until(start_s + to_s)
            say(f"{region} is connected again")
            for door in cut:
                links.turn(DISTANT, door)
        _sleep_until(end_s)
        say("results are read")
        rows = [row for process in processes for row in worker.read_rows(process.region, process.line.recv())]
    start_us = round(start_s * 1_000_000)
    return Result(plan, rows, start_us, judge(plan, rows, start_us))


class _Process:
    """A process of `chaos.regions.worker`."""

    def __init__(self, region: str, number: int) -> None:
        self.region, self.number = region, number
        self.line, far = _spawning.Pipe()
        self._process: Any = _spawning.Process(target=worker.serve, args=(far,), daemon=True)
        self._process.start()
        far.close()

    def close(self) -> None:
        self.line.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def _server(skew_s: float) -> RedisServer:
    return SkewedServer(skew_s) if skew_s else RedisServer()


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0, at_s - time.time()))
