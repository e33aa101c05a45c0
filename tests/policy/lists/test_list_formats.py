"""The formats of reputation lists, and files that are none."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from headgate.errors import InvalidInput
from headgate.policy.lists.list_formats import parse_list
from headgate.policy.model import ListSource

SOURCE = ListSource("bad", "bad.txt")

FIREHOL = b"""\
#
# firehol_level1
#
# Entries        : 3 subnets, 1 unique IPs
; a comment of Spamhaus
1.10.16.0/20 ; SBL256894
203.0.113.9
2001:db8::/32 # documentation
198.51.100.1-198.51.100.7
192.0.2.0 - 192.0.2.9
"""
TABLE = b"# exported\nfirst seen,network,asn\n2026-01-01, 203.0.113.0/24 ,64500\n2026-01-02,2001:db8::/48,\n"
SPAMHAUS = b"""{"cidr":"1.10.16.0/20","sblid":"SBL256894","rir":"apnic"}
{"cidr":"2001:db8::/32","sblid":"SBL1","rir":"ripe"}
{"type":"metadata","timestamp":1763544004,"records":2}
"""
AWS = b'{"syncToken": "1", "prefixes": [{"net": "3.5.140.0/22", "region": "x"}], "v6": [{"net": "2600:1f69::/40"}]}'
DECISIONS = [
    {"duration": "3h", "origin": "CAPI", "scenario": "http:scan", "scope": "Ip", "type": "ban", "value": "192.0.2.7"},
    {"duration": "3h", "scope": "Range", "type": "ban", "value": "198.51.100.0/24"},
    {"duration": "3h", "scope": "Country", "type": "ban", "value": "AQ"},
    {"duration": "3h", "scope": "Ip", "type": "captcha", "value": "192.0.2.8"},
]


@pytest.mark.parametrize(
    ("format", "options", "data", "listed", "not_listed"),
    [
        ("plain", {}, FIREHOL, ["1.10.31.255", "203.0.113.9", "2001:db8::1", "198.51.100.7", "192.0.2.9"], "1.10.32.0"),
        ("plain", {}, b"\xef\xbb\xbf203.0.113.9\r\n192.0.2.1", ["203.0.113.9", "192.0.2.1"], "192.0.2.2"),
        ("csv", {"column": "network"}, TABLE, ["203.0.113.255", "2001:db8:0:1::"], "203.0.114.0"),
        ("csv", {"column": 2}, TABLE.partition(b"asn\n")[2], ["203.0.113.0"], "203.0.114.0"),
        ("csv", {}, b"203.0.113.0/24\n", ["203.0.113.0"], "203.0.114.0"),
        ("json", {}, b'["203.0.113.0/24", "::1"]', ["203.0.113.0", "::1"], "203.0.114.0"),
        ("json", {"key": "cidr"}, SPAMHAUS, ["1.10.16.1", "2001:db8::9"], "1.10.32.0"),
        ("json", {"key": "net"}, AWS, ["3.5.140.1", "2600:1f69::"], "3.5.144.0"),
        ("crowdsec", {}, json.dumps(DECISIONS).encode(), ["192.0.2.7", "198.51.100.5"], "192.0.2.8"),
        ("crowdsec", {}, json.dumps({"new": DECISIONS, "deleted": None}).encode(), ["192.0.2.7"], "192.0.2.8"),
        ("crowdsec", {}, json.dumps([{"id": 1, "decisions": DECISIONS}]).encode(), ["192.0.2.7"], "192.0.2.8"),
        ("crowdsec", {}, b"null", [], "192.0.2.8"),
    ],
)
def test_formats(format: Any, options: dict[str, Any], data: bytes, listed: list[str], not_listed: str) -> None:
    found = parse_list(data, replace(SOURCE, format=format, **options))
    assert [address for address in listed if address not in found.ranges] == []
    assert not_listed not in found.ranges
    assert found.invalid == 0


@pytest.mark.parametrize(
    ("format", "options", "data", "message"),
    [
        ("plain", {}, b"", "has no networks"),
        ("plain", {}, b"# nothing\n", "has no networks"),
        ("plain", {}, b"<!doctype html><title>Please log in</title>", "1 invalid entries and 0 networks"),
        ("plain", {}, random.Random(7).randbytes(100_000), "invalid entries and 0 networks"),
        ("plain", {}, b"\0" * 1_000_000, "invalid entries and 0 networks"),
        ("plain", {}, b"203.0.113.0/24\n198.51.100.0/2", "1 invalid entries and 1 networks; .*bits beyond the prefix"),
        ("plain", {}, b"192.0.2.1\n" * 60, "more than 50 networks; raise max_networks"),
        ("csv", {"column": "network"}, b"ip,asn\n203.0.113.9,1\n", "no column 'network'; its first line has ip, asn"),
        ("csv", {"column": 3}, b"203.0.113.9,1\n", "1 invalid entries and 0 networks"),
        ("csv", {}, b'"203.0.113.9' + b"x" * 200_000, "is not csv: field larger than field limit"),
        ("json", {}, b"203.0.113.9", "is not JSON: Extra data"),
        ("json", {}, b'["203.0.113.9", ', "is not JSON: "),
        ("json", {}, b"[" * 100_000, "is not json: maximum recursion"),
        ("json", {}, b'[{"ip": "203.0.113.9"}]', "has objects; give key:"),
        ("json", {"key": "cidr"}, b'[{"ip": "203.0.113.9"}]', "has no networks"),
        ("json", {"key": "cidr"}, SPAMHAUS[:-5], "is not JSON lines: line 3"),
        ("json", {}, b"\xff\xfe[", "is not json: 'utf-8' codec"),
        ("crowdsec", {}, b'{"new": 3}', "is not crowdsec: expected an array of decisions"),
        ("crowdsec", {}, b'[{"scope": "Ip"}]', "is not crowdsec: a decision without a value"),
        ("crowdsec", {}, b'{"message": "access forbidden"}', "is not crowdsec: expected an array of decisions"),
    ],
)
def test_what_is_no_list_is_refused(format: Any, options: dict[str, Any], data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_list(data, replace(SOURCE, format=format, max_networks=50, **options))


def test_one_invalid_entry_in_a_hundred_is_skipped() -> None:
    good = "".join(f"10.0.{number}.1\n" for number in range(200))
    assert parse_list(f"{good}nonsense\nmore\n".encode(), SOURCE)[1:] == (200, 2)
    with pytest.raises(InvalidInput, match="3 invalid entries and 200 networks; the first: 'nonsense'"):
        parse_list(f"{good}nonsense\nmore\nthird\n".encode(), SOURCE)
