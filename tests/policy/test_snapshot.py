"""Which limits a request meets, under which numbers, counted by whom: compiled, against a slow reading of the docs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import FairLimit, Limit
from headgate.gate.active_policy import ActivePolicy
from headgate.gate.identity import IdentityExtractor
from headgate.gate.responses import ResponseBuilder
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.loader import read
from headgate.policy.model import Block, Identity, Override, Policy, RouteRule, Rule, Validity
from headgate.policy.routes import Template
from headgate.policy.snapshot import AppliedLimit, Snapshot
from headgate.testing import FakeRequest
from support.policy_strategies import ADDRESSES, START, Request, fingerprint, policies, requests, sender

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headgate.policy.snapshot import Resolution


def resolve(snapshot: Snapshot, request: Request) -> Resolution:
    return snapshot.resolve(snapshot.route(request.method, request.path), request.who, request.now_us)


# ------------------------------------------------------------------ the model


class Expected(NamedTuple):
    """What a request meets, by the words of the docs."""

    endpoint: str
    route_class: str | None
    cost: int
    on_failure: str
    tier: str | None
    block: Block | None
    met: list[tuple[str, Limit, tuple[str, ...], int, Override | str | None, str | None]]
    shadows: list[Any]


class Model:
    """Reads the whole policy anew for each request."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self.policy = policy
        self.request = request
        self.who = {kind: value for kind, value in request.who.items() if value}
        self.segments = [segment for segment in request.path.split("/") if segment]
        self.method = as_counted(request.method)

    def expected(self) -> Expected:
        policy = self.policy
        templates = [route.template for route in policy.routes]
        templates += [template for rule in policy.rules for template in rule.templates]
        fitting = sorted(filter(self.fits, templates), key=self.specificity)
        routes = [route for route in policy.routes if self.fits(route.template) and self.allows(route.methods)]
        routes.sort(key=lambda route: (self.specificity(route.template), not route.methods))
        route = routes[0] if routes else RouteRule(Template.parse("*"), frozenset())
        rules = [rule for rule in policy.rules if self.meets(rule, route)]
        enforced = [rule for rule in rules if not rule.shadow]
        modes = [mode for mode in [route.on_failure, *(rule.on_failure for rule in enforced)] if mode]
        endpoint = fitting[0].text if fitting else "unmatched"
        tier = self.tier()
        counted = (
            [] if route.cost == 0 else [(rule, self.counted(rule, enforced, route, endpoint, tier)) for rule in rules]
        )
        met = [(rule, each) for rule, each in counted if each and not rule.shadow]
        return Expected(
            endpoint,
            route.route_class,
            route.cost,
            next((mode for mode in ("closed", "local", "open") if mode in modes), policy.on_failure),
            tier,
            self.first(policy.blocked),
            [*(each for _, each in met), *self.nets(met, tier, endpoint)],
            [each for rule, each in counted if each and rule.shadow],
        )

    def nets(self, met: list[tuple[Rule, Any]], tier: str | None, endpoint: str) -> list[Any]:
        """By address, ten times each limit that counts the request by its API key, which nobody knows."""
        entries = (*self.policy.clients, *self.policy.overrides)
        named = {each.identity.value for each in entries if each.identity.kind == "api_key"}
        if self.who.get("api_key") in (None, *map(fingerprint, named)):
            return []
        return [
            (f"{rule.name} (unknown keys)", tenfold(limit), self.net_parts(rule, tier, endpoint), cost, origin, None)
            for rule, (_, limit, _, cost, origin, lacks) in met
            if lacks is None
            and ("api_key" in rule.by or ("client" in rule.by and "tenant" not in self.who))
            and not any(is_guard(guard, rule) for guard, _ in met)
        ]

    def net_parts(self, rule: Rule, tier: str | None, endpoint: str) -> tuple[str, ...]:
        said = self.who | {"endpoint": endpoint}
        has_tiers = bool(self.policy.tiers or self.policy.default_tier)
        told = [said[kind] for kind in rule.by if kind not in ("api_key", "client", "ip", "subnet")]
        return (self.who["ip"], *([tier or "none"] if has_tiers else []), *told)

    def fits(self, template: Template) -> bool:
        wanted, given = template.segments, self.segments
        if len(given) < len(wanted) or (len(given) > len(wanted) and not template.open_ended):
            return False
        return all(want in (None, segment) for want, segment in zip(wanted, given, strict=False))

    def specificity(self, template: Template) -> list[int]:
        """Segment by segment: a word before a parameter, a parameter before what is below a `*`."""
        named = [int(segment is None) for segment in template.segments]
        return named + [2 if template.open_ended else 0] * (len(self.segments) + 1 - len(named))

    def allows(self, methods: Iterable[str]) -> bool:
        return not methods or self.method in map(as_counted, methods)

    def meets(self, rule: Rule, route: RouteRule) -> bool:
        everywhere = not rule.templates and not rule.classes
        here = any(map(self.fits, rule.templates)) or (route.route_class in rule.classes)
        return self.allows(rule.methods) and (everywhere or here)

    def tier(self) -> str | None:
        told = self.who.get("tier")
        if told is not None and told in {*self.policy.tiers, self.policy.default_tier}:
            return told
        client = self.first([client for client in self.policy.clients if client.tier])
        if not self.policy.tiers and not self.policy.default_tier:
            return None
        return client.tier if client else self.policy.default_tier

    def first(self, entries: Sequence[Any]) -> Any:
        """Of those about the client that hold the least general, and then the one that stands first."""
        found = [entry for entry in entries if self.is_client(entry.identity) and self.holds(entry)]
        return min(found, key=self.generality, default=None)

    def generality(self, entry: Any) -> tuple[bool, bool, int]:
        is_for_all_routes = getattr(entry, "route_class", None) is None
        is_for_ever = not hasattr(entry, "validity") or (entry.validity.since, entry.validity.until) == (None, None)
        return is_for_all_routes, is_for_ever, self.width(entry.identity)

    def is_client(self, identity: Identity) -> bool:
        kind, value = identity
        if kind == "ip":
            address = self.who["address"]
            return address != "unknown" and ip_address(address) in ip_network(value)
        return self.who.get(kind) == (fingerprint(value) if kind == "api_key" else value)

    def width(self, identity: Identity) -> int:
        """An address, and whoever is no network, is as narrow as can be."""
        network = ip_network(identity.value) if identity.kind == "ip" else None
        return -128 if network is None or network.prefixlen == network.max_prefixlen else -network.prefixlen

    def holds(self, entry: Any) -> bool:
        return not hasattr(entry, "validity") or entry.validity.holds_at(self.request.at)

    def counted(self, rule: Rule, enforced: list[Rule], route: RouteRule, endpoint: str, tier: str | None) -> Any:
        overrides = [each for each in self.policy.overrides if each.rule == rule.name]
        override = self.first([each for each in overrides if each.route_class in (None, route.route_class)])
        if override is not None:
            limit, origin = override.limit, override
        elif tier in rule.tiers:
            limit, origin = rule.tiers[tier], tier
        else:
            limit, origin = rule.limit, None
        if limit is None:
            return None
        cost = route.cost if rule.cost is None else rule.cost
        said = self.who | {"endpoint": endpoint}
        lacking = [kind for kind in rule.by if kind != "client" and kind not in said]
        if lacking:
            by_address = [each for each in enforced if each.limit and set(each.by) - {"endpoint"} in BY_ADDRESS]
            if rule.missing == "skip" or (rule.missing is None and by_address):
                return None
            return (rule.name, limit, ("", "ip", self.who["ip"]), cost, origin, lacking[0])
        client = next(kind for kind in ("tenant", "api_key", "user", "ip") if kind in self.who)
        parts = [
            part for kind in rule.by for part in ((client, self.who[client]) if kind == "client" else [said[kind]])
        ]
        return (rule.name, limit, tuple(parts), cost, origin, None)


BY_ADDRESS = ({"ip"}, {"subnet"}, {"ip", "subnet"})
"""What lets nobody go uncounted."""


def tenfold(limit: Limit) -> Limit:
    name = f"{limit.name} (unknown keys)"
    return Limit(limit.quota * 10, limit.period, burst=limit.capacity * 10, algorithm=limit.algorithm, name=name)


def is_guard(guard: Rule, rule: Rule) -> bool:
    """Whether a limit counts all requests of an address, or of everybody, whatever their keys."""

    def counts_leases(each: Rule) -> bool:
        return "concurrency" in [limit.algorithm for limit in each.limits]

    bounds = not counts_leases(guard) or counts_leases(rule)
    return set(guard.by) <= {"ip", "subnet", "endpoint"} and guard.cost != 0 and guard.count_when is None and bounds


def as_counted(method: str) -> str:
    return "GET" if method.upper() == "HEAD" else method.upper()


# ------------------------------------------------------------------ policies and requests


def plain(met: Iterable[AppliedLimit]) -> list[Any]:
    return [(each.rule.name, each.key.limit, each.key.parts, each.cost, each.origin, each.lacks) for each in met]


@given(policy=policies(), asked=st.lists(requests(), min_size=1, max_size=8))
def test_request_meets_what_the_docs_say(policy: Policy, asked: list[Request]) -> None:
    snapshot = Snapshot(policy, fingerprint)
    for request in asked * 2:  # what was seen before is remembered
        agrees_with_the_docs(policy, request, resolve(snapshot, request))


@given(policy=policies(), asked=st.lists(requests(), min_size=1, max_size=8))
def test_cached_client_gets_the_documented_limits(policy: Policy, asked: list[Request]) -> None:
    """Before and after overrides and blocks begin and end, and in whatever order."""
    snapshot = Snapshot(policy, fingerprint)
    known = ActivePolicy(
        snapshot, ResponseBuilder(policy.answers), IdentityExtractor(policy.identity, ApiKeyHasher(b"x" * 16))
    )
    for request in asked * 3:
        sent = FakeRequest(peer=request.who["address"])
        told = {kind: value for kind, value in request.who.items() if kind not in ("address", "ip")}
        route = snapshot.route(request.method, request.path)
        found, check, description, _ = known.resolve(route, sent, frozenset({"ip"}), told, request.now_us)
        agrees_with_the_docs(policy, request, found)
        assert found.who == request.who
        assert check == (None if found.block or not found.keys else (found.keys, found.cost, None))
        assert description.names == tuple(key.limit.name for key in found.keys)
        for tightest, key in enumerate(found.keys):
            if found.rules[tightest].cost == 0:
                continue
            verdicts = [(0 if index == tightest else 100, 0, 0, 0) for index, _ in enumerate(found.keys)]
            assert description.headers(verdicts, 0)[0] == (b"x-ratelimit-limit", b"%d" % key.limit.quota)


def agrees_with_the_docs(policy: Policy, request: Request, found: Resolution) -> None:
    model = Model(policy, request).expected()
    route = found.route
    told = (route.endpoint, route.route_class, route.cost, route.on_failure, found.tier, found.block)
    assert told == model[:6]
    assert route.is_exempt is (model.cost == 0)
    assert plain(found.applied_limits) == model.met
    assert plain(found.shadows) == model.shadows
    assert found.keys == tuple(limit.by(*parts) for _, limit, parts, *_ in model.met)
    costs = [found.cost] * len(model.met) if isinstance(found.cost, int) else list(found.cost)
    assert costs == [cost for _, _, _, cost, *_ in model.met]


@given(policy=policies(), request=requests())
def test_only_the_kinds_that_a_route_names_make_a_difference(policy: Policy, request: Request) -> None:
    """Adapters read no others."""
    snapshot = Snapshot(policy, fingerprint)
    read = {*snapshot.route(request.method, request.path).kinds, "address", "ip", "tier"}
    fewer = request._replace(who={kind: value for kind, value in request.who.items() if kind in read})
    one, other = resolve(snapshot, request), resolve(snapshot, fewer)
    assert (one.keys, one.cost, one.tier, one.block) == (other.keys, other.cost, other.tier, other.block)
    assert plain(one.shadows) == plain(other.shadows)


@given(policy=policies(), request=requests())
def test_missing_identities_do_not_escape_limits(policy: Policy, request: Request) -> None:
    """Whoever meets a limit that everybody has meets one without identities, too, unless the policy says `skip`."""
    everybody = [replace(rule, missing=None) for rule in policy.rules if rule.limit is not None]
    snapshot = Snapshot(replace(policy, rules=tuple(everybody)), fingerprint)
    bare = request._replace(who={kind: request.who[kind] for kind in ("address", "ip", "subnet")})
    assert bool(resolve(snapshot, bare).keys) is bool(resolve(snapshot, request).keys)


ODD = st.sampled_from(
    ["", "ip", "|", "%", "||", "|ip|", "|ip|198.51.100.7", "%all", "ip|unknown", "unknown", "x" * 200]
)


@given(
    by=st.lists(st.sampled_from(["user", "tenant", "device", "ip"]), min_size=1, max_size=3, unique=True),
    senders=st.lists(
        st.builds(sender, st.sampled_from(ADDRESSES), user=ODD, tenant=ODD, device=ODD), min_size=2, max_size=6
    ),
    missing=st.sampled_from([None, "ip"]),
)
def test_counters_are_shared_only_by_equal_identities(
    by: list[str], senders: list[dict[str, str]], missing: Any
) -> None:
    snapshot = Snapshot(Policy(rules=(Rule("r", Limit(5, timedelta(1), name="r"), tuple(by), missing=missing),)))

    def counted_as(who: dict[str, str]) -> tuple[str, ...]:
        return ("all", *(who[kind] for kind in by)) if all(who[kind] for kind in by) else ("address", who["ip"])

    def identity(who: dict[str, str]) -> str:
        (key,) = resolve(snapshot, Request("GET", "/", who, START)).keys
        return key.identity

    for one in senders:
        for other in senders:
            assert (identity(one) == identity(other)) is (counted_as(one) == counted_as(other))


@given(
    senders=st.lists(
        st.builds(sender, st.sampled_from(ADDRESSES), user=ODD, tenant=ODD, api_key=ODD), min_size=2, max_size=6
    )
)
def test_clients_of_different_kinds_never_share_a_counter(senders: list[dict[str, str]]) -> None:
    snapshot = Snapshot(Policy(rules=(Rule("r", Limit(5, timedelta(1), name="r"), ("client",)),)))
    counted = {}
    for who in senders:
        key, *_ = resolve(snapshot, Request("GET", "/", who, START)).keys
        client = next((kind, who[kind]) for kind in ("tenant", "api_key", "user", "ip") if who[kind])
        assert counted.setdefault(key.identity, client) == client


# ------------------------------------------------------------------ stories

SHOP = """
tier: free
routes:
  - {path: /health, cost: 0}
  - {path: /search, class: search, cost: 5}
  - {path: "/orders/{id}", class: orders, on_failure: closed}
  - {path: "/orders/{id}", methods: [POST], class: orders, cost: 2}
limits:
  - {name: per-ip, by: ip, bucket: 1000/minute}
  - {name: login, path: POST /login, by: user, bucket: 5/minute}
  - {name: search, class: search, by: client, bucket: 100/minute, tiers: {pro: 1000/minute}}
  - {name: gold, class: search, by: tenant, tiers: {gold: 10/second}, cost: 1}
  - {name: places, by: endpoint, bucket: 9/second}
  - {name: pairs, path: /pairs, by: tenant+user, missing: ip, bucket: 7/minute}
clients:
  - {tenant: acme, tier: pro}
  - {ip: 198.51.100.0/24, tier: gold}
"""


@pytest.mark.parametrize(
    ("request_line", "who", "keys", "costs"),
    [
        ("GET /", {}, "per-ip=unknown places=unmatched", 1),
        ("GET /no/such/page", {}, "per-ip=unknown places=unmatched", 1),
        ("GET /health", {}, "", ()),
        ("GET /orders/7", {}, "per-ip=unknown places=/orders/{id}", 1),
        ("POST /orders/8/", {}, "per-ip=unknown places=/orders/{id}", 2),
        ("POST /login", {"user": "ada"}, "per-ip=unknown login=ada places=/login", 1),
        ("POST /login", {}, "per-ip=unknown places=/login", 1),
        ("POST /login", {"user": ""}, "per-ip=unknown places=/login", 1),
        ("POST /login", {"user": None}, "per-ip=unknown places=/login", 1),
        ("GET /login", {"user": "ada"}, "per-ip=unknown places=/login", 1),
        ("GET /search", {}, "per-ip=unknown search=ip|unknown places=/search", 5),
        ("HEAD /search", {}, "per-ip=unknown search=ip|unknown places=/search", 5),
        ("get //search/", {}, "per-ip=unknown search=ip|unknown places=/search", 5),
        ("GET /search", {"user": "ada"}, "per-ip=unknown search=user|ada places=/search", 5),
        ("GET /search", {"user": "ada", "tenant": "acme"}, "per-ip=unknown search=tenant|acme places=/search", 5),
        ("GET /search", {"tenant": None, "user": "ada"}, "per-ip=unknown search=user|ada places=/search", 5),
        (
            "GET /search",
            {"tenant": "globex", "tier": "gold"},
            "per-ip=unknown search=tenant|globex gold=globex places=/search",
            (5, 5, 1, 5),
        ),
        ("GET /pairs", {"tenant": "a", "user": "b"}, "per-ip=unknown places=/pairs pairs=a|b", 1),
        ("GET /pairs", {"tenant": "a|b", "user": "c"}, "per-ip=unknown places=/pairs pairs=a%7Cb|c", 1),
        ("GET /pairs", {"tenant": "a"}, "per-ip=unknown places=/pairs pairs=|ip|unknown", 1),
    ],
)
def test_resolution_of_an_example_policy(request_line: str, who: dict[str, Any], keys: str, costs: Any) -> None:
    method, path = request_line.split()
    found = resolve(Snapshot(read(SHOP)), Request(method, path, sender(**who), START))
    assert " ".join(f"{key.limit.name}={key.identity}" for key in found.keys) == keys
    assert found.cost == costs


@pytest.mark.parametrize(
    ("who", "tier", "quota"),
    [
        (sender(), "free", 100),
        (sender(tenant="acme"), "pro", 1000),
        (sender(tenant="acme", tier="gold"), "gold", 100),
        (sender(tenant="acme", tier="made up"), "pro", 1000),
        (sender("198.51.100.7"), "gold", 100),
        (sender("198.51.100.7", tenant="acme"), "pro", 1000),
        (sender("198.51.101.7"), "free", 100),
    ],
)
def test_tier_is_said_by_the_app_or_by_the_policy(who: dict[str, str], tier: str, quota: int) -> None:
    found = resolve(Snapshot(read(SHOP)), Request("GET", "/search", who, START))
    (search,) = [met for met in found.applied_limits if met.rule.name == "search"]
    assert (found.tier, search.key.limit.quota) == (tier, quota)


@pytest.mark.parametrize(
    ("limits", "who", "keys"),
    [
        ("{name: u, by: user, bucket: 1/s}", {}, ["u=|ip|unknown"]),
        ("{name: u, by: user, missing: skip, bucket: 1/s}", {}, []),
        ("{name: i, by: ip, bucket: 1/s}, {name: u, by: user, bucket: 1/s}", {}, ["i=unknown"]),
        ("{name: s, by: subnet, bucket: 1/s}, {name: u, by: user, bucket: 1/s}", {}, ["s=unknown"]),
        (
            "{name: i, by: ip, bucket: 1/s}, {name: u, by: user, missing: ip, bucket: 1/s}",
            {},
            ["i=unknown", "u=|ip|unknown"],
        ),
        # A limit that the request does not meet, or that never rejects, is no excuse to leave another one out.
        ("{name: i, by: ip, bucket: 1/s, shadow: true}, {name: u, by: user, bucket: 1/s}", {}, ["u=|ip|unknown"]),
        ("{name: i, by: ip, tiers: {pro: 1/s}}, {name: u, by: user, bucket: 1/s}", {}, ["u=|ip|unknown"]),
        ("{name: i, by: ip, path: /a, bucket: 1/s}, {name: u, by: user, bucket: 1/s}", {}, ["u=|ip|unknown"]),
        ("{name: i, by: ip, method: POST, bucket: 1/s}, {name: u, by: user, bucket: 1/s}", {}, ["u=|ip|unknown"]),
        ("{name: both, by: ip+user, bucket: 1/s}", {}, ["both=|ip|unknown"]),
        ("{name: both, by: ip+user, bucket: 1/s}", {"user": "ada"}, ["both=unknown|ada"]),
        (
            "{name: both, by: ip+endpoint, bucket: 1/s}, {name: u, by: user, bucket: 1/s}",
            {},
            ["both=unknown|unmatched"],
        ),
        ("{name: all, by: global, bucket: 1/s}, {name: u, by: user, bucket: 1/s}", {}, ["all=%all", "u=|ip|unknown"]),
    ],
)
def test_request_without_identity_is_counted(limits: str, who: dict[str, str], keys: list[str]) -> None:
    found = resolve(Snapshot(read(f"limits: [{limits}]")), Request("GET", "/", sender(**who), START))
    assert [f"{key.limit.name}={key.identity}" for key in found.keys] == keys


@pytest.mark.parametrize(
    ("by", "nets"), [("api_key", 1), ("client", 0), ("client+api_key", 1), ("tenant+api_key", 1), ("tenant", 0)]
)
def test_limit_by_api_key_has_a_net_also_for_requests_of_a_tenant(by: str, nets: int) -> None:
    snapshot = Snapshot(read(f"limits: [{{name: r, by: {by}, bucket: 1/s}}]"))
    found = resolve(snapshot, Request("GET", "/", sender(tenant="acme", api_key="unknown"), START))
    assert [key.limit.name for key in found.keys] == ["r", *["r (unknown keys)"] * nets]


def test_shadow_says_nothing_about_failures() -> None:
    policy = read("limits: [{by: ip, bucket: 1/s, shadow: true, on_failure: closed}, {by: user, bucket: 1/s}]")
    assert Snapshot(policy).route("GET", "/").on_failure == "open"


@pytest.mark.parametrize("order", [1, -1])
def test_block_that_is_over_does_not_hide_a_wider_one(order: int) -> None:
    over = Block(Identity("ip", "203.0.113.9"), Validity(until=START))
    wide = Block(Identity("ip", "203.0.113.0/24"))
    snapshot = Snapshot(Policy(blocked=(over, wide)[::order]))
    assert resolve(snapshot, Request("GET", "/", sender("203.0.113.9"), START)).block is wide
    assert (
        resolve(snapshot, Request("GET", "/", sender("203.0.113.9"), START - timedelta(microseconds=1))).block is over
    )
    assert resolve(snapshot, Request("GET", "/", sender("203.0.114.9"), START)).block is None


def test_override_holds_on_its_class_and_in_its_time() -> None:
    text = """
    routes: [{path: /a, class: a}, {path: /b, class: b}]
    limits: [{name: r, by: tenant, bucket: 1/second}]
    overrides:
      - {tenant: acme, limit: r, class: a, bucket: 2/second, valid_until: 2096-05-28T00:00:00Z}
      - {tenant: acme, limit: r, bucket: 3/second, valid_from: 2096-01-01T00:00:00Z}
    """
    snapshot = Snapshot(read(text))

    def quota(path: str, day: str) -> int:
        moment = datetime.fromisoformat(f"{day}T00:00:00Z")
        return resolve(snapshot, Request("GET", path, sender(tenant="acme"), moment)).keys[0].limit.quota

    days = ("2095-12-31", "2096-01-01", "2096-05-27", "2096-05-28")
    assert [quota("/a", day) for day in days] == [2, 2, 2, 3]
    assert [quota("/b", day) for day in days] == [1, 3, 3, 3]


def test_api_keys_of_a_policy_are_compared_by_their_hashes() -> None:
    policy = Policy(blocked=(Block(Identity("api_key", "sk_1")),))
    snapshot = Snapshot(policy, fingerprint)
    assert resolve(snapshot, Request("GET", "/", sender(api_key=fingerprint("sk_1")), START)).block is not None
    assert resolve(snapshot, Request("GET", "/", sender(api_key="sk_1"), START)).block is None


def test_methods_that_are_made_up_take_no_memory() -> None:
    policy = read("limits: [{by: ip, bucket: 1/s}, {path: /a, methods: [PURGE], by: ip, bucket: 1/s}]")
    snapshot = Snapshot(policy)
    plans = {id(snapshot.route(f"MADE-UP-{number}", path)) for number in range(10_000) for path in ("/a", "/b")}
    assert len(plans) == 2
    assert len(snapshot._routes) == 2
    assert len(snapshot.route("purge", "/a").rules) == 2
    assert len(snapshot.route("MADE-UP", "/a").rules) == 1


def test_remembered_paths_are_bounded_in_number_and_length() -> None:
    def remembered() -> int:
        return sum(len(plans) for plans in snapshot._plan_cache.values())

    snapshot = Snapshot(read("limits: [{path: '/users/{id}', by: ip, bucket: 1/s}]"))
    plans = {id(snapshot.route("GET", f"/users/{number}")) for number in range(10_000)}
    assert len(plans) == 1
    assert remembered() == 10_000 % 4096
    for number in range(10_000):  # all methods together, and paths that have two names
        snapshot.route(("GET", "POST", "PUT")[number % 3], f"/v1/users/{number}", f"/users/{number}" * (number % 2))
    assert remembered() == 20_000 % 4096
    snapshot = Snapshot(snapshot.policy)
    assert len(snapshot.route("GET", "/users/" + "x" * 200).rules) == 1
    assert len(snapshot.route("MADE-UP", "/users/1").rules) == 1
    assert remembered() == 0


def test_cached_path_differs_from_the_same_path_in_a_mounted_app() -> None:
    snapshot = Snapshot(read("limits: [{path: /api/login, by: ip, bucket: 1/s}, {path: /login, by: ip, bucket: 2/s}]"))
    for _ in range(2):
        assert len(snapshot.route("GET", "/api/login").rules) == 1
        assert len(snapshot.route("GET", "/api/login", "/login").rules) == 2
        assert len(snapshot.route("GET", "/api/login", "/other").rules) == 1
        assert len(snapshot.route("POST", "/api/login", "/login").rules) == 2


@pytest.mark.parametrize("method", ["GET", "HEAD", "get", "Head"])
def test_head_and_get_are_one(method: str) -> None:
    snapshot = Snapshot(read("limits: [{methods: [GET], by: ip, bucket: 1/s}]"))
    assert snapshot.route(method, "/") is snapshot.route("GET", "//")
    assert len(snapshot.route(method, "/").rules) == 1


@pytest.mark.parametrize(
    ("limits", "leases", "settles"),
    [
        ("{by: ip, bucket: 1/s}", False, False),
        ("{by: ip, bucket: 1/s, algorithm: concurrency}", True, False),
        ("{by: ip, tiers: {pro: '1/s, concurrency'}}", True, False),
        ("{by: ip, bucket: 9/s, reserve: 5}", False, True),
        ("{by: ip, bucket: 1/s, count_when: status >= 500}", False, True),
        ("{path: /elsewhere, by: ip, bucket: 1/s, count_when: status >= 500}", False, False),
    ],
)
def test_route_knows_what_is_left_to_do_after_the_answer(limits: str, leases: bool, settles: bool) -> None:
    route = Snapshot(read(f"limits: [{limits}]")).route("GET", "/")
    assert (route.leases, route.settles) == (leases, settles)


# ------------------------------------------------------------------ what is prepaid


def test_limits_that_will_be_busy_are_announced_and_others_excluded() -> None:
    policy = read("""
        limits:
          - {name: a, by: tenant, bucket: 10/minute, tiers: {pro: 20/minute}, lease: always}
          - {name: b, by: tenant, bucket: 30/minute, tiers: {pro: 40/minute}, lease: never}
          - {name: c, by: tenant, bucket: 50/minute}
        overrides:
          - {tenant: t1, limit: a, bucket: 11/minute}
          - {tenant: t2, limit: a, bucket: 12/minute, valid_until: 2020-01-01T00:00:00Z}
          - {tenant: t1, limit: b, bucket: 31/minute, valid_from: 2096-01-01T00:00:00Z}
          - {tenant: t1, limit: c, bucket: 51/minute}
          - {tenant: t2, limit: c, bucket: 52/minute, valid_from: 2026-05-28T00:00:00Z}
          - {tenant: t3, limit: c, bucket: 53/minute, valid_until: 2026-05-28T00:00:00Z}
          - {tenant: t4, limit: c, bucket: 54/minute, valid_until: 2026-05-28T00:00:01Z}
          - {tenant: t5, limit: c, bucket: 55/minute, valid_from: 2027-01-01T00:00:00Z, valid_until: 2027-01-02T00:00Z}
          - {tenant: t6, limit: c, bucket: 55/minute, valid_from: 2028-01-01T00:00:00Z}
        """)
    snapshot = Snapshot(policy, fingerprint)
    now_us = Request("GET", "/", {}, START).now_us
    assert [limit.quota for limit in snapshot.announced_limits(now_us)] == [10, 20, 11, 12, 52, 54, 55]
    assert [limit.quota for limit in snapshot.never_leased] == [30, 40, 31]
    assert [limit.quota for limit in snapshot.announced_limits(now_us - 1)] == [10, 20, 11, 12, 52, 53, 54, 55]


def test_policy_that_says_nothing_announces_nothing() -> None:
    snapshot = Snapshot(read("limits: [{by: ip, bucket: 10/minute}]"))
    assert (snapshot.announced_limits(0), snapshot.never_leased) == ((), ())


# ------------------------------------------------------------------ fair shares


@pytest.mark.parametrize(
    ("between", "who", "expected"),
    [
        ("tenant", {"tenant": "acme"}, ("acme", 4)),
        ("tenant", {"tenant": "umbrella"}, ("umbrella", 10)),
        ("tenant", {"tenant": "other"}, ("other", 1)),
        ("tenant", {"user": "ada", "api_key": "known"}, ("", 1)),
        ("user", {"tenant": "acme", "user": "ada"}, ("ada", 4)),
        ("api_key", {"api_key": "known"}, ("known", 2)),
        ("api_key", {"api_key": "invented"}, ("", 1)),
        ("client", {"tenant": "umbrella", "api_key": "known"}, ("tenant umbrella", 10)),
        ("client", {"api_key": "invented"}, ("ip 203.0.113.9", 1)),
        ("client", {}, ("ip 203.0.113.9", 1)),
    ],
)
def test_a_fair_limit_is_shared_between_clients_by_weight(
    between: str, who: dict[str, str], expected: tuple[str, int]
) -> None:
    policy = read(
        f"""
        clients:
          - {{tenant: acme, tier: pro}}
          - {{tenant: umbrella, weight: 10, tier: pro}}
          - {{api_key: known, weight: 2}}
        limits: [{{name: api, bucket: 10/second, share: {{between: {between}, weights: {{pro: 4}}}}}}]
        """
    )
    snapshot = Snapshot(policy)
    who = {"address": "203.0.113.9", "ip": "203.0.113.9", **who}
    (key,) = snapshot.resolve(snapshot.route("GET", "/"), who, 0).keys
    assert isinstance(key.limit, FairLimit)
    assert ("".join(map(str, key.parts)), key.limit.weight) == expected
    # All of them are charged to one counter.
    assert key.identity == FairLimit(10, timedelta(seconds=1), name="api").by().identity
