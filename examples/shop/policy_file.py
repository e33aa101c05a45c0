"""policy.yaml as the document of the config store: put there when the shop opens, and whenever the file changes."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from examples.shop.live import DIM, RED, paint
from headgate.errors import HeadgateError, InvalidInput
from headgate.policy.loader import decoded, file_content, read

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.control.config import ConfigStore
    from headgate.control.config.history import Version

__all__ = ["PolicyFile"]

EVERY = 0.5
"""Seconds between two looks at the file, and at the store."""


class PolicyFile(threading.Thread):
    """Brings a policy file into the config store, and tells the terminal of every version there, whoever made it.

    Only a change of the file does that: what people change on the pages, or take back there, stays so until then.
    """

    def __init__(self, path: Path, config: ConfigStore) -> None:
        super().__init__(name="policy file", daemon=True)
        self._path = path
        self._config = config
        self._seen: bytes | None = None
        self._told = 0
        self._end = threading.Event()

    def begin(self) -> None:
        """Put the file into the store; InvalidPolicy, if it has mistakes."""
        self._seen = file_content(self._path)
        self._put(self._seen, "the shop has opened")
        self._told = self._config.version

    def start(self) -> None:
        self._told = self._config.version  # nobody wants to hear what held before they came
        super().start()

    def run(self) -> None:
        while not self._end.wait(EVERY):
            try:
                self.look()
            except HeadgateError as error:
                print(paint(f"{error}", RED), file=sys.stderr, flush=True)

    def look(self) -> None:
        """Put the file into the store if it has changed, and tell of what is new there."""
        self._look_at_file()
        self._tell()

    def stop(self) -> None:
        self._end.set()
        if self.is_alive():
            self.join(5)

    def _look_at_file(self) -> None:
        """What it says wrong is told once."""
        try:
            content: bytes | None = file_content(self._path)
        except InvalidInput:  # it is gone, as it is for a moment while some editors save
            content = None
        if content is None or content == self._seen:
            return
        self._seen = content
        try:
            self._put(content, "the file was changed")
        except InvalidInput as error:
            what = f"{self._path.name} is refused, and what was in force stays so:"
            print(f"{paint(what, RED)}\n{error}", file=sys.stderr, flush=True)

    def _put(self, content: bytes, reason: str) -> None:
        text = decoded(content, self._path)
        read(text, file=str(self._path))  # first as it stands: its mistakes are told by their very places
        self._config.put_policy(text, author=self._path.name, reason=reason, file=self._path.name, hash_keys=True)

    def _tell(self) -> None:
        if self._config.version == self._told:
            return
        fresh = [version for version in self._config.history(most=20) if version.number > self._told]
        for version in reversed(fresh):
            self._told = version.number
            print(_line(version), flush=True)


def _line(version: Version) -> str:
    signed = paint(f"({version.author}: {version.reason})", DIM)
    return f"version {version.number} holds: {version.what} {signed}"
