"""The admin server's app: the API for programs, pages for people, and what stands before both."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

import headgate
from headgate.adapters.asgi import HeadgateMiddleware
from headgate.control.admin.api import PREFIX, ROUTERS, Parts
from headgate.control.admin.idempotency import IdempotencyStore
from headgate.control.admin.middleware import (
    BodyLimit,
    Credentials,
    FailedAttempts,
    HostAndSecurityHeaders,
    access_policy,
    fields_for,
    is_stranger,
    who_asks,
)
from headgate.control.admin.problems import ProblemDetails, ProblemModel, of_error, of_fields
from headgate.control.admin.sessions import Sessions
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headgate.control.admin.tokens import Tokens
    from headgate.control.service.service import AdminService

__all__ = ["create_app"]

logger = logging.getLogger("headgate")

ABOUT = """
Everything that people do to a running fleet. Reads of the configuration carry its version as `ETag`; writes take it as
`If-Match`, and an `Idempotency-Key` with which they may be sent again. What goes wrong is told as
`application/problem+json`; `type` says what it is.
"""


def create_app(
    service: AdminService,
    tokens: Tokens,
    *,
    pages: bool = True,
    secure: bool = False,
    hosts: Collection[str] | None = None,
    proxies: Sequence[str] = (),
    clock: Any = None,
) -> FastAPI:
    """An ASGI app that serves this service to who has one of these tokens.

    `secure`: browsers reach it by HTTPS alone. `hosts`: the names that it is called by; None for any. `proxies`: whose
    word on a client's address is taken. `clock` is for tests of its own limits.
    """
    app = FastAPI(
        title="Headgate admin API",
        version=headgate.__version__,
        description=ABOUT,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.parts = Parts(service, tokens, IdempotencyStore(tokens))
    app.state.failures = FailedAttempts(proxies, clock=clock)
    app.state.credentials = credentials = Credentials(tokens)
    app.state.sessions = sessions = Sessions(tokens, secure=secure)
    app.add_exception_handler(HeadgateError, _of_headgate)
    app.add_exception_handler(RequestValidationError, _of_fields)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_anything)
    app.add_api_route("/health", _health, methods=["GET"], summary="Whether the server answers", tags=["server"])
    for router in ROUTERS:
        app.include_router(router, prefix=PREFIX)
    if pages:
        from headgate.control.admin.pages import PageRenderer
        from headgate.control.admin.pages import router as pages_router

        tokens.check_name = service.refuse_keys
        app.state.pages = renderer = PageRenderer(service, sessions, tokens, secure=secure)
        app.include_router(pages_router(renderer), include_in_schema=False)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign] # as FastAPI's docs want it
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit)
    app.add_middleware(
        HeadgateMiddleware,
        policy=access_policy(proxies),
        identities={"token": who_asks, "stranger": is_stranger},
        max_keys=100_000,
        namespace="headgate-admin",
        clock=clock,
    )
    app.add_middleware(HostAndSecurityHeaders, hosts=hosts, credentials=credentials, secure=secure)
    return app


def _health() -> dict[str, str]:
    return {"state": "ready"}


def _described(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            separate_input_output_schemas=False,
        )
        problem = ProblemModel.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = found["components"]["schemas"]
        schemas |= {**problem.pop("$defs"), "ProblemDetails": problem}
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        app.openapi_schema = found
    return app.openapi_schema


def _of_headgate(_: Request, error: Exception) -> Response:
    assert isinstance(error, HeadgateError)
    return of_error(error).response()


def _of_fields(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return of_fields(error.errors()).response()


def _of_http(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: paths that are none, methods, bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            return _told(request, ProblemDetails("not-found", "There is nothing at this path.", headers=headers))
        case 405:
            allowed = ", ".join(_methods(request))
            told = f"This path does not know the method. Use {allowed}."
            return _told(request, ProblemDetails("wrong-method", told, headers=headers | {"Allow": allowed}))
        case 400:
            return _told(request, ProblemDetails("bad-request", "The body cannot be read.", headers=headers))
    title = HTTPStatus(error.status_code).phrase
    return JSONResponse(
        {"type": "about:blank", "title": title, "status": error.status_code, "detail": title},
        error.status_code,
        headers,
        "application/problem+json",
    )


def _methods(request: Request) -> list[str]:
    """All that the path knows: each of them is a route of its own, and the framework tells of the first."""
    scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "HEAD", "POST", "PUT")}
    routes = request.app.routes
    return [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]


def _told(request: Request, problem: ProblemDetails) -> Response:
    """A page for who sits at a browser, which asks for one; else what programs read."""
    pages = getattr(request.app.state, "pages", None)
    is_for_programs = request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", "")
    if pages is None or is_for_programs:
        return problem.response()
    page: Response = pages.problem(request, problem)
    return page


def _of_anything(request: Request, error: Exception) -> Response:
    """A mistake of ours. This answer goes out above everything that adds header fields: it brings them along."""
    logger.error("the admin server failed on %s %s", request.method, _route(request), exc_info=error)
    response = ProblemDetails("failed", "The server's log says more.").response()
    for name, value in fields_for(request.url.path):
        response.headers[name.decode()] = value.decode()
    return response


def _route(request: Request) -> str:
    """The template and not the path, which may hold names."""
    return str(getattr(request.scope.get("route"), "path", "a path"))
