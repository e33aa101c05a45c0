"""Where text goes: painted, and as wide as the window, at a terminal; plain and unbroken in a pipe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["BAD", "BOLD", "DIM", "GOOD", "ODD", "Screen", "printable"]

BOLD: Final = "1"
DIM: Final = "2"
BAD: Final = "31"
GOOD: Final = "32"
ODD: Final = "33"


class Screen:
    """One of the two streams that a command writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self.width = os.get_terminal_size(stream.fileno()).columns or 80 if self.is_terminal else None
        """In columns; None where lines have no end."""
        takes_colour = self.is_terminal and os.environ.get("TERM") != "dumb"
        self._is_coloured = (takes_colour or "FORCE_COLOR" in os.environ) and not os.environ.get("NO_COLOR")

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._is_coloured and text.strip() else text

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream)


def printable(text: str) -> str:
    r"""The text with all signs spelled out that a terminal would obey instead of show them.

    >>> printable("/search\x1b[2J")
    '/search\\x1b[2J'
    """
    return "".join([sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text])
