"""The run in words: a Markdown report with everything that one needs to doubt it."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.apps import ALONE, FASTAPI, FLASK
from bench.contenders import ASYNC, HEADGATE, SYNC
from bench.measure import Sample, Spread
from bench.policies import LARGE, SMALL
from bench.scenarios import (
    CEILING,
    CPU_CALLERS,
    HEADERS,
    HOT_KEY,
    MANY_KEYS,
    SHARED_KEYS,
    STORES,
    THREADS,
    Plan,
    Results,
    cpu,
    http,
    memory_threads,
)
from bench.targets import (
    Reading,
    Target,
    added_share,
    added_us,
    client_us,
    kept,
    kept_by_cpu,
    p50_us,
    p99_us,
    rate,
    server_us,
    targets,
    time_us,
)

PACKAGES = (
    "headgate", "limits", "throttled-py", "pyrate-limiter", "fastapi-limiter", "slowapi", "flask-limiter", "redis",
    "hiredis", "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "flask", "gunicorn",
)  # fmt: skip

NOTES = Path(__file__).with_name("notes.md")


def write(path: Path, plan: Plan, results: Results, *, server: str, loop: str, seconds: float) -> None:
    path.write_text("\n".join(_lines(plan, results, server, loop, seconds)))


def summary(results: Results) -> list[str]:
    """The targets as a table, or one line that says why there is none."""
    judged = targets(results)
    if not judged:
        return ["No target can be judged: headgate was not measured beside a peer."]
    rows = [[t.what, _wanted(t), _got(t), t.against, "met" if t.met else "**not met**"] for t in judged]
    met = sum(t.met for t in judged)
    return [*_table(["", "wanted", "got", "against", ""], rows), "", f"{met} of {len(judged)} targets met."]


def _lines(plan: Plan, results: Results, server: str, loop: str, seconds: float) -> Iterator[str]:
    yield "# headgate beside its peers"
    yield ""
    yield f"{platform.platform()}, {_processor()}, {os.cpu_count()} cores."
    yield f"Python {platform.python_version()}, {loop}, {server}."
    yield f"{plan.rounds} rounds of {plan.seconds:g} s, {seconds:.0f} s in all."
    yield ", ".join(f"{package} {_version(package)}" for package in PACKAGES) + "."
    yield from _section("Targets", summary(results))
    yield from _section("Memory", _memory(plan, results))
    yield from _section("Redis, threads", _latencies(results, "threads"))
    yield from _section("Redis, asyncio", _latencies(results, "tasks"))
    yield from _section("Three limits on one request", _latencies(results, "three limits"))
    yield from _section("The server's own limit", _ceiling(results))
    yield from _section("HTTP", [*_http(results), *_cpu(results)])
    yield from _section("Policy", _policy(results))
    yield from _section("What is timed", _expressions())
    yield from _section("How it was measured", [NOTES.read_text()])


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield from ("", f"## {title}", "", *body)


def _memory(plan: Plan, results: Results) -> Iterator[str]:
    hot = results.samples.get(HOT_KEY)
    if hot is None:
        return
    columns: list[tuple[str, str, Reading, Callable[[float], str]]] = [
        ("one hot key, us", HOT_KEY, time_us, _us),
        ("and what headers need, us", HEADERS, time_us, _us),
        (f"{plan.memory_keys:,} keys, us", MANY_KEYS, time_us, _us),
    ]
    for callers in THREADS:
        title = f"{callers} thread{'s' * (callers > 1)} on {SHARED_KEYS:,} keys, k/s"
        columns.append((title, memory_threads(callers), rate, _thousands))
    rows = []
    for name in hot:
        cells = [_cell(results.samples[scenario].get(name), reading, show) for _, scenario, reading, show in columns]
        growth = results.bytes_per_key.get(name)
        rows.append([name, *cells, f"{growth:.0f}" if growth else ""])
    yield from _table(["", *(title for title, *_ in columns), f"bytes per key at {plan.footprint_keys:,}"], rows)


def _latencies(results: Results, part: str) -> Iterator[str]:
    for scenario, seen in results.samples.items():
        if not scenario.startswith(part):
            continue
        unit = "requests/s, k" if part.startswith("three") else "checks/s, k"
        columns: list[tuple[str, Reading, Callable[[float], str]]] = [
            (unit, rate, _thousands),
            ("p50, ms", p50_us, _ms),
            ("p99, ms", p99_us, _ms),
            ("CPU here, us", client_us, _whole),
            ("CPU of the server, us", server_us, _whole),
        ]
        rows = [
            [name, *(_cell(samples, reading, show) for _, reading, show in columns)] for name, samples in seen.items()
        ]
        yield from _table([scenario, *(title for title, *_ in columns)], rows)
        yield ""


def _ceiling(results: Results) -> Iterator[str]:
    if results.ceiling:
        rows = [
            [f"redis-benchmark, {checks} in one run of the script", _spread(Spread.of(rates), _thousands)]
            for checks, rates in results.ceiling.items()
        ]
        rows += [[name, _cell(samples, rate, _thousands)] for name, samples in results.samples[CEILING].items()]
        yield from _table(["", "checks/s, k"], rows)


def _http(results: Results) -> Iterator[str]:
    for scenario in (http(framework, store) for framework in ("FastAPI", "Flask") for store in STORES):
        seen = results.samples.get(scenario)
        if seen is None:
            continue
        columns: list[tuple[str, Reading, Callable[[float], str]]] = [
            ("requests/s, k", rate, _thousands),
            ("p50, ms", p50_us, _ms),
            ("p99, ms", p99_us, _ms),
            ("CPU of the app, us", client_us, _whole),
            ("CPU of Redis, us", server_us, _whole),
        ]
        rows = [
            [
                name,
                _spread(kept(samples, seen[ALONE]), _percent),
                _spread(kept_by_cpu(samples, seen[ALONE]), _percent),
                *(_cell(samples, reading, show) for _, reading, show in columns),
            ]
            for name, samples in seen.items()
        ]
        yield from _table([scenario, "requests/s kept", "by CPU time", *(title for title, *_ in columns)], rows)
        yield ""


def _cpu(results: Results) -> Iterator[str]:
    for scenario in (cpu(store, callers) for store in STORES for callers in CPU_CALLERS):
        seen = results.samples.get(scenario)
        if seen is None:
            continue
        alone = seen[ALONE]
        rows = [
            [
                name,
                _cell(samples, client_us, _whole),
                _spread(added_us(samples, alone), _tenths),
                _spread(added_share(samples, alone), _percent),
            ]
            for name, samples in seen.items()
        ]
        yield from _table([scenario, "CPU of a request, us", "added, us", "added, as a share"], rows)
        yield ""


def _policy(results: Results) -> Iterator[str]:
    if not results.policies:
        return
    questions: list[tuple[str, str, Callable[[float], str]]] = [
        (f"to load {LARGE}, from JSON, s", "load_s", _us),
        ("of which to read, check and build it, s", "read_s", _us),
        (f"to resolve a request against {SMALL}, us", "small_us", _us),
        (f"to resolve a request against {LARGE}, us", "large_us", _us),
        ("the first request to a route of it, us", "first_us", _whole),
    ]
    rows = [
        [title, _spread(Spread.of(getattr(sample, name) for sample in results.policies), show)]
        for title, name, show in questions
    ]
    if results.yaml_s is not None:
        rows.append(["to read, check and build it from YAML, s", _us(results.yaml_s)])
    yield from _table(["", "CPU time"], rows)


def _expressions() -> Iterator[str]:
    rows = []
    for flavour, contenders in (("threads", SYNC), ("asyncio", ASYNC)):
        rows += [[c.name, flavour, c.algorithm, f"`{c.one}`"] for c in contenders]
    yield from _table(["", "", "algorithm", "one check"], rows)
    yield ""
    apps = [[c.name, framework, c.how] for framework, each in (("FastAPI", FASTAPI), ("Flask", FLASK)) for c in each]
    yield from _table(["", "", "how it stands before the app"], apps)


def _cell(samples: Sequence[Sample] | None, reading: Reading, show: Callable[[float], str]) -> str:
    return _spread(Spread.of(map(reading, samples)), show) if samples else ""


def _spread(spread: Spread, show: Callable[[float], str]) -> str:
    middle, least, most = show(spread.middle), show(spread.least), show(spread.most)
    return middle if least == most else f"{middle} ({least} to {most})"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heading) + " |"
    yield "| " + " | ".join("---" if not column else "--:" for column in range(len(heading))) + " |"
    for row in rows:
        bold = f"**{row[0]}**" if row[0] == HEADGATE else row[0]
        yield "| " + " | ".join([bold, *row[1:]]) + " |"


def _wanted(target: Target) -> str:
    return f"{'at least' if target.at_least else 'at most'} {target.wanted:.2f}{target.unit}"


def _got(target: Target) -> str:
    return _spread(target.got, f"{{:.2f}}{target.unit}".format)


def _us(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(value_us: float) -> str:
    return f"{value_us / 1000:.2f}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
