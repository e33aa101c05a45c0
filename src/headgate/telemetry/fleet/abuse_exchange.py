"""AbuseExchange: nodes share what they count of groups, so that an attack that is spread over them is found, too.

With each status report, a node writes the groups with the most requests of each scenario, and reads those of the
others. Groups and values are keyed hashes. A node evaluates the sum for the groups that it knows itself, so that it can
name whom it has found.
"""

from __future__ import annotations

import json
import logging
import zlib
from typing import TYPE_CHECKING, Any, Final

from headgate.abuse.signals import SharedRecord
from headgate.errors import StoreError

if TYPE_CHECKING:
    from headgate.abuse.detector import SharedRow
    from headgate.gate.abuse_watch import AbuseWatch
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["AbuseExchange"]

logger = logging.getLogger("headgate")

PREFIX: Final = "abuse/"
KEEP_S: Final = 5.0
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

    def exchange(self) -> None:
        """Write and read once. While the store is unavailable, each node detects alone."""
        own = self._watch.shared_rows()
        try:
            if any(own.values()):
                marks = self._watch.scenario_marks()
                rows = {name: [marks[name], [*map(_encoded, rows)]] for name, rows in own.items() if rows}
                document = zlib.compress(json.dumps({"v": 1, "rows": rows}, separators=(",", ":")).encode(), 1)
                self._store.put(self._name, document, keep=KEEP_S)
            others = {name: found for name, found in self._store.read(PREFIX).items() if name != self._name}
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
