"""Requests, secrets and API keys as given on the command line."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate._limit_syntax import suggest
from headgate.errors import InvalidInput
from headgate.gate.base import SECRET_VARIABLE
from headgate.policy import scalars
from headgate.policy.addresses import UNKNOWN, Addresses, canonical
from headgate.policy.api_keys import LONGEST_KEY, ApiKeyHasher
from headgate.policy.routes import decode_path

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from headgate.policy.model import Policy

__all__ = ["SECRET_VARIABLE", "HypotheticalRequest", "read_api_key", "read_file", "read_secret"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DERIVED_KINDS: Final = {
    "address": "give --ip",
    "client": "it is the tenant, API key, user or address",
    "endpoint": "it is the route's template",
    "ip": "give --ip",
    "subnet": "give --ip",
    "tier": "give --tier",
}
"""Kinds that --identity does not accept, with the remedy."""


@dataclass(frozen=True, slots=True)
class HypotheticalRequest:
    """The request that `headgate explain` explains."""

    method: str
    path: str
    """Decoded, as frameworks route by it."""
    who: Mapping[str, str]
    """Identities by kind, as adapters extract them; API keys are hashed."""
    at: datetime
    api_keys: ApiKeyHasher
    has_secret: bool
    """True if API keys have the same hashes as in production."""

    @classmethod
    def read(cls, arguments: Namespace, policy: Policy) -> HypotheticalRequest:
        secret = read_secret(arguments.secret_file)
        api_keys = ApiKeyHasher(secret or secrets.token_bytes(32))
        address = _address(arguments.ip)
        addresses = Addresses(policy.identity)
        who = {"address": address, "ip": addresses.identity(address), "subnet": addresses.subnet(address)}
        for kind, value in _identities(arguments):
            who[kind] = api_keys.fingerprint(value) if kind == "api_key" else value
        if arguments.tier is not None:
            who["tier"] = _tier(arguments.tier, policy)
        at = datetime.now(UTC) if arguments.at is None else scalars.instant(arguments.at)
        return cls(arguments.method, decode_path(arguments.path), who, at, api_keys, secret is not None)

    @property
    def now_us(self) -> int:
        return (self.at - _EPOCH) // timedelta(microseconds=1)


def read_secret(file: str | None) -> bytes | None:
    """The secret that API keys are hashed with: from the file, else from the variable, else None."""
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "").encode() or None
    return read_file("--secret-file", file)


def read_file(option: str, file: str) -> bytes:
    """The content of an option's file, without the final line end."""
    try:
        return Path(file).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InvalidInput(f"{option} {file}: cannot be read: {error.strerror}") from None


def read_api_key() -> str:
    """The API key on the first line of standard input; not echoed at a terminal."""
    if sys.stdin.isatty():
        try:
            return getpass("API key: ")
        except EOFError:
            return ""
    return sys.stdin.buffer.readline(2 * LONGEST_KEY).decode("ascii", "replace").rstrip("\r\n")


def _address(text: str | None) -> str:
    if text is None:
        return UNKNOWN
    address = canonical(text)
    if address is None:
        raise InvalidInput(f"--ip {text!r} is not an address; write it like 203.0.113.9 or 2001:db8::1")
    return address


def _identities(arguments: Namespace) -> list[tuple[str, str]]:
    found = [(kind, value) for kind in ("tenant", "user", "api_key") if (value := getattr(arguments, kind)) is not None]
    for pair in arguments.identity:
        kind, sign, value = pair.partition("=")
        if not kind or not sign:
            raise InvalidInput(f"--identity {kind!r} has no value; write it like device=4711")
        if kind in _DERIVED_KINDS:
            raise InvalidInput(f"--identity {kind} cannot be given; {_DERIVED_KINDS[kind]}")
        found.append((kind, value))
    kinds = [kind for kind, _ in found]
    for kind, value in found:
        if not value:
            raise InvalidInput(f"the {kind} is empty; omit it for a request that has none")
        if kinds.count(kind) > 1:
            raise InvalidInput(f"the {kind} is given twice; keep one")
    return found


def _tier(name: str, policy: Policy) -> str:
    if name not in policy.tiers:
        hint = suggest(name, list(policy.tiers)) if policy.tiers else "it has no tiers"
        raise InvalidInput(f"--tier {name!r} is not a tier of the policy; {hint}")
    return name
