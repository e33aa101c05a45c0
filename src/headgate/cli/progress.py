"""A progress line on standard error, if that is a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from headgate.cli.terminal import bar, count

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from headgate.cli.terminal import Terminal

__all__ = ["ProgressLine"]

UPDATE_INTERVAL_S: Final = 0.2


class ProgressLine:
    """Shows the progress of a long operation, and removes the line at its end."""

    def __init__(self, err: Terminal, activity: str) -> None:
        self._err = err
        self._activity = activity
        self._next_s = time.monotonic() + UPDATE_INTERVAL_S
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._err.write("\r\x1b[K")

    def update(self, done: int, total: int) -> None:
        """Show the bytes that are done, out of a total that is 0 if unknown."""
        now_s = time.monotonic()
        if not self._err.is_terminal or now_s < self._next_s:
            return
        self._next_s = now_s + UPDATE_INTERVAL_S
        self._is_shown = True
        share = f"{bar(done / total)} {done / total:.0%}" if total else f"{count(done)}B"
        self._err.write(f"\r{self._activity} {share}\x1b[K")
