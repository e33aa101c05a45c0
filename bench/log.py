"""What the decision log costs a check: one process rejects 20,000 requests a second, with the log and without.

Each turn is a process of its own, which lasts for seconds; turns with and without the log take place one after another,
in changing order, so that what else the machine does falls on all alike. Of each pair of turns the ratio is taken, and
of the ratios the median. Run `python -m bench.log`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import resource
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.progress import Progress
from headgate.adapters.gate import AsyncGate, Gate
from headgate.policy import read
from headgate.telemetry import DecisionLog

if TYPE_CHECKING:
    from collections.abc import Iterator

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
"""Seconds that whoever is ahead of the clock sleeps: so long that others get their turn, as in a server that waits."""
WARM: Final = 3.0
"""Seconds before the measurement, at the same rate: until then it is known who writes."""
WITHIN: Final = 1.10
"""How much longer a check may take with the log, at the 99th percentile."""


class Request(NamedTuple):
    """An arrival, as adapters make them."""

    path: str
    method: str
    peer: str
    key: str
    native: Any = None

    def header(self, name: str) -> list[str]:
        return [self.key] if name == "x-api-key" else []


@dataclass(frozen=True, slots=True)
class Turn:
    kind: str
    """"threads" or "asyncio"."""
    rate: int
    seconds: float
    threads: int
    log: dict[str, Any] | None
    """What a DecisionLog is made with; None for none."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of one turn."""

    p50: float
    p99: float
    p999: float
    """Microseconds that a check took."""
    late99: float
    """The same from when it was due, which is what a client feels."""
    cpu_us: float
    """Microseconds of the processor's time for each check, all threads of the process together."""
    rate: float
    missing: int = 0
    """Checks that are not in the log."""
    lost: int = 0
    """Checks that the log counts as lost."""


def main() -> None:
    options = _options()
    progress = Progress()
    with tempfile.TemporaryDirectory() as folder:
        logs = _logs(options, Path(folder))
        turns = [
            (kind, name, Turn(kind, options.rate, options.seconds, options.threads, log))
            for kind in options.kind
            for name, log in logs.items()
        ]
        told: dict[tuple[str, str], list[tuple[Told, Told]]] = {(kind, name): [] for kind, name, _ in turns}
        for number in range(options.rounds):
            for kind, name, turn in random.sample(turns, len(turns)):
                progress.say(f"round {number + 1} of {options.rounds}", f"{kind}, {name}")
                without = Turn(kind, options.rate, options.seconds, options.threads, None)
                pair = [without, turn] if random.random() < 0.5 else [turn, without]
                results = {each.log is None: _in_process(each) for each in pair}
                told[kind, name].append((results[True], results[False]))
                for file in Path(folder).iterdir():
                    file.unlink()
    progress.done()
    print(f"\n{options.rate:,} rejections/s in one process, {options.rounds} pairs of turns of {options.seconds:g} s\n")
    print(*_table(told), sep="\n")


def _logs(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    urls = {"sqlite": f"sqlite:///{folder}/decisions.db", "jsonl": f"jsonl:///{folder}/decisions.jsonl?files=1"}
    if "kafka" in options.sink:
        urls["kafka"] = f"kafka://{_brokers()}/decisions"
    return {
        f"{sink}, {writer}": {"sink": urls[sink], "writer": writer}
        for sink in options.sink
        for writer in options.writer
    }


_cluster: Any = None


def _brokers() -> str:
    """librdkafka's own brokers, on real sockets, which live as long as this process."""
    global _cluster
    from confluent_kafka import Producer

    _cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
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


def _take_turn(turn: Turn, pipe: Any) -> None:
    log = DecisionLog(secret=SECRET, sample=0, **turn.log) if turn.log is not None else None
    # What is measured of each check: how long it took, and how long after it was due it was over.
    measured = asyncio.run(_by_asyncio(turn, log)) if turn.kind == "asyncio" else _by_threads(turn, log)
    took, late = sorted(measured.took), sorted(measured.late)
    told = Told(
        *(took[int(len(took) * share)] / 1000 for share in (0.5, 0.99, 0.999)),
        late99=late[int(len(late) * 0.99)] / 1000,
        cpu_us=measured.cpu / len(took) * 1_000_000,
        rate=len(took) / turn.seconds,
    )
    if log is not None:
        log.flush(60)
        told = replace(told, missing=measured.checks - log.stats.written, lost=log.stats.lost)
        log.close()
    pipe.send(told)


class Measured:
    """What is taken down of each check, once all is warm and it is known who writes."""

    def __init__(self, turn: Turn) -> None:
        self.took: list[int] = []
        self.late: list[int] = []
        self.checks = 0
        self.cpu = 0.0
        self._from = time.perf_counter_ns() + round(WARM * SECOND_NS)
        self._until = self._from + round(turn.seconds * SECOND_NS)
        self._step = SECOND_NS // turn.rate
        self._requests = _requests()
        self._is_warm = False

    def turns(self, share: int, shares: int) -> Iterator[tuple[int, Request]]:
        """When each check of a thread is due, and whose it is. Who falls far behind does not make up for it."""
        step, number = self._step * shares, share
        due = time.perf_counter_ns() + self._step * share
        while due < self._until:
            if not self._is_warm and due >= self._from:
                self._is_warm = True
                gc.collect()
                self.cpu -= _cpu()
            yield due, self._requests[number * 7919 % CLIENTS]  # everybody in turn, but nobody's neighbours
            number += 1
            due = max(due + step, time.perf_counter_ns() - SECOND_NS // 100)

    def note(self, due: int, start: int, end: int) -> None:
        self.checks += 1
        if due >= self._from:
            self.took.append(end - start)
            self.late.append(end - due)


def _by_threads(turn: Turn, log: DecisionLog | None) -> Measured:
    gate = Gate(read(POLICY), secret=SECRET)
    for each in _requests() * 2:
        gate.admit(each)  # from now on, all are denied
    gate.on_decision = log
    measured = Measured(turn)

    def work(share: int) -> None:
        for due, request in measured.turns(share, turn.threads):
            while (start := time.perf_counter_ns()) < due:
                time.sleep(NAP)
            gate.admit(request)
            measured.note(due, start, time.perf_counter_ns())

    threads = [threading.Thread(target=work, args=(share,)) for share in range(turn.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured.cpu += _cpu()
    gate.close()
    return measured


async def _by_asyncio(turn: Turn, log: DecisionLog | None) -> Measured:
    gate = AsyncGate(read(POLICY), secret=SECRET)
    for each in _requests() * 2:
        await gate.admit(each)
    gate.on_decision = log
    measured = Measured(turn)
    for due, request in measured.turns(0, 1):
        while (start := time.perf_counter_ns()) < due:  # noqa: ASYNC110 - nothing happens but time
            await asyncio.sleep(0)
        await gate.admit(request)
        measured.note(due, start, time.perf_counter_ns())
    measured.cpu += _cpu()
    await gate.close()
    return measured


def _requests() -> list[Request]:
    return [Request("/search", "GET", f"203.0.{each // 250}.{each % 250}", f"sk_{each:08}") for each in range(CLIENTS)]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- what is made of it ----------------------------------------------------------------------------------------


def _table(told: dict[tuple[str, str], list[tuple[Told, Told]]]) -> Iterator[str]:
    yield (
        "| by | log | checks/s | p50 without | p99 without | p50 | p99 | from when it was due, p99 | p99.9 "
        "| processor's time | lost |"
    )
    yield "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |"
    for (kind, name), pairs in told.items():
        worst = _ratio(pairs, "p99")
        p99 = f"× {worst:.2f}" if worst <= WITHIN else f"**× {worst:.2f}** (wanted {WITHIN:g})"
        missing = sum(each.missing - each.lost for _, each in pairs)
        yield (
            f"| {kind} | {name} | {median(each.rate for _, each in pairs):,.0f} "
            f"| {median(each.p50 for each, _ in pairs):.1f} µs | {median(each.p99 for each, _ in pairs):.1f} µs "
            f"| × {_ratio(pairs, 'p50'):.2f} | {p99} | × {_ratio(pairs, 'late99'):.2f} | × {_ratio(pairs, 'p999'):.2f} "
            f"| × {_ratio(pairs, 'cpu_us'):.2f} "
            f"| {sum(each.lost for _, each in pairs)}{f', {missing} NOT COUNTED' if missing else ''} |"
        )


def _ratio(pairs: list[tuple[Told, Told]], name: str) -> float:
    return median(getattr(with_, name) / getattr(without, name) for without, with_ in pairs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.log", description=__doc__)
    parser.add_argument("--rate", type=int, default=20_000, help="rejections a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a turn is measured")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of turns of each kind")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--kind", choices=("threads", "asyncio"), action="append", help="may be given again")
    parser.add_argument("--sink", choices=("sqlite", "jsonl", "kafka"), action="append", help="may be given again")
    parser.add_argument("--writer", choices=("auto", "thread", "process"), action="append", help="may be given again")
    options = parser.parse_args()
    options.kind = options.kind or ["threads", "asyncio"]
    options.sink = options.sink or ["sqlite", "jsonl", "kafka"]
    options.writer = options.writer or ["auto", "thread"]
    return options


if __name__ == "__main__":
    main()
