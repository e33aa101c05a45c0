"""Who sends a request: its address, its API key, and what the app's own functions say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from inspect import isawaitable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headgate.errors import InvalidConfiguration
from headgate.policy.addresses import Addresses
from headgate.policy.snapshot import AMBIGUOUS, OTHER_API_KEYS

if TYPE_CHECKING:
    from headgate.gate.admission import RequestInfo
    from headgate.policy.api_keys import ApiKeyHasher
    from headgate.policy.model import IdentitySettings

__all__ = ["NOBODY", "PENDING", "AppIdentities", "IdentityExtractor", "IdentityFunction", "RawIdentity"]

logger = logging.getLogger("headgate")

IdentityFunction: TypeAlias = Callable[[Any], Any]
"""Given the `RequestInfo`, says who sends it: text, a whole number, or None; or gives an awaitable of these."""


RawIdentity: TypeAlias = tuple[
    Any, frozenset[str], str | None, tuple[str, ...], str | tuple[str, ...], int | tuple[int, ...]
]
"""The parts of a request that its identities depend on: the route and the kinds that it needs, the peer, the forwarding
lines, the header that may contain an API key, and Python's hash of that line. Where several headers may, both are
tuples. The keys themselves are not included."""

AppIdentities: TypeAlias = dict[str, Any]
"""What the app's own functions say of a request, by kind."""

NOBODY: Final[AppIdentities] = {}
"""Where no function is asked."""

PENDING: Final = "not yet told"
"""Under which the kinds stand whose values are still to be awaited."""

MOST_LINES: Final = 16
"""Of a header in which one was meant to stand; a request with more is somebody's game, and counted as ambiguous."""

OUR_OWN: Final = frozenset({"address", "ip", "subnet", "endpoint", "client", "global"})
"""The kinds that no function tells."""

QUIET: Final = 1.0
"""Seconds between two words on the same function in the log: clients may be able to make it fail."""


class IdentityExtractor:
    """Reads the identities of requests, those that are asked for only."""

    def __init__(
        self,
        settings: IdentitySettings,
        api_keys: ApiKeyHasher,
        functions: Mapping[str, IdentityFunction] | None = None,
        known_keys: Container[str] | None = None,
        vouched_keys: Container[str] = (),
    ) -> None:
        """`known_keys` are the hashes of all keys that are keys; None: whatever is sent may be one. Of several keys in
        one request, one of `vouched_keys` counts."""
        self._addresses = Addresses(settings)
        self._forwarded_by = settings.forwarded_by if settings.proxies else None
        self._api_keys = api_keys
        self._known_keys = known_keys
        self._vouched_keys = vouched_keys
        self._places: list[tuple[str, Callable[[str], str | None]]] = []
        """The headers in which a key may stand, and how it is read there."""
        if settings.api_key_header is not None:
            self._places.append((settings.api_key_header, api_keys.from_header))
        if settings.bearer_token:
            self._places.append(("authorization", api_keys.from_bearer))
        self._functions = dict(functions or {})
        self._kinds_told = frozenset(self._functions)
        if "api_key" in self._kinds_told:
            self._places.clear()
        self._tells_tier = "tier" in self._functions
        """Which is wanted for every request, whatever its limits count by."""
        self._complained: dict[str, float] = {}
        """When something was last said about each function."""
        if taken := sorted(OUR_OWN & self._functions.keys()):
            raise InvalidConfiguration(
                f"no function is asked for {taken[0]!r}, which is not the app's to say; give it another name, "
                "or name your proxies under identity: in the policy"
            )

    @property
    def sources(self) -> tuple[str | None, tuple[str, ...], tuple[str, ...]] | None:
        """What `sent` and `told` look at: the forwarding header, those in which an API key may stand, and the kinds
        that the app tells. None where it tells something of every request."""
        places = tuple(name for name, _ in self._places)
        return None if self._tells_tier else (self._forwarded_by, places, tuple(self._kinds_told))

    def sent(self, arrival: RequestInfo, route: Any, kinds: frozenset[str]) -> RawIdentity | None:
        """The parts of a request that its identities depend on: equal for requests of the same client. None for a
        request with several lines of a header."""
        forwarded = tuple(arrival.header(self._forwarded_by)) if self._forwarded_by is not None else ()
        names: list[str] = []
        hashes: list[int] = []
        if "api_key" in kinds:
            for name, _ in self._places:
                lines = arrival.header(name)
                if len(lines) > 1:
                    return None
                if lines:
                    names.append(name)
                    hashes.append(hash(lines[0]))
        if len(names) > 1:
            return route, kinds, arrival.peer, forwarded, tuple(names), tuple(hashes)
        return route, kinds, arrival.peer, forwarded, names[0] if names else "", hashes[0] if hashes else 0

    def told(self, arrival: RequestInfo, kinds: frozenset[str]) -> AppIdentities:
        """What the app says of the request's identities of these kinds; for some there may be something to await."""
        if not self._tells_tier and kinds.isdisjoint(self._kinds_told):
            return NOBODY
        told: AppIdentities = {}
        for kind, function in self._functions.items():
            if kind in kinds or kind == "tier":
                self._ask(kind, function, arrival, told)
        return told

    def read(self, arrival: RequestInfo, kinds: frozenset[str]) -> tuple[dict[str, str], bool]:
        """The request's identities of these kinds, its address always, but for what the app says; and whether all
        requests that have sent the same have the same."""
        addresses = self._addresses
        forwarded = tuple(arrival.header(self._forwarded_by)) if self._forwarded_by is not None else ()
        address = addresses.client(arrival.peer, forwarded)
        who = {"address": address, "ip": addresses.identity(address)}
        if "subnet" in kinds:
            who["subnet"] = addresses.subnet(address)
        return who, "api_key" not in kinds or self._read_api_key(arrival, who)

    def fingerprint(self, api_key: str) -> str:
        """The name that an API key is counted by, or blocked by; one that is written as a hash stays."""
        return self._api_keys.fingerprint(api_key)

    def checked(self, kind: str, value: Any) -> str | None:
        """What a function said, as an identity: None where it is none."""
        if isinstance(value, str):
            text = str.__str__(value)  # the text itself, whatever its type makes of it: enums, Django's safe strings
        elif type(value) is int:
            text = str(value)
        else:
            if value is not None:  # not shown: it may be a secret, or a megabyte
                self._complain(kind, f"gave a {type(value).__name__}, which is neither text nor a whole number")
            return None
        return self._api_keys.hashed(text) if kind == "api_key" else text or None

    async def awaited(self, kind: str, value: Any) -> str | None:
        """What an asynchronous function said."""
        try:
            return self.checked(kind, await value)
        except Exception:
            self._complain(kind, "failed", with_traceback=True)
            return None

    def _read_api_key(self, arrival: RequestInfo, who: dict[str, str]) -> bool:
        """Add the API key, if there is one. False for a request that is not worth remembering: its lines have no key,
        a made-up one where only known keys count, or too many.

        A request may have a key in each header. One that the policy knows counts, so that nobody gets a new counter by
        sending a made-up key beside a valid one; of several others, the first. A line without a key is ignored.
        """
        keys: list[str] = []
        lines_read = 0
        for name, read in self._places:
            lines = arrival.header(name)
            lines_read += len(lines)
            found = list(filter(None, map(read, lines[:MOST_LINES])))
            if len(lines) > 1:
                # Nobody can tell which of them the app accepts. If any of them is blocked, so is the request.
                who["api_key"] = AMBIGUOUS
                who[OTHER_API_KEYS] = " ".join(dict.fromkeys([*keys, *found]))
                return False
            keys += [key for key in found if self._known_keys is None or key in self._known_keys]
        if keys:
            counted = who["api_key"] = next((key for key in keys if key in self._vouched_keys), keys[0])
            if others := [key for key in keys if key != counted]:
                who[OTHER_API_KEYS] = " ".join(others)
        return len(keys) == lines_read

    def _ask(self, kind: str, function: IdentityFunction, arrival: RequestInfo, told: AppIdentities) -> None:
        try:
            value = function(arrival)
            if type(value) is not str and isawaitable(value):
                told.setdefault(PENDING, []).append(kind)
            else:
                value = self.checked(kind, value)
        except Exception:
            # Who cannot be told is counted by address: neither let through, nor answered by a 500.
            self._complain(kind, "failed", with_traceback=True)
            return
        if value is not None:
            told[kind] = value

    def _complain(self, kind: str, what: str, *, with_traceback: bool = False) -> None:
        now = monotonic()
        if now - self._complained.get(kind, -inf) >= QUIET:
            self._complained[kind] = now
            logger.error(
                "the function for %r %s: the request is counted without it", kind, what, exc_info=with_traceback
            )
