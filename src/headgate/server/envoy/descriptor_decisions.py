"""Decisions on descriptors, as events for the decision log, the metrics and the status of the node.

An event describes its descriptors in the terms of policies: the domain is the endpoint, a rule is a limit that counts
by the keys of its entries, and the entries of a request are the identities of its client. So observers of gates work
for Envoy as well, and client values reach them only as keyed hashes.
"""

from __future__ import annotations

import os
import re
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from headgate.clock import SystemClock
from headgate.decisions import Decision
from headgate.gate.admission import Shadow
from headgate.gate.client_actions import ActionCounts
from headgate.gate.event_stream import DecisionEvent, EventStream
from headgate.gate.options import SECRET_VARIABLE
from headgate.policy.addresses import canonical
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.model import Block, Identity, Policy, Rule
from headgate.policy.snapshot import STRICTNESS, AppliedLimit, CompiledRule, Resolution, RoutePlan, Snapshot
from headgate.telemetry.decision_log.record import ENVOY, ENVOY_QUOTA
from headgate.telemetry.pseudonyms import LABEL, NOT_IDENTITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.algorithms import Verdict
    from headgate.events import Event
    from headgate.gate.event_stream import DecisionHook, Observer, Outcome
    from headgate.health import Health
    from headgate.keys import Key
    from headgate.limits import Limit
    from headgate.overload.load_shedder import OverloadStats
    from headgate.policy.model import RouteMode
    from headgate.server.envoy.service import DescriptorLine, Match

__all__ = ["DescriptorDecisions", "HeldQuota", "identity_kind"]

Entries = tuple[tuple[str, str], ...]

POLICY_NAME: Final = "envoy"
ADDRESS_KEYS: Final = frozenset({"remote_address", "ip"})
"""Keys of entries with the address of a client."""
RESERVED_KINDS: Final = NOT_IDENTITIES | {LABEL, "domain", "endpoint", "global", "client"}
"""Kinds with another meaning, which entries of the same key must not have."""
MAX_KIND_LENGTH: Final = 50
MAX_CACHED: Final = 10_000


class HeldQuota(NamedTuple):
    """The tokens of one limit that proxies hold by the quota protocol, as in `QuotaHolding`."""

    limit: str
    counters: int
    held: int
    capacity: int
    excess: int
    bound: int


class _DecidedRequest(NamedTuple):
    """A request with the decision on it, of which an event is made when it is delivered."""

    domain: str
    lines: Sequence[DescriptorLine]
    is_denied: bool
    received_us: int
    decided_us: int


class _DescribedMatch(NamedTuple):
    """A match in the terms of policies."""

    match: Match
    """Keeps the match alive, by whose id this is found."""
    rule: CompiledRule
    key: Key


class DescriptorDecisions:
    """The source of the events of Envoy's services: attach observers as to a gate."""

    is_closed = False
    policy_age_s: float | None = None

    def __init__(self, limiter: Any, *, secret: str | bytes | None = None) -> None:
        """`secret` is that of the decision log; by default, HEADGATE_SECRET."""
        given = secret if secret is not None else os.environ.get(SECRET_VARIABLE)
        self.identity_secret: str | bytes = given or secrets.token_bytes(32)
        key = self.identity_secret
        self._api_keys = ApiKeyHasher(key.encode() if isinstance(key, str) else key)
        self._engine = limiter.engine
        self._limiter = limiter
        mode = self._engine.failure.mode
        self._on_failure: RouteMode = cast("RouteMode", mode) if mode in STRICTNESS else "closed"
        self._clock = self._engine.clock or SystemClock()
        self._events = EventStream(self._build)
        self._routes: dict[str, RoutePlan] = {}
        self._rules: dict[tuple[str, str, str, int], CompiledRule] = {}
        self._matches: dict[int, _DescribedMatch] = {}
        self._identities: dict[tuple[str, tuple[Entries, ...]], dict[str, str]] = {}
        self._policy = Policy(name=POLICY_NAME)
        self.quota_holdings: Callable[[], list[HeldQuota]] = list
        """The tokens that proxies hold, for the status of the node."""
        self.policy_version: str | None = None
        self.policy_error: str | None = None

    # ------------------------------------------------------------------------------------ events

    def emit(self, domain: str, lines: Sequence[DescriptorLine], *, is_denied: bool, received_us: int) -> None:
        """Emit the event of a request, whose descriptors have their status. They must not change any more."""
        if self._events.observers:
            self._events.publish(_DecidedRequest(domain, lines, is_denied, received_us, self._clock.now_us()))

    def _build(self, published: _DecidedRequest | DecisionEvent) -> DecisionEvent:
        """The event of a request. This runs in batches in another thread, as it takes as long as the decision."""
        if isinstance(published, DecisionEvent):
            return published
        domain, lines, is_denied, received_us, now_us = published
        route = self._route(domain)
        # Those that deny come first; sorting keeps the order of the others.
        ordered = sorted(lines, key=_follows_denials) if is_denied else lines
        who = self._identities_of(domain, tuple([line.entries for line in ordered]))
        keys: list[Key] = []
        rules: list[CompiledRule] = []
        costs: list[int] = []
        verdicts: list[Verdict] = []
        shadows: list[Shadow] = []
        degraded = None
        block = None
        for line in lines:
            match = line.match
            if match is None or line.is_refund:
                continue
            if line.limit is None:  # the rule allows nothing
                if line.denies and is_denied:
                    block = Block(Identity("domain", domain), reason=f"{match.rule.full_key} allows no requests")
                continue
            described = self._describe(match)
            verdict = line.remaining, line.retry_us if line.is_over else 0, line.reset_us, 0
            degraded = degraded or line.degraded
            if line.is_over and (match.rule.shadow_mode or (line.denies and not is_denied)):
                shadows.append(_shadow(described, line.hits, verdict))
                continue
            keys.append(described.key)
            rules.append(described.rule)
            costs.append(line.hits)
            verdicts.append(verdict if line.denies else (verdict[0], 0, *verdict[2:]))
        cost = tuple(costs)
        decision = None
        outcome: Outcome = "denied" if is_denied else "allowed"
        if block is not None:
            outcome = "blocked"
        elif keys or shadows:
            if is_denied and degraded and self._on_failure != "local":
                outcome = "unavailable"
            decision = Decision(not is_denied, tuple(keys), tuple(verdicts), None, degraded, received_us, 0, cost)
        resolution = Resolution(route, tuple(keys), cost, rules, who, None, now_us, block)
        duration_us = now_us - received_us
        return DecisionEvent(received_us, duration_us, ENVOY, outcome, resolution, decision, shadows, None)

    def emit_denials(self, domain: str, entries: Entries, match: Match, *, count: int, decision: Decision) -> None:
        """Emit one event for the requests that a proxy has denied since its last report.

        `decision` is a check of the counter that shows what was left.
        """
        if not self._events.observers or match.key is None:
            return
        described = self._describe(match)
        remaining, _, reset_us, _ = decision.verdicts[0]
        verdict = remaining, max(reset_us, 1), reset_us, 0
        who = self._identities_of(domain, (entries,))
        now_us = self._clock.now_us()
        denied = Decision(False, (described.key,), (verdict,), None, None, now_us, 0, count)
        resolution = Resolution(self._route(domain), denied.keys, count, [described.rule], who, None, now_us, None)
        self._events.publish(DecisionEvent(now_us, 0, ENVOY_QUOTA, "denied", resolution, denied, (), None))

    def reset_rules(self, version: str) -> None:
        """Forget the rules of the previous configuration; `version` is that of the new one."""
        self._routes, self._rules, self._matches = {}, {}, {}
        self._policy = Policy(name=POLICY_NAME)
        self.policy_version, self.policy_error = version, None

    def _route(self, domain: str) -> RoutePlan:
        route = self._routes.get(domain)
        if route is None:
            policy = Policy(name=POLICY_NAME, on_failure=self._on_failure)
            route = self._routes[domain] = RoutePlan(Snapshot(policy, view=domain), (), ENVOY)
        return route

    def _describe(self, match: Match) -> _DescribedMatch:
        found = self._matches.get(id(match))
        if found is None:
            kinds = tuple([identity_kind(key) for key in match.parts[2::2]])
            assert match.key is not None, "rules without a limit have no key"
            # The values are those of the counter, in which a pattern may stand for that of the request.
            key = match.key.limit.by(*match.parts[3::2])
            found = _DescribedMatch(match, self._compile(match, key.limit, kinds), key)
            if len(self._matches) >= MAX_CACHED:
                self._matches.clear()
            self._matches[id(match)] = found
        return found

    def _compile(self, match: Match, limit: Limit, kinds: tuple[str, ...]) -> CompiledRule:
        """The rule of a match; matches of the same rule share it."""
        origin = match.rule.origin
        at = limit.name, "+".join(kinds), origin, id(limit)
        compiled = self._rules.get(at)
        if compiled is None:
            own = None if origin else limit
            rule = Rule(limit.name, own, kinds, {origin: limit} if origin == "tier" else {})
            if len(self._rules) >= MAX_CACHED:
                self._rules.clear()
            route = self._route(match.parts[0])
            compiled = self._rules[at] = CompiledRule(rule, Snapshot(route.policy), route)
        return compiled

    def _identities_of(self, domain: str, descriptors: tuple[Entries, ...]) -> dict[str, str]:
        """The identities in entries by kind; of several values of a key, the first."""
        who = self._identities.get((domain, descriptors))
        if who is None:
            who = {}
            for entries in descriptors:
                for key, value in entries:
                    self._add_identity(who, key, value)
            who["domain"] = domain
            if len(self._identities) >= MAX_CACHED:
                self._identities.clear()
            self._identities[domain, descriptors] = who
        return who

    def _add_identity(self, who: dict[str, str], key: str, value: str) -> None:
        kind = identity_kind(key)
        if kind == "ip":
            address = canonical(value)
            if address is not None:
                who.setdefault("address", address)
                who.setdefault("ip", address)
                return
            kind = "ip_"
        elif kind == "api_key":
            hashed = self._api_keys.hashed(value)
            kind, value = ("api_key_", value) if hashed is None else (kind, hashed)
        who.setdefault(kind, value)

    # ------------------------------------------------------------------------------------ a source of decisions

    @property
    def policy(self) -> Policy:
        """The rules that were applied so far, with the keys that they count by."""
        rules = {rule.rule.name: rule.rule for rule in list(self._rules.values())}
        if len(rules) != len(self._policy.rules):
            self._policy = Policy(name=POLICY_NAME, rules=tuple(rules.values()), on_failure=self._on_failure)
        return self._policy

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._events.observers

    @property
    def dropped_events(self) -> int:
        """The number of events that no observer has received, because the buffer was full."""
        return self._events.dropped

    @property
    def message_counts(self) -> dict[Any, int]:
        """None: proxies ask about requests, not about messages."""
        return {}

    @property
    def list_status(self) -> tuple[()]:
        """No lists: descriptors name what is limited, not who asks."""
        return ()

    @property
    def store_stats(self) -> Any:
        """The statistics of the store and the local tier, as `Limiter.stats`."""
        return self._limiter.stats

    def add_observer(self, observer: DecisionHook | Observer) -> None:
        """Deliver the events of all further decisions to an observer, in batches and outside of the requests."""
        self._events.add(cast("Observer", observer))

    def remove_observer(self, observer: DecisionHook | Observer) -> None:
        """Deliver no further events to an observer; it has received all those so far."""
        self._events.remove(cast("Observer", observer))

    def add_store_listener(self, listener: Callable[[Event], Any]) -> None:
        """Call a function with each event of the store."""
        self._engine.local.event_emitter.add_listener(listener)

    def flush_events(self) -> None:
        """Deliver the events of all decisions so far to the observers, before returning."""
        self._events.flush()

    def hot_counters(self) -> list[tuple[Key, int]]:
        """The counters with prepaid tokens, and their requests per second."""
        found = [(counter.key, counter.rate) for counter in self._engine.local.prepaid.hot_counters()]
        return [(key.limit.by(*key.parts[3::2]), rate) for key, rate in found if len(key.parts) > 3]

    def overload_stats(self) -> dict[str, OverloadStats]:
        """None: the requests are served elsewhere."""
        return {}

    @property
    def action_counts(self) -> ActionCounts:
        """None: descriptors name what is limited, not who asks."""
        return ActionCounts({}, 0, {}, 0, {})

    def health(self) -> Health:
        """The state of the store and of its servers."""
        return self._limiter.health()  # type: ignore[no-any-return]

    def now_us(self) -> int:
        """Current time by the clock of the limiter."""
        return self._clock.now_us()

    def close(self) -> None:
        """Deliver the last events."""
        self.is_closed = True
        self.flush_events()


@lru_cache(maxsize=MAX_CACHED)
def identity_kind(key: str) -> str:
    """The kind of identity for the key of an entry: a word, as in `headgate why KIND=VALUE`.

    >>> identity_kind("user"), identity_kind("remote_address"), identity_kind("x-plan"), identity_kind("tier")
    ('user', 'ip', 'x_plan', 'tier_')
    """
    if key in ADDRESS_KEYS:
        return "ip"
    kind = re.sub(r"\W", "_", key[:MAX_KIND_LENGTH], flags=re.ASCII) or "_"
    kind = kind if kind.isidentifier() else f"_{kind}"
    return f"{kind}_" if kind in RESERVED_KINDS else kind


def _follows_denials(line: DescriptorLine) -> bool:
    return not line.denies


def _shadow(described: _DescribedMatch, cost: int, verdict: Verdict) -> Shadow:
    applied = AppliedLimit(described.rule.rule, described.key, cost, None, None)
    return Shadow(applied, Decision(False, (described.key,), (verdict,), None, None, 0, 0, cost))
