"""Parses and formats times for people: "yesterday 15:00", "3pm", "10 minutes ago", "2026-11-15T15:00Z".

`span` parses past times: a time without a day is its last occurrence. `coming` parses future times, such as
"friday 18:00", "in 2 hours" or "tomorrow": the next occurrence.

When clocks are set back, an hour occurs twice, and a span includes both. All arithmetic is in UTC.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.clock import EPOCH
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Span", "clock_in_words", "coming", "end_in_words", "microseconds", "period_in_words", "shown", "span"]

AROUND: Final = timedelta(minutes=10)
"""Tolerance around a time that was given from memory."""
DAY: Final = timedelta(days=1)
WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
UNITS: Final = {
    "second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "m": 60, "hour": 3600, "h": 3600, "day": 86400, "d": 86400,
    "week": 7 * 86400, "w": 7 * 86400,
}  # fmt: skip
HOW: Final = 'write it like "yesterday 15:00", "2026-11-15 15:00", "3pm", "10 minutes ago" or 2026-11-15T15:00:00Z'
HOW_TO_COME: Final = (
    'write it like "friday 18:00", "tomorrow", "in 2 hours", "18:00", "2026-11-20 18:00" or 2026-11-20T18:00:00Z'
)

_AGO: Final = re.compile(r"(?P<count>\d{1,6}|an?)\s*(?P<unit>[a-z]+?)s?\s+ago")
_IN: Final = re.compile(r"(?:in\s+)?(?P<count>\d{1,6}|an?)\s*(?P<unit>[a-z]+?)s?")
_CLOCK: Final = re.compile(r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d))?)?\s*(?P<half>[ap]m)?")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d").fullmatch


class Span(NamedTuple):
    """A period of time."""

    since: datetime
    until: datetime
    """Exclusive."""
    moment: datetime | None
    """The moment it was derived from, unless that was a whole day or a range."""

    @property
    def since_us(self) -> int:
        return microseconds(self.since)

    @property
    def until_us(self) -> int:
        return microseconds(self.until)


def span(at: str, until: str | None = None, *, now: datetime, zone: tzinfo | None = None) -> Span:
    """The period around a moment, of a whole day, or between two times. `zone` applies to times without one; None is
    the local zone."""
    now = now.astimezone(UTC)
    try:
        start, over, is_day = _read(at, now, zone)
        if until is not None:
            last, end, _ = _read(until, now, zone, day=start.astimezone(zone).date())
            if end <= start:
                message = f"until {until!r}, which is {shown(last, zone)}, is before {at!r}, {shown(start, zone)}"
                raise InvalidInput(message)
            found = Span(start, end, None)
        else:
            found = Span(start, over, None) if is_day else Span(start - AROUND, over + AROUND, start)
        shown_span(found.since, found.until, zone=zone)  # the answer will
        return found
    except OverflowError:
        raise InvalidInput(f"{at!r}: there is no time before the year 1, nor after 9999; {HOW}") from None


def coming(written: str, *, now: datetime, zone: tzinfo | None = None, at_its_end: bool = False) -> datetime:
    """The next occurrence of a time. A day stands for its start; with `at_its_end`, as in "until friday", for its
    end."""
    now = now.astimezone(UTC)
    words = _words(written)
    exact = _iso(words)
    try:
        if (ahead := _IN.fullmatch(words)) and ahead["unit"] in UNITS:
            return now.replace(microsecond=0) + _duration(ahead)  # to the second is precise enough
        today = now.astimezone(zone).date()
        for first_day in (today, today + DAY):
            moments = _moments(*(exact or _on(words, written, today, first_day)), zone, at_its_end=at_its_end)
            if (found := next((moment for moment in moments if moment > now), None)) is not None:
                return found
    except OverflowError:
        raise InvalidInput(f"{written!r} is too far ahead for a calendar; {HOW_TO_COME}") from None
    which = "" if exact is None else f", which is {shown(moments[-1], zone)},"
    raise InvalidInput(f"{written!r}{which} is over; {HOW_TO_COME}")


def shown(moment: datetime, zone: tzinfo | None, *, with_zone: bool = True) -> str:
    """A moment for people, to the second: 2026-11-15 15:00:00 CET (UTC+01:00)."""
    local = moment.astimezone(zone)
    return f"{local:%Y-%m-%d %H:%M:%S}" + (f" {_zone(local)}" if with_zone else "")


def end_in_words(moment: datetime, zone: tzinfo | None) -> str:
    """The end of a period, after "until": "Friday 20 November 2026, 18:00 Europe/Berlin". Midnight is the end of a day:
    "the end of Friday 20 November 2026 (Europe/Berlin)", which cannot be mistaken for the next day."""
    local = moment.astimezone(zone)
    if (local.hour, local.minute, local.second) != (0, 0, 0):
        return f"{_long_day(local)}, {local:%H:%M} {zone or _zone(local)}"
    last_day = (moment - timedelta(microseconds=1)).astimezone(zone)
    return f"the end of {_long_day(last_day)} ({zone or _zone(last_day)})"


def shown_span(since: datetime, until: datetime, *, zone: tzinfo | None) -> str:
    """A period, naming its day and zone only once if possible."""
    start, end = since.astimezone(zone), until.astimezone(zone)
    if start.utcoffset() != end.utcoffset():
        return f"{shown(since, zone)} and {shown(until, zone)}"
    day = "" if start.date() == end.date() else f"{end:%Y-%m-%d} "
    return f"{start:%Y-%m-%d %H:%M:%S} and {day}{end:%H:%M:%S} {_zone(start)}"


def period_in_words(since: datetime, until: datetime, zone: tzinfo | None) -> str:
    """A period in a sentence: "on Sunday 15 November 2026 between 14:50 and 15:11 CET (UTC+01:00)"."""
    start, end = since.astimezone(zone), until.astimezone(zone)
    last = (until - timedelta(microseconds=1)).astimezone(zone)
    if start.date() != last.date():
        zone_of_start = "" if start.utcoffset() == end.utcoffset() else f" {_zone(start)}"
        return (
            f"between {_long_day(start)}, {_short_clock(start)}{zone_of_start} and "
            f"{_long_day(end)}, {_short_clock(end)} {_zone(end)}"
        )
    if start.time() == end.time() == time():
        return f"on {_long_day(start)}, {_zone(start)}"
    end_of_day = "24:00" if end.time() == time() else _short_clock(end)
    return f"on {_long_day(start)} between {_short_clock(start)} and {end_of_day} {_zone(end)}"


def clock_in_words(moment: datetime, zone: tzinfo | None, *, within: Span) -> str:
    """A time within a period whose day and zone were named: "15:00:42". The day and the zone are added if needed."""
    local, start = moment.astimezone(zone), within.since.astimezone(zone)
    last = (within.until - timedelta(microseconds=1)).astimezone(zone)
    zone_name = "" if start.utcoffset() == last.utcoffset() else f" {_zone(local)}"
    day = "" if start.date() == last.date() else f" on {local.day} {local:%B}"
    return f"{local:%H:%M:%S}{zone_name}{day}"


def _short_clock(local: datetime) -> str:
    return f"{local:%H:%M:%S}" if local.second else f"{local:%H:%M}"


def _long_day(local: datetime) -> str:
    return f"{local:%A} {local.day} {local:%B %Y}"


def microseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def _read(
    written: str, now: datetime, zone: tzinfo | None, *, day: date | None = None
) -> tuple[datetime, datetime, bool]:
    """The start, the end, and True for a whole day. `day` is the default day."""
    words = _words(written)
    ago = _AGO.fullmatch(words)
    if ago is not None and ago["unit"] not in UNITS:
        raise InvalidInput(f"{written!r}: {ago['unit']!r} is not a unit of time here; {HOW}")
    if ago is not None or words == "now":
        moment = now if ago is None else now - _duration(ago)
        return moment, moment + timedelta(seconds=1), False
    if (exact := _iso(words)) is not None:
        found, width = exact
    else:
        today = now.astimezone(zone).date()
        # The last weekday that has been; today is said otherwise.
        weekdays = _weekdays(lambda index: today - timedelta(days=(today.weekday() - index - 1) % 7 + 1))
        said, rest = _split_day(words, {"today": today, "yesterday": today - DAY, **weekdays})
        clock, width = _clock(rest, written)
        found = datetime.combine(said or day or today, clock)
        if said is None and day is None and _utc(found, zone) > now:
            found -= DAY
    first, last = _moments(found, width, zone, at_its_end=False)
    return first, (_next_day(found, zone) if width >= DAY else last + width), width >= DAY


def _on(words: str, written: str, today: date, first_day: date) -> tuple[datetime, timedelta]:
    """The local time that the words name on or after a day, and its precision."""
    weekdays = _weekdays(lambda index: first_day + timedelta(days=(index - first_day.weekday()) % 7))
    said, rest = _split_day(words, {"today": today, "tomorrow": today + DAY, **weekdays})
    try:
        clock, width = _clock(rest, written)
    except InvalidInput:
        raise InvalidInput(f"{written!r} is not a time; {HOW_TO_COME}") from None
    return datetime.combine(said or first_day, clock), width


def _words(written: str) -> str:
    return " ".join(word for word in written.lower().replace(",", " ").split() if word not in ("at", "on", "the"))


def _duration(found: re.Match[str]) -> timedelta:
    return timedelta(seconds=UNITS[found["unit"]] * (int(found["count"]) if found["count"].isdigit() else 1))


def _weekdays(day_of: Callable[[int], date]) -> dict[str, date]:
    return {name: day_of(index) for index, full in enumerate(WEEKDAYS) for name in (full, full[:3])}


def _split_day(words: str, known: dict[str, date]) -> tuple[date | None, str]:
    """The day named by the first or last word, and the other words."""
    parts = words.split()
    for said, rest in ((parts[0], parts[1:]), (parts[-1], parts[:-1])) if parts else ():
        day = known.get(said)
        if _DATE(said):
            with suppress(ValueError):
                day = date.fromisoformat(said)
        if day is not None:
            return day, " ".join(rest)
    return None, words


def _moments(found: datetime, width: timedelta, zone: tzinfo | None, *, at_its_end: bool) -> tuple[datetime, datetime]:
    """The first and last moment that a local time may be; they differ only in an hour that occurs twice. A day stands
    for its start, or for its end."""
    if width >= DAY:
        moment = _next_day(found, zone) if at_its_end else _utc(found, zone)
        return moment, moment
    first = _utc(found, zone)
    return first, max(first, _utc(found.replace(fold=1), zone))  # in an hour that is missing, the other way round


def _next_day(day: datetime, zone: tzinfo | None) -> datetime:
    """The start of the next day, also across a clock change."""
    return _utc(datetime.combine(day.date() + DAY, time()), zone)


def _iso(words: str) -> tuple[datetime, timedelta] | None:
    """An ISO 8601 time and its precision."""
    if "w" in words:
        return None  # an ISO week, which would be parsed as its Monday
    try:
        found = datetime.fromisoformat(words.upper())
    except ValueError:
        return None
    if len(words) <= len("2026-11-15"):
        return found, DAY
    width = timedelta(minutes=1) if words.count(":") - (words[-6:-5] in "+-") == 1 else timedelta(seconds=1)
    return found, width


def _clock(words: str, written: str) -> tuple[time, timedelta]:
    """The time of day and its precision; a whole day if there is none."""
    if not words and written.strip():
        return time(), DAY
    words = {"noon": "12:00", "midnight": "0:00"}.get(words, words)
    clock = _CLOCK.fullmatch(words)
    if clock is None or (clock["minute"] is None and clock["half"] is None):
        raise InvalidInput(f"{written!r} is not a time; {HOW}")
    hour, minute, second = int(clock["hour"]), int(clock["minute"] or 0), int(clock["second"] or 0)
    if clock["half"] is not None:
        if not 1 <= hour <= 12:
            raise InvalidInput(f"{written!r} is not a time: {hour}{clock['half']}; {HOW}")
        hour = hour % 12 + (12 if clock["half"] == "pm" else 0)
    if hour > 23 or minute > 59 or second > 59:
        raise InvalidInput(f"{written!r} is not a time of day; {HOW}")
    return time(hour, minute, second), timedelta(seconds=1) if clock["second"] else timedelta(minutes=1)


def _utc(found: datetime, zone: tzinfo | None) -> datetime:
    """The moment in UTC; `zone` applies if it has none."""
    if found.tzinfo is not None or zone is not None:
        return (found if found.tzinfo is not None else found.replace(tzinfo=zone)).astimezone(UTC)
    try:
        return datetime.fromtimestamp(found.timestamp(), UTC)
    except ValueError as error:  # the year is out of range
        raise OverflowError from error


def _zone(local: datetime) -> str:
    name, offset = local.tzname() or "", f"{local:%z}"
    utc = f"UTC{offset[:3]}:{offset[3:5]}"
    return "UTC" if name == "UTC" else utc if name in ("", utc) or name[0] in "+-" else f"{name} ({utc})"
