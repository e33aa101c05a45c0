"""Access logs for tests: generated ones with the shape of a real log, and an independent count of rejections."""

from __future__ import annotations

import gzip
import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

PATHS = ("/", "/feed/", "/robots.txt", "/search?q=a", "/search?q=b", "/api/users/7", "/wp-login.php", "/a%20b")
START = datetime(2026, 2, 20, 0, 0, 45, tzinfo=UTC)


class Line(NamedTuple):
    """One request, as an independent parser reads it."""

    at: int
    """In seconds."""
    method: str
    path: str
    client: str


def write_log(file: Path, *, requests: int, clients: int = 50, seed: int = 1, hours: int = 6) -> None:
    """Write a nearly sorted log: bursts, a few clients with most requests, and lines up to 90 seconds late."""
    chance = random.Random(seed)
    moments = sorted(chance.randrange(hours * 3600) for _ in range(requests))
    rows = []
    burst, burster = 0, 0
    for number, moment in enumerate(moments):
        if not burst and chance.random() < 0.01:
            burst, burster = chance.randrange(5, 60), chance.randrange(clients)
        client = burster if burst else min(int(chance.expovariate(8 / clients)), clients - 1)
        burst = max(0, burst - 1)
        method = "POST" if chance.random() < 0.1 else "HEAD" if chance.random() < 0.1 else "GET"
        rows.append((moment, number + chance.randrange(30) * (chance.random() < 0.05), client, method))
    rows.sort(key=lambda row: row[1])
    with file.open("w") as stream:
        for moment, _, client, method in rows:
            at = f"{START + timedelta(seconds=moment):%d/%b/%Y:%H:%M:%S} +0000"
            path = chance.choice(PATHS)
            stream.write(f'10.0.{client // 250}.{client % 250} - - [{at}] "{method} {path} HTTP/1.1" 200 512 "-" "x"\n')


def read_log(file: Path) -> list[Line]:
    """The requests of a common log in the order of their times, read without regular expressions."""
    found = []
    with gzip.open(file, "rt", errors="replace") if file.suffix == ".gz" else file.open() as stream:
        for line in stream:
            client, rest = line.split(" ", 1)
            stamp, rest = rest.split("[", 1)[1].split("] ", 1)
            method, path = rest.split('"')[1].split(" ")[:2]
            moment = datetime.strptime(stamp, "%d/%b/%Y:%H:%M:%S %z")
            found.append(Line(int(moment.timestamp()), method, path.partition("?")[0], client))
    return sorted(found, key=lambda line: line.at)


class WindowLimit(NamedTuple):
    """A limit of the independent count."""

    name: str
    algorithm: str
    quota: int
    seconds: int
    by: str = "ip"
    path: str | None = None
    cost: int = 1

    @property
    def yaml(self) -> str:
        where = f", path: '{self.path}'" if self.path else ""
        return (
            f"{{name: {self.name}, by: {self.by}, algorithm: {self.algorithm}, cost: {self.cost}, "
            f"bucket: {self.quota}/{self.seconds} seconds{where}}}"
        )

    def counts(self, line: Line) -> bool:
        return self.path is None or line.path == self.path or line.path == self.path + "/"


class Counted(NamedTuple):
    rejected: int
    by_limit: dict[str, tuple[int, int]]
    by_client: dict[str, tuple[int, int]]
    """Requests and rejections."""


def policy_text(limits: Iterable[WindowLimit]) -> str:
    return "limits:\n" + "".join(f"  - {limit.yaml}\n" for limit in limits)


def count_rejections(lines: Iterable[Line], limits: list[WindowLimit]) -> Counted:
    """Count by the definitions of the windows: all limits of a request are charged, or none."""
    counters: dict[tuple[str, str], Any] = defaultdict(list)
    requests: Counter[str] = Counter()
    rejections: Counter[str] = Counter()
    clients: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    total = 0
    for line in lines:
        applied = [limit for limit in limits if limit.counts(line)]
        keys = [(limit.name, line.client if limit.by == "ip" else "") for limit in applied]
        denying = [
            limit.name
            for limit, key in zip(applied, keys, strict=True)
            if used(limit, counters[key], line.at) + limit.cost > limit.quota
        ]
        requests.update(limit.name for limit in applied)
        rejections.update(denying)
        clients[line.client][0] += 1
        clients[line.client][1] += bool(denying)
        total += bool(denying)
        if not denying:
            for limit, key in zip(applied, keys, strict=True):
                counters[key].append((line.at, limit.cost))
    return Counted(
        total,
        {limit.name: (requests[limit.name], rejections[limit.name]) for limit in limits},
        {name: (counts[0], counts[1]) for name, counts in clients.items()},
    )


def used(limit: WindowLimit, admitted: list[tuple[int, int]], now: int) -> Fraction | int:
    """The amount that counts at an instant; forgets what cannot count any more."""
    window = limit.seconds
    while admitted and admitted[0][0] <= now - 2 * window:
        del admitted[0]
    if limit.algorithm == "sliding_log":
        return sum(cost for at, cost in recent(admitted) if now - at < window)
    index = now // window
    current = sum(cost for at, cost in recent(admitted) if at // window == index)
    if limit.algorithm == "fixed_window":
        return current
    before = sum(cost for at, cost in recent(admitted) if at // window == index - 1)
    return current + Fraction(before * (window - now % window), window)


def recent(admitted: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    return iter(admitted)
