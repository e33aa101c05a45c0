"""FastAPI: limits as dependencies of routes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from fastapi import HTTPException, Response
from starlette.requests import HTTPConnection  # noqa: TC002 - FastAPI reads the annotations of dependencies

from headgate.adapters.asgi import TRY_AGAIN_LATER, AsgiRequest, HeaderSend, refuse, run_lifespan, signed_in_user
from headgate.errors import InvalidConfiguration, Overloaded
from headgate.gate.admission import NOT_SERVED, UNLIMITED, Admission, current_admission, enter_context
from headgate.gate.gate import AsyncGate
from headgate.gate.options import check_options
from headgate.gate.view_limits import RATELIMIT_PREFIXES, LimitDeclaration
from headgate.policy.model import AnswerSettings, IdentitySettings, Policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from fastapi import FastAPI, Request, WebSocket

    from headgate.adapters.asgi import App, Receive, Scope, Send
    from headgate.gate.options import GateOptions
    from headgate.gate.responses import Header, Rejection
    from headgate.gate.view_limits import By
    from headgate.limits import Limit
    from headgate.policy.model import RouteMode

    Granted: TypeAlias = list[tuple[AsyncGate, Admission]]
    """Each with its gate: an app may have several."""

__all__ = ["FastAPILimits", "RateLimited", "admission"]

ADMISSIONS: Final = "headgate.admissions"
"""Key in the scope of the admissions that the dependencies of a request were granted."""

MOUNT: Final = "headgate.mount"  # key in the scope of the path that the app is mounted at


class RateLimited(HTTPException):
    """Raised by a dependency that refuses a request; `FastAPILimits.install` adds its exception handler."""

    def __init__(self, refusal: Rejection) -> None:
        self.refusal = refusal
        self.fields = [field for field in refusal.headers if not field[0].startswith(RATELIMIT_PREFIXES)]
        headers = {name.decode(): value.decode() for name, value in self.fields if not name.startswith(b"content-")}
        super().__init__(refusal.status, "request refused", headers)


class FastAPILimits:
    """Creates dependencies that admit or refuse requests. Create one per app and `install` it there.

    `store` and the options are those of `AsyncGate`; `identity`, `answers` and `on_failure` are the settings of these
    names in a policy. The functions in `identities` get a RequestInfo whose `native` is the request or the WebSocket.
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
        identity, answers = identity or IdentitySettings(), answers or AnswerSettings()
        policy = Policy(identity=identity, answers=answers, on_failure=on_failure)
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
        """A dependency: `Depends(limits.allow("10/minute", by="ip"))`. Several limits, in one string ("5/minute;
        100/hour") or several, are charged all or none.

        `by` is a kind of identity ("ip", "user", "tenant+user", "global"), or a function of the request, which may be
        asynchronous. A string counts each route separately; with a `name`, or as a `Limit`, which has one, all routes
        with that name share a counter.
        """
        declared = LimitDeclaration(*limits, by=by, name=name, cost=cost, count_when=count_when, on_failure=on_failure)
        declarations = (declared,)
        self.gate.compile_view(declarations, "a route")  # raises errors here, not in requests

        async def allowed(connection: HTTPConnection) -> Admission:
            admissions: Granted | None = connection.scope.get(ADMISSIONS)
            if admissions is None:
                raise InvalidConfiguration("limits are not installed: call limits.install(app) once")
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
        """Add the middleware and the exception handler to an app. Call it once, before the app starts."""
        app.add_exception_handler(RateLimited, _respond)  # type: ignore[arg-type]  # for both kinds of connection
        app.add_exception_handler(Overloaded, self._answer_overload)
        app.add_middleware(_LimitsMiddleware, limits=self)

    def _answer_overload(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Overloaded)
        refusal = self.gate.overloaded(error)
        response = Response(b"" if request.method == "HEAD" else refusal.body, refusal.status)
        response.raw_headers = list(refusal.headers)
        return response

    def headers(self, admissions: Granted, policy: Admission) -> list[Header]:
        """The merged header fields of the dependencies' admissions and of the policy's."""
        granted = [each for _, each in admissions]
        if not any(each.headers for each in granted):
            return []
        headers = self.gate.active_policy.headers_of([policy, *granted])
        policy.suppress_headers()
        return headers

    async def health_page(self, request: AsgiRequest) -> Rejection | None:
        """The response at `health_path`; None for all other paths."""
        is_health_path = self.health_path in (request.path, request.mounted_path)
        return (await self.gate.admit(request)).refusal if is_health_path else None


async def admission() -> Admission:
    """A dependency that returns the admission of the request: `Annotated[Admission, Depends(admission)]`."""
    return current_admission()


class _FastAPIRequest(AsgiRequest):
    """A request or a WebSocket at a route."""

    __slots__ = ()

    def __init__(self, connection: HTTPConnection) -> None:
        super().__init__(connection)  # type: ignore[arg-type]  # it reads like its scope

    @property
    def view(self) -> str:
        """The methods and the path template of the route."""
        scope: Any = self.native
        route = scope["route"]
        with suppress(KeyError):
            # In newer versions of FastAPI, only this has the prefix of an included router.
            found = scope["fastapi"]["effective_route_context"]
            route = getattr(found, "starlette_route", None) or found
        methods = getattr(route, "methods", None) or ["WEBSOCKET"]
        return f"{'|'.join(sorted(methods))} {scope[MOUNT]}{route.path_format}"

    @property
    def view_request(self) -> HTTPConnection:
        """The argument of functions given as `by`."""
        connection: HTTPConnection = self.native  # type: ignore[assignment]
        return connection


class _LimitsMiddleware:
    """Adds the header fields of the dependencies' admissions to responses, and finishes the admissions."""

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
        root: str = scope.get("root_path", "")  # the mount's path in the outermost app; empty with path parameters
        scope[MOUNT] = "" if scope.get("path_params") else root[len(scope.get("app_root_path", root)) :]
        policy_admission = current_admission()
        headers = partial(self._limits.headers, admissions, policy_admission)
        header_send = HeaderSend(send, policy_admission, partial(_finish, admissions), headers)
        try:
            await header_send.serve(self._app, scope, receive)
        finally:
            scope.pop(ADMISSIONS, None)  # servers keep the scope


async def _finish(admissions: Granted, status: int) -> None:
    for gate, each in admissions:
        await gate.finish(each, status)


async def _respond(connection: HTTPConnection, error: Exception) -> Response | None:
    """The response for a refusal, as `HeadgateMiddleware` sends it."""
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
