"""The command line in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "headgate"]


SETTINGS = ("FORCE_COLOR", "NO_COLOR", "PYTHONIOENCODING", "HEADGATE_SECRET", "COLUMNS")


PLAIN = {name: value for name, value in os.environ.items() if name not in SETTINGS} | {"PYTHONUTF8": "1"}


ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class PseudoTerminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 100, **settings: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=PLAIN | {"TERM": "xterm-256color"} | settings,
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # so that it cannot ask the terminal that the tests run in
        )
        os.close(theirs)
        self.shown = ""

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self._ours, 65536).decode()

    def end(self) -> int:
        """The exit code, when all has been shown."""
        with suppress(OSError):  # how Linux says that the other end of a terminal is closed
            while chunk := os.read(self._ours, 65536):
                self.shown += chunk.decode()
        self.shown = self.shown.replace("\r\n", "\n")
        return self.process.wait(timeout=30)
