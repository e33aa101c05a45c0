"""API keys as identities: only keyed hashes are stored, logged or sent."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from headgate.errors import InvalidConfiguration, InvalidInput

__all__ = ["LONGEST_KEY", "SHORTEST_SECRET", "ApiKeyHasher", "IdentityHashes"]

LONGEST_KEY: Final = 4096
SHORTEST_SECRET: Final = 16
"""In bytes; a shorter secret can be guessed, and with it weak keys from their hashes."""

MOST_KNOWN: Final = 4096
MAX_CACHED_IDENTITIES: Final = 10_000

PREFIX: Final = "hmac:"
DIGEST_SIZE: Final = 16
PURPOSE: Final = b"headgate api key"
IDENTITY_PURPOSE: Final = b"headgate client"
"""Separate these hashes from others with the same secret."""


class IdentityHashes:
    """Keyed hashes of identities: the names by which the decision log and the fleet's status know clients.

    All processes with the same secret make the same hashes, so that a client can be blocked by its hash.
    """

    __slots__ = ("_cache", "_hash")

    def __init__(self, secret: bytes) -> None:
        self._hash = _keyed_hash(secret, IDENTITY_PURPOSE)
        self._cache: dict[tuple[str, str], str] = {}

    def __call__(self, kind: str, value: str) -> str:
        """The keyed hash of an identity. Of an API key, which requests bring as a hash, that hash."""
        found = self._cache.get((kind, value))
        return found if found is not None else self._computed(kind, value)

    def _computed(self, kind: str, value: str) -> str:
        if kind == "api_key" and value.startswith(PREFIX):
            return value
        keyed = self._hash.copy()
        keyed.update(f"{kind}\0{value}".encode("utf-8", "surrogatepass"))
        if len(self._cache) >= MAX_CACHED_IDENTITIES:
            self._cache.clear()  # active clients are cached again with their next request
        found = self._cache[kind, value] = PREFIX + keyed.hexdigest()
        return found


class ApiKeyHasher:
    """Computes the keyed hash by which an API key is counted.

    All processes of an app need the same secret. With it and a hash, keys can only be guessed.
    """

    __slots__ = ("_hash", "_known")

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes):
            raise InvalidConfiguration(f"the secret for API keys is a {type(secret).__name__}; give bytes")
        if len(secret) < SHORTEST_SECRET:
            raise InvalidConfiguration(
                f"the secret for API keys has {len(secret)} bytes and can be guessed; "
                f"give at least {SHORTEST_SECRET}, as from secrets.token_bytes(32)"
            )
        self._hash = _keyed_hash(secret, PURPOSE)
        self._known: dict[int, str] = {}
        """A cache of hashes by Python's hash() of the key, so that keys are not kept in memory."""

    def from_header(self, value: str) -> str | None:
        """The hash of the API key in a header; None if the value is not a valid key.

        Invalid are empty values, several words, non-printable or non-ASCII characters, and more than 4 KB; also commas,
        as proxies join repeated headers with them.
        """
        return self.hashed(value.strip(" \t"))

    def from_bearer(self, authorization: str) -> str | None:
        """The same for a bearer token in `Authorization`."""
        return self.hashed(authorization[7:].strip(" \t")) if authorization[:7].lower() == "bearer " else None

    def hashed(self, sent: str) -> str | None:
        """The hash of a key that a client sent; None if it is not valid."""
        known = self._known.get(hash(sent))
        return known if known is not None else self._hashed(sent)

    def fingerprint(self, written: str) -> str:
        """The hash of a key in a policy; a hash is returned as it is.

        Never use it for keys that clients send: a hash would then be as good as its key.
        """
        if written.startswith(PREFIX):
            digits = written.removeprefix(PREFIX).lower()
            if len(digits) != DIGEST_SIZE * 2 or digits.strip("0123456789abcdef"):
                raise InvalidInput(f"an API key starts with {PREFIX!r}, but {DIGEST_SIZE * 2} hex digits don't follow")
            return PREFIX + digits
        hashed = self.hashed(written)
        if hashed is None:
            raise InvalidInput(
                f"an API key of {len(written)} characters is not valid; "
                f"it is one word of printable ASCII, without commas, of up to {LONGEST_KEY} characters"
            )
        return hashed

    def _hashed(self, sent: str) -> str | None:
        if not (0 < len(sent) <= LONGEST_KEY and sent.isascii() and sent.isprintable()) or " " in sent or "," in sent:
            return None
        keyed = self._hash.copy()
        keyed.update(sent.encode("ascii"))
        if len(self._known) >= MOST_KNOWN:
            # Clearing is cheaper than evicting: active keys are cached again with their next request.
            self._known.clear()
        hashed = self._known[hash(sent)] = PREFIX + keyed.hexdigest()
        return hashed


def _keyed_hash(secret: bytes, purpose: bytes) -> blake2b:
    key = secret if len(secret) <= blake2b.MAX_KEY_SIZE else blake2b(secret).digest()
    return blake2b(digest_size=DIGEST_SIZE, key=key, person=purpose)
