"""Writes docs/sizing.md from the results of `python -m bench.serve` and the text in sizing.md beside this file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.timing import Spread

TEMPLATE = Path(__file__).with_name("sizing.md")
GRPC_ECHO, RATE_LIMIT = "gRPC echo", "ShouldRateLimit"
ECHO, CHECK, POLICY_CHECK, AUTH = "HTTP echo", "/v1/check, by limits", "/v1/check, by policy", "/auth"
ECHO_OF = {RATE_LIMIT: GRPC_ECHO, CHECK: ECHO, POLICY_CHECK: ECHO, AUTH: ECHO}
KINDS = (GRPC_ECHO, RATE_LIMIT, ECHO, CHECK, POLICY_CHECK, AUTH)
STORES = ("memory", "Redis")
CONCURRENT = 64
MIN_SHARE, MAX_ADDED_MS, MIN_SCALING = 0.7, 2.0, 1.7


@dataclass(frozen=True, slots=True)
class ServeSample:
    """One measurement of one kind of call."""

    store: str
    workers: int
    kind: str
    concurrent: int
    round: int
    paced: float | None
    """Calls a second that were sent; None if each call followed the last."""
    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float
    """CPU time of all workers for each call; `client_us` and `redis_us` are those of the client and of Redis."""
    client_us: float
    redis_us: float
    redis_scripts: float


Reading = Callable[[ServeSample], float]


class _Samples:
    def __init__(self, samples: Sequence[ServeSample]) -> None:
        self._samples = samples

    def find(
        self, store: str, kind: str, *, workers: int = 1, concurrent: int = CONCURRENT, paced: bool = False
    ) -> Any:
        """The samples of one kind in the order of the rounds."""
        wanted = store, kind, workers, concurrent, paced
        return [
            each
            for each in self._samples
            if (each.store, each.kind, each.workers, each.concurrent, each.paced is not None) == wanted
        ]


def render(recorded: dict[str, Any]) -> str:
    """The page."""
    samples = _Samples([ServeSample(**each) for each in recorded["samples"]])
    about = recorded["environment"]
    machine = [
        f"- Machine: {about['machine']}. Clients, server and Redis share the cores.",
        f"- Python {about['python']}, {about['loop']}, {about['server']}, {about['speedups']}",
        "- " + ", ".join(f"{package} {number}" for package, number in about["versions"].items()),
        f"- {about['date']}: {recorded['rounds']} rounds of {recorded['seconds']:g} s for each figure",
    ]
    if recorded["note"]:
        machine.append(f"- {recorded['note']}")
    parts = {
        "machine": machine,
        "targets": _targets(samples),
        "rates": _rates(samples),
        "latencies": _latencies(samples),
        "workers": _workers(samples),
        "redis": _redis(samples),
        "memory": _memory(recorded["resident_bytes"]),
        "quotas": _quotas(recorded["quotas"]),
    }
    text = TEMPLATE.read_text("utf-8")
    for name, lines in parts.items():
        marker = f"{{{{ {name} }}}}"
        assert marker in text, f"{TEMPLATE} has no {marker}"
        text = text.replace(marker, "\n".join(lines))
    return text


def _targets(samples: _Samples) -> Iterator[str]:
    """The requirements, each with the figure that was reached."""
    rows = []
    for store in STORES:
        for kind in (RATE_LIMIT, CHECK):
            ours, echoes = samples.find(store, kind), samples.find(store, ECHO_OF[kind])
            got = _ratios(ours, echoes, _rate)
            rows.append(
                [f"{kind}, {store}: calls/s, of the echo's", f"at least {MIN_SHARE:.2f}", _show(got, _hundredths)]
            )
            rows[-1].append(_reached(got.middle >= MIN_SHARE))
        for kind in (RATE_LIMIT, CHECK):
            ours, echoes = samples.find(store, kind, paced=True), samples.find(store, ECHO_OF[kind], paced=True)
            added = Spread.of((a.p99_us - b.p99_us) / 1000 for a, b in zip(ours, echoes, strict=True))
            title = f"{kind}, {store}: p99 above the echo's, at {ours[0].paced:.0f} calls/s"
            rows.append([title, f"at most {MAX_ADDED_MS:g} ms", _show(added, _hundredths) + " ms"])
            rows[-1].append(_reached(added.middle <= MAX_ADDED_MS))
    for kind in (RATE_LIMIT, CHECK):
        two, one = samples.find("Redis", kind, workers=2), samples.find("Redis", kind)
        got = _ratios(two, one, _rate)
        rows.append([f"{kind}, Redis: two workers, of one's calls/s", f"at least {MIN_SCALING:.2f}"])
        rows[-1] += [_show(got, _hundredths), _reached(got.middle >= MIN_SCALING)]
    yield from _table(["", "target", "measured", "reached"], rows)


def _rates(samples: _Samples) -> Iterator[str]:
    rows = []
    for store in STORES:
        for kind in KINDS:
            seen = samples.find(store, kind)
            cells = [_cell(seen, _rate, _hundreds), _cell(seen, _cpu_us, _whole)]
            if kind in ECHO_OF:
                echoes = samples.find(store, ECHO_OF[kind])
                shares = _ratios(seen, echoes, _rate), _ratios(echoes, seen, _cpu_us)
                cells += [_show(share, _percent) for share in shares]
            else:
                cells += ["", ""]
            rows.append([f"{kind}, {store}", *cells])
    yield from _table(["", "calls/s", "CPU per call, us", "calls/s, of the echo's", "by CPU time"], rows)


def _latencies(samples: _Samples) -> Iterator[str]:
    rows = []
    for store in STORES:
        for kind in KINDS:
            paced = samples.find(store, kind, paced=True)
            cells = [
                _cell(samples.find(store, kind, concurrent=1), _p50_us, _ms),
                _cell(samples.find(store, kind, concurrent=1), _p99_us, _ms),
                f"{paced[0].paced:.0f}",
                _cell(paced, _p50_us, _ms),
                _cell(paced, _p99_us, _ms),
                _cell(samples.find(store, kind), _p99_us, _ms),
                _cell(samples.find(store, kind, concurrent=256), _p99_us, _ms),
            ]
            rows.append([f"{kind}, {store}", *cells])
    heading = ["ms", "1 client: p50", "p99", "fixed rate, calls/s", "p50", "p99", "64 without pause: p99", "256: p99"]
    yield from _table(heading, rows)


def _workers(samples: _Samples) -> Iterator[str]:
    rows = []
    for kind in KINDS:
        two, one = samples.find("Redis", kind, workers=2), samples.find("Redis", kind)
        cells = [
            _cell(one, _rate, _hundreds),
            _cell(two, _rate, _hundreds),
            _show(_ratios(two, one, _rate), _hundredths),
            _show(_ratios(two, one, _cpu_us), _hundredths),
            _cell(two, _cores, _hundredths),
            _cell(two, _other_cores, _hundredths),
        ]
        rows.append([kind, *cells])
    heading = [
        "Redis", "one worker, calls/s", "two workers, calls/s", "ratio", "CPU per call, ratio", "cores of two workers",
        "cores of client and Redis",
    ]  # fmt: skip
    yield from _table(heading, rows)


def _redis(samples: _Samples) -> Iterator[str]:
    rows = []
    for kind in ECHO_OF:
        seen, alone = samples.find("Redis", kind), samples.find("Redis", kind, concurrent=1)
        cells = [_cell(each, reading, show) for each in (alone, seen) for reading, show in _REDIS_COLUMNS]
        rows.append([kind, *cells])
    heading = ["", "1 client: scripts per call", "CPU of Redis per call, us", "64: scripts per call", "CPU, us"]
    yield from _table(heading, rows)


def _memory(resident_bytes: dict[str, dict[str, int]]) -> Iterator[str]:
    rows = []
    for name, idle in resident_bytes["idle"].items():
        store, workers = name.split()
        title = f"{store}, {workers} worker{'s' * (workers != '1')}"
        rows.append([title, f"{idle / 1e6:.0f}", f"{resident_bytes['used'][name] / 1e6:.0f}"])
    yield from _table(["MB of a worker", "after start", "after the measurement"], rows)


def _quotas(quotas: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for store in STORES:
        seen = [each for each in quotas if each["store"] == store]
        spreads = [Spread.of(each[name] for each in seen) for name in ("rate", "cpu_us", "redis_us")]
        rows.append([store, *[_show(s, show) for s, show in zip(spreads, (_hundreds, _whole, _whole), strict=True)]])
    yield from _table(["", "reports of a bucket/s", "CPU per report, us", "CPU of Redis, us"], rows)


def _ratios(ours: Sequence[ServeSample], theirs: Sequence[ServeSample], reading: Reading) -> Spread:
    return Spread.of(reading(a) / reading(b) for a, b in zip(ours, theirs, strict=True))


def _rate(sample: ServeSample) -> float:
    return sample.rate


def _p50_us(sample: ServeSample) -> float:
    return sample.p50_us


def _p99_us(sample: ServeSample) -> float:
    return sample.p99_us


def _cpu_us(sample: ServeSample) -> float:
    return sample.cpu_us


def _redis_us(sample: ServeSample) -> float:
    return sample.redis_us


def _redis_scripts(sample: ServeSample) -> float:
    return sample.redis_scripts


def _cores(sample: ServeSample) -> float:
    return sample.rate * sample.cpu_us / 1e6


def _other_cores(sample: ServeSample) -> float:
    return sample.rate * (sample.client_us + sample.redis_us) / 1e6


def _cell(samples: Sequence[ServeSample], reading: Reading, show: Callable[[float], str]) -> str:
    return _show(Spread.of(map(reading, samples)), show)


def _show(spread: Spread, show: Callable[[float], str]) -> str:
    middle, least, most = show(spread.middle), show(spread.least), show(spread.most)
    return middle if least == most else f"{middle} ({least} to {most})"


def _reached(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heading) + " |"
    yield "| " + " | ".join("---" if not column else "--:" for column in range(len(heading))) + " |"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _hundreds(value: float) -> str:
    return f"{round(value, -2):,.0f}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(value_us: float) -> str:
    return f"{value_us / 1000:.2f}"


_REDIS_COLUMNS: tuple[tuple[Reading, Callable[[float], str]], ...] = (
    (_redis_scripts, _hundredths),
    (_redis_us, _whole),
)
