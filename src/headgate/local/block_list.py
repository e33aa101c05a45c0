"""The live block list, as this process knows it: requests are rejected without asking the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headgate.errors import InvalidInput
from headgate.local.live_list import LiveList, canonical

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["BlockList", "LiveBlock", "checked_block"]


class LiveBlock(NamedTuple):
    """A blocked client; `until_us` is None for a block without end."""

    kind: str
    value: str
    until_us: int | None = None
    reason: str | None = None

    def applies_at(self, now_us: int) -> bool:
        return self.until_us is None or now_us < self.until_us


class BlockList(LiveList[LiveBlock]):
    """Blocks of clients.

    >>> blocks = BlockList()
    >>> blocks.set("tenant", "acme", None, "unpaid")
    >>> blocks.set("ip", "203.0.113.0/24", 2_000_000, None)
    >>> blocks.find({"address": "203.0.113.9"}, now_us=1_999_999).value
    '203.0.113.0/24'
    >>> blocks.find({"address": "203.0.113.9", "tenant": "acme"}, now_us=2_000_000).reason
    'unpaid'
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(LiveBlock)


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
