"""What a limiter answers when its store cannot: raise, open, closed or local."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from headgate.algorithms import ALGORITHMS, NEVER
from headgate.decisions import Decision
from headgate.errors import InvalidConfiguration
from headgate.keys import Key
from headgate.limits import EXACT, HORIZON_US, Limit
from headgate.stores.memory import MemoryStore
from headgate.stores.operations import Check, Refund

if TYPE_CHECKING:
    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.errors import StoreError
    from headgate.stores.operations import Leave, Renew

__all__ = ["FailureMode", "FailurePolicy", "FleetShare", "local_limit"]

FailureMode: TypeAlias = Literal["raise", "open", "closed", "local"]

CLOSED_RETRY_US: Final = 1_000_000
"""When to come back to a limiter that fails closed: nobody knows, so soon, but not at once."""
MOST_LIMITS: Final = 10_000
"""So many local limits are kept ready; those who make limits by the million pay for each again."""

_OPEN: Final = (0, 0, 0, 0)
_CLOSED: Final = (0, CLOSED_RETRY_US, CLOSED_RETRY_US, 0)

_new_tuple = tuple.__new__


class FleetShare:
    """How much of each limit a node allows by itself while the store is away: `share` of it, over all live `nodes`.

    One is shared by all failure policies of a limiter. Heartbeats set `nodes`; when the store is gone there are none,
    and the last number stays.

    >>> fleet = FleetShare(share=0.2)
    >>> fleet.nodes = 50
    >>> str(fleet.part_of(Limit(1000, timedelta(seconds=1))))
    '4 per second, token_bucket'
    """

    def __init__(self, *, share: Fraction | float = Fraction(1, 5), nodes: int = 1) -> None:
        if type(nodes) is not int or nodes < 1:
            raise InvalidConfiguration(f"nodes={nodes!r} cannot be: give how many there are, a whole number from 1")
        self._share, self._nodes = _checked_share(share), nodes
        self._turn()

    @property
    def share(self) -> Fraction:
        """Of each limit, how much all nodes allow together."""
        return self._share

    @share.setter
    def share(self, share: Fraction | float) -> None:
        self._share = _checked_share(share)
        self._turn()

    @property
    def nodes(self) -> int:
        """How many nodes are alive. Whoever asks is: it is never less than 1."""
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: int) -> None:
        if nodes != self._nodes:
            self._nodes = max(1, nodes)
            self._turn()

    def part_of(self, limit: Limit) -> Limit:
        """The part of the limit that is one node's own."""
        portion, parts = self._parts
        part = parts.get(limit)
        if part is None:
            if len(parts) >= MOST_LIMITS:
                parts.clear()
            part = parts[limit] = local_limit(limit, portion)
        return part

    def _turn(self) -> None:
        # Both at once, so that no thread keeps a part of the old portion among those of the new one.
        self._parts: tuple[Fraction, dict[Limit, Limit]] = self._share / self._nodes, {}


class FailurePolicy:
    """The agreed answer for when the store fails."""

    def __init__(self, mode: FailureMode, clock: Clock, fleet: FleetShare | None = None) -> None:
        if mode not in get_args(FailureMode):
            raise InvalidConfiguration(f"on_failure={mode!r} is unknown; use 'raise', 'open', 'closed' or 'local'")
        self.mode: FailureMode = mode
        self._fleet = FleetShare() if fleet is None else fleet
        self._local = MemoryStore(clock, max_keys=100_000)

    def decide(self, call: Check, error: StoreError) -> Decision:
        if self.mode == "raise":
            raise error
        why = f"{self.mode}: {error}"
        if self.mode == "local":
            return self._decide_locally(call, why)
        keys, cost, id = call
        verdict = _CLOSED if self.mode == "closed" and (cost if type(cost) is int else any(call.costs)) else _OPEN
        verdicts: tuple[Verdict, ...] = (verdict,) * len(keys)
        if any([each > key[0].capacity for key, each in zip(keys, call.costs, strict=True)]):  # noqa: C419 - quicker
            verdict, verdicts = _CLOSED, _with_what_cannot_be(call, verdicts)  # which one knows without the store
        return _new_tuple(Decision, (verdict is _OPEN, keys, verdicts, id, why, 0, 0, cost))

    def tell(self, call: Refund | Renew | Leave, error: StoreError) -> bool:
        if self.mode == "raise":
            raise error
        if self.mode != "local" or isinstance(call, Refund):
            return False
        # A lease that was taken here: without this it would hold its place until its time is over.
        held: bool = self._local.run(call._replace(key=self._local_key(call.key)))
        return held

    def _decide_locally(self, call: Check, why: str) -> Decision:
        keys, cost, id = call
        local = self._local.decide(Check(tuple([self._local_key(key) for key in keys]), cost, id))
        verdicts = local.verdicts
        if not local.allowed:
            # What is too large for this node's part is not so for the limit: it passes when the store is back.
            verdicts = tuple(
                (verdict[0], CLOSED_RETRY_US, *verdict[2:])
                if verdict[1] == NEVER and cost <= key.limit.capacity
                else verdict
                for key, cost, verdict in zip(keys, call.costs, verdicts, strict=True)
            )
        return Decision(local.allowed, keys, verdicts, id, why, local.at_us, 0, cost)

    def _local_key(self, key: Key) -> Key:
        limit, parts, identity = key
        return _new_tuple(Key, (self._fleet.part_of(limit), parts, identity))


def _with_what_cannot_be(call: Check, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    return tuple(
        (verdict[0], NEVER, *verdict[2:]) if cost > key.limit.capacity else verdict
        for key, cost, verdict in zip(call.keys, call.costs, verdicts, strict=True)
    )


def local_limit(limit: Limit, portion: Fraction) -> Limit:
    """That portion of the limit, in the same shape, never more generous than the portion but where there is no less.

    A bucket keeps its rate exactly, and so much of its burst as is whole, at least 1. A window keeps its length, and
    its quota is rounded down: so many per window is what it promises. Where less than one per window is left, the
    window becomes longer.

    >>> str(local_limit(Limit(10, timedelta(minutes=1)), Fraction(1, 250)))
    '1 per 25 minutes, token_bucket'
    """
    whole = max(1, int(limit.capacity * portion))
    if limit.algorithm == "concurrency":
        # A place is no rate: less than one cannot be had by waiting longer, and with none nobody would get in at all.
        # The period is for how long a holder is believed to be there, which has nothing to do with how many nodes are.
        return _made(limit, whole, limit.period_us)
    rate = limit.quota * portion / limit.period_us
    if rate * HORIZON_US < 1:
        return _made(limit, 1, HORIZON_US)  # less than one in ten years: there is no slower limit
    if not ALGORITHMS[limit.algorithm].SHAPES_BURST:
        return _made(limit, whole, max(limit.period_us, -int(-whole // rate)))
    # If its numbers would leave exactness, it is the nearest rate below whose don't.
    exact = _nearest_below(rate, min(HORIZON_US, int((EXACT - 1) / (whole + rate))))
    times, uneven = divmod(limit.period_us, exact.denominator)
    times = 1 if uneven else times  # in the limit's own period, where that is possible
    # And nothing takes longer than ten years to fill.
    burst = min(whole, int(exact * HORIZON_US))
    return _made(limit, exact.numerator * times, exact.denominator * times, burst)


def _made(limit: Limit, quota: int, period_us: int, burst: int | None = None) -> Limit:
    period = timedelta(microseconds=period_us)
    return Limit(quota, period, burst=burst, algorithm=limit.algorithm, name=limit.name)


def _nearest_below(number: Fraction, most: int) -> Fraction:
    """The largest fraction that is not above the number, and whose denominator is at most so large."""
    if number.denominator <= most:
        return number
    # The continued fraction: two neighbours, one on each side of the number, that come ever closer.
    one, other = (0, 1), (1, 0)
    numerator, denominator = number.numerator, number.denominator
    while True:
        steps = numerator // denominator
        if one[1] + steps * other[1] > most:
            break
        one, other = other, (one[0] + steps * other[0], one[1] + steps * other[1])
        numerator, denominator = denominator, numerator - steps * denominator
    steps = (most - one[1]) // other[1]
    return min(Fraction(one[0] + steps * other[0], one[1] + steps * other[1]), Fraction(*other))


def _checked_share(share: object) -> Fraction:
    if isinstance(share, Fraction | int | float) and not isinstance(share, bool) and isfinite(share) and 0 < share <= 1:
        # As it was written: 0.2 is a fifth, which no float is.
        return Fraction(repr(share)) if isinstance(share, float) else Fraction(share)
    raise InvalidConfiguration(f"share={share!r} is no share of a limit: give a number above 0, up to 1, like 0.2")
