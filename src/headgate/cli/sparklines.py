"""Numbers as small pictures in a line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bar", "condensed", "count", "duration", "sparkline"]

STEPS: Final = "▁▂▃▄▅▆▇█"
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
REST: Final = "░"


def bar(share: float, width: int = 20) -> str:
    """How much of something is used. Anything more than nothing shows, and only all is full.

    >>> bar(0.5, 8), bar(0.001, 8), bar(0.999, 8), bar(1, 8)
    ('████░░░░', '▏░░░░░░░', '███████▉', '████████')
    """
    share = min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if share < 1:
        eighths = min(width * 8 - 1, eighths)
    whole, part = divmod(eighths, 8)
    drawn = FULL * whole + (EIGHTHS[part] if part else "")
    return drawn + REST * (width - len(drawn))


def sparkline(numbers: Sequence[float], *, top: float | None = None) -> str:
    """A number for each column, the highest as high as can be; what is nothing stays blank.

    >>> sparkline([0, 1, 4, 8])
    ' ▁▄█'
    """
    highest = max([*numbers, 0]) if top is None else top
    if highest <= 0:
        return " " * len(numbers)
    return "".join([" " if each <= 0 else STEPS[_step(each / highest)] for each in numbers])


def _step(share: float) -> int:
    return min(len(STEPS) - 1, max(0, round(share * len(STEPS)) - 1))


def condensed(numbers: Sequence[float], columns: int) -> list[float]:
    """The newest numbers, each column the highest of as many as it takes to fit into them.

    >>> condensed([1, 9, 2, 3, 4], 2)
    [9, 4]
    """
    each = -(-len(numbers) // max(1, columns))
    if each <= 1:
        return list(numbers)
    start = len(numbers) % each
    groups = [numbers[:start]] if start else []
    groups += [numbers[place : place + each] for place in range(start, len(numbers), each)]
    return [max(group) for group in groups]


def count(number: float) -> str:
    """A number with at most four digits.

    >>> [count(each) for each in (7, 999, 1234, 45_678, 1_250_000)]
    ['7', '999', '1.2k', '46k', '1.2M']
    """
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            scaled = number / unit
            return f"{scaled:.1f}{name}" if scaled < 10 else f"{scaled:.0f}{name}"
    return f"{number:.0f}" if number == int(number) or number >= 10 else f"{number:.1f}"


def duration(seconds: float) -> str:
    """About how long, in one unit.

    >>> [duration(each) for each in (0.25, 12, 300, 7300, 200_000)]
    ['0.25 s', '12 s', '5 min', '2 h', '2 days']
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit, name in ((172_800, "days"), (7_200, "h"), (120, "min")):
        if seconds >= unit:
            whole = {"days": 86_400, "h": 3_600, "min": 60}[name]
            return f"{seconds / whole:.0f} {name}"
    return f"{seconds:.0f} s"
