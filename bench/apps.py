"""One small app, with each library installed as its documentation says.

The app has one route, `GET /items/{id}`. Headgate is measured with three limits, with one, and with three and metrics
and the decision log attached; the other libraries with one limit by client address, their best case.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from bench.contenders import HEADGATE, HEADGATE_OBSERVED, HEADGATE_ONE_LIMIT
from bench.setups import Setting, async_client, pyrate_limiters

BARE_APP = "bare app"

# If the store fails, the response is a 503, which fails the measurement.
POLICY = """
on_failure: closed
limits:
  - {{name: per-ip, by: ip, limit: "{quota} per {seconds} seconds"}}
"""
TWO_MORE = """
  - {{name: per-key, by: api_key, limit: "{quota} per {seconds} seconds"}}
  - {{name: everybody, by: global, limit: "{many} per {seconds} seconds"}}
"""
SECRET = "sixteen or more bytes that all machines share"
BUDGET = 1.0  # seconds for the store; the default of 5 ms is too short on a busy machine


@dataclass(frozen=True, slots=True)
class AppContender:
    """An app with a rate limiter."""

    name: str
    how: str
    """How the limiter is installed."""
    setup: Callable[[Setting, AsyncExitStack], Any]
    """Creates the app; the stack closes what it needs."""
    stores: tuple[str, ...] = ("memory", "Redis")
    limits: int = 1


def _policy(setting: Setting, *, limits: int) -> Any:
    from headgate.policy.loader import read

    text = POLICY + TWO_MORE * (limits > 1)
    return read(text.format(quota=setting.quota, many=10 * setting.quota, seconds=setting.seconds))


# -- FastAPI -------------------------------------------------------------------------------------------------


def _fastapi() -> Any:
    from fastapi import FastAPI

    return FastAPI(openapi_url=None)


async def item(id: int) -> dict[str, int]:
    return {"id": id}


def fastapi_alone(setting: Setting, stack: AsyncExitStack) -> Any:
    app = _fastapi()
    app.get("/items/{id}")(item)
    return app


def fastapi_headgate(setting: Setting, stack: AsyncExitStack, *, limits: int = 3, is_observed: bool = False) -> Any:
    from headgate.adapters.asgi import HeadgateMiddleware

    app = fastapi_alone(setting, stack)
    log = _decision_log(stack) if is_observed else None

    def install(app: Any) -> Any:
        policy = _policy(setting, limits=limits)
        middleware = HeadgateMiddleware(app, policy, setting.url, secret=SECRET, budget=BUDGET, on_decision=log)
        if is_observed:
            _register_metrics(middleware.gate)
        return middleware

    app.add_middleware(install)
    return app


def fastapi_headgate_observed(setting: Setting, stack: AsyncExitStack) -> Any:
    return fastapi_headgate(setting, stack, is_observed=True)


def _decision_log(stack: AsyncExitStack) -> Any:
    """A decision log with its default settings, in a temporary SQLite file."""
    from headgate.telemetry import DecisionLog

    directory = stack.enter_context(TemporaryDirectory())
    log = DecisionLog(f"sqlite:///{directory}/decisions.db", secret=SECRET)
    stack.callback(log.close)
    return log


def _register_metrics(gate: Any) -> None:
    from prometheus_client import CollectorRegistry

    from headgate.telemetry.prometheus import register

    register(gate, CollectorRegistry())


def fastapi_headgate_one(setting: Setting, stack: AsyncExitStack) -> Any:
    return fastapi_headgate(setting, stack, limits=1)


def slowapi_decorator(setting: Setting, stack: AsyncExitStack) -> Any:
    from starlette.requests import Request

    app, limiter = _slowapi(setting, stack)

    async def item(request: Request, id: int) -> dict[str, int]:
        return {"id": id}

    app.get("/items/{id}")(limiter.limit(_words(setting))(item))
    return app


def slowapi_middleware(setting: Setting, stack: AsyncExitStack) -> Any:
    from slowapi.middleware import SlowAPIASGIMiddleware

    app, _ = _slowapi(setting, stack, default_limits=[_words(setting)])
    app.get("/items/{id}")(item)
    app.add_middleware(SlowAPIASGIMiddleware)
    return app


def _slowapi(setting: Setting, stack: AsyncExitStack, **options: Any) -> tuple[Any, Any]:
    from slowapi import Limiter, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter: Any = Limiter(key_func=get_remote_address, storage_uri=setting.url, **options)
    if not setting.in_memory:
        stack.callback(limiter._storage.storage.close)  # noqa: SLF001 - it has no close()
    app = _fastapi()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)
    return app, limiter


def fastapi_throttled(setting: Setting, stack: AsyncExitStack) -> Any:
    from throttled.asyncio.contrib.fastapi import RateLimitMiddleware

    app = fastapi_throttled_bare(setting, stack)
    app.add_middleware(RateLimitMiddleware)
    return app


def fastapi_throttled_bare(setting: Setting, stack: AsyncExitStack) -> Any:
    from starlette.requests import Request
    from throttled.asyncio import MemoryStore, RedisStore
    from throttled.asyncio.contrib import fastapi as throttled
    from throttled.asyncio.rate_limiter import per_duration

    store: Any = MemoryStore() if setting.in_memory else RedisStore(setting.url)
    if not setting.in_memory:
        stack.push_async_callback(store._backend.get_client().connection_pool.disconnect)  # noqa: SLF001 - as above
    quota = per_duration(setting.period, setting.quota)
    limiter = throttled.Limiter(quota, store=store, using="fixed_window", key_func=throttled.get_remote_address)
    app = _fastapi()
    app.add_exception_handler(throttled.RateLimitExceededError, throttled.rate_limit_exceeded_handler)

    async def item(request: Request, id: int) -> dict[str, int]:
        return {"id": id}

    app.get("/items/{id}")(limiter.limit()(item))
    return app


def fastapi_limiter(setting: Setting, stack: AsyncExitStack) -> Any:
    from fastapi import Depends
    from fastapi_limiter.depends import RateLimiter

    client = None if setting.in_memory else async_client(setting, stack)
    limiter = pyrate_limiters(setting, client)["per_ip"]
    app = _fastapi()
    app.get("/items/{id}", dependencies=[Depends(RateLimiter(limiter=limiter))])(item)
    return app


# -- Flask ---------------------------------------------------------------------------------------------------


def flask_alone(setting: Setting, stack: AsyncExitStack) -> Any:
    from flask import Flask

    app = Flask("bench")
    app.get("/items/<int:id>")(flask_item)
    return app


def flask_item(id: int) -> dict[str, int]:
    return {"id": id}


def flask_headgate(setting: Setting, stack: AsyncExitStack, *, limits: int = 3, is_observed: bool = False) -> Any:
    from headgate.adapters.wsgi import HeadgateMiddleware

    app = flask_alone(setting, stack)
    log = _decision_log(stack) if is_observed else None
    policy = _policy(setting, limits=limits)
    middleware = HeadgateMiddleware(app.wsgi_app, policy, setting.url, secret=SECRET, budget=BUDGET, on_decision=log)
    if is_observed:
        _register_metrics(middleware.gate)
    stack.callback(middleware.gate.close)
    app.wsgi_app = middleware
    return app


def flask_headgate_observed(setting: Setting, stack: AsyncExitStack) -> Any:
    return flask_headgate(setting, stack, is_observed=True)


def flask_headgate_one(setting: Setting, stack: AsyncExitStack) -> Any:
    return flask_headgate(setting, stack, limits=1)


def flask_limiter(setting: Setting, stack: AsyncExitStack) -> Any:
    from flask_limiter import Limiter
    from flask_limiter.util import get_remote_address

    app = flask_alone(setting, stack)
    Limiter(get_remote_address, app=app, default_limits=[_words(setting)], storage_uri=setting.url)
    return app


def flask_throttled(setting: Setting, stack: AsyncExitStack) -> Any:
    from flask import Flask
    from throttled import MemoryStore, RedisStore
    from throttled.contrib import flask as throttled
    from throttled.rate_limiter import per_duration

    app = Flask("bench")
    limiter = throttled.Limiter(
        per_duration(setting.period, setting.quota),
        app=app,
        store=MemoryStore() if setting.in_memory else RedisStore(setting.url),
        using="fixed_window",
        key_func=throttled.get_remote_address,
    )
    app.get("/items/<int:id>")(limiter.limit()(flask_item))
    return app


def _words(setting: Setting) -> str:
    return f"{setting.quota} per {setting.seconds} seconds"


# -- contenders ----------------------------------------------------------------------------------------------

_THREE = "`HeadgateMiddleware` with three limits: by address, by API key, and for all together"
_OBSERVED = "the same, with Prometheus metrics and a decision log in SQLite"
_ONE = "`HeadgateMiddleware` with one limit, by address"

FASTAPI = (
    AppContender(BARE_APP, "FastAPI, one route", fastapi_alone, limits=0),
    AppContender(HEADGATE, _THREE, fastapi_headgate, limits=3),
    AppContender(HEADGATE_OBSERVED, _OBSERVED, fastapi_headgate_observed, limits=3),
    AppContender(HEADGATE_ONE_LIMIT, _ONE, fastapi_headgate_one),
    AppContender("slowapi", "`@limiter.limit` on the route", slowapi_decorator),
    AppContender("slowapi's middleware", "`SlowAPIASGIMiddleware` with `default_limits`", slowapi_middleware),
    AppContender("throttled-py", "`@limiter.limit` and `RateLimitMiddleware`", fastapi_throttled),
    AppContender("throttled-py, no headers", "`@limiter.limit` alone", fastapi_throttled_bare),
    AppContender("fastapi-limiter 0.2", "`Depends(RateLimiter(...))`", fastapi_limiter),
)
FLASK = (
    AppContender(BARE_APP, "Flask, one route", flask_alone, limits=0),
    AppContender(HEADGATE, _THREE, flask_headgate, limits=3),
    AppContender(HEADGATE_OBSERVED, _OBSERVED, flask_headgate_observed, limits=3),
    AppContender(HEADGATE_ONE_LIMIT, _ONE, flask_headgate_one),
    AppContender("flask-limiter", "`Limiter` with `default_limits`", flask_limiter),
    AppContender("throttled-py", "`@limiter.limit` on the route", flask_throttled),
)
