"""Template filters for numbers, times and clients."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from jinja2 import pass_context
from markupsafe import Markup

from headgate.clock import EPOCH, SECOND_US
from headgate.telemetry.human_time import end_in_words, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["EPOCH", "FILTERS", "client_url", "count", "duration", "latency", "number", "parse_zone", "scope"]

YEAR: Final = 31_557_600
UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
NOW_S: Final = 2
"""Seconds shown as "now"."""
SHORT_HASH: Final = 14
_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?\+00:00")
_HASH: Final = re.compile(r"\b([a-z][a-z0-9_]*) (hmac:[0-9a-f]{32})\b")


def parse_zone(name: str | None) -> tzinfo:
    """The time zone reported by the browser; UTC if it is missing or invalid."""
    try:
        return ZoneInfo(name) if name and len(name) < 64 else UTC
    except (KeyError, ValueError, OSError):
        return UTC


def number(value: float | None) -> str:
    """A number like 12,345, or a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def count(value: int, one: str, several: str | None = None) -> str:
    """A number with a noun: 1 request, 2 requests."""
    return f"{number(value)} {one if value == 1 else several or one + 's'}"


def tick(value: float) -> str:
    """The label of a grid line, with a decimal only if needed."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def scope(by: str) -> str:
    """The scope of a limit in words.

    >>> scope("tenant+api_key"), scope("client"), scope("global")
    ('per tenant and API key', 'per client', 'one counter for all clients')
    """
    names = {"ip": "IP", "api_key": "API key"}
    if by == "global":
        return "one counter for all clients"
    return f"per {' and '.join(names.get(kind, kind.replace('_', ' ')) for kind in by.split('+'))}"


def latency(us: float | None) -> str:
    """A latency like 430 µs, 1.2 ms or 3 s."""
    if us is None:
        return "–"
    if us < 1_000:
        return f"{us:.0f} µs"
    return f"{us / 1_000:.3g} ms" if us < SECOND_US else f"{us / SECOND_US:.3g} s"


def duration(seconds: float | None) -> str:
    """A duration in its largest unit: 3 s, 5 min, 2 h, 4 days."""
    if seconds is None:
        return "–"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"


def relative(at_us: int, now_us: int) -> str:
    """A time relative to now: 3 minutes ago, in 2 days.

    >>> relative(0, 180_000_000), relative(90_000_000, 0), relative(0, 0)
    ('3 minutes ago', 'in 2 minutes', 'now')
    """
    seconds = (at_us - now_us) / SECOND_US
    if abs(seconds) < NOW_S:
        return "now"
    units = ((YEAR, "year"), *UNITS) if abs(seconds) >= 2 * YEAR else UNITS
    size, unit = next((size, unit) for size, unit in units if abs(seconds) >= size)
    text = count(round(abs(seconds) / size) or 1, unit)
    return f"in {text}" if seconds > 0 else f"{text} ago"


@pass_context
def time_tag(page: Mapping[str, Any], at_us: int | None, never: str = "–") -> Markup | str:
    """A relative time in a <time> element with the exact time as its tooltip."""
    if at_us is None:
        return never
    at = EPOCH + timedelta(microseconds=at_us)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        f"{at:%Y-%m-%dT%H:%M:%SZ}", shown(at, page["zone"]), relative(at_us, page["now_us"])
    )


@pass_context
def end_time(page: Mapping[str, Any], at_us: int) -> str:
    """The end of a period: Friday 20 November 2026, 18:00 Europe/Berlin."""
    return end_in_words(EPOCH + timedelta(microseconds=at_us), page["zone"])


def short_hash(value: str) -> str:
    """A keyed hash, abbreviated; other values unchanged."""
    return f"{value[:SHORT_HASH]}…" if value.startswith("hmac:") and len(value) > SHORT_HASH else value


@pass_context
def annotate(page: Mapping[str, Any], text: str) -> Markup:
    """A summary from a version or the audit log, with hashes as links to clients and local times.

    >>> page = {"label_of": lambda kind, value: "Ada", "zone": ZoneInfo("Europe/Berlin")}
    >>> annotate(page, f"removed block of user hmac:{'0' * 32}")  # doctest: +ELLIPSIS
    Markup('Removed block of user <a href="/client?kind=user&amp;value=hmac%3A000...000" title="hmac:0...0">Ada</a>')
    >>> annotate(page, "block of user ada until 2026-11-20T17:00:00+00:00")
    Markup('Block of user ada until Friday 20 November 2026, 18:00 Europe/Berlin')
    """
    text = text[:1].upper() + text[1:]
    text = _INSTANT.sub(lambda found: end_in_words(datetime.fromisoformat(found[0]), page["zone"]), text)
    result, last = Markup(""), 0
    for found in _HASH.finditer(text):
        kind, value = found.groups()
        name = page["label_of"](kind, value) or short_hash(value)
        link = Markup('<a href="{}" title="{}">{}</a>').format(client_url(kind, value), value, name)
        result += text[last : found.start(2)] + link
        last = found.end()
    return result + text[last:]


def client_url(kind: str, value: str) -> str:
    """The URL of a client's page. For an API key, `value` is its hash: raw keys never appear in URLs."""
    return f"/client?{urlencode({'kind': kind, 'value': value})}"


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "annotate": annotate,
    "duration": duration,
    "end_time": end_time,
    "latency": latency,
    "number": number,
    "option": lambda value: (value, value, None),
    "short_hash": short_hash,
    "tick": tick,
    "time": time_tag,
}
