"""Traffic anomalies: two consecutive minutes with ten times a client's baseline. See docs/anomalies.md."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from sqlalchemy import insert, select, update

from headgate._fork import block_forks
from headgate.clock import MINUTE_US, SystemClock
from headgate.control.anomalies.baseline import DAY, Baseline, read_histories
from headgate.control.anomalies.tables import ANOMALIES, WATCHED_DAYS
from headgate.control.background import BackgroundThreads
from headgate.control.config.engine import ConfigUnavailable, open_engine, read_transaction, write_transaction
from headgate.control.config.migrations import migrate
from headgate.control.webhooks import WebhookEvent, WebhookQueue
from headgate.errors import StoreError
from headgate.telemetry.fleet.aggregator import ClockAligner
from headgate.telemetry.fleet.rollups import TrafficSketch, read_minute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Engine

    from headgate.clock import Clock
    from headgate.control.anomalies.baseline import Client, TrafficHistory
    from headgate.control.config import ConfigStore
    from headgate.control.webhooks import Webhook
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["ANOMALY_QUEUE", "Anomaly", "AnomalyDetector", "AnomalyLog", "MinuteTotal", "anomaly_from_row", "detect"]

logger = logging.getLogger("headgate")

THRESHOLD_FACTOR: Final = 10
"""A minute is anomalous from this multiple of the baseline."""
MIN_BASELINE: Final = 6
"""The least baseline, in requests per minute, so that ten requests of a rare client are not an anomaly."""
COOLDOWN_MINUTES: Final = 10
"""Minutes below the threshold after which an anomaly is over."""
MIN_DISTINCT: Final = 4
"""Distinct user agents, addresses and paths from which traffic is taken for people."""
MAX_DOMINANT_PERCENT: Final = 80
"""The largest part of one user agent or address in traffic that is taken for people: beyond it, one bot has joined the
usual clients."""
STORED_FIELDS: Final = (
    "id",
    "kind",
    "key",
    "label",
    "usual",
    "verdict",
    "agents",
    "addresses",
    "paths",
    "looked_at",
    "dominant",
)
"""The fields of an anomaly that have a column of the same name."""
MIN_HISTORY_MINUTES: Final = DAY
"""Clients with a shorter history have no anomalies."""
GRACE_US: Final = 15_000_000
"""Time that nodes have to report a minute."""
MAX_CATCH_UP_MINUTES: Final = 4
"""Older minutes are no longer in the status store."""
WRITE_INTERVAL_MINUTES: Final = 10
"""Interval at which baselines are written."""
MAX_SAMPLED: Final = 2**53
"""Larger numbers of requests are errors, and exceed what databases can store."""
CHECK_INTERVAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A client whose traffic is at least ten times its baseline for two minutes."""

    id: str
    at_us: int
    """The end of the second minute."""
    kind: str
    key: str
    """The keyed hash of the client."""
    label: str
    count: int
    """Requests in the second minute."""
    before: int
    """Requests in the first minute."""
    usual: int
    """The baseline: the 95th percentile of requests per minute over seven days."""
    times: float
    """`count` as a multiple of the baseline, which is at least 6 requests per minute here."""
    verdict: Literal["one bot", "people"]
    agents: int
    """Distinct user agents among the sampled requests."""
    addresses: int
    paths: int
    looked_at: int
    """The number of sampled requests."""
    dominant: int = 0
    """The part of the busiest user agent or address in them, in percent."""
    over: bool = False
    """True after ten minutes below the threshold."""

    @property
    def text(self) -> str:
        """A description in two sentences."""
        sample = (
            f"{_count(self.agents, 'user agent')}, {_count(self.addresses, 'address', 'addresses')} and "
            f"{_count(self.paths, 'path')} in {_count(self.looked_at, 'sampled request')}"
            if self.looked_at
            else "no requests were sampled"
        )
        if self.dominant > MAX_DOMINANT_PERCENT and min(self.agents, self.paths) >= MIN_DISTINCT:
            sample += f", {self.dominant} % of them from a single user agent or address"
        usual = max(self.usual, MIN_BASELINE)
        return (
            f"{self.label} sent {self.count:,} requests in a minute and {self.before:,} in the minute before, "
            f"{self.times:,.0f} times its usual {usual:,}. It looks like {self.verdict}: {sample}."
        )

    def as_dict(self) -> dict[str, Any]:
        """All fields and the text, for JSON."""
        return {**asdict(self), "text": self.text}


class AnomalyLog:
    """Reads the anomalies stored in a config store."""

    def __init__(self, config: ConfigStore | str, *, clock: Clock | None = None) -> None:
        self._engine = _engine_of(config)
        self._clock = clock or SystemClock()

    def recent(self, most: int = 20) -> list[Anomaly]:
        """Anomalies, newest first."""
        now_minute = self._clock.now_us() // MINUTE_US
        with read_transaction(self._engine) as connection:
            query = select(ANOMALIES).order_by(ANOMALIES.c.minute.desc(), ANOMALIES.c.id).limit(most)
            return [anomaly_from_row(row, now_minute) for row in connection.execute(query)]


class AnomalyDetector:
    """Detects anomalies in the traffic that nodes report: `AnomalyDetector(status_store, config_store).start()`.

    Several detectors may share a status store and a config store: each minute is processed by one of them. Anomalies
    are stored in the config store, and sent to the webhook if there is one.
    """

    def __init__(
        self,
        board: StatusStore,
        config: ConfigStore | str,
        *,
        webhook: Webhook | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._status_store = board
        self._engine = _engine_of(config)
        self._clock = clock or SystemClock()
        self._webhook = webhook
        self._aligner = ClockAligner(MINUTE_US)
        self._baseline = Baseline()
        self._last_minute = 0
        self._is_failing = False
        self._lock = threading.Lock()
        self._threads = BackgroundThreads("headgate-anomalies")

    def start(self) -> Self:
        """Run in background threads until `stop`."""
        webhook = self._webhook
        deliver = [] if webhook is None else [(webhook.deliver_forever, ANOMALY_QUEUE, self._engine, self._clock)]
        self._threads.start(self, (_check_forever, weakref.ref(self)), *deliver)
        return self

    def stop(self) -> None:
        """Stop the threads and write the baselines."""
        self._threads.stop()
        with self._lock:
            self._write_baselines()

    close = stop

    def check(self) -> list[Anomaly]:
        """Process all complete minutes that are new, and return their anomalies."""
        with self._lock:
            now_us = self._clock.now_us()
            newest = (now_us - GRACE_US) // MINUTE_US - 1
            if newest <= self._last_minute <= newest + 2 * DAY:  # further ahead, the clock was set back
                return []
            try:
                found = self._check_until(newest, now_us)
            except (StoreError, ConfigUnavailable) as error:
                if not self._is_failing:
                    logger.warning("anomaly detection is unavailable: %s", error)
                self._is_failing = True
                return []
            if self._is_failing:
                logger.warning("anomaly detection is available again")
            self._is_failing = False
            for anomaly in found:
                logger.warning("anomaly: %s", anomaly.text)
            return found

    def _check_until(self, newest: int, now_us: int) -> list[Anomaly]:
        totals = self._read_totals(now_us)
        is_behind = self._last_minute <= newest
        first = max(self._last_minute + 1, newest - MAX_CATCH_UP_MINUTES) if is_behind else newest
        found = [each for minute in range(first, newest + 1) for each in self._check_minute(minute, totals, now_us)]
        self._last_minute = newest
        if self._baseline.pending_minutes >= WRITE_INTERVAL_MINUTES:
            self._write_baselines()
        return found

    def _read_totals(self, now_us: int) -> dict[int, dict[Client, MinuteTotal]]:
        """The traffic of all nodes, by minute and client."""
        totals: dict[int, dict[Client, MinuteTotal]] = {}
        shifts: dict[str, int] = {}
        for name, posted in sorted(self._status_store.read("minutes/").items(), key=lambda item: item[1].age):
            run = name.rpartition(":")[0]
            try:
                header, clients = read_minute(posted.document)
                if abs(header["at_us"]) >= 2**63:
                    raise ValueError("not a time")
            except (ValueError, OverflowError):
                logger.warning("ignoring an invalid document in the status store: %s", ascii(name)[:100])
                continue
            if run not in shifts:  # from the newest report: earlier ones may have been delayed
                posted_us = now_us - round(posted.age * 1_000_000)
                shifts[run] = self._aligner.shift(run, header["at_us"], posted_us).by
            minute = totals.setdefault(header["minute"] + shifts[run], {})
            for busy in clients:
                if not (busy.kind.isprintable() and busy.key.isprintable()):
                    continue  # not written by a node, and databases could not store it
                total = minute.setdefault((busy.kind, busy.key), MinuteTotal(_printable(busy.label)))
                total.requests += busy.requests
                if busy.traits is not None:
                    total.traits.add(busy.traits)
        self._aligner.keep(shifts)
        return totals

    def _check_minute(
        self, minute: int, totals: Mapping[int, Mapping[Client, MinuteTotal]], now_us: int
    ) -> list[Anomaly]:
        now, before = totals.get(minute), totals.get(minute - 1, {})
        if now is None:  # no reports: the traffic of this minute is unknown
            return []
        candidates = [
            client
            for client, total in now.items()
            if client in before and min(total.requests, before[client].requests) >= _threshold(0)
        ]
        with block_forks(), write_transaction(self._engine) as connection:
            if not _claim(connection, minute):
                return []
            histories = read_histories(connection, candidates, minute // DAY)
            ongoing = _extend_ongoing(connection, minute, now)
            found = [
                anomaly
                for client in candidates
                if client in histories and client not in ongoing
                if (anomaly := detect(client, histories[client], now[client], before[client], minute)) is not None
            ]
            for anomaly in found:
                _store(connection, anomaly, minute, now_us)
        self._baseline.add(minute, {client: total.requests for client, total in now.items()})
        return found

    def _write_baselines(self) -> None:
        if not self._baseline.pending_minutes:
            return
        try:
            with block_forks(), write_transaction(self._engine) as connection:
                self._baseline.write(connection)
            self._baseline.clear()
        except ConfigUnavailable as error:
            logger.warning("traffic baselines could not be written: %s", error)


class MinuteTotal:
    """The traffic of a client in one minute, over all nodes."""

    __slots__ = ("label", "requests", "traits")

    def __init__(self, label: str, requests: int = 0) -> None:
        self.label = label
        self.requests = requests
        self.traits = TrafficSketch()


def detect(
    client: Client, history: TrafficHistory, now: MinuteTotal, before: MinuteTotal, minute: int
) -> Anomaly | None:
    """The anomaly of a client in a minute and the one before, or None."""
    usual = history.usual
    if history.minutes < MIN_HISTORY_MINUTES or min(now.requests, before.requests) < _threshold(usual):
        return None
    traits = TrafficSketch()
    traits.add(before.traits)
    traits.add(now.traits)
    agents, addresses, paths = traits.estimates
    looked_at = max(0, min(traits.looked_at, MAX_SAMPLED))
    # A client that is identified by its address has only one.
    busiest = traits.busiest[0] if client[0] == "ip" else max(traits.busiest)
    dominant = min(100, 100 * busiest // looked_at) if looked_at else 0
    return Anomaly(
        id=secrets.token_hex(12),
        at_us=(minute + 1) * MINUTE_US,
        kind=client[0],
        key=client[1],
        label=now.label,
        count=now.requests,
        before=before.requests,
        usual=usual,
        times=times_usual(now.requests, usual),
        verdict=classify(client[0], agents, addresses, paths, dominant),
        agents=agents,
        addresses=addresses,
        paths=paths,
        looked_at=looked_at,
        dominant=dominant,
    )


def anomaly_from_row(row: Any, now_minute: int) -> Anomaly:
    return Anomaly(
        **{name: getattr(row, name) for name in STORED_FIELDS},
        at_us=(row.minute + 1) * MINUTE_US,
        count=row.requests,
        before=row.requests_before,
        times=times_usual(row.requests, row.usual),
        over=now_minute - row.last_over > COOLDOWN_MINUTES,
    )


def _event(row: Any) -> WebhookEvent:
    anomaly = anomaly_from_row(row, row.minute)
    return WebhookEvent("step-change", anomaly.id, anomaly.at_us, {"step": anomaly.as_dict()})


ANOMALY_QUEUE: Final = WebhookQueue(ANOMALIES, "minute", MINUTE_US, _event)
"""The anomalies that wait for a webhook."""


def times_usual(requests: int, usual: int) -> float:
    """Requests as a multiple of the baseline."""
    return round(requests / max(usual, MIN_BASELINE), 1)


def classify(kind: str, agents: int, addresses: int, paths: int, dominant: int) -> Literal["one bot", "people"]:
    """Mixed traffic is from people. A client identified by its address has only one of those."""
    distinct = [agents, paths] if kind == "ip" else [agents, addresses, paths]
    return "people" if min(distinct) >= MIN_DISTINCT and dominant <= MAX_DOMINANT_PERCENT else "one bot"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _threshold(usual: int) -> int:
    return THRESHOLD_FACTOR * max(usual, MIN_BASELINE)


def _extend_ongoing(connection: Connection, minute: int, now: Mapping[Client, MinuteTotal]) -> set[Client]:
    """Clients with an ongoing anomaly, which is extended while they stay above the threshold."""
    ongoing: set[Client] = set()
    query = select(ANOMALIES).where(ANOMALIES.c.last_over >= minute - COOLDOWN_MINUTES)
    for row in connection.execute(query).all():
        client = row.kind, row.key
        ongoing.add(client)
        if client in now and now[client].requests >= _threshold(row.usual):
            connection.execute(update(ANOMALIES).where(ANOMALIES.c.id == row.id).values(last_over=minute))
    return ongoing


def _claim(connection: Connection, minute: int) -> bool:
    """Mark a minute as processed. Returns False if another detector has processed it."""
    last = connection.execute(select(WATCHED_DAYS.c.last_minute).order_by(WATCHED_DAYS.c.day.desc()).limit(1)).scalar()
    if last is not None and minute <= last <= minute + 2 * DAY:
        return False
    today = minute // DAY
    claimed = connection.execute(update(WATCHED_DAYS).where(WATCHED_DAYS.c.day == today).values(last_minute=minute))
    if not claimed.rowcount:
        connection.execute(insert(WATCHED_DAYS).values(day=today, minutes=0, last_minute=minute))
    return True


def _store(connection: Connection, anomaly: Anomaly, minute: int, now_us: int) -> None:
    row = {name: getattr(anomaly, name) for name in STORED_FIELDS}
    row |= {"minute": minute, "requests": anomaly.count, "requests_before": anomaly.before, "last_over": minute}
    connection.execute(insert(ANOMALIES).values({**row, "attempts": 0, "next_us": now_us}))


def _printable(label: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in label)


def _engine_of(config: ConfigStore | str) -> Engine:
    if not isinstance(config, str):
        return config.engine
    engine = open_engine(config)
    with write_transaction(engine) as connection:
        migrate(connection)
    return engine


def _check_forever(reference: weakref.ref[AnomalyDetector], stop: threading.Event) -> None:
    """Run until stopped, or until the detector is garbage-collected."""
    while not stop.wait(CHECK_INTERVAL_S):
        detector = reference()
        if detector is None:
            return
        try:
            detector.check()
        except Exception:  # keep running: the next minute may work
            logger.exception("anomaly detection failed")
        del detector
