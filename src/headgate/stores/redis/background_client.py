"""The blocking client of background work: it waits longer than requests do, and reads more than counters.

Besides counters, headgate stores four things in Redis: the epoch of each server, by which the loss of its data is
detected; the live members of the fleet; the block list; and the restrictions of clients, which are stored in the same
way, under a key of their own. These keys start with "%" after the namespace.
"""

from __future__ import annotations

import json
import threading
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidInput, StoreError, StoreUnavailable
from headgate.limits import EXACT
from headgate.stores.redis.batch_protocol import deliver, error_of, run_batch
from headgate.stores.redis.connection_pool import ConnectionPool, ConnectionUser
from headgate.stores.redis.encoding import Command, CommandEncoder, Keys, Node
from headgate.stores.redis.exchange import MAX_BATCH, Exchange
from headgate.stores.redis.topology import Cluster, Topology

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterable, Iterator, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory

__all__ = ["REPLY_TIMEOUT_S", "BackgroundClient", "StoredBlock", "read_block"]

REPLY_TIMEOUT_S: Final = 1.0
BLOCKS: Final = "blocks"
RESTRICTIONS: Final = "restrictions"
"""The live lists, each a hash in the store."""
BLOCKS_PER_READ: Final = 200
"""Keeps a server busy for about a millisecond."""
EPOCH_TTL_MS: Final = 86_400_000
"""A day. A limiter that was away for longer takes its servers for new."""


class StoredBlock(NamedTuple):
    """An entry of the block list; `until_us` is None for a block without end."""

    kind: str
    value: str
    until_us: int | None
    reason: str | None


class BackgroundClient:
    """Blocking client of the servers behind one URL, on connections of its own; thread-safe.

    Every method may raise a StoreError.
    """

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder) -> None:
        self.factory = factory
        self.encoder = encoder
        self._epoch_keys: dict[Node | None, str] = {}
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Start afresh: a child must not use its parent's connections."""
        self._lock = threading.Lock()
        self._pool = ConnectionPool(self.factory, REPLY_TIMEOUT_S)

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to the calls, in their order, with StoreErrors among them."""
        answers: list[Any] = []
        for start in range(0, len(calls), MAX_BATCH):
            batch = calls[start : start + MAX_BATCH]
            answers += self._run(run_batch(batch, self.encoder, self.factory.topology))
        return answers

    def find_primaries(
        self, suspects: Container[Node | None] = (), *, of: Node | None = None, timeout_s: float = REPLY_TIMEOUT_S
    ) -> list[Node | None]:
        """The primaries, discovered again; suspects, which may not reply, are asked last.

        With `of`, only those of the deployment to which that server belongs.
        """
        topology = self.factory.topology.part_of(of)
        self._run(topology.refresh(suspects), timeout_s)
        return topology.primaries()

    def read_epoch(self, node: Node | None, fresh: str, *, timeout_s: float = REPLY_TIMEOUT_S) -> str:
        """The epoch of a server, or `fresh` if it had none: it is new, or has lost its data.

        The epoch is written back, so that a reply proves that the server serves.
        """
        keys, args = Keys.of(self.epoch_key(node)), [fresh, EPOCH_TTL_MS]
        command = Command(self.encoder.own_script("epoch"), keys, args, expects=bytes)
        epoch: bytes = self.execute(command, Topology(node), timeout_s)
        return epoch.decode("utf-8", "replace")

    def heartbeat(self, member: str, lifetime_us: int) -> int:
        """Announce a live member for that time; returns the number of live members, including this one."""
        return self._call_members("beat", member, lifetime_us)

    def leave(self, member: str) -> int:
        return self._call_members("leave", member, 0)

    def block(self, kind: str, value: str, *, until_us: int | None = None, reason: str | None = None) -> None:
        """Add or replace a block, and notify all subscribers."""
        if until_us is not None and not 0 <= until_us < EXACT:
            raise InvalidInput(f"until_us {until_us!r} is not an instant: give microseconds since 1970, or None")
        block = _text(until_us=until_us, kind=kind, value=value, reason=reason)
        identity = _text(kind=kind, value=value)
        self.execute(self._list_command(BLOCKS, "set", self.encoder.channel, identity, block))

    def unblock(self, kind: str, value: str) -> bool:
        """Remove a block, and notify all subscribers; False if there was none."""
        identity = _text(kind=kind, value=value)
        return bool(self.execute(self._list_command(BLOCKS, "drop", self.encoder.channel, identity)))

    def find_blocks(self, identities: Sequence[tuple[str, str]]) -> list[StoredBlock | None]:
        """The stored block of each (kind, value), or None if there is none or it has ended."""
        return [*map(read_block, self._find(BLOCKS, identities))]

    def blocks(self) -> list[StoredBlock]:
        """All blocks that have not ended, in no order, without malformed ones.

        They are read page by page: a block that is changed meanwhile may be missing; all others are included.
        """
        found = {identity: read_block(text) for identity, text in self._pages(BLOCKS)}
        return [block for block in found.values() if block is not None]

    def block_all(self, blocks: Iterable[tuple[str, str, int | None, str | None]]) -> None:
        """Add or replace many blocks, each as for `block`, in few round trips."""
        commands = []
        for kind, value, until_us, reason in blocks:
            block = _text(until_us=until_us, kind=kind, value=value, reason=reason)
            identity = _text(kind=kind, value=value)
            commands.append(self._list_command(BLOCKS, "set", self.encoder.channel, identity, block))
        self._execute_all(commands)

    def find_restrictions(self, identities: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """The stored record of each (kind, value), as text; None if there is none or it can be forgotten."""
        return [text or None for text in self._find(RESTRICTIONS, identities)]

    def restrictions(self) -> list[bytes]:
        """The texts of all records of restrictions, in no order."""
        return [text for _, text in self._pages(RESTRICTIONS)]

    def swap_restrictions(self, changes: Sequence[tuple[str, str, bytes | None, str]]) -> list[bool]:
        """Replace records, and notify all subscribers: each is kind, value, the text read before, and the new one.

        False for those whose text in the store is another one by now; they stay as they are.
        """
        commands = []
        for kind, value, before, after in changes:
            identity = _text(kind=kind, value=value)
            arguments = self.encoder.channel, identity, before or b"", after
            commands.append(self._list_command(RESTRICTIONS, "swap", *arguments))
        return [bool(reply) for reply in self._execute_all(commands)]

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._lock:
            self._pool.close()

    def _call_members(self, verb: str, member: str, lifetime_us: int) -> int:
        keys, args = Keys.of(self.encoder.own_name("fleet")), [verb, member, lifetime_us]
        command = Command(self.encoder.own_script("members"), keys, args, expects=int)
        members: int = self.execute(command)
        return members

    def _find(self, name: str, identities: Sequence[tuple[str, str]]) -> Iterator[bytes]:
        """The entries of a live list for each (kind, value); empty for none."""
        for start in range(0, len(identities), BLOCKS_PER_READ):
            names = [_text(kind=kind, value=value) for kind, value in identities[start : start + BLOCKS_PER_READ]]
            texts = self.execute(self._list_command(name, "get", *names))
            if len(texts) != len(names) or {*map(type, texts)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(texts)[:100]}, expected {name}")
            yield from texts

    def _pages(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """The identities and entries of a live list, some of them twice if it changes meanwhile."""
        cursor: bytes | None = b"0"
        while cursor is not None:
            page = self.execute(self._list_command(name, "list", cursor, BLOCKS_PER_READ))
            if len(page) % 2 == 0 or {*map(type, page)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(page)[:100]}, expected a page of {name}")
            cursor, *pairs = page
            yield from zip(pairs[::2], pairs[1::2], strict=True)
            cursor = None if cursor == b"0" else cursor

    def _list_command(self, name: str, verb: str, *args: Any) -> Command:
        encoder, expects = self.encoder, list if verb in ("list", "get") else int
        keys = Keys.of(encoder.own_name(name))
        return Command(encoder.own_script("blocks"), keys, [encoder.now(), verb, *args], expects=expects)

    def epoch_key(self, node: Node | None) -> str:
        """The key of a server's epoch: always the same while its slot stays there."""
        cluster = self.factory.topology.part_of(node)
        # Named after the shard: a server that takes the place of another one is recognized as such.
        base = f"mark@{node.shard}" if node is not None and node.shard else "mark"
        if not isinstance(cluster, Cluster):
            return self.encoder.own_name(base)
        name = self._epoch_keys.get(node)
        if name is None or not cluster.serves(node, name):
            if node not in cluster.primaries():
                raise StoreUnavailable(f"{node} is not a primary of the cluster")
            # Counted from 0, so that all limiters use the same key, also on a replica that is promoted.
            name = next(name for n in count() if cluster.serves(node, name := self.encoder.own_name(f"{base}:{n}")))
            self._epoch_keys[node] = name
        return name

    def execute(self, command: Command, topology: Topology | None = None, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        self._run(deliver([command], topology or self.factory.topology), timeout_s)
        error = error_of(command.reply)
        if error is not None:
            raise error
        return command.reply

    def _execute_all(self, commands: list[Command]) -> list[Any]:
        """The replies to commands, which are sent together, up to MAX_BATCH of them."""
        for start in range(0, len(commands), MAX_BATCH):
            self._run(deliver(commands[start : start + MAX_BATCH], self.factory.topology))
        for command in commands:
            if (error := error_of(command.reply)) is not None:
                raise error
        return [command.reply for command in commands]

    def _run(self, rounds: Generator[list[Command], None, Any], timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        user = ConnectionUser()
        with self._lock:
            try:
                return self._pool.run(Exchange(rounds, timeout_s), user)
            except StoreError:
                raise
            except BaseException:  # an interrupt
                user.close_connections()
                raise


def read_block(text: bytes) -> StoredBlock | None:
    """Parse a block, as stored or published; None if it is malformed."""
    try:
        fields = json.loads(text)
        block = StoredBlock(fields["kind"], fields["value"], fields.get("until_us"), fields.get("reason"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    kind, value, until_us, reason = map(type, block)
    is_valid = kind is value is str and until_us in (int, type(None)) and reason in (str, type(None))
    return block if is_valid and 0 <= (block.until_us or 0) < EXACT else None


def _text(**fields: Any) -> str:
    """Compact ASCII JSON, in the format that the script parses."""
    return json.dumps(fields, separators=(",", ":"))
