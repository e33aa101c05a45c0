"""Show which limits apply to a request, and why.

headgate explain policy.yaml GET /api/v1/search --ip 203.0.113.9 --tenant acme
headgate explain policy.yaml POST /login --user ada --at 2026-05-28T02:00:00Z
headgate explain policy.yaml GET / --identity device=4711 --json

exit code: 0 done, 1 invalid policy, 2 invalid call
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._limit_syntax import suggest
from headgate.bounds import fair_share_wait
from headgate.cli.check import check_file, print_problems
from headgate.cli.options import JSON, POLICY_FILE, SECRET_FILE, option, read_secret
from headgate.cli.terminal import GREEN, RED, YELLOW, Terminal, table, titled_table
from headgate.clock import EPOCH
from headgate.errors import InvalidInput
from headgate.limits import FairLimit
from headgate.policy import scalars
from headgate.policy.addresses import UNKNOWN, Addresses, Networks, canonical
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.lists.list_watcher import stored_lists
from headgate.policy.model import ADDRESSES, LIST, Block, Identity, Override, Policy, Rule
from headgate.policy.region_settings import RegionTerms, region_terms
from headgate.policy.routes import Matcher, decode_path, normalize_method
from headgate.policy.rule_bounds import rule_bounds
from headgate.policy.snapshot import (
    EVERY_ROUTE,
    LISTED,
    UNMATCHED,
    AppliedLimit,
    ConcurrencyScope,
    Resolution,
    RoutePlan,
    Snapshot,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from headgate.bounds import Bound
    from headgate.keys import Key
    from headgate.limits import Limit

__all__ = ["OPTIONS", "HypotheticalRequest", "explain", "run"]

OPTIONS = (
    option("file", metavar="FILE", help=POLICY_FILE),
    option("method", metavar="METHOD", help="GET, POST, ..."),
    option("path", metavar="PATH", help="path of the request; a query string is ignored"),
    option("--ip", metavar="ADDRESS", help="address of the client; default: unknown"),
    option("--user", metavar="USER", help="user, as the app identifies it"),
    option("--tenant", metavar="TENANT", help="tenant, as the app identifies it"),
    option("--api-key", metavar="KEY", help="API key; preferably its hash, hmac:..."),
    option("--identity", metavar="KIND=VALUE", action="append", default=[], help="any other identity; may be repeated"),
    option("--tier", metavar="TIER", help="tier, as the app assigns it"),
    option("--at", metavar="TIME", help="time, such as 2026-05-28T02:01:00Z; default: now"),
    JSON,
    SECRET_FILE,
)

_MODES: Final = {
    "open": "open: passes uncounted while the store is unavailable",
    "closed": "closed: answered with 503 while the store is unavailable",
    "local": "local: each node enforces its share of the limits while the store is unavailable",
}
_DERIVED_KINDS: Final = {
    "address": "give --ip",
    "client": "it is the tenant, API key, user or address",
    "endpoint": "it is the route's template",
    "ip": "give --ip",
    "subnet": "give --ip",
    "tier": "give --tier",
}
"""Kinds that --identity does not accept, with the remedy."""


@dataclass(frozen=True, slots=True)
class HypotheticalRequest:
    """The request that `headgate explain` explains."""

    method: str
    path: str
    """Decoded, as frameworks route by it."""
    who: Mapping[str, str]
    """Identities by kind, as adapters extract them; API keys are hashed."""
    at: datetime
    api_keys: ApiKeyHasher
    has_secret: bool
    """True if API keys have the same hashes as in production."""

    @classmethod
    def read(cls, arguments: Namespace, policy: Policy) -> HypotheticalRequest:
        secret = read_secret(arguments.secret_file)
        api_keys = ApiKeyHasher(secret or secrets.token_bytes(32))
        address = UNKNOWN if arguments.ip is None else canonical(arguments.ip)
        if address is None:
            raise InvalidInput(f"--ip {arguments.ip!r} is not an address; write it like 203.0.113.9 or 2001:db8::1")
        addresses = Addresses(policy.identity)
        who = {"address": address, "ip": addresses.identity(address), "subnet": addresses.subnet(address)}
        for kind, value in _identities(arguments):
            who[kind] = api_keys.fingerprint(value) if kind == "api_key" else value
        if (tier := arguments.tier) is not None:
            if tier not in policy.tiers:
                hint = suggest(tier, list(policy.tiers)) if policy.tiers else "it has no tiers"
                raise InvalidInput(f"--tier {tier!r} is not a tier of the policy; {hint}")
            who["tier"] = tier
        at = datetime.now(UTC) if arguments.at is None else scalars.instant(arguments.at)
        return cls(arguments.method, decode_path(arguments.path), who, at, api_keys, secret is not None)

    @property
    def now_us(self) -> int:
        return (self.at - EPOCH) // timedelta(microseconds=1)

    def value(self, identity: Identity) -> str:
        return self.api_keys.fingerprint(identity.value) if identity.kind == "api_key" else identity.value

    def describe(self, identity: Identity) -> str:
        return f"{identity.kind} {self.value(identity)}"

    def matches(self, identity: Identity) -> bool:
        if identity.kind == "ip":
            return Networks({identity.value: True}).find(self.who["address"]) is not None
        return self.who.get(identity.kind) == self.value(identity)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    report = check_file(arguments.file)
    if report.policy is None:
        print_problems(report, err)
        return report.code()
    if "/" in arguments.method:
        raise InvalidInput(f"{arguments.method!r} is not a method; write one first, as in GET {arguments.method}")
    explanation = explain(report.policy, HypotheticalRequest.read(arguments, report.policy))
    out.print(*([json.dumps(_as_dict(explanation), indent=2)] if arguments.json else _lines(explanation, out)))
    return 0


def _lines(found: Explanation, out: Terminal) -> Iterator[str]:
    facts = {
        "request": found.request,
        "sent by": ", ".join(found.sent_by),
        "route": "unmatched: no template matches the path" if found.route == UNMATCHED else found.route,
        "class": found.route_class or "none",
        "cost": f"{found.cost}",
        "tier": found.tier or "none",
        "on failure": _MODES[found.on_failure],
    }
    if found.overload is not None:
        facts["in progress"] = found.overload
    yield from table([*facts.items()], width=out.width)
    yield ""
    if found.is_exempt:
        yield f"{out.paint('exempt', GREEN)}: the route costs 0, so no limit applies"
    elif found.blocked is not None:
        yield f"{out.paint('blocked', RED)}: {found.blocked}"
        yield "The response is 403, and no limit is checked."
    elif not found.limits:
        yield f"{out.paint('no limit', YELLOW)}: the request passes and is not counted"
    else:
        rows = [
            [each.name, f"{each.limit}", f"{each.by}: {each.identity}", f"{each.cost}", "; ".join(each.why)]
            for each in found.limits
        ]
        yield from titled_table(["limit", "allows", "counted by", "cost", "why"], rows, out)
        yield from _region_lines(found.limits, out)
        yield from _bound_lines(found.limits, out)
    if found.left_out:
        yield ""
        yield from titled_table(["skipped", "why"], [[*each] for each in found.left_out], out)
    for note in found.notes:
        yield ""
        yield from table([["note:", note]], width=out.width)


def _region_lines(limits: tuple[MatchedLimit, ...], out: Terminal) -> Iterator[str]:
    rows = [
        [each.name, terms.mode, terms.overshoot, terms.latency, "" if terms.usable is None else f"{terms.usable:.1%}"]
        for each in limits
        if (terms := each.region) is not None
    ]
    if rows:
        yield ""
        yield from titled_table(["limit", "region", "all regions together", "latency", "usable from one"], rows, out)


def _bound_lines(limits: tuple[MatchedLimit, ...], out: Terminal) -> Iterator[str]:
    rows = [
        [each.name, bound.mode, f"at most {bound.over:,} over the limit"] for each in limits for bound in each.bounds
    ]
    if rows:
        yield ""
        yield from titled_table(["limit", "decided locally", "all nodes together"], rows, out)


def _as_dict(found: Explanation) -> dict[str, Any]:
    limits = []
    for each in found.limits:
        fields = each._asdict()
        limit, terms = fields.pop("limit"), fields.pop("region")
        if terms is not None:
            fields["region"] = {**terms._asdict(), "overshoot": terms.overshoot, "latency": terms.latency}
        fields["bounds"] = [bound._asdict() for bound in each.bounds]
        numbers = {name: getattr(limit, name) for name in ("quota", "period_us", "burst", "algorithm")}
        if limit.calendar is not None:
            numbers["period"] = str(limit.calendar)
        limits.append({"name": fields.pop("name"), **numbers, **fields})
    return {**found._asdict(), "limits": limits, "left_out": [each._asdict() for each in found.left_out]}


EXCESS: Final = {"wait": "wait", "drop": "are dropped", "close": "close the connection"}
_TEMPORARY_HASH: Final = (
    "the API key is hashed with a random secret: give --secret-file or HEADGATE_SECRET to see the stored hash"
)
_UNKNOWN_KEY: Final = (
    "the policy does not list this API key and accepts only known ones (identity: api_key: known_only), "
    "so the request is treated as one without a key"
)


class MatchedLimit(NamedTuple):
    name: str
    limit: Limit
    by: str
    identity: str
    cost: int
    is_shadow: bool
    why: tuple[str, ...]
    region: RegionTerms | None
    """None if the policy has neither regions nor limits that they share."""
    bounds: tuple[Bound, ...]
    """Of the modes in which nodes decide without asking the store; none for a shadow limit."""


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
    overload: str | None
    """The limit on requests in progress, and the priority; None if there is none."""
    is_exempt: bool
    blocked: str | None
    """The block that matches; no limit is checked then."""
    limits: tuple[MatchedLimit, ...]
    left_out: tuple[SkippedLimit, ...]
    notes: tuple[str, ...]


def explain(policy: Policy, request: HypotheticalRequest) -> Explanation:
    snapshot = Snapshot(policy, request.api_keys.fingerprint, lists=stored_lists(policy))
    notes = [_TEMPORARY_HASH] if "api_key" in request.who and not request.has_secret else []
    if snapshot.api_keys is not None and request.who.get("api_key", "") not in (*snapshot.api_keys, ""):
        notes.append(_UNKNOWN_KEY)
        request = replace(request, who={kind: value for kind, value in request.who.items() if kind != "api_key"})
    plan = snapshot.route(request.method, request.path)
    resolution = snapshot.resolve(plan, request.who, request.now_us)
    # Like a gate: an exempt route skips everything, and a block skips all limits.
    block = None if plan.is_exempt else resolution.block
    is_counted = not plan.is_exempt and block is None
    applied = _counted(resolution) if is_counted else ()
    left_out = (*_skipped_rules(resolution), *_skipped_overrides(policy, resolution, request)) if is_counted else ()
    method = normalize_method(request.method)
    has_regions = bool(policy.region_limits) or (policy.regions is not None and bool(policy.regions.stores))
    limits = []
    for each in applied:
        rule, why = each.rule, tuple(_reasons(each, resolution, request))
        by, key = "+".join(rule.by) or "global", each.key
        terms = region_terms(key.limit, policy.regions) if has_regions else None
        bounds = () if rule.shadow else _bounds(rule, key.limit, plan, policy)
        limits.append(MatchedLimit(rule.name, key.limit, by, key.identity, each.cost, rule.shadow, why, terms, bounds))
    return Explanation(
        request=f"{request.method} {request.path}" + (f" (as {method})" if method != request.method else ""),
        sent_by=tuple(_senders(request)),
        route=plan.endpoint,
        route_class=plan.route_class,
        cost=plan.cost,
        tier=resolution.tier,
        on_failure=plan.on_failure,
        overload=None if plan.concurrency is None else _concurrency(plan.concurrency),
        is_exempt=plan.is_exempt,
        blocked=None if block is None else _blocked(block, request),
        limits=tuple(limits),
        left_out=left_out,
        notes=(*notes, *_mounts(policy, plan, request.path)),
    )


def _blocked(block: Block, request: HypotheticalRequest) -> str:
    if block.identity.kind == LIST:  # its reason names the list
        return f"{request.who['address']} is {block.reason}"
    return f"{request.describe(block.identity)}{_terms(block)}"


def _concurrency(scope: ConcurrencyScope) -> str:
    settings = scope.settings.concurrency
    number = f"at most {settings.minimum}" if settings.is_fixed else "adaptive limit"
    of = "of the process" if scope.name == EVERY_ROUTE else f"of {scope.name}"
    fair = ", fair among clients" if scope.settings.fair else ""
    return f"{number} {of}, priority {scope.priority}{fair}"


def _bounds(rule: Rule, limit: Limit, plan: RoutePlan, policy: Policy) -> tuple[Bound, ...]:
    fails_local = plan.on_failure == "local"
    return rule_bounds(policy, rule, limit, fails_local=fails_local, nodes=policy.store.nodes)


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


def _counted(resolution: Resolution) -> tuple[AppliedLimit, ...]:
    """The limits that count a request or its messages, with those that are not enforced."""
    return (*resolution.applied_limits, *resolution.shadows, *resolution.message_limits)


def _reasons(applied: AppliedLimit, resolution: Resolution, request: HypotheticalRequest) -> Iterator[str]:
    rule = applied.rule
    if rule.net_of is not None:
        base = next(each for each in resolution.applied_limits if each.rule.name == rule.net_of)
        factor = applied.key.limit.quota // base.key.limit.quota
        yield f"unknown API key: also counted by address, at {factor} times {rule.net_of}"
        return
    yield _where(rule, resolution.route.route_class, request.path)
    if isinstance(applied.origin, Override):
        yield f"override{_terms(applied.origin)}"
    elif applied.origin is not None:
        yield f"tier {applied.origin}"
    if applied.lacks is not None:
        yield f"no {applied.lacks}: counted by address"
    if not rule.counts_requests:
        which = "" if rule.direction == "both" else f" {rule.direction}"
        yield f"counts {rule.counts}{which}: over it, they {EXCESS[rule.on_excess]}"
    if rule.lists:
        yield f"listed in {' and '.join(name for name in rule.lists if name in resolution.who.get(LISTED, '').split())}"
    if rule.settled:
        yield "reserved: the app settles the actual cost"
    if rule.count_when is not None:
        yield f"counted if {rule.count_when.text}"
    if rule.lease != "auto":
        yield f"{rule.lease} prepaid"
    if rule.split > 1:
        yield f"split over {rule.split} counters"
    if rule.leaves_region and rule.by:
        regions = resolution.route.policy.regions
        is_plain = regions is not None and regions.identities == "plain"
        yield f"other regions know the client {'in plain text' if is_plain else 'by a keyed hash'}"
    if isinstance(applied.key.limit, FairLimit):
        yield from _share(applied.key)
    if rule.shadow:
        yield "shadow: never rejects"


def _share(key: Key) -> Iterator[str]:
    """The terms of a fair limit for one of its clients."""
    limit = key.limit
    assert isinstance(limit, FairLimit)
    who = " ".join(map(str, key.parts)) or "all requests without an identity"
    yield f"fair share of {who}, weight {limit.weight}"
    wait_us = fair_share_wait(limit, limit.weight, 10 * limit.weight)
    if wait_us is None:
        yield "the burst is too small to guarantee shares to ten clients of this weight"
    else:
        yield f"next to nine busy clients of its weight, it waits at most {wait_us / 1_000_000:.3g} s within its share"


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


def _skipped_rules(resolution: Resolution) -> Iterator[SkippedLimit]:
    who, tier, plan = resolution.who, resolution.tier, resolution.route
    applied = {each.rule.name: each.rule for each in _counted(resolution)}
    candidates = (*plan.rules, *plan.shadows, *plan.message_rules)
    for rule in [each.rule for each in candidates if each.rule.name not in applied]:
        if rule.limit is None and tier not in rule.tiers:
            tiers = f"tier{'s' if len(rule.tiers) > 1 else ''} {', '.join(rule.tiers)}"
            yield SkippedLimit(rule.name, f"only for {tiers}; this client has {f'tier {tier}' if tier else 'no tier'}")
            continue
        if rule.lists and not set(rule.lists) & set(who.get(LISTED, "").split()):
            yield SkippedLimit(rule.name, f"only for addresses in {' or '.join(rule.lists)}; this one is not listed")
            continue
        lacks = next(kind for kind in rule.by if kind not in ("client", "endpoint") and not who.get(kind))
        if rule.missing == "skip":
            yield SkippedLimit(rule.name, f"no {lacks}, and the limit has missing: skip")
        else:
            other = next(name for name, each in applied.items() if set(each.by) & set(ADDRESSES) and not each.shadow)
            yield SkippedLimit(rule.name, f"no {lacks}, and {other} counts by address")


def _skipped_overrides(policy: Policy, resolution: Resolution, request: HypotheticalRequest) -> Iterator[SkippedLimit]:
    """Overrides of this client that do not apply."""
    applied = {each.rule.name: each.origin for each in _counted(resolution)}
    for override in policy.overrides:
        if override.rule not in applied or override is applied[override.rule] or not request.matches(override.identity):
            continue
        why_not = _why_not(override, resolution, request.at)
        yield SkippedLimit(override.rule, f"the override for {request.describe(override.identity)} {why_not}")


def _why_not(override: Override, resolution: Resolution, at: datetime) -> str:
    since, until = override.validity.since, override.validity.until
    if override.route_class not in (None, resolution.route.route_class):
        return f"is for class {override.route_class}"
    if since is not None and at < since:
        return f"starts {_instant(since)}"
    return f"ended {_instant(until)}" if until is not None and at >= until else "is superseded by another one"


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _identities(arguments: Namespace) -> list[tuple[str, str]]:
    found = [(kind, value) for kind in ("tenant", "user", "api_key") if (value := getattr(arguments, kind)) is not None]
    for pair in arguments.identity:
        kind, sign, value = pair.partition("=")
        if not kind or not sign:
            raise InvalidInput(f"--identity {kind!r} has no value; write it like device=4711")
        if kind in _DERIVED_KINDS:
            raise InvalidInput(f"--identity {kind} cannot be given; {_DERIVED_KINDS[kind]}")
        found.append((kind, value))
    kinds = [kind for kind, _ in found]
    for kind, value in found:
        if not value:
            raise InvalidInput(f"the {kind} is empty; omit it for a request that has none")
        if kinds.count(kind) > 1:
            raise InvalidInput(f"the {kind} is given twice; keep one")
    return found
