"""AbuseDetector: evaluates scenarios on completed requests, and reports the clients that match one.

It has no clock and no threads: time is that of the requests. A gate passes the requests of its event stream, and
`headgate replay` those of a log.

Memory is bounded whatever clients send. A group has a record only after several requests in half a window, which are
counted in a table of fixed size. If records run out, those with the least progress towards the thresholds are dropped:
random identities displace each other, and no real offender.
"""

from __future__ import annotations

import heapq
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.abuse.evidence import describe_client, describe_member
from headgate.abuse.model import ADDRESS_GROUPS, Finding
from headgate.abuse.signals import (
    SeenAddresses,
    SharedRecord,
    SignalPlan,
    ValueHashes,
    bits_for,
    common_interval,
    distinct,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headgate.abuse.model import AbuseScenario, FindingHandler
    from headgate.abuse.signals import GroupRecord

__all__ = ["AbuseDetector", "GroupTable", "ObservedRequest", "SharedRow"]

MAX_RECORDS: Final = 5_000
"""Groups of one scenario that are counted in detail."""
MAX_MEMBERS: Final = 30_000
"""Addresses in all groups of one scenario that looks at them."""
KEPT_SHARE: Final = 0.75
"""The part of the records that is kept when they run out."""
CELLS: Final = 1 << 20
CELL_MASK: Final = CELLS - 1
"""Cells in which requests are counted until a group gets a record. Two groups in one cell get theirs earlier."""
MAX_EARLY: Final = 16
"""The most requests before a group gets a record."""
MAX_AGENT: Final = 200
MAX_SHARED: Final = 500
"""Groups of one scenario that a node shares with others."""
MAX_RECEIVED: Final = 5_000
"""Groups of one scenario that all other nodes share together."""
SHARED_PART: Final = 0.5
"""A group is shared from this part of the share of one node of the threshold."""
WINDOW_PANES: Final = 2

SharedRow = tuple[int, int, SharedRecord]
"""A group as nodes share it: its keyed hash, the pane, and its signals."""


class ObservedRequest(NamedTuple):
    """A request that was completed, or refused by a limit."""

    at_us: int
    """The time at which it was received."""
    scenarios: tuple[str, ...]
    """The scenarios that look at its route and method."""
    who: Mapping[str, str]
    agent: str
    path: str
    status: int
    endpoint: str
    duration_us: int = 0
    """The time until the response was complete."""


class AbuseDetector:
    """Evaluates scenarios: `configure` them, then `observe` requests. Findings are passed to `handle`.

    `key` hashes values; nodes that share their counts need the same. `is_trusted_key` returns False for API keys that a
    client may have invented, and `network_of` the name of the network with an address, for groups by asn.
    """

    def __init__(
        self,
        handle: FindingHandler,
        key: bytes = b"",
        *,
        is_trusted_key: Callable[[str], bool] = lambda key: True,
        network_of: Callable[[str], str | None] = lambda address: None,
    ) -> None:
        self.hashes = ValueHashes(key)
        self.is_trusted_key = is_trusted_key
        self.network_of = network_of
        self.tables: dict[str, GroupTable] = {}
        """By the names of the scenarios."""
        self.found: dict[str, int] = {}
        """The number of findings by scenario."""
        self._handle = handle
        self._queued: list[tuple[GroupTable, list[ObservedRequest]]] = []
        """The tables, each with the requests of a batch."""
        self._plans: dict[tuple[tuple[str, ...], int], tuple[Callable[[ObservedRequest], None], ...]] = {}
        """The queues for requests by scenarios and status."""

    def configure(self, scenarios: Sequence[AbuseScenario]) -> None:
        """Evaluate these scenarios from now on. Those that have not changed keep their counts."""
        tables: dict[str, GroupTable] = {}
        for scenario in scenarios:
            table = self.tables.get(scenario.name)
            if table is None or table.scenario != scenario:
                table = (MemberTable if scenario.each else GroupTable)(scenario, self)
            tables[scenario.name] = table
            self.found.setdefault(scenario.name, 0)
        self.tables, self._plans = tables, {}
        self._queued = [(table, []) for table in tables.values()]

    def observe(self, requests: Iterable[ObservedRequest]) -> None:
        """Count requests, about in the order of their times, and report the clients that match."""
        plans, queued = self._plans, self._queued
        for request in requests:
            key = request[1], request[5]
            queues = plans.get(key)
            if queues is None:
                queues = plans[key] = self._queues(*key)
            for append in queues:
                append(request)
        for table, queue in queued:
            if queue:
                table.add(queue)
                queue.clear()

    def _queues(self, names: Iterable[str], status: int) -> tuple[Callable[[ObservedRequest], None], ...]:
        """The queues of the tables whose scenarios look at requests that are answered with a status."""
        return tuple(
            [
                queue.append
                for table, queue in self._queued
                if table.scenario.name in names and (table.scenario.status is None or table.scenario.status(status))
            ]
        )

    def report(self, finding: Finding, scenario: AbuseScenario) -> None:
        """Count a finding, and pass it on."""
        self.found[scenario.name] += 1
        self._handle(finding, scenario)


class GroupTable:
    """The groups of one scenario, each of which is a client."""

    max_records = MAX_RECORDS

    def __init__(self, scenario: AbuseScenario, detector: AbuseDetector) -> None:
        self.scenario = scenario
        self.pane = 0
        """The number of the current pane since 1970."""
        self.records: dict[Any, GroupRecord] = {}
        same = scenario.by, scenario.when, scenario.each, scenario.window, getattr(scenario.status, "text", "")
        self.mark = blake2b(repr(same).encode(), digest_size=8).hexdigest()
        """A hash of what the scenario counts."""
        self.others: dict[int, list[SharedRecord]] = {}
        """The records of other nodes by the keyed hash of the group."""
        self._detector = detector
        self._hashes = detector.hashes
        self._plan = SignalPlan(scenario.each or scenario.when)
        self._pane_us = int(scenario.window.total_seconds() * 1_000_000) // WINDOW_PANES
        self._start_us = self._end_us = 0
        """The times that count for the current pane; earlier ones for delayed requests."""
        needs_all = "newcomers" in self._plan.sets
        self._promote_at = 1 if needs_all else min(MAX_EARLY, max(2, self._plan.least_requests // 8))
        self._cells = bytearray(CELLS)
        self._group_of = _group_function(scenario.by, detector)
        self._kind = None if scenario.by in ADDRESS_GROUPS else scenario.by
        """The kind of identity that is the group; None if it is computed."""
        places = enumerate(zip(self._plan.sets, self._plan.sizes, strict=True))
        self._values = [(index, _value_function(name, scenario, detector), size - 1) for index, (name, size) in places]

    def add(self, requests: Iterable[ObservedRequest]) -> None:
        """Count requests that the scenario looks at. This runs for every request, and is kept fast."""
        records, cells, plan, kind, hashes = self.records, self._cells, self._plan, self._kind, self._hashes
        key_of, values, is_failure, interval_index = self._key_of, self._values, plan.is_failure, plan.interval_index
        duration_index = plan.duration_index
        start_us, end_us, pane, last_early = self._start_us, self._end_us, self.pane, self._promote_at - 1
        for request in requests:
            at_us, _, who, _, _, status, _, duration_us = request
            if not start_us <= at_us < end_us:
                self._turn(at_us)
                records, cells = self.records, self._cells
                start_us, end_us, pane = self._start_us, self._end_us, self.pane
            key = key_of(request) if kind is None else who.get(kind)
            if key is None:
                continue
            record = records.get(key)
            if record is None:
                cell = hash(key) & CELL_MASK
                early = cells[cell]
                if early < last_early:
                    cells[cell] = early + 1
                    continue
                record = self._new_record(key, early)
                if record is None:
                    continue
                records = self.records
            elif record.pane != pane:
                record.turn(pane)
            record.requests += 1
            if status in is_failure:
                for index, statuses in plan.failures:
                    record.hits[index] += status in statuses
            for index, value_of, mask in values:
                value = value_of(request)
                if value is not None:
                    record.bits[index] |= 1 << (hashes(value) & mask)
            if duration_index is not None and duration_us > 0:  # less if the clock was set back
                record.hits[duration_index] += duration_us
            if interval_index is not None:
                interval_us = at_us - record.last_us if record.last_us else 0
                base_us = common_interval(interval_us, record.interval_us)
                record.hits[interval_index] += base_us > 0
                record.interval_us = base_us or interval_us
            record.last_us = at_us
            if record.requests >= record.check_at:
                self._check(key, record, at_us)

    def shared_rows(self, nodes: int = 2) -> list[SharedRow]:
        """The groups with the most progress, for other nodes: fewer, the more nodes there are.

        A group that reaches a threshold on all nodes together has an equal part of it on one of them at least.
        """
        rows, least = [], self._plan.goal * SHARED_PART / nodes
        found = [item for item in self.records.items() if item[1].progress >= least]
        for key, record in heapq.nlargest(_most_shared(nodes), found, key=lambda item: item[1].progress):
            window = record.window(self.pane)
            if window is not None:
                rows.append((self._name_hash(key, record), self.pane, window))
        return rows

    def receive(self, rows: Iterable[SharedRow]) -> None:
        """Replace the records of other nodes, and evaluate the groups that have records here, too."""
        self.others = {}
        for name_hash, pane, shared in rows:
            if (
                pane == self.pane
                and len(shared.hits) == len(self._plan.shares)
                and len(shared.bits) == len(self._plan.sets)
            ):
                self.others.setdefault(name_hash, []).append(shared)
        if self.others:
            for key, record in [*self.records.items()]:
                if record.pane == self.pane and self._name_hash(key, record) in self.others:
                    self._check(key, record, record.last_us)

    def _key_of(self, request: ObservedRequest) -> Any:
        return self._group_of(request)

    def _turn(self, at_us: int) -> None:
        """Begin the pane of a request. One that was delayed counts for the current pane."""
        self.pane = at_us // self._pane_us
        self._start_us, self._end_us = (self.pane - WINDOW_PANES) * self._pane_us, (self.pane + 1) * self._pane_us
        self._cells = bytearray(CELLS)
        self.others = {}
        self._drop_old()

    def _drop_old(self) -> None:
        oldest = self.pane - WINDOW_PANES + 1
        self.records = {key: record for key, record in self.records.items() if oldest <= record.pane <= self.pane}

    def _new_record(self, key: Any, early: int) -> GroupRecord | None:
        if self.scenario.by == "api_key" and not self._detector.is_trusted_key(key):
            return None
        if len(self.records) >= self.max_records:
            kept = int(self.max_records * KEPT_SHARE)
            self.records = dict(heapq.nlargest(kept, self.records.items(), key=lambda item: item[1].progress))
        record = self.records[key] = self._plan.new_record(self.pane, early)
        return record

    def _name_hash(self, key: Any, record: GroupRecord) -> int:
        if not record.name_hash:
            record.name_hash = self._hashes(f"{self.scenario.by}\n{key}")
        return record.name_hash

    def _check(self, key: Any, record: GroupRecord, at_us: int) -> None:
        """Evaluate the thresholds."""
        if record.is_found:
            return
        values = self._plan.values(self._windows(key, record))
        missing = self._plan.missing_requests(values)
        record.check_at = record.requests + missing
        if not missing:
            self._reach(key, record, values, at_us)

    def _windows(self, key: Any, record: GroupRecord) -> list[SharedRecord]:
        window = record.window(self.pane)
        others = self.others.get(self._name_hash(key, record), ()) if self.others else ()
        return [*others] if window is None else [window, *others]

    def _reach(self, key: Any, record: GroupRecord, values: Mapping[str, float], at_us: int) -> None:
        """Report a group that has reached all thresholds."""
        scenario, nodes = self.scenario, 1 + len(self.others.get(record.name_hash, ()))
        kind = "ip" if scenario.by == "subnet" else scenario.by
        self._report(record, kind, key, values, at_us, describe_client(scenario, key, values, nodes))

    def _report(
        self, record: GroupRecord, kind: str, value: str, values: Mapping[str, float], at_us: int, evidence: str
    ) -> None:
        record.is_found, record.quiet_pane = True, self.pane + WINDOW_PANES
        first = self.scenario.when[0]
        finding = Finding(
            self.scenario.name, kind, value, at_us, first.signal, values[first.signal], first.value, evidence
        )
        self._detector.report(finding, self.scenario)


class MemberTable(GroupTable):
    """The addresses in groups that do not identify a client, such as all with one user agent: a record each.

    An address is found if `each` applies to it, and for as many others of its group as `when` says.
    """

    max_records = MAX_MEMBERS

    def __init__(self, scenario: AbuseScenario, detector: AbuseDetector) -> None:
        super().__init__(scenario, detector)
        self._kind = None
        self._least = next(int(each.value) for each in scenario.when if each.signal == "addresses")
        self._size = bits_for(self._least)
        self._alike: dict[str, dict[str, GroupRecord]] = {}
        """The addresses by group for which `each` holds."""
        self._active: set[str] = set()
        """The groups that have enough of them."""

    def shared_rows(self, nodes: int = 2) -> list[SharedRow]:
        """The groups with the addresses for which `each` holds."""
        rows = []
        largest = heapq.nlargest(_most_shared(nodes), self._alike.items(), key=lambda item: len(item[1]))
        for group, members in largest:
            shared = SharedRecord(len(members), len(members), [], [self._bits(members)])
            rows.append((self._hashes(f"{self.scenario.by}\n{group}"), self.pane, shared))
        return rows

    def receive(self, rows: Iterable[SharedRow]) -> None:
        self.others = {}
        for name_hash, pane, shared in rows:
            if pane == self.pane and len(shared.bits) == 1:
                self.others.setdefault(name_hash, []).append(shared)
        for group, members in self._alike.items() if self.others else ():
            self._evaluate(group, members)

    def _key_of(self, request: ObservedRequest) -> Any:
        group = self._group_of(request)
        return None if group is None else (group, request[2]["ip"])

    def _drop_old(self) -> None:
        super()._drop_old()
        self._keep_members()

    def _new_record(self, key: Any, early: int) -> GroupRecord | None:
        is_full = len(self.records) >= self.max_records
        record = super()._new_record(key, early)
        if is_full:
            self._keep_members()
        return record

    def _keep_members(self) -> None:
        """Drop the members that have no record any more."""
        kept = {
            group: {address: record for address, record in members.items() if (group, address) in self.records}
            for group, members in self._alike.items()
        }
        self._alike = {group: members for group, members in kept.items() if members}
        self._active = {group for group in self._active if len(self._alike.get(group, ())) >= self._least}

    def _windows(self, key: Any, record: GroupRecord) -> list[SharedRecord]:
        return [window] if (window := record.window(self.pane)) is not None else []

    def _reach(self, key: Any, record: GroupRecord, values: Mapping[str, float], at_us: int) -> None:
        group, address = key
        members = self._alike.setdefault(group, {})
        members[address] = record
        if group in self._active:
            self._report_members(group, {address: record}, len(members))
        else:
            self._evaluate(group, members)

    def _evaluate(self, group: str, members: Mapping[str, GroupRecord]) -> None:
        """Report all members of a group that has enough."""
        others = self.others.get(self._hashes(f"{self.scenario.by}\n{group}"), ()) if self.others else ()
        count, nodes = len(members), 1 + len(others)
        if others:
            bits = self._bits(members)
            for each in others:
                bits |= each.bits[0]
            count = max(count, distinct(bits, self._size))
        if count >= self._least:
            self._active.add(group)
            self._report_members(group, members, count, nodes)

    def _report_members(self, group: str, members: Mapping[str, GroupRecord], count: int, nodes: int = 1) -> None:
        for address, record in [*members.items()]:
            if not record.is_found and (window := record.window(self.pane)) is not None:
                values = {**self._plan.values([window]), "addresses": count}
                evidence = describe_member(self.scenario, address, group, values, record.interval_us, nodes)
                self._report(record, "ip", address, values, record.last_us, evidence)

    def _bits(self, members: Iterable[str]) -> int:
        bits, mask = 0, self._size - 1
        for address in members:
            bits |= 1 << (self._hashes(address) & mask)
        return bits


def _most_shared(nodes: int) -> int:
    return max(1, min(MAX_SHARED, MAX_RECEIVED // nodes))


def _group_function(by: str, detector: AbuseDetector) -> Callable[[ObservedRequest], str | None]:
    """The function that returns the group of a request; None if it has none."""
    if by == "agent":
        return lambda request: request[3][:MAX_AGENT] or None
    if by == "endpoint":
        return lambda request: request[6]
    if by == "global":
        return lambda request: "*"
    if by == "asn":
        return lambda request: detector.network_of(request[2].get("address", ""))
    return lambda request: request[2].get(by)


def _value_function(
    signal: str, scenario: AbuseScenario, detector: AbuseDetector
) -> Callable[[ObservedRequest], str | None]:
    """The function that returns the value of a request which a signal counts."""
    if signal == "paths":
        return lambda request: request[4]
    if signal == "agents":
        return lambda request: request[3] or None
    if signal == "accounts":
        kinds = dict.fromkeys([scenario.account, "user", "api_key"])
        return lambda request: next((f"{kind} {value}" for kind in kinds if (value := request[2].get(kind))), None)
    if signal == "newcomers":
        seen = SeenAddresses(detector.hashes)
        return lambda request: request[2]["ip"] if seen.is_new(request[2]["ip"], request[0]) else None
    return lambda request: request[2].get("ip")
