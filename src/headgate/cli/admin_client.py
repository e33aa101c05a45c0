"""The admin server as the command line asks it: one small client, with an error for each way in which that can fail."""

from __future__ import annotations

import http.client
import ipaddress
import json
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "REFUSED",
    "UNANSWERED",
    "UNCONFIRMED",
    "AdminClient",
    "AdminError",
    "Reply",
    "Unconfirmed",
    "is_loopback",
    "path_of",
]

REFUSED: Final = 1
UNANSWERED: Final = 2
UNCONFIRMED: Final = 3
"""Exit codes: the server said No; it could not be asked; it wants to be told that this is meant."""

TIMEOUT: Final = 20.0
"""Seconds for one answer: a "why" over a long time takes some of them."""
PATIENCE: Final = 60.0
"""The longest Retry-After that is waited for."""
LARGEST: Final = 64 * 1024 * 1024
AGAIN: Final = 0.5
"""Seconds before a question is asked again whose connection broke, or which is still being answered."""
TRIES: Final = 2

_HEARD: Final = frozenset({"GET", "HEAD"})
_PLAIN: Final = "".join(map(chr, range(32, 127))).replace("%", "")
"""What may stand in a header field as it is."""


class AdminError(HeadgateError):
    """What the server refused, or why there was no answer; `code` is what the command ends with."""

    def __init__(self, told: str, *, code: int = UNANSWERED, status: int | None = None) -> None:
        super().__init__(told)
        self.code = code
        self.status = status


class Unconfirmed(AdminError):
    """A change that is dangerous, and that nobody has confirmed."""

    def __init__(self, dangers: tuple[tuple[str, str], ...]) -> None:
        words = "".join(f"\n  {code}: {text}" for code, text in dangers)
        confirm = " ".join(f"--confirm {code}" for code, _ in dangers)
        super().__init__(f"this needs to be confirmed:{words}\nIf it is meant, say so: {confirm}", code=UNCONFIRMED)
        self.dangers = dangers


class Reply(NamedTuple):
    """An answer of the server's."""

    body: Any
    version: int | None
    """The version of the config that it speaks of, if it does."""


class AdminClient:
    """The API of an admin server, with a token."""

    def __init__(self, url: str, token: str) -> None:
        self.url = _checked(url)
        self._token = token
        handlers: list[Any] = [_RedirectRefused()]
        if is_loopback(self.url):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy has another 127.0.0.1
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a question."""
        return self.ask("GET", path, query=query).body

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        based_on: int | None = None,
        reason: str | None = None,
    ) -> Reply:
        """The answer, asked for again where that can do no harm: after a broken connection, as writes carry a key by
        which the server knows them again; and once after a pause that the server asks for."""
        target = f"{self.url}/api/v1/{path}"
        if given := {name: value for name, value in (query or {}).items() if value is not None}:
            target = f"{target}?{urlencode(given, doseq=True)}"
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        if method not in _HEARD:
            headers["Idempotency-Key"] = secrets.token_hex(16)
        if based_on is not None:
            headers["If-Match"] = f'"{based_on}"'
        if reason is not None:
            headers["Headgate-Reason"] = quote(reason, safe=_PLAIN)
        request = urllib.request.Request(target, data, headers, method=method)
        tries = TRIES
        while True:
            tries -= 1
            try:
                with self._opener.open(request, timeout=TIMEOUT) as response:
                    return Reply(_read(response, self.url), _version(response.headers.get("ETag")))
            except urllib.error.HTTPError as refusal:
                with refusal:
                    problem = _problem(refusal)
                wait = _wait(refusal, problem)
                if not tries or wait is None:
                    raise _error(refusal.code, problem, self.url) from None
            except (http.client.HTTPException, OSError) as error:
                why = getattr(error, "reason", error)
                # Nobody listens there, or not to us: asking once more changes nothing.
                if not tries or isinstance(why, (ConnectionRefusedError, ssl.SSLError, socket.gaierror)):
                    raise _unreachable(why, self.url) from None
                wait = AGAIN
            time.sleep(wait)


def is_loopback(url: str) -> bool:
    """Whether what is sent there stays on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def path_of(*parts: str | int) -> str:
    """A path of these parts, whatever stands in them."""
    return "/".join(quote(f"{part}", safe="") for part in parts)


class _RedirectRefused(urllib.request.HTTPRedirectHandler):
    """A token is for the server that was named, and for no other that it may point to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidInput(f"the admin server's URL {url!r} is none; write it like http://127.0.0.1:8001")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidInput("the admin server's URL has only a host, a port and perhaps a path; a token is given apart")
    return url.rstrip("/")


def _read(response: Any, url: str) -> Any:
    data = response.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise AdminError(f"{url} answers more than {LARGEST >> 20} MiB: ask for less")
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise AdminError(f"{url} does not answer as an admin server does: is it one?") from None


def _problem(refusal: urllib.error.HTTPError) -> dict[str, Any]:
    """What the server says of its refusal; empty, if it is none that it has written itself."""
    try:
        found = json.loads(refusal.read(LARGEST))
    except (ValueError, OSError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) and "title" in found else {}


def _wait(refusal: urllib.error.HTTPError, problem: dict[str, Any]) -> float | None:
    """Seconds after which the same may be asked again; None, if that would not help."""
    if _kind(problem) == "in-progress":  # it is our own first try, whose connection broke
        return AGAIN
    given = refusal.headers.get("Retry-After", "")
    asked = float(given) if given.isascii() and given.isdigit() else None
    return asked if refusal.code == 429 and asked is not None and asked <= PATIENCE else None


def _error(status: int, problem: dict[str, Any], url: str) -> AdminError:
    if status == 429:
        return AdminError(f"{url} is asked too often; try again later", status=status)
    if not problem:
        return AdminError(f"{url} answers {status}, and not as an admin server does: is it one?", status=status)
    if _kind(problem) == "confirmation-needed":
        return Unconfirmed(tuple([(each["code"], each["text"]) for each in problem.get("dangers") or ()]))
    if problem.get("problems"):
        first, *more = [f"{each}" for each in problem["problems"]]
        listed = "\n  ".join(("refused, for these reasons:", first, *more)) if more else first
        return AdminError(listed, code=REFUSED, status=status)
    detail = f"{problem.get('detail') or problem.get('title') or status}".rstrip(".")
    if remedy := _REMEDIES.get(status):
        return AdminError(
            f"{detail}: {remedy}", code=UNANSWERED if status in (401, 500, 503) else REFUSED, status=status
        )
    return AdminError(detail, code=REFUSED, status=status)


def _kind(problem: dict[str, Any]) -> str:
    return f"{problem.get('type', '')}".rpartition("/")[2]


_REMEDIES: Final = {
    401: "set HEADGATE_TOKEN, or give --token-file, to a token that holds; `headgate admin token NAME` makes one",
    412: "nothing was changed; look again, then ask again",
    500: "this is a mistake of the server's",
    503: "try again later",
}


def _unreachable(why: Any, url: str) -> AdminError:
    told = getattr(why, "strerror", None) or f"{why}" or type(why).__name__
    if isinstance(why, TimeoutError):
        told = f"no answer within {TIMEOUT:.0f} s"
    return AdminError(
        f"no admin server can be asked at {url}: {told}. Start one with `headgate admin`, or say where it is with "
        "--admin or HEADGATE_ADMIN"
    )


def _version(tag: str | None) -> int | None:
    told = (tag or "").strip('"')
    return int(told) if told.isdigit() else None
