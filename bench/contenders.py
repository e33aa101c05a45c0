"""Who is measured, and exactly what is timed for each.

A contender is an expression, written as its own documentation writes a check, and a function that opens the
names that the expression uses. The loops in `measure` are compiled around the expression, so that no wrapper
stands between the clock and the library. `key` is the caller's identity: a str, as requests bring it.

The openers are handed a stack and leave on it whatever must be closed. All of them get the same limit.
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


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to ask whether a key may pass."""

    name: str
    package: str
    algorithm: str
    opened: Callable[[Setting, Any], Any]  # gives the names, or is awaited for them
    one: str
    three: str = ""  # three limits on one request
    allowed: str = "answer"  # how the answer is read
    three_allowed: str = ""  # and that of `three`, where it differs
    without_waiting: str = ""  # the same check where `one` would wait for its turn instead of denying
    denies_with: tuple[str, str] | None = None  # the exception that says no: its module and name


# -- headgate ------------------------------------------------------------------------------------------------


def _headgate_names(limiter: Any, setting: Setting) -> Names:
    from headgate import Limit

    return {"limiter": limiter} | {n: Limit(setting.quota, setting.period, name=n) for n in THREE}


def _headgate(setting: Setting, stack: ExitStack) -> Names:
    from headgate import Limiter

    # Room for every key of the scenario: the bound on memory is measured by the footprint, not by evictions.
    limiter = Limiter(setting.url, max_keys=max(1_000_000, 2 * setting.keys))
    return _headgate_names(stack.enter_context(limiter), setting)


async def _headgate_async(setting: Setting, stack: AsyncExitStack) -> Names:
    from headgate import AsyncLimiter

    return _headgate_names(await stack.enter_async_context(AsyncLimiter(setting.url)), setting)


# -- limits --------------------------------------------------------------------------------------------------


def _limits_items(setting: Setting) -> Names:
    from limits import RateLimitItemPerSecond

    return {n: RateLimitItemPerSecond(setting.quota, setting.seconds, namespace=n) for n in THREE}


def _limits(setting: Setting, stack: ExitStack) -> Names:
    from limits.storage import storage_from_string
    from limits.strategies import FixedWindowRateLimiter

    storage: Any = storage_from_string(setting.url)
    if not setting.url.startswith("memory"):
        stack.callback(storage.storage.close)
    return {"limiter": FixedWindowRateLimiter(storage)} | _limits_items(setting)


async def _limits_async(setting: Setting, stack: AsyncExitStack) -> Names:
    from limits.aio.strategies import FixedWindowRateLimiter
    from limits.storage import storage_from_string

    pool: Any = _async_pool(setting, stack)
    storage: Any = storage_from_string(f"async+{setting.url}", implementation="redispy", connection_pool=pool)
    return {"limiter": FixedWindowRateLimiter(storage)} | _limits_items(setting)


# -- throttled-py --------------------------------------------------------------------------------------------


def _throttles(flavour: Any, store: Any, setting: Setting) -> Names:
    quota = flavour.rate_limiter.per_duration(setting.period, setting.quota)
    fixed_window = flavour.RateLimiterType.FIXED_WINDOW.value
    return {n: flavour.Throttled(using=fixed_window, quota=quota, store=store, key_prefix=n) for n in THREE}


def _throttled(setting: Setting, stack: ExitStack) -> Names:
    import throttled

    if setting.url.startswith("memory"):
        # Its default store keeps 1,024 keys and forgets the rest.
        return _throttles(throttled, throttled.MemoryStore(options={"MAX_SIZE": setting.keys}), setting)
    store: Any = throttled.RedisStore(setting.url)
    stack.callback(store._backend.get_client().connection_pool.disconnect)  # noqa: SLF001 - it has no way to be closed
    return _throttles(throttled, store, setting)


async def _throttled_async(setting: Setting, stack: AsyncExitStack) -> Names:
    from throttled import asyncio as throttled

    options = {"CONNECTION_POOL_KWARGS": {"max_connections": _pool_size(setting)}}
    store: Any = throttled.RedisStore(setting.url, options=options)
    stack.push_async_callback(store._backend.get_client().connection_pool.disconnect)  # noqa: SLF001 - as above
    return _throttles(throttled, store, setting)


# -- pyrate-limiter, and fastapi-limiter which stands on it --------------------------------------------------


def _pyrate_limiters(setting: Setting, client: Any = None) -> dict[str, Any]:
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


def _pyrate(setting: Setting, stack: ExitStack) -> Names:
    if setting.url.startswith("memory"):
        return _pyrate_limiters(setting)
    return _pyrate_limiters(setting, stack.enter_context(redis.Redis.from_url(setting.url)))


async def _pyrate_async(setting: Setting, stack: AsyncExitStack) -> Names:
    return _pyrate_limiters(setting, _async_client(setting, stack))


async def _fastapi_limiter(setting: Setting, stack: AsyncExitStack) -> Names:
    from fastapi import Depends, FastAPI
    from fastapi_limiter.depends import RateLimiter
    from starlette.responses import Response

    limiters = _pyrate_limiters(setting, _async_client(setting, stack))
    dependencies = {n: RateLimiter(limiter=limiter) for n, limiter in limiters.items()}
    app = FastAPI(openapi_url=None)
    app.get("/", dependencies=[Depends(d) for d in dependencies.values()])(lambda: None)
    return {"request_of": _requests(app), "response": Response()} | dependencies


# fastapi-limiter up to 0.1.6 counted in a script of its own, called with evalsha on a redis-py client: still
# what many run, and the shortest way of all the peers. It cannot be installed beside 0.2, so that the script
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


async def _counter_script(setting: Setting, stack: AsyncExitStack) -> Names:
    client = _async_client(setting, stack)
    return {
        "redis": client,
        "sha": await client.script_load(_COUNTER),
        "times": setting.quota,
        "milliseconds": setting.seconds * 1000,
    }


def _counter_check(prefix: str) -> str:
    return f"await redis.evalsha(sha, 1, f'fastapi-limiter:{prefix}:{{key}}', str(times), str(milliseconds))"


# -- slowapi -------------------------------------------------------------------------------------------------


def _slowapi_views(setting: Setting, view: Callable[..., Any]) -> Names:
    from fastapi import FastAPI
    from slowapi import Limiter
    from slowapi.util import get_remote_address

    limiter = Limiter(key_func=get_remote_address, storage_uri=setting.url)
    words = f"{setting.quota} per {setting.seconds} seconds"
    views = {"view": limiter.limit(words)(_copy(view, "one"))}
    three = _copy(view, "three")
    for name in THREE:
        three = limiter.limit(words, key_func=_prefixed_address(name))(three)
    return {"request_of": _requests(FastAPI(openapi_url=None)), "three": three, "limiter": limiter} | views


def _slowapi(setting: Setting, stack: ExitStack) -> Names:
    def view(request: Any) -> None:
        return None

    names = _slowapi_views(setting, view)
    if not setting.url.startswith("memory"):
        stack.callback(names["limiter"]._storage.storage.close)  # noqa: SLF001 - it has no way to be closed
    return names


async def _slowapi_async(setting: Setting, stack: AsyncExitStack) -> Names:
    async def view(request: Any) -> None:
        return None

    names = _slowapi_views(setting, view)
    stack.callback(names["limiter"]._storage.storage.close)  # noqa: SLF001 - as above
    return {"its_turn": asyncio.sleep, **names}


def _copy(view: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same view under another name: slowapi keeps its limits by the name of the view."""
    from types import FunctionType

    copied = FunctionType(view.__code__, view.__globals__, name)
    copied.__annotations__ = view.__annotations__
    return copied


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


def _async_client(setting: Setting, stack: AsyncExitStack) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(connection_pool=_async_pool(setting, stack))


def _each(check: str, *, joined: str) -> str:
    """The three limits of a request, as a library asks that takes one limit at a time."""
    return joined.join(check.format(limit=n) for n in THREE)


# -- the lists -----------------------------------------------------------------------------------------------

_CHECK_THREE = "limiter.check(" + ", ".join(f"{n}.by(key)" for n in THREE) + ")"
_RATE_LIMIT_EXCEEDED = ("slowapi.errors", "RateLimitExceeded")
_HTTP_EXCEPTION = ("fastapi", "HTTPException")

SYNC = (
    Contender(
        name="headgate",
        package="headgate",
        algorithm="token bucket",
        opened=_headgate,
        one="limiter.check(per_ip.by(key))",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        package="limits",
        algorithm="fixed window",
        opened=_limits,
        one="limiter.hit(per_ip, key)",
    ),
    Contender(
        name="throttled-py",
        package="throttled-py",
        algorithm="fixed window",
        opened=_throttled,
        one="per_ip.limit(key)",
        allowed="not answer.limited",
    ),
    Contender(
        name="pyrate-limiter",
        package="pyrate-limiter",
        algorithm="GCRA",
        opened=_pyrate,
        one="per_ip.try_acquire(key)",
        without_waiting="per_ip.try_acquire(key, blocking=False)",
    ),
    Contender(
        name="slowapi",
        package="slowapi",
        algorithm="fixed window",
        opened=_slowapi,
        one="view(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)

ASYNC = (
    Contender(
        name="headgate",
        package="headgate",
        algorithm="token bucket",
        opened=_headgate_async,
        one="await limiter.check(per_ip.by(key))",
        three=f"await {_CHECK_THREE}",
        allowed="answer.allowed",
    ),
    Contender(
        name="limits",
        package="limits",
        algorithm="fixed window",
        opened=_limits_async,
        one="await limiter.hit(per_ip, key)",
        three=_each("await limiter.hit({limit}, key)", joined=" and "),
    ),
    Contender(
        name="throttled-py",
        package="throttled-py",
        algorithm="fixed window",
        opened=_throttled_async,
        one="await per_ip.limit(key)",
        three=_each("(await {limit}.limit(key)).limited", joined=" or "),
        allowed="not answer.limited",
        three_allowed="not answer",
    ),
    Contender(
        name="pyrate-limiter",
        package="pyrate-limiter",
        algorithm="GCRA",
        opened=_pyrate_async,
        one="await per_ip.try_acquire_async(key, blocking=False)",
        three=_each("await {limit}.try_acquire_async(key, blocking=False)", joined=" and "),
    ),
    Contender(
        name="fastapi-limiter 0.1",
        package="redis",
        algorithm="fixed window",
        opened=_counter_script,
        one=_counter_check("per_ip"),
        three=" or ".join(_counter_check(n) for n in THREE),
        allowed="answer == 0",
    ),
    Contender(
        name="fastapi-limiter 0.2",
        package="fastapi-limiter",
        algorithm="GCRA",
        opened=_fastapi_limiter,
        one="await per_ip(request_of(key), response)",
        three=_each("await {limit}(request_of(key), response)", joined=" or "),
        allowed="answer is None",
        denies_with=_HTTP_EXCEPTION,
    ),
    Contender(
        name="slowapi",
        package="slowapi",
        algorithm="fixed window",
        opened=_slowapi_async,
        # It never gives the loop away: without this turn, the callers whom it keeps waiting are not seen.
        one="await its_turn(0) or await view(request_of(key))",
        three="await its_turn(0) or await three(request_of(key))",
        allowed="answer is None",
        denies_with=_RATE_LIMIT_EXCEEDED,
    ),
)
