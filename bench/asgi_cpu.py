"""Apps called in this process: the CPU time per request, and a check that limits are enforced."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from time import perf_counter, process_time
from typing import Any

from bench.apps import AppContender
from bench.correctness import THREE_THEN_NO_MORE, WrongAnswerError
from bench.setups import Setting
from bench.timing import Sample, tidy

SLICE = 256  # requests per app and turn
MANY = 1000  # items and API keys, as in wrk.lua

# Addresses and API keys: one client four times, another client, and a third with the key of the first.
CALLERS = [*[("127.0.0.1", "sk_live_a")] * 4, ("127.0.0.2", "sk_live_b"), ("127.0.0.3", "sk_live_a")]


# -- right answers first -------------------------------------------------------------------------------------


async def expect_limits(framework: str, contender: AppContender, setting: Setting) -> None:
    """Raise unless a limit of three allows three requests, denies the fourth and allows another client.

    With a limit by API key, a used-up key must be denied from another address, too.
    """
    async with AsyncExitStack() as stack:
        app = contender.setup(setting, stack)
        if framework == "FastAPI":
            await stack.enter_async_context(_lifespan(app))
            statuses = [await _status(app, *caller) for caller in CALLERS]
        else:
            statuses = [_wsgi_status(app, *caller) for caller in CALLERS]
    passes = THREE_THEN_NO_MORE if contender.limits else [True] * len(THREE_THEN_NO_MORE)
    expected = [200 if each else 429 for each in (*passes, contender.limits < 2)]
    if statuses != expected:
        raise WrongAnswerError(f"{contender.name} on {setting.url}: answered {statuses} instead of {expected}")


async def _status(app: Any, address: str, api_key: str) -> int:
    statuses: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    await app(_scope("/items/1", address, api_key.encode()), _nothing, send)
    return statuses[0]


def _wsgi_status(app: Any, address: str, api_key: str) -> int:
    from werkzeug.test import Client

    answer = Client(app).get("/items/1", headers={"x-api-key": api_key}, environ_base={"REMOTE_ADDR": address})
    return answer.status_code


# -- the CPU time of a request -------------------------------------------------------------------------------


async def cpu_time(contenders: Sequence[AppContender], setting: Setting, seconds: float) -> dict[str, Sample]:
    """The CPU time per request of each app, with `setting.callers` concurrent requests.

    The apps take turns of a few milliseconds, so that other load on the machine affects all of them alike.
    """
    spent, walls, served = ({contender.name: 0.0 for contender in contenders} for _ in range(3))
    async with AsyncExitStack() as stack:
        apps = {}
        for contender in contenders:
            app = apps[contender.name] = contender.setup(setting, stack)
            await stack.enter_async_context(_lifespan(app))
            await _slice(app, setting.callers, count(), MANY)
        stack.enter_context(tidy())
        numbers = count()
        until = perf_counter() + seconds * len(apps)
        while perf_counter() < until:
            for name, app in apps.items():
                began, wall = process_time(), perf_counter()
                await _slice(app, setting.callers, numbers, SLICE)
                spent[name] += process_time() - began
                walls[name] += perf_counter() - wall
                served[name] += SLICE
    return {
        name: Sample(rate=served[name] / walls[name], client_us=spent[name] / served[name] * 1e6) for name in served
    }


async def _slice(app: Any, callers: int, numbers: Iterator[int], requests: int) -> None:
    """Send requests as servers do, each in its own task."""
    if callers == 1:
        for _ in range(requests):
            await asyncio.create_task(_request(app, next(numbers) % MANY))
        return
    waiting = range(requests // callers)

    async def caller() -> None:
        for _ in waiting:
            await asyncio.create_task(_request(app, next(numbers) % MANY))

    await asyncio.gather(*[caller() for _ in range(callers)])


async def _request(app: Any, number: int) -> None:
    await app(_scope(f"/items/{number}", "127.0.0.1", b"sk_live_%d" % number), _nothing, _expect_success)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _expect_success(message: dict[str, Any]) -> None:
    if message.get("status", 200) != 200:
        raise WrongAnswerError(f"not every request was served: {message}")


def _scope(path: str, address: str, api_key: bytes) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": (address, 50_000),
        "scheme": "http",
        "method": "GET",
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8000"), (b"x-api-key", api_key)],
        "state": {},
    }


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    """Run the lifespan of an app around the block."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.create_task(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, incoming.get, outgoing.put)
    )
    await incoming.put({"type": "lifespan.startup"})
    await outgoing.get()
    try:
        yield
    finally:
        await incoming.put({"type": "lifespan.shutdown"})
        await outgoing.get()
        await task
