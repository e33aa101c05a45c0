"""Whose address counts: nobody can choose it, whatever they send, and one client has one spelling."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.errors import InvalidInput
from headgate.policy.addresses import UNKNOWN, Addresses, Networks, canonical
from headgate.policy.model import IdentitySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

PROXIES = ("10.0.0.0/8", "192.168.1.1", "2001:db8:ffff::/48")
BARE = Addresses(IdentitySettings())
LISTED = Addresses(IdentitySettings(proxies=PROXIES))
FORWARDED = Addresses(IdentitySettings(proxies=PROXIES, forwarded_by="forwarded"))

PEER = "10.0.0.1"
CLIENT = "203.0.113.9"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.9", "203.0.113.9"),
        (" 203.0.113.9\t", "203.0.113.9"),
        ("203.0.113.9:80", "203.0.113.9"),
        ("203.0.113.9:65535", "203.0.113.9"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("fe80::1", "fe80::1"),
        ("fe80::1%eth0", None),
        ("[fe80::1%eth0]:80", None),
        ("fe80::1%", None),
        ("64:ff9b::203.0.113.9", "203.0.113.9"),
        ("64:FF9B::cb00:7109", "203.0.113.9"),
        ("[64:ff9b::203.0.113.9]:80", "203.0.113.9"),
        ("64:ff9b:1::203.0.113.9", "203.0.113.9"),
        ("64:ff9b:1:2::203.0.113.9", "64:ff9b:1:2::cb00:7109"),
        ("64:ff9b:0:1::203.0.113.9", "64:ff9b:0:1::cb00:7109"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("::FFFF:cb00:7109", "203.0.113.9"),
        ("[::ffff:203.0.113.9]:80", "203.0.113.9"),
        ("::", "::"),
        *[
            (junk, None)
            for junk in (
                "",
                " ",
                ":",
                "x",
                "testclient",
                "unix:",
                "unknown",
                "_hidden",
                "203.0.113",
                "203.0.113.256",
                "203.0.113.09",
                "0xcb.0.113.9",
                "3405803785",
                "203.0.113.9:",
                "203.0.113.9:http",
                "203.0.113.9:123456",
                "203.0.113.9:\u0663",
                "203.0.113.9/32",
                "203.0.113.9%eth0",
                "203.0.113.9\0",
                "203.0.113.9 10.0.0.1",
                "[203.0.113.9]",
                "[203.0.113.9]:80",
                "[2001:db8::1",
                "[2001:db8::1]x",
                "[2001:db8::1]:",
                "[2001:db8::1]80",
                "2001:db8::1::2",
                "2001:db8::g",
                "\udcff:\udcff",
                "1" * 65,
                "2001:db8::1%" + "x" * 60,
            )
        ],
    ],
)
def test_address_has_one_spelling(text: str, address: str | None) -> None:
    assert canonical(text) == address
    assert BARE.client(text) == (UNKNOWN if address is None else address)


NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/96"))


def test_ipv4_clients_behind_nat64_are_counted_by_their_own_addresses() -> None:
    one, other = BARE.client("64:ff9b::1.2.3.4"), BARE.client("64:ff9b::8.8.8.8")
    assert (BARE.identity(one), BARE.identity(other)) == ("1.2.3.4", "8.8.8.8")
    assert BARE.subnet(one) == "1.2.3.0/24"
    assert Networks({"1.2.3.0/24": "block"}).find("64:ff9b::1.2.3.4") == "block"


def test_address_that_nat64_embeds_makes_no_proxy() -> None:
    settings = IdentitySettings(proxies=("10.0.0.0/8", "64:ff9b::a00:63/128"))
    behind = Addresses(settings)
    assert behind.client("64:ff9b::10.0.0.1", [CLIENT]) == "10.0.0.1"
    assert behind.client("10.0.0.1", ["6.6.6.6, 64:ff9b::10.0.0.2"]) == "10.0.0.2"
    assert behind.client("64:ff9b::10.0.0.99", [CLIENT]) == CLIENT


@pytest.mark.parametrize("hop", ["fe80::1%eth0", "2001:db8::1%25en1", "[fe80::1%1]:80"])
def test_zone_makes_a_hop_no_address(hop: str) -> None:
    assert LISTED.client(PEER, [f"203.0.113.9, {hop}"]) == PEER


@given(st.ip_addresses())
def test_spelling_agrees_with_the_standard_library(address: IPv4Address | IPv6Address) -> None:
    found = canonical(address.exploded.upper())
    assert found is not None
    embedded = IPv4Address(address.packed[-4:]) if any(address in each for each in NAT64) else None
    assert ip_address(found) == (getattr(address, "ipv4_mapped", None) or embedded or address)
    assert canonical(found) == found


@pytest.mark.parametrize(
    ("peer", "lines", "client"),
    [
        # Only a proxy's word counts.
        ("198.51.100.7", ["203.0.113.9"], "198.51.100.7"),
        (None, ["203.0.113.9"], UNKNOWN),
        ("testclient", ["203.0.113.9"], UNKNOWN),
        (PEER, [], PEER),
        (PEER, [CLIENT], CLIENT),
        ("::ffff:10.0.0.1", [CLIENT], CLIENT),
        ("192.168.1.1", [CLIENT], CLIENT),
        ("192.168.1.2", [CLIENT], "192.168.1.2"),
        ("2001:db8:ffff::7", ["2001:DB8::9"], "2001:db8::9"),
        # The first from the right that is no proxy.
        (PEER, [f"6.6.6.6, {CLIENT}"], CLIENT),
        (PEER, [f"6.6.6.6, {CLIENT}, 10.9.9.9, 192.168.1.1"], CLIENT),
        (PEER, [f"6.6.6.6,{CLIENT}:4711,[2001:db8:ffff::1]:80"], CLIENT),
        (PEER, ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        # Several lines are one list.
        (PEER, ["6.6.6.6", f"{CLIENT}, 10.0.0.3", "10.0.0.2"], CLIENT),
        (PEER, [CLIENT, "10.0.0.2"], CLIENT),
        # What is no address ends the reading.
        (PEER, ["6.6.6.6, unknown"], PEER),
        (PEER, ["6.6.6.6, unknown, 10.0.0.2"], PEER),
        (PEER, ["6.6.6.6,, 10.0.0.2"], PEER),
        (PEER, ["6.6.6.6, ", "10.0.0.2"], PEER),
        (PEER, ["6.6.6.6", "", "10.0.0.2"], PEER),
        (PEER, [""], PEER),
        (PEER, ["6.6.6.6, " + "x" * 100], PEER),
        # At most 32 hops.
        (PEER, [", ".join([CLIENT, *["10.0.0.2"] * 31])], CLIENT),
        (PEER, [", ".join([CLIENT, *["10.0.0.2"] * 32])], "10.0.0.2"),
        (PEER, [*["10.0.0.3"] * 40, "10.0.0.2"], "10.0.0.3"),
    ],
)
def test_client_behind_proxies(peer: str | None, lines: list[str], client: str) -> None:
    assert LISTED.client(peer, lines) == client


@pytest.mark.parametrize(
    ("line", "client"),
    [
        (f"for={CLIENT}", CLIENT),
        (f"For={CLIENT};proto=https;by=10.0.0.1", CLIENT),
        (f'proto=http ; for="{CLIENT}:4711"', CLIENT),
        ('for="[2001:DB8::9]:4711"', "2001:db8::9"),
        (f'for=6.6.6.6, for={CLIENT};host="example.com", for=10.0.0.2', CLIENT),
        ("for=unknown", PEER),
        ("for=_hidden", PEER),
        ("for=6.6.6.6, for=_hidden, for=10.0.0.2", PEER),
        ("proto=https", PEER),
        (CLIENT, PEER),
        ("for=6.6.6.6;for=10.0.0.2", PEER),
        ('for="6.6.6.6', PEER),
        ('for=6.6.6.6"', PEER),
        ('for=""', PEER),
        ('for="6.6.6\\.6"', PEER),
        # A client's Host that its proxy quotes must not become an element.
        ('for=10.0.0.2;host="x, for=6.6.6.6"', PEER),
        ('for=10.0.0.2;host="x, for=6.6.6.6;host=y"', PEER),
        ('for=10.0.0.2;host="x\\", for=6.6.6.6;host=\\"y"', PEER),
        ('for=10.0.0.2;host="x, for=6.6.6.6;y";proto=http', PEER),
        ('host="x;for=6.6.6.6;y";for=10.0.0.2', PEER),
    ],
)
def test_client_in_a_forwarded_field(line: str, client: str) -> None:
    assert FORWARDED.client(PEER, [line]) == client


def test_list_is_read_up_to_4_kb_and_never_half_an_address() -> None:
    claim, proxy = f"for={CLIENT},", "for=10.0.0.2;x="
    for length in range(4080, 4130):
        line = (claim + proxy).ljust(length, "x")
        cut_off = max(0, length - 4096)
        expected = CLIENT if cut_off == 0 else PEER
        assert FORWARDED.client(PEER, [line]) == expected, length
    for length in range(4060, 4097):
        lines = ["x," + claim.strip(","), proxy.ljust(length, "x")]
        expected = CLIENT if length + len(claim) <= 4096 else PEER if length < 4096 else "10.0.0.2"
        assert FORWARDED.client(PEER, lines) == expected, length


junk = st.text(max_size=30) | st.text('0123456789.:[]%,;="for \t\\', max_size=60)
hostile_lines = st.lists(junk, max_size=5)


@given(st.none() | junk | st.just(PEER), hostile_lines)
def test_nothing_that_is_sent_raises_and_every_answer_is_an_address(peer: str | None, lines: list[str]) -> None:
    for addresses in (LISTED, FORWARDED):
        found = addresses.client(peer, lines)
        assert found == UNKNOWN or canonical(found) == found
        assert addresses.identity(found)
        assert addresses.subnet(found)


proxies = st.lists(st.sampled_from(["10.0.0.2", "192.168.1.1", "2001:db8:ffff::5"]), max_size=5)


@given(hostile_lines, junk, proxies, st.sampled_from([CLIENT, "2001:db8::9"]))
@example([], 'for="', [], CLIENT)
@example(["x" * 5000], "," * 5000, ["10.0.0.2"], CLIENT)
def test_what_a_client_claims_changes_nothing(
    claimed_lines: list[str], claimed: str, behind: list[str], client: str
) -> None:
    hops = [client, *behind]
    elements = [f'for="[{hop}]"' if ":" in hop else f"for={hop}" for hop in hops]
    for addresses, honest in ((LISTED, hops), (FORWARDED, elements)):
        assert addresses.client(PEER, [*claimed_lines, f"{claimed}, {', '.join(honest)}"]) == client
        assert addresses.client(PEER, [*claimed_lines, claimed, *honest]) == client


@pytest.mark.parametrize(
    ("address", "identity", "subnet"),
    [
        ("203.0.113.9", "203.0.113.9", "203.0.113.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("::1", "::/64", "::/48"),
        (UNKNOWN, UNKNOWN, UNKNOWN),
    ],
)
def test_what_an_address_is_counted_by(address: str, identity: str, subnet: str) -> None:
    assert BARE.identity(address) == identity
    assert BARE.subnet(address) == subnet


def test_prefixes_are_those_of_the_settings() -> None:
    addresses = Addresses(IdentitySettings(ipv6_prefix=56, subnet_ipv4=20, subnet_ipv6=32))
    assert addresses.identity("2001:db8:1:2ff::1") == "2001:db8:1:200::/56"
    assert addresses.subnet("203.0.113.9") == "203.0.112.0/20"
    assert addresses.subnet("2001:db8:1::1") == "2001:db8::/32"
    whole = Addresses(IdentitySettings(ipv6_prefix=128, subnet_ipv4=32))
    assert (whole.identity("2001:db8::1"), whole.subnet("203.0.113.9")) == ("2001:db8::1/128", "203.0.113.9/32")


def test_what_is_remembered_is_bounded() -> None:
    addresses = Addresses(IdentitySettings(proxies=PROXIES))
    for number in range(5000):
        host = f"2001:db8:{number:x}::1"
        addresses.subnet(addresses.client(PEER, [f"{host}, 10.{number >> 8}.{number & 255}.1"]))
        addresses.client(str(number) * 100)
    for cache in (addresses._hop, addresses._network):
        assert cache.cache_info().currsize == 4096


NETWORKS = Networks(
    {
        "0.0.0.0/0": "all",
        "10.0.0.0/8": "ten",
        "10.1.0.0/16": "ten-one",
        "10.1.2.3": "host",
        "10.1.2.3/32": "the same host",
        "::ffff:198.51.100.0/120": "mapped",
        "2001:db8::/32": "docs",
        "2001:db8::1": "one",
    }
)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.1.2.3", ["host", "the same host", "ten-one", "ten", "all"]),
        ("::ffff:10.1.2.4", ["ten-one", "ten", "all"]),
        ("198.51.100.255", ["mapped", "all"]),
        ("198.51.101.0", ["all"]),
        ("2001:db8::1", ["one", "docs"]),
        ("2001:db9::", []),
        ("::", []),
        (UNKNOWN, []),
    ],
)
def test_networks_are_found_by_an_address_the_smallest_first(address: str, found: list[str]) -> None:
    assert NETWORKS.find_all(address) == found
    assert NETWORKS.find(address) == (found[0] if found else None)


def test_network_of_all_mapped_addresses_is_all_of_ipv4() -> None:
    mapped = Networks({"::ffff:0:0/96": True})
    assert mapped.find("203.0.113.9")
    assert mapped.find("::fffe:cb00:7109") is None


def in_order(networks: Sequence[str], address: IPv4Address | IPv6Address) -> list[str]:
    """The slow and obvious way: ask each."""
    fitting = [ip_network(network) for network in networks if address in ip_network(network)]
    return [str(network) for network in sorted(fitting, key=lambda network: -network.prefixlen)]


@given(st.data(), st.sampled_from([4, 6]))
def test_networks_agree_with_asking_each(data: st.DataObject, version: int) -> None:
    bits = 32 if version == 4 else 128
    # Few different bits, so that networks contain each other.
    starts = st.integers(0, 7).map(lambda number: (1 << bits - 3) + (number << bits // 2))
    of_version = IPv4Address if version == 4 else IPv6Address
    networks = data.draw(
        st.lists(
            st.tuples(starts, st.integers(0, bits)).map(
                lambda pair: str(ip_network((of_version(pair[0]), pair[1]), strict=False))
            ),
            unique=True,
        )
    )
    address = of_version(data.draw(starts))
    assert Networks({network: network for network in networks}).find_all(str(address)) == in_order(networks, address)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1/8", "10.0.0.1/8 has host bits set"),
        ("10.0.0.0/33", "'10.0.0.0/33' does not appear to be an IPv4 or IPv6 network"),
        ("proxy.internal", "'proxy.internal' does not appear to be an IPv4 or IPv6 network"),
    ],
)
def test_what_is_no_network_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Networks({text: True})
    assert str(refused.value) == f"{text!r} is not a network: {why}; write '203.0.113.9' or '203.0.113.0/24'"
