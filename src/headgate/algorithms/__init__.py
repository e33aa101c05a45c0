"""The algorithms: pure arithmetic on whole numbers, no clock, no store, no lock. Seven are for limits, three internal.

Each is one module, `decide(state, now_us, cost, limit) -> (state, verdict)`, and beside it the Lua file of the same
name that Redis runs. The two are held to each other, and to an independent model in exact fractions, by the tests.
"""

from __future__ import annotations

from typing import Final

from headgate.algorithms import (
    calendar_window,
    concurrency,
    fair_share,
    fixed_window,
    gcra,
    leaky_bucket,
    pool,
    sliding_log,
    sliding_window,
    token_bucket,
)
from headgate.algorithms._interface import NEVER, Algorithm, LimitNumbers, Verdict

__all__ = ["ALGORITHMS", "INTERNAL_ALGORITHMS", "NEVER", "Algorithm", "LimitNumbers", "Verdict"]

ALGORITHMS: Final[dict[str, Algorithm]] = {
    "token_bucket": token_bucket,
    "gcra": gcra,
    "leaky_bucket": leaky_bucket,
    "fixed_window": fixed_window,
    "sliding_window": sliding_window,
    "sliding_log": sliding_log,
    "concurrency": concurrency,
}

INTERNAL_ALGORITHMS: Final[dict[str, Algorithm]] = {
    "calendar_window": calendar_window,
    "fair_share": fair_share,
    "pool": pool,
}
"""Algorithms that no limit of a user can name: that of fixed_window limits with a calendar period, that of fair limits,
and that of counters that headgate creates for itself."""
