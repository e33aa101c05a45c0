"""AddressRanges: an immutable set of networks that finds an address by binary search, and the parser of its entries."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidInput
from headgate.local.networks import IPV4_MAPPED, MAX_ADDRESS_LENGTH, NAT64, pack, unwrap_nat64

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AddressRanges", "RangeBuilder", "parse_range"]

IPV4_BITS: Final = 32
IPV6_BITS: Final = 128
LOW_BITS: Final = 64
LOW_MASK: Final = (1 << LOW_BITS) - 1


class AddressRanges:
    """A set of addresses, as the sorted bounds of disjoint ranges: an address in it bisects to an odd index.

    Takes 8 bytes per range of IPv4 addresses, 32 per range of IPv6 addresses.

    >>> ranges = AddressRanges.of(["203.0.113.0/24", "2001:db8::/32"])
    >>> "203.0.113.9" in ranges, "203.0.114.0" in ranges, "2001:db8::1" in ranges, "unknown" in ranges
    (True, False, True, False)
    """

    __slots__ = ("_ipv4", "_ipv6_high", "_ipv6_low")

    def __init__(self, ipv4: array[int], ipv6_high: array[int], ipv6_low: array[int]) -> None:
        """The bounds of IPv4 ranges, and the upper and lower 64 bits of those of IPv6 ranges."""
        self._ipv4 = ipv4
        self._ipv6_high = ipv6_high
        self._ipv6_low = ipv6_low

    @classmethod
    def of(cls, networks: Iterable[str]) -> AddressRanges:
        builder = RangeBuilder()
        for network in networks:
            builder.add(network)
        return builder.build()

    def __contains__(self, address: str) -> bool:
        packed = pack(address)
        return packed is not None and self.contains_packed(unwrap_nat64(packed))

    def contains_packed(self, packed: bytes) -> bool:
        """True if an address of 4 or 16 bytes is in the set."""
        number = int.from_bytes(packed)
        if len(packed) == 4:
            return bisect_right(self._ipv4, number) & 1 == 1
        high, low = number >> LOW_BITS, number & LOW_MASK
        end = bisect_right(self._ipv6_high, high)
        if end == 0 or self._ipv6_high[end - 1] != high:
            return end & 1 == 1
        start = bisect_left(self._ipv6_high, high, 0, end)
        return bisect_right(self._ipv6_low, low, start, end) & 1 == 1

    def __len__(self) -> int:
        """The number of ranges: networks that overlap or adjoin are one."""
        return (len(self._ipv4) + 1) // 2 + (len(self._ipv6_high) + 1) // 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AddressRanges) and self.arrays == other.arrays

    __hash__ = None  # type: ignore[assignment]

    @property
    def arrays(self) -> tuple[array[int], array[int], array[int]]:
        """The arguments of the constructor, for storing it."""
        return self._ipv4, self._ipv6_high, self._ipv6_low


class RangeBuilder:
    """Collects networks and merges them."""

    def __init__(self) -> None:
        # A range is one number, its start and its end, which sorts ten times as fast as a tuple.
        self._ranges: dict[int, list[int]] = {IPV4_BITS: [], IPV6_BITS: []}

    def __len__(self) -> int:
        """The number of networks that were added."""
        return len(self._ranges[IPV4_BITS]) + len(self._ranges[IPV6_BITS])

    def add(self, network: str) -> None:
        """Add an address, a network, or a range like "192.0.2.1-192.0.2.9". Raises InvalidInput."""
        bits, start, end = parse_range(network)
        self._ranges[bits].append(start << bits + 1 | end)

    def build(self) -> AddressRanges:
        ipv4 = _merge(self._ranges[IPV4_BITS], IPV4_BITS)
        ipv6 = _merge(self._ranges[IPV6_BITS], IPV6_BITS)
        high, low = array("Q", [each >> LOW_BITS for each in ipv6]), array("Q", [each & LOW_MASK for each in ipv6])
        return AddressRanges(array("I", ipv4), high, low)


def parse_range(text: str) -> tuple[int, int, int]:
    """The size of addresses in bits, the first address, and the one after the last. Raises InvalidInput.

    >>> parse_range("192.0.2.0/31")
    (32, 3221225984, 3221225986)
    """
    if len(text) > 2 * MAX_ADDRESS_LENGTH:
        raise InvalidInput(f"{text[:20]!r}... is not a network; write '203.0.113.9' or '203.0.113.0/24'")
    if "-" in text:
        return _parse_bounds(text)
    host, slash, prefix = text.partition("/")
    packed = _packed(host, text)
    bits = len(packed) * 8
    length = bits
    if slash:
        if not (prefix.isascii() and prefix.isdigit() and len(prefix) <= 3 and 0 < int(prefix) <= bits):
            raise InvalidInput(f"{text!r} is not a network: its prefix is not a number from 1 to {bits}")
        length = int(prefix)
    start, size = int.from_bytes(packed), 1 << bits - length
    if start & size - 1:
        raise InvalidInput(f"{text!r} is not a network: its address has bits beyond the prefix")
    if bits == IPV6_BITS and (embedded := _embedded(packed, length)) is not None:
        return embedded
    return bits, start, start + size


def _parse_bounds(text: str) -> tuple[int, int, int]:
    first, _, last = text.partition("-")
    low, high = _packed(first.strip(), text), _packed(last.strip(), text)
    start, end = int.from_bytes(low), int.from_bytes(high) + 1
    if len(low) != len(high) or start >= end:
        raise InvalidInput(f"{text!r} is not a range: its second address is not above the first")
    return len(low) * 8, start, end


def _packed(host: str, text: str) -> bytes:
    try:
        return inet_pton(AF_INET6 if ":" in host else AF_INET, host)
    except (OSError, ValueError):  # ValueError: a NUL, or a character beyond ASCII
        raise InvalidInput(f"{text!r} is not a network; write '203.0.113.9' or '203.0.113.0/24'") from None


def _embedded(packed: bytes, length: int) -> tuple[int, int, int] | None:
    """The IPv4 network that an IPv6 network of mapped or translated addresses stands for; clients are looked up so."""
    if length < IPV6_BITS - IPV4_BITS or not packed.startswith((IPV4_MAPPED, *NAT64)):
        return None
    start = int.from_bytes(packed[12:])
    return IPV4_BITS, start, start + (1 << IPV6_BITS - length)


def _merge(ranges: list[int], bits: int) -> list[int]:
    """The sorted bounds of the union; without the last one if it is the end of the address space."""
    ranges.sort()
    mask = (1 << bits + 1) - 1
    bounds: list[int] = []
    last = -1
    for each in ranges:
        start, end = each >> bits + 1, each & mask
        if start > last:
            bounds += (start,) if last < 0 else (last, start)
            last = end
        elif end > last:
            last = end
    if bounds and last < 1 << bits:
        bounds.append(last)
    return bounds
