"""ListCache: the last good version of each reputation list on disk, shared by the processes of a machine."""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import tempfile
from array import array
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.policy.lists.ranges import AddressRanges

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from headgate.policy.model import ListSource

try:
    import fcntl
except ImportError:  # Windows: each process downloads for itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["CACHE_VARIABLE", "ListCache", "ListVersion"]

logger = logging.getLogger("headgate")

CACHE_VARIABLE: Final = "HEADGATE_CACHE"
MAGIC: Final = b"headgate list 1\n"
DIGEST_BYTES: Final = 16
LENGTHS: Final = struct.Struct("<IQQQ")
"""The bytes of the header, and of each of the arrays that follow it."""


class ListVersion(NamedTuple):
    """A valid version of a list."""

    ranges: AddressRanges
    version: str
    """A hash of the content."""
    networks: int
    invalid: int
    """Entries that were skipped."""
    changed_us: int
    """The time since which this version is in force."""
    checked_us: int
    """The time at which the source last had nothing newer."""
    etag: str = ""
    modified: str = ""


class ListCache:
    """A directory with the last good version of each list, in compiled form, and the reason why a newer one failed."""

    def __init__(self, directory: str | PathLike[str] | None = None) -> None:
        """The default directory is that in HEADGATE_CACHE, else `headgate` in the user's directory for caches."""
        self.directory = _default_directory() if directory is None else Path(directory).absolute()
        """None for a user without a home directory."""
        self._has_failed = False

    def read(self, source: ListSource) -> ListVersion | None:
        """The stored version; None if there is none, or if it is incomplete or belongs to another user."""
        try:
            path = self._path(source, "ranges")
            if hasattr(os, "geteuid") and path.stat().st_uid not in (os.geteuid(), 0):
                return None
            return _decode(path.read_bytes())
        except (
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            struct.error,
        ):
            return None

    def write(self, source: ListSource, version: ListVersion) -> None:
        self._replace(source, "ranges", _encode(version))
        with suppress(OSError):
            self._path(source, "error").unlink(missing_ok=True)

    def read_error(self, source: ListSource) -> tuple[str, int] | None:
        """The reason why the newest version is not in force, and the time in microseconds since when."""
        try:
            found = json.loads(self._path(source, "error").read_text("utf-8"))
            return str(found["error"]), int(found["at_us"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_error(self, source: ListSource, error: str, at_us: int) -> None:
        self._replace(source, "error", json.dumps({"error": error, "at_us": at_us}).encode())

    @contextmanager
    def lock(self, source: ListSource) -> Iterator[bool]:
        """True inside if no other process has the lock, so that one process of a machine refreshes the list."""
        file: Any = None
        with suppress(OSError):
            path = self._path(source, "lock")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open(path, "wb")  # noqa: SIM115 - closed below
        if file is None or fcntl is None:
            yield True
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _path(self, source: ListSource, suffix: str) -> Path:
        if self.directory is None:
            raise FileNotFoundError("this user has no home directory")
        origin = "\n".join([source.source, source.format, str(source.column), str(source.key), str(source.secret)])
        return self.directory / f"{source.name}-{blake2b(origin.encode(), digest_size=8).hexdigest()}.{suffix}"

    def _replace(self, source: ListSource, suffix: str, content: bytes) -> None:
        """Write a file atomically. Without a writable directory, lists are in memory only."""
        try:
            path = self._path(source, suffix)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{source.name}-")
            try:
                with open(handle, "wb") as file:
                    file.write(content)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "lists cannot be stored on disk (%s), so that they are not known after a restart until they were "
                    "read again; set %s to a writable directory",
                    error,
                    CACHE_VARIABLE,
                )
            self._has_failed = True


def _default_directory() -> Path | None:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "headgate"
    except RuntimeError:
        return None


def _encode(version: ListVersion) -> bytes:
    fields = {**version._asdict(), "byteorder": sys.byteorder}
    del fields["ranges"]
    header = json.dumps(fields).encode()
    arrays = [each.tobytes() for each in version.ranges.arrays]
    body = b"".join([MAGIC, LENGTHS.pack(len(header), *map(len, arrays)), header, *arrays])
    return body + blake2b(body, digest_size=DIGEST_BYTES).digest()


def _decode(content: bytes) -> ListVersion:
    """Raises ValueError, KeyError or struct.error for a file that is incomplete, or of another version or machine."""
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if not body.startswith(MAGIC) or blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise ValueError("not a complete list")
    length, *sizes = LENGTHS.unpack_from(body, len(MAGIC))
    at = len(MAGIC) + LENGTHS.size
    fields = json.loads(body[at : at + length])
    if fields.pop("byteorder") != sys.byteorder:
        raise ValueError("written by another machine")
    at += length
    arrays = []
    for typecode, size in zip("IQQ", sizes, strict=True):
        each = array(typecode)
        each.frombytes(body[at : at + size])
        arrays.append(each)
        at += size
    return ListVersion(AddressRanges(*arrays), **fields)
