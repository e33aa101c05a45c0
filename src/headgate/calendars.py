"""Calendar periods: days, weeks, months and years of a time zone.

Limits count them in windows between two edges. An edge is the first instant of a local day: midnight, the first instant
after it where a change of the clocks skips midnight, and the earlier of two where midnight repeats.
"""

from __future__ import annotations

import datetime
import re
from calendar import monthrange
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from headgate.clock import DAY_US, EPOCH
from headgate.errors import InvalidLimit

__all__ = ["UNITS", "Calendar", "EdgeText"]

UNITS: Final = {"day": DAY_US, "week": 7 * DAY_US, "month": 31 * DAY_US, "year": 366 * DAY_US}
"""The units, and the longest of each without a change of the clocks."""

ZONE_TOLERANCE_US: Final = 26 * 3_600 * 1_000_000
"""The largest difference between the local times of two zones: the same edge of two zones is at most so far apart."""
MAX_ADJUSTMENT_US: Final = DAY_US
"""Time by which changes of the clocks may lengthen a period: a zone may even repeat a day."""
CLOCK_TOLERANCE_US: Final = DAY_US
"""Difference between the clocks of a client and of a store up to which the edges that the client sends are enough."""

_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_LEAP_YEAR: Final = 2000
_FIRST_STARTS: Final = {"day": None, "week": 1, "month": 1, "year": "01-01"}
_DATE: Final = re.compile(r"(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")


class EdgeText(str):
    """The edges around an instant as an argument of scripts: the longest period (us), the series, and edges."""

    __slots__ = ("calendar",)
    calendar: Calendar


@dataclass(frozen=True, slots=True)
class Calendar:
    """A calendar period: the "day", "week", "month" or "year" of a time zone.

    >>> Calendar("month", starts=15, timezone="Europe/Berlin")
    Calendar('month', starts=15, timezone='Europe/Berlin')

    `starts` is the first day: 1 (Monday) to 7 of a week, 1 to 31 of a month, "01-01" to "12-31" of a year. A day that a
    month does not have is its last one. `timezone` is a name of the IANA time zone database.
    """

    unit: str
    starts: int | str | None = field(default=None, kw_only=True)
    timezone: str = field(default="UTC", kw_only=True)

    length_us: int = field(init=False, repr=False, compare=False)
    """The length of the longest such period without changes of the clocks: a month has 31 days."""
    longest_us: int = field(init=False, repr=False, compare=False)
    """An upper bound of the length of all such periods."""
    zone_tolerance_us: int = field(init=False, repr=False, compare=False)
    """The time after an edge in which the same one of another time zone may be; 0 for days, which are too short."""
    series: str = field(init=False, repr=False, compare=False)
    """The unit and start day, without the time zone."""
    _zone: datetime.tzinfo = field(init=False, repr=False, compare=False)
    _date: tuple[int, int] = field(init=False, repr=False, compare=False)
    """Month and day at which a year starts."""
    current: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The window that was found last, for callers that cannot afford to call `window`."""
    _text: tuple[int, int, EdgeText] | None = field(init=False, repr=False, compare=False)
    """The window for which the edges were encoded last, and their text."""

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in UNITS:
            near = get_close_matches(str(self.unit).lower().removesuffix("s"), UNITS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(UNITS)}"
            raise InvalidLimit(f"unknown calendar period {self.unit!r}; {hint}")
        starts = _FIRST_STARTS[self.unit] if self.starts is None else self.starts
        _check_starts(self.unit, starts)
        length_us = UNITS[self.unit]
        values = {
            "starts": starts,
            "length_us": length_us,
            "longest_us": length_us + MAX_ADJUSTMENT_US,
            "zone_tolerance_us": 0 if self.unit == "day" else ZONE_TOLERANCE_US,
            "series": self.unit if starts is None else f"{self.unit}.{starts}",
            "_zone": _find_zone(self.timezone),
            "_date": (int(starts[:2]), int(starts[3:])) if isinstance(starts, str) else (1, 1),
            "current": (0, 0),
            "_text": None,
        }
        set_field = partial(object.__setattr__, self)  # the dataclass is frozen
        for name, value in values.items():
            set_field(name, value)

    def window(self, now_us: int) -> tuple[int, int]:
        """The first instant of the period that contains `now_us`, and that of the next one.

        >>> from datetime import UTC, datetime
        >>> start_us, end_us = Calendar("month").window(1_763_251_200_000_000)
        >>> datetime.fromtimestamp(start_us / 1e6, UTC).date(), datetime.fromtimestamp(end_us / 1e6, UTC).date()
        (datetime.date(2025, 11, 1), datetime.date(2025, 12, 1))
        """
        current = self.current
        if current[0] <= now_us < current[1]:
            return current
        index = self._index(now_us)
        current = self._edge_us(index), self._edge_us(index + 1)
        object.__setattr__(self, "current", current)
        return current

    def edges(self, now_us: int) -> EdgeText:
        """The edges for a script whose clock differs by up to CLOCK_TOLERANCE_US, which may need those of two more
        periods."""
        text = self._text
        if text is not None and text[0] <= now_us < text[1]:
            return text[2]
        start_us, end_us = self.window(now_us)
        index = self._index(start_us - CLOCK_TOLERANCE_US)
        edges = [self._edge_us(index)]
        while edges[-1] <= end_us + CLOCK_TOLERANCE_US + 2 * self.longest_us:
            index += 1
            edges.append(self._edge_us(index))
        made = EdgeText(" ".join([str(self.longest_us), self.series, *map(str, dict.fromkeys(edges))]))
        made.calendar = self
        object.__setattr__(self, "_text", (start_us, end_us, made))
        return made

    @property
    def code(self) -> str:
        """The series and time zone, for tables: at most 50 characters."""
        return f"{self.series} {self.timezone}"

    @classmethod
    def read_code(cls, code: str) -> Calendar:
        """The calendar with that `code`.

        >>> Calendar.read_code("month.15 Europe/Berlin")
        Calendar('month', starts=15, timezone='Europe/Berlin')
        """
        series, _, timezone = code.partition(" ")
        unit, _, starts = series.partition(".")
        return cls(unit, starts=int(starts) if starts.isdecimal() else starts or None, timezone=timezone)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Calendar, self.unit, starts=self.starts, timezone=self.timezone), ()

    def __str__(self) -> str:
        """The period in the syntax of `Limit.parse`."""
        starts = f", starts {self.starts}" if self.starts != _FIRST_STARTS[self.unit] else ""
        # A day without a time zone is a period of 24 hours.
        timezone = f", timezone {self.timezone}" if self.timezone != "UTC" or self.unit == "day" else ""
        return f"{self.unit}{starts}{timezone}"

    def __repr__(self) -> str:
        starts = f", starts={self.starts!r}" if self.starts != _FIRST_STARTS[self.unit] else ""
        timezone = f", timezone={self.timezone!r}" if self.timezone != "UTC" else ""
        return f"Calendar({self.unit!r}{starts}{timezone})"

    def _index(self, at_us: int) -> int:
        """The number of the period that contains an instant."""
        date = (EPOCH + at_us * _MICROSECOND).astimezone(self._zone).date()
        if self.unit == "day":
            index = date.toordinal()
        elif self.unit == "week":
            index = (date.toordinal() - self.starts) // 7  # type: ignore[operator]
        elif self.unit == "month":
            index = date.year * 12 + date.month - 1
        else:
            index = date.year
        # A month or year may start later; and while an hour repeats, the date may be the last one again.
        while self._edge_us(index) > at_us:
            index -= 1
        while self._edge_us(index + 1) <= at_us:
            index += 1
        return index

    def _edge_us(self, index: int) -> int:
        """The first instant of the period with that number."""
        if self.unit == "day":
            return _first_instant_us(self._zone, index)
        if self.unit == "week":
            return _first_instant_us(self._zone, index * 7 + self.starts)  # type: ignore[operator]
        if self.unit == "month":
            year, month, day = index // 12, index % 12 + 1, self.starts
        else:
            year, (month, day) = index, self._date
        day = min(day, monthrange(year, month)[1])  # type: ignore[type-var]
        return _first_instant_us(self._zone, datetime.date(year, month, day).toordinal())  # type: ignore[arg-type]


@lru_cache(maxsize=65_536)
def _first_instant_us(zone: datetime.tzinfo, ordinal: int) -> int:
    """The first instant of a local day."""
    midnight = datetime.datetime.fromordinal(ordinal)
    earlier_us, later_us = [
        (midnight - offset - EPOCH.replace(tzinfo=None)) // _MICROSECOND
        for fold in (0, 1)
        if (offset := midnight.replace(tzinfo=zone, fold=fold).utcoffset()) is not None
    ]
    if earlier_us <= later_us:  # the only midnight, or the first of two
        return earlier_us
    # Midnight is skipped, somewhere between the two: the first second after the change has a local time after midnight.
    low, high = later_us // 1_000_000, -(-earlier_us // 1_000_000)
    while high - low > 1:
        middle = (low + high) // 2
        local = (EPOCH + datetime.timedelta(seconds=middle)).astimezone(zone).replace(tzinfo=None)
        low, high = (low, middle) if local >= midnight else (middle, high)
    return high * 1_000_000


def _check_starts(unit: str, starts: object) -> None:
    if unit == "day":
        if starts is not None:
            raise InvalidLimit(f"starts {starts!r} means nothing to a day, which starts at midnight; leave it out")
    elif unit == "year":
        found = _DATE.fullmatch(starts) if isinstance(starts, str) else None
        if found is None or int(found[2]) > monthrange(_LEAP_YEAR, int(found[1]))[1]:
            raise InvalidLimit(f'starts {starts!r} is not a day of a year; write month and day, like "04-01"')
    else:
        last, example = (7, "1 (Monday) to 7 (Sunday)") if unit == "week" else (31, "1 to 31")
        if type(starts) is not int or not 1 <= starts <= last:
            raise InvalidLimit(f"starts {starts!r} is not a day of a {unit}; use {example}")


def _find_zone(name: object) -> datetime.tzinfo:
    if name == "UTC":  # known also where no time zone database is installed
        return datetime.UTC
    try:
        if isinstance(name, str) and name not in ("", "localtime", "posixrules"):
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    known = {each.lower(): each for each in available_timezones()}
    if not known:
        raise InvalidLimit(f"unknown time zone {name!r}: no time zone database is installed; pip install tzdata")
    text = str(name).lower().replace(" ", "_")
    near = get_close_matches(text, known, n=1) or [each for each in known if text and each.endswith(f"/{text}")]
    hint = f"did you mean {known[near[0]]!r}?" if near else 'use a name like "Europe/Berlin" or "UTC"'
    raise InvalidLimit(f"unknown time zone {name!r}; {hint}")
