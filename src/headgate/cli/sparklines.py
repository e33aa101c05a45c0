"""Numbers as bars, sparklines and short texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bar", "condense", "count", "duration", "sparkline"]

STEPS: Final = "▁▂▃▄▅▆▇█"
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
REST: Final = "░"


def bar(share: float, width: int = 20) -> str:
    """A bar for a share from 0 to 1. Every share above 0 is visible, and only 1 fills the bar.

    >>> bar(0.5, 8), bar(0.001, 8), bar(0.999, 8), bar(1, 8)
    ('████░░░░', '▏░░░░░░░', '███████▉', '████████')
    """
    share = min(max(share, 0.0), 1.0)
    eighths = min(max(round(share * width * 8), share > 0), width * 8 - (share < 1))
    whole, part = divmod(eighths, 8)
    drawn = FULL * whole + (EIGHTHS[part] if part else "")
    return drawn + REST * (width - len(drawn))


def sparkline(numbers: Sequence[float], *, top: float | None = None) -> str:
    """One column per number, scaled to the highest; 0 is blank.

    >>> sparkline([0, 1, 4, 8])
    ' ▁▄█'
    """
    highest = max([*numbers, 0]) if top is None else top
    if highest <= 0:
        return " " * len(numbers)
    steps = [min(len(STEPS) - 1, max(0, round(each / highest * len(STEPS)) - 1)) for each in numbers]
    return "".join([" " if each <= 0 else STEPS[step] for each, step in zip(numbers, steps, strict=True)])


def condense(numbers: Sequence[float], columns: int) -> list[float]:
    """At most `columns` numbers, each the maximum of equally many neighbours.

    >>> condense([1, 9, 2, 3, 4], 2)
    [9, 4]
    """
    each = -(-len(numbers) // max(1, columns))
    if each <= 1:
        return list(numbers)
    ends = range(len(numbers), 0, -each)
    return [max(numbers[max(0, end - each) : end]) for end in reversed(ends)]


def count(number: float) -> str:
    """A number with at most three digits and a unit.

    >>> [count(each) for each in (7, 999, 1234, 45_678, 1_250_000)]
    ['7', '999', '1.2k', '46k', '1.2M']
    """
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            scaled = number / unit
            return f"{scaled:.1f}{name}" if scaled < 10 else f"{scaled:.0f}{name}"
    return f"{number:.0f}" if number == int(number) or number >= 10 else f"{number:.1f}"


def duration(seconds: float) -> str:
    """A rounded duration in one unit.

    >>> [duration(each) for each in (0.25, 12, 300, 7300, 200_000)]
    ['0.25 s', '12 s', '5 min', '2 h', '2 days']
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
