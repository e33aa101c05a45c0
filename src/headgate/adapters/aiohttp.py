"""aiohttp: applies a policy to an application and its sub-applications, and limits on handlers. See docs/aiohttp.md."""

from __future__ import annotations

from types import coroutine
from typing import TYPE_CHECKING, Any, Final, Unpack

from aiohttp import web

from headgate.adapters.asgi import finish_shielded
from headgate.errors import InvalidConfiguration, Overloaded
from headgate.gate.admission import UNLIMITED, Admission, enter_context
from headgate.gate.gate import AsyncGate
from headgate.gate.mounts import AppRoute
from headgate.gate.options import check_options
from headgate.gate.view_limits import ViewAdmissions, ViewLimit, ViewRequest, exempt, is_exempt, view_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from aiohttp.typedefs import Handler

    from headgate.gate.options import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.gate.view_limits import LimitDeclaration, View
    from headgate.policy.model import Policy

__all__ = ["ADMISSION", "AiohttpRequest", "exempt", "limit", "setup"]

_Key: Final[Any] = getattr(web, "RequestKey", lambda name, kind: name)  # older versions accept only strings

ADMISSION: Final[Any] = _Key("headgate", Admission)
"""Key of the `Admission` of a request: `request[ADMISSION]`."""
ADMISSIONS: Final[Any] = _Key("headgate.views", ViewAdmissions)


class AiohttpRequest:
    """An aiohttp request, which is its `native`."""

    __slots__ = ("method", "native", "path", "peer")
    mounted_path = None

    def __init__(self, request: web.Request) -> None:
        self.native = request
        self.method = request.method
        self.path = request.rel_url.path_safe  # as aiohttp routes it: an encoded slash does not end a segment
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
    """Apply a policy to an application, and close the store with it. Returns the gate.

    `policy` is a file path or a `Policy`; `store` and all other options are those of `AsyncGate`. Call it once, for the
    outermost application: the gate covers its sub-applications. Middlewares that were added before run first, as one
    that authenticates users must.
    """
    check_options("setup()", options)
    gate = gate or AsyncGate(policy, store, **options)

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_unlimited = is_exempt(request.match_info.handler)
        admission = UNLIMITED if is_unlimited else await gate.admit(AiohttpRequest(request))
        if admission.refusal is not None:
            return _response(admission.refusal.headers, admission.refusal)
        if admission is not UNLIMITED:
            request[ADMISSION] = admission
        admissions = request[ADMISSIONS] = ViewAdmissions(gate, admission)
        context = enter_context(admission)
        status = 500
        try:
            response = await handler(request)
            status = getattr(response, "status", 500)  # aiohttp reports a handler that returns None
        except web.HTTPException as error:
            status = error.status
            raise
        except Overloaded as error:
            refusal = gate.overloaded(error)
            status = refusal.status
            response = _response(refusal.headers, refusal)
        finally:
            context.var.reset(context)
            for each in admissions.unfinished():
                await finish_shielded(gate.finish(each, status))
        return response

    async def close(app: web.Application) -> None:
        await gate.close()

    async def warn(app: web.Application) -> None:
        gate.warn_of_mounts(list(_routes(app, ())))

    app.on_startup.append(warn)
    app.middlewares.append(admit)
    app.on_response_prepare.append(_add_headers)
    app.on_cleanup.append(close)
    return gate


def _routes(app: web.Application, mounts: tuple[str, ...]) -> Iterator[AppRoute]:
    """The routes of an application and of its sub-applications, with the prefixes of these."""
    for resource in app.router.resources():
        inner = getattr(resource, "_app", None)
        if isinstance(inner, web.Application):
            prefix = resource.canonical
            yield from _routes(inner, (*mounts, prefix) if prefix.startswith("/") else mounts)
        else:
            yield AppRoute(resource.canonical, mounts)


class AiohttpLimit(ViewLimit):
    """Decorator that limits a handler or a class of `web.View`: `@limit("5/minute")`.

    The parameters are those of `ViewLimit`. The application needs `setup(app, policy)`. A function given as `by` gets
    the request, and may be asynchronous.
    """

    dispatch_method = "__await__"

    def __call__(self, view: View) -> View:
        if not isinstance(view, type):
            return super().__call__(view)
        dispatch = getattr(view, self.dispatch_method)

        async def respond(instance: Any) -> Any:
            return await _await(dispatch(instance))

        guard = super().__call__(respond)
        setattr(view, self.dispatch_method, lambda instance: guard(instance).__await__())
        return view

    def guard(self, view: Any, declarations: tuple[LimitDeclaration, ...]) -> Any:
        name = getattr(view, "__qualname__", "view")

        async def guard(*args: Any, **kwargs: Any) -> Any:
            request: web.Request = getattr(args[-1], "request", args[-1])  # of a web.View, or the request itself
            admissions: ViewAdmissions | None = request.get(ADMISSIONS)
            if admissions is None:
                raise InvalidConfiguration(
                    "a handler has limits, but there is no gate: call setup(app, policy), with Policy() from "
                    "headgate.policy if there are no others"
                )
            handler = view_name(request.match_info.handler)
            info = ViewRequest(AiohttpRequest(request), f"{handler} {name}", request)
            refusal = (await admissions.gate.admit_to_view(info, declarations, admissions)).refusal
            if refusal is not None:
                return _response(admissions.refusal_headers(refusal), refusal)
            return await view(*args, **kwargs)

        return guard


limit = AiohttpLimit


@coroutine
def _await(iterator: Any) -> Any:
    """Makes the iterator that `__await__` has returned awaitable."""
    return (yield from iterator)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    admissions: ViewAdmissions | None = request.get(ADMISSIONS)
    if admissions is not None:
        for name, value in admissions.headers():
            response.headers[name.decode()] = value.decode()


def _response(fields: list[Header], refusal: Rejection) -> web.Response:
    headers = [(name.decode(), value.decode()) for name, value in fields if name != b"content-length"]
    return web.Response(status=refusal.status, headers=headers, body=refusal.body)
