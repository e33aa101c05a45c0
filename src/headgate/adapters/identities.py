"""Who sends a request: its address, its API key, and what the app's own functions say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from headgate.errors import InvalidConfiguration
from headgate.policy.addresses import Addresses
from headgate.policy.snapshot import ALL_API_KEYS

if TYPE_CHECKING:
    from headgate.adapters.way import Arrival
    from headgate.policy.credentials import ApiKeys
    from headgate.policy.model import IdentitySettings

__all__ = ["AMBIGUOUS", "NOT_YET_TOLD", "Identities", "IdentityFunction", "Known"]

logger = logging.getLogger("headgate")

K = TypeVar("K")
V = TypeVar("V")

IdentityFunction: TypeAlias = Callable[[Any], Any]
"""Given the `Arrival`, says who sends it: text, a whole number, or None; or gives an awaitable of these."""


_Sent: TypeAlias = tuple[frozenset[str], str | None, tuple[str, ...], str, int | None]
"""What identities are read from: the kinds, the peer, the forwarding lines, and where an API key stands."""

AMBIGUOUS: Final = "ambiguous"
"""The one API key of all requests that send several: a client who is served under either gets no counter of its own."""

NOT_YET_TOLD: Final = "not yet told"
"""Under which the kinds stand whose values are still to be awaited."""

MOST_LINES: Final = 16
"""Of a header in which one was meant to stand; a request with more is somebody's game, and counted as ambiguous."""

MOST_KNOWN: Final = 4096
PATIENCE: Final = 16 * MOST_KNOWN
"""How many strangers are let go while no more are kept: a flood of them makes requests no dearer than they would be
if nobody was kept, and who is busy is kept after the next start."""

LONGEST_KNOWN: Final = 256
"""In characters of the peer and of forwarding lines: about two megabytes of known clients, whatever they send."""

OUR_OWN: Final = frozenset({"address", "ip", "subnet", "endpoint", "client", "global"})
"""The kinds that no function tells."""

QUIET: Final = 1.0
"""Seconds between two words on the same function in the log: clients may be able to make it fail."""


class Known(dict[K, V]):
    """What was worked out for clients that come often: a dict that nobody writes to before `has_room`."""

    __slots__ = ("_strangers",)

    def __init__(self) -> None:
        super().__init__()
        self._strangers = 0

    def has_room(self) -> bool:
        """Whether a stranger can be kept; to be asked once for each. After many who could not, all start anew."""
        if len(self) < MOST_KNOWN:
            return True
        self._strangers += 1
        if self._strangers >= PATIENCE:
            self._strangers = 0
            self.clear()
        return False


class Identities:
    """Reads the identities of requests, those that are asked for only."""

    def __init__(
        self, settings: IdentitySettings, api_keys: ApiKeys, functions: Mapping[str, IdentityFunction] | None = None
    ) -> None:
        self._addresses = Addresses(settings)
        self._forwarded_by = settings.forwarded_by if settings.proxies else None
        self._api_keys = api_keys
        self._places: list[tuple[str, Callable[[str], str | None]]] = []
        """The headers in which a key may stand, and how it is read there."""
        if settings.api_key_header is not None:
            self._places.append((settings.api_key_header, api_keys.from_header))
        if settings.bearer_token:
            self._places.append(("authorization", api_keys.from_bearer))
        self._known: Known[_Sent, dict[str, Any]] = Known()
        """The identities of busy clients, by what they were read from. Of API keys that is what Python's own hash makes
        of them: the keys themselves are not kept."""
        self._functions = dict(functions or {})
        self._kinds_told = frozenset(self._functions)
        self._tells_tier = "tier" in self._functions
        """Which is wanted for every request, whatever its limits count by."""
        self._complained: dict[str, float] = {}
        """When something was last said about each function."""
        if taken := sorted(OUR_OWN & self._functions.keys()):
            raise InvalidConfiguration(
                f"no function is asked for {taken[0]!r}, which is not the app's to say; give it another name, "
                "or name your proxies under identity: in the policy"
            )

    def read(self, arrival: Arrival, kinds: frozenset[str]) -> dict[str, Any]:
        """The request's identities of these kinds, its address always; for some there may be something to await."""
        forwarded = tuple(arrival.header(self._forwarded_by)) if self._forwarded_by is not None else ()
        place, line = "", None
        if "api_key" in kinds and "api_key" not in self._kinds_told:
            for name, read in self._places:  # noqa: B007 - used below, where a line was found
                lines = arrival.header(name)
                if lines:
                    place, line = name, hash(lines[0]) if len(lines) == 1 else None
                    break
        sent = (kinds, arrival.peer, forwarded, place, line)
        who = self._known.get(sent)
        if who is None:
            who = self._addresses_of(arrival.peer, forwarded, kinds)
            key = read(lines[0]) if line is not None else None
            if key is not None:
                who["api_key"] = key
            elif place:  # several lines, or one without a key, after which others count: `sent` does not say which
                self._read_api_key(arrival, who)
            is_all_sent = key is not None or not place
            if (
                is_all_sent
                and self._known.has_room()
                and sum(map(len, (arrival.peer or "", *forwarded))) <= LONGEST_KNOWN
            ):
                self._known[sent] = who
        if self._tells_tier or not kinds.isdisjoint(self._kinds_told):
            who = {**who}
            for kind, function in self._functions.items():
                if kind in kinds or kind == "tier":
                    self._ask(kind, function, arrival, who)
        return who

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

    def _addresses_of(self, peer: str | None, forwarded: Sequence[str], kinds: frozenset[str]) -> dict[str, Any]:
        addresses = self._addresses
        address = addresses.client(peer, forwarded)
        who = {"address": address, "ip": addresses.identity(address)}
        if "subnet" in kinds:
            who["subnet"] = addresses.subnet(address)
        return who

    def _read_api_key(self, arrival: Arrival, who: dict[str, Any]) -> None:
        for name, read in self._places:
            lines = arrival.header(name)
            if len(lines) > 1:
                # Which of them would the app believe? Whoever sends one that is blocked is blocked, in any case.
                who["api_key"] = AMBIGUOUS
                who[ALL_API_KEYS] = " ".join(filter(None, map(read, lines[:MOST_LINES])))
                return
            if lines and (key := read(lines[0])) is not None:
                who["api_key"] = key
                return

    def _ask(self, kind: str, function: IdentityFunction, arrival: Arrival, who: dict[str, Any]) -> None:
        try:
            value = function(arrival)
            if type(value) is not str and isawaitable(value):
                who.setdefault(NOT_YET_TOLD, []).append(kind)
            else:
                value = self.checked(kind, value)
        except Exception:
            # Who cannot be told is counted by address: neither let through, nor answered by a 500.
            self._complain(kind, "failed", with_traceback=True)
            return
        if value is not None:
            who[kind] = value

    def _complain(self, kind: str, what: str, *, with_traceback: bool = False) -> None:
        now = monotonic()
        if now - self._complained.get(kind, -inf) >= QUIET:
            self._complained[kind] = now
            logger.error(
                "the function for %r %s: the request is counted without it", kind, what, exc_info=with_traceback
            )
