"""Timestamps of log files in whole microseconds, and back as text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from headgate.clock import EPOCH, MINUTE_US, SECOND_US

__all__ = ["MINUTE_US", "SECONDS_US", "SECOND_US", "CommonTimes", "iso", "parse_duration", "parse_time"]

MONTHS: Final = {
    name: number + 1
    for number, name in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"))
}
MAX_CACHED: Final = 4096
SCALES: Final[tuple[tuple[int, int], ...]] = ((10**17, 1000), (10**14, 1))
"""Epoch times from so many on are nanoseconds and microseconds; smaller ones milliseconds and seconds."""
MIN_MILLISECONDS: Final = 10**11


class _Digits(dict[str, int]):
    def __missing__(self, text: str) -> int:
        raise ValueError(text)


SECONDS_US: Final = _Digits({f"{second:02}": second * SECOND_US for second in range(61)})
"""The seconds of a minute, and a leap second, by their text."""
MINUTES_US: Final = _Digits({f"{minute:02}": minute * MINUTE_US for minute in range(60)})
HOURS_US: Final = _Digits({f"{hour:02}": hour * 60 * MINUTE_US for hour in range(24)})


class CommonTimes:
    """Parses times of the common log format, with a cache of minutes.

    >>> CommonTimes().parse("20/Feb/2016:00:00:45 -0500")
    1455944445000000
    """

    __slots__ = ("_days", "minutes_us")

    def __init__(self) -> None:
        self._days: dict[tuple[str, str], int] = {}
        self.minutes_us: dict[tuple[str, str], int] = {}
        """The beginnings of minutes, by their text and zone."""

    def parse(self, text: str) -> int:
        """The time in microseconds; ValueError for any other text."""
        return self.at(text[:17], text[18:20], text[21:])

    def at(self, minute: str, second: str, zone: str) -> int:
        """The same for the parts of a text: its minute, second and zone."""
        start_us = self.minutes_us.get((minute, zone))
        if start_us is None:
            start_us = self._day(minute[:11], zone) + HOURS_US[minute[12:14]] + MINUTES_US[minute[15:]]
            if len(self.minutes_us) >= MAX_CACHED:
                self.minutes_us.clear()
            self.minutes_us[minute, zone] = start_us
        return start_us + SECONDS_US[second]

    def _day(self, text: str, zone: str) -> int:
        start_us = self._days.get((text, zone))
        if start_us is None:
            try:
                day, month, year = text.split("/")
                offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[3:5]))
                tz = timezone(-offset if zone[0] == "-" else offset)
                start_us = (datetime(int(year), MONTHS[month], int(day), tzinfo=tz) - EPOCH) // timedelta(
                    microseconds=1
                )
            except (KeyError, IndexError) as error:
                raise ValueError(text) from error
            if len(self._days) >= MAX_CACHED:
                self._days.clear()
            self._days[text, zone] = start_us
        return start_us


def parse_time(text: str | int | float, common: CommonTimes) -> int:
    """The time of a text in microseconds: ISO 8601, the common log format, or a number since the epoch in seconds,
    milliseconds, microseconds or nanoseconds. Without a zone, it is UTC. ValueError for any other text.

    >>> common = CommonTimes()
    >>> parse_time("2016-02-20T05:00:45.25Z", common), parse_time("1455944445.250", common)
    (1455944445250000, 1455944445250000)
    >>> parse_time(1455944445250, common)
    1455944445250000
    """
    if not isinstance(text, str):
        text = repr(text)
    text = text.strip()
    whole, _, fraction = text.partition(".")
    if whole.isdecimal() and (not fraction or fraction.isdecimal()):
        return _parse_epoch(int(whole), fraction)
    if text[2:3] == "/":
        return common.parse(text)
    moment = datetime.fromisoformat(text)
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH) // timedelta(microseconds=1)


def _parse_epoch(whole: int, fraction: str) -> int:
    for least, divisor in SCALES:
        if whole >= least:
            return whole // divisor
    if whole >= MIN_MILLISECONDS:
        return whole * 1000 + int(f"{fraction:0<3}"[:3])
    return whole * SECOND_US + int(f"{fraction:0<6}"[:6])


def parse_duration(text: str | int | float, unit_us: int) -> int | None:
    """A duration in microseconds; a number counts in `unit_us`. None if it is not a duration, as in "-"."""
    try:
        if isinstance(text, str):
            for suffix, scale in (("ms", 1000), ("us", 1), ("µs", 1), ("s", SECOND_US)):
                if text.endswith(suffix):
                    text, unit_us = text.removesuffix(suffix), scale
                    break
        duration_us = int(float(text) * unit_us)
    except (ValueError, OverflowError):
        return None
    return duration_us if duration_us >= 0 else None


def iso(at_us: int) -> str:
    """A time as ISO 8601 in UTC.

    >>> iso(1455944445000000)
    '2016-02-20T05:00:45Z'
    """
    return (EPOCH + timedelta(microseconds=at_us)).isoformat().replace("+00:00", "Z")
