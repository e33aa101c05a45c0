"""Which limits a client meets, under which numbers, where these come from, and how much of each is used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._limit_syntax import spell
from headgate.algorithms import ALGORITHMS
from headgate.control.config.rows import microseconds
from headgate.control.service.errors import discreet
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

BUDGET: Final = 0.5
"""Seconds for all that is asked of the counters."""
AT_ONCE: Final = 100
"""Keys in one question."""
MOST_SHOWN: Final = 200
"""Limits of one client; one by endpoint has as many as there are routes."""

ANYTHING: Final = "~"
"""A segment of a path that no template names."""
SOMEBODY: Final = "\0"
"""In place of an identity that is not known: no request has it."""
OTHER_PATHS: Final = "other paths"
EVERYWHERE: Final = "*"


@dataclass(slots=True)
class ApplicableLimit:
    """A limit that a client meets."""

    rule: Rule
    key: Key
    origin: Override | str | None
    """Why these numbers: the client's override, its tier, or None for those of everybody."""
    missing: tuple[str, ...]
    """The identities that it also counts by, and that are not known of the client."""
    own: bool
    """Whether it counts this client, and nobody else."""
    can_override: bool
    """True if the client can have a limit of its own here."""
    routes: dict[str, None] = field(default_factory=dict)


class CounterReading(NamedTuple):
    """What a counter said; or why it said nothing."""

    outcome: Outcome | None
    unknown: str | None = None


def applicable_limits(
    effective: EffectivePolicy, known: Mapping[str, str], *, kind: str, now_us: int
) -> tuple[str | None, list[ApplicableLimit]]:
    """The tier of a client, and all limits that its requests may meet, by what is known of it."""
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
                at.routes |= dict.fromkeys(_places(rule.rule, plan))
    if not policy.rules:
        tier = snapshot.resolve(snapshot.route("GET", "/"), who, now_us).tier
    order = {rule.name: number for number, rule in enumerate(policy.rules)}
    return tier, sorted(found.values(), key=lambda each: order[each.rule.name])


def request_identities(known: Mapping[str, str]) -> dict[str, str]:
    """What requests of a client say of themselves, as far as is known: each has an address."""
    return {"address": "", "ip": SOMEBODY, **known}


def limit_usages(
    effective: EffectivePolicy, met: Sequence[ApplicableLimit], used: Mapping[Key, CounterReading]
) -> Iterator[LimitUsage]:
    """The same for people, with what the counters said."""
    several = {each.rule.name for each in met if sum(other.rule is each.rule for other in met) > 1}
    for each in met[:MOST_SHOWN]:
        limit, origin = each.key.limit, each.origin
        override = origin if isinstance(origin, Override) else None
        use = used.get(each.key, CounterReading(None, _unknown(each)))
        outcome = use.outcome
        until = override.validity.until if override is not None else None
        anywhere = not (each.rule.templates or each.rule.classes) and each.rule.name not in several
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
            routes=(f"{methods}{EVERYWHERE}",) if anywhere else tuple(each.routes),
            used=None if outcome is None else max(0, limit.capacity - outcome.remaining),
            remaining=None if outcome is None else outcome.remaining,
            capacity=limit.capacity,
            reset_s=None if outcome is None else outcome.reset_after,
            retry_s=None if outcome is None else _retry_s(limit, outcome),
            unknown=use.unknown,
            shadow=each.rule.shadow,
            own=each.own,
            can_override=each.can_override,
        )


def read_counters(
    counters: Limiter | None, met: Iterable[ApplicableLimit]
) -> tuple[dict[Key, CounterReading], str | None]:
    """What the counters say of these limits, within a budget; and the trouble there was in asking."""
    keys = [each.key for each in met if not each.missing][:MOST_SHOWN]
    if counters is None:
        why = "the admin server was given no counters"
        return {
            key: CounterReading(None, why) for key in keys
        }, f"{why}, so that it cannot tell what is used" if keys else None
    found: dict[Key, CounterReading] = {}
    ends = time.monotonic() + BUDGET
    for some in key_batches(keys):
        if time.monotonic() > ends:
            return found | _left(keys, found, "the counters took too long"), "the counters take too long to answer"
        try:
            outcomes = counters.peek(*some).outcomes
        except HeadgateError as error:
            why = discreet("the counters cannot be asked", error)
            return found | _left(keys, found, why), why
        found |= {key: CounterReading(outcome) for key, outcome in zip(some, outcomes, strict=True)}
    return found, None


def format_bucket(limit: Limit) -> str:
    """Its numbers in the words of policies; the algorithm is told apart."""
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    return f"{limit.quota}/{spell(limit.period)}{burst}"


# ------------------------------------------------------------------ where


def _plans(effective: EffectivePolicy) -> Iterator[RoutePlan]:
    """What there is for requests to meet: each route that the policy names, and any other path."""
    policy, snapshot = effective.policy, effective.snapshot
    templates = dict.fromkeys(
        [*(route.template for route in policy.routes), *(each for rule in policy.rules for each in rule.templates)]
    )
    named = {method for route in policy.routes for method in route.methods}
    named |= {method for rule in policy.rules for method in rule.methods}
    # GET stands for all that nobody names.
    methods = sorted({"GET", *named}, key=lambda method: (method != "GET", method))
    depth = max((len(template.segments) for template in templates), default=0)
    paths = [*map(_path, templates), f"/{ANYTHING}" * (depth + 1)]
    seen: dict[int, RoutePlan] = {}
    for path in paths:
        for method in methods:
            plan = snapshot.route(method, path)
            if id(plan) not in seen:
                seen[id(plan)] = plan
                yield plan


def _path(template: Template) -> str:
    segments = [segment or ANYTHING for segment in template.segments] + [ANYTHING] * template.open_ended
    return "/" + "/".join(segments)


def _places(rule: Rule, plan: RoutePlan) -> list[str]:
    endpoint = OTHER_PATHS if plan.endpoint == UNMATCHED else plan.endpoint
    return [f"{method} {endpoint}" for method in sorted(rule.methods)] or [endpoint]


# ------------------------------------------------------------------ who


def _applicable_limit(
    rule: CompiledRule, plan: RoutePlan, known: Identities, kind: str, met: Resolution
) -> ApplicableLimit | None:
    by = rule.rule.by
    counted_as = next((each for each in CLIENT_KINDS if known.get(each)), None)
    missing = tuple(
        each for each in by if each != "endpoint" and not (counted_as if each == "client" else known.get(each))
    )
    # With somebody in place of whom we don't know, the rule says what numbers there are for each of them.
    who = {**request_identities(known), **{each: SOMEBODY for each in missing if each != "client"}}
    key = rule.key(who, met.tier, met.now_us)
    if key is None:
        return None
    found = rule.apply(key, Resolution(plan, (), 0, (), who, met.tier, met.now_us, None))
    kinds = {counted_as if each == "client" else each for each in by}
    can_override = kind in by or ("client" in by and kind in CLIENT_KINDS)
    return ApplicableLimit(
        rule.rule, key, found.origin, missing, own=kind in kinds and not missing, can_override=can_override
    )


def _unknown(each: ApplicableLimit) -> str:
    names = {"ip": "IP", "api_key": "API key"}
    kinds = " and ".join(names.get(kind, kind.replace("_", " ")) for kind in each.missing)
    return f"counted per {kinds}" if each.missing else "not asked"


# ------------------------------------------------------------------ how much


def key_batches(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """The keys in pieces. Two that are one counter under different numbers cannot be asked about at once."""
    left = list(dict.fromkeys(keys))
    while left:
        counters: set[tuple[str, str]] = set()
        some: list[Key] = []
        rest: list[Key] = []
        for key in left:
            counter = (key.limit.space, key.identity)
            if counter in counters or len(some) == AT_ONCE:
                rest.append(key)
            else:
                counters.add(counter)
                some.append(key)
        yield some
        left = rest


def _left(keys: Iterable[Key], found: Mapping[Key, CounterReading], why: str) -> dict[Key, CounterReading]:
    return {key: CounterReading(None, why) for key in keys if key not in found}


def _retry_s(limit: Limit, outcome: Outcome) -> float | None:
    """Until a request that costs 1 passes: a bucket fills at a known rate, a window ends at a known time."""
    if outcome.remaining >= 1:
        return 0.0
    reset_us = outcome.reset_after_us
    if limit.algorithm == "fixed_window":
        return reset_us / 1_000_000
    part = limit.part or limit
    if ALGORITHMS[limit.algorithm].SHAPES_BURST:
        return max(0, reset_us - (part.capacity - 1) * part.ticks // part.tokens) / 1_000_000
    return None
