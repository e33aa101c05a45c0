"""ASGI middleware of the admin server: host check, security headers, rate limits and body limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers

from headgate import Limit, Limiter
from headgate.control.admin.problems import ProblemDetails
from headgate.control.config import ConfigUnavailable
from headgate.policy import read
from headgate.policy.addresses import Addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from headgate.adapters.asgi import App, Message, Receive, Scope, Send
    from headgate.clock import Clock
    from headgate.control.admin.tokens import Tokens
    from headgate.policy.model import Policy

__all__ = [
    "BODY",
    "FAILED_SIGN_INS",
    "FAILED_TOKENS",
    "LOOPBACK",
    "VERIFIED",
    "BodyLimit",
    "Credentials",
    "FailedAttempts",
    "HostAndSecurityHeaders",
    "access_policy",
    "credential_identity",
    "security_headers",
    "stranger_identity",
]

logger = logging.getLogger("headgate")

BODY: Final = "headgate.body"
"""The key of the scope under which `BodyLimit` stores the body."""

VERIFIED: Final = "headgate.verified"
"""The key of the scope that is true if the request has a valid token or session."""

FAILED_TOKENS: Final = Limit.parse("30/minute", name="failed-tokens")
FAILED_SIGN_INS: Final = Limit.parse("10/minute", name="failed-sign-ins")
"""Limits on failed attempts per address."""
MAX_ADDRESSES: Final = 100_000
REFRESH_INTERVAL_S: Final = 1.0
"""The shortest interval between reads of the valid credentials."""
MAX_AGE_S: Final = 30.0
"""The age at which known credentials are read again."""

MAX_BODY_BYTES: Final = 64 * 1024
MAX_POLICY_BYTES: Final = 1024 * 1024
"""The largest body in bytes: of most requests, and of those with a policy document."""
MAX_PATH_LENGTH: Final = 2000
BODY_TIMEOUT_S: Final = 15.0
"""Time for a body to arrive, so that a client that sends it byte by byte cannot hold the connection."""

_COOKIES: Final = re.compile(
    rb'(?:^|;)[ \t]*((?:__Host-headgate|headgate|flash|zone)=("?)[\w=+/.-]{0,4096}\2)(?=[ \t]*(?:;|$))'
)
"""The cookies that this server sets, in characters that need no unescaping."""
_SESSION: Final = re.compile(r"(?:^|; )(?:__Host-headgate|headgate)=([\w-]+)")

_FIELD: Final = re.compile(r"[a-z_]{1,20}")

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})

CSP: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
COMMON: Final = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
HSTS: Final = (b"strict-transport-security", b"max-age=31536000")
_SIGN_IN: Final = frozenset({("POST", "/login"), ("GET", "/enter")})
"""Requests whose credentials are not in a header. Only failed ones are limited."""


def security_headers(path: str) -> list[tuple[bytes, bytes]]:
    """The headers of every response on this path."""
    # With "no-referrer", browsers also omit the Origin of forms, which protects against cross-site requests.
    referrer = b"no-referrer" if path.startswith("/api/") else b"same-origin"
    caching = [] if path.startswith("/static/") else [(b"cache-control", b"no-store")]
    return [*COMMON, (b"referrer-policy", referrer), *caching]


def access_policy(proxies: Sequence[str] = ()) -> Policy:
    """The rate limits of the admin server. `proxies` are the networks whose X-Forwarded-For is trusted.

    Limits by address apply only to requests without a valid token or session: an attacker at the same address, such as
    another local user on loopback, must not lock out those who have one.
    """
    document: dict[str, Any] = {
        "name": "admin server",
        "routes": [{"path": "/health", "cost": 0}],
        "limits": [
            {"name": "requests", "by": "token", "missing": "skip", "bucket": "1200/minute, burst 300"},
            {"name": "address", "by": "stranger+ip", "missing": "skip", "bucket": "1200/minute, burst 300"},
            # Parsing a document of 1 MiB takes many seconds.
            {"name": "policy-checks", "path": "POST /api/v1/policy/check", "by": "token", "missing": "ip",
             "bucket": "20/minute, burst 10"},
            # Reading the decision log takes seconds.
            {"name": "suggestions", "path": ["GET /api/v1/policy/suggestions", "GET /policy/suggestions"],
             "by": "token", "missing": "ip", "bucket": "20/minute, burst 10"},
        ],
    }  # fmt: skip
    if proxies:
        document["identity"] = {"proxies": list(proxies), "forwarded_by": "x-forwarded-for"}
    return read(json.dumps(document), file="admin server", format="json")


def credential_identity(request: Any) -> str | None:
    """The hash of a request's token or cookie, valid or not, as the identity of rate limits."""
    credential = _credential_digest(request.header)
    return None if credential is None else credential.hex()[:32]


def stranger_identity(request: Any) -> str | None:
    """The identity of requests without valid credentials, for limits that apply only to those; None for others."""
    is_sign_in = (request.method, request.path) in _SIGN_IN  # the handler verifies its credentials
    return None if request.native.get(VERIFIED) or is_sign_in else "stranger"


class Credentials:
    """Digests of the valid tokens and sessions.

    They may be some seconds old, so they decide which limits apply and never grant access. They are read at most once a
    second, however many invalid credentials are sent.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._digests: frozenset[bytes] = frozenset()
        self._read_at = float("-inf")
        self._changes = -1

    async def has(self, digest: bytes) -> bool:
        """True if this is the digest of a valid token or session."""
        is_known, now = digest in self._digests, time.monotonic()
        is_new = not is_known and self._changes != self._tokens.changes
        if is_new or now - self._read_at >= (MAX_AGE_S if is_known else REFRESH_INTERVAL_S):
            self._read_at, self._changes = now, self._tokens.changes
            try:
                self._digests = await asyncio.to_thread(self._tokens.digests)
            except ConfigUnavailable as error:
                logger.warning("cannot read the valid tokens: %s", error)
        return digest in self._digests


class FailedAttempts:
    """Limits failed authentication by client address. Only failed attempts are counted, so valid credentials are
    accepted whatever else comes from the same address."""

    def __init__(self, proxies: Sequence[str] = (), *, clock: Clock | None = None) -> None:
        settings = access_policy(proxies).identity
        self._addresses = Addresses(settings)
        self._forwarded_by = settings.forwarded_by if settings.proxies else ""
        self._limiter = Limiter("memory://", clock=clock, max_keys=MAX_ADDRESSES, namespace="headgate-admin")

    def count(self, scope: Any, limit: Limit) -> int | None:
        """Count a failed attempt. Return the seconds to wait if there were too many from this address, else None."""
        lines = Headers(scope=scope).getlist(self._forwarded_by)
        address = self._addresses.client((scope.get("client") or (None,))[0], lines)
        decision = self._limiter.check(limit.by(self._addresses.identity(address)))
        return None if decision.allowed else max(1, -(-(decision.retry_after_us or 0) // 1_000_000))


def _credential_digest(header: Callable[[str], Iterable[str]]) -> bytes | None:
    """The digest of a request's token or session cookie, as it is stored in the database."""
    for value in header("authorization"):
        if value[:7].lower() == "bearer ":
            return sha256(value[7:].strip().encode("latin-1", "replace")).digest()
    for value in header("cookie"):
        if (found := _SESSION.search(value)) is not None:
            return sha256(found[1].encode()).digest()
    return None


class HostAndSecurityHeaders:
    """The outermost middleware: checks the host, marks verified requests, and adds security headers to responses."""

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str] | None = None,
        credentials: Credentials | None = None,
        secure: bool = False,
    ) -> None:
        """`hosts` are names without ports, None for any; checking them prevents DNS rebinding. `secure` is true if
        browsers reach the server by HTTPS only."""
        self.app = app
        self._hosts = None if hosts is None else {*map(str.lower, hosts)}
        self._credentials = credentials
        self._is_secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        added = security_headers(scope["path"])
        headers = Headers(raw=_with_own_cookies(scope["headers"]))
        host = _host(headers)
        # HSTS applies to all ports of a host: on loopback it would break other servers.
        if self._is_secure and host not in LOOPBACK:
            added.append(HSTS)
        digest = _credential_digest(headers.getlist)
        # Set on the server's own scope, which decides the connections to close when there are too many.
        scope[VERIFIED] = digest is not None and self._credentials is not None and await self._credentials.has(digest)
        scope = {**scope, "headers": headers.raw}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message.get("headers", ())}
                missing = [header for header in added if header[0] not in own]
                message = {**message, "headers": [*message.get("headers", ()), *missing]}
            await send(message)

        problem: ProblemDetails | None = None
        if self._hosts is not None and host not in self._hosts:
            detail = "This server does not accept that host name; start it with --name to add it."
            problem = ProblemDetails("unknown-host", detail)
        elif "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy may trust the other header, and take the next request for the body.
            detail = "Content-Length and Transfer-Encoding must not be sent together."
            problem = ProblemDetails("bad-request", detail)
        elif len(scope["path"]) > MAX_PATH_LENGTH:  # before numbers in it are parsed
            problem = ProblemDetails("too-long", f"A path has at most {MAX_PATH_LENGTH} characters.")
        app = self.app if problem is None else _rejection(problem)
        return await app(scope, receive, send_with_headers)


class BodyLimit:
    """The innermost middleware: reads each body completely, up to a size and within a deadline."""

    def __init__(self, app: App, *, deadline: float = BODY_TIMEOUT_S) -> None:
        self.app = app
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = await self._read(scope, receive)
        if body is None:
            return None  # the client has disconnected
        if isinstance(body, ProblemDetails):
            return await _rejection(body)(scope, receive, send)
        scope[BODY] = body
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        return await self.app(scope, receive_whole, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | ProblemDetails | None:
        """The body, the problem with it, or None if the client has disconnected."""
        max_bytes = _max_bytes(scope["path"])
        too_large = ProblemDetails("too-large", f"The body is larger than {max_bytes // 1024} KiB.")
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
            return too_large
        body, is_complete = bytearray(), False
        try:
            async with asyncio.timeout(self._deadline):
                while not is_complete:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if len(body) > max_bytes:  # counted, as Content-Length may be missing or wrong
                        return too_large
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            return ProblemDetails("too-slow", f"The body did not arrive within {self._deadline:g} seconds.")
        if scope["path"].startswith("/api/") and (repeated := _repeated_name(body)) is not None:
            detail = f"body: {repeated} occurs twice; JSON parsers disagree on which one applies"
            return ProblemDetails("invalid", detail, {"problems": [detail]})
        return bytes(body)


def _repeated_name(body: bytes | bytearray) -> str | None:
    """A name that occurs twice in one object of a JSON text; None if there is none, or if it is not JSON."""
    repeated: list[str] = []

    def find_repeated(pairs: list[tuple[str, Any]]) -> None:
        repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=find_repeated)
    # A name that cannot be a field is not shown: it may be a misplaced value.
    return None if not repeated else repeated[0] if _FIELD.fullmatch(repeated[0]) else "a name"


def _max_bytes(path: str) -> int:
    if f"{path}/".startswith("/policy/"):
        return 3 * MAX_POLICY_BYTES  # a form encodes a line break in six characters
    return MAX_POLICY_BYTES if f"{path}/".startswith("/api/v1/policy/") else MAX_BODY_BYTES


def _with_own_cookies(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without foreign cookies: parsing cookies with backslashes can take minutes."""
    cookies = [found for name, value in headers if name == b"cookie" for found, _ in _COOKIES.findall(value)]
    others = [(name, value) for name, value in headers if name != b"cookie"]
    return [*others, (b"cookie", b"; ".join(cookies))] if cookies else others


def _host(headers: Headers) -> str:
    """The host name without its port; "" if the Host header is missing or repeated."""
    found = [value.lower() for value in headers.getlist("host")]
    if len(found) != 1:
        return ""
    name, colon, port = found[0].rpartition(":")
    return name if colon and port.isdigit() else found[0]


def _rejection(problem: ProblemDetails) -> App:
    """The response to a rejected request. It closes the connection instead of reading the rest of the body."""
    return problem._replace(headers={"Connection": "close"}).response()
