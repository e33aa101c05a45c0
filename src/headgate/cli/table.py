"""Tables of aligned columns."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from headgate.cli.terminal import BOLD, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.cli.terminal import Terminal

__all__ = ["table", "titled_table"]

GAP: Final = "  "
MIN_COLUMN_WIDTH: Final = 12
"""Narrower columns are unreadable; the line gets too long instead."""


def titled_table(titles: Sequence[str], rows: Sequence[Sequence[str]], out: Terminal) -> Iterator[str]:
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
