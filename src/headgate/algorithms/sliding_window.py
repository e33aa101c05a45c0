"""Sliding window: the count of this window plus the share of the last one that a window ending now still covers.

State: (ts_us, current, previous): the instant of the last admitted request, the count of the window it lies in, and
that of the window before. The share is an exact fraction; compared with whole numbers, rounding it up changes
nothing. When the period changes, counts that no longer weigh stay forgotten; the others are kept, in the new window
that ts_us lies in and the one before. Counts that are dated more than a period in the future, because the clock was set
back, are dated now.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Counts: TypeAlias = tuple[int, int, int]
State: TypeAlias = Counts | None

SHAPES_BURST: Final = False
VERSION: Final = 2


def peak(limit: LimitNumbers) -> int:
    return 4 * limit.quota


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    quota, period_us = limit.quota, limit.period_us
    if state is not None and state[0] - now_us > period_us:  # the clock was set back by more than a period
        state = now_us, *state[1:]
    te_us, window, current, previous = _count(state, now_us, limit)
    start_us = window * period_us
    share = -(-previous * (period_us - (te_us - start_us)) // period_us)
    if current + share + cost <= quota or not cost:
        if cost:
            current += cost
            state = te_us, current, previous
        retry_us = 0
    elif cost > quota:
        retry_us = NEVER
    elif current + cost <= quota:  # it passes while this window lasts, when enough of the last one has slid out
        retry_us = start_us + period_us - (quota - current - cost) * period_us // previous - now_us
    else:  # it passes in the next window, when enough of this one has slid out
        retry_us = start_us + 2 * period_us - (quota - cost) * period_us // current - now_us
    weighs_for = 2 if current else 1 if previous else 0
    reset_us = start_us + weighs_for * period_us - now_us if weighs_for else 0
    return state, (max(0, quota - current - share), retry_us, reset_us, 0)


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    if state is None:
        return None
    ts_us, current, previous = state
    window = max(now_us, ts_us) // limit.period_us
    if at_us is None or at_us - now_us > limit.period_us:  # charged before the clock was set back, and re-dated since
        at_us = window * limit.period_us
    charged = at_us // limit.period_us
    if not charged == window == ts_us // limit.period_us:
        return state
    return ts_us, max(0, current - amount), previous


def adopt(state: Counts, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Counts:
    if old.period_us == new.period_us:
        return state
    ts_us, current, previous = state
    age = max(now_us, ts_us) // old.period_us - ts_us // old.period_us
    return ts_us, current if age < 2 else 0, previous if age < 1 else 0


def _count(state: State, now_us: int, limit: LimitNumbers) -> tuple[int, int, int, int]:
    """The effective instant, its window, and the counts of that window and the one before."""
    if state is None:
        return now_us, now_us // limit.period_us, 0, 0
    ts_us, current, previous = state
    te_us = max(now_us, ts_us)
    window = te_us // limit.period_us
    age = window - ts_us // limit.period_us
    if age == 0:
        return te_us, window, current, previous
    return te_us, window, 0, current if age == 1 else 0
