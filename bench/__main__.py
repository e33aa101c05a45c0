"""`python -m bench`: measure, then leave a report and a picture in .build/bench/."""

import argparse
import asyncio
import json
import resource
import signal
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import redis

from bench import plot, report
from bench.apps import ALONE, FASTAPI, FLASK
from bench.contenders import ASYNC, SYNC
from bench.measure import Run
from bench.progress import Progress
from bench.scenarios import PARTS, Bench, Plan
from bench.server import running_redis

OUTPUT = Path(".build/bench")
FULL = Plan()
QUICK = Plan(
    rounds=1, seconds=0.15, tasks=(1, 64, 256), memory_keys=20_000, redis_keys=1_000, footprint_keys=50_000,
    http_seconds=1.0, yaml=False,
)  # fmt: skip


def main() -> None:
    options = _options()
    plan = _plan(options)
    run, loop = _loop(uvloop=options.uvloop)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then, too
    _allow_many_sockets()
    progress = Progress()
    with running_redis() as url:
        server = _describe(url)
        results = Bench(plan, url, run, progress).everything()
    seconds = progress.done()

    OUTPUT.mkdir(parents=True, exist_ok=True)
    words, picture, numbers = (OUTPUT / f"report.{kind}" for kind in ("md", "png", "json"))
    numbers.write_text(json.dumps({"plan": asdict(plan), "results": asdict(results)}, indent=1, default=list))
    report.write(words, plan, results, server=server, loop=loop, seconds=seconds)
    caption = f"{server}, {loop}; median, least and most of {plan.rounds} interleaved rounds"
    drawn = plot.draw(picture, results, caption)
    print(*report.summary(results), "", sep="\n")
    print(*[str(path) for path in (words, numbers, *[picture] * drawn)], sep="\n")


def _options() -> argparse.Namespace:
    everyone = sorted({c.name for c in (*SYNC, *ASYNC)} | {c.name for c in (*FASTAPI, *FLASK)} - {ALONE})
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes, for a first look")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be given again)")
    parser.add_argument("--contender", choices=everyone, action="append", help="this one (may be given again)")
    parser.add_argument("--rounds", type=int, help="how often everybody is asked")
    parser.add_argument("--keys", type=int, help="for bytes per key, such as 1000000")
    parser.add_argument("--uvloop", action="store_true", help="asyncio on uvloop")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else FULL
    return replace(
        plan,
        rounds=options.rounds or plan.rounds,
        footprint_keys=options.keys or plan.footprint_keys,
        parts=frozenset(options.only or PARTS),
        contenders=frozenset(options.contender or ()),
    )


def _loop(*, uvloop: bool) -> tuple[Run, str]:
    if not uvloop:
        return asyncio.run, "asyncio's own loop"
    import uvloop as faster

    return faster.run, f"uvloop {version('uvloop')}"


def _allow_many_sockets() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192) if most > 0 else 8192, most))


def _describe(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        return f"Redis {client.info('server')['redis_version']}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
