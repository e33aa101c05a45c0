"""`python -m bench`: compare Headgate with other libraries, and write docs/benchmarks.md and bench/results.json.

A run of selected parts or contenders writes to .build/bench/ instead.
"""

import argparse
import asyncio
import json
import resource
import signal
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import redis

from bench import report
from bench.apps import BARE_APP, FASTAPI, FLASK
from bench.contenders import ASYNC, SYNC
from bench.policy_costs import PolicySample
from bench.progress import Progress
from bench.redis_server import running_redis
from bench.scenarios import PARTS, Bench, Plan, Results
from bench.timing import Run, Sample

BUILD = Path(".build/bench")
FULL = Plan()
QUICK = Plan(
    rounds=1, seconds=0.1, tasks=(1, 64), memory_keys=20_000, redis_keys=1_000, footprint_keys=20_000,
    http_seconds=1.0, yaml=False, is_quick=True,
)  # fmt: skip


def main() -> None:
    options = _options()
    if options.render:
        _render()
        return
    plan = _plan(options)
    run, loop = _loop(uvloop=options.uvloop)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally blocks that stop child processes
    _raise_socket_limit()
    progress = Progress()
    with running_redis() as url:
        about = report.environment(server=_server_version(url), loop=loop)
        results = Bench(plan, url, run, progress).measure_all()
    seconds = progress.done()

    BUILD.mkdir(parents=True, exist_ok=True)
    is_complete = not options.only and not options.contender
    page, numbers = (Path("docs/benchmarks.md"), Path("bench/results.json")) if is_complete else (
        BUILD / "benchmarks.md", BUILD / "results.json",
    )  # fmt: skip
    command = "make bench" + (f" BENCH_ARGS={' '.join(sys.argv[1:])!r}" if sys.argv[1:] else "")
    run_of = {"command": command, "seconds": seconds, "environment": about}
    recorded = {**run_of, "plan": asdict(plan), "results": asdict(results)}
    numbers.write_text(json.dumps(recorded, indent=1, default=list) + "\n")
    report.write(page, plan, results, about, command=command, seconds=seconds)
    print(*report.summary(results), "", page, numbers, sep="\n")
    if find_spec("matplotlib") is not None:
        from bench import plot

        caption = f"{about['server']}, {loop}; median and range of {plan.rounds} interleaved rounds"
        if plot.draw(BUILD / "benchmarks.png", results, caption):
            print(BUILD / "benchmarks.png")


def _render() -> None:
    """Write the page again from the recorded results, for example with other targets."""
    recorded = json.loads(Path("bench/results.json").read_text())
    plan, numbers = recorded["plan"], recorded["results"]
    plan |= {name: frozenset(plan[name]) for name in ("parts", "contenders")} | {"tasks": tuple(plan["tasks"])}
    results = Results(
        {
            scenario: {name: [Sample(**each) for each in samples] for name, samples in seen.items()}
            for scenario, seen in numbers["samples"].items()
        },
        {int(checks): rates for checks, rates in numbers["ceiling"].items()},
        numbers["bytes_per_key"],
        [PolicySample(**each) for each in numbers["policies"]],
        numbers["yaml_s"],
    )
    run_of = {"command": recorded["command"], "seconds": recorded["seconds"]}
    report.write(Path("docs/benchmarks.md"), Plan(**plan), results, recorded["environment"], **run_of)
    print(*report.summary(results), sep="\n")


def _options() -> argparse.Namespace:
    names = sorted({c.name for c in (*SYNC, *ASYNC)} | {c.name for c in (*FASTAPI, *FLASK)} - {BARE_APP})
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that everything works")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part (repeatable)")
    parser.add_argument("--contender", choices=names, action="append", help="measure this contender (repeatable)")
    parser.add_argument("--rounds", type=int, help="the number of interleaved rounds")
    parser.add_argument("--keys", type=int, help="the number of keys for bytes per key, such as 1000000")
    parser.add_argument("--render", action="store_true", help="write the page again from bench/results.json")
    parser.add_argument("--uvloop", action="store_true", help="use uvloop instead of asyncio's event loop")
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
        return asyncio.run, "asyncio's event loop"
    import uvloop as faster

    return faster.run, f"uvloop {version('uvloop')}"


def _raise_socket_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192) if most > 0 else 8192, most))


def _server_version(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        return f"Redis {client.info('server')['redis_version']}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
