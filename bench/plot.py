"""The run in one picture."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from bench.apps import BARE_APP
from bench.contenders import HEADGATE, HEADGATE_ONE_LIMIT
from bench.scenarios import (
    ASYNC_CALLERS,
    CPU_CALLERS,
    HOT_KEY,
    MANY_KEYS,
    STORES,
    SYNC_CALLERS,
    THREE_LIMITS,
    Results,
    cpu,
    http,
    tasks,
    threads,
)
from bench.targets import added_us, kept, p99_us, rate, time_us
from bench.timing import Sample, Spread

COLOURS = {
    HEADGATE: "#0b6e4f",
    HEADGATE_ONE_LIMIT: "#7fb8a3",
    "limits": "#d1495b",
    "throttled-py": "#edae49",
    "throttled-py, GCRA": "#f6d8a4",
    "pyrate-limiter": "#66788f",
    "fastapi-limiter 0.1": "#5b5ea6",
    "fastapi-limiter 0.2": "#a9abd3",
    "slowapi": "#8c5e3c",
    "slowapi's middleware": "#c3a68f",
    "throttled-py, no headers": "#f6d8a4",
    "flask-limiter": "#d1495b",
}
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
}
OFF_THE_SCALE = 2.5  # a bar that is so many times as long as the next is cut, or the others could not be read


def draw(path: Path, results: Results, caption: str) -> bool:
    """Whether there was anything to draw."""
    panels = _panels(results)
    if not panels:
        return False
    with plt.rc_context(STYLE):
        rows, columns = (len(panels) + 1) // 2, min(2, len(panels))
        size = (8 * columns, 5.2 * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        layout: Any = figure.get_layout_engine()
        layout.set(h_pad=0.15, w_pad=0.15)
        figure.suptitle(f"headgate beside its peers\n{caption}", fontsize=12, color="#444444")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for (title, panel), axes in zip(panels.items(), grid.flat, strict=False):
            axes.set_title(title, pad=12)
            panel(axes)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return True


def _panels(results: Results) -> dict[str, Callable[[Any], None]]:
    """What the run can show, by title."""
    seen = results.samples
    panels: dict[str, Callable[[Any], None]] = {}
    if tasks(1) in seen:
        panels["Redis, asyncio: thousand checks a second"] = lambda axes: _rates(axes, results)
        panels["Redis, asyncio: p99 in ms, less is better"] = lambda axes: _late(axes, results)
    if HOT_KEY in seen:
        shown = {"one hot key": seen[HOT_KEY], "many keys": seen[MANY_KEYS]}
        panels["Memory: one check in us, less is better"] = lambda axes: _bars(axes, _spreads(shown, time_us))
    if threads(1) in seen:
        crowds = {f"{n} thread{'s' * (n > 1)}": seen[threads(n)] for n in SYNC_CALLERS}
        panels["Redis, threads: thousand checks a second"] = lambda axes: _bars(axes, _spreads(crowds, _thousands))
    if THREE_LIMITS in seen:
        panels["Three limits on one request: thousand requests a second"] = lambda axes: _bars(
            axes, _spreads({"": seen[THREE_LIMITS]}, _thousands)
        )
    if results.bytes_per_key:
        panels["Memory: bytes to remember a key, less is better"] = lambda axes: _bars(
            axes, {"": {name: Spread.of([growth]) for name, growth in results.bytes_per_key.items()}}
        )
    for framework in ("FastAPI", "Flask"):
        loads = {store: seen[http(framework, store)] for store in STORES if http(framework, store) in seen}
        if loads:
            panels[f"{framework}: per cent of its requests/s kept"] = partial(
                _bars, groups=_against_the_app(loads, kept, times=100)
            )
    direct = {store: seen[cpu(store, CPU_CALLERS[-1])] for store in STORES if cpu(store, CPU_CALLERS[-1]) in seen}
    if direct:
        panels["FastAPI: CPU added to a request in us, less is better"] = partial(
            _bars, groups=_against_the_app(direct, added_us)
        )
    return panels


def _against_the_app(
    loads: Mapping[str, Mapping[str, list[Sample]]],
    reading: Callable[[list[Sample], list[Sample]], Spread],
    times: float = 1,
) -> dict[str, dict[str, Spread]]:
    """What everybody makes of the app alone, which itself is not drawn."""
    groups: dict[str, dict[str, Spread]] = {}
    for store, seen in loads.items():
        spreads = {name: reading(samples, seen[BARE_APP]) for name, samples in seen.items() if name != BARE_APP}
        groups[store] = {name: Spread(s.middle * times, s.least * times, s.most * times) for name, s in spreads.items()}
    return groups


def _rates(axes: Any, results: Results) -> None:
    _lines(axes, results, _thousands)
    if results.ceiling:
        limit = Spread.of(results.ceiling[max(results.ceiling)]).middle / 1000
        axes.axhline(limit, color="#333333", linestyle=":", linewidth=1.5)
        above = {"xytext": (0, 5), "textcoords": "offset points"}
        axes.annotate(f"the server's own limit, {limit:.0f}k", (1, limit), **above)


def _late(axes: Any, results: Results) -> None:
    _lines(axes, results, _p99_ms)
    axes.legend(loc="upper left")  # of both panels: here is room for it


def _lines(axes: Any, results: Results, reading: Callable[[Sample], float]) -> None:
    crowds = [n for n in ASYNC_CALLERS if tasks(n) in results.samples]
    for name, colour in COLOURS.items():
        if name not in results.samples[tasks(1)]:
            continue
        spreads = [Spread.of(map(reading, results.samples[tasks(n)][name])) for n in crowds]
        middle, least, most = zip(*[(s.middle, s.least, s.most) for s in spreads], strict=True)
        width = 3.2 if name == HEADGATE else 1.8
        axes.plot(crowds, middle, marker="o", label=name, color=colour, linewidth=width)
        if name == HEADGATE:
            axes.fill_between(crowds, least, most, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(crowds, [f"{n:,}" for n in crowds])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("concurrent tasks, log scales")
    axes.grid(axis="y", which="both", alpha=0.2)


def _bars(axes: Any, groups: Mapping[str, Mapping[str, Spread]]) -> None:
    """Groups of lying bars, one per contender, each with a whisker from the least to the most."""
    ends = sorted(spread.most for group in groups.values() for spread in group.values())
    edge = 1.15 * (ends[-1] if len(ends) < 2 or ends[-1] < OFF_THE_SCALE * ends[-2] else ends[-2])
    labels: dict[float, str] = {}
    place = 0.0
    for title, group in groups.items():
        if title:
            axes.text(0, place, title, va="center", fontweight="bold", color="#444444")
            place += 1
        for name in (known for known in COLOURS if known in group):
            spread = group[name]
            whisker = [[spread.middle - spread.least], [spread.most - spread.middle]]
            cut = spread.most > edge
            axes.barh(place, min(spread.middle, edge), color=COLOURS[name], xerr=None if cut else whisker)
            words = f"{spread.middle:,.0f}" if spread.middle >= 100 else f"{spread.middle:.1f}"
            axes.annotate(
                f"{words} →" if cut else words, (min(spread.most, edge), place), va="center",
                xytext=(-6 if cut else 6, 0), textcoords="offset points",
                ha="right" if cut else "left", color="white" if cut else "black",
            )  # fmt: skip
            labels[place] = name
            place += 1
        place += 0.5
    axes.set_yticks(list(labels), list(labels.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, edge)
    axes.set_ylim(place - 0.5, -0.8)
    axes.spines["left"].set_visible(False)


def _spreads(
    scenarios: Mapping[str, Mapping[str, list[Sample]]], reading: Callable[[Sample], float]
) -> dict[str, dict[str, Spread]]:
    return {
        title: {name: Spread.of(map(reading, samples)) for name, samples in seen.items()}
        for title, seen in scenarios.items()
    }


def _thousands(sample: Sample) -> float:
    return rate(sample) / 1000


def _p99_ms(sample: Sample) -> float:
    return p99_us(sample) / 1000
