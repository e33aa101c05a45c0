"""Who is meant: by what people write, and by what the log and the boards know of somebody.

A text that says nothing of itself may be an API key. It is hashed first, and never told again.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.control.config.engine import read_transaction
from headgate.control.config.queries import find_by_label, labels_of, rows_of_clients
from headgate.control.service.candidates import describe, noun_of, short_label
from headgate.control.service.errors import LogUnavailable, NotFound
from headgate.control.service.models import ClientRef
from headgate.control.service.redaction import LOOKS_SECRET, SHORTEST_HIDDEN, looks_secret, may_be_key, words_like_keys
from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.policy import scalars
from headgate.policy.addresses import Addresses, canonical
from headgate.policy.api_keys import PREFIX
from headgate.telemetry.pseudonyms import LABEL, Pseudonymizer, label_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.control.config.store import ConfigStore
    from headgate.control.service.candidates import Candidate
    from headgate.control.service.effective_policy import BasePolicy, BasePolicyCache
    from headgate.control.service.log_reader import DecisionLogReader
    from headgate.control.service.models import Actor, Page
    from headgate.policy.model import Policy
    from headgate.telemetry.decision_log.record import DecisionRecord

__all__ = [
    "CUSTOMER_PREFIX",
    "ClientFacts",
    "ClientLookup",
    "is_hash",
    "is_network",
    "is_wide_network",
    "label_keys",
    "network_of",
    "open_pseudonymizer",
    "require_network_role",
]

KINDS: Final = ("tenant", "user", "api_key", "ip", "subnet")
"""The kinds that are known everywhere; a policy may count by others."""
NO_CLIENTS: Final = ("endpoint", "client", "global", "tier", "address")
LONGEST: Final = 4200
"""Characters of what somebody writes: an API key has at most 4096."""
MAX_MATCHES: Final = 20
"""Clients that a search lists."""
MAX_RECORDS_SEARCHED: Final = 1000
"""Records of the decision log, the newest, in whose labels a search looks for clients that have no settings."""
MOST_OF_DOCUMENT: Final = 500
"""Words of a document that are looked up."""

NOBODY: Final = (
    "nobody of that name is known here; say what it is with tenant=..., user=..., ip=... or api_key=..., or give the "
    "hmac: hash"
)
KEY_AMONG_WORDS: Final = "there is an API key among the words; leave it out, or write its hmac: hash instead"
NOT_IN_ADDRESSES: Final = "this may be an API key, which must not stand in an address; search for its hmac: hash"
NO_SECRET: Final = (
    "an API key is known by its keyed hash, and there is no secret to make that with: give the admin server the gates' "
    "own, or write the hmac: hash"
)


_HASH: Final = re.compile(r"hmac:[0-9a-fA-F]*")
_NAMED_HASH: Final = re.compile(r"\b([a-z][a-z0-9_]*) (hmac:[0-9a-f]{32})\b")
_HEADER: Final = re.compile(r"(?:authorization:\s*)?bearer\s+(?=\S+$)|x-api-key:\s*(?=\S+$)", re.IGNORECASE)
"""The part of a pasted header field that precedes the API key."""

CUSTOMER_PREFIX: Final = 64
IPV4_IN_IPV6: Final = tuple(ip_network(each) for each in ("::/64", "64:ff9b::/96", "64:ff9b:1::/48"))
"""Networks of IPv6 in which the last bits are IPv4 addresses, of many customers."""


class ClientFacts(NamedTuple):
    """What is known of a client."""

    who: ClientRef
    identities: dict[str, tuple[str, ...]]
    """By kind, under which values rows may be about it: an address is also in its networks."""
    values: dict[str, str]
    """As requests of it would say it; empty where only a hash is known."""
    log_keys: tuple[str, ...]
    can_count: bool


class ClientLookup:
    """Finds out who is meant."""

    def __init__(
        self,
        config: ConfigStore,
        policies: BasePolicyCache,
        log: DecisionLogReader,
        clients: Pseudonymizer | None,
        *,
        status_label: Callable[[str], str | None],
    ) -> None:
        """`status_label` returns the label under which nodes report the client with a hash."""
        self._config = config
        self._policies = policies
        self._log = log
        self._clients = clients
        self._status_label = status_label

    def canonical(
        self, who: tuple[str, str], *, texts: Sequence[str | None] | None = None, allow_hash: bool = False
    ) -> ClientRef:
        """A client in its canonical spelling.

        `texts` are the texts that are stored with a change of this client: they must not contain its API key, and the
        client must not be a hash, which has no limits, unless `allow_hash` is true, as for blocks.
        """
        kind, value = who
        if not isinstance(kind, str) or not isinstance(value, str):
            raise InvalidInput("a client is a kind and a value, both text")
        kind = self._checked_kind(kind)
        if kind != "api_key" and is_hash(value):
            if texts is not None and not allow_hash:
                raise InvalidInput(f"we only store a hash of this {kind}: give the {kind} itself to change its limits")
            return ClientRef(kind, self._hash(value))
        match kind:
            case "api_key":
                found = ClientRef(kind, self._fingerprint(value))
                if found.value in self._hashes(words_like_keys(texts or ())):
                    raise InvalidInput(KEY_AMONG_WORDS)
                return found
            case "ip" | "subnet":
                read = scalars.address if kind == "ip" else scalars.subnet
                try:
                    return ClientRef(kind, read(value))
                except InvalidInput:
                    raise InvalidInput(_no_address(value)) from None
        try:
            return ClientRef(kind, scalars.identity(value))
        except InvalidInput:
            raise InvalidInput(f"this is no {kind}: give up to 500 characters that can be printed") from None

    def resolve(
        self, client: ClientRef, *, texts: Sequence[str | None] | None = None, allow_hash: bool = False
    ) -> ClientRef:
        """The canonical client, by its name where only a hash was given and the name is known."""
        return self.reveal(self.canonical(client, texts=texts, allow_hash=allow_hash))

    def find(self, text: str) -> ClientRef:
        """The client that somebody means by a text.

        "tenant=acme" and the like say it; an address, a network or a hash is seen to be one. Anything else is looked
        for as an API key, a tenant, a user, whatever else clients are counted by, and a label: first in the
        configuration, then in the log, and the first that is found is meant. If nobody is: NotFound, which doesn't
        repeat the text.
        """
        text = text.strip()
        if not 0 < len(text) <= LONGEST or not text.isprintable():
            raise InvalidInput(f"say who is meant, in up to {LONGEST} characters that can be printed")
        if is_hash(text):
            return self.reveal(self._of_hash(self._hash(text)))
        base = self._policies.current()
        kinds = _kinds(base.policy)
        kind, sign, value = text.partition("=")
        if sign and kind == LABEL:
            return self._called(value.strip(), base)
        if sign and kind in kinds:
            return self.reveal(self.canonical((kind, value.strip())))
        if canonical(text) is not None or _is_network(text):
            return self.canonical(("ip", text if "/" in text else canonical(text) or text))
        return self._guessed(text, kinds, base)

    def candidates(self, text: str) -> list[Candidate]:
        """All clients that a text can mean, known or not, the likeliest first.

        Clients that the configuration or the log knows by this text come alone. For other texts, every reading is
        offered that makes sense; a text that is probably an API key is only ever read as one, so that it is not stored
        or shown as anything else.
        """
        text = text.strip()
        if header := _HEADER.match(text):
            text = f"api_key={text[header.end() :]}"
        if not 0 < len(text) <= LONGEST or not text.isprintable():
            raise InvalidInput(f"enter an address, a network, a name or an API key of up to {LONGEST} characters")
        if text == "*":
            raise InvalidInput("* is not a client: block one client or one network")
        base = self._policies.current()
        kinds = _kinds(base.policy)
        kind, sign, value = (part.strip() for part in text.partition("="))
        if is_hash(text) or (sign and kind in (LABEL, *kinds)):
            key = value if kind == "api_key" and not is_hash(value) else None
            who = self.find(text)
            if key is None:
                self.refuse_known_keys(who.value)
            return [self._described(who, base, key=key)]
        if (address := canonical(text)) is not None:
            return [self._described(ClientRef("ip", each), base) for each in _networks_of_client(address)]
        if _is_network(text):
            network = ip_network(text, strict=False)
            written = [text.partition("/")[0]] if str(network) != text.lower() and "/" in text else []
            networks = [self.canonical(("ip", each)) for each in (str(network), *written)]
            return [self._described(each, base) for each in networks]
        readings = self._readings(text, kinds)
        known = [who for who in readings if self._is_seen(who, base)]
        with suppress(NotFound):
            known.append(self._called(text, base))
        if not known:
            if not readings:
                raise InvalidInput(
                    NO_SECRET if self._clients is None else "this is not the name of a client, nor a key"
                )
            known = readings
        return [self._described(who, base, key=text) for who in dict.fromkeys(known)]

    def matches(self, text: str, partial: Callable[[str], Iterable[ClientRef]]) -> list[Candidate]:
        """The known clients that a text means, or else those that it is a part of: of a label, a name or an address.

        `partial` finds the latter in the configuration. Nothing, if no client matches; InvalidInput for a text that can
        mean no client at all.
        """
        found = self.candidates(text)
        typed = text.strip()
        is_exact = is_hash(typed) or "=" in typed or found[0].who.kind in ("ip", "subnet")
        exact = [each for each in found if each.is_known or is_exact]
        if exact:
            return exact[:1] if is_exact else exact
        base = self._policies.current()
        others = dict.fromkeys(partial(typed)) | dict.fromkeys(self._logged_labels(typed))
        return [self._described(who, base) for who in others]

    def _logged_labels(self, text: str) -> list[ClientRef]:
        """Clients in the newest records of the log whose label contains a text."""
        try:
            records = self._log.decisions((), after="", before="", outcome=None, most=MAX_RECORDS_SEARCHED)
        except LogUnavailable:
            return []
        sought = text.casefold()
        found = {
            ClientRef(record.client_kind, record.client): None
            for record in reversed(records)
            if sought in record.label.removeprefix(f"{record.client_kind} ").casefold()
        }
        return list(dict.fromkeys(self.reveal(who) for who in list(found)[:MAX_MATCHES]))

    def insert_names(self, text: str) -> str:
        """A text about clients, with their names in place of full hashes: "api_key Acme (hmac:12ab34cd…)"."""
        for kind, value in dict.fromkeys(_NAMED_HASH.findall(text)):
            label = self.label_of(ClientRef(kind, value))
            short = f"{value[:13]}…"
            text = text.replace(value, short if label is None else f"{label} ({short})")
        return text

    def label_of(self, who: ClientRef) -> str | None:
        """The label of a client, or the pseudonym that the overview shows for a hash."""
        label = self._label_of(who, self._policies.current())
        return label or (None if who.kind == "api_key" else self.pseudonym(who))

    def is_seen(self, who: ClientRef) -> bool | None:
        """True if the configuration, the decision log or a node knows this client. None where that can't be told: for
        addresses, of which most are never heard of before, and without a log."""
        if who.kind in ("ip", "subnet") or is_hash(who.value):
            return None
        if self._is_seen(who, self._policies.current()):
            return True
        if self._clients is None or self._log.trouble is not None:
            return None
        return self._status_label(self._key(who)) is not None

    def name_of(self, who: ClientRef) -> str:
        """The name of a client in a sentence: its label, or "tenant acme", "address 203.0.113.9", "API key hmac:…"."""
        label = self._label_of(who, self._policies.current()) or self.pseudonym(who)
        title = describe(who).title
        return label or (title if who.kind == "api_key" else title[:1].lower() + title[1:])

    def hashes_of(self, who: ClientRef) -> tuple[ClientRef, ...]:
        """The same client by its keyed hashes, under which a block may name it. Nothing for API keys and networks."""
        if who.kind in ("api_key", "subnet") or is_hash(who.value) or is_network(who):
            return ()
        identities = self.facts(who, self._policies.current().policy).identities.get(who.kind, ())
        return tuple([ClientRef(who.kind, value) for value in identities if is_hash(value)])

    def pseudonym(self, who: ClientRef) -> str | None:
        """The name of a client of which only a hash is known, as the overview shows it: "192.0.2.* (b79fd189)"."""
        if not is_hash(who.value):
            return None
        record = self._record(who.value)
        label = self._status_label(who.value) or (None if record is None else record.label)
        return None if label is None else short_label(who.kind, who.value, label)

    def reveal(self, who: ClientRef) -> ClientRef:
        """The client itself, where only a hash of it was given and it can be told who that is; else as it was."""
        if who.kind == "api_key" or not is_hash(who.value) or self._clients is None:
            return who
        with read_transaction(self._config.engine) as connection:
            base = self._policies.get(connection)
            may_be = [value for kind, value in base.entries if kind == who.kind]
            record = self._record(who.value)
            if record is not None:
                # Shown labels are "tenant acme"; others are names that the configuration gives.
                may_be.append(record.label.removeprefix(f"{who.kind} "))
                may_be += [value for kind, value in find_by_label(connection, record.label) if kind == who.kind]
            if (label := self._status_label(who.value)) is not None:
                may_be.append(label.removeprefix(f"{who.kind} "))
        for value in may_be:
            if not is_hash(value) and self._clients.hash_of(who.kind, value) == who.value:
                return ClientRef(who.kind, value)
        return who

    def facts(self, who: ClientRef, policy: Policy | None = None) -> ClientFacts:
        """All that is known of somebody."""
        kind, value = who
        keys = () if self._clients is None and not is_hash(value) else (self._key(who),)
        if kind != "api_key" and is_hash(value):
            return ClientFacts(who, {kind: (value,)}, {}, keys, can_count=False)
        if kind == "subnet":
            return ClientFacts(who, {"subnet": (value,)}, {"subnet": value}, keys, can_count=True)
        if kind != "ip":
            values = (value,) if kind == "api_key" else (value, *keys)  # a block may name it by its hash
            return ClientFacts(who, {kind: values}, {kind: value}, keys, can_count=True)
        network = ip_network(value)
        addresses = Addresses(policy.identity) if policy is not None else None
        first = str(network.network_address)
        said = {"address": first, "ip": addresses.identity(first) if addresses else first}
        subnet = () if addresses is None else (addresses.subnet(first),)
        hashed = () if self._clients is None else tuple({self._clients.key("ip", each) for each in said.values()})
        around = {"ip": (*_around(network), *hashed), "subnet": subnet}
        if network.num_addresses > 1:  # nobody's own: what the log knows of it goes by its label
            return ClientFacts(who, around, said, (), can_count=False)
        return ClientFacts(who, around, said | {"subnet": subnet[0]} if subnet else said, keys, can_count=True)

    def unseen_note(self, client: ClientRef) -> tuple[str, ...]:
        """A note for a change of a client that was never seen, whose name may be mistyped."""
        if self.is_seen(client) is not False:
            return ()
        return (f"No {noun_of(client.kind)} of this name was ever seen. Check the spelling.",)

    def with_pseudonyms(self, page: Page[Any]) -> Page[Any]:
        """The same page with pseudonyms as the labels of clients of which only a hash is known."""
        items = [
            each if each.label or each.who.kind == "api_key" else replace(each, label=self.pseudonym(each.who))
            for each in page.items
        ]
        return replace(page, items=tuple(items))

    def refuse_known_keys(self, *texts: str | None) -> None:
        """InvalidInput, if one of the words is an API key that the configuration or the log knows."""
        self._refuse(words_like_keys(texts))

    def refuse_keys_in_document(self, text: str) -> None:
        """The same for a policy document: comments and labels are kept, too. Of its words, those that could be keys
        and nothing else."""
        if looks_secret(text):
            raise InvalidInput(LOOKS_SECRET)
        found = words_like_keys([text], shortest=SHORTEST_HIDDEN, most=MOST_OF_DOCUMENT)
        self._refuse([word for word in found if any(letter.isdigit() for letter in word)])

    def searchable(self, text: str, is_said: Callable[[str], bool]) -> str:
        """What to search for in place of a text, so that no API key gets into an address: the keyed hash of what is a
        key in it, or looks like one, or could be one and is said nowhere. A name stays as it is.

        `is_said` tells whether a text stands in what everybody can read: then it is no secret.
        """
        suspects = [word for word in words_like_keys([_HASH.sub(" ", text)]) if not is_hash(word)]
        for word in suspects:
            if looks_secret(word) or self._is_known(self._hashes([word])):
                return self._searched_by_hash(word)
        unknown = [word for word in suspects if len(word) >= SHORTEST_HIDDEN]
        return self._searched_by_hash(unknown[0]) if unknown and not is_said(text) else text

    def _searched_by_hash(self, word: str) -> str:
        hashes = self._hashes([word])
        if not hashes:
            raise InvalidInput(f"{NOT_IN_ADDRESSES}{'' if self._clients is not None else f'. {NO_SECRET}'}")
        return hashes[0]

    def _refuse(self, found: list[str]) -> None:
        if self._is_known(self._hashes(found)):
            raise InvalidInput(KEY_AMONG_WORDS)

    def _is_known(self, hashes: Sequence[str]) -> bool:
        """Whether the configuration or the log knows an API key with one of these hashes."""
        if not hashes:
            return False
        with read_transaction(self._config.engine) as connection:
            rows = rows_of_clients(connection, {"api_key": hashes})
            base = self._policies.get(connection)
        return any(rows.values()) or any(("api_key", each) in base.entries for each in hashes) or self._logged(hashes)

    def _hashes(self, texts: Iterable[str]) -> list[str]:
        """Of those that could be API keys."""
        found = []
        if self._clients is not None:
            for word in texts:
                with suppress(InvalidInput):
                    found.append(self._clients.hash_of("api_key", word))
        return found

    def hash_as_key(self, text: str) -> str | None:
        """What a text would be as an API key; None if it can be none."""
        if self._clients is None or not text:
            return None
        try:
            return self._clients.hash_of("api_key", text)
        except InvalidInput:
            return None

    # ------------------------------------------------------------------ within

    def _readings(self, text: str, kinds: Iterable[str]) -> list[ClientRef]:
        """The clients that a text would be if it were an API key, a tenant, a user, and so on."""
        hashed = self.hash_as_key(text)
        readings = [] if hashed is None else [ClientRef("api_key", hashed)]
        if looks_secret(text) or may_be_key(text, shortest=SHORTEST_HIDDEN):
            return readings
        others = [kind for kind in kinds if kind not in ("api_key", "ip", "subnet")]
        is_name = len(text) <= scalars.LONGEST_LABEL and not self._is_known(self._hashes(words_like_keys([text])))
        return [*(ClientRef(kind, text) for kind in others if is_name), *readings]

    def _is_seen(self, who: ClientRef, base: BasePolicy) -> bool:
        """True if the configuration or the log knows this client."""
        return self._is_configured(who, base) or (self._clients is not None and self._logged([self._key(who)]))

    def _described(self, who: ClientRef, base: BasePolicy, *, key: str | None = None) -> Candidate:
        label = self._label_of(who, base) or self.pseudonym(who)
        return describe(who, label=label, key=key, is_known=self._is_seen(who, base))

    def _label_of(self, who: ClientRef, base: BasePolicy) -> str | None:
        with read_transaction(self._config.engine) as connection:
            label = labels_of(connection, [who]).get(who)
        return label or base.label_of(who)

    def _guessed(self, text: str, kinds: Iterable[str], base: BasePolicy) -> ClientRef:
        # The hash first: a key that is known goes no further as it is.
        candidates = []
        if (hashed := self.hash_as_key(text)) is not None:
            candidates.append(ClientRef("api_key", hashed))
        others = [kind for kind in kinds if kind not in ("api_key", "ip", "subnet")]
        candidates += [
            ClientRef(kind, text) for kind in others if len(text) <= scalars.LONGEST_LABEL and text.isprintable()
        ]
        for who in candidates:
            if self._is_configured(who, base):
                return who
        with suppress(NotFound):
            return self._called(text, base, in_log=False)
        for who in candidates:
            if self._clients is not None and self._record(self._key(who)) is not None:
                return who
        with suppress(NotFound):
            return self._called(text, base)
        raise NotFound(NOBODY if self._clients is not None else f"{NOBODY}. {NO_SECRET}")

    def _is_configured(self, who: ClientRef, base: BasePolicy) -> bool:
        if who in base.entries:
            return True
        with read_transaction(self._config.engine) as connection:
            return any(rows_of_clients(connection, {who.kind: [who.value]}).values())

    def _called(self, label: str, base: BasePolicy, *, in_log: bool = True) -> ClientRef:
        """The client with a label."""
        key = label_key(label)
        for client in base.policy.clients:
            if client.label and label_key(client.label) == key:
                return ClientRef(*client.identity)
        with read_transaction(self._config.engine) as connection:
            for who in find_by_label(connection, label):
                return ClientRef(*who)
        record = self._record(key) if in_log else None
        if record is None:
            raise NotFound("nobody goes by that label here")
        return self.reveal(ClientRef(record.client_kind, record.client))

    def _of_hash(self, value: str) -> ClientRef:
        """Of what kind a hash is, by the log and the configuration; an API key's, if neither knows it."""
        record = self._record(value)
        if record is not None:
            kind = next((kind for kind, key in zip(record.kinds, record.clients, strict=True) if key == value), None)
            if kind is not None and kind != LABEL:
                return ClientRef(kind, value)
        for who in self._policies.current().entries:
            if self._clients is not None and who[0] != "api_key" and self._clients.hash_of(*who) == value:
                return ClientRef(*who)
        return ClientRef("api_key", value)

    def _record(self, *keys: str) -> DecisionRecord | None:
        try:
            return self._log.last(*keys)
        except LogUnavailable:
            return None

    def _logged(self, keys: Sequence[str]) -> bool:
        return bool(keys) and self._record(*keys) is not None

    def _key(self, who: ClientRef) -> str:
        if is_hash(who.value) or self._clients is None:
            return who.value
        return self._clients.hash_of(*who)

    def _fingerprint(self, value: str) -> str:
        if is_hash(value):
            return self._hash(value)
        if self._clients is None:
            raise InvalidInput(NO_SECRET)
        return self._clients.hash_of("api_key", scalars.api_key(value))

    def _hash(self, value: str) -> str:
        try:
            return scalars.api_key(value.lower())
        except InvalidInput:
            raise InvalidInput("this is no hash; write hmac: and 32 hexadecimal digits") from None

    def _checked_kind(self, kind: str) -> str:
        if kind not in KINDS and kind not in (known := _kinds(self._policies.current().policy)):
            raise InvalidInput(f"a client is of one of the kinds {', '.join(known)}")
        return kind


def label_keys(label: str | None) -> tuple[str, ...]:
    """The keys under which the decision log records the clients with a label."""
    return () if label is None else (label_key(label),)


def require_network_role(actor: Actor, client: ClientRef, action: str) -> None:
    """Raise NotAllowed if a network, which may be all clients, is changed by an actor who is not an operator."""
    if is_network(client):
        actor.require("operator", f"{action} of networks")


def is_hash(value: str) -> bool:
    return value.lower().startswith(PREFIX)


def network_of(who: ClientRef) -> IPv4Network | IPv6Network | None:
    """The network that somebody is; None for anybody else."""
    return ip_network(who.value) if who.kind in ("ip", "subnet") and not is_hash(who.value) else None


def is_network(who: ClientRef) -> bool:
    """Whether that is more than one address."""
    network = network_of(who)
    return network is not None and (who.kind == "subnet" or network.num_addresses > 1)


def is_wide_network(who: ClientRef) -> bool:
    """True if that may be more than one customer: more than an IPv4 address, or than a /64 of IPv6, of which providers
    give each customer at least one."""
    network = network_of(who)
    if network is None or not is_network(who):
        return False
    holds_ipv4 = any(network.version == 6 and network.overlaps(each) for each in IPV4_IN_IPV6)
    return network.version == 4 or network.prefixlen < CUSTOMER_PREFIX or holds_ipv4


def open_pseudonymizer(secret: str | bytes | None) -> Pseudonymizer | None:
    """What names clients by keyed hashes; None without a secret."""
    try:
        return Pseudonymizer(secret)
    except InvalidConfiguration:
        if secret is not None:
            raise
        return None


def _kinds(policy: Policy) -> tuple[str, ...]:
    counted = [kind for rule in policy.rules for kind in rule.by]
    named = [each.identity.kind for each in policy.clients] + [each.identity.kind for each in policy.overrides]
    return tuple(dict.fromkeys(kind for kind in (*KINDS, *counted, *named) if kind not in NO_CLIENTS))


def _is_network(text: str) -> bool:
    """Also if it is one that is written with an address of it."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _networks_of_client(address: str) -> list[str]:
    """An address, and for IPv6 also the network that one customer usually has all of."""
    network = ip_network(address)
    return [address] if network.version == 4 else [address, str(network.supernet(new_prefix=64))]


def _no_address(value: str) -> str:
    if "/" in value and _is_network(value):
        return f"this is an address with its network; write {ip_network(value, strict=False)}, or the address alone"
    return "this is no address; write it like 203.0.113.9 or 203.0.113.0/24"


def _around(network: IPv4Network | IPv6Network) -> tuple[str, ...]:
    """The network itself and all that it lies in, as they are written."""
    widths = range(network.prefixlen, -1, -1)
    around = [network.supernet(new_prefix=width) for width in widths]
    return tuple(str(each.network_address) if each.prefixlen == each.max_prefixlen else str(each) for each in around)
