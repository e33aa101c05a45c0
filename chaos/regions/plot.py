"""The timeline of an experiment: what all regions together admitted, for each mode."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from chaos.plot import STYLE
from chaos.regions.judge import admissions
from chaos.regions.plan import MODES

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.regions.experiment import Result

COLOURS: Final = {"even window": "#0b6e4f", "one region": "#edae49"}
WORDS: Final = {"even window": "requests from all regions", "one region": "requests from one region"}
STEP_US: Final = 250_000


def draw(path: Path, result: Result) -> None:
    """One panel for each mode, above each other, on one time."""
    plan = result.plan
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(len(MODES), 1, figsize=(12, 12), sharex=True, layout="constrained")
        figure.suptitle(
            f"{plan.regions} regions, {plan.quota} per {plan.period_s} s: admitted in the window so far. Grey: a "
            "region is cut off. Dotted: the limit",
            fontsize=12,
            color="#444444",
        )
        for mode, axes in zip(MODES, panels, strict=True):
            _panel(axes, mode, result)
        panels[0].legend(loc="lower left", bbox_to_anchor=(0.2, 1.0), ncols=2)
        panels[-1].set_xlabel("seconds")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _panel(axes: Any, mode: str, result: Result) -> None:
    plan = result.plan
    axes.set_title(mode)
    for name, begin, end in plan.cuts:
        axes.axvspan(begin, end, color="#eeeeee", zorder=0)
        axes.annotate(f"{name} cut off", ((begin + end) / 2, plan.quota * 0.06), ha="center", color="#66788f")
    for place, traffic in enumerate(plan.traffic):
        if traffic.mode != mode or traffic.key not in COLOURS:
            continue
        rows = [row for row in result.rows if row.traffic == place]
        steps = Counter((at_us - result.start_us) // STEP_US for at_us in admissions(plan, traffic, rows))
        per_window = plan.period_s * 1_000_000 // STEP_US
        times: list[float] = []
        totals: list[float] = []
        for window in range(plan.windows):
            total = 0
            for step in range(window * per_window, (window + 1) * per_window):
                total += steps[step]
                times.append((step + 1) * STEP_US / 1e6)
                totals.append(total)
            times.append((window + 1) * plan.period_s)
            totals.append(float("nan"))  # a gap between windows
        axes.plot(times, totals, color=COLOURS[traffic.key], label=WORDS[traffic.key], linewidth=1.8)
    axes.axhline(plan.quota, color="#333333", linestyle=":", linewidth=1.5)
    axes.set_xlim(0, plan.windows * plan.period_s)
    axes.set_ylim(0, None)
