"""The syntax of limits: "1000/minute, burst 200"."""

from __future__ import annotations

import re
from datetime import timedelta
from difflib import get_close_matches
from functools import lru_cache
from typing import Final, NamedTuple

from headgate.calendars import Calendar
from headgate.errors import InvalidLimit

__all__ = ["WEEK", "Phrase", "parse", "separated", "spell", "split", "suggest"]

_UNITS: Final[dict[str, timedelta]] = {
    word: length
    for words, length in (
        ("us microsecond microseconds", timedelta(microseconds=1)),
        ("ms millisecond milliseconds", timedelta(milliseconds=1)),
        ("s sec secs second seconds", timedelta(seconds=1)),
        ("m min mins minute minutes", timedelta(minutes=1)),
        ("h hr hrs hour hours", timedelta(hours=1)),
        ("d day days", timedelta(days=1)),
        ("w week weeks", timedelta(weeks=1)),
    )
    for word in words.split()
}
_CALENDAR_UNITS: Final = {
    word: unit
    for words, unit in (
        ("d day days", "day"),
        ("w week weeks", "week"),
        ("mo month months", "month"),
        ("y year years", "year"),
    )
    for word in words.split()
}
WEEK: Final = Calendar("week")

_RATE: Final = re.compile(
    r"\s*(?P<quota>[\d_]+)\s*(?:/|\bper\b)\s*(?P<count>\d+(?:\.\d+)?)?\s*(?P<unit>[a-z]+)\s*(?P<options>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OPTION: Final = re.compile(
    r"\s*,?\s*(?:burst\s+(?P<burst>[\d_]+)|starts\s+(?P<starts>[\d-]+)|timezone\s+(?P<timezone>[\w+/-]+)"
    r"|(?P<algorithm>[a-z][a-z_]*))\s*",
    re.IGNORECASE,
)
_GROUPED: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?=\s*(?:/|per\b))")
"""A number with thousands separators before the slash: 1,000/minute."""

_SEPARATOR: Final = re.compile(r"(?:(?<!\d),|[;|])\s*(?=\d[\d_]*\s*(?:/|per\b))", re.IGNORECASE)
"""A separator followed by another limit. Other libraries allow commas and bars; `split` only semicolons."""

_FORM: Final = 'write it like "10/minute", "5 per 30 seconds", "1000/minute, burst 200" or "3/2h, sliding_window"'


class Phrase(NamedTuple):
    """A parsed limit."""

    quota: int
    period: timedelta | Calendar
    burst: int | None
    algorithm: str | None

    def period_for(self, algorithm: str | None) -> timedelta | Calendar:
        """The period under an algorithm: "50/week" is a calendar week, but other algorithms count seven days."""
        if self.period == WEEK and algorithm not in (None, "fixed_window"):
            return timedelta(weeks=1)
        return self.period


def parse(text: str) -> Phrase:
    """Parse the text of a limit; `Limit` validates the numbers."""
    if not isinstance(text, str):
        raise InvalidLimit(f"{text!r} is not the text of a limit: {_FORM}")
    rate = _RATE.fullmatch(text)
    if (rate is None or rate["options"]) and len(parts := separated(text)) > 1:
        raise InvalidLimit(
            f"{text!r} holds {len(parts)} limits where one is expected; Limit.parse_many reads several, "
            f'separated by semicolons: "{"; ".join(parts)}"'
        )
    if rate is None:
        if grouped := _GROUPED.search(text):
            plain = text.replace(grouped[0], grouped[0].replace(",", ""))
            raise InvalidLimit(f'cannot read the limit {text!r}: write the number without commas, "{plain}"')
        raise InvalidLimit(f"cannot read the limit {text!r}: {_FORM}")
    options = _options(text, rate["options"])
    period = _period(text, rate["count"], rate["unit"], options)
    return Phrase(_number(text, rate["quota"]), period, options.burst, options.algorithm)


def split(text: str) -> list[str]:
    """Split a text of several limits at its semicolons.

    >>> split("5/minute; 100/hour, burst 20")
    ['5/minute', '100/hour, burst 20']
    """
    if not isinstance(text, str):
        raise InvalidLimit(f"{text!r} is not the text of a limit: {_FORM}")
    parts = [part.strip() for part in text.split(";")]
    if len(parts) > 1 and not parts[-1]:  # a semicolon at the end, as in a list of statements
        parts.pop()
    if not all(parts):
        raise InvalidLimit(f'{text!r}: there is no limit between two semicolons; write it like "5/minute; 100/hour"')
    return parts


def separated(text: str) -> list[str]:
    """Split a text that seems to hold several limits at any separator."""
    return [part.strip() for part in _SEPARATOR.split(text)]


@lru_cache(256)
def spell(period: timedelta | Calendar) -> str:
    """Format a period in the syntax of limits: a length of time in the largest unit of which it is a multiple.

    >>> spell(timedelta(minutes=1)), spell(timedelta(seconds=90)), spell(timedelta(days=30))
    ('minute', '90 seconds', '30 days')
    """
    if isinstance(period, Calendar):
        return str(period)
    unit = next(unit for unit in ("day", "hour", "minute", "second", "millisecond", "us") if not period % _UNITS[unit])
    count = period // _UNITS[unit]
    if count == 1:
        return unit
    return f"{count} {unit}" if unit == "us" else f"{count} {unit}s"


def suggest(word: str, known: list[str]) -> str:
    """The remedy in a message about an unknown word: the nearest known one, or all of them."""
    near = get_close_matches(word.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _period(text: str, count: str | None, unit: str, options: _Options) -> timedelta | Calendar:
    word = unit.lower()
    calendar_unit = _CALENDAR_UNITS.get(word)
    named = [name for name, value in (("starts", options.starts), ("timezone", options.timezone)) if value is not None]
    if calendar_unit is not None and (count is None or (count == "1" and (named or word not in _UNITS))):
        is_length = options.burst is not None or options.algorithm not in (None, "fixed_window")
        if named or word not in _UNITS or (calendar_unit == "week" and not is_length):
            return _calendar(text, calendar_unit, options)
    if named:
        example = f"1000/month, {named[0]} {'15' if named[0] == 'starts' else 'Europe/Berlin'}"
        problem = f"{named[0]} applies to a calendar day, week, month or year only"
        raise InvalidLimit(f'{text!r}: {problem}; leave it out, or write it like "{example}"')
    if calendar_unit is not None and word not in _UNITS:
        days = f"{'365' if calendar_unit == 'year' else '30'} days"
        remedy = f'write one {calendar_unit}, or a number of days, like "1000/{days}"'
        raise InvalidLimit(f"{text!r}: a calendar period is a single {calendar_unit}; {remedy}")
    if word not in _UNITS:
        words = [word for word in _UNITS if f"{word}s" in _UNITS and word not in ("sec", "min", "hr", "m")]
        raise InvalidLimit(f"{text!r}: unknown unit {unit!r}; {suggest(unit, [*words, 'month', 'year'])}")
    if count is None:
        return _UNITS[word]
    if "." in count:
        raise InvalidLimit(f"{text!r}: a period is a whole number of units; write {count} {unit} in a smaller unit")
    try:
        return _number(text, count) * _UNITS[word]
    except OverflowError:
        raise InvalidLimit(f"{text!r}: the period {count} {unit} is too long; at most ten years") from None


def _calendar(text: str, unit: str, options: _Options) -> Calendar:
    starts, timezone = options.starts, options.timezone or "UTC"
    if options.burst is not None:
        raise InvalidLimit(
            f"{text!r}: burst means nothing to a calendar {unit}, which lets all pass at once; leave it out"
        )
    if unit == "week" and starts is None and timezone == "UTC":
        return WEEK
    try:
        return Calendar(unit, starts=int(starts) if starts and starts.isdecimal() else starts, timezone=timezone)
    except InvalidLimit as error:
        raise InvalidLimit(f"{text!r}: {error}") from None


class _Options(NamedTuple):
    """The options after the rate, as text; None for those that are not given."""

    burst: int | None = None
    algorithm: str | None = None
    starts: str | None = None
    timezone: str | None = None


def _options(text: str, options: str) -> _Options:
    found = _Options()
    position = 0
    while position < len(options):
        option = _OPTION.match(options, position)
        if option is None or (option["algorithm"] or "").lower() in ("burst", "starts", "timezone"):
            raise InvalidLimit(f"{text!r}: cannot read {options[position:].strip(', ') or ','!r}; {_FORM}")
        if option["burst"] is not None:
            if found.burst is not None:
                raise InvalidLimit(f"{text!r}: burst is given twice; keep one")
            found = found._replace(burst=_number(text, option["burst"]))
        elif option["algorithm"] is None:
            name = "starts" if option["starts"] is not None else "timezone"
            if getattr(found, name) is not None:
                raise InvalidLimit(f"{text!r}: {name} is given twice; keep one")
            found = found._replace(
                starts=option["starts"] or found.starts, timezone=option["timezone"] or found.timezone
            )
        else:
            if found.algorithm is not None:
                raise InvalidLimit(
                    f"{text!r}: two algorithms, {found.algorithm!r} and {option['algorithm']!r}; keep one"
                )
            found = found._replace(algorithm=option["algorithm"].lower())
        position = option.end()
    return found


def _number(text: str, digits: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}(_[0-9]{3})+|0|[1-9][0-9]*", digits):
        raise InvalidLimit(f"{text!r}: {digits!r} is not a plain number; write it like 1000 or 1_000")
    if len(digits) > 24:
        raise InvalidLimit(f"{text!r}: {digits} is beyond 2**53, where counting stops being exact")
    return int(digits.replace("_", ""))
