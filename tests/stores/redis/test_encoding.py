"""Encoding of commands."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headgate import Limit
from headgate.stores.operations import Check, Refund
from headgate.stores.redis import encoding as wire_module
from headgate.stores.redis.encoding import NO_KEYS, Command, CommandEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


HOUR = timedelta(hours=1)


def test_numbers_are_converted_before_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """hiredis crashes if an interrupt comes while it does that itself."""
    packed: list[tuple[Any, ...]] = []

    def pack(words: tuple[Any, ...]) -> bytes:
        packed.append(words)
        return real(words)

    real: Callable[..., bytes] = wire_module.pack_command
    monkeypatch.setattr(wire_module, "pack_command", pack)
    wire = CommandEncoder("test", None)
    key, other = Limit(5, HOUR, name="a").by("ada"), Limit(5, HOUR, name="b").by("ada")
    for command in wire.encode([Check((key, other), 2), Check((key,), 3), Refund(key, 1, "id", 5)]):
        command.pack()
    Command(None, NO_KEYS, ("PING", 1)).pack()
    assert ("PING", "1") in packed
    assert {type(word) for words in packed for word in words} <= {str, bytes}
