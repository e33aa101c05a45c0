"""HTTP client of the admin API, with retries and errors for people."""

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
    "EXIT_REFUSED", "EXIT_UNCONFIRMED", "EXIT_UNREACHABLE", "AdminClient", "AdminError", "AdminResponse",
    "ConfirmationRequired", "build_path", "is_loopback",
]  # fmt: skip

EXIT_REFUSED: Final = 1
EXIT_UNREACHABLE: Final = 2
EXIT_UNCONFIRMED: Final = 3
"""Exit codes: the server refused; it gave no answer; it needs a confirmation."""

TIMEOUT_S: Final = 20.0
"""For one response: a "why" over a long period takes seconds."""
MAX_RETRY_AFTER_S: Final = 60.0
MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
RETRY_DELAY_S: Final = 0.5
"""After a broken connection, and while the server still works on the first attempt."""

_HEADER_SAFE: Final = "".join(map(chr, range(32, 127))).replace("%", "")


class AdminError(HeadgateError):
    """A refusal of the server, or the reason for no answer; `code` is the exit code of the command."""

    def __init__(self, message: str, *, code: int = EXIT_UNREACHABLE, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class ConfirmationRequired(AdminError):
    """A dangerous change that was not confirmed."""

    def __init__(self, dangers: tuple[tuple[str, str], ...]) -> None:
        listed = "".join(f"\n  {code}: {text}" for code, text in dangers)
        options = " ".join(f"--confirm {code}" for code, _ in dangers)
        message = f"this change needs confirmation:{listed}\nTo confirm it, add: {options}"
        super().__init__(message, code=EXIT_UNCONFIRMED)
        self.dangers = dangers


class AdminResponse(NamedTuple):
    """A response of the server, with the configuration version from its ETag."""

    body: Any
    version: int | None


class AdminClient:
    """The admin API at a URL, used with a token."""

    def __init__(self, url: str, token: str) -> None:
        self.url = _check_url(url)
        self._token = token
        handlers: list[Any] = [_RefuseRedirects()]
        if is_loopback(self.url):
            handlers.append(urllib.request.ProxyHandler({}))  # for a proxy, 127.0.0.1 is another machine
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, **query: Any) -> Any:
        return self.request("GET", path, query=query).body

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        based_on: int | None = None,
        reason: str | None = None,
    ) -> AdminResponse:
        """Send a request, with one retry after a broken connection or a short Retry-After.

        Writes carry an idempotency key, so that a retry is not applied twice.
        """
        target = f"{self.url}/api/v1/{path}"
        if parameters := {name: value for name, value in (query or {}).items() if value is not None}:
            target = f"{target}?{urlencode(parameters, doseq=True)}"
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Accept": "application/json",
            "Content-Type": None if data is None else "application/json",
            "Idempotency-Key": None if method == "GET" else secrets.token_hex(16),
            "If-Match": None if based_on is None else f'"{based_on}"',
            "Headgate-Reason": None if reason is None else quote(reason, safe=_HEADER_SAFE),
        }
        given = {name: value for name, value in headers.items() if value is not None}
        request = urllib.request.Request(target, data, given, method=method)
        for is_last in (False, True):
            try:
                with self._opener.open(request, timeout=TIMEOUT_S) as response:
                    version = (response.headers.get("ETag") or "").strip('"')
                    return AdminResponse(_read(response, self.url), int(version) if version.isdigit() else None)
            except urllib.error.HTTPError as refusal:
                with refusal:
                    problem = _problem(refusal)
                wait = _wait(refusal, problem)
                if is_last or wait is None:
                    raise _error(refusal.code, problem, self.url) from None
            except (http.client.HTTPException, OSError) as error:
                why = getattr(error, "reason", error)
                # A refused connection stays refused: a retry would not help.
                if is_last or isinstance(why, (ConnectionRefusedError, ssl.SSLError, socket.gaierror)):
                    raise _unreachable(why, self.url) from None
                wait = RETRY_DELAY_S
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def is_loopback(url: str) -> bool:
    """True if the URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def build_path(*parts: str | int) -> str:
    """A URL path from these segments, percent-encoded."""
    return "/".join(quote(f"{part}", safe="") for part in parts)


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Never sends the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidInput(f"{url!r} is not the URL of an admin server; write it like http://127.0.0.1:8001")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidInput("the admin server's URL has a host, a port and a path only; use --token-file for the token")
    return url.rstrip("/")


def _read(response: Any, url: str) -> Any:
    data = response.read(MAX_RESPONSE_BYTES + 1)
    if len(data) > MAX_RESPONSE_BYTES:
        raise AdminError(f"{url} sent more than {MAX_RESPONSE_BYTES >> 20} MiB: request less")
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise AdminError(f"{url} does not answer like an admin server") from None


def _problem(refusal: urllib.error.HTTPError) -> dict[str, Any]:
    """The problem document of a refusal; empty if an admin server did not write it."""
    try:
        found = json.loads(refusal.read(MAX_RESPONSE_BYTES))
    except (ValueError, OSError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) and "title" in found else {}


def _wait(refusal: urllib.error.HTTPError, problem: dict[str, Any]) -> float | None:
    """Seconds until a retry; None if it would not help."""
    if _kind(problem) == "in-progress":  # our first attempt, whose connection broke
        return RETRY_DELAY_S
    header = refusal.headers.get("Retry-After", "")
    seconds = float(header) if header.isascii() and header.isdigit() else None
    return seconds if refusal.code == 429 and seconds is not None and seconds <= MAX_RETRY_AFTER_S else None


def _error(status: int, problem: dict[str, Any], url: str) -> AdminError:
    if status == 429:
        return AdminError(f"too many requests to {url}; try again later", status=status)
    if not problem:
        return AdminError(f"{url} answers {status}, and not like an admin server", status=status)
    if _kind(problem) == "confirmation-needed":
        return ConfirmationRequired(tuple([(each["code"], each["text"]) for each in problem.get("dangers") or ()]))
    if problem.get("problems"):
        first, *more = [f"{each}" for each in problem["problems"]]
        listed = "\n  ".join(("refused:", first, *more)) if more else first
        return AdminError(listed, code=EXIT_REFUSED, status=status)
    detail = f"{problem.get('detail') or problem.get('title') or status}".rstrip(".")
    detail = f"{detail}: {_REMEDIES[status]}" if status in _REMEDIES else detail
    code = EXIT_UNREACHABLE if status in (401, 500, 503) else EXIT_REFUSED
    return AdminError(detail, code=code, status=status)


def _kind(problem: dict[str, Any]) -> str:
    return f"{problem.get('type', '')}".rpartition("/")[2]


_REMEDIES: Final = {
    401: "set HEADGATE_TOKEN, or give --token-file; `headgate admin token NAME` creates a valid token",
    412: "nothing was changed; check the current state and try again",
    500: "this is a bug of the server",
    503: "try again later",
}


def _unreachable(why: Any, url: str) -> AdminError:
    cause = getattr(why, "strerror", None) or f"{why}" or type(why).__name__
    if isinstance(why, TimeoutError):
        cause = f"no answer within {TIMEOUT_S:.0f} s"
    return AdminError(
        f"no admin server at {url}: {cause}. Start one with `headgate admin`, or give its URL with --admin or "
        "HEADGATE_ADMIN"
    )
