"""Rate limit fields of HTTP responses, in all dialects in use, as `Quota` values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.clients.structured_fields import parse_dictionary, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.clients.structured_fields import BareItem, Item

__all__ = ["CONCURRENT", "MAX_RESET_S", "RETRY_AFTER", "HeaderSource", "Quota", "parse_headers", "server_time"]

HeaderSource: TypeAlias = "Mapping[Any, Any] | Iterable[tuple[Any, Any]]"

CONCURRENT: Final = "concurrent-requests"
RETRY_AFTER: Final = "retry-after"
"""The name of the quota that stands for a Retry-After field: nothing is available until then."""

LARGEST: Final = 999_999_999_999_999
"""The largest integer in a structured field (RFC 9651); larger numbers are lowered to it."""
MAX_RESET_S: Final = 31 * 86_400.0
"""The longest time until a reset that is believed: quotas per month are the longest in use."""
MAX_LINES: Final = 1000  # header lines of a response,
MAX_FIELDS: Final = 100  # fields about limits, and
MAX_FIELD_LENGTH: Final = 4096  # characters of each that are read, so that the work is bounded whatever a server sends
MAX_QUOTAS: Final = 32
MAX_TEXT_LENGTH: Final = 64  # characters of a number, a date or a duration

EPOCH_S: Final = 1_000_000_000
"""Numbers from here on are instants since 1970 (in 2001 or later), smaller ones are seconds from now."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota as a server reports it; None for what the response does not say."""

    name: str | None = None
    """The policy's name, or the kind of quota: "tokens", "daily"; "retry-after" for a Retry-After field."""
    limit: int | None = None
    """The whole quota of a window."""
    remaining: int | None = None
    """The part that is available now, and should last until `reset_after`."""
    reset_after: float | None = None
    """Seconds for which the client should not use more than `remaining`."""
    window: int | None = None
    """The length of the window in seconds."""
    unit: str = "requests"
    """The unit that is counted: "requests", "content-bytes", "concurrent-requests" or a server's own."""
    partition: bytes | str | None = None
    """The partition key: the client that is counted, as far as the server says so."""


def parse_headers(headers: HeaderSource, now: datetime) -> list[Quota]:
    """Read the quotas that a response reports, from any of the dialects in use; [] if it reports none.

    >>> now = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
    >>> parse_headers({"RateLimit": '"daily";r=70;t=3600', "RateLimit-Policy": '"daily";q=100;w=86400'}, now)[0].window
    86400
    >>> parse_headers({"X-RateLimit-Remaining": "7", "X-RateLimit-Reset": "1795003230"}, now)[0].reset_after
    30.0

    `headers` is a mapping or a list of pairs; names may be in any case. `now` is the time at which the response was
    received, for resets given as a date. Fields of cached responses, invalid fields and impossible values are ignored.
    """
    fields = _relevant_fields(headers)
    if _is_cached(fields):
        return []
    now_s = (now if now.tzinfo else now.replace(tzinfo=UTC)).timestamp()
    exact = _structured(fields, "")
    quotas = [*exact, *_structured(fields, "beta-"), *_from_families(fields, now_s, skip_unnamed=bool(exact))]
    if shopify := re.fullmatch(r"(\d{1,9})/(\d{1,9})", fields.get("x-shopify-shop-api-call-limit", "")):
        used, limit = int(shopify[1]), int(shopify[2])
        quotas.append(Quota(limit=limit, remaining=max(0, limit - used)))
    del quotas[MAX_QUOTAS - 1 :]
    if (retry_after := _retry_after(fields, now_s)) is not None:
        quotas.append(Quota(RETRY_AFTER, None, 0, retry_after))
    return quotas


def server_time(headers: HeaderSource) -> datetime | None:
    """The time at which the server sent the response, by its own clock."""
    return _http_date(_relevant_fields(headers).get("date", ""))


# ---------------------------------------------------------------- fields

_RELEVANT: Final = re.compile(
    r"(?:.*-)?rate-?limit(?:-.*)?|(?:beta-)?retry-after(?:-ms)?|x-shopify-shop-api-call-limit"
    r"|date|age|cache-status|cf-cache-status|x-cache|x-from-cache"
)


def _relevant_fields(headers: HeaderSource) -> dict[str, str]:
    """The fields that matter here, by name in lower case; several lines of a name are joined, as HTTP defines it."""
    fields: dict[str, str] = {}
    lines = headers.items() if isinstance(headers, Mapping) else headers
    for name, value in islice(lines, MAX_LINES):
        key, text = _text(name).lower(), _text(value)
        if len(key) <= MAX_TEXT_LENGTH and len(text) <= MAX_FIELD_LENGTH and _RELEVANT.fullmatch(key):
            joined = f"{fields[key]}, {text}" if key in fields else text
            if len(joined) <= MAX_FIELD_LENGTH and (key in fields or len(fields) < MAX_FIELDS):
                fields[key] = joined
    return fields


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1").strip()
    return value.strip() if isinstance(value, str) else str(value) if isinstance(value, int) else ""


def _is_cached(fields: Mapping[str, str]) -> bool:
    """True if a cache has answered, so that the numbers are those of an earlier request."""
    age = _number(fields.get("age", ""))
    return (
        (age is not None and age > 0)
        or re.search(r";\s*hit\b", fields.get("cache-status", "")) is not None
        or fields.get("cf-cache-status", "").lower() in ("hit", "stale", "updating")
        or fields.get("x-cache", "").lower().startswith("hit")
        or fields.get("x-from-cache", "") not in ("", "0")
    )


# ---------------------------------------------------------------- RateLimit and RateLimit-Policy


def _structured(fields: Mapping[str, str], prefix: str) -> list[Quota]:
    """The quotas of `RateLimit` and `RateLimit-Policy`: drafts 8 to 11, the next one, and draft 7."""
    policies = _policies(fields, prefix)
    text = fields.get(f"{prefix}ratelimit", "")
    if (items := parse_list(text)) is None:
        return _draft_7(text, policies)
    quotas: list[Quota] = []
    named = {(item[0], item[1].get("pk")): _policy_quota(item) for item in policies if isinstance(item[0], str)}
    for name, parameters in items[:MAX_QUOTAS]:
        if not isinstance(name, str):
            return []
        partition = parameters.get("pk")
        policy = named.pop((name, partition), None) or named.pop((name, None), None) or Quota(str(name))
        has_r = "r" in parameters  # the draft after -11 calls it a, and the effective window w
        remaining = _whole(parameters.get("r" if has_r else "a"))
        reset_after = _whole(parameters.get("t" if has_r else "w"))
        quotas.append(
            replace(
                policy,
                remaining=remaining,
                reset_after=None if reset_after is None else min(float(reset_after), MAX_RESET_S),
                partition=partition if isinstance(partition, bytes | str) else policy.partition,
            )
        )
    return [quota for quota in (*quotas, *named.values()) if _is_usable(quota)]


def _policies(fields: Mapping[str, str], prefix: str) -> list[Item]:
    return (parse_list(fields.get(f"{prefix}ratelimit-policy", "")) or [])[:MAX_QUOTAS]


def _policy_quota(policy: Item) -> Quota:
    name, parameters = policy
    unit, partition = parameters.get("qu", "requests"), parameters.get("pk")
    return Quota(
        str(name),
        limit=_whole(parameters.get("q")),
        window=_whole(parameters.get("w")) or None,
        unit=str(unit),
        partition=partition if isinstance(partition, bytes | str) else None,
    )


def _draft_7(text: str, policies: list[Item]) -> list[Quota]:
    members = parse_dictionary(text) or {}
    limit, remaining, reset = (
        _whole(members[key][0]) if key in members else None for key in ("limit", "remaining", "reset")
    )
    reset_after = None if reset is None else min(float(reset), MAX_RESET_S)
    quota = Quota(None, limit, remaining, reset_after, _window_of(limit, policies))
    return [quota] if _is_usable(quota) else []


def _window_of(limit: int | None, policies: Iterable[Item]) -> int | None:
    """The window of the policy with that quota, such as `100;w=60`."""
    for value, parameters in policies:
        if value == limit and (window := _whole(parameters.get("w"))):
            return window
    return None


def _whole(value: BareItem | None) -> int | None:
    """A number as structured fields have it, if it is possible as a count."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _is_usable(quota: Quota) -> bool:
    return quota.limit is not None or quota.remaining is not None or quota.reset_after is not None


# ---------------------------------------------------------------- one field per number

KINDS: Final = {
    "reset-after": "reset-after",
    "resettime": "reset",
    "reset": "reset",
    "remaining": "remaining",
    "limit": "limit",
    "max": "limit",
    "used": "used",
    "observed": "used",
    "interval-seconds": "seconds",
    "interval-milliseconds": "milliseconds",
    "policy": "policy",
    "resource": "name",
    "bucket": "name",
    "name": "name",
}
"""The words that say which number a field has, and their meaning. The rest of a name is the kind of quota."""

WINDOWS: Final = {
    **dict.fromkeys(("second", "secondly"), 1),
    **dict.fromkeys(("minute", "minutely"), 60),
    **dict.fromkeys(("hour", "hourly"), 3600),
    **dict.fromkeys(("day", "daily"), 86_400),
}

_FAMILY: Final = re.compile(r"(?P<prefix>(?:[a-z0-9]+-)*?)rate-?limit(?:-(?P<rest>[a-z0-9_-]+))?")


def _from_families(fields: Mapping[str, str], now_s: float, *, skip_unnamed: bool) -> list[Quota]:
    """The quotas of fields with one number each: X-RateLimit-Remaining, RateLimit-Reset, x-ratelimit-limit-tokens.

    With `skip_unnamed`, those without a prefix of a vendor or a kind are ignored: RateLimit says the same, exactly.
    """
    families: dict[tuple[str, str], dict[str, str]] = {}
    for field, text in fields.items():
        match = _FAMILY.fullmatch(field)
        if match is None or (match["rest"] is None and match["prefix"] != "x-"):
            continue
        kind, of = _kind_and_subject(match["rest"] or "limit")
        if kind:
            families.setdefault((match["prefix"], of), {}).setdefault(kind, text)
    if ("", "") in families and "remaining" in families["", ""]:
        families.pop(("x-", ""), None)
    if skip_unnamed:
        families = {key: family for key, family in families.items() if key not in (("", ""), ("x-", ""))}
    quotas: list[Quota] = []
    for (_, of), family in families.items():
        quotas += _family_quotas(of, family, now_s)
    return [quota for quota in quotas if _is_usable(quota)]


def _kind_and_subject(rest: str) -> tuple[str | None, str]:
    """Split `remaining-tokens`, or `tokens-remaining`, into the kind of number and the quota that it is about."""
    for word, kind in KINDS.items():
        if rest == word:
            return kind, ""
        if rest.startswith(f"{word}-"):
            return kind, rest.removeprefix(f"{word}-")
        if rest.endswith(f"-{word}"):
            return kind, rest.removesuffix(f"-{word}")
    return ("limit", rest) if rest in WINDOWS else (None, "")


def _family_quotas(of: str, family: Mapping[str, str], now_s: float) -> list[Quota]:
    policies = parse_list(family.get("policy", "")) or []
    texts = [family.get(kind, "").split(",") for kind in ("limit", "remaining", "reset")]
    if len(texts[1]) > 1:  # several quotas at once: "1, 15000"
        rows = list(zip_longest(*texts, fillvalue=""))[:MAX_QUOTAS]
    else:
        rows = [(texts[0][0], texts[1][0], family.get("reset", ""))]
        policies += parse_list(family.get("limit", "")) or []
    quotas = []
    for limit_text, remaining_text, reset_text in rows:
        limit, remaining = _count(limit_text), _count(remaining_text)
        if remaining is None and limit is not None and (used := _count(family.get("used", ""))) is not None:
            remaining = max(0, limit - used)
        reset_after = _reset_after(reset_text, now_s)
        if (exact := _number(family.get("reset-after", ""))) is not None:
            reset_after = min(exact, MAX_RESET_S)
        window = _window_of(limit, policies) or WINDOWS.get(of) or _interval(family)
        unit = "tokens" if "tokens" in of else "requests"
        quotas.append(Quota(family.get("name") or of or None, limit, remaining, reset_after, window, unit))
    return quotas


def _interval(family: Mapping[str, str]) -> int | None:
    if (seconds := _count(family.get("seconds", ""))) is not None:
        return seconds or None
    milliseconds = _count(family.get("milliseconds", ""))
    return -(-milliseconds // 1000) or None if milliseconds is not None else None


def _retry_after(fields: Mapping[str, str], now_s: float) -> float | None:
    if (milliseconds := _number(fields.get("retry-after-ms", ""))) is not None:
        return min(milliseconds / 1000, MAX_RESET_S)
    text = fields.get("retry-after", fields.get("beta-retry-after", ""))
    if (seconds := _number(text)) is not None:
        return min(seconds, MAX_RESET_S)
    return _until(_http_date(text), now_s)


# ---------------------------------------------------------------- numbers and times

_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
"""A duration as Go prints it: 6m0s, 1h2m3.5s, 12ms."""
_SECONDS_PER_UNIT: Final = (86_400, 3600, 60, 1, 0.001)
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def _number(text: str) -> float | None:
    """A number >= 0; None for anything else, such as `-1`, `NaN` and `1e99`."""
    text = text.strip()
    if len(text) > MAX_TEXT_LENGTH or not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    return min(float(text), float(LARGEST))


def _count(text: str) -> int | None:
    number = _number(text.partition(";")[0])
    return None if number is None else int(number)


def _reset_after(text: str, now_s: float) -> float | None:
    """Seconds until a reset, given as seconds, a duration, or an instant: since the epoch, ISO 8601, an HTTP date."""
    text = text.strip()
    if (number := _number(text.partition(";")[0])) is not None:
        if number < EPOCH_S:
            return min(number, MAX_RESET_S)
        while number >= EPOCH_S * 100:  # milli-, micro- or nanoseconds
            number /= 1000
        return min(max(0.0, number - now_s), MAX_RESET_S)
    if not text or len(text) > MAX_TEXT_LENGTH or not text.isascii():
        return None
    if (match := _DURATION.fullmatch(text)) is not None:
        parts = zip(match.groups(), _SECONDS_PER_UNIT, strict=True)
        return min(round(sum(float(value) * seconds for value, seconds in parts if value), 6), MAX_RESET_S)
    try:
        instant: datetime | None = datetime.fromisoformat(text)
    except ValueError:
        instant = _http_date(text)
    return _until(instant, now_s)


def _until(instant: datetime | None, now_s: float) -> float | None:
    if instant is None:
        return None
    try:
        at_s = (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):  # before the year 1 in UTC, or after 9999
        return None
    return min(max(0.0, at_s - now_s), MAX_RESET_S)


def _http_date(text: str) -> datetime | None:
    if not 6 <= len(text) <= MAX_TEXT_LENGTH:
        return None
    try:
        return parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
