"""The status store in Redis: on the servers of the gate's store, one hash per collection, on separate connections."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from headgate.errors import InvalidConfiguration
from headgate.stores.redis.background_client import BackgroundClient
from headgate.stores.redis.connection_factory import connection_factory
from headgate.stores.redis.encoding import Command, CommandEncoder, Keys
from headgate.stores.redis.scripts import Script
from headgate.telemetry.fleet.status_store import StatusDocument, split_name

__all__ = ["RedisStatusStore"]

SWEEP_MS: Final = 60_000
"""The interval at which writers remove expired documents."""


class RedisStatusStore:
    """A status store in Redis: a single server, Sentinel or Cluster.

    A collection is one key, `headgate:%board:beats`, and therefore on one server of a cluster.
    """

    def __init__(self, where: Any, *, namespace: str = "headgate") -> None:
        self._encoder = CommandEncoder(namespace, None)
        self._client = BackgroundClient(_factory(where), self._encoder)

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        collection, rest = split_name(name)
        self._run(collection, "put", rest, document, round(keep * 1000), SWEEP_MS)

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        collection, start = split_name(prefix)
        reply: list[bytes] = self._run(collection, "read")
        found: dict[str, StatusDocument] = {}
        for encoded, text in zip(reply[::2], reply[1::2], strict=True):
            name = encoded.decode("utf-8", "replace")
            age_ms, _, document = text.partition(b" ")
            if name.startswith(start) and age_ms.isdigit():
                found[f"{collection}/{name}"] = StatusDocument(document, int(age_ms) / 1000)
        return found

    def close(self) -> None:
        self._client.close()

    def _run(self, collection: str, *arguments: Any) -> Any:
        keys = Keys.of(self._encoder.own_name(f"board:{collection}"))
        return self._client.execute(Command(SCRIPT, keys, list(arguments)))


def _factory(where: Any) -> Any:
    try:
        return connection_factory(where, asynchronous=False)
    except InvalidConfiguration:
        if isinstance(where, str):
            raise
        return connection_factory(where, asynchronous=True)


_TEXT: Final = files("headgate.telemetry.fleet").joinpath("status.lua").read_bytes()
SCRIPT: Final = Script(_TEXT, sha1(_TEXT, usedforsecurity=False).hexdigest().encode())
