"""SVG charts without scripts or inline styles, each with a text description. Colours come from the style sheet."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["DECISIONS", "Band", "bars", "decision_bands", "lines", "round_up", "stacked"]

WIDTH: Final = 600
HEIGHT: Final = 150
HEADROOM: Final = 4
"""Space above the highest value, so that its line is not cut off."""
MIN_DECADES: Final = 2
"""The least range of a logarithmic scale, so that small variations stay small."""
STEPS: Final = (1.0, 2.0, 4.0, 5.0, 10.0)
"""Leading digits of the top of a scale, whose halves are round numbers, too."""
HATCHED: Final = ("denied", "blocked", "unavailable")
"""Bands drawn with a pattern, for those who cannot tell colours apart."""
DECISIONS: Final = (
    ("Allowed", "allowed"),
    ("Denied", "denied"),
    ("Blocked", "blocked"),
    ("Unavailable", "unavailable"),
)
"""Titles and CSS classes of the outcomes of a decision."""


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
    description: str


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


def stacked(
    bands: Sequence[Band], *, id: str, title: str, unit: str = "", show: Callable[[float], str] = lambda n: f"{n:,.0f}"
) -> Chart:
    """A stacked area chart, the first band at the bottom."""
    sums = [sum(column) for column in _columns(bands)]
    scale = _linear(max(sums, default=0))
    low = [0.0] * len(sums)
    paths = []
    for band in bands:
        high = [under + (value or 0) for under, value in zip(low, band.values, strict=True)]
        if any(band.values):
            paths.append(_area(band.css, low, high, scale=scale, id=id))
        low = high
    return _chart(bands, paths, id=id, title=title, scale=scale, unit=unit, show=show)


def lines(
    bands: Sequence[Band], *, id: str, title: str, unit: str = "", show: Callable[[float], str] = lambda n: f"{n:,.0f}"
) -> Chart:
    """A line chart with gaps where values are unknown. Logarithmic, so that one outlier does not flatten the rest."""
    scale = _logarithmic([value for band in bands for value in band.values if value])
    paths = [_line(band, scale) for band in bands]
    return _chart(bands, paths, id=id, title=title, scale=scale, unit=unit, show=show)


def bars(bands: Sequence[Band], labels: Sequence[str], *, id: str, title: str, unit: str = "") -> Chart:
    """A stacked bar chart with a tooltip for each slot."""
    columns = _columns(bands)
    scale = _linear(max((sum(column) for column in columns), default=0))
    width = WIDTH / max(1, len(columns))
    shapes = [
        _bar(at * width, width, column, bands, scale=scale, label=label, id=id)
        for at, (column, label) in enumerate(zip(columns, labels, strict=True))
    ]
    return _chart(bands, shapes, id=id, title=title, scale=scale, unit=unit, show=lambda n: f"{n:,.0f}")


def decision_bands(values_of: Callable[[str], Sequence[float | None]]) -> list[Band]:
    """The bands of decisions by outcome; blocked and unavailable only if there are any."""
    bands = [Band(name, css, values_of(css)) for name, css in DECISIONS]
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


# ---------------------------------------------------------------------- internals


def _linear(most: float) -> Scale:
    top = round_up(most)
    return Scale((top, top / 2, 0.0))


def _logarithmic(values: Sequence[float]) -> Scale:
    """A scale of whole decades."""
    least, most = (min(values), max(values)) if values else (10.0, 10.0)
    bottom = floor(log10(least))
    top = max(ceil(log10(most)), bottom + MIN_DECADES)
    return Scale(tuple(10.0**power for power in range(top, bottom - 1, -1)), is_logarithmic=True)


def _chart(
    bands: Sequence[Band],
    shapes: Iterable[Markup],
    *,
    id: str,
    title: str,
    scale: Scale,
    unit: str,
    show: Callable[[float], str],
) -> Chart:
    description = " ".join(_describe(band, unit, show) for band in bands)
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(WIDTH, _n(y), _n(y))
        for y in map(scale.y, scale.ticks)
    )
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
        description=description,
        patterns=Markup("").join(_pattern(id, band.css) for band in bands if band.css in HATCHED),
        grid=grid,
        shapes=Markup("").join(shapes),
    )
    return Chart(svg, scale.ticks, description)


def _describe(band: Band, unit: str, show: Callable[[float], str]) -> str:
    known = [value for value in band.values if value is not None]
    if not known:
        return f"{band.name}: no data."
    return f"{band.name}: latest {show(known[-1])}{unit}, maximum {show(max(known))}{unit}."


def _columns(bands: Sequence[Band]) -> list[list[float]]:
    """The values of all bands by slot."""
    return [[value or 0 for value in column] for column in zip(*(band.values for band in bands), strict=True)]


def _area(css: str, low: Sequence[float], high: Sequence[float], *, scale: Scale, id: str) -> Markup:
    forth = [f"{_n(_x(at, len(high)))},{_n(scale.y(value))}" for at, value in enumerate(high)]
    back = [f"{_n(_x(at, len(low)))},{_n(scale.y(low[at]))}" for at in reversed(range(len(low)))]
    edge = Markup('<path class="edge {}" d="{}"/>').format(css, _path(_known_runs(_visible(forth, low, high))))
    return Markup('<path class="band {}"{} d="M{}Z"/>').format(css, _fill(id, css), "L".join([*forth, *back])) + edge


def _visible(points: Sequence[str], low: Sequence[float], high: Sequence[float]) -> list[str | None]:
    """The points of a band's edge; None where the band is empty and would cover the one below."""
    return [point if over > under else None for point, under, over in zip(points, low, high, strict=True)]


def _line(band: Band, scale: Scale) -> Markup:
    points = [
        None if value is None else f"{_n(_x(at, len(band.values)))},{_n(scale.y(value))}"
        for at, value in enumerate(band.values)
    ]
    return Markup('<path class="line {}" d="{}"/>').format(band.css, _path(_known_runs(points)))


def _path(runs: Iterable[list[str]]) -> str:
    # A single point would be a line of zero length, which is invisible.
    return "".join(f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h1" for run in runs)


def _known_runs(points: Sequence[str | None]) -> Iterator[list[str]]:
    run: list[str] = []
    for point in points:
        if point is not None:
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _bar(
    left: float, width: float, column: Sequence[float], bands: Sequence[Band], *, scale: Scale, label: str, id: str
) -> Markup:
    numbers = ", ".join(f"{value:,.0f} {band.name.lower()}" for value, band in zip(column, bands, strict=True) if value)
    parts, low = Markup(""), 0.0
    gap = width * 0.15
    for value, band in zip(column, bands, strict=True):
        if value:
            high = low + value
            parts += Markup('<rect class="band {}"{} x="{}" y="{}" width="{}" height="{}"/>').format(
                band.css,
                _fill(id, band.css),
                _n(left + gap),
                _n(scale.y(high)),
                _n(width - 2 * gap),
                _n(scale.y(low) - scale.y(high)),
            )
            low = high
    hit = Markup('<rect class="hit" x="{}" y="0" width="{}" height="{}"/>').format(_n(left), _n(width), HEIGHT)
    return Markup("<g><title>{}: {}</title>{}{}</g>").format(label, numbers or "no requests", hit, parts)


def _pattern(id: str, css: str) -> Markup:
    """A striped fill, with a different angle for each band."""
    angle = {"denied": 45, "blocked": -45, "unavailable": 90}[css]
    return Markup(
        '<pattern id="{id}-{css}" class="{css}" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate({angle})"><rect class="background" width="5" height="5"/>'
        '<rect class="stripe" width="2.2" height="5"/></pattern>'
    ).format(id=id, css=css, angle=angle)


def _fill(id: str, css: str) -> Markup:
    """A reference to the pattern, whose id includes that of the chart."""
    return Markup(' fill="url(#{}-{})"').format(id, css) if css in HATCHED else Markup("")


def _x(at: int, slots: int) -> float:
    return WIDTH * at / max(1, slots - 1)


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
