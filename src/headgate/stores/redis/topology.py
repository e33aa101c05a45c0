"""Topologies: which server has a key. A standalone server, the primary of a Sentinel set, or a slot of a cluster.

Pure, like `batch_protocol`: discovery yields commands for a driver to send. Threads may share a topology: what it knows
is replaced as a whole, and stays in use until something better is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.crc import key_slot

from headgate.errors import StoreUnavailable
from headgate.stores.redis.encoding import NO_KEYS, Command, Node

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterable, Sequence

__all__ = ["Cluster", "Sentinel", "Standalone", "Topology"]

SLOTS: Final = 16_384


class Topology:
    """One server at a fixed address; the base of topologies whose servers are discovered."""

    can_move = False
    """True if another discovery can find a server elsewhere."""

    def discover(self) -> Generator[list[Command], None, None]:
        """Find the servers, unless they are known; raises StoreUnavailable."""
        yield from ()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        """Find the servers again. Suspects, which may not reply, are asked last."""
        yield from ()

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        """Discover again before the next command, and ask suspects last."""

    def locate(self, command: Command) -> None:
        """Set the server of a command."""
        command.node = None

    def primaries(self) -> list[Node | None]:
        """The servers with keys, as far as they are known; None stands for the only one."""
        return [None]


class Standalone(Topology):
    """One server at a fixed address."""


class _Discovered(Topology):
    """A topology that is discovered by asking one node after the other."""

    can_move = True
    query: tuple[str, ...]
    expects: type | tuple[type, ...] = list
    failure: str

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._is_stale = True

    def discover(self) -> Generator[list[Command], None, None]:
        if self._is_stale:
            yield from self.refresh()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        reason = "no server was asked"
        for node in _sort_suspects_last(self._nodes, suspects):
            command = Command(None, NO_KEYS, self.query, expects=self.expects)
            command.node = node
            yield [command]
            if self._learn(command.reply, node):
                self._is_stale = False
                return
            reason = "it does not know it" if command.reply is None else str(command.reply)
            # Later discoveries ask it last, too.
            self._nodes = _sort_suspects_last(self._nodes, (node,))
        raise StoreUnavailable(f"{self.failure}; the last one: {reason}")

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        self._nodes = _sort_suspects_last(self._nodes, suspects)
        self._is_stale = True

    def _learn(self, reply: Any, node: Node) -> bool:
        """Use the reply of a node; False if it is malformed."""
        raise NotImplementedError


class Sentinel(_Discovered):
    """The primary of that name, as told by the sentinels."""

    expects = (list, type(None))

    def __init__(self, sentinels: Sequence[Node], service: str) -> None:
        super().__init__(sentinels)
        self.query = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        self.failure = f"no sentinel could name the primary of {service!r}"
        self._primary: Node | None = None

    def locate(self, command: Command) -> None:
        command.node = self._primary

    def primaries(self) -> list[Node | None]:
        return [] if self._primary is None else [self._primary]

    def _learn(self, reply: Any, node: Node) -> bool:
        try:
            host, port = reply
            self._primary = Node(host.decode(), int(port))
        except (AttributeError, TypeError, ValueError):
            return False
        return True


class Cluster(_Discovered):
    """A Redis Cluster, by its own map of slots."""

    query = ("CLUSTER", "SLOTS")
    failure = "no server of the cluster could tell its slots"

    def __init__(self, seeds: Sequence[Node]) -> None:
        super().__init__(seeds)
        self._slots: dict[int, Node] = {}

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

    def _learn(self, reply: Any, node: Node) -> bool:
        slots: dict[int, Node] = {}
        known: dict[Node, None] = {}
        try:
            for first, last, primary, *replicas in reply:
                # A server that does not know its own host name leaves it empty.
                nodes = [
                    Node(name.decode() if name else node.host, int(port)) for name, port, *_ in (primary, *replicas)
                ]
                if not 0 <= first <= last < SLOTS:
                    return False
                slots.update(dict.fromkeys(range(first, last + 1), nodes[0]))
                known.update(dict.fromkeys(nodes))
        except (AttributeError, TypeError, ValueError):
            return False
        if slots:
            self._slots = slots
            self._nodes = list(dict.fromkeys((*known, *self._nodes)))
        return bool(slots)


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _sort_suspects_last(nodes: Iterable[Node], suspects: Container[Node | None]) -> list[Node]:
    return sorted(nodes, key=lambda node: node in suspects)
