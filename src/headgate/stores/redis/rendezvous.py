"""Rendezvous hashing: which of several named shards owns a key.

Each shard has a score for the key, and the highest score wins. When a shard is added, it takes over the keys for which
its score is the highest, 1/(n+1) of all; no other key moves. The scores depend on the names of the shards only, not on
their order or addresses.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_NAME_LENGTH", "RendezvousHash"]

MAX_NAME_LENGTH: Final = 64
"""The longest key of BLAKE2b, in bytes."""


class RendezvousHash:
    """The owners of keys among shards of these names.

    >>> two, three = RendezvousHash(["eu1", "eu2"]), RendezvousHash(["eu1", "eu2", "eu3"])
    >>> moved = [key for key in map(str, range(3000)) if two.owner(key) != three.owner(key)]
    >>> {three.owner(key) for key in moved}, 900 < len(moved) < 1100
    ({'eu3'}, True)
    """

    def __init__(self, names: Iterable[str]) -> None:
        # Sorted, so that the order in which they are listed does not matter even if two scores are equal.
        self._seeds = [(name, name.encode()) for name in sorted(names)]

    def owner(self, key: str) -> str:
        """The shard with the highest score: the BLAKE2b hash of the key, keyed with the name of the shard."""
        text = key.encode()
        best, owner = b"", ""
        for name, seed in self._seeds:
            score = blake2b(text, digest_size=8, key=seed).digest()
            if score > best:
                best, owner = score, name
        return owner
