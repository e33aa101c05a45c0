"""The limits that apply to a client, where each comes from, and how much of it is used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._limit_syntax import spell
from headgate.algorithms import ALGORITHMS
from headgate.control.config.rows import microseconds
from headgate.control.service.errors import log_and_summarize
from headgate.control.service.models import LimitUsage
from headgate.errors import HeadgateError
from headgate.policy.model import Override
from headgate.policy.snapshot import CLIENT_KINDS, UNMATCHED, Resolution

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from headgate.control.service.effective_policy import EffectivePolicy
    from headgate.decisions import Outcome
    from headgate.keys import Key
    from headgate.limiter import Limiter
    from headgate.limits import Limit
    from headgate.policy.model import Rule
    from headgate.policy.routes import Template
    from headgate.policy.snapshot import CompiledRule, Identities, RoutePlan

__all__ = [
    "ApplicableLimit",
    "CounterReading",
    "applicable_limits",
    "format_bucket",
    "key_batches",
    "limit_usages",
    "read_counters",
    "request_identities",
]

READ_BUDGET_S: Final = 0.5
MAX_KEYS_PER_READ: Final = 100
MAX_LIMITS: Final = 200
"""Limits that are shown of one client; a limit by endpoint has one counter per route."""

UNMATCHED_SEGMENT: Final = "~"
"""A path segment that no template contains."""
UNKNOWN_IDENTITY: Final = "\0"
"""Stands for an identity that is not known; no request has it."""
OTHER_PATHS: Final = "other paths"
EVERYWHERE: Final = "*"


@dataclass(slots=True)
class ApplicableLimit:
    """A limit that applies to a client, with the client's counter."""

    rule: Rule
    key: Key
    origin: Override | str | None
    """The source of the rate: the client's override, its tier, or None for the limit's default."""
    missing: tuple[str, ...]
    """The kinds of identity that the limit also counts by and that are not known, so that the counter is unknown."""
    own: bool
    """True if the counter counts this client alone."""
    can_override: bool
    routes: dict[str, None] = field(default_factory=dict)


class CounterReading(NamedTuple):
    """The outcome of a counter, or the reason why it is unknown."""

    outcome: Outcome | None
    unknown: str | None = None


def applicable_limits(
    effective: EffectivePolicy, known: Mapping[str, str], *, kind: str, now_us: int
) -> tuple[str | None, list[ApplicableLimit]]:
    """The tier of a client with these identities, and all limits that may apply to its requests."""
    snapshot, policy = effective.snapshot, effective.policy
    who = request_identities(known)
    found: dict[tuple[str, Key], ApplicableLimit] = {}
    tier: str | None = None
    for plan in _plans(effective):
        resolution = snapshot.resolve(plan, who, now_us)
        tier = resolution.tier
        for rule in (*plan.rules, *plan.shadows):
            if (each := _applicable_limit(rule, plan, known, kind, resolution)) is not None:
                at = found.setdefault((rule.rule.name, each.key), each)
                at.routes |= dict.fromkeys(_route_names(rule.rule, plan))
    if not policy.rules:
        tier = snapshot.resolve(snapshot.route("GET", "/"), who, now_us).tier
    order = {rule.name: number for number, rule in enumerate(policy.rules)}
    return tier, sorted(found.values(), key=lambda each: order[each.rule.name])


def request_identities(known: Mapping[str, str]) -> dict[str, str]:
    """The identities of a client's requests, as far as they are known; every request has an address."""
    return {"address": "", "ip": UNKNOWN_IDENTITY, **known}


def limit_usages(
    effective: EffectivePolicy, limits: Sequence[ApplicableLimit], readings: Mapping[Key, CounterReading]
) -> Iterator[LimitUsage]:
    """Views of limits with the readings of their counters."""
    several = {each.rule.name for each in limits if sum(other.rule is each.rule for other in limits) > 1}
    for each in limits[:MAX_LIMITS]:
        limit, origin = each.key.limit, each.origin
        override = origin if isinstance(origin, Override) else None
        reading = readings.get(each.key, CounterReading(None, _unknown(each)))
        outcome = reading.outcome
        until = override.validity.until if override is not None else None
        applies_everywhere = not (each.rule.templates or each.rule.classes) and each.rule.name not in several
        methods = "".join(f"{method} " for method in ["/".join(sorted(each.rule.methods))] if method)
        yield LimitUsage(
            limit=each.rule.name,
            by="+".join(each.rule.by) or "global",
            bucket=format_bucket(limit),
            algorithm=limit.algorithm,
            from_="override" if override is not None else "tier" if isinstance(origin, str) else "policy",
            override_id=effective.row_of(override),
            valid_until_us=None if until is None else microseconds(until),
            reason=None if override is None else override.reason,
            routes=(f"{methods}{EVERYWHERE}",) if applies_everywhere else tuple(each.routes),
            used=None if outcome is None else max(0, limit.capacity - outcome.remaining),
            remaining=None if outcome is None else outcome.remaining,
            capacity=limit.capacity,
            reset_s=None if outcome is None else outcome.reset_after,
            retry_s=None if outcome is None else _retry_s(limit, outcome),
            unknown=reading.unknown,
            shadow=each.rule.shadow,
            own=each.own,
            can_override=each.can_override,
        )


def read_counters(
    counters: Limiter | None, met: Iterable[ApplicableLimit]
) -> tuple[dict[Key, CounterReading], str | None]:
    """Read the counters of these limits within a time budget; also return the error message if that failed."""
    keys = [each.key for each in met if not each.missing][:MAX_LIMITS]
    if counters is None:
        why = "the admin server was started without --store, so usage is unknown"
        return _unread(keys, {}, why), why if keys else None
    found: dict[Key, CounterReading] = {}
    deadline = time.monotonic() + READ_BUDGET_S
    for batch in key_batches(keys):
        if time.monotonic() > deadline:
            why = "reading the counters took too long"
            return found | _unread(keys, found, why), why
        try:
            outcomes = counters.peek(*batch).outcomes
        except HeadgateError as error:
            why = log_and_summarize("the counters are unavailable", error)
            return found | _unread(keys, found, why), why
        found |= {key: CounterReading(outcome) for key, outcome in zip(batch, outcomes, strict=True)}
    return found, None


def format_bucket(limit: Limit) -> str:
    """The rate of a limit in the syntax of policies, without its algorithm."""
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    return f"{limit.quota}/{spell(limit.period)}{burst}"


# ------------------------------------------------------------------ routes


def _plans(effective: EffectivePolicy) -> Iterator[RoutePlan]:
    """The plans of all routes that the policy names, and of any other path."""
    policy, snapshot = effective.policy, effective.snapshot
    templates = dict.fromkeys(
        [*(route.template for route in policy.routes), *(each for rule in policy.rules for each in rule.templates)]
    )
    named = {method for route in policy.routes for method in route.methods}
    named |= {method for rule in policy.rules for method in rule.methods}
    # GET also stands for the methods that the policy does not name.
    methods = sorted({"GET", *named}, key=lambda method: (method != "GET", method))
    depth = max((len(template.segments) for template in templates), default=0)
    paths = [*map(_path, templates), f"/{UNMATCHED_SEGMENT}" * (depth + 1)]
    seen: dict[int, RoutePlan] = {}
    for path in paths:
        for method in methods:
            plan = snapshot.route(method, path)
            if id(plan) not in seen:
                seen[id(plan)] = plan
                yield plan


def _path(template: Template) -> str:
    segments = [segment or UNMATCHED_SEGMENT for segment in template.segments] + [
        UNMATCHED_SEGMENT
    ] * template.open_ended
    return "/" + "/".join(segments)


def _route_names(rule: Rule, plan: RoutePlan) -> list[str]:
    endpoint = OTHER_PATHS if plan.endpoint == UNMATCHED else plan.endpoint
    return [f"{method} {endpoint}" for method in sorted(rule.methods)] or [endpoint]


# ------------------------------------------------------------------ clients


def _applicable_limit(
    rule: CompiledRule, plan: RoutePlan, known: Identities, kind: str, resolution: Resolution
) -> ApplicableLimit | None:
    by = rule.rule.by
    counted_as = next((each for each in CLIENT_KINDS if known.get(each)), None)
    missing = tuple(
        each for each in by if each != "endpoint" and not (counted_as if each == "client" else known.get(each))
    )
    # With a placeholder for each unknown identity, the rule returns the rate that applies to each of them.
    who = {**request_identities(known), **{each: UNKNOWN_IDENTITY for each in missing if each != "client"}}
    key = rule.key(who, resolution.tier, resolution.now_us)
    if key is None:
        return None
    found = rule.apply(key, Resolution(plan, (), 0, (), who, resolution.tier, resolution.now_us, None))
    kinds = {counted_as if each == "client" else each for each in by}
    can_override = kind in by or ("client" in by and kind in CLIENT_KINDS)
    return ApplicableLimit(
        rule.rule, key, found.origin, missing, own=kind in kinds and not missing, can_override=can_override
    )


def _unknown(each: ApplicableLimit) -> str:
    names = {"ip": "IP", "api_key": "API key"}
    kinds = " and ".join(names.get(kind, kind.replace("_", " ")) for kind in each.missing)
    return f"counted per {kinds}" if each.missing else "not read"


# ------------------------------------------------------------------ counters


def key_batches(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """Split keys into batches, so that none has two keys of one counter with different rates."""
    left = list(dict.fromkeys(keys))
    while left:
        batch: dict[tuple[str, str], Key] = {}
        for key in left:
            if len(batch) < MAX_KEYS_PER_READ:
                batch.setdefault((key.limit.space, key.identity), key)
        yield list(batch.values())
        left = [key for key in left if batch.get((key.limit.space, key.identity)) is not key]


def _unread(keys: Iterable[Key], found: Mapping[Key, CounterReading], why: str) -> dict[Key, CounterReading]:
    return {key: CounterReading(None, why) for key in keys if key not in found}


def _retry_s(limit: Limit, outcome: Outcome) -> float | None:
    """Seconds until a request of cost 1 is allowed; None if the algorithm does not tell."""
    if outcome.remaining >= 1:
        return 0.0
    reset_us = outcome.reset_after_us
    if limit.algorithm == "fixed_window":
        return reset_us / 1_000_000
    part = limit.part or limit
    if ALGORITHMS[limit.algorithm].SHAPES_BURST:
        return max(0, reset_us - (part.capacity - 1) * part.ticks // part.tokens) / 1_000_000
    return None
