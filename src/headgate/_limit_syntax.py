"""The syntax of limits: "1000/minute, burst 200"."""

from __future__ import annotations

import re
from datetime import timedelta
from difflib import get_close_matches
from typing import Final, NamedTuple

from headgate.errors import InvalidLimit

__all__ = ["Phrase", "parse", "separated", "spell", "split", "suggest"]

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

_RATE: Final = re.compile(
    r"\s*(?P<quota>[\d_]+)\s*(?:/|\bper\b)\s*(?P<count>\d+(?:\.\d+)?)?\s*(?P<unit>[a-z]+)\s*(?P<options>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OPTION: Final = re.compile(r"\s*,?\s*(?:burst\s+(?P<burst>[\d_]+)|(?P<algorithm>[a-z][a-z_]*))\s*", re.IGNORECASE)

_GROUPED: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?=\s*(?:/|per\b))")
"""A number with thousands separators before the slash: 1,000/minute."""

_SEPARATOR: Final = re.compile(r"(?:(?<!\d),|[;|])\s*(?=\d[\d_]*\s*(?:/|per\b))", re.IGNORECASE)
"""A separator followed by another limit. Other libraries allow commas and bars; `split` only semicolons."""

_FORM: Final = 'write it like "10/minute", "5 per 30 seconds", "1000/minute, burst 200" or "3/2h, sliding_window"'


class Phrase(NamedTuple):
    """A parsed limit."""

    quota: int
    period: timedelta
    burst: int | None
    algorithm: str | None


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
    burst, algorithm = _options(text, rate["options"])
    return Phrase(_number(text, rate["quota"]), _period(text, rate["count"], rate["unit"]), burst, algorithm)


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


def spell(period: timedelta) -> str:
    """Format a period in the largest unit of which it is a multiple.

    >>> spell(timedelta(minutes=1)), spell(timedelta(seconds=90)), spell(timedelta(days=30))
    ('minute', '90 seconds', '30 days')
    """
    unit = next(unit for unit in ("day", "hour", "minute", "second", "millisecond", "us") if not period % _UNITS[unit])
    count = period // _UNITS[unit]
    if count == 1:
        return unit
    return f"{count} {unit}" if unit == "us" else f"{count} {unit}s"


def suggest(word: str, known: list[str]) -> str:
    """The remedy in a message about an unknown word: the nearest known one, or all of them."""
    near = get_close_matches(word.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _period(text: str, count: str | None, unit: str) -> timedelta:
    if unit.lower() in ("mo", "month", "months", "y", "year", "years"):
        raise InvalidLimit(f'{text!r}: a {unit.lower()} has no fixed length; say how many days, like "1000/30 days"')
    if unit.lower() not in _UNITS:
        words = [word for word in _UNITS if f"{word}s" in _UNITS and word not in ("sec", "min", "hr", "m")]
        raise InvalidLimit(f"{text!r}: unknown unit {unit!r}; {suggest(unit, words)}")
    if count is None:
        return _UNITS[unit.lower()]
    if "." in count:
        raise InvalidLimit(f"{text!r}: a period is a whole number of units; write {count} {unit} in a smaller unit")
    try:
        return _number(text, count) * _UNITS[unit.lower()]
    except OverflowError:
        raise InvalidLimit(f"{text!r}: the period {count} {unit} is too long; at most ten years") from None


def _options(text: str, options: str) -> tuple[int | None, str | None]:
    burst: int | None = None
    algorithm: str | None = None
    position = 0
    while position < len(options):
        option = _OPTION.match(options, position)
        if option is None or (option["algorithm"] or "").lower() == "burst":
            raise InvalidLimit(f"{text!r}: cannot read {options[position:].strip(', ') or ','!r}; {_FORM}")
        if option["burst"] is not None:
            if burst is not None:
                raise InvalidLimit(f"{text!r}: burst is given twice; keep one")
            burst = _number(text, option["burst"])
        else:
            if algorithm is not None:
                raise InvalidLimit(f"{text!r}: two algorithms, {algorithm!r} and {option['algorithm']!r}; keep one")
            algorithm = option["algorithm"].lower()
        position = option.end()
    return burst, algorithm


def _number(text: str, digits: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}(_[0-9]{3})+|0|[1-9][0-9]*", digits):
        raise InvalidLimit(f"{text!r}: {digits!r} is not a plain number; write it like 1000 or 1_000")
    if len(digits) > 24:
        raise InvalidLimit(f"{text!r}: {digits} is beyond 2**53, where counting stops being exact")
    return int(digits.replace("_", ""))
