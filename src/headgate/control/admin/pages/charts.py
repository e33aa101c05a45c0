"""Charts as SVG: series in, markup out. Nothing in them needs a script or an inline style, and each says in words what
it shows. Colours and line widths are the style sheet's."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Band", "bars", "lines", "nice_top", "stacked"]

WIDTH: Final = 600
HEIGHT: Final = 150
HEADROOM: Final = 4
"""Left free above the highest value, so that its line is not cut."""
LEAST_DECADES: Final = 2
"""What a logarithmic scale shows at least, so that it does not make much of little."""
STEPS: Final = (1.0, 2.0, 4.0, 5.0, 10.0)
"""What the top of a scale may begin with: its half is a round number, too."""
HATCHED: Final = ("denied", "blocked", "unavailable")
"""Bands that differ from the rest by their pattern also where colours are not seen."""


class Band(NamedTuple):
    """One thing that a chart shows."""

    name: str
    """In words, for people."""
    css: str
    """The class by which the style sheet colours it."""
    values: Sequence[float | None]
    """One for each slot, the oldest first; None where nothing is known."""


class Chart(NamedTuple):
    """A chart and what a page writes around it."""

    svg: Markup
    ticks: tuple[float, ...]
    """The values at the lines of its grid, from the top down, at equal distances: the page writes them beside it."""
    description: str


class Scale(NamedTuple):
    """How high a value is drawn."""

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
    """Areas upon each other, the first one at the bottom: for what sums up to a whole."""
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
    """A line for each band, broken where nothing is known. The scale is logarithmic: one value that is a hundred times
    the others leaves them their shape."""
    scale = _logarithmic([value for band in bands for value in band.values if value])
    paths = [_line(band, scale) for band in bands]
    return _chart(bands, paths, id=id, title=title, scale=scale, unit=unit, show=show)


def bars(bands: Sequence[Band], labels: Sequence[str], *, id: str, title: str, unit: str = "") -> Chart:
    """A column for each slot, its parts upon each other; pointing at one shows its label and numbers."""
    columns = _columns(bands)
    scale = _linear(max((sum(column) for column in columns), default=0))
    width = WIDTH / max(1, len(columns))
    shapes = [
        _bar(at * width, width, column, bands, scale=scale, label=label, id=id)
        for at, (column, label) in enumerate(zip(columns, labels, strict=True))
    ]
    return _chart(bands, shapes, id=id, title=title, scale=scale, unit=unit, show=lambda n: f"{n:,.0f}")


def nice_top(most: float) -> float:
    """A round number that is at least that: where a scale ends.

    >>> [nice_top(most) for most in (0, 0.7, 3, 7, 41, 1001)]
    [1.0, 1.0, 4.0, 10.0, 50.0, 2000.0]
    """
    if most <= 1:
        return 1.0
    size = 10.0 ** (len(f"{int(most)}") - 1)
    return next(step * size for step in STEPS if step * size >= most)


# ---------------------------------------------------------------------- within


def _linear(most: float) -> Scale:
    top = nice_top(most)
    return Scale((top, top / 2, 0.0))


def _logarithmic(values: Sequence[float]) -> Scale:
    """In whole decades, those of all values and at least so many."""
    least, most = (min(values), max(values)) if values else (10.0, 10.0)
    bottom = floor(log10(least))
    top = max(ceil(log10(most)), bottom + LEAST_DECADES)
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
    described = " ".join(_described(band, unit, show) for band in bands)
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(WIDTH, _n(y), _n(y))
        for y in map(scale.y, scale.ticks)
    )
    svg = Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-labelledby="{id}-title" aria-describedby="{id}-desc" focusable="false">'
        '<title id="{id}-title">{title}</title><desc id="{id}-desc">{described}</desc>'
        "<defs>{patterns}</defs>{grid}{shapes}</svg>"
    ).format(
        w=WIDTH,
        h=HEIGHT,
        id=id,
        title=title,
        described=described,
        patterns=Markup("").join(_pattern(id, band.css) for band in bands if band.css in HATCHED),
        grid=grid,
        shapes=Markup("").join(shapes),
    )
    return Chart(svg, scale.ticks, described)


def _described(band: Band, unit: str, show: Callable[[float], str]) -> str:
    known = [value for value in band.values if value is not None]
    if not known:
        return f"{band.name}: no data."
    return f"{band.name}: latest {show(known[-1])}{unit}, maximum {show(max(known))}{unit}."


def _columns(bands: Sequence[Band]) -> list[list[float]]:
    """The values of each slot, over all bands."""
    return [[value or 0 for value in column] for column in zip(*(band.values for band in bands), strict=True)]


def _area(css: str, low: Sequence[float], high: Sequence[float], *, scale: Scale, id: str) -> Markup:
    there = [f"{_n(_x(at, len(high)))},{_n(scale.y(value))}" for at, value in enumerate(high)]
    back = [f"{_n(_x(at, len(low)))},{_n(scale.y(low[at]))}" for at in reversed(range(len(low)))]
    edge = Markup('<path class="edge {}" d="{}"/>').format(css, _drawn(_known_runs(_seen(there, low, high))))
    return Markup('<path class="band {}"{} d="M{}Z"/>').format(css, _fill(id, css), "L".join([*there, *back])) + edge


def _seen(points: Sequence[str], low: Sequence[float], high: Sequence[float]) -> list[str | None]:
    """The points of a band's edge: none where it is nothing, as its line would lie upon what is below it."""
    return [point if over > under else None for point, under, over in zip(points, low, high, strict=True)]


def _line(band: Band, scale: Scale) -> Markup:
    points = [
        None if value is None else f"{_n(_x(at, len(band.values)))},{_n(scale.y(value))}"
        for at, value in enumerate(band.values)
    ]
    return Markup('<path class="line {}" d="{}"/>').format(band.css, _drawn(_known_runs(points)))


def _drawn(runs: Iterable[list[str]]) -> str:
    # A moment alone would be a line of no length, which is drawn as nothing.
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
    """Stripes that lean one way for each of them, over the band's colour."""
    turn = {"denied": 45, "blocked": -45, "unavailable": 90}[css]
    return Markup(
        '<pattern id="{id}-{css}" class="{css}" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate({turn})"><rect class="ground" width="5" height="5"/>'
        '<rect class="stripe" width="2.2" height="5"/></pattern>'
    ).format(id=id, css=css, turn=turn)


def _fill(id: str, css: str) -> Markup:
    """A band's pattern is its own chart's: a style sheet could not name it, as ids are those of the page."""
    return Markup(' fill="url(#{}-{})"').format(id, css) if css in HATCHED else Markup("")


def _x(at: int, slots: int) -> float:
    return WIDTH * at / max(1, slots - 1)


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
