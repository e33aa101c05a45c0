"""The part of the Redis store that is the same for threads and asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.stores.redis.background_client import BackgroundClient
from headgate.stores.redis.batch_protocol import run_batch
from headgate.stores.redis.breaker import CircuitBreakers
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.exchange import Exchange, batch_deadline
from headgate.stores.redis.pubsub import Subscriber
from headgate.stores.redis.topology import Standalone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.errors import StoreError
    from headgate.stores.operations import Call
    from headgate.stores.redis.connection_factory import ConnectionFactory
    from headgate.stores.redis.encoding import CommandEncoder, Node

__all__ = ["RedisStoreBase"]


class RedisStoreBase:
    """The servers behind one URL, for one namespace."""

    def __init__(self, factory: ConnectionFactory, encoder: CommandEncoder, *, budget: float) -> None:
        self.factory = factory
        self.encoder = encoder
        self.budget = budget
        """Seconds that a call may take."""
        self.breakers = CircuitBreakers()
        self.only_breaker = self.breakers[None] if isinstance(factory.topology, Standalone) else None
        """The breaker of the server, if there is only one."""
        self.calls = self.round_trips = self.unexpected_replies = 0

    @property
    def stats(self) -> dict[str, int]:
        """Counters: calls, round trips that carried them, and connections closed because of an unexpected reply."""
        return {"calls": self.calls, "round_trips": self.round_trips, "unexpected_replies": self.unexpected_replies}

    def start_exchange(self, calls: Sequence[Call], arrived: float, now: float, *, after_failure: bool) -> Exchange:
        """An exchange for calls of which the oldest arrived at `arrived`."""
        end = batch_deadline(arrived, now, self.budget, after_failure=after_failure)
        self.calls += len(calls)
        rounds = run_batch(calls, self.encoder, self.factory.topology)
        return Exchange(rounds, self.budget, end=end, breakers=self.breakers)

    def report_failure(self, node: Node | None, error: StoreError) -> None:
        """Count the failure of a connection or a server."""
        if isinstance(error, UnexpectedReply):
            self.unexpected_replies += 1
        self.breakers.fail(node, error)

    def reset_after_fork(self) -> None:
        """Start afresh: a child must not use its parent's connections, and has no waiting calls."""
        self.calls = self.round_trips = self.unexpected_replies = 0
        self.breakers.reset()

    def nodes(self) -> list[Node | None]:
        """The servers with keys, as far as they are known; None stands for the only one."""
        return self.factory.topology.primaries()

    def address(self, node: Node | None) -> str:
        """The display name of a server."""
        if node is not None:
            return f"{node.host}:{node.port}"
        options = self.factory.options
        return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")

    def background_client(self) -> BackgroundClient:
        """A client of the same servers for background threads, with connections of its own."""
        return BackgroundClient(self.factory, self.encoder)

    def subscriber(self, **callbacks: Any) -> Subscriber:
        """A subscriber to the notifications of other processes."""
        return Subscriber(self.factory, self.encoder, **callbacks)
