"""Topologies: which server has a key. A standalone server, the primary of a Sentinel set, or a slot of a cluster.

Pure, like `batch_protocol`: discovery yields commands for a driver to send. Threads may share a topology: what it knows
is replaced as a whole, and stays in use until something better is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from redis.crc import key_slot

from headgate.errors import StoreUnavailable
from headgate.stores.redis.encoding import NO_KEYS, Command, Node

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterable, Sequence

__all__ = ["Cluster", "Sentinel", "Standalone", "Topology"]

SLOTS: Final = 16_384


class Topology(Protocol):
    can_move: bool
    """True if another discovery can find a server elsewhere."""

    def discover(self) -> Generator[list[Command], None, None]:
        """Find the servers, unless they are known; raises StoreUnavailable."""

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        """Find the servers again. Suspects, which may not reply, are asked last."""

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        """Discover again before the next command, and ask suspects last."""

    def locate(self, command: Command) -> None:
        """Set the server of a command."""

    def primaries(self) -> list[Node | None]:
        """The servers with keys, as far as they are known; None stands for the only one."""


class Standalone:
    """One server at a fixed address."""

    can_move = False

    def discover(self) -> Generator[list[Command], None, None]:
        yield from ()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        yield from ()

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        pass

    def locate(self, command: Command) -> None:
        command.node = None

    def primaries(self) -> list[Node | None]:
        return [None]


class Sentinel:
    """The primary of that name, as told by the sentinels."""

    can_move = True

    def __init__(self, sentinels: Sequence[Node], service: str) -> None:
        self._sentinels = list(sentinels)
        self._service = service
        self._primary: Node | None = None
        self._stale = True

    def discover(self) -> Generator[list[Command], None, None]:
        if self._stale:
            yield from self.refresh()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        reason = "no sentinel was asked"
        for sentinel in _sort_suspects_last(self._sentinels, suspects):
            args = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            command = Command(None, NO_KEYS, args, expects=(list, type(None)))
            command.node = sentinel
            yield [command]
            primary = _read_primary(command.reply)
            if primary is not None:
                self._primary = primary
                self._stale = False
                # This one is asked first the next time.
                self._sentinels = list(dict.fromkeys((sentinel, *self._sentinels)))
                return
            reason = str(command.reply) if command.reply is not None else f"it knows no primary named {self._service!r}"
        raise StoreUnavailable(f"no sentinel could name the primary of {self._service!r}; the last one: {reason}")

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        self._stale = True

    def locate(self, command: Command) -> None:
        command.node = self._primary

    def primaries(self) -> list[Node | None]:
        return [] if self._primary is None else [self._primary]


class Cluster:
    """A Redis Cluster, by its own map of slots."""

    can_move = True

    def __init__(self, seeds: Sequence[Node]) -> None:
        self._known = list(seeds)
        self._slots: dict[int, Node] = {}
        self._stale = True

    def discover(self) -> Generator[list[Command], None, None]:
        if self._stale:
            yield from self.refresh()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        reason = "no server was asked"
        for node in _sort_suspects_last(self._known, suspects):
            command = Command(None, NO_KEYS, ("CLUSTER", "SLOTS"), expects=list)
            command.node = node
            yield [command]
            if self._learn(command.reply, node):
                return
            reason = str(command.reply)
            # Later discoveries ask it last, too.
            self._known = _sort_suspects_last(self._known, (node,))
        raise StoreUnavailable(f"no server of the cluster could tell its slots; the last one: {reason}")

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        self._known = _sort_suspects_last(self._known, suspects)
        self._stale = True

    def locate(self, command: Command) -> None:
        slot = _slot(command.keys.first)
        node = self._slots.get(slot)
        if node is None:
            raise StoreUnavailable(f"no server of the cluster serves slot {slot}")
        command.node = node

    def primaries(self) -> list[Node | None]:
        return list(dict.fromkeys(list(self._slots.values())))

    def servers_of(self, names: Iterable[str]) -> frozenset[Node | None]:
        """The servers with these keys; None stands for an unknown one."""
        return frozenset([self._slots.get(_slot(name)) for name in names])

    def serves(self, node: Node | None, key: str) -> bool:
        """True if the key is on that server."""
        return self._slots.get(_slot(key)) == node

    def record_move(self, slot: int, node: Node) -> None:
        self._slots[slot] = node

    def _learn(self, ranges: Any, asked: Node) -> bool:
        """Use a map of slots; False if it is malformed."""
        slots: dict[int, Node] = {}
        known: dict[Node, None] = {}
        try:
            for first, last, primary, *replicas in ranges:
                # A server that does not know its own host name leaves it empty.
                nodes = [
                    Node(name.decode() if name else asked.host, int(port)) for name, port, *_ in (primary, *replicas)
                ]
                if not 0 <= first <= last < SLOTS:
                    return False
                slots.update(dict.fromkeys(range(first, last + 1), nodes[0]))
                known.update(dict.fromkeys(nodes))
        except (AttributeError, TypeError, ValueError):
            return False
        if not slots:
            return False
        self._slots = slots
        self._stale = False
        self._known = list(dict.fromkeys((*known, *self._known)))
        return True


def _read_primary(reply: Any) -> Node | None:
    """The address in the reply of a sentinel, or None."""
    try:
        host, port = reply
        return Node(host.decode(), int(port))
    except (AttributeError, TypeError, ValueError):
        return None


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _sort_suspects_last(nodes: Iterable[Node], suspects: Container[Node | None]) -> list[Node]:
    return sorted(nodes, key=lambda node: node in suspects)
