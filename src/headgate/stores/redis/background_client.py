"""The store as it is asked from the background: with patience, server by server, and about more than counters.

Beside its counters, headgate keeps three things in Redis: on each server a mark, by which its state is known again; the
members of the fleet that live; and who is blocked. Their names start with "%" after the namespace.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hiredis import ReplyError

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidInput, ScriptError, StoreError, StoreUnavailable
from headgate.limits import EXACT
from headgate.stores.redis.batch_protocol import NotSent, deliver, public, refusal, run_batch
from headgate.stores.redis.encoding import Command, Keys
from headgate.stores.redis.sync_connection import SyncConnection
from headgate.stores.redis.topology import Cluster, Standalone

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterator, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node
    from headgate.stores.redis.topology import Topology

__all__ = ["CONNECT", "BackgroundClient", "StoredBlock", "read_block"]

CONNECT: Final = 0.25
"""Seconds that opening a connection may take."""
PATIENCE: Final = 1.0
"""Seconds that a server may take to answer."""
LARGEST_BATCH: Final = 256
MAX_REPLY_BYTES: Final = 256 * 1024 * 1024
"""Size of the largest reply: a board has a document of each node of a fleet."""
BLOCKS_AT_ONCE: Final = 200
"""A server is kept busy for about a millisecond by so many."""
MARK_LIFETIME_MS: Final = 86_400_000
"""A day: a limiter that was away for longer finds its servers as new."""

_WHOLE: Final = (int, type(None))
_WORDS: Final = (str, type(None))


class StoredBlock(NamedTuple):
    """Somebody who is blocked; `until_us` is None for a block without end."""

    kind: str
    value: str
    until_us: int | None
    reason: str | None


class BackgroundClient:
    """Asks the servers of one place, one question at a time; any thread may ask, and waits its turn.

    Its connections are its own, so that nothing it does delays a request. Every method may raise a StoreError.
    """

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder) -> None:
        self.factory = factory
        self.encoder = encoder
        self._turn = threading.Lock()
        self._lines: dict[Node | None, SyncConnection] = {}
        self._mark_names: dict[Node | None, str] = {}
        reinit_after_fork(self)

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to the calls, in their order, with StoreErrors among them."""
        answers: list[Any] = []
        for start in range(0, len(calls), LARGEST_BATCH):
            batch = calls[start : start + LARGEST_BATCH]
            answers += self._drive(run_batch(batch, self.encoder, self.factory.topology))
        return answers

    def find_primaries(
        self, suspects: Container[Node | None] = (), *, timeout_s: float = PATIENCE
    ) -> list[Node | None]:
        """The primaries, asked for anew; suspects, who may not answer, are asked for them last."""
        topology = self.factory.topology
        self._drive(topology.refresh(suspects), timeout_s)
        return topology.primaries()

    def read_epoch(self, node: Node | None, fresh: str, *, timeout_s: float = PATIENCE) -> str:
        """The mark that the server has, or `fresh` if it had none: then what it knew was lost, or it is new.

        The mark is written back, so that an answer proves that the server does serve. It has so many seconds for each
        answer: the server, not this thread, which may have to wait for the interpreter before it sees one.
        """
        keys, args = Keys.of(self.epoch_key(node)), [fresh, MARK_LIFETIME_MS]
        command = Command(self.encoder.own_script("epoch"), keys, args, expects=bytes)
        mark: bytes = self.execute(command, _SingleServer(node), timeout_s)
        return mark.decode("utf-8", "replace")

    def heartbeat(self, member: str, lifetime_us: int) -> int:
        """Say that the member lives, for so long; how many live, itself included."""
        return self._ask_fleet("beat", member, lifetime_us)

    def leave(self, member: str) -> int:
        """Say that the member lives no more; how many still do."""
        return self._ask_fleet("leave", member, 0)

    def block(self, kind: str, value: str, *, until_us: int | None = None, reason: str | None = None) -> None:
        """Block somebody, in place of an earlier block; all who listen hear of it."""
        if until_us is not None and not 0 <= until_us < EXACT:
            raise InvalidInput(f"until_us {until_us!r} is not an instant: give microseconds since 1970, or None")
        block = _text(until_us=until_us, kind=kind, value=value, reason=reason)
        self._ask_blocks("set", self.encoder.news, _identity(kind, value), block)

    def unblock(self, kind: str, value: str) -> bool:
        """End a block; whether there was one. All who listen hear of it."""
        return bool(self._ask_blocks("drop", self.encoder.news, _identity(kind, value)))

    def find_blocks(self, identities: Sequence[tuple[str, str]]) -> list[StoredBlock | None]:
        """The stored block of each (kind, value), or None where there is none that still holds."""
        found: list[StoredBlock | None] = []
        for start in range(0, len(identities), BLOCKS_AT_ONCE):
            names = [_identity(kind, value) for kind, value in identities[start : start + BLOCKS_AT_ONCE]]
            blocks = self._ask_blocks("get", *names)
            if len(blocks) != len(names) or {*map(type, blocks)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(blocks)[:100]}, which are not blocks")
            found += map(read_block, blocks)
        return found

    def blocks(self) -> list[StoredBlock]:
        """All blocks that have not ended, in no order. What somebody else has written there is left out.

        They are read in parts. A block that is set or ended meanwhile may be among them or not; all others are.
        """
        found: dict[bytes, StoredBlock | None] = {}
        cursor: bytes | None = b"0"
        while cursor is not None:
            page = self._ask_blocks("list", cursor, BLOCKS_AT_ONCE)
            if len(page) % 2 == 0 or {*map(type, page)} != {bytes}:
                raise StoreUnavailable(f"the store answered {str(page)[:100]}, which is not a page of blocks")
            cursor, *pairs = page
            found.update(zip(pairs[::2], map(read_block, pairs[1::2]), strict=True))
            cursor = None if cursor == b"0" else cursor
        return [block for block in found.values() if block is not None]

    def close(self) -> None:
        """Close the connections; they are opened anew for whoever asks again."""
        with self._turn:
            self._close_lines()

    def reset_after_fork(self) -> None:
        """A child must not talk on its parent's connections."""
        self._turn = threading.Lock()
        self._lines = {}

    def _ask_fleet(self, verb: str, member: str, lifetime_us: int) -> int:
        keys, args = Keys.of(self.encoder.own_name("fleet")), [verb, member, lifetime_us]
        command = Command(self.encoder.own_script("members"), keys, args, expects=int)
        living: int = self.execute(command)
        return living

    def _ask_blocks(self, verb: str, *what: Any) -> Any:
        encoder = self.encoder
        keys, args = Keys.of(encoder.own_name("blocks")), [encoder.now(), verb, *what]
        return self.execute(
            Command(encoder.own_script("blocks"), keys, args, expects=list if verb in ("list", "get") else int)
        )

    def epoch_key(self, node: Node | None) -> str:
        """A key that lives on that server: always the same one, for as long as it does live there."""
        cluster = self.factory.topology
        if not isinstance(cluster, Cluster):
            return self.encoder.own_name("mark")
        name = self._mark_names.get(node)
        if name is None or not cluster.serves(node, name):
            if node not in cluster.primaries():
                raise StoreUnavailable(f"{node} is no primary of the cluster")
            # Counted from 0, so that all limiters find the same one, and find it again on a replica that took over.
            name = next(name for n in count() if cluster.serves(node, name := self.encoder.own_name(f"mark:{n}")))
            self._mark_names[node] = name
        return name

    def execute(self, command: Command, topology: Topology | None = None, timeout_s: float = PATIENCE) -> Any:
        """The reply to a command, from the server that its key lives on."""
        self._drive(deliver([command], topology or self.factory.topology), timeout_s)
        reply = command.reply
        if isinstance(reply, ReplyError):
            told = f"the store answered: {reply}"
            # Whoever moved away from the one server that was asked for is nobody's mistake.
            moved = StoreUnavailable(told) if told.startswith("the store answered: MOVED") else None
            raise refusal(reply) or moved or ScriptError(told)
        if isinstance(reply, StoreError):
            raise public(reply)
        return reply

    def _drive(self, conversation: Generator[list[Command], None, Any], timeout_s: float = PATIENCE) -> Any:
        with self._turn, self._closing_after_interrupts():
            try:
                commands = next(conversation)
                while True:
                    self._exchange(commands, timeout_s)
                    commands = conversation.send(None)
            except StopIteration as end:
                return end.value

    def _exchange(self, commands: list[Command], timeout_s: float) -> None:
        """One round trip to every server concerned, all at the same time."""
        by_node: dict[Node | None, list[Command]] = {}
        for command in commands:
            command.reply = None
            by_node.setdefault(command.node, []).append(command)
        sent = []
        for node, its in by_node.items():
            try:
                line = self._line(node)
                line.send(b"".join([command.pack() for command in its]))
                sent.append((node, line, its))
            except StoreError as error:
                self._fail(node, its, error)
        deadline = time.monotonic() + timeout_s
        for node, line, its in sent:
            try:
                line.hurry(deadline)
                line.answer(its, deadline)
            except StoreError as error:
                self._fail(node, [command for command in its if command.reply is None], error)

    def _line(self, node: Node | None) -> SyncConnection:
        line = self._lines.pop(node, None)
        if line is not None:
            if line.is_usable():
                self._lines[node] = line
                return line
            line.close()
        connection = self.factory.connection(node, asynchronous=False, timeout=CONNECT)
        try:
            connection.connect()
        except Exception as error:  # whatever a provider of credentials may raise, too
            connection.disconnect()
            raise NotSent(f"cannot reach Redis: {error}") from error
        line = self._lines[node] = SyncConnection(connection, PATIENCE, max_bytes=MAX_REPLY_BYTES)
        return line

    def _fail(self, node: Node | None, commands: list[Command], error: StoreError) -> None:
        """A line that failed once is not trusted again: what comes in on it late would answer the wrong question."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.close()
        for command in commands:
            command.reply = error

    @contextmanager
    def _closing_after_interrupts(self) -> Iterator[None]:
        """An answer that is on its way must not be taken for another."""
        try:
            yield
        except StoreError:
            raise
        except BaseException:
            self._close_lines()
            raise

    def _close_lines(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()


def read_block(text: bytes) -> StoredBlock | None:
    """The block as it is stored and told; None if the text is none."""
    try:
        said = json.loads(text)
        block = StoredBlock(said["kind"], said["value"], said.get("until_us"), said.get("reason"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    shape = tuple(map(type, block))
    is_one = shape[:2] == (str, str) and shape[2] in _WHOLE and shape[3] in _WORDS
    return block if is_one and 0 <= (block.until_us or 0) < EXACT else None


class _SingleServer(Standalone):
    """One server, whoever else there is."""

    def __init__(self, node: Node | None) -> None:
        self._node = node

    def locate(self, command: Command) -> None:
        command.node = self._node


def _identity(kind: str, value: str) -> str:
    return _text(kind=kind, value=value)


def _text(**said: Any) -> str:
    """In ASCII, so that no text is beyond it; without blanks, as the script reads it, too."""
    return json.dumps(said, separators=(",", ":"))
