"""What all nodes together are doing, second by second, read from the board that they put it on.

Clocks of nodes differ, and nobody need set them. A node numbers its seconds by its own clock; the reader knows from the
board how long ago they were put there, and so by how many whole seconds the node's numbers are off. That number is kept
while it is right within `SLACK`, so that a chart never jumps back and forth between two seconds.
"""

from __future__ import annotations

import json
import threading
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.clock import SystemClock
from headgate.errors import StoreError
from headgate.telemetry.fleet.model import ClientCount, FleetStatus, HotKey, MinuteTotals, NearLimit, NodeStatus, Series
from headgate.telemetry.fleet.rollups import BUCKETS, OUTCOMES, quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headgate.clock import Clock
    from headgate.telemetry.fleet.status_store import StatusDocument, StatusStore

__all__ = [
    "SECONDS",
    "SILENT_AFTER",
    "ClientCount",
    "ClockAligner",
    "ClockShift",
    "FleetAggregator",
    "FleetStatus",
    "HotKey",
    "NearLimit",
    "NodeStatus",
]

SECONDS: Final = 300
"""How far back charts go."""
MINUTE: Final = 60
SILENT_AFTER: Final = 5.0
"""Seconds without a word after which a node is silent; after a minute the board forgets it."""
LATE: Final = 2
"""Seconds that nodes have for their word: charts end so long before now, so that their end does not sag."""
SLACK: Final = 0.9
"""How far a node may seem to be off before it is placed anew."""
PATIENCE: Final = 3
"""Words in a row that must come late before they are believed to be on time: one may have been held up."""
REREAD_US: Final = 5_000_000
"""Between two looks at what nodes remember."""
FEW: Final = 20
"""Clients in each list."""
MOST_TROUBLES: Final = 5
LARGEST: Final = 4_000_000
"""Bytes that a document may come to: whoever can write there may have put anything."""

_Beat: TypeAlias = "tuple[int, list[int], dict[int, int]]"
"""The number of a second, what was counted in it, and how long decisions took."""


class FleetAggregator:
    """Reads a board, and remembers what it has read: ask it each second, or now and then.

    >>> from headgate.telemetry.fleet.status_store import MemoryStatusStore
    >>> FleetAggregator(MemoryStatusStore()).gather().nodes
    ()
    """

    def __init__(self, board: StatusStore, *, clock: Clock | None = None) -> None:
        self._board = board
        self._now_us = (clock or SystemClock()).now_us
        self._lock = threading.Lock()
        self._placing = ClockAligner(1_000_000)
        self._known: dict[str, _NodeHistory] = {}
        self._sums: dict[int, _Sum] = {}
        """All nodes together, by the reader's seconds."""
        self._reread_us = 0

    def gather(self) -> FleetStatus:
        """What the fleet is doing. It never fails: what cannot be read is told among `troubles`."""
        with self._lock:
            troubles: list[str] = []
            words = self._words("beats/", troubles)
            now_us = self._now_us()
            lacks = [self._place(run, word, now_us) for run, word in words.items()]
            if any(lacks) and not 0 <= now_us - self._reread_us < REREAD_US:
                # Somebody is new, or was not asked for long: nodes remember more than they say each second.
                self._reread_us = now_us
                for run, word in self._words("past/", troubles).items():
                    if run in words:
                        self._place(run, word, now_us)
            last_s = now_us // 1_000_000 - LATE
            self._forget(last_s - SECONDS, words)
            return self._gathered(words, now_us, last_s, troubles)

    def _words(self, room: str, troubles: list[str]) -> dict[str, _NodeDocument]:
        try:
            found = self._board.read(room)
        except StoreError as error:
            troubles.append(f"the board cannot be read: {error}")
            return {}
        words: dict[str, _NodeDocument] = {}
        for name, posted in found.items():
            try:
                words[name.partition("/")[2]] = _NodeDocument(posted)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, zlib.error):
                if len(troubles) < MOST_TROUBLES:
                    troubles.append(f"what is on the board as {ascii(name)[:100]} is no word of a node")
        return words

    def _place(self, run: str, word: _NodeDocument, now_us: int) -> bool:
        """Put the seconds that a node tells of where they belong; whether some before them are not known."""
        known = self._known.get(run)
        is_new = known is None
        if known is None:
            known = self._known[run] = _NodeHistory()
        shift, is_moved, is_in_doubt = self._placing.shift(run, word.at_us, now_us - round(word.age * 1_000_000))
        if is_in_doubt:  # the next one tells the same
            return False
        if is_moved:  # what stands in a chart stays there
            known.after_s = max(known.placed, default=0)
        now_s = now_us // 1_000_000
        lacks = is_new
        if word.beats and known.placed and not is_new:
            lacks = word.beats[0][0] + shift > max(known.placed) + 1
        for number, counts, latency in word.beats:
            second = number + shift
            if second not in known.placed and known.after_s < second <= now_s and second > now_s - SECONDS - LATE:
                known.placed[second] = counts, latency
                total = self._sums.get(second)
                if total is None:
                    total = self._sums[second] = _Sum()
                total.add(counts, latency)
        return lacks

    def _forget(self, before_s: int, living: Mapping[str, Any]) -> None:
        self._sums = {second: total for second, total in self._sums.items() if second > before_s}
        # Of those who are gone, what they did stays in the sums.
        self._known = {run: known for run, known in self._known.items() if run in living}
        for known in self._known.values():
            known.placed = {second: each for second, each in known.placed.items() if second > before_s}
        self._placing.keep(living)

    def _gathered(
        self, words: Mapping[str, _NodeDocument], now_us: int, last_s: int, troubles: list[str]
    ) -> FleetStatus:
        sums = [self._sums.get(second, NOTHING) for second in range(last_s - SECONDS + 1, last_s + 1)]
        nodes = [self._known[run].node(word, now_us, last_s) for run, word in words.items()]
        columns: dict[str, Any] = {
            name: tuple([total.counts[index] for total in sums]) for index, name in enumerate(OUTCOMES)
        }
        speaking = [word for word in words.values() if word.age <= SILENT_AFTER]
        return FleetStatus(
            now_us,
            tuple(sorted(nodes, key=lambda node: (node.region, node.name))),
            Series(
                start_s=last_s - SECONDS + 1,
                **columns,
                p50_us=tuple([total.quantile(0.5) for total in sums]),
                p99_us=tuple([total.quantile(0.99) for total in sums]),
            ),
            _totals(sums[-MINUTE:]),
            _most_denied(speaking),
            _nearest(words.values()),
            _hottest(speaking),
            tuple(troubles),
        )


class ClockShift(NamedTuple):
    """By how much somebody's numbers are off."""

    by: int
    is_moved: bool = False
    """Whether that is another than it was."""
    is_in_doubt: bool = False
    """Whether it does not look so now: what was put may have been held up, or a clock was set."""


class ClockAligner:
    """By how much the numbers that others count by are off, in whole units of so many microseconds."""

    def __init__(self, unit_us: int) -> None:
        self._unit_us = unit_us
        self._shifts: dict[str, tuple[int, int]] = {}
        """What holds for each, and how often in a row it seemed to be too little."""

    def shift(self, name: str, at_us: int, put_us: int) -> ClockShift:
        """What to add to the numbers of somebody who has put something at an instant that it calls `at_us`."""
        off = (put_us - at_us) / self._unit_us
        known = self._shifts.get(name)
        if known is None:
            self._shifts[name] = round(off), 0
            return ClockShift(round(off))
        held, late = known
        if abs(off - held) <= SLACK:
            self._shifts[name] = held, 0
            return ClockShift(held)
        # Nothing comes before it was sent; but what comes late may have been held up on the way.
        if off < held or late + 1 >= PATIENCE:
            self._shifts[name] = round(off), 0
            return ClockShift(round(off), is_moved=True)
        self._shifts[name] = held, late + 1
        return ClockShift(held, is_in_doubt=True)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        self._shifts = {name: self._shifts[name] for name in names if name in self._shifts}


class _NodeDocument:
    """What a node has said. Raises all sorts of errors for what is none."""

    __slots__ = ("age", "at_us", "beats", "said")

    def __init__(self, posted: StatusDocument) -> None:
        self.age = posted.age
        document = posted.document
        if document[:1] != b"{":
            unpacking = zlib.decompressobj()
            document = unpacking.decompress(document, LARGEST)
        if len(document) >= LARGEST:
            raise ValueError("too large")
        self.said: dict[str, Any] = json.loads(document)
        if self.said["v"] != 1:
            raise ValueError("of another version")
        self.at_us = int(self.said["at_us"])
        self.beats: list[_Beat] = [_beat(*row) for row in self.said["beats"][-SECONDS:]]

    def text(self, name: str) -> str | None:
        value = self.said.get(name)
        return None if value is None else str(value)[:500]

    def rows(self, name: str, *kinds: type) -> list[Any]:
        """A list of rows with values of these kinds; what looks otherwise is left out."""
        rows = self.said.get(name)
        if not isinstance(rows, list):
            return []
        return [row for row in rows[:FEW] if isinstance(row, list) and [type(each) for each in row] == [*kinds]]


def _beat(number: int, *rest: Any) -> _Beat:
    *counts, latency = rest
    if len(counts) != len(OUTCOMES) or any(type(each) is not int or each < 0 for each in (number, *counts, *latency)):
        raise ValueError("not a second")
    pairs = dict(zip(latency[::2], latency[1::2], strict=True))
    if any(bucket >= BUCKETS for bucket in pairs):
        raise ValueError("not a latency")
    return number, counts, pairs


class _Sum:
    """What was counted in a second."""

    __slots__ = ("_quantiles", "counts", "latency")

    def __init__(self) -> None:
        self.counts = [0] * len(OUTCOMES)
        self.latency: dict[int, int] = {}
        self._quantiles: dict[float, int | None] = {}

    def add(self, counts: Iterable[int], latency: Mapping[int, int]) -> None:
        self.counts = [one + other for one, other in zip(self.counts, counts, strict=True)]
        for bucket, count in latency.items():
            self.latency[bucket] = self.latency.get(bucket, 0) + count
        self._quantiles.clear()

    def quantile(self, share: float) -> int | None:
        if share not in self._quantiles:
            self._quantiles[share] = quantile(self.latency, share)
        return self._quantiles[share]


NOTHING: Final = _Sum()


class _NodeHistory:
    """What is remembered of a node."""

    __slots__ = ("after_s", "placed")

    def __init__(self) -> None:
        self.placed: dict[int, tuple[list[int], dict[int, int]]] = {}
        """Its seconds, by the reader's clock."""
        self.after_s = 0
        """Seconds up to this are settled."""

    def node(self, word: _NodeDocument, now_us: int, last_s: int) -> NodeStatus:
        total = _Sum()
        for second in range(last_s - MINUTE + 1, last_s + 1):
            if second in self.placed:
                total.add(*self.placed[second])
        said = word.said
        waiting, lost, log_error = said.get("log") or (None, None, None)
        is_degraded = said.get("state") != "ready"
        return NodeStatus(
            name=(word.text("node") or "?")[:120],
            region=word.text("region") or "",
            at_us=now_us - round(word.age * 1_000_000),
            state="silent" if word.age > SILENT_AFTER else "degraded" if is_degraded else "ready",
            reason=word.text("reason"),
            degraded_for_s=said.get("degraded_for"),
            shards=tuple([(str(name), bool(ready)) for name, ready in word.rows("shards", str, bool)]),
            policy_version=word.text("policy"),
            policy_error=word.text("error"),
            config_age_s=said.get("age"),
            **dict(zip(OUTCOMES, total.counts, strict=True)),
            p50_us=total.quantile(0.5),
            p99_us=total.quantile(0.99),
            waiting=waiting,
            lost=lost,
            log_error=log_error,
        )


def _totals(sums: Iterable[_Sum]) -> MinuteTotals:
    total = _Sum()
    for each in sums:
        total.add(each.counts, each.latency)
    counted: dict[str, Any] = dict(zip(OUTCOMES, total.counts, strict=True))
    return MinuteTotals(**counted, p50_us=total.quantile(0.5), p99_us=total.quantile(0.99))


def _most_denied(words: Iterable[_NodeDocument]) -> tuple[ClientCount, ...]:
    found: dict[tuple[str, str], ClientCount] = {}
    for word in words:
        for kind, key, label, denied, allowed in word.rows("denied", str, str, str, int, int):
            before = found.get((kind, key))
            more = (before.denied, before.allowed) if before is not None else (0, 0)
            found[kind, key] = ClientCount(kind, key, label, denied + more[0], allowed + more[1])
    return tuple(sorted(found.values(), key=lambda each: (-each.denied, each.label))[:FEW])


def _nearest(words: Iterable[_NodeDocument]) -> tuple[NearLimit, ...]:
    """Of what several nodes say of the same, the last word holds."""
    found: dict[tuple[str, str, str], tuple[float, NearLimit]] = {}
    for word in words:
        for kind, key, label, limit, left, capacity, ago_ms in word.rows("near", str, str, str, str, int, int, int):
            ago = word.age + ago_ms / 1000
            at = limit, kind, key
            if ago <= MINUTE and capacity > 0 and (at not in found or ago < found[at][0]):
                found[at] = ago, NearLimit(kind, key, label, limit, left, capacity, left / capacity)
    return tuple(sorted([near for _, near in found.values()], key=lambda each: (each.share, each.label))[:FEW])


def _hottest(words: Iterable[_NodeDocument]) -> tuple[HotKey, ...]:
    rates: dict[tuple[str, str, str, str], int] = {}
    for word in words:
        for limit, kind, key, label, rate in word.rows("hot", str, str, str, str, int):
            rates[limit, kind, key, label] = rates.get((limit, kind, key, label), 0) + rate
    busiest = sorted(rates.items(), key=lambda item: -item[1])[:FEW]
    return tuple([HotKey(*at, float(rate)) for at, rate in busiest])
