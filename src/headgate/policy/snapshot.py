"""A policy compiled for requests: finds the limits of a request, their numbers and their keys.

Everything that depends only on the route is computed on the first request to it and kept. What remains for each request
depends on the client: its tier, its overrides and its keys. Snapshots never change.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from headgate.calendars import Calendar
from headgate.errors import InvalidLimit
from headgate.keys import is_keyed_hash
from headgate.limits import FairLimit, Limit
from headgate.policy.addresses import Networks
from headgate.policy.model import (
    ADDRESSES,
    LIST,
    AllowedClient,
    Block,
    Identity,
    LeaseMode,
    Override,
    Policy,
    RouteMode,
    RouteRule,
    Rule,
    Validity,
    net_name,
)  # fmt: skip
from headgate.policy.routes import METHODS, Matcher, Template, normalize_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headgate.abuse.model import AbuseScenario
    from headgate.keys import Key
    from headgate.overload.load_shedder import Priority
    from headgate.policy.lists.list_watcher import ListLookup
    from headgate.policy.model import OverloadSettings
    from headgate.stores.operations import Cost

__all__ = [
    "AMBIGUOUS", "CLIENT_KINDS", "EVERY_ROUTE", "LISTED", "OTHER_API_KEYS", "UNMATCHED", "AppliedLimit",
    "CompiledRule", "ConcurrencyScope", "Identities", "Resolution", "RoutePlan", "Snapshot", "UnknownKeyNet",
    "client_kind", "concurrency_settings",
]  # fmt: skip

Identities: TypeAlias = "Mapping[str, str]"
"""The identities of a request by kind; `address` is the full address of the client, `ip` the part that is counted."""

CLIENT_KINDS: Final = ("tenant", "api_key", "user", "ip")
"""`by: client` counts by the first of these that a request has."""

OTHER_API_KEYS: Final = "api_keys"
"""The kind for requests with several API keys: the hashes of those that are not counted, separated by spaces. A request
is blocked if any of its keys is."""

LISTED: Final = "lists"
"""The kind for requests from listed addresses: the names of these lists, separated by spaces."""

AMBIGUOUS: Final = "ambiguous"
"""The shared API key of all requests that repeat the header: such a client gets no counter of its own."""

NO_TIER: Final = "none"
UNTRUSTED_KINDS: Final = frozenset({"api_key", "client"})
"""The kinds of `by` whose values a client can invent."""
GUARD_KINDS: Final = frozenset({*ADDRESSES, "endpoint"})

EVERY_ROUTE: Final = "*"
"""The name of the concurrency limit of a whole process."""

UNMATCHED: Final = "unmatched"
"""The endpoint of all paths that no template matches; they share their counters."""

STRICTNESS: Final = ("closed", "local", "open")
ALWAYS: Final = Validity()
ANYWHERE: Final = object()

MOST_TIGHTENED: Final = 1024
"""Limits for clients under an action that are cached: a few factors of each limit."""

MOST_PATHS: Final = 4096
LONGEST_PATH: Final = 200
"""Together they bound the cache of paths to about a megabyte."""

K = TypeVar("K")
V = TypeVar("V")

_new_tuple = tuple.__new__


def client_kind(who: Identities) -> str:
    """The kind of identity that names a client: the first of `CLIENT_KINDS` that it has, else its first one.

    >>> client_kind({"address": "203.0.113.9", "ip": "203.0.113.9", "user": "ada"}), client_kind({"path": "/search"})
    ('user', 'path')
    """
    for kind in CLIENT_KINDS:
        if who.get(kind):
            return kind
    return "ip" if "ip" in who else next(iter(who), "ip")


class AppliedLimit(NamedTuple):
    """A limit that applies to a request."""

    rule: Rule
    key: Key
    cost: int
    origin: Override | str | None
    """The source of the numbers: an override, the name of a tier, or None for the rule itself."""
    lacks: str | None
    """The kind of identity that the request lacks, so that it is counted by address instead."""


class Resolution(NamedTuple):
    """The limits of a request."""

    route: RoutePlan
    keys: tuple[Key, ...]
    cost: Cost
    """The cost of `keys`, in the form that stores take."""
    rules: Sequence[CompiledRule]
    """The rules of `keys`, in the same order."""
    who: Identities
    tier: str | None
    now_us: int
    """A time at which this applied. It may be that of an earlier request of the client, if no override or block has
    begun or ended since."""
    block: Block | None

    @property
    def applied_limits(self) -> tuple[AppliedLimit, ...]:
        """The limits in the order of the policy, each with the source of its numbers."""
        return tuple(rule.apply(key, self) for rule, key in zip(self.rules, self.keys, strict=True))

    @property
    def shadows(self) -> tuple[AppliedLimit, ...]:
        return self._apply(self.route.shadows)

    @property
    def message_limits(self) -> tuple[AppliedLimit, ...]:
        """The limits that count messages or bytes of the connection."""
        return self._apply(self.route.message_rules)

    def _apply(self, rules: Iterable[CompiledRule]) -> tuple[AppliedLimit, ...]:
        return tuple(
            rule.apply(key, self) for rule in rules if (key := rule.key(self.who, self.tier, self.now_us)) is not None
        )


class ConcurrencyScope(NamedTuple):
    """The limit on requests in progress that applies to a route."""

    name: str
    """The class of the route or its template, if the limit is its own; else `EVERY_ROUTE`."""
    settings: OverloadSettings
    priority: Priority


class RoutePlan:
    """The part of a resolution that all requests of a route and method share."""

    __slots__ = (
        "concurrency", "cost", "costs", "endpoint", "has_address_rule", "has_overrides", "is_exempt", "kinds", "leases",
        "looks_at_agents", "message_rules", "nets", "on_failure", "policy", "priority", "quotas", "route_class",
        "rules", "scenarios", "settles", "shadows",
    )  # fmt: skip

    def __init__(
        self,
        snapshot: Snapshot,
        templates: tuple[Template, ...],
        method: str,
        scenarios: tuple[AbuseScenario, ...] = (),
    ) -> None:
        """`scenarios` are those for the path; the others of the policy may apply by the class of the route."""
        policy = self.policy = snapshot.policy
        route = snapshot.route_rule(templates, method)
        self.endpoint = snapshot.view or (templates[0].text if templates else UNMATCHED)
        self.route_class = route.route_class if route else None
        self.cost = route.cost if route else 1
        self.is_exempt = self.cost == 0
        rules = snapshot.matching_rules(templates, method, self.route_class)
        enforced = [rule for rule in rules if not rule.shadow and rule.counts_requests]
        self.has_address_rule = any(map(_counts_all_by_address, enforced))
        compiled = [] if self.is_exempt else [CompiledRule(rule, snapshot, self) for rule in rules]
        requests = [each for each in compiled if each.rule.counts_requests]
        counted = tuple(each for each in requests if not each.rule.shadow and not each.rule.is_quota)
        self.quotas = tuple(each for each in requests if each.rule.is_quota)
        self.rules = (*counted, *self.quotas)
        """Those that are charged to the ledger follow those that are counted in the store."""
        self.message_rules = tuple(each for each in compiled if not each.rule.counts_requests)
        """Those that count messages or bytes of connections."""
        self.shadows = tuple(each for each in compiled if each.rule.shadow)
        self.costs = _join_costs([rule.cost for rule in self.rules])
        """The cost of requests to which all rules apply."""
        self.on_failure: RouteMode = min(
            [
                mode
                for mode in (route and route.on_failure, *(rule.on_failure for rule in rules if not rule.shadow))
                if mode
            ],
            key=STRICTNESS.index,
            default=policy.on_failure,
        )
        self.kinds: frozenset[str] = snapshot.kinds | {kind for rule in compiled for kind in rule.kinds}
        """All kinds of identity that matter on the route."""
        self.priority: Priority = "normal" if route is None else route.priority
        self.concurrency = None if self.is_exempt else policy_concurrency(policy, route)
        if self.concurrency is not None and self.concurrency.settings.fair:
            self.kinds |= {*CLIENT_KINDS}
        applied = [] if self.is_exempt else snapshot.scenarios_of(scenarios, method, self.route_class)
        self.scenarios = tuple([scenario.name for scenario in applied])
        """The names of the scenarios that look at its requests."""
        self.looks_at_agents = any(scenario.looks_at_agents for scenario in applied)
        self.kinds |= {kind for scenario in applied for kind in scenario.kinds}
        self.leases = any(limit.algorithm == "concurrency" for rule in enforced for limit in rule.limits)
        self.has_overrides = any(rule.has_overrides for rule in self.rules)
        self.settles = any(rule.settled or rule.count_when is not None for rule in enforced) or bool(self.message_rules)
        """True if the gate has work after the admission of a request."""
        self.nets = tuple(
            UnknownKeyNet(each, snapshot, self)
            for each in self.rules
            if snapshot.unknown_key_factor is not None
            and not UNTRUSTED_KINDS.isdisjoint(each.rule.by)
            and not any(other.limit is not None and guards(other, each.rule) for other in enforced)
        )
        """For requests with unknown API keys, unless a limit by address applies to every request of the route."""


class Snapshot:
    """A compiled policy. `fingerprint` computes keyed hashes of the API keys in it.

    With `trusts_keys`, the app has verified every API key, so none counts as unknown. `hash_identity` computes keyed
    hashes of other identities from kind and value, for blocks that name a client by its hash; without it, such blocks
    match nothing.
    """

    def __init__(
        self,
        policy: Policy,
        fingerprint: Callable[[str], str] = str,
        hash_identity: Callable[[str, str], str] | None = None,
        *,
        hash_shared: Callable[[str, str], str] | None = None,
        trusts_keys: bool = False,
        view: str | None = None,
        lists: ListLookup | None = None,
    ) -> None:
        """`lists` finds the reputation lists with an address; without it, no address is listed.

        `view` is the name of a view that declares these limits itself, and the endpoint of all its requests.

        `hash_shared` computes, from kind and value, the form in which identities are counted by limits that several
        regions share; None for plain text.
        """
        self.policy = policy
        self.hash_shared = hash_shared
        self._keeps_addresses = policy.regions is not None and "ip" in policy.regions.stay
        self.view = view
        self._lists = lists if _uses_lists(policy) else None
        self._fingerprints = {written: fingerprint(written) for written in policy.api_keys}
        settings = policy.identity
        self.unknown_key_factor = None if trusts_keys or settings.known_keys_only else settings.unknown_key_factor
        self.vouched_keys = frozenset([AMBIGUOUS, *(self._fingerprints[key] for key in policy.vouched_api_keys)])
        """The hashes of the API keys of clients and overrides. All others are unknown."""
        templates = [route.template for route in policy.routes]
        templates += [template for rule in policy.rules for template in rule.templates]
        self._templates = list(dict.fromkeys(templates))
        self._matcher = Matcher(self._templates)
        scenarios = () if policy.abuse is None or view is not None else policy.abuse.scenarios
        by_template = [(template, each) for each in scenarios for template in each.templates]
        self._scenario_matcher = Matcher([template for template, _ in by_template])
        self._scenarios_by_match = [scenario for _, scenario in by_template]
        self._general_scenarios = [each for each in scenarios if not each.templates]
        """The scenarios that look at all routes, or at those of some classes."""
        self._class_scenarios = [each for each in scenarios if each.templates and each.classes]
        self._route_rules = _group((route.template, route) for route in policy.routes)
        self._rules_by_target = _group(
            (target, number)
            for number, rule in enumerate(policy.rules)
            for target in (*rule.templates, *rule.classes) or (ANYWHERE,)
        )
        """The indices of the rules for a template, for a class, or for all routes."""
        self._routes: dict[tuple[tuple[int, ...], tuple[int, ...], str], RoutePlan] = {}
        self._net_limits: dict[Limit, Limit] = {}
        self._plan_cache: dict[str, dict[str | tuple[str, str], RoutePlan]] = {method: {} for method in METHODS}
        """A cache of plans by method and path; in mounted apps, by both paths."""
        named = [each.methods for each in policy.routes] + [each.methods for each in policy.rules]
        named += [each.methods for each in scenarios]
        self._methods = frozenset([*METHODS, *(normalize_method(method) for methods in named for method in methods)])
        """The methods that the policy distinguishes; all others share a plan."""
        self._tiers = self._lookups((client.identity, client.tier) for client in policy.clients if client.tier)
        with_calendar = [
            client for client in policy.clients if client.timezone is not None or client.starts is not None
        ]
        self.calendars = self._lookups((client.identity, client) for client in with_calendar)
        """Lookups for the clients whose record has a time zone or a first day."""
        self.weights = self._lookups(
            (client.identity, client) for client in policy.clients if client.weight is not None
        )
        """Lookups for the clients whose record has a weight."""
        self._calendar_limits: dict[tuple[Limit, str, int | str | None], Limit] = {}
        self._blocks = self._identity_lookups(policy.blocked, hash_identity)
        self._allowed = self._identity_lookups(policy.allowed, hash_identity)
        self.allowed_kinds = frozenset(kind for kind, _ in self._allowed)
        """The kinds of identity by which clients are allowed."""
        self._tightened: dict[tuple[Limit, int], Limit] = {}
        self._overrides = _group((override.rule, override) for override in policy.overrides)
        self._lookups_of_rules = {
            name: self._lookups((override.identity, override) for override in overrides)
            for name, overrides in self._overrides.items()
        }
        self.api_keys = frozenset(self._fingerprints.values()) if settings.known_keys_only else None
        """The hashes of all valid API keys, if the policy accepts only known ones; else None."""
        self.kinds = frozenset(kind for kind, _ in (*self._tiers, *self._blocks)) - {LISTED}
        self.limits_messages = any(not rule.counts_requests for rule in policy.rules)
        self.tiers = frozenset({*policy.tiers, policy.default_tier} - {None})

    def route(self, method: str, path: str, mounted_path: str | None = None) -> RoutePlan:
        """The plan for a method and path; in a mounted app, `mounted_path` is the path below the mount."""
        plan = self._plan_cache.get(method, {}).get(path if mounted_path is None else (path, mounted_path))
        return plan or self._find_plan(method, path, mounted_path)

    def resolve(self, route: RoutePlan, who: Identities, now_us: int) -> Resolution:
        """The limits of a request; `who` contains those of the route's `kinds` that the request has."""
        if self._lists is not None and (names := self._lists.find(who.get("address", ""))):
            who = {**who, LISTED: " ".join(names)}
        block = self._block(who, now_us) if self._blocks else None
        tier = self._tier(who, now_us) if self.tiers else None
        keys: list[Key] = []
        rules: Sequence[CompiledRule] = route.rules
        for rule in rules:
            # Fast path: no overrides, and one identity, which the request has.
            if (value := who.get(rule.simple_kind)) and (limit := rule.tiers.get(tier, rule.limit)) is not None:
                keys.append(limit.by(value))
            elif (key := rule.key(who, tier, now_us)) is not None:
                keys.append(key)
        cost = route.costs
        if len(keys) < len(rules):
            rules = [rule for rule in rules if rule.key(who, tier, now_us) is not None]
            cost = _join_costs([rule.cost for rule in rules])
        if route.nets and who.get("api_key", AMBIGUOUS) not in self.vouched_keys:
            found = [
                (net, key)
                for net in route.nets
                if not any(guards(rule.rule, net.rule) for rule in rules)
                and (key := net.key(who, tier, now_us)) is not None
            ]
            if found:
                first_quota = len(rules) - sum([rule.rule.is_quota for rule in rules])
                rules = [*rules[:first_quota], *(net for net, _ in found), *rules[first_quota:]]
                keys[first_quota:first_quota] = [key for _, key in found]
                cost = _join_costs([rule.cost for rule in rules])
        return _new_tuple(Resolution, (route, tuple(keys), cost, rules, who, tier, now_us, block))

    def tenant(self, who: Identities, kinds: Iterable[str] = CLIENT_KINDS) -> str:
        """The client to whose share of the service a request belongs: kind and value of the first that it has.

        An API key counts only if the policy names it: a client can invent others, and with each a new share.
        """
        for kind in kinds:
            value = who.get(kind)
            if value and (kind != "api_key" or self.unknown_key_factor is None or value in self.vouched_keys):
                return f"{kind} {value}"
        return ""

    def announced_limits(self, now_us: int) -> tuple[Limit, ...]:
        """The limits to prepay without waiting for a hot key: rules with `lease: always`, and overrides with an end in
        the future, such as for an announced burst. Computed on each call."""
        instant, modes = _to_datetime(now_us), {rule.name: rule.lease for rule in self.policy.rules}
        timed = [each for each in self.policy.overrides if modes[each.rule] == "auto" and each.validity != ALWAYS]
        coming = [override.limit for override in timed if not override.validity.is_over(instant)]
        return tuple(dict.fromkeys([*self._limits_leased("always"), *coming]))

    @property
    def never_leased(self) -> tuple[Limit, ...]:
        """The limits that are never prepaid, with their overrides. Computed on each access."""
        return tuple(dict.fromkeys(self._limits_leased("never")))

    def parts(self) -> list[Any]:
        """References to its large parts: keep them while the snapshot is freed, then release them in slices."""
        lookups: list[Any] = [*self._lookups_of_rules.values(), *self._tiers, *self._blocks]
        return [*self.policy.parts(), *lookups, *self._overrides.values()]

    def _limits_leased(self, mode: LeaseMode) -> Iterator[Limit]:
        for rule in self.policy.rules:
            if rule.lease == mode:
                limits = self.limits_of(rule)
                yield from limits
                if self.unknown_key_factor is not None and not UNTRUSTED_KINDS.isdisjoint(rule.by):
                    yield from map(self.net_limit, limits)

    def route_rule(self, templates: tuple[Template, ...], method: str) -> RouteRule | None:
        """The settings of the most specific template with settings for the method."""
        for template in templates:
            fitting = [route for route in self._route_rules.get(template, ()) if _allows_method(route.methods, method)]
            if fitting:
                return min(fitting, key=lambda route: not route.methods)
        return None

    def matching_rules(self, templates: tuple[Template, ...], method: str, route_class: str | None) -> list[Rule]:
        """The rules that apply to the route, in the order of the policy."""
        targets = (ANYWHERE, route_class, *templates)
        numbers = sorted({number for target in targets for number in self._rules_by_target.get(target, ())})
        rules = [self.policy.rules[number] for number in numbers]
        return [rule for rule in rules if _allows_method(rule.methods, method)]

    def scenarios_of(
        self, matched: tuple[AbuseScenario, ...], method: str, route_class: str | None
    ) -> list[AbuseScenario]:
        """The scenarios that look at a route: those `matched` by its path, by its class, and those for all routes."""
        of_class = [each for each in self._class_scenarios if route_class in each.classes]
        general = [each for each in self._general_scenarios if not each.classes or route_class in each.classes]
        found = dict.fromkeys([*matched, *of_class, *general])
        trusts_keys = self.unknown_key_factor is None or self.vouched_keys > {AMBIGUOUS}
        return [
            each for each in found if _allows_method(each.methods, method) and (trusts_keys or each.by != "api_key")
        ]

    def is_trusted_key(self, api_key: str) -> bool:
        """True unless a client may have invented an API key, given its hash."""
        return api_key != AMBIGUOUS and (self.unknown_key_factor is None or api_key in self.vouched_keys)

    def lookups_of(self, rule: Rule, route_class: str | None) -> list[_Lookup]:
        """The lookups for the overrides of a rule on routes of that class."""
        if all(override.route_class is None for override in self._overrides.get(rule.name, ())):
            return self._lookups_of_rules.get(rule.name, [])
        fitting = [each for each in self._overrides[rule.name] if each.route_class in (None, route_class)]
        return self._lookups((override.identity, override) for override in fitting)

    def limits_of(self, rule: Rule) -> tuple[Limit, ...]:
        """The limits of a rule, with those of its overrides."""
        return (*rule.limits, *(override.limit for override in self._overrides.get(rule.name, ())))

    def net_limit(self, limit: Limit) -> Limit:
        """The limit by address on unknown API keys for a limit by API key; created once for each."""
        net = self._net_limits.get(limit)
        if net is None:
            region = "regional" if self._keeps_addresses else limit.region
            net = self._net_limits[limit] = _multiply(limit, self.unknown_key_factor or 1, region)
        return net

    def tightened(self, limit: Limit, factor: int) -> Limit:
        """A limit divided by a factor, for clients under an action; created once for each."""
        found = self._tightened.get((limit, factor))
        if found is None:
            if len(self._tightened) >= MOST_TIGHTENED:
                self._tightened.clear()
            found = self._tightened[limit, factor] = _divide(limit, factor)
        return found

    def is_tightened(self, limit: Limit) -> bool:
        """True for the result of `tightened`."""
        return any(limit is each for each in self._tightened.values())

    def is_allowed(self, who: Identities, now_us: int) -> bool:
        """True for a client against whom no action is taken."""
        return bool(self._allowed) and self.find(self._allowed, who, now_us) is not None

    def allows_client(self, kind: str, value: str) -> bool:
        """True if no action is taken against this client; of a network, if that is so for all of its addresses."""
        if kind == "ip" and "/" in value and not is_keyed_hash(value):
            network = ip_network(value)
            return any(
                _contains(each.identity.value, network) for each in self.policy.allowed if each.identity.kind == kind
            )
        return self.is_allowed({kind: value, **({"address": value} if kind == "ip" else {})}, 0)

    def in_calendar(self, limit: Limit, timezone: str | None, starts: int | str | None) -> Limit:
        """A limit with the time zone and the first day of a client's record; created once for each."""
        calendar = limit.calendar
        assert calendar is not None, "only calendar periods have a time zone"
        is_day_of_unit = (calendar.unit == "month" and type(starts) is int) or (
            calendar.unit == "year" and type(starts) is str
        )
        which = limit, timezone or calendar.timezone, starts if is_day_of_unit else calendar.starts
        made = self._calendar_limits.get(which)
        if made is None:
            period = Calendar(calendar.unit, timezone=which[1], starts=which[2])
            made = self._calendar_limits[which] = replace(limit, period=period)
        return made

    def _find_plan(self, method: str, path: str, mounted_path: str | None) -> RoutePlan:
        matched, known = self._matcher.match(path, mounted_path), normalize_method(method)
        known = known if known in self._methods else "UNKNOWN"
        watched = self._scenario_matcher.match(path, mounted_path)
        plan = self._routes.get((matched, watched, known))
        if plan is None:
            scenarios = tuple(dict.fromkeys([self._scenarios_by_match[index] for index in watched]))
            plan = RoutePlan(self, tuple(self._templates[index] for index in matched), known, scenarios)
            plan = self._routes.setdefault((matched, watched, known), plan)
        if method in self._plan_cache and len(path) <= LONGEST_PATH:  # clients can invent any number of methods
            if sum(map(len, self._plan_cache.values())) >= MOST_PATHS:
                for plans in self._plan_cache.values():
                    plans.clear()
            self._plan_cache[method][path if mounted_path is None else (path, mounted_path)] = plan
        return plan

    def _block(self, who: Identities, now_us: int) -> Block | None:
        found: Block | None = self.find(self._blocks, who, now_us)
        for key in who.get(OTHER_API_KEYS, "").split():
            found = found or self.find(self._blocks, {"api_key": key}, now_us)
        if found is not None and found.identity.kind == LIST and self._lists is not None:
            listed = f"listed in {self._lists.describe(found.identity.value)}"
            return replace(found, reason=f"{listed}: {found.reason}" if found.reason else listed)
        return found

    def _tier(self, who: Identities, now_us: int) -> str | None:
        tier = who.get("tier")
        if tier is not None and tier in self.tiers:
            return tier
        found: str | None = self.find(self._tiers, who, now_us) if self._tiers else None
        return found or self.policy.default_tier

    def _identity_lookups(
        self, entries: Iterable[Block | AllowedClient], hash_identity: Callable[[str, str], str] | None
    ) -> list[_Lookup]:
        """The lookups for entries that may name clients by hash. For those, the identities of a request are hashed:
        addresses are compared as the address and as the network that is counted."""
        plain: list[tuple[Identity, Any]] = []
        hashed: dict[str, dict[str, list[_Ranked]]] = {}
        for rank, entry in enumerate(entries):
            kind, value = entry.identity
            if kind in ("api_key", LIST) or not is_keyed_hash(value):
                plain.append((entry.identity, entry))
            else:
                hashed.setdefault(kind, {}).setdefault(value, []).append((rank, entry))
        lookups = self._lookups(plain)
        if hash_identity is None:
            return lookups
        for kind, values in hashed.items():
            find = partial(_find_hashed, values, hash_identity, kind)
            lookups += [(field, find) for field in (("ip", "address") if kind == "ip" else (kind,))]
        return lookups

    def _lookups(self, entries: Iterable[tuple[Identity, Any]]) -> list[_Lookup]:
        """Lookups by kind and value of identity. Each entry has a rank; the lowest that is valid applies."""
        kinds: dict[str, dict[str, list[_Ranked]]] = {}
        for rank, ((kind, value), entry) in enumerate(sorted(entries, key=_sort_key)):
            if kind == "api_key":
                value = self._fingerprints[value]
            kinds.setdefault(kind, {}).setdefault(value, []).append((rank, entry))
        return [_lookup(kind, values) for kind, values in kinds.items()]

    @staticmethod
    def find(lookups: list[_Lookup], who: Identities, now_us: int) -> Any:
        """The valid entry of the lowest rank for any of the identities."""
        best: _Ranked | None = None
        for kind, get in lookups:
            value = who.get(kind)
            if value is not None:
                for ranked in get(value) or ():
                    if best is None or ranked[0] < best[0]:
                        validity = getattr(ranked[1], "validity", None)
                        if validity is None or validity.holds_at(_to_datetime(now_us)):
                            best = ranked
        return best and best[1]


if TYPE_CHECKING:
    _Ranked: TypeAlias = tuple[int, Any]
    _Lookup: TypeAlias = tuple[str, Callable[[str], list[_Ranked] | None]]


class CompiledRule:
    """A rule compiled for one route."""

    __slots__ = (
        "_calendars",
        "_hash",
        "_lists",
        "_lookups",
        "_missing",
        "_route_identities",
        "_snapshot",
        "_view",
        "_weights",
        "cost",
        "has_overrides",
        "kinds",
        "limit",
        "rule",
        "simple_kind",
        "tiers",
    )  # fmt: skip

    def __init__(self, rule: Rule, snapshot: Snapshot, route: RoutePlan) -> None:
        self.rule = rule
        self._lookups = snapshot.lookups_of(rule, route.route_class)
        self._missing = rule.missing or ("skip" if route.has_address_rule else "ip")
        self._view = (snapshot.view,) if snapshot.view is not None and "endpoint" in rule.by else ()
        """Separates the counters of views also for requests that lack an identity."""
        self._route_identities = {"endpoint": route.endpoint}
        """The identities that come from the route."""
        general = route.cost if rule.counts_requests else 1
        self.cost = general if rule.cost is None else rule.cost
        self.kinds = {*rule.by, "ip", *(kind for kind, _ in self._lookups)}
        if "client" in rule.by:
            self.kinds.update(CLIENT_KINDS)
        self._snapshot = snapshot
        # Only records of what is counted: all requests of a counter must have the same calendar.
        counted = CLIENT_KINDS if "client" in rule.by else rule.by
        has_calendar = any(limit.calendar is not None for limit in snapshot.limits_of(rule))
        self._calendars = [each for each in snapshot.calendars if _counted_kind(each) in counted and has_calendar]
        self.kinds.update(kind for kind, _ in self._calendars)
        self.has_overrides = bool(self._lookups or self._calendars)
        self._hash = snapshot.hash_shared if rule.leaves_region else None
        is_simple = not self.has_overrides and len(rule.by) == 1 and rule.by[0] not in ("endpoint", "client")
        is_simple = is_simple and self._hash is None and not rule.lists
        self._lists = frozenset(rule.lists)
        self.simple_kind = rule.by[0] if is_simple else ""
        self.limit = rule.limit
        self.tiers: Mapping[Any, Limit] = rule.tiers
        self._weights: list[_Lookup] = []
        if rule.share is not None:
            between = CLIENT_KINDS if rule.share.between == "client" else (rule.share.between,)
            # Only records of what has a share: all requests of a client must have the same weight.
            self._weights = [each for each in snapshot.weights if _counted_kind(each) in between]
            self.kinds.update(between)
            self.kinds.update(kind for kind, _ in self._weights)

    def key(self, who: Identities, tier: str | None, now_us: int) -> Key | None:
        """The key of a request; None if the rule does not apply to it."""
        if self._lists and self._lists.isdisjoint(who.get(LISTED, "").split()):
            return None
        limit, _ = self.find_limit(who, tier, now_us)
        if limit is None:
            return None
        if isinstance(limit, FairLimit):
            return self._share(limit, who, tier, now_us)
        parts: list[str] = []
        for kind in self.rule.by:
            if kind == "client":
                parts += next((each, who[each]) for each in CLIENT_KINDS if who.get(each))
            elif value := self._route_identities.get(kind) or who.get(kind):
                parts.append(value)
            elif self._missing == "skip":
                return None
            else:
                # Leaving out an identity does not avoid the limit. No identity is empty, so the empty first part keeps
                # this counter apart from all others.
                return self._shared(limit.by("", "ip", who["ip"], *self._view))
        return self._shared(limit.by(*parts))

    def _share(self, limit: FairLimit, who: Identities, tier: str | None, now_us: int) -> Key:
        """The key of the client whose share is charged: all requests without one have a share together."""
        shares = self.rule.share
        assert shares is not None, "only a rule with shares has a fair limit"
        name = self._snapshot.tenant(who, CLIENT_KINDS if shares.between == "client" else (shares.between,))
        if not name:
            return limit.by()
        kind, _, value = name.partition(" ")
        lookups = [each for each in self._weights if _counted_kind(each) == kind]
        client = Snapshot.find(lookups, who, now_us) if lookups else None
        weight = shares.weights.get(tier or "", 1) if client is None else client.weight
        return limit.by(name if shares.between == "client" else value, weight=weight)

    def _shared(self, key: Key) -> Key:
        """The key in the form in which other regions may know it. Its parts stay, as they do not leave the process."""
        if self._hash is None or not key.identity:
            return key
        return key._replace(identity=self._hash("counter", key.identity))

    def is_tightened(self, limit: Limit) -> bool:
        """True if the limit was divided for a client under an action."""
        return self._snapshot.is_tightened(limit)

    def apply(self, key: Key, resolution: Resolution) -> AppliedLimit:
        """The key with the source of its numbers."""
        who = resolution.who
        _, origin = self.find_limit(who, resolution.tier, resolution.now_us)
        known = {**who, **self._route_identities}
        missing = next((kind for kind in self.rule.by if kind != "client" and not known.get(kind)), None)
        return AppliedLimit(self.rule, key, self.cost, origin, missing)

    def find_limit(self, who: Identities, tier: str | None, now_us: int) -> tuple[Limit | None, Override | str | None]:
        """The limit for a client, and the source of its numbers: override, tier, or None for the rule itself."""
        origin: Override | str | None = Snapshot.find(self._lookups, who, now_us) if self._lookups else None
        if isinstance(origin, Override):
            limit: Limit | None = origin.limit
        elif tier is not None and tier in self.rule.tiers:
            limit, origin = self.rule.tiers[tier], tier
        else:
            limit = self.rule.limit
        if self._calendars and limit is not None and limit.calendar is not None:
            limit = self._in_calendar_of(limit, origin, who, now_us)
        return limit, origin

    def _in_calendar_of(self, limit: Limit, origin: Override | str | None, who: Identities, now_us: int) -> Limit:
        """The limit in the time zone, and from the first day, of the client's record."""
        lookups = self._calendars
        if "client" in self.rule.by:
            kind = client_kind(who)
            lookups = [each for each in lookups if _counted_kind(each) == kind]
        client = Snapshot.find(lookups, who, now_us)
        if client is None:
            return limit
        timezone, starts = client.timezone, client.starts
        if isinstance(origin, Override):
            timezone = None if origin.names_timezone else timezone
            starts = None if origin.names_starts else starts
        return self._snapshot.in_calendar(limit, timezone, starts)


class UnknownKeyNet(CompiledRule):
    """The safety net of a limit by API key on one route: counts requests with unknown keys by address.

    A client can send a new key with each request, and each key has its own counter. So all unknown keys from one
    address also share a counter, at a multiple of the limit. Both are charged together or not at all: once the net
    denies, invented keys create no state.
    """

    __slots__ = ("_base", "_net_limit")

    def __init__(self, base: CompiledRule, snapshot: Snapshot, route: RoutePlan) -> None:
        rule = base.rule
        own = [kind for kind in rule.by if kind not in UNTRUSTED_KINDS and kind not in ADDRESSES]
        # Tiers have different numbers: the traffic of one must not use up the net of another.
        kinds = ("ip", "tier", *own) if snapshot.tiers else ("ip", *own)
        limit = None if rule.limit is None else snapshot.net_limit(rule.limit)
        tiers = {tier: snapshot.net_limit(limit) for tier, limit in rule.tiers.items()}
        # A request that lacks an identity is counted by address already: skip it.
        net = replace(rule, name=net_name(rule.name), limit=limit, tiers=tiers, by=kinds, net_of=rule.name)
        net = replace(net, is_quota=False)  # counted in the store, also that of a quota
        region = next((each.region for each in net.limits), rule.region)
        super().__init__(replace(net, missing="skip", region=region), snapshot, route)
        self._base = base
        self._net_limit = snapshot.net_limit

    def key(self, who: Identities, tier: str | None, now_us: int) -> Key | None:
        """The key by address; None for a request that the limit does not count by API key: `by: client` alone counts
        a tenant by its name."""
        if who.get("tenant") and "api_key" not in self._base.rule.by:
            return None
        return super().key({**who, "tier": tier or NO_TIER}, tier, now_us)

    def apply(self, key: Key, resolution: Resolution) -> AppliedLimit:
        return super().apply(key, resolution)._replace(lacks=None)

    def find_limit(self, who: Identities, tier: str | None, now_us: int) -> tuple[Limit | None, Override | str | None]:
        limit, origin = self._base.find_limit(who, tier, now_us)
        return None if limit is None else self._net_limit(limit), origin


def policy_concurrency(policy: Policy, route: RouteRule | None) -> ConcurrencyScope | None:
    """The limit on requests in progress of a route: its own, that of the policy, or none."""
    if route is not None and route.overload is not None:
        if route.overload == "none":
            return None
        return ConcurrencyScope(route.route_class or route.template.text, route.overload, route.priority)
    if policy.overload is None:
        return None
    return ConcurrencyScope(EVERY_ROUTE, policy.overload, "normal" if route is None else route.priority)


def concurrency_settings(policy: Policy) -> dict[str, OverloadSettings]:
    """The limits on requests in progress of a policy, by the names of their scopes."""
    found = {} if policy.overload is None else {EVERY_ROUTE: policy.overload}
    for route in policy.routes:
        scope = policy_concurrency(policy, route)
        if scope is not None:
            found[scope.name] = scope.settings
    return found


def guards(guard: Rule, rule: Rule) -> bool:
    """True if a limit bounds the requests of invented API keys, so that `rule` needs no net.

    Such a limit counts every request by address or globally. A concurrency limit does not bound a rate.
    """
    return (
        GUARD_KINDS.issuperset(guard.by)
        and guard.cost != 0
        and guard.count_when is None
        and not guard.shadow
        and not guard.lists
        and not guard.is_quota
        and guard.counts_requests
        and (not _is_concurrency(guard) or _is_concurrency(rule))
    )


def _counted_kind(lookup: _Lookup) -> str:
    return "ip" if lookup[0] == "address" else lookup[0]


def _is_concurrency(rule: Rule) -> bool:
    return any(limit.algorithm == "concurrency" for limit in rule.limits)


def _multiply(limit: Limit, factor: int, region: str) -> Limit:
    shapes_burst = limit.implementation.SHAPES_BURST
    same: dict[str, Any] = {"algorithm": limit.algorithm, "split": limit.split, "region": region}
    same["name"] = net_name(limit.name)
    while True:
        try:
            burst = limit.capacity * factor if shapes_burst else None
            return Limit(limit.quota * factor, limit.period, burst=burst, **same)
        except InvalidLimit:  # beyond the range of exact numbers
            if factor == 1:
                raise
            factor //= 2


def _divide(limit: Limit, factor: int) -> Limit:
    """A limit with a fraction of quota and burst, at least 1 of each: rounded down, to a round number if others would
    not be exact."""
    step = limit.split
    while step <= min(limit.quota, limit.capacity):
        quota, burst = [max(step, each // factor // step * step) for each in (limit.quota, limit.capacity)]
        try:
            return replace(limit, quota=quota, burst=burst if limit.implementation.SHAPES_BURST else None)
        except InvalidLimit:  # beyond the range of exact numbers
            step *= 10
    return limit


def _contains(written: str, network: IPv4Network | IPv6Network) -> bool:
    wide = None if is_keyed_hash(written) else ip_network(written, strict=False)
    if isinstance(wide, IPv4Network) and isinstance(network, IPv4Network):
        return network.subnet_of(wide)
    return isinstance(wide, IPv6Network) and isinstance(network, IPv6Network) and network.subnet_of(wide)


def _sort_key(of: tuple[Identity, Any]) -> tuple[bool, bool, int]:
    """The sort key of entries: those for one class of routes, for a time, or for a small network come first."""
    (kind, value), entry = of
    validity = getattr(entry, "validity", ALWAYS)
    # A network is as general as its prefix is short; an address without one is the least.
    prefix = value.partition("/")[2] if kind == "ip" else ""
    return getattr(entry, "route_class", None) is None, validity == ALWAYS, -int(prefix or 128)


def _counts_all_by_address(rule: Rule) -> bool:
    """True if a limit counts every request by address; one for some tiers only, or by other identities, does not."""
    kinds = set(rule.by)
    return (
        rule.limit is not None and not rule.lists and bool(kinds & {*ADDRESSES}) and kinds <= {*ADDRESSES, "endpoint"}
    )


def _find_hashed(
    values: dict[str, list[_Ranked]], hash_identity: Callable[[str, str], str], kind: str, value: str
) -> list[_Ranked] | None:
    return values.get(hash_identity(kind, value))


def _lookup(kind: str, values: dict[str, list[_Ranked]]) -> _Lookup:
    """The lookup of one kind: an address is also found by the networks and the lists that contain it."""
    if kind == "ip":
        return "address", _find_in_networks(Networks(values))
    if kind == LIST:
        return LISTED, lambda names: [entry for name in names.split() for entry in values.get(name, ())]
    return kind, values.get


def _uses_lists(policy: Policy) -> bool:
    return any(rule.lists for rule in policy.rules) or any(each.identity.kind == LIST for each in policy.blocked)


def _find_in_networks(networks: Networks[list[_Ranked]]) -> Callable[[str], list[_Ranked]]:
    """A lookup of all networks with an address: if the entry of the smallest has ended, a wider one may apply."""
    return lambda address: [entry for entries in networks.find_all(address) for entry in entries]


def _group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _join_costs(costs: list[int]) -> Cost:
    """The costs in the form that stores take: one number if they are all equal."""
    return costs[0] if len(set(costs)) == 1 else tuple(costs)


def _allows_method(methods: frozenset[str], method: str) -> bool:
    return not methods or method in map(normalize_method, methods)


def _to_datetime(now_us: int) -> datetime:
    return datetime.fromtimestamp(now_us / 1_000_000, UTC)
