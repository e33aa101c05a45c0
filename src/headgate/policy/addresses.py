"""Client addresses: trusted proxies, forwarding headers and networks.

Security-relevant: these rules keep clients from choosing their own address.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from headgate.local.networks import (
    MAX_ADDRESS_LENGTH,
    MAX_CACHED,
    Networks,
    canonical,
    pack,
    show_packed,
    unwrap_nat64,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.policy.model import IdentitySettings

__all__ = ["UNKNOWN", "Addresses", "Networks", "canonical"]

Hop: TypeAlias = tuple[str, bool]
"""An address that a request passed through, and True if it is a trusted proxy."""

UNKNOWN: Final = "unknown"
"""The address of all clients without one, as over a Unix socket."""

MOST_HOPS: Final = 32
LONGEST_LIST: Final = 4096
"""The characters of a forwarding header that are read, from its right end."""


class Addresses:
    """Determines the address of a client, and the networks that it is counted by."""

    __slots__ = ("_hop", "_ipv6_prefix", "_name", "_network", "_proxies", "_subnets")

    def __init__(self, settings: IdentitySettings) -> None:
        self._proxies = Networks(dict.fromkeys(settings.proxies, True))
        self._name = _forwarded_for if settings.forwarded_by == "forwarded" else str
        self._ipv6_prefix = settings.ipv6_prefix
        self._subnets = (settings.subnet_ipv4, settings.subnet_ipv6)
        self._hop = lru_cache(MAX_CACHED)(self._read)
        self._network = lru_cache(MAX_CACHED)(_network)

    def client(self, peer: str | None, forwarded: Sequence[str] = ()) -> str:
        """The address of the client: that of the peer or, if that is a trusted proxy, the one that it forwards.

        `forwarded` are the lines of the configured header in order. Each proxy appends the address of its peer on the
        right, so the first hop from the right that is not a trusted proxy is the client; everything further left is
        unverified. If a hop is not an address, the peer is the client.
        """
        hop = self._hop(peer) if peer is not None and len(peer) <= MAX_ADDRESS_LENGTH else None
        if hop is None:
            return UNKNOWN
        address, is_proxy = hop
        return self._behind(address, forwarded) if forwarded and is_proxy else address

    def identity(self, address: str) -> str:
        """The identity for `by: ip`: an IPv4 address, or the network of an IPv6 address, which one client may own."""
        return self._network(address, 32, self._ipv6_prefix) if ":" in address else address

    def subnet(self, address: str) -> str:
        """The identity for `by: subnet`, as in "203.0.113.0/24"."""
        return self._network(address, *self._subnets)

    def _behind(self, peer: str, forwarded: Sequence[str]) -> str:
        address = peer
        for element in _elements(forwarded):
            name = self._name(element)
            hop = self._hop(name) if len(name) <= MAX_ADDRESS_LENGTH else None
            if hop is None:
                return peer
            address, is_proxy = hop
            if not is_proxy:
                break
        return address

    def _read(self, name: str) -> Hop | None:
        packed = pack(name)
        if packed is None:
            return None
        # Proxies are matched without NAT64, so that an embedded address does not make a client a trusted proxy.
        return show_packed(unwrap_nat64(packed)), self._proxies.contains_packed(packed)


def _network(address: str, ipv4_prefix: int, ipv6_prefix: int) -> str:
    packed = pack(address)
    if packed is None:
        return address
    packed = unwrap_nat64(packed)
    prefix = ipv4_prefix if len(packed) == 4 else ipv6_prefix
    shift = len(packed) * 8 - prefix
    start = int.from_bytes(packed) >> shift << shift
    return f"{show_packed(start.to_bytes(len(packed)))}/{prefix}"


def _elements(lines: Sequence[str]) -> list[str]:
    """The last elements of a header over several lines, from the right; a truncated element is empty."""
    found: list[str] = []
    room = LONGEST_LIST
    for line in reversed(lines):
        elements = line[-room:].split(",")
        if len(line) > room:
            elements[0] = ""
        found += elements[::-1]
        room -= len(line)
        if room <= 0:
            break
    return found[:MOST_HOPS]


def _forwarded_for(element: str) -> str:
    """The `for` parameter of an element of Forwarded (RFC 7239); empty if it is missing or the syntax is invalid.

    Commas and semicolons in quoted strings are not supported: they leave an unbalanced quote, which is invalid. So a
    client cannot inject an element through a value that a proxy quotes, as in `host="..."`.
    """
    named = ""
    for pair in element.split(";"):
        name, _, value = pair.strip(" \t").partition("=")
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        if '"' in value or "\\" in value or '"' in name:
            return ""
        if name.lower() == "for":
            if named:
                return ""
            named = value
    return named
