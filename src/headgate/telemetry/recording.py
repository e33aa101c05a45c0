"""From a decision to its record. It runs beside requests, not in them; but every microsecond here is one for all."""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.algorithms import NEVER
from headgate.policy.routes import METHODS
from headgate.telemetry.records import Denial, Record, id_prefix, lost_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.adapters.way import Admission, Arrival, Shadow
    from headgate.limits import Limit
    from headgate.policy.model import Policy, Rule
    from headgate.policy.snapshot import CompiledRule, Resolution
    from headgate.stores.calls import Cost
    from headgate.telemetry.clients import Clients
    from headgate.telemetry.records import Outcome, Reason

    _Said: TypeAlias = tuple[CompiledRule, Limit, int, int, int]
    """A limit, its numbers, what the request cost there, what was left, and how long to wait."""

__all__ = ["Raw", "Recorder", "flattened"]

MOST_KNOWN: Final = 10_000
"""Limits whose columns are kept; policies have fewer, but they come and go."""

NOTHING: Final = ("", "", 0, 0, 0, "", "", 0, 0, 0)
"""The fields of a limit, where there is none."""

Raw: TypeAlias = tuple[Any, ...]
"""What is kept of a request until there is time to make a record of it, as one flat tuple. Each of the dozen values of
a decision would be one more for the garbage collector to look at, time and again, while it waits."""

FIXED: Final = 12
"""How many fields of a `Raw` come before those of which there is one for each identity, and for each limit."""

_new_denial = _new_record = tuple.__new__


def flattened(arrival: Arrival, admission: Admission, resolution: Resolution, weight: float) -> Raw:
    """All that a record is made of. This is what a rejection costs its request."""
    route, keys, cost, rules, who, tier, now_us, block = resolution
    decision, size = admission.decision, len(who)
    if decision is None:
        return now_us, arrival.method, route, tier, block, weight, size, None, None, (), 0, (), *who, *who.values()
    return (
        now_us,
        arrival.method,
        route,
        tier,
        block,
        weight,
        size,
        decision.allowed,
        decision.degraded,
        rules,
        cost,
        admission.shadows,
        *who,
        *who.values(),
        *[key[0] for key in keys],
        *[verdict[0] for verdict in decision.verdicts],
        *[verdict[1] for verdict in decision.verdicts],
    )


class Recorder:
    """Makes records of what one process has decided."""

    def __init__(self, clients: Clients, *, node: str, region: str) -> None:
        self._clients = clients
        self._node = node
        self._region = region
        self._columns: dict[tuple[int, int], tuple[Any, tuple[Any, ...]]] = {}
        """What is the same in all denials by a limit on a route; with what the ids stand for, which so stays alive."""
        self.renew()

    def renew(self) -> None:
        """Give ids that no other process gives."""
        self._token = secrets.token_hex(5)
        self._numbers = count(1)

    def record(self, raw: Raw) -> Record:
        now_us, method, route, tier, block, weight, size, allowed, why_degraded, rules, costs, shadows = raw[:FIXED]
        policy: Policy | None = getattr(route, "policy", None)
        outcome: Outcome = "allowed"
        reason: Reason = "within-limits"
        degraded, shadow, note = why_degraded or "", False, ""
        numbers: tuple[Any, ...] = NOTHING
        also: list[Denial] = []
        if block is not None:
            outcome = reason = "blocked"
            note = block.reason or ""
        elif allowed is None:
            reason = "no-limit"
        elif not allowed:
            limits = self._limits(rules, costs, raw[FIXED + 2 * size :])
            if degraded and route.on_failure != "local":
                outcome, reason = "unavailable", "store-away"
                numbers = (*NOTHING[:-1], max(retry_us for *_, retry_us in limits))
            else:
                outcome = "denied"
                numbers, *also = self._denials(limits)
                reason = "over-capacity" if numbers[-1] is None else "over-limit"
        elif refused := [each for each in shadows if not each.decision.allowed]:
            shadow, reason = True, "over-shadow-limit"
            numbers, *also = [self._shadow_denial(each) for each in refused]
        elif not degraded or route.on_failure == "local":
            numbers = self._tightest(self._limits(rules, costs, raw[FIXED + 2 * size :]))
        kinds_and_values = raw[FIXED : FIXED + 2 * size]
        kind, key, label, kinds, keys = self._clients.named(kinds_and_values, policy)
        return _new_record(
            Record,
            (
                self._new_id(now_us),
                now_us,
                self._node,
                self._region,
                policy.name if policy is not None else "",
                method if method in METHODS else "OTHER",
                route.endpoint,
                route.route_class or "",
                tier or "",
                outcome,
                reason,
                *numbers,
                kind,
                key,
                label,
                degraded,
                shadow,
                note,
                weight,
                kinds,
                keys,
                tuple(also),
            ),
        )

    def lost(self, count: int, since_us: int, until_us: int) -> Record:
        """What is kept of decisions that could not be."""
        id = self._new_id(since_us)
        return lost_record(id, count, since_us=since_us, until_us=until_us, node=self._node, region=self._region)

    def _new_id(self, at_us: int) -> str:
        return f"{id_prefix(at_us)}{self._token}{next(self._numbers) & 0xFFFFFFFF:08x}"

    @staticmethod
    def _limits(rules: Sequence[CompiledRule], costs: Cost, flat: Raw) -> list[_Said]:
        """What each limit said."""
        count = len(rules)
        each_cost = [costs] * count if isinstance(costs, int) else costs
        said = zip(rules, flat[:count], each_cost, flat[count : 2 * count], flat[2 * count :], strict=True)
        return [*said]

    def _denials(self, limits: list[_Said]) -> list[Denial]:
        """All limits that denied, the one that denies for longest first."""
        found = [self._denial(each) for each in limits if each[-1]]
        return found if len(found) == 1 else sorted(found, key=_wait, reverse=True)

    def _tightest(self, limits: list[_Said]) -> Denial:
        """The limit with the least share left: no denial, but the same fields."""
        return self._denial(min(limits, key=lambda each: each[3] / each[1].capacity))

    def _denial(self, said: _Said) -> Denial:
        compiled, limit, cost, remaining, retry_us = said
        known = self._columns.get((id(compiled), id(limit)))
        if known is None:
            known = self._learnt(compiled, limit)
        return _new_denial(Denial, (*known[1], cost, remaining, None if retry_us == NEVER else retry_us))

    def _learnt(self, compiled: CompiledRule, limit: Limit) -> tuple[Any, tuple[Any, ...]]:
        if len(self._columns) >= MOST_KNOWN:
            self._columns.clear()
        known = self._columns[id(compiled), id(limit)] = (compiled, limit), _columns(compiled.rule, limit)
        return known

    @staticmethod
    def _shadow_denial(shadow: Shadow) -> Denial:
        rule, key, cost, _, _ = shadow.met
        remaining, retry_us = shadow.decision.verdicts[0][:2]
        wait_us = None if retry_us == NEVER else retry_us
        return Denial._make((*_columns(rule, key.limit), cost, remaining, wait_us))


def _columns(rule: Rule, limit: Limit) -> tuple[Any, ...]:
    """What all denials by a limit have in common."""
    is_of_tier = any(limit is each for each in rule.tiers.values())
    origin = "" if limit is rule.limit else "tier" if is_of_tier else "override"
    by = "+".join(rule.by) or "global"
    return rule.name, by, limit.quota, limit.period_us, limit.capacity, limit.algorithm, origin


def _wait(denial: Denial) -> float:
    return float("inf") if denial.retry_us is None else denial.retry_us
