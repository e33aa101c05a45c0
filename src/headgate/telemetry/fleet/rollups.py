"""What a gate decides, counted by the second and by client: on every request, and bounded whatever comes."""

from __future__ import annotations

import heapq
import json
import math
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from headgate.policy.snapshot import CLIENT_KINDS

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headgate.gate.base import GateBase
    from headgate.gate.event_stream import DecisionEvent
    from headgate.keys import Key
    from headgate.policy.snapshot import Who
    from headgate.telemetry.pseudonyms import Pseudonym

__all__ = [
    "MINUTE_US",
    "MOST_TOLD",
    "OUTCOMES",
    "SAMPLE_SHARE",
    "BusyClient",
    "Client",
    "ClientRequests",
    "MinuteRollup",
    "NearMark",
    "Second",
    "SecondRollups",
    "TrafficSketch",
    "bucket_of",
    "quantile",
    "read_minute",
]

OUTCOMES: Final = ("allowed", "denied", "blocked", "unavailable", "degraded")
"""What is counted of a second, in this order; the last one beside the others."""

SECOND_US: Final = 1_000_000
MOST_WAITING: Final = 10
"""Seconds that wait to be taken, should nobody take them."""
MOST_CLIENTS: Final = 10_000
"""In one second. One process does not decide more in a second: those beyond are counted, but by nobody's name."""
MOST_NEAR: Final = 2_000
SAMPLE_SHARE: Final = 0.125
"""The share of requests of which user agent, address and path are looked at."""
MOST_SEEN: Final = 16
"""So many of one client in one second: from then on it looks the same."""

Client: TypeAlias = tuple[str, str]
"""A kind of identity, and a value: never shown, and never kept for longer than a minute."""
NearMark: TypeAlias = "tuple[int, int, int, Key]"
"""What was left, of how much, when that was said, and the counter: a request meets several, each of somebody else."""


# ------------------------------------------------------------------ latency
# Exact below 8 microseconds; from there on four parts in each doubling, so that no part is wider than a quarter.

EXACTLY: Final = 8
BUCKETS: Final = EXACTLY + 4 * 21


def bucket_of(took_us: int) -> int:
    """The part of the scale in which so many microseconds lie."""
    if took_us < EXACTLY:
        return max(took_us, 0)
    doublings = took_us.bit_length() - 3
    return min(EXACTLY + 4 * (doublings - 1) + (took_us >> doublings) - 4, BUCKETS - 1)


def _low_us(bucket: int) -> int:
    """The least that lies in a part of the scale."""
    if bucket < EXACTLY:
        return bucket
    doublings, part = divmod(bucket - EXACTLY, 4)
    return (4 + part) << (doublings + 1)


_QUICK_US: Final = 16_384
_bucket: Final = bytes([bucket_of(took_us) for took_us in range(_QUICK_US)])
"""The part for each of the usual numbers, found at once."""


def quantile(counts: dict[int, int], share: float) -> int | None:
    """The latency that such a share of requests had at most, in microseconds; None without any."""
    rank = share * sum(counts.values())
    below = 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if below + count >= rank and count:
            low, width = _low_us(bucket), _low_us(bucket + 1) - _low_us(bucket)
            return low + round((width - 1) * max(0.0, rank - below) / count)
        below += count
    return None


# ------------------------------------------------------------------ counting


class ClientRequests:
    """The requests of one client in one second."""

    __slots__ = ("allowed", "denied", "kept_out", "seen", "who")

    def __init__(self, who: Who) -> None:
        self.allowed = self.denied = self.kept_out = 0
        """The last are those that no limit denied: blocked, or turned away while the store was away."""
        self.who = who
        self.seen: list[tuple[list[str], str, str]] | None = None
        """User agents, path and address of some of them."""


class Second:
    """What was decided in one second."""

    __slots__ = (
        "blocked",
        "clients",
        "degraded",
        "ends_us",
        "latency",
        "nameless",
        "number",
        "start_us",
        "unavailable",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        """Since 1970, by the gate's clock."""
        self.start_us, self.ends_us = number * SECOND_US, (number + 1) * SECOND_US
        self.blocked = self.unavailable = self.degraded = 0
        self.latency = [0] * BUCKETS
        self.clients: dict[Client, ClientRequests] = {}
        self.nameless = ClientRequests({})
        """Those of all clients beyond the bound."""

    @property
    def counts(self) -> list[int]:
        """What was counted, in the order of `OUTCOMES`."""
        allowed, denied = self.nameless.allowed, self.nameless.denied
        for visits in self.clients.values():
            allowed += visits.allowed
            denied += visits.denied
        return [allowed, denied, self.blocked, self.unavailable, self.degraded]


class SecondRollups:
    """Counts the decisions of a gate; whoever tells of them takes what is complete."""

    def __init__(self, gate: weakref.ref[GateBase]) -> None:
        self._gate = gate
        self.begin()

    def begin(self) -> None:
        """Know nothing yet."""
        gate = self._gate()
        now_us = 0 if gate is None else gate.now_us()
        self._lock = threading.Lock()
        self._second = Second(now_us // SECOND_US)
        self._complete: list[Second] = []
        self.near: dict[Any, NearMark] = {}
        """Who has little left, by limit and counter."""

    @property
    def has_decided(self) -> bool:
        """Whether there was anything to count since the seconds were taken last."""
        return bool(self._second.clients or any(second.clients for second in self._complete))

    def observe(self, events: Sequence[DecisionEvent]) -> None:
        """Count a batch of decisions."""
        with self._lock:
            for event in events:
                self._count(event)

    def _count(self, event: DecisionEvent) -> None:
        received_us, took_us, _, outcome, resolution, decision, _, sample = event
        now_us = received_us + took_us
        _, keys, _, _, who, _, _, _ = resolution
        if len(who) == 2:  # an address, and nothing else that it could be known by
            client = "ip", who["ip"]
        else:
            for kind in CLIENT_KINDS:
                if value := who.get(kind):
                    break
            client = kind, value or ""
        second = self._second
        if not second.start_us <= now_us < second.ends_us:
            second = self._turn(now_us)
        # The clock may have been set meanwhile.
        second.latency[_bucket[took_us] if 0 <= took_us < _QUICK_US else bucket_of(took_us)] += 1
        visits = second.clients.get(client)
        if visits is None:
            visits = second.nameless
            if len(second.clients) < MOST_CLIENTS:
                visits = second.clients[client] = ClientRequests(who)
        if outcome == "allowed":
            visits.allowed += 1
        elif outcome == "denied":
            visits.denied += 1
        else:
            visits.kept_out += 1
            if outcome == "blocked":
                second.blocked += 1
            else:
                second.unavailable += 1
        if sample is not None:
            if visits.seen is None:
                visits.seen = []
            if len(visits.seen) < MOST_SEEN:
                visits.seen.append((*sample, who["address"]))
        if decision is None:
            return
        if decision[4] is not None:
            second.degraded += 1
            return  # what is said of limits then, the store does not know of
        near = self.near
        for key, verdict in zip(keys, decision[2], strict=True):
            limit, _, identity = key
            left = verdict[0]
            if left * 10 <= limit.capacity:
                mark = limit.name, identity
                if len(near) < MOST_NEAR or mark in near:
                    near[mark] = left, limit.capacity, now_us, key
            elif near:
                near.pop((limit.name, identity), None)

    def take(self, now_us: int) -> list[Second]:
        """The seconds that are over, and were not taken before."""
        with self._lock:
            if not self._second.start_us <= now_us < self._second.ends_us:
                self._turn(now_us)
            complete, self._complete = self._complete, []
            return complete

    def forget_near(self, before_us: int) -> None:
        """Believe nothing any more that was said before then."""
        # Copied at once, and looked at without keeping requests waiting.
        old = [mark for mark, (_, _, at_us, _) in list(self.near.items()) if at_us < before_us]
        with self._lock:
            for mark in old:
                if self.near.get(mark, (0, 0, before_us))[2] < before_us:
                    del self.near[mark]

    def _turn(self, now_us: int) -> Second:
        """Another second begins: also one that has been, if the clock was set back."""
        self._complete.append(self._second)
        del self._complete[:-MOST_WAITING]
        self._second = Second(now_us // SECOND_US)
        return self._second


MINUTE_US: Final = 60_000_000
MOST_TOLD: Final = 1_000
"""Clients of which a node tells in a minute."""
MOST_COUNTED: Final = 4_000
"""Clients that are counted in a minute; when there are more, those with the fewest requests make room."""
LOUD: Final = 20
"""Requests in a minute from which on it may matter what they are like."""
MARKS: Final = 256


class TrafficSketch:
    """How many different user agents, addresses and paths there were, as marks in a field of 256.

    Fields are the same on all nodes, so that those of several add up.

    >>> TrafficSketch.of([("curl", "203.0.113.9", "/"), ("curl", "203.0.113.9", "/cart")]).estimates
    (1, 1, 2)
    """

    __slots__ = ("addresses", "agents", "looked_at", "paths")

    def __init__(self, looked_at: int = 0, agents: int = 0, addresses: int = 0, paths: int = 0) -> None:
        self.looked_at = looked_at
        """How many requests the marks are from."""
        self.agents, self.addresses, self.paths = agents, addresses, paths

    @classmethod
    def of(cls, requests: Iterable[tuple[str, str, str]]) -> TrafficSketch:
        """Those of some requests, each with its user agent, address and path."""
        made = cls()
        for agent, address, path in requests:
            made.mark(agent, address, path)
        return made

    def mark(self, agent: str, address: str, path: str) -> None:
        self.looked_at += 1
        self.agents |= _mark(agent)
        self.addresses |= _mark(address)
        self.paths |= _mark(path)

    def add(self, other: TrafficSketch) -> None:
        """Take the requests of another one in."""
        self.looked_at += other.looked_at
        self.agents |= other.agents
        self.addresses |= other.addresses
        self.paths |= other.paths

    @property
    def estimates(self) -> tuple[int, int, int]:
        """How many different agents, addresses and paths there were: mostly exact below 10, and near above."""
        return _estimate(self.agents), _estimate(self.addresses), _estimate(self.paths)


def _mark(text: str) -> int:
    """One of 256 places. A checksum alone spreads texts that are alike too evenly, so that there seem to be more."""
    return 1 << (crc32(text.encode("utf-8", "surrogatepass")) * 2_654_435_761 >> 24 & 255)


def _estimate(marks: int) -> int:
    """How many different texts have made so many marks: some fell on the same place."""
    free = MARKS - marks.bit_count()
    return round(MARKS * math.log(MARKS / max(free, 0.5)))


class BusyClient(NamedTuple):
    """A client in one minute, as a node tells of it."""

    kind: str
    key: str
    label: str
    requests: int
    traits: TrafficSketch | None
    """None of those who sent little."""


class _Counted:
    __slots__ = ("count", "traits", "who")

    def __init__(self, who: Who) -> None:
        self.count = 0
        self.who = who
        self.traits: TrafficSketch | None = None


class MinuteRollup:
    """The clients of the minute that runs, out of its seconds. Belongs to one thread."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The minute since 1970, by the node's clock; None before the first second."""
        self._clients: dict[Client, _Counted] = {}
        self.total = 0

    def add(self, second: Second) -> bool:
        """Count a second in; False, and nothing is done, if it belongs to another minute than those before."""
        number = second.number // 60
        if self.number is None:
            self.number = number
        elif number != self.number:
            return False
        clients = self._clients
        for client, visits in second.clients.items():
            counted = clients.get(client)
            if counted is None:
                counted = clients[client] = _Counted(visits.who)
            number = visits.allowed + visits.denied + visits.kept_out
            counted.count += number
            self.total += number
            if visits.seen:
                if counted.traits is None:
                    counted.traits = TrafficSketch()
                for agents, path, address in visits.seen:
                    counted.traits.mark(agents[0] if agents else "", address, path)
        if len(clients) > MOST_COUNTED:
            self._make_room()
        return True

    def document(self, named: Callable[[Who], Pseudonym], **about: Any) -> bytes:
        """What is told of the minute."""
        busiest = heapq.nlargest(MOST_TOLD, self._clients.values(), key=lambda counted: counted.count)
        return _written({**about, "v": 1, "minute": self.number, "clients": [_row(each, named) for each in busiest]})

    def _make_room(self) -> None:
        """Whoever comes once, a thousand times over, drives out nobody who comes often."""
        kept = heapq.nlargest(MOST_COUNTED // 2, self._clients.items(), key=lambda item: item[1].count)
        self._clients = dict(kept)


def _row(counted: _Counted, named: Callable[[Who], Pseudonym]) -> list[Any]:
    name, traits = named(counted.who), counted.traits
    row: list[Any] = [name.kind, name.key, name.label, counted.count]
    if traits is not None and counted.count >= LOUD:
        row += [traits.looked_at, f"{traits.agents:x}", f"{traits.addresses:x}", f"{traits.paths:x}"]
    return row


def read_minute(document: bytes) -> tuple[Mapping[str, Any], list[BusyClient]]:
    """What a node has told of a minute: all that it said, and the clients. Raises ValueError for anything else."""
    try:
        said = json.loads(document)
        if said["v"] != 1 or type(said["minute"]) is not int or type(said["at_us"]) is not int:
            raise ValueError("not the word of a node")
        return said, [_busy(*row) for row in said["clients"][:MOST_TOLD]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not the word of a node") from error


def _busy(kind: str, key: str, label: str, count: int, *marks: Any) -> BusyClient:
    if not (isinstance(kind, str) and isinstance(key, str) and isinstance(label, str) and type(count) is int):
        raise TypeError("not a client")
    traits = None
    if marks:
        looked_at, *fields = marks
        agents, addresses, paths = [int(field, 16) & ((1 << MARKS) - 1) for field in fields]
        traits = TrafficSketch(int(looked_at), agents, addresses, paths)
    return BusyClient(kind[:50], key[:100], label[:200], max(0, min(count, 2**53)), traits)


def _written(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()
