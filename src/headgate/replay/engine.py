"""PolicyReplay: decides logged requests under a policy, as a gate with an exact store would have at their times.

It uses the policy's snapshot, the memory store and the algorithms of production under a virtual clock, without the
parts of a gate that build responses.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.algorithms import NEVER
from headgate.clock import MINUTE_US
from headgate.policy.lists.list_watcher import stored_lists
from headgate.policy.routes import decode_path
from headgate.policy.snapshot import Snapshot, client_kind
from headgate.replay.formats import AGENT
from headgate.replay.identities import LogIdentities
from headgate.replay.scenarios import ScenarioReplay
from headgate.replay.statistics import (
    AppliedRules,
    ClientTotals,
    RejectionTotals,
    ReplayTimeline,
    RouteTotals,
    RuleTotals,
)
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Leave, Refund, Renew

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.decisions import Decision
    from headgate.keys import Key
    from headgate.policy.api_keys import ApiKeyHasher
    from headgate.policy.model import Policy, Rule, StatusTest
    from headgate.policy.snapshot import Resolution, RoutePlan
    from headgate.replay.formats import LoggedRequest, Sender
    from headgate.replay.identities import PathIdentity, TierTable

__all__ = ["NEAR_SHARE", "PolicyReplay"]

NEAR_SHARE: Final = 0.2
"""A client came close to a limit if at most this share of it was left."""
MAX_ENTRIES: Final = 10_000
MAX_TARGETS: Final = 20_000
"""They bound the caches of senders and of paths at about 30 MB."""
MAX_COUNTERS: Final = 1_000_000
KEPT_COUNTERS: Final = 120_000
"""Counters that are kept although they are as new, as the first request of a counter takes longer than later ones."""


class VirtualClock:
    """The time of the request that is being replayed."""

    __slots__ = ("at_us",)

    def __init__(self) -> None:
        self.at_us = 0

    def now_us(self) -> int:
        return self.at_us


class _Shape(NamedTuple):
    """The properties of a request that depend only on its limits."""

    near: tuple[int, ...]
    """By limit: less remaining than this is close to it. 0 for counters that all clients share."""
    leases: tuple[int, ...]
    """The indices of concurrency limits."""
    settled: tuple[tuple[int, int, StatusTest], ...]
    """The limits that count only some responses: their indices, costs and conditions."""
    rules: tuple[RuleTotals, ...]
    """The statistics of the limits, in the order of the keys."""
    applied: AppliedRules
    kinds: frozenset[str]
    """The kinds of identity that the limits of the route count by, without those that each request has."""


class _ResolvedSender:
    """The limits of one sender on one route, with the statistics that its requests count for."""

    __slots__ = ("agent", "check", "client", "is_blocked", "is_plain", "near", "resolution", "shape", "totals")

    def __init__(
        self, resolution: Resolution, client: ClientTotals, totals: RouteTotals, shape: _Shape, agent: str
    ) -> None:
        self.resolution = resolution
        self.agent = agent
        self.client = client
        self.totals = totals
        self.shape = shape
        self.near = shape.near
        self.is_blocked = resolution.block is not None
        self.check = Check(resolution.keys, resolution.cost) if resolution.keys and not self.is_blocked else None
        self.is_plain = self.check is not None and not (shape.leases or shape.settled or resolution.route.shadows)


class PolicyReplay:
    """The replay of a log under one policy. Requests must come in the order of their times."""

    def __init__(
        self,
        policy: Policy,
        hasher: ApiKeyHasher,
        *,
        tiers: TierTable,
        paths: Iterable[PathIdentity] = (),
        max_counters: int = MAX_COUNTERS,
    ) -> None:
        self.policy = policy
        self.snapshot = Snapshot(policy, hasher.fingerprint, lists=stored_lists(policy))
        self.identities = LogIdentities(self.snapshot, hasher, tiers=tiers, paths=paths)
        self.clock = VirtualClock()
        self.store = MemoryStore(self.clock, max_keys=max_counters, kept_keys=KEPT_COUNTERS)
        self.requests = 0
        self.rejected = 0
        self.blocked = 0
        self.first_us: int | None = None
        self.last_us: int | None = None
        self.clients: dict[tuple[str, str], ClientTotals] = {}
        """By kind and value of the identity that names a client."""
        self.rules: dict[str, RuleTotals] = {rule.name: RuleTotals(rule) for rule in policy.rules}
        self.routes: dict[Any, RouteTotals] = {}
        self.scenarios: ScenarioReplay | None = None
        """The evaluation of the policy's scenarios of abuse; None if it has none."""
        if policy.abuse is not None and policy.abuse.scenarios:
            self.scenarios = ScenarioReplay(policy.abuse, self.snapshot)
        self.timeline: ReplayTimeline | None = None
        self.worst_minute: tuple[int, int, int] | None = None
        """The minute with the most rejections: its start, requests and rejections."""
        self.busiest_minute: tuple[int, int] | None = None
        self.missing_identities: dict[str, int] = {}
        """Senders by the kind of identity that a limit counts by and that they lack."""
        self.unknown_addresses = 0
        self.rejected_in_log = 0
        """Requests with status 429 in the log."""
        self.unmeasured = 0
        """Requests under concurrency limits without a duration in the log."""
        self.wait_us: int | None = 0
        """The wait of the last request: 0 if it was admitted, None if it never passes."""
        self._by_path: dict[tuple[str, str], dict[Sender, _ResolvedSender]] = {}
        self._by_route: dict[RoutePlan, dict[Sender, _ResolvedSender]] = {}
        self._entries = 0
        self._shapes: dict[Any, _Shape] = {}
        """By the ids of the rules of a route, and those of the limits, which differ between tiers and overrides."""
        self._applied: dict[tuple[tuple[RuleTotals, int], ...], AppliedRules] = {}
        self._transitions_us = [*policy.transition_times_us, sys.maxsize]
        self._boundary_us = -sys.maxsize
        self._minute_us = 0
        self._active: dict[int, RouteTotals] = {}
        """The routes with requests in the current minute."""
        self._held: list[tuple[int, int, str, tuple[Key, ...]]] = []
        """Leases by the time of their next renewal or end: with their end and their id."""

    def replay(self, requests: Iterable[LoggedRequest]) -> None:
        """Decide requests, none of which is older than those before."""
        clock, by_path, admit, active = self.clock, self._by_path, self.store.admit, self._active
        boundary_us, held, scenarios = self._boundary_us, self._held, self.scenarios
        for at_us, method, target, status, sender, duration_us in requests:
            if at_us >= boundary_us:
                boundary_us = self._advance(at_us)
            if held and held[0][0] <= at_us:
                self._update_leases(at_us)
            clock.at_us = at_us
            senders = by_path.get((method, target))
            if senders is None:
                senders = self._find_route(method, target)
            entry = senders.get(sender)
            if entry is None:
                entry = self._resolve(method, target, sender, senders)
            if status == 429:
                self.rejected_in_log += 1
            entry.client.requests += 1
            totals = entry.totals
            totals.requests += 1
            active[id(totals)] = totals
            rejected = self.rejected
            if not entry.is_plain or not admit(entry.check, entry.near):  # type: ignore[arg-type]
                self._decide(entry, status, duration_us)
            if scenarios is not None and not entry.is_blocked:
                route, who = entry.resolution.route, entry.resolution.who
                given = status if self.rejected == rejected else 429
                scenarios.add(at_us, route, who, entry.agent, decode_path(target), given, duration_us)

    def finish(self) -> None:
        """Complete the statistics after the last request."""
        if self.first_us is not None:
            self.last_us = self.clock.at_us
            self._close_minute()
        for totals in self.routes.values():
            for rule, _ in totals.rules.costs:
                rule.requests += totals.requests
        self._by_path.clear()
        self._by_route.clear()
        self.store.close()  # the counters, which take most of the memory; its statistics stay

    # ------------------------------------------------------------------------------------ decisions

    def _decide(self, entry: _ResolvedSender, status: int, duration_us: int | None) -> None:
        """Decide a request that takes several operations, or none."""
        at_us = self.clock.at_us
        if entry.is_blocked:
            self.blocked += 1
            entry.totals.blocked += 1
            self._record_rejection(entry).blocked += 1
            self.wait_us = None
            return
        decision: Decision | None = None
        if entry.shape.leases:
            number = entry.totals.requests  # unique together with the keys
            decision = self._enter(entry, number, duration_us)
        elif entry.check is not None:
            decision = self.store.decide(entry.check)
        if decision is not None and not decision.allowed:
            self._record_denial(entry, decision)
            return
        self.wait_us = 0
        if decision is not None:
            self._record_near(entry, decision)
            for index, cost, is_counted in entry.shape.settled:
                if status and not is_counted(status):
                    self.store.run(Refund(decision.keys[index], cost, None, at_us))
        if entry.resolution.route.shadows:
            self._decide_shadows(entry)

    def _decide_shadows(self, entry: _ResolvedSender) -> None:
        """Evaluate limits in shadow mode, after the others have admitted the request."""
        for applied in entry.resolution.shadows:
            totals = self._rule_totals(applied.rule)
            totals.requests += 1
            decision = self.store.decide(Check((applied.key,), applied.cost))
            if not decision.allowed:
                entry.client.shadow_rejections += 1
                self._count_denial(totals, decision.verdicts[0][1])

    def _enter(self, entry: _ResolvedSender, number: int, duration_us: int | None) -> Decision:
        """Decide a request under concurrency limits, and schedule the end of its leases."""
        check, at_us = entry.check, self.clock.at_us
        assert check is not None
        name = f"{id(entry.totals)}-{number}"
        decision: Decision = self.store.decide(check._replace(id=name))
        if decision.allowed:
            if duration_us is None:
                self.unmeasured += 1
            end_us = at_us + (duration_us or 0)
            self._schedule(name, end_us, tuple([check.keys[index] for index in entry.shape.leases]))
        return decision

    def _schedule(self, name: str, end_us: int, keys: tuple[Key, ...]) -> None:
        """Schedule the next renewal of leases, or their end. A gate renews them while a request is running."""
        renewal_us = self.clock.at_us + min([key.limit.period_us for key in keys]) // 2
        heappush(self._held, (min(end_us, renewal_us), end_us, name, keys))

    def _update_leases(self, now_us: int) -> None:
        while self._held and self._held[0][0] <= now_us:
            due_us, end_us, name, keys = heappop(self._held)
            self.clock.at_us = due_us
            for key in keys:
                self.store.run(Leave(key, name) if due_us >= end_us else Renew(key, name))
            if due_us < end_us:
                self._schedule(name, end_us, keys)

    # ------------------------------------------------------------------------------------ statistics

    def _record_near(self, entry: _ResolvedSender, decision: Decision) -> None:
        self.wait_us = 0
        client = entry.client
        for rule, key, verdict, most in zip(
            entry.shape.rules, decision.keys, decision.verdicts, entry.near, strict=True
        ):
            remaining = verdict[0]
            if remaining < most:
                if client.near is None:
                    client.near = {}
                before = client.near.get(rule.rule.name)
                capacity = key.limit.capacity
                if before is None or remaining * before[1] < before[0] * capacity:
                    client.near[rule.rule.name] = remaining, capacity, self.clock.at_us

    def _record_denial(self, entry: _ResolvedSender, decision: Decision) -> None:
        rejections = self._record_rejection(entry)
        longest: int | None = 0
        for rule, verdict in zip(entry.shape.rules, decision.verdicts, strict=True):
            wait_us = verdict[1]
            if wait_us:
                name = rule.rule.name
                rejections.by_rule[name] = rejections.by_rule.get(name, 0) + 1
                self._count_denial(rule, wait_us)
                longest = None if wait_us == NEVER or longest is None else max(longest, wait_us)
        self.wait_us = longest

    @staticmethod
    def _count_denial(rule: RuleTotals, wait_us: int) -> None:
        rule.rejected += 1
        if wait_us == NEVER:
            rule.unsatisfiable += 1
        elif wait_us > rule.longest_wait_us:
            rule.longest_wait_us = wait_us

    def _record_rejection(self, entry: _ResolvedSender) -> RejectionTotals:
        at_us, client = self.clock.at_us, entry.client
        self.rejected += 1
        entry.totals.rejected += 1
        if client.rejections is None:
            client.rejections = RejectionTotals(at_us, at_us, at_us)
        client.rejections.add(at_us)
        return client.rejections

    def _advance(self, at_us: int) -> int:
        """Close the minute that has ended; return the time of the next change."""
        minute_us = at_us // MINUTE_US * MINUTE_US
        if self.first_us is None:
            self.first_us = at_us
            self.timeline = ReplayTimeline(at_us)
            self._minute_us = minute_us
        elif minute_us > self._minute_us:
            self._close_minute()
            self._minute_us = minute_us
        following = bisect_right(self._transitions_us, at_us)
        if self._boundary_us < (self._transitions_us[following - 1] if following else -sys.maxsize) + 1:
            self._forget_senders()
        self._boundary_us = min(minute_us + MINUTE_US, self._transitions_us[following])
        return self._boundary_us

    def _close_minute(self) -> None:
        active: list[AppliedRules] = []
        requests = rejected = 0
        for totals in self._active.values():
            new, failed = totals.requests - totals.counted_requests, totals.rejected - totals.counted_rejected
            totals.counted_requests, totals.counted_rejected = totals.requests, totals.rejected
            requests += new
            rejected += failed
            if new > failed:
                if not totals.rules.admitted:
                    active.append(totals.rules)
                totals.rules.admitted += new - failed
        self._active.clear()
        self.requests += requests
        self._record_peaks(active)
        if self.timeline is not None:
            self.timeline.add(max(self._minute_us, self.timeline.start_us), requests, rejected)
        if rejected and (self.worst_minute is None or rejected > self.worst_minute[2]):
            self.worst_minute = self._minute_us, requests, rejected
        if self.busiest_minute is None or requests > self.busiest_minute[1]:
            self.busiest_minute = self._minute_us, requests

    def _record_peaks(self, active: list[AppliedRules]) -> None:
        """Compare what limits have admitted in this minute with their peaks."""
        if len(active) == 1 and active[0].admitted <= active[0].peak_requests:
            active[0].admitted = 0
            return
        admitted: dict[RuleTotals, int] = {}
        for applied in active:
            for rule, cost in applied.costs:
                admitted[rule] = admitted.get(rule, 0) + cost * applied.admitted
            applied.admitted = 0
        for rule, total in admitted.items():
            if total > rule.peak_admitted:
                rule.peak_admitted, rule.peak_minute_us = total, self._minute_us
        for applied in active:
            applied.peak_requests = min([rule.peak_admitted // cost for rule, cost in applied.costs if cost], default=0)

    # ------------------------------------------------------------------------------------ resolution

    def _find_route(self, method: str, target: str) -> dict[Sender, _ResolvedSender]:
        if self.identities.paths:  # the sender of a request depends on its path
            if len(self._by_path) >= MAX_TARGETS:
                self._forget_senders()
            return self._by_path.setdefault((method, target), {})
        if len(self._by_path) >= MAX_TARGETS:
            self._by_path.clear()
        route = self.snapshot.route(method, decode_path(target))
        senders = self._by_path[method, target] = self._by_route.setdefault(route, {})
        return senders

    def _resolve(
        self, method: str, target: str, sender: Sender, senders: dict[Sender, _ResolvedSender]
    ) -> _ResolvedSender:
        if self._entries >= MAX_ENTRIES:
            self._forget_senders()
            senders = self._find_route(method, target)
        route = self.snapshot.route(method, decode_path(target))
        who = self.identities.extract(sender, target, route)
        resolution = self.snapshot.resolve(route, who, self.clock.at_us)
        if route.is_exempt:
            resolution = resolution._replace(keys=(), rules=(), block=None)
        unnamed = self.identities.only_watched
        kind = client_kind({name: value for name, value in who.items() if name != "tier" and name not in unnamed})
        name = kind, who[kind]
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = ClientTotals(resolution.tier)
        if resolution.tier is not None:
            client.tier = resolution.tier
        shape = self._shape(resolution)
        applied = shape.applied if resolution.block is None else self._apply(())
        of_route = route.endpoint, route.route_class, resolution.tier, applied
        totals = self.routes.get(of_route)
        if totals is None:
            totals = self.routes[of_route] = RouteTotals(*of_route)
        agent = dict(sender[2]).get(AGENT, "")
        entry = senders[sender] = _ResolvedSender(resolution, client, totals, shape, agent)
        self._entries += 1
        self._note_missing(entry)
        return entry

    def _shape(self, resolution: Resolution) -> _Shape:
        keys, rules = resolution.keys, resolution.rules
        name = id(rules), tuple([id(key.limit) for key in keys])
        shape = self._shapes.get(name)
        if shape is None or len(shape.rules) != len(rules):
            near = tuple(
                [
                    int(key.limit.capacity * NEAR_SHARE) + 1 if set(rule.rule.by) - {"endpoint"} else 0
                    for key, rule in zip(keys, rules, strict=True)
                ]
            )
            leases = tuple([at for at, key in enumerate(keys) if key.limit.algorithm == "concurrency"])
            settled = tuple(
                [
                    (at, rule.cost, rule.rule.count_when)
                    for at, rule in enumerate(rules)
                    if rule.rule.count_when is not None and at not in leases
                ]
            )
            totals = tuple([self._rule_totals(rule.rule) for rule in rules])
            applied = self._apply([(each, rule.cost) for each, rule in zip(totals, rules, strict=True)])
            by = frozenset(kind for each in resolution.route.rules for kind in each.rule.by) - {"client", "endpoint"}
            shape = _Shape(near, leases, settled, totals, applied, by)
            if rules is resolution.route.rules:  # which stay alive, so that their id is not used again
                self._shapes[name] = shape
        return shape

    def _apply(self, costs: Iterable[tuple[RuleTotals, int]]) -> AppliedRules:
        key = tuple(costs)
        return self._applied.get(key) or self._applied.setdefault(key, AppliedRules(key))

    def _note_missing(self, entry: _ResolvedSender) -> None:
        """Remember the kinds of identity that the log lacks."""
        who = entry.resolution.who
        self.unknown_addresses += who["address"] == "unknown"
        for kind in entry.shape.kinds:
            if not who.get(kind):
                self.missing_identities[kind] = self.missing_identities.get(kind, 0) + 1

    def _rule_totals(self, rule: Rule) -> RuleTotals:
        totals = self.rules.get(rule.name)
        if totals is None:  # a safety net for unknown API keys
            totals = self.rules[rule.name] = RuleTotals(rule)
        return totals

    def _forget_senders(self) -> None:
        """Resolve all senders again: an entry of the policy has begun or ended, or the caches are full."""
        self._by_path.clear()
        self._by_route.clear()
        self._entries = 0
