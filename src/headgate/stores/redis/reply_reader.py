"""A parser of replies: hiredis with bounds on what a server may announce and send. Sans-io.

hiredis allocates an array as soon as it has read its header, and buffers a string of any length, so a server that is
broken, or not a Redis at all, could exhaust the memory of the process. Headers are checked before hiredis sees them.
"""

from __future__ import annotations

from typing import Any, Final

from hiredis import HiredisError, Reader

from headgate.stores.redis.decoding import UnexpectedReply

__all__ = ["INCOMPLETE", "MAX_REPLY_BYTES", "ReplyReader"]

INCOMPLETE: Final = object()
"""Returned by `next_reply` while the next reply has not arrived in full."""

MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Many times the size of the reply to the fullest batch."""
MAX_ELEMENTS: Final = 1_000_000
"""Elements that all arrays of one reply may announce."""
MAX_HEADER_BYTES: Final = 12
"""More than the longest header within these bounds: a sign, digits, and the end of the line."""

_ARRAYS: Final = b"*>"
_NEWLINE: Final = 10


class ReplyReader:
    """Parser of the replies on one connection, which must be closed after an UnexpectedReply."""

    __slots__ = ("_elements", "_gets", "_max_bytes", "_pending", "_reader", "_tail")

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._reader = Reader(notEnoughData=INCOMPLETE)
        self._gets = self._reader.gets
        self._max_bytes = max_bytes
        self._pending = self._elements = 0
        """Bytes received, and array elements announced, since the last complete reply."""
        self._tail: bytes | None = b""
        """The start of an incomplete line; None inside a line that cannot be a header."""

    def feed(self, data: bytes | bytearray, size: int) -> None:
        """Take in the first `size` bytes of `data`."""
        self._pending += size
        if self._pending > self._max_bytes:
            raise UnexpectedReply(f"the store sent a reply of more than {self._max_bytes} bytes")
        # Nearly all replies are arrays of integers, which have only these headers.
        self._check_headers(data, size, b"*")
        if data.find(b"$", 0, size) >= 0:
            self._check_headers(data, size, b"$")
        if data.find(b">", 0, size) >= 0:
            self._check_headers(data, size, b">")
        if self._tail or data[size - 1] != _NEWLINE:
            self._check_split_header(data, size)
        else:
            self._tail = b""
        try:
            self._reader.feed(data, 0, size)  # type: ignore[arg-type] # any buffer will do
        except HiredisError as error:
            raise UnexpectedReply(f"the store sent an invalid reply: {error}") from error

    def next_reply(self) -> Any:
        """The next complete reply, or INCOMPLETE."""
        try:
            reply = self._gets()
        except HiredisError as error:
            raise UnexpectedReply(f"the store sent an invalid reply: {error}") from error
        if reply is not INCOMPLETE:
            self._pending = self._elements = 0
        return reply

    def has_leftover(self) -> bool:
        """True if bytes have arrived beyond the last reply."""
        return bool(self._reader.has_data())

    def _check_headers(self, data: bytes | bytearray, size: int, sign: bytes) -> None:
        """Check each header of that kind that begins in `data`."""
        at = data.find(sign, 0, size)
        while at >= 0:
            if data[at - 1] == _NEWLINE if at else self._tail == b"":
                self._check_header(bytes(data[at : min(size, at + MAX_HEADER_BYTES)]))
            at = data.find(sign, at + 1, size)

    def _check_header(self, line: bytes) -> None:
        """Check what a line announces, as far as it has arrived."""
        digits, is_complete, _ = line[1:].partition(b"\r")
        if not digits.isdigit():  # null, part of a string, or what hiredis refuses
            return
        if not is_complete:
            if len(line) < MAX_HEADER_BYTES:
                return
        elif line[0] in _ARRAYS:
            self._elements += int(digits)
            if self._elements <= MAX_ELEMENTS:
                return
        elif int(digits) <= self._max_bytes:
            return
        raise UnexpectedReply(f"the store announced a reply that is too large: {line!r}")

    def _check_split_header(self, data: bytes | bytearray, size: int) -> None:
        """Check a header whose line has arrived in several pieces."""
        start = data.rfind(b"\n", 0, size) + 1
        if self._tail:
            line = self._tail + bytes(data[: min(size, MAX_HEADER_BYTES)])
            if line[:1] in (b"*", b">", b"$"):
                self._check_header(line[:MAX_HEADER_BYTES])
        if start:
            self._tail = bytes(data[start:size]) if size - start < MAX_HEADER_BYTES else None
        elif self._tail is not None:
            self._tail = self._tail + bytes(data[:size]) if len(self._tail) + size < MAX_HEADER_BYTES else None
