"""Limits with a calendar period: the rules, and Python and Lua beside a model, on every store."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import AsyncLimiter, Calendar, Limit, Limiter
from headgate.algorithms import calendar_window
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund, Reset
from headgate.testing import FakeClock
from support.algorithm_stores import InMemory, InRedis
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate import Decision
    from support.limiter_probe import LimiterProbe
    from support.servers import RedisServer

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Pacific/Apia")


def us(text: str) -> int:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def calendar_of(limit: Limit) -> Calendar:
    assert limit.calendar is not None
    return limit.calendar


def monthly(quota: int = 10, starts: int = 1, timezone: str = "UTC") -> Limit:
    return Limit(quota, Calendar("month", starts=starts, timezone=timezone), name="exports")


class Timeline:
    """Checks of one client at given instants."""

    def __init__(self, probe: LimiterProbe) -> None:
        self.probe = probe

    def check(self, limit: Limit, at: str, cost: int = 1) -> tuple[bool, int, str]:
        """Allowed, remaining, and the instant of the reset."""
        decision = self.decide(limit, at, cost)
        reset = EPOCH + timedelta(microseconds=us(at) + decision.reset_after_us)
        return decision.allowed, decision.remaining, f"{reset:%Y-%m-%dT%H:%M}"

    def decide(self, limit: Limit, at: str, cost: int = 1) -> Decision:
        self.probe.clock.set_us(us(at))
        return self.probe.limiter.check(self.probe.key(limit), cost=cost)


@pytest.fixture
def timeline(probe: LimiterProbe) -> Timeline:
    return Timeline(probe)


# ------------------------------------------------------------- rules


def test_month_is_counted_until_its_end(timeline: Timeline) -> None:
    limit = monthly()
    assert timeline.check(limit, "2026-11-30T23:59", 10) == (True, 0, "2026-12-01T00:00")
    denied = timeline.decide(limit, "2026-11-30T23:59")
    assert denied.retry_after_us == denied.reset_after_us == 60_000_000
    assert timeline.check(limit, "2026-12-01T00:00") == (True, 9, "2027-01-01T00:00")


def test_retry_after_is_exact(probe: LimiterProbe) -> None:
    limit = Limit(1, Calendar("day", timezone="Asia/Beirut"), name="daily")
    probe.clock.set_us(us("2026-03-28T12:00"))  # the next day starts at 01:00, as midnight is skipped
    assert probe.limiter.check(probe.key(limit)).allowed
    retry_us = probe.limiter.check(probe.key(limit)).retry_after_us
    assert retry_us == 10 * HOUR_US
    probe.clock.set_us(us("2026-03-28T22:00") - 1)
    assert not probe.limiter.check(probe.key(limit)).allowed
    probe.clock.set_us(us("2026-03-28T22:00"))
    assert probe.limiter.check(probe.key(limit)).allowed


def test_new_key_reports_no_reset(timeline: Timeline) -> None:
    assert timeline.decide(monthly(), "2026-11-10T00:00", cost=0).reset_after_us == 0


def test_cost_beyond_the_quota_never_passes(timeline: Timeline) -> None:
    decision = timeline.decide(monthly(), "2026-11-10T00:00", cost=11)
    assert (decision.allowed, decision.retry_after_us, decision.unsatisfiable) == (False, None, True)


DOCUMENTED = {
    "10 November, months from the 1st | from the 15th | 11 November | 15 December": (
        (monthly(), "2026-11-10T00:00", monthly(starts=15), "2026-11-11T00:00", "2026-12-15T00:00")
    ),
    "20 November, months from the 1st | from the 15th | 21 November | 15 December": (
        (monthly(), "2026-11-20T00:00", monthly(starts=15), "2026-11-21T00:00", "2026-12-15T00:00")
    ),
    "20 November, months from the 15th | from the 1st | 21 November | 1 January": (
        (monthly(starts=15), "2026-11-20T00:00", monthly(), "2026-11-21T00:00", "2027-01-01T00:00")
    ),
    "10 November, UTC | Asia/Tokyo | 11 November | 1 December, 00:00 UTC: there, December is nine hours old": (
        (monthly(), "2026-11-10T00:00", monthly(timezone="Asia/Tokyo"), "2026-11-11T00:00", "2026-12-01T00:00")
    ),
    "10 November, UTC | America/New_York | 11 November | 1 December, 05:00 UTC": (
        (monthly(), "2026-11-10T00:00", monthly(timezone="America/New_York"), "2026-11-11T00:00", "2026-12-01T05:00")
    ),
    "30 November, UTC | America/New_York | 1 December, 04:59 UTC | 1 December, 05:00 UTC: there, November ends": (
        (monthly(), "2026-11-30T00:00", monthly(timezone="America/New_York"), "2026-12-01T04:59", "2026-12-01T05:00")
    ),
    "31 October, months from the 1st | from the 15th | 14 November | 15 November": (
        (monthly(), "2026-10-31T00:00", monthly(starts=15), "2026-11-14T00:00", "2026-11-15T00:00")
    ),
}
"""The rows of the table in docs/limits.md."""

CHANGES = [
    *DOCUMENTED.values(),
    # Time zone: to the east, where the month ends some hours earlier, it ends as before.
    (monthly(), "2026-11-10T00:00", monthly(timezone="Asia/Tokyo"), "2026-11-30T16:00", "2026-12-01T00:00"),
    # Days are extended.
    (
        Limit(10, Calendar("day"), name="exports"),
        "2026-11-10T01:00",
        Limit(10, Calendar("day", timezone="Asia/Tokyo"), name="exports"),
        "2026-11-10T16:00",
        "2026-11-11T15:00",
    ),
    # Start day and time zone.
    (
        monthly(),
        "2026-11-10T00:00",
        monthly(starts=2, timezone="Asia/Tokyo"),
        "2026-11-11T00:00",
        "2026-12-01T15:00",
    ),
    # The quota: what was used stays used.
    (monthly(10), "2026-11-10T00:00", monthly(12), "2026-11-11T00:00", "2026-12-01T00:00"),
    # The unit: as with other windows, what was used counts in the current one.
    (
        monthly(),
        "2026-11-10T00:00",
        Limit(10, Calendar("week"), name="exports"),
        "2026-11-11T00:00",
        "2026-11-16T00:00",
    ),
    (
        Limit(10, Calendar("day"), name="exports"),
        "2026-11-10T00:00",
        Limit(10, Calendar("year"), name="exports"),
        "2026-11-10T01:00",
        "2027-01-01T00:00",
    ),
]


@pytest.mark.parametrize(("old", "used_at", "new", "changed_at", "until"), CHANGES)
def test_changed_calendar_extends_the_current_period(
    timeline: Timeline, old: Limit, used_at: str, new: Limit, changed_at: str, until: str
) -> None:
    timeline.check(old, used_at, 10)
    left = new.quota - 10
    assert timeline.check(new, changed_at, left + 1) == (False, left, until)
    decision = timeline.decide(new, changed_at, left + 1)
    if left:
        assert decision.unsatisfiable is False
    probe = timeline.probe
    probe.clock.set_us(us(until) - 1)
    assert not probe.limiter.check(probe.key(new), cost=left + 1).allowed
    probe.clock.set_us(us(until))
    assert probe.limiter.check(probe.key(new)).remaining == new.quota - 1


def test_documented_changes_are_those_that_are_tested() -> None:
    section = (ROOT / "docs/limits.md").read_text().partition("### When the calendar changes")[2]
    rows = [line.strip("| ") for line in section.partition("\n#")[0].splitlines() if line.startswith("|")]
    assert rows[2:] == [*DOCUMENTED]


@pytest.mark.parametrize(("old", "used_at", "new", "changed_at", "until"), CHANGES)
def test_changed_calendar_is_as_in_the_model(old: Limit, used_at: str, new: Limit, changed_at: str, until: str) -> None:
    model = CalendarModel()
    assert model.check(us(used_at), 10, old)[0]
    allowed, _, reset_us = model.check(us(changed_at), new.quota - 9, new)
    assert (allowed, us(changed_at) + reset_us) == (False, us(until))


FORGOTTEN = [
    # The current period of the new calendar began when the stored one ended, or later.
    (monthly(), "2026-10-31T00:00", monthly(starts=15), "2026-11-15T00:00"),
    (monthly(), "2026-11-30T00:00", monthly(timezone="America/New_York"), "2026-12-01T05:00"),
    (Limit(10, Calendar("day"), name="exports"), "2026-11-09T00:00", monthly(), "2026-11-10T00:00"),
]


def test_nodes_with_different_calendars_agree_on_the_end(timeline: Timeline) -> None:
    """While a change reaches one node after the other, the period is not extended again and again."""
    for _ in range(4):
        assert timeline.check(monthly(100), "2026-11-10T00:00")[2] == "2026-12-01T00:00"
        assert timeline.check(monthly(100, starts=15), "2026-11-10T00:00")[2] == "2026-12-15T00:00"
        assert timeline.check(monthly(100, starts=14), "2026-11-10T00:00")[2] == "2026-12-14T00:00"
    assert timeline.check(monthly(100, starts=15), "2026-12-14T23:59")[1] == 87
    assert timeline.check(monthly(100, starts=15), "2026-12-15T00:00")[1] == 99


@pytest.mark.parametrize(("old", "used_at", "new", "changed_at"), FORGOTTEN)
def test_usage_of_an_earlier_period_is_forgotten(
    timeline: Timeline, old: Limit, used_at: str, new: Limit, changed_at: str
) -> None:
    timeline.check(old, used_at, 10)
    assert timeline.check(new, changed_at)[:2] == (True, new.quota - 1)


def test_a_client_that_moves_its_start_day_every_day_gets_one_allowance(timeline: Timeline) -> None:
    admitted = 0
    for day in range(2, 29):
        while timeline.check(monthly(starts=day), f"2026-11-{day:02}T00:00")[0]:
            admitted += 1
    assert admitted == 10


def test_window_of_a_length_of_time_has_a_counter_of_its_own(timeline: Timeline) -> None:
    """The algorithm is part of the stored key."""
    fixed = Limit(10, timedelta(days=30), algorithm="fixed_window", name="exports")
    assert timeline.check(monthly(), "2026-11-10T00:00", 10)[0]
    assert timeline.check(fixed, "2026-11-10T00:00", 10)[0]
    assert not timeline.check(monthly(), "2026-11-10T00:00")[0]


def test_clock_that_is_set_back_grants_nothing(timeline: Timeline) -> None:
    limit = monthly()
    assert timeline.check(limit, "2026-12-01T00:00", 10) == (True, 0, "2027-01-01T00:00")
    assert timeline.check(limit, "2026-11-30T23:00") == (False, 0, "2027-01-01T00:00")
    assert timeline.check(limit, "2026-12-31T23:00") == (False, 0, "2027-01-01T00:00")


def test_clock_that_is_set_back_by_years_locks_nobody_out(timeline: Timeline) -> None:
    limit = monthly()
    timeline.check(limit, "2030-12-01T00:00", 10)
    assert timeline.check(limit, "2026-11-10T00:00") == (False, 0, "2026-12-01T00:00")
    assert timeline.check(limit, "2026-12-01T00:00")[0]


def test_refund_returns_what_was_charged_in_the_period(timeline: Timeline) -> None:
    probe, limit = timeline.probe, monthly()
    decision = timeline.decide(limit, "2026-11-10T00:00", 8)
    assert probe.limiter.refund(probe.key(limit), 3, of=decision)
    assert timeline.check(limit, "2026-11-10T00:01", 5) == (True, 0, "2026-12-01T00:00")
    moved = monthly(starts=15)
    probe.clock.set_us(us("2026-11-20T00:00"))
    assert probe.limiter.refund(probe.key(moved), 2, of=decision)  # the period was extended, and includes it
    assert timeline.check(moved, "2026-12-14T00:00", 2) == (True, 0, "2026-12-15T00:00")
    timeline.decide(moved, "2026-12-15T00:00")
    assert not probe.limiter.refund(probe.key(moved), 1, of=decision)


def test_reset_forgets_the_period(timeline: Timeline) -> None:
    probe, limit = timeline.probe, monthly()
    timeline.check(limit, "2026-11-10T00:00", 10)
    probe.limiter.reset(probe.key(limit))
    assert timeline.check(limit, "2026-11-10T00:00")[:2] == (True, 9)


def test_idempotent_check_is_charged_once(probe: LimiterProbe) -> None:
    limit = monthly()
    for _ in range(3):
        decision = probe.limiter.check(probe.key(limit), cost=4, id="export-1")
        assert (decision.allowed, decision.remaining) == (True, 6)
    assert probe.limiter.refund(probe.key(limit), 4, id="export-1")
    assert not probe.limiter.refund(probe.key(limit), 4, id="export-1")
    assert probe.remaining(limit) == 10


def test_all_limits_of_a_request_are_charged_or_none(probe: LimiterProbe) -> None:
    """Also over the shards of a cluster, where what was charged is taken back."""
    month, second = monthly(), Limit(1, timedelta(hours=1), name="rate")
    keys = [probe.key(month), probe.key(second)]
    assert probe.limiter.check(*keys, cost=1).allowed
    for _ in range(3):
        assert probe.limiter.check(*keys).denied_by == ("rate",)
    assert probe.remaining(month) == 9


def test_split_month_counts_in_shards(probe: LimiterProbe) -> None:
    limit = Limit(40, Calendar("month", timezone="Europe/Berlin"), name="split", split=4)
    admitted = sum(probe.limiter.check(probe.key(limit)).allowed for _ in range(400))
    assert admitted == 40


def test_async_limiter_gives_the_same_answers(store_url: str, unique: str) -> None:
    async def run() -> list[tuple[bool, int, int]]:
        clock = FakeClock(us("2026-11-30T22:00"))
        limit = monthly(timezone="Europe/Berlin")
        answers = []
        async with AsyncLimiter(store_url, clock=clock) as limiter:
            for advance_s in (0, 0, 3599, 1):
                clock.advance(advance_s)
                made = await asyncio.gather(*[limiter.check(limit.by(unique), cost=5) for _ in range(2)])
                answers += [(each.allowed, each.remaining, each.reset_after_us) for each in made]
        return answers

    first, second, *denied, last, final = asyncio.run(run())
    assert (first, second) == ((True, 5, HOUR_US), (True, 0, HOUR_US))
    assert [allowed for allowed, *_ in denied] == [False] * 4
    assert (last[:2], final[:2]) == ((True, 5), (True, 0))


def test_many_clients_with_calendars_of_their_own_share_a_batch(store_url: str, unique: str) -> None:
    async def run() -> list[Decision]:
        async with AsyncLimiter(store_url, clock=FakeClock(us("2026-11-10T00:00"))) as limiter:
            keys = [
                monthly(starts=number % 31 + 1, timezone=ZONES[number % len(ZONES)]).by(unique, number)
                for number in range(60)
            ]
            return [*await asyncio.gather(*[limiter.check(key) for key in keys for _ in (0, 1)])]

    decisions = asyncio.run(run())
    assert [decision.remaining for decision in decisions] == [9, 8] * 60
    for decision in decisions:
        calendar = calendar_of(decision.keys[0].limit)
        assert decision.reset_after_us == calendar.window(us("2026-11-10T00:00"))[1] - us("2026-11-10T00:00")


# ------------------------------------------------------------- model


class CalendarModel:
    """One client: charges count in the period of the first of them, which ends later in other calendars."""

    def __init__(self) -> None:
        self.charged = self.end_us = 0
        self.calendar: Calendar | None = None

    def check(self, now_us: int, cost: int, limit: Limit) -> tuple[bool, int, int]:
        calendar = calendar_of(limit)
        used, end_us = self.charged, self.end_in(calendar)
        if self.calendar is not None and self.calendar.unit != calendar.unit:
            if self.end_us > calendar.window(now_us)[0] and self.charged:
                self.charged = used = self.charged if now_us < self.end_us else 0
                self.calendar, self.end_us = calendar, calendar.window(now_us)[1]
            end_us = self.end_us
        if now_us >= end_us or not used:
            used, end_us = 0, calendar.window(now_us)[1]
        allowed = used + cost <= limit.quota
        if allowed:
            if not used:
                self.calendar, self.end_us = calendar, end_us
            self.charged = used = used + cost
        return allowed, max(0, limit.quota - used), end_us - now_us if used else 0

    def end_in(self, calendar: Calendar) -> int:
        """The end of the period in another calendar: the first edge at or after it."""
        edges = list(calendar.window(self.end_us))
        if edges[0] == self.end_us:
            return self.end_us
        is_same_series = self.calendar is not None and calendar.starts == self.calendar.starts
        if is_same_series and calendar.unit != "day" and self.end_us - edges[0] <= 26 * HOUR_US:
            return self.end_us  # the same edge as seen from another time zone
        return edges[1]


@st.composite
def limits(draw: st.DrawFn, units: tuple[str, ...] = ("day", "week", "month", "year")) -> Limit:
    unit = draw(st.sampled_from(units))
    starts: Any = {"week": st.integers(1, 7), "month": st.integers(1, 31)}.get(unit, st.none())
    if unit == "year":
        starts = st.sampled_from(["01-01", "02-29", "07-01", "12-31"])
    calendar = Calendar(unit, starts=draw(starts), timezone=draw(st.sampled_from(ZONES)))
    return Limit(draw(st.sampled_from([3, 10])), calendar, name="x")


steps = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3 * HOUR_US), st.integers(0, 40 * DAY_US), st.integers(0, 500 * DAY_US)),
        st.integers(0, 4),
        st.integers(0, 3),
    ),
    max_size=25,
)


@given(plans=st.lists(limits(("month",)), min_size=4, max_size=4), steps=steps)
def test_allowances_belong_to_whole_periods_that_do_not_overlap(
    plans: list[Limit], steps: list[tuple[int, int, int]]
) -> None:
    """The purpose of the rule for changed calendars: a greedy client that switches between them at will gets one
    allowance for each period of a calendar, and none of these begins before the last one has ended. Only the time zone
    may make them overlap, by the hours between the same midnight here and there."""
    now_us, state = us("2024-01-01T00:00"), None
    last_end_us, charged = 0, 0
    periods: list[datetime] = []
    for wait_us, _, plan in steps:
        now_us += min(wait_us, 40 * DAY_US)
        limit = plans[plan]
        _, (remaining, _, reset_us, _) = calendar_window.decide(state, now_us, 0, limit)
        if not reset_us:
            start_us, end_us = calendar_of(limit).window(now_us)
            assert start_us + 26 * HOUR_US >= last_end_us  # the same edge in two time zones
            periods.append(EPOCH + timedelta(microseconds=(start_us + end_us) // 2))
            last_end_us, charged = end_us, 0
        if remaining:
            state, _ = calendar_window.decide(state, now_us, remaining, limit)
            charged += remaining
        assert charged <= max(plan.quota for plan in plans)
    assert all((other - one).days >= 27 for one, other in itertools.pairwise(periods))


@given(plans=st.lists(limits(), min_size=4, max_size=4), steps=steps)
@settings(max_examples=100)
def test_python_is_as_the_model(plans: list[Limit], steps: list[tuple[int, int, int]]) -> None:
    compare_with_model(InMemory(), plans, steps)


@given(plans=st.lists(limits(), min_size=4, max_size=4), steps=steps)
@settings(max_examples=40)
def test_lua_is_as_the_model(redis7: RedisServer, plans: list[Limit], steps: list[tuple[int, int, int]]) -> None:
    with redis7.client() as client:
        compare_with_model(InRedis(client), plans, steps)


def compare_with_model(store: Any, plans: list[Limit], steps: list[tuple[int, int, int]]) -> None:
    now_us, model = us("2024-01-01T00:00"), CalendarModel()
    for wait_us, cost, plan in steps:
        now_us += wait_us
        limit = plans[plan]
        decision = store.run(Check((limit.by("a"),), cost), now_us)
        ((remaining, retry_us, reset_us, _),) = decision.verdicts
        if cost == 0:  # a peek does not write the migration to another unit
            continue
        allowed, *expected = model.check(now_us, cost, limit)
        assert (decision.allowed, remaining, reset_us) == (allowed, *expected)
        assert retry_us == (0 if allowed else -1 if cost > limit.quota else reset_us)


# ------------------------------------------------------------- Redis


def test_lua_and_python_agree_when_the_clock_goes_back(redis7: RedisServer) -> None:
    with redis7.client() as client:
        python, lua = InMemory(), InRedis(client)
        limit = monthly()
        for at, cost in [
            ("2026-12-05T00:00", 4),
            ("2026-11-20T00:00", 7),
            ("2026-11-20T00:00", 2),
            ("2025-01-10T00:00", 9),
            ("2025-01-11T00:00", 1),
            ("2025-02-01T00:00", 10),
            ("1970-01-02T00:00", 3),
            ("1970-01-01T00:00", 1),
        ]:
            call = Check((limit.by("a"),), cost)
            one, other = python.run(call, us(at)), lua.run(call, us(at))
            assert one.verdicts == other.verdicts, at


@pytest.mark.parametrize("number", range(1, 4))
def test_counter_outlives_its_period_by_the_longest(redis7: RedisServer, number: int) -> None:
    """Otherwise a client that changes its calendar after the end of its period could get the next one at once."""
    with redis7.client() as client:
        store = InRedis(client)
        limit = monthly(starts=number)
        now_us = us("2026-11-10T00:00")
        store.run(Check((limit.by("a"),), 1), now_us)
        (lifetime_ms,) = store.lifetimes_ms.values()
        end_us = calendar_of(limit).window(now_us)[1]
        assert lifetime_ms == (end_us - now_us + 32 * DAY_US) // 1000 + 3_600_000
        store.run(Refund(limit.by("a"), 1), now_us)
        (lifetime_ms,) = store.lifetimes_ms.values()
        assert lifetime_ms == 3_600_000
        store.run(Reset((limit.by("a"),)), now_us)


def test_memory_keeps_a_counter_for_as_long() -> None:
    clock = FakeClock(us("2026-11-10T00:00"))
    store = MemoryStore(clock)
    store.check(monthly().by("a"), cost=10)
    for at, keys in (("2026-12-19T00:00", 4), ("2027-01-03T00:00", 6)):
        clock.set_us(us(at))
        for number in range(3):
            store.check(monthly().by(at, number))
        assert store.stats.keys == keys
        assert store.check(monthly(starts=20).by("a"), cost=0).remaining == (0 if at < "2027" else 10)


@pytest.mark.parametrize("ahead_days", [-400, -40, -2, 2, 40, 400])
def test_window_is_that_of_the_clock_of_the_store(
    redis7: RedisServer, ahead_days: int, monkeypatch: pytest.MonkeyPatch, fresh_name: Callable[[], str]
) -> None:
    """The clock of the client is wrong by days: the store rejects its edges, and gets others."""
    import time as real_time

    actual_ns = real_time.time_ns
    monkeypatch.setattr("headgate.stores.redis.encoding.time.time_ns", lambda: actual_ns() + ahead_days * DAY_US * 1000)
    limit = Limit(3, Calendar("day", timezone="Europe/Berlin"), name=fresh_name())
    with Limiter(redis7.url, on_failure="raise") as limiter:
        for left in (2, 1, 0):
            decision = limiter.check(limit.by("a"))
            assert decision.remaining == left
            assert decision.at_us + decision.reset_after_us == calendar_of(limit).window(decision.at_us)[1]
        assert not limiter.check(limit.by("a")).allowed
        assert limiter.check(limit.by("b"), monthly().by(limit.name), cost=2, id="x").allowed
        assert limiter.refund(limit.by("b"), 2, id="x")
