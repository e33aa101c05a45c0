"""The local block list: lookup by identity, by network and by identity hash, expiry, and updates."""

from __future__ import annotations

import logging
from contextlib import closing
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidInput
from headgate.gate.gate import Gate
from headgate.local.block_list import BlockList, LiveBlock
from headgate.local.live_list import canonical
from headgate.policy import read
from headgate.policy.api_keys import IdentityHashes
from support.processes import run_in_child
from support.traffic import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

NOW_US = 1_763_251_200_000_000


def block_list_of(*blocks: tuple[str, str] | tuple[str, str, int | None]) -> BlockList:
    known = BlockList()
    for kind, value, *until_us in blocks:
        known.set(kind, value, until_us[0] if until_us else None, f"why {value}")
    return known


# Lookup

FOUND: list[tuple[Mapping[str, str], tuple[str, str] | None]] = [
    ({}, None),
    ({"tenant": "acme"}, ("tenant", "acme")),
    ({"tenant": "Acme"}, None),
    ({"user": "acme"}, None),
    ({"user": "ada", "tenant": "acme"}, ("tenant", "acme")),
    ({"api_key": "k1"}, ("api_key", "k1")),
    ({"address": "203.0.113.9"}, ("ip", "203.0.113.9")),
    ({"address": "203.0.113.10"}, ("ip", "203.0.113.0/24")),
    ({"address": "203.0.114.9"}, None),
    ({"address": "::ffff:203.0.113.9"}, ("ip", "203.0.113.9")),
    ({"address": "198.51.100.7"}, ("ip", "198.51.100.0/25")),
    ({"address": "198.51.100.128"}, None),
    ({"address": "2001:db8::5"}, ("ip", "2001:db8::5")),
    ({"address": "2001:db8:0:0::6"}, ("ip", "2001:db8::/48")),
    ({"address": "2001:db8:1::5"}, None),
    ({"address": "unknown"}, None),
    ({"address": "203.0.113.9" * 20}, None),
    ({"address": "192.0.2.1", "ip": "203.0.113.9"}, None),  # blocks apply to the address, not to the counted identity
    ({"subnet": "203.0.113.0/24"}, None),
]


@pytest.mark.parametrize(("who", "found"), FOUND)
def test_each_identity_is_looked_up_by_its_kind(who: Mapping[str, str], found: tuple[str, str] | None) -> None:
    blocks = block_list_of(
        *[("tenant", "acme"), ("api_key", "k1"), ("ip", "203.0.113.9"), ("ip", "203.0.113.0/24")],
        *[("ip", "::ffff:198.51.100.0/121"), ("ip", "2001:DB8:0::5"), ("ip", "2001:db8::/48")],
        ("ip", "2001:db8::"),
    )
    block = blocks.find(who, NOW_US)
    assert (block and block[:2]) == found
    assert block is None or block.reason is not None


def test_all_of_the_internet_can_be_blocked() -> None:
    blocks = block_list_of(("ip", "0.0.0.0/0"), ("ip", "::/0"))
    for address in ("0.0.0.0", "255.255.255.255", "::", "ffff::1", "::ffff:1.2.3.4"):
        assert blocks.find({"address": address}, NOW_US) is not None


def addresses() -> st.SearchStrategy[IPv4Address | IPv6Address]:
    """Few addresses close to each other, so that they share networks."""
    return st.one_of(
        st.integers(0, 2**6 - 1).map(lambda bits: IPv4Address(bits % 8 | (bits // 8) << 29)),
        st.integers(0, 2**6 - 1).map(lambda bits: IPv6Address(bits % 8 | (bits // 8) << 125)),
    )


networks = st.builds(
    lambda address, share: str(ip_network((address, address.max_prefixlen * share // 16), strict=False)),
    addresses(),
    st.integers(0, 16),
)


@given(st.lists(st.tuples(st.sampled_from(["set", "set", "drop"]), networks), max_size=30), addresses())
def test_smallest_active_network_is_found(steps: list[tuple[str, str]], address: Any) -> None:
    blocks, model = BlockList(), set()
    for verb, network in steps:
        if verb == "set":
            blocks.set("ip", network, None, None)
            model.add(ip_network(network))
        else:
            assert blocks.drop("ip", network) == (ip_network(network) in model)
            model.discard(ip_network(network))
    around = [each for each in model if each.version == address.version and address in each]
    found = blocks.find({"address": str(address)}, NOW_US)
    assert bool(blocks) == bool(model)
    assert len(blocks) == len(model)
    assert (found and ip_network(found.value)) == max(around, key=lambda each: each.prefixlen, default=None)


# Expiry


def test_block_ends_exactly_at_its_end_time() -> None:
    blocks = block_list_of(("user", "ada", NOW_US), ("ip", "10.0.0.1", NOW_US))
    for who in ({"user": "ada"}, {"address": "10.0.0.1"}):
        assert blocks.find(who, NOW_US - 1) is not None
        assert blocks.find(who, NOW_US) is None


def test_expired_block_hides_no_active_block() -> None:
    blocks = block_list_of(
        ("ip", "10.0.0.1", NOW_US), ("ip", "10.0.0.0/8", NOW_US + 1), ("user", "ada", NOW_US), ("user", "bob")
    )
    found = blocks.find({"address": "10.0.0.1", "user": "ada"}, NOW_US)
    assert found is not None
    assert found.value == "10.0.0.0/8"
    assert blocks.find({"user": "ada", "tenant": "x"}, NOW_US) is None
    assert blocks.find({"tenant": "x", "user": "bob"}, NOW_US) is not None


def test_sweep_removes_expired_blocks() -> None:
    blocks = block_list_of(("ip", "10.0.0.1", NOW_US), ("user", "ada", NOW_US), ("user", "bob", NOW_US + 1))
    assert len(blocks) == 3
    blocks.sweep(NOW_US)
    assert [block.value for block in blocks] == ["bob"]
    blocks.sweep(NOW_US + 1)
    assert not blocks
    assert len(blocks) == 0


# Updates


def test_later_block_replaces_an_earlier_one() -> None:
    blocks = block_list_of(("ip", "10.0.0.0/8", NOW_US))
    blocks.set("ip", "10.9.9.9/8", None, "for good")
    assert list(blocks) == [LiveBlock("ip", "10.0.0.0/8", None, "for good")]
    assert len(blocks) == 1


def test_block_list_is_empty_before_and_after_blocks() -> None:
    blocks = BlockList()
    assert not blocks
    for kind, value in (("user", "ada"), ("ip", "2001:db8::1")):
        blocks.set(kind, value, None, None)
        assert blocks
        assert not blocks.drop(kind, "10.0.0.1")
        assert blocks.drop(kind, value.upper() if kind == "ip" else value)
        assert not blocks.drop(kind, value)
        assert not blocks


def test_replace_is_complete() -> None:
    blocks = block_list_of(("user", "ada"), ("ip", "10.0.0.0/8"))
    blocks.replace([("user", "bob", None, None), ("ip", "192.0.2.1", NOW_US, "spam")])
    assert sorted(blocks) == [("ip", "192.0.2.1", NOW_US, "spam"), ("user", "bob", None, None)]
    assert blocks.find({"user": "ada", "address": "10.0.0.1"}, NOW_US) is None
    blocks.replace([])
    assert not blocks


@pytest.mark.parametrize("network", ["nonsense", "", "10.0.0.0/33", "203.0.113", "1" * 100, "10.0.0.1:80"])
def test_invalid_network_is_skipped_with_a_warning(network: str, caplog: pytest.LogCaptureFixture) -> None:
    blocks = BlockList()
    with caplog.at_level(logging.WARNING, "headgate"):
        blocks.replace([("user", "ada", None, None), ("ip", network, None, None), ("user", "bob", None, None)])
    assert [block.value for block in blocks] == ["ada", "bob"]
    assert "is not a network" in caplog.text
    assert not blocks.drop("ip", network)
    with pytest.raises(InvalidInput, match="is not a network"):
        canonical("ip", network)


SPELLINGS = [
    ("ip", "203.0.113.9", "203.0.113.9"),
    ("ip", "203.0.113.9/32", "203.0.113.9"),
    ("ip", "203.0.113.9/24", "203.0.113.0/24"),
    ("ip", "2001:DB8:0:0::1", "2001:db8::1"),
    ("ip", "2001:db8::1/128", "2001:db8::1"),
    ("ip", "2001:db8::1/64", "2001:db8::/64"),
    ("ip", "::ffff:203.0.113.9", "203.0.113.9"),
    ("ip", "::ffff:203.0.113.9/120", "203.0.113.0/24"),
    ("ip", "::ffff:0:0/96", "0.0.0.0/0"),
    ("ip", "::ffff:0:0/95", "::fffe:0:0/95"),
    ("tenant", "::FFFF:203.0.113.9", "::FFFF:203.0.113.9"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), SPELLINGS)
def test_network_has_one_spelling(kind: str, value: str, expected: str) -> None:
    assert canonical(kind, value) == expected
    assert canonical(kind, expected) == expected
    if kind == "ip" and "/" not in value:
        assert ip_address(expected)


HASHES = IdentityHashes(b"for tests only, as long as it has to be")


@given(
    st.lists(st.tuples(st.sampled_from(["ip", "user"]), st.sampled_from(["10.0.0.1", "10.0.0.2", "ada"])), max_size=4),
    st.sampled_from(["10.0.0.1", "10.0.0.2"]),
    st.sampled_from(["ada", "bob"]),
)
def test_block_by_hash_matches_only_its_identity(blocked: list[tuple[str, str]], address: str, user: str) -> None:
    blocks = block_list_of(*((kind, HASHES(kind, value)) for kind, value in blocked))
    who = {"address": address, "ip": address, "user": user}
    assert (blocks.find(who, NOW_US, HASHES) is not None) == bool({("ip", address), ("user", user)} & {*blocked})
    assert blocks.find(who, NOW_US) is None  # no secret to hash with
    assert blocks.kinds == {kind for kind, _ in blocked} - {"ip"}
    for kind, value in dict.fromkeys(blocked):
        assert blocks.drop(kind, HASHES(kind, value))
    assert (len(blocks), blocks.has_entries, [*blocks]) == (0, False, [])


def test_ipv6_client_is_blocked_by_the_hash_of_its_network() -> None:
    blocks = block_list_of(("ip", HASHES("ip", "2001:db8::/64")))
    assert blocks.find({"address": "2001:db8::7", "ip": "2001:db8::/64"}, NOW_US, HASHES) is not None
    assert blocks.find({"address": "2001:db8:0:1::7", "ip": "2001:db8:0:1::/64"}, NOW_US, HASHES) is None


@pytest.mark.parametrize("live", [True, False], ids=["live", "policy"])
@pytest.mark.parametrize("secret", ["for tests only, as long as it has to be", None])
def test_gate_rejects_a_client_blocked_by_hash(live: bool, secret: str | None) -> None:
    text = "limits: [{name: all, by: ip, bucket: 100/minute}]"
    gate = Gate(read(text), secret=secret)
    with closing(gate):
        hashed = gate._hash_identity("ip", "192.0.2.77")
        if live:
            gate.block("ip", hashed)
        else:
            gate._activate(read(f"{text}\nblocked: [{{ip: '{hashed}'}}]"))
        assert not gate.admit(Request(peer="192.0.2.77")).allowed
        assert gate.admit(Request(peer="192.0.2.78")).allowed
        if live:
            assert gate.unblock("ip", hashed)
            assert gate.admit(Request(peer="192.0.2.77")).allowed


@pytest.mark.parametrize("how", ["reload", "refresh"])
def test_reload_does_not_undo_a_concurrent_change(how: str) -> None:
    """The store is read on a message; an unblock may be stored and applied between that read and its application."""
    blocks, stored = BlockList(), [("user", "ada", None, "spam")]
    reads = 0

    def read(*_: Any) -> list[Any]:
        nonlocal reads
        reads += 1
        found = [*stored] if how == "reload" else [stored[0] if stored else None]
        if reads == 1:
            stored.clear()
            blocks.drop("user", "ada")
        return found

    if how == "reload":
        blocks.reload(read)
    else:
        blocks.refresh([("user", "ada")], read)
    assert list(blocks) == []
    assert reads == 2


def test_forked_child_does_not_inherit_the_held_lock() -> None:
    blocks = BlockList()
    with blocks._lock:
        assert run_in_child(lambda: blocks.set("tenant", "acme", None, None)) == 0
