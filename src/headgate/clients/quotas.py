"""Rate limit fields of HTTP responses, in all dialects in use, as `Quota` values."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, zip_longest
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.clients.field_values import (
    LARGEST,
    MAX_RESET_S,
    parse_count,
    parse_duration,
    parse_http_date,
    parse_number,
    parse_reset,
)
from headgate.clients.structured_fields import parse_dictionary, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headgate.clients.structured_fields import BareItem, Item

__all__ = ["CONCURRENT", "RETRY_AFTER", "HeaderSource", "Quota", "parse_headers", "server_time"]

HeaderSource: TypeAlias = "Mapping[Any, Any] | Iterable[tuple[Any, Any]]"

CONCURRENT: Final = "concurrent-requests"
RETRY_AFTER: Final = "retry-after"
"""The name of the quota that stands for a Retry-After field: nothing is available until then."""

MAX_LINES: Final = 1000  # header lines of a response,
MAX_FIELDS: Final = 100  # fields about limits, and
MAX_FIELD_LENGTH: Final = 4096  # characters of each that are read, so that the work is bounded whatever a server sends
MAX_QUOTAS: Final = 32
MAX_NAME_LENGTH: Final = 64


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
    for name in ("x-shopify-shop-api-call-limit", "sforce-limit-info"):
        if usage := re.match(r"(?:api-usage=)?(\d{1,9})/(\d{1,9})(?!\d)", fields.get(name, ""), re.ASCII):
            used, limit = int(usage[1]), int(usage[2])
            quotas.append(Quota(limit=limit, remaining=max(0, limit - used)))
    if not quotas:
        quotas = _only_policies(fields)
    del quotas[MAX_QUOTAS - 1 :]
    if (retry_after := _retry_after(fields, now_s)) is not None:
        quotas.append(Quota(RETRY_AFTER, None, 0, retry_after))
    return quotas


def server_time(headers: HeaderSource) -> datetime | None:
    """The time at which the server sent the response, by its own clock."""
    return parse_http_date(_relevant_fields(headers).get("date", ""))


# ---------------------------------------------------------------- fields

_RELEVANT: Final = re.compile(
    r"(?:.*-)?(?:read)?rate-?limit(?:-.*)?|(?:.*-)?retry-after(?:-.*)?|x-shopify-shop-api-call-limit|sforce-limit-info"
    r"|date|age|cache-status|cf-cache-status|x-cache|x-from-cache"
)


def _relevant_fields(headers: HeaderSource) -> dict[str, str]:
    """The fields that matter here, by name in lower case; several lines of a name are joined, as HTTP defines it."""
    fields: dict[str, str] = {}
    items = getattr(headers, "items", None)  # http.client's headers are not a Mapping
    lines = headers if items is None else items()
    for name, value in islice(lines, MAX_LINES):
        key, text = _text(name).lower(), _text(value)
        if len(key) <= MAX_NAME_LENGTH and len(text) <= MAX_FIELD_LENGTH and _RELEVANT.fullmatch(key):
            joined = f"{fields[key]}, {text}" if key in fields else text
            if len(joined) <= MAX_FIELD_LENGTH and (key in fields or len(fields) < MAX_FIELDS):
                fields[key] = joined
    return fields


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1").strip()
    return value.strip() if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""


def _is_cached(fields: Mapping[str, str]) -> bool:
    """True if a cache has answered, so that the numbers are those of an earlier request."""
    age = parse_number(fields.get("age", ""))
    return (
        (age is not None and age > 0)
        or re.search(r";\s*hit\b(?!=\?0)", fields.get("cache-status", "")) is not None
        or fields.get("cf-cache-status", "").lower() in ("hit", "stale", "updating")
        or re.search(r"(?:^|[\s,_])hit\b", fields.get("x-cache", "").lower()) is not None  # "MISS, HIT", "TCP_HIT"
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
        quotas.append(
            replace(
                policy,
                remaining=remaining,
                reset_after=_seconds(parameters.get("t" if has_r else "w")),
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
    limit, remaining, reset = (members[key][0] if key in members else None for key in ("limit", "remaining", "reset"))
    window = _window_of(_whole(limit), policies)
    quota = Quota(None, _whole(limit), _whole(remaining), _seconds(reset), window)
    return [quota] if _is_usable(quota) else []


def _window_of(limit: int | None, policies: Iterable[Item]) -> int | None:
    """The window of the policy with that quota, such as `100;w=60` or `"default";q=100;w=60`."""
    for value, parameters in policies:
        is_same = limit is not None and limit in (value, parameters.get("q"))
        if is_same and (window := _whole(parameters.get("w"))):
            return window
    return None


def _only_policies(fields: Mapping[str, str]) -> list[Quota]:
    """The quotas of policies as drafts 3 to 7 write them, `100;w=60`, of responses that say nothing else."""
    policies = [(_whole(value), _whole(parameters.get("w"))) for value, parameters in _policies(fields, "")]
    return [Quota(None, limit, window=window or None) for limit, window in policies if limit is not None]


def _whole(value: BareItem | None) -> int | None:
    """A number as structured fields have it, if it is possible as a count."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _seconds(value: BareItem | None) -> float | None:
    return None if _whole(value) is None else min(float(value or 0), MAX_RESET_S)


def _is_usable(quota: Quota) -> bool:
    return quota.limit is not None or quota.remaining is not None or quota.reset_after is not None


# ---------------------------------------------------------------- one field per number

KINDS: Final = {
    "requests-left": "remaining",
    "requests-quota": "limit",
    "time-reset-ms": "reset-milliseconds",
    "time-window-ms": "window-milliseconds",
    "reset-after": "reset-after",
    **dict.fromkeys(("resettime", "reset", "resets", "next"), "reset"),
    "remaining": "remaining",
    **dict.fromkeys(("limit", "max", "total"), "limit"),
    **dict.fromkeys(("used", "observed", "usage", "count"), "used"),
    **dict.fromkeys(("interval-milliseconds", "interval-ms"), "window-milliseconds"),
    **dict.fromkeys(("interval-seconds", "interval", "period-in-sec", "period", "window"), "window"),
    "policy": "policy",
    **dict.fromkeys(("resource", "bucket", "name", "group"), "name"),
}
"""The words that say which number a field has, and their meaning. The rest of a name is the kind of quota."""

WINDOWS: Final = {
    **dict.fromkeys(("second", "secondly"), 1),
    **dict.fromkeys(("minute", "minutely"), 60),
    **dict.fromkeys(("hour", "hourly"), 3600),
    **dict.fromkeys(("day", "daily"), 86_400),
}

_FAMILY: Final = re.compile(r"(?P<prefix>(?:[a-z0-9]+-)*?(?:read)?)rate-?limit(?:-(?P<rest>[a-z0-9_-]+))?")
_JOINED: Final = re.compile(r"(?<![a-z])(user|client|concurrent|daily)(?=limit|remaining|reset)")
_WINDOW: Final = re.compile(rf"(?:.*?-)??(?:(?P<number>\d{{1,5}})-)?(?P<unit>{'|'.join(WINDOWS)})", re.ASCII)


def _from_families(fields: Mapping[str, str], now_s: float, *, skip_unnamed: bool) -> list[Quota]:
    """The quotas of fields with one number each: X-RateLimit-Remaining, RateLimit-Reset, x-ratelimit-limit-tokens.

    With `skip_unnamed`, those without a prefix of a vendor or a kind are ignored: RateLimit says the same, exactly.
    """
    families: dict[tuple[str, str], dict[str, str]] = {}
    for field, text in fields.items():
        match = _FAMILY.fullmatch(field)
        if match is None or (match["rest"] is None and match["prefix"] in ("", "beta-")):
            continue
        rest = _JOINED.sub(r"\1-", match["rest"] or "limit")
        if "remaining=" in text:  # Zendesk: all numbers in one field
            numbers = re.findall(r"\b([a-z]{1,20})=([0-9.]{1,20})", text)
            families[match["prefix"], rest] = {KINDS[word]: number for word, number in numbers if word in KINDS}
            continue
        kind, of = _kind_and_subject(rest)
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
    texts = [family.get(kind, "").split(",") for kind in ("limit", "remaining", "used", "reset")]
    if len(texts[1]) > 1 or len(texts[2]) > 1:  # several quotas at once: "1, 15000"
        rows = list(zip_longest(*texts, fillvalue=""))[:MAX_QUOTAS]
    else:
        rows = [(texts[0][0], texts[1][0], texts[2][0], family.get("reset", ""))]
        policies += parse_list(family.get("limit", "")) or []
    unit = "tokens" if "tokens" in of else CONCURRENT if of == "concurrent" else "requests"
    quotas = []
    for limit_text, remaining_text, used_text, reset_text in rows:
        limit, remaining, used = parse_count(limit_text), parse_count(remaining_text), parse_count(used_text)
        if remaining is None and limit is not None and used is not None:
            remaining = max(0, limit - used)
        reset_after = _milliseconds(family, "reset")
        if reset_after is None:
            reset_after = parse_number(family.get("reset-after", ""))
        if reset_after is None:
            reset_after = parse_reset(reset_text, now_s)
        window = _window_of(limit, policies) or _window_in(of) or _window(limit_text, family)
        quotas.append(
            Quota(
                family.get("name") or of or None,
                limit,
                remaining,
                None if reset_after is None else min(reset_after, MAX_RESET_S),
                window,
                unit,
            )
        )
    return quotas


def _window_in(of: str) -> int | None:
    """The window in a kind of quota: "minute", "requests-day", "tokens-5-minute"."""
    match = _WINDOW.fullmatch(of)
    return None if match is None else int(match["number"] or 1) * WINDOWS[match["unit"]] or None


def _window(limit_text: str, family: Mapping[str, str]) -> int | None:
    """The window in a field of its own, or behind the limit: "100:120"."""
    seconds = _milliseconds(family, "window")
    if seconds is None:
        seconds = parse_duration(family.get("window", "") or limit_text.partition(":")[2])
    return None if seconds is None else min(ceil(seconds), LARGEST) or None


def _milliseconds(family: Mapping[str, str], kind: str) -> float | None:
    number = parse_number(family.get(f"{kind}-milliseconds", ""))
    return None if number is None else number / 1000


_RETRY_AFTER: Final = re.compile(r"(?:.*-)?retry-after(?P<milliseconds>-ms|-milliseconds)?(?:-sec(?:onds)?)?")


def _retry_after(fields: Mapping[str, str], now_s: float) -> float | None:
    """Seconds until a retry, as exactly as the server says it: Retry-After, X-RateLimit-Retry-After, retry-after-ms."""
    exact, rounded = [], []
    for field, text in fields.items():
        if match := _RETRY_AFTER.fullmatch(field):
            numbers = [parse_number(part) for part in text.split(",")]  # a proxy may repeat the field
            known = [number for number in numbers if number is not None]
            number = max(known) if len(known) == len(numbers) else None
            if match["milliseconds"]:
                exact += [number / 1000] if number is not None else []
            elif number is not None and not 0 <= number - now_s <= MAX_RESET_S:  # else it is a time since 1970
                rounded.append(number)
            elif (delay := parse_reset(text, now_s)) is not None:
                rounded.append(delay)
    delay = max(exact or rounded, default=None)
    return None if delay is None else min(delay, MAX_RESET_S)
