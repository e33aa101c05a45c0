"""NetworkNames: the autonomous system of an address, from an offline file in the MaxMind DB format (MMDB).

The file is a binary trie over the bits of addresses, followed by a section of values. Only what lookups need is read:
https://maxmind.github.io/MaxMind-DB/ describes the rest.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

from headgate.errors import InvalidInput

__all__ = ["NetworkDatabase", "NetworkNames"]

logger = logging.getLogger("headgate")

MARKER: Final = b"\xab\xcd\xefMaxMind.com"
SEPARATOR_BYTES: Final = 16
"""Zeros between the trie and the values."""
RECORD_BITS: Final = (24, 28, 32)
MAX_DEPTH: Final = 32
MAX_BYTES: Final = 500_000_000
MAX_CACHED: Final = 16_384
RELOAD_INTERVAL_S: Final = 60.0
NUMBER: Final = "autonomous_system_number"
POINTER, TEXT, BYTES, UINT16, UINT32, MAP, INT32, UINT64, UINT128, ARRAY, BOOL = 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 14
FLOATS: Final = {3: 8, 15: 4}
"""The sizes of doubles and floats, which are skipped."""


class NetworkDatabase:
    """One version of a file. InvalidInput if it is not such a file, or is damaged."""

    def __init__(self, file: str) -> None:
        try:
            with open(file, "rb") as stream:
                self._content = stream.read(MAX_BYTES)  # not mapped: it may be overwritten while it is in use
        except OSError as error:
            raise InvalidInput(f"{file}: cannot be read: {error.strerror}") from None
        start = self._content.rfind(MARKER)
        try:
            if start < 0:
                raise ValueError("it has no metadata")
            about, _ = self._value(start + len(MARKER), start + len(MARKER), 0)
            self._nodes, self._bits = int(about["node_count"]), int(about["record_size"])
            self._is_ipv6 = about["ip_version"] == 6
            self._tree_bytes = self._nodes * self._bits // 4
            if self._bits not in RECORD_BITS or self._tree_bytes + SEPARATOR_BYTES > start:
                raise ValueError("its search tree is incomplete")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidInput(f"{file}: is not a MaxMind DB file: {error}") from None

    def find(self, address: str) -> Any:
        """The value for an address, mostly a dict; None if there is none."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return None
        if parsed.version == 6 and not self._is_ipv6:
            return None
        number, length = int(parsed), 128 if self._is_ipv6 else 32  # IPv4 addresses are the first 32 bits of IPv6 ones
        node = 0
        for shift in range(length - 1, -1, -1):
            node = self._record(node, number >> shift & 1)
            if node >= self._nodes:
                break
        if node <= self._nodes:
            return None
        data = self._tree_bytes + SEPARATOR_BYTES
        value, _ = self._value(self._tree_bytes + node - self._nodes, data, 0)
        return value

    def _record(self, node: int, side: int) -> int:
        bits, content = self._bits, self._content
        if bits == 28:
            at = node * 7
            middle = content[at + 3]
            return int.from_bytes(
                bytes([middle & 15]) + content[at + 4 : at + 7] if side else bytes([middle >> 4]) + content[at : at + 3]
            )
        size = bits // 8
        at = (2 * node + side) * size
        return int.from_bytes(content[at : at + size])

    def _value(self, at: int, data: int, depth: int) -> tuple[Any, int]:
        """The value at an offset, and the offset behind it. Pointers count from `data`."""
        if depth > MAX_DEPTH:
            raise ValueError("its values are nested too deeply")
        content = self._content
        control = content[at]
        at += 1
        kind, size = control >> 5, control & 31
        if kind == POINTER:
            extra = (control >> 3 & 3) + 1
            number = int.from_bytes(content[at : at + extra])
            if extra < 4:
                number += ((control & 7) << 8 * extra) + (0, 2048, 526336)[extra - 1]
            return self._value(data + number, data, depth + 1)[0], at + extra
        if kind == 0:
            kind = content[at] + 7
            at += 1
        if size > 28:
            extra = size - 28
            size = (29, 285, 65821)[extra - 1] + int.from_bytes(content[at : at + extra])
            at += extra
        if kind == MAP:
            found = {}
            for _ in range(size):
                key, at = self._value(at, data, depth + 1)
                found[key], at = self._value(at, data, depth + 1)
            return found, at
        if kind == ARRAY:
            values = []
            for _ in range(size):
                value, at = self._value(at, data, depth + 1)
                values.append(value)
            return values, at
        if kind == BOOL:
            return bool(size), at
        end = at + FLOATS.get(kind, size)
        if end > len(content):
            raise ValueError("it ends within a value")
        if kind == TEXT:
            return content[at:end].decode("utf-8", "replace"), end
        is_number = kind in (UINT16, UINT32, INT32, UINT64, UINT128)
        return int.from_bytes(content[at:end]) if is_number else None, end


class NetworkNames:
    """Names the autonomous systems of addresses: "AS64500 (Example)". Reads the file again when it was replaced.

    While the file cannot be read, the last version stays in use, and addresses without one have no name.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self._database: NetworkDatabase | None = None
        self._version: tuple[int, int] | None = None
        self._checked_at = float("-inf")
        self._names: dict[str, str | None] = {}
        self._error = ""

    def __call__(self, address: str) -> str | None:
        try:
            return self._names[address]
        except KeyError:
            pass
        if time.monotonic() - self._checked_at > RELOAD_INTERVAL_S:
            self._reload()
        if self._database is None:
            return None
        found = None
        with suppress(ValueError, IndexError, TypeError):  # a damaged value
            found = self._database.find(address)
        number = found.get(NUMBER) if isinstance(found, dict) else None
        name = None
        if isinstance(found, dict) and number is not None:
            owner = found.get("autonomous_system_organization")
            name = f"AS{number} ({owner})" if owner else f"AS{number}"
        if len(self._names) >= MAX_CACHED:
            self._names.clear()
            self._checked_at = min(self._checked_at, time.monotonic() - RELOAD_INTERVAL_S)
        self._names[address] = name
        return name

    def _reload(self) -> None:
        self._checked_at = time.monotonic()
        try:
            status = os.stat(self.file)
            version = status.st_mtime_ns, status.st_size
            if version == self._version:
                return
            self._database, self._version = NetworkDatabase(self.file), version
            self._names.clear()
            self._error = ""
        except (OSError, InvalidInput) as error:
            text = f"{self.file}: cannot be read: {error.strerror}" if isinstance(error, OSError) else f"{error}"
            if text != self._error:
                logger.warning("scenarios by asn: %s", text)
            self._error = text
