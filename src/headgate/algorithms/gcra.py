"""GCRA, the generic cell rate algorithm: a bucket kept as one instant, when it will be full again.

State: one integer, the theoretical arrival time `tat` in 1/tokens of a microsecond, so that one request moves it by
exactly `cost * ticks`. The raw clock is used: an instant in the future is a debt, whatever the clock does.

A bucket that was used up lies one period ahead, the time in which it fills. If the instant is further ahead than two,
the clock was set back by more than a period; the bucket is then taken to be empty now. This is a migration, which is
also written for a request that is denied, as is the conversion after a plan change.
"""

from __future__ import annotations

from typing import Final

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

SHAPES_BURST: Final = True
VERSION: Final = 1


def peak(limit: LimitNumbers) -> int:
    return limit.full + limit.tokens


def decide(state: int | None, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[int | None, Verdict]:
    tokens, ticks = limit.tokens, limit.ticks
    now = now_us * tokens
    full = limit.full
    debt = state - now if state is not None and state > now else 0
    if debt > full + full:  # the clock was set back by more than a period
        debt = full
        state = now + full
    need = cost * ticks
    if debt + need <= full or not cost:
        if cost:
            debt += need
            state = now + debt
        retry_us = 0
    elif need > full:
        retry_us = NEVER
    else:
        retry_us = -((full - debt - need) // tokens)
    remaining = (full - debt) // ticks if debt < full else 0
    return state, (remaining, retry_us, -(-debt // tokens), 0)


def refund(state: int | None, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> int | None:
    now = now_us * limit.tokens
    if state is None or state <= now:
        return state
    return max(now, state - amount * limit.ticks)


def overdraw(state: int | None, now_us: int, amount: int, limit: LimitNumbers) -> int:
    """The state after up to a capacity was charged, even if that much is not left, up to twice the capacity in all."""
    now, longest_us = now_us * limit.tokens, limit.full // limit.tokens * 2
    state = decide(state, now_us, 0, limit)[0]
    return min(max(state or now, now) + amount * limit.ticks, (now_us + longest_us) * limit.tokens)


def adopt(state: int, now_us: int, old: LimitNumbers, new: LimitNumbers) -> int:
    # Rounding up loses no decision: from here on only whole numbers are added and compared.
    tat = -(-state * new.tokens // old.tokens)
    # No client waits longer than an empty bucket of the new limit takes to fill.
    return min(tat, now_us * new.tokens + new.full)
