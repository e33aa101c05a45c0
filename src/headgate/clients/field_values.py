"""Numbers and times in header fields: counts, durations, dates, seconds since 1970. Impossible values are None."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = [
    "LARGEST", "MAX_RESET_S", "parse_count", "parse_duration", "parse_http_date", "parse_number", "parse_reset",
]  # fmt: skip

LARGEST: Final = 999_999_999_999_999
"""The largest integer in a structured field (RFC 9651); larger numbers are lowered to it."""
MAX_RESET_S: Final = 31 * 86_400.0
"""The longest time until a reset that is believed: quotas per month are the longest in use."""
MAX_LENGTH: Final = 64
"""Characters of a number, a date or a duration."""
EPOCH_S: Final = 1_000_000_000
"""Numbers from here on are instants since 1970 (in 2001 or later), smaller ones are seconds from now."""

_PART: Final = r"(\d+(?:\.\d+)?)"
_DURATION: Final = re.compile(
    rf"p?(?:{_PART}d)?t?(?:{_PART}h)?(?:{_PART}m(?!s))?(?:{_PART}s)?(?:{_PART}ms)?(?:{_PART}us)?", re.ASCII
)
"""A duration as Go prints it, 6m0s, 1h2m3.5s or 12ms, or in ISO 8601: PT1M30S."""
_SECONDS_PER_UNIT: Final = (86_400, 3600, 60, 1, 0.001, 0.000_001)
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_number(text: str) -> float | None:
    """A number >= 0; None for anything else, such as `-1`, `NaN` and `1e99`."""
    text = text.strip()
    return float(text) if len(text) <= MAX_LENGTH and _NUMBER.fullmatch(text) else None


def parse_count(text: str) -> int | None:
    """A whole number, also in front of parameters, as in `100;w=60` and `20:1`; None for a part of one."""
    number = parse_number(re.split("[;:]", text, maxsplit=1)[0])
    return None if number is None or 0 < number < 1 else min(int(number), LARGEST)


def parse_reset(text: str, now_s: float) -> float | None:
    """Seconds until a reset, given as seconds, a duration, or an instant: since the epoch, ISO 8601, an HTTP date."""
    if (number := parse_number(text.partition(";")[0])) is not None:
        if number < EPOCH_S:
            return min(number, MAX_RESET_S)
        while number >= EPOCH_S * 1000:  # milli-, micro- or nanoseconds
            number /= 1000
        return min(max(0.0, number - now_s), MAX_RESET_S)
    if (seconds := parse_duration(text)) is not None:
        return min(seconds, MAX_RESET_S)
    return _until(_instant(text), now_s)


def parse_duration(text: str) -> float | None:
    """Seconds, given as a number or as a duration: 6m0s, 1s 500ms, PT1M30S."""
    if (number := parse_number(text)) is not None or not text or len(text) > MAX_LENGTH:
        return number
    match = _DURATION.fullmatch("".join(text.lower().split()))
    if match is None or not any(match.groups()):
        return None
    parts = zip(match.groups(), _SECONDS_PER_UNIT, strict=True)
    return round(sum(float(value) * seconds for value, seconds in parts if value), 6)


def _instant(text: str) -> datetime | None:
    text = text.strip()
    if len(text) > MAX_LENGTH or not text.isascii():
        return None
    try:
        return datetime.fromisoformat(re.sub(r" (?=UTC$|[+-]\d\d:?\d\d$)|UTC$", "", text))
    except ValueError:
        return parse_http_date(text)


def _until(instant: datetime | None, now_s: float) -> float | None:
    if instant is None:
        return None
    try:
        at_s = (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):  # before the year 1 in UTC, or after 9999
        return None
    return min(max(0.0, at_s - now_s), MAX_RESET_S)


def parse_http_date(text: str) -> datetime | None:
    """A date as in Date and Retry-After; None if it is not one."""
    if not 6 <= len(text) <= MAX_LENGTH:
        return None
    try:
        return parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
