"""The live block list, as this process knows it: requests are rejected without asking the store.

The pub/sub subscriber updates it; every request reads it, from any thread.
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
    from datetime import datetime

__all__ = ["BlockList", "LiveBlock", "canonical", "checked_block"]

logger = logging.getLogger("headgate")

ADDRESS: Final = "ip"
"""The kind of identity whose values are networks, matched by every address in them."""
IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped IPv6 address."""

NAT64: Final = (b"\x00\x64\xff\x9b" + bytes(8), b"\x00\x64\xff\x9b\x00\x01" + bytes(6))
"""The prefixes under which NAT64 embeds an IPv4 address: 64:ff9b::/96 (RFC 6052), and 64:ff9b:1::/96 for local use (RFC
8215). All IPv4 clients behind such a translator would be in one /64."""
MAX_ADDRESS_LENGTH: Final = 64
"""In characters; a longer text is neither an address nor a network."""


class LiveBlock(NamedTuple):
    """A blocked client; `until_us` is None for a block without end."""

    kind: str
    value: str
    until_us: int | None = None
    reason: str | None = None

    def applies_at(self, now_us: int) -> bool:
        return self.until_us is None or now_us < self.until_us


class BlockList:
    """Blocks of clients, found with one lookup per identity of a request, or per prefix length of an address.

    >>> blocks = BlockList()
    >>> blocks.set("tenant", "acme", None, "unpaid")
    >>> blocks.set("ip", "203.0.113.0/24", 2_000_000, None)
    >>> blocks.find({"address": "203.0.113.9"}, now_us=1_999_999).value
    '203.0.113.0/24'
    >>> blocks.find({"address": "203.0.113.9", "tenant": "acme"}, now_us=2_000_000).reason
    'unpaid'
    """

    __slots__ = ("__weakref__", "_lock", "_own_changes", "_tables", "has_blocks", "kinds")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """For writers. Readers do not wait."""
        self._tables = _BlockTables()
        self._own_changes = 0
        """Calls of `set` and `drop`. Compared before and after a read of the store, which may be older than a change
        made here in the meantime."""
        # Attributes and not properties, as every request reads them.
        self.has_blocks = False
        self.kinds: frozenset[str] = frozenset()
        """The kinds of blocked identities, beside addresses."""
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()

    def set(self, kind: str, value: str, until_us: int | None, reason: str | None) -> None:
        """Add or replace a block. One of an invalid network is logged and ignored."""
        try:
            block = LiveBlock(kind, canonical(kind, value), until_us, reason)
        except InvalidInput as error:
            logger.warning("ignored an invalid block: %s", error)
            return
        with self._lock:
            self._own_changes += 1
            self._tables.put(block)
            self._update_flags()

    def drop(self, kind: str, value: str) -> bool:
        """Remove a block; False if there was none."""
        try:
            value = canonical(kind, value)
        except InvalidInput:
            return False
        with self._lock:
            self._own_changes += 1
            existed = self._tables.remove(kind, value)
            self._update_flags()
        return existed

    def replace(self, blocks: Iterable[tuple[str, str, int | None, str | None]]) -> None:
        """Replace all blocks."""
        fresh = BlockList()
        for block in blocks:
            fresh.set(*block)
        with self._lock:
            self._own_changes += 1
            self._tables = fresh._tables
            self._update_flags()

    def reload(self, read_all: Callable[[], Iterable[tuple[str, str, int | None, str | None]]]) -> None:
        """Replace all blocks by what `read_all` reads from the store."""
        is_done = False
        while not is_done:
            seen = self._own_changes
            blocks = list(read_all())
            with self._lock:
                is_done = self._own_changes == seen
                if is_done:
                    self.replace(blocks)

    def refresh(
        self,
        changed: Iterable[tuple[str, str]],
        find: Callable[[Sequence[tuple[str, str]]], Sequence[tuple[str, str, int | None, str | None] | None]],
    ) -> None:
        """Update the blocks of these identities, each a kind and a value; `find` reads them from the store."""
        spellings: dict[tuple[str, str], None] = {}
        for kind, value in changed:
            # The canonical spelling, too: a lookup of another one must not remove the block that is stored under it.
            with suppress(InvalidInput):
                spellings[kind, canonical(kind, value)] = None
                spellings[kind, value] = None
        identities = list(spellings)
        is_done = not identities
        while not is_done:
            seen = self._own_changes
            stored = find(identities)
            with self._lock:
                is_done = self._own_changes == seen
                for (kind, value), block in zip(identities, stored, strict=True) if is_done else ():
                    if block is not None:
                        self.set(*block)
                    elif value == canonical(kind, value):
                        self.drop(kind, value)

    def sweep(self, now_us: int) -> None:
        """Remove blocks that have ended: `find` ignores them, but they take up memory."""
        with self._lock:
            for block in list(self._tables):
                if not block.applies_at(now_us):
                    self._tables.remove(block.kind, block.value)
            self._update_flags()

    def find(
        self, who: Mapping[str, str], now_us: int, hash_identity: Callable[[str, str], str] | None = None
    ) -> LiveBlock | None:
        """The block in force for one of the identities, or None.

        `who` has the identities by kind; `address` is the full address where `ip` is the network that is counted by.
        `hash_identity` computes the keyed hashes by which clients can be blocked; it is called only if there are such
        blocks.
        """
        tables = self._tables
        if tables.networks:
            address = who.get("address") or who.get(ADDRESS)
            found = None if address is None else tables.find_network(address, now_us)
            if found is not None:
                return found
        if tables.plain:
            for kind, value in who.items():
                values = tables.plain.get(kind)
                found = None if values is None else values.get(value)
                if found is not None and found.applies_at(now_us):
                    return found
        if tables.hashed and hash_identity is not None:
            for field, value in who.items():
                kind = ADDRESS if field == "address" else field
                values = tables.hashed.get(kind)
                found = None if values is None else values.get(hash_identity(kind, value))
                if found is not None and found.applies_at(now_us):
                    return found
        return None

    def __len__(self) -> int:
        return self._tables.count

    def __iter__(self) -> Iterator[LiveBlock]:
        """All blocks, including those that have ended and were not swept yet."""
        with self._lock:
            return iter(list(self._tables))

    def _update_flags(self) -> None:
        self.kinds = frozenset([*self._tables.plain, *self._tables.hashed]) - {ADDRESS}
        self.has_blocks = self._tables.count > 0


def canonical(kind: str, value: str) -> str:
    """The canonical spelling of a blocked identity: of an address, that of its network; otherwise the value itself.

    >>> canonical("ip", "2001:DB8::1"), canonical("ip", "10.1.2.3/8"), canonical("tenant", "Acme")
    ('2001:db8::1', '10.0.0.0/8', 'Acme')
    """
    if kind != ADDRESS or is_keyed_hash(value):
        return value
    try:
        network = ip_network(value if len(value) <= MAX_ADDRESS_LENGTH else "", strict=False)
    except ValueError:
        raise InvalidInput(
            f"{value[:MAX_ADDRESS_LENGTH]!r} is not a network: write '203.0.113.9' or '203.0.113.0/24'"
        ) from None
    packed, free = network.network_address.packed, network.max_prefixlen - network.prefixlen
    if (packed.startswith(IPV4_MAPPED) and free <= 32) or (packed.startswith(NAT64) and free < 32):
        network = ip_network((packed[12:], 32 - free))
        free = network.max_prefixlen - network.prefixlen
    return str(network) if free else str(network.network_address)


def checked_block(kind: str, value: str, until: datetime | None = None, reason: str | None = None) -> LiveBlock:
    """The block that a caller describes, in its canonical spelling."""
    if not isinstance(kind, str) or not kind.isidentifier():
        raise InvalidInput(f"{kind!r} is not a kind of identity: give a word like 'ip', 'user', 'api_key' or 'tenant'")
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{value!r} does not identify a client of kind {kind!r}: give a text")
    if kind == "api_key" and not value.startswith("hmac:"):
        raise InvalidInput(
            "an API key is blocked by its hash, as the key itself is not stored: use a gate, which has the secret, "
            "or give the output of `headgate hash-key`"
        )
    if until is not None and until.tzinfo is None:
        raise InvalidInput(f"until {until!r} has no time zone: give datetime(..., tzinfo=UTC)")
    until_us = None if until is None else round(until.timestamp() * 1_000_000)
    return LiveBlock(kind, canonical(kind, value), until_us, reason)


class _BlockTables:
    """Lookup tables of blocks. They may be read while they are changed: every change is atomic."""

    __slots__ = ("count", "hashed", "networks", "plain", "shifts")

    def __init__(self) -> None:
        self.plain: dict[str, dict[str, LiveBlock]] = {}
        """By kind and value."""
        self.hashed: dict[str, dict[str, LiveBlock]] = {}
        """By kind and keyed hash of the value."""
        self.networks: dict[tuple[int, int], dict[int, LiveBlock]] = {}
        """By the address size in bytes and the number of host bits; then by the network bits."""
        self.shifts: dict[int, tuple[int, ...]] = {0: (), 4: (), 16: ()}
        """By the address size in bytes, the numbers of host bits of all networks, in ascending order."""
        self.count = 0

    def put(self, block: LiveBlock) -> None:
        if _is_hashed(block.kind, block.value):
            self._put_value(self.hashed, block)
        elif block.kind == ADDRESS:
            size, shift, start = _parse(block.value)
            starts = self.networks.setdefault((size, shift), {})
            self.count += start not in starts
            starts[start] = block
            self._update_shifts(size)
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
                self._update_shifts(size)
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

    def find_network(self, address: str, now_us: int) -> LiveBlock | None:
        """The block in force of the smallest network that contains the address, or the network given in its place."""
        if len(address) > MAX_ADDRESS_LENGTH:
            return None
        number, size, free = _parse_address(address)
        for shift in self.shifts[size]:
            block = self.networks.get((size, shift), _NONE).get(number >> shift)
            if block is not None and shift >= free and block.applies_at(now_us):
                return block
        return None

    def _update_shifts(self, size: int) -> None:
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
    """True for a block by the keyed hash of an identity. API keys always are hashes, in requests, too."""
    return kind != "api_key" and is_keyed_hash(value)


_NONE: Final[dict[int, LiveBlock]] = {}


def _parse(network: str) -> tuple[int, int, int]:
    """The address size in bytes, the number of host bits, and the network bits as a number."""
    parsed = ip_network(network)
    packed, shift = parsed.network_address.packed, parsed.max_prefixlen - parsed.prefixlen
    return len(packed), shift, int.from_bytes(packed) >> shift


@lru_cache(4096)
def _parse_address(text: str) -> tuple[int, int, int]:
    """An address, or a network in its place: its number, its size in bytes, and the number of host bits. The size is 0
    if it is not an address, as for a client over a Unix socket."""
    address, _, prefix = text.partition("/")
    try:
        packed = inet_pton(AF_INET6 if ":" in address else AF_INET, address)
    except (OSError, ValueError):
        return 0, 0, 0
    if packed.startswith(IPV4_MAPPED):
        packed = packed[12:]
    return int.from_bytes(packed), len(packed), 8 * len(packed) - int(prefix) if prefix.isdecimal() else 0
