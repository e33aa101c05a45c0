"""From what is kept of a decision to its record. It runs beside requests, or in another process."""

from __future__ import annotations

from marshal import loads
from typing import TYPE_CHECKING, Any, Final

from headgate.algorithms import NEVER
from headgate.policy.model import Client, Identity, Policy
from headgate.policy.routes import METHODS
from headgate.telemetry.packing import EDITIONS
from headgate.telemetry.records import Denial, Record, id_prefix, lost_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.telemetry.clients import Clients
    from headgate.telemetry.packing import Labels
    from headgate.telemetry.records import Outcome, Reason

__all__ = ["Recorder"]

MOST_KNOWN: Final = 10_000
"""Routes and limits that are kept in mind; policies have fewer, but they come and go."""

NOTHING: Final = ("", "", 0, 0, 0, "", "", 0, 0, 0)
"""The fields of a limit, where there is none."""

PLAIN: Final = 5
"""How many fields there are in what is packed of most rejections."""
REST_OF_PLAIN: Final = ("", False, "", 1.0)
"""Of these: why degraded, whether only watched, the note, the weight."""
LOSS: Final = 3
"""How many fields there are in what stands for decisions that are lost."""

_new_tuple = tuple.__new__


class Recorder:
    """Makes records of what one process has decided, in this process or another."""

    def __init__(self, clients: Clients, *, node: str, region: str) -> None:
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

    def record(self, raw: bytes, token: str, number: int) -> Record:
        """The record of what `Packer` has packed, under an id that is the same each time it is made."""
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
        also: list[Denial] = []
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
            Record,
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

    def _denied(self, fields: tuple[Any, ...], token: str, number: int) -> Record:
        """The same for what most rejections are, in less time."""
        now_us, method, place, who, verdicts = fields
        policy, endpoint, route_class, tier, _, edition, cost, limits = self._known(place)
        found: list[Denial] = []
        for at, (remaining, retry_us, _, _) in enumerate(verdicts):
            if retry_us:
                paid = cost if type(cost) is int else cost[at]
                told = None if retry_us == NEVER else retry_us
                found.append(_new_tuple(Denial, (*limits[at], paid, remaining, told)))
        if len(found) > 1:
            found.sort(key=_wait, reverse=True)
        numbers, *also = found
        reason = "over-capacity" if numbers[-1] is None else "over-limit"
        kind, key, label, kinds, keys = self._clients.named((*who, *who.values()), self._labels.get(edition))
        method = method if method in METHODS else "OTHER"
        head = self.node, self._region, policy, method, endpoint, route_class, tier, "denied", reason
        tail = kind, key, label, *REST_OF_PLAIN, kinds, keys, tuple(also)
        return _new_tuple(Record, (_id(now_us, token, number), now_us, *head, *numbers, *tail))

    def _tightest(self, limits: list[bytes], costs: Any, verdicts: Any) -> Denial:
        """The limit with the least share left: no denial, but the same fields."""
        said = zip(limits, costs, verdicts, strict=True)
        found = [self._denial(columns, cost, *verdict[:2]) for columns, cost, verdict in said]
        return min(found, key=lambda each: each.remaining / each.burst)

    def _denial(self, columns: bytes, cost: int, remaining: int, retry_us: int) -> Denial:
        return _new_tuple(Denial, (*self._known(columns), cost, remaining, None if retry_us == NEVER else retry_us))

    def _known(self, packed: bytes) -> tuple[Any, ...]:
        known = self._unpacked.get(packed)
        if known is None:
            if len(self._unpacked) >= MOST_KNOWN:
                self._unpacked.clear()
            known = self._unpacked[packed] = loads(packed)
        return known


def _id(at_us: int, token: str, number: int) -> str:
    return f"{id_prefix(at_us)}{token}{number & 0xFFFFFFFF:08x}"


def _wait(denial: Denial) -> float:
    return float("inf") if denial.retry_us is None else denial.retry_us
