"""Quota plans: allowance, grants, pay-as-you-go, in calendar periods."""

from __future__ import annotations

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Calendar, InvalidInput
from headgate.quotas import Ledger, QuotaMeter, QuotaPlan
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.quotas import AccountSummary

MONTH = Calendar("month")


def us(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(us("2026-10-05"))


def left(summary: AccountSummary) -> dict[str, int]:
    return {grant.source: grant.remaining for grant in summary.grants}


def test_allowance_pays_first_then_grants_then_pay_as_you_go_up_to_the_cap(ledger: Ledger, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 10, MONTH, pay_as_you_go=4)
    account = plan.account("acme")
    ledger.grant(account, 3, source="credit pack")
    paid = []
    with QuotaMeter(ledger, wait_s=20) as meter:
        while (reservation := meter.reserve(account, 1, plan=plan)) is not None:
            paid += [name for name, _ in reservation.paid_by]
            reservation.commit(1)
    assert paid == ["allowance"] * 10 + ["credit pack"] * 3 + ["pay as you go"] * 4
    assert ledger.summary(account).charged == 17


def test_reservation_over_two_sources_names_both(ledger: Ledger) -> None:
    plan = QuotaPlan("exports", 10, MONTH, pay_as_you_go=4)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert meter.charge("exports/acme", 8, plan=plan)
        reservation = meter.reserve("exports/acme", 5, plan=plan)
        assert reservation is not None
        assert reservation.paid_by == (("allowance", 2), ("pay as you go", 3))
        reservation.commit(5)
    assert ledger.balance("exports/acme") == 1


def test_new_period_has_a_new_allowance_and_grants_stay(ledger: Ledger, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 10, MONTH, pay_as_you_go=4)
    with QuotaMeter(ledger, wait_s=20) as meter:
        assert meter.charge("exports/acme", 7, plan=plan)
        ledger.grant("exports/acme", 3, source="credit pack")
        clock.set_us(us("2026-11-01") - 1)
        assert meter.charge("exports/acme", 2, plan=plan)
        clock.set_us(us("2026-11-01"))
        assert meter.charge("exports/acme", 2, plan=plan)
    assert left(ledger.summary("exports/acme")) == {"allowance": 8, "credit pack": 3, "pay as you go": 4}


@pytest.mark.parametrize(("used", "rollover"), [(0, 6), (3, 6), (4, 6), (5, 5), (10, None)])
def test_unused_allowance_rolls_over_up_to_a_limit_and_is_spent_first(
    ledger: Ledger, clock: FakeClock, used: int, rollover: int | None
) -> None:
    plan = QuotaPlan("exports", 10, MONTH, rollover=6, pay_as_you_go=5)
    ledger.open_period("a", plan)
    ledger.charge("a", used)
    clock.set_us(us("2026-11-02"))
    ledger.open_period("a", plan)
    summary = ledger.summary("a")
    assert left(summary).get("rollover") == rollover
    assert summary.grants[0].source == ("allowance" if rollover is None else "rollover")
    clock.set_us(us("2026-12-02"))
    ledger.open_period("a", plan)
    assert left(ledger.summary("a"))["rollover"] == 6, "only of the last allowance, not of what had rolled over"


def test_allowance_that_a_lease_returns_after_the_period_rolls_over(ledger: Ledger, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 10, MONTH, rollover=10)
    clock.set_us(us("2026-10-31T12:00"))
    ledger.open_period("a", plan)
    assert ledger.lease("a", 8, id="lease") is not None
    clock.set_us(us("2026-11-01") + 1_000_000)
    ledger.close_lease("lease")
    ledger.open_period("a", plan)
    assert left(ledger.summary("a")) == {"rollover": 10, "allowance": 10}


def test_opening_a_period_is_idempotent(ledger: Ledger, config_url: str, clock: FakeClock) -> None:
    plan = QuotaPlan("exports", 10, MONTH, pay_as_you_go=5)
    assert len(ledger.open_period("a", plan)) == 2
    assert ledger.open_period("a", plan) == []
    other = Ledger(config_url, clock=clock)
    assert other.open_period("a", plan) == []
    other.close()
    assert ledger.balance("a") == 15


def test_larger_plan_applies_at_once_and_a_smaller_one_in_the_next_period(ledger: Ledger, clock: FakeClock) -> None:
    small, large = QuotaPlan("exports", 10, MONTH), QuotaPlan("exports", 25, MONTH)
    ledger.open_period("a", small)
    ledger.charge("a", 10)
    for plan in (large, small, large, small):
        ledger.open_period("a", plan)
    assert ledger.balance("a") == 15
    clock.set_us(us("2026-11-02"))
    ledger.open_period("a", small)
    assert ledger.balance("a") == 10


calendars = st.builds(
    Calendar,
    st.just("month"),
    starts=st.integers(1, 31),
    timezone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Pacific/Apia", "Asia/Kathmandu"]),
)


@settings(max_examples=25)
@given(steps=st.lists(st.tuples(calendars, st.integers(0, 50)), min_size=1, max_size=12))
def test_change_of_the_calendar_never_grants_a_period_twice(
    migrated_file: Path, steps: list[tuple[Calendar, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(migrated_file, f"{directory}/quota.db")
        clock = FakeClock(us("2026-10-05"))
        ledger = Ledger(f"sqlite:///{directory}/quota.db", clock=clock)
        for calendar, days in steps:
            clock.advance(timedelta(days=days))
            before = clock.now_us()
            opened = ledger.open_period("a", QuotaPlan("p", 10, calendar))
            assert ledger.balance("a") == 10
            for entry in opened:
                assert entry.expires_us == calendar.window((entry.expires_us or 0) - 1)[1] > before
        ends = [entry.expires_us or 0 for entry in ledger.entries("a") if entry.kind == "grant"]
        shortest = timedelta(days=27) // timedelta(microseconds=1)
        assert all(later - end >= shortest for end, later in pairwise(ends))
        assert ledger.verify() == []
        ledger.close()


def test_long_identities_have_accounts_of_their_own(ledger: Ledger) -> None:
    plan = QuotaPlan("exports", 10, MONTH)
    one, other = plan.account("x" * 300), plan.account("x" * 301)
    assert one != other
    ledger.open_period(one, plan)
    assert ledger.balance(one) == 10
    assert ledger.balance(other) == 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "name of a plan must have 1 to 80"),
        ({"allowance": -1}, "allowance of plan 'p' must be a whole number from 0"),
        ({"allowance": 1.5}, "got 1.5"),
        ({"pay_as_you_go": True}, "pay_as_you_go of plan 'p' must be"),
        ({"period": "month"}, "must be a Calendar, got 'month'"),
    ],
)
def test_impossible_plans_are_input_errors(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        QuotaPlan(**{"name": "p", "allowance": 1, "period": MONTH, **fields})
    assert problem in str(refused.value)
