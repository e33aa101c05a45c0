"""The traffic of a simulation: which client sends a request, and when."""

from __future__ import annotations

import csv
from bisect import bisect_right
from datetime import UTC, datetime
from heapq import merge
from itertools import accumulate
from math import cos, log, pi
from typing import TYPE_CHECKING

from headgate.errors import InvalidInput
from headgate.simulation.virtual_time import START_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from headgate.simulation.scenario import Scenario, TrafficSource

__all__ = ["Arrival", "arrivals"]

Arrival = tuple[int, int, str, int]
"""The instant in virtual nanoseconds, the number of the source, the client, and the node; -1 for any node."""


def arrivals(scenario: Scenario, random: Random) -> Iterator[Arrival]:
    """All requests of a scenario in the order of time, without retries."""
    logs = {number: _read(source.log) for number, source in enumerate(scenario.traffic) if source.log is not None}
    first_s = min([entries[0][0] for entries in logs.values() if entries], default=0.0)
    end_ns = START_NS + round(scenario.duration_s * 1_000_000_000)
    parts: list[Iterator[Arrival]] = []
    for number, source in enumerate(scenario.traffic):
        if number in logs:
            parts.append(_logged(number, logs[number], first_s, end_ns))
        else:
            parts.append(_source(number, source, scenario, random))
    return merge(*parts)


def _source(number: int, source: TrafficSource, scenario: Scenario, random: Random) -> Iterator[Arrival]:
    pick, rate = _clients(source, scenario.scale, random)
    end_s = scenario.duration_s if source.end_s is None else min(source.end_s, scenario.duration_s)
    at_s, uniform = source.start_s, random.random
    while rate:
        at_s -= log(1.0 - uniform()) / rate
        if at_s >= end_s:
            return
        if source.cycle_s is not None:
            height = (1 - cos(2 * pi * at_s / source.cycle_s)) / 2
            if uniform() > source.low + (1 - source.low) * height:
                continue
        yield START_NS + int(at_s * 1_000_000_000), number, pick(), -1


def _clients(source: TrafficSource, scale: int, random: Random) -> tuple[Callable[[], str], float]:
    """A function that picks the client of a request, and the rate of all clients that remain at this scale."""
    name, count, uniform = source.name, source.clients, random.random
    if count == 1:
        return (lambda: name), source.rate / scale
    ranks = range((scale + 1) // 2, count + 1, scale)
    if not source.zipf:
        size = len(ranks)
        return (lambda: f"{name}-{ranks[int(uniform() * size)]}"), source.rate * size / count
    sums = [*accumulate([rank**-source.zipf for rank in ranks])]
    total = sums[-1]
    everyone = total if scale == 1 else sum(rank**-source.zipf for rank in range(1, count + 1))
    return (lambda: f"{name}-{ranks[bisect_right(sums, uniform() * total)]}"), source.rate * total / everyone


def _read(file: str) -> list[tuple[float, str, int]]:
    """The requests of a log in the order of time: the time, the client, and the node if the log names it."""
    entries = []
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            for row, entry in enumerate(csv.DictReader(lines), 2):
                try:
                    entries.append((_instant(entry["time"]), entry["client"], int(entry.get("node") or -1)))
                except (KeyError, TypeError, ValueError):
                    wanted = "a header and the columns time (ISO 8601, or seconds since 1970) and client"
                    raise InvalidInput(f"{file}:{row}: cannot read the line; a log has {wanted}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidInput(f"{file}: cannot be read: {reason}") from None
    entries.sort(key=lambda entry: entry[0])
    return entries


def _logged(number: int, entries: list[tuple[float, str, int]], first_s: float, end_ns: int) -> Iterator[Arrival]:
    for at_s, client, node in entries:
        at_ns = START_NS + int((at_s - first_s) * 1_000_000_000)
        if at_ns >= end_ns:
            return
        yield at_ns, number, client, node


def _instant(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
