"""Keys: a limit with the identity that it counts, the names of both in a store, and keyed hashes of identities."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.errors import InvalidKey

if TYPE_CHECKING:
    from headgate.limits import Limit

__all__ = ["MAX_IDENTITY_LENGTH", "Key", "escape", "identify", "is_keyed_hash"]

MAX_IDENTITY_LENGTH: Final = 128
"""In characters. Longer identities are stored as their hash, so that callers cannot fill the store with long keys."""

GLOBAL_IDENTITY: Final = "%all"  # the identity without parts; identities of callers never contain a bare percent sign
_KEYED_HASH: Final = re.compile(r"hmac:[0-9a-f]{32}")
_NAME_ESCAPES: Final = str.maketrans({"%": "%25", ":": "%3A"})
_PART_ESCAPES: Final = str.maketrans({"%": "%25", "|": "%7C"})


class Key(NamedTuple):
    """One counter: created by `limit.by(...)`, and passed to `check` and the other methods of limiters."""

    limit: Limit
    parts: tuple[str | int, ...]
    identity: str
    """The parts as one text: different parts never share a counter."""

    @property
    def account(self) -> str:
        """The identity that is charged: in a fair limit, where all tenants share a counter, that of the tenant."""
        limit = self.limit
        return f"{self.identity}|{limit.member}" if limit.algorithm == "fair_share" else self.identity  # type: ignore[attr-defined]

    def part(self, index: int) -> Key:
        """The key of one shard of a limit with `split`."""
        limit = self.limit.part
        return self if limit is None else Key(limit, self.parts, f"{self.identity}|%part-{index % self.limit.split}")


def identify(parts: tuple[str | int, ...]) -> str:
    """Encode the parts of an identity as one text of bounded length, different for different parts.

    >>> identify(("tenant-7", 42)), identify(("a|b",)), identify(("a", "b"))
    ('tenant-7|42', 'a%7Cb', 'a|b')
    """
    if not parts:
        return GLOBAL_IDENTITY
    text = "|".join([_text(part) for part in parts])
    if len(text) <= MAX_IDENTITY_LENGTH:
        return text
    return "%hash-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def escape(name: str) -> str:
    """Escape a name for use between colons in a stored key."""
    return name.translate(_NAME_ESCAPES)


def is_keyed_hash(value: str) -> bool:
    """True for the keyed hash of an identity or of an API key.

    >>> is_keyed_hash("hmac:00112233445566778899aabbccddeeff"), is_keyed_hash("203.0.113.9")
    (True, False)
    """
    return _KEYED_HASH.fullmatch(value) is not None


def _text(part: str | int) -> str:
    if isinstance(part, str):
        return part.translate(_PART_ESCAPES)
    if isinstance(part, int) and not isinstance(part, bool):
        return str(part)
    raise InvalidKey(
        f"{part!r} cannot identify a client: by() takes text and whole numbers"
        + ("; decide what callers without an identity are counted by" if part is None else "")
    )
