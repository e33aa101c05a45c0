"""FastAPI: limits that stand beside the routes they hold for, as dependencies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from fastapi import HTTPException, Response
from starlette.requests import HTTPConnection  # noqa: TC002 - FastAPI reads the annotations of dependencies

from headgate._grammar import suggest
from headgate.adapters.answers import Answers
from headgate.adapters.asgi import BODIES, TRY_AGAIN_LATER, AsgiArrival, live, refuse, serve, signed_in_user
from headgate.adapters.gate import AsyncGate
from headgate.adapters.way import FREE, Admission, current_admission, enter_context, leave_context
from headgate.errors import InvalidConfiguration, InvalidCost
from headgate.limits import Limit
from headgate.policy import words
from headgate.policy.model import AnswerSettings, IdentitySettings, Policy, Rule, StatusTest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from fastapi import FastAPI, WebSocket

    from headgate.adapters.answers import Header, Refusal
    from headgate.adapters.asgi import App, Message, Receive, Scope, Send
    from headgate.adapters.door import GateOptions
    from headgate.policy.model import RouteMode

    By: TypeAlias = str | Callable[[HTTPConnection], Any]

    Granted: TypeAlias = list[tuple[AsyncGate, Admission]]
    """Each with the gate that has granted it: an app may have several."""

__all__ = ["FastAPILimits", "Refused", "admission"]

ADMISSIONS: Final = "headgate.admissions"
"""Where a request's scope keeps those that its dependencies have got."""

MOUNT: Final = "headgate.mount"
"""Where it keeps the path that the app with its limits is mounted at."""

CALLER: Final = "headgate:caller"
ROUTE: Final = "headgate:route"
"""Identities that no app can mean by its own names: what the function of a dependency says, and the route."""

TOLD_FOR_ALL: Final = (b"x-ratelimit-", b"ratelimit")
"""How the names of fields start that are told once for all limits of a request."""

ANSWERED: Final = frozenset(range(1, 1000))
NOT_SERVED: Final = 0
"""The status of a request that another limit refused afterwards: no answer of the app's has it, so it is given back."""


class Refused(HTTPException):
    """Raised by a dependency for a request that may not pass. `FastAPILimits.install` lets it become the refusal."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.fields = [field for field in refusal.headers if not field[0].startswith(TOLD_FOR_ALL)]
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
        functions = {"user": signed_in_user, **(options.get("identities") or {})}
        self._kinds = ["ip", "subnet", "api_key", "client", "endpoint", *functions]
        self._policy = Policy(
            identity=identity or IdentitySettings(), answers=answers or AnswerSettings(), on_failure=on_failure
        )
        self._answers = Answers(self._policy.answers)
        functions |= {CALLER: lambda arrival: arrival.by(arrival.native), ROUTE: _route}
        options["identities"] = functions
        self.health_path = options.get("health_path")
        self.gate = AsyncGate(self._policy, store, **options)

    def allow(
        self,
        *limits: str | Limit,
        by: By = "ip",
        name: str | None = None,
        cost: int = 1,
        count_when: str | None = None,
        on_failure: RouteMode | None = None,
    ) -> Callable[[HTTPConnection], Awaitable[Admission]]:
        """A dependency: `Depends(limits.allow("10/minute", by="ip"))`. Several limits are charged all or none.

        `by` is a kind of identity ("ip", "user", "tenant+user", "global"), or a function of the request, which may be
        asynchronous. A text counts each route for itself; with a `name`, or as a `Limit`, which has one, it counts all
        routes together that use the name.
        """
        if type(cost) is not int or cost < 1:
            raise InvalidCost(f"cost {cost!r} is not a whole number >= 1; a route that costs nothing needs no limit")
        kinds = self._checked_kinds(by)
        test = None if count_when is None else words.status_test(count_when)
        word = by if isinstance(by, str) else getattr(by, "__name__", "caller")
        rules = []
        for given in limits:
            if isinstance(given, Limit):
                limit, counted = given, kinds
            elif name is None:
                limit, counted = Limit.parse(given, name=f"{given} by {word}"), (ROUTE, *kinds)
            else:
                limit, counted = Limit.parse(given, name=name if len(limits) == 1 else f"{name} {given}"), kinds
            rules.append(
                Rule(limit.name, limit, counted, cost=cost, count_when=_counted(limit, test), on_failure=on_failure)
            )
        names = [rule.name for rule in rules]
        if not names or len(set(names)) < len(names):
            raise InvalidConfiguration(f"allow() takes one or more limits, each of its own name, but got {names}")
        made = self.gate.made(replace(self._policy, rules=tuple(rules)))

        async def allowed(connection: HTTPConnection) -> Admission:
            admissions: Granted | None = connection.scope.get(ADMISSIONS)
            if admissions is None:
                raise InvalidConfiguration("the app does not know its limits: call limits.install(app) once")
            admission = await self.gate.admit(_FastapiArrival(connection, by), made)
            if admission.refusal is not None:
                for gate, earlier in admissions:
                    await gate.finish(earlier, NOT_SERVED)
                admissions[:] = [(self.gate, admission)]
                raise Refused(admission.refusal)
            if admission is not FREE:
                admissions.append((self.gate, admission))
                if current_admission() is FREE:
                    enter_context(admission)
            return admission

        return allowed

    def install(self, app: FastAPI) -> None:
        """Let the app send refusals and header fields, and close the store when it ends. Once, before it starts."""
        app.add_exception_handler(Refused, _answer)  # type: ignore[arg-type]  # for both kinds of connection
        app.add_middleware(_Layer, limits=self)

    def headers(self, admissions: Granted, policy: Admission) -> list[Header]:
        """The fields for all admissions of a request, and for what a policy has granted before, as if they were one."""
        granted = [each for _, each in admissions]
        if not any(each.headers for each in granted):
            return []
        told = [each for each in (policy, *granted) if each.headers]
        if len(told) == 1:
            return told[0].headers
        policy.hush()
        decisions = [each.decision for each in told if each.decision is not None]
        rules = [rule for each in told if each.resolution is not None for rule in each.resolution.rules]
        description = self._answers.describe(
            [key.limit for decision in decisions for key in decision.keys], [rule.rule.unit for rule in rules]
        )
        return description.headers([each for decision in decisions for each in decision.verdicts], decisions[-1].at_us)

    async def health_page(self, arrival: AsgiArrival) -> Refusal | None:
        """What is answered at `health_path`, where no dependency is asked; None at every other path."""
        is_there = self.health_path in (arrival.path, arrival.below)
        return (await self.gate.admit(arrival)).refusal if is_there else None

    def _checked_kinds(self, by: By) -> tuple[str, ...]:
        if not isinstance(by, str):
            return (CALLER,)
        kinds = words.by(by)
        for kind in kinds:
            if kind not in self._kinds:
                hint = suggest(kind, self._kinds)
                raise InvalidConfiguration(
                    f"nobody says who the {kind!r} of a request is: give identities={{{kind!r}: function}}, or {hint}"
                )
        return tuple(ROUTE if kind == "endpoint" else kind for kind in kinds)


async def admission() -> Admission:
    """A dependency that gives how the request was let in: `Annotated[Admission, Depends(admission)]`."""
    return current_admission()


class _FastapiArrival(AsgiArrival):
    """A request or a websocket on its way to a route."""

    __slots__ = ("by",)

    def __init__(self, connection: HTTPConnection, by: By) -> None:
        super().__init__(connection)  # type: ignore[arg-type]  # it reads like its scope
        self.by = by


class _Layer:
    """The middleware around the app's routes that tells, settles and leaves what their dependencies were granted."""

    def __init__(self, app: App, limits: FastAPILimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await live(self._app, scope, receive, send, self._limits.gate)
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        if self._limits.health_path is not None:
            page = await self._limits.health_page(AsgiArrival(scope))
            if page is not None:
                return await refuse(page, scope, receive, send)
        admissions: Granted = []
        scope[ADMISSIONS] = admissions
        scope[MOUNT] = _mount(scope)
        context = enter_context(current_admission())

        async def leaving_send(message: Message) -> None:
            """Not with what the dependencies were granted in the context, for the reason that `TellingSend` gives."""
            nonlocal context
            if message["type"] not in BODIES or message.get("more_body", False):
                return await send(message)
            admission = current_admission()
            leave_context(context)
            try:
                return await send(message)
            finally:
                context = enter_context(admission)

        try:
            headers = partial(self._limits.headers, admissions, current_admission())
            return await serve(self._app, scope, receive, leaving_send, partial(_finish, admissions), headers)
        finally:
            leave_context(context)
            scope.pop(ADMISSIONS, None)  # servers keep the scope, too


async def _finish(admissions: Granted, status: int) -> None:
    """The answer is out."""
    for gate, each in admissions:
        await gate.finish(each, status)


async def _answer(connection: HTTPConnection, error: Exception) -> Response | None:
    """The refusal, the same that the middleware would have sent."""
    assert isinstance(error, Refused)
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


def _counted(limit: Limit, test: StatusTest | None) -> StatusTest | None:
    """Every answer of the app counts, or those that were named; but never a request that was not served."""
    if limit.algorithm != "concurrency":
        return test or StatusTest("any answer", ANSWERED)
    if test is not None:
        raise InvalidConfiguration(f"limit {limit.name!r} counts leases, which end with the answer: no count_when")
    return None


def _route(arrival: AsgiArrival) -> str:
    """The methods and the template of the route that was found, never the URL itself."""
    scope: Any = arrival.native
    route = scope["route"]
    with suppress(KeyError):
        # In newer versions of FastAPI, a route of an included router does not know its prefix, but this does.
        found = scope["fastapi"]["effective_route_context"]
        route = getattr(found, "starlette_route", None) or found
    methods = getattr(route, "methods", None) or ["WEBSOCKET"]
    return f"{'|'.join(sorted(methods))} {scope[MOUNT]}{route.path_format}"


def _mount(scope: Scope) -> str:
    """Where in the outermost app this one is mounted; nothing for a template: only the client's path is known."""
    root: str = scope.get("root_path", "")
    return "" if scope.get("path_params") else root[len(scope.get("app_root_path", root)) :]
