"""A fleet of nodes that report traffic per minute, with an anomaly detector and one fake clock."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from headgate.control.anomalies.baseline import DAY, Baseline
from headgate.control.anomalies.detector import Anomaly, AnomalyDetector, AnomalyLog
from headgate.control.anomalies.tables import ANOMALIES, WATCHED_DAYS
from headgate.control.config import ConfigStore
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.telemetry.fleet.status_store import MemoryStatusStore
from headgate.testing import FakeClock

with warnings.catch_warnings(action="ignore"):  # it works as well with httpx as with the newer httpx2
    pass
if TYPE_CHECKING:
    from collections.abc import Mapping


MINUTE_US = 60_000_000


START = 20_000 * DAY
"""The first minute of a day."""


CLIENT = ("tenant", "hmac:acme")


class AnomalyFleet:
    """Nodes that tell of minutes, a watcher that looks at them, and a clock for all."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock(START * MINUTE_US)
        self.board = MemoryStatusStore(monotonic=lambda: self.clock.now_us() / 1_000_000)
        self.store = ConfigStore(url, clock=self.clock)
        self.watcher = AnomalyDetector(self.board, self.store, clock=self.clock)
        self.log = AnomalyLog(self.store, clock=self.clock)

    @property
    def minute(self) -> int:
        return self.clock.now_us() // MINUTE_US

    def learn(self, counts: Mapping[int, int], *, minutes: int, client: tuple[str, str] = CLIENT) -> None:
        """Let so many minutes have passed, of which some had requests: how many of each number."""
        numbers = [number for number, times in counts.items() for _ in range(times)]
        learnt = Baseline()
        with write_transaction(self.store.engine) as connection:
            for index in range(minutes):
                minute = self.minute + index
                today = minute // DAY
                if (not index or minute % DAY == 0) and not connection.scalar(
                    select(WATCHED_DAYS).where(WATCHED_DAYS.c.day == today)
                ):
                    row = {"day": today, "minutes": 0, "last_minute": self.minute - 1}
                    connection.execute(WATCHED_DAYS.insert().values(row))
                learnt.add(minute, {client: numbers[index]} if index < len(numbers) else {})
            learnt.write(connection)
        self.clock.advance(60 * minutes)

    def tell(self, counts: Mapping[tuple[str, str], int], *, node: str = "web:1:x", look: Any = (8, 1, 1, 1)) -> None:
        """A node tells of the minute that runs now, which is over then."""
        looked_at, *kinds = look
        marks = [f"{(1 << number) - 1:x}" for number in kinds]
        rows = [
            [*client, client[1].removeprefix("hmac:"), count, looked_at, *marks] for client, count in counts.items()
        ]
        at_us = (self.minute + 1) * MINUTE_US
        said = {"v": 1, "minute": self.minute, "at_us": at_us, "clients": rows}
        later = MemoryStatusStore(monotonic=lambda: at_us / 1_000_000)
        later._documents = self.board._documents
        later.put(f"minutes/{node}:{self.minute}", json.dumps(said).encode(), keep=300)

    def next_minute(self, count: int | None = None, *, look: Any = (8, 1, 1, 1)) -> list[Anomaly]:
        """A minute with so many requests of the client passes; what is found when it is over."""
        self.tell({} if count is None else {CLIENT: count}, look=look)
        self.clock.set_us((self.minute + 1) * MINUTE_US + 20_000_000)
        return self.watcher.check()

    def rows(self) -> list[Any]:
        with read_transaction(self.store.engine) as connection:
            return list(connection.execute(select(ANOMALIES).order_by(ANOMALIES.c.minute)))
