"""Fixed window: at most `quota` in each window of the period, windows aligned to the epoch.

State: (ts_us, used). ts_us is the instant of the last admitted request; the window that was counted in is the one
it lies in. When the period changes, a count whose window is over stays forgotten; any other is kept, and counts in the
new window that ts_us lies in. A count that is dated more than a period in the future, because the clock was set back,
is dated now.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Count: TypeAlias = tuple[int, int]
State: TypeAlias = Count | None

SHAPES_BURST: Final = False
VERSION: Final = 2


def peak(limit: LimitNumbers) -> int:
    return 2 * limit.quota + 1


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    if state is not None and state[0] - now_us > limit.period_us:  # the clock was set back by more than a period
        state = now_us, state[1]
    te_us, window, used = _count(state, now_us, limit)
    to_next_us = (window + 1) * limit.period_us - now_us
    if used + cost <= limit.quota or not cost:
        if cost:
            used += cost
            state = te_us, used
        retry_us = 0
    else:
        retry_us = NEVER if cost > limit.quota else to_next_us
    remaining = limit.quota - used if used < limit.quota else 0
    return state, (remaining, retry_us, to_next_us if used else 0, 0)


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    _, window, used = _count(state, now_us, limit)
    if at_us is None or at_us - now_us > limit.period_us:  # charged before the clock was set back, and re-dated since
        at_us = window * limit.period_us
    if state is None or not used or at_us // limit.period_us != window:
        return state
    return state[0], max(0, used - amount)


def adopt(state: Count, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Count:
    if old.period_us == new.period_us:
        return state
    _, _, used = _count(state, now_us, old)
    return state[0], used


def _count(state: State, now_us: int, limit: LimitNumbers) -> tuple[int, int, int]:
    """The effective instant, its window, and what was used of that."""
    if state is None:
        return now_us, now_us // limit.period_us, 0
    ts_us, used = state
    te_us = max(now_us, ts_us)
    window = te_us // limit.period_us
    return te_us, window, used if window == ts_us // limit.period_us else 0
