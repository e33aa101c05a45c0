"""The amounts of a policy: how much, how long, how fast. Read strictly, like its words."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from headgate import _grammar
from headgate.errors import InvalidInput, InvalidLimit
from headgate.policy.formats.document import Unreadable
from headgate.policy.kinds import refusal, show

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["duration", "duration_between", "duration_or_off", "factor_or_off", "foreign_limit", "rate", "share"]

_FOREIGN: Final = re.compile(
    r"\s*(?P<quota>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<times>[km]?)\s*(?:(?:r|reqs?|requests?|calls?|hits?|tokens?)\s*)?"
    r"(?:/|per)\s*(?P<count>[1-9][0-9]{0,8})?\s*(?P<unit>[a-z]+)(?:\W+burst\W+(?P<burst>[0-9]{1,9}))?\s*",
    re.IGNORECASE,
)
_AT_ONCE: Final = re.compile(r"\s*([1-9][0-9]{0,8})\s+(?:concurrent|parallel|at once|in parallel|in flight)\b.*")

_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%")


def duration(value: object) -> timedelta:
    return _duration(value, 'a duration, like "500 ms", "5 seconds" or "2 minutes"')


def duration_between(least: timedelta, most: timedelta, *, example: str) -> Callable[[object], timedelta]:
    """A reader of durations in a range."""
    wanted = f'a duration from {_spelled(least)} to {_spelled(most)}, like "{example}"'
    return lambda value: _duration(value, wanted, least, most)


def duration_or_off(least: timedelta, most: timedelta, *, example: str) -> Callable[[object], timedelta]:
    """The same, or 0 for what is turned off; also as a word, whatever readers of YAML take that for."""
    wanted = f'a duration from {_spelled(least)} to {_spelled(most)}, like "{example}", or 0 for none'

    def read(value: object) -> timedelta:
        word = value.word if isinstance(value, Unreadable) else value
        if word is False or word in ("off", "Off", "OFF") or (type(word) is int and word == 0):
            return timedelta()
        return _duration(value if word is None else word, wanted, least, most)

    return read


def factor_or_off(most: int, *, example: int) -> Callable[[object], int | None]:
    """A reader of whole numbers from 1, or "off" for None; also where a YAML reader takes that word for a boolean."""
    wanted = f"a whole number from 1 to {most:,}, like {example}, or off"

    def read(value: object) -> int | None:
        word = value.word if isinstance(value, Unreadable) else value
        if word is False or word in ("off", "Off", "OFF"):
            return None
        if type(value) is not int:
            raise refusal(value, wanted)
        if not 1 <= value <= most:
            raise InvalidInput(f"{value} is out of bounds; write {wanted}")
        return value

    return read


def rate(value: object) -> Fraction:
    """Tokens per second, exactly as written."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise refusal(value, "a number of tokens per second, like 16.67")
    found = Fraction(value)
    if found <= 0:
        raise InvalidInput(f"{value} refills nothing; write a number above 0, like 16.67")
    if found.denominator > 10**9:
        raise InvalidInput(f"{value} has too many digits; at most nine may follow the point")
    return found


def foreign_limit(text: str) -> str | None:
    """What to write for a limit as others write it; None for one that they don't, either.

    >>> foreign_limit("10k requests/minute"), foreign_limit("1.5 r/s"), foreign_limit("1.5/month")
    ('write "10000/minute"', 'write "3/2 s"', None)
    """
    if re.fullmatch(r"\s*(unlimited|infinite|infinity|none|off)\s*", text, re.IGNORECASE):
        return 'write more than anybody sends, like "1000000/second", or leave the limit out'
    if found := _AT_ONCE.fullmatch(text):
        return f'write "{found[1]}/60 s, concurrency"; a lease ends after the 60 s, unless it is renewed'
    if (found := _FOREIGN.fullmatch(text)) and Fraction(found["quota"]):
        times = {"": 1, "k": 1_000, "m": 1_000_000}[found["times"].lower()]
        quota = Fraction(found["quota"]) * times
        count = int(found["count"] or 1) * quota.denominator
        burst = f", burst {found['burst']}" if found["burst"] else ""
        period = found["unit"] if count == 1 else f"{count} {found['unit']}"
        meant = f"{quota.numerator}/{period}{burst}"
        with suppress(InvalidLimit):
            _grammar.parse(meant)
            return f'write "{meant}"'
    return None


def share(value: object) -> Fraction:
    """A part of the whole, exactly as written."""
    wanted = "a share from 1% to 100%, like 20%"
    if type(value) is not str:
        raise refusal(value, wanted)
    match = _PERCENT.fullmatch(value.strip())
    if match is None:
        raise InvalidInput(f"cannot read {show(value)}; write {wanted}")
    found = Fraction(match[1]) / 100
    if not Fraction(1, 100) <= found <= 1:
        raise InvalidInput(f"{value.strip()} is out of bounds; write {wanted}")
    return found


def _duration(
    value: object, wanted: str, least: timedelta = timedelta.min, most: timedelta = timedelta.max
) -> timedelta:
    if type(value) is not str or not value:
        raise refusal(value, wanted)
    found: timedelta | None = None
    if re.fullmatch(r"\s*[0-9]*\s*[A-Za-z]+\s*", value):
        with suppress(InvalidLimit):
            found = _grammar.parse(f"1/{value}").period
    if found is None:
        raise InvalidInput(f"cannot read {show(value)}; write {wanted}")
    if not least <= found <= most:
        raise InvalidInput(f"{value.strip()} is out of bounds; write {wanted}")
    return found


def _spelled(length: timedelta) -> str:
    spelled = _grammar.spell(length)
    return (spelled if spelled[0].isdigit() else f"1 {spelled}").replace("millisecond", "ms").replace("mss", "ms")
