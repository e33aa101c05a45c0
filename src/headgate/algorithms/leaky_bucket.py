"""Leaky bucket as a queue: whatever is admitted leaves at the limit's even pace, and at most `capacity` wait.

Admission is GCRA's; the state is the same instant, seen as the tail of the queue: when all that was admitted will have
drained. What is new is `delay_us`, how long the admitted request has to wait for its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.algorithms import gcra

if TYPE_CHECKING:
    from headgate.algorithms._interface import LimitNumbers, Verdict

SHAPES_BURST: Final = True
VERSION: Final = 1

peak = gcra.peak
refund = gcra.refund
overdraw = gcra.overdraw
adopt = gcra.adopt


def decide(state: int | None, now_us: int, cost: int, limit: LimitNumbers, id: str = "") -> tuple[int | None, Verdict]:
    after, (remaining, retry_us, reset_us, _) = gcra.decide(state, now_us, cost, limit)
    tail = state if cost else after  # of a peek, which may have re-dated it
    waiting = 0 if tail is None or retry_us else max(0, tail - now_us * limit.tokens)
    return after, (remaining, retry_us, reset_us, -(-waiting // limit.tokens))
