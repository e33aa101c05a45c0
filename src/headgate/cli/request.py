"""What the command line says about a request: who sends it, when, and where to."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate._limit_syntax import suggest
from headgate.errors import InvalidInput
from headgate.gate.base import SECRET_VARIABLE
from headgate.policy import scalars
from headgate.policy.addresses import UNKNOWN, Addresses, canonical
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.routes import decode_path

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from headgate.policy.model import Policy

__all__ = ["Request", "given_secret"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NOT_SAID: Final = {
    "address": "give --ip",
    "client": "it is the tenant, API key, user or address",
    "endpoint": "it is the route's template",
    "ip": "give --ip",
    "subnet": "give --ip",
    "tier": "give --tier",
}
"""What is no identity for callers to say, and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that may come, with all that the limits ask about it."""

    method: str
    path: str
    """Decoded, as frameworks route by it."""
    who: Mapping[str, str]
    """Its identities by kind, as adapters read them: API keys as hashes."""
    at: datetime
    api_keys: ApiKeyHasher
    secret_is_known: bool
    """Whether API keys have the same hashes as in production."""

    @classmethod
    def read(cls, arguments: Namespace, policy: Policy) -> Request:
        """The request of `headgate explain`'s arguments; InvalidInput, if there can be none."""
        secret = given_secret(arguments.secret_file)
        api_keys = ApiKeyHasher(secret or secrets.token_bytes(32))
        address = _address(arguments.ip)
        addresses = Addresses(policy.identity)
        who = {"address": address, "ip": addresses.identity(address), "subnet": addresses.subnet(address)}
        for kind, value in _said(arguments):
            who[kind] = api_keys.fingerprint(value) if kind == "api_key" else value
        if arguments.tier is not None:
            who["tier"] = _tier(arguments.tier, policy)
        at = datetime.now(UTC) if arguments.at is None else scalars.instant(arguments.at)
        return cls(arguments.method, decode_path(arguments.path), who, at, api_keys, secret is not None)

    @property
    def now_us(self) -> int:
        return (self.at - _EPOCH) // timedelta(microseconds=1)


def given_secret(file: str | None) -> bytes | None:
    """What API keys are hashed with: the file's content without the line's end, else the variable's, else None."""
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "").encode() or None
    try:
        return Path(file).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InvalidInput(f"--secret-file {file}: cannot be read: {error.strerror}") from None


def _address(given: str | None) -> str:
    if given is None:
        return UNKNOWN
    address = canonical(given)
    if address is None:
        raise InvalidInput(f"--ip {given!r} is no address; write it like 203.0.113.9 or 2001:db8::1")
    return address


def _said(arguments: Namespace) -> list[tuple[str, str]]:
    """The identities that the app, or a header, would say."""
    said = [(kind, value) for kind in ("tenant", "user", "api_key") if (value := getattr(arguments, kind)) is not None]
    for pair in arguments.identity:
        kind, sign, value = pair.partition("=")
        if not kind or not sign:
            raise InvalidInput(f"--identity {kind!r} has no value; write it like device=4711")
        if kind in _NOT_SAID:
            raise InvalidInput(f"--identity {kind} cannot be said; {_NOT_SAID[kind]}")
        said.append((kind, value))
    for kind, value in said:
        if not value:
            raise InvalidInput(f"the {kind} is empty; leave it out for a request that has none")
    kinds = [kind for kind, _ in said]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the {twice} is given twice; keep one")
    return said


def _tier(given: str, policy: Policy) -> str:
    if given not in policy.tiers:
        hint = suggest(given, list(policy.tiers)) if policy.tiers else "it has no tiers"
        raise InvalidInput(f"--tier {given!r} is none of the policy's; {hint}")
    return given
