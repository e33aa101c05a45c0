"""A progress line on stderr, updated in place on a terminal."""

import sys
import time


class Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._updates = sys.stderr.isatty()
        self._last = ""

    def say(self, scenario: str, step: str) -> None:
        line = f"{time.monotonic() - self._began:5.0f} s  {scenario}"
        if self._updates:
            print(f"\r\033[K{line}: {step}", end="", file=sys.stderr, flush=True)
        elif scenario != self._last:
            print(line, file=sys.stderr, flush=True)
        self._last = scenario

    def done(self) -> float:
        """End the line and return the elapsed seconds."""
        if self._updates:
            print(file=sys.stderr)
        return time.monotonic() - self._began
