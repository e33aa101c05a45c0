"""A service with a number of workers and a queue, in virtual time, behind a load shedder or none."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from headgate.overload.load_shedder import PRIORITIES, LoadShedder
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.overload.gradient import ConcurrencySettings
    from headgate.overload.load_shedder import Permit, Priority

SECOND_US = 1_000_000


@dataclass
class Call:
    """A request: when it came, and when it was answered; `end_us` is None if it was shed."""

    priority: Priority
    tenant: str | None
    start_us: int
    end_us: int | None = None

    @property
    def latency_us(self) -> int:
        assert self.end_us is not None
        return self.end_us - self.start_us


@dataclass
class Service:
    """Serves requests of the given mix, which arrive at random, in `workers(now_us)` workers."""

    workers: Callable[[int], int]
    rate: Callable[[int], float]
    """Requests per second."""
    settings: ConcurrencySettings | None
    """Those of the load shedder; None for no limit."""
    mean_us: float = 40_000
    spread: float = 0.5
    """The standard deviation of the logarithm of service times; 0 for equal ones."""
    mix: tuple[float, float, float] = (0.2, 0.4, 0.4)
    """The shares of critical, normal and background requests."""
    tenant: Callable[[Random], str | None] = lambda _: None
    seed: int = 1
    calls: list[Call] = field(default_factory=list)
    limits: list[tuple[int, int]] = field(default_factory=list)
    """Times, and the limit at each."""

    def run(self, seconds: float) -> Service:
        clock, random = FakeClock(), Random(self.seed)
        shedder = None if self.settings is None else LoadShedder(self.settings, clock.now_us)
        queue: deque[tuple[Call, Permit | None]] = deque()
        ending: list[tuple[int, int, Call, Permit | None]] = []
        busy = number = 0
        next_us = 0

        def begin(call: Call, permit: Permit | None) -> None:
            nonlocal busy, number
            busy, number = busy + 1, number + 1
            factor = random.lognormvariate(-(self.spread**2) / 2, self.spread) if self.spread else 1.0
            heapq.heappush(ending, (clock.now_us() + int(self.mean_us * factor), number, call, permit))

        while next_us < seconds * SECOND_US:
            if ending and ending[0][0] <= next_us:
                end_us, _, call, permit = heapq.heappop(ending)
                clock.set_us(end_us)
                busy -= 1
                call.end_us = end_us
                if permit is not None:
                    permit.release()
                while queue and busy < self.workers(end_us):
                    begin(*queue.popleft())
                continue
            clock.set_us(next_us)
            call = Call(random.choices(PRIORITIES, self.mix)[0], self.tenant(random), next_us)
            next_us += int(random.expovariate(self.rate(next_us)) * SECOND_US)
            self.calls.append(call)
            permit = None if shedder is None else shedder.acquire(call.priority, call.tenant)
            if shedder is not None and len(self.calls) % 16 == 0:
                self.limits.append((call.start_us, shedder.stats().limit))
            if shedder is not None and permit is None:
                continue
            if busy < self.workers(call.start_us):
                begin(call, permit)
            else:
                queue.append((call, permit))
        return self

    def success(self, since_us: int, deadline_us: int, **of: Any) -> float:
        """The part of the requests since then that were answered within the deadline."""
        calls = self.select(since_us, **of)
        return sum(call.end_us is not None and call.latency_us <= deadline_us for call in calls) / len(calls)

    def p99_us(self, since_us: int, until_us: float = float("inf"), **of: Any) -> float:
        """The 99th percentile of the latency of those requests that were answered."""
        found = [call for call in self.select(since_us, **of) if call.end_us is not None and call.start_us < until_us]
        return sorted(call.latency_us for call in found)[int(len(found) * 0.99)]

    def throughput(self, since_us: int, until_us: int) -> float:
        """Answers per second."""
        answered = sum(call.end_us is not None and since_us <= call.end_us < until_us for call in self.calls)
        return answered * SECOND_US / (until_us - since_us)

    def select(self, since_us: int, **of: Any) -> list[Call]:
        return [
            call
            for call in self.calls
            if call.start_us >= since_us and all(getattr(call, name) == value for name, value in of.items())
        ]
