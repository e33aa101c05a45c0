"""aiohttp: every request of an application and its sub-applications, streams and websockets included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Unpack

from aiohttp import web

from headgate.adapters.asgi import whatever_happens
from headgate.adapters.gate import AsyncGate
from headgate.adapters.way import FREE, Admission, enter_context

if TYPE_CHECKING:
    from os import PathLike

    from aiohttp.typedefs import Handler

    from headgate.adapters.answers import Refusal
    from headgate.adapters.door import GateOptions
    from headgate.policy.model import Policy

__all__ = ["ADMISSION", "AiohttpArrival", "setup"]

ADMISSION: Final[Any] = web.RequestKey("headgate", Admission) if hasattr(web, "RequestKey") else "headgate"
"""Where a request keeps how it was let in: `request[ADMISSION]`. Older versions of aiohttp know only texts as keys."""


class AiohttpArrival:
    """A request. `native` is aiohttp's own."""

    __slots__ = ("method", "native", "path", "peer")
    below = None

    def __init__(self, request: web.Request) -> None:
        self.native = request
        self.method = request.method
        self.path = request.rel_url.path_safe  # what routes are found by: an encoded slash ends no segment
        self.peer = request.remote

    def header(self, name: str) -> list[str]:
        """The values of all lines of a header."""
        return self.native.headers.getall(name, [])


def setup(
    app: web.Application,
    policy: Policy | str | PathLike[str] | None = None,
    store: Any = "memory://",
    *,
    gate: AsyncGate | None = None,
    **options: Unpack[GateOptions],
) -> AsyncGate:
    """Put a policy in front of an application, and close the store at its end. Returns the gate.

    `policy` is a file, or a `Policy`; `store` and all other options are those of `AsyncGate`. Call it once, for the
    application that is run: its sub-applications are behind the same gate. Middlewares that were added before stand
    outside of it, so a middleware that signs users in comes first.
    """
    if gate is None:
        gate = AsyncGate(policy, store, **options)
    door = gate

    @web.middleware
    async def pass_the_gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        admission = await door.admit(AiohttpArrival(request))
        if admission.refusal is not None:
            return _response(admission.refusal)
        if admission is FREE:
            return await handler(request)
        request[ADMISSION] = admission
        context = enter_context(admission)
        status = 500
        try:
            response = await handler(request)
            status = getattr(response, "status", 500)  # a handler may give nothing, of which aiohttp itself tells
        except web.HTTPException as answer:
            status = answer.status
            raise
        finally:
            context.var.reset(context)
            if not admission.is_over:
                await whatever_happens(door.finish(admission, status))
        return response

    async def close(app: web.Application) -> None:
        await door.close()

    app.middlewares.append(pass_the_gate)
    app.on_response_prepare.append(_add_headers)
    app.on_cleanup.append(close)
    return gate


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    admission = request.get(ADMISSION)
    if admission is not None:
        for name, value in admission.headers:
            response.headers[name.decode()] = value.decode()


def _response(refusal: Refusal) -> web.Response:
    headers = [(name.decode(), value.decode()) for name, value in refusal.headers if name != b"content-length"]
    return web.Response(status=refusal.status, headers=headers, body=refusal.body)
