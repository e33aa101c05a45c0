"""Calendar window: at most `quota` in each period of a calendar, the fixed window of limits with such a period.

Internal: limits of users are fixed_window.

State: (since_us, until_us, used, series), the window that is counted, what was used in it, and the `series` of its
calendar: unit and start day. A client's calendar may change, which must not grant a period twice. What was used then
counts until the first edge, in the calendar that is now in force, at or after the end of the stored window. Only if the
time zone alone has changed, and the edge before is the same day in another time zone, the stored window ends as it was
to. The stored window stays as it was, so that nodes with different calendars do not extend it again and again.

A stored window that is over also counts if the current one began before its end; so stores keep a count for the longest
period after its window. If the unit changes, say from a month to a week, what was used in a window that is not over
counts in the current one. A window that ends more than two periods in the future, because the clock was set back,
becomes the current one.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from headgate.algorithms._interface import NEVER, LimitNumbers, Verdict

Count: TypeAlias = tuple[int, int, int, str]
State: TypeAlias = Count | None

SHAPES_BURST: Final = False
VERSION: Final = 1


def peak(limit: LimitNumbers) -> int:
    return 2 * limit.quota + 1


def decide(state: State, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[State, Verdict]:
    calendar = limit.calendar
    start_us, until_us = calendar.current
    if state is not None and state[1] == until_us and start_us <= now_us < until_us and state[3] == calendar.series:
        count = state  # as almost always; otherwise what follows finds the same
    else:
        count, until_us = _count(state, now_us, calendar)
    since_us, end_us, used, series = count
    to_next_us = until_us - now_us
    retry_us = 0
    if used + cost <= limit.quota or not cost:
        used += cost
    else:
        retry_us = NEVER if cost > limit.quota else to_next_us
    if used and (count is not state or (cost and not retry_us)):  # migrated or charged
        state = since_us, end_us, used, series
    remaining = limit.quota - used if used < limit.quota else 0
    return state, (remaining, retry_us, to_next_us if used else 0, 0)


def refund(state: State, now_us: int, amount: int, limit: LimitNumbers, at_us: int | None = None) -> State:
    (since_us, end_us, used, series), until_us = _count(state, now_us, limit.calendar)
    if at_us is None or at_us - now_us > 2 * limit.calendar.longest_us:  # charged before the clock was set back
        at_us = since_us
    if state is None or not used or not since_us <= at_us < until_us:
        return state
    return since_us, end_us, max(0, used - amount), series


def adopt(state: Count, now_us: int, old: LimitNumbers, new: LimitNumbers) -> Count:
    return state  # which says by itself how it was counted


def retained_us(state: Count, now_us: int, limit: LimitNumbers) -> int:
    """The time for which a store keeps a state, even if its window is over."""
    return max(0, state[1] + limit.calendar.longest_us - now_us) if state[2] else 0


def _count(state: State, now_us: int, calendar: Any) -> tuple[Count, int]:
    """The state that counts now, and the end of its window in the calendar that is in force."""
    start_us, end_us = calendar.window(now_us)
    if state is None or state[1] <= start_us:
        return (start_us, end_us, 0, calendar.series), end_us
    _, until_us, used, series = state
    if series == calendar.series and until_us == end_us:  # without changes of the calendar or the clock
        return state, end_us
    if series.partition(".")[0] != calendar.unit:
        return (start_us, end_us, used if now_us < until_us else 0, calendar.series), end_us
    if until_us - now_us > 2 * calendar.longest_us:  # the clock was set back
        return (start_us, end_us, used, calendar.series), end_us
    edge_us, next_us = calendar.window(until_us)
    if until_us - edge_us > (calendar.zone_tolerance_us if series == calendar.series else 0):
        until_us = next_us
    if until_us <= now_us:
        return (start_us, end_us, 0, calendar.series), end_us
    return state, until_us
