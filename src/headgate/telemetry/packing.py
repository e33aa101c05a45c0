"""What is kept of a decision until there is time to make a record of it, and how many of these are packed together.

A request leaves an entry: references to a few values that it has anyway. That is all that a rejection costs it. A
thread packs entries soon after, some hundred at a time, into bytes that any process can read, and that the garbage
collector never looks at.
"""

from __future__ import annotations

import time
from itertools import count, pairwise
from marshal import dumps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.adapters.way import Admission, Arrival, Shadow
    from headgate.limits import Limit
    from headgate.policy.model import Client, Rule
    from headgate.policy.snapshot import CompiledRule, Resolution, RoutePlan
    from headgate.telemetry.clients import Clients

__all__ = [
    "EDITIONS",
    "FORMAT",
    "LOSS",
    "REJECTION",
    "Batch",
    "Entry",
    "Labels",
    "Packer",
    "Piece",
    "entry",
    "lost_entry",
]

FORMAT: Final = 4
"""Of marshal: the newest, which says once what stands there twice."""
MOST_KNOWN: Final = 10_000
STALE: Final = 60.0
"""Seconds after which what is known of routes and limits is learnt anew, when there is something new to learn: else the
policies of days would be kept alive by it."""
EDITIONS: Final = 32
"""Policies whose labels are kept, for what they decided and still waits."""

Labels: TypeAlias = "list[tuple[str, str, str]]"
"""Kind, value and label of those clients whom a policy gives one; of API keys the hash."""

Entry: TypeAlias = tuple[Any, ...]
"""What a request leaves: nothing that changes afterwards, and nothing that keeps the request alive."""

PLAIN: Final = 6
"""How many fields there are in what most rejections leave: by limits that are everybody's, and by the store's own
answer. Others have more, of which the first are the same."""
REJECTION: Final = 5
"""How many there are in what is packed of these."""
LOSS: Final = 3
"""How many there are in what stands for decisions that are lost."""


def entry(arrival: Arrival, admission: Admission, resolution: Resolution, weight: float) -> Entry:
    """What is kept of a decision. This runs in requests."""
    route, keys, cost, rules, who, tier, now_us, block = resolution
    decision = admission.decision
    if decision is None:
        note = None if block is None else block.reason or ""
        return now_us, arrival.method, route, tier, who, (), note, weight, None, None, 0, (), (), ()
    degraded, verdicts = decision.degraded, decision.verdicts
    if admission.refusal is not None and degraded is None and rules is route.rules and not route.has_overrides:
        return now_us, arrival.method, route, tier, who, verdicts
    rest = None, weight, decision.allowed, degraded, cost, rules, keys, admission.shadows
    return now_us, arrival.method, route, tier, who, verdicts, *rest


def lost_entry(count: int, since_us: int, until_us: int) -> Entry:
    """What is kept of decisions that could not be."""
    return since_us, until_us, count


class Piece(NamedTuple):
    """Decisions that were packed together."""

    size: int
    packed: bytes


class Batch(NamedTuple):
    """Decisions, in pieces. Their ids come from the token, and from where they stand after the first."""

    token: str
    first: int
    pieces: Sequence[Piece]

    @property
    def size(self) -> int:
        return sum([piece.size for piece in self.pieces])

    def after(self, done: int) -> Batch:
        """The rest of it, when so many, which are whole pieces, are done."""
        pieces, passed = [*self.pieces], 0
        while pieces and passed < done:
            passed += pieces.pop(0).size
        return Batch(self.token, self.first + passed, pieces)

    def up_to(self, size: int) -> Batch:
        """As many of its pieces as have so many decisions together, but at least one."""
        pieces, count = [*self.pieces[:1]], 0
        for piece, another in pairwise(self.pieces):
            count += piece.size
            if count + another.size > size:
                break
            pieces.append(another)
        return Batch(self.token, self.first, pieces)


class _Place(NamedTuple):
    """What is the same for all requests of a tier on a route."""

    route: RoutePlan
    """As long as it lives, no other has its id."""
    limits: tuple[Limit | None, ...]
    """Whose numbers count for those who have no override."""
    packed: bytes


class Packer:
    """Packs the decisions of one process. One thread does."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str | None], _Place] = {}
        self._limits: dict[tuple[int, int], tuple[Any, bytes]] = {}
        """What is the same for all denials by a limit, with the limit."""
        self._policies: dict[int, tuple[Any, int]] = {}
        self._editions: dict[int, tuple[Client, ...]] = {}
        self._numbers = count(1)
        self._learnt_since = time.monotonic()

    def pack(self, entries: Sequence[Entry]) -> Piece:
        """All of them, in their order."""
        try:
            packed = dumps(self._told(entries), FORMAT)
        except Exception:
            # An identity, most likely, that is a kind of text of the app's own.
            packed = dumps([self._by_itself(each) for each in entries], FORMAT)
        return Piece(len(entries), packed)

    def labels_since(self, edition: int, clients: Clients) -> dict[int, Labels]:
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

    def _told(self, entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
        """All that is to say of each. What is the same object in several of them, marshal writes once."""
        if {*map(len, entries)} != {PLAIN}:
            return [self._fields(left) for left in entries]
        told: list[tuple[Any, ...]] = []
        same: tuple[Any, Any] = None, None
        packed = b""
        for now_us, method, route, tier, who, verdicts in entries:
            if route is not same[0] or tier != same[1]:  # else to look it up would take as long as all the rest
                same, packed = (route, tier), self._place(route, tier).packed
            told.append((now_us, method, packed, who, verdicts))
        return told

    def _by_itself(self, left: Entry) -> Any:
        """The same of one, whatever it is; what is wrong with it, if nothing can be said."""
        try:
            return _bare(self._fields(left))
        except Exception as error:
            return repr(error)

    def _fields(self, left: Entry) -> tuple[Any, ...]:
        if len(left) == LOSS:
            return left
        now_us, method, route, tier, who, verdicts, *rest = left
        place = self._place(route, tier)
        if not rest:
            return now_us, method, place.packed, who, verdicts
        note, weight, allowed, why, cost, rules, keys, shadows = rest
        numbers = [key[0] for key in keys]
        if allowed is False and why is None and rules is route.rules and place.limits == tuple(numbers):
            return now_us, method, place.packed, who, verdicts  # what most rejections are, if one looks closer
        limits = [self._limit(rule, limit) for rule, limit in zip(rules, numbers, strict=True)]
        head = now_us, method, place.packed, note, weight, allowed, why, cost
        return *head, who, limits, verdicts, _refusing(shadows)

    def _place(self, route: RoutePlan, tier: str | None) -> _Place:
        place = self._places.get((id(route), tier))
        return place if place is not None else self._learn_place(route, tier)

    def _learn_place(self, route: RoutePlan, tier: str | None) -> _Place:
        self._forget_some()
        policy = route.policy
        edition = self._edition(policy, policy.clients) if policy.clients else 0
        limits = tuple([rule.tiers.get(tier, rule.limit) for rule in route.rules])
        said = [columns(each.rule, limit) if limit else None for each, limit in zip(route.rules, limits, strict=True)]
        head = policy.name, route.endpoint, route.route_class or "", tier or "", route.on_failure == "local", edition
        packed = dumps((*head, route.costs if route.rules else 0, said), FORMAT)
        place = self._places[id(route), tier] = _Place(route, limits, packed)
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
        if now - self._learnt_since > STALE or len(self._limits) >= MOST_KNOWN or len(self._places) >= MOST_KNOWN:
            self._learnt_since = now
            newest = max(self._policies.items(), key=lambda each: each[1][1], default=None)
            self._policies = dict([newest] if newest is not None else [])
            self._places.clear()
            self._limits.clear()


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


def _bare(value: Any) -> Any:
    """The same out of nothing but what comes with Python."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | float | bytes) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {_bare(name): _bare(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple([_bare(each) for each in value])
    raise TypeError(f"a {type(value).__name__} among what is kept")
