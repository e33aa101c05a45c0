"""Node status: every second, a background thread writes a summary of a gate's decisions to the status store.

Clients appear as keyed hashes and labels. While the status store is unavailable, reports are lost; requests never wait
for it.
"""

from __future__ import annotations

import heapq
import logging
import os
import secrets
import threading
import time
import weakref
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import astuple
from random import uniform
from typing import TYPE_CHECKING, Any, Final, Self

from headgate._fork import reinit_after_fork
from headgate._node import node_name
from headgate.clock import SECOND_US
from headgate.errors import InvalidConfiguration, StoreError
from headgate.telemetry.decision_log.log import DecisionLog, is_number
from headgate.telemetry.fleet.abuse_exchange import AbuseExchange
from headgate.telemetry.fleet.rollups import ClientRequests, MinuteRollup, SecondRollups, encode
from headgate.telemetry.pseudonyms import NodePseudonyms, Pseudonymizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from headgate.gate.event_stream import DecisionEvent, DecisionSource
    from headgate.telemetry.fleet.rollups import Client, Second
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["StatusReporter"]

logger = logging.getLogger("headgate")

STATUS_TTL_S: Final = 60.0
MINUTE_TTL_S: Final = 300.0
REPEATED_SECONDS: Final = 10
"""Seconds in each report: the same second is reported again, as reports may be lost."""
HISTORY_SECONDS: Final = 300
HISTORY_EVERY: Final = 10
"""Reports between two documents with the whole history, for readers that start."""
MAX_UNSENT_MINUTES: Final = 5
RECENT_SECONDS: Final = 60
"""The window of the clients with the most denials."""
MAX_RECENT_PER_SECOND: Final = 500
TOP: Final = 20
"""Clients in each list of a report."""
NEAR_US: Final = 60_000_000


class StatusReporter:
    """Reports the status of a gate every second: `StatusReporter(gate, open_status_store("redis://..."))`.

    It lives as long as the gate. `secret` hashes clients (default: the gate's own), `node` names this machine (default:
    its host name), and kinds of identity in `show` are reported in plain text. `log` is the decision log to report on
    (default: the one that observes the gate). `on_report` is called after each report of the background thread.
    """

    sample_share = 0.125
    """The share of requests of which user agent, address and path are sampled."""

    def __init__(
        self,
        gate: DecisionSource,
        store: StatusStore,
        *,
        secret: str | bytes | None = None,
        node: str | None = None,
        region: str = "",
        show: Collection[str] = ("tenant",),
        log: DecisionLog | None = None,
        every: float | None = 1.0,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        """`every` is the interval in seconds; with None, only `report` reports."""
        if every is not None and not (is_number(every) and 0 < every <= 5):
            raise InvalidConfiguration(f"every {every!r}: give the seconds between two reports, above 0 and at most 5")
        attached = next((each for each in gate.observers if isinstance(each, DecisionLog)), None)
        self._log = attached if log is None else log
        self._gate = weakref.ref(gate)
        self._store = store
        self._pseudonyms = NodePseudonyms(Pseudonymizer(secret or gate.identity_secret, show=show))
        self._machine = node_name(node)
        self._region = region
        self._every = every
        self._on_report = on_report
        self._is_closed = False
        self._begin(gate.now_us())
        reinit_after_fork(self)
        _reporters.add(self)
        gate.add_observer(self)

    def _begin(self, now_us: int) -> None:
        self._is_store_down = self._is_paused = False
        self._seconds = SecondRollups(now_us)
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set).atexit = False
        self._reporting = threading.Lock()
        self._run = f"{self._machine[:100]}:{os.getpid()}:{secrets.token_hex(3)}"
        """The unique name of this process."""
        self._history: deque[list[Any]] = deque(maxlen=HISTORY_SECONDS)
        self._recent: dict[Client, ClientRequests] = {}
        self._recent_seconds: deque[tuple[int, list[tuple[Client, int, int]]]] = deque()
        """The seconds whose requests are summed in `_recent`."""
        self._minute = MinuteRollup()
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=MAX_UNSENT_MINUTES)
        self._reports = 0
        self._abuse: AbuseExchange | None = None
        self._canary: tuple[str, str, int] | None = None
        """The canary of the policy, the role of this node in it, and the first second that it decided in this role."""
        self._has_decisions = False
        if self._every is not None:
            arguments = weakref.ref(self), self._stop, self._every
            threading.Thread(target=_report_forever, args=arguments, name="headgate-status", daemon=True).start()

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        self._seconds.observe(events)

    def report(self) -> None:
        """Write the status now. An unavailable status store is logged once, and raises nothing."""
        gate = self._gate()
        if gate is None or self._is_closed:
            return
        gate.flush_events()
        with self._reporting:
            now_us = gate.now_us()
            for second in self._seconds.take(now_us):
                self._add(second)
            self._seconds.forget_near(now_us - NEAR_US)
            self._end_minute(now_us)
            if self._is_paused and not self._has_decisions:
                return
            self._is_paused = False
            self._reports += 1
            try:
                # The rare documents first: if one fails, it is retried with the next report.
                while self._unsent:
                    name, document = self._unsent[0]
                    self._store.put(name, document, keep=MINUTE_TTL_S)
                    self._unsent.popleft()
                if self._reports % HISTORY_EVERY == 1:
                    history = encode({"v": 1, "at_us": now_us, "beats": list(self._history)})
                    self._store.put(f"past/{self._run}", zlib.compress(history, 1), keep=STATUS_TTL_S)
                self._store.put(f"beats/{self._run}", self._status_document(gate, now_us), keep=STATUS_TTL_S)
                if self._is_store_down:
                    logger.warning("node status is written again")
                self._is_store_down = False
            except StoreError as error:
                if not self._is_store_down:
                    logger.warning("node status cannot be written: %s", error)
                self._is_store_down = True

    def close(self) -> None:
        """Stop reporting, and remove the node from the status store, which stays open."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        if (gate := self._gate()) is not None:
            gate.remove_observer(self)
        with suppress(StoreError):  # the documents expire within a minute
            for prefix in ("beats", "past"):
                self._store.put(f"{prefix}/{self._run}", b"", keep=0)

    def reset_after_fork(self) -> None:
        """Start anew: the counts of the parent are reported by the parent."""
        if (gate := self._gate()) is not None and not self._is_closed:
            self._begin(gate.now_us())

    def pause_if_idle(self) -> None:
        """After a fork, report nothing until the first decision: a parent that only starts workers is not a node."""
        if (gate := self._gate()) is not None:
            gate.flush_events()
        self._is_paused = not self._has_decisions and not self._seconds.has_decisions

    def run_once(self) -> bool:
        """Do the work of the background thread once; False if the gate is gone or closed, and it shall end."""
        gate = self._gate()
        if gate is None:
            return False
        if gate.is_closed:
            self.close()
            return False
        del gate
        try:
            self.report()
            self._exchange_abuse()
            if self._on_report is not None:
                self._on_report()
        except Exception:
            logger.exception("a status report failed; the next one follows in a second")
        return True

    def _exchange_abuse(self) -> None:
        """Share what the gate counts for scenarios of abuse with other nodes."""
        watch = getattr(self._gate(), "abuse", None)
        if watch is None or watch.is_shared:
            return
        if self._abuse is None:
            self._abuse = AbuseExchange(watch, self._store, self._run)
        self._abuse.tick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _add(self, second: Second) -> None:
        self._has_decisions |= bool(second.clients)
        if not self._minute.add(second):
            self._end_minute(second.start_us)
            self._minute.add(second)
        latency = [number for bucket, count in enumerate(second.latency) if count for number in (bucket, count)]
        self._history.append([second.number, *second.counts, latency])
        counts = [(client, requests.allowed, requests.denied) for client, requests in second.clients.items()]
        rows = [row for row in counts if row[1] or row[2]]
        if len(rows) > MAX_RECENT_PER_SECOND:
            rows = heapq.nlargest(MAX_RECENT_PER_SECOND, rows, key=lambda row: (row[2], row[1]))
        for client, allowed, denied in rows:
            recent = self._recent.setdefault(client, ClientRequests({}))
            recent.allowed += allowed
            recent.denied += denied
            recent.who = second.clients[client].who
        self._recent_seconds.append((second.number, rows))
        self._forget_recent(second.number - RECENT_SECONDS + 1, second.number)

    def _forget_recent(self, first: int, last: int) -> None:
        """Subtract the seconds that are not between two numbers: also later ones, if the clock was set back."""
        while self._recent_seconds and not first <= self._recent_seconds[0][0] <= last:
            for client, allowed, denied in self._recent_seconds.popleft()[1]:
                recent = self._recent[client]
                recent.allowed -= allowed
                recent.denied -= denied
                if not recent.allowed and not recent.denied:
                    del self._recent[client]

    def _end_minute(self, now_us: int) -> None:
        """Queue the document of the minute if it is over."""
        minute = self._minute
        if minute.number is None or now_us // 60_000_000 == minute.number:
            return
        self._minute = MinuteRollup()
        document = minute.document(self._pseudonyms.of_client, node=self._machine, run=self._run, at_us=now_us)
        self._unsent.append((f"minutes/{self._run}:{minute.number}", document))

    def _status_document(self, gate: DecisionSource, now_us: int) -> bytes:
        self._pseudonyms.use(gate.policy)
        health, log, age = gate.health(), None if self._log is None else self._log.stats, gate.policy_age_s
        now_s = now_us // SECOND_US
        self._forget_recent(now_s - RECENT_SECONDS, now_s + RECENT_SECONDS)
        canary = getattr(gate, "policy_canary", None)  # None of a source of decisions without a policy
        if canary is None:
            self._canary = None
        elif self._canary is None or self._canary[:2] != canary[:2]:
            self._canary = *canary[:2], now_s + 1  # part of this second was decided by another policy
        return encode(
            {
                "v": 1,
                "node": f"{self._machine}:{os.getpid()}",
                "region": self._region,
                "at_us": now_us,
                "state": health.state,
                "reason": health.reason,
                "degraded_for": health.degraded_for,
                "outage": None if health.last_outage is None else [*astuple(health.last_outage)],
                "shards": [[shard.name, shard.ready] for shard in health.shards],
                "policy": gate.policy_version,
                "error": gate.policy_error and gate.policy_error[:500],
                "age": None if age is None else round(age, 1),
                "canary": None if canary is None or self._canary is None else [*self._canary, canary[2] or ""],
                "log": None if log is None else [log.waiting, log.lost, log.error and log.error[:200]],
                "beats": list(self._history)[-REPEATED_SECONDS:],
                "denied": self._top_denied(),
                "near": self._nearest(now_us),
                "hot": self._pseudonyms.hot_counters(gate, TOP),
                "quotas": [[*each] for each in getattr(gate, "quota_holdings", list)()][:TOP],
            }
        )

    def _top_denied(self) -> list[list[Any]]:
        top = heapq.nlargest(TOP, self._recent.values(), key=lambda recent: recent.denied)
        return [[*self._pseudonyms.of_client(each.who)[:3], each.denied, each.allowed] for each in top if each.denied]

    def _nearest(self, now_us: int) -> list[list[Any]]:
        marks = heapq.nsmallest(TOP, list(self._seconds.near.items()), key=lambda item: item[1].left / item[1].capacity)
        return [
            [*self._pseudonyms.of_counter(key)[:3], limit, left, capacity, max(0, now_us - at_us) // 1000]
            for (limit, _), (left, capacity, at_us, key) in marks
        ]


def _report_forever(there: weakref.ref[StatusReporter], stop: threading.Event, every: float) -> None:
    # Nodes report at different times, but soon after a second is over.
    phase = uniform(0.05, 0.45) * every
    while not stop.wait(every - time.time() % every + phase if every >= 1 else every):
        reporter = there()
        if reporter is None or not reporter.run_once():
            return
        del reporter


_reporters: weakref.WeakSet[StatusReporter] = weakref.WeakSet()


def _pause_idle() -> None:
    for reporter in list(_reporters):
        reporter.pause_if_idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_pause_idle)
