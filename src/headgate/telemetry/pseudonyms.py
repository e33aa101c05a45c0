"""Pseudonyms of clients: keyed hashes of their identities, and labels for display."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.errors import InvalidConfiguration
from headgate.gate.options import SECRET_VARIABLE
from headgate.policy.addresses import Networks, canonical
from headgate.policy.api_keys import PREFIX, ApiKeyHasher, IdentityHashes
from headgate.policy.model import NET_SUFFIX
from headgate.policy.snapshot import AMBIGUOUS, CLIENT_KINDS, LISTED, OTHER_API_KEYS, client_kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headgate.gate.event_stream import DecisionSource
    from headgate.keys import Key
    from headgate.policy.model import Policy
    from headgate.policy.snapshot import Identities

__all__ = ["EVERYBODY", "LABEL", "NodePseudonyms", "Pseudonym", "Pseudonymizer", "checked_secret", "label_key"]

LABEL: Final = "label"
"""The kind of keys that are labels."""

NOT_IDENTITIES: Final = frozenset({"address", "subnet", "tier", LISTED, OTHER_API_KEYS})
"""Entries of `Identities` that do not identify a client."""

MAX_CACHED: Final = 10_000
MAX_LABEL_LENGTH: Final = 200
SHORT_HASH_DIGITS: Final = 8


class Pseudonym(NamedTuple):
    """The pseudonym of a client, and all keys by which its records can be found."""

    kind: str
    key: str
    label: str
    kinds: tuple[str, ...]
    keys: tuple[str, ...]


class Pseudonymizer:
    """Computes pseudonyms. With the gate's secret, API keys have the same hashes as in the policy."""

    def __init__(self, secret: str | bytes | None = None, *, show: Collection[str] = ("tenant",)) -> None:
        if "api_key" in show:
            raise InvalidConfiguration("API keys are never shown: leave 'api_key' out of show")
        self._show = frozenset(show)
        given = checked_secret(secret)
        self._api_keys = ApiKeyHasher(given)
        self.key = IdentityHashes(given)
        """The keyed hash of a kind and a normalised identity; API keys have the same hash in policies."""
        self._cache: dict[tuple[str, ...], Pseudonym] = {}
        self._labels_of: Policy | None = None
        self._labels: Mapping[str, str] = {}
        self._networks: Networks[str] | None = None

    def hash_of(self, kind: str, value: str) -> str:
        """The keyed hash of an identity as entered by a person: a raw API key, or an address in any notation."""
        if kind == "api_key" or value.startswith(PREFIX):
            return self._api_keys.fingerprint(value)  # unchanged if it is a hash already
        return self.key(kind, (canonical(value) or value) if kind == "ip" else value)

    def pseudonym(self, who: tuple[str, ...], policy: Policy | None = None) -> Pseudonym:
        """The pseudonym of a request's client, labelled by a policy. `who` has first all kinds, then all values."""
        if policy is not self._labels_of:
            self._load_labels(policy)
        cached = self._cache.get(who)
        if cached is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            half = len(who) // 2
            cached = self._cache[who] = self._compute(dict(zip(who[:half], who[half:], strict=True)))
        return cached

    def known_identities(self, policy: Policy) -> dict[str, tuple[str, str]]:
        """The identities in a policy, by their hashes: kind and value, of API keys the hash."""
        named = [*(each.identity for each in policy.clients), *(each.identity for each in policy.overrides)]
        keyed = [(self.hash_of(*identity), identity) for identity in named]
        return {key: (kind, key if kind == "api_key" else value) for key, (kind, value) in keyed}

    def _compute(self, who: Identities) -> Pseudonym:
        kinds = [kind for kind in who if kind not in NOT_IDENTITIES]
        keys = [self.key(kind, who[kind]) for kind in kinds]
        if who.get("address") != who.get("ip"):  # counted by its network: found by either
            kinds.append("ip")
            keys.append(self.key("ip", who["address"]))
        if OTHER_API_KEYS in who:
            several = who[OTHER_API_KEYS].split()
            kinds += ["api_key"] * len(several)
            keys += several
        kind = client_kind(who)
        key = keys[kinds.index(kind)]
        label, names = self._label(kind, who, key, keys)
        kinds += [LABEL] * len(names)
        return Pseudonym(kind, key, label, tuple(kinds), (*keys, *names))

    def _label(self, kind: str, who: Identities, key: str, keys: list[str]) -> tuple[str, list[str]]:
        """The label of a client, and the keys of labels by which it can be found."""
        label = next((self._labels[each] for each in (key, *keys) if each in self._labels), None)
        if label is None and self._networks is not None and "address" in who:
            label = self._networks.find(who["address"])
        if label is not None:
            return label, [label_key(label)]
        value = who[kind]
        if kind in self._show:
            shown = _printable(value)
            return f"{kind} {shown}", [label_key(shown)]
        if kind == "ip":
            return f"ip {_network_of(value)}", []
        if value == AMBIGUOUS and kind == "api_key":
            return "several API keys at once", []
        return _short(kind, key), []

    def _load_labels(self, policy: Policy | None) -> None:
        named = [(*each.identity, each.label) for each in policy.clients if each.label] if policy is not None else []
        networks = {value: label for kind, value, label in named if kind == "ip"}
        self._networks = Networks(networks) if networks else None
        self._labels = {self.hash_of(kind, value): label for kind, value, label in named if kind != "ip"}
        self._labels_of = policy
        self._cache.clear()


def label_key(label: str) -> str:
    """The key of a label, independent of case and spacing."""
    return f"{LABEL}:{' '.join(label.casefold().split())[:MAX_LABEL_LENGTH]}"


def checked_secret(secret: str | bytes | None) -> bytes:
    """The secret as bytes; by default, from the environment."""
    given = secret if secret is not None else os.environ.get(SECRET_VARIABLE)
    if not given:
        raise InvalidConfiguration(
            "clients are stored as keyed hashes, which need a secret: give secret=, or set "
            f"{SECRET_VARIABLE}, to the one of the gate"
        )
    return given.encode() if isinstance(given, str) else given


def _network_of(address: str) -> str:
    if ":" in address:
        return ":".join(address.partition("::")[0].split(":")[:3]) + ":*"
    return f"{address.rpartition('.')[0]}.*" if "." in address else address


def _short(kind: str, key: str) -> str:
    return f"{kind} {key[: len(PREFIX) + SHORT_HASH_DIGITS]}"


def _printable(text: str) -> str:
    return "".join([sign if sign.isprintable() else "?" for sign in text[:MAX_LABEL_LENGTH]])


EVERYBODY = Pseudonym("global", "", "everybody", (), ())
"""The client of a limit with one counter for all."""


class NodePseudonyms:
    """Pseudonyms for status reports, labelled by the policy in force. Not thread-safe."""

    def __init__(self, clients: Pseudonymizer) -> None:
        self._clients = clients
        self._policy: Policy | None = None
        self._by: dict[str, tuple[str, ...]] = {}
        """The kinds of identity that each limit counts by."""

    def use(self, policy: Policy) -> None:
        """Use the labels of another policy."""
        if policy is not self._policy:
            self._policy = policy
            self._by = {rule.name: tuple(rule.by) for rule in policy.rules}

    def of_client(self, who: Identities) -> Pseudonym:
        """The pseudonym of a request's client. Addresses are shown as networks with a part of their hash."""
        found = self._clients.pseudonym((*who, *who.values()), self._policy)
        if found.kind != "ip" or not (found.label.startswith("ip ") and found.label.endswith("*")):
            return found
        return found._replace(label=f"{found.label} ({found.key.removeprefix(PREFIX)[:SHORT_HASH_DIGITS]})")

    def hot_counters(self, gate: DecisionSource, limit: int) -> list[list[Any]]:
        """The hottest counters of a gate: name of the limit, kind, key, label and requests per second."""
        rates: Counter[tuple[str, ...]] = Counter()
        for key, per_second in gate.hot_counters():
            rates[key.limit.name, *self.of_counter(key)[:3]] += per_second
        return [[*at, rate] for at, rate in rates.most_common(limit)]

    def of_counter(self, key: Key) -> Pseudonym:
        """The pseudonym of the client that a counter counts, from the parts of its key."""
        parts = [str(part) for part in key.parts]
        if not parts:
            return EVERYBODY
        if key.limit.name.endswith(NET_SUFFIX):  # its first part is the address
            return self.of_client({"address": parts[0], "ip": parts[0]})
        if parts[0] == "" and len(parts) == 3:  # by another identity, as the request lacks the limit's own
            who = {parts[1]: parts[2]}
        else:
            who = _identities(self._by.get(key.limit.name, ()), parts) or {"other": "|".join(parts)}
        address = who.get("ip", "")
        if any(who.get(kind) for kind in CLIENT_KINDS):
            return self.of_client({"address": address, "ip": address, **who})
        kind, value = next(iter(who.items()))
        hashed = self._clients.key(kind, value)
        return Pseudonym(kind, hashed, value if kind == "endpoint" else _short(kind, hashed), (), ())


def _identities(by: tuple[str, ...], parts: list[str]) -> dict[str, str]:
    """The identities in the parts of a counter's key, by kind; empty if they do not match. `client` has two parts."""
    kinds = list(by)
    if "client" in by:
        at = kinds.index("client")
        kinds[at : at + 1] = parts[at : at + 1]
        parts = parts[:at] + parts[at + 1 :]
    return dict(zip(kinds, parts, strict=True)) if len(kinds) == len(parts) else {}
