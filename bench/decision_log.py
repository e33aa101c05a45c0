"""What the decision log costs a check: one process rejects 20,000 requests a second, with the log and without.

Slices of a second with the log and without take place one after another in one process, in changing order, so that what
else the machine does falls on both alike. The 99th percentile is that of all checks with the log, against that of all
without; beside it stands what each pair of slices says by itself, as the median of their ratios. Run
`python -m bench.decision_log`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import marshal
import multiprocessing
import random
import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy

from bench.progress import Progress
from headgate.gate.gate import AsyncGate, Gate
from headgate.policy import read
from headgate.telemetry import DecisionLog
from headgate.telemetry.decision_log.delivery import DeliveryResult, InProcessDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.gate.admission import Admission
    from headgate.telemetry.decision_log.delivery import EventBatch

SECRET: Final = "thirty-two bytes, kept elsewhere"
POLICY: Final = """
limits:
  - {name: per-key, by: api_key, bucket: 1/minute}
  - {name: per-ip, by: ip, bucket: 1/minute}
clients:
  - {ip: 198.51.100.0/24, label: the office}
"""
CLIENTS: Final = 1000
SECOND_NS: Final = 1_000_000_000
NAP: Final = 0.00002
"""Seconds to sleep when ahead of the clock; long enough for other threads to run, as in a server that waits."""
WARM: Final = 2.5
"""Seconds before the measurement, at the same rate."""
NOTHING: Final = "nothing"
"""Instead of who writes: there is no log in either slice. How far these ratios are from 1 is how far others can be by
chance."""
WITHIN: Final = 1.10
"""How much longer a check may take with the log, at the 99th percentile."""
FINENESS: Final = 1.002
LONGEST_US: Final = 1_000_000
"""Checks are counted by how long they took, up to this, in steps of so much."""
STEPS: Final = numpy.geomspace(1, LONGEST_US, round(numpy.log(LONGEST_US) / numpy.log(FINENESS)))
RESAMPLED: Final = 400
"""How often pairs of slices are drawn anew, to see how far chance decides."""


class Request(NamedTuple):
    """A request, as adapters make them."""

    path: str
    method: str
    peer: str
    key: str
    native: Any = None
    mounted_path: str | None = None

    def header(self, name: str) -> list[str]:
        return [self.key] if name == "x-api-key" else []


@dataclass(frozen=True, slots=True)
class Turn:
    """One kind of app with one kind of log."""

    kind: str
    """"threads" or "asyncio"."""
    rate: int
    seconds: float
    pairs: int
    threads: int
    log: dict[str, Any]
    """What a DecisionLog is made with."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Microseconds of the checks in one slice."""

    p50: float
    p99: float
    p999: float
    late99: float
    """From when it was due, which is what a client feels."""
    cpu: float
    """Of the processor, all threads of the process together."""
    rate: float
    counts: Any
    """How many checks took how long, by `STEPS`."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of one turn: slices without the log, those with it beside them, and what became of the records."""

    without: list[Slice]
    with_: list[Slice]
    missing: int
    """Rejections that are neither in the log nor counted as lost."""
    lost: int

    def ratios(self, name: str) -> list[float]:
        return sorted(getattr(b, name) / getattr(a, name) for a, b in zip(self.without, self.with_, strict=True))

    def ratio(self, name: str) -> float:
        return median(self.ratios(name))

    def p99(self) -> tuple[float, float, float]:
        """Of all checks with the log, against all without; and between which it would be, in 19 runs of 20."""
        both = numpy.array([[slice.counts for slice in some] for some in (self.without, self.with_)])
        draw = numpy.random.default_rng(1)
        drawn = [draw.integers(0, len(self.with_), len(self.with_)) for _ in range(RESAMPLED)]
        ratios = [_p99_ratio(both[:, pairs].sum(axis=1)) for pairs in drawn]
        least, most = numpy.quantile(ratios, (0.025, 0.975))
        return _p99_ratio(both.sum(axis=1)), least, most


def _p99_ratio(counts: Any) -> float:
    without, with_ = [STEPS[numpy.searchsorted(each.cumsum(), each.sum() * 0.99)] for each in counts]
    return float(with_ / without)


def main() -> None:
    options = _options()
    progress = Progress()
    told: dict[tuple[str, str], Told] = {}
    for kind in options.kind:
        for sink in options.sink:
            for writer in options.writer:
                progress.say(f"{kind}, {sink}, {writer}", f"{2 * options.pairs * options.seconds:g} s")
                with tempfile.TemporaryDirectory() as folder:
                    log = {"sink": _url(sink, folder), "writer": writer}
                    turn = Turn(kind, options.rate, options.seconds, options.pairs, options.threads, log)
                    told[kind, f"{sink}, {writer}"] = _in_process(turn)
    progress.done()
    print(f"\n{options.rate:,} rejections/s in one process, {options.pairs} pairs of slices of {options.seconds:g} s\n")
    print(*_table(told), sep="\n")


def _url(sink: str, folder: str) -> str:
    match sink:
        case "sqlite":
            return f"sqlite:///{folder}/decisions.db"
        case "jsonl":
            return f"jsonl:///{folder}/decisions.jsonl?files=1"
        case _:
            return f"kafka://{_brokers()}/decisions"


_cluster: Any = None


def _brokers() -> str:
    """librdkafka's own brokers, on real sockets, which live as long as this process."""
    global _cluster
    from confluent_kafka import Producer

    _cluster = _cluster or Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    found = _cluster.list_topics(timeout=10).brokers.values()
    return ",".join(f"{each.host}:{each.port}" for each in found)


# -- one turn --------------------------------------------------------------------------------------------------


def _in_process(turn: Turn) -> Told:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_turn, args=(turn, theirs))
    process.start()
    theirs.close()
    told: Told = ours.recv()
    process.join()
    return told


class Nobody(InProcessDelivery):
    """Drops what the writer process would receive, to measure the cost in the app's own process."""

    def deliver(self, batch: EventBatch) -> DeliveryResult:
        marshal.dumps(list(batch.events), 2)
        return DeliveryResult(len(batch.events))


def _opened(options: dict[str, Any]) -> DecisionLog:
    if options["writer"] == NOTHING:
        options = {**options, "writer": "thread"}
    if options["writer"] != "nobody":
        return DecisionLog(secret=SECRET, sample=0, **options)
    log = DecisionLog(secret=SECRET, sample=0, **{**options, "writer": "thread"})
    carrier = log._queue._delivery._in_process  # noqa: SLF001 - there is no such writer but for this comparison
    carrier.__class__ = Nobody
    carrier.size = 10_000
    return log


def _take_turn(turn: Turn, pipe: Any) -> None:
    slices: dict[bool, list[Slice]] = {True: [], False: []}
    requests, rejected = _requests(), 0
    log = _opened(turn.log)
    with asyncio.Runner() as runner:
        gate = (AsyncGate if turn.kind == "asyncio" else Gate)(read(POLICY), secret=SECRET)

        def run(seconds: float) -> Taken:
            taken = Taken(turn.rate, seconds, requests)
            if isinstance(gate, AsyncGate):
                runner.run(_by_asyncio(gate, taken))
            else:
                _by_threads(gate, taken, turn.threads)
            return taken

        hook = None if turn.log["writer"] == NOTHING else log
        run(WARM)  # from now on, nearly all are denied
        gate.on_decision = hook
        rejected += run(WARM).rejected  # and it is known who writes
        log.flush(60)
        for _ in range(turn.pairs):
            for is_with in random.sample((True, False), 2):
                gate.on_decision = hook if is_with else None
                gc.collect()
                taken = run(turn.seconds)
                slices[is_with].append(taken.slice())
                rejected += taken.rejected * is_with
                log.flush(60)  # no writes in a slice without the log
    stats = log.stats
    log.close()
    missing = rejected - stats.written - stats.lost if hook is not None else 0
    pipe.send(Told(slices[False], slices[True], missing, stats.lost))


class Taken:
    """What is taken down of each check of a slice."""

    def __init__(self, rate: int, seconds: float, requests: list[Request]) -> None:
        self.took: list[int] = []
        self.late: list[int] = []
        self.passed: list[int] = []
        self._seconds = seconds
        self._step = SECOND_NS // rate
        self._requests = requests
        self._until = time.perf_counter_ns() + round(seconds * SECOND_NS)
        self._cpu = _cpu()

    def turns(self, share: int, shares: int) -> Iterator[tuple[int, Request]]:
        """When each check of a thread is due, and whose it is. Who falls far behind does not make up for it."""
        step, number = self._step * shares, share
        due = time.perf_counter_ns() + self._step * share
        while due < self._until:
            yield due, self._requests[number * 7919 % CLIENTS]  # everybody in turn, but nobody's neighbours
            number += shares
            due = max(due + step, time.perf_counter_ns() - SECOND_NS // 100)

    def note(self, due: int, start: int, end: int, admission: Admission) -> None:
        self.took.append(end - start)
        self.late.append(end - due)
        if admission.allowed:  # after a minute, one of each client passes again
            self.passed.append(end)

    @property
    def rejected(self) -> int:
        return len(self.took) - len(self.passed)

    def slice(self) -> Slice:
        took, late, count = sorted(self.took), sorted(self.late), len(self.took)
        p50, p99, p999 = (took[int(count * share)] / 1000 for share in (0.5, 0.99, 0.999))
        cpu = (_cpu() - self._cpu) / count * 1_000_000
        counts = numpy.bincount(numpy.searchsorted(STEPS, numpy.array(took) / 1000), minlength=len(STEPS) + 1)
        return Slice(p50, p99, p999, late[int(count * 0.99)] / 1000, cpu, count / self._seconds, counts[: len(STEPS)])


def _by_threads(gate: Gate, taken: Taken, count: int) -> None:
    def work(share: int) -> None:
        for due, request in taken.turns(share, count):
            while (start := time.perf_counter_ns()) < due:
                time.sleep(NAP)
            admission = gate.admit(request)
            taken.note(due, start, time.perf_counter_ns(), admission)

    threads = [threading.Thread(target=work, args=(share,)) for share in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _by_asyncio(gate: AsyncGate, taken: Taken) -> None:
    for due, request in taken.turns(0, 1):
        while (start := time.perf_counter_ns()) < due:  # noqa: ASYNC110 - nothing happens but time
            await asyncio.sleep(0)
        admission = await gate.admit(request)
        taken.note(due, start, time.perf_counter_ns(), admission)


def _requests() -> list[Request]:
    return [Request("/search", "GET", f"203.0.{each // 250}.{each % 250}", f"sk_{each:08}") for each in range(CLIENTS)]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- what is made of it ----------------------------------------------------------------------------------------


def _table(told: dict[tuple[str, str], Told]) -> Iterator[str]:
    yield (
        "| by | log | checks/s | p50, p99 without | p50 | p99 of all | p99 of a pair | p99.9 | p99 from when due "
        "| processor's time | lost |"
    )
    yield "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |"
    for (kind, name), each in told.items():
        worst, least, most = each.p99()
        uncounted = f", {each.missing} NOT COUNTED" if each.missing else ""
        yield (
            f"| {kind} | {name} | {median(one.rate for one in each.with_):,.0f} "
            f"| {median(one.p50 for one in each.without):.0f}, {median(one.p99 for one in each.without):.0f} µs "
            f"| × {each.ratio('p50'):.2f} "
            f"| {f'× {worst:.2f}' if worst <= WITHIN else f'**× {worst:.2f}**'} ({least:.2f} to {most:.2f}) "
            f"| × {each.ratio('p99'):.2f} | × {each.ratio('p999'):.2f} | × {each.ratio('late99'):.2f} "
            f"| × {each.ratio('cpu'):.2f} | {each.lost}{uncounted} |"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decision_log", description=__doc__)
    parser.add_argument("--rate", type=int, default=20_000, help="rejections a second")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one slice")
    parser.add_argument("--pairs", type=int, default=40, help="of slices, with the log and without")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--kind", choices=("threads", "asyncio"), action="append", help="may be given again")
    parser.add_argument("--sink", choices=("sqlite", "jsonl", "kafka"), action="append", help="may be given again")
    parser.add_argument("--writer", choices=("auto", "thread", "process", "nobody", NOTHING), action="append")
    options = parser.parse_args()
    options.kind = options.kind or ["threads", "asyncio"]
    options.sink = options.sink or ["sqlite", "jsonl", "kafka"]
    options.writer = options.writer or ["auto", "thread", "nobody", NOTHING]
    return options


if __name__ == "__main__":
    main()
