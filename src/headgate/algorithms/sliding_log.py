"""Sliding log: at most `quota` in any span of the period, exactly, by remembering every admitted request.

State: a tuple of entries (at_us, total, cost), oldest first. `total` is the running sum up to and with the entry,
so that the sum of any stretch is one subtraction, and both the first entry that still counts and the one whose
expiry frees enough are found by bisection. An entry counts while less than a period has passed since; what has ceased
to count does not come back when the period becomes longer. A log that ends more than a period in the future, because
the clock was set back, becomes one entry of now, with all that is used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Log: TypeAlias = tuple[tuple[int, int, int], ...]
State: TypeAlias = Log | None

SHAPES_BURST: Final = False
VERSION: Final = 2

_at_us = itemgetter(0)
_total = itemgetter(1)


def peak(limit: LimitNumbers) -> int:
    return 2 * limit.quota + 1


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    quota, period_us = limit.quota, limit.period_us
    log = state or ()
    te_us = max(now_us, log[-1][0]) if log else now_us
    first = bisect_right(log, te_us - period_us, key=_at_us)
    if te_us - now_us > period_us:  # the clock was set back by more than a period
        used = sum(cost for _, _, cost in log[first:])
        state = log = ((now_us, used, used),)
        te_us, first = now_us, 0
    live = first < len(log)
    before = log[first][1] - log[first][2] if live else 0
    total = log[-1][1] if live else 0
    used = total - before
    last_us = _last_charge_us(log) if used else te_us
    if used + cost <= quota or not cost:
        if cost:
            used += cost
            last_us = te_us
            kept = log[first:-1] if live and not log[-1][2] else log[first:]
            state = (*kept, (te_us, total + cost, cost))
        retry_us = 0
    elif cost > quota:
        retry_us = NEVER
    else:
        freeing = bisect_left(log, before + used + cost - quota, lo=first, key=_total)
        retry_us = log[freeing][0] + period_us - now_us
    return state, (max(0, quota - used), retry_us, last_us + period_us - now_us if used else 0, 0)


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    """The newest charges go first; of those known to be older, none that came after `at_us` is touched."""
    if not state:
        return state
    te_us = max(now_us, state[-1][0])
    left = amount
    kept = []
    for index in range(len(state) - 1, bisect_right(state, te_us - limit.period_us, key=_at_us) - 1, -1):
        entry_us, _, cost = state[index]
        taken = min(cost, left) if at_us is None or entry_us <= at_us else 0
        left -= taken
        # The newest entry stays even when it is worth nothing: it holds the instant that time may not fall behind.
        if taken < cost or index == len(state) - 1:
            kept.append((entry_us, cost - taken))
    if left == amount:
        return state
    total = 0
    renumbered = []
    for entry_us, cost in reversed(kept):
        total += cost
        renumbered.append((entry_us, total, cost))
    return tuple(renumbered)


def adopt(state: Log, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Log:
    if not state or old.period_us == new.period_us:
        return state
    te_us = max(now_us, state[-1][0])
    return state[bisect_right(state, te_us - min(old.period_us, new.period_us), key=_at_us) :]


def _last_charge_us(log: Log) -> int:
    """When the last charge was made that was not given back: only the newest entry can be worth nothing."""
    return log[-1][0] if log[-1][2] else log[-2][0]
