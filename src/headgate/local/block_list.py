"""The live block list, as this process knows it: requests are rejected without asking the store.

The pub/sub subscriber updates it; every request reads it, from any thread.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidInput
from headgate.keys import is_keyed_hash
from headgate.local.networks import IPV4_MAPPED, MAX_ADDRESS_LENGTH, NAT64, Networks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
    from datetime import datetime

__all__ = ["BlockList", "LiveBlock", "canonical", "checked_block"]

logger = logging.getLogger("headgate")

ADDRESS: Final = "ip"
"""The kind of identity whose values are networks, matched by every address in them."""


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

    __slots__ = ("__weakref__", "_hashed", "_lock", "_networks", "_own_changes", "_plain", "has_blocks", "kinds")

    def __init__(self) -> None:
        # Requests read all of this without the lock: every change is atomic.
        self._plain: dict[str, dict[str, LiveBlock]] = {}
        """By kind and value."""
        self._hashed: dict[str, dict[str, LiveBlock]] = {}
        """By kind and keyed hash of the value."""
        self._networks: Networks[LiveBlock] = Networks()
        self._own_changes = 0
        """Calls of `set` and `drop`. Compared before and after a read of the store, which may be older than a change
        made here in the meantime."""
        # Attributes and not properties, as every request reads them.
        self.has_blocks = False
        self.kinds: frozenset[str] = frozenset()
        """The kinds of blocked identities, beside addresses."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock of the writers, which a thread of the parent may have held."""
        self._lock = threading.RLock()

    def set(self, kind: str, value: str, until_us: int | None, reason: str | None) -> None:
        """Add or replace a block. One of an invalid network is logged and ignored."""
        try:
            block = LiveBlock(kind, canonical(kind, value), until_us, reason)
        except InvalidInput as error:
            logger.warning("ignored an invalid block: %s", error)
            return
        with self._lock:
            self._table_of(kind, block.value)[block.value] = block
            self._record_change()

    def drop(self, kind: str, value: str) -> bool:
        """Remove a block; False if there was none."""
        try:
            value = canonical(kind, value)
        except InvalidInput:
            return False
        with self._lock:
            existed = self._table_of(kind, value).pop(value, None) is not None
            self._record_change()
        return existed

    def replace(self, blocks: Iterable[tuple[str, str, int | None, str | None]]) -> None:
        """Replace all blocks."""
        fresh = BlockList()
        for block in blocks:
            fresh.set(*block)
        with self._lock:
            self._plain, self._hashed, self._networks = fresh._plain, fresh._hashed, fresh._networks
            self._record_change()

    def reload(self, read_all: Callable[[], Iterable[tuple[str, str, int | None, str | None]]]) -> None:
        """Replace all blocks by what `read_all` reads from the store."""
        self._apply(lambda: list(read_all()), self.replace)

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

        def update(stored: Sequence[tuple[str, str, int | None, str | None] | None]) -> None:
            for (kind, value), block in zip(identities, stored, strict=True):
                if block is not None:
                    self.set(*block)
                elif value == canonical(kind, value):
                    self.drop(kind, value)

        if identities:
            self._apply(lambda: find(identities), update)

    def _apply(self, read: Callable[[], Any], apply: Callable[[Any], None]) -> None:
        """Apply what is read from the store; read it again if a change was made here in the meantime."""
        while True:
            seen = self._own_changes
            stored = read()
            with self._lock:
                if self._own_changes == seen:
                    return apply(stored)

    def sweep(self, now_us: int) -> None:
        """Remove blocks that have ended: `find` ignores them, but they take up memory."""
        with self._lock:
            for block in self:
                if not block.applies_at(now_us):
                    self.drop(block.kind, block.value)

    def find(
        self, who: Mapping[str, str], now_us: int, hash_identity: Callable[[str, str], str] | None = None
    ) -> LiveBlock | None:
        """The block in force for one of the identities, or None.

        `who` has the identities by kind; `address` is the full address where `ip` is the network that is counted by.
        `hash_identity` computes the keyed hashes by which clients can be blocked; it is called only if there are such
        blocks.
        """
        if self._networks.data and "address" in who:
            for block in self._networks.find_all(who["address"]):
                if block.applies_at(now_us):
                    return block
        if self._plain:
            for kind, value in who.items():
                values = self._plain.get(kind)
                found = None if values is None else values.get(value)
                if found is not None and found.applies_at(now_us):
                    return found
        if self._hashed and hash_identity is not None:
            for field, value in who.items():
                kind = ADDRESS if field == "address" else field
                values = self._hashed.get(kind)
                found = values.get(hash_identity(kind, value)) if values else None
                if found is not None and found.applies_at(now_us):
                    return found
        return None

    def __len__(self) -> int:
        return sum(map(len, self._tables()))

    def __iter__(self) -> Iterator[LiveBlock]:
        """All blocks, including those that have ended and were not swept yet."""
        with self._lock:
            return iter([block for table in self._tables() for block in table.values()])

    def _tables(self) -> list[MutableMapping[str, LiveBlock]]:
        return [*self._plain.values(), *self._hashed.values(), self._networks]

    def _table_of(self, kind: str, value: str) -> MutableMapping[str, LiveBlock]:
        if kind != "api_key" and is_keyed_hash(value):  # API keys always are hashes, in requests, too
            return self._hashed.setdefault(kind, {})
        return self._networks if kind == ADDRESS else self._plain.setdefault(kind, {})

    def _record_change(self) -> None:
        self._own_changes += 1
        blocked = [kind for tables in (self._plain, self._hashed) for kind, values in tables.items() if values]
        self.kinds = frozenset(blocked) - {ADDRESS}
        self.has_blocks = len(self) > 0


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
