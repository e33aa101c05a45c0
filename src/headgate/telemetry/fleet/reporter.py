"""The pulse of a gate: each second it puts on a board what it is doing, for those who operate it.

Requests only count. A thread of its own makes documents of what they counted, in which clients stand as keyed hashes
and labels; if the board is away, they are lost, and nobody waits for it.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
import zlib
from collections import deque
from random import uniform
from typing import TYPE_CHECKING, Any, Final, Self

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidConfiguration, StoreError
from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.fleet.rollups import SAMPLE_SHARE, MinuteRollup, SecondRollups
from headgate.telemetry.pseudonyms import NodePseudonyms, Pseudonymizer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.telemetry.fleet.rollups import Client, Second
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["StatusReporter"]

logger = logging.getLogger("headgate")

KEEP: Final = 60.0
"""Seconds until a node that says nothing any more is forgotten."""
REPEATED: Final = 10
"""Seconds that each document tells of again: as many of them may be lost."""
REMEMBERED: Final = 300
"""Seconds that whoever begins to look is told of."""
PAST_EVERY: Final = 10
"""Beats between two documents of all that is remembered."""
MINUTES_KEPT: Final = 300.0
MOST_UNSENT: Final = 5
"""Minutes that wait for a board that is away."""
RECENT: Final = 60
"""Seconds over which denials are summed."""
MOST_IN_SECOND: Final = 500
"""Clients of one second that are summed."""
FEW: Final = 20
NEAR_US: Final = 60_000_000


class StatusReporter:
    """Tells a board each second what a gate is doing: `StatusReporter(gate, open_board("redis://..."))`.

    It lives as long as the gate. `secret` is what clients are hashed with: the gate's own, if not given. `node` names
    this machine (its host name, if not given); `show` are the kinds of identity that may be shown as they are. A
    decision log that the gate has already is told of, too; or give one as `log`.
    """

    sample_share = SAMPLE_SHARE

    def __init__(
        self,
        gate: GateBase,
        board: StatusStore,
        *,
        secret: str | bytes | None = None,
        node: str | None = None,
        region: str = "",
        show: Collection[str] = ("tenant",),
        log: DecisionLog | None = None,
        every: float | None = 1.0,
    ) -> None:
        """`every` is how many seconds are between two beats; None for a pulse that beats only when it is told to."""
        if every is not None and (isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every <= 5):
            raise InvalidConfiguration(f"every {every!r}: give the seconds between two beats, above 0 and at most 5")
        attached = next((each for each in gate.observers if isinstance(each, DecisionLog)), None)
        self._log = attached if log is None else log
        self._gate = weakref.ref(gate)
        self._board = board
        self._naming = NodePseudonyms(Pseudonymizer(secret or gate.identity_secret, show=show))
        self._machine = socket.gethostname() if node is None else node
        self._region = region
        self._every = every
        self._stops: list[threading.Event] = []
        self._closed = self._is_away = self._is_resting = False
        self._seconds = SecondRollups(self._gate)
        self._begin()
        reinit_after_fork(self)
        _pulses.add(self)
        gate.add_observer(self)
        weakref.finalize(self, _stop, self._stops).atexit = False

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        self._seconds.observe(events)

    def beat(self) -> None:
        """Put what there is to tell on the board, now. A board that is away is told to the log, once."""
        gate = self._gate()
        if gate is None or self._closed:
            return
        gate.flush_events()
        with self._beating:
            now_us = gate.now_us()
            for second in self._seconds.take(now_us):
                self._remember(second)
            self._seconds.forget_near(now_us - NEAR_US)
            self._end_minute(now_us)
            if self._is_resting and not self._has_decided:
                return
            self._is_resting = False
            self._beats += 1
            try:
                # What is seldom first: should it fail, it is tried again with the next beat.
                while self._unsent:
                    name, document = self._unsent[0]
                    self._board.put(name, document, keep=MINUTES_KEPT)
                    self._unsent.popleft()
                if self._beats % PAST_EVERY == 1:
                    self._board.put(f"past/{self._run}", self._past(now_us), keep=KEEP)
                self._board.put(f"beats/{self._run}", self._document(gate, now_us), keep=KEEP)
            except StoreError as error:
                if not self._is_away:
                    logger.warning("the board cannot be written, so that nobody sees what this node does: %s", error)
                self._is_away = True
            else:
                if self._is_away:
                    logger.warning("the board is written again")
                self._is_away = False

    def close(self) -> None:
        """Tell nothing any more; the board forgets the node at once. The board itself stays open."""
        if self._closed:
            return
        self._closed = True
        gate = self._gate()
        if gate is not None:
            gate.remove_observer(self)
        _stop(self._stops)
        self._leave()

    def reset_after_fork(self) -> None:
        """What the parent has counted, it tells itself."""
        self._stops.clear()
        self._seconds.begin()
        self._is_away = self._is_resting = False
        if not self._closed:
            self._begin()

    def rest(self) -> None:
        """A process that only starts others is no node: tell nothing until there is a decision."""
        gate = self._gate()
        if gate is not None:
            gate.flush_events()
        if not self._has_decided and not self._seconds.has_decided:
            self._is_resting = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ------------------------------------------------------------------ within

    def _begin(self) -> None:
        self._beating = threading.Lock()
        self._run = f"{self._machine[:100]}:{os.getpid()}:{secrets.token_hex(3)}"
        """Names this process, as no other is named."""
        self._history: deque[list[Any]] = deque(maxlen=REMEMBERED)
        self._recent: dict[Client, list[int]] = {}
        """Allowed and denied requests of clients in the last minute."""
        self._by_second: deque[tuple[int, list[tuple[Client, int, int]]]] = deque()
        """What these are the sum of."""
        self._whos: dict[Client, Any] = {}
        self._minutes = MinuteRollup()
        self._unsent: deque[tuple[str, bytes]] = deque(maxlen=MOST_UNSENT)
        self._beats = 0
        self._has_decided = False
        stop = threading.Event()
        self._stops.append(stop)
        if self._every is not None:
            arguments = weakref.ref(self), stop, self._every
            threading.Thread(target=_beat_forever, args=arguments, name="headgate-pulse", daemon=True).start()

    def _leave(self) -> None:
        try:
            for room in ("beats", "past"):
                self._board.put(f"{room}/{self._run}", b"", keep=0)
        except StoreError:
            pass  # it is forgotten in a minute, in any case

    def _remember(self, second: Second) -> None:
        self._has_decided |= bool(second.clients)
        if not self._minutes.add(second):
            self._end_minute(second.start_us)
            self._minutes.add(second)
        latency = [number for bucket, count in enumerate(second.latency) if count for number in (bucket, count)]
        self._history.append([second.number, *second.counts, latency])
        rows = [
            (client, visits.allowed, visits.denied)
            for client, visits in second.clients.items()
            if visits.allowed or visits.denied
        ]
        if len(rows) > MOST_IN_SECOND:
            rows = heapq.nlargest(MOST_IN_SECOND, rows, key=lambda row: (row[2], row[1]))
        for client, allowed, denied in rows:
            sums = self._recent.setdefault(client, [0, 0])
            sums[0] += allowed
            sums[1] += denied
            self._whos[client] = second.clients[client].who
        self._by_second.append((second.number, rows))
        while self._by_second and not 0 <= second.number - self._by_second[0][0] < RECENT:
            self._forget(self._by_second.popleft()[1])

    def _forget(self, rows: list[tuple[Client, int, int]]) -> None:
        for client, allowed, denied in rows:
            sums = self._recent[client]
            sums[0] -= allowed
            sums[1] -= denied
            if sums == [0, 0]:
                del self._recent[client], self._whos[client]

    def _end_minute(self, now_us: int) -> None:
        """Tell of the minute, if it is over."""
        minutes = self._minutes
        if minutes.number is None or now_us // 60_000_000 == minutes.number:
            return
        self._minutes = MinuteRollup()
        document = minutes.document(self._named, node=self._machine, run=self._run, at_us=now_us)
        self._unsent.append((f"minutes/{self._run}:{minutes.number}", document))

    def _named(self, who: Any) -> Any:
        return self._naming.of(who)

    def _past(self, now_us: int) -> bytes:
        return zlib.compress(_written({"v": 1, "at_us": now_us, "beats": list(self._history)}), 1)

    def _document(self, gate: GateBase, now_us: int) -> bytes:
        snapshot = gate.active_policy.snapshot
        self._naming.use(snapshot.policy)
        health, log = gate.health(), None if self._log is None else self._log.stats
        age = gate.policy_age_s
        while self._by_second and now_us // 1_000_000 - self._by_second[0][0] > RECENT:
            self._forget(self._by_second.popleft()[1])
        said = {
            "v": 1,
            "node": f"{self._machine}:{os.getpid()}",
            "region": self._region,
            "at_us": now_us,
            "state": health.state,
            "reason": health.reason,
            "degraded_for": health.degraded_for,
            "shards": [[shard.name, shard.ready] for shard in health.shards],
            "policy": gate.policy_version,
            "error": gate.policy_error and gate.policy_error[:500],
            "age": None if age is None else round(age, 1),
            "log": None if log is None else [log.waiting, log.lost, log.error and log.error[:200]],
            "beats": list(self._history)[-REPEATED:],
            "denied": self._denied(),
            "near": self._near(now_us),
            "hot": self._naming.hot(gate, FEW),
        }
        return _written(said)

    def _denied(self) -> list[list[Any]]:
        worst = heapq.nlargest(FEW, self._recent.items(), key=lambda item: item[1][1])
        rows = [(self._naming.of(self._whos[client]), sums) for client, sums in worst if sums[1]]
        return [[*name[:3], denied, allowed] for name, (allowed, denied) in rows]

    def _near(self, now_us: int) -> list[list[Any]]:
        marks = heapq.nsmallest(FEW, list(self._seconds.near.items()), key=lambda item: item[1][0] / item[1][1])
        return [
            [*self._naming.counted(key)[:3], limit, left, capacity, max(0, now_us - at_us) // 1000]
            for (limit, _), (left, capacity, at_us, key) in marks
        ]


def _written(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _stop(stops: list[threading.Event]) -> None:
    for stop in stops:
        stop.set()


def _beat_forever(there: weakref.ref[StatusReporter], stop: threading.Event, every: float) -> None:
    """Until it is closed, or forgotten with its gate."""
    # Not all nodes at the same moment; but soon after a second is over, as it is known by then.
    phase = uniform(0.05, 0.45) * every
    while not stop.wait(every - time.time() % every + phase if every >= 1 else every):
        pulse = there()
        if pulse is None:
            return
        gate = pulse._gate()  # noqa: SLF001
        if gate is None:
            return
        if gate.is_closed:
            pulse.close()
            return
        del gate
        try:
            pulse.beat()
        except Exception:  # a bug of ours must not end it: the next second may be told of
            logger.exception("a beat of the pulse failed; the requests go on")
        del pulse


_pulses: weakref.WeakSet[StatusReporter] = weakref.WeakSet()


def _rest_all() -> None:
    for pulse in list(_pulses):
        pulse.rest()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_rest_all)
