"""The board in Redis: on the servers of the store, one hash for each room, on connections of its own."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from headgate.errors import InvalidConfiguration
from headgate.stores.redis.background_client import BackgroundClient
from headgate.stores.redis.connection_factory import connection_factory
from headgate.stores.redis.encoding import Command, CommandEncoder, Keys
from headgate.stores.redis.scripts import Script
from headgate.telemetry.fleet.status_store import StatusDocument, room_of

__all__ = ["RedisStatusStore"]

SWEEP_MS: Final = 60_000
"""What is over is taken away so often at least, by whoever puts something."""


class RedisStatusStore:
    """A board that all processes share who count in one Redis: a single server, Sentinel or Cluster, with TLS or not.

    A room is one key, `headgate:%board:beats`, and so on one server of a cluster. Servers tell how old a document is,
    so that neither a writer's nor a reader's clock matters.
    """

    def __init__(self, where: Any, *, namespace: str = "headgate") -> None:
        self._clerk = _StatusClient(_place(where), CommandEncoder(namespace, None))

    def put(self, name: str, document: bytes, *, keep: float) -> None:
        """Put a document, to be forgotten after `keep` seconds; at once, if that is 0."""
        room, rest = room_of(name)
        self._clerk.put(room, rest, document, round(keep * 1000))

    def read(self, prefix: str) -> dict[str, StatusDocument]:
        """All documents of a room ("beats/"), by their whole names."""
        room, start = room_of(prefix)
        found = self._clerk.read(room)
        return {f"{room}/{rest}": posted for rest, posted in found.items() if rest.startswith(start)}

    def close(self) -> None:
        """Close the connections; whoever puts or reads again opens them anew."""
        self._clerk.close()


class _StatusClient(BackgroundClient):
    """Asks for what is on boards, as its kind asks for blocks: patiently, and on connections of its own."""

    def put(self, room: str, name: str, document: bytes, keep_ms: int) -> None:
        self.execute(self._command(room, ["put", name, document, keep_ms, SWEEP_MS]))

    def read(self, room: str) -> dict[str, StatusDocument]:
        pairs: list[bytes] = self.execute(self._command(room, ["read"]))
        return {
            name.decode("utf-8", "replace"): posted
            for name, text in zip(pairs[::2], pairs[1::2], strict=True)
            if (posted := _posted(text)) is not None
        }

    def _command(self, room: str, args: list[Any]) -> Command:
        return Command(SCRIPT, Keys.of(self.encoder.own_name(f"board:{room}")), args)


def _posted(text: bytes) -> StatusDocument | None:
    """What the script says of a document: its age in milliseconds, a blank, and the document as it is."""
    age_ms, _, document = text.partition(b" ")
    return StatusDocument(document, int(age_ms) / 1000) if age_ms.isdigit() else None


def _place(where: Any) -> Any:
    if isinstance(where, str):
        return connection_factory(where, asynchronous=False)
    try:
        return connection_factory(where, asynchronous=False)
    except InvalidConfiguration:
        return connection_factory(where, asynchronous=True)


def _script() -> Script:
    text = files("headgate.telemetry.fleet").joinpath("status.lua").read_bytes()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


SCRIPT: Final = _script()
