"""Live lists: entries by client that all nodes share, as this process knows them.

The pub/sub subscriber updates a list; every request reads it, from any thread.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from headgate._fork import reinit_after_fork
from headgate.errors import InvalidInput
from headgate.keys import is_keyed_hash
from headgate.local.networks import IPV4_MAPPED, MAX_ADDRESS_LENGTH, NAT64, Networks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

__all__ = ["LiveList", "canonical"]

logger = logging.getLogger("headgate")

ADDRESS: Final = "ip"
"""The kind of identity whose values are networks, matched by every address in them."""


class LiveEntry(Protocol):
    """An entry of a live list: about the client that `kind` and `value` identify."""

    @property
    def kind(self) -> str: ...
    @property
    def value(self) -> str: ...
    def applies_at(self, now_us: int) -> bool: ...


E = TypeVar("E", bound=LiveEntry)


class LiveList(Generic[E]):
    """Entries of clients, found with one lookup per identity of a request, or per prefix length of an address.

    `make` creates an entry from its kind, its value in canonical spelling, and the other fields. It raises
    InvalidInput for fields that do not describe an entry.
    """

    __slots__ = (
        *("__weakref__", "_hashed", "_lock", "_make", "_networks", "_own_changes", "_plain", "has_entries", "kinds"),
        "on_change",
    )

    def __init__(self, make: Callable[..., E]) -> None:
        self._make = make
        # Requests read all of this without the lock: every change is atomic.
        self._plain: dict[str, dict[str, E]] = {}
        """By kind and value."""
        self._hashed: dict[str, dict[str, E]] = {}
        """By kind and keyed hash of the value."""
        self._networks: Networks[E] = Networks()
        self._own_changes = 0
        """Calls of `set` and `drop`. Compared before and after a read of the store, which may be older than a change
        made here in the meantime."""
        self.has_entries = False
        self.kinds: frozenset[str] = frozenset()
        """The kinds of identities with entries, beside addresses."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change, with the lock held."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock of the writers, which a thread of the parent may have held."""
        self._lock = threading.RLock()

    def set(self, kind: str, value: str, *fields: Any) -> None:
        """Add or replace an entry. One of an invalid network is logged and ignored."""
        try:
            entry = self._make(kind, canonical(kind, value), *fields)
        except InvalidInput as error:
            logger.warning("ignored an invalid entry of a live list: %s", error)
            return
        with self._lock:
            self._table_of(kind, entry.value)[entry.value] = entry
            self._record_change()

    def get(self, kind: str, value: str) -> E | None:
        """The entry of exactly this identity, which may have ended; a network is not found by its addresses."""
        try:
            value = canonical(kind, value)
        except InvalidInput:
            return None
        return self._table_of(kind, value).get(value)

    def drop(self, kind: str, value: str) -> bool:
        """Remove an entry; False if there was none."""
        try:
            value = canonical(kind, value)
        except InvalidInput:
            return False
        with self._lock:
            existed = self._table_of(kind, value).pop(value, None) is not None
            self._record_change()
        return existed

    def replace(self, entries: Iterable[tuple[Any, ...]]) -> None:
        """Replace all entries."""
        fresh = LiveList(self._make)
        for fields in entries:
            fresh.set(*fields)
        with self._lock:
            self._plain, self._hashed, self._networks = fresh._plain, fresh._hashed, fresh._networks
            self._record_change()

    def reload(self, read_all: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
        """Replace all entries by what `read_all` reads from the store."""
        self._apply(lambda: list(read_all()), self.replace)

    def refresh(
        self,
        changed: Iterable[tuple[str, str]],
        find: Callable[[Sequence[tuple[str, str]]], Sequence[tuple[Any, ...] | None]],
    ) -> None:
        """Update the entries of these identities, each a kind and a value; `find` reads them from the store."""
        spellings: dict[tuple[str, str], None] = {}
        for kind, value in changed:
            # The canonical spelling, too: a lookup of another one must not remove the entry that is stored under it.
            with suppress(InvalidInput):
                spellings[kind, canonical(kind, value)] = None
                spellings[kind, value] = None
        identities = list(spellings)

        def update(stored: Sequence[tuple[Any, ...] | None]) -> None:
            for (kind, value), fields in zip(identities, stored, strict=True):
                if fields is not None:
                    self.set(*fields)
                elif value == canonical(kind, value):
                    self.drop(kind, value)

        if identities:
            self._apply(lambda: find(identities), update)

    def swap(self, before: E | None, kind: str, value: str, *fields: Any) -> bool:
        """Add or replace an entry if the present one is `before`, compared by value; False if it is not."""
        with self._lock:
            if self.get(kind, value) != before:
                return False
            self.set(kind, value, *fields)
        return True

    def _apply(self, read: Callable[[], Any], apply: Callable[[Any], None]) -> None:
        """Apply what is read from the store; read it again if a change was made here in the meantime."""
        while True:
            seen = self._own_changes
            stored = read()
            with self._lock:
                if self._own_changes == seen:
                    return apply(stored)

    def sweep(self, now_us: int) -> None:
        """Remove entries that have ended: `find` ignores them, but they take up memory."""
        with self._lock:
            for entry in self:
                if self._has_ended(entry, now_us):
                    self.drop(entry.kind, entry.value)

    def _has_ended(self, entry: E, now_us: int) -> bool:
        return not entry.applies_at(now_us)

    def find(
        self, who: Mapping[str, str], now_us: int, hash_identity: Callable[[str, str], str] | None = None
    ) -> E | None:
        """The first entry in force for one of the identities, or None; the parameters are those of `find_all`."""
        return next(self.find_all(who, now_us, hash_identity), None)

    def find_all(
        self, who: Mapping[str, str], now_us: int, hash_identity: Callable[[str, str], str] | None = None
    ) -> Iterator[E]:
        """The entries in force for the identities: of networks first, the smallest before the others.

        `who` has the identities by kind; `address` is the full address where `ip` is the network that is counted by.
        `hash_identity` computes the keyed hashes by which entries can name clients; it is called only if there are such
        entries.
        """
        if self._networks.data and "address" in who:
            for entry in self._networks.find_all(who["address"]):
                if entry.applies_at(now_us):
                    yield entry
        if self._plain:
            for kind, value in who.items():
                values = self._plain.get(kind)
                found = None if values is None else values.get(value)
                if found is not None and found.applies_at(now_us):
                    yield found
        if self._hashed and hash_identity is not None:
            for field, value in who.items():
                kind = ADDRESS if field == "address" else field
                values = self._hashed.get(kind)
                found = values.get(hash_identity(kind, value)) if values else None
                if found is not None and found.applies_at(now_us):
                    yield found

    def __len__(self) -> int:
        return sum(map(len, self._tables()))

    def __iter__(self) -> Iterator[E]:
        """All entries, including those that have ended and were not swept yet."""
        with self._lock:
            return iter([entry for table in self._tables() for entry in table.values()])

    def _tables(self) -> list[MutableMapping[str, E]]:
        return [*self._plain.values(), *self._hashed.values(), self._networks]

    def _table_of(self, kind: str, value: str) -> MutableMapping[str, E]:
        if kind != "api_key" and is_keyed_hash(value):  # API keys always are hashes, in requests, too
            return self._hashed.setdefault(kind, {})
        return self._networks if kind == ADDRESS else self._plain.setdefault(kind, {})

    def _record_change(self) -> None:
        self._own_changes += 1
        named = [kind for tables in (self._plain, self._hashed) for kind, values in tables.items() if values]
        self.kinds = frozenset(named) - {ADDRESS}
        self.has_entries = len(self) > 0
        self.on_change()


def canonical(kind: str, value: str) -> str:
    """The canonical spelling of an identity in a list: of an address, that of its network; otherwise the value itself.

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
