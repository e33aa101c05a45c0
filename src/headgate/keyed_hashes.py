"""The written form of keyed hashes, by which API keys and pseudonymous clients are named: hmac:<32 hex digits>."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_keyed_hash"]

_KEYED_HASH: Final = re.compile(r"hmac:[0-9a-f]{32}")


def is_keyed_hash(value: str) -> bool:
    """True for the keyed hash of an identity or of an API key.

    >>> is_keyed_hash("hmac:00112233445566778899aabbccddeeff"), is_keyed_hash("203.0.113.9")
    (True, False)
    """
    return _KEYED_HASH.fullmatch(value) is not None
