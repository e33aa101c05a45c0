"""A limit that is split counts in several counters of the store, and never lets more pass than the whole."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from headgate import Limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.faults import Gate
    from support.servers import RedisServer

DAY = timedelta(days=1)


def test_parts_together_allow_the_whole_and_no_more(
    open_gate: Callable[..., Gate], server: RedisServer, unique: str
) -> None:
    gate = open_gate(server.url)
    key = Limit(400, DAY, name=unique, split=4).by("ada")
    decisions = [gate.check(key) for _ in range(1_000)]
    assert sum(decision.allowed for decision in decisions) == 400
    assert all(decision.keys == (key,) for decision in decisions)
    with server.client() as client:
        assert len(client.keys(f"headgate:{unique}:*")) == 4
    gate.reset(key)
    assert gate.check(key).allowed
    with server.client() as client:
        assert len(client.keys(f"headgate:{unique}:*")) == 1


def test_what_is_given_back_can_be_had_again(open_gate: Callable[..., Gate], server: RedisServer, unique: str) -> None:
    gate = open_gate(server.url)
    key = Limit(40, DAY, name=unique, split=4).by("ada")
    while gate.check(key).allowed or any(gate.check(key).allowed for _ in range(100)):
        pass
    assert gate.refund(key, 3, id="once")
    assert not gate.refund(key, 3, id="once")
    assert sum(gate.check(key).allowed for _ in range(200)) == 3
