"""The outcomes of experiments as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chaos.regions.experiment import Result
    from chaos.regions.judge import Outcome

HEADER = (
    *("regions", "mode", "traffic", "requests", "admitted per window", "most", "connected", "bound", "over"),
    *("usable", "p50", "p99", "as long as a round trip", "wrong"),
)


def table(results: Iterable[Result]) -> list[str]:
    """The table in Markdown."""
    rows = [HEADER, *[_cells(result, outcome) for result in results for outcome in result.outcomes]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return [lines[0], f"| {' | '.join('-' * width for width in widths)} |", *lines[1:]]


def verdict(results: Iterable[Result]) -> list[str]:
    """One line for each violation, or one that says that there are none."""
    lines = []
    for plan, rows, _, outcomes in results:
        wrong = [(outcome.traffic, text) for outcome in outcomes for text in outcome.wrong]
        lines.append(f"- {plan.regions} regions: {len(wrong)} rules broken in {len(rows):,} requests")
        lines += [f"  - {traffic.mode}, {traffic.key}: {text}" for traffic, text in wrong]
    return lines


def document(results: list[Result]) -> str:
    plans = [
        f"- {plan.regions} regions with {plan.processes} processes each; {plan.quota} per {plan.period_s} s, "
        f"{plan.overload:g} times as many requests; cut off: "
        + ", ".join(f"{name} from {begin:g} s to {end:g} s" for name, begin, end in plan.cuts)
        for plan, *_ in results
    ]
    return "\n".join(
        ["# Limits over several regions under faults", "", *plans, "", *verdict(results), "", *table(results), ""]
    )


def _cells(result: Result, outcome: Outcome) -> tuple[str, ...]:
    traffic = outcome.traffic
    is_single = traffic.region is not None
    return (
        str(result.plan.regions),
        traffic.mode,
        traffic.key,
        f"{outcome.requests:,}",
        " ".join(map(str, outcome.windows)),
        f"{outcome.most:.3f}x",
        f"{outcome.connected:.3f}x",
        str(outcome.bound),
        str(outcome.over),
        f"{outcome.usable:.1%}" if is_single else "",
        _time(outcome.p50_us),
        _time(outcome.p99_us),
        f"{outcome.waiting:.1%}",
        str(len(outcome.wrong)),
    )


def _time(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f} ms"
