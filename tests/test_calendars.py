"""Calendar periods: their edges in all time zones, compared with a model that only looks at local time."""

from __future__ import annotations

import itertools
import os
import pickle
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Calendar, InvalidLimit, Limit
from headgate.calendars import CLOCK_TOLERANCE_US, EdgeText
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

ZONES = sorted(available_timezones() - {"localtime"})
"""All time zones; `HEADGATE_CALENDAR=full` tests every day of a century in each of them, which takes an hour."""
IS_FULL = os.environ.get("HEADGATE_CALENDAR") == "full"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_US = 86_400 * 1_000_000
MINUTE_S = 60


def us(text: str) -> int:
    """Microseconds of an instant in UTC."""
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


# ------------------------------------------------------------- model


def local_date(zone: ZoneInfo, second: int) -> date:
    return (EPOCH + timedelta(seconds=second)).astimezone(zone).date()


@lru_cache(maxsize=1000)
def first_second(zone: ZoneInfo, day: date) -> int:
    """The first second whose local date is that day or a later one, by looking at the times around it.

    Where a day repeats after a change of the clocks, its first part counts. No zone is more than 16 hours off UTC, and
    clocks change in a minute that a multiple of a quarter of an hour precedes.
    """
    start = (datetime(day.year, day.month, day.day, tzinfo=UTC) - EPOCH) // timedelta(seconds=1) - 16 * 3600
    for step_s in (15 * MINUTE_S, MINUTE_S, 1):
        start = next(second for second in count(start, step_s) if local_date(zone, second) >= day) - step_s
    return start + 1


def period_start(calendar: Calendar, day: date) -> date:
    """The first day of the period that contains a day, by counting back from it."""
    while not is_first_day(calendar, day):
        day -= timedelta(days=1)
    return day


def is_first_day(calendar: Calendar, day: date) -> bool:
    is_month_end = (day + timedelta(days=1)).month != day.month
    match calendar.unit, calendar.starts:
        case "day", _:
            return True
        case "week", starts:
            return day.isoweekday() == starts
        case "month", int(starts):
            return day.day == starts or (is_month_end and day.day < starts)
        case _, starts:
            month, number = map(int, str(starts).split("-"))
            return day.month == month and (day.day == number or (is_month_end and day.day < number))


def expected_window(calendar: Calendar, now_us: int) -> tuple[int, int]:
    zone = ZoneInfo(calendar.timezone)
    start = period_start(calendar, local_date(zone, now_us // 1_000_000))
    start_us = first_second(zone, start) * 1_000_000
    if start_us > now_us:  # the date repeats
        start = period_start(calendar, start - timedelta(days=1))
    while True:
        following = start + timedelta(days=1)
        while not is_first_day(calendar, following):
            following += timedelta(days=1)
        end_us = first_second(zone, following) * 1_000_000
        if end_us > now_us:
            return first_second(zone, start) * 1_000_000, end_us
        start = following


@st.composite
def calendars(draw: st.DrawFn) -> Calendar:
    unit = draw(st.sampled_from(["day", "week", "month", "year"]))
    starts: Any = None
    if unit == "week":
        starts = draw(st.integers(1, 7))
    elif unit == "month":
        starts = draw(st.integers(1, 31))
    elif unit == "year":
        starts = draw(st.dates(date(2000, 1, 1), date(2000, 12, 31))).strftime("%m-%d")
    return Calendar(unit, starts=starts, timezone=draw(st.sampled_from(ZONES)))


instants = st.integers(us("1950-01-01"), us("2050-01-01"))


def near_edge(calendar: Calendar, at_us: int, offset_us: int) -> int:
    return calendar.window(at_us)[0] + offset_us


# ------------------------------------------------------------- edges


@given(calendar=calendars(), at_us=instants)
def test_window_is_that_of_the_model(calendar: Calendar, at_us: int) -> None:
    assert calendar.window(at_us) == expected_window(calendar, at_us)


@given(calendar=calendars(), at_us=instants, offset_us=st.sampled_from([-1, 0, 1, -1_800_000_000, 5_400_000_000]))
def test_window_is_that_of_the_model_near_an_edge(calendar: Calendar, at_us: int, offset_us: int) -> None:
    at_us = calendar.window(at_us)[1] + offset_us
    assert calendar.window(at_us) == expected_window(calendar, at_us)


def transitions(name: str, since: int, until: int) -> list[int]:
    """Days on which the clocks of a zone change."""
    zone, found = ZoneInfo(name), []
    for day in range(since, until):
        offsets = {(EPOCH + timedelta(days=day + part)).astimezone(zone).utcoffset() for part in (0, 1)}
        if len(offsets) > 1:
            found.append(day)
    return found


@pytest.mark.parametrize("name", ZONES if IS_FULL else ["Africa/Cairo", "America/Havana", "Asia/Tehran"])
def test_every_day_on_which_the_clocks_change(name: str) -> None:
    """A century in every zone if HEADGATE_CALENDAR is "full"."""
    since, until = (-7305, 29_220) if IS_FULL else (11_000, 16_000)
    daily = Calendar("day", timezone=name)
    days = range(since, until) if IS_FULL else transitions(name, since, until)
    for day in days:
        for part in (0, 1) if IS_FULL else (-1, 0, 1):
            at_us = day * DAY_US + part * DAY_US // 2
            assert daily.window(at_us) == expected_window(daily, at_us)


EDGES = {
    "usually": [
        # Days of 23 and 25 hours.
        (Calendar("day", timezone="Europe/Berlin"), "2026-03-29T12:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        (Calendar("day", timezone="Europe/Berlin"), "2026-10-25T12:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        # 23:00 of the last day repeats, midnight does not.
        (Calendar("day", timezone="America/Sao_Paulo"), "2019-02-17T01:30", "2019-02-16T02:00", "2019-02-17T03:00"),
        (Calendar("week"), "2026-11-18T12:00", "2026-11-16T00:00", "2026-11-23T00:00"),
        (Calendar("week", starts=7), "2026-11-18T12:00", "2026-11-15T00:00", "2026-11-22T00:00"),
        (Calendar("week", starts=3), "2026-11-18T00:00", "2026-11-18T00:00", "2026-11-25T00:00"),
        (Calendar("year"), "2026-11-18T00:00", "2026-01-01T00:00", "2027-01-01T00:00"),
        (Calendar("year", starts="04-01"), "2026-03-31T23:59", "2025-04-01T00:00", "2026-04-01T00:00"),
        # Before 1970, and as late as numbers are exact.
        (Calendar("month"), "1969-12-31T23:59", "1969-12-01T00:00", "1970-01-01T00:00"),
        (Calendar("year"), "2255-06-05T00:00", "2255-01-01T00:00", "2256-01-01T00:00"),
    ],
    "a change of the clocks skips midnight, as in Beirut in March": [
        (Calendar("day", timezone="America/Sao_Paulo"), "2018-11-04T12:00", "2018-11-04T03:00", "2018-11-05T02:00"),
        (Calendar("day", timezone="Asia/Beirut"), "2026-03-29T12:00", "2026-03-28T22:00", "2026-03-29T21:00"),
    ],
    "midnight repeats, as in Havana in November": [
        (Calendar("day", timezone="America/Havana"), "2025-11-02T12:00", "2025-11-02T04:00", "2025-11-03T05:00"),
        # A repeated day: Kwajalein crossed the date line to the east, and had 30 September 1969 twice.
        (Calendar("day", timezone="Pacific/Kwajalein"), "1969-09-30T13:30", "1969-09-29T13:00", "1969-10-01T12:00"),
    ],
    "the zone skips the whole day, as Samoa did on 30 December 2011": [
        (Calendar("day", timezone="Pacific/Apia"), "2011-12-30T09:59", "2011-12-29T10:00", "2011-12-30T10:00"),
        (Calendar("day", timezone="Pacific/Apia"), "2011-12-30T10:00", "2011-12-30T10:00", "2011-12-31T10:00"),
        (
            Calendar("month", starts=30, timezone="Pacific/Apia"),
            "2011-12-30T10:00",
            "2011-12-30T10:00",
            "2012-01-29T10:00",
        ),
    ],
    "the month does not have the start day: 31 in April, 29 in February 2026": [
        (Calendar("month", starts=31), "2026-04-29T12:00", "2026-03-31T00:00", "2026-04-30T00:00"),
        (Calendar("month", starts=31), "2026-04-30T00:00", "2026-04-30T00:00", "2026-05-31T00:00"),
        (Calendar("month", starts=30), "2026-02-28T00:00", "2026-02-28T00:00", "2026-03-30T00:00"),
        (Calendar("month", starts=29), "2028-02-28T00:00", "2028-01-29T00:00", "2028-02-29T00:00"),
        (Calendar("month", starts=29), "2026-02-28T00:00", "2026-02-28T00:00", "2026-03-29T00:00"),
    ],
    '`starts="02-29"` in a common year': [
        (Calendar("year", starts="02-29"), "2027-02-27T00:00", "2026-02-28T00:00", "2027-02-28T00:00"),
        (Calendar("year", starts="02-29"), "2028-02-28T12:00", "2027-02-28T00:00", "2028-02-29T00:00"),
    ],
}
"""Cases of each row of the table in docs/limits.md."""


@pytest.mark.parametrize(
    ("calendar", "at", "start", "end"), [case for cases in EDGES.values() for case in cases], ids=str
)
def test_window(calendar: Calendar, at: str, start: str, end: str) -> None:
    assert calendar.window(us(at)) == (us(start), us(end))
    assert expected_window(calendar, us(at)) == (us(start), us(end))


def test_documented_edges_are_those_that_are_tested() -> None:
    table = (ROOT / "docs/limits.md").read_text().partition("| case | edge |")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == [*EDGES]


@given(calendar=calendars(), at_us=instants)
def test_no_window_exceeds_the_stated_bound(calendar: Calendar, at_us: int) -> None:
    start_us, end_us = calendar.window(at_us)
    assert 0 < end_us - start_us <= calendar.longest_us


@given(calendar=calendars(), at_us=instants, difference_us=st.integers(-CLOCK_TOLERANCE_US, CLOCK_TOLERANCE_US))
def test_edges_for_scripts_are_consecutive_and_allow_for_other_clocks(
    calendar: Calendar, at_us: int, difference_us: int
) -> None:
    text = calendar.edges(at_us)
    longest, series, *numbers = text.split()
    edges = [*map(int, numbers)]
    assert (int(longest), series) == (calendar.longest_us, calendar.series)
    assert all(calendar.window(one) == (one, other) for one, other in itertools.pairwise(edges))
    store_us = at_us + difference_us
    assert edges[0] <= store_us < edges[-1] - 2 * calendar.longest_us
    assert len(edges) <= 12
    assert type(text) is EdgeText
    assert text.calendar is calendar


# ------------------------------------------------------------- values


def test_calendars_are_values() -> None:
    monthly = Calendar("month", starts=15, timezone="Europe/Berlin")
    assert monthly == Calendar("month", starts=15, timezone="Europe/Berlin") != Calendar("month", starts=15)
    assert Calendar("month") == Calendar("month", starts=1, timezone="UTC")
    assert len({monthly, Calendar("month", starts=15, timezone="Europe/Berlin")}) == 1
    assert pickle.loads(pickle.dumps(monthly)) == monthly
    assert pickle.loads(pickle.dumps(monthly)).window(0) == monthly.window(0)


@given(calendar=calendars())
def test_text_and_repr_describe_the_calendar(calendar: Calendar) -> None:
    assert eval(repr(calendar)) == calendar
    limit = Limit(10, calendar, name="x")
    assert Limit.parse(str(limit), name="x") == limit
    assert limit.algorithm == "fixed_window"
    assert pickle.loads(pickle.dumps(limit)) == limit


DAYS_OF_MONTHS = "use 1 to 31"
INVALID: list[tuple[Callable[[], object], str]] = [
    (lambda: Calendar("months"), "unknown calendar period 'months'; did you mean 'month'?"),
    (lambda: Calendar("hour"), "unknown calendar period 'hour'; use one of day, week, month, year"),
    (lambda: Calendar(7), "unknown calendar period 7; use one of day, week, month, year"),  # type: ignore[arg-type]
    (
        lambda: Calendar("day", starts=1),
        "starts 1 means nothing to a day, which starts at midnight; leave it out",
    ),
    (lambda: Calendar("week", starts=8), "starts 8 is not a day of a week; use 1 (Monday) to 7 (Sunday)"),
    (lambda: Calendar("month", starts=0), f"starts 0 is not a day of a month; {DAYS_OF_MONTHS}"),
    (lambda: Calendar("month", starts="15"), f"starts '15' is not a day of a month; {DAYS_OF_MONTHS}"),
    (lambda: Calendar("month", starts=True), f"starts True is not a day of a month; {DAYS_OF_MONTHS}"),
    (
        lambda: Calendar("year", starts="04-31"),
        "starts '04-31' is not a day of a year; write month and day, like \"04-01\"",
    ),
    (lambda: Calendar("year", starts=4), 'starts 4 is not a day of a year; write month and day, like "04-01"'),
    (
        lambda: Calendar("month", timezone="europe/berlin"),
        "unknown time zone 'europe/berlin'; did you mean 'Europe/Berlin'?",
    ),
    (lambda: Calendar("month", timezone="Berlin"), "unknown time zone 'Berlin'; did you mean 'Europe/Berlin'?"),
    (
        lambda: Calendar("month", timezone="../etc/passwd"),
        'unknown time zone \'../etc/passwd\'; use a name like "Europe/Berlin" or "UTC"',
    ),
    (
        lambda: Calendar("month", timezone=""),
        'unknown time zone \'\'; use a name like "Europe/Berlin" or "UTC"',
    ),
    (
        lambda: Limit(5, "month"),  # type: ignore[arg-type]
        (
            "period 'month' is not a timedelta; write Calendar(\"month\"), or the whole limit in words: "
            'Limit.parse("10/month")'
        ),
    ),
    (
        lambda: Limit(5, Calendar("week"), algorithm="token_bucket"),
        (
            "token_bucket cannot count a calendar week, only fixed_window can; leave the algorithm out, or use a "
            "length of time, such as 7 days"
        ),
    ),
    (
        lambda: Limit(5, Calendar("year"), burst=10),
        (
            "burst 10 means nothing to fixed_window, which lets 5 pass at once; leave it out, or use token_bucket, "
            "gcra or leaky_bucket"
        ),
    ),
    (
        lambda: Limit(5, Calendar("month"), region="reserved"),
        (
            "region 'reserved' cannot share a calendar month; use 'central' or 'divided', or a length of time, such as "
            "30 days"
        ),
    ),
]


@pytest.mark.parametrize(("make", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_calendar_is_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidLimit) as raised:
        make()
    assert str(raised.value) == message
