"""Which server a key lives on, asked of the servers themselves: one for all, the primary of a Sentinel set, or a
slot of a cluster.

Pure, like the conversation that uses it: what must be asked is yielded as commands, for either kind of driver to send.
Several drivers may use one at the same time, threads among them: what is known is replaced whole, and stays in use
until something better is known.
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
"""Slots of a cluster."""


class Topology(Protocol):
    moves: bool
    """Whether asking anew can find a server elsewhere."""

    def discover(self) -> Generator[list[Command], None, None]:
        """Learn where the servers are, if that is not known; raises StoreUnavailable when nobody can tell."""

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        """Learn it anew, in any case. Suspects, who may not answer, are asked last."""

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        """What was known may be wrong: ask again before the next command, and suspects last."""

    def locate(self, command: Command) -> None:
        """Say which server the command goes to."""

    def primaries(self) -> list[Node | None]:
        """The servers that have keys, as far as they are known; None stands for the only one there is."""


class Standalone:
    """One server at a fixed address."""

    moves = False

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
    """The primary of that name, wherever the sentinels say it is."""

    moves = True

    def __init__(self, sentinels: Sequence[Node], service: str) -> None:
        self._sentinels = list(sentinels)
        self._service = service
        self._primary: Node | None = None
        self._stale = True

    def discover(self) -> Generator[list[Command], None, None]:
        if self._stale:
            yield from self.refresh()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        told = "no sentinel was asked"
        for sentinel in _suspects_last(self._sentinels, suspects):
            words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            command = Command(None, NO_KEYS, words, expects=(list, type(None)))
            command.node = sentinel
            yield [command]
            primary = _read_primary(command.reply)
            if primary is not None:
                self._primary = primary
                self._stale = False
                # Whoever knew is asked first the next time.
                self._sentinels = list(dict.fromkeys((sentinel, *self._sentinels)))
                return
            told = str(command.reply) if command.reply is not None else f"it knows no primary named {self._service!r}"
        raise StoreUnavailable(f"no sentinel could name the primary of {self._service!r}; the last one: {told}")

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        self._stale = True

    def locate(self, command: Command) -> None:
        command.node = self._primary

    def primaries(self) -> list[Node | None]:
        return [] if self._primary is None else [self._primary]


class Cluster:
    """Slots over several primaries, by the cluster's own map."""

    moves = True

    def __init__(self, seeds: Sequence[Node]) -> None:
        self._known = list(seeds)
        self._slots: dict[int, Node] = {}
        self._stale = True

    def discover(self) -> Generator[list[Command], None, None]:
        if self._stale:
            yield from self.refresh()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        told = "no server was asked"
        for node in _suspects_last(self._known, suspects):
            command = Command(None, NO_KEYS, ("CLUSTER", "SLOTS"), expects=list)
            command.node = node
            yield [command]
            if self._learn(command.reply, node):
                return
            told = str(command.reply)
            # Whoever comes next has no time to lose on it, either.
            self._known = _suspects_last(self._known, (node,))
        raise StoreUnavailable(f"no server of the cluster could tell its slots; the last one: {told}")

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        self._known = _suspects_last(self._known, suspects)
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
        """The servers on which these keys live; None stands for one that is not known."""
        return frozenset([self._slots.get(_slot(name)) for name in names])

    def serves(self, node: Node | None, key: str) -> bool:
        """Whether the key lives on that server."""
        return self._slots.get(_slot(key)) == node

    def moved(self, slot: int, node: Node) -> None:
        self._slots[slot] = node

    def _learn(self, ranges: Any, asked: Node) -> bool:
        """Use the map that a server gave, if it is one."""
        slots: dict[int, Node] = {}
        known: dict[Node, None] = {}
        try:
            for first, last, primary, *replicas in ranges:
                # A server that does not know its own name leaves it empty: it is the one that we are talking to.
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
    """The address that a sentinel gave; None if it gave none."""
    try:
        host, port = reply
        return Node(host.decode(), int(port))
    except (AttributeError, TypeError, ValueError):
        return None


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _suspects_last(nodes: Iterable[Node], suspects: Container[Node | None]) -> list[Node]:
    return sorted(nodes, key=lambda node: node in suspects)
