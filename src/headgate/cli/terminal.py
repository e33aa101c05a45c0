"""Output streams: coloured and as wide as the window at a terminal, plain and unwrapped in a pipe."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["BOLD", "DIM", "GREEN", "RED", "YELLOW", "Terminal", "clip", "printable"]

BOLD: Final = "1"
DIM: Final = "2"
RED: Final = "31"
GREEN: Final = "32"
YELLOW: Final = "33"


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

    def flush(self) -> None:
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
