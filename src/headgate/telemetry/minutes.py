"""Who sent how much in a minute, and whether it looks like many or like one: what a node tells once a minute.

No more than the busiest are told of, as keyed hashes; of what they sent, only how many different user agents, addresses
and paths there were.
"""

from __future__ import annotations

import heapq
import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headgate.policy.snapshot import Who
    from headgate.telemetry.clients import Named
    from headgate.telemetry.seconds import Client, Second

__all__ = ["MINUTE_US", "MOST_TOLD", "Busy", "Minutes", "Traits", "read_minute"]

MINUTE_US: Final = 60_000_000
MOST_TOLD: Final = 1_000
"""Clients of which a node tells in a minute."""
MOST_COUNTED: Final = 4_000
"""Clients that are counted in a minute; when there are more, those with the fewest requests make room."""
LOUD: Final = 20
"""Requests in a minute from which on it may matter what they are like."""
MARKS: Final = 256


class Traits:
    """How many different user agents, addresses and paths there were, as marks in a field of 256.

    Fields are the same on all nodes, so that those of several add up.

    >>> Traits.of([("curl", "203.0.113.9", "/"), ("curl", "203.0.113.9", "/cart")]).estimates
    (1, 1, 2)
    """

    __slots__ = ("addresses", "agents", "looked_at", "paths")

    def __init__(self, looked_at: int = 0, agents: int = 0, addresses: int = 0, paths: int = 0) -> None:
        self.looked_at = looked_at
        """How many requests the marks are from."""
        self.agents, self.addresses, self.paths = agents, addresses, paths

    @classmethod
    def of(cls, requests: Iterable[tuple[str, str, str]]) -> Traits:
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

    def add(self, other: Traits) -> None:
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


class Busy(NamedTuple):
    """A client in one minute, as a node tells of it."""

    kind: str
    key: str
    label: str
    requests: int
    traits: Traits | None
    """None of those who sent little."""


class _Counted:
    __slots__ = ("count", "traits", "who")

    def __init__(self, who: Who) -> None:
        self.count = 0
        self.who = who
        self.traits: Traits | None = None


class Minutes:
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
                    counted.traits = Traits()
                for agents, path, address in visits.seen:
                    counted.traits.mark(agents[0] if agents else "", address, path)
        if len(clients) > MOST_COUNTED:
            self._make_room()
        return True

    def document(self, named: Callable[[Who], Named], **about: Any) -> bytes:
        """What is told of the minute."""
        busiest = heapq.nlargest(MOST_TOLD, self._clients.values(), key=lambda counted: counted.count)
        return _written({**about, "v": 1, "minute": self.number, "clients": [_row(each, named) for each in busiest]})

    def _make_room(self) -> None:
        """Whoever comes once, a thousand times over, drives out nobody who comes often."""
        kept = heapq.nlargest(MOST_COUNTED // 2, self._clients.items(), key=lambda item: item[1].count)
        self._clients = dict(kept)


def _row(counted: _Counted, named: Callable[[Who], Named]) -> list[Any]:
    name, traits = named(counted.who), counted.traits
    row: list[Any] = [name.kind, name.key, name.label, counted.count]
    if traits is not None and counted.count >= LOUD:
        row += [traits.looked_at, f"{traits.agents:x}", f"{traits.addresses:x}", f"{traits.paths:x}"]
    return row


def read_minute(document: bytes) -> tuple[Mapping[str, Any], list[Busy]]:
    """What a node has told of a minute: all that it said, and the clients. Raises ValueError for anything else."""
    try:
        said = json.loads(document)
        if said["v"] != 1 or type(said["minute"]) is not int or type(said["at_us"]) is not int:
            raise ValueError("not the word of a node")
        return said, [_busy(*row) for row in said["clients"][:MOST_TOLD]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not the word of a node") from error


def _busy(kind: str, key: str, label: str, count: int, *marks: Any) -> Busy:
    if not (isinstance(kind, str) and isinstance(key, str) and isinstance(label, str) and type(count) is int):
        raise TypeError("not a client")
    traits = None
    if marks:
        looked_at, *fields = marks
        agents, addresses, paths = [int(field, 16) & ((1 << MARKS) - 1) for field in fields]
        traits = Traits(int(looked_at), agents, addresses, paths)
    return Busy(kind[:50], key[:100], label[:200], max(0, min(count, 2**53)), traits)


def _written(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()
