"""Traffic baselines: per client, the 95th percentile of requests per minute over seven days.

One row per client and day holds a histogram of requests per minute, with buckets at most an eighth wide. Minutes
without requests are not stored: they are the watched minutes that the histogram does not count.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import bindparam, case, delete, func, insert, select, tuple_, update

from headgate.control.anomalies.tables import CLIENT_DAYS, WATCHED_DAYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection

__all__ = ["DAY", "Baseline", "Client", "TrafficHistory", "percentile", "read_histories"]

logger = logging.getLogger("headgate")

DAY: Final = 1440
"""Minutes."""
HISTORY_DAYS: Final = 7
"""Before today."""
MAX_CLIENTS_PER_DAY: Final = 20_000
"""Clients beyond this have no history of the day."""
MAX_CLIENTS_PER_QUERY: Final = 300
EXACT_BUCKETS: Final = 16

Client: TypeAlias = tuple[str, str]
"""A kind of identity and a keyed hash."""
Histogram: TypeAlias = Counter[int]
"""Minutes by bucket."""


def bucket_of(requests: int) -> int:
    """The bucket of a number of requests: exact below 16, then eight buckets per doubling."""
    if requests < EXACT_BUCKETS:
        return requests
    doublings = requests.bit_length() - 4
    return EXACT_BUCKETS + 8 * (doublings - 1) + (requests >> doublings) - 8


def bucket_maximum(bucket: int) -> int:
    """The largest number of requests in a bucket."""
    if bucket < EXACT_BUCKETS:
        return bucket
    doublings, part = divmod(bucket - EXACT_BUCKETS, 8)
    return ((9 + part) << (doublings + 1)) - 1


def percentile(histogram: Mapping[int, int], minutes: int, share: int = 95) -> int:
    """A percentile of requests per minute; minutes outside of the histogram had none.

    >>> percentile({bucket_of(3): 4, bucket_of(12): 1}, 20)
    3
    >>> percentile({bucket_of(3): 4, bucket_of(12): 1}, 1000)
    0
    """
    rank = -(-minutes * share // 100)
    seen = minutes - sum(histogram.values())
    if seen >= rank:
        return 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        if seen >= rank:
            return bucket_maximum(bucket)
    return bucket_maximum(max(histogram, default=0))


class TrafficHistory(NamedTuple):
    """The watched minutes of one client."""

    histogram: Histogram
    minutes: int
    """Watched since the client was first seen, including minutes without requests."""

    @property
    def usual(self) -> int:
        """The 95th percentile of requests per minute."""
        return percentile(self.histogram, self.minutes)


class Baseline:
    """Collects minutes in memory and writes them to the tables from time to time. Not thread-safe."""

    def __init__(self) -> None:
        self._days: dict[int, _Day] = {}
        self._full_day: int | None = None
        """The last day for which a warning about too many clients was logged."""

    def add(self, minute: int, counts: Mapping[Client, int]) -> None:
        """Add a watched minute; clients not in `counts` sent nothing."""
        self._days.setdefault(minute // DAY, _Day()).add(counts)

    @property
    def pending_minutes(self) -> int:
        return sum(day.minutes for day in self._days.values())

    def write(self, connection: Connection) -> None:
        """Merge the pending minutes into the tables. Call `clear` after the commit."""
        for number, day in sorted(self._days.items()):
            self._write_day(connection, number, day)
        if self._days:
            oldest = max(self._days) - HISTORY_DAYS
            for table in (CLIENT_DAYS, WATCHED_DAYS):
                connection.execute(delete(table).where(table.c.day < oldest))

    def clear(self) -> None:
        self._days = {}

    def _write_day(self, connection: Connection, number: int, day: _Day) -> None:
        watched, is_today = WATCHED_DAYS.c.day == number, CLIENT_DAYS.c.day == number
        watched_minutes = connection.execute(select(WATCHED_DAYS.c.minutes).where(watched)).scalar() or 0
        stored: dict[Client, str | None] = {}
        """The histograms of known clients; None if they have none of this day."""
        kind, key, counts = CLIENT_DAYS.c.kind, CLIENT_DAYS.c.key, func.max(case((is_today, CLIENT_DAYS.c.counts)))
        for clients in _chunks(day.clients):
            query = select(kind, key, counts.label("counts")).where(_is_one_of(clients)).group_by(kind, key)
            stored |= {(row.kind, row.key): row.counts for row in connection.execute(query)}
        new = [client for client in day.clients if stored.get(client) is None]
        count = select(func.count()).select_from(CLIENT_DAYS).where(is_today)
        room = max(MAX_CLIENTS_PER_DAY - connection.execute(count).scalar_one(), 0)
        if len(new) > room and self._full_day != number:
            self._full_day = number
            logger.warning("more than %d clients today: not all of them get a traffic baseline", MAX_CLIENTS_PER_DAY)
        updates = [
            {"of_kind": client[0], "of_key": client[1], "counts": _encode(_decode(text) + day.clients[client][1])}
            for client, text in stored.items()
            if text is not None
        ]
        if updates:
            where = (is_today, kind == bindparam("of_kind"), key == bindparam("of_key"))
            connection.execute(update(CLIENT_DAYS).where(*where).values(counts=bindparam("counts")), updates)
        inserts: list[dict[str, Any]] = []
        for client in new[:room]:
            missing, histogram = day.clients[client]
            missing = 0 if client in stored else watched_minutes + missing
            row = {"day": number, "kind": client[0], "key": client[1], "missing": missing}
            inserts.append({**row, "counts": _encode(histogram)})
        if inserts:
            connection.execute(insert(CLIENT_DAYS), inserts)
        connection.execute(update(WATCHED_DAYS).where(watched).values(minutes=WATCHED_DAYS.c.minutes + day.minutes))


@dataclass
class _Day:
    minutes: int = 0
    clients: dict[Client, tuple[int, Histogram]] = field(default_factory=dict)
    """Per client, the number of these minutes before it was first seen, and its histogram."""

    def add(self, counts: Mapping[Client, int]) -> None:
        for client, requests in counts.items():
            _, histogram = self.clients.setdefault(client, (self.minutes, Counter()))
            histogram[bucket_of(requests)] += 1
        self.minutes += 1


def read_histories(connection: Connection, clients: Iterable[Client], today: int) -> dict[Client, TrafficHistory]:
    """The histories of clients over today and the seven days before; new clients have none."""
    since = today - HISTORY_DAYS
    days = connection.execute(select(WATCHED_DAYS).where(WATCHED_DAYS.c.day >= since)).all()
    found: dict[Client, TrafficHistory] = {}
    for some in _chunks(clients):
        query = select(CLIENT_DAYS).where(CLIENT_DAYS.c.day >= since, _is_one_of(some)).order_by(CLIENT_DAYS.c.day)
        for row in connection.execute(query):
            client = row.kind, row.key
            if client not in found:  # its first day
                minutes = sum(each.minutes for each in days if each.day >= row.day)
                found[client] = TrafficHistory(Counter(), minutes - row.missing)
            found[client].histogram.update(_decode(row.counts))
    return found


def _is_one_of(clients: Sequence[Client]):  # type: ignore[no-untyped-def] # SQLAlchemy's own
    return tuple_(CLIENT_DAYS.c.kind, CLIENT_DAYS.c.key).in_(clients)


def _chunks(clients: Iterable[Client]) -> Iterator[list[Client]]:
    everyone = list(clients)
    for start in range(0, len(everyone), MAX_CLIENTS_PER_QUERY):
        yield everyone[start : start + MAX_CLIENTS_PER_QUERY]


def _encode(histogram: Histogram) -> str:
    return " ".join(f"{bucket}:{histogram[bucket]}" for bucket in sorted(histogram))


def _decode(text: str) -> Histogram:
    pairs = [pair.partition(":") for pair in text.split()]
    return Counter({int(bucket): int(minutes) for bucket, _, minutes in pairs})
