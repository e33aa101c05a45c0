"""Topologies: which server has a key. A standalone server, the primary of a Sentinel set, a slot of a cluster, or
several independent deployments, each of which is one of these.

Pure, like `batch_protocol`: discovery yields commands for a driver to send. Threads may share a topology: what it knows
is replaced as a whole, and stays in use until something better is known.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from redis.crc import key_slot

from headgate.errors import StoreError, StoreUnavailable
from headgate.stores.redis.encoding import NO_KEYS, Command, Node
from headgate.stores.redis.rendezvous import RendezvousHash

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Hashable, Iterable, Mapping, Sequence

__all__ = ["Cluster", "Sentinel", "ShardedTopology", "Topology"]

SLOTS: Final = 16_384
MAX_CACHED_OWNERS: Final = 16_384
"""Keys whose shard is cached."""

T = TypeVar("T")


class Topology:
    """One server at a fixed address; the base of topologies whose servers are discovered."""

    can_move = False
    """True if another discovery can find a server elsewhere."""
    has_shards = False
    """True if several servers have keys."""

    def __init__(self, node: Node | None = None) -> None:
        self._node = node

    def discover(self) -> Generator[list[Command], None, None]:
        """Find the servers, unless they are known; raises StoreUnavailable."""
        yield from ()

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        """Find the servers again. Suspects, which may not reply, are asked last."""
        yield from ()

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        """Discover again before the next command, and ask suspects last."""

    def assign(
        self, commands: list[Command], *, discovers: bool = True
    ) -> Generator[list[Command], None, list[Command]]:
        """Set the server of each command; returns the commands that have one. The others get a StoreError as reply."""
        found = []
        try:
            if discovers:
                yield from self.discover()
        except StoreError as error:
            for command in commands:
                command.reply = error
            return []
        for command in commands:
            try:
                self.locate(command)
            except StoreError as error:
                command.reply = error
            else:
                found.append(command)
        return found

    def locate(self, command: Command) -> None:
        """Set the server of a command, as far as it is known; raises StoreUnavailable."""
        command.node = self._node

    def primaries(self) -> list[Node | None]:
        """The servers with keys, as far as they are known; None stands for the only one."""
        return [self._node]

    def server_of(self, name: str) -> Node | None:
        """The server with this key, as far as it is known."""
        return self._node

    def servers_of(self, names: Iterable[str]) -> frozenset[Node | None]:
        """The servers with these keys; None stands for an unknown one."""
        return frozenset([self.server_of(name) for name in names])

    def script_group(self, name: str) -> Hashable:
        """Keys of the same group can be used by one script run."""
        return None

    def part_of(self, node: Node | None) -> Topology:
        """The topology of the deployment to which a server belongs."""
        return self


class _Discovered(Topology):
    """A topology that is discovered by asking one node after the other."""

    can_move = True
    query: tuple[str, ...]
    expects: type | tuple[type, ...] = list
    failure: str

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._is_stale = True

    def name_nodes(self, shard: str) -> None:
        """Set the name of the deployment to which the servers belong."""
        self._nodes = [node._replace(shard=shard) for node in self._nodes]

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
    """The primary of that name, as reported by the sentinels."""

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

    def server_of(self, name: str) -> Node | None:
        return self._primary

    def _learn(self, reply: Any, node: Node) -> bool:
        try:
            host, port = reply
            self._primary = Node(host.decode(), int(port), shard=node.shard)
        except (AttributeError, TypeError, ValueError):
            return False
        return True


class Cluster(_Discovered):
    """A Redis Cluster, by its own map of slots."""

    has_shards = True
    query = ("CLUSTER", "SLOTS")
    failure = "no server of the cluster reported its slots"

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

    def server_of(self, name: str) -> Node | None:
        return self._slots.get(_slot(name))

    def script_group(self, name: str) -> Hashable:
        # While slots migrate, servers accept only commands of a single key at any time.
        return name

    def serves(self, node: Node | None, key: str) -> bool:
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
                    Node(name.decode() if name else node.host, int(port), shard=node.shard)
                    for name, port, *_ in (primary, *replicas)
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


class ShardedTopology(Topology):
    """Independent deployments, by name: rendezvous hashing of the stored key decides which of them has it.

    The first one is the home of the data that is stored once: the block list, the members of the fleet, and the status
    of nodes. So adding a deployment at the end does not move them.
    """

    has_shards = True

    def __init__(self, parts: Mapping[str, Topology]) -> None:
        self.parts = dict(parts)
        self.home = next(iter(self.parts))
        self._hash = RendezvousHash(self.parts)
        self._owner_of = lru_cache(MAX_CACHED_OWNERS)(self._find_owner)

    def shard_of(self, name: str) -> str:
        """The name of the deployment with this key."""
        return self._owner_of(name)

    def refresh(self, suspects: Container[Node | None] = ()) -> Generator[list[Command], None, None]:
        yield from _in_parallel([_ignore_errors(part.refresh(suspects)) for part in self.parts.values()])

    def forget(self, suspects: Container[Node | None] = ()) -> None:
        for part in self.parts.values():
            if any(node in suspects for node in part.primaries()) or not part.primaries():
                part.forget(suspects)

    def assign(
        self, commands: list[Command], *, discovers: bool = True
    ) -> Generator[list[Command], None, list[Command]]:
        by_shard: dict[str, list[Command]] = {}
        for command in commands:
            by_shard.setdefault(self.shard_of(command.keys.first), []).append(command)
        steps = [self.parts[shard].assign(its, discovers=discovers) for shard, its in by_shard.items()]
        found = yield from _in_parallel(steps)
        return [command for its in found for command in its]

    def locate(self, command: Command) -> None:
        self.parts[self.shard_of(command.keys.first)].locate(command)

    def primaries(self) -> list[Node | None]:
        return [node for part in self.parts.values() for node in part.primaries()]

    def server_of(self, name: str) -> Node | None:
        shard = self.shard_of(name)
        # Unknown servers of different deployments are different: calls to one must not wait for another.
        return self.parts[shard].server_of(name) or Node("", 0, shard=shard)

    def script_group(self, name: str) -> Hashable:
        shard = self.shard_of(name)
        return shard, self.parts[shard].script_group(name)

    def part_of(self, node: Node | None) -> Topology:
        return self if node is None else self.parts[node.shard]

    def _find_owner(self, name: str) -> str:
        # Only the names of data that is stored once have a bare "%" after the namespace.
        return self.home if name.partition(":")[2].startswith("%") else self._hash.owner(name)


def _ignore_errors(steps: Generator[list[Command], None, T]) -> Generator[list[Command], None, T | None]:
    try:
        return (yield from steps)
    except StoreError:
        return None


def _in_parallel(steps: Sequence[Generator[list[Command], None, T]]) -> Generator[list[Command], None, list[T]]:
    """Run generators of round trips side by side; returns their results."""
    results: list[T] = []
    while steps:
        commands: list[Command] = []
        running = []
        for step in steps:
            try:
                commands += next(step)
            except StopIteration as end:
                results.append(end.value)
            else:
                running.append(step)
        steps = running
        if commands:
            yield commands
    return results


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _sort_suspects_last(nodes: Iterable[Node], suspects: Container[Node | None]) -> list[Node]:
    return sorted(nodes, key=lambda node: node in suspects)
