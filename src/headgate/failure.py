"""Failure modes: the answer of a limiter when its store fails (raise, open, closed or local)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, get_args

from headgate.algorithms import NEVER
from headgate.decisions import Decision
from headgate.errors import InvalidConfiguration
from headgate.keys import Key
from headgate.limits import EXACT, HORIZON_US, FairLimit, Limit
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Leave, Renew

if TYPE_CHECKING:
    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.errors import StoreError
    from headgate.stores.operations import Call

__all__ = ["FailureMode", "FailurePolicy", "Fallback", "FleetShare", "local_limit"]

FailureMode: TypeAlias = Literal["raise", "open", "closed", "local"]

CLOSED_RETRY_US: Final = 1_000_000  # the retry time of a limiter that fails closed: the end of the outage is unknown
MAX_CACHED_LIMITS: Final = 10_000
_OPEN: Final = (0, 0, 0, 0)
_CLOSED: Final = (0, CLOSED_RETRY_US, CLOSED_RETRY_US, 0)

_new_tuple = tuple.__new__


class Fallback(Protocol):
    """Answers in place of a store that has failed."""

    def decide(self, check: Check, error: StoreError) -> Decision:
        """Decide a check, or raise the error."""

    def answer(self, operation: Call, error: StoreError) -> bool:
        """The result of an operation that is not a check, or raise the error."""


class FleetShare:
    """The part of each limit that a node allows by itself during an outage: `share` of it, divided by the live `nodes`.

    Shared by all failure policies of a limiter. Heartbeats set `nodes`; during an outage the last number stays.

    >>> fleet = FleetShare(share=0.2)
    >>> fleet.nodes = 50
    >>> str(fleet.local_limit(Limit(1000, timedelta(seconds=1))))
    '4 per second, token_bucket'
    """

    def __init__(self, *, share: Fraction | float = Fraction(1, 5), nodes: int = 1) -> None:
        if type(nodes) is not int or nodes < 1:
            raise InvalidConfiguration(f"nodes={nodes!r} is not a number of nodes: give a whole number of at least 1")
        self._share, self._nodes = _checked_share(share), nodes
        self._update()

    @property
    def share(self) -> Fraction:
        """The part of each limit that all nodes allow together."""
        return self._share

    @share.setter
    def share(self, share: Fraction | float) -> None:
        self._share = _checked_share(share)
        self._update()

    @property
    def nodes(self) -> int:
        """The number of live nodes, this one included."""
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: int) -> None:
        if nodes != self._nodes:
            self._nodes = max(1, nodes)
            self._update()

    def local_limit(self, limit: Limit) -> Limit:
        """The part of a limit that one node allows."""
        portion, limits = self._portion
        local = limits.get(limit)
        if local is None:
            if len(limits) >= MAX_CACHED_LIMITS:
                limits.clear()
            local = limits[limit] = local_limit(limit, portion)
        return local

    def _update(self) -> None:
        # One assignment: no thread may add a limit of the old portion to those of the new one.
        self._portion: tuple[Fraction, dict[Limit, Limit]] = self._share / self._nodes, {}


class FailurePolicy:
    """A failure mode, with the counters of mode `local`."""

    def __init__(self, mode: FailureMode, clock: Clock, fleet: FleetShare | None = None) -> None:
        if mode not in get_args(FailureMode):
            raise InvalidConfiguration(f"on_failure={mode!r} is unknown; use 'raise', 'open', 'closed' or 'local'")
        self.mode: FailureMode = mode
        self._fleet = FleetShare() if fleet is None else fleet
        self._counters = MemoryStore(clock, max_keys=100_000)

    def decide(self, check: Check, error: StoreError) -> Decision:
        if self.mode == "raise":
            raise error
        reason = f"{self.mode}: {error}"
        if self.mode == "local":
            return self._decide_locally(check, reason)
        keys, cost, id = check
        verdict = _CLOSED if self.mode == "closed" and (cost if type(cost) is int else any(check.costs)) else _OPEN
        verdicts: tuple[Verdict, ...] = (verdict,) * len(keys)
        if any([each > key[0].capacity for key, each in zip(keys, check.costs, strict=True)]):  # noqa: C419 - faster
            verdict = _CLOSED  # known without the store
            verdicts = tuple(
                (each[0], NEVER, *each[2:]) if amount > key.limit.capacity else each
                for key, amount, each in zip(keys, check.costs, verdicts, strict=True)
            )
        return _new_tuple(Decision, (verdict is _OPEN, keys, verdicts, id, reason, 0, 0, cost))

    def answer(self, operation: Call, error: StoreError) -> bool:
        if self.mode == "raise":
            raise error
        if self.mode != "local" or not isinstance(operation, Leave | Renew):
            return False
        # The lease was taken here: without this it would count until it expires.
        held: bool = self._counters.run(operation._replace(key=self._local_key(operation.key)))
        return held

    def _decide_locally(self, check: Check, reason: str) -> Decision:
        keys, cost, id = check
        local = self._counters.decide(Check(tuple([self._local_key(key) for key in keys]), cost, id))
        verdicts = local.verdicts
        if not local.allowed:
            # A cost that is too large for this node's part may fit the limit: it passes when the store is back.
            fits = [each <= key.limit.capacity for key, each in zip(keys, check.costs, strict=True)]
            verdicts = tuple(
                (each[0], CLOSED_RETRY_US, *each[2:]) if each[1] == NEVER and fit else each
                for fit, each in zip(fits, verdicts, strict=True)
            )
        return Decision(local.allowed, keys, verdicts, id, reason, local.at_us, 0, cost)

    def _local_key(self, key: Key) -> Key:
        limit, parts, identity = key
        return _new_tuple(Key, (self._fleet.local_limit(limit), parts, identity))


def local_limit(limit: Limit, portion: Fraction) -> Limit:
    """A portion of a limit, of the same algorithm, and never more than the portion unless that is less than 1.

    A bucket keeps its rate exactly, and its burst is rounded down, to at least 1. A window keeps its length, and its
    quota is rounded down. If less than one per window is left, the window becomes longer.

    >>> str(local_limit(Limit(10, timedelta(minutes=1)), Fraction(1, 250)))
    '1 per 25 minutes, token_bucket'
    """
    whole = max(1, int(limit.capacity * portion))
    if limit.algorithm == "concurrency":
        # A place is not a rate: less than one would admit nothing. The period is the lease time, which does not depend
        # on the number of nodes.
        return _resized(limit, whole, limit.period_us)
    rate = limit.quota * portion / limit.period_us
    if rate * HORIZON_US < 1:
        return _resized(limit, 1, HORIZON_US)  # the slowest limit: one in ten years
    if limit.calendar is not None and limit.capacity * portion >= 1:
        return Limit(whole, limit.period, name=limit.name)
    if not limit.implementation.SHAPES_BURST:
        return _resized(limit, whole, max(limit.period_us, -int(-whole // rate)))
    # The rate itself, or the nearest lower one whose numbers stay exact.
    exact = _nearest_below(rate, min(HORIZON_US, int((EXACT - 1) / (whole + rate))))
    times, uneven = divmod(limit.period_us, exact.denominator)
    times = 1 if uneven else times  # in the limit's own period if possible
    # A bucket may take at most ten years to fill.
    burst = min(whole, int(exact * HORIZON_US))
    return _resized(limit, exact.numerator * times, exact.denominator * times, burst)


def _resized(limit: Limit, quota: int, period_us: int, burst: int | None = None) -> Limit:
    period = timedelta(microseconds=period_us)
    if isinstance(limit, FairLimit):
        return replace(limit, quota=quota, period=period, burst=burst)
    return Limit(quota, period, burst=burst, algorithm=limit.algorithm, name=limit.name)


def _nearest_below(number: Fraction, max_denominator: int) -> Fraction:
    """The largest fraction that is not above the number and has at most that denominator."""
    nearest = number.limit_denominator(max_denominator)
    if nearest <= number:
        return nearest
    # The left neighbour in the Farey sequence of that order.
    numerator, denominator = nearest.numerator, nearest.denominator
    inverse = pow(numerator, -1, denominator)
    left = inverse + (max_denominator - inverse) // denominator * denominator
    return Fraction((numerator * left - 1) // denominator, left)


def _checked_share(share: object) -> Fraction:
    if isinstance(share, Fraction | int | float) and not isinstance(share, bool) and isfinite(share) and 0 < share <= 1:
        # By its digits: 0.2 is meant as a fifth, which the float is not exactly.
        return Fraction(repr(share)) if isinstance(share, float) else Fraction(share)
    raise InvalidConfiguration(f"share={share!r} is not a share: give a number above 0 and at most 1, like 0.2")
