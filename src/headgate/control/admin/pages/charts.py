"""SVG charts without scripts or inline styles, each with a text description. Colours come from the style sheet."""

from __future__ import annotations

from itertools import groupby
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["DECISIONS", "Band", "bars", "decision_bands", "lines", "round_up", "stacked"]

WIDTH: Final = 600
HEIGHT: Final = 150
HEADROOM: Final = 4
"""Space above the highest value, so that its line is not cut off."""
MIN_DECADES: Final = 2
"""The least range of a logarithmic scale, so that small variations stay small."""
STEPS: Final = (1.0, 2.0, 4.0, 5.0, 10.0)
"""Leading digits of the top of a scale, whose halves are round numbers, too."""
HATCH_ANGLES: Final = {"denied": 45, "blocked": -45, "unavailable": 90}
"""Bands drawn with a pattern, for readers who cannot distinguish colours, and its angle."""
DECISIONS: Final = ("allowed", "denied", "blocked", "unavailable")
"""The outcomes of a decision, as CSS classes."""


class Band(NamedTuple):
    """One series of a chart."""

    name: str
    css: str
    """The CSS class."""
    values: Sequence[float | None]
    """One per slot, oldest first; None where unknown."""


class Chart(NamedTuple):
    """A chart with its axis labels."""

    svg: Markup
    ticks: tuple[float, ...]
    """Values at the grid lines, top down and equidistant."""


class Scale(NamedTuple):
    """Maps values to heights."""

    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def y(self, value: float) -> float:
        top, bottom = self.ticks[0], self.ticks[-1]
        share = value / top
        if self.is_logarithmic:
            share = log10(max(value, bottom) / bottom) / log10(top / bottom)
        return HEADROOM + (HEIGHT - HEADROOM) * (1 - share)

    def points(self, values: Sequence[float | None]) -> list[str | None]:
        """Coordinates over the width of the chart; None where the value is unknown."""
        step = WIDTH / max(1, len(values) - 1)
        return [None if each is None else f"{_n(at * step)},{_n(self.y(each))}" for at, each in enumerate(values)]


def stacked(bands: Sequence[Band], *, id: str, title: str, unit: str = "") -> Chart:
    """A stacked area chart, the first band at the bottom."""
    sums = [sum(column) for column in _columns(bands)]
    scale = _linear(sums)
    low, paths = [0.0] * len(sums), []
    for band in bands:
        high = [under + (value or 0) for under, value in zip(low, band.values, strict=True)]
        if any(band.values):
            paths.append(_area(band.css, low, high, scale=scale, id=id))
        low = high
    return _chart(bands, paths, scale, id=id, title=title, unit=unit)


def lines(bands: Sequence[Band], *, id: str, title: str, show: Callable[[float], str] = "{:,.0f}".format) -> Chart:
    """A line chart with gaps where values are unknown. Logarithmic, so that one outlier does not flatten the rest."""
    scale = _logarithmic([value for band in bands for value in band.values if value])
    path = Markup('<path class="line {}" d="{}"/>')
    paths = [path.format(band.css, _path(scale.points(band.values))) for band in bands]
    return _chart(bands, paths, scale, id=id, title=title, show=show)


def bars(bands: Sequence[Band], labels: Sequence[str], *, id: str, title: str, empty: str = "no requests") -> Chart:
    """A stacked bar chart with a tooltip for each slot, which is `empty` where all bands are."""
    columns = _columns(bands)
    scale = _linear([sum(column) for column in columns])
    shapes = [
        _bar(WIDTH / len(columns), at, column, bands, scale=scale, label=label, id=id, empty=empty)
        for at, (column, label) in enumerate(zip(columns, labels, strict=True))
    ]
    return _chart(bands, shapes, scale, id=id, title=title)


def decision_bands(values_of: Callable[[str], Sequence[float | None]]) -> list[Band]:
    """The bands of decisions by outcome; blocked and unavailable only if there are any."""
    bands = [Band(css.capitalize(), css, values_of(css)) for css in DECISIONS]
    return [band for band in bands if band.css in ("allowed", "denied") or any(band.values)]


def round_up(most: float) -> float:
    """The next round number, for the top of a scale.

    >>> [round_up(most) for most in (0, 0.7, 3, 7, 41, 1001)]
    [1.0, 1.0, 4.0, 10.0, 50.0, 2000.0]
    """
    if most <= 1:
        return 1.0
    size = 10.0 ** (len(f"{int(most)}") - 1)
    return next(step * size for step in STEPS if step * size >= most)


def _linear(values: Sequence[float]) -> Scale:
    top = round_up(max(values, default=0))
    return Scale((top, top / 2, 0.0))


def _logarithmic(values: Sequence[float]) -> Scale:
    """A scale of whole decades."""
    bottom = floor(log10(min(values, default=10.0)))
    top = max(ceil(log10(max(values, default=10.0))), bottom + MIN_DECADES)
    return Scale(tuple(10.0**power for power in range(top, bottom - 1, -1)), is_logarithmic=True)


def _chart(
    bands: Sequence[Band],
    shapes: Iterable[Markup],
    scale: Scale,
    *,
    id: str,
    title: str,
    unit: str = "",
    show: Callable[[float], str] = "{:,.0f}".format,
) -> Chart:
    line = Markup('<line class="grid" x1="0" x2="{}" y1="{y}" y2="{y}"/>')
    svg = Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-labelledby="{id}-title" aria-describedby="{id}-desc" focusable="false">'
        '<title id="{id}-title">{title}</title><desc id="{id}-desc">{description}</desc>'
        "<defs>{patterns}</defs>{grid}{shapes}</svg>"
    ).format(
        w=WIDTH,
        h=HEIGHT,
        id=id,
        title=title,
        description=" ".join(_describe(band, unit, show) for band in bands),
        patterns=Markup("").join(_pattern(id, band.css) for band in bands if band.css in HATCH_ANGLES),
        grid=Markup("").join(line.format(WIDTH, y=_n(scale.y(tick))) for tick in scale.ticks),
        shapes=Markup("").join(shapes),
    )
    return Chart(svg, scale.ticks)


def _describe(band: Band, unit: str, show: Callable[[float], str]) -> str:
    known = [value for value in band.values if value is not None]
    if not known:
        return f"{band.name}: no data."
    return f"{band.name}: latest {show(known[-1])}{unit}, maximum {show(max(known))}{unit}."


def _columns(bands: Sequence[Band]) -> list[list[float]]:
    """The values of all bands by slot."""
    return [[value or 0 for value in column] for column in zip(*(band.values for band in bands), strict=True)]


def _area(css: str, low: Sequence[float], high: Sequence[float], *, scale: Scale, id: str) -> Markup:
    forth, back = scale.points(high), scale.points(low)[::-1]
    # No edge where the band is empty: it would cover the one below.
    edge = [point if over > under else None for point, under, over in zip(forth, low, high, strict=True)]
    return Markup('<path class="band {css}"{} d="M{}Z"/><path class="edge {css}" d="{}"/>').format(
        _fill(id, css), "L".join(map(str, [*forth, *back])), _path(edge), css=css
    )


def _path(points: Iterable[str | None]) -> str:
    """Lines through known points. A single point gets a length, as a line of zero length is invisible."""
    runs = [[*map(str, run)] for is_known, run in groupby(points, lambda point: point is not None) if is_known]
    return "".join(f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h1" for run in runs)


def _bar(
    width: float,
    at: int,
    column: Sequence[float],
    bands: Sequence[Band],
    *,
    scale: Scale,
    label: str,
    id: str,
    empty: str,
) -> Markup:
    rect = Markup('<rect class="band {}"{} x="{}" y="{}" width="{}" height="{}"/>')
    left, gap, low, parts, numbers = at * width, width * 0.15, 0.0, Markup(""), []
    for value, band in zip(column, bands, strict=True):
        if value:
            top, bottom = scale.y(low + value), scale.y(low)
            size = (_n(left + gap), _n(top), _n(width - 2 * gap), _n(bottom - top))
            parts += rect.format(band.css, _fill(id, band.css), *size)
            low += value
            numbers.append(f"{value:,.0f} {band.name.lower()}")
    hit = Markup('<rect class="hit" x="{}" y="0" width="{}" height="{}"/>').format(_n(left), _n(width), HEIGHT)
    return Markup("<g><title>{}: {}</title>{}{}</g>").format(label, ", ".join(numbers) or empty, hit, parts)


def _pattern(id: str, css: str) -> Markup:
    """A striped fill, with a different angle for each band."""
    return Markup(
        '<pattern id="{id}-{css}" class="{css}" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate({angle})"><rect class="background" width="5" height="5"/>'
        '<rect class="stripe" width="2.2" height="5"/></pattern>'
    ).format(id=id, css=css, angle=HATCH_ANGLES[css])


def _fill(id: str, css: str) -> Markup:
    """A reference to the pattern, whose id includes that of the chart."""
    return Markup(' fill="url(#{}-{})"').format(id, css) if css in HATCH_ANGLES else Markup("")


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
