"""Autonomous systems of addresses from MaxMind DB files, which are written here by the specification."""

from __future__ import annotations

import os
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.abuse.network_names import MARKER, NetworkDatabase, NetworkNames
from headgate.errors import InvalidInput
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.testing import FakeClock, FakeRequest

if TYPE_CHECKING:
    from pathlib import Path

NETWORKS = {"203.0.113.0/24": (64500, "Example"), "198.51.100.128/25": (64501, "Ünïcode"), "2001:db8::/32": (64502, "")}


def encoded(value: Any) -> bytes:
    """A value as the format has it, with a type and a size in front."""
    if isinstance(value, dict):
        return bytes([7 << 5 | len(value)]) + b"".join(encoded(part) for item in value.items() for part in item)
    if isinstance(value, str):
        text = value.encode()
        size = bytes([2 << 5 | len(text)]) if len(text) < 29 else bytes([2 << 5 | 29, len(text) - 29])
        return size + text
    digits = value.to_bytes((value.bit_length() + 7) // 8)
    return bytes([6 << 5 | len(digits)]) + digits


def database(networks: dict[str, tuple[int, str]], bits: int = 28, version: int = 6) -> bytes:
    tree: list[list[Any]] = [[None, None]]
    data, offsets = b"", {}
    for text, (number, name) in networks.items():
        network = ip_network(text)
        if network.version > version:
            continue
        offsets[text] = len(data)
        data += encoded({"autonomous_system_number": number, "autonomous_system_organization": name})
        shift = 96 if version == 6 and network.version == 4 else 0
        width, length = (128 if version == 6 else 32), network.prefixlen + shift
        node = 0
        for depth in range(length):
            side = int(network.network_address) >> (width - 1 - depth) & 1
            if depth == length - 1:
                tree[node][side] = text
            elif not isinstance(tree[node][side], int):
                tree.append([None, None])
                tree[node][side] = len(tree) - 1
                node = len(tree) - 1
            else:
                node = tree[node][side]
    count, written = len(tree), b""
    for node_records in tree:
        left, right = [
            count if each is None else each if isinstance(each, int) else count + 16 + offsets[each]
            for each in node_records
        ]
        if bits == 28:
            middle = (left >> 24) << 4 | right >> 24
            written += (left & 0xFFFFFF).to_bytes(3) + bytes([middle]) + (right & 0xFFFFFF).to_bytes(3)
        else:
            written += left.to_bytes(bits // 8) + right.to_bytes(bits // 8)
    about = {"node_count": count, "record_size": bits, "ip_version": version, "database_type": "x" * 40}
    return written + bytes(16) + data + MARKER + encoded(about)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("bits", [24, 28, 32])
def test_addresses_are_found_in_their_networks(tmp_path: Path, bits: int, version: int) -> None:
    (tmp_path / "asn.mmdb").write_bytes(database(NETWORKS, bits, version))
    names = NetworkNames(f"{tmp_path}/asn.mmdb")
    assert names("203.0.113.9") == names("203.0.113.255") == "AS64500 (Example)"
    assert names("198.51.100.128") == "AS64501 (Ünïcode)"
    assert names("2001:db8:7::1") == ("AS64502" if version == 6 else None)
    assert [names(other) for other in ("198.51.100.127", "203.0.112.255", "2001:db9::1", "unknown", "")] == [None] * 5


def test_pointers_are_followed(tmp_path: Path) -> None:
    content = database({"203.0.113.0/24": (64500, "x")}, 24, 4)
    value = encoded({"autonomous_system_number": 64500, "autonomous_system_organization": "x"})
    pointer = bytes([1 << 5, len(value)])  # the value is moved behind a pointer to it
    start = content.index(value)
    (tmp_path / "asn.mmdb").write_bytes(
        content[:start] + pointer + bytes(len(value) - 2) + value + content[start + len(value) :]
    )
    assert NetworkNames(f"{tmp_path}/asn.mmdb")("203.0.113.1") == "AS64500 (x)"


def test_replaced_file_is_read_again_and_a_damaged_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "asn.mmdb", [0.0]
    monkeypatch.setattr("headgate.abuse.network_names.time.monotonic", lambda: now[0])
    names = NetworkNames(f"{file}")
    assert names("203.0.113.1") is None
    for content, expected in (
        (database(NETWORKS), "AS64500 (Example)"),
        (b"half a file", "AS64500 (Example)"),
        (database({"203.0.113.0/24": (64511, "")}), "AS64511"),
    ):
        file.write_bytes(content)
        os.utime(file, ns=(int(now[0] * 1e9), int(now[0] * 1e9)))
        now[0] += 61
        names("192.0.2.1")
        names._names.pop("192.0.2.1", None)
        assert names("203.0.113.1") == expected
    messages = [record.getMessage() for record in caplog.records]
    assert ["cannot be read" in messages[0], "is not a MaxMind DB file" in messages[1], len(messages)] == [
        True,
        True,
        2,
    ]


WHOLE = database(NETWORKS)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_no_damaged_file_breaks_detection(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.mmdb"
    file.write_bytes(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :])
    try:
        NetworkDatabase(f"{file}")
    except InvalidInput:
        return
    names = NetworkNames(f"{file}")
    for address in ("203.0.113.9", "198.51.100.200", "2001:db8::1", "0.0.0.0", "255.255.255.255"):
        assert names(address) is None or names(address)


def test_rotation_within_a_network_is_found(tmp_path: Path) -> None:
    (tmp_path / "asn.mmdb").write_bytes(database(NETWORKS))
    rotation = "{path: /login, by: asn, when: {addresses: 40}, each: {requests: 3}, steps: [block for 1 hour]}"
    abuse = f"{{networks: {tmp_path}/asn.mmdb, scenarios: {{rotation: {rotation}}}}}"
    gate = Gate(read(f"limits: [{{by: ip, bucket: 100/minute}}]\nabuse: {abuse}"), clock=FakeClock())
    for number in range(50):
        for address in (f"203.0.113.{number}", f"192.0.2.{number}"):
            for _ in range(6):
                gate.finish(gate.admit(FakeRequest("/login", "POST", peer=address)), 401)
    gate.flush_events()
    assert {gate.admit(FakeRequest("/", peer=f"203.0.113.{number}")).allowed for number in range(50)} == {False}
    assert {gate.admit(FakeRequest("/", peer=f"192.0.2.{number}")).allowed for number in range(50)} == {True}
    assert gate.abuse is not None
    assert "with the same network (AS64500 (Example))" in gate.abuse.findings[0].evidence
    gate.close()
