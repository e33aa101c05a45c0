"""Imports policy.yaml into the config store at the start and whenever the file changes."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from examples.shop.decision_printer import DIM, RED, paint
from headgate.errors import HeadgateError, InvalidInput
from headgate.policy.loader import decoded, file_content, read

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.control.config import ConfigStore
    from headgate.control.config.history import Version

__all__ = ["PolicyFile"]

EVERY = 0.5
"""Seconds between checks of the file and of the store."""


class PolicyFile(threading.Thread):
    """Imports a policy file into the config store, and prints every new version.

    Only a change of the file is imported, so that changes made on the pages stay until then.
    """

    def __init__(self, path: Path, config: ConfigStore) -> None:
        super().__init__(name="policy file", daemon=True)
        self._path = path
        self._config = config
        self._seen: bytes | None = None
        self._printed = 0
        self._end = threading.Event()

    def begin(self) -> None:
        """Import the file; raises InvalidPolicy if it has mistakes."""
        self._seen = file_content(self._path)
        self._put(self._seen, "start of the shop")
        self._printed = self._config.version

    def start(self) -> None:
        self._printed = self._config.version  # earlier versions are not printed
        super().start()

    def run(self) -> None:
        while not self._end.wait(EVERY):
            try:
                self.check()
            except HeadgateError as error:
                print(paint(f"{error}", RED), file=sys.stderr, flush=True)

    def check(self) -> None:
        """Import the file if it has changed, and print new versions."""
        self._import_if_changed()
        self._print_new()

    def stop(self) -> None:
        self._end.set()
        if self.is_alive():
            self.join(5)

    def _import_if_changed(self) -> None:
        """Import the file if it has changed; its mistakes are printed once."""
        try:
            content: bytes | None = file_content(self._path)
        except InvalidInput:  # missing for a moment while some editors save
            content = None
        if content is None or content == self._seen:
            return
        self._seen = content
        try:
            self._put(content, "the file was changed")
        except InvalidInput as error:
            what = f"{self._path.name} is invalid, the previous version stays in force:"
            print(f"{paint(what, RED)}\n{error}", file=sys.stderr, flush=True)

    def _put(self, content: bytes, reason: str) -> None:
        text = decoded(content, self._path)
        read(text, file=str(self._path))  # first, so that mistakes are reported with their positions
        self._config.put_policy(text, author=self._path.name, reason=reason, file=self._path.name, hash_keys=True)

    def _print_new(self) -> None:
        if self._config.version == self._printed:
            return
        fresh = [version for version in self._config.history(most=20) if version.number > self._printed]
        for version in reversed(fresh):
            self._printed = version.number
            print(_line(version), flush=True)


def _line(version: Version) -> str:
    signed = paint(f"({version.author}: {version.reason})", DIM)
    return f"version {version.number} in force: {version.what} {signed}"
