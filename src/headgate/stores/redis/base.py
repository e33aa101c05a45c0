"""The part of the Redis store that is the same for threads and asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.stores.operations import Call, Check, Reset
from headgate.stores.redis.background_client import BackgroundClient
from headgate.stores.redis.batch_protocol import run_batch
from headgate.stores.redis.breaker import CircuitBreakers
from headgate.stores.redis.decoding import UnexpectedReply
from headgate.stores.redis.exchange import MIN_BUDGET_SHARE, MIN_REPLY_S, Exchange
from headgate.stores.redis.pubsub import Subscriber
from headgate.stores.redis.rollout_follower import RolloutFollower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.errors import StoreError
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
        self.only_breaker = self.breakers[None] if factory.topology.primaries() == [None] else None
        self.calls = self.round_trips = self.unexpected_replies = 0

    @property
    def stats(self) -> dict[str, int]:
        """Counters: calls, round trips that carried them, and connections closed because of an unexpected reply."""
        return {"calls": self.calls, "round_trips": self.round_trips, "unexpected_replies": self.unexpected_replies}

    def start_exchange(self, calls: Sequence[Call], arrived: float, now: float, *, after_failure: bool) -> Exchange:
        """An exchange for calls of which the oldest arrived at `arrived`."""
        minimum_s = min(MIN_REPLY_S, self.budget) if after_failure else self.budget * MIN_BUDGET_SHARE
        end = max(arrived + self.budget, now + minimum_s)  # the budget includes time spent waiting
        self.calls += len(calls)
        rounds = run_batch(calls, self.encoder, self.factory.topology)
        return Exchange(rounds, self.budget, end=end, breakers=self.breakers)

    def report_failure(self, node: Node | None, error: StoreError) -> None:
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
        return self.factory.address(node)

    def background_client(self) -> BackgroundClient:
        """A client of the same servers for background threads, with connections of its own."""
        return BackgroundClient(self.factory, self.encoder)

    def rollout_follower(self, client: BackgroundClient) -> RolloutFollower:
        """The follower of rollouts of scripts, for the maintenance thread."""
        where = ", ".join(map(self.address, self.nodes())) or "the store"
        return RolloutFollower(self.encoder, client, where=where)

    def subscriber(self, source: str | None = None, **callbacks: Any) -> Subscriber:
        """A subscriber to one of the sources of messages."""
        factory = self.factory if source is None else self.factory.shards[source]
        return Subscriber(factory, self.encoder, **callbacks)

    def message_sources(self) -> list[str | None]:
        """The sources of messages, each of which needs a subscriber: the shards, or None for the only one. The first
        one also announces changes of the block list."""
        return [*self.factory.shards] or [None]

    def is_available(self, call: Call) -> bool:
        """True if no breaker of the servers that a call needs is open."""
        down = self.breakers.open_breakers()
        if not down:
            return True
        keys = call.keys if isinstance(call, Check | Reset) else (call.key,)
        return down.keys().isdisjoint(self.factory.topology.servers_of([self.encoder.name(key) for key in keys]))
