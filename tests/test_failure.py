"""What is answered without the store: above all, that all nodes together allow their share of a limit, and not more."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from math import inf, nan
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headgate import InvalidConfiguration, InvalidLimit, Limit, StoreUnavailable
from headgate.algorithms import ALGORITHMS
from headgate.failure import FailureMode, FailurePolicy, FleetShare, _nearest_below, local_limit
from headgate.limits import HORIZON_US
from headgate.stores.operations import Check, Leave, Refund, Renew
from headgate.testing import FakeClock

AWAY = StoreUnavailable("nobody is there")
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
FIFTH, TINY = Fraction(1, 5), Fraction(1, 250)

BUCKETS = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.SHAPES_BURST)
WINDOWS = sorted({*ALGORITHMS} - {*BUCKETS} - {"concurrency"})


def local(clock: FakeClock, fleet: FleetShare | None = None) -> FailurePolicy:
    return FailurePolicy("local", clock, fleet)


# ------------------------------------------------------------------ a node's part of a limit


@pytest.mark.parametrize(
    ("limit", "portion", "part"),
    [
        ("1000/second", TINY, "4 per second, token_bucket"),
        ("1000/second", FIFTH, "200 per second, token_bucket"),
        ("1000/second", Fraction(1), "1000 per second, token_bucket"),
        ("1000/second, burst 50", FIFTH, "200 per second, burst 10, token_bucket"),
        ("1000/second, burst 50", TINY, "4 per second, burst 1, token_bucket"),
        ("1000/second", Fraction(1, 35), "1 per 35 milliseconds, burst 28, token_bucket"),
        ("10/minute", TINY, "1 per 25 minutes, token_bucket"),
        ("10/minute, gcra", TINY, "1 per 25 minutes, gcra"),
        ("10/minute, leaky_bucket", TINY, "1 per 25 minutes, leaky_bucket"),
        ("10/minute, burst 500", TINY, "1 per 25 minutes, burst 2, token_bucket"),
        ("10/minute, fixed_window", FIFTH, "2 per minute, fixed_window"),
        ("10/minute, fixed_window", TINY, "1 per 25 minutes, fixed_window"),
        ("10/minute, sliding_window", TINY, "1 per 25 minutes, sliding_window"),
        ("10/minute, sliding_log", TINY, "1 per 25 minutes, sliding_log"),
        ("16/minute, sliding_log", FIFTH, "3 per minute, sliding_log"),
        ("7/second, fixed_window", TINY, "1 per 35714286 us, fixed_window"),
        ("10/month", FIFTH, "2 per month, fixed_window"),
        ("9/month, starts 15, timezone Asia/Tokyo", FIFTH, "1 per month, starts 15, timezone Asia/Tokyo, fixed_window"),
        ("1/month", FIFTH, "1 per 155 days, fixed_window"),
        ("1000/minute, concurrency", FIFTH, "200 at once, leases of 1 minute"),
        ("5/minute, concurrency", TINY, "1 at once, leases of 1 minute"),
        ("1/3650 days", TINY, "1 per 3660 days, token_bucket"),
        ("1/3650 days, fixed_window", TINY, "1 per 3660 days, fixed_window"),
        ("1/20 days, sliding_log", Fraction(1, 183), "1 per 3660 days, sliding_log"),
    ],
)
def test_node_has_its_part_of_a_limit(limit: str, portion: Fraction, part: str) -> None:
    assert str(local_limit(Limit.parse(limit), portion)) == part


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    algorithm = draw(st.sampled_from([*BUCKETS, *WINDOWS]))
    quota = draw(st.integers(1, 10**9) | st.sampled_from([1, 999_983, 2**31 - 1]))
    burst = draw(st.none() | st.integers(1, 10**6)) if algorithm in BUCKETS else None
    periods = st.sampled_from([1, 7, 1_000, 10**6, 60 * 10**6, 86_400 * 10**6, 999_999_937, HORIZON_US])
    try:
        return Limit(quota, timedelta(microseconds=draw(periods)), burst=burst, algorithm=algorithm, name="any")
    except InvalidLimit:
        assume(False)
        raise


def rate(limit: Limit) -> Fraction:
    return Fraction(limit.quota, limit.period_us)


portions = st.builds(Fraction, st.integers(1, 10_000), st.just(10_000)) | st.fractions(Fraction(1, 10**6), 1)
portions |= st.builds(lambda share, nodes: share / nodes, portions, st.integers(1, 10_000))


@given(limits(), portions)
def test_no_part_is_more_generous_than_its_portion(limit: Limit, portion: Fraction) -> None:
    part, owed = local_limit(limit, portion), rate(limit) * portion
    assert (part.name, part.algorithm, part.space) == (limit.name, limit.algorithm, limit.space)
    assert part.capacity <= max(1, int(limit.capacity * portion))
    assert rate(part) <= owed or part.period_us == HORIZON_US
    if limit.algorithm in WINDOWS and limit.quota * portion >= 1:
        assert (part.quota, part.period_us) == (int(limit.quota * portion), limit.period_us)
    elif limit.algorithm in WINDOWS:
        assert part.quota == 1
        assert part.period_us == min(HORIZON_US, -(-1 // owed))
    elif part.full <= HORIZON_US * part.tokens and owed.denominator * (part.capacity + owed) < 2**52:
        assert rate(part) == owed or owed.denominator > HORIZON_US


@pytest.mark.parametrize(
    ("limit", "portion"),
    [
        # A part of one with large numbers, and of one that takes just ten years to fill.
        (Limit(999_983, MINUTE, burst=1_000_000), Fraction(997, 1_000)),
        (Limit(1, timedelta(days=3, hours=15, minutes=50, seconds=24), burst=1_000), Fraction(301, 1_000)),
    ],
)
def test_where_exactness_ends_the_nearest_exact_limit_below_is_taken(limit: Limit, portion: Fraction) -> None:
    part, owed = local_limit(limit, portion), rate(limit) * portion
    assert owed * Fraction(10**9 - 1, 10**9) < rate(part) < owed
    assert int(limit.capacity * portion) - 1 <= part.capacity <= int(limit.capacity * portion)


@given(st.fractions(0, 100, max_denominator=500), st.integers(1, 60))
def test_nearest_below_is_the_largest_that_there_is(number: Fraction, most: int) -> None:
    assert _nearest_below(number, most) == max(Fraction(int(number * each), each) for each in range(1, most + 1))


@pytest.mark.parametrize("limit", ["1000/second", "1000/second, gcra", "1000/second, fixed_window"])
def test_fifty_nodes_allow_a_fifth_together_and_not_a_fifth_each(limit: str) -> None:
    clock, fleet = FakeClock(start_us=10**9), FleetShare(nodes=50)
    nodes = [local(clock, fleet) for _ in range(50)]
    check = Check((Limit.parse(limit).by("ada"),), 1)
    passed = []
    for _ in range(4):
        passed.append(sum(node.decide(check, AWAY).allowed for node in nodes for _ in range(20)))
        clock.advance(1)
    assert passed == [200] * 4


def test_what_a_node_allowed_stays_counted_when_the_number_of_nodes_changes() -> None:
    clock, fleet = FakeClock(start_us=10**9), FleetShare()
    node, key = local(clock, fleet), Limit(20, MINUTE).by("ada")
    assert [node.decide(Check((key,), 1), AWAY).remaining for _ in range(2)] == [3, 2]
    fleet.nodes = 2
    assert not node.decide(Check((key,), 1), AWAY).allowed
    assert node.decide(Check((key,), 0), AWAY).reset_after_us == 60 * 10**6  # two, at two in a minute
    fleet.nodes = 1
    assert node.decide(Check((key,), 0), AWAY).remaining == 2


def test_all_failure_policies_of_a_limiter_see_the_same_fleet() -> None:
    clock, fleet = FakeClock(), FleetShare(share=Fraction(1, 2), nodes=5)
    key = Limit(100, MINUTE).by("ada")
    one, other = local(clock, fleet), local(clock, fleet)
    assert [node.decide(Check((key,), 0), AWAY).remaining for node in (one, other)] == [10, 10]
    fleet.share = FIFTH
    fleet.nodes = 2
    assert [node.decide(Check((key,), 0), AWAY).remaining for node in (one, other)] == [10, 10]
    fleet.share = 0.4
    assert [node.decide(Check((key,), 0), AWAY).remaining for node in (one, other)] == [20, 20]


def test_fleet_has_at_least_one_node() -> None:
    fleet = FleetShare(nodes=3)
    fleet.nodes = 0
    assert (fleet.nodes, fleet.local_limit(Limit(10, MINUTE)).quota) == (1, 2)


def test_shares_are_taken_as_they_are_written() -> None:
    assert [FleetShare(share=share).share for share in (0.2, 0.07, 1, 1.0, FIFTH)] == [
        FIFTH,
        Fraction(7, 100),
        1,
        1,
        FIFTH,
    ]


@pytest.mark.parametrize("share", [0, -0.1, 1.5, 100, nan, inf, True, "20%", None])
def test_what_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        FleetShare(share=share)
    told = f"share={share!r} is not a share: give a number above 0 and at most 1, like 0.2"
    assert str(refused.value) == told
    fleet = FleetShare()
    with pytest.raises(InvalidConfiguration):
        fleet.share = share
    assert fleet.share == FIFTH


@pytest.mark.parametrize("nodes", [0, -1, 1.5, True, "4", None])
def test_what_is_no_number_of_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="is not a number of nodes"):
        FleetShare(nodes=nodes)


def test_however_many_limits_there_are_few_are_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.failure.MAX_CACHED_LIMITS", 10)
    fleet = FleetShare()
    parts = [fleet.local_limit(Limit(quota, MINUTE)).quota for quota in range(5, 105, 5)]
    assert parts == list(range(1, 21))
    assert len(fleet._portion[1]) <= 10


# ------------------------------------------------------------------ the answers


def test_local_answers_are_under_the_callers_own_limits_and_say_why() -> None:
    node, key = local(FakeClock()), Limit(10, MINUTE, name="login").by("ada")
    decisions = [node.decide(Check((key,), 1), AWAY) for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert {decision.degraded for decision in decisions} == {"local: nobody is there"}
    assert {decision.keys for decision in decisions} == {(key,)}
    assert (decisions[2].denied_by, decisions[2].retry_after_us) == (("login",), 30_000_000)


def test_all_or_none_is_charged_locally_too() -> None:
    node = local(FakeClock())
    narrow, wide = Limit(5, MINUTE, name="narrow").by("ada"), Limit(100, MINUTE, name="wide").by("ada")
    assert node.decide(Check((narrow, wide), 1), AWAY).allowed
    assert not node.decide(Check((narrow, wide), 1), AWAY).allowed
    assert node.decide(Check((wide,), 0), AWAY).remaining == 19


def test_what_is_too_large_for_the_part_but_not_for_the_limit_may_come_back() -> None:
    node = local(FakeClock())
    small, large = Limit(10, MINUTE, name="small").by("ada"), Limit(1000, MINUTE, name="large").by("ada")
    denied = node.decide(Check((small, large), 5), AWAY)
    assert (denied.allowed, denied.unsatisfiable, denied.retry_after, denied.denied_by) == (False, False, 1, ("small",))
    assert node.decide(Check((small, large), 11), AWAY).unsatisfiable


def test_lease_that_was_taken_locally_is_renewed_and_left_locally() -> None:
    clock = FakeClock()
    node, room = local(clock), Limit(5, MINUTE, algorithm="concurrency", name="rooms").by("ada")

    def enter(id: str) -> bool:
        return node.decide(Check((room,), 1, id), AWAY).allowed

    assert (enter("a"), enter("b")) == (True, False)
    clock.advance(50)
    assert (node.answer(Renew(room, "a"), AWAY), node.answer(Renew(room, "b"), AWAY)) == (True, False)
    clock.advance(50)
    assert not enter("b")
    assert (node.answer(Leave(room, "b"), AWAY), node.answer(Leave(room, "a"), AWAY)) == (False, True)
    assert enter("b")


@pytest.mark.parametrize("mode", ["open", "closed", "local"])
def test_refund_without_the_store_returns_false(mode: Any) -> None:
    policy, key = FailurePolicy(mode, FakeClock()), Limit(10, MINUTE).by("ada")
    policy.decide(Check((key,), 2), AWAY)
    assert policy.answer(Refund(key, 2), AWAY) is False


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_without_local_counting_no_lease_is_known(mode: Any) -> None:
    policy, room = FailurePolicy(mode, FakeClock()), Limit(5, MINUTE, algorithm="concurrency").by("ada")
    policy.decide(Check((room,), 1, "a"), AWAY)
    assert (policy.answer(Renew(room, "a"), AWAY), policy.answer(Leave(room, "a"), AWAY)) == (False, False)


@pytest.mark.parametrize("cost", [0, 1, 5, (10, 5)])
def test_open_allows_and_closed_denies_all_but_peeks(cost: int) -> None:
    check = Check((Limit(10, MINUTE).by("ada"), Limit(5, SECOND, name="b").by("ada")), cost)
    opened, closed = (FailurePolicy(mode, FakeClock()).decide(check, AWAY) for mode in ("open", "closed"))
    assert (opened.allowed, opened.retry_after, opened.degraded) == (True, 0, "open: nobody is there")
    assert (closed.allowed, closed.retry_after) == ((True, 0) if cost == 0 else (False, 1))
    assert closed.degraded == "closed: nobody is there"


@pytest.mark.parametrize("mode", ["open", "closed", "local"])
@pytest.mark.parametrize(("cost", "waits"), [((11, 1), (None, 0)), ((1, 6), (0, None)), (10**30, (None, None))])
def test_what_can_never_pass_is_denied_without_the_store_too(
    mode: FailureMode, cost: int | tuple[int, int], waits: tuple[int | None, int | None]
) -> None:
    check = Check((Limit(10, MINUTE).by("ada"), Limit(5, SECOND, name="b").by("ada")), cost)
    told = FailurePolicy(mode, FakeClock()).decide(check, AWAY)
    assert (told.allowed, told.unsatisfiable, told.retry_after) == (False, True, None)
    assert [outcome.unsatisfiable for outcome in told.outcomes] == [wait is None for wait in waits]


def test_raise_raises_what_the_store_raised() -> None:
    policy, key = FailurePolicy("raise", FakeClock()), Limit(10, MINUTE).by("ada")
    with pytest.raises(StoreUnavailable, match="nobody is there"):
        policy.decide(Check((key,), 1), AWAY)
    with pytest.raises(StoreUnavailable, match="nobody is there"):
        policy.answer(Refund(key, 1), AWAY)
