"""Descriptions of the clients that a typed text can mean, for previews, choices and search results.

A text may be an API key. Descriptions show a key in masked form only, next to its keyed hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from headgate.control.service.models import ClientRef, View
from headgate.policy.api_keys import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KIND_NAMES", "Candidate", "describe", "kind_name", "mask", "noun_of", "short_label"]

KIND_NAMES: Final[Mapping[str, str]] = {
    "api_key": "API key",
    "tenant": "Tenant",
    "user": "User",
    "ip": "Address",
    "subnet": "Network",
    "label": "Client",
}
MASK_HEAD: Final = 8
MASK_TAIL: Final = 4
SHORT_HASH: Final = 8
"""Hexadecimal digits of a keyed hash that are shown to people."""


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


def kind_name(kind: str) -> str:
    """A kind of identity for people: "API key" for "api_key"."""
    return KIND_NAMES.get(kind, kind.replace("_", " ").capitalize())


def short_label(kind: str, value: str, label: str) -> str:
    """A label that the log or the nodes made up for a client, without the kind; a blurred address with a part of its
    hash, which tells it from its neighbours.

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
    if kind == "api_key":
        is_short = key is None or len(key) < MASK_HEAD
        shown = f"{value[: len(PREFIX) + SHORT_HASH]}…" if is_short else mask(key or "")
        return Candidate(who, label, f"API key {shown}", f"every request with this key (hash {value})", is_known)
    if value.startswith(PREFIX):
        shown = label or f"{value[: len(PREFIX) + SHORT_HASH]}…"
        matches = f"every request of this {noun_of(kind)} (hash {value})"
        return Candidate(who, label, f"{kind_name(kind)} {shown}", matches, is_known)
    if kind in ("ip", "subnet"):
        network = ip_network(value)
        count = network.num_addresses
        if count == 1:
            return Candidate(who, label, f"Address {value}", "every request from this address", is_known)
        size = f"{count:,} addresses" if count < 10**9 else f"/{network.prefixlen}"
        return Candidate(who, label, f"Network {value}", f"every address in {value} ({size})", is_known)
    return Candidate(
        who, label, f"{kind_name(kind)} {value}", f"every request of the {noun_of(kind)} “{value}”", is_known
    )
