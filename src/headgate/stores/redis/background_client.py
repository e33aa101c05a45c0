"""The blocking client of background work: it waits longer than requests do, and reads more than counters.

Besides counters, headgate stores three things in Redis: the epoch of each server, by which the loss of its data is
detected; the live members of the fleet; and the block list. Their keys start with "%" after the namespace.
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
    from collections.abc import Container, Generator, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory

__all__ = ["REPLY_TIMEOUT_S", "BackgroundClient", "StoredBlock", "read_block"]

REPLY_TIMEOUT_S: Final = 1.0
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
        self._call_blocks("set", self.encoder.channel, _text(kind=kind, value=value), block)

    def unblock(self, kind: str, value: str) -> bool:
        """Remove a block, and notify all subscribers; False if there was none."""
        return bool(self._call_blocks("drop", self.encoder.channel, _text(kind=kind, value=value)))

    def find_blocks(self, identities: Sequence[tuple[str, str]]) -> list[StoredBlock | None]:
        """The stored block of each (kind, value), or None if there is none or it has ended."""
        found: list[StoredBlock | None] = []
        for start in range(0, len(identities), BLOCKS_PER_READ):
            names = [_text(kind=kind, value=value) for kind, value in identities[start : start + BLOCKS_PER_READ]]
            blocks = self._call_blocks("get", *names)
            if len(blocks) != len(names) or {*map(type, blocks)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(blocks)[:100]}, expected blocks")
            found += map(read_block, blocks)
        return found

    def blocks(self) -> list[StoredBlock]:
        """All blocks that have not ended, in no order, without malformed ones.

        They are read page by page: a block that is changed meanwhile may be missing; all others are included.
        """
        found: dict[bytes, StoredBlock | None] = {}
        cursor: bytes | None = b"0"
        while cursor is not None:
            page = self._call_blocks("list", cursor, BLOCKS_PER_READ)
            if len(page) % 2 == 0 or {*map(type, page)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(page)[:100]}, expected a page of blocks")
            cursor, *pairs = page
            found.update(zip(pairs[::2], map(read_block, pairs[1::2]), strict=True))
            cursor = None if cursor == b"0" else cursor
        return [block for block in found.values() if block is not None]

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._lock:
            self._pool.close()

    def _call_members(self, verb: str, member: str, lifetime_us: int) -> int:
        keys, args = Keys.of(self.encoder.own_name("fleet")), [verb, member, lifetime_us]
        command = Command(self.encoder.own_script("members"), keys, args, expects=int)
        members: int = self.execute(command)
        return members

    def _call_blocks(self, verb: str, *args: Any) -> Any:
        encoder, expects = self.encoder, list if verb in ("list", "get") else int
        keys = Keys.of(encoder.own_name("blocks"))
        return self.execute(Command(encoder.own_script("blocks"), keys, [encoder.now(), verb, *args], expects=expects))

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
