"""The clients on the live lists, which all nodes share: as this process knows them, and as the store has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.local.block_list import BlockList, LiveBlock
from headgate.local.restrictions import ClientRestrictions, RestrictionList, encode_restrictions, read_restrictions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

__all__ = ["LiveClientStore", "LiveClients", "StoredRestrictions"]


class LiveClients:
    """The clients on the live lists of a process: those that are blocked, and those with restrictions.

    Every request reads `is_active`, and nothing else while both lists are empty.
    """

    __slots__ = ("__weakref__", "blocks", "is_active", "kinds", "restrictions")

    def __init__(self) -> None:
        self.blocks, self.restrictions = BlockList(), RestrictionList()
        self.is_active = False
        self.kinds: frozenset[str] = frozenset()
        """The kinds of identities on the lists, beside addresses."""
        self.blocks.on_change = self.restrictions.on_change = self._update

    def sweep(self, now_us: int) -> None:
        """Remove what has ended: requests ignore it, but it takes up memory."""
        self.blocks.sweep(now_us)
        self.restrictions.sweep(now_us)

    def _update(self) -> None:
        self.kinds = self.blocks.kinds | self.restrictions.kinds
        self.is_active = self.blocks.has_entries or self.restrictions.has_entries


class StoredRestrictions(NamedTuple):
    """A record with its text in the store, by which another writer's change is noticed."""

    record: ClientRestrictions | None
    text: bytes | None


class LiveClientStore:
    """Reads and writes the shared lists; every method may wait for the store, and raise a StoreError.

    `store` creates the clients that connect to it. Without one, the lists of this process are all that there is. As a
    context manager, it closes the connections: changes are rare. `announce` is called with each change of a block, for
    other regions: with the block and True if it is set, False if it has ended.
    """

    def __init__(
        self,
        live: LiveClients,
        store: Any = None,
        announce: Callable[[LiveBlock, bool], None] = lambda block, is_set: None,
    ) -> None:
        self._live = live
        self._client = None if store is None else store.background_client()
        self._announce = announce

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections; the next call opens new ones."""
        if self._client is not None:
            self._client.close()

    def refresh(self, changed: Sequence[tuple[str, str]] | None) -> None:
        """Read the entries of these identities again; for None, those of all."""
        if (client := self._client) is None:
            return
        blocks, restrictions = self._live.blocks, self._live.restrictions
        if changed is None:
            blocks.reload(client.blocks)
            restrictions.reload(lambda: _known(client.restrictions()))
        else:
            blocks.refresh(changed, client.find_blocks)
            restrictions.refresh(changed, lambda names: [*map(_entry, client.find_restrictions(names))])

    def find_restrictions(self, identities: Sequence[tuple[str, str]]) -> list[StoredRestrictions]:
        """The records of identities, in their canonical spelling."""
        if (client := self._client) is None:
            return [StoredRestrictions(self._live.restrictions.get(*identity), None) for identity in identities]
        texts = client.find_restrictions(identities)
        return [StoredRestrictions(None if text is None else read_restrictions(text), text) for text in texts]

    def restrictions(self) -> list[ClientRestrictions]:
        """All records."""
        if (client := self._client) is None:
            return [*self._live.restrictions]
        found = [read_restrictions(text) for text in client.restrictions()]
        return [*{(each.kind, each.value): each for each in found if each is not None}.values()]

    def swap_restrictions(self, changes: Sequence[tuple[StoredRestrictions, ClientRestrictions]]) -> list[bool]:
        """Replace records that were read before; False for those that have changed since, which stay as they are."""
        own = self._live.restrictions
        if (client := self._client) is None:
            return [own.swap(before.record, *_entry_of(after)) for before, after in changes]
        texts = [(after.kind, after.value, before.text, encode_restrictions(after)) for before, after in changes]
        swapped: list[bool] = client.swap_restrictions(texts)
        for (_, after), is_swapped in zip(changes, swapped, strict=True):
            if is_swapped:  # at once here, and on the others when they receive the message
                own.set(*_entry_of(after))
        return swapped

    def block_all(self, blocks: Sequence[LiveBlock]) -> None:
        """Add or replace blocks."""
        if (client := self._client) is not None and blocks:
            client.block_all(blocks)
        for block in blocks:
            self._live.blocks.set(*block)
            self._announce(block, True)

    def extend_blocks(self, blocks: Sequence[LiveBlock]) -> None:
        """Add blocks, and replace those that would end earlier: a person may have blocked a client for longer."""
        stored = self.find_blocks([(block.kind, block.value) for block in blocks])
        self.block_all(
            [block for block, now in zip(blocks, stored, strict=True) if now is None or _outlasts(block, now)]
        )

    def unblock(self, kind: str, value: str) -> bool:
        """Remove a block; False if there was none."""
        if (client := self._client) is None:
            return self._live.blocks.drop(kind, value)
        existed: bool = client.unblock(kind, value)
        self._live.blocks.drop(kind, value)
        self._announce(LiveBlock(kind, value), False)
        return existed

    def lift(self, block: LiveBlock) -> None:
        """Remove this block, unless it was replaced by another one."""
        if self.find_blocks([(block.kind, block.value)]) == [block]:
            self.unblock(block.kind, block.value)

    def find_blocks(self, identities: Sequence[tuple[str, str]]) -> list[LiveBlock | None]:
        """The blocks of identities, in their canonical spelling."""
        if (client := self._client) is None:
            return [self._live.blocks.get(*identity) for identity in identities]
        return [None if block is None else LiveBlock(*block) for block in client.find_blocks(identities)]


def _outlasts(block: LiveBlock, other: LiveBlock) -> bool:
    if block.until_us is None or other.until_us is None:
        return block.until_us is None
    return block.until_us > other.until_us


def _known(texts: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
    return (entry for entry in map(_entry, texts) if entry is not None)


def _entry(text: bytes | None) -> tuple[Any, ...] | None:
    """The fields of an entry of the local list."""
    record = None if text is None else read_restrictions(text)
    return None if record is None else _entry_of(record)


def _entry_of(record: ClientRestrictions) -> tuple[Any, ...]:
    return record.kind, record.value, record.by_scenario
