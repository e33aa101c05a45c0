"""One outage as a picture: what was answered, and how fast, from before it until after."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from chaos.judge import quantile
from chaos.load import BUDGET, Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.load import Row
    from chaos.run import Run

BIN_NS: Final = 50_000_000
ANSWERS: Final = {
    "allowed by the store": "#0b6e4f",
    "denied, exactly": "#9fc9b8",
    "allowed without the store": "#edae49",
    "denied without the store": "#d1495b",
    "raised, as was asked for": "#66788f",
}
STYLE: Final[dict[Any, Any]] = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def draw(path: Path, run: Run) -> None:
    """Two panels above each other, on one time."""
    zero_ns = run.struck_ns[1]
    bins: dict[int, list[Row]] = {}
    for row in run.rows:
        bins.setdefault((row.start_ns - zero_ns) // BIN_NS, []).append(row)
    with plt.rc_context(STYLE):
        size = (12, 8)
        figure, (answers, waits) = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
        figure.suptitle(f"{run.fault.name}, under {run.load} load: {run.fault.what}", fontsize=12, color="#444444")
        for axes in (answers, waits):
            axes.axvspan(0, (run.healed_ns[1] - zero_ns) / 1e9, color="#eeeeee", zorder=0)
        _answers(answers, bins)
        _waits(waits, bins)
        _happenings(answers, run, zero_ns)
        waits.set_xlim(min(bins) * BIN_NS / 1e9, (max(bins) + 1) * BIN_NS / 1e9)
        waits.set_xlabel("seconds since the store was lost")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _answers(axes: Any, bins: dict[int, list[Row]]) -> None:
    axes.set_title("Answers in each twentieth of a second", pad=28)
    places = sorted(bins)
    counts = {place: Counter(map(_answer, bins[place])) for place in places}
    floor = [0] * len(places)
    width = BIN_NS / 1e9
    for answer, colour in ANSWERS.items():
        heights = [counts[place][answer] for place in places]
        axes.bar(
            [(place + 0.5) * width for place in places],
            heights,
            width * 0.9,
            floor,
            color=colour,
            label=answer,
            zorder=2,
        )
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(ANSWERS), columnspacing=1.2, handlelength=1)
    axes.set_ylim(0, max(floor) * 1.25)


def _waits(axes: Any, bins: dict[int, list[Row]]) -> None:
    axes.set_title("How long a check took, in microseconds", pad=28)
    places = sorted(bins)
    middles = [(place + 0.5) * BIN_NS / 1e9 for place in places]
    for share, words, colour in ((0.5, "median", "#0b6e4f"), (0.99, "p99", "#edae49"), (1.0, "slowest", "#d1495b")):
        values = [quantile([row.took_ns / 1000 for row in bins[place]], share) for place in places]
        axes.plot(middles, values, color=colour, label=words, linewidth=1.8, zorder=3)
    axes.axhline(BUDGET * 1e6, color="#333333", linestyle=":", linewidth=1.5)
    axes.annotate("the budget", (middles[0], BUDGET * 1e6), xytext=(0, 5), textcoords="offset points")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, columnspacing=1.2, handlelength=1.5)


def _happenings(axes: Any, run: Run, zero_ns: int) -> None:
    """When limiters told of what."""
    told: dict[str, list[float]] = {}
    for happening in run.happenings:
        if happening.at_ns < run.rows[0].start_ns:
            continue
        told.setdefault(happening.kind, []).append((happening.at_ns - zero_ns) / 1e9)
    top = axes.get_ylim()[1]
    for level, (kind, times) in enumerate(sorted(told.items(), key=lambda item: min(item[1]))):
        height = top * (0.97 - 0.07 * level)
        axes.plot(times, [height] * len(times), "|", color="#333333", markersize=9, zorder=4)
        axes.annotate(
            kind, (0.005, height), xycoords=("axes fraction", "data"), va="center", fontsize=10, color="#333333"
        )


def _answer(row: Row) -> str:
    if row.verdict in (Verdict.RAISED, Verdict.BROKE):
        return "raised, as was asked for"
    if row.exact:
        return "allowed by the store" if row.admitted else "denied, exactly"
    return "allowed without the store" if row.admitted else "denied without the store"
