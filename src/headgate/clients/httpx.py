"""httpx: transports that pace and retry requests, around any other transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.clients.client import Outgoing, PoliteClient, Reply
from headgate.clients.drivers import run, run_async
from headgate.errors import name_missing_extra

with name_missing_extra("headgate.clients.httpx needs", "httpx", "httpx"):
    import httpx

if TYPE_CHECKING:
    from typing import Unpack

    from headgate.clients.client import ClientOptions

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]


class RateLimitTransport(httpx.BaseTransport):
    """A transport for `httpx.Client` that keeps to the rate limits that servers report.

    `transport` sends the requests, `httpx.HTTPTransport()` by default. The options are those of `PoliteClient`; give
    `client` instead to share its state with other transports.

    >>> import httpx
    >>> server = httpx.MockTransport(lambda request: httpx.Response(200, headers={"X-RateLimit-Remaining": "5"}))
    >>> polite = RateLimitTransport(server, retries=3)
    >>> httpx.Client(transport=polite).get("https://api.example.com/").status_code
    200
    >>> polite.client.quotas("https://api.example.com")[0].remaining
    5
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        client: PoliteClient | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self.client = PoliteClient(**options) if client is None else client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        def send() -> Reply:
            return _reply(self._transport.handle_request(request))

        reply = run(self.client, self.client.send(_outgoing(request)), send, lambda response: response.close())
        response: httpx.Response = reply.native
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` that keeps to the rate limits that servers report.

    `transport` sends the requests, `httpx.AsyncHTTPTransport()` by default. The options are those of `PoliteClient`;
    give `client` instead to share its state with other transports.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        client: PoliteClient | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self.client = PoliteClient(**options) if client is None else client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> Reply:
            return _reply(await self._transport.handle_async_request(request))

        steps = self.client.send(_outgoing(request))
        reply = await run_async(self.client, steps, send, lambda response: response.aclose())
        response: httpx.Response = reply.native
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


def _outgoing(request: httpx.Request) -> Outgoing:
    url = request.url
    host = f"{url.scheme}://{url.netloc.decode('ascii')}"
    can_replay = isinstance(request.stream, httpx.ByteStream)
    return Outgoing(request.method, host, url.path, request.headers, can_replay, request)


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers.multi_items(), response)
