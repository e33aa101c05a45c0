"""Where text goes: painted, and as wide as the window, at a terminal; plain and unbroken in a pipe."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["BAD", "BOLD", "DIM", "GOOD", "ODD", "Terminal", "clipped", "printable"]

BOLD: Final = "1"
DIM: Final = "2"
BAD: Final = "31"
GOOD: Final = "32"
ODD: Final = "33"


class Terminal:
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

    def write(self, text: str) -> None:
        """Exactly this, and now."""
        self._stream.write(text)
        self._stream.flush()

    def flush(self) -> None:
        """Let whoever reads along have what was said so far."""
        self._stream.flush()

    def size(self) -> tuple[int, int]:
        """Columns and lines of the window, which may have changed."""
        columns, lines = os.get_terminal_size(self._stream.fileno()) if self.is_terminal else (0, 0)
        return columns or 80, lines or 24


_COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")


def clipped(line: str, width: int) -> str:
    r"""As much of a painted line as fits into one line of a window; colours end where they would have.

    >>> clipped("all \x1b[1mbold words\x1b[0m", 8)
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
    r"""The text with all signs spelled out that a terminal would obey instead of show them.

    >>> printable("/search\x1b[2J")
    '/search\\x1b[2J'
    """
    return "".join([sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text])
