"""The page of a simulation: self-contained HTML with plots as inline SVG, without scripts and requests."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headgate.simulation.simulator import SimulationResult

__all__ = ["simulation_page"]

_WIDTH: Final = 640
_HEIGHT: Final = 180
_LEFT: Final = 64
_BOTTOM: Final = 22
_COLORS: Final = ("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d")

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.bad { color: #dc2626; font-weight: 600; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; }
"""


def simulation_page(result: SimulationResult) -> str:
    """The result as an HTML document."""
    seconds = result.seconds
    plots = [
        _plot(
            "Requests per second",
            [
                ("admitted", [each.admitted for each in seconds]),
                ("denied", [each.denied for each in seconds]),
                ("without the store", [each.degraded for each in seconds]),
            ],
        ),
        _plot("Store calls per second", [("store calls", [each.store_calls for each in seconds])]),
        _plot(
            "CPU of the shards, in cores",
            [
                (f"shard {shard.name}", [each.shard_cpu[index] for each in seconds])
                for index, shard in enumerate(result.shards[:8])
            ],
        ),
        _plot(
            "Time of a check, in ms",
            [("p50", [each.p50_ms for each in seconds]), ("p99", [each.p99_ms for each in seconds])],
        ),
    ]
    scale = f", at one part in {result.scale}" if result.scale > 1 else ""
    summary = [
        ("requests", f"{result.requests:,}{scale}"),
        ("admitted", f"{result.admitted:,}"),
        ("decided without the store", f"{result.degraded:,}"),
        ("store calls per request", f"{result.store_calls_per_request:.3f}"),
        ("p50, p99 of a check", f"{result.p50_ms:g} ms, {result.p99_ms:g} ms"),
    ]
    if result.cost is not None:
        summary.append(("cost per month", f"{result.cost['total']:,.0f} {result.cost['currency']}"))
    limits = [
        [
            each.limit,
            each.allows,
            f"{each.admitted:,}",
            f"{each.largest_overshoot:,}",
            "not bounded" if each.bound is None else f"{each.bound:,}",
            "yes" if each.bound_holds else "NO",
        ]
        for each in result.limits
    ]
    shards = [
        [
            each.name,
            f"{each.calls_per_s:,.0f}",
            f"{each.peak_calls_per_s:,}",
            f"{each.cpu:.0%}",
            f"{each.peak_cpu:.0%}",
        ]
        for each in result.shards
    ]
    title = escape(result.name)
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
            f"<p>{result.nodes:,} nodes, {result.duration_s:g} s of virtual time, seed {result.seed}.</p>",
            _table((), summary),
            "<h2>Limits</h2>",
            _table(("limit", "allows", "admitted", "largest overshoot", "bound", "holds"), limits),
            *plots,
            "<h2>Shards</h2>",
            _table(("shard", "calls/s", "peak calls/s", "CPU", "peak CPU"), shards),
            "</body></html>\n",
        ]
    )


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=bad' * (cell == 'NO')}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" * bool(head)}{body}</table></div>'


def _plot(title: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """A line plot over the seconds of the simulation."""
    most = max([value for _, values in series for value in values], default=0) or 1
    count = max(len(series[0][1]) - 1, 1)
    parts = []
    for step in range(5):
        y = _HEIGHT - step * _HEIGHT / 4 + 8
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{_short(most * step / 4)}</text>')
    for index, (name, values) in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        points = " ".join(
            f"{_LEFT + second * (_WIDTH - _LEFT) / count:.1f},{_HEIGHT + 8 - value / most * _HEIGHT:.1f}"
            for second, value in enumerate(values)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2">'
            f"<title>{escape(name)}</title></polyline>"
        )
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + _BOTTOM}">0 s</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT + _BOTTOM}" text-anchor="end">{count} s</text>')
    legend = " ".join(
        f'<span style="color:{_COLORS[index % len(_COLORS)]}">&#9632;</span> {escape(name)}'
        for index, (name, _) in enumerate(series)
    )
    view = f'viewBox="0 0 {_WIDTH + 4} {_HEIGHT + _BOTTOM + 6}"'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg {view} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg><div>{legend}</div></figure>'
    )


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
