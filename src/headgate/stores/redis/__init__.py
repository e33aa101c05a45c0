"""The Redis store: standalone, Sentinel, Cluster or several of these, for threads or for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.stores.redis.async_store import AsyncRedisStore
from headgate.stores.redis.connection_factory import connection_factory
from headgate.stores.redis.encoding import CommandEncoder
from headgate.stores.redis.sync_store import RedisStore

if TYPE_CHECKING:
    from headgate.clock import Clock

__all__ = ["AsyncRedisStore", "RedisStore", "open_redis"]


def open_redis(
    where: Any, *, clock: Clock | None, namespace: str, budget: float, asynchronous: bool
) -> RedisStore | AsyncRedisStore:
    """The store at a URL, at the same place as a redis-py client, or spread over several of these by name."""
    factory = connection_factory(where, asynchronous=asynchronous)
    encoder = CommandEncoder(namespace, clock, database=factory.database)
    return (AsyncRedisStore if asynchronous else RedisStore)(factory, encoder, budget=budget)
