"""AbuseExchange: nodes share what they count of groups, so that an attack that is spread over them is found, too.

Every second, a node writes the groups with the most progress of each scenario, and reads those of the others; large
fleets do so less often, and share fewer groups. Groups and values are keyed hashes. A node evaluates the sum for the
groups that it knows itself, so that it can name whom it has found.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import weakref
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate._node import node_name
from headgate.abuse.signals import SharedRecord
from headgate.errors import StoreError

if TYPE_CHECKING:
    from headgate.abuse.detector import SharedRow
    from headgate.gate.abuse_watch import AbuseWatch
    from headgate.gate.base import GateBase
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["AbuseExchange", "ExchangeThread"]

logger = logging.getLogger("headgate")

PREFIX: Final = "abuse/"
INTERVAL_S: Final = 1.0
KEPT_INTERVALS: Final = 5
NODES_PER_SECOND: Final = 10
"""A node reads at most so many documents per second: more nodes exchange theirs less often."""
MAX_BYTES: Final = 4_000_000
"""The largest document that is read, decompressed."""
MAX_HEX: Final = 1 << 16


class AbuseExchange:
    """Shares the counts of one detector under the name `run`, unique among the nodes."""

    def __init__(self, watch: AbuseWatch, store: StatusStore, run: str) -> None:
        self._watch = watch
        self._store = store
        self._name = PREFIX + run
        self._is_failing = False
        self._seconds = 0
        self.nodes = 1
        """The nodes with documents, and this one."""

    def tick(self) -> None:
        """Exchange every second, or less often in a large fleet; called every second."""
        self._seconds += 1
        if self._seconds >= self._interval:
            self._seconds = 0
            self.exchange()

    @property
    def _interval(self) -> int:
        return -(-self.nodes // NODES_PER_SECOND)

    def exchange(self) -> None:
        """Write and read once. While the store is unavailable, each node detects alone."""
        own = self._watch.shared_rows(max(2, self.nodes))
        try:
            if any(own.values()):
                marks = self._watch.scenario_marks()
                rows = {name: [marks[name], [*map(_encoded, rows)]] for name, rows in own.items() if rows}
                document = zlib.compress(json.dumps({"v": 1, "rows": rows}, separators=(",", ":")).encode(), 1)
                self._store.put(self._name, document, keep=KEPT_INTERVALS * self._interval * INTERVAL_S)
            others = {name: found for name, found in self._store.read(PREFIX).items() if name != self._name}
            self.nodes = 1 + len(others)
        except StoreError as error:
            if not self._is_failing:
                logger.warning("abuse detection sees this node only: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
        self._watch.receive(self._join([found.document for found in others.values()]))

    def _join(self, documents: list[bytes]) -> dict[str, list[SharedRow]]:
        """The rows of all documents by scenario, of those that are the same on both nodes."""
        marks, joined = self._watch.scenario_marks(), dict[str, list[Any]]()
        for document in documents:
            try:
                text = zlib.decompressobj().decompress(document, MAX_BYTES)
                for name, (mark, rows) in json.loads(text)["rows"].items():
                    if marks.get(name) == mark:
                        joined.setdefault(name, []).extend(map(_decoded, rows))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, zlib.error):
                logger.warning("ignoring an invalid document in the status store: abuse")
        return joined


class ExchangeThread:
    """Shares the counts of a gate that has no status reporter, while the gate lives."""

    def __init__(self, gate: GateBase, store: StatusStore) -> None:
        self._gate = weakref.ref(gate)
        self._store = store
        self._stop = threading.Event()
        self._begin()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Share the counts of the child under a name of its own."""
        if not self._stop.is_set():
            self._begin()

    def _begin(self) -> None:
        gate = self._gate()
        if gate is None or gate.abuse is None:
            return
        gate.abuse.is_shared = True
        self._stop = threading.Event()
        weakref.finalize(gate, self._stop.set).atexit = False
        run = f"{node_name(None)[:100]}:{os.getpid()}:{secrets.token_hex(3)}"
        exchange = AbuseExchange(gate.abuse, self._store, run)
        work = self._gate, exchange, self._stop
        threading.Thread(target=_exchange_forever, args=work, name="headgate-abuse", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        """Stop sharing, and close the connections."""
        self._stop.set()
        with suppress(StoreError):
            self._store.close()


def _exchange_forever(gate: weakref.ref[GateBase], exchange: AbuseExchange, stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        current = gate()
        if current is None:
            return
        current.flush_events()
        del current
        try:
            exchange.tick()
        except Exception:
            logger.exception("an exchange of counts failed; the next one follows in a second")


def _encoded(row: SharedRow) -> list[Any]:
    name_hash, pane, record = row
    return [
        f"{name_hash:x}",
        pane,
        record.requests,
        record.looked_at,
        record.hits,
        [f"{bits:x}" for bits in record.bits],
    ]


def _decoded(row: list[Any]) -> SharedRow:
    name_hash, pane, requests, looked_at, hits, bits = row
    numbers = [pane, requests, looked_at, *hits]
    if any(type(each) is not int or not 0 <= each < 2**53 for each in numbers) or any(
        len(each) > MAX_HEX for each in bits
    ):
        raise ValueError("not a shared row")
    return int(name_hash, 16), pane, SharedRecord(requests, looked_at, hits, [int(each, 16) for each in bits])
