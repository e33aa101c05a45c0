"""What is usual for a client: how many requests its minutes have seen in seven days, and their 95th percentile.

Of each client and day there is one row: how many minutes had how many requests, in steps of an eighth at most. Minutes
without a request are not written down: they are those that were watched and have no number.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeAlias

from sqlalchemy import bindparam, delete, func, insert, select, tuple_, update

from headgate.control.anomalies.tables import MINUTES, WATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection

__all__ = ["DAY", "Baseline", "Client", "TrafficHistory", "histories", "percentile"]

logger = logging.getLogger("headgate")

DAY: Final = 1440
"""Minutes."""
DAYS: Final = 7
"""Before today."""
MOST_CLIENTS: Final = 20_000
"""Of one day; those who come after that have no history of it."""
AT_ONCE: Final = 300
"""Clients in one question to the database."""
EXACTLY: Final = 16

Client: TypeAlias = tuple[str, str]
"""A kind of identity and a keyed hash."""
Steps: TypeAlias = dict[int, int]
"""How many minutes there were in each step of the scale."""


def step_of(requests: int) -> int:
    """The step of the scale on which so many requests stand: each is its own below 16, then eight for each doubling."""
    if requests < EXACTLY:
        return requests
    doublings = requests.bit_length() - 4
    return EXACTLY + 8 * (doublings - 1) + (requests >> doublings) - 8


def most_of(step: int) -> int:
    """The most requests that stand on a step."""
    if step < EXACTLY:
        return step
    doublings, part = divmod(step - EXACTLY, 8)
    return ((9 + part) << (doublings + 1)) - 1


def percentile(steps: Mapping[int, int], minutes: int, share: int = 95) -> int:
    """What so many of a hundred minutes had at most; all minutes that stand on no step had no request.

    >>> percentile({step_of(3): 4, step_of(12): 1}, 20)
    3
    >>> percentile({step_of(3): 4, step_of(12): 1}, 1000)
    0
    """
    rank = -(-minutes * share // 100)
    below = minutes - sum(steps.values())
    if below >= rank:
        return 0
    for step in sorted(steps):
        below += steps[step]
        if below >= rank:
            return most_of(step)
    return most_of(max(steps)) if steps else 0


class TrafficHistory:
    """The minutes of one client."""

    __slots__ = ("minutes", "steps")

    def __init__(self, steps: Steps, minutes: int) -> None:
        self.steps = steps
        self.minutes = minutes
        """How many were watched since it was first seen, those without a request included."""

    @property
    def usual(self) -> int:
        """The 95th percentile."""
        return percentile(self.steps, self.minutes)


class Baseline:
    """Minutes on their way into the tables: they are gathered, and written now and then. Belongs to one thread."""

    def __init__(self) -> None:
        self._days: dict[int, _Day] = {}
        self._told: int | None = None
        """The last day of which was told that it has too many clients."""

    def add(self, minute: int, counts: Mapping[Client, int]) -> None:
        """A minute was watched: clients that are not named here have sent nothing."""
        self._days.setdefault(minute // DAY, _Day()).add(counts)

    @property
    def waiting(self) -> int:
        """Minutes that are not written yet."""
        return sum([day.minutes for day in self._days.values()])

    def write(self, connection: Connection) -> None:
        """Add them to what others have written."""
        for number, day in sorted(self._days.items()):
            self._write_day(connection, number, day)
        if self._days:
            before = max(self._days) - DAYS
            for table in (MINUTES, WATCH):
                connection.execute(delete(table).where(table.c.day < before))

    def written(self) -> None:
        """The transaction has ended well."""
        self._days = {}

    def _write_day(self, connection: Connection, number: int, day: _Day) -> None:
        watched = connection.execute(select(WATCH.c.minutes).where(WATCH.c.day == number)).scalar() or 0
        known = _known(connection, day.clients)
        rows: dict[Client, Steps] = {}
        for clients in _parts([*day.clients]):
            asked = select(MINUTES).where(MINUTES.c.day == number, _is_one_of(clients))
            rows.update({(row.kind, row.key): _read(row.counts) for row in connection.execute(asked)})
        new = [client for client in day.clients if client not in rows]
        room = MOST_CLIENTS - self._number_of_clients(connection, number)
        if len(new) > room and self._told != number:
            self._told = number
            logger.warning("more than %d clients today: what is usual is not learnt of all of them", MOST_CLIENTS)
        changed = [
            {"of_kind": client[0], "of_key": client[1], "counts": _written(_sum(rows[client], day.clients[client][1]))}
            for client in rows
        ]
        if changed:
            where = (
                MINUTES.c.day == number,
                MINUTES.c.kind == bindparam("of_kind"),
                MINUTES.c.key == bindparam("of_key"),
            )
            connection.execute(update(MINUTES).where(*where).values(counts=bindparam("counts")), changed)
        made = [
            {
                "day": number,
                "kind": client[0],
                "key": client[1],
                "missing": 0 if client in known else watched + day.clients[client][0],
                "counts": _written(day.clients[client][1]),
            }
            for client in new[: max(room, 0)]
        ]
        if made:
            connection.execute(insert(MINUTES), made)
        connection.execute(update(WATCH).where(WATCH.c.day == number).values(minutes=WATCH.c.minutes + day.minutes))

    @staticmethod
    def _number_of_clients(connection: Connection, number: int) -> int:
        asked = select(func.count()).select_from(MINUTES).where(MINUTES.c.day == number)
        return connection.execute(asked).scalar_one()


class _Day:
    def __init__(self) -> None:
        self.minutes = 0
        self.clients: dict[Client, tuple[int, Steps]] = {}
        """After how many of these minutes each was first seen, and its own."""

    def add(self, counts: Mapping[Client, int]) -> None:
        for client, requests in counts.items():
            known = self.clients.get(client)
            if known is None:
                known = self.clients[client] = self.minutes, {}
            step = step_of(requests)
            known[1][step] = known[1].get(step, 0) + 1
        self.minutes += 1


def histories(connection: Connection, clients: Iterable[Client], today: int) -> dict[Client, TrafficHistory]:
    """What is known of these clients, over today and the seven days before; nothing of those who are new."""
    since = today - DAYS
    watched = {row.day: row.minutes for row in connection.execute(select(WATCH).where(WATCH.c.day >= since))}
    found: dict[Client, TrafficHistory] = {}
    for some in _parts([*clients]):
        asked = select(MINUTES).where(MINUTES.c.day >= since, _is_one_of(some)).order_by(MINUTES.c.day)
        for row in connection.execute(asked):
            client = row.kind, row.key
            if client not in found:  # the first of its days
                minutes = sum([number for day, number in watched.items() if day >= row.day])
                found[client] = TrafficHistory({}, minutes - row.missing)
            history = found[client]
            history.steps = _sum(history.steps, _read(row.counts))
    return found


def _known(connection: Connection, clients: Iterable[Client]) -> set[Client]:
    """Those of whom there is anything."""
    found: set[Client] = set()
    for some in _parts([*clients]):
        asked = select(MINUTES.c.kind, MINUTES.c.key).where(_is_one_of(some)).distinct()
        found |= {(row.kind, row.key) for row in connection.execute(asked)}
    return found


def _is_one_of(clients: Sequence[Client]):  # type: ignore[no-untyped-def] # SQLAlchemy's own
    return tuple_(MINUTES.c.kind, MINUTES.c.key).in_(clients)


def _parts(clients: list[Client]) -> Iterator[list[Client]]:
    for start in range(0, len(clients), AT_ONCE):
        yield clients[start : start + AT_ONCE]


def _sum(one: Steps, other: Mapping[int, int]) -> Steps:
    return {step: one.get(step, 0) + other.get(step, 0) for step in {**one, **other}}


def _written(steps: Steps) -> str:
    """Steps and minutes in turn."""
    return " ".join([f"{step}:{steps[step]}" for step in sorted(steps)])


def _read(text: str) -> Steps:
    pairs = [pair.partition(":") for pair in text.split()]
    return {int(step): int(minutes) for step, _, minutes in pairs}
