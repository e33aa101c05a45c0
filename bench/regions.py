"""`python -m bench.regions`: the CPU time that region modes add to a check, and the calls that cross regions."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from contextlib import ExitStack
from datetime import timedelta
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from chaos.rigs import Links

from headgate import AsyncLimiter, Limit, Limiter
from support.servers import RedisServer

if TYPE_CHECKING:
    from headgate import Key

REGIONS = ("ap", "eu", "us")
OWN, HOME = "us", "eu"
MODES = ("regional", "divided", "reserved", "reconciled")
SLICE = 250
"""Checks of one mode in a turn."""
CONCURRENT = 25
RATE = 200
"""Checks per second of each hot key while calls are counted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a first look")
    turns, seconds = (20, 5) if parser.parse_args().quick else (120, 60)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(RedisServer()) for name in REGIONS}
        others = [name for name in REGIONS if name != OWN]
        links = stack.enter_context(Links([servers[name].port for name in others]))
        urls = {OWN: servers[OWN].url} | dict(zip(others, links.urls, strict=True))
        options = {"region": OWN, "regions": urls, "home": HOME, "namespace": f"bench-{secrets.token_hex(3)}"}
        # First: from the first reconciled limit on, limiters exchange usage.
        print("| mode | hot keys | calls per second to other regions | per key |")
        print("| --- | ---: | ---: | ---: |")
        for mode in ("reserved", "reconciled"):
            for count in (1, 20):
                options["namespace"] = f"bench-{secrets.token_hex(3)}"
                with Limiter(urls[OWN], **options) as limiter:
                    calls = _count_calls(limiter, links, mode, count, seconds)
                print(f"| {mode} | {count} | {calls:.2f} | {calls / count:.2f} |", flush=True)
        print("\n| checks | " + " | ".join(MODES) + " |", "| --- |" + " ---: |" * len(MODES), sep="\n")
        for name, lease in (("threads", 0.0), ("threads, prepaid", 0.1)):
            with Limiter(urls[OWN], lease=lease, **options) as limiter:
                _print(name, _threads(limiter, turns))
        _print("asyncio", asyncio.run(_asyncio(urls[OWN], options, turns)))


def _keys() -> dict[str, Key]:
    minute = timedelta(minutes=1)
    return {
        mode: Limit(10**7, minute, algorithm="fixed_window", region=mode, name=f"{mode} limit").by("ada")
        for mode in MODES
    }


def _threads(limiter: Limiter, turns: int) -> dict[str, list[float]]:
    keys = _keys()
    for key in keys.values():  # leases, connections, hot keys
        for _ in range(1000):
            limiter.check(key)
    time.sleep(2.5)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(turns):
        for mode, key in keys.items():
            start = time.process_time()
            for _ in range(SLICE):
                limiter.check(key)
            times[mode].append((time.process_time() - start) / SLICE)
    return times


async def _asyncio(url: str, options: dict[str, Any], turns: int) -> dict[str, list[float]]:
    keys = _keys()
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    async with AsyncLimiter(url, lease=0, **options) as limiter:

        async def check(key: Key) -> None:
            for _ in range(SLICE // CONCURRENT):
                await limiter.check(key)

        for key in keys.values():
            await asyncio.gather(*[check(key) for _ in range(CONCURRENT)])
        await asyncio.sleep(2.5)
        for _ in range(turns):
            for mode, key in keys.items():
                start = time.process_time()
                await asyncio.gather(*[check(key) for _ in range(CONCURRENT)])
                times[mode].append((time.process_time() - start) / SLICE)
    return times


def _print(name: str, times: dict[str, list[float]]) -> None:
    """The CPU time of a check in each mode, and its ratio to a regional one: the quickest tenth of the turns, as other
    programs on the machine only make turns slower."""
    quick = {mode: quantiles(found, n=10)[0] for mode, found in times.items()}
    cells = [f"{quick[mode] * 1e6:.1f} us ({quick[mode] / quick['regional']:.2f})" for mode in MODES]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _count_calls(limiter: Limiter, links: Links, mode: str, count: int, seconds: int) -> float:
    """Requests that cross regions in a second, while each of several keys is hot."""
    limits = Limit(10**6, timedelta(minutes=1), algorithm="fixed_window", region=mode, name="hot")
    keys = [limits.by(str(number)) for number in range(count)]

    def load(for_s: float) -> None:
        end = time.monotonic() + for_s
        while (begin := time.monotonic()) < end:
            for key in keys:
                limiter.check(key)
            time.sleep(max(0.0, begin + 1 / RATE - time.monotonic()))

    load(3)
    before = sum(traffic.requests for traffic in links.traffic())
    load(seconds)
    return (sum(traffic.requests for traffic in links.traffic()) - before) / seconds


if __name__ == "__main__":
    main()
