"""The state of all regions, read from their stores: reachability, shared usage, debts, held tokens, and overshoot.

Every process publishes its own part in the store of its region, once per exchange.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.clock import SystemClock
from headgate.decisions import Decision
from headgate.errors import HeadgateError
from headgate.keys import escape
from headgate.limits import Limit
from headgate.regions.reconciled import ImportedUsage, horizon_us, parse_field, parse_totals, slot_us
from headgate.stores import open_store
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from headgate.regions.reconciled import UsageSlot
    from headgate.stores.redis.region_client import RegionClient

__all__ = ["ImportReport", "RegionReport", "RegionsReport", "SharedUsage", "WorkerStatus", "read_regions_report"]

MAX_STATUS_AGE_US: Final = 15_000_000
MAX_HELD_KEYS: Final = 1_000
READ_TIMEOUT_S: Final = 2.0
_PROBE: Final = Limit(1, timedelta(seconds=1), name="%region probe").by()


class WorkerStatus(NamedTuple):
    """The state that one process publishes.

    >>> status = WorkerStatus(1_000_000, {"us": 0.4}, {("contract", "hmac:0"): 20})
    >>> WorkerStatus.parse(status.text) == status
    True
    """

    at_us: int
    """On the clock of the region's store."""
    ages_s: dict[str, float]
    """For each other region, the seconds since something was heard of it; empty unless the process is the region's
    agent."""
    held: dict[tuple[str, str], int]
    """Leased tokens in the region's pools, by limit and identity."""

    @property
    def text(self) -> str:
        held = [[*counter, tokens] for counter, tokens in [*self.held.items()][:MAX_HELD_KEYS]]
        return json.dumps({"at_us": self.at_us, "ages": self.ages_s, "held": held}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for a text of another version."""
        try:
            found: dict[str, Any] = json.loads(text)
            held = {(str(limit), str(identity)): int(tokens) for limit, identity, tokens in found["held"]}
            ages = {str(region): float(age) for region, age in found["ages"].items()}
            return cls(int(found["at_us"]), ages, held)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The knowledge of one region about the usage of another."""

    region: str
    known: int
    """Usage of the other region that counts now."""
    owed: int
    """The part of it that is not yet charged to the own counters."""
    unread: int | None
    """Usage that the other region has shared and this one has not read; None if it cannot be reached."""
    age_s: float | None
    """Seconds since something was heard of the other region; None if no process exchanges usage there, or here."""


@dataclass(frozen=True, slots=True)
class RegionReport:
    """The state of one region."""

    name: str
    is_home: bool
    error: str | None
    """Why its store cannot be read; None if it can."""
    round_trip_ms: float | None = None
    shared: int = 0
    """Usage of reconciled limits that it has shared, and that counts now."""
    held: int = 0
    """Leased tokens of reserved limits in its pools."""
    owed: int = 0
    """Usage of other regions that it knows and has not yet charged to its own counters."""
    age_s: float | None = None
    """The age of its oldest data about another region with processes; None if some is not known."""
    processes: int = 0
    """Processes that exchange usage or lease tokens."""
    imports: tuple[ImportReport, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedUsage:
    """The shared usage and the held tokens of one limit, in all regions."""

    name: str
    used: Mapping[str, int]
    """By region, over all clients."""
    held: Mapping[str, int]
    overshoot: int
    """The most that all regions together have admitted to one client beyond the limit, as far as it still counts."""


@dataclass(frozen=True, slots=True)
class RegionsReport:
    """The state of all regions."""

    regions: tuple[RegionReport, ...]
    limits: tuple[SharedUsage, ...]

    def limit(self, name: str) -> SharedUsage:
        return next((each for each in self.limits if each.name == name), SharedUsage(name, {}, {}, 0))


@dataclass(frozen=True, slots=True)
class _RegionReading:
    """The data of one region."""

    error: str | None
    round_trip_ms: float | None = None
    now_us: int = 0
    epoch: str = ""
    usage: dict[UsageSlot, tuple[int, int]] = field(default_factory=dict)
    imported: dict[str, dict[str, str]] = field(default_factory=dict)
    statuses: list[WorkerStatus] = field(default_factory=list)


def read_regions_report(urls: Mapping[str, Any], home: str | None, *, namespace: str = "headgate") -> RegionsReport:
    """Read the stores of all regions at the same time. A region that cannot be read has an `error`."""
    names = sorted(urls)
    with ThreadPoolExecutor(len(names)) as executor:
        readings = dict(
            zip(names, executor.map(lambda name: _read(urls[name], names, name, namespace), names), strict=True)
        )
    regions = [_region(name, readings, is_home=name == home or len(names) == 1) for name in names]
    return RegionsReport(tuple(regions), tuple(_limits(readings)))


def _read(url: Any, names: list[str], own: str, namespace: str) -> _RegionReading:
    client: RegionClient | None = None
    try:
        client = _open(url, namespace)
        _probe(client)  # connects
        started = time.perf_counter()
        now_us = _probe(client)
        round_trip_ms = (time.perf_counter() - started) * 1000
        shared = client.shared_usage()
        usage = {}
        for name, text in shared.items():
            slot, totals = None if name.startswith("%") else parse_field(name), parse_totals(text)
            if slot is not None and totals is not None and slot.counts_at(now_us):
                usage[slot] = (totals[0], totals[1])
        imported = {name: client.imported(name) for name in names if name != own}
        found = [WorkerStatus.parse(text) for text in client.statuses().values()]
        statuses = [each for each in found if each is not None and each.at_us > now_us - MAX_STATUS_AGE_US]
        return _RegionReading(None, round_trip_ms, now_us, shared.get("%epoch", ""), usage, imported, statuses)
    except HeadgateError as error:
        return _RegionReading(str(error))
    finally:
        if client is not None:
            client.close()


def _open(url: Any, namespace: str) -> RegionClient:
    from headgate.stores.redis.region_client import RegionClient

    options: Any = {"clock": None, "default_clock": SystemClock(), "namespace": escape(namespace), "max_keys": 1}
    return RegionClient(open_store(url, **options, budget=READ_TIMEOUT_S, asynchronous=False).background_client())


def _probe(client: RegionClient) -> int:
    """The time of the store, which charges nothing."""
    (answer,) = client.run_all([Check((_PROBE,), 0)])
    if isinstance(answer, Decision):
        return answer.at_us
    raise answer


def _region(name: str, readings: Mapping[str, _RegionReading], *, is_home: bool) -> RegionReport:
    own = readings[name]
    if own.error is not None:
        return RegionReport(name, is_home, own.error)
    ages: dict[str, float] = {}
    for status in own.statuses:
        since_s = (own.now_us - status.at_us) / 1_000_000
        ages |= {region: age + since_s for region, age in status.ages_s.items()}
    # A region without processes admits nothing, so that no data about it can be too old.
    idle = {other for other in own.imported if readings[other].error is None and not readings[other].statuses}
    imports = tuple(
        [_import(other, own, readings[other], None if other in idle else ages.get(other)) for other in own.imported]
    )
    active_ages = [each.age_s for each in imports if each.region not in idle]
    known_ages = [age_s for age_s in active_ages if age_s is not None]
    return RegionReport(
        name,
        is_home,
        None,
        round_trip_ms=own.round_trip_ms,
        shared=sum(admitted - refunded for admitted, refunded in own.usage.values()),
        held=sum(_held(own).values()),
        owed=sum(each.owed for each in imports),
        age_s=max(known_ages) if known_ages and len(known_ages) == len(active_ages) else None,
        processes=len(own.statuses),
        imports=imports,
    )


def _import(region: str, own: _RegionReading, other: _RegionReading, age_s: float | None) -> ImportReport:
    known = owed = 0
    totals: dict[UsageSlot, ImportedUsage] = {}
    for name, text in own.imported[region].items():
        epoch, _, slot_name = name.partition(" ")
        slot = None if name.startswith("%") else parse_field(slot_name)
        if slot is None or not slot.counts_at(own.now_us):
            continue
        usage = ImportedUsage.parse(text)
        known += usage.admitted - usage.refunded
        owed += max(0, usage.balance)
        if epoch == other.epoch:
            totals[slot] = usage
    unread = None
    if other.error is None:
        missing = [
            admitted
            - refunded
            - totals.get(slot, ImportedUsage()).admitted
            + totals.get(slot, ImportedUsage()).refunded
            for slot, (admitted, refunded) in other.usage.items()
        ]
        unread = sum(max(0, each) for each in missing)
    return ImportReport(region, known, owed, unread, age_s)


def _held(reading: _RegionReading) -> dict[tuple[str, str], int]:
    """The tokens in the region's pools. All processes see the same pools, some a little later."""
    held: dict[tuple[str, str], int] = {}
    for status in sorted(reading.statuses, key=lambda status: status.at_us):
        held |= status.held
    return held


def _limits(readings: Mapping[str, _RegionReading]) -> list[SharedUsage]:
    used: dict[str, Counter[str]] = {}
    held: dict[str, Counter[str]] = {}
    clients: dict[tuple[Limit, str], list[tuple[int, int]]] = {}
    for region, reading in readings.items():
        for slot, (admitted, refunded) in reading.usage.items():
            used.setdefault(slot.limit.name, Counter())[region] += admitted - refunded
            clients.setdefault((slot.limit, slot.identity), []).append((slot.number, admitted - refunded))
        for (name, _), tokens in _held(reading).items():
            held.setdefault(name, Counter())[region] += tokens
    over: Counter[str] = Counter()
    for (limit, _), slots in clients.items():
        over[limit.name] = max(over[limit.name], _overshoot(limit, slots))
    names = sorted({*used, *held})
    return [SharedUsage(name, dict(used.get(name, {})), dict(held.get(name, {})), over[name]) for name in names]


def _overshoot(limit: Limit, slots: list[tuple[int, int]]) -> int:
    """The usage of one client beyond what a single store would have admitted in the same time."""
    if limit.algorithm == "fixed_window":
        windows: Counter[int] = Counter()
        for number, amount in slots:
            windows[number] += amount
        return max(0, max(windows.values()) - limit.quota)
    numbers = [number for number, _ in slots]
    length_us = (max(numbers) - min(numbers) + 1) * slot_us(limit)
    refilled = -(-length_us * limit.tokens // limit.ticks)
    if limit.implementation.SHAPES_BURST:
        admitted = limit.capacity + refilled
    else:
        admitted = limit.quota * (1 + -(-length_us // max(1, horizon_us(limit))))
    return max(0, sum(amount for _, amount in slots) - admitted)
