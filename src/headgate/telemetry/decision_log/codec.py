"""What is kept of a decision until there is time to make a record of it: one string of bytes, which any process can
read, and which the garbage collector never looks at. This is what a rejection costs its request: the common ones
are packed by `keep`."""

from __future__ import annotations

import time
from itertools import count
from marshal import dumps, loads
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.algorithms import NEVER
from headgate.policy.model import Client, Identity, Policy
from headgate.policy.routes import METHODS
from headgate.telemetry.decision_log.record import DecisionRecord, LimitDenial, id_prefix, lost_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.gate.admission import Shadow
    from headgate.gate.event_stream import DecisionEvent
    from headgate.limits import Limit
    from headgate.policy.model import Rule
    from headgate.policy.snapshot import CompiledRule, RoutePlan
    from headgate.telemetry.decision_log.record import Outcome, Reason
    from headgate.telemetry.pseudonyms import Pseudonymizer

__all__ = ["EDITIONS", "FORMAT", "EventDecoder", "EventEncoder", "Labels", "pack_denial", "packed_loss"]

FORMAT: Final = 2
"""Of marshal: the newest that spends no time on finding what stands there twice."""
MOST_KNOWN: Final = 10_000
STALE: Final = 60.0
"""Seconds after which what is known of routes and limits is learnt anew, when there is something new to learn: else the
policies of days would be kept alive by it."""
EDITIONS: Final = 32
"""Policies whose labels are kept, for what they decided and still waits."""

Labels: TypeAlias = "list[tuple[str, str, str]]"
"""Kind, value and label of those clients whom a policy gives one; of API keys the hash."""


class _EncodedHeader(NamedTuple):
    """What is the same for all requests of a tier on a route."""

    rules: Sequence[CompiledRule]
    limits: tuple[Limit | None, ...] | None
    """Whose numbers count for those who have no override; None where nobody has one."""
    packed: bytes


def pack_denial(places: dict[Any, _EncodedHeader], event: DecisionEvent) -> bytes | None:
    """A denial by the store's own answer, on limits without overrides, as most are; None for all other events."""
    received_us, _, method, _, resolution, decision, _, _ = event
    if decision is None or decision.degraded is not None or decision.allowed:
        return None
    route, keys, _, rules, who, tier, _, _ = resolution
    place = places.get(route if tier is None else (route, tier))
    if place is None or place.rules is not rules:
        return None
    if place.limits is not None and place.limits != tuple([key.limit for key in keys]):
        return None
    fields: Any = received_us, method, place.packed, who, decision.verdicts
    try:
        return dumps(fields, FORMAT)
    except ValueError:  # an identity, most likely, that is a kind of text of the app's own
        return None


class EventEncoder:
    """Packs the decisions of one process. Any number of threads may."""

    def __init__(self) -> None:
        self.places: dict[Any, _EncodedHeader] = {}
        """By the route, or route and tier where there is one: to make a pair takes as long as to look it up."""
        self._limits: dict[tuple[int, int], tuple[Any, bytes]] = {}
        """What is the same for all denials by a limit, with the limit."""
        self._policies: dict[int, tuple[Any, int]] = {}
        self._editions: dict[int, tuple[Client, ...]] = {}
        self._numbers = count(1)
        self._learnt_since = time.monotonic()

    def pack(self, event: DecisionEvent, weight: float) -> bytes:
        """Any decision."""
        now_us, _, method, _, resolution, decision, shadow_answers, _ = event
        route, keys, cost, rules, who, tier, _, block = resolution
        place = self.places.get(route if tier is None else (route, tier))
        if place is None:
            place = self._learn_place(route, tier)
        fields: Any
        if decision is None:
            note = None if block is None else block.reason or ""
            fields = now_us, method, place.packed, note, weight, None, None, 0, who, (), (), ()
        else:
            limits = [self._limit(rule, key[0]) for rule, key in zip(rules, keys, strict=True)]
            shadows = _refusing(shadow_answers) if shadow_answers else ()
            said = decision.allowed, decision.degraded, cost, who, limits, decision.verdicts, shadows
            fields = now_us, method, place.packed, None, weight, *said
        try:
            return dumps(fields, FORMAT)
        except ValueError:  # an identity, most likely, that is a kind of text of the app's own
            return dumps(_plain(fields), FORMAT)

    def labels_since(self, edition: int, clients: Pseudonymizer) -> dict[int, Labels]:
        """The labels of all policies after that one. What is packed before this is asked finds its own among them."""
        return {
            number: [
                (kind, clients.written(kind, value) if kind == "api_key" else value, each.label)
                for each in known
                if each.label
                for kind, value in (each.identity,)
            ]
            for number, known in list(self._editions.items())
            if number > edition
        }

    def _learn_place(self, route: RoutePlan, tier: str | None) -> _EncodedHeader:
        self._forget_some()
        policy = route.policy
        edition = self._edition(policy, policy.clients) if policy.clients else 0
        limits = tuple([rule.tiers.get(tier, rule.limit) for rule in route.rules])
        said = [columns(each.rule, limit) if limit else None for each, limit in zip(route.rules, limits, strict=True)]
        head = policy.name, route.endpoint, route.route_class or "", tier or "", route.on_failure == "local", edition
        packed = dumps((*head, route.costs if route.rules else 0, said), FORMAT)
        has_others = route.has_overrides
        place = _EncodedHeader(route.rules, limits if has_others else None, packed)
        self.places[route if tier is None else (route, tier)] = place
        return place

    def _limit(self, compiled: CompiledRule, limit: Limit) -> bytes:
        known = self._limits.get((id(compiled), id(limit)))
        if known is None:
            self._forget_some()
            packed = dumps(columns(compiled.rule, limit), FORMAT)
            known = self._limits[id(compiled), id(limit)] = (compiled, limit), packed
        return known[1]

    def _edition(self, policy: Any, clients: tuple[Client, ...]) -> int:
        """The number of a policy, under which its labels are found."""
        _, number = self._policies.get(id(policy)) or (None, next(self._numbers))
        self._editions[number] = clients
        self._policies[id(policy)] = policy, number
        while len(self._editions) > EDITIONS:
            self._editions.pop(min(self._editions, default=0), None)
        return number

    def _forget_some(self) -> None:
        now = time.monotonic()
        if now - self._learnt_since > STALE or len(self._limits) >= MOST_KNOWN or len(self.places) >= MOST_KNOWN:
            self._learnt_since = now
            newest = max(self._policies.items(), key=lambda each: each[1][1], default=None)
            self._policies = dict([newest] if newest is not None else [])
            self.places.clear()
            self._limits.clear()


def packed_loss(count: int, since_us: int, until_us: int) -> bytes:
    """What is kept of decisions that could not be."""
    return dumps((since_us, until_us, count), FORMAT)


def columns(rule: Rule, limit: Limit) -> tuple[Any, ...]:
    """What all denials by a limit have in common."""
    is_of_tier = any(limit is each for each in rule.tiers.values())
    origin = "" if limit is rule.limit else "tier" if is_of_tier else "override"
    by = "+".join(rule.by) or "global"
    return rule.name, by, limit.quota, limit.period_us, limit.capacity, limit.algorithm, origin


def _refusing(shadows: Sequence[Shadow]) -> list[tuple[bytes, int, int, int]]:
    """What those limits say that are only watched, and would deny."""
    return [
        (dumps(columns(rule, key.limit), FORMAT), cost, decision.verdicts[0][0], decision.verdicts[0][1])
        for (rule, key, cost, _, _), decision in shadows
        if not decision.allowed
    ]


def _plain(value: Any) -> Any:
    """The same out of nothing but what comes with Python."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | float | bytes) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    return tuple([_plain(each) for each in value])


NOTHING: Final = ("", "", 0, 0, 0, "", "", 0, 0, 0)
"""The fields of a limit, where there is none."""

PLAIN: Final = 5
"""How many fields there are in what is packed of most rejections."""
REST_OF_PLAIN: Final = ("", False, "", 1.0)
"""Of these: why degraded, whether only watched, the note, the weight."""
LOSS: Final = 3
"""How many fields there are in what stands for decisions that are lost."""

_new_tuple = tuple.__new__


class EventDecoder:
    """Makes records of what one process has decided, in this process or another."""

    def __init__(self, clients: Pseudonymizer, *, node: str, region: str) -> None:
        self._clients = clients
        self.node = node
        self._region = region
        self._unpacked: dict[bytes, tuple[Any, ...]] = {}
        """What is the same in all denials on a route, or by a limit."""
        self._labels: dict[int, Policy | None] = {0: None}
        """By the number of their policy."""

    @property
    def newest(self) -> int:
        """The number of the newest policy whose labels are known."""
        return max(self._labels)

    def learn(self, labels: Mapping[int, Labels]) -> None:
        """From now on, these policies may have decided."""
        for number, each in labels.items():
            known = tuple([Client(Identity(kind, value), label=label) for kind, value, label in each])
            self._labels[number] = Policy(clients=known) if known else None
        while len(self._labels) > EDITIONS + 1:
            del self._labels[min(number for number in self._labels if number)]

    def record(self, raw: bytes, token: str, number: int) -> DecisionRecord:
        """The record of what `EventEncoder` has packed, under an id that is the same each time it is made."""
        fields = loads(raw)
        if len(fields) == PLAIN:
            return self._denied(fields, token, number)
        if len(fields) == LOSS:
            since_us, until_us, count = fields
            id = _id(since_us, token, number)
            return lost_record(id, count, since_us=since_us, until_us=until_us, node=self.node, region=self._region)
        now_us, method, place, note, weight, allowed, why_degraded, cost, who, limits, verdicts, shadows = fields
        policy, endpoint, route_class, tier, is_local, edition, _, _ = self._known(place)
        outcome: Outcome = "allowed"
        reason: Reason = "within-limits"
        degraded, shadow = why_degraded or "", False
        numbers: tuple[Any, ...] = NOTHING
        also: list[LimitDenial] = []
        if note is not None:
            outcome = reason = "blocked"
        elif allowed is None:
            reason = "no-limit"
        elif not allowed:
            if degraded and not is_local:
                outcome, reason = "unavailable", "store-away"
                numbers = (*NOTHING[:-1], max(verdict[1] for verdict in verdicts))
            else:
                outcome = "denied"
                costs = [cost] * len(limits) if isinstance(cost, int) else cost
                said = [each for each in zip(limits, costs, verdicts, strict=True) if each[2][1]]
                found = [self._denial(columns, paid, *verdict[:2]) for columns, paid, verdict in said]
                numbers, *also = found if len(found) == 1 else sorted(found, key=_wait, reverse=True)
                reason = "over-capacity" if numbers[-1] is None else "over-limit"
        elif shadows:
            shadow, reason = True, "over-shadow-limit"
            numbers, *also = [self._denial(*each) for each in shadows]
        elif not degraded or is_local:
            costs = [cost] * len(limits) if isinstance(cost, int) else cost
            numbers = self._tightest(limits, costs, verdicts)
        who_it_was = self._clients.named((*who, *who.values()), self._labels.get(edition))
        kind, key, label, kinds, keys = who_it_was
        return _new_tuple(
            DecisionRecord,
            (
                _id(now_us, token, number),
                now_us,
                self.node,
                self._region,
                policy,
                method if method in METHODS else "OTHER",
                endpoint,
                route_class,
                tier,
                outcome,
                reason,
                *numbers,
                kind,
                key,
                label,
                degraded,
                shadow,
                note or "",
                weight,
                kinds,
                keys,
                tuple(also),
            ),
        )

    def _denied(self, fields: tuple[Any, ...], token: str, number: int) -> DecisionRecord:
        """The same for what most rejections are, in less time."""
        now_us, method, place, who, verdicts = fields
        policy, endpoint, route_class, tier, _, edition, cost, limits = self._known(place)
        found: list[LimitDenial] = []
        for at, (remaining, retry_us, _, _) in enumerate(verdicts):
            if retry_us:
                paid = cost if type(cost) is int else cost[at]
                told = None if retry_us == NEVER else retry_us
                found.append(_new_tuple(LimitDenial, (*limits[at], paid, remaining, told)))
        if len(found) > 1:
            found.sort(key=_wait, reverse=True)
        numbers, *also = found
        reason = "over-capacity" if numbers[-1] is None else "over-limit"
        kind, key, label, kinds, keys = self._clients.named((*who, *who.values()), self._labels.get(edition))
        method = method if method in METHODS else "OTHER"
        head = self.node, self._region, policy, method, endpoint, route_class, tier, "denied", reason
        tail = kind, key, label, *REST_OF_PLAIN, kinds, keys, tuple(also)
        return _new_tuple(DecisionRecord, (_id(now_us, token, number), now_us, *head, *numbers, *tail))

    def _tightest(self, limits: list[bytes], costs: Any, verdicts: Any) -> LimitDenial:
        """The limit with the least share left: no denial, but the same fields."""
        said = zip(limits, costs, verdicts, strict=True)
        found = [self._denial(columns, cost, *verdict[:2]) for columns, cost, verdict in said]
        return min(found, key=lambda each: each.remaining / each.burst)

    def _denial(self, columns: bytes, cost: int, remaining: int, retry_us: int) -> LimitDenial:
        return _new_tuple(
            LimitDenial, (*self._known(columns), cost, remaining, None if retry_us == NEVER else retry_us)
        )

    def _known(self, packed: bytes) -> tuple[Any, ...]:
        known = self._unpacked.get(packed)
        if known is None:
            if len(self._unpacked) >= MOST_KNOWN:
                self._unpacked.clear()
            known = self._unpacked[packed] = loads(packed)
        return known


def _id(at_us: int, token: str, number: int) -> str:
    return f"{id_prefix(at_us)}{token}{number & 0xFFFFFFFF:08x}"


def _wait(denial: LimitDenial) -> float:
    return float("inf") if denial.retry_us is None else denial.retry_us
