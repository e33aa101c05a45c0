"""Fleet status: the reports of all nodes, read from the status store and summed second by second.

Nodes need no synchronised clocks. A node numbers its seconds by its own clock; the age of its documents, measured by
the status store, shows by how many whole seconds these numbers are off. The offset is kept while it is right
within `MAX_DRIFT`, so that a chart never jumps back and forth between two seconds.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.clock import SystemClock
from headgate.errors import StoreError
from headgate.health import OutageReport
from headgate.telemetry.fleet.model import (
    CanaryNode,
    CanarySecond,
    ClientCount,
    FleetStatus,
    HotKey,
    MinuteTotals,
    NearLimit,
    NodeStatus,
    QuotaHolding,
    Series,
)
from headgate.telemetry.fleet.rollups import BUCKETS, OUTCOMES, quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headgate.clock import Clock
    from headgate.telemetry.fleet.status_store import StatusDocument, StatusStore

__all__ = ["ClockAligner", "ClockShift", "FleetAggregator"]

SECONDS: Final = 300
"""The length of a series."""
MINUTE: Final = 60
SILENT_AFTER_S: Final = 5.0
"""The age of the last report from which on a node is silent; after a minute the status store drops it."""
REPORT_DELAY_S: Final = 2
"""A series ends this long before now, as the last seconds are not reported by all nodes yet."""
MAX_DRIFT: Final = 0.9
"""Deviation of a node's clock above which its offset is changed."""
MIN_LATE_REPORTS: Final = 3
"""Consecutive late reports that change the offset: a single one may have been delayed."""
HISTORY_INTERVAL_US: Final = 5_000_000
"""The time between two reads of the nodes' histories."""
TOP: Final = 20
"""Clients in each list."""
MAX_ERRORS: Final = 5
MAX_DOCUMENT_BYTES: Final = 4_000_000
"""The status store may contain anything."""

_Row: TypeAlias = "tuple[int, list[int], dict[int, int]]"
"""The number of a second, its counts by outcome, and its latency histogram."""


class FleetAggregator:
    """Reads the status store and remembers what it has read, for repeated calls of `gather`.

    >>> from headgate.telemetry.fleet.status_store import MemoryStatusStore
    >>> FleetAggregator(MemoryStatusStore()).gather().nodes
    ()
    """

    def __init__(self, store: StatusStore, *, clock: Clock | None = None) -> None:
        self._store = store
        self._now_us = (clock or SystemClock()).now_us
        self._lock = threading.Lock()
        self._clocks = ClockAligner(1_000_000)
        self._histories: dict[str, _NodeHistory] = {}
        self._totals: dict[int, _Totals] = {}
        """The sums over all nodes, by the reader's seconds."""
        self._history_read_us = 0

    def gather(self) -> FleetStatus:
        """The status of the fleet. Never fails: errors are listed in `troubles`."""
        with self._lock:
            errors: list[str] = []
            documents = self._read("beats/", errors)
            now_us = self._now_us()
            has_gaps = [self._add(run, document, now_us) for run, document in documents.items()]
            if any(has_gaps) and not 0 <= now_us - self._history_read_us < HISTORY_INTERVAL_US:
                self._history_read_us = now_us
                for run, document in self._read("past/", errors).items():
                    if run in documents:
                        self._add(run, document, now_us)
            last_s = now_us // 1_000_000 - REPORT_DELAY_S
            self._forget(last_s - SECONDS, documents)
            return self._status(documents, now_us, last_s, errors)

    def _read(self, prefix: str, errors: list[str]) -> dict[str, _NodeDocument]:
        try:
            found = self._store.read(prefix)
        except StoreError as error:
            errors.append(f"the node status cannot be read: {error}")
            return {}
        documents: dict[str, _NodeDocument] = {}
        for name, document in found.items():
            try:
                documents[name.partition("/")[2]] = _NodeDocument(document)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, zlib.error):
                if len(errors) < MAX_ERRORS:
                    errors.append(f"the node status {ascii(name)[:100]} is invalid")
        return documents

    def _add(self, run: str, document: _NodeDocument, now_us: int) -> bool:
        """Add the seconds of a report; True if seconds before them are missing."""
        is_new = run not in self._histories
        history = self._histories.setdefault(run, _NodeHistory())
        shift, is_moved, is_in_doubt = self._clocks.shift(run, document.at_us, now_us - round(document.age * 1_000_000))
        if is_in_doubt:  # the next report has the same seconds
            return False
        history.shift_s = shift
        if is_moved:  # seconds that are in a chart stay there
            history.settled_s = max(history.seconds, default=0)
        now_s = now_us // 1_000_000
        is_late = bool(document.rows and history.seconds) and document.rows[0][0] + shift > max(history.seconds) + 1
        for number, counts, latency in document.rows:
            second = number + shift
            is_in_range = history.settled_s < second <= now_s and second > now_s - SECONDS - REPORT_DELAY_S
            if second not in history.seconds and is_in_range:
                history.seconds[second] = counts, latency
                self._totals.setdefault(second, _Totals()).add(counts, latency)
        return is_new or is_late

    def _forget(self, before_s: int, live: Mapping[str, Any]) -> None:
        self._totals = {second: total for second, total in self._totals.items() if second > before_s}
        # The seconds of nodes that are gone remain in the totals.
        self._histories = {run: history for run, history in self._histories.items() if run in live}
        for history in self._histories.values():
            history.seconds = {second: each for second, each in history.seconds.items() if second > before_s}
        self._clocks.keep(live)

    def _status(self, reports: Mapping[str, _NodeDocument], now_us: int, last_s: int, errors: list[str]) -> FleetStatus:
        totals = [self._totals.get(second, EMPTY) for second in range(last_s - SECONDS + 1, last_s + 1)]
        nodes = [self._histories[run].node(document, now_us, last_s) for run, document in reports.items()]
        columns: Any = dict(zip(OUTCOMES, zip(*[total.counts for total in totals], strict=True), strict=True))
        canary_nodes = [self._histories[run].canary_node(document, last_s) for run, document in reports.items()]
        live = [document for document in reports.values() if document.age <= SILENT_AFTER_S]
        return FleetStatus(
            now_us,
            tuple(sorted(nodes, key=lambda node: (node.region, node.name))),
            Series(
                start_s=last_s - SECONDS + 1,
                **columns,
                p50_us=tuple([total.quantile(0.5) for total in totals]),
                p99_us=tuple([total.quantile(0.99) for total in totals]),
            ),
            MinuteTotals(**_sum([(each.counts, each.latency) for each in totals[-MINUTE:]])),
            _top_denied(live),
            _nearest(reports.values()),
            _hottest(live),
            tuple(errors),
            _quotas(live),
            tuple(sorted(filter(None, canary_nodes), key=lambda node: node.name)),
        )


class ClockShift(NamedTuple):
    """The offset of another clock's numbers."""

    by: int
    is_moved: bool = False
    """True if the offset has changed."""
    is_in_doubt: bool = False
    """True if a document contradicts the offset: it may have been delayed, or the clock was set."""


class ClockAligner:
    """Offsets of the clocks of other nodes, in whole units of some microseconds."""

    def __init__(self, unit_us: int) -> None:
        self._unit_us = unit_us
        self._shifts: dict[str, tuple[int, int]] = {}
        """The offset of each, and the number of consecutive documents that seemed to be late."""

    def shift(self, name: str, at_us: int, put_us: int) -> ClockShift:
        """The amount to add to a node's numbers, given a document of its time `at_us` that was stored at `put_us`."""
        offset = (put_us - at_us) / self._unit_us
        current, late = self._shifts.get(name, (round(offset), 0))
        if abs(offset - current) <= MAX_DRIFT:
            self._shifts[name] = current, 0
            return ClockShift(current)
        # No document is stored before it is sent, but one that is late may have been delayed.
        if offset < current or late + 1 >= MIN_LATE_REPORTS:
            self._shifts[name] = round(offset), 0
            return ClockShift(round(offset), is_moved=True)
        self._shifts[name] = current, late + 1
        return ClockShift(current, is_in_doubt=True)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all other names."""
        self._shifts = {name: self._shifts[name] for name in names if name in self._shifts}


class _NodeDocument:
    """A parsed report. Raises various errors for an invalid one."""

    __slots__ = ("age", "at_us", "fields", "rows")

    def __init__(self, stored: StatusDocument) -> None:
        self.age = stored.age
        document = stored.document
        if document[:1] != b"{":
            document = zlib.decompressobj().decompress(document, MAX_DOCUMENT_BYTES)
        if len(document) >= MAX_DOCUMENT_BYTES:
            raise ValueError("too large")
        self.fields: dict[str, Any] = json.loads(document)
        if self.fields["v"] != 1:
            raise ValueError("unknown version")
        self.at_us = int(self.fields["at_us"])
        self.rows: list[_Row] = [_parse_row(*row) for row in self.fields["beats"][-SECONDS:]]

    @property
    def canary(self) -> tuple[str, Any, int, str | None] | None:
        """The canary, the role of the node, its first second in this role, and the reason why it has not another."""
        found = self.fields.get("canary")
        if not isinstance(found, list) or [type(each) for each in found] != [str, str, int, str]:
            return None
        canary, role, since_s, error = found
        return (canary[:20], role, since_s, error[:500] or None) if role in ("candidate", "stable") else None

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value is None else str(value)[:500]

    def list_of(self, name: str, *types: type) -> list[Any]:
        """The rows of a list that have values of these types."""
        rows = self.fields.get(name)
        if not isinstance(rows, list):
            return []
        return [row for row in rows[:TOP] if isinstance(row, list) and [type(each) for each in row] == [*types]]


def _parse_row(number: int, *rest: Any) -> _Row:
    *counts, latency = rest
    if len(counts) != len(OUTCOMES) or any(type(each) is not int or each < 0 for each in (number, *counts, *latency)):
        raise ValueError("not the row of a second")
    histogram = dict(zip(latency[::2], latency[1::2], strict=True))
    if any(bucket >= BUCKETS for bucket in histogram):
        raise ValueError("not a latency histogram")
    return number, counts, histogram


class _Totals:
    __slots__ = ("_quantiles", "counts", "latency")

    def __init__(self) -> None:
        self.counts = [0] * len(OUTCOMES)
        self.latency: Counter[int] = Counter()
        self._quantiles: dict[float, int | None] = {}

    def add(self, counts: Iterable[int], latency: Mapping[int, int]) -> None:
        self.counts = [one + other for one, other in zip(self.counts, counts, strict=True)]
        self.latency.update(latency)
        self._quantiles.clear()

    def quantile(self, share: float) -> int | None:
        if share not in self._quantiles:
            self._quantiles[share] = quantile(self.latency, share)
        return self._quantiles[share]


EMPTY: Final = _Totals()


def _sum(parts: Iterable[tuple[Iterable[int], Mapping[int, int]]]) -> dict[str, Any]:
    """The sums of seconds, and quantiles of their latencies."""
    total = _Totals()
    for counts, latency in parts:
        total.add(counts, latency)
    by_outcome = dict(zip(OUTCOMES, total.counts, strict=True))
    return {**by_outcome, "p50_us": quantile(total.latency, 0.5), "p99_us": quantile(total.latency, 0.99)}


@dataclass(slots=True)
class _NodeHistory:
    """The seconds that one node has reported."""

    seconds: dict[int, tuple[list[int], dict[int, int]]] = field(default_factory=dict)
    """By the reader's clock."""
    settled_s: int = 0
    """Seconds up to this one are final."""
    shift_s: int = 0
    """Seconds between the node's clock and the reader's."""

    def canary_node(self, document: _NodeDocument, last_s: int) -> CanaryNode | None:
        """The part of the node in a canary; None if it reports none."""
        if document.canary is None:
            return None
        canary, role, since_s, error = document.canary
        seconds = sorted(second for second in self.seconds if since_s + self.shift_s <= second <= last_s)
        return CanaryNode(
            name=_name(document),
            canary=canary,
            role=role,
            error=error,
            seconds=tuple([CanarySecond(second, *self.seconds[second]) for second in seconds]),
        )

    def node(self, document: _NodeDocument, now_us: int, last_s: int) -> NodeStatus:
        minute = [self.seconds[second] for second in range(last_s - MINUTE + 1, last_s + 1) if second in self.seconds]
        fields = document.fields
        waiting, lost, log_error = fields.get("log") or (None, None, None)
        is_degraded = fields.get("state") != "ready"
        return NodeStatus(
            name=_name(document),
            region=document.text("region") or "",
            at_us=now_us - round(document.age * 1_000_000),
            state="silent" if document.age > SILENT_AFTER_S else "degraded" if is_degraded else "ready",
            reason=document.text("reason"),
            degraded_for_s=fields.get("degraded_for"),
            shards=tuple([(str(name), bool(ready)) for name, ready in document.list_of("shards", str, bool)]),
            policy_version=document.text("policy"),
            policy_error=document.text("error"),
            canary=None if document.canary is None else document.canary[1],
            config_age_s=fields.get("age"),
            last_outage=_outage(fields.get("outage")),
            **_sum(minute),
            waiting=waiting,
            lost=lost,
            log_error=log_error,
        )


def _outage(found: Any) -> OutageReport | None:
    match found:
        case [str(limit), int(admitted), int(capacity), int() | None as bound]:
            return OutageReport(limit[:120], admitted, capacity, bound)
    return None


def _name(document: _NodeDocument) -> str:
    return (document.text("node") or "?")[:120]


def _top_denied(documents: Iterable[_NodeDocument]) -> tuple[ClientCount, ...]:
    found: dict[tuple[str, str], ClientCount] = {}
    for document in documents:
        for kind, key, label, denied, allowed in document.list_of("denied", str, str, str, int, int):
            other = found.get((kind, key))
            if other is not None:
                denied, allowed = denied + other.denied, allowed + other.allowed
            found[kind, key] = ClientCount(kind, key, label, denied, allowed)
    return tuple(sorted(found.values(), key=lambda each: (-each.denied, each.label))[:TOP])


def _nearest(documents: Iterable[_NodeDocument]) -> tuple[NearLimit, ...]:
    """The clients nearest to a limit; of several reports on the same counter, the newest counts."""
    types = str, str, str, str, int, int, int
    found: dict[tuple[str, str, str], tuple[float, NearLimit]] = {}
    for document in documents:
        for kind, key, label, limit, left, capacity, age_ms in document.list_of("near", *types):
            age = document.age + age_ms / 1000
            at = limit, kind, key
            if age <= MINUTE and capacity > 0 and (at not in found or age < found[at][0]):
                found[at] = age, NearLimit(kind, key, label, limit, left, capacity, left / capacity)
    return tuple(sorted([near for _, near in found.values()], key=lambda each: (each.share, each.label))[:TOP])


def _hottest(documents: Iterable[_NodeDocument]) -> tuple[HotKey, ...]:
    rates: Counter[tuple[str, str, str, str]] = Counter()
    for document in documents:
        for limit, kind, key, label, rate in document.list_of("hot", str, str, str, str, int):
            rates[limit, kind, key, label] += rate
    return tuple([HotKey(*at, float(rate)) for at, rate in rates.most_common(TOP)])


def _quotas(documents: Iterable[_NodeDocument]) -> tuple[QuotaHolding, ...]:
    """The tokens that proxies hold of each limit, summed over the servers that have granted them."""
    found: dict[str, QuotaHolding] = {}
    for document in documents:
        for row in document.list_of("quotas", str, int, int, int, int, int):
            limit, counters, held, capacity, excess, bound = row
            other = found.get(limit)
            if other is not None:  # the same counters may be at several servers
                counters, held, excess = max(counters, other.counters), held + other.held, excess + other.excess
                bound = max(bound, other.bound)
            found[limit] = QuotaHolding(limit, counters, held, capacity, excess, bound)
    return tuple(sorted(found.values(), key=lambda each: (-each.held, each.limit))[:TOP])
