"""Encoding of decision events as bytes, and decoding into records.

Bytes wait for their delivery without work for the garbage collector, and can be decoded by another process. Both
processes run the same Python, so that marshal is safe.
"""

from __future__ import annotations

import time
from itertools import count
from marshal import dumps, loads
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.algorithms import NEVER
from headgate.policy.model import Client, Identity, Policy
from headgate.policy.routes import METHODS
from headgate.telemetry.decision_log.record import (
    ENVOY_METHODS,
    DecisionRecord,
    LimitDenial,
    encode_charges,
    id_prefix,
    lost_record,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.gate.admission import Shadow
    from headgate.gate.event_stream import DecisionEvent
    from headgate.limits import Limit
    from headgate.policy.model import Rule
    from headgate.policy.snapshot import CompiledRule, RoutePlan
    from headgate.telemetry.decision_log.record import Outcome, Reason
    from headgate.telemetry.pseudonyms import Pseudonymizer

__all__ = ["FORMAT", "MAX_EDITIONS", "EventDecoder", "EventEncoder", "Labels", "encode_loss"]

FORMAT: Final = 2
"""The newest marshal format that does not search for repeated objects."""
MAX_CACHED: Final = 10_000
CACHE_LIFETIME_S: Final = 60.0
"""Caches are cleared by the first miss after this time, so that they keep no old policy alive."""
MAX_EDITIONS: Final = 32
"""Policies whose labels are kept, for events that still wait."""
LOSS_FIELDS: Final = 3
NO_LIMIT: Final = ("", "", 0, 0, 0, "", "", 0, 0, 0)
"""The fields of a limit, for records without one."""

Labels: TypeAlias = "list[tuple[str, str, str]]"
"""Kind, value and label of the clients that a policy labels; API keys as hashes."""

_new_tuple = tuple.__new__


class EventEncoder:
    """Encodes the events of one process."""

    def __init__(self, clients: Pseudonymizer) -> None:
        self._clients = clients
        self._headers: dict[tuple[RoutePlan, str | None], bytes] = {}
        self._limits: dict[tuple[int, int], tuple[Any, bytes]] = {}
        """By the ids of a rule and a limit, which are kept alive here."""
        self._policies: dict[int, tuple[Any, int]] = {}
        """Editions by the ids of policies, which are kept alive here."""
        self._editions: dict[int, tuple[Client, ...]] = {}
        self._numbers = count(1)
        self._cached_since = time.monotonic()

    def encode(self, event: DecisionEvent, weight: float) -> bytes:
        received_us, _, method, outcome, resolution, decision, shadows, _, quotas, restrictions = event
        route, keys, cost, rules, who, tier, _, block = resolution
        header = self._headers.get((route, tier)) or self._encode_header(route, tier)
        fields: Any
        actions = "; ".join([each.sentence for each in restrictions]) if restrictions else ""
        if decision is None:
            note, refused, allowed = "" if block is None else block.reason or "", "", None
            if outcome == "unavailable":
                note, refused = f"{route.priority} traffic was shed", "overloaded"
            elif block is not None:
                refused = "blocked"
            elif outcome == "blocked":
                refused = "challenged" if restrictions[0].action == "challenge" else "slowed-down"
            fields = (
                received_us,
                method,
                header,
                note or actions,
                refused,
                weight,
                allowed,
                None,
                0,
                who,
                (),
                (),
                (),
                (),
            )
        else:
            limits = [self._encode_limit(rule, key[0]) for rule, key in zip(rules, keys, strict=True)]
            denying = _encode_denying(shadows) if shadows else ()
            charges = [(each.name, each.amount, each.paid_by, each.id) for each in quotas] if quotas else ()
            answer = decision.allowed, decision.degraded, cost, who, limits, decision.verdicts, denying, charges
            fields = received_us, method, header, actions, "", weight, *answer
        try:
            return dumps(fields, FORMAT)
        except ValueError:  # most likely an identity of a subclass of str
            return dumps(_as_builtin(fields), FORMAT)

    def labels_since(self, edition: int) -> dict[int, Labels]:
        """The labels of all policies after an edition, complete for the events that are encoded by now."""
        return {
            number: [
                (kind, self._clients.hash_of(kind, value) if kind == "api_key" else value, each.label)
                for each in clients
                if each.label
                for kind, value in (each.identity,)
            ]
            for number, clients in list(self._editions.items())
            if number > edition
        }

    def _encode_header(self, route: RoutePlan, tier: str | None) -> bytes:
        self._expire()
        is_local, edition = route.on_failure == "local", self._edition(route.policy)
        fields = route.policy.name, route.endpoint, route.route_class or "", tier or "", is_local, edition
        header = self._headers[route, tier] = dumps(fields, FORMAT)
        return header

    def _encode_limit(self, compiled: CompiledRule, limit: Limit) -> bytes:
        cached = self._limits.get((id(compiled), id(limit)))
        if cached is None:
            self._expire()
            encoded = dumps(_limit_fields(compiled.rule, limit, is_tightened=compiled.is_tightened(limit)), FORMAT)
            cached = self._limits[id(compiled), id(limit)] = (compiled, limit), encoded
        return cached[1]

    def _edition(self, policy: Any) -> int:
        """The number of a policy, by which its labels are found; 0 if it has no clients."""
        if not policy.clients:
            return 0
        _, number = self._policies.get(id(policy)) or (None, next(self._numbers))
        self._editions[number] = policy.clients
        self._policies[id(policy)] = policy, number
        while len(self._editions) > MAX_EDITIONS:
            self._editions.pop(min(self._editions, default=0), None)
        return number

    def _expire(self) -> None:
        now = time.monotonic()
        is_full = len(self._limits) >= MAX_CACHED or len(self._headers) >= MAX_CACHED
        if is_full or now - self._cached_since > CACHE_LIFETIME_S:
            self._cached_since = now
            self._policies = dict(sorted(self._policies.items(), key=lambda each: each[1][1])[-1:])
            self._headers.clear()
            self._limits.clear()


def encode_loss(count: int, since_us: int, until_us: int) -> bytes:
    """The event that stands for events that were lost."""
    return dumps((since_us, until_us, count), FORMAT)


def _limit_fields(rule: Rule, limit: Limit, *, is_tightened: bool = False) -> tuple[Any, ...]:
    """The fields that all denials by a limit have in common."""
    is_of_tier = any(limit is each for each in rule.tiers.values())
    origin = "action" if is_tightened else "" if limit is rule.limit else "tier" if is_of_tier else "override"
    by = "+".join(rule.by) or "global"
    algorithm = limit.algorithm if limit.calendar is None else f"{limit.algorithm} {limit.calendar.code}"
    return rule.name, by, limit.quota, limit.period_us, limit.capacity, algorithm, origin


def _encode_denying(shadows: Sequence[Shadow]) -> list[tuple[bytes, int, int, int]]:
    """The answers of those limits in shadow mode that would have denied."""
    return [
        (dumps(_limit_fields(rule, key.limit), FORMAT), cost, decision.verdicts[0][0], decision.verdicts[0][1])
        for (rule, key, cost, _, _), decision in shadows
        if not decision.allowed
    ]


def _as_builtin(value: Any) -> Any:
    """A copy in which instances of subclasses are replaced by those of built-in types."""
    if value is None or type(value) in (bool, bytes, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {_as_builtin(name): _as_builtin(each) for name, each in value.items()}
    return tuple([_as_builtin(each) for each in value])


class EventDecoder:
    """Creates records from encoded events. Not thread-safe."""

    def __init__(self, clients: Pseudonymizer, *, node: str, region: str) -> None:
        self._clients = clients
        self.node = node
        self._region = region
        self._decoded: dict[bytes, tuple[Any, ...]] = {}
        """Headers and limits, which many events share."""
        self._labels: dict[int, Policy | None] = {0: None}
        """Policies with labelled clients, by edition."""

    @property
    def newest_edition(self) -> int:
        """The newest policy whose labels are known."""
        return max(self._labels)

    def add_labels(self, labels: Mapping[int, Labels]) -> None:
        """Learn the labels of policies whose events may follow."""
        for edition, rows in labels.items():
            clients = tuple([Client(Identity(kind, value), label=label) for kind, value, label in rows])
            self._labels[edition] = Policy(clients=clients) if clients else None
        while len(self._labels) > MAX_EDITIONS + 1:
            del self._labels[min(edition for edition in self._labels if edition)]

    def decode(self, event: bytes, token: str, number: int) -> DecisionRecord:
        """The record of an event; its id is the same each time it is decoded."""
        fields = loads(event)
        if len(fields) == LOSS_FIELDS:
            since_us, until_us, lost = fields
            id = _record_id(since_us, token, number)
            return lost_record(id, lost, since_us=since_us, until_us=until_us, node=self.node, region=self._region)
        at_us, method, header, note, refused, weight, allowed, degraded, cost, who, limits, verdicts, *more = fields
        shadows, charges = more
        policy, endpoint, route_class, tier, is_local, edition = self._cached(header)
        outcome: Outcome = "allowed"
        reason: Reason = "within-limits"
        decisive: tuple[Any, ...] = NO_LIMIT
        others: list[LimitDenial] = []
        if refused:
            outcome, reason = "unavailable" if refused == "overloaded" else "blocked", refused
        elif allowed is None:
            reason = "no-limit"
        elif not allowed and degraded and not is_local:
            outcome, reason = "unavailable", "store-away"
            decisive = (*NO_LIMIT[:-1], max(verdict[1] for verdict in verdicts))
        elif not allowed:
            outcome = "denied"
            denials = [each for each in self._answers(limits, cost, verdicts) if each.retry_us != 0]
            decisive, *others = sorted(denials, key=_wait_us, reverse=True)
            reason = "over-capacity" if decisive[-1] is None else "over-limit"
        elif shadows:
            reason = "over-shadow-limit"
            decisive, *others = [self._answer(*each) for each in shadows]
        elif not degraded or is_local:
            answers = self._answers(limits, cost, verdicts)
            decisive = min(answers, key=lambda each: each[8] / each[4])  # remaining, burst
        kind, key, label, kinds, keys = self._clients.pseudonym((*who, *who.values()), self._labels.get(edition))
        method = method if method in METHODS or method in ENVOY_METHODS else "OTHER"
        at = _record_id(at_us, token, number), at_us, self.node, self._region, policy, method, endpoint
        notes = reason == "over-shadow-limit", note, encode_charges(charges)
        about = kind, key, label, degraded or "", *notes, weight, kinds, keys
        values = *at, route_class, tier, outcome, reason, *decisive, *about, tuple(others)
        return _new_tuple(DecisionRecord, values)

    def _answers(self, limits: Sequence[bytes], cost: Any, verdicts: Any) -> list[LimitDenial]:
        costs = [cost] * len(limits) if isinstance(cost, int) else cost
        return [self._answer(limits[at], costs[at], *verdict[:2]) for at, verdict in enumerate(verdicts)]

    def _answer(self, limit: bytes, cost: int, remaining: int, retry_us: int) -> LimitDenial:
        wait_us = None if retry_us == NEVER else retry_us
        return _new_tuple(LimitDenial, (*self._cached(limit), cost, remaining, wait_us))

    def _cached(self, encoded: bytes) -> tuple[Any, ...]:
        decoded = self._decoded.get(encoded)
        if decoded is None:
            if len(self._decoded) >= MAX_CACHED:
                self._decoded.clear()
            decoded = self._decoded[encoded] = loads(encoded)
        return decoded


def _record_id(at_us: int, token: str, number: int) -> str:
    return f"{id_prefix(at_us)}{token}{number & 0xFFFFFFFF:08x}"


def _wait_us(denial: LimitDenial) -> float:
    return float("inf") if denial.retry_us is None else denial.retry_us
