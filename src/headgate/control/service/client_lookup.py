"""Client lookup: from typed text, hashes and labels to clients, and to descriptions of them for people.

A text may be an API key, whatever its kind is said to be. It is hashed first, no error repeats it, and a description
shows it in masked form only, next to its keyed hash.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config.queries import find_by_label, labels_of, rows_of_clients
from headgate.control.service import redaction
from headgate.control.service.effective_policy import ClientFacts
from headgate.control.service.errors import LogUnavailable, NotFound
from headgate.control.service.models import Actor, ClientRef, Page, View
from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.policy import scalars
from headgate.policy.addresses import Addresses, canonical
from headgate.policy.api_keys import PREFIX
from headgate.telemetry.pseudonyms import LABEL, Pseudonymizer, label_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.policy.model import Policy

__all__ = [
    "CUSTOMER_PREFIX", "KIND_NAMES", "MAX_MATCHES", "Candidate", "ClientLookup", "describe", "is_hash",
    "is_wide_network", "kind_name", "label_keys", "mask", "network_of", "noun_of", "require_network_role",
    "short_label",
]  # fmt: skip

KINDS: Final = ("tenant", "user", "api_key", "ip", "subnet")
"""The kinds of identity that always exist; a policy may count by others."""
NOT_CLIENT_KINDS: Final = ("endpoint", "client", "global", "tier", "address")
MAX_TEXT_LENGTH: Final = 4200
"""An API key has at most 4096 characters."""
MAX_MATCHES: Final = 20
MAX_RECORDS_SEARCHED: Final = 1000
"""Newest records of the decision log in whose labels a search looks for clients that have no settings."""

NOT_FOUND: Final = (
    "no such client is known here; say what it is with tenant=..., user=..., ip=... or api_key=..., or give its hmac: "
    "hash"
)
CONTAINS_KEY: Final = "the text contains an API key; leave it out, or write its hmac: hash instead"
NOT_IN_URLS: Final = "this may be an API key, which must not appear in a URL; search for its hmac: hash"
NO_SECRET: Final = (
    "an API key is found by its keyed hash, which needs the secret of the gates: give it to the admin server, or write "
    "the hmac: hash"
)

_HASH: Final = re.compile(r"hmac:[0-9a-fA-F]*")
_KIND_AND_HASH: Final = re.compile(r"\b([a-z][a-z0-9_]*) (hmac:[0-9a-f]{32})\b")
_HEADER: Final = re.compile(r"(?:authorization:\s*)?bearer\s+(?=\S+$)|x-api-key:\s*(?=\S+$)", re.IGNORECASE)
"""The part of a pasted header that precedes the API key."""

KIND_NAMES: Final = {"api_key": "API key", "ip": "Address", "subnet": "Network", "label": "Client"}
MASK_HEAD: Final = 8
MASK_TAIL: Final = 4
SHORT_HASH: Final = 8
"""Hexadecimal digits of a keyed hash that are shown to people."""
CUSTOMER_PREFIX: Final = 64
"""The IPv6 prefix of which providers give each customer at least one."""
IPV4_IN_IPV6: Final = tuple(ip_network(each) for each in ("::/64", "64:ff9b::/96", "64:ff9b:1::/48"))
"""IPv6 networks whose last bits are IPv4 addresses, of many customers."""


@dataclass(frozen=True, slots=True)
class Candidate(View):
    """A client that a text can mean, and the requests that a block of it would match."""

    who: ClientRef
    label: str | None
    title: str
    """The client for people: "API key sk_live_…cdef", "Tenant acme"."""
    matches: str
    """The requests that belong to the client: "every address in 198.51.100.0/24 (256 addresses)"."""
    is_known: bool
    """True if the configuration or the decision log has seen this client."""


class ClientLookup:
    """Finds clients, and their labels and identities, in the configuration, the decision log and the node status."""

    def __init__(self, deps: ServiceDependencies, secret: str | bytes | None) -> None:
        """`secret` is that of the gates, HEADGATE_SECRET if it is None; without both, API keys cannot be found."""
        self._deps = deps
        self._pseudonymizer: Pseudonymizer | None = None
        try:
            self._pseudonymizer = Pseudonymizer(secret)
        except InvalidConfiguration:
            if secret is not None:
                raise

    def canonical(
        self, client: tuple[str, str], *, texts: Sequence[str | None] | None = None, allow_hash: bool = False
    ) -> ClientRef:
        """A client in its canonical spelling; InvalidInput if it cannot be one.

        `texts` are the texts that are stored with a change of this client: they must not contain its API key, and the
        client must not be a hash, which has no limits, unless `allow_hash` is true, as for blocks.
        """
        kind, value = client
        if not isinstance(kind, str) or not isinstance(value, str):
            raise InvalidInput("a client is a kind and a value, both text")
        if kind not in KINDS and kind not in (known := self._kinds()):
            raise InvalidInput(f"a client has one of the kinds {', '.join(known)}")
        if kind != "api_key" and is_hash(value):
            if texts is not None and not allow_hash:
                raise InvalidInput(f"we only store a hash of this {kind}: give the {kind} itself to change its limits")
            return ClientRef(kind, _check_hash(value))
        if kind == "api_key":
            if self._pseudonymizer is None and not is_hash(value):
                raise InvalidInput(NO_SECRET)
            found = _check_hash(value) if is_hash(value) else self._log_key(ClientRef(kind, scalars.api_key(value)))
            if found in self._hashes(redaction.words_like_keys(texts or ())):
                raise InvalidInput(CONTAINS_KEY)
            return ClientRef(kind, found)
        parse = {"ip": scalars.address, "subnet": scalars.subnet}.get(kind, scalars.identity)
        try:
            return ClientRef(kind, parse(value))
        except InvalidInput:
            is_address = kind in ("ip", "subnet")
            reason = _address_error(value) if is_address else f"invalid {kind}: give up to 500 printable characters"
            raise InvalidInput(reason) from None

    def resolve(self, client: ClientRef) -> ClientRef:
        """The canonical client, by its name where only a hash was given and the name is known."""
        return self.reveal(self.canonical(client))

    def facts(self, client: ClientRef, policy: Policy | None = None) -> ClientFacts:
        """The identities of a canonical client; those of an address depend on the policy."""
        kind, value = client
        keys = () if self._pseudonymizer is None and not is_hash(value) else (self._log_key(client),)
        if kind != "api_key" and is_hash(value):
            return ClientFacts(client, {kind: (value,)}, {}, keys, can_count=False)
        if kind != "ip":
            hashes = () if kind in ("api_key", "subnet") else keys  # a block may name others by their hash
            return ClientFacts(client, {kind: (value, *hashes)}, {kind: value}, keys, can_count=True)
        network = ip_network(value)
        addresses = Addresses(policy.identity) if policy is not None else None
        first = str(network.network_address)
        sent = {"address": first, "ip": addresses.identity(first) if addresses else first}
        subnet = () if addresses is None else (addresses.subnet(first),)
        pseudonymizer = self._pseudonymizer
        hashed = () if pseudonymizer is None else tuple({pseudonymizer.key("ip", each) for each in sent.values()})
        identities = {"ip": (*_networks_around(network), *hashed), "subnet": subnet}
        if network.num_addresses > 1:  # the log knows it only by its label
            return ClientFacts(client, identities, sent, (), can_count=False)
        return ClientFacts(client, identities, sent | {"subnet": subnet[0]} if subnet else sent, keys, can_count=True)

    def hashes_of(self, client: ClientRef) -> tuple[ClientRef, ...]:
        """The same client by its keyed hashes, under which a block may name it. Empty for API keys and networks."""
        if client.kind in ("api_key", "subnet") or is_hash(client.value) or is_network(client):
            return ()
        identities = self.facts(client, self._deps.current_policy().policy).identities.get(client.kind, ())
        return tuple([ClientRef(client.kind, value) for value in identities if is_hash(value)])

    def is_seen(self, client: ClientRef) -> bool | None:
        """True if the configuration, the decision log or a node knows this client. None if that is unknown: for
        addresses, most of which are new, and without a decision log."""
        if client.kind in ("ip", "subnet") or is_hash(client.value):
            return None
        if self._is_known(client):
            return True
        if self._pseudonymizer is None or self._deps.log.trouble is not None:
            return None
        return self._deps.status_label(self._log_key(client)) is not None

    def unseen_note(self, client: ClientRef) -> tuple[str, ...]:
        """A note for a change of a client that was never seen, whose name may be mistyped."""
        if self.is_seen(client) is not False:
            return ()
        return (f"No {noun_of(client.kind)} of this name was ever seen. Check the spelling.",)

    def find(self, text: str) -> ClientRef:
        """The client that a text identifies; NotFound, which does not repeat the text, if there is none.

        "tenant=acme" and the like say the kind; addresses, networks and hashes are recognized. Any other text is looked
        up as an API key, a tenant, a user, another kind that the policy counts by, and a label: first in the
        configuration, then in the log.
        """
        text = text.strip()
        if not 0 < len(text) <= MAX_TEXT_LENGTH or not text.isprintable():
            raise InvalidInput(f"name a client in up to {MAX_TEXT_LENGTH} printable characters")
        if is_hash(text):
            return self.reveal(self._find_by_hash(_check_hash(text)))
        kinds = self._kinds()
        kind, sign, value = text.partition("=")
        if sign and kind == LABEL:
            return self._find_by_label(value.strip())
        if sign and kind in kinds:
            return self.resolve(ClientRef(kind, value.strip()))
        if canonical(text) is not None or redaction.is_network_text(text, strict=False):
            return self.canonical(("ip", text if "/" in text else canonical(text) or text))
        # The API key first: a known key is not looked up as anything else.
        readings = [*self._key_reading(text), *_name_readings(text, kinds)]
        for client in filter(self._is_configured, readings):
            return client
        with suppress(NotFound):
            return self._find_by_label(text, in_log=False)
        for client in filter(self._is_logged, readings):
            return client
        with suppress(NotFound):
            return self._find_by_label(text)
        raise NotFound(NOT_FOUND if self._pseudonymizer is not None else f"{NOT_FOUND}. {NO_SECRET}")

    def candidates(self, text: str) -> list[Candidate]:
        """All clients that a text can mean, most likely first: the known ones, or else every possible kind.

        A text that is probably an API key is only read as one, so that it is not stored or shown as something else.
        """
        text = text.strip()
        if header := _HEADER.match(text):
            text = f"api_key={text[header.end() :]}"
        if not 0 < len(text) <= MAX_TEXT_LENGTH or not text.isprintable():
            raise InvalidInput(
                f"enter an address, a network, a name or an API key of up to {MAX_TEXT_LENGTH} characters"
            )
        if text == "*":
            raise InvalidInput("* is not a client: block one client or one network")
        kinds = self._kinds()
        kind, sign, value = (part.strip() for part in text.partition("="))
        if is_hash(text) or (sign and kind in (LABEL, *kinds)):
            key = value if kind == "api_key" and not is_hash(value) else None
            client = self.find(text)
            if key is None:
                self._refuse(redaction.words_like_keys([client.value]))
            return [self.describe(client, key=key)]
        if (address := canonical(text)) is not None:
            network = ip_network(address)
            customer = [] if network.version == 4 else [str(network.supernet(new_prefix=CUSTOMER_PREFIX))]
            return [self.describe(ClientRef("ip", each)) for each in (address, *customer)]
        if redaction.is_network_text(text, strict=False):
            canonical_text = str(ip_network(text, strict=False))
            address_part = [text.partition("/")[0]] if canonical_text != text.lower() and "/" in text else []
            return [self.describe(self.canonical(("ip", each))) for each in (canonical_text, *address_part)]
        readings, names = self._key_reading(text), _name_readings(text, kinds)
        is_key = redaction.looks_secret(text) or redaction.may_be_key(text, shortest=redaction.MIN_SECRET_LENGTH)
        if not is_key and not self._is_known_key(self._hashes(redaction.words_like_keys([text]))):
            readings = [*names, *readings]
        known = [each for each in readings if self._is_known(each)]
        with suppress(NotFound):
            known.append(self._find_by_label(text))
        if not known and not readings:
            neither = "this is neither a client's name nor a key"
            raise InvalidInput(NO_SECRET if self._pseudonymizer is None else neither)
        return [self.describe(each, key=text) for each in dict.fromkeys(known or readings)]

    def search_log(self, text: str) -> list[ClientRef]:
        """Clients in the newest records of the log whose label contains a text."""
        try:
            records = self._deps.log.decisions((), after="", before="", outcome=None, most=MAX_RECORDS_SEARCHED)
        except LogUnavailable:
            return []
        found = {
            ClientRef(record.client_kind, record.client): None
            for record in reversed(records)
            if text.casefold() in record.label.removeprefix(f"{record.client_kind} ").casefold()
        }
        return [self.reveal(client) for client in list(found)[:MAX_MATCHES]]

    def describe(self, client: ClientRef, *, key: str | None = None) -> Candidate:
        """Describe a client for people. `key` is the raw API key as it was typed, if it was."""
        label = self._configured_label(client) or self.pseudonym(client)
        return describe(client, label=label, key=key, is_known=self._is_known(client))

    def label_of(self, client: ClientRef) -> str | None:
        """The label of a client, or the pseudonym that the overview shows for a hash."""
        label = self._configured_label(client)
        return label or (None if client.kind == "api_key" else self.pseudonym(client))

    def name_of(self, client: ClientRef) -> str:
        """The name of a client in a sentence: its label, or "tenant acme", "address 203.0.113.9", "API key hmac:…"."""
        label = self._configured_label(client) or self.pseudonym(client)
        title = describe(client).title
        return label or (title if client.kind == "api_key" else title[:1].lower() + title[1:])

    def insert_names(self, text: str) -> str:
        """A text with client names in place of full hashes: "api_key Acme (hmac:12ab34cd…)"."""
        for kind, value in dict.fromkeys(_KIND_AND_HASH.findall(text)):
            label = self.label_of(ClientRef(kind, value))
            short = f"{value[:13]}…"
            text = text.replace(value, short if label is None else f"{label} ({short})")
        return text

    def pseudonym(self, client: ClientRef) -> str | None:
        """The name that the overview shows for a client of which only a hash is known: "192.0.2.* (b79fd189)"."""
        if not is_hash(client.value):
            return None
        record = self._deps.log.last(client.value)
        label = self._deps.status_label(client.value) or (None if record is None else record.label)
        return None if label is None else short_label(client.kind, client.value, label)

    def with_pseudonyms(self, page: Page[Any]) -> Page[Any]:
        """The same page with pseudonyms as the labels of clients of which only a hash is known."""
        items = [
            each if each.label or each.who.kind == "api_key" else replace(each, label=self.pseudonym(each.who))
            for each in page.items
        ]
        return replace(page, items=tuple(items))

    def refuse_keys(self, *texts: str | None) -> None:
        """InvalidInput if a text contains an API key: one that the configuration or the log knows, or that looks like
        one."""
        self._refuse(redaction.words_like_keys(texts))
        if any(redaction.looks_secret(text) for text in texts if text):
            raise InvalidInput(redaction.LOOKS_SECRET)

    def refuse_keys_in_document(self, text: str) -> None:
        """InvalidInput if a policy document contains an API key, which its comments and labels would store."""
        if redaction.looks_secret(text):
            raise InvalidInput(redaction.LOOKS_SECRET)
        words = redaction.words_like_keys([text], shortest=redaction.MIN_SECRET_LENGTH)
        self._refuse([word for word in words if any(letter.isdigit() for letter in word)])

    def searchable(self, text: str, is_listed: Callable[[str], bool]) -> str:
        """The search text to put into a URL in place of this one: the keyed hash if it contains an API key, or may be
        one and is not public; else the same text. `is_listed` returns True for a text that a list shows, which makes it
        public."""
        words = [word for word in redaction.words_like_keys([_HASH.sub(" ", text)]) if not is_hash(word)]
        suspects = [word for word in words if redaction.looks_secret(word) or self._is_known_key(self._hashes([word]))]
        if not suspects:
            unknown = [word for word in words if len(word) >= redaction.MIN_SECRET_LENGTH]
            if not unknown or is_listed(text):
                return text
            suspects = unknown
        hashes = self._hashes(suspects[:1])
        if not hashes:
            raise InvalidInput(NOT_IN_URLS if self._pseudonymizer is not None else f"{NOT_IN_URLS}. {NO_SECRET}")
        return hashes[0]

    def hash_as_key(self, text: str) -> str | None:
        """The keyed hash of a text if it were an API key; None if it cannot be one."""
        return next(iter(self._hashes([text] if text else [])), None)

    def _refuse(self, words: list[str]) -> None:
        if self._is_known_key(self._hashes(words)):
            raise InvalidInput(CONTAINS_KEY)

    def _is_known_key(self, hashes: Sequence[str]) -> bool:
        """True if the configuration or the log knows an API key with one of these hashes."""
        if not hashes:
            return False
        with self._deps.reading() as connection:
            rows = rows_of_clients(connection, {"api_key": hashes})
            entries = self._deps.base_policy(connection).entries
        is_configured = any(rows.values()) or any(("api_key", each) in entries for each in hashes)
        return is_configured or self._deps.log.last(*hashes) is not None

    def _hashes(self, texts: Iterable[str]) -> list[str]:
        """The keyed hashes of the texts that can be API keys."""
        found = []
        if self._pseudonymizer is not None:
            for word in texts:
                with suppress(InvalidInput):
                    found.append(self._pseudonymizer.hash_of("api_key", word))
        return found

    def reveal(self, client: ClientRef) -> ClientRef:
        """The client behind a hash, if the configuration, the log or a node knows its name; else the same client."""
        if client.kind == "api_key" or not is_hash(client.value) or self._pseudonymizer is None:
            return client
        with self._deps.reading() as connection:
            entries = self._deps.base_policy(connection).entries
            names = [value for kind, value in entries if kind == client.kind]
            record = self._deps.log.last(client.value)
            if record is not None:
                # A label is "tenant acme" if the gate shows tenants, or else one that the configuration gives.
                names.append(record.label.removeprefix(f"{client.kind} "))
                names += [value for kind, value in find_by_label(connection, record.label) if kind == client.kind]
            if (label := self._deps.status_label(client.value)) is not None:
                names.append(label.removeprefix(f"{client.kind} "))
        for value in names:
            if not is_hash(value) and self._pseudonymizer.hash_of(client.kind, value) == client.value:
                return ClientRef(client.kind, value)
        return client

    def _kinds(self) -> tuple[str, ...]:
        """The kinds of identity that clients can have."""
        policy = self._deps.current_policy().policy
        counted = [kind for rule in policy.rules for kind in rule.by]
        named = [each.identity.kind for entries in (policy.clients, policy.overrides) for each in entries]
        return tuple(dict.fromkeys(kind for kind in (*KINDS, *counted, *named) if kind not in NOT_CLIENT_KINDS))

    def _key_reading(self, text: str) -> list[ClientRef]:
        return [ClientRef("api_key", each) for each in self._hashes([text])]

    def _find_by_label(self, label: str, *, in_log: bool = True) -> ClientRef:
        key = label_key(label)
        with self._deps.reading() as connection:
            in_document = self._deps.base_policy(connection).policy.clients
            found = [each.identity for each in in_document if each.label and label_key(each.label) == key]
            for client in found or find_by_label(connection, label):
                return ClientRef(*client)
        record = self._deps.log.last(key) if in_log else None
        if record is None:
            raise NotFound("no client has this label")
        return self.reveal(ClientRef(record.client_kind, record.client))

    def _find_by_hash(self, value: str) -> ClientRef:
        """The client with a hash, by the log and the configuration; an API key if neither knows it."""
        record = self._deps.log.last(value)
        if record is not None:
            kind = next((kind for kind, key in zip(record.kinds, record.clients, strict=True) if key == value), None)
            if kind is not None and kind != LABEL:
                return ClientRef(kind, value)
        for client in self._deps.current_policy().entries:
            if client[0] != "api_key" and self._pseudonymizer and self._pseudonymizer.hash_of(*client) == value:
                return ClientRef(*client)
        return ClientRef("api_key", value)

    def _configured_label(self, client: ClientRef) -> str | None:
        with self._deps.reading() as connection:
            base = self._deps.base_policy(connection)
            return labels_of(connection, [client]).get(client) or base.label_of(client)

    def _is_known(self, client: ClientRef) -> bool:
        """True if the configuration or the log knows this client."""
        return self._is_configured(client) or self._is_logged(client)

    def _is_configured(self, client: ClientRef) -> bool:
        with self._deps.reading() as connection:
            is_in_document = client in self._deps.base_policy(connection).entries
            return is_in_document or any(rows_of_clients(connection, {client.kind: [client.value]}).values())

    def _is_logged(self, client: ClientRef) -> bool:
        return self._pseudonymizer is not None and self._deps.log.last(self._log_key(client)) is not None

    def _log_key(self, client: ClientRef) -> str:
        if is_hash(client.value) or self._pseudonymizer is None:
            return client.value
        return self._pseudonymizer.hash_of(*client)


def kind_name(kind: str) -> str:
    """A kind of identity for people: "API key" for "api_key"."""
    return KIND_NAMES.get(kind, kind.replace("_", " ").capitalize())


def short_label(kind: str, value: str, label: str) -> str:
    """A label that the log or the nodes made up for a client, without the kind; a blurred address with a part of its
    hash, which distinguishes it from its neighbours.

    >>> short_label("ip", "hmac:b79fd1890123456789abcdef01234567", "ip 192.0.2.*")
    '192.0.2.* (b79fd189)'
    >>> short_label("tenant", "hmac:b79fd1890123456789abcdef01234567", "tenant acme")
    'acme'
    """
    shown = label.removeprefix(f"{kind} ")
    if shown == value[: len(PREFIX) + SHORT_HASH]:
        return f"{kind_name(kind)} {shown}…"
    if kind == "ip" and shown.endswith("*") and value.startswith(PREFIX):
        return f"{shown} ({value.removeprefix(PREFIX)[:SHORT_HASH]})"
    return shown


def noun_of(kind: str) -> str:
    """A kind of identity in the middle of a sentence: "address" for "ip"."""
    return {"ip": "address", "api_key": "API key", "subnet": "network"}.get(kind, kind.replace("_", " "))


def mask(key: str) -> str:
    """An API key with its middle left out: enough to recognize it, not enough to use it.

    >>> mask("sk_live_aaaa567890abcdef"), mask("a1b2c3d4e5f6"), mask("short")
    ('sk_live_…cdef', 'a1b…f6', '…')
    """
    if len(key) >= 3 * MASK_HEAD:
        return f"{key[:MASK_HEAD]}…{key[-MASK_TAIL:]}"
    if len(key) >= MASK_HEAD:
        return f"{key[: len(key) // 4]}…{key[-len(key) // 6 :]}"
    return "…"


def describe(who: ClientRef, *, label: str | None = None, key: str | None = None, is_known: bool = False) -> Candidate:
    """Describe a client. `key` is the raw API key as it was typed, if it was; only its masked form is kept."""
    kind, value = who
    name, short_hash = kind_name(kind), f"{value[: len(PREFIX) + SHORT_HASH]}…"
    if kind == "api_key":
        shown = short_hash if key is None or len(key) < MASK_HEAD else mask(key)
        matches = f"every request with this key (hash {value})"
    elif value.startswith(PREFIX):
        shown, matches = label or short_hash, f"every request of this {noun_of(kind)} (hash {value})"
    elif kind not in ("ip", "subnet"):
        shown, matches = value, f"every request of the {noun_of(kind)} “{value}”"
    elif (network := ip_network(value)).num_addresses == 1:
        name, shown, matches = "Address", value, "every request from this address"
    else:
        count = network.num_addresses
        size = f"{count:,} addresses" if count < 10**9 else f"/{network.prefixlen}"
        name, shown, matches = "Network", value, f"every address in {value} ({size})"
    return Candidate(who, label, f"{name} {shown}", matches, is_known)


def label_keys(label: str | None) -> tuple[str, ...]:
    """The keys under which the decision log records the clients with a label."""
    return () if label is None else (label_key(label),)


def require_network_role(actor: Actor, client: ClientRef, action: str) -> None:
    """Raise NotAllowed if a network, which may be all clients, is changed by an actor who is not an operator."""
    if is_network(client):
        actor.require("operator", f"{action} of networks")


def is_hash(value: str) -> bool:
    return value.lower().startswith(PREFIX)


def network_of(client: ClientRef) -> IPv4Network | IPv6Network | None:
    """The network of an address or subnet; None for other clients."""
    return ip_network(client.value) if client.kind in ("ip", "subnet") and not is_hash(client.value) else None


def is_network(client: ClientRef) -> bool:
    """True for a subnet, and for more than one address."""
    network = network_of(client)
    return network is not None and (client.kind == "subnet" or network.num_addresses > 1)


def is_wide_network(client: ClientRef) -> bool:
    """True for a network that may be more than one customer: wider than an IPv4 address or an IPv6 /64."""
    network = network_of(client)
    if network is None or not is_network(client):
        return False
    has_ipv4 = any(network.version == 6 and network.overlaps(each) for each in IPV4_IN_IPV6)
    return network.version == 4 or network.prefixlen < CUSTOMER_PREFIX or has_ipv4


def _name_readings(text: str, kinds: Iterable[str]) -> list[ClientRef]:
    """The clients that a text would be as a name of each kind."""
    if len(text) > scalars.LONGEST_LABEL:
        return []
    return [ClientRef(kind, text) for kind in kinds if kind not in ("api_key", "ip", "subnet")]


def _check_hash(value: str) -> str:
    try:
        return scalars.api_key(value.lower())
    except InvalidInput:
        raise InvalidInput("this is not a hash; write hmac: and 32 hexadecimal digits") from None


def _address_error(value: str) -> str:
    if "/" in value and redaction.is_network_text(value, strict=False):
        return f"this is an address with its network; write {ip_network(value, strict=False)}, or the address alone"
    return "this is not an address; write it like 203.0.113.9 or 203.0.113.0/24"


def _networks_around(network: IPv4Network | IPv6Network) -> tuple[str, ...]:
    """The network and all networks that contain it, in their canonical spelling."""
    around = [network.supernet(new_prefix=width) for width in range(network.prefixlen, -1, -1)]
    return tuple(str(each.network_address) if each.prefixlen == each.max_prefixlen else str(each) for each in around)
