"""Decisions of a gate rolled up by second and by minute, per client, in bounded memory.

Latency histograms have exponential buckets, compact enough to be sent every second: exact below 8 microseconds; beyond,
each power of two has four, so that no bucket is wider than a quarter of its lower bound.
"""

from __future__ import annotations

import heapq
import json
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from headgate.clock import SECOND_US
from headgate.policy.snapshot import client_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headgate.gate.event_stream import DecisionEvent
    from headgate.keys import Key
    from headgate.policy.snapshot import Identities
    from headgate.telemetry.pseudonyms import Pseudonym

__all__ = [
    "OUTCOMES",
    "BusyClient",
    "MinuteRollup",
    "SecondRollups",
    "TrafficSketch",
    "most_of",
    "quantile",
    "read_minute",
]

OUTCOMES: Final = ("allowed", "denied", "blocked", "unavailable", "degraded")
"""The counts of a second, in their order in documents; degraded requests are counted by their outcome as well."""

MAX_PENDING_SECONDS: Final = 10
MAX_CLIENTS: Final = 10_000
"""Clients of one second; the requests of others are counted without a client."""
MAX_NEAR: Final = 2_000
MAX_SAMPLES: Final = 16
"""Sampled requests per client and second."""

Client: TypeAlias = tuple[str, str]
"""A kind of identity and a value. Never reported, and kept for a minute at most."""


EXACT_US: Final = 8
BUCKETS: Final = EXACT_US + 4 * 21


def bucket_of(duration_us: int) -> int:
    """The bucket of a duration."""
    if duration_us < EXACT_US:
        return max(duration_us, 0)
    doublings = duration_us.bit_length() - 3
    return min(EXACT_US + 4 * (doublings - 1) + (duration_us >> doublings) - 4, BUCKETS - 1)


BUCKET_TABLE: Final = bytes([bucket_of(duration_us) for duration_us in range(16_384)])
"""The buckets of common durations."""


def quantile(counts: Mapping[int, int], share: float) -> int | None:
    """The latency that a share of the requests did not exceed, interpolated within its bucket; None without any."""
    rank = share * sum(counts.values())
    cumulative = 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if cumulative + count >= rank and count:
            low, width = _lower_bound_us(bucket), _lower_bound_us(bucket + 1) - _lower_bound_us(bucket)
            return low + round((width - 1) * max(0.0, rank - cumulative) / count)
        cumulative += count
    return None


def _lower_bound_us(bucket: int) -> int:
    if bucket < EXACT_US:
        return bucket
    doublings, quarter = divmod(bucket - EXACT_US, 4)
    return (4 + quarter) << (doublings + 1)


class NearLimitMark(NamedTuple):
    """A counter with little left."""

    left: int
    capacity: int
    at_us: int
    key: Key


@dataclass(slots=True)
class ClientRequests:
    """The requests of one client in one second."""

    who: Identities
    allowed: int = 0
    denied: int = 0
    rejected: int = 0
    """Those that no limit denied: blocked, or unavailable."""
    samples: list[tuple[list[str], str, str]] | None = None
    """User agents, path and address of sampled requests."""


class Second:
    """The decisions of one second."""

    __slots__ = ("blocked", "clients", "degraded", "latency", "number", "others", "start_us", "unavailable")

    def __init__(self, number: int) -> None:
        self.number = number
        """Since 1970, by the gate's clock."""
        self.start_us = number * SECOND_US
        self.blocked = self.unavailable = self.degraded = 0
        self.latency = [0] * BUCKETS
        self.clients: dict[Client, ClientRequests] = {}
        self.others = ClientRequests({})
        """The requests of clients beyond `MAX_CLIENTS`."""

    @property
    def counts(self) -> list[int]:
        """The counts in the order of `OUTCOMES`."""
        clients = [self.others, *self.clients.values()]
        allowed, denied = sum([each.allowed for each in clients]), sum([each.denied for each in clients])
        return [allowed, denied, self.blocked, self.unavailable, self.degraded]


class SecondRollups:
    """Rolls up events by second, until `take` fetches the complete seconds."""

    def __init__(self, now_us: int) -> None:
        self._lock = threading.Lock()
        self._second = Second(now_us // SECOND_US)
        self._complete: list[Second] = []
        self.near: dict[tuple[str, str], NearLimitMark] = {}
        """Counters with a tenth of their limit left, or less, by limit and identity."""

    @property
    def has_decisions(self) -> bool:
        """True if anything was counted since seconds were last taken."""
        return bool(self._second.clients or any(second.clients for second in self._complete))

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        with self._lock:
            for event in events:
                self._count(event)

    def take(self, now_us: int) -> list[Second]:
        """The seconds that are complete and were not taken before."""
        with self._lock:
            self._second_of(now_us)
            complete, self._complete = self._complete, []
            return complete

    def forget_near(self, before_us: int) -> None:
        """Remove the marks that are older than a time."""
        with self._lock:
            self.near = {at: mark for at, mark in self.near.items() if mark.at_us >= before_us}

    def _count(self, event: DecisionEvent) -> None:
        received_us, duration_us, _, outcome, (_, keys, _, _, who, _, _, _), decision, _, sample, *_ = event
        now_us = received_us + duration_us
        second = self._second_of(now_us)
        is_common = 0 <= duration_us < len(BUCKET_TABLE)
        second.latency[BUCKET_TABLE[duration_us] if is_common else bucket_of(duration_us)] += 1
        kind = "ip" if len(who) == 2 and "ip" in who else client_kind(who)
        client = kind, who[kind]
        requests = second.clients.get(client)
        if requests is None:
            requests = second.others
            if len(second.clients) < MAX_CLIENTS:
                requests = second.clients[client] = ClientRequests(who)
        if outcome == "allowed":
            requests.allowed += 1
        elif outcome == "denied":
            requests.denied += 1
        else:
            requests.rejected += 1
            if outcome == "blocked":
                second.blocked += 1
            else:
                second.unavailable += 1
        if sample is not None:
            requests.samples = requests.samples or []
            if len(requests.samples) < MAX_SAMPLES:
                requests.samples.append((*sample, who["address"]))
        if decision is None:
            return
        if decision.degraded is not None:
            second.degraded += 1  # its numbers are not the store's
            return
        near = self.near
        for key, verdict in zip(keys, decision[2], strict=True):
            limit, _, identity = key
            if verdict[0] * 10 <= limit.capacity:
                at = limit.name, identity
                if len(near) < MAX_NEAR or at in near:
                    near[at] = NearLimitMark(verdict[0], limit.capacity, now_us, key)
            elif near:
                near.pop((limit.name, identity), None)

    def _second_of(self, now_us: int) -> Second:
        """The second that a time belongs to: the current one, or another that becomes current.

        Threads may deliver events slightly out of order; those of the second before count in the current one. An
        earlier time means that the clock was set back.
        """
        if not -SECOND_US <= now_us - self._second.start_us < SECOND_US:
            self._complete.append(self._second)
            del self._complete[:-MAX_PENDING_SECONDS]
            self._second = Second(now_us // SECOND_US)
        return self._second


MAX_REPORTED_CLIENTS: Final = 1_000
"""Clients in the document of a minute: the busiest."""
MAX_COUNTED_CLIENTS: Final = 4_000
"""Clients that are counted in a minute; beyond, those with the fewest requests are dropped."""
MIN_SKETCHED_REQUESTS: Final = 20
"""Requests per minute from which on a client's sketch is reported."""
SKETCH_BITS: Final = 256
MAX_COUNTED_BITS: Final = 16
"""The entries of the requests by agent, and of those by address, that are counted for a client."""
MAX_REPORTED_BITS: Final = 4
"""Of the requests by agent and by address, the entries that a node reports."""


class TrafficSketch:
    """Estimates the numbers of distinct user agents, addresses and paths (linear counting in bitmaps of 256 bits), and
    the requests of the busiest agent and address.

    Bitmaps use the same hash on all nodes, so that sketches can be merged.

    >>> sketch = TrafficSketch.of([("curl", "203.0.113.9", "/"), ("curl", "203.0.113.9", "/cart")])
    >>> sketch.estimates, sketch.busiest
    ((1, 1, 2), (2, 2))
    """

    __slots__ = ("bitmaps", "looked_at", "requests")

    def __init__(
        self,
        looked_at: int = 0,
        agents: int = 0,
        addresses: int = 0,
        paths: int = 0,
        requests: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
    ) -> None:
        self.looked_at = looked_at
        """The number of sampled requests."""
        self.bitmaps = agents, addresses, paths
        self.requests: tuple[dict[int, int], dict[int, int]] = {**requests[0]}, {**requests[1]}
        """Sampled requests by the bit of their agent, and by that of their address: of the busiest."""

    @classmethod
    def of(cls, requests: Iterable[tuple[str, str, str]]) -> TrafficSketch:
        """The sketch of some requests, each a user agent, an address and a path."""
        sketch = cls()
        for agent, address, path in requests:
            bits = _bit(agent), _bit(address)
            sketch.add(cls(1, *bits, _bit(path), ({bits[0].bit_length(): 1}, {bits[1].bit_length(): 1})))
        return sketch

    def add(self, other: TrafficSketch) -> None:
        """Merge another sketch into this one."""
        self.looked_at += other.looked_at
        agents, addresses, paths = [one | more for one, more in zip(self.bitmaps, other.bitmaps, strict=True)]
        self.bitmaps = agents, addresses, paths
        for requests, others in zip(self.requests, other.requests, strict=True):
            for bit, count in others.items():
                requests[bit] = requests.get(bit, 0) + count
            if len(requests) > MAX_COUNTED_BITS:  # one that sent most of the requests always stays
                kept = heapq.nlargest(MAX_COUNTED_BITS // 2, requests.items(), key=lambda item: item[1])
                requests.clear()
                requests.update(kept)

    @property
    def busiest(self) -> tuple[int, int]:
        """The sampled requests of the busiest agent, and of the busiest address: at least so many as they sent."""
        agents, addresses = self.requests
        return max(agents.values(), default=0), max(addresses.values(), default=0)

    @property
    def estimates(self) -> tuple[int, int, int]:
        """The numbers of distinct agents, addresses and paths: mostly exact below 10."""
        agents, addresses, paths = map(_estimate, self.bitmaps)
        return agents, addresses, paths


def _bit(text: str) -> int:
    """The bit of a string. Multiplied, as a checksum alone spreads similar strings too evenly."""
    return 1 << (crc32(text.encode("utf-8", "surrogatepass")) * 2_654_435_761 >> 24 & 255)


def _estimate(bitmap: int) -> int:
    unset = SKETCH_BITS - bitmap.bit_count()
    return round(SKETCH_BITS * math.log(SKETCH_BITS / max(unset, 0.5)))


class BusyClient(NamedTuple):
    """The requests of a client in one minute, as reported by a node."""

    kind: str
    key: str
    label: str
    requests: int
    traits: TrafficSketch | None
    """None for clients with few requests."""


@dataclass(slots=True)
class _CountedClient:
    who: Identities
    count: int = 0
    sketch: TrafficSketch = field(default_factory=TrafficSketch)

    def row(self, name: Callable[[Identities], Pseudonym]) -> list[Any]:
        row: list[Any] = [*name(self.who)[:3], self.count]
        if self.sketch.looked_at and self.count >= MIN_SKETCHED_REQUESTS:
            row += [self.sketch.looked_at, *[f"{bitmap:x}" for bitmap in self.sketch.bitmaps]]
            row += [[*most_of(requests)] for requests in self.sketch.requests]
        return row


class MinuteRollup:
    """The clients of the current minute. Not thread-safe."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The minute since 1970, by the node's clock; None before the first second."""
        self.total = 0
        self._clients: dict[Client, _CountedClient] = {}

    def add(self, second: Second) -> bool:
        """Add a second; False, without effect, if it belongs to another minute than the ones before."""
        number = second.number // 60
        if self.number is None:
            self.number = number
        elif number != self.number:
            return False
        for client, requests in second.clients.items():
            counted = self._clients.get(client)
            if counted is None:
                counted = self._clients[client] = _CountedClient(requests.who)
            count = requests.allowed + requests.denied + requests.rejected
            counted.count += count
            self.total += count
            if requests.samples:
                seen = [(agents[0] if agents else "", address, path) for agents, path, address in requests.samples]
                counted.sketch.add(TrafficSketch.of(seen))
        if len(self._clients) > MAX_COUNTED_CLIENTS:
            most = heapq.nlargest(MAX_COUNTED_CLIENTS // 2, self._clients.items(), key=lambda item: item[1].count)
            self._clients = dict(most)
        return True

    def document(self, name: Callable[[Identities], Pseudonym], **fields: Any) -> bytes:
        """The document of the minute, in which `name` gives the pseudonyms of clients."""
        busiest = heapq.nlargest(MAX_REPORTED_CLIENTS, self._clients.values(), key=lambda counted: counted.count)
        return encode({**fields, "v": 1, "minute": self.number, "clients": [each.row(name) for each in busiest]})


def most_of(requests: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The entries with the largest counts."""
    yield from heapq.nlargest(MAX_REPORTED_BITS, requests.items(), key=lambda item: item[1])


def encode(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def read_minute(document: bytes) -> tuple[Mapping[str, Any], list[BusyClient]]:
    """The fields and the clients of a minute's document. Raises ValueError for an invalid one."""
    try:
        fields = json.loads(document)
        if fields["v"] != 1 or type(fields["minute"]) is not int or type(fields["at_us"]) is not int:
            raise ValueError("not the document of a minute")
        return fields, [_busy_client(*row) for row in fields["clients"][:MAX_REPORTED_CLIENTS]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not the document of a minute") from error


def _counts_of(entries: list[list[int]]) -> dict[int, int]:
    return {int(bit): max(0, min(int(count), 2**53)) for bit, count in entries[:MAX_REPORTED_BITS]}


def _busy_client(kind: str, key: str, label: str, count: int, *sketch: Any) -> BusyClient:
    if not (isinstance(kind, str) and isinstance(key, str) and isinstance(label, str) and type(count) is int):
        raise TypeError("not a client")
    traits = None
    if sketch:
        looked_at, *bitmaps = sketch[:4]
        agents, addresses, paths = [int(bitmap, 16) & ((1 << SKETCH_BITS) - 1) for bitmap in bitmaps]
        by_agent, by_address = [_counts_of(entries) for entries in sketch[4:]] or ({}, {})
        traits = TrafficSketch(int(looked_at), agents, addresses, paths, (by_agent, by_address))
    return BusyClient(kind[:50], key[:100], label[:200], max(0, min(count, 2**53)), traits)
