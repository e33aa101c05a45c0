"""Where a shop keeps its things: two files of SQLite's and a secret, in a folder that no other shop uses meanwhile."""

from __future__ import annotations

import fcntl
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Home"]

MOST = 100
"""Shops that may be open at a time on one machine."""


class Home:
    """A folder that is this shop's alone for as long as it is open. It is kept, and found again by the next shop."""

    def __init__(self, folder: Path) -> None:
        """The folder itself, or one beside it where another shop is at home there."""
        for number in range(1, MOST):
            self.folder = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            self.folder.mkdir(parents=True, exist_ok=True)
            # The lock ends with the process, however that ends.
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
            else:
                return
        raise SystemExit(f"{MOST} shops are open in {folder.parent}; close one")

    @property
    def config(self) -> str:
        """The URL of the config store."""
        return f"sqlite:///{self.folder / 'config.db'}"

    @property
    def log(self) -> str:
        """The URL of the decision log, as those know it who read it."""
        return f"sqlite:///{self.folder / 'decisions.db'}"

    def secret(self) -> str:
        """What API keys are hashed with: made once, as else nobody would be found again in what was kept."""
        file = self.folder / "secret"
        if not file.exists():
            with open(file, "x", encoding="ascii", opener=_for_nobody_else) as new:
                new.write(secrets.token_hex(32))
        return file.read_text("ascii").strip()

    def close(self) -> None:
        """Let another shop in."""
        os.close(self._lock)


def _for_nobody_else(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
