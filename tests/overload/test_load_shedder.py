"""Load shedding: priorities, fairness among tenants, threads and forks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from headgate.overload.gradient import ConcurrencySettings
from headgate.overload.load_shedder import PRIORITIES, LoadShedder, Permit, Priority
from headgate.testing import FakeClock


def fixed(limit: int) -> LoadShedder:
    return LoadShedder(ConcurrencySettings(limit, limit), FakeClock().now_us)


def fill(shedder: LoadShedder, priority: Priority, tenant: str | None = None) -> list[Permit]:
    """Begin calls until one is shed."""
    permits = []
    while (permit := shedder.acquire(priority, tenant)) is not None:
        permits.append(permit)
    return permits


def test_each_priority_leaves_room_to_the_higher_ones() -> None:
    shedder = fixed(20)
    assert len(fill(shedder, "background")) == 12
    assert len(fill(shedder, "normal")) == 8
    assert len(fill(shedder, "critical")) == 12
    assert shedder.stats().shed == {"critical": 1, "normal": 1, "background": 1}


def test_one_call_is_always_admitted() -> None:
    for priority in PRIORITIES:
        shedder = fixed(1)
        permit = shedder.acquire(priority)
        assert permit is not None
        assert shedder.acquire("background") is None
        permit.release()
        assert shedder.acquire("background") is not None


def test_release_is_idempotent() -> None:
    shedder = fixed(2)
    first, _ = fill(shedder, "normal")
    first.release()
    first.release()
    assert len(fill(shedder, "normal")) == 1


def test_tenant_that_is_alone_may_use_the_whole_limit() -> None:
    assert len(fill(fixed(20), "normal", "a")) == 20


def test_tenant_with_more_than_its_share_leaves_a_fifth_to_the_others() -> None:
    shedder = fixed(20)
    one = shedder.acquire("normal", "b")
    assert one is not None
    assert len(fill(shedder, "normal", "a")) == 15  # 16 with the other's
    assert len(fill(shedder, "normal", "b")) == 4
    assert len(fill(shedder, "critical", "c")) == 10  # its share of 32


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_tenant_below_its_share_is_only_shed_when_the_limit_is_used_up(steps: list[tuple[str, bool]]) -> None:
    shedder, permits = fixed(9), dict[str, list[Permit]](a=[], b=[], c=[])
    for tenant, is_end in steps:
        if is_end and permits[tenant]:
            permits[tenant].pop().release()
            continue
        in_flight = sum(map(len, permits.values()))
        active = sum(bool(mine) or name == tenant for name, mine in permits.items())
        permit = shedder.acquire("normal", tenant)
        if permit is not None:
            permits[tenant].append(permit)
        elif len(permits[tenant]) + 1 <= 9 / active:
            assert in_flight == 9
        assert sum(map(len, permits.values())) <= 9
    assert shedder.stats().in_flight == sum(map(len, permits.values()))


def test_threads_never_exceed_the_limit_and_lose_no_place() -> None:
    shedder = fixed(8)

    def work(_: int) -> int:
        most = 0
        for _ in range(500):
            permit = shedder.acquire("normal", "a")
            if permit is not None:
                most = max(most, shedder.stats().in_flight)
                permit.release()
        return most

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(work, range(16))) <= 8
    assert shedder.stats().in_flight == 0
    assert len(fill(shedder, "normal", "a")) == 8


def test_forked_child_begins_without_the_calls_of_its_parent() -> None:
    shedder = fixed(2)
    permits = fill(shedder, "normal")
    shedder.reset_after_fork()
    assert shedder.stats().in_flight == 0
    for permit in permits:
        permit.release()
    assert shedder.stats().in_flight == 0


def test_latency_is_reported() -> None:
    clock = FakeClock()
    shedder = LoadShedder(ConcurrencySettings(), clock.now_us)
    for _ in range(60):
        permit = shedder.acquire("normal")
        assert permit is not None
        clock.advance(0.01)
        permit.release()
    stats = shedder.stats()
    assert (stats.latency, stats.base_latency, stats.admitted) == (0.01, 0.01, 60)
