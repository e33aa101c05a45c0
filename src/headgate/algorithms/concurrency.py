"""Concurrency: at most `quota` at the same time, by leases that end by themselves when their holder crashes.

State: a tuple of leases (id, cost, expiry_us, ttl_us). The limit's period is the lease time: a lease holds until its
expiry, and its holder renews it. Entering again under an id that is held renews it and counts once. A lease that was
taken or renewed more than its own ttl in the future, because the clock was set back, is treated as taken now.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Leases: TypeAlias = tuple[tuple[str, int, int, int], ...]
State: TypeAlias = Leases | None

SHAPES_BURST: Final = False
VERSION: Final = 2

_expiry_us = itemgetter(2)


def peak(limit: LimitNumbers) -> int:
    return 2 * limit.quota + 1


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    state = _redated(state, now_us)
    leases = _held(state, now_us)
    held = sum(lease[1] for lease in leases)
    retry_us = 0
    if cost:
        renewed, found = renew(leases, now_us, limit, id)
        if found:
            state = leases = renewed
        elif held + cost <= limit.quota:
            held += cost
            state = leases = (*leases, (id, cost, now_us + limit.period_us, limit.period_us))
        elif cost > limit.quota:
            retry_us = NEVER
        else:
            retry_us = _freed_us(leases, held + cost - limit.quota) - now_us
    reset_us = max(map(_expiry_us, leases)) - now_us if leases else 0
    return state, (max(0, limit.quota - held), retry_us, reset_us, 0)


def renew(state: State, now_us: int, limit: LimitNumbers, id: str) -> tuple[Leases, bool]:
    """The leases with that of `id` extended, and whether it was still held."""
    leases = _held(_redated(state, now_us), now_us)
    expiry_us = now_us + limit.period_us
    prolonged = tuple(
        (id, lease[1], expiry_us, limit.period_us) if lease[0] == id and lease[2] < expiry_us else lease
        for lease in leases
    )
    return prolonged, any(lease[0] == id for lease in leases)


def leave(state: State, now_us: int, id: str) -> tuple[Leases, bool]:
    """The leases without that of `id`, and whether it was still held: an expired lease cannot be ended."""
    leases = _held(_redated(state, now_us), now_us)
    staying = tuple(lease for lease in leases if lease[0] != id)
    return staying, len(staying) < len(leases)


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    """Nothing: a lease is given back whole, by leaving."""
    return state


def adopt(state: Leases, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Leases:
    return state


def _redated(state: State, now_us: int) -> State:
    """The same state object, unless one of its leases begins too far in the future."""
    if not state or not any(expiry_us - 2 * ttl_us > now_us for _, _, expiry_us, ttl_us in state):
        return state
    return tuple(
        (id, cost, now_us + ttl_us if expiry_us - 2 * ttl_us > now_us else expiry_us, ttl_us)
        for id, cost, expiry_us, ttl_us in state
    )


def _held(state: State, now_us: int) -> Leases:
    return tuple(lease for lease in state or () if lease[2] > now_us)


def _freed_us(leases: Leases, needed: int) -> int:
    """The time at which leases worth `needed` will have expired, unless they are renewed or ended."""
    for _, cost, expiry_us, _ in sorted(leases, key=_expiry_us):
        needed -= cost
        if needed <= 0:
            return expiry_us
    raise AssertionError("a request that fits the quota is freed by the expiry of all leases at the latest")
