"""Plain values over a pipe, between two processes of the same Python."""

from __future__ import annotations

import os
from marshal import dumps, loads
from typing import Any, Final

from headgate.telemetry.decision_log.codec import FORMAT

__all__ = ["read_frame", "write_frame"]

LENGTH: Final = 8
"""Bytes that say how many follow."""


def write_frame(pipe: int, value: Any) -> None:
    """All of it; waits while the other side does not read."""
    body = dumps(value, FORMAT)
    rest = memoryview(len(body).to_bytes(LENGTH, "big") + body)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def read_frame(pipe: int) -> Any:
    """The next value; None when there is no other side any more."""
    head = _exactly(pipe, LENGTH)
    body = _exactly(pipe, int.from_bytes(head, "big")) if len(head) == LENGTH else b""
    return loads(body) if body else None


def _exactly(pipe: int, size: int) -> bytes:
    """So many bytes; fewer only at the end."""
    parts: list[bytes] = []
    while size and (part := os.read(pipe, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"" if size else b"".join(parts)
