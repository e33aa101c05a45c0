"""Who a client is, without saying it: identities as keyed hashes, and labels that may be shown."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidConfiguration
from headgate.gate.base import SECRET_VARIABLE
from headgate.policy.addresses import Networks, canonical
from headgate.policy.api_keys import PREFIX, ApiKeyHasher, IdentityHashes
from headgate.policy.model import NET_SUFFIX
from headgate.policy.snapshot import AMBIGUOUS, CLIENT_KINDS, OTHER_API_KEYS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headgate.gate.base import GateBase
    from headgate.keys import Key
    from headgate.policy.model import Policy
    from headgate.policy.snapshot import Identities

__all__ = ["EVERYBODY", "LABEL", "NodePseudonyms", "Pseudonym", "Pseudonymizer", "label_key"]

LABEL: Final = "label"
"""The kind of those keys that are labels."""

NO_CLIENTS: Final = frozenset({"address", "subnet", "tier", OTHER_API_KEYS})
"""What stands among a request's identities, and is nobody's own."""

MOST_KNOWN: Final = 10_000
LONGEST_LABEL: Final = 200
SHORT: Final = 8
"""Digits of a hash that tell clients apart for people."""


class Pseudonym(NamedTuple):
    """A request's client, and all keys under which what became of it can be found."""

    kind: str
    key: str
    label: str
    kinds: tuple[str, ...]
    keys: tuple[str, ...]


class Pseudonymizer:
    """Names clients by keyed hashes. The secret is the gate's own: API keys have the same hashes here as there."""

    def __init__(self, secret: str | bytes | None = None, *, show: Collection[str] = ("tenant",)) -> None:
        if "api_key" in show:
            raise InvalidConfiguration("API keys are never shown: leave 'api_key' out of show")
        self._show = frozenset(show)
        given = _given(secret)
        self._api_keys = ApiKeyHasher(given)
        self._hashes = IdentityHashes(given)
        self._named: dict[tuple[str, ...], Pseudonym] = {}
        self._labels_of: Policy | None = None
        self._labels: Mapping[str, str] = {}
        self._networks: Networks[str] | None = None

    def key(self, kind: str, value: str) -> str:
        """The keyed hash of an identity; that of an API key is the one that policies name it by."""
        return self._hashes(kind, value)

    def written(self, kind: str, value: str) -> str:
        """The keyed hash of an identity that a person wrote: of an API key as it is, of an address in any spelling."""
        if value.startswith(PREFIX):
            return self._api_keys.fingerprint(value)  # one that is a hash already stays
        if kind == "api_key":
            return self._api_keys.fingerprint(value)
        return self.key(kind, (canonical(value) or value) if kind == "ip" else value)

    def named(self, who: tuple[str, ...], policy: Policy | None = None) -> Pseudonym:
        """Who sent a request, with the label that the policy gives it: of first all kinds, and then all values."""
        if policy is not self._labels_of:
            self._learn(policy)
        named = self._named.get(who)
        if named is None:
            if len(self._named) >= MOST_KNOWN:
                self._named.clear()  # busy clients are back with their next request
            half = len(who) // 2
            named = self._named[who] = self._newly_named(dict(zip(who[:half], who[half:], strict=True)))
        return named

    def known_identities(self, policy: Policy) -> dict[str, tuple[str, str]]:
        """Everybody whom a policy names, by key: kind and value, of API keys the hash."""
        named = [*(each.identity for each in policy.clients), *(each.identity for each in policy.overrides)]
        keyed = [(self.written(*identity), identity) for identity in named]
        return {key: (kind, key if kind == "api_key" else value) for key, (kind, value) in keyed}

    def _newly_named(self, who: Identities) -> Pseudonym:
        kinds = [kind for kind in who if kind not in NO_CLIENTS]
        keys = [self.key(kind, who[kind]) for kind in kinds]
        if who["address"] != who["ip"]:  # one of a network that is counted as one: found by either
            kinds.append("ip")
            keys.append(self.key("ip", who["address"]))
        if OTHER_API_KEYS in who:
            several = who[OTHER_API_KEYS].split()
            kinds += ["api_key"] * len(several)
            keys += several
        kind = next((each for each in CLIENT_KINDS if who.get(each)), "ip")
        key = keys[kinds.index(kind)]
        label, names = self._label(kind, who, key, keys)
        kinds += [LABEL] * len(names)
        return Pseudonym(kind, key, label, tuple(kinds), (*keys, *names))

    def _label(self, kind: str, who: Identities, key: str, keys: list[str]) -> tuple[str, list[str]]:
        """What the client is called, and the names by which it can be looked for."""
        if self._labels:
            label = next((self._labels[each] for each in (key, *keys) if each in self._labels), None)
            if label is not None:
                return label, [label_key(label)]
        if self._networks is not None and (label := self._networks.find(who["address"])) is not None:
            return label, [label_key(label)]
        value = who[kind]
        if kind in self._show:
            shown = _printable(value)
            return f"{kind} {shown}", [label_key(shown)]
        if kind == "ip":
            return f"ip {_blurred(value)}", []
        if value == AMBIGUOUS and kind == "api_key":
            return "several API keys at once", []
        return f"{kind} {key[: len(PREFIX) + SHORT]}", []

    def _learn(self, policy: Policy | None) -> None:
        labelled = [client for client in policy.clients if client.label] if policy is not None else []
        networks = {each.identity.value: each.label or "" for each in labelled if each.identity.kind == "ip"}
        self._networks = Networks(networks) if networks else None
        self._labels = {
            self.written(*each.identity): each.label or "" for each in labelled if each.identity.kind != "ip"
        }
        self._labels_of = policy
        self._named.clear()


def label_key(label: str) -> str:
    """The key under which a label is found, however it is spelled."""
    return f"{LABEL}:{' '.join(label.casefold().split())[:LONGEST_LABEL]}"


def _given(secret: str | bytes | None) -> bytes:
    given = secret if secret is not None else os.environ.get(SECRET_VARIABLE)
    if not given:
        raise InvalidConfiguration(
            "clients are logged as keyed hashes, and there is no secret to key them with: give secret=, or set "
            f"{SECRET_VARIABLE}, to the gate's own"
        )
    return given.encode() if isinstance(given, str) else given


def _blurred(address: str) -> str:
    """The network of an address, which many share."""
    if ":" in address:
        return ":".join(address.partition("::")[0].split(":")[:3]) + ":*"
    return f"{address.rpartition('.')[0]}.*" if "." in address else address


def _printable(text: str) -> str:
    return "".join([sign if sign.isprintable() else "?" for sign in text[:LONGEST_LABEL]])


EVERYBODY = Pseudonym("global", "", "everybody", (), ())
"""Whom a limit counts that has one counter for all."""


class NodePseudonyms:
    """Names clients by the policy in force. Belongs to one thread."""

    def __init__(self, clients: Pseudonymizer) -> None:
        self._clients = clients
        self._policy: Policy | None = None
        self._by: dict[str, tuple[str, ...]] = {}
        """What each limit counts by."""

    def use(self, policy: Policy) -> None:
        """Name them by this policy from now on."""
        if policy is not self._policy:
            self._policy = policy
            self._by = {rule.name: tuple(rule.by) for rule in policy.rules}

    def of(self, who: Identities) -> Pseudonym:
        """The client that sent a request. Of an address only the network is shown, which many share: a piece of its
        hash tells them apart."""
        named = self._clients.named((*who, *who.values()), self._policy)
        is_blurred = named.kind == "ip" and named.label.startswith("ip ") and named.label.endswith("*")
        if not is_blurred:
            return named
        return named._replace(label=f"{named.label} ({named.key.removeprefix(PREFIX)[:SHORT]})")

    def hot(self, gate: GateBase, most: int) -> list[list[Any]]:
        """The counters of a gate whose tokens are prepaid, the busiest first: limit, kind, key, label and how many
        requests a second."""
        rates: dict[tuple[str, str, str, str], int] = {}
        for key, per_second in gate.hot_counters():
            name = self.counted(key)
            at = key.limit.name, name.kind, name.key, name.label
            rates[at] = rates.get(at, 0) + per_second
        busiest = sorted(rates.items(), key=lambda item: -item[1])[:most]
        return [[*at, rate] for at, rate in busiest]

    def counted(self, key: Key) -> Pseudonym:
        """Whom a counter counts, out of the parts that it is made of."""
        parts = [str(part) for part in key.parts]
        if not parts:
            return EVERYBODY
        by = self._by.get(key.limit.name)
        if key.limit.name.endswith(NET_SUFFIX):  # the address comes first
            return self.of({"address": parts[0], "ip": parts[0]})
        if parts[0] == "" and len(parts) == 3:  # counted by the address, as what the limit counts by was not there
            who = {parts[1]: parts[2]}
        else:
            who = _identities(by or (), parts) or {"other": "|".join(parts)}
        address = who.get("ip", "")
        if any(who.get(kind) for kind in CLIENT_KINDS):
            return self.of({"address": address, "ip": address, **who})
        kind, value = next(iter(who.items()))
        hashed = self._clients.key(kind, value)
        return Pseudonym(kind, hashed, value if kind == "endpoint" else f"{kind} {hashed[: 5 + SHORT]}", (), ())


def _identities(by: tuple[str, ...], parts: list[str]) -> dict[str, str]:
    """What stands in the parts of a counter, by kind: a limit by client writes two of them, the kind and the value.
    Nothing, if they are not those of such a limit."""
    kinds = list(by)
    if "client" in by:
        at = kinds.index("client")
        kinds[at : at + 1] = parts[at : at + 1]
        parts = parts[:at] + parts[at + 1 :]
    return dict(zip(kinds, parts, strict=True)) if len(kinds) == len(parts) else {}
