"""Client addresses: trusted proxies, forwarding headers and networks.

Security-relevant: these rules keep clients from choosing their own address.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from headgate.errors import InvalidInput
from headgate.local.block_list import IPV4_MAPPED, NAT64

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.policy.model import IdentitySettings

__all__ = ["UNKNOWN", "Addresses", "Networks", "canonical"]

T = TypeVar("T")

Hop: TypeAlias = tuple[str, bool]
"""An address that a request passed through, and True if it is a trusted proxy."""

UNKNOWN: Final = "unknown"
"""The address of all clients without one, as over a Unix socket."""

MOST_HOPS: Final = 32
LONGEST_LIST: Final = 4096
"""The characters of a forwarding header that are read, from its right end."""

MOST_REMEMBERED: Final = 4096
LONGEST_ADDRESS: Final = 64
"""In characters; an IPv6 address with brackets and port is shorter."""


class Addresses:
    """Determines the address of a client, and the networks that it is counted by."""

    __slots__ = ("_hop", "_ipv6_prefix", "_name", "_network", "_proxies", "_subnets")

    def __init__(self, settings: IdentitySettings) -> None:
        self._proxies = Networks(dict.fromkeys(settings.proxies, True))
        self._name = _forwarded_for if settings.forwarded_by == "forwarded" else str
        self._ipv6_prefix = settings.ipv6_prefix
        self._subnets = (settings.subnet_ipv4, settings.subnet_ipv6)
        self._hop = lru_cache(MOST_REMEMBERED)(self._read)
        self._network = lru_cache(MOST_REMEMBERED)(_network)

    def client(self, peer: str | None, forwarded: Sequence[str] = ()) -> str:
        """The address of the client: that of the peer or, if that is a trusted proxy, the one that it forwards.

        `forwarded` are the lines of the configured header in order. Each proxy appends the address of its peer on the
        right, so the first hop from the right that is not a trusted proxy is the client; everything further left is
        unverified. If a hop is not an address, the peer is the client.
        """
        hop = self._hop(peer) if peer is not None and len(peer) <= LONGEST_ADDRESS else None
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
            hop = self._hop(name) if len(name) <= LONGEST_ADDRESS else None
            if hop is None:
                return peer
            address, is_proxy = hop
            if not is_proxy:
                break
        return address

    def _read(self, name: str) -> Hop | None:
        packed = _packed(name)
        if packed is None:
            return None
        # Proxies are matched without NAT64, so that an embedded address does not make a client a trusted proxy.
        return _text(_without_nat64(packed)), self._proxies.smallest(packed) is not None


class Networks(Generic[T]):
    """Values by network, with one lookup per prefix length.

    >>> networks = Networks({"10.0.0.0/8": "ours", "10.1.2.3": "Ada's"})
    >>> networks.find("10.1.2.3"), networks.find_all("10.1.2.3"), networks.find("192.0.2.1")
    ("Ada's", ["Ada's", 'ours'], None)
    """

    __slots__ = ("_by_size",)

    def __init__(self, entries: Mapping[str, T]) -> None:
        tables: dict[tuple[int, int], dict[int, list[T]]] = {}
        for text, value in entries.items():
            size, shift, start = _parse_network(text)
            tables.setdefault((size, shift), {}).setdefault(start, []).append(value)
        self._by_size = {
            size: [(shift, tables[of, shift]) for of, shift in sorted(tables) if of == size] for size in (4, 16)
        }

    def find(self, address: str) -> T | None:
        """The value of the smallest network that contains the address."""
        packed = _packed(address)
        return None if packed is None else self.smallest(_without_nat64(packed))

    def find_all(self, address: str) -> list[T]:
        """The values of all networks that contain the address, the smallest first."""
        packed = _packed(address)
        if packed is None:
            return []
        packed = _without_nat64(packed)
        number = int.from_bytes(packed)
        return [value for shift, starts in self._by_size[len(packed)] for value in starts.get(number >> shift, ())]

    def smallest(self, packed: bytes) -> T | None:
        """The same as `find`, for an address of 4 or 16 bytes."""
        number = int.from_bytes(packed)
        for shift, starts in self._by_size[len(packed)]:
            values = starts.get(number >> shift)
            if values is not None:
                return values[0]
        return None


def canonical(text: str) -> str | None:
    """The canonical spelling of an address without its port; None if it is not an address or has a zone.

    >>> canonical("[2001:DB8:0::1]:443"), canonical("::ffff:192.0.2.1"), canonical("64:ff9b::192.0.2.1")
    ('2001:db8::1', '192.0.2.1', '192.0.2.1')
    >>> canonical("192.0.2.1:80"), canonical("fe80::1%eth0"), canonical("x")
    ('192.0.2.1', None, None)
    """
    packed = _packed(text)
    return None if packed is None else _text(_without_nat64(packed))


def _packed(text: str) -> bytes | None:
    """The 4 or 16 bytes of an address; None if it is not one or has a zone, which is local to a machine."""
    if len(text) > LONGEST_ADDRESS:
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


def _without_nat64(packed: bytes) -> bytes:
    """The IPv4 address that NAT64 embeds in an IPv6 address; any other address as it is."""
    return packed[12:] if len(packed) == 16 and packed.startswith(NAT64) else packed


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


def _text(packed: bytes) -> str:
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


def _network(address: str, ipv4_prefix: int, ipv6_prefix: int) -> str:
    packed = _packed(address)
    if packed is None:
        return address
    packed = _without_nat64(packed)
    prefix = ipv4_prefix if len(packed) == 4 else ipv6_prefix
    shift = len(packed) * 8 - prefix
    start = int.from_bytes(packed) >> shift << shift
    return f"{_text(start.to_bytes(len(packed)))}/{prefix}"


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
