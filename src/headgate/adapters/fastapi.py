"""FastAPI: limits that stand beside the routes they hold for, as dependencies."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from fastapi import HTTPException, Response
from starlette.requests import HTTPConnection  # noqa: TC002 - FastAPI reads the annotations of dependencies

from headgate.adapters.asgi import TRY_AGAIN_LATER, AsgiRequest, HeaderSend, refuse, run_lifespan, signed_in_user
from headgate.errors import InvalidConfiguration
from headgate.gate.admission import NOT_SERVED, UNLIMITED, Admission, current_admission, enter_context
from headgate.gate.base import check_options
from headgate.gate.gate import AsyncGate
from headgate.gate.view_limits import RATELIMIT_PREFIXES, LimitDeclaration
from headgate.policy.model import AnswerSettings, IdentitySettings, Policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from fastapi import FastAPI, WebSocket

    from headgate.adapters.asgi import App, Receive, Scope, Send
    from headgate.gate.base import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.gate.view_limits import By
    from headgate.limits import Limit
    from headgate.policy.model import RouteMode

    Granted: TypeAlias = list[tuple[AsyncGate, Admission]]
    """Each with the gate that has granted it: an app may have several."""

__all__ = ["FastAPILimits", "RateLimited", "admission"]

ADMISSIONS: Final = "headgate.admissions"
"""Where a request's scope keeps those that its dependencies have got."""

MOUNT: Final = "headgate.mount"
"""Where it keeps the path that the app with its limits is mounted at."""


class RateLimited(HTTPException):
    """Raised by a dependency for a request that may not pass. `FastAPILimits.install` lets it become the refusal."""

    def __init__(self, refusal: Rejection) -> None:
        self.refusal = refusal
        self.fields = [field for field in refusal.headers if not field[0].startswith(RATELIMIT_PREFIXES)]
        headers = {name.decode(): value.decode() for name, value in self.fields if not name.startswith(b"content-")}
        super().__init__(refusal.status, "this request may not pass now", headers)


class FastAPILimits:
    """Makes dependencies that let a request pass, or refuse it. One for an app; `install` it there.

    `store` and the options are those of `AsyncGate`; `identity`, `answers` and `on_failure` are what a policy would say
    under these names. The functions in `identities` get an arrival whose `native` is the request or the websocket.
    """

    def __init__(
        self,
        store: Any = "memory://",
        *,
        identity: IdentitySettings | None = None,
        answers: AnswerSettings | None = None,
        on_failure: RouteMode = "open",
        **options: Unpack[GateOptions],
    ) -> None:
        check_options(type(self).__name__, options)
        policy = Policy(
            identity=identity or IdentitySettings(), answers=answers or AnswerSettings(), on_failure=on_failure
        )
        options["identities"] = {"user": signed_in_user, **(options.get("identities") or {})}
        self.health_path = options.get("health_path")
        self.gate = AsyncGate(policy, store, **options)

    def allow(
        self,
        *limits: str | Limit,
        by: By = "ip",
        name: str | None = None,
        cost: int = 1,
        count_when: str | None = None,
        on_failure: RouteMode | None = None,
    ) -> Callable[[HTTPConnection], Awaitable[Admission]]:
        """A dependency: `Depends(limits.allow("10/minute", by="ip"))`. Several limits, as several texts or in one
        ("5/minute; 100/hour"), are charged all or none.

        `by` is a kind of identity ("ip", "user", "tenant+user", "global"), or a function of the request, which may be
        asynchronous. A text counts each route for itself; with a `name`, or as a `Limit`, which has one, it counts all
        routes together that use the name.
        """
        declaration = LimitDeclaration(
            limits, by=by, name=name, cost=cost, count_when=count_when, on_failure=on_failure
        )
        declarations = (declaration,)
        self.gate.compile_view(declarations, "a route")  # raises errors here, not in requests

        async def allowed(connection: HTTPConnection) -> Admission:
            admissions: Granted | None = connection.scope.get(ADMISSIONS)
            if admissions is None:
                raise InvalidConfiguration("the app does not know its limits: call limits.install(app) once")
            request = _FastAPIRequest(connection)
            admission = await self.gate.admit(request, self.gate.view_policy(declarations, request.view))
            if admission.refusal is not None:
                for gate, earlier in admissions:
                    await gate.finish(earlier, NOT_SERVED)
                admissions[:] = [(self.gate, admission)]
                raise RateLimited(admission.refusal)
            if admission is not UNLIMITED:
                admissions.append((self.gate, admission))
                if current_admission() is UNLIMITED:
                    enter_context(admission)
            return admission

        return allowed

    def install(self, app: FastAPI) -> None:
        """Let the app send refusals and header fields, and close the store when it ends. Once, before it starts."""
        app.add_exception_handler(RateLimited, _answer)  # type: ignore[arg-type]  # for both kinds of connection
        app.add_middleware(_LimitsMiddleware, limits=self)

    def headers(self, admissions: Granted, policy: Admission) -> list[Header]:
        """The fields for all admissions of a request, and for what a policy has granted before, as if they were one."""
        granted = [each for _, each in admissions]
        if not any(each.headers for each in granted):
            return []
        headers = self.gate.active_policy.headers_of([policy, *granted])
        policy.suppress_headers()
        return headers

    async def health_page(self, arrival: AsgiRequest) -> Rejection | None:
        """What is answered at `health_path`, where no dependency is asked; None at every other path."""
        is_there = self.health_path in (arrival.path, arrival.mounted_path)
        return (await self.gate.admit(arrival)).refusal if is_there else None


async def admission() -> Admission:
    """A dependency that gives how the request was let in: `Annotated[Admission, Depends(admission)]`."""
    return current_admission()


class _FastAPIRequest(AsgiRequest):
    """A request or a websocket on its way to a route."""

    __slots__ = ()

    def __init__(self, connection: HTTPConnection) -> None:
        super().__init__(connection)  # type: ignore[arg-type]  # it reads like its scope

    @property
    def view(self) -> str:
        """The methods and the template of the route that was found, never the URL itself."""
        scope: Any = self.native
        route = scope["route"]
        with suppress(KeyError):
            # In newer versions of FastAPI, a route of an included router does not know its prefix, but this does.
            found = scope["fastapi"]["effective_route_context"]
            route = getattr(found, "starlette_route", None) or found
        methods = getattr(route, "methods", None) or ["WEBSOCKET"]
        return f"{'|'.join(sorted(methods))} {scope[MOUNT]}{route.path_format}"

    @property
    def view_request(self) -> HTTPConnection:
        """What functions that say who is counted are given."""
        connection: HTTPConnection = self.native  # type: ignore[assignment]
        return connection


class _LimitsMiddleware:
    """The middleware around the app's routes that tells, settles and leaves what their dependencies were granted."""

    def __init__(self, app: App, limits: FastAPILimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await run_lifespan(self._app, scope, receive, send, self._limits.gate)
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        if self._limits.health_path is not None:
            page = await self._limits.health_page(AsgiRequest(scope))
            if page is not None:
                return await refuse(page, scope, receive, send)
        admissions: Granted = []
        scope[ADMISSIONS] = admissions
        scope[MOUNT] = _mount(scope)
        policy_admission = current_admission()
        headers = partial(self._limits.headers, admissions, policy_admission)
        try:
            await HeaderSend(send, policy_admission, partial(_finish, admissions), headers).serve(
                self._app, scope, receive
            )
        finally:
            scope.pop(ADMISSIONS, None)  # servers keep the scope


async def _finish(admissions: Granted, status: int) -> None:
    """The answer is out."""
    for gate, each in admissions:
        await gate.finish(each, status)


async def _answer(connection: HTTPConnection, error: Exception) -> Response | None:
    """The refusal, the same that the middleware would have sent."""
    assert isinstance(error, RateLimited)
    refusal = error.refusal
    body = b"" if connection.scope.get("method") == "HEAD" else refusal.body
    response = Response(body, refusal.status)
    response.raw_headers = list(error.fields)
    if connection.scope["type"] == "http":
        return response
    websocket: WebSocket = connection  # type: ignore[assignment]
    if "websocket.http.response" in (connection.scope.get("extensions") or ()):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(TRY_AGAIN_LATER)
    return None


def _mount(scope: Scope) -> str:
    """Where in the outermost app this one is mounted; nothing for a template: only the client's path is known."""
    root: str = scope.get("root_path", "")
    return "" if scope.get("path_params") else root[len(scope.get("app_root_path", root)) :]
