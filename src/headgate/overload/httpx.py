"""httpx: transports whose guard admits or sheds requests, around any other transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.errors import name_missing_extra

with name_missing_extra("headgate.overload.httpx needs", "httpx", "httpx"):
    import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from headgate.overload.guard import Guard, PrioritySource
    from headgate.overload.load_shedder import Permit

__all__ = ["AsyncGuardedTransport", "GuardedTransport"]

OVERLOAD_STATUSES: Final = frozenset({429, 503, 504})
"""Statuses by which the server says that it has no capacity."""
TIMEOUTS: Final = (httpx.TimeoutException,)


class GuardedTransport(httpx.BaseTransport):
    """A transport for `httpx.Client` whose `guard` admits or sheds requests, by raising `Overloaded`.

    `transport` sends the requests, `httpx.HTTPTransport()` by default. A request lasts until its response is closed.
    Timeouts and the statuses 429, 503 and 504 lower the limit; the latency of other failures is ignored.
    """

    def __init__(
        self, guard: Guard, transport: httpx.BaseTransport | None = None, *, priority: PrioritySource = "normal"
    ) -> None:
        self.guard, self._priority = guard, priority
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        permit = self.guard.acquire(self._priority)
        try:
            response = self._transport.handle_request(request)
        except BaseException as error:
            self.guard.release(permit, error, drops=TIMEOUTS)
            raise
        if response.is_closed:
            _release(permit, response.status_code)
        else:
            assert isinstance(response.stream, httpx.SyncByteStream)
            response.stream = _GuardedStream(response.stream, response.status_code, permit)
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncGuardedTransport(httpx.AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` whose `guard` admits or sheds requests, as `GuardedTransport` does."""

    def __init__(
        self, guard: Guard, transport: httpx.AsyncBaseTransport | None = None, *, priority: PrioritySource = "normal"
    ) -> None:
        self.guard, self._priority = guard, priority
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        permit = self.guard.acquire(self._priority)
        try:
            response = await self._transport.handle_async_request(request)
        except BaseException as error:
            self.guard.release(permit, error, drops=TIMEOUTS)
            raise
        if response.is_closed:
            _release(permit, response.status_code)
        else:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _AsyncGuardedStream(response.stream, response.status_code, permit)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _GuardedStream(httpx.SyncByteStream):
    """The body of a response, which ends the call when it is closed."""

    def __init__(self, stream: httpx.SyncByteStream, status: int, permit: Permit) -> None:
        self._stream, self._status, self._permit = stream, status, permit

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            _release(self._permit, self._status)


class _AsyncGuardedStream(httpx.AsyncByteStream):
    """The body of a response, which ends the call when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, status: int, permit: Permit) -> None:
        self._stream, self._status, self._permit = stream, status, permit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            _release(self._permit, self._status)


def _release(permit: Permit, status: int) -> None:
    permit.release("dropped" if status in OVERLOAD_STATUSES else "ok" if status < 400 else "ignored")
