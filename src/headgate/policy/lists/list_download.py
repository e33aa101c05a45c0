"""Reads the content of a reputation list from a file or a URL, within limits of size and time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import time
import urllib.error
import urllib.request
import zlib
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from headgate.errors import InvalidInput
from headgate.policy.scalars import VARIABLE

if TYPE_CHECKING:
    from headgate.policy.model import ListSource

__all__ = ["Download", "ListUnavailable", "download"]

READ_TIMEOUT_S: Final = 10.0
"""For connecting, and for each part of a response."""
DOWNLOAD_TIMEOUT_S: Final = 60.0
"""For a whole response."""
CHUNK_BYTES: Final = 65_536
MAX_REDIRECTS: Final = 5
MAX_SIGNATURE_BYTES: Final = 4096
GZIP_MAGIC: Final = b"\x1f\x8b"
GZIP_OR_ZLIB: Final = 47
"""The window size by which zlib recognizes both formats."""
NOT_MODIFIED: Final = 304


class ListUnavailable(InvalidInput):
    """A list that cannot be read, or not completely."""


class Download(NamedTuple):
    """The content of a list, and the validators by which the next request asks for a newer one."""

    data: bytes
    etag: str = ""
    modified: str = ""
    """The Last-Modified field of a response; of a file, its size and modification time."""


def download(source: ListSource, etag: str = "", modified: str = "") -> Download | None:
    """The content of a list; None if it has not changed since one with these validators.

    Raises ListUnavailable for a source that fails, is too large or too slow, or whose signature is wrong.
    """
    try:
        found = (_fetch if source.is_url else _read_file)(source, etag, modified)
        if found is not None:
            if source.secret is not None:
                _check_signature(source, found.data)
            found = found._replace(data=_decompressed(found.data, source.max_size))
    except urllib.error.HTTPError as error:
        with error:
            how = f"redirects more than {MAX_REDIRECTS} times, in a circle, or to something else than HTTP"
            is_redirect = 300 <= error.code < NOT_MODIFIED
            reason = how if is_redirect else f"the server responded with status {error.code}"
            raise ListUnavailable(reason) from None
    except urllib.error.URLError as error:
        raise ListUnavailable(f"cannot be reached: {error.reason}") from None
    except TimeoutError:
        raise ListUnavailable("the server is too slow") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise ListUnavailable(f"cannot be read: {_reason(error)}") from None
    return found


def _fetch(source: ListSource, etag: str, modified: str) -> Download | None:
    headers = {"User-Agent": "headgate", "Accept-Encoding": "gzip"}
    headers |= {name: _expand(value) for name, value in source.headers.items()}
    headers |= {"If-None-Match": etag} if etag else {}
    headers |= {"If-Modified-Since": modified} if modified else {}
    try:
        data, fields = _get(source.source, headers, source.max_size)
    except urllib.error.HTTPError as error:
        if error.code != NOT_MODIFIED or not (etag or modified):
            raise
        with error:
            return None
    return Download(data, fields.get("ETag") or "", fields.get("Last-Modified") or "")


def _get(url: str, headers: dict[str, str], max_size: int) -> tuple[bytes, Any]:
    """The body and the header fields of a response."""
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    handlers: list[Any] = [_SafeRedirects()]
    if (urlsplit(url).hostname or "") in ("127.0.0.1", "::1", "localhost"):  # not for a proxy
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    chunks: list[bytes] = []
    size = 0
    with opener.open(urllib.request.Request(url, headers=headers), timeout=READ_TIMEOUT_S) as response:
        while chunk := response.read1(CHUNK_BYTES):
            size += len(chunk)
            if size > max_size:
                raise ListUnavailable(_too_large(max_size))
            if time.monotonic() > deadline:
                raise TimeoutError
            chunks.append(chunk)
        # read1 does not report a connection that was closed too early.
        expected = response.headers.get("Content-Length")
        if expected is not None and expected.isdigit() and size != int(expected):
            raise ListUnavailable(f"the response ended after {size:,} of {int(expected):,} bytes")
        return b"".join(chunks), response.headers


def _read_file(source: ListSource, etag: str, modified: str) -> Download | None:
    flags = getattr(os, "O_NONBLOCK", 0)
    with open(source.source, "rb", opener=lambda path, mode: os.open(path, mode | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ListUnavailable("is not a regular file")
        if status.st_size > source.max_size:
            raise ListUnavailable(_too_large(source.max_size))
        version = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        if version == modified:
            return None
        data = file.read(source.max_size + 1)
        after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns) or len(data) != status.st_size:
        raise ListUnavailable("has changed while it was read; replace it by renaming a complete file")
    return Download(data, "", version)


def _check_signature(source: ListSource, data: bytes) -> None:
    """Raise ListUnavailable unless SOURCE.hmac contains the HMAC-SHA256 of the content in hexadecimal."""
    where = source.source + ".hmac"
    if source.is_url:
        headers = {name: _expand(value) for name, value in source.headers.items()}
        found, _ = _get(where, {"User-Agent": "headgate", **headers}, MAX_SIGNATURE_BYTES)
    else:
        with open(where, "rb") as file:
            found = file.read(MAX_SIGNATURE_BYTES)
    words = found.decode("ascii", "replace").split()
    key = _expand(source.secret or "").encode()
    expected = hmac.new(key, data, hashlib.sha256).hexdigest()
    if not words or not hmac.compare_digest(words[0].lower().encode(), expected.encode()):
        raise ListUnavailable(f"its signature {os.path.basename(where)} is wrong")


def _decompressed(data: bytes, max_size: int) -> bytes:
    """The content of a gzip file; anything else as it is. Stops at the limit, whatever the file expands to."""
    if not data.startswith(GZIP_MAGIC):
        return data
    chunks: list[bytes] = []
    size, rest = 0, data
    while rest:
        decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
        try:
            chunk = decompressor.decompress(rest, max_size + 1 - size)
        except zlib.error as error:
            raise ListUnavailable(f"is not valid gzip: {error}") from None
        size += len(chunk)
        if size > max_size:
            raise ListUnavailable(_too_large(max_size))
        if not decompressor.eof:
            raise ListUnavailable("is incomplete: the gzip file ends too early")
        chunks.append(chunk)
        rest = decompressor.unused_data
        if not rest.startswith(GZIP_MAGIC):  # padding after the last member
            break
    return b"".join(chunks)


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows few redirects: never from https to http, and without the header fields of the policy to another host."""

    max_redirections = MAX_REDIRECTS

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme == "http"):
            raise ListUnavailable(f"redirects from {before.scheme} to {after.scheme}, which is not followed")
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and (before.scheme, before.netloc) != (after.scheme, after.netloc):
            kept = {name: value for name, value in found.header_items() if name.lower() in KEPT_FIELDS}
            found = urllib.request.Request(newurl, headers=kept)
        return found


KEPT_FIELDS: Final = ("user-agent", "accept-encoding", "if-none-match", "if-modified-since")


def _expand(text: str) -> str:
    """A text with the values of environment variables."""
    for name in VARIABLE.findall(text):
        if not os.environ.get(name):
            raise ListUnavailable(f"needs the environment variable {name}, which is not set")
    return re.sub(VARIABLE, lambda found: os.environ[found[1]], text)


def _too_large(max_size: int) -> str:
    return f"is larger than {max_size:,} bytes; raise max_size"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{error}" or type(error).__name__
