"""Step changes: a client whose minute has ten times as many requests as 95 of 100 of its own minutes in seven days had
at most, two minutes running. See docs/step-changes.md."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Final, Self

from sqlalchemy import insert, select, update

from headgate._fork import at_work
from headgate.clock import SystemClock
from headgate.control.anomalies.baseline import DAY, Baseline, histories
from headgate.control.anomalies.model import BELOW, FLOOR, TIMES, Anomaly, step_of_row, verdict_on
from headgate.control.anomalies.tables import STEPS, WATCH
from headgate.control.config.engine import ConfigUnavailable, open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.errors import StoreError
from headgate.telemetry.fleet.aggregator import ClockAligner
from headgate.telemetry.fleet.rollups import MINUTE_US, TrafficSketch, read_minute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Engine

    from headgate.clock import Clock
    from headgate.control.anomalies.baseline import Client, TrafficHistory
    from headgate.control.anomalies.webhook import Webhook
    from headgate.control.config import ConfigStore
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["FLOOR", "TIMES", "Anomaly", "AnomalyDetector", "AnomalyLog", "Sum", "judged"]

logger = logging.getLogger("headgate")

LEAST_HISTORY: Final = DAY
"""Minutes that must be known of a client before anything is unusual."""
GRACE_US: Final = 15_000_000
"""How long nodes have to tell of a minute."""
OLDEST: Final = 4
"""Minutes that are still on the board."""
WRITE_EVERY: Final = 10
"""Minutes of history that are written at once."""
MOST: Final = 2**53
"""Of requests; more are a mistake, and no database could keep them."""
LOOK_EVERY: Final = 5.0
"""Seconds between looks whether a minute is over."""


class AnomalyLog:
    """The step changes that a config store keeps."""

    def __init__(self, config: ConfigStore | str, *, clock: Clock | None = None) -> None:
        self._engine = _engine_of(config)
        self._clock = clock or SystemClock()

    def recent(self, most: int = 20) -> list[Anomaly]:
        """The newest first."""
        now = self._clock.now_us() // MINUTE_US
        with read_transaction(self._engine) as connection:
            asked = select(STEPS).order_by(STEPS.c.minute.desc(), STEPS.c.id).limit(most)
            return [step_of_row(row, now) for row in connection.execute(asked)]


class AnomalyDetector:
    """Looks for step changes in what nodes put on a board: `AnomalyDetector(board, config_store).start()`.

    Several may watch the same board and store: each minute is looked at by one of them, and each step change is told
    once. What it finds is in the config store, and goes to a webhook, if one is given.
    """

    def __init__(
        self,
        board: StatusStore,
        config: ConfigStore | str,
        *,
        webhook: Webhook | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._board = board
        self._engine = _engine_of(config)
        self._clock = clock or SystemClock()
        self._webhook = webhook
        self._placing = ClockAligner(MINUTE_US)
        self._usual = Baseline()
        self._looked_at = 0
        self._trouble: str | None = None
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> Self:
        """Watch, from threads of its own, until `stop`."""
        if self._stop is None:
            self._stop = threading.Event()
            weakref.finalize(self, self._stop.set).atexit = False
            jobs = [(_watch_forever, (weakref.ref(self), self._stop))]
            if self._webhook is not None:
                jobs.append((self._webhook.deliver_forever, (self._engine, self._clock, self._stop)))  # type: ignore[arg-type] # other arguments
            for job, arguments in jobs:
                thread = threading.Thread(target=job, args=arguments, name="headgate-steps", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def stop(self) -> None:
        """Watch no more; what was learnt is written down."""
        if self._stop is not None:
            self._stop.set()
            for thread in self._threads:
                thread.join(2.0)
            self._stop, self._threads = None, []
        with self._lock:
            self._write()

    close = stop

    def look(self) -> list[Anomaly]:
        """Look at the minutes that are over and were not looked at, now; the step changes in them."""
        with self._lock:
            now_us = self._clock.now_us()
            newest = (now_us - GRACE_US) // MINUTE_US - 1
            if newest <= self._looked_at <= newest + 2 * DAY:  # a clock may be set back
                return []
            try:
                sums = self._sums(now_us)
                found: list[Anomaly] = []
                first = max(self._looked_at + 1, newest - OLDEST) if self._looked_at <= newest else newest
                for minute in range(first, newest + 1):
                    found += self._look_at(minute, sums, now_us)
                self._looked_at = newest
                if self._usual.waiting >= WRITE_EVERY:
                    self._write()
            except (StoreError, ConfigUnavailable) as error:
                if self._trouble is None:
                    logger.warning("step changes cannot be looked for: %s", error)
                self._trouble = str(error)
                return []
            if self._trouble is not None:
                logger.warning("step changes are looked for again")
                self._trouble = None
            for step in found:
                logger.warning("step change: %s", step.text)
            return found

    # ------------------------------------------------------------------ within

    def _sums(self, now_us: int) -> dict[int, dict[Client, Sum]]:
        """What all nodes have told, by minute."""
        sums: dict[int, dict[Client, Sum]] = {}
        shifts: dict[str, int] = {}
        for name, posted in sorted(self._board.read("minutes/").items(), key=lambda item: item[1].age):
            run = name.rpartition(":")[0]
            try:
                said, clients = read_minute(posted.document)
                if abs(said["at_us"]) >= 2**63:
                    raise ValueError("not a time")
            except (ValueError, OverflowError):
                logger.warning("what is on the board as %s is no word of a node", ascii(name)[:100])
                continue
            if run not in shifts:  # by its last word: those before may have waited for the board
                put_us = now_us - round(posted.age * 1_000_000)
                shifts[run] = self._placing.shift(run, said["at_us"], put_us).by
            minute = sums.setdefault(said["minute"] + shifts[run], {})
            for busy in clients:
                if not (busy.kind.isprintable() and busy.key.isprintable()):
                    continue  # no node names a client so, and no database could keep it
                total = minute.get((busy.kind, busy.key))
                if total is None:
                    total = minute[busy.kind, busy.key] = Sum(_printable(busy.label))
                total.requests += busy.requests
                if busy.traits is not None:
                    total.traits.add(busy.traits)
        self._placing.keep(shifts)
        return sums

    def _look_at(self, minute: int, sums: Mapping[int, Mapping[Client, Sum]], now_us: int) -> list[Anomaly]:
        now, before = sums.get(minute), sums.get(minute - 1, {})
        if now is None:  # nobody has told anything: nothing is known of this minute
            return []
        least = TIMES * FLOOR
        loud = [
            client
            for client, total in now.items()
            if total.requests >= least and client in before and before[client].requests >= least
        ]
        with at_work(), write_transaction(self._engine) as connection:
            if not _claim(connection, minute):
                return []
            known = histories(connection, loud, minute // DAY)
            held = self._go_on(connection, minute, now)
            found = [
                step
                for client in loud
                if client in known and client not in held
                if (step := judged(client, known[client], now[client], before[client], minute)) is not None
            ]
            for step in found:
                _write_step(connection, step, minute, now_us)
        self._usual.add(minute, {client: total.requests for client, total in now.items()})
        return found

    @staticmethod
    def _go_on(connection: Connection, minute: int, now: Mapping[Client, Sum]) -> set[Client]:
        """Those whose step change is not over: they do not alarm again."""
        held: set[Client] = set()
        asked = select(STEPS).where(STEPS.c.last_over >= minute - BELOW)
        for row in connection.execute(asked).all():
            client = row.kind, row.key
            held.add(client)
            if client in now and now[client].requests >= TIMES * max(row.usual, FLOOR):
                connection.execute(update(STEPS).where(STEPS.c.id == row.id).values(last_over=minute))
        return held

    def _write(self) -> None:
        if not self._usual.waiting:
            return
        try:
            with at_work(), write_transaction(self._engine) as connection:
                self._usual.write(connection)
            self._usual.written()
        except ConfigUnavailable as error:
            logger.warning("what is usual for clients cannot be written down: %s", error)


class Sum:
    """A client in one minute, over all nodes."""

    __slots__ = ("label", "requests", "traits")

    def __init__(self, label: str, requests: int = 0) -> None:
        self.label = label
        self.requests = requests
        self.traits = TrafficSketch()


def _printable(label: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in label)


def _claim(connection: Connection, minute: int) -> bool:
    """Whether nobody else has looked at the minute."""
    last = connection.execute(select(WATCH.c.last_minute).order_by(WATCH.c.day.desc()).limit(1)).scalar()
    if last is not None and minute <= last <= minute + 2 * DAY:
        return False
    today = minute // DAY
    row = WATCH.c.day == today
    if not connection.execute(update(WATCH).where(row).values(last_minute=minute)).rowcount:
        connection.execute(insert(WATCH).values(day=today, minutes=0, last_minute=minute))
    return True


def judged(client: Client, history: TrafficHistory, now: Sum, before: Sum, minute: int) -> Anomaly | None:
    """The step change of a client that sent so much in a minute, and in the one before; None if it is none."""
    usual = history.usual
    least = TIMES * max(usual, FLOOR)
    if history.minutes < LEAST_HISTORY or min(now.requests, before.requests) < least:
        return None
    traits = TrafficSketch()
    traits.add(before.traits)
    traits.add(now.traits)
    agents, addresses, paths = traits.estimates
    return Anomaly(
        id=secrets.token_hex(12),
        at_us=(minute + 1) * MINUTE_US,
        kind=client[0],
        key=client[1],
        label=now.label,
        count=now.requests,
        before=before.requests,
        usual=usual,
        times=round(now.requests / max(usual, FLOOR), 1),
        verdict=verdict_on(client[0], agents, addresses, paths),
        agents=agents,
        addresses=addresses,
        paths=paths,
        looked_at=max(0, min(traits.looked_at, MOST)),
    )


def _write_step(connection: Connection, step: Anomaly, minute: int, now_us: int) -> None:
    row = {
        "id": step.id,
        "minute": minute,
        "kind": step.kind,
        "key": step.key,
        "label": step.label,
        "requests": step.count,
        "requests_before": step.before,
        "usual": step.usual,
        "verdict": step.verdict,
        "agents": step.agents,
        "addresses": step.addresses,
        "paths": step.paths,
        "looked_at": step.looked_at,
        "last_over": minute,
        "attempts": 0,
        "next_us": now_us,
    }
    connection.execute(insert(STEPS).values(row))


def _engine_of(config: ConfigStore | str) -> Engine:
    if not isinstance(config, str):
        return config.engine
    engine = open_engine(config)
    with write_transaction(engine) as connection:
        migrate(connection)
    return engine


def _watch_forever(there: weakref.ref[AnomalyDetector], stop: threading.Event) -> None:
    """Until it is stopped, or forgotten."""
    while not stop.wait(LOOK_EVERY):
        watcher = there()
        if watcher is None:
            return
        try:
            watcher.look()
        except Exception:  # a bug of ours must not end it: the next minute may be looked at
            logger.exception("step changes could not be looked for")
        del watcher
