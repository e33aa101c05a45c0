"""Limits over several regions, each with a real Redis; the link to the home region can be cut."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import AsyncLimiter, InvalidLimit, Limit, Limiter, StoreError
from support.faults import paused
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.faults import Gate

DAY = timedelta(days=1)
NAMES = ("asia", "eu", "us")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, RedisServer]]:
    with RedisServer("redis") as asia, RedisServer("redis") as eu, RedisServer("redis") as us:
        yield {"asia": asia, "eu": eu, "us": us}


@pytest.fixture
def open_region(open_gate: Callable[..., Gate], servers: dict[str, RedisServer]) -> Callable[..., Gate]:
    """Opens a limiter in a region; eu is home."""
    urls = {name: server.url for name, server in servers.items()}

    def open_one(name: str, **options: Any) -> Gate:
        return open_gate(urls[name], region=name, regions=urls, home="eu", **options)

    return open_one


def count_admitted(gate: Gate, key: Any, requests: int) -> int:
    return sum(gate.check(key).allowed for _ in range(requests))


def test_regional_limit_is_counted_in_each_region(open_region: Callable[..., Gate], unique: str) -> None:
    key = Limit(10, DAY, name=unique).by("ada")
    assert [count_admitted(open_region(name), key, 15) for name in NAMES] == [10, 10, 10]


def test_divided_limit_gives_each_region_its_share(open_region: Callable[..., Gate], unique: str) -> None:
    key = Limit(1000, DAY, name=unique, region="divided").by("ada")
    gates = [open_region(name, lease=0) for name in NAMES]
    assert [count_admitted(gate, key, 400) for gate in gates] == [334, 333, 333]
    assert gates[0].check(key).keys == (key,)
    assert gates[0].check(key).denied_by == (unique,)
    assert gates[1].refund(key, 3)
    assert [count_admitted(gate, key, 5) for gate in gates] == [0, 3, 0]
    gates[2].reset(key)
    assert [count_admitted(gate, key, 400) for gate in gates] == [0, 0, 333]


def test_limit_too_small_to_divide_is_rejected(open_region: Callable[..., Gate], unique: str) -> None:
    gate = open_region("us")
    with pytest.raises(InvalidLimit, match="quota 2 cannot be divided over 3 regions; use region='central'"):
        gate.check(Limit(2, DAY, name=unique, region="divided").by("ada"))


def test_region_mode_without_regions_is_rejected(
    open_gate: Callable[..., Gate], servers: dict[str, RedisServer], unique: str
) -> None:
    gate, limit = open_gate(servers["us"].url), Limit(9, DAY, name=unique, region="central")
    for call in (gate.check, gate.peek, gate.reset, lambda key: gate.refund(key, 1)):
        with pytest.raises(InvalidLimit, match="is central, and the limiter has no regions"):
            call(limit.by("ada"))


def test_central_limit_is_one_for_all_regions(open_region: Callable[..., Gate], unique: str) -> None:
    key = Limit(30, DAY, name=unique, region="central").by("ada")
    gates = [open_region(name, lease=0) for name in NAMES]
    assert [count_admitted(gate, key, 10) for gate in gates] == [10, 10, 10]
    denied = [gate.check(key) for gate in gates]
    assert not any(decision.allowed for decision in denied)
    assert {decision.keys for decision in denied} == {(key,)}
    assert gates[0].refund(key, 2)
    assert gates[2].peek(key).remaining == 2
    gates[0].reset(key)
    assert count_admitted(gates[2], key, 40) == 30


def test_request_that_home_denies_is_not_charged_in_its_region(open_region: Callable[..., Gate], unique: str) -> None:
    central = Limit(2, DAY, name=f"{unique}-central", region="central").by("ada")
    regional = Limit(10, DAY, name=f"{unique}-regional").by("ada")
    gate = open_region("us", remember=0)
    decisions = [gate.check(regional, central) for _ in range(5)]
    assert [decision.allowed for decision in decisions] == [True, True, False, False, False]
    assert decisions[-1].denied_by == (central.limit.name,)
    assert decisions[0].keys == (regional, central)
    assert [verdict[0] for verdict in decisions[0].verdicts] == [9, 1]
    assert gate.peek(regional).remaining == 8


def test_request_that_its_region_denies_is_not_charged_at_home(open_region: Callable[..., Gate], unique: str) -> None:
    central = Limit(10, DAY, name=f"{unique}-central", region="central").by("ada")
    regional = Limit(1, DAY, name=f"{unique}-regional").by("ada")
    gate = open_region("us", remember=0)
    assert [gate.check(central, regional).allowed for _ in range(3)] == [True, False, False]
    assert gate.peek(central).remaining == 9


def test_id_is_charged_once_in_both_regions(open_region: Callable[..., Gate], unique: str) -> None:
    central = Limit(10, DAY, name=f"{unique}-central", region="central").by("ada")
    regional = Limit(10, DAY, name=f"{unique}-regional").by("ada")
    gate = open_region("us")
    assert all(gate.check(central, regional, cost=(2, 3), id="request-1").allowed for _ in range(3))
    assert gate.peek(central, regional).verdicts[0][0] == 8
    assert gate.peek(central, regional).verdicts[1][0] == 7


def test_central_lease_is_one_for_all_regions(open_region: Callable[..., Gate], unique: str) -> None:
    key = Limit(1, timedelta(minutes=1), name=unique, region="central", algorithm="concurrency").by("ada")
    eu, us = open_region("eu"), open_region("us")
    held = us.enter(key)
    assert held.allowed
    assert not eu.enter(key).allowed
    assert us.renew(key, id=held.id)
    assert us.leave(key, id=held.id)
    assert eu.enter(key).allowed


@pytest.mark.parametrize(("mode", "allowed"), [("open", True), ("closed", False)])
def test_failure_mode_decides_while_home_is_away(
    open_region: Callable[..., Gate], servers: dict[str, RedisServer], unique: str, mode: str, allowed: bool
) -> None:
    """The own region still decides its limits, and keeps no charge of a request that was denied."""
    central = Limit(10, DAY, name=f"{unique}-central", region="central").by("ada")
    regional = Limit(10, DAY, name=f"{unique}-regional").by("ada")
    gate = open_region("us", on_failure=mode, budget=1.0, central_budget=0.1)
    with paused(servers["eu"]):
        decision = gate.check(central, regional)
        assert decision.allowed is allowed
        assert decision.degraded is not None
        assert decision.degraded.startswith(mode)
        remaining = gate.peek(regional)
        assert remaining.degraded is None
        assert remaining.remaining == (9 if allowed else 10)


def test_error_of_home_returns_the_charge_of_the_region(
    open_region: Callable[..., Gate], servers: dict[str, RedisServer], unique: str
) -> None:
    central = Limit(10, DAY, name=f"{unique}-central", region="central").by("ada")
    regional = Limit(10, DAY, name=f"{unique}-regional").by("ada")
    gate = open_region("us", central_budget=0.1)
    with paused(servers["eu"]):
        with pytest.raises(StoreError):
            gate.check(central, regional)
        assert gate.peek(regional).remaining == 10


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_bound_of_each_mode(kind: Any, servers: dict[str, RedisServer], unique: str) -> None:
    urls = {name: server.url for name, server in servers.items()}
    limiter = kind(urls["us"], region="us", regions=urls, home="eu")
    modes = ("regional", "divided", "central")
    limits = [Limit(100, DAY, name=unique, algorithm="fixed_window", region=mode) for mode in modes]
    assert [limiter.bound(limit) for limit in limits] == [200, 0, 0]
