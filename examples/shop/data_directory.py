"""The data directory of a running shop: three SQLite databases and a secret."""

from __future__ import annotations

import fcntl
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DataDirectory"]

MOST = 100
"""Shops that can run at the same time on one machine."""


class DataDirectory:
    """A directory that is locked by one running shop. It is kept, and used again by the next one."""

    def __init__(self, folder: Path) -> None:
        """Use this directory, or one next to it if another shop has locked it."""
        for number in range(1, MOST):
            self.folder = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            self.folder.mkdir(parents=True, exist_ok=True)
            # The lock ends with the process, also if it is killed.
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
        """The URL of the decision log, for readers."""
        return f"sqlite:///{self.folder / 'decisions.db'}"

    @property
    def ledger(self) -> str:
        """The URL of the ledger of the plans."""
        return f"sqlite:///{self.folder / 'ledger.db'}"

    def secret(self) -> str:
        """The secret that API keys are hashed with; kept, so that stored clients are recognized after a restart."""
        file = self.folder / "secret"
        if not file.exists():
            with open(file, "x", encoding="ascii", opener=_for_nobody_else) as new:
                new.write(secrets.token_hex(32))
        return file.read_text("ascii").strip()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def _for_nobody_else(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
