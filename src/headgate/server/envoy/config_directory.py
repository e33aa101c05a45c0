"""A directory of configuration files, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidInput
from headgate.server.envoy.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["ConfigDirectory", "runtime_directory"]

logger = logging.getLogger("headgate")

MAX_FILE_BYTES: Final = 10_000_000
POLL_INTERVAL_S: Final = 1.0


class ConfigDirectory:
    """All files below a directory, except hidden ones: Kubernetes keeps copies of mounted files in hidden directories.

    A change is noticed however it is made: in place, by renaming files, or by pointing a symbolic link elsewhere.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fingerprint: object = None

    def read(self) -> list[tuple[str, str]]:
        """Names and texts of the files, sorted by name. Raises `ConfigError` if one cannot be read."""
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: not a directory; give the one that contains the configuration files")
        self._fingerprint = self._stat()
        texts = []
        for file in self._files():
            name = file.relative_to(self.path).as_posix()
            try:
                if file.stat().st_size > MAX_FILE_BYTES:
                    raise ConfigError(f"{name}: larger than {MAX_FILE_BYTES:,} bytes; divide it into several files")
                texts.append((name, file.read_text("utf-8")))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None
            except OSError as error:
                raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
        return texts

    def has_changed(self) -> bool:
        """True if the files differ from those that were read last."""
        return self._stat() != self._fingerprint

    async def watch(self, reload: Callable[[list[tuple[str, str]]], Awaitable[None]]) -> None:
        """Call `reload` with the files whenever they change; log the problems of files that it rejects."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if not await asyncio.to_thread(self.has_changed):
                continue
            try:
                texts = await asyncio.to_thread(self.read)
                await reload(texts)
            except InvalidInput as error:
                logger.error("configuration not reloaded, the previous one stays in force: %s", error)
            else:
                logger.info("configuration reloaded: %d files from %s", len(texts), self.path)

    def _files(self) -> list[Path]:
        files = []
        for directory, names, found in os.walk(self.path):
            names[:] = [name for name in names if not name.startswith(".")]
            files += [Path(directory, name) for name in found if not name.startswith(".")]
        return sorted(file for file in files if file.is_file())

    def _stat(self) -> object:
        try:
            stats = [(str(file), file.stat()) for file in self._files()]
        except OSError:  # a file was removed meanwhile
            return None
        return [(name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats]


def runtime_directory(env: Mapping[str, str]) -> Path | None:
    """The directory that the variables of envoyproxy/ratelimit name; None if they are not set."""
    if "RUNTIME_ROOT" not in env:
        return None
    parts = env["RUNTIME_ROOT"], env.get("RUNTIME_SUBDIRECTORY", ""), env.get("RUNTIME_APPDIRECTORY", "config")
    return Path(*[part for part in parts if part])
