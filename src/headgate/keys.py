"""Who is counted: a limit together with the identity it is counted by, and the text that names the two in a store."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.errors import InvalidKey

if TYPE_CHECKING:
    from headgate.limits import Limit

__all__ = ["LONGEST_IDENTITY", "Key", "escape", "identify"]

LONGEST_IDENTITY: Final = 128
"""Longer identities are stored as their hash: no caller can make a store keep a megabyte."""

GLOBAL_IDENTITY: Final = "%all"
"""The identity without parts. No text of a caller's can become this: a percent sign is always escaped."""

_NAME_ESCAPES: Final = str.maketrans({"%": "%25", ":": "%3A"})
_PART_ESCAPES: Final = str.maketrans({"%": "%25", "|": "%7C"})


class Key(NamedTuple):
    """One counter: made by `limit.by(...)`, given to `check` and its siblings."""

    limit: Limit
    parts: tuple[str | int, ...]
    identity: str
    """The parts as one text, injectively: different parts never meet in one counter."""

    def part(self, index: int) -> Key:
        """One of the counters that a limit with `split` spreads this one over. No text of a caller's can become its
        identity: a percent sign is always escaped."""
        limit = self.limit.part
        return self if limit is None else Key(limit, self.parts, f"{self.identity}|%part-{index % self.limit.split}")


def identify(parts: tuple[str | int, ...]) -> str:
    """One text for the parts of an identity, different for different parts, and never long.

    >>> identify(("tenant-7", 42)), identify(("a|b",)), identify(("a", "b"))
    ('tenant-7|42', 'a%7Cb', 'a|b')
    """
    if not parts:
        return GLOBAL_IDENTITY
    text = "|".join([_text(part) for part in parts])
    if len(text) <= LONGEST_IDENTITY:
        return text
    return "%hash-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def escape(name: str) -> str:
    """A name that can stand between colons in a stored key, and that no cluster takes for a hash tag."""
    return name.translate(_NAME_ESCAPES)


def _text(part: str | int) -> str:
    if isinstance(part, str):
        return part.translate(_PART_ESCAPES)
    if isinstance(part, int) and not isinstance(part, bool):
        return str(part)
    raise InvalidKey(
        f"{part!r} cannot identify a client: by() takes text and whole numbers"
        + ("; decide what callers without an identity are counted by" if part is None else "")
    )
