"""A service whose capacity halves while it is overloaded: `python -m bench.overload` writes the table and the picture
of docs/overload.md.

An ASGI app under uvicorn with 20 workers of 100 ms, in a process of its own, gets requests at random intervals from
this one: first 30 % of its capacity, then 120 %; then half of the workers are gone. Clients give up after two seconds.
This is repeated without a limit, with a fixed limit that is right for the full capacity, and with the adaptive limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.redis_server import free_port
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.policy import read

WORKERS: Final = 20
SERVICE_S: Final = 0.1
SPREAD: Final = 0.5
CAPACITY: Final = WORKERS / SERVICE_S
MIX: Final = {"critical": 0.2, "normal": 0.4, "background": 0.4}
DEADLINE_S: Final = 2.0
LOADED_AT_S: Final = 8.0
HALVED_AT_S: Final = 16.0
END_S: Final = 40.0
FIXED: Final = 2 * WORKERS
POLICIES: Final = {
    "no limit": "overload: 1000000",
    f"fixed limit of {FIXED}": f"overload: {FIXED}",
    "adaptive limit": "overload: adaptive",
}
ROUTES: Final = "\nroutes:\n" + "\n".join(f"  - {{path: /{each}, priority: {each}}}" for each in MIX)
DOCS: Final = Path(__file__).parents[1] / "docs"
TABLE: Final = re.compile(r"(<!-- overload table -->\n).*?(<!-- end -->)", re.DOTALL)


class Service:
    """An ASGI app that serves each request in one of its workers."""

    def __init__(self) -> None:
        self.workers = WORKERS
        self._busy = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._random = random.Random(1)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")
        if scope["path"].startswith("/workers/"):
            self.workers = int(scope["path"].rpartition("/")[2])
        else:
            await self._work()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def _work(self) -> None:
        if self._busy >= self.workers:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            await turn
        self._busy += 1
        await asyncio.sleep(SERVICE_S * self._random.lognormvariate(-(SPREAD**2) / 2, SPREAD))
        self._busy -= 1
        for _ in range(min(self.workers - self._busy, len(self._queue))):
            self._queue.popleft().set_result(None)


@dataclass
class Sent:
    """A request; `latency_s` is None if it was not answered in time, or with 503."""

    priority: str
    at_s: float
    status: int
    latency_s: float | None


async def load(url: str, policy: str) -> list[Sent]:
    """Send all requests of a run."""
    sent: list[Sent] = []
    dice = random.Random(2)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def request(priority: str, at_s: float) -> None:
            started = time.monotonic()
            try:
                async with session.get(f"/{priority}", timeout=aiohttp.ClientTimeout(DEADLINE_S)) as answer:
                    took = time.monotonic() - started
                    sent.append(Sent(priority, at_s, answer.status, took if answer.status == 200 else None))
            except (TimeoutError, aiohttp.ClientError):
                sent.append(Sent(priority, at_s, 0, None))

        start = time.monotonic()
        at_s = 0.0
        is_halved = False
        async with asyncio.TaskGroup() as tasks:
            while at_s < END_S:
                await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
                if at_s >= HALVED_AT_S and not is_halved:
                    is_halved = True
                    async with session.get(f"/workers/{WORKERS // 2}"):
                        pass
                tasks.create_task(request(dice.choices([*MIX], [*MIX.values()])[0], at_s))
                at_s += dice.expovariate(CAPACITY * (0.3 if at_s < LOADED_AT_S else 1.2))
    return sent


def measure(policy: str) -> list[Sent]:
    """One run, against a server of its own."""
    port = free_port()
    command = [sys.executable, "-m", "bench.overload", "--serve", str(port), "--policy", policy]
    with subprocess.Popen(command) as server:
        try:
            asyncio.run(wait_for(f"http://127.0.0.1:{port}"))
            return asyncio.run(load(f"http://127.0.0.1:{port}", policy))
        finally:
            server.terminate()


async def wait_for(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        while True:
            try:
                async with session.get(f"/workers/{WORKERS}"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


def serve(port: int, policy: str) -> None:
    import uvicorn

    settings = POLICIES[policy] + ROUTES + "\n  - {path: /workers/*, cost: 0}"
    app: Any = HeadgateMiddleware(Service(), read(settings))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else float("nan")


def success(requests: list[Sent]) -> float:
    return sum(each.latency_s is not None for each in requests) / max(1, len(requests))


def rows(runs: dict[str, list[Sent]]) -> list[str]:
    found = [
        "| limit | critical: success | p99 | p99, unloaded | normal: success | background: success | answers/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, sent in runs.items():
        halved = [each for each in sent if each.at_s >= HALVED_AT_S]
        loaded = [each for each in sent if each.at_s >= LOADED_AT_S]
        by = {priority: [each for each in halved if each.priority == priority] for priority in MIX}
        critical = [each for each in loaded if each.priority == "critical"]
        unloaded = [each.latency_s for each in sent if each.at_s < LOADED_AT_S and each.latency_s is not None]
        p99 = percentile([each.latency_s for each in critical if each.latency_s is not None], 0.99)
        answers = sum(each.latency_s is not None for each in halved) / (END_S - HALVED_AT_S)
        found.append(
            f"| {name} | {success(critical):.1%} | {p99 * 1000:.0f} ms | {percentile(unloaded, 0.99) * 1000:.0f} ms "
            f"| {success(by['normal']):.0%} | {success(by['background']):.0%} | {answers:.0f} |"
        )
    return found


def draw(path: Path, runs: dict[str, list[Sent]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from chaos.plot import STYLE

    colours = dict(zip(MIX, ("#0b6e4f", "#edae49", "#9a9a9a"), strict=True))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(runs), figsize=(13, 6.5), sharex=True, sharey="row", layout="constrained")
        for (name, sent), (rates, waits) in zip(runs.items(), axes.T, strict=True):
            rates.set_title(name)
            for priority, colour in colours.items():
                shares, p99s = [], []
                for second in range(int(END_S)):
                    mine = [each for each in sent if int(each.at_s) == second and each.priority == priority]
                    shares.append(success(mine))
                    p99s.append(percentile([each.latency_s for each in mine if each.latency_s is not None], 0.99))
                middles = [second + 0.5 for second in range(int(END_S))]
                rates.plot(middles, shares, color=colour, label=priority, linewidth=2)
                waits.plot(middles, [1000 * each for each in p99s], color=colour, linewidth=2)
            for axis in (rates, waits):
                axis.axvspan(LOADED_AT_S, END_S, color="#f4f4f4", zorder=0)
                axis.axvspan(HALVED_AT_S, END_S, color="#e6e6e6", zorder=0)
            waits.set_yscale("log")
            waits.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            waits.set_xlabel("seconds")
        axes[0][0].set_ylabel("answered in time")
        axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes[1][0].set_ylabel("p99 of the answers, ms")
        axes[0][0].legend(loc="lower left")
        title = "Light load, then 120 % of the capacity (light grey), then half of the capacity is lost (grey)"
        figure.suptitle(title, fontsize=12, color="#444444")
        figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help="run the service (the benchmark starts it)")
    parser.add_argument("--policy", choices=POLICIES)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.policy)
        return
    runs = {name: measure(name) for name in POLICIES}
    table = rows(runs)
    print(*table, sep="\n")
    draw(DOCS / "pictures" / "overload.png", runs)
    page = DOCS / "overload.md"
    text = page.read_text("utf-8")
    page.write_text(TABLE.sub(lambda found: found[1] + "\n".join(table) + "\n" + found[2], text), "utf-8")


if __name__ == "__main__":
    main()
