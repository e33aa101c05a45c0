"""The rules of an experiment over regions. This file decides what is right: it is the one to audit.

An admission counts at the instant of its decision, by the clock of the home region: the clock of the store that decided
differs from it by a constant that the plan knows. Only windows that each region counts for itself (divided, reconciled)
are those of the region's own clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from chaos.regions.plan import LATENCY_S
from chaos.regions.worker import ALLOWED, DEGRADED_ALLOWED, FAILED
from headgate.regions.cost import region_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chaos.regions.plan import Plan, Traffic
    from chaos.regions.worker import Row

USABLE: Final = 0.95
EVEN: Final = 1.10
MAX_WAITING: Final = 0.01
"""The share of requests that may take as long as a round trip to another region, beyond that of requests that cannot
wait for one: those of divided limits. A busy machine delays some of all kinds."""
MAX_BASELINE: Final = 0.05
MIN_JUDGED_PERIOD_S: Final = 60
"""Shares of a limit, and times, are judged from this period on: leases and exchanges take a second or two of any
window, and the short form runs beside other tests."""
EXACT_MODES: Final = frozenset({"divided", "reserved", "central"})


class Outcome(NamedTuple):
    """One line of the report: what became of one kind of traffic."""

    traffic: Traffic
    requests: int
    windows: tuple[int, ...]
    """Admitted in each window."""
    most: float
    """The largest multiple of the limit that was admitted in a period."""
    connected: float
    """The same, in windows in which no region was cut off."""
    bound: int
    over: int
    """Admitted beyond what one store would have."""
    usable: float
    """The least part of the limit that was admitted in a window in which no region was cut off."""
    p50_us: int
    p99_us: int
    waiting: float
    """The share of requests that took at least a round trip to another region."""
    wrong: tuple[str, ...]


def judge(plan: Plan, rows: Sequence[Row], start_us: int) -> list[Outcome]:
    found: list[list[Row]] = [[] for _ in plan.traffic]
    for row in rows:
        found[row.traffic].append(row)
    outcomes = [_measure(plan, traffic, its, start_us) for traffic, its in zip(plan.traffic, found, strict=True)]
    baseline = min(MAX_BASELINE, max(each.waiting for each in outcomes if each.traffic.mode == "divided"))
    return [
        outcome._replace(wrong=tuple(_problems(plan, outcome, its, baseline)))
        for outcome, its in zip(outcomes, found, strict=True)
    ]


def admissions(plan: Plan, traffic: Traffic, rows: Iterable[Row]) -> list[int]:
    """The instants of admissions, in order."""
    found = []
    has_own_windows = traffic.mode in ("divided", "reconciled") and traffic.limit.algorithm == "fixed_window"
    for row in rows:
        if row.result in (ALLOWED, DEGRADED_ALLOWED):
            is_home_clock = traffic.mode == "central" or row.at_us == 0
            skew_us = 0 if is_home_clock or has_own_windows else round(plan.skew_s(row.region) * 1_000_000)
            found.append((row.at_us or row.start_us) - skew_us)
    return sorted(found)


def _measure(plan: Plan, traffic: Traffic, rows: list[Row], start_us: int) -> Outcome:
    limit, period_us = traffic.limit, traffic.limit.period_us
    admitted = admissions(plan, traffic, rows)
    counts = Counter((at_us - start_us) // period_us for at_us in admitted)
    windows = tuple([counts[number] for number in range(plan.windows)])
    connected = [number for number in range(plan.windows) if not _is_cut(plan, number)]
    if limit.algorithm == "fixed_window":
        most, over = max(windows) / limit.quota, max(0, max(windows) - limit.quota)
        # The exchange knows nothing of the first moments of the first window, in which all processes start.
        in_peace = max([windows[number] for number in connected], default=0) / limit.quota
        usable = min([windows[number] for number in connected], default=0) / limit.quota
    else:
        over = bucket_excess(admitted, limit.capacity, limit.quota / period_us)
        first = limit.capacity + limit.quota  # the bucket is full at first
        most = (first + over) / first
        in_peace = counts[0] / first
        usable = min([windows[number] for number in connected], default=0) / limit.quota
    cost = region_cost(limit, plan.regions)
    times = sorted(row.took_us for row in rows)
    waiting = sum(took_us >= LATENCY_S * 1_000_000 for took_us in times) / max(1, len(times))
    return Outcome(
        traffic, len(rows), windows, most, in_peace, cost.bound, over, usable,
        times[len(times) // 2] if times else 0, times[len(times) * 99 // 100] if times else 0, waiting, (),
    )  # fmt: skip


def bucket_excess(admitted: Sequence[int], capacity: int, tokens_per_us: float) -> int:
    """The most by which admissions exceed what a bucket that is full at first has, at any time."""
    level, excess, last_us = float(capacity), 0.0, admitted[0] if admitted else 0
    for at_us in admitted:
        level, last_us = min(float(capacity), level + (at_us - last_us) * tokens_per_us) - 1, at_us
        excess = max(excess, -level)
    return int(excess + 1e-6)


def _is_cut(plan: Plan, window: int) -> bool:
    begin, end = window * plan.period_s, (window + 1) * plan.period_s
    return any(from_s < end and begin < to_s for _, from_s, to_s in plan.cuts)


def _problems(plan: Plan, outcome: Outcome, rows: Sequence[Row], baseline: float) -> Iterable[str]:
    traffic, mode = outcome.traffic, outcome.traffic.mode
    is_long = plan.period_s >= MIN_JUDGED_PERIOD_S
    if failed := sum(row.result == FAILED for row in rows):
        yield f"{failed} requests raised an exception"
    if any(row.result == DEGRADED_ALLOWED for row in rows):
        yield "a request was allowed without the store, though the failure mode is closed"
    if mode in EXACT_MODES and outcome.over:
        yield f"{outcome.over} more than the limit were admitted"
    if outcome.over > outcome.bound:
        yield f"{outcome.over} more than the limit were admitted, and the bound is {outcome.bound}"
    if mode == "reconciled" and is_long and traffic.region is None and outcome.connected > EVEN:
        yield f"{outcome.connected:.2f} times the limit were admitted under an even spread"
    if mode != "divided" and is_long and traffic.region is not None and outcome.usable < USABLE:
        yield f"{outcome.usable:.1%} of the limit were usable from one region"
    if mode != "central" and is_long and outcome.waiting > MAX_WAITING + baseline:
        yield f"{outcome.waiting:.1%} of the requests took as long as a round trip to another region"
    if not rows:
        yield "no request was made"
