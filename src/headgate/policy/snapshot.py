"""A policy made ready for requests: which limits does this one meet, under which numbers, counted by whom?

All that depends on the route alone is worked out when a route is first seen, and kept. For each request only what
depends on the client is left: its tier, its overrides, and its identities as keys. What it says never changes.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.algorithms import ALGORITHMS
from headgate.errors import InvalidLimit
from headgate.keyed_hashes import is_keyed_hash
from headgate.limits import Limit
from headgate.policy.addresses import Networks
from headgate.policy.model import ADDRESSES, Identity, Policy, Validity, net_name
from headgate.policy.routes import METHODS, Matcher, Template, normal_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headgate.keys import Key
    from headgate.policy.model import Block, LeaseMode, Override, RouteMode, RouteRule, Rule
    from headgate.stores.operations import Cost

__all__ = [
    "AMBIGUOUS",
    "CLIENT_KINDS",
    "OTHER_API_KEYS",
    "UNMATCHED",
    "AppliedLimit",
    "CompiledRule",
    "Resolution",
    "RoutePlan",
    "Snapshot",
    "UnknownKeyNet",
    "Who",
]

Who: TypeAlias = "Mapping[str, str]"
"""The identities of a request, by kind; `address` is the client's whole address, `ip` what it is counted by."""

CLIENT_KINDS: Final = ("tenant", "api_key", "user", "ip")
"""What `by: client` counts by: the first of these that a request has."""

OTHER_API_KEYS: Final = "api_keys"
"""In `Who`, where a request sends several API keys: the hashes of those that it is not counted by, separated by
blanks. A request is blocked if any of its keys is."""

AMBIGUOUS: Final = "ambiguous"
"""The one API key of all requests that send several lines of a header: a client who is served under either key gets no
counter of its own."""

NO_TIER: Final = "none"
UNTRUSTED_KINDS: Final = frozenset({"api_key", "client"})
"""The kinds of `by` whose value a request can make up."""
GUARD_KINDS: Final = frozenset({*ADDRESSES, "endpoint"})

UNMATCHED: Final = "unmatched"
"""The endpoint of all paths that no template fits: they share their counters."""

STRICTNESS: Final = ("closed", "local", "open")
ALWAYS: Final = Validity()
ANYWHERE: Final = object()

MOST_PATHS: Final = 4096
LONGEST_PATH: Final = 200
"""Together about a megabyte of remembered paths, whatever is asked for."""

_new_tuple = tuple.__new__


class AppliedLimit(NamedTuple):
    """One limit that a request meets."""

    rule: Rule
    key: Key
    cost: int
    origin: Override | str | None
    """Why these numbers: the client's override, its tier, or None for those of everybody."""
    lacks: str | None
    """The identity that the request lacks, so that it is counted by its address instead."""


class Resolution(NamedTuple):
    """What a request meets."""

    route: RoutePlan
    keys: tuple[Key, ...]
    cost: Cost
    """For `keys`, as stores take it."""
    rules: Sequence[CompiledRule]
    """Whose keys they are."""
    who: Who
    tier: str | None
    now_us: int
    """An instant at which this held. Of a request that is known already it is that of an earlier one: nothing that is
    said here has begun or ended since."""
    block: Block | None

    @property
    def met(self) -> tuple[AppliedLimit, ...]:
        """The limits, in the order of the policy, with the reasons for each."""
        return tuple(rule.met(key, self) for rule, key in zip(self.rules, self.keys, strict=True))

    @property
    def shadows(self) -> tuple[AppliedLimit, ...]:
        """The limits that are only watched."""
        return tuple(
            rule.met(key, self)
            for rule in self.route.shadows
            if (key := rule.key(self.who, self.tier, self.now_us)) is not None
        )


class RoutePlan:
    """What is the same for all requests of a route and method."""

    __slots__ = (
        "cost", "costs", "endpoint", "has_address_rule", "has_overrides", "is_exempt", "kinds", "leases", "nets",
        "on_failure", "policy", "route_class", "rules", "settles", "shadows",
    )  # fmt: skip

    def __init__(self, snapshot: Snapshot, templates: tuple[Template, ...], method: str) -> None:
        policy = self.policy = snapshot.policy
        route = snapshot.route_rule(templates, method)
        self.endpoint = snapshot.view or (templates[0].text if templates else UNMATCHED)
        self.route_class = route.route_class if route else None
        self.cost = route.cost if route else 1
        self.is_exempt = self.cost == 0
        rules = snapshot.rules_met(templates, method, self.route_class)
        enforced = [rule for rule in rules if not rule.shadow]
        self.has_address_rule = any(map(_counts_everybody_by_address, enforced))
        compiled = [] if self.is_exempt else [CompiledRule(rule, snapshot, self) for rule in rules]
        self.rules = tuple(each for each in compiled if not each.rule.shadow)
        self.shadows = tuple(each for each in compiled if each.rule.shadow)
        self.costs = _joined([rule.cost for rule in self.rules])
        """What requests cost that meet all rules."""
        self.on_failure: RouteMode = min(
            [mode for mode in (route and route.on_failure, *(rule.on_failure for rule in enforced)) if mode],
            key=STRICTNESS.index,
            default=policy.on_failure,
        )
        self.kinds: frozenset[str] = snapshot.kinds | {kind for rule in compiled for kind in rule.kinds}
        """All kinds of identity that may matter to the route's requests."""
        self.leases = any(limit.algorithm == "concurrency" for rule in enforced for limit in rule.limits)
        self.has_overrides = any(rule.has_overrides for rule in self.rules)
        self.settles = any(rule.settled or rule.count_when is not None for rule in enforced)
        self.nets = tuple(
            UnknownKeyNet(each, snapshot, self)
            for each in self.rules
            if snapshot.unknown_key_factor is not None
            and not UNTRUSTED_KINDS.isdisjoint(each.rule.by)
            and not any(other.limit is not None and guards(other, each.rule) for other in enforced)
        )
        """For requests with unknown API keys, unless a limit by address applies to every request of the route."""


class Snapshot:
    """A policy, compiled. `fingerprint` makes keyed hashes of the API keys that stand in it.

    `trusts_keys` says that every API key was verified by the app, so that none counts as unknown. `hash_identity` makes
    keyed hashes of other identities, by kind and value, for blocks that name a client by its hash. Without it, such
    blocks match nothing.
    """

    def __init__(
        self,
        policy: Policy,
        fingerprint: Callable[[str], str] = str,
        hash_identity: Callable[[str, str], str] | None = None,
        *,
        trusts_keys: bool = False,
        view: str | None = None,
    ) -> None:
        """`view` names the view that declares these limits itself; it is the endpoint of all requests then."""
        self.policy = policy
        self.view = view
        self._fingerprints = {written: fingerprint(written) for written in policy.api_keys}
        settings = policy.identity
        self.unknown_key_factor = None if trusts_keys or settings.known_keys_only else settings.unknown_key_factor
        self.vouched_keys = frozenset([AMBIGUOUS, *(self._fingerprints[key] for key in policy.vouched_api_keys)])
        """The hashes of the API keys that clients or overrides name. All others are unknown."""
        self._templates = list(
            dict.fromkeys(
                [
                    *(route.template for route in policy.routes),
                    *(template for rule in policy.rules for template in rule.templates),
                ]
            )
        )
        self._matcher = Matcher(self._templates)
        self._route_rules: dict[Template, list[RouteRule]] = {}
        for route in policy.routes:
            self._route_rules.setdefault(route.template, []).append(route)
        self._rules_by_place: dict[object, list[int]] = {}
        """The numbers of the rules that are for a template, for a class, or for all routes."""
        for number, rule in enumerate(policy.rules):
            for place in (*rule.templates, *rule.classes) or (ANYWHERE,):
                self._rules_by_place.setdefault(place, []).append(number)
        self._routes: dict[tuple[tuple[int, ...], str], RoutePlan] = {}
        self._net_limits: dict[Limit, Limit] = {}
        self._known: dict[str, dict[str | tuple[str, str], RoutePlan]] = {method: {} for method in METHODS}
        """The plans for busy paths, which have two names in mounted apps. A text is found sooner than a tuple."""
        named = [each.methods for each in policy.routes] + [each.methods for each in policy.rules]
        self._methods = frozenset([*METHODS, *(normal_method(method) for methods in named for method in methods)])
        """The methods that may make a difference; all others are alike."""
        self._tiers = self._lookups((client.identity, client.tier) for client in policy.clients if client.tier)
        self._blocks = self._block_lookups(policy.blocked, hash_identity)
        self._overrides: dict[str, list[Override]] = {}
        for override in policy.overrides:
            self._overrides.setdefault(override.rule, []).append(override)
        self._lookups_of_rules = {
            name: self._lookups((override.identity, override) for override in overrides)
            for name, overrides in self._overrides.items()
        }
        self.api_keys = frozenset(self._fingerprints.values()) if settings.known_keys_only else None
        """The hashes of all keys that are keys, where the policy says so; None: whatever is sent may be one."""
        self.kinds = frozenset(kind for kind, _ in (*self._tiers, *self._blocks))
        self.tiers = frozenset([*policy.tiers, *([] if policy.default_tier is None else [policy.default_tier])])

    def route(self, method: str, path: str, mounted_path: str | None = None) -> RoutePlan:
        """The plan for a method and path; in a mounted app, routes may also match the `mounted_path`."""
        plan = self._known.get(method, {}).get(path if mounted_path is None else (path, mounted_path))
        return plan or self._found(method, path, mounted_path)

    def resolve(self, route: RoutePlan, who: Who, now_us: int) -> Resolution:
        """Which limits the request meets; `who` has those of the route's `kinds` that the request has."""
        block = self._block(who, now_us) if self._blocks else None
        tier = self._tier(who, now_us) if self.tiers else None
        keys: list[Key] = []
        rules: Sequence[CompiledRule] = route.rules
        for rule in rules:
            # The common case by itself: no overrides, and one identity, which is there.
            if (value := who.get(rule.simple_kind)) and (limit := rule.tiers.get(tier, rule.limit)) is not None:
                keys.append(limit.by(value))
            elif (key := rule.key(who, tier, now_us)) is not None:
                keys.append(key)
        cost = route.costs
        if len(keys) < len(rules):
            rules = [rule for rule in rules if rule.key(who, tier, now_us) is not None]
            cost = _joined([rule.cost for rule in rules])
        if route.nets and who.get("api_key", AMBIGUOUS) not in self.vouched_keys:
            found = [
                (net, key)
                for net in route.nets
                if not any(guards(rule.rule, net.rule) for rule in rules)
                and (key := net.key(who, tier, now_us)) is not None
            ]
            if found:
                rules = [*rules, *(net for net, _ in found)]
                keys += [key for _, key in found]
                cost = _joined([rule.cost for rule in rules])
        return _new_tuple(Resolution, (route, tuple(keys), cost, rules, who, tier, now_us, block))

    def announced(self, now_us: int) -> tuple[Limit, ...]:
        """The limits that will be busy, and need not be found to be: of rules whose tokens are always prepaid, and of
        overrides for a time that is not over yet, as a burst that was announced is one. To be asked once."""
        instant, modes = _moment(now_us), {rule.name: rule.lease for rule in self.policy.rules}
        coming = [
            override.limit
            for override in self.policy.overrides
            if modes[override.rule] == "auto" and override.validity != ALWAYS and not override.validity.is_over(instant)
        ]
        return tuple(dict.fromkeys([*self._limits_leased("always"), *coming]))

    @property
    def never_leased(self) -> tuple[Limit, ...]:
        """The limits whose tokens are never prepaid, overrides among them. To be asked once."""
        return tuple(dict.fromkeys(self._limits_leased("never")))

    def parts(self) -> list[Any]:
        """References to all that is large in it: hold them while the snapshot is freed, then release them in slices."""
        lookups: list[Any] = [*self._lookups_of_rules.values(), *self._tiers, *self._blocks]
        return [*self.policy.parts(), *lookups, *self._overrides.values()]

    def _limits_leased(self, mode: LeaseMode) -> Iterator[Limit]:
        for rule in self.policy.rules:
            if rule.lease == mode:
                limits = (*rule.limits, *(override.limit for override in self._overrides.get(rule.name, ())))
                yield from limits
                if self.unknown_key_factor is not None and not UNTRUSTED_KINDS.isdisjoint(rule.by):
                    yield from map(self.net_limit, limits)

    def route_rule(self, templates: tuple[Template, ...], method: str) -> RouteRule | None:
        """What holds for the route: said by the most specific template that has something to say on the method."""
        for template in templates:
            fitting = [route for route in self._route_rules.get(template, ()) if _fits(route.methods, method)]
            if fitting:
                return min(fitting, key=lambda route: not route.methods)
        return None

    def rules_met(self, templates: tuple[Template, ...], method: str, route_class: str | None) -> list[Rule]:
        """The rules that requests of the route meet, in the order of the policy."""
        places = (ANYWHERE, route_class, *templates)
        numbers = sorted({number for place in places for number in self._rules_by_place.get(place, ())})
        rules = [self.policy.rules[number] for number in numbers]
        return [rule for rule in rules if _fits(rule.methods, method)]

    def lookups_of(self, rule: Rule, route_class: str | None) -> list[_Lookup]:
        """Where the overrides of a rule are found that hold on routes of that class."""
        if all(override.route_class is None for override in self._overrides.get(rule.name, ())):
            return self._lookups_of_rules.get(rule.name, [])
        return self._lookups(
            (override.identity, override)
            for override in self._overrides[rule.name]
            if override.route_class in (None, route_class)
        )

    def net_limit(self, limit: Limit) -> Limit:
        """The limit by address on unknown API keys that belongs to a limit by API key; made once for each."""
        made = self._net_limits.get(limit)
        if made is None:
            made = self._net_limits[limit] = _multiplied(limit, self.unknown_key_factor or 1)
        return made

    def _found(self, method: str, path: str, mounted_path: str | None) -> RoutePlan:
        matched, known = self._matcher.match(path, mounted_path), normal_method(method)
        known = known if known in self._methods else "UNKNOWN"
        plan = self._routes.get((matched, known))
        if plan is None:
            plan = RoutePlan(self, tuple(self._templates[index] for index in matched), known)
            plan = self._routes.setdefault((matched, known), plan)
        if method in self._known and len(path) <= LONGEST_PATH:  # there is no end of methods that are made up
            if sum(map(len, self._known.values())) >= MOST_PATHS:
                for plans in self._known.values():
                    plans.clear()
            self._known[method][path if mounted_path is None else (path, mounted_path)] = plan
        return plan

    def _block(self, who: Who, now_us: int) -> Block | None:
        found: Block | None = self.find(self._blocks, who, now_us)
        for key in who.get(OTHER_API_KEYS, "").split():
            found = found or self.find(self._blocks, {"api_key": key}, now_us)
        return found

    def _tier(self, who: Who, now_us: int) -> str | None:
        told = who.get("tier")
        if told is not None and told in self.tiers:
            return told
        found: str | None = self.find(self._tiers, who, now_us) if self._tiers else None
        return found or self.policy.default_tier

    def _block_lookups(self, blocks: Iterable[Block], hash_identity: Callable[[str, str], str] | None) -> list[_Lookup]:
        """The blocks by identity. Those by hash are looked up by the hash of what a request has, which is only computed
        if there are any: of the address, and of the network that it is counted by."""
        plain: list[tuple[Identity, Any]] = []
        hashed: dict[str, dict[str, list[_Ranked]]] = {}
        for rank, block in enumerate(blocks):
            kind, value = block.identity
            if kind == "api_key" or not is_keyed_hash(value):
                plain.append((block.identity, block))
            else:
                hashed.setdefault(kind, {}).setdefault(value, []).append((rank, block))
        lookups = self._lookups(plain)
        if hash_identity is not None:
            for kind, values in hashed.items():
                find = partial(_find_hashed, values, hash_identity, kind)
                lookups += [(field, find) for field in (("ip", "address") if kind == "ip" else (kind,))]
        return lookups

    def _lookups(self, entries: Iterable[tuple[Identity, Any]]) -> list[_Lookup]:
        """The entries by kind of identity and value, each with its rank: where several hold, the lowest does."""
        kinds: dict[str, dict[str, list[_Ranked]]] = {}
        for rank, ((kind, value), entry) in enumerate(sorted(entries, key=_generality)):
            if kind == "api_key":
                value = self._fingerprints[value]
            kinds.setdefault(kind, {}).setdefault(value, []).append((rank, entry))
        return [
            # An address may lie in a network, so that it is not looked up as it stands.
            ("address", _flat(Networks(values))) if kind == "ip" else (kind, values.get)
            for kind, values in kinds.items()
        ]

    @staticmethod
    def find(lookups: list[_Lookup], who: Who, now_us: int) -> Any:
        """What holds now for any of the identities: of several, that of the lowest rank."""
        best: _Ranked | None = None
        for kind, get in lookups:
            value = who.get(kind)
            if value is not None:
                for ranked in get(value) or ():
                    if best is None or ranked[0] < best[0]:
                        validity = getattr(ranked[1], "validity", None)
                        if validity is None or validity.holds_at(_moment(now_us)):
                            best = ranked
        return best and best[1]


if TYPE_CHECKING:
    _Ranked: TypeAlias = tuple[int, Any]
    _Lookup: TypeAlias = tuple[str, Callable[[str], list[_Ranked] | None]]


class CompiledRule:
    """A rule on one route."""

    __slots__ = (
        "_lookups", "_missing", "_said", "_view", "cost", "has_overrides", "kinds", "limit", "rule", "simple_kind",
        "tiers",
    )  # fmt: skip

    def __init__(self, rule: Rule, snapshot: Snapshot, route: RoutePlan) -> None:
        self.rule = rule
        self._lookups = snapshot.lookups_of(rule, route.route_class)
        self._missing = rule.missing or ("skip" if route.has_address_rule else "ip")
        self._view = (snapshot.view,) if snapshot.view is not None and "endpoint" in rule.by else ()
        """Keeps the counts of views apart also for requests that lack an identity."""
        self._said = {"endpoint": route.endpoint}
        """Identities that are the route's, and not the request's."""
        self.cost = route.cost if rule.cost is None else rule.cost
        self.kinds = {*rule.by, "ip", *(kind for kind, _ in self._lookups)}
        if "client" in rule.by:
            self.kinds.update(CLIENT_KINDS)
        self.has_overrides = bool(self._lookups)
        is_simple = not self._lookups and len(rule.by) == 1 and rule.by[0] not in ("endpoint", "client")
        self.simple_kind = rule.by[0] if is_simple else ""
        self.limit = rule.limit
        self.tiers: Mapping[Any, Limit] = rule.tiers

    def key(self, who: Who, tier: str | None, now_us: int) -> Key | None:
        """What the request is counted under; None if it does not meet the rule."""
        limit, _ = self._numbers(who, tier, now_us)
        if limit is None:
            return None
        parts: list[str] = []
        for kind in self.rule.by:
            if kind == "client":
                parts += next((each, who[each]) for each in CLIENT_KINDS if who.get(each))
            elif value := self._said.get(kind) or who.get(kind):
                parts.append(value)
            elif self._missing == "skip":
                return None
            else:
                # Nobody gets free by leaving an identity out. An empty part comes first, which no identity is: this
                # counter is never somebody else's.
                return limit.by("", "ip", who["ip"], *self._view)
        return limit.by(*parts)

    def met(self, key: Key, resolution: Resolution) -> AppliedLimit:
        """The same, with the reasons."""
        who = resolution.who
        _, origin = self._numbers(who, resolution.tier, resolution.now_us)
        lacking = [kind for kind in self.rule.by if kind != "client" and not (self._said.get(kind) or who.get(kind))]
        return AppliedLimit(self.rule, key, self.cost, origin, lacking[0] if lacking else None)

    def _numbers(self, who: Who, tier: str | None, now_us: int) -> tuple[Limit | None, Override | str | None]:
        """The limit for this client, and why that: its override, its tier, or None for what holds for everybody."""
        if self._lookups:
            override = Snapshot.find(self._lookups, who, now_us)
            if override is not None:
                return override.limit, override
        if tier is not None and tier in self.rule.tiers:
            return self.rule.tiers[tier], tier
        return self.rule.limit, None


class UnknownKeyNet(CompiledRule):
    """The safety net of a limit by API key on one route: counts requests with unknown keys by address.

    Anybody can send a new key with each request, and each has a counter of its own. So the requests of all unknown
    keys from one address also share a counter, at a multiple of the limit. Both are charged together or not at all:
    once the net denies, made-up keys create no state.
    """

    __slots__ = ("_base", "_net_limit")

    def __init__(self, base: CompiledRule, snapshot: Snapshot, route: RoutePlan) -> None:
        rule = base.rule
        own = [kind for kind in rule.by if kind not in UNTRUSTED_KINDS and kind not in ADDRESSES]
        # Clients of different tiers have different numbers: a tier's traffic must not use up another's net.
        kinds = ("ip", "tier", *own) if snapshot.tiers else ("ip", *own)
        net = replace(
            rule,
            name=net_name(rule.name),
            limit=None if rule.limit is None else snapshot.net_limit(rule.limit),
            by=kinds,
            tiers={tier: snapshot.net_limit(limit) for tier, limit in rule.tiers.items()},
            missing="skip",  # a request that lacks an identity is counted by address already
            net_of=rule.name,
        )
        super().__init__(net, snapshot, route)
        self._base = base
        self._net_limit = snapshot.net_limit

    def key(self, who: Who, tier: str | None, now_us: int) -> Key | None:
        """The counter by address; None for a request that the limit itself does not count by its API key."""
        if "client" in self._base.rule.by and who.get("tenant"):
            return None
        return super().key({**who, "tier": tier or NO_TIER}, tier, now_us)

    def met(self, key: Key, resolution: Resolution) -> AppliedLimit:
        return super().met(key, resolution)._replace(lacks=None)

    def _numbers(self, who: Who, tier: str | None, now_us: int) -> tuple[Limit | None, Override | str | None]:
        limit, origin = self._base._numbers(who, tier, now_us)  # noqa: SLF001 - of the same class
        return None if limit is None else self._net_limit(limit), origin


def guards(guard: Rule, rule: Rule) -> bool:
    """True if a limit bounds what a client can send under ever new API keys, in place of the net of `rule`.

    It counts every request, by the address or for everybody together. One on concurrency bounds no rate.
    """
    return (
        GUARD_KINDS.issuperset(guard.by)
        and guard.cost != 0
        and guard.count_when is None
        and not guard.shadow
        and (not _is_concurrency(guard) or _is_concurrency(rule))
    )


def _is_concurrency(rule: Rule) -> bool:
    return any(limit.algorithm == "concurrency" for limit in rule.limits)


def _multiplied(limit: Limit, factor: int) -> Limit:
    shapes_burst = ALGORITHMS[limit.algorithm].SHAPES_BURST
    while True:
        try:
            return Limit(
                limit.quota * factor,
                limit.period,
                burst=limit.capacity * factor if shapes_burst else None,
                algorithm=limit.algorithm,
                name=net_name(limit.name),
                split=limit.split,
            )
        except InvalidLimit:  # numbers beyond what is counted exactly
            if factor == 1:
                raise
            factor //= 2


def _generality(of: tuple[Identity, Any]) -> tuple[bool, bool, int]:
    """What is said of one class of routes, for a time, or of a small network goes before what is said in general."""
    (kind, value), entry = of
    validity = getattr(entry, "validity", ALWAYS)
    # A network is as general as its prefix is short; an address without one is the least.
    prefix = value.partition("/")[2] if kind == "ip" else ""
    return getattr(entry, "route_class", None) is None, validity == ALWAYS, -int(prefix or 128)


def _counts_everybody_by_address(rule: Rule) -> bool:
    """Whether a limit lets nobody go uncounted: one for some tiers only, or by an identity beside the address, does."""
    kinds = set(rule.by)
    return rule.limit is not None and bool(kinds & {*ADDRESSES}) and kinds <= {*ADDRESSES, "endpoint"}


def _find_hashed(
    values: dict[str, list[_Ranked]], hash_identity: Callable[[str, str], str], kind: str, value: str
) -> list[_Ranked] | None:
    """The entries for the hash of an identity."""
    return values.get(hash_identity(kind, value))


def _flat(networks: Networks[list[_Ranked]]) -> Callable[[str], list[_Ranked]]:
    """All entries around an address: where that of a small network is over, a wider one may hold."""
    return lambda address: [entry for entries in networks.find_all(address) for entry in entries]


def _joined(costs: list[int]) -> Cost:
    """The costs as stores take them: one for all, where they are alike."""
    return costs[0] if len(set(costs)) == 1 else tuple(costs)


def _fits(methods: frozenset[str], method: str) -> bool:
    return not methods or method in map(normal_method, methods)


def _moment(now_us: int) -> datetime:
    return datetime.fromtimestamp(now_us / 1_000_000, UTC)
