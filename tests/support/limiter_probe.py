"""A limiter with a fake clock, and the tables of decisions that it is compared with.

A row reads `(now, cost) -> (allowed, remaining, retry_after)`, in milliseconds after `START_US`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from headgate import Key, Limit, Limiter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.testing import FakeClock


SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
START_US = 1_763_251_200_000_000  # a whole hour, so that every window here begins at 0 ms
ALGORITHMS = (
    "concurrency",
    "fixed_window",
    "gcra",
    "leaky_bucket",
    "sliding_log",
    "sliding_window",
    "token_bucket",
)
WINDOWS = ("fixed_window", "sliding_window", "sliding_log")
REFILLED = ("token_bucket", "gcra", "leaky_bucket")
Row = tuple[tuple[float, int], tuple[bool, int, float | None]]


@dataclass
class LimiterProbe:
    """A limiter, its clock, and an identity that no other test uses."""

    limiter: Limiter
    clock: FakeClock
    identity: str

    def at(self, now_ms: float) -> Limiter:
        self.clock.set_us(START_US + round(now_ms * 1000))
        return self.limiter

    def key(self, limit: Limit) -> Key:
        return limit.by(self.identity)

    def answer(self, limit: Limit, now_ms: float, cost: int = 1) -> tuple[bool, int, float | None]:
        decision = self.at(now_ms).check(self.key(limit), cost=cost)
        retry_after_us = decision.retry_after_us
        return decision.allowed, decision.remaining, None if retry_after_us is None else retry_after_us / 1000

    def replay(self, limit: Limit, rows: Sequence[Row]) -> None:
        answers = [(event, self.answer(limit, *event)) for event, _ in rows]
        assert answers == list(rows)

    def admitted(self, limit: Limit, instants_ms: Sequence[float]) -> int:
        return sum(self.answer(limit, now_ms)[0] for now_ms in instants_ms)

    def remaining(self, limit: Limit) -> int:
        return self.limiter.peek(self.key(limit)).remaining


def limit_of(algorithm: str, quota: int, period: timedelta, burst: int | None = None, name: str = "x") -> Limit:
    return Limit(quota, period, burst=burst, algorithm=algorithm, name=name)
