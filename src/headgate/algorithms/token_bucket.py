"""Token bucket: `capacity` tokens, refilled continuously at the limit's rate; a request takes `cost` of them.

State: one integer, `ts_us << 53 | level`. The level is counted in 1/ticks of a token, so that a microsecond adds
exactly `tokens` and nothing is ever rounded; ts_us is the instant of the last admitted request. One integer,
because a tuple of two would cost 70 bytes more for each of a million keys.

A plan change keeps what is used: the bucket is refilled at the old rate up to the instant at which the change is first
seen, and is then as far from full as it was before. A bucket whose instant is further in the future than an empty one
takes to fill, because the clock was set back, is dated now, with its level. Both are migrations, which are also written
for a request that is denied.
"""

from __future__ import annotations

from typing import Final

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

SHAPES_BURST: Final = True
VERSION: Final = 1

_LEVEL: Final = 2**53 - 1


def peak(limit: LimitNumbers) -> int:
    return limit.full + limit.tokens


def decide(state: int | None, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[int | None, Verdict]:
    ticks, tokens, full = limit.ticks, limit.tokens, limit.full
    if state is None:
        te_us, ahead_us = now_us, 0
        level = full
    else:
        te_us = state >> 53
        level = state & _LEVEL
        ahead_us = te_us - now_us
        if ahead_us < 0:
            level -= ahead_us * tokens
            if level > full:
                level = full
            te_us, ahead_us = now_us, 0
        elif ahead_us * tokens > full:  # the clock was set back by more than a period
            te_us, ahead_us = now_us, 0
            state = now_us << 53 | level
    need = cost * ticks
    if need <= level:
        if cost:
            level -= need
            state = te_us << 53 | level
        retry_us = 0
    elif need > full:
        retry_us = NEVER
    else:
        retry_us = ahead_us - (level - need) // tokens
    reset_us = ahead_us - (level - full) // tokens if level < full else 0
    return state, (level // ticks, retry_us, reset_us, 0)


def refund(state: int | None, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> int | None:
    if state is None:
        return None
    # Adding before or after the refill comes to the same level, so the instant can stay as it is.
    ts_us, level = state >> 53, state & _LEVEL
    if level + max(0, now_us - ts_us) * limit.tokens >= limit.full:
        return state
    return ts_us << 53 | min(limit.full, level + amount * limit.ticks)


def overdraw(state: int | None, now_us: int, amount: int, limit: LimitNumbers) -> int:
    """The state after up to a capacity was charged, even if that much is not left: refilling then begins later, at most
    after the time to fill an empty bucket."""
    state = decide(state, now_us, 0, limit)[0]
    te_us, level = (now_us, limit.full) if state is None else (state >> 53, state & _LEVEL)
    if now_us > te_us:
        te_us, level = now_us, min(limit.full, level + (now_us - te_us) * limit.tokens)
    need = amount * limit.ticks
    taken = min(level, need)
    ahead_us = min(te_us - now_us - (taken - need) // limit.tokens, limit.full // limit.tokens)
    return now_us + ahead_us << 53 | level - taken


def adopt(state: int, now_us: int, old: LimitNumbers, new: LimitNumbers) -> int:
    ts_us, level = state >> 53, state & _LEVEL
    te_us = max(now_us, ts_us)
    used = max(0, old.full - level - (te_us - ts_us) * old.tokens)
    # Rounding up loses no decision: from here on only whole numbers are added, taken and compared.
    used = -(-used * new.ticks // old.ticks)
    return te_us << 53 | max(0, new.full - used)
