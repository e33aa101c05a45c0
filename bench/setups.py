"""How each contender is set up, as its own documentation says. What is timed then stands in `contenders`.

An opener gives the names that the contender's expressions use; what must be closed it leaves on the stack. All get the
same limit, three times over: a request may have to meet three.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import redis
import redis.asyncio

Names = dict[str, Any]
THREE = ("per_ip", "per_user", "per_key")  # the limits that one request meets, where it meets three


@dataclass(frozen=True, slots=True)
class Setting:
    """What a contender is opened for."""

    url: str
    quota: int
    period: timedelta
    callers: int = 1  # how many threads or tasks will call at once
    keys: int = 100_000  # how many keys must be held at once

    @property
    def seconds(self) -> int:
        return int(self.period.total_seconds())

    @property
    def in_memory(self) -> bool:
        return self.url.startswith("memory")


# -- headgate ------------------------------------------------------------------------------------------------


def _headgate_names(limiter: Any, setting: Setting) -> Names:
    from headgate import Limit

    return {"limiter": limiter} | {n: Limit(setting.quota, setting.period, name=n) for n in THREE}


def headgate(setting: Setting, stack: ExitStack) -> Names:
    from headgate import Limiter

    # Room for every key of the scenario: the bound on memory is measured by the footprint, not by evictions.
    limiter = Limiter(setting.url, max_keys=max(1_000_000, 2 * setting.keys))
    return _headgate_names(stack.enter_context(limiter), setting)


async def headgate_async(setting: Setting, stack: AsyncExitStack) -> Names:
    from headgate import AsyncLimiter

    return _headgate_names(await stack.enter_async_context(AsyncLimiter(setting.url)), setting)


# -- limits --------------------------------------------------------------------------------------------------


def _limits_items(setting: Setting) -> Names:
    from limits import RateLimitItemPerSecond

    return {n: RateLimitItemPerSecond(setting.quota, setting.seconds, namespace=n) for n in THREE}


def limits(setting: Setting, stack: ExitStack) -> Names:
    from limits.storage import storage_from_string
    from limits.strategies import FixedWindowRateLimiter

    storage: Any = storage_from_string(setting.url)
    if not setting.in_memory:
        stack.callback(storage.storage.close)
    return {"limiter": FixedWindowRateLimiter(storage)} | _limits_items(setting)


async def limits_async(setting: Setting, stack: AsyncExitStack) -> Names:
    from limits.aio.strategies import FixedWindowRateLimiter
    from limits.storage import storage_from_string

    pool: Any = _async_pool(setting, stack)
    storage: Any = storage_from_string(f"async+{setting.url}", implementation="redispy", connection_pool=pool)
    return {"limiter": FixedWindowRateLimiter(storage)} | _limits_items(setting)


# -- throttled-py --------------------------------------------------------------------------------------------


def _throttles(flavour: Any, store: Any, using: str, setting: Setting) -> Names:
    quota = flavour.rate_limiter.per_duration(setting.period, setting.quota)
    return {n: flavour.Throttled(using=using, quota=quota, store=store, key_prefix=n) for n in THREE}


def throttled_py(using: str, setting: Setting, stack: ExitStack) -> Names:
    import throttled

    if setting.in_memory:
        # Its default store keeps 1,024 keys and forgets the rest.
        memory = throttled.MemoryStore(options={"MAX_SIZE": setting.keys})
        return _throttles(throttled, memory, using, setting)
    store: Any = throttled.RedisStore(setting.url)
    stack.callback(store._backend.get_client().connection_pool.disconnect)  # noqa: SLF001 - it cannot be closed
    return _throttles(throttled, store, using, setting)


async def throttled_py_async(using: str, setting: Setting, stack: AsyncExitStack) -> Names:
    from throttled import asyncio as throttled

    options = {"CONNECTION_POOL_KWARGS": {"max_connections": _pool_size(setting)}}
    store: Any = throttled.RedisStore(setting.url, options=options)
    stack.push_async_callback(store._backend.get_client().connection_pool.disconnect)  # noqa: SLF001 - as above
    return _throttles(throttled, store, using, setting)


# -- pyrate-limiter, and fastapi-limiter which stands on it --------------------------------------------------


def pyrate_limiters(setting: Setting, client: Any = None) -> dict[str, Any]:
    from pyrate_limiter import (
        BucketFactory,
        Limiter,
        MonotonicClock,
        Rate,
        RateItem,
        RedisStateStore,
        StateBucket,
        WallClock,
    )

    rates = [Rate(setting.quota, setting.seconds * 1000)]

    class PerKeyFactory(BucketFactory):
        """A bucket per key, made when the key first comes: its documented way to tell callers apart."""

        def __init__(self, prefix: str) -> None:
            self.prefix = prefix
            self.buckets: dict[str, StateBucket] = {}
            self.clock = MonotonicClock() if client is None else WallClock()

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, self.clock.now(), weight=weight)

        def get(self, item: RateItem) -> StateBucket:
            bucket = self.buckets.get(item.name)
            if bucket is None:
                store = None if client is None else RedisStateStore(client, f"{self.prefix}:{item.name}")
                bucket = self.buckets[item.name] = StateBucket(rates, store=store)
            return bucket

    return {n: Limiter(PerKeyFactory(n)) for n in THREE}


def pyrate_limiter(setting: Setting, stack: ExitStack) -> Names:
    if setting.in_memory:
        return pyrate_limiters(setting)
    return pyrate_limiters(setting, stack.enter_context(redis.Redis.from_url(setting.url)))


async def pyrate_limiter_async(setting: Setting, stack: AsyncExitStack) -> Names:
    return pyrate_limiters(setting, async_client(setting, stack))


async def fastapi_limiter(setting: Setting, stack: AsyncExitStack) -> Names:
    from fastapi import Depends, FastAPI
    from fastapi_limiter.depends import RateLimiter
    from starlette.responses import Response

    limiters = pyrate_limiters(setting, async_client(setting, stack))
    dependencies = {n: RateLimiter(limiter=limiter) for n, limiter in limiters.items()}
    app = FastAPI(openapi_url=None)
    app.get("/", dependencies=[Depends(d) for d in dependencies.values()])(lambda: None)
    return {"request_of": _requests(app), "response": Response()} | dependencies


# fastapi-limiter up to 0.1.6 counted in a script of its own, called with evalsha on a redis-py client: still
# what many run, and a short way to Redis. It cannot be installed beside 0.2, so that the script
# is written anew here: the same commands in the same order, the same arguments, the same call.
_COUNTER = """
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
if used == 0 then
  redis.call('SET', KEYS[1], 1, 'PX', ARGV[2])
elseif used < tonumber(ARGV[1]) then
  redis.call('INCR', KEYS[1])
else
  return redis.call('PTTL', KEYS[1])
end
return 0
"""


async def counter_script(setting: Setting, stack: AsyncExitStack) -> Names:
    client = async_client(setting, stack)
    return {
        "redis": client,
        "sha": await client.script_load(_COUNTER),
        "times": setting.quota,
        "milliseconds": setting.seconds * 1000,
    }


# -- slowapi -------------------------------------------------------------------------------------------------


def slowapi(setting: Setting, stack: ExitStack) -> Names:
    def one(request: Any) -> None:
        return None

    def three(request: Any) -> None:
        return None

    return _slowapi_views(setting, stack, one, three)


async def slowapi_async(setting: Setting, stack: AsyncExitStack) -> Names:
    async def one(request: Any) -> None:
        return None

    async def three(request: Any) -> None:
        return None

    return {"its_turn": asyncio.sleep} | _slowapi_views(setting, stack, one, three)


def _slowapi_views(setting: Setting, stack: Any, one: Callable[..., Any], three: Callable[..., Any]) -> Names:
    """The views as slowapi decorates them; one decorator on top of the other is how it takes several limits."""
    from fastapi import FastAPI
    from slowapi import Limiter
    from slowapi.util import get_remote_address

    limiter: Any = Limiter(key_func=get_remote_address, storage_uri=setting.url)
    if not setting.in_memory:
        stack.callback(limiter._storage.storage.close)  # noqa: SLF001 - it cannot be closed
    limit = f"{setting.quota} per {setting.seconds} seconds"
    for name in THREE:
        three = limiter.limit(limit, key_func=_prefixed_address(name))(three)
    return {"request_of": _requests(FastAPI(openapi_url=None)), "one": limiter.limit(limit)(one), "three": three}


def _prefixed_address(prefix: str) -> Callable[[Any], str]:
    def address(request: Any) -> str:
        return f"{prefix}:{request.client.host}"

    return address


# -- shared --------------------------------------------------------------------------------------------------


def _requests(app: Any) -> Callable[[str], Any]:
    """Requests as the framework would hand them on, one per check: slowapi marks those that it has seen."""
    from starlette.requests import Request

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "app": app}

    def request_of(key: str) -> Request:
        return Request({**scope, "client": (key, 1)})

    return request_of


def _pool_size(setting: Setting) -> int:
    """redis-py fails the callers above its 100 connections: as many connections as callers, then."""
    return max(100, setting.callers)


def _async_pool(setting: Setting, stack: AsyncExitStack) -> redis.asyncio.ConnectionPool:
    pool = redis.asyncio.ConnectionPool.from_url(setting.url, max_connections=_pool_size(setting))
    stack.push_async_callback(pool.disconnect)
    return pool


def async_client(setting: Setting, stack: AsyncExitStack) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(connection_pool=_async_pool(setting, stack))
