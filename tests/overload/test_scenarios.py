"""A service whose capacity halves while it is overloaded, in virtual time: with no, a fixed and an adaptive limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headgate.overload.gradient import ConcurrencySettings
from support.overloaded_service import SECOND_US, Service

if TYPE_CHECKING:
    from random import Random

WORKERS = 20
CAPACITY = WORKERS / 0.04  # per second
HALVED_US = 13 * SECOND_US
LOADED_US = 6 * SECOND_US
"""Until then, the load is a third of the capacity; then it is 1.2 times the capacity."""
DEADLINE_US = 1 * SECOND_US
"""Clients give up then."""
END_S = 30.0


def overloaded(settings: ConcurrencySettings | None, seed: int = 1) -> Service:
    def workers(now_us: int) -> int:
        return WORKERS if now_us < HALVED_US else WORKERS // 2

    def rate(now_us: int) -> float:
        return CAPACITY * (0.3 if now_us < LOADED_US else 1.2)

    return Service(workers, rate, settings, seed=seed).run(END_S)


@pytest.mark.parametrize("seed", [1, 2])
def test_critical_requests_succeed_and_stay_fast_while_the_capacity_halves(seed: int) -> None:
    service = overloaded(ConcurrencySettings(), seed)
    unloaded_us = service.p99_us(0, LOADED_US)
    assert service.success(LOADED_US, DEADLINE_US, priority="critical") >= 0.99
    assert service.p99_us(LOADED_US, priority="critical") <= 2 * unloaded_us
    # What is shed is background traffic first, and the workers are not idle meanwhile.
    assert service.success(HALVED_US, DEADLINE_US, priority="normal") > 0.4
    assert service.success(HALVED_US, DEADLINE_US, priority="background") < 0.1
    assert service.throughput(HALVED_US, int(END_S) * SECOND_US) > 0.9 * CAPACITY / 2


def test_without_a_limit_every_request_waits_too_long() -> None:
    service = overloaded(None)
    assert service.success(HALVED_US, DEADLINE_US, priority="critical") < 0.5


def test_limit_that_was_right_for_the_full_capacity_is_slow_when_it_halves() -> None:
    service = overloaded(ConcurrencySettings(2 * WORKERS, 2 * WORKERS, 2 * WORKERS))
    assert service.p99_us(HALVED_US, priority="critical") > 2 * service.p99_us(0, LOADED_US)


def test_limit_recovers_with_the_capacity() -> None:
    def workers(now_us: int) -> int:
        return WORKERS // 2 if 5 * SECOND_US <= now_us < 13 * SECOND_US else WORKERS

    service = Service(workers, lambda _: CAPACITY * 1.2, ConcurrencySettings()).run(21)
    assert service.throughput(7 * SECOND_US, 13 * SECOND_US) > 0.9 * CAPACITY / 2
    assert service.throughput(15 * SECOND_US, 21 * SECOND_US) > 0.9 * CAPACITY


def test_base_latency_does_not_drift_while_the_overload_lasts() -> None:
    """A long-term average of the latency would grow without end, and the queue with it."""
    service = Service(lambda _: WORKERS, lambda _: CAPACITY * 1.5, ConcurrencySettings()).run(80)
    early_us, late_us = [service.p99_us(at * SECOND_US, (at + 15) * SECOND_US) for at in (5, 65)]
    assert late_us < 1.3 * early_us


@pytest.mark.parametrize(("rate", "seed"), [(450, 3), (600, 1), (600, 2)])
def test_service_that_is_well_sheds_nothing_although_its_latencies_vary(rate: int, seed: int) -> None:
    """The first calls to end are the fast ones, which would make all others look slow."""
    service = Service(lambda _: 1000, lambda _: rate, ConcurrencySettings(), spread=0.8, seed=seed).run(6)
    assert service.success(2 * SECOND_US, DEADLINE_US) > 0.98


@pytest.mark.parametrize(("rate", "spread", "seed"), [(600, 0.0, 1), (100, 0.5, 2), (300, 0.5, 2), (300, 0.8, 1)])
def test_service_that_becomes_slower_without_a_queue_is_not_throttled_for_long(
    rate: int, spread: float, seed: int
) -> None:
    """Latency does not fall with the limit, so it is the new base."""

    def workers(now_us: int) -> int:
        service.mean_us = 40_000 if now_us < 5 * SECOND_US else 120_000
        return 1000

    service = Service(workers, lambda _: rate, ConcurrencySettings(), mix=(0, 1, 0), spread=spread, seed=seed)
    service.run(14)
    assert service.success(10 * SECOND_US, DEADLINE_US) > 0.95


def test_tenant_with_little_traffic_is_not_shed_because_of_another() -> None:
    def tenant(random: Random) -> str:
        return "small" if random.random() < 0.05 else "flood"

    service = Service(
        lambda _: WORKERS, lambda _: CAPACITY * 3, ConcurrencySettings(), mix=(0, 1, 0), tenant=tenant
    ).run(15)
    settled_us = 3 * SECOND_US
    assert service.success(settled_us, DEADLINE_US, tenant="small") > 0.9
    assert service.success(settled_us, DEADLINE_US, tenant="flood") < 0.4
    assert service.throughput(settled_us, 15 * SECOND_US) > 0.9 * CAPACITY


def test_tenants_that_both_want_everything_get_half_each() -> None:
    def tenant(random: Random) -> str:
        return "a" if random.random() < 0.8 else "b"

    service = Service(
        lambda _: WORKERS, lambda _: CAPACITY * 4, ConcurrencySettings(), mix=(0, 1, 0), tenant=tenant
    ).run(15)
    answered = {
        name: sum(call.end_us is not None for call in service.select(3 * SECOND_US, tenant=name)) for name in "ab"
    }
    assert 0.4 < answered["b"] / sum(answered.values()) < 0.6
