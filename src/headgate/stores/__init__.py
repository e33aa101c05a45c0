"""Stores of counters. A store runs the operations of `stores.operations` atomically; `open_store` picks one by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.errors import InvalidConfiguration
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.clock import Clock

__all__ = ["open_store"]

REDIS_SCHEMES = (
    *("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"),
    "sharded",
)


def open_store(
    url: Any,
    *,
    clock: Clock | None,
    default_clock: Clock,
    namespace: str,
    budget: float,
    max_keys: int,
    asynchronous: bool,
) -> Any:
    """The store that a URL, a Redis client that the caller has already, or a dict of these by shard, stands for.

    Nothing is connected yet.
    """
    if isinstance(url, str):
        scheme, separator, rest = url.partition("://")
        if url in ("memory://", "memory:") or (scheme == "memory" and separator and not rest):
            return MemoryStore(clock or default_clock, max_keys=max_keys)
        if scheme not in REDIS_SCHEMES or not separator:
            raise InvalidConfiguration(
                f"cannot open the store {_without_password(url)!r}: the URL must start with one of "
                f"{', '.join(f'{known}://' for known in ('memory', *REDIS_SCHEMES))}"
            )
    try:
        from headgate.stores.redis import open_redis
    except ModuleNotFoundError as missing:
        if missing.name not in ("redis", "hiredis"):
            raise
        raise InvalidConfiguration(
            f"a Redis store needs the package {missing.name!r}: pip install 'headgate[redis]'"
        ) from None
    return open_redis(url, clock=clock, namespace=namespace, budget=budget, asynchronous=asynchronous)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else url
