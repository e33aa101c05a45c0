"""Addresses and networks: their canonical spellings, and values by network."""

from __future__ import annotations

from collections import UserDict
from functools import lru_cache
from ipaddress import ip_network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import TYPE_CHECKING, Final, TypeVar

from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "IPV4_MAPPED", "MAX_ADDRESS_LENGTH", "MAX_CACHED", "NAT64", "Networks", "canonical", "pack", "show_packed",
    "unwrap_nat64",
]  # fmt: skip

T = TypeVar("T")

IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped IPv6 address."""
NAT64: Final = (b"\x00\x64\xff\x9b" + bytes(8), b"\x00\x64\xff\x9b\x00\x01" + bytes(6))
"""The prefixes under which NAT64 embeds an IPv4 address: 64:ff9b::/96 (RFC 6052), and 64:ff9b:1::/96 for local use (RFC
8215). All IPv4 clients behind such a translator would be in one /64."""
MAX_ADDRESS_LENGTH: Final = 64
"""In characters, of an address or a network; an IPv6 address with brackets and port is shorter."""
MAX_CACHED: Final = 4096


class Networks(UserDict[str, T]):
    """Values by network, found with one lookup per prefix length. Lookups may run while another thread changes it.

    >>> networks = Networks({"10.0.0.0/8": "ours", "10.1.2.3": "Ada's"})
    >>> networks.find("10.1.2.3"), networks.find_all("10.1.2.3"), networks.find("192.0.2.1")
    ("Ada's", ["Ada's", 'ours'], None)
    """

    def __init__(self, entries: Mapping[str, T] | None = None) -> None:
        self._tables: dict[int, dict[int, dict[int, dict[str, T]]]] = {0: {}, 4: {}, 16: {}}
        """By the size of addresses in bytes, the number of host bits (ascending), the network bits, and the spelling.
        Everything that is iterated is replaced instead of changed."""
        super().__init__(entries)

    def __setitem__(self, network: str, value: T) -> None:
        size, shift, start = _parse_network(network)
        super().__setitem__(network, value)
        if shift not in self._tables[size]:
            self._tables[size] = dict(sorted([*self._tables[size].items(), (shift, {})]))
        starts = self._tables[size][shift]
        starts[start] = {**starts.get(start, {}), network: value}

    def __delitem__(self, network: str) -> None:
        super().__delitem__(network)
        size, shift, start = _parse_network(network)
        starts = self._tables[size][shift]
        rest = {spelling: value for spelling, value in starts.pop(start).items() if spelling != network}
        if rest:
            starts[start] = rest
        self._tables[size] = {shift: starts for shift, starts in self._tables[size].items() if starts}

    def find(self, address: str) -> T | None:
        """The value of the smallest network that contains the address."""
        return next(iter(self.find_all(address)), None)

    def find_all(self, address: str) -> list[T]:
        """The values of all networks that contain the address, the smallest first."""
        size, number = _locate(address) if len(address) <= MAX_ADDRESS_LENGTH else (0, 0)
        found: list[T] = []
        for shift, starts in self._tables[size].items():  # a loop: runs on requests while networks are blocked
            values = starts.get(number >> shift)
            if values is not None:
                found += values.values()
        return found

    def contains_packed(self, packed: bytes) -> bool:
        """True if a network contains an address of 4 or 16 bytes, which may be one of NAT64."""
        number, tables = int.from_bytes(packed), self._tables[len(packed)]
        return any(number >> shift in starts for shift, starts in tables.items())


def canonical(text: str) -> str | None:
    """The canonical spelling of an address without its port; None if it is not an address or has a zone.

    >>> canonical("[2001:DB8:0::1]:443"), canonical("::ffff:192.0.2.1"), canonical("64:ff9b::192.0.2.1")
    ('2001:db8::1', '192.0.2.1', '192.0.2.1')
    >>> canonical("192.0.2.1:80"), canonical("fe80::1%eth0"), canonical("x")
    ('192.0.2.1', None, None)
    """
    packed = pack(text)
    return None if packed is None else show_packed(unwrap_nat64(packed))


def pack(text: str) -> bytes | None:
    """The 4 or 16 bytes of an address; None if it is not one or has a zone, which is local to a machine."""
    if len(text) > MAX_ADDRESS_LENGTH:
        return None
    host = text.strip(" \t")
    if ":" in host:
        host = _without_port(host)
    try:
        if ":" not in host:
            return inet_pton(AF_INET, host)
        packed = inet_pton(AF_INET6, host)
    except (OSError, ValueError):
        return None
    return packed[12:] if packed.startswith(IPV4_MAPPED) else packed


def unwrap_nat64(packed: bytes) -> bytes:
    """The IPv4 address that NAT64 embeds in an IPv6 address; any other address as it is."""
    return packed[12:] if len(packed) == 16 and packed.startswith(NAT64) else packed


def show_packed(packed: bytes) -> str:
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


@lru_cache(MAX_CACHED)
def _locate(address: str) -> tuple[int, int]:
    """The size of an address in bytes, and its number; (0, 0) if it is not one, as for a client over a Unix socket."""
    packed = unwrap_nat64(pack(address) or b"")
    return len(packed), int.from_bytes(packed)


def _without_port(host: str) -> str:
    """The address of "192.0.2.1:80" or "[2001:db8::1]:80"; empty if that is neither, and itself if there is no port."""
    if host[0] == "[":
        inner, closing, port = host[1:].partition("]")
        return inner if closing and ":" in inner and (not port or _is_port(port)) else ""
    if host.count(":") == 1:
        inner, _, port = host.partition(":")
        return inner if _is_port(":" + port) else ""
    return host


def _is_port(text: str) -> bool:
    return text[0] == ":" and len(text) <= 6 and text.isascii() and text[1:].isdigit()


def _parse_network(text: str) -> tuple[int, int, int]:
    """The size of its addresses in bytes, the number of host bits, and the network bits."""
    try:
        network = ip_network(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not a network: {error}; write '203.0.113.9' or '203.0.113.0/24'") from None
    start, shift = network.network_address.packed, network.max_prefixlen - network.prefixlen
    if start.startswith(IPV4_MAPPED) and shift <= 32:
        start = start[12:]
    return len(start), shift, int.from_bytes(start) >> shift
