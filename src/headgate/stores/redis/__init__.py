"""The Redis store: standalone, Sentinel or Cluster, for threads or for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.stores.redis.aio import AsyncRedisStore
from headgate.stores.redis.places import find_place
from headgate.stores.redis.sync import RedisStore
from headgate.stores.redis.wire import Wire

if TYPE_CHECKING:
    from headgate.clock import Clock

__all__ = ["AsyncRedisStore", "RedisStore", "open_redis"]


def open_redis(
    where: Any, *, clock: Clock | None, namespace: str, budget: float, asynchronous: bool
) -> RedisStore | AsyncRedisStore:
    """The store at a URL, or at the same place as a redis-py client."""
    place = find_place(where, asynchronous=asynchronous)
    wire = Wire(namespace, clock, database=place.options.get("db") or 0)
    return (AsyncRedisStore if asynchronous else RedisStore)(place, wire, budget=budget)
