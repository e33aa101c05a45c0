"""Output streams, tables and sparklines: coloured and as wide as the window at a terminal, plain in a pipe."""

from __future__ import annotations

import os
import re
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "BOLD", "DIM", "GREEN", "RED", "YELLOW", "Terminal", "bar", "clip", "condense", "count", "duration", "printable",
    "sparkline", "table", "titled_table",
]  # fmt: skip

BOLD: Final = "1"
DIM: Final = "2"
RED: Final = "31"
GREEN: Final = "32"
YELLOW: Final = "33"

STEPS: Final = "▁▂▃▄▅▆▇█"
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL: Final = "█"
REST: Final = "░"
GAP: Final = "  "
MIN_COLUMN_WIDTH: Final = 12
"""Narrower columns are unreadable; the line gets too long instead."""


class Terminal:
    """Standard output or standard error of a command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self.width = os.get_terminal_size(stream.fileno()).columns or 80 if self.is_terminal else None
        """Columns; None if lines are not to be wrapped."""
        supports_colour = self.is_terminal and os.environ.get("TERM") != "dumb"
        self._is_coloured = (supports_colour or "FORCE_COLOR" in os.environ) and not os.environ.get("NO_COLOR")

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._is_coloured and text.strip() else text

    def print(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream)

    def write(self, text: str) -> None:
        """Write the text as it is, and flush."""
        self._stream.write(text)
        self._stream.flush()

    def size(self) -> tuple[int, int]:
        """The current columns and lines of the window."""
        columns, lines = os.get_terminal_size(self._stream.fileno()) if self.is_terminal else (0, 0)
        return columns or 80, lines or 24


_COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")


def clip(line: str, width: int) -> str:
    r"""Cut a coloured line to a width; escape sequences are kept.

    >>> clip("all \x1b[1mbold words\x1b[0m", 8)
    'all \x1b[1mbold\x1b[0m'
    """
    parts = []
    for part in _COLOUR.split(line):
        if part.startswith("\x1b"):
            parts.append(part)
        else:
            parts.append(part[:width])
            width = max(0, width - len(part))
    return "".join(parts)


def printable(text: str) -> str:
    r"""Escape control characters, which a terminal would execute.

    >>> printable("/search\x1b[2J")
    '/search\\x1b[2J'
    """
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode() for char in text])


def titled_table(titles: Sequence[str], rows: Iterable[Sequence[str]], out: Terminal) -> Iterator[str]:
    """The lines of a table as wide as the terminal, with bold column titles."""
    first, *lines = table([titles, *rows], width=out.width)
    yield out.paint(first, BOLD)
    yield from lines


def table(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """The rows as lines of aligned columns, numbers to the right. Cells too wide for `width` are wrapped.

    >>> table([["limit", "cost"], ["per-ip", "1"], ["search", "50"]])
    ['limit   cost', 'per-ip     1', 'search    50']
    >>> table([["note:", "too wide for one line"]], width=19)
    ['note:  too wide for', '       one line']
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = _fit([max(map(len, column)) for column in zip(*rows, strict=True)], width)
    are_numbers = [all(cell.isdigit() for cell in column[1:] or column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [wrap(cell, room, break_on_hyphens=False) or [""] for cell, room in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            columns = zip(parts, widths, are_numbers, strict=True)
            padded = [part.rjust(room) if is_number else part.ljust(room) for part, room, is_number in columns]
            lines.append(GAP.join(padded).rstrip())
    return lines


def _fit(widths: list[int], width: int | None) -> list[int]:
    """Shrink the widest columns until all fit side by side."""
    widths = [max(1, each) for each in widths]
    while width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(widths)
        if widest <= MIN_COLUMN_WIDTH:
            break
        widths[widths.index(widest)] -= 1
    return widths


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
