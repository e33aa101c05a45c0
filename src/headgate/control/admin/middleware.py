"""What stands before every request to the admin server: hosts, header fields, limits of its own, and bodies' bounds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from headgate import Limit, Limiter
from headgate.control.admin.problems import TITLES
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
    "HSTS",
    "LARGE",
    "LOOPBACK",
    "SMALL",
    "VERIFIED",
    "BodyLimit",
    "Credentials",
    "FailedAttempts",
    "HostAndSecurityHeaders",
    "access_policy",
    "fields_for",
    "is_stranger",
    "who_asks",
]

logger = logging.getLogger("headgate")

BODY: Final = "headgate.body"
"""Where the scope holds the body of a request, whole, once it has been read."""

VERIFIED: Final = "headgate.verified"
"""Where the scope says whether the request carries a valid token or session."""

FAILED_TOKENS: Final = Limit.parse("30/minute", name="failed-tokens")
FAILED_SIGN_INS: Final = Limit.parse("10/minute", name="failed-sign-ins")
"""Limits on failed attempts of one address."""
MAX_ADDRESSES: Final = 100_000
"""Addresses whose failed attempts are counted."""
REFRESH_INTERVAL_S: Final = 1.0
"""How often an unknown credential may cause the valid ones to be read again."""
MAX_AGE_S: Final = 30.0
"""How long the valid credentials are used without being read again."""

SMALL: Final = 64 * 1024
LARGE: Final = 1024 * 1024
"""Bytes of a body: of all, and of those that bring a policy."""
LONGEST_PATH: Final = 2000
DEADLINE: Final = 15.0
"""Seconds for a body to arrive: who sends it a byte at a time holds a connection, but not for ever."""

_COOKIES: Final = re.compile(
    rb'(?:^|;)[ \t]*((?:__Host-headgate|headgate|flash|zone)=("?)[\w=+/.-]{0,4096}\2)(?=[ \t]*(?:;|$))'
)
"""Those that this server sets, in letters that need no reading of escapes."""
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
"""Requests whose credentials are not in the header. Only the failed ones among them are limited."""
_POLICY_PAGES: Final = re.compile(r"/policy(?:/|$)")
_POLICY_API: Final = re.compile(r"/api/v1/policy(?:/|$)")


def fields_for(path: str) -> list[tuple[bytes, bytes]]:
    """The header fields that every answer on this path carries."""
    # With "no-referrer" browsers hide the Origin of forms, too, and with it what tells them from those of other sites.
    referrer = b"no-referrer" if path.startswith("/api/") else b"same-origin"
    caching = [] if path.startswith("/static/") else [(b"cache-control", b"no-store")]
    return [*COMMON, (b"referrer-policy", referrer), *caching]


def access_policy(proxies: Sequence[str] = ()) -> Policy:
    """The limits of the admin server itself. `proxies` are the networks whose X-Forwarded-For is trusted.

    Limits by address apply only to requests without a valid token or session: an attacker at the same address, such as
    another local user on loopback, must not lock out those who have one.
    """
    document: dict[str, Any] = {
        "name": "admin server",
        "routes": [{"path": "/health", "cost": 0}],
        "limits": [
            {"name": "requests", "by": "token", "missing": "skip", "bucket": "1200/minute, burst 300"},
            {"name": "address", "by": "stranger+ip", "missing": "skip", "bucket": "1200/minute, burst 300"},
            # A document of a mebibyte takes many seconds to read.
            {"name": "policy-checks", "path": "POST /api/v1/policy/check", "by": "token", "missing": "ip",
             "bucket": "20/minute, burst 10"},
        ],
    }  # fmt: skip
    if proxies:
        document["identity"] = {"proxies": list(proxies), "forwarded_by": "x-forwarded-for"}
    return read(json.dumps(document), file="admin server", format="json")


def who_asks(arrival: Any) -> str | None:
    """The hash of a request's token or cookie, as it was sent: only who has it can spend what it is allowed."""
    credential = _credential(arrival.header)
    return None if credential is None else credential.hex()[:32]


def is_stranger(arrival: Any) -> str | None:
    """Identify requests without valid credentials, for limits that apply only to those; None for all others."""
    scope = arrival.native
    is_sign_in = (arrival.method, arrival.path) in _SIGN_IN  # its credentials are verified first, by its handler
    return None if scope.get(VERIFIED) or is_sign_in else "stranger"


class Credentials:
    """Digests of the tokens and sessions that are valid now: tells callers with valid credentials from strangers.

    Access is never granted by this, only the order in which requests are served: an entry may be some seconds old. It
    is read from the database at most once a second, however many made-up credentials are sent.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._digests: frozenset[bytes] = frozenset()
        self._read_at = float("-inf")
        self._changes = -1

    async def has(self, digest: bytes) -> bool:
        """True if this is the digest of a valid token or session."""
        is_known = digest in self._digests
        if self._is_due(is_known):
            self._read_at, self._changes = time.monotonic(), self._tokens.changes
            try:
                self._digests = await asyncio.to_thread(self._tokens.digests)
            except ConfigUnavailable as error:
                logger.warning("valid tokens could not be read: %s", error)
            is_known = digest in self._digests
        return is_known

    def _is_due(self, is_known: bool) -> bool:
        if not is_known and self._changes != self._tokens.changes:
            return True
        return time.monotonic() - self._read_at >= (MAX_AGE_S if is_known else REFRESH_INTERVAL_S)


class FailedAttempts:
    """Limits failed authentication by client address. Count an attempt after its credentials turned out to be invalid:
    valid ones pass, whatever else comes from the same address."""

    def __init__(self, proxies: Sequence[str] = (), *, clock: Clock | None = None) -> None:
        settings = access_policy(proxies).identity
        self._addresses = Addresses(settings)
        self._forwarded_by = settings.forwarded_by.encode() if settings.proxies else None
        self._limiter = Limiter("memory://", clock=clock, max_keys=MAX_ADDRESSES, namespace="headgate-admin")

    def count(self, scope: Any, limit: Limit) -> int | None:
        """Count a failed attempt. Return the seconds to wait if there were too many from this address, else None."""
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == self._forwarded_by]
        address = self._addresses.client((scope.get("client") or (None,))[0], lines)
        decision = self._limiter.check(limit.by(self._addresses.identity(address)))
        return None if decision.allowed else max(1, -(-(decision.retry_after_us or 0) // 1_000_000))


def _credential(header: Callable[[str], Iterable[str]]) -> bytes | None:
    """The digest of the token or session cookie that a request carries, as the database keeps it."""
    for value in header("authorization"):
        if value[:7].lower() == "bearer ":
            return sha256(value[7:].strip().encode("latin-1", "replace")).digest()
    for value in header("cookie"):
        if (found := _SESSION.search(value)) is not None:
            return sha256(found[1].encode()).digest()
    return None


class HostAndSecurityHeaders:
    """Outermost: the names that the server may be called by, who has valid credentials, and header fields on whatever
    answer there is."""

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str] | None = None,
        credentials: Credentials | None = None,
        secure: bool = False,
    ) -> None:
        """`hosts` are names without ports, None for any: a page whose own name leads here by DNS is refused. `secure`:
        browsers reach the server by HTTPS only, and are told to keep it so."""
        self.app = app
        self._hosts = None if hosts is None else {*map(str.lower, hosts)}
        self._credentials = credentials
        self._is_secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        fields = fields_for(scope["path"])
        host = _host(scope)
        # HSTS applies to all ports of a host: on loopback it would lock people out of whatever else runs there.
        if self._is_secure and host not in LOOPBACK:
            fields.append(HSTS)
        headers = _with_own_cookies(scope["headers"])
        digest = None if self._credentials is None else _credential(_decoded(headers))
        # Set on the server's own scope, by which connections are ranked.
        scope[VERIFIED] = digest is not None and self._credentials is not None and await self._credentials.has(digest)
        scope = {**scope, "headers": headers}

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", ())}
                added = [field for field in fields if field[0] not in given]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if self._hosts is not None and host not in self._hosts:
            return await _refuse(
                send_with_fields, 421, "unknown-host", "Misdirected Request",
                "This server is not called by that name; start it with --name to add one.",
            )  # fmt: skip
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy may have believed the other one: what it takes for a body would be the next request here.
            return await _refuse(
                send_with_fields, 400, "bad-request", "Bad Request", "The length of the body is told in two ways."
            )
        if len(scope["path"]) > LONGEST_PATH:  # numbers in it are read before anybody could say that they are none
            return await _refuse(
                send_with_fields, 414, "too-long", "URI Too Long", f"A path has at most {LONGEST_PATH} characters."
            )
        return await self.app(scope, receive, send_with_fields)


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> Callable[[str], list[str]]:
    return lambda name: [value.decode("latin-1") for each, value in headers if each == name.encode()]


class BodyLimit:
    """Innermost: reads each body whole, up to its bound and within its deadline, before anybody looks at it."""

    def __init__(self, app: App, *, deadline: float = DEADLINE) -> None:
        self.app = app
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        most = _most(scope["path"])
        too_large = f"The body is larger than {most // 1024} KiB."
        if _declared(scope) > most:
            return await _refuse(send, 413, "too-large", "Content Too Large", too_large)
        body = bytearray()
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None  # the client has gone
                    body += message.get("body", b"")
                    if len(body) > most:  # counted as it comes: a length may be wrong, or not be given at all
                        return await _refuse(send, 413, "too-large", "Content Too Large", too_large)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            return await _refuse(
                send, 408, "too-slow", "Request Timeout", f"The body did not arrive within {self._deadline:g} seconds."
            )
        scope[BODY] = bytes(body)
        if scope["path"].startswith("/api/") and (repeated := _repeated_name(scope[BODY])) is not None:
            told = f"body: {repeated} is given twice; readers of JSON disagree on which one counts"
            return await _refuse(send, 422, "invalid", TITLES["invalid"][1], told, problems=[told])
        is_given = False

        async def receive_whole() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": scope[BODY], "more_body": False}

        return await self.app(scope, receive_whole, send)


def _repeated_name(body: bytes) -> str | None:
    """A name that occurs twice in one object of a JSON text; None if there is none, or if it is not JSON."""
    repeated: list[str] = []

    def looked_at(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len({*names}) < len(names):
            repeated.append(next(name for number, name in enumerate(names) if name in names[:number]))

    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=looked_at)
    # Names that cannot be those of fields are not repeated: they may be values in a wrong place.
    return None if not repeated else repeated[0] if _FIELD.fullmatch(repeated[0]) else "a name"


def _most(path: str) -> int:
    if _POLICY_API.match(path):
        return LARGE
    return 3 * LARGE if _POLICY_PAGES.match(path) else SMALL  # a form writes a line's end as six characters


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _with_own_cookies(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The header fields with no other cookies than ours: what reads cookies takes minutes over a few backslashes."""
    cookies = [found for name, value in headers if name == b"cookie" for found, _ in _COOKIES.findall(value)]
    others = [(name, value) for name, value in headers if name != b"cookie"]
    return [*others, (b"cookie", b"; ".join(cookies))] if cookies else others


def _host(scope: Scope) -> str:
    """The name in the Host field, without its port; "" where there is none, or more than one."""
    found: list[str] = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
    if len(found) != 1:
        return ""
    name, colon, port = found[0].rpartition(":")
    return name if colon and port.isdigit() else found[0]


async def _refuse(send: Send, status: int, kind: str, title: str, detail: str, **more: Any) -> None:
    body = json.dumps({"type": kind, "title": title, "status": status, "detail": detail, **more}).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),  # what is left of the body is not worth waiting for
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
