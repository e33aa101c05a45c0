"""Identity extraction: the client's address, its API key, and the identities supplied by the app's functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from inspect import isawaitable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.errors import InvalidConfiguration
from headgate.policy.addresses import Addresses
from headgate.policy.snapshot import AMBIGUOUS, LISTED, OTHER_API_KEYS

if TYPE_CHECKING:
    from headgate.gate.admission import RequestInfo
    from headgate.policy.api_keys import ApiKeyHasher
    from headgate.policy.model import IdentitySettings

__all__ = ["AppIdentities", "CacheKey", "IdentityExtractor", "IdentityFunction"]

logger = logging.getLogger("headgate")

IdentityFunction: TypeAlias = Callable[[Any], Any]
"""Returns the identity of a `RequestInfo`: a string, an integer or None; or an awaitable of one of these."""

CacheKey: TypeAlias = tuple[Any, ...]
"""The inputs that the identities of a request depend on: route, kinds, peer, forwarding headers, and the hash of each
header that may contain an API key, but not the keys themselves."""

AppIdentities: TypeAlias = dict[str, Any]
"""Identities that the app's functions returned, by kind."""

NO_IDENTITIES: Final[AppIdentities] = {}

MAX_KEY_LINES: Final = 16
"""Lines of an API key header that are read; requests with several lines are ambiguous anyway."""

RESERVED_KINDS: Final = frozenset({"address", "ip", "subnet", "endpoint", "client", "global", LISTED})
"""The kinds that the app cannot supply."""

LOG_INTERVAL_S: Final = 1.0
"""Time between log records about the same function, which clients may be able to make fail."""


class IdentityExtractor:
    """Extracts the identities of requests, as configured under `identity:` in the policy."""

    __slots__ = (
        "_addresses", "_api_keys", "_forwarded_by", "_functions", "_functions_kinds", "_has_tier_function",
        "_key_headers", "_known_keys", "_logged_at", "_vouched_keys",
    )  # fmt: skip

    def __init__(
        self,
        settings: IdentitySettings,
        api_keys: ApiKeyHasher,
        functions: Mapping[str, IdentityFunction] | None = None,
        known_keys: Container[str] | None = None,
        vouched_keys: Container[str] = (),
    ) -> None:
        """`known_keys` are the hashes of all valid keys; None accepts any key. If a request contains several keys, one
        of `vouched_keys` takes precedence."""
        self._addresses = Addresses(settings)
        self._forwarded_by = settings.forwarded_by if settings.proxies else None
        self._api_keys = api_keys
        self._known_keys = known_keys
        self._vouched_keys = vouched_keys
        self._functions = dict(functions or {})
        self._functions_kinds = frozenset(self._functions)
        self._has_tier_function = "tier" in self._functions
        """The tier is needed for every request, whatever its limits count by."""
        self._key_headers: list[tuple[str, Callable[[str], str | None]]] = []
        """The headers that may contain a key, each with the function that parses it."""
        if "api_key" not in self._functions:
            if settings.api_key_header is not None:
                self._key_headers.append((settings.api_key_header, api_keys.from_header))
            if settings.bearer_token:
                self._key_headers.append(("authorization", api_keys.from_bearer))
        self._logged_at: dict[str, float] = {}
        if reserved := sorted(RESERVED_KINDS & self._functions_kinds):
            raise InvalidConfiguration(
                f"identities[{reserved[0]!r}]: this kind is built in; use another name, or list your proxies under "
                "identity: in the policy"
            )

    def cache_key(self, request: RequestInfo, route: Any, kinds: frozenset[str]) -> CacheKey | None:
        """A key that is equal for requests with the same identities; None for a request with a repeated key header."""
        forwarded = tuple(request.header(self._forwarded_by)) if self._forwarded_by is not None else ()
        if "api_key" not in kinds:
            return route, kinds, request.peer, forwarded
        hashes: list[int | None] = []
        for name, _ in self._key_headers:
            lines = request.header(name)
            if not lines:
                hashes.append(None)
            elif len(lines) == 1:
                hashes.append(hash(lines[0]))
            else:
                return None
        return route, kinds, request.peer, forwarded, *hashes

    def extract(self, request: RequestInfo, kinds: frozenset[str]) -> tuple[dict[str, str], bool]:
        """The identities of a request but those of the app, always including its address; and True if every request
        with the same `cache_key` has the same identities."""
        addresses = self._addresses
        forwarded = tuple(request.header(self._forwarded_by)) if self._forwarded_by is not None else ()
        address = addresses.client(request.peer, forwarded)
        who = {"address": address, "ip": addresses.identity(address)}
        if "subnet" in kinds:
            who["subnet"] = addresses.subnet(address)
        return who, "api_key" not in kinds or self._add_api_key(request, who)

    def from_app(self, request: RequestInfo, kinds: frozenset[str]) -> tuple[AppIdentities, AppIdentities]:
        """Call the app's functions for these kinds: the identities, and the awaitables of asynchronous functions."""
        if not self._has_tier_function and kinds.isdisjoint(self._functions_kinds):
            return NO_IDENTITIES, NO_IDENTITIES
        identities: AppIdentities = {}
        awaitables: AppIdentities = {}
        for kind, function in self._functions.items():
            if kind in kinds or kind == "tier":
                try:
                    value = function(request)
                    if type(value) is not str and isawaitable(value):
                        awaitables[kind] = value
                    elif (identity := self._normalize(kind, value)) is not None:
                        identities[kind] = identity
                except Exception:
                    # Falls back to the address, rather than admitting the request or answering 500.
                    self._log(kind, "failed", exc_info=True)
        return identities, awaitables

    async def wait_for(self, awaitables: AppIdentities) -> AppIdentities:
        """Await the results of the app's asynchronous functions."""
        identities: AppIdentities = {}
        for kind, awaitable in awaitables.items():
            try:
                identity = self._normalize(kind, await awaitable)
            except Exception:
                self._log(kind, "failed", exc_info=True)
            else:
                if identity is not None:
                    identities[kind] = identity
        return identities

    def fingerprint(self, api_key: str) -> str:
        """The hash under which an API key is counted and blocked; a value that is a hash already is returned as is."""
        return self._api_keys.fingerprint(api_key)

    def _normalize(self, kind: str, value: Any) -> str | None:
        if isinstance(value, str):
            text = str.__str__(value)  # ignores an overridden __str__, as of enums or Django's SafeString
        elif type(value) is int:
            text = str(value)
        else:
            if value is not None:  # its content may be a secret, or large
                self._log(kind, f"returned {type(value).__name__}, expected str, int or None")
            return None
        return self._api_keys.hashed(text) if kind == "api_key" else text or None

    def _add_api_key(self, request: RequestInfo, who: dict[str, str]) -> bool:
        """Add the API key, if any. Returns False for a request that must not be cached: a header has no valid key, an
        unknown one where only known keys count, or several lines.

        A request may have a key in each header. A key that the policy names takes precedence, so that a made-up key
        beside a valid one does not get its own counter; otherwise the first one counts.
        """
        keys: list[str] = []
        line_count = 0
        for name, parse in self._key_headers:
            lines = request.header(name)
            line_count += len(lines)
            found = list(filter(None, map(parse, lines[:MAX_KEY_LINES])))
            if len(lines) > 1:
                # Frameworks differ in which line they accept. The request is blocked if any of the keys is.
                who["api_key"] = AMBIGUOUS
                who[OTHER_API_KEYS] = " ".join(dict.fromkeys([*keys, *found]))
                return False
            keys += [key for key in found if self._known_keys is None or key in self._known_keys]
        if keys:
            counted = who["api_key"] = next((key for key in keys if key in self._vouched_keys), keys[0])
            if others := [key for key in keys if key != counted]:
                who[OTHER_API_KEYS] = " ".join(others)
        return len(keys) == line_count

    def _log(self, kind: str, event: str, *, exc_info: bool = False) -> None:
        now = monotonic()
        if now - self._logged_at.get(kind, -inf) >= LOG_INTERVAL_S:
            self._logged_at[kind] = now
            logger.error("identities[%r] %s; the request is counted without it", kind, event, exc_info=exc_info)
