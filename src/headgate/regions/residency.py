"""Data residency: the form in which identities leave a region."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headgate.keys import is_keyed_hash

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockNotice", "Residency"]


class BlockNotice(NamedTuple):
    """A block as other regions learn of it."""

    kind: str
    value: str
    reason: str | None


class Residency(NamedTuple):
    """The rules for identities that leave a region. Without rules, they leave in plain text."""

    hash_identity: Callable[[str, str], str] | None = None
    """The keyed hash of an identity, from its kind and value; None to send it in plain text."""
    stay: frozenset[str] = frozenset()
    """The kinds of identity that do not leave the region in any form."""
    ipv6_prefix: int = 64
    """Bits of an IPv6 address that identify one client."""

    def notice(self, kind: str, value: str, reason: str | None = None) -> BlockNotice | None:
        """The form in which a block leaves the region; None if it must not.

        A network of several clients is not hashed, as no address could be compared with its hash.

        >>> Residency(lambda kind, value: "hmac:0").notice("ip", "203.0.113.9", "203.0.113.9 scrapes")
        BlockNotice(kind='ip', value='hmac:0', reason=None)
        >>> Residency(stay=frozenset(["ip"])).notice("ip", "203.0.113.9")
        """
        if kind in self.stay:
            return None
        is_network = "/" in value and not (":" in value and value.endswith(f"/{self.ipv6_prefix}"))
        if self.hash_identity is None or is_keyed_hash(value) or (kind == "ip" and is_network):
            return BlockNotice(kind, value, reason)
        hides_value = reason is None or value not in reason
        return BlockNotice(kind, self.hash_identity(kind, value), reason if hides_value else None)
