"""Fair share: one token bucket for all tenants, in which each of them can rely on a part.

Internal: the algorithm of `FairLimit`. Every tenant that sends requests has a guaranteed bucket, which refills at the
tenant's share of the rate and contains at most its share of half the capacity. A request is admitted

- from the guaranteed bucket of its tenant, if that contains its cost; or
- from what others leave, if the common bucket then still contains the full guaranteed buckets of all other active
  tenants. One that has borrowed more than its share of the surplus must leave half as much again.

Guaranteed buckets fill with what the common bucket gains and lose what it loses, so together they never contain more
than it does, and the first rule never fails. A tenant is active from its first request, admitted or not, until the end
of the epoch after that of its last one. An epoch is the time in which an empty common bucket fills.

All of this takes constant time, as guaranteed buckets refill by one virtual clock for all tenants: it advances at the
rate of the limit divided by the weight of the active tenants, and a tenant stores the reading at which its bucket was
empty. `floor` is the latest reading at which a full bucket was empty: the highest that it ever was, so that capacity
which was lost when shares became smaller does not return. The surplus is divided by water-filling: the tenants that
borrowed most of a level in the last epoch divide what the others left of it, which gives the level of this one.

The clock counts in parts of a token, `scale` of them, and rounds against the tenant. Its readings are relative to the
beginning of the epoch, as are those of tenants last seen in the same; `span` converts those of the epoch before.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

SHAPES_BURST: Final = True
VERSION: Final = 1

MAX_WEIGHT: Final = 1_000
LEVEL_SCALE: Final = 64
"""Parts of a token in which the level of the surplus is counted."""
UNKNOWN: Final = -1
"""The level of the surplus before an epoch has measured it."""

_MAX_SCALE: Final = 2**20
_MIN_SCALE: Final = 2**6
_MAX_READING: Final = 2**51
LEAVES: Final = 256
"""The dicts over which tenants are spread: a new state copies one of them."""

Member: TypeAlias = tuple[int, int, int, int]
"""The epoch in which a tenant was last active, the reading at which its bucket was empty, its weight, and the tokens
that it borrowed in that epoch."""


class Shares(NamedTuple):
    """The state: the common bucket, the virtual clock, the surplus, and the tenants."""

    start_us: int
    """The beginning of the epoch."""
    epoch: int
    level_us: int
    level: int
    """The level of the common bucket at `level_us`, in 1/ticks of a token."""
    clock_us: int
    clock: int
    """The reading of the virtual clock at `clock_us`, when the active weight changed last."""
    weight: int
    """The weight of the active tenants."""
    present: int
    """The weight of those that sent requests in this epoch."""
    span: int
    """The reading at the end of the last epoch."""
    floor: int
    surplus: int
    """The level of the surplus: tokens for each unit of weight, in parts of `LEVEL_SCALE`."""
    borrowed: int
    borrowed_light: int
    """The part of the borrowed tokens that was borrowed by tenants below three quarters of the level."""
    heavy_weight: int
    """The weight of the other borrowers."""
    borrower_weight: int
    leaves: tuple[dict[str, Member], ...]
    """The tenants, in dicts that are never changed: a new state copies one of them."""


State: TypeAlias = Shares | None


class _View(NamedTuple):
    """A state with a tenant in it, at one instant."""

    shares: Shares
    empty: int
    """The reading at which the tenant's bucket was empty."""
    taken: int
    """The tokens that it borrowed in this epoch."""
    is_new: bool
    """True if the tenant was not yet counted in this epoch, or had another weight."""


def peak(limit: LimitNumbers) -> int:
    return max(4 * _MIN_SCALE * (limit.full + limit.tokens), limit.capacity * 4 * LEVEL_SCALE * MAX_WEIGHT)


def epoch_us(limit: LimitNumbers) -> int:
    """The length of an epoch: the time in which an empty bucket fills."""
    return -(-limit.full // limit.tokens)


def decide(state: State, now_us: int, cost: int, limit: Any, id: str = "") -> tuple[State, Verdict]:
    """`limit` is that of one tenant: it has a `member` and a `weight`."""
    dated, te_us = _dated(state, now_us, limit)
    view = _enter(_rotated(dated, te_us, limit), te_us, limit)
    own, borrowable = _available(view, te_us, limit)
    after, retry_us, remaining = dated, 0, max(own, borrowable)
    if cost > limit.capacity:
        retry_us = NEVER
    elif cost > remaining:
        retry_us = _passes_us(view, te_us, cost, limit) - now_us
        after = _stored(view, limit) if view.is_new else dated
    elif cost:
        view = _charged(view, te_us, cost, limit, borrows=cost > own)
        after = _stored(view, limit)
        remaining = max(_available(view, te_us, limit))
    reset_us = 0 if after is None else max(0, after.start_us + 2 * epoch_us(limit) - now_us)
    return after, (remaining, retry_us, reset_us, 0)


def refund(state: State, now_us: int, amount: int, limit: Any, at_us: int | None = None) -> State:
    """Tokens return to the common bucket, and to that of the tenant as far as it is not full."""
    if state is None or not amount:
        return state
    dated, te_us = _dated(state, now_us, limit)
    shares = _rotated(dated, te_us, limit)
    level = _level(shares, te_us, limit)
    if level == limit.full:
        return state
    shares = shares._replace(level_us=te_us, level=min(limit.full, level + amount * limit.ticks))
    view = _enter(shares, te_us, limit)
    if view.is_new:
        return shares
    return _stored(view._replace(empty=view.empty - amount * scale(limit) // limit.weight), limit)


def adopt(state: Shares, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Shares:
    """The state under other numbers: the tokens used of the common bucket stay used, and shares begin anew."""
    te_us = max(now_us, state.level_us, state.clock_us)
    used = old.full - _level(state, te_us, old)
    level = max(0, new.full - -(-used * new.ticks // old.ticks))
    return _fresh(te_us, state.epoch + 2, new)._replace(level=level)


def scale(limit: LimitNumbers) -> int:
    """The parts of a token in which the virtual clock counts: a power of two, so that all products stay exact."""
    parts = _MAX_SCALE
    while parts * (limit.full + limit.tokens) > _MAX_READING:
        parts //= 2
    return parts


def _fresh(now_us: int, epoch: int, limit: LimitNumbers) -> Shares:
    nobody: tuple[dict[str, Member], ...] = ({},) * LEAVES
    return Shares(now_us, epoch, now_us, limit.full, now_us, 0, 0, 0, 0, 0, UNKNOWN, 0, 0, 0, 0, nobody)


def _dated(state: State, now_us: int, limit: LimitNumbers) -> tuple[State, int]:
    """The state, dated now if it is two epochs ahead, as the clock was set back; and the time that applies."""
    latest_us = now_us if state is None else max(state.level_us, state.clock_us)
    if state is None or latest_us <= now_us:
        return state, now_us
    ahead_us = latest_us - now_us
    if ahead_us <= 2 * epoch_us(limit):
        return state, latest_us
    start_us, clock_us = state.start_us - ahead_us, state.clock_us - ahead_us
    return state._replace(start_us=start_us, level_us=state.level_us - ahead_us, clock_us=clock_us), now_us


def _rotated(state: State, te_us: int, limit: LimitNumbers) -> Shares:
    """The state in the epoch that contains this instant."""
    if state is None:
        return _fresh(te_us, 0, limit)
    length_us = epoch_us(limit)
    if te_us >= state.start_us + 2 * length_us:
        return _fresh(te_us, state.epoch + 2, limit)
    return _next_epoch(state, limit) if te_us >= state.start_us + length_us else state


def _next_epoch(shares: Shares, limit: LimitNumbers) -> Shares:
    start_us, weight = shares.start_us + epoch_us(limit), shares.present
    span = _reading(shares, start_us, limit)
    floor = max(_floor(shares, span, limit) - span, -_cap(weight, limit))
    surplus = UNKNOWN
    if shares.heavy_weight:
        surplus = (shares.borrowed - shares.borrowed_light) * LEVEL_SCALE // shares.heavy_weight
    elif shares.borrower_weight:
        surplus = shares.borrowed * LEVEL_SCALE // shares.borrower_weight
    level, leaves = (shares.level_us, shares.level), shares.leaves
    return Shares(start_us, shares.epoch + 1, *level, start_us, 0, weight, 0, span, floor, surplus, 0, 0, 0, 0, leaves)


def _enter(shares: Shares, te_us: int, limit: Any) -> _View:
    """The state in which the tenant is active: the weight of all decides how fast the clock advances from now on."""
    epoch, weight = shares.epoch, limit.weight
    found = shares.leaves[hash(limit.member) % LEAVES].get(limit.member)
    reading = _reading(shares, te_us, limit)
    if found is None or found[0] < epoch - 1:
        empty, taken, before, counted = reading, 0, 0, 0
    else:
        seen, empty, before, taken = found
        counted = before
        if seen < epoch:
            empty, taken, counted = empty - shares.span, 0, 0
        if weight > before:
            empty = reading  # more weight would fill the bucket at once
    changed = shares
    if weight != before:
        floor = _floor(shares, reading, limit)
        total = shares.weight + weight - before
        changed = shares._replace(clock_us=te_us, clock=reading, weight=total, floor=floor)
    if weight != counted:
        changed = changed._replace(present=shares.present + weight - counted)
    return _View(changed, empty, taken, weight != counted)


def _stored(view: _View, limit: Any) -> Shares:
    """The state with the tenant's record; those that are no longer active leave the dict that is copied."""
    shares = view.shares
    index, oldest = hash(limit.member) % LEAVES, shares.epoch - 1
    leaf = shares.leaves[index]
    leaf = {name: each for name, each in leaf.items() if each[0] >= oldest} if view.is_new else {**leaf}
    leaf[limit.member] = shares.epoch, view.empty, limit.weight, view.taken
    return shares._replace(leaves=(*shares.leaves[:index], leaf, *shares.leaves[index + 1 :]))


def _available(view: _View, te_us: int, limit: Any) -> tuple[int, int]:
    """The tokens in the tenant's bucket, and the most that it can borrow."""
    shares, _, taken, _ = view
    reading = _reading(shares, te_us, limit)
    left = _level(shares, te_us, limit) // limit.ticks
    own = limit.weight * (reading - max(view.empty, _floor(shares, reading, limit))) // scale(limit)
    reserve = _reserve(shares, limit)
    light = left - reserve
    if shares.surplus != UNKNOWN:
        light = max(left - reserve - reserve // 2, min(light, shares.surplus * limit.weight // LEVEL_SCALE - taken))
    return min(own, left), max(0, light)


def _charged(view: _View, te_us: int, cost: int, limit: Any, *, borrows: bool) -> _View:
    shares, empty, taken, is_new = view
    reading, weight = _reading(shares, te_us, limit), limit.weight
    shares = shares._replace(level_us=te_us, level=_level(shares, te_us, limit) - cost * limit.ticks)
    if not borrows:
        empty = max(empty, _floor(shares, reading, limit)) - -cost * scale(limit) // weight
        return _View(shares, empty, taken, is_new)
    light, heavy_weight, borrower_weight = shares.borrowed_light, shares.heavy_weight, shares.borrower_weight
    if not taken:
        borrower_weight += weight
    if not _is_heavy(shares, taken + cost, weight):
        light += cost
    elif not _is_heavy(shares, taken, weight):
        light, heavy_weight = light - taken, heavy_weight + weight
    shares = shares._replace(
        borrowed=shares.borrowed + cost,
        borrowed_light=light,
        heavy_weight=heavy_weight,
        borrower_weight=borrower_weight,
    )
    return _View(shares, reading, taken + cost, is_new)


def _is_heavy(shares: Shares, taken: int, weight: int) -> bool:
    return shares.surplus != UNKNOWN and taken * 4 * LEVEL_SCALE > 3 * shares.surplus * weight


def _passes_us(view: _View, te_us: int, cost: int, limit: Any) -> int:
    """The first instant at which the same request passes, if nothing else happens: in this epoch, in the next, or when
    no other tenant is active."""
    length_us = epoch_us(limit)
    at_us = _earliest_us(view, te_us, cost, limit)
    if at_us is not None and at_us < view.shares.start_us + length_us:
        return at_us
    later = _next_epoch(view.shares, limit)
    at_us = _earliest_us(_View(later, view.empty - later.span, 0, False), later.start_us, cost, limit)
    end_us = later.start_us + length_us
    return end_us if at_us is None else min(at_us, end_us)


def _earliest_us(view: _View, from_us: int, cost: int, limit: Any) -> int | None:
    """The first instant at which it passes if this epoch did not end; None for never."""
    shares, _, taken, _ = view
    found: list[int] = []
    need = -(-cost * scale(limit) // limit.weight)
    if need <= _cap(shares.weight, limit):
        target = max(view.empty, _floor(shares, _reading(shares, from_us, limit), limit)) + need - shares.clock
        found.append(shares.clock_us - -target * shares.weight * limit.ticks // (scale(limit) * limit.tokens))
    reserve = _reserve(shares, limit)
    if shares.surplus != UNKNOWN and cost > shares.surplus * limit.weight // LEVEL_SCALE - taken:
        reserve += reserve // 2
    if cost + reserve <= limit.capacity:
        found.append(shares.level_us - (shares.level - (cost + reserve) * limit.ticks) // limit.tokens)
    return max(from_us, min(found)) if found else None


def _level(shares: Shares, te_us: int, limit: LimitNumbers) -> int:
    return min(limit.full, shares.level + (te_us - shares.level_us) * limit.tokens)


def _reading(shares: Shares, te_us: int, limit: LimitNumbers) -> int:
    """The reading of the virtual clock."""
    if not shares.weight:
        return shares.clock
    gained = scale(limit) * limit.tokens * (te_us - shares.clock_us) // limit.ticks
    return shares.clock + gained // shares.weight


def _cap(weight: int, limit: LimitNumbers) -> int:
    """The content of a full guaranteed bucket, for each unit of weight: together they contain half the capacity."""
    return scale(limit) * limit.capacity // (2 * max(1, weight))


def _floor(shares: Shares, reading: int, limit: LimitNumbers) -> int:
    return max(shares.floor, reading - _cap(shares.weight, limit))


def _reserve(shares: Shares, limit: Any) -> int:
    """The tokens in the full buckets of all other active tenants."""
    others: int = shares.weight - limit.weight
    return -(-others * _cap(shares.weight, limit) // scale(limit))
