"""What templates say of numbers, times and clients."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from markupsafe import Markup

from headgate.telemetry.human_time import end_in_words, shown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "amount",
    "client_url",
    "count",
    "end",
    "latency",
    "moment",
    "per",
    "percent",
    "relative",
    "short",
    "short_hash",
    "told",
    "wait",
    "zone_named",
]

SECOND_US: Final = 1_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
YEAR: Final = 31_557_600
UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
NOW: Final = 2
"""Seconds that are called now."""
SHORT_HASH: Final = 14
_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?\+00:00")
_HASH: Final = re.compile(r"\b([a-z][a-z0-9_]*) (hmac:[0-9a-f]{32})\b")


def zone_named(name: str | None) -> tzinfo:
    """The time zone that somebody's browser has named; UTC, if it is none."""
    try:
        return ZoneInfo(name) if name and len(name) < 64 else UTC
    except (KeyError, ValueError, OSError):
        return UTC


def amount(number: float | None) -> str:
    """A number for people: 12,345; a dash for none."""
    return "–" if number is None else f"{number:,.0f}"


def count(number: int, one: str, several: str) -> str:
    """So many of something, in words: 1 request, 2 requests."""
    return f"{amount(number)} {one if number == 1 else several}"


def short(number: float) -> str:
    """A number on a scale: a half is written as such."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def per(by: str) -> str:
    """The kinds of identity that a limit counts by, for people.

    >>> per("tenant+api_key"), per("client"), per("global")
    ('per tenant and API key', 'per client', 'one counter for all clients')
    """
    names = {"ip": "IP", "api_key": "API key"}
    if by == "global":
        return "one counter for all clients"
    return f"per {' and '.join(names.get(kind, kind.replace('_', ' ')) for kind in by.split('+'))}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def latency(us: float | None) -> str:
    """A short time as people read it: 430 µs, 1.2 ms, 3 s."""
    if us is None:
        return "–"
    if us < 1_000:
        return f"{us:.0f} µs"
    if us < SECOND_US:
        return f"{us / 1_000:.3g} ms"
    return f"{us / SECOND_US:.3g} s"


def wait(seconds: float | None) -> str:
    """A length of time in its largest unit: 3 s, 5 min, 2 h, 4 days."""
    if seconds is None:
        return "–"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"


def relative(at_us: int, now_us: int) -> str:
    """When something was or will be, seen from now: 3 minutes ago, in 2 days.

    >>> relative(0, 180_000_000), relative(90_000_000, 0), relative(0, 0)
    ('3 minutes ago', 'in 2 minutes', 'now')
    """
    seconds = (at_us - now_us) / SECOND_US
    if abs(seconds) < NOW:
        return "now"
    units = ((YEAR, "year"), *UNITS) if abs(seconds) >= 2 * YEAR else UNITS
    size, unit = next((size, unit) for size, unit in units if abs(seconds) >= size)
    count = round(abs(seconds) / size) or 1
    said = f"{count} {unit}{'' if count == 1 else 's'}"
    return f"in {said}" if seconds > 0 else f"{said} ago"


def moment(at_us: int | None, *, now_us: int, zone: tzinfo, never: str = "–") -> Markup | str:
    """A time as it is seen from now, with the exact one for who points at it, and for programs."""
    if at_us is None:
        return never
    at = EPOCH + timedelta(microseconds=at_us)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        f"{at:%Y-%m-%dT%H:%M:%SZ}", shown(at, zone), relative(at_us, now_us)
    )


def end(at_us: int, *, zone: tzinfo) -> str:
    """The end of a period, after "until": Friday 20 November 2026, 18:00 Europe/Berlin."""
    return end_in_words(EPOCH + timedelta(microseconds=at_us), zone)


def short_hash(value: str) -> str:
    """A keyed hash, cut to what tells clients apart; anything else as it is."""
    return f"{value[:SHORT_HASH]}…" if value.startswith("hmac:") and len(value) > SHORT_HASH else value


def told(text: str, label_of: Callable[[str, str], str | None], zone: tzinfo) -> Markup:
    """A text of a version or of the audit log: hashes are links with the name of the client, times are local.

    >>> told(f"removed block of user hmac:{'0' * 32}", lambda kind, value: "Ada", UTC)  # doctest: +ELLIPSIS
    Markup('removed block of user <a href="/client?kind=user&amp;value=hmac%3A000...000" title="hmac:0...0">Ada</a>')
    >>> told("block of user ada until 2026-11-20T17:00:00+00:00", lambda kind, value: None, ZoneInfo("Europe/Berlin"))
    Markup('block of user ada until Friday 20 November 2026, 18:00 Europe/Berlin')
    """
    text = _INSTANT.sub(lambda found: end_in_words(datetime.fromisoformat(found[0]), zone), text)
    said, last = Markup(""), 0
    for found in _HASH.finditer(text):
        kind, value = found.groups()
        said += text[last : found.start(2)]
        name = label_of(kind, value) or short_hash(value)
        said += Markup('<a href="{}" title="{}">{}</a>').format(client_url(kind, value), value, name)
        last = found.end()
    return said + text[last:]


def client_url(kind: str, value: str) -> str:
    """Where the page of a client is. `value` of an API key is its hash: a raw one never gets into an address."""
    return f"/client?{urlencode({'kind': kind, 'value': value})}"
