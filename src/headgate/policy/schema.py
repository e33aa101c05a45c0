"""The schema of policies, for the loader and as JSON Schema for editors."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import Phrase
from headgate.algorithms import ALGORITHMS
from headgate.policy import scalars
from headgate.policy.schema_types import (
    BROKEN,
    Field,
    LazyList,
    ListOf,
    MapOf,
    OneOf,
    OneOrMany,
    Scalar,
    Struct,
    StructValue,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.policy.problems import PolicyProblems

__all__ = ["json_schema", "policy"]

_TEXT: Final = {"type": "string", "minLength": 1}
_NAME: Final = {**_TEXT, "maxLength": 100, "pattern": r"^[ !#-\[\]-~]+$"}

NAME: Final = Scalar(scalars.name, _NAME)
LABEL: Final = Scalar(scalars.label, {**_TEXT, "maxLength": 500})
FLAG: Final = Scalar(scalars.flag, {"type": "boolean"})
DURATION: Final = Scalar(scalars.duration, {**_TEXT, "examples": ["500 ms", "5 seconds", "2 minutes"]})
INSTANT: Final = Scalar(
    scalars.instant, {"type": "string", "format": "date-time", "examples": ["2026-05-28T02:01:00Z"]}
)
METHODS: Final = OneOrMany(
    Scalar(scalars.method, {**_TEXT, "pattern": "^[A-Z]{1,20}$", "examples": ["GET"]}), "[GET, POST]"
)
ROUTE: Final = Scalar(scalars.route, {**_TEXT, "examples": ["/users/{id}", "/static/*", "GET /search", "*"]})
IDENTITY: Final = Scalar(scalars.identity, {"type": ["string", "integer"]})
ADDRESS: Final = Scalar(scalars.address, {**_TEXT, "examples": ["203.0.113.9", "203.0.113.0/24", "2001:db8::/48"]})


def _choice(*known: str) -> Scalar:
    return Scalar(scalars.choice(*known), {"enum": list(known)})


def _whole(least: int, most: int | None = None, *, example: int) -> Scalar:
    form = {"type": "integer", "minimum": least, "examples": [example]} | ({} if most is None else {"maximum": most})
    return Scalar(scalars.whole(least, most, example=example), form)


COST: Final = _whole(0, example=5)
ALGORITHM: Final = _choice(*ALGORITHMS)
ON_FAILURE: Final = _choice("open", "closed", "local")


def _spelled_out(numbers: StructValue, problems: PolicyProblems) -> Any:
    """Convert numbers that are given as separate fields."""
    given = numbers.fields.keys() - {"algorithm"}
    algorithm = numbers.get("algorithm")
    if given == {"bucket_size", "refill_rate"}:
        rate = numbers.get("refill_rate")
        return Phrase(rate.numerator, timedelta(seconds=rate.denominator), numbers.get("bucket_size"), algorithm)
    if {"quota", "period"} <= given <= {"quota", "period", "burst"}:
        return Phrase(numbers.get("quota"), numbers.get("period"), numbers.get("burst"), algorithm)
    problems.add(
        numbers.path,
        f"numbers need bucket_size and refill_rate, or quota and period (and burst, if you like); "
        f"here {'is ' + ', '.join(sorted(given)) if given else 'is neither'}",
    )
    return BROKEN


NUMBERS: Final = OneOf(
    {
        str: Scalar(
            scalars.numbers, {**_TEXT, "examples": ["10/minute", "1000/minute, burst 200", "5/30 s, sliding_window"]}
        ),
        dict: Struct(
            "numbers",
            {
                "algorithm": Field(ALGORITHM, "The algorithm."),
                "bucket_size": Field(_whole(1, example=200), "The size of the bucket: requests that pass at once."),
                "refill_rate": Field(
                    Scalar(scalars.rate, {"type": "number", "exclusiveMinimum": 0, "examples": [16.67]}),
                    "Tokens added per second; decimal numbers are exact.",
                ),
                "quota": Field(_whole(1, example=1000), "Requests per period."),
                "period": Field(DURATION, "In what time."),
                "burst": Field(_whole(1, example=200), "Requests that pass at once; the quota by default."),
            },
            _spelled_out,
        ),
    },
    'a limit like "10/minute", or a mapping with bucket_size and refill_rate',
)

BY_NAME: Final = MapOf(NAME, NUMBERS, '{search: "1000/minute"}')

TIERS: Final = MapOf(
    NAME,
    Struct(
        "a tier", {"limits": Field(BY_NAME, "The numbers of this tier, by the names of limits or of route classes.")}
    ),
    '{pro: {limits: {search: "1000/minute"}}}',
)

ROUTES: Final = ListOf(
    Struct(
        "a route",
        {
            "path": Field(ROUTE, "Which paths it is: a template like /users/{id} or /static/*, or * for all."),
            "endpoint": Field(ROUTE, "The same as path.", "path"),
            "route": Field(ROUTE, "The same as path.", "path"),
            "methods": Field(METHODS, "Which methods; all, if not given."),
            "method": Field(METHODS, "The same as methods.", "methods"),
            "class": Field(NAME, "The class that it belongs to; limits and overrides may name it."),
            "cost": Field(COST, "The cost of a request, unless a limit sets its own; 0 exempts the route."),
            "on_failure": Field(ON_FAILURE, "The failure mode while the store is unavailable."),
        },
    ),
    "[{path: /search, class: search, cost: 5}]",
)

_PATHS: Final = OneOrMany(ROUTE, "[/login, /signup]")
_CLASSES: Final = OneOrMany(NAME, "[search, export]")

_WRITE_NUMBERS: Final = 'write the numbers together, like bucket: "1000/minute, burst 200"'
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("rate", "quota", "max", "requests", "period", "per", "window", "windowMs", "interval", "burst", "capacity"),
        _WRITE_NUMBERS,
    ),
    **dict.fromkeys(("key", "keys", "key_func", "key_by", "identifier", "identity", "scope"), "did you mean 'by'?"),
    **dict.fromkeys(("paths", "url", "uri", "urls", "match", "prefix"), "did you mean 'path'?"),
    **dict.fromkeys(("dry_run", "log_only", "report_only"), "did you mean 'shadow'?"),
    **dict.fromkeys(("fail", "fail_open", "failure_mode"), "did you mean 'on_failure'?"),
}
"""Remedies for field names of other limiters."""

LIMIT: Final = Struct(
    "a limit",
    {
        "name": Field(NAME, "Its name in headers, reasons, overrides and stored keys."),
        "path": Field(
            _PATHS, "The routes that meet it: one template, or a list. All, if neither path nor class is given."
        ),
        "endpoint": Field(_PATHS, "The same as path.", "path"),
        "route": Field(_PATHS, "The same as path.", "path"),
        "class": Field(_CLASSES, "The classes of routes that meet it."),
        "classes": Field(_CLASSES, "The same as class.", "class"),
        "methods": Field(METHODS, "The methods that meet it; all, if not given."),
        "method": Field(METHODS, "The same as methods.", "methods"),
        "by": Field(
            Scalar(
                scalars.by,
                {"type": ["string", "array"], "items": {"type": "string"}, "examples": ["ip", "tenant+user"]},
            ),
            f"The identity to count by: {', '.join(scalars.IDENTITIES)}, global, or the app's own; client by default.",
        ),
        "bucket": Field(NUMBERS, "Quota, period and burst."),
        "limit": Field(NUMBERS, "The same as bucket.", "bucket"),
        "algorithm": Field(ALGORITHM, "The algorithm, unless the numbers name one."),
        "tiers": Field(MapOf(NAME, NUMBERS, '{pro: "1000/minute"}'), "Other numbers for the clients of a tier."),
        "cost": Field(COST, "The cost of a request on this limit; the route's cost by default."),
        "reserve": Field(_whole(1, example=500), "An estimate of the cost, which the app corrects afterwards."),
        "count_when": Field(
            Scalar(scalars.status_test, {**_TEXT, "examples": ["status in [401, 403]", "status >= 500"]}),
            "Counts only requests that the app answers so.",
        ),
        "shadow": Field(FLAG, "Evaluated and reported, but never rejects."),
        "on_failure": Field(ON_FAILURE, "The failure mode while the store is unavailable."),
        "missing": Field(
            _choice("skip", "ip"), "For requests without the identity: leave the limit out, or count by ip."
        ),
        "unit": Field(
            _choice("requests", "content-bytes", "concurrent-requests", "tokens"), "The unit that headers report."
        ),
        "lease": Field(_choice("auto", "always", "never"), "Prepaid tokens: when it is busy (auto), always or never."),
        "split": Field(
            _whole(1, 1_000, example=4), "Over how many counters it is spread; its numbers must be multiples of it."
        ),
    },
    example="like {by: ip, bucket: 10/minute}",
    remedies=_ELSEWHERE,
)

LIMITS: Final = OneOf(
    {list: ListOf(LIMIT, "[{by: ip, bucket: 10/minute}]"), dict: BY_NAME},
    "a list of limits, like [{by: ip, bucket: 10/minute}]",
)

SETTINGS: Final = Struct(
    "settings",
    {
        "proxies": Field(
            ListOf(Scalar(scalars.proxy, {**_TEXT, "examples": ["10.0.0.0/8"]}), "[10.0.0.0/8]"),
            "The networks of your own proxies, whose word on a client's address is taken.",
        ),
        "forwarded_by": Field(_choice("x-forwarded-for", "forwarded"), "The header in which they give it."),
        "ipv6_prefix": Field(_whole(32, 128, example=64), "Bits of an IPv6 address that identify one client."),
        "subnet": Field(
            Struct(
                "settings",
                {
                    "ipv4": Field(_whole(8, 32, example=24), "Bits of an IPv4 address that identify one subnet."),
                    "ipv6": Field(_whole(16, 128, example=48), "Bits of an IPv6 address that identify one subnet."),
                },
            ),
            "The subnets of `by: subnet`.",
        ),
        "api_key": Field(
            Struct(
                "settings",
                {
                    "header": Field(
                        Scalar(scalars.header, {"type": ["string", "null"]}),
                        "The header that holds the key; none for no header.",
                    ),
                    "bearer": Field(FLAG, "Treat a bearer token as a key, too."),
                    "known_only": Field(FLAG, "Ignore keys that neither clients nor overrides name."),
                    "unknown_factor": Field(
                        Scalar(
                            scalars.factor_or_off(1_000, example=10),
                            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1_000}, {"enum": ["off", False]}]},
                        ),
                        "Requests with unknown keys are also counted by address, at this multiple of each limit by API "
                        "key, unless a limit by ip, subnet or global applies to them; 10, if not given, or off.",
                    ),
                },
            ),
            "Where API keys stand.",
        ),
    },
)

ANSWERS: Final = Struct(
    "settings",
    {
        "headers": Field(
            ListOf(_choice("x-ratelimit", "ratelimit"), "[x-ratelimit, ratelimit]"), "Which are sent; [] for none."
        ),
        "jitter": Field(DURATION, "Retry-After is spread over so much more, against herds."),
        "doc_url": Field(
            Scalar(scalars.url, {"type": "string", "format": "uri", "pattern": "^https?://"}),
            "Where limits are explained.",
        ),
        "draft": Field(
            Scalar(scalars.draft, {"enum": [6, 11]}),
            "The version of the IETF draft that RateLimit fields follow: 11, if not given, or 6 for separate fields.",
        ),
    },
)

_SHORTEST: Final = timedelta(milliseconds=1)

STORE: Final = Struct(
    "settings",
    {
        "budget": Field(
            Scalar(
                scalars.duration_between(_SHORTEST, timedelta(seconds=60), example="5 ms"),
                {**_TEXT, "examples": ["5 ms"]},
            ),
            "The time that the store may take; 5 ms by default.",
        ),
        "share": Field(
            Scalar(scalars.share, {**_TEXT, "pattern": r"^ *[0-9]{1,3}(\.[0-9]{1,3})? ?% *$", "examples": ["20%"]}),
            "Of each limit, how much all nodes together allow on routes that fail local; 20%, if not given.",
        ),
        "nodes": Field(
            _whole(1, 100_000, example=4),
            "The number of nodes assumed until heartbeats have counted them; 1 by default.",
        ),
        "remember": Field(
            _whole(0, 10_000_000, example=10_000),
            "The size of each process's denial cache; 0 turns it off.",
        ),
        "lease": Field(
            Scalar(
                scalars.duration_or_off(_SHORTEST, timedelta(seconds=1), example="100 ms"),
                {"anyOf": [{**_TEXT, "examples": ["100 ms"]}, {"enum": [0, False]}]},
            ),
            "For how long tokens are good that are prepaid for busy clients; 100 ms, if not given, 0 for none.",
        ),
    },
)

WHO: Final = {
    "ip": Field(ADDRESS, "An address, or a network."),
    "user": Field(IDENTITY, "A user."),
    "tenant": Field(IDENTITY, "A tenant."),
    "api_key": Field(
        Scalar(scalars.api_key, {"type": ["string", "integer"]}),
        "A key as the client sends it, or hmac: and its fingerprint.",
    ),
}
BLOCKED_ADDRESS: Final = {
    "ip": Field(
        Scalar(scalars.address_or_hash, ADDRESS.form),
        "An address, a network, or hmac: and the keyed hash of an address.",
    )
}
SUBNET: Final = {"subnet": Field(Scalar(scalars.subnet, {**_TEXT, "examples": ["203.0.113.0/24"]}), "A subnet.")}
VALIDITY: Final = {
    "valid_from": Field(INSTANT, "From when it holds."),
    "valid_until": Field(INSTANT, "Until when it holds."),
    "reason": Field(LABEL, "Why; for those who read the policy, and the decision log."),
}


def policy(kinds: Iterable[str] = ()) -> Struct:
    """The schema of a policy with these custom kinds of identity."""
    own = {kind: Field(IDENTITY, f"A {kind}, as the app supplies it.") for kind in kinds}
    client = {
        **WHO,
        **own,
        "tier": Field(NAME, "The tier that the client is in."),
        "label": Field(LABEL, "A name for people."),
    }
    override = {
        **WHO,
        **SUBNET,
        **own,
        "limit": Field(NAME, "The name of the limit whose numbers change."),
        "class": Field(NAME, "Only on routes of this class."),
        "bucket": Field(NUMBERS, "The other numbers."),
        "algorithm": Field(ALGORITHM, "The algorithm; the limit's by default."),
        **VALIDITY,
    }
    return Struct(
        "a policy",
        {
            "name": Field(NAME, "The name of the policy."),
            "tier": Field(NAME, "The tier of everybody whom `clients` does not place."),
            "on_failure": Field(ON_FAILURE, "The failure mode of routes and limits that do not set one."),
            "identity": Field(SETTINGS, "Where identities come from."),
            "answers": Field(ANSWERS, "Headers and rejections."),
            "store": Field(STORE, "Budget, denial cache, prepaid tokens, and behaviour during outages."),
            "routes": Field(ROUTES, "Classes and costs of routes."),
            "limits": Field(LIMITS, "The limits: which requests meet them, who is counted, how many may pass."),
            "tiers": Field(TIERS, "Numbers by tier, written from the tier's side."),
            "clients": Field(
                LazyList(Struct("a client", client, others=IDENTITY), "[{tenant: acme, tier: pro}]"),
                "Clients that are known by name.",
            ),
            "overrides": Field(
                LazyList(
                    Struct("an override", override, others=IDENTITY),
                    "[{tenant: acme, limit: search, bucket: 10000/minute}]",
                ),
                "Other numbers for one client, perhaps for a time.",
            ),
            "blocked": Field(
                LazyList(
                    Struct("a block", {**WHO, **BLOCKED_ADDRESS, **own, **VALIDITY}, others=IDENTITY),
                    "[{ip: 203.0.113.0/24, reason: scraping}]",
                ),
                "Blocked clients and networks.",
            ),
        },
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a policy, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Headgate policy",
        "description": "Which limits a request meets.",
        **policy().schema(),
    }
