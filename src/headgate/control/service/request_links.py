"""Links to the page on which a customer requests a higher limit: signed, and valid for a week."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Final, NamedTuple

from headgate.control.service.models import ClientRef
from headgate.errors import InvalidInput

__all__ = ["LIFETIME_US", "Link", "LinkSigner"]

LIFETIME_US: Final = 7 * 86_400_000_000
MAX_LENGTH: Final = 1_200
EXPIRED: Final = "This link has expired or is incomplete. Ask support for a new one."
_PURPOSE: Final = b"headgate limit request links"


class Link(NamedTuple):
    """The content of a link."""

    client: ClientRef
    name: str
    anomaly: str
    until_us: int


class LinkSigner:
    """Signs links with a key that is derived from the secret of the gates.

    >>> signer = LinkSigner(b"sixteen bytes or more")
    >>> token = signer.sign(Link(ClientRef("tenant", "acme"), "Acme", "4b1f", until_us=2_000_000))
    >>> signer.read(token, now_us=1_000_000).name
    'Acme'
    """

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.new(secret, _PURPOSE, hashlib.sha256).digest()

    def sign(self, link: Link) -> str:
        fields = [*link.client, link.name[:200], link.anomaly, link.until_us]
        body = _encode(json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode())
        return f"{body}.{self._signature(body)}"

    def read(self, token: str, *, now_us: int) -> Link:
        """The content of a link; InvalidInput if it has expired or was not signed here."""
        body, _, signature = token[:MAX_LENGTH].partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(body).encode()):
            raise InvalidInput(EXPIRED)
        kind, value, name, anomaly, until_us = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        if now_us >= until_us:
            raise InvalidInput(EXPIRED)
        return Link(ClientRef(kind, value), name, anomaly, until_us)

    def _signature(self, body: str) -> str:
        return _encode(hmac.new(self._key, body.encode(), hashlib.sha256).digest()[:24])


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
