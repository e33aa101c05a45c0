"""A sharded store: the failure of one deployment, the addition of another, and deployments of mixed kinds."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Limiter
from headgate.stores.redis.rendezvous import RendezvousHash
from support.faults import Looped, Threaded, key_of, paused, stored
from support.servers import RedisCluster, RedisServer, SentinelSet, ShardSet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headgate import Key
    from support.faults import Gate

pytestmark = pytest.mark.usefixtures("nothing_is_left_open")

EXACT: dict[str, Any] = {"remember": 0, "lease": 0, "budget": 0.5}
"""Every decision is one of the store."""


@pytest.fixture(scope="module")
def shards() -> Iterator[ShardSet]:
    """Servers that the tests of this module break and restart."""
    with ShardSet() as shards:
        yield shards


def keys_by_shard(name: str, shards: str = "abc", *, count: int = 45) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {shard: [] for shard in shards}
    owners = RendezvousHash(shards)
    for number in range(count):
        key = key_of(name, f"client-{number}")
        found[owners.owner(stored(key))].append(key)
    return found


@pytest.mark.parametrize("lost", ["a", "b"], ids=["home", "other"])
def test_failure_of_a_deployment_affects_its_own_keys_only(
    shards: ShardSet, open_gate: Callable[..., Gate], unique: str, lost: str
) -> None:
    keys = keys_by_shard(unique)
    assert min(map(len, keys.values())) > 3
    gate = open_gate(shards.url, on_failure="open", **EXACT)
    for key in [key for its in keys.values() for key in its]:
        assert gate.check(key, cost=10).remaining == 90
    shards.shards[lost].kill()
    for _ in range(3):
        for shard, its in keys.items():
            decisions = [gate.check(key, cost=10) for key in its]
            assert {decision.degraded is not None for decision in decisions} == {shard == lost}
    health = gate.health()
    assert [shard.name.partition(" ")[0] for shard in health.shards if not shard.ready] == [lost]
    shards.shards[lost].start()
    wait_until(lambda: gate.check(keys[lost][0], cost=0).degraded is None, "exact answers again")
    for shard, its in keys.items():
        if shard != lost:
            assert {gate.check(key, cost=0).remaining for key in its} == {60}


def test_calls_to_a_hung_deployment_do_not_delay_the_others(
    shards: ShardSet, open_gate: Callable[..., Gate], unique: str
) -> None:
    keys = keys_by_shard(unique)
    gate = open_gate(shards.url, on_failure="open", **EXACT)
    for its in keys.values():
        gate.check(its[0])
    with paused(shards.shards["b"]):
        for _ in range(3):
            live, dead, other = gate.at_once((keys["a"][0],), (keys["b"][0],), (keys["c"][0],))
            assert (live.degraded, dead.degraded is None, other.degraded) == (None, False, None)
    assert (live.remaining, other.remaining) == (96, 96)
    wait_until(lambda: gate.check(keys["b"][0], cost=0).degraded is None, "exact answers again")


def test_request_over_a_failed_deployment_charges_nothing_on_the_others(
    shards: ShardSet, open_gate: Callable[..., Gate], unique: str
) -> None:
    keys = keys_by_shard(unique)
    live, dead = keys["a"][0], keys["c"][0]
    gate = open_gate(shards.url, on_failure="closed", **EXACT)
    assert gate.check(live, dead, cost=10).allowed
    shards.shards["c"].kill()
    try:
        for _ in range(3):
            assert not gate.check(live, dead, cost=10).allowed
        assert gate.check(live, cost=0).remaining == 90
    finally:
        shards.shards["c"].start()
    wait_until(lambda: gate.check(live, dead, cost=0).degraded is None, "exact answers again")


def test_added_deployment_takes_over_its_share_of_the_keys(shards: ShardSet, server: RedisServer, unique: str) -> None:
    keys = [key_of(unique, f"client-{number}") for number in range(400)]
    with Limiter(shards.url, **EXACT) as three:
        for key in keys:
            three.check(key, cost=40)
    grown = RendezvousHash("abcd")
    with Limiter(f"{shards.url},d={server.url}", **EXACT) as four:
        remaining = {key: four.check(key, cost=0).remaining for key in keys}
    moved = [key for key in keys if grown.owner(stored(key)) == "d"]
    assert 60 < len(moved) < 140  # a quarter, within four standard deviations
    assert Counter(remaining.values()) == {100: len(moved), 60: len(keys) - len(moved)}
    assert all(remaining[key] == 100 for key in moved)


@pytest.mark.parametrize("gate_type", [Threaded, Looped], ids=["sync", "async"])
def test_deployments_may_be_of_different_kinds(
    gate_type: Any, redis7: RedisServer, cluster: RedisCluster, sentinel: SentinelSet, unique: str
) -> None:
    urls = {"a": redis7.url, "b": cluster.url, "c": sentinel.url}
    keys = keys_by_shard(unique)
    with gate_type(urls, **EXACT) as gate:
        for its in keys.values():
            assert [gate.check(its[0], its[1]).remaining for _ in range(3)] == [99, 98, 97]
        first = [its[0] for its in keys.values()]
        assert gate.check(*first, cost=97).allowed
        assert not gate.check(*first).allowed
    with closing(redis7.client()) as client:
        assert sorted(client.keys(f"headgate:{unique}:*")) == sorted(stored(key) for key in keys["a"][:2])
