"""aiohttp: a client middleware that paces and retries requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.clients.client import Outgoing, PoliteClient, Reply
from headgate.clients.drivers import run_async
from headgate.errors import name_missing_extra

with name_missing_extra("headgate.clients.aiohttp needs", "aiohttp", "aiohttp"):
    from aiohttp import ClientRequest, ClientResponse, payload

if TYPE_CHECKING:
    from typing import Unpack

    from aiohttp import ClientHandlerType, ClientMiddlewareType

    from headgate.clients.client import ClientOptions

__all__ = ["rate_limit_middleware"]


def rate_limit_middleware(
    *, client: PoliteClient | None = None, **options: Unpack[ClientOptions]
) -> ClientMiddlewareType:
    """A middleware for `aiohttp.ClientSession` that keeps to the rate limits that servers report.

        aiohttp.ClientSession(middlewares=[rate_limit_middleware(retries=3)])

    The options are those of `PoliteClient`; give `client` instead to share its state with other sessions. The session's
    total timeout includes the waits.
    """
    polite = PoliteClient(**options) if client is None else client

    async def middleware(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        async def send() -> Reply:
            response = await handler(request)
            return Reply(response.status, list(response.headers.items()), response)

        reply = await run_async(polite, polite.send(_outgoing(request)), send, lambda response: response.release())
        response: ClientResponse = reply.native
        return response

    return middleware


def _outgoing(request: ClientRequest) -> Outgoing:
    url = request.url
    can_replay = isinstance(request.body, bytes | payload.BytesPayload)
    return Outgoing(request.method, str(url.origin()), url.raw_path, request.headers, can_replay, request)
