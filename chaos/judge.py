"""What was right and what was wrong in a run. This file holds the rules: it is the one to audit.

Exact answers are held to the limits themselves, whatever happened around them; the others to what their mode promises.
Nothing here is approximate but where the word stands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from chaos.load import LEASE, LIMITS, MODES, SHARE, Kind, Verdict
from headgate import bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chaos.load import Mode, Row
    from chaos.run import Run
    from headgate import Limit

AT_ONCE_NS: Final = 500_000
"""A reply within half a millisecond did not wait."""
SLACK: Final = 0.1
"""Seconds that an answer may be under way: far more than it ever is."""
_UNCERTAIN: Final = (
    *("did not answer", "did not come back", "broke", "closed the connection", "took nothing"),
    *("is not a reply", "more replies", "invalid reply"),
)
"""Parts of messages after which it is unknown whether the store has counted the request."""
_UNSENT: Final = "circuit breaker open"
"""Part of the message for requests that were not sent."""


class Wait(NamedTuple):
    """How long checks took, in microseconds."""

    p50: float
    p99: float
    p999: float
    most: float


class Finding(NamedTuple):
    """One line of the report."""

    asked: int
    answered: int
    wrong: Counter[str]
    """How many answers broke which rule."""
    over: dict[Mode, int]
    """Admitted beyond the limits, over the whole run."""
    wait: Wait | None
    """During the fault."""
    open_p50_us: float | None
    """Of answers without the store, once that was known to be away."""
    detected_ms: float | None
    """From the first failure to the first immediate answer, of the slowest limiter."""
    recovered_ms: float | None
    """From the store's return to the first exact answer, of the slowest limiter; infinite where there was none."""
    settled_ms: float | None
    """From the store's return until the last limiter had settled what it had admitted without it."""
    unsettled: int
    """Admitted without the store, certainly not counted by it, and never charged."""
    uncertain: int
    """Requests, and charges of debts, that were lost on their way: the store may have counted them or not."""
    degraded: int
    why: Counter[str]
    """What was said of the store, and how often."""
    unwell: list[str]
    """Limiters that do not call themselves ready in the end."""


def judge(run: Run) -> Finding:
    rows = run.rows
    began_ns, healed_ns = run.struck_ns[0], run.healed_ns[1]
    during = [row for row in rows if began_ns <= row.start_ns < healed_ns]
    wrong = Counter(chain(*[rule(run) for rule in RULES]))
    known_ns = {limiter: quick_ns for limiter, (_, quick_ns) in _at_once(run).items()}
    told_at_once = [
        row.took_ns / 1000
        for row in during
        if not row.exact and known_ns.get((row.node, row.mode), healed_ns) <= row.start_ns < run.healed_ns[0]
    ]
    return Finding(
        asked=len(rows),
        answered=sum(row.verdict != Verdict.BROKE for row in rows),
        wrong=wrong,
        over={mode: _over(run, mode) for mode in MODES},
        wait=_wait([row.took_ns / 1000 for row in during]),
        open_p50_us=quantile(told_at_once, 0.5) if told_at_once else None,
        detected_ms=_detected_ms(run),
        recovered_ms=_recovered_ms(run),
        settled_ms=_settled_ms(run),
        unsettled=sum(_unsettled(run, mode) for mode in MODES),
        uncertain=sum(map(is_uncertain, rows)) + sum(_lost_charges(run, mode) for mode in MODES),
        degraded=sum(not row.exact for row in rows),
        why=Counter(row.why for row in rows if row.why is not None),
        unwell=[f"{mode} on node {node}: {state}" for (node, mode), state in run.states.items() if state != "ready"],
    )


# ------------------------------------------------------------------- the rules


def exceptions_are_only_for_who_asked_for_them(run: Run) -> Iterable[str]:
    for row in run.rows:
        if row.verdict == Verdict.BROKE or (row.verdict == Verdict.RAISED and row.mode != "raise"):
            yield f"an exception reached a caller of {row.mode}: {row.why}"


def without_the_store_each_mode_answers_as_it_says(run: Run) -> Iterable[str]:
    for row in run.rows:
        if row.exact:
            continue
        if row.mode == "open" and row.verdict == Verdict.DENIED:
            yield "open denied without the store"
        elif row.mode in ("closed", "raise") and row.admitted:
            yield f"{row.mode} allowed without the store"


def local_allows_no_more_than_its_share(run: Run) -> Iterable[str]:
    """A fifth of each limit for the whole fleet, but at least one for each node."""
    alone = [row for row in run.rows if row.mode == "local" and row.admitted and not row.exact]
    nodes = len({row.node for row in run.rows})
    turns = Counter(row.number for row in alone if row.kind == Kind.TURN)
    most = bounds.local_failure(LIMITS[Kind.TURN], SHARE, nodes, outage_us=0)
    yield from ["local allowed more than its share of a turn"] * sum(max(0, count - most) for count in turns.values())
    flow = LIMITS[Kind.FLOW]
    spent = [(row.start_ns, row.end_ns) for row in alone if row.kind == Kind.FLOW]
    beyond = _beyond(spent, capacity=float(flow.capacity * SHARE) + nodes, rate=_rate(flow) * float(SHARE))
    yield from ["local allowed more than its share of a flow"] * beyond


def a_wide_key_is_never_denied(run: Run) -> Iterable[str]:
    for row in run.rows:
        if row.kind == Kind.WIDE and row.exact and not row.admitted:
            yield "an exact answer denied where nothing was exhausted"


def a_turn_is_passed_exactly_ten_times(run: Run) -> Iterable[str]:
    """By the whole fleet; and no more than that by exact answers if others were among them."""
    capacity = LIMITS[Kind.TURN].capacity
    for turn in _turns(run).values():
        if _may_be_lost(run, turn):
            continue
        passed = sum(row.admitted for row in turn if row.exact)
        if passed > capacity:
            yield from ["exact answers allowed more than the limit"] * (passed - capacity)
        if all(row.exact for row in turn) and passed < min(len(turn), capacity):
            yield from ["exact answers allowed less than the limit"] * (min(len(turn), capacity) - passed)


def a_flow_passes_no_more_than_comes(run: Run) -> Iterable[str]:
    """The burst, and what has come since; what nodes prepay may be spent a lease later."""
    # Once a server has forgotten what was spent, or believes that half a minute has passed, it starts full again.
    refills = len(run.lost) + 2 * run.fault.clock_steps
    flow = LIMITS[Kind.FLOW]
    capacity = flow.capacity * (1 + refills) + _rate(flow) * LEASE
    for mode in MODES:
        passed = [row for row in run.rows if row.mode == mode and row.kind == Kind.FLOW and row.exact and row.admitted]
        beyond = _beyond([(row.start_ns, row.end_ns) for row in passed], capacity=capacity, rate=_rate(flow))
        yield from ["exact answers allowed more than has come"] * beyond


def no_answer_is_exact_without_a_store(run: Run) -> Iterable[str]:
    """But what had been prepaid before it was lost."""
    since_ns, until_ns = run.struck_ns[1] + int((LEASE + SLACK) * 1e9), run.healed_ns[0]
    for row in run.rows:
        if (
            row.node in run.fault.cut_off
            and row.kind == Kind.WIDE
            and row.exact
            and since_ns < row.start_ns < row.end_ns < until_ns
        ):
            yield "an answer called itself exact while the store could not be reached"


RULES: Final = (
    exceptions_are_only_for_who_asked_for_them,
    without_the_store_each_mode_answers_as_it_says,
    local_allows_no_more_than_its_share,
    a_wide_key_is_never_denied,
    a_turn_is_passed_exactly_ten_times,
    a_flow_passes_no_more_than_comes,
    no_answer_is_exact_without_a_store,
)


def owed(rows: Iterable[Row], lost: Sequence[tuple[int, int]], mode: Mode) -> int:
    """The least that the store must count on the wide keys of a mode in the end.

    All that exact answers admitted since it last lost anything, and all that was admitted without it and cannot have
    reached it; what is uncertain is not asked for.
    """
    from_ns = max((start_ns for start_ns, _ in lost), default=0)
    to_ns = max((end_ns for _, end_ns in lost), default=0)
    return sum(
        row.start_ns > (to_ns if row.exact else from_ns) and not is_uncertain(row)
        for row in rows
        if row.mode == mode and row.kind == Kind.WIDE and row.admitted
    )


def is_uncertain(row: Row) -> bool:
    return row.why is not None and _UNSENT not in row.why and any(words in row.why for words in _UNCERTAIN)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


# ---------------------------------------------------------- counts and moments


def _turns(run: Run) -> dict[tuple[Mode, int], list[Row]]:
    turns: dict[tuple[Mode, int], list[Row]] = defaultdict(list)
    for row in run.rows:
        if row.kind == Kind.TURN:
            turns[row.mode, row.number].append(row)
    return turns


def _may_be_lost(run: Run, turn: list[Row]) -> bool:
    """Whether what was counted in this turn may have been forgotten before it was over."""
    start_ns, end_ns = min(row.start_ns for row in turn), max(row.end_ns for row in turn)
    return any(from_ns < end_ns and to_ns > start_ns for from_ns, to_ns in run.lost)


def _over(run: Run, mode: Mode) -> int:
    capacity = LIMITS[Kind.TURN].capacity
    turns = [turn for (whose, _), turn in _turns(run).items() if whose == mode]
    beyond = sum(max(0, sum(row.admitted for row in turn) - capacity) for turn in turns)
    return beyond + _overflow([row for row in run.rows if row.mode == mode and row.kind == Kind.FLOW and row.admitted])


def _overflow(passed: list[Row]) -> int:
    """How many of these would not have passed an exact limit; approximate by the time that answers take."""
    flow = LIMITS[Kind.FLOW]
    capacity = level = flow.capacity + _rate(flow) * LEASE
    last_ns, beyond = 0, 0
    for at_ns in sorted(row.end_ns for row in passed):
        level = min(capacity, level + (at_ns - last_ns) / 1e9 * _rate(flow))
        last_ns = at_ns
        if level >= 1:
            level -= 1
        else:
            beyond += 1
    return beyond


def _beyond(passed: list[tuple[int, int]], *, capacity: float, rate: float) -> int:
    """By how many the worst interval has more than `capacity` and what came in it.

    A request was decided at some time between its start and its end: only those that certainly were decided within an
    interval count for it, however late an answer was seen.
    """
    worst = 0.0
    by_end = sorted(passed, key=lambda each: each[1])
    for from_ns, _ in passed:
        inside = [end_ns for start_ns, end_ns in by_end if start_ns >= from_ns]
        for count, end_ns in enumerate(inside, start=1):
            worst = max(worst, count - capacity - (end_ns - from_ns) / 1e9 * rate)
    return ceil(worst)


def _rate(limit: Limit) -> float:
    return limit.quota / limit.period.total_seconds()


def _unsettled(run: Run, mode: Mode) -> int:
    return max(0, owed(run.rows, run.lost, mode) - run.counted[mode] - _lost_charges(run, mode))


def _lost_charges(run: Run, mode: Mode) -> int:
    """Charges for admitted requests that were sent and not answered. Events report them together with requests that met
    the same fate, which are among the rows."""
    reported = sum(happening.uncertain for happening in run.happenings if happening.mode == mode)
    return max(0, reported - sum(row.mode == mode and is_uncertain(row) for row in run.rows))


def _wait(waits_us: list[float]) -> Wait | None:
    return Wait(*[quantile(waits_us, share) for share in (0.5, 0.99, 0.999, 1.0)]) if waits_us else None


def _failures(run: Run) -> dict[tuple[int, Mode], list[Row]]:
    """The checks of each limiter that the store did not answer while the fault lasted."""
    failures: dict[tuple[int, Mode], list[Row]] = defaultdict(list)
    for row in run.rows:
        if not row.exact and run.struck_ns[0] <= row.start_ns < run.healed_ns[1]:
            failures[row.node, row.mode].append(row)
    return failures


def _at_once(run: Run) -> dict[tuple[int, Mode], tuple[int, int]]:
    """For each limiter that failed: when first, and when it first answered at once without the store."""
    moments = {}
    for limiter, failures in _failures(run).items():
        quick = next((row for row in failures if row.took_ns < AT_ONCE_NS), None)
        if quick is not None:
            moments[limiter] = (failures[0].start_ns, quick.start_ns)
    return moments


def _detected_ms(run: Run) -> float | None:
    return max(((quick_ns - first_ns) / 1e6 for first_ns, quick_ns in _at_once(run).values()), default=None)


def _recovered_ms(run: Run) -> float | None:
    """Of limiters whose wide keys were hit: a key that was not tells nothing, nor does what is known without asking."""
    hit = {
        limiter: {row.number for row in failures if row.kind == Kind.WIDE}
        for limiter, failures in _failures(run).items()
    }
    first_ns: dict[tuple[int, Mode], int] = {}
    for row in run.rows[bisect_left(run.rows, run.healed_ns[0], key=lambda row: row.start_ns) :]:
        limiter = (row.node, row.mode)
        if row.exact and row.kind == Kind.WIDE and row.number in hit.get(limiter, ()):
            first_ns.setdefault(limiter, row.end_ns)
    waits = [
        max(0.0, (first_ns[limiter] - run.healed_ns[1]) / 1e6) if limiter in first_ns else float("inf")
        for limiter, numbers in hit.items()
        if numbers
    ]
    return max(waits, default=None)


def _settled_ms(run: Run) -> float | None:
    at_ns = [happening.at_ns for happening in run.happenings if happening.kind == "settled"]
    return max(0.0, (max(at_ns) - run.healed_ns[1]) / 1e6) if at_ns else None
