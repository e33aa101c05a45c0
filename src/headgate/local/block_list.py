"""Who is blocked now, as this process knows it: the store need not be asked, nor even be there.

What is known is changed by whoever listens to the store, and asked on every request, from any thread.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_network
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidInput
from headgate.keyed_hashes import is_keyed_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["BlockList", "LiveBlock", "canonical"]

logger = logging.getLogger("headgate")

ADDRESS: Final = "ip"
"""The kind whose values are networks, found by any address in them."""
MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped IPv6 address."""

NAT64: Final = (b"\x00\x64\xff\x9b" + bytes(8), b"\x00\x64\xff\x9b\x00\x01" + bytes(6))
"""The prefixes under which NAT64 embeds an IPv4 address: 64:ff9b::/96 (RFC 6052), and 64:ff9b:1::/96 for local use (RFC
8215). All IPv4 clients behind such a translator would be in one /64."""
LONGEST: Final = 64
"""Characters of an address or a network; what is longer is neither."""


class LiveBlock(NamedTuple):
    """Somebody who does not get in; `until_us` is None for a block without end."""

    kind: str
    value: str
    until_us: int | None = None
    reason: str | None = None

    def holds_at(self, now_us: int) -> bool:
        return self.until_us is None or now_us < self.until_us


class BlockList:
    """Who is blocked, found at one lookup for each identity of a request; an address, for each length of prefix.

    >>> blocks = BlockList()
    >>> blocks.set("tenant", "acme", None, "unpaid")
    >>> blocks.set("ip", "203.0.113.0/24", 2_000_000, None)
    >>> blocks.find({"address": "203.0.113.9"}, now_us=1_999_999).value
    '203.0.113.0/24'
    >>> blocks.find({"address": "203.0.113.9", "tenant": "acme"}, now_us=2_000_000).reason
    'unpaid'
    """

    __slots__ = ("__weakref__", "_mutex", "_own_changes", "_tables", "are_there", "kinds")

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        """For those who change something. Who only looks does not wait."""
        self._tables = _BlockTables()
        self._own_changes = 0
        """Calls of `set` and `drop`. A reader of the store compares it before and after: what it has read may be older
        than a change that was made here meanwhile."""
        # Asked on every request, hence no properties.
        self.are_there = False
        """Whether anybody is blocked."""
        self.kinds: frozenset[str] = frozenset()
        """The kinds of identity, beside addresses, by which somebody is."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it."""
        self._mutex = threading.RLock()

    def set(self, kind: str, value: str, until_us: int | None, reason: str | None) -> None:
        """Block somebody, in place of an earlier block. A network that is none is told to the log, and left out."""
        try:
            block = LiveBlock(kind, canonical(kind, value), until_us, reason)
        except InvalidInput as error:
            logger.warning("a block was left out: %s", error)
            return
        with self._mutex:
            self._own_changes += 1
            self._tables.put(block)
            self._look_over()

    def drop(self, kind: str, value: str) -> bool:
        """End a block; whether there was one."""
        try:
            value = canonical(kind, value)
        except InvalidInput:
            return False
        with self._mutex:
            self._own_changes += 1
            was_there = self._tables.remove(kind, value)
            self._look_over()
        return was_there

    def replace(self, blocks: Iterable[tuple[str, str, int | None, str | None]]) -> None:
        """Block these, and nobody else."""
        fresh = BlockList()
        for block in blocks:
            fresh.set(*block)
        with self._mutex:
            self._own_changes += 1
            self._tables = fresh._tables
            self._look_over()

    def reload(self, read_all: Callable[[], Iterable[tuple[str, str, int | None, str | None]]]) -> None:
        """Read all blocks again with `read_all`, and block nobody else."""
        is_done = False
        while not is_done:
            seen = self._own_changes
            blocks = list(read_all())
            with self._mutex:
                is_done = self._own_changes == seen
                if is_done:
                    self.replace(blocks)

    def refresh(
        self,
        changed: Iterable[tuple[str, str]],
        find: Callable[[Sequence[tuple[str, str]]], Sequence[tuple[str, str, int | None, str | None] | None]],
    ) -> None:
        """Read the blocks of these identities again, each given as kind and value; `find` reads what is stored."""
        spellings: dict[tuple[str, str], None] = {}
        for kind, value in changed:
            # The canonical spelling, too: asking for another one must not end the block that is stored under it.
            with suppress(InvalidInput):
                spellings[kind, canonical(kind, value)] = None
                spellings[kind, value] = None
        identities = list(spellings)
        is_done = not identities
        while not is_done:
            seen = self._own_changes
            stored = find(identities)
            with self._mutex:
                is_done = self._own_changes == seen
                for (kind, value), block in zip(identities, stored, strict=True) if is_done else ():
                    if block is not None:
                        self.set(*block)
                    elif value == canonical(kind, value):
                        self.drop(kind, value)

    def sweep(self, now_us: int) -> None:
        """Forget the blocks that have ended: `find` passes over them, but they take up room."""
        with self._mutex:
            for block in list(self._tables):
                if not block.holds_at(now_us):
                    self._tables.remove(block.kind, block.value)
            self._look_over()

    def find(
        self, who: Mapping[str, str], now_us: int, hash_identity: Callable[[str, str], str] | None = None
    ) -> LiveBlock | None:
        """The block that holds now for one of the identities, if there is any.

        `who` has the identities by their kinds; the full address, where `ip` is only the network that is counted by,
        stands under `address`. `hash_identity` makes the keyed hashes by which clients can be blocked that are not
        known otherwise; it is only called if there are such blocks.
        """
        tables = self._tables
        if tables.networks:
            address = who.get("address") or who.get(ADDRESS)
            found = None if address is None else tables.around(address, now_us)
            if found is not None:
                return found
        if tables.plain:
            for kind, value in who.items():
                values = tables.plain.get(kind)
                found = None if values is None else values.get(value)
                if found is not None and found.holds_at(now_us):
                    return found
        if tables.hashed and hash_identity is not None:
            for field, value in who.items():
                kind = ADDRESS if field == "address" else field
                values = tables.hashed.get(kind)
                found = None if values is None else values.get(hash_identity(kind, value))
                if found is not None and found.holds_at(now_us):
                    return found
        return None

    def __len__(self) -> int:
        return self._tables.count

    def __iter__(self) -> Iterator[LiveBlock]:
        """All blocks that are known, those that have ended and were not yet forgotten included."""
        with self._mutex:
            return iter(list(self._tables))

    def _look_over(self) -> None:
        self.kinds = frozenset([*self._tables.plain, *self._tables.hashed]) - {ADDRESS}
        self.are_there = self._tables.count > 0


def canonical(kind: str, value: str) -> str:
    """The one spelling of whom a block is about: that of a network, for an address; the value itself, for all others.

    >>> canonical("ip", "2001:DB8::1"), canonical("ip", "10.1.2.3/8"), canonical("tenant", "Acme")
    ('2001:db8::1', '10.0.0.0/8', 'Acme')
    """
    if kind != ADDRESS or is_keyed_hash(value):
        return value
    try:
        network = ip_network(value if len(value) <= LONGEST else "", strict=False)
    except ValueError:
        raise InvalidInput(f"{value[:LONGEST]!r} is no network: write '203.0.113.9' or '203.0.113.0/24'") from None
    packed, free = network.network_address.packed, network.max_prefixlen - network.prefixlen
    if (packed.startswith(MAPPED) and free <= 32) or (packed.startswith(NAT64) and free < 32):
        network = ip_network((packed[12:], 32 - free))
        free = network.max_prefixlen - network.prefixlen
    return str(network) if free else str(network.network_address)


class _BlockTables:
    """Blocks by what they are looked up by. They may be looked at while they are changed: every change is one step."""

    __slots__ = ("count", "hashed", "networks", "plain", "shifts")

    def __init__(self) -> None:
        self.plain: dict[str, dict[str, LiveBlock]] = {}
        """By kind and value."""
        self.hashed: dict[str, dict[str, LiveBlock]] = {}
        """By kind and keyed hash of the value."""
        self.networks: dict[tuple[int, int], dict[int, LiveBlock]] = {}
        """By the bytes of an address and the bits that are free in it; then by the bits that are not."""
        self.shifts: dict[int, tuple[int, ...]] = {0: (), 4: (), 16: ()}
        """By the bytes of an address, how many bits are free in the networks that there are: the fewest first."""
        self.count = 0

    def put(self, block: LiveBlock) -> None:
        if _is_hashed(block.kind, block.value):
            self._put_value(self.hashed, block)
        elif block.kind == ADDRESS:
            size, shift, start = _parse(block.value)
            starts = self.networks.setdefault((size, shift), {})
            self.count += start not in starts
            starts[start] = block
            self._order(size)
        else:
            self._put_value(self.plain, block)

    def remove(self, kind: str, value: str) -> bool:
        if _is_hashed(kind, value):
            found = self._remove_value(self.hashed, kind, value)
        elif kind == ADDRESS:
            size, shift, start = _parse(value)
            found = self.networks.get((size, shift), {}).pop(start, None)
            if found is not None and not self.networks[size, shift]:
                del self.networks[size, shift]
                self._order(size)
        else:
            found = self._remove_value(self.plain, kind, value)
        self.count -= found is not None
        return found is not None

    def _put_value(self, table: dict[str, dict[str, LiveBlock]], block: LiveBlock) -> None:
        values = table.setdefault(block.kind, {})
        self.count += block.value not in values
        values[block.value] = block

    @staticmethod
    def _remove_value(table: dict[str, dict[str, LiveBlock]], kind: str, value: str) -> LiveBlock | None:
        found = table.get(kind, {}).pop(value, None)
        if found is not None and not table[kind]:
            del table[kind]
        return found

    def around(self, address: str, now_us: int) -> LiveBlock | None:
        """The block that holds of the smallest network that the address is in, or the network that stands for it."""
        if len(address) > LONGEST:
            return None
        number, size, free = _parse_address(address)
        for shift in self.shifts[size]:
            block = self.networks.get((size, shift), _NONE).get(number >> shift)
            if block is not None and shift >= free and block.holds_at(now_us):
                return block
        return None

    def _order(self, size: int) -> None:
        shifts = tuple(sorted(shift for of, shift in self.networks if of == size))
        if shifts != self.shifts[size]:
            self.shifts[size] = shifts

    def __iter__(self) -> Iterator[LiveBlock]:
        for table in (self.plain, self.hashed):
            for values in table.values():
                yield from values.values()
        for starts in self.networks.values():
            yield from starts.values()


def _is_hashed(kind: str, value: str) -> bool:
    """True for a block by the keyed hash of an identity. API keys are hashes to begin with, as requests bring them."""
    return kind != "api_key" and is_keyed_hash(value)


_NONE: Final[dict[int, LiveBlock]] = {}


def _parse(network: str) -> tuple[int, int, int]:
    """The bytes of its addresses, the bits that are free in them, and the bits that are not."""
    parsed = ip_network(network)
    packed, shift = parsed.network_address.packed, parsed.max_prefixlen - parsed.prefixlen
    return len(packed), shift, int.from_bytes(packed) >> shift


@lru_cache(4096)
def _parse_address(text: str) -> tuple[int, int, int]:
    """An address, or the network that stands for it: its number, its bytes, and the bits that are free in it. No bytes,
    if it is none, as that of a caller over a Unix socket."""
    address, _, prefix = text.partition("/")
    try:
        packed = inet_pton(AF_INET6 if ":" in address else AF_INET, address)
    except (OSError, ValueError):
        return 0, 0, 0
    if packed.startswith(MAPPED):
        packed = packed[12:]
    return int.from_bytes(packed), len(packed), 8 * len(packed) - int(prefix) if prefix.isdecimal() else 0
