"""Routing of operations: which keys the own store counts, which the store of the home region, and as what limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate import speedups
from headgate.errors import InvalidLimit
from headgate.limits import Limit
from headgate.regions.cost import region_cost
from headgate.regions.model import share_of
from headgate.regions.reserved import reserve
from headgate.regions.residency import Residency
from headgate.stores.operations import Check, Deposit, IdempotentCheck, Refund, Reset, joined_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.failure import Fallback
    from headgate.keys import Key
    from headgate.regions.cost import RegionCost
    from headgate.regions.model import Regions
    from headgate.regions.reserved import KeyDemand, Reservation
    from headgate.regions.worker import RegionWorker
    from headgate.stores.operations import Call

__all__ = ["AtHome", "RegionRouter", "check_region", "merge_regions", "select"]

MAX_CACHED_LIMITS: Final = 10_000
MAX_SAFE_WINDOWS: Final = 100_000


class AtHome(NamedTuple):
    """A step of a flow: run an operation in the home region; a check with the failure mode of its caller."""

    operation: Call
    fallback: Fallback | None = None


class RegionRouter:
    """Translates the keys of limits with a region mode to those that are counted, and notifies the region worker."""

    def __init__(self, regions: Regions, worker: RegionWorker, now_us: Callable[[], int]) -> None:
        self.regions, self.worker = regions, worker
        self.residency = Residency()
        """The form in which identities leave the region; a gate sets that of its policy."""
        self._now_us = now_us
        self._counted: dict[Limit, Limit] = {}
        """The limit that the own store counts for a caller's limit: the same one if it is regional."""
        self._remote: dict[Limit, Limit] = {}
        """The limit that the store of another region, the home region, counts for a caller's limit."""
        self._reservations: dict[Limit, Reservation] = {}
        self._safe_windows: dict[Key, int] = {}
        """The last period in which this process deposited the safe share of a key."""
        self._open_slots, self._demands = worker.counter.open_slots, worker.demand.keys

    def cost(self, limit: Limit) -> RegionCost:
        """The bound and the latency of a limit over these regions; raises InvalidLimit if they cannot count it."""
        if limit.region != "regional":
            self.counted(limit.by())
        return region_cost(limit, len(self.regions.names), self.regions.safe_share)

    def is_remote(self, key: Key) -> bool:
        """True if the store of another region decides on the key."""
        return key.limit.region == "central" and not self.regions.is_home

    def counted(self, key: Key) -> Key:
        """The key that is counted for a caller's key, in the own or the home store."""
        limit = key[0]
        counted = self._counted.get(limit) or self._remote.get(limit) or self._add(limit)
        return key if counted is limit else replace_fields(key, 0, counted)

    def own_check(self, check: Check) -> Check:
        """The check on the keys that are counted; the same check if none is translated, or the home region decides
        on one of them."""
        return translate_check(check, self._counted) or self._translate(check)

    def _translate(self, check: Check) -> Check:
        """The same, if a limit is new, or the home region decides on it."""
        if any(self.is_remote(key) for key in check[0]):
            return check
        return replace_fields(check, 0, tuple([self.counted(key) for key in check[0]]))  # type: ignore[no-any-return]

    def finish_known(self, check: Check, counted: Check, decision: Decision) -> Decision | None:
        """The same as `finish` if the check is admitted and its keys are recorded already; else None."""
        if finish_check is None:
            return None
        return finish_check(self._open_slots, self._demands, check, counted, decision)

    def finish(self, check: Check, counted: Check, decision: Decision) -> Decision:
        """The decision of the own region as the caller gets it, after the worker was notified."""
        keys = check[0]
        if decision[4] is not None:  # the store has not counted it
            return replace_fields(decision, 1, keys)  # type: ignore[no-any-return]
        rows = zip(keys, counted.keys, check.costs, decision[2], strict=True)
        verdicts = tuple(
            [self._record(caller[0].region, key, cost, decision, verdict) for caller, key, cost, verdict in rows]
        )
        return replace_fields(decision, 1, keys, verdicts)  # type: ignore[no-any-return]

    def _record(self, mode: str, key: Key, cost: int, decision: Decision, verdict: Verdict) -> Verdict:
        """Pass the verdict on a counted key to the worker; return that on the caller's key."""
        if mode == "reserved":
            demand = self.worker.demand.keys.get(key) or self._open_demand(key)
            return demand.record(cost, verdict, decision)
        if mode == "reconciled":
            self._record_usage(key, cost, decision)
        return verdict

    def _record_usage(self, key: Key, cost: int, decision: Decision) -> None:
        """Count an admitted request; a denied one, too, needs to know what the other regions admit."""
        worker = self.worker
        if not cost or not decision[0]:
            if worker.exchange is None:
                worker.ensure_exchange()
        elif not worker.counter.add(key, cost, decision[5]):
            worker.counter.record(key, cost, decision[5])
            worker.ensure_exchange()

    def _open_demand(self, key: Key) -> KeyDemand:
        self.worker.ensure_agent()
        return self.worker.demand.open(key, self._reservations[key[0]])

    def record_change(self, operation: Call, *, result: Any) -> None:
        """Pass a refund or a reset to the worker, as the other regions need it."""
        if isinstance(operation, Reset):
            for key in operation.keys:
                if key.limit.region == "reconciled":
                    self.worker.ensure_exchange().post_reset(self.counted(key))
        elif not isinstance(operation, Refund):
            return
        elif operation.key.limit.region == "reserved" and not result and operation.id is None:
            self.worker.ensure_agent()
            key = self.counted(operation.key)
            at_us = operation.at_us or self._now_us()
            self.worker.demand.return_home(key, self._reservations[key.limit], operation.amount, at_us)
        elif operation.key.limit.region == "reconciled" and result:
            self.worker.ensure_exchange()
            at_us = operation.at_us or self._now_us()
            self.worker.counter.record_refund(self.counted(operation.key), operation.amount, at_us)

    def safe_deposits(self, counted: Check, decision: Decision) -> list[Deposit]:
        """The deposits of safe shares that may turn a denial around; each once in a period."""
        deposits: list[Deposit] = []
        for key, (_, retry_us, _, _) in zip(counted.keys, decision.verdicts, strict=True):
            if not retry_us:
                continue
            window = decision.at_us // key.limit.period_us
            if key.limit.algorithm != "pool" or retry_us < 0 or self._safe_windows.get(key) == window:
                return []  # it is denied in any case
            safe = self._reservations[key.limit].safe
            deposits.append(Deposit(key, safe, 0, f"safe:{window}"))
        if len(self._safe_windows) >= MAX_SAFE_WINDOWS:
            self._safe_windows.clear()
        for deposit in deposits:
            self._safe_windows[deposit.key] = decision.at_us // deposit.key.limit.period_us
        return deposits

    def reservation(self, limit: Limit) -> Reservation:
        """The counters of a reserved limit."""
        return self._reservations[self.counted(limit.by()).limit]

    def counted_limits(self, limits: Iterable[Limit]) -> tuple[list[Limit], list[Limit]]:
        """The limits that are counted for a caller's limits: in the own store, and in that of the home region."""
        keys = [limit.by() for limit in limits]
        own = [self.counted(key).limit for key in keys if not self.is_remote(key)]
        return own, [self.counted(key).limit for key in keys if self.is_remote(key)]

    def route(self, operation: Call) -> list[Call | AtHome]:
        """The operations that carry out one that is not a check."""
        if isinstance(operation, Check):
            return [operation]
        if not isinstance(operation, Reset):
            routed: Call = operation._replace(key=self.counted(operation.key))
            return [AtHome(routed) if self.is_remote(operation.key) else routed]
        own = [self.counted(key) for key in operation.keys if not self.is_remote(key)]
        remote = [self.counted(key) for key in operation.keys if self.is_remote(key)]
        at_home = own if self.regions.is_home else remote
        at_home += [
            pool._replace(limit=self._reservations[pool.limit].home)
            for pool in [self.counted(key) for key in operation.keys if key.limit.region == "reserved"]
        ]
        return [*([Reset(tuple(own))] if own else []), *([AtHome(Reset(tuple(remote)))] if remote else [])]

    def _add(self, limit: Limit) -> Limit:
        limits = self._remote if limit.region == "central" and not self.regions.is_home else self._counted
        if len(limits) >= MAX_CACHED_LIMITS:
            limits.clear()
        counted = limit
        if limit.region == "reserved":
            reservation = reserve(limit, len(self.regions.names), self.regions.safe_share)
            counted = reservation.pool
            self._reservations[counted] = reservation
        elif limit.region != "regional":
            counted = counted_limit(limit, self.regions)
        limits[limit] = counted
        return counted


def plain_replace_fields(record: Any, start: int, *values: Any) -> Any:
    """A copy of a named tuple with other values for the fields from `start` on, faster than `_replace`."""
    return tuple.__new__(type(record), (*record[:start], *values, *record[start + len(values) :]))


def plain_translate_check(check: Check, counted: dict[Limit, Limit]) -> Check | None:
    """The check on the limits to which `counted` maps those of its keys: the same one if these are the same. None if a
    limit is not in it."""
    keys = []
    for key in check[0]:
        limit = counted.get(key[0])
        if limit is None:
            return None
        keys.append(key if limit is key[0] else plain_replace_fields(key, 0, limit))
    is_same = all([new is old for new, old in zip(keys, check[0], strict=True)])  # noqa: C419 - quicker than a generator
    return check if is_same else plain_replace_fields(check, 0, tuple(keys))


replace_fields: Final[Callable[..., Any]] = speedups.pick("replace_fields", plain_replace_fields)
finish_check: Final[Callable[..., Decision | None] | None] = speedups.pick("finish_check")
"""`RegionRouter.finish` for the common case, given what is recorded by key; None if it is not compiled."""
translate_check: Final[Callable[..., Check | None]] = speedups.pick("translate_check", plain_translate_check)


def check_region(keys: Sequence[Key]) -> None:
    """Raise InvalidLimit if a limit counts over several regions, for a limiter that has none."""
    for key in keys:
        if key.limit.region != "regional":
            raise InvalidLimit(
                f"limit {key.limit.name!r} is {key.limit.region}, and the limiter has no regions; "
                "give it region=, regions= and home="
            )


def counted_limit(limit: Limit, regions: Regions) -> Limit:
    """The limit that the own region (`divided`, `reconciled`) or the home region (`central`) counts."""
    quota, burst = limit.quota, limit.capacity
    if limit.region == "reconciled" and limit.algorithm == "concurrency":
        problem = f"limit {limit.name!r}: leases of a concurrency limit cannot be reconciled"
        raise InvalidLimit(f"{problem}; use region='central' or 'divided'")
    if limit.region == "divided":
        count = len(regions.names)
        quota, burst = share_of(limit, count, regions.index)
        if min(limit.quota, limit.capacity) < count:
            what = "quota" if limit.quota < count else "burst"
            problem = f"limit {limit.name!r}: {what} {min(limit.quota, limit.capacity)} cannot be divided"
            raise InvalidLimit(f"{problem} over {count} regions; use region='central'")
    period = limit.period
    return Limit(quota, period, burst=burst if burst != quota else None, algorithm=limit.algorithm, name=limit.name)


def select(check: Check, indexes: Sequence[int], keys: Sequence[Key]) -> Check:
    """The part of a check with these keys; `keys` are those that are counted."""
    chosen = tuple([keys[index] for index in indexes])
    cost = joined_costs([check.costs[index] for index in indexes])
    has_charges = bool(cost) and any(key.limit.algorithm != "concurrency" for key in chosen)
    return (IdempotentCheck if isinstance(check, IdempotentCheck) and has_charges else Check)(chosen, cost, check.id)


def merge_regions(check: Check, parts: Sequence[tuple[Sequence[int], Decision]]) -> Decision:
    """One decision of the own and the home region. Keys that were not checked, as another key had denied before, count
    as unused."""
    decision = parts[-1][1]
    verdicts: list[Verdict] = [(key.limit.capacity, 0, 0, 0) for key in check.keys]
    for indexes, part in parts:
        for index, verdict in zip(indexes, part.verdicts, strict=True):
            verdicts[index] = verdict
    degraded = next((part.degraded for _, part in parts if part.degraded), None)
    at_us = parts[0][1].at_us
    return decision._replace(
        keys=check.keys, verdicts=tuple(verdicts), cost=check.cost, id=check.id, degraded=degraded, at_us=at_us
    )
