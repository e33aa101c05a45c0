"""Speaks ASGI to an app as a server does: requests by httpx, websockets and lifespans by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

Message = dict[str, Any]

PEER = "203.0.113.9"
DENIAL = "websocket.http.response"


def client(app: Any, *, ip: str = PEER) -> httpx.AsyncClient:
    """Sends requests to the app from that address."""
    transport = httpx.ASGITransport(app, client=(ip, 1234), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def ask(app: Any, *requests: tuple[str, str] | str, ip: str = PEER, **options: Any) -> list[httpx.Response]:
    """The answers to requests, method and path or path alone, that come one after another."""

    async def run() -> list[httpx.Response]:
        async with client(app, ip=ip) as http:
            pairs = [("GET", each) if isinstance(each, str) else each for each in requests]
            return [await http.request(method, path, **options) for method, path in pairs]

    return asyncio.run(run())


def statuses(answers: list[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in answers]


def scope(path: str = "/", kind: str = "http", **more: Any) -> dict[str, Any]:
    """What a server tells an app of a request or a websocket."""
    told: dict[str, Any] = {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http" if kind == "http" else "ws",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test")],
        "client": (PEER, 1234),
        "server": ("test", 80),
    }
    told |= {"method": "GET"} if kind == "http" else {"subprotocols": [], "extensions": {DENIAL: {}}}
    return told | more


async def talk(app: Any, told: dict[str, Any], *said: Message) -> list[Message]:
    """All that an app sends when a client says so and no more."""
    sent: list[Message] = []
    left = list(said)

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(told, receive, send)
    return sent


def knock(app: Any, path: str, **more: Any) -> list[Message]:
    """What an app sends to a websocket that connects and leaves again."""
    leaving = {"type": "websocket.disconnect", "code": 1000}
    return asyncio.run(talk(app, scope(path, "websocket", **more), {"type": "websocket.connect"}, leaving))


async def live(app: Any) -> list[Message]:
    """What an app sends when its server starts and ends."""
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    return await talk(app, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, *events)


def fields(message: Message) -> dict[str, str]:
    """The header fields of a message."""
    return {name.decode(): value.decode() for name, value in message["headers"]}
