"""The comparison of the nodes that apply the candidate of a canary with the other nodes, as a pure function.

Both groups are compared over the same seconds: the last minute, or up to five minutes if it has too few requests. A
higher share of rejections or errors counts only if it is unlikely to be chance, as clients are not spread evenly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from headgate.telemetry.fleet.rollups import OUTCOMES, quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headgate.control.config.rows import CanaryRow
    from headgate.telemetry.fleet.model import CanaryNode, CanarySecond

__all__ = ["Comparison", "GroupTotals", "Measure", "Verdict", "compare"]

WINDOWS_S: Final = (60, 300)
"""The compared times; the first one with enough requests is used, otherwise the last."""
MIN_REQUESTS: Final = 100
"""Requests of each group from which on the shares of rejections and errors are compared."""
MIN_LATENCY_REQUESTS: Final = 500
"""Requests of each group from which on a 99th percentile means anything."""
MIN_LATENCY_SECONDS: Final = 10
"""The time from which on the latency is compared: a single pause of a process must not look like a slow policy."""
MIN_SLOWDOWN_US: Final = 1_000
"""A slowdown below this is not counted, as a few microseconds may be twice as many as before."""
STANDARD_ERRORS: Final = 3.0
"""Standard errors by which two shares must differ, so that hundreds of comparisons find no difference by chance."""

Verdict: TypeAlias = Literal[
    "within thresholds", "threshold exceeded", "invalid candidate", "too few requests", "no candidate nodes",
    "no other nodes",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """The requests of a group of nodes in the compared time."""

    nodes: int
    """The number of processes."""
    requests: int
    rejections: int
    """Requests that a limit denied or a block rejected."""
    errors: int
    """Requests that a failure mode answered, because the store did not."""
    p50_us: int | None
    p99_us: int | None


@dataclass(frozen=True, slots=True)
class Measure:
    """One compared quantity: percentages of requests, or microseconds."""

    name: Literal["rejections", "errors", "latency"]
    candidate: float | None
    stable: float | None
    permitted: float
    """The highest permitted value of the candidate, given that of the other nodes."""
    verdict: Literal["within threshold", "exceeded", "too few requests"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The nodes that apply the candidate, compared with the others."""

    verdict: Verdict
    seconds: int
    """The length of the compared time."""
    candidate: GroupTotals
    stable: GroupTotals
    measures: tuple[Measure, ...]
    reasons: tuple[str, ...]
    """The reasons for a rollback."""
    invalid_nodes: tuple[str, ...]
    """Nodes that cannot apply the candidate."""

    @property
    def must_roll_back(self) -> bool:
        return bool(self.reasons)


class _Seconds(NamedTuple):
    """The seconds of both groups in the same time."""

    candidate: Sequence[CanarySecond]
    stable: Sequence[CanarySecond]
    length: int


def compare(canary: CanaryRow, nodes: Iterable[CanaryNode]) -> Comparison:
    """Compare the nodes of a canary by their reports. Nodes that have not learned of this canary are ignored."""
    known = [node for node in nodes if node.canary == canary.canary]
    groups = [[node for node in known if node.role == role] for role in ("candidate", "stable")]
    invalid = [node for node in known if node.error]
    seconds = _same_seconds(*groups)
    candidate, stable = (_totals(group, each) for group, each in zip(groups, seconds[:2], strict=True))
    measures = (
        _share("rejections", candidate, stable, candidate.rejections, stable.rejections, canary.max_rejections_bp),
        _share("errors", candidate, stable, candidate.errors, stable.errors, canary.max_errors_bp),
        _latency(candidate, stable, canary.max_latency_percent, seconds.length),
    )
    reasons = [f"{node.name} cannot apply the candidate: {node.error}" for node in invalid]
    reasons += [_reason(each) for each in measures if each.verdict == "exceeded"]
    return Comparison(
        verdict=_verdict(groups, measures, has_invalid=bool(invalid)),
        seconds=seconds.length,
        candidate=candidate,
        stable=stable,
        measures=measures,
        reasons=tuple(reasons),
        invalid_nodes=tuple([node.name for node in invalid]),
    )


def _verdict(groups: Sequence[Sequence[CanaryNode]], measures: Sequence[Measure], *, has_invalid: bool) -> Verdict:
    verdicts = [each.verdict for each in measures]
    if has_invalid:
        return "invalid candidate"
    if "exceeded" in verdicts:
        return "threshold exceeded"
    for group, missing in zip(groups, ("no candidate nodes", "no other nodes"), strict=True):
        if not group:
            return missing  # type: ignore[return-value] # one of two literals
    # The latency needs more requests, and is judged when there are enough.
    return "too few requests" if "too few requests" in verdicts[:2] else "within thresholds"


def _same_seconds(candidate: Iterable[CanaryNode], stable: Iterable[CanaryNode]) -> _Seconds:
    """The seconds of the shortest window with enough requests, from when both groups have learned of the canary."""
    groups = [[second for node in group for second in node.seconds] for group in (candidate, stable)]
    numbers = [[each.second for each in group] for group in groups]
    if not all(numbers):
        return _Seconds(groups[0], groups[1], max([len({*each}) for each in numbers]))
    first, last = max(map(min, numbers)), max(map(max, numbers))
    found: list[list[CanarySecond]] = [[], []]
    start = first
    for window_s in WINDOWS_S:
        start = max(first, last - window_s + 1)
        found = [[each for each in group if each.second >= start] for group in groups]
        if min(_requests(group) for group in found) >= MIN_LATENCY_REQUESTS:
            break
    return _Seconds(found[0], found[1], last - start + 1)


def _requests(seconds: Iterable[CanarySecond]) -> int:
    return sum([sum(each.counts) - each.counts[DEGRADED] for each in seconds])


DEGRADED: Final = OUTCOMES.index("degraded")
"""Degraded requests are counted by their outcome as well."""


def _totals(nodes: Sequence[CanaryNode], seconds: Sequence[CanarySecond]) -> GroupTotals:
    counts = dict(zip(OUTCOMES, map(sum, zip(*[each.counts for each in seconds], strict=True)), strict=False))
    latency: Counter[int] = Counter()
    for each in seconds:
        latency.update(each.latency)
    return GroupTotals(
        nodes=len(nodes),
        requests=_requests(seconds),
        rejections=counts.get("denied", 0) + counts.get("blocked", 0),
        errors=counts.get("degraded", 0),
        p50_us=quantile(latency, 0.5),
        p99_us=quantile(latency, 0.99),
    )


def _share(
    name: Literal["rejections", "errors"],
    candidate: GroupTotals,
    stable: GroupTotals,
    of_candidate: int,
    of_stable: int,
    max_increase_bp: int,
) -> Measure:
    """Compare two shares of requests."""
    if min(candidate.requests, stable.requests) < MIN_REQUESTS:
        one, other = 100 * of_candidate / (candidate.requests or 1), 100 * of_stable / (stable.requests or 1)
        return Measure(name, one, other, other + max_increase_bp / 100, "too few requests")
    one, other = of_candidate / candidate.requests, of_stable / stable.requests
    deviation = sqrt(one * (1 - one) / candidate.requests + other * (1 - other) / stable.requests)
    is_exceeded = one - other > max_increase_bp / 10_000 and one - other > STANDARD_ERRORS * deviation
    permitted = 100 * other + max_increase_bp / 100
    return Measure(name, 100 * one, 100 * other, permitted, "exceeded" if is_exceeded else "within threshold")


def _latency(candidate: GroupTotals, stable: GroupTotals, max_percent: int, seconds: int) -> Measure:
    one, other = candidate.p99_us, stable.p99_us
    permitted = max((other or 0) * max_percent / 100, (other or 0) + MIN_SLOWDOWN_US)
    has_enough = min(candidate.requests, stable.requests) >= MIN_LATENCY_REQUESTS and seconds >= MIN_LATENCY_SECONDS
    if one is None or other is None or not has_enough:
        return Measure("latency", one, other, permitted, "too few requests")
    return Measure("latency", one, other, permitted, "exceeded" if one > permitted else "within threshold")


def _reason(measure: Measure) -> str:
    one, other, permitted = measure.candidate or 0, measure.stable or 0, measure.permitted
    if measure.name == "latency":
        times = f"{one / 1000:.3g} ms (99th percentile) with the candidate, {other / 1000:.3g} ms on other nodes"
        return f"latency {times}; at most {permitted / 1000:.3g} ms permitted"
    shares = f"{one:.1f} % of requests with the candidate, {other:.1f} % on other nodes"
    return f"{measure.name} {shares}; at most {permitted:.1f} % permitted"
