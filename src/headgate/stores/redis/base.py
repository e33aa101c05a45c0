"""What both Redis stores offer to whoever looks after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.stores.redis.background_client import BackgroundClient
from headgate.stores.redis.breaker import CircuitBreakers
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.pubsub import Subscriber
from headgate.stores.redis.topology import Standalone

if TYPE_CHECKING:
    from headgate.errors import StoreError
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node

__all__ = ["FIRST_CONNECTION_S", "RedisStoreBase"]

FIRST_CONNECTION_S: Final = 0.5
"""Seconds that the first calls in a forked process may wait for a connection, beyond their budget."""


class RedisStoreBase:
    """Servers at one place, spoken to in one way."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder) -> None:
        self.factory = factory
        self.encoder = encoder
        self.breakers = CircuitBreakers()
        self._only = self.breakers[None] if isinstance(factory.topology, Standalone) else None
        """The breaker of the one server, where there is only one."""
        self.unexpected_replies = 0
        """Connections that were closed because something came in on them that was not the reply to a command."""

    def note_failure(self, node: Node | None, error: StoreError) -> None:
        """Count the failure of a connection or a server."""
        if isinstance(error, UnexpectedReply):
            self.unexpected_replies += 1
        self.breakers.fail(node, error)

    def nodes(self) -> list[Node | None]:
        """The servers that have keys, as far as they are known; None stands for the only one there is."""
        return self.factory.topology.primaries()

    def address(self, node: Node | None) -> str:
        """A server's name, for people."""
        if node is not None:
            return f"{node.host}:{node.port}"
        options = self.factory.options
        return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")

    def background_client(self) -> BackgroundClient:
        """The same servers, for threads in the background: patient, and on connections of its own."""
        return BackgroundClient(self.factory, self.encoder)

    def subscriber(self, **callbacks: Any) -> Subscriber:
        """The news of other processes."""
        return Subscriber(self.factory, self.encoder, **callbacks)
