"""The base policy, which is the same for all clients, the effective policy of one client, and the usage of its limits.

The base policy is the policy document with the tiers and routes of the tables, and is cached. The tables may hold a
hundred thousand overrides, so the effective policy of a client is composed from the base policy and that client's rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._limit_syntax import spell
from headgate.control.config.compose import PolicyTemplate
from headgate.control.config.reading import rows_at
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, microseconds
from headgate.control.service.errors import log_and_summarize
from headgate.control.service.models import ClientRef, LimitUsage
from headgate.errors import HeadgateError, InvalidPolicy
from headgate.policy.api_keys import PREFIX
from headgate.policy.model import Block, Client, Override, Policy, Rule
from headgate.policy.snapshot import CLIENT_KINDS, UNMATCHED, CompiledRule, Resolution, RoutePlan, Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from headgate.control.config.rows import OverrideRow, PolicyDocument, RouteCost, StoredRow, TierLimit
    from headgate.decisions import Outcome
    from headgate.keys import Key
    from headgate.limiter import Limiter
    from headgate.limits import Limit
    from headgate.policy.routes import Template

__all__ = [
    "NO_CLIENT", "ApplicableLimit", "BasePolicy", "ClientFacts", "EffectivePolicy", "applicable_limits",
    "base_policy_at", "effective_policy", "format_limit", "key_batches", "limit_usages", "read_counters",
]  # fmt: skip

EMPTY: Final = Policy()
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
_KIND_NAMES: Final = {"ip": "IP", "api_key": "API key"}


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The policy document with the tiers and routes of the tables, without rows about single clients."""

    template: PolicyTemplate
    policy: Policy
    """Empty if the document is invalid."""
    problems: tuple[str, ...]
    """The reasons why the document is invalid."""
    document: StoredRow[PolicyDocument] | None
    tiers: tuple[StoredRow[TierLimit], ...]
    routes: tuple[StoredRow[RouteCost], ...]
    entries: Mapping[tuple[str, str], Mapping[str, list[Any]]]
    """The document's own entries about clients, by identity and section."""

    def entries_of(self, identities: Mapping[str, Collection[str]], section: str) -> Iterator[Any]:
        """The document's entries about a client with any of these identities."""
        for kind, values in identities.items():
            for value in values:
                yield from self.entries.get((kind, value), {}).get(section, ())

    def label_of(self, client: tuple[str, str]) -> str | None:
        """The label that the document gives a client."""
        entry = self.client_entry(client)
        return None if entry is None else entry.label

    def client_entry(self, client: tuple[str, str]) -> Client | None:
        """The entry of a client in the document's list of clients."""
        return next(self.entries_of({client[0]: (client[1],)}, "clients"), None)

    def require_valid(self) -> BasePolicy:
        """Return self; raise InvalidPolicy if the document is invalid."""
        if self.problems:
            raise InvalidPolicy(self.problems)
        return self

    def recompose(
        self, *, tiers: Iterable[TierLimit] | None = None, routes: Iterable[RouteCost] | None = None
    ) -> Policy:
        """Compose the policy with other tiers or routes; raise InvalidPolicy if the result is invalid."""
        return PolicyTemplate(
            None if self.document is None else self.document.row,
            [each.row for each in self.tiers] if tiers is None else tiers,
            [each.row for each in self.routes] if routes is None else routes,
        ).compose({})


class ClientFacts(NamedTuple):
    """The identities of a client, by which rows, counters and log records refer to it."""

    who: ClientRef
    identities: dict[str, tuple[str, ...]]
    """The values of each kind that rows about the client may have: an address is also in its networks."""
    values: dict[str, str]
    """The identities that the client's requests have; empty where only a hash is known."""
    log_keys: tuple[str, ...]
    can_count: bool


NO_CLIENT: Final = ClientFacts(ClientRef("", ""), {}, {}, (), can_count=False)
"""Stands for no client, where only the base policy matters."""


class EffectivePolicy(NamedTuple):
    """The policy that applies to one client, with the source of each entry."""

    facts: ClientFacts
    base: BasePolicy
    policy: Policy
    """The base policy and the entries about this client."""
    snapshot: Snapshot
    rows: Mapping[str, Sequence[StoredRow[Any]]]
    row_ids: Mapping[int, int]
    """Row ids by the `id()` of the policy entry that was built from the row."""

    @property
    def label(self) -> str | None:
        """The client's own label, or that of the smallest network that contains it."""
        labels = {(each.identity.kind, each.identity.value): each.label for each in self.policy.clients}
        found = (labels.get((kind, value)) for kind, values in self.facts.identities.items() for value in values)
        return next((label for label in found if label), None)

    def client_entry(self, client: tuple[str, str]) -> Client | None:
        """The entry of a client in the list of clients: that of the config store, or else that of the document."""
        return next((each for each in self.policy.clients if (each.identity.kind, each.identity.value) == client), None)

    def row_of(self, entry: Override | Block | Client | None) -> int | None:
        """The id of the row that an entry was built from; None for an entry of the document."""
        return self.row_ids.get(id(entry))

    def block_at(self, now_us: int) -> Block | None:
        """The block of the client in the config store or the policy document."""
        if values := self.facts.values:
            plan = self.snapshot.route("GET", "/")
            if (found := self.snapshot.resolve(plan, _request_identities(values), now_us).block) is not None:
                return found
        # The snapshot has no secret to match blocks by hash; all entries with a hash here are about this client.
        now = datetime.fromtimestamp(now_us / 1_000_000, UTC)
        hashed = (each for each in self.policy.blocked if each.identity.value.lower().startswith(PREFIX))
        return next((each for each in hashed if each.validity.holds_at(now)), None)

    def find_duplicate(self, override: OverrideRow, *, ignore: int | None) -> int | None:
        """The id of another override with the same client, limit, class and validity."""
        key = attrgetter("kind", "value", "limit_name", "route_class", "valid_from_us", "valid_until_us")
        same = (each.id for each in self.rows["overrides"] if key(each.row) == key(override) and each.id != ignore)
        return next(same, None)


def effective_policy(
    base: BasePolicy, facts: ClientFacts, rows: Mapping[str, Sequence[StoredRow[Any]]]
) -> EffectivePolicy:
    """Compose the policy that applies to a client from the base policy and the client's rows."""
    plain = {section: [each.row for each in rows.get(section, ())] for section in LIST_SECTIONS}
    own: Policy = EMPTY
    if not base.problems and any(plain.values()):
        own = base.template.compose(plain, rows_only=True)
    row_ids: dict[int, int] = {}
    for section in LIST_SECTIONS:
        entries = getattr(own, section)
        if len(entries) == len(plain[section]):
            row_ids |= {id(entry): each.id for entry, each in zip(entries, rows.get(section, ()), strict=True)}
    assigned = {each.identity for each in own.clients}
    in_document = {section: [*base.entries_of(facts.identities, section)] for section in LIST_SECTIONS}
    policy = replace(
        base.policy,
        clients=(*(each for each in in_document["clients"] if each.identity not in assigned), *own.clients),
        overrides=(*in_document["overrides"], *own.overrides),
        blocked=(*in_document["blocked"], *own.blocked),
    )
    return EffectivePolicy(facts, base, policy, Snapshot(policy), rows, row_ids)


def base_policy_at(connection: Connection, version: int, document: PolicyDocument | None = None) -> BasePolicy:
    """The base policy at a version, optionally with another document in place of the stored one."""
    found = {section: list(rows_at(connection, section, version)) for section in BASE_SECTIONS}
    stored = next(iter(found["documents"]), None)
    given = document if document is not None else None if stored is None else stored.row
    template = PolicyTemplate(given, [each.row for each in found["tiers"]], [each.row for each in found["routes"]])
    policy: Policy = EMPTY
    problems: tuple[str, ...] = ("there is no policy yet",)
    if given is not None or found["tiers"] or found["routes"]:
        try:
            policy, problems = template.compose({}), ()
        except InvalidPolicy as error:
            problems = error.problems
    entries: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for section in LIST_SECTIONS:
        for entry in getattr(policy, section):
            entries.setdefault(tuple(entry.identity), {}).setdefault(section, []).append(entry)
    return BasePolicy(template, policy, problems, stored, tuple(found["tiers"]), tuple(found["routes"]), entries)


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


def applicable_limits(effective: EffectivePolicy, now_us: int) -> tuple[str | None, list[ApplicableLimit]]:
    """The tier of a client, and all limits that may apply to its requests."""
    snapshot, policy, facts = effective.snapshot, effective.policy, effective.facts
    who = _request_identities(facts.values)
    found: dict[tuple[str, Key], ApplicableLimit] = {}
    tier: str | None = None
    for plan in _plans(effective):
        resolution = snapshot.resolve(plan, who, now_us)
        tier = resolution.tier
        for rule in (*plan.rules, *plan.shadows):
            if (each := _applicable_limit(rule, plan, facts, resolution)) is not None:
                endpoint = OTHER_PATHS if plan.endpoint == UNMATCHED else plan.endpoint
                names = [f"{method} {endpoint}" for method in sorted(rule.rule.methods)] or [endpoint]
                found.setdefault((rule.rule.name, each.key), each).routes |= dict.fromkeys(names)
    if not policy.rules:
        tier = snapshot.resolve(snapshot.route("GET", "/"), who, now_us).tier
    order = {rule.name: number for number, rule in enumerate(policy.rules)}
    return tier, sorted(found.values(), key=lambda each: order[each.rule.name])


def _request_identities(known: Mapping[str, str]) -> dict[str, str]:
    """The identities of a client's requests, as far as they are known; every request has an address."""
    return {"address": "", "ip": UNKNOWN_IDENTITY, **known}


def limit_usages(
    effective: EffectivePolicy, limits: Sequence[ApplicableLimit], readings: Mapping[Key, Outcome | str]
) -> Iterator[LimitUsage]:
    """Views of limits with the readings of their counters: an outcome, or the reason why it is unknown."""
    several = {each.rule.name for each in limits if sum(other.rule is each.rule for other in limits) > 1}
    for each in limits[:MAX_LIMITS]:
        limit, origin = each.key.limit, each.origin
        override = origin if isinstance(origin, Override) else None
        unknown = " and ".join(_KIND_NAMES.get(kind, kind.replace("_", " ")) for kind in each.missing)
        reading = readings.get(each.key) or (f"counted per {unknown}" if unknown else "not read")
        outcome = None if isinstance(reading, str) else reading
        until = override.validity.until if override is not None else None
        applies_everywhere = not (each.rule.templates or each.rule.classes) and each.rule.name not in several
        methods = "".join(f"{method} " for method in ["/".join(sorted(each.rule.methods))] if method)
        yield LimitUsage(
            limit=each.rule.name,
            by="+".join(each.rule.by) or "global",
            bucket=format_limit(limit),
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
            unknown=reading if isinstance(reading, str) else None,
            shadow=each.rule.shadow,
            own=each.own,
            can_override=each.can_override,
        )


def read_counters(
    counters: Limiter | None, limits: Iterable[ApplicableLimit]
) -> tuple[dict[Key, Outcome | str], list[str]]:
    """Read the counters of these limits within a time budget; also return the error message if that failed."""
    keys = [each.key for each in limits if not each.missing][:MAX_LIMITS]
    found: dict[Key, Outcome | str] = {}
    trouble: str | None = None
    deadline = time.monotonic() + READ_BUDGET_S
    for batch in key_batches(keys):
        if counters is None:
            trouble = "the admin server was started without --store, so usage is unknown"
        elif time.monotonic() > deadline:
            trouble = "reading the counters took too long"
        else:
            try:
                found |= dict(zip(batch, counters.peek(*batch).outcomes, strict=True))
            except HeadgateError as error:
                trouble = log_and_summarize("the counters are unavailable", error)
        if trouble is not None:
            return dict.fromkeys(keys, trouble) | found, [trouble]
    return found, []


def format_limit(limit: Limit) -> str:
    """The rate of a limit in the syntax of policies, without its algorithm."""
    burst = f", burst {limit.burst}" if limit.burst != limit.quota else ""
    return f"{limit.quota}/{spell(limit.period)}{burst}"


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
    plans = [snapshot.route(method, path) for path in paths for method in methods]
    yield from {id(plan): plan for plan in plans}.values()


def _path(template: Template) -> str:
    rest = [UNMATCHED_SEGMENT] if template.open_ended else []
    return "/" + "/".join([*(segment or UNMATCHED_SEGMENT for segment in template.segments), *rest])


def _applicable_limit(
    rule: CompiledRule, plan: RoutePlan, facts: ClientFacts, resolution: Resolution
) -> ApplicableLimit | None:
    by, known, kind = rule.rule.by, facts.values, facts.who.kind
    counted_as = next((each for each in CLIENT_KINDS if known.get(each)), None)
    values = {**known, "client": counted_as, "endpoint": plan.endpoint}
    missing = tuple(each for each in by if not values.get(each))
    # With a placeholder for each unknown identity, the rule returns the rate that applies to each of them.
    who = {**_request_identities(known), **{each: UNKNOWN_IDENTITY for each in missing if each != "client"}}
    key = rule.key(who, resolution.tier, resolution.now_us)
    if key is None:
        return None
    found = rule.apply(key, Resolution(plan, (), 0, (), who, resolution.tier, resolution.now_us, None))
    kinds = {counted_as if each == "client" else each for each in by}
    can_override = kind in by or ("client" in by and kind in CLIENT_KINDS)
    is_own = kind in kinds and not missing
    return ApplicableLimit(rule.rule, key, found.origin, missing, own=is_own, can_override=can_override)


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


def _retry_s(limit: Limit, outcome: Outcome) -> float | None:
    """Seconds until a request of cost 1 is allowed; None if the algorithm does not predict it."""
    if outcome.remaining >= 1:
        return 0.0
    reset_us = outcome.reset_after_us
    if limit.algorithm == "fixed_window":
        return reset_us / 1_000_000
    part = limit.part or limit
    if limit.implementation.SHAPES_BURST:
        return max(0, reset_us - (part.capacity - 1) * part.ticks // part.tokens) / 1_000_000
    return None
