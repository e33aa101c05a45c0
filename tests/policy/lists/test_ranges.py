"""Networks by binary search, compared with the ipaddress module."""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    collapse_addresses,
    ip_address,
    ip_network,
)
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidInput
from headgate.policy.addresses import canonical
from headgate.policy.lists.ranges import AddressRanges, RangeBuilder, parse_range

Network: TypeAlias = IPv4Network | IPv6Network


def network(bits: int) -> st.SearchStrategy[Network]:
    """Networks of all sizes that often overlap, adjoin or repeat: few distinct address bits vary."""
    numbers = st.one_of(
        st.integers(0, (1 << bits) - 1),
        st.integers(0, 15).map(lambda low: (1 << bits) - 1 - low),
        st.integers(0, 15).map(lambda low: 10 << bits - 8 | low),
        st.integers(0, 3).map(lambda high: 1 << bits - 3 | high << bits // 2),
    )
    address = IPv4Address if bits == 32 else IPv6Address
    return st.tuples(numbers, st.integers(1, bits)).map(
        lambda pair: ip_network((address(pair[0] >> bits - pair[1] << bits - pair[1]), pair[1]))
    )


NETWORKS = st.lists(st.one_of(network(32), network(128)), max_size=12)


def neighbours(networks: list[Network]) -> set[str]:
    """The first and the last address of each network, and those next to them."""
    found = {"0.0.0.0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}
    for each in networks:
        for number in (int(each[0]) - 1, int(each[0]), int(each[-1]), int(each[-1]) + 1):
            if 0 <= number < 1 << each.max_prefixlen:
                address = IPv4Address(number) if each.version == 4 else IPv6Address(number)
                found.add(str(address))
    return found


@given(NETWORKS)
def test_addresses_are_found_as_by_ipaddress(networks: list[Network]) -> None:
    ranges = AddressRanges.of(map(str, networks))
    for text in neighbours(networks):
        # Mapped and translated addresses are looked up as the IPv4 address that they stand for.
        client = ip_address(canonical(text) or "")
        plain = [ip_network(canonical_network(each)) for each in networks]
        expected = any(client.version == each.version and client in each for each in plain)
        assert (text in ranges) is expected, text


def canonical_network(each: Network) -> str:
    embedding = [ip_network(prefix) for prefix in ("::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/96")]
    for prefix in embedding if each.version == 6 else ():
        if each.subnet_of(prefix):  # type: ignore[arg-type]
            return f"{IPv4Address(int(each[0]) & 0xFFFFFFFF)}/{each.prefixlen - 96}"
    return str(each)


@given(st.lists(network(32), max_size=12))
def test_ranges_are_merged(networks: list[IPv4Network]) -> None:
    blocks = [(int(each[0]), int(each[-1])) for each in collapse_addresses(networks)]
    separate = sum(start - 1 not in {end for _, end in blocks} for start, _ in blocks)
    assert len(AddressRanges.of(map(str, networks))) == separate


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_range_of_two_addresses_contains_both_and_nothing_beside_them(first: int, last: int) -> None:
    first, last = sorted((first, last))
    ranges = AddressRanges.of([f"{IPv4Address(first)}-{IPv4Address(last)}"])
    assert str(IPv4Address(first)) in ranges
    assert str(IPv4Address(last)) in ranges
    assert first == 0 or str(IPv4Address(first - 1)) not in ranges
    assert last == 2**32 - 1 or str(IPv4Address(last + 1)) not in ranges


@given(st.text(max_size=50))
def test_any_text_is_a_network_or_refused(text: str) -> None:
    try:
        bits, start, end = parse_range(text)
    except InvalidInput:
        return
    assert 0 <= start < end <= 1 << bits


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "203.0.113.0/", "203.0.113.0/33", "203.0.113.0/0", "203.0.113.9/24", "203.0.113.0/-1", "203.0.113.0/²",
        "203.0.113", "0203.0.113.1", "203.0.113.1\0", "::/0", "::/129", "fe80::1%eth0", "2001:db8::1/32", "[::1]",
        "203.0.113.9-203.0.113.8", "203.0.113.9-::1", "203.0.113.9-", "x" * 1000, "<html>",
    ],
)  # fmt: skip
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not a (network|range)"):
        RangeBuilder().add(text)


def test_truncated_prefix_is_refused_instead_of_matching_half_of_the_internet() -> None:
    """A file that ends in the middle of "203.0.113.0/24"."""
    with pytest.raises(InvalidInput, match="bits beyond the prefix"):
        parse_range("203.0.113.0/2")


def test_clients_that_are_no_address_are_not_listed() -> None:
    everything = AddressRanges.of(["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"])
    assert "198.51.100.1" in everything
    assert "2001:db8::1" in everything
    assert "unknown" not in everything
    assert "" not in everything
