"""Texts in columns."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from headgate.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["table"]

GAP: Final = "  "
NARROWEST: Final = 12
"""A column that is broken into less cannot be read; rather is a line too long."""


def table(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """The rows as lines of aligned columns, numbers to the right. Cells that are too wide for `width` are wrapped.

    >>> table([["limit", "cost"], ["per-ip", "1"], ["search", "50"]])
    ['limit   cost', 'per-ip     1', 'search    50']
    >>> table([["note:", "too wide for one line"]], width=19)
    ['note:  too wide for', '       one line']
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = _fitting([max(map(len, column)) for column in zip(*rows, strict=True)], width)
    are_numbers = [all(cell.isdigit() for cell in column[1:] or column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [wrap(cell, room, break_on_hyphens=False) or [""] for cell, room in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            columns = zip(parts, widths, are_numbers, strict=True)
            padded = [part.rjust(room) if is_number else part.ljust(room) for part, room, is_number in columns]
            lines.append(GAP.join(padded).rstrip())
    return lines


def _fitting(widths: list[int], width: int | None) -> list[int]:
    """The same widths, the widest made narrower until all fit side by side."""
    widths = [max(1, each) for each in widths]
    while width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(widths)
        if widest <= NARROWEST:
            break
        widths[widths.index(widest)] -= 1
    return widths
