"""Explains which limits apply to a request, and why."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.policy.addresses import Networks
from headgate.policy.model import ADDRESSES, Override
from headgate.policy.routes import Matcher, normalize_method
from headgate.policy.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.cli.request import HypotheticalRequest
    from headgate.limits import Limit
    from headgate.policy.model import Block, Identity, Policy, Rule, Validity
    from headgate.policy.snapshot import AppliedLimit, Resolution, RoutePlan

__all__ = ["Explanation", "MatchedLimit", "SkippedLimit", "explain"]

_TEMPORARY_HASH: Final = (
    "the API key is hashed with a random secret: give --secret-file or HEADGATE_SECRET to see the stored hash"
)
_UNKNOWN_KEY: Final = (
    "the policy does not list this API key and accepts only known ones (identity: api_key: known_only), "
    "so the request is treated as one without a key"
)


class MatchedLimit(NamedTuple):
    """A limit that applies to the request."""

    name: str
    limit: Limit
    by: str
    identity: str
    """The identity as stored."""
    cost: int
    is_shadow: bool
    why: tuple[str, ...]


class SkippedLimit(NamedTuple):
    """A limit or override that might be expected to apply, but does not."""

    name: str
    why: str


class Explanation(NamedTuple):
    """The effect of a policy on a request, before anything is counted."""

    request: str
    sent_by: tuple[str, ...]
    route: str
    route_class: str | None
    cost: int
    tier: str | None
    on_failure: str
    is_exempt: bool
    blocked: str | None
    """The block that matches; no limit is checked then."""
    limits: tuple[MatchedLimit, ...]
    left_out: tuple[SkippedLimit, ...]
    notes: tuple[str, ...]


def explain(policy: Policy, request: HypotheticalRequest) -> Explanation:
    snapshot = Snapshot(policy, request.api_keys.fingerprint)
    notes = [_TEMPORARY_HASH] if "api_key" in request.who and not request.has_secret else []
    if snapshot.api_keys is not None and request.who.get("api_key", "") not in (*snapshot.api_keys, ""):
        notes.append(_UNKNOWN_KEY)
        request = replace(request, who={kind: value for kind, value in request.who.items() if kind != "api_key"})
    plan = snapshot.route(request.method, request.path)
    resolution = snapshot.resolve(plan, request.who, request.now_us)
    # Like a gate: an exempt route skips everything, and a block skips all limits.
    block = None if plan.is_exempt else resolution.block
    is_counted = not plan.is_exempt and block is None
    met = (*resolution.applied_limits, *resolution.shadows) if is_counted else ()
    left_out = (*_skipped_rules(resolution), *_skipped_overrides(policy, resolution, request)) if is_counted else ()
    method = normalize_method(request.method)
    return Explanation(
        request=f"{request.method} {request.path}" + (f" (as {method})" if method != request.method else ""),
        sent_by=tuple(_senders(request)),
        route=plan.endpoint,
        route_class=plan.route_class,
        cost=plan.cost,
        tier=resolution.tier,
        on_failure=plan.on_failure,
        is_exempt=plan.is_exempt,
        blocked=None if block is None else f"{_describe(block.identity, request)}{_terms(block)}",
        limits=tuple([_limit(each, resolution, request) for each in met]),
        left_out=left_out,
        notes=(*notes, *_mounts(policy, plan, request.path)),
    )


def _mounts(policy: Policy, plan: RoutePlan, path: str) -> Iterator[str]:
    """Notes about limits whose paths match only the end of this path: the path of a mounted app may be meant."""
    applied = {each.rule.name for each in (*plan.rules, *plan.shadows)}
    segments = [segment for segment in path.split("/") if segment]
    for rule in policy.rules:
        named = [each for each in rule.templates if each.segments]
        if rule.name in applied or not named:
            continue
        matcher = Matcher(named)
        for start in range(1, len(segments)):
            found = matcher.match("/" + "/".join(segments[start:]))
            if found:
                mount, text = "/" + "/".join(segments[:start]), named[found[0]].text
                yield (
                    f"{rule.name} applies to {text}, which matches only the end of this path: if an app is mounted at "
                    f"{mount} and the gate is in front of it, write {mount}{text}"
                )
                break


def _senders(request: HypotheticalRequest) -> Iterator[str]:
    address, counted = request.who["address"], request.who["ip"]
    yield address if address == counted else f"{address} (counted as {counted})"
    others = {kind: value for kind, value in request.who.items() if kind not in ("address", *ADDRESSES, "tier")}
    yield from (f"{kind} {value}" for kind, value in others.items())


# ------------------------------------------------------------------ limits that apply


def _limit(met: AppliedLimit, resolution: Resolution, request: HypotheticalRequest) -> MatchedLimit:
    rule, key = met.rule, met.key
    by = "+".join(rule.by) or "global"
    why = tuple(_reasons(met, resolution, request))
    return MatchedLimit(rule.name, key.limit, by, key.identity, met.cost, rule.shadow, why)


def _reasons(met: AppliedLimit, resolution: Resolution, request: HypotheticalRequest) -> Iterator[str]:
    rule = met.rule
    if rule.net_of is not None:
        yield f"unknown API key: also counted by address, at {_factor(met, resolution)} times {rule.net_of}"
        return
    yield _where(rule, resolution.route.route_class, request.path)
    if isinstance(met.origin, Override):
        yield f"override{_terms(met.origin)}"
    elif met.origin is not None:
        yield f"tier {met.origin}"
    if met.lacks is not None:
        yield f"no {met.lacks}: counted by address"
    if rule.settled:
        yield "reserved: the app settles the actual cost"
    if rule.count_when is not None:
        yield f"counted if {rule.count_when.text}"
    if rule.lease != "auto":
        yield f"{rule.lease} prepaid"
    if rule.split > 1:
        yield f"split over {rule.split} counters"
    if rule.shadow:
        yield "shadow: never rejects"


def _factor(met: AppliedLimit, resolution: Resolution) -> int:
    """The ratio of a limit for unknown keys to the limit that it belongs to."""
    base = next(each for each in resolution.applied_limits if each.rule.name == met.rule.net_of)
    return met.key.limit.quota // base.key.limit.quota


def _where(rule: Rule, route_class: str | None, path: str) -> str:
    if not rule.templates and not rule.classes:
        where = "every request"
    elif route_class in rule.classes:
        where = f"class {route_class}"
    else:
        where = f"route {rule.templates[Matcher(rule.templates).match(path)[0]]}"
    return f"{where}, {'/'.join(sorted(rule.methods))} only" if rule.methods else where


def _terms(entry: Override | Block) -> str:
    until, reason = entry.validity.until, entry.reason
    return (f" until {_instant(until)}" if until else "") + (f": {reason}" if reason else "")


# ------------------------------------------------------------------ limits that do not apply


def _skipped_rules(resolution: Resolution) -> Iterator[SkippedLimit]:
    who, tier, plan = resolution.who, resolution.tier, resolution.route
    met = {each.rule.name: each.rule for each in (*resolution.applied_limits, *resolution.shadows)}
    for rule in [each.rule for each in (*plan.rules, *plan.shadows) if each.rule.name not in met]:
        if rule.limit is None and tier not in rule.tiers:
            tiers = f"tier{'s' if len(rule.tiers) > 1 else ''} {', '.join(rule.tiers)}"
            yield SkippedLimit(rule.name, f"only for {tiers}; this client has {f'tier {tier}' if tier else 'no tier'}")
            continue
        lacks = next(kind for kind in rule.by if kind not in ("client", "endpoint") and not who.get(kind))
        if rule.missing == "skip":
            yield SkippedLimit(rule.name, f"no {lacks}, and the limit has missing: skip")
        else:
            other = next(name for name, each in met.items() if set(each.by) & set(ADDRESSES) and not each.shadow)
            yield SkippedLimit(rule.name, f"no {lacks}, and {other} counts by address")


def _skipped_overrides(policy: Policy, resolution: Resolution, request: HypotheticalRequest) -> Iterator[SkippedLimit]:
    """Overrides of this client that do not apply."""
    met = {each.rule.name: each.origin for each in (*resolution.applied_limits, *resolution.shadows)}
    for override in policy.overrides:
        if override.rule not in met or override is met[override.rule] or not _matches(override.identity, request):
            continue
        why_not = _why_not(override, resolution, request.at)
        yield SkippedLimit(override.rule, f"the override for {_describe(override.identity, request)} {why_not}")


def _why_not(override: Override, resolution: Resolution, at: datetime) -> str:
    if override.route_class not in (None, resolution.route.route_class):
        return f"is for class {override.route_class}"
    return _over(override.validity, at) or "is superseded by another one"


def _over(validity: Validity, at: datetime) -> str | None:
    if validity.since is not None and at < validity.since:
        return f"starts {_instant(validity.since)}"
    if validity.until is not None and at >= validity.until:
        return f"ended {_instant(validity.until)}"
    return None


def _matches(identity: Identity, request: HypotheticalRequest) -> bool:
    if identity.kind == "ip":
        return Networks({identity.value: True}).find(request.who["address"]) is not None
    return request.who.get(identity.kind) == _value(identity, request)


def _describe(identity: Identity, request: HypotheticalRequest) -> str:
    return f"{identity.kind} {_value(identity, request)}"


def _value(identity: Identity, request: HypotheticalRequest) -> str:
    return request.api_keys.fingerprint(identity.value) if identity.kind == "api_key" else identity.value


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
