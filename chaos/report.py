"""The findings as a table, for the terminal and for .build/chaos/report.md."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Final

from chaos.judge import quantile
from chaos.load import BUDGET, MODES, STEADY
from chaos.rigs import NODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos.judge import Finding
    from chaos.run import Run

HEADER: Final = (
    "fault", "load", "asked", "answered", "without the store", "wrong", "over: open", "local", "closed",
    "p50", "p99", "p99.9", "max", "p50 once open", "detected", "recovered", "settled", "unsettled", "uncertain",
    "machine",
)  # fmt: skip


def table(results: Sequence[tuple[Run, Finding]]) -> list[str]:
    """The table in Markdown, in columns that line up."""
    rows = [HEADER, *[_cells(run, finding) for run, finding in results]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{'-' if column < 2 else ':'}" for column, width in enumerate(widths)]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]


def verdict(results: Sequence[tuple[Run, Finding]]) -> list[str]:
    """What the run comes to, beside what was aimed at."""
    away = [finding for run, finding in results if run.fault.name in ("refused", "stopped")]
    wrong, asked = (sum(each) for each in zip(*[(f.wrong.total(), f.asked) for _, f in results], strict=True))
    lateness_us = max(quantile(run.lateness_us, 0.999) for run, _ in results)
    unwell = [each for _, finding in results for each in finding.unwell]
    lines = [
        f"- wrong answers: {wrong} of {asked:,}",
        *[
            f"  - {run.fault.name}, {run.load}: {count} x {words}"
            for run, finding in results
            for words, count in finding.wrong.most_common()
        ],
    ]
    if away:
        aim_us = BUDGET * 1e6 + 2000
        waits = [finding.wait.p999 for finding in away if finding.wait]
        opens = [finding.open_p50_us for finding in away if finding.open_p50_us is not None]
        lines += [
            f"- store stopped or refused: p99.9 at most {_time(max(waits))} (aim: {_time(aim_us)})",
            f"- once the breaker is open: p50 at most {_time(max(opens, default=None))} (aim: 50 us)",
        ]
    recovered = [(finding.recovered_ms, run) for run, finding in results if finding.recovered_ms is not None]
    if recovered:
        slowest, run = max(recovered, key=lambda pair: pair[0])
        lines.append(
            f"- recovered: at most {_ms(slowest)} after the store's return, in {run.fault.name}, {run.load} (aim: 1 s)"
        )
    lines += [
        f"- admitted without the store and never charged: {sum(finding.unsettled for _, finding in results)}",
        f"- limiters that had failed within the last half second when the load ended: {len(unwell)}",
        f"- the machine itself added up to {_time(lateness_us)} to any wait",
    ]
    return lines


def document(results: Sequence[tuple[Run, Finding]], *, seconds: float, notes: Sequence[str] = ()) -> str:
    """The whole report."""
    faults = {run.fault.name: run.fault.what for run, _ in results}
    setting = (
        f"{NODES} nodes (one with threads, one with asyncio), each with a limiter in each of the modes "
        f"{', '.join(MODES)}, budget {BUDGET * 1000:g} ms; {STEADY * len(MODES) * NODES:,.0f} checks a second, ten "
        f"times as many in a burst. {platform.system()} {platform.machine()}, Python {platform.python_version()}. "
        f"Took {seconds:.0f} s."
    )
    legend = (
        "Times of a check are those during the fault. `over` is what passed beyond the limits in the whole run: as "
        "much as there is for open, a fifth of each limit for local, nothing for closed unless the store lost its "
        "memory. `machine` is by how much a thread that only sleeps comes too late, p99.9: what the machine adds "
        "to any wait. `docs/chaos.md` says how all of it is measured."
    )
    return "\n".join(
        [
            "# Headgate under faults",
            "",
            setting,
            "",
            *verdict(results),
            *notes,
            "",
            *table(results),
            "",
            legend,
            "",
            *[f"- **{name}**: {what}" for name, what in faults.items()],
            "",
        ]
    )


def _cells(run: Run, finding: Finding) -> tuple[str, ...]:
    wait = finding.wait
    return (
        run.fault.name,
        run.load,
        f"{finding.asked:,}",
        f"{finding.answered:,}",
        f"{finding.degraded:,}",
        str(finding.wrong.total()),
        *[str(finding.over[mode]) for mode in ("open", "local", "closed")],
        *([_time(each) for each in wait] if wait else ["-"] * 4),
        _time(finding.open_p50_us),
        _ms(finding.detected_ms),
        _ms(finding.recovered_ms),
        _ms(finding.settled_ms),
        str(finding.unsettled),
        str(finding.uncertain),
        _time(quantile(run.lateness_us, 0.999)),
    )


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def _ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds == float("inf"):
        return "never"
    return f"{milliseconds:.0f} ms"
